"""What the chapter's pages are made of: cases, tables and figures, on tiny networks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from proofread.plotting import MAX_BYTES, show
from proofread.ufm_spectra import cases, figures, identities, reports
from proofread.ufm_spectra.dynamics import train_models
from proofread.ufm_spectra.networks import Checkpoint, Recipe

RECIPE = Recipe(epochs=4, batch_size=10, lr=0.02)


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(30, 16, generator=draw, dtype=torch.float64), torch.arange(30) % 3


@pytest.fixture(scope="module")
def perceptrons(data: tuple[torch.Tensor, torch.Tensor]) -> dict[str, cases.Case]:
    x, y = data
    options = {"seeds": [0, 1], "width": 6, "checkpoints": [1, 2]}
    return cases.train_perceptrons(x, y, y.roll(1), (RECIPE, replace(RECIPE, lr=0.01)), **options)


def test_cases_have_their_names_labels_and_epochs(perceptrons, data) -> None:  # type: ignore[no-untyped-def]
    names = ["linear head, epoch 1", "linear head, epoch 2", "linear head", "random labels"]
    assert list(perceptrons) == names
    assert [case.checkpoint.epoch for case in perceptrons.values()] == [1, 2, 4, 4]
    assert torch.equal(perceptrons["random labels"].y, data[1].roll(1))
    assert perceptrons["random labels"].recipe.lr == 0.01
    assert all(case.layers == ("head1", "head2", "head3") for case in perceptrons.values())


def test_heads_are_studied_from_the_second_layer_on(data) -> None:  # type: ignore[no-untyped-def]
    found = cases.train_heads(*data, RECIPE, seeds=[0], width=6)
    assert found["ReLU head"].layers == ("body2", "head1", "head2", "head3")
    kinds = [type(m) for m in found["ReLU head"].networks[0]]
    assert kinds.count(nn.ReLU) == 4
    assert [type(m) for m in found["linear head"].networks[0]].count(nn.ReLU) == 2


def test_predicted_outlier_and_layer_input_by_hand() -> None:
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        network[0].weight.copy_(torch.diag(torch.tensor([2.0, 4.0])))
        network[1].weight.copy_(torch.diag(torch.tensor([0.4, 0.2])))
    x, y = torch.eye(2, dtype=torch.float64), torch.arange(2)
    empty = torch.zeros(1)
    case = cases.Case(Checkpoint(1, (network,), empty, empty), RECIPE, x, y, ("0",))
    # own-class outputs 0.8 and 0.8: gain 0.8, and λ·0.8/0.2 = 4 λ
    assert case.predicted_outlier(network) == pytest.approx(4 * RECIPE.weight_decay)
    assert torch.equal(
        cases.layer_input(network, "1", x), torch.diag(torch.tensor([2.0, 4.0])).double()
    )


def test_geometric_mean_by_hand_and_cut() -> None:
    found = reports.geometric_mean(np.array([1.0, 4.0, 16.0]))
    assert found.value == pytest.approx(4.0)
    assert found.low == 1.0  # ratios of sorted values cannot be below
    assert reports.geometric_mean(np.array([math.inf, math.inf])).value == pytest.approx(1e6)


def test_pages_tables_and_figures(perceptrons) -> None:  # type: ignore[no-untyped-def]
    studies = cases.study_cases(perceptrons)
    assert reports.worst(studies["linear head"], "overlap").shape == (2,)
    tables = [
        reports.training_table(perceptrons, "data"),
        reports.study_table(studies, "data"),
        reports.gradient_table(studies, "data"),
    ]
    assert [len(table.rows) for table in tables] == [4, 12, 12]
    linear = {name: case for name, case in perceptrons.items() if name != "random labels"}
    progress = cases.progress_of(linear, studies)
    assert list(progress.epochs) == [1, 2, 4]
    assert progress.overlap.shape == (3, 2, 3)
    drawn = figures.draw_progress(progress)
    assert 1000 < len(show(drawn, note="data").png) <= MAX_BYTES


def test_model_residual_is_zero_at_the_optimum() -> None:
    assert cases.model_residual(3, 5) == 0.0
    assert cases.model_gap(3, 5) == 1e6


def test_solver_runs_agree_on_what_they_count(perceptrons) -> None:  # type: ignore[no-untyped-def]
    runs = cases.solver_runs({"linear head": perceptrons["linear head"]}, "head2")
    assert [run.start for run in runs] == ["random", "class means", "SciPy eigsh"]
    assert all(run.residual < 1e-3 and run.applications >= 9 for run in runs)
    assert runs[-1].unresolved is None
    assert len(reports.solver_table(runs, "data").rows) == 3


def test_full_spectrum_is_that_of_the_dense_hessian(perceptrons) -> None:  # type: ignore[no-untyped-def]
    case = perceptrons["linear head"]
    pairs, density = cases.full_spectrum(case, 110)
    exact = torch.linalg.eigvalsh(cases.hessian(case.networks[0], case.x, case.y).to_dense())
    torch.testing.assert_close(pairs.values, exact.flip(0)[:110], atol=1e-3, rtol=1e-3)
    assert len(reports.full_table(pairs, "data").rows) == 4
    assert show(figures.draw_full_spectrum(pairs, density), note="data").png


def test_counts_and_trajectories_of_the_linear_model() -> None:
    sizes = {"n_classes": 2, "n_per_class": 2, "depth": 2, "width": 3, "lr": 0.3}
    decays = {"weight_decay": 0.01, "feature_decay": 0.01}
    run = train_models([0, 1], steps=4000, checkpoints=[0, 400], **sizes, **decays)
    optimum = identities.collapsed_optimum(2, 2, 2, 0.01, 0.01, 3)
    assert (reports.outlier_counts(run, optimum.outlier)[-1] == 4).all()
    assert len(reports.trajectory_table(run, optimum.outlier, "model").rows) == 3
    both = {"linear": run, "relu": run}
    assert show(figures.draw_trajectories(both, 1, optimum.outlier), note="model").png
    assert show(figures.draw_counts(both, optimum.outlier), note="model").png


def test_theory_tables_and_figures() -> None:
    rows = reports.gain_table().rows
    assert rows[2][-1] == "this"
    assert rows[3][-1].startswith("zero")
    assert rows[-1][1] == "none"
    ratios = [row[4] for row in reports.softmax_table().rows]
    assert ratios[0] == "2.98 : 1.99 : 1.00"
    configuration = identities.CONFIGURATIONS[2]
    assert show(figures.draw_gain(), note="form").png
    assert show(figures.draw_hessians(configuration), note="form").png


def test_recorded_benchmark_shows_every_contender() -> None:
    table = reports.benchmark_table()
    assert {"ours", "curvlinops", "curvlinops + eigsh"} <= {row[1] for row in table.rows}
