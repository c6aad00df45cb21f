"""The benchmark script: a green gate writes a complete record, a red one writes nothing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ufm_spectra.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.filterwarnings("ignore")
def test_quick_run_writes_a_complete_record(script: dict[str, Any], tmp_path: Path) -> None:
    assert script["main"](["--quick", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "ufm_spectra.json").read_text("utf-8"))
    assert record["gate"] == "green"
    assert [case["kind"] for case in record["cases"]] == ["one product"] * 2 + ["eigenpairs"] * 3
    for case in record["cases"]:
        assert case["seconds"]["ours"]["median"] > 0
        assert case["times_ours"][case["bars"][0]["peer"]]["median"] > 0
    layer = record["cases"][-1]
    assert layer["residual"]["ours"] <= 1e-3
    assert layer["applications"]["curvlinops + eigsh"] >= 100


def test_red_gate_writes_nothing(script: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    namespace = script["main"].__globals__
    kept = namespace["jvp_of_gradient"]
    namespace["jvp_of_gradient"] = lambda problem: lambda v: kept(problem)(v) * 1.001
    try:
        assert script["main"](["--quick", "--out", str(tmp_path)]) == 1
    finally:
        namespace["jvp_of_gradient"] = kept
    assert "red" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
