r"""The collapsed point of the ReLU model, which sits on the kink, and its one-sided Hessians.

Put a ReLU on the features and after every layer but the last of the deep unconstrained feature
model with squared error. **The collapsed point** gives every class units of its own in every
hidden layer: orthogonal class means that are not negative have disjoint supports. All features
and weights are non-negative, no ReLU changes anything, and the objective is that of the linear
model's optimum.

**Off class, pre-activations are exactly 0.** The row of a unit that is open for class c' only is a
multiple of :math:`\mu_{c'}^{(l)}` (stationarity with decay), which is orthogonal to every other
mean.

**The objective has a gradient there, which is 0, and no Hessian.** The residual of a sample of
class c is :math:`-(1 - \gamma) e_c`, and no path of non-zero weights leads from a unit of another
class to output c. So a unit at the kink enters the loss through a product of two small changes at
least: into the unit and out of it, or into it and squared. The first-order change is that of the
linear model, 0. At second order the unit's derivative, 0 or 1, matters.

**One layer.** Let each class have one unit, and let :math:`x_{c'c}` be the coordinate of a change
of :math:`W_l`, l < L, along the unit vector
:math:`\hat\mu_{c'}^{(l+1)} \otimes \hat\mu_c^{(l)}`. All later weights are non-negative, so output
c' of class c changes in proportion to :math:`\max(x_{c'c}, 0)` for c' ≠ c, and the data term is,
up to its gradient and terms of third order,

.. math:: \frac{o_l}2\Bigl(\sum_c x_{cc}^2 + \sum_{c' \ne c} \max(x_{c'c}, 0)^2\Bigr).

Each of the :math:`2^{K(K-1)}` orthants has its own Hessian, of rank K (all closed, PyTorch's
derivative 0 at 0) to K² (all open, the linear model), and every rank between occurs. With several
units a class, let :math:`q_m` be the share of :math:`\|\mu_{c'}^{(m)}\|^2` on units of layer m − 1
that are open for class c: the pair's eigenvalue is :math:`o_l q_{l+1} q_{l+2}^2 \cdots q_L^2`,
anything from 0 to :math:`o_l`. After the last layer there is no ReLU: rank K².

**Deep, it is not the global optimum.** For K = 3 and L = 4 and 5 gradient descent also ends at
points of rank 2 in the middle layers with a lower objective; the tests hold one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .optimum import CollapsedOptimum

__all__ = [
    "KinkStatistics",
    "kink_statistics",
    "one_sided_hessian",
    "one_sided_rank",
    "relu_collapse",
]

OpenUnits = Literal["closed", "open"] | Tensor


def relu_collapse(
    optimum: CollapsedOptimum, copies: int | Sequence[int] = 1
) -> tuple[list[Tensor], Tensor]:
    """Weights and features of the aligned, non-negative collapsed point of the ReLU model.

    Args:
        optimum: of the linear model, squared error, d ≥ K.
        copies: units that each class has to itself, in features and hidden layers, or one number
            for each of these L stages. Remaining units are dead: their weights are 0.

    Returns:
        Weights ``[out, in]``, the first layer's first, and features ``[d, N]``, float64. The
        objective is the same for all ``copies``.

    Raises:
        ValueError: d < K · copies, copies below 1 or of a wrong number, or a cross-entropy optimum
            (its class means are centred, hence not orthogonal, and rotate out of the orthant).
    """
    if optimum.loss != "mse":
        raise ValueError("optimum must be that of squared error: centred means are not orthogonal")
    weights, features = optimum.weights(), optimum.features()
    k, width = optimum.n_classes, len(features)
    supports = [_support(k, width, c) for c in _copies(copies, len(weights))]
    supports.append(torch.eye(k, dtype=features.dtype))
    # Every factor has K equal singular values, so its norm gives them.
    scales = [float(weight.norm()) / k**0.5 for weight in weights]
    placed = [
        scale * after @ before.T
        for scale, before, after in zip(scales, supports, supports[1:], strict=False)
    ]
    means = supports[0] * (features.norm() / features.shape[1] ** 0.5)  # h/√n for each class
    return placed, means.repeat_interleave(features.shape[1] // k, dim=1)


def _copies(copies: int | Sequence[int], depth: int) -> tuple[int, ...]:
    found = (copies,) * depth if isinstance(copies, int) else tuple(copies)
    if len(found) != depth or min(found) < 1:
        raise ValueError(f"copies must be one number or depth={depth}, at least 1, got {copies}")
    return found


def _support(n_classes: int, width: int, copies: int) -> Tensor:
    """Orthonormal, non-negative columns ``[d, K]`` with disjoint supports of equal entries."""
    if n_classes * copies > width:
        raise ValueError(
            f"width={width} is too small for {n_classes} classes with {copies} units of their own"
        )
    columns = torch.zeros(width, n_classes, dtype=torch.float64)
    block = torch.eye(n_classes, dtype=torch.float64).repeat_interleave(copies, 0)
    columns[: n_classes * copies] = block / copies**0.5
    return columns


def one_sided_hessian(
    optimum: CollapsedOptimum,
    layer: int,
    open_units: OpenUnits = "closed",
    *,
    copies: int | Sequence[int] = 1,
) -> Tensor:
    """Hessian of the data term in ``W_layer`` on one side of the kinks of the collapsed point.

    Once each unit at the kink is declared open or closed for each class, the outputs of class c are
    ``B_c W_l μ_c`` and the Hessian is ``(1/K) Σ_c B_cᵀ B_c ⊗ μ_c μ_cᵀ``.

    Args:
        optimum: as for ``relu_collapse``.
        layer: l, 1 … L.
        open_units: how units at the kink count: all ``"closed"`` (what automatic differentiation
            in PyTorch gives), all ``"open"``, or bool ``[L − 1, d, K]``, true where unit u of the
            output of layer l is open for class c; units off the kink are not asked.
        copies: as for ``relu_collapse``.

    Returns:
        ``[P, P]`` with P the number of entries of the weight, flattened row by row; float64.

    Raises:
        ValueError: a layer outside 1 … L, an unknown word or a mask of another shape or dtype.
    """
    weights, features = relu_collapse(optimum, copies)
    if not 1 <= layer <= len(weights):
        raise ValueError(f"layer={layer} must lie between 1 and {len(weights)}")
    stages = _class_stages(weights, features, optimum.n_classes)
    masks = _masks(stages, open_units)
    hessian = torch.zeros(
        weights[layer - 1].numel(), weights[layer - 1].numel(), dtype=torch.double
    )
    for c in range(optimum.n_classes):
        backward = torch.eye(len(weights[-1]), dtype=torch.double)
        for weight, mask in zip(weights[: layer - 1 : -1], masks.flip(0), strict=False):
            backward = backward @ weight * mask[:, c]
        mean = stages[layer - 1][:, c]
        hessian += torch.kron(backward.T @ backward, torch.outer(mean, mean))
    return hessian / optimum.n_classes


def _class_stages(weights: Sequence[Tensor], features: Tensor, n_classes: int) -> list[Tensor]:
    """Class means ``μ^(1) … μ^(L)`` at the collapsed point, each ``[d, K]``."""
    stages = [features[:, :: features.shape[1] // n_classes]]
    for weight in weights[:-1]:
        stages.append((weight @ stages[-1]).relu())
    return stages


def _masks(stages: Sequence[Tensor], open_units: OpenUnits) -> Tensor:
    """``[L − 1, d, K]``: is the unit's derivative 1 for the class?"""
    active = torch.stack([*stages[1:], stages[0]])[:-1] > 0  # stages[0]: the stack may be empty
    if isinstance(open_units, str):
        if open_units not in ("closed", "open"):
            raise ValueError(f"open_units={open_units!r} must be 'closed', 'open' or a mask")
        return active if open_units == "closed" else torch.ones_like(active)
    if open_units.shape != active.shape or open_units.dtype != torch.bool:
        raise ValueError(
            f"open_units must be bool {list(active.shape)} (layers with a ReLU, units, classes), "
            f"got {open_units.dtype} {list(open_units.shape)}"
        )
    return active | open_units


def one_sided_rank(
    optimum: CollapsedOptimum,
    layer: int,
    open_units: OpenUnits = "closed",
    *,
    copies: int | Sequence[int] = 1,
    tolerance: float = 1e-9,
) -> int:
    """Number of eigenvalues of ``one_sided_hessian`` above ``tolerance`` times the outlier o_l."""
    hessian = one_sided_hessian(optimum, layer, open_units, copies=copies)
    values = torch.linalg.eigvalsh(hessian)
    return int((values > tolerance * optimum.layer_outlier(layer)).sum())


class KinkStatistics(NamedTuple):
    """Where pre-activations of other classes lie, one entry for each layer that a ReLU follows.

    A unit belongs to the class on which its mean output is largest. The pre-activations counted
    are those of samples of other classes, relative to that mean, of all units that ever open; the
    four shares sum to 1.

    - ``live``: units that open on some sample
    - ``closed``: share below −tolerance
    - ``below``: share from −tolerance to 0, where PyTorch's derivative is 0
    - ``above``: share above 0, up to the tolerance
    - ``open``: share above the tolerance
    """

    live: list[int]
    closed: list[float]
    below: list[float]
    above: list[float]
    open: list[float]


@torch.no_grad()
def kink_statistics(
    weights: Sequence[Tensor], features: Tensor, tolerance: float = 1e-2
) -> KinkStatistics:
    """How near to the kink a ReLU model is, and on which side.

    Args:
        weights: ``[out, in]``, the first layer's first; the last has K rows.
        features: ``[d, N]`` before their ReLU, ordered by class, the same number of each.
        tolerance: what counts as near, relative to the unit's mean output on its class.

    Raises:
        ValueError: fewer than two layers, N no multiple of K, or a NaN.
    """
    k = len(weights[-1])
    if len(weights) < 2:
        raise ValueError("weights must hold at least two layers: a ReLU follows all but the last")
    if features.shape[1] % k:
        raise ValueError(f"features must have a multiple of K={k} columns, got {features.shape[1]}")
    inputs, rows = features.relu(), []
    for weight in weights[:-1]:
        z = weight @ inputs
        if z.isnan().any():
            raise ValueError("weights or features hold a NaN: did the training diverge?")
        rows.append(_kink_shares(z.unflatten(1, (k, -1)), tolerance))
        inputs = z.relu()
    return KinkStatistics(*(list(column) for column in zip(*rows, strict=True)))


def _kink_shares(z: Tensor, tolerance: float) -> tuple[int, float, float, float, float]:
    """Live units, and shares of the off-class pre-activations of ``z [d, K, n]``."""
    z = z[(z > 0).flatten(1).any(1)]
    own = z.relu().mean(2)  # [live, K]
    off = torch.ones_like(own, dtype=torch.bool).scatter(1, own.argmax(1, keepdim=True), False)
    relative = (z / own.amax(1)[:, None, None])[off]
    edges = torch.tensor([-tolerance, 0.0, tolerance], dtype=z.dtype)
    counts = torch.bucketize(relative, edges).flatten().bincount(minlength=4).double()
    closed, below, above, opened = (counts / max(counts.sum().item(), 1.0)).tolist()
    return len(z), closed, below, above, opened
