"""Linear-Core losses for sequence tagging, with unbiased sampled gradients.

A linear chain scores a tag sequence ``y`` of length T as
``h(y) = Σ_t e_t(y_t) + Σ_{t≥2} A[y_{t-1}, y_t]``, with emissions ``e`` and one table ``A``. The
target loss is ``L(y', y) = Σ_t w[y_t]·[y'_t ≠ y_t]`` (Hamming's, weighted). There are two losses,
in the two forms of ``losses``:

* ``over="sequences"``, a sum over all K^T: ``Σ_{y'} L(y', y)·Φ(-h̃(y'))`` in the constrained form,
  ``Σ_{y'} L(y', y)·Φ(h(y) - h(y'))`` in the sum form;
* ``over="positions"``, with ``s_t(b) = e_t(b) + A[y_{t-1}, b]``, each position given the gold tag
  before it: ``Σ_t Σ_{b≠y_t} w[y_t]·Φ(-s̃_t(b))``, or ``Σ_t Σ_{b≠y_t} w[y_t]·Φ(s_t(y_t) - s_t(b))``.

A tilde marks scores that are centred, so that they sum to zero over all sequences, or over ``b``:
the constraint of Lee, Lin and Wahba (2004). The mean over all K^T sequences is exact and cheap,
``h̄ = Σ_t mean(e_t) + (T-1)·mean(A)``.

**Consistency.** In the constrained form, for a complete class of sequence scores, the target regret
is at most ``1/τ`` times the regret of the sum over sequences, so ``K^T/τ`` times that of the
average. Scores that factorise over a chain are not complete: there the bound carries
minimizability gaps. Over positions the constant is ``1/τ`` for the sum (``K/τ`` for the average),
for predictions given the tag before. The sum form has no linear bound for three or more outputs:
near ties the target regret is of the order of the root of the loss's regret.

**The sampled gradient** of the average over sequences. Draw ``y'`` from a proposal ``q`` and let
``r = K^(-T)/q(y')`` and ``g = -Φ'`` at its margin.

* Constrained: ``c·(∇h(y') - ∇h̄)`` with ``c = r·(L·g - b)`` is unbiased for every constant ``b``,
  since ``∇h - ∇h̄`` has mean zero under the uniform distribution: ``b`` is a control variate. In
  the core ``g = 1``, so ``b = E[L]`` removes most of the noise. ``h̄`` must be exact: a mean over
  the samples would stand inside ``Φ'``, and bias it.
* Sum: ``c·(∇h(y') - ∇h(y))`` with ``c = r·L·g``. ``∇h(y') - ∇h(y)`` has another mean than zero, so
  a control variate would bias it. Over positions a sample is one uniform tag at each of them.

**The cost** of a step does not contain K². In the sum form the gradient of ``A`` has entries at
sampled and gold pairs only. In the constrained form it has them at the sampled pairs, and ``-m`` in
all K² places (from ``∇h̄``): ``Transitions`` keeps that constant apart, as the gradient of one
scalar, and knows the mean of its table from a running sum.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .losses import (
    DTYPES,
    FORMS,
    REDUCTIONS,
    _reduce,
    _result_dtype,
    _work_dtype,
    linear_core_loss,
)
from .surrogates import LinearCore
from .transitions import Transitions, _total, check_tensor

OVER = ("sequences", "positions")
METHODS = ("sampled", "exact")
PROPOSALS = ("near", "uniform")

# Sequences that enumeration may visit, for each sequence of the batch.
MOST_SEQUENCES = 2**16


def structured_linear_core_loss(
    emissions: Tensor,
    tags: Tensor,
    transitions: Tensor | Transitions,
    *,
    mask: Tensor | None = None,
    core: float = 1.0,
    scale: float = 1.0,
    tail: str = "exponential",
    over: str = "sequences",
    form: str = "constrained",
    method: str | None = None,
    samples: int = 8,
    proposal: str | None = None,
    keep: float | None = None,
    baseline: float | None = None,
    average: bool = True,
    reduction: str = "mean",
    tag_weight: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Linear-Core loss of tag sequences under a linear chain.

    Args:
        emissions: ``[B, T, K]`` scores, T ≥ 1, K ≥ 2; float32 or float64, or half precision, which
            is computed in float32. Any strides.
        tags: ``[B, T]`` gold tags, any integer type; masked positions may hold anything.
        transitions: ``[K, K]`` tensor with ``A[i, j]`` the score of tag j after tag i; its gradient
            is the true, dense one. Or ``Transitions``, for gradients that touch few entries.
        mask: ``[B, T]`` bool, True on the first ``T_b ≥ 1`` positions of each sequence; None means
            all. What emissions and tags hold elsewhere does not matter.
        core: ``τ > 0``, end of the surrogate's linear part.
        scale: ``s > 0``, decay length of its tail.
        tail: ``"exponential"``, ``"gamma"`` or ``"logistic"``.
        over: ``"sequences"``: terms for all K^T sequences; or ``"positions"``: terms for all K tags
            of each position, given the gold tag before it.
        form: ``"constrained"``: scores centred by their mean over all alternatives; or ``"sum"``:
            margins between the gold score and those of the alternatives.
        method: ``"sampled"`` (default for sequences) or ``"exact"`` (default for positions). Exact
            sums over sequences visit all K^T of them: at most 65,536. Over positions only the sum
            form can be sampled.
        samples: sampled alternatives for each sequence of the batch: sequences, or a tag for each
            of its positions.
        proposal: over sequences ``"near"`` (default): each position keeps its gold tag with
            probability ``keep``, else draws one of all K; or ``"uniform"``, which meets the gold
            tag in one position out of K only. See below for their variances. Over positions
            ``"uniform"`` is the only one.
        keep: in [0, 1); by default ``1/(T_b + 1)``, which keeps all importance weights below e. Far
            above it they reach ``(1 - keep)^(-T)``, and nearly all samples get nearly none.
        baseline: the control variate of the constrained form is ``baseline`` times the mean of L
            over all sequences; by default 1, the slope of the core. 0 means none, and is the only
            choice for the sum form, whose gradient it would bias.
        average: divide by the number of alternatives, K^T or K. Samples over sequences need it.
        reduction: over the batch: ``"none"`` (``[B]``), ``"sum"`` or ``"mean"``.
        tag_weight: ``[K]`` positive weights ``w`` of the gold tags, a constant; ones by default.
        generator: source of the samples, on the device of the emissions.

    Returns:
        A scalar, or ``[B]`` for ``"none"``; dtype that of the emissions, or float32 for half
        precision under autocast. The mean over an empty batch is NaN, its sum 0. Sampled: value
        and gradient are unbiased estimates of the exact ones.

    Linear consistency of the constrained form, for a complete class of sequence scores: ``1/τ`` for
    the sum over sequences, ``K^T/τ`` for its average. Factorised scores, as these, are not
    complete, so minimizability gaps stay. Over positions, ``1/τ`` for the sum and ``K/τ`` for the
    average, given the previous tag. The sum form has no linear bound for three or more outputs
    (quadratic near ties), though it learns better with factorised scores.

    **Which form.** Take the constrained one where the linear bound matters and the scores are rich:
    in the core its gradient only counts, and on the chapter's synthetic task of 100 tags it gets no
    further than the best tagger that looks at words alone. Take the sum form to train a chain: over
    positions it gets nearly as far there as the structured SVM.

    Within the core (all ``|h̃| ≤ τ``) the gradient of the constrained average over sequences is
    linear in the tags' counts: emissions get ``(w/K)·(1/K - [a = y_t])``, and the table a row part
    plus a column part. Pair interactions are learned from the tail alone, or over positions.

    Variance of the emissions' gradient, of one sample, relative to its squared norm, in the core:

    * constrained, ``baseline=1``: ``T·(K-1) - 1`` for ``"uniform"``, and below ``2e·T²`` for
      ``"near"`` whatever K is, so ``"near"`` is better from ``K ≈ 2e·T`` on. With ``baseline=0``
      both grow with K².
    * sum, equal weights: between 1 and 1.25 for ``"uniform"``, below ``2.25e`` for ``"near"``,
      whatever K and T are. Over positions it is 1.

    What comes from ``g`` once many sequences leave the core can be far larger: then neither
    proposal helps, a larger ``core`` does. ``gradient_variance`` computes it for small problems.

    NaN and infinite scores at valid positions give a NaN loss in the constrained form, never a
    finite one. In the sum form they do so at gold tags and pairs; elsewhere ``-inf`` contributes
    nothing, and ``+inf`` and NaN give a loss that is not finite. A sampled sum sees the sampled
    scores only. The sampled loss has first derivatives only.

    Raises:
        TypeError: arguments that are no dense tensors, emissions, transitions or weights not
            floating, ``Transitions`` in half precision, tags not integer, mask not bool, a
            generator that is not torch's, ``keep`` or ``baseline`` not a number.
        ValueError: shapes, devices, K < 2, T < 1, a mask that is not a prefix or has an empty row,
            weights not positive (or not in the working precision), unknown options, ``"sampled"``
            or ``"near"`` where it has no meaning, a baseline for the sum form, or ``"exact"`` where
            K^T is above the limit.
        IndexError: a tag outside [0, K) at a valid position.
        RuntimeError: in the backward pass of the sampled loss, for ``create_graph=True``; or if
            tags or mask were overwritten since the forward pass.

    Example:
        >>> emissions, tags = torch.zeros(1, 3, 5), torch.tensor([[0, 4, 2]])
        >>> structured_linear_core_loss(emissions, tags, torch.zeros(5, 5), method="exact")
        tensor(4.8000)
    """
    options = _Options(
        surrogate=LinearCore(core, scale, tail),
        over=over,
        form=form,
        method=_method(method, over),
        samples=samples,
        proposal=_proposal(proposal, over),
        keep=keep,
        baseline=_baseline(baseline, form),
        average=average,
        reduction=reduction,
    )
    return _loss(emissions, tags, transitions, mask, tag_weight, options, generator)


class StructuredLinearCoreLoss(nn.Module):
    """Module twin of ``structured_linear_core_loss``: same arguments, same results, same errors.

    ``tag_weight`` is a buffer, so it moves with the module; it is checked here already.

    Example:
        >>> transitions = Transitions(1000)
        >>> criterion = StructuredLinearCoreLoss(samples=8)
        >>> emissions = torch.zeros(4, 32, 1000, requires_grad=True)
        >>> criterion(emissions, torch.zeros(4, 32, dtype=torch.long), transitions).backward()
        >>> transitions.apply_gradient(lr=0.1)  # touches the sampled pairs only
    """

    tag_weight: Tensor | None

    def __init__(
        self,
        *,
        core: float = 1.0,
        scale: float = 1.0,
        tail: str = "exponential",
        over: str = "sequences",
        form: str = "constrained",
        method: str | None = None,
        samples: int = 8,
        proposal: str | None = None,
        keep: float | None = None,
        baseline: float | None = None,
        average: bool = True,
        reduction: str = "mean",
        tag_weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        if tag_weight is not None:
            check_tensor("tag_weight", tag_weight)
            _check_tag_weight(tag_weight, None, tag_weight.dtype)
        self.options = _Options(
            surrogate=LinearCore(core, scale, tail),
            over=over,
            form=form,
            method=_method(method, over),
            samples=samples,
            proposal=_proposal(proposal, over),
            keep=keep,
            baseline=_baseline(baseline, form),
            average=average,
            reduction=reduction,
        )
        self.register_buffer("tag_weight", tag_weight)

    def forward(
        self,
        emissions: Tensor,
        tags: Tensor,
        transitions: Tensor | Transitions,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The loss of a batch; see ``structured_linear_core_loss``."""
        return _loss(emissions, tags, transitions, mask, self.tag_weight, self.options, generator)

    def extra_repr(self) -> str:
        """The settings, for ``print(module)``."""
        o, phi = self.options, self.options.surrogate
        text = f"core={phi.core}, scale={phi.scale}, tail={phi.tail!r}, over={o.over!r}, "
        text += f"form={o.form!r}, "
        if o.method == "sampled":
            text += f"samples={o.samples}, proposal={o.proposal!r}, keep={o.keep}, "
            text += f"baseline={o.baseline}, "
        return text + f"method={o.method!r}, average={o.average}, reduction={o.reduction!r}"


def enumerate_sequences(
    length: int, classes: int, *, device: torch.device | str | None = None
) -> Tensor:
    """All tag sequences in lexicographic order, ``[K^T, T]`` int64.

    Raises:
        ValueError: ``length`` or ``classes`` below 1, or more than 65,536 sequences.

    Example:
        >>> enumerate_sequences(2, 2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    if length < 1 or classes < 1:
        raise ValueError(f"length and classes must be at least 1, got {length} and {classes}")
    count = classes**length
    if count > MOST_SEQUENCES:
        raise ValueError(
            f"there are K^T = {classes}^{length} sequences, more than {MOST_SEQUENCES} that can be "
            "enumerated: use method='sampled', or fewer tags or positions"
        )
    powers = classes ** torch.arange(length - 1, -1, -1, device=device)  # [T]
    return torch.arange(count, device=device)[:, None] // powers % classes


@dataclass(frozen=True)
class GradientMoments:
    """Mean and variance of the sampled gradient, sequence by sequence, for one sample each.

    With S samples the variances are S times smaller.

    Attributes:
        emission_mean: ``[B, T, K]``; equals the exact gradient of the averaged loss.
        emission_variance: ``[B]``, trace of the covariance, that is the sum of all variances.
        transition_mean: ``[B, K, K]``, likewise.
        transition_variance: ``[B]``, likewise.
    """

    emission_mean: Tensor
    emission_variance: Tensor
    transition_mean: Tensor
    transition_variance: Tensor


@torch.no_grad()
def gradient_variance(
    emissions: Tensor,
    tags: Tensor,
    transitions: Tensor | Transitions,
    *,
    mask: Tensor | None = None,
    core: float = 1.0,
    scale: float = 1.0,
    tail: str = "exponential",
    form: str = "constrained",
    proposal: str = "near",
    keep: float | None = None,
    baseline: float | None = None,
    tag_weight: Tensor | None = None,
) -> GradientMoments:
    """Moments of the sampled gradient over sequences, by exact enumeration of the samples.

    Arguments as for ``structured_linear_core_loss``; computed in float64, and for problems with at
    most 65,536 sequences. A sample is ``c·D``, so its second moment is ``Σ q·c²·‖D‖²``. With ``n``
    the counts of the pairs in ``y'``, ``n*`` those in ``y``:

    * constrained, ``D = ∇h(y') - ∇h̄``: ``‖D‖²`` is ``T·(1 - 1/K)`` for the emissions, and
      ``Σ n² - (T-1)²/K²`` for the transitions;
    * sum, ``D = ∇h(y') - ∇h(y)``: twice the number of mismatches, and ``Σ (n - n*)²``.

    Returns:
        The moments for the loss of each sequence, per sample.

    Raises:
        ValueError: an empty batch, too many sequences, and as ``structured_linear_core_loss``.
        TypeError: as ``structured_linear_core_loss``.
        IndexError: likewise.
    """
    options = _Options(
        surrogate=LinearCore(core, scale, tail),
        over="sequences",
        form=form,
        method="sampled",
        samples=1,
        proposal=proposal,
        keep=keep,
        baseline=_baseline(baseline, form),
        average=True,
        reduction="none",
    )
    _check_types(emissions, tags, transitions, mask, tag_weight, None)
    batch = _checked_batch(emissions, tags, transitions, mask, tag_weight, torch.float64)
    if not len(tags):
        raise ValueError("emissions hold no sequence (B = 0): there is nothing to enumerate")
    _check_exact(batch)
    table, _ = _parts(transitions)
    centre = _total(table) / table.numel() if form == "constrained" else None
    chain = _Chain(emissions.double(), table.double(), centre)
    parts = [_moments(*_one(chain, batch, b), options) for b in range(len(tags))]
    size = emissions.shape[1]
    return GradientMoments(
        emission_mean=torch.cat(
            [F.pad(p.emission_mean, (0, 0, 0, size - p.emission_mean.shape[1])) for p in parts]
        ),
        emission_variance=torch.stack([p.emission_variance for p in parts]),
        transition_mean=torch.stack([p.transition_mean for p in parts]),
        transition_variance=torch.stack([p.transition_variance for p in parts]),
    )


def _moments(chain: _Chain, batch: _Batch, options: _Options) -> GradientMoments:
    """The moments for one sequence without mask."""
    k, length = batch.classes, batch.tags.shape[1]
    samples = enumerate_sequences(length, k, device=batch.tags.device).T[None]  # [1, T, K^T]
    terms = _terms(chain, batch, samples, options)
    chance = float(k) ** -length / terms.ratio  # q, [1, 1, K^T]
    first, second = chance * terms.coefficient, chance * terms.coefficient**2
    emission = _emission_gradient(first, samples, batch, options)
    pairs = _pairs(first, samples, batch, options)
    transition = _dense_gradient(pairs, _constant(pairs, batch, options), k)
    of_emission, of_transition = _squared_norms(samples, batch, options)
    return GradientMoments(
        emission_mean=emission,
        emission_variance=(second * of_emission).sum() - emission.square().sum(),
        transition_mean=transition,
        transition_variance=(second * of_transition).sum() - transition.square().sum(),
    )


def _squared_norms(samples: Tensor, batch: _Batch, options: _Options) -> tuple[Tensor, Tensor]:
    """``‖D‖²`` by the emissions and by the table for samples ``[1, T, N]``, both to ``[N]``."""
    k, length, tags = batch.classes, batch.tags.shape[1], batch.tags[:, :, None]
    code = samples[0, :-1] * k + samples[0, 1:]  # [T-1, N]
    same = (code[:, None] == code[None, :]).sum((0, 1)).double()  # Σ n²
    if options.form == "constrained":
        of_emission = torch.full_like(same, length * (1 - 1 / k))
        return of_emission, same - ((length - 1) / k) ** 2
    gold = tags[0, :-1] * k + tags[0, 1:]  # [T-1, 1]
    shared = (code[:, None] == gold[None, :]).sum((0, 1)).double()  # Σ n·n*
    of_gold = (gold == gold.T).sum()  # Σ n*²
    return 2 * (samples != tags).sum((0, 1)).double(), same - 2 * shared + of_gold


# --- options and checks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """All options that are not tensors, checked."""

    surrogate: LinearCore
    over: str
    form: str
    method: str
    samples: int
    proposal: str
    keep: float | None
    baseline: float
    average: bool
    reduction: str

    def __post_init__(self) -> None:
        _check_choice("over", self.over, OVER)
        _check_choice("form", self.form, FORMS)
        _check_choice("method", self.method, METHODS)
        _check_choice("proposal", self.proposal, PROPOSALS)
        _check_choice("reduction", self.reduction, REDUCTIONS)
        if self.method == "sampled":
            _check_sampled(self.over, self.form, self.average)
        if self.over == "positions" and self.proposal != "uniform":
            raise ValueError(
                f"proposal={self.proposal!r} has no meaning for over='positions', which draws "
                "single tags, uniformly: leave it out"
            )
        object.__setattr__(self, "samples", _sample_count(self.samples))
        _check_baseline(self.baseline, self.form)
        if self.keep is not None:
            _check_keep(self.keep, self.proposal)


def _method(method: str | None, over: str) -> str:
    if method is not None:
        return method
    return "exact" if over == "positions" else "sampled"


def _proposal(proposal: str | None, over: str) -> str:
    if proposal is not None:
        return proposal
    return "uniform" if over == "positions" else "near"


def _baseline(baseline: float | None, form: str) -> float:
    if baseline is not None:
        return baseline
    return 0.0 if form == "sum" else 1.0


def _sample_count(samples: object) -> int:
    """Any integer type, NumPy's as well."""
    try:
        count = operator.index(samples)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"samples must be an integer ≥ 1, got {samples!r}")
    return count


def _check_real(name: str, value: object) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}: pass float({name})")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _check_sampled(over: str, form: str, average: bool) -> None:
    if over == "positions" and form == "constrained":
        raise ValueError(
            "method='sampled' over positions needs form='sum': in the constrained form the mean "
            "over all tags stands inside Φ, so it must be exact, and then the whole loss is exact "
            "at the same cost; leave method out"
        )
    if over == "sequences" and not average:
        raise ValueError(
            "average=False needs method='exact': the sum over sequences is K^T times the average, "
            "which no sample can stand for in floating point"
        )


def _check_baseline(baseline: float, form: str) -> None:
    _check_real("baseline", baseline)
    if not math.isfinite(baseline):
        raise ValueError(f"baseline must be finite (1 or 0, mostly), got {baseline!r}")
    if form == "sum" and baseline != 0:
        raise ValueError(
            f"baseline must be 0 for form='sum', got {baseline!r}: the mean of ∇h(y') - ∇h(y) is "
            "not zero, so a control variate would bias the gradient; leave it out"
        )


def _check_keep(keep: float, proposal: str) -> None:
    _check_real("keep", keep)
    if proposal == "uniform":
        raise ValueError("keep belongs to proposal='near': leave it out for 'uniform'")
    if not 0 <= keep < 1:
        raise ValueError(
            f"keep must lie in [0, 1), got {keep!r}: at 1 only the gold tags would be drawn"
        )


class _Batch(NamedTuple):
    """Tags, mask and weights that were checked."""

    tags: Tensor  # [B, T] int64, 0 where masked
    mask: Tensor | None  # [B, T] bool, None if all positions are valid
    lengths: Tensor  # [B] int64
    weight: Tensor  # [B, T] w[y_t] in the working dtype, 0 where masked
    classes: int


def _check_types(
    emissions: Tensor,
    tags: Tensor,
    transitions: Tensor | Transitions,
    mask: Tensor | None,
    tag_weight: Tensor | None,
    generator: torch.Generator | None,
) -> None:
    """Refuse what is no tensor, or not dense, before anything looks inside."""
    if isinstance(transitions, Transitions):
        transitions.check_dtype()
    table, _ = _parts(transitions)
    check_tensor("emissions", emissions)
    check_tensor("tags", tags)
    check_tensor("transitions", table)
    for name, tensor in {"mask": mask, "tag_weight": tag_weight}.items():
        if tensor is not None:
            check_tensor(name, tensor)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {type(generator).__name__}: pass "
            "torch.Generator(device).manual_seed(seed)"
        )


class _Gold(NamedTuple):
    """The part of a batch that gradients need."""

    tags: Tensor  # [B, T] int64, 0 where masked
    mask: Tensor | None  # [B, T] bool, None if all positions are valid
    classes: int


def _checked_batch(
    emissions: Tensor,
    tags: Tensor,
    transitions: Tensor | Transitions,
    mask: Tensor | None,
    tag_weight: Tensor | None,
    work: torch.dtype,
) -> _Batch:
    _check_emissions(emissions)
    b, t, k = emissions.shape
    _check_tags(tags, (b, t))
    table = _check_transitions(transitions, k)
    if mask is not None:
        _check_mask(mask, (b, t))
    if tag_weight is not None:
        _check_tag_weight(tag_weight, k, work)
    others = {"tags": tags, "transitions": table, "mask": mask, "tag_weight": tag_weight}
    for name, tensor in others.items():
        if tensor is not None and tensor.device != emissions.device:
            raise ValueError(
                f"{name} must be on {emissions.device} with the emissions, not on {tensor.device}: "
                "move one of them"
            )
    tags = _valid_tags(tags, mask, k)
    lengths = torch.full_like(tags[:, 0], t) if mask is None else mask.sum(1)
    return _Batch(tags, mask, lengths, _position_weight(tags, mask, tag_weight, work), k)


def _check_emissions(emissions: Tensor) -> None:
    if emissions.dtype not in DTYPES:
        raise TypeError(
            f"emissions must be float16, bfloat16, float32 or float64, got {emissions.dtype}"
        )
    if emissions.dim() != 3:
        raise ValueError(f"emissions must have shape [B, T, K], got {tuple(emissions.shape)}")
    if emissions.shape[1] < 1:
        raise ValueError("emissions must have at least 1 position, got T = 0")
    if emissions.shape[2] < 2:
        raise ValueError(f"emissions must have at least 2 tags, got K = {emissions.shape[2]}")


def _check_tags(tags: Tensor, shape: tuple[int, int]) -> None:
    if tags.is_floating_point() or tags.is_complex() or tags.dtype == torch.bool:
        raise TypeError(f"tags must hold integer tag indices, got {tags.dtype}")
    if tags.shape != shape:
        raise ValueError(f"tags must have shape [B, T] = {shape}, got {tuple(tags.shape)}")


def _check_transitions(transitions: Tensor | Transitions, classes: int) -> Tensor:
    table, _ = _parts(transitions)
    if not table.is_floating_point():
        raise TypeError(f"transitions must be floating point, got {table.dtype}")
    if table.shape != (classes, classes):
        raise ValueError(
            f"transitions must have shape ({classes}, {classes}) for emissions with K = {classes}, "
            f"got {tuple(table.shape)}"
        )
    return table


def _check_mask(mask: Tensor, shape: tuple[int, int]) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}: pass mask.bool()")
    if mask.shape != shape:
        raise ValueError(f"mask must have shape [B, T] = {shape}, got {tuple(mask.shape)}")
    if not bool(mask[:, 0].all()):
        raise ValueError("mask has a row without a valid first position: drop empty sequences")
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError("mask must be True on a prefix of each row: move padding to the end")


def _check_tag_weight(tag_weight: Tensor, classes: int | None, work: torch.dtype) -> None:
    """Check ``[K]`` weights, for any K if None, as they are in the working dtype."""
    if not tag_weight.is_floating_point():
        raise TypeError(f"tag_weight must be floating point, got {tag_weight.dtype}")
    shape = tuple(tag_weight.shape)
    if classes is None and len(shape) != 1:
        raise ValueError(f"tag_weight must have shape [K], got {shape}")
    if classes is not None and shape != (classes,):
        raise ValueError(f"tag_weight must have shape ({classes},), got {shape}")
    if tag_weight.requires_grad:
        raise ValueError("tag_weight is a constant of the loss: pass tag_weight.detach()")
    weight = tag_weight.to(work)
    if not bool(((weight > 0) & (weight < math.inf)).all()):
        raise ValueError(
            f"tag_weight must be finite and positive in {work}, the precision of the work: "
            "rescale it, or mask positions out instead"
        )


def _valid_tags(tags: Tensor, mask: Tensor | None, classes: int) -> Tensor:
    """``[B, T]`` int64, 0 where masked, after a look at the range."""
    tags = tags.long()
    if mask is not None:
        tags = tags.masked_fill(~mask, 0)
    if tags.numel():
        low, high = (int(end) for end in tags.aminmax())
        if low < 0 or high >= classes:
            raise IndexError(
                f"tag {low if low < 0 else high} is out of range for {classes} tags: mask the "
                "positions that do not count"
            )
    return tags


def _position_weight(
    tags: Tensor, mask: Tensor | None, tag_weight: Tensor | None, work: torch.dtype
) -> Tensor:
    if tag_weight is not None:
        weight = tag_weight.to(work)[tags]
        return weight if mask is None else weight.masked_fill(~mask, 0)
    return torch.ones_like(tags, dtype=work) if mask is None else mask.to(work)


def _parts(transitions: Tensor | Transitions) -> tuple[Tensor, Tensor | None]:
    """The table, and the parameter for the gradient's constant part if there is one."""
    if isinstance(transitions, Transitions):
        return transitions.table, transitions.offset
    return transitions, None


# --- the loss -------------------------------------------------------------------------------------


def _loss(
    emissions: Tensor,
    tags: Tensor,
    transitions: Tensor | Transitions,
    mask: Tensor | None,
    tag_weight: Tensor | None,
    options: _Options,
    generator: torch.Generator | None,
) -> Tensor:
    _check_types(emissions, tags, transitions, mask, tag_weight, generator)
    work = _work_dtype(emissions.dtype)
    batch = _checked_batch(emissions, tags, transitions, mask, tag_weight, work)
    dtype = _result_dtype(emissions)
    emissions = emissions.to(work)
    if options.method == "sampled":
        samples = _propose(batch, options, generator)
        rows = _sampled(emissions, transitions, batch, samples, options)
    elif options.over == "positions":
        rows = _positions(emissions, transitions, batch, tag_weight, options)
    else:
        rows = _exact(emissions, transitions, batch, options)
    return _reduce(rows, options.reduction, float(len(tags))).to(dtype)


def _positions(
    emissions: Tensor,
    transitions: Tensor | Transitions,
    batch: _Batch,
    tag_weight: Tensor | None,
    options: _Options,
) -> Tensor:
    """Losses over positions, ``[B]``: a multi-class loss each, given the gold tag before."""
    # The offset is not needed: a constant changes neither centred scores nor margins.
    table, offset = _parts(transitions)
    if offset is None:  # a table in half precision would add up its gradient in that
        table = table.to(torch.promote_types(table.dtype, emissions.dtype))
    before = F.embedding(batch.tags[:, :-1], table, sparse=offset is not None)  # [B, T-1, K]
    later = emissions[:, 1:] + before.to(emissions.dtype)
    scores = torch.cat([emissions[:, :1], later], 1)
    target = batch.tags if batch.mask is None else batch.tags.masked_fill(~batch.mask, -100)
    phi = options.surrogate
    losses = linear_core_loss(
        scores.flatten(0, 1),
        target.flatten(),
        core=phi.core,
        scale=phi.scale,
        tail=phi.tail,
        form=options.form,
        reduction="none",
        class_weight=tag_weight,
    )
    rows = losses.view(target.shape).sum(1)
    return rows / batch.classes if options.average else rows


class _Chain(NamedTuple):
    """Scores of a batch."""

    emissions: Tensor  # [B, T, K]
    table: Tensor  # [K, K]
    centre: Tensor | None  # [], the table's mean; None in the sum form


def _exact(
    emissions: Tensor, transitions: Tensor | Transitions, batch: _Batch, options: _Options
) -> Tensor:
    """Sums (or averages) over all sequences, ``[B]``, by ordinary differentiable operations."""
    _check_exact(batch)
    table = _parts(transitions)[0].to(emissions.dtype)
    chain = _Chain(emissions, table, table.mean() if options.form == "constrained" else None)
    rows = [_enumerate(*_one(chain, batch, b), options) for b in range(len(emissions))]
    return torch.cat(rows) if rows else emissions.sum((1, 2))


def _check_exact(batch: _Batch) -> None:
    """Refuse before any work what cannot be enumerated."""
    longest = int(batch.lengths.max()) if len(batch.lengths) else 1
    if batch.classes**longest > MOST_SEQUENCES:
        enumerate_sequences(longest, batch.classes)  # raises


def _one(chain: _Chain, batch: _Batch, row: int) -> tuple[_Chain, _Batch]:
    """One sequence, cut to its length."""
    part = slice(row, row + 1)
    length = int(batch.lengths[row])
    emissions = chain.emissions[part, :length]
    tags, weight = batch.tags[part, :length], batch.weight[part, :length]
    cut = batch._replace(tags=tags, mask=None, lengths=batch.lengths[part], weight=weight)
    return chain._replace(emissions=emissions), cut


def _enumerate(chain: _Chain, batch: _Batch, options: _Options) -> Tensor:
    """The loss of one sequence over all alternatives, ``[1]``."""
    length = batch.tags.shape[1]
    samples = enumerate_sequences(length, batch.classes, device=batch.tags.device).T[None]
    margins = _margins(chain, batch, samples, options)  # [1, 1, K^T]
    terms = (_target_loss(batch, samples, options) * options.surrogate(margins))[:, 0]
    return terms.mean(1) if options.average else terms.sum(1)


def _target_loss(batch: _Batch, samples: Tensor, options: _Options) -> Tensor:
    """``L`` of the samples ``[B, T, S]``: ``[B, 1, S]``; or of each position, ``[B, T, S]``."""
    losses = (samples != batch.tags[:, :, None]) * batch.weight[:, :, None]
    return losses.sum(1, keepdim=True) if options.over == "sequences" else losses


def _margins(chain: _Chain, batch: _Batch, samples: Tensor, options: _Options) -> Tensor:
    """What stands inside ``Φ`` for the samples ``[B, T, S]``: ``[B, 1, S]``, or ``[B, T, S]``.

    Each term is subtracted from its own mean, or gold score, so that large common constants cancel
    before they round.
    """
    tags = batch.tags[:, :, None]
    unary, pair = _references(chain, tags)
    before = samples if options.over == "sequences" else tags
    scores = chain.table[before[:, :-1], samples[:, 1:]].to(unary.dtype)  # [B, T-1, S]
    margins = _below(unary, chain.emissions.gather(2, samples))
    margins = margins + F.pad(_below(pair.to(unary.dtype), scores), (0, 0, 1, 0))
    if batch.mask is not None:
        margins = margins.masked_fill(~batch.mask[:, :, None], 0)
    return margins.sum(1, keepdim=True) if options.over == "sequences" else margins


def _references(chain: _Chain, tags: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``[B, T, 1]`` and ``[]``; in the sum form gold scores, ``[B, T, 1], [B, T-1, 1]``."""
    if chain.centre is not None:
        return chain.emissions.mean(2, keepdim=True), chain.centre
    return chain.emissions.gather(2, tags), chain.table[tags[:, :-1], tags[:, 1:]]


def _below(reference: Tensor, scores: Tensor) -> Tensor:
    """``reference - scores``; NaN unless the reference is finite."""
    return reference + (reference - reference) - scores


# --- sampling -------------------------------------------------------------------------------------


def _propose(batch: _Batch, options: _Options, generator: torch.Generator | None) -> Tensor:
    """Sampled alternatives, ``[B, T, S]`` int64; those at masked positions do not matter."""
    shape, device = (*batch.tags.shape, options.samples), batch.tags.device
    draws = torch.randint(batch.classes, shape, generator=generator, device=device)
    if options.proposal == "uniform":
        return draws
    # Not torch's default dtype: with the 8 bits of bfloat16 the chances would be others.
    uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
    kept = uniform < _keep(batch, options)[..., None]
    return torch.where(kept, batch.tags[:, :, None], draws)


def _keep(batch: _Batch, options: _Options) -> Tensor:
    """Chance to keep the gold tag, ``[B, 1]`` float64."""
    if options.proposal == "uniform":
        return torch.zeros_like(batch.lengths, dtype=torch.float64)[:, None]
    if options.keep is not None:
        return torch.full_like(batch.lengths, options.keep, dtype=torch.float64)[:, None]
    return 1 / (batch.lengths.double() + 1)[:, None]


def _ratio(mismatches: Tensor, batch: _Batch, options: _Options) -> Tensor:
    """Importance weights ``K^(-T)/q(y')`` from the numbers of mismatches, ``[B, S]`` float64.

    A position differs from gold in a given way with chance ``(1 - keep)/K`` and agrees with chance
    ``(1 + keep·(K - 1))/K``; both over ``1/K``, inverted, are its factors.
    """
    keep = _keep(batch, options)
    matches = batch.lengths[:, None] - mismatches
    log = mismatches * torch.log1p(-keep) + matches * torch.log1p(keep * (batch.classes - 1))
    return torch.exp(-log)


class _Terms(NamedTuple):
    """Estimates from single samples, ``[B, 1, S]`` for sequences or ``[B, T, S]`` for positions."""

    value: Tensor  # r·L·Φ
    coefficient: Tensor  # c = r·(L·g - b)
    ratio: Tensor  # r, [B, 1, S]


def _terms(chain: _Chain, batch: _Batch, samples: Tensor, options: _Options) -> _Terms:
    """What each of the samples ``[B, T, S]`` contributes to value and gradient."""
    margin = _margins(chain, batch, samples, options)
    target_loss = _target_loss(batch, samples, options)
    mismatch = samples != batch.tags[:, :, None]  # [B, T, S]
    if batch.mask is not None:
        mismatch &= batch.mask[:, :, None]
    # 1 over positions: their proposal is uniform.
    ratio = _ratio(mismatch.sum(1), batch, options).to(margin.dtype)[:, None]
    mean_loss = (1 - 1 / batch.classes) * batch.weight.sum(1)  # [B], over all sequences
    slope = -options.surrogate.derivative(margin)
    return _Terms(
        value=ratio * target_loss * options.surrogate(margin),
        coefficient=ratio * (target_loss * slope - options.baseline * mean_loss[:, None, None]),
        ratio=ratio,
    )


def _sampled(
    emissions: Tensor,
    transitions: Tensor | Transitions,
    batch: _Batch,
    samples: Tensor,
    options: _Options,
) -> Tensor:
    """Estimates of the losses, ``[B]``, from given samples ``[B, T, S]``."""
    table, offset = _parts(transitions)
    centre = _centre(transitions) if options.form == "constrained" else None
    rows: Tensor = _SampledLoss.apply(emissions, table, offset, centre, batch, samples, options)
    return rows if options.average else rows * batch.classes  # only over positions


def _centre(transitions: Tensor | Transitions) -> Tensor:
    if isinstance(transitions, Transitions):
        return transitions._table_mean()
    return _total(transitions) / transitions.numel()


class _SampledLoss(torch.autograd.Function):
    """Mean over the samples; the gradient is that of the estimator, not of this mean."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        emissions: Tensor,
        table: Tensor,
        offset: Tensor | None,
        centre: Tensor | None,
        batch: _Batch,
        samples: Tensor,
        options: _Options,
    ) -> Tensor:
        terms = _terms(_Chain(emissions, table, centre), batch, samples, options)
        # Tags and mask may be the caller's own: saved ones are refused if overwritten since.
        saved = (terms.coefficient, samples, batch.tags, batch.mask)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]
        ctx.classes, ctx.options = batch.classes, options  # type: ignore[attr-defined]
        ctx.dtype = table.dtype  # type: ignore[attr-defined]
        ctx.offset_dtype = None if offset is None else offset.dtype  # type: ignore[attr-defined]
        return terms.value.mean(2).sum(1)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def,override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the sampled structured_linear_core_loss has no second derivatives "
                "(create_graph=True): use method='exact' on a small problem"
            )
        coefficient, samples, tags, mask = ctx.saved_tensors
        batch, options = _Gold(tags, mask, ctx.classes), ctx.options
        coefficient = coefficient * (upstream / samples.shape[2])[:, None, None]
        for_emissions, for_table, for_offset, *_ = ctx.needs_input_grad
        emission = table = offset = None
        if for_emissions:
            emission = _emission_gradient(coefficient, samples, batch, options)
        if for_table or for_offset:
            pairs = _pairs(coefficient, samples, batch, options)
            # A dense gradient adds up in the wider dtype and rounds once, at the end.
            dense = ctx.offset_dtype is None
            wide = torch.promote_types(pairs.values.dtype, ctx.dtype) if dense else ctx.dtype
            pairs = pairs._replace(values=pairs.values.to(wide))
            constant = _constant(pairs, batch, options)
            if dense:
                table = _dense_gradient(pairs, constant, batch.classes).to(ctx.dtype)
            else:
                table = _sparse_gradient(pairs, batch.classes)
                offset = None if constant is None else -constant.to(ctx.offset_dtype)
        return emission, table, offset, None, None, None, None


def _emission_gradient(
    coefficient: Tensor, samples: Tensor, batch: _Batch | _Gold, options: _Options
) -> Tensor:
    """``Σ_s c_s·D_s`` by the emissions, ``[B, T, K]``, for ``c`` of ``[B, 1 or T, S]``."""
    values = _at_positions(coefficient, samples, batch)
    total = values.sum(2, keepdim=True)  # [B, T, 1]
    shape = (*batch.tags.shape, batch.classes)
    if options.form == "constrained":
        gradient = (total / -batch.classes).expand(shape).contiguous()
    else:
        gradient = values.new_zeros(shape).scatter_(2, batch.tags[:, :, None], -total)
    return gradient.scatter_add_(2, samples, values)


def _at_positions(coefficient: Tensor, samples: Tensor, batch: _Batch | _Gold) -> Tensor:
    """The coefficients of every position, ``[B, T, S]``, 0 where masked (a NaN as well)."""
    values = coefficient.expand(samples.shape)
    return values if batch.mask is None else torch.where(batch.mask[:, :, None], values, 0)


class _Pairs(NamedTuple):
    """Entries of a sparse ``[K, K]`` matrix, with duplicates."""

    before: Tensor  # [n]
    after: Tensor  # [n]
    values: Tensor  # [n]


def _pairs(
    coefficient: Tensor, samples: Tensor, batch: _Batch | _Gold, options: _Options
) -> _Pairs:
    """``Σ_s c_s·D_s`` by the table, but for the part of ``∇h̄``, which ``_constant`` gives."""
    tags = batch.tags[:, :, None]
    before = (samples if options.over == "sequences" else tags.expand(samples.shape))[:, :-1]
    after = samples[:, 1:]  # [B, T-1, S]
    values = _at_positions(coefficient, samples, batch)[:, 1:]
    if options.form == "sum":
        before, after = torch.cat([before, tags[:, :-1]], 2), torch.cat([after, tags[:, 1:]], 2)
        values = torch.cat([values, -values.sum(2, keepdim=True)], 2)  # [B, T-1, S+1]
    return _Pairs(before.reshape(-1), after.reshape(-1), values.reshape(-1))


def _constant(pairs: _Pairs, batch: _Batch | _Gold, options: _Options) -> Tensor | None:
    """What ``∇h̄`` takes from each of the K² entries, ``[]`` float64; None in the sum form."""
    if options.form == "sum":
        return None
    return pairs.values.sum(dtype=torch.float64) / batch.classes**2


def _dense_gradient(pairs: _Pairs, constant: Tensor | None, classes: int) -> Tensor:
    if constant is None:
        full = pairs.values.new_zeros(classes, classes)
    else:
        full = constant.neg().to(pairs.values.dtype).expand(classes, classes).contiguous()
    return full.index_put_((pairs.before, pairs.after), pairs.values, accumulate=True)


def _sparse_gradient(pairs: _Pairs, classes: int) -> Tensor:
    index = torch.stack([pairs.before, pairs.after])
    # Not checked: both hold tags from [0, K).
    return torch.sparse_coo_tensor(index, pairs.values, (classes, classes), check_invariants=False)
