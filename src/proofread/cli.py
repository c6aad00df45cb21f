"""The ``proofread`` command: status, claims, run, check, data, new."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

app = typer.Typer(
    help="Derive, run and rule on machine-learning papers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Chapter = Annotated[str | None, typer.Argument(help="a chapter, or chapter/notebook; default: all")]


@app.command()
def status(chapter: Chapter = None) -> None:
    """Which notebooks are fresh or stale, and why; what each cost."""
    from rich.table import Table

    from . import notebooks

    table = Table("notebook", "state", "why", "seconds", "peak MiB", "parameters")
    for notebook in notebooks.books(notebooks.find_root(), chapter):
        why = notebooks.why_stale(notebook)
        run = {}
        if notebook.pair.is_file():
            run = notebooks.stamp_of(notebooks.read_pair(notebook.pair)).get("run", {})
        cost = (str(run.get(key, "–")) for key in ("seconds", "peak_mb"))
        defaults = ", ".join(f"{k}={v!r}" for k, v in notebook.defaults.items()) or "–"
        table.add_row(notebook.name, "stale" if why else "fresh", why, *cost, defaults)
    _print(table)


@app.command()
def claims(
    slug: Annotated[str | None, typer.Argument(help="a chapter; default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """The ledger: every claim with its verdict."""
    from rich.table import Table

    from . import ledger, notebooks
    from .claims import VERDICTS

    found = ledger.chapters(notebooks.find_root(), slug)
    if as_json:
        typer.echo(ledger.as_text(found))
        return
    table = Table("claim", "verdict", "what it says", "measured", "accept", "ruled in")
    for entry in (entry for chapter in found for entry in chapter.entries):
        claim = entry.claim
        verdict = f"{VERDICTS[entry.verdict]} {entry.verdict}"
        accept = str(claim.accept or claim.needs or "–")
        row = (claim.says, entry.measured(), accept, entry.notebook or "–")
        table.add_row(entry.ref, verdict, *row)
    _print(table)


@app.command()
def run(
    chapter: Chapter = None,
    params: Annotated[
        str | None,
        typer.Option(help="a parameter set: NAME.yml in the chapter; default: book size"),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="notebooks at a time")] = os.cpu_count() or 1,
    force: Annotated[bool, typer.Option("--force", help="fresh ones too")] = False,
) -> None:
    """Execute what is stale, one Snakemake job a notebook."""
    from rich.table import Table

    from . import batch, notebooks

    root = notebooks.find_root()
    for job in (todo := batch.plan(root, chapter, params, force=force)):
        typer.echo(f"{job.notebook.name}: {job.why}")
    if not todo:
        typer.echo("run: every notebook is fresh, nothing to execute")
        return
    outcomes, code = batch.run(root, chapter, params, workers=jobs, force=force)
    table = Table("notebook", "outcome", "seconds", "peak MiB")
    for outcome in outcomes:
        notebook = outcome.job.notebook
        cost = {}
        if not outcome.error:
            cost = notebooks.stamp_of(notebooks.read_pair(notebook.run_pair(params)))["run"]
        seconds, peak = (str(cost.get(key, "–")) for key in ("seconds", "peak_mb"))
        table.add_row(
            notebook.name, "failed, see above" if outcome.error else "done", seconds, peak
        )
    _print(table)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    typer.echo(f"run: {len(outcomes) - failed} done, {failed} failed")
    if failed or code:
        raise typer.Exit(code or 1)


@app.command()
def check() -> None:
    """What must hold of the book without executing it."""
    from . import checks, notebooks

    root = notebooks.find_root()
    problems = checks.check_book(root)
    for problem in problems:
        typer.echo(str(problem))
    if gap := notebooks.history_gap(root):
        typer.echo(f"check: that rules came before results was not checked: {gap}")
    typer.echo(f"check: {len(problems)} problems" if problems else "check: the book is sound")
    if problems:
        raise typer.Exit(1)


@app.command(hidden=True)
def unchecked(chapter: Chapter = None) -> None:
    """Pairs that nbval has not passed here in their present form (for ``make check``)."""
    from . import batch, notebooks

    for path in batch.unchecked(notebooks.find_root(), chapter):
        typer.echo(path)


@app.command(hidden=True)
def checked() -> None:
    """Note that nbval passed every pair in its present form (after a green ``make test``)."""
    from . import batch, notebooks

    batch.record_checked(notebooks.find_root())


@app.command()
def data() -> None:
    """The data sets: where each was found, and how to get the full one."""
    from rich.table import Table

    from .data import available

    table = Table("set", "tier", "state", "train", "test", "licence", "size", "how to get it")
    for row in available():
        state = f"{row.state} (taken)" if row.chosen else row.state
        count = (str(row.train), str(row.test))
        table.add_row(row.id, row.tier, state, *count, row.licence, row.size, row.get)
    _print(table)


@app.command()
def new(slug: Annotated[str, typer.Argument(help="snake_case name of the chapter")]) -> None:
    """Add a chapter from the template: sources, claims, package, test, table of contents."""
    from . import notebooks, templates

    for path in templates.create_chapter(notebooks.find_root(), slug):
        typer.echo(f"wrote {path}")
    typer.echo(f"next: edit claims.yml, commit it, then `make run CHAPTER={slug}`")


def _print(table: object) -> None:
    """Print a table at the terminal's width, or wide enough for anything in a pipe."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def main() -> None:
    """Run the command line; an error of this package is one line, without a traceback."""
    for stream in (sys.stdout, sys.stderr):  # verdicts have symbols; an ASCII locale has none
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    try:
        app()
    except Exception as error:
        if not type(error).__module__.startswith("proofread."):
            raise
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
