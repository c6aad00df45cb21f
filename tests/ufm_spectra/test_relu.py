"""The ReLU model's collapsed point: stationary, on the kink, and without a Hessian."""

from __future__ import annotations

import itertools

import pytest
import torch

from proofread.ufm_spectra.model import UnconstrainedFeatureModel
from proofread.ufm_spectra.optimum import collapsed_cross_entropy, collapsed_optimum
from proofread.ufm_spectra.relu import (
    kink_statistics,
    one_sided_hessian,
    one_sided_rank,
    relu_collapse,
)

OPTIMA = [
    collapsed_optimum(3, 2, 3, 0.01, 0.01, 3),
    collapsed_optimum(3, 2, 4, 0.006, 0.01, 7),
    collapsed_optimum(4, 1, 3, (0.004, 0.006, 0.008), 0.01, 9),
]
CASES = [(o, c) for o in OPTIMA for c in (1, 2) if o.n_classes * c <= o.width]


def data_loss(weights, features, targets, relu=True) -> torch.Tensor:
    act = torch.relu if relu else (lambda x: x)
    h = act(features)
    for weight in weights[:-1]:
        h = act(weight @ h)
    return (weights[-1] @ h - targets).square().sum() / (2 * targets.shape[1])


def objective(optimum, weights, features) -> torch.Tensor:
    penalty = optimum.feature_decay * features.square().sum()
    for decay, weight in zip(optimum.weight_decay, weights, strict=True):
        penalty = penalty + decay * weight.square().sum()
    return data_loss(weights, features, optimum.targets()) + penalty / 2


def layer_loss(optimum, weights, features, layer, relu=True):
    def loss(weight):
        changed = [*weights[: layer - 1], weight, *weights[layer:]]
        return data_loss(changed, features, optimum.targets(), relu)

    return loss


def normal(like: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=draw, dtype=like.dtype)


@pytest.mark.parametrize(("optimum", "copies"), CASES)
def test_objective_is_that_of_the_linear_optimum(optimum, copies):
    weights, features = relu_collapse(optimum, copies)
    value = objective(optimum, weights, features)
    assert value.item() == pytest.approx(optimum.objective, rel=1e-13)
    assert min(x.min() for x in (features, *weights)) >= 0


@pytest.mark.parametrize(("optimum", "copies"), CASES)
def test_off_class_preactivations_are_exactly_zero(optimum, copies):
    weights, features = relu_collapse(optimum, copies)
    k, n, h = optimum.n_classes, optimum.n_per_class, features
    for weight in weights[:-1]:
        h = weight @ h
        for c, unit in itertools.product(range(k), range(optimum.width)):
            own = unit // copies == c
            assert ((h[unit, c * n : (c + 1) * n] > 0) if own else h[unit, c * n] == 0).all()


@pytest.mark.parametrize(("optimum", "copies"), CASES)
def test_every_one_sided_derivative_is_zero(optimum, copies):
    """Differences along random directions, both ways: first order 0, second order positive."""
    weights, features = relu_collapse(optimum, copies)
    draw, size = torch.Generator().manual_seed(0), 1e-4
    base = objective(optimum, weights, features)
    for _ in range(50):
        step = [size * normal(x, draw) for x in (features, *weights)]
        norm = sum(s.square().sum() for s in step).sqrt()
        for sign in (1, -1):
            moved = [x + sign * s for x, s in zip((features, *weights), step, strict=True)]
            rise = (objective(optimum, moved[1:], moved[0]) - base) / norm
            assert 0 <= rise < 10 * norm  # a slope would leave rise of order 1


@pytest.mark.parametrize(("optimum", "copies"), CASES)
def test_closed_is_automatic_differentiation_and_open_the_linear_model(optimum, copies):
    weights, features = relu_collapse(optimum, copies)
    for layer in range(1, optimum.depth + 1):
        p = weights[layer - 1].numel()
        for units, relu in (("closed", True), ("open", False)):
            loss = layer_loss(optimum, weights, features, layer, relu)
            expected = torch.func.hessian(loss)(weights[layer - 1]).reshape(p, p)
            found = one_sided_hessian(optimum, layer, units, copies=copies)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("optimum", "copies"), CASES)
def test_ranks_and_values(optimum, copies):
    k = optimum.n_classes
    for layer in range(1, optimum.depth + 1):
        hidden = layer < optimum.depth
        for units, rank in (("closed", k if hidden else k * k), ("open", k * k)):
            assert one_sided_rank(optimum, layer, units, copies=copies) == rank
            hessian = one_sided_hessian(optimum, layer, units, copies=copies)
            expected = torch.zeros(len(hessian), dtype=torch.double)
            expected[-rank:] = optimum.layer_outlier(layer)
            torch.testing.assert_close(torch.linalg.eigvalsh(hessian), expected)


def test_every_rank_between_occurs():
    """One unit a class: each open pair of classes adds one outlier."""
    optimum = OPTIMA[0]
    off = [(u, c) for u in range(3) for c in range(3) if u != c]
    for count in range(len(off) + 1):
        mask = torch.zeros(2, 3, 3, dtype=torch.bool)
        for unit, c in off[:count]:
            mask[:, unit, c] = True
        assert one_sided_rank(optimum, 1, mask) == 3 + count


def test_several_units_a_class_give_fractions_of_the_outlier():
    """o q_2 q_3² for layer 1 of three: shares of the class mean on open units, 2/3 and 1/2."""
    optimum = collapsed_optimum(2, 1, 3, 0.01, 0.01, 6)
    mask = torch.zeros(2, 6, 2, dtype=torch.bool)
    mask[0, [3, 4], 0] = True  # units 3 to 5 are those of class 1 in the first hidden layer
    mask[1, 2, 0] = True  # units 2 and 3 in the second
    values = torch.linalg.eigvalsh(one_sided_hessian(optimum, 1, mask, copies=(1, 3, 2)))
    o = optimum.outlier
    torch.testing.assert_close(values[-3:], torch.tensor([2 / 3 / 4 * o, o, o]).double())
    assert values[-4].abs() < 1e-15


def test_the_side_decides_the_second_derivative():
    """Second differences of the ReLU model's own loss: each direction sees the Hessian of the
    orthant in which it lies, which no one quadratic form does."""
    optimum, layer = OPTIMA[0], 1
    weights, features = relu_collapse(optimum)
    means = features[:, ::2]
    loss = layer_loss(optimum, weights, features, layer)
    gradient = torch.func.grad(loss)(weights[0])
    draw, size, errors = torch.Generator().manual_seed(1), 1e-5, []
    for _ in range(20):
        x = normal(weights[0], draw)
        rise = loss(weights[0] + size * x) - loss(weights[0]) - size * (gradient * x).sum()
        opened = (x @ means > 0).expand(2, 3, 3)  # what opens in one layer opens in the next
        for mask in (opened, "closed", "open"):
            hessian = one_sided_hessian(optimum, layer, mask)
            form = x.flatten() @ hessian @ x.flatten()
            errors.append(abs(2 * rise / size**2 / form - 1))
    own, closed, opened = torch.stack(errors).view(20, 3).unbind(1)
    assert own.max() < 1e-3
    assert min(closed.max(), opened.max()) > 0.1


def test_off_the_kink_the_hessian_is_that_of_its_side():
    """Moved a little off the kink, the model has a Hessian, near the one-sided one of its side."""
    optimum = OPTIMA[0]
    weights, features = relu_collapse(optimum)
    draw = torch.Generator().manual_seed(2)
    weights = [w + 1e-7 * normal(w, draw) for w in weights]
    features = features + 1e-7 * normal(features[:, ::2], draw).abs().repeat_interleave(2, 1)
    h, masks = features, []
    for weight in weights[:-1]:
        z = weight @ h
        masks.append(z[:, ::2] > 0)
        h = z.relu()
    loss = layer_loss(optimum, weights, features, 1)
    found = torch.func.hessian(loss)(weights[0]).reshape(9, 9)
    expected = one_sided_hessian(optimum, 1, torch.stack(masks))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * optimum.outlier)
    assert 3 < one_sided_rank(optimum, 1, torch.stack(masks)) < 9


def test_lower_rank_beats_collapse_when_deep():
    """A counterexample to global optimality: K = 3, L = 5, found by gradient descent."""
    from proofread.ufm_spectra.dynamics import train_models

    sizes = {"n_classes": 3, "n_per_class": 2, "depth": 5, "width": 12}
    decays = {"weight_decay": 0.005, "feature_decay": 0.025}  # that of n = 10 samples a class
    found = train_models(range(8), activation="relu", lr=0.4, steps=4000, **sizes, **decays)
    optimum = collapsed_optimum(3, 2, 5, 0.005, 0.025, 12)
    assert optimum.is_global
    assert found.objective[-1].min() < 0.99 * optimum.objective


def test_kink_statistics_at_the_collapsed_point():
    found = kink_statistics(*relu_collapse(OPTIMA[1], 2))
    assert found.live == [6, 6, 6]
    assert found.below == [1.0] * 3
    assert found.closed == found.above == found.open == [0.0] * 3


def test_kink_statistics_by_hand():
    """Two classes of two samples, two units: off-class pre-activations −3, 0.05 | 2, −0.01 over a
    class mean of 10, and a third unit that never opens."""
    features = torch.eye(4, dtype=torch.double)
    first = torch.tensor([[10, 10, -3, 0.05], [2, -0.01, 12, 8], [-1, -1, -1, -1]]).double()
    found = kink_statistics([first, torch.zeros(2, 3).double()], features, tolerance=0.01)
    assert found.live == [2]
    shares = (found.closed, found.below, found.above, found.open)
    assert shares == ([0.25], [0.25], [0.25], [0.25])


def test_a_unit_belongs_to_the_class_of_its_mean_output():
    """Outputs 0, 10 | 1, 1: the first class's, though its pre-activations have the smaller mean."""
    first = torch.tensor([[-100, 10, 1, 1]]).double()
    found = kink_statistics([first, torch.zeros(2, 1).double()], torch.eye(4).double(), 0.01)
    assert found.open == [1.0]


def test_kink_statistics_without_live_units():
    zeros = [torch.zeros(3, 3).double(), torch.zeros(3, 3).double()]
    found = kink_statistics(zeros, torch.ones(3, 6).double())
    assert found.live == [0]
    assert found.below == found.open == [0.0]


def test_bad_arguments_are_named():
    optimum = OPTIMA[0]
    softmax = collapsed_cross_entropy(3, 2, 3, 0.002, 0.002, 5)
    with pytest.raises(ValueError, match="squared error"):
        relu_collapse(softmax)
    with pytest.raises(ValueError, match="width=3 is too small"):
        relu_collapse(optimum, 2)
    with pytest.raises(ValueError, match="copies must be"):
        relu_collapse(optimum, (1, 1))
    with pytest.raises(ValueError, match="copies must be"):
        relu_collapse(optimum, 0)
    with pytest.raises(ValueError, match="layer=4 must lie between 1 and 3"):
        one_sided_hessian(optimum, 4)
    with pytest.raises(ValueError, match="open_units='ajar'"):
        one_sided_hessian(optimum, 1, "ajar")
    with pytest.raises(ValueError, match=r"bool \[2, 3, 3\]"):
        one_sided_hessian(optimum, 1, torch.zeros(2, 3, 3))
    weights, features = relu_collapse(optimum)
    with pytest.raises(ValueError, match="at least two layers"):
        kink_statistics(weights[:1], features)
    with pytest.raises(ValueError, match="multiple of K=3"):
        kink_statistics(weights, features[:, :5])
    with pytest.raises(ValueError, match="NaN"):
        kink_statistics(weights, features * float("nan"))


def test_one_layer_has_no_kink():
    optimum = collapsed_optimum(3, 2, 1, 0.02, 0.02, 4)
    assert one_sided_rank(optimum, 1, "closed") == 9
    assert one_sided_rank(optimum, 1, torch.zeros(0, 4, 3, dtype=torch.bool)) == 9


def test_the_model_itself_stays_at_the_point():
    optimum = OPTIMA[1]
    model = UnconstrainedFeatureModel(
        3, 2, 4, 7, activation="relu", weight_decay=0.006, feature_decay=0.01
    )
    model.load_optimum(optimum)
    model.objective().backward()
    assert all(p.grad.abs().max() < 1e-14 for p in model.parameters())
