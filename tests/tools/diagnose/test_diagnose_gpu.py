"""scripts/diagnose_fp8.py on a GPU: what it says of small runs whose precision is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small import write_model

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[3] / "scripts" / "diagnose_fp8.py"
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Small, of sizes that every recipe and cuDNN's attention take."""
    return write_model(
        tmp_path_factory.mktemp("diagnose") / "model",
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )


def diagnose(model: str, folder: Path, *options: str) -> dict:
    """What the script finds, run as a user runs it."""
    path = folder / "found.json"
    words = ["--model_name", model, "--max_seq_length", "512", "--batch_size", "4", "--packing", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, "--gradient_accumulation_steps", "2", "--no_merge_micro_batches", *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    classes_s = sum(taken["time_s"] for taken in found["classes"].values())
    assert classes_s >= 0.95 * found["step"]["step_time_s"]
    memory = found["memory_gib"]
    parts = [gib for kind, gib in memory.items() if kind not in ("peak", "reserved")]
    assert sum(parts) == pytest.approx(memory["peak"]) and all(gib > -0.001 for gib in parts), memory
    assert memory["optimizer_state"] > 2 * memory["weights"] > 0 and memory["reserved"] >= memory["peak"]
    return found


@pytest.mark.parametrize("scenario", [None, "delayed", "current", "block"])
def test_te_decoder(model, tmp_path, scenario):
    words = ["--mixed_precision=bf16"] if scenario is None else ["--mixed_precision=fp8", f"--fp8_scenario={scenario}"]
    found = diagnose(model, tmp_path, "--use_te", *words)
    assert found["certificate"]["verdict"] == "certified" and found["attention"] == "fused (cuDNN)"
    memory = found["memory_gib"]
    if scenario is None:
        assert "fp8" not in found["gemms"] and "cast" not in found["classes"]
    else:
        # Three GEMMs for each of 4 weights a layer, in two micro-batches; a cast and its transpose, 1 byte each.
        assert found["gemms"]["fp8"]["count"] >= 2 * 3 * 4 * NUM_LAYERS
        # The libraries' workspaces, 0.1 GiB, are counted with the casts.
        assert 0.3 * memory["weights"] < memory["kept_casts"] < memory["weights"] + 0.15


def test_swapped_layers_and_a_trace(model, tmp_path):
    trace = tmp_path / "trace.json"
    found = diagnose(model, tmp_path, "--mixed_precision=fp8", "--fp8_bf16_modules=layers.3", f"--trace={trace}")
    assert found["certificate"]["verdict"] == "certified"
    assert found["coverage"]["converted"]["model.layers.*.mlp.up_proj"] == NUM_LAYERS - 1
    assert any("nvjet" in str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"])
