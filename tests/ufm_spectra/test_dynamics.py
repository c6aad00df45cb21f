"""Batched descent against autograd and torch.optim; recorded spectra against torch.func."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from proofread.ufm_spectra.dynamics import Trajectories, train_models
from proofread.ufm_spectra.model import UnconstrainedFeatureModel
from proofread.ufm_spectra.optimum import collapsed_cross_entropy, collapsed_optimum

KINDS = [(a, loss) for a in ("linear", "relu") for loss in ("mse", "cross_entropy")]
SIZES = {"n_classes": 3, "n_per_class": 2, "depth": 3, "width": 4}
DECAYS = {"weight_decay": (0.01, 0.02, 0.03), "feature_decay": 0.04}
#: Rows of the Jacobian fewer than the weight's entries, and more.
SHAPES = [SIZES, {**SIZES, "n_per_class": 7, "width": 3}]


def plain_loop(seed: int, steps: int, lr: float, sizes, **options) -> UnconstrainedFeatureModel:
    """One model, autograd, ``torch.optim.SGD``; penalties are in the objective."""
    model = UnconstrainedFeatureModel(*sizes.values(), seed=seed, **options)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        model.objective().backward()
        optimiser.step()
    return model


def numbers(found: Trajectories) -> dict[str, np.ndarray]:
    arrays = ("eigenvalues", "alignment", "collapse", "gradient_share", "objective")
    return {name: getattr(found, name) for name in (*arrays, "gradient_norm", "features")}


@pytest.mark.parametrize(("activation", "loss"), KINDS)
def test_descent_is_that_of_autograd(activation, loss):
    options = {"activation": activation, "loss": loss, **DECAYS}
    found = train_models([3, 8], lr=0.3, steps=30, **SIZES, **options)
    for row, seed in enumerate((3, 8)):
        model = plain_loop(seed, 30, 0.3, SIZES, **options)
        wanted = model.features.detach().numpy().T
        np.testing.assert_allclose(found.features[row], wanted, rtol=1e-11, atol=1e-14)
        for weights, layer in zip(found.weights, model.layers, strict=True):
            wanted = layer.weight.detach().numpy()
            np.testing.assert_allclose(weights[row], wanted, rtol=1e-11, atol=1e-14)
        objective = model.objective()
        assert found.objective[-1, row] == pytest.approx(objective.item(), rel=1e-12)
        gradients = torch.autograd.grad(objective, list(model.parameters()))
        norm = sum(g.square().sum() for g in gradients).sqrt().item()
        assert found.gradient_norm[-1, row] == pytest.approx(norm, rel=1e-10)


class Naive:
    """Everything about one layer of one model from its definition, with P × P matrices."""

    def __init__(self, model: UnconstrainedFeatureModel, layer: int) -> None:
        self.model, self.k = model.requires_grad_(False), model.n_classes
        self.name = f"layers.{layer}.weight"
        self.weight = model.layers[layer].weight.detach()
        stages = [h.detach() for h in (*model.layer_inputs(), model())]
        self.below, self.above = stages[layer], stages[layer + 1]

    def loss(self, weight: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(self.model, {self.name: weight}, ())
        targets = self.model.targets()
        if self.model.loss == "cross_entropy":
            return F.cross_entropy(outputs, targets)
        return (outputs - F.one_hot(targets, self.k)).square().sum() / (2 * len(outputs))

    def eigen(self) -> tuple[np.ndarray, np.ndarray]:
        hessian = torch.func.hessian(self.loss)(self.weight).reshape(self.weight.numel(), -1)
        values, vectors = torch.linalg.eigh(hessian)
        return values.numpy()[::-1], vectors.numpy()[:, ::-1]

    def products(self, same: bool) -> list[np.ndarray]:
        below, above = (
            h.unflatten(0, (self.k, -1)).mean(1).numpy() for h in (self.below, self.above)
        )
        pairs = [(c, e) for c in range(self.k) for e in range(self.k) if c == e or not same]
        vectors = [np.kron(above[c], below[e]) for c, e in pairs]
        return [v / max(np.linalg.norm(v), 1e-300) for v in vectors]

    def alignment(self) -> float:
        values, vectors = self.eigen()
        top = vectors[:, : self.k**2][:, values[: self.k**2] > 1e-12 * values[0]]
        return float(np.mean([np.sum((top.T @ v) ** 2) for v in self.products(same=False)]))

    def collapse(self) -> float:
        x = self.below.unflatten(0, (self.k, -1)).numpy()
        means = x.mean(1)
        within = sum(((x[c] - means[c]) ** 2).sum(1).mean() for c in range(self.k)) / self.k
        return float(within / (((means - means.mean(0)) ** 2).sum(1).mean()))

    def gradient_share(self) -> float:
        g = torch.func.grad(self.loss)(self.weight).flatten().numpy()
        basis = np.array(self.products(same=True)).T
        explained = basis @ np.linalg.lstsq(basis, g, rcond=1e-9)[0]
        return float(np.sum(explained**2) / np.sum(g**2))


@pytest.mark.parametrize(("activation", "loss"), KINDS)
@pytest.mark.parametrize("sizes", SHAPES, ids=["few-rows", "many-rows"])
def test_records_are_their_definitions(sizes, activation, loss):
    options = {"activation": activation, "loss": loss, **DECAYS}
    found = train_models([1, 5], lr=0.3, steps=20, **sizes, **options)
    for row, seed in enumerate((1, 5)):
        model = plain_loop(seed, 20, 0.3, sizes, **options)
        for layer in range(3):
            naive, at = Naive(model, layer), (-1, row, layer)
            values, _ = naive.eigen()
            count = min(18, len(values))
            tolerance = {"rtol": 1e-9, "atol": 1e-12 * values[0]}
            np.testing.assert_allclose(found.eigenvalues[at][:count], values[:count], **tolerance)
            assert (found.eigenvalues[at][count:] == 0).all()
            assert found.alignment[at] == pytest.approx(naive.alignment(), rel=1e-7)
            assert found.collapse[at] == pytest.approx(naive.collapse(), rel=1e-9)
            assert found.gradient_share[at] == pytest.approx(naive.gradient_share(), rel=1e-8)


@pytest.mark.parametrize("activation", ["linear", "relu"])
def test_a_seed_alone_gives_the_same_numbers(activation):
    options = {"activation": activation, "lr": 0.4, "steps": 300, "checkpoints": (0, 50)}
    together = train_models([0, 1, 2], **SIZES, **options)
    for row, seed in enumerate(together.features):
        alone = numbers(train_models([row], **SIZES, **options))
        for name, values in numbers(together).items():
            mine = values[row : row + 1] if name == "features" else values[:, row : row + 1]
            np.testing.assert_allclose(mine, alone[name], rtol=1e-12, atol=1e-14, err_msg=name)
        assert np.isfinite(seed).all()


def test_checkpoints_do_not_change_the_descent():
    one = train_models([0], lr=0.4, steps=60, **SIZES)
    two = train_models([0], lr=0.4, steps=60, checkpoints=(7, 0, 30, 7), **SIZES)
    assert one.steps.tolist() == [0, 60]
    assert two.steps.tolist() == [0, 7, 30, 60]
    np.testing.assert_array_equal(one.features, two.features)
    np.testing.assert_array_equal(one.eigenvalues[[0, -1]], two.eigenvalues[[0, -1]])


def test_linear_model_descends_to_the_closed_form():
    """The claim modelling-context in small: K² equal outliers, all alignments 1, nothing else."""
    optimum = collapsed_optimum(3, 4, 3, 0.01, 0.01, 8)
    found = train_models(
        range(3),
        n_classes=3,
        n_per_class=4,
        depth=3,
        width=8,
        weight_decay=0.01,
        feature_decay=0.01,
        lr=0.5,
        steps=6000,
        checkpoints=(0, 60),
    )
    np.testing.assert_allclose(found.objective[-1], optimum.objective, rtol=1e-12)
    np.testing.assert_allclose(found.eigenvalues[-1, ..., :9], optimum.outlier, rtol=1e-7)
    np.testing.assert_allclose(found.alignment[-1], 1.0, rtol=1e-9)
    np.testing.assert_allclose(found.gradient_share[-1], 1.0, rtol=1e-9)
    assert found.collapse[-1].max() < 1e-12
    assert found.outlier_ratio[-1].max() < 1 + 1e-6
    assert found.gap[-1].min() > 1e9
    assert found.outlier_ratio[1].max() > 1.1  # and not yet after a hundredth of the steps


def test_cross_entropy_model_descends_to_the_closed_form():
    optimum = collapsed_cross_entropy(3, 2, 2, 0.004, 0.004, 4)
    found = train_models(
        [0, 1],
        n_classes=3,
        n_per_class=2,
        depth=2,
        width=4,
        loss="cross_entropy",
        weight_decay=0.004,
        feature_decay=0.004,
        init_scale=2.0,
        lr=0.5,
        steps=8000,
    )
    np.testing.assert_allclose(found.objective[-1], optimum.objective, rtol=1e-9)
    wanted = optimum.predicted_spectrum("layer_hessian", 1).expand()[:16]
    found_values = found.eigenvalues[-1, :, 0, :16]
    np.testing.assert_allclose(found_values, np.tile(wanted, (2, 1)), atol=1e-5 * wanted[0])


def test_without_decay_the_product_interpolates_and_spectra_stay_unequal():
    sizes = {"n_classes": 3, "n_per_class": 4, "depth": 3, "width": 8}
    found = train_models(range(2), decayed=False, lr=0.3, steps=3000, **sizes)
    assert found.objective[-1].max() < 1e-8
    assert found.outlier_ratio[-1].max() > 1.1


def synthetic(*spectra: list[float]) -> Trajectories:
    """K = 2: one checkpoint and layer, one seed for each list of eight eigenvalues."""
    blank = np.zeros((1, len(spectra), 1))
    values = np.array(spectra)[None, :, None]
    rest = (blank, blank, blank, blank[..., 0], blank[..., 0])
    return Trajectories(np.array([0]), 2, values, *rest, (), blank)


def test_ratio_and_gap_at_known_spectra():
    found = synthetic(
        [8, 6, 5, 4, 1, 0, 0, 0],
        [8, 6, 5, 4, 1e-15, 0, 0, 0],  # rank K², up to rounding
        [8, 6, 5, 1e-14, 1e-15, 0, 0, 0],  # below K²
        [0, 0, 0, 0, 0, 0, 0, 0],
    )
    assert found.outlier_ratio[0, :, 0].tolist() == [2, 2, np.inf, 0]
    assert found.gap[0, :, 0].tolist() == [4, np.inf, 0, 0]


def test_result_is_frozen():
    found = synthetic([1.0] * 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.n_classes = 3  # type: ignore[misc]


def test_dead_models_are_measured_without_a_nan():
    """Decay so strong that everything goes to zero: no mean, no gradient, no eigenvalue."""
    found = train_models([0], weight_decay=1.0, feature_decay=1.0, lr=1.0, steps=3, **SIZES)
    for name, values in numbers(found).items():
        assert np.isfinite(values).all(), name


@pytest.mark.parametrize("activation", ["linear", "relu"])
def test_divergence_names_the_step_size(activation):
    with pytest.raises(FloatingPointError, match="take lr below 500"):
        train_models([0], lr=500.0, steps=3000, activation=activation, **SIZES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds must hold"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"steps": -1}, "steps=-1"),
        ({"checkpoints": (0, 11)}, "between 0 and steps=10"),
        ({"checkpoints": (-1,)}, "between 0 and steps=10"),
        ({"n_classes": 1}, "n_classes=1"),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"loss": "hinge"}, "loss='hinge'"),
        ({"weight_decay": (0.1,)}, "depth=3, got 1"),
        ({"feature_decay": -1.0}, "feature_decay=-1.0"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        train_models(**{"seeds": [0], "steps": 10, **SIZES, **changes})


def test_progress_goes_to_standard_error_only_when_asked(capsys):
    train_models([0], steps=5, **SIZES)
    assert capsys.readouterr() == ("", "")
    train_models([0], steps=5, progress=True, **SIZES)
    out, err = capsys.readouterr()
    assert out == ""
    assert "5/5" in err
