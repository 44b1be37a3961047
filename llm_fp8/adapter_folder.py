"""A PEFT adapter on disk, and the model that it makes of its base model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from llm_fp8.config import ModelConfig
from llm_fp8.errors import UserError
from llm_fp8.lora import require_peft
from llm_fp8.models import build_model, is_adapter_folder, load_config, resolve_source, stored_dtype


def base_of(folder: str | Path) -> str | None:
    """The name of the base model of the adapter in `folder`, a hub id or a folder; None where there is no adapter."""
    if not is_adapter_folder(folder):
        return None
    path = Path(folder) / "adapter_config.json"
    try:
        base = json.loads(path.read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not PEFT's description of an adapter ({type(error).__name__}: {error}); export it again."
        ) from error
    if not base:
        raise UserError(f"{path} does not say which model the adapter belongs to; write its name into base_model_name_or_path.")
    return str(base)


def load_merged(folder: str | Path, base: str, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The base model with the adapter in `folder` added to its weights, of `dtype` (default: that of the base model's files).

    Raises `UserError` where either cannot be read or they do not belong together.
    """
    require_peft(f"{folder}")
    from peft import PeftModel

    options = ModelConfig(model_name=base)
    try:
        source = resolve_source(options)
        hf_config = load_config(options, source)
    except UserError as error:
        words = str(error).replace("--model_name ", "").rstrip(".")
        raise UserError(
            f"{folder}: its base model cannot be loaded ({words}); write another place of it into base_model_name_or_path of adapter_config.json, or "
            "give it to scripts/merge_adapter.py with --base_model."
        ) from error
    dtype = dtype or stored_dtype(hf_config, default=torch.float32)
    model, loaded = build_model(options, source, hf_config, parameter_dtype=dtype, compute_dtype=dtype, device=device, seed=0)
    if not loaded:
        raise UserError(
            f"{folder}: its base model {base} has no weights; put the trained one's name into base_model_name_or_path of adapter_config.json."
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # PEFT's use of transformers
            adapted = PeftModel.from_pretrained(model, str(folder))  # its matrices become fp32, so that the sum is rounded once
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"{folder}: the adapter cannot be put on {base} ({first_line}); export it again, or name its own base model."
        ) from error
    return adapted.merge_and_unload()
