"""Sources into executed, stamped pairs: jupytext, then papermill, then a fingerprint.

A chapter's ``theory.md`` is what people edit; ``theory.ipynb`` beside it is its executed pair.
The pair's metadata holds a stamp: a fingerprint of all that the outputs depend on, so that a stale
pair is found without executing anything, and what the run cost.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from nbformat import NotebookNode

SCHEMA = 1
MEMORY_LIMIT_MB = 4096
HANGS_AFTER = 10  # budgets, for one cell
BUDGET_SECONDS = {"theory": 15.0, "experiments": 45.0}

#: The environment of every kernel, alike for papermill and nbval: one thread (sums differ in the
#: last digits otherwise), no network look-ups, nothing of the user's matplotlib or IPython profile.
KERNEL_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "JUPYTER_PREFER_ENV_PATH": "1",
    "MATPLOTLIBRC": os.devnull,
    "IPYTHONDIR": str(Path(tempfile.gettempdir()) / f"proofread-ipython-{os.getuid()}"),
}


class NotebookError(Exception):
    """A notebook cannot be read, run or stamped; the message names the file and the remedy."""


def find_root(start: Path | None = None) -> Path:
    """The book's root: the nearest folder above ``start`` with ``_toc.yml`` and ``book/``.

    Raises:
        NotebookError: there is none.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "_toc.yml").is_file() and (folder / "book").is_dir():
            return folder
    raise NotebookError(
        f"{start} is not inside a checkout of the book (no _toc.yml above it): cd into one"
    )


@dataclass(frozen=True)
class Notebook:
    """One notebook of a chapter: its source, its pair and the claims it may rule on."""

    root: Path
    slug: str
    stem: str

    @property
    def name(self) -> str:
        return f"{self.slug}/{self.stem}"

    @property
    def folder(self) -> Path:
        return self.root / "book" / "chapters" / self.slug

    @property
    def source(self) -> Path:
        return self.folder / f"{self.stem}.md"

    @property
    def where(self) -> str:
        """The source's path relative to the root, for messages."""
        return self.source.relative_to(self.root).as_posix()

    @property
    def pair(self) -> Path:
        return self.folder / f"{self.stem}.ipynb"

    @property
    def claims(self) -> Path:
        return self.folder / "claims.yml"

    @property
    def budget_seconds(self) -> float:
        return BUDGET_SECONDS.get(self.stem, BUDGET_SECONDS["experiments"])

    def run_pair(self, params: str | None) -> Path:
        """Where an execution goes: the committed pair, or ``_build`` for other parameters."""
        if params is None:
            return self.pair
        return self.root / "_build" / "runs" / params / self.slug / f"{self.stem}.ipynb"

    @cached_property
    def cells(self) -> NotebookNode:
        """The source as a notebook without outputs, ids derived from content."""
        return read_source(self.source)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The names and values in the cell tagged ``parameters``."""
        return parameter_defaults(self)


def books(root: Path, chapter: str | None = None) -> list[Notebook]:
    """Every chapter notebook, sorted; of one chapter if named.

    Raises:
        NotebookError: the named chapter does not exist.
    """
    sources = sorted((root / "book" / "chapters").glob("*/*.md"))
    found = [Notebook(root, path.parent.name, path.stem) for path in sources]
    if chapter is None:
        return found
    slug, _, stem = chapter.partition("/")
    kept = [nb for nb in found if nb.slug == slug and stem in ("", nb.stem)]
    if not kept:
        known = ", ".join(sorted({nb.slug for nb in found})) or "none"
        raise NotebookError(f"no chapter or notebook {chapter!r}; there are: {known}")
    return kept


# --- reading -----------------------------------------------------------------------------------


def read_source(path: Path) -> NotebookNode:
    """Read a MyST source through jupytext; cell ids become a digest of the cell's content.

    Raises:
        NotebookError: the file is missing or is no MyST notebook.
    """
    import jupytext

    try:
        notebook = jupytext.read(path, fmt="md:myst")
    except Exception as error:
        raise NotebookError(f"{path}: not readable as a MyST notebook: {error}") from error
    set_cell_ids(notebook)
    return notebook


def set_cell_ids(notebook: NotebookNode) -> None:
    """Give cells ids that depend on their content only, so that a re-run changes none."""
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = sha256(f"{cell.cell_type}\0{cell.source}")[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def read_pair(path: Path) -> NotebookNode:
    """Read an executed pair.

    Raises:
        NotebookError: it is missing or no notebook.
    """
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError as error:
        raise NotebookError(f"{path} is missing: run `make run`") from error
    except Exception as error:
        raise NotebookError(f"{path}: not readable as a notebook: {error}; re-run it") from error


def code_cells(notebook: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """The code cells with the numbers that Jupyter shows in brackets, from 1."""
    return enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1)


def stamp_of(notebook: NotebookNode) -> dict[str, Any]:
    """The stamp in a pair's metadata, or an empty one."""
    stamp = notebook.metadata.get("proofread", {})
    sound = isinstance(stamp, dict) and all(
        isinstance(stamp.get(part, {}), dict) for part in ("fingerprint", "run")
    )
    return dict(stamp) if sound else {}


def parameter_defaults(notebook: Notebook) -> dict[str, Any]:
    """Names and literal values assigned in the cell tagged ``parameters``."""
    found: dict[str, Any] = {}
    for cell in notebook.cells.cells:
        if "parameters" not in cell.metadata.get("tags", []):
            continue
        for node in _parse(strip_magics(cell.source), notebook.where).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(node, ast.AnnAssign):
                target = node.target
            if isinstance(target, ast.Name) and node.value is not None:  # type: ignore[attr-defined]
                found[target.id] = _literal(notebook, target.id, node.value)  # type: ignore[attr-defined]
    return found


def _literal(notebook: Notebook, name: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise NotebookError(f"{notebook.where}: parameter {name} must be a literal") from error


def read_parameters(root: Path, chapter: str, params: str) -> dict[str, dict[str, Any]]:
    """Parameters by notebook name from ``<params>.yml`` in the chapter's folder.

    Each notebook takes those that its ``parameters`` cell declares; notebooks that declare none
    of them are left out.

    Raises:
        NotebookError: no such file, no mapping, or a name that no notebook declares.
    """
    notebooks = books(root, chapter)
    path = notebooks[0].folder / f"{params}.yml"
    try:
        given = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise NotebookError(f"{path} is not readable as YAML: {error}") from error
    except OSError as error:
        sets = sorted(p.stem for p in path.parent.glob("*.yml") if p.name != "claims.yml")
        raise NotebookError(f"{path} cannot be read; there are: {', '.join(sets)}") from error
    if not isinstance(given, dict) or not given:
        raise NotebookError(f"{path} must map parameter names to values")
    declared = {nb.name: {k: v for k, v in given.items() if k in nb.defaults} for nb in notebooks}
    if unknown := set(given) - {key for taken in declared.values() for key in taken}:
        raise NotebookError(
            f"{path}: no notebook of {chapter} has a parameter {', '.join(sorted(unknown))}"
        )
    return {name: taken for name, taken in declared.items() if taken}


# --- what a notebook depends on ----------------------------------------------------------------


def sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def file_digest(path: Path) -> str | None:
    """16 hex digits of a file's SHA-256, ``None`` where it is missing."""
    try:
        return sha256(path.read_bytes())[:16]
    except OSError:
        return None


def _parse(code: str, where: str) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError as error:
        raise NotebookError(f"{where}, line {error.lineno}: {error.msg}") from error


def _imports(code: str, package: str = "", where: str = "a cell") -> Iterator[str]:
    """Dotted names that ``code`` may import, those inside functions too."""
    for node in ast.walk(_parse(code, where)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join(above + ([node.module] if node.module else []))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def import_closure(root: Path, code: str) -> tuple[set[Path], set[str]]:
    """Files under ``src/`` reachable from the imports in ``code``, and third-party top names."""
    src = root / "src"
    ours = {path.name for path in src.iterdir() if path.is_dir()} if src.is_dir() else set()
    files: set[Path] = set()
    third: set[str] = set()
    todo, done = list(_imports(code)), set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        parts = name.split(".")
        if parts[0] not in ours:
            third.add(parts[0])
            continue
        for k in range(1, len(parts) + 1):  # importing a.b runs a/__init__.py too
            base = src.joinpath(*parts[:k])
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            if file.is_file() and file not in files:
                files.add(file)
                package = parts[:k] if base.is_dir() else parts[: k - 1]
                name = file.relative_to(root).as_posix()
                todo += _imports(file.read_text("utf-8"), ".".join(package), name)
    return files, third - set(sys.stdlib_module_names)


def pins(root: Path) -> dict[str, str]:
    """Pinned versions by normalised distribution name, from ``requirements.txt``."""
    found = {}
    for line in (root / "requirements.txt").read_text("utf-8").splitlines():
        if match := re.match(r"\s*([A-Za-z0-9_.-]+)\s*==\s*([^\s;#]+)", line):
            found[normal_name(match[1])] = match[2]
    return found


def normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def code_of(notebook: NotebookNode) -> str:
    """The code of all cells, IPython magics and shell lines left out."""
    return "\n".join(strip_magics(c.source) for c in notebook.cells if c.cell_type == "code")


def strip_magics(code: str) -> str:
    """Python code alone: lines that begin with ``%`` or ``!``, and ``%%`` cells, left out."""
    if code.lstrip().startswith("%%"):
        return ""
    return "\n".join(line for line in code.splitlines() if not re.match(r"\s*[%!]", line))


def _pins_of(root: Path, imported: set[str]) -> dict[str, str]:
    """The pins of the distributions that provide the imported top-level names."""
    known = pins(root)
    provided = importlib.metadata.packages_distributions()
    names = {normal_name(dist) for top in imported for dist in provided.get(top, [])}
    return {name: known[name] for name in sorted(names) if name in known}


def git(root: Path, *arguments: str) -> str | None:
    """What a git command prints, stripped; ``None`` where it fails or git is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def history_gap(root: Path) -> str:
    """Why git's history of this checkout cannot be consulted; empty when it can."""
    if git(root, "rev-parse", "--show-toplevel") != str(root):
        return "this is no git checkout of its own (or git refuses it: see `git status`)"
    if git(root, "rev-parse", "--is-shallow-repository") != "false":
        return "the clone is shallow: `git fetch --unshallow`"
    return ""


def claims_commit(notebook: Notebook) -> str:
    """The commit that last changed the chapter's rules.

    Raises:
        NotebookError: the rules are not committed, so no result may follow them.
    """
    if gap := history_gap(notebook.root):
        raise NotebookError(f"a result records the commit of its rules, but {gap}")
    relative = notebook.claims.relative_to(notebook.root).as_posix()
    dirty = git(notebook.root, "status", "--porcelain", "--", relative)
    commit = git(notebook.root, "log", "-1", "--format=%H", "--", relative)
    if dirty or not commit:
        raise NotebookError(
            f"{relative} has rules that are not committed: commit it before its results exist "
            f"(git add {relative} && git commit -m 'Rules')"
        )
    return commit


def check_installed(notebook: Notebook) -> None:
    """The pins that the stamp will record are what is installed.

    Raises:
        NotebookError: another version is installed; the message says how to get the pinned one.
    """
    _, third = import_closure(notebook.root, code_of(notebook.cells))
    for name, pin in _pins_of(notebook.root, third).items():
        found = importlib.metadata.version(name)
        if found.partition("+")[0] != pin:
            raise NotebookError(
                f"{notebook.where}: {name} {found} is installed, requirements.txt pins {pin}: "
                "`pip install -r requirements.txt`"
            )


@contextmanager
def locked(path: Path, busy: str) -> Iterator[int]:
    """Hold a lock file; the system releases it when every process that holds it has ended.

    Yields:
        The open file descriptor, for a child that shall hold the lock as well.

    Raises:
        NotebookError: another process holds it (``busy`` is the message).
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise NotebookError(f"{path} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NotebookError(busy) from error
        yield file.fileno()


def source_digest(notebook: NotebookNode) -> str:
    """A digest of all cells: type, source, tags and figure metadata."""
    cells = [
        [cell.cell_type, cell.source, {k: v for k, v in sorted(cell.metadata.items()) if v != []}]
        for cell in notebook.cells
    ]
    return sha256(json.dumps(cells, sort_keys=True))[:16]


def outputs_digest(notebook: NotebookNode) -> str:
    """A digest of every output and execution count."""
    outputs = [
        [cell.get("execution_count"), cell.get("outputs", [])]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    return sha256(json.dumps(outputs, sort_keys=True, ensure_ascii=False))[:16]


def fingerprint(
    notebook: Notebook, executed: NotebookNode, read: list[str], parameters: dict[str, Any]
) -> dict[str, Any]:
    """All that the outputs depend on, part by part, right after an execution."""
    root = notebook.root
    files, third = import_closure(root, code_of(notebook.cells))
    names = {path.relative_to(root).as_posix() for path in files} | set(read)
    claims = notebook.claims.relative_to(root).as_posix()
    names -= {claims, "src/proofread/kernel_probe.py"}
    return {
        "source": source_digest(notebook.cells),
        "parameters": parameters,
        "files": {name: file_digest(root / name) for name in sorted(names)},
        "pins": _pins_of(root, third),
        "claims": file_digest(notebook.claims),
        "outputs": outputs_digest(executed),
    }


def why_stale(notebook: Notebook, params: str | None = None, given: dict | None = None) -> str:
    """Why the pair has to be executed again, naming what changed; empty when it is fresh."""
    path = notebook.run_pair(params)
    if not path.is_file():
        return "never executed"
    try:
        pair = read_pair(path)
    except NotebookError:
        return "its pair is not readable as a notebook"
    stamp = stamp_of(pair)
    if stamp.get("schema") != SCHEMA:
        return f"stamp of schema {stamp.get('schema', 'none')}, now {SCHEMA}"
    old = stamp.get("fingerprint", {})
    return "; ".join(_changes(notebook, pair, old, given))


def _changes(
    notebook: Notebook, pair: NotebookNode, old: dict[str, Any], given: dict | None
) -> Iterator[str]:
    root = notebook.root
    if old.get("source") != source_digest(notebook.cells):
        yield f"{notebook.source.name} changed"
    if given is not None and old.get("parameters") != given:
        yield "parameters changed"
    recorded = old.get("files", {})
    closure, _ = import_closure(root, code_of(notebook.cells))
    names = set(recorded) | {path.relative_to(root).as_posix() for path in closure}
    for name in sorted(names):
        now = file_digest(root / name)
        if now != recorded.get(name):
            yield f"{name} {'is gone' if now is None else 'changed'}"
    known = pins(root)
    for name, version in old.get("pins", {}).items():
        if known.get(name) != version:
            yield f"pin of {name} changed ({version} → {known.get(name)})"
    if old.get("claims") != file_digest(notebook.claims):
        yield "claims.yml changed"
    if old.get("outputs") != outputs_digest(pair):
        yield "an output was edited by hand"


# --- executing ---------------------------------------------------------------------------------


def _engine(root: Path, memory_limit_mb: int, report: dict[str, Any]) -> Any:
    """A papermill engine that asks the kernel, silently, for limits first and a report last."""
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine

    probe = "__import__('proofread.kernel_probe', fromlist=['start'])"

    class Client(PapermillNotebookClient):
        def silent(self, expression: str) -> str | None:
            message = self.kc.execute("", silent=True, user_expressions={"x": expression})
            while True:
                reply = self.wait_for_reply_on_shell()
                if reply["parent_header"].get("msg_id") == message:
                    break
            answer = reply["content"].get("user_expressions", {}).get("x", {})
            if answer.get("status") != "ok":
                raise NotebookError(f"the kernel did not answer {expression}: {answer}")
            return str(answer["data"]["text/plain"])

        def wait_for_reply_on_shell(self) -> dict[str, Any]:
            from jupyter_core.utils import run_sync

            try:
                return run_sync(self.kc.get_shell_msg)(timeout=60)  # type: ignore[no-any-return]
            except queue.Empty as error:
                raise NotebookError("the kernel gave no answer for 60 s: did it die?") from error

        def papermill_execute_cells(self) -> None:
            self.silent(f"{probe}.start({str(root)!r}, {memory_limit_mb})")
            super().papermill_execute_cells()
            if all(not _errors(cell) for cell in self.nb.cells):
                answer = ast.literal_eval(self.silent(f"{probe}.report({str(root)!r})") or "''")
                report.update(json.loads(answer))

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **kw: Any) -> Any:
            kept = {k: kw[k] for k in ("log_output", "stdout_file", "stderr_file")}
            timeout = kw.get("execution_timeout")
            start = kw.get("start_timeout", 60)
            client = Client(
                nb_man, kernel_name=kernel_name, timeout=timeout, startup_timeout=start, **kept
            )
            return client.execute()

    return Engine


def _errors(cell: NotebookNode) -> list[NotebookNode]:
    return [out for out in cell.get("outputs", []) if out.output_type == "error"]


def execute(
    notebook: Notebook,
    *,
    params: str | None = None,
    parameters: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Execute a source into its stamped pair and return the stamp.

    The budgets of memory and time are the book size's; other parameters have the whole machine.

    The pair appears by a rename once all is well. A failed execution leaves the old pair alone
    and its half-executed notebook in ``_build/failed``.

    Raises:
        NotebookError: uncommitted rules, a raising cell, output on stderr; the cell is named.
    """
    # Other parameters go to _build: they are no result of the book, and need no history.
    commit = claims_commit(notebook) if params is None else ""
    check_installed(notebook)
    report: dict[str, Any] = {}
    started = time.perf_counter()
    memory = MEMORY_LIMIT_MB if params is None else 0
    limit = None if params else max(1, int(HANGS_AFTER * notebook.budget_seconds))
    executed = _run_papermill(notebook, parameters or {}, memory, report, limit)
    seconds = time.perf_counter() - started
    clean(executed)
    if fault := stderr_fault(executed) or machine_fault(executed, notebook.root):
        kept = _keep_failed(notebook, executed)
        raise NotebookError(f"{notebook.where}: {fault}; the run is kept in {kept}")
    stamp: dict[str, Any] = {
        "schema": SCHEMA,
        "fingerprint": fingerprint(notebook, executed, report["files"], parameters or {}),
        "claims_commit": commit,
        "run": run_facts(seconds, report["peak_mb"]),
    }
    target = notebook.run_pair(params)
    _settle_memory(stamp["run"], target)
    executed.metadata["proofread"] = stamp
    write_pair(executed, target)
    return stamp


def _run_papermill(
    notebook: Notebook,
    parameters: dict[str, Any],
    memory_limit_mb: int,
    report: dict[str, Any],
    limit: int | None,
) -> NotebookNode:
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.engines import papermill_engines
    from papermill.exceptions import PapermillExecutionError

    os.environ.update(KERNEL_ENVIRONMENT)
    papermill_engines.register("proofread", _engine(notebook.root, memory_limit_mb, report))
    scratch = (
        notebook.root / "_build" / "tmp" / f"{notebook.slug}.{notebook.stem}.{os.getpid()}.ipynb"
    )
    scratch.parent.mkdir(parents=True, exist_ok=True)
    try:
        return papermill.execute_notebook(
            json_copy(notebook.cells),
            scratch,
            parameters=parameters,
            engine_name="proofread",
            kernel_name="python3",
            language="python",
            cwd=notebook.folder,
            progress_bar=False,
            execution_timeout=limit,
            request_save_on_cell_execute=False,
        )
    except PapermillExecutionError as error:
        kept = _keep_failed(notebook, read_pair(scratch))
        hint = f" ({_memory_words(memory_limit_mb)})" if error.ename == "MemoryError" else ""
        raise NotebookError(
            f"{notebook.where}: cell {error.exec_count} raised {error.ename}: {error.evalue}{hint}"
            f"; the run is kept in {kept}"
        ) from error
    except CellTimeoutError as error:
        raise NotebookError(
            f"{notebook.where}: a cell ran for over {limit} s: does it hang? "
            "Larger runs go through PARAMS, which have no limit"
        ) from error
    except DeadKernelError as error:
        raise NotebookError(
            f"{notebook.where}: the kernel died ({error}); if it was killed for memory, "
            f"lower the parameters: {_memory_words(memory_limit_mb)}"
        ) from error
    except RuntimeError as error:
        raise NotebookError(
            f"{notebook.where}: the kernel did not start ({error}); kernels are spoken to over "
            "127.0.0.1: is the loopback interface up, and the machine not overloaded?"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def _memory_words(limit_mb: int) -> str:
    return f"the limit is {limit_mb} MiB" if limit_mb else "there is no limit but the machine's"


def json_copy(notebook: NotebookNode) -> NotebookNode:
    """An independent copy."""
    import nbformat

    return nbformat.from_dict(json.loads(json.dumps(notebook)))


def _keep_failed(notebook: Notebook, executed: NotebookNode) -> str:
    path = notebook.root / "_build" / "failed" / notebook.slug / f"{notebook.stem}.ipynb"
    write_pair(executed, path)
    return path.relative_to(notebook.root).as_posix()


def clean(notebook: NotebookNode) -> None:
    """Strip paths, times and ids that an execution leaves, and join split streams."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = type(notebook.metadata)(
        {"kernelspec": kernel, "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        if cell.metadata.get("tags") == []:
            del cell.metadata["tags"]
        if cell.cell_type == "code":
            cell.outputs = _join_streams(cell.outputs)
    set_cell_ids(notebook)


def _join_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    joined: list[NotebookNode] = []
    for out in outputs:
        last = joined[-1] if joined else None
        if last and out.output_type == last.output_type == "stream" and out.name == last.name:
            last.text += out.text
        else:
            joined.append(out)
    return joined


def stderr_fault(notebook: NotebookNode) -> str | None:
    """The first text that a cell wrote to stderr, worded as a fault."""
    for number, cell in code_cells(notebook):
        for out in cell.outputs:
            if out.output_type == "stream" and out.name == "stderr":
                text = out.text.strip().partition("\n")[0]
                return f"cell {number} wrote to stderr ({text[:160]!r}): mend what warns"
    return None


def machine_fault(notebook: NotebookNode, root: Path) -> str | None:
    """The first output that holds this checkout's or this user's own folder."""
    for number, cell in code_cells(notebook):
        text = json.dumps(cell.outputs, ensure_ascii=False)
        for folder in (root, Path.home()):
            if len(folder.parts) > 1 and re.search(rf"{re.escape(str(folder))}\b", text):
                return f"cell {number} shows a folder of this machine: don't print it"
    return None


def run_facts(seconds: float, peak_mb: float) -> dict[str, Any]:
    """What a run cost and on what: for the status table and the environment page."""
    cpus = os.cpu_count() or 1
    return {
        "seconds": round(seconds, 1),
        "peak_mb": int(round(peak_mb, -1)),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {cpus} CPUs",
    }


def _settle_memory(run: dict[str, Any], target: Path) -> None:
    """Keep the recorded peak when it moved by less than a tenth, so that diffs stay empty."""
    if not target.is_file():
        return
    try:
        old = stamp_of(read_pair(target)).get("run", {}).get("peak_mb", 0)
    except NotebookError:
        return
    if abs(run["peak_mb"] - old) <= 0.1 * old:
        run["peak_mb"] = old


def write_pair(notebook: NotebookNode, path: Path) -> None:
    """Write to a temporary name beside it, then rename: never a half-written pair."""
    import nbformat

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")  # same file system: rename works
    try:
        with scratch.open("w", encoding="utf-8") as file:
            nbformat.write(notebook, file)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """``python -m proofread.notebooks SLUG/STEM [PARAMS]``: one job of the batch."""
    name, *rest = arguments if arguments is not None else sys.argv[1:]
    params = rest[0] if rest and rest[0] != "book" else None
    try:
        root = find_root()
        (notebook,) = books(root, name)
        given = read_parameters(root, notebook.slug, params)[name] if params else None
        print(f"{name}: executing", flush=True)
        lock = root / "_build" / "tmp" / f"{notebook.slug}.{notebook.stem}.lock"
        with locked(lock, f"{name} is being executed by another process: wait for it"):
            stamp = execute(notebook, params=params, parameters=given)
    except (NotebookError, OSError) as error:  # a full disk among them
        print(f"error: {error}", file=sys.stderr)
        return 1
    run = stamp["run"]
    print(f"{name}: done in {run['seconds']} s, {run['peak_mb']} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
