"""The collapsed optimum of the deep linear unconstrained feature model, and its spectra.

With ``N = K·n`` samples ordered by class, ``Y = I_K ⊗ 1_nᵀ`` and all factors free, the objective is

    ``(1/2N) ‖W_L ⋯ W_1 H_1 − Y‖² + Σ_l λ_l/2 ‖W_l‖² + λ_H/2 ‖H_1‖²``

(or the mean cross-entropy in place of the first term). One number, the gain γ, is all of its
optimum: the root nearest 1 of ``γ^(L−1) (1−γ)^(L+1) = P`` with ``P = K^L Π λ_l · λ_H K n``.

**Sources.** That layer Hessians, Gauss–Newton parts, gradients and weights have the ranks and equal
eigenvalues below is Garrod and Keating, arXiv 2404.06106 (v1, Theorems 4.1 to 4.4). Ours are the
closed form of the outlier, ``λ_l γ/(1−γ)``, and all that goes beyond: unequal decays, widths below
the number of classes, the full Hessian, and the values under cross-entropy. The book's chapter
proves them.

**Numbers.** Roots are bracketed by neighbouring float64 numbers: a bisection over them whose signs
are decided in ball arithmetic, at whatever precision that takes. ``1−γ`` is then computed from the
equation and not by subtraction, so it has full relative accuracy for any decay.
"""

from __future__ import annotations

import math
import numbers
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

WeightDecay = float | Sequence[float]
Pairs = list[tuple[float, int]]  # (eigenvalue, multiplicity)


# --- spectra --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues (or singular values) with multiplicities, in descending order.

    Exactly equal values are merged, nearly equal ones are not; multiplicities of 0 are dropped.

    Attributes:
        values: distinct finite values, descending.
        multiplicities: how often each occurs, at least once.

    Raises:
        ValueError: different lengths, a negative multiplicity, a value that is not finite.
        TypeError: a multiplicity that is not an integer.

    Example:
        >>> print(Spectrum((0.0, 0.225), (55, 9)))
        0.225 (×9), 0 (×55)
    """

    values: tuple[float, ...]
    multiplicities: tuple[int, ...]

    def __post_init__(self) -> None:
        values = [float(value) + 0.0 for value in self.values]  # + 0.0 turns -0.0 into 0.0
        times = [_integer("multiplicities", count, 0) for count in self.multiplicities]
        if len(values) != len(times):
            raise ValueError(f"{len(values)} values but {len(times)} multiplicities: pass as many")
        if not all(map(math.isfinite, values)):
            raise ValueError(f"values must be finite, not {tuple(values)}")
        merged: dict[float, int] = {}
        for value, count in sorted(zip(values, times, strict=True), reverse=True):
            merged[value] = merged.get(value, 0) + count
        kept = {value: count for value, count in merged.items() if count}
        object.__setattr__(self, "values", tuple(kept))
        object.__setattr__(self, "multiplicities", tuple(kept.values()))

    @property
    def size(self) -> int:
        """Number of eigenvalues, zeros included."""
        return sum(self.multiplicities)

    @property
    def rank(self) -> int:
        """Number of eigenvalues that are not 0."""
        return sum(m for value, m in zip(self.values, self.multiplicities, strict=True) if value)

    def expand(self) -> NDArray[np.float64]:
        """All eigenvalues, each as often as it occurs, descending: ``[size]``."""
        values = np.asarray(self.values, dtype=np.float64)
        return np.repeat(values, np.asarray(self.multiplicities, dtype=np.int64))

    def distance(self, eigenvalues: ArrayLike) -> float:
        """Largest absolute difference from other eigenvalues, both sorted.

        Args:
            eigenvalues: ``[size]`` real numbers in any order.

        Raises:
            ValueError: another number of them, or one that is not finite.
            TypeError: complex numbers.
        """
        found = np.asarray(eigenvalues)
        if np.iscomplexobj(found):
            raise TypeError("eigenvalues must be real; a symmetric matrix has them (eigvalsh)")
        found = found.astype(np.float64)
        if found.shape != (self.size,):
            raise ValueError(f"eigenvalues must be [{self.size}], not {list(found.shape)}")
        if not np.isfinite(found).all():
            raise ValueError("eigenvalues must be finite: there is a NaN or an infinity")
        return float(np.abs(np.sort(found)[::-1] - self.expand()).max(initial=0.0))

    def __str__(self) -> str:
        pairs = zip(self.values, self.multiplicities, strict=True)
        return ", ".join(f"{value:.6g} (×{count})" for value, count in pairs)


# --- the optimum ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollapsedOptimum:
    """A collapsed stationary point: :func:`collapsed_optimum`, :func:`collapsed_cross_entropy`.

    Layers are numbered 1 to L; layer l maps its input ``H_l [d, N]`` by ``W_l``, which is
    ``[d, d]`` for l < L and ``[K, d]`` for the last.

    Attributes:
        n_classes: number of classes, K.
        n_per_class: samples of each class, n.
        depth: number of weight matrices, L.
        width: of the layers, d.
        weight_decay: λ_1, …, λ_L.
        feature_decay: λ_H.
        loss: ``"mse"`` or ``"cross_entropy"``.
        gain: γ, the outputs being γ·Y; for cross-entropy t, the logits being ``t (e_c − 1/K)``.
        residual: 1 − γ to full relative accuracy; for cross-entropy ``δ = K/(e^t + K − 1)``, the
            residual of a sample being ``−δ (e_c − 1/K)``.
        is_global: whether this is the global minimum; ``None`` under cross-entropy: not known.
    """

    n_classes: int
    n_per_class: int
    depth: int
    width: int
    weight_decay: tuple[float, ...]
    feature_decay: float
    loss: str
    gain: float
    residual: float
    is_global: bool | None

    @property
    def singular_values(self) -> tuple[float, ...]:
        """σ_1, …, σ_L: all non-zero singular values of ``W_l`` are ``√(γ(1−γ)/(λ_l K))``."""
        return tuple(math.sqrt(square) for square in self._squares)

    @property
    def feature_scale(self) -> float:
        """Norm of a class mean of ``H_1``: ``√(γ(1−γ)/(λ_H K n))`` (cross-entropy: the mean of all
        classes is 0, and the norm is ``√(K−1)/K · √(δt/(λ_H n))``).

        Raises:
            ValueError: under squared error with width < n_classes, where norms are unequal.
        """
        if self._squared_error and self.width < self.n_classes:
            raise ValueError(
                f"the class means have unequal norms for width={self.width} below "
                f"n_classes={self.n_classes}: compute them from .features(seed)"
            )
        share = 1.0 if self._squared_error else 1 - 1 / self.n_classes
        return math.sqrt(self._feature_square / self.n_per_class * share)

    @property
    def objective(self) -> float:
        """Value of the regularised loss here. At zero it is 1/2 (cross-entropy: ``log K``)."""
        rank, k = self._rank, self.n_classes
        if self._squared_error:
            data = (rank * self.residual**2 + k - rank) / (2 * k)
        else:
            data = math.log1p((k - 1) * math.exp(-self.gain))
        return data + (self.depth + 1) * rank * self.gain * self.residual / (2 * k)

    @property
    def outlier(self) -> float:
        """The non-zero eigenvalue of every layer Hessian (cross-entropy: the largest).

        ``λγ/(1−γ)``, without the decay's own λ; a closed form that is ours.

        Raises:
            ValueError: the weight decays differ, so that each layer has its own.
        """
        if not self._equal_decays:
            raise ValueError("the layers have different decays: take .layer_outlier(layer)")
        return self.layer_outlier(1)

    def layer_outlier(self, layer: int) -> float:
        """The non-zero eigenvalue of one layer's Hessian (cross-entropy: the largest).

        Args:
            layer: 1 to L.

        Raises:
            ValueError: no such layer.
            TypeError: not an integer.
        """
        decay, k = self.weight_decay[self._layer(layer) - 1], self.n_classes
        if self._squared_error:
            return decay * self.gain / self.residual
        return decay * self.gain / k * (1 + (1 - self.residual) * (k - 1))

    def weights(self, seed: int | None = None) -> list[Tensor]:
        """``W_1, …, W_L``: float64, ``[d, d]`` each and ``[K, d]`` the last.

        Optima come in orbits: any orthogonal bases may stand between the layers, and for fewer
        dimensions than classes any projection of that rank may be kept.

        Args:
            seed: ``None`` for axis-aligned bases, keeping the first ``width`` classes if there are
                fewer dimensions; an integer for random ones, so that nothing is special.
        """
        frames = self._frames(seed)
        steps = zip(self.singular_values, frames, frames[1:], strict=False)
        return [sigma * after @ before.T for sigma, before, after in steps]

    def features(self, seed: int | None = None) -> Tensor:
        """``H_1 [d, N]``, float64, fitting the weights of the same seed; samples by class."""
        frames = self._frames(seed)
        scale = math.sqrt(self._feature_square / self.n_per_class)
        means = scale * frames[0] @ frames[-1].T  # [d, K]
        return means.repeat_interleave(self.n_per_class, dim=1)

    def targets(self) -> Tensor:
        """``Y [K, N]``, float64, one-hot; samples by class."""
        return torch.eye(self.n_classes, dtype=torch.float64).repeat_interleave(
            self.n_per_class, dim=1
        )

    def predicted_spectrum(self, matrix: str, layer: int | None = None) -> Spectrum:
        """The closed form of a spectrum at this point, zeros included.

        Data term only: no matrix holds the decay's own second derivative. With ``o_l`` the
        :meth:`layer_outlier`, d ≥ K and squared error:

        - ``"weight"``: singular values of ``W_l``, σ_l K times (v1, Theorem 4.4)
        - ``"weight_gram"``: ``W_lᵀW_l [d, d]``, σ_l² K times
        - ``"feature_gram"``: ``H_l H_lᵀ [d, d]`` of the layer's input, K equal eigenvalues
        - ``"layer_hessian"``: in ``W_l``, ``o_l`` K² times (v1, Theorem 4.1; the value is ours);
          d² times for d < K and l < L, and Kd times for l = L (ours)
        - ``"gauss_newton_class"``, ``"gauss_newton_cross"``, ``"gauss_newton_within"``: parts of
          the layer's Gauss–Newton matrix, ``o_l`` K, K(K−1) and 0 times (v1, Theorem 4.2)
        - ``"gradient_second_moment"``: mean of ``g gᵀ`` over the samples' gradients in ``W_l``,
          ``λ_l γ(1−γ)`` K times (v1, Theorem 4.3; the value is ours)
        - ``"full_hessian"``: in all weights at once, features fixed (ours)

        Under cross-entropy, with centred means, ranks are K − 1 for K, and the layer Hessian has
        three values: ``λ_l t/K`` times ``1 + (1−δ)(K−1)`` once, ``1 + (1−δ)(K−2)`` K − 1 times
        and 1 for the rest of (K−1)² (ours).

        Args:
            matrix: one of the above.
            layer: 1 to L; none for ``"full_hessian"``.

        Raises:
            ValueError: an unknown matrix, a layer missing, not needed or out of range, or what has
                no closed form here: for d < K what depends on the arbitrary projection (the
                gradient, and below the last layer the class and cross-class parts); for
                cross-entropy the Gauss–Newton parts and the full Hessian.
            TypeError: a layer that is not an integer.
        """
        if matrix not in _CLOSED_FORMS:
            raise ValueError(f"unknown matrix {matrix!r}; known are {', '.join(_CLOSED_FORMS)}")
        if not self._squared_error and matrix in _SQUARED_ERROR_ONLY:
            raise ValueError(f"{matrix} is not derived for cross-entropy, only for squared error")
        pairs, size = _CLOSED_FORMS[matrix](self, self._layer_for(matrix, layer))
        zeros = size - sum(count for _, count in pairs)
        values, multiplicities = zip(*pairs, (0.0, zeros), strict=True)
        return Spectrum(values, multiplicities)

    @property
    def _squared_error(self) -> bool:
        return self.loss == "mse"

    @property
    def _rank(self) -> int:
        """Number of directions that the product of all factors keeps."""
        k = self.n_classes
        return min(self.width, k) if self._squared_error else k - 1

    @property
    def _equal_decays(self) -> bool:
        return len(set(self.weight_decay)) == 1

    @property
    def _squares(self) -> list[float]:
        scale = self.gain * self.residual / self.n_classes
        return [scale / decay for decay in self.weight_decay]

    @property
    def _feature_square(self) -> float:
        """The non-zero eigenvalue of ``H_1 H_1ᵀ``."""
        return self.gain * self.residual / (self.feature_decay * self.n_classes)

    def _rows(self, layer: int) -> int:
        return self.n_classes if layer == self.depth else self.width

    def _layer(self, layer: int) -> int:
        number = _integer("layer", layer, 1)
        if number > self.depth:
            raise ValueError(f"layer must be from 1 to depth={self.depth}, not {layer}")
        return number

    def _layer_for(self, matrix: str, layer: int | None) -> int:
        if matrix == "full_hessian":
            if layer is not None:
                raise ValueError("full_hessian is that of all layers at once: leave layer out")
            return 0
        if layer is None:
            raise ValueError(f"{matrix} is that of one layer: pass layer=1 to {self.depth}")
        return self._layer(layer)

    def _frames(self, seed: int | None) -> list[Tensor]:
        """Orthonormal columns before each layer ``[d, rank]``, and of outputs ``[K, rank]``."""
        rank = self._rank
        draw = None if seed is None else torch.Generator().manual_seed(operator.index(seed))
        frames = [_frame(self.width, rank, draw) for _ in range(self.depth)]
        if self._squared_error:
            return [*frames, _frame(self.n_classes, rank, draw)]
        return [*frames, _centred_frame(self.n_classes) @ _frame(rank, rank, draw)]


def _frame(rows: int, columns: int, draw: torch.Generator | None) -> Tensor:
    """Orthonormal columns: the first unit vectors, or random ones."""
    if draw is None:
        return torch.eye(rows, columns, dtype=torch.float64)
    normal = torch.randn(rows, columns, generator=draw, dtype=torch.float64)
    return torch.linalg.qr(normal).Q


def _centred_frame(k: int) -> Tensor:
    """Orthonormal basis of the vectors of sum zero (Helmert's): ``[K, K − 1]``."""
    steps = torch.arange(1, k, dtype=torch.float64)  # column j: j entries 1, then −j
    basis = torch.triu(torch.ones(k, k - 1, dtype=torch.float64))
    basis[1:].diagonal().copy_(-steps)
    return basis / torch.sqrt(steps * (steps + 1))


# --- closed forms: non-zero eigenvalues and the size of the matrix --------------------------------


def _weight(o: CollapsedOptimum, layer: int) -> tuple[Pairs, int]:
    return [(o.singular_values[layer - 1], o._rank)], min(o._rows(layer), o.width)


def _weight_gram(o: CollapsedOptimum, layer: int) -> tuple[Pairs, int]:
    return [(o._squares[layer - 1], o._rank)], o.width


def _feature_gram(o: CollapsedOptimum, layer: int) -> tuple[Pairs, int]:
    return [(o._feature_square * math.prod(o._squares[: layer - 1]), o._rank)], o.width


def _layer_hessian(o: CollapsedOptimum, layer: int) -> tuple[Pairs, int]:
    size = o._rows(layer) * o.width
    if o._squared_error:
        outputs = o.n_classes if layer == o.depth else o._rank
        return [(o.layer_outlier(layer), outputs * o._rank)], size
    k, certainty = o.n_classes, 1 - o.residual
    unit = o.weight_decay[layer - 1] * o.gain / k
    top = (unit * (1 + certainty * (k - 1)), 1)
    if k == 2:  # one centred direction
        return [top], size
    return [top, (unit * (1 + certainty * (k - 2)), k - 1), (unit, (k - 1) ** 2 - k)], size


def _gauss_newton_class(o: CollapsedOptimum, layer: int) -> tuple[Pairs, int]:
    _refuse_projection(o, layer, "gauss_newton_class")
    return [(o.layer_outlier(layer), o._rank)], o._rows(layer) * o.width


def _gauss_newton_cross(o: CollapsedOptimum, layer: int) -> tuple[Pairs, int]:
    _refuse_projection(o, layer, "gauss_newton_cross")
    pairs = [(o.layer_outlier(layer), o._rank * (o.n_classes - 1))]
    return pairs, o._rows(layer) * o.width


def _gauss_newton_within(o: CollapsedOptimum, layer: int) -> tuple[Pairs, int]:
    return [], o._rows(layer) * o.width


def _gradient_second_moment(o: CollapsedOptimum, layer: int) -> tuple[Pairs, int]:
    k, value = o.n_classes, o.weight_decay[layer - 1] * o.gain * o.residual
    if o._squared_error:
        _refuse_projection(o, 0, "gradient_second_moment")
        pairs = [(value, k)]
    else:
        pairs = [(value * (k - 1) / k, 1)]
        if k > 2:
            pairs.append((value * (k - 2) / k, k - 1))
    return pairs, o._rows(layer) * o.width


def _refuse_projection(o: CollapsedOptimum, layer: int, matrix: str) -> None:
    """In the last layer the projection onto ``width`` directions cancels from the parts."""
    if o.width < o.n_classes and layer != o.depth:
        raise ValueError(
            f"{matrix} has no closed form for width={o.width} below n_classes={o.n_classes}: it "
            "depends on which projection the optimum keeps, and all are optimal"
        )


def _full_hessian(o: CollapsedOptimum, _: int) -> tuple[Pairs, int]:
    """Blocks of directions within the kept directions (symmetric, antisymmetric), between the kept
    and the free ones, and from the kept directions to the outputs that are not kept."""
    depth, m, free = o.depth, o._rank, o.width - o._rank
    symmetric, antisymmetric = _coupled_layers(o)
    pairs: Pairs = [(value, m * (m + 1) // 2) for value in symmetric]
    pairs += [(value, m * (m - 1) // 2) for value in antisymmetric]
    for before, after in zip(o.weight_decay, o.weight_decay[1:], strict=False):
        mean = before if before == after else math.sqrt(before * after)
        pairs += [(mean, m * free), (-mean, m * free)]
    pairs.append((o.layer_outlier(depth), (o.n_classes - m) * m))
    return pairs, (depth - 1) * o.width**2 + o.n_classes * o.width


def _coupled_layers(o: CollapsedOptimum) -> tuple[list[float], list[float]]:
    """Eigenvalues of ``(ρ−1)vvᵀ + diag(λ)`` and ``(ρ+1)vvᵀ − diag(λ)``, ``v_l = √λ_l``, ``ρ =
    γ/(1−γ)``: ``Lo ∓ (L−1)λ`` and ``±λ`` when all decays are equal."""
    depth, decays = o.depth, np.asarray(o.weight_decay)
    if o._equal_decays:
        decay, top = o.weight_decay[0], depth * o.outlier
        rest, step = [decay] * (depth - 1), (depth - 1) * decay
        return [top - step, *rest], [top + step, *(-value for value in rest)]
    root, ratio = np.sqrt(decays), o.gain / o.residual
    outer, own = np.outer(root, root), np.diag(decays)
    forms = ((ratio - 1) * outer + own, (ratio + 1) * outer - own)
    symmetric, antisymmetric = (np.linalg.eigvalsh(form).tolist() for form in forms)
    return symmetric, antisymmetric


_CLOSED_FORMS: dict[str, Callable[[CollapsedOptimum, int], tuple[Pairs, int]]] = {
    "weight": _weight,
    "weight_gram": _weight_gram,
    "feature_gram": _feature_gram,
    "layer_hessian": _layer_hessian,
    "gauss_newton_class": _gauss_newton_class,
    "gauss_newton_cross": _gauss_newton_cross,
    "gauss_newton_within": _gauss_newton_within,
    "gradient_second_moment": _gradient_second_moment,
    "full_hessian": _full_hessian,
}
_SQUARED_ERROR_ONLY = tuple(name for name in _CLOSED_FORMS if name.startswith(("gauss", "full")))


# --- finding it -----------------------------------------------------------------------------------


class GainEnclosure(NamedTuple):
    """Certified bounds of a gain: neighbouring float64 numbers, or twice the exact value.

    - ``low``, ``high``: the gain lies in ``[low, high]``
    """

    low: float
    high: float


def gain_enclosure(
    n_classes: int,
    n_per_class: int,
    depth: int,
    weight_decay: WeightDecay,
    feature_decay: float,
) -> GainEnclosure:
    """The root nearest 1 of ``γ^(L−1) (1−γ)^(L+1) = K^L Π λ_l · λ_H K n``, with proof.

    On ``[(L−1)/(2L), 1]`` the left side strictly decreases, to 0. So if it is at least the right
    side at ``low`` in that interval and at most the right side at ``high``, there is exactly one
    root in the interval and it lies in ``[low, high]``. Both signs are decided in ball arithmetic
    for the decays as the exact rational numbers that floats are. Whether the root is the global
    minimum or only a local one makes no difference here.

    Args:
        n_classes: K ≥ 2.
        n_per_class: n ≥ 1.
        depth: L ≥ 1.
        weight_decay: λ > 0, or L of them.
        feature_decay: λ_H > 0.

    Raises:
        ValueError: an argument out of range, or no root: the decays are too large.
        TypeError: a size that is not an integer, a decay that is not a real number.
    """
    return _mse_gain(_Problem.checked(n_classes, n_per_class, depth, weight_decay, feature_decay))


def collapsed_optimum(
    n_classes: int,
    n_per_class: int,
    depth: int,
    weight_decay: WeightDecay,
    feature_decay: float,
    width: int | None = None,
    *,
    allow_local: bool = False,
) -> CollapsedOptimum:
    """The global optimum of the deep linear unconstrained feature model under squared error.

    It is not zero if and only if ``P = K^L Π λ_l · λ_H K n ≤ (L−1)^(L−1)/L^(2L)`` (with 0⁰ = 1, and
    strictly for L = 1), which is ``γ ≥ (L−1)/L``. The strict inequality is the condition in Garrod
    and Keating, arXiv 2404.06106 (v1); unequal decays and d < K are ours.

    Args:
        n_classes: K ≥ 2.
        n_per_class: samples of each class, n ≥ 1.
        depth: number of weight matrices, L ≥ 1.
        weight_decay: λ > 0, or λ_1, …, λ_L.
        feature_decay: λ_H > 0.
        width: d ≥ 1; ``n_classes`` if not given.
        allow_local: return the strict local minimum (up to rotations) that remains for
            ``(L−1)/(2L) < γ < (L−1)/L``, marked by ``is_global=False``, instead of an error.

    Raises:
        ValueError: an argument out of range, or decays for which the global minimum is zero.
        TypeError: a size that is not an integer, a decay that is not a real number.

    Example:
        >>> optimum = collapsed_optimum(3, 10, 2, 0.01, 0.01)
        >>> print(optimum.predicted_spectrum("layer_hessian", 1))
        0.141231 (×9)
    """
    problem = _Problem.checked(n_classes, n_per_class, depth, weight_decay, feature_decay)
    width = problem.n_classes if width is None else _integer("width", width, 1)
    enclosure = _mse_gain(problem)
    is_global = _decided(lambda: _threshold(problem.depth) - problem.product()) >= 0
    if not (is_global or allow_local):
        excess = problem.excess(_threshold(problem.depth))
        raise ValueError(
            f"at this decay the global minimum is zero: {excess}. A strict local minimum with gain "
            f"{enclosure.low:.6g} remains: allow_local=True returns it"
        )
    residual = problem.residual(enclosure)
    gain = min(max(1 - residual, enclosure.low), enclosure.high)
    return problem.optimum(width, "mse", gain, residual, is_global)


def collapsed_cross_entropy(
    n_classes: int,
    n_per_class: int,
    depth: int,
    weight_decay: WeightDecay,
    feature_decay: float,
    width: int | None = None,
) -> CollapsedOptimum:
    """The centred collapsed stationary point of the same model under mean cross-entropy (ours).

    Logits are ``t (e_c − 1/K)`` with the largest t that solves ``t^(L−1) δ(t)^(L+1) = P``,
    ``δ(t) = K/(e^t + K − 1)``. For L ≥ 2 the left side rises, then falls: this is the root on the
    falling branch. All that is claimed is that the gradient of the regularised loss is zero there.
    It need not be a global minimum: for three or more layers solutions of lower rank can be better.

    Args:
        n_classes: K ≥ 2.
        n_per_class: samples of each class, n ≥ 1.
        depth: number of weight matrices, L ≥ 1.
        weight_decay: λ > 0, or λ_1, …, λ_L.
        feature_decay: λ_H > 0.
        width: d ≥ K − 1; ``n_classes`` if not given.

    Raises:
        ValueError: an argument out of range, or no such point: the decays are too large.
        TypeError: a size that is not an integer, a decay that is not a real number.
    """
    problem = _Problem.checked(n_classes, n_per_class, depth, weight_decay, feature_decay)
    width = problem.n_classes if width is None else _integer("width", width, 1)
    if width < problem.n_classes - 1:
        raise ValueError(
            f"width={width} must be at least n_classes - 1 = {problem.n_classes - 1}: the centred "
            "class means span that many dimensions"
        )
    enclosure = _softmax_gain(problem)
    residual = problem.residual(enclosure)
    return problem.optimum(width, "cross_entropy", enclosure.low, residual, None)


class _Problem(NamedTuple):
    """Checked arguments."""

    n_classes: int
    n_per_class: int
    depth: int
    weight_decay: tuple[float, ...]
    feature_decay: float

    @classmethod
    def checked(
        cls, n_classes: Any, n_per_class: Any, depth: Any, weight_decay: Any, feature_decay: Any
    ) -> _Problem:
        depth = _integer("depth", depth, 1)
        return cls(
            _integer("n_classes", n_classes, 2),
            _integer("n_per_class", n_per_class, 1),
            depth,
            _decays(weight_decay, depth),
            _decay("feature_decay", feature_decay),
        )

    def product(self) -> Any:
        """``P = K^L Π λ_l · λ_H K n`` as a ball."""
        from flint import arb

        sizes = self.n_classes ** (self.depth + 1) * self.n_per_class
        return math.prod(map(arb, self.weight_decay), start=arb(sizes)) * self.feature_decay

    def residual(self, gain: GainEnclosure) -> float:
        """``(P/γ^(L−1))^(1/(L+1))``: the equation solved for the factor that may be tiny."""
        from flint import arb, ctx

        with ctx.workprec(128):
            root = self.product()
            if self.depth > 1:
                root /= arb(gain.low).union(arb(gain.high)) ** (self.depth - 1)
            return float(root.root(self.depth + 1))

    def excess(self, limit: Any) -> str:
        """Says by how much the product is above its limit (a ball), and which decay would do."""
        product, digits = self.product(), 4
        if _shown(product, digits) == _shown(limit, digits):
            digits = 17
        shrink = float((limit / product).root(self.depth))
        largest = [_rounded_down(decay * shrink) for decay in self.weight_decay]
        shown = largest[0] if len(set(largest)) == 1 else f"({', '.join(largest)})"
        bound = "below" if self.depth == 1 else "at most"
        return (
            f"the product K^L·Πλ_l·λ_H·K·n = {_shown(product, digits)} must be {bound} "
            f"{_shown(limit, digits)}; at this feature_decay and these ratios weight_decay may be "
            f"{bound} {shown}"
        )

    def optimum(
        self, width: int, loss: str, gain: float, residual: float, is_global: bool | None
    ) -> CollapsedOptimum:
        sizes = (self.n_classes, self.n_per_class, self.depth, width)
        decays = (self.weight_decay, self.feature_decay)
        return CollapsedOptimum(*sizes, *decays, loss, gain, residual, is_global)


def _threshold(depth: int) -> Any:
    """Largest product for which the global minimum is not zero: ``(L−1)^(L−1)/L^(2L)``."""
    from flint import arb

    return arb((depth - 1) ** (depth - 1)) / depth ** (2 * depth)


def _mse_gain(problem: _Problem) -> GainEnclosure:
    from flint import arb

    depth = problem.depth

    def excess(gain: float) -> Any:
        left = arb(gain) ** (depth - 1) * (1 - arb(gain)) ** (depth + 1)
        return left - problem.product()

    # The next float is certainly not below (L−1)/(2L), from where the left side decreases.
    start = math.nextafter((depth - 1) / (2 * depth), 1) if depth > 1 else 0.0
    if _decided(excess, start) <= 0:
        raise ValueError(
            "at this decay zero is the only minimum, and not even a local one remains: "
            + problem.excess(_threshold(depth))
        )
    return _bracket(excess, start, 1.0)


def _softmax_gain(problem: _Problem) -> GainEnclosure:
    from flint import arb

    k, depth = problem.n_classes, problem.depth

    def left(t: float) -> Any:
        return arb(t) ** (depth - 1) * (k / (arb(t).exp() + k - 1)) ** (depth + 1)

    def excess(t: float) -> Any:
        return left(t) - problem.product()

    peak = _softmax_peak(k, depth)
    if _decided(excess, peak) <= 0:
        raise ValueError(
            "at this decay there is no centred collapsed point under cross-entropy: "
            + problem.excess(left(peak))
        )
    end = max(2 * peak, 1.0)
    while _decided(excess, end) > 0:
        end *= 2
    return _bracket(excess, peak, end)


def _softmax_peak(k: int, depth: int) -> float:
    """Where ``t^(L−1) δ^(L+1)`` starts to fall: ``t e^t/(e^t + K − 1) = (L−1)/(L+1)``."""
    from flint import arb

    def slope(t: float) -> Any:  # of its logarithm, times t(L+1)
        return arb(depth - 1) / (depth + 1) - arb(t) / (1 + (k - 1) * (-arb(t)).exp())

    return _bracket(slope, 0.0, float(k)).high if depth > 1 else 0.0


def _bracket(function: Callable[[float], Any], low: float, high: float) -> GainEnclosure:
    """Neighbouring floats around the root of a ball function, positive at ``low ≥ 0`` and not at
    ``high``; the root itself if it is a float."""
    first, last = _ordinal(low), _ordinal(high)
    while last - first > 1:
        middle = (first + last) // 2
        sign = _decided(function, at := _from_ordinal(middle))
        if sign == 0:
            return GainEnclosure(at, at)
        first, last = (middle, last) if sign > 0 else (first, middle)
    return GainEnclosure(_from_ordinal(first), _from_ordinal(last))


def _decided(ball: Callable[..., Any], *arguments: float) -> int:
    """Sign of a ball function, at the first precision that tells; 0 only for an exact zero.

    It ends: what involves no exponential is exact once the precision holds all of its digits, and
    what does is never zero, since e^t is transcendental for the rational t ≠ 0 that are tried.
    """
    from flint import ctx

    precision = 128
    while True:
        with ctx.workprec(precision):
            value = ball(*arguments)
            if value > 0 or value < 0 or value == 0:
                return int(value > 0) - int(value < 0)
        precision *= 2


def _ordinal(number: float) -> int:
    """Its place among the non-negative floats."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _from_ordinal(place: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", place))[0])


def _shown(ball: Any, digits: int) -> str:
    return str(ball.str(digits, radius=False))


def _rounded_down(number: float) -> str:
    """Four digits, never more than the number itself."""
    return f"{float(Context(prec=4, rounding=ROUND_FLOOR).create_decimal(number)):.4g}"


# --- arguments ------------------------------------------------------------------------------------


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number


def _decay(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(
            f"{name} must be positive and finite, not {value!r}: without decay there is no "
            "collapsed optimum, only interpolation"
        )
    return number


def _decays(weight_decay: Any, depth: int) -> tuple[float, ...]:
    if isinstance(weight_decay, str) or not isinstance(weight_decay, Iterable):
        return (_decay("weight_decay", weight_decay),) * depth
    listed = weight_decay.tolist() if hasattr(weight_decay, "tolist") else list(weight_decay)
    if not isinstance(listed, list) or len(listed) != depth:
        raise ValueError(
            f"weight_decay must be one number or depth={depth} of them, not {weight_decay!r}"
        )
    return tuple(_decay("weight_decay", value) for value in listed)
