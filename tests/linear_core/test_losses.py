"""``linear_core_loss`` against a loop written straight from the formula, and against
cross-entropy's conventions."""

from __future__ import annotations

import itertools
import json
import math
import platform
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from proofread import triton_support
from proofread.linear_core import LinearCoreLoss, linear_core_loss, losses

TAILS = ("exponential", "gamma", "logistic")
FORMS = ("constrained", "sum")
REDUCTIONS = ("none", "sum", "mean")
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.bfloat16: {"rtol": 1.0e-2, "atol": 1e-3},
    torch.float16: {"rtol": 1.5e-3, "atol": 1e-4},
}
NAN = math.nan


def phi(u: Tensor, core: float, scale: float, tail: str) -> Tensor:
    """One surrogate value, branch by branch."""

    def after(v: Tensor) -> Tensor:
        if tail == "exponential":
            return scale * torch.exp(-v)
        if tail == "gamma":
            return scale * (2 + v) * torch.exp(-v)
        return 2 * scale * torch.log(1 + torch.exp(-v))

    if u <= core:
        return after(torch.zeros_like(u)) + core - u
    return after((u - core) / scale)


def naive_row(h: Tensor, y: int, core: float, scale: float, tail: str, form: str) -> Tensor:
    """Σ over the wrong classes, one at a time. ``h``: [K]."""
    centred = h - h.sum() / len(h)
    margins = [
        -centred[k] if form == "constrained" else h[y] - h[k] for k in range(len(h)) if k != y
    ]
    return torch.stack([phi(u, core, scale, tail) for u in margins]).sum()


def naive(
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
) -> Tensor:
    """[N, K] and [N] in float64, row by row."""
    rows, total = [], 0.0
    for h, y in zip(logits.double(), target.tolist(), strict=True):
        if y == ignore_index:
            rows.append(h.new_zeros(()))
            continue
        weight = 1.0 if class_weight is None else float(class_weight[y])
        rows.append(weight * naive_row(h, y, core, scale, tail, form))
        total += weight
    loss = torch.stack(rows)
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / total}[reduction]


def value_and_gradient(function, logits: Tensor, target: Tensor, **options) -> tuple:
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf, target, **options)
    weights = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    (loss * weights).sum().backward()
    return loss.detach(), leaf.grad


def compare(logits: Tensor, target: Tensor, **options) -> None:
    """Fast against naive: values and gradients, at the tolerance of the logits' dtype."""
    fast = value_and_gradient(linear_core_loss, logits, target, **options)
    slow = value_and_gradient(naive, logits.double(), target, **options)
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.dtype == logits.dtype
        torch.testing.assert_close(ours.double(), theirs, **TOLERANCE[logits.dtype])


def problem(n: int = 7, k: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=generator, dtype=torch.float64) * 2
    return logits.to(dtype), torch.randint(k, (n,), generator=generator)


# --- against the formula --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients(dtype, tail, form):
    logits, target = problem(dtype=dtype)
    for reduction in REDUCTIONS:
        compare(logits, target, tail=tail, form=form, reduction=reduction)
    compare(logits, target, tail=tail, form=form, core=0.3, scale=2.5)
    compare(logits, target, tail=tail, form=form, core=2.0, scale=0.2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_weights_and_ignored_targets(dtype, reduction, form):
    logits, target = problem(n=9, dtype=dtype)
    target[[0, 4]] = -100
    weight = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.5], dtype=torch.float32)
    options = {"reduction": reduction, "form": form}
    compare(logits, target, **options)
    compare(logits, target, class_weight=weight, **options)
    compare(logits, target.masked_fill(target == -100, 2), ignore_index=2, **options)


@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (1, 33), (65, 3), (5, 129)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_shapes(shape, form):
    logits, target = problem(*shape)
    compare(logits, target, form=form)
    compare(logits.float(), target, form=form, reduction="none")


@pytest.mark.parametrize("block", [1, 12, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_blocks_of_rows_do_not_matter(monkeypatch, dtype, block):
    logits, target = problem(n=23, k=4, dtype=dtype)
    target[5] = -100
    monkeypatch.setattr(losses, "CPU_BLOCK", block)
    for tail, form in itertools.product(TAILS, FORMS):
        compare(logits, target, tail=tail, form=form)


def test_memory_is_written_before_it_is_read(monkeypatch):
    """Every uninitialised tensor is poisoned with NaN."""
    poisoned = []

    def new_empty(self: Tensor, size: tuple, **options) -> Tensor:
        poisoned.append(size)
        return self.new_full(size, NAN, **options)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, NAN))
    for tail, form in itertools.product(TAILS, FORMS):
        for dtype in (torch.float64, torch.bfloat16):
            compare(*problem(dtype=dtype), tail=tail, form=form)
    assert poisoned


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tail", TAILS)
def test_first_and_second_derivatives_numerically(tail, form):
    logits, target = problem(n=4, k=4, seed=3)
    target[1] = -100
    weight = torch.tensor([0.3, 1.0, 2.0, 0.7], dtype=torch.float64)
    for reduction in REDUCTIONS:

        def loss(h: Tensor, reduction: str = reduction) -> Tensor:
            return linear_core_loss(
                h, target, tail=tail, form=form, scale=0.8, reduction=reduction, class_weight=weight
            )

        leaf = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(loss, leaf)
        assert torch.autograd.gradgradcheck(loss, leaf)


def test_known_values():
    zero = torch.zeros(3, 10)
    label = torch.tensor([0, 4, 9])
    assert linear_core_loss(zero, label).item() == 18  # (K - 1)·Φ(0) = 9·2
    assert linear_core_loss(zero, label, core=2, scale=3).item() == 45
    assert linear_core_loss(zero, label, tail="gamma").item() == 27
    # two classes: the constrained margin is half the difference of the scores
    pair = torch.tensor([[3.0, -1.0]])
    assert linear_core_loss(pair, torch.tensor([0])).item() == pytest.approx(math.exp(-1))
    assert linear_core_loss(pair, torch.tensor([1])).item() == 4  # Φ(-2)
    assert linear_core_loss(pair, torch.tensor([0]), form="sum").item() == pytest.approx(
        math.exp(-3)
    )


def test_gradient_in_the_core_is_the_hinge_one():
    """All margins in the core: slope 1 at every wrong class, minus the mean (K - 1)/K."""
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    linear_core_loss(logits, torch.tensor([2])).backward()
    assert logits.grad.tolist() == [[0.25, 0.25, -0.75, 0.25]]


def test_constrained_form_ignores_a_common_shift_and_gradients_sum_to_zero():
    logits, target = problem()
    plain = value_and_gradient(linear_core_loss, logits, target)
    moved = value_and_gradient(linear_core_loss, logits + 50, target)
    torch.testing.assert_close(plain, moved, rtol=1e-11, atol=1e-12)
    assert plain[1].sum(1).abs().max() < 1e-14


@pytest.mark.parametrize("form", FORMS)
def test_a_confident_row_has_a_tiny_loss_not_a_rounded_one(form):
    """The wrong classes' terms are e^(-40)-sized: no cancellation against large scores."""
    k = 50
    logits = torch.full((1, k), -41.0)
    logits[0, 7] = 41.0 * (k - 1)
    loss = linear_core_loss(logits, torch.tensor([7]), form=form)
    margin = 41.0 if form == "constrained" else 41.0 * k
    assert loss.item() == pytest.approx((k - 1) * math.exp(1 - margin), rel=1e-4)


# --- cross-entropy's conventions ------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_trailing_dimensions(extra, reduction):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 5, *extra, generator=generator, dtype=torch.float64)
    target = torch.randint(5, (4, *extra), generator=generator)
    flat = logits.movedim(1, -1).reshape(-1, 5), target.reshape(-1)
    result = linear_core_loss(logits, target, reduction=reduction)
    expected = linear_core_loss(*flat, reduction=reduction)
    assert result.shape == F.cross_entropy(logits, target, reduction=reduction).shape
    torch.testing.assert_close(result.reshape(expected.shape), expected, equal_nan=True)
    leaf = logits.clone().requires_grad_()
    linear_core_loss(leaf, target, reduction="sum").backward()
    (grad,) = value_and_gradient(linear_core_loss, flat[0], flat[1], reduction="sum")[1:]
    torch.testing.assert_close(leaf.grad.movedim(1, -1).reshape(-1, 5) * 0.5, grad)


def test_unbatched():
    logits, target = problem(n=1)
    for reduction in REDUCTIONS:
        result = linear_core_loss(logits[0], target[0], reduction=reduction)
        assert result.shape == ()
        torch.testing.assert_close(result, naive(logits, target, reduction="sum"))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", ["no rows", "all ignored", "no weight"])
def test_nothing_to_average(case, reduction):
    """Same values as cross-entropy, and zero gradients."""
    n = 0 if case == "no rows" else 3
    logits = torch.randn(n, 4, requires_grad=True)
    target = torch.full((n,), -100 if case == "all ignored" else 1)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0]) if case == "no weight" else None
    loss = linear_core_loss(logits, target, reduction=reduction, class_weight=weight)
    peer = F.cross_entropy(logits, target, reduction=reduction, weight=weight)
    torch.testing.assert_close(loss, peer, equal_nan=True)
    loss.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(n, 4))


def test_integer_targets_of_any_width():
    logits, target = problem()
    expected = linear_core_loss(logits, target)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(linear_core_loss(logits, target.to(dtype)), expected)


def test_autocast_returns_float32_like_cross_entropy():
    logits, target = problem(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_core_loss(logits, target)
        assert loss.dtype == F.cross_entropy(logits, target).dtype == torch.float32
    torch.testing.assert_close(loss.double(), naive(logits, target), rtol=1e-6, atol=0)


def test_half_precision_accumulates_in_float32():
    """4,000 rows: a sum kept in bfloat16 would stall at 256 times a term."""
    logits, target = problem(n=4000, k=20, dtype=torch.bfloat16)
    exact = linear_core_loss(logits.double(), target)
    torch.testing.assert_close(linear_core_loss(logits, target).double(), exact, rtol=4e-3, atol=0)


def test_float16_overflow_is_infinite_and_its_gradient_right():
    logits = torch.zeros(1, 40_000, dtype=torch.float16, requires_grad=True)
    loss = linear_core_loss(logits, torch.tensor([3]))
    assert loss.item() == math.inf  # 79,998 > 65,504
    loss.backward()
    assert logits.grad[0, 3].item() == -1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_core_loss(logits, torch.tensor([3])).item() == 79_998


def test_float16_keeps_small_gradients_for_a_gradient_scaler():
    """Slope e^(-9) over 4,096 rows is below float16's range until the scaler lifts it."""
    logits = torch.tensor([[10.0, -10.0]], dtype=torch.float16).repeat(4096, 1).requires_grad_()
    target = torch.zeros(4096, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a float32 loss, as scalers need
        loss = linear_core_loss(logits, target)
    (loss * 65536).backward()
    expected = math.exp(-9) / 2 / 4096 * 65536
    assert logits.grad[0, 1].item() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_strides_do_not_matter(form):
    logits, target = problem(n=6, k=6)
    expected = value_and_gradient(linear_core_loss, logits, target, form=form)

    def through(view):
        def loss(base: Tensor, labels: Tensor, **options) -> Tensor:
            return linear_core_loss(view(base), labels, **options)

        return loss

    turned = value_and_gradient(through(lambda h: h.T), logits.T.contiguous(), target, form=form)
    torch.testing.assert_close((turned[0], turned[1].T), expected)
    padded = F.pad(logits, (3, 2))
    inner = value_and_gradient(through(lambda h: h[:, 3:-2]), padded, target, form=form)
    torch.testing.assert_close((inner[0], inner[1][:, 3:-2]), expected)
    one = value_and_gradient(through(lambda h: h.expand(6, 6)), logits[:1], target, form=form)
    every = value_and_gradient(linear_core_loss, logits[:1].repeat(6, 1), target, form=form)
    torch.testing.assert_close(one[0], every[0])
    torch.testing.assert_close(one[1], every[1].sum(0, keepdim=True))


def test_inputs_are_never_overwritten():
    logits, target = problem(dtype=torch.float32)
    weight = torch.rand(5)
    copies = logits.clone(), target.clone(), weight.clone()
    for form, tail in itertools.product(FORMS, TAILS):
        value_and_gradient(linear_core_loss, logits, target, form=form, tail=tail)
        linear_core_loss(logits, target, form=form, tail=tail, class_weight=weight)
    assert all(torch.equal(a, b) for a, b in zip((logits, target, weight), copies, strict=True))


def test_retained_graph_and_accumulation():
    logits, target = problem()
    leaf = logits.clone().requires_grad_()
    loss = linear_core_loss(leaf, target)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    (3 * loss).backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(leaf.grad, 5 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_editing_a_gradient_does_not_reach_the_retained_graph():
    logits, target = problem()
    leaf = logits.clone().requires_grad_()
    loss = linear_core_loss(leaf, target)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    leaf.grad.zero_()
    loss.backward()
    torch.testing.assert_close(leaf.grad, once)


def test_no_gradient_no_graph():
    logits, target = problem()
    assert not linear_core_loss(logits, target).requires_grad
    with torch.no_grad():
        assert not linear_core_loss(logits.requires_grad_(), target).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(linear_core_loss(logits, target), naive(logits, target))


def test_module_twin_and_repr():
    logits, target = problem()
    weight = torch.rand(5)
    options = {"core": 0.5, "scale": 2.0, "tail": "gamma", "form": "sum", "reduction": "sum"}
    module = LinearCoreLoss(**options, ignore_index=3, class_weight=weight)
    expected = linear_core_loss(logits, target, **options, ignore_index=3, class_weight=weight)
    assert torch.equal(module(logits, target), expected)
    assert "tail='gamma'" in repr(module)
    assert torch.equal(module.state_dict()["class_weight"], weight)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("where", ["target", "other"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_constrained_rows_with_a_non_finite_logit_are_nan(bad, tail, where, dtype):
    logits, target = problem(dtype=dtype)
    expected = value_and_gradient(linear_core_loss, logits, target, tail=tail, reduction="none")
    column = target[2] if where == "target" else (target[2] + 1) % 5
    logits[2, column] = bad
    loss, grad = value_and_gradient(linear_core_loss, logits, target, tail=tail, reduction="none")
    assert loss.isnan().tolist() == [row == 2 for row in range(7)]
    assert grad[2].isnan().all()
    others = torch.arange(7) != 2
    torch.testing.assert_close(loss[others], expected[0][others])
    torch.testing.assert_close(grad[others], expected[1][others])
    assert linear_core_loss(logits, target, tail=tail).isnan()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    ("bad", "where", "expected"),
    [
        (NAN, "target", "nan"),
        (NAN, "other", "nan"),
        (math.inf, "target", "nan"),
        (-math.inf, "target", "nan"),
        (math.inf, "other", "inf"),
        (-math.inf, "other", "masked"),
    ],
)
def test_sum_form_with_a_non_finite_logit(tail, bad, where, expected):
    logits, target = problem()
    wrong = (target[2] + 1) % 5
    kept = [k for k in range(5) if k != wrong]
    logits[2, target[2] if where == "target" else wrong] = bad
    options = {"tail": tail, "form": "sum", "reduction": "none"}
    loss, grad = value_and_gradient(linear_core_loss, logits, target, **options)
    assert loss.isfinite().tolist() == [row != 2 or expected == "masked" for row in range(7)]
    if expected == "masked":  # as if the class did not exist
        label = torch.tensor([kept.index(int(target[2]))])
        without = linear_core_loss(logits[2:3, kept], label, **options)
        torch.testing.assert_close(loss[2:3], without)
        assert grad[2, wrong] == 0
        assert grad.isfinite().all()
    else:
        assert math.isnan(loss[2]) if expected == "nan" else loss[2] == math.inf


def test_a_logit_too_large_to_average_is_nan_not_finite():
    logits = torch.full((1, 3), 3e38)
    assert linear_core_loss(logits, torch.tensor([0])).isnan()


def test_ignored_rows_count_for_nothing_whatever_they_hold():
    logits, target = problem()
    logits[1], target[1] = NAN, -100
    keep = torch.arange(7) != 1
    for form in FORMS:
        loss, grad = value_and_gradient(linear_core_loss, logits, target, form=form)
        expected = value_and_gradient(linear_core_loss, logits[keep], target[keep], form=form)
        torch.testing.assert_close(loss, expected[0])
        torch.testing.assert_close(grad[keep], expected[1])
        assert torch.equal(grad[1], torch.zeros(5, dtype=torch.float64))
        leaf = logits.clone().requires_grad_()
        (first,) = torch.autograd.grad(
            linear_core_loss(leaf, target, form=form), leaf, create_graph=True
        )
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        assert second.isfinite().all()


@pytest.mark.parametrize("value", [-1, 5, 99, -101])
def test_targets_out_of_range_are_named(value):
    logits, target = problem()
    target[3] = value
    with pytest.raises(IndexError, match=f"target {value} is out of range for 5 classes"):
        linear_core_loss(logits, target)
    assert linear_core_loss(logits, target, ignore_index=value).isfinite()


GOOD = (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))


@pytest.mark.parametrize(
    ("logits", "target", "options", "error", "message"),
    [
        (GOOD[0].int(), GOOD[1], {}, TypeError, "logits must be float16"),
        (GOOD[0] > 0, GOOD[1], {}, TypeError, "logits must be float16"),
        (GOOD[0].cfloat(), GOOD[1], {}, TypeError, "logits must be float16"),
        (GOOD[0], GOOD[1].float(), {}, TypeError, "target must hold integer"),
        (GOOD[0], GOOD[0], {}, TypeError, "target must hold integer"),
        (GOOD[0], GOOD[1] > 0, {}, TypeError, "target must hold integer"),
        (GOOD[0][:, :1], GOOD[1], {}, ValueError, "at least 2 classes, got K = 1"),
        (GOOD[0][:, :0], GOOD[1], {}, ValueError, "at least 2 classes, got K = 0"),
        (GOOD[0][0, :1], GOOD[1][0], {}, ValueError, "at least 2 classes, got K = 1"),
        (GOOD[0][0, 0], GOOD[1][0], {}, ValueError, "class dimension"),
        (GOOD[0], GOOD[1][:3], {}, ValueError, r"target must have shape \(4,\)"),
        (GOOD[0][0], GOOD[1][:1], {}, ValueError, r"target must have shape \(\)"),
        (GOOD[0][..., None], GOOD[1], {}, ValueError, r"target must have shape \(4, 1\)"),
        (GOOD[0], GOOD[1].to("meta"), {}, ValueError, "target is on meta"),
        (*GOOD, {"class_weight": torch.ones(4)}, ValueError, r"class_weight must have shape \(3,"),
        (*GOOD, {"class_weight": torch.ones(3).int()}, TypeError, "class_weight must be floating"),
        (*GOOD, {"class_weight": torch.ones(3, device="meta")}, ValueError, "class_weight is on"),
        (*GOOD, {"class_weight": torch.ones(3, requires_grad=True)}, ValueError, "detach"),
        (*GOOD, {"core": 0.0}, ValueError, "core must be"),
        (*GOOD, {"scale": -1.0}, ValueError, "scale must be"),
        (*GOOD, {"tail": "x"}, ValueError, "tail must be one of"),
        (*GOOD, {"form": "pairwise"}, ValueError, "form must be one of"),
        (*GOOD, {"reduction": "avg"}, ValueError, "reduction must be one of"),
    ],
)
def test_bad_arguments(logits, target, options, error, message):
    with pytest.raises(error, match=message):
        linear_core_loss(logits, target, **options)
    if logits is GOOD[0] and target is GOOD[1] and "class_weight" not in options:
        with pytest.raises(error, match=message):
            LinearCoreLoss(**options)


# --- dispatch -------------------------------------------------------------------------------------


def test_the_kernel_gets_what_the_contract_says(monkeypatch):
    """A stand-in kernel that checks its arguments and computes by the formula."""
    calls = []

    def kernel(logits, target, *, with_grad, class_weight, **options):
        assert logits.is_contiguous()
        assert target.dtype == torch.int64
        work = torch.float64 if logits.dtype == torch.float64 else torch.float32
        assert class_weight is None or class_weight.dtype == work
        calls.append(with_grad)
        leaf = logits.double().requires_grad_()
        with torch.enable_grad():
            rows = naive(leaf, target, reduction="none", class_weight=class_weight, **options)
            (grad,) = torch.autograd.grad(rows.sum(), leaf)
        return rows.detach().to(work), grad.to(logits.dtype) if with_grad else None

    monkeypatch.setattr(triton_support, "use_triton", lambda tensor: True)
    name = "proofread.linear_core.kernels"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(linear_core_forward=kernel))
    logits, target = problem(dtype=torch.float32)
    target[2] = -100
    weight = torch.rand(5, dtype=torch.float64)
    for reduction in REDUCTIONS:
        compare(logits, target, reduction=reduction, class_weight=weight)
        compare(logits.T.contiguous().T, target, reduction=reduction, tail="gamma", scale=2.0)
    assert calls == [True] * 6
    linear_core_loss(logits, target)
    assert calls[-1] is False
    with torch.no_grad():
        linear_core_loss(logits.clone().requires_grad_(), target)
    assert calls[-1] is False
    compare(logits.double(), target)
    compare(logits.bfloat16(), target, class_weight=weight)
    count = len(calls)
    compare(logits, target, form="sum")  # served by torch
    assert len(calls) == count


# --- the benchmark --------------------------------------------------------------------------------


@pytest.fixture
def benchmark():
    script = Path(__file__).parents[2] / "benchmarks" / "linear_core.py"
    return runpy.run_path(str(script))


def test_benchmark_writes_ratios_and_machine(benchmark, tmp_path, capsys):
    assert benchmark["main"](["--quick", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "linear_core.json").read_text(encoding="utf-8"))
    assert result["gate"] == "green"
    assert [case["shape"] for case in result["cases"]] == [[64, 500]] * 2 + [[33, 129]] * 2
    for case in result["cases"]:
        for name in ("F.cross_entropy", "plain formula", "linear_core_loss, again (A/A)"):
            ratio = case["times_ours"][name]
            assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert result["cases"][0]["bytes_per_logit"] == {"floor": 8, "linear_core_loss": 8}
    machine = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert machine["packages"]["torch"] == torch.__version__
    written = (tmp_path / "environment.json").read_text(encoding="utf-8")
    node = platform.node()
    assert not node or f'"{node}"' not in written
    assert str(Path.home()) not in written
    assert "gate: green" in capsys.readouterr().out


def test_benchmark_reports_no_speed_on_a_red_gate(benchmark, tmp_path, capsys):
    def wrong(logits, target, **options):
        return 1.001 * linear_core_loss(logits, target, **options)

    benchmark["main"].__globals__["linear_core_loss"] = wrong
    assert benchmark["main"](["--quick", "--out", str(tmp_path / "new")]) == 1
    said = capsys.readouterr()
    assert "gate: red, no speed is reported" in said.err
    assert "value off by 0.001" in said.err
    assert not said.out
    assert not (tmp_path / "new").exists()
