"""The same random weights for every arm of a benchmark, whatever its modules are called and however it is split.

Each Hugging Face tensor is drawn in bf16 from a seed of its own, made from its name. So arms start from equal models, and their first losses
show whether they compute the same thing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

import te_llama
from llm_fp8.adapter_names import is_adapter, name_without_adapter
from llm_fp8.shards import row_block


def draw_weights_(model: PreTrainedModel, device: torch.device, *, is_te: bool) -> None:
    """Fill `model` in place: a Hugging Face model, or one of `te_llama` (`is_te`); of a split one this process's rows.

    Adapters keep the values that they have. A tensor is drawn whole on `device`, one in memory at a time. The distribution is that of `te_llama.random_`.
    """
    std = getattr(model.config, "initializer_range", 0.02)
    if not is_te:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_adapter(name):
                    continue
                block = row_block(parameter)
                whole = _drawn(name_without_adapter(name), parameter.shape, std, device)
                block.data.copy_(whole[block.start : block.start + len(block.data)])
        return
    spec = te_llama.spec_of(model)
    blocks = {name: row_block(parameter) for name, parameter in te_llama.te_parameters(model).items()}
    filler = te_llama.WeightFiller(spec, blocks)
    for parts in te_llama.parameter_map(spec).values():
        for part in parts:
            filler.fill(part.hf_name, _drawn(part.hf_name, part.shape, std, device))
    filler.finish()


def _drawn(hf_name: str, shape: Sequence[int], std: float, device: torch.device) -> Tensor:
    whole = torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)
    te_llama.random_(whole, hf_name, std, torch.Generator(device=device).manual_seed(zlib.crc32(hf_name.encode())))
    return whole
