"""Triton kernel of unadjusted Langevin: many steps of many chains in one launch, noise included.

A program takes a few chains, reads their states once, makes all steps in registers and writes the
states once. A step ``x' = x + h(−pull·y + push·a) + √(2h) ξ`` with ``y = x − origin`` needs two
sums over a chain at the most, ``u = a·y`` and ``‖y‖²``: they are made within the program, so that
no step waits for another program. The perpendicular part ``w = ‖y‖² − u²`` of a radial law is never
made: float32 would lose it where the axis dominates. A trap needs ``‖y‖`` only; the exponents of a
mixture's shares are linear in u and ``‖y‖²``.

**Count**, for an element of b bytes and K steps a launch:

- Eager torch moves 11b bytes an element and a step: noise written (b), drift ``−pull·y`` (2b),
  ``push·a`` added in place (2b), ``x + h·drift`` (3b), ``+ √(2h)·noise`` (3b). That is 44 bytes in
  float32; each sum over a chain reads the state once more, b.
- The kernel moves 2b/K: 8/K bytes in float32. Axis and origin, once a program, and a mixture's
  parameters, once a step, come from caches.
- What remains is arithmetic. One Philox call makes four normals: ten rounds of two 32×32 → 64-bit
  products and two three-operand exclusive ors, that is 20 products and 20 ors; two logarithms and
  two square roots; two pairs of polynomials in place of sines and cosines. A mixture of M
  components adds 2M exponentials in each thread.

:func:`step_cost` returns these counts. Times are not claimed: none was measured on a GPU.

**Noise.** Normals of dimensions 4g … 4g + 3 of one chain at one step come from one call of
Philox-4x32-10 (Salmon et al., 2011) with key ``seed`` and counter ``(g, step mod 2³², step div 2³²,
chain)``, 32 bits each: no two of (g, step, chain) share a counter while chains are below 2³² and
steps below 2⁶³, which is checked. They count from ``first_chain`` and ``first_step``: the result
does not depend on how chains are batched, nor on how steps are shared out to launches, bit by bit.
Box–Muller takes 32 bits for the radius, at midpoints, so that normals reach 6.76, and 32 for the
angle. It works in float32, and float64 states take the same numbers: the law of the noise is the
normal one up to float32's rounding, about 10⁻⁷ relative to its size.

**Precision.** Sums over a chain are made in the dtype of the states, as a tree. A mixture's
exponents are differences of large numbers: float64, from sums in the dtype of the states; its
exponentials are in the dtype of the states.

**Limits.** d ≤ 4096: 16 elements of state, axis and origin in each of 256 threads. Lanes are a
power of two, so that d just above one leaves almost half of them idle. Nothing spills on sm_80 and
sm_90: all 252 combinations of dtype, law, lanes and width of accesses were compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from proofread.triton_support import KernelSpec, interpreting

from .scores import GAUSSIAN, MIXTURE, TRAP, RadialLaw

__all__ = [
    "KERNELS",
    "Cost",
    "Plan",
    "kernel_spec",
    "langevin_triton",
    "launch_plan",
    "step_cost",
    "takes",
]

MAX_DIMENSION = 4096  # beyond, a chain does not fit into the registers of 8 warps
TILE_BYTES = 4096  # states of a program at the least
_NAMES = ("Gaussian", "trap", "mixture")
_TYPE = {torch.float64: "fp64", torch.float32: "fp32"}
_GAUSSIAN, _TRAP = tl.constexpr(GAUSSIAN), tl.constexpr(TRAP)
_QUARTER = tl.constexpr(math.pi / 4)


@triton.jit
def _columns(first: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr) -> tl.tensor:
    """VEC dimensions from ``first`` on in each group of four: ``[1, G, VEC]``."""
    group = (4 * tl.arange(0, LANES))[None, :, None]
    return group + (tl.arange(0, VEC) + first)[None, None, :]


@triton.jit
def _some(
    row: tl.tensor,
    here: tl.tensor,
    groups: tl.tensor,
    first: tl.constexpr,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """VEC dimensions of each group of four of rows at pointers ``[R, 1, 1]``: ``[R, G, VEC]``."""
    col = _columns(first, LANES, VEC)
    return tl.load(row + col, mask=here & (col // VEC < groups), other=0.0)


@triton.jit
def _load(
    row: tl.tensor, here: tl.tensor, groups: tl.tensor, LANES: tl.constexpr, VEC: tl.constexpr
) -> tl.tensor:
    """Dimensions 4g, 4g + 1, 4g + 2 and 4g + 3 of the rows, ``[R, G]`` each.

    VEC numbers at a time, all of one group, so that nothing changes hands between threads.
    """
    R: tl.constexpr = row.shape[0]
    if VEC == 4:
        four = _some(row, here, groups, 0, LANES, 4)
        even, odd = tl.split(tl.reshape(four, (R, LANES, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    elif VEC == 2:
        x0, x1 = tl.split(_some(row, here, groups, 0, LANES, 2))
        x2, x3 = tl.split(_some(row, here, groups, 2, LANES, 2))
    else:
        x0 = tl.reshape(_some(row, here, groups, 0, LANES, 1), (R, LANES))
        x1 = tl.reshape(_some(row, here, groups, 1, LANES, 1), (R, LANES))
        x2 = tl.reshape(_some(row, here, groups, 2, LANES, 1), (R, LANES))
        x3 = tl.reshape(_some(row, here, groups, 3, LANES, 1), (R, LANES))
    return x0, x1, x2, x3


@triton.jit
def _put(
    row: tl.tensor,
    some: tl.tensor,
    here: tl.tensor,
    groups: tl.tensor,
    first: tl.constexpr,
    VEC: tl.constexpr,
) -> None:
    """The inverse of ``_some``."""
    col = _columns(first, some.shape[1], VEC)
    some = tl.reshape(some, (some.shape[0], some.shape[1], VEC))
    tl.store(row + col, some, mask=here & (col // VEC < groups))


@triton.jit
def _store(
    row: tl.tensor,
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    x3: tl.tensor,
    here: tl.tensor,
    groups: tl.tensor,
    VEC: tl.constexpr,
) -> None:
    """The inverse of ``_load``."""
    if VEC == 4:
        _put(row, tl.join(tl.join(x0, x2), tl.join(x1, x3)), here, groups, 0, 4)
    elif VEC == 2:
        _put(row, tl.join(x0, x1), here, groups, 0, 2)
        _put(row, tl.join(x2, x3), here, groups, 2, 2)
    else:
        _put(row, x0, here, groups, 0, 1)
        _put(row, x1, here, groups, 1, 1)
        _put(row, x2, here, groups, 2, 1)
        _put(row, x3, here, groups, 3, 1)


@triton.jit
def _normals(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Two independent normals from two random words: Box–Muller.

    The angle is ``f`` in [−π/4, π/4) from 30 bits; one more bit swaps sine and cosine and the last
    one turns by π, which makes it uniform on the circle. No slow path for large angles.
    """
    radius = tl.sqrt(-2.0 * tl.log(a.to(tl.float32) * 2.0**-32 + 2.0**-33))
    radius = (radius.to(tl.uint32, bitcast=True) ^ (b & 0x80000000)).to(tl.float32, bitcast=True)
    f = (b << 2).to(tl.int32, bitcast=True).to(tl.float32) * (_QUARTER * 2.0**-31)
    q = f * f
    sine = f + f * q * (-1 / 6 + q * (1 / 120 + q * (-1 / 5040 + q * (1 / 362880))))
    cosine = 1.0 + q * (-1 / 2 + q * (1 / 24 + q * (-1 / 720 + q * (1 / 40320))))
    swap = (b & 0x40000000) != 0
    return radius * tl.where(swap, sine, cosine), radius * tl.where(swap, cosine, sine)


@triton.jit
def _shares(u: tl.tensor, square: tl.tensor, law: tl.tensor, n: tl.tensor) -> tl.tensor:
    """pull and push ``[R, 1]`` of a mixture with n components; ``law``: what ``_components`` makes.

    One pass: sums are scaled to the largest exponent so far.
    """
    u64, half = u.to(tl.float64), square.to(tl.float64) * 0.5
    base = tl.load(law + 2 * n)  # a precision common to all cancels before it meets ‖y‖²
    top = tl.full(u.shape, -float("inf"), tl.float64)
    total, pull, push = u * 0, u * 0, u * 0
    for k in range(n):
        bias, slope, precision = tl.load(law + k), tl.load(law + n + k), tl.load(law + 2 * n + k)
        exponent = bias + u64 * slope - half * (precision - base)
        higher = tl.maximum(top, exponent)
        old, share = tl.exp((top - higher).to(u.dtype)), tl.exp((exponent - higher).to(u.dtype))
        total = total * old + share
        pull = pull * old + share * precision.to(u.dtype)
        push = push * old + share * slope.to(u.dtype)
        top = higher
    return pull / total, push / total


@triton.jit(
    do_not_specialize=[
        "n_components",
        "n_chains",
        "groups",
        "end_groups",
        "end_chains",
        "n_steps",
        "seed",
        "first_step",
        "first_chain",
    ]
)
def _kernel(
    x: tl.tensor,  # [C, d]
    out: tl.tensor,  # [C, d]
    axis: tl.tensor,  # [d]
    origin: tl.tensor,  # [d]
    numbers: tl.tensor,  # float64: h, √(2h), and what _parameters makes of the law
    n_components: tl.int32,
    n_chains: tl.int64,
    groups: tl.int32,  # d // VEC: tells the compiler that d is a multiple of VEC
    end_groups: tl.int32,  # the same: else the addresses of x stay in registers until the end
    end_chains: tl.int64,  # n_chains
    n_steps: tl.int64,
    seed: tl.int64,
    first_step: tl.int64,
    first_chain: tl.int64,
    VEC: tl.constexpr,
    CHAINS: tl.constexpr,
    LANES: tl.constexpr,  # groups of four dimensions, a power of two
    LAW: tl.constexpr,
    FULL: tl.constexpr,  # d = 4·LANES
) -> None:
    T: tl.constexpr = x.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * CHAINS
    row, group = tl.arange(0, CHAINS), tl.arange(0, LANES)
    depth = groups * VEC
    here = (first + row < n_chains)[:, None, None]
    tile = first * depth + (row * depth)[:, None, None]
    one = tl.zeros((1, 1, 1), tl.int32)
    x0, x1, x2, x3 = _load(x + tile, here, groups, LANES, VEC)
    o0, o1, o2, o3 = _load(origin + one, one == 0, groups, LANES, VEC)
    a0, a1, a2, a3 = _load(axis + one, one == 0, groups, LANES, VEC)
    h, scale, law = tl.load(numbers).to(T), tl.load(numbers + 1).to(T), numbers + 2
    chain = (first_chain + first + row).to(tl.uint32)[:, None]
    l0, l1, l2, l3 = tl.load(law), tl.load(law + 1), tl.load(law + 2), tl.load(law + 3)
    l0, l1, l2, l3 = l0.to(T), l1.to(T), l2.to(T), l3.to(T)

    for i in range(n_steps):
        at = first_step + i
        low, high = at.to(tl.uint32), (at >> 32).to(tl.uint32)
        b0, b1, b2, b3 = tl.philox(seed, group[None, :], low, high, chain)
        z0, z1 = _normals(b0, b1)
        z2, z3 = _normals(b2, b3)
        if not FULL:  # nothing may enter the sums beyond the last dimension
            z0 = tl.where(((4 * group) // VEC < groups)[None, :], z0, 0.0)
            z1 = tl.where(((4 * group + 1) // VEC < groups)[None, :], z1, 0.0)
            z2 = tl.where(((4 * group + 2) // VEC < groups)[None, :], z2, 0.0)
            z3 = tl.where(((4 * group + 3) // VEC < groups)[None, :], z3, 0.0)
        y0, y1, y2, y3 = x0 - o0, x1 - o1, x2 - o2, x3 - o3
        if LAW == _GAUSSIAN:
            pull, push = l0, l1
        else:
            square = tl.sum(y0 * y0 + y1 * y1 + y2 * y2 + y3 * y3, 1, keep_dims=True)
            if LAW == _TRAP:
                psi = tl.minimum(tl.maximum((l2 - tl.sqrt(square)) * l3, 0.0), 1.0)
                pull, push = 1 + psi * l0, (1 - psi) * l1
            else:
                u = tl.sum(a0 * y0 + a1 * y1 + a2 * y2 + a3 * y3, 1, keep_dims=True)
                pull, push = _shares(u, square, law, n_components)
        pull, push = h * pull, h * push
        x0 += push * a0 - pull * y0 + scale * z0.to(T)
        x1 += push * a1 - pull * y1 + scale * z1.to(T)
        x2 += push * a2 - pull * y2 + scale * z2.to(T)
        x3 += push * a3 - pull * y3 + scale * z3.to(T)

    depth = end_groups * VEC
    here = (first + row < end_chains)[:, None, None]
    tile = first * depth + (row * depth)[:, None, None]
    _store(out + tile, x0, x1, x2, x3, here, end_groups, VEC)


class Plan(NamedTuple):
    """Tile of one program; depends on dimension and dtype only, so that sums are made in one order.

    - ``chains``: chains of a program;
    - ``lanes``: groups of four dimensions, a power of two with ``4·lanes ≥ d``;
    - ``vec``: numbers that one memory access may take along d;
    - ``num_warps``: warps.
    """

    chains: int
    lanes: int
    vec: int
    num_warps: int


def takes(dimension: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernel takes chains of this dimension and dtype, for every law: d ≤ 4096, in
    float32 or float64. Callers fall back to torch for others."""
    return 1 <= dimension <= MAX_DIMENSION and dtype in _TYPE


def launch_plan(dimension: int, dtype: torch.dtype) -> Plan:
    """The tile for chains of dimension d: 4 to 16 elements a thread."""
    lanes = triton.next_power_of_2(triton.cdiv(dimension, 4))
    elements = max(TILE_BYTES // dtype.itemsize, 4 * lanes)
    vec = math.gcd(dimension, 16 // dtype.itemsize)
    warps = 4 if elements <= 256 * dtype.itemsize else 8  # of those tried, the one without spills
    return Plan(elements // (4 * lanes), lanes, vec, warps)


def langevin_triton(
    x: Tensor,
    law: RadialLaw,
    axis: Tensor,
    origin: Tensor,
    step: float,
    n_steps: int,
    seed: int,
    first_step: int = 0,
    first_chain: int = 0,
) -> Tensor:
    """``n_steps`` steps of unadjusted Langevin for each row of ``x``, in one launch.

    Rows of two calls with ``first_chain`` 0 and C, and steps of two calls with ``first_step`` 0 and
    K, are those of one call, bit by bit. Nothing is checked afterwards: a chain that diverges holds
    infinities and NaNs, and so does one that started there; the caller looks.

    Args:
        x: chains ``[C, d]``, float32 or float64, on a GPU; copied if not contiguous, never changed.
        law: how pull and push depend on the state, from a score's ``law``.
        axis: unit vector ``[d]``; any device and dtype.
        origin: ``[d]``; any device and dtype.
        step: step size h > 0.
        n_steps: steps to make, 0 or more.
        seed: 0 ≤ seed < 2⁶³.
        first_step: steps that were made before, which the noise counts from.
        first_chain: number of the first row's chain, which the noise counts from.

    Returns:
        the last states, ``[C, d]``.

    Raises:
        TypeError: ``x`` is neither float32 nor float64.
        ValueError: a shape, a size that :func:`takes` refuses, a count out of range, a step that is
            not positive, or a law with parameters that make no sense.
    """
    _check(x, axis, origin, step)
    counts = _counts(len(x), n_steps, seed, first_step, first_chain)
    parameters = _parameters(law)
    if not x.numel() or not n_steps:
        return x.clone()
    plan, x = launch_plan(x.shape[1], x.dtype), _aligned(x)
    out = _empty(x)
    with torch.cuda.device_of(x):  # the tensor's device; nothing for a CPU tensor
        _kernel[(triton.cdiv(len(x), plan.chains),)](
            x,
            out,
            _aligned(axis.to(x)),
            _aligned(origin.to(x)),
            torch.tensor(
                [step, math.sqrt(2 * step), *parameters], dtype=torch.float64, device=x.device
            ),
            len(parameters) // 3,
            len(x),
            x.shape[1] // plan.vec,
            x.shape[1] // plan.vec,
            len(x),
            *counts,
            **_constants(x.shape[1], plan, law.kind),
            num_warps=plan.num_warps,
        )
    return out


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like)


def _aligned(t: Tensor) -> Tensor:
    """Contiguous from a multiple of 16 bytes, so that all launches run the same machine code."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def _check(x: Tensor, axis: Tensor, origin: Tensor, step: float) -> None:
    if x.dtype not in _TYPE:
        raise TypeError(f"x must be float32 or float64, not {x.dtype}: convert it with x.float()")
    if x.ndim != 2 or not takes(x.shape[1], x.dtype):
        raise ValueError(
            f"x must be [C, d] with 1 ≤ d ≤ {MAX_DIMENSION}, not {list(x.shape)}: "
            "use the torch path for others"
        )
    for name, vector in (("axis", axis), ("origin", origin)):
        if vector.shape != x.shape[1:]:
            raise ValueError(f"{name} must be [{x.shape[1]}], not {list(vector.shape)}")
    if not (x.is_cuda or interpreting()):
        raise ValueError(f"x is on {x.device}: move it to a GPU, or use the torch path")
    if not 0 < step < math.inf:
        raise ValueError(f"step must be positive and finite, not {step}")


def _counts(
    n_chains: int, n_steps: int, seed: int, first_step: int, first_chain: int
) -> tuple[int, int, int, int]:
    """The counts in the kernel's order: what they count must fit into Philox's key and counter."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be at least 0 and below 2**63, not {seed}")
    for name, first, more, bits in (
        ("first_step", first_step, n_steps, 63),
        ("first_chain", first_chain, n_chains, 32),
    ):
        if not (first >= 0 <= more and first + more < 2**bits):
            what = "n_steps" if bits == 63 else "the number of chains"
            raise ValueError(
                f"{name} and {what} must be at least 0 and their sum below 2**{bits}, "
                f"not {first} and {more}: take another seed beyond"
            )
    return n_steps, seed, first_step, first_chain


def _parameters(law: RadialLaw) -> list[float]:
    """What the kernel reads of a law: 4 numbers, or at least 3K of a mixture.

    - Gaussian: pull, push;
    - trap: α − 1, m, outer radius, 1/(outer − inner);
    - mixture: biases, slopes and precisions; component k has the share exp(bias_k + slope_k·u −
      precision_k·‖y‖²/2), up to a factor.
    """
    p = law.parameters
    if not all(map(math.isfinite, p)):
        raise ValueError(f"law: the parameters must be finite, not {p}")
    if law.kind == GAUSSIAN and len(p) == 2 and p[1] > 0:
        return [1 / p[1], p[0] / p[1], 0.0, 0.0]
    if law.kind == TRAP and len(p) == 4 and p[2] < p[3]:
        return [p[1] - 1, p[0], p[3], 1 / (p[3] - p[2])]
    n = int(p[0]) if law.kind == MIXTURE and p else 0
    if n >= 1 and len(p) == 3 * n + 1 and min(p[1 + 2 * n :]) > 0:
        return _components(p[1 : 1 + n], p[1 + n : 1 + 2 * n], p[1 + 2 * n :])
    raise ValueError(
        f"law must be Gaussian (0) with (m, variance > 0), trap (1) with (m, α, inner < outer) or "
        f"mixture (2) with (K, log weights, positions, variances > 0), not {law}"
    )


def _components(
    log_weights: Sequence[float], positions: Sequence[float], variances: Sequence[float]
) -> list[float]:
    """``[3, K]`` in one list, and one number more where K = 1: the kernel reads four."""
    biases = [
        w - m * m / (2 * v) for w, m, v in zip(log_weights, positions, variances, strict=True)
    ]
    slopes = [m / v for m, v in zip(positions, variances, strict=True)]
    padding = [0.0] if len(biases) == 1 else []
    return biases + slopes + [1 / v for v in variances] + padding


def _constants(dimension: int, plan: Plan, kind: int) -> dict[str, Any]:
    return {
        "VEC": plan.vec,
        "CHAINS": plan.chains,
        "LANES": plan.lanes,
        "LAW": kind,
        "FULL": dimension == 4 * plan.lanes,
    }


# --- counts and ahead-of-time reports -------------------------------------------------------------


class Cost(NamedTuple):
    """Memory traffic and arithmetic of one launch, by count.

    - ``element_steps``: C·d·K, to divide by;
    - ``fused_bytes``: states read once and written once;
    - ``requested_bytes``: all that the programs load and store; axis, origin and the law's
      parameters, which each program asks for, come from caches;
    - ``unfused_bytes``: eager torch, each operation reading its inputs and writing its result once;
    - ``philox_calls``: with those for lanes beyond the last dimension and the last chain;
    - ``integer_products``: 32 × 32 → 64 bits; a GPU makes each by two instructions;
    - ``exclusive_ors``: of three operands;
    - ``special_functions``: logarithms and square roots of the noise.
    """

    element_steps: int
    fused_bytes: int
    requested_bytes: int
    unfused_bytes: int
    philox_calls: int
    integer_products: int
    exclusive_ors: int
    special_functions: int


def step_cost(
    n_chains: int,
    dimension: int,
    n_steps: int = 1,
    kind: int = TRAP,
    dtype: torch.dtype = torch.float32,
    *,
    n_components: int = 2,
) -> Cost:
    """:class:`Cost` of a launch for C chains of dimension d, K steps and a kind of law.

    ``n_components`` counts for a mixture only.
    """
    plan, item = launch_plan(dimension, dtype), dtype.itemsize
    programs = triton.cdiv(n_chains, plan.chains)
    states = 2 * item * n_chains * dimension
    again = 8 * (3 * n_components + 1) * n_steps if kind == MIXTURE else 0
    calls = programs * plan.chains * plan.lanes * n_steps
    sums = {GAUSSIAN: 0, TRAP: 1, MIXTURE: 2}[kind]
    return Cost(
        element_steps=n_chains * dimension * n_steps,
        fused_bytes=states,
        requested_bytes=states + programs * (2 * item * dimension + 6 * 8 + again),
        unfused_bytes=(11 + sums) * item * n_chains * dimension * n_steps,
        philox_calls=calls,
        integer_products=20 * calls,
        exclusive_ors=20 * calls,
        special_functions=4 * calls,
    )


def kernel_spec(dimension: int, kind: int = TRAP, dtype: torch.dtype = torch.float32) -> KernelSpec:
    """What :func:`langevin_triton` would launch for d, a kind of law and a dtype, for
    ``proofread.triton_support.compile_reports``."""
    plan, item = launch_plan(dimension, dtype), _TYPE[dtype]
    pointers = dict.fromkeys(("x", "out", "axis", "origin"), f"*{item}") | {"numbers": "*fp64"}
    sizes = {"n_components": "i32", "n_chains": "i64", "groups": "i32"}
    sizes |= {"end_groups": "i32", "end_chains": "i64"}
    counts = dict.fromkeys(("n_steps", "seed", "first_step", "first_chain"), "i64")
    return KernelSpec(
        module=__name__,
        kernel="_kernel",
        signature=pointers | sizes | counts,
        constexprs=_constants(dimension, plan, kind),
        num_warps=plan.num_warps,
        divisible_by_16=tuple(pointers),
        label=f"Langevin {_NAMES[kind]} {item} d={dimension}",
    )


# For the book's table: each law, small to largest sizes, an odd size, float64.
KERNELS = (
    kernel_spec(64),
    kernel_spec(1024),
    kernel_spec(4096),
    kernel_spec(1001),
    kernel_spec(1024, GAUSSIAN),
    kernel_spec(64, MIXTURE),
    kernel_spec(4096, MIXTURE),
    kernel_spec(1024, TRAP, torch.float64),
    kernel_spec(4096, MIXTURE, torch.float64),
)
