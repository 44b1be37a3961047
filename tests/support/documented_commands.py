"""Collects the training commands of the documents, and of the guide that the scripts were first written for.

The module also writes a dataset folder in the layout that OpenMathInstruct-2 has on the hub.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.data.embedded import DATASET_DIR

README = Path(__file__).resolve().parents[2] / "README.md"

_WANDB = "--use_wandb --wandb_project llm-fp8 --wandb_run_name"
_MATH = "--dataset_name nvidia/OpenMathInstruct-2"

COMMANDS = {
    "llama_1b": f"python train_fp8.py --model_name meta-llama/Llama-3.2-1B {_MATH} --batch_size 12 --mixed_precision "
    f"fp8 --max_seq_length 1024 --split_name train_1M --use_te {_WANDB} llama32-1b-fp8",
    "llama_3b": f"python train_fp8.py --model_name meta-llama/Llama-3.2-3B {_MATH} --batch_size 12 --mixed_precision "
    f"fp8 --max_seq_length 1024 --split_name train_1M --use_te {_WANDB} llama32-3b-fp8",
    "llama_8b": f"python train_fp8.py --model_name meta-llama/Meta-Llama-3.1-8B {_MATH} --batch_size 8 "
    f"--mixed_precision fp8 --max_seq_length 1024 --split_name train_1M --use_te {_WANDB} llama31-8b-fp8",
    "qwen_14b": f"python train_fp8.py --model_name Qwen/Qwen2.5-14B {_MATH} --batch_size 4 --mixed_precision fp8 "
    f"--max_seq_length 1024 --split_name train_1M {_WANDB} qwen25-14b-fp8",
    "split_train": f"python train_fp8.py --model_name meta-llama/Llama-3.2-1B {_MATH} --split_name train --batch_size "
    "12 --mixed_precision fp8 --use_te",
    "split_test": f"python train_fp8.py --model_name meta-llama/Llama-3.2-1B {_MATH} --split_name test --batch_size "
    "12 --mixed_precision fp8 --use_te",
    "mxfp8": f"python train_fp8.py --model_name meta-llama/Llama-3.2-3B {_MATH} --batch_size 12 --mixed_precision fp8 "
    f"--fp8_scenario mxfp8 --max_seq_length 1024 --split_name train_1M --use_te {_WANDB} llama32-3b-mxfp8",
    "bf16": f"python train_fp8.py --model_name meta-llama/Llama-3.2-3B {_MATH} --batch_size 12 --mixed_precision bf16 "
    f"--max_seq_length 1024 --split_name train_1M {_WANDB} llama32-3b-bf16",
    "without_wandb": f"python train_fp8.py --model_name meta-llama/Llama-3.2-1B {_MATH} --batch_size 8 "
    "--mixed_precision fp8 --max_seq_length 512 --split_name train_1M --num_epochs 1 --use_te",
    "two_gpus": "torchrun --nproc_per_node=2 train_multi_gpu.py --model_name meta-llama/Llama-3.2-3B "
    f"{_MATH} --batch_size 1 --sharding_mode fsdp_full --mixed_precision fp8 --use_te --gradient_checkpointing "
    "--max_seq_length 512 --learning_rate 1e-5 --gradient_accumulation_steps 4 --empty_cache_freq 25",
}
"""Name -> a command of the guide, word for word. `split_test` names a split that the dataset does not have."""


def training_commands(document: Path) -> list[str]:
    """Return the training commands in a document, without comments. A command with an ellipsis is left out."""
    lines = document.read_text().replace("\\\n", " ").splitlines()
    start = r" *(python|torchrun( --\S+)*) train_(fp8|multi_gpu)\.py --"
    return [
        shlex.join(shlex.split(line, comments=True)) for line in lines if re.match(start, line) and "..." not in line
    ]


def script_of(command: str) -> str:
    return next(word for word in shlex.split(command) if word.startswith("train_"))


def options_of(command: str) -> list[str]:
    """Return the arguments that follow the name of the training script in a command."""
    arguments = shlex.split(command)
    return arguments[arguments.index(script_of(command)) + 1 :]


def config_of(command: str) -> Config:
    """Return the `Config` that the training script would parse from `command`."""
    script = script_of(command)
    return parse_config(options_of(command), prog=script, parallel=script == "train_multi_gpu.py")


def readme_commands() -> dict[str, str]:
    """Return the README's commands by name, except those with the same options as a command in `COMMANDS`. The name
    contains the W&B run name that the command sets or, if it sets none, the name of the script.
    """
    guide_configs = [config_of(command) for command in COMMANDS.values()]
    others = [command for command in training_commands(README) if config_of(command) not in guide_configs]
    return {f"readme_{config_of(command).run.wandb_run_name or script_of(command)}": command for command in others}


TESTED_COMMANDS = COMMANDS | readme_commands()
"""Name -> a command that the GPU tests run."""
ONE_GPU_COMMANDS = [
    name for name, command in TESTED_COMMANDS.items() if name != "split_test" and not command.startswith("torchrun")
]
TWO_GPU_COMMAND = "two_gpus"
SPLITS = ("train", "train_1M")
"""Two of the splits that OpenMathInstruct-2 has on the hub."""


def cpu_options(command: str, model: str, dataset: Path) -> list[str]:
    """Return the options of a command, changed to a local model and dataset, bf16, no TE and rows of 128 tokens."""
    options = [word for word in options_of(command) if word != "--use_te"]
    folders = [f"--model_name={model}", f"--dataset_name={dataset}"]
    return [*options, *folders, "--mixed_precision=bf16", "--fp8_scenario=default", "--max_seq_length=128"]


def write_dataset(folder: Path, num_rows: int | None = None) -> Path:
    """Write the first `num_rows` rows (default: all) of the dataset inside the package to `folder`, in the layout that
    OpenMathInstruct-2 has on the hub. Return the folder.
    """
    parts = sorted((DATASET_DIR / "data").glob("train-*.jsonl"))
    lines = [line for part in parts for line in part.read_text().splitlines()][:num_rows]
    (folder / "data").mkdir(parents=True)
    for split in SPLITS:
        (folder / "data" / f"{split}-00000-of-00001.jsonl").write_text("".join(line + "\n" for line in lines))
    entries = "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in SPLITS)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{entries}---\n")
    return folder
