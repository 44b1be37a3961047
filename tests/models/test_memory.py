"""The estimate of a run's GPU memory, compared with recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_fp8.config.parser import parse_config
from llm_fp8.models.memory import ACTIVATIONS, CASTS, HEAD, STATE, resolve_optimizer, saved_bytes, state_bytes
from te_llama import decoder_sizes, layer_specs
from tests.support.run_sizes import estimated, hf_config, run_size

ROWS = json.loads((Path(__file__).parents[2] / "benchmarks/results/memory_rows.json").read_text())["rows"]
H, F, Q = 2560, 9216, 4096  # of Qwen3.5-4B: hidden size, MLP size, and size of attention's or the delta net's output
FROZEN = {"mode": "fsdp_full", "num_gpus": 2, "lora_rank": 16, "batch_size": 8, "export": False}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, True),
        ({"mode": "fsdp_grad", "recipe": "current"}, True),
        ({"mode": "fsdp_hybrid"}, True),
        ({"mode": "fsdp_offload"}, False),
        ({"mode": "ddp"}, False),
        ({"recipe": "block"}, False),  # a weight has more than one scale
        ({"recipe": "bf16"}, False),
        ({"num_gpus": 3}, False),  # the rows of a weight are not divisible by 3
        ({"random_init": True, "export": True}, False),  # the export needs bf16 too
        ({"use_te": False}, False),
        ({"lora_rank": 0}, False),
        ({"lora_rank": 0, "fp8_params": True}, True),
    ],
)
def test_frozen_weights_are_sharded_in_fp8_unless_bf16_is_needed(row, expected):
    assert run_size({**FROZEN, **row}, hf_config("Llama-3.1-8B")).shards_in_fp8 is expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_estimate_matches_recorded_run(row):
    estimate, gpu_gib = run_size(row, hf_config(row["model"])).estimate(), 79.2 if "H100" in row["gpu"] else 139.8
    assert estimate.is_whole
    if "beyond" in row:  # `needed_gib` covers the extra memory of ddp's first GPU, `total_gib` does not
        assert row["mode"] == "ddp" and estimate.total_gib < 0.95 * row["measured_gib"] < estimate.needed_gib
    else:
        assert estimate.total_gib == pytest.approx(row["measured_gib"], rel=0.012)
        assert estimate.needed_gib <= gpu_gib + 11, "the run fitted, some with slow steps"
    # The allocator reserves more if half of the memory is free.
    reserved_gib = row.get("reserved_gib", 0.0)
    if row["mode"] == "fsdp_full" and row["gradient_accumulation_steps"] == 1 and reserved_gib > 0.5 * gpu_gib:
        assert estimate.needed_gib > reserved_gib


def test_peak_with_few_tokens_per_gpu_is_at_the_reduction_of_outermost_gradients():
    row: dict[str, Any] = dict(mode="fsdp_full", num_gpus=64, optimizer="adamw_8bit", gradient_checkpointing=1)
    row |= dict(batch_size=1, gradient_accumulation_steps=1)
    spec = decoder_sizes(hf_config("Qwen3-8B"))
    assert estimated("Qwen3-8B", **row).total_gib > 3 * 2 * 2 * spec.vocab_size * spec.hidden_size / 2**30


def test_recomputed_layers_store_only_their_inputs():
    spec = decoder_sizes(hf_config("Llama-3.1-8B"))
    plain, recomputed = estimated(), estimated(gradient_checkpointing=1)
    assert recomputed.parts[ACTIVATIONS] == pytest.approx(8192 * 2 * spec.hidden_size * 32 / 2**30)
    assert recomputed.parts[HEAD] == plain.parts[HEAD] > 8192 * saved_bytes(spec, "delayed", frozenset(), 0) / 2**30
    assert recomputed.total_gib < plain.total_gib


def test_each_option_changes_its_part_of_the_estimate():
    plain, sharded = estimated(), estimated(mode="fsdp_full", num_gpus=4)
    assert estimated(fp8_recast_weights=True).parts.keys() == plain.parts.keys() - {CASTS}
    assert CASTS not in estimated(recipe="bf16").parts and CASTS not in sharded.parts
    assert estimated(offload_optimizer=1.0).parts[STATE] < plain.parts[STATE] - 8 * 7.4
    assert estimated(optimizer="adamw_8bit").parts[STATE] == pytest.approx(plain.parts[STATE] / 2, rel=0.01)
    assert sharded.beside_gib > plain.beside_gib
    assert estimated(mode="ddp", num_gpus=1) == plain
    assert estimated(lora_rank=16).parts[STATE] < 0.2 * plain.parts[STATE]
    few, many = (estimated(lora_rank=rank).parts[ACTIVATIONS] for rank in (16, 256))
    assert many - few >= 8192 * 32 * 2 * 240 / 2**30, "low-rank products"
    adapters, sharded_adapters = estimated(lora_rank=16), estimated(lora_rank=16, mode="fsdp_full", num_gpus=4)
    assert sharded_adapters.parts[STATE] < 0.5 * adapters.parts[STATE]


@pytest.mark.parametrize(
    ("recipe", "targets", "inputs"),  # bytes of GEMM inputs; for adapters also of low-rank products
    [("bf16", "", 2 * (2 * H + F + Q)), ("delayed", "", 3 * H + F + Q), ("current", "", 3 * H + F + Q)]
    + [("backward", "", 2 * H + F + Q), ("block", "", 1.03125 * (3 * H + 2 * F + Q))]
    + [("bf16", "in_proj_z,out_proj,q_proj,o_proj", 2 * (H + Q + 2 * 16))],
)
def test_activations_of_qwen3_5_according_to_sources_of_te_and_flash_linear_attention(recipe, targets, inputs):
    net = 2 * (12352 + 2 * 2048 + 3 * 4096 + 32 * 65) + 4 * (2 * 16 + 4 * 32)  # fused, q and k, v z o, beta and inverse
    attention = 2 * (4 * 4096 + 3 * 1024) + 4 * 16  # q, gate and output [4096], k and v [1024]; q and k before norms
    saved = [size + 2 * (2 * H + 2 * F) + inputs for size in (net, net, net, attention)]
    adapted = frozenset(filter(None, targets.split(",")))
    assert [saved_bytes(spec, recipe, adapted, 16) for spec in layer_specs(hf_config("Qwen3.5-4B"))] == 8 * saved
    parts = estimated("Qwen3.5-4B", recipe=recipe, lora_rank=16 * bool(targets), lora_targets=targets).parts
    assert parts[ACTIVATIONS] == pytest.approx(8192 * 8 * sum(saved) / 2**30)


@pytest.mark.parametrize(
    ("model", "num_gpus", "rows", "steps", "measured_gib"),
    [("Llama-3.2-3B", 2, 1, 4, 27.8), ("Llama-3.1-8B", 2, 4, 4, 91.4), ("Qwen2.5-14B", 2, 4, 1, 131.3)],
)
def test_measured_memory_of_hugging_face_decoder_is_below_upper_bound(model, num_gpus, rows, steps, measured_gib):
    """multi_gpu_throughput_*_x2.json and documented_3b_x2.json have the measurements, in bf16 with fsdp_full."""
    length = 512 if rows == 1 else 1024
    row = dict(use_te=False, recipe="bf16", mode="fsdp_full", num_gpus=num_gpus, batch_size=rows, max_seq_length=length)
    row |= dict(gradient_accumulation_steps=steps, optimizer="adamw_fp32")
    bound = run_size(row, hf_config(model)).estimate(upper_bound=True).total_gib
    assert measured_gib < bound < 1.5 * measured_gib


@pytest.mark.parametrize(
    ("options", "run", "kind"),
    [
        ("", ("ddp", "bf16"), "adamw_master"),
        ("", ("ddp", "bf16", "cpu"), "adamw_fp32"),
        ("", ("single", "fp32"), "adamw_fp32"),
        ("", ("fsdp_grad", "bf16"), "adamw_master"),
        ("", ("fsdp_full", "bf16", "cpu"), "adamw_fp32"),
        ("", ("fsdp_offload", "bf16"), "adamw_fp32"),
        ("", ("deepspeed_1", "bf16"), "adamw_fp32"),
        ("--sync_every_micro_batch", ("fsdp_full", "bf16"), "adamw_fp32"),
        ("--sync_every_micro_batch", ("ddp", "bf16"), "adamw_master"),
        ("--fp8_params --mixed_precision=fp8 --use_te", ("fsdp_full", "bf16"), "adamw_fp32"),
        ("--lora_rank=8", ("fsdp_full", "bf16"), "adamw_fp32"),
        ("--optimizer=adamw_master", ("fsdp_full", "bf16", "cpu"), "adamw_master"),
    ],
)
def test_optimizer_of_auto(options, run, kind):
    assert resolve_optimizer(parse_config(options.split(), parallel=True), *run) == kind


def test_bytes_per_parameter_of_every_mode():
    single, accumulated, offloaded = (
        parse_config(options, parallel=True)
        for options in ([], ["--gradient_accumulation_steps=2"], ["--offload_optimizer=0.75"])
    )
    assert state_bytes("single", "adamw_master", 1, single) == state_bytes("ddp", "adamw_master", 8, accumulated) == 12
    assert state_bytes("single", "adamw_master", 1, offloaded) == 6
    assert [state_bytes("fsdp_full", "adamw_fp32", 8, each) for each in (single, accumulated)] == [2, 6]
    assert state_bytes("fsdp_grad", "adamw_fp32", 8, single) == 4
    assert state_bytes("fsdp_hybrid", "adamw_fp32", 4, single) == 4
    assert [state_bytes(f"deepspeed_{stage}", "adamw_fp32", 8, single) for stage in (1, 2, 3)] == [5.5, 3.75, 2]
