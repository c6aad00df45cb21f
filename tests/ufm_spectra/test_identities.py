"""Every check of the theory page passes as it stands and fails when its closed form is altered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import sympy as sp
import torch
from torch import Tensor

from proofread.ufm_spectra import identities
from proofread.ufm_spectra.identities import Configuration, Splitting
from proofread.ufm_spectra.model import UnconstrainedFeatureModel
from proofread.ufm_spectra.optimum import CollapsedOptimum, Spectrum

SMALL = Configuration(3, 2, 4, 3, 0.01, 0.01)
UNEQUAL = Configuration(2, 3, 4, 2, (0.01, 0.02), 0.02)
NARROW = Configuration(4, 2, 2, 2, 0.01, 0.01)
LOST = float("nan")


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def falsify(patch: pytest.MonkeyPatch, matrix: str, change: Callable[[Spectrum], Spectrum]) -> None:
    """Change the closed form of one matrix' spectrum."""
    true = CollapsedOptimum.predicted_spectrum

    def predicted(self: CollapsedOptimum, name: str, layer: int | None = None) -> Spectrum:
        spectrum = true(self, name, layer)
        return change(spectrum) if name == matrix else spectrum

    patch.setattr(CollapsedOptimum, "predicted_spectrum", predicted)


def one_too_many(spectrum: Spectrum) -> Spectrum:
    """One of the smallest eigenvalues counted with the largest."""
    first, *rest, last = spectrum.multiplicities
    return Spectrum(spectrum.values, (first + 1, *rest, last - 1))


def stretched(spectrum: Spectrum) -> Spectrum:
    return Spectrum(tuple(v * (1 + 1e-6) for v in spectrum.values), spectrum.multiplicities)


def raise_outlier(patch: pytest.MonkeyPatch) -> None:
    true = CollapsedOptimum.layer_outlier
    patch.setattr(
        CollapsedOptimum, "layer_outlier", lambda self, layer: true(self, layer) * (1 + 1e-6)
    )


def disturb_point(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the features at which the checks are made."""
    true = identities.point

    def moved(optimum: CollapsedOptimum, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
        weights, features, targets = true(optimum, seed)
        return weights, change(features), targets

    patch.setattr(identities, "point", moved)


# --- configurations -------------------------------------------------------------------------------


def test_configurations_of_the_page_are_as_varied_as_the_rules_ask() -> None:
    found = identities.CONFIGURATIONS
    assert len(set(found)) >= 6
    assert any(isinstance(c.weight_decay, tuple) for c in found)
    assert any(c.width < c.n_classes for c in found)
    assert all(c.optimum().is_global for c in found)
    assert {c.depth for c in found} >= {1, 2, 3}
    kept = identities.wide()
    assert set(found) - set(kept) == {c for c in found if c.width < c.n_classes}


def test_a_configuration_tells_all_its_numbers() -> None:
    assert str(UNEQUAL) == "K=2 n=3 d=4 L=2 λ=0.01, 0.02 λ_H=0.02"
    optimum = UNEQUAL.optimum()
    assert (optimum.n_classes, optimum.n_per_class, optimum.width, optimum.depth) == (2, 3, 4, 2)
    assert (optimum.weight_decay, optimum.feature_decay) == ((0.01, 0.02), 0.02)


def test_a_configuration_makes_its_model() -> None:
    model = UNEQUAL.model(seed=3, scale=0.5)
    assert [tuple(layer.weight.shape) for layer in model.layers] == [(4, 4), (2, 4)]
    assert model.features.shape == (6, 4)
    twin = UnconstrainedFeatureModel(
        2, 3, 2, 4, weight_decay=(0.01, 0.02), feature_decay=0.02, seed=3, init_scale=0.5
    )
    assert model.objective().item() == twin.objective().item()
    bare = UNEQUAL.model(seed=3, scale=0.5, decayed=False)
    with torch.no_grad():
        penalty = 0.01 * twin.features.square().sum()
        penalty += 0.005 * twin.layers[0].weight.square().sum()
        penalty += 0.01 * twin.layers[1].weight.square().sum()
    difference = model.objective().item() - bare.objective().item()
    assert difference == pytest.approx(penalty.item(), rel=1e-10)


# --- automatic differentiation, by hand -----------------------------------------------------------


def test_data_loss_by_hand() -> None:
    weights = [doubles(2).view(1, 1), doubles(1, -1).view(2, 1)]
    features, targets = doubles(1, 3).view(1, 2), torch.eye(2, dtype=torch.float64)
    # outputs (2, -2) and (6, -6): residuals (1, -2) and (6, -7)
    assert identities.data_loss(weights, features, targets).item() == (1 + 4 + 36 + 49) / 4


def test_cross_entropy_loss_by_hand() -> None:
    weights = [doubles(math.log(3), 0).view(2, 1)]
    targets = torch.eye(2, dtype=torch.float64)
    found = identities.cross_entropy_loss(weights, doubles(1, 1).view(1, 2), targets)
    assert found.item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


def test_hessians_of_scalar_layers_by_hand() -> None:
    """``(1/4) Σ (b a h − y)²`` over two samples, in a, in b and in both."""
    a, b, h, y = 0.7, -1.3, doubles(0.5, 2.0), doubles(1.0, -0.4)
    point = ([doubles(a).view(1, 1), doubles(b).view(1, 1)], h.view(1, 2), y.view(1, 2))
    square = float(h.square().mean())
    mixed = float((2 * a * b * h.square() - y * h).mean())
    assert identities.layer_hessian(*point, 1).item() == pytest.approx(b**2 * square)
    assert identities.layer_hessian(*point, 2).item() == pytest.approx(a**2 * square)
    both = torch.tensor([[b**2 * square, mixed], [mixed, a**2 * square]], dtype=torch.float64)
    torch.testing.assert_close(identities.full_hessian(*point), both)


def test_layer_hessian_under_cross_entropy_by_hand() -> None:
    logits, h = doubles(0.3, -0.2, 1.0), 1.7
    targets = doubles(0, 1, 0).view(3, 1)
    point = ([(logits / h).view(3, 1)], doubles(h).view(1, 1), targets)
    found = identities.layer_hessian(*point, 1, identities.cross_entropy_loss)
    p = logits.softmax(0)
    torch.testing.assert_close(found, h**2 * (p.diag() - torch.outer(p, p)))


def test_full_hessian_holds_the_layers_on_its_diagonal() -> None:
    weights, features, targets = identities.point(SMALL.optimum(), seed=2)
    whole = identities.full_hessian(weights, features, targets)
    assert whole.shape == (44, 44)  # 4·4 + 4·4 + 3·4
    start = 0
    for layer, weight in enumerate(weights, 1):
        here = slice(start, start := start + weight.numel())
        single = identities.layer_hessian(weights, features, targets, layer)
        torch.testing.assert_close(whole[here, here], single)


def test_stages_and_class_means_by_hand() -> None:
    features = doubles(1, 3, 5, 5, 0, 2, 8, 6).view(2, 4)
    torch.testing.assert_close(identities.class_means(features, 2), doubles(2, 5, 1, 7).view(2, 2))
    weight = doubles(1, -1).view(1, 2)
    first, last = identities.layer_features([weight], features)
    assert first is features
    torch.testing.assert_close(last, doubles(1, 1, -3, -1).view(1, 4))


def test_the_point_is_stationary() -> None:
    """The data term's gradient is minus the penalty's, in weights and in features."""
    for configuration in (SMALL, UNEQUAL, NARROW):
        optimum = configuration.optimum()
        weights, features, targets = identities.point(optimum, seed=1)
        leaves = [*weights, features]
        for leaf in leaves:
            leaf.requires_grad_()
        loss = identities.data_loss(leaves[:-1], leaves[-1], targets)
        decays = (*optimum.weight_decay, optimum.feature_decay)
        for gradient, leaf, decay in zip(
            torch.autograd.grad(loss, leaves), leaves, decays, strict=True
        ):
            torch.testing.assert_close(gradient, -decay * leaf.detach(), rtol=0, atol=1e-12)


def test_spectrum_distance_is_in_units() -> None:
    predicted = Spectrum((2.0, 0.0), (1, 2))
    hessian = doubles(0, 2.5, -0.25).diag()
    assert identities.spectrum_distance(hessian, predicted, 2.0) == pytest.approx(0.25)


# --- the layer Hessian ----------------------------------------------------------------------------


def test_layer_hessian_distance_and_its_control() -> None:
    assert identities.layer_hessian_distance() <= 1e-10
    assert identities.layer_hessian_distance(noise=0.1) >= 1e-2


def test_layer_hessian_distance_sees_a_wrong_value(monkeypatch) -> None:
    raise_outlier(monkeypatch)
    assert identities.layer_hessian_distance([SMALL]) == pytest.approx(1e-6, rel=1e-3)
    assert identities.layer_hessian_distance([NARROW]) == pytest.approx(1e-6, rel=1e-3)


def test_layer_hessian_distance_sees_a_wrong_multiplicity(monkeypatch) -> None:
    falsify(monkeypatch, "layer_hessian", one_too_many)
    assert identities.layer_hessian_distance([SMALL]) == pytest.approx(1)


def test_layer_hessian_distance_looks_at_every_layer(monkeypatch) -> None:
    true = CollapsedOptimum.layer_outlier
    for wrong in (1, 2, 3):
        monkeypatch.setattr(
            CollapsedOptimum,
            "layer_outlier",
            lambda self, layer, wrong=wrong: true(self, layer) * (1.001 if layer == wrong else 1),
        )
        assert identities.layer_hessian_distance([SMALL]) == pytest.approx(1e-3, rel=0.01), wrong


def test_unbalanced_classes_are_a_control() -> None:
    assert identities.unbalanced_distance() >= 1e-2


def test_unbalanced_distance_vanishes_for_balanced_classes() -> None:
    assert identities.unbalanced_distance((5, 5, 5, 5)) < 1e-3


def test_eigenvector_residual(monkeypatch) -> None:
    assert identities.eigenvector_residual() <= 1e-10
    disturb_point(monkeypatch, lambda h: h * (1 + 0.1 * normal(*h.shape)))
    assert identities.eigenvector_residual([SMALL]) > 1e-2


def test_eigenvector_residual_sees_a_wrong_value(monkeypatch) -> None:
    raise_outlier(monkeypatch)
    assert identities.eigenvector_residual([SMALL]) == pytest.approx(1e-6, rel=1e-3)


def test_splitting_by_hand() -> None:
    sizes = np.array([1e-3, 1e-2, 1e-1])
    found = Splitting(sizes, (1,), 3 * sizes[:, None], 5 * sizes[:, None] ** 2)
    ((spread, leak),) = found.exponents()
    assert spread.value == pytest.approx(1, abs=1e-9)
    assert leak.value == pytest.approx(2, abs=1e-9)


def test_splitting_of_a_small_optimum() -> None:
    """First-order perturbation of equal eigenvalues; the rest moves at order 2l, twice for each
    disturbed projection on the way and for the features."""
    found = identities.splitting(SMALL, (1, 2), (1e-3, 3e-3, 1e-2), range(3))
    assert found.spread.shape == found.leak.shape == (3, 2)
    for layer, (spread, leak) in zip(found.layers, found.exponents(), strict=True):
        assert spread.value == pytest.approx(1, abs=0.05)
        assert leak.value == pytest.approx(2 * layer, abs=0.15)
    still = identities.splitting(SMALL, (3,), (0.0,), range(1))
    assert still.spread.item() < 1e-10
    assert still.leak.item() < 1e-10


def test_a_disturbance_is_relative() -> None:
    ones = [torch.ones(400, 100, dtype=torch.float64)]
    (moved,) = identities._perturbed(ones, 0.1, seed=0)
    assert moved.std().item() == pytest.approx(0.1, rel=0.02)
    assert identities._perturbed(ones, 0.0, seed=0)[0].equal(ones[0])


# --- Gauss–Newton parts ---------------------------------------------------------------------------


def test_output_gradients_are_products() -> None:
    """``∇_{W_l} f_k = A_lᵀ e_k ⊗ h_i`` with ``A_l`` what comes after."""
    weights = [normal(4, 5, seed=1), normal(3, 4, seed=2), normal(2, 3, seed=3)]
    features = normal(5, 6, seed=4)
    stages = identities.layer_features(weights, features)
    after = [weights[2] @ weights[1], weights[2], torch.eye(2, dtype=torch.float64)]
    for layer in (1, 2, 3):
        found = identities.output_gradients(weights, features, layer)
        assert found.shape == (6, 2, weights[layer - 1].numel())
        for i, k in itertools.product(range(6), range(2)):
            one = torch.kron(after[layer - 1][k], stages[layer - 1][:, i])
            torch.testing.assert_close(found[i, k], one)


def test_split_parts_by_loops() -> None:
    k, n, size = 3, 4, 5
    v = normal(k * n, k, size)
    found = identities.split_gauss_newton(v, k)
    wanted = {name: torch.zeros(size, size, dtype=torch.float64) for name in found}
    for c in range(k):
        rows = v[c * n : (c + 1) * n]
        of_class = rows.mean((0, 1))
        wanted["class"] += torch.outer(of_class, of_class) / k
        for other in range(k):
            pair = rows[:, other].mean(0)
            wanted["cross"] += torch.outer(pair - of_class, pair - of_class) / k
            # K·K pairs of a class and an output, N = K n samples: Σ over i, c' of 1/N each
    wanted["class"] *= k  # every one of the K outputs of a sample has that mean
    for i, other in itertools.product(range(k * n), range(k)):
        c = i // n
        rest = v[i, other] - v[c * n : (c + 1) * n, other].mean(0)
        wanted["within"] += torch.outer(rest, rest) / (k * n)
    flat = v.reshape(-1, size)
    torch.testing.assert_close(sum(found.values()), flat.T @ flat / (k * n))
    for name, part in found.items():
        torch.testing.assert_close(part, wanted[name], msg=name)


def test_split_parts_sum_to_the_layer_hessian() -> None:
    weights, features, targets = identities.point(SMALL.optimum())
    for layer in (1, 2, 3):
        gradients = identities.output_gradients(weights, features, layer)
        parts = identities.split_gauss_newton(gradients, 3)
        whole = identities.layer_hessian(weights, features, targets, layer)
        torch.testing.assert_close(sum(parts.values()), whole)


def test_split_mistakes_and_their_control() -> None:
    assert identities.split_mistakes() == 0
    assert identities.split_mistakes(within_noise=0.1) >= 1


def change_parts(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], None]) -> None:
    true = identities.split_gauss_newton

    def changed(gradients: Tensor, n_classes: int) -> dict[str, Tensor]:
        parts = true(gradients, n_classes)
        change(parts)
        return parts

    patch.setattr(identities, "split_gauss_newton", changed)


def test_split_mistakes_count_a_wrong_rank(monkeypatch) -> None:
    def drop_one(parts: dict[str, Tensor]) -> None:
        values, vectors = torch.linalg.eigh(parts["cross"])
        parts["cross"] -= values[-1] * torch.outer(vectors[:, -1], vectors[:, -1])

    change_parts(monkeypatch, drop_one)
    assert identities.split_mistakes([SMALL]) == SMALL.depth  # one a layer


def test_split_mistakes_count_images_that_meet(monkeypatch) -> None:
    def leak(parts: dict[str, Tensor]) -> None:
        values, vectors = torch.linalg.eigh(parts["class"])
        parts["within"] += 1e-3 * values[-1] * torch.outer(vectors[:, -1], vectors[:, -1])

    change_parts(monkeypatch, leak)
    assert identities.split_mistakes([SMALL]) == 2 * SMALL.depth  # a rank and a pair


def test_features_move_within_their_class() -> None:
    features = identities.point(SMALL.optimum())[1]
    moved = identities._moved_within(features, 3, 0.1)
    shift = (moved - features).norm(dim=0) / features.norm(dim=0)
    torch.testing.assert_close(shift, torch.full_like(shift, 0.1))
    means = [identities.class_means(h, 3) for h in (features, moved)]
    torch.testing.assert_close(*means)
    assert identities._moved_within(features, 3, 0.0).equal(features)


def test_cosine_of_subspaces_by_hand() -> None:
    first, second = torch.eye(3, 2, dtype=torch.float64), doubles(0, 0.6, 0.8).view(3, 1)
    assert identities._cosine(first, second) == pytest.approx(0.6)
    assert identities._cosine(first, first[:, :0]) == 0.0
    image = identities._image(doubles(0, 1e-12, 2).diag(), 1e-9)
    torch.testing.assert_close(image.abs(), doubles(0, 0, 1).view(3, 1))


# --- gradient and weights -------------------------------------------------------------------------


def test_gradient_distance_and_its_control() -> None:
    assert identities.gradient_distance() <= 1e-10
    # two unit vectors at a right angle, for any shift
    assert identities.gradient_distance(shift=1) == pytest.approx(math.sqrt(2), abs=1e-6)


@pytest.mark.parametrize(("factor", "distance"), [(-1.0, 2.0), (1 + 1e-6, 1e-6)])
def test_gradient_distance_sees_a_wrong_coefficient(monkeypatch, factor, distance) -> None:
    true = identities._gradient
    monkeypatch.setattr(identities, "_gradient", lambda *arguments: factor * true(*arguments))
    found = identities.gradient_distance([SMALL, UNEQUAL])
    assert found == pytest.approx(distance, rel=1e-3)


def test_gradient_distance_sees_a_wrong_loss(monkeypatch) -> None:
    true = identities.data_loss
    monkeypatch.setattr(identities, "data_loss", lambda *arguments: 2 * true(*arguments))
    assert identities.gradient_distance([SMALL]) == pytest.approx(0.5)


def test_gradient_by_the_formula_of_the_residual() -> None:
    """``−(1−γ)/K Σ_c (A_lᵀ e_c) μ_cᵀ``, another way to write the closed form."""
    optimum = UNEQUAL.optimum()
    weights, features, _ = identities.point(optimum)
    stages = identities.layer_features(weights, features)
    after = [weights[1], torch.eye(2, dtype=torch.float64)]
    for layer in (1, 2):
        means = identities.class_means(stages[layer - 1], 2)
        wanted = -optimum.residual / 2 * after[layer - 1].T @ means.T
        torch.testing.assert_close(identities._gradient(optimum, stages, layer, 0), wanted)


def test_weight_distance_and_its_control() -> None:
    assert identities.weight_distance() <= 1e-6
    assert identities.weight_distance(decayed=False) >= 1e-2


def test_weight_distance_sees_a_wrong_singular_value(monkeypatch) -> None:
    true = CollapsedOptimum.singular_values.fget
    monkeypatch.setattr(
        CollapsedOptimum,
        "singular_values",
        property(lambda self: tuple(1.00001 * sigma for sigma in true(self))),
    )
    assert identities.weight_distance() == pytest.approx(2e-5, abs=1e-6)


def found_at(
    weights: list[Tensor], features: Tensor, targets: Tensor
) -> Callable[..., tuple[identities.Minimiser, ...]]:
    found = identities.Minimiser(SMALL, weights, features, targets, LOST)
    return lambda **_: (found,)


def test_weight_distance_sees_wrong_means(monkeypatch) -> None:
    weights, features, targets = identities.point(SMALL.optimum())
    monkeypatch.setattr(identities, "minimisers", found_at(weights, features, targets))
    assert identities.weight_distance() <= 1e-6
    rotation = torch.linalg.qr(normal(4, 4)).Q
    monkeypatch.setattr(identities, "minimisers", found_at(weights, rotation @ features, targets))
    assert identities.weight_distance() > 0.1


def test_minimisers_are_what_they_say() -> None:
    for found in identities.minimisers():
        c = found.configuration
        assert found.features.shape == (c.width, c.n_classes * c.n_per_class)
        decays = np.broadcast_to(c.weight_decay, c.depth)
        objective = identities.data_loss(found.weights, found.features, found.targets)
        objective += c.feature_decay / 2 * found.features.square().sum()
        for decay, weight in zip(decays, found.weights, strict=True):
            objective += decay / 2 * weight.square().sum()
        assert objective.item() == pytest.approx(found.objective, rel=1e-12)
        assert found.objective == pytest.approx(c.optimum().objective, rel=1e-9)


def test_weight_distance_sees_unequal_singular_values(monkeypatch) -> None:
    """The Gram matrices are proportional and of the right trace, the spectrum is not K equal."""
    single = Configuration(3, 2, 3, 1, 0.02, 0.03)
    optimum = single.optimum()
    scales = doubles(1.44, 1, 0.56).sqrt().diag()
    means = scales.repeat_interleave(2, 1)
    weights = [optimum.singular_values[0] * scales]
    found = identities.Minimiser(single, weights, means, optimum.targets(), LOST)
    monkeypatch.setattr(identities, "minimisers", lambda **_: (found,))
    assert identities.weight_distance() > 1e-3


# --- nothing passes for want of a number ----------------------------------------------------------


@pytest.mark.parametrize(
    "check",
    [
        identities.eigenvector_residual,
        identities.gradient_distance,
        identities.layer_hessian_distance,
        identities.full_hessian_distance,
        identities.split_mistakes,
    ],
)
@pytest.mark.parametrize("factor", [0.0, LOST], ids=["zero", "nan"])
def test_lost_features_pass_no_check(monkeypatch, check, factor) -> None:
    disturb_point(monkeypatch, lambda h: h * factor)
    try:
        found = check([SMALL])
    except (ArithmeticError, RuntimeError, ValueError):
        return  # refused aloud
    assert not found <= 1e-10


def test_lost_weights_pass_no_check(monkeypatch) -> None:
    weights, features, targets = identities.point(SMALL.optimum())
    lost = [w * LOST for w in weights]
    monkeypatch.setattr(identities, "minimisers", found_at(lost, features, targets))
    try:
        found = identities.weight_distance()
    except (ArithmeticError, RuntimeError, ValueError):
        return
    assert not found <= 1e-6


# --- the full Hessian -----------------------------------------------------------------------------


def test_full_hessian_distance_and_its_control() -> None:
    assert identities.full_hessian_distance() <= 1e-10
    assert identities.full_hessian_distance(coupled=False) >= 0.5


@pytest.mark.parametrize(("change", "least"), [(stretched, 1e-6), (one_too_many, 1e-3)])
@pytest.mark.parametrize("configuration", [SMALL, UNEQUAL, NARROW], ids=str)
def test_full_hessian_distance_sees_a_change(monkeypatch, configuration, change, least) -> None:
    falsify(monkeypatch, "full_hessian", change)
    assert identities.full_hessian_distance([configuration]) >= least


def test_layers_side_by_side() -> None:
    found = identities._side_by_side(UNEQUAL.optimum())
    first, second = (UNEQUAL.optimum().layer_outlier(layer) for layer in (1, 2))
    assert second > first
    wanted = [second] * 4 + [first] * 4 + [0.0] * (16 + 8 - 8)
    np.testing.assert_allclose(found, wanted)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 3, 2), (2, 2, 3), (3, 3, 2), (2, 3, 1)])
def test_symbolic_form_is_right(sizes) -> None:
    assert identities.symbolic_quadratic_form(*sizes) == "0"


def test_symbolic_form_sees_an_altered_claim(monkeypatch) -> None:
    true = identities._claimed_form

    def without_free_directions(sp, x, sigma, h, k, depth):
        kept = [m.copy() for m in x]
        for m in kept[:-1]:
            m[k:, :] = sp.zeros(m.rows - k, m.cols)
        return true(sp, kept, sigma, h, k, depth)

    monkeypatch.setattr(identities, "_claimed_form", without_free_directions)
    assert identities.symbolic_quadratic_form(2, 2, 2) == "0"  # there are none
    assert identities.symbolic_quadratic_form(2, 3, 2) != "0"
    monkeypatch.setattr(identities, "_claimed_form", lambda *a: 2 * true(*a))
    assert identities.symbolic_quadratic_form(2, 2, 2) != "0"


@pytest.mark.parametrize("configuration", [SMALL, replace(SMALL, width=3, depth=4)], ids=str)
def test_claimed_form_is_the_hessian_in_numbers(configuration) -> None:
    optimum = configuration.optimum()
    point = (optimum.weights(), optimum.features(), optimum.targets())
    hessian = identities.full_hessian(*point)
    directions = [normal(*w.shape, seed=seed) for seed, w in enumerate(point[0])]
    flat = torch.cat([x.flatten() for x in directions])
    numbers = [sp.Matrix(x.tolist()) for x in directions]
    sigma, h = optimum.singular_values[0], optimum.feature_scale
    claimed = identities._claimed_form(sp, numbers, sigma, h, 3, optimum.depth)
    assert float(claimed) == pytest.approx(float(flat @ hessian @ flat), rel=1e-10)


# --- ReLU -----------------------------------------------------------------------------------------


def test_relu_rank_share_is_one_over_k() -> None:
    """With all kinks closed a hidden layer has rank K; the largest K of the page decides."""
    largest = max(c.n_classes for c in identities.RELU_CONFIGURATIONS)
    assert identities.relu_rank_share("closed") == pytest.approx(1 / largest)
    assert identities.relu_rank_share("closed", last=True) == 1
    assert identities.relu_rank_share("open") == 1


def test_relu_rank_share_sees_one_missing(monkeypatch) -> None:
    true = identities.one_sided_hessian

    def one_less(optimum: CollapsedOptimum, layer: int, units: str) -> Tensor:
        values, vectors = torch.linalg.eigh(true(optimum, layer, units))
        values[-1] = 0
        return vectors * values @ vectors.T

    monkeypatch.setattr(identities, "one_sided_hessian", one_less)
    assert identities.relu_rank_share("open") == pytest.approx(8 / 9)
    assert identities.relu_rank_share("open", last=True) == pytest.approx(8 / 9)


def test_relu_kink_distance_sees_a_unit_off_the_kink(monkeypatch) -> None:
    assert identities.relu_kink_distance() == 0
    true = identities.relu_collapse

    def leaking(optimum: CollapsedOptimum) -> tuple[list[Tensor], Tensor]:
        weights, features = true(optimum)
        weights[-2][0, 1] = 0.01 * weights[-2][1, 1]  # unit 0 also reads class 1
        return weights, features

    monkeypatch.setattr(identities, "relu_collapse", leaking)
    assert identities.relu_kink_distance() == pytest.approx(0.01)


def test_off_class_by_hand() -> None:
    z = doubles(5, -1, 2, 0, 3, -4).view(2, 3)
    assert identities._off_class(z).tolist() == [[0, -1, 2], [0, 0, -4]]


# --- cross-entropy --------------------------------------------------------------------------------


def test_cross_entropy_distance() -> None:
    assert identities.cross_entropy_distance() <= 1e-10


@pytest.mark.parametrize(("change", "distance"), [(stretched, 1e-6), (one_too_many, 1e-2)])
def test_cross_entropy_distance_sees_a_change(monkeypatch, change, distance) -> None:
    falsify(monkeypatch, "layer_hessian", change)
    configuration = identities.CROSS_ENTROPY_CONFIGURATIONS[0]
    assert identities.cross_entropy_distance([configuration]) >= 0.99 * distance


def test_collapsed_softmax_has_the_sizes() -> None:
    configuration = identities.CROSS_ENTROPY_CONFIGURATIONS[1]
    optimum = identities.collapsed_softmax(configuration)
    assert optimum.loss == "cross_entropy"
    assert (optimum.n_classes, optimum.n_per_class, optimum.depth) == (4, 3, 3)
    outputs = identities.layer_features(optimum.weights(0), optimum.features(0))[-1]
    logits = optimum.gain * (torch.eye(4, dtype=torch.float64) - 0.25)
    torch.testing.assert_close(identities.class_means(outputs, 4), logits)


def test_best_objective_is_below_zero_and_not_above_collapse() -> None:
    """Three classes and two layers: what is found is the collapsed point itself."""
    configuration = identities.CROSS_ENTROPY_CONFIGURATIONS[0]
    best = identities.best_objective(configuration)
    closed = identities.collapsed_softmax(configuration).objective
    assert best == pytest.approx(closed, rel=1e-6)
    assert best < math.log(3)
    assert identities.best_objective(configuration, [0]) >= best
