"""Intervals against closed forms, published values, exact enumeration and scipy's own."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch

from proofread.stats import (
    Estimate,
    clopper_pearson,
    fit_exponent,
    mean_interval,
    paired_difference,
)

# Student (1908): extra hours of sleep of ten patients under two drugs, his own paired example.
SLEEP_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SLEEP_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]

# Newcombe (1998), Two-sided confidence intervals for the single proportion, Table I, "exact" rows.
NEWCOMBE = [
    (81, 263, 0.2527, 0.3676),
    (15, 148, 0.0578, 0.1617),
    (0, 20, 0.0000, 0.1684),
    (1, 29, 0.0009, 0.1776),
]


def ends(estimate: Estimate) -> tuple[float, float]:
    return estimate.low, estimate.high


# Estimate


def test_prints_value_interval_confidence_and_n() -> None:
    assert str(Estimate(0.123, 0.101, 0.145, 5, 0.95)) == "0.123 [0.101, 0.145] (95 %, n = 5)"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ((0.0, 0.0, 0.3085, 10, 0.95), "0.00 [0.00, 0.31] (95 %, n = 10)"),
        ((12345.0, 12100.0, 12600.0, 3, 0.9), "12350 [12100, 12600] (90 %, n = 3)"),
        ((-1e-20, -0.1, 0.1, 3, 0.999), "0.00 [-0.10, 0.10] (99.9 %, n = 3)"),
        ((0.25, 0.25, 0.25, 2, 0.95), "0.250 [0.250, 0.250] (95 %, n = 2)"),
        ((0.0, 0.0, 0.0, 2, 0.95), "0.00 [0.00, 0.00] (95 %, n = 2)"),
        ((1e-9, 0.0, 3e-9, 3, 0.95), "1.0e-09 [0, 3.0e-09] (95 %, n = 3)"),
        ((1e12, 9e11, 1.2e12, 3, 0.95), "1.00e+12 [9.0e+11, 1.20e+12] (95 %, n = 3)"),
        ((1.0, -math.inf, 2.0, 4, 0.95), "1.00 [-inf, 2.00] (95 %, n = 4)"),
    ],
)
def test_prints_what_the_interval_resolves(fields: tuple, text: str) -> None:
    assert str(Estimate(*fields)) == text


@pytest.mark.parametrize("value", [0.125, 2.5, -0.345, 1234.5])
@pytest.mark.parametrize("half", [0.1, 0.022, 1.0, 10.0])
def test_printing_ignores_the_last_bits(value: float, half: float) -> None:
    """Ties and powers of ten are where rounding flips; noise of 1e-13 must not show."""
    texts = {
        str(Estimate(v, v - h, v + h, 5, 0.95))
        for v in (value * (1 - 1e-13), value, value * (1 + 1e-13))
        for h in (half * (1 - 1e-13), half, half * (1 + 1e-13))
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ((0.5, 0.6, 0.7, 5, 0.95), ValueError, "low <= value <= high"),
        ((0.8, 0.6, 0.7, 5, 0.95), ValueError, "low <= value <= high"),
        ((math.nan, 0.0, 1.0, 5, 0.95), ValueError, "value must be a number, not NaN"),
        ((0.5, math.nan, 1.0, 5, 0.95), ValueError, "low must be a number, not NaN"),
        ((0.5, 0.0, math.nan, 5, 0.95), ValueError, "high must be a number, not NaN"),
        ((math.inf, 0.0, math.inf, 5, 0.95), ValueError, "value must be finite"),
        ((0.5, 0.0, 1.0, 0, 0.95), ValueError, "n must be at least 1"),
        ((0.5, 0.0, 1.0, 2.5, 0.95), TypeError, "n must be an integer"),
        ((0.5, 0.0, 1.0, True, 0.95), TypeError, "n must be an integer"),
        ((0.5, 0.0, 1.0, 5, 95), ValueError, "strictly between 0 and 1"),
        (("0.5", 0.0, 1.0, 5, 0.95), TypeError, "value must be a number"),
        ((None, 0.0, 1.0, 5, 0.95), TypeError, "value must be a number"),
    ],
)
def test_refuses_what_is_no_interval(fields: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Estimate(*fields)


def test_is_frozen_hashable_and_plain() -> None:
    """Numpy and tensor scalars become Python's own, so that JSON and pickles stay plain."""
    estimate = Estimate(np.float32(0.5), torch.tensor(0.25), 1, np.int64(5), 0.95)  # type: ignore[arg-type]
    assert [type(v) for v in dataclasses.astuple(estimate)] == [float, float, float, int, float]
    assert pickle.loads(pickle.dumps(estimate)) == estimate
    assert len({estimate, Estimate(0.5, 0.25, 1.0, 5, 0.95)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        estimate.value = 1.0  # type: ignore[misc]


# mean_interval and paired_difference


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_two_samples_give_cauchy_quantiles(confidence: float) -> None:
    """t with one degree of freedom is Cauchy: its quantile is tan(pi c / 2); s / sqrt 2 = 3 / 2."""
    half = math.tan(math.pi * confidence / 2) * 1.5
    assert ends(mean_interval([1.0, 4.0], confidence)) == pytest.approx((2.5 - half, 2.5 + half))


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_three_samples_by_closed_form(confidence: float) -> None:
    """With two degrees of freedom the quantile is c sqrt(2 / (1 - c^2)); here s = 1."""
    half = confidence * math.sqrt(2 / (1 - confidence**2)) / math.sqrt(3)
    assert ends(mean_interval([1, 2, 3], confidence)) == pytest.approx((2 - half, 2 + half))


@pytest.mark.parametrize("n", [2, 3, 5, 30, 1000])
@pytest.mark.parametrize("confidence", [0.68, 0.95, 0.9999])
def test_mean_interval_is_scipys(n: int, confidence: float) -> None:
    x = np.random.default_rng(n).normal(3, 2, n)
    peer = scipy.stats.t.interval(confidence, n - 1, loc=x.mean(), scale=scipy.stats.sem(x))
    estimate = mean_interval(x, confidence)
    assert ends(estimate) == pytest.approx(peer, rel=1e-10)
    assert (estimate.value, estimate.n, estimate.confidence) == (x.mean(), n, confidence)


def test_students_sleep_data() -> None:
    """Mean 1.58 h; R prints the interval 0.7001142 to 2.4598858 for these data, and so must we."""
    estimate = paired_difference(SLEEP_2, SLEEP_1)
    assert estimate.value == pytest.approx(1.58)
    assert ends(estimate) == pytest.approx((0.7001142, 2.4598858), abs=5e-8)
    assert str(estimate) == "1.58 [0.70, 2.46] (95 %, n = 10)"


def test_pairing_is_signed_and_cancels_what_is_shared() -> None:
    shared = np.random.default_rng(0).normal(0, 100, 20)
    wiggle = np.tile([0.9, 1.1], 10)
    estimate = paired_difference(shared + wiggle, shared)
    assert estimate.value == pytest.approx(1.0)
    assert estimate.high - estimate.low < 0.2  # the spread of the shared part is about 100
    assert paired_difference(shared, shared + wiggle).value == pytest.approx(-1.0)


def test_any_array_of_numbers_will_do() -> None:
    expected = mean_interval([1.0, 2.0, 4.0])
    strided = np.array([1, 9, 2, 9, 4, 9])[::2]
    for samples in ((1, 2, 4), strided, torch.tensor([1.0, 2.0, 4.0]), np.float32([1, 2, 4])):
        assert mean_interval(samples) == expected
    assert mean_interval([True, False]).value == 0.5


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "at least 2 numbers, got 0"),
        ([1.0], ValueError, "at least 2 numbers, got 1"),
        ([1.0, math.nan], ValueError, "1 NaN and 0 infinite"),
        ([1.0, math.inf, -math.inf], ValueError, "0 NaN and 2 infinite"),
        ([1.0, None], ValueError, "1 NaN"),
        ([[1.0, 2.0], [3.0, 4.0]], ValueError, r"one-dimensional, not of shape \(2, 2\)"),
        (3.0, ValueError, "one-dimensional"),
        ([[1.0], [2.0, 3.0]], TypeError, "flat array of real numbers"),
        (["1", "2"], TypeError, "real numbers"),
        ([1j, 2.0], TypeError, "real numbers"),
        (torch.zeros(3, requires_grad=True), TypeError, r"\.detach\(\)"),
        (torch.zeros(3, dtype=torch.bfloat16), TypeError, r"\.float\(\)"),
    ],
)
def test_refuses_what_is_no_sample(samples: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"samples.*{message}"):
        mean_interval(samples)  # type: ignore[arg-type]
    with pytest.raises(error, match=f"b .*{message}"):
        paired_difference([1.0, 2.0], samples)  # type: ignore[arg-type]


@pytest.mark.parametrize("confidence", [0, 1, -0.1, 95, math.nan, math.inf])
def test_refuses_a_confidence_outside_the_unit_interval(confidence: float) -> None:
    calls = (
        lambda: mean_interval([1, 2], confidence),
        lambda: paired_difference([1, 2], [3, 5], confidence),
        lambda: clopper_pearson(1, 2, confidence),
        lambda: fit_exponent([1, 2, 3], [1, 2, 4], confidence),
    )
    for call in calls:
        with pytest.raises(ValueError, match="confidence must"):
            call()


def test_refuses_pairs_without_partners() -> None:
    with pytest.raises(ValueError, match="a and b must pair up, but hold 3 and 2"):
        paired_difference([1, 2, 3], [1, 2])


# clopper_pearson


@pytest.mark.parametrize(("successes", "trials", "low", "high"), NEWCOMBE)
def test_published_clopper_pearson(successes: int, trials: int, low: float, high: float) -> None:
    assert ends(clopper_pearson(successes, trials)) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (3, 7), (17, 40), (499, 500)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_clopper_pearson_is_scipys(successes: int, trials: int, confidence: float) -> None:
    peer = scipy.stats.binomtest(successes, trials).proportion_ci(confidence, method="exact")
    estimate = clopper_pearson(successes, trials, confidence)
    assert ends(estimate) == pytest.approx((peer.low, peer.high), rel=1e-8)
    assert (estimate.value, estimate.n) == (successes / trials, trials)


def binomial_tail(at_least: int, trials: int, p: Fraction) -> Fraction:
    """P(X >= at_least), summed in rational arithmetic."""
    terms = range(at_least, trials + 1)
    return sum((math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in terms), Fraction(0))


@pytest.mark.parametrize("trials", [1, 2, 5, 9])
def test_clopper_pearson_ends_are_where_a_tail_is_half_alpha(trials: int) -> None:
    """The definition: at the ends, the outcome seen or a worse one has probability alpha / 2."""
    for k in range(trials + 1):
        estimate = clopper_pearson(k, trials, 0.9)
        if k:
            tail = binomial_tail(k, trials, Fraction(estimate.low))
            assert float(tail) == pytest.approx(0.05, rel=1e-9)
        if k < trials:
            tail = 1 - binomial_tail(k + 1, trials, Fraction(estimate.high))
            assert float(tail) == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize("trials", [1, 4, 10])
def test_clopper_pearson_covers_by_enumeration(trials: int) -> None:
    intervals = [ends(clopper_pearson(k, trials, 0.8)) for k in range(trials + 1)]
    for p in (Fraction(i, 100) for i in range(101)):
        mass = [math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(trials + 1)]
        covered = sum(m for m, (low, high) in zip(mass, intervals, strict=True) if low <= p <= high)
        assert covered >= Fraction(4, 5)


def test_clopper_pearson_mirrors_and_keeps_small_ends() -> None:
    low, high = ends(clopper_pearson(3, 11))
    assert ends(clopper_pearson(8, 11)) == pytest.approx((1 - high, 1 - low), rel=1e-12)
    # no success in a billion: the upper end is 1 - 0.025^(1/n), without cancellation
    assert clopper_pearson(0, 10**9).high == pytest.approx(-math.log(0.025) / 1e9, rel=1e-8)


@pytest.mark.parametrize(
    ("successes", "trials", "error", "message"),
    [
        (3, 2, ValueError, "successes must be at most trials, but 3 > 2"),
        (-1, 2, ValueError, "successes must be at least 0"),
        (0, 0, ValueError, "trials must be at least 1"),
        (1.0, 2, TypeError, "successes must be an integer"),
        (1, 2.5, TypeError, "trials must be an integer"),
        (True, 2, TypeError, "successes must be an integer"),
    ],
)
def test_refuses_impossible_counts(
    successes: int, trials: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        clopper_pearson(successes, trials)


# fit_exponent


@pytest.mark.parametrize("exponent", [-2.0, -0.5, 0.0, 0.5, 3.0])
def test_exact_power_law(exponent: float) -> None:
    x = np.geomspace(1e-3, 1e4, 7)
    estimate = fit_exponent(x, 42 * x**exponent)
    assert estimate.value == pytest.approx(exponent, abs=1e-12)
    assert estimate.high - estimate.low < 1e-12
    assert estimate.n == 7


def test_three_points_by_hand() -> None:
    """u = -1, 0, 1 and v = 1, 0, 0 in logs: slope -1/2, residual^2 1/6, error sqrt(1/12)."""
    half = math.tan(math.pi * 0.9 / 2) / math.sqrt(12)
    estimate = fit_exponent(np.exp([-1, 0, 1]), np.exp([1, 0, 0]), 0.9)
    assert estimate.value == pytest.approx(-0.5)
    assert ends(estimate) == pytest.approx((-0.5 - half, -0.5 + half))


@pytest.mark.parametrize("n", [3, 8, 50])
def test_fit_exponent_is_scipys_regression(n: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.uniform(1, 100, n)
    y = 3 * x**0.7 * np.exp(rng.normal(0, 0.3, n))
    peer = scipy.stats.linregress(np.log(x), np.log(y))
    half = scipy.stats.t.ppf(0.975, n - 2) * peer.stderr
    estimate = fit_exponent(x, y)
    assert estimate.value == pytest.approx(peer.slope, rel=1e-10)
    assert ends(estimate) == pytest.approx((peer.slope - half, peer.slope + half), rel=1e-10)


def test_fit_exponent_ignores_units() -> None:
    x, y = np.array([1.0, 2, 4, 9]), np.array([1.0, 3, 11, 50])
    changed = fit_exponent(1e-6 * x, 1e9 * y)
    assert dataclasses.astuple(changed) == pytest.approx(dataclasses.astuple(fit_exponent(x, y)))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1, 2], [1, 2], "x must hold at least 3 numbers, got 2"),
        ([1, 2, 3], [1, 2, 3, 4], "x and y must pair up, but hold 3 and 4"),
        ([0, 1, 2], [1, 2, 3], "x must be positive"),
        ([1, 2, 3], [1, -2, 3], "y must be positive"),
        ([2, 2, 2], [1, 2, 3], "at least two different values"),
        ([1, 2, 3], [1, math.nan, 3], "y must be finite"),
    ],
)
def test_refuses_what_has_no_exponent(x: list, y: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_exponent(x, y)


def test_import_is_light() -> None:
    """The command line reaches this module: neither numpy nor scipy may load with it."""
    code = "import sys, proofread.stats; print({'numpy', 'scipy', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
