"""Simulations, tables and figures of the chapter's pages, on small sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from proofread.langevin import figures, identities, reports, trials
from proofread.langevin.enclosures import LogEnclosure
from proofread.langevin.identities import STANDARD
from proofread.langevin.learned_study import (
    DiffusionSetting,
    StartsSetting,
    learned_diffusion_study,
    starts_study,
)
from proofread.langevin.scores import GaussianScore, MixtureScore, TrapScore
from proofread.plotting import MAX_BYTES, show
from proofread.stats import Estimate

# --- simulations ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> tuple[list[trials.Stay], list[trials.Stay]]:
    sizes = {"full": (8, 16), "radial": (1000,), "n_chains": 100, "n_steps": 500}
    return trials.stays(**sizes), trials.stays(exact=True, **sizes)


def test_trapped_and_exact_chains(runs: tuple[list[trials.Stay], list[trials.Stay]]) -> None:
    trapped, exact = runs
    assert [(run.dimension, run.method) for run in trapped] == [
        (8, "full"),
        (16, "full"),
        (1000, "radial"),
    ]
    for run in trapped:  # all of 100 inside: one-sided Clopper–Pearson is 0.05^(1/100)
        assert run.inside == 1
        assert run.tv.low == pytest.approx(0.05**0.01, abs=1e-6)
        # inside it is an Ornstein–Uhlenbeck chain around 0, so 7√d from the mean and 0.33√d wide
        assert run.distance == pytest.approx(math.hypot(7, 1 / 3), abs=0.1)
    for run in exact:
        assert run.inside == run.tv.low == 0
        assert run.distance == pytest.approx(1, abs=0.1)


def test_exits_by_hand() -> None:
    traps = ((1, 1.0, 3.0), (2, 1.0, 2.5))
    found = trials.exits(traps, n_chains=4000, horizon=20.0)
    for run in found:
        radius = run.ratio * math.sqrt(run.dimension)
        truth = identities.exit_probability(
            run.dimension, run.alpha, radius, 20.0, start_variance=1.0
        )
        # steps miss excursions between them, so fewer chains leave than in continuous time
        assert 0.4 * truth < run.share.value < 1.05 * truth
        assert run.share.high < run.bound
        assert run.factor > 1


def test_memories_hold_training_starts_only() -> None:
    sizes = {"sizes": ((32, 20),), "n_chains": 20, "n_steps": 300}
    held = trials.memories(**sizes)[0]
    assert held.held == (1.0, 0.0)
    assert held.training.low > 0.8
    assert held.fresh.low == 0
    weak = trials.memories(2.0, **sizes)[0]
    assert weak.held == (0.0, 0.0)


@pytest.mark.parametrize("direction", [-1.0, 1.0])
@pytest.mark.parametrize("time", [0.0, 0.7, 5.0])
def test_the_error_is_the_same_at_every_level(direction: float, time: float) -> None:
    score = trials.level_trap(12, time, direction)
    assert torch.allclose(score.mean, TrapScore.standard(12).mean * math.exp(-time))
    wanted = STANDARD.log_error(12)
    assert score.lp_error(2).high == pytest.approx(wanted.high, abs=1e-9)
    # and in samples of the noised target, for a trap that is not too rare
    near = TrapScore(score.mean, 10.0, 6.0, 7.0, centre=score.centre)
    standard = TrapScore.standard(12, inner=6.0, outer=7.0)
    x = torch.randn(4000, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = [s.error(x + s.mean).square().sum(1).mean() for s in (near, standard)]
    assert float(errors[0]) == pytest.approx(float(errors[1]), rel=0.2)


def test_level_table_shows_one_error() -> None:
    table = reports.level_table(16, (0.0, 2.0))
    assert {error for row in table.rows for error in row[2:]} == {
        reports.power_of_ten(STANDARD.log_error(16).high)
    }


def test_contrast_of_the_samplers() -> None:
    found = trials.contrast(16, n_chains=30, n_steps=300)
    assert found.times[-1] == pytest.approx(6.0)
    assert found.langevin.shape == found.exact.shape == (len(found.times), 30)
    assert found.diffusion.shape == (len(found.levels), 30)
    ends = [float(paths[-1].mean()) for paths in (found.langevin, found.exact, found.diffusion)]
    assert ends[0] > 6
    assert ends[1:] == pytest.approx([1, 1], abs=0.15)
    assert torch.equal(found.langevin[0], found.exact[0])
    assert torch.equal(found.langevin[0], found.diffusion[0])


def test_a_correction_does_not_free_the_chains() -> None:
    found = trials.corrected((16,), n_chains=20, n_steps=500)[0]
    assert found.distance[0] > 5
    assert found.distance[1] == pytest.approx(1, abs=0.2)
    assert found.acceptance[0] < 0.2
    assert found.acceptance[1] > 0.9
    row = reports.corrected_table([found], 500).rows[0]
    assert float(row[1]) == pytest.approx(found.distance[0], abs=0.01)


# --- tables ---------------------------------------------------------------------------------------


def test_powers_of_ten() -> None:
    assert reports.power_of_ten(math.log(0.5)) == "0.5"
    assert reports.power_of_ten(-1e6 * math.log(10)) == "10^-1,000,000.00"
    assert reports._enclosed(LogEnclosure(-10.0, -10.0)) == "10^-4.34"
    assert reports._enclosed(LogEnclosure(-20.0, -10.0)) == "10^-8.69 to 10^-4.34"


def test_theory_tables() -> None:
    errors = reports.error_table((1, 8))
    assert float(errors.rows[0][1]) == pytest.approx(math.exp(STANDARD.log_error(1).high), abs=0.01)
    horizons = reports.theorem_table((8,)).rows[0][-1]
    assert horizons == f"e^{STANDARD.log_horizon(8):.1f}"
    escapes = reports.escape_table()
    for row in escapes.rows:
        probability, bound, steps = (float(x) for x in row[3:6])
        assert probability < bound < steps
    assert len(reports.start_table((8,)).rows) == 4
    assert [row[1] for row in reports.reduction_table(200, 20, 2).rows] == ["no difference"] * 2
    assert len(reports.geometry_table().rows) == 5
    assert all(float(row[-1]) > 0.99 for row in reports.tilt_table((1, 3)).rows)
    assert len(reports.diffusion_table((4, 8)).rows) == 2


def test_reduction_table_sees_another_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reports.radial_chain

    def other(score, start, step, n_steps, **options):  # type: ignore[no-untyped-def]
        return right(score, start, 1.5 * step, n_steps, **options)

    monkeypatch.setattr(reports, "radial_chain", other)
    assert "different" in [row[1] for row in reports.reduction_table(400, 40, 2).rows]


def test_experiment_tables(runs: tuple[list[trials.Stay], list[trials.Stay]]) -> None:
    table = reports.stay_table(*runs)
    assert [row[0] for row in table.rows] == ["8", "16", "1,000"]
    assert table.rows[0][2:4] == ("1", "0")
    fits = reports.exponent_table((16, 64, 256, 1024))
    for row in fits.rows:
        assert float(row[1].split()[0]) == pytest.approx(1, abs=0.06)
    long = reports.long_run_table(20_000, d=1000)
    assert long.rows[0][2] == "never"
    assert float(long.rows[0][3]) == pytest.approx(float(long.rows[0][4]), abs=0.01)


def test_exit_and_contrast_tables() -> None:
    share = Estimate(0.1, 0.08, 0.12, 100, 0.95)
    row = reports.exit_table([trials.Exit(1, 1.0, 3.0, share, 0.3)]).rows[0]
    assert row[-1] == "3.0"
    paths = torch.tensor([[7.0, 7.2], [1.0, 1.2]], dtype=torch.float64)
    times = torch.tensor([0.0, 1.0])
    found = trials.Contrast(64, paths, paths, paths, times, times)
    table = reports.contrast_table(found, found)
    assert table.rows[1][1] == "0"
    assert all(row[2].startswith("1.1") for row in table.rows)


def test_benchmark_table(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = {"median": 2.347, "min": 2.0, "max": 3.0}
    row = {"what": "a", "against": "b", "ratio": 2.347, "spread": spread, "target": "≥ 2"}
    monkeypatch.setattr(reports, "recorded", lambda name: {"rows": [row]})
    assert reports.benchmark_table().rows[0][2:4] == ("theirs / ours", "2.35 [2, 3]")


# --- figures --------------------------------------------------------------------------------------


def check(fig) -> str:  # type: ignore[no-untyped-def]
    output = show(fig, note="made up")
    assert 1000 < len(output.png) <= MAX_BYTES
    return output.digest


def test_theory_figures() -> None:
    shell = figures.draw_shell((4,))
    density = next(line for line in shell.axes[0].lines if line.get_label() == "target, d = 4")
    x, y = density.get_data()
    assert np.trapezoid(y, x) == pytest.approx(1, abs=0.01)
    assert abs(x[y.argmax()] - math.sqrt(49 + 1)) < 0.3
    check(shell)
    check(figures.draw_geometry())
    contrast = figures.draw_contrast((2, 8, 16))
    left, right = contrast.axes
    assert left.lines[0].get_ydata()[1] == pytest.approx(STANDARD.log_error(8).high / math.log(10))
    far, near = (line.get_ydata()[-1] for line in right.lines)
    assert far > 0.99
    assert near < 0.01
    check(contrast)


def test_experiment_figures(runs: tuple[list[trials.Stay], list[trials.Stay]]) -> None:
    fig = figures.draw_stays(runs[0])
    assert fig.axes[0].lines[2].get_ydata()[0] == pytest.approx(
        -math.log10(1 - 0.05**0.01), abs=1e-6
    )
    check(fig)
    share = Estimate(0.1, 0.08, 0.12, 100, 0.95)
    check(figures.draw_exits([trials.Exit(1, 1.0, 3.0, share, 0.3)] * 2))
    memory = trials.Memory(32, 64, -5.0, share, share, (1.0, 0.0))
    assert "-5" in check(figures.draw_memories([memory]))
    paths = torch.linspace(7, 1, 10, dtype=torch.float64)[:, None].expand(10, 3)
    check(
        figures.draw_paths(
            trials.Contrast(64, paths, paths, paths, torch.arange(10), torch.arange(10))
        )
    )


@pytest.fixture(scope="module")
def study():  # type: ignore[no-untyped-def]
    setting = StartsSetting(
        n_train=12,
        n_held_out=12,
        n_seeds=2,
        width=16,
        train_steps=20,
        control_steps=10,
        n_starts=6,
        n_chains=30,
        n_steps=20,
        trap=(100.0, 0.05, 0.1),
    )
    return starts_study(GaussianScore(torch.ones(20), 2.0), setting)


def test_learned_tables_and_figure(study) -> None:  # type: ignore[no-untyped-def]
    assert len(reports.networks_table(study, "made up").rows) == 2
    table = reports.starts_table(study, "kl", "made up")
    assert [row[0] for row in table.rows] == list(reports.SCORES.values())
    fresh = float(study.kl["exact"]["fresh"].mean())
    exact = next(row for row in table.rows if row[0] == "exact score")
    assert float(exact[1].split()[0]) == pytest.approx(fresh, abs=0.06)
    check(figures.draw_starts(study))


def test_audit_table_names_the_starts(study) -> None:  # type: ignore[no-untyped-def]
    rows = reports.audit_table(study, n_steps=5).rows
    assert [row[:3] for row in rows[:2]] == [
        (reports.SCORES["memorised"], "training", "100 %"),
        (reports.SCORES["memorised"], "fresh", "0 %"),
    ]


def test_samplers_table_and_figure() -> None:
    means = torch.stack([torch.full((3,), -2.0), torch.full((3,), 4.0)])
    setting = DiffusionSetting(
        n_train=20, n_held_out=20, n_seeds=2, n_levels=6, width=16, train_steps=10, n_chains=20
    )
    found = learned_diffusion_study(MixtureScore(means, 2.0), setting)
    table = reports.learned_diffusion_table(found, "made up")
    assert [row[0] for row in table.rows] == list(reports.SAMPLERS.values())
    assert table.rows[0][-1] == ""
    distance = float(found.w2["langevin"].mean())
    assert float(table.rows[1][1].split()[0]) == pytest.approx(distance, abs=0.006)
    check(figures.draw_samplers(found))
