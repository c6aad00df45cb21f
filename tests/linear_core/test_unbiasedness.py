"""The enumerated expectations: a biased estimator must show, an unbiased one must not."""

from __future__ import annotations

import itertools

import pytest
import torch

from proofread.linear_core import LinearCore
from proofread.linear_core.unbiasedness import (
    HINGE_SCALE,
    Chain,
    least_distance,
    sampled_mean_bias,
    sampling_bias,
    tail_share,
)


@pytest.mark.parametrize("surrogate", [LinearCore(), LinearCore(0.5, 0.3, "gamma")])
def test_sampled_gradient_is_unbiased_and_a_sampled_mean_is_not(surrogate: LinearCore) -> None:
    assert tail_share(surrogate) > 0.1
    assert sampling_bias(surrogate, n_chains=2) < 1e-12
    assert sampled_mean_bias(surrogate, n_chains=2) > 0.01


def test_the_hinge_is_unbiased_as_well() -> None:
    hinge = LinearCore(scale=HINGE_SCALE)
    margins = torch.tensor([-2.0, 0.999, 1.001, 3.0], dtype=torch.float64)
    assert hinge.derivative(margins).tolist() == [-1, -1, 0, 0]  # the hinge, exactly
    assert sampling_bias(hinge, n_chains=2) < 1e-12


def test_sampled_mean_within_the_core_is_biased_as_computed_by_hand() -> None:
    """In the core Φ is a line, so a pair's loss is (L' + L'')/2·(c) - (L' - L'')(h' - h'')/4.

    Its expectation has half the covariance of L and h that the exact loss has: the gradient is half
    of the exact one, a relative distance of 1/2.
    """
    assert sampled_mean_bias(LinearCore(core=100.0), n_chains=2) == pytest.approx(0.5)


def test_exact_gradient_against_a_plain_sum() -> None:
    chain, phi = Chain.random(2, 3, seed=4), LinearCore()
    e = chain.emissions[0].clone().requires_grad_()
    a = chain.transitions.clone().requires_grad_()
    scores = [e[0, i] + e[1, j] + a[i, j] for i, j in itertools.product(range(3), repeat=2)]
    gold = chain.tags[0].tolist()
    costs = [(i != gold[0]) + (j != gold[1]) for i, j in itertools.product(range(3), repeat=2)]
    mean = sum(scores) / 9
    loss = sum(c * phi(mean - h) for c, h in zip(costs, scores, strict=True)) / 9
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, (e, a))])
    torch.testing.assert_close(chain.exact_gradient(phi), expected)


def test_bad_chain() -> None:
    with pytest.raises(ValueError, match="n_tags"):
        Chain.random(2, 1, seed=0)


def test_no_margin_lies_near_the_hinge_s_kink():
    hinge = LinearCore(scale=HINGE_SCALE)
    assert least_distance(hinge) > 1e5 * HINGE_SCALE
    one = least_distance(hinge, length=1, n_tags=2, n_chains=1)  # margins ±d/2 of two scores
    e = Chain.random(1, 2, seed=0).emissions[0, 0]
    half = float((e[0] - e[1]).abs() / 2)
    assert one == pytest.approx(abs(1 - half))


def test_no_chain_is_no_test():
    with pytest.raises(ValueError, match="n_chains=0"):
        sampling_bias(LinearCore(), n_chains=0)
