"""Linear-Core surrogates: smooth losses with a linear consistency bound."""

from __future__ import annotations

from .fused import fused_linear_core_loss
from .losses import LinearCoreLoss, linear_core_loss
from .surrogates import (
    LinearBound,
    LinearCore,
    ReferenceSurrogate,
    certify_linear_bound,
    reference_surrogate,
)

__all__ = [
    "LinearBound",
    "LinearCore",
    "LinearCoreLoss",
    "ReferenceSurrogate",
    "certify_linear_bound",
    "fused_linear_core_loss",
    "linear_core_loss",
    "reference_surrogate",
]
