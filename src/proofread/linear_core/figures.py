"""The chapter's figures; each function returns a figure for ``proofread.plotting.show``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..stats import mean_interval
from .certificates import Regrets, Surrogate
from .training import LOSSES, Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_surrogates(surrogates: Mapping[str, Surrogate]) -> Figure:
    """Each loss and its slope against the margin, side by side."""
    from ..plotting import figure

    u = np.linspace(-2, 4, 241)
    fig, (left, right) = figure(ncols=2, height=3.2)
    for name, surrogate in surrogates.items():
        left.plot(u, surrogate(u), label=name)
        right.plot(u, surrogate.derivative(u), label=name)
    left.set(xlabel="margin u", ylabel="loss Φ(u)")
    right.set(xlabel="margin u", ylabel="slope Φ′(u)")
    fig.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


def draw_calibration(surrogates: Mapping[str, Surrogate]) -> Figure:
    """𝒯(t)/t on logarithmic axes: level for a linear bound, falling for a square-root bound."""
    from ..plotting import figure

    t = np.geomspace(1e-4, 1, 61)
    fig, axes = figure()
    for name, surrogate in surrogates.items():
        axes.loglog(t, np.asarray(surrogate.calibration(t)) / t, label=name)
    axes.set(xlabel="gap t = |2η − 1|", ylabel=r"calibration $\mathcal{T}(t)\,/\,t$")
    axes.legend()
    return fig


def draw_regrets(found: Mapping[str, Regrets], shown: int = 1500) -> Figure:
    """0–1 regret against surrogate regret, one panel a surrogate, with the line of slope 1."""
    from ..plotting import figure

    fig, panels = figure(ncols=len(found), sharey=True, height=2.8)
    line = np.array([1e-6, 1.0])
    for axes, (name, regret) in zip(np.atleast_1d(panels), found.items(), strict=True):
        some = slice(None, None, max(1, len(regret.h) // shown))
        axes.loglog(regret.surrogate[some], regret.zero_one[some], ".", label="predictions")
        axes.loglog(line, line, color="black", marker="", label="linear bound, τ = 1")
        axes.set(xlabel=f"surrogate regret, {name}", ylabel="0–1 regret")
        axes.set(xlim=(1e-8, 30), ylim=(5e-6, 2))
    panels[0].legend()
    return fig


def draw_accuracies(
    comparison: Comparison, losses: Sequence[str], rates: Sequence[float]
) -> Figure:
    """Test accuracy against the noise rate: every seed, and each loss's mean with 95 % interval."""
    from ..plotting import COLOURS, LINE_COLOURS, figure

    fig, axes = figure(height=3.4)
    styles = zip(losses, LINE_COLOURS, "osD^v", strict=False)
    for number, (loss, colour, marker) in enumerate(styles):
        at = 100 * np.asarray(rates) + 0.9 * (number - (len(losses) - 1) / 2)  # side by side
        accuracy = np.array([100 * comparison.accuracies(loss, rate) for rate in rates])  # [R, S]
        means = [mean_interval(row) for row in accuracy]
        arms = [[m.value - m.low for m in means], [m.high - m.value for m in means]]
        style = {
            "color": COLOURS[colour],
            "marker": marker,
            "capsize": 4,
            "label": LOSSES[loss].name,
        }
        axes.plot(np.repeat(at, accuracy.shape[1]), accuracy.ravel(), ".", color="0.6", zorder=1)
        axes.errorbar(at, [m.value for m in means], yerr=arms, zorder=2, **style)
    axes.set(xlabel="training labels with noise (%)", ylabel="accuracy on clean test labels (%)")
    axes.set_xticks([100 * rate for rate in rates])
    axes.legend(loc="lower left")
    return fig


def draw_slopes(slopes: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Histograms of the margin slope ``|ℓ′|`` on clean and on flipped samples, one panel a loss."""
    from ..plotting import figure

    bins = np.linspace(0, 1, 21)
    fig, panels = figure(ncols=len(slopes), sharey=True)
    for axes, (loss, (clean, flipped)) in zip(np.atleast_1d(panels), slopes.items(), strict=True):
        for values, name in ((clean, "clean label"), (flipped, "flipped label")):
            share = np.histogram(values, bins)[0] / len(values)
            axes.stairs(share, bins, label=name)
        axes.set(xlabel=f"|ℓ′|, {LOSSES[loss].name}", ylabel="share of samples")
        axes.legend()
    return fig
