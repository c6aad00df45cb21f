"""The thin layers: planning a batch, and commands that end with one line on a known error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proofread import batch, notebooks

ROOT = Path(__file__).resolve().parents[1]


def _command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proofread.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from proofread import cli; "
        "heavy = {'torch', 'matplotlib', 'sklearn', 'scipy', 'papermill', 'pydantic'}; "
        "print(heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_outside_a_checkout_there_is_one_clear_line(tmp_path: Path) -> None:
    done = _command("status", cwd=tmp_path)
    assert done.returncode == 1
    assert "is not inside a checkout" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_answers_on_the_real_book() -> None:
    for arguments in (("status",), ("claims",), ("claims", "--json"), ("data",), ("unchecked",)):
        done = _command(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        assert done.stdout or arguments == ("unchecked",)


def test_an_ascii_locale_shows_the_symbols_all_the_same() -> None:
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for command in ("status", "claims"):
        done = subprocess.run(
            [sys.executable, "-m", "proofread.cli", command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "linear_core" in done.stdout.decode("utf-8")
    assert "✔" in done.stdout.decode("utf-8")


def test_the_lock_is_released_when_its_holder_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from proofread.notebooks import locked\n"
        "with locked(Path(sys.argv[1]), 'busy'):\n    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(notebooks.NotebookError, match="is busy"),
        notebooks.locked(tmp_path / "lock", "it is busy"),
    ):
        pass
    holder.kill()
    holder.wait()
    with notebooks.locked(tmp_path / "lock", "it is busy"):
        reached = True
    assert reached, "the lock died with its holder"


def test_checked_pairs_are_remembered_by_content(tmp_path: Path) -> None:
    folder = tmp_path / "book" / "chapters" / "demo"
    folder.mkdir(parents=True)
    (folder / "theory.md").write_text("# T\n")
    pair = folder / "theory.ipynb"
    pair.write_text("{}")
    assert batch.unchecked(tmp_path) == ["book/chapters/demo/theory.ipynb"]
    batch.record_checked(tmp_path)
    assert batch.unchecked(tmp_path) == []
    os.utime(pair, (time.time() + 5,) * 2)
    assert batch.unchecked(tmp_path) == [], "a new date alone is no change"
    pair.write_text("{ }")
    assert batch.unchecked(tmp_path) == ["book/chapters/demo/theory.ipynb"]
    (tmp_path / "_build" / "checked.json").write_text("half a rec")
    assert batch.unchecked(tmp_path) == ["book/chapters/demo/theory.ipynb"]
