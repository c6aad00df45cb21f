"""The networks of the pages, tiny: what is trained on which labels, against hand-made twins."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proofread.ufm_spectra import cases
from proofread.ufm_spectra.cases import Case
from proofread.ufm_spectra.model import UnconstrainedFeatureModel
from proofread.ufm_spectra.networks import Checkpoint, Recipe, cnn, mlp, train_networks
from proofread.ufm_spectra.operators import layer_hessian
from proofread.ufm_spectra.study import NetworksStudy

K, N, SIDE, WIDTH = 3, 18, 4, 12
RECIPE = Recipe(epochs=4, batch_size=6, lr=0.02, weight_decay=1e-2)
OTHER = replace(RECIPE, epochs=3, lr=0.01)
SEEDS = (5, 7)


def clusters() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(K).repeat_interleave(N // K)
    noise = torch.randn(N, SIDE**2, generator=draw, dtype=torch.float64)
    x = 2 * torch.eye(K, SIDE**2, dtype=torch.float64)[y] + 0.5 * noise
    return x, y, y[torch.randperm(N, generator=draw)]


@pytest.fixture(scope="module")
def perceptrons() -> dict[str, Case]:
    x, y, shuffled = clusters()
    options = {"seeds": SEEDS, "width": WIDTH, "checkpoints": [2]}
    return cases.train_perceptrons(x, y, shuffled, (RECIPE, OTHER), **options)


def make(seed: int, relu: bool = False) -> nn.Sequential:
    sizes = {"body": (WIDTH, WIDTH), "head": (WIDTH, WIDTH)}
    return mlp(SIDE**2, K, **sizes, relu_head=relu, seed=seed)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(m == n and p.equal(q) for (m, p), (n, q) in pairs)


def by_hand(network: nn.Module, x: Tensor, y: Tensor, layers: tuple[str, ...] = ()) -> Case:
    loss = torch.zeros(1, dtype=torch.float64)
    return Case(Checkpoint(1, (network,), loss + 1, loss), RECIPE, x, y, layers)


def scaled(*factors: float) -> nn.Sequential:
    """One diagonal layer by the name of a head's."""
    layer = nn.Linear(len(factors), len(factors), bias=False, dtype=torch.float64)
    layer.weight.data = torch.tensor(factors, dtype=torch.float64).diag()
    return nn.Sequential(OrderedDict(head1=layer))


# --- trainings ------------------------------------------------------------------------------------


def test_every_case_is_the_training_that_its_name_says(perceptrons) -> None:
    x, y, shuffled = clusters()
    plain = train_networks(make, x, y, RECIPE, SEEDS, checkpoints=[2])
    control = train_networks(make, x, shuffled, OTHER, SEEDS)
    wanted = {
        "linear head": (plain.final, y, RECIPE),
        "linear head, epoch 2": (plain.at(2), y, RECIPE),
        "random labels": (control.final, shuffled, OTHER),
    }
    assert set(perceptrons) == set(wanted)
    for name, (checkpoint, labels, recipe) in wanted.items():
        case = perceptrons[name]
        assert case.checkpoint.epoch == checkpoint.epoch, name
        assert case.recipe == recipe, name
        assert case.x is perceptrons["linear head"].x
        assert case.y.equal(labels), name
        for found, twin in zip(case.networks, checkpoint.networks, strict=True):
            assert same_weights(found, twin), name


def test_early_networks_are_other_networks(perceptrons) -> None:
    early, late = (perceptrons[n].networks for n in ("linear head, epoch 2", "linear head"))
    assert not any(same_weights(a, b) for a, b in zip(early, late, strict=True))


def test_accuracy_and_loss_are_on_the_labels_of_the_training(perceptrons) -> None:
    for case in perceptrons.values():
        for seed, network in enumerate(case.networks):
            with torch.no_grad():
                outputs = network(case.x)
            right = (outputs.argmax(1) == case.y).double().mean()
            loss = (outputs - F.one_hot(case.y, K)).square().sum() / (2 * N)
            assert case.checkpoint.accuracy[seed].item() == pytest.approx(right.item())
            assert case.checkpoint.loss[seed].item() == pytest.approx(loss.item())


def test_heads_alone_are_studied(perceptrons) -> None:
    head = ["head1", "head2", "head3"]
    for case in perceptrons.values():
        assert list(case.layers) == case.head == head


def test_both_heads_train_from_the_same_start() -> None:
    x, y, _ = clusters()
    found = cases.train_heads(x, y, RECIPE, seeds=SEEDS, width=WIDTH)
    assert set(found) == {"linear head", "ReLU head"}
    for name, case in found.items():
        twin = train_networks(lambda s, n=name: make(s, n == "ReLU head"), x, y, RECIPE, SEEDS)
        assert all(map(same_weights, case.networks, twin.final.networks)), name
        assert case.layers == ("body2", "head1", "head2", "head3")
        assert case.head == ["head1", "head2", "head3"]
    outputs = [case.networks[0](x) for case in found.values()]
    assert not torch.allclose(*outputs)


def test_one_perceptron() -> None:
    x, y, _ = clusters()
    case = cases.train_perceptron(x, y, OTHER, seeds=[3], width=WIDTH, relu=True)
    (twin,) = train_networks(lambda s: make(s, relu=True), x, y, OTHER, [3]).final.networks
    assert same_weights(case.networks[0], twin)
    assert case.checkpoint.epoch == OTHER.epochs
    assert case.layers == ("head1", "head2", "head3")


def test_convolutional_checkpoints_end_in_their_epoch() -> None:
    x, y, _ = clusters()
    options = {"seeds": [1], "width": WIDTH}
    found = cases.train_convolutional(x, y, RECIPE, checkpoints=[0, 3], **options)
    epochs = {name: case.checkpoint.epoch for name, case in found.items()}
    assert epochs == {
        "convolutional, epoch 0": 0,
        "convolutional, epoch 3": 3,
        "convolutional": RECIPE.epochs,
    }
    start = cnn(SIDE, K, body=(WIDTH,), head=(WIDTH, WIDTH), seed=1)
    assert same_weights(found["convolutional, epoch 0"].networks[0], start)
    assert found["convolutional"].layers == ("head1", "head2", "head3")
    single = cases.train_convolutional(x, y, RECIPE, checkpoints=[3], **options)
    assert set(single) == {"convolutional, epoch 3", "convolutional"}


def test_a_checkpoint_after_the_end_is_refused() -> None:
    x, y, _ = clusters()
    with pytest.raises(ValueError, match="checkpoints"):
        cases.train_perceptrons(x, y, y, (RECIPE, RECIPE), seeds=[0], width=4, checkpoints=[9])


# --- one case -------------------------------------------------------------------------------------


def test_predicted_outlier_takes_the_mean_gain_of_the_own_class() -> None:
    x, y = torch.eye(2, dtype=torch.float64).repeat(2, 1), torch.tensor([0, 1, 0, 1])
    network = scaled(0.9, 0.5)
    # γ = 0.7
    assert by_hand(network, x, y).predicted_outlier(network) == pytest.approx(1e-2 * 0.7 / 0.3)
    swapped = by_hand(network, x, 1 - y).predicted_outlier(network)
    assert swapped == 0.0  # the outputs of the other class are 0


def test_nc1_by_hand() -> None:
    """Class means ±1, within-class variance a²: tr(Σ_W Σ_B⁺)/K = a²/2."""
    a = 0.3
    line = torch.tensor([-1 - a, -1 + a, 1 - a, 1 + a], dtype=torch.float64)
    x = torch.stack([line, torch.zeros(4, dtype=torch.float64)], 1)
    case = by_hand(scaled(1, 1), x, torch.tensor([0, 0, 1, 1]))
    assert case.nc1(case.networks[0], "head1") == pytest.approx(a**2 / 2)


@pytest.mark.parametrize("relu", [False, True])
def test_layer_input_is_a_forward_pass_by_hand(relu) -> None:
    x = clusters()[0]
    network, h = make(0, relu), x
    for name, module in network.named_children():
        if isinstance(module, nn.Linear):
            torch.testing.assert_close(cases.layer_input(network, name, x), h, msg=name)
        h = module(h).detach()


def test_layer_input_of_a_convolution_is_flat() -> None:
    x, network = clusters()[0], cnn(SIDE, K, body=(5,), head=(4,))
    assert cases.layer_input(network, "conv1", x).equal(x)
    image = network.conv1(network.image(x)).relu()
    assert cases.layer_input(network, "conv2", x).equal(image.flatten(1).detach())


def test_layer_input_leaves_no_hook_behind() -> None:
    x, network = clusters()[0], make(0)
    assert not cases.layer_input(network, "head2", x).requires_grad
    with pytest.raises(RuntimeError):
        cases.layer_input(network, "head2", x[:, :3])
    assert not network.head2._forward_pre_hooks


# --- studies --------------------------------------------------------------------------------------


def made_up(layers: tuple[str, ...], **columns: list[list[float]]) -> NetworksStudy:
    """Studies with the given quantities, ``[seeds][layers]``."""
    seeds, places = range(len(next(iter(columns.values())))), range(len(layers))
    rows = [
        tuple(SimpleNamespace(**{q: v[s][at] for q, v in columns.items()}) for at in places)
        for s in seeds
    ]
    return NetworksStudy(layers, tuple(rows))  # type: ignore[arg-type]


def test_over_head_leaves_the_body_out() -> None:
    study = made_up(("body2", "head1", "head2"), gap=[[1, 2, 3], [4, 5, 6]])
    assert cases.over_head(study, "gap").tolist() == [[2, 3], [5, 6]]


def test_progress_is_in_the_order_of_the_epochs() -> None:
    epochs = {"last": 20, "first": 1, "middle": 5}
    runs = {n: SimpleNamespace(checkpoint=SimpleNamespace(epoch=e)) for n, e in epochs.items()}
    layers = ("body2", "head1")
    studies = {
        n: made_up(layers, nc1=[[0, e]], overlap=[[0, 2 * e]], gap=[[0, 3 * e]])
        for n, e in epochs.items()
    }
    found = cases.progress_of(runs, studies)  # type: ignore[arg-type]
    assert found.epochs.tolist() == [1, 5, 20]
    for number, values in enumerate((found.nc1, found.overlap, found.gap), 1):
        np.testing.assert_array_equal(values, number * np.array([1, 5, 20]).reshape(3, 1, 1))


def test_study_cases_take_the_case_at_its_word(perceptrons, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(cases, "study_networks", lambda *arguments: seen.append(arguments))
    recipe = replace(RECIPE, loss="cross_entropy")
    softmax = replace(perceptrons["random labels"], recipe=recipe, layers=("body2",))
    assert set(cases.study_cases({"it": softmax})) == {"it"}
    assert seen == [(softmax.networks, ("body2",), softmax.x, softmax.y, "cross_entropy")]


def test_model_values_would_not_vanish_off_the_optimum(monkeypatch) -> None:
    assert cases.model_residual(3, 4) == 0.0
    true = UnconstrainedFeatureModel.load_optimum

    def beside(self, optimum, seed) -> None:
        true(self, optimum, seed=seed)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(1 + 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype))

    monkeypatch.setattr(UnconstrainedFeatureModel, "load_optimum", beside)
    assert cases.model_residual(3, 4) > 0.01
    assert 1 < cases.model_gap(3, 4) < 1e6


# --- solvers --------------------------------------------------------------------------------------


def test_residual_by_hand() -> None:
    x, y, _ = clusters()
    operator = layer_hessian(make(0), "head3", x, y)
    values, vectors = torch.linalg.eigh(operator.to_dense())
    assert cases._residual(operator, values[-4:], vectors[:, -4:]) < 1e-12
    off = cases._residual(operator, values[-4:] + 0.1 * values[-1], vectors[:, -4:])
    assert off == pytest.approx(0.1 / 1.1)


def test_solver_runs_report_what_was_spent(perceptrons) -> None:
    case = perceptrons["linear head"]
    runs = cases.solver_runs({"a": case, "b": replace(case, y=case.y)}, "head3")
    assert [run.case for run in runs] == ["a"] * 3 + ["b"] * 3
    assert runs[:3] == [run._replace(case="a") for run in runs[3:]]  # the same every time
    assert runs[2].residual < 1e-10  # eigsh works to full precision by default
    random, means = runs[:2]
    assert random.applications >= 9
    assert means.applications >= 9


def test_full_spectrum_belongs_to_the_first_network(perceptrons) -> None:
    case = perceptrons["linear head"]
    pairs, density = cases.full_spectrum(case, 6)
    swapped = replace(case, checkpoint=replace(case.checkpoint, networks=case.networks[::-1]))
    assert not torch.allclose(cases.full_spectrum(swapped, 6)[0].values, pairs.values)
    assert pairs.values.shape == density.atoms.shape == (6,)
    assert density.size == sum(p.numel() for p in case.networks[0].parameters())
