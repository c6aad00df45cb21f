"""A small book made from the chapter template: executed once, copied for each test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Book:
    """A checkout with one chapter, ``demo``."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "book" / "chapters" / "demo"

    def call(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``python …`` in the book's root with the book's own package."""
        env = os.environ | {"PYTHONPATH": str(self.root / "src")} | environment
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    def proofread(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call("-m", "proofread.cli", *arguments)

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=self.root, capture_output=True, text=True, check=True
        )
        return done.stdout

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace text that must be there."""
        path = self.root / name
        text = path.read_text("utf-8")
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new), "utf-8")

    def edit_pair(
        self, stem: str, change: Callable[[dict[str, Any]], None], *, restamp: bool = False
    ) -> None:
        """Change a pair's JSON; ``restamp`` forges the output hash, as a careful cheat would."""
        from proofread import notebooks

        path = self.folder / f"{stem}.ipynb"
        pair = json.loads(path.read_text("utf-8"))
        change(pair)
        path.write_text(json.dumps(pair, indent=1, ensure_ascii=False) + "\n", "utf-8")
        if restamp:
            read = notebooks.read_pair(path)
            digest = notebooks.outputs_digest(read)
            read.metadata["proofread"]["fingerprint"]["outputs"] = digest
            notebooks.write_pair(read, path)

    def problems(self) -> str:
        """What ``proofread check`` says; it must fail."""
        done = self.proofread("check")
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout


CONTENTS = """format: jb-book
root: book/intro
parts:
- caption: Read
  chapters:
  - file: book/claims
"""


def _copy_house(root: Path) -> None:
    """This repository's machinery and configuration, with two pages and no chapter."""
    ignore = shutil.ignore_patterns("__pycache__", "linear_core", "*.egg-info")
    for name in ("src", "profiles", "book/_static"):
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    names = ("_config.yml", "requirements.txt", "Snakefile", ".gitignore", ".gitattributes")
    for name in (*names, "book/references.bib"):
        shutil.copy(ROOT / name, root / name)
    (root / "book" / "chapters").mkdir()
    (root / "_toc.yml").write_text(CONTENTS)
    (root / "book" / "intro.md").write_text("# Small\n\n```{claims}\n:view: matrix\n```\n")
    (root / "book" / "claims.md").write_text("# Claims\n\n```{claims}\n```\n")


@pytest.fixture(scope="session")
def executed_book(tmp_path_factory: pytest.TempPathFactory) -> Book:
    """The template chapter, created by the command, committed and executed."""
    book = Book(tmp_path_factory.mktemp("house") / "checkout")
    _copy_house(book.root)
    book.git("init", "-q", "-b", "main")
    made = book.proofread("new", "demo")
    assert made.returncode == 0, made.stderr
    book.git("add", "-A")
    book.git("commit", "-qm", "a chapter and its rules")
    done = book.proofread("run", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    book.git("add", "-A")
    book.git("commit", "-qm", "its results")
    return book


@pytest.fixture
def book(executed_book: Book, tmp_path: Path) -> Book:
    """A copy of the executed book to break."""
    shutil.copytree(executed_book.root, tmp_path / "checkout", symlinks=True)
    return Book(tmp_path / "checkout")
