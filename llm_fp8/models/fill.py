"""Weights into a model: read from its files, or drawn as its architecture draws them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from llm_fp8.config.options import ModelConfig
from llm_fp8.models.build import build_structure, model_on_meta
from llm_fp8.models.layout import local_shard, parts_of, saved_tensors
from llm_fp8.models.model import Model
from llm_fp8.models.source import text_config
from llm_fp8.models.weights import StoredCheckpoint
from llm_fp8.optim.adamw_master import give_remainder_
from llm_fp8.utils.torch_internals import give_memory_, materialize_

_SMALL = 2**18  # elements: below it a tensor gets real values where its draw is worked out, as Mamba's A_log needs


def build_model(
    options: ModelConfig,
    hf_config: PretrainedConfig,
    stored: StoredCheckpoint | None,
    *,
    parameter_dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    keep_lower_bits: bool = False,
    **structure: Any,
) -> Model:
    """The model on `device` with parameters of `parameter_dtype` and the weights `stored`, or without them random ones.

    `structure` goes to `build_structure`. `keep_lower_bits`: bf16 parameters keep what stored fp32 or fp16 weights have
    beyond bf16, in remainders for `llm_fp8.optim.adamw_master`.
    """
    structure |= {"parameter_dtype": parameter_dtype, "device": device, "te_on_meta": False}
    model = build_structure(options, hf_config, stored, **structure)
    if not options.use_te:
        materialize_(model.module, device, device)
        model.module.tie_weights()  # undone by moving
    fill_weights(model, device, seed, keep_lower_bits)
    return model


def fill_weights(
    model: Model, device: torch.device | str = "cpu", seed: int = 0, keep_lower_bits: bool = False
) -> None:
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


def filled_layers(
    model: Model, layers: Iterable[nn.Module], device: torch.device | str, seed: int
) -> Iterator[nn.Module]:
    """Load one decoder layer at a time: allocate it where it has no memory, fill it, yield it. The caller may free or
    cast it before the next one is allocated. What lies outside of `layers` has memory and is filled in its turn.
    """
    tensors, draw_ = saved_tensors(model.module), None
    owners = {id(parameter): layer for layer in layers for parameter in layer.parameters()}
    if model.stored is None:
        draw_ = RandomWeights(model, torch.Generator(device=device).manual_seed(seed))
    for layer, names in itertools.groupby(tensors, lambda name: owners.get(id(tensors[name]))):
        group = {name: tensors[name] for name in names}
        for tensor in group.values() if layer is not None else ():
            give_memory_(tensor)
        if draw_ is not None:
            draw_(group)
        elif model.stored is not None:
            model.stored.copy_into(group, model.targets)
        if layer is not None:
            yield layer


class RandomWeights:
    """Draws parameters as transformers' `_init_weights` does for the architecture: norms, gates and decays included.

    Each is drawn whole on the generator's device, and this rank takes its shard, so that weights depend neither on the
    number of ranks nor on how they are split. What transformers leaves as its constructor made it is drawn as Llama's:
    normal, vectors one, biases zero.
    """

    def __init__(self, model: Model, generator: torch.Generator) -> None:
        config = model.module.config
        self._std = getattr(text_config(config), "initializer_range", 0.02)
        self._generator = generator
        self._hf_names = {name: parts[0].hf_name for name, parts in parts_of(model.module).items()}
        structure = model_on_meta(config).module
        for module in structure.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.numel() < _SMALL:
                    setattr(module, name, nn.Parameter(torch.zeros(parameter.shape)))
        with torch.random.fork_rng(devices=[]), _Recorded() as recorded:
            torch.manual_seed(generator.initial_seed())
            structure.initialize_weights()
        self._calls = {name: recorded.calls.get(id(one), []) for name, one in structure.named_parameters()}

    def __call__(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill those `tensors` (by their names in `saved_tensors`) that are parameters."""
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                continue
            full = torch.empty(tensor.shape or 1, dtype=tensor.dtype, device=self._generator.device)
            calls = self._calls.get(self._hf_names[name], [])
            if any(isinstance(value, Tensor) and value.is_meta for _, args, _ in calls for value in args) or not calls:
                calls = [_as_llama(name, full.ndim, self._std)]
            for function, args, options in calls:
                if "generator" in options:
                    options = {**options, "generator": self._generator}
                function(full, *args, **options)
            shard = local_shard(tensor)
            shard.data.copy_(full[shard.start : shard.start + len(shard.data)])


def _as_llama(name: str, num_dims: int, std: float) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if name.endswith("bias"):
        return Tensor.zero_, (), {}
    return (Tensor.fill_, (1.0,), {}) if num_dims == 1 else (Tensor.normal_, (0.0, std), {"generator": None})


class _Recorded(TorchFunctionMode):
    """Records the calls that change a parameter in place: `calls` by its id, as function, arguments, options."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        others, target = args[1:], args[0] if args else options.pop("tensor", None)  # torch.nn.init names it
        if isinstance(target, nn.Parameter) and name.endswith("_") and not name.startswith("_"):
            if name in ("normal_", "uniform_"):
                options.setdefault("generator", None)
            self.calls.setdefault(id(target), []).append((func, others, options))
        return func(*args, **(kwargs or {}))
