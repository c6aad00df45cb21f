"""Networks, and training many at once against an ordinary torch loop."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from proofread.ufm_spectra.networks import (
    Recipe,
    class_subset,
    cnn,
    head_layers,
    later_layers,
    mlp,
    train_networks,
)

K, SIDE, N = 3, 4, 30
SMALL = Recipe(epochs=6, batch_size=8, lr=0.02, weight_decay=1e-2)


def small_mlp(seed: int, relu_head: bool = False) -> nn.Sequential:
    return mlp(SIDE**2, K, body=(6, 5), head=(4, 4), relu_head=relu_head, seed=seed)


def small_cnn(seed: int) -> nn.Sequential:
    return cnn(SIDE, K, channels=(2, 3), strides=(2, 1), body=(5,), head=(4,), seed=seed)


class Biased(nn.Module):
    """Not a sequence, with a bias: what goes through vmap as a whole."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(SIDE**2, K).double()
        self.skip = nn.Linear(SIDE**2, K).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh() + self.skip(x)


class Doubled(nn.Linear):
    """A Linear that does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def shared(seed: int) -> nn.Sequential:
    twice = nn.Linear(6, 6).double()
    return nn.Sequential(nn.Linear(SIDE**2, 6).double(), twice, twice)


def one_relu(seed: int) -> nn.Sequential:
    """One ReLU object in two places, an empty sequence, a subclass of Linear."""
    torch.manual_seed(seed)
    relu = nn.ReLU()
    layers = [nn.Linear(SIDE**2, 6), relu, nn.Sequential(), nn.Linear(6, 6), relu]
    return nn.Sequential(*layers, Doubled(6, K, bias=False)).double()


def blobs(n: int = N, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % K
    noise = torch.randn(n, SIDE**2, generator=generator, dtype=torch.float64)
    return 2 * torch.eye(K, SIDE**2).double()[y] + 0.5 * noise, y


def plain_loop(network: nn.Module, x, y, recipe: Recipe) -> list[float]:
    """One network, one batch at a time; returns each epoch's mean loss."""
    optimiser = torch.optim.SGD(
        network.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay
    )
    order, lr, history = torch.Generator().manual_seed(recipe.order_seed), recipe.lr, []
    for epoch in range(recipe.epochs):
        optimiser.param_groups[0]["lr"] = lr * recipe.drop ** sum(
            epoch >= round(share * recipe.epochs) for share in recipe.drops
        )
        total = 0.0
        for batch in torch.randperm(len(x), generator=order).split(recipe.batch_size):
            outputs = network(x[batch])
            if recipe.loss == "mse":
                loss = ((outputs - F.one_hot(y[batch], K)) ** 2).sum(1).mean() / 2
            else:
                loss = F.cross_entropy(outputs, y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(batch) / len(x)
        history.append(total)
    return history


def assert_same(ours: nn.Module, theirs: nn.Module, **tolerance) -> None:
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, **tolerance)


# --- networks -------------------------------------------------------------------------------------


def test_mlp_is_what_it_says():
    network = mlp(20, K, body=(7, 6), head=(5, 4), seed=3)
    assert [n for n, _ in network.named_children()] == [
        *("body1", "relu1", "body2", "relu2", "head1", "head2", "head3")
    ]
    shapes = [tuple(w.shape) for w in network.parameters()]
    assert shapes == [(7, 20), (6, 7), (5, 6), (4, 5), (K, 4)]
    assert all(w.dtype == torch.float64 for w in network.parameters())
    x = torch.randn(9, 20, dtype=torch.float64)
    h = x
    for index, weight in enumerate(network.parameters()):
        h = h @ weight.T
        h = h.relu() if index < 2 else h
    torch.testing.assert_close(network(x), h)


def test_relu_head_changes_the_activations_alone():
    linear, relu = small_mlp(1), small_mlp(1, relu_head=True)
    assert_same(relu, linear, rtol=0, atol=0)
    assert head_layers(linear) == head_layers(relu) == ["head1", "head2", "head3"]
    x, _ = blobs()
    features = linear[:4](x)
    first, second, third = (w for n, w in relu.named_parameters() if n.startswith("head"))
    expected = ((features @ first.T).relu() @ second.T).relu() @ third.T
    torch.testing.assert_close(relu(x), expected)


def test_cnn_shapes_and_layers():
    network = cnn(14, 10, channels=(8, 16), strides=(3, 2), body=(48,), head=(48, 48))
    assert network(torch.zeros(2, 196).double()).shape == (2, 10)
    shapes = {n: tuple(w.shape) for n, w in network.named_parameters()}
    assert shapes["conv2.weight"] == (16, 8, 3, 3)
    assert shapes["body1.weight"] == (48, 16 * 3 * 3)  # sides 14 → 5 → 3
    assert later_layers(network) == ["conv2", "body1", "head1", "head2", "head3"]
    assert head_layers(network) == ["head1", "head2", "head3"]


def test_initial_weights_are_he_normal_and_leave_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    network = cnn(14, 10, channels=(30, 40), strides=(1, 2), body=(200,), head=(), seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    for name, weight in network.named_parameters():
        fan_in = weight[0].numel()
        error = float(weight.detach().std()) / math.sqrt(2 / fan_in) - 1
        assert abs(error) < 4 / math.sqrt(2 * weight.numel()), name
    assert not torch.equal(mlp(5, 3, seed=0).head1.weight, mlp(5, 3, seed=1).head1.weight)
    assert_same(mlp(5, 3, seed=7), mlp(5, 3, seed=7), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: mlp(0, 3), "n_inputs"),
        (lambda: mlp(4, 0), "n_classes"),
        (lambda: mlp(4, 3, body=()), "body must not be empty"),
        (lambda: mlp(4, 3, head=(3, 0)), "head must hold"),
        (lambda: cnn(4, 3, channels=(), strides=()), "channels must not be empty"),
        (lambda: cnn(4, 3, channels=(2, 2), strides=(2,)), "strides must hold one"),
        (lambda: cnn(4, 3, channels=(2,), strides=(0,)), "strides must hold sizes"),
        (lambda: head_layers(nn.Sequential(nn.Linear(2, 2))), "no such layers"),
        (lambda: later_layers(nn.Sequential(nn.Linear(2, 2))), "no such layers"),
    ],
)
def test_network_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# --- data -----------------------------------------------------------------------------------------


def test_class_subset_by_hand():
    images = torch.arange(6 * 4, dtype=torch.float32).view(6, 2, 2) ** 2
    x, y = class_subset(images, torch.tensor([1, 0, 1, 0, 0, 1]), 2, pool=2)
    assert y.tolist() == [0, 0, 1, 1]
    means = images.double().mean((1, 2))[[1, 3, 0, 2]]
    torch.testing.assert_close(x[:, 0], means - means.mean())
    assert (x.dtype, x.shape) == (torch.float64, (4, 1))


def test_class_subset_pools_squares():
    images = torch.randn(4, 6, 6)
    x, _ = class_subset(images, torch.tensor([0, 1, 0, 1]), 2, pool=3)
    pooled = images.double()[[0, 2, 1, 3], 0:3, 3:6].mean((1, 2))  # upper right square
    torch.testing.assert_close(x[:, 1], pooled - pooled.mean())


def test_class_subset_errors():
    labels = torch.tensor([0, 0, 1])
    with pytest.raises(ValueError, match="must lie in 1 … 1"):
        class_subset(torch.zeros(3, 2, 2), labels, 2)
    with pytest.raises(ValueError, match="n_per_class=0"):
        class_subset(torch.zeros(3, 2, 2), labels, 0)
    with pytest.raises(ValueError, match="divisible by 2"):
        class_subset(torch.zeros(3, 3, 2), labels, 1)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("make", [small_mlp, small_cnn, Biased, one_relu])
def test_training_equals_a_plain_loop(make, loss):
    """Momentum, decay, schedule, ragged last batch and order of data: network by network."""
    x, y = blobs()
    recipe = Recipe(epochs=6, batch_size=8, lr=0.02, weight_decay=1e-2, loss=loss)
    trained = train_networks(make, x, y, recipe, seeds=(0, 5))
    for index, seed in enumerate((0, 5)):
        network = make(seed)
        history = plain_loop(network, x, y, recipe)
        assert_same(trained.final.networks[index], network, rtol=1e-10, atol=1e-13)
        assert trained.losses[:, index].tolist() == pytest.approx(history, rel=1e-10)


def test_a_seed_does_not_depend_on_its_company():
    x, y = blobs()
    together = train_networks(small_mlp, x, y, SMALL, seeds=(0, 1, 2))
    alone = train_networks(small_mlp, x, y, SMALL, seeds=(2,))
    again = train_networks(small_mlp, x, y, SMALL, seeds=(2,))
    assert_same(together.final.networks[2], alone.final.networks[0], rtol=1e-11, atol=1e-14)
    assert_same(again.final.networks[0], alone.final.networks[0], rtol=0, atol=0)


def test_checkpoints_lie_on_the_way():
    """Epoch 0 is the start; the checkpoint after e epochs is what e epochs of the plain loop give;
    later training leaves it alone."""
    x, y = blobs()
    recipe = Recipe(epochs=6, batch_size=8, lr=0.02, drops=(0.5,))
    seen: list[int] = []
    trained = train_networks(
        small_mlp, x, y, recipe, seeds=(4,), checkpoints=(2, 0), progress=seen.append
    )
    assert [c.epoch for c in trained.checkpoints] == [0, 2, 6]
    assert seen == [1, 2, 3, 4, 5, 6]
    assert_same(trained.at(0).networks[0], small_mlp(4), rtol=0, atol=0)
    short = Recipe(epochs=2, batch_size=8, lr=0.02, drops=())
    network = small_mlp(4)
    plain_loop(network, x, y, short)
    assert_same(trained.at(2).networks[0], network, rtol=1e-11, atol=1e-14)
    with pytest.raises(KeyError, match="only after"):
        trained.at(3)


def test_checkpoint_numbers_are_those_of_its_network():
    x, y = blobs()
    trained = train_networks(small_mlp, x, y, SMALL, seeds=(0, 1))
    for index, network in enumerate(trained.final.networks):
        assert not network.training
        outputs = network(x).detach()
        share = (outputs.argmax(1) == y).double().mean()
        loss = ((outputs - F.one_hot(y, K)) ** 2).sum() / (2 * N)
        assert float(trained.final.accuracy[index]) == float(share)
        assert float(trained.final.loss[index]) == pytest.approx(float(loss))


def test_order_of_data_is_the_recipe_s():
    x, y = blobs()
    first = train_networks(small_mlp, x, y, SMALL)
    other = train_networks(small_mlp, x, y, Recipe(**{**vars(SMALL), "order_seed": 1}))
    assert not torch.allclose(first.losses, other.losses)


def test_long_training_interpolates():
    x, y = blobs()
    recipe = Recipe(epochs=100, batch_size=10, lr=0.02, weight_decay=1e-4)

    def wide(seed: int) -> nn.Module:
        return mlp(SIDE**2, K, body=(30,), head=(20,), seed=seed)

    trained = train_networks(wide, x, y, recipe, seeds=(0, 1))
    assert (trained.final.accuracy == 1).all()
    assert (trained.final.loss < 1e-2).all()


def test_divergence_names_the_learning_rate():
    x, y = blobs()
    for epochs in (1, 9):  # with one step, the loss seen is still finite and the end is not
        with pytest.raises(
            FloatingPointError, match=r"diverged in epoch \d at lr=1e\+80 .*lower lr"
        ):
            train_networks(small_mlp, x, y, Recipe(epochs=epochs, lr=1e80), seeds=(0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr must"),
        ({"lr": math.nan}, "lr must"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"drops": (1.5,)}, "drops"),
        ({"drop": 0.0}, "drop"),
        ({"loss": "hinge"}, "loss must be one of"),
    ],
)
def test_recipe_errors(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**change)


def odd_network(seed: int) -> nn.Module:
    return mlp(SIDE**2, K, body=(4 + seed,))


class Mean(nn.Linear):
    """One number a sample instead of K."""

    def __init__(self) -> None:
        super().__init__(SIDE**2, K, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean(-1)


def normalised(seed: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(SIDE**2), nn.Linear(SIDE**2, K))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": ()}, "at least one seed"),
        ({"y": torch.zeros(N - 1, dtype=torch.long)}, "one integer class"),
        ({"y": torch.zeros(N)}, "one integer class"),
        ({"x": torch.full((N, SIDE**2), math.nan)}, "x holds a NaN"),
        ({"checkpoints": (7,)}, "checkpoints must lie in 0 … 6"),
        ({"checkpoints": (-1,)}, "checkpoints must lie in 0 … 6"),
        ({"make_network": odd_network, "seeds": (0, 1)}, "one architecture"),
        ({"make_network": normalised}, "without buffers"),
        ({"make_network": shared}, "no weight twice"),
        ({"x": torch.zeros(N, SIDE**2)}, "x is torch.float32, the weights are torch.float64"),
        ({"make_network": lambda seed: nn.Sequential(Mean())}, "must give classifiers"),
        ({"y": torch.arange(N) % K + 1}, "y must lie in 0"),
        ({"y": torch.arange(N) % K - 1}, "y must lie in 0"),
    ],
)
def test_training_errors(change, message):
    x, y = blobs()
    given = {"make_network": small_mlp, "x": x, "y": y, "recipe": SMALL} | change
    with pytest.raises((ValueError, TypeError), match=message):
        train_networks(**given)
