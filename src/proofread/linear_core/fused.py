"""Last linear layer and Linear-Core loss in one, without ever holding all N×K logits.

For ``h = x·Wᵀ + b`` with K classes the loss of a row needs one number that depends on all of its
logits: the mean (``form="constrained"``) or the target's logit (``form="sum"``). Both are known
beforehand, as ``x·w̄ + b̄`` and ``x·w_y + b_y``. So a tile of logits (some rows, some classes) is
computed, turned into slopes ``g`` while it is in cache, multiplied into the gradients, and
forgotten: no second pass for a normaliser, as cross-entropy needs one.

**The correction.** In the constrained form the gradient of a logit is ``g_nj - ḡ_n``, with ``ḡ_n``
the row's mean slope, known only after the last block of classes. With any number ``c_nB`` for a
block ``B``, ``g_nj - ḡ_n = (g_nj - c_nB) + (c_nB - ḡ_n)``, where the last term is constant in the
block: its part in all gradients is of rank one a block, and is added at the end from sums that cost
nothing. With ``c = 0`` these are ``dx_n -= G_n·w̄``, each row of ``dW -= Σ G_n·x_n / K`` and
``db -= Σ G_n / K``, where ``G_n = Σ_j g_nj``: right in exact arithmetic, but near equal logits all
slopes are 1 and nearly everything cancels, too late for bfloat16. So ``c`` is the block's own mean
slope (without the target; the row's mean itself if there is one block only), and the products only
see what is left.

**Precision.** Sums over blocks are kept in float32 for half-precision inputs. Products of float16
are made in float32, whose range they need; products of bfloat16 in bfloat16 where the processor has
instructions for it, and in float32 elsewhere. In the former case each product is rounded to
bfloat16 before it is added. A bfloat16 gradient of the weight is rounded when its block is complete
and once more when the correction is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from proofread import triton_support

from .losses import (
    DTYPES,
    _check_dense,
    _check_options,
    _check_weight,
    _checked_labels,
    _graph_is_retained,
    _Labels,
    _reduce,
    _surrogate,
    _tail_,
    _with_finite_steepness,
    _work_dtype,
)
from .surrogates import LinearCore

# A tile of 2 MiB in float32, for one thread: it stays in a level-2 or level-3 cache, and is large
# enough for matrix products at full speed. (A GPU wants few large tiles instead.)
ROWS = 512
CLASSES = 1024
CUDA_ROWS = 8192


def fused_linear_core_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    core: float = 1.0,
    scale: float = 1.0,
    tail: str = "exponential",
    form: str = "constrained",
    reduction: str = "mean",
    ignore_index: int = -100,
    class_weight: Tensor | None = None,
) -> Tensor:
    """``linear_core_loss(F.linear(hidden, weight, bias), target)`` without the N×K logits.

    Args:
        hidden: ``[N, D]``, ``[..., D]`` or ``[D]`` inputs of the layer; float16, bfloat16, float32
            or float64. Any strides.
        weight: ``[K, D]``, K ≥ 2, of the same dtype.
        target: ``[N]``, ``[...]`` or ``[]`` class indices, any integer type.
        bias: ``[K]`` of the same dtype, or None.
        core: ``τ > 0``, end of the surrogate's linear part.
        scale: ``s > 0``, decay length of its tail.
        tail: ``"exponential"``, ``"gamma"`` or ``"logistic"``.
        form: ``"constrained"`` or ``"sum"``.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, as for ``linear_core_loss``.
        ignore_index: target value whose rows count for nothing, whatever they hold; they cost
            nothing either.
        class_weight: ``[K]`` weights, any floating dtype; a constant, no gradient flows to it.

    Returns:
        A scalar, or a tensor of the target's shape for ``"none"``; dtype as for
        ``linear_core_loss``. The mean over nothing is NaN, with zero gradients.

    Gradients flow to ``hidden``, ``weight`` and ``bias``, each computed only if required. For
    ``"mean"`` and ``"sum"`` the forward pass makes them (three matrix products in all) and the
    backward pass scales them. For ``"none"`` the incoming gradient differs from row to row, so the
    backward pass goes over the tiles again (a fourth product). Memory beyond inputs and gradients:
    two or three tiles, ``[N, K/1024]`` block means, for half-precision inputs ``[N, D]`` in
    float32, and for float16 the gradient of ``weight`` in float32.

    Under autocast, inputs are cast as ``F.linear`` would and the result is float32.

    CUDA tensors take a Triton kernel: same results, same errors. Its chunks are larger, and so is
    the memory: with D = 4096 in bfloat16 about 0.5 GB, and ``[N, D]`` in float32
    (``fused_kernels.workspace_bytes`` counts it). Float32 products are exact to float32 unless
    torch is set to allow TF32.

    Raises:
        TypeError: inputs not floating or of different dtypes, targets not integer, any of them no
            dense torch tensor; ``ignore_index`` not an integer.
        ValueError: shapes, devices, K < 2, unknown options, ``core`` or ``scale`` not positive or
            asking for a gradient.
        IndexError: a target outside [0, K) that is not ``ignore_index``.
        RuntimeError: in the backward pass, if ``create_graph=True`` asks for second derivatives:
            ``linear_core_loss(F.linear(...))`` has them.

    Example:
        >>> hidden, weight = torch.zeros(2, 4, requires_grad=True), torch.zeros(3, 4)
        >>> fused_linear_core_loss(hidden, weight, torch.tensor([0, 2]))  # (K - 1)·Φ(0) = 2·2
        tensor(4., grad_fn=<SumBackward0>)
    """
    surrogate = _surrogate(core, scale, tail)
    ignore_index = _check_options(form, reduction, ignore_index)
    _check_inputs(hidden, weight, target, bias, class_weight)
    hidden, weight, bias, dtype = _autocast(hidden, weight, bias)
    surrogate = _with_finite_steepness(surrogate, _work_dtype(hidden.dtype))
    labels = _checked_labels(target.reshape(-1).long(), len(weight), ignore_index, class_weight)
    rows = _counted_rows(labels, class_weight, hidden.dtype)
    # The mean's divisor goes into the gradients, so that backward has nothing to multiply. Not in
    # float16: small gradients would be lost before a gradient scaler can lift them.
    early = reduction == "mean" and labels.total != 0 and hidden.dtype != torch.float16
    settings = _Settings(
        surrogate=surrogate,
        form=form,
        factor=1 / labels.total if early else 1.0,
        each=reduction == "none",
        needs=_needs(hidden, weight, bias),
    )
    flat = hidden.reshape(labels.target.numel(), hidden.shape[-1])
    loss: Tensor = _FusedLoss.apply(flat, weight, bias, rows, settings)
    if reduction == "none":
        return loss.reshape(target.shape).to(dtype)
    return _reduce(loss, reduction, 1.0 if early else labels.total).to(dtype)


class _Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class _Settings(NamedTuple):
    """What a pass needs to know besides the tensors."""

    surrogate: LinearCore
    form: str
    factor: float  # multiplies the loss
    each: bool  # reduction="none"
    needs: _Needs


class _Rows(NamedTuple):
    """The rows that are not ignored, M of N."""

    kept: Tensor | None  # [M] row numbers, None if M = N
    label: Tensor  # [M]
    weight: Tensor | None  # [M, 1] in the working dtype
    size: int  # N


class _Grads(NamedTuple):
    """Gradients in the dtype in which they are kept until the backward pass."""

    hidden: Tensor | None  # [M, D]
    weight: Tensor | None  # [K, D]
    bias: Tensor | None  # [K]


# --- checks ---------------------------------------------------------------------------------------


def _check_inputs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    _check_dense("hidden", hidden)
    _check_dense("weight", weight)
    _check_dense("target", target)
    if bias is not None:
        _check_dense("bias", bias)
    _check_dtypes(hidden, weight, target, bias)
    if weight.dim() != 2 or len(weight) < 2:
        raise ValueError(
            f"weight must be [K, D] with at least 2 classes, got shape {tuple(weight.shape)}"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must have shape [..., {weight.shape[1]}] for weight of shape "
            f"{tuple(weight.shape)}, got {tuple(hidden.shape)}"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must have shape {tuple(hidden.shape[:-1])} for hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({len(weight)},), got {tuple(bias.shape)}")
    if class_weight is not None:
        _check_weight(class_weight, len(weight))
    others = {"weight": weight, "target": target, "bias": bias, "class_weight": class_weight}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(
                f"{name} is on {tensor.device} but hidden is on {hidden.device}: move one of them"
            )


def _check_dtypes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target must hold integer class indices, got {target.dtype}")
    autocast = torch.is_autocast_enabled(hidden.device.type)
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias}.items():
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}"
            )
        if tensor.dtype != hidden.dtype and not autocast:
            raise TypeError(
                f"{name} is {tensor.dtype} but hidden is {hidden.dtype}: convert one of them, "
                "or use autocast"
            )


def _autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """Inputs as ``F.linear`` would take them here, and the dtype of the result."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or torch.float64 in (hidden.dtype, weight.dtype):
        return hidden, weight, bias, hidden.dtype
    dtype = torch.get_autocast_dtype(device)
    bias = bias if bias is None else bias.to(dtype)
    return hidden.to(dtype), weight.to(dtype), bias, torch.float32


def _needs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Needs:
    if not torch.is_grad_enabled():
        return _Needs(False, False, False)
    has_bias = bias is not None and bias.requires_grad
    return _Needs(hidden.requires_grad, weight.requires_grad, has_bias)


def _counted_rows(labels: _Labels, class_weight: Tensor | None, dtype: torch.dtype) -> _Rows:
    """Copies all: the caller may overwrite targets and weights before the backward pass."""
    kept = None if labels.counted is None else labels.counted.nonzero()[:, 0]
    label = labels.label[:, 0] if kept is None else labels.label[kept, 0]
    weight = None
    if class_weight is not None:
        weight = class_weight.to(_work_dtype(dtype))[label][:, None]
    return _Rows(kept, label, weight, len(labels.label))


# --- autograd -------------------------------------------------------------------------------------


class _FusedLoss(torch.autograd.Function):
    """Weighted loss of each row, or their sum; takes hidden ``[N, D]``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: _Rows,
        settings: _Settings,
    ) -> Tensor:
        ctx.size, ctx.settings, ctx.dtype = rows.size, settings, hidden.dtype  # type: ignore[attr-defined]
        if not settings.each:
            loss, grads = _sweep(hidden, weight, bias, rows, settings)
            ctx.save_for_backward(rows.kept, None, None, *grads)  # type: ignore[arg-type]
            return loss.sum() * settings.factor
        ctx.save_for_backward(*rows[:3], hidden, weight, bias)  # type: ignore[arg-type]
        nothing = settings._replace(needs=_Needs(False, False, False))
        loss, _ = _sweep(hidden, weight, bias, rows, nothing)
        return _spread(loss, rows)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def,override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused_linear_core_loss has no second derivatives (create_graph=True): use "
                "linear_core_loss(F.linear(hidden, weight, bias), target) there"
            )
        kept, label, row_weight, *tensors = ctx.saved_tensors
        rows, factor = _Rows(kept, label, row_weight, ctx.size), 1.0
        if ctx.settings.each:
            part = upstream if rows.kept is None else upstream[rows.kept]
            part = part[:, None] if rows.weight is None else part[:, None] * rows.weight
            hidden, weight, bias = tensors
            _, grads = _sweep(hidden, weight, bias, rows._replace(weight=part), ctx.settings)
        else:
            grads, factor = _Grads(*tensors), upstream.item()
        hidden, weight, bias = (_scaled(grad, factor, ctx.dtype) for grad in grads)
        return None if hidden is None else _spread(hidden, rows), weight, bias, None, None


def _scaled(grad: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor | None:
    """``grad·factor`` in the inputs' dtype; the saved tensor itself if nothing changes.

    Unless the graph is retained: autograd makes it, or a view of it, the ``grad`` of a leaf.
    """
    if grad is None:
        return None
    if factor != 1:
        return (grad * factor).to(dtype)
    return grad.to(dtype, copy=_graph_is_retained())


def _spread(values: Tensor, rows: _Rows) -> Tensor:
    """``[M, ...]`` of the counted rows to ``[N, ...]``, zero elsewhere."""
    if rows.kept is None:
        return values
    return values.new_zeros((rows.size, *values.shape[1:])).index_copy_(0, rows.kept, values)


# --- the sweep over the tiles ---------------------------------------------------------------------


def _sweep(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: _Rows, settings: _Settings
) -> tuple[Tensor, _Grads]:
    """Weighted row losses ``[M]`` and the gradients of ``factor`` times their sum."""
    x = hidden if rows.kept is None else hidden[rows.kept]
    with torch.autocast(hidden.device.type, enabled=False):
        sweep = _sweep_class(hidden)(x, weight, bias, rows, settings)
        for number, classes in enumerate(sweep.blocks):
            sweep.block(number, classes)
        grads = sweep.finish()
    return sweep.loss if rows.weight is None else sweep.loss * rows.weight[:, 0], grads


def _sweep_class(hidden: Tensor) -> type[_Sweep]:
    if not triton_support.use_triton(hidden):
        return _Sweep
    from .fused_kernels import KernelSweep

    return KernelSweep


class _Sweep:
    """All state of one sweep: classes in the outer loop, rows in the inner one.

    This order leaves the gradient of a block of the weight in cache until it is complete.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: _Rows, settings: _Settings
    ) -> None:
        self.work, self.product = _work_dtype(x.dtype), self._product_dtype(x)
        self.x = x.to(self.product).contiguous()  # [M, D]
        self.weight, self.bias, self.rows, self.settings = weight, bias, rows, settings
        m, k = len(x), len(weight)
        height, width = self._tile_shape(m, k)
        self.tiles, self.blocks = list(_slices(m, height)), list(_slices(k, width))
        self.constrained = settings.form == "constrained"
        self.any_grad = any(settings.needs)
        self._allocate(height, width)
        self.shift = self._shift()

    def _product_dtype(self, x: Tensor) -> torch.dtype:
        return _product_dtype(x)

    def _tile_shape(self, rows: int, classes: int) -> tuple[int, int]:
        return _tile_shape(rows, classes, self.x.device.type)

    def _allocate(self, height: int, width: int) -> None:
        d, mixed = self.x.shape[1], self.product != self.work
        self.line, self.slope = self._empty(height, width), self._empty(height, width)
        self.half = self._empty(height, width, dtype=self.product) if mixed else self.line
        self._allocate_results()
        rounded = self.dw is not None and self.dw.dtype != self.work
        self.dw_block = self._empty(width, d) if rounded else None
        self.spare = self._empty(max(height, width), d, dtype=self.product) if mixed else None

    def _allocate_results(self) -> None:
        m, (k, d), needs = len(self.x), self.weight.shape, self.settings.needs
        self.loss, self.total = (self.x.new_zeros(m, dtype=self.work) for _ in range(2))
        self.means = self._empty(m, len(self.blocks)) if self.constrained else None
        self.dx = self.x.new_zeros((m, d), dtype=self.work) if needs.hidden else None
        # Float16 has not the range to hold a gradient that is yet to be scaled.
        kept = self.work if self.weight.dtype == torch.float16 else self.weight.dtype
        self.dw = self._empty(k, d, dtype=kept) if needs.weight else None
        self.db = self._empty(k) if needs.bias else None

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.x.new_empty(shape, dtype=dtype or self.work)

    def _shift(self) -> Tensor:
        """``τ - centre``, ``[M, 1]``: NaN unless the centre is finite."""
        centre = self._mean_logits() if self.constrained else self._target_logits()
        return ((self.settings.surrogate.core - centre) + (centre - centre))[:, None]

    def _mean_logits(self) -> Tensor:
        """``x·w̄ + b̄``; keeps the sums of the weight's blocks for later."""
        self.sums = torch.stack([self.weight[part].sum(0, dtype=self.work) for part in self.blocks])
        mean = self.sums.sum(0) / len(self.weight)
        centre = torch.cat([self._rows_of(tile) @ mean for tile in self.tiles])
        return centre if self.bias is None else centre + self.bias.mean(dtype=self.work)

    def _target_logits(self) -> Tensor:
        """``x·w_y + b_y``."""
        parts = [(self._rows_of(t) * self._target_weight(t)).sum(1) for t in self.tiles]
        centre = torch.cat(parts)
        return centre if self.bias is None else centre + self.bias[self.rows.label]

    def _rows_of(self, tile: slice) -> Tensor:
        return self.x[tile].to(self.work)

    def _target_weight(self, tile: slice) -> Tensor:
        return self.weight[self.rows.label[tile]].to(self.work)

    def block(self, number: int, classes: slice) -> None:
        """All rows for one block of classes."""
        weight = self.weight[classes].to(self.product).contiguous()  # [width, D]
        width = len(weight)
        bias = None if self.bias is None else self.bias[classes].to(self.work)
        dw = None if self.dw is None else self.dw[classes]
        rounded, dw = (
            (dw, self.dw_block[:width].zero_()) if self.dw_block is not None else (None, dw)
        )
        for tile in self.tiles:
            x = self.x[tile]
            slope = self._slopes(tile, self._logits(x, weight, bias), number, classes.start)
            if not self.any_grad:
                continue
            first = tile.start == 0
            if self.db is not None:
                part = slope.sum(0).mul_(self.settings.factor)
                self.db[classes] = part if first else self.db[classes] + part
            factors = slope if self.product == self.work else self._as_half(slope)
            if dw is not None:
                self._add_product(dw, factors.t(), x, first)
            if self.dx is not None:
                self._add_product(self.dx[tile], factors, weight, number == 0)
        if rounded is not None and dw is not None:
            rounded.copy_(dw)

    def _logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One tile of logits, ``[height, width]`` in the working dtype."""
        line = _corner(self.line, len(x), len(weight))
        if self.product == self.work:
            torch.mm(x, weight.t(), out=line)
        else:
            line.copy_(torch.mm(x, weight.t(), out=_corner(self.half, len(x), len(weight))))
        return line if bias is None else line.add_(bias)

    def _as_half(self, slope: Tensor) -> Tensor:
        return _corner(self.half, *slope.shape).copy_(slope)

    def _add_product(self, total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        """``total += factor·a@b``; ``first`` if total holds nothing yet."""
        factor = self.settings.factor
        if self.spare is None:
            total.addmm_(a, b, beta=0 if first else 1, alpha=factor)
        else:
            total.add_(torch.mm(a, b, out=self.spare[: len(a)]), alpha=factor)

    def _slopes(self, tile: slice, line: Tensor, number: int, start: int) -> Tensor:
        """Add the tile's losses and slopes to the rows' sums; return its part of the gradient."""
        height, width = line.shape
        label = self.rows.label[tile] - start
        hit = ((label >= 0) & (label < width)).nonzero()[:, 0]  # rows whose target is in here
        line.add_(self.shift[tile])
        line[hit, label[hit]] = -math.inf  # the target's term: exactly nothing
        slope = torch.clamp(line, max=0, out=_corner(self.slope, height, width))
        value = line.clamp_(min=0).sum(1)
        tail_value, total = _tail_(slope, line, self.settings.surrogate)
        self.loss[tile] += value.add_(tail_value)
        self.total[tile] += total
        if self.any_grad and self.means is not None:
            others = torch.full_like(total, width)
            if len(self.blocks) > 1:
                others[hit] = max(1, width - 1)
            mean = total / others  # of the row, if this is the only block
            self.means[tile, number] = mean
            slope.sub_(mean[:, None])
        if self.any_grad and self.rows.weight is not None:
            slope.mul_(self.rows.weight[tile])
        return slope

    def finish(self) -> _Grads:
        """Add what could not be known before the last block, and round the gradients."""
        if self.any_grad:
            (self._finish_constrained if self.constrained else self._finish_sum)()
        return _Grads(self._kept(self.dx), self.dw, self._kept(self.db))

    def _kept(self, grad: Tensor | None) -> Tensor | None:
        if grad is None or self.weight.dtype == torch.float16:
            return grad
        return grad.to(self.weight.dtype)

    def _row_factor(self, values: Tensor) -> Tensor:
        """``values·factor·row weight``, ``[M, any]``, in place."""
        values.mul_(self.settings.factor)
        return values if self.rows.weight is None else values.mul_(self.rows.weight)

    def _finish_constrained(self) -> None:
        assert self.means is not None
        rest = self.means.sub_((self.total / len(self.weight))[:, None])
        rest = self._row_factor(rest)  # [M, blocks]: c_nB - ḡ_n
        if self.dx is not None:
            self.dx.addmm_(rest, self.sums)
        if self.dw is not None:
            for row, part in zip(self._products(rest), self.blocks, strict=True):
                self.dw[part] += row
        if self.db is not None:
            for one, part in zip(rest.sum(0), self.blocks, strict=True):
                self.db[part] += one

    def _products(self, rest: Tensor) -> Tensor:
        """``restᵀ·x``, ``[blocks, D]``."""
        total = self.x.new_zeros((rest.shape[1], self.x.shape[1]), dtype=self.work)
        for tile in self.tiles:
            total.addmm_(rest[tile].t(), self._rows_of(tile))
        return total

    def _finish_sum(self) -> None:
        rest = self._row_factor(self.total[:, None])  # [M, 1]: minus the target's gradient
        label = self.rows.label
        if self.dx is not None:
            for tile in self.tiles:
                self.dx[tile] -= self._target_weight(tile).mul_(rest[tile])
        if self.db is not None:
            self.db.index_add_(0, label, rest[:, 0], alpha=-1)
        if self.dw is not None:  # summed in the working dtype, then rounded once
            found, place = label.unique(return_inverse=True)
            sums = self.x.new_zeros((len(found), self.x.shape[1]), dtype=self.work)
            for tile in self.tiles:
                sums.index_add_(0, place[tile], self._rows_of(tile) * rest[tile])
            self.dw[found] = (self.dw[found] - sums).to(self.dw.dtype)


def _slices(length: int, step: int) -> Iterator[slice]:
    """Consecutive slices that cover ``range(length)``; an empty one if there is nothing."""
    for start in range(0, max(1, length), step):
        yield slice(start, min(start + step, length))


def _corner(buffer: Tensor, height: int, width: int) -> Tensor:
    """A contiguous ``[height, width]`` in the buffer's memory."""
    return buffer.view(-1)[: height * width].view(height, width)


def _tile_shape(rows: int, classes: int, device: str) -> tuple[int, int]:
    """Rows and classes of a tile."""
    height = ROWS * min(8, torch.get_num_threads()) if device == "cpu" else CUDA_ROWS
    return max(1, min(rows, height)), min(classes, CLASSES)


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the matrix products."""
    if x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not _has_bfloat16_unit(x.device)):
        return torch.float32
    return x.dtype


def _has_bfloat16_unit(device: torch.device) -> bool:
    """Whether products of bfloat16 are faster than those of float32."""
    if device.type != "cpu":
        return True
    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # absent in older versions
    return any(getattr(torch.cpu, name, bool)() for name in names)
