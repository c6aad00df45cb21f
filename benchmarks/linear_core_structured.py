"""Structured losses: correctness first, then seconds a training step and accuracy against time.

    python benchmarks/linear_core_structured.py [--quick] [--part steps|1000|4000] [--out DIR]

The gate compares our Viterbi structured SVM with full enumeration, our CRF with pytorch-crf, and
the sampled gradients' mean, over all samples, with the exact gradient. If it is red, the script
says where, reports no speed, writes nothing and exits with 1.

*Time of a step*: forward, backward and the update of both tables, on random scores, for a batch of
4 sequences of 32 tags; fp32, one thread, the contenders take turns, medians with min and max over
the rounds. The emission table's rows are the batch's own, so that its update is the same for all.
pytorch-crf and the exponential-domain CRF have a dense gradient of K² entries, and update as many.

*Accuracy against time*: the synthetic languages of ``hmm``, the methods of ``tagging``, each with
the learning rate that did best on a language used for nothing else; seconds of training only.

At 4,000 tags the rates are those chosen at 1,000, 20 test sentences stand for 100 (decoding takes
longer than training there), and the constrained loss over positions is left out.

All of it takes about half an hour; results go to ``linear_core_structured.json`` and to
``linear_core_tagging_1000.json`` and ``…_4000.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchcrf import CRF

from proofread.linear_core import Transitions, linear_chain_nll, structured_hinge_loss
from proofread.linear_core.surrogates import LinearCore
from proofread.linear_core.tagging import METHODS, Batch, Task, compare_methods, mean_references
from proofread.linear_core.unbiasedness import sampling_bias

# spread, write, environment: a script's folder is not always on the path, so no import
SHARED = runpy.run_path(str(Path(__file__).with_name("linear_core.py")))
spread = SHARED["spread"]

BATCH, LENGTH, LR = 4, 32, 1e-6
SIZES = (10, 500, 1000, 1414, 2000, 2828, 4000, 5657, 8000)
QUICK_SIZES = (4, 10)
PYTORCH_CRF_LIMIT = 1000  # its [B, K, K] intermediates: 4 GB and 15 s a step at K = 4000
ROUNDS, QUICK_ROUNDS = 15, 3
# Number of tags, test sentences and marks of time of the curves; the first chooses the rates.
CURVES = ((1000, 100, (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)), (4000, 20, (1.0, 4.0, 16.0)))
QUICK_CURVES = ((20, 10, (0.02, 0.04)), (30, 10, (0.02, 0.04)))

Step = Callable[[], None]


def main(arguments: list[str] | None = None) -> int:
    """Run gate and timings; return the exit status."""
    options = parse(arguments)
    torch.set_num_threads(1)
    faults = list(gate())
    if faults:
        print("gate: red, no speed is reported", *faults, sep="\n  ", file=sys.stderr)
        return 1
    print("gate: green (enumeration, pytorch-crf, expectation over all samples)", flush=True)
    if options.part in (None, "steps"):
        record(options, "linear_core_structured", steps(options.quick))
    for tags, n_test, marks in QUICK_CURVES if options.quick else CURVES:
        if options.part in (None, str(tags)):
            record(options, f"linear_core_tagging_{tags}", curves(tags, n_test, marks, options))
    return 0


def record(options: argparse.Namespace, name: str, result: dict[str, Any]) -> None:
    result = {"gate": "green", "environment": SHARED["environment"]("cpu")} | result
    SHARED["write"](options.out / f"{name}.json", result)
    print(f"wrote {name}.json", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).parent / "results"
    parser.add_argument("--quick", action="store_true", help="small sizes, for tests")
    parser.add_argument("--part", help="only one part: steps, or a number of tags of the curves")
    parser.add_argument("--out", type=Path, default=default, help="folder of the JSON files")
    return parser.parse_args(arguments)


# --- the gate -------------------------------------------------------------------------------------


def gate() -> Iterator[str]:
    """Yield one line for each disagreement."""
    emissions, tags, table = problem(3, 2, 4, torch.float64)
    hinge = structured_hinge_loss(emissions, tags, table, reduction="none")
    for row, value in enumerate(hinge.tolist()):
        best = enumerated_hinge(emissions[row], tags[row], table.detach())
        if abs(value - best) > 1e-9:
            yield f"structured hinge {value} but by enumeration {best}"
    emissions, tags, table = problem(50, 3, 9, torch.float64)
    ours, theirs = (nll(emissions, tags, table) for nll in (linear_chain_nll, pytorch_crf))
    for name, a, b in zip(("value", "gradient"), gradients(ours, table), gradients(theirs, table),
                          strict=True):  # fmt: skip
        if not torch.allclose(a, b, rtol=1e-9, atol=1e-12):
            yield f"CRF: {name} differs from pytorch-crf's by {float((a - b).abs().max()):.2g}"
    if bias := sampling_bias(LinearCore(), n_chains=2):
        yield f"sampled gradient: relative bias {bias:.2g}"


def problem(k: int, batch: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    emissions = torch.randn(batch, length, k, generator=g, dtype=dtype)
    tags = torch.randint(k, (batch, length), generator=g)
    return emissions, tags, torch.randn(k, k, generator=g, dtype=dtype).requires_grad_()


def enumerated_hinge(emissions: Tensor, tags: Tensor, table: Tensor) -> float:
    """``max over y′ of [Hamming + h(y′)] − h(y)`` by visiting every sequence."""

    def score(y: tuple[int, ...]) -> float:
        steps = sum(float(emissions[t, tag]) for t, tag in enumerate(y))
        return steps + sum(float(table[a, b]) for a, b in itertools.pairwise(y))

    gold = tuple(tags.tolist())
    every = itertools.product(range(len(table)), repeat=len(gold))
    return max(sum(a != b for a, b in zip(y, gold, strict=True)) + score(y) for y in every) - score(
        gold
    )


def pytorch_crf(emissions: Tensor, tags: Tensor, table: Tensor) -> Tensor:
    crf = CRF(table.shape[0], batch_first=True).to(table.dtype)
    with torch.no_grad():
        crf.start_transitions.zero_()
        crf.end_transitions.zero_()
    del crf.transitions
    crf.transitions = table
    return -crf(emissions, tags, reduction="mean")


def gradients(loss: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, table)[0]


# --- time of a step -------------------------------------------------------------------------------


def steps(quick: bool) -> dict[str, Any]:
    """Times of a step at every size."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    cases = [measure(size, rounds) for size in (QUICK_SIZES if quick else SIZES)]
    return {"batch": BATCH, "length": LENGTH, "cases": cases}


def contenders(k: int) -> dict[str, Step]:
    """One training step of each method; all start from the same scores."""
    words, tags, table = problem(k, BATCH, LENGTH, torch.float32)
    g = torch.Generator().manual_seed(0)

    def step_of(loss: Callable[[Batch], Tensor]) -> Step:
        rows, transitions = words.clone(), Transitions(k, table.detach())

        def step() -> None:
            emissions = rows.detach().requires_grad_()
            transitions.zero_grad()
            loss(Batch(emissions, tags, None, transitions, g)).backward()
            assert emissions.grad is not None
            rows.sub_(emissions.grad, alpha=LR)
            transitions.apply_gradient(LR)

        return step

    found = {method.name: step_of(method.loss) for method in METHODS.values()}
    if k <= PYTORCH_CRF_LIMIT:
        found["pytorch-crf"] = step_of(
            lambda b: pytorch_crf(b.emissions, b.tags, b.transitions.table)
        )
    return found


def measure(k: int, rounds: int) -> dict[str, Any]:
    """Interleaved times of all contenders with K tags, and ratios to the sampled losses."""
    step_of = contenders(k)
    times: dict[str, list[float]] = {name: [] for name in step_of}
    for step in step_of.values():
        step()  # warm up
    names = list(step_of)
    for round_ in range(rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            times[name].append(seconds_of(step_of[name]))
    ours = METHODS["sampled_sequences"].name
    result = {
        "tags": k,
        "rounds": rounds,
        "milliseconds": {name: spread(1e3 * t for t in ts) for name, ts in times.items()},
        "times_ours": {
            name: spread(t / base for t, base in zip(ts, times[ours], strict=True))
            for name, ts in times.items()
        },
    }
    print(f"\n{k} tags, {rounds} rounds: milliseconds a step")
    for name, ms in result["milliseconds"].items():  # type: ignore[attr-defined]
        print(f"  {ms['median']:9.3f}  [{ms['min']:.3f}, {ms['max']:.3f}]  {name}", flush=True)
    return result


def seconds_of(step: Step) -> float:
    """Seconds of a step: the median of 5 where it is short."""
    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    if first > 0.02:
        return first
    times = [first]
    for _ in range(4):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# --- accuracy against time ------------------------------------------------------------------------


def curves(
    tags: int, n_test: int, marks: Sequence[float], options: argparse.Namespace
) -> dict[str, Any]:
    """Accuracy of each method against seconds of training."""
    seeds = range(2) if options.quick else range(5)
    first, *_ = QUICK_CURVES if options.quick else CURVES
    task = partial(Task.draw, tags, n_test=n_test)
    rates = None if tags == first[0] else recorded_rates(options.out, first[0])
    methods = [m for m in METHODS if tags == first[0] or m != "constrained_positions"]
    found = compare_methods(task, methods=methods, seeds=seeds, rates=rates, seconds=marks)
    for curve in found:
        print(f"  {curve.method:22} seed {curve.seed} lr {curve.lr:g}: "
              + " ".join(f"{a:.3f}" for a in curve.accuracy), flush=True)  # fmt: skip
    return {
        "tags": tags,
        "seconds": list(marks),
        "references": mean_references(task(seed) for seed in seeds),
        "runs": [asdict(curve) for curve in found],
    }


def recorded_rates(folder: Path, tags: int) -> dict[str, float]:
    """The learning rates that were chosen at another number of tags."""
    runs = json.loads((folder / f"linear_core_tagging_{tags}.json").read_text("utf-8"))["runs"]
    return {run["method"]: run["lr"] for run in runs}


if __name__ == "__main__":
    sys.exit(main())
