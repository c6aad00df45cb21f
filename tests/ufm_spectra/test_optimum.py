"""Closed forms of the collapsed optimum against automatic differentiation and optimisers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from proofread.ufm_spectra.optimum import (
    CollapsedOptimum,
    Spectrum,
    collapsed_cross_entropy,
    collapsed_optimum,
    gain_enclosure,
)

# K, n, L, weight decay, feature decay, width
MSE = {
    "one layer": (3, 4, 1, 0.02, 0.03, 3),
    "one wide layer": (2, 3, 1, 0.02, 0.03, 5),
    "two classes": (2, 5, 2, 0.01, 0.02, 4),
    "square": (3, 2, 3, 0.01, 0.01, 3),
    "wide": (3, 4, 3, 0.01, 0.01, 5),
    "four layers": (3, 5, 4, 0.006, 0.01, 4),
    "five layers": (3, 2, 5, 0.004, 0.006, 3),
    "unequal decays": (3, 4, 3, (0.005, 0.01, 0.02), 0.01, 5),
    "two of three decays": (2, 3, 3, (0.01, 0.01, 0.03), 0.01, 3),
    "narrow": (4, 3, 3, 0.004, 0.02, 2),
    "narrow, one layer": (4, 2, 1, 0.01, 0.02, 2),
    "narrow, unequal": (5, 2, 2, (0.01, 0.02), 0.01, 3),
    "width one": (3, 2, 3, (0.004, 0.01, 0.02), 0.01, 1),
}
CROSS_ENTROPY = {
    "one layer": (3, 2, 1, 0.01, 0.02, 3),
    "two classes, width one": (2, 4, 2, 0.01, 0.01, 1),
    "two classes": (2, 3, 3, 0.003, 0.01, 3),
    "three classes": (3, 4, 2, 0.003, 0.003, 4),
    "width K - 1": (4, 2, 3, 0.002, 0.002, 3),
    "unequal decays": (4, 3, 3, (0.001, 0.002, 0.005), 0.002, 5),
    "five layers": (3, 1, 5, 0.0005, 0.001, 3),
    "six classes": (6, 1, 2, 0.001, 0.002, 6),
}
FOUND: dict[str, Callable[..., CollapsedOptimum]] = {
    "mse": collapsed_optimum,
    "cross_entropy": collapsed_cross_entropy,
}
POINTS = [("mse", name) for name in MSE] + [("cross_entropy", name) for name in CROSS_ENTROPY]


def optimum_of(loss: str, name: str) -> CollapsedOptimum:
    return FOUND[loss](*(MSE if loss == "mse" else CROSS_ENTROPY)[name])


def data_term(weights: list[Tensor], features: Tensor, targets: Tensor, loss: str) -> Tensor:
    outputs = features
    for weight in weights:
        outputs = weight @ outputs
    if loss == "mse":
        return (outputs - targets).square().sum() / (2 * targets.shape[1])
    return -(targets * torch.log_softmax(outputs, 0)).sum() / targets.shape[1]


def regularised(optimum: CollapsedOptimum, weights: list[Tensor], features: Tensor) -> Tensor:
    total = data_term(weights, features, optimum.targets(), optimum.loss)
    for decay, weight in zip(optimum.weight_decay, weights, strict=True):
        total = total + decay / 2 * weight.square().sum()
    return total + optimum.feature_decay / 2 * features.square().sum()


# --- the point ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "name"), POINTS)
@pytest.mark.parametrize("seed", [None, 0, 7])
def test_the_gradient_of_the_regularised_loss_vanishes(
    loss: str, name: str, seed: int | None
) -> None:
    optimum = optimum_of(loss, name)
    leaves = [t.requires_grad_() for t in (*optimum.weights(seed), optimum.features(seed))]
    value = regularised(optimum, leaves[:-1], leaves[-1])
    for gradient in torch.autograd.grad(value, leaves):
        assert gradient.abs().max() < 1e-12
    assert float(value.detach()) == pytest.approx(optimum.objective, abs=1e-14)


@pytest.mark.parametrize(("loss", "name"), POINTS)
def test_outputs_shapes_and_scales(loss: str, name: str) -> None:
    optimum = optimum_of(loss, name)
    k, n, d = optimum.n_classes, optimum.n_per_class, optimum.width
    weights, features, targets = optimum.weights(3), optimum.features(3), optimum.targets()
    assert [tuple(w.shape) for w in weights] == [(d, d)] * (optimum.depth - 1) + [(k, d)]
    assert features.shape == (d, k * n)
    assert {t.dtype for t in (*weights, features, targets)} == {torch.float64}
    assert torch.equal(targets, torch.kron(torch.eye(k), torch.ones(1, n)).double())
    outputs = features
    for weight in weights:
        outputs = weight @ outputs
    if loss == "cross_entropy":
        expected = optimum.gain * (targets - 1 / k)
        centred = features - features.mean(1, keepdim=True)
        assert centred.norm(dim=0) == pytest.approx(optimum.feature_scale, rel=1e-12)
        probability = torch.softmax(outputs, 0)[0, -1]  # of a wrong class
        assert optimum.residual == pytest.approx(k * float(probability), rel=1e-12)
    elif d >= k:
        expected = optimum.gain * targets
        assert features.norm(dim=0) == pytest.approx(optimum.feature_scale, rel=1e-12)
    else:  # γ times some projection of rank d
        projection = outputs[:, ::n] / optimum.gain
        assert torch.dist(projection @ projection, projection) < 1e-12
        assert float(projection.trace()) == pytest.approx(d, abs=1e-12)
        expected = optimum.gain * projection @ targets
    assert torch.dist(outputs, expected) < 1e-11


def test_seeds_give_other_points_of_the_same_orbit() -> None:
    optimum = optimum_of("mse", "wide")
    assert torch.equal(optimum.weights(1)[0], optimum.weights(1)[0])
    assert torch.dist(optimum.weights(1)[0], optimum.weights(2)[0]) > 0.1
    aligned = optimum.weights()[0]
    assert torch.equal(aligned, torch.diag(torch.diag(aligned)))
    narrow = optimum_of("mse", "narrow")
    kept = (narrow.weights()[2] @ narrow.weights()[1] @ narrow.weights()[0] @ narrow.features()).T
    assert kept[:6].abs().max() == pytest.approx(narrow.gain)  # the first two classes
    assert kept[6:].abs().max() == 0


@pytest.mark.parametrize(
    ("sizes", "best_of"), [((2, 2, 2, 0.03, 0.05, 3), 6), ((3, 2, 3, (0.01, 0.02, 0.03), 0.01), 6)]
)
def test_no_optimiser_gets_below_and_some_start_gets_there(sizes: Any, best_of: int) -> None:
    optimum = collapsed_optimum(*sizes)
    shapes = [tuple(t.shape) for t in (*optimum.weights(), optimum.features())]
    lengths = [math.prod(shape) for shape in shapes]

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(flat).requires_grad_()
        parts = [p.view(s) for p, s in zip(leaf.split(lengths), shapes, strict=True)]
        total = regularised(optimum, parts[:-1], parts[-1])
        return float(total.detach()), torch.autograd.grad(total, leaf)[0].numpy()

    rng = np.random.default_rng(0)
    options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9}
    starts = rng.standard_normal((best_of, sum(lengths)))
    found = [minimize(value, x, jac=True, method="L-BFGS-B", options=options).fun for x in starts]
    assert min(found) == pytest.approx(optimum.objective, abs=1e-9)
    assert min(found) > optimum.objective - 1e-12


# --- the threshold --------------------------------------------------------------------------------


def decays_with_gain(gain: float, k: int, n: int, depth: int) -> tuple[float, float]:
    """Weight decay 0.03 and the feature decay at which the root is ``gain``."""
    product = gain ** (depth - 1) * (1 - gain) ** (depth + 1)
    return 0.03, product / ((k * 0.03) ** depth * k * n)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_at_the_threshold_the_optimum_ties_with_zero(depth: int) -> None:
    for shift in (1e-4, -1e-4, 1e-12):
        sizes = (3, 2, depth, *decays_with_gain((depth - 1) / depth + shift, 3, 2, depth))
        optimum = collapsed_optimum(*sizes, allow_local=True)
        zero = regularised(
            optimum, [0 * w for w in optimum.weights()], torch.zeros_like(optimum.features())
        )
        assert optimum.is_global is (shift > 0)
        difference = optimum.objective - float(zero)
        if abs(shift) > 1e-6:  # g(γ) − g(0) = γ [L − 1 − Lγ], over 2
            assert difference == pytest.approx(-optimum.gain * depth * shift / 2, rel=1e-6)
        else:
            assert abs(difference) < 1e-11


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_the_objectives_tie_to_rounding(depth: int) -> None:
    k, n = 2, 1
    product = Fraction((depth - 1) ** (depth - 1), depth ** (2 * depth))
    decay = float(product) / (k ** (depth + 1) * n)  # of layer 1; the others are 1
    decays = (math.nextafter(decay, 0), *[1.0] * (depth - 1))
    optimum = collapsed_optimum(k, n, depth, decays, 1.0)
    assert optimum.is_global
    assert optimum.gain == pytest.approx((depth - 1) / depth, abs=1e-14)
    assert optimum.objective == pytest.approx(0.5, abs=1e-14)
    above = (math.nextafter(decay, 1), *[1.0] * (depth - 1))
    with pytest.raises(ValueError, match="global minimum is zero"):
        collapsed_optimum(k, n, depth, above, 1.0)


def test_exactly_at_the_threshold() -> None:
    # L = 2: 1/16 = 2² λ² · 2 λ_H exactly, in binary
    assert collapsed_optimum(2, 1, 2, 0.125, 0.5).gain == 0.5
    assert collapsed_optimum(2, 1, 2, 0.125, 0.5).is_global


def test_the_local_minimum_and_the_fold() -> None:
    decay, feature_decay = decays_with_gain(0.5, 3, 2, 3)  # between 1/3 and 2/3
    with pytest.raises(ValueError, match="global minimum is zero") as caught:
        collapsed_optimum(3, 2, 3, decay, feature_decay)
    message = str(caught.value)
    assert "strict local minimum with gain 0.5 remains: allow_local=True returns it" in message
    assert f"{4 / 729:.4g}"[:6] in message
    local = collapsed_optimum(3, 2, 3, decay, feature_decay, allow_local=True)
    assert local.is_global is False
    assert local.gain == pytest.approx(0.5, abs=1e-13)
    # A minimum indeed: the Hessian of the whole objective has no negative eigenvalue.
    sizes = [w.numel() for w in local.weights()] + [local.features().numel()]
    shapes = [w.shape for w in local.weights()] + [local.features().shape]

    def whole(flat: Tensor) -> Tensor:
        parts = [p.view(s) for p, s in zip(flat.split(sizes), shapes, strict=True)]
        return regularised(local, parts[:-1], parts[-1])

    at = torch.cat([t.flatten() for t in (*local.weights(0), local.features(0))])
    assert torch.linalg.eigvalsh(torch.func.hessian(whole)(at)).min() > -1e-12
    beyond = decays_with_gain(1 / 3, 3, 2, 3)
    with pytest.raises(ValueError, match="not even a local one remains"):
        collapsed_optimum(3, 2, 3, beyond[0] * 1.001, beyond[1], allow_local=True)
    assert collapsed_optimum(3, 2, 3, beyond[0] * 0.999, beyond[1], allow_local=True).gain > 1 / 3


@pytest.mark.parametrize(
    "sizes",
    [
        (3, 10, 2, 0.1, 0.05),
        (3, 4, 3, (0.05, 0.1, 0.2), 0.3),
        (3, 10, 1, 0.1, 0.5),
        (5, 3, 4, 2, 9),
    ],
)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_the_decay_that_the_message_names_would_do(sizes: Any, loss: str) -> None:
    sizes = (*sizes[:4], sizes[4] * 50)
    with pytest.raises(ValueError, match="weight_decay may be") as caught:
        FOUND[loss](*sizes)
    named = re.search(
        r"weight_decay may be (?:below|at most) (\(.*?\)|[\d.e-]+\d)", str(caught.value)
    )
    assert named is not None
    largest = tuple(float(x) for x in re.findall(r"[\d.]+(?:e-?\d+)?", named[1]))
    assert len(largest) == len(np.unique(sizes[3]))
    decays = np.broadcast_to(largest, sizes[2])
    assert FOUND[loss](*sizes[:3], decays, sizes[4]).objective < 1e9
    with pytest.raises(ValueError, match="weight_decay may be"):
        FOUND[loss](*sizes[:3], 1.001 * decays, sizes[4])


def test_one_layer_is_soft_thresholding() -> None:
    # min_m (m − √n)²/(2N) + √(λ λ_H) m has the solution m = √n − N √(λ λ_H)
    k, n, decay, feature_decay = 3, 4, 0.02, 0.03
    optimum = collapsed_optimum(k, n, 1, decay, feature_decay)
    by_hand = 1 - k * n * math.sqrt(decay * feature_decay) / math.sqrt(n)
    assert optimum.gain == pytest.approx(by_hand, abs=1e-15)
    assert optimum.outlier == pytest.approx(decay * by_hand / (1 - by_hand), rel=1e-14)
    with pytest.raises(ValueError, match="must be below"):
        collapsed_optimum(2, 1, 1, 0.5, 0.5)  # the product is 1: soft-thresholded to zero


# --- the enclosure --------------------------------------------------------------------------------


def exact_excess(gain: float, sizes: Any) -> Fraction:
    """``γ^(L−1) (1−γ)^(L+1) − P`` in exact rational arithmetic."""
    k, n, depth, decay, feature_decay = sizes
    product = Fraction(k) ** (depth + 1) * n * Fraction(feature_decay)
    for value in [decay] * depth if isinstance(decay, float) else decay:
        product *= Fraction(value)
    return Fraction(gain) ** (depth - 1) * (1 - Fraction(gain)) ** (depth + 1) - product


SMALL = {
    "tiny": (10, 100, 4, 1e-8, 1e-8),
    "below the precision of 1": (2, 1, 1, 1e-40, 1e-30),
    "deep": (3, 2, 30, 1e-3, 1e-5),
    "near the fold": (3, 2, 3, 0.2383, 0.01),
}


@pytest.mark.parametrize("sizes", [*(row[:5] for row in MSE.values()), *SMALL.values()])
def test_the_enclosure_brackets_the_root_tightly(sizes: Any) -> None:
    low, high = gain_enclosure(*sizes)
    assert exact_excess(low, sizes) >= 0 >= exact_excess(high, sizes)
    assert Fraction(low) >= Fraction(sizes[2] - 1, 2 * sizes[2])  # where the left side decreases
    assert 0 <= high - low < 1.2e-16
    optimum = collapsed_optimum(*sizes, allow_local=True)
    assert low <= optimum.gain <= high


@pytest.mark.parametrize("sizes", [*(row[:5] for row in MSE.values()), *SMALL.values()])
def test_residual_and_outlier_have_full_relative_accuracy(sizes: Any) -> None:
    mpmath = pytest.importorskip("mpmath")  # comes with sympy
    optimum = collapsed_optimum(*sizes, allow_local=True)
    k, n, depth = sizes[:3]
    with mpmath.workdps(80):
        product = mpmath.mpf(k) ** (depth + 1) * n * mpmath.mpf(sizes[4])
        for decay in optimum.weight_decay:
            product *= mpmath.mpf(decay)

        def equation(x: Any) -> Any:
            return (depth - 1) * mpmath.log(1 - x) + (depth + 1) * mpmath.log(x)

        start = mpmath.mpf(optimum.residual)
        root = mpmath.findroot(
            lambda x: equation(x) - mpmath.log(product),
            (start * (1 - mpmath.mpf("1e-9")), start * (1 + mpmath.mpf("1e-9"))),  # secant
            tol=1e-120,
        )
        assert abs(optimum.residual / root - 1) < 1e-15
        for layer, decay in enumerate(optimum.weight_decay, start=1):
            assert abs(optimum.layer_outlier(layer) / (decay * (1 - root) / root) - 1) < 1e-15


def test_an_exact_root_is_enclosed_by_itself() -> None:
    assert gain_enclosure(2, 1, 1, 0.25, 0.25) == (0.5, 0.5)


@pytest.mark.parametrize("name", CROSS_ENTROPY)
def test_the_softmax_gain_is_the_largest_root(name: str) -> None:
    optimum = optimum_of("cross_entropy", name)
    k, n, depth = optimum.n_classes, optimum.n_per_class, optimum.depth
    product = k ** (depth + 1) * n * optimum.feature_decay * math.prod(optimum.weight_decay)
    t = optimum.gain + np.linspace(1e-6, 60, 20_000)

    def left(t: Any) -> Any:
        return t ** (depth - 1) * (k / (np.exp(t) + k - 1)) ** (depth + 1)

    assert left(optimum.gain) == pytest.approx(product, rel=1e-12)
    assert (left(t) < product).all()
    assert left(optimum.gain - 1e-6) > product  # the falling branch
    assert optimum.residual == pytest.approx(k / (math.exp(optimum.gain) + k - 1), rel=1e-13)


# --- spectra --------------------------------------------------------------------------------------


def layer_inputs(optimum: CollapsedOptimum, seed: int) -> list[Tensor]:
    stages = [optimum.features(seed)]
    for weight in optimum.weights(seed):
        stages.append(weight @ stages[-1])
    return stages


def per_sample(optimum: CollapsedOptimum, layer: int, seed: int) -> tuple[Tensor, Tensor]:
    """Gradients in one weight of each sample's outputs ``[N, K, P]`` and loss ``[N, P]``."""
    weights, targets = optimum.weights(seed), optimum.targets()
    inputs = layer_inputs(optimum, seed)[layer - 1]

    def outputs(weight: Tensor, sample: Tensor) -> Tensor:
        for w in (weight, *weights[layer:]):
            sample = w @ sample
        return sample

    jacobian, gradient = [], []
    for sample, target in zip(inputs.T, targets.T, strict=True):
        rows = torch.autograd.functional.jacobian(
            lambda w, h=sample: outputs(w, h),  # type: ignore[misc]
            weights[layer - 1],
        ).flatten(1)
        found = outputs(weights[layer - 1], sample)
        if optimum.loss == "cross_entropy":
            found = found.softmax(0)
        jacobian.append(rows)
        gradient.append((found - target) @ rows)
    return torch.stack(jacobian), torch.stack(gradient)


def gauss_newton_parts(optimum: CollapsedOptimum, layer: int, seed: int) -> dict[str, Tensor]:
    """Sum over classes, over pairs and over samples, term by term."""
    jacobian, _ = per_sample(optimum, layer, seed)
    k, n = optimum.n_classes, optimum.n_per_class
    parts = {
        name: torch.zeros(jacobian.shape[2], jacobian.shape[2], dtype=torch.float64)
        for name in ("class", "cross", "within")
    }
    for c in range(k):
        own = jacobian[c * n : (c + 1) * n]  # [n, K, P]
        mean = own.mean((0, 1))
        parts["class"] += torch.outer(mean, mean)  # K of the K² pairs, of weight 1/K each
        for other in range(k):
            pair = own[:, other].mean(0)
            parts["cross"] += torch.outer(pair - mean, pair - mean) / k
            for sample in own[:, other]:
                parts["within"] += torch.outer(sample - pair, sample - pair) / (k * n)
    return parts


def check(optimum: CollapsedOptimum, matrix: str, layer: int | None, found: Tensor) -> None:
    predicted = optimum.predicted_spectrum(matrix, layer)
    scale = max(map(abs, predicted.values)) or optimum.layer_outlier(layer or 1)
    assert predicted.distance(found) < 1e-10 * scale, (matrix, layer, str(predicted))


@pytest.mark.parametrize(("loss", "name"), POINTS)
def test_layer_spectra(loss: str, name: str) -> None:
    optimum, seed = optimum_of(loss, name), 5
    weights, stages = optimum.weights(seed), layer_inputs(optimum, seed)
    for layer in range(1, optimum.depth + 1):
        weight, inputs = weights[layer - 1], stages[layer - 1]

        def of(w: Tensor, layer: int = layer) -> Tensor:
            moved = [*weights[: layer - 1], w, *weights[layer:]]
            return data_term(moved, stages[0], optimum.targets(), loss)

        hessian = torch.func.hessian(of)(weight).reshape(weight.numel(), -1)
        check(optimum, "layer_hessian", layer, torch.linalg.eigvalsh(hessian))
        check(optimum, "weight", layer, torch.linalg.svdvals(weight))
        check(optimum, "weight_gram", layer, torch.linalg.eigvalsh(weight.T @ weight))
        check(optimum, "feature_gram", layer, torch.linalg.eigvalsh(inputs @ inputs.T))
        largest = float(torch.linalg.eigvalsh(hessian)[-1])
        assert optimum.layer_outlier(layer) == pytest.approx(largest, rel=1e-10)


@pytest.mark.parametrize(("loss", "name"), POINTS)
def test_gradient_second_moment(loss: str, name: str) -> None:
    optimum = optimum_of(loss, name)
    for layer in range(1, optimum.depth + 1):
        if loss == "mse" and optimum.width < optimum.n_classes:
            with pytest.raises(ValueError, match="which projection the optimum keeps"):
                optimum.predicted_spectrum("gradient_second_moment", layer)
            continue
        _, gradient = per_sample(optimum, layer, 2)
        moment = gradient.T @ gradient / len(gradient)
        check(optimum, "gradient_second_moment", layer, torch.linalg.eigvalsh(moment))


@pytest.mark.parametrize("name", MSE)
def test_gauss_newton_parts(name: str) -> None:
    optimum = optimum_of("mse", name)
    for layer in range(1, optimum.depth + 1):
        parts = gauss_newton_parts(optimum, layer, 1)
        for part, found in parts.items():
            matrix = f"gauss_newton_{part}"
            projected = optimum.width < optimum.n_classes and layer < optimum.depth
            if projected and part != "within":
                with pytest.raises(ValueError, match="which projection the optimum keeps"):
                    optimum.predicted_spectrum(matrix, layer)
            else:
                check(optimum, matrix, layer, torch.linalg.eigvalsh(found))


def test_what_depends_on_the_projection_does() -> None:
    optimum = optimum_of("mse", "narrow")
    tops = {
        round(float(torch.linalg.eigvalsh(gauss_newton_parts(optimum, 1, seed)["class"])[-1]), 6)
        for seed in range(3)
    }
    assert len(tops) == 3


@pytest.mark.parametrize("name", MSE)
def test_full_hessian(name: str) -> None:
    optimum = optimum_of("mse", name)
    weights, features = optimum.weights(4), optimum.features(4)
    sizes = [w.numel() for w in weights]

    def of(flat: Tensor) -> Tensor:
        parts = zip(flat.split(sizes), weights, strict=True)
        return data_term([p.view_as(w) for p, w in parts], features, optimum.targets(), "mse")

    hessian = torch.func.hessian(of)(torch.cat([w.flatten() for w in weights]))
    check(optimum, "full_hessian", None, torch.linalg.eigvalsh(hessian))


def test_ranks_and_multiplicities_read_like_the_theorems() -> None:
    optimum = collapsed_optimum(3, 2, 4, 0.006, 0.01, width=5)
    o, decay = optimum.outlier, 0.006
    assert optimum.predicted_spectrum("layer_hessian", 2).multiplicities == (9, 16)
    full = optimum.predicted_spectrum("full_hessian")
    assert full.values == pytest.approx((4 * o + 3 * decay, 4 * o - 3 * decay, decay, 0, -decay))
    # K(K−1)/2, K(K+1)/2, (L−1)[K(K+1)/2 + K(d−K)], …, (L−1)[K(K−1)/2 + K(d−K)]
    assert full.multiplicities == (3, 6, 36, 90 - 72, 27)
    assert full.rank == 72
    narrow = collapsed_optimum(4, 3, 3, 0.004, 0.02, width=2)
    assert narrow.predicted_spectrum("layer_hessian", 1).rank == 4  # d²
    assert narrow.predicted_spectrum("layer_hessian", 3).rank == 8  # K d
    softmax = collapsed_cross_entropy(5, 1, 2, 0.001, 0.001)
    assert softmax.predicted_spectrum("layer_hessian", 2).multiplicities == (1, 4, 11, 9)
    assert softmax.outlier == softmax.predicted_spectrum("layer_hessian", 1).values[0]


def test_the_outlier_needs_equal_decays() -> None:
    with pytest.raises(ValueError, match=r"layer_outlier\(layer\)"):
        _ = optimum_of("mse", "unequal decays").outlier
    optimum = optimum_of("mse", "wide")
    assert optimum.outlier == optimum.layer_outlier(3)
    assert optimum_of("mse", "unequal decays").layer_outlier(3) == pytest.approx(
        4 * optimum_of("mse", "unequal decays").layer_outlier(1), rel=1e-15
    )


def test_spectrum_in_order() -> None:
    spectrum = Spectrum((0.0, 0.225, 0.225, -1.0, 3.0), (55, 4, 5, 1, 0))
    assert spectrum == Spectrum((0.225, -0.0, -1), (9, 55, 1))
    assert str(spectrum) == "0.225 (×9), 0 (×55), -1 (×1)"
    assert (spectrum.size, spectrum.rank) == (65, 10)
    expanded = spectrum.expand()
    assert expanded.dtype == np.float64
    assert expanded.tolist() == [0.225] * 9 + [0] * 55 + [-1]
    assert Spectrum((1.0, 1.0 + 1e-15), (1, 1)).multiplicities == (1, 1)  # not exactly equal
    assert Spectrum((1.0, 2.0), (1, 2)).distance([2.5, 0.75, 2.0]) == 0.5
    assert Spectrum((1.0, 2.0), (1, 2)).distance(torch.tensor([1, 2, 2])) == 0
    assert Spectrum((), ()).distance([]) == 0


@pytest.mark.parametrize(
    ("error", "match", "action"),
    [
        (ValueError, r"must be \[3\], not \[2\]", lambda s: s.distance([1.0, 2.0])),
        (ValueError, r"must be \[3\], not \[3, 1\]", lambda s: s.distance(np.ones((3, 1)))),
        (ValueError, "finite", lambda s: s.distance([1.0, 2.0, math.nan])),
        (TypeError, "real", lambda s: s.distance([1j, 2, 3])),
        (ValueError, "1 values but 2", lambda s: Spectrum((1.0,), (1, 2))),
        (ValueError, "finite", lambda s: Spectrum((math.inf,), (1,))),
        (ValueError, "multiplicities must be at least 0", lambda s: Spectrum((1.0,), (-1,))),
        (TypeError, "multiplicities must be an integer", lambda s: Spectrum((1.0,), (1.5,))),
    ],
)
def test_spectrum_errors(error: type[Exception], match: str, action: Callable[..., Any]) -> None:
    with pytest.raises(error, match=match):
        action(Spectrum((1.0, 2.0), (1, 2)))


# --- errors ---------------------------------------------------------------------------------------

GOOD = {"n_classes": 3, "n_per_class": 2, "depth": 2, "weight_decay": 0.01, "feature_decay": 0.01}


@pytest.mark.parametrize("found", [collapsed_optimum, collapsed_cross_entropy, gain_enclosure])
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("n_classes", 1, ValueError),
        ("n_classes", 3.0, TypeError),
        ("n_classes", True, TypeError),
        ("n_per_class", 0, ValueError),
        ("n_per_class", "2", TypeError),
        ("depth", 0, ValueError),
        ("depth", np.float64(2), TypeError),
        ("width", 0, ValueError),
        ("width", 2.5, TypeError),
        ("width", np.bool_(True), TypeError),
        ("weight_decay", 0.0, ValueError),
        ("weight_decay", -0.01, ValueError),
        ("weight_decay", math.nan, ValueError),
        ("weight_decay", math.inf, ValueError),
        ("weight_decay", 10**400, ValueError),
        ("weight_decay", True, TypeError),
        ("weight_decay", "0.01", TypeError),
        ("weight_decay", None, TypeError),
        ("weight_decay", (0.01,), ValueError),
        ("weight_decay", (0.01, 0.0), ValueError),
        ("weight_decay", (0.01, "0.01"), TypeError),
        ("weight_decay", np.array(0.01), ValueError),
        ("weight_decay", np.full((2, 1), 0.01), TypeError),
        ("feature_decay", 0, ValueError),
        ("feature_decay", -math.inf, ValueError),
        ("feature_decay", math.nan, ValueError),
        ("feature_decay", (0.01, 0.01), TypeError),
        ("feature_decay", False, TypeError),
    ],
)
def test_bad_arguments_are_named(
    found: Callable[..., Any], name: str, value: Any, error: type[Exception]
) -> None:
    if name == "width" and found is gain_enclosure:
        return
    with pytest.raises(error, match=f"^{name}"):
        found(**{**GOOD, name: value})


@pytest.mark.parametrize(
    "decays", [[0.01, 0.01], np.full(2, 0.01), torch.full((2,), 0.01, dtype=torch.float64)]
)
def test_decays_may_be_any_sequence_and_sizes_any_integers(decays: Any) -> None:
    expected = collapsed_optimum(**GOOD)
    assert collapsed_optimum(**{**GOOD, "weight_decay": decays}) == expected
    assert collapsed_optimum(**{**GOOD, "n_classes": np.int32(3)}) == expected
    assert expected.width == 3


def test_softmax_needs_room_for_the_simplex() -> None:
    with pytest.raises(ValueError, match=r"width=1 must be at least n_classes - 1 = 2"):
        collapsed_cross_entropy(**GOOD, width=1)
    with pytest.raises(ValueError, match="no centred collapsed point"):
        collapsed_cross_entropy(**{**GOOD, "weight_decay": 9.0})


@pytest.mark.parametrize(
    ("loss", "arguments", "error", "match"),
    [
        (
            "mse",
            ("hessian", 1),
            ValueError,
            "unknown matrix 'hessian'; known are weight, weight_gram",
        ),
        ("mse", ("weight",), ValueError, "pass layer=1 to 2"),
        ("mse", ("weight", 0), ValueError, "layer must be at least 1"),
        ("mse", ("weight", 3), ValueError, "layer must be from 1 to depth=2"),
        ("mse", ("weight", 1.0), TypeError, "layer must be an integer"),
        ("mse", ("weight", True), TypeError, "layer must be an integer"),
        ("mse", ("full_hessian", 1), ValueError, "leave layer out"),
        ("cross_entropy", ("full_hessian",), ValueError, "not derived for cross-entropy"),
        ("cross_entropy", ("gauss_newton_class", 1), ValueError, "not derived for cross-entropy"),
    ],
)
def test_spectra_that_do_not_exist(
    loss: str, arguments: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        FOUND[loss](**GOOD).predicted_spectrum(*arguments)


def test_the_other_errors() -> None:
    with pytest.raises(ValueError, match="unequal norms for width=2"):
        _ = collapsed_optimum(**GOOD, width=2).feature_scale
    with pytest.raises(ValueError, match="layer must be from 1"):
        collapsed_optimum(**GOOD).layer_outlier(3)
    with pytest.raises(TypeError, match="integer"):
        collapsed_optimum(**GOOD).weights(1.5)  # type: ignore[arg-type]
