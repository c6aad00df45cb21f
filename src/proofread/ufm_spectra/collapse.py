"""How far features and classifier are from neural collapse: the standard measures NC1 to NC4.

Definitions follow Papyan, Han and Donoho, *Prevalence of neural collapse during the terminal phase
of deep learning training* (PNAS 117, 2020). Without a bias and under squared error the means that
collapse are the class means themselves, not their distances from the global mean, and they become
orthogonal instead of forming a simplex: ``centre=False`` measures that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .directions import class_means


@dataclass(frozen=True)
class CollapseMetrics:
    """Distances from neural collapse; every one of them is 0 at collapse.

    Below, M holds the K class means ``μ_c``, less the global mean when ``centred``.

    Attributes:
        n_classes: K.
        centred: whether the global mean was taken off.
        nc1: ``tr(Σ_W Σ_B⁺) / K``, variability within the classes against that between them; ∞
            when there is variability and all means coincide.
        nc1_ratio: ``tr Σ_W / tr Σ_B``.
        nc2_norms: coefficient of variation of the norms of M's means.
        nc2_angles: mean over pairs of classes of ``|cos + 1/(K − 1)|``, or of ``|cos|`` uncentred.
        nc2_angles_std: standard deviation of the cosines over pairs.
        nc2_orthogonal: ``‖G/‖G‖_F − I/√K‖_F`` for the Gram matrix G of the uncentred means,
            whatever ``centred`` says: the distance from an orthogonal frame of equal norms.
        nc3: ``‖W/‖W‖_F − M/‖M‖_F‖_F``, self-duality; None without weights.
        nc4: share of samples whose nearest class mean is not the class that the classifier gives
            them; None without weights and outputs.
    """

    n_classes: int
    centred: bool
    nc1: float
    nc1_ratio: float
    nc2_norms: float
    nc2_angles: float
    nc2_angles_std: float
    nc2_orthogonal: float
    nc3: float | None
    nc4: float | None


def collapse_metrics(
    features: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    outputs: Tensor | None = None,
    centre: bool = True,
) -> CollapseMetrics:
    """NC1 to NC4 of one layer's features; computed in float64.

    ``Σ_W`` is the mean over samples of ``(h − μ_c)(h − μ_c)ᵀ``, ``Σ_B`` the mean over classes of
    ``(μ_c − μ)(μ_c − μ)ᵀ`` with μ the mean of the class means (0 if not ``centre``); for balanced
    classes these are the covariances of Papyan, Han and Donoho. A pseudo-inverse cuts singular
    values below rounding.

    Args:
        features: ``[N, d]``; trailing axes are flattened.
        targets: ``[N]`` integer classes; every class of ``0 … K − 1`` must occur.
        weights: ``[K, d]``, the classifier on these features, for NC3 and NC4. Its bias, if there
            is one, is known through ``outputs``.
        outputs: ``[N, K]``, what the network says; default ``features @ weights.T``.
        centre: take off the global mean.

    Raises:
        ValueError: shapes that do not fit, a class without samples, fewer than two classes, a
            value that is not finite, targets that are not integers.
    """
    _check_shapes(features, targets)
    features, targets = _finite("features", features).flatten(1), targets.long()
    k = _checked_classes(features, targets, weights, outputs)
    raw_means = class_means(features, targets, k)  # [K, d]
    means = raw_means - raw_means.mean(0) if centre else raw_means
    within = features - raw_means[targets]  # [N, d]
    if weights is not None:
        weights = _finite("weights", weights)
        outputs = features @ weights.T if outputs is None else outputs
    cosines = _pair_cosines(means)
    return CollapseMetrics(
        n_classes=k,
        centred=centre,
        nc1=_within_over_between(within, means),
        nc1_ratio=_ratio(within.square().sum() / len(within), means.square().sum() / k),
        nc2_norms=_variation(means.norm(dim=1)),
        nc2_angles=float((cosines + (1 / (k - 1) if centre else 0)).abs().mean()),
        nc2_angles_std=float(cosines.std(unbiased=False)),
        nc2_orthogonal=_frame_distance(raw_means),
        nc3=None if weights is None else float((_scaled(weights) - _scaled(means)).norm()),
        nc4=None if outputs is None else _disagreement(features, raw_means, outputs),
    )


def _within_over_between(within: Tensor, means: Tensor) -> float:
    """``tr(Σ_W Σ_B⁺)/K``: with ``M = U S Vᵀ`` it is ``Σ_j mean_i (g_i · v_j)² / s_j²``."""
    _, s, directions = torch.linalg.svd(means, full_matrices=False)  # s: of √K times Σ_B's root
    kept = s > max(means.shape) * torch.finfo(s.dtype).eps * s[0]
    if not kept.any():
        return math.inf if within.any() else 0.0
    variances = (within @ directions[kept].T).square().mean(0)
    return float((variances / s[kept].square()).sum())


def _ratio(above: Tensor, below: Tensor) -> float:
    if below == 0:
        return math.inf if above > 0 else 0.0
    return float(above / below)


def _variation(norms: Tensor) -> float:
    """Standard deviation over mean, 0 for norms that are all 0."""
    return _ratio(norms.std(unbiased=False), norms.mean())


def _pair_cosines(means: Tensor) -> Tensor:
    """Cosines of all pairs of rows: ``[K(K − 1)/2]``; 0 where a mean is 0."""
    unit = torch.nn.functional.normalize(means, dim=1)
    row, column = torch.triu_indices(len(means), len(means), 1)
    return (unit @ unit.T)[row, column]


def _frame_distance(means: Tensor) -> float:
    gram = means @ means.T
    return float((_scaled(gram) - _scaled(torch.eye(len(gram), dtype=gram.dtype))).norm())


def _scaled(matrix: Tensor) -> Tensor:
    """To Frobenius norm 1; a zero matrix stays zero."""
    norm = matrix.norm()
    return matrix / norm if norm > 0 else matrix


def _disagreement(features: Tensor, means: Tensor, outputs: Tensor) -> float:
    nearest = torch.cdist(features, means).argmin(1)
    return float((nearest != outputs.argmax(1)).double().mean())


# --- checks -------------------------------------------------------------------------------------


def _finite(name: str, values: Tensor) -> Tensor:
    if not values.isfinite().all():
        raise ValueError(f"{name} holds a NaN or an infinite value: did the training diverge?")
    return values.detach().double()


def _check_shapes(features: Tensor, targets: Tensor) -> None:
    if features.ndim < 2 or not len(features):
        raise ValueError(f"features must be [N, d] with N ≥ 1, got {list(features.shape)}")
    if targets.shape != features.shape[:1]:
        n = len(features)
        raise ValueError(f"targets must be [N] = [{n}] classes, got {list(targets.shape)}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be integer classes, got {targets.dtype}")


def _checked_classes(
    features: Tensor, targets: Tensor, weights: Tensor | None, outputs: Tensor | None
) -> int:
    """K, from the weights or the outputs where there are any, else the largest target plus 1."""
    k = int(targets.max()) + 1
    if weights is not None:
        k = len(weights)
        if weights.shape != (k, features.shape[1]):
            shape = list(weights.shape)
            raise ValueError(f"weights must be [K, d] with d = {features.shape[1]}, got {shape}")
    if outputs is not None:
        k = outputs.shape[-1] if weights is None else k
        if outputs.shape != (len(features), k):
            raise ValueError(f"outputs must be [{len(features)}, {k}], got {list(outputs.shape)}")
        _finite("outputs", outputs)
    if k < 2:
        raise ValueError("collapse needs at least two classes, got K = 1")
    if targets.min() < 0 or targets.max() >= k:
        raise ValueError(f"targets must lie in 0 … {k - 1}, as many classes as the classifier has")
    missing = (torch.bincount(targets, minlength=k) == 0).nonzero()[:, 0].tolist()
    if missing:
        raise ValueError(f"classes {missing} have no samples: relabel to 0 … K − 1 or add samples")
    return k
