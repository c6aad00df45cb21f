"""What the benchmarks recorded: pages re-plot the committed JSON and time nothing themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .checkout import find_in_checkout
from .tables import Table


def recorded(name: str, folder: Path | None = None) -> Any:
    """The content of one JSON file that a benchmark wrote.

    Args:
        name: of the file.
        folder: where it is; by default the checkout's ``benchmarks/results``.

    Raises:
        FileNotFoundError: nothing is recorded there; the message names the remedy.
    """
    try:
        folder = folder or find_in_checkout("benchmarks/results")
        return json.loads((folder / name).read_text("utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error.filename or error}: run `make bench`") from error


def kernel_table(name: str, folder: Path | None = None) -> Table:
    """What Triton kernels take on each GPU generation, compiled ahead of time.

    Args:
        name: of the JSON file with the compiler's reports.
        folder: as for :func:`recorded`.

    Raises:
        FileNotFoundError: nothing is recorded there; the message names the remedy.
    """
    rows = []
    for kernel in recorded(name, folder):
        spills = kernel["spill_stores_bytes"] + kernel["spill_loads_bytes"]
        widest = [max(map(int, kernel[key])) for key in ("global_loads", "global_stores")]
        facts = (kernel["registers"], spills, kernel["shared_bytes"], kernel["instructions"])
        rows.append((kernel["kernel"], f"sm_{kernel['capability']}", *facts, *widest))
    columns = ("kernel", "GPU", "registers", "spilled bytes", "shared bytes", "instructions")
    note = "compiled ahead of time, run on no GPU; registers are per thread, widths in bits"
    return Table((*columns, "widest load", "widest store"), rows, note)
