r"""Langevin and diffusion samplers: many chains at once, cheaper than torch's random numbers.

Every sampler here but :func:`mala` repeats one affine step,

.. math:: x' = a\,x + b\,s(x) + c\,\xi ,

with :math:`(a, b, c) = (1, h, \sqrt{2h})` for unadjusted Langevin. On a CPU, normal numbers are
most of the cost, then memory. So the numbers come from a compiled loop that works on a vector of
counters at a time, about three times as fast as torch's generator, and chains advance in blocks
that stay in the second-level cache, each through all of its steps before the next block. All that
is not noise is one compiled pass over the block. For a radial score of known law
(:class:`~proofread.langevin.scores.RadialLaw`) that pass contains the score: pull and push of a row
follow from two sums which the pass of the step before has left behind.

**Noise.** Chain *c* of a call is chain ``first_chain + c`` of a run. Its normals at a step are a
function of ``(seed, first_chain + c, step)``: four dimensions from one call of Philox-4x32-10
(Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011) by the
Box–Muller method. They are those of :mod:`proofread.langevin.kernels`, on every device up to
rounding; the method works in float32 and float64 chains take the same numbers, none beyond 6.8. So
a batch in two calls, the second with ``first_chain`` set, gives the chains of one call: bit by bit
if the score treats the rows of a batch alike (the radial ones do), else to rounding. Two scores
with one seed see the same noise.

**No run returns NaN.** Each step leaves the squared norm of every chain behind; a NaN, an infinity
or a chain that grows without bound stops the run with a :class:`DivergenceError`, which says at
which step, for which chain, and what to do. Without bound: for scores of this package, a million
times everything in sight (start, centres, radii, noise); for others, a squared norm that the dtype
cannot hold.

Scores are called without gradients: wrap one that differentiates a density in
``torch.enable_grad()``.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .scores import (
    GAUSSIAN,
    MIXTURE,
    TRAP,
    GaussianScore,
    MemorizingScore,
    MixtureScore,
    RadialLaw,
    RadialScore,
    TiltedScore,
    TrapScore,
)

__all__ = [
    "Chains",
    "DivergenceError",
    "annealed_langevin",
    "diffusion_sampler",
    "langevin",
    "mala",
]

ScoreMap: TypeAlias = Callable[[Tensor], Tensor]  # [rows, d] → [rows, d]
BLOCK = 2**16  # numbers of a block of chains: state and noise stay in a second-level cache
DEVICE_BLOCK = 2**22  # the same on other devices
GROUPS = 256  # of four normals, made together: they stay in the first-level cache
LOW = 2**32 - 1
CHECK = 64  # steps between two checks there: each waits for the device
LAUNCH = 1024  # steps of one launch of the kernel
LONGEST = 30  # step between two levels of diffusion: e³⁰ roundings of float64 are 0.001
GROWTH = 1e6  # in units of everything in sight: no chain of a confining score goes there


class DivergenceError(ArithmeticError):
    """A chain, a score or a log density is no longer finite, or a chain grows without bound."""


@dataclass(frozen=True)
class Chains:
    """Where chains ended, and what was kept on the way.

    Attributes:
        final: ``[C, d]`` last states, in dtype and on device of the start.
        samples: ``[kept, C, d]`` states after every ``thin`` steps, or None.
        mean: ``[C, d]`` mean over all steps, the start left out, or None.
        variance: ``[C, d]`` mean squared deviation from it over the same steps, or None.
        n_steps: steps of every chain.
        acceptance: ``[C]`` share of accepted proposals, float64, for :func:`mala`; else None.
    """

    final: Tensor
    samples: Tensor | None
    mean: Tensor | None
    variance: Tensor | None
    n_steps: int
    acceptance: Tensor | None = None


# --- samplers -------------------------------------------------------------------------------------


def langevin(
    score: ScoreMap,
    start: Tensor,
    step: float,
    n_steps: int,
    *,
    seed: int,
    thin: int | None = None,
    statistics: bool = False,
    first_chain: int = 0,
    progress: bool | None = None,
) -> Chains:
    """Unadjusted Langevin: ``x' = x + h s(x) + √(2h) ξ``.

    On a CUDA device a radial score runs in the kernel of :mod:`proofread.langevin.kernels`, many
    steps a launch.

    Args:
        score: a map ``[rows, d] → [rows, d]`` that keeps the dtype, treats rows alike and doesn't
            write to its argument. It is called without gradients: one that differentiates a
            density must do so within ``torch.enable_grad()``.
        start: ``[C, d]``, float32 or float64, finite; left as it is.
        step: step size h > 0.
        n_steps: number of steps, 0 or more.
        seed: 0 or more; the noise of row c is a function of seed, ``first_chain + c`` and the
            number of the step alone, so that two calls with one seed see the same noise.
        thin: keep the states after every ``thin`` steps: ``n_steps // thin`` times ``[C, d]``.
        statistics: stream mean and variance of every chain over its steps, in two float64
            buffers of ``[C, d]``.
        first_chain: number of the first chain within a larger run that is split over calls.
        progress: a bar on stderr; None shows it on a terminal if the run takes seconds.

    Returns:
        the last states and what was asked to be kept.

    Raises:
        TypeError: a start of another dtype, sparse or on the meta device, a count that is no
            integer, or a score that returns another dtype.
        ValueError: a start that is not ``[C, d]`` of the score's dimension or not finite, a step or
            a count that is not positive, statistics over no steps, or a score of another shape.
        DivergenceError: a chain left every bound, or the score is not finite.
    """
    step, n_steps = check_positive("step", step), check_count("n_steps", n_steps, 0)
    run = _Run(start, n_steps, seed, thin, statistics, first_chain, progress)
    run.check_score(score)
    if run.final.is_cuda and _is_radial(score) and _has_kernel(run.final, score.law):  # type: ignore[attr-defined]
        return _kernel_chains(run, score, step)  # type: ignore[arg-type]
    return run([_langevin_stage(score, step, n_steps)])


def annealed_langevin(
    scores: Sequence[ScoreMap],
    start: Tensor,
    steps: Sequence[float] | float,
    n_steps_per_level: int,
    *,
    seed: int,
    thin: int | None = None,
    statistics: bool = False,
    first_chain: int = 0,
    progress: bool | None = None,
) -> Chains:
    """Unadjusted Langevin through a sequence of scores, the one with the largest noise first.

    After Song and Ermon, *Generative Modeling by Estimating Gradients of the Data Distribution*
    (NeurIPS 2019), algorithm 1, with steps of the caller's choice.

    Args:
        scores: one map ``[rows, d] → [rows, d]`` a level, at least one.
        start: ``[C, d]``, as for :func:`langevin`.
        steps: step size of each level, or one number for all.
        n_steps_per_level: number of steps at each level.
        seed: as for :func:`langevin`; the noise runs on from level to level.
        thin: as for :func:`langevin`, counted over all levels.
        statistics: as for :func:`langevin`, over all levels.
        first_chain: as for :func:`langevin`.
        progress: as for :func:`langevin`.

    Returns:
        the states after the last level; ``n_steps`` counts all levels.

    Raises:
        TypeError: as for :func:`langevin`, or scores that are no list, or steps that are neither a
            list nor a number.
        ValueError: as for :func:`langevin`, or no scores, or not one step a score.
        DivergenceError: as for :func:`langevin`.
    """
    each = check_count("n_steps_per_level", n_steps_per_level, 0)
    sizes = _check_levels(scores, steps)
    run = _Run(start, each * len(sizes), seed, thin, statistics, first_chain, progress)
    for i, score in enumerate(scores):
        run.check_score(score, f"scores[{i}]")
    return run(_langevin_stage(score, h, each) for score, h in zip(scores, sizes, strict=True))


def diffusion_sampler(
    score_at: Callable[[float], ScoreMap],
    start: Tensor,
    times: Sequence[float],
    *,
    seed: int,
    thin: int | None = None,
    statistics: bool = False,
    first_chain: int = 0,
    progress: bool | None = None,
) -> Chains:
    r"""Reverse diffusion (DDPM) with a given score at every noise level.

    The forward process is :math:`dX = -X\,dt + \sqrt2\,dB`. From level *t* to the next one,
    :math:`t - \Delta`, the ancestral step

    .. math:: x' = e^{\Delta} x + (e^{\Delta} - e^{-\Delta})\,s_t(x) + \sqrt{1 - e^{-2\Delta}}\,\xi

    is exact for normal targets of variance 1 and their exact scores, up to :math:`e^\Delta`
    roundings. It is DDPM's step with
    :math:`\beta = 1 - e^{-2\Delta}` and variance β (Ho, Jain and Abbeel, *Denoising Diffusion
    Probabilistic Models*, NeurIPS 2020, algorithm 2).

    Args:
        score_at: the score ``s_t`` of a time t, a map ``[rows, d] → [rows, d]``; called once a
            level, for all chains, when the level begins. A ``GaussianScore`` or ``MixtureScore``
            of the data has it as its method ``noised``.
        start: ``[C, d]``, as for :func:`langevin`: usually samples of N(0, I).
        times: levels, strictly decreasing, the last one 0, at most 30 apart.
        seed: as for :func:`langevin`.
        thin: as for :func:`langevin`; a step is a level.
        statistics: as for :func:`langevin`.
        first_chain: as for :func:`langevin`.
        progress: as for :func:`langevin`.

    Returns:
        the states at time 0; ``n_steps`` is the number of levels, ``len(times) − 1``.

    Raises:
        TypeError: as for :func:`langevin`, or a score in place of ``score_at``.
        ValueError: as for :func:`langevin`, or times that do not decrease to 0 or lie too far
            apart.
        DivergenceError: as for :func:`langevin`; names the level.
    """
    levels = _check_times(times)
    _check_score_at(score_at)
    run = _Run(start, len(levels) - 1, seed, thin, statistics, first_chain, progress)

    def stages() -> Iterator[_Stage]:
        for number, (t, s) in enumerate(itertools.pairwise(levels)):
            score = score_at(t)
            run.check_score(score, f"score_at({t:g})")
            noise = math.sqrt(-math.expm1(2 * (s - t)))
            hint = f"level {number}, t = {t:g}: look at the score there, or take closer times"
            yield _Affine(score, math.exp(t - s), 2 * math.sinh(t - s), noise, 1, hint)

    return run(stages())


def mala(
    score: ScoreMap,
    log_density: Callable[[Tensor], Tensor],
    start: Tensor,
    step: float,
    n_steps: int,
    *,
    seed: int,
    thin: int | None = None,
    statistics: bool = False,
    first_chain: int = 0,
    progress: bool | None = None,
) -> Chains:
    """Metropolis-adjusted Langevin: the unadjusted step as a proposal, accepted or not.

    After Roberts and Tweedie, *Exponential convergence of Langevin distributions and their discrete
    approximations* (Bernoulli 1996). The law of the density is stationary for any ``score``, which
    only makes the proposals.

    Args:
        score: a map ``[rows, d] → [rows, d]``; it need not be the gradient of ``log_density``.
        log_density: ``[rows, d] → [rows]``, up to a constant; −∞ outside the support.
        start: ``[C, d]``, as for :func:`langevin`, within the support.
        step: step size h > 0 of the proposal.
        n_steps: number of proposals.
        seed: as for :func:`langevin`.
        thin: as for :func:`langevin`.
        statistics: as for :func:`langevin`.
        first_chain: as for :func:`langevin`.
        progress: as for :func:`langevin`.

    Returns:
        the states, with the share of accepted proposals of each chain (0 without any steps).

    Raises:
        TypeError: as for :func:`langevin`.
        ValueError: as for :func:`langevin`, or a log density of the wrong shape, or one that is not
            finite at the start.
        DivergenceError: a score or a log density that is NaN, or a log density of +∞.
    """
    step, n_steps = check_positive("step", step), check_count("n_steps", n_steps, 0)
    run = _Run(start, n_steps, seed, thin, statistics, first_chain, progress)
    run.check_score(score)
    stage = _Metropolis(score, log_density, step, n_steps, run)
    return run([stage], stage.acceptance)


def _langevin_stage(score: ScoreMap, step: float, n_steps: int) -> _Affine:
    return _Affine(score, 1.0, step, math.sqrt(2 * step), n_steps, None)


# --- a run: blocks of chains, their noise, what is kept -------------------------------------------


class _Block:
    """Neighbouring chains that advance together; ``key`` is seed and first chain of their noise."""

    def __init__(self, chains: slice, key: tuple[int, int], noise: Tensor, pairs: Tensor) -> None:
        self.chains = chains  # within the batch
        self.noise, self.pairs = noise, pairs  # [rows, d] and [rows, 2], which blocks share
        self.fill_noise, self.fill_pairs = _filler(noise, key), _filler(pairs, key)

    def draw(self, number: int, deviation: float) -> None:
        """Normal numbers of a step in ``noise``."""
        self.fill_noise(number - 1, 0, deviation)

    def log_coins(self, number: int) -> Tensor:
        """Logarithms of uniform numbers ``[rows]``, float64.

        By the Box–Muller method backwards: −(z² + z'²)/2, from counters beyond the dimensions.
        """
        self.fill_pairs(number - 1, -(-self.noise.shape[1] // 4), 1.0)
        return self.pairs.square().sum(1) / -2


def _filler(out: Tensor, key: tuple[int, int]) -> Callable[[int, int, float], None]:
    """Fills ``out`` with normals: a function of step, first group and standard deviation."""
    if _compiles(out.device):
        return functools.partial(_compiled(_fill), out.numpy(), *key)
    return functools.partial(_fill_there, out, *key)


class _Stage(Protocol):
    """Steps of one kind."""

    n_steps: int

    def prepare(self, x: Tensor) -> None:
        """Called once with the whole batch ``[C, d]``, before any block of it moves."""

    def advance(self, x: Tensor, block: _Block, done: int, record: _Record) -> None:
        """Move ``x [rows, d]`` in place, after ``done`` steps of earlier stages."""


class _Run:
    """The checked arguments that all samplers share."""

    def __init__(
        self,
        start: Tensor,
        n_steps: int,
        seed: int,
        thin: int | None,
        statistics: bool,
        first_chain: int,
        progress: bool | None,
    ) -> None:
        _check_start(start)
        self.seed = check_count("seed", seed, 0)
        self.first_chain = check_count("first_chain", first_chain, 0)
        if self.first_chain + len(start) > 2**32:
            raise ValueError(
                f"first_chain + C must be at most 2^32, not {first_chain} + {len(start)}: take "
                "another seed beyond"
            )
        thin = None if thin is None else check_count("thin", thin, 1)
        if statistics and not n_steps:
            raise ValueError("statistics=True needs at least one step")
        self.n_steps, self.progress = n_steps, progress
        self.final = start.detach().clone(memory_format=torch.contiguous_format)
        self.record = _Record(self.final, n_steps, thin, statistics)

    def check_score(self, score: Any, name: str = "score") -> None:
        """Raise unless it can be called and is of the start's dimension, if it says of which."""
        if not callable(score):
            raise TypeError(f"{name} must be a function of [rows, d], not {type(score).__name__}")
        dimension, d = getattr(score, "dimension", None), self.final.shape[1]
        if isinstance(dimension, int) and dimension != d:
            raise ValueError(
                f"start must be [C, {dimension}], the dimension of {name}, but has d = {d}"
            )

    def __call__(self, stages: Iterable[_Stage], acceptance: Tensor | None = None) -> Chains:
        """All stages, each for one block after the other."""
        blocks = list(self.blocks())
        done = 0
        with torch.no_grad(), self.bar() as bar:
            self.record.bar = bar
            for stage in stages:
                stage.prepare(self.final)
                for block in blocks:
                    stage.advance(self.final[block.chains], block, done, self.record)
                done += stage.n_steps
        return self.chains(acceptance)

    def blocks(self) -> Iterator[_Block]:
        """The batch in blocks; they share buffers, so one at a time."""
        size, d = self.final.shape
        rows = _rows(d, self.final.device)
        noise = self.final.new_empty(min(rows, size), d)
        pairs = self.final.new_empty(min(rows, size), 2, dtype=torch.float64)
        for first in range(0, size, rows):
            many, key = min(rows, size - first), (self.seed, self.first_chain + first)
            yield _Block(slice(first, first + many), key, noise[:many], pairs[:many])

    def bar(self) -> Any:
        """Counts steps of single chains."""
        from tqdm import tqdm  # tqdm.auto would warn on stderr in a kernel without ipywidgets

        hidden = None if self.progress is None else not self.progress
        total, delay = self.n_steps * len(self.final), 2 if self.progress is None else 0
        style = {"desc": "chain steps", "unit": "step", "unit_scale": True, "delay": delay}
        return tqdm(total=total, disable=hidden, **style)

    def chains(self, acceptance: Tensor | None = None) -> Chains:
        """What the run returns."""
        kept = self.record
        mean, variance = (
            None if part is None else part.to(self.final) for part in (kept.mean, kept.variance)
        )
        return Chains(self.final, kept.samples, mean, variance, self.n_steps, acceptance)


def _compiles(device: torch.device) -> bool:
    """Whether passes over a block are compiled; on other devices they are torch's."""
    return device.type == "cpu"


def _rows(dimension: int, device: torch.device) -> int:
    """Chains of a block."""
    return max(1, (BLOCK if _compiles(device) else DEVICE_BLOCK) // dimension)


class _Record:
    """What is kept of a run: thinned states and moments over the steps."""

    def __init__(self, final: Tensor, n_steps: int, thin: int | None, statistics: bool) -> None:
        self.thin = thin
        self.samples = None if thin is None else final.new_empty(n_steps // thin, *final.shape)
        self.mean = torch.zeros_like(final, dtype=torch.float64) if statistics else None
        self.squares = None if self.mean is None else torch.zeros_like(self.mean)
        self.n_steps = n_steps
        self.bar: Any = None

    def __call__(self, number: int, chains: slice, x: Tensor, steps: int = 1) -> None:
        """The state ``x [rows, d]`` of some of the chains after ``number`` steps."""
        if self.samples is not None and self.thin and number % self.thin == 0:
            self.samples[number // self.thin - 1, chains] = x
        if self.mean is not None and self.squares is not None:
            _add_moments(x, number, self.mean[chains], self.squares[chains])
        self.bar.update(steps * (chains.stop - chains.start))

    @property
    def variance(self) -> Tensor | None:
        """Mean squared deviation."""
        return None if self.squares is None else self.squares / self.n_steps


def _add_moments(x: Tensor, number: int, mean: Tensor, squares: Tensor) -> None:
    """Welford's update: mean and summed squared deviations of ``number`` states."""
    if _compiles(x.device):
        _compiled(_moments)(x.numpy(), number, mean.numpy(), squares.numpy())
        return
    delta = x - mean
    mean.add_(delta, alpha=1 / number)
    squares.addcmul_(delta, x - mean)


# --- affine steps ---------------------------------------------------------------------------------


class _Affine:
    """Steps ``x' = keep·x + drift·s(x) + noise·ξ`` with one score; Langevin has ``keep`` = 1."""

    def __init__(
        self,
        score: ScoreMap,
        keep: float,
        drift: float,
        noise: float,
        n_steps: int,
        hint: str | None,
    ) -> None:
        self.score, self.n_steps, self.hint = score, n_steps, hint
        self.keep, self.drift, self.noise = keep, drift, noise
        self.limit = math.inf
        self.value: Tensor | None = None  # what the score returned last

    def prepare(self, x: Tensor) -> None:
        """Fix the squared norm beyond which a chain has diverged."""
        size = _size(self.score) if self.keep == 1 else None
        if size is not None and len(x):
            start = float(torch.linalg.vector_norm(x, dim=1).max())
            longest = GROWTH * (start + size + (1 + self.noise) * math.sqrt(x.shape[1]))
            self.limit = longest * longest  # may be infinite

    def advance(self, x: Tensor, block: _Block, done: int, record: _Record) -> None:
        """All steps of a block."""
        compiled, last = _compiles(x.device), done + self.n_steps
        make = self._radial if compiled and _is_radial(self.score) else self._any
        move = make(x, block.noise)
        for number in range(done + 1, last + 1):
            block.draw(number, self.noise)
            bad = move()
            if not compiled and (number % CHECK == 0 or number == last):
                bad = _first_bad(x, self.limit)
            if bad >= 0:
                raise self._divergence(number, block.chains.start + bad, bad)
            record(number, block.chains, x)

    def _radial(self, x: Tensor, noise: Tensor) -> Callable[[], int]:
        """The step with the score's law inside."""
        score = self.score
        assert isinstance(score, RadialScore)
        frame = [part.to(x).numpy() for part in (score.axis, score.origin)]
        sums = np.empty(len(x)), np.empty(len(x))  # axis·y and ‖y‖² of each row
        points, law = x.numpy(), _without_divisions(score.law)
        _compiled(_project)(points, *frame, *sums)
        numbers = (score.law.kind, law, self.keep, self.drift, self.limit)
        return functools.partial(_compiled(_radial), points, noise.numpy(), *frame, *sums, *numbers)

    def _any(self, x: Tensor, noise: Tensor) -> Callable[[], int]:
        """The step with any score; off the CPU it doesn't look for bad rows."""
        if not _compiles(x.device):

            def move_there() -> int:
                self.value = _call(self.score, x)
                x.mul_(self.keep).add_(self.value, alpha=self.drift).add_(noise)
                return -1

            return move_there
        points, noises, step = x.numpy(), noise.numpy(), _compiled(_affine)
        numbers = (self.keep, self.drift, self.limit)

        def move() -> int:
            self.value = _call(self.score, x)
            return step(points, self.value.contiguous().numpy(force=True), noises, *numbers)

        return move

    def _divergence(self, number: int, chain: int, row: int) -> DivergenceError:
        value = None if self.value is None else self.value[row]
        if value is not None and not bool(value.isfinite().all()):
            what = "NaN" if bool(value.isnan().any()) else "an infinity"
            return DivergenceError(f"the score returned {what} at step {number}, for chain {chain}")
        hint = self.hint or _remedy(self.score, self.drift)
        return DivergenceError(f"chain {chain} diverged at step {number}: {hint}")


def _remedy(score: ScoreMap, step: float) -> str:
    """What to do about a Langevin chain that diverged."""
    lipschitz = getattr(score, "lipschitz", math.inf)
    if not 0 < lipschitz < math.inf or step < 2 / lipschitz:
        return f"the step {step:g} is too large for this score, or the score points outwards"
    return (
        f"the step {step:g} is too large for this score, whose Lipschitz constant L is at most "
        f"{lipschitz:.4g}: take a step below 2 / L = {2 / lipschitz:.4g}"
    )


def _first_bad(x: Tensor, limit: float) -> int:
    """First row that is not finite or whose squared norm exceeds the limit, or −1."""
    bad = ~(x.square().sum(1) < limit)
    return int(bad.to(torch.uint8).argmax()) if bool(bad.any()) else -1


def _call(score: ScoreMap, x: Tensor) -> Tensor:
    """The score's value, of the right kind."""
    s = score(x)
    if not isinstance(s, Tensor) or s.shape != x.shape:
        got = list(s.shape) if isinstance(s, Tensor) else type(s).__name__
        raise ValueError(f"score must map {list(x.shape)} to the same shape, but returned {got}")
    if s.dtype != x.dtype or s.device != x.device:
        raise TypeError(
            f"score must return {x.dtype} on {x.device} like its argument, but returned {s.dtype} "
            f"on {s.device}: convert one of them with .to(…)"
        )
    return s.detach()


def _is_radial(score: Any) -> bool:
    """Whether the law says all: a subclass may do something else when called."""
    known = type(score) in (RadialScore, GaussianScore, TrapScore, MixtureScore)
    return known and score.law is not None and score.law.kind in (GAUSSIAN, TRAP, MIXTURE)


def _size(score: Any) -> float | None:
    """A length beyond everything that the score has; None for one that may not be confining."""
    if _is_radial(score):
        return float(score.origin.norm()) + max(map(abs, score.law.parameters))
    if isinstance(score, MemorizingScore):
        return float(score.points.norm(dim=1).max() + score.mean.norm())
    if isinstance(score, TiltedScore):
        return float(score.centre.norm() + score.target.mean.norm()) + score.outer
    if isinstance(score, MixtureScore):
        return float(score.means.norm(dim=1).max() + score.variances.max())
    return None


def _has_kernel(x: Tensor, law: RadialLaw) -> bool:
    """Whether the kernel takes such chains; it needs triton, which not every platform has.

    Not mixtures of several variances: it has the distance from the axis as a difference of squares,
    which loses its digits far along the axis.
    """
    if law.kind == MIXTURE and len(set(law.parameters[1 + 2 * int(law.parameters[0]) :])) > 1:
        return False
    try:
        from .kernels import takes
    except ImportError:
        return False
    return takes(x.shape[1], x.dtype)


def _kernel_chains(run: _Run, score: RadialScore, step: float) -> Chains:
    """Unadjusted Langevin on a CUDA device: as many steps a launch as nobody wants to look at."""
    from .kernels import langevin_triton

    stage = _langevin_stage(score, step, run.n_steps)
    stage.prepare(run.final)
    every, done = LAUNCH if run.record.mean is None else 1, 0
    thin = run.record.thin or LAUNCH
    with torch.no_grad(), run.bar() as bar:
        run.record.bar = bar
        while done < run.n_steps and len(run.final):
            many = min(every, thin - done % thin, run.n_steps - done)
            numbers = (step, many, run.seed, done, run.first_chain)
            run.final = langevin_triton(run.final, score.law, score.axis, score.origin, *numbers)
            done += many
            if (bad := _first_bad(run.final, stage.limit)) >= 0:
                hint = _remedy(score, step)
                raise DivergenceError(f"chain {bad} diverged by step {done}: {hint}")
            run.record(done, slice(0, len(run.final)), run.final, many)
    return run.chains()


# --- Metropolis-adjusted steps --------------------------------------------------------------------


class _Metropolis:
    """Langevin steps as proposals."""

    def __init__(
        self,
        score: ScoreMap,
        log_density: Callable[[Tensor], Tensor],
        step: float,
        n_steps: int,
        run: _Run,
    ) -> None:
        self.score, self.log_density, self.step, self.n_steps = score, log_density, step, n_steps
        self.rows = _rows(run.final.shape[1], run.final.device)
        self.acceptance = run.final.new_zeros(len(run.final), dtype=torch.float64)
        self.start = torch.empty(0)

    def prepare(self, x: Tensor) -> None:
        """The log density of all starts, checked before anything moves."""
        parts = [self._log_density(part) for part in x.split(self.rows)] if len(x) else []
        self.start = torch.cat([x.new_empty(0, dtype=torch.float64), *parts])
        bad = ~self.start.isfinite()
        if bool(bad.any()):
            chain = int(bad.to(torch.uint8).argmax())
            raise ValueError(
                f"log_density must be finite at the start, but is {float(self.start[chain])} for "
                f"chain {chain} (and {int(bad.sum()) - 1} others): start within the support"
            )

    def advance(self, x: Tensor, block: _Block, done: int, record: _Record) -> None:
        """All steps of a block."""
        log, accepted = self.start[block.chains], self.acceptance[block.chains]
        score = _call(self.score, x).clone()
        self._check(score, log, done + 1, block)  # the first step is made of it
        for number in range(done + 1, done + self.n_steps + 1):
            block.draw(number, math.sqrt(2 * self.step))
            proposal = torch.add(x, score, alpha=self.step).add_(block.noise)
            new_log, new_score = self._log_density(proposal), _call(self.score, proposal)
            self._check(new_score, new_log, number, block)
            ratio = new_log - log + self._correction(score + new_score, block.noise)
            accept = block.log_coins(number) < ratio  # a NaN outside the support: no
            for old, new in ((x, proposal), (score, new_score)):
                torch.where(accept[:, None], new, old, out=old)
            torch.where(accept, new_log, log, out=log)
            accepted += accept
            record(number, block.chains, x)
        accepted /= max(1, self.n_steps)

    def _correction(self, both: Tensor, noise: Tensor) -> Tensor:
        """log q(x | x') − log q(x' | x) for ``both`` = s(x) + s(x'): ``[rows]``, float64.

        With x' = x + h s(x) + n it is (‖n‖² − ‖n + h·both‖²)/(4h), here without cancellation.
        """
        return -(both * (noise / 2 + both * (self.step / 4))).sum(1, dtype=torch.float64)

    def _log_density(self, x: Tensor) -> Tensor:
        log = self.log_density(x)
        if not isinstance(log, Tensor) or log.shape != x.shape[:1]:
            got = list(log.shape) if isinstance(log, Tensor) else type(log).__name__
            raise ValueError(
                f"log_density must map {list(x.shape)} to [{len(x)}], but returned {got}"
            )
        return log.detach().double()

    def _check(self, score: Tensor, log: Tensor, number: int, block: _Block) -> None:
        """Raise for a NaN or +∞, but for scores outside the support: they are rejected anyway."""
        faults = {
            "the score is not finite": ~score.isfinite().all(1) & (log > -math.inf),
            "the log density is NaN or +∞": log.isnan() | (log == math.inf),
        }
        if bool(torch.stack(list(faults.values())).any()):
            what, bad = next((what, bad) for what, bad in faults.items() if bool(bad.any()))
            chain = block.chains.start + int(bad.to(torch.uint8).argmax())
            raise DivergenceError(
                f"{what} at step {number}, for chain {chain}, with step {self.step:g}"
            )


# --- compiled passes over a block -----------------------------------------------------------------


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """In machine code for float32 and float64; from numba's cache, or after a second."""
    import numba  # half a second: not for whoever imports the package for something else

    wide, real, count = numba.float64[::1], numba.float64, numba.int64
    signatures = []
    for kind in (numba.float32, numba.float64):
        rows, row = kind[:, ::1], kind[::1]
        signatures.append(
            {
                _fill: numba.void(rows, *4 * [count], real),
                _radial: count(rows, rows, row, row, wide, wide, count, wide, *3 * [real]),
                _affine: count(rows, rows, rows, *3 * [real]),
                _project: numba.void(rows, row, row, wide, wide),
                _moments: numba.void(rows, count, real[:, ::1], real[:, ::1]),
            }[function]
        )
    # Sums in any order, fused products: neither hides a NaN.
    options: dict[str, Any] = {"fastmath": {"reassoc", "contract"}, "error_model": "numpy"}
    try:
        return numba.njit(signatures, cache=True, **options)(function)
    except Exception:  # no folder to write to, a full disk, a torn file: a cache is not needed
        return numba.njit(signatures, **options)(function)


def _fill(out, seed, chain, step, group, deviation):  # type: ignore[no-untyped-def]  # noqa: PLR0915
    """Normals of ``out [rows, d]``: row i holds chain ``chain + i`` at step ``step`` (from 0).

    Four neighbours come from the counter (group + j // 4, step, step div 2³², chain). Groups of all
    rows follow each other, ``GROUPS`` at a time, always that many: each number is made by the same
    vector instructions wherever it falls, hence the same for every split of a batch.
    """
    f32, i32 = np.float32, np.int32
    u32, u64 = np.uint32, np.uint64
    low, half = u64(0xFFFFFFFF), u64(32)
    seed0, seed1 = u64(seed) & low, u64(seed) >> half
    step0, step1 = u64(step) & low, u64(step) >> half
    rows, d = out.shape
    per_row, scale = (d + 3) // 4, out.dtype.type(deviation)
    chains, groups = np.empty(GROUPS, np.uint32), np.empty(GROUPS, np.uint32)
    z = np.empty((4, GROUPS), np.float32)
    for first in range(0, rows * per_row, GROUPS):
        row, at, done = first // per_row, first % per_row, 0
        while done < GROUPS:
            span = min(GROUPS - done, per_row - at)
            chains[done : done + span] = chain + row
            some = groups[done : done + span]
            for i in range(span):
                some[i] = group + at + i
            row, at, done = row + 1, 0, done + span
        for i in range(GROUPS):
            a, b, c, e = u64(groups[i]), step0, step1, u64(chains[i])
            key0, key1 = seed0, seed1
            for _ in range(10):
                p, q = u64(0xD2511F53) * a, u64(0xCD9E8D57) * c
                a, b, c, e = (q >> half) ^ b ^ key0, q & low, (p >> half) ^ e ^ key1, p & low
                key0, key1 = (key0 + u64(0x9E3779B9)) & low, (key1 + u64(0xBB67AE85)) & low
            for k in range(2):
                x, y = (a, u32(b)) if k == 0 else (c, u32(e))
                # log v for v = (x + 1/2)/2³², as 2^n·(1 + m) with 1 + m in [√½, √2)
                v = np.float32(f32(np.int64(x)) * f32(2.0**-32) + f32(2.0**-33))
                bits = v.view(np.int32)
                n = i32(bits - i32(0x3F3504F3)) >> i32(23)
                m = np.int32(bits - i32(n << i32(23))).view(np.float32) - f32(1)
                log = f32(7.0376836292e-2)
                log = log * m + f32(-1.1514610310e-1)
                log = log * m + f32(1.1676998740e-1)
                log = log * m + f32(-1.2420140846e-1)
                log = log * m + f32(1.4249322787e-1)
                log = log * m + f32(-1.6668057665e-1)
                log = log * m + f32(2.0000714765e-1)
                log = log * m + f32(-2.4999993993e-1)
                log = log * m + f32(3.3333331174e-1)
                log = m * m * (m * log - f32(0.5)) + m + f32(n) * f32(math.log(2))
                r = np.float32(math.sqrt(max(f32(0), f32(-2) * log)))
                r = np.int32(r.view(np.int32) ^ i32(y & u32(0x80000000))).view(np.float32)
                # the angle modulo π/2, as in the kernel; one bit swaps sine and cosine
                t = f32(i32(y << u32(2))) * f32(math.pi / 4 * 2.0**-31)
                s = t * t
                sine = f32(-1 / 5040) + s * f32(1 / 362880)
                sine = t + t * s * (f32(-1 / 6) + s * (f32(1 / 120) + s * sine))
                cosine = f32(-1 / 720) + s * f32(1 / 40320)
                cosine = f32(1) + s * (f32(-0.5) + s * (f32(1 / 24) + s * cosine))
                swap = (y & u32(0x40000000)) != 0
                z[2 * k, i] = r * (sine if swap else cosine)
                z[2 * k + 1, i] = r * (cosine if swap else sine)
        row, at, done = first // per_row, first % per_row, 0
        while done < GROUPS and row < rows:
            span = min(GROUPS - done, per_row - at)
            whole = min(span, d // 4 - at)
            there, here = out[row, 4 * at :], z[:, done:]
            for i in range(whole):
                for k in range(4):
                    there[4 * i + k] = scale * here[k, i]
            for j in range(4 * (at + whole), min(d, 4 * (at + span))):
                out[row, j] = scale * z[j % 4, done + whole]
            row, at, done = row + 1, 0, done + span


def _fill_there(
    out: Tensor, seed: int, chain: int, step: int, group: int, deviation: float
) -> None:
    """What ``_fill`` does, by torch's operations, on any device and up to rounding."""
    rows, d = out.shape
    a = torch.arange(group, group - (-d // 4), device=out.device)[None, :]
    e = torch.arange(chain, chain + rows, device=out.device)[:, None]
    b, c = torch.full_like(a, step & LOW), torch.full_like(e, step >> 32)
    key0, key1 = seed & LOW, seed >> 32
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c  # modulo 2⁶⁴
        a, b, c, e = (q >> 32 & LOW) ^ b ^ key0, q & LOW, (p >> 32 & LOW) ^ e ^ key1, p & LOW
        key0, key1 = (key0 + 0x9E3779B9) & LOW, (key1 + 0xBB67AE85) & LOW
    parts = []
    for x, y in ((a, b), (c, e)):
        r = (-2 * (x.float() * 2.0**-32 + 2.0**-33).log()).clamp_min(0).sqrt()
        r = torch.where(y >= 2**31, -r, r)
        t = ((y << 2 & LOW ^ 2**31) - 2**31).float() * (math.pi / 4 * 2.0**-31)
        swap = (y & 2**30) != 0
        parts += [r * torch.where(swap, t.sin(), t.cos()), r * torch.where(swap, t.cos(), t.sin())]
    out.copy_(torch.stack(parts, 2).flatten(1)[:, :d]).mul_(deviation)


def _radial(x, noise, axis, origin, u, square, kind, p, keep, drift, limit):  # type: ignore[no-untyped-def]
    """One step of every row of ``x``; returns the first row out of bounds, or −1.

    With y = x − origin, ``u`` and ``square`` hold axis·y and ‖y‖² of each row; they are updated.
    ``p`` comes from ``_without_divisions``.
    """
    number = x.dtype.type
    zero, more, bad = number(0), number(keep - 1), -1
    for i in range(x.shape[0]):
        if kind == 0:
            pull, push = p[0], p[1]
        elif kind == 1:
            psi = min(1.0, max(0.0, (p[2] - math.sqrt(square[i])) * p[3]))
            pull, push = 1 + psi * p[0], (1 - psi) * p[1]
        else:
            k, top, w = p.size // 4, -math.inf, 0.0
            if p[-1] != 0:  # the variances differ
                w = square[i] - u[i] * u[i]
            if w < 0.25 * square[i] and p[-1] != 0:  # few digits left: sum the rest itself
                rest, far = zero, number(u[i])
                for j in range(x.shape[1]):
                    y = x[i, j] - origin[j] - far * axis[j]
                    rest += y * y
                w = rest
            for c in range(k):
                log_share = p[c] - 0.5 * p[2 * k + c] * (u[i] - p[k + c]) ** 2 - p[3 * k + c] * w
                top = max(top, log_share)
            total = pull = push = 0.0
            for c in range(k):
                log_share = p[c] - 0.5 * p[2 * k + c] * (u[i] - p[k + c]) ** 2 - p[3 * k + c] * w
                share = math.exp(log_share - top)
                total += share
                pull += share * p[2 * k + c]
                push += share * p[2 * k + c] * p[k + c]
            pull, push = pull / total, push / total
        shrink, along = number(keep - drift * pull), number(drift * push)
        on_axis, norm = zero, zero
        for j in range(x.shape[1]):
            y = shrink * (x[i, j] - origin[j]) + along * axis[j] + noise[i, j]
            y += more * origin[j]
            x[i, j] = y + origin[j]
            on_axis += axis[j] * y
            norm += y * y
        u[i], square[i] = on_axis, norm
        if bad < 0 and not norm < limit:  # a NaN too
            bad = i
    return bad


def _affine(x, score, noise, keep, drift, limit):  # type: ignore[no-untyped-def]
    """``x ← keep·x + drift·score + noise``; returns the first row out of bounds, or −1."""
    number = x.dtype.type
    zero, hold, rate, bad = number(0), number(keep), number(drift), -1
    for i in range(x.shape[0]):
        norm = zero
        for j in range(x.shape[1]):
            y = hold * x[i, j] + rate * score[i, j] + noise[i, j]
            x[i, j] = y
            norm += y * y
        if bad < 0 and not norm < limit:  # a NaN too
            bad = i
    return bad


def _without_divisions(law: RadialLaw) -> NDArray[np.float64]:
    """The law's parameters, such that rows divide little.

    - Gaussian: 1/variance, m/variance;
    - trap: α − 1, m, outer radius, 1/(outer − inner);
    - mixture: K log weights, K positions, K precisions, and what half a precision exceeds the
      smallest half by; in order of the precisions, so that the last number says if they differ.
    """
    p = np.array(law.parameters, dtype=np.float64)
    if law.kind == GAUSSIAN:
        return np.array([1 / p[1], p[0] / p[1]])
    if law.kind == TRAP:
        return np.array([p[1] - 1, p[0], p[3], 1 / (p[3] - p[2])])
    weights, positions, variances = p[1:].reshape(3, -1)
    order = np.argsort(-variances, kind="stable")
    precisions = 1 / variances[order]
    excess = (precisions - precisions[0]) / 2
    return np.concatenate([weights[order], positions[order], precisions, excess])


def _project(x, axis, origin, u, square):  # type: ignore[no-untyped-def]
    """``u`` and ``square`` of each row, as in ``_radial``."""
    for i in range(x.shape[0]):
        on_axis = norm = x.dtype.type(0)
        for j in range(x.shape[1]):
            y = x[i, j] - origin[j]
            on_axis += axis[j] * y
            norm += y * y
        u[i], square[i] = on_axis, norm


def _moments(x, n, mean, squares):  # type: ignore[no-untyped-def]
    """Welford's update with state number ``n``."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            delta = x[i, j] - mean[i, j]
            mean[i, j] += delta / n
            squares[i, j] += delta * (x[i, j] - mean[i, j])


# --- arguments ------------------------------------------------------------------------------------


def check_positive(name: str, value: float) -> float:
    """``value`` as a float; a clear error unless it is positive and finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number, not {value!r}") from error
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
    return number


def check_count(name: str, value: int, least: int) -> int:
    """``value`` as an int; a clear error unless it is an integer of at least ``least``."""
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, not {value!r}") from error
    if not least <= count < 2**62:
        raise ValueError(f"{name} must be at least {least} and below 2^62, not {count}")
    return count


def _check_start(start: Any) -> None:
    if not isinstance(start, Tensor):
        raise TypeError(f"start must be a tensor [C, d], not {type(start).__name__}")
    if start.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"start must be float32 or float64, not {start.dtype}: use .float()")
    if start.layout != torch.strided:
        raise TypeError(f"start must be dense, not {start.layout}: use .to_dense()")
    if start.is_meta:
        raise TypeError("start must hold values, but is on the meta device: make it on cpu or cuda")
    if start.ndim != 2 or not start.shape[1]:
        raise ValueError(
            f"start must be [C, d] with d ≥ 1, one row a chain, not of shape {list(start.shape)}"
        )
    # One pass without temporaries; a NaN passes through to both ends.
    start = start.detach()
    ends = [float(end) for end in torch.aminmax(start)] if len(start) else [0.0]
    if not all(map(math.isfinite, ends)):
        bad = int((~start.isfinite()).any(1).sum())
        raise ValueError(
            f"start must be finite, but {bad} of its {len(start)} rows hold a NaN or an infinity"
        )
    if max(map(abs, ends)) > math.sqrt(torch.finfo(start.dtype).max / start.shape[1]):
        raise ValueError(
            f"start holds {max(ends, key=abs):.3g}, too large for squared norms in {start.dtype}: "
            "rescale it"
        )


def _check_times(times: Sequence[float]) -> list[float]:
    try:
        levels = [float(t) for t in times]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"times must be a list of numbers, such as [2.0, 1.0, 0.5, 0.0]: {error}"
        ) from error
    falling = all(a > b for a, b in itertools.pairwise(levels))
    if not levels or levels[-1] != 0 or not falling or levels[0] == math.inf:
        raise ValueError(
            "times must decrease strictly to 0, such as [2.0, 1.0, 0.5, 0.0], "
            f"not {levels if len(levels) < 8 else [*levels[:3], '…', *levels[-3:]]}"
        )
    gap, t, s = max(((a - b, a, b) for a, b in itertools.pairwise(levels)), default=(0.0,) * 3)
    if gap > LONGEST:
        raise ValueError(
            f"times must be at most {LONGEST} apart, but the largest step is {gap:g}, from {t:g} "
            f"to {s:g}, and rounding grows by exp({gap:g}) over it: put levels between"
        )
    return levels


def _check_score_at(score_at: Any) -> None:
    if isinstance(score_at, RadialScore | MemorizingScore | TiltedScore):
        raise TypeError(
            f"score_at must map a time to a score, but is a {type(score_at).__name__}: for a "
            "GaussianScore or MixtureScore of the data pass its method noised"
        )
    if not callable(score_at):
        raise TypeError(f"score_at must map a time to a score, not be {type(score_at).__name__}")


def _check_levels(scores: Any, steps: Any) -> list[float]:
    """Step size of each level; one number is the same for all."""
    if not hasattr(scores, "__len__"):
        raise TypeError(
            f"scores must be a list of scores, one a level, not {type(scores).__name__}; for one "
            "score use langevin"
        )
    if isinstance(steps, int | float) or getattr(steps, "ndim", None) == 0:
        steps = [check_positive("steps", steps)] * len(scores)
    if not hasattr(steps, "__len__"):
        raise TypeError(
            f"steps must be a list of step sizes, one a score, or one number, not {steps!r}"
        )
    if not len(scores) or len(scores) != len(steps):
        raise ValueError(
            f"steps must hold one step a score, and at least one: {len(steps)} steps, "
            f"{len(scores)} scores"
        )
    return [check_positive(f"steps[{i}]", step) for i, step in enumerate(steps)]
