"""Langevin samplers against peers: correctness first, then time in one process on one thread.

    python benchmarks/langevin.py [--quick] [--out DIR]

The gate compares every contender's law after some steps with the closed form for a Gaussian target
(mean and variance of unadjusted Langevin steps), and the radial chain with the full one. If it is
red, the script says where, reports no speed, writes nothing and exits with 1.

*Full chains*: 4,096 chains, d = 1,024, fp32, the trap of theorem 1 and a mixture of two Gaussians:
time a step of ours, of drawing as many normals with torch in cache-sized blocks, which would be the
limit of a sampler that draws them so, of our own normals alone, of a plain torch loop and of
BlackJAX (sgld, vmapped over chains; left out where it is not installed: pip install
blackjax==1.7.1). *Radial chain*: a chain's step at d = 10,000 against the
full chain's. Contenders take turns, in an order that rotates; medians with min and max of the
ratios within a round. Results go to ``langevin.json``; ``langevin_kernels.json`` holds the Triton
kernel's resources, compiled ahead of time. All of it takes about two minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proofread.langevin import (
    GaussianScore,
    MixtureScore,
    TrapScore,
    langevin,
    radial_chain,
    samplers,
)

# spread, write, environment: a script's folder is not always on the path, so no import
SHARED = runpy.run_path(str(Path(__file__).with_name("linear_core.py")))
spread = SHARED["spread"]
STEP = 0.02


def main(arguments: list[str] | None = None) -> int:
    """Run gate and timings; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).parent / "results"
    parser.add_argument("--quick", action="store_true", help="small sizes, for tests")
    parser.add_argument("--out", type=Path, default=default, help="folder of the JSON files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    faults = list(gate())
    if faults:
        print("gate: red, no speed is reported", *faults, sep="\n  ", file=sys.stderr)
        return 1
    print("gate: green (closed form of the law after some steps)", flush=True)
    rows = [*full_chains(options.quick), *radial(options.quick)]
    result = {"gate": "green", "environment": SHARED["environment"]("cpu"), "rows": rows}
    SHARED["write"](options.out / "langevin.json", result)
    SHARED["write"](options.out / "langevin_kernels.json", kernels(options.quick))
    print("wrote langevin.json and langevin_kernels.json")
    return 0


# --- contenders -----------------------------------------------------------------------------------


def ours(score: Any, start: Tensor, n_steps: int) -> Tensor:
    return langevin(score, start, STEP, n_steps, seed=0, progress=False).final


def torch_loop(score: Any, start: Tensor, n_steps: int) -> Tensor:
    """What one writes first: whole batch, a few temporaries a step."""
    torch.manual_seed(0)
    x = start.clone()
    for _ in range(n_steps):
        x = x + STEP * score(x) + math.sqrt(2 * STEP) * torch.randn_like(x)
    return x


def blackjax_chains(score: Any, start: Tensor, n_steps: int) -> Callable[[], Any]:
    """BlackJAX's stochastic-gradient Langevin kernel, vmapped over chains, scanned over steps."""
    import blackjax
    import jax
    import jax.numpy as jnp

    gradient = jax_score(score)
    kernel = blackjax.sgld(lambda position, _: gradient(position))
    positions = jnp.asarray(start.numpy())

    @jax.jit
    def run(key: Any, x: Any) -> Any:
        def one(x: Any, key: Any) -> tuple[Any, None]:
            keys = jax.random.split(key, x.shape[0])
            step = jax.vmap(lambda k, position: kernel.step(k, position, 0, STEP))
            return step(keys, x), None

        return jax.lax.scan(one, x, jax.random.split(key, n_steps))[0]

    return lambda: run(jax.random.key(0), positions).block_until_ready()


def jax_score(score: Any) -> Callable[[Any], Any]:
    """The score of one chain ``[d]`` in jax."""
    import jax
    import jax.numpy as jnp

    if isinstance(score, TrapScore):
        mean = jnp.asarray(score.mean.float().numpy())
        root = math.sqrt(score.dimension)
        inner, outer = score.inner * root, score.outer * root

        def trap(x: Any) -> Any:
            psi = jnp.clip((outer - jnp.linalg.norm(x)) / (outer - inner), 0, 1)
            return -psi * score.alpha * x - (1 - psi) * (x - mean)

        return trap
    if isinstance(score, MixtureScore):
        means = jnp.asarray(score.means.float().numpy())
        variances = jnp.asarray(score.variances.float().numpy())

        def log_density(x: Any) -> Any:
            square = ((x - means) ** 2).sum(-1)
            log = -square / (2 * variances) - score.dimension / 2 * jnp.log(variances)
            return jax.nn.logsumexp(log)

        return jax.grad(log_density)
    mean = jnp.asarray(score.mean.float().numpy())
    return lambda x: -(x - mean) / score.variance


def normals(start: Tensor, n_steps: int) -> None:
    """As many normal numbers, drawn in blocks that stay in the cache."""
    rows = max(1, min(len(start), 65536 // start.shape[1]))
    block = torch.empty(rows, start.shape[1], dtype=start.dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_steps * math.ceil(len(start) / rows)):
        block.normal_(generator=generator)


def own_normals(start: Tensor, n_steps: int) -> None:
    """The sampler's noise and nothing else, block by block."""
    rows = max(1, min(len(start), samplers.BLOCK // start.shape[1]))
    fill = samplers._filler(torch.empty(rows, start.shape[1], dtype=start.dtype), (0, 0))
    for step in range(n_steps * math.ceil(len(start) / rows)):
        fill(step, 0, 1.0)


# --- the gate -------------------------------------------------------------------------------------


def gate() -> Iterator[str]:
    """Yield one line for each contender whose law is off."""
    d, n_steps, n_chains = 5, 20, 20_000
    score = GaussianScore(torch.full((d,), 2.0))
    start = torch.zeros(n_chains, d)
    shrink = (1 - STEP) ** n_steps
    mean = 2.0 * (1 - shrink)
    variance = 2 * STEP * (1 - shrink**2) / (1 - (1 - STEP) ** 2)
    found = {"ours": ours(score, start, n_steps), "torch loop": torch_loop(score, start, n_steps)}
    if find_spec("blackjax"):
        found["BlackJAX"] = torch.tensor(blackjax_chains(score, start, n_steps)().__array__())
    for name, end in found.items():
        error = abs(float(end.mean()) - mean) / math.sqrt(variance / end.numel())
        wide = abs(float(end.var()) / variance - 1) / math.sqrt(2 / end.numel())
        if not (error < 4.5 and wide < 4.5):
            yield f"{name}: mean off by {error:.1f} and variance by {wide:.1f} standard errors"
    trap = TrapScore.standard(16, alpha=1.5)
    start = torch.zeros(4000, 16, dtype=torch.float64)
    full = ours(trap, start, n_steps).square().sum(1)
    chain = radial_chain(trap, start, STEP, n_steps, seed=1, progress=False)
    reduced = torch.as_tensor(chain.u) ** 2 + torch.as_tensor(chain.w)
    gap = abs(float(full.mean() - reduced.mean()))
    error = gap / math.sqrt(float(full.var() + reduced.var()) / 4000)
    if not error < 4.5:
        yield f"radial chain: mean of the squared radius off by {error:.1f} standard errors"


# --- times ----------------------------------------------------------------------------------------


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds by call and round; the order rotates, the first round warms up and is dropped."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for at in range(rounds + 1):
        shift = at % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in times.items()}


def compared(
    what: str, times: dict[str, list[float]], bars: dict[str, tuple[str, float]], per: int
) -> Iterator[dict[str, Any]]:
    """One row a peer: its time over ours, or ours over the noise's alone (bars with ≤)."""
    for peer, (target, bar) in bars.items():
        if peer not in times:
            continue
        pairs = list(zip(times[peer], times["ours"], strict=True))
        limit = target.startswith("≤")
        ratios = spread(b / a if limit else a / b for a, b in pairs)
        median = ratios["median"]
        yield {
            "what": what,
            "against": peer,
            "ratio": median,
            "spread": ratios,
            "target": target,
            "met": bool(median <= bar if limit else median >= bar),
            "milliseconds_a_step": {
                "ours": round(1e3 * sorted(times["ours"])[len(pairs) // 2] / per, 4),
                peer: round(1e3 * sorted(times[peer])[len(pairs) // 2] / per, 4),
            },
        }


def full_chains(quick: bool) -> Iterator[dict[str, Any]]:
    chains, d, n_steps, rounds = (64, 128, 4, 1) if quick else (4096, 1024, 20, 7)
    trap = TrapScore.standard(d)
    means = torch.zeros(2, d)
    means[0], means[1] = -1.0, 4.0
    mixture = MixtureScore(means, 2.0)
    bars = {
        "torch's normals alone": ("≤ 1.15", 1.15),
        "our normals alone": ("≤ none set", math.inf),
        "torch loop": ("≥ 2.5", 2.5),
        "BlackJAX sgld": ("≥ 3.5", 3.5),
    }
    for name, score in (("trap", trap), ("mixture of two", mixture)):
        start = torch.randn(chains, d, generator=torch.Generator().manual_seed(0))
        calls: dict[str, Callable[[], Any]] = {
            "ours": lambda score=score, start=start: ours(score, start, n_steps),
            "torch's normals alone": lambda start=start: normals(start, n_steps),
            "our normals alone": lambda start=start: own_normals(start, n_steps),
            "torch loop": lambda score=score, start=start: torch_loop(score, start, n_steps),
        }
        if find_spec("blackjax"):
            calls["BlackJAX sgld"] = blackjax_chains(score, start, n_steps)
        what = f"full chains, {name}, {chains:,} × {d:,}, fp32"
        yield from compared(what, interleaved(calls, rounds), bars, n_steps)


def radial(quick: bool) -> Iterator[dict[str, Any]]:
    """A chain's step at d = 10,000: the full chain over the radial one."""
    d, chains, n_steps, rounds = (100, 4, 10, 1) if quick else (10_000, 16, 200, 7)
    score, many = TrapScore.standard(d), 1 if quick else 200
    start = torch.zeros(chains, d)

    def reduced() -> None:
        radial_chain(
            score, "gaussian", STEP, n_steps * many, n_chains=chains, seed=0, progress=False
        )

    reduced()  # compiles
    times = interleaved(
        {"ours": reduced, "full chain": lambda: ours(score, start, n_steps)}, rounds
    )
    times["ours"] = [seconds / many for seconds in times["ours"]]
    bars = {"full chain": ("≥ 300", 300.0)}
    yield from compared(f"radial chain, d = {d:,}", times, bars, n_steps * chains)


# --- the kernel, compiled ahead of time -----------------------------------------------------------


def kernels(quick: bool) -> list[dict[str, Any]]:
    """Resources of the Triton kernel on two GPU generations; compiled here, run nowhere."""
    if find_spec("triton") is None:
        print("no triton on this platform: the kernel's resources are left out")
        return []
    from proofread.langevin.kernels import KERNELS
    from proofread.triton_support import compile_reports

    return [asdict(report) for report in compile_reports(KERNELS[: 1 if quick else None])]


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):  # XLA's threads heed no variable
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.exit(main())
