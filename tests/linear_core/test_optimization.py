"""Descent on tabular problems against hand computations and the theorem's bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from proofread.linear_core import LinearCore, reference_surrogate
from proofread.linear_core.optimization import (
    Descent,
    TabularProblem,
    bound_ratio,
    compare_descents,
    descend,
    fastest,
    rate,
    slowest,
)

HINGE, LOGISTIC = reference_surrogate("hinge"), reference_surrogate("logistic")


def test_masses_halve_and_seeds_repeat() -> None:
    problem = TabularProblem.halving(3, seeds=[5, 5, 6])
    assert problem.masses == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert (problem.eta[0] == problem.eta[1]).all()
    assert (problem.eta[0] != problem.eta[2]).all()


@pytest.mark.parametrize("surrogate", [LinearCore(0.7, 2.0, t) for t in ("exponential", "gamma")])
def test_gap_against_a_numeric_minimum(surrogate: LinearCore) -> None:
    problem = TabularProblem.halving(4, seeds=[0])
    scores = np.array([[0.3, -2.0, 4.0, 0.0]])
    expected = 0.0
    for mass, eta, h in zip(problem.masses, problem.eta[0], scores[0], strict=True):

        def risk(u: float, eta: float = eta) -> float:
            return float(eta * surrogate(u) + (1 - eta) * surrogate(-u))

        best = minimize_scalar(risk, bounds=(-40, 40), method="bounded", options={"xatol": 1e-12})
        expected += mass * (risk(h) - best.fun)
    assert problem.gap(surrogate, scores) == pytest.approx([expected], rel=1e-7)


def test_gradient_is_the_slope_of_the_gap() -> None:
    problem, phi = TabularProblem.halving(3, seeds=[1]), LinearCore(scale=0.5)
    scores, e = np.array([[0.4, -1.7, 2.2]]), 1e-6
    for i in range(3):
        shift = e * np.eye(3)[i]
        slope = (problem.gap(phi, scores + shift) - problem.gap(phi, scores - shift)) / (2 * e)
        assert problem.gradient(phi, scores)[0, i] == pytest.approx(slope[0], abs=1e-8)


def test_hinge_chatters_as_computed_by_hand() -> None:
    """One point, η = 0.9, step 1: slope -0.8 below margin 1 and +0.1 above it.

    From 0: 0.8, 1.6, then down by 0.1 a step to 1.0, where the right derivative still points down:
    0.9, up to 1.7. The gap is 0.8·(1 - u) below 1 and 0.1·(u - 1) above.
    """
    problem = TabularProblem(np.array([1.0]), np.array([[0.9]]))
    gaps = descend(problem, HINGE, 3, 1.0)[0]
    assert gaps == pytest.approx([0.8, 0.16, 0.06, 0.05])
    late = descend(problem, HINGE, 400, 1.0)[0, 200:]
    assert late.max() > 0.06  # it never settles


def test_descent_on_a_linear_core_by_hand() -> None:
    """η = 0.9, τ = s = 1: in the core the slope is -0.8, so one step of 1 goes from 0 to 0.8."""
    problem, phi = TabularProblem(np.array([1.0]), np.array([[0.9]])), LinearCore()
    gaps = descend(problem, phi, 2, 1.0)[0]
    best = 0.9 * math.exp(-math.log(9)) + 0.1 * (2 + 1 + math.log(9))  # at u* = 1 + log 9
    second = 0.9 * math.exp(-0.6) + 0.1 * (2 + 1.6)  # at u = 1.6
    assert gaps == pytest.approx([2 - best, 0.9 * 1.2 + 0.1 * 2.8 - best, second - best])


@pytest.mark.parametrize("surrogate", [LinearCore(), LinearCore(2.0, 0.3), LOGISTIC])
def test_the_theorem_holds_along_the_way(surrogate) -> None:
    problem = TabularProblem.halving(12, seeds=range(5))
    gaps = descend(problem, surrogate, 300, 1 / problem.smoothness(surrogate))
    assert (np.diff(gaps) <= 1e-15).all()  # step 1/L never climbs
    assert 0 < bound_ratio(problem, surrogate, gaps) <= 1


def test_distance_is_that_of_the_minimiser() -> None:
    problem = TabularProblem(np.array([1.0]), np.array([[0.2]]))
    assert problem.distance(LOGISTIC) == pytest.approx([math.log(4) ** 2])
    assert problem.distance(LinearCore(0.5, 2.0)) == pytest.approx([(0.5 + 2 * math.log(4)) ** 2])
    with pytest.raises(ValueError, match="known for"):
        problem.distance(HINGE)


def test_rate_of_a_power_law_and_its_bad_inputs() -> None:
    steps = np.arange(1001)
    with np.errstate(divide="ignore"):
        gaps = np.stack([3 * steps**-1.5, steps**-1.5])
    assert rate(gaps).value == pytest.approx(1.5)
    with pytest.raises(ValueError, match="first=1000"):
        rate(gaps, first=1000)


def test_comparison_tells_smooth_from_chattering() -> None:
    found = compare_descents({"LC": LinearCore()}, HINGE, sizes=(10,), seeds=range(6), n_steps=300)
    assert list(found) == ["LC", "hinge, constant step", "hinge, step ∝ 1/√T"]
    assert slowest([found["LC"]]).value > 0.8
    assert fastest(found["hinge, constant step"]).value < 0.5
    assert found["LC"].bound[10] <= 1
    assert not found["hinge, constant step"].bound


def test_slowest_and_fastest_pick_by_value() -> None:
    gaps = np.ones((2, 2))
    rates = {n: rate(np.outer([1, 2], np.arange(1, 60) ** -p)) for n, p in ((10, 1.0), (20, 2.0))}
    one = Descent({10: gaps}, rates, {})
    assert slowest([one]).value == rates[10].value < fastest(one).value


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TabularProblem.halving(0, [1]), "n_points=0"),
        (lambda: TabularProblem.halving(3, []), "seeds"),
        (lambda: TabularProblem(np.array([0.5]), np.array([[0.5]])), "sum to 1"),
        (lambda: TabularProblem(np.array([np.nan, 0.5]), np.array([[0.5, 0.5]])), "masses"),
        (lambda: TabularProblem(np.array([[1.0]]), np.array([[0.5]])), "masses"),
        (lambda: TabularProblem(np.array([1.0]), np.array([[np.nan]])), "strictly between"),
        (lambda: TabularProblem(np.array([1.0]), np.array([[1.0]])), "strictly between"),
        (lambda: TabularProblem(np.array([1.0]), np.array([0.5])), r"\[S, d\]"),
        (lambda: descend(TabularProblem.halving(2, [0]), HINGE, 0, 1.0), "n_steps=0"),
        (lambda: descend(TabularProblem.halving(2, [0]), HINGE, 5, 0.0), "step must be"),
        (lambda: compare_descents({}, HINGE, sizes=[2], seeds=[0, 1], n_steps=20), "smooth"),
        (
            lambda: compare_descents({"h": HINGE}, HINGE, sizes=[2], seeds=[0, 1], n_steps=20),
            "finite smoothness",
        ),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
