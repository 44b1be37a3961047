"""scripts/diagnose_fp8.py on a GPU: its report on small runs of known precision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llm_fp8.config.recipes import row_of
from tests.support.small import write_model

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[3] / "scripts" / "diagnose_fp8.py"
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Write a small model and return its folder. Every recipe and cuDNN's attention support the model's sizes."""
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
    """Run the script as a user does. Check the times and the memory in the JSON report, and return the report."""
    path = folder / "report.json"
    run = ["--model_name", model, "--max_seq_length", "512", "--batch_size", "4", "--packing", "--json", str(path)]
    run += ["--gradient_accumulation_steps", "2", "--no_merge_micro_batches", *options]
    process = subprocess.run([sys.executable, SCRIPT, *run], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(path.read_text())
    classes_s = sum(kernels["time_s"] for kernels in report["classes"].values())
    assert classes_s >= 0.95 * report["step"]["step_time_s"]
    memory = report["memory_gib"]
    parts = [gib for kind, gib in memory.items() if kind not in ("peak", "reserved")]
    assert sum(parts) == pytest.approx(memory["peak"]) and all(gib > -0.001 for gib in parts), memory
    assert memory["optimizer_state"] > 2 * memory["weights"] > 0 and memory["reserved"] >= memory["peak"]
    return report


@pytest.mark.parametrize("scenario", [None, "delayed", "current", "block", "backward"])
def test_te_decoder_runs_its_gemms_in_the_requested_precision(model, tmp_path, scenario):
    in_fp8 = ["--mixed_precision=fp8", f"--fp8_scenario={scenario}"]
    report = diagnose(model, tmp_path, "--use_te", *(["--mixed_precision=bf16"] if scenario is None else in_fp8))
    assert report["certificate"]["verdict"] == "certified" and report["attention"] == "fused (cuDNN)"
    memory = report["memory_gib"]
    if scenario is None:
        assert "fp8" not in report["gemms"] and "cast" not in report["classes"]
    else:
        # For each of the 4 weights of a layer, in two micro-batches.
        assert report["gemms"]["fp8"]["count"] >= 2 * len(row_of(scenario).gemms_in_fp8) * 4 * NUM_LAYERS
        # A weight's cast and its transpose have 1 byte each. The libraries' workspaces, 0.1 GiB, count as casts too.
        assert 0.3 * memory["weights"] < memory["kept_casts"] < memory["weights"] + 0.15


def test_converted_layers_are_certified_and_the_trace_has_gemm_kernels(model, tmp_path):
    trace = tmp_path / "trace.json"
    report = diagnose(model, tmp_path, "--mixed_precision=fp8", "--fp8_bf16_modules=layers.3", f"--trace={trace}")
    assert report["certificate"]["verdict"] == "certified"
    assert report["coverage"]["converted"]["model.layers.*.mlp.up_proj"] == NUM_LAYERS - 1
    assert any("nvjet" in str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"])
