"""The chapter's figures; each function returns a figure for ``proofread.plotting.show``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import identities
from .identities import STANDARD
from .learned_study import DiffusionStudy, StartsStudy
from .reports import SAMPLERS, SCORES
from .trials import Contrast, Exit, Memory, Stay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LN10 = math.log(10)


def draw_shell(dimensions: Sequence[int] = (2, 16, 128)) -> Figure:
    """Density of the target's radius, and where the trap's estimate is wrong."""
    from scipy.stats import ncx2

    from ..plotting import COLOURS, LINE_COLOURS, figure

    fig, axes = figure(height=2.7)
    axes.axvspan(0, 4, color=COLOURS["black"], alpha=0.25, label="ŝ wrong")
    axes.axvspan(4, 5, color=COLOURS["black"], alpha=0.1, label="bump zone")
    x = np.linspace(0.01, 10, 400)
    for d, colour in zip(dimensions, LINE_COLOURS, strict=False):
        density = ncx2.pdf(x**2 * d, d, 49 * d) * 2 * x * d
        axes.plot(x, density, marker="", color=COLOURS[colour], label=f"target, d = {d}")
    axes.axvline(1, color=COLOURS["black"], linestyle=":", label="start N(0, I)")
    axes.set(xlabel="‖x‖ / √d", ylabel="density", xlim=(0, 10), ylim=(0, None))
    axes.legend(loc="upper right", fontsize="small")
    return fig


def draw_geometry(d: int = 256) -> Figure:
    """Theorem 7: the exponent of a trap's mass against ρ, and what holds a chain."""
    from ..plotting import COLOURS, figure

    fig, (left, right) = figure(ncols=2, height=2.9)
    rho = np.linspace(0.05, math.sqrt(2), 120)
    exponent = [identities.ball_exponent(float(r), 1.0) for r in rho]
    left.plot(rho, exponent, marker="", color=COLOURS["blue"], label="I(ρ, 1)")
    left.axvline(
        1 / math.sqrt(2), color=COLOURS["vermillion"], linestyle="--", label="disjoint below"
    )
    needed = 2 * math.log(d) / d
    left.axhline(needed, color=COLOURS["black"], linestyle=":", label=f"log n / d, n = d², d = {d}")
    left.set(xlabel="outer radius ρ (units of √d)", ylabel="exponent per dimension", ylim=(0, 3))
    left.legend(fontsize="small")
    alpha = np.geomspace(1, 400, 80)
    right.loglog(
        alpha, alpha**-0.5, marker="", color=COLOURS["blue"], label="radius of the process"
    )
    right.fill_between(
        alpha, alpha**-0.5, 1 / math.sqrt(2), where=alpha > 2, color=COLOURS["blue"], alpha=0.15
    )
    right.axhline(
        1 / math.sqrt(2), color=COLOURS["vermillion"], linestyle="--", label="disjoint below"
    )
    right.text(40, 0.35, "holds")
    right.set(xlabel="α", ylabel="inner radius ρ (units of √d)")
    right.legend(fontsize="small", loc="lower left")
    return fig


def draw_contrast(dimensions: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)) -> Figure:
    """Certified: one error, and what it does to both samplers."""
    from ..plotting import COLOURS, figure

    fig, (left, right) = figure(ncols=2, height=3.1)
    error = np.array([STANDARD.log_error(d).high for d in dimensions])
    diffusion = np.array([min(0.0, identities.log_diffusion_tv(d)) for d in dimensions])
    gap = np.array([STANDARD.log_gap(d, float(d)) for d in dimensions])
    rows = (
        (error, "black", "L² error of the score"),
        (diffusion, "green", "diffusion: TV ≤"),
        (gap, "vermillion", "Langevin: 1 − TV ≤"),
    )
    for log, colour, label in rows:
        left.plot(dimensions, log / LN10, color=COLOURS[colour], label=label, markersize=3)
    left.set(xlabel="dimension d", ylabel="log₁₀ of the certified bound")
    left.legend(fontsize="small")
    far = -np.expm1(gap)
    right.fill_between(dimensions, far, 1, color=COLOURS["vermillion"], alpha=0.3)
    right.plot(dimensions, far, color=COLOURS["vermillion"], label="Langevin, T = eᵈ: TV ≥")
    right.fill_between(dimensions, 0, np.exp(diffusion), color=COLOURS["green"], alpha=0.3)
    right.plot(dimensions, np.exp(diffusion), color=COLOURS["green"], label="diffusion: TV ≤")
    right.set(xlabel="dimension d", ylabel="distance to the target (TV)", xscale="log")
    right.set_xticks([1, 2, 4, 8, 16, 32, 64], labels=["1", "2", "4", "8", "16", "32", "64"])
    right.minorticks_off()
    right.legend(loc="center right")
    return fig


# --- experiments ----------------------------------------------------------------------------------


def draw_stays(runs: Sequence[Stay]) -> Figure:
    """Digits of the certified error and of 1 − TV, certified and from samples, against d."""
    from ..plotting import COLOURS, figure

    fig, axes = figure(height=3.2)
    d = np.array([run.dimension for run in runs], float)
    error = [-STANDARD.log_error(run.dimension).high / LN10 for run in runs]
    gap = [-STANDARD.log_gap(run.dimension, float(run.dimension)) / LN10 for run in runs]
    sampled = [-math.log10(1 - run.tv.low) for run in runs]
    axes.loglog(d, error, color=COLOURS["black"], label="L² error of the score, certified")
    axes.loglog(d, gap, color=COLOURS["vermillion"], label="1 − TV, bound at T = eᵈ")
    axes.loglog(d, sampled, color=COLOURS["blue"], label="1 − TV, from the chains")
    axes.set(xlabel="dimension d", ylabel="digits: −log₁₀ of the quantity")
    axes.legend()
    return fig


def draw_exits(found: Sequence[Exit]) -> Figure:
    """Share of chains that left small traps, with intervals, and the bound."""
    from ..plotting import COLOURS, figure

    fig, axes = figure(height=2.8)
    x = np.arange(len(found))
    share = np.array([(f.share.value, f.share.low, f.share.high) for f in found]).T
    axes.errorbar(
        x,
        share[0],
        yerr=[share[0] - share[1], share[2] - share[0]],
        fmt="o",
        color=COLOURS["blue"],
        capsize=3,
        label="chains that left, 95 %",
    )
    axes.plot(x, [f.bound for f in found], "v", color=COLOURS["vermillion"], label="bound")
    labels = [f"d = {f.dimension}\nα = {f.alpha:g}, R = {f.ratio:g}√d" for f in found]
    axes.set_xticks(x, labels=labels)
    axes.set(yscale="log", ylabel="probability to leave", xlabel="trap")
    axes.legend()
    return fig


def draw_memories(found: Sequence[Memory]) -> Figure:
    """Share of chains near a training point at the end, by start, and the certified error."""
    from ..plotting import COLOURS, figure

    fig, (left, right) = figure(ncols=2, height=3.0)
    x = np.arange(len(found))
    labels = [f"d={f.dimension}\nn={f.n_points}" for f in found]
    training, fresh = np.array([f.held for f in found]).T
    left.bar(x - 0.2, training, 0.4, color=COLOURS["vermillion"], label="training starts")
    left.bar(x + 0.2, fresh, 0.4, color=COLOURS["blue"], label="fresh starts")
    left.set(
        xlabel="dimension and training points", ylabel="share near a training point", ylim=(0, 1.25)
    )
    left.legend(loc="upper right", fontsize="small", ncols=2)
    right.plot(x, [f.log10_error for f in found], "o", color=COLOURS["black"])
    right.set(xlabel="dimension and training points", ylabel="log₁₀ of the certified L² error")
    for axes in (left, right):
        axes.set_xticks(x, labels=labels)
    return fig


def draw_paths(found: Contrast) -> Figure:
    """Distance to the target's mean along both samplers, every chain."""
    from ..plotting import COLOURS, figure

    fig, (left, right) = figure(ncols=2, height=3.1, sharey=True)
    rows = ((found.langevin, "vermillion", "trap"), (found.exact, "blue", "exact score"))
    for paths, colour, label in rows:
        left.plot(found.times, paths[:, :20], marker="", color=COLOURS[colour], alpha=0.25, lw=0.7)
        left.plot(found.times, paths.mean(1), marker="", color=COLOURS[colour], label=label, ls="-")
    right.plot(
        found.levels, found.diffusion[:, :20], marker="", color=COLOURS["green"], alpha=0.25, lw=0.7
    )
    right.plot(
        found.levels,
        found.diffusion.mean(1),
        marker="",
        color=COLOURS["green"],
        label="same L² error at every level",
        ls="-",
    )
    for axes, name in ((left, "Langevin, time t"), (right, "diffusion, reversed time")):
        axes.axhline(1, color=COLOURS["black"], linestyle=":", label="the target's shell")
        axes.set(xlabel=name, ylim=(0, 7.8))
    left.legend(fontsize="small", loc="center right")
    right.legend(fontsize="small", loc="center left")
    left.set(ylabel="‖x − μ‖ / √d")
    return fig


# --- learned scores -------------------------------------------------------------------------------


def draw_starts(study: StartsStudy, measure: str = "kl") -> Figure:
    """Distance to the target by score and start, every seed."""
    from ..plotting import COLOURS, figure

    fig, axes = figure(height=3.1)
    found = getattr(study, measure)
    kinds = [kind for kind in SCORES if kind in found]
    starts = (("fresh", "blue", "o"), ("training", "vermillion", "s"), ("normal", "black", "^"))
    for at, (start, colour, marker) in enumerate(starts):
        values = np.array([found[kind][start].numpy() for kind in kinds])  # [scores, seeds]
        x = np.arange(len(kinds)) + 0.22 * (at - 1)
        spread = x[:, None] + np.linspace(-0.06, 0.06, values.shape[1])
        label = "N(0, I)" if start == "normal" else f"{start} starts"
        axes.plot(
            spread.ravel(), values.ravel(), marker, color=COLOURS[colour], label=label, markersize=4
        )
    floor = float(getattr(study, f"{measure}_floor").mean())
    axes.axhline(floor, color=COLOURS["black"], linestyle=":", label="exact samples")
    axes.set_xticks(np.arange(len(kinds)), labels=[SCORES[k].replace(" ", "\n", 1) for k in kinds])
    axes.tick_params(axis="x", labelsize="small")
    name = {"kl": "KL divergence (nats)", "w2": "Wasserstein-2 distance"}[measure]
    axes.set(xlabel="score", ylabel=name, yscale="log")
    axes.legend(fontsize="small", ncols=2)
    return fig


def draw_samplers(study: DiffusionStudy) -> Figure:
    """Distance to the mixture and share of its first component, every seed."""
    from ..plotting import COLOURS, figure

    fig, (left, right) = figure(ncols=2, height=3.0, sharey=True)
    names = [SAMPLERS[kind].replace(", from", ",\nfrom") for kind in SAMPLERS]
    y = np.arange(len(names))[::-1]
    for axes, found, colour in ((left, study.w2, "blue"), (right, study.first_mode, "vermillion")):
        values = np.array([found[kind].numpy() for kind in SAMPLERS])
        spread = y[:, None] + np.linspace(-0.12, 0.12, values.shape[1])
        axes.plot(values.ravel(), spread.ravel(), "o", color=COLOURS[colour], markersize=4)
        axes.set(ylabel="sampler")
    left.axvline(
        float(study.w2_floor.mean()),
        color=COLOURS["black"],
        linestyle=":",
        label="exact samples",
    )
    right.axvline(0.5, color=COLOURS["black"], linestyle=":", label="the target's")
    left.set(xlabel="Wasserstein-2 distance", xlim=(0, None))
    right.set(xlabel="share in the first component", xlim=(-0.05, 1.05), ylabel="")
    left.set_yticks(y, labels=names, fontsize="x-small")
    for axes in (left, right):
        axes.legend(fontsize="small", loc="lower right")
    return fig
