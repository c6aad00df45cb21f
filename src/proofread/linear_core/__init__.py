"""Linear-Core surrogates: smooth losses with a linear consistency bound."""

from __future__ import annotations

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
    "linear_core_loss",
    "reference_surrogate",
]
