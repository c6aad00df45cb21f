"""The model against formulas written out, closed-form optima and autograd."""

from __future__ import annotations

import pytest
import torch

from proofread.ufm_spectra.model import UnconstrainedFeatureModel, initial_point, minimise
from proofread.ufm_spectra.optimum import collapsed_cross_entropy, collapsed_optimum

KINDS = [(a, loss) for a in ("linear", "relu") for loss in ("mse", "cross_entropy")]


def build(**changes) -> UnconstrainedFeatureModel:
    arguments = {"n_classes": 3, "n_per_class": 2, "depth": 3, "width": 5, **changes}
    sizes = [arguments.pop(name) for name in ("n_classes", "n_per_class", "depth", "width")]
    return UnconstrainedFeatureModel(*sizes, **arguments)


def naive_objective(model: UnconstrainedFeatureModel) -> torch.Tensor:
    """The objective of the paper's convention, columns as samples, class by class."""
    relu = model.activation == "relu"
    h = model.features.detach().T
    h = h.clamp(min=0) if relu else h
    weights = [layer.weight.detach() for layer in model.layers]
    for weight in weights[:-1]:
        h = weight @ h
        h = h.clamp(min=0) if relu else h
    outputs = weights[-1] @ h  # [K, N]
    total, column = torch.zeros((), dtype=outputs.dtype), 0
    for c, count in enumerate(model.class_counts):
        for _ in range(count):
            f = outputs[:, column]
            if model.loss == "mse":
                total += ((f - torch.eye(model.n_classes).to(f)[c]) ** 2).sum() / 2
            else:
                total += torch.log(torch.exp(f).sum()) - f[c]
            column += 1
    total /= column
    for decay, weight in zip(model.weight_decay, weights, strict=True):
        total += decay / 2 * (weight**2).sum()
    return total + model.feature_decay / 2 * (model.features.detach() ** 2).sum()


@pytest.mark.parametrize(("activation", "loss"), KINDS)
@pytest.mark.parametrize("counts", [None, (1, 4, 2)])
def test_objective_is_the_papers(activation, loss, counts):
    model = build(
        activation=activation,
        loss=loss,
        class_counts=counts,
        weight_decay=(0.1, 0.2, 0.3),
        feature_decay=0.4,
        seed=3,
    )
    with torch.no_grad():
        model.features -= 0.2  # some features below their ReLU
    torch.testing.assert_close(model.objective().detach(), naive_objective(model))


def test_targets_follow_the_counts():
    assert build().targets().tolist() == [0, 0, 1, 1, 2, 2]
    model = build(class_counts=(1, 3, 2))
    assert model.targets().tolist() == [0, 1, 1, 1, 2, 2]
    assert model.features.shape == (6, 5)


@pytest.mark.parametrize("activation", ["linear", "relu"])
def test_layer_inputs_lead_to_the_outputs(activation):
    model = build(activation=activation)
    x = torch.randn(4, 5, dtype=torch.float64)
    inputs = model.layer_inputs(x)
    assert [h.shape for h in inputs] == [(4, 5)] * 3
    torch.testing.assert_close(inputs[-1] @ model.layers[2].weight.T, model(x))
    assert (min(h.min() for h in inputs) >= 0) == (activation == "relu")
    torch.testing.assert_close(model(), model(model.features))


def test_layers_have_dotted_names_and_no_biases():
    model = build()
    assert [name for name, _ in model.named_parameters()] == [
        "features",
        *(f"layers.{layer}.weight" for layer in range(3)),
    ]
    assert model.get_submodule("layers.2").weight.shape == (3, 5)


def test_start_depends_on_the_seed_alone():
    features, weights = initial_point(3, 6, 3, 5, seed=4, scale=2.0)
    for activation in ("linear", "relu"):
        model = build(seed=4, init_scale=2.0, activation=activation, dtype=torch.float32)
        torch.testing.assert_close(model.features.detach(), features.float())
        torch.testing.assert_close(model.layers[2].weight.detach(), weights[2].float())
    assert not torch.equal(build(seed=5).features, build(seed=4).features)
    assert (features >= 0).all()


OPTIMA = [
    ("linear", 0, collapsed_optimum(3, 2, 3, 0.01, 0.01, 5)),
    ("linear", 7, collapsed_optimum(3, 2, 3, (0.005, 0.01, 0.02), 0.01, 5)),
    ("linear", None, collapsed_optimum(4, 2, 2, 0.01, 0.01, 3)),
    ("linear", 1, collapsed_cross_entropy(3, 2, 3, 0.002, 0.002, 5)),
    ("relu", None, collapsed_optimum(3, 2, 3, 0.01, 0.01, 5)),
]


@pytest.mark.parametrize(("activation", "seed", "optimum"), OPTIMA)
def test_loaded_optimum_is_stationary_with_its_objective(activation, seed, optimum):
    o = optimum
    model = UnconstrainedFeatureModel(
        o.n_classes,
        o.n_per_class,
        o.depth,
        o.width,
        activation=activation,
        loss=o.loss,
        weight_decay=o.weight_decay,
        feature_decay=o.feature_decay,
    )
    model.load_optimum(optimum, seed)
    objective = model.objective()
    assert objective.item() == pytest.approx(optimum.objective, rel=1e-12)
    objective.backward()
    assert max(p.grad.abs().max().item() for p in model.parameters()) < 1e-14


def test_load_optimum_refuses_other_sizes_and_rotated_relu():
    optimum = collapsed_optimum(3, 2, 3, 0.01, 0.01, 6)
    with pytest.raises(ValueError, match=r"6×6.*5×5"):
        build().load_optimum(optimum)
    with pytest.raises(ValueError, match="seed must be None"):
        build(activation="relu", width=6).load_optimum(optimum, seed=1)


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_minimise_finds_the_closed_form(loss):
    closed = collapsed_optimum if loss == "mse" else collapsed_cross_entropy
    optimum = closed(3, 2, 2, 0.004, 0.004, 4)
    model = build(
        depth=2, width=4, loss=loss, weight_decay=0.004, feature_decay=0.004, init_scale=3.0
    )
    norm = minimise(model, 1e-9)
    assert norm <= 1e-9
    gradients = torch.autograd.grad(model.objective(), list(model.parameters()))
    assert norm == pytest.approx(sum(g.square().sum() for g in gradients).sqrt().item())
    assert model.objective().item() == pytest.approx(optimum.objective, rel=1e-12)


def test_minimise_needs_its_line_search_when_deep():
    """Five layers from a large start: unit steps of L-BFGS run off to NaN there."""
    optimum = collapsed_optimum(3, 2, 5, 0.004, 0.006, 4)
    decays = {"weight_decay": 0.004, "feature_decay": 0.006}
    model = build(depth=5, width=4, init_scale=3.0, **decays)
    minimise(model, 1e-7)
    assert model.objective().item() == pytest.approx(optimum.objective, rel=1e-10)


def test_minimise_may_end_at_a_lower_rank():
    """The reason for its warning: near zero, zero itself attracts; its objective is 1/2."""
    model = build(init_scale=0.01)
    minimise(model)
    assert model.objective().item() == pytest.approx(0.5)


def test_minimise_says_when_it_failed():
    with pytest.raises(RuntimeError, match=r"tolerance=1e-09 after 3 iterations"):
        minimise(build(), max_iterations=3)
    with pytest.raises(ValueError, match="float64"):
        minimise(build(dtype=torch.float32))
    model = build()
    with torch.no_grad():
        model.features[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="nan"):
        minimise(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_classes": 1}, "n_classes=1 must be at least 2"),
        ({"n_per_class": 0}, "n_per_class=0"),
        ({"depth": 0}, "depth=0"),
        ({"width": 0}, "width=0"),
        ({"activation": "tanh"}, "activation='tanh'"),
        ({"loss": "hinge"}, "loss='hinge'"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"weight_decay": (0.1, 0.2)}, "depth=3, got 2"),
        ({"weight_decay": (0.1, float("nan"), 0.1)}, "weight_decay=nan"),
        ({"feature_decay": float("inf")}, "feature_decay=inf"),
        ({"class_counts": (2, 2)}, "class_counts"),
        ({"class_counts": (2, 2, 0)}, "class_counts"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_inputs_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"x must be \[N, 5\], got \[2, 4\]"):
        build()(torch.zeros(2, 4, dtype=torch.float64))
