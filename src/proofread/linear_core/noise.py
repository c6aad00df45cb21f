"""Instance-dependent label noise: flips that depend on the picture, not on its class alone.

The process of Xia et al., *Part-dependent Label Noise* (NeurIPS 2020), from its
mathematics. For a target rate ρ, features ``x`` in R^d and K classes:

1. each sample draws a flip rate ``q_i`` from a normal law of mean ρ and deviation 0.1, truncated
   to [0, 1];
2. each class ``y`` draws a projection ``W_y`` in R^{d×K} of independent standard normals;
3. a flip of sample ``i`` goes to class ``j ≠ y_i`` with probability
   ``softmax_{j≠y_i}(x_i·W_{y_i})_j``; so ``P(ỹ = j) = q_i·softmax_j`` and ``P(ỹ = y_i) = 1 - q_i``.

Pictures that look alike flip to the same wrong class: a structure a network can learn.
"""

from __future__ import annotations

import numpy as np

SPREAD = 0.1  # standard deviation of the samples' flip rates


def instance_dependent_noise(
    x: np.ndarray, y: np.ndarray, rate: float, n_classes: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Corrupt labels with instance-dependent noise.

    Args:
        x: ``[n, ...]`` features, flattened to ``[n, d]``. Their scale matters: the larger they are,
            the closer a sample's flips come to a single wrong class. Standardised features
            (mean 0, deviation 1) are the usual choice.
        y: ``[n]`` clean labels, integers in [0, n_classes).
        rate: target rate ρ in [0, 1]. At 0 nothing is flipped; elsewhere the mean flip rate is the
            truncated normal's, above ρ by less than 0.006 for ρ ≥ 0.2.
        n_classes: K ≥ 2.
        seed: seed of this call's own generator; equal arguments give equal labels.

    Returns:
        ``(noisy, probabilities)``: ``[n]`` int64 labels, and the ``[n, K]`` float64 transition
        probabilities they were drawn from. The chance that sample ``i`` flips is
        ``1 - probabilities[i, y[i]]``.

    Raises:
        ValueError: shapes that differ, labels or rate out of range, features not finite.
        TypeError: labels that are not integers.
    """
    features, labels = _checked(x, y, rate, n_classes)
    rng = np.random.default_rng(seed)
    flip = _flip_rates(rng, len(labels), rate)
    probabilities = _wrong_class_probabilities(rng, features, labels, n_classes)
    probabilities *= flip[:, None]
    probabilities[np.arange(len(labels)), labels] = 1 - flip
    return _draw(rng, probabilities, labels), probabilities


def _checked(
    x: np.ndarray, y: np.ndarray, rate: float, n_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    labels = np.asarray(y)
    if labels.ndim != 1 or len(x) != len(labels):
        raise ValueError(f"y must be [n] with n = len(x) = {len(x)}, got shape {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"y must hold integer labels, got {labels.dtype}")
    if n_classes < 2:
        raise ValueError(f"n_classes must be at least 2, got {n_classes}")
    if len(labels) and not (labels.min() >= 0 and labels.max() < n_classes):
        raise ValueError(f"y must lie in [0, {n_classes}), got {labels.min()} to {labels.max()}")
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie in [0, 1], got {rate}")
    features = np.asarray(x, dtype=np.float64)
    features = features.reshape(len(labels), -1) if len(labels) else np.zeros((0, 1))
    if not np.isfinite(features).all():
        raise ValueError("x must be finite")
    return features, labels.astype(np.int64)


def _flip_rates(rng: np.random.Generator, n: int, rate: float) -> np.ndarray:
    """``[n]`` draws of a normal(rate, 0.1) truncated to [0, 1]; zeros at rate 0."""
    from scipy.stats import truncnorm

    if rate == 0:
        return np.zeros(n)
    low, high = (0 - rate) / SPREAD, (1 - rate) / SPREAD
    return truncnorm.rvs(low, high, loc=rate, scale=SPREAD, size=n, random_state=rng)


def _wrong_class_probabilities(
    rng: np.random.Generator, features: np.ndarray, labels: np.ndarray, n_classes: int
) -> np.ndarray:
    """``[n, K]`` softmax of ``x·W_y`` over the classes other than ``y``; 0 at ``y``."""
    scores = np.empty((len(labels), n_classes))
    for label in range(n_classes):  # every class draws, also an absent one: seeds stay comparable
        projection = rng.standard_normal((features.shape[1], n_classes))  # [d, K]
        members = labels == label
        scores[members] = features[members] @ projection
    scores[np.arange(len(labels)), labels] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _draw(rng: np.random.Generator, probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """One class a row, by inverting the cumulative sums; the own class comes first.

    With the own class first, a row that never flips keeps its label whatever the rounding.
    """
    n, k = probabilities.shape
    order = (labels[:, None] + np.arange(k)) % k  # [n, K], own class first
    steps = np.cumsum(np.take_along_axis(probabilities, order, axis=1), axis=1)
    drawn = (rng.random((n, 1)) >= steps[:, :-1]).sum(axis=1)
    return np.take_along_axis(order, drawn[:, None], axis=1)[:, 0]
