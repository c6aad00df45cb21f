"""Enclosures against closed forms, quadrature, and the series once more in many digits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from flint import arb, ctx
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp
from scipy.stats import ncx2

from proofread.langevin import enclosures
from proofread.langevin.enclosures import (
    LogEnclosure,
    ball_log_probability,
    trap_log_error,
    trap_log_error_parts,
    truncated_log_moment,
)

NOTHING = LogEnclosure(-math.inf, -math.inf)
Function = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


def holds(enclosure: LogEnclosure, log: mpmath.mpf) -> bool:
    """Strictly, without tolerance: the logarithm has many more digits than a float."""
    return bool(mpmath.mpf(enclosure.low) <= log <= mpmath.mpf(enclosure.high))


# --- the quantities by quadrature, and as series, in plain code -----------------------------------


def polar(d: int, m: float, low: float, high: float, log_f: Function) -> float:
    """log E[f(r, cos); low < r < high] for N(m e, I): Gauss–Legendre in radius and angle."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    r = (low + high) / 2 + (high - low) / 2 * nodes[:, None]
    in_r = weights[:, None] * (high - low) / 2
    if d == 1:
        cosine, in_angle, log_c = np.array([-1.0, 1.0]), np.ones(2), -math.log(2 * math.pi) / 2
    else:
        angle = math.pi / 2 * (1 + nodes)
        cosine, in_angle = np.cos(angle), weights * math.pi / 2 * np.sin(angle) ** (d - 2)
        log_c = (1 - d / 2) * math.log(2) - math.log(math.pi) / 2 - float(gammaln((d - 1) / 2))
    logs = np.log(in_r) + np.log(in_angle) + (d - 1) * np.log(r) + log_f(r, cosine)
    return float(logsumexp(logs - (r * r + m * m - 2 * m * r * cosine) / 2)) + log_c


def log_error_parts(
    d: int, distance: float, alpha: float, inner: float, outer: float, p: float
) -> tuple[float, float]:
    """The logarithms of E‖error‖^p over the inner ball and over the bump."""
    m, r_in, r_out = (x * math.sqrt(d) for x in (distance, inner, outer))

    def size(r: NDArray[np.float64], c: NDArray[np.float64]) -> NDArray[np.float64]:
        square = ((alpha - 1) * r) ** 2 + 2 * (alpha - 1) * m * r * c + m * m
        return p / 2 * np.log(np.maximum(square, 1e-300))

    inside = polar(d, m, 0, r_in, size) if inner else -math.inf
    bump = polar(
        d, m, r_in, r_out, lambda r, c: size(r, c) + p * np.log((r_out - r) / (r_out - r_in))
    )
    return inside, bump


def series_moment(d: int, m: mpmath.mpf, radius: mpmath.mpf, k: float, i: int) -> mpmath.mpf:
    """E[r^k u^i; r ≤ radius] by its series, term by term, all of them."""
    total, n = mpmath.mpf(0), (i + 1) // 2
    half, x, shift = mpmath.mpf(d) / 2, mpmath.mpf(radius) ** 2 / 2, mpmath.mpf(k) / 2
    while True:
        coefficient = mpmath.mpf(m) ** (2 * n - i) / mpmath.factorial(2 * n - i)
        moment = mpmath.factorial(2 * n) / (4**n * mpmath.factorial(n))
        radial = 2 ** (shift + n) * mpmath.gammainc(half + n + shift, 0, x) / mpmath.gamma(half + n)
        total += (term := coefficient * moment * radial)
        if n > m * radius and term < total * mpmath.mpf(2) ** -mpmath.mp.prec:
            return mpmath.exp(-(mpmath.mpf(m) ** 2) / 2) * total
        n += 1


def series_square(d: int, distance: int, alpha: int, inner: int, outer: int) -> mpmath.mpf:
    """E‖error‖² by writing it as moments: ψ² and the square of the size multiplied out."""
    root = mpmath.sqrt(d)
    m, small, large, b = distance * root, inner * root, outer * root, alpha - 1
    size = {(2, 0): b * b, (0, 1): 2 * b * m, (0, 0): m * m}
    bump = {0: large**2, 1: -2 * large, 2: mpmath.mpf(1)}
    total = mpmath.mpf(0)
    for (k, i), x in size.items():
        total += x * series_moment(d, m, small, k, i)
        for c, y in bump.items():
            ends = [series_moment(d, m, end, k + c, i) for end in (small, large)]
            total += x * y / (large - small) ** 2 * (ends[1] - ends[0])
    return total


# --- the result type ------------------------------------------------------------------------------


def test_an_enclosure_has_a_width_and_prints_an_interval_that_holds_it() -> None:
    enclosure = LogEnclosure(-2172.123456, -2172.123455)
    assert enclosure.width == pytest.approx(1e-6)
    assert str(enclosure) == "[-2172.12345600, -2172.12345499]"
    assert str(NOTHING) == "[-inf, -inf]"
    assert NOTHING.width == 0


@pytest.mark.parametrize("ends", [(1.0, 0.0), (math.nan, 0.0), (0.0, math.nan)])
def test_an_enclosure_out_of_order_is_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="low must be at most high"):
        LogEnclosure(*ends)


# --- balls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3, 10, 57])
@pytest.mark.parametrize("distance", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("rho", [0.4, 1.0, 3.0])
def test_ball_and_complement_are_those_of_scipy(d: int, distance: float, rho: float) -> None:
    m, radius = distance * math.sqrt(d), rho * math.sqrt(d)
    law = ncx2(d, m * m)
    for complement, expected in ((False, law.cdf(radius**2)), (True, law.sf(radius**2))):
        found = ball_log_probability(d, m, radius, complement=complement)
        assert found.width <= 1e-12 * (1 + abs(found.low))
        if expected > 1e-9:
            assert found.low == pytest.approx(math.log(expected), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("m", [0.0, 0.75, 40.0])
@pytest.mark.parametrize("radius", [0.125, 1.5, 38.0])
def test_in_one_dimension_the_error_function(m: float, radius: float) -> None:
    with mpmath.workdps(700):  # two tails of e^−760 are subtracted
        ends = [mpmath.ncdf(mpmath.mpf(s) * radius - m) for s in (-1, 1)]
        assert holds(ball_log_probability(1, m, radius), mpmath.log(ends[1] - ends[0]))
        outside = ends[0] + 1 - ends[1]
        assert holds(ball_log_probability(1, m, radius, complement=True), mpmath.log(outside))


@pytest.mark.parametrize(("d", "radius"), [(2, 1e-3), (2, 60.0), (1000, 20.0), (1000, 40.0)])
def test_centred_and_even_the_poisson_distribution(d: int, radius: float) -> None:
    """P(r > R) = P(Poisson(R²/2) < d/2)."""
    with mpmath.workdps(1200):
        x = mpmath.mpf(radius) ** 2 / 2
        outside = mpmath.exp(-x) * mpmath.fsum(x**n / mpmath.factorial(n) for n in range(d // 2))
        assert holds(ball_log_probability(d, 0.0, radius), mpmath.log(1 - outside))
        assert holds(ball_log_probability(d, 0.0, radius, complement=True), mpmath.log(outside))


def test_a_ball_of_radius_zero_is_empty() -> None:
    assert ball_log_probability(3, 1.0, 0.0) == NOTHING
    assert ball_log_probability(3, 1.0, 0.0, complement=True) == LogEnclosure(0.0, 0.0)


def test_probabilities_grow_with_the_radius_and_fall_with_the_distance() -> None:
    by_radius = [ball_log_probability(40, 30.0, r) for r in (1, 10, 28, 31, 35, 60)]
    by_distance = [ball_log_probability(40, m, 20.0) for m in (40, 30, 25, 22, 20, 0)]
    for row in (by_radius, by_distance):
        assert all(a.high < b.low for a, b in itertools.pairwise(row[:-1]))
        assert row[-1].high <= 0


def ball_exponent(rho: float, distance: float) -> float:
    """−lim log P(r ≤ ρ√d)/d by Cramér's theorem: the best θ of an exponential bound."""
    thetas = np.linspace(0, 20, 200_001)
    best = thetas * rho**2 - np.log1p(2 * thetas) / 2 - thetas * distance**2 / (1 + 2 * thetas)
    return float(-best.min())


@pytest.mark.parametrize("rho", [4.0, 5.0])
def test_in_high_dimension_the_exponent_is_cramers(rho: float) -> None:
    exponent = ball_exponent(rho, 7.0)
    for d in (100, 1000, 100_000):
        found = ball_log_probability(d, 7.0 * math.sqrt(d), rho * math.sqrt(d))
        assert -found.high >= exponent * d - 1e-6 * d  # Chernoff's bound holds in every dimension
        assert -found.low <= exponent * d + math.log(d) + 3  # and is sharp up to a power of d
        assert found.width < 1e-8


# --- moments --------------------------------------------------------------------------------------


def test_in_a_large_ball_the_moments_are_those_of_the_gaussian() -> None:
    d, m = 6, 1.25
    expected = {
        (0, 1): m,
        (2, 0): d + m * m,
        (0, 3): m**3 + 3 * m,
        (4, 0): (d + m * m) ** 2 + 2 * d + 4 * m * m,
        (2, 1): m**3 + 3 * m + (d - 1) * m,
    }
    for (k, i), value in expected.items():
        found = truncated_log_moment(d, m, 40.0, k, i)
        assert found.low == pytest.approx(math.log(value), abs=1e-14)
        assert found.width < 1e-14


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("k", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("i", [0, 1, 4])
def test_moments_are_those_of_the_series_in_many_digits(d: int, k: float, i: int) -> None:
    with mpmath.workdps(40):
        for m, radius in ((0.5, 1.25), (3.0, 2.0), (4.0, 7.0)):
            expected = mpmath.log(series_moment(d, mpmath.mpf(m), mpmath.mpf(radius), k, i))
            assert holds(truncated_log_moment(d, m, radius, k, i), expected)


def test_the_series_itself_is_right_by_quadrature() -> None:
    for d, m, radius, k in ((1, 0.5, 1.5, 1.0), (2, 2.0, 1.5, 2.5), (7, 1.0, 3.0, 3.0)):
        even = polar(d, m, 0, radius, lambda r, c, k=k: k * np.log(r) + 2 * np.log(r * abs(c)))
        assert truncated_log_moment(d, m, radius, k, 2).low == pytest.approx(even, abs=1e-10)
        flat = polar(d, m, 0, radius, lambda r, c, k=k: k * np.log(r) + 0 * c)
        assert truncated_log_moment(d, m, radius, k).low == pytest.approx(flat, abs=1e-10)


def test_moments_that_vanish_and_the_one_that_is_a_probability() -> None:
    assert truncated_log_moment(4, 0.0, 2.0, 1.0, 3) == NOTHING
    assert truncated_log_moment(4, 1.0, 0.0, 1.0) == NOTHING
    assert truncated_log_moment(9, 5.0, 4.0) == ball_log_probability(9, 5.0, 4.0)
    # of the uniform direction: E u² = E r²/d
    square, axis = truncated_log_moment(4, 0.0, 2.0, 2.0), truncated_log_moment(4, 0.0, 2.0, 0.0, 2)
    assert square.low - math.log(4) == pytest.approx(axis.low, abs=1e-14)


# --- a trap, even powers --------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(
    ("m", "alpha", "inner", "outer"),
    [(7.0, 10.0, 4.0, 5.0), (2.0, 0.25, 1.0, 3.0), (0.0, 3.0, 0.5, 2.0), (1.5, 1.0, 0.0, 1.0)],
)
def test_in_one_dimension_the_integral_in_forty_digits(
    p: int, m: float, alpha: float, inner: float, outer: float
) -> None:
    def integrand(y: mpmath.mpf) -> mpmath.mpf:
        psi = min(mpmath.mpf(1), (outer - abs(y)) / mpmath.mpf(outer - inner))
        return (psi * ((alpha - 1) * y + m)) ** p * mpmath.npdf(y - m)

    with mpmath.workdps(40):
        zones = [mpmath.quad(integrand, [-inner, 0, inner]) if inner else mpmath.mpf(0)]
        zones += [mpmath.quad(integrand, [-outer, -inner]) + mpmath.quad(integrand, [inner, outer])]
        parts = trap_log_error_parts(1, m, alpha, inner, outer, p)
        for enclosure, value in zip(parts, zones, strict=True):
            assert holds(enclosure, mpmath.log(value) / p) if value else enclosure == NOTHING
        whole = trap_log_error(1, m, alpha, inner, outer, p)
        assert holds(whole, mpmath.log(sum(zones)) / p)
        assert whole.width < 1e-14


@pytest.mark.parametrize(("d", "alpha"), [(2, 3), (7, 10), (12, 3)])
def test_the_square_is_the_sum_of_its_moments(d: int, alpha: int) -> None:
    with mpmath.workdps(60):
        expected = mpmath.log(series_square(d, 3, alpha, 1, 2)) / 2
        assert holds(trap_log_error(d, None, alpha, 1.0, 2.0, 2, distance=3.0), expected)


CASES = [
    # d, distance, α, inner, outer
    (2, 7.0, 10.0, 4.0, 5.0),
    (3, 3.0, 0.2, 1.0, 1.5),  # α < 1: the terms of the series alternate
    (5, 0.0, 4.0, 0.3, 0.9),
    (9, 1.5, 1.0, 1.0, 3.0),
    (20, 0.8, 30.0, 0.0, 0.7),
    (40, 2.0, 0.6, 4.0, 6.0),  # the ball holds the target: the shell is in its outer tail
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("p", [2, 4, 6])
def test_even_powers_by_quadrature(case: tuple[int, float, float, float, float], p: int) -> None:
    d, distance, *trap = case
    inside, bump = log_error_parts(*case, p)
    whole = trap_log_error(d, None, *trap, p, distance=distance)
    assert whole.low == pytest.approx(np.logaddexp(inside, bump) / p, abs=1e-9)
    parts = trap_log_error_parts(d, None, *trap, p, distance=distance)
    for part, expected in zip(parts, (inside, bump), strict=True):
        assert part.low == pytest.approx(expected / p, abs=1e-9)
        assert part == NOTHING or part.width < 1e-12


def test_the_standard_traps_exponents() -> None:
    """The bump decays like the outer ball's probability, the inside like the inner ball's."""
    for d in (64, 1000, 20_000):
        inside, bump = trap_log_error_parts(d, None, 10.0, 4.0, 5.0, 2, distance=7.0)
        for part, rho, rate in ((inside, 4.0, 4.784), (bump, 5.0, 2.172)):
            assert ball_exponent(rho, 7.0) == pytest.approx(rate, abs=6e-4)
            assert abs(-2 * part.low / d - rate) < 6 * math.log(d) / d
        assert max(inside.width, bump.width) < 1e-10


def test_a_dimension_of_a_hundred_thousand() -> None:
    error = trap_log_error(100_000, None, 10.0, 4.0, 5.0, 2, distance=7.0)
    assert error.width < 1e-9
    assert -2 * error.high / 100_000 == pytest.approx(ball_exponent(5.0, 7.0), abs=1e-3)
    assert trap_log_error_parts(100_000, None, 10.0, 4.0, 5.0, 2, distance=7.0)[1] == error


def test_a_large_power_close_to_the_supremum() -> None:
    errors = [trap_log_error(64, None, 10.0, 4.0, 5.0, p, distance=7.0) for p in (2, 16, 32, 64)]
    errors.append(trap_log_error(64, None, 10.0, 4.0, 5.0, math.inf, distance=7.0))
    assert all(a.high < b.low for a, b in itertools.pairwise(errors))
    assert max(e.width for e in errors) < 1e-12
    assert errors[3].low == pytest.approx(
        np.logaddexp(*log_error_parts(64, 7.0, 10.0, 4.0, 5.0, 64)) / 64, abs=1e-8
    )


def test_the_error_grows_with_the_trap_and_falls_with_the_distance() -> None:
    def log_error(**change: float) -> LogEnclosure:
        trap = {"alpha": 3.0, "inner": 1.0, "outer": 2.0, "distance": 2.5, **change}
        return trap_log_error(30, None, p=2, **trap)

    for name, values in {"alpha": (2, 3, 9), "inner": (0, 1, 1.5), "outer": (1.5, 2, 3)}.items():
        row = [log_error(**{name: float(x)}) for x in values]
        assert all(a.high < b.low for a, b in itertools.pairwise(row))
    assert log_error(distance=3.0).high < log_error(distance=2.5).low


def test_a_distance_in_units_of_the_root_is_not_rounded() -> None:
    same = trap_log_error(4, 14.0, 10.0, 4.0, 5.0, 2)
    assert trap_log_error(4, None, 10.0, 4.0, 5.0, 2, distance=7.0) == same
    # √2 is no float: the two neighbours of 3√2 enclose the exact case strictly
    m = 3.0 * math.sqrt(2.0)
    ends = [math.nextafter(m, math.inf), math.nextafter(m, 0.0)]
    with ctx.workprec(200):
        moments = [
            enclosures._zone_moment(
                enclosures._trap(2, x, 2.0, 1.0, 2.0, 3.0 if x is None else None), True, 2, 1
            )
            for x in (ends[0], None, ends[1])
        ]
    with mpmath.workdps(60):
        exact = mpmath.mpf(3) * mpmath.sqrt(2)
        assert mpmath.mpf(ends[1]) < exact < mpmath.mpf(ends[0])
    assert moments[0].mid() < moments[1].mid() < moments[2].mid()


# --- a trap, other powers -------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("p", "widest"), [(1, 0.06), (3, 0.02), (2.5, 0.12), (7.3, 0.02)])
def test_other_powers_hold_the_quadrature(
    case: tuple[int, float, float, float, float], p: float, widest: float
) -> None:
    d, distance, *trap = case
    slack = 3 if distance == 0 else 1  # the size varies most where it can vanish
    inside, bump = log_error_parts(*case, p)
    values = {"whole": np.logaddexp(inside, bump), "inside": inside, "bump": bump}
    found = {"whole": trap_log_error(d, None, *trap, p, distance=distance)}
    found |= dict(
        zip(
            ("inside", "bump"),
            trap_log_error_parts(d, None, *trap, p, distance=distance),
            strict=True,
        )
    )
    for name, value in values.items():
        assert found[name].low - 1e-9 <= value / p <= found[name].high + 1e-9
        assert found[name].width < widest * slack


def test_odd_powers_are_tight_in_high_dimension_and_exact_for_a_constant_size() -> None:
    widths = [trap_log_error(d, None, 10.0, 4.0, 5.0, 1, distance=7.0).width for d in (4, 64, 1000)]
    assert widths[0] < 1e-2
    assert widths[1] < 1e-5
    assert widths[2] < 1e-7
    assert trap_log_error(3, 1.0, 1.0, 0.5, 2.0, 3).width < 1e-13  # α = 1: the size is m


def test_the_norm_grows_with_the_power() -> None:
    powers = (1, 1.5, 2, 2.5, 3, 3.5, 4, 6, 9, 12, math.inf)
    row = [trap_log_error(6, None, 4.0, 1.0, 2.0, p, distance=1.5) for p in powers]
    assert all(a.low <= b.high for a, b in itertools.pairwise(row))
    even = [e for p, e in zip(powers, row, strict=True) if p in (2, 4, 6, 12)]
    assert all(a.high < b.low for a, b in itertools.pairwise(even))


@pytest.mark.parametrize("d", [1, 2, 9])
@pytest.mark.parametrize(
    ("m", "alpha", "inner", "outer"),
    [
        (7.0, 10.0, 4.0, 5.0),  # largest at the inner radius
        (0.5, 10.0, 1.0, 6.0),  # a maximum inside the bump
        (0.5, 0.1, 0.0, 3.0),
        (2.0, 1.0, 1.0, 2.0),
        (0.0, 5.0, 0.0, 1.0),
    ],
)
def test_the_supremum_by_a_grid(d: int, m: float, alpha: float, inner: float, outer: float) -> None:
    r = np.linspace(0, outer, 400_001) * math.sqrt(d)
    psi = np.minimum(1, (outer * math.sqrt(d) - r) / ((outer - inner) * math.sqrt(d)))
    size = psi * (abs(alpha - 1) * r + m)  # along the axis, on the side where the two add up
    found = trap_log_error(d, m, alpha, inner, outer, math.inf)
    assert found.low == pytest.approx(math.log(size.max()), abs=1e-9)
    assert found.width < 1e-14
    inside, bump = trap_log_error_parts(d, m, alpha, inner, outer, math.inf)
    assert max(inside, bump, key=lambda e: e.low) == found
    if inner:
        at_inner = abs(alpha - 1) * inner * math.sqrt(d) + m
        assert inside.low == pytest.approx(math.log(at_inner), abs=1e-14)


def test_an_exact_estimate_has_no_error() -> None:
    for p in (1, 2, 2.5, math.inf):
        assert trap_log_error(5, 0.0, 1.0, 1.0, 2.0, p) == NOTHING
        assert trap_log_error_parts(5, 0.0, 1.0, 1.0, 2.0, p) == (NOTHING, NOTHING)
    assert trap_log_error_parts(5, 1.0, 3.0, 0.0, 2.0, 3)[0] == NOTHING


# --- what the rigour rests on ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_of_the_tails_holds_what_a_shorter_sum_leaves_out(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    span = enclosures._span
    tried = 0
    zones = ((True, 0), (True, 3), (False, 0))
    for d, (bump, j), q in itertools.product((1, 6, 200), zones, (0, 2)):
        trap = enclosures._trap(d, None, float(rng.uniform(0.2, 9)), 1.0, 2.0, rng.uniform(0.5, 4))
        exact = enclosures._zone_moment(trap, bump, j, q)

        def shorter(log_term: Callable[[float], float], least: int) -> tuple[int, int]:
            first, last = span(log_term, least)
            cut = (rng.uniform(0, 0.35, 2) * (last - first)).astype(int)
            return first + int(cut[0]), max(last - int(cut[1]), first + int(cut[0]) + 1)

        with monkeypatch.context() as patch, ctx.workprec(400):
            patch.setattr(enclosures, "_span", shorter)
            ball = enclosures._zone_series(trap, bump, j, q)
        if ball.is_finite():  # else a ratio at a cut is above 1 and no bound is claimed
            tried += 1
            assert ball.overlaps(exact)
    assert tried >= 4


def test_the_tails_of_a_geometric_series_times_a_factor_that_grows() -> None:
    """Terms 3^(−|l − 5|) times 1.5^l for l ≥ 0, of which 4 … 6 are given."""
    terms = [arb(1) / 3, arb(1), arb(1), arb(1) / 3]
    factors = [arb(1.5) ** n for n in (4, 6, 7)]
    outside = sum(3.0 ** -abs(n - 5) * 1.5**n for n in (*range(4), *range(7, 400)))
    ball = enclosures._tail(terms, True, factors)
    assert ball.contains(arb(-outside))
    assert ball.contains(arb(outside))
    assert float(ball.rad()) < 2 * outside
    above = sum(3.0 ** -abs(n - 5) * 1.5**n for n in range(7, 400))
    assert float(enclosures._tail(terms, False, factors).rad()) == pytest.approx(above)


@pytest.mark.parametrize(("d", "m", "x"), [(1, 0.5, 0.25), (8, 9.0, 16.0), (300, 80.0, 900.0)])
def test_an_inner_ball_that_is_not_summed_is_bounded(d: int, m: float, x: float) -> None:
    bound = enclosures._chernoff(d, arb(m), arb(x)).log()
    log = ball_log_probability(d, m, math.sqrt(2 * x))
    assert log.high <= float(bound) <= log.low + math.log(d) + 3
    assert enclosures._chernoff(d, arb(m), arb(1e6)) == 1  # nothing to gain: most is inside
    trap = enclosures._trap(d, m, 3.0, math.sqrt(2 * x / d), 1e3, None)
    exact = enclosures._zone_moment(trap, False, 0, 1)
    assert enclosures._inside(trap, 1, exact).overlaps(exact)
    assert enclosures._inside(trap, 1, arb(1e300)).contains(exact)
    assert enclosures._inside(trap, 1, arb(1e300)).contains(0)


def test_terms_are_log_concave() -> None:
    """The lemma, on the terms themselves: shells and balls, with and without a power."""
    with ctx.workprec(300):
        for low, high in ((0, 3), (2, 3), (30, None)):
            for d, k, i in ((1, 0.0, 0), (3, 2.5, 1), (40, 1.0, 4)):
                weights = enclosures._weights(d, arb(5), (i, i + 60), i)
                row = enclosures._rows(weights, i, i)[i]
                end = None if high is None else arb(high)
                shape = arb(d) / 2 + i + arb(k) / 2
                integrals = enclosures._integrals(shape, len(row), arb(low), end)
                terms = [w * x for w, x in zip(row, integrals, strict=True)]
                for a, b, c in zip(terms, terms[1:], terms[2:], strict=False):
                    assert a * c <= b * b


@pytest.mark.parametrize("shape", [0.5, 3.0, 900.5, 1000.0, 1003.5, 4000.0])
@pytest.mark.parametrize("x", [0.25, 1000.0])
def test_incomplete_gammas_near_and_far_from_their_turning_point(shape: float, x: float) -> None:
    with mpmath.workdps(900), ctx.workprec(200):
        found = enclosures._lower_gamma(arb(shape), arb(x)).log()
        exact = mpmath.log(mpmath.gammainc(mpmath.mpf(shape), 0, mpmath.mpf(x)))
        assert abs(mpmath.mpf(found.mid().str(60, radius=False)) - exact) < mpmath.mpf("1e-40")
        assert float(found.rad()) < 1e-40


@pytest.mark.parametrize(("low", "high"), [(0, 5), (3, 5), (30, 40), (3, None), (60, None)])
def test_integrals_by_recurrence_are_those_one_by_one(low: int, high: int | None) -> None:
    with mpmath.workdps(80), ctx.workprec(200):
        end = None if high is None else arb(high)
        found = enclosures._integrals(arb(1) / 2, 30, arb(low), end)
        for n, ball in enumerate(found):
            exact = mpmath.gammainc(n + mpmath.mpf(0.5), low, mpmath.inf if high is None else high)
            assert arb(mpmath.nstr(exact, 75)).overlaps(ball)
            assert ball.rel_accuracy_bits() > 95


def test_precision_is_raised_until_it_suffices_and_then_given_up() -> None:
    tried: list[int] = []

    def cancelling(bits: int) -> Callable[[], arb]:
        def evaluate() -> arb:
            tried.append(ctx.prec)
            return (arb(2).sqrt() + arb(2) ** -bits) - arb(2).sqrt()

        return evaluate

    for bits in (90, 500):  # at first a few bits are left, and none
        tried.clear()
        ball = enclosures._certify(cancelling(bits))
        assert len(tried) > 1
        assert ball.overlaps(arb(2) ** -bits)
        assert ball.rel_accuracy_bits() >= enclosures.ACCURACY
    with pytest.raises(ArithmeticError, match="do not suffice"):
        enclosures._certify(cancelling(100_000))
    thin = trap_log_error(4, 1.0, 3.0, 1.0, math.nextafter(1.0, 2.0), 8)  # a bump of one ulp
    assert thin.width < 1e-14


def test_the_precision_of_the_caller_is_left_alone_and_does_not_matter() -> None:
    expected = trap_log_error(8, None, 10.0, 4.0, 5.0, 3, distance=7.0)
    with ctx.workprec(20):
        assert trap_log_error(8, None, 10.0, 4.0, 5.0, 3, distance=7.0) == expected
        assert ctx.prec == 20


# --- bad input ------------------------------------------------------------------------------------


GOOD = {"dimension": 3, "mean_norm": 2.0, "alpha": 2.0, "inner": 1.0, "outer": 2.0, "p": 2.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimension": 0}, "dimension must be at least 1"),
        ({"mean_norm": math.nan}, "mean_norm must lie in"),
        ({"mean_norm": -1.0}, "mean_norm must lie in"),
        ({"mean_norm": None}, "exactly one of mean_norm"),
        ({"distance": 1.0}, "exactly one of mean_norm"),
        ({"mean_norm": None, "distance": math.inf}, "distance must lie in"),
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"alpha": math.nan}, "alpha must be positive"),
        ({"inner": -0.5}, "inner must lie in"),
        ({"outer": math.inf}, "outer must lie in"),
        ({"inner": 2.0}, "inner must be below outer"),
        ({"p": 0.5}, "p must be at least 1"),
        ({"p": math.nan}, "p must be at least 1"),
        ({"p": 66.0}, "at most 64, or math.inf"),
        ({"mean_norm": 1e9, "outer": 1e9}, "terms, more than"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, float | None], message: str) -> None:
    for function in (trap_log_error, trap_log_error_parts):
        with pytest.raises(ValueError, match=message):
            function(**{**GOOD, **change})


def test_bad_arguments_of_balls_and_moments_are_named() -> None:
    with pytest.raises(TypeError, match="dimension must be an integer"):
        ball_log_probability(2.5, 1.0, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="radius must lie in"):
        ball_log_probability(2, 1.0, math.inf)
    with pytest.raises(ValueError, match="power must lie in"):
        truncated_log_moment(2, 1.0, 1.0, -1.0)
    with pytest.raises(ValueError, match="axis_power must be at least 0"):
        truncated_log_moment(2, 1.0, 1.0, 1.0, -1)
    with pytest.raises(TypeError, match="axis_power must be an integer"):
        truncated_log_moment(2, 1.0, 1.0, 1.0, 1.5)  # type: ignore[arg-type]


def test_shown_digits_tell_the_ends_apart() -> None:
    low, high = -1085911.2901953573, -1085911.2901952981
    shown = str(LogEnclosure(low, high))
    ends = [float(end) for end in shown.strip("[]").split(", ")]
    assert ends[0] <= low < high <= ends[1]
    assert ends[1] - ends[0] < 2 * (high - low)
    assert str(LogEnclosure(-math.inf, -3.0)) == "[-inf, -3]"


def test_absurd_dimensions_are_named() -> None:
    with pytest.raises(ValueError, match="dimension must be at least 1 and below"):
        ball_log_probability(10**400, 1.0, 1.0)
