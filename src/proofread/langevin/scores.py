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
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
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
        self._copies: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor, bool]] = {}

    @property
    def dimension(self) -> int:
        """d."""
        return self.axis.numel()

    def frame(self, like: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Origin and axis in the dtype and on the device of ``like``; whether the origin is not 0."""
        key = (like.dtype, like.device)
        if key not in self._copies:
            moved = bool((self.origin != 0).any())
            self._copies[key] = (self.origin.to(like), self.axis.to(like), moved)
        return self._copies[key]

    def coefficients(self, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Pull and push at ``u`` and ``w``, of their shape."""
        return _coefficients(self.law, u, w)

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``.

        Raises:
            ValueError: the last dimension is not d.
            TypeError: ``x`` is not floating point.
        """
        _check_rows(x, self.dimension)
        origin, axis, moved = self.frame(x)
        y = x - origin if moved else x
        u = y @ axis
        w = (y.square().sum(-1) - u * u).clamp_min(0)
        pull, push = self.coefficients(u, w)
        return push[..., None] * axis - pull[..., None] * y


def _coefficients(law: RadialLaw, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    numbers = law.parameters
    if law.kind == GAUSSIAN:
        m, variance = numbers
        return torch.full_like(u, 1 / variance), torch.full_like(u, m / variance)
    if law.kind == TRAP:
        m, alpha, inner, outer = numbers
        psi = ((outer - (u * u + w).sqrt()) / (outer - inner)).clamp(0, 1)
        return 1 + psi * (alpha - 1), (1 - psi) * m
    k = int(numbers[0])
    log_weight, position, variance = (
        u.new_tensor(numbers[1 + k * i : 1 + k * (i + 1)]) for i in range(3)
    )
    square = (u[..., None] - position).square() + w[..., None]
    shares = torch.softmax(log_weight - square / (2 * variance), -1) / variance
    return shares.sum(-1), (shares * position).sum(-1)


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

    def log_density(self, x: Tensor) -> Tensor:
        """Normalised log density of each row: ``[...]``."""
        _check_rows(x, self.dimension)
        square = (x - self.mean.to(x)).square().sum(-1)
        constant = self.dimension / 2 * math.log(2 * math.pi * self.variance)
        return -square / (2 * self.variance) - constant

    def sample(self, n: int, seed: int) -> Tensor:
        """``n`` independent samples: ``[n, d]``, float64."""
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randn(n, self.dimension, generator=draw, dtype=torch.float64)
        return self.mean + math.sqrt(self.variance) * noise

    def noised(self, time: float) -> GaussianScore:
        """Score of the law at ``time`` of dX = −X dt + √2 dB started here."""
        shrink = math.exp(-time)
        return GaussianScore(self.mean * shrink, 1 + (self.variance - 1) * shrink**2)


class MixtureScore(RadialScore):
    """Score of a mixture of isotropic Gaussians.

    With training points as means and the noise's variance this is the exact minimiser of denoising
    score matching. If all means lie on one line, ``law`` says how pull and push follow from two
    numbers; otherwise ``law`` is None.

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
        origin, axis, positions = _line(self.means)
        law = None
        if positions is not None:
            numbers = (*self._log_weights.tolist(), *positions.tolist(), *self.variances.tolist())
            law = RadialLaw(MIXTURE, (float(k), *numbers))
        super().__init__(origin, axis, law, self._lipschitz())  # type: ignore[arg-type]

    def _lipschitz(self) -> float:
        """−I/v + Cov(means)/v² for equal variances v; a covariance is at most (spread/2)²."""
        v = float(self.variances[0])
        if not bool((self.variances == v).all()):
            return math.inf  # finite, but no bound is proved here
        if len(self.means) > 4096:
            return math.inf
        spread = float(torch.cdist(self.means, self.means).max())
        return max(1 / v, spread**2 / (4 * v * v) - 1 / v)

    def _log_terms(self, x: Tensor) -> Tensor:
        """log(weight · density) up to (2π)^(−d/2), for each row and component: ``[..., K]``."""
        means = self.means.to(x)
        square = x.square().sum(-1, keepdim=True) - 2 * x @ means.T + means.square().sum(-1)
        return self._log_weights.to(x) - square.clamp_min(0) / (2 * self.variances.to(x))

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``."""
        if self.law is not None:
            return super().__call__(x)
        _check_rows(x, self.dimension)
        shares = torch.softmax(self._log_terms(x), -1) / self.variances.to(x)
        return shares @ self.means.to(x) - shares.sum(-1, keepdim=True) * x

    def log_density(self, x: Tensor) -> Tensor:
        """Normalised log density of each row: ``[...]``."""
        _check_rows(x, self.dimension)
        square = (x[..., None, :] - self.means.to(x)).square().sum(-1)
        log = self._log_weights.to(x) - square / (2 * self.variances.to(x))
        return torch.logsumexp(log, -1) - self.dimension / 2 * math.log(2 * math.pi)

    def sample(self, n: int, seed: int) -> Tensor:
        """``n`` independent samples: ``[n, d]``, float64."""
        draw = torch.Generator().manual_seed(seed)
        which = torch.multinomial(self.weights, n, replacement=True, generator=draw)
        noise = torch.randn(n, self.dimension, generator=draw, dtype=torch.float64)
        return self.means[which] + self.variances[which].sqrt()[:, None] * noise

    def noised(self, time: float) -> MixtureScore:
        """Score of the law at ``time`` of dX = −X dt + √2 dB started here."""
        shrink = math.exp(-time)
        variances = 1 + (self.variances - 1) * shrink**2
        return MixtureScore(self.means * shrink, variances, self.weights)


class TrapScore(RadialScore):
    """Theorem 1's estimate of the score of N(mean, I): a trap around ``centre``.

    With ``y = x − centre`` and ``r = ‖y‖`` it is ``−α y`` for ``r ≤ inner·√d``, the exact score
    ``−(x − mean)`` for ``r ≥ outer·√d``, and between them their mixture with a weight ψ linear in r.

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
        super().__init__(self.centre, axis, law, _trap_lipschitz(*numbers))

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
        if dimension < 1:
            raise ValueError(f"dimension must be at least 1, not {dimension}")
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
        return (x - self.centre.to(x)).norm(dim=-1) <= self.radius

    def error(self, x: Tensor) -> Tensor:
        """Estimate minus exact score at each row."""
        return self(x) - self.target(x)

    def lp_error(self, p: float) -> LogEnclosure:
        """Certified enclosure of the logarithm of the L^p error under the target."""
        m = self.law.parameters[0]
        return trap_log_error(self.dimension, m, self.alpha, self.inner, self.outer, p)


def _trap_lipschitz(m: float, alpha: float, inner: float, outer: float, cells: int = 160) -> float:
    """Upper bound of the Lipschitz constant.

    In the bump zone the Jacobian is ``−k I + v nᵀ`` with n = y/r, k = 1 + ψ(α − 1) and
    v = ((α − 1) y + mean')/(outer − inner). In the plane of n and the mean, with c the cosine
    between them, it is ``[[D, 0], [B s, −k]]``: D = A + B c − k, A = (α − 1) r/width, B = m/width and
    s² = 1 − c². Its norm grows with the sum S of squared entries and falls with |det|, so boxes
    of (r, c) with the largest S and the smallest |det| bound it.
    """
    width = outer - inner
    r = np.linspace(inner, outer, cells + 1)
    c = np.linspace(-1, 1, cells + 1)
    a = (alpha - 1) * r / width
    k = 1 + (outer - r) / width * (alpha - 1)
    b = m / width
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
    return max(alpha, 1.0, float(np.sqrt(norm.max())) * (1 + 1e-12))


class MemorizingScore:
    """Theorem 7's estimate of the score of N(mean, I): a trap around each training point.

    Within ``inner·√d`` of a point it is ``−α (x − xᵢ)``, farther than ``outer·√d`` from all the exact
    score, and between a mixture linear in the distance. The paper's summary names one radius; with
    one the estimate would jump.

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
        root, farthest = (
            math.sqrt(self.dimension),
            float((self.points - self.mean).norm(dim=1).max()),
        )
        return _trap_lipschitz(farthest, self.alpha, self.inner * root, self.outer * root)

    def trap(self, index: int) -> TrapScore:
        """The trap around one training point."""
        centre = self.points[index]
        return TrapScore(self.mean, self.alpha, self.inner, self.outer, centre=centre)

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Index of the nearest training point to each row ``[N, d]``, and its distance: ``[N]``."""
        _check_rows(x, self.dimension)
        points = self.points.to(x)
        rows = max(1, CHUNK // max(len(points), self.dimension))
        found = [
            torch.cdist(part, points).min(1) for part in x.reshape(-1, x.shape[-1]).split(rows)
        ]
        index = torch.cat([f.indices for f in found]) if found else x.new_zeros(0, dtype=torch.long)
        # cdist may lose digits near a point: the distance once more, by difference
        distance = (x.reshape(-1, x.shape[-1]) - points[index]).norm(dim=-1)
        return index.reshape(x.shape[:-1]), distance.reshape(x.shape[:-1])

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``."""
        index, distance = self.nearest(x)
        root = math.sqrt(self.dimension)
        psi = ((self.outer * root - distance) / ((self.outer - self.inner) * root)).clamp(0, 1)
        psi = psi[..., None]
        exact = self.mean.to(x) - x
        if not bool((psi > 0).any()):
            return exact
        return torch.lerp(exact, self.alpha * (self.points.to(x)[index] - x), psi)

    def lp_error(self, p: float) -> LogEnclosure:
        """Certified enclosure of the logarithm of the L^p error: a sum over the disjoint traps."""
        norms = (self.points - self.mean).norm(dim=1)
        parameters = (self.alpha, self.inner, self.outer, p)
        if p == math.inf:
            return trap_log_error(self.dimension, float(norms.max()), *parameters)
        if len(norms) > 40 and p % 2 == 0 and self.alpha >= 1 and bool((norms > 0).all()):
            return self._interpolated_error(norms, p)
        each = [trap_log_error(self.dimension, float(m), *parameters) for m in norms]
        low, high = (np.logaddexp.reduce([p * e for e in ends]) / p for ends in _ends(each))
        return LogEnclosure(math.nextafter(low, -math.inf), math.nextafter(high, math.inf))

    def _interpolated_error(self, norms: Tensor, p: float, knots: int = 17) -> LogEnclosure:
        """For many points, from a few norms.

        For even p and α ≥ 1, ``e^(m²/2) E‖error‖^p`` is a power series in m = ‖xᵢ‖ with coefficients
        ≥ 0, so its logarithm is a convex function of log m: below its chords, and above their
        extensions beyond their ends.
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
        margin = 1e-9 * (1 + shift.max())  # for the rounding of this function
        ends = np.maximum(before, after) - shift, chord - shift
        below, above = (float(np.logaddexp.reduce(values)) for values in ends)
        margin = float(margin)
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

    @property
    def dimension(self) -> int:
        """d."""
        return self.target.dimension

    @property
    def distance(self) -> float:
        """Of the centre from the target's mean."""
        return float((self.centre - self.target.mean).norm())

    def __call__(self, x: Tensor) -> Tensor:
        """The score at each row of ``x``, ``[..., d]``."""
        _check_rows(x, self.dimension)
        y = x - self.centre.to(x)
        r = y.norm(dim=-1, keepdim=True)
        shell = (r > self.inner) & (r < self.outer)
        slope = self.height / (self.outer - self.inner)
        return self.target(x) - torch.where(shell, slope * y / r.clamp_min(1e-300), 0.0)

    def _ball(self, radius: float) -> LogEnclosure:
        return ball_log_probability(self.dimension, self.distance, radius)

    def lp_error(self, p: float) -> LogEnclosure:
        """Certified enclosure of the logarithm of the L^p error under the target."""
        if not p >= 1:
            raise ValueError(f"p must be at least 1, not {p}")
        if self.height == 0:
            return LogEnclosure(-math.inf, -math.inf)
        slope = math.log(self.height / (self.outer - self.inner))
        if p == math.inf:
            return LogEnclosure(*_widened(slope, slope))
        large, small = self._ball(self.outer), self._ball(self.inner)
        low = large.low + math.log1p(-math.exp(small.high - large.low))
        high = large.high + math.log1p(-math.exp(small.low - large.high))
        return LogEnclosure(*_widened(slope + low / p, slope + high / p))

    def limit_tv(self) -> float:
        """Certified lower bound of TV(q, π), the distance of the limit from every start.

        With a = e^height π(inner ball), q(outer ball) ≥ a/(1 + a); the target's mass there is
        subtracted.
        """
        log_a = self.height + self._ball(self.inner).low
        share = 1 / (1 + math.exp(-log_a)) if log_a > -700 else 0.0
        return max(0.0, (share - math.exp(self._ball(self.outer).high)) * (1 - 1e-12))


# --- shared ---------------------------------------------------------------------------------------


def _widened(low: float, high: float) -> tuple[float, float]:
    """Both ends moved outwards by more than the rounding of a few operations."""
    return low - 1e-13 * (1 + abs(low)), high + 1e-13 * (1 + abs(high))


def _ends(each: Sequence[LogEnclosure]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([e.low for e in each]), np.array([e.high for e in each])


def _positive(name: str, value: float) -> float:
    value = float(value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
    return value


def _radii(inner: float, outer: float) -> tuple[float, float]:
    inner, outer = float(inner), float(outer)
    if not 0 <= inner < outer < math.inf:
        raise ValueError(f"radii must satisfy 0 <= inner < outer, not inner={inner}, outer={outer}")
    return inner, outer


def _array(name: str, values: Any) -> Tensor:
    x = torch.as_tensor(values).detach().to("cpu", torch.float64)
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
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(
            "x must be a floating-point tensor: torch.as_tensor(x, dtype=torch.float32)"
        )
    if x.shape[-1:] != (d,):
        raise ValueError(
            f"x must have {d} entries in its last dimension, not shape {tuple(x.shape)}"
        )


def _direction(vector: Tensor) -> tuple[Tensor, float]:
    """Unit vector and length; the first axis for the zero vector."""
    length = float(vector.norm())
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
    if float(origin.norm()) <= 1e-12 * float(points.abs().max()):
        origin = torch.zeros_like(origin)
    y = points - origin
    positions = y @ axis
    off = (y - positions[:, None] * axis).norm(dim=1).max()
    collinear = float(off) <= 1e-12 * (1 + float(points.abs().max()))
    return origin, axis, positions if collinear else None


def _check_disjoint(points: Tensor, radius: float) -> None:
    """Raise if two of the points are within twice the radius of each other."""
    n, d = points.shape
    least, pair = math.inf, (0, 0)
    rows = max(1, CHUNK // max(n, d))
    for start in range(0, n, rows):
        block = points[start : start + rows]
        distance = torch.cdist(block, points)
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
        raise ValueError(
            f"{where} are {least:.4g} apart, so their outer balls of radius {radius:.4g} overlap: "
            f"outer must be below {least / 2 / math.sqrt(d):.4g}, in units of sqrt(d)"
        )
