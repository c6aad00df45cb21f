"""Point estimates with their intervals: what the book reports instead of bare numbers.

Every function returns an :class:`Estimate`. Nothing here resamples or draws random numbers, so
equal input gives equal output; the quantiles come from ``scipy.special``.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import numpy.typing

_NOISE = 1e-9  # relative: differences below it are rounding noise of the sums, not information
_PLAIN_DECIMALS, _PLAIN_BELOW = 6, 1e7  # beyond these, numbers print in scientific notation


@dataclass(frozen=True)
class Estimate:
    """A point estimate and a two-sided confidence interval around it.

    Attributes:
        value: the point estimate; finite.
        low: lower end of the interval; ``low <= value``; may be ``-inf``.
        high: upper end of the interval; ``value <= high``; may be ``inf``.
        n: number of independent observations behind the estimate; at least 1.
        confidence: nominal coverage of the interval, strictly between 0 and 1.

    Raises:
        ValueError: an end on the wrong side of the value, a NaN, an infinite value, ``n < 1`` or a
            confidence outside (0, 1).
        TypeError: ``n`` is not an integer, or another field is not a number.
    """

    value: float
    low: float
    high: float
    n: int
    confidence: float

    def __post_init__(self) -> None:
        for name in ("value", "low", "high", "confidence"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        object.__setattr__(self, "n", _count("n", self.n, least=1))
        _check_confidence(self.confidence)
        if not math.isfinite(self.value):
            raise ValueError(f"value must be finite, not {self.value}")
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"the interval must hold the value: low <= value <= high, "
                f"not {self.low} <= {self.value} <= {self.high}"
            )

    def __str__(self) -> str:
        """Two significant digits of the half-width decide how many decimals all three show."""
        ends = (self.value, self.low, self.high)
        scale = max(abs(x) for x in ends if math.isfinite(x))
        half = self.high / 2 - self.low / 2
        if _NOISE * scale < half < math.inf:
            decimals = 1 - _exponent(half)
        else:  # no width to go by: three digits of the number itself
            decimals = 2 - _exponent(scale)
        plain = decimals <= _PLAIN_DECIMALS and scale < _PLAIN_BELOW
        value, low, high = (_shown(x, decimals, plain) for x in ends)
        return f"{value} [{low}, {high}] ({100 * self.confidence:.6g} %, n = {self.n})"


def mean_interval(samples: numpy.typing.ArrayLike, confidence: float = 0.95) -> Estimate:
    r"""Mean of independent samples with Student's t interval.

    The interval is :math:`\bar x \pm t_{n-1,(1+c)/2}\, s/\sqrt n`, exact for normal samples
    (Student 1908, *The probable error of a mean*). Equal samples give an interval of width zero:
    for 0/1 outcomes use ``clopper_pearson``, which doesn't.

    Args:
        samples: shape ``(n,)`` with ``n >= 2``, finite numbers; for instance one result a seed.
        confidence: nominal coverage, strictly between 0 and 1.

    Returns:
        the mean, its interval and ``n``.

    Raises:
        ValueError: fewer than two samples, not one-dimensional, a NaN or an infinity.
        TypeError: the samples are not real numbers.
    """
    x = _samples("samples", samples, least=2)
    _check_confidence(confidence)
    error = float(x.std(ddof=1)) / math.sqrt(x.size)
    return _student(float(x.mean()), error, x.size - 1, x.size, confidence)


def paired_difference(
    a: numpy.typing.ArrayLike, b: numpy.typing.ArrayLike, confidence: float = 0.95
) -> Estimate:
    """Mean of ``a - b`` over pairs, with Student's t interval of the differences.

    Pair what shares its randomness (the same seed, split and noise): the common part cancels, and
    the interval is that of the difference, not of two unrelated means.

    Args:
        a: shape ``(n,)`` with ``n >= 2``, finite numbers.
        b: shape ``(n,)``; ``b[i]`` is the partner of ``a[i]``.
        confidence: nominal coverage, strictly between 0 and 1.

    Returns:
        the mean difference, its interval and the number of pairs.

    Raises:
        ValueError: different lengths, fewer than two pairs, a NaN or an infinity.
        TypeError: the samples are not real numbers.
    """
    x, y = _pair(("a", a), ("b", b), least=2)
    return mean_interval(x - y, confidence)


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> Estimate:
    """Success probability of a binomial with its exact ("tail") interval.

    Covers the true probability with at least the nominal confidence for every ``trials`` and
    every probability (Clopper and Pearson 1934, *The use of confidence or fiducial limits
    illustrated in the case of the binomial*), hence conservative; the ends are beta quantiles.

    Args:
        successes: number of successes, ``0 <= successes <= trials``.
        trials: number of independent trials, at least 1.
        confidence: nominal coverage, strictly between 0 and 1.

    Returns:
        ``successes / trials``, its interval and ``n = trials``.

    Raises:
        ValueError: ``successes > trials``, a negative count, or no trial.
        TypeError: a count is not an integer.
    """
    from scipy.special import betainccinv, betaincinv

    trials = _count("trials", trials, least=1)
    successes = _count("successes", successes, least=0)
    if successes > trials:
        raise ValueError(f"successes must be at most trials, but {successes} > {trials}")
    _check_confidence(confidence)
    tail, failures = (1 - confidence) / 2, trials - successes
    low = betaincinv(successes, failures + 1, tail) if successes else 0.0
    high = betainccinv(successes + 1, failures, tail) if failures else 1.0
    return Estimate(successes / trials, float(low), float(high), trials, confidence)


def fit_exponent(
    x: numpy.typing.ArrayLike, y: numpy.typing.ArrayLike, confidence: float = 0.95
) -> Estimate:
    r"""Exponent :math:`p` of a power law :math:`y \approx c\,x^p`: the slope in log-log axes.

    Ordinary least squares of :math:`\log y` on :math:`\log x`, with the t interval of the slope on
    ``n - 2`` degrees of freedom: exact if the errors of :math:`\log y` are independent, normal and
    of one variance. It says nothing on whether a power law fits; plot the points.

    Args:
        x: shape ``(n,)`` with ``n >= 3``, positive, not all equal.
        y: shape ``(n,)``, positive.
        confidence: nominal coverage, strictly between 0 and 1.

    Returns:
        the exponent, its interval and the number of points.

    Raises:
        ValueError: fewer than three points, different lengths, all ``x`` equal, or an entry that is
            zero, negative, NaN or infinite.
        TypeError: the samples are not real numbers.
    """
    import numpy as np

    x, y = _pair(("x", x), ("y", y), least=3)
    _check_confidence(confidence)
    for name, values in (("x", x), ("y", y)):
        if (values <= 0).any():
            raise ValueError(f"{name} must be positive to take logarithms; it holds {values.min()}")
    if (x == x[0]).all():
        raise ValueError(f"x must hold at least two different values, but all are {x[0]}")
    u, v = np.log(x) - np.log(x).mean(), np.log(y) - np.log(y).mean()
    slope = float(u @ v / (u @ u))
    error = math.sqrt(float(((v - slope * u) ** 2).sum() / (x.size - 2) / (u @ u)))
    return _student(slope, error, x.size - 2, x.size, confidence)


def _student(value: float, error: float, df: int, n: int, confidence: float) -> Estimate:
    """``value`` plus and minus the t quantile times its standard ``error``."""
    from scipy.special import stdtrit

    half = -float(stdtrit(df, (1 - confidence) / 2)) * error  # by the lower tail: no rounding to 1
    return Estimate(value, value - half, value + half, n, confidence)


def _pair(
    first: tuple[str, numpy.typing.ArrayLike],
    second: tuple[str, numpy.typing.ArrayLike],
    least: int,
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Both named arguments as ``[n]`` float64, of one length."""
    a, b = _samples(*first, least=least), _samples(*second, least=least)
    if a.size != b.size:
        raise ValueError(
            f"{first[0]} and {second[0]} must pair up, but hold {a.size} and {b.size} numbers"
        )
    return a, b


def _samples(name: str, values: numpy.typing.ArrayLike, least: int) -> numpy.ndarray:
    """``values`` as a finite float64 vector of at least ``least`` entries: ``[n]``."""
    import numpy as np

    x = _real_array(name, values)
    if x.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {x.shape}")
    if x.size < least:
        raise ValueError(f"{name} must hold at least {least} numbers, got {x.size}")
    if not np.isfinite(x).all():
        nans, infs = int(np.isnan(x).sum()), int(np.isinf(x).sum())
        raise ValueError(f"{name} must be finite, but holds {nans} NaN and {infs} infinite")
    return x


def _real_array(name: str, values: numpy.typing.ArrayLike) -> numpy.ndarray:
    import numpy as np

    try:
        x = np.asarray(values)
        if x.dtype.kind in "biufO":  # not text, dates or complex, which numpy would convert
            return x.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a flat array of real numbers "
            f"(for a tensor: .detach().float().cpu().numpy()): {error}"
        ) from error
    raise TypeError(f"{name} must hold real numbers, not {x.dtype}")


def _check_confidence(confidence: float) -> None:
    if not 0 < _number("confidence", confidence) < 1:
        raise ValueError(
            f"confidence must lie strictly between 0 and 1 (0.95 for 95 %), not {confidence}"
        )


def _number(name: str, value: float) -> float:
    """``value`` as a Python float (numpy and zero-dimensional tensors included), never NaN."""
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a number, not {type(value).__name__}: {error}") from error
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, not NaN")
    return number


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer count, not {value}")
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer count, not {value!r}") from error
    if count < least:
        raise ValueError(f"{name} must be at least {least}, not {count}")
    return count


def _exponent(x: float) -> int:
    """Decimal exponent of ``|x|``; 0.0999999999999 counts as 0.1, and 0 as 1."""
    return math.floor(math.log10(abs(x) * (1 + _NOISE))) if x else 0


def _shown(x: float, decimals: int, plain: bool) -> str:
    """``x`` at ``decimals`` places; exact ties go away from zero, whatever noise they carry."""
    if not math.isfinite(x):
        return f"{x}"
    rounded = round(x * (1 + _NOISE), decimals) + 0.0  # + 0.0: no negative zero
    if plain or not rounded:
        return f"{rounded:.{max(0, decimals) if plain else 0}f}"
    return f"{rounded:.{max(0, _exponent(rounded) + decimals)}e}"
