"""The Triton kernel against the formula in float64: in the interpreter, or compiled on a GPU.

Every input lies between NaNs and every output is allocated as NaNs between guards: a lane beyond
the end of a row shows in the result, and an element that nobody writes stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from proofread import triton_support
from proofread.linear_core import linear_core_loss
from proofread.triton_support import KernelReport, compile_reports, force_triton, interpreting

pytest.importorskip("triton")
from proofread.linear_core import kernels
from proofread.linear_core.kernels import (
    Plan,
    bytes_minimum,
    bytes_moved,
    kernel_spec,
    launch_plan,
    linear_core_forward,
    on_chip_limit,
)

TAILS = ("exponential", "gamma", "logistic")
GUARD = 64  # elements before and after each tensor
IGNORED = -100

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
DEVICES = (
    pytest.param("cpu", marks=interpreted, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
)
on_devices = pytest.mark.parametrize("device", DEVICES)


# --- the naive twin -------------------------------------------------------------------------------


def phi(u: Tensor, core: float, scale: float, tail: str) -> Tensor:
    """Φ(u): slope −1 up to τ, then the tail in v = (u − τ)/s."""
    v = (u - core).clamp(min=0) / scale
    beyond = {
        "exponential": scale * torch.exp(-v),
        "gamma": scale * (2 + v) * torch.exp(-v),
        "logistic": 2 * scale * torch.log1p(torch.exp(-v)),
    }[tail]
    at_core = {"exponential": scale, "gamma": 2 * scale, "logistic": 2 * scale * math.log(2)}[tail]
    return torch.where(u <= core, at_core + core - u, beyond)


def naive(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    core: float,
    scale: float,
    tail: str,
) -> tuple[Tensor, Tensor]:
    """Row by row from the definition, in float64; the gradient by automatic differentiation."""
    h = logits.detach().cpu().double().requires_grad_()  # [N, K]
    losses = []
    for row, label in zip(h, target.tolist(), strict=True):
        if label == IGNORED:
            losses.append(0.0 * row.detach().nan_to_num().sum())
            continue
        centred = row - row.mean()
        others = [j for j in range(len(row)) if j != label]
        w = 1.0 if weight is None else float(weight[label])
        losses.append(w * phi(-centred[others], core, scale, tail).sum())
    loss = torch.stack(losses)
    (grad,) = torch.autograd.grad(loss.sum(), h, allow_unused=True)
    return loss.detach(), grad


# --- problems between guards ----------------------------------------------------------------------


def between(values: Tensor, guard: float = math.nan) -> Tensor:
    """A contiguous copy of ``values`` in the middle of a buffer of guards."""
    buffer = torch.full((values.numel() + 2 * GUARD,), guard, dtype=values.dtype).to(values.device)
    middle = buffer[GUARD : GUARD + values.numel()].view(values.shape)
    middle.copy_(values)
    return middle


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs start as NaN, between guards that must survive."""
    buffers: list[Tensor] = []

    def empty(*size: Any, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        shape = torch.Size(size[0] if isinstance(size[0], (tuple, torch.Size)) else size)
        buffer = torch.full((shape.numel() + 2 * GUARD,), 123.0, dtype=dtype, device=device)
        buffer[GUARD : GUARD + shape.numel()] = math.nan
        buffers.append(buffer)
        return buffer[GUARD : GUARD + shape.numel()].view(shape)

    class Torch:
        """``torch`` as the kernel's module sees it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    proxy = Torch()
    proxy.empty = empty
    proxy.empty_like = lambda t: empty(t.shape, dtype=t.dtype, device=t.device)
    monkeypatch.setattr(kernels, "torch", proxy)
    yield
    for buffer in buffers:
        assert (buffer[:GUARD] == 123).all(), "written before the beginning of an output"
        assert (buffer[-GUARD:] == 123).all(), "written past the end of an output"


def problem(
    rows: int, classes: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets with row 1 ignored, class weights."""
    generator = torch.Generator().manual_seed(seed + 1000 * classes + rows)
    logits = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    target = torch.randint(classes, (rows,), generator=generator)
    if rows > 1:
        target[1] = IGNORED
    target[-1] = classes - 1  # the edge of the row
    weight = torch.rand(classes, generator=generator) + 0.5
    logits, weight = between(logits.to(dtype)), between(weight)
    return logits.to(device), target.to(device), weight.to(device)


def launch(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    defaults = {"core": 1.0, "scale": 1.0, "tail": "exponential", "ignore_index": IGNORED}
    settings = defaults | {"with_grad": True} | options
    loss, grad = linear_core_forward(logits, target, class_weight=weight, **settings)
    assert grad is not None
    return loss, grad


def check(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    core: float = 1.0,
    scale: float = 1.0,
    tail: str = "exponential",
    rtol: float = 2e-6,
) -> None:
    loss, grad = launch(logits, target, weight, core=core, scale=scale, tail=tail)
    expected_loss, expected_grad = naive(logits, target, weight, core, scale, tail)
    torch.testing.assert_close(loss.cpu().double(), expected_loss, rtol=rtol, atol=1e-12)
    # A gradient is the difference of a slope ≤ 1 and a mean: absolute error, per unit of weight.
    grad_tolerance = max(rtol, {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(logits.dtype, 0))
    torch.testing.assert_close(
        grad.cpu().double(), expected_grad, rtol=grad_tolerance, atol=2 * rtol
    )
    ignored = target == IGNORED
    assert (loss[ignored] == 0).all()
    assert (grad[ignored] == 0).all()


RTOL = {"cpu": 2e-6, "cuda": 2e-5}  # GPU: approximate exponential and division


# --- values ---------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("classes", [2, 3, 5, 17, 128, 1000, 1025])
def test_equals_the_formula(classes: int, tail: str, device: str) -> None:
    logits, target, weight = problem(3, classes, device=device)
    check(logits, target, weight, tail=tail, rtol=RTOL[device])


@on_devices
@pytest.mark.parametrize(("core", "scale"), [(0.3, 0.1), (2.5, 4.0), (1e-3, 1e3)])
@pytest.mark.parametrize("tail", TAILS)
def test_core_and_scale(tail: str, core: float, scale: float, device: str) -> None:
    logits, target, _ = problem(4, 33, device=device)
    check(logits, target, core=core, scale=scale, tail=tail, rtol=5 * RTOL[device])


@on_devices
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, tail: str, device: str) -> None:
    """Sums are float32 or better: from half-precision logits only the stored gradient is rounded
    (to bfloat16 the interpreter even truncates: one unit in the last place, 2⁻⁷)."""
    logits, target, weight = problem(3, 200, dtype, device)
    loss, grad = launch(logits, target, weight)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert grad.dtype == dtype
    rtol = 1e-13 if dtype == torch.float64 else RTOL[device]
    weight = weight if dtype != torch.float64 else torch.ones_like(weight)  # float32 weights
    check(logits, target, weight, tail=tail, core=0.7, scale=0.3, rtol=rtol)


@on_devices
def test_values_by_hand(device: str) -> None:
    """h = (2, 0, −2), y = 0: h̃ = h, and Φ(0) + Φ(2) = 2 + e⁻¹; y = 2: Φ(−2) + Φ(0) = 6."""
    logits = torch.tensor([[2.0, 0.0, -2.0]] * 2, device=device)
    loss, grad = launch(logits, torch.tensor([0, 2], device=device))
    e = math.exp(-1)
    assert loss.tolist() == pytest.approx([2 + e, 6.0], rel=1e-6)
    mean = (1 + e) / 3
    expected = torch.tensor([[-mean, 1 - mean, e - mean], [1 / 3, 1 / 3, -2 / 3]])
    torch.testing.assert_close(grad.cpu(), expected)


@on_devices
def test_only_the_loss(device: str) -> None:
    logits, target, weight = problem(5, 40, device=device)
    options = {"core": 1.0, "scale": 1.0, "tail": "gamma", "ignore_index": IGNORED}
    loss, grad = linear_core_forward(
        logits, target, class_weight=weight, with_grad=False, **options
    )
    assert grad is None
    expected, _ = naive(logits, target, weight, 1.0, 1.0, "gamma")
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=RTOL[device], atol=0)


@on_devices
@pytest.mark.parametrize(("classes", "cut"), [(3, None), (200, None), (200, "stream-edge")])
def test_a_common_offset_costs_no_digits(
    classes: int, cut: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits on a grid of 2⁻¹⁰, so that adding 4096 is exact; a mean rounded at 4096 would be
    wrong by 2⁻¹², and the loss by as much for each class."""
    if cut:
        plan_with(monkeypatch, CUTS[cut][1])
    logits, target, _ = problem(2, classes, device=device)
    logits = (logits * 1024).round() / 1024
    loss, grad = launch(logits, target)
    moved, moved_grad = launch(logits + 4096, target)
    torch.testing.assert_close(moved, loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(moved_grad, grad, rtol=0, atol=1e-6)


@on_devices
@pytest.mark.parametrize("v", [1e-3, 0.1, 0.5, 3.0, 37 / 3, 77 / 3])
def test_logistic_tail_keeps_relative_accuracy(v: float, device: str) -> None:
    """Where its series converges most slowly (v → 0), and far out, where e^(−v) is below the
    spacing of float32 at 1. h = (2(1 + v), −(1 + v), −(1 + v)), y = 0: twice the tail at v."""
    logits = torch.tensor([[2 * (1 + v), -1 - v, -1 - v]], device=device)
    loss, _ = launch(logits, torch.tensor([0], device=device), tail="logistic")
    assert loss.item() == pytest.approx(4 * math.log1p(math.exp(-v)), rel=8e-6)


# --- the cut of a row -----------------------------------------------------------------------------


def plan_with(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    monkeypatch.setattr(kernels, "launch_plan", lambda n_cols, dtype: plan)


CUTS = {
    "parts": (130, Plan(2, 1, 32, 5, False, 4)),
    "parts-full": (128, Plan(4, 1, 32, 4, False, 4)),
    "rows": (5, Plan(1, 8, 8, 1, False, 4)),
    "rows-parts": (13, Plan(1, 2, 8, 2, False, 4)),
    "stream-one": (65, Plan(1, 1, 32, 2, True, 4)),
    "stream-edge": (200, Plan(4, 1, 32, 2, True, 4)),
    "stream-full": (192, Plan(4, 1, 32, 2, True, 4)),
    "stream-rows": (37, Plan(1, 2, 16, 1, True, 4)),
    "stream-long": (1025, Plan(1, 1, 64, 3, True, 4)),
}


@on_devices
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_gives_the_same(
    cut: str, tail: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parts, several rows a program, streamed columns; the row ends at, before and
    after a boundary."""
    classes, plan = CUTS[cut]
    plan_with(monkeypatch, plan)
    logits, target, weight = problem(3, classes, device=device)
    target[0] = min(plan.block, classes - 1)  # a target in the second part
    check(logits, target, weight, core=0.5, scale=0.25, tail=tail, rtol=5 * RTOL[device])


def test_plans_cover_each_row_once() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        limit = on_chip_limit(dtype)
        for classes in (2, 3, 10, 1000, 1001, 4096, limit - 1, limit, limit + 1, 50257, 10**6):
            plan = launch_plan(classes, dtype)
            held = plan.block * plan.parts
            assert plan.stream == (classes > limit)
            assert classes % plan.vec == 0
            assert plan.vec * kernels.ITEM_BYTES[dtype] <= 16
            if plan.stream:
                assert held <= classes
            else:
                assert held - plan.block < classes <= held
            assert held * plan.rows <= 1024 * max(1, plan.num_warps)
            assert plan.num_warps * 32 <= 1024


# --- hostile input --------------------------------------------------------------------------------


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("cut", "tail"), [*((None, tail) for tail in TAILS), ("stream-edge", "exponential")]
)
def test_not_finite_is_never_a_finite_loss(
    value: float, tail: str, cut: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the target, elsewhere, and in the streamed columns; the other rows are untouched."""
    classes = 200
    if cut:
        plan_with(monkeypatch, CUTS[cut][1])
    logits, target, _ = problem(5, classes, device=device)
    clean, clean_grad = launch(logits, target, tail=tail)
    bad = {0: int(target[0]), 2: (int(target[2]) + 1) % classes, 4: 150}
    for row, column in bad.items():
        logits[row, column] = value
    loss, grad = launch(logits, target, tail=tail)
    for row in range(5):
        if row in bad:
            assert loss[row].isnan()
            assert grad[row].isnan().all()
        else:
            assert loss[row] == clean[row]
            assert torch.equal(grad[row], clean_grad[row])


@on_devices
def test_ignored_rows_may_hold_anything(device: str) -> None:
    logits, target, weight = problem(4, 20, device=device)
    logits[1] = math.nan
    loss, grad = launch(logits, target, weight)
    assert loss[1] == 0
    assert (grad[1] == 0).all()
    target[:] = IGNORED
    loss, grad = launch(logits, target, weight)
    assert (loss == 0).all()
    assert (grad == 0).all()


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tail", TAILS)
def test_huge_but_finite_logits(tail: str, device: str) -> None:
    """(1e30, 0, 0) with a tail of length 1e-10 overflows w, in the tail to exactly nothing."""
    logits = torch.tensor([[1e30, 0.0, 0.0], [1e30, 0.0, 0.0]], device=device)
    target = torch.tensor([0, 1], device=device)
    loss, grad = launch(logits, target, tail=tail, scale=1e-10)
    assert loss[0] == 0
    assert (grad[0] == 0).all()
    third = 1 / 3
    torch.testing.assert_close(grad[1].cpu(), torch.tensor([2 * third, -third, -third]))


@pytest.mark.parametrize("shape", [(0, 7), (0, 40000)])
def test_no_rows_no_launch(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_kernel", None)
    loss, grad = launch(torch.zeros(shape), torch.zeros(0, dtype=torch.int64))
    assert loss.shape == (0,)
    assert grad.shape == shape


def test_refuses_what_it_cannot_do() -> None:
    h, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"logits: torch\.int32"):
        launch(h.int(), y)
    with pytest.raises(ValueError, match="contiguous"):
        launch(torch.zeros(3, 2).T, y)
    with pytest.raises(ValueError, match="contiguous"):
        launch(torch.zeros(2, 3, 4), y)
    with pytest.raises(ValueError, match="target must be int64"):
        launch(h, y.int())
    with pytest.raises(ValueError, match="target must be int64"):
        launch(h, y[:1])
    with pytest.raises(ValueError, match="tail: 'cubic'"):
        launch(h, y, tail="cubic")


@interpreted
def test_target_and_weight_may_be_strided() -> None:
    logits, target, weight = problem(4, 9)
    target_2, weight_2 = torch.stack([target, target], 1), torch.stack([weight, weight], 1)
    check(logits, target_2[:, 0], weight_2[:, 0])


# --- the public function --------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_public_function_takes_the_kernel(
    dtype: torch.dtype, reduction: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel and torch path agree, with weights, ignored targets and extra dimensions."""
    launches = []
    forward = kernels.linear_core_forward
    monkeypatch.setattr(
        kernels, "linear_core_forward", lambda *a, **k: launches.append(1) or forward(*a, **k)
    )
    _, target, weight = problem(3, 21, device=device)
    logits = torch.randn(3, 21, 2, device=device).to(dtype)
    target = torch.stack([target, target.flip(0)], 1)
    results = []
    for way in (force_triton(), nullcontext()):
        h = logits.clone().requires_grad_()
        with way:
            loss = linear_core_loss(
                h, target, reduction=reduction, class_weight=weight, tail="gamma", scale=0.5
            )
        loss.float().sin().sum().backward()
        results.append((loss.detach().float(), h.grad.float()))
        if len(results) == 1:
            assert launches, "the kernel was not launched"
            monkeypatch.setattr(triton_support, "use_triton", lambda tensor: False)
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, rtol=rtol, atol=rtol / 10)


# --- bytes ----------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("cut", ["parts", "rows", "stream-edge", None])
def test_counted_bytes_are_the_moved_bytes(
    cut: str | None,
    dtype: torch.dtype,
    with_grad: bool,
    weighted: bool,
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
    classes = CUTS[cut][0] if cut else 300
    if cut:
        plan_with(monkeypatch, CUTS[cut][1])
    logits, target, weight = problem(3, classes, dtype)
    target[1] = 0  # no ignored row: those are not read
    options = {"core": 1.0, "scale": 1.0, "tail": "exponential", "ignore_index": IGNORED}
    linear_core_forward(
        logits, target, class_weight=weight if weighted else None, with_grad=with_grad, **options
    )
    asked = {"with_grad": with_grad, "weighted": weighted}
    assert moved[0] == bytes_moved(3, classes, dtype, **asked)
    least = bytes_minimum(3, classes, dtype, **asked)
    assert (moved[0] > least) if cut == "stream-edge" else (moved[0] == least)


def test_minimum_by_hand() -> None:
    """float32 [10, 1000]: 4 + 4 bytes a logit, 8 a label, 4 a loss; bfloat16 without gradient."""
    assert bytes_minimum(10, 1000, torch.float32) == 10 * (8000 + 12)
    assert bytes_minimum(10, 1000, torch.bfloat16, with_grad=False) == 10 * (2000 + 12)
    assert bytes_minimum(10, 1000, torch.float32, weighted=True) == 10 * (8000 + 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_on_chip_rows_move_the_minimum(dtype: torch.dtype) -> None:
    limit = on_chip_limit(dtype)
    for classes in range(2, limit + 1, 997):
        assert bytes_moved(1, classes, dtype) == bytes_minimum(1, classes, dtype)
    # Beyond: all columns read once, those after the first 3/4 of the limit twice more.
    assert bytes_moved(1, limit + 1, dtype) > bytes_minimum(1, limit + 1, dtype)
    size = kernels.ITEM_BYTES[dtype]
    extra = bytes_moved(1, 4 * limit, dtype) - bytes_minimum(1, 4 * limit, dtype)
    assert extra == 2 * size * (4 * limit - limit * 3 // 4)


# --- machine code ---------------------------------------------------------------------------------

CASES = (
    (32000, torch.float32, "exponential"),
    (32000, torch.bfloat16, "exponential"),
    (32768, torch.float32, "logistic"),
    (32768, torch.bfloat16, "gamma"),
    (1000, torch.bfloat16, "exponential"),  # not divisible by 16, rows still are by 16 bytes
    (50304, torch.bfloat16, "exponential"),  # streamed
)


@pytest.fixture(scope="module")
def reports() -> dict[tuple[int, torch.dtype, str], list[KernelReport]]:
    """Both capabilities for each case, compiled in one process."""
    specs = [kernel_spec(k, dtype, tail=tail, weighted=True) for k, dtype, tail in CASES]
    made = iter(compile_reports(specs, capabilities=(80, 90)))
    return {case: [next(made), next(made)] for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[2]}-{str(c[1])[6:]}-{c[0]}")
def test_no_spills_and_128_bit_accesses(
    case: tuple[int, torch.dtype, str], reports: dict[Any, list[KernelReport]]
) -> None:
    """The machine code holds exactly the accesses that the count allows: each thread's share of
    the row in 128-bit loads and stores, one label, one weight, one loss."""
    classes, dtype, _ = case
    plan = launch_plan(classes, dtype)
    share = plan.parts * plan.block * kernels.ITEM_BYTES[dtype] // (16 * 32 * plan.num_warps)
    step = plan.block * kernels.ITEM_BYTES[dtype] // (16 * 32 * plan.num_warps)
    for report, capability in zip(reports[case], (80, 90), strict=True):
        assert report.capability == capability
        assert not report.spills, report
        assert report.registers * 32 * plan.num_warps <= 65536
        streamed = (3 * step, step) if plan.stream else (0, 0)  # three loops read, one writes
        assert report.global_loads == {32: 1, 64: 1, 128: share + streamed[0]}
        assert report.global_stores == {32: 1, 128: share + streamed[1]}


# --- on a GPU only --------------------------------------------------------------------------------


def on_gpu(rows: int, classes: int, dtype: torch.dtype, tail: str) -> None:
    """Kernel against the torch path in float64 on the same device, at full size."""
    generator = torch.Generator("cuda").manual_seed(7)
    logits = torch.randn(rows, classes, generator=generator, device="cuda").to(dtype)
    target = torch.randint(classes, (rows,), generator=generator, device="cuda")
    target[::7] = IGNORED
    loss, grad = launch(logits, target, tail=tail)
    exact = logits.double().requires_grad_()
    expected = linear_core_loss(exact, target, tail=tail, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-5, atol=0)
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(grad.double(), exact.grad, rtol=rtol, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1024, 32000), (64, 50257), (64, 128256), (4096, 10)], ids=str)
def test_full_size_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype, tail: str) -> None:
    on_gpu(*shape, dtype, tail)


@pytest.mark.gpu
def test_more_than_2_to_31_logits() -> None:
    rows, classes = 67_200, 32_000
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = torch.randn(2, classes, device="cuda").bfloat16()
    target = torch.zeros(rows, dtype=torch.int64, device="cuda")
    loss, grad = launch(logits, target)
    tail_loss, tail_grad = launch(logits[-2:].clone(), target[-2:])
    assert torch.equal(loss[-2:], tail_loss)
    assert torch.equal(grad[-2:], tail_grad)
    # Equal logits: every h̃ is 0, the loss (K − 1)·Φ(0) = 2(K − 1).
    torch.testing.assert_close(loss[:-2], torch.full_like(loss[:-2], 2.0 * (classes - 1)))


@pytest.mark.gpu
def test_cuda_tensors_take_the_kernel_by_themselves() -> None:
    assert triton_support.use_triton(torch.zeros(1, device="cuda"))
