"""Linear-Core loss for sequence tagging: constrained, with an unbiased sampled gradient.

A linear chain scores a tag sequence ``y`` of length T as
``h(y) = Σ_t e_t(y_t) + Σ_{t≥2} A[y_{t-1}, y_t]``, with emissions ``e`` and one table ``A``. The
mean over all K^T sequences is exact and cheap, ``h̄ = Σ_t mean(e_t) + (T-1)·mean(A)``, and
``h̃ = h - h̄`` sums to zero: the constraint of Lee, Lin and Wahba (2004), for sequences. With the
target loss ``L(y', y) = Σ_t w[y_t]·[y'_t ≠ y_t]`` (Hamming's, weighted) there are two losses:

* ``over="sequences"``: ``Σ_{y'} L(y', y)·Φ(-h̃(y'))`` over all K^T sequences. For a complete class
  of sequence scores the target regret is at most ``1/τ`` times the regret of the sum, so ``K^T/τ``
  times that of the average. Scores that factorise over a chain are not complete: there the bound
  carries minimizability gaps.
* ``over="positions"``: ``Σ_t Σ_{b≠y_t} w[y_t]·Φ(-s̃_t(b))`` with ``s_t(b) = e_t(b) + A[y_{t-1}, b]``
  centred over ``b``: a multi-class constrained loss at each position, given the gold tag before it.
  Its constant is ``1/τ`` for the sum (``K/τ`` for the average), for predictions given that tag.

**The sampled gradient** of the average over sequences. Draw ``y'`` from a proposal ``q`` and let
``r = K^(-T)/q(y')`` and ``g = -Φ'(-h̃(y'))``. Then ``c·(∇h(y') - ∇h̄)`` with ``c = r·(L·g - b)`` is
unbiased for every constant ``b``, since ``∇h - ∇h̄`` has mean zero under the uniform distribution:
``b`` is a control variate. In the core ``g = 1``, so ``b = E[L]`` removes most of the noise. ``h̄``
must be exact: a mean over the samples would stand inside ``Φ'``, and bias it.

**The cost** of a step does not contain K². The gradient of ``A`` has entries at the sampled pairs,
and ``-m`` in all K² places (from ``∇h̄``). ``Transitions`` keeps that constant apart, as the
gradient of one scalar, and knows the mean of its table from a running sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .losses import DTYPES, REDUCTIONS, _reduce, _result_dtype, _work_dtype, linear_core_loss
from .surrogates import LinearCore

OVER = ("sequences", "positions")
METHODS = ("sampled", "exact")
PROPOSALS = ("near", "uniform")

# Sequences that enumeration may visit, for each sequence of the batch.
MOST_SEQUENCES = 2**16

# Sums of a table are made block by block: a whole one in float64 would double its memory.
BLOCK = 2**20


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
    method: str | None = None,
    samples: int = 8,
    proposal: str = "near",
    keep: float | None = None,
    baseline: float = 1.0,
    average: bool = True,
    reduction: str = "mean",
    tag_weight: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Constrained Linear-Core loss of tag sequences under a linear chain.

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
        over: ``"sequences"``: ``Σ_{y'} L(y', y)·Φ(-h̃(y'))`` over all K^T sequences; or
            ``"positions"``: ``Σ_t Σ_{b≠y_t} w[y_t]·Φ(-s̃_t(b))``, each position given the gold tag
            before it.
        method: ``"sampled"`` (default for sequences) or ``"exact"`` (the only one for positions).
            Exact sums over sequences visit all K^T of them: at most 65,536.
        samples: sampled sequences for each sequence of the batch.
        proposal: ``"near"``: each position keeps its gold tag with probability ``keep``, else
            draws one of all K; or ``"uniform"``, which meets the gold tag in one position out of
            K only. See below for their variances.
        keep: in [0, 1); by default ``1/(T_b + 1)``, which keeps all importance weights below e. Far
            above it they reach ``(1 - keep)^(-T)``, and nearly all samples get nearly none.
        baseline: the control variate is ``baseline`` times the mean of L over all sequences; 1 is
            the slope of the core, 0 means none.
        average: divide by the number of alternatives, K^T or K. The sampled loss needs it.
        reduction: over the batch: ``"none"`` (``[B]``), ``"sum"`` or ``"mean"``.
        tag_weight: ``[K]`` positive weights ``w`` of the gold tags, a constant; ones by default.
        generator: source of the samples, on the device of the emissions.

    Returns:
        A scalar, or ``[B]`` for ``"none"``; dtype that of the emissions, or float32 for half
        precision under autocast. The mean over an empty batch is NaN, its sum 0. Sampled: value
        and gradient are unbiased estimates of the exact ones (of ``average=True``).

    Linear consistency, for a complete class of sequence scores: ``1/τ`` for the sum over sequences,
    ``K^T/τ`` for its average. Factorised scores, as these, are not complete, so minimizability gaps
    stay. Over positions, ``1/τ`` for the sum and ``K/τ`` for the average, given the previous tag.

    Within the core (all ``|h̃| ≤ τ``) the gradient of the average is linear in the tags' counts:
    emissions get ``(w/K)·(1/K - [a = y_t])``, and the table a row part plus a column part. Pair
    interactions are learned from the tail alone, or over positions.

    Variance of the emissions' gradient, of one sample, relative to its squared norm, in the core
    with ``baseline=1``: ``T·(K-1) - 1`` for ``"uniform"``, and below ``2e·T²`` for ``"near"``
    whatever K is, so ``"near"`` is better from ``K ≈ 2e·T`` on. With ``baseline=0`` both grow with
    K². So does the part that comes from ``g`` once many sequences leave the core: then neither
    proposal helps, a larger ``core`` does. ``gradient_variance`` computes it for small problems.

    NaN and infinite scores at valid positions give a NaN loss, never a finite one. The sampled loss
    has first derivatives only.

    Raises:
        TypeError: emissions, transitions or weights not floating, tags not integer, mask not bool.
        ValueError: shapes, devices, K < 2, T < 1, a mask that is not a prefix or has an empty row,
            weights not positive, unknown options, ``"sampled"`` where it has no meaning, or
            ``"exact"`` where K^T is above the limit.
        IndexError: a tag outside [0, K) at a valid position.
        RuntimeError: in the backward pass of the sampled loss, for ``create_graph=True``.

    Example:
        >>> emissions, tags = torch.zeros(1, 3, 5), torch.tensor([[0, 4, 2]])
        >>> structured_linear_core_loss(emissions, tags, torch.zeros(5, 5), method="exact")
        tensor(4.8000)
    """
    options = _Options(
        surrogate=LinearCore(core, scale, tail),
        over=over,
        method=_method(method, over),
        samples=samples,
        proposal=proposal,
        keep=keep,
        baseline=baseline,
        average=average,
        reduction=reduction,
    )
    return _loss(emissions, tags, transitions, mask, tag_weight, options, generator)


class StructuredLinearCoreLoss(nn.Module):
    """Module twin of ``structured_linear_core_loss``: same arguments, same results, same errors.

    ``tag_weight`` is a buffer, so it moves with the module.

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
        method: str | None = None,
        samples: int = 8,
        proposal: str = "near",
        keep: float | None = None,
        baseline: float = 1.0,
        average: bool = True,
        reduction: str = "mean",
        tag_weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.options = _Options(
            surrogate=LinearCore(core, scale, tail),
            over=over,
            method=_method(method, over),
            samples=samples,
            proposal=proposal,
            keep=keep,
            baseline=baseline,
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
        if o.method == "sampled":
            text += f"samples={o.samples}, proposal={o.proposal!r}, keep={o.keep}, "
            text += f"baseline={o.baseline}, "
        return text + f"method={o.method!r}, average={o.average}, reduction={o.reduction!r}"


class Transitions(nn.Module):
    """Scores ``A = table + offset`` of tag pairs, trained without touching all K² of them.

    Args:
        classes: K ≥ 2.
        table: ``[K, K]`` initial scores, copied; zeros by default.
        dtype: of the table; by default that of ``table``, or torch's default.
        device: likewise.

    Attributes:
        table: parameter ``[K, K]``, float32 or float64.
        offset: parameter ``[]``, float64.

    **Convention of the gradients**: the gradient of A is ``table.grad + offset.grad``, where
    ``offset.grad`` is a constant that stands in all K² places. (It is not the derivative by the
    offset, which is zero: a constant added to A changes no centred score.) Both parts are linear,
    so gradients of several losses or micro-batches accumulate as they should, and plain SGD on both
    parameters, by ``apply_gradient`` or by ``torch.optim.SGD`` without momentum, is dense SGD on A.
    ``torch.optim.SGD`` on ``table`` alone, with the sparse gradient as it is, gives an A that
    differs by a constant: the same centred scores, the same decoding, the same classifier.

    ``table.grad`` is sparse in pairs (sampled loss over sequences), sparse in rows (positions) or
    dense (all else). Torch adds a dense gradient to any other, but refuses to add one in pairs to
    one in rows: apply the one before making the other.

    **The mean** is kept as a running sum in float64. ``apply_gradient`` updates it; it is made
    afresh, in O(K²), whenever something else changed the table (an optimiser, a loaded state, an
    edit, a conversion), and after as many updates as the table has entries, so that rounding does
    not pile up. An edit through ``table.data`` leaves no trace: call ``refresh`` after it.

    Raises:
        TypeError: a table that is not float32 or float64.
        ValueError: fewer than 2 classes, or a table of another shape.

    Example:
        >>> Transitions(3, torch.eye(3)).mean()
        0.3333333333333333
    """

    def __init__(
        self,
        classes: int,
        table: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if classes < 2:
            raise ValueError(f"classes must be at least 2, got {classes}")
        if table is None:
            table = torch.zeros(classes, classes, dtype=dtype, device=device)
        elif table.shape != (classes, classes):
            raise ValueError(
                f"table must have shape ({classes}, {classes}), got {tuple(table.shape)}"
            )
        else:
            table = table.detach().to(device=device, dtype=dtype, copy=True).contiguous()
        if table.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"table must be float32 or float64, got {table.dtype}: torch can't add up sparse "
                "gradients in others; emissions may be in half precision all the same"
            )
        self.table = nn.Parameter(table)
        self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64, device=table.device))
        self.refresh()

    @property
    def classes(self) -> int:
        """K, the number of tags."""
        return len(self.table)

    def mean(self) -> float:
        """The mean of all K² scores."""
        return float(self._table_mean()) + float(self.offset.detach())

    def dense(self) -> Tensor:
        """``A`` as ``[K, K]``; gradients flow to the table, in full."""
        return self.table + self.offset.detach().to(self.table.dtype)

    def refresh(self) -> None:
        """Forget the running sum; the next mean is made from the table."""
        self._total: Tensor | None = None  # [] float64
        self._seen: tuple[object, ...] = ()
        self._updates = 0

    @torch.no_grad()
    def apply_gradient(self, lr: float) -> None:
        """One step of plain SGD on A, in place: ``A -= lr·(table.grad + offset.grad)``.

        Takes time in proportion to the entries of the gradient, not to K², unless it is dense.
        Leaves the gradients as they are: clear them with ``zero_grad()``, as after an optimiser.

        Raises:
            ValueError: ``lr`` not finite.
        """
        if not math.isfinite(lr):
            raise ValueError(f"lr must be finite, got {lr!r}")
        if self.table.grad is not None:
            total = self._total if self._seen == self._state() else None
            removed = _descend_(self.table, self.table.grad, lr)
            self._updates += self.table.numel() if removed is None else removed.numel()
            self._total = None
            if total is not None and removed is not None and self._updates < self.table.numel():
                self._total = total - lr * removed.sum(dtype=torch.float64)
            self._seen = self._state()
        if self.offset.grad is not None:
            self.offset.sub_(self.offset.grad, alpha=lr)

    def _state(self) -> tuple[object, ...]:
        """What differs if anything else has changed the table."""
        table = self.table
        version = None if table.is_inference() else table._version
        return id(table), version, table.data_ptr(), table.dtype, table.device

    @torch.no_grad()
    def _table_mean(self) -> Tensor:
        """Mean of the table alone, ``[]`` float64; O(1) if only ``apply_gradient`` changed it."""
        if self._total is None or self._seen != self._state() or self.table.is_inference():
            self._total = _total(self.table)
            self._seen, self._updates = self._state(), 0
        return self._total / self.table.numel()

    def extra_repr(self) -> str:
        """The size, for ``print(module)``."""
        return f"classes={self.classes}, dtype={self.table.dtype}"


def _descend_(table: Tensor, gradient: Tensor, lr: float) -> Tensor | None:
    """``table -= lr·gradient``; return a sparse gradient's values, not summed over duplicates."""
    if gradient.layout == torch.strided:
        table.sub_(gradient, alpha=lr)
        return None
    # Never coalesced: sorting costs more than adding duplicates one by one.
    index, values = gradient._indices(), gradient._values().to(table.dtype)
    if gradient.sparse_dim() == 1:
        table.index_add_(0, index[0], values, alpha=-lr)
    else:
        table.index_put_((index[0], index[1]), values * -lr, accumulate=True)
    return values


def _total(table: Tensor) -> Tensor:
    """Sum of a matrix in float64, ``[]``, in blocks of rows."""
    rows = max(1, BLOCK // table.shape[1])
    parts = [block.sum(dtype=torch.float64) for block in table.detach().split(rows)]
    return torch.stack(parts).sum()


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
    proposal: str = "near",
    keep: float | None = None,
    baseline: float = 1.0,
    tag_weight: Tensor | None = None,
) -> GradientMoments:
    """Moments of the sampled gradient by exact enumeration of the sampling distribution.

    Arguments as for ``structured_linear_core_loss``; computed in float64, and for problems with at
    most 65,536 sequences. A sample is ``c·D`` with ``D = ∇h(y') - ∇h̄``, so its second moment is
    ``Σ q·c²·‖D‖²``, where ``‖D‖²`` is ``T·(1 - 1/K)`` for the emissions, and for the transitions
    ``Σ n² - (T-1)²/K²`` with ``n`` the counts of the pairs in ``y'``.

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
        method="sampled",
        samples=1,
        proposal=proposal,
        keep=keep,
        baseline=baseline,
        average=True,
        reduction="none",
    )
    batch = _checked_batch(emissions, tags, transitions, mask, tag_weight, torch.float64)
    if not len(tags):
        raise ValueError("emissions hold no sequence (B = 0): there is nothing to enumerate")
    _check_exact(batch)
    table, _ = _parts(transitions)
    chain = _Chain(emissions.double(), table.double(), _total(table) / table.numel())
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
    chance = float(k) ** -length / terms.ratio  # q, [1, K^T]
    first, second = chance * terms.coefficient, chance * terms.coefficient**2
    emission = _emission_gradient(first, samples, batch)
    pairs = _pairs(first, samples, batch)
    transition = _dense_gradient(pairs, pairs.values.sum() / k**2, k)
    code = samples[0, :-1] * k + samples[0, 1:]  # [T-1, K^T]
    same = (code[:, None] == code[None, :]).sum((0, 1)).double()  # Σ n², [K^T]
    of_emission = second.sum() * length * (1 - 1 / k)
    of_transition = (second * (same - ((length - 1) / k) ** 2)).sum()
    return GradientMoments(
        emission_mean=emission,
        emission_variance=of_emission - emission.square().sum(),
        transition_mean=transition,
        transition_variance=of_transition - transition.square().sum(),
    )


# --- options and checks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """All options that are not tensors, checked."""

    surrogate: LinearCore
    over: str
    method: str
    samples: int
    proposal: str
    keep: float | None
    baseline: float
    average: bool
    reduction: str

    def __post_init__(self) -> None:
        _check_choice("over", self.over, OVER)
        _check_choice("method", self.method, METHODS)
        _check_choice("proposal", self.proposal, PROPOSALS)
        _check_choice("reduction", self.reduction, REDUCTIONS)
        if self.method == "sampled":
            _check_sampled(self.over, self.average)
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"samples must be an integer ≥ 1, got {self.samples!r}")
        if not math.isfinite(self.baseline):
            raise ValueError(f"baseline must be finite (1 or 0, mostly), got {self.baseline!r}")
        if self.keep is not None:
            _check_keep(self.keep, self.proposal)


def _method(method: str | None, over: str) -> str:
    if method is not None:
        return method
    return "exact" if over == "positions" else "sampled"


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _check_sampled(over: str, average: bool) -> None:
    if over == "positions":
        raise ValueError(
            "method='sampled' is for over='sequences': the loss over positions is exact at the "
            "same cost, so leave method out"
        )
    if not average:
        raise ValueError(
            "average=False needs method='exact': the sum over sequences is K^T times the average, "
            "which no sample can stand for in floating point"
        )


def _check_keep(keep: float, proposal: str) -> None:
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
        _check_tag_weight(tag_weight, k)
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
    if not isinstance(transitions, (Tensor, Transitions)):
        raise TypeError(
            f"transitions must be a [K, K] tensor or Transitions, got {type(transitions).__name__}"
        )
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


def _check_tag_weight(tag_weight: Tensor, classes: int) -> None:
    if not tag_weight.is_floating_point():
        raise TypeError(f"tag_weight must be floating point, got {tag_weight.dtype}")
    if tag_weight.shape != (classes,):
        raise ValueError(f"tag_weight must have shape ({classes},), got {tuple(tag_weight.shape)}")
    if tag_weight.requires_grad:
        raise ValueError("tag_weight is a constant of the loss: pass tag_weight.detach()")
    if not bool(((tag_weight > 0) & (tag_weight < math.inf)).all()):
        raise ValueError("tag_weight must be finite and positive: mask positions out instead")


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
    work = _work_dtype(emissions.dtype)
    batch = _checked_batch(emissions, tags, transitions, mask, tag_weight, work)
    dtype = _result_dtype(emissions)
    emissions = emissions.to(work)
    if options.over == "positions":
        rows = _positions(emissions, transitions, batch, tag_weight, options)
    elif options.method == "exact":
        rows = _exact(emissions, transitions, batch, options)
    else:
        samples = _propose(batch, options, generator)
        rows = _sampled(emissions, transitions, batch, samples, options)
    return _reduce(rows, options.reduction, float(len(tags))).to(dtype)


def _positions(
    emissions: Tensor,
    transitions: Tensor | Transitions,
    batch: _Batch,
    tag_weight: Tensor | None,
    options: _Options,
) -> Tensor:
    """Losses over positions, ``[B]``: a multi-class loss each, given the gold tag before."""
    # The offset is not needed: a constant does not change centred scores.
    table, offset = _parts(transitions)
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
        reduction="none",
        class_weight=tag_weight,
    )
    rows = losses.view(target.shape).sum(1)
    return rows / batch.classes if options.average else rows


class _Chain(NamedTuple):
    """Scores of a batch."""

    emissions: Tensor  # [B, T, K]
    table: Tensor  # [K, K]
    centre: Tensor  # [], the table's mean


def _exact(
    emissions: Tensor, transitions: Tensor | Transitions, batch: _Batch, options: _Options
) -> Tensor:
    """Sums (or averages) over all sequences, ``[B]``, by ordinary differentiable operations."""
    _check_exact(batch)
    table = _parts(transitions)[0].to(emissions.dtype)
    chain = _Chain(emissions, table, table.mean())
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
    mismatch = samples != batch.tags[:, :, None]  # [1, T, K^T]
    target_loss = (mismatch * batch.weight[:, :, None]).sum(1)
    terms = target_loss * options.surrogate(-_scores(chain, batch, samples))  # [1, K^T]
    return terms.mean(1) if options.average else terms.sum(1)


def _scores(chain: _Chain, batch: _Batch, samples: Tensor) -> Tensor:
    """Centred scores ``h̃`` of the samples ``[B, T, S]``: ``[B, S]``. NaN if a mean is not finite.

    Each term is centred by itself, so that large common constants cancel before they round.
    """
    centre = chain.emissions.mean(2, keepdim=True)  # [B, T, 1]
    unary = chain.emissions.gather(2, samples) - (centre + (centre - centre))
    pair = chain.table[samples[:, :-1], samples[:, 1:]].to(unary.dtype)  # [B, T-1, S]
    pair = pair - (chain.centre + (chain.centre - chain.centre)).to(unary.dtype)
    if batch.mask is not None:
        unary = unary.masked_fill(~batch.mask[:, :, None], 0)
        pair = pair.masked_fill(~batch.mask[:, 1:, None], 0)
    return unary.sum(1) + pair.sum(1)


# --- sampling -------------------------------------------------------------------------------------


def _propose(batch: _Batch, options: _Options, generator: torch.Generator | None) -> Tensor:
    """Sampled alternatives, ``[B, T, S]`` int64; those at masked positions do not matter."""
    shape, device = (*batch.tags.shape, options.samples), batch.tags.device
    draws = torch.randint(batch.classes, shape, generator=generator, device=device)
    if options.proposal == "uniform":
        return draws
    kept = torch.rand(shape, generator=generator, device=device) < _keep(batch, options)[..., None]
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
    """Estimates from single samples, ``[B, S]`` each."""

    value: Tensor  # r·L·Φ(-h̃)
    coefficient: Tensor  # c = r·(L·g - b)
    ratio: Tensor  # r


def _terms(chain: _Chain, batch: _Batch, samples: Tensor, options: _Options) -> _Terms:
    """What each of the samples ``[B, T, S]`` contributes to value and gradient."""
    margin = -_scores(chain, batch, samples)
    mismatch = samples != batch.tags[:, :, None]  # [B, T, S]
    if batch.mask is not None:
        mismatch &= batch.mask[:, :, None]
    target_loss = (mismatch * batch.weight[:, :, None]).sum(1)
    ratio = _ratio(mismatch.sum(1), batch, options).to(margin.dtype)
    mean_loss = (1 - 1 / batch.classes) * batch.weight.sum(1, keepdim=True)  # over all sequences
    slope = -options.surrogate.derivative(margin)
    return _Terms(
        value=ratio * target_loss * options.surrogate(margin),
        coefficient=ratio * (target_loss * slope - options.baseline * mean_loss),
        ratio=ratio,
    )


def _sampled(
    emissions: Tensor,
    transitions: Tensor | Transitions,
    batch: _Batch,
    samples: Tensor,
    options: _Options,
) -> Tensor:
    """Estimates of the averaged losses, ``[B]``, from given samples ``[B, T, S]``."""
    table, offset = _parts(transitions)
    if isinstance(transitions, Transitions):
        centre = transitions._table_mean()
    else:
        centre = _total(table) / table.numel()
    rows: Tensor = _SampledLoss.apply(emissions, table, offset, centre, batch, samples, options)
    return rows


class _SampledLoss(torch.autograd.Function):
    """Mean over the samples; the gradient is that of the estimator, not of this mean."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        emissions: Tensor,
        table: Tensor,
        offset: Tensor | None,
        centre: Tensor,
        batch: _Batch,
        samples: Tensor,
        options: _Options,
    ) -> Tensor:
        terms = _terms(_Chain(emissions, table, centre), batch, samples, options)
        ctx.save_for_backward(terms.coefficient, samples)
        ctx.batch, ctx.dtype = batch, table.dtype  # type: ignore[attr-defined]
        ctx.offset_dtype = None if offset is None else offset.dtype  # type: ignore[attr-defined]
        return terms.value.mean(1)

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def,override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the sampled structured_linear_core_loss has no second derivatives "
                "(create_graph=True): use method='exact' on a small problem"
            )
        coefficient, samples = ctx.saved_tensors
        coefficient = coefficient * (upstream / samples.shape[2])[:, None]  # [B, S]
        for_emissions, for_table, for_offset, *_ = ctx.needs_input_grad
        emission = table = offset = None
        if for_emissions:
            emission = _emission_gradient(coefficient, samples, ctx.batch)
        if for_table or for_offset:
            pairs = _pairs(coefficient, samples, ctx.batch)
            values, classes = pairs.values.to(ctx.dtype), ctx.batch.classes
            constant = values.sum(dtype=torch.float64) / classes**2
            if ctx.offset_dtype is None:
                table = _dense_gradient(pairs._replace(values=values), constant, classes)
            else:
                table = _sparse_gradient(pairs._replace(values=values), classes)
                offset = -constant.to(ctx.offset_dtype)
        return emission, table, offset, None, None, None, None


def _emission_gradient(coefficient: Tensor, samples: Tensor, batch: _Batch) -> Tensor:
    """``Σ_s c_s·(∇h(y'_s) - ∇h̄)`` by the emissions, ``[B, T, K]``, for ``c`` of ``[B, S]``."""
    constant = coefficient.sum(1)[:, None] / -batch.classes  # [B, 1]
    values = coefficient[:, None, :].expand(samples.shape)  # [B, T, S]
    if batch.mask is not None:
        constant = torch.where(batch.mask, constant, 0)  # [B, T]; clears a NaN as well
        values = torch.where(batch.mask[:, :, None], values, 0)
    shape = (*batch.tags.shape, batch.classes)
    return constant[..., None].expand(shape).contiguous().scatter_add_(2, samples, values)


class _Pairs(NamedTuple):
    """Entries of a sparse ``[K, K]`` matrix, with duplicates."""

    before: Tensor  # [n]
    after: Tensor  # [n]
    values: Tensor  # [n]


def _pairs(coefficient: Tensor, samples: Tensor, batch: _Batch) -> _Pairs:
    """``Σ_s c_s·∇h(y'_s)`` by the table; ``∇h̄`` takes the sum over K² from every entry."""
    before, after = samples[:, :-1], samples[:, 1:]  # [B, T-1, S]
    values = coefficient[:, None, :].expand(after.shape)
    if batch.mask is not None:
        values = torch.where(batch.mask[:, 1:, None], values, 0)
    return _Pairs(before.reshape(-1), after.reshape(-1), values.reshape(-1))


def _dense_gradient(pairs: _Pairs, constant: Tensor, classes: int) -> Tensor:
    full = constant.neg().to(pairs.values.dtype).expand(classes, classes).contiguous()
    return full.index_put_((pairs.before, pairs.after), pairs.values, accumulate=True)


def _sparse_gradient(pairs: _Pairs, classes: int) -> Tensor:
    index = torch.stack([pairs.before, pairs.after])
    # Not checked: both are samples from [0, K).
    return torch.sparse_coo_tensor(index, pairs.values, (classes, classes), check_invariants=False)
