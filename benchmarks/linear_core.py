"""Linear-Core loss against its peers: correctness first, then forward + backward time.

    python benchmarks/linear_core.py [--quick] [--compile] [--device cuda] [--out DIR]

The gate compares values and gradients with the plain formula in float64. If it is red, the script
says where, reports no speed, writes nothing and exits with 1.

Method: one process, one thread, the contenders take turns (interleaved) and each ratio is that of
two neighbours in time; medians over the rounds with min and max, and an A/A row (our loss against
itself) that shows what a ratio of 1 looks like here. Every call, of every contender, gets a fresh
copy of the logits that is not a leaf, made outside the timed region and freed outside it, as a
model hands them over; what a contender allocates itself is allocated and freed inside. In backward
the gradient arrives at the copy's maker, which drops it. ``times_ours`` divides by our default,
``times_in_place`` by the in-place option. Results go to ``linear_core.json`` beside
``environment.json`` (with ``-cuda`` in the names on a GPU). ``linear_core_kernels.json`` holds what
the Triton kernel takes on two GPU generations, compiled ahead of time without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from proofread.linear_core import LinearCore, linear_core_loss

LossFunction = Callable[[Tensor, Tensor], Tensor]

OURS, AGAIN = "linear_core_loss", "linear_core_loss, again (A/A)"
IN_PLACE = "linear_core_loss, in place"
METHOD = (
    "forward and backward, interleaved; each call of each contender gets a fresh non-leaf copy of "
    "the logits, made and freed outside the timed region; its own memory is allocated and freed "
    "inside"
)
SHAPES = ((1024, 32_000), (8192, 1000))
QUICK_SHAPES = ((64, 500), (33, 129))
ROUNDS, QUICK_ROUNDS = 15, 3


def main(arguments: list[str] | None = None) -> int:
    """Run gate and timings; return the exit status."""
    options = parse(arguments)
    torch.set_num_threads(1)
    faults = list(gate(options.device))
    if faults:
        print("gate: red, no speed is reported", *faults, sep="\n  ", file=sys.stderr)
        return 1
    print("gate: green (values and gradients equal the plain formula)", flush=True)
    cases = [measure(*case, options) for case in wanted_cases(options)]
    content = {"gate": "green", "method": METHOD, "cases": cases}
    suffix = "" if options.device == "cpu" else f"-{options.device}"
    write(options.out / f"linear_core{suffix}.json", content)
    write(options.out / f"environment{suffix}.json", environment(options.device))
    write(options.out / "linear_core_kernels.json", kernels(options))
    print(f"wrote linear_core{suffix}.json, environment{suffix}.json and linear_core_kernels.json")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).parent / "results"
    parser.add_argument("--quick", action="store_true", help="small shapes, for tests")
    parser.add_argument("--compile", action="store_true", help="time torch.compile as well")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=default, help="folder of the JSON files")
    return parser.parse_args(arguments)


def wanted_cases(options: argparse.Namespace) -> Iterator[tuple[int, int, torch.dtype]]:
    for rows, classes in QUICK_SHAPES if options.quick else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            yield rows, classes, dtype


# --- the gate -------------------------------------------------------------------------------------


def plain_loss(
    logits: Tensor, target: Tensor, tail: str = "exponential", form: str = "constrained"
) -> Tensor:
    """The formula in plain torch operations, mean over the rows."""
    phi = LinearCore(tail=tail)
    label = target[:, None]
    if form == "constrained":
        margins = logits.mean(1, keepdim=True) - logits
    else:
        margins = logits.gather(1, label) - logits
    return phi(margins).scatter(1, label, 0.0).sum(1).mean()


def gate(device: str) -> Iterator[str]:
    """Yield one line for each disagreement with the plain formula in float64."""
    tolerances = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float64: 1e-12}
    shapes, tails = ((7, 2), (33, 129), (5, 4096)), ("exponential", "gamma", "logistic")
    ways = product(shapes, tails, ("constrained", "sum"), tolerances, (False, True))
    for shape, tail, form, dtype, inplace in ways:
        logits, target = problem(*shape, dtype, device)
        exact = logits.detach().double().requires_grad_()
        ours = partial(linear_core_loss, tail=tail, form=form, inplace=inplace)
        mine = run(ours, logits, target)
        plain = run(partial(plain_loss, tail=tail, form=form), exact, target)
        for name, a, b in zip(("value", "gradient"), mine, plain, strict=True):
            error = float((a.double() - b).norm() / b.norm())
            if not error <= tolerances[dtype]:
                where = f"{list(shape)} {dtype} {tail} {form}{' in place' if inplace else ''}"
                yield f"{name} off by {error:.2g} (relative) at {where}"


def problem(rows: int, classes: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * classes)
    logits = torch.randn(rows, classes, generator=generator).to(device, dtype).requires_grad_()
    return logits, torch.randint(classes, (rows,), generator=generator).to(device)


def run(loss: LossFunction, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """One forward and backward, of logits that are not a leaf: the loss and the gradient."""
    logits.grad = None
    value = loss(logits * 1, target)
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


# --- timing ---------------------------------------------------------------------------------------


class Model(torch.autograd.Function):
    """Makes logits, and drops the gradient that comes back: what the peers have in common."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor) -> Tensor:  # type: ignore[override]
        return memory.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


def step(loss: LossFunction, logits: Tensor, target: Tensor) -> None:
    """What is timed: forward and backward; nothing of it outlives the call."""
    loss(logits, target).backward()  # type: ignore[no-untyped-call]


def contenders(dtype: torch.dtype, options: argparse.Namespace) -> dict[str, LossFunction]:
    found: dict[str, LossFunction] = {
        OURS: linear_core_loss,
        AGAIN: linear_core_loss,
        IN_PLACE: partial(linear_core_loss, inplace=True),
        "linear_core_loss, gamma tail": partial(linear_core_loss, tail="gamma"),
        "linear_core_loss, logistic tail": partial(linear_core_loss, tail="logistic"),
        "linear_core_loss, sum form": partial(linear_core_loss, form="sum"),
        "F.cross_entropy": F.cross_entropy,
        "plain formula": plain_loss,
    }
    if dtype == torch.float32:
        found["F.multi_margin_loss"] = F.multi_margin_loss
    if options.compile:
        found["torch.compile(plain formula)"] = torch.compile(plain_loss, dynamic=False)
    return found


def measure(
    rows: int, classes: int, dtype: torch.dtype, options: argparse.Namespace
) -> dict[str, Any]:
    """Interleaved times of all contenders at one shape, and ratios to ours."""
    logits, target = problem(rows, classes, dtype, options.device)
    losses = contenders(dtype, options)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    times: dict[str, list[float]] = {name: [] for name in [*losses, "copy of the logits"]}
    for loss in losses.values():
        step(loss, Model.apply(logits), target)  # warm up, compile
    names = list(times)
    for round_ in range(rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            fresh = Model.apply(logits)
            kept = fresh.detach()  # so that its memory is freed later, also if it is consumed
            if name in losses:
                seconds = timed(partial(step, losses[name], fresh, target), options.device)
            else:  # the floor: read every logit, write as many numbers to fresh memory
                seconds = timed(kept.clone, options.device)
            times[name].append(seconds)
    result = {
        "shape": [rows, classes],
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": rounds,
        "bytes_per_logit": bytes_per_logit(rows, classes, dtype, options.device),
        "milliseconds": {name: spread(1e3 * t for t in ts) for name, ts in times.items()},
        "times_ours": ratios(times, OURS),
        "times_in_place": ratios(times, IN_PLACE),
    }
    show(result)
    return result


def ratios(times: dict[str, list[float]], unit: str) -> dict[str, dict[str, float]]:
    return {
        name: spread(t / one for t, one in zip(ts, times[unit], strict=True))
        for name, ts in times.items()
        if name != unit
    }


def bytes_per_logit(rows: int, classes: int, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Main-memory traffic by count, forward and backward of the mean.

    Floor: read the logit, write its gradient. On a CPU ours is the same while a block of rows fits
    the cache: mean, slopes and correction are made there, and backward hands the gradient on. (The
    cache line that a write fetches first is not counted, on either side.) On a GPU it is the
    kernel's own count, which exceeds the floor where a row does not fit on chip.
    """
    floor = ours = float(2 * dtype.itemsize)
    if device == "cuda":
        from proofread.linear_core.kernels import bytes_moved

        ours = bytes_moved(rows, classes, dtype, weighted=True) / (rows * classes)
    return {"floor": floor, "linear_core_loss": float(f"{ours:.4g}")}


def timed(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def spread(values: Iterator[float]) -> dict[str, float]:
    numbers = list(values)
    return {
        "median": float(f"{statistics.median(numbers):.4g}"),
        "min": float(f"{min(numbers):.4g}"),
        "max": float(f"{max(numbers):.4g}"),
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['shape']} {result['dtype']}, {result['rounds']} rounds: time / our time")
    for name, ratio in result["times_ours"].items():
        print(f"  {ratio['median']:7.3f}  [{ratio['min']:.3f}, {ratio['max']:.3f}]  {name}")
    ratio = result["times_in_place"]["F.cross_entropy"]
    print(f"  F.cross_entropy / in place: {ratio['median']} [{ratio['min']}, {ratio['max']}]")
    print(f"  ours: {result['milliseconds'][OURS]['median']} ms", flush=True)


# --- the kernel, compiled ahead of time -----------------------------------------------------------


def kernels(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Resources of the Triton kernels on two GPU generations; compiled here, run nowhere."""
    if find_spec("triton") is None:
        print("no triton on this platform: the kernel's resources are left out")
        return []
    from proofread.linear_core import fused_kernels
    from proofread.linear_core.kernels import kernel_spec
    from proofread.triton_support import compile_reports

    dtypes = (torch.float32, torch.bfloat16)
    sizes = (1000,) if options.quick else (1000, 32000)
    specs = [kernel_spec(k, dtype) for k in sizes for dtype in dtypes]
    specs += [fused_kernels.kernel_spec(4096, dtype) for dtype in dtypes[options.quick :]]
    return [asdict(report) for report in compile_reports(specs)]


# --- records --------------------------------------------------------------------------------------


def environment(device: str) -> dict[str, Any]:
    """Versions and the kind of machine: nothing that names it."""
    packages = {"torch": torch.__version__, "numpy": metadata.version("numpy")}
    try:
        packages["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        packages["triton"] = "absent"
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": packages,
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
