"""Training on several gloo ranks: losses equal to those of a plain loop in every sharding mode; resuming and faults."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from llm_fp8.optim.adamw_master import split_master
from tests.support.faults import ENDLESS, START_S, check_run_stops_on_nonfinite_value, kill_rank_during_save
from tests.support.launches import ForkedRanks
from tests.support.processes import exit_code, run_ranks, start_ranks, wait_until
from tests.support.reference import check_against_reference, reference_options
from tests.support.small import (
    assert_same_continuation,
    final_weights,
    run_json,
    short_run,
    steps,
    stored_weights,
    write_rows,
)

pytestmark = pytest.mark.slow

MODES = [
    # ranks, mode, rows of a micro-batch, micro-batches, more
    (2, "ddp", 3, 3, ["--gradient_checkpointing"]),
    (2, "fsdp_full", 2, 4, ["--gradient_checkpointing=2"]),
    (2, "fsdp_grad", 4, 2, []),
    (2, "fsdp_offload", 4, 2, []),
    (3, "fsdp_full", 2, 3, ["--packing", "--sync_every_micro_batch"]),
    (4, "fsdp_hybrid", 2, 2, []),
    (2, "deepspeed_1", 4, 2, []),
    (2, "deepspeed_2", 2, 4, []),
    (2, "deepspeed_3", 4, 2, ["--gradient_checkpointing"]),
    (3, "deepspeed_3", 2, 3, ["--deepspeed_config=shards_all.json"]),
]
# By default DeepSpeed does not shard small parameters, such as all of the tiny model's.
SHARDS_ALL = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


@pytest.mark.parametrize(
    ("num_ranks", "mode", "batch_size", "accumulation", "more"),
    MODES,
    ids=[f"{ranks}-{mode}-{size}x{accumulation}" for ranks, mode, size, accumulation, _ in MODES],
)
def test_every_sharding_mode_trains_as_the_reference_loop(
    tmp_path, tiny_model, sixteen_rows, num_ranks, mode, batch_size, accumulation, more
):
    (tmp_path / "shards_all.json").write_text(json.dumps(SHARDS_ALL))
    more = [option.replace("shards_all.json", str(tmp_path / "shards_all.json")) for option in more]
    cut = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}", f"--sharding_mode={mode}"]
    options = [*reference_options(tiny_model, sixteen_rows, tmp_path), *cut, *more]
    run_ranks(num_ranks, tmp_path, *options, hosts=1 + (mode == "fsdp_hybrid"))
    check_against_reference(tmp_path, tiny_model, sixteen_rows, False)
    assert run_json(tmp_path)["effective"]["sharding_mode"] == mode


def options_of_short_run(model: str, rows: str, folder: Path) -> list[str]:
    return short_run(model, rows, folder, "--learning_rate=1e-3", "--save_every=2")


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full", "deepspeed_3"])
def test_resumed_run_has_the_same_losses(tmp_path, tiny_model, rows, mode):
    """The losses are equal bit for bit, or up to rounding if another number of ranks shares the global batch."""
    whole, resumed, other = (tmp_path / name for name in ("whole", "resumed", "other"))
    common = ["--batch_size=3", f"--sharding_mode={mode}", "--max_steps=4"]
    cut = [*common, "--gradient_accumulation_steps=2"]
    run_ranks(2, whole, *options_of_short_run(tiny_model, rows, whole), *cut, "--save_total_limit=9")
    resume = f"--resume_from={whole / 'checkpoints' / 'step-00000002'}"
    run_ranks(2, resumed, *options_of_short_run(tiny_model, rows, resumed), *cut, resume)
    assert_same_continuation(whole, resumed, completed=2)
    if mode == "fsdp_full":
        run_ranks(4, other, *options_of_short_run(tiny_model, rows, other), *common, resume, "--no_export")
        expected = [step["loss"] for step in steps(whole)][2:]
        assert [step["loss"] for step in steps(other)] == pytest.approx(expected, rel=1e-5)
    if mode == "deepspeed_3":
        log = tmp_path / "log"
        options = [*options_of_short_run(tiny_model, rows, other), *cut, "--allow_changed=global_batch_size", resume]
        assert [exit_code(process) for process in start_ranks(1, log, *options)] == [2]
        assert "on 2 processes" in log.read_text()


def test_signal_to_one_rank_saves_and_stops_all_ranks(tmp_path, tiny_model, rows):
    folder = tmp_path / "run"
    options = [*options_of_short_run(tiny_model, rows, folder), "--sharding_mode=fsdp_full", ENDLESS]
    with ForkedRanks(2, tmp_path / "log", *options) as launch:
        metrics = folder / "metrics.jsonl"
        assert wait_until(lambda: metrics.exists() and len(steps(folder)) > 2, launch, 0.01, START_S), launch.printed()
        os.kill(launch.pid_of(1), signal.SIGTERM)
        assert launch.end() == {0: 143, 1: 143}
    assert (folder / "checkpoints" / f"step-{len(steps(folder)):08d}").is_dir()
    assert launch.printed().count("stopped by SIGTERM; continue with --resume_from latest") == 1


def test_rank_killed_in_a_save_ends_all_ranks_and_leaves_complete_checkpoints(tmp_path, tiny_model, rows):
    folder = tmp_path / "run"
    options = [*options_of_short_run(tiny_model, rows, folder), "--sharding_mode=fsdp_full"]
    codes = kill_rank_during_save(functools.partial(ForkedRanks, 2, tmp_path / "log", *options), folder, within_s=30)
    assert codes == {0: 2, 1: -signal.SIGKILL}


def test_failing_run_completes_its_background_save(tmp_path, tiny_model, rows):
    folder, log = tmp_path / "run", tmp_path / "log"
    options = [*options_of_short_run(tiny_model, rows, folder), "--sharding_mode=fsdp_full", "--async_save"]
    diverges = ["--learning_rate=1e20", "--lr_scheduler=constant", "--max_steps=6", "--save_every=1"]
    ranks = start_ranks(2, log, *options, *diverges)
    assert [exit_code(rank) for rank in ranks] == [2, 2], log.read_text()
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert not [name for name in names if name.startswith(".tmp-")]


@pytest.mark.parametrize(
    ("place", "mode", "value"), [("activation", "deepspeed_1", math.nan), ("gradient", "fsdp_full", math.inf)]
)
def test_non_finite_number_stops_all_ranks_at_its_step(tmp_path, tiny_model, place, mode, value):
    rows = write_rows(tmp_path / "rows.jsonl", 64)
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128"]
    check_run_stops_on_nonfinite_value(tmp_path / "run", place, value, *options, f"--sharding_mode={mode}")


@pytest.mark.parametrize("mode", ["deepspeed_1", "deepspeed_2", "deepspeed_3"])
def test_deepspeed_master_weights_are_not_rounded_to_bf16_at_the_start(tmp_path, tiny_model, rows, mode):
    """The learning rate is too small to change a weight, so the export equals the initial weights, rounded to bf16."""
    folder = tmp_path / "run"
    options = [*options_of_short_run(tiny_model, rows, folder), "--learning_rate=1e-30", "--mixed_precision=bf16"]
    run_ranks(2, folder, *options, f"--sharding_mode={mode}", "--max_steps=1", "--save_every=1", "--batch_size=2")
    files = list(folder.glob("checkpoints/step-00000001/**/*optim_states.pt"))
    assert len(files) == 2
    for file in files:
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        masters = state.get("single_partition_of_fp32_groups") or state["fp32_flat_groups"]
        bits = torch.cat([flat.flatten() for flat in masters]).view(torch.int32) & 0xFFFF
        assert (bits != 0).float().mean() > 0.9, "bf16 numbers would have no such bits"
    exported, loaded = final_weights(folder), stored_weights(tiny_model)
    assert all(torch.equal(exported[name].bfloat16(), split_master(weight)[0]) for name, weight in loaded.items())
