"""Tagging: one step by hand, the trainings' bookkeeping, and what the methods must reach."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch

from proofread.linear_core.tagging import (
    METHODS,
    Batch,
    Curve,
    Tagger,
    Task,
    at_edge,
    choose_rate,
    compare_methods,
    final_accuracies,
    mean_references,
    train,
)

DRAW = partial(Task.draw, n_train=300, n_test=20, length=8)


def tiny(mask: list[list[bool]] | None = None) -> Task:
    """Two sentences of two words over 3 words and 2 tags; the word decides the tag."""
    words, tags = torch.tensor([[0, 1], [2, 0]]), torch.tensor([[0, 1], [1, 0]])
    cut = None if mask is None else torch.tensor(mask)
    return Task(3, 2, words, tags, cut, words, tags, cut, "made up")


def test_one_step_of_the_structured_svm_by_hand():
    """All scores zero: loss-augmented Viterbi finds the sentence with both tags wrong, (1, 0).

    So the emissions' gradient is +1 at the wrong tag and -1 at the gold one, A's is +1 at (1, 0)
    and -1 at the gold pair (0, 1), and a step of 0.5 moves by half of that.
    """
    tagger, g = Tagger(3, 2, torch.float64), torch.Generator()
    assert tagger.step(METHODS["structured_svm"].loss, tiny(), torch.tensor([0]), 0.5, g)
    assert tagger.word_scores.tolist() == [[0.5, -0.5], [-0.5, 0.5], [0, 0]]
    assert tagger.transitions.dense().tolist() == [[0, 0.5], [-0.5, 0]]


def test_a_word_that_stands_twice_gets_both_gradients():
    task = Task(
        1, 2, *(torch.tensor([[0, 0]]),) * 2, None, *(torch.tensor([[0, 0]]),) * 2, None, ""
    )
    tagger = Tagger(1, 2, torch.float64)
    tagger.step(METHODS["structured_svm"].loss, task, torch.tensor([0]), 1.0, torch.Generator())
    assert tagger.word_scores.tolist() == [[2, -2]]


def test_a_loss_that_is_not_finite_changes_nothing():
    tagger = Tagger(3, 2)

    def broken(batch: Batch) -> torch.Tensor:
        return batch.emissions.sum() * torch.inf

    assert not tagger.step(broken, tiny(), torch.tensor([0]), 1.0, torch.Generator())
    assert not tagger.word_scores.any()


def test_accuracy_counts_what_the_mask_keeps():
    tagger = Tagger(3, 2)
    tagger.word_scores[:] = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0]])  # word 1 is mis-tagged
    assert tagger.accuracy(tiny()) == 3 / 4
    assert tagger.accuracy(tiny([[True, False], [True, True]])) == 1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_what_the_word_tells(method):
    task = DRAW(6, seed=3)
    curve = train(task, method, lr=METHODS[method].rates[1], seed=0, steps=(1, 150))
    chance = 1 / 6
    assert curve.accuracy[-1] > max(curve.accuracy[0], 2 * chance)
    assert curve.steps == (1, 150)
    assert 0 < curve.seconds[0] < curve.seconds[1]


@pytest.mark.parametrize("method", METHODS)
def test_masked_sentences_train(method):
    task = tiny([[True, False], [True, True]])
    curve = train(task, method, lr=METHODS[method].rates[1], seed=0, steps=(40,), batch_size=2)
    assert curve.accuracy == (1.0,)


def test_equal_seeds_give_equal_trainings_and_float64_is_kept():
    task = DRAW(5, seed=0)
    options = {"lr": 0.03, "seed": 1, "steps": (20, 40), "dtype": torch.float64}
    first, second = (train(task, "sampled_positions", **options) for _ in range(2))
    assert first.accuracy == second.accuracy


def test_a_diverged_training_counts_as_zero_and_is_not_chosen():
    task = DRAW(8, seed=0)
    curve = train(task, "structured_svm", lr=3e38, seed=0, steps=(5, 200))
    assert curve.accuracy[-1] == 0
    assert (
        choose_rate(task, "structured_svm", seed=0, steps=(30,)) in METHODS["structured_svm"].rates
    )


def test_time_checkpoints_are_reached_and_not_much_exceeded():
    curve = train(DRAW(5, seed=0), "crf", lr=1.0, seed=0, seconds=(0.02, 0.05))
    assert 0.02 <= curve.seconds[0] < curve.seconds[1]
    assert curve.steps[0] < curve.steps[1]


def test_comparison_shares_tasks_and_tunes_on_another():
    seen = []

    def task(seed: int) -> Task:
        seen.append(seed)
        return DRAW(4, seed)

    methods = ("sampled_positions", "crf")
    curves = compare_methods(task, methods=methods, seeds=(0, 1), selection_seed=9, steps=(10,))
    assert seen == [9, 0, 1]
    assert [(c.method, c.seed) for c in curves] == [(m, s) for m in methods for s in (0, 1)]
    assert final_accuracies(curves)["crf"].tolist() == [c.accuracy[-1] for c in curves[2:]]


def test_references_come_from_the_model():
    tasks = [DRAW(4, seed) for seed in (0, 1)]
    found = mean_references(tasks)
    words = [task.model.word_only_accuracy() for task in tasks]
    assert found["best from the word alone"] == pytest.approx(np.mean(words))
    assert found["true model"] >= found["best from the word alone"] - 0.15


def test_without_a_model_the_reference_is_the_most_frequent_tag():
    """Words 0, 1, 2 have tags 0, 1, 1 in training; the mask hides the second word of the first."""
    assert tiny().references() == {"most frequent tag of the word": 1.0}
    masked = tiny([[True, False], [True, True]])  # word 1 is unseen: its first tag, 0, but masked
    assert mean_references([masked, tiny()]) == {"most frequent tag of the word": 1.0}
    task = dataclasses.replace(tiny(), tags=torch.tensor([[1, 1], [1, 0]]))  # word 0: once each way
    assert task.references() == {"most frequent tag of the word": 1.0}


def test_final_accuracies_keep_the_order_of_seeds():
    curves = [Curve("crf", s, 1.0, (1,), (1.0,), (a,)) for s, a in ((3, 0.5), (1, 0.7))]
    assert final_accuracies(curves)["crf"].tolist() == [0.5, 0.7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "perceptron", "steps": (1,)}, "method must be one of"),
        ({"method": "crf"}, "either steps or seconds"),
        ({"method": "crf", "steps": (1,), "seconds": (1.0,)}, "either steps or seconds"),
        ({"method": "crf", "steps": (3, 3)}, "increase"),
        ({"method": "crf", "steps": (0, 3)}, "positive"),
        ({"method": "crf", "seconds": (float("nan"),)}, "finite"),
        ({"method": "crf", "steps": (2.5, 3)}, "whole"),
        ({"method": "crf", "steps": (3,), "batch_size": 0}, "batch_size=0"),
        ({"method": "crf", "steps": (3,), "batch_size": 2.5}, "batch_size=2.5"),
    ],
)
def test_bad_training(options, message):
    with pytest.raises(ValueError, match=message):
        train(tiny(), lr=1.0, seed=0, **options)


@pytest.mark.parametrize("lr", [0, -1.0, float("nan"), float("inf")])
def test_bad_learning_rate(lr):
    with pytest.raises(ValueError, match="lr="):
        train(tiny(), "crf", lr=lr, seed=0, steps=(1,))


def test_checkpoints_are_sequences():
    with pytest.raises(TypeError, match="sequences of checkpoints"):
        train(tiny(), "crf", lr=1.0, seed=0, steps=5)


def test_bad_comparison_and_task():
    with pytest.raises(ValueError, match="selection seed"):
        compare_methods(partial(DRAW, 4), seeds=(0, 1), selection_seed=1, steps=(1,))
    with pytest.raises(ValueError, match="n_tags=1"):
        Task.draw(1, seed=0)
    with pytest.raises(ValueError, match="n_train=0"):
        Task.draw(4, seed=0, n_train=0)
    with pytest.raises(ValueError, match="methods must be among"):
        compare_methods(partial(DRAW, 4), methods="perceptron", steps=(1,))


def test_rates_at_the_edge_are_named():
    low, inner = METHODS["crf"].rates[0], METHODS["structured_svm"].rates[1]
    curves = [Curve("crf", 0, low, (1,), (1.0,), (0.5,))]
    curves += [Curve("structured_svm", 0, inner, (1,), (1.0,), (0.5,))]
    assert at_edge(curves) == [f"CRF ({low:g})"]


def test_given_rates_replace_the_choice():
    seen = []

    def task(seed: int) -> Task:
        seen.append(seed)
        return DRAW(4, seed)

    (curve,) = compare_methods(task, methods=["crf"], seeds=(3,), rates={"crf": 0.7}, steps=(1,))
    assert (seen, curve.lr) == ([3], 0.7)
    with pytest.raises(ValueError, match="learning rate for structured_svm"):
        compare_methods(task, methods=["structured_svm"], seeds=(3,), rates={"crf": 1}, steps=(1,))
