"""The chapter's figures: labelled, small, and with the numbers that they were given."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from proofread.plotting import MAX_BYTES, show
from proofread.ufm_spectra import figures
from proofread.ufm_spectra.cases import Case, Progress, train_perceptron
from proofread.ufm_spectra.dynamics import Trajectories
from proofread.ufm_spectra.identities import Configuration, Splitting
from proofread.ufm_spectra.networks import Recipe
from proofread.ufm_spectra.operators import layer_hessian


def check(fig) -> None:  # type: ignore[no-untyped-def]
    """What ``show`` asks for, and labels on every axes."""
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in fig.axes)
    output = show(fig, note="made up")
    assert 1000 < len(output.png) <= MAX_BYTES
    assert "made up" in output.digest


def curves(axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:  # type: ignore[no-untyped-def]
    """Labelled lines by label."""
    found = {line.get_label(): line.get_data() for line in axes.lines}
    return {name: data for name, data in found.items() if not name.startswith("_")}


# --- theory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_draw_gain_marks_minima(depth) -> None:
    fig = figures.draw_gain(depth)
    left, right = fig.axes
    marks = [line.get_data() for line in left.lines if len(line.get_xdata()) == 1]
    lines = [line.get_data() for line in left.lines if len(line.get_xdata()) > 1]
    assert len(marks) == len(lines) == 4
    for (x, y), (grid, values) in zip(marks[:3], lines[:3], strict=True):
        near = abs(grid - x[0]) < 0.1
        assert y[0] <= values[near].min() + 1e-9
    # at the gain (L − 1)/L the minimum is as deep as that at zero, which is 1
    heights = [y[0] for _, y in marks[:3]]
    assert heights[2] == pytest.approx(1)
    assert max(heights[:2]) < 1
    assert [values[0] for _, values in lines] == pytest.approx([1] * 4)
    assert set(curves(right)) == {"L = 2", "L = 3", "L = 6"}
    check(fig)


def test_draw_gain_draws_the_branches_of_the_equation() -> None:
    _, right = figures.draw_gain(3, (3,)).axes
    solid, dotted = right.lines
    for line, low, high in ((solid, 2 / 3, 1.0), (dotted, 1 / 3, 2 / 3)):
        beta, gain = line.get_data()
        np.testing.assert_allclose(beta**4, gain**2 * (1 - gain) ** 4, atol=1e-15)
        assert (gain[0], gain[-1]) == (pytest.approx(low), pytest.approx(high))
    assert (solid.get_linestyle(), dotted.get_linestyle()) == ("-", ":")


def test_draw_splitting() -> None:
    sizes = np.array([1e-3, 1e-2, 1e-1])
    powers = sizes[:, None] ** np.array([1, 2])
    fig = figures.draw_splitting(Splitting(sizes, (1, 2), powers, 3 * powers))
    left, right = fig.axes
    for axes, factor in ((left, 1), (right, 3)):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        found = curves(axes)
        assert set(found) == {"layer 1", "layer 2"}
        np.testing.assert_allclose(found["layer 2"][1], factor * sizes**2)
    check(fig)


@pytest.mark.parametrize("sizes", [(3, 2, 4, 3), (2, 2, 3, 1), (3, 2, 2, 2)], ids=str)
def test_draw_hessians_counts_every_eigenvalue_of_the_layer(sizes) -> None:
    configuration = Configuration(*sizes, 0.01, 0.01)
    fig = figures.draw_hessians(configuration)
    optimum = configuration.optimum()
    layer = (optimum.depth + 1) // 2
    (bars,) = fig.axes[0].patches
    values, edges, _ = bars.get_data()
    predicted = optimum.predicted_spectrum("layer_hessian", layer)
    assert values.sum() == predicted.size
    for value, times in zip(predicted.values, predicted.multiplicities, strict=True):
        at = value / 0.01
        near = (edges[:-1] < at + 1e-6) & (edges[1:] > at - 1e-6)
        assert values[near].sum() == times
    texts = {text.get_text() for text in fig.axes[0].texts}
    assert texts == {str(m) for m in predicted.multiplicities}
    check(fig)


# --- gradient descent -----------------------------------------------------------------------------


def trajectories(counts: np.ndarray) -> Trajectories:
    """K = 2; so many eigenvalues of 2, the others 0.002: ``counts [C, S, L]``."""
    above = np.arange(8) < counts[..., None]
    shape = counts.shape
    return Trajectories(
        steps=np.array([0, *10 ** np.arange(1, shape[0])]),
        n_classes=2,
        eigenvalues=np.where(above, 2.0, 0.002),
        alignment=np.zeros(shape),
        collapse=np.zeros(shape),
        gradient_share=np.zeros(shape),
        objective=np.zeros(shape[:2]),
        gradient_norm=np.zeros(shape[:2]),
        weights=(),
        features=np.zeros((shape[1], 1, 1)),
    )


@pytest.fixture
def runs() -> dict[str, Trajectories]:
    counts = np.array([[[0, 0]] * 3, [[1, 2], [3, 2], [2, 2]], [[4, 4]] * 3])
    return {"linear": trajectories(counts), "relu": trajectories(counts[:, :, ::-1])}


def test_draw_trajectories(runs) -> None:
    fig = figures.draw_trajectories(runs, layer=1, outlier=2.0)
    assert [axes.get_xlabel() for axes in fig.axes] == ["steps, linear", "steps, relu"]
    left, _ = (curves(axes) for axes in fig.axes)
    assert set(left) == {"first K²", "the next"}
    np.testing.assert_allclose(left["first K²"][0], [10, 100])  # without the start
    np.testing.assert_allclose(left["first K²"][1], [1, 1])
    np.testing.assert_allclose(left["the next"][1], 0.01)  # what is below is drawn there
    for axes, outliers in zip(fig.axes, (1, 2), strict=True):  # layer 1 of seed 0 at ten steps
        drawn = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "-"]
        assert drawn.count(1.0) == outliers
        assert drawn.count(0.01) == 7 - outliers  # K² + 3 are drawn
    check(fig)


def test_draw_counts(runs) -> None:
    fig = figures.draw_counts(runs, outlier=2.0)
    found = curves(fig.axes[0])
    assert set(found) == {"layer 1", "layer 2"}
    for (steps, median), shift in zip(found.values(), (-0.06, 0.06), strict=True):
        np.testing.assert_allclose(steps, [10, 100])
        np.testing.assert_allclose(median, np.array([2, 4]) + shift)
    points = [line for line in fig.axes[0].lines if line.get_linestyle() == "None"]
    assert [len(line.get_xdata()) for line in points] == [6, 6]  # every seed
    np.testing.assert_allclose(np.sort(points[0].get_ydata()[:3]) + 0.06, [1, 2, 3])
    check(fig)


# --- networks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case() -> Case:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(10).repeat(4)
    x = torch.eye(10, 16).double()[y] + 0.3 * torch.randn(40, 16, generator=draw).double()
    recipe = Recipe(epochs=2, batch_size=10, lr=0.01)
    return train_perceptron(x, y, recipe, seeds=[0, 1], width=12)


def test_draw_layer_histograms(case) -> None:
    fig = figures.draw_layer_histograms({"one": case, "two": case}, "head2")
    network = case.networks[0]
    values = torch.linalg.eigvalsh(layer_hessian(network, "head2", case.x, case.y).to_dense())
    values = values.flip(0)
    for axes in fig.axes:
        (bars,) = axes.patches
        assert bars.get_data().values.sum() == 12**2
        outlier, between = (line.get_xdata()[0] for line in axes.lines)
        assert outlier == case.predicted_outlier(network)
        assert between == pytest.approx(float((values[99] * max(values[100], 1e-8)).sqrt()))
    check(fig)


def test_draw_progress() -> None:
    shape = (3, 2, 3)
    nc1 = np.arange(1.0, 19).reshape(shape)
    gap = np.full(shape, 4.0)
    gap[:, 1] = 9.0
    gap[2, :, 2] = np.inf
    fig = figures.draw_progress(Progress(np.array([1, 5, 20]), nc1, nc1 / 18, gap))
    left, middle, right = fig.axes
    assert set(curves(left)) == {"head 1", "head 2", "head 3"}
    np.testing.assert_allclose(curves(left)["head 1"][1], [2.5, 8.5, 14.5])
    np.testing.assert_allclose(curves(middle)["head 1"][1], np.array([2.5, 8.5, 14.5]) / 18)
    np.testing.assert_allclose(curves(right)["head 1"][1], 6)
    np.testing.assert_allclose(curves(right)["head 3"][1], [6, 6, 1e6])
    assert [text.get_text() for text in left.get_xticklabels()] == ["1", "5", "20"]
    check(fig)


def test_draw_full_spectrum() -> None:
    values = torch.logspace(0, -3, 120, dtype=torch.float64)
    grid = torch.linspace(-0.01, 0.01, 50, dtype=torch.float64)
    density = SimpleNamespace(grid=grid, density=torch.exp(-((grid / 0.002) ** 2)))
    fig = figures.draw_full_spectrum(SimpleNamespace(values=values), density)
    left, right = fig.axes
    number, drawn = left.lines[0].get_data()
    np.testing.assert_array_equal(number, np.arange(1, 121))
    np.testing.assert_allclose(drawn, values)
    assert [line.get_xdata()[0] for line in left.lines[1:]] == [10.5, 100.5]
    heights = right.lines[0].get_ydata()
    assert heights.max() == pytest.approx(1, abs=0.02)
    assert heights.min() >= 1e-3  # for the logarithmic axis
    check(fig)
