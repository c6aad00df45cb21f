"""Checks of the chapter's theorems: symbolic, in ball arithmetic, and by attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

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


def tail_curvature(tail: str) -> Any:
    """``φ''(v)`` of a tail as a sympy expression in ``v ≥ 0``, verified to be nowhere negative.

    Raises:
        ArithmeticError: it could not be verified.
    """
    import sympy

    v = sympy.symbols("v", nonnegative=True)
    curvature = sympy.simplify(-sympy.diff(TAILS[tail].slope(v, sympy), v))
    if not curvature.is_nonnegative:
        raise ArithmeticError(f"{tail} tail: could not verify that {curvature} is not negative")
    return curvature


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


def verify_huberized_hinge() -> float:
    """The certified least ``𝒯(t)/(τ·t)`` of the huberized hinge, ``τ = 1 - δ``: 1, for 0 < δ < 1.

    The loss of Wang, Zhu and Zou (Bioinformatics 2008): ``1 - u - δ/2`` up to ``τ``,
    ``(1-u)²/(2δ)`` up to 1, then 0. Sympy verifies that value and slope agree at both stitches, and
    with ``r`` the height above the line on ``[τ, 1]`` that the gain ``t·u - (1+t)·r(u)/2``, which
    is concave, is stationary at ``u* = τ + 2δt/(1+t) ≤ 1`` with value ``τ·t + δ·t²/(1+t)``.

    Raises:
        ArithmeticError: a statement that could not be verified.
    """
    import sympy

    u, t, delta = sympy.symbols("u t delta", positive=True)
    core = 1 - delta
    line, bend = 1 - u - delta / 2, (1 - u) ** 2 / (2 * delta)
    gain = t * u - (1 + t) * (bend - line) / 2
    best = core + 2 * delta * t / (1 + t)
    zeros = [
        *(sympy.diff(line - bend, u, k).subs(u, core) for k in (0, 1)),
        *(sympy.diff(bend, u, k).subs(u, 1) for k in (0, 1)),
        sympy.diff(gain, u).subs(u, best),
        gain.subs(u, best) - core * t - delta * t**2 / (1 + t),
        1 - best - delta * (1 - t) / (1 + t),  # so u* ≤ 1
    ]
    concave = sympy.diff(gain, u, 2).is_negative
    if not concave or any(sympy.simplify(zero) != 0 for zero in zeros):
        raise ArithmeticError("could not verify the huberized hinge's calibration")
    return 1.0


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


def _reach(reach: ArrayLike) -> NDArray[np.float64]:
    size = np.asarray(reach, dtype=np.float64)
    if not np.all(size >= 0):
        raise ValueError("reach must be >= 0: it is the largest |h(x)| within the hypothesis set")
    return size


def bounded_gain(surrogate: LinearCore, t: ArrayLike, reach: ArrayLike) -> NDArray[np.float64]:
    """``C(0) - min C`` over ``|u| ≤ reach``: the least price of a wrong sign with bounded scores.

    Linear hypotheses ``h(x) = w·x + b`` with ``‖w‖ ≤ W`` and ``|b| ≤ B`` reach exactly the scores
    ``|u| ≤ r = W·‖x‖ + B`` at ``x``. A wrong sign still costs at least ``C(0)`` (convexity), and on
    ``[0, r]`` the convex ``C`` is least at ``min(r, u*)``. So the gain is ``r·t`` for ``r ≤ τ``
    (the whole segment is core) and ``𝒯(t)`` for ``r ≥ u*``; always at least ``min(τ, r)·t``.

    Args:
        surrogate: one- or two-sided.
        t: ``|2η - 1|`` in [0, 1]; broadcasts against ``reach``.
        reach: ``r ≥ 0``; infinite for a complete set.

    Returns:
        The gains, in the shape of the broadcast.

    Raises:
        ValueError: a ``t`` outside [0, 1], a negative or NaN ``reach``.
    """
    gap, size = np.broadcast_arrays(np.asarray(t, dtype=np.float64), _reach(reach))
    best = np.asarray(surrogate.best_margin(gap))
    u = np.where(size < best, size, surrogate.core)  # the ends have their own formulas below
    risk = (1 + gap) / 2 * surrogate(u) + (1 - gap) / 2 * surrogate(-u)
    beyond = np.where(u > surrogate.core, surrogate(0.0) - risk, u * gap)
    return np.asarray(np.where(size < best, beyond, surrogate.calibration(gap)))


def bounded_constant(surrogate: LinearCore, reach: ArrayLike) -> NDArray[np.float64]:
    """``sup t/gain`` over ``t`` for scores ``|u| ≤ reach``: ``1/min(τ, reach)``, infinite at 0.

    The gain is at least ``min(τ, r)·t`` by its value at ``u = min(τ, r)``, and its slope at
    ``t = 0`` is exactly that. Linear hypotheses without a bias have ``r = W·‖x‖``: the constant
    grows without bound as ``‖x‖ → 0``, whatever the surrogate.

    Raises:
        ValueError: a negative or NaN ``reach``.
    """
    with np.errstate(divide="ignore"):
        return np.asarray(1 / np.minimum(surrogate.core, _reach(reach)))


class MinimizabilityGap(NamedTuple):
    """Best risks of a hypothesis set, the means of its pointwise infima, and their differences.

    All four are sympy numbers; ``gap = best - pointwise`` and likewise for the 0-1 loss.
    """

    best: Any
    pointwise: Any
    gap: Any
    zero_one_gap: Any


def minimizability_gap_example(reach: Any = None) -> MinimizabilityGap:
    """Two points where linear hypotheses have a minimizability gap; exact, for ``τ = s = 1``.

    ``X = ±1`` with probability 1/2 each, ``P(Y = 1) = 1/4`` at both, hypotheses ``h(x) = w·x``
    without a bias (exponential tail). ``R(w) = (C(w) + C(-w))/2`` is convex and even, so ``w = 0``
    is best and costs ``C(0) = 2``. Point by point one would score ``-u*`` at both, which no line
    through the origin does: the pointwise infima average ``2 - 𝒯(1/2)``. For the 0-1 loss every
    ``w ≠ 0`` is right at one of the two points (risk 1/2), ``w = 0`` predicts +1 at both (3/4), and
    the pointwise infimum is 1/4.

    Args:
        reach: the bound ``|w| ≤ W``, a positive rational ``W ≤ 1``; ``None`` for none.

    Returns:
        Exact numbers: the gap is ``1 - log(3)/4`` without a bound on ``w`` and ``W/2`` with one.

    Raises:
        ValueError: a ``reach`` outside (0, 1].
    """
    import sympy

    phi, half = LinearCore(), sympy.Rational(1, 2)
    best = phi.symbolic(sympy.Integer(0))
    gain = sympy.simplify(phi.calibration_symbolic(half)) if reach is None else half * reach
    if reach is not None and not 0 < reach <= 1:
        raise ValueError(f"reach must lie in (0, 1], where the whole segment is core, got {reach}")
    return MinimizabilityGap(best, best - gain, gain, half - sympy.Rational(1, 4))


def descent_bound(core: Any, scale: Any, log_odds: Any) -> Any:
    """``(τ + sκ)²/(τs)``: gradient descent's bound on the 0-1 regret, times ``2T``.

    For an L-smooth convex risk, T steps of length 1/L from 0 leave a regret of at most
    ``L·|u*|²/(2T)``. The exponential tail has ``L = 1/s``, log-odds ``κ`` are fitted at
    ``u* = τ + sκ``, and the 0-1 regret is at most ``1/τ`` times the surrogate's. Only ``x = s/τ``
    matters: the value is ``(1 + xκ)²/x``, least at ``x = 1/κ``, where it is ``4κ``.

    Takes floats, arrays or sympy symbols alike; no argument is checked.
    """
    return (core + scale * log_odds) ** 2 / (core * scale)


def verify_descent_minimum() -> tuple[Any, Any]:
    """The best ``s/τ`` for ``descent_bound`` and its least value, by sympy: ``(1/κ, 4κ)``.

    Solves for the stationary point with symbols ``τ``, ``s`` and ``κ``.

    Raises:
        ArithmeticError: no single positive stationary point, or one that is no minimum.
    """
    import sympy

    core, scale, odds = sympy.symbols("tau s kappa", positive=True)
    bound = descent_bound(core, scale, odds)
    roots = sympy.solve(sympy.diff(bound, scale), scale)
    if len(roots) != 1 or not sympy.simplify(sympy.diff(bound, scale, 2)).is_positive:
        raise ArithmeticError("the bound should have one stationary point, a minimum")
    return sympy.simplify(roots[0] / core), sympy.simplify(bound.subs(scale, roots[0]))


def descent_steps(
    surrogates: Sequence[LinearCore],
    log_odds: ArrayLike,
    accuracy: float,
    limit: int = 100_000,
) -> NDArray[np.int64]:
    """Steps of gradient descent until the surrogate regret is at most ``τ·accuracy``.

    One point with ``η = 1/(1 + e^(-κ))``, its score started at 0, steps of length ``1/L`` with
    ``L = surrogate.smoothness``, which bounds the curvature of ``C``. By the linear bound the 0-1
    regret is then at most ``accuracy``. With a complete hypothesis set several points descend
    independently, so the largest entry of a row is the time until all of them are done.

    ``descent_bound`` assumes the worst convex function of that smoothness and distance, which this
    risk is not: its tail pulls exponentially less, so the measured best ``s/τ`` need not be 1/κ.

    Args:
        surrogates: S surrogates, for instance one a ratio ``s/τ``.
        log_odds: κ, one number or ``[P]`` of them; κ and -κ take equally long.
        accuracy: the target, in units of 0-1 regret; > 0.
        limit: give up after so many steps.

    Returns:
        ``[S, P]`` integers.

    Raises:
        ValueError: an ``accuracy`` that is not positive.
        ArithmeticError: a point not done within ``limit`` steps.
    """
    if not accuracy > 0:
        raise ValueError(f"accuracy={accuracy} must be > 0: the target is never met exactly")
    odds = np.abs(np.atleast_1d(np.asarray(log_odds, dtype=np.float64)))  # [P]
    return np.stack([_descend(surrogate, odds, accuracy, limit) for surrogate in surrogates])


def _descend(
    surrogate: LinearCore, odds: NDArray[np.float64], accuracy: float, limit: int
) -> NDArray[np.int64]:
    from scipy.special import expit

    eta = expit(odds)  # [P]
    best = surrogate(0.0) - surrogate.calibration(2 * eta - 1)
    u, steps = np.zeros_like(odds), np.zeros(odds.shape, dtype=np.int64)
    for _ in range(limit + 1):
        risk = eta * surrogate(u) + (1 - eta) * surrogate(-u)
        waiting = risk - best > surrogate.core * accuracy
        if not waiting.any():
            return steps
        slope = eta * surrogate.derivative(u) - (1 - eta) * surrogate.derivative(-u)
        u = np.where(waiting, u - slope / surrogate.smoothness, u)
        steps += waiting
    raise ArithmeticError(f"not done after limit={limit} steps: raise accuracy or limit")
