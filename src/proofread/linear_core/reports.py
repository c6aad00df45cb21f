"""Tables of the experiments chapter: accuracies, gains, measured ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..claims import Span
from ..recordings import recorded
from ..stats import Estimate, fit_exponent, mean_interval, paired_difference
from ..tables import Table
from .multiclass import SumCounterexample, TwoSidedRatios
from .optimization import Descent
from .tagging import METHODS, Curve, contenders, final_accuracies
from .training import LOSSES, Comparison


def accuracy_table(comparison: Comparison, note: str) -> Table:
    """Mean test accuracy in percent with its 95 % interval, a row a loss and noise rate."""
    keys = list(dict.fromkeys((run.rate, run.loss) for run in comparison.runs))
    rows = []
    for rate, loss in keys:
        accuracy = mean_interval(100 * comparison.accuracies(loss, rate))
        runs = [run for run in comparison.runs if (run.rate, run.loss) == (rate, loss)]
        fit = 100 * np.mean([run.fit for run in runs])
        flipped = 100 * np.mean([run.flipped for run in runs])
        interval = f"{accuracy.value:.1f} [{accuracy.low:.1f}, {accuracy.high:.1f}]"
        cells = (interval, f"{fit:.0f}", f"{runs[0].lr:g}", len(runs))
        rows.append((f"{rate:.0%}", f"{flipped:.0f}", LOSSES[loss].name, *cells))
    columns = ("noise", "flipped %", "loss", "test accuracy %", "fit to given labels %")
    return Table((*columns, "learning rate", "seeds"), rows, note)


def gain(a: np.ndarray, b: np.ndarray) -> Estimate:
    """Mean of a − b in percentage points over paired seeds, with its 95 % interval."""
    return paired_difference(100 * a, 100 * b)


def gain_table(comparison: Comparison, loss: str, others: Sequence[str], note: str) -> Table:
    """Gains of one loss over the others at each noise rate, in points, with 95 % intervals."""
    rates = list(dict.fromkeys(run.rate for run in comparison.runs))
    rows = []
    for rate in rates:
        ours = comparison.accuracies(loss, rate)
        gains = [gain(ours, comparison.accuracies(other, rate)) for other in others]
        shown = [f"{_signed(g.value)} [{_signed(g.low)}, {_signed(g.high)}]" for g in gains]
        rows.append((f"{rate:.0%}", *shown))
    columns = [f"{LOSSES[loss].name} over {LOSSES[other].name}, points" for other in others]
    return Table(("noise", *columns), rows, note)


def descent_table(descents: Mapping[str, Descent], note: str) -> Table:
    """Fitted exponent of each descent by number of points, and how far it stays below the bound."""
    sizes = list(next(iter(descents.values())).rates)
    rows = []
    for name, descent in descents.items():
        rates = [f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in descent.rates.values()]
        bound = f"{max(descent.bound.values()):.2f}" if descent.bound else "no bound"
        rows.append((name, *rates, bound))
    columns = [f"exponent, d = {size}" for size in sizes]
    return Table(("loss and step", *columns, "largest gap / bound"), rows, note)


def two_sided_table(found: Mapping[str, TwoSidedRatios], note: str) -> Table:
    """Least constrained regret over 0–1 regret near a tie, and its exponent, a row a case."""
    deltas = next(iter(found.values())).deltas
    rows = [
        (name, *(f"{ratio:.4f}" for ratio in case.ratios), f"{case.exponent.value:.2f}")
        for name, case in found.items()
    ]
    columns = [f"regret / δ, δ = {delta:g}" for delta in deltas]
    return Table(("surrogate", *columns, "exponent of δ"), rows, note)


def counterexample_table(found: SumCounterexample, note: str) -> Table:
    """Certified regrets of the sum form, and the constant that a linear bound would need."""
    numbers = zip(found.deltas, found.regrets, found.ratios, strict=True)
    rows = [(f"{d:g}", f"{r:.4g}", f"{r / d**2:.3f}", f"{ratio:.4g}") for d, r, ratio in numbers]
    columns = ("0–1 regret δ", "surrogate regret ≤", "regret / δ² ≤", "constant needed ≥")
    return Table(columns, rows, note)


def slope_table(slopes: Mapping[str, tuple[np.ndarray, np.ndarray]], note: str) -> Table:
    """Shares of clean and flipped samples by the strength ``|ℓ′|`` with which they pull."""
    rows = []
    for loss, parts in slopes.items():
        for label, values in zip(("clean", "flipped"), parts, strict=True):
            strong, full = np.mean(values >= 0.6), np.mean(values >= 1 - 1e-9)
            shares = (f"{values.mean():.2f}", f"{strong:.0%}", f"{full:.0%}")
            rows.append((LOSSES[loss].name, label, *shares))
    return Table(("loss", "labels", "mean |ℓ′|", "|ℓ′| ≥ 0.6", "|ℓ′| = 1"), rows, note)


def _signed(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # no minus before a rounded zero


def benchmark_table(folder: Path | None = None, dtype: str = "float32") -> Table:
    """The recorded times of the peers, divided by ours: above 1, ours is faster.

    Args:
        folder: holds ``linear_core.json`` and ``environment.json``, as ``make bench`` writes them;
            by default the checkout's ``benchmarks/results``.
        dtype: which cases to show.

    Raises:
        FileNotFoundError: nothing is recorded there; the message names the remedy.
    """
    result = recorded("linear_core.json", folder)
    machine = recorded("environment.json", folder)
    cases = [case for case in result["cases"] if case["dtype"] == dtype]
    names = list(dict.fromkeys(name for case in cases for name in case["times_ours"]))
    rows = [(name, *(_ratio(case, name) for case in cases)) for name in names]
    shapes = [f"{n:,} × {k:,}" for n, k in (case["shape"] for case in cases)]
    note = (
        f"time / time of linear_core_loss, forward and backward, {dtype}: median [min, max] of "
        f"{cases[0]['rounds']} interleaved runs on {machine['threads']} thread of a "
        f"{machine['machine']} machine ({machine['instructions']}), "
        f"torch {machine['packages']['torch']}"
    )
    return Table(("contender", *shapes), rows, note)


def fused_table(folder: Path | None = None) -> Table:
    """Recorded times and peak memory of the fused linear loss and its peers.

    Raises:
        FileNotFoundError: nothing is recorded there; the message names the remedy.
    """
    cases = recorded("linear_core_fused.json", folder)["cases"]
    machine = recorded("environment.json", folder)
    names = list(dict.fromkeys(name for case in cases for name in case["peak_megabytes"]))
    names.sort(key=lambda name: "fused" not in name)  # ours first, otherwise as recorded
    rows = []
    for name in names:
        ours = name == "fused_linear_core_loss"
        facts = (
            ("1" if ours else _ratio(case, name), case["peak_megabytes"].get(name, "–"))
            for case in cases
        )
        rows.append((name, *(entry for pair in facts for entry in pair)))
    n, d, k = cases[0]["shape"]
    note = (
        f"N = {n:,}, D = {d}, K = {k:,}, forward and backward: time / time of "
        f"fused_linear_core_loss, median [min, max] of {cases[0]['rounds']} interleaved runs on "
        f"{machine['threads']} thread ({machine['instructions']}); peak memory above the inputs in "
        "MB, the gradients included"
    )
    columns = [f"{case['dtype']}, {what}" for case in cases for what in ("time", "MB")]
    return Table(("contender", *columns), rows, note)


def structured_record(folder: Path | None = None) -> dict[str, Any]:
    """The times of training steps that ``benchmarks/linear_core_structured.py`` recorded.

    Raises:
        FileNotFoundError: nothing is recorded; the message names the remedy.
    """
    found: dict[str, Any] = recorded("linear_core_structured.json", folder)
    return found


def tagging_record(tags: int, folder: Path | None = None) -> dict[str, Any]:
    """The curves of accuracy against time with so many tags that the same benchmark recorded.

    Raises:
        FileNotFoundError: nothing is recorded; the message names the remedy.
    """
    found: dict[str, Any] = recorded(f"linear_core_tagging_{tags}.json", folder)
    return found


def step_exponent(record: Mapping[str, Any], method: str, smallest: int = 1000) -> Estimate:
    """Exponent of a step's median seconds in the number of tags, from ``smallest`` tags on.

    Args:
        record: of ``structured_record``.
        method: key of ``tagging.METHODS``.
        smallest: sizes below are left out: there calling operators costs more than their work.

    Raises:
        ValueError: fewer than three sizes.
    """
    cases = [case for case in record["cases"] if case["tags"] >= smallest]
    times = [case["milliseconds"][METHODS[method].name]["median"] for case in cases]
    return fit_exponent([case["tags"] for case in cases], times)


def speedup(record: Mapping[str, Any], tags: int, name: str) -> Span:
    """Seconds of a step of ``name`` over those of the sampled loss over sequences.

    Args:
        record: of ``structured_record``.
        tags: the size.
        name: a contender's name, as recorded.

    Returns:
        Median with the range over the interleaved rounds.

    Raises:
        KeyError: no such size or contender.
    """
    ratios = {case["tags"]: case["times_ours"] for case in record["cases"]}
    ratio = ratios[tags][name]
    return Span(ratio["median"], ratio["min"], ratio["max"])


def step_table(record: Mapping[str, Any], tags: Sequence[int]) -> Table:
    """Recorded milliseconds of a training step by method and number of tags.

    Args:
        record: of ``structured_record``.
        tags: the sizes to show.
    """
    cases = [case for case in record["cases"] if case["tags"] in tags]
    rows = []
    for name in contenders(cases):
        times = [case["milliseconds"].get(name) for case in cases]
        rows.append((name, *(_milliseconds(ms["median"]) if ms else "–" for ms in times)))
    machine = record["environment"]
    note = (
        f"milliseconds, median of {cases[0]['rounds']} interleaved runs; {record['batch']} "
        f"sequences of {record['length']} tags, random scores (stand-in for a tagger's), fp32, "
        f"{machine['threads']} thread of a {machine['machine']} machine "
        f"({machine['instructions']}), torch {machine['packages']['torch']}"
    )
    return Table(("step", *(f"|Y| = {case['tags']:,}" for case in cases)), rows, note)


def _milliseconds(ms: float) -> str:
    return f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}"


def time_table(record: Mapping[str, Any], target: float) -> Table:
    """Accuracy at the first and last mark of time, and the first mark with at least ``target``.

    Args:
        record: of ``tagging_record``.
        target: mean accuracy over the seeds, in [0, 1].
    """
    marks = record["seconds"]
    rows = []
    for method in dict.fromkeys(run["method"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["method"] == method]
        mean = np.mean([run["accuracy"] for run in runs], 0)
        reached = [f"{mark:g} s" for mark, a in zip(marks, mean, strict=True) if a >= target]
        steps = np.mean([run["steps"][-1] for run in runs])
        last = mean_interval([100 * run["accuracy"][-1] for run in runs])
        final = f"{last.value:.1f} [{last.low:.1f}, {last.high:.1f}]"
        cells = (f"{100 * mean[0]:.1f}", final, reached[0] if reached else "not reached")
        rows.append((METHODS[method].name, *cells, f"{steps:,.0f}", f"{runs[0]['lr']:g}"))
    first, last_mark = (f"{mark:g} s" for mark in (marks[0], marks[-1]))
    reach = f"{100 * target:g} % by"
    shares = f"% at {first}", f"% at {last_mark}"
    columns = ("method", *shares, reach, "steps", "learning rate")
    machine = record["environment"]
    note = (
        "tags right on test sentences; recorded; "
        f"means over {len(runs)} synthetic languages with {record['tags']:,} tags, "
        f"stand-in for the Penn Treebank; {machine['threads']} thread ({machine['instructions']})"
    )
    return Table(columns, rows, note)


def tagging_table(curves: Sequence[Curve], note: str) -> Table:
    """Final test accuracy of each method in percent, with its 95 % interval over the seeds."""
    rates = {curve.method: curve.lr for curve in curves}
    rows = []
    for method, values in final_accuracies(curves).items():
        a = mean_interval(100 * values)
        interval = f"{a.value:.1f} [{a.low:.1f}, {a.high:.1f}]"
        rows.append((METHODS[method].name, interval, f"{rates[method]:g}", a.n))
    return Table(("method", "tags right %", "learning rate", "languages"), rows, note)


def _ratio(case: dict[str, Any], name: str) -> str:
    if name not in case["times_ours"]:
        return "–"
    ratio = case["times_ours"][name]
    return f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]"


def at_edge(comparison: Comparison) -> Sequence[str]:
    """Losses whose learning rate was the grid's smallest or largest: a grid too narrow."""
    return [f"{c.loss} at {c.rate:.0%}" for c in comparison.choices if c.at_edge]
