"""``fused_linear_core_loss`` against its twin that holds all logits, ``linear_core_loss`` of
``F.linear``: values, gradients, errors, and the memory that is its purpose."""

from __future__ import annotations

import itertools
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proofread.linear_core import fused, linear_core_loss
from proofread.linear_core.fused import fused_linear_core_loss

TAILS = ("exponential", "gamma", "logistic")
FORMS = ("constrained", "sum")
REDUCTIONS = ("none", "sum", "mean")
HALF = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = {  # N, D, K with the tiles of ``small_tiles``: 16 rows, 32 classes
    "one tile": (5, 3, 7),
    "odd": (37, 5, 101),
    "two classes": (19, 4, 2),
    "whole tiles": (32, 8, 64),
    "last block of one class": (17, 3, 65),
    "one row": (1, 6, 50),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(fused, "ROWS", 16)
    monkeypatch.setattr(fused, "CLASSES", 32)


def twin(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options
) -> Tensor:
    return linear_core_loss(F.linear(hidden, weight, bias), target, **options)


def problem(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [N, D], weight [K, D], target [N], bias [K]; logits of size 1 or so."""
    n, d, k = shape
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=g)
    weight = torch.randn(k, d, generator=g) / d**0.5
    bias = torch.randn(k, generator=g) / 2
    target = torch.randint(k, (n,), generator=g)
    return hidden.to(dtype), weight.to(dtype), target, bias.to(dtype)


def results(
    loss, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options
) -> list[Tensor]:
    """Value and all gradients, for an upstream gradient that differs from 1 (and between rows)."""
    leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    value = loss(leaves[0], leaves[1], target, leaves[2] if bias is not None else None, **options)
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    value.backward(upstream)
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Relative errors in norm: single entries are small differences of large sums."""
    assert [a.shape for a in found] == [b.shape for b in expected]
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert max(errors(found, expected)) <= tolerance, errors(found, expected)


def exact(*tensors: Tensor | None) -> list[Tensor | None]:
    return [t.double() if t is not None and t.is_floating_point() else t for t in tensors]


# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_twin_in_float64(shape, dtype, form):
    for seed, (tail, with_bias) in enumerate(itertools.product(TAILS, (True, False))):
        hidden, weight, target, bias = problem(shape, dtype, seed)
        inputs = (hidden, weight, target, bias if with_bias else None)
        options = {"form": form, "tail": tail, "core": 0.8, "scale": 0.5 + 0.3 * seed}
        found = results(fused_linear_core_loss, *inputs, **options)
        assert all(part.dtype == dtype for part in found)
        expected = results(twin, *exact(*inputs), **options)
        # Few classes cancel strongly; then it must do as well as the twin in the same dtype.
        usual = errors(results(twin, *inputs, **options), expected)
        for error, other in zip(errors(found, expected), usual, strict=True):
            assert error <= max(TOLERANCE[dtype], 2 * other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_weights_ignored_targets_and_reductions(dtype, reduction, form):
    hidden, weight, target, bias = problem((45, 6, 77), dtype, 3)
    target[::3] = -7
    class_weight = torch.linspace(0, 2, 77)
    options = {"form": form, "reduction": reduction, "ignore_index": -7}
    for weights in (None, class_weight):
        more = {**options, "class_weight": weights}
        found = results(fused_linear_core_loss, hidden, weight, target, bias, **more)
        expected = results(twin, *exact(hidden, weight, target, bias), **more)
        assert_equal(found, expected, TOLERANCE[dtype])
        assert not found[1][::3].any()


def test_closed_form_at_equal_logits():
    """Zero hidden states: loss (K-1)·Φ(0) a row; all slopes 1, so the logits' gradient is
    1/K - [j = y] and db its mean over the rows."""
    target, k = torch.tensor([1, 40, 40]), 50
    weight, bias = torch.ones(k, 2), torch.zeros(k, requires_grad=True)
    loss = fused_linear_core_loss(torch.zeros(3, 2), weight, target, bias, scale=0.5)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(49 * 1.5, rel=1e-6)
    expected = 1 / k - F.one_hot(target, k).double().mean(0)
    torch.testing.assert_close(bias.grad.double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(form, reduction):
    hidden, weight, target, bias = problem((20, 3, 35), seed=4)
    target[5] = -100
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]

    def loss(x, w, b):
        more = {"form": form, "reduction": reduction, "tail": "gamma"}
        return fused_linear_core_loss(x, w, target, b, class_weight=torch.rand(35) + 1, **more)

    torch.manual_seed(0)
    state = torch.get_rng_state()

    def fixed(*inputs):
        torch.set_rng_state(state)
        return loss(*inputs)

    assert torch.autograd.gradcheck(fixed, leaves)


@pytest.mark.parametrize("wanted", list(itertools.product((True, False), repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_only_wanted_gradients_are_made(wanted, reduction):
    hidden, weight, target, bias = problem((37, 5, 101), seed=5)
    full = results(fused_linear_core_loss, hidden, weight, target, bias, reduction=reduction)[1:]
    leaves = [
        t.detach().requires_grad_(w) for t, w in zip((hidden, weight, bias), wanted, strict=True)
    ]
    loss = fused_linear_core_loss(leaves[0], leaves[1], target, leaves[2], reduction=reduction)
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.backward(torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape))
    for leaf, want, grad in zip(leaves, wanted, full, strict=True):
        assert (leaf.grad is not None) == want
        if want:
            torch.testing.assert_close(leaf.grad, grad, rtol=1e-12, atol=1e-14)


def test_unwanted_gradients_cost_no_product(monkeypatch):
    calls = []
    plain = fused._Sweep._add_product
    monkeypatch.setattr(
        fused._Sweep, "_add_product", lambda *args: (calls.append(1), plain(*args))[1]
    )
    hidden, weight, target, bias = problem((16, 4, 32))  # one tile
    fused_linear_core_loss(hidden, weight, target, bias)
    assert len(calls) == 0
    fused_linear_core_loss(hidden.requires_grad_(), weight, target)
    assert len(calls) == 1
    fused_linear_core_loss(hidden, weight.requires_grad_(), target)
    assert len(calls) == 3
    with torch.no_grad():
        fused_linear_core_loss(hidden, weight, target)
    assert len(calls) == 3


@pytest.mark.parametrize("unit", [True, False], ids=["bf16 products", "fp32 products"])
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_loses_nothing_where_slopes_cancel(unit, form, monkeypatch):
    """Logits within the core: every slope is 1 and Σ_j g_j w_j - G·w̄ is -w_y, one term of 3000.

    Correcting after rounded products would leave an error of the order of the gradient itself.
    """
    monkeypatch.setattr(fused, "_has_bfloat16_unit", lambda device: unit)
    hidden, weight, target, _ = problem((200, 16, 3000), torch.bfloat16, 6)
    hidden = hidden / 16
    target %= 40  # as in language: most targets in one block
    found = results(fused_linear_core_loss, hidden, weight, target, None, form=form)
    expected = results(twin, *exact(hidden, weight, target, None), form=form)
    assert_equal(found, expected, TOLERANCE[torch.bfloat16])


def test_sums_over_many_blocks_stay_in_float32():
    """Each of 64 row blocks adds the same to dW: a bfloat16 running sum would stall at 2⁸."""
    n, k = 16 * 64, 3
    hidden = torch.ones(n, 1, dtype=torch.bfloat16)
    weight = torch.zeros(k, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(n, dtype=torch.long)
    fused_linear_core_loss(hidden, weight, target, reduction="sum").backward()
    # slopes (0, 1, 1), mean 2/3
    expected = torch.tensor([[-2 / 3 * n], [n / 3], [n / 3]]).bfloat16()
    assert torch.equal(weight.grad, expected)


def test_float16_gradients_beyond_its_range_are_not_lost_before_scaling():
    """Σ_n x_n is 10⁵ > 65504, but the mean's gradient is small."""
    hidden = torch.full((1000, 2), 100.0, dtype=torch.float16)
    weight = torch.zeros(4, 2, dtype=torch.float16, requires_grad=True)
    fused_linear_core_loss(hidden, weight, torch.zeros(1000, dtype=torch.long)).backward()
    expected = torch.tensor([-75.0, 25.0, 25.0, 25.0])[:, None].expand(4, 2)
    assert torch.equal(weight.grad.float(), expected)


# --- shapes and layouts ---------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_leading_dimensions(reduction):
    hidden, weight, target, bias = problem((24, 5, 41), seed=7)
    flat = results(fused_linear_core_loss, hidden, weight, target, bias, reduction=reduction)
    shaped = results(
        fused_linear_core_loss,
        hidden.view(2, 3, 4, 5),
        weight,
        target.view(2, 3, 4).int(),
        bias,
        reduction=reduction,
    )
    shapes = [target.view(2, 3, 4).shape if reduction == "none" else (), (2, 3, 4, 5)]
    assert [part.shape for part in shaped[:2]] == shapes
    for a, b in zip(flat, shaped, strict=True):
        torch.testing.assert_close(b.reshape(a.shape), a, rtol=0, atol=0)


def test_one_vector():
    hidden, weight, target, bias = problem((1, 5, 41), seed=8)
    one = fused_linear_core_loss(hidden[0], weight, target[0], bias)
    torch.testing.assert_close(one, twin(hidden, weight, target, bias), rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_strides_do_not_matter(dtype, form):
    hidden, weight, target, bias = problem((37, 6, 101), dtype, 9)
    plain = results(fused_linear_core_loss, hidden, weight, target, bias, form=form)
    odd = (
        hidden.t().contiguous().t(),
        weight.repeat_interleave(2, 1)[:, ::2],
        target.repeat_interleave(2)[::2],
        bias.repeat_interleave(3)[::3],
    )
    assert not any(t.is_contiguous() for t in odd)
    strided = results(fused_linear_core_loss, *odd, form=form)
    assert_equal(strided, plain, 1e-14 if dtype == torch.float64 else 1e-3)
    expanded = results(fused_linear_core_loss, hidden[:1].expand(37, 6), weight, target, bias)
    copied = results(fused_linear_core_loss, hidden[:1].repeat(37, 1), weight, target, bias)
    assert_equal(expanded, copied, 0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_counted(rows, dtype, form):
    hidden, weight, _, bias = problem((rows, 4, 40), dtype)
    target = torch.full((rows,), -100)
    for reduction in REDUCTIONS:
        options = {"reduction": reduction, "form": form}
        value, *grads = results(fused_linear_core_loss, hidden, weight, target, bias, **options)
        if reduction == "mean":
            assert math.isnan(value)
        else:
            assert value.shape == ((rows,) if reduction == "none" else ())
            assert not value.any()
        for grad, like in zip(grads, (hidden, weight, bias), strict=True):
            assert grad.shape == like.shape
            assert not grad.any()


def test_inputs_are_not_changed():
    inputs = problem((37, 5, 101), seed=10)
    copies = [t.clone() for t in inputs]
    results(fused_linear_core_loss, *inputs)
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor, copy)


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_backward_twice_accumulates(reduction):
    hidden, weight, target, _ = problem((37, 5, 101), torch.float32, 11)
    weight.requires_grad_()
    loss = fused_linear_core_loss(hidden, weight, target, reduction=reduction).sum()
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    weight.grad.mul_(3)  # must not reach what is kept for the next backward pass
    loss.backward()
    torch.testing.assert_close(weight.grad, 4 * once)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", [False, True])
def test_a_retained_graph_through_views_of_a_leaf(reduction, ignored):
    """Autograd may make a view of what ``backward`` returns the gradient of the leaf."""
    hidden, weight, bias = torch.randn(2, 3, 4), torch.randn(1, 5, 4), torch.randn(5, 1)
    leaves = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    target = torch.tensor([[0, 1, 4], [2, 3, -100 if ignored else 1]])
    loss = fused_linear_core_loss(
        leaves[0], leaves[1][0], target, leaves[2][:, 0], reduction=reduction
    ).sum()
    once = [g.clone() for g in torch.autograd.grad(loss, leaves, retain_graph=True)]
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        assert all(torch.equal(x.grad, times * g) for x, g in zip(leaves, once, strict=True))
    for leaf in leaves:
        leaf.grad.data.zero_()
    loss.backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(leaves, once, strict=True))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ignored", [False, True])
def test_targets_overwritten_before_the_backward_pass(form, reduction, ignored):
    """They are copied, like the class weights."""
    hidden, weight, target, bias = problem((37, 5, 101))
    weights = torch.rand(101, dtype=torch.float64)
    if ignored:
        target[::3] = -100

    def careless(hidden, weight, target, bias, class_weight, **options):
        target, class_weight = target.clone(), class_weight.clone()
        loss = fused_linear_core_loss(
            hidden, weight, target, bias, class_weight=class_weight, **options
        )
        target.fill_(7)
        class_weight.zero_()
        return loss

    given = (hidden, weight, target, bias)
    options = {"class_weight": weights, "form": form, "reduction": reduction}
    expected = results(twin, *given, **options)
    assert_equal(results(careless, *given, **options), expected, 1e-12)


def test_second_derivatives_are_refused():
    hidden, weight, target, _ = problem((3, 2, 5))
    loss = fused_linear_core_loss(hidden.requires_grad_(), weight, target)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*F\.linear"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast_like_the_twin(dtype):
    hidden, weight, target, bias = problem((37, 16, 101), torch.float32, 12)
    with torch.autocast("cpu", dtype=dtype):
        found = results(fused_linear_core_loss, hidden, weight, target, bias)
        expected = results(twin, hidden, weight, target, bias)
    assert all(part.dtype == torch.float32 for part in found)
    assert_equal(found, expected, 2 * TOLERANCE[dtype])


# --- NaN and infinity -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_are_never_finite_and_stay_alone(bad, form):
    hidden, weight, target, bias = problem((37, 5, 101), seed=13)
    expected = fused_linear_core_loss(hidden, weight, target, bias, form=form, reduction="none")
    hidden[20, 2] = bad
    rows = fused_linear_core_loss(hidden, weight, target, bias, form=form, reduction="none")
    assert not rows[20].isfinite()
    rows[20] = expected[20]
    torch.testing.assert_close(rows, expected, rtol=1e-12, atol=0)
    loss, *grads = results(fused_linear_core_loss, hidden, weight, target, bias, form=form)
    assert not loss.isfinite()
    assert grads[0][20].isnan().all()
    assert grads[0][19].isfinite().all()
    assert not grads[1].isfinite().any()


@pytest.mark.parametrize("form", FORMS)
def test_ignored_rows_count_for_nothing_whatever_they_hold(form):
    hidden, weight, target, bias = problem((37, 5, 101), seed=14)
    keep = torch.arange(37) % 4 > 0
    expected = results(fused_linear_core_loss, hidden[keep], weight, target[keep], bias, form=form)
    target[~keep], hidden[~keep] = -100, math.nan
    found = results(fused_linear_core_loss, hidden, weight, target, bias, form=form)
    assert not found[1][~keep].any()
    found[1] = found[1][keep]
    assert_equal(found, expected, 1e-14)


def test_masked_classes():
    """A bias of -inf masks a class: nothing in the sum form, undefined in the constrained one."""
    hidden, weight, _, bias = problem((9, 5, 70), seed=15)
    target, bias = torch.arange(9), bias.index_fill(0, torch.arange(50, 70), -math.inf)
    found = fused_linear_core_loss(hidden, weight, target, bias, form="sum")
    kept = fused_linear_core_loss(hidden, weight[:50], target, bias[:50], form="sum")
    torch.testing.assert_close(found, kept, rtol=1e-12, atol=0)
    assert fused_linear_core_loss(hidden, weight, target, bias).isnan()


# --- errors ---------------------------------------------------------------------------------------


def bad_inputs() -> dict[str, tuple[dict, type[Exception], str]]:
    half, wide = torch.zeros(4, 3).half(), torch.zeros(4, 5)
    return {
        "int hidden": ({"hidden": torch.zeros(4, 3).int()}, TypeError, "hidden must be float16"),
        "mixed": ({"hidden": half}, TypeError, r"weight is torch.float32 but hidden.*autocast"),
        "float target": ({"target": torch.zeros(4)}, TypeError, "integer class indices"),
        "width": ({"hidden": wide}, ValueError, r"hidden must have shape \[..., 3\]"),
        "scalar hidden": ({"hidden": torch.tensor(1.0)}, ValueError, "hidden must have shape"),
        "one class": ({"weight": torch.zeros(1, 3)}, ValueError, "at least 2 classes"),
        "flat weight": ({"weight": torch.zeros(6)}, ValueError, r"weight must be \[K, D\]"),
        "target shape": ({"target": torch.zeros(5).long()}, ValueError, r"shape \(4,\)"),
        "bias shape": ({"bias": torch.zeros(5)}, ValueError, r"bias must have shape \(6,\)"),
        "device": ({"bias": torch.zeros(6, device="meta")}, ValueError, "bias is on meta"),
        "range": ({"target": torch.tensor([0, 1, 6, 2])}, IndexError, "target 6 is out of range"),
        "negative": ({"target": torch.tensor([0, -1, 1, 2])}, IndexError, "target -1"),
        "weights": ({"class_weight": torch.ones(5)}, ValueError, r"shape \(6,\)"),
        "form": ({"form": "mean"}, ValueError, "form must be one of"),
        "reduction": ({"reduction": "avg"}, ValueError, "reduction must be one of"),
        "core": ({"core": 0}, ValueError, "core must be"),
        "scale": ({"scale": -1}, ValueError, "scale must be"),
        "tail": ({"tail": "cubic"}, ValueError, "tail must be one of"),
        "array": ({"hidden": torch.zeros(4, 3).numpy()}, TypeError, r"torch\.as_tensor\(hidden\)"),
        "list": ({"weight": [[0.0] * 3] * 6}, TypeError, r"torch\.as_tensor\(weight\)"),
        "target list": ({"target": [0, 1, 5, 2]}, TypeError, r"torch\.as_tensor\(target\)"),
        "bias list": ({"bias": [0.0] * 6}, TypeError, r"torch\.as_tensor\(bias\)"),
        "weights list": ({"class_weight": [1.0] * 6}, TypeError, r"as_tensor\(class_weight\)"),
        "sparse": ({"weight": torch.eye(6, 3).to_sparse()}, TypeError, "weight must be dense"),
        "no index": ({"ignore_index": None}, TypeError, "ignore_index must be an integer"),
        "core grad": ({"core": torch.ones((), requires_grad=True)}, ValueError, r"core\.item"),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input(case):
    change, error, message = bad_inputs()[case]
    good = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(6, 3),
        "target": torch.tensor([0, 1, 5, -100]),
    }
    fused_linear_core_loss(**good)
    with pytest.raises(error, match=message):
        fused_linear_core_loss(**(good | change))


# --- memory ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the largest storage that any operator returns, in bytes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_no_tensor_grows_with_rows_times_classes(dtype, monkeypatch):
    monkeypatch.undo()  # tiles as they are
    n, d, k = 1100, 8, 5000
    hidden, weight, target, bias = problem((n, d, k), dtype)

    def largest(loss, **options) -> int:
        with Largest() as record:
            results(loss, hidden, weight, target, bias, **options)
        return record.size

    tile = fused.ROWS * torch.get_num_threads() * fused.CLASSES * fused._work_dtype(dtype).itemsize
    for form, reduction in itertools.product(FORMS, REDUCTIONS):
        size = largest(fused_linear_core_loss, form=form, reduction=reduction)
        assert size <= max(tile, k * d * 8)
    assert largest(twin) >= n * k * dtype.itemsize  # the record sees what the twin holds


# --- the benchmark --------------------------------------------------------------------------------


@pytest.fixture
def benchmark():
    script = Path(__file__).parents[2] / "benchmarks" / "linear_core_fused.py"
    return runpy.run_path(str(script))


def test_benchmark_writes_times_and_memory(benchmark, tmp_path, capsys):
    assert benchmark["main"](["--quick", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "linear_core_fused.json").read_text(encoding="utf-8"))
    assert result["gate"] == "green"
    assert [case["dtype"] for case in result["cases"]] == ["float32", "bfloat16"]
    for case in result["cases"]:
        for ratio in case["times_ours"].values():
            assert 0 < ratio["min"] <= ratio["median"] <= ratio["max"]
        assert set(case["times_ours"]) >= {"linear_core_loss of F.linear"}
    assert "gate: green" in capsys.readouterr().out


def test_benchmark_reports_no_speed_on_a_red_gate(benchmark, tmp_path, capsys):
    def wrong(*args, **options):
        return 1.001 * fused_linear_core_loss(*args, **options)

    benchmark["main"].__globals__["fused_linear_core_loss"] = wrong
    assert benchmark["main"](["--quick", "--out", str(tmp_path / "new")]) == 1
    said = capsys.readouterr()
    assert "gate: red, no speed is reported" in said.err
    assert not said.out
    assert not (tmp_path / "new").exists()


def test_a_scale_below_the_dtype_is_the_hinge():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 4), torch.randn(7, 4)
    target = torch.randint(7, (5,))
    logits = hidden @ weight.T
    margins = logits.mean(1, keepdim=True) - logits
    hinge = torch.relu(1 - margins).scatter(1, target[:, None], 0).sum(1).mean()
    loss = fused_linear_core_loss(hidden, weight, target, scale=1e-45)
    torch.testing.assert_close(loss, hinge)


def test_no_features_leave_the_bias():
    """D = 0: the logits are the bias, here equal for all classes, so a row costs (K - 1)·Φ(0)."""
    bias = torch.zeros(3, requires_grad=True)
    loss = fused_linear_core_loss(torch.zeros(2, 0), torch.zeros(3, 0), torch.tensor([0, 2]), bias)
    loss.backward()
    assert loss.item() == 4
    assert bias.grad.tolist() == pytest.approx([-1 / 6, 1 / 3, -1 / 6])
