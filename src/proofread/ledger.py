"""The ledger: every claim of every chapter with the verdict found in its executed pairs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .claims import MIME, Claim, ClaimsFile, load_claims, rejudge
from .notebooks import Notebook, NotebookError, books, find_root, read_pair, stamp_of


@dataclass(frozen=True)
class Entry:
    """One claim, its verdict, and where it was ruled (``None`` while it is planned)."""

    slug: str
    claim: Claim
    verdict: str
    notebook: str | None = None
    record: dict[str, Any] | None = None

    @property
    def ref(self) -> str:
        return f"{self.slug}/{self.claim.id}"

    @property
    def anchor(self) -> str:
        return f"claim-{self.slug.replace('_', '-')}-{self.claim.id}"

    def measured(self) -> str:
        """The recorded value with its interval and unit; empty while there is none."""
        if self.record is None:
            return ""
        value, low, high = (float(self.record[key]) for key in ("value", "low", "high"))
        interval = "" if low == high else f" [{low:g}, {high:g}]"
        return f"{value:g}{interval} ({self.record['unit']})"


@dataclass(frozen=True)
class Chapter:
    """A chapter's claims file and its entries."""

    slug: str
    file: ClaimsFile
    entries: list[Entry]
    commits: dict[str, str] = field(default_factory=dict)


def rulings(notebook: Notebook) -> Iterator[dict[str, Any]]:
    """The records that ``rule`` left in a notebook's executed pair."""
    if not notebook.pair.is_file():
        return
    for cell in read_pair(notebook.pair).cells:
        for out in cell.get("outputs", []):
            if MIME in out.get("data", {}):
                yield out["data"][MIME]


def chapters(root: Path, slug: str | None = None) -> list[Chapter]:
    """The ledger of every chapter, or of one.

    Raises:
        NotebookError: no such chapter.
        ClaimError: a ``claims.yml`` breaks the schema.
    """
    notebooks = books(root, slug)
    slugs = sorted({notebook.slug for notebook in notebooks})
    return [_chapter([nb for nb in notebooks if nb.slug == name]) for name in slugs]


def _chapter(notebooks: list[Notebook]) -> Chapter:
    file = load_claims(notebooks[0].claims)
    found = {}
    commits = {}
    for notebook in notebooks:
        for record in rulings(notebook):
            found[record["claim"]] = (notebook.stem, record)
        if notebook.pair.is_file():
            commits[notebook.stem] = stamp_of(read_pair(notebook.pair)).get("claims_commit", "")
    slug = notebooks[0].slug
    return Chapter(slug, file, [_entry(slug, claim, found) for claim in file.claims], commits)


def _entry(slug: str, claim: Claim, found: dict[str, tuple[str, dict[str, Any]]]) -> Entry:
    if claim.needs:
        return Entry(slug, claim, "blocked")
    stem, record = found.get(f"{slug}/{claim.id}", (None, None))
    if record is None:
        return Entry(slug, claim, "planned")
    verdict, reason = rejudge(claim, record)
    return Entry(slug, claim, verdict, stem, record | {"verdict": verdict, "reason": reason})


def as_json(ledger: list[Chapter]) -> list[dict[str, Any]]:
    """The ledger as plain data, one object a claim: what ``_build/claims.json`` holds."""
    return [
        {
            "claim": entry.ref,
            "paper": chapter.file.paper.model_dump(),
            **_rules(entry.claim),
            "verdict": entry.verdict,
            "notebook": entry.notebook,
            "rules_commit": chapter.commits.get(entry.notebook or ""),
            "result": entry.record,
        }
        for chapter in ledger
        for entry in chapter.entries
    ]


def _rules(claim: Claim) -> dict[str, Any]:
    """The claim's fields as plain data; intervals in words, since JSON knows no infinity."""
    plain = claim.model_dump(exclude={"id", "accept", "refute", "control"})
    for side in ("accept", "refute"):
        interval = getattr(claim, side)
        plain[side] = None if interval is None else str(interval)
    controls = claim.control.items()
    plain["control"] = {k: {"change": c.change, "expect": str(c.expect)} for k, c in controls}
    return plain


def as_text(ledger: list[Chapter]) -> str:
    """The ledger as JSON text, strictly valid."""
    return json.dumps(as_json(ledger), indent=1, ensure_ascii=False, allow_nan=False)


def write_json(root: Path | None = None) -> Path:
    """Write ``_build/claims.json`` (by a rename) and return its path."""
    root = root or find_root()
    path = root / "_build" / "claims.json"
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.part")
    scratch.write_text(as_text(chapters(root)) + "\n", encoding="utf-8")
    os.replace(scratch, path)
    return path


__all__ = [
    "Chapter",
    "Entry",
    "NotebookError",
    "as_json",
    "as_text",
    "chapters",
    "rulings",
    "write_json",
]
