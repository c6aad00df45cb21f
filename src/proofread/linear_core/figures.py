"""The chapter's figures; each function returns a figure for ``proofread.plotting.show``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..stats import mean_interval
from .certificates import Regrets, Surrogate, descent_steps
from .multiclass import RegretCurves
from .optimization import Descent
from .surrogates import LinearCore
from .tagging import METHODS, contenders
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


def draw_descents(descents: Mapping[str, Descent], size: int) -> Figure:
    """Gap to the best risk against the number of steps, mean over the problems of one size."""
    from ..plotting import figure

    fig, axes = figure(height=3.4)
    for name, descent in descents.items():
        gap = descent.gaps[size].mean(0)
        axes.loglog(np.arange(1, len(gap)), gap[1:], label=name)
    steps = np.array([10, len(gap) - 1])
    axes.loglog(steps, 3 / steps, color="0.4", linestyle=":", marker="", label="slope −1")
    axes.set(xlabel="steps T", ylabel="risk − best risk")
    axes.legend()
    return fig


def draw_scaling(log_odds: Sequence[float], accuracy: float = 0.01) -> Figure:
    """Steps of gradient descent against s/τ for points of given log-odds, with 1/κ marked."""
    from ..plotting import COLOURS, LINE_COLOURS, figure

    ratios = np.geomspace(0.05, 10, 24)
    steps = descent_steps([LinearCore(1.0, x) for x in ratios], log_odds, accuracy)  # [24, P]
    fig, axes = figure()
    for kappa, row, colour in zip(log_odds, steps.T, LINE_COLOURS, strict=False):
        axes.semilogx(ratios, row, color=COLOURS[colour], label=f"log-odds κ = {kappa:g}")
        axes.axvline(1 / kappa, color=COLOURS[colour], linestyle=":", marker="")
    axes.set(xlabel="scale over core, s/τ", ylabel="steps of gradient descent")
    axes.legend()
    return fig


def draw_regret_curves(curves: RegretCurves) -> Figure:
    """Least surrogate regret that comes with a 0–1 regret, in both forms, on logarithmic axes."""
    from ..plotting import figure

    fig, axes = figure()
    axes.loglog(curves.zero_one, curves.constrained, label="constrained form")
    axes.loglog(curves.zero_one, curves.sum_form, label="sum of margins")
    line = curves.zero_one[[0, -1]]
    axes.loglog(line, line, color="0.4", linestyle=":", marker="", label="linear bound, τ = 1")
    axes.set(xlabel="0–1 regret δ", ylabel="least surrogate regret")
    axes.legend()
    return fig


def draw_variances(variances: Mapping[str, Mapping[int, float]]) -> Figure:
    """Relative variance of the sampled gradient against the number of tags, a line an estimator."""
    from ..plotting import figure

    fig, axes = figure()
    for name, values in variances.items():
        axes.loglog(list(values), list(values.values()), label=name)
    axes.set(xlabel="number of tags K", ylabel="variance / squared norm of the gradient")
    axes.legend()
    return fig


def draw_step_times(cases: Sequence[Mapping[str, Any]]) -> Figure:
    """Recorded milliseconds of a training step against the number of tags, a line a method."""
    from ..plotting import figure

    fig, axes = figure(height=3.6)
    for name in contenders(cases):
        found = [(c["tags"], c["milliseconds"][name]) for c in cases if name in c["milliseconds"]]
        axes.loglog([k for k, _ in found], [ms["median"] for _, ms in found], label=name)
    axes.set(xlabel="number of tags |Y|", ylabel="milliseconds a training step")
    fig.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig


def draw_tagging(
    curves: Sequence[Mapping[str, Any]], references: Mapping[str, float], by: str
) -> Figure:
    """Accuracy against ``by`` ("steps" or "seconds") of training, mean over the seeds, a line a
    method, with the accuracies that no training changes."""
    from ..plotting import figure

    fig, axes = figure(height=3.6)
    for method in dict.fromkeys(curve["method"] for curve in curves):
        runs = [curve for curve in curves if curve["method"] == method]
        at, accuracy = (np.mean([run[key] for run in runs], 0) for key in (by, "accuracy"))
        axes.semilogx(at, 100 * accuracy, label=METHODS[method].name)
    for name, accuracy in references.items():
        axes.axhline(100 * accuracy, color="0.4", linestyle=":", marker="")
        place = {"ha": "left", "va": "bottom", "transform": axes.get_yaxis_transform()}
        axes.text(0.01, 100 * accuracy, name, fontsize="small", **place)
    axes.set_xticks(at, [f"{round(mark, 1):g}" for mark in at])
    axes.minorticks_off()
    label = {"steps": "steps", "seconds": "seconds of training, one thread"}[by]
    axes.set(xlabel=label, ylabel="tags right on test sentences (%)")
    fig.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return fig
