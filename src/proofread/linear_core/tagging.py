"""Sequence tagging with five losses: the same model, data and update, another loss.

The model scores a tag by its word and by the tag before it: ``h(y) = Σ_t E[x_t, y_t] +
Σ_t A[y_{t-1}, y_t]`` with a table E of words by tags and transitions A. A step draws a batch of
sentences, takes the loss's gradient and moves both tables by plain SGD, touching the rows of the
words that occurred and those entries of A that the gradient holds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .brown import load_brown
from .chains import linear_chain_nll, structured_hinge_loss, viterbi
from .hmm import HiddenMarkovModel
from .structured import Transitions, structured_linear_core_loss


@dataclass(frozen=True)
class Batch:
    """What a loss sees.

    Attributes:
        emissions: ``[B, T, K]``.
        tags: ``[B, T]`` gold tags; anything where the mask is False.
        mask: ``[B, T]`` bool, True on a prefix; None if all sentences are equally long.
        transitions: A.
        generator: source of sampled alternatives.
    """

    emissions: Tensor
    tags: Tensor
    mask: Tensor | None
    transitions: Transitions
    generator: torch.Generator


@dataclass(frozen=True)
class Method:
    """A structured loss, as the comparison needs it.

    Attributes:
        name: name in tables and figures.
        loss: the loss of a batch, a scalar. All are on one scale: at zero scores the gradient of a
            gold emission is of order 1/B, and K/B for the sum of margins.
        rates: learning rates to choose from.
    """

    name: str
    loss: Callable[[Batch], Tensor]
    rates: tuple[float, ...]


def _sampled_sequences(b: Batch) -> Tensor:
    # an average over K^T sequences: times K, the gold emission's gradient is of order 1
    return b.emissions.shape[2] * structured_linear_core_loss(
        b.emissions, b.tags, b.transitions, mask=b.mask, generator=b.generator
    )


def _constrained_positions(b: Batch) -> Tensor:
    return structured_linear_core_loss(
        b.emissions, b.tags, b.transitions, mask=b.mask, over="positions", average=False
    )


def _sampled_positions(b: Batch) -> Tensor:
    return structured_linear_core_loss(
        b.emissions,
        b.tags,
        b.transitions,
        mask=b.mask,
        over="positions",
        form="sum",
        method="sampled",
        average=False,
        generator=b.generator,
    )


def _structured_svm(b: Batch) -> Tensor:
    return structured_hinge_loss(b.emissions, b.tags, b.transitions, mask=b.mask)


def _crf(b: Batch) -> Tensor:
    return linear_chain_nll(b.emissions, b.tags, b.transitions, mask=b.mask)


#: Decoding is exact, so it costs more than training: so many of a corpus's sentences are decoded.
TEST_SENTENCES = 500

#: For accuracies that do not depend on the processor.
DOUBLE = torch.float64

METHODS: dict[str, Method] = {
    "sampled_sequences": Method(
        "Linear-Core, constrained, sampled sequences", _sampled_sequences, (1e-5, 1e-4, 1e-3, 1e-2)
    ),
    "constrained_positions": Method(
        "Linear-Core, constrained, positions", _constrained_positions, (0.1, 1.0, 10.0, 100.0)
    ),
    "sampled_positions": Method(
        "Linear-Core, sum of margins, sampled positions",
        _sampled_positions,
        (3e-4, 3e-3, 0.03, 0.3),
    ),
    "structured_svm": Method("structured SVM, Viterbi", _structured_svm, (0.01, 0.1, 1.0, 10.0)),
    "crf": Method("CRF", _crf, (0.1, 1.0, 10.0, 100.0)),
}


# --- the task -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Sentences to train and to test on.

    Attributes:
        n_words: V, size of the vocabulary.
        n_tags: K.
        words: ``[n, T]`` training words.
        tags: ``[n, T]`` their tags.
        mask: ``[n, T]`` True on each sentence, None if all have T words.
        test_words: ``[m, T]``; and ``test_tags`` and ``test_mask`` likewise.
        label: what the data are, for captions.
        model: the hidden Markov model that drew them, if one did.
    """

    n_words: int
    n_tags: int
    words: Tensor
    tags: Tensor
    mask: Tensor | None
    test_words: Tensor
    test_tags: Tensor
    test_mask: Tensor | None
    label: str
    model: HiddenMarkovModel | None = None

    @classmethod
    def draw(
        cls, n_tags: int, seed: int, *, n_train: int = 5000, n_test: int = 100, length: int = 32
    ) -> Task:
        """A random language with ``n_tags`` tags, and sentences of ``length`` words.

        Raises:
            ValueError: fewer than 2 tags, no sentences, or a length below 1.
        """
        if n_tags < 2:
            raise ValueError(f"n_tags={n_tags} must be at least 2")
        if n_train < 1 or n_test < 1:
            raise ValueError(f"n_train={n_train} and n_test={n_test} must be at least 1")
        model = HiddenMarkovModel.random(n_tags, seed=seed)
        words, tags = model.sample(n_train, length, seed=2 * seed + 1)
        test_words, test_tags = model.sample(n_test, length, seed=2 * seed + 2)
        return cls(
            n_words=model.n_words,
            n_tags=n_tags,
            words=torch.from_numpy(words),
            tags=torch.from_numpy(tags),
            mask=None,
            test_words=torch.from_numpy(test_words),
            test_tags=torch.from_numpy(test_tags),
            test_mask=None,
            label=f"synthetic language, {n_tags} tags, {model.n_words} words",
            model=model,
        )

    def references(self) -> dict[str, float]:
        """Accuracies that no training changes: the best tagger that sees single words, and Viterbi
        with the true model on the test sentences. Where no model is known, the accuracy of each
        word's most frequent tag in training.
        """
        if self.model is None:
            return {"most frequent tag of the word": self._most_frequent()}
        words, tags = self.test_words.numpy(), self.test_tags.numpy()
        return {
            "best from the word alone": self.model.word_only_accuracy(),
            "true model": self.model.viterbi_accuracy(words, tags),
        }

    def _most_frequent(self) -> float:
        counts = torch.zeros(self.n_words, self.n_tags, dtype=torch.int32)
        kept = torch.ones_like(self.words, dtype=torch.bool) if self.mask is None else self.mask
        one = torch.ones(int(kept.sum()), dtype=torch.int32)
        counts.index_put_((self.words[kept], self.tags[kept]), one, accumulate=True)
        hits = counts.argmax(1)[self.test_words] == self.test_tags
        return float((hits if self.test_mask is None else hits[self.test_mask]).double().mean())


def task_of(corpus: str, n_tags: int) -> Callable[[int], Task]:
    """The tasks of a corpus, by seed: a synthetic language each, or a split of Brown each.

    Args:
        corpus: ``"synthetic"`` or ``"brown"``; see ``brown.find_brown`` for where it is looked for.
        n_tags: K of the synthetic languages; the Brown corpus has its own.

    Raises:
        ValueError: another corpus.
    """
    if corpus == "synthetic":
        return partial(Task.draw, n_tags)
    if corpus != "brown":
        raise ValueError(f'corpus must be "synthetic" or "brown", got {corpus!r}')

    def split(seed: int) -> Task:
        found = load_brown(seed=seed)
        return Task(
            n_words=len(found.vocabulary),
            n_tags=len(found.tagset),
            words=torch.from_numpy(found.words),
            tags=torch.from_numpy(found.tags),
            mask=torch.from_numpy(found.mask),
            test_words=torch.from_numpy(found.test_words[:TEST_SENTENCES]),
            test_tags=torch.from_numpy(found.test_tags[:TEST_SENTENCES]),
            test_mask=torch.from_numpy(found.test_mask[:TEST_SENTENCES]),
            label=f"{found.label}; {TEST_SENTENCES} test sentences used",
        )

    return split


class Tagger:
    """The two tables, all zero at first.

    Args:
        n_words: rows of ``word_scores`` ``[V, K]``.
        n_tags: K.
        dtype: float32 by default.
    """

    def __init__(self, n_words: int, n_tags: int, dtype: torch.dtype = torch.float32) -> None:
        self.word_scores = torch.zeros(n_words, n_tags, dtype=dtype)
        self.transitions = Transitions(n_tags, dtype=dtype)

    def step(
        self,
        loss: Callable[[Batch], Tensor],
        task: Task,
        rows: Tensor,
        lr: float,
        g: torch.Generator,
    ) -> bool:
        """One step of plain SGD on the training sentences ``rows`` ``[B]``.

        Returns:
            False if the loss is not finite: then nothing has been changed.
        """
        words = task.words[rows]
        mask = None if task.mask is None else task.mask[rows]
        emissions = self.word_scores[words].requires_grad_()  # [B, T, K]
        self.transitions.zero_grad()
        value = loss(Batch(emissions, task.tags[rows], mask, self.transitions, g))
        if not math.isfinite(value.item()):
            return False
        value.backward()
        assert emissions.grad is not None
        self.word_scores.index_add_(0, words.flatten(), emissions.grad.flatten(0, 1), alpha=-lr)
        self.transitions.apply_gradient(lr)
        return True

    @torch.no_grad()
    def accuracy(self, task: Task) -> float:
        """Share of the test sentences' tags that Viterbi decoding gets right."""
        right = total = 0
        for part in torch.arange(len(task.test_words)).split(100):
            mask = None if task.test_mask is None else task.test_mask[part]
            scores = self.word_scores[task.test_words[part]]
            found, _ = viterbi(scores, self.transitions.dense(), mask)
            hits = found == task.test_tags[part]
            right += int(hits.sum() if mask is None else hits[mask].sum())
            total += hits.numel() if mask is None else int(mask.sum())
        return right / total


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Accuracy along one training.

    Attributes:
        method: key of the method.
        seed: of task, batches and samples.
        lr: learning rate.
        steps: steps done at each checkpoint.
        seconds: seconds of training until then; evaluation is not counted.
        accuracy: on the test sentences; 0 from where the loss stopped being finite.
    """

    method: str
    seed: int
    lr: float
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    accuracy: tuple[float, ...]


def train(
    task: Task,
    method: str,
    *,
    lr: float,
    seed: int,
    steps: Sequence[int] = (),
    seconds: Sequence[float] = (),
    batch_size: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Curve:
    """Train a tagger, and test it at given numbers of steps or seconds.

    Args:
        task: the language.
        method: key of ``METHODS``.
        lr: learning rate, constant.
        seed: of batches and sampled alternatives.
        steps: increasing numbers of steps at which to test; training ends at the last.
        seconds: in their place, increasing seconds of training time.
        batch_size: sentences a step.
        dtype: of both tables; float64 gives accuracies that do not depend on the processor.

    Raises:
        ValueError: an unknown method, both or neither of ``steps`` and ``seconds``, or checkpoints
            that do not increase.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {sorted(METHODS)}, got {method!r}")
    marks = _checked_marks(steps, seconds)
    _check_sizes(lr, batch_size)
    g = torch.Generator().manual_seed(seed)
    tagger, loss = Tagger(task.n_words, task.n_tags, dtype), METHODS[method].loss
    done, spent, alive = 0, 0.0, True
    found: list[tuple[int, float, float]] = []
    for mark in marks:
        while alive and (done if steps else spent) < mark:
            rows = torch.randint(len(task.words), (batch_size,), generator=g)
            start = time.perf_counter()
            alive = tagger.step(loss, task, rows, lr, g)
            spent += time.perf_counter() - start
            done += 1
        accuracy = tagger.accuracy(task) if alive else 0.0
        found.append((done, spent, accuracy))
    return Curve(method, seed, lr, *zip(*found, strict=True))


def _checked_marks(steps: Sequence[int], seconds: Sequence[float]) -> list[float]:
    if not isinstance(steps, Sequence) or not isinstance(seconds, Sequence):
        raise TypeError("steps and seconds must be sequences of checkpoints, such as (100, 200)")
    if bool(steps) == bool(seconds):
        raise ValueError("give either steps or seconds, the checkpoints of the training")
    marks = list(steps or seconds)
    if not all(0 < mark < math.inf for mark in marks) or any(
        a >= b for a, b in itertools.pairwise(marks)
    ):
        raise ValueError(f"checkpoints must be positive, finite and increase, got {marks}")
    if steps and not all(isinstance(mark, int) for mark in marks):
        raise ValueError(f"steps must be whole numbers, got {marks}")
    return marks


def _check_sizes(lr: float, batch_size: int) -> None:
    if not 0 < lr < math.inf:
        raise ValueError(f"lr={lr} must be finite and positive")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be a whole number, at least 1")


def choose_rate(task: Task, method: str, *, seed: int, **options: Any) -> float:
    """The method's learning rate with the best last accuracy on a task used for nothing else."""
    for name in ("steps", "seconds"):
        options[name] = tuple(options.get(name, ()))[-1:]  # only the last is looked at
    curves = [train(task, method, lr=lr, seed=seed, **options) for lr in METHODS[method].rates]
    return max(curves, key=lambda curve: curve.accuracy[-1]).lr


def compare_methods(
    task: Callable[[int], Task],
    *,
    methods: Iterable[str] = METHODS,
    seeds: Sequence[int] = range(5),
    selection_seed: int = 1000,
    rates: Mapping[str, float] | None = None,
    **options: Any,
) -> list[Curve]:
    """Curves of each method on one task a seed, each with its own learning rate.

    Args:
        task: the task of a seed, for instance ``lambda seed: Task.draw(100, seed)``.
        methods: keys of ``METHODS``.
        seeds: of tasks, batches and samples.
        selection_seed: of the task on which the learning rates are chosen.
        rates: learning rates by method, in place of the choice.
        options: of ``train``: checkpoints, batch size, dtype.

    Raises:
        ValueError: repeated seeds, the selection seed among them, a method without a rate, and as
            ``train``.
    """
    if not seeds or len(set(seeds)) != len(seeds) or selection_seed in seeds:
        raise ValueError("seeds must be distinct, at least one, and not hold the selection seed")
    methods = [methods] if isinstance(methods, str) else list(methods)
    if unknown := sorted(set(methods) - set(METHODS)):
        raise ValueError(f"methods must be among {sorted(METHODS)}, got {', '.join(unknown)}")
    if rates is not None and (missing := sorted(set(methods) - set(rates))):
        raise ValueError(f"rates must give a learning rate for {', '.join(missing)}")
    trial = task(selection_seed) if rates is None else None
    tasks = {seed: task(seed) for seed in seeds}
    curves = []
    with _progress(len(methods) * (1 + len(seeds))) as bar:
        for method in methods:
            if trial is not None:
                lr = choose_rate(trial, method, seed=selection_seed, **options)
            else:
                lr = (rates or {})[method]
            bar.update()
            for seed, given in tasks.items():
                curves.append(train(given, method, lr=lr, seed=seed, **options))
                bar.update()
    return curves


def mean_references(tasks: Iterable[Task]) -> dict[str, float]:
    """Means of ``Task.references``."""
    found = [task.references() for task in tasks]
    return {name: float(np.mean([each[name] for each in found])) for name in found[0]}


def final_accuracies(curves: Iterable[Curve]) -> dict[str, np.ndarray]:
    """Last accuracies by method, in the order of the seeds: ``[S]`` each."""
    found: dict[str, list[float]] = {}
    for curve in curves:
        found.setdefault(curve.method, []).append(curve.accuracy[-1])
    return {method: np.array(values) for method, values in found.items()}


def contenders(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names in recorded times of steps: the methods in their order, then the others."""
    recorded = {name for case in cases for name in case["milliseconds"]}
    known = [method.name for method in METHODS.values() if method.name in recorded]
    return known + sorted(recorded - set(known))


def at_edge(curves: Iterable[Curve]) -> list[str]:
    """Methods whose learning rate was the smallest or largest of its grid: a grid too narrow."""
    chosen = {curve.method: curve.lr for curve in curves}
    return [
        f"{METHODS[method].name} ({lr:g})"
        for method, lr in chosen.items()
        if lr in (min(METHODS[method].rates), max(METHODS[method].rates))
    ]


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="methods × seeds", disable=None)
