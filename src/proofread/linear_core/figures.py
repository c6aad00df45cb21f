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
    """Test accuracy of each loss at each noise rate: every seed, the mean and its 95 % interval."""
    from ..plotting import figure

    fig, panels = figure(ncols=len(rates), sharex=True, sharey=True, height=2.6)
    for axes, rate in zip(np.atleast_1d(panels), rates, strict=True):
        for row, loss in enumerate(losses):
            accuracy = 100 * comparison.accuracies(loss, rate)  # [S], percent
            mean = mean_interval(accuracy)
            arms = [[mean.value - mean.low], [mean.high - mean.value]]
            axes.plot(accuracy, np.full(len(accuracy), row + 0.2), ".", color="0.45", label="seeds")
            axes.errorbar(
                [mean.value], [row], xerr=arms, fmt="o", capsize=4, label=LOSSES[loss].name
            )
        axes.set(xlabel=f"test accuracy (%), {rate:.0%} noise", ylabel="training loss")
        axes.set_yticks(range(len(losses)), [LOSSES[loss].name for loss in losses])
        axes.set_ylim(-0.5, len(losses) - 0.3)
        axes.label_outer()
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
