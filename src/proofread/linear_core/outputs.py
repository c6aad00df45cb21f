"""The linear bound for any finite set of outputs and any target loss, and what loses it.

``n`` outputs (classes, or whole sequences) with conditional law ``p`` and a target loss
``L[k, y] ≥ 0`` of predicting ``k`` when ``y`` is right. Predicting ``k`` costs
``q_k = Σ_y p_y·L[k, y]`` on average. The constrained form has the risk ``Σ_k q_k·Φ(-h̃_k)``, the
sum form ``Σ_{y,k} p_y·L[k, y]·Φ(h_y - h_k)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .multiclass import _classes, _law, _one_sided, _optimum_of_costs, _pool, verify_swap_inequality
from .surrogates import TAILS, LinearCore

Floats = NDArray[np.float64]


def certified_exchange() -> float:
    """The certified least ratio (surrogate regret)/(τ·target regret) of the constrained form: 1.

    For a prediction ``k`` (so ``h̃_k ≥ 0``) and a best output ``m``, lowering ``h̃_k`` by τ and
    raising ``h̃_m`` by τ keeps the sum at zero and lowers the risk by at least ``τ·(q_k - q_m)``:
    ``verify_swap_inequality`` verifies both steps, for symbolic τ and s. Nothing in them depends on
    the number of outputs, on ``q`` or on the other scores.

    Raises:
        ArithmeticError: a tail for which a step could not be verified.
    """
    for tail in TAILS:
        verify_swap_inequality(tail)
    return 1.0


def hamming_losses(length: int, n_tags: int) -> Floats:
    """``L[k, y]`` = number of positions in which sequences k and y differ: ``[n, n]``, n = K^T.

    Sequences in the order of ``structured.enumerate_sequences``: the last position runs fastest.

    Raises:
        ValueError: a length below 1, fewer than 2 tags, or more than 4096 sequences.
    """
    if length < 1 or n_tags < 2 or n_tags**length > 4096:
        raise ValueError(
            f"need length ≥ 1, n_tags ≥ 2 and at most 4096 sequences, got {n_tags}^{length}"
        )
    sequences = np.stack(np.unravel_index(np.arange(n_tags**length), (n_tags,) * length), 1)
    return np.asarray((sequences[:, None] != sequences).sum(2), dtype=np.float64)


def disfavoured_tag(length: int, n_tags: int, epsilon: float = 1e-3) -> Floats:
    """A law on sequences: uniform, but at the first position tag 0 has probability ``1/K - ε``.

    All sequences that start with tag 0 are equally bad and all others equally good, so the costs
    are as nearly tied as a Hamming loss allows: ``[n]``, n = K^T.

    Raises:
        ValueError: ``epsilon`` outside (0, 1/K), or sizes that ``hamming_losses`` refuses.
    """
    n = len(hamming_losses(length, n_tags))
    if not 0 < epsilon < 1 / n_tags:
        raise ValueError(f"epsilon={epsilon} must lie in (0, 1/K)")
    first = np.full(n_tags, 1 / n_tags + epsilon / (n_tags - 1))
    first[0] = 1 / n_tags - epsilon
    return np.repeat(first, n // n_tags) * (n_tags / n)


def _costs(p: ArrayLike, losses: ArrayLike) -> tuple[Floats, Floats, Floats]:
    law, matrix = _law(p), np.asarray(losses, dtype=np.float64)
    n = law.shape[-1]
    if matrix.shape != (n, n) or not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError(f"losses must be a finite non-negative [{n}, {n}]: one row an output")
    return law, matrix, law @ matrix.T


def constrained_ratio(
    p: ArrayLike, losses: ArrayLike, predicted: ArrayLike, surrogate: LinearCore
) -> Floats:
    """Exact least (surrogate regret)/(τ·target regret) over all scores that predict an output.

    Args:
        p: laws ``[..., n]``.
        losses: ``[n, n]``.
        predicted: the output, one or ``[...]``; with a positive target regret.
        surrogate: a one-sided ``LinearCore``.

    Returns:
        ``[...]``; at least 1 by the theorem. Divided by n it is the ratio of the averaged loss.

    Raises:
        ValueError: bad shapes, or an output without regret (nothing to divide by).
    """
    _, _, q = _costs(p, losses)
    k = np.broadcast_to(_classes(predicted), q.shape[:-1])[..., None]
    if not ((k >= 0) & (k < q.shape[-1])).all():
        raise IndexError(f"predicted must lie in 0 … {q.shape[-1] - 1}")
    regret = (np.take_along_axis(q, k, -1) - q.min(-1, keepdims=True))[..., 0]
    if not (regret > 0).all():
        raise ValueError("predicted must have a positive target regret at every law")
    phi = _one_sided(surrogate)
    cost = _optimum_of_costs(_pool(q, k[..., 0]), phi) - _optimum_of_costs(q, phi)
    return np.asarray(cost / (phi.core * regret))


def attack_outputs(
    surrogate: LinearCore, losses: ArrayLike, trials: int = 2000, seed: int = 0
) -> float:
    """The least ratio of ``constrained_ratio`` that a search over laws and wrong outputs finds.

    Half of the random laws are spread over the simplex, half are close to uniform, where the costs
    are nearly tied and the bound is tightest; Nelder-Mead goes on from the worst of those.

    Raises:
        ValueError: fewer than 2 trials, or bad losses.
    """
    from scipy.optimize import minimize

    if trials < 2:
        raise ValueError(f"trials={trials} must be at least 2")
    matrix = np.asarray(losses, dtype=np.float64)
    generator = np.random.default_rng(seed)
    spread, z = generator.dirichlet(np.ones(len(matrix)), (2, trials // 2))
    k = generator.integers(len(matrix), size=trials // 2)
    wide = _ratios(spread, matrix, k, surrogate)
    near = _ratios(_near_uniform(z), matrix, k, surrogate)
    worst = int(near.argmin())

    def ratio(direction: Floats) -> float:
        return float(_ratios(_near_uniform(direction)[None], matrix, k[worst, None], surrogate)[0])

    refined = minimize(ratio, z[worst], method="Nelder-Mead", options={"maxfev": 200 * len(matrix)})
    return float(min(wide.min(), near.min(), refined.fun))


def _near_uniform(direction: Floats) -> Floats:
    """The law ``∝ 1 + 10⁻³·z/max|z|`` for z of ``[..., n]``."""
    p = 1 + 1e-3 * direction / np.abs(direction).max(-1, keepdims=True)
    return np.asarray(p / p.sum(-1, keepdims=True))


def _ratios(p: Floats, matrix: Floats, k: NDArray[np.intp], surrogate: LinearCore) -> Floats:
    """``constrained_ratio``, with ∞ where the regret is below 1e-9 and leaves no digits."""
    _, _, q = _costs(p, matrix)
    wrong = np.take_along_axis(q, k[:, None], -1)[:, 0] - q.min(-1) > 1e-9
    found = np.full(len(k), np.inf)
    found[wrong] = constrained_ratio(p[wrong], matrix, k[wrong], surrogate)
    return found


def sum_form_ratio(p: ArrayLike, losses: ArrayLike, predicted: int, surrogate: LinearCore) -> float:
    """Least (surrogate regret)/(τ·target regret) of the sum form at one law, numerically.

    Both minima by L-BFGS-B in the differences ``h_top - h_j``, the box ``≥ 0`` for the constraint.

    Args:
        p: one law ``[n]`` without zeros.
        losses: ``[n, n]``.
        predicted: the output that must score highest.
        surrogate: a ``LinearCore``.

    Raises:
        ValueError: bad shapes, a zero probability, or an output without regret.
        IndexError: ``predicted`` outside 0 … n-1.
        ArithmeticError: a minimum was not found.
    """
    law, matrix, q = _costs(p, losses)
    if law.ndim != 1 or law.min() <= 0:
        raise ValueError("p must be one law [n] without zeros")
    if not 0 <= predicted < len(law):
        raise IndexError(f"predicted must lie in 0 … {len(law) - 1}, got {predicted}")
    regret = q[predicted] - q.min()
    if regret <= 0:
        raise ValueError(f"output {predicted} has no target regret at this law")
    weight = law[:, None] * matrix.T  # [y, k]
    free = _least_sum_risk(weight, int(q.argmin()), -np.inf, surrogate)
    tied = _least_sum_risk(weight, predicted, 0.0, surrogate)
    return float((tied - free) / (surrogate.core * regret))


def _least_sum_risk(weight: Floats, top: int, low: float, surrogate: LinearCore) -> float:
    from scipy.optimize import minimize

    def risk(d: Floats) -> tuple[float, Any]:
        h = np.insert(-d, top, 0.0)
        margins = h[:, None] - h  # [y, k]
        slopes = weight * surrogate.derivative(margins)
        slope = slopes.sum(1) - slopes.sum(0)
        return float((weight * surrogate(margins)).sum()), -np.delete(slope, top)

    start = np.ones(len(weight) - 1)
    options = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 10_000, "maxfun": 100_000}
    found = minimize(
        risk, start, jac=True, method="L-BFGS-B", options=options,
        bounds=[(None if low == -np.inf else low, None)] * len(start),
    )  # fmt: skip
    slope = np.asarray(risk(found.x)[1])
    inside = slope[(found.x > low) | (slope < 0)]
    if np.abs(inside).max(initial=0) > 1e-6:
        raise ArithmeticError(f"the sum form's risk was not minimised: {found.message}")
    return float(found.fun)
