r"""Rigorous enclosures, on a log scale, of Gaussian probabilities and errors in balls.

Everything is computed in ball arithmetic (``flint.arb``), so a quantity such as
:math:`e^{-2\cdot 10^6}` is a number with digits, and every rounding is counted. Floats that come in
are exact binary numbers; the two floats that go out are rounded outwards.

Notation: :math:`z \sim N(m e, I_d)` with a unit vector *e*; :math:`u = e\cdot z`,
:math:`r = \|z\|`, :math:`t = r^2/2`, :math:`\nu_l = e^{-m^2/2}(m^2/2)^l/(l!\,\Gamma(d/2 + l))`. The
density of *z* expanded in powers of *u*, with the moments of one coordinate of a uniform direction,
gives the series behind all functions here, with :math:`(2l)_i = (2l)!/(2l - i)!`:

.. math:: E[r^k u^i;\ r \in A] = 2^{k/2} m^{-i} \sum_{2l \ge i} \nu_l\, (2l)_i
          \int_{r \in A} t^{d/2 + l + k/2 - 1} e^{-t}\, dt .

**Lemma (tails).** For an interval *A* and :math:`k \ge 0` these terms are log-concave in *l*.
Proof: they are :math:`(2l)_i` times Poisson weights times :math:`h(l) = E[g(G_l)]`, where
:math:`G_l` is Gamma distributed with shape :math:`d/2 + l` and :math:`g(t) = t^{k/2}` on *A*, 0
elsewhere, is log-concave. The first two are log-concave, and so is *h*: the densities of
:math:`G_{l-1}, G_l` have an increasing ratio (TP2), :math:`y \mapsto g(y)` and
:math:`y \mapsto E\,g(y + \mathrm{Exp}(1))` a decreasing one because *g* is log-concave (RR2), and
by the basic composition formula :math:`h(l - 1)h(l + 1) \le h(l)^2`. Hence ratios of neighbours
fall with *l*, and a tail that is cut is at most a geometric series with the ratio at the cut.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import cache
from typing import Any

from flint import arb, arb_mat, ctx

__all__ = [
    "LogEnclosure",
    "ball_log_probability",
    "trap_log_error",
    "trap_log_error_parts",
    "truncated_log_moment",
]

GUARD = 64  # bits of the working precision that the truncation of the series does not use
ACCURACY = 40  # bits that a moment has in the end
ATTEMPTS = 7  # each doubles the working precision
LARGEST_POWER = 64  # the cost grows like its cube, and the supremum is near
LARGEST_LENGTH = 1e9
LARGEST_SUM = 1_000_000  # terms
BLOCK = 4096  # terms in a matrix product


@dataclass(frozen=True)
class LogEnclosure:
    """The natural logarithm of a quantity lies between two floats.

    Attributes:
        low: lower end; ``-inf`` for 0.
        high: upper end.

    Raises:
        ValueError: the ends are NaN or out of order.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"low must be at most high, not low={self.low}, high={self.high}")

    @property
    def width(self) -> float:
        """``high − low``; 0 if both are infinite."""
        return 0.0 if self.low == self.high else self.high - self.low

    def __str__(self) -> str:
        digits = 6
        if math.isfinite(self.low) and 0 < self.width < math.inf:  # the first digit that differs
            size = max(abs(self.low), abs(self.high))
            digits = min(17, max(6, 2 + math.ceil(math.log10(size / self.width))))
        low = _digits(self.low, ROUND_FLOOR, digits)
        return f"[{low}, {_digits(self.high, ROUND_CEILING, digits)}]"


def _digits(x: float, rounding: str, digits: int) -> str:
    """Some significant digits, rounded in the given direction."""
    if not math.isfinite(x):
        return f"{x}"
    return f"{Context(prec=digits, rounding=rounding).create_decimal(Decimal(x)):.{digits}g}"


# --- probabilities and moments --------------------------------------------------------------------


def ball_log_probability(
    dimension: int, mean_norm: float, radius: float, *, complement: bool = False
) -> LogEnclosure:
    """Logarithm of P(‖z‖ ≤ radius) for z ~ N(mean, I): the non-central χ² distribution function.

    Args:
        dimension: d, at least 1.
        mean_norm: ‖mean‖, taken as exact.
        radius: a length, taken as exact.
        complement: of P(‖z‖ > radius) instead.

    Returns:
        the enclosure; its width is a few units in the last place.

    Raises:
        ValueError: a dimension below 1; a norm or radius that is negative, NaN or above 10⁹.
        TypeError: ``dimension`` is not an integer.
    """
    d, m = _count("dimension", dimension), _length("mean_norm", mean_norm)
    if not (radius := _length("radius", radius)):
        return LogEnclosure(0.0, 0.0) if complement else LogEnclosure(-math.inf, -math.inf)
    found = _enclosure(_certify(lambda: _moment(d, m, radius, 0.0, 0, complement)))
    return LogEnclosure(min(0.0, found.low), min(0.0, found.high))


def truncated_log_moment(
    dimension: int, mean_norm: float, radius: float, power: float = 0.0, axis_power: int = 0
) -> LogEnclosure:
    """Logarithm of E[r^power u^axis_power; r ≤ radius] for z ~ N(mean, I).

    r = ‖z‖ and u is the coordinate along the mean.

    Args:
        dimension: d, at least 1.
        mean_norm: ‖mean‖, taken as exact.
        radius: a length, taken as exact.
        power: any real number ≥ 0, taken as exact.
        axis_power: an integer ≥ 0.

    Returns:
        the enclosure; ``-inf`` twice if the moment is 0 (radius 0, or mean 0 and an odd
        ``axis_power``).

    Raises:
        ValueError: an argument that is negative, NaN or infinite, or a dimension below 1.
        TypeError: ``dimension`` or ``axis_power`` is not an integer.
    """
    d, m = _count("dimension", dimension), _length("mean_norm", mean_norm)
    radius, k = _length("radius", radius), _length("power", power)
    i = _count("axis_power", axis_power, least=0)
    if not radius or (not m and i % 2):
        return LogEnclosure(-math.inf, -math.inf)
    return _enclosure(_certify(lambda: _moment(d, m, radius, k, i, False)))


def _moment(d: int, m: float, radius: float, k: float, i: int, outside: bool) -> Any:
    """E[r^k u^i] in the ball or outside it, to the precision of the context."""
    x = arb(radius) ** 2 / 2
    zone = (x, None) if outside else (arb(0), x)
    shift, first = arb(k) / 2, (i + 1) // 2
    if not m:  # a single term; 0⁰ = 1
        span = (first, first)
    else:
        span = _span(_log_terms(d, m, zone, k / 2, i), first)
    rows = _rows(_weights(d, arb(m), span, i), span[0], i)[i:]
    table = _integrals(arb(d) / 2 + span[0] + shift, len(rows[0]), *zone)
    total = _products(rows, [table], len(table), 1)[0, 0]
    if m:
        ends = [rows[0][n] * table[n] for n in (0, 1, -2, -1)]
        total += _positive(_tail(ends, span[0] > first))
    return arb(2) ** shift * total


# --- the error of a trap --------------------------------------------------------------------------


def trap_log_error(
    dimension: int,
    mean_norm: float | None,
    alpha: float,
    inner: float,
    outer: float,
    p: float,
    *,
    distance: float | None = None,
) -> LogEnclosure:
    r"""Logarithm of the L^p error of a trap's score under its target N(mean, I).

    Estimate minus exact score is :math:`-\psi(r)\,((\alpha - 1)y + m e)` for *y* relative to the
    centre of the trap, with :math:`\psi = 1` up to the inner radius, 0 from the outer one on, and
    linear between (theorem 1 of Cao, Chen, Sridharan and Wu).

    - Even *p*: the *p*-th power is a polynomial in *u* and *r* in either zone: a closed series,
      tight to rounding.
    - Other *p*: with :math:`N = \|(\alpha - 1)y + m e\|`, :math:`\log E[\psi^a N^b]` is convex in
      *(a, b)* (Hölder) and known for integer *a* and even *b*: chords bound it above, their
      extensions below. For whole *p* the width falls fast with the dimension (theorem 1's trap and
      p = 1: 1e-2 at d = 1, 1e-5 at 64); for a fraction it stays near 0.1 to 0.2.
    - Infinite *p*: the supremum, in closed form.

    Args:
        dimension: d, at least 1.
        mean_norm: distance of the centre to the mean, a length, taken as exact; or None.
        alpha: pull of the trap, positive.
        inner: radius of the trap in units of √d, at least 0.
        outer: radius beyond which the estimate is exact, in units of √d.
        p: at least 1; at most 64, or ``math.inf``.
        distance: instead of ``mean_norm``, in units of √d, so that 7√d is not rounded.

    Returns:
        the enclosure; ``-inf`` twice if the estimate is exact (α = 1 and centre = mean).

    Raises:
        ValueError: an argument out of its range; none or both of ``mean_norm`` and ``distance``.
        TypeError: ``dimension`` is not an integer.
        ArithmeticError: a precision of several thousand bits does not suffice.
    """
    trap = _trap(dimension, mean_norm, alpha, inner, outer, distance)
    return _norm(trap, _power(p), (True, True))


def trap_log_error_parts(
    dimension: int,
    mean_norm: float | None,
    alpha: float,
    inner: float,
    outer: float,
    p: float,
    *,
    distance: float | None = None,
) -> tuple[LogEnclosure, LogEnclosure]:
    """The error of :func:`trap_log_error` from the inner ball alone, and from the bump alone.

    The *p*-th powers of the two sum to that of the whole; for infinite ``p`` the larger is it.
    Arguments and errors are those of :func:`trap_log_error`.
    """
    trap, p = _trap(dimension, mean_norm, alpha, inner, outer, distance), _power(p)
    return _norm(trap, p, (True, False)), _norm(trap, p, (False, True))


@dataclass(frozen=True)
class _Trap:
    """The checked arguments; each is an exact number."""

    dimension: int
    length: float  # of the mean, in the unit below
    in_roots: bool  # unit √d instead of 1
    alpha: float
    inner: float
    outer: float

    def balls(self) -> tuple[Any, Any, Any, Any]:
        """m, α − 1, and r²/2 at the two radii, to the precision of the context."""
        d = arb(self.dimension)
        m = arb(self.length) * (d.sqrt() if self.in_roots else 1)
        return (
            m,
            arb(self.alpha) - 1,
            arb(self.inner) ** 2 * d / 2,
            arb(self.outer) ** 2 * d / 2,
        )

    def exact(self) -> bool:
        """Whether there is no error at all."""
        return self.alpha == 1 and not self.length


def _norm(trap: _Trap, p: float, zones: tuple[bool, bool]) -> LogEnclosure:
    """Logarithm of the L^p norm of the error over the chosen zones (inner ball, bump)."""
    if trap.exact() or (zones == (True, False) and not trap.inner):
        return LogEnclosure(-math.inf, -math.inf)
    with ctx.workprec(2 * GUARD):
        if p == math.inf:
            return _enclosure(_supremum(trap, zones))
        low, high = _between_powers(trap, p, zones)
        return LogEnclosure(_below(low / arb(p)), _above(high / arb(p)))


def _supremum(trap: _Trap, zones: tuple[bool, bool]) -> Any:
    """sup ψ(r)·(|α − 1|r + m): linear in the ball, a parabola in r beyond, open at its top."""
    m, beta, x_in, x_out = trap.balls()
    inner, outer, slope = (2 * x_in).sqrt(), (2 * x_out).sqrt(), abs(beta)
    at_inner = slope * inner + m
    if not zones[1] or trap.alpha == 1:
        return at_inner
    top = (outer - m / slope) / 2
    at_top = (slope * outer + m) ** 2 / (4 * slope * (outer - inner))
    if top > inner:
        return at_top
    # undecided only if the top lies within rounding of the inner radius
    return at_inner if top < inner else at_inner.union(at_top)


def _between_powers(trap: _Trap, p: float, zones: tuple[bool, bool]) -> tuple[Any, Any]:
    """Bounds of log E[ψ^p N^p] over the zones from integer powers of ψ and even ones of N."""

    @cache
    def at(a: int, half: int) -> tuple[Any, Any]:
        bump = _zone_moment(trap, True, a, half) if zones[1] else arb(0)
        log = (bump + (_inside(trap, half, bump) if zones[0] else 0)).log()
        return log, log

    def along(half: int) -> tuple[Any, Any]:
        return _convex(lambda a: at(a, half), p if zones[1] else 0.0)

    return _convex(along, p / 2)


def _convex(values: Callable[[int], tuple[Any, Any]], x: float) -> tuple[Any, Any]:
    """Bounds at x ≥ 0 of a convex function with known bounds at the integers ≥ 0."""
    left = math.floor(x)
    if x == left:
        return values(left)
    share = arb(x) - left
    (low, high), (next_low, next_high) = values(left), values(left + 1)
    above = (1 - share) * high + share * next_high
    below = next_low - (1 - share) * (values(left + 2)[1] - next_low)
    if left:
        below = below.max(low + share * (low - values(left - 1)[1]))
    return below, above


def _inside(trap: _Trap, q: int, beside: Any) -> Any:
    """E[N^(2q)] over the inner ball; only a bound where it is negligible ``beside`` a number."""
    if not trap.inner:
        return arb(0)
    m, beta, x_in, _ = trap.balls()
    bound = (abs(beta) * (2 * x_in).sqrt() + m) ** (2 * q) * _chernoff(trap.dimension, m, x_in)
    if bound < beside * arb(2) ** -(ACCURACY + 8):
        return _positive(bound)
    return _zone_moment(trap, False, 0, q)


def _chernoff(d: int, m: Any, x: Any) -> Any:
    """An upper bound of P(r²/2 ≤ x): E exp(θ(x − r²/2)) for any θ ≥ 0, near the best one."""
    square, norm = 2 * float(x), float(m)
    theta = (d + math.sqrt(d * d + 4 * square * norm**2)) / (2 * square) - 1 if square else 0.0
    if not 0 < theta < math.inf:
        return arb(1)
    s = 1 + arb(theta)
    return (theta * x - arb(d) / 2 * s.log() - theta * m**2 / (2 * s)).exp()


def _zone_moment(trap: _Trap, bump: bool, j: int, q: int) -> Any:
    """E[ψ^j N^(2q)] over the bump or, with j = 0, the inner ball, with ``ACCURACY`` bits."""
    # Cancellation in bits: a guess, _certify raises it if need be. ψ is about j/d where it counts.
    lost = 4 + 2 * q + (j * (3.5 + math.log2(1 + trap.dimension / j)) if j else 0)
    if bump:
        lost += j * math.log2(trap.outer / (trap.outer - trap.inner))
    start = GUARD + ACCURACY + math.ceil(lost)
    return _certify(lambda: _zone_series(trap, bump, j, q), start)


def _zone_series(trap: _Trap, bump: bool, j: int, q: int) -> Any:
    r"""E[ψ^j N^(2q)] over one zone, to the precision of the context.

    With :math:`\beta = \alpha - 1`, the average of :math:`N^{2q} e^{mu}` over directions turns
    each :math:`(m u)^{2l}` into a polynomial: the sum is
    :math:`\sum_l \nu_l \sum_a P_a(l) H_{l + a}` with :math:`H_s = \int \psi^j t^{d/2+s-1} e^{-t}`.
    A term is at most :math:`\nu_l D(l)^q H^0_l`, where :math:`H^0` has no ψ and
    :math:`D(l) = 2\beta^2 x_{hi} + 4|\beta| l + m^2`; D grows with *l*, its ratio falls.
    """
    m, beta, x_in, x_out = trap.balls()
    zone = (x_in, x_out) if bump else (arb(0), x_in)
    crude = 2 * beta**2 * zone[1] + m**2

    def size(n: float) -> float:
        return _log_float(crude + 4 * abs(beta) * n)

    span = (0, 0)
    if trap.length:
        logs = _log_terms(trap.dimension, float(m), zone, 0.0, 0)
        span = _span(lambda n: logs(n) + q * size(n), 0)
    first, count = span[0], span[1] - span[0] + 1
    shape, shifts = arb(trap.dimension) / 2 + first, q + j // 2 + 1
    rows = _rows(_weights(trap.dimension, m, span, 0), first, q)
    tables = [_integrals(shape, count + shifts - 1, *zone)]
    tables += [_integrals(shape + arb(0.5), count + shifts - 1, *zone)] if j else []
    sums = _products(rows, tables, count, shifts)
    total = _combine(sums, _bump_coefficients(x_in, x_out, j), _error_coefficients(m, beta, q))
    if not trap.length:
        return total
    sizes = [(crude + 4 * abs(beta) * n) ** q for n in (first, span[1], span[1] + 1)]
    ends = [rows[0][n] * tables[0][n] for n in (0, 1, count - 2, count - 1)]
    return total + _tail(ends, first > 0, sizes)


def _bump_coefficients(x_in: Any, x_out: Any, j: int) -> list[Any]:
    """ψ^j as a polynomial in √t, lowest power first: ψ = (√x_out − √t)/(√x_out − √x_in)."""
    top = x_out.sqrt()
    scale = (top - x_in.sqrt()) ** -j if j else arb(1)
    return [scale * top ** (j - c) * ((-1) ** c * math.comb(j, c)) for c in range(j + 1)]


def _error_coefficients(m: Any, beta: Any, q: int) -> list[list[Any]]:
    """Coefficients of P_a(l) in the falling factorials (2l)_i: one row for each a."""
    squares = [m ** (2 * c) for c in range(q + 1)]
    rows = []
    for a in range(q + 1):
        front = math.comb(q, a) * 2**a * beta ** (2 * a)
        row = [math.comb(q - a, i) * (2 * beta) ** i * squares[q - a - i] for i in range(q - a + 1)]
        rows.append([front * x for x in row])
    return rows


def _combine(sums: Any, bump: list[Any], error: list[list[Any]]) -> Any:
    """Σ coefficients times the sums of :func:`_products`: ψ^j by c, N^(2q) by a and i."""
    total = arb(0)
    for c, b in enumerate(bump):
        for a, row in enumerate(error):
            column = 2 * (a + c // 2) + c % 2 if len(bump) > 1 else a
            total += b * sum((x * sums[i, column] for i, x in enumerate(row)), arb(0))
    return total


# --- the series -----------------------------------------------------------------------------------


def _certify(evaluate: Callable[[], Any], bits: int = GUARD + ACCURACY) -> Any:
    """A ball with ``ACCURACY`` bits, at the smallest precision that gives it, by doubling."""
    for _ in range(ATTEMPTS):
        with ctx.workprec(bits):
            ball = evaluate()
            if ball > 0 and ball.rel_accuracy_bits() >= ACCURACY:
                return ball
        bits *= 2
    raise ArithmeticError(
        f"{bits // 2} bits do not suffice here: the terms of the series cancel too far. Move the "
        "radii apart or lower the power"
    )


def _span(log_term: Callable[[float], float], least: int) -> tuple[int, int]:
    """First and last index of the terms that are summed, around the largest one.

    A guess in floats, for log-concave terms: what is left out is bounded afterwards.
    """
    drop = (ctx.prec - GUARD) * math.log(2) + 5
    peak = _last(lambda n: log_term(n) > log_term(n - 1), least)
    floor = log_term(peak) - drop
    last = _last(lambda n: log_term(n) > floor, peak) + 1
    if log_term(least) > floor:
        first = least
    else:
        first = peak - _last(lambda n: n <= peak - least and log_term(peak - n) > floor, 0)
    if last - first > LARGEST_SUM:
        raise ValueError(
            f"the series needs {last - first} terms, more than {LARGEST_SUM}: norm times radius "
            "is too large"
        )
    return first, max(last, first + 1)


def _last(holds: Callable[[int], bool], start: int) -> int:
    """Last n ≥ start with ``holds``, which is true up to some n and false beyond; or start."""
    step = 1
    while holds(start + step):
        step *= 2
    low, high = start + step // 2, start + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _log_terms(
    d: int, m: float, zone: tuple[Any, Any], shift: float, i: int
) -> Callable[[float], float]:
    """About log(ν_l (2l)_i ∫ t^(d/2+l+shift−1) e^(−t)) up to a constant, in floats.

    The integrand is taken at its largest.
    """
    log_rate = 2 * math.log(m) - math.log(2)
    low = _log_float(zone[0])
    high = math.inf if zone[1] is None else _log_float(zone[1])

    def log_term(n: float) -> float:
        shape = d / 2 + n + shift
        log_t = min(max(math.log(shape), low), high)
        integral = shape * log_t - math.exp(log_t) - math.lgamma(d / 2 + n)
        falling = math.lgamma(2 * n + 1) - math.lgamma(2 * n - i + 1) if i else 0.0
        return n * log_rate - math.lgamma(n + 1) + integral + falling

    return log_term


def _log_float(x: Any) -> float:
    """Logarithm of a ball's middle as a float, whatever its exponent."""
    return float(arb(x.mid()).log().mid()) if x.mid() > 0 else -math.inf


def _weights(d: int, m: Any, span: tuple[int, int], i: int) -> list[Any]:
    """m^(−i) ν_l for l in the span."""
    first, square = span[0], m**2
    front = m ** (2 * first - i) / arb(2) ** first
    gammas = arb(first + 1).lgamma() + (arb(d) / 2 + first).lgamma()
    weight = front * (-square / 2 - gammas).exp()
    weights = [weight]
    for n in range(first + 1, span[1] + 1):
        weight = weight * square / (n * (d + 2 * n - 2))
        weights.append(weight)
    return weights


def _rows(weights: list[Any], first: int, up_to: int) -> list[list[Any]]:
    """The weights times the falling factorials (2l)_i, i = 0 … ``up_to``."""
    rows = [weights]
    for i in range(up_to):
        start = 2 * first - i
        rows.append([w * max(start + 2 * n, 0) for n, w in enumerate(rows[-1])])
    return rows


def _products(rows: list[list[Any]], tables: list[list[Any]], count: int, shifts: int) -> Any:
    """Σ_n row_n table_(n+shift): a matrix, one column for each shift and, fastest, table.

    In blocks, so that memory does not grow with ``shifts · count``.
    """
    total = arb_mat(len(rows), shifts * len(tables))
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        left = [x for row in rows for x in row[start : start + size]]
        right = [
            x
            for shift in range(shifts)
            for table in tables
            for x in table[start + shift : start + shift + size]
        ]
        columns = arb_mat(shifts * len(tables), size, right)
        total += arb_mat(len(rows), size, left) * columns.transpose()
    return total


def _integrals(shape: Any, count: int, low: Any, high: Any | None) -> list[Any]:
    """∫ t^(a−1) e^(−t) from low to high for a = shape, shape + 1, …: ``count`` balls.

    ``high`` None is infinity. By parts,
    :math:`I_{a+1} = a I_a + low^a e^{-low} - high^a e^{-high}`: upwards if most of the mass is near
    the lower end, downwards if it is near the upper one, so that no step loses much.
    """
    middle = float(shape.mid()) + count / 2
    if high is None or low > middle:
        return _integrals_up(shape, count, low, high)
    return _integrals_down(shape, count, low, high)


def _integrals_up(shape: Any, count: int, low: Any, high: Any | None) -> list[Any]:
    a, at_low, at_high = shape, low**shape * (-low).exp(), arb(0)
    value = low.gamma_upper(a)
    if high is None:
        high = arb(1)
    else:
        value -= high.gamma_upper(a)
        at_high = high**a * (-high).exp()
    values = [value]
    for _ in range(count - 1):
        value = a * value + at_low - at_high
        at_low, at_high, a = at_low * low, at_high * high, a + 1
        values.append(value)
    return values


def _integrals_down(shape: Any, count: int, low: Any, high: Any) -> list[Any]:
    a = shape + (count - 1)
    value = _lower_gamma(a, high)
    at_high, high_step = high ** (a - 1) * (-high).exp(), 1 / high
    at_low, low_step = arb(0), arb(0)
    if low != 0:
        value -= _lower_gamma(a, low)
        at_low, low_step = low ** (a - 1) * (-low).exp(), 1 / low
    values = [value]
    for _ in range(count - 1):
        a = a - 1
        value = (value + at_high - at_low) / a
        at_high, at_low = at_high * high_step, at_low * low_step
        values.append(value)
    return values[::-1]


def _lower_gamma(a: Any, x: Any) -> Any:
    """γ(a, x). The library's own is slow and loses all digits where a and x are large and close.

    For a > x the series :math:`x^a e^{-x} \\sum_n x^n / (a)_{n+1}`, whose rest is geometric.
    """
    if not a > x:
        return a.gamma() - x.gamma_upper(a)
    term, total, n = 1 / a, arb(0), a
    small = arb(2) ** -ctx.prec
    while True:
        for _ in range(16):
            total += term
            n += 1
            term = term * x / n
        rest = term / (1 - x / (n + 1))
        if rest < total * small:
            return x**a * (-x).exp() * (total + _positive(rest))


def _tail(ends: Sequence[Any], below: bool, growth: Sequence[Any] | None = None) -> Any:
    """A ball around 0 that holds what log-concave terms sum to outside a span.

    ``ends``: the first two terms of the span and the last two; ``below``: whether there are terms
    below it. ``growth``: a factor of the terms at the first, the last, and after the last index,
    which increases with a ratio that does not. The ratio at the cut bounds all beyond it.
    """
    at_first, at_last, after = growth or (arb(1),) * 3
    bound = at_last * ends[3] * _geometric(ends[3] / ends[2] * (after / at_last))
    if below:
        bound += at_first * ends[0] * _geometric(ends[0] / ends[1])
    return arb(0, bound.upper())


def _geometric(ratio: Any) -> Any:
    """Σ_{n ≥ 1} ratio^n; not finite unless the ratio is certainly below 1."""
    return ratio / (1 - ratio) if ratio < 1 else arb.nan()


def _positive(ball: Any) -> Any:
    """A ball that holds 0 and every number up to the top of this one."""
    top = arb(ball.upper())
    return arb(0).union(top) if top.is_finite() else arb.nan()


# --- balls to floats ------------------------------------------------------------------------------


def _enclosure(ball: Any) -> LogEnclosure:
    """Of the logarithm of a positive ball."""
    with ctx.workprec(2 * GUARD):
        log = ball.log()
        return LogEnclosure(_below(log), _above(log))


def _below(x: Any) -> float:
    """A float below the ball."""
    return math.nextafter(float(x.lower()), -math.inf)


def _above(x: Any) -> float:
    """A float above the ball."""
    return math.nextafter(float(x.upper()), math.inf)


# --- arguments ------------------------------------------------------------------------------------


def _trap(
    dimension: int,
    mean_norm: float | None,
    alpha: float,
    inner: float,
    outer: float,
    distance: float | None,
) -> _Trap:
    d = _count("dimension", dimension)
    if (mean_norm is None) == (distance is None):
        raise ValueError("give exactly one of mean_norm (a length) and distance (in units of √d)")
    if mean_norm is None:
        length = _length("distance", distance)
    else:
        length = _length("mean_norm", mean_norm)
    if not 0 < (alpha := float(alpha)) < math.inf:
        raise ValueError(f"alpha must be positive and finite, not {alpha}")
    inner, outer = _length("inner", inner), _length("outer", outer)
    if not inner < outer:
        raise ValueError(f"inner must be below outer, not inner={inner}, outer={outer}")
    return _Trap(d, length, mean_norm is None, alpha, inner, outer)


def _power(p: float) -> float:
    p = float(p)
    if not (1 <= p <= LARGEST_POWER or p == math.inf):
        raise ValueError(
            f"p must be at least 1 and at most {LARGEST_POWER}, or math.inf for the supremum, "
            f"not {p}"
        )
    return p


def _length(name: str, value: Any) -> float:
    number = float(value)
    if not 0 <= number <= LARGEST_LENGTH:
        raise ValueError(f"{name} must lie in [0, {LARGEST_LENGTH:g}], not {value}")
    return number


def _count(name: str, value: int, least: int = 1) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, not {value!r}") from error
    if not least <= count < 2**53:
        raise ValueError(f"{name} must be at least {least} and below 2^53, not {count}")
    return count
