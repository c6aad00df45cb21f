"""What must hold of the book without executing it: each fault names its file and its remedy."""

from __future__ import annotations

import ast
import base64
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from . import notebooks as nb_
from .claims import ClaimError, load_claims
from .ledger import rulings
from .notebooks import Notebook, NotebookError

MAX_CELL_LINES = 15
MAX_LINE = 80  # what a page shows without scrolling
MAX_FIGURE_BYTES = 80_000
MAX_CHAPTER_FIGURE_BYTES = 1_000_000

_MACHINE = {
    "a machine's path": re.compile(
        r"(?<![\w./-])(?:/(?:home|root|tmp|usr|opt|var|Users|mnt|private|workspace)/[\w.-]+|[A-Z]:\\\w+)"
    ),
    "a time": re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\b\d\d:\d\d:\d\d\b"),
    "a memory address": re.compile(r"\b0x[0-9a-f]{8,}\b"),
}


@dataclass(frozen=True)
class Problem:
    """A fault of the book."""

    file: str
    fault: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.fault}. Remedy: {self.remedy}."


def check_book(root: Path) -> list[Problem]:
    """Every fault of every chapter and of the table of contents."""
    found = list(_contents(root))
    for notebook in nb_.books(root):
        for check in NOTEBOOK_CHECKS:
            found += _guarded(check, notebook)
    for slug in sorted({notebook.slug for notebook in nb_.books(root)}):
        found += _guarded(check_claims, nb_.books(root, slug)[0])
    return found


def _guarded(check: Callable[[Notebook], Iterator[Problem]], notebook: Notebook) -> list[Problem]:
    try:
        return list(check(notebook))
    except (NotebookError, ClaimError) as error:
        return [Problem(_at(notebook, notebook.source), str(error), "mend the file and re-run")]


def _at(notebook: Notebook, path: Path) -> str:
    return path.relative_to(notebook.root).as_posix()


def check_fresh(notebook: Notebook) -> Iterator[Problem]:
    """The pair is up to date with everything its outputs depend on."""
    if why := nb_.why_stale(notebook):
        remedy = f"`make run CHAPTER={notebook.name}`, then commit the pair"
        yield Problem(_at(notebook, notebook.pair), f"stale ({why})", remedy)


def check_cells(notebook: Notebook) -> Iterator[Problem]:
    """The pair's cells are the source's, and the source is in jupytext's canonical form."""
    import jupytext

    text = notebook.source.read_text("utf-8")
    if jupytext.writes(jupytext.reads(text, fmt="md:myst"), fmt="md:myst") != text:
        name = _at(notebook, notebook.source)
        remedy = f"`jupytext --to md:myst --output {name} {name}`"
        yield Problem(name, "not in jupytext's canonical form", remedy)
    if notebook.pair.is_file():
        pair = nb_.read_pair(notebook.pair)
        if nb_.source_digest(pair) != nb_.source_digest(notebook.cells):
            remedy = f"edit {notebook.source.name} alone, then `make run CHAPTER={notebook.name}`"
            yield Problem(_at(notebook, notebook.pair), "its cells differ from its source", remedy)


def check_budget(notebook: Notebook) -> Iterator[Problem]:
    """The recorded run kept to the notebook's seconds and memory."""
    if not notebook.pair.is_file():
        return
    run = nb_.stamp_of(nb_.read_pair(notebook.pair)).get("run", {})
    remedy = "lower its default parameters or make its code cheaper, and re-run it"
    if run.get("seconds", 0) > notebook.budget_seconds:
        fault = f"over its budget of seconds ({run['seconds']} > {notebook.budget_seconds:g})"
        yield Problem(_at(notebook, notebook.pair), fault, remedy)
    if run.get("peak_mb", 0) > nb_.MEMORY_LIMIT_MB:
        fault = f"over its budget of memory ({run['peak_mb']} > {nb_.MEMORY_LIMIT_MB} MiB)"
        yield Problem(_at(notebook, notebook.pair), fault, remedy)


def check_outputs(notebook: Notebook) -> Iterator[Problem]:
    """No stderr, no raised error, and nothing of a machine or a moment in any output."""
    if not notebook.pair.is_file():
        return
    where, remedy = _at(notebook, notebook.pair), f"`make run CHAPTER={notebook.name}`"
    for number, cell in nb_.code_cells(nb_.read_pair(notebook.pair)):
        if {"papermill", "execution"} & set(cell.metadata):
            yield Problem(where, f"cell {number} holds execution times in its metadata", remedy)
        for out in cell.get("outputs", []):
            if out.output_type == "error":
                yield Problem(where, f"cell {number} raised {out.ename}", f"mend it, then {remedy}")
            elif out.output_type == "stream" and out.name == "stderr":
                yield Problem(
                    where, f"cell {number} holds stderr", f"mend what warns, then {remedy}"
                )
            data = {k: v for k, v in out.get("data", {}).items() if not k.startswith("image/")}
            text = json.dumps([out.get("text", ""), data], ensure_ascii=False)
            for what, pattern in _MACHINE.items():
                if match := pattern.search(text):
                    fix = f"don't print it, then {remedy}"
                    yield Problem(where, f"cell {number} holds {what} ({match[0]!r})", fix)


def check_figures(notebook: Notebook) -> Iterator[Problem]:
    """Every figure has a name, a caption and alt text, and is small."""
    if not notebook.pair.is_file():
        return
    where, total = _at(notebook, notebook.pair), 0
    for number, cell in nb_.code_cells(nb_.read_pair(notebook.pair)):
        for out in cell.get("outputs", []):
            if "image/png" not in out.get("data", {}):
                continue
            size = len(base64.b64decode(out.data["image/png"]))
            total += size
            if size > MAX_FIGURE_BYTES:
                fault = f"cell {number} draws a figure of {size} bytes, over {MAX_FIGURE_BYTES}"
                yield Problem(where, fault, "draw less, bin or rasterise")
            mystnb = cell.metadata.get("mystnb", {})
            figure, image = mystnb.get("figure", {}), mystnb.get("image", {})
            if not (figure.get("name") and figure.get("caption") and image.get("alt")):
                remedy = "give the cell `mystnb: {figure: {name, caption}, image: {alt}}`"
                yield Problem(where, f"cell {number} draws without name, caption and alt", remedy)
    if total > MAX_CHAPTER_FIGURE_BYTES:
        yield Problem(where, f"its figures take {total} bytes", "draw fewer or smaller figures")


def check_code(notebook: Notebook) -> Iterator[Problem]:
    """Cells are short, hold no functions with logic, and measure what they rule on."""
    where = _at(notebook, notebook.source)
    literals: set[str] = set()
    for number, cell in nb_.code_cells(notebook.cells):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if len(lines) > MAX_CELL_LINES:
            fault = f"cell {number} has {len(lines)} lines, over {MAX_CELL_LINES}"
            yield Problem(where, fault, "move its logic into the chapter's package")
        if (longest := max(map(len, lines), default=0)) > MAX_LINE:
            fault = f"cell {number} has a line of {longest} characters, over {MAX_LINE}"
            yield Problem(where, fault, "break the line: a page would have to scroll")
        try:
            tree = ast.parse(nb_.strip_magics(cell.source))
        except SyntaxError as error:
            yield Problem(where, f"cell {number} does not parse: {error.msg}", "mend the cell")
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and len(node.body) > 1:
                remedy = "move it into the chapter's package"
                yield Problem(where, f"cell {number} defines {node.name}", remedy)
        literals |= _literal_names(tree)
        yield from _typed_values(where, number, tree, literals)


def _literal_names(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_number(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _is_number(node: ast.AST) -> bool:
    """Whether an expression is made of typed numbers alone."""
    leaves = [n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Call | ast.Attribute)]
    numbers = [n for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return not leaves and bool(numbers) and all(isinstance(n.value, int | float) for n in numbers)


def _typed_values(where: str, number: int, tree: ast.AST, literals: set[str]) -> Iterator[Problem]:
    """Calls of ``rule`` whose value or control is a number somebody typed."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and _called(node) == "rule"):
            continue
        given = [*node.args[1:], *(k.value for k in node.keywords if k.arg in ("value", "control"))]
        parts = [v for g in given for v in (g.values if isinstance(g, ast.Dict) else [g])]
        for part in parts:
            if _is_number(part) or (isinstance(part, ast.Name) and part.id in literals):
                fault = f"cell {number} rules on a typed number ({ast.unparse(part)})"
                yield Problem(where, fault, "pass what the notebook measured, not a paper's value")


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def check_pins(notebook: Notebook) -> Iterator[Problem]:
    """Every third-party package the notebook and our modules import is pinned."""
    _, third = nb_.import_closure(notebook.root, nb_.code_of(notebook.cells))
    known = nb_.pins(notebook.root)
    provided = importlib.metadata.packages_distributions()
    for top in sorted(third):
        names = {nb_.normal_name(dist) for dist in provided.get(top, [])}
        if names and not names & set(known):
            remedy = f"pin {' or '.join(sorted(names))} in requirements.txt"
            yield Problem(
                _at(notebook, notebook.source), f"imports {top}, which is not pinned", remedy
            )


NOTEBOOK_CHECKS = (
    check_fresh,
    check_cells,
    check_budget,
    check_outputs,
    check_figures,
    check_code,
    check_pins,
)


def check_claims(first: Notebook) -> Iterator[Problem]:
    """A chapter's claims are ruled where they say, once, under the committed rules."""
    where, slug = _at(first, first.claims), first.slug
    file = load_claims(first.claims)
    notebooks = nb_.books(first.root, slug)
    found = [(notebook, record) for notebook in notebooks for record in rulings(notebook)]
    known = {f"{slug}/{claim.id}": claim for claim in file.claims}
    for notebook, record in found:
        if record["claim"] not in known:
            fault = f"rules on unknown claim {record['claim']}"
            yield Problem(_at(notebook, notebook.pair), fault, f"add it to {where} or mend the id")
    for ref, claim in known.items():
        records = [(notebook, record) for notebook, record in found if record["claim"] == ref]
        if claim.needs or claim.ruled_in is None:
            if records:
                yield Problem(where, f"{ref} has a result but no 'ruled_in'", "fix its rules first")
            continue
        stems = [notebook.stem for notebook, _ in records]
        if stems != [claim.ruled_in]:
            fault = (
                f"{ref} should be ruled once, in {claim.ruled_in}; it is in {stems or 'no cell'}"
            )
            yield Problem(where, fault, f"call rule({ref!r}, …) in {claim.ruled_in}.md once")
            continue
        yield from _check_record(*records[0], claim.rules_digest, set(claim.control))
    for notebook in notebooks:
        yield from _check_commit(notebook)


def _check_record(
    notebook: Notebook, record: dict, digest: str, controls: set[str]
) -> Iterator[Problem]:
    where, ref = _at(notebook, notebook.pair), record["claim"]
    if record["rules"] != digest:
        yield Problem(where, f"{ref} was ruled under other rules", "re-run the notebook")
    if set(record["control"]) != controls:
        yield Problem(where, f"{ref} lacks a control ({controls})", "measure each control")
    if "control" in record["reason"]:
        fault = f"{ref}: {record['reason']}"
        yield Problem(where, fault, "find a measure and a control that can tell, commit, re-run")


def _check_commit(notebook: Notebook) -> Iterator[Problem]:
    """The rules recorded with a result were committed before it."""
    if not notebook.pair.is_file():
        return
    root, where = notebook.root, _at(notebook, notebook.pair)
    commit = nb_.stamp_of(nb_.read_pair(notebook.pair)).get("claims_commit", "")
    if nb_.git(root, "rev-parse", "--is-shallow-repository") != "false":
        return  # an archive or a shallow clone has no history to compare with
    content = nb_.git(root, "show", f"{commit}:{_at(notebook, notebook.claims)}")
    remedy = f"commit claims.yml, then `make run CHAPTER={notebook.name} FORCE=1`"
    if content is None or nb_.git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        yield Problem(where, f"the rules' commit {commit[:12]} is not in the history", remedy)
    elif content != notebook.claims.read_text("utf-8").strip():
        yield Problem(where, f"claims.yml differs from the rules' commit {commit[:12]}", remedy)


def _contents(root: Path) -> Iterator[Problem]:
    """Every chapter notebook has its place in the table of contents."""
    text = json.dumps(yaml.safe_load((root / "_toc.yml").read_text("utf-8")))
    for notebook in nb_.books(root):
        entry = _at(notebook, notebook.source).removesuffix(".md")
        if f'"{entry}"' not in text:
            yield Problem("_toc.yml", f"{entry} is missing", f"add `- file: {entry}`")
