"""Small tables for notebooks: HTML in the book, aligned text in a terminal, the same numbers."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """Columns, rows of ready-made text, and a note that names data, tier and size.

    Args:
        columns: one heading a column.
        rows: one sequence a row; entries are shown with ``str``.
        note: shown under the table; say where the numbers come from.

    Raises:
        ValueError: a row with another number of entries than there are columns.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {list(row)} has {len(row)} entries, not {len(self.columns)}")

    def __repr__(self) -> str:
        lines = [[str(entry) for entry in row] for row in (self.columns, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*text, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(str(c))}</th>' for c in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(e))}</td>" for e in row) + "</tr>"
            for row in self.rows
        )
        note = f"<p class='pr-note'>{html.escape(self.note)}</p>" if self.note else ""
        return (
            f"<div class='pr-table'><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>{note}</div>"
        )
