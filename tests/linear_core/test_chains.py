"""Chains against enumeration of all K^T sequences, against pytorch-crf, and against bad input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchcrf import CRF

from proofread.linear_core import chains
from proofread.linear_core.chains import (
    linear_chain_nll,
    log_partition,
    path_score,
    posterior_marginals,
    structured_hinge_loss,
    viterbi,
)

NAN, INF = math.nan, math.inf
SIZES = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 4), (5, 2), (4, 3)]  # T, K
DTYPES = [torch.float32, torch.float64]


class Table(nn.Module):
    """The least that the functions ask of a module of transitions."""

    def __init__(self, table: Tensor, offset: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Parameter(table.detach().clone())
        self.register_buffer("offset", torch.tensor(offset, dtype=torch.float64))


def problem(
    batch: int, length: int, tags: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Emissions, tags, transitions, and a mask of random lengths, one of them full."""
    rng = torch.Generator().manual_seed(1000 * length + 10 * tags + seed)
    emissions = torch.randn(batch, length, tags, generator=rng, dtype=dtype)
    table = torch.randn(tags, tags, generator=rng, dtype=dtype)
    y = torch.randint(tags, (batch, length), generator=rng)
    lengths = torch.randint(1, length + 1, (batch,), generator=rng)
    lengths[0] = length
    return emissions, y, table, torch.arange(length)[None] < lengths[:, None]


def naive_score(e: Tensor, y: tuple[int, ...] | list[int], a: Tensor) -> Tensor:
    """h(y), term by term. ``e``: [T, K]."""
    total = e[0, y[0]]
    for t in range(1, len(y)):
        total = total + e[t, y[t]] + a[y[t - 1], y[t]]
    return total


def every(e: Tensor) -> list[tuple[int, ...]]:
    return list(itertools.product(range(e.shape[1]), repeat=e.shape[0]))


def rows(emissions: Tensor, y: Tensor, mask: Tensor | None) -> list[tuple[Tensor, list[int]]]:
    """Each sequence without its padding."""
    lengths = [y.shape[1]] * len(y) if mask is None else mask.sum(1).tolist()
    return [(e[:n], tags[:n].tolist()) for e, tags, n in zip(emissions, y, lengths, strict=True)]


def naive_partition(emissions: Tensor, y: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    return torch.stack(
        [
            torch.stack([naive_score(e, z, a) for z in every(e)]).logsumexp(0)
            for e, _ in rows(emissions, y, mask)
        ]
    )


def naive_hinge(
    emissions: Tensor, y: Tensor, a: Tensor, mask: Tensor | None, w: Tensor | None = None
) -> Tensor:
    losses = []
    for e, gold in rows(emissions, y, mask):
        cost = [1.0 if w is None else float(w[k]) for k in gold]
        losses.append(
            torch.stack(
                [
                    sum(c for c, k, g in zip(cost, z, gold, strict=True) if k != g)
                    + naive_score(e, z, a)
                    - naive_score(e, gold, a)
                    for z in every(e)
                ]
            ).max()
        )
    return torch.stack(losses)


def masks(mask: Tensor) -> list[Tensor | None]:
    return [None, mask]


# --- exact enumeration ----------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "tags"), SIZES)
def test_path_score_is_its_formula(length: int, tags: int) -> None:
    emissions, y, a, mask = problem(3, length, tags)
    for m in masks(mask):
        expected = torch.stack([naive_score(e, gold, a) for e, gold in rows(emissions, y, m)])
        torch.testing.assert_close(path_score(emissions, y, a, m), expected)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("length", "tags"), SIZES)
def test_viterbi_is_the_best_of_all_sequences(length: int, tags: int, seed: int) -> None:
    emissions, y, a, mask = problem(3, length, tags, seed=seed)
    for m in masks(mask):
        best, scores = viterbi(emissions, a, m)
        for b, (e, _) in enumerate(rows(emissions, y, m)):
            expected = max(every(e), key=lambda z, e=e: float(naive_score(e, z, a)))
            n = len(e)
            assert best[b].tolist() == [*expected, *[chains.PADDING] * (length - n)]
            torch.testing.assert_close(scores[b], naive_score(e, expected, a))


@pytest.mark.parametrize("seed", range(5))
def test_ties_go_to_the_first_sequence(seed: int) -> None:
    """Scores in {0, 1}: sums are exact and ties abound; ``max`` keeps the first of equals."""
    rng = torch.Generator().manual_seed(seed)
    emissions = torch.randint(2, (4, 4, 3), generator=rng).float()
    a = torch.randint(2, (3, 3), generator=rng).float()
    best, _ = viterbi(emissions, a)
    for e, found in zip(emissions, best.tolist(), strict=True):
        assert tuple(found) == max(every(e), key=lambda z, e=e: float(naive_score(e, z, a)))


@pytest.mark.parametrize(("length", "tags"), SIZES)
def test_partition_sums_over_all_sequences(length: int, tags: int) -> None:
    emissions, y, a, mask = problem(3, length, tags)
    for m in masks(mask):
        expected = naive_partition(emissions, y, a, m)
        torch.testing.assert_close(log_partition(emissions, a, m), expected, rtol=1e-12, atol=1e-12)
        low = log_partition(emissions.float(), a.float(), m)
        torch.testing.assert_close(low.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("length", "tags"), SIZES)
@pytest.mark.parametrize("weighted", [False, True])
def test_hinge_is_the_worst_violation_of_all(length: int, tags: int, weighted: bool) -> None:
    emissions, y, a, mask = problem(3, length, tags)
    w = torch.linspace(0, 3, tags, dtype=torch.float64) if weighted else None
    for m in masks(mask):
        found = structured_hinge_loss(emissions, y, a, mask=m, tag_weight=w, reduction="none")
        torch.testing.assert_close(found, naive_hinge(emissions, y, a, m, w))


def test_hinge_of_a_separated_sequence_is_exactly_zero() -> None:
    """Where the true tags win by more than their cost, in scores that sums would round."""
    emissions, y, a, _ = problem(2, 4, 3, torch.float32)
    emissions = emissions + 1e3 * nn.functional.one_hot(y, 3)
    emissions.requires_grad_()
    loss = structured_hinge_loss(emissions, y, a)
    loss.backward()
    assert loss.item() == 0.0
    assert emissions.grad is not None
    assert not emissions.grad.any()


@pytest.mark.parametrize("name", ["partition", "nll", "hinge"])
@pytest.mark.parametrize(("length", "tags"), SIZES)
def test_gradients_are_those_of_the_enumeration(name: str, length: int, tags: int) -> None:
    emissions, y, a, mask = problem(3, length, tags)
    weight = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)  # a gradient of its own each

    def ours(e: Tensor, a: Tensor, m: Tensor | None) -> Tensor:
        if name == "partition":
            return log_partition(e, a, m)
        if name == "nll":
            return linear_chain_nll(e, y, a, mask=m, reduction="none")
        return structured_hinge_loss(e, y, a, mask=m, reduction="none")

    def naive(e: Tensor, a: Tensor, m: Tensor | None) -> Tensor:
        if name == "hinge":
            return naive_hinge(e, y, a, m)
        value = naive_partition(e, y, a, m)
        if name == "nll":
            value = value - torch.stack([naive_score(r, g, a) for r, g in rows(e, y, m)])
        return value

    for m in masks(mask):
        results = []
        for function in (ours, naive):
            e, t = emissions.clone().requires_grad_(), a.clone().requires_grad_()
            value = (function(e, t, m) * weight).sum()
            grads = torch.autograd.grad(value, [e, t], allow_unused=True, materialize_grads=True)
            results.append(grads)
        for mine, expected in zip(*results, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("span", [1.0, 1e3], ids=["exponential", "logarithmic"])
def test_gradcheck(span: float) -> None:
    emissions, y, a, mask = problem(2, 3, 3)
    a[0, 1] = -span
    inputs = (emissions.requires_grad_(), a.requires_grad_())
    torch.autograd.gradcheck(lambda e, t: log_partition(e, t, mask), inputs)
    torch.autograd.gradcheck(lambda e, t: linear_chain_nll(e, y, t, mask=mask), inputs)
    torch.autograd.gradcheck(lambda e, t: path_score(e, y, t, mask), inputs)
    torch.autograd.gradcheck(lambda e, t: structured_hinge_loss(e, y, t, mask=mask), inputs)


def test_second_derivatives_are_refused_not_wrong() -> None:
    emissions, _, a, _ = problem(1, 2, 2)
    emissions.requires_grad_()
    value = log_partition(emissions, a).sum()
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(value, emissions, create_graph=True)


def test_marginals_are_the_shares_of_all_sequences() -> None:
    emissions, y, a, mask = problem(3, 4, 3)
    found = posterior_marginals(emissions, a, mask)
    assert not found.requires_grad
    assert not found[~mask].any()
    for b, (e, _) in enumerate(rows(emissions, y, mask)):
        shares = torch.stack([naive_score(e, z, a) for z in every(e)]).softmax(0)
        expected = torch.zeros_like(e)
        for z, p in zip(every(e), shares, strict=True):
            expected[range(len(z)), z] += p
        torch.testing.assert_close(found[b, : len(e)], expected)


# --- pytorch-crf ----------------------------------------------------------------------------------


def peer(a: Tensor) -> CRF:
    """pytorch-crf with these transitions and no start or end scores."""
    crf = CRF(len(a), batch_first=True).to(a.dtype)
    with torch.no_grad():
        crf.start_transitions.zero_()
        crf.end_transitions.zero_()
        crf.transitions.copy_(a)
    return crf


PEER_SIZES = [(5, 12, 7), (2, 40, 33), (3, 9, 130)]


@pytest.mark.parametrize(("batch", "length", "tags"), PEER_SIZES)
@pytest.mark.parametrize("forbid", [0.0, -1e4], ids=["plain", "forbidden"])
def test_nll_and_gradients_equal_pytorch_crf(
    batch: int, length: int, tags: int, forbid: float
) -> None:
    emissions, y, a, mask = problem(batch, length, tags)
    if forbid:
        a[::3, ::2] = forbid
        y = torch.ones_like(y)  # row 1 has no forbidden transition
    crf = peer(a)
    theirs_e = emissions.clone().requires_grad_()
    theirs = -crf(theirs_e, y, mask, reduction="none")
    theirs.sum().backward()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        e, t = (x.detach().to(dtype, copy=True).requires_grad_() for x in (emissions, a))
        ours = linear_chain_nll(e, y, t, mask=mask, reduction="none")
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
        ours.sum().backward()
        assert e.grad is not None
        assert t.grad is not None
        loose = {"rtol": 10 * tolerance, "atol": 10 * tolerance}
        torch.testing.assert_close(e.grad.double(), theirs_e.grad, **loose)
        torch.testing.assert_close(t.grad.double(), crf.transitions.grad, **loose)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "length", "tags"), PEER_SIZES)
def test_viterbi_equals_pytorch_crf(batch: int, length: int, tags: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        emissions, _, a, mask = problem(batch, length, tags, dtype, seed)
        best, scores = viterbi(emissions, a, mask)
        theirs = peer(a).decode(emissions, mask)
        assert [[k for k in row if k != chains.PADDING] for row in best.tolist()] == theirs
        torch.testing.assert_close(scores, path_score(emissions, best, a, mask))


# --- range, blocks, layouts -----------------------------------------------------------------------


def naive_recursion(e: Tensor, a: Tensor) -> Tensor:
    """log Z of one sequence by the textbook's recursion on logarithms, in float64."""
    alpha, a = e[0].double(), a.double()
    for row in e[1:].double():
        alpha = row + (alpha[:, None] + a).logsumexp(0)
    return alpha.logsumexp(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("span", [0.0, 1.0, 20.0, 35.0, 90.0, 300.0, 800.0, 1e4])
@pytest.mark.parametrize("height", [1.0, 100.0, 1e4])
def test_partition_survives_any_range(dtype: torch.dtype, span: float, height: float) -> None:
    """Emissions and transitions at odds, so that what one prefers, the other all but forbids."""
    rng = torch.Generator().manual_seed(3)
    emissions = height * torch.rand(2, 8, 6, generator=rng, dtype=dtype)
    a = span * (torch.rand(6, 6, generator=rng, dtype=dtype) - 1)
    emissions[0, ::2, 0] += 2 * height
    a[0, :] = -span  # every way out of the favourite is bad
    a[1, 1] = 0
    expected = torch.stack([naive_recursion(e, a) for e in emissions])
    torch.testing.assert_close(log_partition(emissions, a).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_weights_that_matter_later_are_kept(dtype: torch.dtype) -> None:
    """A tag of weight exp(-3R/4) that alone has a good way on; without it, log Z is off by R/4.

    Position 1 prefers tag 0 to tag 1 by 3R/4; position 2 admits tag 1 only, and getting there from
    any other tag costs the whole range R.
    """
    for size in (25.0, 60.0, 150.0, 250.0):
        e = torch.tensor([[0.0, -1.5 * size, -size], [-4 * size, 0.0, -4 * size]], dtype=dtype)
        a = torch.tensor([[0.0, -2 * size, 0.0], [0, 0, 0], [0, -2 * size, 0]], dtype=dtype)
        leaf = e[None].clone().requires_grad_()
        value = log_partition(leaf, a)
        torch.testing.assert_close(value[0].double(), naive_recursion(e, a), rtol=1e-6, atol=0.0)
        value.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad[0, 0, 1].item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(half: torch.dtype) -> None:
    """Weights near exp(-16), which are 0 in half precision: log Z came out as -inf."""
    a = torch.zeros(3, 3)
    a[0, 0] = 20.0
    emissions = torch.zeros(1, 4, 3)
    emissions[..., 0] = -16.0
    y = torch.ones(1, 4, dtype=torch.long)

    def run() -> list[Tensor]:
        e, t = emissions.clone().requires_grad_(), a.clone().requires_grad_()
        nll, log_z = linear_chain_nll(e, y, t), log_partition(e, t).sum()
        grads = torch.autograd.grad(nll, [e, t]) + torch.autograd.grad(log_z, [e, t])
        best = viterbi(e, t)[1]
        return [nll.detach(), log_z.detach(), posterior_marginals(e, t), best, *grads]

    plain = run()
    # h(y) = 0 for the true tags, so the loss is log Z.
    assert plain[0].item() == pytest.approx(naive_partition(emissions, y, a, None).item(), abs=1e-6)
    with torch.autocast("cpu", dtype=half):
        for found, expected in zip(run(), plain, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("peak", [50.0, 20.0])
def test_long_sums_are_not_rounded(peak: float) -> None:
    """5,000 times the one tag that pays: next to nothing is left of log Z - h(y).

    The links were summed in float32, which made the loss -0.05 or so, below its minimum of 0.
    """
    length = 5000
    rng = torch.Generator().manual_seed(0)
    a = torch.rand(5, 5, generator=rng) + peak * torch.eye(5)
    emissions = torch.zeros(1, length, 5)
    y = a.diagonal().argmax().expand(1, length)
    score = (length - 1) * a.diagonal().max().double()
    found = linear_chain_nll(emissions, y, a).double()
    torch.testing.assert_close(found, naive_recursion(emissions[0], a) - score, rtol=0, atol=1e-4)
    assert path_score(emissions, y, a)[0].item() == score.float().item()


def test_wide_range_is_not_rounded_before_float64() -> None:
    """``A - max A`` in float32 is off by 1e-6, 5,000 times over: 0.5 % of this loss."""
    rng = torch.Generator().manual_seed(1)
    a = 40 * torch.rand(5, 5, generator=rng) + 0.1
    emissions = torch.randn(2, 5000, 5, generator=rng)
    y = viterbi(emissions, a)[0]
    found = linear_chain_nll(emissions, y, a, reduction="none").double()
    expected = torch.stack([naive_recursion(e, a) for e in emissions])
    expected = expected - path_score(emissions.double(), y, a.double())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_hinge_sums_long_sequences_in_float64() -> None:
    """All ones beat the true zeros by 1.1 a transition, a number that float32 sums would round."""
    length = 20_001
    a = torch.tensor([[0.0, 0.0], [0.0, 1.1]])
    y = torch.zeros(1, length, dtype=torch.long)
    weight = torch.zeros(2)  # no cost: the transitions alone, so that their sum is what is tested
    found = structured_hinge_loss(torch.zeros(1, length, 2), y, a, tag_weight=weight)
    assert found.item() == torch.tensor((length - 1) * a[1, 1].double().item()).item()


def test_range_chooses_the_recursion() -> None:
    scores = torch.zeros(32, 4, 100)

    def chosen(span: float, dtype: torch.dtype) -> tuple[str, torch.dtype]:
        table = torch.zeros(100, 100, dtype=dtype)
        table[3, 4] = -span
        recursion = chains._recursion(table, scores.to(dtype))
        return type(recursion).__name__, recursion.dtype

    assert chosen(25, torch.float32) == ("_Exponential", torch.float32)
    assert chosen(40, torch.float32) == ("_Exponential", torch.float64)
    assert chosen(40, torch.float64) == ("_Exponential", torch.float64)
    for span in (400, 1e4, INF):
        assert chosen(span, torch.float32) == ("_Logarithmic", torch.float64)


def test_recursions_agree_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions, y, a, mask = problem(4, 6, 5)

    def run() -> list[Tensor]:
        e, t = emissions.clone().requires_grad_(), a.clone().requires_grad_()
        value = linear_chain_nll(e, y, t, mask=mask)
        return [value.detach(), *torch.autograd.grad(value, [e, t])]

    fast = run()
    monkeypatch.setattr(chains, "_recursion", lambda *_: chains._Logarithmic(torch.float64))
    for mine, expected in zip(run(), fast, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 7, 13, 40, 169, 200, 500, 10**6])
def test_blocks_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions, y, a, mask = problem(5, 6, 13, torch.float32)
    a[0, 0] = -1e4  # the partition function runs in blocks on logarithms only

    def run() -> list[Tensor]:
        e, t = emissions.clone().requires_grad_(), a.clone().requires_grad_()
        best, scores = viterbi(e, t, mask)
        hinge = structured_hinge_loss(e, y, t, mask=mask)
        value = log_partition(e, t, mask)
        return [best, scores, hinge, value, *torch.autograd.grad(value.sum() + hinge, [e, t])]

    plain = (emissions[:, 0, None] + a).amax(-1)
    assert torch.equal(chains._reduce_rows(a, emissions[:, 0], torch.amax, block), plain)
    whole = run()
    monkeypatch.setattr(chains, "CPU_BLOCK", block)
    for found, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_memory_stays_below_the_sums_of_one_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of [B, K, K] numbers, whatever the block: the largest is what was asked for."""
    batch, tags = 3, 60
    emissions, y, a, _ = problem(batch, 5, tags, torch.float32)
    monkeypatch.setattr(chains, "CPU_BLOCK", 1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_contiguous():
                largest = max(largest, out.numel())
            return out

    with Watch():
        viterbi(emissions, a)
        structured_hinge_loss(emissions, y, a)
    assert largest <= max(1000, emissions.numel(), a.numel())


def test_layout_does_not_matter() -> None:
    emissions, y, a, mask = problem(3, 4, 5)
    strange = emissions.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    turned = a.T.contiguous().T
    shared = emissions[:1].expand(3, -1, -1)
    assert not strange.is_contiguous()
    for e, other in ((emissions, strange), (shared.contiguous(), shared)):
        for function in (log_partition, lambda *x: viterbi(*x)[0], lambda *x: viterbi(*x)[1]):
            torch.testing.assert_close(function(other, turned, mask), function(e, a, mask))
        for loss in (linear_chain_nll, structured_hinge_loss):
            found = loss(other, y.T.contiguous().T, turned, mask=mask)
            torch.testing.assert_close(found, loss(e, y, a, mask=mask))
            torch.testing.assert_close(loss(e, y.int(), a, mask=mask), found)


def test_inputs_are_not_overwritten() -> None:
    inputs = problem(3, 4, 5)
    copies = [x.clone() for x in inputs]
    e, y, a, mask = inputs
    leaf, table = e.clone().requires_grad_(), a.clone().requires_grad_()
    viterbi(e, a, mask)
    value = linear_chain_nll(leaf, y, table, mask=mask)
    value = value + structured_hinge_loss(leaf, y, table, mask=mask)
    first = torch.autograd.grad(value, [leaf, table], retain_graph=True)
    second = torch.autograd.grad(value, [leaf, table])  # saved tensors were not spoilt either
    for x, z in zip([*inputs, *first], [*copies, *second], strict=True):
        assert torch.equal(x, z)
    assert torch.equal(leaf, copies[0])


@pytest.mark.parametrize("span", [1.0, 1e3], ids=["exponential", "logarithmic"])
@pytest.mark.parametrize("spoilt", ["tags", "mask"])
def test_overwriting_before_backward_is_noticed(spoilt: str, span: float) -> None:
    emissions, y, a, mask = problem(2, 4, 5)
    a[0, 1] = -span
    leaf = emissions.requires_grad_()
    losses = [linear_chain_nll(leaf, y, a, mask=None if spoilt == "tags" else mask)]
    if spoilt == "mask":
        losses += [log_partition(leaf, a, mask).sum(), path_score(leaf, y, a, mask).sum()]
        losses.append(structured_hinge_loss(leaf, y, a, mask=mask))
    else:
        losses.append(path_score(leaf, y, a).sum())
    if spoilt == "tags":
        y.fill_(1)
    else:
        mask.fill_(True)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hinge_keeps_its_own_tags_for_backward() -> None:
    """The sequences are compared in forward: what becomes of the tags then is no matter."""
    emissions, y, a, _ = problem(2, 4, 5)
    grads = []
    for spoil in (False, True):
        leaf, tags, table = emissions.clone().requires_grad_(), y.clone(), Table(a)
        loss = structured_hinge_loss(leaf, tags, table)
        if spoil:
            tags.copy_((y + 1) % 5)
        loss.backward()
        assert table.table.grad is not None
        grads.append((leaf.grad, table.table.grad.to_dense()))
    for found, expected in zip(*grads, strict=True):
        assert torch.equal(found, expected)


# --- modules of transitions -----------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_module_gets_a_sparse_gradient_of_the_pairs_that_differ(reduction: str) -> None:
    emissions, y, a, mask = problem(4, 5, 6)
    module, dense = Table(a, offset=2.5), (a + 2.5).requires_grad_()
    value = structured_hinge_loss(emissions, y, module, mask=mask, reduction=reduction)
    expected = structured_hinge_loss(emissions, y, dense, mask=mask, reduction=reduction)
    torch.testing.assert_close(value, expected)
    value.sum().backward()
    expected.sum().backward()
    gradient = module.table.grad
    assert gradient is not None
    assert dense.grad is not None
    assert gradient.layout == torch.sparse_coo
    assert gradient.sparse_dim() == 2
    torch.testing.assert_close(gradient.to_dense(), dense.grad)
    assert gradient._nnz() <= 2 * int(mask[:, 1:].sum())
    unit = 1 / 4 if reduction == "mean" else 1
    assert set(gradient._values().abs().tolist()) == {unit}
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    torch.testing.assert_close(module.table.detach(), a - 0.1 * dense.grad)


def test_offset_counts_once_a_transition() -> None:
    emissions, y, a, mask = problem(4, 5, 6)
    module, dense = Table(a, offset=-1.25), a - 1.25
    for m in masks(mask):
        for function in (log_partition, lambda *x: viterbi(*x)[0], lambda *x: viterbi(*x)[1]):
            torch.testing.assert_close(
                function(emissions, module, m), function(emissions, dense, m)
            )
        torch.testing.assert_close(
            path_score(emissions, y, module, m), path_score(emissions, y, dense, m)
        )
        loss = linear_chain_nll(emissions, y, module, mask=m)
        torch.testing.assert_close(loss, linear_chain_nll(emissions, y, dense, mask=m))


def test_transitions_can_be_computed_by_the_caller() -> None:
    """A tensor that is not a leaf, as from ``module.dense()`` or a low-rank product."""
    emissions, y, a, _ = problem(2, 4, 3)
    factor = a.clone().requires_grad_()
    loss = structured_hinge_loss(emissions, y, factor @ a)
    loss = loss + linear_chain_nll(emissions, y, factor @ a)
    loss.backward()
    assert factor.grad is not None
    assert factor.grad.abs().sum() > 0


# --- special values -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["emissions", "transitions"])
@pytest.mark.parametrize("position", range(4))
def test_nan_is_propagated(where: str, position: int) -> None:
    emissions, y, a, _ = problem(2, 4, 3)
    if where == "emissions":
        emissions[0, position, 1] = NAN
    else:
        a[1, position % 3] = NAN
    touched = [True, where == "transitions"]
    for value in (
        viterbi(emissions, a)[1],
        log_partition(emissions, a),
        linear_chain_nll(emissions, y, a, reduction="none"),
        structured_hinge_loss(emissions, y, a, reduction="none"),
    ):
        assert value.isnan().tolist() == touched
    best = viterbi(emissions, a)[0]
    assert ((best >= 0) & (best < 3)).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30])
def test_padding_never_counts(value: float) -> None:
    emissions, y, a, mask = problem(4, 5, 3)
    spoilt = emissions.masked_fill(~mask[..., None], value)
    wild = y.masked_fill(~mask, 10**9)
    for function in (log_partition, lambda *x: viterbi(*x)[0], lambda *x: viterbi(*x)[1]):
        assert torch.equal(function(spoilt, a, mask), function(emissions, a, mask))
    for loss in (linear_chain_nll, structured_hinge_loss):
        grads = []
        for e, tags in ((spoilt, wild), (emissions, y)):
            leaf, table = e.clone().requires_grad_(), a.clone().requires_grad_()
            grads.append(torch.autograd.grad(loss(leaf, tags, table, mask=mask), [leaf, table]))
        for found, expected in zip(*grads, strict=True):
            assert torch.equal(found, expected)
        assert not grads[0][0][~mask].any()
    assert torch.equal(path_score(spoilt, wild, a, mask), path_score(emissions, y, a, mask))


def test_forbidden_tags_and_transitions() -> None:
    """-inf removes sequences from the sum and from the maximum."""
    emissions, y, a, _ = problem(3, 4, 3)
    emissions[:, 2, 0] = -INF
    plain = a.clone()
    a[1, 1] = -INF
    for table in (plain, a):
        best, scores = viterbi(emissions, table)
        torch.testing.assert_close(
            log_partition(emissions, table), naive_partition(emissions, y, table, None)
        )
        for e, found, score in zip(emissions, best.tolist(), scores, strict=True):
            values = [naive_score(e, z, table) for z in every(e)]
            assert tuple(found) == every(e)[int(torch.stack(values).argmax())]
            torch.testing.assert_close(score, max(values))
        leaf, t = emissions.clone().requires_grad_(), table.clone().requires_grad_()
        log_partition(leaf, t).sum().backward()
        assert leaf.grad is not None
        assert t.grad is not None
        torch.testing.assert_close(leaf.grad.sum(-1), torch.ones(3, 4, dtype=torch.float64))
        assert not leaf.grad[:, 2, 0].any()
        assert t.grad.sum().item() == pytest.approx(9.0)  # 3 sequences of 3 transitions


def test_no_possible_sequence_is_minus_infinity() -> None:
    emissions, _, a, _ = problem(2, 3, 2)
    nothing = torch.full_like(a, -INF)
    assert log_partition(emissions, nothing).tolist() == [-INF, -INF]
    emissions[0, 1] = -INF
    assert log_partition(emissions, a)[0] == -INF
    assert log_partition(emissions, a)[1].isfinite()
    assert viterbi(emissions, a)[1][0] == -INF


def test_infinite_scores_are_not_made_finite() -> None:
    emissions, y, a, _ = problem(2, 3, 2)
    emissions[0, 1, 0] = INF
    y[0, 1] = 1
    assert not log_partition(emissions, a)[0].isfinite()
    assert not structured_hinge_loss(emissions, y, a, reduction="none")[0].isfinite()
    assert viterbi(emissions, a)[1][0] == INF


@pytest.mark.parametrize("case", ["shared link", "shared tag", "rival", "forbidden", "hopeless"])
def test_hinge_is_nan_where_a_score_is_not_finite(case: str) -> None:
    """An infinity that the true and the best sequence share cancelled to a loss of 0.0."""
    emissions, a = torch.zeros(2, 2, 3), torch.zeros(3, 3)
    y = torch.tensor([[1, 0], [2, 2]])
    if case == "shared link":
        a[1, 0] = INF
    elif case == "shared tag":
        emissions[0, 0, 1] = INF
    elif case == "rival":
        emissions[0, 0, 2] = INF
    elif case == "forbidden":
        emissions[0, 1, 0] = -INF
    else:
        emissions[0] = -INF
    leaf = emissions.requires_grad_()
    losses = structured_hinge_loss(leaf, y, a, reduction="none")
    # A transition belongs to both sequences' problems, an emission to the first one's only.
    assert losses.isnan().tolist() == [True, case == "shared link"]
    losses.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[0].isnan().any()
    if case != "shared link":
        assert losses[1].item() == 2.0  # no score tells tags apart: both of them cost 1
        assert leaf.grad[1].isfinite().all()


def test_hinge_of_forbidden_rivals_is_finite() -> None:
    """-inf on sequences that are neither true nor best leaves the loss and its gradient alone."""
    emissions, y, a, mask = problem(3, 4, 3)
    y[:] = torch.tensor([2, 0, 1, 1])
    emissions[:, 1, 2] = -INF
    a[0, 0] = -INF
    for m in masks(mask):
        leaf = emissions.clone().requires_grad_()
        found = structured_hinge_loss(leaf, y, a, mask=m, reduction="none")
        assert found.isfinite().all()
        torch.testing.assert_close(found, naive_hinge(emissions, y, a, m))
        found.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("loss", [linear_chain_nll, structured_hinge_loss])
def test_reductions_and_the_empty_batch(loss) -> None:  # type: ignore[no-untyped-def]
    emissions, y, a, _ = problem(3, 4, 5)
    rowwise = loss(emissions, y, a, reduction="none")
    assert rowwise.shape == (3,)
    torch.testing.assert_close(loss(emissions, y, a, reduction="sum"), rowwise.sum())
    torch.testing.assert_close(loss(emissions, y, a), rowwise.mean())
    none = emissions[:0].clone().requires_grad_()
    table = a.clone().requires_grad_()
    total = loss(none, y[:0], table, reduction="sum")
    total.backward()
    assert total.item() == 0.0
    assert table.grad is not None
    assert not table.grad.any()
    assert loss(none, y[:0], a).isnan()
    best, scores = viterbi(none, a)
    assert best.shape == (0, 4)
    assert scores.shape == (0,)


def test_one_tag_is_certain() -> None:
    emissions, y, a, mask = problem(3, 4, 1)
    assert linear_chain_nll(emissions, y, a, mask=mask).item() == pytest.approx(0.0, abs=1e-12)
    assert structured_hinge_loss(emissions, y, a, mask=mask).item() == 0.0


# --- bad input ------------------------------------------------------------------------------------


SPARSE = nn.Module()
SPARSE.table = torch.eye(4, dtype=torch.float64).to_sparse()


def bad(**changes: object) -> dict:
    emissions, y, a, mask = problem(2, 3, 4)
    return {"emissions": emissions, "tags": y, "transitions": a, "mask": mask, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"emissions": torch.zeros(2, 3, 4, dtype=torch.long)}, TypeError, "emissions must be flo"),
        ({"emissions": torch.zeros(2, 3, 4, dtype=torch.float16)}, TypeError, "convert them"),
        ({"emissions": torch.zeros(3, 4, dtype=torch.float64)}, ValueError, r"\[B, T, K\]"),
        ({"emissions": torch.zeros(2, 0, 4, dtype=torch.float64)}, ValueError, "one position"),
        ({"emissions": torch.zeros(2, 3, 0, dtype=torch.float64)}, ValueError, "one tag"),
        ({"transitions": torch.zeros(4, 4)}, TypeError, "transitions are torch.float32"),
        ({"transitions": torch.zeros(4, 5, dtype=torch.float64)}, ValueError, r"\[K, K\] = \(4, 4"),
        ({"transitions": nn.Linear(4, 4)}, TypeError, "parameter `table`"),
        ({"transitions": [[0.0] * 4] * 4}, TypeError, r"list: pass torch\.as_tensor\(transitions"),
        ({"transitions": np.zeros((4, 4))}, TypeError, r"ndarray: pass torch\.as_tensor\(transit"),
        ({"transitions": torch.eye(4).double().to_sparse()}, TypeError, r"transitions\.to_dense"),
        ({"transitions": SPARSE}, TypeError, r"transitions\.table must be dense"),
        ({"emissions": np.zeros((2, 3, 4))}, TypeError, r"torch\.as_tensor\(emissions\)"),
        ({"emissions": torch.zeros(2, 3, 4).to_sparse()}, TypeError, r"emissions\.to_dense\(\)"),
        ({"mask": np.ones((2, 3), dtype=bool)}, TypeError, r"torch\.as_tensor\(mask\)"),
        ({"mask": [[True] * 3] * 2}, TypeError, r"mask must be a tensor, got list"),
        ({"mask": torch.ones(2, 3).bool().to_sparse()}, TypeError, r"mask\.to_dense\(\)"),
        ({"tags": np.zeros((2, 3), dtype=int)}, TypeError, r"torch\.as_tensor\(tags\)"),
        ({"tags": [[0] * 3] * 2}, TypeError, r"tags must be a tensor, got list"),
        ({"tags": torch.zeros(2, 3).long().to_sparse()}, TypeError, r"tags\.to_dense\(\)"),
        ({"transitions": torch.zeros(4, 4, device="meta").double()}, ValueError, "move one"),
        ({"mask": torch.ones(2, 3)}, TypeError, r"mask\.bool\(\)"),
        ({"mask": torch.ones(3, 2, dtype=torch.bool)}, ValueError, r"mask must be \[B, T\]"),
        ({"mask": torch.tensor([[True, False, True]] * 2)}, ValueError, "prefix"),
        ({"mask": torch.tensor([[True] * 3, [False] * 3])}, ValueError, "drop empty rows"),
        ({"tags": torch.zeros(2, 3)}, TypeError, r"tags\.long\(\)"),
        ({"tags": torch.zeros(2, 3, dtype=torch.bool)}, TypeError, "tags must be integers"),
        ({"tags": torch.zeros(3, 2, dtype=torch.long)}, ValueError, r"tags must be \[B, T\]"),
        ({"tags": torch.full((2, 3), 4)}, IndexError, "tags hold 4, out of range for 4"),
        ({"tags": torch.full((2, 3), -100)}, IndexError, "tags hold -100"),
    ],
)
def test_bad_input_is_named(changes: dict, error: type[Exception], match: str) -> None:
    arguments = bad(**changes)
    e, y, a, mask = (arguments[k] for k in ("emissions", "tags", "transitions", "mask"))
    calls = [
        lambda: path_score(e, y, a, mask),
        lambda: linear_chain_nll(e, y, a, mask=mask),
        lambda: structured_hinge_loss(e, y, a, mask=mask),
    ]
    if "tags" not in changes:
        calls += [
            lambda: viterbi(e, a, mask),
            lambda: log_partition(e, a, mask),
            lambda: posterior_marginals(e, a, mask),
        ]
    for call in calls:
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize(
    ("weight", "error", "match"),
    [
        ([1.0] * 4, TypeError, r"torch\.as_tensor\(tag_weight\)"),
        (np.ones(4), TypeError, r"tag_weight must be a tensor, got ndarray"),
        (torch.ones(4).to_sparse(), TypeError, r"tag_weight\.to_dense\(\)"),
        (torch.ones(4, dtype=torch.long), TypeError, "tag_weight must be floating"),
        (torch.ones(3), ValueError, r"tag_weight must be \[K\]"),
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), ValueError, "not negative"),
        (torch.tensor([1.0, NAN, 1.0, 1.0]), ValueError, "finite"),
        (torch.ones(4, requires_grad=True), ValueError, "detach"),
        (torch.ones(4, device="meta"), ValueError, "move one"),
    ],
)
def test_bad_weights_are_named(weight: Tensor, error: type[Exception], match: str) -> None:
    emissions, y, a, _ = problem(2, 3, 4)
    with pytest.raises(error, match=match):
        structured_hinge_loss(emissions, y, a, tag_weight=weight)


@pytest.mark.parametrize("loss", [linear_chain_nll, structured_hinge_loss])
def test_unknown_reduction(loss) -> None:  # type: ignore[no-untyped-def]
    emissions, y, a, _ = problem(2, 3, 4)
    with pytest.raises(ValueError, match="reduction must be one of"):
        loss(emissions, y, a, reduction="token_mean")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_equals_cpu(dtype: torch.dtype) -> None:
    emissions, y, a, mask = problem(3, 9, 70, dtype)
    results = []
    for device in ("cpu", "cuda"):
        e, t = emissions.to(device).requires_grad_(), a.to(device).requires_grad_()
        tags, m = y.to(device), mask.to(device)
        loss = linear_chain_nll(e, tags, t, mask=m) + structured_hinge_loss(e, tags, t, mask=m)
        grads = torch.autograd.grad(loss, [e, t])
        results.append([x.cpu() for x in (loss.detach(), *grads, *viterbi(e, t, m))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
