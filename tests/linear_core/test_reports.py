from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from proofread.linear_core import LinearCore, figures, reference_surrogate, reports, tagging
from proofread.linear_core import certificates as certify
from proofread.linear_core.multiclass import (
    certify_sum_counterexample,
    constrained_two_sided_ratio,
    regret_curves,
)
from proofread.linear_core.optimization import compare_descents
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


def step_record() -> dict:
    """1, 2, 4, 8 ms for the sampled loss at 1000 … 8000 tags, and their squares for Viterbi."""

    def spread(median: float) -> dict:
        return {"median": median, "min": 0.9 * median, "max": 1.5 * median}

    ours, svm = (tagging.METHODS[m].name for m in ("sampled_sequences", "structured_svm"))
    cases = []
    for tags, ms in ((10, 5.0), (1000, 1.0), (2000, 2.0), (4000, 4.0), (8000, 8.0)):
        times = {ours: spread(ms), svm: spread(ms**2)}
        ratios = {ours: spread(1.0), svm: spread(ms)}
        cases.append({"tags": tags, "rounds": 7, "milliseconds": times, "times_ours": ratios})
    machine = {"threads": 1, "machine": "x86_64", "instructions": "AVX512"}
    machine |= {"packages": {"torch": "2.13.0"}}
    return {"cases": cases, "batch": 4, "length": 32, "environment": machine}


def test_exponents_leave_the_smallest_size_out() -> None:
    record = step_record()
    assert reports.step_exponent(record, "sampled_sequences").value == pytest.approx(1)
    assert reports.step_exponent(record, "structured_svm").value == pytest.approx(2)
    with pytest.raises(ValueError, match="at least 3"):
        reports.step_exponent(record, "structured_svm", smallest=4000)


def test_speedup_is_the_recorded_range() -> None:
    found = reports.speedup(step_record(), 8000, tagging.METHODS["structured_svm"].name)
    assert (found.value, found.low, found.high) == pytest.approx((8, 7.2, 12))
    with pytest.raises(KeyError):
        reports.speedup(step_record(), 8000, "perceptron")


def test_step_table_shows_gaps() -> None:
    record = step_record()
    svm = tagging.METHODS["structured_svm"].name
    del record["cases"][-1]["milliseconds"][svm]
    table = reports.step_table(record, tags=(10, 1000, 8000))
    assert table.columns == ("step", "|Y| = 10", "|Y| = 1,000", "|Y| = 8,000")
    assert table.rows[1] == (svm, "25", "1", "–")
    assert "7 interleaved runs" in table.note


def test_structured_record_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "linear_core_structured.json").write_text(json.dumps({"gate": "green"}))
    assert reports.structured_record(tmp_path) == {"gate": "green"}
    with pytest.raises(FileNotFoundError, match="make bench"):
        reports.structured_record(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="make bench"):
        reports.tagging_record(1000, tmp_path)


def test_fused_table(tmp_path: Path) -> None:
    spread = {"median": 1.5, "min": 1.25, "max": 2.0}
    case = {"shape": [8, 4, 100], "dtype": "float32", "rounds": 7}
    case |= {"times_ours": {"peer": spread}, "peak_megabytes": {"peer": 12.5, "ours": 3.0}}
    machine = {"threads": 1, "instructions": "AVX512"}
    (tmp_path / "linear_core_fused.json").write_text(json.dumps({"cases": [case]}))
    (tmp_path / "environment.json").write_text(json.dumps(machine))
    table = reports.fused_table(tmp_path)
    assert table.columns == ("contender", "float32, time", "float32, MB")
    assert table.rows == [("peer", "1.50 [1.25, 2.00]", 12.5), ("ours", "–", 3.0)]


def test_tagging_table_and_curves() -> None:
    curves = [
        tagging.Curve("crf", seed, 1.0, (1, 10), (0.1, 1.0), (0.2, last))
        for seed, last in enumerate((0.8, 0.9))
    ]
    table = reports.tagging_table(curves, "made up")
    assert table.rows[0][0] == "CRF"
    assert table.rows[0][1].startswith("85.0 [")
    assert table.rows[0][2:] == ("1", 2)
    fig = figures.draw_tagging([asdict(c) for c in curves], {"best from the word": 0.6}, "steps")
    digest = show(fig, note="made up").digest
    assert "y 20, 85" in digest
    assert "steps" in digest


def test_step_times_are_drawn_where_they_are_recorded() -> None:
    record = step_record()
    svm = tagging.METHODS["structured_svm"].name
    for case in record["cases"][2:]:
        del case["milliseconds"][svm]
    digest = show(figures.draw_step_times(record["cases"]), note="made up").digest
    assert f'"{svm}": 2 points' in digest


def test_two_sided_and_counterexample_tables() -> None:
    ratios = constrained_two_sided_ratio(LinearCore(), 4)
    (row,) = reports.two_sided_table({"one-sided": ratios}, "ours").rows
    assert row[0] == "one-sided"
    assert float(row[1]) == pytest.approx(ratios.ratios[0], abs=1e-4)
    assert row[-1] == "1.01"
    found = certify_sum_counterexample(deltas=("0.04", "0.01", "0.001"))
    last = reports.counterexample_table(found, "ours").rows[-1]
    assert last[0] == "0.001"
    assert float(last[2]) == pytest.approx(1000 / 81, rel=1e-3)
    assert float(last[3]) == pytest.approx(81, rel=1e-3)


def test_descent_table_and_figure() -> None:
    smooth = {"Linear-Core": LinearCore()}
    hinge = reference_surrogate("hinge")
    found = compare_descents(smooth, hinge, sizes=(5,), seeds=range(3), n_steps=100)
    table = reports.descent_table(found, "made up")
    assert table.columns == ("loss and step", "exponent, d = 5", "largest gap / bound")
    assert float(table.rows[0][-1]) <= 1
    assert table.rows[1][-1] == "no bound"
    assert '"Linear-Core": 100 points' in show(figures.draw_descents(found, 5), note="x").digest


def test_theory_figures() -> None:
    curves = regret_curves(LinearCore(), deltas=[0.001, 0.01])
    assert "sum of margins" in show(figures.draw_regret_curves(curves)).digest
    variances = {"uniform": {4: 5.0, 8: 13.0}}
    assert "x 4, 8; y 5, 13" in show(figures.draw_variances(variances), note="x").digest
    assert "log-odds κ = 2" in show(figures.draw_scaling((2,))).digest


def test_time_table_finds_the_first_mark() -> None:
    runs = [
        {"method": "crf", "lr": 1.0, "steps": [5, 20], "accuracy": [0.7, 0.84]},
        {"method": "crf", "lr": 1.0, "steps": [5, 40], "accuracy": [0.8, 0.88]},
        {"method": "structured_svm", "lr": 0.1, "steps": [1, 2], "accuracy": [0.1, 0.2]},
        {"method": "structured_svm", "lr": 0.1, "steps": [1, 2], "accuracy": [0.1, 0.2]},
    ]
    machine = {"threads": 1, "instructions": "AVX512"}
    record = {"seconds": [0.5, 2], "tags": 1000, "runs": runs, "environment": machine}
    crf, svm = reports.time_table(record, target=0.8).rows
    assert crf[0:2] == ("CRF", "75.0")
    assert crf[2].startswith("86.0 [")
    assert crf[3:] == ("2 s", "30", "1")
    assert svm[3] == "not reached"
    assert reports.time_table(record, target=0.7).rows[0][3] == "0.5 s"
