"""The prediction of step time and memory: against every recorded run, in its limits, and as a user meets it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from llm_fp8.train.prediction import RunDescription
from transformers import GPT2Config, LlamaConfig

from benchmarks.prediction_records import bundled_size, recorded_rows, rows_for_memory_alone, with_errors, workload_of
from llm_fp8.config.options import Config, LoraConfig, ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig
from llm_fp8.models.architectures import bundled_architectures, bundled_config
from llm_fp8.models.build import count_parameters
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.observability.metrics import DecoderSize, StepTokens, speed_metrics
from llm_fp8.tools import gemm_rates
from llm_fp8.tools.gemm_rates import MeasuredRates
from llm_fp8.tools.predict import cli as command
from llm_fp8.tools.predict.after_run import (
    compare,
    compare_with_prediction,
    describe_comparison,
    describe_prediction,
    mean_length,
)
from llm_fp8.tools.predict.calibration import (
    CALIBRATED_GPU,
    CHECKED_GPUS,
    FITS_RESERVE_GIB,
    FLASH_ATTENTION_4_SPEED_UP,
    HOST_S_PER_LAYER,
    MEASURED_GPUS,
    MEASURED_TOKENS,
    Rates,
)
from llm_fp8.tools.predict.memory import peak_memory, saved_bytes
from llm_fp8.tools.predict.prediction import gpu_by_name, known_gpu, predict
from llm_fp8.tools.predict.step_time import (
    communicated_bytes,
    fsdp_bytes,
    gemm_accumulator_bytes,
    head_cast_bytes,
    idle_share,
    norm_seconds,
    step_time,
    update_bytes,
    weight_bytes,
    weight_cast_bytes,
)
from llm_fp8.tools.predict.workload import PREDICTED, ModelSize, StepWorkload
from llm_fp8.utils.errors import UserError, run_script
from llm_fp8.utils.json_files import json_line
from tests.support.reports import a_config, a_reporter

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "results.md"

TIME_ERROR, TIME_ERRORS_BEFORE = 0.035, (-0.07, 0.02)
"""Largest error allowed of the step time, which has to hold how far GPUs of one kind differ; least and most for rows
of the decoder before, which was slower.
"""
TIME_ERROR_SEVERAL = 0.035
"""On several GPUs. No sum of kernels knows which GPUs a run gets: the same GEMMs of the arm flash4 took 2.37 s in row
8b_x2 and 2.25 s in row 8b_s8192_x2, and constants of either are wrong for the other."""
TIME_ERROR_ONE_MICRO_BATCH = 0.06
"""On several GPUs: communication, whose constant is of eight micro-batches, lengthened the two rows by less."""
ONE_POOL_SINCE = "2026-11-22T16"
"""Of a row's time: those before took the gradients' rows from another stream's memory than the backward pass's."""
MEMORY_ERROR = 0.005
"""Of the peak memory."""
MEMORY_BEYOND = {
    ("multi_gpu_throughput_14b_x4.json", "fsdp_full:delayed:sync"): 0.6,
    ("multi_gpu_throughput_ddp_x4.json", "ddp:bf16", "Llama-3.2-1B"): 2.3,
    ("multi_gpu_throughput_8b_b4_x2.json", "fsdp_full:bf16"): 0.4,
    ("multi_gpu_throughput_8b_b4_x2.json", "fsdp_full:delayed"): 0.53,
    ("multi_gpu_throughput_8b_engines_x2.json", "fsdp_full:bf16"): 0.4,
    ("multi_gpu_throughput_8b_engines_x2.json", "fsdp_full:delayed"): 0.53,
}
"""GiB that rows have beyond what is counted. The first: tensors that were not found out. The second is two bytes for
every parameter, as in `first_rank_more`. The others have 4,096 tokens in a micro-batch and are of code that kept whole
gradients beside the rows that came of them, which by the count explains it."""
RESERVED_BEYOND = ("multi_gpu_throughput_8b_b4_x2.json", "multi_gpu_throughput_8b_engines_x2.json")
"""Their rows, with 4,096 tokens in a micro-batch under fsdp_full, have 6 to 9 GiB reserved beyond what is counted:
rows for which whole gradients made no room.
"""
ONE_MICRO_BATCH = "multi_gpu_throughput_14b_x2.json"
SUMS_LET_GO = ("levers_8b_x2_sums_let_go.json", "levers_8b_x2_recompute.json")
"""Rows of such shapes whose whole gradients are let go of: nothing of theirs is beyond the count."""


def hf_config(model: str):
    options = ModelConfig(model_name=model, random_init=True)
    return load_config(options, resolve_source(options))


def scenario(
    model: str = "Llama-3.1-8B", recipe: str = "delayed", tokens: int = 8192, micro_batches: int = 4, **more
) -> StepWorkload:
    return StepWorkload(bundled_size(model), recipe, tokens, micro_batches, more.pop("mean_length", 1024), **more)


def step_s(of: StepWorkload) -> float:
    return step_time(of, Rates()).total_s


def gib(of: StepWorkload) -> float:
    return peak_memory(of).total_gib


# --- against the records ----------------------------------------------------------------------------------------------


def first_rank_more(record) -> float:
    """GiB that the first GPU had beyond the others: in some rows of ddp, and in neither recipe always."""
    by_rank = record.measured["recorded_step"]["peak_memory_gib_by_rank"] if record.num_gpus > 1 else [0.0]
    assert max(by_rank) == by_rank[0]
    return by_rank[0] - min(by_rank)


def memory_beyond(record) -> float:
    """GiB of `MEMORY_BEYOND`."""
    names = (record.file, record.variant, record.row["model"])
    return MEMORY_BEYOND.get(names[:2], MEMORY_BEYOND.get(names, 0.0))


@pytest.mark.parametrize(
    "record",
    recorded_rows(),
    ids=lambda r: f"{r.file.removesuffix('.json')}-{r.row.get('row', r.row['model'])}-{r.variant}",
)
def test_recorded_row(record):
    if record.out_of_memory:
        assert record.prediction.fits is False or record.prediction.tight
        return
    assert record.prediction.fits
    expected = record.row["peak_memory_gib"] - first_rank_more(record) - memory_beyond(record)
    assert record.prediction.peak_memory_gib == pytest.approx(expected, rel=MEMORY_ERROR)
    if record.not_scored:
        assert record.time_error < -0.05, "the allocator's work is in no prediction, nor is a host that is late"
        return
    allowed = TIME_ERROR if record.num_gpus == 1 else TIME_ERROR_SEVERAL
    if record.num_gpus > 1 and record.prediction.scenario.micro_batches == 1:
        allowed = TIME_ERROR_ONE_MICRO_BATCH
    least, most = (-allowed, allowed) if record.todays else TIME_ERRORS_BEFORE
    assert least <= record.time_error <= most


def test_where_the_first_gpu_needs_more_it_is_a_copy_of_every_parameter():
    """Of which nobody knows what holds it, and when: so it is told in the document and not predicted."""
    measured = [(first_rank_more(r), r) for r in recorded_rows() if r.todays and not r.out_of_memory]
    more = {r.row["row"] + " " + r.variant: (gib_more, r) for gib_more, r in measured if gib_more > 0.01}
    assert set(more) == {"3b_x2 ddp:bf16", "1b_x2 ddp:current"}
    for gib_more, record in more.values():
        assert gib_more == pytest.approx(2 * record.prediction.scenario.model.num_parameters / 2**30, rel=0.01)


def test_what_the_allocator_reserves_under_fsdp():
    """Above what is counted are its gaps, below it the GPU's end. Before, the gradients' rows were on another
    stream, which filled the GPU in rows that are not scored.
    """
    rows = [r for r in recorded_rows() if r.todays and r.prediction.scenario.sharded and not r.out_of_memory]
    assert len(rows) >= 24 and {r.num_gpus for r in rows} == {2, 4}
    assert {r.num_gpus for r in rows if r.measured_utc >= ONE_POOL_SINCE} == {2}
    for record in rows:
        times = record.measured["step_times_s"]
        if record.measured_utc >= ONE_POOL_SINCE:
            assert record.memory_was_full == record.prediction.tight
        else:
            assert not record.prediction.tight and record.memory_was_full == (max(times) > 1.1 * min(times))
        beside = record.prediction.memory.reserved_gib - record.prediction.peak_memory_gib
        if record.measured_utc < ONE_POOL_SINCE:
            beside += 4 / record.num_gpus * record.prediction.scenario.model.num_parameters / 2**30
        gaps = record.reserved_gib - record.row["peak_memory_gib"] - beside
        if record.file == ONE_MICRO_BATCH:
            assert gaps < 0 if record.memory_was_full else -3 < gaps < 1.2, "the share of shards is a mean"
            continue
        if record.file in RESERVED_BEYOND:
            assert 5.5 < gaps < 8.5 < 4 / record.num_gpus * record.prediction.scenario.model.num_parameters / 2**30
            continue
        # One row has its layers computed again, and larger gaps; what makes them was not looked into.
        most = 1.8 if record.prediction.scenario.recomputed_layers else 1.2
        assert gaps < 0 if record.memory_was_full else 0 < gaps < most < FITS_RESERVE_GIB
    full = [record for record in rows if record.memory_was_full]
    filling = ("fsdp_grad:delayed", "fsdp_grad:delayed:fp8_params:fp8head_all:flash4")
    assert {(r.row.get("row", r.row["model"]), r.variant) for r in full} == {
        *((row, arm) for row in ("8b_x2", "8b_s8192_x2") for arm in filling),
        ("Qwen2.5-14B", "fsdp_grad:delayed:fp8_params"),
    }
    one_gpu = [r for r in recorded_rows() if r.num_gpus == 1 and (r.reserved_gib or 0) > 137]
    assert one_gpu and not any(r.memory_was_full for r in one_gpu), (
        "one stream has what it needs from the first step on"
    )


def test_the_hosts_time_is_that_of_the_slowest_recorded_machine():
    """In steps whose GPUs had little to do, or that were much longer elsewhere."""

    def slowest(pattern: str, arm: str) -> float:
        rows = [
            row for path in RESULTS.glob(pattern) for row in json.loads(path.read_text())["rows"] if row["arm"] == arm
        ]
        found = [
            statistics.median(measured["step_times_s"])
            / row["micro_batches"]
            / bundled_size(row["model"]).spec.num_layers
            for row in rows
            for measured in row.get("rounds", [row])
        ]
        assert found
        return max(found)

    single = (
        slowest("levers_3b_recompute_*.json", "delayed"),
        slowest("levers_3b_recompute_*.json", "delayed:recompute"),
    )
    sharded = (
        slowest("multi_gpu_throughput_8b_engines_x2.json", "fsdp_full:delayed"),
        slowest("documented_3b_x2*.json", "fsdp_full:delayed:recompute"),
    )
    assert HOST_S_PER_LAYER["single"] == HOST_S_PER_LAYER["ddp"] == pytest.approx(single, rel=0.01)
    assert HOST_S_PER_LAYER["fsdp_grad"] == HOST_S_PER_LAYER["fsdp_full"] == pytest.approx(sharded, rel=0.01)


def test_a_step_that_the_host_can_make_longer_is_told():
    def told(**of) -> list[str]:
        found = predict(scenario(**of), known_gpu(CALIBRATED_GPU))
        return [note for note in found.notes if note.startswith("the host's time")]

    sharded = {"mode": "fsdp_full", "num_gpus": 2, "optimizer": "adamw_fp32"}
    (note,) = told(model="Llama-3.2-3B", tokens=512, recomputed_layers=28, **sharded)
    assert f"{4 * 28 * HOST_S_PER_LAYER['fsdp_full'][1]:.3g} s for these layers" in note and " in fp8 " in note
    (note,) = told(model="Llama-3.2-3B", tokens=512, recomputed_layers=14)
    assert f"{4 * 14 * sum(HOST_S_PER_LAYER['single']):.3g} s for these layers" in note
    assert told(tokens=4096, **sharded), "one machine took 1.45 s, another 1.21"
    assert told(model="Llama-3.2-1B", tokens=8192, **sharded) and not told(model="Llama-3.2-1B", tokens=8192)
    assert not told() and not told(**sharded)
    bf16 = scenario(model="Llama-3.2-3B", tokens=512, recomputed_layers=28, recipe="bf16", **sharded)
    assert predict(bf16, known_gpu(CALIBRATED_GPU)).host_s is None, (
        "less, and how much is recorded for few of the set-ups"
    )
    assert not told(model="Llama-3.2-3B", tokens=512, recipe="bf16")


def test_the_fewest_and_most_tokens_are_those_of_the_records():
    tokens = [record.prediction.scenario.micro_batch_tokens for record in recorded_rows() if record.todays]
    assert (min(tokens), max(tokens)) == MEASURED_TOKENS


@pytest.mark.parametrize(("mode", "instead"), [("fsdp_grad", "--sharding_mode fsdp_full"), ("fsdp_full", "more GPUs")])
def test_memory_of_the_streams_that_does_not_fit_is_told(mode, instead):
    def notes(tokens: int) -> list[str]:
        of = scenario(mode=mode, num_gpus=2, optimizer="adamw_fp32", tokens=tokens, fp8_params=mode == "fsdp_grad")
        found = predict(of, known_gpu(CALIBRATED_GPU))
        assert found.fits
        return [note for note in found.notes if "the allocator will free and map memory within steps" in note]

    tokens = {"fsdp_grad": 12288, "fsdp_full": 14336}[mode]
    assert len(notes(tokens)) == 1 and notes(tokens)[0].endswith(f"take a smaller --batch_size or {instead}")
    assert notes(tokens // 2) == []


def test_the_stream_of_gathers_holds_the_largest_of_them():
    def beside(**of) -> float:
        return peak_memory(scenario(optimizer="adamw_fp32", **of)).gather_stream_gib * 2**30

    model = bundled_size("Llama-3.1-8B")
    gathered = {n: 2 * 2 * model.head * (1 + 1 / n) for n in (2, 4)}
    for mode in ("fsdp_full", "fsdp_grad"):
        for n in (2, 4):
            assert beside(mode=mode, num_gpus=n) == pytest.approx(gathered[n])
    assert beside() == beside(mode="ddp", num_gpus=4) == 0
    tied = bundled_size("Llama-3.2-1B")
    few = beside(model="Llama-3.2-1B", mode="fsdp_full", num_gpus=2)
    assert few == pytest.approx(2 * tied.head * 1.5)


def test_few_tokens_computed_again_need_what_comes_later():
    """3B with 512 tokens: the gradients of a tied matrix as embedding and as head, and a layer's copy for FSDP's
    communication, are not counted.
    """
    gpu = known_gpu(CALIBRATED_GPU)
    for name in ("levers_3b_recompute_after.json", "levers_3b_x2_sums_let_go.json"):
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            beyond = row["peak_memory_gib"] - predict(workload_of(row), gpu).peak_memory_gib
            assert 0.4 < beyond < 0.7, (name, row["arm"])


@pytest.mark.parametrize("record", rows_for_memory_alone(), ids=lambda r: f"{r.file}-{r.row['model']}-{r.variant}")
def test_memory_of_rows_on_several_gpus_before_gemms_added_up_gradients(record):
    expected = record.row["peak_memory_gib"] - memory_beyond(record)
    assert record.prediction.peak_memory_gib == pytest.approx(expected, rel=MEMORY_ERROR)


def test_the_communication_of_steps_before_gemms_added_up_gradients():
    """Held out but for `fsdp_tb_s`: today's prediction, with the bytes that FSDP and Transformer Engine moved then."""
    rows = json.loads((RESULTS / "levers_8b_x4_sums_apart.json").read_text())["rows"]
    assert {row["mode"] for row in rows} == {"fsdp_full", "fsdp_grad"}
    rates = Rates()
    for row in rows:
        then = workload_of(row)
        time = step_time(then, rates)
        layers, parameters = then.model.layer_weights, then.model.num_parameters
        fsdp = 10 * gemm_accumulator_bytes(then) / 4  # of the same weights and micro-batches
        casts = communicated = 0
        if then.mode == "fsdp_grad":  # everything was gathered and cast in every micro-batch
            fsdp += 7 * 4 * parameters
            casts = (8 * (3 + 4) - 4) * layers
            communicated = 7 * 2 * parameters
        kernels = fsdp / rates.fsdp_tb_s + (casts - gemm_accumulator_bytes(then)) / rates.weight_tb_s
        expected = (
            time.total_s
            + (1 + idle_share(then.num_gpus)) * kernels / 1e12
            + communicated / rates.communication_tb_s / 1e12
        )
        assert expected == pytest.approx(then.tokens_per_step / row["tokens_per_s"], rel=TIME_ERROR_SEVERAL)


def predicted_as_flash_4(record) -> float:
    """Attention is predicted to take so many times the time that it took: flash-attn 3 was 1.20 times as fast as
    cuDNN, and stands as flash-attn 4.
    """
    return 1.20 / FLASH_ATTENTION_4_SPEED_UP if "flash3" in record.variant else 1.0


@pytest.mark.parametrize(
    "record",
    [r for r in recorded_rows() if r.todays and r.num_gpus > 1 and not r.out_of_memory],
    ids=lambda r: f"{r.file.removesuffix('.json')}-{r.row.get('row')}-{r.variant}",
)
def test_kernels_of_several_gpus_take_what_their_parts_and_communication_do(record):
    """While communication runs, others' kernels take longer, each by a few percent. The prediction has that in
    `communication_s` and not in their parts.

    Under fsdp_full communication runs all the time, and GEMMs take up to 8.3% longer. A GPU may be 2% faster than the
    rates, which are of the mean of others.
    """
    step = record.measured["recorded_step"]
    classes, time = step["time_s_by_class"], record.prediction.time
    most = 0.083 if record.prediction.scenario.mode == "fsdp_full" else 0.05
    assert -0.035 <= classes["gemm"] / time.gemm_s - 1 <= most
    few = record.prediction.scenario.micro_batch_tokens <= 4096  # documents, which leave a part of the GPU without work
    attention = 0.2 if few else 0.08
    assert time.attention_s == pytest.approx(classes["attention"] * predicted_as_flash_4(record), rel=attention)
    # Not the sum of the classes: what is copied into buffers for a gather runs beside the others.
    beyond = statistics.mean(step["work_s_by_rank"]) - (time.total_s - time.communication_s - time.gap_s)
    assert -0.02 * record.step_time_s <= beyond <= time.communication_s + 0.01 * record.step_time_s


def test_the_slowest_gpu_is_the_farther_off_the_more_there_are():
    assert idle_share(1) == 0 < idle_share(2) < idle_share(4) < idle_share(8)
    more: dict[int, list[float]] = {2: [], 4: []}
    for record in recorded_rows():
        if record.todays and record.prediction.scenario.mode in ("ddp", "fsdp_grad") and not record.out_of_memory:
            work = record.measured["recorded_step"]["work_s_by_rank"]
            more[record.num_gpus].append(max(work) / statistics.mean(work) - 1)
    assert {n: len(rows) for n, rows in more.items()} == {2: 15, 4: 4}
    for n, rows in more.items():
        # Two GPUs are either much alike or not: a mean of fifteen rows says little.
        assert statistics.mean(rows) == pytest.approx(idle_share(n), abs=0.007) and max(rows) < 0.03


@pytest.mark.parametrize(
    "record",
    [r for r in recorded_rows() if r.todays and r.num_gpus == 1 and not r.out_of_memory],
    ids=lambda r: f"{r.file.removesuffix('.json')}-{r.row.get('row')}-{r.variant}",
)
def test_the_parts_of_a_step_are_those_of_its_kernels(record):
    """So that an error of one part does not make up for another's."""
    classes = record.measured["recorded_step"]["time_s_by_class"]
    time = record.prediction.time
    others = sum(classes.values()) - classes["gemm"] - classes["attention"]
    # Steps of `block` ran at 1,575 MHz and more, those that attention's rate is from at 1,410 to 1,500.
    attention = 0.13 if record.prediction.scenario.recipe == "block" else 0.08
    assert time.gemm_s == pytest.approx(classes["gemm"], rel=0.035)
    assert time.attention_s == pytest.approx(classes["attention"] * predicted_as_flash_4(record), rel=attention)
    assert time.passes_s + time.casts_s + time.weights_s == pytest.approx(others, rel=0.065)


@pytest.mark.parametrize("row", ["1b", "8b", "8b_s8192", "3b", "14b", "8b_128k", "8b_256k"])
def test_the_time_between_kernels_grows_with_layers_and_micro_batches(row):
    """By 8 times from 64 layers of micro-batches to 1,024: a constant would be wrong by as much. Rows from the fourth
    on are held out.
    """
    records = [r for r in recorded_rows() if r.file == "speed_table_h200.json" and r.row["row"] == row]
    steps = [r.measured["recorded_step"] for r in records if not r.out_of_memory]
    gaps = [step["span_s"] - sum(step["time_s_by_class"].values()) for step in steps]
    assert statistics.mean(gaps) == pytest.approx(records[0].prediction.time.gap_s, rel=0.11)


def test_the_records_hold_every_kind_of_row():
    rows = recorded_rows()
    measured = [row for row in rows if not row.out_of_memory]
    assert len(measured) >= 30 and len(measured) < len(rows)
    assert {row.prediction.scenario.recipe for row in measured} == set(PREDICTED)
    assert {row.prediction.scenario.mode for row in rows_for_memory_alone()} == {"ddp", "fsdp_grad", "fsdp_full"}
    assert {row.num_gpus for row in rows_for_memory_alone()} == {2, 4}
    several = [row for row in measured if row.num_gpus > 1]
    scored = [row for row in several if not row.not_scored]
    counts = {mode: {row.num_gpus for row in scored if row.prediction.scenario.mode == mode} for mode in MEASURED_GPUS}
    assert counts == {mode: set(numbers) for mode, numbers in MEASURED_GPUS.items()}
    by_row = {(row.row.get("row", row.file), row.held_out) for row in several}
    held_out = {
        (name, True)
        for name in (
            "8b_x2",
            "8b_s8192_x2",
            "8b_s8192_x4",
            "3b_x2",
            "1b_x2",
            *RESERVED_BEYOND,
            *SUMS_LET_GO,
            ONE_MICRO_BATCH,
        )
    }
    assert by_row == {("8b_x4", False), *held_out}, "others are news to the notes and to calibration.py"
    for row in several:  # that no note calls a recorded run unrecorded
        assert not [note for note in row.prediction.notes if "no recorded run" in note and row.todays]
    todays = [row for row in measured if row.todays]
    assert {row.prediction.scenario.fp8_lm_head for row in todays} == {"none", "all"}
    on_one = {
        (row.row["row"], row.prediction.scenario.recipe)
        for row in todays
        if row.held_out and "row" in row.row and row.num_gpus == 1
    }
    others = {*((name, "current") for name in ("1b", "3b", "8b")), ("1b", "block"), ("3b", "block")}
    others |= {(row, "delayed") for row in ("1b_128k", "1b_256k", "8b_128k", "8b_256k")}
    assert on_one == {
        *others,
        ("3b", "bf16"),
        ("3b", "delayed"),
        ("14b", "bf16"),
        ("14b", "delayed"),
        ("text_1b", "bf16"),
        ("text_1b", "delayed"),
    }
    assert {row.file for row in todays if not row.held_out} == {"speed_table_h200.json", "levers_8b_first_scales.json"}
    assert not any(
        "hf_" in row.variant or "cp4" in row.variant or "deepspeed" in row.variant
        for row in rows + rows_for_memory_alone()
    )
    assert any(row.prediction.scenario.fp8_params for row in several)


def test_packed_rows_have_the_lengths_of_their_documents():
    packed = [row for row in recorded_rows() if row.row.get("row") == "text_1b"]
    assert len(packed) == 3
    for row in packed:
        step = row.row["rounds"][0]["step_tokens"]
        assert row.prediction.scenario.mean_length == step["sum_squared_lengths"] / (16 * 1024 * 4)
        assert workload_of({**row.row, "rounds": [{}]}) is None, "without them there is no prediction"
        padded = {**row.row, "rounds": [{"step_tokens": {**step, "num_tokens": 1}}]}
        assert workload_of(padded) is None, "nor for other positions than the row's"


def test_recipes_come_out_in_the_measured_order():
    by_run: dict[tuple[str, ...], list] = {}
    for row in recorded_rows():
        # flash-attn changes a step of 8B by less than the same step takes on another GPU.
        if not row.out_of_memory and not row.not_scored and not row.prediction.scenario.flash_attention_4:
            key = (row.file, row.row.get("row", ""), row.row["model"], row.prediction.scenario.mode)
            by_run.setdefault(key, []).append(row)
    compared = [rows for rows in by_run.values() if len(rows) > 1]
    assert len(compared) >= 8
    for rows in compared:
        by_measured = sorted(rows, key=lambda row: row.step_time_s)
        by_predicted = sorted(rows, key=lambda row: row.prediction.step_time_s)
        assert [row.variant for row in by_measured] == [row.variant for row in by_predicted]


def test_the_document_holds_what_the_function_gives():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert with_errors(re.sub(r"\| one GPU \|.*", "", text)) == text, (
        "run: python -m benchmarks.prediction_records docs/results.md"
    )


def test_what_14b_needs_on_two_gpus_is_what_the_document_says():
    two = {"tokens": 4096, "micro_batches": 16, "mode": "fsdp_full", "num_gpus": 2, "optimizer": "adamw_fp32"}
    ways = ({}, {"sync_every_micro_batch": True}, {"sync_every_micro_batch": True, "recomputed_layers": 48})
    summed, reduced, recomputed = (gib(scenario("Qwen2.5-14B", **two, **way)) for way in ways)
    text = " ".join((ROOT / "docs" / "multi_gpu.md").read_text(encoding="utf-8").split())
    assert f"says {summed:.0f} GiB, {reduced:.0f} with the first and {recomputed:.0f} with both;" in text


# --- the sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", bundled_architectures())
def test_sizes_are_those_of_the_model(model):
    config = hf_config(model)
    size = ModelSize.from_config(config)
    assert size.num_parameters == count_parameters(config)
    assert size.spec.num_layers * size.layer_linear + size.head == DecoderSize.from_config(config).num_linear_parameters


def test_a_model_without_te_decoder_is_refused(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    options = command.parse(["--model_name", str(tmp_path)])
    with pytest.raises(
        UserError, match="--model_name .*: there is no prediction for this model, because model_type 'gpt2'"
    ):
        command.workload_of(options, command.checked(options))


# --- how time and memory behave ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", PREDICTED)
def test_more_work_takes_longer_and_more_memory(recipe):
    base = scenario(recipe=recipe)
    assert step_s(scenario(recipe=recipe, tokens=16384)) > step_s(base) > step_s(scenario(recipe=recipe, tokens=4096))
    assert step_s(scenario(recipe=recipe, mean_length=8192)) > step_s(base)
    assert step_s(scenario(recipe=recipe, micro_batches=8)) > step_s(base)
    assert step_s(scenario("Llama-3.2-3B", recipe)) < step_s(base) < step_s(scenario("Qwen2.5-14B", recipe))
    assert gib(scenario(recipe=recipe, tokens=16384)) > gib(base) > gib(scenario("Llama-3.2-3B", recipe))
    assert gib(scenario(recipe=recipe, micro_batches=8)) == gib(base) > gib(scenario(recipe=recipe, micro_batches=1))
    eight_bit = scenario(recipe=recipe, optimizer="adamw_8bit")
    assert gib(eight_bit) < gib(base) < gib(scenario(recipe=recipe, optimizer="adamw_fp32"))


def test_tokens_per_second_grow_with_the_micro_batch():
    rates = [tokens / step_s(scenario(tokens=tokens, micro_batches=1)) for tokens in (512, 2048, 8192, 32768)]
    assert rates == sorted(rates)


def test_fp8_gains_more_on_wider_models_and_less_on_longer_documents():
    def gain(**of) -> float:
        return step_s(scenario(recipe="bf16", **of)) / step_s(scenario(**of))

    assert (
        gain(model="Llama-3.2-1B") < gain(model="Llama-3.2-3B") < gain(model="Llama-3.1-8B") < gain(model="Qwen2.5-14B")
    )
    assert gain(mean_length=16384) < gain(mean_length=4096) < gain(mean_length=128)
    assert gain(micro_batches=1) < gain(micro_batches=8)


def test_recomputation_trades_time_for_memory():
    kept, all_again = scenario(), scenario(recomputed_layers=32)
    half = scenario(recomputed_layers=16)
    assert step_s(kept) < step_s(half) < step_s(all_again) < 4 / 3 * step_s(kept)
    assert gib(kept) > gib(half) > gib(all_again)
    spec = kept.model.spec
    # What is left of 32 layers: their inputs, and one layer in full when the head, which takes more, is done.
    assert peak_memory(all_again).activations_gib == pytest.approx(8192 * 2 * spec.hidden_size * 32 / 2**30)
    assert peak_memory(all_again).head_gib == peak_memory(kept).head_gib > 8192 * saved_bytes(spec, "delayed") / 2**30
    model = dataclasses.replace(all_again.model, spec=dataclasses.replace(spec, vocab_size=1024))
    one_layer = peak_memory(dataclasses.replace(all_again, model=model)).head_gib
    assert one_layer == pytest.approx(8192 * saved_bytes(spec, "delayed") / 2**30)


@pytest.mark.parametrize(
    ("recipe", "mode", "worked_out"), [("bf16", "fsdp_full", 0), ("delayed", "fsdp_full", 1), ("bf16", "fsdp_grad", 1)]
)
def test_recomputation_that_no_record_has_is_told(recipe, mode, worked_out):
    asked = scenario(recipe=recipe, mode=mode, num_gpus=2, optimizer="adamw_fp32", recomputed_layers=32)
    notes = predict(asked, known_gpu(CALIBRATED_GPU)).notes
    assert sum(note.startswith("gradient checkpointing is worked out") for note in notes) == worked_out


@pytest.mark.parametrize(("head_dim", "told"), [(64, False), (128, False), (96, True), (256, True)])
def test_head_sizes_that_were_not_measured_are_told(head_dim, told):
    model = scenario().model
    asked = dataclasses.replace(
        scenario(), model=dataclasses.replace(model, spec=dataclasses.replace(model.spec, head_dim=head_dim))
    )
    notes = predict(asked, known_gpu(CALIBRATED_GPU)).notes
    assert any(f"elements, and this model's {head_dim} are taken" in note for note in notes) == told


@pytest.mark.parametrize(("window", "told"), [(None, False), (1024, False), (512, True)])
def test_attention_in_a_window_is_told_to_take_less(window, told):
    model = scenario().model
    windows = (None, *[window] * (model.spec.num_layers - 1))
    spec = dataclasses.replace(model.spec, windows=windows)
    asked = dataclasses.replace(scenario(mean_length=1024), model=dataclasses.replace(model, spec=spec))
    notes = predict(asked, known_gpu(CALIBRATED_GPU)).notes
    assert any("31 of 32 layers have a sliding window of 512 tokens" in note for note in notes) == told


def test_norms_of_queries_and_keys_cost_time_and_memory():
    with_norms = scenario("Qwen3-8B")
    model = with_norms.model
    bare = dataclasses.replace(
        with_norms, model=dataclasses.replace(model, spec=dataclasses.replace(model.spec, qk_norm=False))
    )
    assert step_s(bare) < step_s(with_norms) and gib(bare) < gib(with_norms)
    assert any("Qwen3" in note for note in predict(with_norms, known_gpu(CALIBRATED_GPU)).notes)


def test_norms_take_longer_where_no_fast_kernel_has_their_width():
    def norms(width: int, recipe: str = "bf16") -> float:
        """Per element of a norm."""
        return (
            norm_seconds(dataclasses.replace(bundled_size("Llama-3.1-8B").spec, hidden_size=width), recipe, Rates())
            / width
        )

    tuned = norms(4096)
    general = tuned * Rates().pass_tb_s / Rates().general_norm_tb_s
    assert norms(3072) == norms(3072, "delayed") == pytest.approx(tuned), "cuDNN's"
    assert tuned < norms(3072, "current") < general, "cuDNN's in the backward pass alone"
    assert norms(640) == norms(640, "delayed") == pytest.approx(general), "too small a model for cuDNN's"
    assert norms(4096, "current") == tuned


@pytest.mark.parametrize("products", ["gradients", "all"])
def test_an_output_head_in_fp8(products):
    for model, tokens in (("Llama-3.2-1B", 16384), ("Llama-3.1-8B", 8192)):
        plain, head = scenario(model, tokens=tokens), scenario(model, tokens=tokens, fp8_lm_head=products)
        assert step_time(head, Rates()).gemm_s < step_time(plain, Rates()).gemm_s
        assert step_time(head, Rates()).casts_s > step_time(plain, Rates()).casts_s
        assert step_s(head) < step_s(plain) and gib(head) > gib(plain)
        assert step_time(head.with_recipe("bf16"), Rates()) == step_time(plain.with_recipe("bf16"), Rates())
        assert gib(head.with_recipe("bf16")) == gib(plain.with_recipe("bf16"))
    notes = predict(head, known_gpu(CALIBRATED_GPU)).notes
    assert any("--fp8_lm_head gradients" in note for note in notes) == (products == "gradients")


def test_all_products_of_the_head_in_fp8_gain_and_hold_more_than_two():
    two, three = (scenario(fp8_lm_head=products) for products in ("gradients", "all"))
    assert step_s(three) < step_s(two) and gib(three) > gib(two)


def test_flash_attention_shortens_attention_alone():
    plain, flash = step_time(scenario(), Rates()), step_time(scenario(flash_attention_4=True), Rates())
    assert flash.attention_s == pytest.approx(plain.attention_s / FLASH_ATTENTION_4_SPEED_UP)
    assert dataclasses.replace(flash, attention_s=plain.attention_s) == plain


def test_an_optimizer_of_8_bit_moments_takes_the_time_of_its_own_kernel():
    master, eight_bit = (scenario(optimizer=kind) for kind in ("adamw_master", "adamw_8bit"))
    assert update_bytes(eight_bit) < update_bytes(master)
    assert (
        step_time(eight_bit, Rates()).weights_s
        > step_time(eight_bit, dataclasses.replace(Rates(), eight_bit_tb_s=3.0)).weights_s
    )
    assert step_time(master, Rates()) == step_time(master, dataclasses.replace(Rates(), eight_bit_tb_s=3.0))


def test_layers_gradients_are_added_up_by_gemms_where_no_communication_waits_for_them():
    def more(**of) -> float:
        """Bytes that a further micro-batch costs."""
        return weight_bytes(scenario(micro_batches=5, **of)) - weight_bytes(scenario(micro_batches=4, **of))

    model = bundled_size("Llama-3.1-8B")
    layers = model.spec.num_layers * model.layer_linear
    outside = model.num_parameters - layers
    assert more() == pytest.approx(6 * outside)
    ddp = {"mode": "ddp", "num_gpus": 2}
    assert more(**ddp) == pytest.approx(6 * outside), "the micro-batches between the first and the last"
    first, second = (weight_bytes(scenario(micro_batches=n, **ddp)) for n in (1, 2))
    assert second - first == pytest.approx(6 * model.num_parameters), "the last is autograd's"
    synced = more(sync_every_micro_batch=True, **ddp)
    assert synced == pytest.approx((6 + 4) * model.num_parameters), (
        "so are all, and copied into buckets, where each is reduced"
    )
    small = bundled_size("Llama-3.2-1B")  # its head is its embedding, which gets two gradients
    outside = small.num_parameters - small.spec.num_layers * small.layer_linear
    assert more(model="Llama-3.2-1B") == pytest.approx(6 * (outside + small.head))


def test_bytes_of_fsdp():
    """Those of a further micro-batch, in bytes per weight of the layers and of what is outside of them, embedding
    and head.
    """
    model = bundled_size("Llama-3.1-8B")
    layers = model.spec.num_layers * model.layer_linear
    outside = model.num_parameters - layers
    fused_qkv = model.spec.num_layers * 4096 * (4096 + 2 * 1024)

    def more(of, mode: str, recipe: str = "delayed", **options) -> float:
        few, many = (
            scenario(recipe=recipe, micro_batches=n, mode=mode, num_gpus=4, optimizer="adamw_fp32", **options)
            for n in (4, 5)
        )
        return of(many) - of(few)

    # Copies of what is gathered, and sums where no GEMM adds.
    assert more(fsdp_bytes, "fsdp_full", "bf16") == pytest.approx(2 * 4 * layers + (4 + 10) * outside)
    assert more(fsdp_bytes, "fsdp_full") == pytest.approx(2 * 4 * layers + (4 + 10) * outside + 10 * fused_qkv)
    assert more(fsdp_bytes, "fsdp_full", fp8_params=True) == pytest.approx(2 * 2 * layers + (4 + 10) * outside)
    for options in ({}, {"fp8_params": True}):
        assert more(fsdp_bytes, "fsdp_grad", **options) == pytest.approx(10 * outside), "gathered once a step"
        assert more(gemm_accumulator_bytes, "fsdp_grad", **options) == pytest.approx(4 * layers)
        assert more(communicated_bytes, "fsdp_grad", **options) == 0
    assert more(gemm_accumulator_bytes, "fsdp_full") == pytest.approx(4 * (layers - fused_qkv))
    assert more(gemm_accumulator_bytes, "fsdp_full", sync_every_micro_batch=True) == 0
    assert more(communicated_bytes, "fsdp_full") == pytest.approx(2 * 2 * layers + 2 * outside)
    assert more(communicated_bytes, "fsdp_full", fp8_params=True) == pytest.approx(2 * layers + 2 * outside)
    assert more(communicated_bytes, "fsdp_grad", sync_every_micro_batch=True) == pytest.approx(4 * model.num_parameters)
    # Casts: none where they are kept, transposes alone of weights that are fp8.
    assert more(weight_cast_bytes, "fsdp_grad") == more(weight_cast_bytes, "fsdp_full", "bf16", fp8_params=True) == 0
    assert more(weight_cast_bytes, "fsdp_full") == pytest.approx((3 + 4) * layers)
    for mode in ("fsdp_full", "fsdp_grad"):
        assert more(weight_cast_bytes, mode, fp8_params=True) == pytest.approx(2 * layers)
    assert more(head_cast_bytes, "fsdp_grad", fp8_lm_head="all") < more(head_cast_bytes, "fsdp_full", fp8_lm_head="all")


def test_weights_kept_in_fp8_cost_and_save_memory():
    model = bundled_size("Llama-3.1-8B")
    layers = model.spec.num_layers * model.layer_linear

    def held(mode: str, recipe: str = "delayed", **options) -> float:
        of = scenario(recipe=recipe, mode=mode, num_gpus=4, optimizer="adamw_fp32", **options)
        return gib(of) * 2**30

    own_rows = layers / 4
    assert held("fsdp_full", fp8_params=True) - held("fsdp_full") == pytest.approx(own_rows - model.layer_linear)
    whole_in_fp8 = own_rows - layers
    assert held("fsdp_grad", fp8_params=True) - held("fsdp_grad") == pytest.approx(whole_in_fp8 - 2 * layers), (
        "and no casts kept"
    )
    for recipe in ("bf16", "block"):
        plain, asked = (
            scenario(recipe=recipe, mode="fsdp_full", num_gpus=4, fp8_params=kept) for kept in (False, True)
        )
        assert gib(plain) == gib(asked) and step_s(plain) == step_s(asked), "recipes without such weights"


def test_layers_kept_in_bf16_lie_between_fp8_and_bf16():
    all_fp8, mixed, none = scenario(), scenario(bf16_layers=8), scenario(bf16_layers=32)
    assert step_s(all_fp8) < step_s(mixed) < step_s(none)
    bf16 = scenario(recipe="bf16")
    assert step_s(none) == pytest.approx(step_s(bf16)) and gib(none) == pytest.approx(gib(bf16))


def test_sharding_takes_memory_off_and_adds_communication():
    two, four = (scenario(optimizer="adamw_fp32", mode="fsdp_full", num_gpus=n) for n in (2, 4))
    assert gib(four) < gib(two)
    whole = scenario(optimizer="adamw_fp32", mode="fsdp_grad", num_gpus=4)
    synced = dataclasses.replace(four, sync_every_micro_batch=True)
    assert gib(whole) > gib(four) > gib(synced)
    assert (
        step_time(synced, Rates()).communication_s
        > step_time(four, Rates()).communication_s
        > step_time(whole, Rates()).communication_s
        > 0
    )
    assert step_time(scenario(), Rates()).communication_s == 0
    assert gib(scenario(mode="ddp", num_gpus=4)) > gib(scenario())


def test_logits_in_chunks_keep_to_their_budget():
    spec = bundled_size("Llama-3.1-8B").spec
    one, many = peak_memory(scenario(tokens=8192)), peak_memory(scenario(tokens=65536))
    assert one.head_gib > 2 * 8192 * spec.vocab_size / 2**30
    assert many.head_gib < 2 * 65536 * spec.vocab_size / 2**30


def test_scenarios_that_cannot_be():
    for wrong in (
        {"recipe": "fp4"},
        {"tokens": 0},
        {"mode": "deepspeed_3", "num_gpus": 4},
        {"num_gpus": 2},
        {"mode": "ddp"},
        {"fp8_params": True},
    ):
        with pytest.raises(ValueError):
            scenario(**wrong)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_an_unknown_gpu_has_no_prediction():
    assert known_gpu("NVIDIA Imaginary 1") is None
    with pytest.raises(
        UserError, match=f"--gpu NVIDIA Imaginary 1: nothing was measured .* known are .*{CALIBRATED_GPU}"
    ):
        gpu_by_name("NVIDIA Imaginary 1")


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """MeasuredRates on record for the calibrated GPU, one that is half as fast, and one without fp8."""
    known = MeasuredRates(bf16_gemm_tflops=700, fp8_gemm_tflops=1400, fp8_split_gemm_tflops=1300, copy_tb_s=4.2)
    slow = MeasuredRates(bf16_gemm_tflops=350, fp8_gemm_tflops=700, fp8_split_gemm_tflops=650, copy_tb_s=2.1)
    old = MeasuredRates(bf16_gemm_tflops=280, fp8_gemm_tflops=None, fp8_split_gemm_tflops=None, copy_tb_s=1.5)
    for number, (name, ceilings) in enumerate({CALIBRATED_GPU: known, "Slow": slow, "Old": old}.items()):
        provenance = {"gpus": [{"name": name, "memory_gib": 79.0}]}
        record = {"gpu": name, "ceilings": dataclasses.asdict(ceilings), "provenance": provenance}
        (tmp_path / f"ceilings_{number}.json").write_text(json.dumps(record))
    monkeypatch.setattr(gemm_rates, "GPUS", tmp_path)


def test_another_gpu_is_scaled_by_its_ceilings(two_gpus):
    assert gemm_rates.known_gpu_names() == sorted(["Slow", "Old", CALIBRATED_GPU])
    slow, own = gpu_by_name("Slow"), gpu_by_name(CALIBRATED_GPU)
    for recipe in ("bf16", "delayed", "current"):
        found = predict(scenario(recipe=recipe), slow)
        same = predict(scenario(recipe=recipe), own)
        assert found.step_time_s == pytest.approx(2 * (same.step_time_s - same.time.gap_s) + same.time.gap_s)
        assert found.fits is False and any("no run on Slow checked them" in note for note in found.notes)
    assert predict(scenario("Llama-3.2-1B", "bf16"), slow).fits
    with pytest.raises(UserError, match="recipe block was never measured on Slow"):
        predict(scenario(recipe="block"), slow)
    with pytest.raises(UserError, match="recipe delayed was never measured on Old"):
        predict(scenario(), gpu_by_name("Old"))
    with pytest.raises(UserError, match="--num_gpus 4: communication was measured"):
        predict(scenario(mode="ddp", num_gpus=4), slow)


def test_less_bandwidth_alone_does_not_slow_kernels_that_compute_down():
    here = MeasuredRates(bf16_gemm_tflops=700, fp8_gemm_tflops=1400, fp8_split_gemm_tflops=1300, copy_tb_s=4.2)
    rates = Rates()
    less = rates.scaled(dataclasses.replace(here, copy_tb_s=0.75 * 4.2), here)
    passes = pytest.approx(0.75 * rates.pass_tb_s)
    assert less.pass_tb_s == less.swiglu_cast_tb_s == less.loss_tb_s == passes
    assert less.general_norm_tb_s == rates.general_norm_tb_s
    assert less.weight_tb_s == pytest.approx(0.75 * rates.weight_tb_s)
    assert rates.scaled(here, here).swiglu_cast_tb_s == rates.swiglu_cast_tb_s


def test_runs_on_gpus_with_checked_predictions_are_on_record():
    for name in CHECKED_GPUS:
        records = [record for record in recorded_rows(gpu=name) if not record.out_of_memory and record.todays]
        assert len(records) >= 6 and {record.prediction.scenario.recipe for record in records} >= {"bf16", "delayed"}
        assert not any("checked them" in note for record in records for note in record.prediction.notes)
        # Single GPUs of one kind differ by 3%.
        assert all(abs(record.time_error) < 0.045 for record in records if record.num_gpus == 1), name


def test_several_h100s_are_predicted_with_an_h200s_communication():
    h100 = known_gpu("NVIDIA H100 80GB HBM3")
    records = [r for r in recorded_rows(gpu=h100.name) if r.num_gpus > 1 and not r.out_of_memory]
    assert {r.variant for r in records} == {"fsdp_full:bf16", "fsdp_full:delayed", "fsdp_grad:delayed:fp8_params"}
    (scored,) = (r for r in records if not r.not_scored)
    assert 0 < scored.time_error < 0.065 and all(-0.015 < r.memory_error < 0 for r in records)
    many = predict(scenario(mode="fsdp_full", num_gpus=8, optimizer="adamw_fp32"), h100)
    own = predict(scenario(mode="fsdp_full", num_gpus=8, optimizer="adamw_fp32"), known_gpu(CALIBRATED_GPU))
    assert many.step_time_s > own.step_time_s
    assert any("four H200s" in note for note in many.notes)


def test_head_sizes_beside_the_measured_ones():
    rates = Rates()
    assert rates.attention_rate(32) == rates.attention_rate(64) < rates.attention_rate(112) == rates.attention_rate(256)


# --- a run ------------------------------------------------------------------------------------------------------------


def steps_taken(
    step_time_s: float, lengths: list[list[int]], positions: int, peak_gib: float
) -> list[dict[str, float]]:
    """Steps on `positions` positions that hold documents of these lengths, as the loop reports them."""
    size = DecoderSize.from_config(hf_config("Llama-3.2-1B"))
    steps = []
    for number, step in enumerate(lengths, start=1):
        tokens = StepTokens(positions, sum(step), sum(step), sum(n * n for n in step))
        figures = speed_metrics(tokens, step_time_s * (1 if number > 2 else 3), size, 1, None, fp8=True)
        steps.append({"step": number, "loss": 1.0, **figures, "peak_memory_gib": peak_gib})
    return steps


def run_config(**more) -> Config:
    model = ModelConfig(model_name="Llama-3.2-1B", random_init=True, use_te=True)
    return Config(model=model, optim=OptimConfig(gradient_accumulation_steps=4), **more)


def outcome(
    steps: list[dict[str, float]],
    config: Config,
    recipe: str = "delayed",
    mode: str = "single",
    num_gpus: int = 1,
    gpu: str = CALIBRATED_GPU,
):
    shape = hf_config("Llama-3.2-1B")
    run = RunDescription(config, shape, recipe, "adamw_master", mode, num_gpus, gpu)
    found = compare_with_prediction(run, steps)
    return None if found is None else found[0]


def test_a_run_is_held_against_the_tokens_it_had():
    documents = [400, 200, 200, 224] * 64  # 65,536 positions in 4 micro-batches
    size = DecoderSize.from_config(hf_config("Llama-3.2-1B"))
    found = outcome(steps_taken(0.7, [documents] * 6, 65536, 36.9), run_config())
    mean = sum(n * n for n in documents) / sum(documents)
    assert found["micro_batch_tokens"] == 16384 and found["mean_length"] == pytest.approx(mean)
    assert mean_length(
        size, 6 * (size.num_linear_parameters + size.num_layers * size.attention_width * 300)
    ) == pytest.approx(300)
    expected = predict(scenario("Llama-3.2-1B", tokens=16384, mean_length=mean), known_gpu(CALIBRATED_GPU))
    assert found["predicted_step_time_s"] == pytest.approx(expected.step_time_s)
    assert (
        found["measured_step_time_s"] == 0.7 and found["measured_peak_memory_gib"] == 36.9
    )  # without the slow first steps
    line = describe_comparison(found)
    took, held = 0.7 / expected.step_time_s - 1, 36.9 / expected.peak_memory_gib - 1
    assert f"took 0.7 ({took:+.0%})" in line and f"took 36.9 ({held:+.0%})" in line
    json.dumps(found, allow_nan=False)


def test_what_a_dry_run_is_told_is_what_the_predictor_says():
    run = RunDescription(
        run_config(), hf_config("Llama-3.2-1B"), "delayed", "adamw_master", "single", 1, CALIBRATED_GPU
    )
    found = predict(scenario("Llama-3.2-1B", tokens=16384, mean_length=300.0), known_gpu(CALIBRATED_GPU))
    line = describe_prediction(run, 16384, 300.0, 1000).splitlines()[0]
    assert line == (
        f"predicted: {found.step_time_s:.3g} s a step, {found.step_time_s * 1000 / 3600:.2g} hours for all, "
        f"{found.peak_memory_gib:.1f} of {found.gpu.memory_gib:.1f} GiB"
    )
    large = dataclasses.replace(run, hf_config=hf_config("Llama-3.1-8B"))
    assert describe_prediction(large, 65536, 1024.0, 1).splitlines()[0].endswith("GiB: DOES NOT FIT")
    assert describe_prediction(dataclasses.replace(run, gpu_name="a GPU"), 16384, 300.0, 1) is None
    adapters = dataclasses.replace(run, config=run_config(lora=LoraConfig(lora_rank=8)))
    assert describe_prediction(adapters, 16384, 300.0, 1) is None


def test_a_resumed_run_is_held_against_its_own_steps(tmp_path):
    steps = steps_taken(5.0, [[1024] * 64] * 12, 65536, 36.9)
    (tmp_path / "metrics.jsonl").write_text("".join(map(json_line, steps)))
    with a_reporter(a_config(tmp_path), resume_step=6) as reporter:
        assert outcome(reporter.own_steps(), run_config()) is None, "it took no step of its own"
        reporter.steps([{**step, "step_time_s": 0.7} for step in steps[6:]])
        reporter.evaluation({"step": 12, "eval_loss": 1.0})
        found = outcome(reporter.own_steps(), run_config())
    assert found["measured_step_time_s"] == 0.7


def test_padded_rows_have_their_shorter_documents():
    steps = steps_taken(0.7, [[256] * 64] * 4, 65536, 36.9)  # rows of 1,024 positions, a quarter of them real
    found = outcome(steps, run_config())
    assert found["micro_batch_tokens"] == 16384 and found["mean_length"] == pytest.approx(256 / 4)


def test_what_is_not_predicted_gives_nothing():
    steps = steps_taken(0.7, [[1024] * 64] * 4, 65536, 36.9)
    config = run_config()
    assert outcome(steps, config) is not None
    assert outcome(steps, config, gpu="NVIDIA Imaginary 1") is None
    assert outcome(steps, config, recipe="mxfp8") is None
    assert outcome(steps, config, mode="deepspeed_2", num_gpus=2) is None
    assert outcome(steps, config, mode="deepspeed_3") is None, "nor on one GPU"
    assert outcome(steps, config, mode="ddp") == outcome(steps, config)
    assert outcome(steps, config, mode="fsdp_full") is None
    assert outcome(steps, config, mode="fsdp_full", num_gpus=8) is not None
    assert outcome(steps, config, mode="fsdp_full", num_gpus=16) is None, "several hosts"
    assert (
        outcome(steps, run_config(parallel=ParallelConfig(context_parallel_size=2)), mode="fsdp_full", num_gpus=2)
        is None
    )
    assert outcome(steps, dataclasses.replace(config, model=ModelConfig())) is None
    assert outcome([], config) is None


def test_options_of_a_run_reach_its_prediction():
    steps = steps_taken(0.7, [[1024] * 64] * 4, 65536, 36.9)
    plain = outcome(steps, run_config())
    recomputed = outcome(
        steps, dataclasses.replace(run_config(), model=ModelConfig(use_te=True, gradient_checkpointing=True))
    )
    assert recomputed["predicted_peak_memory_gib"] < plain["predicted_peak_memory_gib"]
    outer = run_config(
        precision=PrecisionConfig(mixed_precision="fp8", fp8_first_bf16_layers=2, fp8_last_bf16_layers=2)
    )
    assert outcome(steps, outer)["predicted_step_time_s"] > plain["predicted_step_time_s"]
    head = run_config(precision=PrecisionConfig(mixed_precision="fp8", fp8_lm_head="all"))
    assert outcome(steps, head)["predicted_step_time_s"] < plain["predicted_step_time_s"]
    shards = {"mode": "fsdp_full", "num_gpus": 4}
    fp8_params = outcome(steps, run_config(parallel=ParallelConfig(fp8_params=True)), **shards)
    assert fp8_params["predicted_step_time_s"] < outcome(steps, run_config(), **shards)["predicted_step_time_s"]
    flash = dataclasses.replace(run_config(), model=ModelConfig(use_te=True, attn_implementation="flash_attention_4"))
    assert outcome(steps, flash)["predicted_step_time_s"] < plain["predicted_step_time_s"]


def test_notes_are_printed_with_the_outcome():
    found = predict(scenario(tokens=2048), known_gpu(CALIBRATED_GPU))
    assert any("this one has 2,048" in note for note in found.notes) and any(
        "the host's time" in note for note in found.notes
    )
    entry = compare(found, 1.0, 100.0)
    kept, fp8_params = (scenario(mode="fsdp_grad", num_gpus=4, fp8_params=fp8) for fp8 in (False, True))
    assert not any("no recorded run" in note for of in (kept, fp8_params) for note in predict(of, found.gpu).notes)
    for of, what in (
        (kept.with_recipe("block"), "block on several GPUs"),
        (kept.with_recipe("current"), "current under fsdp_grad on several GPUs"),
        (fp8_params.with_recipe("current"), "current with --fp8_params on several GPUs"),
        (scenario(mode="ddp", num_gpus=2, fp8_lm_head="all"), "--fp8_lm_head all under ddp on several GPUs"),
        (dataclasses.replace(kept, sync_every_micro_batch=True), "--sync_every_micro_batch on several GPUs"),
    ):
        assert f"{what} is worked out, no recorded run has it" in predict(of, found.gpu).notes
    counts = "recorded runs of today's code under ddp have 2 GPUs of one host"
    on_two, on_four = (predict(scenario(mode="ddp", num_gpus=n), found.gpu).notes for n in (2, 4))
    assert counts in on_four and counts not in on_two
    assert entry["notes"] and all(note in describe_comparison(entry) for note in entry["notes"])


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_command(monkeypatch, capsys):
    """The command in this process: its exit code, what it printed and what it said of mistakes."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["scripts/predict.py", *words])
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as ended:
            run_script(command.main)
        return (ended.value.code, *capsys.readouterr())

    return run


def test_a_misspelt_bundled_model_is_told_at_once(run_command):
    code, _, said = run_command("--model_name", "Llama-3.1-9B")
    assert code == 2 and "(did you mean Llama-3.1-8B?)" in said and "owner/name" in said


EIGHT_B = ("--model_name", "meta-llama/Llama-3.1-8B", "--batch_size", "8", "--gradient_accumulation_steps", "4")


def test_brackets_in_a_name_are_no_markup(run_command, tmp_path):
    (tmp_path / "[bold]1B").mkdir()
    shutil.copy(bundled_config("Llama-3.2-1B"), tmp_path / "[bold]1B" / "config.json")
    figures = tmp_path / "[red]" / "figures.json"
    words = ("--model_name", str(tmp_path / "[bold]1B"), "--gpu", CALIBRATED_GPU, "--json", str(figures))
    code, printed, said = run_command(*words)
    assert code == 0, said
    assert "[bold]1B" in printed.replace("\n", "") and "[red]/figures.json" in printed.replace("\n", "")


def test_command(run_command):
    code, printed, said = run_command(*EIGHT_B, "--gpu", CALIBRATED_GPU)
    assert code == 0, said
    lines = {line.split()[1]: line for line in printed.splitlines() if "│" in line}
    assert set(lines) == set(PREDICTED)
    for recipe, line in lines.items():
        found = predict(scenario(recipe=recipe), known_gpu(CALIBRATED_GPU))
        assert f"{found.step_time_s:.3f}" in line and f"{found.peak_memory_gib:.1f}" in line
        assert ("yes" in line) == found.fits
    assert "no" in lines["block"].split("│")[-2]
    assert f"fitted to runs on {CALIBRATED_GPU}" in printed


def test_options_of_the_kernels_reach_the_command(run_command, tmp_path):
    path = tmp_path / "predicted.json"
    flags = (
        "--fp8_lm_head",
        "all",
        "--attn_implementation",
        "flash_attention_4",
        "--gpu",
        CALIBRATED_GPU,
        "--json",
        str(path),
    )
    code, printed, said = run_command(*EIGHT_B, *flags)
    assert code == 0, said
    for row in json.loads(path.read_text())["rows"]:
        asked = scenario(recipe=row["recipe"], fp8_lm_head="all", flash_attention_4=True)
        assert row["step_time_s"] == predict(asked, known_gpu(CALIBRATED_GPU)).step_time_s


def test_weights_in_fp8_reach_the_command(run_command, tmp_path):
    path = tmp_path / "predicted.json"
    flags = (
        "--num_gpus",
        "4",
        "--sharding_mode",
        "fsdp_grad",
        "--fp8_params",
        "--gpu",
        CALIBRATED_GPU,
        "--json",
        str(path),
    )
    code, printed, said = run_command(*EIGHT_B, *flags)
    assert code == 0 and "bf16 is predicted without it" in printed and "nothing was measured" not in printed, said
    rows = json.loads(path.read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", "delayed", "current"]
    for row in rows:
        asked = scenario(recipe=row["recipe"], mode="fsdp_grad", num_gpus=4, optimizer="adamw_fp32", fp8_params=True)
        assert row["step_time_s"] == predict(asked, known_gpu(CALIBRATED_GPU)).step_time_s


def test_memory_that_is_there_and_still_too_little_is_tight(run_command):
    flags = (
        "--gradient_accumulation_steps",
        "8",
        "--num_gpus",
        "2",
        "--sharding_mode",
        "fsdp_grad",
        "--gpu",
        CALIBRATED_GPU,
    )
    _, printed, _ = run_command("--model_name", "Llama-3.1-8B", "--batch_size", "8", "--max_seq_length", "1024", *flags)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert {row[0]: row[-1] for row in rows} == {"bf16": "yes", "delayed": "tight", "current": "tight", "block": "no"}
    (note,) = (line for line in printed.splitlines() if line.startswith("note: delayed: FSDP's streams"))
    assert note.endswith("take a smaller --batch_size, --fp8_params or --sharding_mode fsdp_full")


def test_a_head_size_that_flash_attention_4_does_not_take_is_refused(run_command, tmp_path):
    LlamaConfig(hidden_size=640, num_attention_heads=8, num_key_value_heads=8, intermediate_size=1280).save_pretrained(
        tmp_path
    )
    code, printed, said = run_command("--model_name", str(tmp_path), "--attn_implementation", "flash_attention_4")
    assert code == 2 and not printed and "heads have 80 elements" in said and said.count("\n") == 1
    assert run_command("--model_name", str(tmp_path))[0] == 0


def test_the_command_keeps_its_figures(run_command, tmp_path):
    path = tmp_path / "new" / "predicted.json"
    code, printed, said = run_command(*EIGHT_B, "--gpu", CALIBRATED_GPU, "--json", str(path))
    assert code == 0 and f"figures in {path}" in printed, said
    stored = json.loads(path.read_text())
    assert (stored["gpu"], stored["optimizer"], stored["tokens_per_step"]) == (CALIBRATED_GPU, "adamw_master", 32768)
    assert stored["options"]["batch_size"] == 8 and stored["provenance"]["command"][0].endswith("predict.py")
    assert [row["recipe"] for row in stored["rows"]] == list(PREDICTED)
    for row in stored["rows"]:
        found = predict(scenario(recipe=row["recipe"]), known_gpu(CALIBRATED_GPU))
        assert (row["step_time_s"], row["tokens_per_s"]) == (found.step_time_s, found.tokens_per_s)
        assert (row["peak_memory_gib"], row["fits"]) == (found.peak_memory_gib, found.fits)
        assert row["host_s"] == found.host_s
        assert sum(row["parts_s"].values()) == pytest.approx(row["step_time_s"])
        assert row["speed_up"] == stored["rows"][0]["step_time_s"] / row["step_time_s"]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("--offload_optimizer", "0.75"), {"offload_optimizer": 0.75}),
        (("--fp8_recast_weights",), {"fp8_recast_weights": True}),
        (("--cuda_graphs",), {"cuda_graphs": True}),
    ],
)
def test_what_saves_memory_or_launches_is_predicted(words, options, run_command, tmp_path):
    path = tmp_path / "predicted.json"
    assert run_command(*EIGHT_B, "--gpu", CALIBRATED_GPU, "--json", str(path), *words)[0] == 0
    (delayed,) = (row for row in json.loads(path.read_text())["rows"] if row["recipe"] == "delayed")
    plain = predict(scenario(recipe="delayed"), known_gpu(CALIBRATED_GPU))
    found = predict(scenario(recipe="delayed", **options), known_gpu(CALIBRATED_GPU))
    assert (delayed["step_time_s"], delayed["peak_memory_gib"]) == (found.step_time_s, found.peak_memory_gib)
    assert found.step_time_s != plain.step_time_s or found.peak_memory_gib != plain.peak_memory_gib


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--gpu", "NVIDIA Imaginary 1"),
            f"error: --gpu NVIDIA Imaginary 1: nothing was measured .* known are .*{CALIBRATED_GPU}",
        ),
        (("--batch_size", "0"), "error: --batch_size must be at least 1, not 0."),
        (("--num_gpus", "4"), "error: --num_gpus 4 needs --sharding_mode: ddp, fsdp_grad, fsdp_full."),
        (("--num_gpus", "16", "--sharding_mode", "ddp"), "error: --num_gpus 16: several hosts were never measured"),
        (("--sharding_mode", "ddp"), "error: --sharding_mode has no effect on one GPU; add --num_gpus or drop it."),
        (
            ("--max_seq_length", "1000000"),
            "error: --max_seq_length 1000000 is more than the 131072 positions of .*Llama-3.1-8B",
        ),
        (("--gradient_accumulation_steps", "0"), "error: --gradient_accumulation_steps must be at least 1, not 0."),
        (("--fp8_params",), "error: --fp8_params has no effect on one GPU; add --num_gpus or drop it."),
        (
            ("--offload_optimizer", "0.5", "--optimizer", "adamw_8bit"),
            "error: --offload_optimizer moves the state of adamw_master, and --optimizer adamw_8bit has another",
        ),
        (
            ("--cuda_graphs", "--attn_implementation", "flash_attention_4"),
            "error: --cuda_graphs .*--attn_implementation flash_attention_4",
        ),
        (
            ("--cuda_graphs", "--num_gpus", "2", "--sharding_mode", "ddp"),
            "error: --cuda_graphs is predicted on one GPU alone; drop it, or --num_gpus and --sharding_mode.",
        ),
        (
            ("--fp8_params", "--num_gpus", "3", "--sharding_mode", "fsdp_grad"),
            "error: --fp8_params splits the rows of every weight evenly, and a weight of 4096 x 4096 cannot be split "
            "over 3 GPUs; use a number of GPUs that",
        ),
        (
            ("--fp8_params", "--optimizer", "adamw_master", "--num_gpus", "2", "--sharding_mode", "fsdp_full"),
            "error: --fp8_params keeps fp32 master weights, which --optimizer adamw_master has not; use adamw_fp32 or "
            "auto.",
        ),
        (
            ("--json", "/proc/none/r.json"),
            "error: --json /proc/none/r.json: .*; give a file in a folder that can be written",
        ),
        (("--mean_length", "5000"), "error: --mean_length 5000 must be from 1 to --max_seq_length 1024."),
    ],
)
def test_mistakes_end_in_one_sentence(words, sentence, run_command):
    code, printed, error = run_command(*EIGHT_B, *words)
    assert code == 2 and not printed
    assert re.search(sentence.replace("(", r"\("), error) and error.count("\n") == 1


def test_notes_of_the_command_and_odd_tokens(run_command):
    options = ("--batch_size", "1", "--max_seq_length", "208", "--num_gpus", "8", "--sharding_mode", "fsdp_full")
    code, printed, said = run_command("--model_name", "Llama-3.2-1B", *options)
    assert code == 0, said
    assert "block needs a multiple of 128 tokens" in printed and "8 x NVIDIA H200, fsdp_full" in printed
    assert "recorded runs of today's code under fsdp_full have 2 and 4 GPUs of one host" in printed
