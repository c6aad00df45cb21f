"""Leading eigenpairs and spectral densities of symmetric operators that are known by products only.

``top_eigenpairs`` keeps everything it has paid for. Beside an orthonormal basis Q it stores the
products HQ, so that Ritz values, and residuals as they are and not as a recurrence predicts them,
cost no further application of the operator. What HQ has outside Q is stored as well, in factored
form, HQ = QT + UB with orthonormal U (the pool); every next block is drawn from this pool. With a
random start and single columns this is the Lanczos method with full reorthogonalisation, with
wider blocks block Lanczos, and with a given start a block method that follows only those residual
directions that matter.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..stats import Estimate, mean_interval

Which = Literal["LM", "LA"]
_MEMORY = 2 * 1024**3  # bytes for basis and products together, before the first restart
_WIDEST = 32  # columns of a block that has grown after breakdowns
_PROBE_WIDTH, _PROBE_DEPTH = 4, 3  # of the search for missed eigenvalues: a block, single steps
_INVARIANT = 4.0  # times tol: how far the first products may lead out of a start that is used whole


@dataclass(frozen=True)
class Eigenpairs:
    """Approximate eigenpairs with their residuals.

    Attributes:
        values: [k], by falling modulus ("LM") or falling value ("LA").
        vectors: [P, k], orthonormal columns.
        residuals: [k], ``||Hv - λv||`` from the stored products, not from a recurrence.
        residuals_relative: [k], the residuals over the pair's own ``|λ|`` (0 where both vanish).
        converged: every residual is at most ``tol`` times the largest modulus seen.
        applications: columns multiplied by the operator, all of them.
        gap: ``|λ_k| / |λ_{k+1}|`` by Ritz values ("LA": of the values); infinite if the rest is
            zero or there is no rest, NaN if no further Ritz value was computed or the signs differ.
        unresolved: λ_k and λ_{k+1} are not apart by more than their residuals, or by so little that
            ``subspace_bound`` says nothing: k cuts through a cluster, and the last vectors are not
            determined by the operator.
        subspace_bound: bound on the sine of the largest angle between the span of ``vectors`` and
            the invariant subspace (Davis & Kahan 1970, the sin Θ theorem): norm of the residual
            matrix over the distance from λ_k to λ_{k+1}, the latter by its Ritz value and residual.
            Infinite without a gap; above 1 it says nothing.
        verified: after convergence a search from new random directions found nothing larger.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    residuals_relative: Tensor
    converged: bool
    applications: int
    gap: float
    unresolved: bool
    subspace_bound: float
    verified: bool


class _Operator(NamedTuple):
    """What the solvers need: P, dtype and device of the vectors, the product [P, b] -> [P, b]."""

    size: int
    dtype: torch.dtype
    device: torch.device
    product: Callable[[Tensor], Tensor]


def _adapt(operator: Any) -> _Operator:
    """One face for a dense tensor, an operator with torch ``matmat``, and what SciPy takes.

    Raises:
        TypeError: neither of these, or complex or half-precision numbers.
        ValueError: not square, or empty.
    """
    if isinstance(operator, Tensor):
        matrix = operator.detach()
        _check_square(tuple(matrix.shape))
        return _checked(len(matrix), matrix.dtype, matrix.device, lambda v: matrix @ v)
    if isinstance(getattr(operator, "dtype", None), torch.dtype) and hasattr(operator, "matmat"):
        _check_square(tuple(operator.shape))
        device = torch.device(getattr(operator, "device", "cpu"))
        return _checked(operator.shape[0], operator.dtype, device, operator.matmat)
    return _from_scipy(operator)


def _from_scipy(operator: Any) -> _Operator:
    from scipy.sparse.linalg import aslinearoperator

    try:
        linear = aslinearoperator(operator)
    except TypeError:
        raise TypeError(
            f"operator is a {type(operator).__name__}; give a square tensor, an operator with "
            "shape, torch dtype and matmat, or a SciPy LinearOperator"
        ) from None
    _check_square(linear.shape)
    kind = np.dtype(linear.dtype or np.float64)
    if kind.kind == "c":
        raise TypeError(f"operator has dtype {kind}; only real symmetric operators are supported")
    dtype = torch.float32 if kind == np.float32 else torch.float64

    def product(v: Tensor) -> Tensor:
        return torch.as_tensor(np.asarray(linear.matmat(v.numpy())), dtype=dtype)

    return _checked(linear.shape[0], dtype, torch.device("cpu"), product)


def _check_square(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise ValueError(f"operator has shape {shape}; a square, non-empty one is needed")


def _checked(
    size: int, dtype: torch.dtype, device: torch.device, product: Callable[[Tensor], Tensor]
) -> _Operator:
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"operator has dtype {dtype}; use float32 or, better, float64")

    def guarded(v: Tensor) -> Tensor:
        result = product(v).detach()
        if result.shape != v.shape:
            raise ValueError(f"operator maps {tuple(v.shape)} to {tuple(result.shape)}")
        if not bool(torch.isfinite(result).all()):
            raise ValueError("operator returned NaN or infinity; check the model and its data")
        return result

    return _Operator(size, dtype, device, guarded)


def _random(rows: int, size: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers [rows, size], the same on every device and (rounded) dtype."""
    numbers = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    return numbers.to(like)


def _remove(rows: Tensor, *spans: Tensor, passes: int = 2) -> Tensor:
    """``rows`` [b, P] minus their parts in the spans of orthonormal rows.

    Two passes are enough for orthogonality to rounding (Giraud, Langou & Rozložník 2005).
    """
    for _ in range(passes):
        for span in spans:
            rows = rows - (rows @ span.T) @ span
    return rows


def _orthonormal(rows: Tensor) -> Tensor:
    """Orthonormal rows by QR, oriented like ``rows``: nearly orthonormal ones hardly move."""
    q, r = torch.linalg.qr(rows.T)
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).T


def _split(rows: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """``rows`` [b, P] as coefficients [b, q] (float64, CPU) times orthonormal directions [q, P].

    Directions with a singular value up to ``threshold`` are dropped.
    """
    q, r = torch.linalg.qr(rows.T)
    left, values, right = torch.linalg.svd(r.double().cpu())
    keep = values > threshold
    coefficients = right.T[:, keep] * values[keep]
    return coefficients, (q @ left[:, keep].to(q)).T


class _Ritz(NamedTuple):
    """Ritz values [m] in the order asked for, coefficients [m, m], estimated residuals [m]."""

    values: Tensor
    coefficients: Tensor
    residuals: Tensor


@dataclass
class _Search:
    """The search space: orthonormal basis, products, projected matrix, and the pool.

    All vectors are rows, for contiguous growth: basis Q and products HQ [capacity, P], of which the
    first ``size`` are filled; pool U [p, P]. T [m, m] = QᵀHQ and B [p, m] = UᵀHQ are small and live
    on the CPU in float64. HQ = QT + UB up to what was dropped.
    """

    operator: _Operator
    which: Which
    limit: int
    drop: float
    asymmetry: float
    generator: torch.Generator
    capacity: int
    applications: int = 0
    size: int = 0
    scale: float = 0.0
    basis_rows: Tensor = field(init=False)
    product_rows: Tensor = field(init=False)
    projected: Tensor = field(init=False)
    pool: Tensor = field(init=False)
    reserve: Tensor = field(init=False)
    coupling: Tensor = field(init=False)

    def __post_init__(self) -> None:
        like = torch.empty(0, dtype=self.operator.dtype, device=self.operator.device)
        self.basis_rows = like.new_empty(self.capacity, self.operator.size)
        self.product_rows = like.new_empty(self.capacity, self.operator.size)
        self.projected = torch.zeros(self.capacity, self.capacity, dtype=torch.float64)
        self.pool = like.new_empty(0, self.operator.size)
        self.reserve = self.pool
        self.coupling = torch.empty(0, 0, dtype=torch.float64)

    @property
    def basis(self) -> Tensor:
        return self.basis_rows[: self.size]

    @property
    def products(self) -> Tensor:
        return self.product_rows[: self.size]

    @property
    def room(self) -> int:
        """Columns that may still be multiplied."""
        return min(self.limit - self.applications, self.operator.size - self.size)

    def add_random(self, count: int) -> int:
        """Random directions orthogonal to basis and pool, put at the end of the pool."""
        count = min(count, self.operator.size - self.size - len(self.pool))
        rows = _random(count, self.operator.size, self.pool, self.generator)
        for _ in range(2):  # the second time repairs what normalising has blown up
            rows = _orthonormal(_remove(rows, self.basis, self.pool))
        self.pool = torch.cat([self.pool, rows])
        self.coupling = torch.cat([self.coupling, torch.zeros(count, self.size).double()])
        return count

    def expand(self, chosen: slice) -> int:
        """Multiplies these rows of the pool and moves them to the basis; new directions go last.

        Returns:
            how many new directions the products brought.
        """
        block = self.pool[chosen]
        known = self.coupling[chosen]  # [b, m]: block H Qᵀ, from the products H Qᵀ
        keep = torch.ones(len(self.pool), dtype=torch.bool)
        keep[chosen] = False
        pool, coupling = self.pool[keep.to(self.pool.device)], self.coupling[keep]
        image = self.operator.product(block.T.contiguous()).T  # [b, P]
        old, new = self.size, self.size + len(block)
        self.basis_rows[old:new], self.product_rows[old:new] = block, image
        self.size, self.applications = new, self.applications + len(block)
        column = (self.basis @ image.T).double().cpu()  # [m + b, b]
        self._check_symmetry(column, known)
        self.projected[:new, old:new], self.projected[old:new, :new] = column, column.T
        across = pool @ image.T  # [p, b]
        rest = image - column.T.to(image) @ self.basis - across.T @ pool
        coefficients, directions = self._directions(rest, pool)
        self._store_pool(pool, coupling, across.double().cpu(), coefficients, directions)
        return len(directions)

    def _directions(self, rest: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        """``rest`` [b, P] as coefficients [b, q] times new directions [q, P], by falling weight.

        The second pass of the orthogonalisation is done on the normalised directions: a small rest
        is inexact in relation to its own size.
        """
        coefficients, directions = _split(rest, self.drop * self.scale)
        directions = _remove(directions, self.basis, pool, passes=1)
        inner, directions = _split(directions, 0.5)  # what shrinks so was rounding error
        left, values, right = torch.linalg.svd(coefficients @ inner, full_matrices=False)
        return left * values, right.to(directions) @ directions

    def _check_symmetry(self, column: Tensor, known: Tensor) -> None:
        """Compares qᵀHv with vᵀHq for the new v: both come from products that are there anyway.

        Raises:
            ValueError: they differ by more than rounding and dropped directions explain.
        """
        old = known.shape[1]
        self.scale = max(self.scale, float(torch.linalg.vector_norm(column, dim=0).max()))
        difference = torch.cat([column[:old] - known.T, column[old:] - column[old:].T])
        worst = float(difference.abs().max())
        if worst > self.asymmetry * self.scale:
            raise ValueError(
                f"operator is not symmetric: uᵀHv and vᵀHu differ by {worst:.1e} "
                f"({worst / self.scale:.1e} of the largest product); symmetrise it, e.g. (H + Hᵀ)/2"
            )

    def _store_pool(
        self, pool: Tensor, coupling: Tensor, across: Tensor, coefficients: Tensor, new: Tensor
    ) -> None:
        self.pool = torch.cat([pool, new])
        old_rows = torch.cat([coupling, across], 1)
        new_rows = torch.cat([torch.zeros(len(new), coupling.shape[1]).double(), coefficients.T], 1)
        self.coupling = torch.cat([old_rows, new_rows])

    def ritz(self) -> _Ritz:
        """Rayleigh–Ritz pairs of the basis; residuals by ``||U B s||``, at no further product."""
        values, vectors = torch.linalg.eigh(self.projected[: self.size, : self.size])
        key = values.abs() if self.which == "LM" else values
        order = key.argsort(descending=True, stable=True)
        vectors = vectors[:, order]
        residuals = torch.linalg.vector_norm(self.coupling @ vectors, dim=0)
        return _Ritz(values[order], vectors, residuals)

    def worst(self, k: int) -> float:
        """Largest of the first k estimated residuals, in units of the largest modulus."""
        if self.size < k:
            return math.inf
        ritz = self.ritz()
        largest = float(ritz.values.abs().max())
        residual = float(ritz.residuals[:k].max())
        return residual / largest if largest else math.inf if residual else 0.0

    def _aim(self, weights: Tensor) -> None:
        """Turns the pool so that its first rows carry most of ``weights`` [p, any]."""
        self._turn_pool(torch.linalg.svd(weights, full_matrices=True)[0].T)

    def _turn_pool(self, turn: Tensor) -> None:
        self.pool = turn.to(self.pool) @ self.pool
        self.coupling = turn @ self.coupling

    def _random_turn(self, size: int) -> Tensor:
        """A random orthogonal matrix [size, size]."""
        normal = torch.randn(size, size, generator=self.generator, dtype=torch.float64)
        return torch.linalg.qr(normal)[0]

    def make_room(self, count: int, k: int) -> None:
        """Thick restart (Wu & Simon 2000) if the memory for ``count`` more vectors is lacking.

        The best half of the Ritz vectors, and at least k, stay with their products.
        """
        if self.size + count <= self.capacity:
            return
        keep = min(max(k + 1, self.capacity // 2), self.capacity - count)
        ritz = self.ritz()
        kept = ritz.coefficients[:, :keep]
        turn = kept.T.to(self.pool)
        self.basis_rows[:keep] = turn @ self.basis
        self.product_rows[:keep] = turn @ self.products
        self.coupling = self.coupling @ kept
        self.size = keep
        self.projected[:keep, :keep] = torch.diag(ritz.values[:keep])

    def refill(self, count: int) -> None:
        """New directions after a breakdown: what is left of the start, then random ones."""
        while len(self.reserve) and not len(self.pool):
            rows, self.reserve = self.reserve[:count], self.reserve[count:]
            rows = _split(_remove(rows, self.basis), 10 * math.sqrt(_eps(rows)))[1]
            self.pool = _orthonormal(_remove(rows, self.basis))
            self.coupling = torch.zeros(len(rows), self.size).double()
        if not len(self.pool):
            self.add_random(count)

    def grow(self, k: int, width: int) -> None:
        """One block: the pool, or its ``width`` most useful directions if there are more."""
        if not len(self.pool):
            self.refill(width)
        if len(self.pool) > width:
            self._aim(self.coupling @ self.ritz().coefficients[:, :k])  # the first k residuals
        count = min(width, len(self.pool), self.room)
        self.make_room(count, k)
        self.expand(slice(0, count))

    def begin(self, start: Tensor | None, width: int, tol: float) -> None:
        """The first block: random, or random combinations of the start's directions [s, P].

        If their products stay in the span of the start, that span is nearly invariant, and the rest
        of it follows as one block; otherwise the rest is kept for breakdowns.
        """
        if start is None:
            self.add_random(width)
            self.expand(slice(0, min(width, self.room)))
            return
        self.pool, self.coupling = start, torch.zeros(len(start), 0).double()
        self._turn_pool(self._random_turn(len(start)))
        first = min(width, len(start), self.room)
        new = self.expand(slice(0, first))
        rest = len(self.pool) - new
        outside = float(torch.linalg.vector_norm(self.coupling[rest:])) / math.sqrt(first)
        fits = rest <= self.room and self.size + rest <= self.capacity
        if fits and outside <= _INVARIANT * tol * self.scale:
            if rest:
                self.expand(slice(0, rest))
        else:
            self._set_aside(rest)

    def _set_aside(self, rest: int) -> None:
        """Takes the first ``rest`` rows out of the pool, without losing a part of the products."""
        self.reserve = self.pool[:rest]
        outside = self.coupling.T.to(self.pool) @ self.pool  # [m, P]
        coefficients, self.pool = self._directions(outside, self.pool[:0])
        self.coupling = coefficients.T.contiguous()

    def probe(self, k: int) -> float:
        """A few blocks from new random directions orthogonal to all that is known.

        Single-vector Lanczos sees one copy of a multiple eigenvalue, block Lanczos as many as the
        block has columns. A copy missed shows here as a new Ritz value among the first k. One block
        is enough where it shows the rest to be small: of a missed eigenvalue μ it would hold
        ``μ² χ²/(P - m)`` (b degrees of freedom) in the squared norm of its product.

        Returns:
            the largest change of the first k Ritz values, in units of the largest modulus; infinite
            if the limit of applications came before the end.
        """
        left = self.operator.size - self.size
        before = self.ritz().values[:k]
        kth = float(before[-1])
        if not self._probe(k, left, abs(kth) if self.which == "LM" else max(kth, 0.0)):
            return math.inf
        return float((self.ritz().values[:k] - before).abs().max()) / (self.scale or 1.0)

    def _probe(self, k: int, left: int, smallest: float) -> bool:
        """The blocks of a probe; whether the limit of applications let it come to its end."""
        known = min(1, len(self.pool))
        self._turn_pool(self._random_turn(len(self.pool)))
        random = self.add_random(_PROBE_WIDTH - known)
        count = known + random if random else len(self.pool)
        if count > self.room:
            return False
        self.make_room(count, k)
        self.expand(slice(len(self.pool) - count, None))
        if left * self._squared_rest(count) <= _quantile(random or 1) * smallest**2:
            return True
        for _ in range(_PROBE_DEPTH):
            leads_to = self.coupling[:, self.size - count :]
            if not float(torch.linalg.vector_norm(leads_to)) > self.drop * self.scale:
                return True
            if not self.room:
                return False
            self._aim(leads_to)
            self.make_room(1, k)
            self.expand(slice(0, 1))
            count = 1
        return True

    def _squared_rest(self, count: int) -> float:
        """``||(I - QQᵀ)HV||²`` of the last ``count`` vectors, Q being the basis before them."""
        inside = self.projected[self.size - count : self.size, self.size - count : self.size]
        outside = self.coupling[:, self.size - count : self.size]
        return float(inside.square().sum() + outside.square().sum())


def _quantile(degrees: int) -> float:
    """The value that a χ² variable falls below once in a hundred times."""
    from scipy.special import gammaincinv  # scipy.stats takes seconds to import

    return 2.0 * float(gammaincinv(degrees / 2, 0.01))


def _eps(like: Tensor) -> float:
    return float(torch.finfo(like.dtype).eps)


def _iterate(search: _Search, k: int, tol: float, width: int, verify: bool) -> bool:
    """Grows the space until the first k pairs converge; returns whether a probe confirmed them."""
    due, base, verified = 0, width, False
    while search.room > 0:
        if search.size >= k and search.applications >= due:
            worst = search.worst(k)
            if worst <= tol and (verified or not verify):
                return verified
            if worst <= tol:
                change = search.probe(k)
                if change == math.inf:
                    break
                verified = change <= tol
                continue
            due = search.applications + (width if worst < 20 * tol else max(width, 6))
        if not len(search.pool):  # a breakdown: few distinct eigenvalues, so many copies of each
            missing = k - int((search.ritz().values.abs() > search.drop * search.scale).sum())
            width = max(base, min(2 * width, _WIDEST, missing))
        search.grow(k, width)
    return verified or search.size == search.operator.size


def _separation(search: _Search, ritz: _Ritz, k: int, last: float) -> tuple[float, bool, float]:
    """``(gap, unresolved, distance)`` of the k-th pair, with residual ``last``, and the next."""
    if k == search.operator.size:
        return math.inf, False, math.inf
    if search.size == k:
        return math.nan, True, 0.0
    kth, following = (float(ritz.values[i]) for i in (k - 1, k))
    if search.which == "LM":
        kth, following = abs(kth), abs(following)
    zero = 100 * _eps(search.pool) * search.scale
    ratio = math.nan if kth <= zero else math.inf if following <= zero else kth / following
    error = float(ritz.residuals[k])
    apart = kth - following
    return ratio, apart <= last + error or apart <= zero, apart - error


def _result(search: _Search, k: int, tol: float, verified: bool) -> Eigenpairs:
    """The first k pairs with residuals from the stored products."""
    ritz = search.ritz()
    turn = ritz.coefficients[:, :k].T.to(search.pool)
    vectors, images = turn @ search.basis, turn @ search.products  # [k, P]
    rest = images - ritz.values[:k, None].to(vectors) * vectors
    residuals = torch.linalg.vector_norm(rest, dim=1)
    values = ritz.values[:k].to(vectors)
    largest = float(ritz.values.abs().max())
    gap, unresolved, distance = _separation(search, ritz, k, float(residuals[-1]))
    gram = (rest @ rest.T).double()
    norm = math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1])))
    relative = torch.where(residuals == 0, 0.0, residuals / values.abs())
    bound = norm / distance if distance > 0 else math.inf
    return Eigenpairs(
        values=values,
        vectors=vectors.T.contiguous(),
        residuals=residuals,
        residuals_relative=relative,
        converged=bool(residuals.max() <= tol * largest),
        applications=search.applications,
        gap=gap,
        unresolved=unresolved or bound >= 1,
        subspace_bound=bound,
        verified=verified,
    )


def _check_count(name: str, value: Any, least: int, most: int, why: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={value!r} must be an integer")
    if not least <= value <= most:
        raise ValueError(f"{name}={value} must be between {least} and {most} ({why})")
    return int(value)


def _check_start(start: Tensor, op: _Operator) -> Tensor:
    """Orthonormal rows [r, P] with the span of ``start`` [P, s], r its numerical rank."""
    if not isinstance(start, Tensor):
        raise TypeError(f"start is a {type(start).__name__}; give a tensor of shape [P, s]")
    if start.ndim != 2 or start.shape[0] != op.size or not start.shape[1]:
        raise ValueError(f"start has shape {tuple(start.shape)}; [{op.size}, s] is needed")
    if not start.dtype.is_floating_point:
        raise TypeError(f"start has dtype {start.dtype}; use {op.dtype}")
    if not bool(torch.isfinite(start).all()):
        raise ValueError("start has NaN or infinity")
    rows = start.detach().to(op.device, op.dtype).T
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    rows = rows[norms[:, 0] > 0] / norms[norms[:, 0] > 0]
    if not len(rows):
        raise ValueError("start is zero; give at least one direction, or leave it out")
    _, directions = _split(rows, 10 * _eps(rows) * math.sqrt(max(rows.shape)))
    return _orthonormal(directions)


def _default_basis(op: _Operator, k: int) -> int:
    """Vectors that fit, with their products, into the memory set aside, and at least 2k + 32."""
    bytes_each = 2 * op.size * torch.finfo(op.dtype).bits // 8
    return max(2 * k + 32, _MEMORY // bytes_each)


def top_eigenpairs(
    operator: Any,
    k: int,
    *,
    start: Tensor | None = None,
    tol: float = 1e-3,
    which: Which = "LM",
    block_size: int | None = None,
    max_applications: int | None = None,
    max_basis: int | None = None,
    verify: bool = True,
    seed: int = 0,
) -> Eigenpairs:
    """The k leading eigenpairs of a symmetric operator, with the residuals they really have.

    Block Lanczos (Golub & Underwood 1977) that keeps its whole search space and orthogonalises it
    in full, twice. The residuals come from products that are stored anyway: they are exact and cost
    no application.

    A ``start`` is a guess at the *span* of the eigenvectors. The first block are random
    combinations of its directions, not the directions one by one: Krylov spaces work for all of
    them at once. Only if the first products show the span to be nearly invariant is all of it
    multiplied; a start that is far from invariant, taken whole, would cost its s products and leave
    the space without the Krylov structure that makes Lanczos fast.

    A multiple eigenvalue: a block of b columns sees b copies of it, and eigenvalues nearer to each
    other than the tolerance count as copies. A breakdown (the space is invariant) brings new
    directions, so that operators of low rank are no trouble. After convergence ``verify`` searches
    from new random directions: 4 products if these show (at a level of 1 %) that nothing as large
    as λ_k was left out, else 7 in all. What it finds is added, and the search goes on. An
    eigenvalue that hardly exceeds λ_k may still be missed; ``unresolved`` then warns of a cluster.

    Args:
        operator: symmetric P × P: a tensor, anything with ``shape``, a torch ``dtype`` and
            ``matmat`` ([P, b] to [P, b]) such as ``CurvatureOperator``, or what SciPy's
            ``aslinearoperator`` takes. float32 or float64; residuals below 1e-5 need float64.
        k: how many pairs, 1 to P.
        start: [P, s] of any s ≥ 1; needs no orthonormality. Default: random.
        tol: converged when every residual is at most ``tol`` times the largest Ritz modulus, which
            is ``|λ_1|`` for "LM".
        which: "LM", largest in modulus, or "LA", largest.
        block_size: columns per product, default 2. One column takes a few per cent fewer
            applications and misses near-copies more easily; 8 to 16 take 10 to 40 % more, each of
            them cheaper where products with many columns are.
        max_applications: columns multiplied in all, default ``10 k + 200``.
        max_basis: vectors kept before a thick restart; default what 2 GiB hold, at least 2k + 32.
        verify: search for missed eigenvalues after convergence.
        seed: of the random directions, which are the same on every device.

    Returns:
        pairs in falling order, ``k`` also where the operator has lower rank (zeros fill up).

    Raises:
        ValueError: k, block size or limits out of range, operator not square, not symmetric (found
            from the products, for free) or returning NaN, start of wrong shape or zero.
        TypeError: an operator or start of a wrong kind.

    Warns:
        RuntimeWarning: not converged, or not verified, within ``max_applications``.
    """
    op = _adapt(operator)
    k = _check_count("k", k, 1, op.size, "the operator's size")
    if which not in ("LM", "LA"):
        raise ValueError(f'which={which!r} must be "LM" or "LA"')
    if not (isinstance(tol, (int, float)) and 0 < tol < 1):
        raise ValueError(f"tol={tol!r} must be between 0 and 1")
    default_width = min(2, op.size)
    width = default_width if block_size is None else block_size
    width = _check_count("block_size", width, 1, op.size, "the operator's size")
    limit = 10 * k + 200 if max_applications is None else max_applications
    limit = _check_count("max_applications", limit, k, 2**62, "at least k")
    basis = _default_basis(op, k) if max_basis is None else max_basis
    basis = _check_count("max_basis", basis, min(op.size, k + 2 * width + 8), 2**62, "k + 2b + 8")
    rows = None if start is None else _check_start(start, op)
    drop = max(1e-3 * min(tol, 1e-2), 100 * _eps(torch.empty(0, dtype=op.dtype)))
    search = _Search(
        op,
        which,
        limit,
        drop,
        asymmetry=max(100 * drop, 10 * math.sqrt(torch.finfo(op.dtype).eps)),
        generator=torch.Generator().manual_seed(seed),
        capacity=min(op.size, basis, limit),
    )
    search.begin(rows, width, tol)
    verified = _iterate(search, k, tol, width, verify)
    pairs = _result(search, k, tol, verified)
    if not pairs.converged:
        _warn(pairs, tol, limit)
    elif verify and not verified:
        warnings.warn(
            f"all residuals are small, but max_applications={limit} ended the search for missed "
            "eigenvalues; raise it",
            RuntimeWarning,
            stacklevel=2,
        )
    return pairs


def _warn(pairs: Eigenpairs, tol: float, limit: int) -> None:
    worst = float(pairs.residuals.max() / pairs.values.abs().max())
    warnings.warn(
        f"not converged: the largest of {len(pairs.values)} residuals is {worst:.1e} of the "
        f"largest eigenvalue (tol={tol:g}) after {pairs.applications} products; raise "
        f"max_applications (now {limit}) or max_basis, or accept a larger tol (float32 reaches "
        "about 1e-5)",
        RuntimeWarning,
        stacklevel=3,
    )


@dataclass(frozen=True)
class SpectralDensity:
    """Eigenvalue density of a symmetric operator by stochastic Lanczos quadrature.

    Attributes:
        grid: [G] places at which the density is given.
        density: [G], of unit integral: probability of an eigenvalue, smoothed by a Gaussian.
        nodes: [probes, steps] quadrature nodes (of the bulk, if outliers were taken out).
        weights: [probes, steps] their weights; those of a probe sum to ``1 - len(atoms)/P``.
        atoms: [k] eigenvalues that were taken out, each of weight 1/P; may be empty.
        size: P.
        width: standard deviation of the Gaussian.
        applications: columns multiplied by the operator.
    """

    grid: Tensor
    density: Tensor
    nodes: Tensor
    weights: Tensor
    atoms: Tensor
    size: int
    width: float
    applications: int

    def moment(self, power: int) -> Estimate:
        """``trace(H^p)/P`` with a 95 % interval over probes (Student's t).

        The quadrature is exact for each probe up to ``p = 2·steps - 1``; what is uncertain is the
        mean over probes.

        Raises:
            ValueError: a negative power, or fewer than two probes.
        """
        power = _check_count("power", power, 0, 2 * self.nodes.shape[1] - 1, "2·steps - 1")
        return self._mean(self.nodes**power, float((self.atoms**power).sum()) / self.size)

    def count(self, low: float, high: float) -> Estimate:
        """How many eigenvalues lie in ``[low, high]``, with a 95 % interval over probes.

        Eigenvalues that are well apart from the rest are counted well, an end inside a dense part
        of the spectrum blurs over the distance of the nodes there.

        Raises:
            ValueError: low above high, or fewer than two probes.
        """
        if not low <= high:
            raise ValueError(f"low={low} is above high={high}")
        inside = ((low <= self.nodes) & (self.nodes <= high)).double() * self.size
        return self._mean(inside, float(((low <= self.atoms) & (self.atoms <= high)).sum()))

    def _mean(self, function: Tensor, exact: float) -> Estimate:
        if len(self.nodes) < 2:
            raise ValueError("an interval needs at least two probes; raise n_probes")
        return mean_interval((exact + (function * self.weights).sum(1)).numpy())


def spectral_density(
    operator: Any,
    *,
    n_probes: int = 8,
    steps: int = 80,
    seed: int = 0,
    grid: Tensor | None = None,
    width: float | None = None,
    deflate: Eigenpairs | None = None,
) -> SpectralDensity:
    """Density of all eigenvalues from a few products with random vectors.

    Every probe's Lanczos matrix is a Gauss quadrature of the spectral measure of its vector (Golub
    & Meurant 2010, chapter 6), whose mean over uniform vectors is the density (Ubaru, Chen & Saad
    2017). All probes go through the operator together, one product [P, probes] a step, and each is
    orthogonalised in full and twice: without that, converged eigenvalues come back as ghosts.
    Memory: ``steps · n_probes · P`` numbers.

    With ``deflate`` the probes live in the complement of known eigenvectors, which enter exactly:
    outliers, which few random vectors weigh badly, then have no sampling error, and all nodes go to
    the bulk. Its pairs should have small residuals.

    Args:
        operator: as for ``top_eigenpairs``.
        n_probes: random vectors, 1 or more (2 or more for intervals).
        steps: nodes per probe; cut to what the space allows.
        seed: of the probes, which are the same on every device.
        grid: [G] rising places, G ≥ 2; default 1001 over the range of nodes and atoms.
        width: of the Gaussian; default a hundredth of that range.
        deflate: pairs to take out, fewer than P.

    Returns:
        density, nodes and weights in float64 on the CPU.

    Raises:
        ValueError: counts, grid or width out of range, vectors of another size, NaN from the
            operator.
        TypeError: an operator of a wrong kind.
    """
    op = _adapt(operator)
    n_probes = _check_count("n_probes", n_probes, 1, 2**31, "at least one")
    steps = _check_count("steps", steps, 1, 2**31, "at least one")
    if width is not None and not 0 < width < math.inf:
        raise ValueError(f"width={width} must be positive and finite")
    known = _known(deflate, op)
    left = op.size - len(known)
    alpha, beta = _lanczos(op, n_probes, min(steps, left), seed, known)
    nodes, weights = _quadrature(alpha, beta)
    weights = weights * (left / op.size)
    empty = torch.empty(0, dtype=torch.float64)
    atoms = empty if deflate is None else deflate.values.double().cpu()
    points = torch.cat([nodes[weights > 0], atoms])
    span, largest = float(points.max() - points.min()), float(points.abs().max())
    width = width or (span if span > 1e-9 * largest else largest or 1.0) / 100
    grid = _grid(points, width) if grid is None else _check_grid(grid)
    density = _broaden(grid, nodes, weights / n_probes, width)
    density = density + _broaden(grid, atoms, torch.full_like(atoms, 1 / op.size), width)
    applications = alpha.numel()
    return SpectralDensity(grid, density, nodes, weights, atoms, op.size, width, applications)


def _known(deflate: Eigenpairs | None, op: _Operator) -> Tensor:
    """The known eigenvectors as rows [k, P]."""
    if deflate is None:
        return torch.empty(0, op.size, dtype=op.dtype, device=op.device)
    size, k = deflate.vectors.shape
    if size != op.size or k >= size:
        raise ValueError(f"deflate has vectors {size} × {k}; fewer than P = {op.size} of length P")
    return deflate.vectors.T.to(op.device, op.dtype)


def _lanczos(
    op: _Operator, probes: int, steps: int, seed: int, known: Tensor
) -> tuple[Tensor, Tensor]:
    """Diagonals [probes, steps] and off-diagonals [probes, steps - 1] of the Lanczos matrices.

    A probe whose space has become invariant goes on as the zero vector: its further nodes have
    weight zero.
    """
    like = torch.empty(0, dtype=op.dtype, device=op.device)
    vectors = _random(probes, op.size, like, torch.Generator().manual_seed(seed))
    vectors = _remove(vectors, known)
    vectors = vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    history = torch.zeros(probes, steps, op.size, dtype=op.dtype, device=op.device)
    alpha = torch.zeros(probes, steps, dtype=torch.float64)
    beta = torch.zeros(probes, steps, dtype=torch.float64)
    largest = torch.zeros(probes, dtype=torch.float64)
    for step in range(steps):
        history[:, step] = vectors
        image = op.product(vectors.T.contiguous()).T  # [probes, P]
        alpha[:, step] = (image * vectors).sum(1).double().cpu()
        largest = torch.maximum(largest, torch.linalg.vector_norm(image, dim=1).double().cpu())
        image = _remove_each(_remove(image, known), history[:, : step + 1])
        norm = torch.linalg.vector_norm(image, dim=1)
        alive = norm.double().cpu() > 100 * _eps(like) * largest
        beta[:, step] = torch.where(alive, norm.double().cpu(), 0.0)
        inverse = torch.where(alive.to(norm.device), 1 / norm, 0.0)
        vectors = _remove_each(image * inverse[:, None], history[:, : step + 1])
    return alpha, beta[:, :-1]


def _remove_each(rows: Tensor, history: Tensor) -> Tensor:
    """``rows`` [probes, P], each minus its part in its own ``history`` [probes, steps, P]."""
    parts = torch.bmm(history, rows[:, :, None])  # [probes, steps, 1]
    return rows - torch.bmm(parts.transpose(1, 2), history)[:, 0]


def _quadrature(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights [probes, steps]: eigenvalues, and squared first components (Gauss)."""
    matrices = torch.diag_embed(alpha)
    matrices = matrices + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    nodes, vectors = torch.linalg.eigh(matrices)
    return nodes, vectors[:, 0].square()


def _grid(points: Tensor, width: float) -> Tensor:
    low, high = float(points.min()) - 6 * width, float(points.max()) + 6 * width
    return torch.linspace(low, high, 1001, dtype=torch.float64)


def _check_grid(grid: Tensor) -> Tensor:
    grid = torch.as_tensor(grid, dtype=torch.float64).detach().cpu()
    if grid.ndim != 1 or len(grid) < 2 or not bool((grid[1:] > grid[:-1]).all()):
        raise ValueError("grid must be rising, with at least two places")
    return grid


def _broaden(grid: Tensor, nodes: Tensor, weights: Tensor, width: float) -> Tensor:
    """``Σ w N(x; node, width²)`` at the grid [G]."""
    z = (grid[:, None] - nodes.flatten()) / width
    return torch.exp(-0.5 * z.square()) @ weights.flatten() / (width * math.sqrt(2 * math.pi))
