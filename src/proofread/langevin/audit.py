"""Before a Langevin run with a learned score: do chains start or end at training points?

A score that memorises pulls towards every training point near it, and a chain that starts there
stays for a time exponential in the dimension, although the error averaged over the target is tiny
(theorem 7 of Cao, Chen, Sridharan and Wu, *On the Robustness of Langevin Dynamics to Score Function
Error*). Fresh samples of the same law start outside these traps. The audit looks for both halves of
the fault, starts on training points and a score that holds them, on the score at hand. A score that
has memorised everything does worse: it draws chains from any start to its training points. So the
audit also looks where chains from the other starts end.

**Radius.** The typical spacing is the median distance from a training point to the nearest other
one. Everything is measured against half of it: the balls of that radius hardly overlap, so that a
trap about each point fits within, and by the same exchange of roles a fresh sample lies at about
the whole spacing from its nearest training point.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from proofread.stats import Estimate, clopper_pearson

from .samplers import check_count, check_positive, langevin

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .scores import Score

__all__ = ["AuditReport", "initialization_audit"]

SAFE = "safe"
COLLAPSED = "collapsed: chains from other starts end at training points"
UNSAFE = "unsafe: starts are at training points and are held"
FREE = "starts are at training points, but not held"
SHORT = "inconclusive: the run is too short to tell"
FEW = "inconclusive: too few starts to tell"

SAME = 1e-6  # of the spacing: closer than this, a start is a training point
NEAR = 0.5  # of the spacing: the radius
PROBES = 256  # chains from training points, of the control, and of the other starts at most
SPACINGS = 1024  # training points whose nearest other one is looked up, at most
BLOCKS = 1024, 4096  # starts × training points at a time: 32 MiB of distances
ONE_POINT = 1e-6  # of the data's own size: training points closer than this count as one
CLEARLY = 0.05  # nearest distances depend on each other: their interval is too narrow
LARGEST = 1e150  # its square is finite, and that of its inverse is not 0


@dataclass(frozen=True)
class AuditReport:
    """What an audit found; print it, or let a notebook show it.

    Intervals are exact (Clopper and Pearson), at 95 %.

    Attributes:
        verdict: one of the six sentences that ``initialization_audit`` lists.
        advice: what to do about it.
        dimension: d.
        n_training: number of training points, coincident ones included.
        spacing: median distance from a training point to the nearest other one.
        coincident: share of the starts that coincide with a training point.
        near: share of the starts within half the spacing of a training point.
        near_fresh: the same for training points and the nearest other one, which is what to expect
            of fresh starts.
        held: share, of the starts that are near, of chains that end within half the spacing of the
            training point where they began, with no other one nearer; None if no start is near.
        held_training: the same for chains from training points drawn at random.
        kept: share of the control's chains that end within half the spacing of their own start.
        ends_near: share, of chains from the other starts (256 of them at most), that end within
            half the spacing of any training point; None if every start is near one.
        control: ``"reference"`` or ``"displaced training points"``.
        step: step size.
        n_steps: steps of every chain.
    """

    verdict: str
    advice: str
    dimension: int
    n_training: int
    spacing: float
    coincident: Estimate
    near: Estimate
    near_fresh: Estimate
    held: Estimate | None
    held_training: Estimate
    kept: Estimate
    ends_near: Estimate | None
    control: str
    step: float
    n_steps: int

    def __str__(self) -> str:
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name:<{width}}  {value}" for name, value in rows]
        return "\n".join([self._title(), *lines, f"{self.verdict}. {self.advice}"])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return (
            f"<table><caption>{html.escape(self._title())}</caption><tbody>{cells}</tbody></table>"
            f"<p><strong>{html.escape(self.verdict)}.</strong> {html.escape(self.advice)}</p>"
        )

    def _title(self) -> str:
        return (
            f"Initialization audit: {self.near.n:,} starts, {self.n_training:,} training points, "
            f"d = {self.dimension:,}"
        )

    def _rows(self) -> list[tuple[str, str]]:
        """Name and value of each line."""
        return [
            ("typical spacing of training points", f"{self.spacing:.4g}"),
            ("starts that coincide with training points", str(self.coincident)),
            ("starts within half the spacing of one", str(self.near)),
            ("... to expect of fresh starts", str(self.near_fresh)),
            (f"held within {self.n_steps:,} steps of {self.step:g}, of these", _shown(self.held)),
            ("... of any training points", str(self.held_training)),
            (f"... of the control ({self.control})", str(self.kept)),
            ("ends of the other starts within half the spacing", _shown(self.ends_near)),
        ]


def initialization_audit(
    start: Tensor | ArrayLike,
    training_points: Tensor | ArrayLike,
    score: Score | Callable[[Tensor], Tensor],
    *,
    step: float,
    n_steps: int = 200,
    seed: int = 0,
    reference: Tensor | ArrayLike | None = None,
) -> AuditReport:
    """Whether chains from these starts stay at, or are drawn to, the points a score was fitted on.

    Four groups of chains run for ``n_steps`` with the score: the starts near a training point;
    training points drawn at random; a control, which shows how far a chain that nothing holds
    goes in that time; and the other starts, a random sample of at most 256. Without ``reference``
    the control is 256 random training points, each displaced by the typical spacing in a random
    direction: no fresh data are needed, and it begins outside every ball of half that length about
    its own point. Every answer is one about ``n_steps`` steps of this size: pass those of the
    intended run.

    **Verdicts**, by the first rule that applies. Starts *are at training points* if one coincides
    with a training point, or if the interval of the share near one lies above that to expect of
    fresh starts.

    1. ``"collapsed: chains from other starts end at training points"``: the interval of the share
       of the other starts' chains that end near a training point lies above that to expect of fresh
       points, by more than 0.05. Other starts don't help then.
    2. ``"safe"``: the starts are not at training points, and the ends of their chains do not pile
       up there. It covers this alone, within ``n_steps`` steps; a score can have other faults, as
       in theorem 1. (With so few starts that a pile of at least half of their ends, above what to
       expect, is no evidence: rule 6.)
    3. ``"unsafe: starts are at training points and are held"``: the interval of the share held lies
       above that of the control.
    4. ``"starts are at training points, but not held"``: the interval of the share held ends
       below 1/2. A step too large for a trap can throw chains out of it: this holds for the given
       step size alone.
    5. ``"inconclusive: the run is too short to tell"``: at least half of the control, too, is
       still where it began.
    6. ``"inconclusive: too few starts to tell"``: all else.

    Args:
        start: ``[C, d]`` the starts of the intended run, float32 or float64; chains run in its
            dtype and on its device.
        training_points: ``[n, d]`` what the score was fitted on, at least two different points;
            repetitions count as one. Memory beyond one copy is bounded whatever n is.
        score: the score in use, ``[…, d] → […, d]``.
        step: step size of the intended run.
        n_steps: steps of every chain. The default is the audit's own: pass the intended run's. It
            must be enough for a free chain to go further than half the spacing.
        seed: of noise, directions and draws of starts and training points.
        reference: ``[R, d]`` samples that the score was not fitted on, to serve as the control.

    Returns:
        the shares with their intervals, the verdict and advice.

    Raises:
        ValueError: wrong shapes, no starts, fewer than two different training points, a NaN, an
            infinity or a scale of which squares overflow, a reference that holds training points,
            a step or a count that is not positive.
        TypeError: starts or points that are not float32 or float64, or a score of another dtype
            than the starts.
        DivergenceError: from the sampler, with a step too large or a score that isn't finite.
    """
    step, n_steps = check_positive("step", step), check_count("n_steps", n_steps, 1)
    start, points = _points("start", start, 1), _points("training_points", training_points, 2)
    _check_like(start, "training_points", points)
    generator = torch.Generator().manual_seed(check_count("seed", seed, 0))
    others = None if reference is None else _points("reference", reference, 1)
    if others is not None:
        _check_like(start, "reference", others)
    n_training, points = len(points), _distinct(points)
    spacing, near_fresh = _spacing(points, n_training, generator)
    distance, index = _nearest(start, points)
    near = distance < NEAR * spacing
    run = _Run(score, step, n_steps, seed, points, NEAR * spacing)
    probes = _drawn(points, generator).to(start)
    if others is None:
        others = _displaced(_drawn(points, generator), spacing, generator)
    else:
        _check_fresh(others, points, SAME * spacing)
    anchors = points[index[near].to(points.device)].to(start)
    far = _some(start[~near], generator)
    held, held_training, kept, ends = run(start[near], anchors, probes, others.to(start), far)
    coincident, near_share = _share(distance <= SAME * spacing), _share(near)
    trained = coincident.value > 0 or near_share.low > near_fresh.high
    verdict = _verdict(trained, held, kept, ends, near_fresh)
    return AuditReport(
        verdict=verdict,
        advice=_advice(verdict, held_training.low > kept.high, n_steps, step),
        dimension=start.shape[1],
        n_training=n_training,
        spacing=spacing,
        coincident=coincident,
        near=near_share,
        near_fresh=near_fresh,
        held=held,
        held_training=held_training,
        kept=kept,
        ends_near=ends,
        control="displaced training points" if reference is None else "reference",
        step=step,
        n_steps=n_steps,
    )


def _shown(share: Estimate | None) -> str:
    return "none" if share is None else str(share)


# --- rules ----------------------------------------------------------------------------------------


def _verdict(
    trained: bool, held: Estimate | None, kept: Estimate, ends: Estimate | None, fresh: Estimate
) -> str:
    """The first rule that applies; whoever is a training point is near one, so held is known."""
    if ends is not None and ends.low > fresh.high + CLEARLY:
        return COLLAPSED
    if not trained or held is None:
        piled = ends is not None and ends.value >= 1 / 2 and ends.value > fresh.high
        return FEW if piled else SAFE
    if held.low > kept.high:
        return UNSAFE
    if held.high < 1 / 2:
        return FREE
    return SHORT if kept.value >= 1 / 2 else FEW


def _advice(verdict: str, holds: bool, n_steps: int, step: float) -> str:
    within = f"within {n_steps:,} steps of {step:g}"
    covered = (
        f"This says only that chains were not started at, nor drawn to, training points {within}; "
        "pass the run's own n_steps and step."
    )
    if verdict == SAFE and holds:
        covered += " The score does hold its training points, so never start from those."
    return {
        SAFE: covered,
        COLLAPSED: "The score has memorised, and fresh starts do not help: stop training earlier, "
        "raise the noise, or use more data.",
        UNSAFE: "Start from samples that the score was not fitted on, or from noise with a "
        "diffusion sampler, and audit those starts.",
        FREE: f"Not held {within}, which says nothing of other step sizes or longer runs; samples "
        "that the score was not fitted on remain the better starts.",
        SHORT: f"The control did not move either: audit with more steps, such as "
        f"n_steps={4 * n_steps}, or a larger step.",
        FEW: "Audit more starts of the same origin.",
    }[verdict]


# --- distances ------------------------------------------------------------------------------------


def _nearest(queries: Tensor, points: Tensor, apart: float = -1.0) -> tuple[Tensor, Tensor]:
    """Distance to the nearest of the points further than ``apart``, float64, and its index.

    ``[Q, d]`` and ``[n, d]`` to ``[Q]`` each, on the queries' device; ∞ and 0 if there is none.
    """
    rows, columns = BLOCKS
    found = [_nearest_block(block, points, apart, columns) for block in queries.split(rows)]
    distance, index = (torch.cat(parts) for parts in zip(*found, strict=True))
    return distance, index


def _nearest_block(
    queries: Tensor, points: Tensor, apart: float, columns: int
) -> tuple[Tensor, Tensor]:
    # Products of centred float64 find the nearest; its distance is then taken without cancellation.
    centre = points[:columns].to(queries.device, torch.float64).mean(0)
    x = queries.double() - centre
    best = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
    index, exact = torch.zeros_like(best, dtype=torch.int64), best.clone()
    for number, part in enumerate(points.split(columns)):
        y = part.to(x.device, torch.float64) - centre
        distances = torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist")
        distances[distances <= apart] = torch.inf
        nearest, where = distances.min(1)
        closer = nearest < best
        best[closer], index[closer] = nearest[closer], where[closer] + number * columns
        exact[closer] = (x[closer] - y[where[closer]]).norm(dim=1)
    return exact, index


def _distinct(points: Tensor) -> Tensor:
    """First occurrences, in their order: repetitions would count as a narrow spacing's evidence."""
    _, group = torch.unique(points, dim=0, return_inverse=True)
    first = torch.full_like(group, len(points)).scatter_reduce(
        0, group, torch.arange(len(points), device=group.device), "amin"
    )
    first = first[first < len(points)].sort().values
    return points if len(first) == len(points) else points[first]


def _spacing(points: Tensor, given: int, generator: torch.Generator) -> tuple[float, Estimate]:
    """Median distance to the nearest other point, and the share of points within half of it."""
    some = points[torch.randperm(len(points), generator=generator)[:SPACINGS].to(points.device)]
    size = float((some.double() - some.double().mean(0)).square().sum(1).mean().sqrt())
    if len(points) > 1 and not size > 1 / LARGEST:
        raise ValueError(
            "training_points lie so close that the squares of their distances underflow: multiply "
            "start and training_points by a common factor, and the score by its inverse"
        )
    distance, _ = _nearest(some, points, apart=ONE_POINT * size)
    if not distance.isfinite().all():
        raise ValueError(
            f"training_points must hold at least two different points, but all {given} coincide"
        )
    spacing = float(distance.median())
    return spacing, _share(distance < NEAR * spacing)


def _share(hits: Tensor) -> Estimate:
    return clopper_pearson(int(hits.sum()), len(hits))


# --- chains ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """The four groups of chains, in one call of the sampler."""

    score: Score | Callable[[Tensor], Tensor]
    step: float
    n_steps: int
    seed: int
    points: Tensor
    radius: float

    def __call__(
        self, starts: Tensor, anchors: Tensor, probes: Tensor, control: Tensor, far: Tensor
    ) -> tuple[Estimate | None, Estimate, Estimate, Estimate | None]:
        """Shares held of starts and probes, kept of the control, and of far starts ending near.

        The first and the last are None without such starts.
        """
        groups = starts, probes, control, far
        ends = self._ends(torch.cat(groups))
        of_starts, of_probes, of_control, of_far = ends.split([len(group) for group in groups])
        held = _share(self._held(of_starts, anchors)) if len(starts) else None
        kept = (of_control - control).norm(dim=1) < self.radius
        drawn = _share(_nearest(of_far, self.points)[0] < self.radius) if len(far) else None
        return held, _share(self._held(of_probes, probes)), _share(kept), drawn

    def _ends(self, begins: Tensor) -> Tensor:
        try:
            return langevin(self.score, begins, self.step, self.n_steps, seed=self.seed).final
        except RuntimeError as error:
            other = torch.float32 if begins.dtype == torch.float64 else torch.float64
            if self._works(begins[:1]) or not self._works(begins[:1].to(other)):
                raise
            remedy = "start.float()" if other == torch.float32 else "start.double()"
            raise TypeError(
                f"start is {begins.dtype}, but score takes {other}: pass {remedy}"
            ) from error

    def _works(self, x: Tensor) -> bool:
        """Whether the score can be called with this."""
        try:
            with torch.no_grad():
                self.score(x)
        except RuntimeError:
            return False
        return True

    def _held(self, ends: Tensor, anchors: Tensor) -> Tensor:
        """Within the radius of the anchor, with no other training point nearer: ``[C]``."""
        distance = (ends.double() - anchors.double()).norm(dim=1)
        held = distance < self.radius
        if held.any():
            nearest, _ = _nearest(ends[held], self.points)
            held[held.clone()] = distance[held] <= nearest * (1 + 1e-6)  # repetitions: equal
        return held


def _drawn(points: Tensor, generator: torch.Generator) -> Tensor:
    """Training points at random, with replacement, so that the chains are independent."""
    return points[torch.randint(len(points), (PROBES,), generator=generator).to(points.device)]


def _some(starts: Tensor, generator: torch.Generator) -> Tensor:
    """At most ``PROBES`` of them, at random, without replacement."""
    order = torch.randperm(len(starts), generator=generator)
    return starts[order[:PROBES].to(starts.device)]


def _displaced(points: Tensor, length: float, generator: torch.Generator) -> Tensor:
    """Each moved by that length in a direction of its own."""
    directions = torch.randn(points.shape, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.normalize(directions, dim=1)
    return points + (length * unit).to(points)


# --- arguments ------------------------------------------------------------------------------------


def _points(name: str, values: Tensor | ArrayLike, least: int) -> Tensor:
    """``[C, d]``, finite, float32 or float64, at least so many rows."""
    if isinstance(values, np.ndarray):  # torch warns of what is read-only and refuses strides < 0
        values = np.require(values, requirements=["C", "W"])
    x = torch.as_tensor(values).detach()
    if x.ndim != 2 or len(x) < least or not x.shape[1]:
        raise ValueError(
            f"{name} must be [C, d] with C ≥ {least} and d ≥ 1 (flatten images), "
            f"not of shape {list(x.shape)}"
        )
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64, not {x.dtype}: convert it by .float()")
    if not all(block.isfinite().all() for block in x.split(BLOCKS[1])):
        raise ValueError(f"{name} must be finite, but it holds a NaN or an infinity")
    if any(block.abs().max() > LARGEST for block in x.split(BLOCKS[1])):
        raise ValueError(
            f"{name} must be of a scale whose squares are finite, but it holds numbers beyond "
            f"{LARGEST:g}: divide start and training_points by a common factor, and multiply the "
            "score by it"
        )
    return x


def _check_like(start: Tensor, name: str, points: Tensor) -> None:
    if points.shape[1] != start.shape[1]:
        raise ValueError(
            f"{name} and start must have the same dimension, not {points.shape[1]} and "
            f"{start.shape[1]}"
        )


def _check_fresh(reference: Tensor, points: Tensor, same: float) -> None:
    overlap = int((_nearest(reference, points)[0] <= same).sum())
    if overlap:
        raise ValueError(
            f"reference must hold samples that the score was not fitted on, but {overlap} of its "
            f"{len(reference)} are training points: leave those out, or pass no reference"
        )
