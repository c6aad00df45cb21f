"""Triton kernel of the constrained Linear-Core loss: loss and gradient in one launch.

For logits ``h`` of one row with ``K`` classes and target ``y``, with ``h̃ = h − mean(h)``:

- loss ``w_y Σ_{j≠y} Φ(−h̃_j)``,
- gradient ``w_y (g − mean(g))`` with ``g_j = −Φ′(−h̃_j)`` for ``j ≠ y`` and ``g_y = 0``.

In ``w = (h̃_j + τ)/s`` every surrogate is ``Φ(−h̃_j) = s·value(w)`` with slope
``−Φ′(−h̃_j) = slope(w)``, linear for ``w ≥ 0`` and smooth below; so the kernel knows ``τ`` and
``s`` only through ``w``.

**Memory traffic, counted first.** The mean must be known before the loss, and the mean of ``g``
before the gradient. A row that stays in registers is read once and written once, the minimum.
Thirty-two of the 64 registers of each of 1024 threads hold it, so this is possible up to
``K = 32768`` (16384 for float64). A longer row keeps its first 24576 columns (12288 for float64)
in registers and streams the others three times, once for each quantity it waits for;
:func:`bytes_moved` counts both cases.

**Wide accesses.** ``K`` is passed as ``K // VEC`` with ``VEC`` the largest divisor of ``K`` that
fits in 16 bytes: the compiler then knows the alignment of every row, also for ``K = 1000``, and
uses 128-bit loads and stores. Masks cover whole groups of ``VEC`` columns and never depend on
the data: the target's column is handled by value, not by a hole in the store.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from proofread.triton_support import KernelSpec

__all__ = [
    "Plan",
    "bytes_minimum",
    "bytes_moved",
    "kernel_spec",
    "launch_plan",
    "linear_core_forward",
    "on_chip_limit",
]

TAILS = ("exponential", "gamma", "logistic")
ITEM_BYTES = {torch.float64: 8, torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
_TRITON_NAME = {8: "fp64", 4: "fp32"}
_MAX_WARPS = 32
_ROW_TILE = 1024  # short rows share a program until it holds this many logits


@triton.jit
def _value(w: tl.tensor, e: tl.tensor, TAIL: tl.constexpr, TERMS: tl.constexpr) -> tl.tensor:
    """Φ/s at ``w``, with ``e = exp(w)``; the unused branch may overflow, it is never selected."""
    if TAIL == "exponential":
        return tl.where(w >= 0, 1.0 + w, e)
    if TAIL == "gamma":
        return tl.where(w >= 0, 2.0 + w, (2.0 - w) * e)
    # 2·log(1+e) = 4·artanh(e/(2+e)) as a series in t² ≤ 1/9: full relative accuracy for tiny e,
    # where log(1+e) would round to zero.
    t = e / (2.0 + e)
    t2 = t * t
    series = t2 * 0.0 + 1.0 / (2 * TERMS + 1)
    for i in tl.static_range(TERMS):
        series = series * t2 + 1.0 / (2 * (TERMS - 1 - i) + 1)
    return tl.where(w >= 0, 1.3862943611198906 + w, 4.0 * t * series)


@triton.jit
def _slope(w: tl.tensor, e: tl.tensor, TAIL: tl.constexpr) -> tl.tensor:
    """−Φ′ at ``w``, in [0, 1], with ``e = exp(w)``."""
    if TAIL == "exponential":
        return tl.where(w >= 0, 1.0, e)
    if TAIL == "gamma":
        return tl.where(w >= 0, 1.0, (1.0 - w) * e)
    return tl.where(w >= 0, 1.0, 2.0 * e / (1.0 + e))


@triton.jit
def _argument(
    d: tl.tensor, shift: tl.tensor, inv_scale: tl.tensor, counted: tl.tensor, TAIL: tl.constexpr
) -> tl.tensor:
    """``w = (d + shift)/s``; −10⁴ where not counted: there value and slope are exactly zero."""
    w = tl.where(counted, (d + shift) * inv_scale, -10000.0)
    if TAIL == "gamma":  # (2 − w)·e^w is ∞·0 at w = −∞
        w = tl.maximum(w, -10000.0)
    return w


@triton.jit
def _kernel(
    logits: tl.tensor,  # [N, K]
    target: tl.tensor,  # [N] int64
    weight: tl.tensor,  # [K], read only if WEIGHTED
    loss: tl.tensor,  # [N], its type is the accumulator's
    grad: tl.tensor,  # [N, K], written only if WITH_GRAD
    n_rows: tl.tensor,
    groups: tl.tensor,  # K // VEC
    core: tl.float64,
    scale: tl.float64,
    inv_scale: tl.float64,
    ignore_index: tl.tensor,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    STREAM: tl.constexpr,
    TAIL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WITH_GRAD: tl.constexpr,
) -> None:
    """``ROWS`` rows a program; PARTS·BLOCK columns of each in registers, the others streamed."""
    ACC: tl.constexpr = loss.dtype.element_ty
    HEAD: tl.constexpr = PARTS * BLOCK
    TERMS: tl.constexpr = 16 if loss.dtype.element_ty == tl.float64 else 7
    n_cols = groups * VEC
    if ROWS == 1:  # scalars: loaded once, whatever layouts they are needed in
        first_row = tl.program_id(0).to(tl.int64)
        row = tl.full((1,), first_row, tl.int64)
        first_label = tl.load(target + first_row)
        label = tl.full((1,), first_label, tl.int64)
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
        label = tl.load(target + row, mask=row < n_rows, other=0)
    kept = (row < n_rows) & (label != ignore_index)  # an ignored row is not even read
    inside, keep, y = (row < n_rows)[:, None], kept[:, None], label.to(tl.int32)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    # Only the last part can cross the end of the row; in groups of VEC, which all lie on one side.
    edge = (lanes + (HEAD - BLOCK)) // VEC < groups
    source = logits + (row * n_cols)[:, None] + lanes  # 64-bit offsets: N·K may exceed 2³¹
    sink = grad + (row * n_cols)[:, None] + lanes

    # 1. The only read of the head, and a first mean.
    head = ()  # type: tuple[tl.tensor, ...]
    total = tl.zeros((ROWS, BLOCK), ACC)
    for p in tl.static_range(PARTS):
        mask = keep
        if p == PARTS - 1:
            mask = mask & edge
        h = tl.load(source + p * BLOCK, mask=mask, other=0.0).to(ACC)
        head = head + (h,)
        total += h
    if STREAM:
        first = tl.sum(total, 1)[:, None] / HEAD
    else:
        first = tl.sum(total, 1)[:, None] / n_cols

    # 2. The mean of what is left: first + rest is the row's mean to twice the precision, so a
    # constant added to all logits costs no digits.
    centred = ()  # type: tuple[tl.tensor, ...]
    total = tl.zeros((ROWS, BLOCK), ACC)
    for p in tl.static_range(PARTS):
        d = head[p] - first
        centred = centred + (d,)
        if p == PARTS - 1:
            d = tl.where(edge, d, 0.0)
        total += d
    if STREAM:
        for c in range(HEAD, n_cols, BLOCK):
            mask = (lanes + c) // VEC < groups
            h = tl.load(source + c, mask=keep & mask, other=0.0).to(ACC)
            total += tl.where(mask, h - first, 0.0)
    rest = tl.sum(total, 1)[:, None] / n_cols
    shift = tl.full((1, 1), core, ACC) - rest
    inv_s = tl.full((1, 1), inv_scale, ACC)

    # 3. Loss and mean slope; w replaces the logits in registers.
    arguments = ()  # type: tuple[tl.tensor, ...]
    value = tl.zeros((ROWS, BLOCK), ACC)
    slope = tl.zeros((ROWS, BLOCK), ACC)
    for p in tl.static_range(PARTS):
        counted = lanes != y - p * BLOCK
        if p == PARTS - 1:
            counted = counted & edge
        w = _argument(centred[p], shift, inv_s, counted, TAIL)
        arguments = arguments + (w,)
        e = tl.exp(w)
        value += _value(w, e, TAIL, TERMS)
        if WITH_GRAD:
            slope += _slope(w, e, TAIL)
    if STREAM:
        for c in range(HEAD, n_cols, BLOCK):
            mask = (lanes + c) // VEC < groups
            h = tl.load(source + c, mask=keep & mask, other=0.0).to(ACC)
            w = _argument(h - first, shift, inv_s, mask & (lanes != y - c), TAIL)
            e = tl.exp(w)
            value += _value(w, e, TAIL, TERMS)
            if WITH_GRAD:
                slope += _slope(w, e, TAIL)
    poison = rest * 0.0  # NaN if any logit of the row is not finite, else 0
    if WEIGHTED and ROWS == 1:
        w = tl.load(weight + first_label, mask=first_label != ignore_index, other=0.0)
        row_weight = tl.full((1,), w, ACC)
    elif WEIGHTED:
        row_weight = tl.load(weight + label, mask=kept, other=0.0).to(ACC)
    else:
        row_weight = tl.where(kept, 1.0, 0.0).to(ACC)
    summed = tl.sum(value, 1) * tl.full((1,), scale, ACC) + tl.reshape(poison, (ROWS,))
    tl.store(loss + row, summed * row_weight, mask=row < n_rows)

    # 4. The only write of each gradient.
    if WITH_GRAD:
        mean_slope = tl.sum(slope, 1)[:, None] / n_cols + poison
        # Adding a zero that the compiler cannot know keeps it from storing all exponentials
        # instead of computing them again: that would not fit in registers.
        zero = mean_slope * 0.0
        for p in tl.static_range(PARTS):
            w = arguments[p] + zero
            g = (_slope(w, tl.exp(w), TAIL) - mean_slope) * row_weight[:, None]
            mask = inside
            if p == PARTS - 1:
                mask = mask & edge
            tl.store(sink + p * BLOCK, g.to(grad.dtype.element_ty), mask=mask)
        if STREAM:
            for c in range(HEAD, n_cols, BLOCK):
                mask = (lanes + c) // VEC < groups
                h = tl.load(source + c, mask=keep & mask, other=0.0).to(ACC)
                w = _argument(h - first, shift, inv_s, mask & (lanes != y - c), TAIL)
                g = (_slope(w, tl.exp(w), TAIL) - mean_slope) * row_weight[:, None]
                tl.store(sink + c, g.to(grad.dtype.element_ty), mask=inside & mask)


class Plan(NamedTuple):
    """How one launch cuts the logits.

    ``vec``: columns a memory access may take; ``rows``: rows a program; ``block``: columns a
    part; ``parts``: parts held in registers; ``stream``: whether columns are left over, to be
    read three times; ``num_warps``: warps a program.
    """

    vec: int
    rows: int
    block: int
    parts: int
    stream: bool
    num_warps: int


def on_chip_limit(dtype: torch.dtype) -> int:
    """Largest number of classes whose row is read once: 32768, or 16384 for float64.

    Up to here nothing spills in the other types; float64, which is for checking gradients, does
    spill in long rows.
    """
    return 16384 if dtype == torch.float64 else 32768


def launch_plan(n_cols: int, dtype: torch.dtype) -> Plan:
    """The cut for rows of ``n_cols`` logits of the given dtype: about 16 logits a thread, until
    1024 threads hold 32 registers each."""
    vec = math.gcd(n_cols, 16 // ITEM_BYTES[dtype])
    stream = n_cols > on_chip_limit(dtype)
    held = on_chip_limit(dtype) * 3 // 4 if stream else n_cols
    warps = min(_MAX_WARPS, max(4, triton.next_power_of_2(triton.cdiv(held, 32 * 16))))
    block = min(warps * 32 * max(2, vec), max(4, triton.next_power_of_2(held)))
    parts = held // block if stream else triton.cdiv(held, block)
    return Plan(vec, max(1, _ROW_TILE // (block * parts)), block, parts, stream, warps)


def linear_core_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    core: float,
    scale: float,
    tail: str,
    ignore_index: int,
    class_weight: torch.Tensor | None = None,
    with_grad: bool,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Per-row constrained Linear-Core loss and, if asked, its gradient, in one launch.

    The caller has validated ``target``: every entry is a class or ``ignore_index``.

    Args:
        logits: ``[N, K]``, contiguous; float32, bfloat16, float16 or float64.
        target: ``[N]``, int64.
        core: half-width τ > 0 of the linear core.
        scale: length s > 0 of the tail.
        tail: ``"exponential"``, ``"gamma"`` or ``"logistic"``.
        ignore_index: rows with this target have loss 0 and gradient 0, and are not read.
        class_weight: ``[K]`` or None; each row is multiplied by the weight of its target.
        with_grad: whether to compute the gradient.
        inplace: write the gradient over the logits. Safe for any plan: only the program of a row
            reads it, sums over the row lie between its other reads and its first write, and a
            streamed column is read for the last time right before it is written.

    Returns:
        The loss ``[N]``, float32 (float64 for float64 logits), and its gradient ``[N, K]`` in the
        dtype of the logits, or None. A row with a logit that is not finite has loss and gradient
        NaN.

    Raises:
        TypeError: for logits of another dtype.
        ValueError: for another shape or layout, or an unknown tail.
    """
    _check(logits, target, tail)
    n_rows, n_cols = logits.shape
    exact = logits.dtype == torch.float64
    loss = torch.empty(
        n_rows, dtype=torch.float64 if exact else torch.float32, device=logits.device
    )
    grad = (logits if inplace else torch.empty_like(logits)) if with_grad else None
    if n_rows == 0:
        return loss, grad
    plan = launch_plan(n_cols, logits.dtype)
    with torch.cuda.device_of(logits):  # launch on the tensor's device; nothing for a CPU tensor
        _kernel[(triton.cdiv(n_rows, plan.rows),)](
            logits,
            target.contiguous(),
            logits if class_weight is None else class_weight.contiguous(),
            loss,
            logits if grad is None else grad,
            n_rows,
            n_cols // plan.vec,
            float(core),
            float(scale),
            1.0 / float(scale),
            ignore_index,
            **_constants(plan, tail, class_weight is not None, with_grad),
            num_warps=plan.num_warps,
        )
    return loss, grad


def _check(logits: torch.Tensor, target: torch.Tensor, tail: str) -> None:
    if logits.dtype not in ITEM_BYTES:
        raise TypeError(f"logits: {logits.dtype} is not one of {', '.join(map(str, ITEM_BYTES))}")
    if logits.ndim != 2 or not logits.is_contiguous():
        raise ValueError(
            "logits must be a contiguous [N, K] tensor: reshape, then call .contiguous()"
        )
    if target.shape != logits.shape[:1] or target.dtype != torch.int64:
        raise ValueError(
            f"target must be int64 of shape [{logits.shape[0]}], "
            f"got {target.dtype} {list(target.shape)}"
        )
    if tail not in TAILS:
        raise ValueError(f"tail: {tail!r} is not one of {', '.join(TAILS)}")


def _constants(plan: Plan, tail: str, weighted: bool, with_grad: bool) -> dict[str, int | str]:
    return {
        "VEC": plan.vec,
        "ROWS": plan.rows,
        "BLOCK": plan.block,
        "PARTS": plan.parts,
        "STREAM": plan.stream,
        "TAIL": tail,
        "WEIGHTED": weighted,
        "WITH_GRAD": with_grad,
    }


def kernel_spec(
    n_cols: int,
    dtype: torch.dtype = torch.float32,
    *,
    tail: str = "exponential",
    weighted: bool = False,
    with_grad: bool = True,
) -> KernelSpec:
    """What :func:`linear_core_forward` would launch for ``n_cols`` classes, for
    ``proofread.triton_support.compile_reports``."""
    plan = launch_plan(n_cols, dtype)
    item = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype) or _TRITON_NAME[
        ITEM_BYTES[dtype]
    ]
    acc = "fp64" if dtype == torch.float64 else "fp32"
    pointers = {
        "logits": f"*{item}",
        "target": "*i64",
        "weight": "*fp32" if weighted else f"*{item}",
        "loss": f"*{acc}",
        "grad": f"*{item}",
    }
    scalars = {"n_rows": "i32", "groups": "i32", "ignore_index": "i32"}
    scalars |= dict.fromkeys(("core", "scale", "inv_scale"), "fp64")
    return KernelSpec(
        module=__name__,
        kernel="_kernel",
        signature=pointers | scalars,
        constexprs=_constants(plan, tail, weighted, with_grad),
        num_warps=plan.num_warps,
        divisible_by_16=tuple(pointers),
        label=f"{tail} {item} K={n_cols}",
    )


def bytes_minimum(
    n_rows: int,
    n_cols: int,
    dtype: torch.dtype,
    *,
    with_grad: bool = True,
    weighted: bool = False,
) -> int:
    """Bytes that no kernel can avoid: each input read once and each output written once."""
    item = ITEM_BYTES[dtype]
    row = n_cols * item * (2 if with_grad else 1)
    return n_rows * (row + 8 + max(4, item) + (4 if weighted else 0))


def bytes_moved(
    n_rows: int,
    n_cols: int,
    dtype: torch.dtype,
    *,
    with_grad: bool = True,
    weighted: bool = False,
) -> int:
    """Bytes that the kernel loads and stores, by count: the minimum while the row is on chip,
    and beyond it two more reads (one without the gradient) of the columns that do not fit.

    Where several rows share a program, all threads of a row fetch its label: these repeats are
    served by the first-level cache and are not counted.
    """
    plan = launch_plan(n_cols, dtype)
    extra = n_cols - plan.block * plan.parts if plan.stream else 0
    again = n_rows * extra * ITEM_BYTES[dtype] * (2 if with_grad else 1)
    least = bytes_minimum(n_rows, n_cols, dtype, with_grad=with_grad, weighted=weighted)
    return least + again
