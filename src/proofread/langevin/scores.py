"""Scores as small callables that know their Lipschitz constant and their error.

A *score* is the gradient of a log density, or an estimate of one; a call maps ``[..., d]`` to
``[..., d]``. The classes here carry exact metadata: the target that they estimate, a proven bound
of their Lipschitz constant, and certified enclosures of their :math:`L^p` error,
:math:`\\varepsilon_p = (E_\\pi \\|\\hat s - s\\|^p)^{1/p}`, on a log scale.

Constructions follow Cao, Chen, Sridharan and Wu, *On the Robustness of Langevin Dynamics to Score
Function Error* (ICML 2026): :class:`TrapScore` theorem 1, :class:`MemorizingScore` theorem 7.
:class:`TiltedScore` is ours, for the statement of theorem 11.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from decimal import ROUND_FLOOR, Context, Decimal
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from scipy.special import wrightomega
from torch import Tensor

from .enclosures import LogEnclosure, ball_log_probability, trap_log_error

__all__ = [
    "GAUSSIAN",
    "MIXTURE",
    "TRAP",
    "GaussianScore",
    "MemorizingScore",
    "MixtureScore",
    "RadialLaw",
    "RadialScore",
    "Score",
    "TiltedScore",
    "TrapScore",
]

GAUSSIAN, TRAP, MIXTURE = 0, 1, 2
CHUNK = 1 << 22  # numbers in a block of distances
EPS = 2.0**-53  # relative error of one rounding in float64


class Score(Protocol):
    """What samplers take: a map ``[..., d]`` to ``[..., d]``, row by row."""

    @property
    def dimension(self) -> int:
        """d."""
        ...

    @property
    def lipschitz(self) -> float:
        """An upper bound of the Lipschitz constant; infinite if none is known."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``."""
        ...


class RadialLaw(NamedTuple):
    """What compiled loops and kernels read of a radial score; lengths, not units of √d.

    - ``kind`` 0, Gaussian: ``(m, variance)``; pull 1/variance, push m/variance;
    - ``kind`` 1, trap: ``(m, α, r_in, r_out)``; with ψ = clip((r_out − r)/(r_out − r_in), 0, 1) the
      pull is 1 + ψ(α − 1) and the push (1 − ψ)m;
    - ``kind`` 2, mixture: ``(K, K log weights, K positions, K variances)``; the log weights include
      −(d/2) log variance.
    """

    kind: int
    parameters: tuple[float, ...]


class RadialScore:
    """A score ``s(x) = −pull·y + push·axis`` with ``y = x − origin`` and a unit vector ``axis``.

    Pull and push depend on ``u = axis·y`` and ``w = ‖y‖² − u²`` alone.

    Args:
        origin: ``[d]``, float64.
        axis: unit vector ``[d]``, float64.
        law: pull and push, as numbers.
        lipschitz: an upper bound of the Lipschitz constant.
    """

    def __init__(self, origin: Tensor, axis: Tensor, law: RadialLaw, lipschitz: float) -> None:
        self.origin, self.axis, self.law, self.lipschitz = origin, axis, law, lipschitz
        self._frame = _Copies(origin, axis)
        self._moved = bool((origin != 0).any())
        self._mixture = _mixture_tensors(law) if law and law.kind == MIXTURE else None

    @property
    def dimension(self) -> int:
        """d."""
        return self.axis.numel()

    def coefficients(self, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Pull and push at ``u`` and ``w``, of their shape.

        Raises:
            ValueError: the score has no radial law (a mixture whose means are not on a line).
        """
        if self.law is None:
            raise ValueError("no radial law: the means are not on one line; call the score itself")
        if self.law.kind == GAUSSIAN:
            m, variance = self.law.parameters
            return torch.full_like(u, 1 / variance), torch.full_like(u, m / variance)
        if self._mixture is not None:
            return _mixture_coefficients(u, w, *self._mixture.like(u))
        return _trap_coefficients(u, w, *self.law.parameters)

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``.

        Raises:
            ValueError: the last dimension is not d.
            TypeError: ``x`` is not floating point.
        """
        _check_rows(x, self.dimension)
        origin, axis = self._frame.like(x)
        y = x - origin if self._moved else x
        u = y @ axis
        # not ‖y‖² − u²: it loses the digits of a short rest, and is inf − inf far away
        w = (y - u[..., None] * axis).square().sum(-1)
        pull, push = self.coefficients(u, w)
        return push[..., None] * axis - pull[..., None] * y


def _trap_coefficients(
    u: Tensor, w: Tensor, m: float, alpha: float, inner: float, outer: float
) -> tuple[Tensor, Tensor]:
    r = (u * u + w).clamp_min(torch.finfo(u.dtype).tiny).sqrt()  # a root has no gradient at 0
    psi = ((outer - r) / (outer - inner)).clamp(0, 1)
    return 1 + psi * (alpha - 1), (1 - psi) * m


def _mixture_tensors(law: RadialLaw) -> _Copies:
    """Log weights, positions, 1/(2 variance), and its excess over the smallest: each ``[K]``."""
    k = int(law.parameters[0])
    numbers = torch.tensor(law.parameters[1:], dtype=torch.float64)
    log_weight, position, variance = numbers.split(k)
    half = 0.5 / variance
    return _Copies(log_weight, position, half, half - half.min())


def _mixture_coefficients(
    u: Tensor, w: Tensor, log_weight: Tensor, position: Tensor, half: Tensor, excess: Tensor
) -> tuple[Tensor, Tensor]:
    # w/(2 variance) less what all components share: 0 for equal variances, however large w is
    common = w.clamp_max(torch.finfo(w.dtype).max)[..., None] * excess
    logs = log_weight - (u[..., None] - position).square() * half - common
    shares = _softmax(logs) * (2 * half)  # [..., K]
    return shares.sum(-1), shares @ position


def _softmax(logs: Tensor) -> Tensor:
    """Also where all underflow to −inf: equal shares there, and no NaN."""
    return torch.softmax(logs.clamp_min(torch.finfo(logs.dtype).min), -1)


class GaussianScore(RadialScore):
    """Score of N(mean, variance·I), ``−(x − mean)/variance``.

    Args:
        mean: ``[d]``, finite.
        variance: positive.

    Raises:
        ValueError: a mean that is empty, not one-dimensional or not finite, or a variance ≤ 0.
    """

    def __init__(self, mean: Any, variance: float = 1.0) -> None:
        self.mean = _vector("mean", mean)
        self.variance = _positive("variance", variance)
        axis, m = _direction(self.mean)
        law = RadialLaw(GAUSSIAN, (m, self.variance))
        super().__init__(torch.zeros_like(self.mean), axis, law, 1 / self.variance)
        self._mean = _Copies(self.mean)

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``; errors as in :class:`RadialScore`."""
        _check_rows(x, self.dimension)
        (mean,) = self._mean.like(x)
        return (mean - x) / self.variance

    def log_density(self, x: Tensor) -> Tensor:
        """Normalised log density of each row: ``[...]``."""
        _check_rows(x, self.dimension)
        (mean,) = self._mean.like(x)
        square = (x - mean).square().sum(-1)
        constant = self.dimension / 2 * math.log(2 * math.pi * self.variance)
        return -square / (2 * self.variance) - constant

    def sample(self, n: int, seed: int) -> Tensor:
        """``n`` independent samples: ``[n, d]``, float64."""
        draw, n = _generator(n, seed)
        noise = torch.randn(n, self.dimension, generator=draw, dtype=torch.float64)
        return self.mean + math.sqrt(self.variance) * noise

    def noised(self, time: float) -> GaussianScore:
        """Score of the law at ``time`` ≥ 0 of dX = −X dt + √2 dB started here."""
        shrink = _shrink(time)
        return GaussianScore(self.mean * shrink, 1 + (self.variance - 1) * shrink**2)


class MixtureScore(RadialScore):
    """Score of a mixture of isotropic Gaussians.

    With training points as means and the noise's variance this is the exact minimiser of denoising
    score matching. If all means lie on one line, ``law`` says how pull and push follow from two
    numbers; otherwise ``law`` is None.

    Cost: a product ``[N, d] × [d, K]`` and back. Logarithms of the shares are off by a few
    roundings of ‖x − c‖²/variance, c the centroid of the means: use float64 where that is large.

    Args:
        means: ``[K, d]``, finite.
        variances: one number or ``[K]``, positive.
        weights: ``[K]``, positive; equal if None. They are normalised.

    Raises:
        ValueError: shapes that do not fit, or an entry that is not finite or not positive.
    """

    def __init__(self, means: Any, variances: Any = 1.0, weights: Any = None) -> None:
        self.means = _matrix("means", means)
        k, d = self.means.shape
        self.variances = _per_component("variances", variances, k)
        self.weights = _per_component("weights", 1.0 if weights is None else weights, k)
        self.weights = self.weights / self.weights.sum()
        self._log_weights = self.weights.log() - d / 2 * self.variances.log()
        centre = self.means.mean(0)
        self._equal = bool((self.variances == self.variances[0]).all())
        half = 0.5 / self.variances
        means = self.means - centre
        bias = self._log_weights - half * means.square().sum(1)
        self._parts = _Copies(centre, means, bias, 2 * half, half - half.min())
        origin, axis, positions = _line(self.means)
        law = None
        if positions is not None:
            numbers = (*self._log_weights.tolist(), *positions.tolist(), *self.variances.tolist())
            law = RadialLaw(MIXTURE, (float(k), *numbers))
        super().__init__(origin, axis, law, self._lipschitz())  # type: ignore[arg-type]

    def _lipschitz(self) -> float:
        """From the Hessian of the log density, −E[1/v] I + Cov(a) over shares g, aₖ = (μₖ − x)/vₖ.

        Equal variances: a covariance is at most (spread/2)². Otherwise it is at most the second
        moment around a component J of the largest variance V. With δ = 1/vₖ − 1/V > 0, aₖ − a_J is
        δ(x* − x) for a point x*, and the share at most 1/(1 + exp(t − C)) with t = δ‖x − x*‖²/2: in
        all at most 2δ·max t/(1 + exp(t − C)) = 2δ·ω(C − 1), ω Wright's function. For two components
        this is up to about four times too large: it has the share g where g(1 − g) would do.
        """
        v = self.variances
        low, high = float(v.min()), float(v.max())
        if self._equal:
            covariance = (_spread(self.means) / (2 * low)) ** 2
        else:
            covariance = self._second_moment(int(v.argmax()))
        return max(1 / low, covariance - 1 / high) * (1 + 1e-9)

    def _second_moment(self, j: int) -> float:
        """Bound of E‖a − a_J‖² over the shares, J a component of the largest variance."""
        v, top = self.variances, self.variances[j]
        square = (self.means - self.means[j]).square().sum(1)
        like = v == top
        constant = float(square[like].max() / top**2)
        v, square = v[~like], square[~like]
        # C: log of the ratio of the terms k and J at its largest, at x*
        c = (self._log_weights - self._log_weights[j])[~like] + square / (2 * (top - v))
        omega = torch.from_numpy(np.atleast_1d(wrightomega((c - 1).numpy())))
        return constant + float((2 * (1 / v - 1 / top) * omega).sum())

    def _log_terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x − c, and log(weight · density), ``[..., K]``, up to ‖x − c‖²/(2V) + (d/2) log 2π.

        c is the centroid of the means and V the largest variance. What all terms share is left out,
        so that they stay finite far from all means.
        """
        centre, means, bias, precision, excess = self._parts.like(x)
        y = x - centre
        logs = bias + (y @ means.T) * precision
        if self._equal:
            return y, logs
        square = y.square().sum(-1, keepdim=True).clamp_max(torch.finfo(x.dtype).max)
        return y, logs - square * excess

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``; errors as in :class:`RadialScore`."""
        _check_rows(x, self.dimension)
        return self._in_blocks(super().__call__ if self.law is not None else self._score, x)

    def _score(self, x: Tensor) -> Tensor:
        y, logs = self._log_terms(x)
        _, means, _, precision, _ = self._parts.like(x)
        shares = _softmax(logs) * precision  # [..., K]
        return shares @ means - shares.sum(-1, keepdim=True) * y

    def log_density(self, x: Tensor) -> Tensor:
        """Normalised log density of each row: ``[...]``."""
        _check_rows(x, self.dimension)
        return self._in_blocks(self._log_density, x)

    def _log_density(self, x: Tensor) -> Tensor:
        y, logs = self._log_terms(x)
        common = y.square().sum(-1) / (2 * float(self.variances.max()))
        return torch.logsumexp(logs, -1) - common - self.dimension / 2 * math.log(2 * math.pi)

    def _in_blocks(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Rows a block at a time, so that memory does not grow with N·K."""
        rows = max(1, CHUNK // len(self.means))
        flat = x.reshape(-1, self.dimension)
        if len(flat) <= rows:
            return function(x)
        found = torch.cat([function(part) for part in flat.split(rows)])
        return found.reshape(*x.shape[:-1], *found.shape[1:])

    def sample(self, n: int, seed: int) -> Tensor:
        """``n`` independent samples: ``[n, d]``, float64."""
        draw, n = _generator(n, seed)
        if n == 0:
            return self.means.new_empty(0, self.dimension)
        which = torch.multinomial(self.weights, n, replacement=True, generator=draw)
        noise = torch.randn(n, self.dimension, generator=draw, dtype=torch.float64)
        return self.means[which] + self.variances[which].sqrt()[:, None] * noise

    def noised(self, time: float) -> MixtureScore:
        """Score of the law at ``time`` ≥ 0 of dX = −X dt + √2 dB started here."""
        shrink = _shrink(time)
        variances = 1 + (self.variances - 1) * shrink**2
        return MixtureScore(self.means * shrink, variances, self.weights)


class TrapScore(RadialScore):
    """Theorem 1's estimate of the score of N(mean, I): a trap around ``centre``.

    With ``y = x − centre`` and ``r = ‖y‖`` it is ``−α y`` for ``r ≤ inner·√d``, the exact score
    ``−(x − mean)`` for ``r ≥ outer·√d``, and between them their mixture, its weight ψ linear in r.

    Args:
        mean: of the target, ``[d]``.
        alpha: pull of the trap, positive.
        inner: radius of the trap, in units of √d.
        outer: radius beyond which the estimate is exact, in units of √d.
        centre: ``[d]``; the origin if None.

    Raises:
        ValueError: vectors that are empty, not finite or of different lengths, α ≤ 0, or radii
            without 0 ≤ inner < outer.
    """

    def __init__(
        self, mean: Any, alpha: float, inner: float = 4.0, outer: float = 5.0, *, centre: Any = None
    ) -> None:
        self.mean = _vector("mean", mean)
        self.centre = torch.zeros_like(self.mean) if centre is None else _vector("centre", centre)
        if self.centre.shape != self.mean.shape:
            raise ValueError(
                f"centre has {self.centre.numel()} entries and mean {self.mean.numel()}"
            )
        self.alpha = _positive("alpha", alpha)
        self.inner, self.outer = _radii(inner, outer)
        root = math.sqrt(self.mean.numel())
        axis, m = _direction(self.mean - self.centre)
        numbers = (m, self.alpha, self.inner * root, self.outer * root)
        law = RadialLaw(TRAP, numbers)
        super().__init__(self.centre, axis, law, _trap_lipschitz(self.mean.numel(), *numbers))

    @classmethod
    def standard(
        cls,
        dimension: int,
        alpha: float = 10.0,
        distance: float = 7.0,
        inner: float = 4.0,
        outer: float = 5.0,
    ) -> TrapScore:
        """Theorem 1's: the mean at ``distance·√d`` on the first axis, the trap at the origin."""
        try:
            dimension = operator.index(dimension)
        except TypeError as error:
            raise TypeError(f"dimension must be an integer, not {dimension!r}") from error
        if dimension < 1 or not 0 <= distance < math.inf:
            raise ValueError(
                f"dimension={dimension} must be at least 1, and distance={distance} at least 0"
            )
        mean = torch.zeros(dimension, dtype=torch.float64)
        mean[0] = distance * math.sqrt(dimension)
        return cls(mean, alpha, inner, outer)

    @property
    def radius(self) -> float:
        """Of the inner ball, as a length."""
        return self.law.parameters[2]

    @property
    def target(self) -> GaussianScore:
        """The exact score."""
        return GaussianScore(self.mean)

    def inside(self, x: Tensor) -> Tensor:
        """Whether each row lies in the inner ball: bool ``[...]``."""
        _check_rows(x, self.dimension)
        centre, _ = self._frame.like(x)
        return (x - centre).norm(dim=-1) <= self.radius

    def error(self, x: Tensor) -> Tensor:
        """Estimate minus exact score at each row."""
        return self(x) - self.target(x)

    def lp_error(self, p: float) -> LogEnclosure:
        """Certified enclosure of the logarithm of the L^p error under the target, p ≥ 1.

        The distance of the centre to the mean is a rounded number; the enclosure allows for that.
        """
        m = self.law.parameters[0]
        return _trap_error(self.dimension, m, self.alpha, self.inner, self.outer, p, 6 * EPS)


def _trap_error(
    d: int, m: float, alpha: float, inner: float, outer: float, p: float, relative: float
) -> LogEnclosure:
    """Error of a trap whose centre is at a distance m of the mean, known to a relative accuracy.

    The derivative of log E‖e‖^p in m has a part from the density of the target, at most R + m for
    the outer radius R, and one from e itself, p E[ψ‖e‖^(p−1)]/E‖e‖^p. By Hölder's inequality the
    latter is at most p (E ψ^p / E‖e‖^p)^(1/p). For α ≥ 1 this is at most p/m, because the part of
    e/ψ along the mean averages to at least m; otherwise E ψ^p ≤ π(outer ball).
    """
    found = trap_log_error(d, m, alpha, inner, outer, p)
    if not m:
        return found
    radius, slope = outer * math.sqrt(d), 1 / m
    if alpha < 1:
        log_ball = 0.0 if p == math.inf else ball_log_probability(d, m, radius).high / p
        slope = math.exp(min(700.0, log_ball - found.low))
    slack = 1.01 * relative * m * ((radius + m) / p + slope)
    low, high = found.low - slack, found.high + slack
    return LogEnclosure(math.nextafter(low, -math.inf), math.nextafter(high, math.inf))


def _trap_lipschitz(
    d: int, m: float, alpha: float, inner: float, outer: float, cells: int = 160
) -> float:
    """Upper bound of the Lipschitz constant: exact for d = 1, else at most about 1 % too large.

    In the bump zone the Jacobian is ``−k I + v nᵀ`` with n = y/r, k = 1 + ψ(α − 1) and
    v = ((α − 1) y + mean')/(outer − inner). In the plane of n and the mean, with c the cosine
    between them, it is ``[[D, 0], [B s, −k]]``: D = A + B c − k, A = (α − 1) r/width, B = m/width
    and s² = 1 − c². Its norm grows with the sum S of squared entries and falls with |det|, so boxes
    of (r, c) with the largest S and the smallest |det| bound it. In one dimension it is |D|, which
    is largest at a corner. The norm is convex in v, so its maximum over c grows with m.
    """
    width = outer - inner
    r = np.linspace(inner, outer, cells + 1)
    c = -np.cos(np.linspace(0, math.pi, cells + 1))
    a = (alpha - 1) * r / width
    k = 1 + (outer - r) / width * (alpha - 1)
    b = m / width
    if d == 1:
        corners = [abs(a[i] + sign * b - k[i]) for i in (0, -1) for sign in (-1, 1)]
        return _finite_or_inf(max(alpha, 1.0, *(float(x) * (1 + 1e-12) for x in corners)), corners)
    a_low, a_high = np.minimum(a[:-1], a[1:]), np.maximum(a[:-1], a[1:])
    k_low, k_high = np.minimum(k[:-1], k[1:]), np.maximum(k[:-1], k[1:])
    low = (a_low - k_high)[:, None] + b * c[None, :-1]
    high = (a_high - k_low)[:, None] + b * c[None, 1:]
    largest = np.maximum(np.abs(low), np.abs(high))
    smallest = np.where((low <= 0) & (high >= 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
    sine = 1 - np.where(c[:-1] * c[1:] < 0, 0.0, np.minimum(c[:-1] ** 2, c[1:] ** 2))
    squares = largest**2 + b * b * sine + k_high[:, None] ** 2
    determinant = smallest * k_low[:, None]
    norm = (squares + np.sqrt(np.maximum(squares**2 - 4 * determinant**2, 0))) / 2
    return _finite_or_inf(max(alpha, 1.0, float(np.sqrt(norm.max())) * (1 + 1e-12)), norm)


def _finite_or_inf(bound: float, from_numbers: Any) -> float:
    """The bound, or infinity if an overflow was on the way: ``max`` drops a NaN."""
    return bound if bool(np.isfinite(from_numbers).all()) else math.inf


class MemorizingScore:
    """Theorem 7's estimate of the score of N(mean, I): a trap around each training point.

    Within ``inner·√d`` of a point it is ``−α (x − xᵢ)``, farther than ``outer·√d`` from all the
    exact score, and between a mixture linear in the distance. The paper's summary names one radius;
    with one the estimate would jump.

    Args:
        points: training points ``[n, d]``; the outer balls around them must be disjoint.
        alpha: pull of the traps, positive.
        inner: radius of the traps, in units of √d.
        outer: radius beyond which the estimate is exact, in units of √d.
        mean: of the target, ``[d]``; the origin if None.

    Raises:
        ValueError: no points, coincident points, overlapping balls (the message has the largest
            outer radius that works), or bad parameters.
    """

    def __init__(
        self, points: Any, alpha: float, inner: float, outer: float, *, mean: Any = None
    ) -> None:
        self.points = _matrix("points", points)
        d = self.points.shape[1]
        self.mean = torch.zeros(d, dtype=torch.float64) if mean is None else _vector("mean", mean)
        if self.mean.numel() != d:
            raise ValueError(f"mean has {self.mean.numel()} entries, but points have {d}")
        self.alpha = _positive("alpha", alpha)
        self.inner, self.outer = _radii(inner, outer)
        _check_disjoint(self.points, self.outer * math.sqrt(d))
        middle = self.points.mean(0)
        self._parts = _Copies(self.points, self.points - middle, middle, self.mean)

    @property
    def dimension(self) -> int:
        """d."""
        return self.points.shape[1]

    @property
    def target(self) -> GaussianScore:
        """The exact score."""
        return GaussianScore(self.mean)

    @property
    def lipschitz(self) -> float:
        """The largest over the traps; it grows with the distance of a point to the mean."""
        root = math.sqrt(self.dimension)
        farthest = float((self.points - self.mean).norm(dim=1).max()) * (1 + self._relative())
        numbers = (farthest, self.alpha, self.inner * root, self.outer * root)
        return _trap_lipschitz(self.dimension, *numbers)

    def trap(self, index: int) -> TrapScore:
        """The trap around one training point."""
        centre = self.points[index]
        return TrapScore(self.mean, self.alpha, self.inner, self.outer, centre=centre)

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Index of the nearest training point to each row of ``[..., d]``, and its distance."""
        _check_rows(x, self.dimension)
        points, centred, middle, _ = self._parts.like(x)
        flat = x.reshape(-1, self.dimension)
        rows = max(1, CHUNK // max(centred.shape))
        # centred, so that cdist's products lose few digits; a choice has no gradient
        found = [
            torch.cdist(part - middle, centred).argmin(1) for part in flat.detach().split(rows)
        ]
        index = torch.cat(found)
        distance = (flat - points[index]).norm(dim=-1)  # by difference: exact near a point
        return index.reshape(x.shape[:-1]), distance.reshape(x.shape[:-1])

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``; errors as in :class:`RadialScore`."""
        index, distance = self.nearest(x)
        points, _, _, mean = self._parts.like(x)
        root = math.sqrt(self.dimension)
        psi = ((self.outer * root - distance) / ((self.outer - self.inner) * root)).clamp(0, 1)
        psi = psi[..., None]
        exact = mean - x
        if not bool((psi > 0).any()):
            return exact
        return torch.lerp(exact, self.alpha * (points[index] - x), psi)

    def _relative(self) -> float:
        """Accuracy of norms of ``[n, d]`` differences, summed in any order."""
        return (self.dimension / 2 + 4) * EPS

    def lp_error(self, p: float) -> LogEnclosure:
        """Certified enclosure of the logarithm of the L^p error, a sum over the disjoint traps.

        For α ≥ 1 and p = 2 or 4 a tenth of a second, however many the points (p = 64: some
        seconds); for α < 1 or another p some milliseconds a point.
        """
        norms = (self.points - self.mean).norm(dim=1)
        if len(norms) > 40 and p % 2 == 0 and self.alpha >= 1 and bool((norms > 0).all()):
            return self._interpolated_error(norms, p)
        if p == math.inf:
            norms = norms.max()[None]  # the supremum grows with m
        parameters = (self.alpha, self.inner, self.outer, p, self._relative())
        each = [_trap_error(self.dimension, m, *parameters) for m in norms.tolist()]
        if len(each) == 1:
            return each[0]
        low, high = (float(np.logaddexp.reduce(p * ends)) / p for ends in _ends(each))
        return LogEnclosure(*_widened(low, high))

    def _interpolated_error(self, norms: Tensor, p: float, knots: int = 17) -> LogEnclosure:
        """For many points, from a few norms.

        For even p and α ≥ 1, ``e^(m²/2) E‖error‖^p`` is a power series with coefficients ≥ 0 in the
        distance m of a point to the mean, so its logarithm is a convex function of log m: below its
        chords, and above their extensions beyond their ends.
        """
        t = np.log(norms.numpy())
        width = max((t.max() - t.min()) / (knots - 1), 1e-6)
        grid = t.min() - width + width * np.arange(knots + 2)
        m = np.exp(grid)
        arguments = (self.alpha, self.inner, self.outer, p)
        each = [trap_log_error(self.dimension, float(x), *arguments) for x in m]
        low, high = (p * ends + m**2 / 2 for ends in _ends(each))
        at = np.clip(((t - grid[0]) / width).astype(int), 1, knots - 1)
        share = (t - grid[at]) / width
        chord = high[at] + share * (high[at + 1] - high[at])
        before = low[at] + share * (low[at] - high[at - 1])
        after = low[at + 1] - (1 - share) * (high[at + 2] - low[at + 1])
        shift = np.exp(2 * t) / 2
        ends = np.maximum(before, after) - shift, chord - shift
        below, above = (float(np.logaddexp.reduce(values)) for values in ends)
        margin = 1e-9 * (1 + float(shift.max()))  # for the rounding of this function
        margin += self._relative() * float(norms.max()) * self.outer * math.sqrt(self.dimension)
        return LogEnclosure((below - margin) / p, (above + margin) / p)


class TiltedScore:
    """Score of the tilted target ``q ∝ π exp(height·ψ(‖x − centre‖))``, for π = N(mean, I).

    ψ is 1 in a ball of radius ``inner``, 0 beyond ``outer`` and linear between, so the error is
    ``height/(outer − inner)`` in the shell and 0 elsewhere, while Langevin dynamics converges to q
    from every start. Piecewise Lipschitz: it jumps at both spheres.

    Args:
        target: score of a Gaussian with variance 1.
        centre: of the ball, ``[d]``.
        inner: radius, a length.
        outer: radius, a length.
        height: of the tilt, at least 0.

    Raises:
        ValueError: another variance, vectors that do not fit, bad radii, or a negative height.
    """

    lipschitz = math.inf

    def __init__(
        self, target: GaussianScore, centre: Any, inner: float, outer: float, height: float
    ) -> None:
        if target.variance != 1:
            raise ValueError(f"target must have variance 1, not {target.variance}: rescale it")
        self.target, self.centre = target, _vector("centre", centre)
        if self.centre.numel() != target.dimension:
            raise ValueError(f"centre has {self.centre.numel()} entries, not {target.dimension}")
        self.inner, self.outer = _radii(inner, outer)
        if not 0 <= height < math.inf:
            raise ValueError(f"height must be finite and at least 0, not {height}")
        self.height = float(height)
        self._centre = _Copies(self.centre)

    @property
    def dimension(self) -> int:
        """d."""
        return self.target.dimension

    @property
    def distance(self) -> float:
        """Of the centre from the target's mean."""
        return _direction(self.centre - self.target.mean)[1]

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``."""
        _check_rows(x, self.dimension)
        (centre,) = self._centre.like(x)
        y = x - centre
        r = y.norm(dim=-1, keepdim=True)
        shell = (r > self.inner) & (r < self.outer)
        slope = self.height / (self.outer - self.inner)
        outwards = y / r.clamp_min(torch.finfo(x.dtype).tiny)
        return self.target(x) - torch.where(shell, slope * outwards, 0.0)

    def _ball(self, radius: float, complement: bool = False) -> LogEnclosure:
        """Of the target's mass within the radius, or beyond it; the distance is a rounded number.

        d/dm P(A) = E[u − m; A]: at most (R + m) P(A) for the ball, and at most 1 for any A.
        """
        m = self.distance
        found = ball_log_probability(self.dimension, m, radius, complement=complement)
        if not m or found.high == -math.inf:
            return found
        slope = math.exp(min(700.0, -found.low)) if complement else radius + m
        slack = 6.1 * EPS * m * slope
        return LogEnclosure(*_widened(found.low - slack, min(0.0, found.high + slack)))

    def _shell(self) -> LogEnclosure:
        """Of the target's mass between the radii, as a difference of two balls or two tails."""
        outside = self._ball(self.inner).low > math.log(0.5)
        radii = (self.inner, self.outer) if outside else (self.outer, self.inner)
        large, small = (self._ball(radius, outside) for radius in radii)
        low, high = small.high - large.low, small.low - large.high
        return LogEnclosure(
            large.low + math.log1p(-math.exp(low)) if low < 0 else -math.inf,
            large.high + math.log1p(-math.exp(high)) if high < 0 else large.high,
        )

    def lp_error(self, p: float) -> LogEnclosure:
        """Certified enclosure of the logarithm of the L^p error under the target, p ≥ 1."""
        if not p >= 1:
            raise ValueError(f"p must be at least 1, not {p}")
        if self.height == 0:
            return LogEnclosure(-math.inf, -math.inf)
        slope = math.log(self.height / (self.outer - self.inner))
        if p == math.inf:
            return LogEnclosure(*_widened(slope, slope))
        shell = self._shell()
        return LogEnclosure(*_widened(slope + shell.low / p, slope + shell.high / p))

    def limit_tv(self) -> float:
        """Certified lower bound of TV(q, π), the distance of the limit from every start.

        With a = e^height π(inner ball), q(outer ball) ≥ a/(1 + a); the target's mass there is
        subtracted.
        """
        log_a = self.height + self._ball(self.inner).low
        share = 1 / (1 + math.exp(-log_a)) if log_a > -700 else 0.0
        mass = math.exp(self._ball(self.outer).high)
        return max(0.0, share * (1 - 1e-12) - mass * (1 + 1e-12))


# --- shared ---------------------------------------------------------------------------------------


class _Copies:
    """Tensors in the dtype and on the device of another one, converted once."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._made: dict[tuple[torch.dtype, torch.device], tuple[Tensor, ...]] = {}

    def like(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors, for arithmetic with ``x``."""
        key = (x.dtype, x.device)
        if key not in self._made:
            with torch.inference_mode(False):  # what is kept must serve autograd later
                made = (t.to(x.device, x.dtype) for t in self._tensors)
                self._made[key] = tuple(made)
        return self._made[key]


def _generator(n: int, seed: int) -> tuple[torch.Generator, int]:
    """A generator, and the number of samples, both checked."""
    counts = []
    for name, value in (("n", n), ("seed", seed)):
        try:
            counts.append(operator.index(value))
        except TypeError as error:
            raise TypeError(f"{name} must be an integer, not {value!r}") from error
        if counts[-1] < 0:
            raise ValueError(f"{name} must be at least 0, not {counts[-1]}")
    return torch.Generator().manual_seed(counts[1]), counts[0]


def _shrink(time: float) -> float:
    """e^(−time)."""
    if not 0 <= time < math.inf:
        raise ValueError(f"time must be finite and at least 0, not {time}")
    return math.exp(-time)


def _spread(points: Tensor) -> float:
    """Largest distance between two of the points; an upper bound of it for very many."""
    centred = points - points.mean(0)
    if len(points) > 4096:
        return 2 * float(centred.norm(dim=1).max())
    return float(torch.cdist(centred, centred).max())


def _widened(low: float, high: float) -> tuple[float, float]:
    """Both ends moved outwards by more than the rounding of a few operations."""
    return low - 1e-13 * (1 + abs(low)), high + 1e-13 * (1 + abs(high))


def _ends(each: Sequence[LogEnclosure]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([e.low for e in each]), np.array([e.high for e in each])


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number, not {value!r}") from error


def _positive(name: str, value: float) -> float:
    value = _number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
    return value


def _radii(inner: float, outer: float) -> tuple[float, float]:
    inner, outer = _number("inner", inner), _number("outer", outer)
    if not 0 <= inner < outer < math.inf:
        raise ValueError(f"radii must satisfy 0 <= inner < outer, not inner={inner}, outer={outer}")
    return inner, outer


def _array(name: str, values: Any) -> Tensor:
    if not isinstance(values, Tensor):
        try:
            array = np.array(values, dtype=np.float64)  # torch would take float32 from a list
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} must be numbers, in rows of one length: {error}") from error
        values = torch.from_numpy(array)
    x = values.detach().to("cpu", torch.float64, copy=True)
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} must be finite, but holds NaN or infinity")
    return x


def _vector(name: str, values: Any) -> Tensor:
    x = _array(name, values)
    if x.ndim != 1 or not x.numel():
        raise ValueError(f"{name} must be a vector [d] with d >= 1, not of shape {tuple(x.shape)}")
    return x


def _matrix(name: str, values: Any) -> Tensor:
    x = _array(name, values)
    if x.ndim != 2 or not x.numel():
        raise ValueError(f"{name} must be [n, d] with n, d >= 1, not of shape {tuple(x.shape)}")
    return x


def _per_component(name: str, values: Any, k: int) -> Tensor:
    x = _array(name, values)
    if x.ndim and x.shape != (k,):
        raise ValueError(f"{name} must be one number or [{k}], not of shape {tuple(x.shape)}")
    if not bool((x > 0).all()):
        raise ValueError(f"{name} must be positive; the smallest is {float(x.min())}")
    return x.expand(k).clone()


def _check_rows(x: Tensor, d: int) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"x must be a float32 or float64 tensor, not {kind}: squares overflow in half "
            "precision; use x.float(), or torch.as_tensor(x, dtype=torch.float32)"
        )
    if x.shape[-1:] != (d,):
        raise ValueError(
            f"x must have {d} entries in its last dimension, not shape {tuple(x.shape)}"
        )


def _direction(vector: Tensor) -> tuple[Tensor, float]:
    """Unit vector and length, to 2 roundings; the first axis for the zero vector."""
    length = math.sqrt(math.fsum(vector.square().tolist()))
    if length:
        return vector / length, length
    axis = torch.zeros_like(vector)
    axis[0] = 1.0
    return axis, 0.0


def _line(points: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Origin, direction and positions of collinear points; no positions if they are not collinear.

    The origin is 0 if it lies on the line.
    """
    farthest = points[(points - points[0]).square().sum(1).argmax()]
    axis, spread = _direction(farthest - points[0])
    if not spread:
        axis = _direction(points[0])[0]
    origin = points[0] - (points[0] @ axis) * axis  # the point of the line nearest to 0
    if float(origin.norm()) <= 1e-12 * float(points.norm(dim=1).max()):
        origin = torch.zeros_like(origin)
    y = points - origin
    positions = y @ axis
    # relative to the spread, but not below the rounding of the coordinates
    z = points - points[0]
    off = float((z - (z @ axis)[:, None] * axis).norm(dim=1).max())
    collinear = off <= 1e-12 * spread + 16 * EPS * float(points.norm(dim=1).max())
    return origin, axis, positions if collinear else None


def _check_disjoint(points: Tensor, radius: float) -> None:
    """Raise if two of the points are within twice the radius of each other."""
    n, d = points.shape
    centred = points - points.mean(0)  # cdist's products lose fewer digits
    least, pair = math.inf, (0, 0)
    rows = max(1, CHUNK // max(n, d))
    for start in range(0, n, rows):
        block = centred[start : start + rows]
        distance = torch.cdist(block, centred)
        own = torch.arange(len(block))
        distance[own, own + start] = math.inf
        value, at = distance.flatten().min(0)
        if float(value) < least:
            least, pair = float(value), (start + int(at) // n, int(at) % n)
    if least == math.inf:  # a single point
        return
    least = float((points[pair[0]] - points[pair[1]]).norm())
    where = f"points {min(pair)} and {max(pair)}"
    if least == 0:
        raise ValueError(f"{where} coincide: remove duplicates (torch.unique(points, dim=0))")
    if least <= 2 * radius:
        digits = Context(prec=4, rounding=ROUND_FLOOR)  # advice that works when taken
        largest = digits.create_decimal(Decimal(0.999999 * least / 2 / math.sqrt(d)))
        raise ValueError(
            f"{where} are {least:.6g} apart, so their outer balls of radius {radius:.6g} overlap: "
            f"outer may be at most {float(largest):.4g}, in units of sqrt(d)"
        )
