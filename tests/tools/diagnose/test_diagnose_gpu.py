"""scripts/diagnose_fp8.py on a GPU: what it says of small runs whose precision is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small import write_model

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[3] / "scripts" / "diagnose_fp8.py"
HYBRID = ("e4m3 x e4m3", "e4m3 x e5m2", "e4m3 x e5m2")
BLOCK = ("e4m3/block x e4m3/block",) * 3
BF16 = ("bf16 x bf16",) * 3
TE_MODULES = ("qkv", "output", "mlp")
HF_MODULES = tuple(f"self_attn.{part}_proj" for part in "qkvo") + tuple(
    f"mlp.{part}_proj" for part in ("gate", "up", "down")
)
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Small, of sizes that every recipe and cuDNN's attention take; wide enough that its tensors outweigh libraries'
    workspaces.
    """
    return write_model(
        tmp_path_factory.mktemp("diagnose") / "model",
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )


def diagnose(model: str, folder: Path, *options: str, code: int = 0, **environ: str) -> dict:
    """The findings of the script, run as a user runs it."""
    path = folder / "findings.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--model_name", model, "--max_seq_length", "512", "--batch_size", "4"]
        + ["--gradient_accumulation_steps", "2", "--json", str(path), *options],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["exit_code"] == code
    check_sums(found)
    return found


def check_sums(found: dict) -> None:
    """Time and memory add up to what was measured apart from them."""
    time, memory = found["time"], found["memory"]
    classes = sum(taken["time_s"] for taken in time["classes"].values())
    assert classes + time["gap_s"] == pytest.approx(max(time["step_time_s"], time["busy_s"]), rel=0.02)
    assert time["busy_s"] <= time["recorded_span_s"]
    # Not the optimizer's, which comes from a copy bandwidth that is measured beside other tests.
    floors = [(name, taken["floor_s"], taken["time_s"]) for name, taken in (time["classes"] | time["gemms"]).items()]
    assert all(floor_s <= time_s for name, floor_s, time_s in floors if floor_s is not None and name != "optimizer"), (
        floors
    )
    assert time["classes"]["optimizer"]["floor_s"] > 0
    gemms = sum(taken["time_s"] for taken in time["gemms"].values())
    assert 0 < gemms <= time["classes"]["gemm"]["time_s"] * 1.001
    kinds = memory["kinds_gib"]
    assert sum(kinds.values()) == pytest.approx(memory["peak_gib"], rel=0.05)
    assert all(size >= 0 for size in kinds.values()), kinds
    parameters = kinds["weights"]
    assert kinds["optimizer_state"] > 2 * parameters and kinds["activations"] >= 0
    assert len(time["losses"]) >= 3 and all(loss["advice"] for loss in time["losses"])


def operands(found: dict, module: str) -> set[tuple[str, ...]]:
    """The operand pairs of fprop, dgrad and wgrad of a module, in all layers."""
    names = [f"model.layers.{number}.{module}" for number in range(NUM_LAYERS)]
    return {tuple("; ".join(found["modules"][name][p]) for p in ("fprop", "dgrad", "wgrad")) for name in names}


@pytest.mark.parametrize(
    ("scenario", "expected", "kind"),
    [(None, BF16, "bf16"), ("delayed", HYBRID, "fp8"), ("current", HYBRID, "fp8"), ("block", BLOCK, "fp8")],
)
def test_te_decoder(model, tmp_path, scenario, expected, kind):
    precision = (
        ["--mixed_precision", "bf16"] if scenario is None else ["--mixed_precision", "fp8", "--fp8_scenario", scenario]
    )
    found = diagnose(model, tmp_path, "--use_te", *precision)
    for module in TE_MODULES:
        assert operands(found, module) == {expected}, module
    assert tuple(found["modules"]["lm_head"][p][0] for p in ("fprop", "dgrad", "wgrad")) == BF16
    assert {group["layers"] for group in found["layers"]} == {f"0-{NUM_LAYERS - 1}", ""}
    assert found["attention"] == "fused (cuDNN)"
    gemms = found["time"]["gemms"]
    if scenario is None:
        assert (
            "fp8" not in gemms
            and "cast" not in found["time"]["classes"]
            and found["memory"]["kinds_gib"]["fp8_weights"] == 0
        )
    else:
        # Forward, data gradient and weight gradient of 4 weights a layer, in each of two micro-batches.
        assert gemms[kind]["count"] >= 2 * 3 * 4 * NUM_LAYERS and gemms["bf16"]["count"] > 0
        kinds = found["memory"]["kinds_gib"]
        assert (
            0.3 * kinds["weights"] < kinds["fp8_weights"] < 1.5 * kinds["weights"]
        )  # a cast and its transpose, 1 byte each


def test_swapped_layers(model, tmp_path):
    found = diagnose(model, tmp_path, "--mixed_precision", "fp8")
    for module in HF_MODULES:
        assert operands(found, module) == {HYBRID}, module
    assert found["attention"] in ("sdpa", "flash_attention_2")
    assert found["census"]["outside_fp8"] == {"lm_head": "1 bf16 (lm_head)"}
    assert found["time"]["gemms"]["fp8"]["count"] >= 2 * 3 * 7 * NUM_LAYERS


def test_hugging_face_in_bf16(model, tmp_path):
    found = diagnose(model, tmp_path, "--mixed_precision", "bf16")
    for module in HF_MODULES:
        assert operands(found, module) == {BF16}, module
    assert "fp8" not in found["time"]["gemms"]


def test_layers_kept_in_bf16_and_recomputation(model, tmp_path):
    """Recomputation runs forward GEMMs in the backward pass: each must still be told as its own module's."""
    trace = tmp_path / "trace.json"
    found = diagnose(
        model,
        tmp_path,
        *[
            "--use_te",
            "--mixed_precision",
            "fp8",
            "--fp8_last_bf16_layers",
            "1",
            "--gradient_checkpointing",
            "--trace",
            str(trace),
        ],
    )
    for module in TE_MODULES:
        assert operands(found, module) == {HYBRID, BF16}, module
    kept = {group["layers"] for group in found["layers"] if group["fprop"] == ["bf16 x bf16"]}
    assert kept == {str(NUM_LAYERS - 1), ""}
    assert any("--fp8_last_bf16_layers 1" in reason for reason in found["census"]["outside_fp8"].values())
    assert any("nvjet" in str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"])


def test_unfused_attention_is_a_problem(model, tmp_path):
    found = diagnose(
        model, tmp_path, "--use_te", "--mixed_precision", "fp8", code=1, NVTE_FUSED_ATTN="0", NVTE_FLASH_ATTN="0"
    )
    assert found["attention"] == "unfused" and found["problems"] == ["attention runs unfused"]
    first = found["time"]["losses"][0]
    assert first["name"] == "unfused attention" and "NVTE_FUSED_ATTN" in first["advice"]
