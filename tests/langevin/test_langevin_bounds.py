"""Bounds against exact escape probabilities, exact Gaussian laws and their formulas in mpmath."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.special import roots_hermitenorm, roots_legendre
from scipy.stats import binom

from proofread.langevin.bounds import (
    EscapeBound,
    certified_log_horizon,
    diffusion_tv_bound,
    escape_bound,
    first_dimension,
    langevin_tv_bound,
    stationary_tv_bound,
    trap_radius,
    tv_lower_bound,
)
from proofread.stats import clopper_pearson

TRIVIAL = EscapeBound(0.0, 0.0, 0.0, -math.inf)


def normal_tv(shift: float, deviation: float = 1.0) -> float:
    """TV between two normal laws of one deviation whose means are that far apart."""
    return math.erf(abs(shift) / deviation / math.sqrt(8))


# --- the formulas, once more in 60 digits ---------------------------------------------------------


def start_moment(d: int, norm: float, variance: float, theta: float) -> mpmath.mpf:
    left = 1 - 2 * mpmath.mpf(theta) * variance
    return left ** (-mpmath.mpf(d) / 2) * mpmath.exp(theta * mpmath.mpf(norm) ** 2 / left)


def continuous_gain(d: int, alpha: float, theta: float) -> mpmath.mpf:
    theta = mpmath.mpf(theta)
    c = alpha - 2 * theta
    if theta * d >= c:
        return 2 * c * mpmath.exp(theta * d / c - 1)
    return 2 * theta * d


def step_gain(d: int, alpha: float, theta: float, h: float) -> mpmath.mpf:
    theta, h = mpmath.mpf(theta), mpmath.mpf(h)
    growth = (1 - 4 * theta * h) ** (-mpmath.mpf(d) / 2)
    shrink = (1 - alpha * h) ** 2 / (1 - 4 * theta * h)
    if growth * shrink >= 1:
        return (1 / shrink - 1) * (growth * shrink) ** (1 / (1 - shrink))
    return growth - 1


def trap(d: int, alpha: float, radius: float, log_horizon: float, **more: float | None) -> dict:
    """Arguments of ``escape_bound``."""
    where = {"dimension": d, "alpha": alpha, "radius": radius, "log_horizon": log_horizon}
    return {**where, **more}


CASES = {
    "interior": trap(3, 1.0, 6.0, 2.0, start_variance=1.0),
    "flat": trap(1, 1.0, 2.5, -4.0, start_norm=0.5),
    "million": trap(10**6, 10.0, 4000.0, 2e6, start_variance=1.0),
    "long": trap(10**6, 10.0, 6000.0, 1e7, start_norm=100.0),
    "off-centre": trap(5, 2.0, 7.0, 1.0, start_norm=1.0, start_variance=0.3),
    "steps": trap(3, 1.0, 6.0, 2.0, start_variance=1.0, step=0.05),
    "steps-million": trap(10**6, 10.0, 4000.0, 1e6, start_variance=1.0, step=0.02),
    "overshooting": trap(2, 1.0, 12.0, 1.0, start_norm=0.0, step=1.4),
    "one step to the centre": trap(2, 1.0, 12.0, 1.0, start_norm=0.0, step=1.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_escape_bound_is_the_formula_at_its_theta_rounded_up(case: dict) -> None:
    bound = escape_bound(**case)
    assert bound.log_probability < 0
    d, alpha, step = case["dimension"], case["alpha"], case.get("step")
    with mpmath.workdps(60):
        time = mpmath.exp(case["log_horizon"])
        count = time if step is None else mpmath.ceil(time / step)
        theta = mpmath.mpf(bound.theta)
        gain = (
            continuous_gain(d, alpha, theta)
            if step is None
            else step_gain(d, alpha, bound.theta, step)
        )
        wall = theta * mpmath.mpf(case["radius"]) ** 2
        start = start_moment(
            d, case.get("start_norm", 0.0), case.get("start_variance", 0.0), bound.theta
        )
        exact = [
            mpmath.log(start + gain * count) - wall,
            mpmath.log(start) - wall,
            mpmath.log(gain * count) - wall,
        ]
    for ours, truth in zip((bound.log_probability, *bound[2:]), exact, strict=True):
        assert ours >= truth
        assert ours == pytest.approx(float(truth), rel=1e-14)


def log_bounds_on_a_grid(case: dict, share: np.ndarray) -> np.ndarray:
    """The bound in floats over ``θ = share·θ_max``, on the log scale."""
    d, alpha, radius, step = case["dimension"], case["alpha"], case["radius"], case["step"]
    limit = alpha / 2 * (1 if step is None else 1 - alpha * step / 2)
    theta = share * min(limit, 1 / (2 * case["start_variance"]))
    c = alpha - 2 * theta
    if step is None:
        log_gain = np.where(
            theta * d >= c, np.log(2 * c) + theta * d / c - 1, np.log(2 * theta * d)
        )
        log_count = case["log_horizon"]
    else:
        shrink = (1 - alpha * step) ** 2 / (1 - 4 * theta * step)
        log_growth = -d / 2 * np.log1p(-4 * theta * step)
        top = (log_growth + np.log(shrink)) / (1 - shrink)
        log_gain = np.where(
            top >= 0, np.log(1 / shrink - 1) + top, log_growth + np.log1p(-np.exp(-log_growth))
        )
        log_count = math.log(math.ceil(math.exp(case["log_horizon"]) / step))
    log_start = -d / 2 * np.log1p(-2 * theta * case["start_variance"])
    return np.logaddexp(log_start, log_gain + log_count) - theta * radius**2


def test_no_theta_of_a_fine_grid_does_better() -> None:
    rng = np.random.default_rng(0)
    share = np.linspace(0, 1, 20_002)[1:-1]
    below = 0
    for i in range(60):
        d, alpha = int(rng.integers(1, 500)), math.exp(rng.uniform(-1, 2.5))
        case = {
            "dimension": d,
            "alpha": alpha,
            "radius": math.sqrt(d * max(1, 1 / alpha)) * rng.uniform(1, 6) + 1,
            "log_horizon": rng.uniform(-3, 8),
            "start_variance": rng.uniform(0.1, 1.5),
            "step": None if i % 2 else rng.uniform(0.01, 1.9) / alpha,
        }
        best = min(0.0, log_bounds_on_a_grid(case, share).min())
        ours = escape_bound(**case).log_probability
        assert ours <= best + 1e-9
        assert ours >= best - 0.02 * max(1, abs(best))  # the grid is as fine as that
        below += best < 0
    assert below > 20  # of the random cases many are not trivial


# --- the two gains from their definitions ---------------------------------------------------------


def gain_behind(bound: EscapeBound, radius: float) -> float:
    """b, from a bound with ``T = 1`` or with one step."""
    return math.exp(bound.drift_term + bound.theta * radius**2)


@pytest.mark.parametrize("seed", range(8))
def test_generator_never_exceeds_its_bound_and_reaches_it(seed: int) -> None:
    """LV by finite differences of V along the radius: ``V'' + (d−1)V'/r − αrV'``."""
    rng = np.random.default_rng(seed)
    d, alpha = int(rng.integers(1, 6)), rng.uniform(0.5, 3)
    radius = rng.uniform(3, 4) * math.sqrt(d * max(1, 1 / alpha))
    bound = escape_bound(d, alpha, radius, 0.0, start_norm=0.0)
    assert bound.log_probability < 0
    r, e = np.linspace(0, radius, 40_001)[1:-1], 1e-4
    v = [np.exp(bound.theta * (r + k * e) ** 2) for k in (-1, 0, 1)]
    slope, curvature = (v[2] - v[0]) / (2 * e), (v[2] - 2 * v[1] + v[0]) / e**2
    generator = curvature + (d - 1) * slope / r - alpha * r * slope
    assert generator.max() == pytest.approx(gain_behind(bound, radius), rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_step_never_gains_more_than_its_bound_and_reaches_it(seed: int) -> None:
    """``E V(x') − V(x)`` in one dimension by Gauss–Hermite quadrature."""
    rng = np.random.default_rng(seed)
    alpha = rng.uniform(0.5, 3)
    step = rng.uniform(0.05, 1.0) / alpha  # beyond 4θh = 1/2 the quadrature needs more nodes
    radius = rng.uniform(4, 5) / math.sqrt(alpha)
    log_step = math.nextafter(math.log(step), -math.inf)  # else its exponential may need two steps
    bound = escape_bound(1, alpha, radius, log_step, start_norm=0.0, step=step)
    assert bound.log_probability < 0
    nodes, weights = roots_hermitenorm(150)
    weights = weights / weights.sum()
    r = np.linspace(0, radius, 4001)
    moved = (1 - alpha * step) * r[:, None] + math.sqrt(2 * step) * nodes
    gain = np.exp(bound.theta * moved**2) @ weights - np.exp(bound.theta * r**2)
    assert gain.max() == pytest.approx(gain_behind(bound, radius), rel=1e-5)


# --- exact escape probabilities in one dimension --------------------------------------------------


def ou_escape(alpha: float, radius: float, horizon: float, variance: float, n: int = 600) -> float:
    """``f'' − αxf'`` killed at ±R on n cells: the exponential from its eigenvectors."""
    h = 2 * radius / n
    x = -radius + h * np.arange(1, n)
    mass = np.exp(-alpha * x**2 / 2)
    flux = np.exp(-alpha * (x[0] - h / 2 + h * np.arange(n)) ** 2 / 2)
    diagonal = -(flux[:-1] + flux[1:]) / mass / h**2
    rates, vectors = eigh_tridiagonal(diagonal, flux[1:-1] / np.sqrt(mass[:-1] * mass[1:]) / h**2)
    if variance:
        start = np.exp(-(x**2) / 2 / variance) / math.sqrt(2 * math.pi * variance) * h
    else:
        start = (np.arange(1, n) == n // 2).astype(float)
    root = np.sqrt(mass)
    return float(1 - (vectors.T @ (start / root)) * (vectors.T @ root) @ np.exp(rates * horizon))


def ula_escape(
    alpha: float, radius: float, step: float, n_steps: int, variance: float, nodes: int = 300
) -> float:
    """The killed chain's density at Gauss–Legendre nodes, one product a step."""
    x, w = roots_legendre(nodes)
    x, w = x * radius, w * radius
    gap = x[:, None] - (1 - alpha * step) * x
    kernel = np.exp(-(gap**2) / (4 * step)) / math.sqrt(4 * math.pi * step) * w
    density = np.exp(-(x**2) / 2 / variance) / math.sqrt(2 * math.pi * variance)
    for _ in range(n_steps):
        density = kernel @ density
    return float(1 - w @ density)


def test_escape_from_the_trap_that_can_be_left() -> None:
    """α = 1, R = 4, T = 50 from N(0, 1): 0.0486 leave, at most 0.0938 by the bound."""
    truth = ou_escape(1.0, 4.0, 50.0, 1.0)
    assert truth == pytest.approx(0.04859, abs=5e-5)
    bound = escape_bound(1, 1.0, 4.0, math.log(50), start_variance=1.0)
    assert math.exp(bound.log_probability) == pytest.approx(0.09382, abs=5e-5)


@pytest.mark.parametrize("variance", [0.0, 1.0])
@pytest.mark.parametrize(
    ("alpha", "radius", "horizon"),
    [(1.0, 3.0, 5.0), (1.0, 4.0, 50.0), (1.0, 5.0, 1e3), (1.0, 6.0, 1e5), (0.5, 5.0, 20.0)],
)
def test_escape_bound_is_within_a_factor_of_the_truth(
    alpha: float, radius: float, horizon: float, variance: float
) -> None:
    truth = ou_escape(alpha, radius, horizon, variance)
    bound = escape_bound(1, alpha, radius, math.log(horizon), start_variance=variance)
    assert 1 < math.exp(bound.log_probability) / truth < 6


def test_escape_bound_survives_random_traps() -> None:
    rng = np.random.default_rng(1)
    informative = 0
    for _ in range(150):
        alpha, variance = math.exp(rng.uniform(-1, 1)), rng.choice([0.0, rng.uniform(0.05, 2)])
        radius = rng.uniform(1, 5) / math.sqrt(alpha)
        log_horizon = rng.uniform(-3, 7)
        truth = ou_escape(alpha, radius, math.exp(log_horizon), variance, n=400)
        bound = escape_bound(1, alpha, radius, log_horizon, start_variance=variance)
        assert math.exp(bound.log_probability) >= truth * 0.995  # the error of 400 cells
        informative += bound.log_probability < -0.1
    assert informative > 40


@pytest.mark.parametrize("step", [0.02, 0.1, 0.3, 1.0, 1.5])
def test_escape_bound_with_steps_against_the_exact_chain(step: float) -> None:
    radius, horizon = (4.0, 50.0) if step < 1 else (8.0, 30.0)
    n_steps = math.ceil(horizon / step)
    truth = ula_escape(1.0, radius, step, n_steps, 1.0)
    log_horizon = math.nextafter(math.log(n_steps * step), 0.0)
    bound = escape_bound(1, 1.0, radius, log_horizon, start_variance=1.0, step=step)
    ratio = math.exp(bound.log_probability) / truth
    assert 1 < ratio < (8 if step < 1 else 60)


def test_escape_bound_with_steps_survives_random_traps() -> None:
    rng = np.random.default_rng(2)
    informative = 0
    for _ in range(60):
        alpha, variance = math.exp(rng.uniform(-1, 1)), rng.uniform(0.05, 1)
        step = rng.uniform(0.03, 1.9) / alpha
        radius = rng.uniform(2, 9) / math.sqrt(alpha)
        n_steps = int(rng.integers(0, 200))
        truth = ula_escape(alpha, radius, step, n_steps, variance, nodes=120)
        log_horizon = math.log(n_steps * step) if n_steps else -math.inf
        bound = escape_bound(1, alpha, radius, log_horizon, start_variance=variance, step=step)
        assert math.exp(bound.log_probability) >= truth - 1e-9
        informative += bound.log_probability < -0.1
    assert informative > 15


@pytest.mark.parametrize("step", [None, 0.1, 1.2])
@pytest.mark.parametrize("unit", [2.0**-100, 2.0**60, 2.0**110])
def test_units_of_length_do_not_matter(step: float | None, unit: float) -> None:
    """x ↦ ux turns α, R, v, T and h into α/u², uR, u²v, u²T and u²h."""
    square = unit**2
    reference = escape_bound(2, 1.0, 9.0, 1.0, start_variance=1.0, step=step)
    bound = escape_bound(
        2,
        1 / square,
        9 * unit,
        1 + math.log(square),
        start_variance=square,
        step=None if step is None else step * square,
    )
    assert reference.log_probability < -1
    assert bound.theta * square == pytest.approx(reference.theta, rel=1e-3)
    assert bound[:1] + bound[2:] == pytest.approx(reference[:1] + reference[2:], abs=1e-2)
    assert bound.log_probability == pytest.approx(reference.log_probability, abs=1e-9)


def test_small_steps_approach_continuous_time() -> None:
    kept = {"dimension": 2, "alpha": 1.0, "radius": 5.0, "log_horizon": 3.0, "start_variance": 1.0}
    limit = escape_bound(**kept).log_probability
    gaps = [escape_bound(**kept, step=h).log_probability - limit for h in (1e-2, 1e-3, 1e-4)]
    assert all(gap > 0 for gap in gaps)
    for above, below in itertools.pairwise(gaps):
        assert above / below == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    ("dimension", "alpha", "radius"), [(2, 1.0, 4.5), (3, 0.9, 5.0), (4, 1.1, 5.0)]
)
def test_escape_bound_against_simulated_chains(dimension: int, alpha: float, radius: float) -> None:
    step, n_steps, chains = 0.05, 400, 20_000
    rng = np.random.default_rng(dimension)
    x = rng.standard_normal((chains, dimension))
    left = np.zeros(chains, dtype=bool)
    for k in range(n_steps + 1):
        left |= np.linalg.norm(x, axis=1) > radius
        if k < n_steps:
            noise = rng.standard_normal(x.shape)
            x = (1 - alpha * step) * x + math.sqrt(2 * step) * noise
    share = clopper_pearson(int(left.sum()), chains, 0.999)
    bound = escape_bound(
        dimension, alpha, radius, math.log(step * n_steps), start_variance=1.0, step=step
    )
    assert share.low > 0.001
    assert share.high < math.exp(bound.log_probability) < 12 * share.low


# --- the trap of theorem 1 ------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [100, 10_000, 10**6])
@pytest.mark.parametrize("step", [None, 0.02])
def test_escape_exponent_of_theorem_1(dimension: int, step: float | None) -> None:
    """From N(0, I) the start decides: θ = 15/32 and (log 16)/2 − 15/2 per dimension."""
    radius = trap_radius(dimension, 4.0)
    for log_horizon in (0.0, float(dimension)):
        bound = escape_bound(dimension, 10.0, radius, log_horizon, start_variance=1.0, step=step)
        assert bound.log_probability / dimension == pytest.approx(math.log(4) - 7.5, abs=1e-9)
        assert bound.theta == pytest.approx(15 / 32, abs=1e-3)


def test_known_bound_at_alpha_one() -> None:
    """α = 1, θ = 3/8: (1 − 3/4)^(−d/2) and c = 1/4 give e^(−5.3d) + 0.184·T·e^(−4.5d)."""
    d, log_horizon = 20, 30.0
    theirs = np.logaddexp(d * (math.log(2) - 6), math.log(0.5 / math.e) + log_horizon - 4.5 * d)
    bound = escape_bound(d, 1.0, trap_radius(d, 4.0), log_horizon, start_variance=1.0)
    assert theirs - 3 < bound.log_probability <= theirs


@pytest.mark.parametrize("step", [None, 0.02])
@pytest.mark.parametrize("start", [{"start_variance": 1.0}, {"start_norm": 10.0}])
def test_certified_horizon_is_where_the_bound_reaches_the_level(
    step: float | None, start: dict
) -> None:
    where = dict(dimension=64, alpha=10.0, inner=4.0, mean_norm=56.0, step=step, **start)
    horizon = certified_log_horizon(**where, tv=0.9)
    level = math.log(1 - 0.9)
    assert langevin_tv_bound(**where, log_horizon=horizon) <= level
    assert langevin_tv_bound(**where, log_horizon=horizon + 1e-3) > level
    assert certified_log_horizon(**where, tv=0.99) < horizon


@pytest.mark.parametrize("tv", [0.2, 0.5, 0.8, 0.9])
def test_certified_horizon_counts_whole_steps(tv: float) -> None:
    where = {"dimension": 1, "alpha": 1.0, "inner": 4.5, "mean_norm": 12.0, "start_norm": 0.0}
    horizon = certified_log_horizon(**where, step=0.3, tv=tv)
    steps = math.exp(horizon) / 0.3
    assert steps == pytest.approx(round(steps), rel=1e-9)
    assert 3 < steps < 3000
    assert langevin_tv_bound(**where, log_horizon=horizon, step=0.3) <= math.log1p(-tv)
    longer = math.log((round(steps) + 0.5) * 0.3)
    assert langevin_tv_bound(**where, log_horizon=longer, step=0.3) > math.log1p(-tv)


def test_certified_horizon_grows_like_the_dimension() -> None:
    """The rate tends to sup over θ < 1/2 of 16θ − θ/(10 − 2θ), where the start is no obstacle."""
    theta = np.linspace(0, 0.5, 10**6)[1:-1]
    holds = 16 * theta + np.log1p(-2 * theta) / 2 > 0
    rate = (16 * theta - theta / (10 - 2 * theta))[holds].max()
    d = 10**6
    ours = certified_log_horizon(d, 10.0, 4.0, 7 * math.sqrt(d), start_variance=1.0) / d
    assert ours == pytest.approx(rate, abs=1e-3)


@pytest.mark.parametrize("dimension", [8, 100, 10**6])
def test_weak_trap_certifies_nothing(dimension: int) -> None:
    mean = 7 * math.sqrt(dimension)
    at = (dimension, 0.05, 4.0, mean)
    assert langevin_tv_bound(*at, float(dimension), start_variance=1.0) == 0
    assert certified_log_horizon(*at, start_variance=1.0) <= 0


def test_tv_bound_holds_for_a_linear_score() -> None:
    """The score −x everywhere keeps N(0, 1), whose distance to N(m, 1) is known."""
    for mean in (0.5, 3.0, 7.0, 12.0):
        for log_horizon in (-math.inf, 0.0, 3.0, 8.0):
            bound = langevin_tv_bound(1, 1.0, 4.0, mean, log_horizon, start_variance=1.0)
            assert math.exp(bound) >= 1 - normal_tv(mean)
    assert bound == 0  # T = e⁸ is too long for this trap
    assert langevin_tv_bound(1, 1.0, 4.0, 12.0, 0.0, start_variance=1.0) < -5


def test_target_inside_the_trap_certifies_nothing() -> None:
    assert langevin_tv_bound(16, 10.0, 4.0, 4.0, 0.0, start_variance=1.0) > -1e-6
    assert certified_log_horizon(16, 10.0, 4.0, 4.0, start_variance=1.0) == -math.inf


# --- edges ----------------------------------------------------------------------------------------

TRIVIAL_CASES = {
    "start outside": {"radius": 1.0, "log_horizon": 0.0, "start_norm": 2.0},
    "start on the sphere": {"radius": 2.0, "log_horizon": -math.inf, "start_norm": 2.0},
    "wide start": {"radius": 2.0, "log_horizon": 0.0, "start_variance": 50.0},
    "endless": {"radius": 50.0, "log_horizon": math.inf, "start_norm": 0.0},
    "beyond any exponent": {"radius": 50.0, "log_horizon": 1e300, "start_norm": 0.0},
    "no pull": {"alpha": 1e-9, "radius": 5.0, "log_horizon": 5.0, "start_norm": 0.0},
    "pull of a denormal": {"alpha": 1e-310, "radius": 5.0, "log_horizon": 5.0, "start_norm": 0.0},
    "small ball": {"dimension": 1000, "radius": 5.0, "log_horizon": 0.0, "start_norm": 0.0},
    "endless steps": {"radius": 50.0, "log_horizon": math.inf, "start_norm": 0.0, "step": 0.1},
}


@pytest.mark.parametrize("case", TRIVIAL_CASES.values(), ids=TRIVIAL_CASES.keys())
def test_where_the_method_is_silent_the_bound_is_one(case: dict) -> None:
    assert escape_bound(**{"dimension": 4, "alpha": 1.0, **case}) == TRIVIAL


@pytest.mark.parametrize("step", [None, 0.1])
def test_no_time_leaves_the_start_alone(step: float | None) -> None:
    """Chernoff's bound of a χ²: ``(x e^(1−x))^(d/2)`` at ``x = R²/(dv)``."""
    d, radius = 4, 5.0
    bound = escape_bound(d, 100.0 if step is None else 4.0, radius, -math.inf,
                         start_variance=1.0, step=step)  # fmt: skip
    x = radius**2 / d
    assert bound.log_probability == pytest.approx(d / 2 * (math.log(x) + 1 - x), abs=1e-9)
    assert bound.drift_term == -math.inf


def test_both_starts_are_a_normal_start_off_the_centre() -> None:
    rng = np.random.default_rng(3)
    trap = (3, 1.0, 6.0, -math.inf)
    bound = escape_bound(*trap, start_norm=2.0, start_variance=0.5)
    x = rng.standard_normal((10**6, 3)) * math.sqrt(0.5) + [2.0, 0, 0]
    moment = np.exp(0.3 * bound.theta * (x**2).sum(1)).mean()  # a θ at which it has a variance
    with mpmath.workdps(30):
        assert moment == pytest.approx(
            float(start_moment(3, 2.0, 0.5, 0.3 * bound.theta)), rel=0.01
        )
    fixed = escape_bound(*trap, start_norm=2.0)
    centred = escape_bound(*trap, start_variance=0.5)
    assert max(fixed.log_probability, centred.log_probability) < bound.log_probability < 0


BAD = {
    "no start": ({"start_variance": None}, "the start is missing"),
    "step": ({"step": 2.0}, r"step must be below 2/alpha = 2"),
    "negative step": ({"step": -1.0}, "step must be positive"),
    "alpha": ({"alpha": 0.0}, "alpha must be positive"),
    "nan alpha": ({"alpha": math.nan}, "alpha must be positive"),
    "radius": ({"radius": -1.0}, "radius must be positive"),
    "infinite radius": ({"radius": math.inf}, "radius must be positive and finite"),
    "dimension": ({"dimension": 0}, "dimension must be at least 1"),
    "horizon": ({"log_horizon": math.nan}, "log_horizon must be a number"),
    "variance": ({"start_variance": -1.0}, "start_variance must be finite and at least 0"),
    "norm": ({"start_norm": math.inf}, "start_norm must be finite"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    good = {"dimension": 2, "alpha": 1.0, "radius": 5.0, "log_horizon": 0.0, "start_variance": 1.0}
    with pytest.raises(ValueError, match=message):
        escape_bound(**{**good, **change})


def test_bad_arguments_of_the_other_bounds_are_named() -> None:
    with pytest.raises(TypeError, match="dimension must be an integer"):
        escape_bound(2.5, 1.0, 5.0, 0.0, start_norm=0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mean_norm must be finite and at least 0"):
        langevin_tv_bound(2, 1.0, 4.0, -1.0, 0.0, start_norm=0.0)
    with pytest.raises(ValueError, match="tv must lie strictly between"):
        certified_log_horizon(2, 1.0, 4.0, 1.0, start_norm=0.0, tv=1.0)
    with pytest.raises(ValueError, match="inner must be positive"):
        certified_log_horizon(2, 1.0, 0.0, 1.0, start_norm=0.0)
    with pytest.raises(ValueError, match="n_levels must be at least 1"):
        diffusion_tv_bound(0.0, 1.0, 0, 0.1)
    with pytest.raises(ValueError, match="time_step must be positive"):
        diffusion_tv_bound(0.0, 1.0, 3, 0.0)
    with pytest.raises(ValueError, match="log_error must be a number"):
        stationary_tv_bound(math.nan, 0.0)


def test_trap_radius_is_the_last_double_inside() -> None:
    rng = np.random.default_rng(4)
    for d, inner in zip(
        rng.integers(1, 10**6, 300).tolist(), rng.uniform(0.01, 9, 300), strict=True
    ):
        radius = trap_radius(d, float(inner))
        above = math.nextafter(radius, math.inf)
        assert Fraction(radius) ** 2 <= Fraction(float(inner)) ** 2 * d < Fraction(above) ** 2
    assert trap_radius(9, 4.0) == 12.0


def test_first_dimension_needs_all_larger_ones() -> None:
    assert first_dimension(lambda d: d >= 5, (9, 2, 5, 7, 3)) == 5
    assert first_dimension(lambda d: d != 7, (9, 2, 5, 7, 3)) == 9
    assert first_dimension(lambda d: d < 9, (9, 2)) is None
    assert first_dimension(bool, ()) is None


# --- starts at the target, and diffusion ----------------------------------------------------------


def test_stationary_bound_is_the_path_divergence_of_a_constant_error() -> None:
    """n steps of Gaussian transitions whose means differ by hδ: KL = n(hδ)²/(4h) = Tδ²/4."""
    delta, horizon, n = 0.37, 1.3, 13
    h = horizon / n
    divergence = n * (h * delta) ** 2 / (2 * 2 * h)
    bound = stationary_tv_bound(math.log(delta), math.log(horizon))
    assert bound == pytest.approx(math.log(math.sqrt(divergence / 2)), abs=1e-14)


def test_stationary_bound_holds_for_a_constant_error() -> None:
    """At time T the law is N(δ(1 − e^(−T)), 1); the paths' own distance is normal_tv(δ√(T/2))."""
    rng = np.random.default_rng(5)
    closest = 0.0
    for delta, horizon in 10 ** rng.uniform((-4, -3), (0.5, 3), (500, 2)):
        bound = math.exp(stationary_tv_bound(math.log(delta), math.log(horizon)))
        paths, law = (
            normal_tv(delta * math.sqrt(horizon / 2)),
            normal_tv(-delta * math.expm1(-horizon)),
        )
        assert law <= paths * (1 + 1e-12)
        assert paths <= bound
        closest = max(closest, law / bound)
    assert closest > 0.5  # not a vacuous bound


def test_stationary_bound_at_its_ends() -> None:
    assert stationary_tv_bound(-math.inf, math.inf) == -math.inf
    assert stationary_tv_bound(3.0, -math.inf) == -math.inf
    assert stationary_tv_bound(3.0, 0.0) == stationary_tv_bound(-3.0, math.inf) == 0
    assert stationary_tv_bound(-2e6, 40.0) == pytest.approx(-2e6 + 20 - math.log(8) / 2)


def ancestral(
    mean: float, n: int, dt: float, start: tuple[float, float], error: Callable[[int], float]
) -> tuple[float, float]:
    """Mean and variance after n levels of the sampler in one dimension, with error(k) added."""
    m, v = start
    for k in range(n, 0, -1):
        level_mean, gap = math.exp(-k * dt) * mean, math.exp(dt) - math.exp(-dt)
        slope = math.exp(dt) - gap  # of x ↦ e^D x + gap·(level_mean − x)
        m, v = slope * m + gap * (level_mean + error(k)), slope**2 * v + 1 - math.exp(-2 * dt)
    return m, v


def test_exact_scores_leave_only_the_start() -> None:
    """From the level's own law the sampler returns the target; from N(0, 1) it forgets the gap."""
    for mean, n, dt in ((3.0, 5, 0.1), (0.7, 1, 0.4), (100.0, 40, 0.25), (7.0, 3, 2.0)):
        level = math.exp(-n * dt) * mean
        assert ancestral(mean, n, dt, (level, 1.0), lambda _: 0.0) == pytest.approx((mean, 1.0))
        m, v = ancestral(mean, n, dt, (0.0, 1.0), lambda _: 0.0)
        assert (mean - m, v) == pytest.approx((math.exp(-n * dt) * level, 1.0), rel=1e-6)
        bound = math.exp(diffusion_tv_bound(-math.inf, mean, n, dt))
        assert bound == pytest.approx(normal_tv(level), rel=1e-12)  # of the starts
        assert bound > normal_tv(mean - m)


def test_diffusion_path_term_is_the_divergence_of_its_kernels() -> None:
    n, dt, delta = 7, 0.3, 0.02
    shift, variance = (math.exp(dt) - math.exp(-dt)) * delta, 1 - math.exp(-2 * dt)
    divergence = n * shift**2 / (2 * variance)
    assert diffusion_tv_bound(math.log(delta), 0.0, n, dt) == pytest.approx(
        math.log(math.sqrt(divergence / 2)), abs=1e-13
    )


def test_diffusion_bound_holds_for_constant_errors() -> None:
    rng = np.random.default_rng(6)
    closest = 0.0
    for _ in range(500):
        mean, n, dt = rng.uniform(0, 20), int(rng.integers(1, 60)), 10 ** rng.uniform(-2, 0.3)
        size = 10 ** rng.uniform(-4, 0)
        sign = rng.choice([-1.0, 1.0], n + 1) if rng.integers(2) else np.ones(n + 1)
        m, v = ancestral(mean, n, dt, (0.0, 1.0), lambda k, s=sign, e=size: s[k] * e)
        assert v == pytest.approx(1.0, abs=1e-9)
        bound = math.exp(diffusion_tv_bound(math.log(size), mean, n, dt))
        exact = normal_tv(m - mean)
        assert exact <= bound * (1 + 1e-9)
        closest = max(closest, exact / bound if bound < 0.5 and size > 0.01 else 0)
    assert closest > 0.5


def test_diffusion_bound_at_its_ends() -> None:
    assert diffusion_tv_bound(-math.inf, 0.0, 1, 0.1) == -math.inf
    assert diffusion_tv_bound(math.inf, 0.0, 1, 0.1) == 0
    assert diffusion_tv_bound(-1.0, 1e9, 1, 0.1) == 0
    long = diffusion_tv_bound(-1e6, 7000.0, 4 * 10**6, 0.5)  # e^(−2·10⁶)·7000 is a number here
    assert long == pytest.approx(-1e6 + math.log(4e6 * math.expm1(1.0) / 4) / 2)


# --- the certificate from samples -----------------------------------------------------------------


def test_tv_certificate_of_chains_that_all_stay() -> None:
    hits = torch.ones(1000, dtype=torch.bool)
    certificate = tv_lower_bound(hits, None, 0.001)
    assert certificate.low == pytest.approx(0.05 ** (1 / 1000) - 0.001, abs=1e-12)
    assert (certificate.value, certificate.high, certificate.n) == (0.999, 1.0, 1000)
    assert certificate.confidence == 0.95


def test_tv_certificate_is_nothing_below_the_targets_mass() -> None:
    certificate = tv_lower_bound(np.array([True] + [False] * 99), None, 0.2)
    assert (certificate.value, certificate.low) == (0.0, 0.0)
    none = tv_lower_bound([False], None, 0.0)
    assert (none.value, none.low) == (0.0, 0.0)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_tv_certificate_covers(confidence: float) -> None:
    """By enumeration: P(bound > p − π(A)) is at most 1 − confidence, for every p."""
    n, mass, worst = 20, 0.1, 0.0
    lows = [tv_lower_bound(np.arange(n) < k, None, mass, confidence).low for k in range(n + 1)]
    for p in np.linspace(mass, 1, 181):
        wrong = sum(binom.pmf(k, n, p) for k in range(n + 1) if lows[k] > p - mass + 1e-12)
        worst = max(worst, wrong)
    assert (1 - confidence) / 2 < worst <= 1 - confidence + 1e-12  # one-sided: more than half


def test_tv_certificate_takes_every_form_of_event() -> None:
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    inside = x.norm(dim=1) < 1.5
    forms = [
        tv_lower_bound(x, lambda y: y.norm(dim=1) < 1.5, 0.3),
        tv_lower_bound(x, inside, 0.3),
        tv_lower_bound(inside, None, 0.3),
        tv_lower_bound(x.numpy(), lambda y: np.linalg.norm(y, axis=1) < 1.5, 0.3),
        tv_lower_bound(x.T.contiguous().T, inside.numpy(), 0.3),
    ]
    assert len(set(forms)) == 1
    assert forms[0].value == pytest.approx(float(inside.double().mean()) - 0.3)


def test_tv_certificate_refuses_bad_input() -> None:
    x = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="samples must be finite"):
        tv_lower_bound(x / 0, x[:, 0] < 1, 0.1)
    with pytest.raises(ValueError, match="one boolean a sample"):
        tv_lower_bound(x, lambda y: y < 1, 0.1)
    with pytest.raises(ValueError, match="one boolean a sample"):
        tv_lower_bound(x, lambda y: y[:, 0], 0.1)
    with pytest.raises(ValueError, match="one boolean a sample"):
        tv_lower_bound(x, None, 0.1)
    with pytest.raises(ValueError, match="at least one sample"):
        tv_lower_bound(x[:0], lambda y: y[:, 0] < 1, 0.1)
    for mass in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="target_probability must"):
            tv_lower_bound(x, lambda y: y[:, 0] < 1, mass)
    for confidence in (0.5, 1.0):
        with pytest.raises(ValueError, match="one-sided"):
            tv_lower_bound(x, lambda y: y[:, 0] < 1, 0.1, confidence)
