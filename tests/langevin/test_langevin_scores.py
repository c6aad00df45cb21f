"""Scores: against per-point formulas, derivatives of log densities, quadrature and sampling."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm
from torch import Tensor

from proofread.langevin import scores
from proofread.langevin.enclosures import LogEnclosure, ball_log_probability, trap_log_error
from proofread.langevin.scores import (
    GAUSSIAN,
    MIXTURE,
    TRAP,
    GaussianScore,
    MemorizingScore,
    MixtureScore,
    RadialScore,
    TiltedScore,
    TrapScore,
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope


def jacobian_norms(score, x: Tensor) -> Tensor:
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: score(row[None])[0]))(x)
    return torch.linalg.matrix_norm(jacobian, ord=2)


# --- naive twins: one point, as on paper ----------------------------------------------------------


def naive_trap(x, mean, centre, alpha, inner, outer):
    """Theorem 1 around a centre."""
    root, y = math.sqrt(len(x)), x - centre
    r = math.sqrt(sum(y * y))
    if r <= inner * root:
        return -alpha * y
    if r >= outer * root:
        return -(x - mean)
    psi = (outer * root - r) / (outer * root - inner * root)
    return psi * (-alpha * y) + (1 - psi) * -(x - mean)


def naive_mixture(x, means, variances, weights):
    logs = [
        math.log(w) + multivariate_normal.logpdf(x, m, v * np.eye(len(x)))
        for m, v, w in zip(means, variances, weights, strict=True)
    ]
    shares = np.exp(np.array(logs) - logsumexp(logs))
    parts = zip(shares, means, variances, strict=True)
    return sum(g * (m - x) / v for g, m, v in parts), logsumexp(logs)


def naive_law(law, d, u, w):
    """Pull and push as the documentation of ``RadialLaw`` defines them."""
    if law.kind == GAUSSIAN:
        m, variance = law.parameters
        return 1 / variance, m / variance
    if law.kind == TRAP:
        m, alpha, inner, outer = law.parameters
        psi = min(max((outer - math.sqrt(u * u + w)) / (outer - inner), 0), 1)
        return 1 + psi * (alpha - 1), (1 - psi) * m
    k = int(law.parameters[0])
    log_weight, position, variance = np.reshape(law.parameters[1:], (3, k))
    log = log_weight - ((u - position) ** 2 + w) / (2 * variance)
    g = np.exp(log - logsumexp(log))
    return sum(g / variance), sum(g * position / variance)


LINE = torch.tensor([[1.0, 2, 0], [2, 4, 0], [-1, -2, 0]], dtype=torch.float64)  # through 0
SHIFTED = LINE + torch.tensor([0.0, 0, 3])

MIXTURES = {
    "line through 0": MixtureScore(LINE, 0.7),
    "line": MixtureScore(SHIFTED, [0.5, 1.0, 2.0], [1.0, 2, 5]),
    "one": MixtureScore(SHIFTED[:1], 1.5),
    "coincident": MixtureScore(SHIFTED[[0, 0]], [0.5, 1.5]),
    "cloud": MixtureScore(2 * normal(1, 6, 3), 0.4),
    "cloud, unequal": MixtureScore(2 * normal(2, 6, 3), normal(3, 6).exp(), normal(4, 6).exp()),
    "d = 1": MixtureScore(normal(5, 7, 1), 0.1),
}
RADIAL = {
    **{k: s for k, s in MIXTURES.items() if not k.startswith("cloud")},
    "gaussian": GaussianScore(normal(6, 3), 2.0),
    "centred gaussian": GaussianScore(np.zeros(2), 0.3),
    "trap": TrapScore(normal(7, 3), 5.0, 0.5, 1.5, centre=normal(8, 3)),
    "trap, d = 1": TrapScore([2.0], 5.0, 0.5, 1.5),
    "trap at the mean": TrapScore(normal(9, 4), 0.2, 0.5, 1.5, centre=normal(9, 4)),
    "cone": TrapScore(normal(10, 3), 2.0, 0.0, 1.0),
}
OTHERS = {
    "memorizing": MemorizingScore(4 * normal(0, 5, 3), 5.0, 0.2, 0.5),
    "tilted": TiltedScore(GaussianScore(normal(11, 3)), normal(12, 3), 0.5, 2.0, 3.0),
}
ALL = {**MIXTURES, **RADIAL, **OTHERS}


def over(cases):
    return pytest.mark.parametrize("score", cases.values(), ids=cases.keys())


# --- every score ----------------------------------------------------------------------------------


@over(ALL)
def test_rows_shapes_and_types(score):
    d = score.dimension
    x = 2 * normal(20, 2, 5, d)
    expected = score(x)
    assert expected.dtype == torch.float64
    assert expected.shape == x.shape
    assert torch.equal(score(x[0, 0][None])[0], score(x[:1, :1])[0, 0])
    assert torch.allclose(score(x[1, 2]), expected[1, 2], rtol=1e-13)
    assert torch.allclose(score(x.transpose(0, 1)), expected.transpose(0, 1), rtol=1e-13)
    assert score(x[:0]).shape == (0, 5, d)
    single = score(x.float())
    assert single.dtype == torch.float32
    assert not single.requires_grad
    assert torch.allclose(single.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(score(x), expected)  # the copies in float32 change nothing


@over(ALL)
def test_derivatives_are_finite_everywhere(score):
    special = [torch.zeros(score.dimension, dtype=torch.float64)]
    special += [
        getattr(score, name) for name in ("centre", "mean", "origin") if hasattr(score, name)
    ]
    x = torch.stack(special)
    assert gradient(score, x).isfinite().all()
    assert torch.autograd.gradcheck(score, (normal(21, 3, score.dimension).requires_grad_(),))


@over(ALL)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (torch.float64, 1e200)])
def test_no_nan_far_away(score, dtype, size):
    x = torch.stack([torch.full((score.dimension,), s * size, dtype=dtype) for s in (-1, 1)])
    found = score(x)
    assert found.isfinite().all()
    assert (found * x).sum(-1).lt(0).all() or dtype == torch.float64  # the product may overflow
    assert torch.equal(found.sign(), -x.sign())


@over(ALL)
def test_wrong_rows_are_named(score):
    d = score.dimension
    with pytest.raises(ValueError, match=f"x must have {d} entries in its last dimension"):
        score(torch.zeros(2, d + 1))
    with pytest.raises(ValueError, match=f"x must have {d} entries"):
        score(torch.tensor(1.0))
    with pytest.raises(TypeError, match="float32 or float64 tensor"):
        score(torch.zeros(2, d, dtype=torch.int64))
    with pytest.raises(TypeError, match="float32 or float64 tensor"):
        score(np.zeros((2, d)))


@over({k: s for k, s in ALL.items() if k not in ("tilted",)})
def test_lipschitz_bounds_differences(score):
    """Pairs of random points, near and far: no quotient exceeds the bound."""
    x = 2 * normal(22, 4000, score.dimension)
    for size in (1e-6, 1e-2, 1.0):
        step = size * normal(23, 4000, score.dimension)
        quotient = (score(x + step) - score(x)).norm(dim=1) / step.norm(dim=1)
        assert quotient.max() <= score.lipschitz * (1 + 1e-6)


@over(RADIAL)
def test_law_and_frame_say_all(score):
    d, x = score.dimension, 2 * normal(24, 50, score.dimension)
    assert isinstance(score, RadialScore)
    assert abs(float(score.axis.norm()) - 1) < 1e-14
    for row, found in zip(x, score(x), strict=True):
        y = row - score.origin
        u = float(score.axis @ y)
        pull, push = naive_law(score.law, d, u, float((y - u * score.axis).square().sum()))
        assert torch.allclose(found, -pull * y + push * score.axis, rtol=1e-10, atol=1e-12)


@over(RADIAL)
def test_coefficients(score):
    u, w = 2 * normal(25, 30), normal(26, 30).square()
    pull, push = score.coefficients(u, w)
    expected = [
        naive_law(score.law, score.dimension, float(a), float(b)) for a, b in zip(u, w, strict=True)
    ]
    assert np.allclose(torch.stack([pull, push], 1), expected, rtol=1e-11, atol=1e-13)


def test_parameters_are_copied():
    """A caller may reuse its arrays."""
    mean, centre, points = np.ones(3), np.zeros(3), 9 * np.eye(3)
    made = [TrapScore(mean, 2.0, centre=centre), MixtureScore(points), GaussianScore(mean)]
    made += [MemorizingScore(points, 2.0, 0.5, 1.0, mean=mean)]
    x = normal(27, 4, 3)
    before = [score(x) for score in made]
    for array in (mean, centre, points):
        np.add(array, 100, out=array)
    assert all(torch.equal(score(x.clone()), y) for score, y in zip(made, before, strict=True))
    assert float(made[0].centre.abs().max()) == 0
    tensor = normal(28, 3)
    score = GaussianScore(tensor)
    tensor += 1
    assert torch.equal(score.mean, normal(28, 3))


def test_numbers_and_lists_are_float64():
    """0.1 is not the float32 next to it."""
    assert GaussianScore([0.1]).mean.tolist() == [0.1]
    assert MixtureScore([[0.1]], 0.3, 0.7).variances.tolist() == [0.3]
    rows = [torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([1.0, 5]).double()]
    assert MemorizingScore(rows, 2.0, 0.1, 0.2).points.tolist() == [[0.1, 0.2], [1, 5]]


# --- Gaussian -------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 4])
def test_gaussian(d):
    mean, x = normal(30, d), normal(31, 6, d)
    score = GaussianScore(mean.tolist(), 1.7)
    expected = multivariate_normal.logpdf(x.numpy(), mean.numpy(), 1.7 * np.eye(d))
    assert np.allclose(score.log_density(x), expected, rtol=1e-13)
    assert torch.allclose(score(x), gradient(score.log_density, x), rtol=1e-13)
    assert score.lipschitz == 1 / 1.7


@pytest.mark.parametrize(
    "score", [GaussianScore([1.0, -2.0], 3.0), MIXTURES["line"], MIXTURES["cloud, unequal"]]
)
def test_samples_and_noise(score):
    """Mean and covariance of samples of the law at time t, from samples at 0 and from its own."""
    n, t = 200_000, 0.4
    assert torch.equal(score.sample(5, 1), score.sample(5, 1))
    assert not torch.equal(score.sample(5, 1), score.sample(5, 2))
    moved = score.sample(n, 3) * math.exp(-t)
    moved += math.sqrt(-math.expm1(-2 * t)) * normal(32, n, score.dimension)
    own = score.noised(t).sample(n, 4)
    size = float(moved.var(0).max())
    assert torch.allclose(moved.mean(0), own.mean(0), atol=6 * math.sqrt(2 * size / n))
    assert torch.allclose(torch.cov(moved.T), torch.cov(own.T), atol=15 * size / math.sqrt(n))
    twice, once = score.noised(0.3).noised(0.1), score.noised(t)
    x = normal(33, 8, score.dimension)
    assert torch.allclose(twice(x), once(x), rtol=1e-12)
    assert torch.allclose(score.noised(0)(x), score(x), rtol=1e-12)


def test_noise_has_its_closed_form():
    """Means shrink by e^(−t), variances become 1 + (v − 1)e^(−2t), weights stay."""
    t = math.log(2)
    mixture = MixtureScore([[4.0, 8], [0, 0]], [3.0, 0.2], [1.0, 3]).noised(t)
    assert torch.allclose(mixture.means, torch.tensor([[2.0, 4], [0, 0]]).double())
    assert mixture.variances.tolist() == pytest.approx([1.5, 0.8])
    assert mixture.weights.tolist() == pytest.approx([0.25, 0.75])
    gaussian = GaussianScore([4.0], 3.0).noised(t)
    assert (gaussian.mean.item(), gaussian.variance) == pytest.approx((2, 1.5))


# --- mixture --------------------------------------------------------------------------------------


@over(MIXTURES)
def test_mixture(score):
    x = 2 * normal(40, 25, score.dimension)
    parameters = [part.numpy() for part in (score.means, score.variances, score.weights)]
    expected = [naive_mixture(row, *parameters) for row in x.numpy()]
    assert np.allclose(score(x), np.stack([e[0] for e in expected]), rtol=1e-10, atol=1e-12)
    assert np.allclose(score.log_density(x), [e[1] for e in expected], rtol=1e-12, atol=1e-12)
    assert torch.allclose(score(x), gradient(score.log_density, x), rtol=1e-10, atol=1e-11)
    assert abs(float(score.weights.sum()) - 1) < 1e-14


def test_mixture_density_integrates_to_1():
    score = MixtureScore([[-1.0], [2.0], [0.5]], [0.3, 1.0, 0.05], [3, 1, 2])

    def density(x):
        return float(score.log_density(torch.tensor([x], dtype=torch.float64)).exp())

    assert abs(quad(density, -9, 11, points=[-1, 0.5, 2], epsabs=1e-11)[0] - 1) < 1e-9


@pytest.mark.parametrize("offset", [0.0, 4.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.float64, 1e-11)])
def test_optimum_of_denoising(dtype, tolerance, offset):
    """Thousand components in 50 dimensions at a low noise, near the points and between them."""
    points, variance = normal(41, 1000, 50) + offset, 0.05
    score = MixtureScore(points, variance)
    x = (points[:64] + 0.2 * normal(42, 64, 50)).to(dtype)
    x[:8] = ((points[:8] + points[8:16]) / 2).to(dtype)
    distance = (x.double()[:, None] - points).square().sum(-1)
    shares = torch.softmax(-distance / (2 * variance), 1)
    expected = (shares @ points - x) / variance
    found = score(x)
    assert found.dtype == dtype
    assert score.law is None
    assert (found - expected).norm(dim=1).max() <= tolerance * expected.norm(dim=1).mean()


@pytest.mark.parametrize("size", [1e3, 1e12])
@over({k: MIXTURES[k] for k in ("line", "cloud", "cloud, unequal")})
def test_far_from_a_mixture(score, size):
    """The widest component wins; among equal ones the score is −(x − one of the means)/variance."""
    x = size * normal(43, 5, 3)
    expected = -x / score.variances.max()
    assert ((score(x) - expected).norm(dim=1) <= 20 * score.means.norm(dim=1).max()).all()
    assert torch.allclose(score(x), expected, rtol=1e-1 if size < 1e4 else 1e-9)


def test_lines_are_recognised():
    through, line = MIXTURES["line through 0"], MIXTURES["line"]
    assert float(through.origin.norm()) == 0
    assert sorted(abs(p) for p in through.law.parameters[4:7]) == pytest.approx(
        [math.sqrt(5), math.sqrt(5), 2 * math.sqrt(5)]
    )
    assert torch.allclose(line.origin, torch.tensor([0.0, 0, 3], dtype=torch.float64))
    for score in (through, line):
        positions = torch.tensor(score.law.parameters[4:7], dtype=torch.float64)
        assert torch.allclose(score.origin + positions[:, None] * score.axis, score.means)
    tiny = MixtureScore(1e-14 * normal(44, 3, 2))  # a triangle however small
    assert tiny.law is None
    assert MIXTURES["cloud"].law is None
    far = MixtureScore(1e6 + 1e-7 * normal(48, 3, 2), 1e-14)  # also far from 0
    assert far.law is None
    share = normal(49, 9, 1)
    for offset in (0.0, 1e6):  # rounded coordinates make no triangle
        assert MixtureScore(offset + share * normal(50, 1, 40)).law.kind == MIXTURE
    assert float(MIXTURES["coincident"].origin.norm()) == 0
    assert MixtureScore(1e6 + 1e-3 * normal(45, 2, 30)).law.kind == MIXTURE  # two points
    with pytest.raises(ValueError, match="not on one line"):
        tiny.coefficients(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("name", ["line", "cloud, unequal"])
def test_mixture_in_blocks(name, monkeypatch):
    score, x = MIXTURES[name], normal(46, 2, 17, 3)
    expected = score(x), score.log_density(x)
    monkeypatch.setattr(scores, "CHUNK", 5 * len(score.means))
    assert torch.allclose(score(x), expected[0], rtol=1e-13)
    assert torch.allclose(score.log_density(x), expected[1], rtol=1e-13)


def test_mixture_lipschitz():
    """Two equal components: the bound is attained halfway; K: never exceeded."""
    two = MixtureScore([[-1.0, 1], [2, 5]], 0.5)
    halfway = jacobian_norms(two, two.means.mean(0)[None])
    assert two.lipschitz == pytest.approx(25 / (4 * 0.25) - 2) == pytest.approx(float(halfway))
    assert MixtureScore([[0.0, 0]], 0.25).lipschitz == pytest.approx(4)
    for seed in range(4):
        means, variances = 2 * normal(seed, 4, 2), (0.7 * normal(seed + 10, 4)).exp()
        equal = MixtureScore(means, 0.3)
        # between and around all pairs of components
        pairs = list(itertools.product(range(4), repeat=2))
        share = torch.linspace(0, 1, 81, dtype=torch.float64)[:, None]
        x = torch.cat([means[i] + share * (means[j] - means[i]) for i, j in pairs])
        x = torch.cat([x, 3 * normal(seed + 20, 3000, 2)])
        assert 0.2 * equal.lipschitz < jacobian_norms(equal, x).max() <= equal.lipschitz
        mixed = MixtureScore(means, variances, [1.0, 2, 3, 4])
        assert 0.1 * mixed.lipschitz < jacobian_norms(mixed, x).max() <= mixed.lipschitz
    # a narrow component that wins only near its mean, and one that wins in a large ball
    for v, weights in [(0.01, [0.5, 1.0]), (0.5, [1.0, 1e-60])]:
        score = MixtureScore([[0.0], [1.0]], [v, 1.0], weights)
        x = torch.linspace(-40, 40, 40_001, dtype=torch.float64)[:, None]
        assert 0.2 * score.lipschitz < jacobian_norms(score, x).max() <= score.lipschitz


def test_lipschitz_of_very_many_components():
    """Twice the radius of the cloud stands in for its diameter."""
    points = normal(47, 4200, 1)
    found = MixtureScore(points, 0.5).lipschitz
    exact = (float(points.max() - points.min()) / 1.0) ** 2 - 2
    assert exact <= found <= 4 * exact


# --- trap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 7])
@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_trap(d, alpha):
    mean, centre = 3 * normal(50, d), normal(51, d)
    score = TrapScore(mean, alpha, 0.8, 1.6, centre=centre)
    direction = normal(52, 40, d)
    radius = torch.linspace(0, 2.4, 40, dtype=torch.float64) * math.sqrt(d)
    x = centre + radius[:, None] * direction / direction.norm(dim=1, keepdim=True)
    arguments = mean.numpy(), centre.numpy(), alpha, 0.8, 1.6
    expected = np.stack([naive_trap(row, *arguments) for row in x.numpy()])
    assert np.allclose(score(x), expected, rtol=1e-12, atol=1e-12)
    assert np.allclose(score.error(x), expected - (mean - x).numpy(), rtol=1e-9, atol=1e-11)
    assert torch.equal(score.inside(x), radius <= 0.8 * math.sqrt(d))
    assert score.radius == pytest.approx(0.8 * math.sqrt(d))
    assert torch.equal(score.target(x), mean - x)


def test_standard_trap():
    score = TrapScore.standard(9)
    assert (score.alpha, score.inner, score.outer, score.radius) == (10, 4, 5, 12)
    assert score.mean.tolist() == [21] + 8 * [0]
    assert float(score.centre.norm()) == 0
    other = TrapScore.standard(4, alpha=2, distance=3, inner=1, outer=1.5)
    assert other.law == (TRAP, (6, 2, 2, 3))


def test_trap_is_translation_invariant():
    mean, move = 2 * normal(53, 6), 5 * normal(54, 6)
    here = TrapScore(mean, 7.0, 0.5, 1.0)
    there = TrapScore(mean + move, 7.0, 0.5, 1.0, centre=move)
    x = 2 * normal(55, 100, 6)
    assert torch.allclose(here(x), there(x + move), rtol=1e-10, atol=1e-10)
    assert there.lipschitz == pytest.approx(here.lipschitz)
    assert there.lp_error(2).low == pytest.approx(here.lp_error(2).low, rel=1e-12)


def test_float32_on_a_long_axis():
    """Far along the axis a float32 ‖y‖² − u² would lose ``w``; here it is a sum of squares."""
    mean = torch.zeros(3, dtype=torch.float64)
    mean[0] = 1.0
    seen = []

    class Spy(RadialScore):
        def coefficients(self, u, w):
            seen.append(w)
            return super().coefficients(u, w)

    gaussian = GaussianScore(mean)
    spy = Spy(gaussian.origin, gaussian.axis, gaussian.law, 1.0)
    spy(torch.tensor([[3e4, 0.3, 0.4]]))
    assert float(seen[0]) == pytest.approx(0.25, rel=1e-6)


LIPSCHITZ = [
    # d, distance, alpha, inner, outer
    (1, 7.0, 10.0, 4.0, 5.0),
    (2, 7.0, 10.0, 4.0, 5.0),
    (5, 0.0, 10.0, 4.0, 5.0),
    (5, 7.0, 0.05, 4.0, 5.0),
    (3, 1.0, 100.0, 0.2, 0.3),
    (3, 0.1, 1.1, 0.9, 1.0),  # the largest norm is not on the axis
    (2, 3.0, 1.0, 1.0, 2.0),
    (4, 2.0, 3.0, 0.0, 1.0),
    (1, 0.2, 0.3, 0.5, 1.5),
]


@pytest.mark.parametrize(("d", "distance", "alpha", "inner", "outer"), LIPSCHITZ)
def test_trap_lipschitz(d, distance, alpha, inner, outer):
    """Never exceeded by Jacobians or differences, and within 3 % of the largest that is found."""
    score = TrapScore.standard(d, alpha, distance, inner, outer)
    n, root = 3000, math.sqrt(d)
    cosine = torch.linspace(-1, 1, 61, dtype=torch.float64).repeat(n // 61 + 1)[:n]
    radius = torch.linspace(inner, outer, n, dtype=torch.float64) * root
    radius[:122] = torch.tensor([inner + 1e-9, outer - 1e-9]).repeat_interleave(61) * root
    x = torch.zeros(n, d, dtype=torch.float64)
    x[:, 0] = radius * (cosine if d > 1 else cosine.sign() + (cosine == 0))
    if d > 1:
        x[:, 1] = radius * (1 - cosine**2).clamp_min(0).sqrt()
    largest = float(jacobian_norms(score, x).max())
    assert largest <= score.lipschitz * (1 + 1e-9)
    assert score.lipschitz <= 1.03 * largest
    if d == 1:
        assert score.lipschitz == pytest.approx(largest, rel=1e-6)
    step = 1e-5 * normal(56, n, d)
    for y in (x, 1.5 * outer * normal(57, n, d)):
        quotient = (score(y + step) - score(y)).norm(dim=1) / step.norm(dim=1)
        assert quotient.max() <= score.lipschitz * (1 + 1e-6)
    assert score.lipschitz >= max(1, alpha)


@pytest.mark.parametrize("p", [1, 2, 3.5])
@pytest.mark.parametrize("alpha", [0.3, 6.0])
def test_trap_error_by_sampling(p, alpha):
    score = TrapScore([1.5, -1.0], alpha, 0.4, 1.1, centre=[0.2, 0.1])
    power = score.error(score.target.sample(400_000, 5)).norm(dim=1) ** p
    value, spread = float(power.mean()), float(power.std()) / math.sqrt(len(power))
    found = score.lp_error(p)
    assert math.exp(p * found.low) <= value + 5 * spread
    assert math.exp(p * found.high) >= value - 5 * spread
    assert math.exp(p * found.high) <= 1.5 * math.exp(p * found.low)
    assert spread < 0.01 * value


def test_trap_error_supremum():
    score = TrapScore([1.5, -1.0], 6.0, 0.4, 1.1, centre=[0.2, 0.1])
    sizes = score.error(3 * normal(58, 200_000, 2)).norm(dim=1)
    assert 0.99 * math.exp(score.lp_error(math.inf).high) <= sizes.max()
    assert sizes.max() <= math.exp(score.lp_error(math.inf).high)


@pytest.mark.parametrize(("alpha", "inner", "outer"), [(10.0, 4.0, 5.0), (0.3, 4.0, 5.0)])
def test_error_allows_for_the_rounded_distance(alpha, inner, outer):
    """‖mean‖ = 7√d is no float: the enclosure for the vector holds that for the exact number."""
    d = 100_001
    found = TrapScore(torch.full((d,), 7.0), alpha, inner, outer).lp_error(2)
    exact = trap_log_error(d, None, alpha, inner, outer, 2, distance=7.0)
    assert found.low <= exact.low <= exact.high <= found.high
    assert found.width < 1e-5 < -found.high


def test_error_without_error():
    found = TrapScore([1.0, 2.0], 1.0, centre=[1.0, 2.0]).lp_error(2)
    assert found == LogEnclosure(-math.inf, -math.inf)


# --- memorizing -----------------------------------------------------------------------------------


POINTS = normal(60, 30, 64)
MEAN = 0.1 * normal(61, 64)
MEMORY = MemorizingScore(POINTS, 50.0, 0.3, 0.5, mean=MEAN)


def test_memorizing_is_each_trap_near_its_point_and_exact_elsewhere():
    direction = normal(62, 30, 64)
    direction /= direction.norm(dim=1, keepdim=True)
    for share in (0.0, 0.1, 0.3, 0.35, 0.45, 0.5):
        x = POINTS + share * 8 * direction
        found = MEMORY(x)
        for i in range(30):
            trap = MEMORY.trap(i)
            assert torch.allclose(found[i], trap(x[i]), rtol=1e-11, atol=1e-11)
            arguments = MEAN.numpy(), POINTS[i].numpy(), 50.0, 0.3, 0.5
            assert np.allclose(found[i], naive_trap(x[i].numpy(), *arguments), atol=1e-10)
    fresh = normal(63, 500, 64)
    assert torch.equal(MEMORY(fresh), MEAN - fresh)
    both = torch.cat([fresh[:3], POINTS[:2]])  # the branch with traps, exact rows included
    assert torch.equal(MEMORY(both)[:3], MEAN - fresh[:3])
    assert MEMORY(both)[3:].abs().max() == 0
    assert torch.equal(MEMORY.target(fresh), MEAN - fresh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_nearest(offset, dtype, monkeypatch):
    """Brute force; a common offset far from 0 does not hurt, nor do small blocks."""
    points = normal(64, 40, 16) + offset  # more than 25, beyond which cdist multiplies
    score = MemorizingScore(points, 2.0, 0.05, 0.1)
    x = (points[:12].reshape(3, 4, 16) + 0.3 * normal(65, 3, 4, 16)).to(dtype)
    distances = (x.double()[:, :, None] - points).norm(dim=-1)
    tolerance = 1e-6 * (1 + offset) if dtype == torch.float32 else 1e-15 * (1 + offset) * 10
    for chunk in (scores.CHUNK, 40):
        monkeypatch.setattr(scores, "CHUNK", chunk)
        index, distance = score.nearest(x)
        assert torch.equal(index, distances.argmin(-1))
        assert index.shape == (3, 4)
        assert distance.dtype == dtype
        assert torch.allclose(distance.double(), distances.min(-1).values, atol=tolerance * 4)


def test_memorizing_lipschitz():
    expected = max(MEMORY.trap(i).lipschitz for i in range(30))
    assert MEMORY.lipschitz == pytest.approx(expected, rel=1e-9)
    assert MEMORY.lipschitz >= expected
    line = MemorizingScore([[-2.0], [3.0]], 4.0, 0.5, 1.0)
    assert line.lipschitz == pytest.approx(max(line.trap(i).lipschitz for i in (0, 1)), rel=1e-12)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_memorizing_error_is_a_sum(p):
    each = [MEMORY.trap(i).lp_error(p) for i in range(30)]
    found = MEMORY.lp_error(p)
    assert found.low == pytest.approx(logsumexp([p * e.low for e in each]) / p, rel=1e-12)
    assert found.high == pytest.approx(logsumexp([p * e.high for e in each]) / p, rel=1e-12)
    assert MEMORY.trap(3).lp_error(p) == each[3]


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("mean", [0.0, 0.3])
def test_error_of_many_points_by_interpolation(p, mean):
    """The chords enclose the direct sum, and closely."""
    points, centre = normal(66, 60, 48), torch.full((48,), mean, dtype=torch.float64)
    score = MemorizingScore(points, 30.0, 0.25, 0.4, mean=centre)
    found = score.lp_error(p)
    each = [score.trap(i).lp_error(p) for i in range(60)]
    low, high = (logsumexp([p * getattr(e, end) for e in each]) / p for end in ("low", "high"))
    assert found.low <= low <= high <= found.high
    assert found.width < 0.02


def test_error_of_many_points_at_one_distance():
    points = 10.0 * torch.cat([torch.eye(32), -torch.eye(32)])
    score = MemorizingScore(points, 5.0, 0.2, 0.5)
    found, one = score.lp_error(2), score.trap(0).lp_error(2)
    assert found.low <= one.low + math.log(64) / 2 <= found.high
    assert found.width < 1e-4


@pytest.mark.parametrize(
    ("alpha", "p", "at_mean"), [(0.5, 2, False), (5.0, 3, False), (5.0, 2, True)]
)
def test_error_of_many_points_beyond_the_reach_of_chords(alpha, p, at_mean):
    """No convexity is proved for α < 1 and odd p, and log 0 is no number: summed one by one."""
    points = normal(67, 45, 12)
    points[0] *= 0 if at_mean else 1
    score = MemorizingScore(points, alpha, 0.1, 0.2)
    each = [score.trap(i).lp_error(p) for i in range(45)]
    found = score.lp_error(p)
    assert found.low == pytest.approx(logsumexp([p * e.low for e in each]) / p, rel=1e-12)
    assert found.high == pytest.approx(logsumexp([p * e.high for e in each]) / p, rel=1e-12)


def test_memory_is_bounded(monkeypatch):
    """No table of distances is larger than a block, be there many points or many rows."""
    points = normal(68, 4096, 64)
    sizes, cdist = [], torch.cdist

    def spy(a, b):
        found = cdist(a, b)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(torch, "cdist", spy)
    score = MemorizingScore(points, 50.0, 0.1, 0.2)
    x = torch.cat([points[:1], points[4000:] + 0.01, points.flip(0)[:1100] + 9])
    found = score(x)
    assert max(sizes) <= scores.CHUNK
    assert len(sizes) == 4 + 2
    assert torch.allclose(found[1:97], torch.tensor(-0.5).double(), rtol=1e-10)
    assert torch.equal(found[97:], -x[97:])


def test_memorizing_supremum():
    expected = max(MEMORY.trap(i).lp_error(math.inf).high for i in range(30))
    assert MEMORY.lp_error(math.inf).high == pytest.approx(expected, rel=1e-12)


def test_memorizing_error_by_sampling():
    score = MemorizingScore([[0.3, 0.2], [2.0, -1.0], [-1.5, 0.5]], 6.0, 0.3, 0.6)
    x = score.target.sample(400_000, 6)
    power = (score(x) - score.target(x)).norm(dim=1).square()
    spread = float(power.std()) / math.sqrt(len(power))
    assert abs(math.exp(2 * score.lp_error(2).low) - float(power.mean())) < 5 * spread
    assert spread < 0.01 * float(power.mean())


# --- tilted ---------------------------------------------------------------------------------------


def psi(r, inner, outer):
    return np.clip((outer - r) / (outer - inner), 0, 1)


TILTS = [
    # mean, centre, inner, outer, height
    (0.0, 3.0, 0.5, 1.0, 9.0),
    (1.0, -1.0, 0.0, 2.0, 1.0),
    (0.0, 0.2, 0.5, 1.5, 2.0),
    (0.0, 4.0, 1.0, 2.0, 12.0),
]


@pytest.mark.parametrize(("mean", "centre", "inner", "outer", "height"), TILTS)
def test_tilt_in_one_dimension(mean, centre, inner, outer, height):
    """Both certificates against quadrature."""
    score = TiltedScore(GaussianScore([mean]), [centre], inner, outer, height)
    ends = [centre + side * radius for side in (-1, 1) for radius in (inner, outer)]
    cuts = sorted({mean - 12, mean + 12, *ends})

    def integral(f):
        pieces = itertools.pairwise(cuts)
        return sum(quad(f, a, b, epsabs=1e-15, epsrel=1e-12, limit=200)[0] for a, b in pieces)

    def tilted(x):
        return norm.pdf(x, mean) * math.exp(height * psi(abs(x - centre), inner, outer))

    z = integral(tilted)
    tv = integral(lambda x: abs(tilted(x) / z - norm.pdf(x, mean))) / 2
    assert score.limit_tv() <= tv + 1e-6
    if height > 5:
        assert score.limit_tv() >= 0.6 * tv > 0.1
    for p in (1, 2, 3.5):
        shell = sum(
            norm.cdf(centre + b, mean) - norm.cdf(centre + a, mean)
            for a, b in ((inner, outer), (-outer, -inner))
        )
        found = score.lp_error(p)
        expected = math.log(height / (outer - inner)) + math.log(shell) / p
        assert found.low - 1e-12 <= expected <= found.high + 1e-12
        assert found.width < 1e-9
    x = torch.linspace(-5, 5, 31, dtype=torch.float64)[:, None] + 0.01
    logs = [math.log(tilted(float(a) + 1e-6)) - math.log(tilted(float(a) - 1e-6)) for a in x]
    assert np.allclose(score(x)[:, 0], np.array(logs) / 2e-6, atol=1e-4)


def test_tilt_is_the_gradient_of_its_log_density():
    d, mean, centre = 4, normal(70, 4), normal(71, 4)
    score = TiltedScore(GaussianScore(mean), centre, 0.7, 2.5, 3.0)

    def log_density(x):
        r = (x - centre).norm(dim=-1)
        return score.target.log_density(x) + 3.0 * ((2.5 - r) / 1.8).clamp(0, 1)

    x = centre + 1.2 * normal(72, 200, d)
    r = (x - centre).norm(dim=1)
    assert (r < 0.7).any()
    assert (r > 2.5).any()
    assert ((r > 0.7) & (r < 2.5)).any()
    assert torch.allclose(score(x), gradient(log_density, x), rtol=1e-11, atol=1e-12)
    error = (score(x) - score.target(x)).norm(dim=1)
    assert torch.allclose(error, torch.where((r > 0.7) & (r < 2.5), 3 / 1.8, 0.0).double())
    assert score.lipschitz == math.inf
    assert score.lp_error(math.inf).high >= math.log(3 / 1.8)


def test_shells_far_out_and_around_everything():
    """The shell's mass where both balls hold nearly nothing, and where they hold nearly all."""
    around = TiltedScore(GaussianScore([0.0]), [0.0], 12.0, 13.0, 1.0).lp_error(1)
    exact = math.log(2 * (norm.sf(12) - norm.sf(13)))
    assert around.low - 1e-9 <= exact <= around.high + 1e-9
    assert around.width < 1e-9
    away = TiltedScore(GaussianScore([0.0, 0]), [30.0, 0], 1.0, 2.0, 1.0).lp_error(1)
    large, small = ball_log_probability(2, 30.0, 2.0), ball_log_probability(2, 30.0, 1.0)
    exact = large.low + math.log1p(-math.exp(small.low - large.low))
    assert away.low - 1e-9 <= exact <= away.high + 1e-9
    assert away.width < 1e-9
    thin = TiltedScore(GaussianScore([0.0]), [3.0], 1.0, math.nextafter(1.0, 2), 1e-9).lp_error(2)
    assert thin.low < thin.high < 10  # no digits, no error


def test_no_tilt():
    score = TiltedScore(GaussianScore([0.0, 1.0]), [1.0, 1.0], 0.5, 1.0, 0.0)
    x = normal(73, 5, 2)
    assert torch.equal(score(x), score.target(x))
    assert score.lp_error(2) == LogEnclosure(-math.inf, -math.inf)
    assert score.limit_tv() == 0


def test_high_tilt_in_a_far_ball():
    """Small L² error and a limit that is elsewhere: the statement of theorem 11."""
    score = TiltedScore(GaussianScore(torch.zeros(3)), [9.0, 0, 0], 1.0, 2.0, 60.0)
    assert score.limit_tv() > 0.999
    assert score.lp_error(2).high < -8
    weak = TiltedScore(score.target, score.centre, 1.0, 2.0, 30.0)
    assert weak.limit_tv() < 0.1


# --- bad input ------------------------------------------------------------------------------------

ONE, TWO, NAN = [1.0], [0.0, 1.0], [0.0, math.nan]
UNIT = GaussianScore(TWO)
BAD = {
    "NaN mean": (lambda: GaussianScore(NAN), "mean must be finite"),
    "empty mean": (lambda: GaussianScore([]), "mean must be a vector"),
    "matrix mean": (lambda: TrapScore([TWO], 2.0), "mean must be a vector"),
    "variance 0": (lambda: GaussianScore(TWO, 0), "variance must be positive"),
    "variance NaN": (lambda: GaussianScore(TWO, math.nan), "variance must be positive"),
    "time": (lambda: UNIT.noised(-1), "time must be finite and at least 0"),
    "time NaN": (lambda: MIXTURES["line"].noised(math.nan), "time must be finite"),
    "no means": (lambda: MixtureScore(torch.zeros(0, 3)), r"means must be \[n, d\]"),
    "vector of means": (lambda: MixtureScore(TWO), r"means must be \[n, d\]"),
    "variances": (lambda: MixtureScore([TWO, TWO], [1.0, 2, 3]), r"variances must be .* \[2\]"),
    "negative variance": (lambda: MixtureScore([TWO], [-1.0]), "variances must be positive"),
    "weights": (lambda: MixtureScore([TWO, TWO], 1.0, [1.0, 0]), "weights must be positive"),
    "alpha 0": (lambda: TrapScore(TWO, 0.0), "alpha must be positive"),
    "alpha inf": (lambda: TrapScore(TWO, math.inf), "alpha must be positive and finite"),
    "radii": (lambda: TrapScore(TWO, 2.0, 5.0, 5.0), "0 <= inner < outer"),
    "radius NaN": (lambda: TrapScore(TWO, 2.0, math.nan, 5.0), "0 <= inner < outer"),
    "centre": (lambda: TrapScore(TWO, 2.0, centre=ONE), "centre has 1 entries and mean 2"),
    "dimension": (lambda: TrapScore.standard(0), "dimension=0 must be at least 1"),
    "power": (lambda: TrapScore(TWO, 2.0).lp_error(0.5), "p must be at least 1"),
    "no points": (lambda: MemorizingScore(torch.zeros(0, 2), 2.0, 0.1, 0.2), "points must be"),
    "NaN point": (lambda: MemorizingScore([NAN], 2.0, 0.1, 0.2), "points must be finite"),
    "mean": (lambda: MemorizingScore([TWO], 2.0, 0.1, 0.2, mean=ONE), "mean has 1 entries"),
    "coincident": (
        lambda: MemorizingScore([TWO, [5.0, 5], TWO], 2.0, 0.1, 0.2),
        "points 0 and 2 coincide: remove duplicates",
    ),
    "target": (lambda: TiltedScore(GaussianScore(TWO, 2.0), TWO, 1, 2, 3), "must have variance 1"),
    "tilt centre": (lambda: TiltedScore(UNIT, ONE, 1, 2, 3), "centre has 1 entries, not 2"),
    "tilt radii": (lambda: TiltedScore(UNIT, TWO, 2, 1, 3), "0 <= inner < outer"),
    "height": (lambda: TiltedScore(UNIT, TWO, 1, 2, -3), "height must be finite and at least 0"),
    "tilt power": (lambda: TiltedScore(UNIT, TWO, 1, 2, 3).lp_error(math.nan), "p must be at le"),
}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianScore("mean"), "mean must be numbers"),
        (lambda: MixtureScore([ONE, TWO]), "means must be numbers, in rows of one length"),
        (lambda: GaussianScore(TWO, None), "variance must be a number, not None"),
        (lambda: TrapScore(TWO, "strong"), "alpha must be a number, not 'strong'"),
        (lambda: TrapScore(TWO, 2.0, None), "inner must be a number, not None"),
        (lambda: TiltedScore(UNIT, TWO, 1, TWO, 3), "outer must be a number"),
    ],
)
def test_what_is_no_number_is_named(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("block", [None, 3 * 4])
def test_overlapping_balls(block, monkeypatch):
    """The two nearest points, their distance, and an outer radius that works when taken."""
    if block:
        monkeypatch.setattr(scores, "CHUNK", block)
    points = torch.tensor([[0.0, 0, 0, 0], [7.0, 0, 0, 0], [7.0, 2.99999, 0, 0], [0, 9, 0, 0]])
    with pytest.raises(ValueError, match=r"points 1 and 2 are 2\.99999 apart") as caught:
        MemorizingScore(points, 2.0, 0.5, 1.0)
    text = str(caught.value)
    largest = float(text.rpartition("at most ")[2].partition(",")[0])
    assert 0.749 < largest < 2.99999 / 4
    assert MemorizingScore(points, 2.0, 0.5, largest).outer == largest


@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_two_close_points_are_found_among_many(offset):
    """Far from 0 too, where products of coordinates have no digits for such a distance."""
    points = normal(80, 500, 32) + offset
    points[411] = points[17] + 2.0**-10
    with pytest.raises(ValueError, match=r"points 17 and 411 are 0\.0055\d+ apart"):
        MemorizingScore(points, 2.0, 0.1, 0.2)


# --- precision, history and counts ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_half_precision_is_an_error(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 4, dtype=dtype)
    for score in (TrapScore.standard(4), GaussianScore(torch.zeros(4))):
        with pytest.raises(TypeError, match=r"x\.float\(\)"):
            score(x)


def test_results_do_not_depend_on_earlier_calls() -> None:
    for score in (TrapScore.standard(3), MixtureScore(torch.eye(3)), GaussianScore(torch.ones(3))):
        with torch.inference_mode():
            score(torch.ones(2, 3))
        x = torch.ones(2, 3, requires_grad=True)
        score(x).sum().backward()
        assert x.grad is not None


def test_lipschitz_is_never_too_small_after_an_overflow() -> None:
    with np.errstate(all="ignore"):
        assert TrapScore([1e160, 0.0], 2.0).lipschitz > 1e150
        assert TrapScore([1.0, 0.0], 2.0, 1e-200, 2e-200).lipschitz > 1e150


def test_counts_of_samples_and_dimensions() -> None:
    for score in (GaussianScore(torch.zeros(3)), MixtureScore(torch.eye(3))):
        assert score.sample(0, 0).shape == (0, 3)
        assert torch.equal(score.sample(2, np.int64(3)), score.sample(2, 3))
        with pytest.raises(ValueError, match="seed must be at least 0"):
            score.sample(1, -1)
        with pytest.raises(TypeError, match="n must be an integer"):
            score.sample(1.5, 0)
    with pytest.raises(TypeError, match="dimension must be an integer"):
        TrapScore.standard(2.5)
    with pytest.raises(ValueError, match="distance=-7"):
        TrapScore.standard(3, distance=-7)
