r"""Unadjusted Langevin of a radial score as a chain of two numbers, at a cost free of d.

**Reduction.** Write :math:`y = x - o`, :math:`u = \langle a, y\rangle` and
:math:`w = \|y\|^2 - u^2` for a score :math:`s(x) = -p\,y + q\,a` whose coefficients *p* (pull) and
*q* (push) depend on :math:`(u, w)` only, with a unit axis *a*. A step
:math:`x' = x + h\,s(x) + \sqrt{2h}\,\xi` gives along and across the axis

.. math::

   u' = (1 - hp)\,u + hq + \sqrt{2h}\,z_0, \qquad
   y_\perp' = (1 - hp)\,y_\perp + \sqrt{2h}\,\xi_\perp .

The noise across is invariant under rotations of the d − 1 directions left, so turn them until
:math:`y_\perp` lies on one of them: the new squared length is

.. math:: w' = \bigl((1 - hp)\sqrt{w} + \sqrt{2h}\,z_1\bigr)^2 + 2h\,\chi^2_{d-2},

of which the law depends on :math:`(u, w)` alone. Hence :math:`(u, w)` is a Markov chain with the
law that it has within the full chain: an identity, with no approximation, in every zone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .samplers import DivergenceError, check_count, check_positive
from .scores import (
    GAUSSIAN,
    MIXTURE,
    TRAP,
    GaussianScore,
    MixtureScore,
    RadialScore,
    TrapScore,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RadialChains", "RadialStart", "radial_chain"]

Floats = NDArray[np.float64]
RUNNING, EXITED, DIVERGED = 0, 1, 2  # how a slice of steps ended
SLICE = 2**21  # coefficients evaluated between two looks at Ctrl-C: about a tenth of a second
HUGE = 1e300  # a squared radius that only a diverging chain reaches


class RadialStart(NamedTuple):
    """Where chains start, in the reduced coordinates.

    - ``u``: position along the axis, one number or ``[C]``.
    - ``w``: squared distance from the axis, one number or ``[C]``; 0 in one dimension.
    """

    u: ArrayLike
    w: ArrayLike


@dataclass(frozen=True)
class RadialChains:
    """Where C reduced chains ended, and what was kept on the way.

    Attributes:
        u: ``[C]`` last positions along the axis, from the score's origin.
        w: ``[C]`` last squared distances from the axis.
        exit_step: ``[C]`` number of the first step after which the radius exceeded
            ``stop_radius``; 0 if the start did, −1 if it never happened or nothing was to stop.
        us: ``[kept, C]`` positions along the axis after every ``thin`` steps, or None; after its
            exit a chain repeats its state at the exit.
        ws: ``[kept, C]`` squared distances from the axis at the same steps, or None.
        n_steps: steps asked for; a stopped chain made ``exit_step`` of them.
    """

    u: Floats
    w: Floats
    exit_step: NDArray[np.int64]
    us: Floats | None
    ws: Floats | None
    n_steps: int

    @property
    def radius(self) -> Floats:
        """``[C]`` last distances from the score's origin."""
        return np.sqrt(self.u**2 + self.w)


def radial_chain(
    score: RadialScore,
    start: RadialStart | Tensor | ArrayLike | Literal["gaussian"],
    step: float,
    n_steps: int,
    *,
    n_chains: int | None = None,
    seed: int,
    thin: int | None = None,
    stop_radius: float | None = None,
    progress: bool | None = None,
) -> RadialChains:
    """Unadjusted Langevin of a radial score, in law, as a compiled loop over two numbers a chain.

    The pair of axis position and squared distance from the axis has exactly the law that it has
    within the chain in all ``d`` dimensions (the module's text has the proof), in float64 and at
    tens of nanoseconds a step for every ``d``. The first call compiles for about two seconds; later
    processes read the result from numba's cache where a folder for it can be written.

    Args:
        score: a score with a radial law (``GaussianScore``, ``TrapScore``, a ``MixtureScore`` with
            its centres on one line). A subclass that computes another score when called has no
            law that is known here, and is refused.
        start: ``RadialStart(u, w)`` or a pair ``(u, w)`` with numbers or ``[C]`` arrays; or points
            ``[C, d]``, a tensor or an array; or ``"gaussian"`` for independent starts from
            N(origin, I), where the origin is the score's.
        step: step size h > 0.
        n_steps: number of steps, 0 or more.
        n_chains: C where ``start`` doesn't say it, for ``"gaussian"`` and two numbers (default 1).
        seed: 0 or more. Chain c draws from a stream of its own, made of ``(seed, c)``: it is the
            same whatever the number of chains.
        thin: keep the state after every ``thin`` steps, ``16 · C · (n_steps // thin)`` bytes.
        stop_radius: a chain stops after the first step that takes it further than this length from
            the origin, and keeps the state that it has then.
        progress: a bar on stderr; None shows it on a terminal only.

    Returns:
        the last states, exit steps and kept states.

    Raises:
        TypeError: ``score`` is no radial score or overrides one, or a count is no integer.
        ValueError: a step, radius or count that is not positive, a start of the wrong shape, with a
            NaN or an infinity, 1e150 or more from the origin, or with ``w`` below 0 (in one
            dimension: not 0), or a pair of ``d`` numbers each, which could be two points.
        DivergenceError: a chain left every bound, most often because the step is too large; names
            chain and step.
    """
    laws = _law(score)
    step, n_steps = check_positive("step", step), check_count("n_steps", n_steps, 0)
    stop = math.inf if stop_radius is None else check_positive("stop_radius", stop_radius)
    every = n_steps + 1 if thin is None else check_count("thin", thin, 1)
    seed = check_count("seed", seed, 0)
    starts, n_chains = _starts(score, start, n_chains)
    setting = _Setting(*laws, score.dimension, step, stop * stop, every)
    ends, exits = np.empty((n_chains, 2)), np.full(n_chains, -1, dtype=np.int64)
    kept = np.empty((n_chains, n_steps // every, 2))
    with _bar(n_chains * n_steps, progress) as bar:
        for c in range(n_chains):
            rng = _stream(seed, c)
            u, w = _gaussian_start(rng, score.dimension) if starts is None else starts[c]
            u, w, done, ended = _run(setting, n_steps, u, w, rng, kept[c], bar)
            if ended == DIVERGED:
                raise _divergence(score, step, c, done)
            if ended == EXITED:
                exits[c] = done
                kept[c, max(done - 1, 0) // every :] = u, w
            ends[c] = u, w
    us, ws = (None, None) if thin is None else (kept[..., 0].T, kept[..., 1].T)
    return RadialChains(ends[:, 0], ends[:, 1], exits, us, ws, n_steps)


# --- the compiled loop ----------------------------------------------------------------------------


class _Setting(NamedTuple):
    """What the steps of all chains share."""

    kind: int
    parameters: Floats
    dimension: int
    step: float
    stop: float  # squared radius
    thin: int


def _run(
    setting: _Setting,
    n_steps: int,
    u: float,
    w: float,
    rng: np.random.Generator,
    kept: Floats,
    bar: Any,
) -> tuple[float, float, int, int]:
    """One chain, slice by slice: its last state, the steps that it made and how it ended."""
    advance, done = _compiled(), 0
    ended = EXITED if u * u + w > setting.stop else RUNNING
    # A slice of a mixture's K coefficients takes K times as long.
    slice_ = max(1, SLICE // int(setting.parameters[0])) if setting.kind == MIXTURE else SLICE
    while ended == RUNNING and done < n_steps:
        before, end = done, min(done + slice_, n_steps)
        u, w, done, ended = advance(*setting, done, end, u, w, rng, kept)
        bar.update(done - before)
    bar.update(n_steps - done)  # what a stopped chain left out
    return u, w, done, ended


@functools.cache
def _compiled() -> Callable[..., tuple[float, float, int, int]]:
    """The loop in machine code, from numba's cache where there is one."""
    import numba  # half a second: not for whoever imports the package for something else

    number, count = numba.float64, numba.int64
    vector, matrix = number[::1], number[:, ::1]
    state = (count, count, number, number, numba.types.npy_rng, matrix)
    signature = (count, vector, count, number, number, count, *state)
    try:
        return numba.njit(signature, cache=True)(_advance)
    except Exception:  # no folder to write to, a full disk, a torn file: a cache is not needed
        return numba.njit(signature)(_advance)


def _advance(  # noqa: PLR0912
    kind: int,
    p: Floats,
    dimension: int,
    step: float,
    stop: float,
    thin: int,
    done: int,
    end: int,
    u: float,
    w: float,
    rng: np.random.Generator,
    kept: Floats,
) -> tuple[float, float, int, int]:
    """Steps ``done + 1 … end`` of one chain. Compiled by numba; as Python it does the same."""
    noise, shape = math.sqrt(2 * step), (dimension - 2) / 2
    left = thin - done % thin  # steps until the next state that is kept
    square, most, least = u * u + w, 0.0, 0.0
    if kind == TRAP:
        most, least = p[2] ** 2, p[3] ** 2
    for number in range(done + 1, end + 1):
        if kind == GAUSSIAN:  # m, variance
            pull, push = 1 / p[1], p[0] / p[1]
        elif kind == TRAP:  # m, α, r_in, r_out
            if square <= most:
                pull, push = p[1], 0.0
            elif square >= least:
                pull, push = 1.0, p[0]
            else:
                psi = (p[3] - math.sqrt(square)) / (p[3] - p[2])
                pull, push = 1 + psi * (p[1] - 1), (1 - psi) * p[0]
        else:  # K, log weights, positions, variances
            k, top = int(p[0]), -math.inf
            for i in range(1, k + 1):
                top = max(top, p[i] - ((u - p[k + i]) ** 2 + w) / (2 * p[2 * k + i]))
            total = pull = push = 0.0
            for i in range(1, k + 1):
                log_share = p[i] - ((u - p[k + i]) ** 2 + w) / (2 * p[2 * k + i])
                share = math.exp(log_share - top) / p[2 * k + i]
                total += share * p[2 * k + i]
                pull += share
                push += share * p[k + i]
            pull, push = pull / total, push / total
        u = (1 - step * pull) * u + step * push + noise * rng.standard_normal()
        if dimension > 1:
            w = ((1 - step * pull) * math.sqrt(w) + noise * rng.standard_normal()) ** 2
        if dimension > 2:
            w += 4 * step * rng.standard_gamma(shape)  # χ² is twice a gamma of half its degrees
        square = u * u + w
        if not square < HUGE:  # a NaN too
            return u, w, number, DIVERGED
        if square > stop:
            return u, w, number, EXITED
        left -= 1
        if left == 0:
            left = thin
            kept[number // thin - 1, 0], kept[number // thin - 1, 1] = u, w
    return u, w, end, RUNNING


# --- starts and streams ---------------------------------------------------------------------------


def _stream(seed: int, c: int) -> np.random.Generator:
    """Chain c's own."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(c,))))


def _gaussian_start(rng: np.random.Generator, dimension: int) -> tuple[float, float]:
    """(u, w) of a standard normal vector."""
    u = rng.standard_normal()
    return u, 2 * rng.standard_gamma((dimension - 1) / 2) if dimension > 1 else 0.0


def _starts(score: RadialScore, start: Any, n_chains: int | None) -> tuple[Floats | None, int]:
    """Starting (u, w), ``[C, 2]``, or None where each chain draws its own; and C."""
    wanted = None if n_chains is None else check_count("n_chains", n_chains, 1)
    if isinstance(start, str):
        if start != "gaussian":
            raise ValueError(f'start={start!r}: the only named start is "gaussian"')
        return None, wanted or 1
    reduced = isinstance(start, RadialStart) or _is_pair(start, score.dimension)
    u, w = _pair(start) if reduced else _projected(score, start)
    _check_size(u, w)
    if (w < 0).any() or (score.dimension == 1 and w.any()):
        raise ValueError(
            "start: w is the squared distance from the axis, at least 0, and 0 in one dimension; "
            f"it lies between {w.min()} and {w.max()}"
        )
    if u.ndim == 0:
        u, w = np.full(wanted or 1, u), np.full(wanted or 1, w)
    if not u.size or wanted not in (None, u.size):
        raise ValueError(f"start holds {u.size} chains, but n_chains={n_chains}: at least 1, equal")
    return np.stack([u, w], axis=1), u.size


def _is_pair(start: Any, dimension: int) -> bool:
    """Whether a plain tuple is ``(u, w)``; two rows of points look alike if C is d."""
    if type(start) is not tuple or len(start) != 2:
        return False
    shapes = [np.shape(part) for part in start]
    if shapes == [(dimension,)] * 2:
        raise ValueError(
            f"start: a tuple of two times {dimension} numbers may be u and w or two points: write "
            "RadialStart(u, w), or points as an array"
        )
    return max(map(len, shapes)) < 2


def _check_size(u: Floats, w: Floats) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        square = u * u + w
    if not (np.isfinite(u) & np.isfinite(w)).all():
        raise ValueError("start must be finite, but it holds a NaN or an infinity")
    if not (square < HUGE).all():
        raise ValueError(
            f"start must be finite and closer to the origin than {math.sqrt(HUGE):g}, where "
            "squared radii are still numbers"
        )


def _pair(start: tuple[ArrayLike, ArrayLike]) -> tuple[Floats, Floats]:
    """Both numbers as arrays of one shape, ``[C]`` or ``[]``."""
    try:
        u, w = np.broadcast_arrays(*(np.asarray(part, dtype=np.float64) for part in start))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"start: u and w must be numbers or [C] arrays of one C: {error}"
        ) from error
    if u.ndim > 1:
        raise ValueError(f"start: u and w must be numbers or [C] arrays, not of shape {u.shape}")
    return u, w


def _projected(score: RadialScore, points: Any) -> tuple[Floats, Floats]:
    """Points ``[C, d]`` in the reduced coordinates, ``[C]`` each."""
    x = _as_array(points)
    if x.ndim != 2 or x.shape[1] != score.dimension:
        raise ValueError(
            f'start must be RadialStart(u, w), "gaussian" or points [C, {score.dimension}], '
            f"not of shape {list(x.shape)}"
            + (": write start[None] for one chain" if x.shape == (score.dimension,) else "")
        )
    _check_size(x, np.zeros(1))
    y, axis = x - _as_array(score.origin), _as_array(score.axis)
    u = y @ axis
    across = y - u[:, None] * axis  # its own length: w = ‖y‖² − u² would cancel near the axis
    w = np.einsum("cd,cd->c", across, across) if score.dimension > 1 else np.zeros_like(u)
    return u, w


def _as_array(values: Any) -> Floats:
    if hasattr(values, "detach"):  # a tensor
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


# --- arguments and errors -------------------------------------------------------------------------


def _law(score: RadialScore) -> tuple[int, Floats]:
    law = getattr(score, "law", None)
    if law is None:
        raise TypeError(
            f"score must be radial about one axis (a mixture: centres on one line), and "
            f"{type(score).__name__} is not: run langevin on it"
        )
    if any(_is_overridden(score, name) for name in ("__call__", "coefficients")):
        raise TypeError(
            f"score: {type(score).__name__} overrides the score of a radial class, so its law may "
            "not be the one it has when called: run langevin on it"
        )
    return law.kind, np.array(law.parameters, dtype=np.float64)


def _is_overridden(score: Any, name: str) -> bool:
    """Whether a class that is not of this package, or the object itself, defines the method."""
    owner = next((cls for cls in type(score).__mro__ if name in vars(cls)), None)
    known = owner in (None, RadialScore, GaussianScore, TrapScore, MixtureScore)
    return not known or name in getattr(score, "__dict__", {})


def _divergence(score: RadialScore, step: float, chain: int, number: int) -> ArithmeticError:
    limit = 2 / score.lipschitz
    remedy = (
        f"the step {step:g} is too large for this score: take one below 2 / lipschitz = {limit:.3g}"
        if step >= limit > 0
        else "look for a NaN, an infinity or a huge number in the score's parameters, "
        f"{score.law.parameters}"
    )
    return DivergenceError(f"chain {chain} diverged at step {number}: {remedy}")


def _bar(total: int, shown: bool | None) -> Any:
    from tqdm import tqdm  # tqdm.auto would warn on stderr in a kernel without ipywidgets

    hidden = None if shown is None else not shown
    return tqdm(total=total, desc="chain steps", unit="step", unit_scale=True, disable=hidden)
