r"""Certified bounds: leaving a trap, and the total variation (TV) of Langevin and of diffusion.

**Leaving a ball, continuous time.** Inside the ball let :math:`dX = -\alpha X\,dt + \sqrt2\,dB`,
and let :math:`V = e^{\theta r^2}` with :math:`r = \|X\|`, :math:`c = \alpha - 2\theta > 0`. Then
:math:`\nabla V = 2\theta X V` and :math:`\Delta V = (2\theta d + 4\theta^2 r^2) V`, so the
generator gives

.. math:: LV = \langle -\alpha X, \nabla V\rangle + \Delta V = 2\theta\,(d - c\,r^2)\,V .

Over :math:`r^2 \ge 0` it is largest at :math:`r^2 = d/c - 1/\theta`, where it is
:math:`b = 2c\,e^{\theta d/c - 1}`, or at 0 when :math:`\theta d < c`, where it is
:math:`b = 2\theta d`. Dynkin's formula up to the exit time τ and Markov's inequality give

.. math:: P(\tau \le T) \le \bigl[E\,e^{\theta\|X_0\|^2} + b\,T\bigr]\,e^{-\theta R^2},

which counts a start outside the ball as an exit. For :math:`X_0 \sim N(x_0, vI)` and
:math:`\theta < 1/(2v)` the first term is
:math:`(1 - 2\theta v)^{-d/2}\,e^{\theta\|x_0\|^2/(1 - 2\theta v)}`.

**With steps.** A step :math:`x' = (1 - \alpha h)x + \sqrt{2h}\,\xi` from inside has

.. math:: E\,V(x') = A\,V(x)^{a^2}, \qquad A = (1 - 4\theta h)^{-d/2}, \quad
          a^2 = \frac{(1 - \alpha h)^2}{1 - 4\theta h},

and :math:`a^2 < 1` exactly when :math:`\theta < (\alpha/2)(1 - \alpha h/2)`, which needs
:math:`\alpha h < 2` and implies :math:`4\theta h \le 1`. The gain :math:`A v^{a^2} - v` over
:math:`v \ge 1` is largest at :math:`v = (A a^2)^{1/(1 - a^2)}`, where it is
:math:`b = (a^{-2} - 1)\,v`, or at 1 when :math:`A a^2 < 1`, where it is :math:`b = A - 1`. The sum
over the steps takes the place of the integral: *n* steps have :math:`b\,n` for :math:`b\,T`.

The bounds hold for every θ. Each candidate is evaluated in ball arithmetic and rounded up, and the
smallest is returned: the search decides how sharp a bound is, never whether it holds.

The proofs are ours; the trap is that of theorem 1 of Cao, Chen, Sridharan and Wu, *On the
Robustness of Langevin Dynamics to Score Function Error* (arXiv 2603.11319).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from flint import arb, ctx
from torch import Tensor

from ..stats import Estimate, clopper_pearson
from .enclosures import ball_log_probability

__all__ = [
    "EscapeBound",
    "certified_log_horizon",
    "diffusion_tv_bound",
    "escape_bound",
    "first_dimension",
    "langevin_tv_bound",
    "stationary_tv_bound",
    "trap_radius",
    "tv_lower_bound",
]

PRECISION = 128  # bits; the rounding error of a bound stays far below a double's
WIDEST = 36.0  # the search covers θ/θ_max = 1/(1 + e^(−x)) for |x| up to this, nearly all of (0, 1)
ZOOMS = 14  # times the search narrows the spacing of x by 4, from 1/2


class EscapeBound(NamedTuple):
    """Upper bound of the probability of leaving a ball, all terms as natural logarithms.

    - ``log_probability``: at most 0; 0 says nothing.
    - ``theta``: θ of the function ``exp(θr²)`` behind it, in 1/length²; 0 for the trivial bound.
    - ``start_term``: of ``E exp(θ‖X₀‖²) · exp(−θR²)``, what the start costs.
    - ``drift_term``: of ``bT·exp(−θR²)``, or ``bn·exp(−θR²)`` with n steps: what time costs.
    """

    log_probability: float
    theta: float
    start_term: float
    drift_term: float


TRIVIAL = EscapeBound(0.0, 0.0, 0.0, -math.inf)  # θ = 0: V is 1 everywhere


def escape_bound(
    dimension: int,
    alpha: float,
    radius: float,
    log_horizon: float,
    *,
    start_norm: float | None = None,
    start_variance: float | None = None,
    step: float | None = None,
) -> EscapeBound:
    """Rigorous upper bound on leaving a ball of a linear trap before a time.

    The score is ``−αy`` in the ball, with y measured from its centre, and anything outside.

    Args:
        dimension: d ≥ 1.
        alpha: α > 0, in 1/length².
        radius: R > 0, a length; ``trap_radius`` rounds ``inner·√d`` to the safe side.
        log_horizon: log T; ``-inf`` for the start alone. A horizon of e^(10⁷) is fine.
        start_norm: ``‖x₀‖``, the start's distance from the centre.
        start_variance: v ≥ 0, for a start at ``N(x₀, vI)``. Give one of the two or both: without
            the first x₀ is the centre, without the second the start is fixed.
        step: None for continuous time, else the step h of unadjusted Langevin, which makes
            ``⌈T/h⌉`` steps; needs ``αh < 2``.

    Returns:
        the bound, with the θ that gives it. It is trivial (log probability 0) where the method
        has nothing to say: αR² too small for d, a start outside the ball, too long a horizon.

    Raises:
        ValueError: no start, ``αh ≥ 2``, or a number out of range.
        TypeError: ``dimension`` is not an integer.
    """
    trap = _trap(dimension, alpha, radius, start_norm, start_variance, step)
    log_horizon = _number("log_horizon", log_horizon)
    with ctx.workprec(PRECISION):
        _, theta = _minimise(lambda t: trap.bound(t, log_horizon).log_probability, trap.limit())
        bound = trap.bound(theta, log_horizon)
    return bound if bound.log_probability < 0 else TRIVIAL


def langevin_tv_bound(
    dimension: int,
    alpha: float,
    inner: float,
    mean_norm: float,
    log_horizon: float,
    *,
    start_norm: float | None = None,
    start_variance: float | None = None,
    step: float | None = None,
) -> float:
    """Certified upper bound of ``log(1 − TV)`` between Langevin in a trap and N(mean, I).

    With A the ball, ``1 − TV ≤ P(X_T ∉ A) + π(A)``: the chance to have left the trap before time
    T plus the target's mass in it, a non-central χ² probability.

    Args:
        dimension: d ≥ 1.
        alpha: α > 0.
        inner: radius of the ball in units of √d; the score is ``−αy`` in it.
        mean_norm: distance of the target's mean from the trap's centre, a length.
        log_horizon: log T.
        start_norm: see ``escape_bound``.
        start_variance: see ``escape_bound``.
        step: see ``escape_bound``.

    Returns:
        a logarithm of at most 0; 0 certifies nothing.

    Raises:
        ValueError: see ``escape_bound``; also ``inner ≤ 0`` or a negative ``mean_norm``.
    """
    radius = trap_radius(dimension, inner)
    start = {"start_norm": start_norm, "start_variance": start_variance}
    escape = escape_bound(dimension, alpha, radius, log_horizon, **start, step=step)
    mean_norm = _number("mean_norm", mean_norm, least=0.0)
    inside = ball_log_probability(dimension, mean_norm, radius).high
    with ctx.workprec(PRECISION):
        total = _exp(escape.log_probability) + _exp(inside)
        return min(0.0, _log_above(total))


def certified_log_horizon(
    dimension: int,
    alpha: float,
    inner: float,
    mean_norm: float,
    *,
    start_norm: float | None = None,
    start_variance: float | None = None,
    step: float | None = None,
    tv: float = 0.99,
) -> float:
    """Largest log T for which ``langevin_tv_bound`` certifies TV ≥ ``tv``; ``-inf`` if none.

    For one θ the bound is linear in T, so the longest T is explicit; the largest over θ is taken.
    With steps, ``T`` is that of the last whole step.

    Args:
        dimension: d ≥ 1.
        alpha: α > 0.
        inner: radius of the ball in units of √d.
        mean_norm: distance of the target's mean from the trap's centre, a length.
        start_norm: see ``escape_bound``.
        start_variance: see ``escape_bound``.
        step: see ``escape_bound``.
        tv: the distance to certify, strictly between 0 and 1.

    Returns:
        log T, rounded down; the TV distance is at least ``tv`` at every time up to T.

    Raises:
        ValueError: see ``langevin_tv_bound``; also ``tv`` outside (0, 1).
    """
    radius = trap_radius(dimension, inner)
    trap = _trap(dimension, alpha, radius, start_norm, start_variance, step)
    mean_norm = _number("mean_norm", mean_norm, least=0.0)
    if not 0 < (tv := _number("tv", tv)) < 1:
        raise ValueError(f"tv must lie strictly between 0 and 1, not {tv}")
    inside = ball_log_probability(dimension, mean_norm, radius).high
    with ctx.workprec(PRECISION):
        room = 1 - arb(tv) - _exp(inside)
        shortest, _ = _minimise(lambda t: -trap.log_horizon(t, room), trap.limit())
    return -shortest


def stationary_tv_bound(log_error: float, log_horizon: float) -> float:
    r"""Upper bound of log TV to the target for Langevin that starts at the target.

    Girsanov: between the path with the exact score and the one with the estimate, both from π, the
    divergence is :math:`\mathrm{KL} = \tfrac14 E\int_0^T \|\hat s - s\|^2(X_t)\,dt =
    T\varepsilon^2/4`, because the exact path stays at π. Data processing and Pinsker's inequality:
    :math:`\mathrm{TV} \le \sqrt{\mathrm{KL}/2} = \varepsilon\sqrt{T/8}`.

    Args:
        log_error: log ε, the L²(π) error of the score or an upper bound of it.
        log_horizon: log T.

    Returns:
        the logarithm of the bound, rounded up, at most 0.

    Raises:
        ValueError: NaN.
    """
    log_error = _number("log_error", log_error)
    log_horizon = _number("log_horizon", log_horizon)
    if -math.inf in (log_error, log_horizon):
        return -math.inf
    with ctx.workprec(PRECISION):
        return min(0.0, _above(arb(log_error) + (arb(log_horizon) - arb(8).log()) / 2))


def diffusion_tv_bound(
    log_error: float, mean_norm: float, n_levels: int, time_step: float
) -> float:
    r"""Upper bound of log TV between N(mean, I) and what an ancestral diffusion sampler returns.

    The forward process is :math:`dX = -X\,dt + \sqrt2\,dB`, so that at time *t* the law is
    :math:`N(e^{-t}\mu, I)`. From level *t* to :math:`s = t - \Delta` the sampler draws

    .. math:: x_s = e^{\Delta} x_t + (e^{\Delta} - e^{-\Delta})\,\hat s_t(x_t)
              + \sqrt{1 - e^{-2\Delta}}\,\xi ,

    which with the exact score is the law of :math:`X_s` given :math:`X_t`: no discretisation error
    for this target. An error :math:`\delta` moves the mean of a step, and
    :math:`\mathrm{KL} = \|(e^\Delta - e^{-\Delta})\delta\|^2 / (2(1 - e^{-2\Delta})) =
    \tfrac12(e^{2\Delta} - 1)\|\delta\|^2`. Summed over *n* levels, by Pinsker, with the start at
    :math:`N(0, I)` instead of :math:`N(e^{-n\Delta}\mu, I)`:

    .. math:: \mathrm{TV} \le \varepsilon\sqrt{n\,(e^{2\Delta} - 1)/4}
              + 2\Phi\bigl(e^{-n\Delta}\|\mu\|/2\bigr) - 1 .

    Args:
        log_error: log ε, where ε bounds the error at each level in L² of that level's law.
        mean_norm: ``‖μ‖``.
        n_levels: number of levels, at least 1.
        time_step: Δ > 0, the time between two levels.

    Returns:
        the logarithm of the bound, rounded up, at most 0; ``-inf`` if both terms are 0.

    Raises:
        ValueError: NaN, ``n_levels < 1``, ``time_step ≤ 0`` or a negative ``mean_norm``.
        TypeError: ``n_levels`` is not an integer.
    """
    log_error = _number("log_error", log_error)
    mean_norm = _number("mean_norm", mean_norm, least=0.0)
    n_levels, time_step = _count("n_levels", n_levels), _positive("time_step", time_step)
    if log_error == -math.inf and mean_norm == 0:
        return -math.inf
    with ctx.workprec(PRECISION):
        delta, n = arb(time_step), arb(n_levels)
        path = (n * (2 * delta).expm1()).sqrt() / 2 * _exp(log_error)
        start = ((-n * delta).exp() * mean_norm / arb(8).sqrt()).erf()
        return min(0.0, _log_above(path + start))


def tv_lower_bound(
    samples: Any,
    event: Callable[[Any], Any] | Any | None,
    target_probability: float,
    confidence: float = 0.95,
) -> Estimate:
    """TV distance between the law of the samples and a target, from below, by one event.

    ``TV ≥ P(X ∈ A) − π(A)`` for every event A that was chosen without a look at the samples. The
    first term is estimated by the share of hits, with the one-sided bound of Clopper and Pearson;
    the second must be known. From n samples the bound cannot exceed ``(1 − confidence)^(1/n)``.

    Args:
        samples: ``[n, d]`` independent samples (one a chain), or ``[n]`` booleans, hit or not.
        event: a function from the samples to ``[n]`` booleans, the booleans themselves, or None
            if ``samples`` are the booleans.
        target_probability: π(A), or an upper bound of it.
        confidence: of the lower bound, one-sided, strictly between 0.5 and 1.

    Returns:
        the difference of the probabilities, at least 0, its lower bound, and 1 as upper end.

    Raises:
        ValueError: no samples, a sample with a NaN or an infinity, no ``[n]`` booleans, a
            probability outside [0, 1] or a confidence outside (0.5, 1).
    """
    hits = _hits(samples, event)
    mass = _number("target_probability", target_probability)
    if not 0 <= mass <= 1:
        raise ValueError(f"target_probability must lie in [0, 1], not {mass}")
    if not 0.5 < (confidence := _number("confidence", confidence)) < 1:
        raise ValueError(
            f"confidence is one-sided and must lie strictly between 0.5 and 1, not {confidence}"
        )
    # A two-sided interval at 2c − 1 leaves 1 − c below its lower end.
    share = clopper_pearson(int(hits.sum()), len(hits), 2 * confidence - 1)
    value, low = max(0.0, share.value - mass), max(0.0, share.low - mass)
    return Estimate(value, low, 1.0, len(hits), confidence)


def first_dimension(holds: Callable[[int], bool], dimensions: Iterable[int]) -> int | None:
    """Smallest of the dimensions from which on ``holds`` is true for all of them.

    Args:
        holds: whether a certified bound has the wanted property in this dimension.
        dimensions: the dimensions to test, in any order; nothing is said about others.

    Returns:
        the dimension, or None if ``holds`` is false at the largest.
    """
    first = None
    for dimension in sorted(dimensions, reverse=True):
        if not holds(dimension):
            break
        first = dimension
    return first


def trap_radius(dimension: int, inner: float) -> float:
    """The largest double that is at most ``inner·√d``, decided exactly.

    A ball of this radius lies inside the one whose radius is ``inner·√d`` without rounding.

    Raises:
        ValueError: ``inner`` is not positive and finite, or ``dimension < 1``.
        TypeError: ``dimension`` is not an integer.
    """
    dimension, inner = _count("dimension", dimension), _positive("inner", inner)
    radius = _positive("inner·√d", math.nextafter(inner * math.sqrt(dimension), math.inf))
    while Fraction(radius) ** 2 > Fraction(inner) ** 2 * dimension:
        radius = math.nextafter(radius, 0.0)
    return radius


# --- the escape bound at one θ --------------------------------------------------------------------


@dataclass(frozen=True)
class _Trap:
    """A linear trap and a start in it, checked; the terms of the bound as balls."""

    dimension: int
    alpha: float
    radius: float
    start_norm: float
    start_variance: float
    step: float | None

    def limit(self) -> float:
        """What θ must stay below, in floats: the balls decide whether a θ is allowed."""
        limit = self.alpha / 2
        if self.step is not None:
            limit *= 1 - self.alpha * self.step / 2
        return min(limit, 0.5 / self.start_variance) if self.start_variance else limit

    def bound(self, theta: float, log_horizon: float) -> EscapeBound:
        """The bound at this θ, rounded up; ``inf`` where θ is not certainly allowed."""
        t = arb(theta)
        gain = self.gain(t)
        start = self.start_moment(t)
        if gain is None or start is None:
            return EscapeBound(math.inf, theta, math.inf, math.inf)
        at_wall = (-t * arb(self.radius) ** 2).exp()
        start_term = start * at_wall
        drift_term = gain * self.periods(log_horizon) * at_wall
        terms = (start_term + drift_term, start_term, drift_term)
        total, start_log, drift_log = (_log_above(term) for term in terms)
        return EscapeBound(total, theta, start_log, drift_log)

    def log_horizon(self, theta: float, room: Any) -> float:
        """Longest log T, rounded down, for which the bound at this θ is at most ``room``."""
        t = arb(theta)
        gain = self.gain(t)
        start = self.start_moment(t)
        if gain is None or start is None:
            return -math.inf
        periods = (room * (t * arb(self.radius) ** 2).exp() - start) / gain
        if self.step is not None:
            periods = arb(periods.lower()).floor() * self.step
        return _below(periods.log()) if periods > 0 else -math.inf

    def periods(self, log_horizon: float) -> Any:
        """T, or with steps the number of steps."""
        time = _exp(log_horizon)
        return time if self.step is None else (time / self.step).ceil()

    def start_moment(self, theta: Any) -> Any | None:
        """``E exp(θ‖X₀‖²)``; None where it is not certainly finite."""
        left = 1 - 2 * theta * self.start_variance
        if not left > 0:
            return None
        off_centre = theta * arb(self.start_norm) ** 2 / left
        return (off_centre - arb(self.dimension) / 2 * left.log()).exp()

    def gain(self, theta: Any) -> Any | None:
        """b: largest growth of ``E exp(θr²)`` in a unit of time or a step; None for a bad θ."""
        if not theta > 0:
            return None
        return (
            self.gain_of_time(theta) if self.step is None else self.gain_of_step(theta, self.step)
        )

    def gain_of_time(self, theta: Any) -> Any | None:
        c = self.alpha - 2 * theta
        if not c > 0:
            return None
        if theta * self.dimension < c:
            return 2 * theta * self.dimension
        return 2 * c * (theta * self.dimension / c - 1).exp()  # a bound in the other case too

    def gain_of_step(self, theta: Any, step: float) -> Any | None:
        left = 1 - 4 * theta * step
        if not left > 0:
            return None
        shrink = (1 - arb(self.alpha) * step) ** 2 / left  # a²
        log_growth = -arb(self.dimension) / 2 * (-4 * theta * step).log1p()  # log A
        if not shrink < 1:
            return None
        if log_growth.exp() * shrink < 1:
            return log_growth.expm1()
        power = (log_growth + shrink.log()) / (1 - shrink)
        return (1 / shrink - 1) * power.exp()  # a bound in the other case too


def _trap(
    dimension: int,
    alpha: float,
    radius: float,
    start_norm: float | None,
    start_variance: float | None,
    step: float | None,
) -> _Trap:
    """The arguments of the bounds, checked."""
    if start_norm is None and start_variance is None:
        raise ValueError("the start is missing: give start_norm, start_variance or both")
    dimension, alpha = _count("dimension", dimension), _positive("alpha", alpha)
    radius = _positive("radius", radius)
    norm = _number("start_norm", start_norm or 0.0, least=0.0)
    variance = _number("start_variance", start_variance or 0.0, least=0.0)
    if step is not None and alpha * (step := _positive("step", step)) >= 2:
        raise ValueError(
            f"step must be below 2/alpha = {2 / alpha:g}, not {step:g}: beyond it the chain does "
            "not contract in the trap and leaves it"
        )
    return _Trap(dimension, alpha, radius, norm, variance, step)


def _minimise(objective: Callable[[float], float], limit: float) -> tuple[float, float]:
    """Smallest value found over (0, limit), and where; the objective may be ``inf`` in places.

    A grid in the logit of θ/limit, then finer ones around the best point. A local minimum would
    only make a bound less sharp.
    """

    def at(x: float) -> tuple[float, float, float]:
        theta = limit / (1 + math.exp(-x))
        return objective(theta), x, theta

    spacing = 0.5
    best = min(at(i * spacing) for i in range(round(-WIDEST / spacing), round(WIDEST / spacing)))
    for _ in range(ZOOMS):
        spacing /= 4
        centre = best[1]
        best = min(best, *(at(centre + i * spacing) for i in (-3, -2, -1, 1, 2, 3)))
    return best[0], best[2]


# --- balls to doubles -----------------------------------------------------------------------------


def _exp(x: float) -> Any:
    """``e^x`` as a ball; 0 for ``-inf``."""
    return arb(x).exp()


def _log_above(x: Any) -> float:
    """The logarithm of a number in the ball, at least 0, rounded up; ``-inf`` for an exact 0."""
    return -math.inf if x == 0 else _above(arb(x.upper()).log())


def _above(x: Any) -> float:
    """A double above the ball; ``inf`` for one that is not finite."""
    return math.nextafter(float(x.upper()), math.inf) if x.is_finite() else math.inf


def _below(x: Any) -> float:
    """A double below the ball; ``-inf`` for one that is not finite."""
    return math.nextafter(float(x.lower()), -math.inf) if x.is_finite() else -math.inf


# --- arguments ------------------------------------------------------------------------------------


def _hits(samples: Any, event: Callable[[Any], Any] | Any | None) -> Tensor:
    """``[n]`` booleans, one a sample."""
    x = torch.as_tensor(samples)
    if x.ndim < 1 or not len(x):
        raise ValueError("samples must hold at least one sample, [n, d] or [n]")
    if not bool(x.isfinite().all()):
        raise ValueError("samples must be finite: a NaN or an infinity is a chain that diverged")
    hits = x if event is None else event(samples) if callable(event) else event
    hits = torch.as_tensor(hits)
    if hits.dtype != torch.bool or hits.shape != x.shape[:1]:
        raise ValueError(
            f"the event must give one boolean a sample, [{len(x)}], not "
            f"{list(hits.shape)} of {hits.dtype}"
        )
    return hits


def _number(name: str, value: float, least: float = -math.inf) -> float:
    number = float(value)
    if not number >= least or (math.isinf(number) and least > -math.inf):
        wanted = "a number, not" if least == -math.inf else f"finite and at least {least:g}, not"
        raise ValueError(f"{name} must be {wanted} {value}")
    return number


def _positive(name: str, value: float) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
    return number


def _count(name: str, value: int) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, not {value!r}") from error
    if not 1 <= count < 2**53:
        raise ValueError(f"{name} must be at least 1 and below 2^53, not {count}")
    return count
