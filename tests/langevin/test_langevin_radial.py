"""The reduced chain: one step in closed form, and many against the chain in all dimensions."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from proofread.langevin import radial
from proofread.langevin.radial import RadialChains, RadialStart, radial_chain
from proofread.langevin.samplers import DivergenceError
from proofread.langevin.scores import GaussianScore, MixtureScore, TrapScore

STEP = 0.05


def first_axis(dimension: int, length: float) -> torch.Tensor:
    mean = torch.zeros(dimension, dtype=torch.float64)
    mean[0] = length
    return mean


def shallow_trap(dimension: int) -> TrapScore:
    """Both basins and the bump between them are visited within tens of steps."""
    mean = first_axis(dimension, 1.5 * math.sqrt(dimension))
    return TrapScore(mean, alpha=1.2, inner=0.8, outer=1.45)


def mixture(dimension: int) -> MixtureScore:
    means = torch.stack([first_axis(dimension, length) for length in (-1.0, 0.5, 2.0)])
    return MixtureScore(means, torch.tensor([0.8, 1.1, 1.0]), torch.tensor([0.5, 0.2, 0.3]))


SCORES = {
    "gaussian": lambda d: GaussianScore(first_axis(d, 2.0), variance=0.7),
    "trap": shallow_trap,
    "mixture": mixture,
}


def full_chain(score, x: np.ndarray, step: float, n_steps: int, seed: int) -> np.ndarray:
    """x' = x + h s(x) + √(2h) ξ in all dimensions: ``[C, d]``."""
    rng = np.random.default_rng(seed)
    for _ in range(n_steps):
        drift = score(torch.from_numpy(x)).numpy()
        x = x + step * drift + math.sqrt(2 * step) * rng.standard_normal(x.shape)
    return x


def reduced(score, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y, axis = x - score.origin.numpy(), score.axis.numpy()
    return y @ axis, (y**2).sum(1) - (y @ axis) ** 2


# --- one step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("dimension", [1, 2, 3, 64])
def test_one_step_has_its_law(kind, dimension):
    """u' is normal and w' / 2h a non-central χ² on d − 1 degrees, about the score at a point."""
    score, n = SCORES[kind](dimension), 4000
    u, w = 0.6 * math.sqrt(dimension), float(dimension - 1)
    across = torch.zeros(dimension, dtype=torch.float64)
    across[-1] = dimension > 1
    drift = score(score.origin + u * score.axis + math.sqrt(w) * across)
    mean = u + STEP * float(drift @ score.axis)
    found = radial_chain(score, RadialStart(u, w), STEP, 1, n_chains=n, seed=dimension)
    assert stats.kstest((found.u - mean) / math.sqrt(2 * STEP), "norm").pvalue > 1e-3
    assert found.u.mean() == pytest.approx(mean, abs=4 * math.sqrt(2 * STEP / n))
    if dimension == 1:
        assert not found.w.any()
        return
    shift = (math.sqrt(w) + STEP * float(drift @ across)) ** 2
    law = stats.ncx2(dimension - 1, shift / (2 * STEP), scale=2 * STEP)
    assert stats.kstest(found.w, law.cdf).pvalue > 1e-3
    spread = math.sqrt(8 * STEP**2 * (dimension - 1) + 8 * STEP * shift)
    expected = shift + 2 * STEP * (dimension - 1)
    assert found.w.mean() == pytest.approx(expected, abs=4 * spread / math.sqrt(n))
    assert found.w.std() == pytest.approx(spread, rel=0.15)
    assert abs(np.corrcoef(found.u, found.w)[0, 1]) < 4 / math.sqrt(n)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("dimension", [1, 2, 3, 64])
def test_compiled_loop_is_its_own_python_source(kind, dimension):
    score = SCORES[kind](dimension)
    parameters = np.array(score.law.parameters, dtype=np.float64)
    setting = (score.law.kind, parameters, dimension, STEP, math.inf, 3)
    ends, kept = [], [np.zeros((5, 2)), np.zeros((5, 2))]
    for loop, rows in zip((radial._advance, radial._compiled()), kept, strict=True):
        rng = np.random.default_rng(7)
        ends.append(loop(*setting, 0, 16, 0.3, float(dimension > 1), rng, rows))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-12)
    np.testing.assert_allclose(kept[0], kept[1], rtol=1e-12)


# --- many steps -----------------------------------------------------------------------------------

DIMENSION, N_STEPS, CHAINS, SEEDS = 64, 40, 400, 20
LEVEL = 0.01 / (2 * SEEDS)  # Bonferroni at 1 % over seeds and two coordinates


def both_chains(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], RadialChains]:
    score = shallow_trap(DIMENSION)
    x = np.zeros((CHAINS, DIMENSION))
    x[:, :2] = 4.8, 8.0  # radius 9.3: the bump lies between 6.4 and 11.6
    full = full_chain(score, x, STEP, N_STEPS, seed)
    return reduced(score, full), radial_chain(score, torch.from_numpy(x), STEP, N_STEPS, seed=seed)


def test_reduced_and_full_chain_agree_through_the_bump_zone():
    pairs = [both_chains(seed) for seed in range(SEEDS)]
    for (u, w), chains in pairs:
        assert stats.ks_2samp(u, chains.u).pvalue > LEVEL
        assert stats.ks_2samp(w, chains.w).pvalue > LEVEL
    # All zones are in play, and the test sees a chain of another trap, or one dimension less.
    radius = np.concatenate([chains.radius for _, chains in pairs])
    assert np.mean((radius > 6.4) & (radius < 11.6)) > 0.2
    assert np.mean(radius > 11.6) > 0.2
    u, w = np.concatenate([full for full, _ in pairs], axis=1)
    start = RadialStart(4.8, 64.0)
    other = TrapScore(first_axis(DIMENSION, 12.0), alpha=1.2, inner=0.8, outer=1.55)
    wrong = radial_chain(other, start, STEP, N_STEPS, n_chains=CHAINS * SEEDS, seed=0)
    assert stats.ks_2samp(u, wrong.u).pvalue < LEVEL
    law = shallow_trap(DIMENSION).law
    less = SimpleNamespace(law=law, dimension=DIMENSION - 1, lipschitz=1.0)
    wrong = radial_chain(less, start, STEP, N_STEPS, n_chains=CHAINS * SEEDS, seed=0)
    assert stats.ks_2samp(w, wrong.w).pvalue < LEVEL


@pytest.mark.parametrize("dimension", [1, 2, 5])
@pytest.mark.parametrize("kind", ["trap", "mixture"])
def test_reduced_and_full_chain_agree_in_few_dimensions(kind, dimension):
    score = SCORES[kind](dimension)
    x = np.random.default_rng(5).standard_normal((2000, dimension)) + score.origin.numpy()
    u, w = reduced(score, full_chain(score, x, STEP, 30, 1))
    chains = radial_chain(score, "gaussian", STEP, 30, n_chains=2000, seed=2)
    assert stats.ks_2samp(u, chains.u).pvalue > 1e-3
    assert dimension == 1 or stats.ks_2samp(w, chains.w).pvalue > 1e-3


def test_gaussian_stationary_law():
    """The fixed point of v' = (1 − h/v₀)² v + 2h is v₀ / (1 − h / 2v₀)."""
    step, dimension, variance = 0.4, 64, 0.7
    score = GaussianScore(first_axis(dimension, 2.0), variance)
    fixed = variance / (1 - step / (2 * variance))
    chains = radial_chain(score, "gaussian", step, 200, n_chains=3000, seed=1)
    assert stats.kstest((chains.u - 2) / math.sqrt(fixed), "norm").pvalue > 1e-3
    assert stats.kstest(chains.w / fixed, stats.chi2(dimension - 1).cdf).pvalue > 1e-3
    long = radial_chain(score, RadialStart(2.0, 40.0), step, 400_000, seed=4, thin=20)
    assert long.us.shape == (20_000, 1)
    assert long.ws.mean() == pytest.approx(fixed * (dimension - 1), rel=4 * math.sqrt(2 / 63 / 2e4))
    assert long.us.var() == pytest.approx(fixed, rel=4 * math.sqrt(2 / 2e4))


def test_a_million_dimensions():
    """OU with pull α in the trap: the radius settles at √(d / (α (1 − αh/2))) and stays there."""
    dimension, alpha, step = 10**6, 10.0, 0.02
    score = TrapScore(first_axis(dimension, 7 * math.sqrt(dimension)), alpha)
    settings = {"n_chains": 2, "seed": 0, "stop_radius": 4 * math.sqrt(dimension), "thin": 1000}
    chains = radial_chain(score, "gaussian", step, 100_000, **settings)
    assert (chains.exit_step == -1).all()
    expected = math.sqrt(dimension / (alpha * (1 - alpha * step / 2)))
    np.testing.assert_allclose(np.sqrt(chains.us**2 + chains.ws), expected, rtol=0.01)
    assert chains.radius.mean() == pytest.approx(expected, rel=5e-3)
    control = GaussianScore(score.axis * 7 * math.sqrt(dimension))
    found = radial_chain(control, "gaussian", step, 2000, n_chains=2, seed=0)
    np.testing.assert_allclose(found.radius, math.sqrt(50 * dimension), rtol=1e-3)


# --- exits ----------------------------------------------------------------------------------------


def test_exit_times_of_a_small_trap():
    """x' = (1 − αh) x + √(2h) ξ until |x| > R, for d = 1 and d = 2."""
    n, n_steps, stop = 2000, 300, 1.6
    for dimension in (1, 2):
        score = TrapScore(first_axis(dimension, 7.0), alpha=1.5, inner=2.0, outer=3.0)
        rng, x = np.random.default_rng(3), np.zeros((n, dimension))
        exits = np.full(n, n_steps + 1)
        for number in range(1, n_steps + 1):
            x = (1 - 1.5 * STEP) * x + math.sqrt(2 * STEP) * rng.standard_normal(x.shape)
            exits[(np.linalg.norm(x, axis=1) > stop) & (exits > n_steps)] = number
        start = RadialStart(0.0, 0.0)
        chains = radial_chain(
            score, start, STEP, n_steps, n_chains=n, seed=8, stop_radius=stop, thin=1
        )
        found = np.where(chains.exit_step < 0, n_steps + 1, chains.exit_step)
        edges = [0.5, 12.5, 25.5, 50.5, 100.5, 200.5, n_steps + 0.5, n_steps + 1.5]
        table = [np.histogram(times, edges)[0] for times in (exits, found)]
        table = np.array(table)[:, np.sum(table, axis=0) > 9]
        assert stats.chi2_contingency(table).pvalue > 1e-3
        assert table.shape[1] > 4
        stays_where_it_left(chains, stop)


def stays_where_it_left(chains: RadialChains, stop: float) -> None:
    """Within the radius up to the exit, past it there, and not moved after."""
    radius = np.sqrt(chains.us**2 + chains.ws)  # [steps, C]
    steps = np.arange(1, len(radius) + 1)[:, None]
    ends = np.where(chains.exit_step < 0, chains.n_steps + 1, chains.exit_step)
    assert (radius[steps < ends] <= stop).all()
    assert (radius[steps >= ends] > stop).all()
    after = np.broadcast_to(steps >= ends, radius.shape)
    np.testing.assert_array_equal(chains.us[after], np.broadcast_to(chains.u, after.shape)[after])
    assert ((chains.radius > stop) == (chains.exit_step >= 0)).all()


def test_a_start_beyond_the_radius_is_an_exit_at_step_0():
    score = GaussianScore(first_axis(3, 1.0))
    start = RadialStart([0.0, 5.0], [0.0, 1.0])
    chains = radial_chain(score, start, 0.01, 6, seed=0, stop_radius=4.0, thin=2)
    assert chains.exit_step.tolist() == [-1, 0]
    assert (chains.u[1], chains.w[1]) == (5.0, 1.0)
    assert chains.us[:, 1].tolist() == [5.0, 5.0, 5.0]


# --- reproducibility and shape --------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCORES)
def test_a_chain_does_not_depend_on_the_others_nor_on_slices(kind, monkeypatch):
    score = SCORES[kind](5)
    settings = {"seed": 11, "thin": 4, "stop_radius": 100.0}
    many = radial_chain(score, "gaussian", STEP, 30, n_chains=7, **settings)
    monkeypatch.setattr(radial, "SLICE", 9)
    few = radial_chain(score, "gaussian", STEP, 30, n_chains=3, **settings)
    for name in ("u", "w", "exit_step", "us", "ws"):
        np.testing.assert_array_equal(getattr(few, name), getattr(many, name)[..., :3])
    assert many.us.shape == many.ws.shape == (7, 7)
    assert len(set(many.u.tolist())) == 7
    other = radial_chain(score, "gaussian", STEP, 30, n_chains=3, seed=12)
    assert not np.isin(other.u, many.u).any()
    unstopped = radial_chain(score, "gaussian", STEP, 30, n_chains=3, seed=12, stop_radius=1e200)
    np.testing.assert_array_equal(unstopped.u, other.u)
    assert other.us is None
    assert other.ws is None


def test_kept_states_are_those_of_shorter_runs():
    score, start = shallow_trap(3), RadialStart(1.0, 2.0)
    kept = radial_chain(score, start, STEP, 17, n_chains=2, seed=3, thin=5)
    for row, n_steps in enumerate((5, 10, 15)):
        short = radial_chain(score, start, STEP, n_steps, n_chains=2, seed=3)
        np.testing.assert_array_equal(kept.us[row], short.u)
        np.testing.assert_array_equal(kept.ws[row], short.w)
    assert len(kept.us) == 3


@pytest.mark.parametrize("dimension", [1, 2, 3, 64])
def test_gaussian_starts(dimension):
    score = GaussianScore(first_axis(dimension, 2.0))
    starts = radial_chain(score, "gaussian", STEP, 0, n_chains=4000, seed=1)
    assert stats.kstest(starts.u, "norm").pvalue > 1e-3
    if dimension == 1:
        assert not starts.w.any()
    else:
        assert stats.kstest(starts.w, stats.chi2(dimension - 1).cdf).pvalue > 1e-3
        assert abs(np.corrcoef(starts.u, starts.w)[0, 1]) < 0.06


def test_points_are_projected_about_the_origin():
    centre = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    score = TrapScore(torch.tensor([3.0, 4.0, 12.0]), alpha=2.0, centre=centre)
    x = torch.randn(5, 3, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    chains = radial_chain(score, x[:, :], STEP, 0, seed=0)
    u, w = reduced(score, x.double().numpy())
    np.testing.assert_allclose(chains.u, u, rtol=1e-12)
    np.testing.assert_allclose(chains.w, w, rtol=1e-12)
    np.testing.assert_allclose(chains.radius, (x - centre).norm(dim=1).numpy(), rtol=1e-12)
    strided = x.numpy().T.copy().T
    again = radial_chain(score, strided, STEP, 0, seed=0)
    np.testing.assert_allclose(again.u, chains.u, rtol=1e-14)
    one = radial_chain(score, RadialStart(1, 2), STEP, 0, seed=0)
    assert (one.u.tolist(), one.w.tolist()) == ([1.0], [2.0])


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0.0}, "step must be positive"),
        ({"step": -1.0}, "step must be positive"),
        ({"step": math.nan}, "step must be positive"),
        ({"n_steps": -1}, "n_steps must be at least 0"),
        ({"n_steps": 2**63}, "n_steps must be at least 0 and below"),
        ({"thin": 0}, "thin must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"stop_radius": 0.0}, "stop_radius must be positive"),
        ({"start": "gauss"}, "the only named start"),
        ({"start": torch.zeros(3)}, r"write start\[None\] for one chain"),
        ({"start": ([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])}, "u and w or two points"),
        ({"start": RadialStart(1e151, 0.0)}, r"closer to the origin than 1e\+150"),
        ({"start": RadialStart(0.0, 1e302)}, r"closer to the origin than 1e\+150"),
        ({"start": np.full((2, 3), 1e151)}, r"closer to the origin than 1e\+150"),
        ({"start": RadialStart(math.nan, 1.0)}, "start must be finite"),
        ({"start": RadialStart(1e200, 1.0)}, "start must be finite"),
        ({"start": RadialStart(1.0, -1.0)}, "w is the squared distance"),
        ({"start": RadialStart([1.0, 2.0], [1.0, 2.0, 3.0])}, "of one C"),
        ({"start": RadialStart([[1.0]], [[1.0]])}, "not of shape"),
        ({"start": RadialStart("far", 1.0)}, "must be numbers"),
        ({"start": RadialStart([], [])}, "holds 0 chains"),
        ({"start": RadialStart([1.0, 2.0], 1.0), "n_chains": 3}, "holds 2 chains"),
        ({"start": torch.zeros(4, 2)}, r"points \[C, 3\]"),
        ({"start": torch.zeros(3)}, r"points \[C, 3\]"),
        ({"start": np.full((2, 3), np.inf)}, "start must be finite"),
        ({"n_chains": 0}, "n_chains must be at least 1"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"start": RadialStart(1.0, 1.0), "step": STEP, "n_steps": 3, "seed": 0, **change}
    with pytest.raises(ValueError, match=message):
        radial_chain(GaussianScore(first_axis(3, 1.0)), **arguments)


def test_bad_types_are_named():
    score, start = GaussianScore(first_axis(3, 1.0)), RadialStart(1.0, 1.0)
    with pytest.raises(TypeError, match="n_steps must be an integer"):
        radial_chain(score, start, STEP, 1e3, seed=0)
    with pytest.raises(TypeError, match="step must be a number"):
        radial_chain(score, start, "small", 1, seed=0)
    with pytest.raises(TypeError, match="seed must be an integer"):
        radial_chain(score, start, STEP, 1, seed=None)
    triangle = MixtureScore(torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]]))
    with pytest.raises(TypeError, match="centres on one line"):
        radial_chain(triangle, start, STEP, 1, seed=0)
    with pytest.raises(TypeError, match="must be radial"):
        radial_chain(torch.nn.Identity(), start, STEP, 1, seed=0)
    with pytest.raises(ValueError, match="0 in one dimension"):
        radial_chain(GaussianScore(first_axis(1, 1.0)), start, STEP, 1, seed=0)


class Still(GaussianScore):
    """Another score under the law of its base class."""

    def __call__(self, x):
        return torch.zeros_like(x)


class Scaled(TrapScore):
    def coefficients(self, u, w):
        return tuple(2 * part for part in super().coefficients(u, w))


class Named(GaussianScore):
    """The same score."""

    name = "exact"


def test_a_subclass_with_another_score_is_refused():
    mean, start = first_axis(3, 1.0), RadialStart(1.0, 1.0)
    for score in (Still(mean), Scaled(7 * mean, alpha=2.0, inner=1.0, outer=1.5)):
        with pytest.raises(TypeError, match="overrides the score of a radial class"):
            radial_chain(score, start, STEP, 1, seed=0)
    patched = GaussianScore(mean)
    patched.coefficients = lambda u, w: (u, w)
    with pytest.raises(TypeError, match="overrides"):
        radial_chain(patched, start, STEP, 1, seed=0)
    same = radial_chain(Named(mean), start, STEP, 5, seed=0)
    assert same.u == radial_chain(GaussianScore(mean), start, STEP, 5, seed=0).u


def test_one_gaussian_start_by_default():
    score = GaussianScore(first_axis(3, 1.0))
    one = radial_chain(score, "gaussian", STEP, 5, seed=3)
    assert one.u.shape == (1,)
    assert one.u[0] == radial_chain(score, "gaussian", STEP, 5, n_chains=4, seed=3).u[0]
    with pytest.raises(ValueError, match=r'start=\'gauss\': the only named start is "gaussian"$'):
        radial_chain(score, "gauss", STEP, 5, seed=3)


@pytest.mark.parametrize("pair", [(1.0, 2.0), ([1.0, 0.5], [2.0, 3.0]), ([1.0, 0.5], 2.0)])
def test_a_pair_is_a_reduced_start(pair):
    score = GaussianScore(first_axis(3, 1.0))
    found = radial_chain(score, pair, STEP, 5, seed=3)
    expected = radial_chain(score, RadialStart(*pair), STEP, 5, seed=3)
    np.testing.assert_array_equal(found.u, expected.u)
    np.testing.assert_array_equal(found.w, expected.w)


@pytest.mark.parametrize("dimension", [1, 2, 9])
def test_divergence_names_chain_step_and_remedy(dimension):
    score = GaussianScore(first_axis(dimension, 1.0), variance=0.1)
    with pytest.raises(
        DivergenceError, match=r"chain 0 diverged at step \d+: .* 2 / lipschitz = 0.2"
    ):
        radial_chain(score, "gaussian", 0.3, 100_000, n_chains=2, seed=0)
    double = MixtureScore(torch.stack([first_axis(dimension, x) for x in (-1.0, 1.0)]), 0.1)
    with pytest.raises(DivergenceError, match="too large"):
        radial_chain(double, "gaussian", 0.3, 100_000, n_chains=1, seed=0)
    stable = radial_chain(score, "gaussian", 0.19, 10_000, n_chains=2, seed=0)
    assert np.isfinite(stable.radius).all()


def test_a_nan_in_the_law_is_named_and_never_returned():
    law = SimpleNamespace(kind=1, parameters=(1.0, math.nan, 1.0, 2.0))
    score = SimpleNamespace(law=law, dimension=3, lipschitz=1.0)
    with pytest.raises(DivergenceError, match="chain 0 diverged at step 1: look for a NaN"):
        radial_chain(score, RadialStart(0.0, 1.0), 0.1, 5, seed=0)


# --- long runs, compiling, importing --------------------------------------------------------------


def test_a_long_run_can_be_interrupted():
    def interrupt(*_):
        raise KeyboardInterrupt

    radial._compiled()
    before = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            radial_chain(mixture(10**6), "gaussian", 0.1, 10**9, n_chains=1, seed=0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 10


def test_the_bar_is_silent_where_nobody_watches(capfd):
    score = GaussianScore(first_axis(3, 1.0))
    radial_chain(score, "gaussian", STEP, 50, n_chains=3, seed=0)
    assert capfd.readouterr().err == ""
    radial_chain(score, "gaussian", STEP, 50, n_chains=3, seed=0, stop_radius=1.0, progress=True)
    assert "150/150" in capfd.readouterr().err  # steps that a stopped chain left out count as done


def no_folder(*_):
    raise PermissionError("read-only")


def torn(*_):
    raise EOFError("torn file")


@pytest.mark.parametrize("where", ["ensure_cache_path", "_load_index", "_save_data"])
def test_compiles_without_a_working_cache(where, monkeypatch):
    from numba.core import caching

    names = {"ensure_cache_path": (caching._CacheLocator, no_folder)}
    owner, fault = names.get(where, (caching.IndexDataCacheFile, torn))
    monkeypatch.setattr(owner, where, fault)
    if where == "_save_data":  # nothing to load, so that it compiles and saves
        monkeypatch.setattr(owner, "_load_index", lambda _: {})
        monkeypatch.setattr(owner, "_save_index", lambda *_: None)
    loop = radial._compiled.__wrapped__()
    setting = (radial.GAUSSIAN, np.array([1.0, 1.0]), 3, STEP, math.inf, 2)
    ended = loop(*setting, 0, 1, 0.0, 0.0, np.random.default_rng(0), np.empty((0, 2)))
    assert ended[2:] == (1, radial.RUNNING)


def test_import_does_not_load_numba():
    code = "import sys, proofread.langevin.radial; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
