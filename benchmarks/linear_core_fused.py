"""Fused linear layer and Linear-Core loss against its peers: correctness, time and memory.

    python benchmarks/linear_core_fused.py [--quick] [--device cuda] [--out DIR]

The gate compares value and gradients with ``linear_core_loss`` of ``F.linear`` in float64. If it is
red, the script says where, reports no speed, writes nothing and exits with 1.

Method: as in ``linear_core.py`` (one process, one thread, contenders take turns, ratios between
neighbours in time, an A/A row), forward + backward to hidden and weight. Memory is the peak of a
fresh process for each contender, less what it held before: gradients included,
inputs not; on a GPU it is that of the allocator. ``torch.nn.functional.linear_cross_entropy``, with
and without its chunks, is left out where torch does not have it. Results go to
``linear_core_fused.json`` beside ``environment.json`` (with ``-cuda`` in the names on a GPU).
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from proofread.linear_core import linear_core_loss
from proofread.linear_core.fused import fused_linear_core_loss

# spread, timed, write, environment: a script's folder is not always on the path, so no import
SHARED = runpy.run_path(str(Path(__file__).with_name("linear_core.py")))

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

OURS, AGAIN = "fused_linear_core_loss", "fused_linear_core_loss, again (A/A)"
TWIN, CHUNKED = "linear_core_loss of F.linear", "F.linear_cross_entropy, chunked"
SHAPE, QUICK_SHAPE = (2048, 512, 32_000), (64, 16, 500)  # N, D, K
CUDA_SHAPE = (8192, 2048, 128_256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDS, QUICK_ROUNDS = 7, 2


def main(arguments: list[str] | None = None) -> int:
    """Run gate, timings and memory; return the exit status."""
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.peak:
        print(peak(*options.peak, options))
        return 0
    faults = list(gate(options.device))
    if faults:
        print("gate: red, no speed is reported", *faults, sep="\n  ", file=sys.stderr)
        return 1
    print("gate: green (values and gradients equal the unfused loss)", flush=True)
    cases = [measure(dtype, options) for dtype in DTYPES]
    suffix = "" if options.device == "cpu" else f"-{options.device}"
    content = {"gate": "green", "cases": cases}
    SHARED["write"](options.out / f"linear_core_fused{suffix}.json", content)
    machine = SHARED["environment"](options.device)
    SHARED["write"](options.out / f"environment{suffix}.json", machine)
    print(f"wrote linear_core_fused{suffix}.json and environment{suffix}.json")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).parent / "results"
    parser.add_argument("--quick", action="store_true", help="a small shape, for tests")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=default, help="folder of the JSON files")
    parser.add_argument(
        "--peak",
        nargs=2,
        metavar=("DTYPE", "CONTENDER"),
        help="only print the bytes that one contender needs",
    )
    return parser.parse_args(arguments)


# --- the gate -------------------------------------------------------------------------------------


def twin(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return linear_core_loss(F.linear(hidden, weight), target, **options)


def shape_of(options: argparse.Namespace) -> tuple[int, int, int]:
    if options.quick:
        return QUICK_SHAPE
    return SHAPE if options.device == "cpu" else CUDA_SHAPE


def gate(device: str) -> Iterator[str]:
    """Yield one line for each disagreement with the unfused loss in float64."""
    tolerances = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float64: 1e-12}
    shapes, tails = ((33, 16, 129), (600, 8, 1500)), ("exponential", "gamma", "logistic")
    for shape, tail, form, dtype in product(shapes, tails, ("constrained", "sum"), tolerances):
        hidden, weight, target = problem(shape, dtype, device)
        ours = run(partial(fused_linear_core_loss, tail=tail, form=form), hidden, weight, target)
        exact = (t.detach().double().requires_grad_() for t in (hidden, weight))
        plain = run(partial(twin, tail=tail, form=form), *exact, target)
        names = ("value", "gradient of hidden", "gradient of weight")
        for name, a, b in zip(names, ours, plain, strict=True):
            error = float((a.double() - b).norm() / b.norm())
            if not error <= tolerances[dtype]:
                where = f"{list(shape)} {dtype} {tail} {form}"
                yield f"{name} off by {error:.2g} (relative) at {where}"


def problem(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    n, d, k = shape  # made in place: a temporary would count in the peak
    generator = torch.Generator(device).manual_seed(n * k)
    more: dict[str, Any] = {"generator": generator, "device": device}
    hidden = torch.randn(n, d, dtype=dtype, **more)
    weight = torch.randn(k, d, dtype=dtype, **more).div_(d**0.5)
    target = torch.randint(k, (n,), **more)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def run(
    loss: LossFunction, hidden: Tensor, weight: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One forward and backward: the loss and the gradients."""
    hidden.grad = weight.grad = None
    value = loss(hidden, weight, target)
    value.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


# --- time -----------------------------------------------------------------------------------------


def contenders() -> dict[str, LossFunction]:
    found: dict[str, LossFunction] = {
        OURS: fused_linear_core_loss,
        AGAIN: fused_linear_core_loss,
        "fused_linear_core_loss, sum form": partial(fused_linear_core_loss, form="sum"),
        TWIN: twin,
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch 2.13
        whole = F.linear_cross_entropy
        found["F.linear_cross_entropy, unchunked"] = whole
        found[CHUNKED] = partial(whole, options=torch.nn.LinearCrossEntropyOptions())
    return found


def measure(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Interleaved times and peak memory of all contenders, and ratios to ours."""
    shape = shape_of(options)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    inputs, losses = problem(shape, DTYPES[dtype], options.device), contenders()
    times: dict[str, list[float]] = {name: [] for name in losses}
    for loss in losses.values():
        run(loss, *inputs)  # warm up
    names = list(times)
    for round_ in range(rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            seconds = SHARED["timed"](partial(run, losses[name], *inputs), options.device)
            times[name].append(seconds)
    ours, spread = times[OURS], SHARED["spread"]
    result = {
        "shape": list(shape),
        "dtype": dtype,
        "rounds": rounds,
        "milliseconds": {name: spread(1e3 * t for t in ts) for name, ts in times.items()},
        "times_ours": {
            name: spread(t / own for t, own in zip(ts, ours, strict=True))
            for name, ts in times.items()
            if name != OURS
        },
        "peak_megabytes": {
            name: peak_of(dtype, name, options)
            for name in names
            if name == OURS or not (name == AGAIN or options.quick)
        },
        "logits_megabytes": float(f"{shape[0] * shape[2] * DTYPES[dtype].itemsize / 1e6:.4g}"),
        "gflop": 6 * shape[0] * shape[1] * shape[2] / 1e9,
        "matrix_product_gflops": float(f"{product_speed(inputs[0].detach(), options.device):.3g}"),
    }
    show(result)
    return result


def product_speed(hidden: Tensor, device: str) -> float:
    """GFLOP/s of one matrix product of the size of a tile: what limits all contenders."""
    rows, classes = (512, 1024) if device == "cpu" else (8192, 8192)
    a = hidden[:rows]
    b = torch.ones(a.shape[1], classes, dtype=a.dtype, device=device)
    torch.mm(a, b)
    seconds = min(SHARED["timed"](partial(torch.mm, a, b), device) for _ in range(20))
    return 2 * a.numel() * b.shape[1] / seconds / 1e9


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['shape']} {result['dtype']}, {result['rounds']} rounds: time / ours, memory")
    memory = result["peak_megabytes"]
    for name, ratio in result["times_ours"].items():
        mega = f"{memory[name]} MB" if name in memory else ""
        span = f"[{ratio['min']:.3f}, {ratio['max']:.3f}]"
        print(f"  {ratio['median']:7.3f}  {span}  {name}  {mega}")
    speed = result["gflop"] / result["milliseconds"][OURS]["median"] * 1e3
    print(f"  ours: {result['milliseconds'][OURS]['median']} ms, {memory[OURS]} MB")
    print(f"  ours: {speed:.0f} of {result['matrix_product_gflops']} GFLOP/s", flush=True)


# --- memory ---------------------------------------------------------------------------------------


def peak_of(dtype: str, name: str, options: argparse.Namespace) -> float:
    """Megabytes that one forward and backward needs, in a process of its own."""
    command = [sys.executable, __file__, "--peak", dtype, name, "--device", options.device]
    command += ["--quick"] * options.quick
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back at once
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return round(int(done.stdout) / 1e6, 1)


def peak(dtype: str, name: str, options: argparse.Namespace) -> int:
    """Bytes of the peak of one call over what was held before it (at least 0)."""
    inputs = problem(shape_of(options), DTYPES[dtype], options.device)
    loss, small = contenders()[name], problem(QUICK_SHAPE, DTYPES[dtype], options.device)
    run(loss, *small)  # code and thread pools are loaded now
    del small
    gc.collect()
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(loss, *inputs)
        return torch.cuda.max_memory_allocated() - before
    before = resident()
    run(loss, *inputs)
    return max(0, high_water() - before)


def resident() -> int:
    """Bytes held now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return high_water()
    return pages * os.sysconf("SC_PAGESIZE")


def high_water() -> int:
    """Bytes of the largest extent so far."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    sys.exit(main())
