"""The chapter's tables: numbers by hand, and what is shown at the edges."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from proofread.stats import mean_interval
from proofread.ufm_spectra import identities, reports
from proofread.ufm_spectra.cases import Case, SolverRun
from proofread.ufm_spectra.dynamics import Trajectories
from proofread.ufm_spectra.networks import Checkpoint, Recipe
from proofread.ufm_spectra.study import NetworksStudy

INF, LOST = math.inf, math.nan


def columns_of(table) -> dict[str, list]:
    return {name: [row[at] for row in table.rows] for at, name in enumerate(table.columns)}


# --- theory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_gain_table_satisfies_the_equation(depth) -> None:
    table = reports.gain_table(depth)
    threshold = (depth - 1) ** (depth - 1) / depth ** (2 * depth)
    found = columns_of(table)
    products = [float(p) for p in found["P"]]
    rows = zip(products, found["gain γ, enclosed"], found["outlier / λ"], strict=True)
    for product, gain, ratio in list(rows)[:-1]:
        g = float(gain)
        # P has five digits, which move a gain near the fold by their root
        assert g ** (depth - 1) * (1 - g) ** (depth + 1) == pytest.approx(product, rel=1e-4)
        assert float(ratio) == pytest.approx(g / (1 - g), rel=1e-5)
        assert (product < threshold) == (g > (depth - 1) / depth)
    kinds = ["this" if p < threshold else "zero; this is local" for p in products[:-1]]
    assert found["global optimum"] == [*kinds, "zero"]
    assert found["gain γ, enclosed"][-1] == "none"
    assert set(found["width"][:-1]) == {"one rounding"}
    assert f"threshold P = {threshold:.5g}" in table.note


def test_excess_says_equal_only_when_it_is() -> None:
    assert reports._excess(0.5, 0.5) == "1 ± 1e-12"
    assert reports._excess(0.5 * (1 + 1e-11), 0.5) == "1.0000"
    assert reports._excess(0.6, 0.5) == "1.2000"


def test_optimiser_table_shows_what_was_found(monkeypatch) -> None:
    configuration = identities.CONFIGURATIONS[0]
    objective = configuration.optimum().objective
    found = SimpleNamespace(configuration=configuration, objective=1.5 * objective)
    monkeypatch.setattr(identities, "minimisers", lambda: [found])
    table = reports.optimiser_table()
    assert table.rows[0][0] is configuration
    assert table.rows[0][-1] == "1.5000"
    last = table.rows[-1]
    assert last[0].depth == max(c.depth for c in identities.wide())
    assert float(last[-1]) > 1.0  # not the global one


def test_softmax_table_against_the_closed_form(monkeypatch) -> None:
    monkeypatch.setattr(identities, "best_objective", lambda c: 0.0)
    found = columns_of(reports.softmax_table())
    assert found["K"] == [c.n_classes for c in identities.CROSS_ENTROPY_CONFIGURATIONS]
    assert set(found["best found / collapsed"]) == {"0.000"}
    rows = zip(found["K"], found["t"], found["δ"], found["three values, ratio"], strict=True)
    for k, t, delta, ratios in rows:
        residual = k / (math.exp(float(t)) + k - 1)
        assert float(delta) == pytest.approx(residual, abs=2e-3)
        # 1 + (1 − δ)(K − 1) : 1 + (1 − δ)(K − 2) : 1
        certainty = 1 - float(delta)
        wanted = [1 + certainty * (k - 1), 1 + certainty * (k - 2), 1]
        assert [float(r) for r in ratios.split(" : ")] == pytest.approx(wanted, abs=0.01)
    limits = [f"{k} : {k - 1} : 1" for k in found["K"]]
    assert found["limit"] == limits


# --- gradient descent -----------------------------------------------------------------------------


def trajectories(eigenvalues: list, **other: np.ndarray) -> Trajectories:
    """``[C, S, L, 2K²]`` with K = 2 and whatever else is asked for."""
    values = np.asarray(eigenvalues, dtype=float)
    shape = values.shape[:3]
    columns = {
        "alignment": np.zeros(shape),
        "collapse": np.zeros(shape),
        "gradient_share": np.zeros(shape),
        "objective": np.zeros(shape[:2]),
        "gradient_norm": np.zeros(shape[:2]),
        "weights": (),
        "features": np.zeros((shape[1], 1, 1)),
    }
    steps = 1000 * np.arange(shape[0])
    return Trajectories(steps=steps, n_classes=2, eigenvalues=values, **columns | other)


def spectrum(count: int, height: float = 1.0) -> list[float]:
    return [height] * count + [0.1] * (8 - count)


def test_outlier_counts_by_hand() -> None:
    run = trajectories([[[spectrum(0), spectrum(3)], [spectrum(4), spectrum(8)]]])
    assert reports.outlier_counts(run, 1.0).tolist() == [[[0, 3], [4, 8]]]
    assert reports.outlier_counts(run, 2.0).sum() == 0  # half of 2 is not below 1
    assert reports.outlier_counts(run, 1.99).sum() == 15


def test_trajectory_table_by_hand() -> None:
    alignment = np.array([[[0.9, 0.2], [0.4, 0.8], [0.5, 0.3]], [[1, 1], [1, 1], [1, 0.96]]])
    objective = np.array([[3.0, 1.0, 2.0], [0.25, 0.5, 0.125]])
    early = [[spectrum(1), spectrum(2)], [spectrum(3), spectrum(2)], [spectrum(1), spectrum(2)]]
    late = [[spectrum(4), spectrum(4)]] * 3
    run = trajectories([early, late], alignment=alignment, objective=objective)
    table = reports.trajectory_table(run, 1.0, "made up")
    assert table.rows == [
        ("0", "2.0000", "1 [1, 3]", "2", "0.30"),
        ("1,000", "0.2500", "4", "4", "1.00"),
    ]
    assert "made up" in table.note
    assert "3 seeds" in table.note


def test_range_shows_a_half_median() -> None:
    assert reports._range(np.array([2, 3])) == "2.5 [2, 3]"
    assert reports._range(np.array([7])) == "7"


def test_kink_table_by_hand() -> None:
    """Two classes, unit c for class c; the weight off the diagonal decides the side."""
    sides = {-0.5: "closed", -0.005: "at the kink, closed side", 0.005: "at the kink, open side"}
    sides[0.5] = "open"
    for off, side in sides.items():
        hidden = np.array([[[1.0, off], [off, 1.0]]])
        weights = (hidden, np.eye(2)[None])
        run = trajectories([[[spectrum(4)] * 2]], weights=weights, features=np.eye(2)[None])
        found = columns_of(reports.kink_table(run, "made up"))
        assert found.pop("layer") == [1]
        assert found == {name: ["100" if name == side else "0"] for name in found}, off


# --- networks -------------------------------------------------------------------------------------


def test_worst_is_that_of_the_head_for_each_seed() -> None:
    layers = ("body2", "head1", "head2")
    study = made_up(layers, overlap=[[0, 0.5, 0.4], [0, 0.7, 0.8]])
    assert reports.worst(study, "overlap").tolist() == [0.4, 0.7]


def made_up(layers: tuple[str, ...], **columns: list[list[float]]) -> NetworksStudy:
    """Studies that hold 1 in every place but the given ones, ``[seeds][layers]``."""
    count = len(next(iter(columns.values())))

    class Study(SimpleNamespace):
        def __getattr__(self, name: str) -> float:
            return 1.0

    rows = [
        tuple(Study(**{q: v[s][at] for q, v in columns.items()}) for at in range(len(layers)))
        for s in range(count)
    ]
    return NetworksStudy(layers, tuple(rows))  # type: ignore[arg-type]


def test_geometric_mean_by_hand() -> None:
    found = reports.geometric_mean(np.array([2.0, 8.0, 32.0]))
    assert found.value == pytest.approx(8)
    # logarithms base 2: 1, 3, 5, standard error 2/√3, Student's t with two degrees 4.302653
    assert found.high == pytest.approx(2 ** (3 + 4.302653 * 2 / math.sqrt(3)), rel=1e-5)
    assert (found.low, found.n) == (1.0, 3)


def test_geometric_mean_keeps_a_lower_end_above_one() -> None:
    ratios = np.array([2.0, 2.1, 1.9])
    ends = mean_interval(np.log(ratios))
    assert reports.geometric_mean(ratios).low == pytest.approx(math.exp(ends.low))


def test_geometric_mean_cuts_what_is_infinite() -> None:
    found = reports.geometric_mean(np.array([INF, 1e4, INF, 1e4]))
    assert found.value == pytest.approx(1e5)
    found = reports.geometric_mean(np.array([INF, 1e9]))
    ends = (found.value, found.low, found.high)
    assert ends == pytest.approx((1e6, 1e6, 1e6))


def test_geometric_mean_of_a_missing_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        reports.geometric_mean(np.array([1.0, LOST]))


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([INF, INF], "> 1e+06"),
        ([2e6, 1e7], "> 1e+06"),
        ([INF, 1e4], "1e+05"),
        ([4.0, 9.0], "6"),
        ([1.04, 1.04], "1.04"),
        ([LOST, 2.0], "–"),
    ],
)
def test_ratio_text(ratios, text) -> None:
    assert reports._ratio_text(np.array(ratios)) == text


def test_number_text() -> None:
    assert [reports._number(v) for v in (LOST, 0.996, 0.0)] == ["–", "1.00", "0.00"]


def test_study_table_by_hand() -> None:
    study = made_up(
        ("conv2", "head1"),
        gap=[[INF, 4.0], [INF, 9.0]],
        class_gap=[[LOST, 1.0], [2.0, 4.0]],
        share=[[0.5, 0.9], [0.7, 0.8]],
        overlap=[[LOST, 0.25], [LOST, 0.75]],
        overlap_backward=[[LOST, 0.1], [LOST, 0.3]],
        residual_single=[[LOST, 0.4], [LOST, 0.6]],
    )
    found = columns_of(reports.study_table({"net": study}, "made up"))
    assert found["layer"] == ["conv2", "head1"]
    assert found["λ₁₀₀/λ₁₀₁"] == ["> 1e+06", "6"]
    assert found["λ₁₀/λ₁₁"] == ["–", "2"]
    assert found["share of trace"] == ["0.600", "0.850"]
    assert found["overlap"] == ["–", "0.50"]
    assert found["overlap, backward means"] == ["–", "0.20"]
    assert found["single residual"] == ["–", "0.50"]


def test_gradient_table_by_hand() -> None:
    study = made_up(
        ("head1",),
        gradient_share=[[0.8], [0.6]],
        gradient_cosine=[[0.5], [0.5]],
        gradient_mismatched=[[LOST], [0.1]],
        weight_rank=[[10], [12]],
        weight_gap=[[LOST], [LOST]],
    )
    (row,) = reports.gradient_table({"net": study}, "made up").rows
    assert row == ("net", "head1", "0.70", "0.50", "–", "11 [10, 12]", "–")


def test_training_table_by_hand() -> None:
    """NC1 = a²/2 for class means ±1 and spread a, the same before every layer that keeps it."""
    a = 0.4
    line = torch.tensor([-1 - a, -1 + a, 1 - a, 1 + a], dtype=torch.float64)
    x = torch.stack([line, 0 * line], 1)
    layers = [nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(3)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    network = nn.Sequential(OrderedDict((f"head{n}", m) for n, m in enumerate(layers, 1)))
    accuracy, loss = torch.tensor([0.995, 0.75]), torch.tensor([0.25, 0.75])
    checkpoint = Checkpoint(7, (network, network), accuracy, loss)
    y = torch.tensor([0, 0, 1, 1])
    case = Case(checkpoint, Recipe(), x, y, ("head1",))
    table = reports.training_table({"net": case}, "made up")
    assert table.rows == [("net", 7, "75.0", "0.500", "0.08", "0.08", "0.08")]
    assert table.note == "made up; 2 seeds"


# --- curvature ------------------------------------------------------------------------------------


def test_solver_table_by_hand() -> None:
    runs = [
        SolverRun("net", "random", 300, 9e-4, True),
        SolverRun("net", "class means", 200, 2e-3, False),
        SolverRun("net", "SciPy eigsh", 100, 1e-15, None),
    ]
    rows = reports.solver_table(runs, "made up").rows
    assert [row[2] for row in rows] == [300, 200, 100]
    assert [row[3] for row in rows][:2] == ["< 1e-3", "2.0e-03"]
    assert [row[4] for row in rows] == ["no gap at k", "resolved", "not said"]


def test_full_table_takes_successive_ratios() -> None:
    leading = SimpleNamespace(values=torch.arange(102, 0, -1, dtype=torch.float64))
    rows = reports.full_table(leading, "made up").rows
    assert rows[0] == (1, "1e+02", "1.01")  # 102/101
    assert rows[-1] == (100, "3", "1.50")  # the hundredth and the next are 3 and 2


def test_benchmark_table_of_a_made_up_record(tmp_path) -> None:
    case = {
        "name": "product",
        "seconds": {"ours": {"median": 0.002}, "peer": {"median": 0.005}},
        "times_ours": {"peer": {"median": 2.5, "min": 2.0, "max": 3.0}},
        "applications": {"ours": 12, "peer": -1},
        "residual": {"ours": 2e-4},
    }
    machine = {"threads": 1, "machine": "m", "instructions": "i", "packages": {"torch": "2"}}
    record = {"cases": [case], "environment": machine}
    (tmp_path / "ufm_spectra.json").write_text(json.dumps(record), "utf-8")
    table = reports.benchmark_table(tmp_path)
    assert table.rows == [
        ("product", "ours", "2", "1", "12", "2e-04"),
        ("product", "peer", "5", "2.5 [2, 3]", "not told", "–"),
    ]
    assert "1 thread, m (i), torch 2" in table.note


def test_benchmark_table_without_a_record_names_the_remedy(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="make bench"):
        reports.benchmark_table(tmp_path)
