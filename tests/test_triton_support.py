"""Dispatch, the interpreter's switch, ahead-of-time reports, test markers, the GPU script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from proofread import triton_support
from proofread.triton_support import (
    KernelCompileError,
    KernelReport,
    KernelSpec,
    access_widths,
    compile_report,
    compile_reports,
    enable_interpreter,
    force_triton,
    interpreting,
    opcodes,
    report_table,
    use_triton,
)

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]
CUDA = SimpleNamespace(is_cuda=True)  # what dispatch sees of a CUDA tensor
CPU = torch.zeros(1)


def python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter, without triton's mode of this process."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- dispatch -------------------------------------------------------------------------------------


def compiled_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "interpreting", lambda: False)


def test_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_mode(monkeypatch)
    assert use_triton(CUDA)
    assert not use_triton(CPU)


def test_the_interpreter_changes_nothing_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "interpreting", lambda: True)
    assert not use_triton(CPU)
    assert not use_triton(CUDA)  # the torch path is a thousand times faster


def test_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "interpreting", lambda: True)
    with force_triton():
        assert use_triton(CPU)
        with force_triton():
            assert use_triton(CPU)
        assert use_triton(CUDA)
    assert not use_triton(CPU)
    with pytest.raises(KeyError), force_triton():
        raise KeyError
    assert not use_triton(CPU)


def test_forced_without_the_interpreter_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_mode(monkeypatch)
    with force_triton():
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
            use_triton(CPU)
        assert use_triton(CUDA)


def test_without_triton_one_warning_and_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_mode(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)  # makes the import fail
    triton_support._triton_works.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="triton cannot be imported"):
            assert not use_triton(CUDA)
        assert not use_triton(CUDA)  # a second warning would be an error here
    finally:
        triton_support._triton_works.cache_clear()


def test_forced_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda name: None)
    with force_triton(), pytest.raises(RuntimeError, match="pip install triton"):
        use_triton(CPU)
    with pytest.raises(RuntimeError, match="pip install triton"):
        compile_reports([])


def test_importing_costs_neither_torch_nor_triton() -> None:
    code = "import sys, proofread.triton_support; print({'torch', 'triton'} & set(sys.modules))"
    assert python(code) == "set()"


# --- the interpreter's switch ---------------------------------------------------------------------


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True)])
def test_mode_before_and_after_importing_triton(value: str | None, expected: bool) -> None:
    code = (
        "from proofread.triton_support import interpreting; before = interpreting(); import os, "
        "triton; os.environ.pop('TRITON_INTERPRET', 0); print(before, interpreting())"
    )
    env = {} if value is None else {"TRITON_INTERPRET": value}
    assert python(code, **env) == f"{expected} {expected}"


def test_enabling_too_late_is_an_error() -> None:
    late = (
        "import triton; from proofread.triton_support import enable_interpreter\n"
        "try: enable_interpreter()\nexcept RuntimeError as error: print(error)"
    )
    assert "before the first import of triton" in python(late)


def test_enabling_in_time() -> None:
    early = (
        "from proofread.triton_support import *; enable_interpreter(); import triton; "
        "enable_interpreter(); print(interpreting())"
    )
    assert python(early) == "True"


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")
def test_this_run_interprets() -> None:
    import triton

    assert not isinstance(triton.language.sum, triton.JITFunction)
    enable_interpreter()  # no complaint
    assert os.environ["TRITON_INTERPRET"] == "1"


# --- machine code, by hand ------------------------------------------------------------------------

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000e300000000800 */
        /*00c0*/              @!P0 LDG.E.64 R4, [R4.64] ;
        /*00d0*/                   LDG.E.128.CONSTANT R4, desc[UR14][R2.64] ;
        /*00e0*/              @P12 LDG.E.LTC128B.128 R4, [R2.64+0x18000] ;
        /*00f0*/               @P5 LDG.E.U16 R4, [R2.64] ;
        /*0100*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        /*0110*/              @UP1 UMOV UR4, URZ ;
        /*0120*/                   STG.E desc[UR14][R2.64], R8 ;
        /*0130*/                   STG.E.128 [R2.64+0x8000], R4 ;
        /*0140*/                   STL.64 [R1+0x8], R4 ;
        /*0150*/                   STL [R1], R3 ;
        /*0160*/                   LDL.LU R3, [R1] ;
        /*0170*/                   MUFU.EX2 R3, R3 ;
        /*0180*/                   HMMA.16816.F32.BF16 R4, R4, R5, R6 ;
        /*0190*/                   NOP ;
        /*1a0a0*/                  EXIT ;
.L_x_0:
"""


def test_reading_a_disassembly() -> None:
    codes = opcodes(SASS)
    assert len(codes) == 15  # without NOP, labels and encodings
    assert access_widths(codes, "LDG", "LDGSTS") == {16: 1, 64: 1, 128: 3}
    assert access_widths(codes, "STG") == {32: 1, 128: 1}
    assert triton_support._bytes(access_widths(codes, "STL")) == 12
    assert triton_support._bytes(access_widths(codes, "LDL")) == 4
    assert "MUFU.EX2" in codes


@pytest.mark.parametrize(
    ("code", "expected"), [("HMMA", 1), ("HGMMA", 1), ("UTCHMMA", 1), ("IMAD", 0), ("FMNMX", 0)]
)
def test_tensor_core_instructions(code: str, expected: int) -> None:
    assert bool(triton_support._MMA.match(code)) == bool(expected)


REPORT = KernelReport(
    kernel="k",
    capability=90,
    num_warps=4,
    registers=40,
    spill_stores_bytes=0,
    spill_loads_bytes=0,
    stack_bytes=0,
    shared_bytes=16,
    instructions=99,
    global_loads={32: 1, 128: 8},
    global_stores={},
    exponentials=2,
    mma=0,
    cubin_bytes=1000,
)


def test_table() -> None:
    spilled = replace(REPORT, kernel="other", spill_stores_bytes=8, spill_loads_bytes=4)
    assert not REPORT.spills
    assert spilled.spills
    head, rule, first, second = report_table([REPORT, spilled]).splitlines()
    assert len({len(head), len(rule), len(first), len(second)}) == 1
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells == ["k", "sm_90", "4", "40", "0", "16", "99", "8×128, 1×32", "none", "2", "0"]
    assert second.split("|")[5].strip() == "12"
    assert len(report_table([]).splitlines()) == 2


# --- ahead-of-time compilation --------------------------------------------------------------------

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, tl.exp(x), mask=i < n)


@triton.jit
def product(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i[:, None] * BLOCK + i[None, :])
    tl.store(y_ptr + i[:, None] * BLOCK + i[None, :], tl.dot(x, x))


@triton.jit
def broken(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    tl.store(y_ptr, no_such_name)


@triton.jit
def crowded(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    y = tl.load(x_ptr + i + tl.sum(x).to(tl.int32))
    tl.store(y_ptr + i, tl.exp(x + y) * tl.sum(x * y))


def plain(x_ptr, y_ptr, n, BLOCK):
    print("to stdout")
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """A kernel in a module that only this process's import path finds."""
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
    return KernelSpec("some_kernels", "scale", types, {"BLOCK": 1024})


def test_what_a_report_says(spec: KernelSpec) -> None:
    """1024 elements over 128 threads: 8 each, so 2 loads of 4 where alignment is known and 8
    single ones where not; 8 exponentials; 32·4 tensor-core products; 64 registers of spills."""
    wide = replace(spec, divisible_by_16=("x_ptr", "y_ptr", "n"), label="wide")
    mma = replace(spec, kernel="product", constexprs={"BLOCK": 32}, divisible_by_16=("x_ptr",))
    half = replace(mma, signature=spec.signature | {"x_ptr": "*fp16"})
    crowded = replace(spec, kernel="crowded", constexprs={"BLOCK": 65536}, num_warps=32)
    narrow_80, narrow_90, wide_80, wide_90, half_80, half_90, full_80, full_90 = compile_reports(
        [spec, wide, half, crowded]
    )
    for report, capability in ((narrow_80, 80), (narrow_90, 90)):
        assert report.kernel == "scale"
        assert report.capability == capability
        assert report.global_loads == report.global_stores == {32: 8}
        assert report.exponentials == 8
        assert (report.mma, report.spills, report.shared_bytes) == (0, False, 0)
    for report in (wide_80, wide_90):
        assert report.kernel == "wide"
        assert report.global_loads == report.global_stores == {128: 2}
        assert report.cubin_bytes < narrow_80.cubin_bytes
    for report in (half_80, half_90):
        assert report.mma > 0
    for report in (full_80, full_90):  # 128 values a thread, 64 registers
        assert report.spills
        assert report.registers <= 64
        assert report.stack_bytes >= report.spill_stores_bytes // 8 > 0


def test_reports_are_stable(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Same numbers again, from another folder, with switches set that must not matter; and
    nothing is left behind, not even where a home folder is needed."""
    asked = (spec.module, spec.kernel, spec.signature, spec.constexprs)
    first = compile_report(*asked, capabilities=(80,))
    temporary, home = tmp_path / "tmp", tmp_path / "home"
    for folder in (temporary, home):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_KERNEL_DUMP", "1")
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    monkeypatch.chdir(home)
    assert compile_report(*asked, capabilities=(80,)) == first
    assert not list(temporary.iterdir())
    assert not list(home.iterdir())


BAD = {
    "not a triton.jit function": {"kernel": "plain"},
    "some_kernels.missing is not": {"kernel": "missing"},
    "No module named 'no_such_module'": {"module": "no_such_module"},
    "missing or unknown: BLOCK": {"constexprs": {}},
    "unknown z_ptr": {"divisible_by_16": ("z_ptr",)},
}


def test_what_cannot_compile_says_why(spec: KernelSpec, tmp_path: Path) -> None:
    with pytest.raises(KernelCompileError, match="no_such_name is not defined"):
        compile_reports([replace(spec, kernel="broken")], capabilities=(90,))
    bad = [{"specs": [asdict(replace(spec, **c))], "capabilities": [90]} for c in BAD.values()]
    code = (
        "import json, os; from proofread.triton_support import _work; "
        "print(json.dumps([_work(request) for request in json.loads(os.environ['BAD'])]))"
    )
    answers = json.loads(python(code, BAD=json.dumps(bad), PYTHONPATH=str(tmp_path)))
    for message, answer in zip(BAD, answers, strict=True):
        assert message in answer["error"]


def test_printing_does_not_spoil_the_answer(spec: KernelSpec, tmp_path: Path) -> None:
    """Importing the kernel's module prints, and so do compilers."""
    module = tmp_path / "some_kernels.py"
    module.write_text(KERNELS + "\nprint('hello')\nimport os; os.system('echo hello')\n")
    (report,) = compile_reports([spec], capabilities=(90,))
    assert report.exponentials == 8


def test_a_compiler_that_dies_or_hangs(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], -11, stdout="", stderr="Segmentation fault")
    with pytest.raises(KernelCompileError, match=r"code -11:\nSegmentation fault"):
        triton_support._answer(done)
    done = subprocess.CompletedProcess([], 0, stdout="not JSON", stderr="")
    with pytest.raises(KernelCompileError, match="code 0"):
        triton_support._answer(done)
    with pytest.raises(KernelCompileError, match=r"did not end within 0.01 s"):
        compile_reports([spec], timeout=0.01)


# --- markers --------------------------------------------------------------------------------------

MARKED = """
import pytest


@pytest.mark.gpu
def test_gpu(): pass


@pytest.mark.browser
def test_browser(): pass


def test_fixture(chromium_path): assert chromium_path.endswith("some-chromium")


def test_plain(): pass
"""


PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run_marked(folder: Path, **environment: str) -> str:
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text("utf-8"))
    (folder / "test_marked.py").write_text(MARKED)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: x\n  browser: x\n")
    command = ["-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "test_marked.py"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ
        | {"CHROMIUM": "no-such-browser", "CUDA_VISIBLE_DEVICES": "", **PLUGINS}
        | {"PROOFREAD_REQUIRE_BROWSER": "0"}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_missing_devices_skip_by_name(tmp_path: Path) -> None:
    out = run_marked(tmp_path)
    assert "SKIPPED [1] test_marked.py:5: needs a CUDA device" in out
    assert "SKIPPED [1] test_marked.py:9: needs Chromium" in out
    assert "1 passed, 3 skipped" in out


def test_a_required_browser_fails_instead(tmp_path: Path) -> None:
    out = run_marked(tmp_path, PROOFREAD_REQUIRE_BROWSER="1")
    assert "1 passed, 1 skipped, 2 errors" in out
    assert "PROOFREAD_REQUIRE_BROWSER=1, but this test needs Chromium" in out


def test_a_browser_that_is_there(tmp_path: Path) -> None:
    browser = tmp_path / "some-chromium"
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    assert "3 passed, 1 skipped" in run_marked(tmp_path, CHROMIUM=str(browser))


# --- the GPU script -------------------------------------------------------------------------------


def gpu_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_gpu_script_dry(tmp_path: Path) -> None:
    """It collects this repository's gpu tests and writes JSON that can be read."""
    (tmp_path / "stale.json").write_text("{")
    done = gpu_script("--dry", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu tests: " in done.stdout
    assert done.stdout.rstrip().endswith("gpu.sh: ready")
    written = {path.name: json.loads(path.read_text("utf-8")) for path in tmp_path.glob("*.json")}
    assert "stale.json" not in written
    assert {"linear_core.json", "environment.json"} <= set(written)


STAND_IN = """#!/usr/bin/env bash
# A Python that has a CUDA device, runs the tests as told, and measures in no time.
case "$1" in
  -c) exit 0 ;;
  -) exec "$REAL" "$@" ;;
  -m)
    echo "interpret=${TRITON_INTERPRET-unset}"
    echo "<testsuites><testsuite $COUNTS/></testsuites>" >"${!##--junitxml=}"
    exit "$STATUS" ;;
  *) echo "measured: $*"; echo '{}' >"${!#}/linear_core-cuda.json" ;;
esac
"""


@pytest.mark.parametrize(
    ("status", "counts", "green"),
    [
        (0, 'tests="5" failures="0" errors="0" skipped="0"', True),
        (1, 'tests="5" failures="1" errors="0" skipped="0"', False),
        (0, 'tests="5" failures="0" errors="0" skipped="2"', False),
        (5, 'tests="0" failures="0" errors="0" skipped="0"', False),
        (139, 'tests="5" failures="0" errors="0" skipped="0"', False),
    ],
    ids=["green", "red", "skipped", "none", "crashed"],
)
def test_gpu_script_measures_on_green_only(
    status: int, counts: str, green: bool, tmp_path: Path
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = {"STATUS": str(status), "COUNTS": counts, "TRITON_INTERPRET": "1"}
    environment |= {"PYTHON": str(stand_in), "REAL": sys.executable, "OUT": str(tmp_path / "out")}
    done = gpu_script(**environment)
    assert "interpret=unset" in done.stdout
    assert (done.returncode == 0) == green, done.stderr
    assert ("measured: benchmarks/linear_core.py --device cuda" in done.stdout) == green
    result = json.loads((tmp_path / "out" / "gpu_tests.json").read_text("utf-8"))
    assert result["green"] == green
    assert (tmp_path / "out" / "linear_core-cuda.json").is_file() == green


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_gpu_script_says_what_is_missing(tmp_path: Path) -> None:
    done = gpu_script(OUT=str(tmp_path))
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())
    assert gpu_script("--wet", OUT=str(tmp_path)).returncode == 2
    late = gpu_script("--dry", OUT=str(tmp_path), BUDGET="0")
    assert late.returncode != 0
    assert "used up" in late.stdout + late.stderr
