"""The Gauss–Newton kernel against the written-out matrix in float64: in the interpreter, or
compiled on a GPU. The slices of the sums start as NaNs between guards, so that a number nobody
wrote, or one that was added to before it was written, shows in the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from proofread.triton_support import compile_reports, force_triton, interpreting
from proofread.ufm_spectra import products
from proofread.ufm_spectra.products import gauss_newton_product

pytest.importorskip("triton")
from proofread.ufm_spectra import kernels
from proofread.ufm_spectra.kernels import (
    KERNELS,
    launch_plan,
    product_cost,
    takes,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
GPU_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
GUARD = 64
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may take

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
DEVICES = (
    pytest.param("cpu", marks=interpreted, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
)
on_devices = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SHAPES = {  # N, K, O, I, B
    "one of everything": (1, 1, 1, 1, 1),
    "two outputs, odd": (37, 2, 7, 11, 3),
    "several row blocks": (300, 10, 20, 33, 1),
    "whole tiles": (128, 16, 64, 32, 1),
    "several blocks of O": (20, 3, 130, 20, 2),
    "last layer": (40, 10, 10, 24, 3),
    "33 outputs": (70, 33, 12, 18, 1),
    "100 outputs": (35, 100, 10, 8, 1),
}
Problem = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    buffers: list[Tensor] = []

    def empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        buffer = like.new_full((size + 2 * GUARD,), 123.0)
        buffer[GUARD : GUARD + size] = math.nan
        buffers.append(buffer)
        return buffer[GUARD : GUARD + size].view(shape)

    monkeypatch.setattr(kernels, "_empty", empty)
    yield
    for buffer in buffers:
        assert (buffer[:GUARD] == 123).all(), "written before the beginning of a buffer"
        assert (buffer[-GUARD:] == 123).all(), "written past the end of a buffer"


def naive(a: Tensor, h: Tensor, v: Tensor, p: Tensor | None) -> Tensor:
    """``(1/N) Σ_i J_iᵀ S_i J_i V`` with ``J_i = A_i ⊗ h_i`` written out, ``[N, K, O, I]``."""
    jacobian = torch.einsum("nko,ni->nkoi", a, h)
    s = torch.eye(a.shape[1], dtype=a.dtype).expand(len(a), -1, -1)
    if p is not None:
        s = torch.diag_embed(p) - torch.einsum("nk,nl->nkl", p, p)
    c = torch.einsum("nkoi,boi->nbk", jacobian, v)
    return torch.einsum("nkoi,nkl,nbl->boi", jacobian, s, c) / len(a)


def problem(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Problem:
    """backward [N, K, O], features [N, I], direction [B, O, I], probabilities [N, K]."""
    n, k, o, i, b = shape
    g = torch.Generator().manual_seed(sum(shape))
    sizes = ((n, k, o), (n, i), (b, o, i), (n, k))
    a, h, v, z = (torch.randn(*size, generator=g, dtype=torch.float64) for size in sizes)
    a, h, v, p = (t.to(device, dtype) for t in (a, h, v, torch.softmax(z, 1)))
    return a, h, v, p


def kernel(a: Tensor, h: Tensor, v: Tensor, p: Tensor | None) -> Tensor:
    with force_triton():
        return gauss_newton_product(a, h, v, p)


def check(a: Tensor, h: Tensor, v: Tensor, p: Tensor | None) -> None:
    """The kernel's largest error, relative to the largest number, is one of rounding."""
    found = kernel(a, h, v, p)
    q = None if p is None else p.double().cpu()
    right = naive(a.double().cpu(), h.double().cpu(), v.double().cpu(), q)
    assert found.dtype == h.dtype
    assert found.device == h.device
    tolerance = (TOLERANCE if interpreting() else GPU_TOLERANCE)[found.dtype]
    scale = max(float(right.abs().max()), 1e-3)
    torch.testing.assert_close(found.double().cpu(), right, rtol=0, atol=tolerance * scale)


# --- the product ----------------------------------------------------------------------------------


@on_devices
@dtypes
@pytest.mark.parametrize("softmax", [False, True], ids=["mse", "cross-entropy"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_equals_the_written_out_matrix(
    shape: tuple[int, ...], softmax: bool, dtype: torch.dtype, device: str
) -> None:
    a, h, v, p = problem(shape, dtype, device)
    check(a, h, v, p if softmax else None)


@on_devices
@dtypes
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_sums_over_row_blocks(
    splits: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several row blocks to a slice, and several slices: also where they don't divide evenly."""
    monkeypatch.setattr(kernels, "PROGRAMS", 2 * splits)
    a, h, v, p = problem((530, 3, 20, 33, 2), dtype, device)
    check(a, h, v, p)


@on_devices
def test_slices_stay_within_their_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, h, v, p = problem((300, 2, 6, 8, 2), device=device)
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 3 * v.numel() * 8)
    assert product_cost(300, 2, 6, 8, 2, dtype=torch.float64).workspace_bytes == 3 * v.numel() * 8
    check(a, h, v, p)
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 1)
    assert product_cost(300, 2, 6, 8, 2, dtype=torch.float64).workspace_bytes == 0
    check(a, h, v, p)


@on_devices
@dtypes
def test_strides_and_a_single_direction(dtype: torch.dtype, device: str) -> None:
    a, h, v, p = problem((37, 5, 7, 11, 3), dtype, device)
    right = kernel(a, h, v, p)
    odd = (
        a.transpose(1, 2).contiguous().transpose(1, 2),
        h.repeat_interleave(2, 1)[:, ::2],
        v.mT.contiguous().mT,
        p.repeat_interleave(3, 0)[::3],
    )
    assert not any(t.is_contiguous() for t in odd)
    assert torch.equal(kernel(*odd), right)
    one = kernel(a, h, v[1], p)
    assert one.shape == v[1].shape
    torch.testing.assert_close(one, right[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    shared = a[:1].expand(37, 5, 7)  # one backward for all samples
    assert torch.equal(kernel(shared, h, v, p), kernel(shared.contiguous(), h, v, p))


@on_devices
def test_reproducible_bit_by_bit(device: str) -> None:
    inputs = problem((300, 3, 20, 18, 1), torch.float32, device)
    first = kernel(*inputs)
    assert all(torch.equal(kernel(*inputs), first) for _ in range(2 if device == "cpu" else 20))


@on_devices
def test_rows_beyond_the_end_of_a_block_add_nothing(device: str) -> None:
    """Large numbers in the last row, which stands in for the rows that are missing."""
    a, h, v, p = problem((33, 3, 4, 5, 1), device=device)
    a[-1] *= 1e3
    h[-1] *= 1e3
    check(a, h, v, p)
    check(a, h, v, None)


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("at", range(4))
def test_not_a_number_shows(at: int, device: str) -> None:
    inputs = problem((9, 3, 4, 5, 2), device=device)
    inputs[at].view(-1)[7] = math.nan
    assert kernel(*inputs).isnan().any()


# --- dispatch -------------------------------------------------------------------------------------


@on_devices
def test_more_outputs_than_registers_take_torch(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, plain = [], kernels.gauss_newton_triton

    def counted(*args: Any) -> Tensor:
        launched.append(args)
        return plain(*args)

    monkeypatch.setattr(kernels, "gauss_newton_triton", counted)
    check(*problem((5, 257, 3, 4, 1), device=device))
    assert not launched
    check(*problem((5, 20, 3, 4, 1), device=device))
    assert len(launched) == 1


def test_what_the_kernel_takes() -> None:
    assert takes(10, 256, 784)
    assert takes(256, 4096, 4096)
    assert not takes(257, 3, 3)
    assert not takes(2, 65536, 65536)  # offsets of a direction need more than 32 bits
    assert not takes(256, 65536, 4)  # offsets of a block of rows do


@interpreted
def test_cpu_tensors_take_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_on_gpu", None)
    gauss_newton_product(*problem((9, 3, 4, 5, 2)))


@interpreted
def test_errors_come_before_the_launch() -> None:
    a, h, v, p = problem((9, 3, 4, 5, 2))
    with pytest.raises(TypeError, match="backward must be float32 or float64"):
        kernel(a.half(), h, v, p)
    with pytest.raises(ValueError, match=r"direction must be \[2, 4, 5\]"):
        kernel(a, h, v[:, :3], p)


# --- counts ---------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "programs"),
    [
        ((70, 3, 70, 20, 2), torch.float32, 264),
        ((300, 2, 18, 33, 1), torch.float32, 3),
        ((70, 5, 33, 40, 2), torch.float64, 2),
    ],
)
def test_counted_bytes_are_the_requested_bytes(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    programs: int,
    softmax: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Count every lane that the interpreter loads or stores under an active mask."""
    from triton.runtime import interpreter

    moved = [0]
    builder = type(interpreter.interpreter_builder)

    def counting(name: str, mask_at: int) -> None:
        original = getattr(builder, name)

        def wrapper(self: Any, ptrs: Any, *rest: Any) -> Any:
            lanes = int(rest[mask_at].data.sum())
            moved[0] += lanes * (ptrs.dtype.element_ty.primitive_bitwidth // 8)
            return original(self, ptrs, *rest)

        monkeypatch.setattr(builder, name, wrapper)

    counting("create_masked_load", 0)
    counting("create_masked_store", 1)
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    a, h, v, p = problem(shape, dtype)
    kernel(a, h, v, p if softmax else None)
    n, k, o, i, b = shape
    cost = product_cost(n, k, o, i, b, dtype=dtype, softmax=softmax)
    assert moved[0] == cost.requested_bytes


def test_counts_by_hand() -> None:
    """A layer [256, 784], 6400 rows in 50 blocks of 128, 10 outputs, float32."""
    cost = product_cost(6400, 10, 256, 784)
    weight = 4 * 256 * 784
    assert cost.flops == 4 * 6400 * 256 * 794
    inputs = 4 * (6400 * 10 * 256 + 6400 * 784) + weight
    assert cost.workspace_bytes == 50 * weight  # a slice for each block: written, read, added up
    assert cost.fused_bytes == inputs + 50 * weight + 51 * weight
    assert cost.intermediate_bytes == 4 * 6400 * (256 + 256 + 10)
    assert cost.unfused_bytes == 2 * inputs + 2 * cost.intermediate_bytes
    many = product_cost(6400, 10, 256, 784, 300)  # one slice: no addition, no workspace
    assert many.workspace_bytes == 0
    assert many.fused_bytes == inputs - weight + 300 * weight * (1 + 2 * 50 - 1)
    assert many.intermediate_bytes == 300 * cost.intermediate_bytes


# --- machine code ---------------------------------------------------------------------------------


def test_machine_code() -> None:
    """Nothing spills, tiles fit, rows of a multiple of 16 bytes move 128 bits at a time, and
    products run on tensor cores. One test: the cases take one process to compile."""
    made = iter(compile_reports(KERNELS, capabilities=(80, 90)))
    for spec in KERNELS:
        at = spec.constexprs
        wide = {at["VEC_O"], at["VEC_I"]} == {2 if spec.signature["partial"] == "*fp64" else 4}
        for report in (next(made), next(made)):
            assert not report.spills, report
            assert report.shared_bytes <= SHARED_LIMIT[report.capability]
            assert report.mma > 0
            if wide:
                numbers = spec.num_warps * 32 * at["VEC_I"]  # that a wide instruction moves
                # h and V, h and the sums, and A twice: at the least once each in the code.
                tiles = 2 * at["BI"] * (at["BN"] + at["BO"]) + 2 * at["BN"] * at["BO"]
                assert report.global_loads[128] >= tiles // numbers
                assert set(report.global_stores) == {128}
                narrow = set(report.global_loads) - {128}
                assert narrow <= {32 if at["VEC_I"] == 4 else 64}  # probabilities, rows of K


def test_table_covers_the_ways_to_launch() -> None:
    """Every tile that ``launch_plan`` knows for wide rows is compiled above."""
    tiles = {tuple(spec.constexprs[n] for n in ("BN", "BO", "BI")) for spec in KERNELS}
    for dtype, limits in ((torch.float32, (2, 16, 17, 256)), (torch.float64, (2, 64))):
        for k in limits:
            assert launch_plan(k, 256, 256, dtype)[:3] in tiles


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_plans_fit_their_tensors(dtype: torch.dtype) -> None:
    for k, o, i in itertools.product((1, 2, 3, 100, 256), (1, 10, 17, 1024), (1, 6, 784)):
        plan = launch_plan(k, o, i, dtype)
        assert plan.kp >= k
        assert o % plan.vec_o == 0
        assert i % plan.vec_i == 0
        assert 16 <= plan.bo <= max(16, 2 * o)
