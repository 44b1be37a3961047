"""Options, and combinations of options, that the parser refuses."""

from __future__ import annotations

import pytest

from llm_fp8.config.options import FIELDS
from llm_fp8.config.parser import parse_config
from llm_fp8.utils.errors import UserError

FP8 = "--mixed_precision=fp8 "
GRAPHS = "--cuda_graphs --use_te "
REFUSED = [
    # the option in the error message, and the command line
    *((each.name, f"--{each.name}={limit + {'at_least': -1, 'at_most': 1}.get(bound, 0)}")
      for each in FIELDS.values() for bound, limit in each.metadata["bounds"].items()),
    ("batch_size", "--batch_size 0"),
    ("max_steps", f"--max_steps {2**31}"),
    ("learning_rate", "--learning_rate nan"),
    ("learning_rate", "--learning_rate inf"),
    *((name, f"--{name} {value}") for name, value in (
        ("lora_alpha", 8), ("lora_dropout", 0.1), ("lora_targets", "q_proj"), ("fp8_format", "E4M3"),
        ("fp8_scenario", "current"), ("fp8_backend", "torchao"), ("amax_history_len", 16), ("fp8_strict", ""),
        ("fp8_bf16_modules", "qkv"), ("fp8_recast_weights", ""), ("keep_best", ""), ("allow_changed", "learning_rate"),
        ("early_stopping_patience", 3), ("resume_from", "latest"), ("streaming", ""), ("cuda_graphs", ""),
        ("context_parallel_size", 2), ("fp8_params", ""), ("wandb_project", "llm-fp8"), ("wandb_run_name", "x"),
    )),
    *(("cuda_graphs", GRAPHS + more) for more in (
        "--lora_rank 4 --lora_dropout 0.1",
        "--no_packing", FP8 + "--fp8_recast_weights", "--sync_every_micro_batch --sharding_mode ddp",
        "--sharding_mode fsdp_hybrid", "--sharding_mode ddp --optimizer adamw_fp32",
    )),
    ("attn_implementation", "--use_te --attn_implementation eager"),
    ("validation_fraction", "--validation_fraction 0.1 --eval_dataset_name x"),
    ("validation_fraction", "--validation_fraction 0.1 --validation_split_name test"),
    ("dataset_weights", "--dataset_weights 0.7,-1"),
    ("dataset_weights", "--dataset_weights 0.7,a"),
    ("columns", "--columns problem"),
    ("columns", "--columns problem=a,generated_solution=a"),
    ("columns", "--columns colour=a"),
    ("lora_targets", "--lora_rank 4 --lora_targets=,"),
    ("lora_targets", "--lora_rank 4 --lora_targets all-linear,q_proj"),
    ("allow_changed", "--allow_changed colour --resume_from x"),
    ("output_dir", "--output_dir="),
    ("save_every", "--save_every epochs"),
    ("eval_every", "--eval_every epoch --streaming --max_steps 4"),
    ("lr_scheduler_kwargs", "--lr_scheduler_kwargs [1]"),
    ("lr_scheduler_kwargs", "--lr_scheduler constant --lr_scheduler_kwargs {}"),
    ("max_seq_length", "--max_seq_length 100 --batch_size 3 --packing"),
    ("max_seq_length", FP8 + "--max_seq_length 100 --batch_size 3"),
    ("max_seq_length", "--use_te --context_parallel_size 8 --max_seq_length 1032"),
    ("fp8_scenario", FP8 + "--fp8_scenario rowwise --use_te"),
    ("fp8_scenario", FP8 + "--fp8_scenario rowwise --fp8_backend te"),
    ("fp8_scenario", FP8 + "--fp8_backend torchao --fp8_scenario block"),
    ("amax_history_len", FP8 + "--fp8_scenario current --amax_history_len 16"),
    ("fp8_backend", FP8 + "--fp8_backend torchao --use_te"),
    ("fp8_backend", FP8 + "--fp8_backend torchao --lora_rank 4"),
    ("fp8_backend", FP8 + "--fp8_backend torchao --sharding_mode deepspeed_2"),
    ("fp8_recast_weights", FP8 + "--fp8_recast_weights --sharding_mode fsdp_grad"),
    ("fp8_params", FP8 + "--fp8_params --use_te --sharding_mode ddp"),
    ("fp8_params", FP8 + "--fp8_params --fp8_backend te --sharding_mode fsdp_full"),
    *(("compile", f"--compile {more}") for more in (
        "--use_te", "--sharding_mode deepspeed_2", FP8 + "--fp8_backend te",
    )),
    ("fp8_params", FP8 + "--fp8_params --use_te --sharding_mode fsdp_offload"),
    ("fp8_params", FP8 + "--fp8_params --use_te --fp8_scenario block"),
    ("fp8_params", FP8 + "--fp8_params --fp8_backend torchao --fp8_scenario rowwise"),
    ("fp8_params", FP8 + "--fp8_params --fp8_backend torchao --sharding_mode fsdp_hybrid"),
    ("fp8_params", FP8 + "--fp8_params --use_te --optimizer adamw_master --sharding_mode fsdp_full"),
    ("fp8_params", FP8 + "--fp8_params --use_te --lora_rank 4 --sharding_mode fsdp_full"),
    ("lora_rank", "--lora_rank 4 --sharding_mode deepspeed_3"),
    ("offload_optimizer", "--offload_optimizer 1 --sharding_mode fsdp_full"),
    ("offload_optimizer", "--offload_optimizer 1 --optimizer adamw_8bit"),
    ("offload_optimizer", "--offload_optimizer 1 --lora_rank 4"),
    ("mixed_precision", "--mixed_precision fp16 --sharding_mode fsdp_full"),
    ("optimizer", "--optimizer adamw_8bit --sharding_mode deepspeed_3"),
    ("optimizer", "--optimizer adamw_master --sharding_mode deepspeed_1"),
    ("deepspeed_config", "--deepspeed_config x.json --sharding_mode ddp"),
    ("async_save", "--async_save --sharding_mode deepspeed_2"),
    ("sync_every_micro_batch", "--sync_every_micro_batch --sharding_mode deepspeed_2"),
    ("context_parallel_size", "--use_te --context_parallel_size 2 --sharding_mode ddp"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argv"), REFUSED, ids=[argv for _, argv in REFUSED])
def test_invalid_options_are_refused_by_name(name, argv):
    with pytest.raises(UserError, match=f"--{name}") as error:
        parse_config(argv.split(), parallel=True)
    assert "\n" not in str(error.value)


def test_fp8_params_work_with_both_back_ends():
    for more in ("--use_te", "--fp8_backend torchao"):
        argv = FP8 + f"--fp8_params --sharding_mode fsdp_full {more}"
        assert parse_config(argv.split(), parallel=True).parallel.fp8_params
