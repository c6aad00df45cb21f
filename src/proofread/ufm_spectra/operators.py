"""Hessians and Gauss–Newton matrices of any PyTorch classifier as matrix-free operators.

Three ways to multiply, all exact up to rounding:

* **autograd**: the gradient is built once with its graph, and each product is one backward pass
  through that graph. Rebuilding it for every product, as ``torch.func`` does, takes 2.5 times as
  long on a perceptron.
* **double backward** for ``J v``: ``Jᵀu`` is linear in ``u``, so that its derivative in ``u``,
  multiplied by ``v``, is ``J v``. The Gauss–Newton product is this and one backward pass.
* **factored**, one layer: a sample's Jacobian in the weight is ``Σ_l A_l ⊗ h_l``, with ``A`` the
  derivative of the outputs in the layer's pre-activation, ``h`` what the layer reads, and ``l`` the
  positions of a convolution (one for a linear layer). ``A`` takes K backward passes, once; after
  that a product is a few matrix products.

An operator is a snapshot: weights, buffers and data are copied, and what happens to the model
later does not reach it. Nor does it touch the model. At a kink PyTorch's derivative is meant, 0 for
a ReLU at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .products import gauss_newton_product

__all__ = ["CurvatureOperator", "gauss_newton", "hessian", "layer_hessian"]

Loss = str | Callable[[Tensor, Tensor], Tensor]

LOSSES = ("mse", "cross_entropy")
METHODS = ("auto", "autograd", "factored")
DTYPES = (torch.float32, torch.float64)
WEIGHTED = (nn.Linear, nn.Conv2d)

MEMORY_LIMIT = 2 << 30  # bytes for the factors of a layer
BLOCK_BYTES = 1 << 22  # of the factors read at a time: what belongs to a block stays in cache
DENSE_COLUMNS = 64  # of the identity at a time
AGREEMENT = {torch.float32: 1e-4, torch.float64: 1e-9}  # of two ways to compute one product
# Columns of a block go through the graph together (vmap) where calls cost more than arithmetic.
# Measured on one CPU thread, 16 columns, loop against batched: 14 and 1 ms for a 20-20-20-3
# perceptron on 30 samples, 17 and 10 for 64-32-32-32-10 on 200 (10⁶ multiplications a pass), but
# 274 and 349 for 196-128-128-128-10 on 1000 (6·10⁷), and 1.0 and 3.0 s for 784-256-256-10 in
# float64. With convolutions vmap is slower throughout.
BATCHED_WORK = 2_000_000


class CurvatureOperator:
    """A symmetric P × P matrix known by its products.

    Args:
        multiply: maps b directions, row by row ``[b, P]``, to their products ``[b, P]``.
        size: the side P of the matrix.
        dtype: of directions and products, float32 or float64.
        device: of directions and products.
        method: how the products are computed, for the record.

    ``applications`` counts the columns multiplied so far, ``shape`` is ``(P, P)``.
    """

    def __init__(
        self,
        multiply: Callable[[Tensor], Tensor],
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        method: str,
    ) -> None:
        self._multiply = multiply
        self.shape = (size, size)
        self.dtype = dtype
        self.device = device
        self.method = method
        self.applications = 0

    def matvec(self, v: Tensor) -> Tensor:
        """The product with one vector ``[P]``.

        Raises:
            TypeError: ``v`` is not a tensor of the operator's dtype.
            ValueError: its shape is not ``[P]``, or it is on another device.
        """
        self._check(v, 1)
        return self.matmat(v[:, None])[:, 0]

    def matmat(self, V: Tensor) -> Tensor:
        """The product with the b columns of ``V`` ``[P, b]``; errors as for ``matvec``."""
        self._check(V, 2)
        if V.shape[1] == 0:
            return torch.zeros_like(V)
        self.applications += V.shape[1]
        return self._multiply(V.detach().mT.contiguous()).mT

    def __matmul__(self, other: Tensor) -> Tensor:
        """``matvec`` of a vector, ``matmat`` of a matrix."""
        return self.matvec(other) if getattr(other, "ndim", 2) == 1 else self.matmat(other)

    def to_dense(self) -> Tensor:
        """The matrix ``[P, P]``, by P products."""
        identity = torch.eye(self.shape[0], dtype=self.dtype, device=self.device)
        return torch.cat([self.matmat(part) for part in identity.split(DENSE_COLUMNS, 1)], 1)

    def to_scipy(self) -> Any:
        """A ``scipy.sparse.linalg.LinearOperator`` of the same dtype; NumPy in, NumPy out."""
        from scipy.sparse.linalg import LinearOperator

        def product(x: Any) -> Any:
            return (self @ torch.tensor(x, dtype=self.dtype, device=self.device)).cpu().numpy()

        name = str(self.dtype).removeprefix("torch.")
        both = {"matvec": product, "rmatvec": product, "matmat": product, "rmatmat": product}
        return LinearOperator(self.shape, dtype=name, **both)

    def __repr__(self) -> str:
        size, dtype = self.shape[0], str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({size} × {size}, {dtype}, {self.device}, {self.method})"

    def _check(self, v: Tensor, ndim: int) -> None:
        if not isinstance(v, Tensor):
            raise TypeError(f"the operator multiplies tensors, got {type(v).__name__}")
        if v.dtype != self.dtype:
            raise TypeError(f"the operator is {self.dtype}, the direction {v.dtype}: call .to()")
        if v.ndim != ndim or v.shape[0] != self.shape[0]:
            wanted = f"[{self.shape[0]}]" if ndim == 1 else f"[{self.shape[0]}, b]"
            raise ValueError(f"the direction must be {wanted}, got {list(v.shape)}")
        if v.device != self.device:
            raise ValueError(f"the operator is on {self.device}, the direction on {v.device}")


@torch.inference_mode(False)
@torch.enable_grad()
def layer_hessian(
    model: nn.Module,
    layer: nn.Module | str,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss = "mse",
    *,
    method: str = "auto",
    batch_size: int | None = None,
) -> CurvatureOperator:
    """Hessian of the loss in one layer's weight, other parameters fixed.

    Args:
        model: any classifier that maps ``[N, ...]`` to ``[N, K]``, K ≥ 2, in float32 or float64,
            and treats each sample for itself. It is read, never changed.
        layer: a ``Linear`` or ``Conv2d`` of the model, or its dotted name.
        inputs: ``[N, ...]``, in the model's dtype and on its device.
        targets: integer classes ``[N]`` or floating ``[N, K]`` (probabilities for cross-entropy);
            for a callable loss whatever it takes, N rows.
        loss: ``"mse"`` for ``(1/2N) Σ ‖f(x_i) − y_i‖²`` (one-hot ``y`` for integer classes),
            ``"cross_entropy"`` for its mean, or a callable of outputs and targets that returns a
            scalar, a mean over its samples.
        method: ``"autograd"``: exact for any network. ``"factored"``: products with the layer's
            Gauss–Newton matrix, which do not pass the layers after it (next to the output that
            saves little; a convolution with few weights and many positions gains a hundredfold).
            ``"auto"``: factored where both are the same, and autograd otherwise; ``.method`` says
            which it was.
        batch_size: samples in one graph, by default all of them. The graphs of all batches are
            kept: this bounds the temporary memory of a product, not the sum.

    Returns:
        The operator, P × P with P the weight's number of entries, flattened row by row.

    The Hessian is the Gauss–Newton matrix if the outputs are an affine function of the weight near
    its value: everything after the layer is piecewise linear (ReLU, max pooling,
    linear layers, batch normalisation in evaluation mode). ``"auto"`` compares one product of both
    with a random direction, which must agree to 1e-9 in float64 and 1e-4 in float32, relative.

    Raises:
        TypeError: inputs, targets, outputs or parameters of a dtype that does not fit.
        ValueError: NaN or infinite numbers, no samples, K = 1, targets out of range or of another
            shape, a layer that is not in the model or not used, an unknown loss or method, a
            model that is random or mixes samples (call ``model.eval()``), or, for
            ``method="factored"``, a layer used more than once, grouped, reading more than one
            vector a sample, or with factors above 2 GiB.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> layer_hessian(model, "0", torch.ones(5, 3), torch.tensor([0, 1, 0, 1, 1])).method
        'factored'
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method == "factored" and callable(loss):
        raise ValueError('a callable loss needs method="autograd"')
    problem = Problem(model, inputs, targets, loss, batch_size)
    site = find_layer(model, layer)
    if method == "factored":
        return _factored(problem, site)
    exact = _autograd(problem, [site.weight])
    if method == "autograd" or callable(loss):
        return exact
    return _factored_if_equal(problem, site, exact)


@torch.inference_mode(False)
@torch.enable_grad()
def hessian(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: Loss = "mse",
    *,
    parameters: Sequence[str] | None = None,
    batch_size: int | None = None,
) -> CurvatureOperator:
    """Hessian of the loss in all parameters, or in those named.

    Args:
        model: as for ``layer_hessian``, and so ``inputs``, ``targets``, ``loss``, ``batch_size``.
        parameters: names out of ``model.named_parameters()``; by default all, frozen ones as well.

    Returns:
        The operator; parameters are flattened row by row and follow one another in the order of
        ``model.named_parameters()``, whatever the order of ``parameters``. Parameters that the
        loss does not reach have zero rows.

    Raises:
        TypeError: as for ``layer_hessian``.
        ValueError: as for ``layer_hessian``; an unknown or no parameter; a loss that depends on
            none of them.
    """
    problem = Problem(model, inputs, targets, loss, batch_size)
    return _autograd(problem, _chosen(model, parameters))


@torch.inference_mode(False)
@torch.enable_grad()
def gauss_newton(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: str = "mse",
    *,
    layer: nn.Module | str | None = None,
    batch_size: int | None = None,
) -> CurvatureOperator:
    """Gauss–Newton matrix ``(1/N) Σ_i J_iᵀ S_i J_i`` in all parameters, or in a layer's weight.

    ``J_i`` is the Jacobian of sample i's K outputs, and ``S_i`` the loss's Hessian in them: the
    identity for squared error, ``diag(p_i) − p_i p_iᵀ`` for cross-entropy.

    Args:
        model: as for ``layer_hessian``, and so ``inputs``, ``targets``, ``batch_size``.
        loss: ``"mse"`` or ``"cross_entropy"``.
        layer: a ``Linear`` or ``Conv2d``, or its name, for the matrix of its weight alone. Its
            products are factored if it is used once and its factors fit in 2 GiB.

    Returns:
        The operator, positive semi-definite; the order of parameters is that of ``hessian``.

    Raises:
        TypeError: as for ``layer_hessian``.
        ValueError: as for ``layer_hessian``, and for a callable loss.
    """
    if callable(loss):
        raise ValueError(f"gauss_newton takes loss {' or '.join(LOSSES)}, not a callable")
    problem = Problem(model, inputs, targets, loss, batch_size)
    if layer is None:
        return _gauss_newton(problem, GraphJacobian(problem, _chosen(model, None)), "autograd")
    site = find_layer(model, layer)
    try:
        return _factored(problem, site)
    except CannotFactor:
        return _gauss_newton(problem, GraphJacobian(problem, [site.weight]), "autograd")


def _autograd(problem: Problem, names: Sequence[str]) -> CurvatureOperator:
    graph = RetainedGraph(problem, names)
    return problem.operator(graph, graph.size, "autograd")


def _factored(problem: Problem, site: Site) -> CurvatureOperator:
    return _gauss_newton(problem, layer_jacobian(problem, site), "factored")


def _gauss_newton(problem: Problem, jacobian: Jacobian, method: str) -> CurvatureOperator:
    p = problem.probabilities() if problem.loss == "cross_entropy" else None
    return problem.operator(lambda stack: jacobian.product(stack, p), jacobian.size, method)


def _factored_if_equal(problem: Problem, site: Site, exact: CurvatureOperator) -> CurvatureOperator:
    """The factored operator if a random product says that it is ``exact``, or else ``exact``."""
    try:
        fast = _factored(problem, site)
    except CannotFactor:
        return exact
    v = _random((exact.shape[0],), problem.like)
    a, b = exact.matvec(v), fast.matvec(v)
    exact.applications = fast.applications = 0
    size = torch.maximum(a.norm(), b.norm())
    return fast if (a - b).norm() <= AGREEMENT[problem.like.dtype] * size else exact


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Standard normal numbers that leave the global generator alone."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)


# The problem: a snapshot of the model with its data


class Problem:
    """A checked classifier with its data: ``N`` samples, ``K`` outputs, batches, a loss.

    ``like`` is a parameter, for dtype and device.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        loss: Loss,
        batch_size: int | None,
    ) -> None:
        self.like = _check_model(model)
        _check_data(inputs, targets, self.like)
        if not callable(loss) and loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)} or a callable, got {loss!r}")
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
        self.model, self.inputs, self.loss = model, inputs.detach(), loss
        self.n_samples = len(inputs)
        self.batch_size = min(batch_size or self.n_samples, self.n_samples)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.state = {name: tensor.detach().clone() for name, tensor in tensors}
        self.n_classes = self._count_classes()
        self.targets = targets if callable(loss) else _targets(targets, self)

    def batches(self) -> Iterator[slice]:
        """The rows of each batch."""
        for start in range(0, self.n_samples, self.batch_size):
            yield slice(start, min(start + self.batch_size, self.n_samples))

    def leaves(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The named parameters, to be differentiated in."""
        return {name: self.state[name].detach().requires_grad_() for name in names}

    def outputs(self, rows: slice, leaves: Mapping[str, Tensor]) -> Tensor:
        """Outputs for some rows, ``leaves`` in place of the parameters of their names."""
        # A copy: a model may overwrite its input.
        given = self.inputs[rows].clone()
        with sdpa_kernel(SDPBackend.MATH):  # attention that can be differentiated twice
            outputs = functional_call(self.model, {**self.state, **leaves}, (given,))
        if not isinstance(outputs, Tensor):
            raise TypeError(f"the model must return a tensor, got {type(outputs).__name__}")
        return outputs

    def mean_loss(self, outputs: Tensor, rows: slice) -> Tensor:
        """The loss of some rows, a mean over them."""
        targets = self.targets[rows]
        if callable(self.loss):
            return _checked_scalar(self.loss(outputs, targets))
        if self.loss == "mse":
            return (outputs - targets).square().sum(1).mean() / 2
        return functional.cross_entropy(outputs, targets)

    @torch.no_grad()
    def probabilities(self) -> Tensor:
        """Softmax of the outputs, ``[N, K]``."""
        return torch.cat([self.outputs(rows, {}) for rows in self.batches()]).softmax(1)

    def operator(
        self, multiply: Callable[[Tensor], Tensor], size: int, method: str
    ) -> CurvatureOperator:
        """An operator in this problem's dtype and device."""
        like = self.like
        return CurvatureOperator(
            multiply, size, dtype=like.dtype, device=like.device, method=method
        )

    @torch.no_grad()
    def _count_classes(self) -> int:
        rows = next(self.batches())
        outputs = self.outputs(rows, {})
        if self.model.training and not torch.allclose(
            outputs, self.outputs(rows, {}), rtol=1e-3, equal_nan=True
        ):
            raise ValueError("two passes of the model differ: call model.eval() first")
        return _check_outputs(outputs, rows.stop, self)


def _check_model(model: nn.Module) -> Tensor:
    """The model's first parameter, after a look at all of them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    named = dict(model.named_parameters())
    if not named:
        raise ValueError("the model has no parameters")
    like = next(iter(named.values()))
    for name, parameter in named.items():
        if parameter.dtype not in DTYPES or parameter.dtype != like.dtype:
            raise TypeError(
                f"parameter {name} is {parameter.dtype}: all must be float32, or all float64; "
                "call model.float() or model.double()"
            )
        if not parameter.isfinite().all():
            raise ValueError(f"parameter {name} holds NaN or infinite numbers")
    for name, module in model.named_modules():
        _check_module(name, module)
    return like.detach()


def _check_module(name: str, module: nn.Module) -> None:
    """Refuse what is random or mixes samples: there is no Hessian of one fixed function then."""
    kind = type(module).__name__
    normal = isinstance(module, nn.modules.batchnorm._BatchNorm)
    if module.training and (normal or _drops(module)):
        raise ValueError(f"{kind} {name!r} is in training mode: call model.eval() first")
    if normal and module.running_mean is None:
        raise ValueError(f"{kind} {name!r} has no running statistics, so it mixes the samples")


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rate = getattr(module, "dropout", 0)  # a number in attention and recurrent layers
    return isinstance(module, nn.RReLU) or (isinstance(rate, float) and rate > 0)


def _check_data(inputs: Tensor, targets: Tensor, like: Tensor) -> None:
    for name, tensor in {"inputs": inputs, "targets": targets}.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim == 0 or len(tensor) == 0:
            raise ValueError(f"{name} must hold at least one sample, got {list(tensor.shape)}")
        if tensor.device != like.device:
            raise ValueError(f"{name} are on {tensor.device}, the model on {like.device}")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} hold NaN or infinite numbers")
    if len(inputs) != len(targets):
        raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets")
    if inputs.is_floating_point() and inputs.dtype != like.dtype:
        raise TypeError(f"inputs are {inputs.dtype}, the model {like.dtype}: call .to()")


def _check_outputs(outputs: Tensor, n: int, problem: Problem) -> int:
    """The number of outputs a sample."""
    if outputs.dtype != problem.like.dtype:
        raise TypeError(
            f"the model's outputs are {outputs.dtype}, its parameters {problem.like.dtype}: "
            "leave torch.autocast"
        )
    if not outputs.isfinite().all():
        raise ValueError("the model's outputs hold NaN or infinite numbers")
    if callable(problem.loss):
        return outputs.shape[-1] if outputs.ndim else 1
    if outputs.ndim != 2 or len(outputs) != n:
        raise ValueError(f"outputs must be [{n}, K] for {n} inputs, got {list(outputs.shape)}")
    if outputs.shape[1] < 2:
        raise ValueError("the model has one output: K = 1 is no classifier, K ≥ 2 is needed")
    return outputs.shape[1]


def _targets(targets: Tensor, problem: Problem) -> Tensor:
    """Targets as the loss takes them: classes ``[N]`` or an array ``[N, K]`` like the outputs."""
    k, mse = problem.n_classes, problem.loss == "mse"
    if targets.is_floating_point():
        if targets.shape != (problem.n_samples, k):
            shape = list(targets.shape)
            raise ValueError(f"floating targets must be [{problem.n_samples}, {k}], got {shape}")
        targets = targets.detach().to(problem.like.dtype, copy=True)
        if not mse:
            _check_probabilities(targets)
        return targets
    labels = _labels(targets, k)
    return functional.one_hot(labels, k).to(problem.like.dtype) if mse else labels


def _check_probabilities(targets: Tensor) -> None:
    if (targets < 0).any() or (targets.sum(1) - 1).abs().max() > 1e-4:
        raise ValueError("floating targets of cross_entropy must be probabilities, each row's 1")


def _labels(targets: Tensor, k: int) -> Tensor:
    if targets.dtype == torch.bool or targets.is_complex():
        raise TypeError(f"targets must be integer classes or floating, got {targets.dtype}")
    if targets.ndim != 1:
        shape = list(targets.shape)
        raise ValueError(f"integer targets must be classes [N], got {shape}; or call .float()")
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= k:
        raise ValueError(f"targets must be in 0…{k - 1} for {k} outputs, got {low}…{high}")
    return targets.long()


def _checked_scalar(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the loss must return a scalar tensor, a mean over samples, got {shape}")
    return value


def class_labels(targets: Tensor, n_classes: int) -> Tensor:
    """Classes ``[N]`` of integer targets ``[N]`` or one-hot targets ``[N, K]``.

    Raises:
        ValueError: a row is not one-hot.
    """
    if not targets.is_floating_point():
        return targets.long()
    labels = targets.argmax(1)
    if not torch.equal(targets, functional.one_hot(labels, n_classes).to(targets.dtype)):
        raise ValueError("targets must name one class a sample: integers [N] or one-hot [N, K]")
    return labels


# Layers and parameters by name


class Site(NamedTuple):
    """A layer in its model.

    - ``name``: the layer's dotted name,
    - ``module``: the layer,
    - ``weight``: the name of its weight in ``named_parameters()``,
    - ``shared``: whether another module holds the same weight.
    """

    name: str
    module: nn.Linear | nn.Conv2d
    weight: str
    shared: bool


def find_layer(model: nn.Module, layer: nn.Module | str) -> Site:
    """The layer's place in the model.

    Raises:
        ValueError: it is not in the model, not ``Linear`` or ``Conv2d``, or its weight is not a
            parameter.
    """
    name, module = _find_module(model, layer)
    if not isinstance(module, WEIGHTED):
        raise ValueError(
            f"layer {name!r} is a {type(module).__name__}, not Linear or Conv2d; {_known(model)}"
        )
    names = [n for n, p in model.named_parameters() if p is module.weight]
    if not names:
        raise ValueError(
            f"the weight of layer {name!r} is computed from other parameters: remove its "
            "parametrization first"
        )
    holders = [m for m in model.modules() if any(p is module.weight for p in m.parameters(False))]
    return Site(name, module, names[0], len(holders) > 1)


def _find_module(model: nn.Module, layer: nn.Module | str) -> tuple[str, nn.Module]:
    if not isinstance(layer, nn.Module | str):
        kind = type(layer).__name__
        raise TypeError(f"layer must be a module of the model or its name, got {kind}")
    for name, module in model.named_modules(remove_duplicate=False):
        if module is layer or name == layer:
            return name, module
    shown = repr(layer) if isinstance(layer, str) else type(layer).__name__
    raise ValueError(f"layer {shown} is not in the model; {_known(model)}")


def _known(model: nn.Module) -> str:
    names = [name for name, module in model.named_modules() if isinstance(module, WEIGHTED)]
    return f"its layers are: {', '.join(map(repr, names)) or 'none'}"


def _chosen(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    known = [name for name, _ in model.named_parameters()]
    if names is None:
        return known
    if isinstance(names, str) or not names:
        raise ValueError("parameters must be a sequence of one name or more")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no parameter {unknown[0]!r} in the model, which has {', '.join(known)}")
    return [name for name in known if name in names]


# Products through autograd


class RetainedGraph:
    """Hessian products through gradients that keep their graph, one graph a batch."""

    def __init__(self, problem: Problem, names: Sequence[str]) -> None:
        self.leaves = list((leaves := problem.leaves(names)).values())
        self.size = sum(leaf.numel() for leaf in self.leaves)
        self.graphs = [self._graph(problem, rows, leaves) for rows in problem.batches()]
        self.batched = _is_small(problem)

    def __call__(self, stack: Tensor) -> Tensor:
        """Products of the rows of ``stack`` ``[b, P]``."""
        total = torch.zeros_like(stack)
        parts = _split(stack, self.leaves)
        for share, gradients in self.graphs:
            if gradients:
                directions = [parts[i] for i in gradients]
                total.add_(self._products([*gradients.values()], directions), alpha=share)
        return total

    def _graph(
        self, problem: Problem, rows: slice, leaves: Mapping[str, Tensor]
    ) -> tuple[float, dict[int, Tensor]]:
        """The batch's share of the samples, and the gradients that depend on parameters."""
        loss = problem.mean_loss(problem.outputs(rows, leaves), rows)
        gradients = enumerate(_gradients(loss, leaves))
        alive = {i: g for i, g in gradients if g is not None and g.requires_grad}
        return (rows.stop - rows.start) / problem.n_samples, alive

    def _products(self, gradients: list[Tensor], directions: list[Tensor]) -> Tensor:
        """``[b, P]`` for directions ``[b, ...]``."""
        b = len(directions[0])
        if b > 1 and self.batched:
            try:
                products = self._backward(gradients, directions, True)
            except RuntimeError:  # an operation of the user's has no rule for vmap
                self.batched = False
            else:
                return self._flat(products, b)
        columns = ([direction[i] for direction in directions] for i in range(b))
        return torch.cat([self._flat(self._backward(gradients, c, False), 1) for c in columns])

    def _backward(
        self, gradients: list[Tensor], directions: list[Tensor], batched: bool
    ) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            gradients,
            self.leaves,
            directions,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )

    def _flat(self, products: tuple[Tensor | None, ...], b: int) -> Tensor:
        """Products of all parameters side by side, ``[b, P]``; zeros where there is none."""
        parts = [
            leaf.new_zeros(b, leaf.numel()) if part is None else part.reshape(b, leaf.numel())
            for part, leaf in zip(products, self.leaves, strict=True)
        ]
        return torch.cat(parts, 1)


def _is_small(problem: Problem) -> bool:
    """Whether columns should go through the graph together; see ``BATCHED_WORK``."""
    weights = sum(p.numel() for p in problem.model.parameters())
    convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in problem.model.modules())
    return not convolves and problem.batch_size * weights <= BATCHED_WORK


def _gradients(loss: Tensor, leaves: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients with their graph; None for a parameter that is not reached."""
    found: tuple[Tensor | None, ...] = ()
    if loss.requires_grad:
        found = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=True, allow_unused=True
        )
    if all(gradient is None for gradient in found):
        raise ValueError(f"the loss does not depend on {', '.join(leaves)}: is it used at all?")
    return found


def _split(stack: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Rows ``[b, P]`` cut into ``[b, *shape]`` of each parameter."""
    parts = stack.split([leaf.numel() for leaf in leaves], 1)
    return [part.view(-1, *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]


# Jacobians of the outputs


class Jacobian(Protocol):
    """Gauss–Newton products of ``size`` parameters."""

    @property
    def size(self) -> int: ...

    def product(self, stack: Tensor, probabilities: Tensor | None) -> Tensor: ...


class GraphJacobian:
    """Jacobian through retained graphs: double backward for ``J v``, one pass for ``Jᵀu``."""

    def __init__(self, problem: Problem, names: Sequence[str]) -> None:
        leaves = problem.leaves(names)
        self.leaves = list(leaves.values())
        self.size = sum(leaf.numel() for leaf in self.leaves)
        self.n_samples = problem.n_samples
        self.graphs = [(rows, *self._graph(problem, rows, leaves)) for rows in problem.batches()]

    def _graph(
        self, problem: Problem, rows: slice, leaves: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, list[tuple[int, Tensor]]]:
        """Outputs, a dummy cotangent u, and the parts of ``Jᵀu`` that are not zero."""
        outputs = problem.outputs(rows, leaves)
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = _gradients((outputs * u).sum(), leaves)
        return outputs, u, [(i, g) for i, g in enumerate(pulled) if g is not None]

    def product(self, stack: Tensor, probabilities: Tensor | None) -> Tensor:
        """``(1/N) Σ_i J_iᵀ S_i J_i v`` for the rows v of ``stack``."""
        total = torch.zeros_like(stack)
        for rows, outputs, u, pulled in self.graphs:
            p = None if probabilities is None else probabilities[rows]
            for into, *v in zip(total, *_split(stack, self.leaves), strict=True):
                pushed = self._push(u, pulled, v)
                into.add_(self._pull(outputs, output_curvature(pushed, p)))
        return total.div_(self.n_samples)

    def _push(self, u: Tensor, pulled: list[tuple[int, Tensor]], v: list[Tensor]) -> Tensor:
        gradients = [g for _, g in pulled]
        directions = [v[i] for i, _ in pulled]
        return torch.autograd.grad(gradients, u, directions, retain_graph=True)[0]  # [n, K]

    def _pull(self, outputs: Tensor, cotangent: Tensor) -> Tensor:
        parts = torch.autograd.grad(
            outputs, self.leaves, cotangent, retain_graph=True, materialize_grads=True
        )
        return torch.cat([part.flatten() for part in parts])


def output_curvature(c: Tensor, p: Tensor | None) -> Tensor:
    """``S c`` over the last dimension: ``c`` itself, or ``(diag(p) − p pᵀ) c``."""
    if p is None:
        return c
    weighted = c * p
    return weighted - p * weighted.sum(-1, keepdim=True)


@dataclass(frozen=True)
class FactoredJacobian:
    """Jacobians ``J_i[k] = Σ_l backward[i, k, l] ⊗ features[i, l]`` of a layer's weight.

    Attributes:
        backward: ``[N, K, L, O]``, derivatives of the K outputs in the pre-activations of the L
            positions; L = 1 for a linear layer.
        features: ``[N, L, I]``, what the layer reads there.
    """

    backward: Tensor
    features: Tensor

    @property
    def size(self) -> int:
        """The number P = O·I of weights."""
        return self.backward.shape[3] * self.features.shape[2]

    def written_out(self) -> DenseJacobian:
        """The Jacobians as such."""
        rows = torch.einsum("nklo,nli->nkoi", self.backward, self.features)
        return DenseJacobian(rows.flatten(2))

    def product(self, stack: Tensor, probabilities: Tensor | None) -> Tensor:
        """``(1/N) Σ_i J_iᵀ S_i J_i v`` for the rows v of ``stack``."""
        if self.backward.shape[2] == 1:
            a, h = self.backward[:, :, 0], self.features[:, 0]
            v = stack.view(-1, a.shape[2], h.shape[1])  # [B, O, I]
            return gauss_newton_product(a, h, v, probabilities).reshape(stack.shape)
        return blocked_product(self, stack, probabilities)

    def block_rows(self, b: int) -> int:
        """Samples whose share of the factors and of ``V h`` fills a block."""
        _, k, positions, o = self.backward.shape
        row = positions * (k * o + self.features.shape[2] + 2 * b * o)
        return max(1, BLOCK_BYTES // (row * self.features.element_size()))

    def apply(self, stack: Tensor, rows: slice | Tensor) -> Tensor:
        """``J_i v``, ``[n, B, K]``, for the B rows v of ``stack`` and some samples i."""
        a, h = self.backward[rows], self.features[rows]
        n, _, positions, o = a.shape
        v = stack.view(-1, h.shape[2])  # [B·O, I]
        u = (h.flatten(0, 1) @ v.mT).view(n, positions, -1, o)  # [n, L, B, O]
        return u.transpose(1, 2).flatten(2) @ a.flatten(2).mT

    def transpose(self, c: Tensor, rows: slice | Tensor) -> Tensor:
        """``Σ_i J_iᵀ c_i``, ``[B, P]``, for ``c`` ``[n, B, K]``."""
        a, h = self.backward[rows], self.features[rows]
        n, _, positions, o = a.shape
        s = (c @ a.flatten(2)).view(n, c.shape[1], positions, o).transpose(1, 2)  # [n, L, B, O]
        return (s.flatten(2).flatten(0, 1).mT @ h.flatten(0, 1)).view(c.shape[1], -1)


@dataclass(frozen=True)
class DenseJacobian:
    """Jacobians written out, for convolutions with more positions than outputs.

    Attributes:
        rows: ``[N, K, P]``.
    """

    rows: Tensor

    @property
    def size(self) -> int:
        """The number P of weights."""
        return self.rows.shape[2]

    def product(self, stack: Tensor, probabilities: Tensor | None) -> Tensor:
        """``(1/N) Σ_i J_iᵀ S_i J_i v`` for the rows v of ``stack``."""
        return blocked_product(self, stack, probabilities)

    def block_rows(self, b: int) -> int:
        """Samples whose Jacobians fill a block."""
        return max(1, BLOCK_BYTES // (self.rows[0].numel() * self.rows.element_size()))

    def apply(self, stack: Tensor, rows: slice | Tensor) -> Tensor:
        """``J_i v``, ``[n, B, K]``, for the B rows v of ``stack`` and some samples i."""
        part = self.rows[rows]
        return (part.flatten(0, 1) @ stack.mT).view(len(part), -1, len(stack)).mT

    def transpose(self, c: Tensor, rows: slice | Tensor) -> Tensor:
        """``Σ_i J_iᵀ c_i``, ``[B, P]``, for ``c`` ``[n, B, K]``."""
        return c.transpose(0, 1).flatten(1) @ self.rows[rows].flatten(0, 1)


LayerJacobian = FactoredJacobian | DenseJacobian


def blocks(n: int, rows: int) -> Iterator[slice]:
    """Slices of ``rows`` out of n."""
    return (slice(start, start + rows) for start in range(0, n, rows))


def blocked_product(jacobian: LayerJacobian, stack: Tensor, p: Tensor | None) -> Tensor:
    """``(1/N) Σ_i J_iᵀ S_i J_i v``, a block of samples at a time: factors are read once."""
    n = len(jacobian.rows if isinstance(jacobian, DenseJacobian) else jacobian.backward)
    total = torch.zeros_like(stack)
    for rows in blocks(n, jacobian.block_rows(len(stack))):
        c = jacobian.apply(stack, rows)
        total += jacobian.transpose(output_curvature(c, None if p is None else p[rows, None]), rows)
    return total.div_(n)


# Factors of one layer


class CannotFactor(ValueError):
    """The layer's Jacobian is not a sum of products known from one pass."""


def layer_jacobian(problem: Problem, site: Site) -> LayerJacobian:
    """Factors of a layer's Jacobian, by K backward passes a batch.

    Raises:
        CannotFactor: see ``layer_hessian``.
        ValueError: the outputs do not depend on the layer.
    """
    if site.shared:
        raise CannotFactor(f"the weight of layer {site.name!r} is shared: {OTHERWISE}")
    if getattr(site.module, "groups", 1) != 1:
        raise CannotFactor(f"layer {site.name!r} is grouped: {OTHERWISE}")
    parts = [_factors(problem, site, rows) for rows in problem.batches()]
    if isinstance(parts[0], DenseJacobian):
        return DenseJacobian(_joined([part.rows for part in parts]))
    backward = _joined([part.backward for part in parts])
    return FactoredJacobian(backward, _joined([part.features for part in parts]))


OTHERWISE = 'use method="autograd"'


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _factors(problem: Problem, site: Site, rows: slice) -> Any:
    """The factors of one batch."""
    leaves = problem.leaves([site.weight])
    outputs, read, z = _pass(problem, site, rows, leaves)
    dense = _plan(problem, site, read, z, len(outputs))
    factors = FactoredJacobian(_backward(outputs, z), _features(site.module, read))
    if rows.start == 0:
        _check_factors(site, factors, outputs, leaves[site.weight])
    return factors.written_out() if dense else factors


def _pass(
    problem: Problem, site: Site, rows: slice, leaves: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and what the layer reads and returns on the way to them."""
    calls: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> Tensor:
        read = (*args, *kwargs.values())[0]
        calls.append((read.detach(), z))
        return z.clone()  # what follows may overwrite it

    handle = site.module.register_forward_hook(keep, with_kwargs=True)
    try:
        outputs = problem.outputs(rows, leaves)
    finally:
        handle.remove()
    if not outputs.requires_grad:
        raise ValueError(f"the outputs do not depend on layer {site.name!r}: is it used at all?")
    if len(calls) != 1:
        raise CannotFactor(f"layer {site.name!r} is used {len(calls)} times a pass: {OTHERWISE}")
    return outputs, *calls[0]


def _plan(problem: Problem, site: Site, read: Tensor, z: Tensor, n: int) -> bool:
    """Whether to write the Jacobian out; refuses shapes and sizes before their allocation."""
    conv = isinstance(site.module, nn.Conv2d)
    if read.ndim != (4 if conv else 2) or len(read) != n:
        what = "[N, C, H, W]" if conv else "[N, I]"
        shape = list(read.shape)
        raise CannotFactor(f"layer {site.name!r} reads {shape}, not {what}: {OTHERWISE}")
    k, (o, i) = problem.n_classes, site.module.weight.flatten(1).shape
    positions = z[0].numel() // o
    factors, written = positions * (k * o + i) * z.element_size(), k * o * i * z.element_size()
    # Multiplications a sample, direction and output channel: written out K·I, else L·(K + I).
    dense = k * i < positions * (k + i) and problem.n_samples * written <= MEMORY_LIMIT
    size = (problem.batch_size if dense else problem.n_samples) * factors
    if size > MEMORY_LIMIT:
        raise CannotFactor(
            f"the factors of layer {site.name!r} would take {size / 2**30:.1f} GiB, more than "
            f"{MEMORY_LIMIT / 2**30:.1f}: "
            + ("give a smaller batch_size" if dense else OTHERWISE + " (and a batch_size)")
        )
    return dense


def _features(module: nn.Module, read: Tensor) -> Tensor:
    """What the layer reads at each position, ``[n, L, I]``."""
    if isinstance(module, nn.Linear):
        return read[:, None]
    assert isinstance(module, nn.Conv2d)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = functional.pad(read, module._reversed_padding_repeated_twice, mode)
    patches = functional.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
    return patches.mT.contiguous()


def _backward(outputs: Tensor, z: Tensor) -> Tensor:
    """``∂ outputs / ∂ z``, ``[n, K, L, O]``, one pass an output."""
    n, k = outputs.shape
    o = z.shape[1]
    backward = z.new_empty(n, k, z[0].numel() // o, o)
    totals = outputs.sum(0)
    for index in range(k):
        found = torch.autograd.grad(totals[index], z, retain_graph=True, materialize_grads=True)[0]
        backward[:, index] = found.reshape(n, o, -1).mT
    return backward


def _check_factors(site: Site, jacobian: FactoredJacobian, outputs: Tensor, weight: Tensor) -> None:
    """Compare ``Jᵀu`` for random u with autograd's.

    It differs if the weight is used outside of the layer, or if the model mixes samples.
    """
    u = _random(tuple(outputs.shape), outputs)
    true = torch.autograd.grad(outputs, weight, u)[0].flatten()
    ours = jacobian.transpose(u[:, None], slice(None))[0]
    if (true - ours).norm() > 10 * AGREEMENT[true.dtype] * torch.maximum(true.norm(), ours.norm()):
        raise CannotFactor(
            f"the weight of layer {site.name!r} is used elsewhere, or samples are mixed: "
            f"{OTHERWISE}"
        )
