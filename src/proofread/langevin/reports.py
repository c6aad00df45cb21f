"""Tables of the chapter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..recordings import recorded
from ..stats import Estimate, fit_exponent, mean_interval
from ..tables import Table
from . import identities
from .audit import initialization_audit
from .bounds import certified_log_horizon, escape_bound, langevin_tv_bound
from .enclosures import LogEnclosure
from .identities import STANDARD, Trap
from .learned_study import STARTS, DiffusionStudy, StartsStudy
from .radial import radial_chain
from .samplers import langevin
from .scores import TrapScore
from .trials import Contrast, Corrected, Exit, Stay, level_trap

LN10 = math.log(10)


def power_of_ten(log: float, digits: int = 2) -> str:
    """e^log as 10^x, for numbers that floats do not hold."""
    if log > math.log(1e-3):
        return f"{math.exp(log):.{digits + 1}g}"
    return f"10^{log / LN10:,.{digits}f}"


def _dimension(d: int) -> str:
    return f"{d:,}"


def _enclosed(enclosure: LogEnclosure) -> str:
    """The common decimals of both ends, or both."""
    low, high = power_of_ten(enclosure.low), power_of_ten(enclosure.high)
    return low if low == high else f"{low} to {high}"


def error_table(dimensions: Sequence[int] = (1, 2, 4, 8, 64, 1024, 100_000)) -> Table:
    """Certified L^p errors of theorem 1's trap and the proof's bound."""
    rows = []
    for d in dimensions:
        two, four = STANDARD.log_error(d, 2), STANDARD.log_error(d, 4)
        crude = power_of_ten(identities.crude_log_error(d, 2))
        width = "< 1e-6" if max(two.width, four.width) < 1e-6 else f"{two.width:.0e}"
        three = _enclosed(STANDARD.log_error(d, 3))
        rows.append((_dimension(d), _enclosed(two), crude, three, _enclosed(four), width))
    columns = ("d", "L² error", "bound of the proof", "L³ error", "L⁴ error", "relative width")
    note = "α = 10, certified; the width is that of the enclosures of the L² and L⁴ errors"
    return Table(columns, rows, note)


def escape_table(horizon: float = 50.0) -> Table:
    """The bound on leaving, the exit probability, and ULA's bound, where none of them is 0."""
    rows = []
    for d, alpha, ratio in (
        (1, 1.0, 4.0),
        (1, 1.5, 3.0),
        (2, 1.0, 3.5),
        (3, 1.0, 3.0),
        (4, 1, 2.5),
    ):
        radius = ratio * math.sqrt(d)
        bound, truth = identities.escape_factor(d, alpha, radius, horizon)
        steps = escape_bound(d, alpha, radius, math.log(horizon), start_variance=1.0, step=0.1)
        row = f"{truth:.3g}", f"{bound:.3g}", f"{math.exp(steps.log_probability):.3g}"
        rows.append((d, alpha, f"{ratio}√d", *row, f"{bound / truth:.1f}"))
    columns = ("d", "α", "R", "probability", "bound", "bound for h = 0.1", "bound / probability")
    note = f"T = {horizon:g}, from N(0, I); probability by finite volumes, 1,000 cells"
    return Table(columns, rows, note)


def theorem_table(
    dimensions: Sequence[int] = (1, 2, 4, 8, 64, 1024, 1_000_000), step: float = 0.02
) -> Table:
    """Error, distance and horizon of theorem 1 with explicit constants, by dimension."""
    rows = []
    for d in dimensions:
        error = power_of_ten(STANDARD.log_error(d).high)
        gap = power_of_ten(STANDARD.log_gap(d, float(d)))
        args = d, STANDARD.alpha, STANDARD.inner, STANDARD.mean_norm(d)
        steps = langevin_tv_bound(*args, float(d), start_variance=1.0, step=step)
        horizon = STANDARD.log_horizon(d)
        longest = f"e^{horizon:,.1f}" if math.isfinite(horizon) else "none"
        rows.append((_dimension(d), error, gap, power_of_ten(steps), longest))
    columns = ("d", "L² error ≤", "1 − TV ≤, T = e^d", "the same, ULA", "longest T with TV ≥ 0.99")
    return Table(columns, rows, f"α = 10, from N(0, I), certified; ULA with h = {step}")


def start_table(dimensions: Sequence[int] = (8, 64, 1024)) -> Table:
    """Bound on leaving by T = e^d, and the certified horizon, from points around the centre."""
    rows = []
    for ratio in (0.0, 1.1, 2.0, 3.0):
        cells = []
        for d in dimensions:
            radius = STANDARD.inner * math.sqrt(d)
            norm = ratio * math.sqrt(d)
            leave = escape_bound(d, STANDARD.alpha, radius, float(d), start_norm=norm)
            args = d, STANDARD.alpha, STANDARD.inner, STANDARD.mean_norm(d)
            horizon = certified_log_horizon(*args, tv=0.99, start_norm=norm)
            cells.append(f"{power_of_ten(leave.log_probability, 1)}; e^{horizon:,.0f}")
        rows.append((f"{ratio}√d", *cells))
    columns = ("‖x₀‖", *(f"d = {d}" for d in dimensions))
    note = "P(leave by T = e^d) ≤; longest T with TV ≥ 0.99; certified, α = 10"
    return Table(columns, rows, note)


def reduction_table(n_chains: int = 400, n_steps: int = 40, seeds: int = 5) -> Table:
    """Two-sample tests of full and radial chains that start in the bump zone, d = 16."""
    from scipy.stats import ks_2samp

    score = TrapScore.standard(16, alpha=1.5)
    start = torch.zeros(n_chains, 16, dtype=torch.float64)
    start[:, 0] = 4.5 * 4.0  # the middle of the bump zone: it stays or leaves
    pairs = []
    for seed in range(seeds):
        full = langevin(score, start, 0.02, n_steps, seed=seed).final
        u = full @ score.axis
        w = full.square().sum(-1) - u * u
        chain = radial_chain(score, start, 0.02, n_steps, seed=seed + 1000)
        samples = ((u, chain.u), (w, chain.w))
        pairs.append([float(ks_2samp(a.numpy(), np.asarray(b)).pvalue) for a, b in samples])
    smallest = np.min(pairs, axis=0) * 2 * seeds  # Bonferroni
    verdict = ["no difference" if p > 0.01 else "different" for p in smallest]
    rows = [("u", verdict[0]), ("w", verdict[1])]
    note = f"Kolmogorov–Smirnov at 1 % (Bonferroni), {seeds} seeds, {n_chains} chains, d = 16"
    return Table(("coordinate", "full against radial"), rows, note)


def geometry_table(d: int = 256, alpha: float = 100.0) -> Table:
    """What a trap of some radius around a training point costs and holds."""
    rows = []
    for inner, outer in ((0.05, 0.1), (0.2, 0.3), (0.4, 0.5), (0.6, 0.7), (0.9, 1.0)):
        exponent = identities.ball_exponent(outer, 1.0)
        apart = identities.ball_exponent(math.sqrt(2) * outer, 0.0)
        root = math.sqrt(d)
        leave = escape_bound(d, alpha, inner * root, float(0.1 * d), start_norm=0.0)
        error = Trap(alpha, 1.0, inner, outer).log_error(d)
        cells = f"{exponent:.3f}", power_of_ten(error.high), f"{apart:.3f}"
        hold = f"{alpha * inner**2:.2f}"
        rows.append((f"{inner}, {outer}", *cells, hold, power_of_ten(leave.log_probability)))
    columns = ("ρ", "error exponent", "L² error of one trap", "overlap exponent", "α ρ²", "leave ≤")
    note = f"d = {d}, α = {alpha:g}, ‖xᵢ‖ = √d, T = e^(d/10) from xᵢ; overlap: of two given balls"
    return Table(columns, rows, note)


def tilt_table(dimensions: Sequence[int] = (1, 3, 10, 100)) -> Table:
    """Where the ball has to be for an L² error of 10⁻⁶, and what that does to the limit."""
    rows = []
    for d in dimensions:
        score = identities.tilted(d)
        distance = float(score.centre.norm())
        error = power_of_ten(score.lp_error(2).high)
        cells = f"{distance:.2f}", f"{score.height:.1f}", error
        rows.append((d, *cells, f"{math.floor(score.limit_tv() * 1e5) / 1e5:.5f}"))
    columns = ("d", "distance of the ball", "height G", "L² error ≤", "TV of the limit ≥")
    note = "target N(0, I), radii √d/2 and √d; a construction of ours; certified"
    return Table(columns, rows, note)


def diffusion_table(dimensions: Sequence[int] = (4, 8, 16, 64, 1024, 1_000_000)) -> Table:
    """The same error at every level: certified distances of both samplers."""
    rows = []
    for d in dimensions:
        error = power_of_ten(STANDARD.log_error(d).high)
        tv = power_of_ten(min(0.0, identities.log_diffusion_tv(d)))
        gap = power_of_ten(STANDARD.log_gap(d, float(d)))
        levels = f"{identities.diffusion_levels(d):,}"
        rows.append((_dimension(d), error, levels, tv, gap))
    columns = ("d", "L² error, each level ≤", "levels K", "diffusion: TV ≤", "Langevin: 1 − TV ≤")
    note = f"theorem 1's trap; levels {identities.LEVEL_STEP} apart; Langevin at T = e^d"
    return Table(columns, rows, note)


# --- experiments ----------------------------------------------------------------------------------


def stay_table(trapped: Sequence[Stay], exact: Sequence[Stay]) -> Table:
    """Where chains are at the end, with the trap and with the exact score."""
    rows = []
    for run, control in zip(trapped, exact, strict=True):
        shares = f"{run.inside:.3g}", f"{control.inside:.3g}"
        distances = f"{run.distance:.2f}", f"{control.distance:.2f}"
        proved = f"{run.tv.low:.3f}", f"{control.tv.low:.3f}"
        rows.append((_dimension(run.dimension), run.method, *shares, *distances, *proved))
    pairs = ("in the ball", "‖x − μ‖/√d", "TV ≥")
    columns = [f"{name}, {score}" for name in pairs for score in ("trap", "exact")]
    note = f"ULA from N(0, I), h = 0.02, {trapped[0].tv.n} chains; one-sided 95 %"
    return Table(("d", "chains", *columns), rows, note)


def exponent_table(dimensions: Sequence[int] = (64, 1024, 10_000, 100_000, 1_000_000)) -> Table:
    """Fitted exponents k in −log(quantity) ~ d^k, and the rate at the largest dimension."""
    gap = {d: -STANDARD.log_gap(d, float(d)) for d in dimensions}
    quantities = {
        "L² error": {d: -STANDARD.log_error(d).high for d in dimensions},
        "L⁴ error": {d: -STANDARD.log_error(d, 4).high for d in dimensions},
        "1 − TV at T = e^d": gap,
    }
    rows = []
    for name, values in quantities.items():
        fit = fit_exponent(list(values), list(values.values()))
        last = max(dimensions)
        exponent = f"{fit.value:.3f} [{fit.low:.3f}, {fit.high:.3f}]"
        rows.append((name, exponent, f"{values[last] / last:.4f}"))
    columns = ("quantity", "exponent of d", f"rate at d = {max(dimensions):,}")
    return Table(columns, rows, "certified bounds, α = 10; 95 % interval of the fit")


def long_run_table(n_steps: int, seed: int = 0, d: int = 1_000_000, step: float = 0.02) -> Table:
    """The largest radius of a long radial chain, and what it would have needed to leave."""
    score = TrapScore.standard(d)
    thin = max(1, n_steps // 1000)
    run = radial_chain(
        score,
        "gaussian",
        step,
        n_steps,
        n_chains=1,
        seed=seed,
        thin=thin,
        stop_radius=score.radius,
        progress=False,
    )
    radius = np.sqrt(np.asarray(run.us) ** 2 + np.asarray(run.ws)) / math.sqrt(d)
    left = "never" if run.exit_step[0] < 0 else f"step {run.exit_step[0]:,}"
    expected = math.sqrt(2 * step / (1 - (1 - step * score.alpha) ** 2))
    row = f"{d:,}", f"{n_steps:,}", left, f"{radius[len(radius) // 2 :].mean():.4f}"
    columns = ("d", "steps", "left", "mean radius / √d", "ULA's stationary value", "needed")
    note = f"one radial chain, h = {step}, α = {score.alpha:g}; the exit is checked at every step"
    return Table(columns, [(*row, f"{expected:.4f}", "4")], note)


def exit_table(found: Sequence[Exit]) -> Table:
    """Small traps: share of chains that left, the bound, and what it gives away."""
    rows = []
    for f in found:
        share = f"{f.share.value:.4f} [{f.share.low:.4f}, {f.share.high:.4f}]"
        factor = f"{f.bound / f.share.value:.1f}"
        rows.append(
            (f.dimension, f"{f.alpha:g}", f"{f.ratio:g}√d", share, f"{f.bound:.4f}", factor)
        )
    columns = ("d", "α", "R", "left, 95 %", "bound", "bound / share")
    return Table(columns, rows, f"ULA from N(0, I), {found[0].share.n:,} radial chains each")


def corrected_table(found: Sequence[Corrected], n_steps: int) -> Table:
    """Where MALA's chains are at the end, and how often they moved."""
    rows = []
    for run in found:
        distances = (f"{x:.2f}" for x in run.distance)
        accepted = (f"{100 * x:.1f} %" for x in run.acceptance)
        rows.append((run.dimension, *distances, *accepted))
    names = [
        f"{name}, {score}" for name in ("‖x − μ‖/√d", "accepted") for score in ("trap", "exact")
    ]
    note = f"MALA with the exact density from N(0, I), h = 0.02, {n_steps:,} steps, 64 chains"
    return Table(("d", *names), rows, note)


def contrast_table(near: Contrast, beyond: Contrast) -> Table:
    """Distances at the end of both samplers, and the certified error that they share."""
    error = power_of_ten(STANDARD.log_error(near.dimension).high)
    runs = (
        ("Langevin, trap", near.langevin),
        ("Langevin, exact score", near.exact),
        ("diffusion, traps on the origin's side", near.diffusion),
        ("diffusion, traps beyond the target", beyond.diffusion),
    )
    rows = []
    for name, paths in runs:
        last = mean_interval(paths[-1].numpy())
        shown = f"{last.value:.3f} [{last.low:.3f}, {last.high:.3f}]"
        rows.append((name, "0" if "exact" in name else error, shown))
    ideal = math.exp(math.lgamma((near.dimension + 1) / 2) - math.lgamma(near.dimension / 2))
    note = f"d = {near.dimension}; exact samples: {ideal * math.sqrt(2 / near.dimension):.3f}"
    return Table(("sampler", "L² error", "‖x − μ‖/√d at the end, 95 %"), rows, note)


def level_table(d: int = 256, times: Sequence[float] = (0.0, 1.0, 3.0, 8.0)) -> Table:
    """The certified error of the scores that the diffusion sampler was given, by level."""
    rows = []
    for time in times:
        scores = [level_trap(d, time, direction) for direction in (-1.0, 1.0)]
        errors = [power_of_ten(score.lp_error(2).high) for score in scores]
        mean = float(scores[0].mean.norm()) / math.sqrt(d)
        rows.append((f"{time:g}", f"{mean:.3f}√d", *errors))
    columns = ("t", "‖mean of p_t‖", "L² error ≤, origin's side", "L² error ≤, beyond")
    return Table(
        columns, rows, f"d = {d}, theorem 1's trap moved with the noised target, certified"
    )


def benchmark_table() -> Table:
    """Recorded times of the samplers against peers."""
    rows = []
    for row in recorded("langevin.json")["rows"]:
        limit = row["target"].startswith("≤")
        sense = "ours / theirs" if limit else "theirs / ours"
        spread = row["spread"]
        ratio = f"{row['ratio']:.3g} [{spread['min']:.3g}, {spread['max']:.3g}]"
        rows.append((row["what"], row["against"], sense, ratio, row["target"]))
    columns = ("what", "against", "ratio of times", "median [min, max]", "bar")
    return Table(columns, rows, "one thread, one process, alternating repetitions")


# --- learned scores -------------------------------------------------------------------------------

SCORES = {
    "memorised": "memorised network",
    "stopped": "stopped network",
    "exact": "exact score",
    "theorem 7": "theorem 7's score",
    "empirical": "training minimiser",
}
SAMPLERS = {
    "diffusion": "diffusion, learned, from N(0, I)",
    "langevin": "Langevin, learned, from N(0, I)",
    "langevin fresh": "Langevin, learned, from fresh samples",
    "exact": "Langevin, exact score, from N(0, I)",
    "exact fresh": "Langevin, exact score, from fresh samples",
}


def _interval(estimate: Estimate, digits: int = 2) -> str:
    value, low, high = (f"{x:.{digits}f}" for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def networks_table(study: StartsStudy, note: str) -> Table:
    """What was trained: losses at training and new points, and how far it memorised."""
    rows = []
    for kind in ("memorised", "stopped"):
        losses = (mean_interval(x[kind].numpy()) for x in (study.train_loss, study.test_loss))
        memorised = mean_interval(study.memorization[kind].numpy())
        rows.append((SCORES[kind], *(_interval(e) for e in (*losses, memorised))))
    columns = ("score", "loss at training points", "loss at new points", "memorisation")
    seeds = study.setting.n_seeds
    return Table(
        columns, rows, f"{note}; mean over {seeds} seeds, 95 %; memorisation: 1 is perfect"
    )


def starts_table(study: StartsStudy, measure: str, note: str) -> Table:
    """Distance to the target by score and start, and the ratio that is ruled on."""
    kinds = [kind for kind in SCORES if kind in getattr(study, measure)]
    rows = []
    for kind in kinds:
        found = getattr(study, measure)[kind]
        cells = [_interval(mean_interval(found[s].numpy()), 1) for s in STARTS]
        rows.append((SCORES[kind], *cells, _interval(study.ratio(kind, measure=measure))))
    name = {"kl": "KL", "w2": "W₂"}[measure]
    floor = mean_interval(getattr(study, f"{measure}_floor").numpy()).value
    columns = ("score", "fresh", "training", "N(0, I)", "training / fresh")
    last = f"{name} after Langevin, mean over {study.setting.n_seeds} seeds, 95 %"
    return Table(columns, rows, f"{note}; {last}; as many exact samples: {floor:.2f}")


def learned_diffusion_table(study: DiffusionStudy, note: str) -> Table:
    """Distances to the mixture and the share of its first component, by sampler."""
    rows = []
    for kind, name in SAMPLERS.items():
        distance = _interval(mean_interval(study.w2[kind].numpy()))
        share = _interval(mean_interval(study.first_mode[kind].numpy()))
        ratio = "" if kind == "diffusion" else _interval(study.ratio(kind))
        rows.append((name, distance, share, ratio))
    columns = ("sampler", "W₂", "share in the first component", "W₂ / diffusion's")
    floor = mean_interval(study.w2_floor.numpy()).value
    last = f"mean over {study.setting.n_seeds} seeds, 95 %; as many exact samples: {floor:.2f}"
    return Table(columns, rows, f"{note}; {last}")


def audit_table(study: StartsStudy, n_steps: int = 200) -> Table:
    """The audit of both kinds of networks, with training and with fresh starts, first seed."""
    rows = []
    train, fresh = study.train[0], study.fresh[0]
    for kind in ("memorised", "stopped"):
        score = study.networks[kind].score(0)
        for name, start in (("training", train[: len(fresh)]), ("fresh", fresh)):
            report = initialization_audit(
                start, train, score, step=study.setting.step, n_steps=n_steps, seed=1
            )
            shares = report.coincident, report.held_training, report.ends_near
            cells = ("–" if share is None else f"{100 * share.value:.0f} %" for share in shares)
            rows.append((SCORES[kind], name, *cells, report.verdict))
    columns = ("score", "starts", "in training set", "training points held", "others end at one")
    note = f"first seed, {n_steps} steps; others: starts that are not at a training point"
    return Table((*columns, "verdict"), rows, note)
