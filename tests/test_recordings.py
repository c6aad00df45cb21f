"""Recorded results: read from where they are asked for, with a clear error where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proofread.recordings import kernel_table, recorded


def test_kernel_table(tmp_path: Path) -> None:
    kernel = {"kernel": "exponential fp32", "capability": 90, "registers": 64, "shared_bytes": 128}
    kernel |= {"spill_stores_bytes": 4, "spill_loads_bytes": 8, "instructions": 1170}
    kernel |= {"global_loads": {"64": 1, "128": 8}, "global_stores": {"32": 1, "128": 8}}
    (tmp_path / "kernels.json").write_text(json.dumps([kernel]))
    (row,) = kernel_table("kernels.json", tmp_path).rows
    assert row == ("exponential fp32", "sm_90", 64, 12, 128, 1170, 128, 128)


def test_missing_record_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make bench"):
        recorded("none.json", tmp_path)
