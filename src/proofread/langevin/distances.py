"""How far a sample is from a target: normal fit, exact matching, weights of the modes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MATCHING_LIMIT = 4000  # points a side: the matching takes O(n³) time and n² numbers
_TOO_FAR = "{} are too far apart: their squared distances are beyond float64; rescale them"


def gaussian_kl(
    samples: Tensor, mean: float | Tensor, covariance: float | Tensor, *, unbiased: bool = True
) -> float:
    r"""KL divergence of a normal fit of the samples from a normal law, in nats.

    With the sample's mean m and covariance S it is
    :math:`\tfrac12[\operatorname{tr}(\Sigma^{-1}S) - d - \log\det(\Sigma^{-1}S)
    + (m-\mu)^\top\Sigma^{-1}(m-\mu)]`. It sees the first two moments alone, and is positive for an
    exact sample of finite size too: see :func:`gaussian_kl_floor`.

    Args:
        samples: ``[C, d]``, more of them than ``d``.
        mean: ``[d]``, or a number for all coordinates.
        covariance: ``[d, d]``, or a variance v for ``v I``.
        unbiased: divide the sample's covariance by ``C - 1``, otherwise by C.

    Raises:
        ValueError: too few samples for a fit of full rank (also when they lie in a hyperplane), a
            NaN or an infinity, shapes that do not fit, a covariance that is not symmetric and
            positive definite, a divergence beyond float64.
    """
    x = _points("samples", samples)
    n, d = x.shape
    if n <= d:
        raise ValueError(f"samples: a normal fit in d = {d} needs more than {d} points, got {n}")
    centre, factor = _normal(mean, covariance, d, x.device)
    white = torch.linalg.solve_triangular(factor, (x - centre).T, upper=False).T  # [C, d]
    _check_rank(x)
    shift = white.mean(0)
    count = n - 1 if unbiased else n
    spread = white - shift
    log_det = _log_det(spread) - d * math.log(count)
    value = 0.5 * float(spread.square().sum() / count - d - log_det + shift @ shift)
    if not math.isfinite(value):
        raise ValueError(
            f"samples up to {float(x.abs().max()):.3g} and a covariance down to "
            f"{float(factor.diagonal().min()) ** 2:.3g}: the divergence is beyond float64; rescale "
            "both"
        )
    return value


def _log_det(x: Tensor) -> float:
    """``log det(x.T x)`` of ``x [n, d]``, in units of its columns: small ones keep their digits.

    NaN, not an error of LAPACK's, unless all is finite.
    """
    width = x.abs().amax(0)
    if not (width.isfinite() & (width > 0)).all():
        return math.nan
    return 2 * float((torch.linalg.svdvals(x / width).log() + width.log()).sum())


def _check_rank(x: Tensor) -> None:
    """Raise if ``x [n, d]`` lies in a hyperplane, whatever the units of its coordinates."""
    size = x.abs().amax(0)
    unit = x / size.clamp_min(torch.finfo(x.dtype).tiny)
    spread = unit - unit.mean(0)
    width = spread.abs().amax(0)
    constant = width <= len(x) * torch.finfo(x.dtype).eps  # what rounding leaves of a constant
    values = torch.linalg.svdvals(spread / width.where(~constant, 1))
    if constant.any() or float(values.min()) <= 1e-7 * float(values.max()):
        raise ValueError("samples lie in a hyperplane: their normal fit has no density")


def gaussian_kl_floor(dimension: int, n: int) -> float:
    r"""Mean of :func:`gaussian_kl` over exact samples of n points, whatever the normal law.

    The sample's covariance is Wishart, so the mean is
    :math:`\tfrac12[d/n + d\log\tfrac{n-1}2 - \sum_{i=1}^d \psi(\tfrac{n-i}2)]`, ψ the digamma
    function (for instance Muirhead 1982, *Aspects of multivariate statistical theory*, chapter 3).

    Raises:
        ValueError: ``n <= dimension`` or ``dimension < 1``.
    """
    from scipy.special import digamma

    if not 1 <= dimension < n:
        raise ValueError(f"n={n} must exceed dimension={dimension}, which must be at least 1")
    logs = sum(float(digamma((n - i) / 2)) for i in range(1, dimension + 1))
    return 0.5 * (dimension / n + dimension * math.log((n - 1) / 2) - logs)


def wasserstein2(a: Tensor, b: Tensor) -> float:
    """Exact Wasserstein-2 distance between two point clouds of equally many points.

    The root of the mean squared distance under the best matching, found by ``scipy.optimize``'s
    ``linear_sum_assignment``. Between two samples of one law in high dimension it is far from 0.

    Args:
        a: ``[n, d]``, at most 4,000 points.
        b: ``[n, d]``.

    Raises:
        ValueError: different shapes, no points, too many, a NaN or an infinity, distances whose
            squares are beyond float64.
    """
    from scipy.optimize import linear_sum_assignment

    x, y = _points("a", a), _points("b", b)
    if x.shape != y.shape:
        raise ValueError(f"a and b must match in shape: {list(x.shape)} and {list(y.shape)}")
    if len(x) > MATCHING_LIMIT:
        raise ValueError(f"a and b hold {len(x)} points; thin them to at most {MATCHING_LIMIT}")
    # Differences, not the expanded square: equal points are at distance 0 exactly.
    cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()
    if not math.isfinite(float(cost.sum())):
        raise ValueError(_TOO_FAR.format("a and b"))
    rows, columns = linear_sum_assignment(cost.cpu().numpy())
    return math.sqrt(float(cost[torch.as_tensor(rows), torch.as_tensor(columns)].mean()))


def mode_weights(
    samples: Tensor,
    means: Tensor,
    variances: float | Sequence[float] | Tensor = 1.0,
    weights: Sequence[float] | Tensor | None = None,
) -> Tensor:
    """Share of the samples in each component of a mixture of isotropic normal laws.

    A sample counts for the component that most likely drew it; ties go to the first.

    Args:
        samples: ``[C, d]``.
        means: ``[K, d]``.
        variances: one for all, or ``[K]``.
        weights: ``[K]`` positive; default equal.

    Returns:
        ``[K]`` float64, of sum 1.

    Raises:
        ValueError: shapes that do not fit, a variance or weight that is not positive, no finite
            samples, distances whose squares, in units of the variances, are beyond float64.
    """
    x, centres = _points("samples", samples), _points("means", means)
    if x.shape[1] != centres.shape[1]:
        raise ValueError(f"means must have {x.shape[1]} coordinates, got {centres.shape[1]}")
    count = len(centres)
    spread = _positive("variances", variances, count)
    prior = _positive("weights", 1.0 if weights is None else weights, count)
    squares = torch.cdist(
        x, centres.to(x.device), compute_mode="donot_use_mm_for_euclid_dist"
    ).square()
    logs = prior.log() - x.shape[1] / 2 * spread.log() - squares.cpu() / (2 * spread)
    if not logs.isfinite().all():
        raise ValueError(_TOO_FAR.format("samples and means, in units of variances,"))
    return torch.bincount(logs.argmax(1), minlength=count).double() / len(x)


def _points(name: str, values: Tensor) -> Tensor:
    """``values`` as finite float64 ``[n, d]`` with n, d ≥ 1."""
    x = torch.as_tensor(values).detach().double()
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be [n, d] with points in it, not of shape {list(x.shape)}")
    if not x.isfinite().all():
        raise ValueError(f"{name} must be finite, but holds {int((~x.isfinite()).sum())} NaN or ∞")
    return x


def _positive(name: str, values: float | Sequence[float] | Tensor, count: int) -> Tensor:
    x = torch.as_tensor(values, dtype=torch.float64).cpu()
    if x.ndim > 1 or (x.ndim == 1 and len(x) != count):
        raise ValueError(f"{name} must be a number or hold {count}, got shape {list(x.shape)}")
    if not bool(((x > 0) & x.isfinite()).all()):
        raise ValueError(f"{name} must be positive and finite, got {x.tolist()}")
    return x.expand(count)


def _normal(
    mean: float | Tensor, covariance: float | Tensor, d: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Mean ``[d]`` and lower Cholesky factor ``[d, d]`` of a normal law."""
    centre = torch.as_tensor(mean, dtype=torch.float64, device=device)
    matrix = torch.as_tensor(covariance, dtype=torch.float64, device=device)
    if centre.ndim > 1 or (centre.ndim == 1 and len(centre) != d):
        raise ValueError(f"mean must be a number or [{d}], not of shape {list(centre.shape)}")
    if matrix.ndim == 0:
        matrix = matrix * torch.eye(d, dtype=torch.float64, device=device)
    if matrix.shape != (d, d):
        raise ValueError(f"covariance must be a number or [{d}, {d}], not {list(matrix.shape)}")
    if not (matrix.isfinite().all() and centre.isfinite().all()):
        raise ValueError("covariance must be positive definite, and mean finite")
    _check_covariance(matrix)
    return centre, torch.linalg.cholesky(matrix)


def _check_covariance(matrix: Tensor) -> None:
    """Raise unless ``[d, d]`` is symmetric to single precision and positive definite to double,
    whatever the units of the coordinates: its correlations must be."""
    deviations = matrix.diagonal().clamp_min(0).sqrt()
    correlations = matrix / deviations / deviations[:, None]
    if (matrix.diagonal() <= 0).any() or not correlations.isfinite().all():
        raise ValueError("covariance must be positive definite, with positive variances")
    # Cholesky reads one triangle alone; a product such as A.T @ A is symmetric to rounding only
    if float((correlations - correlations.T).abs().max()) > 1e-6:
        raise ValueError("covariance must be symmetric: use (c + c.T) / 2")
    factor, info = torch.linalg.cholesky_ex(correlations)
    least = len(matrix) * torch.finfo(matrix.dtype).eps
    if int(info) or float(factor.diagonal().min()) ** 2 <= least:
        raise ValueError("covariance must be positive definite: its correlations are singular")
