"""The advice that running out of GPU memory or disk ends with."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from llm_fp8.config.parser import parse_config
from llm_fp8.train.failures import MemoryUse, explained_failures, out_of_memory_advice
from llm_fp8.utils.errors import UserError

BILLION = 10**9


def test_a_batch_that_fits_keeps_the_global_batch():
    config = parse_config(["--batch_size", "12", "--gradient_accumulation_steps", "2"])
    # 8 billion parameters stand at 89.4 GiB of 139.8; the step had taken 60 GiB of activations for 12 rows when it
    # failed: 5 GiB a row.
    use = MemoryUse(total_gib=139.8, peak_gib=15 + 14.9 + 60, resident_gib=15)
    advice = out_of_memory_advice(config, "adamw_master", 8 * BILLION, use)
    assert "89.4 GiB with --optimizer adamw_master" in advice
    assert "--batch_size 8 --gradient_accumulation_steps 3 (the same global batch)" in advice
    assert "--gradient_checkpointing" in advice and "adamw_8bit (44.9 GiB in place of 89.4)" in advice


def test_one_row_too_many_leaves_a_shorter_row():
    config = parse_config(["--batch_size", "1", "--gradient_checkpointing"])
    advice = out_of_memory_advice(config, "adamw_master", 8 * BILLION, MemoryUse(139.8, 139.0, 89.0))
    assert "a --max_seq_length below 1024" in advice and "--gradient_checkpointing;" not in advice


def test_a_model_that_cannot_stand_gets_no_batch():
    advice = out_of_memory_advice(parse_config([]), "adamw_master", 15 * BILLION, MemoryUse(139.8, 139.0, 0.0))
    assert "--batch_size" not in advice and "adamw_8bit (84.3 GiB in place of 167.6)" in advice
    advice = out_of_memory_advice(parse_config([]), "adamw_8bit", 70 * BILLION, MemoryUse(139.8, 139.0, 0.0))
    assert "adamw_8bit (" not in advice and advice.endswith("a GPU with more memory.")


def test_state_that_the_host_could_hold():
    use = MemoryUse(total_gib=79.1, peak_gib=78.0, resident_gib=0.0)
    advice = out_of_memory_advice(parse_config([]), "adamw_master", 8 * BILLION, use)
    assert "adamw_8bit (44.9 GiB in place of 89.4); --offload_optimizer 1 (29.8 GiB, and 59.6 in host memory)" in advice
    advice = out_of_memory_advice(parse_config(["--offload_optimizer=0.5"]), "adamw_master", 8 * BILLION, use)
    assert "take 59.6 GiB with" in advice and "--offload_optimizer 1 (29.8 GiB, and 59.6 in host memory)" in advice
    too_large = out_of_memory_advice(parse_config([]), "adamw_master", 21 * BILLION, use)
    everything = out_of_memory_advice(parse_config(["--offload_optimizer=1"]), "adamw_master", 8 * BILLION, use)
    adapters = out_of_memory_advice(parse_config(["--lora_rank=8"]), "adamw_master", 8 * BILLION, use)
    assert not any("--offload_optimizer" in said for said in (too_large, everything, adapters))


def test_a_full_disk_that_an_error_does_not_name_is_the_one_with_least_room(tmp_path, monkeypatch):
    run, cache = tmp_path / "run", tmp_path / "cache"
    cache.mkdir()
    run.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if Path(path) == cache else 2**30))
    with pytest.raises(UserError, match=rf"^{cache}: the disk .* is full.*HF_DATASETS_CACHE"):
        with explained_failures(run, str, [cache]):
            raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(UserError, match=rf"^{run}: the disk .* is full.*--output_dir"):
        with explained_failures(run, str):
            raise OSError(errno.ENOSPC, "No space left on device")
