from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from proofread.linear_core import LinearCore, figures, reference_surrogate, reports
from proofread.linear_core import certificates as certify
from proofread.linear_core.training import Comparison, LearningRateChoice, Run
from proofread.plotting import show

ACCURACIES = {("cross_entropy", 0.4): [0.70, 0.72], ("linear_core", 0.4): [0.75, 0.79]}


@pytest.fixture
def comparison() -> Comparison:
    runs = [
        Run(loss, rate, seed, False, 0.03, 0.41, accuracy, 0.6)
        for (loss, rate), values in ACCURACIES.items()
        for seed, accuracy in enumerate(values)
    ]
    grid = {0.01: 0.4, 0.03: 0.5, 0.1: 0.3}
    choices = [
        LearningRateChoice("cross_entropy", 0.4, 0.01, dict.fromkeys(grid, 0.1)),
        LearningRateChoice("linear_core", 0.4, 0.03, grid),
    ]
    return Comparison(tuple(runs), tuple(choices))


def test_gain_is_in_points_and_paired() -> None:
    gain = reports.gain(np.array([0.75, 0.79]), np.array([0.70, 0.72]))
    assert gain.value == pytest.approx(6.0)
    # differences 5 and 7: standard error 1, Student's t with one degree of freedom 12.706
    assert gain.high - gain.value == pytest.approx(12.706, abs=1e-3)


def test_accuracy_table(comparison: Comparison) -> None:
    table = reports.accuracy_table(comparison, "made up")
    assert [row[2] for row in table.rows] == ["cross-entropy", "linear core (exponential)"]
    assert table.rows[1][3].startswith("77.0 [")
    assert table.rows[0][1] == "41"
    assert "made up" in repr(table)


def test_slope_table() -> None:
    slopes = {"linear_core": (np.array([0.2, 0.6, 1.0, 1.0]), np.array([1.0, 1.0]))}
    table = reports.slope_table(slopes, "made up")
    assert [row[1:] for row in table.rows] == [
        ("clean", "0.70", "75%", "50%"),
        ("flipped", "1.00", "100%", "100%"),
    ]


def test_edges_are_named(comparison: Comparison) -> None:
    assert reports.at_edge(comparison) == ["cross_entropy at 40%"]


def test_benchmark_table(tmp_path: Path) -> None:
    spread = {"median": 1.5, "min": 1.25, "max": 2.0}
    case = {
        "shape": [1024, 32000],
        "dtype": "float32",
        "rounds": 15,
        "times_ours": {"peer": spread},
    }
    other = case | {"dtype": "bfloat16"}
    (tmp_path / "linear_core.json").write_text(json.dumps({"cases": [case, other]}))
    machine = {"threads": 1, "machine": "x86_64", "instructions": "AVX512"}
    machine |= {"packages": {"torch": "2.13.0"}}
    (tmp_path / "environment.json").write_text(json.dumps(machine))
    table = reports.benchmark_table(tmp_path)
    assert table.columns == ("contender", "1,024 × 32,000")
    assert table.rows == [("peer", "1.50 [1.25, 2.00]")]


def test_kernel_table(tmp_path: Path) -> None:
    kernel = {"kernel": "exponential fp32", "capability": 90, "registers": 64, "shared_bytes": 128}
    kernel |= {"spill_stores_bytes": 4, "spill_loads_bytes": 8, "instructions": 1170}
    kernel |= {"global_loads": {"64": 1, "128": 8}, "global_stores": {"32": 1, "128": 8}}
    (tmp_path / "linear_core_kernels.json").write_text(json.dumps([kernel]))
    (row,) = reports.kernel_table(tmp_path).rows
    assert row == ("exponential fp32", "sm_90", 64, 12, 128, 1170, 128, 128)


def test_benchmark_table_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make bench"):
        reports.benchmark_table(tmp_path)


def test_the_figures_draw_what_they_are_given(comparison: Comparison) -> None:
    fig = figures.draw_accuracies(comparison, ["cross_entropy", "linear_core"], [0.4])
    digest = show(fig, note="made up").digest
    assert "y 70, 72" in digest
    assert "y 75, 79" in digest
    surrogates = {"lc": LinearCore(), "hinge": reference_surrogate("hinge")}
    assert "y -1 to 0" in show(figures.draw_surrogates(surrogates)).digest
    assert '"lc"' in show(figures.draw_calibration(surrogates)).digest
    _, found = certify.attack(LinearCore(), 100, seed=0)
    assert "linear bound" in show(figures.draw_regrets({"lc": found, "again": found})).digest


def test_slope_histograms_are_shares() -> None:
    clean, flipped = np.array([0.0, 0.0, 1.0, 1.0]), np.array([1.0, 1.0])
    fig = figures.draw_slopes({"cross_entropy": (clean, flipped), "linear_core": (clean, clean)})
    digest = show(fig, note="made up").digest
    assert "clean label" in digest
    assert "flipped label" in digest
