"""Triton kernel of the Gauss–Newton product: one launch, and nothing of a sample is written out.

For N samples, K outputs, a weight ``[O, I]`` and B directions V the result is
``(1/N) Σ_i A_iᵀ S_i A_i V h_i h_iᵀ``. A program takes ``BN`` rows and one direction:

1. for each block of O: ``u = V h`` by matrix product over I, and ``c += A u``;
2. ``c ← S c``, ``[BN, K]`` in registers: the only thing that must be complete before step 3;
3. for each block of O: ``s = Aᵀ c``, and for each block of I ``out += sᵀ h`` by matrix product.

``u``, ``c`` and ``s`` live in registers and shared memory. Each of ``splits`` programs of a
direction adds its row blocks up in a slice of its own, ``[B, O, I]``, and torch adds the slices:
no atomics, so the result is reproducible bit by bit.

**Count**, for one direction, items of b bytes and T = N/BN row blocks:

- FLOP: 4·N·O·I + 4·N·K·O, those of the torch path; nothing is made twice.
- The torch path writes and reads ``u`` and ``s``: 4b·N·O bytes, and c: 4b·N·K, or 6b with ``S``.
- The kernel reads and writes the sums once a row block instead: at most 2b·T·O·I bytes. That is
  2·BN/b FLOP a byte or more: in float32 64 up to 16 outputs (BN = 128), 16 beyond (BN = 32). A
  GPU that makes 165 TFLOP/s of float32 (three TF32 products each) and moves 4.3 TB/s needs 38;
  beyond 16 outputs the slices have to stay in its second-level cache. These are *more* bytes than
  the torch path's where I > 2·BN: what the kernel saves is the memory for ``[N, B, O]``, twice.
- Had each program a tile ``[BO, BI]`` of the result instead, and ``c`` from a launch before, it
  would make s again for every block of I, K/BI more arithmetic, and read K·BO numbers of A for
  every 2·BO·BI FLOP: 6 FLOP a byte for K = 10 and BI = 128. Hence one launch.
- A is requested twice a direction, in steps 1 and 3. Programs of neighbouring directions take the
  same rows at the same time, so that caches can serve all but the first.

:func:`product_cost` returns these counts. Times are not claimed: none was measured on a GPU.

**Precision.** float32 products are made of three TF32 products each ("tf32x3"), which keeps
float32's accuracy, whatever torch allows; float64 runs on its own tensor cores.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from proofread.triton_support import KernelSpec

__all__ = [
    "KERNELS",
    "Cost",
    "Plan",
    "gauss_newton_triton",
    "kernel_spec",
    "launch_plan",
    "product_cost",
    "takes",
]

MAX_OUTPUTS = 256  # beyond, the coefficients c of 32 rows do not fit in registers
PROGRAMS = 264  # two for each of 132 processors
WORKSPACE_BYTES = 256 << 20  # at most for the slices, if there is more than one
_TYPE = {torch.float64: "fp64", torch.float32: "fp32"}
_INDEX_LIMIT = 2**31


@triton.jit
def _kernel(
    backward: tl.tensor,  # [N, K, O]
    features: tl.tensor,  # [N, I]
    direction: tl.tensor,  # [B, O, I]
    probabilities: tl.tensor,  # [N, K], read only if SOFTMAX
    partial: tl.tensor,  # [splits, B, O, I]
    n_rows: tl.tensor,
    n_outputs: tl.tensor,  # K
    o_groups: tl.tensor,  # O // VEC_O: tells the compiler that O is a multiple of VEC_O
    i_groups: tl.tensor,  # I // VEC_I
    inv_n: tl.float64,
    VEC_O: tl.constexpr,
    VEC_I: tl.constexpr,
    BN: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    KP: tl.constexpr,
    SOFTMAX: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Row blocks ``split``, ``split + splits``, … for one direction a program."""
    ACC: tl.constexpr = partial.dtype.element_ty
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_directions, splits = tl.num_programs(0), tl.num_programs(1)
    width, depth = o_groups * VEC_O, i_groups * VEC_I
    n, o, i, k = tl.arange(0, BN), tl.arange(0, BO), tl.arange(0, BI), tl.arange(0, KP)
    tile = o[:, None] * depth + i[None, :]  # [BO, BI], of V and of the sums alike
    source = direction + b * width * depth
    sink = partial + (split * n_directions + b) * width * depth

    for start in range(split * BN, n_rows, splits * BN):
        # 64 bits for the block, 32 within it: half the registers for addresses.
        first = tl.cast(start, tl.int64)
        near = tl.minimum(start + n, n_rows - 1) - start  # beyond the end: the last row, times 0
        x, x_tile = features + first * depth, near[:, None] * depth + i[None, :]  # [BN, BI]
        a = backward + first * n_outputs * width
        a_tile = (near * (n_outputs * width))[:, None] + o[None, :]  # [BN, BO]

        # 1. c = A V h
        c = tl.zeros((BN, KP), ACC)
        for at in range(0, width, BO):
            in_o = (at + o) // VEC_O < o_groups
            u = tl.zeros((BN, BO), ACC)
            for j in range(0, depth, BI):
                in_i = (j + i) // VEC_I < i_groups
                h = tl.load(x + j + x_tile, mask=in_i[None, :], other=0.0)
                inside = in_o[:, None] & in_i[None, :]
                v = tl.load(source + at * depth + j + tile, mask=inside, other=0.0)
                u = tl.dot(h, tl.trans(v), u, input_precision=PRECISION, out_dtype=ACC)
            for q in tl.range(n_outputs, num_stages=2):
                a_q = tl.load(a + q * width + at + a_tile, mask=in_o[None, :], other=0.0)
                c += tl.where(k[None, :] == q, tl.sum(a_q * u, 1)[:, None], 0.0)

        # 2. S c / N
        if SOFTMAX:
            p_tile = near[:, None] * n_outputs + k[None, :]  # [BN, KP]
            p = tl.load(
                probabilities + first * n_outputs + p_tile, mask=k[None, :] < n_outputs, other=0.0
            )
            c = p * c
            c -= p * tl.sum(c, 1)[:, None]
        c = tl.where((start + n < n_rows)[:, None], c * tl.full((1, 1), inv_n, ACC), 0.0)

        # 3. s = Aᵀ c, and its outer products with h
        for at in range(0, width, BO):
            in_o = (at + o) // VEC_O < o_groups
            s = tl.zeros((BN, BO), ACC)
            for q in tl.range(n_outputs, num_stages=2):
                a_q = tl.load(a + q * width + at + a_tile, mask=in_o[None, :], other=0.0)
                s += tl.sum(tl.where(k[None, :] == q, c, 0.0), 1)[:, None] * a_q
            st = tl.trans(s)
            for j in range(0, depth, BI):
                in_i = (j + i) // VEC_I < i_groups
                inside = in_o[:, None] & in_i[None, :]
                h = tl.load(x + j + x_tile, mask=in_i[None, :], other=0.0)
                place = sink + at * depth + j + tile
                old = tl.load(place, mask=inside & (start != split * BN), other=0.0)
                new = tl.dot(st, h, old, input_precision=PRECISION, out_dtype=ACC)
                tl.store(place, new, mask=inside)
        tl.debug_barrier()  # the next rows add to what other threads may have stored


class Plan(NamedTuple):
    """Blocks of one program.

    - ``bn``, ``bo``, ``bi``: rows, O and I at a time;
    - ``kp``: K rounded up to a power of two;
    - ``vec_o``, ``vec_i``: numbers that one memory access may take along O and I;
    - ``num_warps``, ``num_stages``: warps, and tiles of the operands on their way.
    """

    bn: int
    bo: int
    bi: int
    kp: int
    vec_o: int
    vec_i: int
    num_warps: int
    num_stages: int


# Rows, O and I of a tile for up to so many outputs: the largest found that do not spill.
_TILES = {
    torch.float32: ((16, (128, 64, 16)), (MAX_OUTPUTS, (32, 64, 32))),
    torch.float64: ((64, (32, 64, 32)), (MAX_OUTPUTS, (16, 32, 16))),
}


def launch_plan(n_outputs: int, width: int, depth: int, dtype: torch.dtype) -> Plan:
    """The tiles for K ≤ 256 outputs, a weight ``[O, I]``, and float32 or float64.

    More outputs leave registers for fewer rows, and so do the narrow accesses of an odd O or I,
    which need more addresses.
    """
    item = dtype.itemsize
    kp = triton.next_power_of_2(max(2, n_outputs))
    vec_o, vec_i = math.gcd(width, 16 // item), math.gcd(depth, 16 // item)
    narrow = dtype == torch.float32 and min(vec_o, vec_i) == 1
    held = MAX_OUTPUTS if narrow else kp
    bn, bo, bi = next(tile for most, tile in _TILES[dtype] if held <= most)
    bo = min(bo, max(16, triton.next_power_of_2(width)))
    return Plan(bn, bo, bi, kp, vec_o, vec_i, 8, 2 if dtype == torch.float64 else 3)


def takes(n_outputs: int, width: int, depth: int) -> bool:
    """Whether the kernel takes a problem of K outputs and a weight ``[O, I]``: K ≤ 256, and
    offsets within a block of rows and within a direction that fit in 32 bits."""
    largest = max(width * depth, 128 * n_outputs * width, 128 * depth)
    return n_outputs <= MAX_OUTPUTS and largest < _INDEX_LIMIT - 2**16


def _splits(n_rows: int, n_directions: int, weight_bytes: int, bn: int) -> int:
    """Programs, and so slices of the sums, a direction; ``weight_bytes`` of one slice of one."""
    room = WORKSPACE_BYTES // (n_directions * weight_bytes)
    wanted = min(triton.cdiv(PROGRAMS, n_directions), triton.cdiv(n_rows, bn))
    return max(1, min(wanted, room))


def gauss_newton_triton(
    backward: Tensor, features: Tensor, stack: Tensor, probabilities: Tensor | None
) -> Tensor:
    """The product ``[B, O, I]`` for directions ``stack`` ``[B, O, I]``.

    The caller has checked shapes, dtypes and devices, and :func:`takes`. Inputs that are not
    contiguous are copied.
    """
    (n, k, o), (b, _, inner) = backward.shape, stack.shape
    plan = launch_plan(k, o, inner, features.dtype)
    splits = _splits(n, b, o * inner * features.element_size(), plan.bn)
    partial = _empty(stack, (splits, b, o, inner))
    softmax = probabilities is not None
    with torch.cuda.device_of(features):  # the tensor's device; nothing for a CPU tensor
        _kernel[(b, splits)](
            backward.contiguous(),
            features.contiguous(),
            stack.contiguous(),
            features if probabilities is None else probabilities.contiguous(),
            partial,
            n,
            k,
            o // plan.vec_o,
            inner // plan.vec_i,
            1.0 / n,
            **_constants(plan, features.dtype, softmax),
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )
    return partial[0] if splits == 1 else partial.sum(0)


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_empty(shape)


def _constants(plan: Plan, dtype: torch.dtype, softmax: bool) -> dict[str, Any]:
    return {
        "VEC_O": plan.vec_o,
        "VEC_I": plan.vec_i,
        "BN": plan.bn,
        "BO": plan.bo,
        "BI": plan.bi,
        "KP": plan.kp,
        "SOFTMAX": softmax,
        "PRECISION": "ieee" if dtype == torch.float64 else "tf32x3",
    }


# --- counts and ahead-of-time reports -------------------------------------------------------------


class Cost(NamedTuple):
    """Arithmetic and memory traffic of one product, by count.

    - ``flops``: of either path;
    - ``fused_bytes``: inputs once, every reading and writing of the sums, and their last addition:
      what the kernel moves if caches serve all repeats of its inputs;
    - ``requested_bytes``: all that its programs load and store, repeats included;
    - ``unfused_bytes``: torch without blocks, each operation reading its inputs and writing its
      result once;
    - ``workspace_bytes``: slices of the sums, beyond the result; 0 if there is one slice;
    - ``intermediate_bytes``: ``u`` and ``s`` and ``c`` of the unfused path.
    """

    flops: int
    fused_bytes: int
    requested_bytes: int
    unfused_bytes: int
    workspace_bytes: int
    intermediate_bytes: int


def product_cost(
    n_rows: int,
    n_outputs: int,
    width: int,
    depth: int,
    n_directions: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    softmax: bool = False,
) -> Cost:
    """:class:`Cost` for N rows, K outputs, a weight ``[O, I]`` and B directions.

    ``softmax``: with ``S = diag(p) − p pᵀ`` instead of the identity.
    """
    n, k, o, i, b = n_rows, n_outputs, width, depth, n_directions
    plan, item = launch_plan(k, o, i, dtype), dtype.itemsize
    blocks, weight = triton.cdiv(n, plan.bn), b * o * i
    splits = _splits(n, b, o * i * item, plan.bn)
    inputs = n * k * o + n * i + weight + (n * k if softmax else 0)
    sums = (2 * blocks - splits) * weight  # the first row block of a slice reads nothing
    last = (splits + 1) * weight if splits > 1 else 0
    a_block, x_block = 2 * plan.bn * k * o, 2 * triton.cdiv(o, plan.bo) * plan.bn * i
    block = a_block + x_block + o * i + (plan.bn * k if softmax else 0)
    middle = n * b * (2 * o + k)  # u, s, c
    again = n * k * o + n * i + weight + (2 * n * b * k if softmax else 0)  # A, h, result, S c
    return Cost(
        flops=4 * n * b * o * (i + k) + (4 * n * b * k if softmax else 0),
        fused_bytes=item * (inputs + sums + last),
        requested_bytes=item * (b * blocks * block + sums),
        unfused_bytes=item * (inputs + 2 * middle + again),
        workspace_bytes=item * splits * weight if splits > 1 else 0,
        intermediate_bytes=item * middle,
    )


def kernel_spec(
    n_outputs: int,
    width: int,
    depth: int,
    dtype: torch.dtype = torch.float32,
    *,
    softmax: bool = True,
) -> KernelSpec:
    """What :func:`gauss_newton_triton` would launch for K, O and I, for
    ``proofread.triton_support.compile_reports``."""
    plan, item = launch_plan(n_outputs, width, depth, dtype), _TYPE[dtype]
    names = ("backward", "features", "direction", "probabilities", "partial")
    pointers = dict.fromkeys(names, f"*{item}")
    scalars = dict.fromkeys(("n_rows", "n_outputs", "o_groups", "i_groups"), "i32")
    return KernelSpec(
        module=__name__,
        kernel="_kernel",
        signature=pointers | scalars | {"inv_n": "fp64"},
        constexprs=_constants(plan, dtype, softmax),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        divisible_by_16=names,
        label=f"Gauss–Newton {item} K={n_outputs} [{width}, {depth}]",
    )


# For the book's table: a hidden layer, a last layer, many outputs, odd sizes, float64.
KERNELS = (
    kernel_spec(10, 256, 784),
    kernel_spec(10, 10, 256),
    kernel_spec(100, 512, 512),
    kernel_spec(10, 255, 127),
    kernel_spec(10, 256, 784, torch.float64),
)
