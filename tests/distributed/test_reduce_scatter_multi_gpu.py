"""Our reduce-scatter gives FSDP2's losses and reserves less memory, because gradient shards reuse freed memory."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from llm_fp8.distributed import fsdp
from tests.support.multi_gpu_training import train

pytestmark = pytest.mark.multi_gpu

NUM_PARAMETERS = 1_235_814_400
"""The number of parameters of Llama-3.2-1B."""
OPTIONS = ("--random_init", "--use_te", "--no_export", "--batch_size=2", "--max_seq_length=512", "--max_steps=3")


def use_default_reduce_scatter() -> None:
    """Let this process use FSDP2's own reduce-scatter instead of the package's."""
    default: Any = lambda unit, stream: DefaultReduceScatter()  # noqa: E731
    fsdp.MemorySavingReduceScatter = default


@pytest.mark.parametrize(
    "options",
    [
        ("--sharding_mode=fsdp_grad", "--mixed_precision=fp8", "--optimizer=adamw_fp32"),
        ("--sharding_mode=fsdp_full", "--mixed_precision=bf16", "--optimizer=adamw_fp32"),
        ("--sharding_mode=fsdp_full", "--mixed_precision=fp8", "--sync_every_micro_batch"),
        ("--sharding_mode=fsdp_full", "--mixed_precision=fp8"),  # with adamw_master, whose shards are bf16
    ],
)
def test_losses_equal_those_of_fsdp2_and_less_memory_is_reserved(options, tmp_path, monkeypatch, record_property):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as the scripts set it
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # so that equal sums give equal losses
    losses, peaks, reserved = {}, {}, {}
    for name, first in (("saving", None), ("default", use_default_reduce_scatter)):
        steps, _, _ = train(2, tmp_path / name, "Llama-3.2-1B", *OPTIONS, *options, first=first)
        losses[name] = [step["loss"] for step in steps]
        peaks[name] = max(step["peak_memory_gib"] for step in steps)
        reserved[name] = max(step["peak_reserved_memory_gib"] for step in steps)
    record_property("reserved", reserved)
    assert losses["saving"] == losses["default"] and len(set(losses["saving"])) == 3
    assert peaks["saving"] < 1.01 * peaks["default"]
    shards_gib = 4 / 2 * NUM_PARAMETERS / 2**30  # fp32 gradient shards of one of two GPUs
    if "--sync_every_micro_batch" not in options:  # which puts the gradient shards into both peaks
        saved_gib = (0.5 if "--optimizer=adamw_fp32" in options else 0.25) * shards_gib
        assert reserved["saving"] < reserved["default"] - saved_gib
        assert reserved["saving"] - peaks["saving"] < shards_gib
