"""What the theory page certifies: closed forms by hand, and attacks that can find a fault."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import ncx2, norm

from proofread.langevin import identities
from proofread.langevin.identities import STANDARD, Trap

# --- exponents ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("radius", "distance", "exponent"),
    [(5, 7, 2.1718), (4, 7, 4.7843), (0.3, 1, 1.2058), (0.5, 1, 0.7052), (0.7, 1, 0.3953)],
)
def test_ball_exponents_of_the_page(radius: float, distance: float, exponent: float) -> None:
    assert identities.ball_exponent(radius, distance) == pytest.approx(exponent, abs=1e-4)


def test_ball_exponent_limits() -> None:
    for radius in (0.1, 0.5, 0.9):  # a centred normal: Chernoff's bound of a χ²
        by_hand = (radius**2 - 1 - math.log(radius**2)) / 2
        assert identities.ball_exponent(radius, 0.0) == pytest.approx(by_hand)
    assert identities.ball_exponent(math.sqrt(5), 2.0) == pytest.approx(0, abs=1e-12)
    assert identities.ball_exponent(3.0, 2.0) == 0  # beyond the typical radius nothing is rare


def test_ball_exponent_is_the_rate_of_the_probability() -> None:
    rates = [-ncx2.logcdf(9 * d, d, 16 * d) / d for d in (50, 100)]
    exponent = identities.ball_exponent(3.0, 4.0)
    assert exponent < rates[1] < rates[0] < exponent + 0.1


def test_attacks_find_a_wrong_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identities.attack_ball_bound(60) <= 0
    right = identities.ball_exponent
    monkeypatch.setattr(identities, "ball_exponent", lambda r, d: 1.05 * right(r, d) + 0.01)
    assert identities.attack_ball_bound(60) > 0


def test_drift_bounds_are_tight_and_hold() -> None:
    assert 0.99 < identities.attack_drift() <= 1 + 1e-9
    assert -0.05 < identities.attack_step() <= 1e-9
    assert 0.5 < identities.attack_stationary() <= 1
    assert 0.3 < identities.attack_diffusion(300) <= 1


# --- theorem 1 ------------------------------------------------------------------------------------


def test_rates_and_their_controls() -> None:
    dimensions = (8, 64, 1024)
    rate = identities.slower_rate(STANDARD, dimensions)
    assert 0.9 < rate < identities.ball_exponent(5, 7) / 2
    assert identities.slower_rate(identities.ON_THE_SHELL, dimensions) < 0
    assert identities.slower_rate(identities.WEAK, dimensions) <= 0
    assert identities.horizon_rate(identities.WEAK, dimensions) == identities.NO_HORIZON
    assert identities.horizon_rate(STANDARD, dimensions) > 1


def test_power_rates() -> None:
    two, eight = (identities.power_rate([p], [1024]) for p in (2, 8))
    exponent = identities.ball_exponent(5, 7)
    assert two == pytest.approx(exponent / 2, abs=0.01)
    assert eight == pytest.approx(exponent / 8, abs=0.02)
    assert identities.power_rate([64], [64]) < 0


def test_constants_of_theorem_1(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identities.theorem_constants_hold()
    monkeypatch.setattr(identities, "STANDARD", Trap(alpha=0.2))  # it holds for a shorter time
    assert not identities.theorem_constants_hold()


def test_starts_decide() -> None:
    assert identities.fresh_start_tv([16, 64]) < 1e-3
    assert identities.gaussian_start_tv([16, 64]) > 0.999
    assert identities.gaussian_start_tv([16, 64], until="exp") > 0.999


def test_diffusion_survives_the_same_error() -> None:
    assert identities.diffusion_tv([16, 64]) < 1e-3
    assert identities.log_diffusion_tv(64) > STANDARD.log_error(64).high  # no better than the error
    d = 64
    time = identities.diffusion_levels(d) * identities.LEVEL_STEP
    start = 2 * norm.cdf(math.exp(-time) * STANDARD.mean_norm(d) / 2) - 1
    assert math.log(max(start, 1e-300)) < STANDARD.log_error(d).high + 2


# --- leaving a ball -------------------------------------------------------------------------------


def brownian_survival(d: int, time: float) -> float:
    """From the centre of the unit ball, dX = √2 dB: classical series."""
    if d == 1:
        odd = range(1, 60, 2)
        terms = [(-1) ** (n // 2) / n * math.exp(-((n * math.pi / 2) ** 2) * time) for n in odd]
        return 4 / math.pi * sum(terms)
    return 2 * sum((-1) ** (n + 1) * math.exp(-((n * math.pi) ** 2) * time) for n in range(1, 60))


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("time", [0.05, 0.2, 1.0])
def test_exit_probability_without_drift(d: int, time: float) -> None:
    found = identities.exit_probability(d, 1e-9, 2.0, 4 * time)  # radius 2: time scales by 4
    assert found == pytest.approx(1 - brownian_survival(d, time), abs=2e-5)


def test_exit_probability_from_a_normal_start_counts_what_is_outside() -> None:
    outside = 2 * norm.sf(3.0)
    found = identities.exit_probability(1, 1.0, 3.0, 1e-9, start_variance=1.0)
    assert found == pytest.approx(outside, rel=1e-3)
    coarse = identities.exit_probability(1, 1.0, 4.0, 50.0, start_variance=1.0, cells=500)
    fine = identities.exit_probability(1, 1.0, 4.0, 50.0, start_variance=1.0, cells=2000)
    assert coarse == pytest.approx(fine, rel=1e-3)


def test_bound_is_above_the_probability() -> None:
    for d, alpha, radius in ((1, 1.0, 4.0), (2, 1.2, 4.5), (4, 1.0, 6.0)):
        bound, truth = identities.escape_factor(d, alpha, radius, 20.0)
        assert truth < bound < 200 * truth


# --- theorem 7 and the tilt -----------------------------------------------------------------------


def test_memorization_rate_is_that_of_the_sum() -> None:
    d, n = 64, 3
    points = identities.memorized_points(d, n)
    logs = [
        2 * Trap(100.0, float(x.norm()) / math.sqrt(d), 0.2, 0.3).log_error(d).high for x in points
    ]
    by_hand = -np.logaddexp.reduce(logs) / 2 / d
    assert identities.memorization_rate([d], n=n) == pytest.approx(by_hand, rel=1e-6)
    assert identities.memorization_rate([64], n=1, inner=1.4, outer=1.5) < 0


def test_tilt_in_one_dimension_by_quadrature() -> None:
    score = identities.tilted(1)
    centre = float(score.centre[0])
    assert score.lp_error(2).high <= math.log(identities.TILT_ERROR)

    def weight(x: float) -> float:
        psi = min(1.0, max(0.0, (1.0 - abs(x - centre)) / 0.5))
        return math.exp(score.height * psi - x * x / 2) / math.sqrt(2 * math.pi)

    inside = quad(weight, centre - 1, centre + 1, points=[centre - 0.5, centre + 0.5])[0]
    ball = norm.cdf(centre + 1) - norm.cdf(centre - 1)
    tv = inside / (inside + 1 - ball) - ball  # q(B) − π(B), which is the TV distance here
    assert identities.TILT_MASS - 1e-3 < score.limit_tv() <= tv
    assert identities.tilted_tv_by_quadrature() == pytest.approx(tv, abs=1e-9)


def test_limits_and_no_tilt() -> None:
    assert identities.limit_tv((1, 3)) > 0.99
    assert identities.untilted_tv((1, 3)) == 0
    assert torch.equal(identities.memorized_points(3, 4), identities.memorized_points(3, 4))
