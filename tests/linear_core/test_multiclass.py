"""Multi-class theory against scipy's minimisers, exact rationals, sympy and hand calculations."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import sympy
from flint import arb, ctx
from scipy.optimize import linprog, minimize

from proofread.linear_core import LinearCore
from proofread.linear_core import multiclass as mc
from proofread.linear_core import surrogates as module
from proofread.linear_core.surrogates import TwoSidedLinearCore

TAILS = ("exponential", "gamma", "logistic")
SETTINGS = [(tail, core, scale) for tail in TAILS for core, scale in [(1, 1), (1.3, 0.7), (0.4, 2)]]
LAWS = (
    (0.5, 0.3, 0.2),
    (0.46, 0.44, 0.1),
    (0.4, 0.4, 0.1, 0.1),
    (0.7, 0.1, 0.1, 0.05, 0.05),
    (0.3, 0.25, 0.2, 0.15, 0.1),
)


def risk_as_written(p, h, phi):
    """The constrained risk, label by label: the definition."""
    centred = [x - sum(h) / len(h) for x in h]
    return sum(p[y] * sum(phi(-centred[z]) for z in range(len(p)) if z != y) for y in range(len(p)))


def sum_risk_as_written(p, h, phi):
    pairs = [(y, z) for y in range(len(p)) for z in range(len(p)) if z != y]
    return sum(p[y] * phi(float(h[y] - h[z])) for y, z in pairs)


def minimised(risk, n_classes, predicted=None, start=None):
    """Least risk by SLSQP from several starts, over all scores or those predicting a class."""
    constraints = []
    if predicted is not None:
        for j in set(range(n_classes)) - {predicted}:
            constraints.append({"type": "ineq", "fun": lambda h, j=j: h[predicted] - h[j]})
    starts = [np.zeros(n_classes), np.eye(n_classes)[predicted or 0]]
    starts += [] if start is None else [np.asarray(start, float)]
    options = {"ftol": 1e-14, "maxiter": 2000}
    found = [
        minimize(risk, h, method="SLSQP", constraints=constraints, options=options).fun
        for h in starts
    ]
    return min(found)


# --- constrained form -----------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [LinearCore(0.8, 0.5, "gamma"), TwoSidedLinearCore(1, 2)])
def test_risks_are_the_definitions(phi):
    generator = np.random.default_rng(0)
    p, h = generator.dirichlet(np.ones(4), 6), generator.normal(size=(6, 4)) * 3
    con, total = mc.constrained_risk(p, h, phi), mc.sum_risk(p, h, phi)
    for row in range(6):
        assert con[row] == pytest.approx(risk_as_written(p[row], h[row], phi), rel=1e-12)
        assert total[row] == pytest.approx(sum_risk_as_written(p[row], h[row], phi), rel=1e-12)
    np.testing.assert_allclose(mc.constrained_risk(p, h + 7.5, phi), con, rtol=1e-12)
    np.testing.assert_allclose(mc.sum_risk(p, h + 7.5, phi), total, rtol=1e-12)


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_constrained_optimum_is_the_minimum(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    for p in LAWS:
        best = minimised(lambda h, p=p: float(mc.constrained_risk(p, h, phi)), len(p))
        exact = float(mc.constrained_optimum(p, phi))
        assert exact <= best + 1e-12
        assert exact == pytest.approx(best, abs=2e-6 * scale)  # SLSQP's accuracy on flat tails
        assert mc.constrained_dual_optimum(p, phi) == pytest.approx(exact, rel=1e-12)


def test_constrained_optimum_by_hand():
    """q = (1/2, 3/4, 3/4), exponential: λ = 1/2, C* = (3(τ+s) + 2s·log(3/2))/2."""
    phi = LinearCore(1.5, 0.5)
    expected = (3 * 2 + 2 * 0.5 * math.log(1.5)) / 2
    assert mc.constrained_optimum((0.5, 0.25, 0.25), phi) == pytest.approx(expected, rel=1e-14)
    # its scores: the others at -τ - s·log(3/2), the best class balances them
    low = -1.5 - 0.5 * math.log(1.5)
    h = (-2 * low, low, low)
    assert mc.constrained_regret((0.5, 0.25, 0.25), h, phi) == pytest.approx(0, abs=1e-14)


def test_uniform_and_certain_laws():
    phi = LinearCore()
    assert mc.constrained_optimum(np.ones(5) / 5, phi) == pytest.approx(4 * phi(0.0), rel=1e-14)
    assert mc.constrained_optimum((0.0, 1.0, 0.0), phi) == 0
    assert mc.constrained_dual_optimum((0.0, 1.0, 0.0), phi) == 0
    near = mc.constrained_optimum((1e-9, 1 - 2e-9, 1e-9), phi)
    assert 0 < near < 1e-6


@pytest.mark.parametrize("tail", TAILS)
def test_two_classes_are_the_binary_calibration(tail):
    phi = LinearCore(1.3, 0.6, tail)
    t = np.array([0.01, 0.3, 0.9])
    p = np.stack([(1 + t) / 2, (1 - t) / 2], -1)
    np.testing.assert_allclose(mc.least_regret(p, 1, phi), phi.calibration(t), rtol=1e-11)
    np.testing.assert_allclose(mc.least_regret(p, 0, phi), 0, atol=1e-15)


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS[::2])
def test_least_regret_is_the_constrained_minimum(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    for p in LAWS:
        for k in range(1, len(p)):
            found = minimised(
                lambda h, p=p: float(mc.constrained_risk(p, h, phi)), len(p), predicted=k
            )
            expected = found - float(mc.constrained_optimum(p, phi))
            exact = float(mc.least_regret(p, k, phi))
            assert exact <= expected + 1e-11
            assert exact == pytest.approx(expected, abs=2e-6 * scale)
            assert exact >= core * (max(p) - p[k])


def test_least_regret_near_a_tie_has_the_stated_slope():
    """(Kτ + s·Σ log(q_j/q̄))/2 at a tie of two: 1.7463 for a = 0.9, K = 3."""
    delta = 1e-6
    p = ((0.9 + delta) / 2, (0.9 - delta) / 2, 0.1)
    expected = (3 + math.log(0.9 / 0.55)) / 2
    assert mc.least_regret(p, 1, LinearCore()) / delta == pytest.approx(expected, rel=1e-5)


def test_least_regret_checks_the_class():
    for k in (-1, 3):
        with pytest.raises(IndexError, match="predicted must lie in 0 … 2"):
            mc.least_regret((0.5, 0.3, 0.2), k, LinearCore())


@pytest.mark.parametrize("tail", TAILS)
def test_swap_inequality(tail):
    assert len(mc.verify_swap_inequality(tail)) == 5


def test_swap_inequality_fails_on_a_steep_tail(monkeypatch):
    right = module.TAILS["exponential"]
    wrong = module.Tail(
        right.value, lambda v, m: (1 + 2 * v) * m.exp(-v), right.excess, 1.0, right.steepness
    )
    monkeypatch.setitem(module.TAILS, "exponential", wrong)
    with pytest.raises(ArithmeticError, match="and decreasing"):
        mc.verify_swap_inequality("exponential")


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("n_classes", [2, 3, 7])
def test_attack_on_the_constrained_form_fails_closely(tail, n_classes):
    found = mc.attack_constrained(LinearCore(0.7, 1.6, tail), n_classes, trials=300, seed=3)
    assert 1 - 1e-9 <= found.ratio < 1.02
    assert found.p.shape == (n_classes,)
    assert found.predicted != found.p.argmax()


def test_attack_succeeds_where_the_constant_is_wrong(monkeypatch):
    """A regret that is half of the true one is caught."""
    honest = mc.least_regret
    monkeypatch.setattr(mc, "least_regret", lambda *a: honest(*a) / 2)
    assert mc.attack_constrained(LinearCore(), 3, trials=200).ratio < 0.6


# --- two-sided ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phi",
    [mc.SymmetricExponential(1.0, 0.8), TwoSidedLinearCore(0.9, 0.7, "gamma", 2.0)],
    ids=["unbounded", "bounded"],
)
def test_dual_optimum_of_two_sided_losses(phi):
    for p in LAWS:
        best = minimised(lambda h, p=p: float(mc.constrained_risk(p, h, phi)), len(p))
        dual = mc.constrained_dual_optimum(p, phi)
        assert dual <= best + 1e-12
        assert dual == pytest.approx(best, abs=1e-6)


def test_symmetric_exponential_is_the_definition():
    phi = mc.SymmetricExponential(1.2, 0.5)
    u = np.array([-3.0, -1.2, 0.0, 1.2, 2.0])
    left = 2.9 + 0.5 * (math.exp(1.8 / 0.5) - 1)
    expected = [left, 2.9, 1.7, 0.5, 0.5 * math.exp(-1.6)]
    np.testing.assert_allclose(phi(u), expected, rtol=1e-13)
    np.testing.assert_allclose(phi.derivative(u[[0, 1, 3]]), [-math.exp(3.6), -1, -1], rtol=1e-13)


def test_published_ratios_of_the_unbounded_left_tail():
    found = mc.constrained_two_sided_ratio(mc.SymmetricExponential(), 4)
    np.testing.assert_allclose(found.ratios, [0.035, 0.014, 0.007], atol=5e-4)
    assert found.exponent.value == pytest.approx(2, abs=2e-3)


@pytest.mark.parametrize(
    ("phi", "n_classes", "coefficient"),
    [  # ψ'²/(2·ψ'') where the tie's multiplier solves a quadratic or a cubic by hand
        (mc.SymmetricExponential(), 4, math.sqrt(2) / 2),
        (mc.SymmetricExponential(1, 2), 3, 2 ** (1 / 3) * math.exp(-1 / 6)),
        (TwoSidedLinearCore(), 4, 4 / 3),
    ],
)
def test_quadratic_coefficients_by_hand(phi, n_classes, coefficient):
    found = mc.constrained_two_sided_ratio(phi, n_classes, (1e-3, 5e-4, 2.5e-4))
    np.testing.assert_allclose(found.ratios / found.deltas, coefficient, rtol=1e-5)
    assert found.exponent.value == pytest.approx(2, abs=1e-4)


@pytest.mark.parametrize("steepening", [0.25, 1.0, 4.0])
def test_a_bounded_left_slope_fails_as_well(steepening):
    phi = TwoSidedLinearCore(steepening=steepening)
    for n_classes in (4, 5):
        found = mc.constrained_two_sided_ratio(phi, n_classes, (1e-4, 5e-5, 2.5e-5))
        assert found.exponent.value == pytest.approx(2, abs=1e-3)


def test_three_classes_survive_in_the_core():
    """Linear with slope (τ - s·log 2)/2 while s < τ/log 2; one-sided: (3τ + s·log 2)/2."""
    small = (1e-4, 5e-5, 2.5e-5)
    for phi in (mc.SymmetricExponential(), TwoSidedLinearCore()):
        found = mc.constrained_two_sided_ratio(phi, 3, small)
        np.testing.assert_allclose(found.ratios, (1 - math.log(2)) / 2, rtol=3e-3)
        assert found.exponent.value == pytest.approx(1, abs=1e-2)
    found = mc.constrained_two_sided_ratio(LinearCore(), 3, small)
    np.testing.assert_allclose(found.ratios, (3 + math.log(2)) / 2, rtol=1e-4)


def test_two_sided_tie_against_a_direct_minimiser():
    phi, delta = mc.SymmetricExponential(), 0.2
    p = ((1 + delta) / 2, (1 - delta) / 2, 0.0, 0.0)

    def risk(h):
        return float(mc.constrained_risk(p, h, phi))

    gap = minimised(risk, 4, 1, (1, 1, -1, -1)) - minimised(risk, 4, None, (1, 1, -1, -1))
    found = mc.constrained_two_sided_ratio(phi, 4, (0.2, 0.1, 0.05))
    assert found.ratios[0] * delta == pytest.approx(gap, abs=1e-6)


def test_two_sided_arguments():
    with pytest.raises(ValueError, match="n_classes=2"):
        mc.constrained_two_sided_ratio(LinearCore(), 2)
    with pytest.raises(ValueError, match=r"deltas must lie in \(0, 1\)"):
        mc.constrained_two_sided_ratio(LinearCore(), 4, (0.1, 0.2, 1.0))
    with pytest.raises(ValueError, match="one-sided LinearCore, got TwoSidedLinearCore"):
        mc.constrained_optimum((0.5, 0.5), TwoSidedLinearCore())
    with pytest.raises(ValueError, match="core must be"):
        mc.SymmetricExponential(core=0)


# --- sum form -------------------------------------------------------------------------------------


def sum_gap_numerically(a, delta, phi):
    p = np.array([(a + delta) / 2, (a - delta) / 2, 1 - a])
    return mc.sum_optimum(p, phi, 1) - mc.sum_optimum(p, phi)


def test_sum_optimum_is_the_minimum():
    for p in LAWS:
        for phi in (LinearCore(), LinearCore(0.5, 2.0, "logistic")):

            def risk(h, p=p, phi=phi):
                return float(mc.sum_risk(p, h, phi))

            for k in (None, 1, 2):
                best = minimised(risk, len(p), k)
                found = mc.sum_optimum(p, phi, k)
                assert found <= best + 1e-9
                assert found == pytest.approx(best, abs=1e-5)


def test_sum_form_symbolic():
    a, delta, s = sympy.symbols("a delta s", positive=True)
    found = mc.sum_form_gap_symbolic()
    at = {a: sympy.Rational(9, 10), s: 1}
    assert found.coefficient.subs(at) == sympy.Rational(1000, 81)
    # the gap at one point, from the risk with the scores written out by hand
    p1, p2, p3 = 0.455, 0.445, 0.1
    v1, v2, v = math.log(p1 / 0.09), math.log(p2 / 0.11), math.log(0.9 / 0.2)
    phi = LinearCore(3.0, 1.0)
    best = mc.sum_risk((p1, p2, p3), (3 + v1, 3 + v2, 0), phi)
    tie = mc.sum_risk((p1, p2, p3), (3 + v, 3 + v, 0), phi)
    gap = float(found.gap.subs({**at, delta: sympy.Rational(1, 100)}))
    assert gap == pytest.approx(float(tie - best), rel=1e-10)


def test_sum_form_symbolic_notices_a_wrong_formula(monkeypatch):
    right = mc.sum_gap_formula
    monkeypatch.setattr(mc, "sum_gap_formula", lambda *x: right(*x) + x[2] ** 2)
    with pytest.raises(ArithmeticError, match="did not simplify"):
        mc.sum_form_gap_symbolic()


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_gap_ball_is_the_minimised_gap(tail, core, scale):
    for a, delta in ((0.9, 0.01), (0.8, 0.02)):
        ball = mc.sum_form_gap_ball(a, delta, core, scale, tail)
        found = sum_gap_numerically(a, delta, LinearCore(core, scale, tail))
        assert float(ball.gap.rad()) < 1e-30
        if ball.exact:
            assert float(ball.gap.mid()) == pytest.approx(found, abs=2e-9)
        assert found <= float(ball.gap.mid()) + 2e-9


def test_gap_ball_is_an_upper_bound_beyond_the_core():
    ball = mc.sum_form_gap_ball(0.9, 0.09)
    found = sum_gap_numerically(0.9, 0.09, LinearCore())
    assert not ball.exact
    assert found < float(ball.gap.mid()) - 1e-4
    assert mc.sum_form_gap_ball(0.9, 0.04).exact
    assert not mc.sum_form_gap_ball(0.9, 0.045).exact


def test_gap_ball_holds_the_formula_and_the_limit():
    ball = mc.sum_form_gap_ball("9/10", "1/100", scale=2.0)
    formula = mc.sum_gap_formula(
        sympy.Rational(9, 10), sympy.Rational(1, 10), sympy.Rational(1, 100), 2, sympy.log
    )
    with ctx.workprec(200):
        assert abs(ball.gap - arb(str(sympy.N(formula, 60)))) < arb("1e-33")
    tiny = mc.sum_form_gap_ball(0.9, "1/1000000")
    assert float(tiny.ratio.mid()) == pytest.approx(1000 / 81, rel=1e-9)
    assert ctx.prec == 53, "the working precision is restored"


@pytest.mark.parametrize("tail", TAILS)
def test_coefficient_for_any_tail(tail):
    """2s/(a³·φ''(v)) at slope 2b/a, in the tail's own terms."""
    a, scale, ratio = 0.9, 0.7, 0.2 / 0.9
    v = float(module.inverse_slope(tail, ratio))
    bend = {
        "exponential": ratio,
        "gamma": v * math.exp(-v),
        "logistic": 2 * math.exp(-v) / (1 + math.exp(-v)) ** 2,
    }[tail]
    ball = mc.sum_form_gap_ball(a, 1e-5, 1.0, scale, tail)
    assert float(ball.ratio.mid()) == pytest.approx(2 * scale / (a**3 * bend), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": 0.6}, r"a must lie in \(2/3, 1\)"),
        ({"a": 1}, r"a must lie in \(2/3, 1\)"),
        ({"a": math.nan}, "a must be a finite number"),
        ({"delta": 0}, "delta must lie in"),
        ({"delta": 0.1}, "delta must lie in"),
        ({"a": 0.7, "delta": 0.05}, "delta must lie in"),
        ({"tail": "cauchy"}, "tail must be one of"),
    ],
)
def test_gap_ball_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        mc.sum_form_gap_ball(**arguments)


def test_counterexample():
    found = mc.certify_sum_counterexample()
    assert np.all(found.ratios * found.regrets <= found.deltas)
    assert np.all(np.diff(found.ratios) > 0)
    assert found.ratios[-1] == pytest.approx(81 / 1000 / 1e-4, rel=1e-5)
    assert np.all(found.regrets <= found.ceiling * found.deltas**2 * (1 + 1e-12))
    assert found.ceiling == pytest.approx(12.6326, abs=1e-4)
    assert found.exponent.value == pytest.approx(2, abs=5e-3)
    # and the scores that do it, evaluated: a float witness of the certified ratio
    delta, v = 1e-4, math.log(4.5)
    p = ((0.9 + delta) / 2, (0.9 - delta) / 2, 0.1)
    regret = mc.sum_risk(p, (1 + v, 1 + v, 0), LinearCore()) - mc.sum_optimum(p, LinearCore())
    assert delta / regret > 790


def test_gap_over_delta_squared_grows():
    """What the ceiling rests on: all coefficients in δ² are positive (exponential tail)."""
    x = sympy.symbols("x", positive=True)
    a, b = sympy.Rational(9, 10), sympy.Rational(1, 10)
    series = sympy.series(mc.sum_gap_formula(a, b, x, 1, sympy.log), x, 0, 13).removeO()
    coefficients = [sympy.simplify(series.coeff(x, n)) for n in range(13)]
    assert all(c == 0 for c in coefficients[1::2])
    assert coefficients[0] == 0
    assert all(c > 0 for c in coefficients[2::2])


def test_sum_constant_by_hand():
    assert mc.sum_constant(0.1) == pytest.approx(3)
    assert mc.sum_constant(0.5, core=2) == pytest.approx(0.5)
    for kappa in (0, -0.1, 0.6):
        with pytest.raises(ValueError, match="kappa="):
            mc.sum_constant(kappa)


@pytest.mark.parametrize("n_classes", [2, 3, 5])
def test_attack_on_the_sum_form_respects_the_bound(n_classes):
    for least_top in (0.52, 0.6, 0.8):
        phi = LinearCore(0.8, 1.5)
        found = mc.attack_sum(phi, n_classes, least_top, trials=15, seed=n_classes)
        assert 0.1 < found.ratio <= mc.sum_constant(least_top - 0.5, phi.core)
        assert found.p.max() >= least_top - 1e-12


def test_the_proof_of_the_sum_bound_step_by_step():
    """Raising h_m from below the prediction to τ above it gains at least τ·(2·p_m - 1)."""
    generator = np.random.default_rng(1)
    phi = LinearCore(0.7, 0.4)
    for _ in range(200):
        rest = generator.dirichlet(np.ones(4) * 0.5)
        p = np.concatenate([[0.6], 0.4 * rest])
        h = generator.normal(size=5) * 2
        h[0] = h[1:].max() - generator.exponential()  # m = 0 does not lead
        moved = h.copy()
        moved[0] = h[1:].max() + phi.core
        fall = mc.sum_risk(p, h, phi) - mc.sum_risk(p, moved, phi)
        assert fall >= phi.core * 0.2 - 1e-12


def test_corner_of_the_sum_form_at_one_half():
    """p = (1/2, 1/2 - δ, δ): the ratio tends to 1/(2s·log(2/(1 + e^(-τ/s))))."""
    p = (0.5, 0.5 - 1e-5, 1e-5)
    for core, scale in ((1, 1), (2, 1), (1, 2)):
        phi = LinearCore(core, scale)
        regret = mc.sum_optimum(p, phi, 1) - mc.sum_optimum(p, phi)
        expected = 2 * scale * math.log(2 / (1 + math.exp(-core / scale)))
        assert regret / 1e-5 == pytest.approx(expected, rel=1e-3)


def test_bounded_margins():
    found = mc.bounded_margin_example()
    assert found.coefficients == (Fraction(1, 2), Fraction(1, 5), Fraction(-7, 10))
    assert found.optima == ((1, 1, 0),)
    assert found.zero_one_regret == Fraction(1, 10)
    # above 1/3 alone: consistent
    assert mc.bounded_margin_example(("1/2", "3/10", "1/5")).zero_one_regret == 0


def test_bounded_margins_against_a_linear_program():
    p = (0.35, 0.3, 0.2, 0.15)
    found = mc.bounded_margin_example(("7/20", "3/10", "1/5", "3/20"))
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    rows = [[float(n == i) - float(n == j) for n in range(4)] for i, j in pairs]
    cost = [-(4 * x - 1) for x in p]
    best = linprog(cost, A_ub=rows, b_ub=np.ones(12), bounds=[(None, None)] * 3 + [(0, 0)])
    assert best.x == pytest.approx(found.optima[0], abs=1e-9)
    assert found.zero_one_regret == Fraction(1, 20)
    phi = LinearCore(2.0, 0.3)  # and the risk is the stated line on the core
    h = np.array([0.4, -0.9, 0.1, 1.0])
    line = 3 * phi(0.0) - h @ (4 * np.array(p) - 1)
    assert mc.sum_risk(p, h, phi) == pytest.approx(line, rel=1e-13)


@pytest.mark.parametrize("p", [("1/2",), ("1/2", "1/3"), ("3/2", "-1/2"), ("x", "1")])
def test_bounded_margins_want_a_law(p):
    with pytest.raises(ValueError, match=r"^p must be"):
        mc.bounded_margin_example(p)


def test_regret_curves():
    curves = mc.regret_curves()
    assert np.all(curves.constrained >= curves.zero_one)
    assert np.polyfit(np.log(curves.zero_one), np.log(curves.sum_form), 1)[0] == pytest.approx(
        2, abs=0.01
    )
    k = 12
    delta = curves.zero_one[k]
    assert curves.sum_form[k] == pytest.approx(
        sum_gap_numerically(0.9, delta, LinearCore()), abs=1e-9
    )
    with pytest.raises(ValueError, match="exact region"):
        mc.regret_curves(deltas=(0.01, 0.09))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.5, [1.0], [0.5, 0.6], [1.5, -0.5], [math.nan, 1.0], []])
def test_laws_are_checked(p):
    with pytest.raises(ValueError, match=r"^p must"):
        mc.constrained_optimum(p, LinearCore())


def test_scores_and_counts_are_checked():
    with pytest.raises(ValueError, match="h must be finite"):
        mc.constrained_risk((0.5, 0.5), (math.inf, 0), LinearCore())
    with pytest.raises(ValueError, match="one law"):
        mc.constrained_dual_optimum([[0.5, 0.5]], LinearCore())
    with pytest.raises(ValueError, match="without zeros"):
        mc.sum_optimum((1.0, 0.0), LinearCore())
    with pytest.raises(IndexError, match="predicted"):
        mc.sum_optimum((0.5, 0.5), LinearCore(), 2)
    with pytest.raises(ValueError, match="trials=0"):
        mc.attack_constrained(LinearCore(), 3, trials=0)
    with pytest.raises(ValueError, match="n_classes=1"):
        mc.attack_sum(LinearCore(), 1)
    with pytest.raises(ValueError, match=r"least_top=0\.4"):
        mc.attack_sum(LinearCore(), 3, 0.4)


def test_batches_and_layouts():
    phi = LinearCore()
    p = np.array([(0.5, 0.3, 0.2)] * 8).reshape(2, 4, 3)[::-1, ::2]
    assert mc.constrained_optimum(p, phi).shape == (2, 2)
    assert mc.least_regret(p, np.array([[0, 1], [2, 1]]), phi).shape == (2, 2)
    assert mc.constrained_optimum(np.empty((0, 3)), phi).shape == (0,)
    assert mc.constrained_risk(p, np.zeros(3), phi).shape == (2, 2)


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize("predicted", [None, 2])
def test_sum_optimum_with_a_tail_that_is_nearly_a_kink(scale: float, predicted: int | None) -> None:
    """As s → 0 the risk tends to the hinge's, from above by at most s for each of its terms: an
    independent bracket, by linear programming over the hinge's epigraph."""
    from scipy.optimize import linprog

    law, k = np.array([0.3, 0.25, 0.2, 0.15, 0.1]), 5
    pairs = [(i, j) for i in range(k) for j in range(k) if i != j]
    cost = np.concatenate([np.zeros(k), [law[i] for i, _ in pairs]])
    rows = np.zeros((len(pairs), k + len(pairs)))
    for n, (i, j) in enumerate(pairs):  # slack ≥ 1 - (h_i - h_j)
        rows[n, [i, j, k + n]] = -1, 1, -1
    least = [-np.ones(len(pairs))]
    if predicted is not None:  # h_j ≤ h_predicted
        order = np.zeros((k, k + len(pairs)))
        order[np.arange(k), np.arange(k)] = 1
        order[:, predicted] -= 1
        rows, least = np.vstack([rows, order]), [*least, np.zeros(k)]
    bounds = [(None, None)] * k + [(0, None)] * len(pairs)
    hinge = linprog(cost, rows, np.concatenate(least), bounds=bounds).fun
    found = mc.sum_optimum(law, LinearCore(1.0, scale), predicted)
    assert hinge - 1e-9 <= found <= hinge + scale * (k - 1)


def test_scores_of_another_length_are_refused() -> None:
    for risk in (mc.sum_risk, mc.constrained_risk, mc.constrained_regret):
        for h in ([2.0], 1.0, [1.0, 2.0]):
            with pytest.raises(ValueError, match="K = 3 scores"):
                risk([0.5, 0.3, 0.2], h, LinearCore())


def test_a_fractional_class_is_refused() -> None:
    with pytest.raises(TypeError, match="integer class"):
        mc.least_regret([0.5, 0.3, 0.2], 1.9, LinearCore())
