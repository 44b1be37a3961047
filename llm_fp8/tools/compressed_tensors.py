"""Write an exported model in fp8 for inference, in the compressed-tensors format that vLLM and transformers load.

Every linear layer except the lm_head gets e4m3 weights with one scale per row. The library that loads the model scales
activations per token. A scale is amax / 448, in bf16 for bf16 weights, else in fp32. Weights are divided by the stored
scale, so that rounding the scale adds no error. Names and config.json follow compressed-tensors 0.20.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CHAT_TEMPLATE_DIR, SAFE_WEIGHTS_INDEX_NAME

from llm_fp8.config.options import ModelConfig
from llm_fp8.data.prepare import PreparedData
from llm_fp8.distributed.process_group import device_of_process
from llm_fp8.models.build import allocate_and_fill, build_structure, model_on_meta
from llm_fp8.models.experts import expert_weights
from llm_fp8.models.export import replaced_folder, write_weights
from llm_fp8.models.side_files import add_older_keys
from llm_fp8.models.source import checkpoint_of, finite, load_config, resolve_source, untied
from llm_fp8.tools import evaluate
from llm_fp8.utils.errors import UserError, listed
from llm_fp8.utils.hf_internals import ignored_on_load, renaming_on_load
from llm_fp8.utils.json_files import read_json

_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_COPIED = (".json", ".jinja", ".txt", ".model", ".md")  # tokenizer, generation settings, model card
_SYMMETRIC_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_LINEAR = {
    "targets": ["Linear"],
    "weights": {**_SYMMETRIC_FP8, "strategy": "channel", "dynamic": False},
    "input_activations": {**_SYMMETRIC_FP8, "strategy": "token", "dynamic": True},
    "output_activations": None,
}


def fp8_rows(values: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Quantise finite `values` [..., k] to e4m3. Return the e4m3 tensor [..., k] and one scale per row [..., 1], in
    `scale_dtype`. Their product approximates `values`. The scale of a row of zeros is 1.
    """
    wide = values.to(torch.float32)
    scale = (wide.abs().amax(dim=-1, keepdim=True) / _E4M3_MAX).to(scale_dtype)
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1)  # a subnormal scale would give infinity
    # If the scale was rounded down, the largest quotient is above 448.
    return (wide / scale.to(torch.float32)).clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return all linear layers except the lm_head, by name."""
    head = model.get_output_embeddings()
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head}


def round_inputs_(model: PreTrainedModel) -> None:
    """Make all linear layers except the lm_head round their inputs to e4m3 and back, with one scale per token."""

    def rounded(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        values, scale = fp8_rows(inputs[0])
        return (values.to(scale.dtype) * scale).to(inputs[0].dtype)

    for layer in linear_layers(model).values():
        layer.register_forward_pre_hook(rounded)


def export_fp8(folder: Path, output: Path) -> tuple[int, int]:
    """Write the model in `folder` to `output` in fp8. Return the weight files' size in bytes before and after. Raise
    `UserError` if the model cannot be read or written, is quantised, is a mixture of experts, or holds NaN or infinity.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} exists already and is not an empty folder; give a new one.")
    source = resolve_source(ModelConfig(model_name=str(folder)))
    hf_config = load_config(source)
    if getattr(hf_config, "quantization_config", None) is not None:
        raise UserError(f"{folder} is quantised already (quantization_config in config.json).")
    checkpoint = checkpoint_of(source, hf_config)
    assert checkpoint is not None, "random weights were not requested"
    hf_config, warning = untied(hf_config, checkpoint)
    unties = {} if warning is None else {"tie_word_embeddings": False}
    meta = model_on_meta(hf_config)
    model = meta.module
    layers, renamed = {f"{name}.weight" for name in linear_layers(model)}, renaming_on_load(model)
    if any(expert_weights(module) for module in model.modules()) or not layers:
        raise UserError(f"{folder} cannot be written in fp8: it has mixtures of experts or no linear layers.")
    weights = {name for name in checkpoint.stored if renamed(name) in layers}
    if missing := layers.difference(map(renamed, weights)):
        raise UserError(f"{folder}: its files lack {listed(sorted(missing))}; export it again.")
    planned = dict(_in_fp8(((name, checkpoint.on_meta(name)) for name in checkpoint.stored), weights))
    with replaced_folder(output, f"{folder} in fp8", "Make room, or give another --output.") as temporary:
        tensors = ((name, checkpoint.read(name)) for name in checkpoint.stored)
        write_weights(planned, _in_fp8(finite(tensors, str(folder)), weights), temporary)
        written = temporary.glob("*.safetensors")
        before, after = (sum(path.stat().st_size for path in paths) for paths in (checkpoint.files, written))
        for path in (*folder.iterdir(), *folder.glob(f"{CHAT_TEMPLATE_DIR}/*")):
            if path.is_file() and path.suffix in _COPIED and path.name != SAFE_WEIGHTS_INDEX_NAME:
                copy = temporary / path.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
        entries = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": _LINEAR},
            "ignore": [
                *(name for name, module in model.named_modules() if module is model.get_output_embeddings()),
                *(rf"re:(.*\.)?{name.rpartition('.')[2]}\..*" for name in meta.left_out),
                *(f"re:{p}" for p in ignored_on_load(meta.module) if any(re.search(p, n) for n in checkpoint.stored)),
            ],
        }
        config = read_json(temporary / "config.json") | unties | {"quantization_config": entries}
        add_older_keys(config)
        (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return before, after


def _in_fp8(tensors: Iterable[tuple[str, Tensor]], weights: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the pairs (name, tensor), but for each name in `weights` yield two: the fp8 values and the scales."""
    for name, tensor in tensors:
        if name not in weights:
            yield name, tensor
            continue
        values, scale = fp8_rows(tensor, torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32)
        yield name, values
        yield f"{name}_scale", scale


def eval_loss(folder: Path, data: PreparedData, round_inputs: bool = False) -> tuple[float, int, str]:
    """Evaluate the model in `folder` on the validation split of `data`, or on all rows if there is none. Return the
    mean cross entropy per supervised token, the number of these tokens, and the name of the compute dtype. If
    `round_inputs`, linear layers round their inputs to fp8 and back.
    """
    options, device = ModelConfig(model_name=str(folder)), device_of_process()
    source, dtype = resolve_source(options), torch.bfloat16 if device.type == "cuda" else torch.float32
    hf_config = load_config(source)
    stored = checkpoint_of(source, hf_config)
    hf_config, _ = untied(hf_config, stored)
    built = build_structure(options, hf_config, stored, parameter_dtype=dtype, device=device)
    allocate_and_fill(built, device)
    if round_inputs:
        round_inputs_(built.module)
    epoch = itertools.islice(data.train, data.train.steps_per_epoch)
    rows = itertools.chain.from_iterable(epoch) if data.eval is None else data.eval
    return *evaluate.eval_loss(built.module.eval(), rows), str(dtype).removeprefix("torch.")
