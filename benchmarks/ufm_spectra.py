"""Curvature products and eigenpairs against peers: correctness first, then time at equal residual.

    python benchmarks/ufm_spectra.py [--quick] [--out DIR]

The gate compares every contender's product with ``torch.func.hessian`` on a small network in
float64. If it is red, the script says where, reports no speed, writes nothing and exits with 1.

*One product*: full Hessian, cross-entropy, fp32: a perceptron of 269,000 weights with 1,024
samples, a convolutional network with 128. Ours keeps the graph of the gradient; its set-up is
reported apart. *Top 10*: of the full Hessian of a trained perceptron in float64, set-up included.
*Top 100*: of one hidden layer's Hessian (4,096 weights) of the book's perceptrons in float64, with
a linear head (a gap follows) and with a ReLU head (none), set-up included.

One process, one thread, contenders take turns; medians with min and max. Residuals are computed for
all by one function. PyHessian and hessian-eigenthings are left out where they are not installed
(pip install --no-deps pyhessian==0.1 hessian-eigenthings==1.0.0a5); they run at their defaults, and
the largest residual of what they return is shown beside the time. Results go to
``ufm_spectra.json``; ``ufm_spectra_kernels.json`` holds the Triton kernel's resources, compiled
ahead of time. All of it takes about three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from curvlinops import HessianLinearOperator
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from proofread.data import load
from proofread.ufm_spectra import hessian, layer_hessian, top_eigenpairs
from proofread.ufm_spectra.networks import Recipe, class_subset, mlp, train_networks

# spread, write, environment: a script's folder is not always on the path, so no import
SHARED = runpy.run_path(str(Path(__file__).with_name("linear_core.py")))
spread = SHARED["spread"]
PEERS = ("pyhessian", "hessian_eigenthings")


class Problem(NamedTuple):
    """A network, its data, and its loss by name and as a module; layer None stands for all."""

    network: nn.Module
    x: Tensor
    y: Tensor
    loss: str
    layer: str | None = None

    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.CrossEntropyLoss() if self.loss == "cross_entropy" else SquaredError()

    def parameters(self) -> list[nn.Parameter]:
        if self.layer is None:
            return list(self.network.parameters())
        return [self.network.get_parameter(f"{self.layer}.weight")]


class SquaredError(nn.Module):
    """``(1/2N)‖f − Y‖²``; curvlinops asks for the attribute."""

    reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wanted = nn.functional.one_hot(targets, outputs.shape[1]).to(outputs)
        return (outputs - wanted).square().sum() / (2 * len(outputs))


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
    print("gate: green (torch.func.hessian)", flush=True)
    cases = [*products(options.quick), *eigenpairs(options.quick)]
    result = {"gate": "green", "environment": SHARED["environment"]("cpu"), "cases": cases}
    SHARED["write"](options.out / "ufm_spectra.json", result)
    SHARED["write"](options.out / "ufm_spectra_kernels.json", kernels(options.quick))
    print("wrote ufm_spectra.json and ufm_spectra_kernels.json")
    return 0


# --- contenders -----------------------------------------------------------------------------------


def ours(problem: Problem) -> Any:
    """The package's operator."""
    if problem.layer is None:
        return hessian(problem.network, problem.x, problem.y, problem.loss)
    return layer_hessian(problem.network, problem.layer, problem.x, problem.y, problem.loss)


def curvlinops(problem: Problem) -> HessianLinearOperator:
    data = [(problem.x, problem.y)]
    arguments = (problem.network, problem.criterion(), problem.parameters(), data)
    return HessianLinearOperator(*arguments, check_deterministic=False)


def pyhessian(problem: Problem) -> Any:
    from pyhessian import hessian as operator

    problem.network.zero_grad(set_to_none=True)  # it adds to what is there
    for name, parameter in problem.network.named_parameters():
        parameter.requires_grad_(problem.layer is None or name == f"{problem.layer}.weight")
    return operator(problem.network, problem.criterion(), data=(problem.x, problem.y), cuda=False)


def pyhessian_product(operator: Any, v: Tensor) -> Tensor:
    from pyhessian.utils import hessian_vector_product

    parts, start = [], 0
    for parameter in operator.params:
        parts.append(v[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()
    found = hessian_vector_product(operator.gradsH, operator.params, parts)
    return torch.cat([part.flatten() for part in found])


def jvp_of_gradient(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Forward over reverse from scratch, as ``torch.func`` documents it."""
    shapes = {n: p.detach() for n, p in problem.network.named_parameters()}

    def gradient(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        def loss(p: dict[str, Tensor]) -> Tensor:
            outputs = torch.func.functional_call(problem.network, p, (problem.x,))
            return problem.criterion()(outputs, problem.y)

        return torch.func.grad(loss)(parameters)

    def product(v: Tensor) -> Tensor:
        pieces = v.split([p.numel() for p in shapes.values()])
        tangent = {n: t.view_as(p) for t, (n, p) in zip(pieces, shapes.items(), strict=True)}
        found = torch.func.jvp(gradient, (shapes,), (tangent,))[1]
        return torch.cat([part.flatten() for part in found.values()])

    return product


# --- the gate -------------------------------------------------------------------------------------


def gate() -> Iterator[str]:
    """Yield one line for each disagreement with the dense Hessian."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(20, 6, generator=draw, dtype=torch.float64)
    y = torch.arange(20) % 3
    network = mlp(6, 3, body=(5,), head=(5,))
    for loss in ("mse", "cross_entropy"):
        problem = Problem(network, x, y, loss)
        dense = dense_hessian(problem)
        v = torch.randn(len(dense), generator=draw, dtype=torch.float64)
        found = {"ours": ours(problem) @ v, "curvlinops": curvlinops(problem) @ v}
        found["jvp of grad"] = jvp_of_gradient(problem)(v)
        if find_spec("pyhessian"):
            found["PyHessian"] = pyhessian_product(pyhessian(problem), v)
        for name, product in found.items():
            error = float((product - dense @ v).norm() / (dense @ v).norm())
            if not error < 1e-10:
                yield f"{name}, {loss}: relative error {error:.1e}"
        yield from layer_faults(problem)
        pairs, exact = top_eigenpairs(ours(problem), 5), torch.linalg.eigvalsh(dense)
        exact = exact[exact.abs().argsort(descending=True)][:5]
        if not torch.allclose(pairs.values, exact, atol=1e-5 * float(exact[0].abs())):
            yield f"top_eigenpairs, {loss}: {pairs.values.tolist()} for {exact.tolist()}"


def layer_faults(problem: Problem) -> Iterator[str]:
    """The layer Hessian against its block of the dense one."""
    operator = layer_hessian(problem.network, "head1", problem.x, problem.y, problem.loss)
    sizes = [p.numel() for p in problem.network.parameters()]
    names = [name for name, _ in problem.network.named_parameters()]
    start = sum(sizes[: names.index("head1.weight")])
    rows = slice(start, start + operator.shape[0])
    error = float((operator.to_dense() - dense_hessian(problem)[rows, rows]).abs().max())
    if not error < 1e-10:
        yield f"layer_hessian, {problem.loss}: absolute error {error:.1e}"


def dense_hessian(problem: Problem) -> Tensor:
    parameters = {n: p.detach() for n, p in problem.network.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def loss(flat: Tensor) -> Tensor:
        pieces = zip(flat.split(sizes), parameters.items(), strict=True)
        values = {name: piece.view_as(p) for piece, (name, p) in pieces}
        outputs = torch.func.functional_call(problem.network, values, (problem.x,))
        return problem.criterion()(outputs, problem.y)

    return torch.func.hessian(loss)(torch.cat([p.flatten() for p in parameters.values()]))


# --- one product ----------------------------------------------------------------------------------


def products(quick: bool) -> Iterator[dict[str, Any]]:
    """One product of the full Hessian."""
    torch.manual_seed(0)
    n, size = (32, 12) if quick else (1024, 256)
    dense = nn.Sequential(
        *(nn.Linear(784, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10))
    )
    x, y = torch.randn(n, 784), torch.randint(10, (n,))
    yield one_product("perceptron", Problem(dense, x, y, "cross_entropy"), 2.5, quick)
    n, c = (8, 4) if quick else (128, 32)
    convolutional = nn.Sequential(
        *(nn.Conv2d(1, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * c * 49, 16), nn.ReLU(), nn.Linear(16, 10)),
    )
    x, y = torch.randn(n, 1, 28, 28), torch.randint(10, (n,))
    yield one_product("convolutional", Problem(convolutional, x, y, "cross_entropy"), 1.8, quick)


def one_product(name: str, problem: Problem, bar: float, quick: bool) -> dict[str, Any]:
    size = sum(p.numel() for p in problem.network.parameters())
    v = torch.randn(size)
    start = time.perf_counter()
    operator = ours(problem)
    setup = time.perf_counter() - start
    peer = curvlinops(problem)
    calls = {"ours": lambda: operator @ v, "curvlinops": lambda: peer @ v}
    calls["jvp of grad"] = partial(jvp_of_gradient(problem), v)
    if find_spec("pyhessian"):
        kept = pyhessian(problem)
        calls["PyHessian"] = partial(pyhessian_product, kept, v)
    times = interleaved(calls, 2 if quick else 15 if name == "perceptron" else 7)
    return {
        "kind": "one product",
        "name": f"{name}, {size:,} weights, {len(problem.x):,} samples, fp32",
        "setup_milliseconds": round(1e3 * setup, 1),
        "bars": [{"peer": "curvlinops", "target": bar}],
        **compared(times),
    }


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call by round; the first round warms up and is dropped."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in times.items()}


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        name: spread(t / one for t, one in zip(values, times["ours"], strict=True))
        for name, values in times.items()
        if name != "ours"
    }
    seconds = {name: spread(iter(values)) for name, values in times.items()}
    return {"seconds": seconds, "times_ours": ratios}


# --- eigenpairs -----------------------------------------------------------------------------------


class Found(NamedTuple):
    """Eigenvalues ``[k]``, eigenvectors ``[P, k]`` and the columns multiplied (-1: unknown)."""

    values: Tensor
    vectors: Tensor
    applications: int


def eigenpairs(quick: bool) -> Iterator[dict[str, Any]]:
    """Top 10 of a full Hessian and top 100 of a layer's."""
    data = load("fashion_mnist", tier="embedded")
    images, labels = torch.tensor(data.x_train / 255), torch.tensor(data.y_train)
    x, y = class_subset(images, labels, 10 if quick else 100, 4 if quick else 2)
    width, epochs = (12, 2) if quick else (64, 240)
    for relu in (False, True):
        make = partial(mlp, x.shape[1], 10, body=(width,) * 2, head=(width,) * 2, relu_head=relu)
        recipe = Recipe(epochs=epochs)
        network = train_networks(lambda s, make=make: make(seed=s), x, y, recipe).final.networks[0]
        head = "ReLU head" if relu else "linear head"
        if not relu:
            problem = Problem(network, x, y, "mse")
            yield top(f"top 10, full Hessian, {head}", problem, 10, 2.5, quick)
        problem = Problem(network, x, y, "mse", "head2")
        yield top(f"top 100, layer Hessian, {head}", problem, 100, 4.0, quick)


def top(name: str, problem: Problem, k: int, bar: float, quick: bool) -> dict[str, Any]:
    calls = {
        "ours": partial(by_ours, problem, k),
        "curvlinops + eigsh": partial(by_eigsh, problem, k),
    }
    calls["curvlinops + eigsh, tol 1e-3"] = partial(by_eigsh, problem, k, 1e-3)
    if find_spec("pyhessian"):
        calls["PyHessian, defaults"] = partial(by_pyhessian, problem, k)
    if find_spec("hessian_eigenthings"):
        calls["hessian-eigenthings, defaults"] = partial(by_eigenthings, problem, k)
    results = {name: call() for name, call in calls.items()}  # also warms up
    slow = ("PyHessian, defaults", "hessian-eigenthings, defaults")
    fast = {n: c for n, c in calls.items() if k <= 10 or n not in slow}
    times = interleaved(fast, 1 if quick else 5)
    for other in calls.keys() - fast.keys():  # minutes each: once
        times[other] = interleaved({other: calls[other]}, 1)[other] * len(times["ours"])
    operator, scale = ours(problem), results["curvlinops + eigsh"].values.abs().max()
    return {
        "kind": "eigenpairs",
        "name": name,
        "k": k,
        "bars": [{"peer": "curvlinops + eigsh", "target": bar}],
        "applications": {n: found.applications for n, found in results.items()},
        "residual": {n: residual(operator, found, scale) for n, found in results.items()},
        **compared(times),
    }


def residual(operator: Any, found: Found, scale: Tensor) -> float:
    """Largest ``‖Hv − λv‖ / λ_1`` over the pairs, vectors scaled to 1."""
    vectors = found.vectors / found.vectors.norm(dim=0)
    image = operator.matmat(vectors)
    return float(f"{float((image - found.values * vectors).norm(dim=0).max() / scale):.2g}")


def by_ours(problem: Problem, k: int) -> Found:
    operator = ours(problem)
    pairs = top_eigenpairs(operator, k, block_size=2 if problem.layer is None else 8)
    return Found(pairs.values, pairs.vectors, operator.applications)


def by_eigsh(problem: Problem, k: int, tol: float = 0.0) -> Found:
    operator, count = curvlinops(problem).to_scipy(), 0

    def product(v: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        return operator @ v.ravel()

    counted = LinearOperator(operator.shape, product, dtype=operator.dtype)
    v0 = np.random.default_rng(0).standard_normal(operator.shape[0])
    values, vectors = eigsh(counted, k=k, which="LM", tol=tol, v0=v0)
    return Found(torch.from_numpy(values), torch.from_numpy(vectors), count)


def by_pyhessian(problem: Problem, k: int) -> Found:
    torch.manual_seed(0)
    values, vectors = pyhessian(problem).eigenvalues(top_n=k)
    columns = [torch.cat([part.flatten() for part in parts]) for parts in vectors]
    problem.network.requires_grad_(True)
    return Found(torch.tensor(values, dtype=torch.float64), torch.stack(columns, 1), -1)


def by_eigenthings(problem: Problem, k: int) -> Found:
    from hessian_eigenthings import HessianOperator, lanczos

    criterion = problem.criterion()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return criterion(model(batch[0]), batch[1])

    chosen = None if problem.layer is None else lambda name, _: name == f"{problem.layer}.weight"
    operator = HessianOperator(problem.network, [(problem.x, problem.y)], loss, param_filter=chosen)
    with contextlib.redirect_stdout(io.StringIO()):
        found = lanczos(operator, k=k, seed=0)
    vectors = torch.as_tensor(found.eigenvectors)
    vectors = vectors.T if vectors.shape[0] == k else vectors
    return Found(torch.as_tensor(found.eigenvalues), vectors.to(problem.x.dtype), -1)


# --- the kernel, compiled ahead of time -----------------------------------------------------------


def kernels(quick: bool) -> list[dict[str, Any]]:
    """Resources of the Triton kernel on two GPU generations; compiled here, run nowhere."""
    if find_spec("triton") is None:
        print("no triton on this platform: the kernel's resources are left out")
        return []
    from proofread.triton_support import compile_reports
    from proofread.ufm_spectra.kernels import KERNELS

    return [asdict(report) for report in compile_reports(KERNELS[: 1 if quick else None])]


if __name__ == "__main__":
    sys.exit(main())
