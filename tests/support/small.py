"""Writes tiny models (about ten thousand weights) and small datasets, trains with them, and reads what runs write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from llm_fp8.config.options import Config, ModelConfig, PrecisionConfig
from llm_fp8.config.parser import parse_launch
from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.models.build import allocate_and_fill, build_structure
from llm_fp8.models.model import Model
from llm_fp8.models.source import EMBEDDED_MODEL, checkpoint_of, load_config, resolve_source
from llm_fp8.precision.context import with_recipe
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.run.run import run_training
from llm_fp8.settle.machine import Machine, detect_machine
from llm_fp8.settle.settle import resolve_precision
from llm_fp8.tools.dry_run import dry_run
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.documented_metrics import records

LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8, factor=4.0)
LONGROPE |= dict(original_max_position_embeddings=64, short_mscale=1.1, long_mscale=1.3)


def tiny_config(model_type: str = "llama", **changes: Any) -> PretrainedConfig:
    """Return a config with two layers, hidden size 32 and a vocabulary of 1,024 tokens, updated by `changes`."""
    entries: dict[str, Any] = dict(
        vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return AutoConfig.for_model(model_type, **{**entries, **changes})


def write_model(folder: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: Any) -> str:
    """Write a tiny model in the hub's layout, with the same random weights in each call and with a tokenizer. Return
    the folder. `changes` are arguments of `tiny_config`.
    """
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)  # with gains of 1, a lost or decayed norm would go unnoticed
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return str(folder)


def built_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 3, **options: Any) -> Model:
    """Return the model of --model_name `name`, built as in a run of one process. `options` are `ModelConfig` fields."""
    model = model_structure(name, dtype, **options)
    allocate_and_fill(model, torch.device("cpu"), seed)
    return model


def model_structure(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """Return the model of --model_name `name` on the meta device, without weights, as a sharded run first builds it."""
    config = ModelConfig(model_name=name, **options)
    source = resolve_source(config)
    hf_config = load_config(source)
    stored = checkpoint_of(source, hf_config)
    return build_structure(config, hf_config, stored, parameter_dtype=dtype, device=torch.device("cpu"))


def precision_on(options: PrecisionConfig, device: torch.device) -> PrecisionPlan:
    machine = detect_machine(Config(precision=options), LaunchRanks()) if device.type == "cuda" else Machine()
    return with_recipe(resolve_precision(Config(precision=options), machine), options, device)


def write_rows(path: Path, num_rows: int) -> str:
    """Write `num_rows` short rows of the dataset inside the package to the jsonl file `path`. Return the path."""
    lines = (DATASET_DIR / "data" / "train-00000-of-00004.jsonl").read_text().splitlines()
    path.write_text("".join(line + "\n" for line in [line for line in lines if len(line) < 400][:num_rows]))
    return str(path)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write `rows` to the jsonl file `path`, creating the file's folder. Return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reset_accelerator() -> None:
    """Reset Accelerate's global state, so that the next training in this process may use another precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()  # after a training that failed in the middle of a step


def train(*options: object, parallel: bool = False) -> int:
    """Train in this process as train_fp8.py or, if `parallel`, train_multi_gpu.py would. Return the exit code."""
    reset_accelerator()
    config = parse_launch([str(option) for option in options], os.environ, parallel=parallel)
    return dry_run(config) if config.run.dry_run else run_training(config)


def length_config(length: int) -> Config:
    """Return a `Config` of default options, except that --max_seq_length is `length`."""
    return Config().with_options(max_seq_length=length)


def short_run(model: object, rows: object, folder: Path, *more: object) -> list[str]:
    """Return the options of a run without evaluation and with 256 tokens per row, followed by `more`."""
    options = f"--model_name={model} --dataset_name={rows} --output_dir={folder} --validation_fraction=0"
    return [*options.split(), "--max_seq_length=256", "--log_every=1", *map(str, more)]


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the records of optimizer steps from a run folder's metrics.jsonl, without those of evaluations."""
    return [record for record in records(folder) if "loss" in record]


def run_json(folder: Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "run.json").read_text())


def summary_json(folder: Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "summary.json").read_text())


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "final" / "model.safetensors")


CARD = {"base model": "a/b", "optimizer steps": 0}
"""Facts for the model card of an export."""


def stored_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of all safetensors files in a folder."""
    return {
        name: tensor for path in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Check that the names, dtypes and values of two groups of tensors are equal."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def assert_same_continuation(uninterrupted: Path, resumed: Path, completed: int) -> None:
    """Check that a run resumed after `completed` steps has bitwise the losses and weights of an uninterrupted run."""
    assert [step["step"] for step in steps(resumed)] == [step["step"] for step in steps(uninterrupted)][completed:]
    assert [step["loss"] for step in steps(resumed)] == [step["loss"] for step in steps(uninterrupted)][completed:]
    assert_same_bits(final_weights(uninterrupted), final_weights(resumed))
