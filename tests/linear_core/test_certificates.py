from __future__ import annotations

import numpy as np
import pytest
import sympy
from scipy.optimize import minimize_scalar

from proofread.linear_core import LinearCore, reference_surrogate
from proofread.linear_core import certificates as certify

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
