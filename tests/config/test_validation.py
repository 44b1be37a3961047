"""What cannot work is refused by its flag: by the options alone, or by what the machine, the launch and the model are.

Ranges of single numbers are in test_config.py.
"""

from __future__ import annotations

import pytest

from llm_fp8.config.parser import parse_config
from llm_fp8.config.validation import (
    MachineFacts,
    ModelFacts,
    check_fp8_params,
    check_machine,
    packages_needed,
)
from llm_fp8.train.machine import model_facts
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.small import tiny_config

EIGHT = LaunchRanks(rank=0, world_size=8, local_world_size=8, launched=True)
FP8 = ["--use_te", "--mixed_precision=fp8"]


def config(*options):
    return parse_config(list(options), parallel=True)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("problem", "--columns 'problem' must be pairs of our name and the dataset's, as in problem=question,"),
        ("problem=", "--columns 'problem=' must be pairs"),
        ("problem=a,problem=b", "name no column twice"),
        ("problem=a,text=a", "name no column twice"),
        ("", "--columns '' must be pairs"),
        ("question=problem", r"--columns question=...: 'question' is none of our columns, which are problem, "),
    ],
)
def test_columns_are_pairs(columns, said):
    with pytest.raises(UserError, match=said):
        config(f"--columns={columns}")


@pytest.mark.parametrize("weights", ["", "0.5,", "1,x", "1,-1", "0,1", "nan,1", "inf,1", "1" * 400 + ",1"])
def test_weights_are_numbers(weights):
    with pytest.raises(UserError, match="--dataset_weights .* must be numbers above 0, one for each dataset"):
        config("--dataset_name=a,b", f"--dataset_weights={weights}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--eval_dataset_config=main"], "--eval_dataset_config main has no effect without --eval_dataset_name"),
        (["--eval_dataset_name=b", "--validation_fraction=0.1"], "--validation_fraction 0.1 has no effect with"),
    ],
)
def test_options_of_a_dataset_to_evaluate_on(options, said):
    with pytest.raises(UserError, match=said):
        config(*options)


def refusal(*options: str, **facts: object) -> str:
    """The sentence that refuses these options on a machine with these facts."""
    with pytest.raises(UserError) as error:
        check_machine(config(*options), MachineFacts(**facts))
    said = str(error.value)
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("fsdp_full", ["--mixed_precision=fp16"], "--mixed_precision fp16 cannot go with --sharding_mode fsdp_full"),
        ("fsdp_full", ["--optimizer=adamw_8bit"], "--optimizer adamw_8bit cannot go with"),
        (
            "deepspeed_2",
            ["--optimizer=adamw_8bit"],
            "--optimizer adamw_8bit cannot go with --sharding_mode deepspeed_2",
        ),
        (
            "deepspeed_2",
            ["--optimizer=adamw_master"],
            "--optimizer adamw_master cannot go with --sharding_mode deepspeed_2",
        ),
        ("ddp", ["--fp8_params"], "--fp8_params needs an fsdp mode"),
        ("ddp", ["--fp8_params", *FP8], "--fp8_params needs an fsdp mode"),
        ("deepspeed_3", ["--fp8_params", *FP8], "--fp8_params needs an fsdp mode"),
        ("fsdp_full", ["--fp8_params", "--mixed_precision=fp8"], "--fp8_params needs an fsdp mode"),
        ("fsdp_full", ["--fp8_params", "--use_te", "--mixed_precision=bf16"], "--fp8_params needs an fsdp mode"),
        ("fsdp_full", ["--fp8_params"], "has --sharding_mode fsdp_full and lacks --use_te, --mixed_precision fp8."),
        ("fsdp_offload", ["--fp8_params", *FP8], "fsdp_offload and lacks such a mode."),
        (
            "fsdp_full",
            ["--fp8_params", *FP8, "--optimizer=adamw_master"],
            "--fp8_params keeps fp32 master weights, which --optimizer adamw_master has not",
        ),
        ("ddp", ["--context_parallel_size=2", "--use_te"], "--context_parallel_size 2 needs --use_te and an fsdp mode"),
        ("fsdp_full", ["--context_parallel_size=2"], "this run has --sharding_mode fsdp_full and lacks --use_te."),
        ("fsdp_full", ["--hybrid_shard_size=2"], "--hybrid_shard_size 2 has no effect"),
        ("ddp", ["--deepspeed_config=x.json"], "--deepspeed_config x.json has no effect"),
        ("fsdp_full", ["--offload_optimizer=1"], "--offload_optimizer cannot go with --sharding_mode fsdp_full"),
        ("deepspeed_2", ["--offload_optimizer=0.1"], "--offload_optimizer cannot go with --sharding_mode deepspeed_2"),
        ("deepspeed_1", ["--async_save"], "--async_save cannot go with"),
        ("deepspeed_2", ["--sync_every_micro_batch"], "--sync_every_micro_batch has no effect"),
    ],
)
def test_what_cannot_go_with_a_sharding_mode(mode, options, words):
    """Whether the mode is given or found by 'auto'."""
    with pytest.raises(UserError) as error:
        config(*options, f"--sharding_mode={mode}")
    assert words in str(error.value)
    assert words in refusal(*options, ranks=EIGHT, sharding_mode=mode, compute="bf16")


def test_one_gpu_has_no_sharding_mode_to_be_named():
    said = refusal("--fp8_params", "--use_te", "--mixed_precision=fp8", sharding_mode="single")
    assert said.endswith("this run has one GPU and lacks such a mode.")


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("fsdp_full", ["--context_parallel_size=3", "--use_te", "--max_seq_length=96"], "does not divide the 8"),
        ("fsdp_hybrid", [], "--sharding_mode fsdp_hybrid shards over 8 GPUs"),
        ("fsdp_hybrid", ["--hybrid_shard_size=3"], "shards over 3 GPUs"),
    ],
)
def test_what_the_number_of_processes_does_not_allow(mode, options, words):
    assert words in refusal(*options, f"--sharding_mode={mode}", ranks=EIGHT, sharding_mode=mode)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--mixed_precision=bf16", "--fp8_backend=torchao"],
            "--fp8_backend has no effect with --mixed_precision bf16",
        ),
        (["--mixed_precision=bf16", "--fp8_scenario=current"], "--fp8_scenario has no effect"),
        (["--mixed_precision=no", "--amax_history_len=4"], "--amax_history_len has no effect"),
        (["--fp8_strict"], "--fp8_strict has no effect without --mixed_precision fp8"),
        (
            ["--mixed_precision=fp8", "--fp8_scenario=current", "--fp8_margin=0"],
            "--fp8_margin has no effect with --fp8_scenario current, only with delayed",
        ),
        (
            ["--mixed_precision=fp8", "--fp8_scenario=mxfp8", "--amax_history_len=16"],
            "--amax_history_len has no effect with",
        ),
        (["--mixed_precision=fp8", "--fp8_scenario=nvfp4", "--fp8_format=E4M3"], "--fp8_format has no effect with"),
        (["--parity_check"], "--parity_check compares"),
        (["--offload_optimizer=1.5"], "--offload_optimizer must be from 0 to 1, not 1.5"),
        (["--offload_optimizer=nan"], "--offload_optimizer must be from 0 to 1, not nan"),
        (
            ["--offload_optimizer=1", "--optimizer=adamw_8bit"],
            "--offload_optimizer moves .* --optimizer adamw_8bit has",
        ),
        (
            ["--offload_optimizer=1", "--optimizer=adamw_fp32"],
            "--offload_optimizer moves .* --optimizer adamw_fp32 has",
        ),
        (
            ["--offload_optimizer=1", "--lora_rank=8"],
            "--offload_optimizer has next to nothing to move with --lora_rank 8",
        ),
    ],
)
def test_options_that_could_not_take_effect(options, words):
    with pytest.raises(UserError, match=words):
        config(*options)


# ---- context parallelism ----

CONTEXT = ["--use_te", "--context_parallel_size=4", "--sharding_mode=fsdp_full"]


def context_facts(windows=(None, None), **facts):
    return {"ranks": EIGHT, "sharding_mode": "fsdp_full", "model": ModelFacts(2, windows=windows), **facts}


@pytest.mark.slow
def test_context_parallelism_that_works_passes():
    options = [*CONTEXT, "--max_seq_length=65536", "--batch_size=1"]
    check_machine(config(*options), MachineFacts(**context_facts(scenario="block")))
    # One rank per row: nothing of this matters.
    facts = MachineFacts(compute="fp32", model=ModelFacts(1, windows=(24,)))
    check_machine(config("--max_seq_length=30"), facts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "facts", "words"),
    [
        ([], context_facts(windows=(None, 4096)), "sliding_window"),
        ([], context_facts(compute="fp32"), "--mixed_precision bf16 or fp8"),
        (["--max_seq_length=528", "--batch_size=1"], context_facts(scenario="delayed"), "multiple of 64"),
    ],
)
def test_context_parallelism_that_cannot_work(options, facts, words):
    said = refusal(*CONTEXT, *options, **facts)
    assert words in said and "--context_parallel_size 4" in said


@pytest.mark.slow
def test_rows_that_cannot_be_cut_into_chunks():
    with pytest.raises(UserError, match="--context_parallel_size 4 .* --max_seq_length 100 is not a multiple of 8"):
        config(*CONTEXT, "--max_seq_length=100", "--batch_size=4")


# ---- the machine, its packages and the model ----


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["adamw_master", "adamw_8bit"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bf16_parameters_need_a_run_in_bf16(kind, compute, device):
    said = refusal(f"--optimizer={kind}", device=device, compute=compute)
    assert said.startswith(f"--optimizer {kind}") and "--mixed_precision bf16 or fp8" in said


@pytest.mark.parametrize("facts", [{"device": "cpu"}, {"compute": "fp32"}, {"device": "cpu", "compute": "fp16"}])
def test_state_is_offloaded_where_auto_is_adamw_master(facts):
    check_machine(config("--offload_optimizer=1"), MachineFacts())
    assert "which --optimizer auto takes on a GPU in bf16 or fp8 alone" in refusal("--offload_optimizer=1", **facts)


def test_offloaded_state_fits_the_host():
    check_machine(config("--offload_optimizer=1"), MachineFacts(offloaded_gib=60, free_host_gib=64))
    said = refusal("--offload_optimizer=0.8", offloaded_gib=48, free_host_gib=34)
    assert said.startswith("--offload_optimizer 0.8 takes 48.0 GiB of this host's memory, 34.0 GiB are free")
    assert "use 0.5 or less" in said
    assert "use 0 or less" in refusal("--offload_optimizer=1", offloaded_gib=48, free_host_gib=3)


def test_what_needs_a_gpu():
    assert refusal("--use_te", device="cpu").startswith("--use_te needs an NVIDIA GPU")
    assert refusal("--certify", device="cpu").startswith("--certify")


def test_cuda_graphs_are_for_whole_copies_bf16_and_attention_without_dropout():
    options = ["--use_te", "--cuda_graphs"]
    check_machine(config(*options), MachineFacts(model=ModelFacts(2)))
    check_machine(config(*options), MachineFacts(sharding_mode="ddp"))
    for facts, words in (
        ({"compute": "fp16"}, "computes in bf16"),
        ({"compute": "fp32"}, "computes in bf16"),
        ({"sharding_mode": "fsdp_grad"}, "this run has --sharding_mode fsdp_grad"),
        ({"model": ModelFacts(2, attention_dropout=0.1)}, "attention_dropout 0.1"),
    ):
        said = refusal(*options, **facts)
        assert said.startswith("--cuda_graphs") and words in said
    for mode in ("fsdp_full", "deepspeed_2"):
        with pytest.raises(UserError, match=f"^--cuda_graphs needs a copy .* this run has --sharding_mode {mode}; use"):
            config(*options, f"--sharding_mode={mode}")
    with pytest.raises(UserError, match="^--cuda_graphs all-reduces gradients behind .* --sync_every_micro_batch"):
        config(*options, "--sharding_mode=ddp", "--sync_every_micro_batch")


def test_the_tokens_of_a_micro_batch_fit_the_recipe():
    options = ["--mixed_precision=fp8", "--fp8_scenario=block", "--max_seq_length=48", "--batch_size=1"]
    said = refusal(*options, scenario="block")
    assert said.startswith("--fp8_scenario block needs a multiple of 128 tokens")


def test_a_package_that_cannot_be_used_is_named():
    problems = {"peft": "--lora_rank 4 needs PEFT"}
    assert refusal("--lora_rank=4", problems=problems) == "--lora_rank 4 needs PEFT"


@pytest.mark.parametrize(
    ("options", "device", "rank", "needed"),
    [
        ([], "cuda", 0, {}),
        (["--use_te"], "cuda", 0, {"transformer_engine": "--use_te"}),
        (["--use_wandb"], "cpu", 0, {"wandb": "--use_wandb"}),
        (["--use_wandb"], "cpu", 0, {"wandb": "--use_wandb"}),
        (["--use_wandb"], "cpu", 1, {}),
        (["--optimizer=adamw_8bit"], "cuda", 0, {"triton": "--optimizer adamw_8bit"}),
        (["--optimizer=adamw_8bit"], "cpu", 0, {}),
        (["--offload_optimizer=1"], "cuda", 0, {"triton": "--optimizer auto"}),
        (["--lora_rank=8"], "cpu", 0, {"peft": "--lora_rank 8"}),
        (["--sharding_mode=deepspeed_1"], "cpu", 1, {"deepspeed": "--sharding_mode deepspeed_1"}),
    ],
)
def test_the_packages_of_a_run_and_the_flags_that_ask_for_them(options, device, rank, needed):
    assert packages_needed(config(*options), device, rank) == needed


@pytest.mark.parametrize("scenario", ["block", "mxfp8", None])
def test_fp8_params_need_one_scale_per_weight(scenario):
    with pytest.raises(UserError, match="--fp8_params keeps one scale per weight"):
        check_fp8_params(scenario, [], 2)


def test_fp8_params_are_split_by_equal_numbers_of_rows():
    check_fp8_params("delayed", [(48, 8)], 16)
    with pytest.raises(UserError, match="a weight of 48 x 8 cannot be split over 5 GPUs"):
        check_fp8_params("delayed", [(48, 8)], 5)
    options = ["--fp8_params", *FP8, "--sharding_mode=fsdp_full"]
    facts = model_facts(config(*options), tiny_config())
    assert facts.layer_weights == ((64, 32), (32, 32), (96, 32), (32, 48))
    assert "a weight of 64 x 32 cannot" in refusal(
        *options, ranks=LaunchRanks(world_size=3), scenario="delayed", sharding_mode="fsdp_full", model=facts
    )
