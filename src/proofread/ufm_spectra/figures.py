"""The chapter's figures; each function returns a figure for ``proofread.plotting.show``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .cases import Case, Progress
from .dynamics import Trajectories
from .eigensolvers import Eigenpairs, SpectralDensity
from .identities import Configuration, Splitting, full_hessian, layer_hessian, point
from .operators import layer_hessian as layer_operator
from .optimum import CollapsedOptimum, Spectrum
from .reports import CEILING, outlier_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_gain(depth: int = 3, depths: tuple[int, ...] = (2, 3, 6)) -> Figure:
    """The scalar objective for some products P, and the gain against P for some depths."""
    from ..plotting import COLOURS, LINE_COLOURS, figure

    fig, (left, right) = figure(ncols=2, height=3.0)
    gains = (0.95, 0.8, (depth - 1) / depth, 0.5)
    for gain, colour in zip(gains, LINE_COLOURS, strict=False):
        product = gain ** (depth - 1) * (1 - gain) ** (depth + 1)
        _draw_objective(left, depth, product, gain, COLOURS[colour])
    left.set(xlabel="gain γ", ylabel="objective g(γ)", ylim=(0, 2.4))
    left.legend(title="product P", fontsize="small", loc="upper center", ncols=2)
    for each, colour in zip(depths, LINE_COLOURS, strict=False):
        _draw_branch(right, each, COLOURS[colour])
    right.set(xlabel=r"$P^{1/(L+1)}$", ylabel="gain γ", ylim=(0, 1.02))
    right.legend()
    return fig


def _draw_objective(axes: Axes, depth: int, product: float, gain: float, colour: str) -> None:
    beta = product ** (1 / (depth + 1))

    def objective(x: np.ndarray | float) -> np.ndarray | float:
        return (1 - x) ** 2 + (depth + 1) * beta * x ** (2 / (depth + 1))

    x = np.linspace(0, 1.2, 121)
    axes.plot(x, objective(x), color=colour, marker="", label=f"{product:.2g}")
    axes.plot([gain], [float(objective(gain))], "o", color=colour)


def _draw_branch(axes: Axes, depth: int, colour: str) -> None:
    """Gain against P, solid where the minimum is global and dotted where it is local only."""
    fold, threshold = (depth - 1) / (2 * depth), (depth - 1) / depth
    for low, high, line in ((threshold, 1.0, "-"), (fold, threshold, ":")):
        gain = np.linspace(low, high, 60)
        product = gain ** (depth - 1) * (1 - gain) ** (depth + 1)
        label = f"L = {depth}" if line == "-" else None
        style: dict[str, Any] = {"color": colour, "linestyle": line, "label": label}
        axes.plot(product ** (1 / (depth + 1)), gain, marker="", **style)


def draw_splitting(found: Splitting) -> Figure:
    """Spread of the outliers and largest other eigenvalue against the disturbance's size."""
    from ..plotting import figure

    fig, (left, right) = figure(ncols=2, height=2.9)
    for layer, spread, leak in zip(found.layers, found.spread.T, found.leak.T, strict=True):
        left.loglog(found.sizes, spread, label=f"layer {layer}")
        right.loglog(found.sizes, leak, label=f"layer {layer}")
    left.set(xlabel="size of the disturbance ε", ylabel="spread of outliers / outlier")
    right.set(xlabel="size of the disturbance ε", ylabel="largest other / outlier")
    left.legend()
    right.legend()
    return fig


def draw_hessians(configuration: Configuration) -> Figure:
    """Histograms of a layer's Hessian and, near zero and far out, of the full one; the closed
    forms are dashed lines with their multiplicities."""
    from ..plotting import figure

    optimum = configuration.optimum()
    weights, features, targets = point(optimum)
    layer = (optimum.depth + 1) // 2
    single = layer_hessian(weights, features, targets, layer)
    whole = full_hessian(weights, features, targets)
    outlier = optimum.outlier / optimum.weight_decay[0]
    middle, reach = optimum.depth * outlier, 2.0 * optimum.depth
    cases = (
        ("layer_hessian", layer, single, (-0.1 * outlier, 1.15 * outlier), f"layer {layer}"),
        ("full_hessian", None, whole, (-2.0, 2.0), "all weights"),
        ("full_hessian", None, whole, (middle - reach, middle + reach), "all weights"),
    )
    fig, panels = figure(ncols=3, height=2.9, sharey=True)
    for axes, (matrix, which, hessian, span, name) in zip(panels, cases, strict=True):
        values = torch.linalg.eigvalsh(hessian).numpy() / optimum.weight_decay[0]
        _draw_spectrum(axes, values, optimum.predicted_spectrum(matrix, which), optimum, span)
        axes.set(xlabel=f"eigenvalue / λ, {name}", ylabel="number of eigenvalues")
    return fig


def _draw_spectrum(
    axes: Axes,
    values: np.ndarray,
    predicted: Spectrum,
    optimum: CollapsedOptimum,
    span: tuple[float, float],
) -> None:
    """Counts of eigenvalues within a span, in units of the decay."""
    counts, edges = np.histogram(values, np.linspace(*span, 62))
    axes.stairs(counts, edges, fill=True, color="#56B4E9", edgecolor="#0072B2", linewidth=1.0)
    for value, times in zip(predicted.values, predicted.multiplicities, strict=True):
        at = value / optimum.weight_decay[0]
        if span[0] <= at <= span[1]:
            axes.axvline(at, color="#D55E00", linestyle="--", linewidth=1.0, marker="")
            style: dict[str, Any] = {"ha": "center", "size": "small", "backgroundcolor": "white"}
            axes.text(at, 1.5 * times, f"{times}", **style)
    axes.set(yscale="log", ylim=(0.7, 300), xlim=span)


def draw_trajectories(runs: Mapping[str, Trajectories], layer: int, outlier: float) -> Figure:
    """Largest eigenvalues of one layer's Hessian along gradient descent, in predicted outliers, for
    the first seed of each run; what is below a hundredth is drawn there."""
    from ..plotting import COLOURS, figure

    fig, panels = figure(ncols=len(runs), sharey=True, height=3.2)
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        k = run.n_classes
        values = np.clip(run.eigenvalues[1:, 0, layer - 1] / outlier, 0.01, None).round(3)
        for number in reversed(range(k**2 + 3)):
            colour = COLOURS["blue"] if number < k**2 else COLOURS["orange"]
            style = {"color": colour, "linestyle": "-", "linewidth": 1.2, "marker": ""}
            label = {0: "first K²", k**2: "the next"}.get(number)
            axes.loglog(run.steps[1:], values[:, number], label=label, **style)
        axes.axhline(1, color=COLOURS["vermillion"], linestyle="--", marker="", linewidth=1.0)
        axes.set(xlabel=f"steps, {name}", ylabel="eigenvalue / predicted outlier")
        axes.set(ylim=(0.008, 30))
        axes.legend(loc="upper right")
    return fig


def draw_counts(runs: Mapping[str, Trajectories], outlier: float) -> Figure:
    """How many eigenvalues of each layer's Hessian are above half of the predicted outlier: the
    median over the seeds, and all of them as points."""
    from ..plotting import COLOURS, LINE_COLOURS, figure

    fig, panels = figure(ncols=len(runs), sharey=True, height=3.2)
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        counts = outlier_counts(run, outlier)[1:]  # [C, S, L]
        for layer, colour in zip(range(counts.shape[2]), LINE_COLOURS, strict=False):
            shift = 0.12 * (layer - (counts.shape[2] - 1) / 2)  # side by side
            seen, median = counts[..., layer] + shift, np.median(counts[..., layer], 1) + shift
            style = {"color": COLOURS[colour], "label": f"layer {layer + 1}"}
            axes.semilogx(run.steps[1:], median, **style)
            steps = np.repeat(run.steps[1:], seen.shape[1])
            axes.semilogx(steps, seen.ravel(), ".", color=COLOURS[colour], alpha=0.35)
        for level in (run.n_classes, run.n_classes**2):
            axes.axhline(level, color="0.4", linestyle=":", marker="", linewidth=1.0)
        axes.set(xlabel=f"steps, {name}", ylabel="eigenvalues above half an outlier")
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return fig


def draw_layer_histograms(cases: Mapping[str, Case], layer: str) -> Figure:
    """All eigenvalues of one layer's Hessian, first seed, with the closed form of the outlier."""
    from ..plotting import COLOURS, figure

    fig, panels = figure(ncols=len(cases), sharey=True, height=3.0)
    bins = np.geomspace(1e-8, 3, 60)
    for axes, (name, case) in zip(panels, cases.items(), strict=True):
        network = case.networks[0]
        operator = layer_operator(network, layer, case.x, case.y, case.recipe.loss)
        values = torch.linalg.eigvalsh(operator.to_dense()).flip(0).numpy()
        counts, edges = np.histogram(np.clip(values, bins[0], None), bins)
        style = {"fill": True, "color": COLOURS["sky"], "edgecolor": COLOURS["blue"]}
        axes.stairs(counts, edges, linewidth=0.8, **style)
        outlier = case.predicted_outlier(network)
        axes.axvline(outlier, color=COLOURS["vermillion"], linestyle="--", marker="", linewidth=1.2)
        between = float(np.sqrt(values[99] * max(values[100], bins[0])))
        axes.axvline(between, color="0.3", linestyle=":", marker="", linewidth=1.0)
        axes.text(between * 1.4, 900, "100 →", size="small", ha="left")
        axes.set(xscale="log", yscale="log", ylim=(0.7, 3000), xticks=[1e-8, 1e-6, 1e-4, 1e-2, 1])
        axes.set(xlabel=f"eigenvalue, {name}", ylabel="number of eigenvalues")
    return fig


def draw_progress(found: Progress) -> Figure:
    """NC1, overlap and gap of the head's layers along training, means over the seeds."""
    from ..plotting import figure

    fig, panels = figure(ncols=3, height=2.9)
    gap = np.exp(np.log(np.minimum(found.gap, CEILING)).mean(1))
    drawn = ((found.nc1.mean(1), "NC1"), (found.overlap.mean(1), "overlap"), (gap, "λ₁₀₀ / λ₁₀₁"))
    for axes, (values, name) in zip(panels, drawn, strict=True):
        for layer in range(values.shape[1]):
            axes.plot(found.epochs, values[:, layer], label=f"head {layer + 1}")
        axes.set(xlabel="epochs", ylabel=name, xscale="log")
        axes.set(yscale="linear" if name == "overlap" else "log")
        axes.set_xticks(found.epochs, [str(epoch) for epoch in found.epochs])
        axes.minorticks_off()
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return fig


def draw_full_spectrum(leading: Eigenpairs, density: SpectralDensity) -> Figure:
    """Leading eigenvalues of the Hessian over all weights, and the density of the rest."""
    from ..plotting import figure

    fig, (left, right) = figure(ncols=2, height=3.0)
    values = leading.values.numpy()
    left.semilogy(np.arange(1, len(values) + 1), values, marker="", label="eigenvalue")
    for level in (10, 100):
        left.axvline(level + 0.5, color="0.4", linestyle=":", marker="", linewidth=1.0)
    left.set(xlabel="number", ylabel="eigenvalue", xscale="log")
    grid, height = density.grid.numpy(), density.density.numpy()
    right.semilogy(grid, np.clip(height, 1e-3, None), marker="", linestyle="-")
    right.set(xlabel="eigenvalue", ylabel="density of the rest")
    return fig
