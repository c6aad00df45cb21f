"""Simulations of the experiments page: who stays, who leaves, and what the bounds said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..stats import Estimate, clopper_pearson
from .bounds import escape_bound, tv_lower_bound
from .enclosures import ball_log_probability
from .radial import radial_chain
from .samplers import Chains, diffusion_sampler, langevin, mala
from .scores import GaussianScore, MemorizingScore, Score, TrapScore

FULL = (2, 8, 32, 128, 512, 1000)
RADIAL = (10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Stay:
    """Chains in the trap at the end, and what that proves about the TV distance.

    Attributes:
        dimension: d.
        method: ``full`` or ``radial`` chains.
        inside: share of chains in the inner ball at the end.
        tv: lower bound of TV from that share, one-sided at 95 %.
        distance: mean distance to the target's mean, in units of √d.
    """

    dimension: int
    method: str
    inside: float
    tv: Estimate
    distance: float


def stays(
    exact: bool = False,
    *,
    full: Sequence[int] = FULL,
    radial: Sequence[int] = RADIAL,
    n_chains: int = 200,
    step: float = 0.02,
    n_steps: int = 2000,
    seed: int = 0,
) -> list[Stay]:
    """Chains of ULA from N(0, I) with theorem 1's trap, or with the exact score."""
    return [
        _stay(d, "full" if d in full else "radial", exact, n_chains, step, n_steps, seed)
        for d in (*full, *radial)
    ]


def _stay(
    d: int, method: str, exact: bool, n_chains: int, step: float, n_steps: int, seed: int
) -> Stay:
    trap = TrapScore.standard(d)
    score = trap.target if exact else trap
    m = float(trap.mean.norm())
    if method == "full":
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(n_chains, d, generator=generator)
        end = langevin(score, start, step, n_steps, seed=seed, progress=False).final.double()
        radius, distance = end.norm(dim=1), (end - trap.mean).norm(dim=1)
    else:
        chain = radial_chain(
            score, "gaussian", step, n_steps, n_chains=n_chains, seed=seed, progress=False
        )
        u, w = torch.as_tensor(chain.u), torch.as_tensor(chain.w)
        radius, distance = (u * u + w).sqrt(), ((u - m).square() + w).sqrt()
    inside = radius <= trap.radius
    log_target = ball_log_probability(d, m, trap.radius).high
    tv = tv_lower_bound(inside[:, None], inside, math.exp(log_target))
    return Stay(d, method, float(inside.double().mean()), tv, float(distance.mean()) / d**0.5)


@dataclass(frozen=True)
class Exit:
    """Chains that left a small trap, and the bound for the same steps.

    Attributes:
        dimension: d.
        alpha: the trap's α.
        ratio: its radius over √d.
        share: share of chains that left, with its 95 % interval.
        bound: ``escape_bound`` for the same steps.
    """

    dimension: int
    alpha: float
    ratio: float
    share: Estimate
    bound: float

    @property
    def factor(self) -> float:
        """The bound over the upper end of the interval: at least this much is given away."""
        return self.bound / self.share.high


SMALL_TRAPS = ((1, 1.0, 4.0), (1, 1.5, 3.0), (2, 1.0, 3.5), (3, 1.0, 3.0), (4, 1.0, 2.5))


def exits(
    traps: Sequence[tuple[int, float, float]] = SMALL_TRAPS,
    *,
    horizon: float = 50.0,
    step: float = 0.1,
    n_chains: int = 20_000,
    seed: int = 0,
) -> list[Exit]:
    """ULA from N(0, I) in traps small enough to be left; the target is far away."""
    found = []
    for d, alpha, ratio in traps:
        score = TrapScore.standard(d, alpha=alpha, distance=4 * ratio, inner=ratio, outer=2 * ratio)
        n_steps = math.ceil(horizon / step)
        run = radial_chain(
            score,
            "gaussian",
            step,
            n_steps,
            n_chains=n_chains,
            seed=seed,
            stop_radius=score.radius,
            progress=False,
        )
        left = int((np.asarray(run.exit_step) >= 0).sum())
        bound = escape_bound(
            d, alpha, score.radius, math.log(n_steps * step), start_variance=1.0, step=step
        )
        share = clopper_pearson(left, n_chains)
        found.append(Exit(d, alpha, ratio, share, math.exp(bound.log_probability)))
    return found


@dataclass(frozen=True)
class Corrected:
    """MALA with the exact density, and proposals by the trap or by the exact score.

    Attributes:
        dimension: d.
        distance: mean distance to the target's mean at the end over √d, trap and exact score.
        acceptance: share of accepted proposals, trap and exact score.
    """

    dimension: int
    distance: tuple[float, float]
    acceptance: tuple[float, float]


def corrected(
    dimensions: Sequence[int] = (2, 8, 32, 128),
    *,
    n_chains: int = 64,
    step: float = 0.02,
    n_steps: int = 2000,
    seed: int = 0,
) -> list[Corrected]:
    """Metropolis-corrected chains from N(0, I), whose invariant law is the target."""
    found = []
    for d in dimensions:
        trap = TrapScore.standard(d)
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(n_chains, d, generator=generator, dtype=torch.float64)
        runs = [
            mala(score, trap.target.log_density, start, step, n_steps, seed=seed, progress=False)
            for score in (trap, trap.target)
        ]
        distance, acceptance = [], []
        for run in runs:
            assert run.acceptance is not None
            distance.append(float(_distances(run.final, trap.mean).mean()))
            acceptance.append(float(run.acceptance.mean()))
        found.append(Corrected(d, (distance[0], distance[1]), (acceptance[0], acceptance[1])))
    return found


# --- theorem 7 ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Starts at training points and at fresh samples, under a score that memorises.

    Attributes:
        dimension: d.
        n_points: training points.
        log10_error: certified L² error, as a power of ten.
        training: TV lower bound from training starts.
        fresh: TV lower bound from fresh starts.
        held: share of chains near a training point at the end, training and fresh starts.
    """

    dimension: int
    n_points: int
    log10_error: float
    training: Estimate
    fresh: Estimate
    held: tuple[float, float]


SIZES = ((32, 64), (64, 64), (64, 512), (128, 512), (256, 512))


def memories(
    alpha: float = 100.0,
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    inner: float = 0.2,
    outer: float = 0.3,
    step: float = 0.005,
    n_steps: int = 400,
    n_chains: int = 128,
    seed: int = 0,
) -> list[Memory]:
    """ULA with theorem 7's score: fresh against training starts over d and n."""
    found = []
    for d, n in sizes:
        target = GaussianScore(torch.zeros(d, dtype=torch.float64))
        score = MemorizingScore(target.sample(n, seed), alpha, inner, outer)
        starts = score.points[:n_chains], target.sample(n_chains, seed + 1)
        tvs, held = [], []
        for at, start in enumerate(starts):
            end = langevin(score, start, step, n_steps, seed=seed + 2 + at, progress=False).final
            near = score.nearest(end)[1] <= outer * math.sqrt(d)
            held.append(float(near.double().mean()))
            tvs.append(tv_lower_bound(near[:, None], near, _union_probability(score, outer)))
        error = float(score.lp_error(2).high) / math.log(10)
        found.append(Memory(d, n, error, tvs[0], tvs[1], (held[0], held[1])))
    return found


def _union_probability(score: MemorizingScore, outer: float) -> float:
    """Certified upper bound of the target's mass near training points."""
    d = score.dimension
    norms = score.points.norm(dim=1).tolist()
    logs = [ball_log_probability(d, norm, outer * math.sqrt(d)).high for norm in norms]
    return min(1.0, math.fsum(math.exp(log) for log in logs))


# --- Langevin dynamics against diffusion ----------------------------------------------------------


@dataclass(frozen=True)
class Contrast:
    """Distance to the target's mean over √d along both samplers, by chain.

    Attributes:
        dimension: d.
        langevin: ``[kept, chains]``, with the trap.
        diffusion: ``[levels, chains]``, with the same error at every level.
        exact: ``[kept, chains]``, Langevin dynamics with the exact score.
        times: of ``langevin`` and ``exact``; ``levels`` those of ``diffusion`` (reversed time).
    """

    dimension: int
    langevin: Tensor
    diffusion: Tensor
    exact: Tensor
    times: Tensor
    levels: Tensor


def level_trap(d: int, time: float, direction: float = -1.0) -> TrapScore:
    """The trap moved along with the noised target: the same error, at every level.

    At level t the target is N(e^(−t)μ, I). The trap's centre stays at distance 7√d from that mean,
    on the origin's side (``direction`` −1) or beyond it (+1).
    """
    standard = TrapScore.standard(d)
    mean = standard.mean * math.exp(-time)
    return TrapScore(mean, standard.alpha, centre=mean + direction * standard.mean)


def contrast(
    d: int = 256,
    *,
    n_chains: int = 64,
    step: float = 0.02,
    n_steps: int = 400,
    level_step: float = 0.1,
    direction: float = -1.0,
    seed: int = 0,
) -> Contrast:
    """Both samplers from N(0, I), with the same certified L² error of their scores."""
    trap = TrapScore.standard(d)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(n_chains, d, generator=generator, dtype=torch.float64)
    thin = max(1, n_steps // 80)

    def along(score: Score) -> Tensor:
        run = langevin(score, start, step, n_steps, seed=seed, thin=thin, progress=False)
        return _distances(_path(start, run), trap.mean)

    n_levels = math.ceil((math.log(7 * math.sqrt(d)) + 4) / level_step)
    times = [level_step * k for k in range(n_levels, -1, -1)]
    run = diffusion_sampler(
        lambda t: level_trap(d, t, direction), start, times, seed=seed, thin=1, progress=False
    )
    distances = _distances(_path(start, run), trap.mean)
    kept = torch.arange(0, n_steps + 1, thin) * step
    exact = along(trap.target)
    return Contrast(d, along(trap), distances, exact, kept, times[0] - torch.tensor(times))


def _path(start: Tensor, run: Chains) -> Tensor:
    """The start and every kept state: ``[1 + kept, C, d]``."""
    assert run.samples is not None
    return torch.cat([start[None], run.samples])


def _distances(samples: Tensor, mean: Tensor) -> Tensor:
    return (samples - mean).norm(dim=-1) / math.sqrt(mean.numel())
