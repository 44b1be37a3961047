"""Build a `Model` from a config: choose attention, build modules, remove those not for text, read or draw weights.

There are two decoders: Hugging Face's, and the same model with TE decoder layers (te_llama.py). Both are built with
parameters on "meta" and sharded if required. Then memory is allocated and filled tensor by tensor.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.types import Device
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel

import te_llama
from llm_fp8.config.options import ModelConfig
from llm_fp8.models.experts import expert_weights, routed_modules
from llm_fp8.models.model import Model, saved_tensors, text_decoder
from llm_fp8.models.source import StoredCheckpoint, open_weights, reading_model, text_config
from llm_fp8.observability.metrics import DecoderSize
from llm_fp8.optim.adamw_master import give_remainder_, remainder_of, split_master
from llm_fp8.utils.packages import OptionalPackage
from llm_fp8.utils.torch_internals import give_memory_, local_of, materialize_
from te_llama import Part, UnsupportedArchitecture

_SMALL = 2**18  # elements; smaller tensors have memory while random calls are recorded, as Mamba's A_log needs values
_Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def choose_attention(choice: str) -> str | None:
    """Return transformers' attn_implementation for --attn_implementation `choice`, or None for its default."""
    if choice == "flash_attention_2":
        package = OptionalPackage("flash-attn", "flash_attn", "pip install --no-build-isolation flash-attn")
        package.require(f"--attn_implementation {choice}")
    return None if choice == "auto" else choice


def build_structure(
    options: ModelConfig,
    hf_config: PretrainedConfig,
    stored: StoredCheckpoint | None = None,
    *,
    parameter_dtype: torch.dtype,
    device: torch.device,
    unfused_mlp: bool = False,
    full_tensor: Callable[[Tensor], Tensor] = Tensor.detach,
) -> Model:
    """Build the model with parameters on "meta" and buffers on `device`. `te_llama.LayerSpec` and `Model` say more."""
    attention = "sdpa" if options.use_te else choose_attention(options.attn_implementation)
    with init_empty_weights(include_buffers=False), torch.device("cpu" if options.use_te else device):
        model = model_from_config(hf_config, dtype=parameter_dtype, attn_implementation=attention)
    if options.use_te:
        shared: dict[str, Any] = {"table_device": device, "unfused_mlp": unfused_mlp, "model": model.module}
        te_llama.build_te_model(hf_config, parameter_dtype, "meta", **shared)
    else:
        model.module.tie_weights()  # undone by `init_empty_weights`
    return replace(model, stored=stored, full_tensor=full_tensor)


def allocate_and_fill(model: Model, device: torch.device, seed: int = 0, keep_lower_bits: bool = False) -> None:
    """Allocate memory on `device` for a model of `build_structure` that is not sharded. Then call `fill_weights`."""
    materialize_(model.module, device, device)
    model.module.tie_weights()  # undone by moving
    fill_weights(model, device, seed, keep_lower_bits)


def fill_weights(model: Model, device: Device = "cpu", seed: int = 0, keep_lower_bits: bool = False) -> None:
    """Fill the parameters (or this rank's shards), which must have memory, with the stored weights. If the model has no
    stored weights, draw random ones on `device` with `seed`; they are equal for every world size. Raise `UserError`
    naming file and tensor if a stored tensor does not match the model. With `keep_lower_bits`, each bf16 parameter gets
    a remainder, which stores the lower bits of an fp32 weight (`llm_fp8.optim.adamw_master`).
    """
    if keep_lower_bits and model.stored is not None:
        for parameter in model.module.parameters():
            if parameter.dtype == torch.bfloat16:
                give_remainder_(parameter)
    for _ in filled_layers(model, (), device, seed):
        pass


def filled_layers(model: Model, layers: Iterable[nn.Module], device: Device, seed: int) -> Iterator[nn.Module]:
    """Fill `model` like `fill_weights`, and yield each of `layers` once it is filled. A layer's memory is allocated
    just before, so the caller can cast or free a layer before the next is allocated. Other tensors must have memory.
    """
    tensors = saved_tensors(model.module)
    owners = {id(parameter): layer for layer in layers for parameter in layer.parameters()}
    if model.stored:
        fill: Any = functools.partial(read_into, model.stored, model.targets)
    else:
        fill = RandomWeights(model, torch.Generator(device=device).manual_seed(seed)).fill
    for layer, names in itertools.groupby(tensors, lambda name: owners.get(id(tensors[name]))):
        group = {name: tensors[name] for name in names}
        for tensor in group.values() if layer is not None else ():
            give_memory_(tensor)
        fill(group)
        if layer is not None:
            yield layer


def model_from_config(hf_config: PretrainedConfig, **options: Any) -> Model:
    """Build the Hugging Face model by `from_config(**options)`. If it is multimodal, keep only its language model."""
    with reading_model(f"causal language model of type '{hf_config.model_type}'", hf_config.name_or_path or ""):
        module = auto_class(hf_config).from_config(hf_config, trust_remote_code=False, **options)
        return without_towers(module) if is_multimodal(hf_config) else Model(module)


def is_multimodal(hf_config: PretrainedConfig) -> bool:
    """Return True if the checkpoint has more than a language model, for example an image encoder."""
    return text_config(hf_config) is not hf_config


def auto_class(hf_config: PretrainedConfig) -> Any:
    """Return the auto class of transformers that loads the whole checkpoint."""
    return AutoModelForMultimodalLM if is_multimodal(hf_config) else AutoModelForCausalLM


def without_towers(model: PreTrainedModel) -> Model:
    """Remove all modules that have weights, except decoder and lm_head, from `model`. Return it as a `Model`."""
    decoder, head = text_decoder(model), model.get_output_embeddings()
    text_parts = {module for part in (decoder, head) if part is not None for module in part.modules()}
    left_out: list[str] = []
    for prefix, module in list(model.named_modules()):
        if module in text_parts or text_parts.isdisjoint(module.modules()):
            continue
        children = [(name, child) for name, child in module.named_children() if text_parts.isdisjoint(child.modules())]
        towers = [name for name, child in children if child.state_dict()]  # modules without weights may change logits
        for name in [*towers, *(name for name, _ in module.named_parameters(recurse=False))]:
            setattr(module, name, None)
            left_out.append(f"{prefix}.{name}".lstrip("."))
    return Model(model, left_out=tuple(left_out))


def count_parameters(hf_config: PretrainedConfig) -> int:
    """Return the number of parameters of the model of `hf_config`. Tied parameters count once."""
    return sum(parameter.numel() for parameter in model_on_meta(hf_config).module.parameters())


def model_on_meta(hf_config: PretrainedConfig) -> Model:
    """Build the Hugging Face model of `hf_config` on "meta"."""
    with torch.device("meta"):
        return model_from_config(copy.deepcopy(hf_config))  # `from_config` changes the config


def decoder_size(hf_config: PretrainedConfig, num_adapter_parameters: int = 0) -> DecoderSize:
    """Return the decoder's sizes that determine FLOPs. Not counted: experts that a token does not use, recurrences."""
    model, decoder = model_on_meta(hf_config), text_config(hf_config)
    routed, num_linear = routed_modules(model.module), 0.0
    for module in model.module.modules():
        weight = None if isinstance(module, nn.Embedding) else getattr(module, "weight", None)
        matrices = [weight] if isinstance(weight, nn.Parameter) and weight.dim() == 2 else expert_weights(module)
        share = routed[module].share if module in routed else 1.0
        num_linear += share * sum(matrix.numel() for matrix in matrices)
    types = getattr(decoder, "layer_types", None) or getattr(decoder, "layers_block_type", None)
    types = types or ["attention"] * len(model.layers)
    has_attention = [name == "hybrid" or ("attention" in name and "linear" not in name) for name in types]
    configs = getattr(decoder, "per_layer_config", None) or [decoder] * len(types)
    widths = [attention_width(config) for config, has in zip(configs, has_attention, strict=False) if has]
    return DecoderSize(round(num_linear), len(widths), sum(widths) // max(1, len(widths)), num_adapter_parameters)


def read_by_kernels(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module of the linear layers in Mamba's mixers whose weights are read by fused kernels: the output
    projection and, in Mamba 1, two more. These layers are not called, so adapters or fp8 modules would have no effect.
    """
    return {
        f"{prefix}.{name}": child
        for prefix, mixer in model.named_modules()
        if hasattr(mixer, "A_log") and hasattr(mixer, "D")
        for name, child in mixer.named_children()
        if name.startswith(("out_proj", "dt_proj", "x_proj"))
    }


def attention_width(layer: Any) -> int:
    """Return num_heads * head_dim for `layer`, the config of a layer, or 0 if the layer has no attention heads."""
    num_heads = getattr(layer, "num_attention_heads", 0)
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // max(1, num_heads)
    if (key_dim := getattr(layer, "qk_head_dim", None)) and (value_dim := getattr(layer, "v_head_dim", None)):
        head_dim = (key_dim + value_dim) // 2  # in latent attention, `head_dim` is only the rotated part
    return num_heads * head_dim


def read_into(stored: StoredCheckpoint, targets: Mapping[str, tuple[str, Part]], tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` (this rank's shards, by name) from the stored weights. For `targets` see `Model.targets`."""
    wanted = {name for name, (owner, _) in targets.items() if owner in tensors}
    device = next(iter(tensors.values())).device
    for path in dict.fromkeys(stored.stored[name].path for name in targets if name in wanted):
        with open_weights(path, device) as file:
            for name in filter(wanted.__contains__, file.offset_keys()):
                owner, part = targets[name]
                local_shard(tensors[owner]).fill(part, stored.rows(name, file, device))


@dataclass(frozen=True)
class LocalShard:
    """A shard along dim 0: `data` [n, ...] are rows `start` to `start + n` of a parameter. n may be 0."""

    data: Tensor
    start: int
    remainder: Tensor | None = None  # int16 [n, ...], to be filled with the lower bits of fp32 weights

    def fill(self, part: Part, rows: Any) -> None:
        """Copy to `data` those rows of a Hugging Face tensor that lie in this shard, cast to its dtype. `part` is the
        tensor's position in the parameter, and `rows[a:b]` reads rows a to b of the tensor.
        """
        first, last = max(part.start, self.start), min(part.stop, self.start + len(self.data))
        if first >= last:
            return
        wanted = slice(first - part.start, last - part.start) if part.by_rows else slice(None)
        values = rows[wanted] if part.shape else torch.atleast_1d(rows[...])
        if self.data.is_floating_point() and not values.is_floating_point():
            raise UnsupportedArchitecture(f"'{part.hf_name}' is {values.dtype} in the checkpoint instead of floats")
        overlap = slice(first - self.start, last - self.start)
        if self.data.dtype == torch.bfloat16 and values.dtype in (torch.float32, torch.float16):
            values, remainder = split_master(values.to(self.data.device, torch.float32))
            if self.remainder is not None:
                part.view(self.remainder[overlap]).copy_(remainder)
        part.view(self.data[overlap]).copy_(values)


def local_shard(tensor: Tensor) -> LocalShard:
    """Return this rank's rows of `tensor` as a view: all rows of a plain tensor, or a DTensor's dim-0 shard. FSDP gives
    each of n ranks ceil(R / n) of R rows, and the last ranks fewer or none. A 0-d tensor has one row.
    """
    remainder, start = remainder_of(tensor), 0
    if not isinstance(tensor, DTensor):
        return LocalShard(torch.atleast_1d(tensor.detach()), start, remainder)
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            rows_per_rank = -(-tensor.shape[0] // tensor.device_mesh.size(dim))
            start = min(tensor.device_mesh.get_local_rank(dim) * rows_per_rank, tensor.shape[0])
    return LocalShard(local_of(tensor).detach(), start, None if remainder is None else local_of(remainder))


class RandomWeights(TorchFunctionMode):
    """Random initial weights with the distributions of transformers' `_init_weights` for the architecture.

    `_init_weights` runs once in this mode on a model without memory, and the mode records the calls for each parameter.
    `fill` draws a whole parameter on the generator's device and copies this rank's shard, so sharding alters no weight.
    Parameters that `_init_weights` skips are set as in Llama: biases 0, other vectors 1, matrices normal.
    """

    def __init__(self, model: Model, generator: torch.Generator) -> None:
        super().__init__()
        self._generator, self._recorded, self._calls = generator, dict[int, list[_Call]](), dict[str, list[_Call]]()
        std = getattr(text_config(model.module.config), "initializer_range", 0.02)
        structure = model_on_meta(model.module.config).module
        for module in structure.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.numel() < _SMALL:
                    setattr(module, name, nn.Parameter(torch.zeros(parameter.shape)))
        with torch.random.fork_rng(devices=[]), self:
            torch.manual_seed(generator.initial_seed())
            structure.initialize_weights()
        for name, parameter in structure.named_parameters():
            default: _Call = (Tensor.normal_, (0.0, std), {"generator": generator})
            if parameter.ndim < 2 or name.endswith("bias"):
                default = Tensor.fill_, (0.0 if name.endswith("bias") else 1.0,), {}
            self._calls[name] = self._recorded.get(id(parameter)) or [default]
        self._hf_names = {name: parts[0].hf_name for name, parts in te_llama.parameter_map(model.module).items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        target, *others = args or [options.pop("tensor", None)]  # torch.nn.init passes the tensor by keyword
        if isinstance(target, nn.Parameter) and name.endswith("_") and not name.startswith("_"):  # in place
            if name in ("normal_", "uniform_") or "generator" in options:
                options["generator"] = self._generator
            if "generator" in options or name in ("zero_", "fill_", "constant_", "copy_"):
                self._recorded[id(target)] = []  # this call overwrites earlier results, as for a tied matrix
            if not any(getattr(value, "is_meta", False) for value in others):
                self._recorded.setdefault(id(target), []).append((func, tuple(others), options))
        return func(*args, **(kwargs or {}))

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the parameters in `tensors` with random weights (names as in `saved_tensors`). Skip other tensors."""
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                continue
            full = torch.empty(tensor.shape or 1, dtype=tensor.dtype, device=self._generator.device)
            for function, args, options in self._calls[self._hf_names.get(name, name)]:
                function(full, *args, **options)
            shard = local_shard(tensor)
            shard.data.copy_(full[shard.start : shard.start + len(shard.data)])
