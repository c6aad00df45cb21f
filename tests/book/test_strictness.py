"""Each way a book can be wrong, shown failing once, with a message that names file and remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Book

THEORY = "book/chapters/demo/theory"
EXPERIMENTS = "book/chapters/demo/experiments"


def _outputs(pair: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    outputs = [out for cell in pair["cells"] for out in cell.get("outputs", [])]
    return [out for out in outputs if kind in out.get("data", {}) or out.get("name") == kind]


# --- the sound book ----------------------------------------------------------------------------


def test_the_template_executes_rules_and_is_sound(executed_book: Book) -> None:
    done = executed_book.proofread("check")
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(executed_book.proofread("claims", "--json").stdout)
    assert {c["claim"]: c["verdict"] for c in shown} == {
        "demo/variance-of-the-mean": "verified",
        "demo/rate": "holds at reduced scale",
        "demo/optimal": "planned",
    }
    rules = executed_book.git("log", "-1", "--format=%H", "--", f"{EXPERIMENTS[:-12]}/claims.yml")
    assert all(c["rules_commit"] in (rules.strip(), None, "") for c in shown)
    assert "fresh" in executed_book.proofread("status").stdout


def test_a_fresh_book_executes_nothing(executed_book: Book) -> None:
    done = executed_book.proofread("run")
    assert done.returncode == 0
    assert "nothing to execute" in done.stdout


def test_re_execution_changes_seconds_alone(book: Book) -> None:
    done = book.proofread("run", "demo/experiments", "--force", "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [ln for ln in book.git("diff", "-U0").splitlines() if re.match(r"[+-] ", ln)]
    assert all('"seconds"' in line for line in lines), lines


# --- point 3, one by one -----------------------------------------------------------------------


def test_a_raising_cell(book: Book) -> None:
    before = (book.folder / "theory.ipynb").read_bytes()
    book.edit(
        f"{THEORY}.md", "independent = variance_ratio(7", "1 / 0\nindependent = variance_ratio(7"
    )
    done = book.proofread("run")
    assert done.returncode != 0
    assert "theory.md: cell 1 raised ZeroDivisionError" in done.stdout
    assert (book.root / "_build/failed/demo/theory.ipynb").is_file()
    assert (book.folder / "theory.ipynb").read_bytes() == before, "the old pair is left alone"
    assert f"{THEORY}.ipynb: stale (theory.md changed)" in book.problems()


def test_a_stale_pair_names_the_module(book: Book) -> None:
    module = book.root / "src/proofread/demo/sampling.py"
    module.write_text(module.read_text() + "\n# touched\n")
    said = book.problems()
    assert f"{THEORY}.ipynb: stale (src/proofread/demo/sampling.py changed)" in said
    assert "Remedy: `make run CHAPTER=demo/theory`" in said


def test_only_the_importers_of_a_module_are_stale(book: Book) -> None:
    module = book.root / "src/proofread/plotting.py"
    module.write_text(module.read_text() + "\n# touched\n")
    said = book.problems()
    assert f"{EXPERIMENTS}.ipynb: stale (src/proofread/plotting.py changed)" in said
    # theory imports proofread.demo, whose functions import plotting lazily: it counts as well
    assert f"{THEORY}.ipynb: stale (src/proofread/plotting.py changed)" in said
    module.write_text(module.read_text().removesuffix("\n# touched\n"))
    unrelated = book.root / "src/proofread/cli.py"
    unrelated.write_text(unrelated.read_text() + "\n# touched\n")
    assert book.proofread("check").returncode == 0


def test_a_changed_pin_makes_only_its_users_stale(book: Book) -> None:
    book.edit("requirements.txt", "scikit-learn==", "scikit-learn==0.")
    assert book.proofread("check").returncode == 0, "no notebook of the template imports it"
    book.edit("requirements.txt", "numpy==", "numpy==0.")
    assert "pin of numpy changed" in book.problems()


def test_a_pair_whose_cells_differ_from_its_source(book: Book) -> None:
    def change(pair: dict[str, Any]) -> None:
        code = next(cell for cell in pair["cells"] if cell["cell_type"] == "code")
        code["source"] = "print('another story')"

    book.edit_pair("theory", change)
    assert f"{THEORY}.ipynb: its cells differ from its source" in book.problems()


def test_an_output_edited_by_hand(book: Book) -> None:
    def change(pair: dict[str, Any]) -> None:
        _outputs(pair, "stdout")[0]["text"] = ["independent: 2, antithetic: 1/7\n"]

    book.edit_pair("theory", change)
    assert f"{THEORY}.ipynb: stale (an output was edited by hand)" in book.problems()


def test_a_picture_edited_by_hand(book: Book) -> None:
    def change(pair: dict[str, Any]) -> None:
        data = _outputs(pair, "image/png")[0]["data"]
        data["image/png"] = data["image/png"].replace("A", "B", 1)

    book.edit_pair("experiments", change)
    assert f"{EXPERIMENTS}.ipynb: stale (an output was edited by hand)" in book.problems()


def test_nbval_catches_an_output_with_a_forged_hash(book: Book) -> None:
    def change(pair: dict[str, Any]) -> None:
        _outputs(pair, "stdout")[0]["text"] = ["independent: 2, antithetic: 1/7\n"]

    book.edit_pair("theory", change, restamp=True)
    assert book.proofread("check").returncode == 0, "the forged hash alone passes"
    done = book.call("-m", "pytest", "-p", "no:cacheprovider", "--nbval", f"{THEORY}.ipynb")
    assert done.returncode == 1
    assert "independent: 2" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see /home/ann/data/x.csv\n", "a machine's path ('/home/ann')"),
        ("done at 2026-11-30 18:28:19\n", "a time ('2026-11-30 18:28')"),
        ("<object at 0x7f3a5c2b1d90>\n", "a memory address"),
    ],
)
def test_traces_of_a_machine(book: Book, text: str, said: str) -> None:
    def change(pair: dict[str, Any]) -> None:
        _outputs(pair, "stdout")[0]["text"] = [text]

    book.edit_pair("theory", change, restamp=True)
    assert f"{THEORY}.ipynb: cell 1 holds {said}" in book.problems()


def test_stderr_is_refused_at_execution_and_in_a_pair(book: Book) -> None:
    book.edit(f"{THEORY}.md", "print(f", "import warnings; warnings.warn('hm')\nprint(f")
    done = book.proofread("run")
    assert done.returncode != 0
    assert "theory.md: cell 1 wrote to stderr" in done.stdout

    def change(pair: dict[str, Any]) -> None:
        _outputs(pair, "stdout")[0]["name"] = "stderr"

    book.edit_pair("theory", change, restamp=True)
    assert f"{THEORY}.ipynb: cell 1 holds stderr" in book.problems()


def test_over_the_budget_of_seconds_and_memory(book: Book) -> None:
    def change(pair: dict[str, Any]) -> None:
        pair["metadata"]["proofread"]["run"] |= {"seconds": 15.1, "peak_mb": 4100}

    book.edit_pair("theory", change)
    said = book.problems()
    assert f"{THEORY}.ipynb: over its budget of seconds (15.1 > 15)" in said
    assert f"{THEORY}.ipynb: over its budget of memory (4100 > 4096 MiB)" in said


def test_too_much_memory_is_an_ordinary_error(book: Book) -> None:
    book.edit(
        f"{THEORY}.md",
        "independent = variance",
        "hog = bytearray(5 * 2**30)\nindependent = variance",
    )
    done = book.proofread("run")
    assert done.returncode != 0
    assert "theory.md: cell 1 raised MemoryError" in done.stdout
    assert "4096 MiB" in done.stdout


def test_a_missing_control(book: Book) -> None:
    book.edit(f"{THEORY}.md", "control=control", "control={}")
    done = book.proofread("run")
    assert done.returncode != 0
    assert "control antithetic is missing or unknown" in done.stdout

    def change(pair: dict[str, Any]) -> None:
        _outputs(pair, "application/vnd.proofread.ruling+json")[0]["data"][
            "application/vnd.proofread.ruling+json"
        ]["control"] = {}

    book.edit_pair("theory", change, restamp=True)
    assert "demo/variance-of-the-mean lacks a control" in book.problems()


def test_an_unknown_claim(book: Book) -> None:
    book.edit(f"{THEORY}.md", 'rule("demo/variance-of-the-mean"', 'rule("demo/nonsense"')
    done = book.proofread("run")
    assert done.returncode != 0
    assert "unknown claim 'nonsense'" in done.stdout

    def change(pair: dict[str, Any]) -> None:
        _outputs(pair, "application/vnd.proofread.ruling+json")[0]["data"][
            "application/vnd.proofread.ruling+json"
        ]["claim"] = "demo/nonsense"

    book.edit_pair("theory", change, restamp=True)
    said = book.problems()
    assert f"{THEORY}.ipynb: rules on unknown claim demo/nonsense" in said
    assert "demo/variance-of-the-mean should be ruled once, in theory; it is in no cell" in said


def test_a_control_that_does_not_flip(book: Book) -> None:
    book.edit(f"{THEORY}.md", "correlation=-1", "correlation=0")
    assert book.proofread("run").returncode == 0, "the run is kept, its verdict is inconclusive"
    said = book.problems()
    assert "demo/variance-of-the-mean: control outside its expected interval: antithetic" in said


def test_a_typed_number_is_no_measurement(book: Book) -> None:
    book.edit(
        f"{THEORY}.md",
        'rule("demo/variance-of-the-mean", independent,',
        'rule("demo/variance-of-the-mean", 1.0,',
    )
    assert "cell 2 rules on a typed number (1.0)" in book.problems()


def test_rules_must_be_committed_before_the_result(book: Book) -> None:
    book.edit(f"{EXPERIMENTS[:-12]}/claims.yml", "[-0.6, -0.4]", "[-0.7, -0.3]")
    done = book.proofread("run")
    assert done.returncode != 0
    assert "claims.yml has rules that are not committed" in done.stdout
    said = book.problems()
    assert f"{EXPERIMENTS}.ipynb: claims.yml differs from the rules' commit" in said
    assert f"{EXPERIMENTS}.ipynb: demo/rate was ruled under other rules" in said


def test_broken_claims_file(book: Book) -> None:
    book.edit(f"{EXPERIMENTS[:-12]}/claims.yml", 'refute: "(-0.3, inf)"', 'refute: "(-0.5, inf)"')
    assert "overlap" in book.problems()


def test_a_figure_without_alt_text_and_a_long_cell(book: Book) -> None:
    book.edit(f"{EXPERIMENTS}.md", "    alt: Two curves", "    title: Two curves")
    book.edit(
        f"{EXPERIMENTS}.md",
        "frozen = mean",
        "\n".join(f"x{i} = {i}" for i in range(16)) + "\n# " + 80 * "x" + "\nfrozen = mean",
    )
    assert book.proofread("run").returncode == 0
    said = book.problems()
    assert f"{EXPERIMENTS}.ipynb: cell 2 draws without name, caption and alt" in said
    assert f"{EXPERIMENTS}.md: cell 2 has 23 lines, over 15" in said
    assert f"{EXPERIMENTS}.md: cell 2 has a line of 82 characters, over 80" in said


START_JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"


def _render(book: Book) -> tuple[int, str]:
    options = ("build", "--all", "-W", "-n", "--keep-going", ".")
    done = book.call("-c", START_JUPYTER_BOOK, *options)
    return done.returncode, done.stdout + done.stderr


def test_the_template_renders(book: Book) -> None:
    code, log = _render(book)
    assert code == 0, log
    html = (book.root / "_build/html/book/chapters/demo/theory.html").read_text()
    assert 'id="claim-demo-variance-of-the-mean"' in html
    shown = json.loads((book.root / "_build/claims.json").read_text())
    assert [claim["verdict"] for claim in shown] == [
        "verified",
        "holds at reduced scale",
        "planned",
    ]


def test_broken_cross_reference_and_citation_fail_the_rendering(book: Book) -> None:
    text = (book.folder / "theory.md").read_text()
    broken = "\nSee {eq}`no-such-equation` and {cite}`nobody1900`.\n"
    (book.folder / "theory.md").write_text(text + broken)
    assert book.proofread("run").returncode == 0
    code, log = _render(book)
    assert code != 0
    assert re.search(r"theory\.ipynb.*no-such-equation", log)
    assert re.search(r"theory\.ipynb.*nobody1900", log)


def test_a_chapter_missing_from_the_contents(book: Book) -> None:
    book.edit("_toc.yml", "book/chapters/demo/experiments", "book/claims")
    assert f"_toc.yml: {EXPERIMENTS} is missing" in book.problems()


# --- cheats, one by one ------------------------------------------------------------------------

RECORD = "application/vnd.proofread.ruling+json"
CLAIMS = "book/chapters/demo/claims.yml"


def test_a_verdict_that_does_not_follow_from_its_numbers(book: Book) -> None:
    book.edit(
        f"{THEORY}.md",
        'rule("demo/variance-of-the-mean", independent,',
        'import dataclasses\nr = rule("demo/variance-of-the-mean", antithetic,',
    )
    text = (book.folder / "theory.md").read_text()
    end = text.rindex("```")
    forged = 'dataclasses.replace(r, verdict="verified", reason="proved")\n```\n'
    (book.folder / "theory.md").write_text(text[:end] + forged)
    assert book.proofread("run").returncode == 0
    assert "demo/variance-of-the-mean says 'verified', its numbers say 'incon" in book.problems()
    shown = json.loads(book.proofread("claims", "--json").stdout)
    assert shown[0]["verdict"] == "inconclusive", "the ledger computes, it does not copy"


def test_ways_around_nbval(book: Book) -> None:
    first = 'control = {"antithetic": antithetic}'
    book.edit(f"{THEORY}.md", first, f":tags: [nbval-ignore-output]\n\n# NBVAL_SKIP\n{first}")
    said = book.problems()
    assert f"{THEORY}.md: cell 2 carries nbval-ignore-output: nbval would not check it" in said
    assert f"{THEORY}.md: cell 2 holds an NBVAL_ comment" in said


def test_figures_that_are_too_heavy_together(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    from proofread import checks

    monkeypatch.setattr(checks, "MAX_CHAPTER_FIGURE_BYTES", 1000)
    (problem,) = checks.check_book(book.root)
    assert problem.file == "book/chapters/demo"
    assert "its figures take" in problem.fault


def test_a_full_disk_is_said_and_loses_nothing(book: Book) -> None:
    """A file where a folder has to be made stands in for a disk that takes nothing more."""
    import shutil

    before = (book.folder / "theory.ipynb").read_bytes()
    shutil.rmtree(book.root / "_build" / "tmp", ignore_errors=True)
    (book.root / "_build" / "tmp").write_text("")
    done = book.call("-m", "proofread.notebooks", "demo/theory")
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert (book.folder / "theory.ipynb").read_bytes() == before


def test_a_swapped_picture_with_a_forged_hash(book: Book) -> None:
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("P", (9, 9)).save(buffer, "PNG")

    def change(pair: dict[str, Any]) -> None:
        data = _outputs(pair, "image/png")[0]["data"]
        data["image/png"] = base64.b64encode(buffer.getvalue()).decode()

    book.edit_pair("experiments", change, restamp=True)
    assert "cell 2 shows a picture that is not the one its text describes" in book.problems()


def test_rules_changed_after_the_first_result(book: Book) -> None:
    book.edit(CLAIMS, '"[-0.6, -0.4]"', '"[-0.7, -0.3)"')
    book.edit(CLAIMS, "(-0.3, inf)", "[-0.3, inf)")
    book.git("commit", "-qam", "kinder rules")
    assert book.proofread("run").returncode == 0
    said = book.problems()
    assert "claims.yml: the rules of demo/rate were changed after its first result" in said
    reason = '    amended: the first interval had a typing error\n    accept: "[-0.7'
    book.edit(CLAIMS, '    accept: "[-0.7', reason)
    book.git("commit", "-qam", "say why")
    assert book.proofread("run").returncode == 0
    assert book.proofread("check").returncode == 0


def test_rules_that_come_with_their_result(book: Book) -> None:
    """Squashed into one commit, nobody can tell which came first."""
    rules = book.git("log", "-1", "--format=%H", "--", CLAIMS).strip()
    tree = book.git("write-tree").strip()
    squashed = book.git("commit-tree", tree, "-m", "everything").strip()
    book.git("reset", "-q", squashed)
    for stem in ("theory", "experiments"):
        path = book.folder / f"{stem}.ipynb"
        path.write_text(path.read_text().replace(rules, squashed))
    said = book.problems()
    assert "the rules of demo/rate came with its first result" in said


def test_notebooks_and_cells_that_no_check_would_see(book: Book) -> None:
    pair = (book.folder / "theory.ipynb").read_text()
    (book.folder / "extra.ipynb").write_text(pair)
    (book.root / "book" / "loose.ipynb").write_text(pair)
    (book.root / "book" / "page.md").write_text("# P\n\n```{code-cell}\n1\n```\n")
    said = book.problems()
    assert "book/chapters/demo/extra.ipynb: a notebook without a source beside it" in said
    assert "book/loose.ipynb: a notebook without a source beside it" in said
    assert "book/page.md: code cells outside a chapter" in said
    for stem in ("theory", "experiments"):
        (book.folder / f"{stem}.md").unlink()
    assert "book/chapters/demo: a chapter without any notebook" in book.problems()


@pytest.mark.parametrize(
    "value",
    ['float("1")', "a", "round(1.0, 3)", "Estimate(1, 1, 1, 5, 0.95)", "b[0] + 0 * c"],
)
def test_laundered_numbers(book: Book, value: str) -> None:
    bound = "a: float = 1\nb = [a, 2]\n(c := 3)\n"
    book.edit(
        f"{THEORY}.md",
        'rule("demo/variance-of-the-mean", independent,',
        f'{bound}rule("demo/variance-of-the-mean", {value},',
    )
    expected = f"cell 2 rules on a typed number ({value})".replace('"', "'")
    if value.startswith("b["):  # a subscript is beyond the analysis, and is not flagged
        assert "typed number" not in book.problems()
    else:
        assert expected in book.problems()


def test_imports_past_the_stamp(book: Book) -> None:
    book.edit(
        f"{THEORY}.md",
        "from proofread.claims import rule",
        "from proofread.claims import rule as judge\nimport subprocess",
    )
    said = book.problems()
    assert "cell 1 imports rule under another name" in said
    assert "cell 1 imports subprocess, past what the stamp can see" in said


def test_broken_files_are_faults_and_no_tracebacks(book: Book) -> None:
    (book.folder / "theory.md").write_text(
        "---\nkernelspec: [\n---\n\n```{code-cell}\nx = (\n```\n"
    )
    for command in ("check", "status", "run"):
        done = book.proofread(command)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr, done.stderr
        assert "theory.md" in done.stdout + done.stderr
    (book.root / "_toc.yml").write_text("parts: [")
    assert "_toc.yml: not readable" in book.proofread("check").stdout


def test_a_name_that_would_shadow_the_machinery(book: Book) -> None:
    for name, said in (("claims", "claims.py is already there"), ("json", "Python's own")):
        done = book.proofread("new", name)
        assert done.returncode == 1
        assert said in done.stderr


def test_a_hanging_cell_ends(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    from proofread import notebooks

    monkeypatch.setattr(notebooks, "HANGS_AFTER", 0.3)
    first = "from proofread.claims import rule"
    book.edit(f"{THEORY}.md", first, f"while True:\n    pass\n{first}")
    with pytest.raises(notebooks.NotebookError, match="does it hang"):
        notebooks.execute(notebooks.Notebook(book.root, "demo", "theory"))


def test_a_killed_batch_stays_locked_while_its_jobs_run(book: Book) -> None:
    import os
    import signal
    import subprocess
    import sys
    import time

    book.edit(
        f"{THEORY}.md",
        "independent = variance",
        "import time\ntime.sleep(60)\nindependent = variance",
    )
    env = os.environ | {"PYTHONPATH": str(book.root / "src")}
    command = [sys.executable, "-m", "proofread.cli", "run"]
    batch = subprocess.Popen(
        command, cwd=book.root, env=env, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        log = book.root / "_build" / "run" / "book" / "demo" / "theory.log"
        before = log.stat().st_mtime_ns if log.exists() else 0
        deadline = time.monotonic() + 60
        while not (log.exists() and log.stat().st_mtime_ns > before):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        batch.kill()
        batch.wait()
        assert "another batch is running" in book.proofread("run").stderr
    finally:
        os.killpg(batch.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while (done := book.proofread("run", "demo/experiments")).returncode:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.5)


# --- batches -----------------------------------------------------------------------------------


def test_two_batches_at_once_are_refused(book: Book) -> None:
    import fcntl

    lock = book.root / "_build" / "lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = book.proofread("run", "--force")
    assert done.returncode == 1
    assert "another batch is running" in done.stderr


def test_paper_parameters_go_to_the_build_folder_and_resume(book: Book) -> None:
    book.edit(
        f"{EXPERIMENTS[:-12]}/paper.yml", "[16, 64, 256, 1024, 4096, 16384]", "[8, 32, 128, 512]"
    )
    done = book.proofread("run", "demo", "--params", "paper")
    assert done.returncode == 0, done.stdout + done.stderr
    pair = book.root / "_build/runs/paper/demo/experiments.ipynb"
    assert "8, 32, 128, 512" in pair.read_text()
    assert book.git("status", "--porcelain", "--", "*.ipynb") == ""
    again = book.proofread("run", "demo", "--params", "paper")
    assert "nothing to execute" in again.stdout


def test_unknown_parameter_and_chapter_are_errors(book: Book) -> None:
    (book.folder / "odd.yml").write_text("sizez: [1]\n")
    done = book.proofread("run", "demo", "--params", "odd")
    assert done.returncode == 1
    assert "no notebook of demo has a parameter sizez" in done.stderr
    done = book.proofread("run", "nobody")
    assert done.returncode == 1
    assert "no chapter or notebook 'nobody'; there are: demo" in done.stderr


def test_plain_snakemake_and_plain_papermill(book: Book, tmp_path: Path) -> None:
    assert book.call("-m", "snakemake", "--config", "force=1").returncode == 0
    for cwd in (book.root, book.folder):
        out = tmp_path / "out.ipynb"
        done = book.call("-m", "papermill", "--cwd", str(cwd), f"{THEORY}.ipynb", str(out))
        assert done.returncode == 0, done.stderr
