"""Score networks of three layers, several at once, by denoising score matching.

The networks of S data sets are stacked, so that a step of all is three batched products. Denoising
score matching (Vincent 2011, *A connection between score matching and denoising autoencoders*)
adds normal noise of standard deviation σ to the training points, and fits the mean D(x) of the
clean point given the noisy one; the score of the noisy law is ``(D(x) - x) / σ²``. Its minimiser
over all functions knows the training points alone: :func:`empirical_scores`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SILU_SLOPE = 1.1  # an upper bound of |silu'|, whose largest value is 1.0998
WARM_UP = 0.05  # share of the steps in which the learning rate rises
BETAS = (0.9, 0.99)
STARTS = ("gaussian", "zero")
SKIP_DECAY = 1.0  # weight decay of g: what holds up the part that points share is to be F
HELD_OUT_COPIES = 4  # noisy copies of each held-out point
TRAIN, HELD_OUT, CHAINS = range(3)  # purposes of random numbers; see generators_of
_MASK = (1 << 63) - 1
CHECK = 16  # steps between looks at the size of chains
GROWTH = 1e6  # chains that grow by more than this, against start and noise, have diverged

# A score for each of S networks: ``[S, C, d]`` to ``[S, C, d]``.
Field = Callable[[Tensor], Tensor]

# --- networks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreNetworks:
    """S networks of three layers that denoise, with the scores that follow.

    With the training points' mean c and root mean square deviation τ a coordinate, and
    ``r² = τ² + σ²``, the denoised point is
    ``D(x) = c + g_σ (τ²/r²)(x - c) + (σ τ/r) F((x - c)/r, log σ)``: the scaling of Karras et al.
    2022 (*Elucidating the design space of diffusion-based generative models*), with a learned
    factor ``g_σ``. F is linear, SiLU, linear, SiLU, linear. At the start F = 0. With g = 1 that is
    the exact denoiser of the law N(c, τ² I), with ``g = r²/τ²`` the score 0; a network that
    memorises needs g = 0, for which a fixed factor would make it work.

    Attributes:
        weights: ``w1 [S, d (+ 1), width], b1 [S, 1, width], w2, b2, w3, b3 [S, 1, d]`` and the
            factors ``g [S, L]``; the additional input, ``log σ`` in units of its standard
            deviation over the levels, exists when there are several.
        centre: ``[S, 1, d]``, c.
        spread: ``[S, 1, 1]``, τ.
        levels: the L standard deviations σ that the networks know.
    """

    weights: tuple[Tensor, ...] = field(repr=False)
    centre: Tensor = field(repr=False)
    spread: Tensor = field(repr=False)
    levels: tuple[float, ...]

    @property
    def size(self) -> int:
        """S."""
        return len(self.centre)

    @property
    def dimension(self) -> int:
        """d."""
        return self.centre.shape[2]

    def select(self, index: int) -> ScoreNetworks:
        """Network ``index`` alone, as a stack of one that shares its memory.

        Raises:
            IndexError: there is no such network.
        """
        if not -self.size <= index < self.size:
            raise IndexError(f"index must lie in 0 … {self.size - 1}, got {index}")
        index %= self.size
        part = slice(index, index + 1)
        weights = tuple(w[part] for w in self.weights)
        return ScoreNetworks(weights, self.centre[part], self.spread[part], self.levels)

    def to(self, dtype: torch.dtype) -> ScoreNetworks:
        """A copy in another dtype."""
        weights = tuple(w.detach().to(dtype) for w in self.weights)
        return ScoreNetworks(weights, self.centre.to(dtype), self.spread.to(dtype), self.levels)

    def denoise(self, x: Tensor, level: int | Tensor) -> Tensor:
        """``D(x)``, with gradients.

        Args:
            x: ``[S, C, d]`` in the dtype of the weights.
            level: index into ``levels``, or one for each point, ``[S, C]``.
        """
        w1, b1, w2, b2, w3, b3, gains = self.weights
        sigma = self.sigma(level)
        variance = self.spread.square()
        radius = (variance + sigma.square()).sqrt()
        centred = x - self.centre
        first = centred / radius
        if len(self.levels) > 1:
            first = torch.cat([first, self._condition(sigma).expand(*x.shape[:2], 1)], 2)
        spare = not torch.is_grad_enabled()  # then the products' memory may be overwritten
        hidden = F.silu(torch.baddbmm(b1, first, w1), inplace=spare)
        hidden = F.silu(torch.baddbmm(b2, hidden, w2), inplace=spare)
        out = torch.baddbmm(b3, hidden, w3)
        gain = gains[:, level, None] if isinstance(level, int) else gains.gather(1, level)
        shrunk = (gain[..., None] * variance / radius.square()) * centred
        return self.centre + shrunk + (sigma * self.spread / radius) * out

    def sigma(self, level: int | Tensor) -> Tensor:
        """σ of a level, ``[]``, or of each point's, ``[S, C, 1]``."""
        sigmas = self._sigmas
        return sigmas[level] if isinstance(level, int) else sigmas[level][..., None]

    @property
    def _sigmas(self) -> Tensor:
        return torch.tensor(self.levels, dtype=self.centre.dtype, device=self.centre.device)

    def _condition(self, sigma: Tensor) -> Tensor:
        logs = self._sigmas.log()
        return (sigma.log() - logs.mean()) / logs.std()

    def evaluate(self, x: Tensor, noise: float | None = None) -> Tensor:
        """The scores of all networks, each at its own points, without gradients.

        Args:
            x: ``[S, C, d]``, any floating dtype.
            noise: one of ``levels``; may be left out if there is but one.

        Returns:
            ``[S, C, d]`` like ``x``.

        Raises:
            ValueError: another shape, or a noise that the networks do not know.
        """
        return self.at(noise)(x)

    def check(self, name: str, x: Tensor) -> None:
        """Raise ``ValueError`` unless ``x`` is ``[S, C, d]``."""
        if x.ndim != 3 or x.shape[0] != self.size or x.shape[2] != self.dimension:
            wanted = f"[S = {self.size}, C, d = {self.dimension}]"
            raise ValueError(f"{name} must be {wanted}, got {list(x.shape)}")

    def at(self, noise: float | None = None) -> Field:
        """:meth:`evaluate` at one noise, as a function of ``x`` alone.

        Raises:
            ValueError: a noise that the networks do not know.
        """
        level = self.level(noise)
        variance = self.levels[level] ** 2

        def scores(x: Tensor) -> Tensor:
            self.check("x", x)
            with torch.no_grad():
                y = x.to(self.centre.dtype)
                return ((self.denoise(y, level) - y) / variance).to(x.dtype)

        return scores

    def score(self, index: int, noise: float | None = None) -> NetworkScore:
        """One network's score as a function of points ``[..., d]``.

        Raises:
            IndexError: there is no such network.
            ValueError: a noise that the networks do not know.
        """
        return NetworkScore(self.select(index), self.levels[self.level(noise)])

    def level(self, noise: float | None = None) -> int:
        """Index of a noise in ``levels``.

        Raises:
            ValueError: it is not there, or was left out though there are several.
        """
        if noise is None and len(self.levels) == 1:
            return 0
        near = [i for i, s in enumerate(self.levels) if noise and math.isclose(s, noise)]
        if not near:
            raise ValueError(f"noise must be one of the networks' levels {self.levels}: {noise}")
        return near[0]


@dataclass(frozen=True)
class NetworkScore:
    """The score of one network at one noise: a callable on ``[..., d]``.

    Attributes:
        networks: a stack of one.
        noise: σ.
    """

    networks: ScoreNetworks
    noise: float

    @property
    def dimension(self) -> int:
        """d."""
        return self.networks.dimension

    @property
    def lipschitz(self) -> float:
        """An upper bound of the Lipschitz constant: spectral norms of the layers times the largest
        slopes of SiLU. Far from tight."""
        nets, variance = self.networks, float(self.networks.spread.square())
        w1, _, w2, _, w3, _, gains = (w.detach().double() for w in nets.weights)
        product = math.prod(
            float(torch.linalg.matrix_norm(w[0], 2)) for w in (w1[:, : nets.dimension], w2, w3)
        )
        total = variance + self.noise**2
        outer = self.noise * math.sqrt(variance) / total * SILU_SLOPE**2 * product
        gain = abs(float(gains[0, nets.level(self.noise)])) * variance / total
        return (1 + gain + outer) / self.noise**2

    def __call__(self, x: Tensor) -> Tensor:
        """Scores ``[..., d]`` like ``x [..., d]``.

        Raises:
            TypeError: ``x`` is no float32 or float64 tensor.
            ValueError: another last dimension.
        """
        if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"x must be a float32 or float64 tensor, not {kind}: use x.double()")
        if not x.ndim or x.shape[-1] != self.dimension:
            raise ValueError(f"x must end in d = {self.dimension}, got shape {list(x.shape)}")
        flat = x.reshape(1, -1, self.dimension)
        return self.networks.evaluate(flat, self.noise).reshape(x.shape)


# --- random numbers -------------------------------------------------------------------------------


def mixed_seed(*words: int) -> int:
    """A seed from several numbers, such that neighbours give unrelated streams."""
    import numpy as np

    state = np.random.SeedSequence([w & _MASK for w in words]).generate_state(1, np.uint64)
    return int(state[0]) & _MASK


def generators_of(
    seed: int, size: int, purpose: int, device: torch.device
) -> list[torch.Generator]:
    """One generator a network; that of network i depends on ``seed + i`` and the purpose alone.

    Raises:
        TypeError: a seed that is no integer.
    """
    check_integers(seed=seed)
    return [torch.Generator(device).manual_seed(mixed_seed(seed + i, purpose)) for i in range(size)]


def normals(
    out: Tensor, generators: Sequence[torch.Generator], scratch: Tensor | None = None
) -> Tensor:
    """Fill ``out [S, C, d]`` with standard normal numbers, row s from generator s.

    They are drawn in single precision, about eight times as fast as in double, into ``scratch``,
    which may be reused, and widened.
    """
    if scratch is None:
        scratch = torch.empty_like(out, dtype=torch.float32)
    for row, generator in zip(scratch, generators, strict=True):
        row.normal_(generator=generator)
    return out.copy_(scratch)


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What came of a training.

    Losses are weighted by ``1 + σ²/τ²``, such that the score of N(c, (τ² + σ²) I) has 1 at every
    noise, and a network that names each noisy point's origin has 0.

    Attributes:
        final: the networks after the last step.
        early: those with the smallest loss on the held-out points, each after ``best_step`` steps;
            None without such points.
        losses: ``[steps, S]``, of each step's batch, before the step.
        checked: steps after which the held-out loss was taken, 0 for the start.
        held_out: ``[len(checked), S]``, with the same noise each time.
        best_step: ``[S]`` int64; empty without held-out points.
    """

    final: ScoreNetworks
    early: ScoreNetworks | None
    losses: Tensor = field(repr=False)
    checked: tuple[int, ...] = field(repr=False)
    held_out: Tensor = field(repr=False)
    best_step: Tensor


def train_scores(
    samples: Tensor,
    *,
    noise: float | Iterable[float],
    steps: int,
    width: int = 128,
    batch: int | None = None,
    learning_rate: float = 1e-2,
    weight_decay: float = 0.0,
    start: str = "gaussian",
    seed: int = 0,
    validation: Tensor | None = None,
    check_every: int = 10,
    progress: Callable[[int], object] | None = None,
) -> Training:
    """Train one network on each of S data sets, all at once, by denoising score matching.

    Adam with decoupled weight decay; the learning rate rises over the first twentieth of the steps
    and falls to 0 as a cosine. Network i depends, to rounding, on its data and ``seed + i`` alone.
    With the default batch every point is used once a step, with new noise.

    Args:
        samples: ``[S, n, d]`` float32 or float64, on any device; the training works in that dtype
            and there.
        noise: standard deviation σ of the noise; several make networks that are told the noise,
            each noisy point having one of them at random.
        steps: of the optimiser, at least 1.
        width: of both hidden layers.
        batch: noisy points a step and network; default n. A multiple of n uses all points equally,
            any other number draws them with replacement.
        learning_rate: its largest value.
        weight_decay: of the three matrices.
        start: ``"gaussian"``, the score of N(c, (τ² + σ²) I) with the samples' mean and spread, or
            ``"zero"``, the score 0, which knows nothing; for noise far above τ the latter is a poor
            start.
        seed: of initial weights, noise and batches.
        validation: ``[S, n', d]`` held-out samples of the same laws, to stop early by: the training
            goes on to its end, and the best weights on the way are kept beside the last.
        check_every: steps between looks at the held-out loss.
        progress: called with the number of steps done, after each.

    Raises:
        TypeError: samples that are not float32 or float64, a count or seed that is no integer, a
            noise that is no number.
        ValueError: shapes that do not fit, samples that are not finite or all equal, a size, noise
            or rate out of its range, samples or noise whose squares the dtype cannot hold.
        FloatingPointError: the training diverged; the message names the learning rate and the
            scales of samples and noise.
    """
    levels = _levels(noise)
    check_points("samples", samples)
    check_integers(seed=seed)
    if start not in STARTS:
        raise ValueError(f"start must be one of {STARTS}, got {start!r}")
    batch = samples.shape[1] if batch is None else batch
    _check_sizes(steps=steps, width=width, check_every=check_every, batch=batch)
    _check_rates(learning_rate, weight_decay)
    if validation is not None:
        _check_validation(validation, samples)
    with torch.inference_mode(False), torch.enable_grad():
        samples = _plain(samples)
        validation = None if validation is None else _plain(validation)
        generators = generators_of(seed, len(samples), TRAIN, samples.device)
        networks = _initial(samples, levels, width, start, generators)
        batches = _Batches(samples, batch, networks, generators)
        held_out = None if validation is None else _HeldOut(validation, networks, seed, check_every)
        losses = _optimise(
            networks, batches, held_out, steps, learning_rate, weight_decay, progress
        )
    final = _detached(networks)
    if held_out is None:
        nothing = torch.empty(0, dtype=torch.float64)
        return Training(final, None, losses, (), nothing.view(0, 1), nothing.long())
    return held_out.training(final, losses)


def _plain(x: Tensor) -> Tensor:
    """``x`` without history; a copy if it comes from inference mode, whose tensors cannot train."""
    return x.clone() if x.is_inference() else x.detach()


def _optimise(
    networks: ScoreNetworks,
    batches: _Batches,
    held_out: _HeldOut | None,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    progress: Callable[[int], object] | None,
) -> Tensor:
    """Train in place; ``[steps, S]`` losses."""
    matrices, others = networks.weights[0:5:2], (*networks.weights[1:6:2], networks.weights[6])
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others[:-1]},
        {"params": others[-1:], "weight_decay": SKIP_DECAY},
    ]
    optimiser = torch.optim.AdamW(groups, learning_rate, BETAS, weight_decay=0.0, fused=True)
    losses = networks.centre.new_empty(steps, networks.size)
    for step in range(steps):
        if held_out is not None and step % held_out.every == 0:
            held_out.look(step)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * _rate(step, steps)
        optimiser.zero_grad()
        loss = batches.loss()
        loss.sum().backward()
        optimiser.step()
        losses[step] = loss.detach()
        if progress is not None:
            progress(step + 1)
    if held_out is not None:
        held_out.look(steps)
    _check_converged(losses, networks, learning_rate)
    return losses.double().cpu()


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate at a step: a ramp, then a cosine to 0."""
    ramp = math.ceil(WARM_UP * steps)
    if step < ramp:
        return (step + 1) / (ramp + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - ramp) / (steps - ramp)))


class _Batches:
    """Draws noisy points and takes the loss at them."""

    def __init__(
        self,
        samples: Tensor,
        batch: int,
        networks: ScoreNetworks,
        generators: list[torch.Generator],
    ) -> None:
        self.samples, self.batch, self.networks = samples, batch, networks
        self.generators = generators
        copies = -(-batch // samples.shape[1])
        self.whole = batch % samples.shape[1] == 0
        self.clean = samples.repeat(1, copies, 1)[:, :batch]
        self.noise = torch.empty_like(self.clean)
        self.scratch = torch.empty_like(self.clean, dtype=torch.float32)

    def loss(self) -> Tensor:
        """``[S]``, with its graph."""
        level = _draw_levels(self.networks, self.batch, self.generators)
        clean = self.clean if self.whole else self._drawn()
        noise = normals(self.noise, self.generators, self.scratch)
        return _weighted_loss(self.networks, clean, noise, level)

    def _drawn(self) -> Tensor:
        n = self.samples.shape[1]
        rows = [_integers(n, self.batch, g, self.samples.device) for g in self.generators]
        return torch.stack([x[row] for x, row in zip(self.samples, rows, strict=True)])


class _HeldOut:
    """Keeps each network's weights at its smallest held-out loss."""

    def __init__(self, validation: Tensor, networks: ScoreNetworks, seed: int, every: int) -> None:
        self.networks, self.every = networks, every
        generators = generators_of(seed, networks.size, HELD_OUT, validation.device)
        self.clean = validation.repeat(1, HELD_OUT_COPIES, 1)
        self.level = _draw_levels(networks, self.clean.shape[1], generators)
        self.noise = normals(torch.empty_like(self.clean), generators)
        self.kept = [w.detach().clone() for w in networks.weights]
        self.best = self.clean.new_full((networks.size,), math.inf)
        self.best_step = torch.zeros(networks.size, dtype=torch.int64, device=self.clean.device)
        self.steps: list[int] = []
        self.losses: list[Tensor] = []

    @torch.no_grad()
    def look(self, step: int) -> None:
        loss = _weighted_loss(self.networks, self.clean, self.noise, self.level)
        better = loss < self.best  # a NaN is not
        for kept, weight in zip(self.kept, self.networks.weights, strict=True):
            kept[better] = weight[better]
        self.best = torch.where(better, loss, self.best)
        self.best_step[better] = step
        self.steps.append(step)
        self.losses.append(loss)

    def training(self, final: ScoreNetworks, losses: Tensor) -> Training:
        early = ScoreNetworks(tuple(self.kept), final.centre, final.spread, final.levels)
        held_out = torch.stack(self.losses).double().cpu()
        best = self.best_step.cpu()
        return Training(final, early, losses, tuple(self.steps), held_out, best)


def _weighted_loss(
    networks: ScoreNetworks, clean: Tensor, noise: Tensor, level: int | Tensor
) -> Tensor:
    """``[S]``: mean of ``(D - clean)² (1/σ² + 1/τ²)`` over points and coordinates."""
    sigma = networks.sigma(level)
    error = networks.denoise(clean + sigma * noise, level) - clean
    weight = sigma.square().reciprocal() + networks.spread.square().reciprocal()
    return (error.square() * weight).mean((1, 2))


def _draw_levels(
    networks: ScoreNetworks, count: int, generators: Sequence[torch.Generator]
) -> int | Tensor:
    """A level for each point, ``[S, count]``; 0 when there is but one."""
    n_levels, device = len(networks.levels), networks.centre.device
    if n_levels == 1:
        return 0
    return torch.stack([_integers(n_levels, count, g, device) for g in generators])


def _integers(high: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randint(high, (count,), generator=generator, device=device)


def _initial(
    samples: Tensor,
    levels: tuple[float, ...],
    width: int,
    start: str,
    generators: Sequence[torch.Generator],
) -> ScoreNetworks:
    """Hidden layers of He's initial weights, an output layer of zeros, factors by ``start``."""
    centre = samples.mean(1, keepdim=True)
    spread = (samples - centre).square().mean((1, 2), keepdim=True).sqrt()
    if (samples == samples[:, :1]).flatten(1).all(1).any():
        raise ValueError("samples must not all be equal within a data set")
    _check_scales(spread, levels)
    size, _, d = samples.shape
    inputs = d + (len(levels) > 1)
    shapes = [(inputs, width), (1, width), (width, width), (1, width), (width, d), (1, d)]
    weights = [samples.new_zeros(size, *shape) for shape in shapes]
    for weight in (weights[0], weights[2]):
        normals(weight, generators)
        weight.mul_(math.sqrt(2 / weight.shape[1]))
    ratio = samples.new_tensor(levels).square() / spread[:, 0].square()  # σ²/τ²: [S, L]
    weights.append(1 + ratio if start == "zero" else torch.ones_like(ratio))
    return ScoreNetworks(tuple(w.requires_grad_() for w in weights), centre, spread, levels)


def _detached(networks: ScoreNetworks) -> ScoreNetworks:
    weights = tuple(w.detach() for w in networks.weights)
    return ScoreNetworks(weights, networks.centre, networks.spread, networks.levels)


# --- how well, and how much by heart --------------------------------------------------------------


def empirical_scores(points: Tensor, noise: float) -> Field:
    """The exact minimiser of denoising score matching on each of S data sets.

    The score of the training points blurred by the noise, an equal mixture of ``N(x_i, σ² I)``: it
    leads from everywhere to training points.

    Args:
        points: ``[S, n, d]``.
        noise: σ.

    Returns:
        a function of ``[S, C, d]``; it needs ``S C n`` numbers.

    Raises:
        ValueError: shapes that do not fit, points that are not finite, σ not positive.
    """
    check_points("points", points)
    (sigma,) = _levels(noise)
    if sigma**2 < torch.finfo(points.dtype).tiny:
        raise ValueError(f"noise={sigma} is too small for {points.dtype}: its square is 0 there")
    middle = points.mean(1, keepdim=True)
    offsets = points - middle
    squares = offsets.square().sum(2)[:, None]  # [S, 1, n]
    if not (squares / sigma**2).isfinite().all():
        raise ValueError(
            f"noise={sigma} is too small for points as large as {float(offsets.abs().max()):.3g} "
            f"in {points.dtype}: their squared ratio overflows"
        )

    def scores(x: Tensor) -> Tensor:
        _check_sets("x", x, points)
        # log responsibilities up to what does not depend on the point: (2 x·x_i − ‖x_i‖²) / 2σ²
        logs = torch.baddbmm(squares, x - middle, offsets.mT, beta=-1, alpha=2) / (2 * sigma**2)
        return (torch.bmm(logs.softmax(2), points) - x) / sigma**2

    return scores


def gaussian_fits(points: Tensor, noise: float) -> Field:
    """The scores of ``N(c, (τ² + σ²) I)`` with each data set's mean c and root mean square
    deviation τ a coordinate: where the networks start.

    Args:
        points: ``[S, n, d]``.
        noise: σ.

    Raises:
        ValueError: as for :func:`empirical_scores`.
    """
    check_points("points", points)
    (sigma,) = _levels(noise)
    centre = points.mean(1, keepdim=True)
    variance = (points - centre).square().mean((1, 2), keepdim=True) + sigma**2

    def scores(x: Tensor) -> Tensor:
        _check_sets("x", x, points)
        return (centre - x) / variance

    return scores


def trap_scores(points: Tensor, exact: Field, *, alpha: float, inner: float, outer: float) -> Field:
    """A score that is wrong around its training points alone, for S data sets at once.

    ``-alpha (x - x_i)`` within ``inner`` of a training point, ``exact(x)`` beyond ``outer`` of all,
    linear in the distance between: the construction of ``MemorizingScore``, for any exact score.

    Args:
        points: ``[S, n, d]``, more than ``2 outer`` apart within a data set.
        exact: the score elsewhere.
        alpha: strength of the traps, positive.
        inner: a length.
        outer: a length, larger.

    Raises:
        ValueError: balls that meet, and whatever is out of its range.
    """
    check_points("points", points)
    if not (0 < alpha < math.inf and 0 < inner < outer < math.inf):
        raise ValueError(f"alpha={alpha} must be > 0, and 0 < inner={inner} < outer={outer}")
    nearest = min(_least_distance(x) for x in points)
    if nearest <= 2 * outer:
        raise ValueError(
            f"points as close as {nearest:.4g} have balls that meet: outer={outer:.4g} must be "
            f"below {nearest / 2:.4g}"
        )

    def scores(x: Tensor) -> Tensor:
        _check_sets("x", x, points)
        distance, index = torch.cdist(x, points).min(2, keepdim=True)  # [S, C, 1]
        trap = -alpha * (x - points.gather(1, index.expand_as(x)))
        share = ((outer - distance) / (outer - inner)).clamp(0, 1)
        return torch.lerp(called(exact, x), trap, share)

    return scores


def _least_distance(points: Tensor) -> float:
    distances = torch.pdist(points.double())
    return float(distances.min()) if len(distances) else math.inf


def dsm_loss(
    scores: ScoreNetworks | Field,
    samples: Tensor,
    noise: float | None = None,
    *,
    seed: int = 0,
    copies: int = 1,
) -> Tensor:
    """Loss of denoising score matching: mean of ``(σ s(x + σε) + ε)²`` over points and coordinates.

    The score 0 has 1, in expectation; for N(μ, v I) the exact score of the noisy law has
    ``v / (v + σ²)``; a score that has memorised the samples has about 0 on these, and more than 1
    on others.

    Args:
        scores: networks, or a function of ``[S, C, d]``.
        samples: ``[S, n, d]``: the training points, or held-out ones.
        noise: σ; may be left out for networks with one level.
        seed: of the noise, equal for every score.
        copies: noisy copies of each point.

    Returns:
        ``[S]`` float64.

    Raises:
        ValueError: shapes that do not fit, or a noise that the networks do not know.
    """
    check_points("samples", samples)
    function, sigma = _field_and_noise(scores, noise, samples)
    _check_sizes(copies=copies)
    clean = samples.repeat(1, copies, 1)
    noises = _noise_like(clean, seed)
    errors = sigma * called(function, clean + sigma * noises) + noises
    return errors.square().mean((1, 2)).double().cpu()


def memorization(
    scores: ScoreNetworks | Field,
    samples: Tensor,
    noise: float | None = None,
    *,
    seed: int = 0,
    copies: int = 4,
) -> Tensor:
    """How much of the way from a Gaussian fit to rote memory a score has gone.

    ``1 - E‖s - s_e‖² / E‖s_g - s_e‖²`` at noisy training points, with the exact minimiser ``s_e``
    of the training loss (:func:`empirical_scores`) and the Gaussian fit ``s_g``
    (:func:`gaussian_fits`): 1 for the former, 0 for the latter.

    Args:
        scores: networks, or a function of ``[S, C, d]``.
        samples: ``[S, n, d]``, what they were trained on.
        noise: σ; may be left out for networks with one level.
        seed: of the noise.
        copies: noisy copies of each point.

    Returns:
        ``[S]`` float64.

    Raises:
        ValueError: as for :func:`dsm_loss`.
    """
    check_points("samples", samples)
    function, sigma = _field_and_noise(scores, noise, samples)
    _check_sizes(copies=copies)
    if (samples == samples[:, :1]).flatten(1).all(1).any():
        raise ValueError(
            "samples must hold at least two points that differ in each data set: one is its own "
            "Gaussian fit"
        )
    clean = samples.repeat(1, copies, 1)
    noisy = clean + sigma * _noise_like(clean, seed)
    memory = empirical_scores(samples, sigma)(noisy)
    way = (gaussian_fits(samples, sigma)(noisy) - memory).square().sum((1, 2))
    left = (called(function, noisy) - memory).square().sum((1, 2))
    return (1 - left / way).double().cpu()


def _field_and_noise(
    scores: ScoreNetworks | Field, noise: float | None, samples: Tensor
) -> tuple[Field, float]:
    if isinstance(scores, ScoreNetworks):
        scores.check("samples", samples)
        return scores.at(noise), scores.levels[scores.level(noise)]
    if noise is None:
        raise ValueError("noise must be given for a score that is not a stack of networks")
    return scores, _levels(noise)[0]


def _noise_like(clean: Tensor, seed: int) -> Tensor:
    generators = generators_of(seed, len(clean), HELD_OUT, clean.device)
    return normals(torch.empty_like(clean), generators)


# --- sampling -------------------------------------------------------------------------------------


def langevin_all(
    scores: ScoreNetworks | Field,
    start: Tensor,
    step: float,
    n_steps: int,
    *,
    seed: int = 0,
    noise: float | None = None,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """Unadjusted Langevin with S scores at once: ``x + h s(x) + sqrt(2h) ξ``.

    The noise of network i depends on ``seed + i`` and the number of chains alone.

    Args:
        scores: networks, or a function of ``[S, C, d]``.
        start: ``[S, C, d]``.
        step: h.
        n_steps: how many; 0 gives a copy of the start.
        seed: of the noise.
        noise: which of the networks' levels; may be left out if there is but one.
        progress: called with the number of steps done, after each.

    Returns:
        ``[S, C, d]`` like ``start``.

    Raises:
        TypeError: a start that is not float32 or float64, a number of steps that is no integer.
        ValueError: shapes that do not fit, a start that is not finite, a step that is not positive,
            scores of another shape or dtype than their points.
        DivergenceError: chains that are not finite, or grew a million times beyond start, noise and
            the way that the start's scores lead; looked for every 16 steps. The message names
            step and network.
    """
    function = scores.at(noise) if isinstance(scores, ScoreNetworks) else scores
    check_points("start", start)
    if isinstance(scores, ScoreNetworks):
        scores.check("start", start)
    check_integers(n_steps=n_steps)
    if not 0 < step < math.inf or n_steps < 0:
        raise ValueError(f"step={step} must be positive and n_steps={n_steps} at least 0")
    generators = generators_of(seed, len(start), CHAINS, start.device)
    x, noises = start.detach().clone(), torch.empty_like(start)
    scratch = torch.empty_like(start, dtype=torch.float32)
    limit = x.new_empty(0)
    for number in range(1, n_steps + 1):
        normals(noises, generators, scratch)
        found = called(function, x).detach()
        if number == 1:
            limit = _growth_limit(x, found, step, n_steps)
        x.add_(found, alpha=step).add_(noises, alpha=math.sqrt(2 * step))
        if number % CHECK == 0 or number == n_steps:
            check_chains(x, step, limit, number)
        if progress is not None:
            progress(number)
    return x


def _growth_limit(x: Tensor, scores: Tensor, step: float, n_steps: int) -> Tensor:
    """How far each network's chains may go, ``[S, 1, 1]`` float64, from ``x`` with its scores.

    A step that contracts moves a chain by no more than the first one, noise apart: the way that
    the scores of the start lead in all steps bounds where such chains go.
    """
    pull = scores.nan_to_num(0, 0, 0).abs().amax((1, 2), keepdim=True).double()
    size = x.abs().amax((1, 2), keepdim=True).double()
    return GROWTH * (1 + size + math.sqrt(step * n_steps) + step * n_steps * pull)


def called(function: Field, x: Tensor) -> Tensor:
    """The scores at ``x``, if they are of its shape and dtype: nothing is broadcast."""
    found = function(x)
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
        got = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else repr(found)
        raise ValueError(f"scores must map {list(x.shape)} {x.dtype} to its like, but gave {got}")
    return found


def check_chains(x: Tensor, step: float, limit: float | Tensor, number: int) -> None:
    """Raise ``DivergenceError`` if a chain of ``x [S, C, d]`` is not within ``limit``."""
    from .samplers import DivergenceError

    bad = ~(x.isfinite() & (x.abs() <= limit)).all(2)  # [S, C]
    if bad.any():
        lost = {i: int(row.sum()) for i, row in enumerate(bad) if row.any()}
        raise DivergenceError(
            f"chains diverged by step {number}, by network: {lost} of {x.shape[1]} each; take a "
            f"step below {step}, or look for NaN in the scores"
        )


def _check_sets(name: str, x: Tensor, points: Tensor) -> None:
    """Raise unless ``x [S, C, d]`` has the S and d of ``points``."""
    if x.ndim != 3 or x.shape[0] != len(points) or x.shape[2] != points.shape[2]:
        s, _, d = points.shape
        raise ValueError(f"{name} must be [{s}, C, {d}], as the points are, not {list(x.shape)}")


# --- checks ---------------------------------------------------------------------------------------


def check_points(name: str, x: Tensor) -> None:
    """Raise unless ``x`` is finite, of a float dtype, and ``[S, n, d]`` with points in it."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a float32 or float64 tensor, not {kind}: use .double()")
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"{name} must be [S, n, d] with points in it, got {list(x.shape)}")
    if not x.isfinite().all():
        raise ValueError(f"{name} must be finite, but holds {int((~x.isfinite()).sum())} NaN or ∞")


def _check_validation(validation: Tensor, samples: Tensor) -> None:
    check_points("validation", validation)
    size, _, d = samples.shape
    if (len(validation), validation.shape[2]) != (size, d):
        wanted = f"[S = {size}, n', d = {d}]"
        raise ValueError(f"validation must be {wanted}, got {list(validation.shape)}")
    if (validation.dtype, validation.device) != (samples.dtype, samples.device):
        raise ValueError("validation must have the dtype and the device of the samples")


def check_integers(**values: object) -> None:
    """Raise ``TypeError`` naming the first that is no integer."""
    for name, value in values.items():
        try:
            operator.index(value)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(f"{name} must be an integer, not {value!r}") from error


def _check_sizes(**sizes: int) -> None:
    check_integers(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _check_rates(learning_rate: float, weight_decay: float) -> None:
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate must be a positive number, got {learning_rate}")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")


def _levels(noise: float | Iterable[float]) -> tuple[float, ...]:
    single = not isinstance(noise, Iterable) or getattr(noise, "ndim", 1) == 0
    try:
        if isinstance(noise, str):
            raise TypeError("text")
        levels = (float(noise),) if single else tuple(map(float, noise))  # type: ignore
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"noise must be a number or hold numbers, not {noise!r}") from error
    if not levels or len(set(levels)) < len(levels):
        raise ValueError(f"noise must hold different standard deviations, got {levels}")
    if not all(sigma > 0 and 1e-300 < sigma * sigma < math.inf for sigma in levels):
        raise ValueError(
            f"noise must be positive standard deviations with squares in range, got {levels}"
        )
    return levels


def _check_scales(spread: Tensor, levels: tuple[float, ...]) -> None:
    """Raise unless τ² and σ² are numbers of the dtype, with all of its digits."""
    limits = torch.finfo(spread.dtype)
    for what, sizes in (("samples of spread", spread.flatten().tolist()), ("noise", levels)):
        for size in sizes:
            if not limits.tiny <= size * size <= limits.max:
                raise ValueError(
                    f"{what} {size:.3g}: its square is out of the range of {spread.dtype}; rescale "
                    "samples and noise together"
                )


def _check_converged(losses: Tensor, networks: ScoreNetworks, learning_rate: float) -> None:
    bad = ~losses.isfinite().all(1)
    step = int(bad.nonzero()[0, 0]) if bad.any() else len(losses)
    if bad.any() or not all(w.isfinite().all() for w in networks.weights):
        spreads, levels = networks.spread, networks.levels
        raise FloatingPointError(
            f"the training diverged at step {step}: take learning_rate below {learning_rate}; or "
            f"the scales do not suit {spreads.dtype}: the samples' spread is "
            f"{float(spreads.min()):.3g} … {float(spreads.max()):.3g}, noise is "
            f"{min(levels):.3g} … {max(levels):.3g}; rescale them"
        )
