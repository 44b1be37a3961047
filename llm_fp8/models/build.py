"""From a config to a `Model` without weights: choose the attention, build the modules, leave out towers; sizes.

There are two decoders: Hugging Face's own, and the same model with TE decoder layers (te_llama.py). Both are built with
parameters on "meta", sharded or not, given memory, and filled tensor by tensor (fill.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel

import te_llama
from llm_fp8.config.options import ModelConfig
from llm_fp8.models.experts import expert_weights, routed_modules
from llm_fp8.models.model import Model, text_decoder
from llm_fp8.models.source import reading_model, text_config
from llm_fp8.models.weights import StoredCheckpoint
from llm_fp8.observability.metrics import DecoderSize
from llm_fp8.utils.hf_internals import supports_flash_attention
from llm_fp8.utils.packages import FLASH_ATTENTION_2, package_version


def choose_attention(
    requested: str, hf_config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The attention of the Hugging Face decoder; None is transformers' choice. `auto` takes flash-attn on a GPU where
    it is installed and the model has it.
    """
    if requested == "flash_attention_2":
        FLASH_ATTENTION_2.require("--attn_implementation flash_attention_2")
    if requested != "auto":
        return requested
    installed = package_version(FLASH_ATTENTION_2.name) is not None
    on_gpu = device.type == "cuda" and dtype != torch.float32
    has_flash = on_gpu and installed and supports_flash_attention(auto_class(hf_config), hf_config)
    return "flash_attention_2" if has_flash else None


def build_structure(
    options: ModelConfig,
    hf_config: PretrainedConfig,
    stored: StoredCheckpoint | None = None,
    *,
    parameter_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    unfused_mlp: bool = False,
    te_on_meta: bool = True,
    full_tensor: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Model:
    """The model of the weights `stored` with parameters on "meta" and buffers on `device`; `llm_fp8.models.fill` gives
    it values. For `unfused_mlp` see `te_llama.LayerSpec`, for `full_tensor` see `Model`.
    """
    requested = "sdpa" if options.use_te else options.attn_implementation
    attention = choose_attention(requested, hf_config, device, compute_dtype)
    with init_empty_weights(include_buffers=False), torch.device("cpu" if options.use_te else device):
        model = model_from_config(hf_config, dtype=parameter_dtype, attn_implementation=attention)
    if options.use_te:
        shared: dict[str, Any] = {"table_device": device, "unfused_mlp": unfused_mlp, "model": model.module}
        te_llama.build_te_model(hf_config, parameter_dtype, "meta" if te_on_meta else device, **shared)
    else:
        model.module.tie_weights()  # undone by `init_empty_weights`
    return replace(model, stored=stored, full_tensor=full_tensor)


def model_from_config(hf_config: PretrainedConfig, **options: Any) -> Model:
    """The Hugging Face model of `hf_config`, or the part of a multimodal one that text passes through."""
    with reading_model(f"causal language model of type '{hf_config.model_type}'", hf_config.name_or_path or ""):
        module = auto_class(hf_config).from_config(hf_config, trust_remote_code=False, **options)
        return without_towers(module) if is_multimodal(hf_config) else Model(module)


def is_multimodal(hf_config: PretrainedConfig) -> bool:
    """True where the checkpoint holds more than a language model: a tower for images or sound, and what joins them."""
    return text_config(hf_config) is not hf_config


def auto_class(hf_config: PretrainedConfig) -> Any:
    """transformers' class that reads the whole checkpoint."""
    return AutoModelForMultimodalLM if is_multimodal(hf_config) else AutoModelForCausalLM


def without_towers(model: PreTrainedModel) -> Model:
    """Take out of `model` all but the parts that text passes through, decoder and lm_head, whose tensors keep their
    names.
    """
    decoder, head = text_decoder(model), model.get_output_embeddings()
    text_parts = {module for part in (decoder, head) if part is not None for module in part.modules()}
    left_out: list[str] = []
    for prefix, module in list(model.named_modules()):
        if module in text_parts or text_parts.isdisjoint(module.modules()):
            continue
        children = [(name, child) for name, child in module.named_children() if text_parts.isdisjoint(child.modules())]
        towers = [name for name, child in children if child.state_dict()]  # without weights it may act on the logits
        for name in [*towers, *(name for name, _ in module.named_parameters(recurse=False))]:
            setattr(module, name, None)
            left_out.append(f"{prefix}.{name}".lstrip("."))
    return Model(model, left_out=tuple(left_out))


def count_parameters(hf_config: PretrainedConfig) -> int:
    """The number of parameters of the model of `hf_config`, tied ones once."""
    return sum(parameter.numel() for parameter in model_on_meta(hf_config).module.parameters())


def model_on_meta(hf_config: PretrainedConfig) -> Model:
    """The Hugging Face model of `hf_config` without memory."""
    with torch.device("meta"):
        return model_from_config(copy.deepcopy(hf_config))  # which building would change


def decoder_size(hf_config: PretrainedConfig, num_adapter_parameters: int = 0) -> DecoderSize:
    """The dimensions of a decoder of any architecture: of a mixture of experts the weights that compute a token, of a
    hybrid the layers with attention.
    """
    model, decoder = model_on_meta(hf_config), text_config(hf_config)
    routed, num_linear = routed_modules(model.module), 0.0
    for module in model.module.modules():
        weight = None if isinstance(module, nn.Embedding) else getattr(module, "weight", None)
        matrices = [weight] if isinstance(weight, nn.Parameter) and weight.dim() == 2 else expert_weights(module)
        share = routed[module].share if module in routed else 1.0
        num_linear += share * sum(matrix.numel() for matrix in matrices)
    kinds = getattr(decoder, "layer_types", None) or getattr(decoder, "layers_block_type", None)
    kinds = kinds or ["attention"] * len(model.layers)
    has_attention = [kind == "hybrid" or ("attention" in kind and "linear" not in kind) for kind in kinds]
    configs = getattr(decoder, "per_layer_config", None) or [decoder] * len(kinds)
    widths = [attention_width(config) for config, has in zip(configs, has_attention, strict=False) if has]
    width = sum(widths) // max(1, len(widths))
    return DecoderSize(round(num_linear), len(widths), width, num_adapter_parameters)


def read_by_kernels(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of Mamba's mixers, by name, whose weight fused kernels read while training without calling
    them: the output, and two more in Mamba 1. An adapter or an fp8 GEMM in their place would not run.
    """
    return {
        f"{prefix}.{name}": child
        for prefix, mixer in model.named_modules()
        if hasattr(mixer, "A_log") and hasattr(mixer, "D")
        for name, child in mixer.named_children()
        if name.startswith(("out_proj", "dt_proj", "x_proj"))
    }


def attention_width(layer: Any) -> int:
    """Heads times elements of a head, by the config of a layer; 0 where it has no heads."""
    num_heads = getattr(layer, "num_attention_heads", 0)
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // max(1, num_heads)
    if (key_dim := getattr(layer, "qk_head_dim", None)) and (value_dim := getattr(layer, "v_head_dim", None)):
        head_dim = (key_dim + value_dim) // 2  # latent attention, whose `head_dim` is that of the rotated part
    return num_heads * head_dim
