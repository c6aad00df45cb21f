"""Checks of the chapter's theorems: symbolic, in ball arithmetic, and by attack."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..stats import Estimate, fit_exponent
from .surrogates import TAILS, LinearCore, ReferenceSurrogate

Surrogate = LinearCore | ReferenceSurrogate


def stitch_jumps(tail: str) -> tuple[Any, Any, Any]:
    """Jumps of Φ, Φ′ and Φ″ at ``u = τ`` as sympy expressions in τ and s (right minus left)."""
    import sympy

    u, core, scale = sympy.symbols("u tau s", positive=True)
    left, right = (piece for piece, _ in LinearCore(tail=tail).symbolic(u, core, scale).args)
    jumps = (sympy.diff(right - left, u, order).subs(u, core) for order in range(3))
    zeroth, first, second = (sympy.simplify(jump) for jump in jumps)
    return zeroth, first, second


def largest_jump_c1() -> Any:
    """The largest jump of Φ or Φ′ at the stitch over all tails, for symbolic τ and s."""
    import sympy

    return sympy.Max(*(abs(jump) for tail in TAILS for jump in stitch_jumps(tail)[:2]))


def hinge_jump() -> Any:
    """The jump of the slope of ``max(0, 1 - u)`` at its kink."""
    import sympy

    u = sympy.symbols("u", real=True)
    left, right = 1 - u, sympy.Integer(0)
    return abs(sympy.diff(right - left, u).subs(u, 1))


def scaled_curvature_jump(tail: str) -> Any:
    """s times the jump of Φ″ at the stitch: a number, since the jump is a multiple of 1/s."""
    import sympy

    return sympy.simplify(abs(stitch_jumps(tail)[2]) * sympy.symbols("s", positive=True))


def core_slope_deviation(surrogate: LinearCore) -> Any:
    """Enclosure of the largest ``|Φ'(u) + 1|`` over the whole core ``|u| ≤ τ``.

    The tail's argument ``max(0, (u - τ)/s)`` increases with u, so over the core it lies between its
    values at the ends; the slope is monotone in it, so the two deviations there enclose all.
    """
    from types import SimpleNamespace

    from flint import arb

    core, scale = arb(surrogate.core), arb(surrogate.scale)
    m = SimpleNamespace(exp=lambda z: z.exp(), log1p=lambda z: z.log1p())
    ends = ((u - core) / scale for u in (-core, core))
    clamped = (v if v > 0 else arb(0) if v <= 0 else v.union(arb(0)) for v in ends)
    left, right = (abs(1 - surrogate.shape.slope(v, m)) for v in clamped)
    return left.union(right) if left != right else left


def logistic_slope_deviation() -> Any:
    """Enclosure of the largest ``|Φ'(u) + 1|`` of ``log(1 + e^(-u))`` over ``|u| ≤ 1``.

    ``Φ'(u) + 1 = 1/(1 + e^(-u))`` increases, so its largest value is at ``u = 1``.
    """
    from flint import arb

    return 1 / (1 + (-arb(1)).exp())


def calibration_exponent(surrogate: Surrogate, smallest: float, largest: float) -> Estimate:
    """The exponent p of 𝒯(t) ~ t^p, fitted on 25 points evenly spread in log t."""
    t = np.geomspace(smallest, largest, 25)
    return fit_exponent(t, np.asarray(surrogate.calibration(t)))


def logistic_series_residual(terms: int) -> Any:
    """Taylor series of the logistic 𝒯 minus ``Σ t^(2k)/(2k(2k-1))``, up to ``t^(2·terms)``: 0.

    Raises:
        ValueError: fewer than 1 term.
    """
    import sympy

    if terms < 1:
        raise ValueError(f"terms={terms} must be at least 1")
    t = sympy.symbols("t", positive=True)
    exact = ((1 + t) * sympy.log(1 + t) + (1 - t) * sympy.log(1 - t)) / 2
    series = sympy.series(exact, t, 0, 2 * terms + 1).removeO()
    formula = sum(t ** (2 * k) / (2 * k * (2 * k - 1)) for k in range(1, terms + 1))
    return sympy.expand(series - formula)


class Regrets(NamedTuple):
    """Pointwise regrets of predictions ``h`` at points with ``P(Y = 1) = η``; arrays [n]."""

    eta: NDArray[np.float64]
    h: NDArray[np.float64]
    zero_one: NDArray[np.float64]
    surrogate: NDArray[np.float64]


def regrets(surrogate: Surrogate, eta: NDArray[np.float64], h: NDArray[np.float64]) -> Regrets:
    """The 0–1 and surrogate regrets at each (η, h), with sign(0) = +1.

    Raises:
        ValueError: an η outside [0, 1].
    """
    gap = 2 * eta - 1  # [n]
    wrong = np.where(h >= 0, gap < 0, gap > 0)
    zero_one = np.abs(gap) * wrong
    at_zero = float(surrogate(0.0))
    risk = eta * np.asarray(surrogate(h)) + (1 - eta) * np.asarray(surrogate(-h))
    best = at_zero - np.asarray(surrogate.calibration(np.abs(gap)))
    return Regrets(eta, h, zero_one, np.maximum(risk - best, 0.0))


def attack(surrogate: Surrogate, trials: int, seed: int) -> tuple[float, Regrets]:
    """Search for a prediction that breaks the linear bound.

    Half of the trials are spread out (η uniform, ``|h|`` from 10⁻³ to 10), half are aimed at the
    worst case that the proof leaves open: η near ½ and h just across 0.

    Returns:
        The largest ``τ·(0–1 regret)/(surrogate regret)`` found (τ = 1 for a reference surrogate),
        and all regrets. The bound holds as long as the number is at most 1.

    Raises:
        ValueError: fewer than 2 trials.
    """
    if trials < 2:
        raise ValueError(f"trials={trials} must be at least 2")
    generator = np.random.default_rng(seed)
    half = trials // 2
    wide = generator.uniform(-1, 1, half), 10 ** generator.uniform(-3, 1, half)
    signs = generator.choice([-1.0, 1.0], trials - half)
    aimed = signs * 10 ** generator.uniform(-5, -1, trials - half), np.full(trials - half, 1e-9)
    gap, size = (np.concatenate(parts) for parts in zip(wide, aimed, strict=True))
    found = regrets(surrogate, (1 + gap) / 2, -np.sign(gap) * size)
    core = surrogate.core if isinstance(surrogate, LinearCore) else 1.0
    return float(np.max(core * found.zero_one / found.surrogate)), found
