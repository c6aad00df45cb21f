"""What the networks page measures: one layer's Hessian, gradient and weights against class means.

The theory speaks of exact collapse. Here a trained network's layer is put beside it: how much of
the Hessian's trace its K² largest eigenvalues hold, whether a gap follows them, whether their
eigenvectors span the products ``μ_c^(l+1) ⊗ μ_c'^(l)`` of class means, and whether each product is
an eigenvector by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from .collapse import collapse_metrics
from .directions import backward_directions, collapse_directions
from .eigensolvers import top_eigenpairs
from .networks import LOSSES
from .operators import (
    CurvatureOperator,
    DenseJacobian,
    FactoredJacobian,
    Problem,
    find_layer,
    layer_hessian,
    layer_jacobian,
)
from .products import gauss_newton_product

TOLERANCE = 1e-5  # of the eigenpairs' residuals, in units of the largest eigenvalue
LINEAR_BLOCK, CONV_BLOCK = 8, 16  # columns of a block: cheap products pay for wider ones


@dataclass(frozen=True)
class LayerStudy:
    """One layer of one network. NaN stands for what the layer does not have.

    Class means exist at a linear layer; what compares with them is NaN for a convolution.

    Attributes:
        layer: the layer's name.
        n_classes: K.
        k: how many eigenvalues count as outliers, K² unless told otherwise.
        eigenvalues: ``[k + 1]``, descending.
        eigenvectors: ``[P, k]``, orthonormal.
        residual: largest ``‖Hv − λv‖ / λ_1`` of the k + 1 pairs.
        trace: of the layer Hessian.
        share: share of the trace in the k largest eigenvalues.
        gap: ``λ_k / λ_{k+1}``, ∞ when the latter is 0 to rounding.
        class_gap: ``λ_K / λ_{K+1}``.
        overlap: mean squared cosine between the k eigenvectors and the span of the products of
            class means.
        overlap_backward: the same with the products of class means of backward vectors and of
            features, see ``backward_directions``.
        overlap_other: as ``overlap``, with the class means of another network.
        residual_single: mean of ``‖Hv − (vᵀHv)v‖ / vᵀHv`` over the K² products v, scaled to 1.
        residual_random: the same over K random unit vectors.
        gradient_share: share of the gradient's squared norm in the span of the k eigenvectors.
        gradient_cosine: squared cosine of the gradient with ``Σ_c μ_c^(l+1) ⊗ μ_c^(l)``.
        gradient_mismatched: the same with the means of layer l shifted by one class.
        singular_values: of the weight, flattened to ``[out, in]``, descending.
        weight_rank: how many singular values come before the largest ratio of successive ones.
        weight_gap: ``σ_K / σ_{K+1}`` of the weight; NaN if it has but K.
        nc1: ``tr(Σ_W Σ_B⁺)/K`` of the layer's inputs, see ``collapse_metrics``.
    """

    layer: str
    n_classes: int
    k: int
    eigenvalues: Tensor = field(repr=False)
    eigenvectors: Tensor = field(repr=False)
    residual: float
    trace: float
    share: float
    gap: float
    class_gap: float
    overlap: float
    overlap_backward: float
    overlap_other: float
    residual_single: float
    residual_random: float
    gradient_share: float
    gradient_cosine: float
    gradient_mismatched: float
    singular_values: Tensor = field(repr=False)
    weight_rank: int
    weight_gap: float
    nc1: float


def study_layer(
    network: nn.Module,
    layer: str,
    x: Tensor,
    y: Tensor,
    loss: str = "mse",
    k: int | None = None,
    *,
    other: nn.Module | None = None,
    seed: int = 0,
) -> LayerStudy:
    """Measure one layer; see :class:`LayerStudy`.

    Args:
        network: a classifier, piecewise linear in the layer's weight (ReLU, no batch norm).
        layer: dotted name of a Linear or Conv2d module of it.
        x: ``[N, …]`` inputs.
        y: ``[N]`` integer classes; each of ``0 … K − 1`` must occur.
        loss: ``"mse"`` or ``"cross_entropy"``.
        k: outliers; default K², or as many as the weight has entries less one.
        other: a network of the same architecture, for ``overlap_other``.
        seed: of the random vectors.

    Raises:
        TypeError: as for ``layer_hessian``.
        ValueError: as for ``layer_hessian``; a class without samples; k outside ``K … P − 1``; a
            Hessian that is not the Gauss–Newton matrix.
        ArithmeticError: the eigensolver did not converge.
    """
    operator = layer_hessian(network, layer, x, y, loss)
    if operator.method != "factored":
        raise ValueError(f"the network must be piecewise linear in the weight of {layer!r}")
    weight = _weight(network, layer).detach()
    n_classes = network(x[:1]).shape[1]
    k = _checked_count(k, n_classes, weight.numel())
    values, vectors, residual = _eigenpairs(operator, k + 1, network, layer)
    top = vectors[:, :k]
    total = layer_trace(network, layer, x, y, loss)
    gradient = _gradient(network, layer, x, y, loss)
    singular_values = torch.linalg.svdvals(weight.flatten(1))
    return LayerStudy(
        layer=layer,
        n_classes=n_classes,
        k=k,
        eigenvalues=values,
        eigenvectors=top,
        residual=residual,
        trace=total,
        share=float(values[:k].sum()) / total,
        gap=ratio_after(values, k),
        class_gap=ratio_after(values, n_classes),
        **_against_means(network, layer, x, y, operator, top, gradient),
        overlap_other=math.nan if other is None else _overlap(other, layer, x, y, top),
        residual_random=_mean_residual(operator, _random_directions(top, n_classes, seed)),
        gradient_share=_share(top.T @ gradient, gradient),
        singular_values=singular_values,
        weight_rank=outliers_before_gap(singular_values, n_classes),
        weight_gap=ratio_after(singular_values, n_classes),
        nc1=collapse_metrics(_reads(network, layer, x), y).nc1,
    )


def ratio_after(values: Tensor, k: int) -> float:
    """``values[k − 1] / values[k]`` of descending values: ∞ when the latter is 0 to rounding, NaN
    when there is none."""
    if len(values) <= k:
        return math.nan
    noise = 1e-12 * float(values[0])
    return float(values[k - 1] / values[k]) if values[k] > noise else math.inf


def outliers_before_gap(values: Tensor, n_classes: int) -> int:
    """How many of the descending values come before the largest ratio of successive ones; all of
    them when there are no more than K."""
    if len(values) <= n_classes:
        return len(values)
    floor = values.clamp(min=1e-12 * float(values[0]))
    return int((floor[:-1] / floor[1:]).argmax()) + 1


def _checked_count(k: int | None, n_classes: int, size: int) -> int:
    k = min(n_classes**2, size - 1) if k is None else k
    if not n_classes <= k < size:
        raise ValueError(
            f"k={k} must lie in {n_classes} … {size - 1}: K up to the weight's size − 1"
        )
    return k


def _eigenpairs(
    operator: CurvatureOperator, k: int, network: nn.Module, layer: str
) -> tuple[Tensor, Tensor, float]:
    # A convolution's Jacobians are written out and read once a block: wide blocks pay there.
    conv = isinstance(network.get_submodule(layer), nn.Conv2d)
    block = min(CONV_BLOCK if conv else LINEAR_BLOCK, operator.shape[0])
    pairs = top_eigenpairs(operator, k, tol=TOLERANCE, which="LA", block_size=block)
    residual = float(pairs.residuals.max() / pairs.values[0])
    if not pairs.converged:
        raise ArithmeticError(
            f"{layer}: the {k} eigenpairs have residuals up to {residual:.1e} λ_1"
        )
    return pairs.values, pairs.vectors, residual


# --- a layer within its network -------------------------------------------------------------------


def layer_trace(network: nn.Module, layer: str, x: Tensor, y: Tensor, loss: str = "mse") -> float:
    """Trace of a layer's Gauss–Newton matrix, exactly: ``(1/N) Σ_i tr(S_i J_i J_iᵀ)``.

    It is the trace of the layer Hessian where the network is piecewise linear in the layer's
    weight. ``J_i [K, P]`` is the outputs' Jacobian in the weight, S as in
    ``gauss_newton_product``; for a linear layer ``J_i J_iᵀ = ‖h_i‖² A_i A_iᵀ``.

    Args:
        network: a classifier ``[N, …] → [N, K]``.
        layer: dotted name of a Linear or Conv2d module.
        x: ``[N, …]``.
        y: ``[N]`` integer classes; the trace does not depend on them.
        loss: ``"mse"`` or ``"cross_entropy"``.

    Raises:
        ValueError: as for ``layer_hessian(…, method="factored")``.
    """
    problem = Problem(network, x, y, loss, None)
    grams = _jacobian_grams(layer_jacobian(problem, find_layer(network, layer)))  # [N, K, K]
    squares = grams.diagonal(dim1=1, dim2=2)
    if loss == "mse":
        return float(squares.sum(1).mean())
    p = problem.probabilities()
    return float(((p * squares).sum(1) - torch.einsum("nk,nkl,nl->n", p, grams, p)).mean())


def _jacobian_grams(jacobian: FactoredJacobian | DenseJacobian) -> Tensor:
    """``J_i J_iᵀ``: ``[N, K, K]``."""
    if isinstance(jacobian, FactoredJacobian) and jacobian.features.shape[1] == 1:
        a, h = jacobian.backward[:, :, 0], jacobian.features[:, 0]
        return a @ a.mT * h.square().sum(1)[:, None, None]
    dense = jacobian.written_out() if isinstance(jacobian, FactoredJacobian) else jacobian
    return dense.rows @ dense.rows.mT


def _reads(network: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What the layer reads: ``[N, …]``."""
    seen: list[Tensor] = []
    hook = network.get_submodule(layer).register_forward_hook(lambda _, x, out: seen.append(x[0]))
    try:
        with torch.no_grad():
            network(x)
    finally:
        hook.remove()
    return seen[0]


def _gradient(network: nn.Module, layer: str, x: Tensor, y: Tensor, loss: str) -> Tensor:
    """Of the data term in the layer's weight: ``[P]``."""
    with torch.enable_grad():
        value = LOSSES[loss](network(x)[None], y).sum()
        return torch.autograd.grad(value, _weight(network, layer))[0].flatten()


def _weight(network: nn.Module, layer: str) -> Tensor:
    return network.get_parameter(f"{layer}.weight")


# --- against the class means ----------------------------------------------------------------------


def _against_means(
    network: nn.Module,
    layer: str,
    x: Tensor,
    y: Tensor,
    operator: CurvatureOperator,
    top: Tensor,
    gradient: Tensor,
) -> dict[str, float]:
    names = ("overlap", "overlap_backward", "residual_single", "gradient_cosine")
    if not isinstance(network.get_submodule(layer), nn.Linear):
        return dict.fromkeys([*names, "gradient_mismatched"], math.nan)
    products = collapse_directions(network, layer, x, y, orthonormal=False)  # [P, K²]
    k = math.isqrt(products.shape[1])
    pairs = products.unflatten(1, (k, k))  # [P, c, c']
    c = torch.arange(k)
    backward = backward_directions(network, layer, x, y, allow_deficient=True)
    return {
        "overlap": _overlap(network, layer, x, y, top),
        "overlap_backward": _share(top.T @ backward, top),
        "residual_single": _mean_residual(operator, F.normalize(products, dim=0)),
        "gradient_cosine": _squared_cosine(gradient, pairs[:, c, c].sum(1)),
        "gradient_mismatched": _squared_cosine(gradient, pairs[:, c, c.roll(1)].sum(1)),
    }


def _overlap(network: nn.Module, layer: str, x: Tensor, y: Tensor, top: Tensor) -> float:
    """``‖topᵀ Q‖²_F / k`` for the k columns of ``top`` and an orthonormal basis Q of the products'
    span; NaN at a convolution."""
    if not isinstance(network.get_submodule(layer), nn.Linear):
        return math.nan
    basis = collapse_directions(network, layer, x, y, allow_deficient=True)
    return _share(top.T @ basis, top)


def _mean_residual(operator: CurvatureOperator, unit: Tensor) -> float:
    """Mean over the columns v of ``‖Hv − (vᵀHv)v‖ / vᵀHv``."""
    image = operator.matmat(unit)
    rayleigh = (unit * image).sum(0)
    return float(((image - rayleigh * unit).norm(dim=0) / rayleigh).mean())


def _random_directions(like: Tensor, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(len(like), count, generator=generator, dtype=like.dtype)
    return F.normalize(normal, dim=0).to(like)


def _share(part: Tensor, whole: Tensor) -> float:
    """``‖part‖² / ‖whole‖²``; NaN without a whole."""
    total = float(whole.square().sum())
    return float(part.square().sum()) / total if total > 0 else math.nan


def _squared_cosine(a: Tensor, b: Tensor) -> float:
    return _share(F.normalize(b, dim=0) @ a, a)


# --- many networks --------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworksStudy:
    """The layers of several networks of one architecture.

    Attributes:
        layers: names of the layers.
        studies: one row a network, in it one study a layer.
    """

    layers: tuple[str, ...]
    studies: tuple[tuple[LayerStudy, ...], ...]

    def values(self, name: str) -> NDArray[np.float64]:
        """A measured quantity by its name in :class:`LayerStudy`: ``[seeds, layers]``, with a last
        axis for ``eigenvalues``; ``singular_values`` have no common length and are left out.

        Raises:
            AttributeError: no such quantity.
        """
        return np.array([[np.asarray(getattr(s, name)) for s in row] for row in self.studies])


def study_networks(
    networks: Sequence[nn.Module],
    layers: Sequence[str],
    x: Tensor,
    y: Tensor,
    loss: str = "mse",
    k: int | None = None,
    *,
    progress: Callable[[int], object] | None = None,
) -> NetworksStudy:
    """Study the same layers of several networks, one a seed.

    ``overlap_other`` takes the class means of the next network, the last those of the first; with a
    single network it is NaN.

    Args:
        networks: S of them.
        layers: dotted names, as for :func:`study_layer`.
        x: ``[N, …]`` inputs.
        y: ``[N]`` integer classes.
        loss: ``"mse"`` or ``"cross_entropy"``.
        k: as for :func:`study_layer`.
        progress: called with the number of networks done after each.

    Raises:
        ValueError: no network or no layer; as for :func:`study_layer`.
    """
    if not len(networks) or not len(layers) or isinstance(layers, str):
        raise ValueError("networks and layers must hold at least one each, layers as a list")
    rows = []
    for index, network in enumerate(networks):
        other = networks[(index + 1) % len(networks)] if len(networks) > 1 else None
        row = [study_layer(network, name, x, y, loss, k, other=other) for name in layers]
        rows.append(tuple(row))
        if progress is not None:
            progress(index + 1)
    return NetworksStudy(tuple(layers), tuple(rows))


# --- control --------------------------------------------------------------------------------------


def random_features_share(
    n_samples: int, n_classes: int, n_in: int, n_out: int, *, seed: int = 0
) -> float:
    """Share of trace in the K² largest eigenvalues without any structure.

    The matrix is ``(1/N) Σ_i A_iᵀ A_i ⊗ h_i h_iᵀ``, a layer's Hessian under squared error, with
    independent standard normal features ``h_i`` and backward vectors, the rows of ``A_i``.

    Args:
        n_samples: N.
        n_classes: K, rows of ``A_i``.
        n_in: length of ``h_i``.
        n_out: columns of ``A_i``.
        seed: of the draw.

    Raises:
        ValueError: a size below 1, or K² above the ``n_in · n_out`` eigenvalues.
        ArithmeticError: the eigensolver did not converge.
    """
    if min(n_samples, n_classes, n_in, n_out) < 1 or n_classes**2 > n_in * n_out:
        raise ValueError("all sizes must be at least 1, and n_in · n_out at least n_classes²")
    generator = torch.Generator().manual_seed(seed)
    backward = torch.randn(n_samples, n_classes, n_out, generator=generator, dtype=torch.float64)
    features = torch.randn(n_samples, n_in, generator=generator, dtype=torch.float64)
    operator, block = _factored(backward, features), min(CONV_BLOCK, n_in * n_out)
    pairs = top_eigenpairs(operator, n_classes**2, tol=1e-2, which="LA", block_size=block)
    if not pairs.converged:
        raise ArithmeticError("the eigensolver did not converge on the random matrix")
    squares = features.square().sum(1) * backward.square().sum((1, 2))
    return float(pairs.values.sum() / squares.mean())


def _factored(backward: Tensor, features: Tensor) -> CurvatureOperator:
    """``(1/N) Σ_i A_iᵀ A_i ⊗ h_i h_iᵀ`` from ``[N, K, O]`` and ``[N, I]``."""
    sides = (backward.shape[2], features.shape[1])

    def multiply(rows: Tensor) -> Tensor:
        return gauss_newton_product(backward, features, rows.view(-1, *sides)).flatten(1)

    size = sides[0] * sides[1]
    return CurvatureOperator(
        multiply, size, dtype=features.dtype, device=features.device, method="factored"
    )
