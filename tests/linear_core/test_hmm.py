"""The hidden Markov model against its dense laws, its samples, and inference on all tags."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from proofread.linear_core import chains
from proofread.linear_core import hmm as hmm_module
from proofread.linear_core.hmm import HiddenMarkovModel

SIZES = [(1, 1, 1, 1), (2, 2, 1, 2), (7, 3, 2, 3), (30, 5, 3, 3), (50, 50, 4, 7)]  # K, S, W, a
RECORDED = {
    "successors": [[4, 0], [3, 0], [2, 1], [1, 4], [1, 3], [0, 5]],
    "words": [[1, 5], [1, 5], [0, 4], [2, 3], [2, 4], [0, 3]],
    "sample_words": [[2, 5, 1, 4, 4], [5, 2, 0, 1, 0]],
    "sample_tags": [[3, 1, 0, 4, 2], [1, 3, 5, 0, 2]],
}


def model(k: int = 30, s: int = 5, w: int = 3, a: int = 3, seed: int = 0) -> HiddenMarkovModel:
    return HiddenMarkovModel.random(k, successors=s, words_per_tag=w, ambiguity=a, seed=seed)


def two_tags() -> HiddenMarkovModel:
    """From 0: to itself 0.7, to 1 0.3. From 1: 0.2 and 0.8. Words by hand too.

    With smoothing 0.2 the successors have 0.75, 0.25 and 0.125, 0.875.
    """
    return HiddenMarkovModel(
        successors=np.array([[0, 1], [1, 0]]),
        successor_probability=np.array([[0.75, 0.25], [0.875, 0.125]]),
        words=np.array([[0, 1], [1, 2]]),
        word_probability=np.array([[0.6, 0.4], [0.5, 0.5]]),
        n_words=3,
        smoothing=0.2,
    )


# --- two tags, by hand ----------------------------------------------------------------------------


def test_two_tags_laws() -> None:
    hmm = two_tags()
    np.testing.assert_allclose(hmm.transition_matrix(), [[0.7, 0.3], [0.2, 0.8]])
    np.testing.assert_allclose(hmm.emission_matrix(), [[0.6, 0.4, 0], [0, 0.5, 0.5]])
    np.testing.assert_allclose(hmm.stationary, [0.4, 0.6], rtol=1e-14)  # 0.3·π₀ = 0.2·π₁
    # word 0: 0.4·0.6; word 1: max(0.4·0.4, 0.6·0.5); word 2: 0.6·0.5
    assert hmm.word_only_accuracy() == pytest.approx(0.24 + 0.30 + 0.30, abs=1e-14)


def test_two_tags_scores_are_log_probabilities() -> None:
    """P(tags 0, 1 and words 1, 1) = 0.4·0.4·0.3·0.5; P(words 1, 1) sums four such terms."""
    words = np.array([[1, 1]])
    emissions, transitions = two_tags().log_scores(words, dtype=torch.float64)
    score = chains.path_score(emissions, torch.tensor([[0, 1]]), transitions)
    assert score.item() == pytest.approx(math.log(0.4 * 0.4 * 0.3 * 0.5), abs=1e-14)
    total = 0.16 * 0.7 * 0.4 + 0.16 * 0.3 * 0.5 + 0.3 * 0.2 * 0.4 + 0.3 * 0.8 * 0.5
    value = chains.log_partition(emissions, transitions)
    assert value.item() == pytest.approx(math.log(total), abs=1e-13)
    emissions, _ = two_tags().log_scores(np.array([[0]]))
    assert emissions.dtype == torch.float32
    assert emissions[0, 0, 1] == -math.inf


def test_two_tags_decoders() -> None:
    """Words 1, 1: of the four terms 0.0448, 0.024, 0.024, 0.12 the tags 1, 1 have most."""
    hmm = two_tags()
    words = np.array([[1, 1], [0, 1]])
    # Words 0, 1: the first tag is 0; the second 0 with 0.7·0.4 = 0.28 against 0.3·0.5.
    for accuracy in (hmm.posterior_accuracy, hmm.viterbi_accuracy):
        assert accuracy(words, np.array([[1, 1], [0, 0]])) == 1.0
        assert accuracy(words, np.array([[1, 0], [1, 0]])) == 0.5


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_rows_sum_to_one_and_the_stationary_law_stays(size: tuple[int, int, int, int]) -> None:
    hmm = model(*size)
    step, emit, law = hmm.transition_matrix(), hmm.emission_matrix(), hmm.stationary
    for matrix in (step, emit):
        assert (matrix >= 0).all()
        np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-13)
    np.testing.assert_allclose(law @ step, law, rtol=1e-12, atol=1e-15)
    assert law.sum() == pytest.approx(1, abs=1e-14)
    values, vectors = np.linalg.eig(step.T)
    leading = np.real(vectors[:, np.argmax(np.real(values))])
    np.testing.assert_allclose(law, leading / leading.sum(), rtol=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_sparse_rows_are_as_asked(size: tuple[int, int, int, int]) -> None:
    k, s, w, a = size
    hmm = model(*size)
    assert hmm.successors.shape == (k, s)
    assert hmm.words.shape == (k, w)
    assert hmm.n_tags == k
    assert hmm.n_words == w * -(-k // a)
    assert hmm.words.max() == hmm.n_words - 1
    for row in (*hmm.successors, *hmm.words):
        assert len(set(row.tolist())) == len(row)
    shared = np.bincount(hmm.words.ravel(), minlength=hmm.n_words)
    assert shared.max() == min(a, k)
    assert (shared == a).sum() >= w * (k // a)
    if k == s:  # all tags follow each tag, each once
        assert (np.sort(hmm.successors, axis=1) == np.arange(k)).all()


def test_random_successors_are_uniform() -> None:
    """Each tag is a successor of S of the K tags on average: a chi-square test over 200 models."""
    counts = np.zeros(6)
    for seed in range(200):
        counts += np.bincount(model(6, 2, 1, 1, seed).successors.ravel(), minlength=6)
    # Draws without repetition in a row vary less than multinomial ones: by (K - S)/(K - 1) = 0.8.
    statistic = ((counts - 400) ** 2 / 400).sum() / 0.8
    assert stats.chi2.sf(statistic, 5) > 1e-6


def bonferroni(observed: np.ndarray, expected: np.ndarray, totals: np.ndarray) -> float:
    """Smallest two-sided binomial p-value times the number of tests."""
    tested = (expected > 0) & (expected < 1) & (totals > 0)
    assert (observed[expected == 0] == 0).all()
    values = [
        stats.binomtest(int(x), int(n), float(p)).pvalue
        for x, p, n in zip(observed[tested], expected[tested], totals[tested], strict=True)
    ]
    return min(values) * len(values)


def test_samples_follow_the_laws() -> None:
    hmm = model(12, 3, 2, 3, seed=4)
    words, tags = hmm.sample(4000, 10, seed=11)
    assert words.shape == tags.shape == (4000, 10)
    assert words.dtype == tags.dtype == np.int64
    k, v = hmm.n_tags, hmm.n_words
    for t in (0, 9):  # stationary at the start, and still at the end
        counts = np.bincount(tags[:, t], minlength=k)
        assert bonferroni(counts, hmm.stationary, np.full(k, 4000)) > 1e-3
    for rows, columns, size, law in (
        (tags[:, :-1].ravel(), tags[:, 1:].ravel(), k, hmm.transition_matrix()),
        (tags.ravel(), words.ravel(), v, hmm.emission_matrix()),
    ):
        counts = np.bincount(rows * size + columns, minlength=k * size).reshape(k, size)
        totals = np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)
        assert bonferroni(counts, law, totals) > 1e-3
        wrong = np.roll(law, 1, axis=0)  # the test can tell
        wrong = np.where(wrong == 0, 1e-9, wrong)
        assert bonferroni(counts, wrong, totals) < 1e-6


def test_seeds_decide_everything() -> None:
    first, again, other = model(seed=1), model(seed=1), model(seed=2)
    for field in dataclasses.fields(first):
        assert np.array_equal(getattr(first, field.name), getattr(again, field.name))
    assert not np.array_equal(first.successors, other.successors)
    for a, b in zip(first.sample(5, 6, 3), again.sample(5, 6, 3), strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(first.sample(5, 6, 3)[1], first.sample(5, 6, 4)[1])


def test_first_draws_are_recorded() -> None:
    """The same numbers on any platform: recorded once, with numpy's PCG64."""
    hmm = HiddenMarkovModel.random(6, successors=2, words_per_tag=2, ambiguity=2, seed=0)
    assert hmm.successors.tolist() == RECORDED["successors"]
    assert hmm.words.tolist() == RECORDED["words"]
    words, tags = hmm.sample(2, 5, seed=0)
    assert words.tolist() == RECORDED["sample_words"]
    assert tags.tolist() == RECORDED["sample_tags"]


# --- accuracies -----------------------------------------------------------------------------------


def test_word_only_accuracy_is_that_of_the_best_table() -> None:
    hmm = model(20, 4, 3, 3, seed=2)
    joint = hmm.stationary[:, None] * hmm.emission_matrix()  # [K, V]
    assert hmm.word_only_accuracy() == pytest.approx(joint.max(axis=0).sum(), abs=1e-14)
    words, tags = hmm.sample(20_000, 5, seed=3)
    right = (joint.argmax(axis=0)[words] == tags).mean(axis=1)  # sentences are independent
    error = right.std() / math.sqrt(len(right))
    assert abs(right.mean() - hmm.word_only_accuracy()) < 4 * error


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (7, 3, 2, 3), (30, 5, 3, 3), (50, 8, 3, 7)])
def test_decoders_equal_inference_on_all_tags(
    size: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates alone against Viterbi and marginals over all K tags, from the dense scores."""
    monkeypatch.setattr(hmm_module, "CHUNK", 2000)  # several batches
    hmm = model(*size)
    words, tags = hmm.sample(20, 9, seed=5)
    emissions, transitions = hmm.log_scores(words, dtype=torch.float64)
    best = chains.viterbi(emissions, transitions)[0].numpy()
    assert hmm.viterbi_accuracy(words, tags) == pytest.approx((best == tags).mean(), abs=1e-12)
    assert hmm.viterbi_accuracy(words, best) == 1.0
    likely = chains.posterior_marginals(emissions, transitions).argmax(-1).numpy()
    assert hmm.posterior_accuracy(words, tags) == pytest.approx((likely == tags).mean(), abs=1e-12)
    assert hmm.posterior_accuracy(words, likely) == 1.0
    if hmm.n_tags == 50:  # the two rules are not the same, and the test tells them apart
        assert hmm.viterbi_accuracy(words, likely) < 1.0
        assert hmm.posterior_accuracy(words, best) < 1.0


def test_single_words_leave_nothing_but_the_word() -> None:
    hmm = model()
    words, tags = hmm.sample(2000, 1, seed=0)
    choice = (hmm.stationary[:, None] * hmm.emission_matrix()).argmax(axis=0)
    expected = (choice[words] == tags).mean()
    assert hmm.posterior_accuracy(words, tags) == pytest.approx(expected, abs=1e-12)
    assert hmm.viterbi_accuracy(words, tags) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [100, 1000, 4000])
def test_default_task_needs_the_context(k: int) -> None:
    hmm = HiddenMarkovModel.random(k, seed=0)
    words, tags = hmm.sample(200, 32, seed=1)
    assert 0.60 < hmm.word_only_accuracy() < 0.70
    ceiling = hmm.posterior_accuracy(words, tags)
    assert 0.85 < ceiling < 0.95
    assert ceiling - 0.01 < hmm.viterbi_accuracy(words, tags) < ceiling + 0.005


def test_large_models_stay_sparse() -> None:
    hmm = HiddenMarkovModel.random(20_000, seed=0)
    held = sum(value.nbytes for value in vars(hmm).values() if isinstance(value, np.ndarray))
    assert held == (2 * 5 + 2 * 3) * 20_000 * 8
    words, tags = hmm.sample(10, 8, seed=0)
    assert hmm.posterior_accuracy(words, tags) > 0.5


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["n_tags", "successors", "words_per_tag", "ambiguity"])
def test_counts_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        HiddenMarkovModel.random(**{"n_tags": 5, "seed": 0, name: 0})


@pytest.mark.parametrize("smoothing", [0.0, -0.1, 1.1, math.nan])
def test_smoothing_must_mix(smoothing: float) -> None:
    with pytest.raises(ValueError, match=r"smoothing must lie in \[0.001, 1\]"):
        HiddenMarkovModel.random(5, smoothing=smoothing, seed=0)


@pytest.mark.parametrize("smoothing", [0.001, 1.0])
def test_extreme_smoothing(smoothing: float) -> None:
    hmm = HiddenMarkovModel.random(6, smoothing=smoothing, seed=0)
    law = hmm.stationary
    np.testing.assert_allclose(law @ hmm.transition_matrix(), law, atol=1e-13)
    if smoothing == 1:
        np.testing.assert_allclose(law, 1 / 6)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"successors": np.array([[0, 2], [1, 0]])}, r"successors must lie in \[0, 2\)"),
        ({"successors": np.array([[0, 0], [1, 0]])}, "successors must be distinct"),
        ({"successor_probability": np.ones((2, 2))}, "sum to 1"),
        ({"word_probability": np.array([[1.5, -0.5], [0.5, 0.5]])}, "not be negative"),
        ({"word_probability": np.full((2, 2), np.nan)}, "not be negative"),
        ({"word_probability": np.ones((2, 1))}, "must be alike"),
        ({"words": np.array([[0, 3], [1, 2]])}, r"words must lie in \[0, 3\)"),
        ({"words": np.array([[0, 1]]), "word_probability": np.array([[0.5, 0.5]])}, "has 1 rows"),
    ],
)
def test_laws_are_checked(changes: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(two_tags(), **changes)


@pytest.mark.parametrize(
    ("words", "tags", "error", "match"),
    [
        (np.zeros((2, 2)), np.zeros((2, 2), int), TypeError, "words must be integers"),
        (np.full((2, 2), 3), np.zeros((2, 2), int), ValueError, r"words must lie in \[0, 3\)"),
        (np.full((2, 2), -1), np.zeros((2, 2), int), ValueError, "words must lie in"),
        (np.zeros(2, int), np.zeros((2, 2), int), ValueError, r"words must be \[n, T\]"),
        (np.zeros((2, 0), int), np.zeros((2, 0), int), ValueError, "T ≥ 1"),
        (np.zeros((2, 2), int), np.zeros((2, 2)), TypeError, "tags must be integers"),
        (np.zeros((2, 2), int), np.full((2, 2), 2), ValueError, r"tags must lie in \[0, 2\)"),
        (np.zeros((2, 2), int), np.zeros((2, 3), int), ValueError, "must be alike"),
        (np.zeros((0, 2), int), np.zeros((0, 2), int), ValueError, "not empty"),
    ],
)
def test_bad_sentences(
    words: np.ndarray, tags: np.ndarray, error: type[Exception], match: str
) -> None:
    hmm = two_tags()
    for accuracy in (hmm.posterior_accuracy, hmm.viterbi_accuracy):
        with pytest.raises(error, match=match):
            accuracy(words, tags)
    if "words" in match:
        with pytest.raises(error, match=match):
            hmm.log_scores(words)


def test_sample_sizes() -> None:
    hmm = two_tags()
    words, tags = hmm.sample(0, 3, seed=0)
    assert words.shape == tags.shape == (0, 3)
    emissions, _ = hmm.log_scores(words)
    assert emissions.shape == (0, 3, 2)
    for n, length in ((-1, 3), (3, 0)):
        with pytest.raises(ValueError, match="n_sequences must be at least 0"):
            hmm.sample(n, length, seed=0)
