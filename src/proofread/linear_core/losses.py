"""Multi-class Linear-Core loss with the conventions of ``torch.nn.functional.cross_entropy``.

For logits ``h`` in R^K, a target ``y`` and a surrogate ``Φ`` of ``surrogates.LinearCore``:

* ``form="constrained"`` (Lee, Lin and Wahba 2004): ``Σ_{y'≠y} Φ(-h̃_{y'})`` with
  ``h̃ = h - mean(h)``, after Lee, Lin and Wahba (2004);
* ``form="sum"``: ``Σ_{y'≠y} Φ(h_y - h_{y'})``, the sum over margins.

Both need one look at every logit. With ``a_j = h_j + τ - c`` (``c`` the mean, or ``h_y``) a term is
``max(a_j, 0)`` plus the tail at ``v = max(-a_j, 0)/s``, and its slope ``g_j`` is 1 in the core.
The gradient is ``g_j - (Σg)/K``, or ``g_j`` with ``-Σg`` at the target. So the forward pass makes
the gradient too, row block by row block while the block is in cache, and the backward pass has
nothing left to do unless the incoming gradient differs from 1.

In place, the gradient takes the memory of the logits: each block is read before it is written. What
that saves is fresh memory as large as the logits, which costs more than the arithmetic.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from proofread import triton_support

from .surrogates import FAR_TAIL, LinearCore

FORMS = ("constrained", "sum")
REDUCTIONS = ("none", "sum", "mean")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# One fp32 buffer of 768 KiB, so that input, buffer and gradient stay near a 2 MiB L2 cache. Below
# 64 KiB the cost of calling an operator shows. (A GPU wants few large blocks instead.)
CPU_BLOCK = 192 * 1024
CUDA_BLOCK = 64 * 1024 * 1024

# A smaller scale counts as this one: 1/s must be finite, and the loss is the hinge's by then.
LEAST_SCALE = {torch.float32: 1e-30, torch.float64: 1e-290}


def linear_core_loss(
    logits: Tensor,
    target: Tensor,
    *,
    core: float = 1.0,
    scale: float = 1.0,
    tail: str = "exponential",
    form: str = "constrained",
    reduction: str = "mean",
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
    inplace: bool = False,
) -> Tensor:
    """Linear-Core loss; replaces ``F.cross_entropy(logits, target)`` in a training loop.

    Args:
        logits: ``[N, K]``, ``[N, K, d1, ...]`` or ``[K]`` scores, K ≥ 2; float16, bfloat16
            (computed in float32), float32 or float64. Any strides. Never overwritten unless
            ``inplace`` says so.
        target: ``[N]``, ``[N, d1, ...]`` or ``[]`` class indices, any integer type.
        core: ``τ > 0``, end of the surrogate's linear part.
        scale: ``s > 0``, decay length of its tail.
        tail: ``"exponential"``, ``"gamma"`` or ``"logistic"``.
        form: ``"constrained"`` or ``"sum"``.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``: over the targets that are not ignored, and
            weighted by ``class_weight[target]``, as for cross-entropy.
        ignore_index: target value whose rows count for nothing, whatever they hold.
        class_weight: ``[K]`` weights, any floating dtype; a constant, no gradient flows to it.
        inplace: the gradient takes the memory of the logits, which this call consumes; see below.

    Returns:
        A scalar, or a tensor of the target's shape for ``"none"``. Its dtype is that of the logits,
        or float32 for half-precision logits under autocast (as for cross-entropy). The mean over
        nothing is NaN, with zero gradients.

    **Which form.** The constrained form carries the linear consistency bound, for a complete set of
    scores. A clear winner needs a score of the order of ``K·core`` there, so with many classes, or
    a small network, it underfits where ``form="sum"`` does not. The sum form has no linear bound
    for K ≥ 3, and trains about as cross-entropy does: try it first for accuracy on clean labels.

    The loss is a sum over K - 1 classes: at equal logits it is ``(K-1)·Φ(0)``. In float16 it
    overflows to ``inf`` from K = 32,753 or so (its gradient does not): use autocast or float32
    logits there.

    NaN and infinite logits are never turned into a finite loss. In the constrained form a row with
    a logit of ±∞ has no mean, so its loss and gradient are NaN: masking classes by ``-inf`` is
    undefined there. In the sum form a ``-inf`` logit contributes nothing, except at the target.
    Finite logits whose sum overflows are averaged all the same, except by the Triton kernel, where
    such a row is NaN.

    A scale below 1e-30 (float64: 1e-290) counts as that: the hinge, to working precision.

    The first and second derivatives are supported (``create_graph=True``); the second exists away
    from the stitch for C¹ tails and everywhere for ``"gamma"``. Under the transforms of
    ``torch.func`` the formula is evaluated in plain differentiable operations: same values, more
    memory, and a target out of range is an error of ``scatter``. ``torch.compile`` leaves its graph
    for the call.

    **In place.** With ``inplace=True`` values and gradients are the same bit for bit, and no memory
    as large as the logits is allocated (unless the gradient that arrives in ``backward`` is not
    1, or the graph is retained: then it goes to fresh memory). Hooks on the logits, or on tensors
    and modules between them and what they view, see the gradient as usual. The call consumes the
    logits. Afterwards the variable
    is an empty tensor of shape ``[0]``, so that nobody takes gradients for scores: compute
    accuracies before. In ``backward`` every other use of the logits is an error where autograd
    needs their values, or came after the call; so are second derivatives. What cannot be guarded
    are plain reads through an alias made earlier (``logits.detach()``, a NumPy array, another view
    of the same tensor): they show the gradient. Leaves and views of them are refused; so is memory
    that does not hold exactly the rows one after the other. Where no gradient is asked for (under
    ``no_grad``, or logits that require none) nothing is consumed.

    Raises:
        TypeError: logits not floating, targets not integer, weights not floating, any of them no
            dense torch tensor; ``ignore_index`` not an integer.
        ValueError: shapes, devices, K < 2, unknown options, ``core`` or ``scale`` not positive or
            asking for a gradient; ``inplace=True`` with logits that cannot be overwritten.
        IndexError: a target outside [0, K) that is not ``ignore_index``.
        RuntimeError: in ``backward``, for logits that were used after they were consumed, and for
            second derivatives of an in-place loss.

    Example:
        >>> logits = torch.zeros(2, 3, requires_grad=True)
        >>> linear_core_loss(logits, torch.tensor([0, 2]))  # (K - 1)·Φ(0) = 2·2
        tensor(4., grad_fn=<SumBackward0>)
    """
    surrogate = _surrogate(core, scale, tail)
    ignore_index = _check_options(form, reduction, ignore_index)
    _check_tensors(logits, target, class_weight)
    surrogate = _with_finite_steepness(surrogate, _work_dtype(logits.dtype))
    if torch._C._are_functorch_transforms_active():
        if inplace:
            raise ValueError("inplace=True has no meaning under torch.func: use inplace=False")
        settings = _Settings(surrogate, form, ignore_index)
        return _plain_loss(logits, target, class_weight, settings, reduction)
    with_grad = torch.is_grad_enabled() and logits.requires_grad
    owner = _owner_of_memory(logits) if inplace and with_grad else None
    rows, flat = _as_rows(logits, target)
    labels = _checked_labels(flat, rows.shape[1], ignore_index, class_weight)
    # The mean's divisor goes into the gradient, so that backward has nothing to multiply. Not in
    # float16: small gradients would be lost before a gradient scaler can lift them.
    early = reduction == "mean" and labels.total != 0 and logits.dtype != torch.float16
    settings = _Settings(
        surrogate=surrogate,
        form=form,
        ignore_index=ignore_index,
        factor=1 / labels.total if early else 1.0,
        with_grad=with_grad,
        inplace=owner is not None,
    )
    if owner is None:
        losses = _RowLoss.apply(rows, labels, class_weight, settings)
    else:
        losses = _consume(logits, owner, rows.shape, labels, class_weight, settings)
    loss = _reduce(losses, reduction, 1.0 if early else labels.total)
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    return loss.to(_result_dtype(logits))


class _Settings(NamedTuple):
    """What a pass over the logits needs to know besides the tensors."""

    surrogate: LinearCore
    form: str
    ignore_index: int
    factor: float = 1.0  # multiplies every row's loss
    with_grad: bool = True
    inplace: bool = False  # the gradient overwrites the logits


class _Labels(NamedTuple):
    """Targets that were checked."""

    target: Tensor  # [N] as given
    label: Tensor  # [N, 1], 0 where the target is ignored; a copy: targets may be overwritten
    counted: Tensor | None  # [N] bool, None when no target is ignored
    total: float  # sum of the counted targets' weights


class LinearCoreLoss(nn.Module):
    """Module twin of ``linear_core_loss``: same arguments, same results, same errors.

    ``class_weight`` is a buffer, so it moves with the module.

    Example:
        >>> criterion = LinearCoreLoss(core=1.0, scale=0.5)
        >>> criterion(torch.zeros(4, 10), torch.arange(4))
        tensor(13.5000)
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        core: float = 1.0,
        scale: float = 1.0,
        tail: str = "exponential",
        form: str = "constrained",
        reduction: str = "mean",
        ignore_index: int = -100,
        class_weight: Tensor | None = None,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        self.surrogate = _surrogate(core, scale, tail)
        ignore_index = _check_options(form, reduction, ignore_index)
        if class_weight is not None:
            _check_weight(class_weight, None)
        self.form, self.reduction, self.ignore_index = form, reduction, ignore_index
        self.inplace = inplace
        self.register_buffer("class_weight", class_weight)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of ``logits`` and ``target``; see ``linear_core_loss``."""
        return linear_core_loss(
            logits,
            target,
            core=self.surrogate.core,
            scale=self.surrogate.scale,
            tail=self.surrogate.tail,
            form=self.form,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            class_weight=self.class_weight,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        phi = self.surrogate
        return (
            f"core={phi.core}, scale={phi.scale}, tail={phi.tail!r}, form={self.form!r}, "
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"inplace={self.inplace}"
        )


# --- checks ---------------------------------------------------------------------------------------


def _surrogate(core: float, scale: float, tail: str) -> LinearCore:
    for name, value in (("core", core), ("scale", scale)):
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"{name} is a constant of the loss, no gradient flows to it: pass {name}.item()"
            )
    return LinearCore(core, scale, tail)


def _check_options(form: str, reduction: str, ignore_index: int) -> int:
    """Return ``ignore_index`` as a plain int."""
    if form not in FORMS:
        raise ValueError(f"form must be one of {FORMS}, got {form!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    try:
        return operator.index(ignore_index)
    except TypeError:
        raise TypeError(
            f"ignore_index must be an integer, got {ignore_index!r}: leave it at -100 to ignore "
            "nothing"
        ) from None


def _check_dense(name: str, value: Any) -> None:
    """Refuse arrays, lists, and sparse or nested tensors."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch tensor, got {type(value).__name__}: "
            f"pass torch.as_tensor({name})"
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name} must be dense, got {kind}: pass {name}.to_dense() or the like")


def _with_finite_steepness(surrogate: LinearCore, work: torch.dtype) -> LinearCore:
    least = LEAST_SCALE[work]
    return surrogate if surrogate.scale >= least else replace(surrogate, scale=least)


def _check_tensors(logits: Tensor, target: Tensor, class_weight: Tensor | None) -> None:
    _check_dense("logits", logits)
    _check_dense("target", target)
    if logits.dtype not in DTYPES:
        raise TypeError(f"logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target must hold integer class indices, got {target.dtype}")
    if logits.dim() == 0:
        raise ValueError("logits must have a class dimension: [K], [N, K] or [N, K, d1, ...]")
    classes = logits.shape[min(1, logits.dim() - 1)]
    if classes < 2:
        consumed = logits.shape == (0,) and logits.requires_grad
        raise ValueError(
            f"logits must have at least 2 classes, got K = {classes}"
            + (": an earlier inplace=True consumed them, use inplace=False" if consumed else "")
        )
    expected = logits.shape[:1] + logits.shape[2:] if logits.dim() > 1 else torch.Size()
    if target.shape != expected:
        raise ValueError(
            f"target must have shape {tuple(expected)} for logits of shape {tuple(logits.shape)}, "
            f"got {tuple(target.shape)}"
        )
    _check_device("target", target, logits)
    if class_weight is not None:
        _check_weight(class_weight, classes)
        _check_device("class_weight", class_weight, logits)


def _check_device(name: str, tensor: Tensor, logits: Tensor) -> None:
    if tensor.device != logits.device:
        raise ValueError(
            f"{name} is on {tensor.device} but logits are on {logits.device}: move one of them"
        )


def _check_weight(class_weight: Tensor, classes: int | None) -> None:
    """``classes`` is None where their number is not yet known."""
    _check_dense("class_weight", class_weight)
    if not class_weight.is_floating_point():
        raise TypeError(f"class_weight must be floating point, got {class_weight.dtype}")
    if classes is None and (class_weight.dim() != 1 or len(class_weight) < 2):
        raise ValueError(
            "class_weight must have shape [K] with at least 2 classes, got "
            f"{tuple(class_weight.shape)}"
        )
    if classes is not None and class_weight.shape != (classes,):
        raise ValueError(
            f"class_weight must have shape ({classes},), got {tuple(class_weight.shape)}"
        )
    if class_weight.requires_grad:
        raise ValueError("class_weight is a constant of the loss: pass class_weight.detach()")


def _owner_of_memory(logits: Tensor) -> Tensor:
    """The tensor whose memory is exactly that of the logits: themselves, or what they view.

    Raises:
        ValueError: they cannot be overwritten.
    """
    base = logits._base if logits._is_view() else None
    owner = logits if base is None else base
    if logits.is_leaf or owner.is_leaf:
        raise ValueError(
            "inplace=True cannot overwrite a leaf that requires grad, or a view of one: "
            "pass logits.clone(), or inplace=False"
        )
    if logits.retains_grad or owner.retains_grad:
        raise ValueError(
            "inplace=True overwrites the logits, so retain_grad() on them is in vain: "
            "use inplace=False"
        )
    rows = logits.movedim(1, -1) if logits.dim() > 2 else logits
    order = sorted(range(owner.dim()), key=owner.stride, reverse=True)
    if not (
        rows.is_contiguous()
        and owner.permute(order).is_contiguous()  # dense: no gaps, nothing twice
        and (owner.numel(), owner.storage_offset()) == (rows.numel(), rows.storage_offset())
    ):
        raise ValueError(
            "inplace=True needs logits that are contiguous, with classes last in memory, and not "
            f"a part of a larger tensor; got shape {tuple(logits.shape)}, strides "
            f"{logits.stride()}: pass them as a contiguous [N, K] copy, or inplace=False"
        )
    return owner


def _checked_labels(
    target: Tensor, classes: int, ignore_index: int, class_weight: Tensor | None
) -> _Labels:
    """Check the targets' range, find the ignored ones and the total weight: one device sync."""
    if not len(target):
        return _Labels(target, target.clone()[:, None], None, 0.0)
    counted = target != ignore_index  # [N]
    label = torch.where(counted, target, 0)
    low, high = label.aminmax()
    facts = torch.stack([low, high, counted.sum()])
    if class_weight is not None:
        weights = class_weight.double()[label.clamp(0, classes - 1)].where(counted, 0)
        facts = torch.cat([facts.double(), weights.sum()[None]])
    least, most, count, *weight = facts.tolist()
    if least < 0 or most >= classes:
        value = label[(label < 0) | (label >= classes)][0].item()
        raise IndexError(
            f"target {value} is out of range for {classes} classes "
            f"(and is not ignore_index = {ignore_index})"
        )
    mask = None if count == len(target) else counted
    return _Labels(target, label[:, None], mask, float(weight[0] if weight else count))


# --- shapes, weights, reductions ------------------------------------------------------------------


def _as_rows(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Bring any accepted shape to ``[rows, K]`` and int64 ``[rows]``; autograd undoes it."""
    if logits.dim() == 1:
        logits = logits[None]
    elif logits.dim() > 2:
        logits = logits.movedim(1, -1).reshape(-1, logits.shape[1])
    return logits, target.reshape(-1).long()


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _result_dtype(logits: Tensor) -> torch.dtype:
    autocast = torch.is_autocast_enabled(logits.device.type)
    return _work_dtype(logits.dtype) if autocast else logits.dtype


def _reduce(rows: Tensor, reduction: str, total: float) -> Tensor:
    if reduction == "none":
        return rows
    if reduction == "sum" or total == 1:
        return rows.sum()
    return rows.sum() / total if total else rows.sum() + math.nan


# --- the pass over the logits ---------------------------------------------------------------------


class _RowLoss(torch.autograd.Function):
    """Weighted loss of each row; the gradient is made in the forward pass and kept."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        logits: Tensor,  # [N, K]
        labels: _Labels,
        class_weight: Tensor | None,  # [K]
        settings: _Settings,
    ) -> Tensor:  # [N]
        if class_weight is not None:
            class_weight = class_weight.to(_work_dtype(logits.dtype))
        rows, grad = _forward(logits, labels, class_weight, settings)
        ctx.save_for_backward(logits, class_weight, grad, labels.label, labels.counted)  # type: ignore[arg-type]
        ctx.settings = settings  # type: ignore[attr-defined]
        return rows

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def,override]
        logits, class_weight, grad, label, counted = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient must itself be differentiable
            slope = _differentiable_gradient(logits, label, counted, class_weight, ctx.settings)
            return (slope * upstream[:, None]).to(logits.dtype), None, None, None
        return _scale_rows(grad, upstream), None, None, None


def _consume(
    logits: Tensor,
    owner: Tensor,
    shape: torch.Size,
    labels: _Labels,
    class_weight: Tensor | None,
    settings: _Settings,
) -> Tensor:
    """Row losses of logits that are overwritten by their gradient, and emptied."""
    view = None if logits is owner else logits
    _, losses = _ConsumingRowLoss.apply(owner, view, shape, labels, class_weight, settings)
    if view is not None:
        logits.data = logits.new_empty(0)
    return losses


class _ConsumingRowLoss(torch.autograd.Function):
    """``_RowLoss`` whose gradient overwrites the logits.

    They are returned too, as autograd demands of what is modified: so it raises their version,
    which fails whoever saved them, and leads whoever uses them later to this ``backward``.

    The owner of the memory is what is modified, but the gradient goes to the logits that the caller
    passed. Where these are a view, whatever hangs between the two sees the gradient: hooks, and
    functions that return their input and change its gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        owner: Tensor,  # dense, holds [N, K] row by row
        view: Tensor | None,  # the logits, where they are a view of the owner
        shape: torch.Size,  # (N, K)
        labels: _Labels,
        class_weight: Tensor | None,  # [K]
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:  # [0], [N]
        memory = owner.detach()
        logits = owner if view is None else view
        ctx.size, ctx.stride = logits.size(), logits.stride()  # type: ignore[attr-defined]
        ctx.viewed = view is not None  # type: ignore[attr-defined]
        rows = memory.as_strided(shape, (shape[1], 1))
        if class_weight is not None:  # a copy: it might be a part of the logits
            class_weight = class_weight.to(_work_dtype(owner.dtype), copy=True)
        losses, _ = _forward(rows, labels, class_weight, settings)
        owner.data = owner.new_empty(0)
        ctx.mark_dirty(owner)
        ctx.set_materialize_grads(False)  # None says: not used
        ctx.save_for_backward(memory)
        ctx.shape = shape  # type: ignore[attr-defined]
        return owner, losses

    @staticmethod
    def backward(  # type: ignore[no-untyped-def,override]
        ctx, later: Tensor | None, upstream: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if later is not None:
            raise RuntimeError(
                "the logits were used after linear_core_loss(..., inplace=True) had overwritten "
                "them: use them before, or inplace=False"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_core_loss(..., inplace=True) has no second derivatives "
                "(create_graph=True): use inplace=False"
            )
        if upstream is None:
            return None, None, None, None, None, None
        (memory,) = ctx.saved_tensors
        rows = memory.as_strided(ctx.shape, (ctx.shape[1], 1))
        grad = _scale_rows(rows, upstream).as_strided(ctx.size, ctx.stride)
        to_owner, to_view = (None, grad) if ctx.viewed else (grad, None)
        return to_owner, to_view, None, None, None, None


def _forward(
    logits: Tensor, labels: _Labels, class_weight: Tensor | None, settings: _Settings
) -> tuple[Tensor, Tensor | None]:
    """Losses ``[N]`` and their gradients ``[N, K]``, by kernel or by blocks of rows."""
    if settings.form == "constrained" and triton_support.use_triton(logits):
        return _forward_kernel(logits, labels, class_weight, settings)
    return _forward_blocks(logits, labels, class_weight, settings)


def _forward_kernel(
    logits: Tensor, labels: _Labels, class_weight: Tensor | None, settings: _Settings
) -> tuple[Tensor, Tensor | None]:
    """The Triton kernel; it takes all factors as class weights."""
    from .kernels import linear_core_forward

    if settings.factor != 1 and class_weight is None:
        class_weight = logits.new_ones(logits.shape[1], dtype=_work_dtype(logits.dtype))
    return linear_core_forward(
        logits.contiguous(),
        labels.target,
        core=settings.surrogate.core,
        scale=settings.surrogate.scale,
        tail=settings.surrogate.tail,
        ignore_index=settings.ignore_index,
        class_weight=None if class_weight is None else class_weight * settings.factor,
        with_grad=settings.with_grad,
        inplace=settings.inplace,
    )


def _scale_rows(grad: Tensor, upstream: Tensor) -> Tensor:
    """``grad * upstream[:, None]`` in the gradient's dtype; no pass at all if upstream is 1.

    The saved gradient is returned as it is then, or copied if the graph is retained: autograd makes
    it, or a view of it, the ``grad`` of a leaf, where later passes accumulate.
    """
    if len(upstream) and (len(upstream) == 1 or upstream.stride(0) == 0):  # one value for all rows
        factor = upstream[0].item()
        if factor != 1:
            return grad * factor
        return grad.clone() if _graph_is_retained() else grad
    return torch.mul(grad, upstream[:, None], out=torch.empty_like(grad))


def _graph_is_retained() -> bool:
    """Inside a ``backward``: may the same node run again? Yes, where torch cannot tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def _differentiable_gradient(
    logits: Tensor,
    label: Tensor,
    counted: Tensor | None,
    class_weight: Tensor | None,
    settings: _Settings,
) -> Tensor:
    """The gradient of the weighted row losses as plain differentiable operations, ``[N, K]``."""
    h = logits.to(_work_dtype(logits.dtype))
    constrained = settings.form == "constrained"
    centre = _row_mean(h) if constrained else h.gather(1, label)
    slope = (-settings.surrogate.derivative(centre - h)).scatter(1, label, 0.0)
    total = slope.sum(1, keepdim=True)
    if constrained:
        slope = slope - total / h.shape[1]
    else:
        slope = slope.scatter_add(1, label, -total)
    weight = settings.factor if class_weight is None else settings.factor * class_weight[label]
    slope = slope * weight
    return slope if counted is None else torch.where(counted[:, None], slope, 0)


def _plain_loss(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    settings: _Settings,
    reduction: str,
) -> Tensor:
    """The loss in plain differentiable operations that look at no value: for ``torch.func``."""
    rows, flat = _as_rows(logits, target)
    counted = flat != settings.ignore_index  # [N]
    label = torch.where(counted, flat, 0)[:, None]
    h = torch.where(counted[:, None], rows, 0).to(_work_dtype(rows.dtype))
    weight = torch.ones_like(h[:, 0]) if class_weight is None else class_weight.to(h)[label[:, 0]]
    weight = torch.where(counted, weight, 0)
    loss = _plain_rows(h, label, settings) * weight
    if reduction == "none":
        loss = loss.reshape(target.shape)
    elif reduction == "sum":
        loss = loss.sum()
    else:
        total = weight.sum()
        nothing = total == 0
        loss = (loss / torch.where(nothing, 1, total)).sum() + torch.where(nothing, math.nan, 0)
    return loss.to(_result_dtype(logits))


def _plain_rows(h: Tensor, label: Tensor, settings: _Settings) -> Tensor:
    """Unweighted losses ``[N]`` of ``h`` in the working dtype, all of whose labels count."""
    if settings.form == "constrained":
        centre = (h / h.shape[1]).sum(1, keepdim=True)
    else:
        centre = h.gather(1, label)
    terms = settings.surrogate(centre - h + (centre - centre))  # NaN unless the centre is finite
    return terms.scatter(1, label, 0.0).sum(1)


def _block_rows(logits: Tensor) -> int:
    block = CPU_BLOCK * torch.get_num_threads() if logits.device.type == "cpu" else CUDA_BLOCK
    return max(1, min(block // logits.shape[1], len(logits)))


def _forward_blocks(
    logits: Tensor, labels: _Labels, class_weight: Tensor | None, settings: _Settings
) -> tuple[Tensor, Tensor | None]:
    """One pass over the logits in blocks of rows that stay in cache."""
    work = _work_dtype(logits.dtype)
    n, k = logits.shape
    step = _block_rows(logits)
    rows = logits.new_empty((n,), dtype=work)
    grad = None
    if settings.with_grad:  # in place, every block is read before it is written
        grad = logits if settings.inplace else logits.new_empty((n, k))
    line = logits.new_empty((step, k), dtype=work)
    direct = grad is not None and grad.dtype == work  # slopes are made in place, in the gradient
    spare = line if direct else torch.empty_like(line)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        size = part.stop - start
        slope = grad[part] if grad is not None and direct else spare[:size]
        label = labels.label[part]
        loss, total = _block(logits[part], label, line[:size], slope, settings)
        if grad is not None:
            _finish(slope, total, label, settings.form)
        ignored = None if labels.counted is None else ~labels.counted[part]
        weight = None if class_weight is None else class_weight[label]  # [rows, 1]
        _weigh(loss[:, None], weight, settings.factor, ignored)
        rows[part] = loss
        if grad is not None:
            _weigh(slope, weight, settings.factor, ignored)
        if grad is not None and not direct:
            grad[part] = slope  # rounds once
    return rows, grad


def _block(
    logits: Tensor, label: Tensor, line: Tensor, slope: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor]:
    """Row losses and row sums of the slopes ``g`` of one block; ``g`` itself goes to ``slope``.

    Args:
        logits: ``[rows, K]``, any float dtype.
        label: ``[rows, 1]``.
        line: ``[rows, K]`` scratch in the working dtype.
        slope: ``[rows, K]`` in the working dtype, overwritten; 0 at the target.
    """
    surrogate, form = settings.surrogate, settings.form
    if logits.dtype == line.dtype:
        values = logits
    else:
        values = line.copy_(logits)
    centre = _row_mean(values) if form == "constrained" else values.gather(1, label)
    shift = (surrogate.core - centre) + (centre - centre)  # NaN unless the centre is finite
    torch.add(values, shift, out=line)
    line.scatter_(1, label, -math.inf)  # the target's term: exactly nothing, here and below
    torch.clamp(line, max=0, out=slope)
    core_part = line.clamp_(min=0).sum(1)
    tail_part, total = _tail_(slope, line, surrogate)
    return core_part + tail_part, total


def _row_mean(values: Tensor) -> Tensor:
    """``[rows, 1]``; finite if all values of the row are, also where their sum overflows."""
    mean = values.mean(1, keepdim=True)
    if math.isfinite(mean.detach().sum()):
        return mean
    return torch.where(mean.isfinite(), mean, (values / values.shape[1]).sum(1, keepdim=True))


def _tail_(slope: Tensor, scratch: Tensor, surrogate: LinearCore) -> tuple[Tensor, Tensor]:
    """Turn ``slope`` from ``-s·v`` into ``g(v)``; return row sums of the tail's values and of g.

    Powers of two: on a CPU, torch's ``exp2`` takes less than half the time of its ``exp``.
    """
    scale, tail = surrogate.scale, surrogate.tail
    least = torch.finfo(slope.dtype).tiny  # not zero, which would make the target's -∞ a NaN
    slope.mul_(max(math.log2(math.e) / scale, least))
    if tail == "exponential":
        total = slope.exp2_().sum(1)
        return scale * total, total
    if tail == "gamma":
        slope.clamp_(min=-2 * FAR_TAIL)  # 2^(-2000) is 0, and there is no ∞·0
        decay = torch.exp2(slope, out=scratch)
        total = slope.mul_(-math.log(2)).add_(1).mul_(decay).sum(1)  # (1 + v)·e^(-v)
        return scale * (total + decay.sum(1)), total
    decay = torch.exp2(slope, out=scratch)
    torch.add(decay, 1, out=slope)
    total = torch.div(decay, slope, out=slope).mul_(2).sum(1)  # 2/(1 + e^v)
    return 2 * scale * decay.log1p_().sum(1), total


def _finish(slope: Tensor, total: Tensor, label: Tensor, form: str) -> None:
    """Slopes to gradient: subtract their mean, or put minus their sum at the target."""
    if form == "constrained":
        slope.sub_((total / slope.shape[1])[:, None])
    else:
        slope.scatter_(1, label, -total[:, None])


def _weigh(values: Tensor, weight: Tensor | None, factor: float, ignored: Tensor | None) -> None:
    """Weigh rows in place, and clear ignored ones whatever they hold. ``values``: [rows, any]."""
    if weight is not None:
        values.mul_(weight * factor)
    elif factor != 1:
        values.mul_(factor)
    if ignored is not None:
        values.masked_fill_(ignored[:, None], 0)
