"""Predicted eigenvectors of a layer's Hessian, from class means.

At a collapsed optimum of the deep linear unconstrained feature model the K² outlier eigenvectors
of layer l are the products ``μ_c^(l+1) ⊗ μ_c'^(l)`` of class means (Garrod and Keating,
arXiv:2404.06106 v1, theorem 4.1): ``collapse_directions``. With a ReLU after the layer the
features of the next one are no longer its outputs. What always holds at collapse is that the
Gauss–Newton matrix is ``Σ_cc' v_cc' v_cc'ᵀ / K`` with ``v_cc' = Ā_cc' ⊗ μ_c``, the product of the
mean derivative of output c' in the layer's pre-activations and of the mean of what it reads:
``backward_directions`` spans its range in any network. In the linear model both spans agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .operators import (
    WEIGHTED,
    FactoredJacobian,
    Problem,
    Site,
    class_labels,
    find_layer,
    layer_jacobian,
)

__all__ = ["backward_directions", "collapse_directions"]


@torch.inference_mode(False)
@torch.no_grad()
def collapse_directions(
    model: nn.Module,
    layer: nn.Module | str,
    inputs: Tensor,
    targets: Tensor,
    *,
    orthonormal: bool = True,
    allow_deficient: bool = False,
) -> Tensor:
    """Products ``μ_c^(l+1) ⊗ μ_c'^(l)`` of a linear layer's class means.

    ``μ^(l)`` is the class mean of what the layer reads, and ``μ^(l+1)`` of what the next
    ``Linear`` or ``Conv2d`` reads in the order of execution (so after the activation and whatever
    else stands between), flattened; for the last one, of the layer's own output.

    Args:
        model: a classifier in evaluation mode, as for ``layer_hessian``.
        layer: a ``Linear`` of the model, read once a sample, or its dotted name.
        inputs: ``[N, ...]``, N samples; classes may differ in size.
        targets: integer classes ``[N]``, each class at least once, or one-hot ``[N, K]``.
        orthonormal: orthonormalise, in the order of the columns (the factors of QR).
        allow_deficient: where the span has rank below K², return an orthonormal basis of what
            there is instead of an error.

    Returns:
        ``[P, K²]``; column ``c·K + c'`` is the product of ``μ_c^(l+1)`` and ``μ_c'^(l)``, or that
        vector made orthogonal to those before it. ``[P, rank]`` for a deficient span.

    Raises:
        TypeError: as for ``layer_hessian``.
        ValueError: as for ``layer_hessian``; a class without samples; a convolution; a next layer
            that reads another number of entries than the layer returns; class means that are
            linearly dependent.
    """
    problem, site = _problem(model, layer, inputs, targets)
    labels = _present(problem)
    read, after = _means(problem, site, labels)  # [K, I], [K, O]
    if orthonormal:
        # A Kronecker product of two QR factorisations is the QR factorisation of the product.
        after = _basis(after.mT, allow_deficient, "class means after the layer").mT
        read = _basis(read.mT, allow_deficient, "class means before the layer").mT
    return torch.einsum("co,di->oicd", after, read).reshape(site.module.weight.numel(), -1)


@torch.inference_mode(False)
@torch.enable_grad()
def backward_directions(
    model: nn.Module,
    layer: nn.Module | str,
    inputs: Tensor,
    targets: Tensor,
    *,
    orthonormal: bool = True,
    allow_deficient: bool = False,
) -> Tensor:
    """Products ``Ā_cc' ⊗ μ_c`` of class means of backward vectors and features.

    ``Ā_cc'`` is the mean over class c of the derivative of output c' in the layer's
    pre-activations, ``μ_c`` the class mean of what the layer reads. At collapse these vectors span
    the range of the layer's Gauss–Newton matrix for squared error, ReLU or not.

    Args:
        model: as for ``collapse_directions``, and so the other arguments.

    Returns:
        ``[P, K²]``; column ``c·K + c'`` is ``Ā_cc' ⊗ μ_c``, or that vector made orthogonal to
        those before it. ``[P, rank]`` for a deficient span.

    Raises:
        TypeError: as for ``layer_hessian``.
        ValueError: as for ``collapse_directions`` and ``layer_hessian(..., method="factored")``.
    """
    problem, site = _problem(model, layer, inputs, targets)
    labels = _present(problem)
    factors = layer_jacobian(problem, site)
    assert isinstance(factors, FactoredJacobian)
    a = class_means(factors.backward[:, :, 0], labels, problem.n_classes)  # [K, K, O]
    mu = class_means(factors.features[:, 0], labels, problem.n_classes)  # [K, I]
    columns = torch.einsum("cko,ci->oick", a, mu).reshape(site.module.weight.numel(), -1)
    return _basis(columns, allow_deficient, "backward directions") if orthonormal else columns


def class_means(values: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """Means over the samples of each class, ``[K, ...]`` for ``values`` ``[N, ...]``."""
    sums = values.new_zeros(n_classes, *values.shape[1:]).index_add_(0, labels, values)
    counts = labels.bincount(minlength=n_classes).to(values.dtype)
    return sums / counts.view(-1, *[1] * (values.ndim - 1))


def _problem(
    model: nn.Module, layer: nn.Module | str, inputs: Tensor, targets: Tensor
) -> tuple[Problem, Site]:
    problem = Problem(model, inputs, targets, "mse", None)
    site = find_layer(model, layer)
    if not isinstance(site.module, nn.Linear):
        raise ValueError(f"layer {site.name!r} is a convolution: directions need a Linear layer")
    return problem, site


def _present(problem: Problem) -> Tensor:
    """Labels ``[N]`` in which no class is missing."""
    labels = class_labels(problem.targets, problem.n_classes)
    missing = (labels.bincount(minlength=problem.n_classes) == 0).nonzero().flatten().tolist()
    if missing:
        raise ValueError(f"no sample of class {', '.join(map(str, missing))}: it has no mean")
    return labels


def _means(problem: Problem, site: Site, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Class means of what the layer reads ``[K, I]`` and of what follows it ``[K, O]``."""
    read, after = _around(problem, site)
    o, i = site.module.weight.shape
    n, k = problem.n_samples, problem.n_classes
    if read.shape != (n, i):
        raise ValueError(f"layer {site.name!r} reads {list(read.shape)}, not [{n}, {i}]")
    if len(after) != n or after[0].numel() != o:
        raise ValueError(
            f"layer {site.name!r} returns {o} numbers a sample, but the next one reads "
            f"{list(after.shape)}: the span is not defined"
        )
    return class_means(read, labels, k), class_means(after.flatten(1), labels, k)


def _around(problem: Problem, site: Site) -> tuple[Tensor, Tensor]:
    """What the layer reads, and what the next one reads or, at the end, the layer returns."""
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.append((module, args[0].clone(), output.clone()))

    layers = [module for module in problem.model.modules() if isinstance(module, WEIGHTED)]
    handles = [module.register_forward_hook(keep) for module in layers]
    try:
        problem.outputs(slice(None), {})
    finally:
        for handle in handles:
            handle.remove()
    places = [index for index, (module, _, _) in enumerate(seen) if module is site.module]
    if len(places) != 1:
        raise ValueError(f"layer {site.name!r} is used {len(places)} times a pass, not once")
    place = places[0]
    last = place + 1 == len(seen)
    return seen[place][1], seen[place][2] if last else seen[place + 1][1]


def _basis(columns: Tensor, allow_deficient: bool, what: str) -> Tensor:
    """Orthonormal columns of the same span, triangular in the given ones if these are independent.

    The rank counts singular values of the normalised columns above the largest side times eps.
    """
    norms = columns.norm(dim=0)
    q, r = torch.linalg.qr(columns / norms.where(norms > 0, 1))
    u, sizes, _ = torch.linalg.svd(r)
    tolerance = max(columns.shape) * torch.finfo(columns.dtype).eps
    rank = int((sizes > tolerance * sizes[0]).sum())
    if rank == columns.shape[1]:
        return q * r.diagonal().sign()
    if not allow_deficient:
        raise ValueError(
            f"the {columns.shape[1]} {what} span {rank} dimensions only: "
            "allow_deficient=True returns a basis of these"
        )
    return q @ u[:, :rank]
