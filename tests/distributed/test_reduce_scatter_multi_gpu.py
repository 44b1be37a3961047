"""Gradient shards in the memory of freed unsharded gradients: the steps are FSDP2's, and that much less is reserved."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from llm_fp8.utils.subprocesses import torchrun

pytestmark = pytest.mark.multi_gpu

NUM_PARAMETERS = 1_235_814_400
"""Those of Llama-3.2-1B."""
CHECK = Path(__file__).resolve().parents[1] / "support" / "reduce_scatter_check.py"


@pytest.mark.parametrize(
    "options",
    [
        "--sharding_mode fsdp_grad --mixed_precision fp8",
        "--sharding_mode fsdp_full --mixed_precision bf16",
        "--sharding_mode fsdp_full --mixed_precision fp8 --sync_every_micro_batch",
    ],
)
def test_the_steps_are_those_of_fsdp2_with_less_memory_reserved(options, record_property):
    done = subprocess.run(torchrun(2, str(CHECK), *options.split()), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    record_property("found", found)
    ours, fsdp2s = found["ours"], found["fsdp2s"]
    assert ours["losses"] == fsdp2s["losses"] and len(set(ours["losses"])) == len(ours["losses"])
    assert ours["peak_memory_gib"] < 1.01 * fsdp2s["peak_memory_gib"]
    rows_gib = 4 / 2 * NUM_PARAMETERS / 2**30
    if "--sync" not in options:  # there the rows are at the peak already
        assert ours["peak_reserved_memory_gib"] < fsdp2s["peak_reserved_memory_gib"] - 0.5 * rows_gib
        assert ours["peak_reserved_memory_gib"] - ours["peak_memory_gib"] < rows_gib
