"""The audit on scores that memorise and on others, and its numbers from their definition."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from proofread.langevin import audit
from proofread.langevin.audit import AuditReport, initialization_audit
from proofread.langevin.samplers import DivergenceError
from proofread.langevin.scores import GaussianScore, MemorizingScore, MixtureScore
from proofread.stats import clopper_pearson

DIMENSION, N_POINTS = 64, 20


def samples(n: int, seed: int, dimension: int = DIMENSION) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, dimension, generator=generator, dtype=torch.float64)


POINTS, FRESH = samples(N_POINTS, 0), samples(60, 1)
TRAPS = MemorizingScore(POINTS, alpha=20.0, inner=0.35, outer=0.45)
EXACT = GaussianScore(torch.zeros(DIMENSION))
OPTIMUM = MixtureScore(POINTS, variances=0.04)  # of denoising score matching, at small noise


def audited(start, score, step=0.01, **options) -> AuditReport:
    return initialization_audit(start, POINTS, score, step=step, **options)


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [TRAPS, OPTIMUM], ids=["traps", "mixture"])
@pytest.mark.parametrize("reference", [None, FRESH], ids=["displaced", "fresh"])
def test_memorising_scores_hold_their_training_points(score, reference):
    found = audited(POINTS, score, reference=reference)
    assert found.verdict == "unsafe: starts are at training points and are held"
    assert found.coincident == found.near == found.held == clopper_pearson(N_POINTS, N_POINTS)
    assert found.held_training.value == 1
    assert found.kept.value < 0.1
    assert "not fitted on" in found.advice
    assert found.ends_near is None


@pytest.mark.parametrize("reference", [None, FRESH], ids=["displaced", "fresh"])
def test_fresh_starts_are_safe_from_traps_that_they_miss(reference):
    """Theorem 7: the traps hold what starts within, and nothing else falls in."""
    fresh = audited(FRESH, TRAPS, reference=reference)
    assert fresh.verdict == "safe"
    assert fresh.held is None
    assert fresh.near.value == fresh.coincident.value == 0
    assert fresh.ends_near == clopper_pearson(0, 60)
    assert fresh.held_training.value == 1
    assert "never start from those" in fresh.advice
    assert "not started at, nor drawn to, training points within 200 steps" in fresh.advice
    assert "pass the run's own n_steps" in fresh.advice


@pytest.mark.parametrize("start", [FRESH, 3 + 2 * FRESH], ids=["fresh", "elsewhere"])
def test_perfect_memory_collapses(start):
    found = audited(start, OPTIMUM)
    assert found.verdict == "collapsed: chains from other starts end at training points"
    assert found.near.value == 0
    assert found.ends_near == clopper_pearson(60, 60)
    for remedy in ("fresh starts do not help", "stop training earlier", "noise", "more data"):
        assert remedy in found.advice
    mixed = audited(torch.cat([start, POINTS]), OPTIMUM)
    assert mixed.verdict == found.verdict
    assert mixed.ends_near == found.ends_near


def test_one_collapsing_start_is_not_called_safe():
    found = audited(FRESH[:1], OPTIMUM)
    assert found.verdict == "inconclusive: too few starts to tell"
    assert "more starts" in found.advice


def test_many_starts_are_sampled():
    start = samples(400, 7)
    found = audited(start, EXACT, n_steps=30)
    assert found.ends_near.n == 256
    assert found.near.n == 400


def test_the_exact_score_holds_nothing():
    found = audited(POINTS, EXACT, step=0.02)
    assert found.verdict == "starts are at training points, but not held"
    assert found.held.value == found.held_training.value == 0
    fresh = audited(FRESH, EXACT, step=0.02)
    assert fresh.verdict == "safe"
    assert "never start" not in fresh.advice
    assert fresh.ends_near == clopper_pearson(0, 60)
    assert "Not held within 200 steps of 0.02" in found.advice
    assert "No harm" not in found.advice


@pytest.mark.parametrize("score", [TRAPS, EXACT], ids=["traps", "exact"])
def test_a_short_run_tells_nothing(score):
    found = audited(POINTS, score, n_steps=3)
    assert found.verdict == "inconclusive: the run is too short to tell"
    assert found.held.value == found.kept.value == 1
    assert "n_steps=12" in found.advice


def test_a_few_training_points_among_the_starts_are_found():
    found = audited(torch.cat([FRESH, POINTS[:3]]), TRAPS)
    assert found.verdict.startswith("unsafe")
    assert found.near == clopper_pearson(3, 63)
    assert found.held == clopper_pearson(3, 3)


def test_starts_beside_training_points_are_found():
    """Low noise on the training points: none coincides, all are within half the spacing."""
    found = audited(POINTS + 0.2 * samples(N_POINTS, 4), TRAPS)
    assert found.coincident.value == 0
    assert found.near.value == 1
    assert found.verdict.startswith("unsafe")


def test_repetitions_count_as_one_point():
    once = audited(POINTS, TRAPS)
    ten = initialization_audit(POINTS, POINTS.repeat(10, 1), TRAPS, step=0.01)
    assert ten.spacing == pytest.approx(once.spacing, rel=1e-9)
    assert ten.verdict == once.verdict
    assert ten.held == once.held
    assert ten.n_training == 10 * N_POINTS
    assert ten.near_fresh == once.near_fresh
    uneven = torch.tensor([[0.0], [1.0], [11.0], [21.0], [31.0]])
    nearest = clopper_pearson(2, 5)  # spacing 10: the first two lie 1 apart
    for points in (uneven, uneven.repeat(3, 1), torch.cat([uneven, uneven[:1].repeat(9, 1)])):
        found = initialization_audit(uneven, points, GaussianScore(torch.zeros(1)), step=0.1)
        assert (found.near_fresh, found.spacing) == (nearest, 10)
        assert found.n_training == len(points)


def test_fresh_starts_in_one_dimension_are_no_training_points():
    """Spacings vary there: a fifth of fresh samples are near one, and so are training points."""
    points, score = samples(400, 2, 1), GaussianScore(torch.zeros(1))
    fresh = initialization_audit(samples(300, 3, 1), points, score, step=0.05, n_steps=50)
    assert fresh.near.value > 0.1
    assert fresh.near_fresh.low < fresh.near.value < fresh.near_fresh.high + 0.05
    assert fresh.verdict == "safe"
    trained = initialization_audit(points, points, score, step=0.05, n_steps=50)
    assert trained.verdict == "starts are at training points, but not held"


@pytest.mark.parametrize(
    ("held", "kept", "verdict"),
    [
        ((20, 20), (0, 256), audit.UNSAFE),
        ((20, 20), (128, 256), audit.UNSAFE),
        ((20, 20), (250, 256), audit.SHORT),
        ((12, 100), (0, 256), audit.UNSAFE),
        ((0, 20), (0, 256), audit.FREE),
        ((0, 20), (256, 256), audit.FREE),
        ((3, 20), (20, 256), audit.FREE),
        ((60, 100), (150, 256), audit.SHORT),
        ((1, 1), (10, 256), audit.FEW),
        ((0, 1), (0, 256), audit.FEW),
    ],
)
def test_rules(held, kept, verdict):
    shares = clopper_pearson(*held), clopper_pearson(*kept)
    fresh = clopper_pearson(30, 100)  # up to 0.40
    for ends in (None, clopper_pearson(100, 256), clopper_pearson(3, 5)):
        assert audit._verdict(True, *shares, ends, fresh) == verdict
    for ends in (None, clopper_pearson(100, 256)):
        assert audit._verdict(False, *shares, ends, fresh) == audit.SAFE
    assert audit._verdict(False, *shares, clopper_pearson(3, 5), fresh) == audit.FEW
    slight = clopper_pearson(123, 256)  # from 0.418 on: above, but not clearly
    assert audit._verdict(False, *shares, slight, fresh) == audit.SAFE
    for trained in (False, True):
        ends = clopper_pearson(150, 256)
        assert audit._verdict(trained, *shares, ends, fresh) == audit.COLLAPSED
    assert audit._advice(verdict, False, 200, 0.1)


# --- numbers --------------------------------------------------------------------------------------


def test_shares_are_those_of_the_definition(monkeypatch):
    """A sampler that moves known chains by known lengths, in units of the spacing."""
    moves = torch.cat(
        [
            torch.tensor([0.1, 0.49, 0.51, 2.0]),  # starts near a training point
            torch.full((256,), 0.4),  # training points
            torch.arange(256) / 256,  # control: exactly half of it within the radius
            torch.zeros(60),  # the other starts, none near a training point
        ]
    )
    distances = torch.cdist(POINTS, POINTS).fill_diagonal_(torch.inf).min(1).values
    spacing = float(distances.median())
    calls = []

    def sampler(score, start, step, n_steps, *, seed):
        calls.append((len(start), step, n_steps, seed))
        return SimpleNamespace(final=start + spacing * moves[:, None] / math.sqrt(DIMENSION))

    monkeypatch.setattr(audit, "langevin", sampler)
    starts = torch.cat([POINTS[:4], FRESH])
    found = audited(starts, EXACT, n_steps=7, seed=5)
    assert calls == [(4 + 256 + 256 + 60, 0.01, 7, 5)]
    assert found.spacing == pytest.approx(spacing, rel=1e-12)
    assert found.near == found.coincident == clopper_pearson(4, 64)
    assert found.near_fresh == clopper_pearson(int((distances < spacing / 2).sum()), N_POINTS)
    assert found.held == clopper_pearson(2, 4)
    assert found.held_training == clopper_pearson(256, 256)
    assert found.kept == clopper_pearson(128, 256)
    assert found.ends_near == clopper_pearson(0, 60)

    def jumps(score, start, step, n_steps, *, seed):
        final = start.clone()
        final[-10:] = POINTS[5:15] + 0.3 * spacing / math.sqrt(DIMENSION)
        return SimpleNamespace(final=final)

    monkeypatch.setattr(audit, "langevin", jumps)
    assert audited(starts, EXACT).ends_near == clopper_pearson(10, 60)


def test_a_chain_with_another_training_point_nearer_is_not_held(monkeypatch):
    points = torch.tensor([[0.0], [1.0], [11.0], [21.0], [31.0]])  # the median spacing is 10
    monkeypatch.setattr(
        audit, "langevin", lambda score, start, *_, seed: SimpleNamespace(final=start + 0.7)
    )
    found = initialization_audit(points[[0, 2]], points, EXACT, step=0.1)
    assert found.spacing == 10
    assert found.held == clopper_pearson(1, 2)


def test_the_control_starts_one_spacing_away(monkeypatch):
    starts = []

    def sampler(score, start, step, n_steps, *, seed):
        starts.append(start)
        return SimpleNamespace(final=start)

    monkeypatch.setattr(audit, "langevin", sampler)
    found = audited(FRESH, EXACT)
    probes, control, far = starts[0].split([256, 256, 60])
    assert torch.equal(far.unique(dim=0), FRESH.unique(dim=0))  # each of them once
    assert (torch.cdist(probes, POINTS).min(1).values < 1e-6).all()
    assert len(probes.unique(dim=0)) == N_POINTS
    distance = torch.cdist(control, POINTS)
    assert ((distance - found.spacing).abs() < 1e-9).any(1).all()
    assert distance.min() > 0.5 * found.spacing
    referred = audited(FRESH, EXACT, reference=FRESH[:9])
    assert torch.equal(starts[1][256:-60], FRESH[:9])
    assert referred.kept.n == 9


@pytest.mark.parametrize("blocks", [(3, 4), (1, 1), (1000, 1000)])
def test_nearest_points_whatever_the_blocks(blocks, monkeypatch):
    monkeypatch.setattr(audit, "BLOCKS", blocks)
    queries, points = 1e6 + samples(10, 5, 6), 1e6 + samples(23, 6, 6)
    queries[0] = points[17]
    distances = (queries[:, None] - points).norm(dim=2)
    distance, index = audit._nearest(queries, points)
    torch.testing.assert_close(distance, distances.min(1).values, rtol=1e-9, atol=1e-12)
    assert torch.equal(index, distances.argmin(1))
    apart, _ = audit._nearest(points, points, apart=1e-3)
    others = torch.cdist(points - 1e6, points - 1e6).fill_diagonal_(torch.inf).min(1).values
    torch.testing.assert_close(apart, others, rtol=1e-8, atol=0)


def test_same_seed_same_report():
    one, two = (audited(POINTS, TRAPS, n_steps=40, seed=3) for _ in range(2))
    assert one == two


def test_arrays_and_single_precision():
    starts, points = POINTS.numpy().astype(np.float32), POINTS.numpy()
    found = initialization_audit(starts, points, TRAPS, step=0.01)
    assert found.verdict.startswith("unsafe")
    assert found.coincident.value == 1
    assert initialization_audit(starts, points, TRAPS.__call__, step=0.01) == found
    strided = np.asfortranarray(starts)
    assert initialization_audit(strided, points, TRAPS, step=0.01) == found


def test_read_only_and_reversed_arrays(recwarn):
    starts, points = POINTS.numpy().copy(), POINTS.numpy().copy()
    expected = audited(POINTS, TRAPS, n_steps=20)
    starts.flags.writeable = points.flags.writeable = False
    assert initialization_audit(starts, points, TRAPS, step=0.01, n_steps=20) == expected
    assert not recwarn.list
    backwards = initialization_audit(starts[::-1], points, TRAPS, step=0.01, n_steps=20)
    assert backwards.near == expected.near


# --- what a reader sees ---------------------------------------------------------------------------


def test_the_report_reads():
    found = audited(POINTS, TRAPS)
    lines = str(found).splitlines()
    assert lines[0] == "Initialization audit: 20 starts, 20 training points, d = 64"
    assert lines[-1].startswith("unsafe: starts are at training points and are held. Start from")
    assert len({line.index("  ", 4) for line in lines[1:3]}) == 2
    assert max(map(len, lines[:-1])) < 100
    page = audited(FRESH, TRAPS)._repr_html_()
    assert "<strong>safe.</strong>" in page
    assert page.count("<tr>") == page.count("</tr>") == len(lines) - 2
    assert "none" in str(audited(FRESH, TRAPS))
    assert "starts that coincide with training points" in str(found)
    assert "held within 200 steps of 0.01" in str(found)
    for start, score in ((POINTS, TRAPS), (FRESH, TRAPS), (FRESH, OPTIMUM), (POINTS, EXACT)):
        str(audited(start, score)).encode("latin-1")


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": POINTS[0]}, r"start must be \[C, d\]"),
        ({"start": POINTS[:0]}, r"start must be \[C, d\] with C ≥ 1"),
        ({"start": POINTS[:, :5]}, "same dimension, not 64 and 5"),
        ({"start": POINTS * math.nan}, "start must be finite"),
        ({"training_points": POINTS[:1]}, r"training_points must be \[C, d\] with C ≥ 2"),
        ({"training_points": POINTS[:1].repeat(5, 1)}, "two different points, but all 5 coincide"),
        ({"training_points": POINTS / 0}, "training_points must be finite"),
        ({"reference": FRESH[:, 1:]}, "reference and start must have the same dimension"),
        ({"reference": FRESH[:0]}, r"reference must be"),
        ({"reference": torch.cat([FRESH, POINTS[:3]])}, "3 of its 63 are training points"),
        ({"training_points": POINTS * 1e200}, "training_points must be of a scale"),
        ({"start": POINTS * 1e200}, "start must be of a scale"),
        ({"training_points": POINTS * 1e-200}, "squares of their distances underflow"),
        ({"step": 0.0}, "step must be positive"),
        ({"step": math.nan}, "step must be positive"),
        ({"n_steps": 0}, "n_steps must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"start": POINTS, "training_points": POINTS, "step": 0.01, **change}
    with pytest.raises(ValueError, match=message):
        initialization_audit(score=EXACT, **arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16])
def test_other_types_are_named(dtype):
    with pytest.raises(TypeError, match="start must be float32 or float64"):
        audited(POINTS.to(dtype), EXACT)
    with pytest.raises(TypeError, match="training_points must be float32 or float64"):
        initialization_audit(POINTS, POINTS.to(dtype), EXACT, step=0.1)


@pytest.mark.parametrize(
    ("takes", "given", "remedy"),
    [
        (torch.float32, torch.float64, r"start\.float\(\)"),
        (torch.float64, torch.float32, r"start\.double\(\)"),
    ],
)
def test_a_score_of_another_dtype_is_named(takes, given, remedy):
    network = torch.nn.Linear(DIMENSION, DIMENSION, dtype=takes)
    with pytest.raises(TypeError, match=f"score takes {takes}: pass {remedy}"):
        audited(FRESH.to(given), network)


def test_other_errors_of_the_score_are_its_own():
    def broken(x):
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        audited(FRESH, broken)


def test_a_step_too_large_is_the_samplers_error():
    with pytest.raises(DivergenceError):
        audited(POINTS, EXACT, step=50.0, n_steps=400)


def test_a_score_that_is_not_finite_is_the_samplers_error():
    with pytest.raises(DivergenceError):
        audited(POINTS, lambda x: x / 0)
