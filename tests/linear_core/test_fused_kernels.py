"""The kernel of the fused loss against the formula in float64: in the interpreter, or compiled on a
GPU. All buffers that the sweep takes start as NaNs between guards, so that a number nobody wrote
shows in the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proofread.linear_core import fused_linear_core_loss, linear_core_loss
from proofread.triton_support import compile_reports, force_triton, interpreting

pytest.importorskip("triton")
from proofread.linear_core import fused_kernels
from proofread.linear_core.fused_kernels import (
    KernelSweep,
    Plan,
    bytes_requested,
    kernel_spec,
    workspace_bytes,
)

TAILS = ("exponential", "gamma", "logistic")
FORMS = ("constrained", "sum")
REDUCTIONS = ("none", "sum", "mean")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
GPU_TOLERANCE = TOLERANCE | {torch.float32: 2e-5}  # approximate exponential and division
GUARD = 64

interpreted = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
DEVICES = (
    pytest.param("cpu", marks=interpreted, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
)
on_devices = pytest.mark.parametrize("device", DEVICES)
SHAPES = {  # N, D, K with the chunks of ``small``: 64 rows, 64 classes, in tiles of 32
    "one tile": (5, 3, 7),
    "odd": (37, 5, 101),
    "depth 1, two classes": (19, 1, 2),
    "whole tiles": (64, 16, 128),
    "several chunks": (70, 20, 150),
    "last chunk of one class": (17, 3, 65),
    "one row": (1, 40, 50),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two tiles each way; on a GPU the tiles are as they are."""
    rows, classes = (64, 64) if interpreting() else (256, 256)
    monkeypatch.setattr(fused_kernels, "ROWS", rows)
    monkeypatch.setattr(fused_kernels, "CLASSES", classes)
    if interpreting():
        monkeypatch.setattr(fused_kernels, "launch_plan", lambda dtype: Plan(32, 32, 32, 4, 1))


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    buffers: list[Tensor] = []

    def empty(self: KernelSweep, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        size = math.prod(shape)
        buffer = self.x.new_full((size + 2 * GUARD,), 123.0, dtype=dtype or self.work)
        buffer[GUARD : GUARD + size] = math.nan
        buffers.append(buffer)
        return buffer[GUARD : GUARD + size].view(shape)

    monkeypatch.setattr(KernelSweep, "_empty", empty)
    yield
    for buffer in buffers:
        assert (buffer[:GUARD] == 123).all(), "written before the beginning of a buffer"
        assert (buffer[-GUARD:] == 123).all(), "written past the end of a buffer"


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
    """The definition with all logits, row by row."""
    losses, weights = [], []
    for x, label in zip(hidden, target.tolist(), strict=True):
        if label == ignore_index:
            losses.append(0 * weight.sum())
            weights.append(0.0)
            continue
        h = weight @ x if bias is None else weight @ x + bias
        others = torch.arange(len(h)) != label
        margins = (h.mean() if form == "constrained" else h[label]) - h[others]
        weights.append(1.0 if class_weight is None else float(class_weight[label]))
        losses.append(weights[-1] * phi(margins, core, scale, tail).sum())
    rows = torch.stack(losses)
    total = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / max(sum(weights), 1e-300)}
    return total[reduction]


def problem(
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [N, D], weight [K, D], target [N], bias [K]; logits of size 1 or so."""
    n, d, k = shape
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g).to(device, dtype)
    weight = (torch.randn(k, d, generator=g) / d**0.5).to(device, dtype)
    bias = (torch.randn(k, generator=g) / 2).to(device, dtype)
    return hidden, weight, torch.randint(k, (n,), generator=g).to(device), bias


def layer_and_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any
) -> Tensor:
    """What the fused loss replaces."""
    return linear_core_loss(F.linear(hidden, weight, bias), target, **options)


def results(loss: Any, *inputs: Tensor | None, **options: Any) -> list[Tensor]:
    """Value and all gradients, for an upstream gradient that differs from 1 (and between rows)."""
    hidden, weight, target, bias = inputs
    leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    value = loss(leaves[0], leaves[1], target, leaves[2] if bias is not None else None, **options)
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype, device=value.device)
    value.backward(upstream.reshape(value.shape))
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def kernel(*inputs: Tensor | None, **options: Any) -> list[Tensor]:
    with force_triton():
        return results(fused_linear_core_loss, *inputs, **options)


def expected(*inputs: Tensor | None, **options: Any) -> list[Tensor]:
    exact = [t if t is None else t.cpu() for t in inputs]
    exact = [t.double() if t is not None and t.is_floating_point() else t for t in exact]
    if options.get("class_weight") is not None:
        options["class_weight"] = options["class_weight"].cpu().double()
    return results(naive, *exact, **options)


def errors(found: list[Tensor], right: list[Tensor]) -> list[float]:
    """Relative errors in norm: single entries are small differences of large sums."""
    assert [a.shape for a in found] == [b.shape for b in right]
    pairs = [(a.cpu().double(), b.cpu().double()) for a, b in zip(found, right, strict=True)]
    return [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


def tolerance(dtype: torch.dtype, device: str) -> float:
    return (TOLERANCE if device == "cpu" else GPU_TOLERANCE)[dtype]


def assert_equal(found: list[Tensor], right: list[Tensor], limit: float) -> None:
    assert max(errors(found, right)) <= limit, errors(found, right)


# --- values and gradients -------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_formula(
    shape: tuple[int, int, int], dtype: torch.dtype, form: str, device: str
) -> None:
    seed = sum(shape)
    hidden, weight, target, bias = problem(shape, dtype, seed, device)
    inputs = (hidden, weight, target, bias if seed % 3 else None)
    options = {"form": form, "tail": TAILS[seed % 3], "core": 0.8, "scale": 0.7}
    found = kernel(*inputs, **options)
    assert all(part.dtype == dtype for part in found)
    right = expected(*inputs, **options)
    # Few classes cancel strongly; then it must do as well as the layer and the loss of their own.
    usual = errors(results(layer_and_loss, *inputs, **options), right)
    for error, other in zip(errors(found, right), usual, strict=True):
        assert error <= max(tolerance(dtype, device), 2 * other)


@on_devices
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("form", "tail"), list(itertools.product(FORMS, TAILS)))
def test_tails_weights_ignored_targets_and_reductions(
    form: str, tail: str, dtype: torch.dtype, device: str
) -> None:
    hidden, weight, target, bias = problem((25, 6, 77), dtype, 3, device)
    target[::3] = -7
    class_weight = torch.linspace(0, 2, 77, device=device)
    options = {"form": form, "tail": tail, "ignore_index": -7, "class_weight": class_weight}
    for reduction in REDUCTIONS:
        more = {**options, "reduction": reduction}
        found = kernel(hidden, weight, target, bias, **more)
        right = expected(hidden, weight, target, bias, **more)
        assert_equal(found, right, tolerance(dtype, device))
        assert not found[1][::3].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(500, 200, 1000), (700, 64, 3001)], ids=str)
def test_many_compiled_tiles(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs = problem(shape, dtype, 4, "cuda")
    found = kernel(*inputs)
    assert_equal(found, expected(*inputs), GPU_TOLERANCE[dtype])


@interpreted
@pytest.mark.parametrize(
    ("form", "reduction"), [("constrained", "none"), ("constrained", "mean"), ("sum", "mean")]
)
def test_gradcheck(form: str, reduction: str) -> None:
    hidden, weight, target, bias = problem((3, 1, 34), seed=4)
    target[1] = -100
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    class_weight = torch.linspace(1, 2, 34)

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        more = {"form": form, "reduction": reduction, "tail": "gamma"}
        return fused_linear_core_loss(x, w, target, b, class_weight=class_weight, **more)

    with force_triton():
        assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


@on_devices
def test_closed_form_at_equal_logits(device: str) -> None:
    """Zero hidden states: loss (K-1)·Φ(0) a row; all slopes 1, so the logits' gradient is
    1/K - [j = y] and db its mean over the rows."""
    target, k = torch.tensor([1, 40, 40], device=device), 90
    weight = torch.ones(k, 2, device=device)
    bias = torch.zeros(k, requires_grad=True, device=device)
    with force_triton():
        loss = fused_linear_core_loss(
            torch.zeros(3, 2, device=device), weight, target, bias, scale=0.5
        )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(89 * 1.5, rel=1e-6)
    right = 1 / k - F.one_hot(target, k).double().mean(0)
    torch.testing.assert_close(bias.grad.double(), right, rtol=1e-6, atol=6e-8)


# --- digits of half precision ---------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_loses_nothing_where_slopes_cancel(
    form: str, dtype: torch.dtype, device: str
) -> None:
    """Logits within the core: every slope is 1 and Σ_j g_j w_j - G·w̄ is -w_y, one term of many."""
    hidden, weight, target, _ = problem((40, 16, 400), dtype, 6, device)
    hidden = hidden / 16
    target %= 40
    found = kernel(hidden, weight, target, None, form=form)
    right = expected(hidden, weight, target, None, form=form)
    assert_equal(found, right, 3e-3 if dtype == torch.bfloat16 else 6e-4)


@on_devices
@pytest.mark.parametrize("shared", [0.0, 2.5])
def test_slopes_are_rounded_after_centring(shared: float, device: str) -> None:
    """Slopes between 0.9 and 1, so that rounding them to 2⁻⁹ as they are would cost a twentieth of
    what sets them apart; also where all rows of the weight share a vector ten times as long as what
    sets those apart. The reference rounds the gradient of each logit, correctly centred."""
    hidden, weight, target, _ = problem((40, 16, 500), torch.bfloat16, 7, device)
    hidden = (hidden - hidden.mean(1, keepdim=True)) / 64
    inputs = (hidden, weight + shared, target, None)
    found, right = kernel(*inputs, core=1e-3), expected(*inputs, core=1e-3)
    usual = errors(results(layer_and_loss, *inputs, core=1e-3), right)
    for error, other in zip(errors(found, right), usual, strict=True):
        assert error <= max(3e-3, 1.5 * other)


@on_devices
def test_sums_over_many_chunks_stay_in_float32(device: str) -> None:
    """Each chunk of rows adds the same to dW: a bfloat16 running sum would stall at 2⁸."""
    n, k = 400, 3
    hidden = torch.ones(n, 1, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(k, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.zeros(n, dtype=torch.long, device=device)
    with force_triton():
        fused_linear_core_loss(hidden, weight, target, reduction="sum").backward()
    right = torch.tensor([[-2 / 3 * n], [n / 3], [n / 3]]).bfloat16()  # slopes (0, 1, 1), mean 2/3
    torch.testing.assert_close(weight.grad.cpu(), right, rtol=2**-8, atol=0)


@on_devices
def test_float16_keeps_small_factors(device: str) -> None:
    """Class weights of 10⁻⁷ are below the spacing of float16 slopes; hidden of 100 makes up."""
    hidden, weight, target, _ = problem((20, 4, 30), torch.float16, 8, device)
    hidden = 100 * hidden
    options = {"class_weight": torch.full((30,), 1e-7, device=device), "reduction": "sum"}
    found = kernel(hidden, weight / 100, target, None, **options)
    right = expected(hidden, weight / 100, target, None, **options)
    assert errors(found[2:], right[2:])[0] <= 4e-3


@on_devices
def test_float16_gradients_beyond_its_range_are_not_lost_before_scaling(device: str) -> None:
    """Σ_n x_n is 10⁵ > 65504, but the mean's gradient is small."""
    hidden = torch.full((1000, 2), 100.0, dtype=torch.float16, device=device)
    weight = torch.zeros(4, 2, dtype=torch.float16, device=device, requires_grad=True)
    target = torch.zeros(1000, dtype=torch.long, device=device)
    with force_triton():
        fused_linear_core_loss(hidden, weight, target).backward()
    right = torch.tensor([-75.0, 25.0, 25.0, 25.0])[:, None].expand(4, 2)
    torch.testing.assert_close(weight.grad.float().cpu(), right, rtol=1e-3, atol=0)


# --- layouts, gradients that nobody wants, bad input ----------------------------------------------


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_strides_do_not_matter(dtype: torch.dtype, device: str) -> None:
    hidden, weight, target, bias = problem((37, 16, 101), dtype, 9, device)
    plain = kernel(hidden, weight, target, bias)
    odd = (
        hidden.t().contiguous().t(),
        weight.repeat_interleave(2, 1)[:, ::2],
        target.repeat_interleave(2)[::2],
        bias.repeat_interleave(3)[::3],
    )
    assert not any(t.is_contiguous() for t in odd)
    assert_equal(kernel(*odd), plain, 1e-14 if dtype == torch.float64 else 1e-3)
    shaped = (hidden[:36].view(2, 3, 6, 16), weight, target[:36].view(2, 3, 6).int(), bias)
    flat = kernel(hidden[:36], weight, target[:36], bias)
    for a, b in zip(kernel(*shaped), flat, strict=True):
        assert torch.equal(a.reshape(b.shape), b)
    expanded = kernel(hidden[:1].expand(37, 16), weight, target, bias)
    assert_equal(expanded, kernel(hidden[:1].repeat(37, 1), weight, target, bias), 0)


@on_devices
@pytest.mark.parametrize("wanted", list(itertools.product((True, False), repeat=3)), ids=str)
def test_only_wanted_gradients_are_made(wanted: tuple[bool, ...], device: str) -> None:
    hidden, weight, target, bias = problem((20, 5, 70), seed=5, device=device)
    full = kernel(hidden, weight, target, bias)[1:]
    leaves = [
        t.detach().requires_grad_(w) for t, w in zip((hidden, weight, bias), wanted, strict=True)
    ]
    with force_triton():
        loss = fused_linear_core_loss(leaves[0], leaves[1], target, leaves[2])
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        (0.5 * loss).backward()
    for leaf, want, grad in zip(leaves, wanted, full, strict=True):
        assert (leaf.grad is not None) == want
        if want:
            torch.testing.assert_close(leaf.grad, grad, rtol=1e-12, atol=1e-14)


@on_devices
def test_one_launch_a_chunk_and_no_product_in_vain(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, products = [], []
    plain, multiply = fused_kernels._launch, fused_kernels._product
    monkeypatch.setattr(fused_kernels, "_launch", lambda *a: launches.append(a) or plain(*a))
    monkeypatch.setattr(fused_kernels, "_product", lambda *a: products.append(a) or multiply(*a))
    hidden, weight, target, _ = problem((100, 4, 130), torch.float16, device=device)
    row_chunks, class_chunks = -(-100 // fused_kernels.ROWS), -(-130 // fused_kernels.CLASSES)
    chunks = row_chunks * class_chunks
    with force_triton():
        fused_linear_core_loss(hidden, weight, target)
        assert (len(launches), len(products)) == (chunks, 0)
        fused_linear_core_loss(hidden.requires_grad_(), weight.requires_grad_(), target)
    assert (len(launches), len(products)) == (2 * chunks, 2 * chunks)


@interpreted
def test_cpu_tensors_take_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernels, "_launch", None)
    hidden, weight, target, bias = problem((5, 4, 9))
    fused_linear_core_loss(hidden, weight, target, bias)


@on_devices
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_counted(rows: int, dtype: torch.dtype, form: str, device: str) -> None:
    hidden, weight, _, bias = problem((rows, 4, 70), dtype, device=device)
    target = torch.full((rows,), -100, device=device)
    for reduction in REDUCTIONS:
        value, *grads = kernel(hidden, weight, target, bias, reduction=reduction, form=form)
        assert value.isnan() if reduction == "mean" else not value.any()
        for grad, like in zip(grads, (hidden, weight, bias), strict=True):
            assert grad.shape == like.shape
            assert not grad.any()


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize(
    ("bad", "form", "tail"),
    [
        *((math.inf, "constrained", tail) for tail in TAILS),
        *((bad, "constrained", "gamma") for bad in (math.nan, -math.inf)),
        *((bad, "sum", "gamma") for bad in (math.nan, math.inf, -math.inf)),
    ],
)
def test_bad_rows_are_never_finite_and_stay_alone(
    bad: float, form: str, tail: str, device: str
) -> None:
    hidden, weight, target, bias = problem((37, 5, 70), seed=13, device=device)
    options = {"form": form, "tail": tail}
    with force_triton():
        right = fused_linear_core_loss(hidden, weight, target, bias, reduction="none", **options)
        hidden[20, 2] = bad
        rows = fused_linear_core_loss(hidden, weight, target, bias, reduction="none", **options)
    assert not rows[20].isfinite()
    rows[20] = right[20]
    torch.testing.assert_close(rows, right, rtol=1e-12, atol=0)
    loss, *grads = kernel(hidden, weight, target, bias, **options)
    assert not loss.isfinite()
    assert grads[0][20].isnan().all()
    assert grads[0][19].isfinite().all()
    assert not grads[1].isfinite().any()
    target[20] = -100  # ignored rows may hold anything
    loss, *grads = kernel(hidden, weight, target, bias, **options)
    assert loss.isfinite()
    assert not grads[0][20].any()
    assert all(grad.isfinite().all() for grad in grads)


@on_devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_masked_classes(device: str) -> None:
    """A bias of -inf masks a class: nothing in the sum form, undefined in the constrained one."""
    hidden, weight, _, bias = problem((9, 5, 70), seed=15, device=device)
    target = torch.arange(9, device=device)
    bias[50:] = -math.inf
    with force_triton():
        for tail in TAILS:
            options = {"form": "sum", "tail": tail}
            found = fused_linear_core_loss(hidden, weight, target, bias, **options)
            kept = fused_linear_core_loss(hidden, weight[:50], target, bias[:50], **options)
            torch.testing.assert_close(found, kept, rtol=1e-12, atol=0)
        assert fused_linear_core_loss(hidden, weight, target, bias).isnan()


@on_devices
def test_bad_input_is_refused_as_on_the_torch_path(device: str) -> None:
    hidden, weight, target, bias = problem((4, 3, 6), torch.float32, device=device)
    with force_triton():
        with pytest.raises(TypeError, match="hidden must be float16"):
            fused_linear_core_loss(hidden.int(), weight, target)
        with pytest.raises(ValueError, match=r"bias must have shape \(6,\)"):
            fused_linear_core_loss(hidden, weight, target, bias[:5])
        with pytest.raises(IndexError, match="target 6 is out of range"):
            fused_linear_core_loss(hidden, weight, target.clone().fill_(6))
        loss = fused_linear_core_loss(hidden.requires_grad_(), weight, target)
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(loss, hidden, create_graph=True)


def test_float32_products_follow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for setting, precision in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(setting)
            assert fused_kernels._precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)

    class Old:
        allow_tf32 = True

    monkeypatch.setattr(torch.backends.cuda, "matmul", Old())
    assert fused_kernels._precision() == "tf32"


# --- bytes ----------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_counted_bytes_are_the_requested_bytes(
    dtype: torch.dtype, more: bool, with_grad: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count every lane that the interpreter loads or stores under an active mask."""
    from triton.runtime import interpreter

    moved = [0]
    builder = type(interpreter.interpreter_builder)

    def counting(name: str, mask_at: int | None) -> None:
        original = getattr(builder, name)

        def wrapper(self: Any, ptrs: Any, *rest: Any) -> Any:
            lanes = ptrs.data.size if mask_at is None else int(rest[mask_at].data.sum())
            moved[0] += lanes * (ptrs.dtype.element_ty.primitive_bitwidth // 8)
            return original(self, ptrs, *rest)

        monkeypatch.setattr(builder, name, wrapper)

    counting("create_masked_load", 0)
    counting("create_masked_store", 1)
    hidden, weight, target, bias = problem((37, 40, 41), dtype)
    hidden.requires_grad_(with_grad)
    bias.requires_grad_(with_grad)
    class_weight = torch.ones(41) if more else None
    with force_triton():
        fused_linear_core_loss(
            hidden, weight, target, bias if more else None, form=form, class_weight=class_weight
        )
    options = {"biased": more, "weighted": more, "constrained": form == "constrained"}
    assert moved[0] == bytes_requested(37, 41, 40, dtype, with_grad=with_grad, **options)


def test_workspace_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """16384 rows, 131072 classes, D = 4096 in bfloat16, in chunks of 8192² slopes and 64 block
    means: 0.8 GB, where logits and their gradient take 8.6 GB."""
    monkeypatch.undo()
    columns = 8192 + 64
    slopes, copy = 2 * 8192 * columns, 2 * columns * 4096
    gradient = product = 4 * columns * 4096
    sums, means = 4 * 16384 * 4096, 4 * 16 * (16384 + 4096)
    found = workspace_bytes(16384, 131072, 4096, torch.bfloat16)
    assert found == slopes + copy + gradient + product + sums + means
    assert found < 0.81e9 < 2 * 2 * 16384 * 131072 / 10


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_peak_memory_is_the_counted(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    n, d, k = shape = (9000, 64, 40_000)
    hidden, weight, target, _ = problem(shape, dtype, device="cuda")
    hidden.requires_grad_()
    weight.requires_grad_()
    for _ in range(2):  # the first call compiles and opens cuBLAS's own workspace
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fused_linear_core_loss(hidden, weight, target).backward()
        torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    gradients = (n + k) * d * dtype.itemsize
    # Per launch three float32 numbers a row and block of classes, and a few a row and a class.
    small = 4 * (3 * 64 * 8192 + 64 * n + 64 * k)
    assert taken <= workspace_bytes(n, k, d, dtype) + gradients + small
    assert taken < n * k * dtype.itemsize


# --- machine code ---------------------------------------------------------------------------------

CASES = (
    (4096, torch.bfloat16, "exponential", "ieee"),
    (100, torch.float16, "logistic", "ieee"),  # D not a multiple of the tile, padded to 112
    (4096, torch.float32, "exponential", "ieee"),
    (4096, torch.float32, "gamma", "tf32"),
)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes a program may take


def test_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing spills, the operands' tiles fit, operands and slopes move 128 bits at a time, and
    only IEEE float32 does without tensor cores. One test: the cases take one process to compile."""
    monkeypatch.undo()
    specs = [kernel_spec(d, dtype, tail=tail, precision=p) for d, dtype, tail, p in CASES]
    made = iter(compile_reports(specs, capabilities=(80, 90)))
    for (_, dtype, _, precision), spec in zip(CASES, specs, strict=True):
        plan = Plan(*(spec.constexprs[name] for name in ("BM", "BN", "BK")), 8, spec.num_stages)
        assert spec.num_warps == plan.num_warps
        moves = plan.num_warps * 32 * 16 // dtype.itemsize  # numbers a wide instruction moves
        for report in (next(made), next(made)):
            assert not report.spills
            assert report.shared_bytes <= SHARED_LIMIT[report.capability]
            assert report.global_stores[128] == plan.bm * plan.bn // moves
            # The loop's own step, and those that run ahead of it.
            steps = plan.num_stages * (plan.bm + plan.bn) * plan.bk // moves
            assert report.global_loads[128] >= steps
            assert (report.mma == 0) == (dtype == torch.float32 and precision == "ieee")
