"""Triton kernel of ``fused_linear_core_loss``: a matrix product that ends in slopes, not logits.

The kernel multiplies rows of ``hidden`` by rows of ``weight`` and, while a tile of logits is in
registers, turns it into loss and slopes: ``h̃ = h − centre`` needs the centre only, which is known
beforehand (see ``fused.py``), so nothing waits for a normaliser. The slopes of one chunk, at most
``ROWS`` × ``CLASSES``, go to a workspace in the dtype of the inputs, and two ordinary matrix
products make its part of the gradients from there.

**Count.** For N rows, K classes, depth D, and an item of b bytes:

- Arithmetic: 2NDK for the logits, 2NDK for each gradient, nothing twice: 6NDK, as for a layer
  that holds its logits. A kernel that keeps no slopes makes the logits again: 8NDK or more.
- Logits: never written. A slope is written once and read twice, 3b bytes, where a layer and a
  loss of its own move 5b at the least (logits written and read, their gradient written and read
  twice) and hold 2b·NK. At 790 TFLOP/s and 4.3 TB/s, 6D FLOP hide 3b bytes from D of some hundreds.
- Chunks: the weight is copied (2b a number), each chunk of classes adds to ``[N, D]`` sums (16
  bytes a number for half precision: product written and read, sum read and written), and so does
  each chunk of rows, but the first, to ``[K, D]``. With chunks of 8192 that is 16/(6·8192) bytes
  a FLOP each: 6 % of the products' time at the rates above.

**Block means.** Slopes are rounded to the inputs' dtype, so each block of BN classes is centred by
its own mean ``c_nB`` first, as in ``fused.py``. What that leaves, ``c_nB − c_nC`` with the chunk's
mean ``c_nC``, costs no product of its own: it is appended to the slopes as one more column a
block, and the mean of the block's weights to the weight as one more row: 1/BN more arithmetic. The
gradient of such a row is then shared out to the block. ``c_nC − ḡ_n`` is left to the end of the
sweep, in float32.

**Precision.** Logits, losses and all sums over chunks are float32, float64 for float64. Products of
half precision run on tensor cores and come out in float32 (torch 2.8 and later; before, they are
made in float32 altogether). For float16 the factors of the rows are divided by the largest one
first: a small incoming gradient would vanish in a half-precision slope. Products of float32 are
exact to float32 unless ``torch.backends.cuda.matmul`` allows TF32; the kernel then uses it too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from proofread.triton_support import KernelSpec, interpreting

from .fused import _Sweep
from .kernels import ITEM_BYTES, _argument, _slope, _value
from .surrogates import LinearCore

__all__ = [
    "KernelSweep",
    "Plan",
    "bytes_requested",
    "kernel_spec",
    "launch_plan",
    "workspace_bytes",
]

# A chunk of slopes takes 128 MiB in half precision. Larger chunks would save additions (see above).
ROWS = 8192
CLASSES = 8192
GROUP = 8  # row tiles whose programs run together, so that they find the weight in cache
_ALIGN = 16  # in elements: rows then begin at multiples of 16 bytes, whatever D and K
_TYPE = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@triton.jit
def _kernel(
    x: tl.tensor,  # [rows, depth]
    w: tl.tensor,  # [blocks·BN, depth]; rows from ``width`` on are zero
    bias: tl.tensor,  # [width], read only if WITH_BIAS
    shift: tl.tensor,  # [rows] τ - centre, in the accumulator's type; NaN: the row's loss is NaN
    label: tl.tensor,  # [rows] int64, of all classes
    row_weight: tl.tensor,  # [rows], read only if WEIGHTED
    slopes: tl.tensor,  # [rows, stride], blocks·BN columns are written, only if WITH_GRAD
    values: tl.tensor,  # [blocks, rows] parts of the loss
    totals: tl.tensor,  # [blocks, rows] sums of slopes
    means: tl.tensor,  # [blocks, rows] what was subtracted, written only if CENTRED and WITH_GRAD
    columns: tl.tensor,  # [row tiles, blocks·BN] sums over rows, written only if WITH_COLUMNS
    rows: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,  # the first class
    scale: tl.float64,
    inv_scale: tl.float64,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    TAIL: tl.constexpr,
    CENTRED: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
) -> None:
    """One tile of BM rows and BN classes a program."""
    ACC: tl.constexpr = values.dtype.element_ty
    TERMS: tl.constexpr = 16 if values.dtype.element_ty == tl.float64 else 7
    # Neighbours in time share rows of x and w in the second-level cache: GROUP row tiles at once.
    tiles, blocks = tl.cdiv(rows, BM), tl.cdiv(width, BN)
    program = tl.program_id(0)
    first = program // (GROUP * blocks) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    tile = first + program % (GROUP * blocks) % size
    block = program % (GROUP * blocks) // size

    row = tile * BM + tl.arange(0, BM)
    col = block * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)[None, :]
    real = row < rows
    row_64 = tl.minimum(row, rows - 1).to(tl.int64)  # a row beyond the end repeats the last one
    left = x + row_64[:, None] * depth + k
    right = w + col.to(tl.int64)[:, None] * depth + k
    h = tl.zeros((BM, BN), ACC)
    for at in range(0, depth, BK):
        if EVEN:
            a, b = tl.load(left + at), tl.load(right + at)
        else:
            mask = k < depth - at
            a = tl.load(left + at, mask=mask, other=0.0)
            b = tl.load(right + at, mask=mask, other=0.0)
        h = tl.dot(a, tl.trans(b), h, input_precision=PRECISION, out_dtype=ACC)

    inside = col < width
    if WITH_BIAS:
        h += tl.load(bias + col, mask=inside, other=0.0).to(ACC)[None, :]
    y = tl.load(label + row_64) - start
    counted = inside[None, :] & (col[None, :] != y[:, None])
    moved = tl.load(shift + row_64)
    poison = moved * 0.0  # NaN if the row's centre is not finite, else 0
    v = _argument(h, moved[:, None], tl.full((1, 1), inv_scale, ACC), counted, TAIL)
    e = tl.exp(v)
    value = tl.sum(_value(v, e, TAIL, TERMS), 1) * tl.full((1,), scale, ACC) + poison
    g = _slope(v, e, TAIL)
    total = tl.sum(g, 1) + poison
    place = block.to(tl.int64) * rows + row
    tl.store(values + place, value, mask=real)
    tl.store(totals + place, total, mask=real)
    if WITH_GRAD:
        base = poison
        if CENTRED:
            here = tl.minimum(width - block * BN, BN)
            hit = (y >= block * BN) & (y < block * BN + here)
            base = total / tl.maximum(here - hit.to(tl.int32), 1).to(ACC)
            tl.store(means + place, base, mask=real)
        g = tl.where(inside[None, :], g - base[:, None], 0.0)
        if WEIGHTED:
            g *= tl.load(row_weight + row_64).to(ACC)[:, None]
        if WITH_COLUMNS:
            summed = tl.sum(tl.where(real[:, None], g, 0.0), 0)
            tl.store(columns + tile.to(tl.int64) * (blocks * BN) + col, summed)
        sink = slopes + row_64[:, None] * stride + col[None, :]
        tl.store(sink, g.to(slopes.dtype.element_ty), mask=real[:, None])


class Plan(NamedTuple):
    """Tile of one program: ``bm`` rows and ``bn`` classes, ``bk`` numbers of depth at a time;
    ``num_warps`` warps, ``num_stages`` tiles of the operands on their way."""

    bm: int
    bn: int
    bk: int
    num_warps: int
    num_stages: int


def launch_plan(dtype: torch.dtype) -> Plan:
    """The largest square tile whose end, slopes and sums of all tails, does not spill."""
    if dtype == torch.float64:
        return Plan(32, 64, 16, 4, 2)
    if dtype == torch.float32:
        return Plan(128, 128, 16, 8, 4)
    return Plan(128, 128, 64, 8, 4)


class _Layout(NamedTuple):
    """Columns of a chunk's slopes: ``padded`` ≥ ``width`` for the classes, then ``extra`` for the
    ``blocks`` block means; all multiples of 16 but ``width`` and ``blocks``."""

    width: int
    blocks: int
    padded: int
    extra: int

    @property
    def columns(self) -> int:
        return self.padded + self.extra


def _layout(width: int, bn: int, constrained: bool) -> _Layout:
    blocks = triton.cdiv(width, bn)
    return _Layout(width, blocks, blocks * bn, _aligned(blocks) if constrained else 0)


def _aligned(size: int) -> int:
    return triton.cdiv(size, _ALIGN) * _ALIGN


class _Sums(NamedTuple):
    """What a launch leaves besides the slopes, in the working dtype."""

    values: Tensor  # [blocks, rows] parts of the loss
    totals: Tensor  # [blocks, rows] sums of the slopes
    means: Tensor | None  # [blocks, rows] what was subtracted from the slopes
    columns: Tensor | None  # [row tiles, padded] sums of the slopes over rows


class KernelSweep(_Sweep):
    """The sweep with tiles by kernel: chunks of classes in the outer loop, of rows in the inner."""

    def _product_dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype

    def _tile_shape(self, rows: int, classes: int) -> tuple[int, int]:
        return max(1, min(rows, ROWS)), min(classes, CLASSES)

    def _allocate(self, height: int, width: int) -> None:
        self._allocate_results()
        self.plan, depth = launch_plan(self.product), _aligned(self.x.shape[1])
        spare = depth - self.x.shape[1]
        self.padded = F.pad(self.x, (0, spare)) if spare else self.x  # [M, depth]
        columns = _layout(width, self.plan.bn, self.constrained).columns
        self.right = self.x.new_zeros((columns, depth), dtype=self.product)
        self.slopes = self._empty(height if self.any_grad else 0, columns, dtype=self.product)
        self.row_weight, unit = self._row_weights()
        self.alpha = self.settings.factor * unit

    def _row_weights(self) -> tuple[Tensor | None, float]:
        """Weights ``[M]`` that a slope can be multiplied by, and what they were divided by."""
        weight, unit = self.rows.weight, 1.0
        if weight is None or not self.any_grad:
            return None, unit
        if self.product == torch.float16 and weight.numel():
            top = float(weight.abs().max())
            unit = top if 0 < top < math.inf else 1.0
        return (weight[:, 0] / unit).contiguous(), unit

    def block(self, number: int, classes: slice) -> None:
        """All rows for one chunk of classes."""
        layout = self._load(classes)
        dw = db = None
        for tile in self.tiles:
            sums = self._launch(tile, classes.start, layout)
            self.loss[tile] += sums.values.sum(0)
            self.total[tile] += sums.totals.sum(0)
            if not self.any_grad:
                continue
            slopes = self.slopes[: tile.stop - tile.start, : layout.columns]
            rest = self._append_means(slopes, sums.means, tile, number, layout)
            if self.dx is not None:
                self._add_to_hidden(self.dx[tile], slopes, self.right[: layout.columns])
            if self.dw is not None:
                dw = _add_product(dw, slopes.t(), self.padded[tile])
            if sums.columns is not None:
                part = _columns(sums.columns, rest, layout)
                db = part if db is None else db + part
        self._store(dw, db, classes, layout)

    def _load(self, classes: slice) -> _Layout:
        """Copy the chunk's weights, followed by the mean of each block of them."""
        layout = _layout(classes.stop - classes.start, self.plan.bn, self.constrained)
        depth = self.x.shape[1]
        self.right[: layout.width, :depth] = self.weight[classes]
        self.right[layout.width : layout.columns] = 0
        if self.constrained:
            blocks = self.right[: layout.padded].view(layout.blocks, self.plan.bn, -1)
            means = blocks.sum(1, dtype=self.work) / self.plan.bn
            self.right[layout.padded : layout.padded + layout.blocks] = means
        return layout

    def _launch(self, tile: slice, start: int, layout: _Layout) -> _Sums:
        rows = tile.stop - tile.start
        centred = self.constrained and self.any_grad
        tiles = triton.cdiv(rows, self.plan.bm)
        sums = _Sums(
            values=self._empty(layout.blocks, rows),
            totals=self._empty(layout.blocks, rows),
            means=self._empty(layout.blocks, rows) if centred else None,
            columns=None if self.db is None else self._empty(tiles, layout.padded),
        )
        bias = None if self.bias is None else self.bias[start : start + layout.width].contiguous()
        slopes = self.slopes[:rows] if self.any_grad else None
        weight = None if self.row_weight is None else self.row_weight[tile]
        vectors = _Vectors(self.shift[tile], self.rows.label[tile], bias, weight)
        chunk = _Chunk(start, layout.width, self.settings.surrogate, self.plan)
        _launch(self.padded[tile], self.right, vectors, slopes, sums, chunk)
        return sums

    def _append_means(
        self, slopes: Tensor, means: Tensor | None, tile: slice, number: int, layout: _Layout
    ) -> Tensor | None:
        """Put ``bn·(c_nB − c_nC)`` behind the slopes; return it weighted, ``[blocks, rows]``."""
        if means is None:
            return None
        assert self.means is not None
        chunk = means.mean(0)
        self.means[tile, number] = chunk
        rest = means - chunk
        if self.row_weight is not None:
            rest = rest.mul_(self.row_weight[tile])
        slopes[:, layout.padded :] = 0
        slopes[:, layout.padded : layout.padded + layout.blocks] = rest.t() * self.plan.bn
        return rest

    def _add_to_hidden(self, total: Tensor, slopes: Tensor, right: Tensor) -> None:
        if total.dtype == right.dtype and total.shape[1] == right.shape[1]:
            total.addmm_(slopes, right, alpha=self.alpha)
        else:
            total.add_(_product(slopes, right)[:, : total.shape[1]], alpha=self.alpha)

    def _store(self, dw: Tensor | None, db: Tensor | None, classes: slice, at: _Layout) -> None:
        """Share the gradients of the block means out to their classes, and keep the chunk's."""
        if dw is not None and self.dw is not None:
            if self.constrained:
                means = dw[at.padded : at.padded + at.blocks, None]
                dw[: at.padded].view(at.blocks, self.plan.bn, -1).add_(
                    means, alpha=1 / self.plan.bn
                )
            self.dw[classes] = dw[: at.width, : self.x.shape[1]].mul_(self.alpha)
        if db is not None and self.db is not None:
            self.db[classes] = db[: at.width] * self.alpha


def _columns(columns: Tensor, rest: Tensor | None, layout: _Layout) -> Tensor:
    """Sums over the rows of slopes that are centred by the chunk's mean, ``[padded]``."""
    summed = columns.sum(0)
    if rest is not None:
        summed.view(layout.blocks, -1).add_(rest.sum(1)[:, None])
    return summed


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a@b``, in place."""
    if total is None:
        return _product(a, b)
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(_product(a, b))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a@b`` with sums and result in float32 for half precision."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return torch.mm(a, b)
    if a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


# --- the launch -----------------------------------------------------------------------------------


class _Vectors(NamedTuple):
    """Per-row and per-class inputs of a launch."""

    shift: Tensor  # [rows, 1]
    label: Tensor  # [rows]
    bias: Tensor | None  # [width]
    weight: Tensor | None  # [rows]


class _Chunk(NamedTuple):
    """The classes ``start … start + width``, and what to do with them."""

    start: int
    width: int
    surrogate: LinearCore
    plan: Plan


def _launch(
    x: Tensor,
    right: Tensor,
    vectors: _Vectors,
    slopes: Tensor | None,
    sums: _Sums,
    chunk: _Chunk,
) -> None:
    """Fill ``slopes`` and ``sums`` for the rows ``x`` and one chunk of classes."""
    (rows, depth), (start, width, surrogate, plan) = x.shape, chunk
    if rows == 0:
        return
    if x.dtype == torch.bfloat16 and interpreting():  # its products are wrong, its stores truncate
        wide = None if slopes is None else slopes.float()
        _launch(x.float(), right.float(), vectors, wide, sums, chunk)
        if slopes is not None and wide is not None:
            slopes.copy_(wide)
        return
    constants = _constants(
        plan,
        depth,
        tail=surrogate.tail,
        centred=sums.means is not None,
        biased=vectors.bias is not None,
        weighted=vectors.weight is not None,
        with_grad=slopes is not None,
        with_columns=sums.columns is not None,
    )
    grid = (triton.cdiv(rows, plan.bm) * triton.cdiv(width, plan.bn),)
    with torch.cuda.device_of(x):  # launch on the tensor's device; nothing for a CPU tensor
        _kernel[grid](
            x,
            right,
            x if vectors.bias is None else vectors.bias,
            vectors.shift,
            vectors.label.contiguous(),
            x if vectors.weight is None else vectors.weight,
            x if slopes is None else slopes,
            sums.values,
            sums.totals,
            x if sums.means is None else sums.means,
            x if sums.columns is None else sums.columns,
            rows,
            width,
            depth,
            0 if slopes is None else slopes.stride(0),
            start,
            float(surrogate.scale),
            1.0 / float(surrogate.scale),
            **constants,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )


def _constants(
    plan: Plan,
    depth: int,
    *,
    tail: str,
    centred: bool,
    biased: bool,
    weighted: bool,
    with_grad: bool,
    with_columns: bool,
    precision: str = "",
) -> dict[str, Any]:
    return {
        "BM": plan.bm,
        "BN": plan.bn,
        "BK": plan.bk,
        "GROUP": GROUP,
        "EVEN": depth % plan.bk == 0,
        "PRECISION": precision or _precision(),
        "TAIL": tail,
        "CENTRED": centred,
        "WITH_BIAS": biased,
        "WEIGHTED": weighted,
        "WITH_GRAD": with_grad,
        "WITH_COLUMNS": with_columns,
    }


def _precision() -> str:
    """How the kernel multiplies float32: as torch does."""
    settings = torch.backends.cuda.matmul
    if hasattr(settings, "fp32_precision"):  # torch 2.9; reading the older name can raise there
        return "tf32" if settings.fp32_precision == "tf32" else "ieee"
    return "tf32" if settings.allow_tf32 else "ieee"


# --- counts and ahead-of-time reports -------------------------------------------------------------


def kernel_spec(
    depth: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tail: str = "exponential",
    constrained: bool = True,
    precision: str = "ieee",
) -> KernelSpec:
    """What a training step with bias and row weights would launch for ``depth`` features, for
    ``proofread.triton_support.compile_reports``."""
    plan, item = launch_plan(dtype), _TYPE[dtype]
    acc = "fp64" if dtype == torch.float64 else "fp32"
    pointers = dict.fromkeys(("x", "w", "bias", "slopes"), f"*{item}") | {"label": "*i64"}
    sums = ("shift", "row_weight", "values", "totals", "means", "columns")
    pointers |= dict.fromkeys(sums, f"*{acc}")
    scalars = dict.fromkeys(("rows", "width", "depth", "stride", "start"), "i32")
    scalars |= dict.fromkeys(("scale", "inv_scale"), "fp64")
    given = dict.fromkeys(("biased", "weighted", "with_grad", "with_columns"), True)
    return KernelSpec(
        module=__name__,
        kernel="_kernel",
        signature=pointers | scalars,
        constexprs=_constants(
            plan, _aligned(depth), tail=tail, centred=constrained, precision=precision, **given
        ),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        divisible_by_16=(*pointers, "depth", "stride", "start"),
        label=f"fused {tail} {item if precision == 'ieee' else precision} D={depth}",
    )


def bytes_requested(
    rows: int,
    classes: int,
    depth: int,
    dtype: torch.dtype,
    *,
    constrained: bool = True,
    biased: bool = False,
    weighted: bool = False,
    with_grad: bool = True,
) -> int:
    """Bytes that the programs of one launch load and store, by count.

    Each program reads its tiles of both operands; caches serve most of the repeats. ``biased``
    counts the gradient of the bias as well, if ``with_grad``.
    """
    plan, item = launch_plan(dtype), ITEM_BYTES[dtype]
    acc, depth = max(4, item), _aligned(depth)
    tiles, blocks = triton.cdiv(rows, plan.bm), triton.cdiv(classes, plan.bn)
    vector = 8 + acc + (acc if weighted and with_grad else 0)  # label, shift, weight
    loads = tiles * blocks * ((plan.bm + plan.bn) * depth * item + plan.bm * vector)
    loads += tiles * classes * item if biased else 0
    stores = blocks * rows * acc * (3 if constrained and with_grad else 2)
    if with_grad:
        stores += rows * blocks * plan.bn * item
        stores += tiles * blocks * plan.bn * acc if biased else 0
    return loads + stores


def workspace_bytes(rows: int, classes: int, depth: int, dtype: torch.dtype) -> int:
    """Bytes that the loss takes beyond inputs and gradients, at most and by count.

    For the constrained form with gradients for ``hidden`` and ``weight``: the slopes of a chunk,
    its copy of the weight and the gradient of that, the chunks' means and mean weights; for half
    precision also ``[N, D]`` sums and one product in float32. What is one number a row or a class
    is left out.
    """
    item, wide = ITEM_BYTES[dtype], _aligned(depth)
    acc, height = max(4, item), min(rows, ROWS)
    columns = _layout(min(classes, CLASSES), launch_plan(dtype).bn, True).columns
    size = height * columns * item + columns * wide * (item + acc)
    if item < acc or depth != wide:
        size += max(height, columns) * wide * acc
    size += rows * depth * acc if item < acc else 0
    size += rows * wide * item if depth != wide else 0
    return size + triton.cdiv(classes, CLASSES) * (rows + depth) * acc
