"""Tables of the chapter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..recordings import recorded
from ..stats import Estimate, mean_interval
from ..tables import Table
from . import identities
from .cases import Case, SolverRun, over_head
from .dynamics import Trajectories
from .eigensolvers import Eigenpairs
from .identities import Configuration
from .model import minimise
from .optimum import collapsed_optimum, gain_enclosure
from .relu import KinkStatistics, kink_statistics
from .study import NetworksStudy


def gain_table(depth: int = 3, n_classes: int = 3, n_per_class: int = 4) -> Table:
    """Certified gains at decays around the threshold, and what the optimum is there."""
    threshold = (depth - 1) ** (depth - 1) / depth ** (2 * depth)
    fold = (depth - 1) ** (depth - 1) * (depth + 1) ** (depth + 1) / (2 * depth) ** (2 * depth)
    rows = []
    for product in (1e-6, 1e-3, 0.999 * threshold, 1.001 * threshold, 0.999 * fold, 1.001 * fold):
        decay = (product / (n_classes ** (depth + 1) * n_per_class)) ** (1 / (depth + 1))
        sizes = (n_classes, n_per_class, depth, decay, decay)
        row = _gain_row(*sizes) if product < fold else ("none", "", "none", "zero")
        rows.append((f"{product:.5g}", *row))
    columns = ("P", "gain γ, enclosed", "width", "outlier / λ", "global optimum")
    note = f"closed form, L = {depth}; threshold P = {threshold:.5g}, fold at P = {fold:.5g}"
    return Table(columns, rows, note)


def _gain_row(k: int, n: int, depth: int, decay: float, feature_decay: float) -> tuple[str, ...]:
    low, high = gain_enclosure(k, n, depth, decay, feature_decay)
    optimum = collapsed_optimum(k, n, depth, decay, feature_decay, allow_local=True)
    width = "one rounding" if high - low <= math.ulp(high) else f"{high - low:.1e}"
    kind = "this" if optimum.is_global else "zero; this is local"
    return f"{low:.12f}", width, f"{optimum.outlier / decay:.6g}", kind


def optimiser_table() -> Table:
    """Objective that L-BFGS reaches from random starts, over the closed form's."""
    rows = []
    for found in identities.minimisers():
        closed = found.configuration.optimum().objective
        rows.append((found.configuration, "3", _excess(found.objective, closed)))
    deep = max(identities.wide(), key=lambda c: c.depth)
    model = deep.model(seed=0, scale=1.0)
    minimise(model, tolerance=1e-5)
    rows.append((deep, "1", _excess(model.objective().item(), deep.optimum().objective)))
    note = "unconstrained feature model; the last row is a start that loses classes on the way"
    return Table(("configuration", "scale of the start", "objective / closed form"), rows, note)


def _excess(objective: float, closed: float) -> str:
    ratio = objective / closed
    return "1 ± 1e-12" if abs(ratio - 1) < 1e-12 else f"{ratio:.4f}"


def softmax_table() -> Table:
    """The three values under cross-entropy, and whether an optimiser finds something better."""
    rows = []
    for configuration in identities.CROSS_ENTROPY_CONFIGURATIONS:
        optimum = identities.collapsed_softmax(configuration)
        spectrum = optimum.predicted_spectrum("layer_hessian", 1)
        values = [value for value in spectrum.values if value > 0]
        ratios = " : ".join(f"{value / values[-1]:.2f}" for value in values)
        k = configuration.n_classes
        best = identities.best_objective(configuration) / optimum.objective
        cells = (f"{optimum.gain:.3f}", f"{optimum.residual:.4f}", ratios, f"{k} : {k - 1} : 1")
        rows.append((*_sizes(configuration), *cells, f"{best:.3f}"))
    columns = ("K", "L", "t", "δ", "three values, ratio", "limit", "best found / collapsed")
    return Table(columns, rows, "unconstrained feature model, cross-entropy; best of three starts")


def _sizes(configuration: Configuration) -> tuple[int, int]:
    return configuration.n_classes, configuration.depth


# --- gradient descent -----------------------------------------------------------------------------


def outlier_counts(run: Trajectories, outlier: float) -> np.ndarray:
    """Eigenvalues above half of the predicted outlier, by checkpoint, seed and layer."""
    return (run.eigenvalues > outlier / 2).sum(-1)


def trajectory_table(run: Trajectories, outlier: float, note: str) -> Table:
    """Objective, outliers of each layer and alignment along gradient descent."""
    counts = outlier_counts(run, outlier)
    rows = []
    for at, steps in enumerate(run.steps):
        found = [_range(counts[at, :, layer]) for layer in range(counts.shape[2])]
        aligned = np.median(run.alignment[at].min(1))
        rows.append((f"{steps:,}", f"{np.median(run.objective[at]):.4f}", *found, f"{aligned:.2f}"))
    layers = [f"outliers, layer {layer + 1}" for layer in range(counts.shape[2])]
    columns = ("steps", "objective", *layers, "alignment, worst layer")
    return Table(columns, rows, f"{note}; median over {counts.shape[1]} seeds [range]")


def _range(values: np.ndarray) -> str:
    low, high = values.min(), values.max()
    return f"{np.median(values):g}" if low == high else f"{np.median(values):g} [{low}, {high}]"


def kink_table(run: Trajectories, note: str, tolerance: float = 1e-2) -> Table:
    """Where the pre-activations of other classes lie at the end, in per cent, by layer."""
    seeds = range(len(run.features))
    found = [_kinks(run, seed, tolerance) for seed in seeds]
    rows = []
    for layer in range(len(found[0].live)):
        shares = [
            [100 * getattr(f, side)[layer] for f in found] for side in KinkStatistics._fields[1:]
        ]
        rows.append((layer + 1, *(f"{np.median(share):.0f}" for share in shares)))
    columns = ("layer", "closed", "at the kink, closed side", "at the kink, open side", "open")
    return Table(columns, rows, f"{note}; % of off-class pre-activations, median over seeds")


def _kinks(run: Trajectories, seed: int, tolerance: float) -> KinkStatistics:
    weights = [torch.from_numpy(weight[seed]) for weight in run.weights]
    return kink_statistics(weights, torch.from_numpy(run.features[seed]), tolerance)


# --- networks -------------------------------------------------------------------------------------

CEILING = 1e6  # of a ratio of eigenvalues: beyond it only rounding decides


def worst(study: NetworksStudy, name: str) -> np.ndarray:
    """Smallest value over the head's layers, for each seed."""
    return over_head(study, name).min(1)


def geometric_mean(ratios: np.ndarray) -> Estimate:
    """Geometric mean of ratios of sorted values, cut at a million, with its 95 % interval; such
    ratios are at least 1, and so is the interval."""
    logs = mean_interval(np.log(np.minimum(ratios, CEILING)))
    value, low, high = map(math.exp, (logs.value, max(logs.low, 0.0), logs.high))
    return Estimate(value, low, high, logs.n, logs.confidence)


def training_table(cases: Mapping[str, Case], note: str) -> Table:
    """Training accuracy, loss, and NC1 at the input of each of the head's layers."""
    rows = []
    for name, case in cases.items():
        accuracy = 100 * case.checkpoint.accuracy.numpy()
        nc1 = [
            np.mean([case.nc1(network, layer) for network in case.networks]) for layer in case.head
        ]
        shown = [f"{value:.2g}" for value in nc1]
        epoch, loss = case.checkpoint.epoch, case.checkpoint.loss.mean().item()
        rows.append((name, epoch, f"{accuracy.min():.1f}", f"{loss:.3f}", *shown))
    columns = (
        "network",
        "epochs",
        "accuracy, worst seed %",
        "loss",
        "NC1, head 1",
        "head 2",
        "head 3",
    )
    return Table(columns, rows, f"{note}; {len(case.networks)} seeds")


AGAINST_MEANS = ("overlap", "overlap_backward", "residual_single")


def study_table(studies: Mapping[str, NetworksStudy], note: str) -> Table:
    """Gaps, share of the trace, overlap and residual by layer; means over the seeds."""
    rows = []
    for name, study in studies.items():
        for at, layer in enumerate(study.layers):
            gaps = [_ratio_text(study.values(q)[:, at]) for q in ("gap", "class_gap")]
            share = f"{study.values('share')[:, at].mean():.3f}"
            means = [_number(study.values(q)[:, at].mean()) for q in AGAINST_MEANS]
            rows.append((name, layer, *gaps, share, *means))
    columns = ("network", "layer", "λ₁₀₀/λ₁₀₁", "λ₁₀/λ₁₁", "share of trace", "overlap")
    more = ("overlap, backward means", "single residual")
    return Table((*columns, *more), rows, f"{note}; means over seeds, geometric for ratios")


def gradient_table(studies: Mapping[str, NetworksStudy], note: str) -> Table:
    """Where the gradient lies, and how many singular values the weights have before a gap."""
    rows = []
    for name, study in studies.items():
        for at, layer in enumerate(study.layers):
            kinds = ("gradient_share", "gradient_cosine", "gradient_mismatched")
            shown = [_number(study.values(kind)[:, at].mean()) for kind in kinds]
            ranks = study.values("weight_rank")[:, at].astype(int)
            gap = study.values("weight_gap")[:, at]
            rows.append((name, layer, *shown, _range(ranks), _ratio_text(gap)))
    columns = ("network", "layer", "in the outlier space", "cos², matching means", "cos², shifted")
    return Table((*columns, "weight's rank", "σ₁₀/σ₁₁"), rows, f"{note}; means over seeds")


def _ratio_text(ratios: np.ndarray) -> str:
    if np.isnan(ratios).any():
        return "–"
    value = geometric_mean(ratios).value
    return f"> {CEILING:.0e}" if value > 0.99 * CEILING else f"{value:.3g}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


# --- curvature ------------------------------------------------------------------------------------


def solver_table(runs: Sequence[SolverRun], note: str) -> Table:
    """Operator applications and residuals by case and start."""
    rows = [
        (
            run.case,
            run.start,
            run.applications,
            "< 1e-3" if run.residual < 1e-3 else f"{run.residual:.1e}",
            {True: "no gap at k", False: "resolved", None: "not said"}[run.unresolved],
        )
        for run in runs
    ]
    columns = ("network", "start", "applications", "residual / λ₁", "the solver says")
    return Table(columns, rows, f"{note}; k = 100, second layer of the head, one seed")


def full_table(leading: Eigenpairs, note: str) -> Table:
    """Ratios of successive eigenvalues of the full Hessian where the model has its gaps."""
    values = leading.values
    rows = [
        (k, f"{float(values[k - 1]):.2g}", f"{float(values[k - 1] / values[k]):.2f}")
        for k in (1, 10, 55, 100)
    ]
    columns = ("k", "λ_k", "λ_k / λ_{k+1}")
    return Table(columns, rows, f"{note}; Hessian over all weights, one seed")


def benchmark_table(folder: Path | None = None) -> Table:
    """Recorded time of each contender over ours, with residuals and applications.

    Args:
        folder: holds ``ufm_spectra.json``; by default the checkout's ``benchmarks/results``.

    Raises:
        FileNotFoundError: nothing is recorded there; the message names the remedy.
    """
    result = recorded("ufm_spectra.json", folder)
    rows = []
    for case in result["cases"]:
        for name in case["seconds"]:
            rows.append((case["name"], name, *_contender(case, name)))
    machine = result["environment"]
    columns = ("case", "contender", "ms", "time / ours", "applications", "residual / λ₁")
    note = (
        f"medians [min, max] of interleaved runs, {machine['threads']} thread, "
        f"{machine['machine']} ({machine['instructions']}), torch {machine['packages']['torch']}"
    )
    return Table(columns, rows, note)


def _contender(case: dict[str, Any], name: str) -> tuple[str, ...]:
    ratio = case["times_ours"].get(name)
    times = (
        "1" if ratio is None else f"{ratio['median']:.2g} [{ratio['min']:.2g}, {ratio['max']:.2g}]"
    )
    spent = case.get("applications", {}).get(name)
    residual = case.get("residual", {}).get(name)
    return (
        f"{1e3 * case['seconds'][name]['median']:.3g}",
        times,
        "–" if spent is None else "not told" if spent < 0 else f"{spent}",
        "–" if residual is None else f"{residual:.0e}",
    )
