"""A new chapter from the template: it executes, rules, renders and is tested as it stands."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

import yaml

from ..notebooks import NotebookError

#: Template file → its place, relative to the root (``SLUG`` stands for the chapter's name).
PLACES = {
    "theory.md": "book/chapters/SLUG/theory.md",
    "experiments.md": "book/chapters/SLUG/experiments.md",
    "claims.yml": "book/chapters/SLUG/claims.yml",
    "paper.yml": "book/chapters/SLUG/paper.yml",
    "api.md": "book/api/SLUG.md",
    "package.py.txt": "src/proofread/SLUG/__init__.py",
    "sampling.py.txt": "src/proofread/SLUG/sampling.py",
    "test_sampling.py.txt": "tests/SLUG/test_SLUG_sampling.py",
}

STEMS = ("theory", "experiments")


def create_chapter(root: Path, slug: str) -> list[str]:
    """Write a chapter's files and its entries in ``_toc.yml``; return the paths written.

    Raises:
        NotebookError: the name is no snake_case identifier, or a file is already there.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", slug) or keyword.iskeyword(slug):
        raise NotebookError(f"{slug!r} is no chapter name: use snake_case, such as 'linear_core'")
    places = {name: root / place.replace("SLUG", slug) for name, place in PLACES.items()}
    package = root / "src" / "proofread"
    taken = [package / slug, package / f"{slug}.py", root / "tests" / slug, *places.values()]
    if there := [path for path in taken if path.exists()]:
        raise NotebookError(f"{there[0].relative_to(root)} is already there: choose another name")
    if slug in sys.stdlib_module_names or len(slug) > 40:
        raise NotebookError(f"{slug!r} is a module of Python's own, or too long: choose another")
    for name, path in places.items():
        text = (Path(__file__).parent / "chapter" / name).read_text("utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text.replace("SLUG", slug).replace("ANCHOR", slug.replace("_", "-")), "utf-8"
        )
    _add_to_contents(root / "_toc.yml", slug)
    return [path.relative_to(root).as_posix() for path in places.values()] + ["_toc.yml"]


def _add_to_contents(path: Path, slug: str) -> None:
    contents = yaml.safe_load(path.read_text("utf-8"))
    part = next((p for p in contents["parts"] if p.get("caption") == "Chapters"), None)
    if part is None:
        part = {"caption": "Chapters", "chapters": []}
        contents["parts"].append(part)
    theory, experiments = ({"file": f"book/chapters/{slug}/{stem}"} for stem in STEMS)
    part["chapters"] = [*(part.get("chapters") or []), theory | {"sections": [experiments]}]
    reference = next((p for p in contents["parts"] if p.get("caption") == "Reference"), None)
    if reference is None:
        reference = {"caption": "Reference", "chapters": []}
        contents["parts"].append(reference)
    reference["chapters"].append({"file": f"book/api/{slug}"})
    path.write_text(yaml.safe_dump(contents, sort_keys=False), "utf-8")
