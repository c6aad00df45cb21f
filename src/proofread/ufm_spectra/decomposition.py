"""Class, cross-class and within-class parts of a layer's Gauss–Newton matrix.

After Papyan (2020), *Traces of Class/Cross-Class Structure Pervade Deep Learning Spectra*. The
matrix is a weighted sum of outer products of extended vectors, one for a sample i of class c and an
output c'::

    G = Σ_i Σ_c' w_ic' v_ic' v_ic'ᵀ

Here ``v_ic' = J_iᵀ e_c'`` and ``w = 1/N`` for squared error, and ``v_ic' = J_iᵀ (p_i − e_c')`` and
``w = p_ic'/N`` for cross-entropy. With the weighted means ``v_cc'`` over the samples of class c and
``v_c`` over c' as well, and the sums ``w_cc'`` and ``w_c`` of the weights::

    class  = Σ_c w_c v_c v_cᵀ,
    cross  = Σ_cc' w_cc' (v_cc' − v_c)(v_cc' − v_c)ᵀ,
    within = Σ_ic' w_ic' (v_ic' − v_cc')(v_ic' − v_cc')ᵀ

The parts sum to G, whatever the sizes of the classes. For cross-entropy the vectors with c' = c
are split off first, as a fourth part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .operators import (
    LOSSES,
    MEMORY_LIMIT,
    CurvatureOperator,
    LayerJacobian,
    Problem,
    blocks,
    class_labels,
    find_layer,
    layer_jacobian,
)

__all__ = ["CrossEntropyParts", "LowRankOperator", "SquaredErrorParts", "class_cross_within"]


class LowRankOperator(CurvatureOperator):
    """``F Fᵀ`` for few columns ``F``.

    Args:
        rows: ``Fᵀ``, ``[r, P]``.
        rank: what the rank of F is at most.
    """

    def __init__(self, rows: Tensor, rank: int) -> None:
        super().__init__(
            lambda stack: (stack @ rows.mT) @ rows,
            rows.shape[1],
            dtype=rows.dtype,
            device=rows.device,
            method="low rank",
        )
        self.rows = rows
        self.rank = min(rank, *rows.shape)

    def eigenvalues(self) -> Tensor:
        """The ``rank`` largest eigenvalues, descending; all others are zero.

        They are those of the r × r matrix ``FᵀF``: exact up to rounding errors of the size of eps
        times the largest, and never negative.
        """
        values = torch.linalg.eigvalsh(self.rows @ self.rows.mT).flip(0)
        return values[: self.rank].clamp(min=0)


class SquaredErrorParts(NamedTuple):
    """The parts of G for squared error.

    - ``class_``: rank K at most,
    - ``cross``: rank K(K − 1) at most,
    - ``within``: 0 at collapse.
    """

    class_: LowRankOperator
    cross: LowRankOperator
    within: CurvatureOperator


class CrossEntropyParts(NamedTuple):
    """The parts of G for cross-entropy.

    - ``same``: the vectors with c' = c; rank K at collapse,
    - ``class_``: rank K at most,
    - ``cross``: rank K(K − 2) at most,
    - ``within``: 0 at collapse.
    """

    same: CurvatureOperator
    class_: LowRankOperator
    cross: LowRankOperator
    within: CurvatureOperator


@torch.inference_mode(False)
@torch.enable_grad()
def class_cross_within(
    model: nn.Module,
    layer: nn.Module | str,
    inputs: Tensor,
    targets: Tensor,
    loss: str = "mse",
    *,
    batch_size: int | None = None,
) -> SquaredErrorParts | CrossEntropyParts:
    """Split a layer's Gauss–Newton matrix by class.

    Args:
        model: a classifier in evaluation mode, as for ``layer_hessian``.
        layer: a ``Linear`` or ungrouped ``Conv2d``, used once, or its dotted name.
        inputs: ``[N, ...]``.
        targets: integer classes ``[N]`` or one-hot ``[N, K]``. They say which samples belong
            together; the matrix itself does not depend on them.
        loss: ``"mse"`` or ``"cross_entropy"``.
        batch_size: samples in one graph while the factors are built.

    Returns:
        Operators that sum to ``gauss_newton(model, inputs, targets, loss, layer=layer)``, each
        positive semi-definite. The class and cross parts keep their K and K² vectors and have
        ``.eigenvalues()``.

    For unequal classes the sum is the same, but a class counts by its share of the samples
    (``w_c``), so that at collapse eigenvalues that would be equal differ by these shares. A class
    without samples contributes nothing and lowers the ranks.

    Raises:
        TypeError: as for ``layer_hessian``.
        ValueError: as for ``layer_hessian(..., method="factored")``; another loss; targets that
            are not one-hot; K² vectors that would take more than 2 GiB.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
    problem = Problem(model, inputs, targets, loss, batch_size)
    site = find_layer(model, layer)
    _check_memory(problem, site.module.weight.numel())
    vectors = _extended(problem, layer_jacobian(problem, site))
    others = problem.n_classes - (loss == "cross_entropy")
    class_, cross = _low_rank(vectors, others)
    within = problem.operator(vectors.within, vectors.jacobian.size, "factored")
    if loss == "mse":
        return SquaredErrorParts(class_, cross, within)
    same = problem.operator(vectors.same, vectors.jacobian.size, "factored")
    return CrossEntropyParts(same, class_, cross, within)


class Extended(NamedTuple):
    """The extended vectors ``v_ic' = J_iᵀ coefficients[i, c']``.

    - ``jacobian``: of the layer,
    - ``coefficients``: ``[N, K, K]``,
    - ``weights``: ``[N, K]``, ``w_ic'`` of the vectors that are split into three parts,
    - ``same_weights``: ``[N, K]``, ``w_ic'`` of those split off,
    - ``labels``: ``[N]``, the classes c.
    """

    jacobian: LayerJacobian
    coefficients: Tensor
    weights: Tensor
    same_weights: Tensor
    labels: Tensor

    def same(self, stack: Tensor) -> Tensor:
        """``Σ_ic' w_ic' v_ic' v_ic'ᵀ x`` over c' = c, for the rows x of ``stack``."""
        return self._pull(self._push(stack) * self.same_weights[:, None], len(stack))

    def within(self, stack: Tensor) -> Tensor:
        """``Σ_ic' w_ic' (v_ic' − v_cc') (v_ic' − v_cc')ᵀ x``.

        The second mean may be left out, as the weighted deviations of a class sum to 0.
        """
        d = self._push(stack)  # [N, B, K]: v_ic'ᵀ x
        w = self.weights[:, None]
        means = self.sums(w * d) / positive(self.sums(w))
        return self._pull(w * (d - means[self.labels]), len(stack))

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the samples of each class, ``[K, ...]``."""
        total = values.new_zeros(self.weights.shape[1], *values.shape[1:])
        return total.index_add_(0, self.labels, values)

    def _push(self, stack: Tensor) -> Tensor:
        rows = blocks(len(self.labels), self.jacobian.block_rows(len(stack)))
        outputs = torch.cat([self.jacobian.apply(stack, part) for part in rows])  # [N, B, K]
        return outputs @ self.coefficients.mT

    def _pull(self, y: Tensor, b: int) -> Tensor:
        c = y @ self.coefficients  # [N, B, K]
        parts = blocks(len(self.labels), self.jacobian.block_rows(b))
        total = c.new_zeros(b, self.jacobian.size)
        for rows in parts:
            total += self.jacobian.transpose(c[rows], rows)
        return total


def positive(weights: Tensor) -> Tensor:
    """Weights to divide by: a sum that vanished has a vanishing numerator as well."""
    return weights.clamp(min=torch.finfo(weights.dtype).tiny)


def _extended(problem: Problem, jacobian: LayerJacobian) -> Extended:
    n, k = problem.n_samples, problem.n_classes
    labels = class_labels(problem.targets, k)
    identity = torch.eye(k, dtype=problem.like.dtype, device=problem.like.device)
    if problem.loss == "mse":
        weights = torch.full((n, k), 1 / n, dtype=identity.dtype, device=identity.device)
        return Extended(jacobian, identity.expand(n, k, k), weights, 0 * weights, labels)
    p = problem.probabilities()
    own = functional.one_hot(labels, k).to(p.dtype)
    return Extended(jacobian, p[:, None] - identity, p * (1 - own) / n, p * own / n, labels)


def _low_rank(vectors: Extended, others: int) -> tuple[LowRankOperator, LowRankOperator]:
    """The class part by K vectors ``√w_c v_c``, the cross part by K² ``√w_cc' (v_cc' − v_c)``.

    Of the latter, ``others`` of a class are not zero, and their weighted sum is.
    """
    k = vectors.weights.shape[1]
    sums = torch.stack([_class_sums(vectors, c) for c in range(k)])  # [K, K, P]: w_cc' v_cc'
    w = vectors.sums(vectors.weights)  # [K, K]
    means = sums.sum(1) / positive(w.sum(1))[:, None]  # [K, P]: v_c
    class_ = means * w.sum(1).sqrt()[:, None]
    cross = sums.div_(positive(w)[..., None]).sub_(means[:, None]).mul_(w.sqrt()[..., None])
    return LowRankOperator(class_, k), LowRankOperator(cross.flatten(0, 1), k * (others - 1))


def _class_sums(vectors: Extended, c: int) -> Tensor:
    """``Σ w_ic' v_ic'`` over the samples of class c, ``[K, P]``."""
    members = (vectors.labels == c).nonzero().flatten()
    coefficients = vectors.weights[members][..., None] * vectors.coefficients[members]
    return vectors.jacobian.transpose(coefficients, members)


def _check_memory(problem: Problem, size: int) -> None:
    needed = problem.n_classes**2 * size * problem.like.element_size()
    if needed > MEMORY_LIMIT:
        raise ValueError(
            f"the K² class means of this layer would take {needed / 2**30:.1f} GiB, more than "
            f"{MEMORY_LIMIT / 2**30:.1f}: choose a smaller layer"
        )
