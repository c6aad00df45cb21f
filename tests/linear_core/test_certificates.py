from __future__ import annotations

import numpy as np
import pytest
import sympy
from scipy.optimize import minimize_scalar

from proofread.linear_core import LinearCore, reference_surrogate
from proofread.linear_core import certificates as certify
from proofread.linear_core.surrogates import TwoSidedLinearCore

s = sympy.symbols("s", positive=True)


@pytest.mark.parametrize(
    ("tail", "curvature"), [("exponential", 1 / s), ("gamma", 0), ("logistic", 1 / (2 * s))]
)
def test_jumps_at_the_stitch(tail: str, curvature: object) -> None:
    assert certify.stitch_jumps(tail)[:2] == (0, 0)
    assert sympy.simplify(certify.stitch_jumps(tail)[2] - curvature) == 0


def test_the_summaries_of_the_jumps() -> None:
    assert certify.largest_jump_c1() == 0
    assert certify.hinge_jump() == 1
    assert certify.scaled_curvature_jump("gamma") == 0
    assert certify.scaled_curvature_jump("exponential") == 1
    assert certify.scaled_curvature_jump("logistic") == sympy.Rational(1, 2)


@pytest.mark.parametrize("core", [0.3, 1.0, 7.0])
def test_the_slope_on_the_core_is_exactly_minus_one(core: float) -> None:
    deviation = certify.core_slope_deviation(LinearCore(core, scale=0.7))
    assert deviation == 0, "an exact zero, not a ball around it"


def test_a_core_that_reaches_into_the_tail_is_noticed() -> None:
    class Wide(LinearCore):
        """Claims a core of 2 while the tail starts at 1."""

        @property
        def shape(self):  # type: ignore[no-untyped-def]
            from dataclasses import replace

            shape = super().shape
            return replace(shape, slope=lambda v, m: shape.slope(v + 1, m))

    assert certify.core_slope_deviation(Wide()) > 0.6


def test_logistic_deviation_is_the_sigmoid_of_one() -> None:
    assert float(certify.logistic_slope_deviation()) == pytest.approx(
        1 / (1 + np.exp(-1)), abs=1e-15
    )


@pytest.mark.parametrize(
    ("name", "exponent"),
    [("hinge", 1), ("logistic", 2), ("squared hinge", 2), ("smoothed hinge", 2)],
)
def test_exponents_of_the_references(name: str, exponent: float) -> None:
    fitted = certify.calibration_exponent(reference_surrogate(name), 1e-5, 1e-2)
    assert fitted.value == pytest.approx(exponent, abs=2e-3)


def test_logistic_series() -> None:
    assert certify.logistic_series_residual(4) == 0
    with pytest.raises(ValueError, match="terms=0"):
        certify.logistic_series_residual(0)


def test_exponent_of_linear_core_is_one() -> None:
    fitted = certify.calibration_exponent(LinearCore(0.5, 2.0), 1e-6, 1e-4)
    assert fitted.value == pytest.approx(1, abs=1e-3)


def test_regrets_equal_the_definition() -> None:
    phi = LinearCore(0.8, 0.5, "gamma")
    eta, h = np.array([0.7, 0.7, 0.3, 0.3, 0.5]), np.array([-0.4, 2.0, 0.0, -0.1, 1.0])
    found = certify.regrets(phi, eta, h)
    assert found.zero_one == pytest.approx([0.4, 0, 0.4, 0, 0])  # sign(0) = +1 is wrong at 0.3
    for k in range(5):

        def risk(u: float, p: float = eta[k]) -> float:
            return p * phi(u) + (1 - p) * phi(-u)

        best = minimize_scalar(risk, bounds=(-20, 20), method="bounded", options={"xatol": 1e-9})
        assert found.surrogate[k] == pytest.approx(risk(h[k]) - best.fun, abs=1e-7)


@pytest.mark.parametrize("tail", ["exponential", "gamma", "logistic"])
@pytest.mark.parametrize("core", [0.25, 1.0, 3.0])
def test_the_attack_fails_on_linear_core(tail: str, core: float) -> None:
    worst, found = certify.attack(LinearCore(core, 2.0, tail), 4000, seed=1)
    assert 0.9 < worst <= 1 + 1e-9, "close to the constant, never above it"
    assert len(found.h) == 4000


@pytest.mark.parametrize("name", ["logistic", "squared hinge", "smoothed hinge"])
def test_the_attack_breaks_square_root_losses(name: str) -> None:
    worst, _ = certify.attack(reference_surrogate(name), 4000, seed=1)
    assert worst > 1000


def test_the_attack_wants_trials() -> None:
    with pytest.raises(ValueError, match="trials=1"):
        certify.attack(LinearCore(), 1, seed=0)


# --- bounded hypotheses ---------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["exponential", "gamma", "logistic"])
@pytest.mark.parametrize("two_sided", [False, True])
def test_bounded_gain_is_the_bounded_minimum(tail: str, two_sided: bool) -> None:
    phi = TwoSidedLinearCore(0.8, 0.5, tail) if two_sided else LinearCore(0.8, 0.5, tail)
    t, reach = np.array([0.05, 0.5, 0.95])[:, None], np.array([0.0, 0.3, 0.8, 1.1, 3.0, np.inf])
    gain = certify.bounded_gain(phi, t, reach)  # [3, 6]
    grid = np.linspace(0, 1, 200_001)
    for i in range(3):
        eta = (1 + t[i, 0]) / 2
        for k, r in enumerate(np.minimum(reach, 12)):
            u = np.concatenate([-r * grid[::20], r * grid])
            least = np.min(eta * phi(u) + (1 - eta) * phi(-u))
            assert gain[i, k] == pytest.approx(phi(0.0) - least, abs=1e-8)
    assert np.all(gain >= np.minimum(0.8, reach) * t - 1e-15)
    np.testing.assert_allclose(gain[:, 1], 0.3 * t[:, 0], rtol=1e-15)
    np.testing.assert_allclose(gain[:, -1], phi.calibration(t[:, 0]), rtol=1e-15)


def test_bounded_constant_is_the_supremum() -> None:
    phi, t = LinearCore(0.8, 0.5), np.geomspace(1e-9, 1, 400)
    for reach in (0.1, 0.8, 5.0):
        ratios = t / certify.bounded_gain(phi, t, reach)
        constant = float(certify.bounded_constant(phi, reach))
        assert constant == pytest.approx(1 / min(0.8, reach), rel=1e-15)
        assert np.max(ratios) <= constant * (1 + 1e-12)
        assert ratios[0] == pytest.approx(constant, rel=1e-6)
    assert certify.bounded_constant(phi, [0.0, np.inf]).tolist() == [np.inf, 1.25]
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="reach must be >= 0"):
            certify.bounded_constant(phi, bad)
    with pytest.raises(ValueError, match="t must lie"):
        certify.bounded_gain(phi, 1.5, 1.0)


def test_minimizability_gap_by_minimisation() -> None:
    phi = LinearCore()
    w = np.linspace(-8, 8, 160_001)
    right, left = 0.25 * phi(w) + 0.75 * phi(-w), 0.25 * phi(-w) + 0.75 * phi(w)  # x = 1, -1
    for reach, within in ((None, np.abs(w) < 9), (1, np.abs(w) <= 1)):
        example = certify.minimizability_gap_example(reach)
        assert float(example.best) == pytest.approx(np.min((right + left)[within]) / 2, abs=1e-9)
        alone = (np.min(right[within]) + np.min(left[within])) / 2
        assert float(example.pointwise) == pytest.approx(alone, abs=1e-8)
        assert sympy.simplify(example.best - example.pointwise - example.gap) == 0
    assert certify.minimizability_gap_example().gap.equals(1 - sympy.log(3) / 4)
    assert example.gap == sympy.Rational(1, 2)
    assert example.zero_one_gap == sympy.Rational(1, 4)  # 1/2 for w ≠ 0, against 1/4
    with pytest.raises(ValueError, match="reach must lie"):
        certify.minimizability_gap_example(2)


# --- what scale to choose -------------------------------------------------------------------------


def test_descent_bound_and_its_minimum() -> None:
    assert certify.descent_bound(2.0, 0.5, 3.0) == pytest.approx(3.5**2)
    kappa = sympy.symbols("kappa", positive=True)
    best, value = certify.verify_descent_minimum()
    assert sympy.simplify(best - 1 / kappa) == 0
    assert sympy.simplify(value - 4 * kappa) == 0


def one_descent(phi: LinearCore, kappa: float, accuracy: float) -> int:
    """Gradient descent on one score, step by step, as a naive twin."""
    eta, u, steps = 1 / (1 + np.exp(-kappa)), 0.0, 0
    best = phi(0.0) - phi.calibration(2 * eta - 1)
    while eta * phi(u) + (1 - eta) * phi(-u) - best > phi.core * accuracy:
        u -= (eta * phi.derivative(u) - (1 - eta) * phi.derivative(-u)) / phi.smoothness
        steps += 1
    return steps


def test_descent_steps_against_the_twin_and_the_bound() -> None:
    losses = [LinearCore(1, 0.3), LinearCore(0.5, 2.0), LinearCore(1, 1, "gamma")]
    odds = np.array([-1.0, 0.5, 3.0])
    steps = certify.descent_steps(losses, odds, 0.02)
    assert steps.tolist() == [[one_descent(f, abs(k), 0.02) for k in odds] for f in losses]
    for phi, row in zip(losses[:2], steps[:2], strict=True):  # exponential: L = 1/s
        bound = certify.descent_bound(phi.core, phi.scale, np.abs(odds)) / (2 * 0.02)
        assert np.all(row <= np.ceil(bound))


def test_descent_depends_on_the_ratio_alone() -> None:
    odds = np.linspace(0.3, 5, 6)
    one, four = (certify.descent_steps([LinearCore(c, 0.5 * c)], odds, 0.01) for c in (1.0, 4.0))
    assert one.tolist() == four.tolist()


def test_best_measured_ratio_is_near_the_bound() -> None:
    """At accuracy 0.01 the fewest steps are within a factor 2.1 of s/τ = 1/κ for κ = 1, 2, 4."""
    ratios = np.geomspace(0.05, 10, 24)
    steps = certify.descent_steps([LinearCore(1, x) for x in ratios], [1.0, 2.0, 4.0], 0.01)
    for kappa, column in zip((1, 2, 4), steps.T, strict=True):
        best = ratios[column == column.min()]
        assert np.min(np.abs(np.log(best * kappa))) < np.log(2.1)
        assert column.min() < column[0]
        assert column.min() < column[-1]


def test_descent_arguments() -> None:
    assert certify.descent_steps([LinearCore()], 0.0, 0.1).tolist() == [[0]]
    with pytest.raises(ValueError, match="accuracy=0"):
        certify.descent_steps([LinearCore()], 1.0, 0)
    with pytest.raises(ArithmeticError, match="limit=3"):
        certify.descent_steps([LinearCore(1, 0.01)], 1.0, 0.01, limit=3)


def test_huberized_hinge_is_certified_and_agrees_with_its_closed_forms() -> None:
    assert certify.verify_huberized_hinge() == 1.0
    loss = reference_surrogate("huberized hinge")
    assert [loss(u) for u in (0.0, 0.5, 0.75, 2.0)] == pytest.approx([0.75, 0.25, 0.0625, 0])
    assert [loss.derivative(u) for u in (-3.0, 0.5, 0.75, 2.0)] == pytest.approx([-1, -1, -0.5, 0])
    for t in (0.1, 0.5, 1.0):  # 𝒯 by minimising C on a grid
        u = np.linspace(0, 1, 100_001)
        risk = (1 + t) / 2 * loss(u) + (1 - t) / 2 * loss(-u)
        assert loss.calibration(t) == pytest.approx(loss(0.0) - risk.min(), abs=1e-9)


def test_curvature_of_the_tails() -> None:
    import sympy

    v = sympy.symbols("v", nonnegative=True)
    assert sympy.simplify(certify.tail_curvature("gamma") - v * sympy.exp(-v)) == 0
    assert certify.tail_curvature("exponential").subs(v, 0) == 1
    assert certify.tail_curvature("logistic").subs(v, 0) == sympy.Rational(1, 2)
