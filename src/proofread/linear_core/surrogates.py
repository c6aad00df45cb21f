"""Linear-Core surrogates: scalar margin losses with a linear core and a smooth tail.

``LinearCore`` is the one-sided family of this chapter, ``TwoSidedLinearCore`` a variant for binary
margins whose left piece is curved as well. For a margin ``u``, a core ``τ`` and a
scale ``s`` it is linear with slope -1 up to ``τ`` and decays smoothly after:

* ``u ≤ τ``: ``Φ(u) = Φ(τ) + τ - u``;
* ``u > τ``, with ``v = (u - τ)/s``: ``s·e^(-v)`` (``"exponential"``, C¹),
  ``s·(2 + v)·e^(-v)`` (``"gamma"``, C²), ``2s·log(1 + e^(-v))`` (``"logistic"``, C¹).

Every tail starts with slope -1 and rises to slope 0, so ``Φ`` is convex, decreasing and
differentiable. The idea is that of Mohri and Zhong, *Linear-Core Surrogates* (arXiv 2604.27742);
the constants are this book's, since the paper's own text is not public here.

Calibration (binary): with ``η = (1+t)/2`` the chance of the label +1 and
``C(u) = η·Φ(u) + (1-η)·Φ(-u)``, the transform ``𝒯(t) = C(0) - min C`` is the surrogate regret paid
for predicting the wrong sign. For every tail ``𝒯(0) = 0``, ``𝒯'(0) = τ`` and ``𝒯`` is convex, so
``𝒯(t) ≥ τ·t`` and the 0-1 regret is at most ``1/τ`` times the surrogate regret.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# Beyond v = 1000 every tail is exactly zero in float64; the clamp keeps ∞·0 out of (2 + v)·e^(-v).
FAR_TAIL = 1000.0


def _sympy_functions() -> SimpleNamespace:
    import sympy

    return SimpleNamespace(exp=sympy.exp, log1p=lambda z: sympy.log(1 + z))


def _arb_functions() -> SimpleNamespace:
    return SimpleNamespace(exp=lambda z: z.exp(), log1p=lambda z: z.log1p())


@dataclass(frozen=True)
class Tail:
    """A smooth tail in units of the scale, for ``v ≥ 0``.

    ``value(v, m)`` and ``slope(v, m)`` are ``Φ/s`` and ``-Φ'``; ``m`` supplies ``exp`` and
    ``log1p`` (``torch``, ``numpy``, or a shim over sympy or ball arithmetic): one formula for all.
    ``excess(t)`` is ``(𝒯(t) - τ·t)/s`` on ``0 < t < 1``, free of cancellation at 0.
    ``curvature`` is the largest ``s·Φ''``.
    ``steepness = (c, q)``: ``𝒯''(t) ≥ c·s/q(t)`` with ``q`` a polynomial (lowest power first) that
    is positive on [0, 1); equality except for the gamma tail, where the factor ``1 + 1/v > 1`` is
    dropped.
    """

    value: Callable[[Any, Any], Any]
    slope: Callable[[Any, Any], Any]
    excess: Callable[[np.ndarray], np.ndarray]
    curvature: float
    steepness: tuple[int, tuple[int, ...]]


def _exponential_excess(t: np.ndarray) -> np.ndarray:
    return t - (1 - t) * np.arctanh(t)


def _gamma_excess(t: np.ndarray) -> np.ndarray:
    v = _gamma_minimiser(t)
    return 2 * t - (1 - t) / 2 * v**2 / (1 + v)


def _gamma_minimiser(t: np.ndarray) -> np.ndarray:
    """Solve ``(1 + v)·e^(-v) = (1 - t)/(1 + t)``: ``v = -1 - W₋₁(-(1 - t)/(e·(1 + t)))``.

    Near ``t = 0``, W's branch point, the argument carries no digits of ``t``; there the expansion
    in ``p = √(4·artanh t)`` is used, exact to 1e-13 of ``t`` below the switch.
    """
    from scipy.special import lambertw

    p = np.sqrt(4 * np.arctanh(t))
    series = p * (1 + p * (1 / 3 + p * (1 / 36 - p * (1 / 270 - p / 4320))))
    direct = -1 - lambertw(-(1 - t) / (1 + t) / math.e, k=-1).real
    return np.where(t < 1e-4, series, direct)


def _gamma_inverse(ratio: np.ndarray) -> np.ndarray:
    return _gamma_minimiser((1 - ratio) / (1 + ratio))


# The v ≥ 0 at which a tail's slope has fallen to a ratio in (0, 1].
_INVERSE_SLOPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exponential": lambda ratio: -np.log(ratio),
    "gamma": _gamma_inverse,
    "logistic": lambda ratio: np.log((2 - ratio) / ratio),
}


def inverse_slope(tail: str, ratio: Any) -> np.ndarray:
    """The ``v ≥ 0`` with ``-Φ'(τ + s·v) = ratio``, elementwise; infinite where ``ratio`` is 0.

    Closed forms: ``-log ratio``, Lambert's ``W₋₁`` for the gamma tail, ``log((2 - ratio)/ratio)``.

    Args:
        tail: ``"exponential"``, ``"gamma"`` or ``"logistic"``.
        ratio: numbers in [0, 1].

    Raises:
        ValueError: an unknown tail, a ratio outside [0, 1] or NaN.
    """
    if tail not in _INVERSE_SLOPES:
        raise ValueError(f"tail must be one of {sorted(_INVERSE_SLOPES)}, got {tail!r}")
    ratio = np.asarray(ratio, dtype=np.float64)
    if not np.all((ratio >= 0) & (ratio <= 1)):
        raise ValueError("ratio must lie in [0, 1]: it is a slope of a tail, which starts at 1")
    inside = np.where(ratio > 0, ratio, 0.5)
    return np.where(ratio > 0, np.maximum(_INVERSE_SLOPES[tail](inside), 0), np.inf)


def _logistic_excess(t: np.ndarray) -> np.ndarray:
    gain = np.log1p(3 * t)
    return (1 + t) * (gain - np.log1p(t)) - (1 - t) / 2 * (gain - np.log1p(-t))


TAILS: dict[str, Tail] = {
    "exponential": Tail(
        value=lambda v, m: m.exp(-v),
        slope=lambda v, m: m.exp(-v),
        excess=_exponential_excess,
        curvature=1.0,
        steepness=(2, (1, 1, -1, -1)),  # (1 - t)(1 + t)²
    ),
    "gamma": Tail(
        value=lambda v, m: (2 + v) * m.exp(-v),
        slope=lambda v, m: (1 + v) * m.exp(-v),
        excess=_gamma_excess,
        curvature=math.exp(-1),
        steepness=(2, (1, 1, -1, -1)),
    ),
    "logistic": Tail(
        value=lambda v, m: 2 * m.log1p(m.exp(-v)),
        slope=lambda v, m: 2 * m.exp(-v) / (1 + m.exp(-v)),
        excess=_logistic_excess,
        curvature=0.5,
        steepness=(4, (1, 3, -1, -3)),  # (1 - t)(1 + t)(1 + 3t)
    ),
}


def _positive(name: str, value: float) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return number


def _probability_gap(t: Any) -> np.ndarray:
    """Check ``t = |2η - 1|`` and return it as float64."""
    gap = np.asarray(t, dtype=np.float64)
    if not np.all((gap >= 0) & (gap <= 1)):
        raise ValueError("t must lie in [0, 1]: it is |2η - 1| for a probability η")
    return gap


def _as_floating(u: Any) -> np.ndarray:
    array = np.asarray(u)
    return array if np.issubdtype(array.dtype, np.floating) else array.astype(np.float64)


def _like(result: Any, u: Any) -> Any:
    """Give a plain float back for a plain number, the array itself otherwise."""
    return float(result) if isinstance(u, (int, float)) else result


@dataclass(frozen=True)
class LinearCore:
    """The one-sided Linear-Core surrogate ``Φ``; call it on margins.

    Args:
        core: ``τ > 0``, where the linear part ends.
        scale: ``s > 0``, the length over which the tail decays.
        tail: ``"exponential"``, ``"gamma"`` or ``"logistic"``.

    Calling it maps a torch tensor, a numpy array or a number to the same kind and shape (torch:
    differentiable, twice away from ``u = τ``). NaN propagates, ``Φ(+∞) = 0``, ``Φ(-∞) = +∞``, and
    nothing overflows on the way.

    Raises:
        ValueError: ``core`` or ``scale`` not finite and positive, or an unknown ``tail``.

    Example:
        >>> phi = LinearCore()
        >>> phi(0.0), phi(1.0), phi.derivative(0.5)
        (2.0, 1.0, -1.0)
        >>> phi.calibration(1.0), phi.consistency_constant
        (2.0, 1.0)
    """

    core: float = 1.0
    scale: float = 1.0
    tail: str = "exponential"

    def __post_init__(self) -> None:
        object.__setattr__(self, "core", _positive("core", self.core))
        object.__setattr__(self, "scale", _positive("scale", self.scale))
        if self.tail not in TAILS:
            raise ValueError(f"tail must be one of {sorted(TAILS)}, got {self.tail!r}")

    @property
    def shape(self) -> Tail:
        """The tail's formulas, in units of the scale."""
        return TAILS[self.tail]

    @property
    def stitch(self) -> float:
        """``Φ(τ)``, the value where core and tail meet (s, 2s or 2s·log 2)."""
        return self.scale * float(self.shape.value(0.0, np))

    @property
    def consistency_constant(self) -> float:
        """``1/τ``, the factor from surrogate regret to 0-1 regret; approached, not attained."""
        return 1 / self.core

    @property
    def smoothness(self) -> float:
        """Lipschitz constant of ``Φ'`` (1/s, 1/(e·s) or 1/(2s))."""
        return self.shape.curvature / self.scale

    def __call__(self, u: Any) -> Any:
        """``Φ(u)``, elementwise."""
        if isinstance(u, torch.Tensor):
            # relu has slope 0 and clamp slope 1 where u = τ: the two parts never count twice.
            return torch.relu(self.core - u) + self.scale * self.shape.value(self._v(u), torch)
        array: Any = _as_floating(u)
        line = np.maximum(self.core - array, 0)
        return _like(line + self.scale * self.shape.value(self._v(array), np), u)

    def derivative(self, u: Any) -> Any:
        """``Φ'(u)``, elementwise, in [-1, 0]; at ``u = τ`` both sides agree on -1."""
        if isinstance(u, torch.Tensor):
            return 0 - self.shape.slope(self._v(u), torch)
        return _like(0 - self.shape.slope(self._v(_as_floating(u)), np), u)

    def _v(self, u: Any) -> Any:
        """Distance into the tail, in scales, within [0, 1000]; NaN stays NaN."""
        # A scale that the dtype rounds to zero would make 0/0 at the stitch.
        if isinstance(u, torch.Tensor):
            real = u.dtype if u.is_floating_point() else torch.get_default_dtype()
            return ((u - self.core) / max(self.scale, torch.finfo(real).tiny)).clamp(0, FAR_TAIL)
        scale = max(self.scale, float(np.finfo(u.dtype).tiny))
        return np.clip((u - self.core) / scale, 0, FAR_TAIL)

    def symbolic(self, u: Any, core: Any = None, scale: Any = None) -> Any:
        """``Φ(u)`` as a sympy ``Piecewise``, for proofs.

        Args:
            u: a sympy expression.
            core: a symbol to stand for ``τ``; by default this surrogate's exact value.
            scale: a symbol to stand for ``s``; likewise.
        """
        import sympy

        core, scale = self._exact(core, scale)
        m = _sympy_functions()
        line = scale * self.shape.value(sympy.Integer(0), m) + core - u
        tail = scale * self.shape.value((u - core) / scale, m)
        return sympy.Piecewise((line, u <= core), (tail, True))

    def _exact(self, core: Any, scale: Any) -> tuple[Any, Any]:
        import sympy

        core = sympy.Rational(self.core) if core is None else core
        return core, sympy.Rational(self.scale) if scale is None else scale

    def best_margin(self, t: Any) -> Any:
        """The minimiser ``u* = τ + s·v`` of ``C`` at ``η = (1+t)/2``, for ``t`` in [0, 1].

        ``-Φ'(u*) = (1-t)/(1+t)``; ``τ`` at ``t = 0``, where every ``|u| ≤ τ`` minimises, and
        infinite at ``t = 1``.

        Raises:
            ValueError: a ``t`` outside [0, 1] or NaN.
        """
        gap = _probability_gap(t)
        v = inverse_slope(self.tail, (1 - gap) / (1 + gap))
        return _like(self.core + self.scale * v, t)

    def calibration(self, t: Any) -> Any:
        """The calibration transform ``𝒯(t)`` in closed form, for ``t`` in [0, 1].

        ``𝒯(t) = C(0) - min C`` at ``η = (1+t)/2``: the least surrogate regret of a wrong sign.
        Exponential tail: ``t·(s+τ) - s·(1-t)·artanh(t)``, which is
        ``s+τ - (1-t)/2·(2s+2τ+s·log((1+t)/(1-t)))``; the gamma tail needs Lambert's ``W₋₁``, the
        logistic tail logarithms only. Written so that no digits cancel near ``t = 0``.

        Raises:
            ValueError: a ``t`` outside [0, 1] or NaN.
        """
        gap = _probability_gap(t)
        inside = np.where((gap > 0) & (gap < 1), gap, 0.5)
        middle = self.core * inside + self.scale * self.shape.excess(inside)
        ends = np.where(gap > 0, self.core + self.stitch, 0.0)  # 𝒯(1) = Φ(0), 𝒯(0) = 0
        return _like(np.where((gap > 0) & (gap < 1), middle, ends), t)

    def calibration_symbolic(self, t: Any, core: Any = None, scale: Any = None) -> Any:
        """``𝒯(t)`` as a sympy expression on ``0 < t < 1`` (arguments as in ``symbolic``)."""
        import sympy

        core, scale = self._exact(core, scale)
        ratio = (1 - t) / (1 + t)
        if self.tail == "exponential":
            v = sympy.log(1 / ratio)
        elif self.tail == "gamma":
            v = -1 - sympy.LambertW(-ratio * sympy.exp(-1), -1)
        else:
            v = sympy.log((1 + 3 * t) / (1 - t))
        return _calibration_at(self.shape, v, t, _sympy_functions(), core=core, scale=scale)

    def calibration_ball(self, t: Any) -> Any:
        """``𝒯(t)`` in ball arithmetic: an interval that surely holds the true value.

        Args:
            t: a ``flint.arb`` in [0, 1] (or a number, taken exactly). A ball must lie inside
                (0, 1) or be exactly 0 or 1.

        Raises:
            ValueError: a ball that is not surely inside [0, 1].
        """
        from flint import arb

        t, core, scale = arb(t), arb(self.core), arb(self.scale)
        if not (t >= 0 and t <= 1):
            raise ValueError(f"t must lie in [0, 1] as a whole ball, got {t}")
        m = _arb_functions()
        if t == 0:
            return arb(0)
        if t == 1:
            return core + scale * self.shape.value(arb(0), m)
        ratio = (1 - t) / (1 + t)
        if self.tail == "exponential":
            v = -ratio.log()
        elif self.tail == "gamma":
            v = -1 - (-ratio * (-arb(1)).exp()).lambertw(-1)
        else:
            v = ((1 + 3 * t) / (1 - t)).log()
        return _calibration_at(self.shape, v, t, m, core=core, scale=scale)


@dataclass(frozen=True)
class TwoSidedLinearCore(LinearCore):
    """The two-sided variant, straight on ``[-τ, τ]`` only: for binary margins.

    On ``u ≥ -τ`` it is ``LinearCore``. Left of the core, with ``v = (-τ - u)/s`` and the tail's
    slope ``σ``, ``Φ'(u) = -1 - c·(1 - σ(v))`` for ``c = steepening``: the tail mirrored, from slope
    -1 to ``-(1 + c)``. So ``Φ`` is convex, as differentiable as its tail, and its slope is bounded.

    For binary margins everything follows from the one-sided loss. Both heights above the core line
    have one shape, so with ``w = 1 + c·(1 - t)`` the calibration transform is the perspective
    ``𝒯(t) = w·𝒯₁(t/w)`` of the one-sided ``𝒯₁``, its minimiser is the one-sided one at ``t/w``, and
    ``𝒯''(t) = 𝒯₁''(t/w)·(1 + c)²/w³``. The constant stays ``1/τ``, approached and not attained.

    Not for more than two classes: in the constrained multi-class form a curved left piece makes the
    bound quadratic near ties for every K ≥ 4 (see ``multiclass.constrained_two_sided_ratio``).

    Args:
        core: ``τ > 0``, half the length of the straight part.
        scale: ``s > 0``, the length over which both pieces bend.
        tail: ``"exponential"``, ``"gamma"`` or ``"logistic"``, on both sides.
        steepening: ``c > 0``, how much steeper than 1 the left piece becomes.

    Raises:
        ValueError: a number not finite and positive, or an unknown ``tail``.

    Example:
        >>> phi = TwoSidedLinearCore()
        >>> phi(-1.0), round(phi(-2.0), 4), round(phi.derivative(-2.0), 4)
        (3.0, 4.3679, -1.6321)
    """

    steepening: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "steepening", _positive("steepening", self.steepening))

    @property
    def smoothness(self) -> float:
        """Lipschitz constant of ``Φ'``: ``max(1, c)`` times the one-sided one."""
        return max(1.0, self.steepening) * self.shape.curvature / self.scale

    def __call__(self, u: Any) -> Any:
        """``Φ(u)``, elementwise."""
        if isinstance(u, torch.Tensor):
            # clamp has slope 1 where u = -τ, as the tail's argument has: the two cancel there.
            left = (-self.core - u).clamp(min=0)
            bend = left + self.scale * (self.shape.value(self._v(-u), torch) - self._start)
            return super().__call__(u) + self.steepening * bend
        array: Any = _as_floating(u)
        fall = self.scale * (self.shape.value(self._v(-array), np) - self._start)
        bend = np.maximum(-self.core - array, 0) + fall
        return _like(super().__call__(array) + self.steepening * bend, u)

    @property
    def _start(self) -> float:
        return float(self.shape.value(0.0, np))

    def derivative(self, u: Any) -> Any:
        """``Φ'(u)``, elementwise, in [-(1 + c), 0]; both sides agree at ``±τ``."""
        m: Any = torch if isinstance(u, torch.Tensor) else np
        margin = u if m is torch else _as_floating(u)
        left = self.steepening * (1 - self.shape.slope(self._v(-margin), m))
        return _like(super().derivative(margin) - left, u)

    def symbolic(self, u: Any, core: Any = None, scale: Any = None) -> Any:
        """``Φ(u)`` as a sympy ``Piecewise`` of three pieces (arguments as for ``LinearCore``)."""
        import sympy

        core, scale = self._exact(core, scale)
        m = _sympy_functions()
        (line, _), (tail, _) = LinearCore(tail=self.tail).symbolic(u, core, scale).args
        v = (-core - u) / scale
        bend = scale * (v + self.shape.value(v, m) - self.shape.value(sympy.Integer(0), m))
        left = line + sympy.Rational(self.steepening) * bend
        return sympy.Piecewise((left, u <= -core), (line, u <= core), (tail, True))

    def _weight(self, t: Any) -> Any:
        return 1 + self.steepening * (1 - t)

    def best_margin(self, t: Any) -> Any:
        """The minimiser of ``C`` at ``η = (1+t)/2``: the one-sided one at ``t/(1 + c·(1-t))``."""
        gap = _probability_gap(t)
        return _like(super().best_margin(gap / self._weight(gap)), t)

    def calibration(self, t: Any) -> Any:
        """``𝒯(t) = w·𝒯₁(t/w)`` with ``w = 1 + c·(1-t)``, for ``t`` in [0, 1].

        Raises:
            ValueError: a ``t`` outside [0, 1] or NaN.
        """
        gap = _probability_gap(t)
        weight = self._weight(gap)
        return _like(weight * super().calibration(gap / weight), t)

    def calibration_symbolic(self, t: Any, core: Any = None, scale: Any = None) -> Any:
        """``𝒯(t)`` as a sympy expression on ``0 < t < 1`` (arguments as in ``symbolic``)."""
        import sympy

        weight = 1 + sympy.Rational(self.steepening) * (1 - t)
        return weight * super().calibration_symbolic(t / weight, core, scale)

    def calibration_ball(self, t: Any) -> Any:
        """``𝒯(t)`` in ball arithmetic (argument and errors as for ``LinearCore``)."""
        from flint import arb

        t = arb(t)
        weight = 1 + arb(self.steepening) * (1 - t)
        return weight * super().calibration_ball(t / weight)  # exact at 0 and 1


def _calibration_at(tail: Tail, v: Any, t: Any, m: Any, *, core: Any, scale: Any) -> Any:
    """``C(0) - C(u*)`` with ``u* = τ + s·v``: the definition, in any arithmetic."""
    start = scale * tail.value(0 * t, m)  # Φ(τ)
    right = scale * tail.value(v, m)  # Φ(u*)
    wrong = start + 2 * core + scale * v  # Φ(-u*)
    return start + core - (1 + t) / 2 * right - (1 - t) / 2 * wrong


@dataclass(frozen=True)
class LinearBound:
    """What ``certify_linear_bound`` proved about a surrogate's calibration transform.

    Attributes:
        ratio: rigorous lower bound of ``𝒯(t)/(τ·t)`` on all of (0, 1]; 1 is the best possible,
            since the ratio tends to 1 at 0.
        curvature: rigorous lower bound of ``𝒯''`` on (0, 1); so ``𝒯(t) ≥ τ·t + curvature·t²/2``.
        pieces: intervals that cover [0, 1] in the certificate.
        identities: the statements verified symbolically on the way.
    """

    ratio: float
    curvature: float
    pieces: int
    identities: tuple[str, ...]


def certify_linear_bound(surrogate: LinearCore, tolerance: float = 1e-6) -> LinearBound:
    """Prove ``𝒯(t) ≥ τ·t + m·t²/2`` on the whole of [0, 1], and return ``m``.

    Two halves. Symbolic (sympy): ``𝒯(0) = 0``, ``𝒯'(0) = τ`` and ``𝒯'' = c·s/q(t)`` (for the gamma
    tail times ``1 + 1/v > 1``), for symbols ``τ`` and ``s``. Numeric but rigorous (Arb balls): an
    upper bound of the polynomial ``q`` by interval subdivision that covers [0, 1] without gaps. No
    point is sampled: balls on ``𝒯(t) - τ·t`` itself would fail at its double zero ``t = 0`` and at
    the logarithm in ``t = 1``, which is why the proof goes through the second derivative.

    A ``TwoSidedLinearCore`` has ``𝒯''(t) = 𝒯₁''(t/w)·(1 + c)²/w³`` with ``1 ≤ w ≤ 1 + c``, so the
    one-sided bound divided by ``1 + c`` holds for it.

    Args:
        surrogate: the surrogate to certify.
        tolerance: relative slack of the one-sided ``m``. For the exponential tail the exact value
            is ``(27/16)·s``, at ``t = 1/3``.

    Raises:
        ArithmeticError: an identity that fails to simplify to zero (a tail with wrong formulas).
    """
    from flint import arb

    tolerance = _positive("tolerance", tolerance)
    identities = verify_identities(surrogate.tail)
    factor, q = surrogate.shape.steepness
    top, pieces = _upper_bound(q, tolerance)
    steepening = surrogate.steepening if isinstance(surrogate, TwoSidedLinearCore) else 0.0
    least = arb(factor) * arb(surrogate.scale) / (top * (1 + arb(steepening)))
    m = math.nextafter(float(least.lower()), 0)
    return LinearBound(1.0 if m > 0 else 0.0, m, pieces, identities)


def _upper_bound(coefficients: tuple[int, ...], tolerance: float) -> tuple[Any, int]:
    """Rigorous upper bound of a polynomial on [0, 1], by subdivision; and the pieces used.

    Splits the interval with the largest bound until it is within ``tolerance`` of a value that is
    surely reached. Bounds are mean-value forms, so the slack shrinks with the width squared.
    """
    import heapq

    from flint import arb, arb_poly

    q = arb_poly(list(coefficients))
    slope = q.derivative()
    reached = arb(0)

    def piece(low: float, high: float) -> tuple[float, float, float]:
        nonlocal reached
        middle, radius = arb((low + high) / 2), arb(0, (high - low) / 2)  # dyadic: exact
        value = q(middle)
        reached = reached.max(value.lower())
        bound = value + slope(middle + radius) * radius
        return -math.nextafter(float(bound.upper()), math.inf), low, high

    heap = [piece(0.0, 1.0)]
    while -heap[0][0] > (1 + tolerance) * float(reached):
        _, low, high = heapq.heappop(heap)
        middle = (low + high) / 2
        heapq.heappush(heap, piece(low, middle))
        heapq.heappush(heap, piece(middle, high))
    return arb(-heap[0][0]), len(heap)


def verify_identities(tail: str) -> tuple[str, ...]:
    """Verify with sympy what the linear bound rests on, for symbolic ``τ`` and ``s``.

    Uses the tail's own parameter: at the minimiser ``u* = τ + s·v`` the odds satisfy
    ``-Φ'(u*) = (1-t)/(1+t)``, so ``t``, ``𝒯`` and its derivatives are explicit functions of
    ``v ≥ 0`` for every tail.

    Returns:
        The verified statements, in words.

    Raises:
        ArithmeticError: a statement that does not simplify to zero.
    """
    import sympy

    shape = TAILS[tail]
    v, core, scale = sympy.symbols("v tau s", positive=True)
    m = _sympy_functions()
    t = (1 - shape.slope(v, m)) / (1 + shape.slope(v, m))
    transform = _calibration_at(shape, v, t, m, core=core, scale=scale)
    first = sympy.simplify(sympy.diff(transform, v) / sympy.diff(t, v))
    second = sympy.diff(first, v) / sympy.diff(t, v)
    factor, q = shape.steepness
    bound = factor * scale / sum(c * t**k for k, c in enumerate(q))
    spare = 1 + 1 / v if tail == "gamma" else sympy.Integer(1)
    statements = {
        "stitch: the tail starts with slope -1": shape.slope(sympy.Integer(0), m) - 1,
        "slope is minus the derivative": sympy.diff(shape.value(v, m), v) + shape.slope(v, m),
        "T(0) = 0": transform.subs(v, 0),
        "T'(0) = τ": sympy.limit(first, v, 0) - core,
        f"T''(t) = {'(1 + 1/v)·' if tail == 'gamma' else ''}{factor}s/q(t)": second - bound * spare,
    }
    for statement, difference in statements.items():
        if sympy.simplify(difference) != 0:
            raise ArithmeticError(f"{tail} tail: could not verify that {statement}")
    return tuple(statements)


@dataclass(frozen=True)
class ReferenceSurrogate:
    """A classical margin loss with the same interface as ``LinearCore``, for comparison.

    Attributes:
        name: its name.
        consistency_constant: ``sup t/𝒯(t)``; infinite where no linear bound exists.
        smoothness: Lipschitz constant of the derivative; infinite for the hinge.
    """

    name: str
    consistency_constant: float
    smoothness: float
    _value: Callable[[np.ndarray], np.ndarray]
    _derivative: Callable[[np.ndarray], np.ndarray]
    _calibration: Callable[[np.ndarray], np.ndarray]

    def __call__(self, u: Any) -> Any:
        """The loss at margin ``u`` (numpy array or number), elementwise."""
        return _like(self._value(_as_floating(u)), u)

    def derivative(self, u: Any) -> Any:
        """Its derivative (the right one at a kink), elementwise."""
        return _like(self._derivative(_as_floating(u)), u)

    def calibration(self, t: Any) -> Any:
        """The calibration transform ``𝒯(t)`` in closed form, for ``t`` in [0, 1]."""
        return _like(self._calibration(_probability_gap(t)), t)


def _smoothed_hinge(u: np.ndarray) -> np.ndarray:
    return np.where(u <= 0, 0.5 - u, np.maximum(1 - u, 0) ** 2 / 2)


def _logistic_calibration(t: np.ndarray) -> np.ndarray:
    from scipy.special import xlogy

    return (xlogy(1 + t, 1 + t) + xlogy(1 - t, 1 - t)) / 2


def _logistic_derivative(u: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return -expit(-u)


def reference_surrogate(name: str) -> ReferenceSurrogate:
    """A classical surrogate by name.

    ========================  ==========================  =====================  ==============
    name                      loss                        calibration            bound
    ========================  ==========================  =====================  ==============
    ``"hinge"``               ``max(0, 1-u)``             ``t``                  linear
    ``"logistic"``            ``log(1+e^(-u))``           ``t²/2 + O(t⁴)``       square root
    ``"squared hinge"``       ``max(0, 1-u)²``            ``t²``                 square root
    ``"smoothed hinge"``      hinge rounded on [0, 1]     ``t²/(1+t)``           square root
    ``"huberized hinge"``     hinge rounded on [1/2, 1]   ``t/2 + t²/(2+2t)``    linear
    ========================  ==========================  =====================  ==============

    The logistic loss is in nats: divide by log 2 for the version that is 1 at 0. The smoothed hinge
    is Rennie's: ``1/2 - u`` up to 0, ``(1-u)²/2`` on [0, 1], then 0. The huberized hinge of Wang,
    Zhu and Zou (2008) is ``1 - u - δ/2`` up to ``1 - δ``, ``(1-u)²/(2δ)`` up to 1, then 0; δ = 1/2.

    Raises:
        ValueError: an unknown name.
    """
    table = {
        "hinge": ReferenceSurrogate(
            "hinge", 1.0, math.inf,
            lambda u: np.maximum(1 - u, 0), lambda u: np.where(u < 1, -1.0, 0.0) + 0 * u,
            lambda t: t,
        ),
        "logistic": ReferenceSurrogate(
            "logistic", math.inf, 0.25,
            lambda u: np.logaddexp(0, -u), _logistic_derivative, _logistic_calibration,
        ),
        "squared hinge": ReferenceSurrogate(
            "squared hinge", math.inf, 2.0,
            lambda u: np.maximum(1 - u, 0) ** 2, lambda u: -2 * np.maximum(1 - u, 0),
            np.square,
        ),
        "smoothed hinge": ReferenceSurrogate(
            "smoothed hinge", math.inf, 1.0,
            _smoothed_hinge, lambda u: -np.clip(1 - u, 0, 1), lambda t: t**2 / (1 + t),
        ),
        "huberized hinge": ReferenceSurrogate(
            "huberized hinge", 2.0, 2.0,
            lambda u: np.where(u <= 0.5, 0.75 - u, np.maximum(1 - u, 0) ** 2),
            lambda u: -np.clip(2 - 2 * u, 0, 1), lambda t: t / 2 + t**2 / (2 + 2 * t),
        ),
    }  # fmt: skip
    if name not in table:
        raise ValueError(f"name must be one of {sorted(table)}, got {name!r}")
    return table[name]
