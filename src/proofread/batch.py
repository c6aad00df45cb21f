"""Batches of notebooks: which ones to execute, one batch at a time, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .notebooks import (
    KERNEL_ENVIRONMENT,
    Notebook,
    books,
    file_digest,
    find_root,
    locked,
    read_parameters,
    why_stale,
)


@dataclass(frozen=True)
class Job:
    """A notebook to execute and the reason."""

    notebook: Notebook
    why: str


def plan(root: Path, chapter: str | None, params: str | None, *, force: bool) -> list[Job]:
    """The notebooks of a batch that are stale, or all of them if forced.

    Raises:
        NotebookError: unknown chapter or parameter set.
    """
    if params is None:
        given: dict[str, dict[str, Any] | None] = {nb.name: None for nb in books(root, chapter)}
    else:
        slugs = sorted({nb.slug for nb in books(root, chapter)})
        given = {k: v for slug in slugs for k, v in read_parameters(root, slug, params).items()}
    found = [nb for nb in books(root, chapter) if nb.name in given]
    jobs_ = [Job(nb, why_stale(nb, params, given[nb.name])) for nb in found]
    return [Job(job.notebook, job.why or "forced") for job in jobs_ if job.why or force]


def jobs(chapter: str | None, params: str, *, force: bool = False) -> list[str]:
    """What the Snakefile asks for: names (``slug/stem``) of the notebooks to execute."""
    root = find_root()
    wanted = None if params == "book" else params
    return [job.notebook.name for job in plan(root, chapter, wanted, force=force)]


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    job: Job
    error: str


def run(
    root: Path, chapter: str | None, params: str | None, *, workers: int, force: bool
) -> tuple[list[Outcome], int]:
    """Execute a batch through Snakemake and read each job's end from its log.

    Returns:
        The outcome of each job, and Snakemake's exit status.

    Raises:
        NotebookError: unknown chapter or parameters, or another batch is running.
    """
    busy = f"another batch is running in {root}: wait for it, or stop it first"
    with locked(root / "_build" / "lock", busy) as lock:
        todo = plan(root, chapter, params, force=force)
        if not todo:
            return [], 0
        for job in todo:
            _marker(root, job, params).unlink(missing_ok=True)
        status = _snakemake(root, chapter, params, workers, force, lock)
        return [Outcome(job, _error(root, job, params)) for job in todo], status


def _marker(root: Path, job: Job, params: str | None) -> Path:
    return root / "_build" / "run" / (params or "book") / f"{job.notebook.name}.done"


def _snakemake(
    root: Path, chapter: str | None, params: str | None, workers: int, force: bool, lock: int
) -> int:
    config = [f"params={params or 'book'}", f"force={int(force)}"]
    config += [f"chapter={chapter}"] if chapter else []
    command = [sys.executable, "-m", "snakemake", "--cores", str(workers)]
    command += ["--quiet", "all", "--config", *config]
    environment = os.environ | KERNEL_ENVIRONMENT
    # Snakemake holds the lock too: if this process is killed, the batch goes on and stays locked.
    done = subprocess.run(command, cwd=root, env=environment, check=False, pass_fds=[lock])
    return done.returncode


def _error(root: Path, job: Job, params: str | None) -> str:
    """Empty when the job is done, else the last line of its log."""
    marker = _marker(root, job, params)
    if marker.is_file():
        return ""
    log = marker.with_suffix(".log")
    lines = log.read_text("utf-8").strip().splitlines() if log.is_file() else []
    return next((ln for ln in reversed(lines) if ln.startswith("error:")), "") or (
        lines[-1] if lines else "it did not start"
    )


def unchecked(root: Path, chapter: str | None = None) -> list[str]:
    """Pairs whose present content has not passed nbval on this machine, relative to the root."""
    passed = _passed(root)
    pairs = [nb.pair for nb in books(root, chapter) if nb.pair.is_file()]
    names = {path.relative_to(root).as_posix(): file_digest(path) for path in pairs}
    return [name for name, digest in names.items() if passed.get(name) != digest]


def record_checked(root: Path) -> None:
    """Note that every pair passed nbval in its present form."""
    found = [(nb.pair.relative_to(root).as_posix(), file_digest(nb.pair)) for nb in books(root)]
    path = root / "_build" / "checked.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dict(found), indent=1))


def _passed(root: Path) -> dict[str, str]:
    try:
        return dict(json.loads((root / "_build" / "checked.json").read_text("utf-8")))
    except (OSError, ValueError):
        return {}
