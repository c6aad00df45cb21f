"""``LinearCore`` against closed forms, sympy, ball arithmetic and direct minimisation."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import sympy
import torch
from flint import arb, ctx
from scipy.optimize import minimize_scalar

from proofread.linear_core import LinearCore, certify_linear_bound, reference_surrogate
from proofread.linear_core import surrogates as module
from proofread.linear_core.surrogates import TwoSidedLinearCore, inverse_slope

TAILS = ("exponential", "gamma", "logistic")
REFERENCES = ("hinge", "logistic", "squared hinge", "smoothed hinge")
SETTINGS = [(tail, core, scale) for tail in TAILS for core, scale in [(1, 1), (1.3, 0.7), (0.2, 3)]]


def naive(u: float, core: float, scale: float, tail: str) -> float:
    """The definition, as the chapter states it."""

    def after(v: float) -> float:
        return {
            "exponential": scale * math.exp(-v),
            "gamma": scale * (2 + v) * math.exp(-v),
            "logistic": 2 * scale * math.log(1 + math.exp(-v)),
        }[tail]

    return after(0) + core - u if u <= core else after((u - core) / scale)


def minimised(phi, t: float) -> float:
    """``C(0) - min C`` by direct minimisation: the definition of the calibration transform."""
    eta = (1 + t) / 2

    def risk(u: float) -> float:
        return eta * phi(u) + (1 - eta) * phi(-u)

    best = minimize_scalar(risk, bounds=(0, 80), method="bounded", options={"xatol": 1e-11})
    return risk(0.0) - min(best.fun, risk(0.0))


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_values_match_the_definition(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    for u in (-30.0, -1.0, 0.0, core - 1e-9, core, core + 1e-9, core + 0.3, core + 9.0):
        assert phi(u) == pytest.approx(naive(u, core, scale, tail), rel=1e-13)


def test_known_numbers():
    phi = LinearCore()
    assert phi(np.array([-1.0, 0.0, 1.0])).tolist() == [3.0, 2.0, 1.0]
    assert phi(2.0) == pytest.approx(math.exp(-1), rel=1e-15)
    assert LinearCore(1, 1, "gamma")(1.0) == 2.0
    assert LinearCore(1, 1, "logistic")(1.0) == pytest.approx(2 * math.log(2), rel=1e-15)


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_derivative_matches_autograd_and_stays_in_range(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    u = torch.linspace(-5, 12, 501, dtype=torch.float64)
    u = torch.cat([u, torch.tensor([core], dtype=torch.float64)]).requires_grad_()
    (slope,) = torch.autograd.grad(phi(u).sum(), u)
    torch.testing.assert_close(slope, phi.derivative(u.detach()), rtol=1e-12, atol=1e-15)
    assert slope.min() == -1
    assert slope.max() <= 0
    np.testing.assert_allclose(phi.derivative(u.detach().numpy()), slope.numpy(), rtol=1e-12)


@pytest.mark.parametrize("tail", TAILS)
def test_smoothness_is_the_lipschitz_constant_of_the_derivative(tail):
    phi = LinearCore(0.8, 0.4, tail)
    u = np.linspace(0, 6, 400_001)
    steepest = np.max(np.diff(phi.derivative(u)) / np.diff(u))
    assert steepest <= phi.smoothness * (1 + 1e-8)
    assert steepest == pytest.approx(phi.smoothness, rel=1e-4)
    expected = {"exponential": 2.5, "gamma": 2.5 / math.e, "logistic": 1.25}[tail]
    assert phi.smoothness == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("tail", TAILS)
def test_sympy_proves_smoothness_and_convexity(tail):
    u, core, scale = sympy.symbols("u tau s", positive=True)
    (line, _), (after, _) = LinearCore(tail=tail).symbolic(u, core, scale).args
    jumps = [
        sympy.simplify((sympy.diff(after, u, n) - sympy.diff(line, u, n)).subs(u, core))
        for n in range(3)
    ]
    assert jumps[:2] == [0, 0]  # C¹
    assert (jumps[2] == 0) == (tail == "gamma")  # C² for the gamma tail alone
    v = sympy.symbols("v", nonnegative=True)
    bend = sympy.simplify(sympy.diff(after, u, 2).subs(u, core + scale * v))
    assert bend.is_nonnegative or sympy.simplify(bend.rewrite(sympy.exp)).is_nonnegative


def test_symbolic_uses_the_exact_parameters():
    u = sympy.symbols("u")
    expression = LinearCore(0.5, 0.25).symbolic(u)
    assert expression.subs(u, 0) == sympy.Rational(3, 4)
    assert expression.subs(u, 1) == sympy.exp(-2) / 4


@pytest.mark.parametrize("tail", TAILS)
def test_extreme_margins_without_warnings(tail):
    phi = LinearCore(1, 0.01, tail)
    u = np.array([-1e4, 1e4, np.inf, -np.inf, np.nan, -1e300, 1e300])
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error")
        value, slope = phi(u), phi.derivative(u)
    expected = [phi.stitch + 1 + 1e4, 0, 0, np.inf, np.nan, 1e300, 0]
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(slope, [-1, 0, 0, -1, np.nan, -1, 0])
    np.testing.assert_array_equal(phi(torch.from_numpy(u)).numpy(), expected)
    np.testing.assert_array_equal(phi.derivative(torch.from_numpy(u)).numpy(), slope)


def test_kinds_and_dtypes_are_kept():
    phi = LinearCore()
    assert isinstance(phi(1), float)
    assert isinstance(phi.derivative(0.5), float)
    assert phi(np.ones((2, 3), dtype=np.float32)).dtype == np.float32
    assert phi(np.arange(3)).dtype == np.float64
    assert phi(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert phi(np.empty((0, 4))).shape == (0, 4)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"core": 0}, "core"),
        ({"core": -1.0}, "core"),
        ({"core": math.nan}, "core"),
        ({"core": math.inf}, "core"),
        ({"scale": 0.0}, "scale"),
        ({"scale": -2}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"tail": "cauchy"}, "tail"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        LinearCore(**arguments)


# --- calibration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_calibration_is_the_minimised_regret(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    for t in (0.01, 0.1, 0.3, 0.5, 0.9, 0.999):
        assert phi.calibration(t) == pytest.approx(minimised(phi, t), rel=1e-8, abs=1e-12)
    assert phi.calibration(0.0) == 0
    assert phi.calibration(1.0) == pytest.approx(phi(0.0), rel=1e-15)


def test_calibration_of_the_exponential_tail_as_published_on_paper():
    core, scale = 1.7, 0.6
    t = np.linspace(0.001, 0.999, 333)
    odds = np.log((1 + t) / (1 - t))
    expected = scale + core - (1 - t) / 2 * (2 * scale + 2 * core + scale * odds)
    np.testing.assert_allclose(LinearCore(core, scale).calibration(t), expected, rtol=1e-11)
    ratios = LinearCore().calibration(np.array([0.01, 0.1, 0.3, 0.9])) / [0.01, 0.1, 0.3, 0.9]
    np.testing.assert_allclose(ratios, [1.01, 1.10, 1.28, 1.84], atol=0.006)


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_calibration_near_zero_is_the_line(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    t = np.array([1e-300, 1e-20, 1e-16])
    np.testing.assert_allclose(phi.calibration(t) / t, core, rtol=1e-6)
    assert phi.consistency_constant == pytest.approx(1 / core, rel=1e-15)


@pytest.mark.parametrize("tail", TAILS)
def test_calibration_lies_above_the_line_and_is_continuous_at_one(tail):
    phi = LinearCore(0.7, 1.9, tail)
    t = np.linspace(0, 1, 10_001)
    transform = phi.calibration(t)
    assert np.all(transform >= 0.7 * t)
    assert np.all(np.diff(transform, 2) >= -1e-13)
    assert phi.calibration(1 - 1e-13) == pytest.approx(phi.calibration(1.0), rel=1e-10)


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_ball_symbol_and_float_agree(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    t = sympy.symbols("t", positive=True)
    for value in (0.03125, 0.25, 0.75, 0.96875):  # exact in binary
        ball = phi.calibration_ball(value)
        assert float(ball.rad()) < 1e-12
        assert phi.calibration(value) == pytest.approx(float(ball.mid()), rel=1e-12)
        symbol = phi.calibration_symbolic(t).subs(t, sympy.Rational(value))
        assert float(symbol.evalf(30)) == pytest.approx(float(ball.mid()), rel=1e-12)
    assert phi.calibration_ball(0) == 0
    assert phi.calibration_ball(1).overlaps(arb(phi.calibration(1.0)) + arb(0, 1e-12))


def test_gamma_calibration_across_the_switch_of_formulas():
    phi = LinearCore(1.0, 1.0, "gamma")
    ctx.prec = 200
    try:
        for t in (1e-12, 1e-7, 0.99e-4, 1.01e-4, 1e-3):
            expected = float(phi.calibration_ball(t).mid())
            assert phi.calibration(t) == pytest.approx(expected, rel=1e-11)
    finally:
        ctx.prec = 53


@pytest.mark.parametrize("t", [-0.1, 1.5, math.nan, np.array([0.5, 2.0])])
@pytest.mark.parametrize("phi", [LinearCore(), reference_surrogate("hinge")])
def test_calibration_rejects_what_is_no_gap(phi, t):
    with pytest.raises(ValueError, match=r"t must lie in \[0, 1\]"):
        phi.calibration(t)


# --- the certificate ------------------------------------------------------------------------------


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_certificate_is_sound_and_tight(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    bound = certify_linear_bound(phi)
    # least value of 𝒯'': 27/16 at t = 1/3; for the logistic tail at t = (2√7 - 1)/9
    t = (2 * math.sqrt(7) - 1) / 9
    least = 4 / ((1 - t * t) * (1 + 3 * t)) if tail == "logistic" else 27 / 16
    assert bound.ratio == 1
    assert bound.curvature <= least * scale
    assert bound.curvature == pytest.approx(least * scale, rel=2e-6)
    grid = np.linspace(1e-6, 1, 4001)
    line = core * grid + bound.curvature * grid**2 / 2
    assert np.all(phi.calibration(grid) >= line * (1 - 1e-12))
    assert len(bound.identities) == 5


def test_certificate_fails_on_a_wrong_tail(monkeypatch):
    right = module.TAILS["exponential"]
    wrong = module.Tail(
        value=lambda v, m: m.exp(-2 * v),  # slope -2 at the stitch
        slope=right.slope,
        excess=right.excess,
        curvature=1.0,
        steepness=right.steepness,
    )
    monkeypatch.setitem(module.TAILS, "exponential", wrong)
    with pytest.raises(ArithmeticError, match="slope is minus the derivative"):
        certify_linear_bound(LinearCore())


def test_certificate_fails_on_a_wrong_curvature(monkeypatch):
    right = module.TAILS["exponential"]
    wrong = module.Tail(right.value, right.slope, right.excess, 1.0, (3, right.steepness[1]))
    monkeypatch.setitem(module.TAILS, "exponential", wrong)
    with pytest.raises(ArithmeticError, match="T''"):
        certify_linear_bound(LinearCore())


def test_polynomial_bound_is_an_upper_bound():
    top, pieces = module._upper_bound((1, 1, -1, -1), 1e-9)  # 32/27 at t = 1/3
    assert arb(32) / 27 <= top
    assert float(top) == pytest.approx(32 / 27, rel=1e-8)
    assert pieces < 5000


def test_the_constant_is_approached():
    """One point, η → 1/2, h → 0⁻: the 0-1 regret is (1/τ) of the surrogate's in the limit."""
    phi = LinearCore(0.5, 2.0)
    ratios = [t / phi.calibration(t) for t in (0.1, 1e-3, 1e-6)]
    assert ratios == sorted(ratios)
    assert ratios[-1] < phi.consistency_constant == 2
    assert ratios[-1] == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("core", "scale"), [(0.01, 5.0), (3.0, 0.02), (40.0, 7.0)])
def test_certificate_at_other_parameters(tail, core, scale):
    """Only s enters the curvature; the linear part is τ, however short."""
    phi = LinearCore(core, scale, tail)
    bound = certify_linear_bound(phi)
    assert bound.curvature == pytest.approx(
        scale * certify_linear_bound(LinearCore(1, 1, tail)).curvature, rel=1e-12
    )
    t = np.concatenate([np.geomspace(1e-9, 0.1, 200), np.linspace(0.1, 1, 200)])
    line = core * t + bound.curvature * t**2 / 2
    assert np.all(phi.calibration(t) >= line * (1 - 1e-11))


@pytest.mark.parametrize("tail", TAILS)
def test_inverse_slope(tail):
    ratio = np.array([1.0, 1 - 1e-9, 0.7, 1e-5])
    v = inverse_slope(tail, ratio)
    np.testing.assert_allclose(module.TAILS[tail].slope(v, np), ratio, rtol=1e-12)
    assert inverse_slope(tail, 0.0) == np.inf
    for bad in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="ratio must lie"):
            inverse_slope(tail, bad)


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_best_margin_is_the_minimiser(tail, core, scale):
    phi = LinearCore(core, scale, tail)
    assert phi.best_margin(0.0) == core
    assert phi.best_margin(1.0) == math.inf
    for t in (1e-6, 0.3, 0.99):
        slope = phi.derivative(phi.best_margin(t))
        assert slope == pytest.approx(-(1 - t) / (1 + t), rel=1e-11)


# --- two-sided ------------------------------------------------------------------------------------

STEEPENINGS = (0.3, 1.0, 4.0)


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_two_sided_values(tail, core, scale):
    """Right of -τ the one-sided loss; left of it, the integral of the stated slope."""
    phi, one = TwoSidedLinearCore(core, scale, tail, 2.0), LinearCore(core, scale, tail)
    u = np.linspace(-core, 9, 50)
    np.testing.assert_array_equal(phi(u), one(u))
    shape = module.TAILS[tail]
    for v in (0.1, 1.0, 6.0):
        grid = (np.arange(20_000) + 0.5) / 20_000 * v
        area = np.mean(1 + 2 * (1 - shape.slope(grid, np))) * v * scale
        assert phi(-core - scale * v) == pytest.approx(one(-core) + area, rel=1e-8)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("steepening", STEEPENINGS)
def test_two_sided_slope_is_bounded_and_smooth(tail, steepening):
    phi = TwoSidedLinearCore(0.8, 0.5, tail, steepening)
    u = np.linspace(-12, 8, 400_001)
    slope = phi.derivative(u)
    assert np.all(np.diff(slope) >= -1e-15)
    assert slope[0] == pytest.approx(-(1 + steepening), abs=1e-7)
    assert np.all(slope >= -(1 + steepening))
    assert np.all(slope[np.abs(u) <= 0.8] == -1)
    steepest = np.max(np.diff(slope) / np.diff(u))
    assert steepest == pytest.approx(phi.smoothness, rel=1e-3)
    assert steepest <= phi.smoothness * (1 + 1e-7)
    x = torch.tensor([-3.0, -0.8, -0.2, 0.8, 2.0], dtype=torch.float64, requires_grad=True)
    (auto,) = torch.autograd.grad(phi(x).sum(), x)
    torch.testing.assert_close(auto, phi.derivative(x.detach()), rtol=1e-13, atol=0)
    np.testing.assert_allclose(phi(x.detach().numpy()), phi(x).detach().numpy(), rtol=1e-15)


@pytest.mark.parametrize("tail", TAILS)
def test_two_sided_stitches_by_sympy(tail):
    core, scale = sympy.symbols("tau s", positive=True)
    u = sympy.symbols("u", real=True)
    phi = TwoSidedLinearCore(tail=tail, steepening=0.5)
    (left, _), (line, _), _ = phi.symbolic(u, core, scale).args
    jumps = [
        sympy.simplify((sympy.diff(left, u, n) - sympy.diff(line, u, n)).subs(u, -core))
        for n in range(3)
    ]
    assert jumps[:2] == [0, 0]
    assert (jumps[2] == 0) == (tail == "gamma")
    exact = TwoSidedLinearCore(0.5, 0.25, tail, 0.5)
    assert float(exact.symbolic(u).subs(u, -2)) == pytest.approx(exact(-2.0), rel=1e-14)


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
@pytest.mark.parametrize("steepening", STEEPENINGS)
def test_two_sided_calibration(tail, core, scale, steepening):
    phi = TwoSidedLinearCore(core, scale, tail, steepening)
    t = sympy.symbols("t", positive=True)
    for value in (0.03125, 0.25, 0.75, 0.96875):
        transform = phi.calibration(value)
        assert transform == pytest.approx(minimised(phi, value), rel=1e-8)
        assert transform > core * value
        assert phi.calibration_ball(value).overlaps(arb(transform) + arb(0, 1e-12))
        symbol = phi.calibration_symbolic(t).subs(t, sympy.Rational(value))
        assert float(symbol.evalf(30)) == pytest.approx(transform, rel=1e-12)
        u = phi.best_margin(value)
        stationary = (1 + value) * phi.derivative(u) - (1 - value) * phi.derivative(-u)
        assert stationary == pytest.approx(0, abs=1e-12)
    assert phi.calibration(0.0) == 0
    assert phi.calibration_ball(0) == 0
    assert phi.calibration(1.0) == pytest.approx(phi(0.0), rel=1e-15)
    assert phi.calibration(1e-12) == pytest.approx(core * 1e-12, rel=1e-6)
    assert phi.consistency_constant == pytest.approx(1 / core)


@pytest.mark.parametrize("tail", TAILS)
def test_two_sided_certificate(tail):
    phi = TwoSidedLinearCore(0.7, 1.4, tail, 2.0)
    bound = certify_linear_bound(phi)
    assert bound.ratio == 1
    assert bound.curvature == pytest.approx(
        certify_linear_bound(LinearCore(0.7, 1.4, tail)).curvature / 3, rel=1e-12
    )
    t = np.linspace(1e-3, 1, 2001)
    assert np.all(np.diff(phi.calibration(t), 2) >= (bound.curvature * 0.999) * (t[1] - t[0]) ** 2)


def test_two_sided_edges():
    phi = TwoSidedLinearCore(1, 0.01)
    u = np.array([-np.inf, np.inf, np.nan, -1e300])
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise"):
        warnings.simplefilter("error")
        np.testing.assert_array_equal(phi(u), [np.inf, 0, np.nan, 2e300])
        np.testing.assert_array_equal(phi.derivative(u), [-2, 0, np.nan, -2])
    np.testing.assert_array_equal(phi(torch.from_numpy(u)).numpy(), phi(u))
    assert isinstance(phi(-3), float)
    assert phi(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"^steepening must be"):
            TwoSidedLinearCore(steepening=bad)
    for bad in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"t must lie in \[0, 1\]"):
            phi.calibration_ball(bad)


# --- reference surrogates -------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_calibration_is_the_minimised_regret(name):
    phi = reference_surrogate(name)
    for t in (0.01, 0.1, 0.5, 0.9):
        assert phi.calibration(t) == pytest.approx(minimised(phi, t), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_derivative(name):
    phi = reference_surrogate(name)
    u = np.linspace(-4, 4, 164) + 0.0123  # off the kinks
    slope = (phi(u + 1e-6) - phi(u - 1e-6)) / 2e-6
    np.testing.assert_allclose(phi.derivative(u), slope, atol=1e-7)
    if math.isfinite(phi.smoothness):
        steepest = np.max(np.abs(np.diff(phi.derivative(np.linspace(-4, 4, 80_001)))) / 1e-4)
        assert steepest == pytest.approx(phi.smoothness, rel=1e-6)


def test_reference_rates():
    """Linear for the hinge, quadratic transforms (square-root bounds) for the smooth ones."""
    t = 1e-3
    assert reference_surrogate("hinge").calibration(t) == t
    assert reference_surrogate("logistic").calibration(t) / t**2 == pytest.approx(0.5, rel=1e-6)
    assert reference_surrogate("squared hinge").calibration(t) / t**2 == pytest.approx(1)
    assert reference_surrogate("smoothed hinge").calibration(t) / t**2 == pytest.approx(1, rel=2e-3)
    assert reference_surrogate("logistic").calibration(1.0) == pytest.approx(math.log(2))


def test_unknown_reference_is_named():
    with pytest.raises(ValueError, match="name must be one of"):
        reference_surrogate("ramp")


@pytest.mark.parametrize("tail", sorted(TAILS))
@pytest.mark.parametrize("convert", [torch.tensor, np.asarray])
def test_a_scale_below_the_dtype_is_the_hinge(tail, convert):
    """1e-300 is zero in single precision, which would be 0/0 at u = τ."""
    phi = LinearCore(1.0, 1e-300, tail)
    margins = convert([0.5, 1.0, 1.5])
    margins = margins.float() if isinstance(margins, torch.Tensor) else margins.astype(np.float32)
    assert phi(margins).tolist() == pytest.approx([0.5, 0, 0], abs=1e-30)
    assert phi.derivative(margins).tolist() == pytest.approx([-1, -1, 0])


@pytest.mark.parametrize(("tail", "core", "scale"), SETTINGS)
def test_the_binary_constant_is_one_over_core_to_nine_digits(tail, core, scale):
    """``t/𝒯(t)`` rises to 1/τ as t → 0 (the gamma tail's like √t), here by 600-bit balls."""
    bits, ctx.prec = ctx.prec, 600
    try:
        t = arb(10) ** -24
        needed = t / LinearCore(core, scale, tail).calibration_ball(t)
        assert needed < 1 / arb(core)  # approached, not attained
        assert float(needed) == pytest.approx(1 / core, rel=1e-9)
    finally:
        ctx.prec = bits
