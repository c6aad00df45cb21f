"""The structured loss against naive enumeration in Python, closed forms, and the exact distribution
of its samples; ``Transitions`` against a dense twin."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from proofread.linear_core import LinearCore, linear_core_loss, structured
from proofread.linear_core import transitions as transitions_module
from proofread.linear_core.structured import (
    StructuredLinearCoreLoss,
    Transitions,
    enumerate_sequences,
    gradient_variance,
    structured_linear_core_loss,
)

TAILS = ("exponential", "gamma", "logistic")
PROPOSALS = {"uniform": {"proposal": "uniform"}, "near": {}, "keep 0.6": {"keep": 0.6}}
EXACT = {"method": "exact"}
SUM = {"form": "sum"}
POSITIONS = {"over": "positions"}
SUM_POSITIONS = SUM | POSITIONS | {"method": "sampled"}
CONSTRAINED = {"sequences, exact": EXACT, "sequences": {}, "positions": POSITIONS}
SUMS = {
    "sum, sequences, exact": SUM | EXACT,
    "sum, sequences": SUM,
    "sum, positions": SUM | POSITIONS,
    "sum, positions, sampled": SUM_POSITIONS,
}
LOSSES = CONSTRAINED | SUMS
every_loss = pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES.keys())


def exactly(options: dict) -> dict:
    """The exact loss that a sampled one estimates."""
    return {name: options[name] for name in ("over", "form") if name in options} | EXACT


def problem(
    b: int, t: int, k: int, seed: int = 0, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """emissions [B, T, K], tags [B, T], transitions [K, K] in float64."""
    g = torch.Generator().manual_seed(seed)
    emissions = size * torch.randn(b, t, k, generator=g, dtype=torch.float64)
    table = size * torch.randn(k, k, generator=g, dtype=torch.float64)
    return emissions, torch.randint(k, (b, t), generator=g), table


def prefix_mask(lengths: list[int], size: int) -> Tensor:
    return torch.arange(size) < torch.tensor(lengths)[:, None]


def naive(emissions, tags, table, weight, phi: LinearCore) -> float:
    """Σ_{y'} L(y', y)·Φ(-(h(y') - h̄)) for one sequence, with a mean over all sequences."""
    length, k = len(emissions), len(table)

    def score(sequence):
        pairs = itertools.pairwise(sequence)
        unary = sum(float(emissions[t][a]) for t, a in enumerate(sequence))
        return unary + sum(float(table[a][b]) for a, b in pairs)

    sequences = list(itertools.product(range(k), repeat=length))
    mean = sum(map(score, sequences)) / len(sequences)
    total = 0.0
    for sequence in sequences:
        wrong = [t for t in range(length) if sequence[t] != int(tags[t])]
        total += sum(float(weight[int(tags[t])]) for t in wrong) * phi(mean - score(sequence))
    return total


def gradients(loss, emissions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``loss(emissions, table)``."""
    leaves = [emissions.detach().requires_grad_(), table.detach().requires_grad_()]
    first, second = torch.autograd.grad(loss(*leaves), leaves)
    return first, second


# --- the exact forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("average", [True, False])
def test_exact_sum_over_sequences_equals_naive_enumeration(average, tail):
    emissions, tags, table = problem(3, 4, 3)
    lengths, weight = [4, 1, 3], torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
    phi = LinearCore(0.7, 0.4, tail)
    found = structured_linear_core_loss(
        emissions, tags, table, mask=prefix_mask(lengths, 4), tag_weight=weight, method="exact",
        average=average, reduction="none", core=0.7, scale=0.4, tail=tail,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        expected = naive(emissions[b, :n], tags[b, :n], table, weight, phi)
        assert float(found[b]) == pytest.approx(expected / (3**n if average else 1), rel=1e-12)


def test_one_position_is_the_multiclass_constrained_loss():
    emissions, tags, table = problem(5, 1, 4)
    expected = linear_core_loss(emissions[:, 0], tags[:, 0], reduction="none")
    for over in ("sequences", "positions"):
        options = {"over": over, "method": "exact", "reduction": "none"}
        found = structured_linear_core_loss(emissions, tags, table, average=False, **options)
        assert torch.allclose(found, expected, rtol=1e-13)
        found = structured_linear_core_loss(emissions, tags, table, **options)
        assert torch.allclose(found, expected / 4, rtol=1e-13)


def test_equal_scores_give_the_mean_target_loss_times_the_surrogate_at_zero():
    emissions, tags = torch.full((2, 3, 5), 7.0, dtype=torch.float64), torch.zeros(2, 3).long()
    table = torch.full((5, 5), -3.0, dtype=torch.float64)
    found = structured_linear_core_loss(emissions, tags, table, method="exact")
    assert float(found) == pytest.approx(3 * (1 - 1 / 5) * 2.0, rel=1e-13)  # E[L]·Φ(0)


def test_exact_gradients_check():
    emissions, tags, table = problem(2, 3, 3, seed=4)
    emissions, table = emissions.requires_grad_(), table.requires_grad_()
    mask = prefix_mask([3, 2], 3)
    sums = (SUM | EXACT, SUM | POSITIONS)
    for options in (EXACT, POSITIONS, POSITIONS | {"average": False}, *sums):

        def loss(e, a, options=options):
            return structured_linear_core_loss(e, tags, a, mask=mask, tail="gamma", **options)

        assert torch.autograd.gradcheck(loss, (emissions, table))
        assert torch.autograd.gradgradcheck(loss, (emissions, table))


def test_loss_over_positions_equals_the_naive_sum():
    emissions, tags, table = problem(2, 4, 3, seed=2)
    weight, phi = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64), LinearCore(0.5, 2.0)
    lengths = [4, 2]
    found = structured_linear_core_loss(
        emissions, tags, table, mask=prefix_mask(lengths, 4), tag_weight=weight, core=0.5,
        scale=2.0, over="positions", average=False, reduction="none",
    )  # fmt: skip
    for b, n in enumerate(lengths):
        total = 0.0
        for t in range(n):
            gold = int(tags[b, t])
            row = table[tags[b, t - 1]] if t else torch.zeros(3, dtype=torch.float64)
            scores = [float(emissions[b, t, a] + row[a]) for a in range(3)]
            mean = sum(scores) / 3
            total += sum(weight[gold] * phi(mean - scores[a]) for a in range(3) if a != gold)
        assert float(found[b]) == pytest.approx(float(total), rel=1e-12)


def test_in_the_core_the_gradient_is_known_and_holds_no_pair_interaction():
    emissions, tags, table = problem(1, 4, 3, seed=1, size=0.1)
    weight = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)

    def loss(e, a):
        return structured_linear_core_loss(e, tags, a, core=10.0, tag_weight=weight, **EXACT)

    by_emission, by_table = gradients(loss, emissions, table)
    gold = torch.nn.functional.one_hot(tags[0], 3).double()  # [T, K]
    w = weight[tags[0]][:, None]
    assert torch.allclose(by_emission[0], w / 3 * (1 / 3 - gold), atol=1e-15)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for t in range(1, 4):
        expected -= (w[t - 1] * gold[t - 1])[:, None] + (w[t] * gold[t])[None, :]
        expected += (w[t - 1] + w[t]) / 3
    assert torch.allclose(by_table, expected / 9, atol=1e-15)
    rows, columns = by_table.mean(1, keepdim=True), by_table.mean(0, keepdim=True)
    assert float((by_table - rows - columns + by_table.mean()).abs().max()) < 1e-15


def test_beyond_the_core_and_over_positions_pair_interactions_are_learned():
    emissions, tags, table = problem(1, 4, 3, seed=1)
    for options in (EXACT, {"over": "positions"}):

        def loss(e, a, options=options):
            return structured_linear_core_loss(e, tags, a, core=0.1, **options)

        _, by_table = gradients(loss, emissions, table)
        rows, columns = by_table.mean(1, keepdim=True), by_table.mean(0, keepdim=True)
        assert float((by_table - rows - columns + by_table.mean()).abs().max()) > 1e-3


@every_loss
def test_constants_in_the_scores_change_nothing(options):
    emissions, tags, table = problem(2, 4, 3)

    def loss(e, a):
        generator = torch.Generator().manual_seed(0)
        return structured_linear_core_loss(e, tags, a, generator=generator, **options)

    for e, a in ((emissions, table + 5), (emissions - 3, table)):
        assert float(loss(e, a)) == pytest.approx(float(loss(emissions, table)), rel=1e-12)
        for found, expected in zip(
            gradients(loss, e, a), gradients(loss, emissions, table), strict=True
        ):
            assert torch.allclose(found, expected, atol=1e-13)


def naive_sum(emissions, tags, table, weight, phi: LinearCore) -> tuple[float, float]:
    """The sums over sequences and over positions for one sequence, margin by margin."""
    length, k, gold = len(emissions), len(table), [int(y) for y in tags]

    def score(sequence):
        value = sum(float(emissions[t][a]) for t, a in enumerate(sequence))
        return value + sum(float(table[a][b]) for a, b in itertools.pairwise(sequence))

    over_sequences = over_positions = 0.0
    for other in itertools.product(range(k), repeat=length):
        target_loss = sum(float(weight[y]) for y, a in zip(gold, other, strict=True) if y != a)
        over_sequences += target_loss * phi(score(gold) - score(other))
    for t, y in enumerate(gold):
        for b in set(range(k)) - {y}:
            margin = float(emissions[t][y]) - float(emissions[t][b])
            if t:
                margin += float(table[gold[t - 1]][y]) - float(table[gold[t - 1]][b])
            over_positions += float(weight[y]) * phi(margin)
    return over_sequences, over_positions


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("average", [True, False])
def test_the_sum_form_equals_naive_enumeration(average, tail):
    emissions, tags, table = problem(3, 4, 3)
    lengths, weight = [4, 1, 3], torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
    phi = LinearCore(0.7, 0.4, tail)
    options = {"core": 0.7, "scale": 0.4, "tail": tail, "average": average, **SUM}
    options |= {"mask": prefix_mask(lengths, 4), "tag_weight": weight, "reduction": "none"}
    found = [
        structured_linear_core_loss(emissions, tags, table, over=over, method="exact", **options)
        for over in ("sequences", "positions")
    ]
    for b, n in enumerate(lengths):
        expected = naive_sum(emissions[b, :n], tags[b, :n], table, weight, phi)
        for rows, value, count in zip(found, expected, (3**n, 3), strict=True):
            assert float(rows[b]) == pytest.approx(value / (count if average else 1), rel=1e-12)


@pytest.mark.parametrize("over", ["sequences", "positions"])
def test_with_two_outputs_the_forms_differ_by_the_scale_of_the_scores(over):
    """Two scores are centred to plus and minus half their margin: constrained of 2h is sum of h.

    And, as ``c·Φ_{τ,s}(u) = Φ_{cτ,cs}(c·u)``, twice the constrained loss is a sum with 2τ and 2s.
    """
    emissions, tags, table = problem(5, 1, 2)

    def loss(e, form, core=0.6, scale=0.5):
        return structured_linear_core_loss(
            e, tags, table, over=over, form=form, core=core, scale=scale, reduction="none", **EXACT
        )

    assert torch.allclose(loss(emissions, "sum"), loss(2 * emissions, "constrained"), rtol=1e-13)
    twice = 2 * loss(emissions, "constrained")
    assert torch.allclose(twice, loss(emissions, "sum", core=1.2, scale=1.0), rtol=1e-13)
    assert not torch.allclose(loss(emissions, "sum"), loss(emissions, "constrained"), rtol=0.1)


def test_one_position_is_the_multiclass_sum_over_margins():
    emissions, tags, table = problem(5, 1, 4)
    expected = linear_core_loss(emissions[:, 0], tags[:, 0], form="sum", reduction="none")
    for options in (SUM | EXACT, SUM | POSITIONS):
        found = structured_linear_core_loss(
            emissions, tags, table, average=False, reduction="none", **options
        )
        assert torch.allclose(found, expected, rtol=1e-13)


@pytest.mark.parametrize("options", [SUM, SUM_POSITIONS], ids=str)
def test_every_alternative_once_makes_the_sampled_sum_exact(options):
    """Uniform samples that hold all sequences, or all tags: value and gradients are exact ones."""
    emissions, tags, table = problem(2, 3, 3)
    mask, weight = prefix_mask([3, 1], 3), torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
    if options == SUM:
        samples = enumerate_sequences(3, 3).T.expand(2, -1, -1)
    else:
        samples = torch.arange(3).expand(2, 3, 3)
    module = StructuredLinearCoreLoss(**options | {"proposal": "uniform", "core": 0.6})
    upstream = torch.tensor([0.5, -2.0], dtype=torch.float64)

    def sampled(e, a):
        batch = structured._checked_batch(e, tags, a, mask, weight, e.dtype)
        return structured._sampled(e, a, batch, samples, module.options) @ upstream

    def exact(e, a):
        rows = structured_linear_core_loss(
            e, tags, a, mask=mask, tag_weight=weight, core=0.6, reduction="none", **exactly(options)
        )
        return rows @ upstream

    value = float(exact(emissions, table))
    assert float(sampled(emissions, table)) == pytest.approx(value, rel=1e-13)
    expected = gradients(exact, emissions, table)
    for found, e in zip(gradients(sampled, emissions, table), expected, strict=True):
        assert torch.allclose(found, e, atol=1e-14)
    chain, leaf = Transitions(3, table), emissions.clone().requires_grad_()
    sampled(leaf, chain).backward()
    assert torch.allclose(leaf.grad, expected[0], atol=1e-14)
    assert torch.allclose(chain.table.grad.to_dense(), expected[1], atol=1e-14)
    assert chain.offset.grad is None


def test_enumeration_is_complete():
    found = enumerate_sequences(3, 4).tolist()
    assert found == [list(s) for s in itertools.product(range(4), repeat=3)]
    assert enumerate_sequences(16, 2).shape == (65536, 16)


# --- the sampled gradient is unbiased -------------------------------------------------------------


def sampling_distribution(tags: Tensor, k: int, **options) -> tuple[Tensor, Tensor]:
    """All samples [N, T] for one sequence and their chances [N], position by position."""
    samples = torch.tensor(list(itertools.product(range(k), repeat=len(tags))))
    keep = options.get("keep", 1 / (len(tags) + 1))
    keep = 0.0 if options.get("proposal") == "uniform" else keep
    chance = (1 - keep) / k + keep * (samples == tags).double()
    return samples, chance.prod(1)


def estimates(emissions, tags, table, samples, mask=None, weight=None, **options):
    """Values and gradients [N], [N, T, K], [N, K, K] of the estimator for each given sample."""
    defaults = {"over": "sequences", "method": "sampled", "samples": 1, "keep": None}
    defaults |= {"proposal": "near", "average": True, "reduction": "none"}
    defaults |= {"form": "constrained", "baseline": 1.0}
    defaults |= {"surrogate": LinearCore(0.6, 0.5)}
    settings = structured._Options(**(defaults | options))
    n = len(samples)
    e = emissions.expand(n, -1, -1).clone().requires_grad_()
    mask = None if mask is None else mask.expand(n, -1)
    many = tags.expand(n, -1)
    leaf = table.clone().requires_grad_()
    batch = structured._checked_batch(e, many, leaf, mask, weight, e.dtype)
    values = structured._sampled(e, leaf, batch, samples[:, :, None], settings)
    (by_emission,) = torch.autograd.grad(values.sum(), e, retain_graph=True)
    by_table = [torch.autograd.grad(v, leaf, retain_graph=True)[0] for v in values]
    return values.detach(), by_emission, torch.stack(by_table)


@pytest.mark.parametrize("baseline", [0.0, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", PROPOSALS.values(), ids=PROPOSALS.keys())
def test_unbiased_by_enumeration_of_all_samples(options, weighted, baseline):
    """Σ_{y'} q(y')·estimate(y') is the exact gradient; also for a masked tail of the sequence."""
    emissions, tags, table = problem(1, 4, 3, seed=3)
    mask = prefix_mask([3], 4)
    tags[0, 3], emissions[0, 3] = -100, math.nan
    weight = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64) if weighted else None
    samples, chance = sampling_distribution(tags[0, :3], 3, **options)
    padded = torch.nn.functional.pad(samples, (0, 1))
    values, by_emission, by_table = estimates(
        emissions, tags, table, padded, mask, weight, baseline=baseline, **options
    )

    def exact(e, a):
        return structured_linear_core_loss(
            e, tags, a, mask=mask, tag_weight=weight, core=0.6, scale=0.5, **EXACT
        )

    assert float(chance.sum()) == pytest.approx(1, abs=1e-14)
    assert float(chance @ values) == pytest.approx(float(exact(emissions, table)), rel=1e-12)
    first, second = gradients(exact, emissions, table)
    found = torch.einsum("n,ntk->tk", chance, by_emission)
    assert float((found - first[0]).abs().max()) < 1e-13
    assert torch.equal(by_emission[:, 3], torch.zeros_like(by_emission[:, 3]))
    found = torch.einsum("n,nij->ij", chance, by_table)
    assert float((found - second).abs().max()) < 1e-13


UNBIASED_SUMS = {name: SUM | options for name, options in PROPOSALS.items()}
UNBIASED_SUMS["positions"] = SUM_POSITIONS | {"proposal": "uniform"}
UNBIASED_SUMS["positions, not averaged"] = UNBIASED_SUMS["positions"] | {"average": False}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", UNBIASED_SUMS.values(), ids=UNBIASED_SUMS.keys())
def test_the_sum_form_is_unbiased_by_enumeration_of_all_samples(options, weighted):
    """Σ q(y')·estimate(y') over all sequences, or over all choices of a tag at each position."""
    emissions, tags, table = problem(1, 4, 3, seed=3)
    mask = prefix_mask([3], 4)
    tags[0, 3], emissions[0, 3] = -100, math.nan
    weight = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64) if weighted else None
    samples, chance = sampling_distribution(tags[0, :3], 3, **options)
    padded = torch.nn.functional.pad(samples, (0, 1))
    values, by_emission, by_table = estimates(
        emissions, tags, table, padded, mask, weight, **options | {"baseline": 0.0}
    )

    def exact(e, a):
        return structured_linear_core_loss(
            e, tags, a, mask=mask, tag_weight=weight, core=0.6, scale=0.5,
            average=options.get("average", True), **exactly(options),
        )  # fmt: skip

    assert float(chance @ values) == pytest.approx(float(exact(emissions, table)), rel=1e-12)
    first, second = gradients(exact, emissions, table)
    found = torch.einsum("n,ntk->tk", chance, by_emission)
    assert float((found - first[0]).abs().max()) < 1e-13
    assert torch.equal(by_emission[:, 3], torch.zeros_like(by_emission[:, 3]))
    found = torch.einsum("n,nij->ij", chance, by_table)
    assert float((found - second).abs().max()) < 1e-13
    assert float(values.std()) > 0.1 * float(values.mean())  # single samples do differ


def test_a_sampled_mean_score_is_biased():
    """With the mean of two samples in place of h̄ the expectation differs: the exact mean is needed.

    All pairs of uniform samples are enumerated, for the same estimator with either centre.
    """
    emissions, tags, table = problem(1, 2, 2, seed=5, size=2.0)
    phi, samples = LinearCore(0.6, 0.5), enumerate_sequences(2, 2)
    scores = emissions[0, [0], samples[:, 0]] + emissions[0, [1], samples[:, 1]]
    scores = scores + table[samples[:, 0], samples[:, 1]]
    target_loss = (samples != tags).sum(1)

    def expected_value(centre):
        each = [
            (target_loss[i] * phi(centre(i, j) - scores[i])
             + target_loss[j] * phi(centre(i, j) - scores[j])) / 2
            for i, j in itertools.product(range(4), repeat=2)
        ]  # fmt: skip
        return float(sum(each)) / 16

    exact = structured_linear_core_loss(emissions, tags, table, core=0.6, scale=0.5, **EXACT)
    assert expected_value(lambda i, j: scores.mean()) == pytest.approx(float(exact), rel=1e-13)
    biased = expected_value(lambda i, j: (scores[i] + scores[j]) / 2)
    assert abs(biased - float(exact)) > 0.05 * float(exact)


LARGER = [{"proposal": "near"}, {"proposal": "uniform"}, SUM, SUM | {"proposal": "uniform"}]


@pytest.mark.parametrize("options", [*LARGER, SUM_POSITIONS], ids=str)
def test_sampled_gradient_on_a_larger_problem_by_z_test(options):
    """Means of the gradients within the Bonferroni limits of the exact ones (fixed seed)."""
    k, copies, runs = 12, 25, 60
    emissions, tags, table = problem(1, 4, k, seed=6)
    first, second = gradients(
        lambda e, a: structured_linear_core_loss(e, tags, a, **exactly(options)), emissions, table
    )
    generator = torch.Generator().manual_seed(0)

    def estimate():
        return gradients(
            lambda e, a: structured_linear_core_loss(
                e.expand(copies, -1, -1), tags.expand(copies, -1), a, samples=64,
                generator=generator, **options,
            ),
            emissions, table,
        )  # fmt: skip

    found = [torch.cat([e.flatten(), a.flatten()]) for e, a in (estimate() for _ in range(runs))]
    sample, exact = torch.stack(found), torch.cat([first.flatten(), second.flatten()])
    moving = sample.std(0) > 1e-14  # over positions, pairs that follow no gold tag never move
    assert torch.allclose(sample.mean(0)[~moving], exact[~moving], atol=1e-15)
    sample, exact = sample[:, moving], exact[moving]
    t = (sample.mean(0) - exact) / (sample.std(0) / runs**0.5)
    limit = stats.t.ppf(1 - 0.001 / 2 / exact.numel(), runs - 1)
    assert float(t.abs().max()) < limit
    # It can fail: a tenth of the gradient too much is seen.
    wrong = (sample.mean(0) - 1.1 * exact) / (sample.std(0) / runs**0.5)
    assert float((wrong**2).sum()) > stats.chi2.ppf(0.999, exact.numel())


def test_the_default_proposal_is_the_documented_one():
    """Frequencies of the drawn sequences against their chances, and the bound of the weights."""
    _, tags, _ = problem(1, 3, 3, seed=7)
    samples, chance = sampling_distribution(tags[0], 3)
    batch = structured._checked_batch(torch.zeros(1, 3, 3), tags, torch.zeros(3, 3), None, None,
                                      torch.float64)  # fmt: skip
    options = StructuredLinearCoreLoss(samples=20_000).options
    drawn = structured._propose(batch, options, torch.Generator().manual_seed(1))[0]  # [T, S]
    counts = torch.bincount(drawn[0] * 9 + drawn[1] * 3 + drawn[2], minlength=27)
    assert stats.chisquare(counts.numpy(), 20_000 * chance.numpy()).pvalue > 1e-3
    ratio = structured._ratio((samples != tags).sum(1)[None], batch, options)[0]
    assert torch.allclose(ratio * chance, torch.full_like(ratio, 1 / 27), rtol=1e-13)
    assert float(ratio.max()) == pytest.approx((4 / 3) ** 3)


def test_the_same_seed_gives_the_same_loss():
    emissions, tags, table = problem(3, 5, 7)
    losses = [
        structured_linear_core_loss(
            emissions, tags, table, generator=torch.Generator().manual_seed(seed)
        ).item()
        for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


# --- variance -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "baseline"), [("constrained", 0.0), ("constrained", 1.0), ("sum", 0.0)]
)
@pytest.mark.parametrize("options", PROPOSALS.values(), ids=PROPOSALS.keys())
def test_variance_equals_that_of_all_estimates(options, form, baseline):
    options = options | {"form": form, "baseline": baseline}
    emissions, tags, table = problem(2, 3, 3, seed=8)
    mask, weight = prefix_mask([3, 2], 3), torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
    found = gradient_variance(
        emissions, tags, table, mask=mask, core=0.6, scale=0.5, tag_weight=weight, **options
    )  # fmt: skip
    for b, n in enumerate((3, 2)):
        samples, chance = sampling_distribution(tags[b, :n], 3, **options)
        _, by_emission, by_table = estimates(
            emissions[b : b + 1, :n], tags[b : b + 1, :n], table, samples, None, weight,
            **options,
        )  # fmt: skip
        pairs = [(by_emission, found.emission_mean[b, :n], found.emission_variance[b])]
        pairs += [(by_table, found.transition_mean[b], found.transition_variance[b])]
        for each, mean, variance in pairs:
            expected = torch.einsum("n,nij->ij", chance, each)
            assert torch.allclose(mean, expected, atol=1e-14)
            spread = (each - expected).square().sum((1, 2)) @ chance
            assert float(variance) == pytest.approx(float(spread), rel=1e-11)
    assert float(found.emission_mean[1, 2].abs().max()) == 0


def relative_variance(t: int, k: int, **options) -> float:
    emissions, tags, table = problem(1, t, k, size=0.1)
    found = gradient_variance(emissions, tags, table, core=100.0, **options)
    return float(found.emission_variance / found.emission_mean.square().sum())


def test_in_the_core_variance_grows_with_the_tags_only_for_uniform_samples():
    for t, k in ((2, 6), (2, 50), (3, 12), (3, 30), (4, 6)):
        assert relative_variance(t, k, proposal="uniform") == pytest.approx(t * (k - 1) - 1)
        assert relative_variance(t, k) < 2 * t**2 * (1 + 1 / t) ** t - 1 < 2 * math.e * t**2
    assert relative_variance(2, 200) < relative_variance(2, 200, proposal="uniform") / 20
    assert relative_variance(2, 200) == pytest.approx(relative_variance(2, 100), rel=0.05)
    for proposal in ("near", "uniform"):  # no control variate: far worse
        plain = relative_variance(3, 12, proposal=proposal, baseline=0.0)
        assert plain > 20 * relative_variance(3, 12, proposal=proposal)


def test_in_the_core_the_sum_form_has_little_variance_whatever_the_size():
    """With ``M ~ Bin(T, p)`` mismatches, ``p = 1 - 1/K``, one sample is M·D and ‖D‖² = 2M."""
    for t, k in ((1, 5), (2, 6), (2, 50), (3, 2), (3, 12), (5, 3)):
        p = 1 - 1 / k
        uniform = 1 + 2 * (t - 1) * p * (1 - p) / (1 + (t - 1) * p) ** 2
        found = relative_variance(t, k, proposal="uniform", **SUM)
        assert found == pytest.approx(uniform, rel=1e-10)
        assert 1 <= uniform <= 1.25
        assert relative_variance(t, k, **SUM) < (1 + 1 / t) ** t * (1 + uniform) - 1 < 2.25 * math.e
    emissions, tags, table = problem(1, 3, 4, size=0.1)
    samples, chance = sampling_distribution(tags[0], 4, proposal="uniform")
    options = SUM_POSITIONS | {"proposal": "uniform", "baseline": 0.0}
    options |= {"surrogate": LinearCore(100.0)}
    _, by_emission, _ = estimates(emissions, tags, table, samples, **options)
    mean = torch.einsum("n,ntk->tk", chance, by_emission)
    variance = chance @ (by_emission - mean).square().sum((1, 2))
    assert float(variance) == pytest.approx(float(mean.square().sum()), rel=1e-12)


# --- Transitions ----------------------------------------------------------------------------------


def step(emissions, tags, transitions, seed, **options):
    """Backward pass of a loss that is seeded; returns the emissions' gradient."""
    leaf = emissions.detach().requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    structured_linear_core_loss(leaf, tags, transitions, generator=generator, **options).backward()
    return leaf.grad


def same_classifier(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found - found.mean(), expected - expected.mean(), atol=1e-12)


KINDS = {
    "sequences": [{}],
    "positions": [{"over": "positions"}],
    "micro-batches": [{}, {"proposal": "uniform"}],
    "sparse and dense": [{}, EXACT, {}],
    "dense": [EXACT],
    "sum, sequences": [SUM],
    "sum, positions": [SUM_POSITIONS],
    "sum, positions, exact": [SUM | POSITIONS],
    "both forms": [SUM, {}, SUM_POSITIONS, SUM | EXACT],
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("by", ["apply_gradient", "optimiser"])
def test_twenty_steps_equal_dense_descent_on_the_true_gradient(by, kinds):
    emissions, tags, table = problem(3, 4, 5)
    mask = prefix_mask([4, 1, 3], 4)
    sparse, dense = Transitions(5, table), table.clone().requires_grad_()
    optimiser = torch.optim.SGD(sparse.parameters(), lr=0.3)
    for number in range(20):
        for part, options in enumerate(kinds):
            seed = 10 * number + part
            found = step(emissions, tags, sparse, seed, mask=mask, core=0.2, **options)
            expected = step(emissions, tags, dense, seed, mask=mask, core=0.2, **options)
            assert torch.allclose(found, expected, atol=1e-12)
        optimiser.step() if by == "optimiser" else sparse.apply_gradient(0.3)
        sparse.zero_grad()
        with torch.no_grad():
            dense -= 0.3 * dense.grad
        dense.grad = None
        assert float((sparse.dense() - dense).abs().max()) < 1e-12
        assert sparse.mean() == pytest.approx(float(dense.mean()), abs=1e-12)
    assert float((dense - table).abs().max()) > 0.01


def test_descent_on_the_table_alone_trains_the_same_classifier():
    emissions, tags, table = problem(3, 4, 5)
    sparse, dense = Transitions(5, table), table.clone().requires_grad_()
    optimiser = torch.optim.SGD([sparse.table], lr=0.5)
    for number in range(10):
        step(emissions, tags, sparse, number, core=0.2)
        step(emissions, tags, dense, number, core=0.2)
        assert sparse.table.grad.is_sparse
        optimiser.step()
        sparse.zero_grad()
        with torch.no_grad():
            dense -= 0.5 * dense.grad
        dense.grad = None
    assert same_classifier(sparse.dense().detach(), dense.detach())
    assert not torch.allclose(sparse.dense(), dense, atol=1e-3)  # up to a constant only


@pytest.mark.parametrize("options", [SUM, SUM_POSITIONS], ids=str)
def test_in_the_sum_form_the_table_takes_the_whole_gradient(options):
    """In pairs, few, and no constant: descent on the table alone is dense descent on A."""
    emissions, tags, table = problem(3, 4, 50)
    sparse, dense = Transitions(50, table), table.clone().requires_grad_()
    for number in range(5):
        step(emissions, tags, sparse, number, **options)
        step(emissions, tags, dense, number, **options)
        assert sparse.table.grad._nnz() <= 3 * 3 * (8 + 1) <= 2 * 3 * 4 * 8
        assert sparse.table.grad.sparse_dim() == 2
        assert sparse.offset.grad is None
        assert int(dense.grad.count_nonzero()) <= sparse.table.grad._nnz()
        assert torch.allclose(sparse.table.grad.to_dense(), dense.grad, atol=1e-15)
        torch.optim.SGD([sparse.table], lr=0.5).step()
        sparse.zero_grad()
        with torch.no_grad():
            dense -= 0.5 * dense.grad
        dense.grad = None
        assert torch.allclose(sparse.dense(), dense, atol=1e-12)
    if options == SUM_POSITIONS:  # only rows of tags that stand before another
        rows = (sparse.dense() != table).any(1).nonzero()[:, 0]
        assert set(rows.tolist()) <= set(tags[:, :-1].flatten().tolist())


def test_the_two_gradients_sum_to_the_true_one():
    emissions, tags, table = problem(2, 4, 5)
    sparse, dense = Transitions(5, table), table.clone().requires_grad_()
    for seed in range(3):  # accumulated
        step(emissions, tags, sparse, seed)
        step(emissions, tags, dense, seed)
    found = sparse.table.grad.to_dense() + sparse.offset.grad
    assert torch.allclose(found, dense.grad, atol=1e-15)
    assert abs(float(found.sum())) < 1e-14


def test_pairs_and_rows_do_not_mix_silently():
    emissions, tags, table = problem(2, 4, 5)
    transitions = Transitions(5, table)
    step(emissions, tags, transitions, 0)
    with pytest.raises(RuntimeError, match="sparse dimensions"):
        step(emissions, tags, transitions, 0, over="positions")


def disturb(transitions: Transitions, how: str) -> None:
    with torch.no_grad():
        if how == "edit":
            transitions.table[1, 2] += 3
        elif how == "optimiser":
            torch.optim.SGD(transitions.parameters(), lr=1.0).step()
        elif how == "state":
            transitions.load_state_dict(Transitions(4, torch.eye(4)).state_dict())
        elif how == "assigned state":
            state = Transitions(4, torch.eye(4, dtype=torch.float64)).state_dict()
            transitions.load_state_dict(state, assign=True)
        elif how == "conversion":
            transitions.table += 1e-9
            transitions.mean()
            transitions.to(torch.float32)
        elif how == "data":
            transitions.table.data.add_(1)
            transitions.refresh()
        else:
            transitions.offset += 2


@pytest.mark.parametrize(
    "how", ["edit", "optimiser", "state", "assigned state", "conversion", "data", "offset"]
)
def test_the_mean_follows_every_change(how):
    emissions, tags, table = problem(2, 3, 4)
    transitions = Transitions(4, table + 1)
    step(emissions, tags, transitions, 0)
    before = transitions.mean()
    disturb(transitions, how)
    expected = float(transitions.table.double().mean() + transitions.offset)
    assert transitions.mean() == pytest.approx(expected, abs=1e-15)
    if how != "optimiser":  # the true gradient sums to zero: its step changes all but the mean
        assert abs(transitions.mean() - before) > 1e-3 or how == "conversion"
    clones = [copy.deepcopy(transitions), Transitions(4)]
    clones[1].load_state_dict(transitions.state_dict())
    for clone in clones:  # a copy has a sum of its own
        with torch.no_grad():
            clone.table.add_(1)
        assert clone.mean() == pytest.approx(expected + 1, abs=1e-6)
    assert transitions.mean() == pytest.approx(expected, abs=1e-15)


FUSED = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
}


def copies(transitions: Transitions) -> list[Transitions]:
    return [transitions, copy.deepcopy(transitions), pickle.loads(pickle.dumps(transitions))]


@pytest.mark.parametrize("optimiser", FUSED.values(), ids=FUSED.keys())
def test_the_mean_follows_fused_optimisers_which_count_no_version(optimiser):
    """Of the table itself, a copy and an unpickled one; others keep their sum."""
    other = Transitions(10)
    other.mean()
    for chain in copies(Transitions(10)):
        assert chain.mean() == 0
        chain.table.grad = torch.full((10, 10), 1.0)
        fresh = torch.nn.Parameter(torch.zeros(1))  # without a gradient
        groups = [{"params": [fresh]}, {"params": [chain.table]}]
        optimiser(groups, lr=5.0, weight_decay=0.0, fused=True).step()
        assert float(chain.table[0, 0].detach()) == pytest.approx(-5.0, rel=1e-6)
        assert chain.mean() == pytest.approx(-5.0, rel=1e-6)
    assert other._total is not None


def test_optimisers_are_hooked_once_and_copies_are_let_go():
    from torch.optim import optimizer

    live = transitions_module._LIVE
    chains = copies(Transitions(3))
    assert all(chain in live for chain in chains)
    count = len(live)
    chains.clear()
    gc.collect()
    assert len(live) <= count - 3
    hooks = list(optimizer._global_optimizer_post_hooks.values())
    assert hooks.count(transitions_module._after_step) == 1


@pytest.mark.parametrize("rows", [False, True], ids=["pairs", "rows"])
def test_the_mean_shows_an_overflow_of_the_table(rows):
    """Two updates of -3e38 to one float32 entry: -inf, though the sum in float64 is finite."""
    chain, big = Transitions(4), 3e38
    chain.mean()
    if rows:
        index, values = torch.tensor([[1, 1]]), torch.zeros(2, 4)
        values[:, 2] = big
    else:
        index, values = torch.tensor([[1, 1], [2, 2]]), torch.full((2,), big)
    chain.table.grad = torch.sparse_coo_tensor(index, values, (4, 4), check_invariants=False)
    chain.apply_gradient(1.0)
    assert float(chain.table[1, 2].detach()) == -math.inf
    assert not math.isfinite(chain.mean())
    emissions, tags = torch.zeros(1, 3, 4), torch.tensor([[0, 1, 3]])
    assert structured_linear_core_loss(emissions, tags, chain).isnan()
    with torch.no_grad():
        chain.table.zero_()
    assert chain.mean() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_transitions_converted_to_half_precision_are_refused(dtype):
    chain = Transitions(4).to(dtype)
    for options in LOSSES.values():
        with pytest.raises(TypeError, match="the table of Transitions must be float32 or float64"):
            structured_linear_core_loss(E, Y, chain, **options)
    with pytest.raises(TypeError, match="the table of Transitions must be float32 or float64"):
        chain.apply_gradient(1.0)
    chain.float().apply_gradient(1.0)


def test_the_sum_is_made_once_and_renewed_now_and_then(monkeypatch):
    made = []
    total = transitions_module._total
    monkeypatch.setattr(transitions_module, "_total", lambda table: made.append(1) or total(table))
    emissions, tags, table = problem(2, 4, 20)
    transitions = Transitions(20, table.float())
    for seed in range(20):  # 2·3·8 = 48 entries a step, 400 in the table: renewed every 9th step
        step(emissions.float(), tags, transitions, seed, core=0.2)
        transitions.apply_gradient(0.5)
        transitions.zero_grad()
        expected = float(transitions.table.double().mean() + transitions.offset)
        assert abs(transitions.mean() - expected) < 1e-8
    assert len(made) == 3
    with torch.no_grad():
        transitions.table[0, 0] = 1
    transitions.mean()
    transitions.mean()
    assert len(made) == 4


def test_blocks_of_rows_sum_to_the_whole(monkeypatch):
    monkeypatch.setattr(transitions_module, "BLOCK", 30)
    table = torch.arange(169.0).reshape(13, 13)
    assert Transitions(13, table).mean() == 84.0
    assert float(transitions_module._total(table.T)) == 169 * 84


def test_transitions_start_as_told_and_refuse_nonsense():
    table = torch.eye(3)
    transitions = Transitions(3, table, dtype=torch.float64)
    transitions.table.data += 1
    assert torch.equal(table, torch.eye(3))
    assert transitions.table.dtype == torch.float64
    assert Transitions(3).classes == 3
    assert float(Transitions(3).dense().abs().sum()) == 0
    with pytest.raises(ValueError, match="classes"):
        Transitions(1)
    with pytest.raises(ValueError, match=r"table must have shape \(3, 3\)"):
        Transitions(3, torch.zeros(3, 4))
    with pytest.raises(TypeError, match="table must be float32"):
        Transitions(3, torch.zeros(3, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="table must be float32"):
        Transitions(3, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"table must be a tensor, got ndarray: pass .*as_tensor"):
        Transitions(3, np.eye(3))
    with pytest.raises(TypeError, match=r"table must be dense, .* pass table.to_dense\(\)"):
        Transitions(3, torch.eye(3).to_sparse())
    for classes in (3.0, "3", None):
        with pytest.raises(TypeError, match="classes must be an integer"):
            Transitions(classes)
    assert Transitions(np.int64(3)).classes == 3
    with pytest.raises(ValueError, match="lr"):
        Transitions(3).apply_gradient(math.nan)


def test_emissions_in_half_precision_train_a_float32_table():
    emissions, tags, table = problem(2, 3, 4)
    found, expected = Transitions(4, table, dtype=torch.float32), Transitions(4, table)
    for seed in range(3):
        step(emissions.bfloat16(), tags, found, seed)
        step(emissions.bfloat16().double(), tags, expected, seed)
    for transitions in (found, expected):
        transitions.apply_gradient(0.5)
    assert torch.allclose(found.dense().double(), expected.dense(), atol=1e-6)


def test_frozen_parts_get_no_gradient():
    emissions, tags, table = problem(2, 3, 4)
    transitions = Transitions(4, table)
    transitions.offset.requires_grad_(False)
    step(emissions, tags, transitions, 0)
    assert transitions.offset.grad is None
    transitions.zero_grad()
    transitions.table.requires_grad_(False)
    step(emissions, tags, transitions, 0)
    assert transitions.table.grad is None
    transitions.apply_gradient(1.0)
    assert torch.equal(transitions.table, table)


# --- cost -----------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation makes, and what reads the table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.pointer, self.most, self.readers = table.data_ptr(), 0, set()

    def is_table(self, leaf: object) -> bool:
        strided = isinstance(leaf, Tensor) and leaf.layout == torch.strided
        return strided and leaf.data_ptr() == self.pointer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(self.is_table(leaf) for leaf in tree_leaves(args)):
            self.readers.add(func.overloadpacket.__name__)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not self.is_table(leaf):
                stored = leaf._nnz() if leaf.is_sparse else leaf.numel()
                self.most = max(self.most, stored)
        return out


SPARSE = {"sequences": {}, "positions": POSITIONS, "sum": SUM, "sum, positions": SUM_POSITIONS}


@pytest.mark.parametrize("options", SPARSE.values(), ids=SPARSE.keys())
def test_a_step_does_no_work_on_all_pairs_of_tags(options):
    b, t, k = 2, 5, 3000
    chain = Transitions(k)
    if "form" not in options:
        chain.mean()
    emissions, tags = torch.randn(b, t, k, requires_grad=True), torch.randint(k, (b, t))
    criterion = StructuredLinearCoreLoss(**options)
    with LargestTensor(chain.table) as seen:
        for _ in range(2):
            criterion(emissions, tags, chain).backward()
            chain.apply_gradient(0.1)
            chain.zero_grad()
    assert seen.most <= b * t * k < k * k / 100
    cheap = {"index", "index_put_", "index_add_", "embedding", "detach", "alias", "is_same_size"}
    assert seen.readers <= cheap, seen.readers
    assert {"index", "index_put_"} <= seen.readers or "embedding" in seen.readers
    assert chain.table.count_nonzero() > 0
    assert (chain._total is None) == ("form" in options)  # the sum form never asks for the mean


# --- dtypes, layouts, bad input -------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lower_precision(dtype, options):
    emissions, tags, table = problem(2, 4, 3)
    emissions, table = emissions.to(dtype), table.to(dtype)
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]

    def loss(e, a):
        generator = torch.Generator().manual_seed(0)
        return structured_linear_core_loss(e, tags, a, generator=generator, **options)

    assert loss(emissions, table).dtype == dtype
    expected = gradients(loss, emissions.double(), table.double())
    for found, value in zip(gradients(loss, emissions, table), expected, strict=True):
        assert found.dtype == dtype
        assert torch.allclose(found.double(), value, atol=tolerance)
    value = float(loss(emissions.double(), table.double()))
    assert float(loss(emissions, table)) == pytest.approx(value, rel=tolerance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss(emissions, table).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_loss
def test_the_gradient_of_a_half_precision_table_rounds_once(dtype, options):
    """Many contributions to few entries: each rounded, or added in half precision, they drift."""
    emissions, tags, _ = problem(100, 4, 2)
    emissions, table = emissions.float(), torch.zeros(2, 2)

    def loss(e, a):
        generator = torch.Generator().manual_seed(0)
        return structured_linear_core_loss(
            e, tags, a, generator=generator, reduction="sum", core=0.2, **options
        )

    _, expected = gradients(loss, emissions.double(), table.double())
    _, found = gradients(loss, emissions, table.to(dtype))
    assert found.dtype == dtype
    assert float(expected.abs().min()) > 1e-3
    error = (found.double() - expected) / expected
    assert float(error.abs().max()) < 1.01 * torch.finfo(dtype).eps / 2


@every_loss
def test_the_default_dtype_does_not_matter(options):
    emissions, tags, table = problem(2, 4, 3)
    emissions, table, mask = emissions.float(), table.float(), prefix_mask([4, 2], 4)

    def results():
        def loss(e, a):
            generator = torch.Generator().manual_seed(0)
            return structured_linear_core_loss(
                e, tags, a, mask=mask, generator=generator, samples=500, **options
            )

        chain = Transitions(3, table)
        step(emissions, tags, chain, 0, **options)
        chain.mean()
        chain.apply_gradient(0.1)
        mean = torch.tensor(chain.mean(), dtype=torch.float64)
        moments = gradient_variance(emissions, tags, table, form=options.get("form", "sum"))
        rest = [moments.emission_variance, moments.transition_mean, mean, chain.dense()]
        return [loss(emissions, table), *gradients(loss, emissions, table), *rest]

    expected, before = results(), torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        try:
            torch.set_default_dtype(dtype)
            found = results()
        finally:
            torch.set_default_dtype(before)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("masked", [False, True], ids=["tags", "mask"])
@pytest.mark.parametrize("sparse", [False, True], ids=["tensor", "Transitions"])
@pytest.mark.parametrize("options", [{}, SUM, SUM_POSITIONS], ids=str)
def test_tags_or_mask_overwritten_before_the_backward_pass_are_refused(options, sparse, masked):
    emissions, tags, table = problem(2, 3, 4)
    mask = prefix_mask([3, 2], 3) if masked else None
    emissions, table = emissions.requires_grad_(), table.requires_grad_()
    chain = Transitions(4, table) if sparse else table
    loss = structured_linear_core_loss(emissions, tags, chain, mask=mask, **options)
    tags.fill_(1) if mask is None else mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    structured_linear_core_loss(emissions, tags, chain, mask=mask, **options).backward()


@every_loss
def test_strides_do_not_matter(options):
    emissions, tags, table = problem(1, 4, 3)

    def results(e, y, a):
        def loss(e, a):
            generator = torch.Generator().manual_seed(0)
            return structured_linear_core_loss(e, y, a, generator=generator, **options)

        return [loss(e, a), *gradients(loss, e, a)]

    views = (
        emissions.expand(3, -1, -1),
        tags.T.contiguous().T.expand(3, -1).int(),
        table.T.contiguous().T,
    )
    plain = [view.contiguous() for view in views]
    for found, expected in zip(results(*views), results(*plain), strict=True):
        assert torch.allclose(found, expected, rtol=1e-13, atol=1e-15)
    assert torch.equal(emissions, problem(1, 4, 3)[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", CONSTRAINED.values(), ids=CONSTRAINED.keys())
def test_scores_that_are_not_finite_give_no_finite_loss(options, bad):
    emissions, tags, table = problem(2, 3, 4)
    mask = prefix_mask([3, 2], 3)
    emissions[1, 2] = bad  # masked: does not matter
    options = {"reduction": "none", "mask": mask, **options}
    assert structured_linear_core_loss(emissions, tags, table, **options).isfinite().all()
    for where in [(1, 0, int(tags[1, 0])), (1, 1, (int(tags[1, 1]) + 1) % 4)]:
        broken = emissions.clone()
        broken[where] = bad
        rows = structured_linear_core_loss(broken, tags, table, **options)
        assert rows[0].isfinite()
        assert rows[1].isnan()
    broken = table.clone()
    broken[tags[0, 0], 1] = bad
    rows = structured_linear_core_loss(emissions, tags, broken, **options)
    assert not rows[0].isfinite()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", SUMS.values(), ids=SUMS.keys())
def test_in_the_sum_form_gold_scores_that_are_not_finite_give_nan(options, bad):
    emissions, tags, table = problem(2, 3, 4)
    tags[0], tags[1] = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])
    options = {"reduction": "none", "mask": prefix_mask([3, 2], 3), **options}
    emissions[1, 2] = bad  # masked: does not matter
    assert structured_linear_core_loss(emissions, tags, table, **options).isfinite().all()
    for t in (0, 1):
        broken = emissions.clone().requires_grad_()
        with torch.no_grad():
            broken[1, t, tags[1, t]] = bad
        rows = structured_linear_core_loss(broken, tags, table, **options)
        assert rows[0].isfinite()
        assert rows[1].isnan()
        rows.sum().backward()
        assert broken.grad[0].isfinite().all()
        # The enumerated loss is left to autograd, whose slopes at NaN are numbers.
        assert broken.grad[1, t].isnan().any() or options.get("method") == "exact"
        assert float(broken.grad[1, 2].abs().max()) == 0  # masked
    broken = table.clone()
    broken[0, 1] = bad  # a gold pair of the first, not of the second
    for _ in range(10):  # also where the one sample does not meet it
        rows = structured_linear_core_loss(emissions, tags, broken, samples=1, **options)
        assert rows[0].isnan()


@pytest.mark.parametrize("options", SUMS.values(), ids=SUMS.keys())
def test_in_the_sum_form_an_impossible_alternative_contributes_nothing(options):
    """Scores of -inf, at a tag or at a pair, act as scores that are very low."""
    emissions, tags, table = problem(2, 3, 3)
    tags[:] = torch.tensor([0, 1, 0])
    emissions[1, 2] = math.nan
    mask = prefix_mask([3, 2], 3)

    def results(low):
        e, a = emissions.clone(), table.clone()
        e[0, 1, 2] = e[1, 0, 2] = low
        a[0, 2] = a[1, 2] = low

        def loss(e, a):
            generator = torch.Generator().manual_seed(0)
            return structured_linear_core_loss(
                e, tags, a, mask=mask, generator=generator, samples=32, **options
            )

        return [loss(e, a), *gradients(loss, e, a)]

    for found, expected in zip(results(-math.inf), results(-1e5), strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, expected)
    emissions[0, 1, 2] = math.inf  # certain, and wrong
    options = options | {"samples": 64, "reduction": "none", "mask": mask}
    rows = structured_linear_core_loss(emissions, tags, table, **options)
    assert rows[0].isposinf()
    assert rows[1].isfinite()


@every_loss
def test_an_empty_batch(options):
    emissions, tags = torch.zeros(0, 3, 4, requires_grad=True), torch.zeros(0, 3).long()
    for transitions in (torch.zeros(4, 4), Transitions(4)):
        for reduction, expected in (("sum", 0.0), ("mean", math.nan)):
            loss = structured_linear_core_loss(
                emissions, tags, transitions, reduction=reduction, **options
            )
            loss.backward()
            assert loss.item() == pytest.approx(expected, nan_ok=True)
        loss = structured_linear_core_loss(
            emissions, tags, transitions, reduction="none", **options
        )
        assert loss.shape == (0,)
    assert emissions.grad.shape == (0, 3, 4)


def test_reductions_and_upstream_gradients():
    emissions, tags, table = problem(3, 4, 5)

    def loss(e, a, reduction):
        generator = torch.Generator().manual_seed(0)
        return structured_linear_core_loss(e, tags, a, generator=generator, reduction=reduction)

    rows = loss(emissions, table, "none")
    assert rows.shape == (3,)
    assert torch.allclose(loss(emissions, table, "sum"), rows.sum())
    assert torch.allclose(loss(emissions, table, "mean"), rows.mean())
    weights = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    by_emission, _ = gradients(lambda e, a: loss(e, a, "none") @ weights, emissions, table)
    total, _ = gradients(lambda e, a: loss(e, a, "sum"), emissions, table)
    mean, _ = gradients(lambda e, a: loss(e, a, "mean"), emissions, table)
    assert torch.allclose(by_emission, total * weights[:, None, None])
    assert torch.allclose(mean, total / 3)


@every_loss
def test_the_module_is_the_function(options):
    emissions, tags, table = problem(2, 4, 3)
    mask, weight = prefix_mask([4, 2], 4), torch.tensor([0.5, 2.0, 1.25])
    settings = {"core": 0.5, "scale": 0.7, "tail": "gamma", "tag_weight": weight, **options}
    criterion = StructuredLinearCoreLoss(**settings)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    found = criterion(emissions, tags, table, mask, generators[0])
    expected = structured_linear_core_loss(
        emissions, tags, table, mask=mask, generator=generators[1], **settings
    )
    assert torch.equal(found, expected)
    assert "core=0.5" in repr(criterion)
    assert f"form={options.get('form', 'constrained')!r}" in repr(criterion)
    assert "tag_weight" in criterion.state_dict()


def test_what_is_left_out_depends_on_the_loss():
    chosen = {
        name: (o.method, o.proposal, o.baseline)
        for name, o in ((n, StructuredLinearCoreLoss(**o).options) for n, o in LOSSES.items())
    }
    assert chosen == {
        "sequences, exact": ("exact", "near", 1.0),
        "sequences": ("sampled", "near", 1.0),
        "positions": ("exact", "uniform", 1.0),
        "sum, sequences, exact": ("exact", "near", 0.0),
        "sum, sequences": ("sampled", "near", 0.0),
        "sum, positions": ("exact", "uniform", 0.0),
        "sum, positions, sampled": ("sampled", "uniform", 0.0),
    }
    given = StructuredLinearCoreLoss(form="sum", proposal="uniform", baseline=0.0).options
    assert (given.proposal, given.baseline) == ("uniform", 0.0)


@pytest.mark.parametrize("options", [{}, SUM, SUM_POSITIONS], ids=str)
def test_no_second_derivative_of_the_sampled_loss(options):
    emissions, tags, table = problem(1, 3, 4)
    loss = structured_linear_core_loss(emissions.requires_grad_(), tags, table, **options)
    with pytest.raises(RuntimeError, match="method='exact'"):
        torch.autograd.grad(loss, emissions, create_graph=True)


E, Y, A = torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), torch.zeros(4, 4)
HOLES = torch.tensor([[True, False, True], [True, True, True]])
EMPTY = torch.tensor([[False, False, False], [True, True, True]])
BAD = {
    "integer emissions": ((E.long(), Y, A), {}, TypeError, "emissions must be float"),
    "no batch": ((E[0], Y, A), {}, ValueError, r"\[B, T, K\]"),
    "no position": ((E[:, :0], Y[:, :0], A), {}, ValueError, "T = 0"),
    "one tag": ((E[..., :1], Y, A[:1, :1]), {}, ValueError, "K = 1"),
    "float tags": ((E, Y.float(), A), {}, TypeError, "tags must hold integer"),
    "bool tags": ((E, Y.bool(), A), {}, TypeError, "tags must hold integer"),
    "shape of tags": ((E, Y[:, :2], A), {}, ValueError, "tags must have shape"),
    "tag too large": ((E, Y + 4, A), {}, IndexError, "tag 4 is out of range for 4"),
    "tag negative": ((E, Y - 100, A), {}, IndexError, "tag -100"),
    "shape of transitions": ((E, Y, A[:3]), {}, ValueError, r"transitions must .* \(4, 4\)"),
    "size of transitions": ((E, Y, Transitions(5)), {}, ValueError, "transitions must have"),
    "list of transitions": (
        (E, Y, A.tolist()), {}, TypeError, r"transitions must be a tensor, got list: pass torch.as",
    ),
    "array of emissions": (
        (E.numpy(), Y, A), {}, TypeError, r"emissions must .* ndarray: .*as_tensor\(emissions\)",
    ),
    "list of emissions": ((E.tolist(), Y, A), {}, TypeError, "emissions must be a tensor, got li"),
    "no emissions": ((None, Y, A), {}, TypeError, "emissions must be a tensor, got NoneType"),
    "sparse emissions": ((E.to_sparse(), Y, A), {}, TypeError, r"pass emissions.to_dense\(\)"),
    "array of tags": ((E, Y.numpy(), A), {}, TypeError, "tags must be a tensor, got ndarray"),
    "list of tags": ((E, Y.tolist(), A), {}, TypeError, "tags must be a tensor, got list"),
    "sparse tags": ((E, Y.to_sparse(), A), {}, TypeError, r"pass tags.to_dense\(\)"),
    "array of transitions": ((E, Y, A.numpy()), {}, TypeError, "transitions must be a tensor"),
    "sparse transitions": ((E, Y, A.to_sparse()), {}, TypeError, "transitions must be dense"),
    "array of a mask": (
        (E, Y, A), {"mask": ~EMPTY.numpy()}, TypeError, "mask must be a tensor, got ndarray",
    ),
    "list of a mask": ((E, Y, A), {"mask": [[True]]}, TypeError, "mask must be a tensor, got list"),
    "sparse mask": ((E, Y, A), {"mask": HOLES.to_sparse()}, TypeError, "mask must be dense"),
    "array of weights": (
        (E, Y, A), {"tag_weight": np.ones(4)}, TypeError, "tag_weight must be a tensor, got nda",
    ),
    "list of weights": ((E, Y, A), {"tag_weight": [1.0]}, TypeError, "tag_weight must be a tensor"),
    "sparse weights": (
        (E, Y, A), {"tag_weight": torch.ones(4).to_sparse()}, TypeError, "tag_weight must be dense",
    ),
    "weights below float32": (
        (E, Y, A), {"tag_weight": torch.full((4,), 1e-60, dtype=torch.float64)}, ValueError,
        "positive in torch.float32",
    ),
    "seed": ((E, Y, A), {"generator": 0}, TypeError, "generator must be a torch.Generator, got in"),
    "generator of NumPy": (
        (E, Y, A), {"generator": np.random.default_rng(0)}, TypeError, "must be a torch.Generator",
    ),
    "generator of an exact loss": ((E, Y, A), EXACT | {"generator": 0}, TypeError, "generator"),
    "keep text": ((E, Y, A), {"keep": "0.5"}, TypeError, "keep must be a number, got '0.5'"),
    "baseline text": ((E, Y, A), {"baseline": "1"}, TypeError, "baseline must be a number"),
    "samples text": ((E, Y, A), {"samples": "3"}, ValueError, "samples must be"),
    "integer transitions": ((E, Y, A.long()), {}, TypeError, "transitions must be floating"),
    "float mask": ((E, Y, A), {"mask": HOLES.float()}, TypeError, "mask must be bool"),
    "shape of mask": ((E, Y, A), {"mask": HOLES[:1]}, ValueError, "mask must have shape"),
    "mask with holes": ((E, Y, A), {"mask": HOLES}, ValueError, "prefix"),
    "empty sequence": ((E, Y, A), {"mask": EMPTY}, ValueError, "first position"),
    "weights zero": ((E, Y, A), {"tag_weight": torch.zeros(4)}, ValueError, "positive"),
    "weights nan": ((E, Y, A), {"tag_weight": torch.full((4,), math.nan)}, ValueError, "finite"),
    "weights shape": ((E, Y, A), {"tag_weight": torch.ones(3)}, ValueError, r"shape \(4,\)"),
    "weights int": ((E, Y, A), {"tag_weight": torch.ones(4).long()}, TypeError, "tag_weight"),
    "weights grad": (
        (E, Y, A), {"tag_weight": torch.ones(4, requires_grad=True)}, ValueError, "detach",
    ),
    "other device": ((E, Y, A.to("meta")), {}, ValueError, "transitions must be on cpu"),
    "samples": ((E, Y, A), {"samples": 0}, ValueError, "samples must be"),
    "fractional samples": ((E, Y, A), {"samples": 2.5}, ValueError, "samples must be"),
    "keep 1": ((E, Y, A), {"keep": 1.0}, ValueError, r"keep must lie in \[0, 1\)"),
    "keep nan": ((E, Y, A), {"keep": math.nan}, ValueError, "keep must lie"),
    "keep uniform": ((E, Y, A), {"keep": 0.1, "proposal": "uniform"}, ValueError, "keep belongs"),
    "baseline": ((E, Y, A), {"baseline": math.inf}, ValueError, "baseline"),
    "over": ((E, Y, A), {"over": "tags"}, ValueError, "over must be one of"),
    "method": ((E, Y, A), {"method": "viterbi"}, ValueError, "method must be one of"),
    "proposal": ((E, Y, A), {"proposal": "far"}, ValueError, "proposal must be one of"),
    "reduction": ((E, Y, A), {"reduction": "max"}, ValueError, "reduction must be one of"),
    "core": ((E, Y, A), {"core": 0.0}, ValueError, "core"),
    "tail": ((E, Y, A), {"tail": "cubic"}, ValueError, "tail"),
    "sampled sum": ((E, Y, A), {"average": False}, ValueError, "average=False needs"),
    "sampled positions": (
        (E, Y, A), POSITIONS | {"method": "sampled"}, ValueError, "form='sum': .* must be exact",
    ),
    "form": ((E, Y, A), {"form": "margins"}, ValueError, "form must be one of"),
    "sampled sum over sequences": (
        (E, Y, A), SUM | {"average": False}, ValueError, "average=False needs",
    ),
    "baseline of a sum": ((E, Y, A), SUM | {"baseline": 1.0}, ValueError, "baseline .* would bias"),
    "near positions": (
        (E, Y, A), SUM_POSITIONS | {"proposal": "near"}, ValueError, "no meaning for over='posit",
    ),
    "keep over positions": ((E, Y, A), SUM_POSITIONS | {"keep": 0.5}, ValueError, "keep belongs"),
    "too many sequences": (
        (torch.zeros(1, 9, 4), torch.zeros(1, 9).long(), A), EXACT, ValueError,
        r"4\^9 .* 65536 .*method='sampled'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "options", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(inputs, options, error, message):
    with pytest.raises(error, match=message):
        structured_linear_core_loss(*inputs, **options)


def test_bad_input_of_the_rest():
    with pytest.raises(ValueError, match="samples must be"):
        StructuredLinearCoreLoss(samples=-1)
    with pytest.raises(ValueError, match="would bias"):
        StructuredLinearCoreLoss(form="sum", baseline=0.5)
    with pytest.raises(ValueError, match="must be exact"):
        StructuredLinearCoreLoss(over="positions", method="sampled")
    with pytest.raises(ValueError, match="would bias"):
        gradient_variance(E, Y, A, form="sum", baseline=1.0)
    with pytest.raises(ValueError, match="method='sampled'"):
        enumerate_sequences(17, 2)
    with pytest.raises(ValueError, match="at least 1"):
        enumerate_sequences(0, 2)
    with pytest.raises(ValueError, match="B = 0"):
        gradient_variance(E[:0], Y[:0], A)
    with pytest.raises(ValueError, match="65536"):
        gradient_variance(torch.zeros(1, 9, 4), torch.zeros(1, 9).long(), A)


@pytest.mark.parametrize("name", [name for name in BAD if "weights" in name])
def test_the_module_refuses_bad_weights_when_it_is_made(name):
    _, options, error, message = BAD[name]
    if name == "weights below float32":  # fine for emissions in float64
        module = StructuredLinearCoreLoss(**options)
        assert float(module(E.double(), Y, A.double()).abs()) > 0
        with pytest.raises(error, match=message):
            module(E, Y, A)
        return
    if name == "weights shape":  # only the emissions tell K
        options, message = {"tag_weight": torch.ones(4, 1)}, r"tag_weight must have shape \[K\]"
    with pytest.raises(error, match=message):
        StructuredLinearCoreLoss(**options)


def test_numbers_of_numpy_will_do():
    emissions, tags, table = problem(2, 3, 4)

    def loss(samples, keep, baseline):
        return structured_linear_core_loss(
            emissions, tags, table, samples=samples, keep=keep, baseline=baseline,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip

    assert torch.equal(loss(np.int64(3), np.float64(0.5), np.float32(1)), loss(3, 0.5, 1))
    assert type(StructuredLinearCoreLoss(samples=np.int64(3)).options.samples) is int


@pytest.mark.gpu
@pytest.mark.parametrize("options", [EXACT, POSITIONS, SUM | EXACT, SUM | POSITIONS], ids=str)
def test_cuda_equals_cpu(options):
    emissions, tags, table = problem(2, 4, 3)
    expected = gradients(
        lambda e, a: structured_linear_core_loss(e, tags, a, **options), emissions, table
    )
    found = gradients(
        lambda e, a: structured_linear_core_loss(e, tags.cuda(), a, **options),
        emissions.cuda(), table.cuda(),
    )  # fmt: skip
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a.cpu(), b, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, SUM, SUM_POSITIONS], ids=str)
def test_a_sampled_step_on_cuda_equals_dense_descent(options):
    emissions, tags, table = (t.cuda() for t in problem(2, 4, 5))
    sparse, dense = Transitions(5, table), table.clone().requires_grad_()
    for seed in range(3):
        for transitions in (sparse, dense):
            generator = torch.Generator("cuda").manual_seed(seed)
            structured_linear_core_loss(
                emissions, tags, transitions, generator=generator, **options
            ).backward()
        sparse.apply_gradient(0.3)
        sparse.zero_grad()
        with torch.no_grad():
            dense -= 0.3 * dense.grad
        dense.grad = None
        assert torch.allclose(sparse.dense(), dense, atol=1e-12)
        assert sparse.mean() == pytest.approx(float(dense.mean()), abs=1e-12)
