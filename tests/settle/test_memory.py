"""Choices that depend on GPU memory: batch size, recomputation, merged micro-batches, and runs that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from llm_fp8.config.options import AUTO_BATCH_SIZE, Config
from llm_fp8.models.memory import recomputed_layers
from llm_fp8.settle.memory import MOST_TOKENS, settle_memory
from llm_fp8.utils.errors import UserError
from tests.support.run_sizes import estimated, hf_config, run_size


def settle(gpu_gib: float, model: str = "Llama-3.1-8B", **row: Any) -> tuple[Config, list[str]]:
    row = {"gradient_accumulation_steps": 4, **row}
    size, notes = settle_memory(run_size(row, hf_config(model)), gpu_gib)
    return size.config, notes


@pytest.mark.parametrize(("model", "gpu_gib"), [("Llama-3.2-1B", 79.2), ("Qwen3.5-4B", 139.8)])
def test_auto_batch_size_fills_the_gpu(model, gpu_gib):
    config, notes = settle(gpu_gib, model, batch_size=AUTO_BATCH_SIZE)
    size = config.data.batch_size
    assert len(notes) == 1 and str(size) in notes[0]
    row = {"model": model, "gradient_accumulation_steps": 4}
    assert estimated(**row, batch_size=size).needed_gib <= gpu_gib < estimated(**row, batch_size=size + 1).needed_gib
    assert settle(1000.0, model, batch_size=AUTO_BATCH_SIZE)[0].data.batch_size == MOST_TOKENS // 1024


def test_auto_batch_size_gives_token_multiple_of_fp8_gemms():
    config, _ = settle(30.0, "Llama-3.2-1B", batch_size=AUTO_BATCH_SIZE, max_seq_length=200, recipe="block")
    assert config.data.batch_size * 200 % 128 == 0


@pytest.mark.parametrize("row", [{"use_te": False}, {"recipe": "mxfp8"}, {"mode": "deepspeed_2", "num_gpus": 2}])
def test_auto_batch_size_is_refused_without_memory_estimate(row):
    with pytest.raises(UserError, match="--batch_size auto"):
        settle(139.8, "Llama-3.2-1B", batch_size=AUTO_BATCH_SIZE, **row)


@pytest.mark.parametrize(
    "row", [{}, {"batch_size": AUTO_BATCH_SIZE}, {"mode": "ddp", "num_gpus": 2}, {"use_te": False}]
)
def test_run_that_cannot_fit_is_refused_with_suggestion(row):
    with pytest.raises(UserError, match="cannot fit") as raised:
        settle(79.2, **row)
    assert "What would fit" in str(raised.value)


def test_suggested_options_fit():
    with pytest.raises(UserError, match="--offload_optimizer 1.0 "):
        settle(79.2)
    assert estimated(offload_optimizer=1.0).needed_gib <= 79.2
    with pytest.raises(UserError, match="--sync_every_micro_batch --gradient_checkpointing "):
        settle(79.2, mode="ddp", num_gpus=2)


def test_suggestions_are_valid_for_the_run():
    with pytest.raises(UserError, match="cannot fit") as raised:
        settle(79.2, optimizer="adamw_fp32")
    assert "--offload_optimizer" not in str(raised.value), "--offload_optimizer needs adamw_master"


def test_large_micro_batch_is_warned_about_or_refused():
    total_gib = estimated("Llama-3.2-3B", batch_size=16).total_gib
    config, notes = settle(total_gib + 1, "Llama-3.2-3B", batch_size=16)
    assert config.data.batch_size == 16 and notes[0].startswith("WARNING") and "--gradient_checkpointing" in notes[0]
    with pytest.raises(UserError, match="cannot fit.*--gradient_checkpointing"):
        settle(total_gib - 2, "Llama-3.2-3B", batch_size=16)


DOCUMENTED = dict(model="Llama-3.2-3B", mode="fsdp_full", num_gpus=2, batch_size=1, max_seq_length=512)


def shape(config: Config) -> tuple[int, int]:
    """Return the number of rows per micro-batch and the number of micro-batches per optimizer step."""
    return config.data.batch_size, config.optim.gradient_accumulation_steps


@pytest.mark.parametrize(
    "row",
    [{}, {"gradient_checkpointing": 1}, {"recipe": "bf16"}, {"use_te": False}, {"use_te": False, "recipe": "mxfp8"}]
    + [{"lora_rank": 16}, {"mode": "fsdp_hybrid"}, {"mode": "fsdp_offload"}, {"model": "Qwen3.5-4B"}],
)
def test_micro_batches_that_fit_together_are_merged(row):
    config, notes = settle(79.2, **{**DOCUMENTED, **row})
    assert shape(config) == (4, 1) and notes == ["4 micro-batches of 512 tokens run as 1 of 2,048"]


@pytest.mark.parametrize(
    "row",
    [{"mode": "deepspeed_3"}, {"use_te": False, "recipe": "no"}, {"use_te": False, "attn_implementation": "eager"}]
    + [{"use_te": False, "mode": "ddp", "optimizer": "adamw_fp32"}, {"recipe": "fp16"}]
    + [{"model": "Qwen3.5-4B", "lacks_delta_kernels": True}, {"model": "Qwen3.5-4B", "use_te": False}],
)
def test_micro_batches_without_memory_bound_are_not_merged(row):
    assert shape(settle(139.8, **{**DOCUMENTED, **row})[0]) == (1, 4)


@pytest.mark.parametrize(
    ("gpu_gib", "row"),
    [(79.2, {}), (60.0, {"recipe": "bf16"}), (79.2, {"use_te": False}), (60.0, {"mode": "fsdp_hybrid", "num_gpus": 2})],
)
def test_smallest_sufficient_number_of_layers_is_recomputed(gpu_gib, row):
    run = run_size({"batch_size": 24, **row}, hf_config("Llama-3.2-3B"))
    size, notes = settle_memory(run.changed(gradient_checkpointing="auto"), gpu_gib)
    config = size.config
    number = len(recomputed_layers(config.model.gradient_checkpointing, 28))
    needed = [
        run.changed(gradient_checkpointing=layers / 28).estimate(upper_bound=True).needed_gib
        for layers in (number, number - 1)
    ]
    assert 0 < number < 28 and needed[0] <= 0.95 * gpu_gib < needed[1]
    assert len(notes) == 1 and f"auto: {number} of 28 layers" in notes[0]


def test_fewer_recomputed_layers_have_priority_over_larger_micro_batches():
    row = dict(batch_size=4, gradient_accumulation_steps=4, gradient_checkpointing="auto")
    configs = [settle(gpu_gib, "Llama-3.2-3B", **row)[0] for gpu_gib in (139.8, 79.2, 65.0, 50.0)]
    assert [shape(config) for config in configs] == [(16, 1), (8, 2), (4, 4), (4, 4)]
    assert [config.model.gradient_checkpointing > 0 for config in configs] == [False, False, False, True]
    # With a single micro-batch, no unsharded gradients are kept.
    config, _ = settle(24.0, "Llama-3.2-3B", **row, mode="fsdp_full", num_gpus=8)
    assert shape(config) == (16, 1) and 0 < config.model.gradient_checkpointing < 1
    resumed = run_size(row, hf_config("Llama-3.2-3B"))
    config = settle_memory(resumed, 79.2, resumed_rows=16)[0].config
    assert shape(config) == (16, 1) and config.model.gradient_checkpointing > 0


def test_auto_batch_size_recomputes_only_layers_that_one_row_needs():
    row = dict(batch_size=AUTO_BATCH_SIZE, max_seq_length=16384, gradient_checkpointing="auto")
    (large, _), (small, notes) = (settle(gpu_gib, "Llama-3.2-3B", **row) for gpu_gib in (139.8, 60.0))
    assert large.model.gradient_checkpointing == 0 < small.model.gradient_checkpointing
    assert small.data.batch_size == 1 and len(notes) == 2


def test_insufficient_recomputation_uses_all_layers_and_warns():
    gpu_gib = estimated("Llama-3.2-3B", batch_size=64, gradient_checkpointing=1).total_gib
    config, notes = settle(gpu_gib, "Llama-3.2-3B", batch_size=64, gradient_checkpointing="auto")
    assert config.model.gradient_checkpointing == 1 and notes[0].startswith("WARNING") and "28 of 28" in notes[1]


@pytest.mark.parametrize("row", [{"mode": "deepspeed_3", "num_gpus": 2}, {"use_te": False, "recipe": "fp16"}])
def test_automatic_recomputation_is_refused_without_memory_bound(row):
    with pytest.raises(UserError, match="--gradient_checkpointing auto.*give a number"):
        settle(139.8, gradient_checkpointing="auto", **row)


def test_number_of_merged_micro_batches_grows_with_memory():
    row = dict(mode="fsdp_full", num_gpus=4, batch_size=4, gradient_accumulation_steps=6)
    rows = [shape(settle(gpu_gib, **row)[0]) for gpu_gib in (79.2, 95.0, 139.8)]
    assert rows == sorted(rows) and rows[0][0] < rows[-1][0] and {a * b for a, b in rows} == {24}
    assert shape(settle(79.2, "Llama-3.2-1B", batch_size=32, packing=False)[0]) == (32, 4), "merging adds padding"
    assert shape(settle(139.8, "Llama-3.2-1B", batch_size=32)[0]) == (64, 2), "the longest recorded micro-batch"


def test_micro_batches_of_option_or_checkpoint_are_kept():
    config, notes = settle(79.2, **DOCUMENTED, merge_micro_batches=False)
    assert shape(config) == (1, 4) and notes == []
    run = run_size(DOCUMENTED | {"gradient_accumulation_steps": 4}, hf_config("Llama-3.2-3B"))
    assert shape(settle_memory(run, 79.2, resumed_rows=2)[0].config) == (2, 2)
    assert shape(settle_memory(run, 79.2, resumed_rows=3)[0].config) == (4, 1)
