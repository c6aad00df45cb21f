"""Exact inference and two classical losses for linear chains, vectorised: the baselines.

A sequence of tags ``y`` has the score ``h(y) = Σ_t e_t(y_t) + Σ_{t≥2} A[y_{t-1}, y_t]``, with
emissions ``e`` ([B, T, K]) and transitions ``A`` ([K, K]). Its maximum over all K^T sequences
(Viterbi 1967) and its log-partition function (Rabiner 1989; Lafferty, McCallum and Pereira 2001)
take O(T·K²) operations a sequence; here each is a few large tensor operations a position.

**Transitions** are a tensor, or a module with a parameter ``table`` ([K, K]) and, optionally, a
scalar ``offset``; it then stands for ``table + offset``, which is never formed: a constant adds
``offset·(length - 1)`` to every sequence's score, so no loss and no best sequence depends on it.
It gets no gradient: the gradient of ``table`` is all of it.

**Masks** are ``[B, T]`` booleans, ``True`` on a non-empty prefix of each row, or ``None`` when all
sequences have length T. What padded positions hold (NaN included) never counts.

**Viterbi.** ``max_j A[i, j] + s_j`` runs over blocks of rows that fit in cache. Going from the end
of the sequence to its start reduces over the rows of ``A`` as they lie in memory, so that ``A`` is
not transposed. Only the scores [T, B, K] are kept; the decoding recomputes the maximiser along the
best path, O(T·K), where back pointers would be T·K² to write.

**Partition function.** The recursion is a matrix product in the exponential domain,
``α_t ∝ (α_{t-1}·exp(A - max A)) ∘ exp(e_t - max e_t)``, normalised at each position. With
``R = max A - min A``, ``Σ_i α_i = 1`` makes every entry of the product at least ``exp(-R)``, so
what underflows (numbers below ``tiny``, the smallest normal one) was less than ``tiny·exp(R)`` of
its position's weight; and what follows differs between two tags by a factor of ``exp(R)`` at most.
So at most ``T·K·tiny·exp(2R)`` of the result is lost, whatever the emissions. Where this bound is
below the rounding error, the exponential domain is safe; else the same is tried in float64 and,
for a range that is even wider (as with forbidden transitions of -1e4 or -inf), everything is done
on logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

REDUCTIONS = ("none", "sum", "mean")
PADDING = -100  # decoded tag at padded positions: the index that PyTorch's losses ignore

# Elements of one block of sums ``A[i, j] + s_j``: 4 MiB in float32, near the second-level cache;
# half of it is 10 % slower on the machine that this was written on. A GPU wants few large blocks.
CPU_BLOCK = 1 << 20
CUDA_BLOCK = 1 << 26


def path_score(
    emissions: Tensor, tags: Tensor, transitions: Tensor | nn.Module, mask: Tensor | None = None
) -> Tensor:
    """Score ``h(y)`` of given tag sequences, differentiable.

    Args:
        emissions: ``[B, T, K]`` float32 or float64 scores, T ≥ 1, K ≥ 1.
        tags: ``[B, T]`` integers in [0, K); padded positions may hold anything.
        transitions: ``[K, K]`` of the same dtype, from row to column; or a module (see above).
        mask: ``[B, T]`` bool, or ``None``.

    Returns:
        ``[B]`` scores. The gradient for the transitions is dense.

    Raises:
        TypeError: a dtype that is not as above, or what is not a dense tensor.
        ValueError: shapes, devices, an empty sequence, a mask that is not a prefix.
        IndexError: a tag outside [0, K) at a position that counts.
    """
    problem = _checked(emissions, transitions, mask, tags=tags)
    labels = _checked_tags(tags, problem)
    return _path_score(problem, labels).to(emissions.dtype) + problem.shift()


def viterbi(
    emissions: Tensor, transitions: Tensor | nn.Module, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Best tag sequences and their scores: max-plus recursion, O(B·T·K²), no gradient.

    Among sequences of equal score the lexicographically first is returned, as far as floating-point
    sums (taken from the end) tell them apart.

    Args:
        emissions: ``[B, T, K]`` float32 or float64 scores; ``-inf`` forbids a tag.
        transitions: ``[K, K]``, or a module; ``-inf`` forbids a transition.
        mask: ``[B, T]`` bool, or ``None``.

    Returns:
        ``(tags, scores)``: ``[B, T]`` int64, -100 at padded positions, and ``[B]``. A NaN at a
        position that counts makes the row's score NaN, and its tags then mean nothing.

    Raises:
        TypeError: a dtype that is not as above, or what is not a dense tensor.
        ValueError: shapes, devices, an empty sequence, a mask that is not a prefix.

    Example:
        >>> emissions = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
        >>> viterbi(emissions, torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
        (tensor([[1, 0]]), tensor([3.]))
    """
    problem = _checked(emissions, transitions, mask)
    with torch.no_grad():
        tags, scores = _best_path(problem.emissions, problem.table, problem.mask)
        if problem.mask is not None:
            tags = tags.masked_fill(~problem.mask, PADDING)
        return tags, scores + problem.shift()


def log_partition(
    emissions: Tensor, transitions: Tensor | nn.Module, mask: Tensor | None = None
) -> Tensor:
    """``log Σ_y exp h(y)`` over all K^T sequences; once differentiable, by matrix products.

    Args:
        emissions: ``[B, T, K]`` float32 or float64 scores; ``-inf`` forbids a tag.
        transitions: ``[K, K]``, or a module; ``-inf`` forbids a transition.
        mask: ``[B, T]`` bool, or ``None``.

    Returns:
        ``[B]``, in the dtype of the emissions. NaN where a NaN counts; ``-inf``, with a meaningless
        gradient, where every sequence is forbidden.

    Raises:
        TypeError: a dtype that is not as above, or what is not a dense tensor.
        ValueError: shapes, devices, an empty sequence, a mask that is not a prefix.

    Example:
        >>> log_partition(torch.zeros(1, 3, 4), torch.zeros(4, 4))  # 3·log 4
        tensor([4.1589])
    """
    problem = _checked(emissions, transitions, mask)
    value = _Partition.apply(problem.emissions, problem.table, problem.mask, None)
    return cast(Tensor, value) + problem.shift()


def posterior_marginals(
    emissions: Tensor, transitions: Tensor | nn.Module, mask: Tensor | None = None
) -> Tensor:
    """``P(y_t = k)`` under ``P(y) ∝ exp h(y)``: the gradient of ``log_partition``.

    Arguments and errors are those of ``log_partition``.

    Returns:
        ``[B, T, K]`` probabilities without a gradient, 0 at padded positions.
    """
    problem = _checked(emissions, transitions, mask)
    with torch.enable_grad():
        leaf = problem.emissions.detach().requires_grad_()
        total = _Partition.apply(leaf, problem.table.detach(), problem.mask, None).sum()
    return torch.autograd.grad(total, leaf)[0]


def linear_chain_nll(
    emissions: Tensor,
    tags: Tensor,
    transitions: Tensor | nn.Module,
    *,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood of a linear-chain conditional random field.

    ``log_partition - path_score``, both of them and their gradients in one pass.

    Args:
        emissions: ``[B, T, K]`` float32 or float64 scores.
        tags: ``[B, T]`` integers in [0, K); padded positions may hold anything.
        transitions: ``[K, K]``, or a module, whose ``table`` gets a dense gradient.
        mask: ``[B, T]`` bool, or ``None``.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the B sequences.

    Returns:
        A scalar, or ``[B]`` for ``"none"``. The mean over no sequence is NaN. NaN is propagated.

    Raises:
        TypeError: a dtype that is not as above, or what is not a dense tensor.
        ValueError: shapes, devices, an empty sequence, a mask that is not a prefix, ``reduction``.
        IndexError: a tag outside [0, K) at a position that counts.
    """
    _check_reduction(reduction)
    problem = _checked(emissions, transitions, mask, tags=tags)
    labels = _checked_tags(tags, problem)
    value = _Partition.apply(problem.emissions, problem.table, problem.mask, labels)
    return _reduced(cast(Tensor, value), reduction)


def structured_hinge_loss(
    emissions: Tensor,
    tags: Tensor,
    transitions: Tensor | nn.Module,
    *,
    mask: Tensor | None = None,
    tag_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Margin-rescaled structured hinge loss, by loss-augmented Viterbi decoding.

    ``max_{y'} [L(y', y) + h(y')] - h(y)`` with ``L(y', y) = Σ_t w[y_t]·[y'_t ≠ y_t]``, the weighted
    Hamming loss (Taskar, Guestrin and Koller 2003; Tsochantaridis et al. 2005). The subgradient is
    that of a maximiser: ±1 at the emissions and transitions where it differs from ``y``.

    Args:
        emissions: ``[B, T, K]`` float32 or float64 scores.
        tags: ``[B, T]`` integers in [0, K); padded positions may hold anything.
        transitions: ``[K, K]``, with a dense gradient; or a module, whose ``table`` gets a sparse
            one (COO, not coalesced, at most 2·B·(T - 1) entries), so that no K² numbers are filled.
        mask: ``[B, T]`` bool, or ``None``.
        tag_weight: ``[K]`` weights ``w ≥ 0`` of the true tags, a constant; ``None`` for ones.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the B sequences.

    Returns:
        A scalar, or ``[B]`` for ``"none"``. The mean over no sequence is NaN. A sequence's loss is
        NaN where its best or its true score is not finite (a true tag that is forbidden, say).

    Raises:
        TypeError: a dtype that is not as above, or what is not a dense tensor.
        ValueError: shapes, devices, an empty sequence, a mask that is not a prefix, ``reduction``,
            a weight that is negative or not finite.
        IndexError: a tag outside [0, K) at a position that counts.
    """
    _check_reduction(reduction)
    weights = {} if tag_weight is None else {"tag_weight": tag_weight}
    problem = _checked(emissions, transitions, mask, tags=tags, **weights)
    labels = _checked_tags(tags, problem)
    cost = _costs(labels, tag_weight, problem)  # [B, T]
    with torch.no_grad():
        augmented = _augmented(problem.emissions, labels, cost)
        rival, best = _best_path(augmented, problem.table, problem.mask)
    sparse = isinstance(transitions, nn.Module)
    losses = _margin_violation(problem, labels, rival, cost, sparse)
    return _reduced(losses * _one_if_sound(best, losses), reduction)


# --- checks ---------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """Arguments that were checked."""

    emissions: Tensor  # [B, T, K]
    table: Tensor  # [K, K]
    offset: Tensor | None  # scalar, added to every transition
    mask: Tensor | None  # [B, T] bool

    def shift(self) -> Tensor | float:
        """What ``offset`` adds to every sequence's score: [B], or 0."""
        if self.offset is None:
            return 0.0
        batch, length, _ = self.emissions.shape
        if self.mask is None:
            lengths = torch.full((batch,), length, device=self.emissions.device)
        else:
            lengths = self.mask.sum(1)
        return self.offset.detach().to(self.emissions.dtype) * (lengths - 1)

    def counted(self, values: Tensor) -> Tensor:
        """``[B, T]`` values, 0 at padded positions."""
        return values if self.mask is None else values.where(self.mask, 0)


def _checked(
    emissions: Tensor, transitions: Tensor | nn.Module, mask: Tensor | None, **others: Tensor
) -> _Problem:
    """The problem; of the ``others``, only that they are dense tensors is checked."""
    table, offset = _table_of(transitions)
    if mask is not None:
        others["mask"] = mask
    for name, value in {"emissions": emissions, **others}.items():
        _check_dense(name, value)
    if emissions.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"emissions must be float32 or float64, got {emissions.dtype}: convert them first"
        )
    if emissions.dim() != 3:
        raise ValueError(f"emissions must be [B, T, K], got shape {tuple(emissions.shape)}")
    if emissions.shape[1] == 0 or emissions.shape[2] == 0:
        raise ValueError(
            "emissions must have at least one position and one tag: leave empty sequences out, got "
            f"shape {tuple(emissions.shape)}"
        )
    _check_table(table, emissions)
    if mask is not None:
        _check_mask(mask, emissions)
    return _Problem(emissions, table, offset, mask)


def _check_dense(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a tensor, got {type(value).__name__}: pass torch.as_tensor({name})"
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got {value.layout}: pass {name}.to_dense()")


def _table_of(transitions: Tensor | nn.Module) -> tuple[Tensor, Tensor | None]:
    if isinstance(transitions, Tensor):
        _check_dense("transitions", transitions)
        return transitions, None
    table = getattr(transitions, "table", None)
    if not isinstance(table, Tensor):
        raise TypeError(
            "transitions must be a [K, K] tensor or a module with a parameter `table`, got "
            f"{type(transitions).__name__}: pass torch.as_tensor(transitions) if they are numbers"
        )
    _check_dense("transitions.table", table)
    return table, cast("Tensor | None", getattr(transitions, "offset", None))


def _check_table(table: Tensor, emissions: Tensor) -> None:
    tags = emissions.shape[2]
    if table.dtype != emissions.dtype:
        raise TypeError(
            f"transitions are {table.dtype} but emissions are {emissions.dtype}: convert one"
        )
    if table.shape != (tags, tags):
        raise ValueError(
            f"transitions must be [K, K] = {(tags, tags)} as emissions have K = {tags} tags, got "
            f"shape {tuple(table.shape)}"
        )
    _check_device("transitions", table, emissions)


def _check_mask(mask: Tensor, emissions: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}: pass mask.bool()")
    if mask.shape != emissions.shape[:2]:
        raise ValueError(
            f"mask must be [B, T] = {tuple(emissions.shape[:2])}, got shape {tuple(mask.shape)}"
        )
    _check_device("mask", mask, emissions)
    if not bool(mask[:, 0].all()):
        raise ValueError("mask must be True at each sequence's first position: drop empty rows")
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("mask must be True on a prefix of each row: move the padding to the end")


def _check_device(name: str, tensor: Tensor, emissions: Tensor) -> None:
    if tensor.device != emissions.device:
        raise ValueError(
            f"{name} on {tensor.device} but emissions on {emissions.device}: move one of them"
        )


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")


def _checked_tags(tags: Tensor, problem: _Problem) -> Tensor:
    """``[B, T]`` int64 tags, 0 at padded positions."""
    if tags.is_floating_point() or tags.is_complex() or tags.dtype == torch.bool:
        raise TypeError(f"tags must be integers, got {tags.dtype}: pass tags.long()")
    batch, length, count = problem.emissions.shape
    if tags.shape != (batch, length):
        raise ValueError(f"tags must be [B, T] = {(batch, length)}, got shape {tuple(tags.shape)}")
    _check_device("tags", tags, problem.emissions)
    labels = problem.counted(tags.long())
    outside = (labels < 0) | (labels >= count)
    if bool(outside.any()):
        raise IndexError(
            f"tags hold {labels[outside][0].item()}, out of range for {count} tags: mend it, or "
            "mask the position if it is padding"
        )
    return labels


def _costs(labels: Tensor, tag_weight: Tensor | None, problem: _Problem) -> Tensor:
    """``[B, T]`` weights of the true tags."""
    like = problem.emissions
    if tag_weight is None:
        return torch.ones(labels.shape, dtype=like.dtype, device=like.device)
    if not tag_weight.is_floating_point():
        raise TypeError(f"tag_weight must be floating point, got {tag_weight.dtype}")
    if tag_weight.shape != like.shape[2:]:
        raise ValueError(
            f"tag_weight must be [K] = {tuple(like.shape[2:])}, got {tuple(tag_weight.shape)}"
        )
    if tag_weight.requires_grad:
        raise ValueError("tag_weight is a constant of the loss: pass tag_weight.detach()")
    _check_device("tag_weight", tag_weight, like)
    if not bool(((tag_weight >= 0) & tag_weight.isfinite()).all()):
        raise ValueError("tag_weight must be finite and not negative: it weighs a target loss")
    return tag_weight.to(like.dtype)[labels]


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.mean()


# --- scores of given sequences --------------------------------------------------------------------


def _path_score(problem: _Problem, labels: Tensor) -> Tensor:
    """``[B]`` in float64, without the offset: a long sum, from which log Z is subtracted."""
    own = problem.emissions.gather(2, labels[..., None])[..., 0]  # [B, T]
    links = problem.table[labels[:, :-1], labels[:, 1:]]  # [B, T-1]
    if problem.mask is not None:
        links = links.where(problem.mask[:, 1:], 0)
    own = problem.counted(own)
    return own.sum(1, dtype=torch.float64) + links.sum(1, dtype=torch.float64)


def _augmented(emissions: Tensor, labels: Tensor, cost: Tensor) -> Tensor:
    """Emissions plus the cost of each wrong tag; the true tag's is left as it is, bit by bit."""
    own = labels[..., None]
    return (emissions + cost[..., None]).scatter_(2, own, emissions.gather(2, own))


def _margin_violation(
    problem: _Problem, labels: Tensor, rival: Tensor, cost: Tensor, sparse: bool
) -> Tensor:
    """``L(y', y) + h(y') - h(y)``, [B], summed over the positions where they differ."""
    scores = problem.emissions.gather(2, torch.stack([rival, labels], 2))  # [B, T, 2]
    local = scores[..., 0] - scores[..., 1] + cost.where(rival != labels, 0)
    pairs = torch.stack([_pairs(rival), _pairs(labels)])  # [2, B, T-1, 2]
    differ = (pairs[0] != pairs[1]).any(-1)  # [B, T-1]
    if problem.mask is not None:
        differ &= problem.mask[:, 1:]
    owner = differ.nonzero()[:, 0]  # [n], the sequences of the pairs that differ
    links = _PairDifference.apply(problem.table, pairs[:, differ], sparse)  # [n]
    total = problem.counted(local).sum(1, dtype=torch.float64)
    return total.index_add(0, owner, cast(Tensor, links).double()).to(local.dtype)


def _one_if_sound(best: Tensor, losses: Tensor) -> Tensor:
    """``[B]`` ones, NaN where the best or the true score is not finite.

    An infinity or NaN that the true and the found sequence share would cancel out of the loss, but
    is in ``best``; if ``best`` is finite, one in the true score alone is in the loss. A factor, so
    that the gradient for the emissions is NaN, too, instead of a harmless-looking zero.
    """
    unsound = ~(best.isfinite() & losses.isfinite())
    return torch.ones_like(best).masked_fill_(unsound, torch.nan)


def _pairs(tags: Tensor) -> Tensor:
    """``[B, T-1, 2]`` neighbouring tags."""
    return torch.stack([tags[:, :-1], tags[:, 1:]], 2)


class _PairDifference(torch.autograd.Function):
    """``table[pairs[0]] - table[pairs[1]]``, whose gradient may stay sparse."""

    @staticmethod
    def forward(ctx: FunctionCtx, table: Tensor, pairs: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(pairs)  # [2, n, 2]
        ctx.shape, ctx.sparse = table.shape, sparse  # type: ignore[attr-defined]
        return table[pairs[0, :, 0], pairs[0, :, 1]] - table[pairs[1, :, 0], pairs[1, :, 1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (pairs,) = ctx.saved_tensors  # type: ignore[attr-defined]
        values = torch.cat([gradient, -gradient])
        index = pairs.reshape(-1, 2).T  # [2, 2n]
        shape = ctx.shape  # type: ignore[attr-defined]
        if ctx.sparse:  # type: ignore[attr-defined]
            # Built from checked tags: comparing each index with the shape again would only cost.
            filled = torch.sparse_coo_tensor(index, values, shape, check_invariants=False)
        else:
            filled = values.new_zeros(shape).index_put_(tuple(index), values, accumulate=True)
        return filled, None, None


# --- recursions -----------------------------------------------------------------------------------


def _block(like: Tensor) -> int:
    return CUDA_BLOCK if like.is_cuda else CPU_BLOCK


def _reduce_rows(
    table: Tensor, scores: Tensor, reduce: Callable[..., Tensor], block: int
) -> Tensor:
    """``out[b, i] = reduce_j(table[i, j] + scores[b, j])``, never holding more than ``block`` sums.

    Args:
        table: ``[M, K]``.
        scores: ``[B, K]``.
        reduce: ``torch.amax`` or ``torch.logsumexp``.
        block: numbers held at once (K at least).
    """
    (batch, tags), rows = scores.shape, table.shape[0]
    height = max(1, min(rows, block // tags))
    group = max(1, min(batch, block // (height * tags)))
    out = scores.new_empty(batch, rows)
    sums = scores.new_empty(group, height, tags)
    for i in range(0, rows, height):
        part = table[i : i + height]  # stays in cache for the whole batch
        for b in range(0, batch, group):
            some = scores[b : b + group, None]
            view = sums[: some.shape[0], : part.shape[0]]
            torch.add(part, some, out=view)
            out[b : b + group, i : i + height] = reduce(view, -1)
    return out


def _best_path(
    emissions: Tensor, table: Tensor, mask: Tensor | None, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Viterbi from the end to the start: ``(tags [B, T], scores [B])``, tags unmasked.

    ``best[t, b, i]`` is the best score of positions t, t+1, … when ``y_t = i``.
    """
    block = block or _block(emissions)
    best = emissions.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # [T, B, K]
    for t in range(best.shape[0] - 2, -1, -1):
        rest = _reduce_rows(table, best[t + 1], torch.amax, block)
        best[t] += rest if mask is None else rest.where(mask[:, t + 1, None], 0)
    tags = best[0].argmax(-1)  # [B]
    path = [tags]
    for after in best[1:]:
        tags = (table[tags] + after).argmax(-1)
        path.append(tags)
    return torch.stack(path, 1), best[0].amax(-1)


class _Partition(torch.autograd.Function):
    """``log Σ_y exp h(y)``, minus ``h(tags)`` if tags are given; [B]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        emissions: Tensor,
        table: Tensor,
        mask: Tensor | None,
        labels: Tensor | None,
    ) -> Tensor:
        scores = emissions.transpose(0, 1).contiguous()  # [T, B, K]
        live = None if mask is None else mask.T[..., None]  # [T, B, 1]
        if live is not None:
            scores = scores.where(live, 0)
        recursion = _recursion(table, scores)
        # The bound on what underflows holds for matrix products in the dtype that was chosen.
        with torch.autocast(table.device.type, enabled=False):
            value, saved = recursion.forward(scores, table, live)
        if labels is not None:
            value = value - _path_score(_Problem(emissions, table, None, mask), labels)
        ctx.recursion = recursion  # type: ignore[attr-defined]
        # The mask and the labels may be the caller's own: saved so that overwriting is noticed.
        ctx.save_for_backward(table, mask, labels, *saved)  # type: ignore[arg-type]
        return value.to(emissions.dtype)

    @staticmethod
    def backward(
        ctx: FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        # ``once_differentiable`` would let a second derivative pass as zero where the incoming
        # gradient is a constant: it does not look at the saved tensors.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the partition function of chains is differentiable once: drop create_graph=True"
            )
        table, mask, labels, *saved = ctx.saved_tensors  # type: ignore[attr-defined]
        live = None if mask is None else mask.T[..., None]
        wanted = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        backward = ctx.recursion.backward  # type: ignore[attr-defined]
        with torch.autocast(table.device.type, enabled=False):
            nodes, edges = backward(table, live, saved, gradient, wanted)
        nodes = nodes.transpose(0, 1)  # [B, T, K]
        if labels is not None:
            _subtract_path(nodes, edges, labels, mask, gradient)
        return nodes, edges, None, None


def _subtract_path(
    nodes: Tensor, edges: Tensor | None, labels: Tensor, mask: Tensor | None, gradient: Tensor
) -> None:
    """Take the gradient of the given sequences' scores off, in place."""
    share = gradient[:, None].expand(labels.shape)  # [B, T]
    share = -share if mask is None else -share.where(mask, 0)
    nodes.scatter_add_(2, labels[..., None], share[..., None])
    if edges is not None:
        edges.index_put_((labels[:, :-1], labels[:, 1:]), share[:, 1:], accumulate=True)


def _recursion(table: Tensor, scores: Tensor) -> _Recursion:
    """The cheapest recursion that loses nothing to underflow; see the module's docstring."""
    length, _, tags = scores.shape
    low, high = table.detach().aminmax()
    span = math.inf if math.isinf(low) else float(high) - float(low)
    for dtype in (scores.dtype, torch.float64):
        facts = torch.finfo(dtype)
        limit = math.log(facts.eps / (facts.tiny * length * tags)) / 2
        if not span > limit:  # a NaN goes through the fast one
            return _Exponential(dtype)
    return _Logarithmic(torch.float64)


class _Recursion:
    """Forward and backward pass over [T, B, K] scores in the dtype given."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def forward(
        self, scores: Tensor, table: Tensor, live: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``(log Z [B] in float64, what backward needs)``."""
        raise NotImplementedError

    def backward(
        self,
        table: Tensor,
        live: Tensor | None,
        saved: list[Tensor],
        gradient: Tensor,
        wanted: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients for the scores [T, B, K] and, if ``wanted``, for the table [K, K]."""
        raise NotImplementedError


class _Exponential(_Recursion):
    """Matrix products on ``α_t ∝ exp(forward scores)``, each α_t of sum 1."""

    def forward(
        self, scores: Tensor, table: Tensor, live: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        largest = table.amax()
        # Differences in the dtype of the recursion: a rounding here would be made T times over.
        kernel = (table.to(self.dtype) - largest).exp_()  # [K, K]
        peak = scores.amax(-1, keepdim=True)  # [T, B, 1]
        peak = peak.where(peak != -torch.inf, 0)  # all tags forbidden: weight 0, not NaN
        weight = (scores.to(self.dtype) - peak).exp_()  # [T, B, K]
        alpha, total = torch.empty_like(weight), torch.empty_like(peak, dtype=self.dtype)
        step = weight[0]
        for t in range(len(weight)):
            if t:
                step = torch.mm(alpha[t - 1], kernel).mul_(weight[t])
            torch.sum(step, -1, keepdim=True, out=total[t])
            torch.div(step, total[t].where(total[t] != 0, 1), out=alpha[t])
            if t and live is not None:
                total[t] = total[t].where(live[t], 1)
                alpha[t] = alpha[t].where(live[t], alpha[t - 1])
        value = (total.double().log() + peak.double()).sum((0, 2))  # [B]
        steps = len(weight) - 1 if live is None else live.sum((0, 2)) - 1
        if len(weight) > 1:
            value = value + largest.double() * steps
        return value, (kernel, weight, alpha, total)

    def backward(
        self,
        table: Tensor,
        live: Tensor | None,
        saved: list[Tensor],
        gradient: Tensor,
        wanted: bool,
    ) -> tuple[Tensor, Tensor | None]:
        kernel, weight, alpha, total = saved
        gradient = gradient.to(self.dtype)[:, None]  # [B, 1]
        scaled = weight / total.where(total != 0, 1)  # [T, B, K]
        beta = torch.ones_like(weight[0])  # [B, K], with Σ_k α_k β_k = 1 at each position
        nodes = torch.empty_like(weight)
        for t in range(len(weight) - 1, -1, -1):
            torch.mul(alpha[t], beta, out=nodes[t])
            if t:
                flow = scaled[t].mul_(beta)  # what enters each tag of t, kept for the table
                before = torch.mm(flow, kernel.T)
                beta = before if live is None else before.where(live[t], beta)
        nodes *= gradient if live is None else gradient.where(live, 0)
        edges = None
        if wanted:
            flows = scaled[1:] * (gradient if live is None else gradient.where(live[1:], 0))
            # One product for all positions, [K, (T-1)·B] by [(T-1)·B, K].
            edges = torch.mm(alpha[:-1].flatten(0, 1).T, flows.flatten(0, 1)).mul_(kernel)
            edges = edges.to(table.dtype)
        return nodes.to(table.dtype), edges


class _Logarithmic(_Recursion):
    """The same on logarithms: slower, and right for any range of scores."""

    def forward(
        self, scores: Tensor, table: Tensor, live: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        scores, onward = scores.to(self.dtype), table.T.to(self.dtype).contiguous()
        alpha = scores.clone()
        for t in range(1, len(scores)):
            alpha[t] += _reduce_rows(onward, alpha[t - 1], torch.logsumexp, _block(table))
            if live is not None:
                alpha[t] = alpha[t].where(live[t], alpha[t - 1])
        value = alpha[-1].logsumexp(-1)
        return value, (scores, alpha, value)

    def backward(
        self,
        table: Tensor,
        live: Tensor | None,
        saved: list[Tensor],
        gradient: Tensor,
        wanted: bool,
    ) -> tuple[Tensor, Tensor | None]:
        scores, alpha, value = saved
        links, gradient = table.to(self.dtype), gradient.to(self.dtype)
        edges = torch.zeros_like(links) if wanted else None
        beta, nodes = torch.zeros_like(scores[0]), torch.empty_like(scores)
        for t in range(len(scores) - 1, -1, -1):
            share = gradient[:, None] if live is None else gradient[:, None].where(live[t], 0)
            nodes[t] = (alpha[t] + beta - value[:, None]).exp_() * share
            if t:
                ahead = scores[t] + beta  # [B, K]
                if edges is not None:
                    _add_edges(edges, links, alpha[t - 1] - value[:, None], ahead, share)
                before = _reduce_rows(links, ahead, torch.logsumexp, _block(table))
                beta = before if live is None else before.where(live[t], beta)
        return nodes.to(table.dtype), None if edges is None else edges.to(table.dtype)


def _add_edges(edges: Tensor, links: Tensor, behind: Tensor, ahead: Tensor, share: Tensor) -> None:
    """Add ``Σ_b share_b·exp(behind[b, i] + links[i, j] + ahead[b, j])``, in blocks of rows."""
    height = max(1, _block(links) // links.shape[1])
    for i in range(0, len(links), height):
        rows = slice(i, i + height)
        for b in range(len(behind)):
            part = links[rows] + ahead[b] + behind[b, rows, None]
            edges[rows] += part.exp_().mul_(share[b])
