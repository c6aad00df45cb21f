#!/usr/bin/env bash
# All GPU correctness tests, compiled, and only if every one passes the GPU benchmarks.
#
#   benchmarks/gpu.sh          on a machine with a CUDA device, at most 8 minutes
#   benchmarks/gpu.sh --dry    without one: the tests are collected, the benchmark runs on the CPU
#
# Results go to $OUT (default _build/gpu): gpu_tests.json, gpu_tests.xml and the benchmark's JSON.
# PYTHON selects the interpreter (default .venv/bin/python, else python3); BUDGET is in seconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dry=no
case "${1:-}" in
  "") ;;
  --dry) dry=yes ;;
  *) echo "usage: benchmarks/gpu.sh [--dry]" >&2; exit 2 ;;
esac
if [ -z "${PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
OUT=${OUT:-_build/gpu}
BUDGET=${BUDGET:-480}
mkdir -p "$OUT"
rm -f "$OUT"/*.json "$OUT"/*.xml # nothing of an earlier run may pass for this one's
unset TRITON_INTERPRET           # compiled kernels, not the interpreter
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Run a command within what is left of the budget.
limited() {
  local left=$((BUDGET - SECONDS))
  if ((left <= 0)); then echo "gpu.sh: the $BUDGET s are used up" >&2; exit 124; fi
  timeout --kill-after=10 "$left" "$@"
}

# Counts from the tests' XML; fails unless pytest ended well, at least one test ran and none failed
# or was skipped. $1: pytest's exit code.
summary() {
  "$PYTHON" - "$OUT" "$1" <<'END'
import json, sys
from pathlib import Path
from xml.etree import ElementTree

out, status = Path(sys.argv[1]), int(sys.argv[2])
if not (out / "gpu_tests.xml").is_file():
    sys.exit(f"gpu tests: no result, pytest ended with code {status}")
suites = ElementTree.parse(out / "gpu_tests.xml").getroot().iter("testsuite")
counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for suite in suites:
    for name in counts:
        counts[name] += int(suite.get(name, 0))
bad = counts["failures"] + counts["errors"] + counts["skipped"]
counts["green"] = status == 0 and counts["tests"] > 0 and bad == 0
(out / "gpu_tests.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
print("gpu tests:", ", ".join(f"{name} {value}" for name, value in counts.items()))
sys.exit(not counts["green"])
END
}

# At least one JSON file must have been written by the benchmark, and all must be readable.
written() {
  "$PYTHON" - "$OUT" <<'END'
import json, sys
from pathlib import Path

files = sorted(p for p in Path(sys.argv[1]).glob("*.json") if p.name != "gpu_tests.json")
for path in files:
    json.loads(path.read_text(encoding="utf-8"))
if not files:
    sys.exit("gpu.sh: the benchmark wrote no JSON")
print("written:", ", ".join(path.name for path in files))
END
}

# Only the files that have such tests: nothing else needs to be importable on that machine.
mapfile -t files < <(grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests | sort)
if [ "${#files[@]}" -eq 0 ]; then echo "gpu.sh: no test is marked gpu" >&2; exit 1; fi

if [ "$dry" = yes ]; then
  echo "gpu.sh: dry run, nothing is measured"
  if ! listed=$(limited "$PYTHON" -m pytest "${files[@]}" -m gpu --collect-only -q \
      -p no:cacheprovider 2>&1); then
    printf '%s\ngpu.sh: collecting the gpu tests failed\n' "$listed" >&2
    exit 1
  fi
  found=$(grep -c '::' <<<"$listed" || true)
  if [ "$found" -eq 0 ]; then echo "gpu.sh: no test is marked gpu" >&2; exit 1; fi
  echo "gpu tests: $found collected"
  if [ -f benchmarks/linear_core.py ]; then
    limited "$PYTHON" benchmarks/linear_core.py --quick --device cpu --out "$OUT"
    limited "$PYTHON" benchmarks/linear_core_fused.py --quick --device cpu --out "$OUT"
    written
  else
    echo "gpu.sh: benchmarks/linear_core.py is not there yet"
  fi
  echo "gpu.sh: ready"
  exit 0
fi

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu.sh: no CUDA device (or a CPU-only torch); try benchmarks/gpu.sh --dry" >&2
  exit 1
fi
status=0
limited "$PYTHON" -m pytest "${files[@]}" -m gpu -p no:cacheprovider \
  --junitxml="$OUT/gpu_tests.xml" || status=$?
if ! summary "$status"; then
  echo "gpu.sh: tests are red, no benchmark is run" >&2
  exit 1
fi
limited "$PYTHON" benchmarks/linear_core.py --device cuda --out "$OUT"
limited "$PYTHON" benchmarks/linear_core_fused.py --device cuda --out "$OUT"
written
echo "gpu.sh: done in $SECONDS s"
