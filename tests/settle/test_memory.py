"""The estimate of a run's GPU memory: against what runs took, and what it settles and refuses."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GemmaConfig, PretrainedConfig

from llm_fp8.config.options import AUTO_BATCH_SIZE, Config, ModelConfig
from llm_fp8.models.build import count_parameters
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.settle.memory import ACTIVATIONS, CASTS, HEAD, MOST_TOKENS, STATE, RunSize, saved_bytes, settle_memory
from llm_fp8.step.activation_checkpoint import recomputed_layers
from llm_fp8.utils.errors import UserError
from te_llama import decoder_sizes

ROWS = json.loads((Path(__file__).parents[2] / "benchmarks/results/memory_rows.json").read_text())["rows"]


@functools.cache
def hf_config(model: str):
    return load_config(resolve_source(ModelConfig(model_name=model, random_init=True)))


def run_size(row: dict[str, Any], model_config: PretrainedConfig) -> RunSize:
    """A run with the options of `row` and what it says of the machine."""
    config = Config().with_options(**{"use_te": True, "mixed_precision": "fp8", **row})
    launch = {"recipe": "delayed", "mode": "single", "num_gpus": 1}
    launch |= {name: row[name] for name in launch if name in row}
    return RunSize(config, model_config, **launch, num_parameters=count_parameters(model_config))


def parts(model: str = "Llama-3.1-8B", **row: Any):
    row = {"batch_size": 8, "gradient_accumulation_steps": 4, **row}
    return run_size(row, hf_config(model)).estimate()


def settle(gpu_gib: float, model: str = "Llama-3.1-8B", **row: Any) -> tuple[Config, list[str]]:
    row = {"gradient_accumulation_steps": 4, **row}
    size, notes = settle_memory(run_size(row, hf_config(model)), gpu_gib)
    return size.config, notes


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(row[key]) for key in row if key not in ("file", "gpu", "measured_gib", "reserved_gib"))


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
        ({"num_gpus": 3}, False),  # which do not share the rows of a weight evenly
        ({"fp8_until": 0.7}, False),  # the last steps need bf16
        ({"random_init": True, "export": True}, False),  # and so does the export
        ({"use_te": False}, False),
        ({"lora_rank": 0}, False),
        ({"lora_rank": 0, "fp8_params": True}, True),
    ],
)
def test_frozen_weights_are_sharded_in_fp8_where_nothing_needs_them_in_bf16(row, expected):
    assert run_size({**FROZEN, **row}, hf_config("Llama-3.1-8B")).shards_in_fp8 is expected


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_recorded_run(row):
    estimate, gpu_gib = run_size(row, hf_config(row["model"])).estimate(), 79.2 if "H100" in row["gpu"] else 139.8
    assert estimate.is_whole
    if "beyond" in row:  # what the first GPU of ddp held more is needed and not estimated
        assert row["mode"] == "ddp" and estimate.total_gib < 0.95 * row["measured_gib"] < estimate.needed_gib
    else:
        assert estimate.total_gib == pytest.approx(row["measured_gib"], rel=0.012)
        assert estimate.needed_gib <= gpu_gib + 11, "it fitted, at times with slow steps"
    # The allocator keeps more where half of the memory is free.
    reserved_gib = row.get("reserved_gib", 0.0)
    if row["mode"] == "fsdp_full" and row["gradient_accumulation_steps"] == 1 and reserved_gib > 0.5 * gpu_gib:
        assert estimate.needed_gib > reserved_gib


def test_few_tokens_on_many_gpus_peak_where_the_outermost_gradients_are_reduced():
    row: dict[str, Any] = dict(mode="fsdp_full", num_gpus=64, optimizer="adamw_8bit", gradient_checkpointing=1)
    row |= dict(batch_size=1, gradient_accumulation_steps=1)
    spec = decoder_sizes(hf_config("Qwen3-8B"))
    assert parts("Qwen3-8B", **row).total_gib > 3 * 2 * 2 * spec.vocab_size * spec.hidden_size / 2**30


def test_recomputed_layers_keep_their_inputs():
    spec = decoder_sizes(hf_config("Llama-3.1-8B"))
    kept, recomputed = parts(), parts(gradient_checkpointing=1)
    assert recomputed.parts[ACTIVATIONS] == pytest.approx(8192 * 2 * spec.hidden_size * 32 / 2**30)
    assert recomputed.parts[HEAD] == kept.parts[HEAD] > 8192 * saved_bytes(spec, "delayed", frozenset(), 0) / 2**30
    assert recomputed.total_gib < kept.total_gib


def test_what_saves_memory_is_in_its_part():
    plain, sharded = parts(), parts(mode="fsdp_full", num_gpus=4)
    assert parts(fp8_recast_weights=True).parts.keys() == plain.parts.keys() - {CASTS}
    assert CASTS not in parts(recipe="bf16").parts and CASTS not in sharded.parts
    assert parts(offload_optimizer=1.0).parts[STATE] < plain.parts[STATE] - 8 * 7.4
    assert parts(optimizer="adamw_8bit").parts[STATE] == pytest.approx(plain.parts[STATE] / 2, rel=0.01)
    assert sharded.beside_gib > plain.beside_gib
    assert parts(mode="ddp", num_gpus=1) == plain
    assert parts(lora_rank=16).parts[STATE] < 0.2 * plain.parts[STATE]
    few, many = (parts(lora_rank=rank).parts[ACTIVATIONS] for rank in (16, 256))
    assert many - few >= 8192 * 32 * 2 * 240 / 2**30, "low-rank products"
    assert parts(lora_rank=16, mode="fsdp_full", num_gpus=4).parts[STATE] < 0.5 * parts(lora_rank=16).parts[STATE]


def test_a_decoder_of_hugging_face_has_weights_gradients_and_optimizer_alone():
    estimate = parts(use_te=False)
    assert not estimate.is_whole and estimate.parts == {STATE: pytest.approx(12 * 8.03e9 / 2**30, rel=0.001)}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = GemmaConfig(**sizes, vocab_size=1000)
    estimate = run_size({}, small).estimate()
    assert not estimate.is_whole and estimate.total_gib < 0.1


def test_auto_batch_size_fills_the_gpu():
    config, notes = settle(79.2, "Llama-3.2-1B", batch_size=AUTO_BATCH_SIZE)
    size = config.data.batch_size
    assert len(notes) == 1 and str(size) in notes[0]
    row = {"model": "Llama-3.2-1B", "gradient_accumulation_steps": 4}
    assert parts(**row, batch_size=size).needed_gib <= 79.2 < parts(**row, batch_size=size + 1).needed_gib
    assert settle(1000.0, "Llama-3.2-1B", batch_size=AUTO_BATCH_SIZE)[0].data.batch_size == MOST_TOKENS // 1024


def test_auto_batch_size_suits_fp8_gemms():
    config, _ = settle(30.0, "Llama-3.2-1B", batch_size=AUTO_BATCH_SIZE, max_seq_length=200, recipe="block")
    assert config.data.batch_size * 200 % 128 == 0


@pytest.mark.parametrize("row", [{"use_te": False}, {"recipe": "mxfp8"}, {"mode": "deepspeed_2", "num_gpus": 2}])
def test_auto_batch_size_is_refused_where_memory_is_not_known(row):
    with pytest.raises(UserError, match="--batch_size auto"):
        settle(139.8, "Llama-3.2-1B", batch_size=AUTO_BATCH_SIZE, **row)


@pytest.mark.parametrize(
    "row",
    [{}, {"batch_size": AUTO_BATCH_SIZE}, {"mode": "ddp", "num_gpus": 2}, {"use_te": False}],
)
def test_what_cannot_fit_is_refused_with_what_would(row):
    with pytest.raises(UserError, match="cannot fit") as raised:
        settle(79.2, **row)
    assert "What would fit" in str(raised.value)


def test_what_would_fit_fits():
    with pytest.raises(UserError, match="--offload_optimizer 1.0 "):
        settle(79.2)
    assert parts(offload_optimizer=1.0).needed_gib <= 79.2
    with pytest.raises(UserError, match="--sync_every_micro_batch --gradient_checkpointing "):
        settle(79.2, mode="ddp", num_gpus=2)


def test_only_changes_that_the_run_would_take_are_suggested():
    with pytest.raises(UserError, match="cannot fit") as raised:
        settle(79.2, optimizer="adamw_fp32")
    assert "--offload_optimizer" not in str(raised.value), "it goes with adamw_master"
    with pytest.raises(UserError, match="--offload_optimizer 1.0 "):  # as auto leaves a run on a GPU without fp8
        settle(79.2, recipe="bf16", mixed_precision="bf16", fp8_format="E4M3")


def test_a_micro_batch_that_is_too_long_is_warned_of_or_refused():
    total_gib = parts("Llama-3.2-3B", batch_size=16).total_gib
    config, notes = settle(total_gib + 1, "Llama-3.2-3B", batch_size=16)
    assert config.data.batch_size == 16 and notes[0].startswith("WARNING") and "--gradient_checkpointing" in notes[0]
    with pytest.raises(UserError, match="cannot fit.*--gradient_checkpointing"):
        settle(total_gib - 2, "Llama-3.2-3B", batch_size=16)


DOCUMENTED = dict(model="Llama-3.2-3B", mode="fsdp_full", num_gpus=2, batch_size=1, max_seq_length=512)


def cut(config: Config) -> tuple[int, int]:
    return config.data.batch_size, config.optim.gradient_accumulation_steps


@pytest.mark.parametrize(
    "row",
    [{}, {"gradient_checkpointing": 1}, {"recipe": "bf16"}, {"use_te": False}, {"use_te": False, "recipe": "mxfp8"}]
    + [{"lora_rank": 16}, {"mode": "fsdp_hybrid"}, {"mode": "fsdp_offload"}],
)
def test_micro_batches_that_fit_together_are_one(row):
    config, notes = settle(79.2, **{**DOCUMENTED, **row})
    assert cut(config) == (4, 1) and notes == ["4 micro-batches of 512 tokens run as 1 of 2,048"]


@pytest.mark.parametrize(
    "row",
    [{"mode": "deepspeed_3"}, {"use_te": False, "recipe": "no"}, {"use_te": False, "attn_implementation": "eager"}]
    + [{"use_te": False, "mode": "ddp", "optimizer": "adamw_fp32"}, {"recipe": "fp16"}],
)
def test_micro_batches_stay_where_their_memory_has_no_bound(row):
    assert cut(settle(139.8, **{**DOCUMENTED, **row})[0]) == (1, 4)


@pytest.mark.parametrize(
    ("gpu_gib", "row"),
    [(79.2, {}), (60.0, {"recipe": "bf16"}), (79.2, {"use_te": False}), (60.0, {"mode": "fsdp_hybrid", "num_gpus": 2})],
)
def test_as_few_layers_as_fit_are_recomputed(gpu_gib, row):
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


def test_fewer_recomputed_layers_win_over_longer_micro_batches():
    row = dict(batch_size=4, gradient_accumulation_steps=4, gradient_checkpointing="auto")
    configs = [settle(gpu_gib, "Llama-3.2-3B", **row)[0] for gpu_gib in (139.8, 79.2, 65.0, 50.0)]
    assert [cut(config) for config in configs] == [(16, 1), (8, 2), (4, 4), (4, 4)]
    assert [config.model.gradient_checkpointing > 0 for config in configs] == [False, False, False, True]
    # A single micro-batch keeps no unsharded gradients.
    config, _ = settle(24.0, "Llama-3.2-3B", **row, mode="fsdp_full", num_gpus=8)
    assert cut(config) == (16, 1) and 0 < config.model.gradient_checkpointing < 1
    resumed = run_size(row, hf_config("Llama-3.2-3B"))
    config = settle_memory(resumed, 79.2, resumed_rows=16)[0].config
    assert cut(config) == (16, 1) and config.model.gradient_checkpointing > 0


def test_auto_batch_size_recomputes_only_what_its_smallest_micro_batch_needs():
    row = dict(batch_size=AUTO_BATCH_SIZE, max_seq_length=16384, gradient_checkpointing="auto")
    (plenty, _), (little, notes) = (settle(gpu_gib, "Llama-3.2-3B", **row) for gpu_gib in (139.8, 60.0))
    assert plenty.model.gradient_checkpointing == 0 < little.model.gradient_checkpointing
    assert little.data.batch_size == 1 and len(notes) == 2


def test_what_no_recomputation_makes_fit_recomputes_all_and_is_warned_of():
    gpu_gib = parts("Llama-3.2-3B", batch_size=64, gradient_checkpointing=1).total_gib
    config, notes = settle(gpu_gib, "Llama-3.2-3B", batch_size=64, gradient_checkpointing="auto")
    assert config.model.gradient_checkpointing == 1 and notes[0].startswith("WARNING") and "28 of 28" in notes[1]


@pytest.mark.parametrize("row", [{"mode": "deepspeed_3", "num_gpus": 2}, {"use_te": False, "recipe": "fp16"}])
def test_automatic_recomputation_is_refused_where_memory_has_no_bound(row):
    with pytest.raises(UserError, match="--gradient_checkpointing auto.*give a number"):
        settle(139.8, gradient_checkpointing="auto", **row)


def test_what_may_be_bf16_has_to_fit_in_bf16_too():
    row = {"batch_size": AUTO_BATCH_SIZE, "gradient_accumulation_steps": 1, "max_seq_length": 512}
    run = run_size(row, hf_config("Llama-3.2-1B"))
    sizes = [
        settle_memory(dataclasses.replace(run, may_be_bf16=may), 79.1)[0].config.data.batch_size
        for may in (False, True)
    ]
    in_bf16 = dataclasses.replace(run, recipe="bf16").changed(batch_size=sizes[1])
    assert sizes[1] < sizes[0] and in_bf16.estimate().needed_gib <= 79.1


def test_micro_batches_are_merged_as_far_as_memory_allows():
    eight_billion = dict(mode="fsdp_full", num_gpus=4, batch_size=4, gradient_accumulation_steps=6)
    rows = [cut(settle(gpu_gib, **eight_billion)[0]) for gpu_gib in (79.2, 95.0, 139.8)]
    assert rows == sorted(rows) and rows[0][0] < rows[-1][0] and {a * b for a, b in rows} == {24}
    assert cut(settle(79.2, "Llama-3.2-1B", batch_size=32, packing=False)[0]) == (32, 4), "longer padding costs more"
    assert cut(settle(139.8, "Llama-3.2-1B", batch_size=32)[0]) == (64, 2), "no longer than the longest recorded"


def test_a_cut_is_kept_where_it_is_asked_for_or_was_the_checkpoints():
    config, notes = settle(79.2, **DOCUMENTED, merge_micro_batches=False)
    assert cut(config) == (1, 4) and notes == []
    run = run_size(DOCUMENTED | {"gradient_accumulation_steps": 4}, hf_config("Llama-3.2-3B"))
    assert cut(settle_memory(run, 79.2, resumed_rows=2)[0].config) == (2, 2)
    assert cut(settle_memory(run, 79.2, resumed_rows=3)[0].config) == (4, 1)


@pytest.mark.parametrize(
    ("model", "num_gpus", "rows", "steps", "measured_gib"),
    [("Llama-3.2-3B", 2, 1, 4, 27.8), ("Llama-3.1-8B", 2, 4, 4, 91.4), ("Qwen2.5-14B", 2, 4, 1, 131.3)],
)
def test_what_hugging_faces_decoder_took_is_below_the_upper_bound(model, num_gpus, rows, steps, measured_gib):
    """fsdp_full in bf16, in multi_gpu_throughput_*_x2.json and documented_3b_x2.json."""
    length = 512 if rows == 1 else 1024
    row = dict(use_te=False, recipe="bf16", mode="fsdp_full", num_gpus=num_gpus, batch_size=rows, max_seq_length=length)
    row |= dict(gradient_accumulation_steps=steps, optimizer="adamw_fp32")
    bound = run_size(row, hf_config(model)).estimate(upper_bound=True).total_gib
    assert measured_gib < bound < 1.5 * measured_gib
