"""Is the sampled gradient of the structured loss unbiased, and does that need smoothness?

Small random chains, where the sampling distribution can be enumerated: no Monte Carlo error. All
distances are relative to the norm of the exact gradient, emissions and transitions taken together,
and below 10⁻¹² they are reported as 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .structured import enumerate_sequences, gradient_variance, structured_linear_core_loss
from .surrogates import LinearCore

#: A scale at which the tail is zero a hair beyond the stitch: the hinge with its kink at u = τ.
HINGE_SCALE = 1e-9


@dataclass(frozen=True)
class Chain:
    """One small chain with its gold tags, in float64.

    Attributes:
        emissions: ``[1, T, K]``.
        transitions: ``[K, K]``.
        tags: ``[1, T]``.
    """

    emissions: Tensor
    transitions: Tensor
    tags: Tensor

    @classmethod
    def random(cls, length: int, n_tags: int, seed: int, spread: float = 1.0) -> Chain:
        """Normal scores of deviation ``spread``, uniform tags.

        Raises:
            ValueError: ``length`` below 1, or fewer than 2 tags.
        """
        if length < 1 or n_tags < 2:
            raise ValueError(f"need length ≥ 1 and n_tags ≥ 2, got {length} and {n_tags}")
        g = torch.Generator().manual_seed(seed)
        emissions = spread * torch.randn(1, length, n_tags, generator=g, dtype=torch.float64)
        transitions = spread * torch.randn(n_tags, n_tags, generator=g, dtype=torch.float64)
        return cls(emissions, transitions, torch.randint(n_tags, (1, length), generator=g))

    def exact_gradient(self, surrogate: LinearCore) -> Tensor:
        """Gradient of the loss averaged over all sequences, by autograd: ``[T·K + K²]``."""
        e, a = self.emissions.clone().requires_grad_(), self.transitions.clone().requires_grad_()
        loss = structured_linear_core_loss(
            e,
            self.tags,
            a,
            method="exact",
            core=surrogate.core,
            scale=surrogate.scale,
            tail=surrogate.tail,
        )
        return _flat(*torch.autograd.grad(loss, (e, a)))

    def expected_gradient(self, surrogate: LinearCore, proposal: str, baseline: float) -> Tensor:
        """Mean of the sampled gradient over all samples, each with its chance: ``[T·K + K²]``."""
        moments = gradient_variance(
            self.emissions,
            self.tags,
            self.transitions,
            core=surrogate.core,
            scale=surrogate.scale,
            tail=surrogate.tail,
            proposal=proposal,
            baseline=baseline,
        )
        return _flat(moments.emission_mean, moments.transition_mean)

    def expected_gradient_of_sampled_mean(self, surrogate: LinearCore) -> Tensor:
        """The same if the mean score, inside Φ, were that of two uniform samples.

        All pairs (y′, y″) are enumerated; the loss of a pair is the mean of L·Φ(mean − h) over
        its two members, with the mean of *their* two scores.
        """
        e, a = self.emissions.clone().requires_grad_(), self.transitions.clone().requires_grad_()
        length, n_tags = e.shape[1:]
        sequences = enumerate_sequences(length, n_tags)  # [n, T]
        scores = e[0, torch.arange(length), sequences].sum(1)
        scores = scores + a[sequences[:, :-1], sequences[:, 1:]].sum(1)  # [n]
        cost = (sequences != self.tags).sum(1).double()  # [n]
        middle = (scores[:, None] + scores) / 2  # [n, n]
        loss = (cost[:, None] * surrogate(middle - scores[:, None])).mean()  # symmetric in the pair
        return _flat(*torch.autograd.grad(loss, (e, a)))


def _flat(*parts: Tensor) -> Tensor:
    return torch.cat([part.detach().flatten() for part in parts])


def _distance(found: Tensor, exact: Tensor) -> float:
    """Relative distance to 12 decimals: what is below is rounding, and differs by machine."""
    return round(float((found - exact).norm() / exact.norm()), 12)


def sampling_bias(
    surrogate: LinearCore, *, length: int = 3, n_tags: int = 4, n_chains: int = 5
) -> float:
    """Largest relative distance between expected sampled and exact gradient.

    Over random chains, both proposals, with and without the control variate.

    Args:
        surrogate: a ``LinearCore``; with ``HINGE_SCALE`` as its scale it is the hinge.
        length: T.
        n_tags: K.
        n_chains: random chains, seeds 0, 1, ….

    Raises:
        ValueError: no chain.
    """
    if n_chains < 1:
        raise ValueError(f"n_chains={n_chains} must be at least 1: no chain tests nothing")
    worst = 0.0
    for seed in range(n_chains):
        chain = Chain.random(length, n_tags, seed)
        exact = chain.exact_gradient(surrogate)
        for proposal in ("uniform", "near"):
            for baseline in (0.0, 1.0):
                found = chain.expected_gradient(surrogate, proposal, baseline)
                worst = max(worst, _distance(found, exact))
    return worst


def sampled_mean_bias(
    surrogate: LinearCore, *, length: int = 3, n_tags: int = 4, n_chains: int = 5
) -> float:
    """Smallest such distance if the mean score is sampled too (arguments as ``sampling_bias``)."""
    chains = [Chain.random(length, n_tags, seed) for seed in range(n_chains)]
    return min(
        _distance(c.expected_gradient_of_sampled_mean(surrogate), c.exact_gradient(surrogate))
        for c in chains
    )


def _margins(length: int, n_tags: int, seed: int) -> Tensor:
    """The arguments ``-h̃`` of Φ over all sequences of a random chain: ``[K^T]``."""
    chain = Chain.random(length, n_tags, seed)
    sequences = enumerate_sequences(length, n_tags)
    scores = chain.emissions[0, torch.arange(length), sequences].sum(1)
    scores = scores + chain.transitions[sequences[:, :-1], sequences[:, 1:]].sum(1)
    return scores.mean() - scores


def tail_share(surrogate: LinearCore, *, length: int = 3, n_tags: int = 4, seed: int = 0) -> float:
    """Share of sequences of a random chain whose term lies on the tail: 0 would test nothing."""
    return float((_margins(length, n_tags, seed) > surrogate.core).double().mean())


def least_distance(
    surrogate: LinearCore, *, length: int = 3, n_tags: int = 4, n_chains: int = 5
) -> float:
    """Least ``|margin - τ|`` over all sequences of the chains of ``sampling_bias``: far more than
    ``HINGE_SCALE``, so that there the tail is flat to the last digit."""
    margins = torch.cat([_margins(length, n_tags, seed) for seed in range(n_chains)])
    return float((margins - surrogate.core).abs().min())


def relative_variances(
    n_tags: Iterable[int], *, core: float, baseline: float = 1.0, length: int = 2
) -> dict[str, dict[int, float]]:
    """Variance of one sample of the emissions' gradient over the gradient's squared norm.

    Enumerated exactly on a random chain with scores of deviation 0.3, for both proposals. With a
    large ``core`` all sequences lie in it; with ``core=1`` some lie on the tail.

    Args:
        n_tags: the K to compute it for; ``K^T`` at most 65,536.
        core: τ; s = 1.
        baseline: of the control variate.
        length: T.

    Returns:
        By proposal and K.
    """
    found: dict[str, dict[int, float]] = {"uniform": {}, "near": {}}
    for k in n_tags:
        chain = Chain.random(length, k, seed=0, spread=0.3)
        for proposal, values in found.items():
            moments = gradient_variance(
                chain.emissions,
                chain.tags,
                chain.transitions,
                core=core,
                proposal=proposal,
                baseline=baseline,
            )
            norm = float(moments.emission_mean.square().sum())
            values[k] = float(moments.emission_variance) / norm
    return found
