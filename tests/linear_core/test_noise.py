"""Instance-dependent label noise: rates, dependence, determinism, errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from proofread.linear_core.noise import instance_dependent_noise

K = 6


def data(n: int = 6000, d: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, d)), rng.integers(0, K, n)


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.4, 0.6])
def test_empirical_rate_is_binomial_around_the_truncated_mean(rate):
    x, y = data()
    noisy, _ = instance_dependent_noise(x, y, rate, K, seed=3)
    low, high = -rate / 0.1, (1 - rate) / 0.1
    mean = stats.truncnorm.mean(low, high, loc=rate, scale=0.1)
    flips = int((noisy != y).sum())
    assert stats.binomtest(flips, len(y), mean).pvalue > 1e-3
    assert abs(mean - rate) < (0.006 if rate >= 0.2 else 0.03)


def test_probabilities_are_the_formula():
    """Row by row, with the generator's draws repeated in order."""
    x, y = data(n=40, d=3)
    _, probabilities = instance_dependent_noise(x, y, 0.3, K, seed=11)
    rng = np.random.default_rng(11)
    q = stats.truncnorm.rvs(-3, 7, loc=0.3, scale=0.1, size=40, random_state=rng)
    projections = [rng.standard_normal((3, K)) for _ in range(K)]
    for i in range(40):
        scores = x[i] @ projections[y[i]]
        wrong = [j for j in range(K) if j != y[i]]
        total = sum(np.exp(scores[j]) for j in wrong)
        for j in wrong:
            expected = q[i] * np.exp(scores[j]) / total
            assert probabilities[i, j] == pytest.approx(expected, rel=1e-12)
        assert probabilities[i, y[i]] == pytest.approx(1 - q[i], rel=1e-12)


def test_labels_follow_the_probabilities():
    """The same row many times over: counts against its own probabilities (chi-square)."""
    x, y = np.full((20_000, 4), 0.3), np.full(20_000, 2)
    noisy, probabilities = instance_dependent_noise(x, y, 0.4, K, seed=5)
    counts = np.bincount(noisy, minlength=K)
    assert stats.chisquare(counts, probabilities.sum(axis=0)).pvalue > 1e-3


def test_rows_are_distributions():
    x, y = data()
    _, probabilities = instance_dependent_noise(x, y, 0.4, K, seed=0)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-12)
    assert probabilities.min() >= 0


def test_certain_flips_never_land_on_the_own_label():
    """At rate 1 every sample flips with its q; those with q = 1 to other classes only."""
    x, y = data(n=3000)
    noisy, probabilities = instance_dependent_noise(x, y, 1.0, K, seed=1)
    own = probabilities[np.arange(len(y)), y]
    assert np.mean(noisy == y) == pytest.approx(own.mean(), abs=0.02)
    assert np.mean(noisy != y) > 0.9


def test_flips_depend_on_the_instance_not_on_the_class_alone():
    """Two clusters of one class flip to different classes; class-conditional noise cannot."""
    rng = np.random.default_rng(2)
    centre = 3 * np.sign(rng.standard_normal(30))
    x = np.concatenate([centre + rng.standard_normal((2000, 30)),
                        -centre + rng.standard_normal((2000, 30))])  # fmt: skip
    y = np.zeros(4000, dtype=int)
    noisy, _ = instance_dependent_noise(x, y, 0.4, K, seed=4)
    side = np.arange(4000) < 2000
    table = np.array([np.bincount(noisy[s & (noisy != 0)], minlength=K)[1:] for s in (side, ~side)])
    table = table[:, table.sum(axis=0) > 0]
    assert stats.chi2_contingency(table).pvalue < 1e-100
    shuffled = rng.permutation(side)  # the control: halves that have nothing to do with x
    table = np.array(
        [np.bincount(noisy[s & (noisy != 0)], minlength=K)[1:] for s in (shuffled, ~shuffled)]
    )
    table = table[:, table.sum(axis=0) > 5]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_rate_zero_changes_nothing():
    x, y = data()
    noisy, probabilities = instance_dependent_noise(x, y, 0.0, K, seed=9)
    assert np.array_equal(noisy, y)
    assert np.array_equal(probabilities, np.eye(K)[y])


def test_same_seed_same_labels_and_no_global_state():
    x, y = data()
    np.random.seed(0)  # noqa: NPY002 (the legacy state must neither matter nor move)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    first = instance_dependent_noise(x, y, 0.4, K, seed=7)
    second = instance_dependent_noise(x, y, 0.4, K, seed=7)
    other = instance_dependent_noise(x, y, 0.4, K, seed=8)
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])
    assert not np.array_equal(first[0], other[0])
    assert np.array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_pictures_dtypes_and_inputs_left_alone():
    x, y = data(n=50, d=16)
    pictures, labels = x.reshape(50, 4, 4).astype(np.float32), y.astype(np.uint8)
    before = pictures.copy(), labels.copy()
    noisy, _ = instance_dependent_noise(pictures, labels, 0.4, K, seed=1)
    flat, _ = instance_dependent_noise(pictures.reshape(50, 16), y, 0.4, K, seed=1)
    assert noisy.dtype == np.int64
    assert np.array_equal(noisy, flat)
    assert np.array_equal(pictures, before[0])
    assert np.array_equal(labels, before[1])


def test_large_features_do_not_overflow():
    x, y = data(n=100)
    with np.errstate(all="raise", under="ignore"):
        _, probabilities = instance_dependent_noise(1e6 * x, y, 0.4, K, seed=1)
    assert np.isfinite(probabilities).all()


def test_no_samples():
    noisy, probabilities = instance_dependent_noise(
        np.zeros((0, 3)), np.zeros(0, dtype=int), 0.4, K, seed=1
    )
    assert noisy.shape == (0,)
    assert probabilities.shape == (0, K)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": np.zeros(3, dtype=int)}, ValueError, r"y must be \[n\]"),
        ({"y": np.zeros((4, 1), dtype=int)}, ValueError, r"y must be \[n\]"),
        ({"y": np.zeros(4)}, TypeError, "y must hold integer"),
        ({"y": np.array([0, 1, 2, K])}, ValueError, "y must lie in"),
        ({"y": np.array([0, -1, 2, 3])}, ValueError, "y must lie in"),
        ({"rate": -0.1}, ValueError, "rate must lie in"),
        ({"rate": 1.1}, ValueError, "rate must lie in"),
        ({"rate": float("nan")}, ValueError, "rate must lie in"),
        ({"n_classes": 1}, ValueError, "n_classes must be"),
        ({"x": np.full((4, 2), np.nan)}, ValueError, "x must be finite"),
    ],
)
def test_bad_arguments(change, error, message):
    good = {"x": np.ones((4, 2)), "y": np.arange(4), "rate": 0.2, "n_classes": K, "seed": 0}
    with pytest.raises(error, match=message):
        instance_dependent_noise(**(good | change))
