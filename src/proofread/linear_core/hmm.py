"""A synthetic tagging task with a known optimum: a hidden Markov model over tags and words.

Each of K tags has a few likely successors and emits a few words; each word is shared by a few tags,
so that the word alone leaves the tag open and its neighbours decide. All laws are stored sparsely:
O(K) numbers for any K; a dense ``[K, K]`` matrix is made only when asked for.

The best achievable accuracies are known: of a tagger that sees one word
(``word_only_accuracy``, exact), and of one that sees the sentence and knows the model
(``posterior_accuracy``, tag by tag; ``viterbi_accuracy``, whole sequences). As a word admits few
tags, exact inference here runs over those alone: O(T·a²) a sentence for a tags a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 20  # numbers in one batch of exact inference or sampling
WORD_CONCENTRATION = 0.5  # of the Dirichlet law of a tag's words; successors have 1, the uniform
LEAST_SMOOTHING = 1e-3  # keeps the power iteration for the stationary law below 35,000 steps
STATIONARY_ERROR = 1e-15  # bound on the total variation left by the power iteration

# Log scores [n, T, a] and links [n, T-1, a, a] to the chosen candidate at each position, [n, T].
Decoder = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class HiddenMarkovModel:
    """Tags that follow a sparse law mixed with a uniform one, and words that tags share.

    The next tag is one of ``successors[tag]`` with probability ``1 - smoothing``, else uniform over
    all K tags; the word is one of ``words[tag]``. The first tag has the stationary law.

    Attributes:
        successors: ``[K, S]`` int64, distinct in each row.
        successor_probability: ``[K, S]`` float64, rows of sum 1.
        words: ``[K, W]`` int64, distinct in each row.
        word_probability: ``[K, W]`` float64, rows of sum 1.
        n_words: size V of the vocabulary.
        smoothing: share of uniform transitions, in [0.001, 1].
    """

    successors: np.ndarray
    successor_probability: np.ndarray
    words: np.ndarray
    word_probability: np.ndarray
    n_words: int
    smoothing: float

    def __post_init__(self) -> None:
        _check_rows("successors", self.successors, self.successor_probability, len(self.successors))
        _check_rows("words", self.words, self.word_probability, self.n_words)
        if len(self.words) != len(self.successors):
            raise ValueError(
                f"words has {len(self.words)} rows but successors has {len(self.successors)}: give "
                "each tag one row of both"
            )
        if not LEAST_SMOOTHING <= self.smoothing <= 1:
            raise ValueError(
                f"smoothing must lie in [{LEAST_SMOOTHING}, 1], got {self.smoothing}: without it "
                "the stationary law need not be unique"
            )

    @classmethod
    def random(
        cls,
        n_tags: int,
        *,
        successors: int = 5,
        words_per_tag: int = 3,
        ambiguity: int = 3,
        smoothing: float = 0.4,
        seed: int,
    ) -> HiddenMarkovModel:
        """A model with random successors and words; their weights have Dirichlet laws.

        With the defaults and K from 100 to 4000, the best tagger that sees one word gets about 63 %
        of the tags, and the best one that sees the sentence (32 words) 88 to 93 %.

        The vocabulary has ``words_per_tag·ceil(n_tags/ambiguity)`` words, each shared by
        ``ambiguity`` tags (fewer for the last ones): about as many words as tags by default.

        Args:
            n_tags: K ≥ 1.
            successors: likely next tags of each tag, 1 to K (more are cut to K).
            words_per_tag: words that each tag emits.
            ambiguity: tags that share a word.
            smoothing: share of uniform transitions, in [0.001, 1].
            seed: of this call's generator; equal arguments give equal models.

        Raises:
            ValueError: a count below 1, ``smoothing`` outside [0.001, 1].
        """
        counts = {"n_tags": n_tags, "successors": successors, "words_per_tag": words_per_tag}
        for name, count in (counts | {"ambiguity": ambiguity}).items():
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        rng = np.random.default_rng(seed)
        following = _distinct(rng, n_tags, min(successors, n_tags))
        per_slot = -(-n_tags // ambiguity)  # words of one slot of all tags
        # In each slot the tags are dealt at random into groups that share a word.
        groups = [rng.permutation(n_tags) // ambiguity for _ in range(words_per_tag)]
        words = np.stack([group + slot * per_slot for slot, group in enumerate(groups)], axis=1)
        return cls(
            successors=following,
            successor_probability=_weights(rng, (n_tags, following.shape[1]), 1.0),
            words=words,
            word_probability=_weights(rng, (n_tags, words_per_tag), WORD_CONCENTRATION),
            n_words=words_per_tag * per_slot,
            smoothing=smoothing,
        )

    @property
    def n_tags(self) -> int:
        """K."""
        return len(self.successors)

    @cached_property
    def stationary(self) -> np.ndarray:
        """``[K]`` float64: the law ``π`` with ``πP = π``, by power iteration.

        The distance to ``π`` shrinks by ``1 - smoothing`` a step, so the number of steps is known.
        """
        law = np.full(self.n_tags, 1 / self.n_tags)
        steps = 1
        if self.smoothing < 1:
            steps = int(np.ceil(np.log(STATIONARY_ERROR) / np.log1p(-self.smoothing)))
        for _ in range(steps):
            law = self._advance(law)
        return law / law.sum()

    def _advance(self, law: np.ndarray) -> np.ndarray:
        """``law·P``, O(K·S)."""
        flow = law[:, None] * self.successor_probability
        sparse = np.bincount(self.successors.ravel(), flow.ravel(), minlength=self.n_tags)
        return (1 - self.smoothing) * sparse + self.smoothing * law.sum() / self.n_tags

    def transition_matrix(self) -> np.ndarray:
        """``[K, K]`` float64 probabilities, from row to column: 8·K² bytes."""
        matrix = np.full((self.n_tags, self.n_tags), self.smoothing / self.n_tags)
        rows = np.arange(self.n_tags)[:, None]
        matrix[rows, self.successors] += (1 - self.smoothing) * self.successor_probability
        return matrix

    def emission_matrix(self) -> np.ndarray:
        """``[K, V]`` float64 probabilities of the words: 8·K·V bytes."""
        matrix = np.zeros((self.n_tags, self.n_words))
        matrix[np.arange(self.n_tags)[:, None], self.words] = self.word_probability
        return matrix

    # --- samples ----------------------------------------------------------------------------------

    def sample(self, n_sequences: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw sentences.

        Args:
            n_sequences: n ≥ 0.
            length: T ≥ 1 words in each.
            seed: of this call's generator; equal arguments give equal samples.

        Returns:
            ``(words, tags)``, each ``[n, T]`` int64.

        Raises:
            ValueError: ``n_sequences`` < 0 or ``length`` < 1.
        """
        if n_sequences < 0 or length < 1:
            raise ValueError(
                "n_sequences must be at least 0 and length at least 1, got "
                f"{n_sequences} and {length}"
            )
        rng = np.random.default_rng(seed)
        tags = np.empty((n_sequences, length), dtype=np.int64)
        start = np.cumsum(self.stationary)
        tags[:, 0] = np.searchsorted(start[:-1], rng.random(n_sequences), side="right")
        steps = np.cumsum(self.successor_probability, axis=1)  # [K, S]
        for t in range(1, length):
            tags[:, t] = self._next(rng, tags[:, t - 1], steps)
        return self._words_of(rng, tags), tags

    def _next(self, rng: np.random.Generator, tags: np.ndarray, steps: np.ndarray) -> np.ndarray:
        slot = _invert(steps[tags], rng.random(len(tags)))
        uniform = rng.integers(self.n_tags, size=len(tags))
        return np.where(
            rng.random(len(tags)) < self.smoothing, uniform, self.successors[tags, slot]
        )

    def _words_of(self, rng: np.random.Generator, tags: np.ndarray) -> np.ndarray:
        steps = np.cumsum(self.word_probability, axis=1)  # [K, W]
        slot = _invert(steps[tags], rng.random(tags.shape))
        return self.words[tags, slot]

    # --- what can be achieved ---------------------------------------------------------------------

    @cached_property
    def _sharing(self) -> tuple[np.ndarray, np.ndarray]:
        """``[V, a]`` tags that may emit each word and their probabilities of it (0 for padding)."""
        order = np.argsort(self.words, axis=None, kind="stable")
        word = self.words.ravel()[order]  # sorted
        first = np.searchsorted(word, np.arange(self.n_words))
        place = np.arange(len(word)) - first[word]
        width = int(place.max()) + 1
        tags = np.zeros((self.n_words, width), dtype=np.int64)
        probability = np.zeros((self.n_words, width))
        tags[word, place] = order // self.words.shape[1]
        probability[word, place] = self.word_probability.ravel()[order]
        return tags, probability

    def word_only_accuracy(self) -> float:
        """Exact accuracy of the best tagger that sees one word, under the stationary law.

        ``Σ_w max_k π(k)·P(w | k)``.
        """
        tags, probability = self._sharing
        return float((self.stationary[tags] * probability).max(axis=1).sum())

    def log_scores(
        self, words: np.ndarray, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own scores, for ``chains.viterbi`` and ``chains.log_partition``.

        The sum of a sequence's scores is ``log P(tags, words)``; the first position's emissions
        include the stationary law.

        Args:
            words: ``[n, T]`` integers in [0, V).
            dtype: float32 (default) or float64.

        Returns:
            ``(emissions, transitions)``: ``[n, T, K]``, ``-inf`` for tags that cannot emit the
            word, and ``[K, K]``.

        Raises:
            TypeError: words that are not integers.
            ValueError: words that are not ``[n, T]``, or not in [0, V).
        """
        import torch

        words = self._checked("words", words, self.n_words)
        dtype = dtype or torch.float32
        tags, scores = self._lattice(words)
        # One more column takes the padding of words that fewer tags share.
        emissions = torch.full((*words.shape, self.n_tags + 1), -torch.inf, dtype=dtype)
        index = torch.from_numpy(np.where(scores == -np.inf, self.n_tags, tags))
        emissions.scatter_(2, index, torch.from_numpy(scores).to(dtype))
        transitions = torch.from_numpy(np.log(self.transition_matrix())).to(dtype)
        return emissions[..., : self.n_tags].contiguous(), transitions

    def posterior_accuracy(self, words: np.ndarray, tags: np.ndarray) -> float:
        """Share of tags that the most probable tag at each position, given the sentence, gets.

        No tagger has a higher expected accuracy.

        Args:
            words: ``[n, T]`` integers in [0, V), from ``sample``.
            tags: ``[n, T]`` integers in [0, K).

        Raises:
            TypeError: words or tags that are not integers.
            ValueError: values out of range, shapes that differ, nothing to count.
        """
        return self._accuracy(words, tags, _posterior_slots)

    def viterbi_accuracy(self, words: np.ndarray, tags: np.ndarray) -> float:
        """Share of tags that the most probable sequence, given the sentence, gets.

        Arguments and errors are those of ``posterior_accuracy``.
        """
        return self._accuracy(words, tags, _viterbi_slots)

    def _accuracy(self, words: np.ndarray, tags: np.ndarray, decode: Decoder) -> float:
        words = self._checked("words", words, self.n_words)
        tags = self._checked("tags", tags, self.n_tags)
        if words.shape != tags.shape or not words.size:
            raise ValueError(
                "words and tags must be alike and not empty, got shapes "
                f"{words.shape} and {tags.shape}"
            )
        right = 0
        for rows in self._chunks(words.shape):
            candidates, scores = self._lattice(words[rows])
            slot = decode(scores, self._links(candidates))
            chosen = np.take_along_axis(candidates, slot[..., None], axis=2)[..., 0]
            right += int((chosen == tags[rows]).sum())
        return right / words.size

    def _chunks(self, shape: tuple[int, ...]) -> Iterator[slice]:
        """Rows of [n, T] words whose comparisons [rows, T, a, a, S] fit in a chunk."""
        width, following = self._sharing[0].shape[1], self.successors.shape[1]
        step = max(1, CHUNK // (shape[1] * width * width * following))
        return (slice(i, i + step) for i in range(0, shape[0], step))

    def _lattice(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``[n, T, a]``: tags that may emit each word, and their log scores without transitions."""
        tags, probability = (table[words] for table in self._sharing)
        with np.errstate(divide="ignore"):
            scores = np.log(probability)
            scores[:, 0] += np.log(self.stationary)[tags[:, 0]]
        return tags, scores

    def _links(self, tags: np.ndarray) -> np.ndarray:
        """``[n, T-1, a, a]`` log transition probabilities between neighbouring candidates."""
        before, after = tags[:, :-1, :, None], tags[:, 1:, None, :]
        match = self.successors[before] == after[..., None]  # [n, T-1, a, a, S]
        share = (match * self.successor_probability[before]).sum(axis=-1)
        return np.log(self.smoothing / self.n_tags + (1 - self.smoothing) * share)

    def _checked(self, name: str, values: np.ndarray, count: int) -> np.ndarray:
        values = np.asarray(values)
        if values.ndim != 2 or values.shape[1] == 0:
            raise ValueError(f"{name} must be [n, T] with T ≥ 1, got shape {values.shape}")
        if not np.issubdtype(values.dtype, np.integer):
            raise TypeError(f"{name} must be integers, got {values.dtype}")
        if values.size and not (values.min() >= 0 and values.max() < count):
            raise ValueError(
                f"{name} must lie in [0, {count}), got {values.min()} to {values.max()}"
            )
        return values


# --- exact inference over the candidates ----------------------------------------------------------


def _posterior_slots(scores: np.ndarray, links: np.ndarray) -> np.ndarray:
    """Forward-backward on logarithms: the most probable candidate at each position, [n, T]."""
    forward, backward = scores.copy(), np.zeros_like(scores)
    for t in range(1, scores.shape[1]):
        forward[:, t] += np.logaddexp.reduce(forward[:, t - 1, :, None] + links[:, t - 1], axis=1)
    for t in range(scores.shape[1] - 1, 0, -1):
        ahead = scores[:, t] + backward[:, t]
        backward[:, t - 1] = np.logaddexp.reduce(links[:, t - 1] + ahead[:, None], axis=2)
    return (forward + backward).argmax(axis=2)


def _viterbi_slots(scores: np.ndarray, links: np.ndarray) -> np.ndarray:
    """The most probable sequence of candidates, [n, T]."""
    best = scores.copy()  # of the rest of the sentence, from each candidate on
    for t in range(scores.shape[1] - 1, 0, -1):
        best[:, t - 1] += (links[:, t - 1] + best[:, t, None]).max(axis=2)
    slots = np.empty(scores.shape[:2], dtype=np.int64)
    slots[:, 0] = best[:, 0].argmax(axis=1)
    rows = np.arange(len(scores))
    for t in range(1, scores.shape[1]):
        slots[:, t] = (links[rows, t - 1, slots[:, t - 1]] + best[:, t]).argmax(axis=1)
    return slots


# --- random laws ----------------------------------------------------------------------------------


def _distinct(rng: np.random.Generator, n: int, count: int) -> np.ndarray:
    """``[n, count]``: in each row ``count`` of ``n`` numbers, without repetition (Floyd 1987)."""
    chosen = np.empty((n, count), dtype=np.int64)
    for place, top in enumerate(range(n - count, n)):
        drawn = rng.integers(top + 1, size=n)
        taken = (chosen[:, :place] == drawn[:, None]).any(axis=1)
        chosen[:, place] = np.where(taken, top, drawn)
    return chosen


def _weights(rng: np.random.Generator, shape: tuple[int, int], concentration: float) -> np.ndarray:
    """Rows of a symmetric Dirichlet law: the lower the concentration, the more uneven."""
    return rng.dirichlet(np.full(shape[1], concentration), size=shape[0])


def _invert(steps: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """The first index whose cumulative sum exceeds the draw; the last one whatever the rounding."""
    return (uniform[..., None] >= steps[..., :-1]).sum(axis=-1)


def _check_rows(name: str, values: np.ndarray, probability: np.ndarray, count: int) -> None:
    if values.ndim != 2 or values.shape != probability.shape or not values.size:
        raise ValueError(
            f"{name} and its probabilities must be alike, [K, n] with K, n ≥ 1, got shapes "
            f"{values.shape} and {probability.shape}"
        )
    if not (values.min() >= 0 and values.max() < count):
        raise ValueError(f"{name} must lie in [0, {count}), got {values.min()} to {values.max()}")
    ordered = np.sort(values, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError(f"{name} must be distinct in each row: add up their probabilities")
    if not ((probability >= 0).all() and np.allclose(probability.sum(axis=1), 1)):
        raise ValueError(f"{name}' probabilities must not be negative and sum to 1 in each row")
