"""When to run Triton kernels, and what a kernel costs on a GPU that this machine does not have.

**Dispatch.** :func:`use_triton` says whether an operation takes its kernel or its torch path. The
device decides: CUDA tensors take the kernel, CPU tensors never do, unless a test asks for it with
:func:`force_triton`.

**Two ways to run a kernel.** With ``TRITON_INTERPRET=1`` in the environment before triton is
imported, kernels run in Python on the CPU, one program after another: that shows that the
algorithm is right, not that the GPU code is. Without it they are compiled. A process has one of
the two modes for good.

**Ahead-of-time reports.** :func:`compile_report` compiles a kernel for given GPU generations in a
process of its own, with no GPU, and reads registers, spills and the widths of memory accesses out
of the machine code, with the assembler and disassembler that ship with triton.

**Pytest.** Tests marked ``gpu`` need a CUDA device and are skipped by name without one; where
there is none, ``tests/conftest.py`` turns the interpreter on before anything imports triton.
``benchmarks/gpu.sh`` runs them on a GPU, compiled.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "KernelCompileError",
    "KernelReport",
    "KernelSpec",
    "compile_report",
    "compile_reports",
    "enable_interpreter",
    "force_triton",
    "interpreting",
    "report_table",
    "use_triton",
]

_VARIABLE = "TRITON_INTERPRET"
_FORCED: ContextVar[bool] = ContextVar("force_triton", default=False)

# --- dispatch -------------------------------------------------------------------------------------


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on ``tensor`` should launch its Triton kernel.

    True for a CUDA tensor if triton can be imported and compiles; without triton the torch path
    is taken, with one warning. A process under the interpreter takes the torch path too. False
    for a tensor elsewhere. Within :func:`force_triton` the answer is True or an error.

    Raises:
        RuntimeError: forced, but triton is missing, or the tensor is on the CPU and the process
            does not interpret.
    """
    if _FORCED.get():
        return _forced(tensor)
    return tensor.is_cuda and not interpreting() and _triton_works()


def _forced(tensor: torch.Tensor) -> bool:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("force_triton() needs triton: pip install triton (Linux)")
    if not tensor.is_cuda and not interpreting():
        raise RuntimeError(
            "a Triton kernel runs on a CPU tensor under the interpreter only: start Python with "
            f"{_VARIABLE}=1, or call enable_interpreter() before anything imports triton"
        )
    return True


@functools.cache
def _triton_works() -> bool:
    try:
        importlib.import_module("triton")
    except Exception as error:  # a broken installation raises more than ImportError
        warnings.warn(
            f"triton cannot be imported ({error}): CUDA tensors take the slower torch path",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


@contextmanager
def force_triton() -> Iterator[None]:
    """Make :func:`use_triton` answer True for every tensor, for tests under the interpreter."""
    token = _FORCED.set(True)
    try:
        yield
    finally:
        _FORCED.reset(token)


def interpreting() -> bool:
    """Whether kernels run in the interpreter in this process; if triton is not imported yet,
    whether they would."""
    triton = sys.modules.get("triton")
    if triton is None or not hasattr(triton, "language"):
        return os.environ.get(_VARIABLE, "").lower() in {"1", "true", "yes", "on", "y"}
    return not isinstance(triton.language.sum, triton.JITFunction)  # fixed when triton was imported


def enable_interpreter() -> None:
    """Set ``TRITON_INTERPRET=1``, for this process and its children.

    Raises:
        RuntimeError: triton is already imported in compiled mode; the mode cannot change then.
    """
    if "triton" in sys.modules and not interpreting():
        raise RuntimeError(
            f"triton is already imported without {_VARIABLE}: set {_VARIABLE}=1 in the "
            "environment, or call enable_interpreter() before the first import of triton"
        )
    os.environ[_VARIABLE] = "1"


# --- ahead-of-time compilation --------------------------------------------------------------------


class KernelCompileError(RuntimeError):
    """A kernel did not compile; the message is the compiler's."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and the arguments to compile it for.

    ``signature`` gives the type of each run-time argument by name (``"*fp32"``, ``"i32"``,
    ``"fp64"`` …), ``constexprs`` the value of each compile-time one. ``divisible_by_16`` names
    pointers and integers that a launch would find divisible by 16. ``label`` replaces the kernel's
    name in tables.
    """

    module: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: Sequence[str] = ()
    label: str = ""


@dataclass(frozen=True)
class KernelReport:
    """Resources of one kernel on one GPU generation, read from its machine code.

    ``registers``, ``spill_stores_bytes``, ``spill_loads_bytes`` and ``stack_bytes`` are per
    thread, ``shared_bytes`` per program. ``global_loads`` and ``global_stores`` count the
    instructions by width in bits. ``exponentials`` are the hardware's base-2 exponentials, ``mma``
    the tensor-core instructions.
    """

    kernel: str
    capability: int
    num_warps: int
    registers: int
    spill_stores_bytes: int
    spill_loads_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
    global_loads: Mapping[int, int]
    global_stores: Mapping[int, int]
    exponentials: int
    mma: int
    cubin_bytes: int

    @property
    def spills(self) -> bool:
        """Whether any register is kept in memory."""
        return bool(self.spill_stores_bytes or self.spill_loads_bytes or self.stack_bytes)


def compile_report(
    module: str,
    kernel: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    capabilities: Sequence[int] = (80, 90),
    num_warps: int = 4,
    num_stages: int = 3,
    divisible_by_16: Sequence[str] = (),
    label: str = "",
) -> list[KernelReport]:
    """Compile one kernel for each compute capability (80: A100, 90: H100 and H200), without a GPU.

    ``module`` is the dotted name of an importable module and ``kernel`` the name of a
    ``triton.jit`` function in it; the other arguments are :class:`KernelSpec`'s.

    Raises:
        KernelCompileError: the kernel cannot be found or does not compile.
        RuntimeError: triton is not installed.
    """
    spec = KernelSpec(
        module, kernel, signature, constexprs, num_warps, num_stages, divisible_by_16, label
    )
    return compile_reports([spec], capabilities=capabilities)


def compile_reports(
    specs: Sequence[KernelSpec], *, capabilities: Sequence[int] = (80, 90), timeout: float = 300.0
) -> list[KernelReport]:
    """:func:`compile_report` for several kernels in one process: spec by spec, then capability.

    ``timeout`` is in seconds, for all of them together.
    """
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("an ahead-of-time report needs triton: pip install triton (Linux)")
    request = {"specs": [asdict(spec) for spec in specs], "capabilities": list(capabilities)}
    with tempfile.TemporaryDirectory(prefix="proofread-triton-") as folder:
        done = _run_worker(json.dumps(request), folder, timeout)
    answer = _answer(done)
    if "error" in answer:
        raise KernelCompileError(answer["error"])
    return [_from_json(report) for report in answer["reports"]]


def _run_worker(request: str, folder: str, timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, "-P", "-m", "proofread.triton_support"],
            input=request,
            capture_output=True,
            text=True,
            env=_worker_environment(folder),
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelCompileError(f"the compiler did not end within {timeout:g} s") from error


_COMPILER_SWITCHES = ("DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "LLVM_EXTRACT_DI_LOCAL_VARIABLES")


def _worker_environment(folder: str) -> dict[str, str]:
    """The caller's environment and import path, without triton's switches; all files go to
    ``folder``. Line tables would put the installation's path into the cubin: off."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    for name in _COMPILER_SWITCHES:
        env.pop(name, None)
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # "" is the folder itself
    folders = dict.fromkeys(("TRITON_HOME", "TRITON_CACHE_DIR", "TMPDIR"), folder)
    return env | folders | {"PYTHONPATH": path, "TRITON_DISABLE_LINE_INFO": "1"}


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    if done.returncode == 0 and isinstance(answer, dict):
        return answer
    raise KernelCompileError(
        f"the compiler process ended with code {done.returncode}:\n{done.stderr[-4000:].strip()}"
    )


def _from_json(report: dict[str, Any]) -> KernelReport:
    for name in ("global_loads", "global_stores"):
        report[name] = {int(width): count for width, count in report[name].items()}
    return KernelReport(**report)


def report_table(reports: Sequence[KernelReport]) -> str:
    """The reports as a Markdown table that also reads well as plain text, a row each.

    Loads and stores of global memory are given as count×width in bits.
    """
    rows = [_COLUMNS, *(_row(report) for report in reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


_COLUMNS: tuple[str, ...] = (
    *("kernel", "GPU", "warps", "registers", "spill, bytes", "shared, bytes"),
    *("instructions", "loads", "stores", "exp2", "mma"),
)


def _row(report: KernelReport) -> tuple[str, ...]:
    numbers = (report.num_warps, report.registers)
    spill = report.spill_stores_bytes + report.spill_loads_bytes
    more = (spill, report.shared_bytes, report.instructions)
    accesses = (_widths(report.global_loads), _widths(report.global_stores))
    last = (report.exponentials, report.mma)
    cells = (report.kernel, f"sm_{report.capability}", *numbers, *more, *accesses, *last)
    return tuple(str(cell) for cell in cells)


def _widths(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{counts[w]}×{w}" for w in sorted(counts, reverse=True)) or "none"


# --- the machine code -----------------------------------------------------------------------------

_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][\w.]*)")
_WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_MMA = re.compile(r"^(?:[BDFHIQO]|HG|IG|QG|BG|OM|UTC\w*)MMA$")


def opcodes(sass: str) -> list[str]:
    """The instructions of a disassembly with their modifiers, ``LDG.E.128`` for one; no padding."""
    found = (_LINE.match(line) for line in sass.splitlines())
    return [match[1] for match in found if match and match[1] != "NOP"]


def access_widths(codes: Sequence[str], *kinds: str) -> dict[int, int]:
    """Count the memory instructions of the given kinds by width in bits (32 unless it says)."""
    counts: Counter[int] = Counter()
    for code in codes:
        kind, *modifiers = code.split(".")
        if kind in kinds:
            counts[next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), 32)] += 1
    return dict(sorted(counts.items()))


def _bytes(counts: Mapping[int, int]) -> int:
    return sum(width // 8 * count for width, count in counts.items())


# --- the worker process ---------------------------------------------------------------------------


def _find_kernel(spec: dict[str, Any]) -> Any:
    import triton

    kernel = getattr(importlib.import_module(spec["module"]), spec["kernel"], None)
    if not isinstance(kernel, triton.JITFunction):
        raise TypeError(f"{spec['module']}.{spec['kernel']} is not a triton.jit function")
    known, given = set(kernel.arg_names), [*spec["signature"], *spec["constexprs"]]
    if wrong := sorted(known.symmetric_difference(given)):
        raise TypeError(
            f"{spec['kernel']}: signature and constexprs must name every argument exactly once; "
            f"missing or unknown: {', '.join(wrong)}"
        )
    if unknown := sorted(set(spec["divisible_by_16"]) - known):
        raise TypeError(f"{spec['kernel']}: divisible_by_16 names unknown {', '.join(unknown)}")
    return kernel


def _compile(spec: dict[str, Any], capability: int) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _find_kernel(spec)
    constants, types = spec["constexprs"], spec["signature"]
    source = ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types[n] for n in kernel.arg_names},
        constexprs=constants,
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if name in spec["divisible_by_16"]
        },
    )
    options = {"num_warps": spec["num_warps"], "num_stages": spec["num_stages"]}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _measure(spec, capability, compiled)


def _measure(spec: dict[str, Any], capability: int, compiled: Any) -> dict[str, Any]:
    from triton import knobs

    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        sass = _tool(knobs.nvidia.nvdisasm.path, "-c", file.name)
        usage = _tool(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
    codes = opcodes(sass)
    return asdict(
        KernelReport(
            kernel=spec["label"] or spec["kernel"],
            capability=capability,
            num_warps=spec["num_warps"],
            registers=_usage(usage, "REG"),
            spill_stores_bytes=_bytes(access_widths(codes, "STL")),
            spill_loads_bytes=_bytes(access_widths(codes, "LDL")),
            stack_bytes=_usage(usage, "STACK"),
            shared_bytes=compiled.metadata.shared,
            instructions=len(codes),
            global_loads=access_widths(codes, "LDG", "LDGSTS"),
            global_stores=access_widths(codes, "STG"),
            exponentials=codes.count("MUFU.EX2"),
            mma=sum(bool(_MMA.match(code.split(".")[0])) for code in codes),
            cubin_bytes=len(cubin),
        )
    )


def _tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _usage(text: str, name: str) -> int:
    match = re.search(rf"\b{name}:(\d+)", text)
    if match is None:
        raise ValueError(f"no {name} in the resource usage:\n{text}")
    return int(match[1])


def _work(request: dict[str, Any]) -> dict[str, Any]:
    try:
        jobs = [(spec, cap) for spec in request["specs"] for cap in request["capabilities"]]
        return {"reports": [_compile(spec, cap) for spec, cap in jobs]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[-8000:]}


def _worker() -> None:
    """Read a request from stdin, write the answer to stdout: nothing else may appear there, and
    compilers print."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    json.dump(_work(json.load(sys.stdin)), answer)
    answer.close()


if __name__ == "__main__":
    _worker()
