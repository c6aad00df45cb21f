"""Ensemble training against an ordinary torch loop; the comparison's rules."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from proofread.linear_core import LinearCore
from proofread.linear_core.training import (
    LOSSES,
    Comparison,
    LearningRateChoice,
    Loss,
    Recipe,
    Run,
    average_pool,
    choose_learning_rate,
    compare_losses,
    find_loss,
    generalized_cross_entropy_entry,
    gradient_magnitudes,
    linear_core_entry,
    margin_slopes,
    slope_samples,
    standardise,
    train_classifier,
    train_ensemble,
)

K, D, N = 4, 6, 60
RECIPE = Recipe(hidden=5, epochs=3, batch_size=16, momentum=0.9, lr_grid=(0.01, 0.1))


def blobs(n: int = N, seed: int = 0, spread: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """K well-separated clusters in R^D."""
    rng = np.random.default_rng(seed)
    centres = 2 * np.eye(K, D)
    y = np.arange(n) % K
    return (centres[y] + spread * rng.standard_normal((n, D))).astype(np.float32), y


def plain_loop(x, y, loss: str, lr: float, seed: int, recipe: Recipe) -> nn.Sequential:
    """One network, one batch at a time, with torch's own layers, backward and optimiser."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(D, recipe.hidden), nn.ReLU(), nn.Linear(recipe.hidden, K))
    model = model.to(x.dtype)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            bound = 1 / math.sqrt(layer.in_features)
            weight = torch.empty(layer.weight.T.shape, dtype=x.dtype)
            layer.weight.copy_(weight.uniform_(-bound, bound, generator=generator).T)
            layer.bias.uniform_(-bound, bound, generator=generator)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=recipe.momentum)
    for _ in range(recipe.epochs):
        for batch in torch.randperm(len(x), generator=generator).split(recipe.batch_size):
            optimiser.zero_grad()
            LOSSES[loss].rows(model(x[batch]), y[batch]).mean().backward()
            optimiser.step()
    return model


def assert_same_model(ours: nn.Sequential, theirs: nn.Sequential, **tolerance) -> None:
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, **tolerance)


def test_generalized_cross_entropy_by_hand():
    """Two classes, log-odds log 3 for the label: p = 3/4."""
    logits, target = torch.tensor([[math.log(3), 0.0]]).double(), torch.tensor([0])
    p, q = 0.75, 0.7
    entry = generalized_cross_entropy_entry(q)
    assert entry.rows(logits, target).item() == pytest.approx((1 - p**q) / q)
    assert entry.slope(logits, target).item() == pytest.approx(p**q * (1 - p))
    mae = LOSSES["mean_absolute_error"]
    assert mae.rows(logits, target).item() == pytest.approx(0.25)
    assert mae.slope(logits, target).item() == pytest.approx(p * (1 - p))
    near = generalized_cross_entropy_entry(1e-6).rows(logits, target)  # q -> 0 is cross-entropy
    assert near.item() == pytest.approx(-math.log(p), rel=1e-5)


def test_generalized_cross_entropy_has_a_gradient_where_the_label_is_hopeless():
    logits = torch.tensor([[-800.0, 0.0]], dtype=torch.float64, requires_grad=True)
    generalized_cross_entropy_entry().rows(logits, torch.tensor([0])).sum().backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("q", [0, -0.5, 1.5, math.nan])
def test_generalized_cross_entropy_bad_q(q):
    with pytest.raises(ValueError, match="q must lie"):
        generalized_cross_entropy_entry(q)


@pytest.mark.parametrize("loss", LOSSES)
def test_members_equal_separate_runs_of_a_plain_loop(loss):
    """60 samples in batches of 16: the last batch of an epoch is a short one."""
    x, y = blobs()
    x = torch.from_numpy(x).double()
    labels = torch.stack(
        [torch.from_numpy(y), torch.from_numpy(np.roll(y, 1)), torch.arange(N) % K]
    )
    rates, seeds = [0.01, 0.1, 0.05], [3, 4, 3]
    ensemble = train_ensemble(
        x, labels, loss=loss, learning_rates=rates, seeds=seeds, recipe=RECIPE, n_classes=K
    )
    assert len(ensemble) == 3
    for i in range(3):
        expected = plain_loop(x, labels[i], loss, rates[i], seeds[i], RECIPE)
        assert_same_model(ensemble.member(i), expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            ensemble.logits(x)[i], expected(x).detach(), rtol=1e-10, atol=1e-12
        )


def test_train_classifier_is_a_member_and_repeats():
    x, y = blobs()
    options = {"loss": "linear_core", "lr": 0.05, "seed": 7, "hidden": 5, "epochs": 3}
    before = torch.get_rng_state()
    first = train_classifier(x, y, **options, batch_size=16)
    second = train_classifier(x, y, **options, batch_size=16)
    assert torch.equal(before, torch.get_rng_state())  # no global generator was moved
    assert_same_model(first, second, rtol=0, atol=0)
    expected = plain_loop(torch.from_numpy(x), torch.from_numpy(y), "linear_core", 0.05, 7, RECIPE)
    assert_same_model(first, expected, rtol=1e-4, atol=1e-6)
    other = train_classifier(x, y, **(options | {"seed": 8}), batch_size=16)
    assert not torch.equal(first[0].weight, other[0].weight)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns_separable_data(loss):
    x, y = blobs(400, spread=0.3)
    model = train_classifier(x, y, loss=loss, lr=0.05, seed=0, hidden=16, epochs=10, batch_size=20)
    test_x, test_y = blobs(400, seed=1, spread=0.3)
    guess = model(torch.from_numpy(test_x)).argmax(1).numpy()
    assert np.mean(guess == test_y) > 0.97


# --- losses and their slopes ----------------------------------------------------------------------


def test_hinge_is_its_formula():
    logits = torch.randn(9, 5, dtype=torch.float64)
    target = torch.arange(9) % 5
    for h, y, value in zip(logits, target, LOSSES["hinge"].rows(logits, target), strict=True):
        centred = h - h.mean()
        expected = sum(max(0.0, 1 + float(centred[k])) for k in range(5) if k != y)
        assert value.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tail", ["exponential", "gamma", "logistic"])
def test_linear_core_tends_to_the_hinge_as_its_tail_shrinks(tail):
    logits, target = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 5
    sharp = linear_core_entry(scale=1e-6, tail=tail)
    torch.testing.assert_close(
        sharp.rows(logits, target), LOSSES["hinge"].rows(logits, target), rtol=0, atol=1e-4
    )


def test_gradient_magnitudes_of_cross_entropy_are_those_of_p_minus_onehot():
    logits, target = torch.randn(20, 5), torch.arange(20) % 5
    expected = (logits.softmax(1) - F.one_hot(target, 5)).norm(dim=1)
    torch.testing.assert_close(gradient_magnitudes(logits, target, "cross_entropy"), expected)
    assert not logits.requires_grad


def test_gradient_magnitudes_in_the_core_are_all_equal():
    """Slope 1 at each of K - 1 wrong classes, centred: norm √((K-1)/K)."""
    logits, target = 0.1 * torch.randn(20, 5), torch.arange(20) % 5
    for loss in ("hinge", "linear_core", "linear_core_gamma"):
        magnitudes = gradient_magnitudes(logits, target, loss)
        torch.testing.assert_close(magnitudes, torch.full((20,), math.sqrt(4 / 5)))


def test_margin_slopes_one_class_against_another():
    logits = torch.tensor([[3.0, -3.0], [-3.0, 3.0], [0.0, 0.0]], dtype=torch.float64)
    target = torch.tensor([0, 0, 0])
    odds = torch.tensor([6.0, -6.0, 0.0], dtype=torch.float64)
    slopes = {name: margin_slopes(logits, target, name) for name in LOSSES}
    torch.testing.assert_close(slopes["cross_entropy"], torch.sigmoid(-odds))
    assert slopes["hinge"].tolist() == [0, 1, 1]
    expected = -LinearCore().derivative(torch.tensor([3.0, -3.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(slopes["linear_core"], expected)
    assert slopes["linear_core"][1:].tolist() == [1, 1]  # exactly 1 in the core


def test_losses_by_name_or_by_value():
    mine = Loss("mine", LOSSES["hinge"].rows, LOSSES["hinge"].slope)
    assert find_loss(mine) is mine
    assert find_loss("hinge") is LOSSES["hinge"]
    with pytest.raises(ValueError, match="loss must be one of"):
        find_loss("mse")


# --- the comparison -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare_losses(
        *blobs(400),
        *blobs(200, seed=1),
        losses=("cross_entropy", "linear_core"),
        rates=(0.0, 0.3),
        seeds=(0, 1, 2),
        recipe=Recipe(hidden=8, epochs=6, batch_size=20, lr_grid=(0.001, 0.01, 0.1)),
    )


def test_records_are_complete_and_in_order(comparison):
    keys = [(run.rate, run.loss, run.seed) for run in comparison.runs]
    assert keys == [
        (rate, loss, seed)
        for rate in (0.0, 0.3)
        for loss in ("cross_entropy", "linear_core")
        for seed in (0, 1, 2)
    ]
    assert {run.flipped for run in comparison.runs if run.rate == 0} == {0.0}
    assert all(run.lr == comparison.chosen(run.rate)[run.loss] for run in comparison.runs)
    assert set(dataclasses.asdict(comparison.runs[0])) >= {"loss", "rate", "seed", "lr", "accuracy"}


def test_losses_with_one_seed_saw_the_same_noise(comparison):
    for seed in (0, 1, 2):
        flipped = {run.flipped for run in comparison.runs if (run.rate, run.seed) == (0.3, seed)}
        assert len(flipped) == 1
        assert 0.2 < flipped.pop() < 0.4


def test_accuracies_are_on_clean_test_labels(comparison):
    assert comparison.accuracies("linear_core", 0.0).min() > 0.95
    assert comparison.accuracies("linear_core", 0.3).shape == (3,)
    # fitting the noisy labels as well as a clean classifier does: about 1 - 0.3
    fits = [run.fit for run in comparison.runs if run.rate == 0.3]
    assert max(fits) < comparison.accuracies("cross_entropy", 0.3).min()
    with pytest.raises(KeyError, match="no runs"):
        comparison.accuracies("hinge", 0.0)


def test_a_comparison_repeats_and_each_run_is_train_classifier(comparison):
    train, test = standardise(blobs(400)[0], blobs(200, seed=1)[0])
    run = comparison.runs[1]
    model = train_classifier(
        train, blobs(400)[1], loss=run.loss, lr=run.lr, seed=run.seed,
        hidden=8, epochs=6, batch_size=20,
    )  # fmt: skip
    guess = model(torch.from_numpy(test)).argmax(1).numpy()
    assert np.mean(guess == blobs(200, seed=1)[1]) == pytest.approx(run.accuracy, abs=0.006)


def test_learning_rate_is_the_best_of_the_grid_on_held_out_noisy_labels(comparison):
    for choice in comparison.choices:
        assert list(choice.accuracies) == [0.001, 0.01, 0.1]
        assert choice.accuracies[choice.lr] == max(choice.accuracies.values())
    assert len(comparison.choices) == 4


def test_ties_go_to_the_smaller_rate_and_edges_are_told():
    x, _ = blobs(40)
    choice = choose_learning_rate(
        x, {5: np.zeros(40, dtype=np.int64)}, loss="hinge", rate=0.0,
        recipe=Recipe(hidden=2, epochs=20, batch_size=8, lr_grid=(0.1, 0.05)), n_classes=K,
    )  # fmt: skip
    assert choice.accuracies == {0.1: 1.0, 0.05: 1.0}  # one label: anything learns it
    assert choice.lr == 0.05
    assert choice.at_edge
    assert not LearningRateChoice("hinge", 0.0, 2.0, {1.0: 0.1, 2.0: 0.9, 3.0: 0.2}).at_edge


def test_shuffled_labels_leave_nothing_to_learn():
    """The control: about 1/K whatever the loss. (An honest label order gives > 0.95.)"""
    result = compare_losses(
        *blobs(400),
        *blobs(400, seed=1),
        losses=("linear_core",),
        rates=(0.0,),
        seeds=range(6),
        recipe=Recipe(hidden=8, epochs=6, batch_size=20),
        learning_rates={"linear_core": 0.01},
        shuffle_labels=True,
    )
    assert result.choices == ()
    assert all(run.shuffled and run.flipped > 0.6 for run in result.runs)
    assert result.accuracies("linear_core", 0.0).mean() == pytest.approx(1 / K, abs=0.15)


def test_standardise_uses_the_training_numbers_only():
    train, test = standardise(np.array([[0, 2], [4, 6]], dtype=np.uint8), np.array([[3, 3.0]]))
    assert train.dtype == test.dtype == np.float64
    assert train.mean() == pytest.approx(0, abs=1e-7)
    assert train.std() == pytest.approx(1, rel=1e-6)
    assert test.tolist() == [[0, 0]]
    pictures, _ = standardise(np.random.default_rng(0).random((3, 2, 2)), np.ones((1, 2, 2)))
    assert pictures.shape == (3, 4)


@pytest.mark.parametrize("bad", [np.ones((3, 2)), np.full((3, 2), np.nan)])
def test_standardise_refuses_what_has_no_scale(bad):
    with pytest.raises(ValueError, match="x_train must be"):
        standardise(bad, np.ones((1, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 0}, "hidden must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"epochs": -1}, "epochs must not"),
        ({"momentum": 1.0}, "momentum must lie"),
        ({"lr_grid": ()}, "lr_grid must hold"),
        ({"lr_grid": (0.1, -1.0)}, "lr_grid must hold"),
    ],
)
def test_bad_recipes(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": ("mse",)}, "loss must be one of"),
        ({"seeds": ()}, "seeds must be distinct"),
        ({"seeds": (1, 1)}, "seeds must be distinct"),
        ({"seeds": (1000,)}, "none may be among seeds"),
        ({"selection_seeds": ()}, "selection_seeds must be given"),
        ({"shuffle_labels": True}, "shuffle_labels needs learning_rates"),
        ({"learning_rates": {"hinge": 0.1}}, "learning_rates must give a rate"),
        ({"rates": (1.5,)}, "rate must lie in"),
    ],
)
def test_bad_comparisons(change, message):
    options = {"losses": ("linear_core",), "rates": (0.0,), "seeds": (0,), "recipe": RECIPE}
    with pytest.raises(ValueError, match=message):
        compare_losses(*blobs(), *blobs(), **(options | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3)}, "x must be a floating"),
        ({"x": torch.ones(3, 2, dtype=torch.long)}, "x must be a floating"),
        ({"labels": torch.zeros(2, 3, dtype=torch.long)}, r"labels must be \[R, n\]"),
        ({"learning_rates": [0.1, 0.2]}, "one rate a seed"),
    ],
)
def test_bad_ensembles(change, message):
    good = {
        "x": torch.ones(3, 2), "labels": torch.zeros(1, 3, dtype=torch.long), "loss": "hinge",
        "learning_rates": [0.1], "seeds": [0], "recipe": RECIPE, "n_classes": 2,
    }  # fmt: skip
    call = good | change
    with pytest.raises(ValueError, match=message):
        train_ensemble(call.pop("x"), call.pop("labels"), **call)


def test_labels_must_match_features():
    x, y = blobs()
    with pytest.raises(ValueError, match="labels must match features"):
        compare_losses(x, y[:-1], x, y, recipe=RECIPE)


def test_run_is_plain_data():
    run = Run("hinge", 0.4, 0, False, 0.1, 0.39, 0.8, 0.5)
    assert dataclasses.asdict(run)["accuracy"] == 0.8


def test_average_pool_by_hand():
    images = np.arange(32, dtype=np.float32).reshape(2, 4, 4)
    pooled = average_pool(images, 2)
    assert pooled.tolist() == [[[2.5, 4.5], [10.5, 12.5]], [[18.5, 20.5], [26.5, 28.5]]]
    assert (average_pool(images, 1) == images).all()
    for bad, factor in ((images, 3), (images, 0), (images[0], 2)):
        with pytest.raises(ValueError, match="must divide"):
            average_pool(bad, factor)


def test_slope_samples_split_by_flips():
    x, y = blobs(400)
    recipe = Recipe(hidden=8, epochs=4, batch_size=20)
    rates = {"cross_entropy": 0.05, "linear_core": 0.05}
    found = slope_samples(x, y, learning_rates=rates, rate=0.3, seed=3, recipe=recipe)
    assert list(found) == list(rates)
    for clean, flipped in found.values():
        assert len(clean) + len(flipped) == 400
        assert 60 < len(flipped) < 180
        assert flipped.mean() > clean.mean(), "wrong labels pull harder"
        assert min(clean.min(), flipped.min()) >= 0
        assert max(clean.max(), flipped.max()) <= 1


def test_scores_in_blocks_equal_scores_one_by_one():
    x, y = blobs(5000)
    features = torch.from_numpy(x)
    ensemble = train_ensemble(
        features[:40], torch.from_numpy(y[:40]).expand(2, -1), loss="hinge",
        learning_rates=[0.1, 0.01], seeds=[0, 1], recipe=RECIPE, n_classes=K,
    )  # fmt: skip
    scores = ensemble.logits(features)  # 5,000 rows: more than one block
    for index in range(2):
        with torch.no_grad():
            expected = ensemble.member(index)(features)
        torch.testing.assert_close(scores[index], expected)
    assert ensemble.logits(features[:0]).shape == (2, 0, K)
