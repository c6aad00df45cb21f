"""The chapter's figures; each function returns a figure for ``proofread.plotting.show``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .certificates import Regrets, Surrogate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_surrogates(surrogates: Mapping[str, Surrogate]) -> Figure:
    """Each loss and its slope against the margin, side by side."""
    from ..plotting import figure

    u = np.linspace(-2, 4, 241)
    fig, (left, right) = figure(ncols=2)
    for name, surrogate in surrogates.items():
        left.plot(u, surrogate(u), label=name)
        right.plot(u, surrogate.derivative(u), label=name)
    left.set(xlabel="margin u", ylabel="loss Φ(u)")
    right.set(xlabel="margin u", ylabel="slope Φ′(u)")
    left.legend()
    return fig


def draw_calibration(surrogates: Mapping[str, Surrogate]) -> Figure:
    """𝒯(t)/t on logarithmic axes: level for a linear bound, falling for a square-root bound."""
    from ..plotting import figure

    t = np.geomspace(1e-4, 1, 61)
    fig, axes = figure()
    for name, surrogate in surrogates.items():
        axes.loglog(t, np.asarray(surrogate.calibration(t)) / t, label=name)
    axes.set(xlabel="gap t = |2η − 1|", ylabel="calibration 𝒯(t) / t")
    axes.legend()
    return fig


def draw_regrets(found: Mapping[str, Regrets], shown: int = 1500) -> Figure:
    """0–1 regret against surrogate regret, one panel a surrogate, with the line of slope 1."""
    from ..plotting import figure

    fig, panels = figure(ncols=len(found), sharey=True)
    for axes, (name, regret) in zip(np.atleast_1d(panels), found.items(), strict=True):
        axes.loglog(regret.surrogate[:shown], regret.zero_one[:shown], ".", label=name)
        line = np.geomspace(1e-4, 1, 9)
        axes.loglog(line, line, label="slope 1")
        axes.set(xlabel="surrogate regret", ylabel="0–1 regret", xlim=(1e-7, 30), ylim=(1e-4, 1.5))
        axes.legend()
    return fig
