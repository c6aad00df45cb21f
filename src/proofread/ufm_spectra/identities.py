"""Checks of the chapter's theorems: each closed form beside ``torch.func`` in float64, attacked.

Distances are rounded to a tenth of what the rules accept, so that a page shows no rounding noise.

Nothing here goes through the package's own curvature operators: the Hessians are those of automatic
differentiation, formed whole, so a wrong closed form and a wrong operator cannot agree by accident.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..stats import Estimate, fit_exponent
from .model import UnconstrainedFeatureModel, minimise
from .optimum import CollapsedOptimum, Spectrum, collapsed_cross_entropy, collapsed_optimum
from .relu import one_sided_hessian, relu_collapse

Weights = Sequence[Tensor]

DECIMALS = 11  # of distances of exact identities; the rules accept 1e-10
OPTIMISER_DECIMALS = 6  # of distances at points that an optimiser found


@dataclass(frozen=True)
class Configuration:
    """Sizes and decays of an unconstrained feature model.

    Attributes:
        n_classes: number of classes K.
        n_per_class: samples of each class n.
        width: d.
        depth: number of weight matrices L.
        weight_decay: λ, or one a layer.
        feature_decay: λ_H.
    """

    n_classes: int
    n_per_class: int
    width: int
    depth: int
    weight_decay: float | tuple[float, ...]
    feature_decay: float

    def optimum(self) -> CollapsedOptimum:
        """The collapsed optimum of these sizes."""
        sizes = (self.n_classes, self.n_per_class, self.depth)
        return collapsed_optimum(*sizes, self.weight_decay, self.feature_decay, self.width)

    def model(
        self,
        *,
        loss: Literal["mse", "cross_entropy"] = "mse",
        seed: int = 0,
        scale: float = 1.0,
        decayed: bool = True,
    ) -> UnconstrainedFeatureModel:
        """A model of these sizes at a random start, without any decay unless ``decayed``."""
        sizes = (self.n_classes, self.n_per_class, self.depth, self.width)
        decays = (self.weight_decay, self.feature_decay) if decayed else (0.0, 0.0)
        options: dict[str, Any] = {"weight_decay": decays[0], "feature_decay": decays[1]}
        return UnconstrainedFeatureModel(*sizes, **options, loss=loss, seed=seed, init_scale=scale)

    def __str__(self) -> str:
        decays = np.unique(np.atleast_1d(self.weight_decay))
        shown = ", ".join(f"{decay:g}" for decay in decays)
        sizes = f"K={self.n_classes} n={self.n_per_class} d={self.width} L={self.depth}"
        return f"{sizes} λ={shown} λ_H={self.feature_decay:g}"


#: What the page checks by default: wide and narrow, shallow and deep, equal and unequal decays.
CONFIGURATIONS = (
    Configuration(3, 4, 3, 1, 0.02, 0.03),
    Configuration(2, 5, 6, 2, 0.01, 0.02),
    Configuration(3, 4, 5, 3, 0.01, 0.01),
    Configuration(4, 3, 4, 3, 0.004, 0.02),
    Configuration(3, 5, 6, 4, 0.006, 0.01),
    Configuration(3, 2, 4, 5, 0.004, 0.006),
    Configuration(3, 4, 5, 3, (0.005, 0.01, 0.02), 0.01),
    Configuration(4, 3, 2, 3, 0.004, 0.02),  # d < K
    Configuration(5, 2, 3, 2, (0.01, 0.02), 0.01),  # d < K, unequal decays
)


def wide(configurations: Sequence[Configuration] = CONFIGURATIONS) -> tuple[Configuration, ...]:
    """Those with d ≥ K, where all class means fit."""
    return tuple(c for c in configurations if c.width >= c.n_classes)


# --- automatic differentiation ------------------------------------------------------------------


def data_loss(weights: Weights, features: Tensor, targets: Tensor) -> Tensor:
    """``(1/2N)‖W_L … W_1 H − Y‖²`` for ``features [d, N]`` and ``targets [K, N]``."""
    outputs = features
    for weight in weights:
        outputs = weight @ outputs
    return (outputs - targets).square().sum() / (2 * targets.shape[1])


def cross_entropy_loss(weights: Weights, features: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the outputs for one-hot ``targets [K, N]``."""
    outputs = features
    for weight in weights:
        outputs = weight @ outputs
    return torch.nn.functional.cross_entropy(outputs.T, targets.T)


Loss = Callable[[Weights, Tensor, Tensor], Tensor]


def layer_hessian(
    weights: Weights, features: Tensor, targets: Tensor, layer: int, loss: Loss = data_loss
) -> Tensor:
    """The data term's Hessian in one layer's weight, by forward over reverse: ``[P, P]``."""

    def of(weight: Tensor) -> Tensor:
        return loss([*weights[: layer - 1], weight, *weights[layer:]], features, targets)

    weight = weights[layer - 1]
    return torch.func.hessian(of)(weight).reshape(weight.numel(), -1)


def full_hessian(weights: Weights, features: Tensor, targets: Tensor) -> Tensor:
    """The data term's Hessian in all weights at once, features fixed: ``[P, P]``."""
    sizes = [weight.numel() for weight in weights]

    def of(flat: Tensor) -> Tensor:
        parts = zip(flat.split(sizes), weights, strict=True)
        return data_loss([part.view_as(w) for part, w in parts], features, targets)

    return torch.func.hessian(of)(torch.cat([weight.flatten() for weight in weights]))


def layer_features(weights: Weights, features: Tensor) -> list[Tensor]:
    """``H_1 … H_{L+1}``, the last being the outputs: each ``[width, N]``."""
    return list(itertools.accumulate(weights, lambda h, w: w @ h, initial=features))


def class_means(features: Tensor, n_classes: int) -> Tensor:
    """Means of features ``[d, K·n]`` ordered by class: ``[d, K]``."""
    return features.reshape(len(features), n_classes, -1).mean(2)


def point(optimum: CollapsedOptimum, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights, features and targets of a generic representative of the optimum."""
    return optimum.weights(seed), optimum.features(seed), optimum.targets()


def spectrum_distance(hessian: Tensor, predicted: Spectrum, unit: float) -> float:
    """Largest distance of the eigenvalues from the predicted ones, in the given unit."""
    return predicted.distance(torch.linalg.eigvalsh(hessian).numpy()) / unit


def _larger(worst: float, value: float) -> float:
    """The larger one; ``max`` would let a NaN pass as the smaller."""
    if math.isnan(value):
        raise ArithmeticError("a checked quantity is NaN: the point it is taken at is degenerate")
    return max(worst, value)


# --- the layer Hessian --------------------------------------------------------------------------


def layer_hessian_distance(
    configurations: Sequence[Configuration] = CONFIGURATIONS, *, noise: float = 0.0
) -> float:
    """Largest distance of a layer Hessian's spectrum from the closed form, in outliers.

    ``noise`` multiplies every weight by ``1 + noise · z``, z standard normal: off the optimum the
    closed form must fail.
    """
    worst = 0.0
    for configuration in configurations:
        optimum = configuration.optimum()
        weights, features, targets = point(optimum)
        weights = _perturbed(weights, noise, seed=0)
        for layer in range(1, optimum.depth + 1):
            hessian = layer_hessian(weights, features, targets, layer)
            predicted = optimum.predicted_spectrum("layer_hessian", layer)
            unit = optimum.layer_outlier(layer)
            worst = _larger(worst, spectrum_distance(hessian, predicted, unit))
    return round(worst, DECIMALS)


def _perturbed(weights: Weights, noise: float, seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    normal = [torch.randn(w.shape, generator=draw, dtype=w.dtype) for w in weights]
    return [w * (1 + noise * z) for w, z in zip(weights, normal, strict=True)]


def unbalanced_distance(counts: Sequence[int] = (8, 4, 4, 4)) -> float:
    """As :func:`layer_hessian_distance`, at the trained optimum of a problem with these numbers of
    samples, 20 in all, one class with twice as many as the others; the closed form has N and K."""
    configuration = Configuration(4, 5, 6, 3, 0.004, 0.01)
    optimum = configuration.optimum()
    sizes = (4, 5, 3, 6)
    model = UnconstrainedFeatureModel(
        *sizes, weight_decay=0.004, feature_decay=0.01, init_scale=3.0, class_counts=counts
    )
    minimise(model, tolerance=1e-6)  # the distance looked for is of order one
    weights, features, targets = _point_of(model)
    distances = [
        spectrum_distance(
            layer_hessian(weights, features, targets, layer),
            optimum.predicted_spectrum("layer_hessian", layer),
            optimum.layer_outlier(layer),
        )
        for layer in (1, 2, 3)
    ]
    return max(distances)


def _point_of(model: UnconstrainedFeatureModel) -> tuple[list[Tensor], Tensor, Tensor]:
    weights = [cast(Tensor, layer.weight).detach() for layer in model.layers]
    targets = torch.nn.functional.one_hot(model.targets(), model.n_classes).T
    return weights, model.features.detach().T, targets.to(weights[0])


def eigenvector_residual(configurations: Sequence[Configuration] | None = None) -> float:
    """Largest ``‖Hv − o v‖ / o`` over unit products ``v = μ_c^(l+1) ⊗ μ_c′^(l)`` of class means."""
    worst = 0.0
    for configuration in wide() if configurations is None else configurations:
        optimum = configuration.optimum()
        weights, features, targets = point(optimum)
        stages = layer_features(weights, features)
        for layer in range(1, optimum.depth + 1):
            below, above = (
                _unit(class_means(h, optimum.n_classes)) for h in stages[layer - 1 :][:2]
            )
            v = torch.kron(above, below)  # [P, K²]
            hv = layer_hessian(weights, features, targets, layer) @ v
            outlier = optimum.layer_outlier(layer)
            worst = _larger(worst, float((hv - outlier * v).norm(dim=0).max()) / outlier)
    return round(worst, DECIMALS)


def _unit(columns: Tensor) -> Tensor:
    return columns / columns.norm(dim=0)


class Splitting(NamedTuple):
    """How far equal eigenvalues move apart when the optimum is disturbed.

    - ``sizes``: relative sizes of the disturbance, ``[S]``
    - ``layers``: the layers looked at
    - ``spread``: (largest − smallest outlier) / outlier, mean over seeds, ``[S, layers]``
    - ``leak``: largest other eigenvalue / outlier, mean over seeds, ``[S, layers]``
    """

    sizes: np.ndarray
    layers: tuple[int, ...]
    spread: np.ndarray
    leak: np.ndarray

    def exponents(self) -> list[tuple[Estimate, Estimate]]:
        """Fitted exponents in the size of spread and leak, a pair a layer."""
        columns = zip(self.spread.T, self.leak.T, strict=True)
        return [(fit_exponent(self.sizes, a), fit_exponent(self.sizes, b)) for a, b in columns]


def splitting(
    configuration: Configuration,
    layers: Sequence[int] = (1, 2),
    sizes: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2),
    seeds: Sequence[int] = range(10),
) -> Splitting:
    """Disturb features and weights of the optimum and follow the spectra of some layers."""
    optimum = configuration.optimum()
    found = [
        [[_split(optimum, layer, size, seed) for layer in layers] for seed in seeds]
        for size in sizes
    ]  # [size, seed, layer, 2]
    spread, leak = np.moveaxis(np.array(found).mean(1), -1, 0)
    return Splitting(np.asarray(sizes), tuple(layers), spread, leak)


def _split(optimum: CollapsedOptimum, layer: int, size: float, seed: int) -> tuple[float, float]:
    weights, features, targets = point(optimum, seed)
    weights = _perturbed(weights, size, seed)
    features = _perturbed([features], size, seed + 1000)[0]
    hessian = layer_hessian(weights, features, targets, layer)
    values = torch.linalg.eigvalsh(hessian).flip(0) / optimum.layer_outlier(layer)
    outliers = optimum.n_classes**2
    return float(values[0] - values[outliers - 1]), float(values[outliers:].abs().max())


# --- Gauss–Newton parts, gradient, weights --------------------------------------------------------


def output_gradients(weights: Weights, features: Tensor, layer: int) -> Tensor:
    """Gradients of every output of every sample in one layer's weight: ``[N, K, P]``."""

    def outputs(weight: Tensor, sample: Tensor) -> Tensor:
        for w in (*weights[: layer - 1], weight, *weights[layer:]):
            sample = w @ sample
        return sample

    jacobian = torch.func.vmap(torch.func.jacrev(outputs), in_dims=(None, 1))
    return jacobian(weights[layer - 1], features).flatten(2)


def split_gauss_newton(gradients: Tensor, n_classes: int) -> dict[str, Tensor]:
    """Class, cross-class and within-class parts of ``(1/N) Σ v vᵀ``, for ``[N, K, P]`` gradients
    of samples ordered by class: the law of total variance, applied twice."""
    total, _, size = gradients.shape
    v = gradients.reshape(n_classes, -1, n_classes, size)  # [c, i, c', P]
    pairs = v.mean(1)  # [c, c', P]
    classes = pairs.mean(1)  # [c, P]
    each = {
        "class": classes.repeat_interleave(n_classes, 0) / math.sqrt(n_classes),
        "cross": (pairs - classes[:, None]).reshape(-1, size) / math.sqrt(n_classes),
        "within": (v - pairs[:, None]).reshape(-1, size) / math.sqrt(total),
    }
    return {name: rows.T @ rows for name, rows in each.items()}


def split_mistakes(
    configurations: Sequence[Configuration] | None = None, *, within_noise: float = 0.0
) -> int:
    """Wrong ranks among (K, K(K − 1), 0), and pairs of parts whose images are not orthogonal.

    ``within_noise`` moves every feature within its class by that fraction of its mean's norm.
    """
    mistakes = 0
    for configuration in wide() if configurations is None else configurations:
        optimum, k = configuration.optimum(), configuration.n_classes
        weights, features, _ = point(optimum)
        features = _moved_within(features, k, within_noise)
        for layer in range(1, optimum.depth + 1):
            parts = split_gauss_newton(output_gradients(weights, features, layer), k)
            unit = optimum.layer_outlier(layer)
            images = [_image(part, 1e-9 * unit) for part in parts.values()]
            wanted = (k, k * (k - 1), 0)
            mistakes += sum(q.shape[1] != rank for q, rank in zip(images, wanted, strict=True))
            mistakes += sum(_cosine(a, b) > 1e-9 for a, b in itertools.combinations(images, 2))
    return mistakes


def _moved_within(features: Tensor, n_classes: int, noise: float) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(features.shape, generator=draw, dtype=features.dtype)
    grouped = z.reshape(len(z), n_classes, -1)
    z = (grouped - grouped.mean(2, keepdim=True)).reshape(z.shape)
    return features + noise * features.norm(dim=0) * _unit(z) if noise else features


def _image(matrix: Tensor, threshold: float) -> Tensor:
    """Orthonormal basis of the eigenvectors with eigenvalues above the threshold: ``[P, r]``."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors[:, values.abs() > threshold]


def _cosine(a: Tensor, b: Tensor) -> float:
    """Largest cosine between two subspaces (0 if one is empty)."""
    return float(torch.linalg.matrix_norm(a.T @ b, 2)) if a.numel() and b.numel() else 0.0


def gradient_distance(
    configurations: Sequence[Configuration] | None = None, *, shift: int = 0
) -> float:
    """Largest relative distance of autograd's gradient from the sum of K products of class means.

    ``shift`` pairs the means of layer l with those of other classes of layer l + 1.
    """
    worst = 0.0
    for configuration in wide() if configurations is None else configurations:
        optimum = configuration.optimum()
        weights, features, targets = point(optimum)
        leaves = [w.clone().requires_grad_() for w in weights]
        gradients = torch.autograd.grad(data_loss(leaves, features, targets), leaves)
        stages = layer_features(weights, features)
        for layer, gradient in enumerate(gradients, start=1):
            closed = _gradient(optimum, stages, layer, shift)
            worst = _larger(worst, float((gradient - closed).norm() / gradient.norm()))
    return round(worst, DECIMALS)


def _gradient(optimum: CollapsedOptimum, stages: list[Tensor], layer: int, shift: int) -> Tensor:
    """``−λ_l ‖W_l‖ Σ_c μ̂_c^(l+1) μ̂_c^(l)ᵀ / √K``: equal coefficients, unit means ``μ̂``."""
    below, above = (_unit(class_means(h, optimum.n_classes)) for h in stages[layer - 1 :][:2])
    decay, sigma = optimum.weight_decay[layer - 1], optimum.singular_values[layer - 1]
    return -decay * sigma * above @ below.roll(shift, 1).T


class Minimiser(NamedTuple):
    """Where a general optimiser ended.

    - ``configuration``: sizes and decays
    - ``weights``, ``features``, ``targets``: the point, as for :func:`data_loss`
    - ``objective``: the value of the objective there
    """

    configuration: Configuration
    weights: list[Tensor]
    features: Tensor
    targets: Tensor
    objective: float


@functools.cache
def minimisers(*, scale: float = 3.0, seed: int = 1, decayed: bool = True) -> tuple[Minimiser, ...]:
    """L-BFGS from a random start of that scale, for each configuration with d ≥ K."""
    found = []
    for configuration in wide():
        model = configuration.model(seed=seed, scale=scale, decayed=decayed)
        minimise(model, tolerance=1e-8 if decayed else 1e-6)
        found.append(Minimiser(configuration, *_point_of(model), model.objective().item()))
    return tuple(found)


def weight_distance(*, decayed: bool = True) -> float:
    """Largest relative distance of ``W_lᵀW_l`` from ``σ_l² Σ_c μ̂_c^(l) μ̂_c^(l)ᵀ``, unit means, at
    minimisers found from random starts; without decay a minimiser has no reason to comply."""
    worst = 0.0
    for found in minimisers() if decayed else minimisers(scale=1.0, decayed=False):
        optimum = found.configuration.optimum()
        stages = layer_features(found.weights, found.features)
        for layer, weight in enumerate(found.weights, start=1):
            means = _unit(class_means(stages[layer - 1], optimum.n_classes))
            closed = optimum.singular_values[layer - 1] ** 2 * means @ means.T
            worst = _larger(worst, float((weight.T @ weight - closed).norm() / closed.norm()))
    return round(worst, OPTIMISER_DECIMALS if decayed else 1)


# --- the full Hessian -----------------------------------------------------------------------------


def full_hessian_distance(
    configurations: Sequence[Configuration] = CONFIGURATIONS, *, coupled: bool = True
) -> float:
    """Largest distance of the full Hessian's spectrum from the closed form, in outliers.

    With ``coupled=False`` the prediction is that of layers which do not interact (their spectra
    side by side), and the result the *smallest* such distance over configurations with L ≥ 2.
    """
    distances = []
    for configuration in configurations:
        optimum = configuration.optimum()
        values = torch.linalg.eigvalsh(full_hessian(*point(optimum))).numpy()
        unit = max(optimum.layer_outlier(layer) for layer in range(1, optimum.depth + 1))
        if coupled:
            distances.append(optimum.predicted_spectrum("full_hessian").distance(values) / unit)
        elif optimum.depth > 1:
            distances.append(float(np.abs(_side_by_side(optimum) - values[::-1]).max()) / unit)
    return round(max(distances) if coupled else min(distances), DECIMALS)


def _side_by_side(optimum: CollapsedOptimum) -> np.ndarray:
    layers = range(1, optimum.depth + 1)
    spectra = [optimum.predicted_spectrum("layer_hessian", layer).expand() for layer in layers]
    return np.sort(np.concatenate(spectra))[::-1]


def symbolic_quadratic_form(n_classes: int, width: int, depth: int) -> str:
    """The second-order term of the loss at the optimum minus the form of the proof, expanded in
    symbols (every entry of every direction, σ and h): ``"0"`` if the proof's algebra is right."""
    import sympy as sp

    sigma, h, epsilon = sp.symbols("sigma h epsilon", positive=True)
    k, heights = n_classes, [*[width] * (depth - 1), n_classes]
    weights = [_embedded(sp, sigma, rows, width, k) for rows in heights]
    x = [
        sp.Matrix(rows, width, lambda i, j, tag=tag: sp.Symbol(f"x{tag}_{i}_{j}"))
        for tag, rows in enumerate(heights)
    ]
    outputs = _embedded(sp, h, width, k, k)
    for weight, direction in zip(weights, x, strict=True):
        moved = (weight + epsilon * direction) * outputs
        outputs = moved.applyfunc(lambda e: _truncated(sp, e, epsilon))
    residual = outputs - sp.eye(k)
    loss = sum(entry**2 for entry in residual) / (2 * k)
    exact = 2 * sp.Poly(sp.expand(loss), epsilon).coeff_monomial(epsilon**2)
    return str(sp.expand(exact - _claimed_form(sp, x, sigma, h, k, depth)))


def _truncated(sp, expression, epsilon):  # type: ignore[no-untyped-def]
    """Drop powers of ε above the second."""
    poly = sp.Poly(sp.expand(expression), epsilon)
    return sum(poly.coeff_monomial(epsilon**p) * epsilon**p for p in range(3))


def _embedded(sp, scale, rows: int, columns: int, k: int):  # type: ignore[no-untyped-def]
    """``scale`` on the first k diagonal entries, zero elsewhere."""
    return sp.Matrix(rows, columns, lambda i, j: scale if i == j < k else 0)


def _claimed_form(sp, x, sigma, h, k: int, depth: int):  # type: ignore[no-untyped-def]
    """``(σ^(L−1)h)²/K ‖Σ a_l‖² − 2(1−γ)hσ^(L−2)/K [Σ_{l<m} tr(a_m a_l) + Σ_l tr(b_{l+1} c_l)]``."""
    gamma = sigma**depth * h
    a = [m[:k, :k] for m in x]
    total = sum(a, sp.zeros(k, k))
    pairs = sum((after * before).trace() for before, after in itertools.combinations(a, 2))
    for before, after in itertools.pairwise(x):
        pairs += (after[:k, k:] * before[k:, :k]).trace()
    first = (sigma ** (depth - 1) * h) ** 2 / k * sum(e**2 for e in total)
    return sp.expand(first - 2 * (1 - gamma) * h * sigma ** (depth - 2) / k * pairs)


# --- ReLU and cross-entropy -----------------------------------------------------------------------

#: ReLU configurations of the page: K = 3 and 4, L = 3 to 5.
RELU_CONFIGURATIONS = (
    Configuration(3, 2, 4, 3, 0.01, 0.01),
    Configuration(3, 2, 6, 4, 0.006, 0.01),
    Configuration(4, 2, 5, 4, 0.004, 0.006),
    Configuration(3, 2, 3, 5, 0.004, 0.006),
)


def relu_rank_share(units: Literal["closed", "open"] = "closed", *, last: bool = False) -> float:
    """Smallest rank / K² of a layer Hessian at the ReLU model's collapsed point.

    ``units`` says how units at the kink count: ``"closed"`` is PyTorch's derivative 0, ``"open"``
    the derivative 1. Hidden layers, or the last one alone.
    """
    shares = []
    for configuration in RELU_CONFIGURATIONS:
        optimum = configuration.optimum()
        layers = [optimum.depth] if last else range(1, optimum.depth)
        for layer in layers:
            values = torch.linalg.eigvalsh(one_sided_hessian(optimum, layer, units))
            rank = int((values.abs() > 1e-9 * optimum.layer_outlier(layer)).sum())
            shares.append(rank / optimum.n_classes**2)
    return min(shares)


def relu_kink_distance() -> float:
    """Largest off-class pre-activation of a hidden layer at the collapsed point of the ReLU model,
    relative to the largest pre-activation: 0 means that the point lies on the kink."""
    worst = 0.0
    for configuration in RELU_CONFIGURATIONS:
        optimum = configuration.optimum()
        weights, features = relu_collapse(optimum)
        inputs = features
        for weight in weights[:-1]:
            z = class_means(weight @ inputs, optimum.n_classes)  # [d, K]
            worst = _larger(worst, float(_off_class(z).abs().max() / z.max()))
            inputs = (weight @ inputs).relu()
    return worst


def _off_class(z: Tensor) -> Tensor:
    """All but each unit's largest class."""
    return z.scatter(1, z.argmax(1, keepdim=True), 0.0)


#: Sizes at which the cross-entropy spectrum is checked.
CROSS_ENTROPY_CONFIGURATIONS = (
    Configuration(3, 4, 4, 2, 0.003, 0.003),
    Configuration(4, 3, 5, 3, 0.002, 0.002),
    Configuration(6, 2, 6, 3, 0.001, 0.001),
    Configuration(10, 1, 9, 2, 0.0005, 0.0005),
)


def collapsed_softmax(configuration: Configuration) -> CollapsedOptimum:
    """The centred collapsed point under cross-entropy of these sizes."""
    c = configuration
    sizes = (c.n_classes, c.n_per_class, c.depth)
    return collapsed_cross_entropy(*sizes, c.weight_decay, c.feature_decay, c.width)


def cross_entropy_distance(
    configurations: Sequence[Configuration] = CROSS_ENTROPY_CONFIGURATIONS,
) -> float:
    """As :func:`layer_hessian_distance`, for the centred collapsed point under cross-entropy."""
    worst = 0.0
    for configuration in configurations:
        optimum = collapsed_softmax(configuration)
        weights, features, targets = point(optimum)
        for layer in range(1, optimum.depth + 1):
            hessian = layer_hessian(weights, features, targets, layer, cross_entropy_loss)
            predicted = optimum.predicted_spectrum("layer_hessian", layer)
            worst = _larger(worst, spectrum_distance(hessian, predicted, max(predicted.values)))
    return round(worst, DECIMALS)


def best_objective(configuration: Configuration, seeds: Sequence[int] = range(3)) -> float:
    """Smallest objective under cross-entropy that L-BFGS finds from some random starts."""
    found = []
    for seed in seeds:
        model = configuration.model(loss="cross_entropy", seed=seed, scale=1.5)
        minimise(model, tolerance=1e-5)
        found.append(model.objective().item())
    return min(found)
