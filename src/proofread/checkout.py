"""Where a file of the book lies: in a checkout above the working folder, or this package's own."""

from __future__ import annotations

from pathlib import Path


def find_in_checkout(relative: str, start: Path | None = None) -> Path:
    """The file or folder ``relative`` under the nearest folder above ``start`` that has it.

    Looks in ``start`` (default: the working folder) and the folders above it, then in the checkout
    that this package was installed from.

    Raises:
        FileNotFoundError: nowhere; the message lists the folders looked in.
    """
    start = (start or Path.cwd()).resolve()
    roots = [start, *start.parents, Path(__file__).resolve().parents[2]]
    for root in roots:
        if (root / relative).exists():
            return root / relative
    raise FileNotFoundError(
        f"no {relative} in {', '.join(map(str, roots))}: run inside a checkout of the book"
    )
