"""Exact match of a model on disk, on the held-out problems of the run that made it, or of any dataset.

    result = evaluate_exact_match_folder(Path("runs/x/final"), num_problems=500)
    result.share, result.interval(), result.answers

Which problems are held out is decided as in training, by `prepare_data` from the run's own options, so that none of
them was trained on. Models evaluated with the same options answer the same problems. A PEFT adapter is merged into its
base model (`load_merged`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from llm_fp8.config.options import Config, DataConfig, ModelConfig, RunConfig
from llm_fp8.config.validation import check_options
from llm_fp8.data import prepare_data
from llm_fp8.distributed.process_group import own_device
from llm_fp8.models.build import build_model
from llm_fp8.models.lora import require_peft
from llm_fp8.models.source import (
    ModelSource,
    is_adapter_folder,
    load_config,
    load_tokenizer,
    resolve_source,
    stored_dtype,
)
from llm_fp8.models.weights import open_weights
from llm_fp8.train.exact_match import ExactMatchResult, answer_problems, encode_problems
from llm_fp8.train.generate import check_positions, generation_dtype
from llm_fp8.utils.errors import UserError, listed
from llm_fp8.utils.json_files import read_json, require_entries

_OF_THE_DATASET = (
    *("dataset_weights", "columns", "split_name", "num_of_samples", "eval_dataset_name"),
    *("validation_split_name", "validation_fraction"),
)
"""Recorded options that say nothing of another --dataset_name."""
_OF_THE_EVALUATION = ("validation_split_name", "validation_fraction")
"""And of another --eval_dataset_name."""
_DESCRIBED_BY = {
    "dataset_name": _OF_THE_DATASET,
    "eval_dataset_name": _OF_THE_EVALUATION,
    "validation_split_name": ("validation_fraction",),
}
"""Option -> the recorded ones that another value of it makes meaningless."""
_RECORDED: dict[str, Any] = {
    **dict.fromkeys(("config", "config.data", "config.model"), dict),
} | {
    f"config.data.{name}": (str if get_origin(hint) is Literal else hint) | None
    for name, hint in get_type_hints(DataConfig).items()
}
"""The options in run.json that are used here; a run of an earlier version may lack some."""


def run_of(model: str | Path) -> Path | None:
    """The folder of the run that exported `model`; None for a model from elsewhere."""
    parent = Path(model).resolve().parent
    return parent if Path(model).is_dir() and (parent / "run.json").is_file() else None


def data_options(model: str | Path, changes: Mapping[str, Any]) -> DataConfig:
    """The data options of the run that exported `model` (its last start), else the defaults, with `changes`. With
    another dataset or split to train or to evaluate on, the recorded options that describe the former are left out.
    """
    known = {field.name for field in dataclasses.fields(DataConfig)}
    options = {name: value for name, value in _recorded(model, "data").items() if name in known}
    for name, of_it in _DESCRIBED_BY.items():
        if name in changes and changes[name] != options.get(name):
            options = {other: value for other, value in options.items() if other not in of_it}
    # Batching changes nothing here, and rows are looked up by number.
    return DataConfig(**{**options, **changes, "batch_size": 1, "packing": False, "streaming": False})


def _recorded(model: str | Path, section: str) -> dict[str, Any]:
    """A section of options in the run.json of the run that exported `model`; empty for a model from elsewhere."""
    run = run_of(model)
    if run is None:
        return {}
    content = read_json(run / "run.json", {"resumes": list | None, "resumes.*": dict})
    last = [content, *(content.get("resumes") or [])][-1]
    require_entries(f"{run / 'run.json'}", last, _RECORDED)
    recorded: dict[str, Any] = last["config"][section]
    return recorded


def located(folder: str | Path, base: str | None) -> tuple[ModelConfig, ModelSource, PretrainedConfig]:
    """The model in `folder`, or the `base` model of the adapter there: its options, place and config.

    Raises `UserError` where there is none, which names `folder` for a base model.
    """
    options = ModelConfig(model_name=base or str(folder))
    try:
        source = resolve_source(options)
        return options, source, load_config(options, source)
    except UserError as error:
        if base is None:
            raise
        words = str(error).replace("--model_name ", "").rstrip(".")
        raise UserError(
            f"{folder}: its base model cannot be loaded ({words}); write another place of it into "
            "base_model_name_or_path of adapter_config.json, or give it to scripts/merge_adapter.py with --base_model."
        ) from error


def _refuse_run_folder(folder: str | Path) -> None:
    """Raise `UserError` for the folder of a run in place of the one of its model."""
    if (Path(folder) / "config.json").is_file() or is_adapter_folder(folder):
        return
    final = Path(folder) / "final"
    if (final / "config.json").is_file() or is_adapter_folder(final):
        raise UserError(f"--model {folder} is a run's folder, and its model is in {final}; give that.")
    if (Path(folder) / "run.json").is_file():
        raise UserError(
            f"--model {folder} is a run's folder, and there is no model in {final}: the run did not come to its end, "
            "or had --no_export."
        )


def evaluate_exact_match_folder(
    folder: str | Path,
    *,
    num_problems: int,
    max_new_tokens: int = RunConfig.eval_max_new_tokens,
    batch_size: int | None = None,
    changes: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ExactMatchResult:
    """Let a Hugging Face checkpoint answer at most `num_problems` held-out problems, on the GPU in bf16, or on the CPU
    in fp32.

    Args:
        folder: an exported folder (runs/x/final), be it a model or a PEFT adapter, another folder with either, or the
            hub id of a model.
        max_new_tokens: where an answer is cut off.
        batch_size: problems answered at a time.
        changes: fields of `DataConfig` to take instead of those of the run that made the folder.
        say: gets a line on the data and what is done.

    Raises `UserError` on a model, dataset or option that cannot be used, and where the GPU's memory is not enough.
    """
    base = base_of(folder)
    _refuse_run_folder(folder)
    options, source, hf_config = located(folder, base)
    if source.architecture_only:
        raise UserError(
            f"--model_name {folder} has no weights that could be evaluated; give a folder with a trained model."
        )
    device = own_device()
    config = Config(
        model=options,
        data=data_options(folder, changes or {}),
        run=RunConfig(eval_exact_match=num_problems, eval_max_new_tokens=max_new_tokens),
    )
    check_options(config)
    tokenizer, _ = load_tokenizer(options, source)
    data = prepare_data(config, tokenizer, of_a_stream=_recorded(folder, "data").get("streaming", False))
    say(data.description)
    if not data.problems:
        raise UserError("--validation_fraction: no row is held out, so there is nothing to evaluate on; raise it.")
    if len(data.problems) < num_problems:
        say(f"  {num_problems} problems were asked for, and {len(data.problems)} are held out: all are answered")
    check_positions(encode_problems(data.problems, tokenizer), hf_config, max_new_tokens, "--max_new_tokens")
    dtype = generation_dtype(device)
    # Loaded on the CPU, where `copy_for_generation` too has its buffers computed.
    cpu = torch.device("cpu")
    if base is not None:
        model = load_merged(folder, base, cpu, dtype)
    else:
        model, _ = build_model(options, source, hf_config, parameter_dtype=dtype, compute_dtype=dtype, device=cpu)
    say(f"answering {len(data.problems)} problems in {str(dtype).removeprefix('torch.')} on {device}")
    model.eval()
    try:
        nn.Module.to(model, device)
        return answer_problems(model, tokenizer, data.problems, max_new_tokens, batch_size)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the GPU is out of memory with --max_new_tokens {max_new_tokens}"
            f"{f' and --batch_size {batch_size}' if batch_size else ''}; lower it, or give a smaller --batch_size."
        ) from error


def base_of(folder: str | Path) -> str | None:
    """The name of the base model of the adapter in `folder`, a hub id or a folder; None where there is no adapter."""
    if not is_adapter_folder(folder):
        return None
    path = Path(folder) / "adapter_config.json"
    base: str | None = read_json(path, {"base_model_name_or_path": str | None}).get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"{path} does not say which model the adapter belongs to; write its name into base_model_name_or_path."
        )
    return base


def _is_sound(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.float().isfinite().all())


def load_merged(
    folder: str | Path, base: str, device: torch.device, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The base model with the adapter in `folder` added to its weights, of `dtype` (default: that of the base model's
    files).

    Raises `UserError` where either cannot be read or they do not belong together.
    """
    require_peft(f"{folder}")
    from peft import PeftModel, get_peft_model_state_dict

    weights = Path(folder) / "adapter_model.safetensors"
    if not weights.is_file():  # PEFT would take a pickle in its place
        raise UserError(f"{folder} has no {weights.name}, so there is no adapter to add; export it again.")
    options, source, hf_config = located(folder, base)
    dtype = dtype or stored_dtype(hf_config, default=torch.float32)
    model, loaded = build_model(options, source, hf_config, parameter_dtype=dtype, compute_dtype=dtype, device=device)
    if not loaded:
        raise UserError(
            f"{folder}: its base model {base} has no weights; put the trained one's name into base_model_name_or_path "
            "of adapter_config.json."
        )
    with open_weights(weights, device) as tensors:
        stored = set(tensors.keys())
        unsound = [name for name in stored if not _is_sound(tensors.get_tensor(name))]
    if unsound:
        raise UserError(
            f"{weights} holds whole numbers or values that are not finite in {listed(sorted(unsound))}; export it "
            "again."
        )
    try:
        with warnings.catch_warnings():
            # PEFT's use of transformers.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            # Its matrices become fp32, so that the sum is rounded once.
            adapted = PeftModel.from_pretrained(model, str(folder))
        # PEFT leaves a missing tensor at its initial value and passes over one that no target_modules asks for.
        expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        for words, names in (("lacks", expected - stored), ("holds, unlike the model,", stored - expected)):
            if names:
                raise UserError(
                    f"{weights} {words} {listed(sorted(names))}: it does not fit the target_modules of "
                    f"adapter_config.json and {base}; export it again."
                )
        return adapted.merge_and_unload()
    except UserError:
        raise
    except Exception as error:  # PEFT checks neither types nor names in its file
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{folder}: the adapter cannot be put on {base} ({first_line}); export it again, or name its own base "
            "model."
        ) from error
