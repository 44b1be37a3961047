"""Weights into a model: read from its files, or drawn as its architecture draws them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.types import Device
from transformers import PretrainedConfig

import te_llama
from llm_fp8.config.options import ModelConfig
from llm_fp8.models.build import build_structure, model_on_meta
from llm_fp8.models.model import Model, saved_tensors
from llm_fp8.models.source import text_config
from llm_fp8.models.weights import StoredCheckpoint, local_shard
from llm_fp8.optim.adamw_master import give_remainder_
from llm_fp8.utils.torch_internals import give_memory_, materialize_

_SMALL = 2**18  # elements: below it a tensor has memory while draws are recorded, as those of Mamba's A_log need
_Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def build_model(
    options: ModelConfig,
    hf_config: PretrainedConfig,
    stored: StoredCheckpoint | None,
    *,
    device: torch.device,
    seed: int = 0,
    keep_lower_bits: bool = False,
    **structure: Any,
) -> Model:
    """The model on `device` with the weights `stored`, or without them random ones; for `structure` see
    `build_structure`. `keep_lower_bits`: bf16 parameters keep what stored fp32 or fp16 weights have beyond bf16, in
    remainders for `llm_fp8.optim.adamw_master`.
    """
    model = build_structure(options, hf_config, stored, device=device, te_on_meta=False, **structure)
    if not options.use_te:
        materialize_(model.module, device, device)
        model.module.tie_weights()  # undone by moving
    fill_weights(model, device, seed, keep_lower_bits)
    return model


def fill_weights(model: Model, device: Device = "cpu", seed: int = 0, keep_lower_bits: bool = False) -> None:
    """Give a model whose parameters have memory its weights, of sharded parameters this rank's shards. Without stored
    ones they are drawn on `device` from `seed`, the same for every world size. For `keep_lower_bits` see `build_model`.
    Raises `UserError` naming file and tensor that do not fit.
    """
    if keep_lower_bits and model.stored is not None:
        for parameter in model.module.parameters():
            if parameter.dtype == torch.bfloat16:
                give_remainder_(parameter)
    for _ in filled_layers(model, (), device, seed):
        pass


def filled_layers(model: Model, layers: Iterable[nn.Module], device: Device, seed: int) -> Iterator[nn.Module]:
    """Load one decoder layer at a time: allocate it where it has no memory, fill it, yield it. The caller may free or
    cast it before the next one is allocated. What lies outside of `layers` has memory and is filled in its turn.
    """
    tensors = saved_tensors(model.module)
    owners = {id(parameter): layer for layer in layers for parameter in layer.parameters()}
    drawn = None if model.stored else RandomWeights(model, torch.Generator(device=device).manual_seed(seed))
    for layer, names in itertools.groupby(tensors, lambda name: owners.get(id(tensors[name]))):
        group = {name: tensors[name] for name in names}
        for tensor in group.values() if layer is not None else ():
            give_memory_(tensor)
        if model.stored:
            model.stored.copy_into(group, model.targets)
        elif drawn:
            drawn.fill(group)
        if layer is not None:
            yield layer


class RandomWeights(TorchFunctionMode):
    """Draws parameters as transformers' `_init_weights` does for the architecture: norms, gates and decays included.

    That runs once on a model without memory, in this mode, which records its calls for each parameter. Here a parameter
    is drawn whole on the generator's device and this rank takes its shard, so that weights depend neither on the number
    of ranks nor on the split. What transformers leaves to constructors is drawn as Llama's: normal, or one, or zero.
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
            llamas: _Call = (Tensor.normal_, (0.0, std), {"generator": generator})
            if parameter.ndim < 2 or name.endswith("bias"):
                llamas = Tensor.fill_, (0.0 if name.endswith("bias") else 1.0,), {}
            self._calls[name] = self._recorded.get(id(parameter)) or [llamas]
        self._hf_names = {name: parts[0].hf_name for name, parts in te_llama.parameter_map(model.module).items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        target, *others = args or [options.pop("tensor", None)]  # as torch.nn.init passes it
        if isinstance(target, nn.Parameter) and name.endswith("_") and not name.startswith("_"):  # in place
            if name in ("normal_", "uniform_") or "generator" in options:
                options["generator"] = self._generator
            if "generator" in options or name in ("zero_", "fill_", "constant_", "copy_"):
                self._recorded[id(target)] = []  # all before is overwritten, as that of a tied matrix is
            if not any(getattr(value, "is_meta", False) for value in others):
                self._recorded.setdefault(id(target), []).append((func, tuple(others), options))
        return func(*args, **(kwargs or {}))

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Draw those `tensors` (by their names in `saved_tensors`) that are parameters."""
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                continue
            full = torch.empty(tensor.shape or 1, dtype=tensor.dtype, device=self._generator.device)
            for function, args, options in self._calls[self._hf_names.get(name, name)]:
                function(full, *args, **options)
            shard = local_shard(tensor)
            shard.data.copy_(full[shard.start : shard.start + len(shard.data)])
