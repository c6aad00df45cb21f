"""Score networks against plain loops and closed forms; distances against their definitions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from proofread.langevin import learned
from proofread.langevin.distances import (
    gaussian_kl,
    gaussian_kl_floor,
    mode_weights,
    wasserstein2,
)
from proofread.langevin.learned import (
    ScoreNetworks,
    dsm_loss,
    empirical_scores,
    gaussian_fits,
    langevin_all,
    memorization,
    train_scores,
    trap_scores,
)
from proofread.langevin.learned_study import (
    DiffusionSetting,
    StartsSetting,
    diffusion_times,
    geometric_mean_ratio,
    learned_diffusion_study,
    moments,
    reverse_diffusion,
    score_errors,
    starts_study,
)
from proofread.langevin.samplers import DivergenceError, diffusion_sampler
from proofread.langevin.scores import GaussianScore, MemorizingScore, MixtureScore

SMALL = {"steps": 30, "width": 8, "noise": 0.5}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noise_of(seed: int, purpose: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """What the generator of network 0 draws, shape by shape."""
    (generator,) = learned.generators_of(seed, 1, purpose, torch.device("cpu"))
    return [torch.randn(shape, generator=generator).double() for shape in shapes]


def by_hand(size: int, d: int, levels: tuple[float, ...], seed: int = 0) -> ScoreNetworks:
    """Networks with all weights drawn at random."""
    inputs, w = d + (len(levels) > 1), 5
    shapes = [(inputs, w), (1, w), (w, w), (1, w), (w, d), (1, d)]
    weights = [normal(size, *shape, seed=seed + k) for k, shape in enumerate(shapes)]
    weights.append(normal(size, len(levels), seed=seed + 9))
    centre, spread = normal(size, 1, d, seed=seed + 10), 1 + torch.rand(size, 1, 1).double()
    return ScoreNetworks(tuple(weights), centre, spread, levels)


def gaussian_networks(mean: Tensor, variance: float, levels: tuple[float, ...]) -> ScoreNetworks:
    """Two networks with F = 0 and g = 1: the exact scores of N(mean, variance I) at each noise."""
    nets = by_hand(2, len(mean), levels)
    weights = tuple(torch.zeros_like(w) for w in nets.weights[:-1])
    spread = torch.full((2, 1, 1), math.sqrt(variance), dtype=torch.float64)
    gains = torch.ones_like(nets.weights[-1])
    return ScoreNetworks((*weights, gains), mean.expand(2, 1, -1), spread, levels)


# --- distances ------------------------------------------------------------------------------------


def test_gaussian_kl_is_the_divergence_of_the_fit():
    x = normal(40, 4) @ normal(4, 4, seed=1) + 3
    mean, root = normal(4, seed=2), normal(4, 4, seed=3)
    covariance = root @ root.T + torch.eye(4)
    fit = MultivariateNormal(x.mean(0), torch.cov(x.T))
    expected = kl_divergence(fit, MultivariateNormal(mean, covariance))
    assert gaussian_kl(x, mean, covariance) == pytest.approx(float(expected), rel=1e-10)
    biased = MultivariateNormal(x.mean(0), torch.cov(x.T, correction=0))
    expected = kl_divergence(biased, MultivariateNormal(torch.full((4,), 2.0), 3 * torch.eye(4)))
    assert gaussian_kl(x, 2.0, 3.0, unbiased=False) == pytest.approx(float(expected), rel=1e-6)


def test_gaussian_kl_of_an_exact_sample():
    d, n, law = 3, 8, MultivariateNormal(torch.ones(3).double(), 2 * torch.eye(3).double())
    torch.manual_seed(0)
    values = [gaussian_kl(law.sample((n,)), 1.0, 2.0) for _ in range(3000)]
    error = np.std(values) / math.sqrt(len(values))
    assert gaussian_kl_floor(d, n) == pytest.approx(np.mean(values), abs=4 * error)
    assert gaussian_kl_floor(50, 10**6) == pytest.approx(50 * 53 / 4e6, rel=1e-3)


def test_wasserstein2_on_a_line_sorts():
    a, b = normal(50, 1), normal(50, 1, seed=1).exp()
    expected = (a.sort(0).values - b.sort(0).values).square().mean().sqrt()
    assert wasserstein2(a, b) == pytest.approx(float(expected), rel=1e-12)


def test_wasserstein2_is_the_least_over_all_matchings():
    a, b = normal(6, 3), normal(6, 3, seed=1)
    costs = [(a - b[list(p)]).square().sum(1).mean() for p in itertools.permutations(range(6))]
    assert wasserstein2(a, b) == pytest.approx(math.sqrt(min(costs)), rel=1e-12)
    assert wasserstein2(a, a.flip(0)) == 0.0
    shift = torch.tensor([3.0, 4.0, 0.0])
    assert wasserstein2(a, (a + shift).flip(0)) == pytest.approx(5.0, rel=1e-12)


def test_mode_weights_by_densities():
    means, variances, weights = normal(3, 2), torch.tensor([0.5, 1.0, 2.0]), [0.2, 0.3, 0.5]
    x = 2 * normal(500, 2, seed=1)
    logs = [
        math.log(w) + MultivariateNormal(m, v * torch.eye(2).double()).log_prob(x)
        for m, v, w in zip(means, variances.double(), weights, strict=True)
    ]
    expected = torch.bincount(torch.stack(logs).argmax(0), minlength=3) / 500
    torch.testing.assert_close(mode_weights(x, means, variances, weights), expected.double())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_kl(normal(4, 4), 0.0, 1.0), "more than 4 points, got 4"),
        (lambda: gaussian_kl(normal(9, 1).expand(9, 2), 0.0, 1.0), "hyperplane"),
        (lambda: gaussian_kl(normal(9, 2), 0.0, -1.0), "positive definite"),
        (lambda: gaussian_kl(normal(9, 2), torch.zeros(3), 1.0), r"mean must be .*\[2\]"),
        (lambda: gaussian_kl(normal(9, 2) / 0, 0.0, 1.0), "samples must be finite"),
        (lambda: gaussian_kl_floor(3, 3), "n=3 must exceed"),
        (lambda: wasserstein2(normal(3, 2), normal(4, 2)), "must match in shape"),
        (lambda: wasserstein2(normal(0, 2), normal(0, 2)), "points in it"),
        (lambda: wasserstein2(torch.zeros(5000, 1), torch.zeros(5000, 1)), "thin them"),
        (lambda: mode_weights(normal(3, 2), normal(2, 3)), "2 coordinates, got 3"),
        (lambda: mode_weights(normal(3, 2), normal(2, 2), [1.0, 0.0]), "variances must be pos"),
        (lambda: mode_weights(normal(3, 2), normal(2, 2), 1.0, [1.0] * 3), "hold 2"),
    ],
)
def test_distances_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- networks -------------------------------------------------------------------------------------


def plain_denoiser(nets: ScoreNetworks, s: int, x: Tensor, level: int) -> Tensor:
    """One network at one point, as the docstring has it."""
    w1, b1, w2, b2, w3, b3, g = (w[s] for w in nets.weights)
    c, tau, sigma = nets.centre[s, 0], nets.spread[s, 0, 0], nets.levels[level]
    r = math.sqrt(tau**2 + sigma**2)
    logs = np.log(nets.levels)
    u = (x - c) / r
    if len(nets.levels) > 1:
        u = torch.cat([u, torch.tensor([(logs[level] - logs.mean()) / logs.std(ddof=1)])])

    def silu(z: Tensor) -> Tensor:
        return z / (1 + torch.exp(-z))

    out = silu(silu(u @ w1 + b1[0]) @ w2 + b2[0]) @ w3 + b3[0]
    return c + g[level] * tau**2 / r**2 * (x - c) + sigma * tau / r * out


@pytest.mark.parametrize("levels", [(0.4,), (3.0, 0.4, 0.1)])
def test_networks_are_what_they_say(levels):
    nets, x = by_hand(2, 3, levels), normal(2, 7, 3, seed=20)
    level = len(levels) - 1
    expected = torch.stack(
        [torch.stack([plain_denoiser(nets, s, p, level) for p in x[s]]) for s in range(2)]
    )
    torch.testing.assert_close(nets.denoise(x, level), expected)
    each = torch.full((2, 7), level)
    torch.testing.assert_close(nets.denoise(x, each), expected)
    scores = (expected - x) / levels[level] ** 2
    torch.testing.assert_close(nets.evaluate(x, levels[level]), scores)
    one = nets.score(1, levels[level])
    torch.testing.assert_close(one(x[1].view(7, 1, 3)), scores[1].view(7, 1, 3))
    torch.testing.assert_close(one(x[1, 0]), scores[1, 0])
    assert one.dimension == 3
    assert nets.to(torch.float32).at(levels[level])(x.float()).dtype == torch.float32


def test_lipschitz_bounds_the_jacobian():
    nets = by_hand(2, 3, (2.0, 0.4))
    for index, noise in itertools.product(range(2), nets.levels):
        score = nets.score(index, noise)
        level = nets.level(noise)

        def function(x: Tensor, one=score.networks, level=level, noise=noise) -> Tensor:
            return (one.denoise(x.view(1, 1, 3), level).view(3) - x) / noise**2

        jacobians = [torch.autograd.functional.jacobian(function, x) for x in 3 * normal(50, 3)]
        largest = max(float(torch.linalg.matrix_norm(j, 2)) for j in jacobians)
        assert 0.01 * score.lipschitz < largest <= score.lipschitz


def test_loss_and_its_gradient():
    nets = by_hand(2, 3, (2.0, 0.4))
    clean, noise = normal(2, 6, 3, seed=30), normal(2, 6, 3, seed=31)
    level = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0]])

    def plain(gain: Tensor) -> Tensor:
        changed = ScoreNetworks((*nets.weights[:-1], gain), nets.centre, nets.spread, nets.levels)
        total = torch.zeros(2, dtype=torch.float64)
        for s, i in itertools.product(range(2), range(6)):
            k = int(level[s, i])
            sigma, tau = nets.levels[k], nets.spread[s, 0, 0]
            x = clean[s, i] + sigma * noise[s, i]
            error = plain_denoiser(changed, s, x, k) - clean[s, i]
            total[s] += error.square().mean() * (1 / sigma**2 + 1 / tau**2) / 6
        return total

    torch.testing.assert_close(
        learned._weighted_loss(nets, clean, noise, level), plain(nets.weights[-1])
    )
    gains = nets.weights[-1].clone().requires_grad_()
    moved = ScoreNetworks((*nets.weights[:-1], gains), nets.centre, nets.spread, nets.levels)
    learned._weighted_loss(moved, clean, noise, level).sum().backward()
    for s, k in itertools.product(range(2), range(2)):
        step = torch.zeros(2, 2).double()
        step[s, k] = 1e-6
        slope = (plain(nets.weights[-1] + step) - plain(nets.weights[-1] - step)).sum() / 2e-6
        assert float(gains.grad[s, k]) == pytest.approx(float(slope), rel=1e-5)


# --- training -------------------------------------------------------------------------------------


def plain_training(x: Tensor, validation: Tensor, steps: int, rate: float, decay: float) -> dict:
    """Network 0 of seed 0 with Adam written out; checks the held-out loss before each step."""
    n, d = x.shape
    width, sigma, tau = 8, 0.5, (x - x.mean(0)).square().mean().sqrt()
    w1, w2 = noise_of(0, learned.TRAIN, (d, width), (width, width))
    weights = [
        w1 * math.sqrt(2 / d),
        torch.zeros(1, width),
        w2 * math.sqrt(2 / width),
        *(torch.zeros(1, width), torch.zeros(width, d), torch.zeros(1, d)),
        torch.ones(1),
    ]
    weights = [w.double()[None].requires_grad_() for w in weights]
    draws = noise_of(0, learned.TRAIN, (d, width), (width, width), *[(n, d)] * steps)[2:]
    held = validation.repeat(4, 1)
    (held_noise,) = noise_of(0, learned.HELD_OUT, held.shape)
    nets = ScoreNetworks(tuple(weights), x.mean(0)[None, None], tau.view(1, 1, 1), (sigma,))

    def loss(clean: Tensor, noise: Tensor) -> Tensor:
        error = nets.denoise((clean + sigma * noise)[None], 0)[0] - clean
        return error.square().mean() * (1 / sigma**2 + 1 / tau**2)

    first = [torch.zeros_like(w) for w in weights]
    second = [torch.zeros_like(w) for w in weights]
    losses, looks, kept, ramp = [], [], [], math.ceil(0.05 * steps)
    for k in range(steps + 1):
        looks.append(loss(held, held_noise).item())
        kept.append([w.detach().clone() for w in weights])
        if k == steps:
            break
        value = loss(x, draws[k])
        losses.append(value.item())
        share = (k + 1) / (ramp + 1)
        if k >= ramp:
            share = (1 + math.cos(math.pi * (k - ramp) / (steps - ramp))) / 2
        for i, g in enumerate(torch.autograd.grad(value, weights)):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.99 * second[i] + 0.01 * g**2
            move = first[i] / (1 - 0.9 ** (k + 1))
            move = move / ((second[i] / (1 - 0.99 ** (k + 1))).sqrt() + 1e-8)
            shrink = {0: decay, 2: decay, 4: decay, 6: learned.SKIP_DECAY}.get(i, 0.0)
            with torch.no_grad():
                weights[i] -= rate * share * (move + shrink * weights[i])
    best = int(np.argmin(looks))
    return {"losses": losses, "looks": looks, "best": best, "kept": kept}


def test_training_and_early_stopping_are_the_plain_loop():
    x, validation = normal(2, 12, 3), normal(2, 9, 3, seed=1)
    training = train_scores(
        x, **SMALL, learning_rate=0.05, weight_decay=0.3, validation=validation, check_every=1
    )
    plain = plain_training(x[0], validation[0], 30, 0.05, 0.3)
    torch.testing.assert_close(training.losses[:, 0], torch.tensor(plain["losses"]).double())
    torch.testing.assert_close(training.held_out[:, 0], torch.tensor(plain["looks"]).double())
    assert training.checked == tuple(range(31))
    best = plain["best"]
    assert 0 < best < 30
    assert int(training.best_step[0]) == best
    assert training.best_step.tolist() == training.held_out.argmin(0).tolist()
    for k in range(7):
        torch.testing.assert_close(training.early.weights[k][:1], plain["kept"][best][k])
        torch.testing.assert_close(training.final.weights[k][:1], plain["kept"][-1][k])


@pytest.mark.parametrize("noise", [0.5, (2.0, 0.5)])
@pytest.mark.parametrize("batch", [None, 24, 7])
def test_networks_do_not_know_of_each_other(noise, batch):
    x, validation = normal(3, 12, 4), normal(3, 5, 4, seed=1)
    both = train_scores(x, **{**SMALL, "noise": noise}, batch=batch, validation=validation, seed=5)
    for s in range(3):
        part = slice(s, s + 1)
        alone = train_scores(
            x[part],
            **{**SMALL, "noise": noise},
            batch=batch,
            validation=validation[part],
            seed=5 + s,
        )
        for kind in ("final", "early"):
            ours, theirs = getattr(both, kind).select(s), getattr(alone, kind)
            for a, b in zip(ours.weights, theirs.weights, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_training_is_reproducible_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    x, calls = normal(2, 10, 3), []
    a = train_scores(x, **SMALL, seed=3, progress=calls.append)
    assert torch.equal(before, torch.random.get_rng_state())
    assert calls == list(range(1, 31))
    b, c = train_scores(x, **SMALL, seed=3), train_scores(x, **SMALL, seed=4)
    assert all(torch.equal(p, q) for p, q in zip(a.final.weights, b.final.weights, strict=True))
    assert not torch.equal(a.losses, c.losses)
    assert a.early is None
    assert a.best_step.numel() == 0
    with torch.no_grad():  # it needs gradients, and turns them on itself
        torch.testing.assert_close(train_scores(x, **SMALL, seed=3).losses, a.losses)


def test_starts_are_the_scores_they_name():
    x, y = normal(2, 20, 3) + 1, normal(2, 5, 3, seed=1)
    for noise in (0.3, 2.0):
        kept = {
            start: train_scores(
                *(x,), steps=1, width=4, noise=(0.3, 2.0), start=start, learning_rate=1e-12
            ).final.evaluate(y, noise)
            for start in ("gaussian", "zero")
        }
        torch.testing.assert_close(kept["zero"], torch.zeros_like(y), atol=1e-8, rtol=0)
        torch.testing.assert_close(kept["gaussian"], gaussian_fits(x, noise)(y), rtol=1e-6, atol=0)


def test_a_large_sample_teaches_the_score_of_its_law():
    mean, variance, sigma = torch.tensor([1.0, -2.0]), 0.5, 0.7
    x = mean + math.sqrt(variance) * normal(2, 4000, 2)
    training = train_scores(x, noise=sigma, steps=250, width=16, batch=4000, start="zero")
    y = mean + math.sqrt(variance + sigma**2) * normal(2, 300, 2, seed=1)
    exact = (mean - y) / (variance + sigma**2)
    error = (training.final.evaluate(y) - exact).square().mean((1, 2)) / exact.square().mean((1, 2))
    assert (error < 0.01).all()
    loss, best = dsm_loss(training.final, x, copies=3), variance / (variance + sigma**2)
    torch.testing.assert_close(loss, torch.full((2,), best).double(), rtol=0.02, atol=0)


def test_few_points_are_learned_by_heart():
    x = normal(2, 5, 3)
    training = train_scores(x, noise=0.2, steps=800, width=64, batch=50)
    assert (memorization(training.final, x, copies=100) > 0.97).all()
    near = x.repeat(1, 20, 1) + 0.2 * normal(2, 100, 3, seed=1)
    exact = empirical_scores(x, 0.2)(near)
    error = (training.final.evaluate(near) - exact).square().mean() / exact.square().mean()
    assert float(error) < 0.03
    assert (dsm_loss(training.final, x, copies=20) < 0.05).all()
    assert (dsm_loss(training.final, normal(2, 200, 3, seed=2)) > 1).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"noise": 0.0}, ValueError, "noise must be positive"),
        ({"noise": ()}, ValueError, "noise must hold"),
        ({"noise": (0.5, 0.5)}, ValueError, "different"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"batch": 0}, ValueError, "batch must be at least 1"),
        ({"width": 0}, ValueError, "width must"),
        ({"learning_rate": math.nan}, ValueError, "learning_rate"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay"),
        ({"start": "random"}, ValueError, "start must be one of"),
        ({"samples": normal(9, 3)}, ValueError, r"samples must be \[S, n, d\]"),
        ({"samples": torch.ones(2, 9, 3)}, ValueError, "must not all be equal"),
        ({"samples": normal(2, 9, 3) / 0}, ValueError, "samples must be finite"),
        ({"samples": torch.ones(2, 9, 3).long()}, TypeError, "float32 or float64"),
        ({"validation": normal(1, 9, 3)}, ValueError, r"validation must be \[S = 2"),
        ({"validation": normal(2, 9, 3).float()}, ValueError, "dtype"),
        ({"learning_rate": 1e200}, FloatingPointError, "learning_rate below 1e"),
    ],
)
def test_training_refuses(changes, error, message):
    arguments = {"samples": normal(2, 9, 3), **SMALL, **changes}
    with pytest.raises(error, match=message):
        train_scores(arguments.pop("samples"), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odd_shapes_and_memory_layouts(dtype):
    wide = normal(1, 3, 14, seed=2).to(dtype)  # d = 3, n = 7, one network, strided
    x = wide.mT[:, ::2]
    a = train_scores(x, **SMALL, validation=wide.mT[:, :1])
    b = train_scores(x.contiguous(), **SMALL)
    torch.testing.assert_close(a.losses, b.losses)
    assert a.final.evaluate(wide.mT).dtype == dtype
    one = train_scores(normal(1, 2, 1).to(dtype), **{**SMALL, "noise": [1.0, np.float32(0.5)]})
    assert one.final.score(0, 0.5)(torch.zeros(1, dtype=dtype)).isfinite().all()


def test_networks_refuse():
    nets = by_hand(2, 3, (2.0, 0.4))
    with pytest.raises(ValueError, match=r"x must be \[S = 2, C, d = 3\]"):
        nets.evaluate(normal(3, 4, 3), 0.4)
    for noise in (None, 0.5, math.nan, 0.0):
        with pytest.raises(ValueError, match="noise must be one of"):
            nets.evaluate(normal(2, 4, 3), noise)
    with pytest.raises(IndexError, match="0 … 1"):
        nets.score(2, 0.4)
    with pytest.raises(ValueError, match="x must end in d = 3"):
        nets.score(0, 0.4)(normal(3, 4))


# --- known scores ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_empirical_scores_are_those_of_the_mixture(dtype):
    points, x = normal(2, 6, 3) + 5, normal(2, 11, 3, seed=1) + 5
    ours = empirical_scores(points.to(dtype), 0.4)(x.to(dtype))
    for s in range(2):
        expected = MixtureScore(points[s], 0.4**2)(x[s])
        torch.testing.assert_close(ours[s].double(), expected, rtol=1e-4, atol=1e-4)
    if dtype == torch.float64:
        x.requires_grad_()
        squares = (x[:, :, None] - points[:, None]).square().sum(3)
        (gradient,) = torch.autograd.grad((-squares / 0.32).logsumexp(2).sum(), x)
        torch.testing.assert_close(ours, gradient)


def test_memorization_is_1_for_memory_and_0_for_the_fit():
    x = normal(2, 8, 3)
    ones = memorization(empirical_scores(x, 0.3), x, 0.3)
    torch.testing.assert_close(ones, torch.ones(2).double())
    zeros = memorization(gaussian_fits(x, 0.3), x, 0.3)
    torch.testing.assert_close(zeros, torch.zeros(2).double())

    def halfway(y: Tensor) -> Tensor:
        return (empirical_scores(x, 0.3)(y) + gaussian_fits(x, 0.3)(y)) / 2

    torch.testing.assert_close(memorization(halfway, x, 0.3), torch.full((2,), 0.75).double())


def test_dsm_loss_has_its_known_values():
    x = 3 + math.sqrt(2) * normal(2, 5000, 4)
    zero = dsm_loss(torch.zeros_like, x, 0.5)
    torch.testing.assert_close(zero, torch.ones(2).double(), rtol=0.03, atol=0)
    exact = dsm_loss(lambda y: (3 - y) / 2.25, x, 0.5)
    torch.testing.assert_close(exact, torch.full((2,), 2 / 2.25).double(), rtol=0.03, atol=0)
    assert (exact < zero).all()  # the same noise
    with pytest.raises(ValueError, match="noise must be given"):
        dsm_loss(torch.zeros_like, x)


def test_traps_are_those_of_theorem_7():
    points, mean = 6 * normal(2, 5, 4), normal(4, seed=3)
    ours = trap_scores(points, lambda x: mean - x, alpha=5.0, inner=0.6, outer=1.0)
    radii = torch.linspace(0, 1.6, 60).double()[:, None] * torch.tensor([1.0, 0, 0, 0])
    x = points[:, :1] + radii  # through the inner ball, the bump and beyond
    for s in range(2):
        theirs = MemorizingScore(points[s], 5.0, 0.3, 0.5, mean=mean)  # radii in units of √4
        torch.testing.assert_close(ours(x)[s], theirs(x[s]))
    with pytest.raises(ValueError, match="balls that meet: outer=9"):
        trap_scores(points, torch.zeros_like, alpha=5.0, inner=1.0, outer=9.0)
    with pytest.raises(ValueError, match="0 < inner=2"):
        trap_scores(points, torch.zeros_like, alpha=5.0, inner=2.0, outer=1.0)


# --- sampling -------------------------------------------------------------------------------------


def test_langevin_all_is_the_plain_loop():
    nets, start, step = by_hand(2, 3, (0.9,)), normal(2, 4, 3, seed=40), 0.01
    ends = langevin_all(nets, start, step, 20, seed=7)
    for s in range(2):
        score, x = nets.score(s), start[s]
        for noise in noise_of(7 + s, learned.CHAINS, *[(4, 3)] * 20):
            x = x + step * score(x) + math.sqrt(2 * step) * noise
        torch.testing.assert_close(ends[s], x)
    assert torch.equal(langevin_all(nets, start, step, 0), start)
    assert torch.equal(langevin_all(nets, start, step, 20, seed=7), ends)


def test_langevin_all_reaches_its_stationary_law():
    start, step = torch.zeros(2, 4000, 2, dtype=torch.float64), 0.1
    ends = langevin_all(lambda x: (3 - x) / 2, start, step, 200)
    variance = 2 / (1 - step / 4)  # of unadjusted Langevin on N(3, 2)
    torch.testing.assert_close(ends.mean(1), torch.full((2, 2), 3.0).double(), rtol=0, atol=0.12)
    torch.testing.assert_close(ends.var(1), torch.full((2, 2), variance).double(), rtol=0.1, atol=0)


def test_langevin_all_refuses_and_names_divergence():
    start = normal(2, 4, 3)
    scale = torch.tensor([1.0, 1e9]).view(2, 1, 1)
    with pytest.raises(DivergenceError, match=r"by network: \{1: 4\} of 4"):
        langevin_all(lambda x: scale * x, start, 0.1, 100)
    with pytest.raises(ValueError, match="step=0"):
        langevin_all(torch.zeros_like, start, 0, 10)
    with pytest.raises(ValueError, match="start must be finite"):
        langevin_all(torch.zeros_like, start / 0, 0.1, 10)
    with pytest.raises(ValueError, match=r"start must be \[S = 2"):
        langevin_all(by_hand(2, 3, (0.4,)), normal(3, 4, 3), 0.1, 10)


def test_reverse_diffusion_with_exact_scores():
    mean, variance = torch.tensor([2.0, -1.0]).double(), 0.3
    nets = gaussian_networks(mean, variance, (20.0, 8.0, 3.0, 1.0, 0.4, 0.1))
    times = diffusion_times(nets.levels)
    assert times[-1] == 0
    assert math.sqrt(math.expm1(2 * times[0])) == pytest.approx(20.0)
    ends = reverse_diffusion(nets, normal(2, 20000, 2))
    target, m, v = GaussianScore(mean, variance), torch.zeros(2).double(), 1.0
    for now, after in itertools.pairwise(times):  # the law of each step, in closed form
        law, d = target.noised(now), now - after
        pull = (math.exp(d) - math.exp(-d)) / law.variance
        m = (math.exp(d) - pull) * m + pull * law.mean
        v = (math.exp(d) - pull) ** 2 * v + 1 - math.exp(-2 * d)
    torch.testing.assert_close(ends.mean(1), m.expand(2, 2), rtol=0, atol=5 * math.sqrt(v / 2e4))
    torch.testing.assert_close(ends.var(1), torch.full((2, 2), v).double(), rtol=0.06, atol=0)
    chains = diffusion_sampler(target.noised, normal(20000, 2), times, seed=0)
    torch.testing.assert_close(chains.final.mean(0), m, rtol=0, atol=5 * math.sqrt(v / 2e4))
    torch.testing.assert_close(chains.final.var(0), ends[0].var(0), rtol=0.08, atol=0)
    with pytest.raises(ValueError, match="levels must fall"):
        reverse_diffusion(gaussian_networks(mean, 1.0, (0.1, 1.0)), normal(2, 3, 2))


def test_score_errors_vanish_for_exact_scores_and_are_in_their_unit():
    mean, levels = torch.tensor([2.0, -1.0]).double(), (8.0, 0.5)
    target, points = GaussianScore(mean, 0.3), mean + math.sqrt(0.3) * normal(2, 4000, 2)
    exact = score_errors(gaussian_networks(mean, 0.3, levels), target, points)
    torch.testing.assert_close(exact, torch.zeros(2, 2).double(), rtol=0, atol=1e-20)
    shifted = score_errors(gaussian_networks(mean + 1, 0.3, levels), target, points)
    expected = torch.tensor([(s / (0.3 + s**2)) ** 2 for s in levels]).double()
    torch.testing.assert_close(shifted, expected[:, None].expand(2, 2))


# --- studies --------------------------------------------------------------------------------------

TINY = StartsSetting(
    n_train=12,
    n_held_out=12,
    n_seeds=2,
    width=32,
    train_steps=400,
    control_steps=20,
    n_starts=4,
    n_chains=40,
    step=0.05,
    n_steps=200,
    trap=(400.0, 0.1, 0.15),
)


@pytest.fixture(scope="module")
def gaussian_study():
    target = GaussianScore(torch.ones(6).double(), 2.0)
    return starts_study(target, replace(TINY, step=0.004, n_steps=1500), seed=1)


def test_starts_study_has_its_two_ends(gaussian_study):
    study = gaussian_study
    assert list(study.kl) == ["memorised", "stopped", "exact", "empirical", "theorem 7"]
    assert list(study.kl["exact"]) == ["fresh", "training", "normal"]
    floor = gaussian_kl_floor(6, 40)
    assert study.interval("kl", "exact", "normal").value < 3 * floor
    assert study.kl_floor.shape == study.w2_floor.shape == (2,)
    assert (study.kl["empirical"]["training"] > 5 * floor).all()  # four points and noise
    assert (study.kl["theorem 7"]["training"] > 5 * floor).all()
    assert (study.kl["theorem 7"]["fresh"] < 4 * floor).all()
    assert (study.memorization["memorised"] > study.memorization["stopped"] + 0.3).all()
    assert (study.train_loss["memorised"] < study.train_loss["stopped"]).all()
    assert (study.test_loss["memorised"] > study.test_loss["stopped"]).all()
    assert study.first_mode == {}


def test_ratio_is_a_geometric_mean(gaussian_study):
    above, below = (gaussian_study.kl["theorem 7"][k] for k in ("training", "fresh"))
    ratio = gaussian_study.ratio("theorem 7")
    assert ratio.value == pytest.approx(math.sqrt(float((above / below).prod())))
    assert ratio.n == 2
    estimate = geometric_mean_ratio(torch.tensor([2.0, 8.0]), torch.ones(2))
    assert estimate.value == pytest.approx(4.0)
    assert estimate.low * estimate.high == pytest.approx(16.0)
    with pytest.raises(ValueError, match="positive"):
        geometric_mean_ratio(torch.tensor([1.0, 0.0]), torch.ones(2))


def test_starts_study_of_a_mixture_is_reproducible():
    means = torch.stack([torch.full((3,), -2.0), torch.full((3,), 3.0)]).double()
    target, parts = MixtureScore(means, 1.5), []
    setting = replace(TINY, trap=None, train_steps=20, n_steps=50)
    a = starts_study(target, setting, progress=parts.append)
    b = starts_study(target, setting)
    assert torch.equal(a.kl["memorised"]["fresh"], b.kl["memorised"]["fresh"])
    assert len(parts) == 6
    assert ((a.first_mode["exact"]["fresh"] * 4) % 1 == 0).all()  # no chain leaves its mode
    mean, covariance = moments(target)
    sample = target.sample(200_000, 0)
    torch.testing.assert_close(mean, sample.mean(0), rtol=0, atol=0.03)
    torch.testing.assert_close(covariance, torch.cov(sample.T), rtol=0.02, atol=0)


def test_diffusion_study_and_where_langevin_stays():
    means = torch.stack([torch.full((3,), -1.0), torch.full((3,), 8.0)]).double()
    setting = DiffusionSetting(
        n_seeds=2, n_levels=30, width=32, train_steps=60, n_chains=60, step=0.05, n_steps=200
    )
    study = learned_diffusion_study(MixtureScore(means, 1.0), setting)
    assert list(study.w2) == ["diffusion", "langevin", "langevin fresh", "exact", "exact fresh"]
    assert (study.first_mode["exact"] > 0.95).all()  # all go to the near mode
    assert ((study.first_mode["diffusion"] - 0.5).abs() < 0.35).all()
    assert (study.w2["exact"] > 2 * study.w2_floor).all()
    assert study.ratio("exact").value > 1.2
    assert study.error.shape == (30, 2)
    assert study.levels == setting.levels()
    assert study.levels[0] == pytest.approx(100)
    assert study.levels[-1] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_seeds": 1}, "n_seeds must be at least 2"),
        ({"n_chains": 6}, "n_chains must exceed d = 6"),
        ({"n_starts": 13}, "n_starts must lie in 1 … 12"),
        ({"trap": (400.0, 0.1, 9.0)}, "balls that meet"),
    ],
)
def test_starts_study_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        starts_study(GaussianScore(torch.ones(6).double(), 2.0), replace(TINY, **changes))


def test_diffusion_study_refuses():
    target = GaussianScore(torch.ones(2).double())
    with pytest.raises(ValueError, match="lowest=2"):
        learned_diffusion_study(target, DiffusionSetting(lowest=2.0, highest=1.0))
    with pytest.raises(ValueError, match="n_levels"):
        learned_diffusion_study(target, DiffusionSetting(n_levels=1))


# --- nothing is broadcast, no divergence goes unseen ----------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        lambda x: -x[..., :1],
        lambda x: torch.tensor(1.0),
        lambda x: -x.mean(1, keepdim=True),
        lambda x: -x.double(),
    ],
)
def test_fields_of_another_shape_or_dtype_are_errors(field) -> None:
    start = torch.zeros(2, 4, 3)
    with pytest.raises(ValueError, match=r"scores must map \[2, 4, 3\]"):
        langevin_all(field, start, 0.1, 3)
    with pytest.raises(ValueError, match=r"scores must map \[2, 4, 3\]"):
        dsm_loss(field, start, 0.5)


def test_scores_of_data_sets_take_those_sets_only() -> None:
    points = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    for make in (empirical_scores, gaussian_fits):
        for x in (points[:1], points[:, :, :1]):
            with pytest.raises(ValueError, match=r"must be \[2, C, 3\]"):
                make(points, 1.0)(x)
    with pytest.raises(ValueError, match="at least two points"):
        memorization(lambda x: -x, points[:, :1], 1.0)
    with pytest.raises(ValueError, match="too small"):
        empirical_scores(points, 1e-25)


def test_chains_that_run_away_are_named_early() -> None:
    calls = 0

    def steep(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return -x

    with pytest.raises(DivergenceError, match="by step 32"):
        langevin_all(steep, torch.ones(2, 4, 3), 3.0, 1000)  # |1 - h| = 2: 10^6 after 20 steps
    assert calls == 32
    start = torch.ones(2, 4, 3, requires_grad=True)
    assert not langevin_all(lambda x: -x, start, 0.1, 3).requires_grad


@pytest.mark.parametrize("x", [torch.tensor([[1, 2, 3]]), [[1.0, 2.0, 3.0]]])
def test_network_scores_take_float_tensors_only(x) -> None:
    samples = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0))
    nets = train_scores(samples, noise=0.5, steps=2, width=4).final
    with pytest.raises(TypeError, match="float32 or float64"):
        nets.score(0)(x)


def test_covariances_must_be_symmetric() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    skew = torch.tensor([[1.0, 5, 5], [0, 1, 5], [0, 0, 1]])
    with pytest.raises(ValueError, match="symmetric"):
        gaussian_kl(x, 0.0, skew)


# --- scales and kinds of arguments ----------------------------------------------------------------


def test_networks_take_their_own_shape_only() -> None:
    nets, x = by_hand(2, 3, (0.5,)), normal(2, 6, 3)
    for call in (dsm_loss, memorization):
        for part in (x[:, :, :1], x[:1]):
            with pytest.raises(ValueError, match=r"samples must be \[S = 2, C, d = 3\]"):
                call(nets, part)
    with pytest.raises(ValueError, match=r"x must be \[S = 2"):
        nets.at()(x[:1])
    with pytest.raises(ValueError, match=r"must be \[2, C, 3\]"):
        memorization(gaussian_fits(x, 0.5), x[:1], 0.5)
    traps = trap_scores(6 * x, lambda y: -y[:, :, :1], alpha=1.0, inner=0.01, outer=0.02)
    with pytest.raises(ValueError, match="scores must map"):
        traps(x)
    with pytest.raises(ValueError, match=r"x must be \[2, C, 3\]"):
        traps(x[:1])
    target = GaussianScore(torch.zeros(3).double())
    with pytest.raises(ValueError, match=r"points must be \[S = 2"):
        score_errors(nets, target, x[:1])


@pytest.mark.parametrize(
    "scale", [(1, 1e-8, 1), (1, 1e-15, 1), (1e100, 1e100, 1e100), (1e-100,) * 3]
)
def test_gaussian_kl_knows_no_units(scale) -> None:
    x, factor = normal(40, 3), torch.tensor(scale, dtype=torch.float64)
    root = normal(3, 3, seed=1)
    covariance = root @ root.T + torch.eye(3)
    scaled = factor[:, None] * covariance * factor
    expected = gaussian_kl(x, 0.0, covariance)
    assert gaussian_kl(x * factor, 0.0, scaled) == pytest.approx(expected, rel=1e-9)
    # by the definition, for a law of variance 1
    small = x * torch.tensor([1.0, scale[1] if scale[0] == 1 else 1e-3, 1.0])
    variances = [float(small[:, j].var()) for j in range(3)]
    correlation = torch.corrcoef(x.T)
    logs = sum(map(math.log, variances)) + float(correlation.logdet())
    expected = 0.5 * (sum(variances) - 3 - logs + float(small.mean(0).square().sum()))
    assert gaussian_kl(small, 0.0, 1.0) == pytest.approx(expected, rel=1e-9)


def test_gaussian_kl_takes_covariances_symmetric_to_rounding() -> None:
    x, root = normal(40, 3), normal(3, 3, seed=1)
    covariance = root @ root.T + torch.eye(3)
    rounded = covariance.clone()
    rounded[0, 1] *= 1 + 1e-15
    assert not torch.equal(rounded, rounded.T)
    assert gaussian_kl(x, 0.0, rounded) == pytest.approx(gaussian_kl(x, 0.0, covariance))
    tiny = torch.diag(torch.tensor([1.0, 1e-16, 1.0]).double())
    tiny[0, 1] = 0.9e-8  # a correlation of 0.9, on one side alone
    with pytest.raises(ValueError, match="symmetric"):
        gaussian_kl(x, 0.0, tiny)


ONES = torch.ones(2, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: gaussian_kl(x * 1e200, 0.0, 1.0), "beyond float64"),
        (lambda x: gaussian_kl(x, 0.0, 1e-320), "beyond float64"),
        (lambda x: gaussian_kl(x, 0.0, ONES), "positive definite"),
        (lambda x: gaussian_kl(x, 0.0, 3 * ONES - 1e-16), "positive definite"),
        (lambda x: gaussian_kl(x, 0.0, torch.diag(torch.tensor([1.0, -1.0]))), "positive definite"),
        (lambda x: gaussian_kl(torch.stack([x[:, 0], 0 * x[:, 0] + 0.1], 1), 0.0, 1.0), "hyperpl"),
        (lambda x: gaussian_kl(x[:, :1] * torch.tensor([1.0, 1e-8]), 0.0, 1.0), "hyperplane"),
        (lambda x: wasserstein2(x * 1e200, -x * 1e200), "a and b are too far apart"),
        (lambda x: mode_weights(x * 1e200, ONES), "samples and means.*too far apart"),
        (lambda x: mode_weights(x, ONES * 1e200), "samples and means.*too far apart"),
        (lambda x: mode_weights(x, ONES, 1e-320), "in units of variances.*too far apart"),
    ],
)
def test_distances_beyond_the_numbers_are_errors(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(normal(20, 2))


def test_exact_scores_name_a_noise_out_of_range() -> None:
    x = normal(2, 6, 3)
    with pytest.raises(ValueError, match="squared ratio overflows"):
        empirical_scores(1e3 * x.float(), 1e-18)
    with pytest.raises(ValueError, match="squares in range"):
        empirical_scores(x, 1e200)
    with pytest.raises(ValueError, match="two points that differ"):
        memorization(lambda y: -y, x[:, :1].repeat(1, 4, 1), 0.5)


def test_far_targets_are_no_divergence() -> None:
    ends = langevin_all(lambda x: 1e9 - x, torch.zeros(2, 4, 3).double(), 0.1, 400)
    torch.testing.assert_close(ends, torch.full_like(ends, 1e9))
    with pytest.raises(DivergenceError, match=r"by step 16,.*NaN in the scores"):
        langevin_all(lambda x: x * math.nan, torch.zeros(2, 4, 3), 0.1, 400)
    with pytest.raises(DivergenceError, match="by step 112"):  # 7 times 16
        langevin_all(_late_nan(100), normal(2, 4, 3), 0.1, 400)


def _late_nan(number: int):
    """A score that is NaN from its call ``number`` on."""
    calls = itertools.count(1)
    return lambda x: -x if next(calls) < number else x * math.nan


def test_reverse_diffusion_names_the_step() -> None:
    nets = gaussian_networks(torch.zeros(2).double(), 1.0, tuple(2.0**-k for k in range(40)))
    nets.weights[-1].fill_(1e60)
    with pytest.raises(DivergenceError, match="by step 16"):
        reverse_diffusion(nets, normal(2, 3, 2))
    start = normal(2, 3, 2).requires_grad_()
    assert not reverse_diffusion(by_hand(2, 2, (0.5,)), start).requires_grad
    with pytest.raises(TypeError, match="float32 or float64"):
        reverse_diffusion(nets, torch.ones(2, 3, 2).long())


def test_training_keeps_no_history_and_works_in_inference_mode() -> None:
    x = normal(2, 9, 3)
    plain = train_scores(x, **SMALL, validation=x + 1)
    leaf = x.clone().requires_grad_()
    traced = train_scores(leaf, **SMALL, validation=2 * leaf - leaf + 1)
    assert torch.equal(traced.losses, plain.losses)
    assert not traced.final.centre.requires_grad
    with torch.inference_mode():
        inside = train_scores(x * 1, **SMALL, validation=x + 1)
        ends = langevin_all(inside.final, x * 1, 0.01, 20)
    assert torch.equal(inside.losses, plain.losses)
    assert torch.equal(ends, langevin_all(plain.final, x, 0.01, 20))


@pytest.mark.parametrize("noise", [torch.tensor(0.5), np.array(0.5), np.float32(0.5), [0.5]])
def test_noise_may_be_any_number(noise) -> None:
    x = normal(2, 9, 3)
    found = train_scores(x, **{**SMALL, "noise": noise})
    assert found.final.levels == (0.5,)
    assert torch.equal(found.losses, train_scores(x, **SMALL).losses)
    assert torch.equal(dsm_loss(found.final, x, noise=0.5), dsm_loss(found.final, x))


@pytest.mark.parametrize("name", ["steps", "width", "batch", "seed", "check_every"])
def test_training_counts_are_integers(name) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer, not 3.0"):
        train_scores(normal(2, 9, 3), **{**SMALL, name: 3.0})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: dsm_loss(torch.zeros_like, x, 0.5, copies=2.0), "copies"),
        (lambda x: dsm_loss(torch.zeros_like, x, 0.5, seed=2.0), "seed"),
        (lambda x: memorization(torch.zeros_like, x, 0.5, copies=2.0), "copies"),
        (lambda x: langevin_all(torch.zeros_like, x, 0.1, 2.0), "n_steps"),
        (lambda x: langevin_all(torch.zeros_like, x, 0.1, 2, seed=2.0), "seed"),
        (lambda x: StartsSetting(n_chains=240.0).check(3), "n_chains"),
        (lambda x: DiffusionSetting(n_levels=60.0).check(), "n_levels"),
    ],
)
def test_counts_are_integers(call, name) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer"):
        call(normal(2, 9, 3))


@pytest.mark.parametrize(
    ("scale", "changes", "error", "message"),
    [
        (1e25, {}, ValueError, "samples of spread .*rescale"),
        (1e-25, {}, ValueError, "samples of spread .*rescale"),
        (1.0, {"noise": 1e-30}, ValueError, "noise 1e-30: its square is out .* torch.float32"),
        (1.0, {"noise": "0.5"}, TypeError, "noise must be a number"),
        (1.0, {"noise": [None]}, TypeError, "noise must be a number"),
        (1.0, {"learning_rate": 1e38, "steps": 3}, FloatingPointError, "spread is .* noise is 0.5"),
        (1.0, {"learning_rate": 1e38, "steps": 1}, FloatingPointError, "at step 1: .*below 1e"),
    ],
)
def test_training_names_scales(scale, changes, error, message) -> None:
    with pytest.raises(error, match=message):
        train_scores(scale * normal(2, 9, 3).float(), **{**SMALL, **changes})


def test_training_of_any_scale_in_double() -> None:
    x = normal(2, 9, 3)
    big = train_scores(1e25 * x, **{**SMALL, "noise": 0.5e25})
    torch.testing.assert_close(big.losses, train_scores(x, **SMALL).losses, rtol=1e-6, atol=0)
