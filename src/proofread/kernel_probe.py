"""What runs silently inside a notebook's kernel: a memory limit before, a report after.

The runner sends ``start`` before the first cell and ``report`` after the last, as requests that
add no cell and no execution count.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_SKIPPED = {".git", ".venv", "_build", "__pycache__", ".ipynb_checkpoints"}
_opened: set[str] = set()


def start(root: str, memory_limit_mb: int) -> None:
    """Limit the data segment and note every file under ``root`` that is opened for reading."""
    prefix = f"{root}/"

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)):
            name = args[0] if isinstance(args[0], str) else args[0].decode(errors="ignore")
            mode, flags = args[1], args[2]
            # O_WRONLY is 1; everything else can read
            reading = bool({"r", "+"} & set(mode)) if mode else (flags & 3) != 1
            if reading:
                path = os.path.abspath(name)
                if path.startswith(prefix):
                    _opened.add(path)

    limit_memory(memory_limit_mb)
    sys.addaudithook(hook)


def limit_memory(megabytes: int) -> None:
    """Make private memory over ``megabytes`` an ordinary ``MemoryError`` (Linux; 0: no limit)."""
    if sys.platform != "linux" or not megabytes:
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (megabytes * 2**20, hard))


def peak_memory_mb() -> float:
    """The largest resident size of this process so far, in MiB."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    except (OSError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


def report(root: str) -> str:
    """JSON with ``files`` (repository files read or loaded, relative) and ``peak_mb``."""
    base = Path(root)
    loaded = {str(f) for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None))}
    files = set()
    for name in _opened | loaded:
        path = Path(name)
        if path.is_relative_to(base) and path.is_file():
            inside = path.relative_to(base)
            if not _SKIPPED & set(inside.parts):
                files.add(inside.as_posix())
    return json.dumps({"files": sorted(files), "peak_mb": peak_memory_mb()})
