"""What the theory page certifies, and its attempts to break what it certifies.

The standard trap is theorem 1's: α = 10, radii 4√d and 5√d, ‖μ‖ = 7√d. Rates are per dimension:
``−log(quantity)/d``, from the end of the enclosure that favours the claim least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from .bounds import (
    certified_log_horizon,
    diffusion_tv_bound,
    escape_bound,
    langevin_tv_bound,
    stationary_tv_bound,
)
from .enclosures import LogEnclosure, ball_log_probability, trap_log_error
from .scores import GaussianScore, MemorizingScore, TiltedScore

DIMENSIONS = (8, 16, 32, 64, 128, 256, 512, 1024, 10_000, 100_000, 1_000_000)
LOWER = DIMENSIONS[:8]  # where controls fail already; the smallest over all is no larger
NO_HORIZON = -1e9  # what stands for "no time at all" in a ruling, which takes no infinity


@dataclass(frozen=True)
class Trap:
    """The construction of theorem 1 in any dimension; lengths in units of √d."""

    alpha: float = 10.0
    distance: float = 7.0
    inner: float = 4.0
    outer: float = 5.0

    def mean_norm(self, d: int) -> float:
        return self.distance * math.sqrt(d)

    def log_error(self, d: int, p: float = 2) -> LogEnclosure:
        """Certified logarithm of the L^p error under the target."""
        return _log_error(d, self.mean_norm(d), self.alpha, self.inner, self.outer, p)

    def log_gap(self, d: int, log_horizon: float, start_variance: float = 1.0) -> float:
        """Certified upper bound of log(1 − TV) at that time, from N(0, I)."""
        return langevin_tv_bound(
            d,
            self.alpha,
            self.inner,
            self.mean_norm(d),
            log_horizon,
            start_variance=start_variance,
        )

    def log_horizon(self, d: int, tv: float = 0.99) -> float:
        """Logarithm of the longest time for which TV ≥ ``tv`` is certified, from N(0, I)."""
        return certified_log_horizon(
            d, self.alpha, self.inner, self.mean_norm(d), start_variance=1.0, tv=tv
        )


@lru_cache(maxsize=4096)
def _log_error(
    d: int, mean_norm: float, alpha: float, inner: float, outer: float, p: float
) -> LogEnclosure:
    return trap_log_error(d, mean_norm, alpha, inner, outer, p)


STANDARD = Trap()
ON_THE_SHELL = replace(STANDARD, inner=6.9, outer=7.5)
WEAK = replace(STANDARD, alpha=1 / 20)


# --- rulings of theorem 1 -------------------------------------------------------------------------


def slower_rate(trap: Trap = STANDARD, dimensions: Sequence[int] = DIMENSIONS) -> float:
    """Smallest certified rate of the L² error and of 1 − TV at T = e^d."""
    rates = [min(-trap.log_error(d).high, -trap.log_gap(d, float(d))) / d for d in dimensions]
    return min(rates) + 0.0  # no negative zero


def power_rate(powers: Sequence[float], dimensions: Sequence[int]) -> float:
    """Smallest certified rate of the L^p error over powers and dimensions."""
    return min(-STANDARD.log_error(d, p).high / d for p in powers for d in dimensions)


def horizon_rate(trap: Trap = STANDARD, dimensions: Sequence[int] = DIMENSIONS) -> float:
    """Smallest log(T)/d for the longest certified T with TV ≥ 0.99."""
    rates = [trap.log_horizon(d) / d for d in dimensions]
    return max(min(rates), NO_HORIZON)


def fresh_start_tv(dimensions: Sequence[int]) -> float:
    """Largest certified upper bound of TV at T = d³ from a start at the target."""
    bounds = [stationary_tv_bound(STANDARD.log_error(d).high, 3 * math.log(d)) for d in dimensions]
    return math.exp(min(0.0, max(bounds)))


def gaussian_start_tv(dimensions: Sequence[int], until: str = "cube") -> float:
    """Smallest certified lower bound of TV from N(0, I), at T = d³ (``cube``) or e^d (``exp``)."""
    times = {d: 3 * math.log(d) if until == "cube" else float(d) for d in dimensions}
    return min(-math.expm1(STANDARD.log_gap(d, times[d])) for d in dimensions)


# --- the diffusion sampler ------------------------------------------------------------------------

LEVEL_STEP = 0.25  # of the noise schedule: the time between two levels


def diffusion_levels(d: int) -> int:
    """Levels after which the start N(0, I) is as close to the target's noised law as the error."""
    return math.ceil((1.2 * d + math.log(STANDARD.mean_norm(d))) / LEVEL_STEP)


def log_diffusion_tv(d: int) -> float:
    """Certified upper bound of log TV of the sampler with the trap's L² error at every level."""
    error = STANDARD.log_error(d).high
    return diffusion_tv_bound(error, STANDARD.mean_norm(d), diffusion_levels(d), LEVEL_STEP)


def diffusion_tv(dimensions: Sequence[int]) -> float:
    """Largest certified upper bound of the sampler's TV over dimensions."""
    return math.exp(min(0.0, max(log_diffusion_tv(d) for d in dimensions)))


# --- attacks on inequalities ----------------------------------------------------------------------


def ball_exponent(radius: float, distance: float) -> float:
    """I(ρ, δ): P(‖z‖ ≤ ρ√d) ≤ e^(−I d) for z of mean length δ√d and variance 1, ρ² < 1 + δ²."""
    s = (1 + math.sqrt(1 + 4 * (radius * distance) ** 2)) / (2 * radius**2)
    free = (1 - s) * radius**2 + math.log(s) + distance**2 * (1 - 1 / s)
    return free / 2 if radius**2 < 1 + distance**2 else 0.0


def attack_ball_bound(n: int = 200, seed: int = 0) -> float:
    """Largest log P(ball) + I·d over random d, ρ and δ: the bound holds if it is at most 0."""
    rng = np.random.default_rng(seed)
    worst = -math.inf
    for _ in range(n):
        d, distance = int(rng.integers(1, 300)), rng.uniform(0, 8)
        radius = rng.uniform(0.05, math.sqrt(1 + distance**2))
        root = math.sqrt(d)
        probability = ball_log_probability(d, distance * root, radius * root)
        worst = max(worst, probability.high + ball_exponent(radius, distance) * d)
    return worst


def crude_log_error(d: int, p: float) -> float:
    """The proof's bound of the L^p error: largest error times the ball's probability."""
    trap = STANDARD
    size = (abs(trap.alpha - 1) * trap.outer + trap.distance) * math.sqrt(d)
    return math.log(size) - ball_exponent(trap.outer, trap.distance) * d / p


def attack_drift(n: int = 20_000, seed: int = 0) -> float:
    """Largest ratio of the generator of exp(θr²) to its bound 2c·exp(θd/c − 1), random inputs."""
    rng = np.random.default_rng(seed)
    d = rng.integers(1, 200, n)
    alpha = rng.uniform(0.1, 20, n)
    theta = rng.uniform(0, 0.5, n) * alpha
    c = alpha - 2 * theta
    square = rng.uniform(0, 3, n) * np.maximum(d / c, 1e-9)  # r², around where the drift turns
    drift = 2 * theta * (d - c * square)
    # For θd < c the largest value is at r = 0, where it is 2θd.
    interior = theta * d >= c
    log_bound = np.where(interior, np.log(2 * c) + theta * d / c - 1, np.log(2 * theta * d))
    up = drift > 0  # elsewhere the bound holds
    log_ratio = np.log(drift[up]) + (theta * square - log_bound)[up]
    return float(np.exp(log_ratio.max()))


def attack_step(n: int = 20_000, seed: int = 0) -> float:
    """Largest excess of E exp(θ‖x'‖²) − exp(θr²) over the step's bound b, relative to b."""
    rng = np.random.default_rng(seed)
    d = rng.integers(1, 20, n)
    alpha = rng.uniform(0.5, 10, n)
    step = rng.uniform(0.01, 0.9, n) / alpha
    theta = rng.uniform(0.01, 0.98, n) * np.minimum(
        alpha / 2 * (1 - alpha * step / 2), 1 / (4 * step)
    )
    shrink = (1 - alpha * step) ** 2 / (1 - 4 * theta * step)  # a²
    growth = (1 - 4 * theta * step) ** (-d / 2)  # A
    inner = growth * shrink >= 1
    with np.errstate(over="ignore"):
        top = (growth * shrink) ** (1 / (1 - shrink))
    bound = np.where(inner, top * (1 / shrink - 1), growth - 1)
    square = rng.uniform(0, 2, n) * np.log(np.maximum(top, 1.5)) / theta
    gain = growth * np.exp(theta * shrink * square) - np.exp(theta * square)
    return float(((gain - bound) / bound).max())


def theorem_constants_hold() -> bool:
    """Whether the constants of theorem 1 as the page states them follow from certified numbers."""
    dimensions = (*range(8, 64), *DIMENSIONS)
    gap = all(STANDARD.log_gap(d, float(d)) <= math.log(2) - 4.78 * d for d in dimensions)
    error = all(
        STANDARD.log_error(d, p).high <= math.log(52 * math.sqrt(d)) - 2.17 * d / p
        for d in (8, 16, 64, 1024)
        for p in (1, 2, 4)
    )
    return gap and error


def attack_stationary(n: int = 2000, seed: int = 0) -> float:
    """Largest ratio of the exact TV to ε√(T/8) for a constant error in one dimension."""
    rng = np.random.default_rng(seed)
    ratios = []
    for error, time in zip(10 ** rng.uniform(-4, 0.5, n), 10 ** rng.uniform(-3, 3, n), strict=True):
        tv = math.erf(error * -math.expm1(-time) / 2**1.5)  # of N(0, 1) and N(shift, 1)
        ratios.append(tv / min(1.0, error * math.sqrt(time / 8)))
    return max(ratios)


def attack_diffusion(n: int = 2000, seed: int = 0) -> float:
    """Largest ratio of the exact TV of the sampler to its bound, constant errors, one dimension.

    With an error δ at every level the output is normal with variance 1, and its mean is off by
    e_s = e^(−Δ) e_t + (e^Δ − e^(−Δ)) δ from level to level, −e^(−T) μ at the start.
    """
    rng = np.random.default_rng(seed)
    worst = 0.0
    for _ in range(n):
        step, levels = rng.uniform(0.02, 1.5), int(rng.integers(1, 60))
        error, mean = 10 ** rng.uniform(-4, 0), rng.uniform(0, 9)
        off = -math.exp(-levels * step) * mean
        for _ in range(levels):
            off = math.exp(-step) * off + 2 * math.sinh(step) * error * rng.choice([-1.0, 1.0])
        exact = math.erf(abs(off) / 2**1.5)
        bound = diffusion_tv_bound(math.log(error), mean, levels, step)
        worst = max(worst, exact / math.exp(min(0.0, bound)))
    return worst


def exit_probability(
    d: int,
    alpha: float,
    radius: float,
    horizon: float,
    *,
    start_variance: float | None = None,
    cells: int = 1000,
) -> float:
    """Probability that dX = −αX dt + √2 dB leaves the ball before the horizon.

    ``‖X‖`` is a reversible diffusion with weight ``r^(d−1) e^(−αr²/2)``: finite volumes, absorbed
    at the radius, and the matrix exponential from the eigenvalues of a symmetric tridiagonal
    matrix. Started at 0 or at N(0, vI), whose part outside counts as left.
    """
    from scipy.linalg import eigh_tridiagonal
    from scipy.stats import chi

    width = radius / cells
    middle = (np.arange(cells) + 0.5) * width
    edge = np.arange(1, cells + 1) * width
    log_mass = (d - 1) * np.log(middle) - alpha * middle**2 / 2
    log_flux = (d - 1) * np.log(edge) - alpha * edge**2 / 2
    right = np.exp(log_flux - log_mass) / width**2  # rate from cell i to i + 1
    left = np.exp(log_flux[:-1] - log_mass[1:]) / width**2  # rate from cell i + 1 to i
    right[-1] *= 2  # the wall is half a cell away
    diagonal = -right.copy()
    diagonal[1:] -= left
    values, vectors = eigh_tridiagonal(diagonal, np.sqrt(right[:-1] * left))
    start = np.zeros(cells)
    if start_variance is None:
        start[0] = 1.0
    else:
        start = np.diff(chi(d, scale=math.sqrt(start_variance)).cdf(np.r_[0.0, edge]))
    half = np.exp(log_mass / 2 - log_mass.max() / 2)
    survival = (vectors.T @ (start / half)) * (vectors.T @ half) @ np.exp(values * horizon)
    return float(1 - survival)


# --- theorem 7 ------------------------------------------------------------------------------------


def memorized_points(d: int, n: int, seed: int = 0) -> torch.Tensor:
    """``n`` training points from N(0, I): ``[n, d]``."""
    return GaussianScore(torch.zeros(d)).sample(n, seed)


def memorization_rate(
    dimensions: Sequence[int],
    *,
    n: int | None = None,
    alpha: float = 100.0,
    inner: float = 0.2,
    outer: float = 0.3,
) -> float:
    """Smallest certified rate of the L² error of theorem 7's score, n = min(d², 4096) points."""
    rates = []
    for d in dimensions:
        points = memorized_points(d, n or min(d * d, 4096))
        score = MemorizingScore(points, alpha, inner, outer)
        rates.append(-score.lp_error(2).high / d)
    return min(rates)


# --- the tilt -------------------------------------------------------------------------------------

TILT_ERROR = 1e-6
TILT_MASS = 0.999  # of the limit, in the ball


def tilted(d: int, error: float = TILT_ERROR) -> TiltedScore:
    """A tilt of N(0, I) whose limit has 0.999 of its mass in a ball, with at most this L² error.

    The ball has radii 0.5√d and √d; it moves outwards until the error is small enough.
    """
    inner, outer = 0.5 * math.sqrt(d), math.sqrt(d)
    distance = 2.0 * outer
    while True:
        log_ball = ball_log_probability(d, distance, inner).low
        height = math.log(TILT_MASS / (1 - TILT_MASS)) - log_ball
        centre = torch.zeros(d, dtype=torch.float64)
        centre[0] = distance
        score = TiltedScore(GaussianScore(torch.zeros(d)), centre, inner, outer, height)
        if score.lp_error(2).high <= math.log(error):
            return score
        distance += 0.25


def limit_tv(dimensions: Sequence[int] = (1, 3, 10)) -> float:
    """Smallest certified lower bound of TV(target, limit) over dimensions, errors ≤ 10⁻⁶."""
    return min(tilted(d).limit_tv() for d in dimensions)


def tilted_tv_by_quadrature() -> float:
    """TV(q, π) in one dimension by quadrature, which is q(B) − π(B) for the outer ball B."""
    from scipy.integrate import quad
    from scipy.stats import norm

    score = tilted(1)
    centre, slope = float(score.centre[0]), score.height / (score.outer - score.inner)

    def weight(x: float) -> float:
        lift = min(score.height, slope * (score.outer - abs(x - centre)))
        return math.exp(lift - x * x / 2) / math.sqrt(2 * math.pi)

    ends = centre - score.outer, centre + score.outer
    inside = quad(weight, *ends, points=[centre - score.inner, centre + score.inner])[0]
    ball = float(norm.sf(ends[0]) - norm.sf(ends[1]))
    return inside / (inside + 1 - ball) - ball


def untilted_tv(dimensions: Sequence[int] = (1, 3, 10)) -> float:
    """The same balls with height 0."""
    scores = (tilted(d) for d in dimensions)
    flat = (TiltedScore(s.target, s.centre, s.inner, s.outer, 0.0) for s in scores)
    return max(max(score.limit_tv(), 0.0) for score in flat)


def escape_factor(d: int, alpha: float, radius: float, horizon: float) -> tuple[float, float]:
    """The bound on leaving a ball from N(0, I), and the probability itself."""
    bound = escape_bound(d, alpha, radius, math.log(horizon), start_variance=1.0)
    truth = exit_probability(d, alpha, radius, horizon, start_variance=1.0)
    return math.exp(bound.log_probability), truth
