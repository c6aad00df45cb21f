"""The structured benchmark: a red gate measures nothing, a green one records everything."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from proofread.linear_core import reports
from proofread.linear_core.tagging import METHODS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "linear_core_structured.py"


@pytest.fixture
def benchmark():
    return runpy.run_path(str(SCRIPT))


def test_quick_run_records_steps_curves_and_machine(benchmark, tmp_path: Path, capsys) -> None:
    assert benchmark["main"](["--quick", "--out", str(tmp_path)]) == 0
    record = reports.structured_record(tmp_path)
    names = {method.name for method in METHODS.values()} | {"pytorch-crf"}
    assert [case["tags"] for case in record["cases"]] == [4, 10]
    for case in record["cases"]:
        assert set(case["milliseconds"]) == set(case["times_ours"]) == names
        assert all(0 < ms["min"] <= ms["median"] for ms in case["milliseconds"].values())
        assert case["times_ours"][METHODS["sampled_sequences"].name]["median"] == 1
    curves, larger = (reports.tagging_record(tags, tmp_path) for tags in (20, 30))
    assert {run["method"] for run in curves["runs"]} == set(METHODS)
    rates = [{run["method"]: run["lr"] for run in each["runs"]} for each in (curves, larger)]
    del rates[0]["constrained_positions"]  # left out at the larger size
    assert rates[0] == rates[1]
    assert set(curves["references"]) == {"best from the word alone", "true model"}
    assert str(Path.home()) not in json.dumps([record, curves])
    assert reports.step_table(record, tags=(4, 10)).rows
    assert "gate: green" in capsys.readouterr().out


def test_a_wrong_svm_turns_the_gate_red(benchmark, tmp_path: Path, capsys) -> None:
    scope = benchmark["main"].__globals__
    right = scope["structured_hinge_loss"]
    scope["structured_hinge_loss"] = lambda *args, **options: right(*args, **options) * 1.001
    assert benchmark["main"](["--quick", "--out", str(tmp_path)]) == 1
    assert "by enumeration" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_crf_turns_the_gate_red(benchmark, tmp_path: Path, capsys) -> None:
    scope = benchmark["main"].__globals__
    right = scope["linear_chain_nll"]
    scope["linear_chain_nll"] = lambda *args, **options: right(*args, **options) + 1e-3
    assert benchmark["main"](["--quick", "--out", str(tmp_path)]) == 1
    assert "pytorch-crf" in capsys.readouterr().err
