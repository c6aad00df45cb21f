"""Linear-Core surrogates: smooth losses with a linear consistency bound."""

from __future__ import annotations

from .chains import linear_chain_nll, structured_hinge_loss, viterbi
from .fused import fused_linear_core_loss
from .losses import LinearCoreLoss, linear_core_loss
from .structured import StructuredLinearCoreLoss, Transitions, structured_linear_core_loss
from .surrogates import (
    LinearBound,
    LinearCore,
    ReferenceSurrogate,
    TwoSidedLinearCore,
    certify_linear_bound,
    reference_surrogate,
)

__all__ = [
    "LinearBound",
    "LinearCore",
    "LinearCoreLoss",
    "ReferenceSurrogate",
    "StructuredLinearCoreLoss",
    "Transitions",
    "TwoSidedLinearCore",
    "certify_linear_bound",
    "fused_linear_core_loss",
    "linear_chain_nll",
    "linear_core_loss",
    "reference_surrogate",
    "structured_hinge_loss",
    "structured_linear_core_loss",
    "viterbi",
]
