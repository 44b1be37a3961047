"""The decisions of `settle` on assumed machines, and the options that it refuses for a machine, launch or model."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import LlamaConfig

from llm_fp8.config.parser import parse_config
from llm_fp8.mixers.delta_net import DeltaNetSizes
from llm_fp8.settle.machine import Machine, assumed_machine
from llm_fp8.settle.settle import Settled, check_te_decoder, choose_mode, settle
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from te_llama import decoder_sizes
from tests.support.families import family_config

FP8 = "--mixed_precision fp8 --use_te "
GRAPHS = "--cuda_graphs --use_te --mixed_precision bf16 "
FP8_PARAMS = "--mixed_precision=fp8 --use_te --fp8_params"
TWO_HOSTS = LaunchRanks(world_size=4, local_world_size=2, launched=True)
EIGHT_GPUS = LaunchRanks(world_size=8, local_world_size=8, launched=True)
ONE_HOST = LaunchRanks(world_size=2, local_world_size=2, launched=True)
B200 = assumed_machine(LaunchRanks(), "B200", 178.0, (10, 0))
ONE, FOUR, CPU = assumed_machine(LaunchRanks()), assumed_machine(TWO_HOSTS), Machine()
LLAMA = LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2, vocab_size=256)
WINDOWED, DELTA_NET = dataclasses.replace(decoder_sizes(LLAMA), window=64), DeltaNetSizes(2, 8, 16, 16, 4)
PHI = dataclasses.replace(WINDOWED, fused_projections=("qkv_proj",))


def settled(options: str, machine: Machine = ONE, model: LlamaConfig = LLAMA) -> Settled:
    return settle(parse_config(options.split(), parallel=True), model, machine)


@pytest.mark.parametrize(
    ("options", "decoder", "num_shards", "message"),
    [
        ("--use_te --context_parallel_size 2", {"layers": (None, WINDOWED)}, 4, "--context_parallel_size"),
        ("--use_te --context_parallel_size 2", {"delta_net": DELTA_NET}, 4, "--context_parallel_size"),
        (FP8_PARAMS, {}, 7, "--fp8_params"),
        ("--use_te --lora_rank 4 --lora_targets q_proj", {"layers": (PHI,)}, 4, "--lora_targets q_proj: .* qkv_proj"),
    ],
)
def test_option_that_the_decoder_does_not_allow_is_refused(options, decoder, num_shards, message):
    config = parse_config(options.split(), parallel=True)
    spec = decoder_sizes(LLAMA)
    check_te_decoder(config, spec, num_shards=4)
    with pytest.raises(UserError, match=message):
        check_te_decoder(config, dataclasses.replace(spec, **decoder), num_shards)


REFUSED: list[tuple[str, Machine, str]] = [
    ("--use_te", CPU, "--use_te"),
    ("--certify", CPU, "--certify"),
    ("--mixed_precision fp8", CPU, "--mixed_precision fp8"),
    ("--mixed_precision fp8", assumed_machine(LaunchRanks(), "A100", 79.1, (8, 0)), "--mixed_precision fp8"),
    ("--mixed_precision fp16", CPU, "--mixed_precision fp16"),
    (FP8 + "--fp8_scenario mxfp8 --fp8_strict", ONE, "--fp8_scenario mxfp8 with --fp8_strict"),
    ("--batch_size auto", CPU, "--batch_size auto"),
    ("--optimizer adamw_master --mixed_precision no", ONE, "--optimizer adamw_master"),
    ("--optimizer adamw_8bit --sharding_mode deepspeed_2", FOUR, "--optimizer adamw_8bit"),
    ("--offload_optimizer 1", CPU, "--offload_optimizer"),
    ("--offload_optimizer 1 --mixed_precision no", ONE, "--offload_optimizer"),
    ("--offload_optimizer 1", dataclasses.replace(ONE, host_free_gib=1e-5), "--offload_optimizer 1 takes"),
    (GRAPHS.replace("bf16", "no"), ONE, "--cuda_graphs"),
    (GRAPHS + "--optimizer adamw_fp32", ONE, "--cuda_graphs"),
    (GRAPHS, dataclasses.replace(ONE, lacks_delta_kernels=True), "--cuda_graphs .* flash-linear-attention"),
    (GRAPHS + "--gradient_accumulation_steps 2 --no_merge_micro_batches --sharding_mode fsdp_full", FOUR, "one micro"),
    (FP8 + "--fp8_scenario block --max_seq_length 144 --batch_size 1", ONE, "--fp8_scenario block"),
    ("--lr_scheduler warmup_stable_decay", CPU, "warmup_stable_decay: .*num_decay_steps.*--lr_scheduler_kwargs"),
    ('--lr_scheduler_kwargs {"min_lr":0}', CPU, "--lr_scheduler cosine: .*min_lr.*--lr_scheduler_kwargs"),
    ("--sync_every_micro_batch", ONE, "--sync_every_micro_batch"),
    ("--sharding_mode fsdp_hybrid", assumed_machine(ONE_HOST), "fsdp_hybrid"),
    ("--mixed_precision fp8 --fp8_scenario rowwise --lora_rank 4", ONE, "--fp8_backend torchao"),
    ("--use_te --context_parallel_size 3 --max_seq_length 1152 --sharding_mode fsdp_full", FOUR, "3"),
    ("--use_te --context_parallel_size 2 --sharding_mode fsdp_full --mixed_precision no", FOUR, "bf16"),
]


@pytest.mark.parametrize(("options", "machine", "message"), REFUSED)
def test_option_that_machine_or_launch_does_not_allow_is_refused(options, machine, message):
    with pytest.raises(UserError, match=message):
        settled(options, machine)


def test_idle_gpus_decide_about_graphs_unless_a_graph_would_replay_dropout_or_wait_for_the_host():
    options, delta_net = "--use_te --packing --mixed_precision bf16", family_config("qwen3_5_text")
    assert settled(options).graphs is settled(options, model=delta_net).graphs is None
    assert settled(options, dataclasses.replace(ONE, lacks_delta_kernels=True), delta_net).graphs is False
    assert settled(options, model=LlamaConfig(**LLAMA.to_dict() | {"attention_dropout": 0.1})).graphs is False


def test_cuda_graphs_are_refused_with_dropout():
    settled(GRAPHS)
    with pytest.raises(UserError, match="--cuda_graphs"):
        settled(GRAPHS, model=LlamaConfig(**LLAMA.to_dict() | {"attention_dropout": 0.1}))


@pytest.mark.parametrize(
    ("options", "machine", "precision", "mode", "optimizer"),
    [
        ("", CPU, "no", "single", "adamw_fp32"),
        ("", ONE, "bf16", "single", "adamw_master"),
        (FP8, ONE, "fp8 delayed", "single", "adamw_master"),
        (FP8 + "--fp8_scenario mxfp8", ONE, "fp8 delayed", "single", "adamw_master"),
        (FP8 + "--fp8_scenario mxfp8", B200, "fp8 mxfp8", "single", "adamw_master"),
        (GRAPHS, FOUR, "bf16", "ddp", "adamw_master"),
        ("--sharding_mode fsdp_hybrid", FOUR, "bf16", "fsdp_hybrid", "adamw_master"),
        ("--use_te --context_parallel_size 4 --sharding_mode fsdp_full", FOUR, "bf16", "fsdp_full", "adamw_master"),
        ("--sharding_mode deepspeed_2", FOUR, "bf16", "deepspeed_2", "adamw_fp32"),
    ],
)
def test_settled_precision_mode_and_optimizer(options, machine, precision, mode, optimizer):
    run = settled(options, machine)
    assert (run.precision.name.replace("fp32", "no"), run.mode, run.optimizer_kind) == (precision, mode, optimizer)
    assert bool(run.precision.fallback_reason) == (machine is ONE and "mxfp8" in options)


FP8_HF = "--mixed_precision fp8 "
NO_TORCHAO = dataclasses.replace(ONE, no_torchao="not installed")
NO_COMPILER = dataclasses.replace(ONE, no_torchao="no gcc", no_compiler="no gcc")


@pytest.mark.parametrize(
    ("options", "machine", "precision", "backend_word", "eager_word"),  # words of the reasons
    [
        ("", ONE, "bf16", None, None),
        ("--compile", CPU, "fp32", None, None),
        ("", CPU, "fp32", None, "no GPU"),
        ("--no_compile", ONE, "bf16", None, "--no_compile"),
        (FP8, ONE, "fp8 delayed", "--use_te", "fused"),
        (FP8_HF, ONE, "fp8 tensorwise", "faster", None),
        (FP8_HF + "--no_compile", ONE, "fp8 delayed", "--no_compile", "--no_compile"),
        (FP8_HF, NO_TORCHAO, "fp8 delayed", "not installed", "break the graph"),
        (FP8_HF, NO_COMPILER, "fp8 delayed", "no gcc", "break the graph"),
        (FP8_HF + "--fp8_backend torchao", NO_COMPILER, "fp8 tensorwise", None, "no gcc"),
        (FP8_HF + "--lora_rank 4", ONE, "fp8 delayed", "--lora_rank", "break the graph"),
        (FP8_HF + "--fp8_scenario rowwise", NO_TORCHAO, "fp8 rowwise", "--fp8_scenario rowwise", None),
        (FP8_HF + "--fp8_params --sharding_mode fsdp_full", FOUR, "fp8 tensorwise", "--fp8_params", None),
    ],
)
def test_settled_back_end_and_compilation(options, machine, precision, backend_word, eager_word):
    run = settled(options, machine)
    assert run.precision.name == precision
    for reason, word in ((run.precision.backend_reason, backend_word), (run.eager_reason, eager_word)):
        assert reason is None if word is None else word in reason, reason
    if run.precision.requested == "fp8":
        assert run.config.precision.fp8_backend == run.precision.backend


def test_resumed_run_keeps_the_back_end_of_its_checkpoint():
    for machine, recipe, backend in ((ONE, "delayed", "te"), (NO_TORCHAO, "tensorwise", "torchao")):
        resumed = {"fingerprint": {"precision": f"fp8 {recipe}"}, "options": {"batch_size": 8}}
        run = settle(parse_config(FP8_HF.split()), LLAMA, machine, resumed)
        assert (run.precision.backend, run.precision.effective_scenario) == (backend, recipe)


@pytest.mark.parametrize(
    ("billions", "ranks", "gpu_memory_gib", "options", "mode"),
    [
        (1.2, EIGHT_GPUS, 139.8, [], "ddp"),  # 13.4 GiB
        (8, EIGHT_GPUS, 139.8, [], "fsdp_grad"),  # ddp needs 89.4 of 83.9 GiB; 2 + 2 bytes per parameter are 29.8
        (14.8, EIGHT_GPUS, 139.8, ["--gradient_accumulation_steps=4"], "fsdp_full"),  # 82.7 GiB; fsdp_grad needs 110
        (14.8, EIGHT_GPUS, 139.8, [], "fsdp_grad"),
        (70, EIGHT_GPUS, 139.8, [], "fsdp_full"),  # needs 130 GiB, the least of all modes
        (8, EIGHT_GPUS, None, [], "ddp"),
        (8, LaunchRanks(launched=True), 139.8, [], "single"),
        (8, EIGHT_GPUS, 139.8, ["--sharding_mode=ddp"], "ddp"),
        (8, EIGHT_GPUS, 80, ["--optimizer=adamw_8bit"], "ddp"),  # 6 bytes per parameter are 44.7 of 48 GiB
        (8, EIGHT_GPUS, 80, ["--offload_optimizer=1"], "ddp"),  # 4 bytes per parameter are 29.8 of 48 GiB
        (6.5, EIGHT_GPUS, 139.8, [], "ddp"),
        (6.5, EIGHT_GPUS, 139.8, ["--optimizer=adamw_fp32"], "fsdp_grad"),  # ddp needs 16 bytes: 96.9 of 83.9 GiB
    ],
)
def test_auto_chooses_the_first_mode_that_fits(billions, ranks, gpu_memory_gib, options, mode):
    config = parse_config(options, parallel=True)
    chosen_mode, reason = choose_mode(config, ranks, int(billions * 10**9), gpu_memory_gib)
    assert chosen_mode == mode
    assert (not reason) == ("--sharding_mode=ddp" in options)
