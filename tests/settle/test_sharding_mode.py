"""--sharding_mode auto, the combinations that are refused, and the arithmetic of a recorded step."""

from __future__ import annotations

import pytest

from llm_fp8.config.parser import parse_config
from llm_fp8.models.memory import resolve_optimizer, state_bytes
from llm_fp8.observability.kernel_trace import StepProfile, covered_s
from llm_fp8.settle.settle import choose_mode
from llm_fp8.utils.ranks import LaunchRanks

EIGHT = LaunchRanks(world_size=8, local_world_size=8, launched=True)
TWO_HOSTS = LaunchRanks(world_size=16, local_world_size=8, launched=True)
BILLION = 10**9


def config(*options: str):
    return parse_config(list(options), parallel=True)


@pytest.mark.parametrize(
    ("billions", "ranks", "gpu_memory_gib", "options", "mode"),
    [
        (1.2, EIGHT, 139.8, [], "ddp"),  # 13.4 GiB
        (8, EIGHT, 139.8, [], "fsdp_grad"),  # ddp would take 89.4 of 83.9 GiB; 2 + 2 bytes each are 29.8
        (14.8, EIGHT, 139.8, ["--gradient_accumulation_steps=4"], "fsdp_full"),  # 8 bytes are 110 GiB, 6 are 82.7
        (14.8, EIGHT, 139.8, [], "fsdp_grad"),
        (70, EIGHT, 139.8, [], "fsdp_full"),  # 130 GiB: comes nearest
        (8, EIGHT, None, [], "ddp"),
        (8, LaunchRanks(launched=True), 139.8, [], "single"),
        (8, EIGHT, 139.8, ["--sharding_mode=ddp"], "ddp"),
        (8, EIGHT, 80, ["--optimizer=adamw_8bit"], "ddp"),  # 6 bytes are 44.7 of 48 GiB
        (8, EIGHT, 80, ["--offload_optimizer=1"], "ddp"),  # 4 bytes are 29.8 of 48 GiB
        (6.5, EIGHT, 139.8, [], "ddp"),
        (6.5, EIGHT, 139.8, ["--optimizer=adamw_fp32"], "fsdp_grad"),  # 16 bytes are 96.9 of 83.9 GiB
    ],
)
def test_auto_takes_the_first_mode_that_fits(billions, ranks, gpu_memory_gib, options, mode):
    chosen_mode, reason = choose_mode(config(*options), ranks, int(billions * BILLION), gpu_memory_gib)
    assert chosen_mode == mode
    assert (not reason) == ("--sharding_mode=ddp" in options)


@pytest.mark.parametrize(
    ("options", "where", "kind"),
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
def test_the_optimizer_of_auto(options, where, kind):
    assert resolve_optimizer(config(*options.split()), *where) == kind


def test_bytes_of_every_mode():
    once, accumulated = config(), config("--gradient_accumulation_steps=2")
    assert state_bytes("single", "adamw_master", 1, once) == state_bytes("ddp", "adamw_master", 8, accumulated) == 12
    assert state_bytes("single", "adamw_master", 1, config("--offload_optimizer=0.75")) == 6
    assert [state_bytes("fsdp_full", "adamw_fp32", 8, each) for each in (once, accumulated)] == [2, 6]
    assert state_bytes("fsdp_grad", "adamw_fp32", 8, once) == 4
    assert state_bytes("fsdp_hybrid", "adamw_fp32", 4, once) == 4
    assert [state_bytes(f"deepspeed_{stage}", "adamw_fp32", 8, once) for stage in (1, 2, 3)] == [5.5, 3.75, 2]


def test_intervals_and_communication():
    assert covered_s([(5, 6), (0, 2), (1, 3), (3, 4), (1, 2)]) == 5
    profile = StepProfile(span_s=2.0, communication_s=1.0, exposed_communication_s=0.5)
    assert profile.figures()["communication_share"] == 0.5 and profile.figures()["exposed_communication_share"] == 0.25
