"""``linear_core_loss`` against a loop written straight from the formula, and against
cross-entropy's conventions."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import platform
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
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


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5), (1, 5, 1), (6, 5, 1), (5,)], ids=str)
def test_a_retained_graph_through_views_of_a_leaf(shape, inplace):
    """Autograd may make a view of what ``backward`` returns the gradient of the leaf."""
    leaf = torch.randn(shape, dtype=torch.float64).requires_grad_()
    logits = leaf.view(6, 5) if shape == (2, 3, 5) else leaf
    if inplace:
        logits = (leaf.clone() if len(shape) != 2 else leaf.unsqueeze(1).clone()).view_as(logits)
    target = torch.zeros(logits.shape[:1] + logits.shape[2:] if len(shape) > 1 else ()).long()
    loss = linear_core_loss(logits, target, reduction="sum", inplace=inplace)
    once = torch.autograd.grad(loss, leaf, retain_graph=True)[0].clone()
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        assert torch.equal(leaf.grad, times * once)
    leaf.grad.data.zero_()
    loss.backward()
    assert torch.equal(leaf.grad, once)


@pytest.mark.parametrize("form", FORMS)
def test_targets_overwritten_before_the_second_derivatives(form):
    logits, target = problem()
    leaf, kept = logits.requires_grad_(), target.clone()
    target[2] = kept[2] = -100
    loss = linear_core_loss(leaf, target, form=form)
    target.fill_(0)
    ours = torch.autograd.grad(loss, leaf, create_graph=True)[0]
    plain = torch.autograd.grad(linear_core_loss(leaf, kept, form=form), leaf)[0]
    torch.testing.assert_close(ours, plain)


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


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_module_survives_copies_and_state(twin):
    logits, target = problem()
    options = {"core": 0.5, "scale": 2.0, "tail": "gamma", "form": "sum", "reduction": "sum"}
    module = LinearCoreLoss(**options, ignore_index=3, class_weight=torch.rand(5), inplace=True)
    other = twin(module)
    assert repr(other) == repr(module)
    assert "inplace=True" in repr(other)
    assert torch.equal(other(logits, target), module(logits, target))
    bare = LinearCoreLoss(**options, ignore_index=3, class_weight=torch.ones(5))
    bare.load_state_dict(module.state_dict())
    assert torch.equal(bare(logits, target), module(logits, target))
    assert LinearCoreLoss().state_dict() == {}
    assert LinearCoreLoss(class_weight=torch.ones(5)).double().class_weight.dtype == torch.float64


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tail", TAILS)
def test_transforms_of_torch_func(tail, form):
    """Per-sample gradients, Jacobians and forward mode, against one row at a time."""
    logits, target = problem()
    target[4] = -100
    options = {"tail": tail, "form": form, "reduction": "sum"}
    weight = torch.tensor([0.3, 1.0, 2.0, 0.7, 0.0], dtype=torch.float64)

    def loss(h: Tensor, y: Tensor, **more) -> Tensor:
        return linear_core_loss(h, y, **options | more)

    rows = value_and_gradient(naive, logits, target, **options)[1] * 2  # each from its own row
    each = torch.vmap(torch.func.grad(loss))(logits, target)
    torch.testing.assert_close(each, rows)
    value, tangent = torch.func.jvp(lambda h: loss(h, target), (logits,), (logits,))
    torch.testing.assert_close(value, naive(logits, target, **options))
    torch.testing.assert_close(tangent, (each * logits).sum())
    for reduction in REDUCTIONS:
        more = {"reduction": reduction, "class_weight": weight}
        table = torch.func.jacrev(lambda h, m=more: loss(h, target, **m))(logits)
        leaf = logits.clone().requires_grad_()
        for row, total in zip(
            table.reshape(-1, 7, 5), loss(leaf, target, **more).reshape(-1), strict=True
        ):
            torch.testing.assert_close(row, torch.autograd.grad(total, leaf, retain_graph=True)[0])


@pytest.mark.parametrize("form", FORMS)
def test_transforms_follow_the_conventions(form):
    """Half precision, extra dimensions, nothing to average, bad values: as without transforms."""
    logits, target = problem(n=8, dtype=torch.bfloat16)
    batches = logits.reshape(2, 2, 2, 5).movedim(-1, 2), target.reshape(2, 2, 2)  # [2, 2, 5, 2]
    batches[1][1, 0, 0] = -100

    def plain(h: Tensor, y: Tensor) -> Tensor:
        return linear_core_loss(h, y, form=form)

    def check(h: Tensor, y: Tensor) -> None:
        expected = torch.stack([plain(*pair) for pair in zip(h, y, strict=True)])
        ours = torch.vmap(plain)(h, y)
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, equal_nan=True, rtol=5e-3, atol=1e-30)

    check(*batches)
    check(logits, target)  # eight unbatched ones
    for bad in (NAN, math.inf, -math.inf, 3e38):
        for where in range(5):
            h = batches[0].float()
            h[0, 0, where] = bad
            h[1, 0, where, 0] = bad  # ignored
            check(h, batches[1])
    check(batches[0], torch.full_like(batches[1], -100))
    nothing = torch.full_like(target, -100)
    gradient = torch.func.grad(lambda h: plain(h, nothing))(logits.float())
    assert torch.equal(gradient, torch.zeros(8, 5))
    weightless = {"form": form, "class_weight": torch.zeros(5)}
    gradient, value = torch.func.grad_and_value(
        lambda h: linear_core_loss(h, target, **weightless)
    )(logits.float())
    assert value.isnan()
    assert torch.equal(gradient, torch.zeros(8, 5))


def test_transforms_cannot_work_in_place():
    logits, target = problem()
    with pytest.raises(ValueError, match=r"inplace=True has no meaning under torch\.func"):
        torch.func.grad(lambda h: linear_core_loss(h * 1, target, inplace=True))(logits)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_models_get_the_same(inplace):
    """Dynamo leaves its graph for the call; values and gradients are the eager ones."""
    torch.manual_seed(0)
    layer, features = torch.nn.Linear(4, 6), torch.randn(9, 4)
    target = torch.randint(6, (9,))
    criterion = LinearCoreLoss(inplace=inplace)

    def step(x: Tensor) -> Tensor:
        return 1 * criterion(layer(x).sin() * 2, target)

    expected = torch.autograd.grad(step(features), layer.weight)
    torch._dynamo.reset()
    compiled = torch.autograd.grad(torch.compile(step, backend="eager")(features), layer.weight)
    torch.testing.assert_close(compiled, expected)


# --- in place -------------------------------------------------------------------------------------


def hidden(leaf: Tensor) -> Tensor:
    """Logits as a model makes them: not a leaf."""
    return leaf * 1.0


def in_place(leaf: Tensor, target: Tensor, **options) -> Tensor:
    return linear_core_loss(hidden(leaf), target, inplace=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_in_place_is_the_same_bit_for_bit(monkeypatch, dtype, tail, form):
    """All reductions (their gradients arrive as 1.25 or a value a row), weights, ignored rows."""
    monkeypatch.setattr(losses, "CPU_BLOCK", 12)
    logits, target = problem(n=9, dtype=dtype)
    target[[0, 4]] = -100
    weight = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.5], dtype=torch.float32)
    for reduction, class_weight in itertools.product(REDUCTIONS, (None, weight)):
        options = {"reduction": reduction, "class_weight": class_weight, "tail": tail}
        options |= {"form": form, "scale": 0.7}
        ours = value_and_gradient(in_place, logits, target, **options)
        plain = value_and_gradient(linear_core_loss, logits, target, **options)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_in_place_gradcheck():
    logits, target = problem(n=4, k=4, seed=3)
    target[1] = -100
    leaf = logits.clone().requires_grad_()
    for form, reduction in itertools.product(FORMS, REDUCTIONS):
        options = {"form": form, "reduction": reduction, "scale": 0.8}
        assert torch.autograd.gradcheck(lambda h, o=options: in_place(h, target, **o), leaf)


@pytest.mark.parametrize("view", [False, True])
def test_in_place_gradient_takes_the_memory_of_the_logits(view):
    logits, target = problem(dtype=torch.float32)
    leaf = logits.clone().requires_grad_()
    expected = value_and_gradient(linear_core_loss, logits, target, reduction="sum")[1]
    scores = hidden(leaf).view(-1, 5) if view else hidden(leaf)
    alias, arrived = scores.detach(), []
    scores.register_hook(arrived.append)
    loss = linear_core_loss(scores, target, reduction="sum", inplace=True)
    assert torch.equal(alias * 0.5, expected)  # as documented: an alias cannot be guarded
    assert scores.shape == (0,)
    loss.backward()
    assert arrived[0].data_ptr() == alias.data_ptr()
    assert torch.equal(leaf.grad, alias)


def test_plain_reads_after_in_place_fail():
    logits, target = problem()
    scores = hidden(logits.requires_grad_())
    linear_core_loss(scores, target, inplace=True)
    assert scores.numel() == 0
    for read in (
        lambda: scores.argmax(1),
        lambda: scores.softmax(1),
        lambda: scores.amax(1),
        lambda: scores[0],
        lambda: scores.topk(2),
        lambda: scores.argmax(-1) == target,
        lambda: scores + logits,
        lambda: scores.gather(1, target[:, None]),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            read()
    for inplace in (False, True):
        with pytest.raises(ValueError, match="an earlier inplace=True consumed them"):
            linear_core_loss(scores, target, inplace=inplace)
    assert "tensor([]" in repr(scores)


@pytest.mark.parametrize("view", [False, True])
def test_autograd_use_after_in_place_fails(view):
    logits, target = problem(n=6)
    leaf = logits.requires_grad_()
    base = hidden(leaf).reshape(2, 3, 5).clone()
    other = base[0]  # a view made earlier: it can be read, but not differentiated
    scores = base.view(6, 5) if view else hidden(leaf)
    loss = linear_core_loss(scores, target, inplace=True)
    for late in (scores, base, other) if view else (scores,):
        with pytest.raises(RuntimeError, match=r"used after linear_core_loss\(..., inplace=True\)"):
            late.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"used after linear_core_loss\(..., inplace=True\)"):
            (loss + late.square().sum()).backward(retain_graph=True)
    loss.backward()
    expected = value_and_gradient(linear_core_loss, logits, target)[1] * 2
    torch.testing.assert_close(leaf.grad, expected)


def test_earlier_uses_fail_only_if_they_need_the_values():
    logits, target = problem()
    leaf = logits.clone().requires_grad_()
    once = value_and_gradient(linear_core_loss, logits, target)[1] * 2
    for earlier, expected in (
        (lambda h: h.sum(), once + 1),
        (lambda h: h.exp().sum(), once + logits.exp()),  # keeps its result
        (
            lambda h: F.cross_entropy(h, target, reduction="sum"),  # keeps the log-softmax
            once + logits.softmax(1) - F.one_hot(target, 5),
        ),
        (lambda h: h.sin().sum(), "error"),
        (lambda h: linear_core_loss(h, target), "error"),
    ):
        scores = hidden(leaf)
        total = earlier(scores)
        total = total + linear_core_loss(scores, target, inplace=True)
        leaf.grad = None
        if isinstance(expected, str):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()
            continue
        total.backward()
        torch.testing.assert_close(leaf.grad, expected)


def test_a_producer_that_kept_its_result_fails():
    """Nobody may differentiate exp from an overwritten result."""
    logits, target = problem()
    loss = linear_core_loss(logits.requires_grad_().exp(), target, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_retained_graph_and_double_use():
    logits, target = problem()
    leaf = logits.clone().requires_grad_()
    loss = in_place(leaf, target)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    (3 * loss).backward(retain_graph=True)
    leaf.grad.mul_(2)  # reaches nobody else
    (loss * loss + loss).backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(leaf.grad, (8 + 2 * loss.item() + 2) * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_in_place_has_no_second_derivatives():
    logits, target = problem()
    leaf = logits.requires_grad_()
    with pytest.raises(RuntimeError, match=r"no second derivatives .* use inplace=False"):
        torch.autograd.grad(in_place(leaf, target), leaf, create_graph=True)


class Strange(torch.autograd.Function):
    """A tensor that is no view, of any strides."""

    @staticmethod
    def forward(ctx, leaf: Tensor, strides: tuple[int, int]) -> Tensor:
        return leaf.new_empty(0).set_(leaf.new_zeros(99).untyped_storage(), 0, (6, 5), strides)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Scale(torch.autograd.Function):
    """The identity, whose gradient it multiplies by -0.1."""

    @staticmethod
    def forward(ctx, x: Tensor, view: bool) -> Tensor:
        return x.view_as(x) if view else x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return -0.1 * gradient, None


def _module(kind: str, x: Tensor, seen: list) -> Tensor:
    layer = torch.nn.Linear(5, 5).double()
    torch.nn.init.eye_(layer.weight)
    if kind == "pre":
        layer.register_full_backward_pre_hook(lambda m, out: (out[0] * 3,))
    else:
        layer.register_full_backward_hook(
            lambda m, into, out: seen.extend([into[0].clone(), out[0].clone()]) or (into[0] * 3,)
        )
    return layer(x)


def _tensor_hook(scores: Tensor, seen: list, then=lambda v: v) -> Tensor:
    scores.register_hook(lambda g: seen.append(g.clone()) or 3 * g)
    return then(scores)


def _node_hook(scores: Tensor, seen: list, before: bool) -> Tensor:
    if before:
        scores.grad_fn.register_prehook(lambda out: seen.append(out[0].clone()) or (out[0] * 3,))
    else:
        scores.grad_fn.register_hook(
            lambda into, out: seen.append(out[0].clone()) or tuple(g * 3 for g in into)
        )
    return scores


def _retained(scores: Tensor, seen: list) -> Tensor:
    scores.retain_grad()
    seen.append(scores)
    return scores.view(-1, 5)


HOOKED = {
    "function": lambda x, seen: Scale.apply(x * 1.5, True),
    "function that returns its input": lambda x, seen: Scale.apply(x * 1.5, False),
    "function, then a view": lambda x, seen: Scale.apply(x * 1.5, True).view(-1, 5),
    "hook": lambda x, seen: _tensor_hook(x * 1.5, seen),
    "hook on a view": lambda x, seen: _tensor_hook((x * 1.5).view(-1, 5), seen),
    "hook on a view between": lambda x, seen: _tensor_hook(
        (x * 1.5).view(2, 3, 5), seen, lambda v: v.view(-1, 5)
    ),
    "hook on what is viewed": lambda x, seen: _tensor_hook(x * 1.5, seen, lambda v: v.view(-1, 5)),
    "node": lambda x, seen: _node_hook(x.exp() * x, seen, True),
    "node after": lambda x, seen: _node_hook(x.neg(), seen, False),
    "node of a view": lambda x, seen: _node_hook((x * 1.5).view(-1, 5), seen, True),
    "node of a view, after": lambda x, seen: _node_hook((x * 1.5).view(-1, 5), seen, False),
    "retained between": lambda x, seen: _retained((x * 1.5).view(2, 3, 5), seen),
    "module": lambda x, seen: _module("full", x, seen),
    "module, before": lambda x, seen: _module("pre", x, seen),
    "module of three dimensions": lambda x, seen: _module("full", x.view(2, 3, 5), seen).view(6, 5),
}


@pytest.mark.parametrize("make", HOOKED.values(), ids=HOOKED)
def test_in_place_skips_nothing_between_logits_and_memory(make):
    """Functions, hooks and retained gradients get the gradient, and what they return counts."""
    logits, target = problem(n=6)
    found = []
    for inplace in (False, True):
        leaf, seen = logits.clone().requires_grad_(), []
        torch.manual_seed(0)
        scores = make(leaf, seen)
        linear_core_loss(scores, target, inplace=inplace).backward()
        assert scores.shape == ((0,) if inplace else (6, 5))
        found.append([leaf.grad, *(t.grad if t.requires_grad else t for t in seen)])
    plain, ours = found
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    unhooked = value_and_gradient(lambda h, t: linear_core_loss(h * 1.5, t), logits, target)[1]
    assert not torch.equal(ours[0], unhooked) or len(ours) > 1  # the case does what it says


def in_place_views() -> dict:
    return {
        "unbatched": (lambda x: hidden(x)[0].clone(), 1),
        "view of all": (lambda x: hidden(x).view(2, 3, 5).view(-1, 5), 6),
        "flattened": (lambda x: hidden(x.view(2, 3, 5)).flatten(0, 1), 6),
        "turned": (lambda x: hidden(x.t().contiguous()).t(), "error"),
        "turned back": (lambda x: hidden(x.t()).t().contiguous(), 6),
        "channels last": (
            lambda x: hidden(x.view(1, 2, 3, 5).permute(0, 3, 1, 2)),
            6,
        ),
        "channels first": (lambda x: hidden(x.view(2, 3, 5).transpose(1, 2).contiguous()), "error"),
        "a part": (lambda x: hidden(x)[1:], "error"),
        "one row": (lambda x: hidden(x)[:1], "error"),
        "columns": (lambda x: hidden(x)[:, :4], "error"),
        "expanded": (lambda x: hidden(x)[:1].expand(6, 5), "error"),
        "expanded one": (lambda x: hidden(x[:1, :1]).expand(1, 5), "error"),
        "gaps": (lambda x: hidden(x).as_strided((3, 5), (10, 1)), "error"),
        "overlap": (lambda x: hidden(x).as_strided((6, 5), (3, 1)), "error"),
        "strange gaps": (lambda x: Strange.apply(x, (10, 1)).as_strided((6, 5), (5, 1)), "error"),
        "strange overlap": (lambda x: Strange.apply(x, (0, 1)).as_strided((6, 5), (5, 1)), "error"),
        "strange shift": (
            lambda x: Strange.apply(x, (5, 1)).as_strided((6, 5), (5, 1), 3),
            "error",
        ),
        "shifted": (lambda x: F.pad(hidden(x), (1, 0)).as_strided((6, 5), (5, 1), 1), "error"),
    }


@pytest.mark.parametrize("case", in_place_views())
def test_which_memory_can_be_overwritten(case):
    make, rows = in_place_views()[case]
    logits, _ = problem(n=6)
    leaf = logits.clone().requires_grad_()
    scores = make(leaf)
    shape = scores.shape
    target = torch.arange(math.prod(shape) // 5 if case != "columns" else 6) % 4
    target = target.reshape(shape[:1] + shape[2:] if len(shape) > 1 else ())
    if rows == "error":
        before = scores.detach().clone()
        with pytest.raises(ValueError, match=r"inplace=True needs logits .* or inplace=False"):
            linear_core_loss(scores, target, inplace=True)
        assert torch.equal(scores, before)
        return
    assert target.numel() == rows
    loss = linear_core_loss(scores, target, inplace=True)
    assert scores.shape == (0,)
    (3 * loss).backward()
    ours, leaf.grad = leaf.grad, None
    plain = linear_core_loss(make(leaf), target)
    (3 * plain).backward()
    assert torch.equal(loss, plain)
    assert torch.equal(ours, leaf.grad)


def test_leaves_are_not_overwritten():
    logits, target = problem(n=6)
    leaf = logits.clone().requires_grad_()
    for scores in (leaf, leaf.view(6, 5), leaf[None].squeeze(0)):
        with pytest.raises(
            ValueError, match=r"inplace=True cannot overwrite a leaf .* logits.clone"
        ):
            linear_core_loss(scores, target, inplace=True)
    kept = hidden(leaf)
    kept.retain_grad()
    with pytest.raises(ValueError, match=r"inplace=True .* retain_grad"):
        linear_core_loss(kept, target, inplace=True)
    assert torch.equal(leaf, logits)
    assert torch.equal(kept, logits)


def test_a_refused_call_overwrites_nothing():
    logits, target = problem()
    scores = hidden(logits.requires_grad_())
    target[3] = 5
    with pytest.raises(IndexError, match="target 5 is out of range"):
        linear_core_loss(scores, target, inplace=True)
    with pytest.raises(ValueError, match="class_weight must have shape"):
        linear_core_loss(scores, target % 5, inplace=True, class_weight=torch.ones(2))
    assert torch.equal(scores, logits)


def test_nothing_to_overwrite_without_gradients():
    logits, target = problem()
    expected, copied = linear_core_loss(logits, target), logits.clone()
    assert torch.equal(linear_core_loss(logits, target, inplace=True), expected)
    scores = hidden(logits.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(linear_core_loss(scores, target, inplace=True), expected)
    assert torch.equal(linear_core_loss(scores.detach(), target, inplace=True), expected)
    assert torch.equal(scores, copied)
    assert torch.equal(logits, copied)


@pytest.mark.parametrize("case", ["no rows", "all ignored", "bad rows", "weights in the logits"])
def test_in_place_on_odd_input(case):
    logits, target = problem(n=0 if case == "no rows" else 7, dtype=torch.float32)
    if case == "all ignored":
        target.fill_(-100)
    if case == "bad rows":
        logits[1], logits[3, 2], target[1] = NAN, math.inf, -100
    for form, reduction in itertools.product(FORMS, REDUCTIONS):
        options = {"form": form, "reduction": reduction}
        if case == "weights in the logits":
            leaf = logits.abs().requires_grad_()
            scores = hidden(leaf)
            loss = linear_core_loss(
                scores, target, class_weight=scores.detach()[0], inplace=True, **options
            )
            expected = linear_core_loss(leaf, target, class_weight=leaf.detach()[0], **options)
            assert torch.equal(loss, expected)
            continue
        ours = value_and_gradient(in_place, logits, target, **options)
        plain = value_and_gradient(linear_core_loss, logits, target, **options)
        torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)


def test_in_place_under_autocast_and_checkpointing():
    torch.manual_seed(0)
    layer, features = torch.nn.Linear(4, 6), torch.randn(9, 4)
    target = torch.randint(6, (9,))
    gradients = []
    for inplace, checkpoint in ((False, False), (True, False), (True, True)):

        def step(x: Tensor, inplace: bool = inplace) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return linear_core_loss(layer(x), target, inplace=inplace)

        x = features.clone().requires_grad_()
        if checkpoint:
            loss = torch.utils.checkpoint.checkpoint(step, x, use_reentrant=False)
        else:
            loss = step(x)
        assert loss.dtype == torch.float32
        gradients.append(torch.autograd.grad(loss, layer.weight)[0])
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@pytest.mark.skipif(not triton_support.interpreting(), reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_in_place_through_the_kernel(monkeypatch, dtype, stream):
    """Rows on chip and rows that are streamed: the kernel's output pointer is its input's."""
    kernels = pytest.importorskip("proofread.linear_core.kernels")
    if stream:  # 8 of 21 columns are held, the others are read three times
        plan = kernels.Plan(vec=1, rows=1, block=4, parts=2, stream=True, num_warps=4)
        monkeypatch.setattr(kernels, "launch_plan", lambda *a: plan)
    pointers = []
    forward = kernels.linear_core_forward

    def watched(logits: Tensor, *rest, **options):
        rows, grad = forward(logits, *rest, **options)
        pointers.append(grad.data_ptr() == logits.data_ptr())
        return rows, grad

    monkeypatch.setattr(kernels, "linear_core_forward", watched)
    logits, target = problem(n=5, k=21, dtype=dtype)
    target[2] = -100
    weight = torch.rand(21)
    for tail, class_weight in zip(TAILS, (None, weight, None), strict=True):
        options = {"tail": tail, "class_weight": class_weight, "scale": 0.5}
        with triton_support.force_triton():
            ours = value_and_gradient(in_place, logits, target, **options)
            plain = value_and_gradient(linear_core_loss, logits, target, **options)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        compare(logits, target, **options)
    assert pointers == [True, False] * 3


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_logits_whose_sum_overflows(dtype, tail):
    """Equal ones lie in the core; far apart, the loss itself overflows and its slopes do not.

    (The core's end, 1, is less than the rounding of such logits.)
    """
    top = torch.finfo(dtype).max
    logits = torch.full((2, 4), top, dtype=dtype, requires_grad=True)
    loss = linear_core_loss(logits, torch.tensor([0, 3]), tail=tail)
    stitch = {"exponential": 1, "gamma": 2, "logistic": 2 * math.log(2)}[tail]
    assert 3 * stitch * 0.99 <= loss <= 3 * (stitch + 1)
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    torch.testing.assert_close(grad[0] * 2, torch.tensor([-0.75, 0.25, 0.25, 0.25], dtype=dtype))
    apart = torch.tensor([[top, top, top, -top]], dtype=dtype, requires_grad=True)
    loss = linear_core_loss(apart, torch.tensor([3]), tail=tail)
    assert loss.item() == math.inf  # 1.5 times the largest number
    loss.backward()
    assert apart.grad.tolist() == [[0.25, 0.25, 0.25, -0.75]]


@pytest.mark.parametrize("scale", [1e-29, 1e-36, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_tiny_scale_is_the_hinge(dtype, scale):
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0], [-1.5, 3.0, 0.0]], dtype=dtype)
    target = torch.tensor([0, 1, 0])
    hinge = {"constrained": [0 + 1.0, 2.0, 3.5 + 0.5], "sum": [0.0, 2.0, 5.5 + 2.5]}
    slopes = {"constrained": [0, 0, 1], "sum": [0, 0, 0]}
    for form, tail in itertools.product(FORMS, TAILS):
        options = {"form": form, "tail": tail, "scale": scale}
        leaf = logits.clone().requires_grad_()
        loss = linear_core_loss(leaf, target, reduction="none", **options)
        torch.testing.assert_close(loss, torch.tensor(hinge[form], dtype=dtype))
        (grad,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
        expected = torch.tensor([slopes[form], [1, 0, 1], [0, 1, 1]], dtype=dtype)
        if form == "constrained":
            expected -= expected.mean(1, keepdim=True)
        else:
            expected[range(3), target] = -expected.sum(1)
        torch.testing.assert_close(grad, expected)
        with torch.no_grad():
            assert torch.equal(torch.vmap(lambda h, t, o=options: linear_core_loss(h, t, **o))(
                logits, target), loss)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_huge_settings_overflow_to_infinity(form):
    logits, target = problem(dtype=torch.float32)
    for options in ({"scale": 1e300}, {"core": 1e300}):
        loss, grad = value_and_gradient(linear_core_loss, logits, target, form=form, **options)
        assert loss == math.inf
        assert grad.isfinite().all()


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
        (GOOD[0].cdouble(), GOOD[1], {}, TypeError, "logits must be float16"),
        (GOOD[0].to(torch.float8_e5m2), GOOD[1], {}, TypeError, "logits must be float16"),
        (*GOOD, {"core": 0.0}, ValueError, "core must be"),
        (*GOOD, {"core": -1.0}, ValueError, "core must be"),
        (*GOOD, {"core": NAN}, ValueError, "core must be"),
        (*GOOD, {"core": math.inf}, ValueError, "core must be"),
        (*GOOD, {"scale": 0.0}, ValueError, "scale must be"),
        (*GOOD, {"scale": -1.0}, ValueError, "scale must be"),
        (*GOOD, {"scale": NAN}, ValueError, "scale must be"),
        (*GOOD, {"scale": math.inf}, ValueError, "scale must be"),
        (*GOOD, {"tail": "x"}, ValueError, "tail must be one of"),
        (*GOOD, {"form": "pairwise"}, ValueError, "form must be one of"),
        (*GOOD, {"reduction": "avg"}, ValueError, "reduction must be one of"),
        (GOOD[0].numpy(), GOOD[1], {}, TypeError, r"logits .* pass torch\.as_tensor\(logits\)"),
        (GOOD[0].tolist(), GOOD[1], {}, TypeError, "logits must be a torch tensor, got list"),
        (GOOD[0].to_sparse(), GOOD[1], {}, TypeError, r"logits must be dense.*sparse_coo"),
        (GOOD[0], GOOD[1].numpy(), {}, TypeError, r"target .* pass torch\.as_tensor\(target\)"),
        (GOOD[0], GOOD[1].tolist(), {}, TypeError, "target must be a torch tensor, got list"),
        (GOOD[0], GOOD[1].to_sparse(), {}, TypeError, "target must be dense"),
        (GOOD[0][0], 1, {}, TypeError, "target must be a torch tensor, got int"),
        (*GOOD, {"ignore_index": None}, TypeError, "ignore_index must be an integer, got None"),
        (*GOOD, {"ignore_index": 1.5}, TypeError, "ignore_index must be an integer, got 1.5"),
        (*GOOD, {"core": torch.ones((), requires_grad=True)}, ValueError, r"core\.item\(\)"),
        (*GOOD, {"scale": torch.ones((), requires_grad=True)}, ValueError, r"scale\.item\(\)"),
    ],
)
def test_bad_arguments(logits, target, options, error, message):
    with pytest.raises(error, match=message):
        linear_core_loss(logits, target, **options)
    if logits is GOOD[0] and target is GOOD[1] and "class_weight" not in options:
        with pytest.raises(error, match=message):
            LinearCoreLoss(**options)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (np.ones(3), TypeError, r"class_weight .* pass torch\.as_tensor\(class_weight\)"),
        ([1.0, 1.0, 1.0], TypeError, "class_weight must be a torch tensor, got list"),
        (torch.ones(3).to_sparse(), TypeError, "class_weight must be dense"),
        (torch.ones(3).long(), TypeError, "class_weight must be floating"),
        (torch.ones(3, 1), ValueError, "class_weight must have shape"),
        (torch.ones(1), ValueError, "class_weight must have shape"),
        (torch.ones(()), ValueError, "class_weight must have shape"),
        (torch.nn.Parameter(torch.ones(3)), ValueError, r"class_weight\.detach\(\)"),
    ],
)
def test_bad_weights_are_refused_when_the_module_is_made(weight, error, message):
    with pytest.raises(error, match=message):
        LinearCoreLoss(class_weight=weight)
    with pytest.raises(error, match=message):
        linear_core_loss(*GOOD, class_weight=weight)


def test_integers_of_any_kind_are_ignored():
    expected = linear_core_loss(*GOOD, ignore_index=0)
    for index in (np.int64(0), torch.tensor(0)):
        assert torch.equal(linear_core_loss(*GOOD, ignore_index=index), expected)
        assert torch.equal(LinearCoreLoss(ignore_index=index)(*GOOD), expected)


# --- dispatch -------------------------------------------------------------------------------------


def test_the_kernel_gets_what_the_contract_says(monkeypatch):
    """A stand-in kernel that checks its arguments and computes by the formula."""
    calls = []

    def kernel(logits, target, *, with_grad, inplace, class_weight, **options):
        assert not inplace
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
    assert "outside the timed region" in result["method"]
    assert [case["shape"] for case in result["cases"]] == [[64, 500]] * 2 + [[33, 129]] * 2
    for case in result["cases"]:
        for name in ("F.cross_entropy", "plain formula", "linear_core_loss, again (A/A)"):
            for ratios in (case["times_ours"], case["times_in_place"]):
                assert 0 < ratios[name]["min"] <= ratios[name]["median"] <= ratios[name]["max"]
        assert "linear_core_loss, in place" in case["times_ours"]
        assert "linear_core_loss" in case["times_in_place"]
    assert result["cases"][0]["bytes_per_logit"] == {"floor": 8, "linear_core_loss": 8}
    machine = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert machine["packages"]["torch"] == torch.__version__
    written = (tmp_path / "environment.json").read_text(encoding="utf-8")
    node = platform.node()
    assert not node or f'"{node}"' not in written
    assert str(Path.home()) not in written
    assert "gate: green" in capsys.readouterr().out


@pytest.mark.parametrize("broken", [False, True])
def test_benchmark_reports_no_speed_on_a_red_gate(benchmark, tmp_path, capsys, broken):
    """``broken``: the loss in place, not the other."""

    def wrong(logits, target, inplace=False, **options):
        factor = 1.001 if inplace == broken else 1
        return factor * linear_core_loss(logits, target, inplace=inplace, **options)

    benchmark["main"].__globals__["linear_core_loss"] = wrong
    assert benchmark["main"](["--quick", "--out", str(tmp_path / "new")]) == 1
    said = capsys.readouterr()
    assert "gate: red, no speed is reported" in said.err
    assert "value off by 0.001" in said.err
    assert ("in place" in said.err) == broken
    assert not said.out
    assert not (tmp_path / "new").exists()
