"""The table of a chain's transition scores, trained through gradients that touch few entries."""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

# Sums of a table are made block by block: a whole one in float64 would double its memory.
BLOCK = 2**20

TABLE_DTYPES = (torch.float32, torch.float64)


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
    offset, which is zero: a constant added to A changes no centred score, and no margin.) Only the
    sampled constrained loss makes one; elsewhere ``table.grad`` holds all, and ``offset.grad`` is
    None, that is 0. Both parts are linear, so gradients of several losses or micro-batches
    accumulate as they should, and plain SGD on both parameters, by ``apply_gradient`` or by
    ``torch.optim.SGD`` without momentum, is dense SGD on A. ``torch.optim.SGD`` on ``table`` alone,
    with the sparse gradient as it is, gives an A that differs by a constant at most: the same
    centred scores, the same decoding, the same classifier.

    ``table.grad`` is sparse in pairs (sampled losses), sparse in rows (exact ones over positions)
    or dense (all else). Torch adds a dense gradient to any other, but refuses to add one in pairs
    to one in rows: apply the one before making the other.

    **The mean** is kept as a running sum in float64. ``apply_gradient`` updates it; it is made
    afresh, in O(K²), whenever something else changed the table (an optimiser, a loaded state, an
    edit, a conversion), and after as many updates as the table has entries, so that rounding does
    not pile up. The steps of fused optimisers, which torch's version counter misses, are seen by a
    hook on all optimisers, set when the first ``Transitions`` is made. Edits through
    ``table.data``, through a NumPy array that shares the memory, or by ``torch._fused_*`` functions
    called directly leave no trace: call ``refresh`` after them.

    Raises:
        TypeError: classes not an integer, a table that is no dense tensor, or not float32 or
            float64.
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
        classes = _class_count(classes)
        if table is not None:
            check_tensor("table", table)
        if table is None:
            table = torch.zeros(classes, classes, dtype=dtype, device=device)
        elif table.shape != (classes, classes):
            raise ValueError(
                f"table must have shape ({classes}, {classes}), got {tuple(table.shape)}"
            )
        else:
            table = table.detach().to(device=device, dtype=dtype, copy=True).contiguous()
        _check_dtype("table", table.dtype)
        self.table = nn.Parameter(table)
        self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64, device=table.device))
        self.refresh()
        _watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and unpickled ones make a sum of their own."""
        super().__setstate__(state)
        self.refresh()
        _watch(self)

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
            TypeError: a table that was converted to half precision.
        """
        if not math.isfinite(lr):
            raise ValueError(f"lr must be finite, got {lr!r}")
        self.check_dtype()
        if self.table.grad is not None:
            total = self._total if self._seen == self._state() else None
            removed = _descend_(self.table, self.table.grad, lr)
            self._updates += self.table.numel() if removed is None else removed.numel()
            self._total = None
            if total is not None and removed is not None and self._updates < self.table.numel():
                self._total = total - lr * removed.sum(dtype=torch.float64)
                self._total += _nan_unless_finite(self.table, self.table.grad)
            self._seen = self._state()
        if self.offset.grad is not None:
            self.offset.sub_(self.offset.grad, alpha=lr)

    def check_dtype(self) -> None:
        """Refuse a table that was converted to another precision since it was made.

        Raises:
            TypeError: a table that is not float32 or float64.
        """
        _check_dtype("the table of Transitions", self.table.dtype)

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


def check_tensor(name: str, value: object) -> None:
    """Refuse what is not a dense tensor.

    Raises:
        TypeError: a NumPy array, a list, a sparse tensor, anything else.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a tensor, got {type(value).__name__}: pass torch.as_tensor({name})"
        )
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got {value.layout}: pass {name}.to_dense()")


def _class_count(classes: object) -> int:
    try:
        count = operator.index(classes)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"classes must be an integer, got {classes!r}: pass int(classes)") from None
    if count < 2:
        raise ValueError(f"classes must be at least 2, got {count}")
    return count


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in TABLE_DTYPES:
        raise TypeError(
            f"{name} must be float32 or float64, got {dtype}: torch can't add up sparse gradients "
            "in others; convert it with .float(); emissions may be in half precision all the same"
        )


# --- what optimisers change -----------------------------------------------------------------------

_LIVE: WeakSet[Transitions] = WeakSet()


def _watch(transitions: Transitions) -> None:
    """Forget its running sum after each step of an optimiser that holds its table."""
    _LIVE.add(transitions)
    _hook_optimizers()


@cache
def _hook_optimizers() -> None:
    """Once, and not at import: fused steps change parameters, but not their version counters."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    for transitions in list(_LIVE):
        table = transitions.table
        if any(p is table for group in optimizer.param_groups for p in group["params"]):
            transitions.refresh()


# --- arithmetic -----------------------------------------------------------------------------------


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


def _nan_unless_finite(table: Tensor, gradient: Tensor) -> Tensor:
    """0 or NaN, ``[]`` float64: whether an entry in the places of a sparse gradient overflowed.

    The sum of the updates, in float64, would not show it. No branch: it would wait for the GPU.
    """
    touched = table[tuple(gradient._indices())]  # pairs [n], or rows [n, K]
    return (touched - touched).sum(dtype=torch.float64)


def _total(table: Tensor) -> Tensor:
    """Sum of a matrix in float64, ``[]``, in blocks of rows."""
    rows = max(1, BLOCK // table.shape[1])
    parts = [block.sum(dtype=torch.float64) for block in table.detach().split(rows)]
    return torch.stack(parts).sum()
