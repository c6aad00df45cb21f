"""What the page on learned scores measures: networks that memorise, and where Langevin starts.

Each seed has its own data: training points, held-out points, fresh points to start from, and a
reference sample of the target. The networks of all seeds are trained and sampled together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from ..stats import Estimate, mean_interval
from .distances import gaussian_kl, mode_weights, wasserstein2
from .learned import (
    CHECK,
    Field,
    ScoreNetworks,
    called,
    check_chains,
    check_integers,
    check_points,
    dsm_loss,
    empirical_scores,
    generators_of,
    langevin_all,
    memorization,
    mixed_seed,
    normals,
    train_scores,
    trap_scores,
)

STARTS = ("fresh", "training", "normal")
DATA, NORMAL_START, REVERSE = range(10, 13)  # purposes of random numbers


class Target(Protocol):
    """A law with its score: ``GaussianScore`` or ``MixtureScore``."""

    @property
    def dimension(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def sample(self, n: int, seed: int) -> Tensor: ...


# --- starts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartsSetting:
    """Sizes of :func:`starts_study`. The defaults are the book's.

    Attributes:
        n_train: training points n.
        n_held_out: held-out points, for the control.
        n_seeds: S.
        noise: σ of denoising score matching; the networks have this level alone.
        width: of the networks.
        train_steps: of the networks that are to memorise.
        learning_rate: theirs.
        batch: noisy points a step; default n.
        control_steps: of the control, which is stopped where its held-out loss is smallest.
        control_rate: its learning rate.
        control_decay: its weight decay.
        n_starts: how many fresh, and how many training points chains start from, the first of each;
            the chains are dealt to them in turn.
        n_chains: C for each start; more than d.
        step: h of Langevin.
        n_steps: its steps.
        trap: α, inner and outer radius of the score of theorem 7, for a target of variance 1 and in
            units of √d; they are scaled to the target's variance.
    """

    n_train: int = 100
    n_held_out: int = 100
    n_seeds: int = 5
    noise: float = 0.3
    width: int = 128
    train_steps: int = 1000
    learning_rate: float = 1e-2
    batch: int | None = None
    control_steps: int = 120
    control_rate: float = 1e-3
    control_decay: float = 1.0
    n_starts: int = 30
    n_chains: int = 240
    step: float = 0.02
    n_steps: int = 1000
    trap: tuple[float, float, float] | None = (100.0, 0.2, 0.3)

    def check(self, dimension: int) -> None:
        """Raise ``ValueError`` for sizes with which nothing can be measured."""
        _check_counts(self)
        if self.n_seeds < 2:
            raise ValueError(f"n_seeds must be at least 2 for an interval, got {self.n_seeds}")
        if self.n_chains <= dimension:
            raise ValueError(f"n_chains must exceed d = {dimension}, got {self.n_chains}")
        if not 1 <= self.n_starts <= min(self.n_train, self.n_chains):
            most = min(self.n_train, self.n_chains)
            raise ValueError(f"n_starts must lie in 1 … {most}, got {self.n_starts}")


def _check_counts(setting: StartsSetting | DiffusionSetting) -> None:
    """Raise ``TypeError`` unless all counts of a setting are integers."""
    check_integers(**{f.name: getattr(setting, f.name) for f in fields(setting) if f.type == "int"})


@dataclass(frozen=True)
class StartsStudy:
    """Distances to the target after Langevin, by score, start and seed.

    The scores: ``"memorised"``, networks trained to the end; ``"stopped"``, networks on the same
    points that are stopped early by held-out ones; ``"exact"``, the target's; ``"empirical"``, the
    exact minimiser of the training loss; ``"theorem 7"``, the exact score with a trap at each
    training point. The starts: ``"fresh"``, ``"training"``, ``"normal"`` (N(0, I)).

    Attributes:
        setting: the sizes.
        dimension: d.
        kl: by score and start ``[S]``: ``gaussian_kl`` of the ends from the target's mean and
            covariance.
        w2: likewise, Wasserstein-2 distance to a reference sample of C points.
        first_mode: likewise, the share of the ends in the first component; empty without several.
        kl_floor: ``[S]``, the KL of the reference samples.
        w2_floor: ``[S]``, the distance between two samples of the target.
        memorization: of both kinds of networks ``[S]``, see ``memorization``.
        train_loss: of both ``[S]``, see ``dsm_loss``.
        test_loss: of both ``[S]``, the same at points that no network has seen.
        stopped_at: ``[S]`` steps after which the control was best.
        networks: both kinds.
        train: training points ``[S, n, d]``.
        fresh: fresh starts ``[S, n_starts, d]``.
    """

    setting: StartsSetting
    dimension: int
    kl: Mapping[str, Mapping[str, Tensor]] = field(repr=False)
    w2: Mapping[str, Mapping[str, Tensor]] = field(repr=False)
    first_mode: Mapping[str, Mapping[str, Tensor]] = field(repr=False)
    kl_floor: Tensor
    w2_floor: Tensor
    memorization: Mapping[str, Tensor]
    train_loss: Mapping[str, Tensor]
    test_loss: Mapping[str, Tensor]
    stopped_at: Tensor
    networks: Mapping[str, ScoreNetworks] = field(repr=False)
    train: Tensor = field(repr=False)
    fresh: Tensor = field(repr=False)

    def interval(self, measure: str, score: str, start: str, confidence: float = 0.95) -> Estimate:
        """Mean over seeds of ``"kl"``, ``"w2"`` or ``"first_mode"``, with Student's interval."""
        return mean_interval(getattr(self, measure)[score][start].numpy(), confidence)

    def ratio(
        self,
        score: str,
        above: str = "training",
        below: str = "fresh",
        measure: str = "kl",
        confidence: float = 0.95,
    ) -> Estimate:
        """Geometric mean over seeds of one start's distance over another's, with its interval."""
        values = getattr(self, measure)[score]
        return geometric_mean_ratio(values[above], values[below], confidence)


def geometric_mean_ratio(above: Tensor, below: Tensor, confidence: float = 0.95) -> Estimate:
    """Geometric mean of ``above / below`` over seeds; the interval is Student's of the logarithm.

    Args:
        above: ``[S]`` positive.
        below: ``[S]`` positive.
        confidence: nominal coverage.

    Raises:
        ValueError: fewer than two seeds, different lengths, numbers that are not positive.
    """
    if above.shape != below.shape or not ((above > 0) & (below > 0)).all():
        raise ValueError("above and below must be positive and of one length")
    log = mean_interval((above.log() - below.log()).numpy(), confidence)
    value, low, high = (math.exp(x) for x in (log.value, log.low, log.high))
    return Estimate(value, low, high, log.n, confidence)


def starts_study(
    target: Target,
    setting: StartsSetting | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    chain_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[str], object] | None = None,
) -> StartsStudy:
    """Train on samples of the target, run Langevin from three starts, measure the distances.

    Args:
        target: what is sampled.
        setting: sizes; default ``StartsSetting()``.
        seed: data set i and its networks depend on ``seed + i``.
        dtype: of the training.
        chain_dtype: of the chains, whose results are averages.
        device: of training and chains.
        progress: called with the name of each part when it is done.

    Raises:
        TypeError: a count that is no integer.
        ValueError: sizes with which nothing can be measured; traps that meet.
        FloatingPointError: a training diverged.
        DivergenceError: chains diverged.
    """
    setting = setting or StartsSetting()
    setting.check(target.dimension)
    tell = progress or (lambda part: None)
    data = _StartsData(target, setting, seed, dtype, device)
    networks, stopped_at = _starts_networks(data, setting, seed, tell)
    scores: dict[str, Field] = {k: nets.to(chain_dtype).at() for k, nets in networks.items()}
    scores |= _known_scores(target, data.train.to(chain_dtype), setting)
    starts, ends = data.starts.to(chain_dtype), {}
    for name, score in scores.items():
        final = langevin_all(score, starts, setting.step, setting.n_steps, seed=seed)
        ends[name] = dict(zip(STARTS, final.double().cpu().split(setting.n_chains, 1), strict=True))
        tell(name)
    return StartsStudy(
        setting,
        target.dimension,
        **_distances(target, ends, data.reference),
        **_floors(target, data.reference, data.second),
        **_losses(networks, data),
        stopped_at=stopped_at,
        networks=networks,
        train=data.train,
        fresh=data.fresh,
    )


class _StartsData:
    """A seed's points are one sample of the target, dealt to their uses."""

    def __init__(
        self,
        target: Target,
        setting: StartsSetting,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        chains = setting.n_chains
        sizes = (setting.n_train, setting.n_held_out, setting.n_starts, setting.n_train)
        points = draw(target, sum(sizes) + 2 * chains, setting.n_seeds, seed)
        *parts, self.reference, self.second = points.split([*sizes, chains, chains], 1)
        self.train, self.held_out, self.fresh, self.test = (x.to(device, dtype) for x in parts)
        turn = torch.arange(chains) % setting.n_starts
        generators = generators_of(seed, setting.n_seeds, NORMAL_START, self.train.device)
        normal = normals(self.train.new_empty(setting.n_seeds, chains, points.shape[2]), generators)
        # [S, 3 C, d]
        self.starts = torch.cat([self.fresh[:, turn], self.train[:, turn], normal], 1)


def draw(target: Target, n: int, n_seeds: int, seed: int) -> Tensor:
    """``[S, n, d]`` float64 points of the target; those of data set i depend on ``seed + i``."""
    seeds = (mixed_seed(seed + i, DATA) for i in range(n_seeds))
    return torch.stack([target.sample(n, s).double() for s in seeds])


def _starts_networks(
    data: _StartsData, setting: StartsSetting, seed: int, tell: Callable[[str], object]
) -> tuple[dict[str, ScoreNetworks], Tensor]:
    """Both kinds of networks, and ``[S]`` steps of the control."""
    common: dict[str, Any] = {
        "noise": setting.noise,
        "width": setting.width,
        "batch": setting.batch,
        "start": "zero",
        "seed": seed,
    }
    memorised = train_scores(
        data.train, steps=setting.train_steps, learning_rate=setting.learning_rate, **common
    )
    tell("training to memorise")
    control = train_scores(
        data.train,
        steps=setting.control_steps,
        learning_rate=setting.control_rate,
        weight_decay=setting.control_decay,
        validation=data.held_out,
        check_every=5,
        **common,
    )
    tell("training the control")
    assert control.early is not None
    return {"memorised": memorised.final, "stopped": control.early}, control.best_step


def _known_scores(target: Target, train: Tensor, setting: StartsSetting) -> dict[str, Field]:
    scores: dict[str, Field] = {
        "exact": target,
        "empirical": empirical_scores(train, setting.noise),
    }
    if setting.trap is not None:
        alpha, inner, outer = setting.trap
        variance = _variance(target)
        unit = math.sqrt(variance * target.dimension)
        scores["theorem 7"] = trap_scores(
            train, target, alpha=alpha / variance, inner=inner * unit, outer=outer * unit
        )
    return scores


def _distances(
    target: Target, ends: Mapping[str, Mapping[str, Tensor]], reference: Tensor
) -> dict[str, Any]:
    """Each measure of each score, start and seed."""
    mean, covariance = moments(target)

    def each(measure: Callable[[Tensor, Tensor], float]) -> dict[str, dict[str, Tensor]]:
        return {
            score: {start: _over_seeds(measure, x, reference) for start, x in starts.items()}
            for score, starts in ends.items()
        }

    return {
        "kl": each(lambda x, _: gaussian_kl(x, mean, covariance)),
        "w2": each(wasserstein2),
        "first_mode": each(lambda x, _: first_mode(target, x)) if n_modes(target) > 1 else {},
    }


def _over_seeds(measure: Callable[[Tensor, Tensor], float], x: Tensor, reference: Tensor) -> Tensor:
    values = [measure(a, b) for a, b in zip(x, reference, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def _floors(target: Target, reference: Tensor, second: Tensor) -> dict[str, Any]:
    mean, covariance = moments(target)
    kl = _over_seeds(lambda x, _: gaussian_kl(x, mean, covariance), reference, second)
    return {"kl_floor": kl, "w2_floor": _over_seeds(wasserstein2, reference, second)}


def _losses(networks: Mapping[str, ScoreNetworks], data: _StartsData) -> dict[str, Any]:
    return {
        "memorization": {k: memorization(v, data.train) for k, v in networks.items()},
        "train_loss": {k: dsm_loss(v, data.train, copies=4) for k, v in networks.items()},
        "test_loss": {k: dsm_loss(v, data.test, copies=4) for k, v in networks.items()},
    }


# --- the target's moments -------------------------------------------------------------------------


def _components(target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Means ``[K, d]``, variances ``[K]`` and weights ``[K]`` of the target as a mixture."""
    law: Any = target
    if not hasattr(law, "means"):
        mean = torch.as_tensor(law.mean, dtype=torch.float64)
        return mean[None], torch.tensor([law.variance]).double(), torch.ones(1).double()
    means = torch.as_tensor(law.means, dtype=torch.float64)
    variances = torch.as_tensor(law.variances, dtype=torch.float64).expand(len(means))
    weights = torch.as_tensor(law.weights, dtype=torch.float64).expand(len(means))
    return means, variances, weights / weights.sum()


def n_modes(target: Target) -> int:
    """Number of the target's components."""
    return len(_components(target)[0])


def moments(target: Target) -> tuple[Tensor, Tensor]:
    """Mean ``[d]`` and covariance ``[d, d]`` of a Gaussian or a mixture."""
    means, variances, weights = _components(target)
    mean = weights @ means
    shifts = means - mean
    within = (weights @ variances) * torch.eye(len(mean), dtype=torch.float64)
    return mean, within + (shifts.T * weights) @ shifts


def first_mode(target: Target, samples: Tensor) -> float:
    """Share of ``samples [C, d]`` in the target's first component."""
    return float(mode_weights(samples, *_components(target))[0])


def _variance(target: Target) -> float:
    """The components' variance, the largest if they differ."""
    return float(_components(target)[1].max())


# --- diffusion ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiffusionSetting:
    """Sizes of :func:`learned_diffusion_study`. The defaults are the book's.

    Attributes:
        n_train: training points.
        n_held_out: held-out points, to stop the training by.
        n_seeds: S.
        lowest: smallest σ of the noise levels, which Langevin uses.
        highest: largest σ; far above the target's extent.
        n_levels: levels, in geometric progression; one step of the diffusion sampler each.
        width: of the networks.
        train_steps: of the networks, which are kept where their held-out loss is smallest.
        learning_rate: of the networks.
        batch: noisy points a step; default n.
        weight_decay: of the networks.
        n_chains: C of each sampler.
        step: h of Langevin.
        n_steps: its steps.
    """

    n_train: int = 100
    n_held_out: int = 100
    n_seeds: int = 5
    lowest: float = 0.3
    highest: float = 100.0
    n_levels: int = 60
    width: int = 128
    train_steps: int = 300
    learning_rate: float = 1e-3
    batch: int | None = 400
    weight_decay: float = 1.0
    n_chains: int = 240
    step: float = 0.02
    n_steps: int = 1000

    def check(self) -> None:
        """Raise ``ValueError`` for sizes with which nothing can be measured."""
        _check_counts(self)
        if self.n_seeds < 2 or self.n_levels < 2 or self.n_chains < 1:
            raise ValueError("n_seeds and n_levels must be at least 2, n_chains at least 1")
        if not 0 < self.lowest < self.highest < math.inf:
            raise ValueError(f"need 0 < lowest={self.lowest} < highest={self.highest}")

    def levels(self) -> tuple[float, ...]:
        """σ of the levels, falling."""
        ratio = math.log(self.lowest / self.highest) / (self.n_levels - 1)
        return tuple(self.highest * math.exp(ratio * k) for k in range(self.n_levels))


@dataclass(frozen=True)
class DiffusionStudy:
    """Distances to the target, by sampler and seed.

    The samplers: ``"diffusion"``, learned scores of all levels, from N(0, I); ``"langevin"``, the
    learned score of the lowest, from N(0, I); ``"langevin fresh"``, the same from fresh samples;
    ``"exact"`` and ``"exact fresh"``, Langevin with the target's score from the same starts.

    Attributes:
        setting: the sizes.
        w2: by sampler ``[S]``, Wasserstein-2 distance to a reference sample of C points.
        first_mode: likewise, the share of the ends in the first component.
        w2_floor: ``[S]``, the distance between two samples of the target.
        levels: the σ.
        error: ``[L, S]``: mean of ``‖s - s*‖²`` of the learned scores at points of the noisy
            target, in units of ``d/σ²``.
        stopped_at: ``[S]`` steps after which the networks were kept.
    """

    setting: DiffusionSetting
    w2: Mapping[str, Tensor]
    first_mode: Mapping[str, Tensor]
    w2_floor: Tensor
    levels: tuple[float, ...] = field(repr=False)
    error: Tensor = field(repr=False)
    stopped_at: Tensor

    def ratio(self, above: str, below: str = "diffusion", confidence: float = 0.95) -> Estimate:
        """Geometric mean over seeds of one sampler's distance over another's."""
        return geometric_mean_ratio(self.w2[above], self.w2[below], confidence)


def learned_diffusion_study(
    target: Target,
    setting: DiffusionSetting | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    chain_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[str], object] | None = None,
) -> DiffusionStudy:
    """Train one network a seed on all noise levels; sample by diffusion and by Langevin.

    Args:
        target: what is sampled; with a method ``noised`` of the forward process if the errors of
            the learned scores are wanted (``GaussianScore`` and ``MixtureScore`` have it).
        setting: sizes; default ``DiffusionSetting()``.
        seed: data set i, its network and its chains depend on ``seed + i``.
        dtype: of the training.
        chain_dtype: of the chains, whose results are averages.
        device: of training and chains.
        progress: called with the name of each part when it is done.

    Raises:
        TypeError: a count that is no integer.
        ValueError: sizes with which nothing can be measured.
        FloatingPointError: a training diverged.
        DivergenceError: chains diverged.
    """
    setting = setting or DiffusionSetting()
    setting.check()
    tell = progress or (lambda part: None)
    chains, size = setting.n_chains, setting.n_seeds
    sizes = [setting.n_train, setting.n_held_out, chains, chains, chains]
    points = draw(target, sum(sizes), size, seed).split(sizes, 1)
    train, held_out, fresh = (x.to(device, dtype) for x in points[:3])
    networks, stopped_at = _diffusion_networks(train, held_out, setting, seed)
    tell("training")
    generators = generators_of(seed, size, NORMAL_START, train.device)
    normal = normals(torch.empty_like(fresh), generators)
    ends = {"diffusion": reverse_diffusion(networks, normal, seed=seed)}
    tell("diffusion")
    both = torch.cat([normal, fresh], 1).to(chain_dtype)
    learned = networks.to(chain_dtype).at(networks.levels[-1])
    scores: dict[str, Field] = {"langevin": learned, "exact": target}
    for name, score in scores.items():
        final = langevin_all(score, both, setting.step, setting.n_steps, seed=seed)
        ends[name], ends[f"{name} fresh"] = final.split(chains, 1)
        tell(name)
    reference, second = points[3:]
    ends = {name: x.double().cpu() for name, x in ends.items()}
    return DiffusionStudy(
        setting,
        {k: _over_seeds(wasserstein2, x, reference) for k, x in ends.items()},
        {k: _over_seeds(lambda a, _: first_mode(target, a), x, x) for k, x in ends.items()},
        _over_seeds(wasserstein2, reference, second),
        networks.levels,
        score_errors(networks, target, second.to(device, dtype), seed=seed),
        stopped_at,
    )


def _diffusion_networks(
    train: Tensor, held_out: Tensor, setting: DiffusionSetting, seed: int
) -> tuple[ScoreNetworks, Tensor]:
    training = train_scores(
        train,
        noise=setting.levels(),
        width=setting.width,
        batch=setting.batch,
        steps=setting.train_steps,
        learning_rate=setting.learning_rate,
        weight_decay=setting.weight_decay,
        validation=held_out,
        seed=seed,
    )
    assert training.early is not None
    return training.early, training.best_step


def diffusion_times(levels: Iterable[float]) -> tuple[float, ...]:
    """Times ``log(1 + σ²)/2`` of the process ``x_t = e^(-t) x + sqrt(1 - e^(-2t)) ε``, at which
    ``e^t x_t`` is the point with noise σ; and 0 at the end."""
    return (*(0.5 * math.log1p(sigma**2) for sigma in levels), 0.0)


def reverse_diffusion(networks: ScoreNetworks, start: Tensor, *, seed: int = 0) -> Tensor:
    """The ancestral sampler with the networks' scores at all levels, from the highest to time 0.

    A step from time t to ``t - D`` is
    ``x' = e^D x + (e^D - e^(-D)) s_t(x) + sqrt(1 - e^(-2D)) ξ``, with the score
    ``s_t(x) = e^t s_σ(e^t x)``: ``diffusion_sampler`` for S networks at once.

    Args:
        networks: with falling levels.
        start: ``[S, C, d]``, from N(0, I).
        seed: the noise of network i depends on ``seed + i`` and C.

    Returns:
        ``[S, C, d]``.

    Raises:
        TypeError: a start that is not float32 or float64.
        ValueError: levels that do not fall, or a start of another shape or not finite.
        DivergenceError: chains that are no longer finite.
    """
    levels = networks.levels
    check_points("start", start)
    networks.check("start", start)
    if list(levels) != sorted(levels, reverse=True):
        raise ValueError("the networks' levels must fall: train with the largest noise first")
    times = diffusion_times(levels)
    generators = generators_of(seed, networks.size, REVERSE, start.device)
    x, noise = start.detach().clone(), torch.empty_like(start)
    for number, (sigma, now) in enumerate(zip(levels, times[:-1], strict=True), 1):
        after = times[number]
        grow, up = math.exp(now - after), math.exp(now)
        score = up * networks.at(sigma)(up * x)
        spread = math.sqrt(-math.expm1(2 * (after - now)))
        x = grow * x + (grow - 1 / grow) * score + spread * normals(noise, generators)
        if number % CHECK == 0 or number == len(levels):
            check_chains(x, now - after, math.inf, number)
    return x


def score_errors(
    networks: ScoreNetworks, target: Target, points: Tensor, *, seed: int = 0
) -> Tensor:
    """Squared errors of the learned scores under the noisy target, in units of ``d/σ²``.

    Args:
        networks: of S data sets.
        target: with ``noised(t)``, the law of the forward process.
        points: ``[S, n, d]``, a sample of the target that the networks have not seen.
        seed: of the noise.

    Returns:
        ``[L, S]`` float64.

    Raises:
        TypeError: points that are not float32 or float64.
        ValueError: points, or a target's scores, of another shape; points that are not finite.
    """
    check_points("points", points)
    networks.check("points", points)
    law: Any = target
    generators = generators_of(seed, networks.size, DATA, points.device)
    noise = normals(torch.empty_like(points), generators)
    errors = []
    for sigma, t in zip(networks.levels, diffusion_times(networks.levels), strict=False):
        x, down = points + sigma * noise, math.exp(-t)
        exact = down * called(law.noised(t), down * x)
        squares = (networks.at(sigma)(x) - exact).square().mean((1, 2))
        errors.append(sigma**2 * squares.double().cpu())
    return torch.stack(errors)
