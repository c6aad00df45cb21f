"""NC1 to NC4 against exact frames, values by hand and formulas written out class by class."""

from __future__ import annotations

import math

import pytest
import torch

from proofread.ufm_spectra.collapse import collapse_metrics

K, D, N_EACH = 4, 6, 3


def rotation(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(normal)[0]


def labels(k: int = K, n: int = N_EACH) -> torch.Tensor:
    return torch.arange(k).repeat_interleave(n)


def noisy(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, targets out of order and unbalanced, weights."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.cat([labels(), torch.tensor([1, 1, 3])])[
        torch.randperm(15, generator=generator)
    ]
    features = (
        torch.randn(15, D, generator=generator, dtype=torch.float64) + 2 * torch.eye(D)[targets]
    )
    return features, targets, torch.randn(K, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
def test_centred_collapse_is_all_zeros(seed):
    """A rotated simplex frame on top of any global mean, with the self-dual classifier."""
    simplex = 3 * (torch.eye(K) - 1 / K).double() @ rotation(D, seed)[:K]
    features = (simplex + torch.arange(D))[labels()]
    found = collapse_metrics(features, labels(), 0.7 * simplex, features @ simplex.T)
    numbers = [found.nc1, found.nc1_ratio, found.nc2_norms, found.nc2_angles, found.nc2_angles_std]
    assert numbers == pytest.approx([0] * 5, abs=1e-12)
    assert found.nc3 == pytest.approx(0, abs=1e-12)


def test_nc4_of_a_simplex_without_offset_is_zero():
    simplex = (torch.eye(K) - 1 / K).double() @ rotation(D)[:K]
    assert collapse_metrics(simplex[labels()], labels(), simplex).nc4 == 0


def test_uncentred_collapse_is_all_zeros():
    frame = 2 * rotation(D)[:K]
    found = collapse_metrics(frame[labels()], labels(), 5 * frame, centre=False)
    numbers = [found.nc1, found.nc2_norms, found.nc2_angles, found.nc2_angles_std]
    assert [*numbers, found.nc2_orthogonal, found.nc3] == pytest.approx([0] * 6, abs=1e-12)
    assert found.nc4 == 0


def test_an_orthogonal_frame_is_a_simplex_when_centred():
    frame = rotation(D)[:K]
    assert collapse_metrics(frame[labels()], labels()).nc2_angles == pytest.approx(0, abs=1e-12)


def test_a_simplex_is_no_orthogonal_frame():
    """Gram ∝ I − 11ᵀ/K with norm √(K − 1): its distance from I/√K has a closed form."""
    simplex = (torch.eye(K) - 1 / K).double()
    found = collapse_metrics(simplex[labels()], labels(), centre=False)
    cosine = (K - 1) / math.sqrt(K * (K - 1))  # of the two normalised Grams
    assert found.nc2_orthogonal == pytest.approx(math.sqrt(2 - 2 * cosine))
    assert found.nc2_angles == pytest.approx(1 / (K - 1))


def test_by_hand():
    """Two classes on a line: means ±2 about 1, within-class variances 1 and 0."""
    features = torch.tensor([[2.0], [4.0], [-1.0], [-1.0]])
    targets = torch.tensor([0, 0, 1, 1])
    found = collapse_metrics(features, targets, torch.tensor([[1.0], [-1.0]]))
    # Σ_W = (1 + 1 + 0 + 0)/4, Σ_B = 4
    assert found.nc1 == pytest.approx(0.5 / 4 / 2)
    assert found.nc1_ratio == pytest.approx(0.5 / 4)
    assert (found.nc2_norms, found.nc2_angles, found.nc3, found.nc4) == pytest.approx((0, 0, 0, 0))


def test_norms_and_angles_by_hand():
    """Uncentred means (3, 0), (0, 1), (1, 1)."""
    means = torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    found = collapse_metrics(means, torch.arange(3), centre=False)
    norms = torch.tensor([3.0, 1.0, math.sqrt(2)])
    assert found.nc2_norms == pytest.approx(float(norms.std(unbiased=False) / norms.mean()))
    root = 1 / math.sqrt(2)
    assert found.nc2_angles == pytest.approx(2 * root / 3)
    assert found.nc2_angles_std == pytest.approx(math.sqrt((2 * root**2) / 3 - (2 * root / 3) ** 2))


@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_naive_twin(centre, seed):
    """The definitions of Papyan, Han and Donoho, with loops and a pseudo-inverse."""
    features, targets, weights = noisy(seed)
    means = torch.stack([features[targets == c].mean(0) for c in range(K)])
    inner = [features[i] - means[targets[i]] for i in range(len(features))]
    sigma_w = sum(torch.outer(g, g) for g in inner) / len(features)
    centred = means - means.mean(0) if centre else means
    sigma_b = sum(torch.outer(m, m) for m in centred) / K
    cosines = [
        float(a @ b / a.norm() / b.norm()) for i, a in enumerate(centred) for b in centred[i + 1 :]
    ]
    target = -1 / (K - 1) if centre else 0
    nearest = [(means - h).norm(dim=1).argmin() for h in features]
    said = [(weights @ h).argmax() for h in features]
    found = collapse_metrics(features, targets, weights, centre=centre)
    pinv = torch.linalg.pinv(sigma_b, rtol=1e-10, hermitian=True)
    assert found.nc1 == pytest.approx(float((sigma_w @ pinv).trace() / K))
    assert found.nc1_ratio == pytest.approx(float(sigma_w.trace() / sigma_b.trace()))
    assert found.nc2_angles == pytest.approx(sum(abs(c - target) for c in cosines) / len(cosines))
    dual = weights / weights.norm() - centred / centred.norm()
    assert found.nc3 == pytest.approx(float(dual.norm()))
    assert found.nc4 == pytest.approx(sum(a != b for a, b in zip(nearest, said, strict=True)) / 15)


def test_invariance_under_rotation_and_scale():
    features, targets, weights = noisy()
    turn = 3 * rotation(D, 5)
    plain = collapse_metrics(features, targets, weights)
    turned = collapse_metrics(features @ turn, targets, weights @ turn)
    for name in ("nc1", "nc1_ratio", "nc2_norms", "nc2_angles", "nc2_orthogonal", "nc3", "nc4"):
        assert getattr(turned, name) == pytest.approx(getattr(plain, name)), name


def test_outputs_carry_the_bias():
    features, targets, weights = noisy()
    biased = features @ weights.T + torch.tensor([100.0, 0, 0, 0])
    means = torch.stack([features[targets == c].mean(0) for c in range(K)])
    nearest = torch.cdist(features, means).argmin(1)
    found = collapse_metrics(features, targets, weights, biased)
    assert found.nc4 == pytest.approx(float((nearest != 0).double().mean()))
    assert collapse_metrics(features, targets, None, biased).nc4 == found.nc4
    assert collapse_metrics(features, targets, None, biased).nc3 is None


def test_degenerate_means():
    """All means equal: nothing between the classes."""
    features = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    targets = torch.tensor([0, 0, 1, 1])
    assert collapse_metrics(features, targets).nc1 == math.inf
    assert collapse_metrics(torch.ones(4, 2), targets).nc1 == 0
    assert collapse_metrics(torch.ones(4, 2), targets).nc1_ratio == 0


def test_images_int_labels_and_strides():
    """Maps are flattened, any integer dtype serves, and memory order does not matter."""
    features, targets, _ = noisy()
    plain = collapse_metrics(features, targets)
    assert collapse_metrics(features.view(15, 2, 3), targets.int()) == plain
    strided = features.T.contiguous().T
    assert collapse_metrics(strided, targets).nc1 == pytest.approx(plain.nc1)
    assert collapse_metrics(features.float(), targets).nc1 == pytest.approx(plain.nc1, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(15, dtype=torch.long), "weights": None}, "two classes"),
        ({"targets": torch.arange(15) % 3}, r"classes \[3\] have no samples"),
        ({"targets": torch.arange(15) % 4 + 1}, "must lie in 0"),
        ({"targets": torch.arange(15) % 4 - 1}, "must lie in 0"),
        ({"targets": torch.arange(14) % 4}, "targets must be"),
        ({"targets": (torch.arange(15) % 4).double()}, "integer classes"),
        ({"targets": torch.arange(15) % 2 == 0}, "integer classes"),
        ({"features": torch.full((15, D), math.nan)}, "features holds a NaN"),
        ({"weights": torch.full((K, D), math.inf)}, "weights holds a NaN"),
        ({"weights": torch.ones(K, D + 1)}, "weights must be"),
        ({"weights": torch.ones(D)}, "weights must be"),
        ({"outputs": torch.ones(15, K + 1)}, "outputs must be"),
        ({"outputs": torch.full((15, K), math.nan)}, "outputs holds a NaN"),
        ({"features": torch.ones(15)}, "features must be"),
        ({"features": torch.ones(0, D)}, "features must be"),
    ],
)
def test_errors(change, message):
    features, targets, weights = noisy()
    given = {"features": features, "targets": targets, "weights": weights} | change
    with pytest.raises(ValueError, match=message):
        collapse_metrics(**given)
