r"""Multi-class Linear-Core theory: exact regrets, certificates and attacks.

``K`` classes with conditional law ``p`` on the simplex, scores ``h`` in R^K; the prediction is
``argmax h`` and its 0-1 regret ``max p - p_k``. With ``h̃ = h - mean(h)`` the two conditional risks
are

.. math::

    C_{\rm con}(h) = \sum_j (1 - p_j)\,\Phi(-\tilde h_j), \qquad
    C_{\rm sum}(h) = \sum_{i \ne j} p_i\,\Phi(h_i - h_j).

* Constrained (Lee, Lin and Wahba 2004), one-sided ``Φ``: the 0-1 regret is at most ``1/τ`` times
  the surrogate regret, for every K (``verify_swap_inequality``, ``least_regret``,
  ``attack_constrained``); quadratic near ties for a two-sided ``Φ``
  (``constrained_two_sided_ratio``).
* Sum: quadratic near ties for ``K ≥ 3`` (``certify_sum_counterexample``), linear where
  ``max p ≥ 1/2 + κ`` (``sum_constant``), inconsistent with bounded margins
  (``bounded_margin_example``).

The losses are those of Mohri and Zhong, *Linear-Core Surrogates* (arXiv 2604.27742), as this book
reconstructs them; the proofs are the book's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..stats import Estimate, fit_exponent
from .surrogates import (
    TAILS,
    LinearCore,
    TwoSidedLinearCore,
    _arb_functions,
    _positive,
    _sympy_functions,
    inverse_slope,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SymmetricExponential:
    """The symmetric reading: exponential tails on both sides of ``[-τ, τ]``, for comparison.

    Right of ``-τ`` it is ``LinearCore``; left of it ``Φ(u) = Φ(-τ) + s·(e^v - 1)`` with
    ``v = (-τ - u)/s``, so slope and curvature grow without bound: ``smoothness`` is infinite.
    Called on numpy arrays or numbers; overflows to infinity where ``v > 709``.
    """

    core: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "core", _positive("core", self.core))
        object.__setattr__(self, "scale", _positive("scale", self.scale))

    tail = "exponential"
    smoothness = math.inf

    def __call__(self, u: ArrayLike) -> Any:
        """``Φ(u)``, elementwise."""
        v = self._left(u)
        return LinearCore(self.core, self.scale)(u) + self.scale * (np.expm1(v) - v)

    def derivative(self, u: ArrayLike) -> Any:
        """``Φ'(u)``, elementwise."""
        return LinearCore(self.core, self.scale).derivative(u) - np.expm1(self._left(u))

    def _left(self, u: ArrayLike) -> Any:
        return np.maximum((-self.core - np.asarray(u, dtype=np.float64)) / self.scale, 0)


Surrogate = LinearCore | SymmetricExponential  # TwoSidedLinearCore is a LinearCore


def _law(p: ArrayLike) -> Floats:
    """Check conditional laws and return them as float64 ``[..., K]``."""
    law = np.asarray(p, dtype=np.float64)
    if law.ndim == 0 or law.shape[-1] < 2:
        raise ValueError(f"p must have shape [..., K] with K >= 2, got {law.shape}")
    if not (np.all(law >= 0) and np.allclose(law.sum(-1), 1, rtol=0, atol=1e-9)):
        raise ValueError("p must hold probabilities that sum to 1 along its last axis")
    return law


def _scores(h: ArrayLike, law: Floats) -> Floats:
    scores = np.asarray(h, dtype=np.float64)
    if scores.ndim == 0 or scores.shape[-1] != law.shape[-1]:
        raise ValueError(f"h must hold K = {law.shape[-1]} scores, got shape {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("h must be finite: the mean of infinite scores is undefined")
    return scores


def _one_sided(surrogate: Surrogate) -> LinearCore:
    if type(surrogate) is not LinearCore:
        raise ValueError(
            f"surrogate must be a one-sided LinearCore, got {type(surrogate).__name__}: "
            "the closed forms need slope -1 on all of (-∞, τ]"
        )
    return surrogate


# --- the constrained form -------------------------------------------------------------------------


def constrained_risk(p: ArrayLike, h: ArrayLike, surrogate: Surrogate) -> Floats:
    """``Σ_j (1 - p_j)·Φ(-h̃_j)``: the conditional risk of the constrained form.

    Args:
        p: laws ``[..., K]``.
        h: scores ``[..., K]``, any constant added; broadcasts against ``p``.
        surrogate: any surrogate of this chapter.

    Returns:
        ``[...]`` risks.

    Raises:
        ValueError: ``p`` is no law, or ``h`` is not finite.
    """
    law = _law(p)
    scores = _scores(h, law)
    centred = scores - scores.mean(-1, keepdims=True)
    return np.asarray(((1 - law) * surrogate(-centred)).sum(-1))


def constrained_optimum(p: ArrayLike, surrogate: LinearCore) -> Floats:
    """``C*(p)``, the exact infimum of the constrained risk, for a one-sided surrogate.

    With ``q = 1 - p``, ``ψ(z) = Φ(-z)`` and a multiplier ``λ``, stationarity under ``Σz = 0`` is
    ``q_j·ψ'(z_j) = λ``. Since ``ψ' ≤ 1``, ``λ ≤ min q``; below ``min q`` every ``z_j < -τ``, which
    does not sum to 0; so ``λ = min q``. Classes with larger ``q_j`` sit in the tail at
    ``z_j = -τ - s·v_j`` with slope ``λ/q_j``, the best classes balance them inside the core, and

    ``C* = K·τ·λ + s·Σ_j (q_j·φ(v_j) + λ·v_j)``,

    for the exponential tail ``λ·(K·(τ+s) + s·Σ_j log(q_j/λ))``. If ``max p = 1`` the infimum is 0
    and not attained.

    Args:
        p: laws ``[..., K]``.
        surrogate: a ``LinearCore``.

    Returns:
        ``[...]`` infima.

    Raises:
        ValueError: ``p`` is no law, or the surrogate is not one-sided.
    """
    return _optimum_of_costs(1 - _law(p), _one_sided(surrogate))


def _optimum_of_costs(q: Floats, surrogate: LinearCore) -> Floats:
    least = q.min(-1, keepdims=True)  # λ: [..., 1]
    certain = least <= 0
    ratio = np.where(certain, 1.0, least / np.where(q > 0, q, 1.0))
    v = inverse_slope(surrogate.tail, np.minimum(ratio, 1))
    tails = q * surrogate.shape.value(v, np) + least * v
    total = q.shape[-1] * surrogate.core * least[..., 0] + surrogate.scale * tails.sum(-1)
    return np.asarray(np.where(certain[..., 0], 0.0, total))


def constrained_regret(p: ArrayLike, h: ArrayLike, surrogate: LinearCore) -> Floats:
    """``C(h) - C*(p)`` of the constrained form, with the exact infimum (arguments as above)."""
    return constrained_risk(p, h, surrogate) - constrained_optimum(p, surrogate)


def least_regret(p: ArrayLike, predicted: ArrayLike, surrogate: LinearCore) -> Floats:
    """Exact infimum of the constrained surrogate regret over all scores that predict a class.

    Minimise under ``z_k ≥ z_j`` as well. The top score has ``z_k ≥ 0``, in the core, so the classes
    tied with it pool: their costs ``q_j < λ`` and ``q_k`` are replaced by their mean ``λ``, which
    is the least of the means of ``q_k`` with the 0, 1, 2, … smallest other costs. The minimum is
    ``C*`` of the pooled costs. Ties count as predictions of ``k`` (otherwise it is an infimum).

    Args:
        p: laws ``[..., K]``.
        predicted: the class ``k``, one or ``[...]`` of them.
        surrogate: a ``LinearCore``.

    Returns:
        ``[...]``; at least ``τ·(max p - p_k)`` by the theorem, 0 for a most probable class.

    Raises:
        ValueError: ``p`` is no law, or the surrogate is not one-sided.
        IndexError: a class outside 0 … K-1.
    """
    law = _law(p)
    return _optimum_of_costs(_pool(1 - law, predicted), _one_sided(surrogate)) - (
        constrained_optimum(law, surrogate)
    )


def _classes(predicted: ArrayLike) -> NDArray[np.intp]:
    """Class indices as integers; a fraction is refused rather than cut."""
    given = np.asarray(predicted)
    if not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"predicted must hold integer class indices, got {given.dtype}")
    return given.astype(np.intp)


def _pool(q: Floats, predicted: ArrayLike) -> Floats:
    """The costs when class ``predicted`` must score highest: ``[..., K]``."""
    shape = q.shape[:-1]
    k = np.broadcast_to(_classes(predicted), shape)[..., None]
    if not np.all((k >= 0) & (k < q.shape[-1])):
        raise IndexError(f"predicted must lie in 0 … {q.shape[-1] - 1}")
    own = np.take_along_axis(q, k, -1)
    chosen = np.arange(q.shape[-1]) == k
    others = np.sort(np.where(chosen, np.inf, q), -1)[..., :-1]
    sums = np.cumsum(np.concatenate([own, others], -1), -1)
    level = (sums / np.arange(1, q.shape[-1] + 1)).min(-1, keepdims=True)
    return np.where(chosen, level, np.maximum(q, level))


def verify_swap_inequality(tail: str) -> tuple[str, ...]:
    """Verify with sympy the two steps of the linear bound for the constrained form.

    A prediction ``k`` has ``z_k = h̃_k ≥ 0``. Take ``z_k - τ`` and ``z_m + τ`` for the most probable
    class ``m``; the sum stays 0. The ``k`` term falls by exactly ``q_k·τ``, since
    ``Φ(-z) - Φ(τ - z) = τ`` where both arguments are at most ``τ``; the ``m`` term rises by at most
    ``q_m·τ``, since slopes lie in [-1, 0]. So the regret is at least ``τ·(q_k - q_m)``, which is
    ``τ·(p_m - p_k)``, for every K.

    Args:
        tail: a tail's name; ``τ`` and ``s`` stay symbols.

    Returns:
        The verified statements.

    Raises:
        ValueError: an unknown tail.
        ArithmeticError: a statement that could not be verified.
    """
    import sympy

    core, scale = sympy.symbols("tau s", positive=True)
    z, v = sympy.symbols("z v", nonnegative=True)
    (line, _), _ = LinearCore(tail=tail).symbolic(z, core, scale).args
    slope = TAILS[tail].slope(v, _sympy_functions())
    drop = sympy.simplify(line.subs(z, -z) - line.subs(z, core - z))
    statements = {
        "z ≥ 0: -z and τ - z are at most τ": bool((core + z).is_nonnegative and z.is_nonnegative),
        "z ≥ 0: Φ(-z) - Φ(τ - z) = τ": drop == core,
        "the tail's slope is at most 1: 1 at the stitch": slope.subs(v, 0) == 1,
        "and decreasing": bool(sympy.simplify(sympy.diff(slope, v)).is_nonpositive),
        "and at least 0: 0 in the limit": sympy.limit(slope, v, sympy.oo) == 0,
    }
    for statement, holds in statements.items():
        if not holds:
            raise ArithmeticError(f"{tail} tail: could not verify that {statement}")
    return tuple(statements)


class Attack(NamedTuple):
    """The worst case an attack found.

    * ``ratio``: what the attack tried to push past the theorem's bound.
    * ``p``: the law at which, ``[K]``.
    * ``predicted``: the class predicted there.
    """

    ratio: float
    p: Floats
    predicted: int


def attack_constrained(
    surrogate: LinearCore, n_classes: int, trials: int = 2000, seed: int = 0
) -> Attack:
    """Search for a constrained regret below ``τ·(max p - p_k)``.

    Four stages: random laws with random scores; random laws, half of them near uniform, with the
    best scores for a wrong class (``least_regret``); Nelder-Mead on the law from the worst of
    those; and the family that the proof leaves open, ``1/K + ε`` for all classes but the predicted
    one. There the best scores are all 0 and the ratio tends to 1 with ``ε``: the constant ``1/τ``
    cannot be lowered, for any K.

    Args:
        surrogate: a ``LinearCore``.
        n_classes: K ≥ 2.
        trials: laws a stage, at least 1.
        seed: of the random laws and scores.

    Returns:
        The smallest ``regret/(τ·(max p - p_k))`` found; the theorem says it is at least 1.

    Raises:
        ValueError: ``n_classes < 2``, ``trials < 1`` or a surrogate that is not one-sided.
    """
    _count("n_classes", n_classes, 2)
    _count("trials", trials, 1)
    core = _one_sided(surrogate).core
    generator = np.random.default_rng(seed)
    p = _random_laws(generator, trials, n_classes)
    h = core * generator.choice([0.1, 1.0, 3.0], (trials, 1)) * generator.normal(size=p.shape)
    k = h.argmax(-1)
    found = [_worst(constrained_regret(p, h, surrogate), p, k, core)]
    near = 1 / n_classes + 0.01 * (p - 1 / n_classes)
    p = np.concatenate([p, near])
    k = p.argmin(-1)
    found.append(_worst(least_regret(p, k, surrogate), p, k, core))
    found.append(_refined(surrogate, found[-1]))
    aimed = _almost_uniform(n_classes)
    last = np.full(len(aimed), n_classes - 1)
    found.append(_worst(least_regret(aimed, last, surrogate), aimed, last, core))
    return min(found, key=lambda attack: attack.ratio)


def _almost_uniform(n_classes: int) -> Floats:
    """``1/K + ε`` for all classes but the last, for several ``ε``: ``[5, K]``."""
    p = np.tile(1 / n_classes + np.geomspace(1e-5, 1e-2, 5)[:, None] / n_classes, n_classes)
    p[:, -1] = 1 - p[:, :-1].sum(-1)
    return p


def _count(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def _random_laws(generator: np.random.Generator, trials: int, n_classes: int) -> Floats:
    """Dirichlet laws from nearly certain to nearly uniform: ``[trials, K]``."""
    alpha = 10 ** generator.uniform(-1, 1.5, (trials, 1))
    gamma = generator.gamma(np.broadcast_to(alpha, (trials, n_classes))) + 1e-12
    return gamma / gamma.sum(-1, keepdims=True)


def _worst(regret: Floats, p: Floats, k: NDArray[np.intp], core: float) -> Attack:
    zero_one = p.max(-1) - np.take_along_axis(p, k[:, None], -1)[:, 0]
    wrong = zero_one > 1e-6  # smaller ones drown in the rounding of the risks
    if not wrong.any():
        return Attack(math.inf, p[0], int(k[0]))
    ratio = np.where(wrong, regret / (core * np.where(wrong, zero_one, 1)), np.inf)
    at = int(ratio.argmin())
    return Attack(float(ratio[at]), p[at], int(k[at]))


def _refined(surrogate: LinearCore, start: Attack) -> Attack:
    from scipy.optimize import minimize

    k = np.array([start.predicted])

    def law(logits: Floats) -> Floats:
        weights = np.exp(logits - logits.max())
        return np.asarray(weights / weights.sum())

    def ratio(logits: Floats) -> float:
        p = law(logits)[None]
        if p.max() - p[0, k[0]] < 1e-4:
            return 1e6  # keeps the search away from 0/0
        return _worst(least_regret(p, k, surrogate), p, k, surrogate.core).ratio

    found = minimize(
        ratio, np.log(start.p + 1e-12), method="Nelder-Mead", options={"maxfev": 400, "xatol": 1e-9}
    )
    return Attack(float(found.fun), law(found.x), start.predicted)


# --- the constrained form with a two-sided surrogate ----------------------------------------------


def constrained_dual_optimum(p: ArrayLike, surrogate: Surrogate) -> float:
    """``C*`` of the constrained form for one law and any surrogate of this chapter, by duality.

    ``C* = max_λ Σ_j min_z (q_j·ψ(z) - λ·z)``. The inner minimiser has slope ``ψ'(z_j) = λ/q_j`` and
    is explicit on either side of the core, and ``Σ z_j`` grows with ``λ``; so ``λ`` is found by
    bisection. An error in ``λ`` enters the value only in second order.

    Args:
        p: one law ``[K]``.
        surrogate: one- or two-sided.

    Returns:
        The infimum, to about 1e-14 of its size.

    Raises:
        ValueError: ``p`` is no law, or not one-dimensional.
    """
    law = _law(p)
    if law.ndim != 1:
        raise ValueError(f"p must be one law [K], got shape {law.shape}")
    return _dual_of_costs(1 - law, surrogate)


def _dual_of_costs(q: Floats, surrogate: Surrogate) -> float:
    if q.min() <= 0:
        return 0.0  # the certain class is free: the infimum is approached as z_m → ∞
    low, high = 0.0, _steepest(surrogate) * float(q.min())
    if math.isinf(high):
        high = 2 * float(q.max())  # there every z_j > τ
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        above = _responses(middle / q, surrogate).sum() > 0
        low, high = (low, middle) if above else (middle, high)
    z = _responses(low / q, surrogate)
    return float((q * surrogate(-z)).sum() - low * z.sum())


def _steepest(surrogate: Surrogate) -> float:
    if isinstance(surrogate, SymmetricExponential):
        return math.inf
    return 1 + (surrogate.steepening if isinstance(surrogate, TwoSidedLinearCore) else 0.0)


def _responses(ratio: Floats, surrogate: Surrogate) -> Floats:
    """The ``z`` with ``ψ'(z) = ratio``; 0 where every ``z`` in the core has slope ``ratio = 1``."""
    tail = -surrogate.core - surrogate.scale * inverse_slope(surrogate.tail, np.minimum(ratio, 1))
    excess = np.maximum(ratio - 1, 0)
    if isinstance(surrogate, SymmetricExponential):
        w = np.log1p(excess)
    elif isinstance(surrogate, TwoSidedLinearCore):
        w = inverse_slope(surrogate.tail, np.maximum(1 - excess / surrogate.steepening, 1e-300))
    else:
        w = np.zeros_like(excess)  # λ never exceeds min q
    return np.where(ratio < 1, tail, np.where(ratio > 1, surrogate.core + surrogate.scale * w, 0.0))


class TwoSidedRatios(NamedTuple):
    """Least constrained regrets over 0-1 regrets as the best two classes approach a tie.

    * ``deltas``: the 0-1 regrets ``δ``, ``[n]``.
    * ``ratios``: least regret divided by ``δ``, ``[n]``; bounded below iff the bound is linear.
    * ``exponent``: fitted exponent of the regret in ``δ``: 1 for a linear bound, 2 for a quadratic.
    """

    deltas: Floats
    ratios: Floats
    exponent: Estimate


def constrained_two_sided_ratio(
    surrogate: Surrogate,
    n_classes: int = 4,
    deltas: Sequence[float] = (0.05, 0.02, 0.01),
) -> TwoSidedRatios:
    """Least constrained regret of the second-best class at ``p = ((1+δ)/2, (1-δ)/2, 0, …, 0)``.

    At the tie both top classes score ``z`` and the ``K - 2`` others ``-2z/(K-2)`` each. Those have
    the larger costs ``q = 1 > 1/2``, which presses them to the end ``-τ`` of the core or beyond, so
    ``z ≥ (K-2)·τ/2``: for ``K ≥ 4`` at least ``τ``, where a two-sided surrogate is curved, and the
    regret is ``δ²·ψ'(z)²/(2·ψ''(z)) + O(δ⁴)`` (for ``q̄ = 1/2`` at the tie). For ``K = 3``,
    ``2z = τ + s·v`` with the tail's slope 1/2 at ``v``: inside the core as long as ``s·v < τ``
    (exponential tail: ``s < τ/log 2``). Then the better class gains up to the end of the core and
    the regret is ``(τ - z)·δ = (τ - s·v)/2·δ`` to first order: linear, with a worse constant than
    ``1/τ``.

    Args:
        surrogate: one- or two-sided; ``SymmetricExponential`` for the unbounded left tail.
        n_classes: K ≥ 3.
        deltas: at least three different ``δ`` in (0, 1), for the fitted exponent.

    Returns:
        The ratios and the exponent.

    Raises:
        ValueError: ``n_classes < 3``, or a ``δ`` outside (0, 1), or fewer than three of them.
    """
    _count("n_classes", n_classes, 3)
    delta = np.asarray(deltas, dtype=np.float64)
    if not np.all((delta > 0) & (delta < 1)):
        raise ValueError("deltas must lie in (0, 1): they are 0-1 regrets")
    regret = np.array([_tie_cost(float(d), n_classes, surrogate) for d in delta])
    return TwoSidedRatios(delta, regret / delta, fit_exponent(delta, regret))


def _tie_cost(delta: float, n_classes: int, surrogate: Surrogate) -> float:
    q = np.ones(n_classes)
    q[:2] = (1 - delta) / 2, (1 + delta) / 2
    return _dual_of_costs(_pool(q, 1), surrogate) - _dual_of_costs(q, surrogate)


# --- the sum form ---------------------------------------------------------------------------------


def sum_risk(p: ArrayLike, h: ArrayLike, surrogate: Surrogate) -> Floats:
    """``Σ_{i≠j} p_i·Φ(h_i - h_j)``: the conditional risk of the sum form (arguments as above)."""
    law = _law(p)
    scores = _scores(h, law)
    margins = scores[..., :, None] - scores[..., None, :]  # [..., i, j]
    values = surrogate(margins) * (1 - np.eye(scores.shape[-1]))
    return np.asarray((law * values.sum(-1)).sum(-1))


def sum_optimum(p: ArrayLike, surrogate: LinearCore, predicted: int | None = None) -> float:
    """Least sum-form risk at one law ``[K]``, over all scores or those that predict a class.

    Numerical: regularised Newton steps on the differences ``d_j = h_top - h_j``, which turn
    "predicts k" into the box ``d ≥ 0``. The result is the risk of actual scores, so it is never too
    small (up to rounding).

    Args:
        p: one law without zeros: with one, the infimum may lie at infinity.
        surrogate: a ``LinearCore``.
        predicted: the class that must score highest, ties allowed; ``None`` for no constraint.

    Returns:
        The minimum, to about 1e-14.

    Raises:
        ValueError: ``p`` is no law, or has a zero.
        IndexError: ``predicted`` outside 0 … K-1.
        ArithmeticError: no minimum was found (a scale below about 1e-6 of the core).
    """
    law = _law(p)
    if law.ndim != 1 or law.min() <= 0:
        raise ValueError(f"p must be one law [K] without zeros, got {law}")
    if predicted is not None and not 0 <= predicted < law.size:
        raise IndexError(f"predicted must lie in 0 … {law.size - 1}")
    top = int(law.argmax()) if predicted is None else predicted
    low = -np.inf if predicted is None else 0.0
    d = _newton(law, top, low, surrogate)
    return float(sum_risk(law, _lifted(d, top), surrogate))


def _lifted(d: Floats, top: int) -> Floats:
    """Scores with ``h_top = 0`` and the others ``-d``: ``[K]``."""
    return np.insert(-d, top, 0.0)


def _sum_slopes(law: Floats, d: Floats, top: int, surrogate: LinearCore) -> Floats:
    """Gradient of the sum-form risk in ``d``: ``[K - 1]``."""
    h = _lifted(d, top)
    pull = law[:, None] * surrogate.derivative(h[:, None] - h) * (1 - np.eye(h.size))
    return np.asarray(-np.delete(pull.sum(1) - pull.sum(0), top))


def _sum_bends(law: Floats, d: Floats, top: int, surrogate: LinearCore) -> Floats:
    """Hessian in ``d`` (by differences of ``Φ'``; it only steers the steps): ``[K - 1, K - 1]``."""
    h = _lifted(d, top)
    margins, step = h[:, None] - h, 1e-6 * surrogate.scale
    bend = (surrogate.derivative(margins + step) - surrogate.derivative(margins - step)) / 2 / step
    weight = law[:, None] * bend * (1 - np.eye(h.size))
    weight = weight + weight.T
    full = np.diag(weight.sum(1)) - weight
    return np.asarray(np.delete(np.delete(full, top, 0), top, 1))


def _newton(law: Floats, top: int, low: float, surrogate: LinearCore) -> Floats:
    """Minimiser of the convex risk over ``d ≥ low``, by continuation.

    A short tail is nearly a kink, so it is reached by halving the scale of a longer one.

    Raises:
        ArithmeticError: the projected gradient did not become small.
    """
    d = np.full(law.size - 1, surrogate.core)
    halvings = max(0, math.ceil(math.log2(0.1 * surrogate.core / surrogate.scale)))
    for k in range(halvings, -1, -1):
        wider = LinearCore(surrogate.core, surrogate.scale * 2**k, surrogate.tail)
        d, size = _newton_steps(law, top, low, wider, d)
    if size > 1e-9:
        raise ArithmeticError(
            f"sum-form risk not minimised (gradient {size:.1e}): scale={surrogate.scale} is too "
            f"small beside core={surrogate.core}"
        )
    return d


def _newton_steps(
    law: Floats, top: int, low: float, surrogate: LinearCore, start: Floats
) -> tuple[Floats, float]:
    """Projected, regularised Newton steps; the point and its largest projected slope."""
    d, size = start, math.inf
    slope = _sum_slopes(law, d, top, surrogate)
    for _ in range(300):
        free = (d > low) | (slope < 0)
        size = float(np.abs(slope[free]).max(initial=0))
        if size < 1e-15:
            break
        bends = _sum_bends(law, d, top, surrogate)[np.ix_(free, free)]
        # Where all is straight the regulariser alone remains: steps of at most 2·s.
        bends += np.eye(len(bends)) * size / (2 * surrogate.scale)
        way = np.zeros_like(d)
        way[free] = np.linalg.solve(bends, -slope[free])
        d, slope = _backtrack(law, top, low, surrogate, d, slope, way)
    return d, size


def _backtrack(
    law: Floats, top: int, low: float, surrogate: LinearCore, d: Floats, slope: Floats, way: Floats
) -> tuple[Floats, Floats]:
    """Halve the step until its end does not climb steeply; slopes, unlike values, keep digits."""
    for _ in range(60):
        new = np.maximum(d + way, low)
        end = _sum_slopes(law, new, top, surrogate)
        if end @ (new - d) <= 0.5 * abs(slope @ (new - d)):
            break
        way = way / 2
    return new, end


class SumGap(NamedTuple):
    """The sum form's gap near a tie, in sympy.

    * ``gap``: the exact gap in ``a``, ``δ`` and ``s`` (symbols ``a``, ``delta``, ``s``).
    * ``coefficient``: its coefficient of ``δ²``; lower powers vanish.
    """

    gap: Any
    coefficient: Any


def sum_form_gap_symbolic() -> SumGap:
    r"""Derive the sum form's quadratic gap with sympy, for symbols ``a``, ``δ``, ``τ`` and ``s``.

    Take ``p = ((a+δ)/2, (a-δ)/2, b)`` with ``b = 1-a``, the exponential tail, and scores with
    ``h_1 - h_2`` in the core and both others beyond it: ``h_i - h_3 = τ + s·v_i``. Then

    .. math::

        C = a(s+\tau) + 2b(s+2\tau) + s\bigl[-\delta(v_1-v_2) + p_1e^{-v_1} + p_2e^{-v_2}
            + b(v_1+v_2)\bigr],

    which separates: ``p_1·e^(-v_1) = b - δ`` and ``p_2·e^(-v_2) = b + δ``. Stationary points of a
    convex function are minima, so this is ``C*`` if both ``v_i > 0`` (``δ < a - 2/3``), ``δ < b``
    and ``s·|v_1 - v_2| ≤ τ``. Predicting class 2 means ``h_2 ≥ h_1``; by convexity the best such
    scores have ``h_1 = h_2``: ``v_1 = v_2 = log(a/(2b))``. The difference of the two minima is

    .. math::

        \frac{\rm gap}{s} = (b-\delta)\log\frac{1-\delta/b}{1+\delta/a}
            + (b+\delta)\log\frac{1+\delta/b}{1-\delta/a}
            = \frac{\delta^2}{(1-a)\,a^2} + O(\delta^4),

    whatever ``τ``. Where ``s·|v_1 - v_2| > τ`` the formula is still an upper bound, since the line
    of the core lies below ``Φ``. For another tail the coefficient is ``2s/(a³·φ''(v))`` at
    ``-φ'(v) = 2b/a``.

    Raises:
        ArithmeticError: a step that does not simplify as stated.
    """
    import sympy

    a, b, delta, core, scale = sympy.symbols("a b delta tau s", positive=True)
    first, second = sympy.symbols("v_1 v_2", positive=True)
    one, two = (a + delta) / 2, (a - delta) / 2
    risk = _region_risk(one, two, b, first, second, core=core, scale=scale)
    best = {first: sympy.log(one / (b - delta)), second: sympy.log(two / (b + delta))}
    slopes = [sympy.simplify(sympy.diff(risk, v).subs(best)) for v in best]
    tie = {v: sympy.log(a / (2 * b)) for v in best}
    gap = sum_gap_formula(a, b, delta, scale, lambda z: sympy.log(sympy.factor(z)))
    difference = sympy.expand(risk.subs(tie) - risk.subs(best) - gap)
    if any(slopes) or sympy.simplify(sympy.expand_log(difference, force=True)) != 0:
        raise ArithmeticError("the sum form's gap did not simplify to the stated formula")
    gap = sum_gap_formula(a, 1 - a, delta, scale, sympy.log)
    derivatives = [sympy.simplify(sympy.diff(gap, delta, n).subs(delta, 0)) for n in range(3)]
    if derivatives[:2] != [0, 0]:
        raise ArithmeticError("the sum form's gap has a term below δ²")
    coefficient = scale / (a**2 * (1 - a))
    if sympy.simplify(derivatives[2] / 2 - coefficient) != 0:
        raise ArithmeticError("the coefficient of δ² is not s/((1-a)·a²)")
    return SumGap(gap, coefficient)


def _region_risk(p1: Any, p2: Any, p3: Any, v1: Any, v2: Any, *, core: Any, scale: Any) -> Any:
    """Sum of the six terms ``p_i·Φ(h_i - h_j)`` in the region, from the surrogate's own pieces."""
    import sympy

    u = sympy.Symbol("u")
    (line, _), (tail, _) = LinearCore().symbolic(u, core, scale).args
    within, far1, far2 = scale * (v1 - v2), core + scale * v1, core + scale * v2
    return (
        p1 * (line.subs(u, within) + tail.subs(u, far1))
        + p2 * (line.subs(u, -within) + tail.subs(u, far2))
        + p3 * (line.subs(u, -far1) + line.subs(u, -far2))
    )


def sum_gap_formula(a: Any, b: Any, delta: Any, scale: Any, log: Callable[[Any], Any]) -> Any:
    """The exact gap of ``sum_form_gap_symbolic`` (``b = 1 - a``), in the arithmetic of ``log``."""
    lower = (b - delta) * log((1 - delta / b) / (1 + delta / a))
    upper = (b + delta) * log((1 + delta / b) / (1 - delta / a))
    return scale * (lower + upper)


class GapBall(NamedTuple):
    """Enclosures (``flint.arb``) of the sum form's gap and of ``gap/δ²``.

    ``exact`` says whether the balls surely enclose the least regret of the second-best class;
    otherwise they enclose an upper bound of it.
    """

    gap: Any
    ratio: Any
    exact: bool


@contextmanager
def _precision(bits: int) -> Iterator[None]:
    from flint import ctx

    before, ctx.prec = ctx.prec, bits
    try:
        yield
    finally:
        ctx.prec = before


def _fraction(name: str, value: Any) -> Fraction:
    """A decimal as written: 0.9 means 9/10."""
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{name} must be a finite number, got {value!r}") from error


def sum_form_gap_ball(
    a: Any = 0.9,
    delta: Any = 0.01,
    core: float = 1.0,
    scale: float = 1.0,
    tail: str = "exponential",
) -> GapBall:
    """Enclose the least sum-form regret of predicting class 2 at ``((a+δ)/2, (a-δ)/2, 1-a)``.

    The formula is that of ``sum_form_gap_symbolic``; for any tail
    ``gap = 2·E(a/2, b) - E(p_1, b-δ) - E(p_2, b+δ)`` with ``E(p, r) = s·min_v (p·φ(v) + r·v)``,
    attained at slope ``r/p``. ``h_1 - h_2`` leaves the core where ``s·|v_1 - v_2| > τ``; there the
    core's line, a lower bound of ``Φ``, still makes it an upper bound of the regret.

    Args:
        a: joint probability of the two best classes, in (2/3, 1); a decimal is taken as written.
        delta: the 0-1 regret, in (0, min(1 - a, a - 2/3)).
        core: ``τ``.
        scale: ``s``.
        tail: the tail's name.

    Returns:
        Balls at 128 bits.

    Raises:
        ValueError: a number outside its range, or an unknown tail.
    """
    surrogate = LinearCore(core, scale, tail)
    head, gap = _fraction("a", a), _fraction("delta", delta)
    if not Fraction(2, 3) < head < 1:
        raise ValueError(f"a must lie in (2/3, 1), got {a}")
    if not 0 < gap < min(1 - head, head - Fraction(2, 3)):
        raise ValueError(f"delta must lie in (0, min(1 - a, a - 2/3)), got {delta}")
    with _precision(128):
        return _gap_ball(head, gap, surrogate)


def _gap_ball(head: Fraction, delta: Fraction, surrogate: LinearCore) -> GapBall:
    from flint import arb, fmpq

    def ball(x: Fraction) -> Any:
        return arb(fmpq(x.numerator, x.denominator))

    def energy(p: Fraction, r: Fraction) -> tuple[Any, Any]:
        v = _inverse_ball(surrogate.tail, ball(r / p))
        return ball(p) * surrogate.shape.value(v, _arb_functions()) + ball(r) * v, v

    b, one, two = 1 - head, (head + delta) / 2, (head - delta) / 2
    (first, v1), (second, v2) = energy(one, b - delta), energy(two, b + delta)
    tie, _ = energy(head / 2, b)
    scale = arb(surrogate.scale)
    gap = scale * (2 * tie - first - second)
    exact = bool(scale * (v1 - v2) <= arb(surrogate.core))  # v1 > v2 always
    return GapBall(gap, gap / ball(delta) ** 2, exact)


def _inverse_ball(tail: str, ratio: Any) -> Any:
    from flint import arb

    if tail == "exponential":
        return -ratio.log()
    if tail == "gamma":
        return -1 - (-ratio * (-arb(1)).exp()).lambertw(-1)
    return ((2 - ratio) / ratio).log()


class SumCounterexample(NamedTuple):
    """Rigorous evidence that the sum form has no linear bound.

    * ``deltas``: 0-1 regrets ``δ``, ``[n]``.
    * ``regrets``: rigorous upper bounds of the least surrogate regret with that 0-1 regret,
      ``[n]``.
    * ``ratios``: rigorous lower bounds of 0-1 regret over surrogate regret, ``[n]``.
    * ``ceiling``: rigorous upper bound of ``gap/δ²`` at the largest ``δ``.
    * ``exponent``: fitted exponent of the regret in ``δ``.
    """

    deltas: Floats
    regrets: Floats
    ratios: Floats
    ceiling: float
    exponent: Estimate


def certify_sum_counterexample(
    surrogate: LinearCore | None = None,
    a: Any = 0.9,
    deltas: Sequence[Any] = (0.04, 0.01, 0.001, 0.0001),
) -> SumCounterexample:
    """Prove that no constant bounds the sum form's 0-1 regret by its surrogate regret.

    Each ratio is a rigorous lower bound (balls, then rounded downwards) of the constant that a
    linear bound would need. For the exponential tail the expansion of the gap in ``δ²`` has only
    positive coefficients, so ``gap/δ² ≤ ceiling`` for every smaller ``δ`` too: the needed constant
    is at least ``1/(ceiling·δ)`` and exceeds any number as ``δ → 0``.

    Args:
        surrogate: a one-sided ``LinearCore``; ``τ = s = 1`` and the exponential tail by default.
        a: joint probability of the two best classes.
        deltas: at least three different 0-1 regrets below ``min(1 - a, a - 2/3)``.

    Raises:
        ValueError: numbers outside their range, or fewer than three ``deltas``.
    """
    phi = _one_sided(LinearCore() if surrogate is None else surrogate)
    balls = [sum_form_gap_ball(a, d, phi.core, phi.scale, phi.tail) for d in deltas]
    delta = np.array([float(d) for d in deltas])
    regret = np.array([_up(ball.gap) for ball in balls])
    ratio = np.nextafter(np.nextafter(delta, 0) / regret, 0)
    ceiling = _up(balls[int(delta.argmax())].ratio)
    return SumCounterexample(delta, regret, ratio, ceiling, fit_exponent(delta, regret))


def _up(ball: Any) -> float:
    return math.nextafter(float(ball.upper()), math.inf)


def sum_constant(kappa: float, core: float = 1.0) -> float:
    """``(1/2 + κ)/(2κτ)``: the sum form's linear constant where ``max p ≥ 1/2 + κ``, any K.

    Let ``m`` be the most probable class and ``k`` the prediction, so ``h_m ≤ h_k``. Raise ``h_m``
    until it exceeds ``h_k`` by ``τ``, a way of at least ``τ``. On the way ``h_m - h_k ≤ τ``, so
    ``Φ'(h_m - h_k) = -1``; all other slopes lie in [-1, 0]. So per unit the terms ``p_m·Φ`` change
    by at most ``-p_m`` in sum, and the terms ``p_j·Φ(h_j - h_m)`` by at most ``Σ_j p_j = 1 - p_m``:
    the risk falls by at least ``τ·(2·p_m - 1)``. The 0-1 regret is ``p_m - p_k ≤ p_m``, and
    ``p_m/(2·p_m - 1)`` decreases in ``p_m``.

    Args:
        kappa: κ in (0, 1/2].
        core: ``τ``.

    Raises:
        ValueError: ``kappa`` outside (0, 1/2], or ``core`` not positive.
    """
    if not 0 < kappa <= 0.5:
        raise ValueError(f"kappa={kappa} must lie in (0, 1/2]: max p is 1/2 + kappa")
    return (0.5 + kappa) / (2 * kappa * _positive("core", core))


def attack_sum(
    surrogate: LinearCore,
    n_classes: int = 3,
    least_top: float = 0.6,
    trials: int = 60,
    seed: int = 0,
) -> Attack:
    """Search for the largest 0-1 regret over sum-form regret where ``max p ≥ least_top``.

    Random laws, most of them with ``max p`` at ``least_top`` exactly, and the best scores for a
    random wrong class, found by convex minimisation (``sum_optimum``). For ``least_top = 1/2``,
    where the theorem gives no constant, the worst corner met is ``p = (1/2, 1/2 - δ, δ)``: as
    ``δ → 0`` the ratio there tends to ``1/(2s·log(2/(1 + e^(-τ/s))))``, 1.316 for ``τ = s = 1``
    (exponential tail).

    Args:
        surrogate: a one-sided ``LinearCore``.
        n_classes: K ≥ 2.
        least_top: in [1/2, 1).
        trials: laws, at least 1; about 5 ms each.
        seed: of the random laws.

    Returns:
        The largest ratio found; at most ``sum_constant(least_top - 1/2, τ)`` by the theorem.

    Raises:
        ValueError: a number outside its range, or a surrogate that is not one-sided.
    """
    _count("n_classes", n_classes, 2)
    _count("trials", trials, 1)
    _one_sided(surrogate)
    if not 0.5 <= least_top < 1:
        raise ValueError(f"least_top={least_top} must lie in [1/2, 1)")
    generator = np.random.default_rng(seed)
    found = []
    for rest in _random_laws(generator, trials, n_classes - 1):
        top = max(least_top, generator.uniform(least_top - 1, 1))
        spread = (1 - 1e-4) * rest + 1e-4 / len(rest)  # no zeros: the optimum stays finite
        p = np.concatenate([[top], (1 - top) * spread])
        k = int(generator.integers(1, n_classes))
        regret = sum_optimum(p, surrogate, k) - sum_optimum(p, surrogate)
        found.append(Attack(float((p[0] - p[k]) / regret), p, k))
    return max(found, key=lambda attack: attack.ratio)


class BoundedMargins(NamedTuple):
    """Exact optimum of the sum form when no margin may exceed the core.

    * ``coefficients``: ``K·p_i - 1``: the risk is ``(K-1)·Φ(0) - Σ_i h_i·(K·p_i - 1)``.
    * ``optima``: every optimal vertex, scores in units of ``τ`` with least score 0.
    * ``zero_one_regret``: the largest 0-1 regret among classes that an optimum puts on top.
    """

    coefficients: tuple[Fraction, ...]
    optima: tuple[tuple[int, ...], ...]
    zero_one_regret: Fraction


def bounded_margin_example(
    p: Sequence[Fraction | str] = ("1/2", "2/5", "1/10"),
) -> BoundedMargins:
    """With all margins ``|h_i - h_j| ≤ τ`` the sum form cannot tell classes with ``p > 1/K`` apart.

    Every pair then lies in the core, where ``Φ`` is a line, so the risk is linear:
    ``(K-1)·Φ(0) - Σ_{i<j} (p_i - p_j)·(h_i - h_j) = (K-1)·Φ(0) - Σ_i h_i·(K·p_i - 1)``. Up to a
    common shift the feasible scores form a polytope with vertices ``{0, τ}^K`` (without the two
    constant ones); a linear function is least at a vertex, and all ``2^K - 2`` are enumerated in
    rationals: every class with ``p_i > 1/K`` is at the top, every one with ``p_i < 1/K`` at the
    bottom. The tie can be broken towards the worse class at a surrogate regret of 0 or, if ties
    favour the better one, of any ``ε > 0``.

    Args:
        p: the law, rationals (or text such as "2/5") that sum to 1 exactly.

    Raises:
        ValueError: fewer than 2 classes, more than 12, a negative number, or a sum other than 1.
    """
    law = tuple(_fraction("p", x) for x in p)
    if not 2 <= len(law) <= 12 or min(law) < 0 or sum(law) != 1:
        raise ValueError(f"p must be 2 to 12 rationals >= 0 that sum to 1 exactly, got {law}")
    coefficients = tuple(len(law) * x - 1 for x in law)
    gains = {
        vertex: sum((c * h for c, h in zip(coefficients, vertex, strict=True)), Fraction(0))
        for vertex in itertools.product((0, 1), repeat=len(law))
        if 0 < sum(vertex) < len(law)
    }
    best = max(gains.values())
    optima = tuple(vertex for vertex, gain in gains.items() if gain == best)
    tops = [x for vertex in optima for x, h in zip(law, vertex, strict=True) if h == 1]
    return BoundedMargins(coefficients, optima, max(law) - min(tops))


class RegretCurves(NamedTuple):
    """Least surrogate regret with a given 0-1 regret, exact, for both forms; arrays ``[n]``."""

    zero_one: Floats
    constrained: Floats
    sum_form: Floats


def regret_curves(
    surrogate: LinearCore | None = None,
    a: Any = 0.9,
    deltas: Sequence[float] | None = None,
) -> RegretCurves:
    """Least regret of the second-best class at ``((a+δ)/2, (a-δ)/2, 1-a)``, in both forms.

    The constrained form costs ``(3τ + s·log(q_3/q̄))·δ/2`` to first order (``q̄ = 1 - a/2``,
    exponential tail): a straight line. The sum form costs ``s·δ²/((1-a)·a²)``.

    Args:
        surrogate: a one-sided ``LinearCore``; the default one if omitted.
        a: joint probability of the two best classes, in (2/3, 1).
        deltas: the 0-1 regrets; by default 25 from 1e-4 to 0.04.

    Raises:
        ValueError: a ``δ`` so large that the sum form's exact formula does not apply.
    """
    phi = _one_sided(LinearCore() if surrogate is None else surrogate)
    delta = np.geomspace(1e-4, 0.04, 25) if deltas is None else np.asarray(deltas, float)
    balls = [sum_form_gap_ball(a, float(d), phi.core, phi.scale, phi.tail) for d in delta]
    if not all(ball.exact for ball in balls):
        raise ValueError(
            f"deltas up to {delta.max():g} leave the sum form's exact region: lower it"
        )
    head = float(_fraction("a", a))
    p = np.stack([(head + delta) / 2, (head - delta) / 2, np.full_like(delta, 1 - head)], -1)
    total = np.array([float(ball.gap.mid()) for ball in balls])
    return RegretCurves(delta, least_regret(p, 1, phi), total)
