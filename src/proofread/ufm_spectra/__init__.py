"""Low-dimensional spectra from neural collapse: closed forms, curvature operators, eigensolvers."""

from .collapse import collapse_metrics
from .decomposition import class_cross_within
from .directions import collapse_directions
from .dynamics import train_models
from .eigensolvers import spectral_density, top_eigenpairs
from .model import UnconstrainedFeatureModel
from .operators import CurvatureOperator, gauss_newton, hessian, layer_hessian
from .optimum import (
    CollapsedOptimum,
    Spectrum,
    collapsed_cross_entropy,
    collapsed_optimum,
    gain_enclosure,
)
from .products import gauss_newton_product

__all__ = [
    "CollapsedOptimum",
    "CurvatureOperator",
    "Spectrum",
    "UnconstrainedFeatureModel",
    "class_cross_within",
    "collapse_directions",
    "collapse_metrics",
    "collapsed_cross_entropy",
    "collapsed_optimum",
    "gain_enclosure",
    "gauss_newton",
    "gauss_newton_product",
    "hessian",
    "layer_hessian",
    "spectral_density",
    "top_eigenpairs",
    "train_models",
]
