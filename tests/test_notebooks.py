from __future__ import annotations

import json
import subprocess
from pathlib import Path

import nbformat
import pytest

from proofread import kernel_probe, notebooks
from proofread.notebooks import Notebook, NotebookError

SOURCE = """---
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# Title

```{code-cell}
:tags: [parameters]

sizes = [1, 2]
rate: float = 0.4
```

```{code-cell}
%matplotlib inline
from demo import a
```
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    folder = tmp_path / "book" / "chapters" / "demo"
    folder.mkdir(parents=True)
    (tmp_path / "_toc.yml").write_text("root: x\n")
    (tmp_path / "requirements.txt").write_text(
        "numpy==2.4.6\nscikit_learn==1.9.1 # x\ntorch==2.13.0\n"
    )
    (folder / "theory.md").write_text(SOURCE)
    package = tmp_path / "src" / "demo"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "import os\n\ndef f():\n    from .sub import b\n    import numpy\n"
    )
    (package / "sub" / "__init__.py").write_text("from ..c import x\n")
    (package / "sub" / "b.py").write_text("import sklearn.svm\n")
    (package / "c.py").write_text("x = 1\n")
    (package / "unrelated.py").write_text("import torch\n")
    return tmp_path


def test_find_root_from_below_and_outside(
    house: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert notebooks.find_root(house / "book" / "chapters") == house
    with pytest.raises(NotebookError, match="not inside a checkout"):
        notebooks.find_root(tmp_path_factory.mktemp("elsewhere"))


def test_closure_follows_lazy_and_relative_imports(house: Path) -> None:
    files, third = notebooks.import_closure(house, "from demo import a")
    names = {path.relative_to(house / "src").as_posix() for path in files}
    assert names == {
        "demo/__init__.py",
        "demo/a.py",
        "demo/sub/__init__.py",
        "demo/sub/b.py",
        "demo/c.py",
    }
    assert third == {"numpy", "sklearn"}


def test_pins_are_read_by_normalised_name(house: Path) -> None:
    assert notebooks.pins(house) == {"numpy": "2.4.6", "scikit-learn": "1.9.1", "torch": "2.13.0"}


def test_parameters_and_magics(house: Path) -> None:
    notebook = Notebook(house, "demo", "theory")
    assert notebook.defaults == {"sizes": [1, 2], "rate": 0.4}
    assert "%matplotlib" not in notebooks.code_of(notebook.cells)


def test_parameter_files(house: Path) -> None:
    folder = house / "book" / "chapters" / "demo"
    (folder / "paper.yml").write_text("sizes: [10]\n")
    assert notebooks.read_parameters(house, "demo", "paper") == {"demo/theory": {"sizes": [10]}}
    (folder / "bad.yml").write_text("- 1\n")
    with pytest.raises(NotebookError, match="must map"):
        notebooks.read_parameters(house, "demo", "bad")
    with pytest.raises(NotebookError, match="there are: bad, paper"):
        notebooks.read_parameters(house, "demo", "none")


def test_cell_ids_depend_on_content_alone(house: Path) -> None:
    first = [
        cell.id for cell in notebooks.read_source(house / "book/chapters/demo/theory.md").cells
    ]
    again = [
        cell.id for cell in notebooks.read_source(house / "book/chapters/demo/theory.md").cells
    ]
    assert first == again
    assert len(set(first)) == len(first)


def test_clean_strips_times_and_joins_streams() -> None:
    cell = nbformat.v4.new_code_cell("print(1)")
    cell.metadata |= {"papermill": {"start_time": "x"}, "execution": {"t": "y"}, "tags": []}
    out = nbformat.v4.new_output
    cell.outputs = [
        out("stream", name="stdout", text="a"),
        out("stream", name="stdout", text="b"),
        out("stream", name="stderr", text="c"),
    ]
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"papermill": {"input_path": "/x"}})
    notebooks.clean(notebook)
    assert [o.text for o in notebook.cells[0].outputs] == ["ab", "c"]
    assert "papermill" not in json.dumps(notebook)
    assert "execution" not in notebook.cells[0].metadata
    assert "wrote to stderr ('c')" in (notebooks.stderr_fault(notebook) or "")


def test_digests_notice_one_character() -> None:
    cell = nbformat.v4.new_code_cell("x")
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="1.0")]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    before = notebooks.outputs_digest(notebook), notebooks.source_digest(notebook)
    cell.outputs[0].text = "1.1"
    assert notebooks.outputs_digest(notebook) != before[0]
    assert notebooks.source_digest(notebook) == before[1]
    cell.source = "y"
    assert notebooks.source_digest(notebook) != before[1]


def test_why_stale_before_and_after(house: Path) -> None:
    notebook = Notebook(house, "demo", "theory")
    assert notebooks.why_stale(notebook) == "never executed"
    notebook.pair.write_text("{}")
    assert "not readable" in notebooks.why_stale(notebook) or "schema" in notebooks.why_stale(
        notebook
    )
    pair = nbformat.v4.new_notebook(metadata={"proofread": {"schema": 0}})
    nbformat.write(pair, notebook.pair)
    assert notebooks.why_stale(notebook) == f"stamp of schema 0, now {notebooks.SCHEMA}"


def test_write_pair_never_leaves_half_a_file(house: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook(house, "demo", "theory")
    notebook.pair.write_text("old")

    def broken(_nb: object, file: object) -> None:
        file.write("half")  # type: ignore[attr-defined]
        raise OSError("no space left on device")

    monkeypatch.setattr(nbformat, "write", broken)
    with pytest.raises(OSError, match="no space"):
        notebooks.write_pair(nbformat.v4.new_notebook(), notebook.pair)
    assert notebook.pair.read_text() == "old"
    assert not list(notebook.folder.glob(".*"))


def test_claims_commit_wants_committed_rules(house: Path) -> None:
    notebook = Notebook(house, "demo", "theory")
    notebook.claims.write_text("x\n")
    with pytest.raises(NotebookError, match="no git checkout"):
        notebooks.claims_commit(notebook)
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    assert "no git checkout" in notebooks.history_gap(house)
    for arguments in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "rules"]):
        subprocess.run(["git", "-C", str(house), *arguments], check=True)
    assert len(notebooks.claims_commit(notebook)) == 40
    notebook.claims.write_text("y\n")
    with pytest.raises(NotebookError, match="not committed"):
        notebooks.claims_commit(notebook)


def test_peak_memory_is_this_process() -> None:
    before = kernel_probe.peak_memory_mb()
    block = bytearray(64 * 2**20)
    assert kernel_probe.peak_memory_mb() >= before
    assert kernel_probe.peak_memory_mb() >= len(block) / 2**20


def test_probe_reports_read_files_and_not_written_ones(house: Path) -> None:
    code = f"""
from proofread import kernel_probe
kernel_probe.start({str(house)!r}, 4096)
open({str(house / "requirements.txt")!r}).read()
open({str(house / "written.txt")!r}, "w").write("x")
print(kernel_probe.report({str(house)!r}))
"""
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["files"] == ["requirements.txt"]


def test_a_syntax_error_names_its_file_and_line(house: Path) -> None:
    (house / "src" / "demo" / "c.py").write_text("x = (\n")
    with pytest.raises(NotebookError, match=r"src/demo/c\.py, line 1"):
        notebooks.import_closure(house, "from demo import a")
    with pytest.raises(NotebookError, match="a cell, line 1"):
        notebooks.import_closure(house, "x = (")


def test_other_languages_are_no_python() -> None:
    assert notebooks.strip_magics("%%bash\nls | wc\n") == ""
    assert notebooks.strip_magics("%time x = 1\n!ls\ny = 2") == "y = 2"


def test_a_pin_that_is_not_installed_is_refused(house: Path) -> None:
    notebooks.check_installed(Notebook(house, "demo", "theory"))
    (house / "requirements.txt").write_text("numpy==9.9\n")
    with pytest.raises(NotebookError, match=r"numpy .* is installed, requirements.txt pins 9\.9"):
        notebooks.check_installed(Notebook(house, "demo", "theory"))


def test_a_folder_of_this_machine_in_an_output_is_refused(house: Path) -> None:
    cell = nbformat.v4.new_code_cell("x")
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=f"see {house}/x.csv")]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    assert "cell 1 shows a folder" in (notebooks.machine_fault(notebook, house) or "")
    cell.outputs[0].text = "see book/x.csv"
    assert notebooks.machine_fault(notebook, house) is None


def test_a_broken_parameters_cell_names_its_file(house: Path) -> None:
    source = house / "book/chapters/demo/theory.md"
    source.write_text(SOURCE.replace("sizes = [1, 2]", "sizes = [1,"))
    with pytest.raises(NotebookError, match=r"demo/theory\.md, line"):
        _ = Notebook(house, "demo", "theory").defaults


def test_no_memory_limit_is_no_limit() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    kernel_probe.limit_memory(0)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
