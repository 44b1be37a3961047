#!/usr/bin/env python
"""Fine-tune all weights of a causal language model with transformers' Trainer. The launcher determines the precision,
so this script has no code for fp8.

    accelerate launch --config_file configs/accelerate_fp8.yaml examples/hf_trainer_fp8.py --output_dir runs/trainer-fp8
    accelerate launch --config_file configs/accelerate_bf16.yaml examples/hf_trainer_fp8.py \\
        --output_dir runs/trainer-bf16
    accelerate launch --config_file configs/accelerate_fp8.yaml examples/hf_trainer_fp8.py --output_dir runs/qwen \\
        --model_name Qwen/Qwen2.5-7B --dataset_name nvidia/OpenMathInstruct-2 --split_name train_1M \\
        --max_seq_length 1024 --learning_rate 1e-5

This script accepts every option of transformers' TrainingArguments. Do not use --bf16 or --fp16, which would replace
the launcher's fp8 (docs/multi_gpu.md). CertificateCallback checks the precision of a step. It is the only part of the
training that is not from transformers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.data.embedded import DATASET_DIR, MODEL_DIR
from llm_fp8.tools.hf_trainer_callback import CertificateCallback
from llm_fp8.tools.script import run_script
from llm_fp8.utils.errors import UserError


@dataclass
class ExampleArguments:
    """Options for the model and the dataset."""

    model_name: str = field(
        default=str(MODEL_DIR), metadata={"help": "hub id or folder; default: the embedded tiny model"}
    )
    random_init: bool = field(default=False, metadata={"help": "random weights; the embedded model has no others"})
    weights_dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata={"help": "float32: master weights for AdamW; bfloat16 halves the memory"}
    )
    dataset_name: str = field(
        default=str(DATASET_DIR), metadata={"help": "hub id, folder or jsonl file with problem and generated_solution"}
    )
    split_name: str = field(default="train", metadata={"help": "split of the dataset"})
    num_of_samples: int | None = field(default=None, metadata={"help": "use only this many rows, from the start"})
    max_seq_length: int = field(default=512, metadata={"help": "longer rows are truncated; a multiple of 16"})


@contextlib.contextmanager
def loading(flag: str, value: str) -> Iterator[None]:
    """Within the block, turn a library's error in loading `value` into a `UserError` about the option `flag`."""
    try:
        yield
    except (OSError, ValueError, DatasetGenerationError) as error:
        cause = error.__cause__ or error
        raise UserError(f"{flag} {value} cannot be loaded ({' '.join(str(cause).split())}); see --help.") from error


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Within the block, turn an ImportError into a `UserError` about a package that the launcher's config needs."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"the launcher's --config_file needs a package that is not installed ({error}); install "
            "it as requirements-gpu.txt says, or launch with configs/accelerate_bf16.yaml."
        ) from error


def main() -> int:
    """Load model and rows, tokenise, train and save."""
    try:
        options, args = HfArgumentParser((ExampleArguments, TrainingArguments)).parse_args_into_dataclasses()
    except ValueError as error:
        raise UserError(f"{error}; --help lists the options.") from error
    # Log tokens/s (train_tokens_per_second, since the start). To count tokens, the Trainer waits for the GPU once per
    # micro-batch.
    args.include_num_input_tokens_seen = "all"

    dtype = getattr(torch, options.weights_dtype)
    with loading("--model_name", options.model_name):
        tokenizer = AutoTokenizer.from_pretrained(options.model_name)
        if options.random_init or options.model_name == str(MODEL_DIR):
            torch.manual_seed(args.seed)
            with args.device:  # on the CPU, random billions of weights take minutes
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model_name), dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(options.model_name, dtype=dtype)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    with loading("--dataset_name", f"{options.dataset_name} --split_name {options.split_name}"):
        if options.dataset_name.endswith((".jsonl", ".json")):
            rows = load_dataset("json", data_files=options.dataset_name, split=options.split_name)
        else:
            rows = load_dataset(options.dataset_name, split=options.split_name)
    if missing := {"problem", "generated_solution"} - set(rows.column_names):
        raise UserError(
            f"--dataset_name {options.dataset_name} has no column {sorted(missing)[0]}; its columns are "
            f"{', '.join(rows.column_names)}."
        )
    if options.num_of_samples is not None:
        rows = rows.select(range(min(options.num_of_samples, len(rows))))

    def tokenise(row: dict[str, str]) -> dict[str, list[int]]:
        text = f"{row['problem']}\n{row['generated_solution']}{tokenizer.eos_token}"
        ids = tokenizer(text, truncation=True, max_length=options.max_seq_length)["input_ids"]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}

    train_dataset = rows.map(tokenise, remove_columns=rows.column_names)
    # fp8 matrix products need a multiple of 16 tokens. This collator pads labels with -100, so that EOS stays a label
    # even if it is also the padding token.
    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=16)
    with launching():
        trainer = Trainer(
            model, args, collator, train_dataset, processing_class=tokenizer, callbacks=[CertificateCallback()]
        )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if torch.cuda.is_available():
        trainer.log({"peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30})
    trainer.save_state()  # trainer_state.json contains the logged metrics
    if args.save_strategy != "no":
        trainer.save_model()
    return 0


if __name__ == "__main__":
    run_script(main)
