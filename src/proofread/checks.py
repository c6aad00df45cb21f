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
from typing import TYPE_CHECKING

import yaml

from . import notebooks as nb_
from .claims import Claim, ClaimError, load_claims, parse_claims, rejudge
from .ledger import rulings
from .notebooks import Notebook, NotebookError

if TYPE_CHECKING:
    from nbformat import NotebookNode

MAX_CELL_LINES = 15
MAX_LINE = 80  # what a page shows without scrolling
MAX_FIGURE_BYTES = 80_000
MAX_CHAPTER_FIGURE_BYTES = 1_000_000
MAX_PAIR_TEXT = 1_000_000

_MACHINE = {
    "a machine's path": re.compile(
        r"(?<![\w./-])(?:/(?:home|root|tmp|usr|opt|var|srv|mnt|media|scratch|Users|private|workspaces?)/[\w.-]+|[A-Z]:\\\w+)"
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
        first = nb_.books(root, slug)[0]
        found += _guarded(check_claims, first) + _guarded(check_weight, first)
    return found


def _guarded(check: Callable[[Notebook], Iterator[Problem]], notebook: Notebook) -> list[Problem]:
    """What a check finds; that it cannot finish is a fault as well, whatever the reason."""
    where = notebook.claims if check is check_claims else notebook.source
    try:
        return list(check(notebook))
    except (NotebookError, ClaimError) as error:
        return [Problem(_at(notebook, where), str(error), "mend the file and re-run")]
    except Exception as error:
        fault = f"{check.__name__} cannot read it ({type(error).__name__}: {error})"
        return [Problem(_at(notebook, where), fault, "mend the source, or re-run the pair")]


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
    total = 0
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
            total += len(text)
            for what, pattern in _MACHINE.items():
                if match := pattern.search(text):
                    fix = f"don't print it, then {remedy}"
                    yield Problem(where, f"cell {number} holds {what} ({match[0]!r})", fix)
    if total > MAX_PAIR_TEXT:
        yield Problem(where, f"its outputs hold {total} characters", f"print less, then {remedy}")


def check_figures(notebook: Notebook) -> Iterator[Problem]:
    """Every figure has a name, a caption and alt text, and is small."""
    if not notebook.pair.is_file():
        return
    where = _at(notebook, notebook.pair)
    for number, cell in nb_.code_cells(nb_.read_pair(notebook.pair)):
        for out in cell.get("outputs", []):
            kinds = [k for k in out.get("data", {}) if k.startswith("image/") and k != "image/png"]
            if kinds:
                yield Problem(where, f"cell {number} draws {kinds[0]}", "use `plotting.show`")
            if "image/png" not in out.get("data", {}):
                continue
            if not _drawn_from(out.data):
                fault = f"cell {number} shows a picture that is not the one its text describes"
                yield Problem(where, fault, "draw with `plotting.show`, and re-run it")
            size = len(base64.b64decode(out.data["image/png"]))
            if size > MAX_FIGURE_BYTES:
                fault = f"cell {number} draws a figure of {size} bytes, over {MAX_FIGURE_BYTES}"
                yield Problem(where, fault, "draw less, bin or rasterise")
            mystnb = cell.metadata.get("mystnb", {})
            figure, image = mystnb.get("figure", {}), mystnb.get("image", {})
            if not (figure.get("name") and figure.get("caption") and image.get("alt")):
                remedy = "give the cell `mystnb: {figure: {name, caption}, image: {alt}}`"
                yield Problem(where, f"cell {number} draws without name, caption and alt", remedy)


def check_weight(first: Notebook) -> Iterator[Problem]:
    """A chapter's figures together are small."""
    pairs = [
        nb_.read_pair(nb.pair) for nb in nb_.books(first.root, first.slug) if nb.pair.is_file()
    ]
    outputs = [out for pair in pairs for _, cell in nb_.code_cells(pair) for out in cell.outputs]
    pictures = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
    total = sum(len(base64.b64decode(picture)) for picture in pictures)
    if total > MAX_CHAPTER_FIGURE_BYTES:
        where = _at(first, first.folder)
        yield Problem(where, f"its figures take {total} bytes", "draw fewer or smaller figures")


def _drawn_from(data: dict) -> bool:
    """Whether a picture carries the digest of the text beside it, as ``plotting.show`` writes."""
    import io

    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as picture:
        return picture.info.get("digest") == nb_.sha256(data.get("text/plain", ""))[:16]


def check_code(notebook: Notebook) -> Iterator[Problem]:
    """Cells are short, hold no functions with logic, and measure what they rule on."""
    where = _at(notebook, notebook.source)
    typed: set[str] = set()
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
        typed |= _typed_names(tree, typed)
        yield from _typed_values(where, number, tree, typed)
        yield from _unchecked_ways(where, number, cell, tree)


#: Calls that make a number out of typed ones without measuring anything.
_CONSTRUCTORS = {
    *("float", "int", "round", "abs", "min", "max", "sum", "complex", "Estimate", "Span"),
    *("Fraction", "Decimal", "array", "asarray", "float64", "float32", "tensor", "arb", "dict"),
    *("Rational", "Integer", "Float", "SimpleNamespace", "tuple", "list"),
}


def _is_typed(node: ast.AST, typed: set[str]) -> bool:
    """Whether an expression rests on typed constants alone: nothing in it was measured."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.Name):
        return node.id in typed
    if isinstance(node, ast.Call):
        given = [*node.args, *(k.value for k in node.keywords)]
        return _called(node) in _CONSTRUCTORS and all(_is_typed(arg, typed) for arg in given)
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List | ast.Dict | ast.Starred):
        parts = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
        return bool(parts) and all(_is_typed(part, typed) for part in parts)
    return isinstance(node, ast.NamedExpr) and _is_typed(node.value, typed)


def _typed_names(tree: ast.AST, typed: set[str]) -> set[str]:
    """Names that this cell binds to typed constants, or to what was made of them."""
    found = set(typed)
    for node in ast.walk(tree):
        value = getattr(node, "value", getattr(node, "iter", None))
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For) or not value:
            continue
        names = {n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)}
        found = found | names if _is_typed(value, found) else found - names
    return found


def _typed_values(where: str, number: int, tree: ast.AST, typed: set[str]) -> Iterator[Problem]:
    """Calls of ``rule`` whose value or control is a number somebody typed."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and _called(node) == "rule"):
            continue
        given = [*node.args[1:], *(k.value for k in node.keywords if k.arg in ("value", "control"))]
        parts = [v for g in given for v in (g.values if isinstance(g, ast.Dict) else [g])]
        for part in parts:
            if _is_typed(part, typed):
                fault = f"cell {number} rules on a typed number ({ast.unparse(part)})"
                yield Problem(where, fault, "pass what the notebook measured, not a paper's value")


def _unchecked_ways(
    where: str, number: int, cell: NotebookNode, tree: ast.AST
) -> Iterator[Problem]:
    """Ways around nbval, around ``rule`` by its name, and around the record of files read."""
    tags = set(cell.metadata.get("tags", []))
    rules = any(isinstance(n, ast.Call) and _called(n) == "rule" for n in ast.walk(tree))
    allowed = {"parameters", "hide-input", "remove-input"} | (
        set() if rules else {"nbval-ignore-output"}
    )
    if odd := {tag for tag in tags if "nbval" in tag or tag == "raises-exception"} - allowed:
        fault = f"cell {number} carries {', '.join(sorted(odd))}: nbval would not check it"
        yield Problem(where, fault, "drop the tag")
    if "NBVAL_" in cell.source:
        yield Problem(where, f"cell {number} holds an NBVAL_ comment", "drop the comment")
    if re.search(r"^\s*!|^%%", cell.source, re.MULTILINE):
        yield Problem(where, f"cell {number} leaves Python (! or %%)", "use the package")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                top = (getattr(node, "module", None) or alias.name).partition(".")[0]
                if alias.name == "rule" and alias.asname:
                    fault = f"cell {number} imports rule under another name"
                    yield Problem(where, fault, "import it as `rule`")
                if top in {"subprocess", "multiprocessing", "os", "IPython"}:
                    fault = f"cell {number} imports {top}, past what the stamp can see"
                    yield Problem(where, fault, "move it into the chapter's package, or do without")


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
        yield from _check_record(*records[0], claim)
        if not nb_.history_gap(first.root):
            yield from _check_history(records[0][0], claim)
    for notebook in notebooks:
        if not nb_.history_gap(first.root):
            yield from _check_commit(notebook)


def _check_record(notebook: Notebook, record: dict, claim: Claim) -> Iterator[Problem]:
    """A recorded verdict is what its numbers give under the committed rules."""
    where, ref = _at(notebook, notebook.pair), record["claim"]
    if record.get("rules") != claim.rules_digest:
        yield Problem(where, f"{ref} was ruled under other rules", "re-run the notebook")
    if set(record.get("control", {})) != set(claim.control):
        yield Problem(
            where, f"{ref} lacks a control ({set(claim.control)})", "measure each control"
        )
    verdict, reason = rejudge(claim, record)
    if (verdict, reason, claim.unit) != (record["verdict"], record["reason"], record["unit"]):
        fault = f"{ref} says {record['verdict']!r}, its numbers say {verdict!r} ({reason})"
        yield Problem(where, fault, "call `rule` and leave its result alone; re-run")
    if "control" in reason:
        fix = "find a measure and a control that can tell, commit, re-run"
        yield Problem(where, f"{ref}: {reason}", fix)


def _check_commit(notebook: Notebook) -> Iterator[Problem]:
    """The rules recorded with a result are today's, and their commit is in the history."""
    if not notebook.pair.is_file():
        return
    root, where = notebook.root, _at(notebook, notebook.pair)
    commit = nb_.stamp_of(nb_.read_pair(notebook.pair)).get("claims_commit", "")
    content = nb_.git(root, "show", f"{commit}:{_at(notebook, notebook.claims)}")
    remedy = f"commit claims.yml, then `make run CHAPTER={notebook.name} FORCE=1`"
    if content is None or nb_.git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        yield Problem(where, f"the rules' commit {commit[:12]} is not in the history", remedy)
    elif content != notebook.claims.read_text("utf-8").strip():
        yield Problem(where, f"claims.yml differs from the rules' commit {commit[:12]}", remedy)


def _check_history(notebook: Notebook, claim: Claim) -> Iterator[Problem]:
    """A claim's rules were committed before its first result, and were not changed after it."""
    where = _at(notebook, notebook.claims)
    first = _first_result(notebook, f"{notebook.slug}/{claim.id}")
    if first is None:
        return  # the result is not committed yet
    before, then = (_rules_at(notebook, claim.id, commit) for commit in (f"{first}^", first))
    ref = f"{notebook.slug}/{claim.id}"
    if before is None or before != then:
        fault = f"the rules of {ref} came with its first result ({first[:12]}), not before it"
        yield Problem(where, fault, "commit claims.yml first, its results after it")
    elif then != claim.rules_digest and not claim.amended:
        fault = f"the rules of {ref} were changed after its first result ({first[:12]})"
        yield Problem(where, fault, "restore them, or say why in its field `amended`")


def _first_result(notebook: Notebook, ref: str) -> str | None:
    """The oldest commit whose pair rules on the claim."""
    pair = _at(notebook, notebook.pair)
    log = nb_.git(notebook.root, "log", "--reverse", "--format=%H", "-S", f'"{ref}"', "--", pair)
    for commit in (log or "").split():
        if f'"claim": "{ref}"' in (nb_.git(notebook.root, "show", f"{commit}:{pair}") or ""):
            return commit
    return None


def _rules_at(notebook: Notebook, claim_id: str, commit: str) -> str | None:
    """The digest of a claim's rules at a commit; ``None`` where it has none there."""
    text = nb_.git(notebook.root, "show", f"{commit}:{_at(notebook, notebook.claims)}")
    try:
        return parse_claims(text)[claim_id].rules_digest if text else None
    except ClaimError:
        return None


def _contents(root: Path) -> Iterator[Problem]:
    """The table of contents and the folders hold the chapters' notebooks and nothing unchecked."""
    try:
        text = json.dumps(yaml.safe_load((root / "_toc.yml").read_text("utf-8")))
    except (yaml.YAMLError, OSError) as error:
        yield Problem("_toc.yml", f"not readable ({error})", "mend the file")
        return
    notebooks = nb_.books(root)
    for notebook in notebooks:
        entry = _at(notebook, notebook.source).removesuffix(".md")
        if f'"{entry}"' not in text:
            yield Problem("_toc.yml", f"{entry} is missing", f"add `- file: {entry}`")
    yield from _strays(root, {notebook.pair for notebook in notebooks})
    for claims in sorted((root / "book" / "chapters").glob("*/claims.yml")):
        if not any(notebook.claims == claims for notebook in notebooks):
            where = claims.parent.relative_to(root).as_posix()
            yield Problem(where, "a chapter without any notebook", "restore its .md sources")


def _strays(root: Path, pairs: set[Path]) -> Iterator[Problem]:
    """Notebooks and code cells that no check looks at."""
    for path in sorted((root / "book").rglob("*.ipynb")):
        if path not in pairs and ".ipynb_checkpoints" not in path.parts:
            where = path.relative_to(root).as_posix()
            yield Problem(
                where, "a notebook without a source beside it", "add its .md, or remove it"
            )
    for path in sorted((root / "book").rglob("*.md")):
        inside = path.relative_to(root / "book").parts
        in_chapter = inside[0] == "chapters" and len(inside) == 3
        if not in_chapter and "{code-cell}" in path.read_text("utf-8"):
            where = path.relative_to(root).as_posix()
            yield Problem(where, "code cells outside a chapter", "move it to book/chapters/<slug>/")
