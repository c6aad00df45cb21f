"""Gradient descent on surrogate risks whose every gap is known in closed form.

The problem is tabular: finitely many points ``x_i`` with masses ``π_i`` and label probabilities
``η_i``, and one free score ``h_i`` a point, which is the complete hypothesis set of the theory. The
risk is ``R(h) = Σ_i π_i·C_{η_i}(h_i)`` and its minimum ``Σ_i π_i·(C_{η_i}(0) - 𝒯(|2η_i - 1|))``, so
no solver stands between a curve and the truth.

Masses that halve from point to point make the textbook rate visible: after T steps about the first
log₂ T points are fitted and the others, of mass about 1/T, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

from ..stats import Estimate, fit_exponent, mean_interval
from .certificates import Surrogate
from .surrogates import LinearCore

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TabularProblem:
    """S random problems on the same d points.

    Attributes:
        masses: ``[d]`` probabilities of the points.
        eta: ``[S, d]`` probability of the label +1 at each point.

    Raises:
        ValueError: masses that are negative or do not sum to 1, an η outside (0, 1).
    """

    masses: Floats
    eta: Floats

    def __post_init__(self) -> None:
        for name in ("masses", "eta"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        sums_to_one = self.masses.ndim == 1 and abs(self.masses.sum() - 1) <= 1e-9
        if not (sums_to_one and (self.masses > 0).all()):
            raise ValueError("masses must be one row [d], positive, and sum to 1")
        if self.eta.ndim != 2 or self.eta.shape[1] != len(self.masses):
            raise ValueError(f"eta must be [S, d] with d = {len(self.masses)}")
        if not ((self.eta > 0) & (self.eta < 1)).all():
            raise ValueError("eta must lie strictly between 0 and 1: else no best score is finite")

    @classmethod
    def halving(cls, n_points: int, seeds: Sequence[int]) -> TabularProblem:
        """Masses proportional to ``2^(-i)``, and for each seed η uniform on (0, 1).

        Raises:
            ValueError: ``n_points`` below 1 or above 500 (``2^(-i)`` would underflow), or no seed.
        """
        if not 1 <= n_points <= 500:
            raise ValueError(f"n_points={n_points} must lie between 1 and 500")
        if not len(seeds):
            raise ValueError("seeds must hold at least one seed")
        masses = 0.5 ** np.arange(n_points)
        eta = [np.random.default_rng(seed).uniform(1e-6, 1 - 1e-6, n_points) for seed in seeds]
        return cls(masses / masses.sum(), np.array(eta))

    def gap(self, surrogate: Surrogate, scores: Floats) -> Floats:
        """``R(h) - R*`` of scores ``[S, d]``: ``[S]``, summed point by point."""
        risk = self.eta * surrogate(scores) + (1 - self.eta) * surrogate(-scores)
        best = float(surrogate(0.0)) - np.asarray(surrogate.calibration(np.abs(2 * self.eta - 1)))
        return np.asarray((risk - best) @ self.masses)

    def gradient(self, surrogate: Surrogate, scores: Floats) -> Floats:
        """``[S, d]``; at a kink the right derivative of Φ, a subgradient."""
        pull = self.eta * surrogate.derivative(scores)
        return self.masses * (pull - (1 - self.eta) * surrogate.derivative(-scores))

    def smoothness(self, surrogate: Surrogate) -> float:
        """Lipschitz constant of the risk's gradient: the largest mass times that of Φ′."""
        return float(self.masses.max() * surrogate.smoothness)

    def distance(self, surrogate: Surrogate) -> Floats:
        """``‖h*‖²`` of the best scores, ``[S]``: log-odds for the logistic loss, ``τ + s·log-odds``
        with the sign of the better label for the exponential Linear-Core loss.

        Raises:
            ValueError: another surrogate.
        """
        odds = np.abs(logit(self.eta))
        if isinstance(surrogate, LinearCore) and surrogate.tail == "exponential":
            odds = surrogate.core + surrogate.scale * odds
        elif getattr(surrogate, "name", "") != "logistic":
            raise ValueError("the best scores are known for the logistic and exponential-tail loss")
        return np.asarray((odds**2).sum(1))


def descend(
    problem: TabularProblem,
    surrogate: Surrogate,
    n_steps: int,
    step: float | Callable[[int], float],
) -> Floats:
    """Gaps ``R(h_T) - R*`` for T = 0 … n_steps of gradient descent from zero: ``[S, n_steps + 1]``.

    Args:
        problem: the S problems, descended side by side.
        surrogate: its ``derivative`` is the gradient, or at a kink a subgradient.
        n_steps: steps, at least 1.
        step: the step size, or a function of the step's number 0, 1, ….

    Raises:
        ValueError: ``n_steps`` below 1, or a step size that is not finite and positive.
    """
    if n_steps < 1:
        raise ValueError(f"n_steps={n_steps} must be at least 1")
    sizes = np.array([step(k) if callable(step) else step for k in range(n_steps)])
    if not (np.isfinite(sizes) & (sizes > 0)).all():
        raise ValueError("step must be finite and positive (the hinge has no 1/smoothness)")
    scores = np.zeros_like(problem.eta)
    gaps = [problem.gap(surrogate, scores)]
    for size in sizes:
        scores -= size * problem.gradient(surrogate, scores)
        gaps.append(problem.gap(surrogate, scores))
    return np.stack(gaps, axis=1)


def rate(gaps: Floats, first: int = 10, points: int = 25) -> Estimate:
    """Exponent p of ``gap ~ T^(-p)`` from step ``first`` to the last, mean over the S problems.

    Args:
        gaps: ``[S, n_steps + 1]`` of ``descend``, S ≥ 2.
        first: first step of the fit, at least 1.
        points: steps of the fit, evenly spread in log T.

    Returns:
        Mean of the S fitted exponents with its 95 % interval.
    """
    last = gaps.shape[1] - 1
    if not 1 <= first < last:
        raise ValueError(f"first={first} must lie between 1 and the last step, {last}")
    steps = np.unique(np.geomspace(first, last, points).round().astype(int))
    return mean_interval([-fit_exponent(steps, row[steps]).value for row in gaps])


def bound_ratio(problem: TabularProblem, surrogate: Surrogate, gaps: Floats) -> float:
    """Largest ``gap·2T/(L·‖h*‖²)`` over T ≥ 1 and the problems: at most 1 by the theorem.

    For a convex risk whose gradient has Lipschitz constant L, gradient descent with step 1/L from 0
    has ``R(h_T) - R* ≤ L·‖h*‖²/(2T)`` (Nesterov, *Lectures on Convex Optimization*, section 2.1.5,
    with the constant of Beck and Teboulle 2009, theorem 3.1).
    """
    steps = np.arange(1, gaps.shape[1])
    scale = problem.smoothness(surrogate) * problem.distance(surrogate)[:, None]
    return float((gaps[:, 1:] * 2 * steps / scale).max())


@dataclass(frozen=True)
class Descent:
    """One way of descending, over several sizes.

    Attributes:
        gaps: by number of points, ``[S, n_steps + 1]``.
        rates: by number of points, the fitted exponent over the seeds.
        bound: by number of points, ``bound_ratio``; empty where no bound is claimed.
    """

    gaps: Mapping[int, Floats]
    rates: Mapping[int, Estimate]
    bound: Mapping[int, float]


def compare_descents(
    smooth: Mapping[str, Surrogate],
    hinge: Surrogate,
    *,
    sizes: Sequence[int],
    seeds: Sequence[int],
    n_steps: int,
) -> dict[str, Descent]:
    """Gradient descent on smooth losses, and on the hinge by subgradients.

    The smooth losses take the step 1/L of their theorem. The hinge has none; it gets the constant
    step of the first smooth loss, and that step divided by √T, the textbook's choice for it.

    Returns:
        One ``Descent`` for each smooth loss, then ``"hinge, constant step"`` and
        ``"hinge, step ∝ 1/√T"``.

    Raises:
        ValueError: no smooth loss, a loss without finite smoothness, or bad sizes, seeds or steps.
    """
    if not smooth or not all(np.isfinite(s.smoothness) for s in smooth.values()):
        raise ValueError("smooth must hold at least one loss, each with a finite smoothness")
    problems = {size: TabularProblem.halving(size, seeds) for size in sizes}
    found = {name: _descents(problems, loss, n_steps) for name, loss in smooth.items()}
    first = next(iter(smooth.values()))
    for name, power in (("hinge, constant step", 0.0), ("hinge, step ∝ 1/√T", 0.5)):
        gaps = {
            size: descend(problem, hinge, n_steps, _schedule(1 / problem.smoothness(first), power))
            for size, problem in problems.items()
        }
        found[name] = Descent(gaps, {size: rate(g) for size, g in gaps.items()}, {})
    return found


def _descents(
    problems: Mapping[int, TabularProblem], surrogate: Surrogate, n_steps: int
) -> Descent:
    gaps = {
        size: descend(problem, surrogate, n_steps, 1 / problem.smoothness(surrogate))
        for size, problem in problems.items()
    }
    bound = {size: bound_ratio(problems[size], surrogate, g) for size, g in gaps.items()}
    return Descent(gaps, {size: rate(g) for size, g in gaps.items()}, bound)


def _schedule(first: float, power: float) -> Callable[[int], float]:
    return lambda k: first / (k + 1) ** power


def slowest(descents: Sequence[Descent]) -> Estimate:
    """The smallest fitted exponent over losses and sizes, with its interval."""
    return min((r for d in descents for r in d.rates.values()), key=lambda r: r.value)


def fastest(descent: Descent) -> Estimate:
    """The largest fitted exponent over sizes, with its interval."""
    return max(descent.rates.values(), key=lambda r: r.value)
