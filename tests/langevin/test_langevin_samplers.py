"""The samplers: laws in closed form, plain loops with the same noise, splits, errors."""

from __future__ import annotations

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from proofread.langevin import samplers
from proofread.langevin.samplers import (
    DivergenceError,
    annealed_langevin,
    diffusion_sampler,
    langevin,
    mala,
)
from proofread.langevin.scores import (
    GaussianScore,
    MemorizingScore,
    MixtureScore,
    RadialLaw,
    RadialScore,
    TiltedScore,
    TrapScore,
)

CPU = torch.device("cpu")
LOW = 2**32 - 1
LIMIT = 4.5  # standard errors; seeds are fixed


# --- twins ----------------------------------------------------------------------------------------


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox-4x32-10 (Salmon et al., 2011): four words of 32 bits from four and two."""
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    a, b, c, e = (np.asarray(word, dtype=np.uint64) for word in counter)
    for number in range(10):
        first = np.uint64((key[0] + number * 0x9E3779B9) % 2**32)
        second = np.uint64((key[1] + number * 0xBB67AE85) % 2**32)
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, e = q >> half ^ b ^ first, q & low, p >> half ^ e ^ second, p & low
    return [a, b, c, e]


def box_muller(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In float64. Of y, bit 31 turns by π, bit 30 swaps the two, 30 bits are an angle in ±π/4."""
    r = np.sqrt(-2 * np.log((x.astype(float) + 0.5) / 2**32)) * (1 - 2.0 * (y >> 31))
    angle = (y.astype(np.int64) << 34 >> 34) / 2**30 * math.pi / 2
    sine, cosine = r * np.sin(angle), r * np.cos(angle)
    swap = y >> 30 & 1 == 1
    return np.where(swap, sine, cosine), np.where(swap, cosine, sine)


def normals(seed: int, chains: np.ndarray, step: int, groups: np.ndarray) -> np.ndarray:
    """``[C, 4G]``, from the definition."""
    chain, group = np.meshgrid(chains, groups, indexing="ij")
    counter = [group, np.full_like(group, step % 2**32), np.full_like(group, step >> 32), chain]
    a, b, c, e = (word.astype(np.int64) for word in philox(counter, (seed % 2**32, seed >> 32)))
    z = np.stack([*box_muller(a, b), *box_muller(c, e)], axis=2)
    return z.reshape(len(chains), -1)


def draws(seed: int, n: int, d: int, n_steps: int, dtype, first: int = 0, group: int = 0) -> Tensor:
    """The noise of the samplers, ``[n_steps, n, d]``."""
    out = torch.full((n_steps, n, d), math.nan, dtype=dtype)
    for step, z in enumerate(out):
        samplers._compiled(samplers._fill)(z.numpy(), seed, first, step, group, 1.0)
    return out


def ula(score, x: Tensor, h: float, noise: Tensor) -> Tensor:
    """x' = x + h s(x) + √(2h) ξ, every state: ``[n_steps, C, d]``."""
    states = []
    for xi in noise:
        x = x + h * score(x) + math.sqrt(2 * h) * xi
        states.append(x)
    return torch.stack(states)


def close(x: Tensor, y: Tensor) -> None:
    tolerance = 1e-10 if x.dtype == torch.float64 else 2e-4
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def normal(n: int, d: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def spread(d: int) -> Tensor:
    return torch.linspace(-1.0, 2.0, d, dtype=torch.float64)


def bump(d: int, centre: Tensor | None = None) -> TrapScore:
    """N(0, I) starts lie in the trap, in the bump and beyond."""
    return TrapScore(3 * spread(d) + 0.5, alpha=3.0, inner=0.7, outer=1.2, centre=centre)


def line(d: int) -> MixtureScore:
    """Centres on a line that misses the origin."""
    aside = torch.ones(d, dtype=torch.float64)
    aside[0] = 0.0
    along = 1 - aside.sign()
    means = torch.stack([aside * 0.3 + a * along for a in (-1.0, 0.5, 2.0)])
    return MixtureScore(means, torch.tensor([0.8, 1.1, 1.0]), torch.tensor([0.5, 0.2, 0.3]))


class Doubled(GaussianScore):
    """A subclass of a score with a law that is not its own."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


SCORES = {
    "gaussian": lambda d: GaussianScore(spread(d), variance=0.7),
    "trap": bump,
    "trap with a centre": lambda d: bump(d, centre=0.3 * spread(d).flip(0)),
    "line": line,
    "one component": lambda d: MixtureScore(spread(d)[None], 1.3),
    "not on a line": lambda d: MixtureScore(normal(5, d, 3)),
    "tilted": lambda d: TiltedScore(GaussianScore(torch.zeros(d)), torch.zeros(d), 0.5, 9.0, 2.0),
    "subclass": lambda d: Doubled(spread(d)),
    "function": lambda d: lambda x: -(x**3) / (1 + x**2),
    "not contiguous": lambda d: lambda x: (-x.T.contiguous()).T,
}
RADIAL = ("gaussian", "trap", "trap with a centre", "line", "one component")


# --- Langevin: law and twin -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 5, 300])
@pytest.mark.parametrize("name", SCORES)
def test_langevin_is_the_plain_loop(name: str, d: int, dtype) -> None:
    score, x = SCORES[name](d), normal(9, d, dtype=dtype)
    states = ula(score, x, 0.05, draws(4, 9, d, 12, dtype))
    found = langevin(score, x, 0.05, 12, seed=4, thin=1)
    assert found.final.dtype == dtype
    assert found.n_steps == 12
    close(found.final, states[-1])
    close(found.samples, states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 7])
def test_shares_of_a_mixture_far_along_its_axis(d: int, dtype) -> None:
    """‖y‖² − u² keeps no digit of w there: the reference has y − u·axis, in float64."""
    along = torch.eye(d, dtype=torch.float64)[0]
    far = 1e4 if dtype == torch.float32 else 3e8
    score = MixtureScore(torch.stack([far * along, (far + 3) * along]), [1.0, 0.05])
    x = (
        far * along + 3 * torch.rand(400, 1, dtype=torch.float64) * along + 0.1 * normal(400, d)
    ).to(dtype)
    h = 1e-3
    y = x.double() - far * along
    means, v = torch.stack([0 * along, 3 * along]), torch.tensor([1.0, 0.05], dtype=torch.float64)
    offset = means - y[:, None]
    logs = -offset.square().sum(2) / (2 * v) - d / 2 * v.log()
    s = (logs.softmax(1)[..., None] * offset / v[:, None]).sum(1)
    found = langevin(score, x, h, 1, seed=0).final.double() - far * along
    expected = y + h * s + math.sqrt(2 * h) * draws(0, 400, d, 1, torch.float64)[0]
    # of coordinates that are rounded to far·ε
    error = (found - expected).abs().max()
    assert float(error) < 4 * far * torch.finfo(dtype).eps * (1 + h * float(s.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_run_far_along_the_axis_is_that_of_the_called_score(dtype) -> None:
    score = MixtureScore([[1e4, 0.0], [1e4 + 3, 0.0]], [1.0, 0.05])
    x = score.sample(2000, 0).to(dtype)
    ends = [langevin(s, x, 0.005, 100, seed=1).final[:, 0] for s in (score, score.__call__)]
    inside, outside = (float((end > 1e4 + 2).double().mean()) for end in ends)
    assert abs(inside - outside) < 0.005
    if dtype == torch.float64:
        assert float((ends[0] - ends[1]).abs().max()) < 1e-8


def test_langevin_in_blocks_is_the_plain_loop() -> None:
    d, n = 700, 230  # three blocks
    assert n / 3 <= samplers._rows(d, CPU) < n / 2
    score, x = bump(d), normal(n, d, 1)
    noise = draws(1, n, d, 6, x.dtype)
    close(langevin(score, x, 0.05, 6, seed=1).final, ula(score, x, 0.05, noise)[-1])


def test_trap_twin_visits_every_zone() -> None:
    d, x = 5, normal(200, 5)
    radii = x.norm(dim=1) / math.sqrt(d)
    zones = torch.bucketize(radii, torch.tensor([0.7, 1.2], dtype=x.dtype)).unique()
    assert zones.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("compiled", [True, False])
def test_gaussian_law_in_closed_form(dtype, compiled: bool) -> None:
    """(x − m) shrinks by a = 1 − h/v a step; the variance is 2h (1 − a²ⁿ)/(1 − a²)."""
    mean, v, h, n_steps, n = torch.tensor([2.0, -1.0, 0.5]), 0.7, 0.1, 15, 20_000
    score = GaussianScore(mean, v)
    function = score if compiled else score.__call__
    x = langevin(function, torch.ones(n, 3, dtype=dtype), h, n_steps, seed=11).final.double()
    a = 1 - h / v
    expected = mean.double() + a**n_steps * (1 - mean.double())
    variance = 2 * h * (1 - a ** (2 * n_steps)) / (1 - a * a)
    z = (x.mean(0) - expected) / math.sqrt(variance / n)
    assert z.abs().max() < LIMIT
    assert ((x.var(0) / variance - 1) / math.sqrt(2 / n)).abs().max() < LIMIT
    assert torch.corrcoef(x.T).triu(1).abs().max() * math.sqrt(n) < LIMIT
    for i in range(3):
        p = stats.kstest((x[:, i] - expected[i]) / math.sqrt(variance), "norm").pvalue
        assert p > 1e-4


def test_start_is_left_alone_and_may_be_strided_or_need_gradients() -> None:
    x = normal(5, 4).requires_grad_()
    before = x.detach().clone()
    score = torch.nn.Linear(4, 4).double()
    end = langevin(score, x, 0.01, 5, seed=0).final
    assert not end.requires_grad
    assert torch.equal(x.detach(), before)
    strided = before.T.contiguous().T
    assert not strided.is_contiguous()
    assert torch.equal(langevin(score, strided, 0.01, 5, seed=0).final, end)
    assert strided.data_ptr() != langevin(score, strided, 0.01, 0, seed=0).final.data_ptr()


def test_score_may_differentiate_a_density() -> None:
    def score(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(-x.square().sum() / 2, x)[0]

    x = normal(5, 4)
    assert torch.equal(
        langevin(score, x, 0.1, 5, seed=0).final, langevin(torch.neg, x, 0.1, 5, seed=0).final
    )


@pytest.mark.parametrize("n_steps", [0, 7])
def test_no_chains_and_no_steps(n_steps: int) -> None:
    def never(_: Tensor) -> Tensor:
        raise AssertionError("called")

    score, level = GaussianScore(torch.ones(3)), [1.0, 0.5, 0.0]
    empty = torch.empty(0, 3)
    many = {"statistics": n_steps > 0, "thin": 3}
    for run in (
        langevin(score, empty, 0.1, n_steps, seed=0, **many),
        langevin(never, empty, 0.1, n_steps, seed=0, **many),
        mala(never, never, empty, 0.1, n_steps, seed=0, **many),
        annealed_langevin([never], empty, [0.1], n_steps, seed=0, **many),
    ):
        assert run.final.shape == (0, 3)
        assert run.samples.shape == (n_steps // 3, 0, 3)
        assert (run.mean is None) == (n_steps == 0)
    assert diffusion_sampler(lambda t: never, empty, level, seed=0).final.shape == (0, 3)
    x = normal(4, 3)
    for run in (
        langevin(never, x, 0.1, 0, seed=0),
        annealed_langevin([never], x, [0.1], 0, seed=0),
        diffusion_sampler(lambda t: never, x, [0.0], seed=0),
    ):
        assert torch.equal(run.final, x)
    assert mala(score, score.log_density, x, 0.1, 0, seed=0).acceptance.tolist() == [0] * 4


# --- noise ----------------------------------------------------------------------------------------


def test_philox_gives_the_known_answers() -> None:
    """Of the authors' Random123: counters and keys of zeros, of ones, and of π's digits."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0)
    for counter, key, expected in (
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([LOW] * 4, (LOW, LOW), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (*pi, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ):
        assert [int(word) for word in philox(counter, key)] == expected


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("n", "d", "seed", "chain", "step", "group"),
    [
        (300, 3, 0, 0, 0, 0),
        (1, 1, 1, 5, 2, 0),
        (70, 64, 2**40 + 5, 2**32 - 70, 2**33 + 1, 7),
        (5, 1030, 2**62 - 1, 100, 3, 0),
        (2, 9, 3, 0, 2**62 - 2, 2**20),
    ],
)
def test_noise_is_what_the_definition_says(n, d, seed, chain, step, group, dtype, other) -> None:
    out = torch.full((n, d), math.nan, dtype=dtype)
    if other:
        samplers._fill_there(out, seed, chain, step, group, 0.5)
    else:
        samplers._compiled(samplers._fill)(out.numpy(), seed, chain, step, group, 0.5)
    groups = np.arange(group, group + math.ceil(d / 4))
    expected = normals(seed, np.arange(chain, chain + n), step, groups)[:, :d] / 2
    # Near radius 0 the float32 argument of the logarithm is 1 up to 2⁻²⁵: off by up to 3·10⁻⁴.
    z = torch.from_numpy(expected).to(dtype)
    assert (out - z).abs().max() < 4e-4
    assert (out - z).square().mean().sqrt() < 1e-5


def test_noise_is_normal_and_uncorrelated() -> None:
    n, d, n_steps = 500, 400, 10
    z = draws(3, n, d, n_steps, torch.float64)
    flat = z.flatten().numpy()  # two million
    assert stats.kstest(flat, "norm").pvalue > 1e-3
    for power, moment, fourth in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((flat**power).mean() - moment) < LIMIT * math.sqrt(fourth / flat.size)
    for tail in (3.0, 4.0, 4.5):
        expected = 2 * stats.norm.sf(tail) * flat.size
        assert abs((abs(flat) > tail).sum() - expected) < LIMIT * math.sqrt(expected)
    lags = {
        "dimension": (z[..., :-1], z[..., 1:]),
        "group": (z[..., :-4], z[..., 4:]),
        "chain": (z[:, :-1], z[:, 1:]),
        "step": (z[:-1], z[1:]),
        "seed": (z, draws(4, n, d, n_steps, torch.float64)),
        "seed 2³²": (z, draws(3 + 2**32, n, d, n_steps, torch.float64)),
    }
    for a, b in lags.values():
        for f in (lambda x: x, lambda x: x**2 - 1):  # squares, too: values that share a radius
            product = f(a) * f(b)
            scale = product.std() / math.sqrt(product.numel())
            assert abs(float(product.mean() / scale)) < LIMIT


def test_the_gpu_kernel_makes_the_same_steps() -> None:
    """Interpreted where there is no GPU."""
    kernels = pytest.importorskip("proofread.langevin.kernels")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, d, dtype in (
        ("gaussian", 7, torch.float64),
        ("trap with a centre", 33, torch.float32),
        ("line", 8, torch.float64),
    ):
        score, x = SCORES[name](d), normal(3, d, dtype=dtype)
        run = langevin(score, x, 0.1, 5, seed=2**35 + 1, first_chain=9, thin=1)
        arguments = (score.law, score.axis, score.origin, 0.1, 3, 2**35 + 1, 2, 9)
        there = kernels.langevin_triton(run.samples[1].to(device), *arguments)
        torch.testing.assert_close(there.cpu(), run.final, rtol=2e-5, atol=2e-5)


# --- splits and seeds -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 7, 64, 1024, 40_000])
@pytest.mark.parametrize("name", [*RADIAL, "function"])
def test_a_split_batch_is_the_same_bit_by_bit(name: str, d: int, dtype) -> None:
    n = 700 if d < 100 else 90 if d < 2000 else 5
    score, x = SCORES[name](d), normal(n, d, dtype=dtype)
    whole = langevin(score, x, 0.01, 5, seed=3, thin=2, statistics=True)
    for cuts in ((0, n // 3, n), (0, 1, 2, n)):
        runs = [
            langevin(score, x[a:b], 0.01, 5, seed=3, first_chain=a, thin=2, statistics=True)
            for a, b in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat([run.final for run in runs]), whole.final)
        assert torch.equal(torch.cat([run.samples for run in runs], 1), whole.samples)
        assert torch.equal(torch.cat([run.variance for run in runs]), whole.variance)


def test_other_samplers_split_too() -> None:
    d, x, times = 33, normal(700, 33), [1.0, 0.6, 0.3, 0.0]
    score = bump(d)

    def all_of(x: Tensor, first: int) -> list[Tensor]:
        common = {"seed": 5, "first_chain": first}
        adjusted = mala(torch.neg, lambda x: -x.square().sum(1) / 2, x, 0.1, 9, **common)
        return [
            annealed_langevin([score, torch.neg], x, [0.1, 0.05], 4, **common).final,
            diffusion_sampler(lambda t: score, x, times, **common).final,
            adjusted.final,
            adjusted.acceptance,
        ]

    whole, parts = all_of(x, 0), zip(all_of(x[:300], 0), all_of(x[300:], 300), strict=True)
    for one, (a, b) in zip(whole, parts, strict=True):
        assert torch.equal(one, torch.cat([a, b]))


def test_noise_comes_from_the_number_of_the_chain() -> None:
    x = torch.zeros(3, 50)
    far = langevin(torch.neg, x, 0.1, 4, seed=1, first_chain=100_000).final
    close(far, ula(torch.neg, x, 0.1, draws(1, 3, 50, 4, x.dtype, first=100_000))[-1])


def test_seeds_and_chains_differ() -> None:
    x = torch.zeros(300, 3)
    ends = [langevin(torch.neg, x, 0.1, 1, seed=s).final for s in (0, 1, 2, 2**40, 2**40 + 1)]
    rows = torch.cat(ends)
    assert len(rows.unique(dim=0)) == len(rows)
    assert torch.equal(ends[0], langevin(torch.neg, x, 0.1, 1, seed=0).final)


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["trap with a centre", "function"])
def test_thinned_states_and_moments_are_those_of_the_stored_chain(name: str, dtype) -> None:
    score, x = SCORES[name](6), 100 + normal(5, 6, dtype=dtype)
    step = 1e-3 if name == "function" else 0.05
    chain = langevin(score, x, step, 200, seed=0, thin=1).samples
    run = langevin(score, x, step, 200, seed=0, thin=7, statistics=True)
    assert run.samples.shape == (28, 5, 6)
    assert torch.equal(run.samples, chain[6::7])
    assert torch.equal(run.final, chain[-1])
    assert run.mean.dtype == dtype
    close(run.mean, chain.double().mean(0).to(dtype))
    close(run.variance, chain.double().var(0, correction=0).to(dtype))


def test_moments_survive_a_mean_far_from_zero() -> None:
    """In float32 a mean of squares minus a squared mean would leave nothing."""
    x = torch.full((3, 2), 3e4)
    chain = langevin(lambda x: 3e4 - x, x, 0.5, 400, seed=0, thin=1)
    run = langevin(lambda x: 3e4 - x, x, 0.5, 400, seed=0, statistics=True)
    assert chain.mean is None
    exact = chain.samples.double().var(0, correction=0)
    torch.testing.assert_close(run.variance.double(), exact, rtol=1e-6, atol=0)


def test_thin_beyond_the_run_keeps_nothing() -> None:
    assert langevin(torch.neg, torch.zeros(2, 3), 0.1, 4, seed=0, thin=5).samples.shape == (0, 2, 3)


# --- annealed Langevin and diffusion --------------------------------------------------------------


def test_annealed_langevin_is_the_plain_loop_and_its_noise_runs_on() -> None:
    d, x = 6, normal(8, 6)
    scores, steps = [bump(d), line(d), torch.neg], [0.1, 0.05, 0.02]
    noise = draws(9, 8, d, 12, x.dtype)
    states = []
    for i in range(3):
        level = ula(scores[i], states[-1][-1] if states else x, steps[i], noise[4 * i : 4 * i + 4])
        states.append(level)
    run = annealed_langevin(scores, x, steps, 4, seed=9, thin=1, statistics=True)
    assert run.n_steps == 12
    close(run.samples, torch.cat(states))
    close(run.mean, torch.cat(states).mean(0))


def test_annealing_finds_the_weights_that_plain_langevin_does_not() -> None:
    """Modes at ±10 with weights 1/5 and 4/5; all chains start at the lighter mode."""
    means = torch.tensor([[-10.0, 0.0], [10.0, 0.0]])
    start, n = torch.tensor([[-10.0, 0.0]]).expand(2000, 2), 2000
    noises = [400.0, 100.0, 30.0, 10.0, 4.0, 1.5, 0.0]
    scores = [MixtureScore(means, 1 + v, torch.tensor([0.2, 0.8])) for v in noises]
    steps = [0.1 * (1 + v) for v in noises]
    end = annealed_langevin(scores, start, steps, 60, seed=0).final
    share = float((end[:, 0] > 0).double().mean())
    assert abs(share - 0.8) < 0.05  # Langevin steps at finitely many levels: not exact
    plain = langevin(scores[-1], start, 0.1, 420, seed=0).final
    assert (plain[:, 0] < 0).all()
    near = (end - means[(end[:, 0] > 0).long()])[:, 1]
    variance = 2 * 0.1 / (1 - 0.9**2)  # of unadjusted steps of 0.1
    assert abs(float(near.var()) / variance - 1) < LIMIT * math.sqrt(2 / n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diffusion_of_a_gaussian_in_closed_form(dtype) -> None:
    """From N(0, I) at time T: N(μ(1 − e^(−2T)), I), whatever the levels between."""
    mean, n = torch.tensor([3.0, -1.0, 0.5, 0.0], dtype=torch.float64), 20_000
    target, times = GaussianScore(mean), [0.7, 0.45, 0.4, 0.1, 0.0]
    x = diffusion_sampler(target.noised, normal(n, 4, 7, dtype), times, seed=3).final.double()
    expected = mean * (1 - math.exp(-1.4))
    assert ((x.mean(0) - expected) * math.sqrt(n)).abs().max() < LIMIT
    assert ((x.var(0) - 1) * math.sqrt(n / 2)).abs().max() < LIMIT
    for i in range(4):
        assert stats.kstest(x[:, i] - expected[i], "norm").pvalue > 1e-4


def test_diffusion_of_a_wide_gaussian_follows_the_recursion() -> None:
    """Variance 4: every step is affine, x' = e^Δ x − (e^Δ − e^−Δ)(x − e^−t μ)/v_t + noise."""
    mu, n, times = 2.0, 40_000, np.linspace(2.0, 0.0, 9)
    target = GaussianScore(torch.tensor([mu]), 4.0)
    mean, variance = 0.0, 1.0
    for t, s in itertools.pairwise(times):
        grow, v = math.exp(t - s), 1 + 3 * math.exp(-2 * t)
        slope = (grow - 1 / grow) / v
        mean = (grow - slope) * mean + slope * math.exp(-t) * mu
        variance = (grow - slope) ** 2 * variance + 1 - grow**-2
    x = diffusion_sampler(target.noised, normal(n, 1, 8), times, seed=0).final
    assert abs(float(x.mean()) - mean) < LIMIT * math.sqrt(variance / n)
    assert abs(float(x.var()) / variance - 1) < LIMIT * math.sqrt(2 / n)


@pytest.mark.parametrize("name", SCORES)
def test_diffusion_is_the_plain_loop(name: str) -> None:
    d, x, times = 5, normal(6, 5), [1.0, 0.7, 0.2, 0.0]
    score, noise = SCORES[name](d), draws(2, 6, 5, 3, torch.float64)
    run, asked = None, []

    def score_at(t: float):
        asked.append(t)
        return score

    run = diffusion_sampler(score_at, x, times, seed=2, thin=1)
    assert asked == times[:-1]
    assert run.n_steps == 3
    for k, (t, s) in enumerate(itertools.pairwise(times)):
        delta = t - s
        x = (
            math.exp(delta) * x
            + (math.exp(delta) - math.exp(-delta)) * score(x)
            + math.sqrt(1 - math.exp(-2 * delta)) * noise[k]
        )
        close(run.samples[k], x)


# --- MALA -----------------------------------------------------------------------------------------


def quartic(x: Tensor) -> Tensor:
    """log density −Σ x⁴/4."""
    return -(x**4).sum(1) / 4


def naive_mala(score, log_density, x: Tensor, h: float, noise: Tensor, coins: Tensor):
    """Roberts and Tweedie's algorithm, with both densities of the proposal written out."""

    def log_q(to: Tensor, of: Tensor) -> Tensor:
        return -(to - of - h * score(of)).square().sum(1) / (4 * h)

    accepted = torch.zeros(len(x), dtype=torch.float64)
    for xi, coin in zip(noise, coins, strict=True):
        y = x + h * score(x) + math.sqrt(2 * h) * xi
        ratio = log_density(y) + log_q(x, y) - log_density(x) - log_q(y, x)
        accept = coin < ratio.exp()
        x = torch.where(accept[:, None], y, x)
        accepted += accept
    return x, accepted / len(noise)


@pytest.mark.parametrize(
    ("score", "log_density"),
    [
        (lambda x: -(x**3), quartic),
        (lambda x: 1 - x, quartic),  # a wrong score: other proposals, the same law
        (GaussianScore(spread(6), 0.5), GaussianScore(spread(6), 0.5).log_density),
    ],
    ids=["quartic", "wrong score", "gaussian"],
)
@pytest.mark.parametrize("n", [7, 900])
def test_mala_is_the_plain_loop(score, log_density, n: int) -> None:
    x, h = 0.5 * normal(n, 6), 0.3
    noise, pairs = draws(6, n, 6, 20, torch.float64), draws(6, n, 2, 20, torch.float64, group=2)
    coins = (-pairs.square().sum(2) / 2).exp()
    end, accepted = naive_mala(score, log_density, x, h, noise, coins)
    run = mala(score, log_density, x, h, 20, seed=6)
    close(run.final, end)
    torch.testing.assert_close(run.acceptance, accepted)
    assert 0.1 < float(accepted.mean()) < 0.95


def test_coins_of_mala_are_uniform_and_beyond_the_dimensions() -> None:
    run = samplers._Run(torch.zeros(20_000, 6), 1, 0, None, False, 0, False)
    blocks = list(run.blocks())
    coins = torch.cat([block.log_coins(1).exp() for block in blocks])
    assert stats.kstest(coins.numpy(), "uniform").pvalue > 1e-3
    pairs = draws(0, 20_000, 2, 1, torch.float64, group=2)[0]
    assert torch.equal(coins, (-pairs.square().sum(1) / 2).exp())
    with pytest.raises(AssertionError):  # two groups hold six dimensions
        close(draws(0, 20_000, 8, 1, torch.float64)[0, :, 4:6], pairs)


@pytest.mark.parametrize("wrong", [False, True])
def test_mala_leaves_the_law_alone(wrong: bool) -> None:
    """Starts from exp(−Σ x⁴/4): E x² = 2 Γ(3/4)/Γ(1/4), and x⁴ is gamma with shape 1/4, scale 4."""
    n, d = 5000, 3
    rng = np.random.default_rng(0)
    start = torch.from_numpy(
        rng.gamma(0.25, 4.0, (n, d)) ** 0.25 * rng.choice([-1.0, 1.0], size=(n, d))
    )
    score = (lambda x: 0.8 - x) if wrong else (lambda x: -(x**3))
    run = mala(score, quartic, start, 0.25, 40, seed=1, statistics=True)
    x = run.final.numpy()
    assert 0.3 < float(run.acceptance.mean()) < 0.97
    assert np.mean(x != start.numpy()) > 0.99
    for i in range(d):
        assert stats.kstest(x[:, i] ** 4, stats.gamma(0.25, scale=4).cdf).pvalue > 1e-3
    assert abs(x.mean()) < LIMIT * x.std() / math.sqrt(x.size)
    square = 2 * math.gamma(0.75) / math.gamma(0.25)
    assert abs((x**2).mean() - square) < LIMIT * (x**2).std() / math.sqrt(x.size)
    if wrong:  # without the acceptance step the law is another one
        plain = langevin(score, start, 0.25, 40, seed=1).final.numpy()
        assert abs((plain**2).mean() - square) > 10 * (x**2).std() / math.sqrt(x.size)


def test_mala_stays_within_the_support() -> None:
    """The half line: proposals beyond it, where score and density make no sense, are rejected."""

    def log_density(x: Tensor) -> Tensor:
        return torch.where((x > 0).all(1), -x.sum(1), -math.inf)

    def score(x: Tensor) -> Tensor:
        return torch.full_like(x, -1.0).masked_fill(x <= 0, math.nan)

    n = 4000
    start = torch.from_numpy(np.random.default_rng(1).exponential(size=(n, 1)))
    run = mala(score, log_density, start, 0.3, 30, seed=0)
    assert (run.final > 0).all()
    assert run.acceptance.mean() < 0.9
    assert stats.kstest(run.final[:, 0].numpy(), "expon").pvalue > 1e-3


# --- errors ---------------------------------------------------------------------------------------


def never(_: Tensor) -> Tensor:
    raise AssertionError("called before the arguments were checked")


NAN_ROW = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [math.inf, 1.0]])
GOOD = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"start": torch.zeros(3)}, ValueError, r"start must be \[C, d\].*\[3\]"),
        ({"start": torch.zeros(3, 0)}, ValueError, "d ≥ 1"),
        ({"start": torch.zeros(2, 3, 4)}, ValueError, "one row a chain"),
        ({"start": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "int64: use .float()"),
        ({"start": torch.zeros(3, 2).half()}, TypeError, "float16"),
        ({"start": GOOD.to_sparse()}, TypeError, r"start must be dense.*use \.to_dense\(\)"),
        ({"start": GOOD.to("meta")}, TypeError, "start must hold values, but is on the meta"),
        ({"start": np.zeros((3, 2))}, TypeError, "must be a tensor.*ndarray"),
        ({"start": NAN_ROW}, ValueError, "2 of its 3 rows"),
        ({"start": GOOD - 3e19}, ValueError, "start holds -3e.19, too large for squared norms"),
        ({"step": 0.0}, ValueError, "step must be positive and finite, not 0.0"),
        ({"step": -1.0}, ValueError, "step must be positive"),
        ({"step": math.nan}, ValueError, "step must be positive"),
        ({"step": math.inf}, ValueError, "step must be positive"),
        ({"step": "a"}, TypeError, "step must be a number"),
        ({"n_steps": -1}, ValueError, "n_steps must be at least 0"),
        ({"n_steps": 1.5}, TypeError, "n_steps must be an integer"),
        ({"thin": 0}, ValueError, "thin must be at least 1"),
        ({"thin": -2}, ValueError, "thin must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": 0.5}, TypeError, "seed must be an integer"),
        ({"first_chain": -1}, ValueError, "first_chain must be at least 0"),
        ({"first_chain": 2**32 - 3}, ValueError, r"first_chain \+ C must be at most 2\^32"),
        ({"statistics": True, "n_steps": 0}, ValueError, "statistics=True needs at least one"),
        ({"score": 3}, TypeError, r"score must be a function of \[rows, d\], not int"),
        ({"score": GaussianScore(torch.zeros(3))}, ValueError, r"\[C, 3\].*d = 2"),
    ],
)
def test_bad_arguments_are_named_before_any_work(changed, kind, message: str) -> None:
    good = {"score": never, "start": GOOD, "step": 0.1, "n_steps": 3, "seed": 0}
    arguments = good | changed
    with pytest.raises(kind, match=message):
        langevin(**arguments)
    with pytest.raises(kind, match=message):
        mala(log_density=never, **arguments)
    score, step, n_steps = (arguments.pop(name) for name in ("score", "step", "n_steps"))
    scores, steps = [never, score], [0.1, step]
    for name, new in (("score ", "scores.1. "), ("step ", "steps.1. "), ("n_steps ", ".*level ")):
        message = message.replace(name, new) if message.startswith(name) else message
    with pytest.raises(kind, match=message):
        annealed_langevin(scores, steps=steps, n_steps_per_level=n_steps, **arguments)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"start": torch.zeros(3)}, ValueError, r"start must be \[C, d\].*\[3\]"),
        ({"start": NAN_ROW}, ValueError, "2 of its 3 rows"),
        ({"start": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "int64: use .float()"),
        ({"thin": 0}, ValueError, "thin must be at least 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"times": [0.0], "statistics": True}, ValueError, "statistics=True needs at least one"),
        ({"score_at": lambda t: 3}, TypeError, r"score_at\(1\) must be a function.*not int"),
        ({"score_at": GaussianScore(torch.zeros(3)).noised}, ValueError, r"\[C, 3\].*d = 2"),
        ({"score_at": line(2)}, TypeError, "a time to a score, but is a Mix.*its method noised"),
        ({"score_at": 3}, TypeError, "score_at must map a time to a score, not be int"),
        ({"times": 1.0}, TypeError, "times must be a list of numbers"),
        ({"times": ["a", 0.0]}, TypeError, "times must be a list of numbers"),
        ({"times": [1000.0, 0.0]}, ValueError, "times.*largest step is 1000, from 1000 to 0,"),
        ({"times": [90.0, 80.0, 40.0, 20.0, 0.0]}, ValueError, "step is 40, from 80 to 40, and"),
    ],
)
def test_bad_arguments_of_the_diffusion_sampler_are_named(changed, kind, message: str) -> None:
    good = {"score_at": lambda t: never, "start": GOOD, "times": [1.0, 0.0], "seed": 0}
    with pytest.raises(kind, match=message):
        diffusion_sampler(**good | changed)


@pytest.mark.parametrize(
    "times", [[], [1.0], [0.5, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, math.nan, 0.0], [math.inf, 0.0]]
)
def test_times_must_decrease_to_zero(times) -> None:
    with pytest.raises(ValueError, match="times must decrease strictly to 0"):
        diffusion_sampler(never, GOOD, times, seed=0)


def test_a_long_step_of_diffusion_is_exact_up_to_what_is_said() -> None:
    mean = torch.tensor([3.0, -1.0], dtype=torch.float64)
    x = normal(5, 2)
    end = diffusion_sampler(GaussianScore(mean).noised, x, [30.0, 0.0], seed=0).final
    noise = draws(0, 5, 2, 1, torch.float64)[0]
    torch.testing.assert_close(end, mean + noise, rtol=0, atol=0.01)


def test_annealing_takes_one_step_for_all_levels() -> None:
    scores, x = [bump(3), line(3)], normal(5, 3)
    expected = annealed_langevin(scores, x, [0.1, 0.1], 4, seed=0).final
    for step in (0.1, np.float64(0.1), torch.tensor(0.1, dtype=torch.float64)):
        assert torch.equal(annealed_langevin(scores, x, step, 4, seed=0).final, expected)


@pytest.mark.parametrize(
    ("scores", "steps", "message"),
    [
        (line(2), [0.1], "scores must be a list of scores, one a level, not MixtureScore"),
        (line(2), 0.1, "for one score use langevin"),
        (iter([never]), [0.1], "scores must be a list of scores"),
        ([never, never], None, "steps must be a list of step sizes.*or one number, not None"),
        ([never], "a", r"steps\[0\] must be a number"),
    ],
)
def test_annealing_names_scores_and_steps_of_the_wrong_kind(scores, steps, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        annealed_langevin(scores, GOOD, steps, 3, seed=0)


def test_what_the_docstring_of_langevin_must_say() -> None:
    text = inspect.getdoc(langevin) or ""
    assert "torch.enable_grad()" in text
    assert "module's text" not in text


def test_annealing_needs_one_step_a_score() -> None:
    for scores, steps in (([], []), ([never], []), ([never], [0.1, 0.2])):
        with pytest.raises(ValueError, match="one step a score"):
            annealed_langevin(scores, GOOD, steps, 3, seed=0)


@pytest.mark.parametrize(
    ("score", "kind", "message"),
    [
        (lambda x: x[:, :1], ValueError, r"map \[4, 2\] to the same shape, but returned \[4, 1\]"),
        (lambda x: x.sum(), ValueError, r"returned \[\]"),
        (lambda x: None, ValueError, "returned NoneType"),
        (lambda x: x.double(), TypeError, "must return torch.float32 on cpu.*torch.float64"),
    ],
)
def test_a_score_of_the_wrong_kind_is_named(score, kind, message: str) -> None:
    with pytest.raises(kind, match=message):
        langevin(score, GOOD, 0.1, 3, seed=0)
    with pytest.raises(kind, match=message):
        diffusion_sampler(lambda t: score, GOOD, [1.0, 0.0], seed=0)
    with pytest.raises(kind, match=message):
        mala(score, lambda x: x.sum(1), GOOD, 0.1, 3, seed=0)


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "an infinity")])
@pytest.mark.parametrize("d", [2, 512])
def test_a_score_that_is_not_finite_is_named_with_step_and_chain(value, word, d: int) -> None:
    rows = samplers._rows(d, CPU)
    calls = 0

    def score(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        s = -x
        if calls == 7 + 5:  # two blocks of seven steps: the fifth of the second
            s[3, 1] = value
        return s

    message = f"score returned {word} at step 5, for chain {rows + 3}$"
    with pytest.raises(DivergenceError, match=message):
        langevin(score, torch.zeros(rows + 10, d), 0.1, 7, seed=0)


def test_a_step_too_large_is_named_with_the_remedy() -> None:
    score, start = GaussianScore(torch.ones(3), 0.5), torch.zeros(5, 3)
    remedy = r"step 1.2 is too large.* L is at most 2: take a step below 2 / L = 1$"
    with pytest.raises(DivergenceError, match=remedy):
        langevin(score, start, 1.2, 1000, seed=0)

    def function(x: Tensor) -> Tensor:
        return score(x)

    function.lipschitz = score.lipschitz
    with pytest.raises(DivergenceError, match=remedy):
        langevin(function, start, 1.2, 1000, seed=0)
    with pytest.raises(DivergenceError, match="step 3 is too large for this score, or the score"):
        langevin(torch.neg, start, 3.0, 1000, seed=0)


def test_the_step_of_a_divergence_is_that_of_the_plain_loop() -> None:
    """The first at which a squared norm leaves float64."""
    x, h = normal(4, 2), 3.0
    states = ula(lambda x: -2 * x, x, h, draws(0, 4, 2, 400, x.dtype))
    first = int((~states.square().sum(2).isfinite()).any(1).nonzero()[0]) + 1
    with pytest.raises(DivergenceError, match=rf"diverged at step {first}:"):
        langevin(lambda x: -2 * x, x, h, 400, seed=0)


@pytest.mark.parametrize(
    "score",
    [
        GaussianScore(torch.ones(4)),
        TrapScore.standard(4),
        line(4),
        MixtureScore(normal(6, 4)),
        MemorizingScore(10 * torch.eye(4), 2.0, 0.5, 1.0),
        TiltedScore(GaussianScore(torch.zeros(4)), torch.ones(4), 1.0, 2.0, 1.0),
    ],
    ids=lambda score: type(score).__name__,
)
def test_a_chain_that_grows_is_a_divergence_long_before_it_overflows(score) -> None:
    with pytest.raises(DivergenceError, match="step 4 is too large") as error:
        langevin(score, torch.zeros(3, 4, dtype=torch.float64), 4.0, 45, seed=0)
    step = int(str(error.value).split("at step ")[1].split(":")[0])
    assert 10 < step < 45  # 3⁴⁵ ≈ 3·10²¹ is far from the end of float64


@pytest.mark.parametrize("step", [1e30, 1e300])
@pytest.mark.parametrize("name", ["trap", "function"])
def test_an_absurd_step_is_a_divergence(name: str, step: float) -> None:
    score = SCORES[name](3) if name == "trap" else torch.neg
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(DivergenceError, match=r"step 1e\+30+ is too large"):
            langevin(score, torch.zeros(2, 3, dtype=dtype), step, 40, seed=0)


def test_growth_that_is_the_law_is_no_divergence() -> None:
    """An outward score of the caller's grows; a short unstable run is what it is."""
    x = torch.ones(3, 2, dtype=torch.float64)
    assert float(langevin(lambda x: x, x, 1.0, 60, seed=0).final.abs().min()) > 1e14
    end = langevin(GaussianScore(torch.zeros(2)), x, 2.5, 12, seed=0).final
    close(end, ula(torch.neg, x, 2.5, draws(0, 3, 2, 12, x.dtype))[-1])
    far = langevin(GaussianScore(torch.zeros(2)), 1e9 * x, 0.1, 12, seed=0).final
    assert float(far.min()) > 2e8


def test_diffusion_names_the_level() -> None:
    def score_at(t: float):
        return torch.neg if t > 0.6 else lambda x: x * math.nan

    with pytest.raises(DivergenceError, match="returned NaN at step 2, for chain 0"):
        diffusion_sampler(score_at, GOOD, [1.0, 0.5, 0.0], seed=0)
    with pytest.raises(DivergenceError, match=r"step 1: level 0, t = 1: look at the score"):
        diffusion_sampler(lambda t: lambda x: x + 1e30, GOOD, [1.0, 0.5, 0.0], seed=0)


def test_mala_names_densities_and_scores_that_make_no_sense() -> None:
    x, n_calls = torch.zeros(4, 2), 0

    def nan_later(x: Tensor) -> Tensor:
        nonlocal n_calls
        n_calls += 1
        log = -x.square().sum(1)
        if n_calls == 4:  # start, then a call a step
            log[2] = math.nan
        return log

    with pytest.raises(DivergenceError, match=r"density is NaN or \+∞ at step 3, for chain 2"):
        mala(torch.neg, nan_later, x, 0.1, 5, seed=0)
    with pytest.raises(ValueError, match=r"finite at the start, but is -inf for chain 0.*3 others"):
        mala(torch.neg, lambda x: torch.full((len(x),), -math.inf), x, 0.1, 5, seed=0)
    with pytest.raises(ValueError, match=r"map \[4, 2\] to \[4\], but returned \[4, 2\]"):
        mala(torch.neg, torch.neg, x, 0.1, 5, seed=0)
    with pytest.raises(DivergenceError, match="the score is not finite at step 1, for chain 0"):
        mala(lambda x: x * math.nan, lambda x: -x.sum(1), x, 0.1, 5, seed=0)


# --- progress, other devices ----------------------------------------------------------------------


def test_a_bar_only_when_asked_for_or_on_a_terminal(capsys) -> None:
    langevin(torch.neg, GOOD, 0.1, 30, seed=0)
    langevin(torch.neg, GOOD, 0.1, 30, seed=0, progress=False)
    assert capsys.readouterr() == ("", "")
    langevin(torch.neg, GOOD, 0.1, 30, seed=0, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "120/120" in err
    assert "chain steps" in err


def test_signatures_share_what_they_share() -> None:
    common = ["seed", "thin", "statistics", "first_chain", "progress"]
    for sampler in (langevin, mala, annealed_langevin, diffusion_sampler):
        keywords = inspect.signature(sampler).parameters.values()
        assert [p.name for p in keywords if p.kind is p.KEYWORD_ONLY] == common


def test_passes_of_other_devices(monkeypatch) -> None:
    """What runs beside the CPU, run on it: law, splits, moments and errors."""
    monkeypatch.setattr(samplers, "_compiles", lambda device: False)
    monkeypatch.setattr(samplers, "DEVICE_BLOCK", 300)
    d, x = 3, normal(250, 3)  # blocks of 100
    score = bump(d)
    run = langevin(score, x, 0.05, 70, seed=0, thin=5, statistics=True)
    states = ula(score, x, 0.05, draws(0, 250, d, 70, x.dtype))
    tolerance = {"rtol": 1e-3, "atol": 1e-3}  # rounding of single normals
    torch.testing.assert_close(run.samples, states[4::5], **tolerance)
    torch.testing.assert_close(run.mean, states.mean(0), **tolerance)
    torch.testing.assert_close(run.variance, states.var(0, correction=0), **tolerance)
    late = langevin(score, x[130:], 0.05, 70, seed=0, first_chain=130).final
    close(late, run.final[130:])
    adjusted = mala(torch.neg, lambda x: -x.square().sum(1) / 2, x, 0.1, 9, seed=0)
    monkeypatch.undo()
    there = mala(torch.neg, lambda x: -x.square().sum(1) / 2, x, 0.1, 9, seed=0)
    torch.testing.assert_close(adjusted.final, there.final, **tolerance)
    monkeypatch.setattr(samplers, "_compiles", lambda device: False)
    with pytest.raises(DivergenceError, match=r"chain 0 diverged at step 64: .*2 / L"):
        langevin(GaussianScore(torch.zeros(3)), x, 4.0, 70, seed=0)
    with pytest.raises(DivergenceError, match="NaN at step 5"):
        langevin(lambda x: x * math.nan, x, 4.0, 5, seed=0)


@pytest.mark.parametrize(
    ("statistics", "most", "expected"),
    [
        (False, 20, [15, 15, 15, 8]),
        (False, 10, [10, 5, 10, 5, 10, 5, 8]),
        (True, 20, [1] * 53),
    ],
)
def test_kernel_launches_add_up(monkeypatch, statistics: bool, most: int, expected) -> None:
    """A stand-in for the kernel, whose noise is a function of step and chain, as it must be."""
    kernels = pytest.importorskip("proofread.langevin.kernels")
    launches = []

    def stand_in(x, law, axis, origin, step, n_steps, seed, first_step=0, first_chain=0):
        launches.append(n_steps)
        score = RadialScore(origin, axis, law, 1.0)
        chains = torch.arange(first_chain, first_chain + len(x), dtype=x.dtype)
        for number in range(first_step, first_step + n_steps):
            x = x + step * score(x) + torch.sin(seed + number + 7 * chains)[:, None]
        return x

    monkeypatch.setattr(kernels, "langevin_triton", stand_in)
    monkeypatch.setattr(samplers, "LAUNCH", most)
    score, x = bump(3), normal(4, 3)
    run = samplers._Run(x, 53, 5, 15, statistics, 2, False)
    found = samplers._kernel_chains(run, score, 0.1)
    once = [stand_in(x, score.law, score.axis, score.origin, 0.1, n, 5, 0, 2) for n in (15, 45, 53)]
    del launches[-3:]
    assert launches == expected
    close(found.samples[0], once[0])
    close(found.samples[2], once[1])
    close(found.final, once[2])
    assert (found.mean is not None) == statistics
    with pytest.raises(DivergenceError, match=r"diverged by step \d+: the step 4 is too large"):
        samplers._kernel_chains(samplers._Run(x, 100, 5, None, False, 0, None), score, 4.0)
    monkeypatch.setattr(samplers, "LAUNCH", 1000)
    launches.clear()
    samplers._kernel_chains(samplers._Run(x, 53, 5, None, False, 0, None), score, 0.1)
    assert launches == [53]


def test_what_the_kernel_takes() -> None:
    pytest.importorskip("proofread.langevin.kernels")
    means = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    laws = [MixtureScore(means, v).law for v in (1.0, [1.0, 0.5])]
    taken = [samplers._has_kernel(normal(3, 2), law) for law in (TrapScore.standard(2).law, *laws)]
    assert taken == [True, True, False]


def test_a_law_of_an_unknown_kind_is_called() -> None:
    class Unknown(RadialScore):
        def __call__(self, x: Tensor) -> Tensor:
            return -x

    axis = torch.tensor([1.0, 0.0], dtype=torch.float64)
    score = Unknown(torch.zeros(2, dtype=torch.float64), axis, RadialLaw(9, (1.0,)), 1.0)
    x = normal(3, 2)
    assert torch.equal(
        langevin(score, x, 0.1, 5, seed=0).final, langevin(torch.neg, x, 0.1, 5, seed=0).final
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["trap", "line", "function"])
def test_on_a_gpu(name: str) -> None:
    d, n = 64, 4000
    score, x = SCORES[name](d), torch.zeros(n, d, device="cuda")
    run = langevin(score, x, 0.05, 40, seed=0, thin=10, statistics=True)
    there, here = run.final.cpu(), langevin(score, x.cpu(), 0.05, 40, seed=1).final
    for i in (0, d - 1):
        assert stats.ks_2samp(there[:, i].numpy(), here[:, i].numpy()).pvalue > 1e-4
    late = langevin(score, x[1000:], 0.05, 40, seed=0, first_chain=1000).final
    torch.testing.assert_close(late, run.final[1000:], rtol=1e-4, atol=1e-4)
    with pytest.raises(DivergenceError):
        langevin(score, x + 1, 50.0, 2000, seed=0)
