"""The benchmark script: a green gate writes a complete record, a red one writes nothing."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "langevin.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def without_peers(monkeypatch: pytest.MonkeyPatch, script: dict[str, Any]) -> dict[str, Any]:
    """A quick run imports no jax, which takes seconds and whose threads outlive the test."""
    namespace = script["main"].__globals__
    kept = namespace["find_spec"]
    monkeypatch.setitem(namespace, "find_spec", lambda n: None if n == "blackjax" else kept(n))
    return namespace


def test_quick_run_writes_a_complete_record(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_peers(monkeypatch, script)
    assert script["main"](["--quick", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "langevin.json").read_text("utf-8"))
    assert record["gate"] == "green"
    against = [row["against"] for row in record["rows"]]
    each = ["torch's normals alone", "our normals alone", "torch loop"]
    assert against == each * 2 + ["full chain"]
    for row in record["rows"]:
        assert row["ratio"] > 0
        bar = float(row["target"].split()[1].replace("none", "inf"))
        met = row["ratio"] <= bar if row["target"][0] == "≤" else row["ratio"] >= bar
        assert row["met"] == met
        assert row["milliseconds_a_step"]["ours"] > 0


def test_red_gate_writes_nothing(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    namespace = without_peers(monkeypatch, script)
    right = namespace["ours"]
    monkeypatch.setitem(namespace, "ours", lambda *arguments: 1.05 * right(*arguments))
    assert script["main"](["--quick", "--out", str(tmp_path)]) == 1
    assert "red" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
