"""LoRA: linear layers of a frozen model with a trained low-rank update (Hu et al. 2021, arXiv:2106.09685).

    y = W x + scaling * B (A dropout(x))    W [out, in] frozen, A [rank, in], B [out, rank], scaling = alpha / rank

As in PEFT, B starts at zero, and A with uniform random numbers in +-1/sqrt(in). Their seed is a hash of --seed and the
layer's name, so A starts with the same numbers in every precision, decoder, layout and world size.

PEFT adds the adapters to Hugging Face's decoder. It does not support the TE decoder's fused modules. We add a submodule
`adapters` to each, with an A and B for each Hugging Face layer, which a forward hook calls. All adapters are exported
and merged as PEFT adapters. Their GEMMs run in the run's compute dtype, never in fp8.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import te_llama
from llm_fp8.config.options import ALL_LINEAR, EXPERTS, LoraConfig
from llm_fp8.models.build import auto_class, local_shard, read_by_kernels
from llm_fp8.models.experts import expert_weights, routed_modules
from llm_fp8.models.model import Model, is_adapter
from llm_fp8.utils.errors import UserError, listed, reading
from llm_fp8.utils.packages import BASE_REQUIREMENTS
from llm_fp8.utils.te_internals import prefer_torchs_cudnn
from te_llama import Part


class Adapter(NamedTuple):
    """Adapter of a Hugging Face weight: `a` [rank, in] and `b` [out, rank], or the matrices of all experts stacked."""

    a: nn.Parameter
    b: nn.Parameter
    scaling: float
    weight: str  # name of the adapted weight
    delta: Callable[[], Tensor] | None = None  # returns the update of expert weights; None for a linear layer


def needs_unfused_mlp(options: LoraConfig) -> bool:
    """Return True if adapters of the MLP require `UnfusedMLP` in the TE decoder."""
    in_mlp = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", ALL_LINEAR}
    return options.lora_rank > 0 and not in_mlp.isdisjoint(options.targets)


def add_adapters(model: Model, options: LoraConfig, dtype: torch.dtype) -> str:
    """Freeze `model`, add uninitialised adapters of `dtype`, and return a note. Unknown targets are a `UserError`."""
    prefer_torchs_cudnn()  # PEFT imports Transformer Engine if it is installed
    import peft  # noqa: F401  # the export needs it; if it is missing, fail now

    note = ""
    if model.uses_te:
        _add_to_te_decoder(model.module, options, dtype)
    else:
        note = _add_by_peft(model.module, options, dtype)
        _check_names(model, options)
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    return note


def _check_names(model: Model, options: LoraConfig) -> None:
    """Raise `UserError` if PEFT, which renames some models' tensors on loading, cannot load the exported adapters."""
    from peft import PeftModel, set_peft_model_state_dict

    tensors = {name: tensor.to("meta") for name, tensor in adapter_tensors(model.module).items()}
    advice = "Give other --lora_targets, or train without --lora_rank."
    with reading("--lora_targets", options.lora_targets, "the adapter back", advice), torch.device("meta"):
        hf_config = copy.deepcopy(model.module.config)
        whole = auto_class(hf_config).from_config(hf_config)
        reader = PeftModel(whole, config_for_loading(model, options, ""), low_cpu_mem_usage=True)
        result: Any = set_peft_model_state_dict(reader, tensors, low_cpu_mem_usage=True)
        if misfits := [*result.unexpected_keys, *filter(is_adapter, result.missing_keys)]:
            raise ValueError(f"PEFT cannot match {listed(misfits)} with the plain model")


def _hf_targets(model: PreTrainedModel, options: LoraConfig) -> tuple[list[str], set[str], str]:
    """Return the name suffixes of linear layers and of parameters that get an adapter, and a note about layers without
    one. Raise `UserError` for a name in --lora_targets that `model` does not have.
    """
    others = {model.get_output_embeddings(), *routed_modules(model)}
    mamba = sorted({name.rpartition(".")[2] for name in read_by_kernels(model)})  # PEFT forbids an adapter there
    # Subclasses of nn.Linear are excluded, since some compute another function, such as routers or grouped layers.
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and m not in others}
    layers = [end for end in dict.fromkeys(_ends(model, linears)) if end not in mamba]
    experts = {
        f"{name.rpartition('.')[2]}.{weight}"
        for name, module in model.named_modules()
        if expert_weights(module)
        for weight, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }
    choices = [*layers, *([EXPERTS] if experts else [])]
    if unknown := sorted(set(options.targets) - {*choices, ALL_LINEAR}):
        raise UserError(f"--lora_targets {', '.join(unknown)}: the model has {', '.join(choices)}; choose from these.")
    notes = [f"no adapter for {', '.join(mamba)}, whose weights Mamba's kernels read directly"] if mamba else []
    if experts and EXPERTS not in options.targets:
        notes.append(f"no adapter for routed experts (--lora_targets {options.lora_targets},{EXPERTS} adds one)")
    if ALL_LINEAR not in options.targets:
        layers = [name for name in options.targets if name != EXPERTS]
    return layers, experts if EXPERTS in options.targets else set(), "; ".join(notes)


def _ends(model: nn.Module, layers: Collection[str]) -> list[str]:
    """For each of `layers`, return the shortest end of its name that no module outside `layers` has, such as q_proj."""

    def ends(name: str) -> Iterator[str]:
        return itertools.accumulate(reversed(name.split(".")), lambda end, word: f"{word}.{end}")

    other_ends = {end for name, _ in model.named_modules() if name not in layers for end in ends(name)}
    return [next(end for end in ends(name) if end not in other_ends) for name in layers]


def peft_config(options: LoraConfig, modules: Iterable[str], parameters: Iterable[str] = ()) -> Any:
    """Return PEFT's config (adapter_config.json) for adapters of linear layers (`modules`) and `parameters`."""
    from peft import LoraConfig as PeftLoraConfig

    alpha: Any = float(options.scaling * options.lora_rank)
    return PeftLoraConfig(
        r=options.lora_rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,
        lora_dropout=options.lora_dropout,
        target_modules=sorted(modules),
        target_parameters=sorted(parameters) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )


def config_for_loading(model: Model, options: LoraConfig, base_model: str) -> Any:
    """Return the `peft_config` with which PEFT loads the adapters of `model` into the base model. In a mixture of
    experts, PEFT assumes that any gate_proj, up_proj or down_proj in `target_modules` is an expert, since experts had
    these names in transformers 4. Other layers with these names are therefore listed in `target_parameters`.
    """
    module, adapters = model.module, adapters_of(model.module)
    parameters = {".".join(adapter.weight.split(".")[-2:]) for adapter in adapters.values() if adapter.delta}
    modules = set(_ends(module, {name: adapter for name, adapter in adapters.items() if not adapter.delta}))
    misread = {name for name in modules if _is_misread(module, peft_config(options, [name]))}
    parameters |= {f"{name}.weight" for name in misread}
    settings = peft_config(options, modules - misread, parameters)
    settings.base_model_name_or_path, settings.inference_mode = base_model, True
    if model.left_out:  # their layers may have the same names
        settings.exclude_modules = rf".*({'|'.join(map(re.escape, model.left_out))})\..*"
    if settings.target_parameters:
        settings.lora_dropout = 0.0  # PEFT has no dropout for parameters
    return settings


def _is_misread(model: PreTrainedModel, settings: Any) -> bool:
    """Return True if PEFT, on loading the config `settings`, would take the `target_modules` in it for experts."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    try:
        convert_peft_config_for_transformers(settings, model, None)
    except ValueError:  # PEFT requires gate_proj and up_proj together
        return True
    return not settings.target_modules


def _add_by_peft(model: PreTrainedModel, options: LoraConfig, dtype: torch.dtype) -> str:
    from peft import inject_adapter_in_model

    on_meta, (modules, parameters, note) = next(model.parameters()).is_meta, _hf_targets(model, options)
    if parameters and on_meta:
        raise UserError(f"--lora_targets {EXPERTS}: PEFT's expert adapters are not sharded; use --sharding_mode ddp.")
    wrapper = nn.Module()  # has no `config`, so that PEFT does not treat shared experts as routed ones
    wrapper.add_module("model", model)
    settings = peft_config(options, modules, parameters)
    advice = f"Give other --lora_targets; if the error names a package, run: pip install -r {BASE_REQUIREMENTS}"
    with reading("--lora_targets", options.lora_targets, "the model into PEFT", advice):
        inject_adapter_in_model(settings, wrapper, low_cpu_mem_usage=on_meta)
    for name, module in model.named_modules():
        if is_adapter(name):
            module.to(dtype)
    return note


def _add_to_te_decoder(model: PreTrainedModel, options: LoraConfig, dtype: torch.dtype) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, te_llama.TEDecoderLayer)]
    linears = dict.fromkeys(name for layer in layers for name in te_llama.linear_shapes(layer.spec))
    targets = linears if ALL_LINEAR in options.targets else options.targets
    for te_name, parts in te_llama.parameter_map(model).items():
        module_name, _, kind = te_name.rpartition(".")
        adapted = [part for part in parts if part.hf_name.split(".")[-2] in targets]
        if kind != "weight" or not adapted:
            continue
        module = model.get_submodule(module_name)
        module.add_module("adapters", FusedAdapters(adapted, options, dtype, model.get_parameter(te_name).device))
        if hasattr(module, "return_layernorm_output"):
            module.return_layernorm_output = True  # type: ignore[assignment]  # the GEMM's input, for the hook
        module.register_forward_hook(_with_adapters)


def _with_adapters(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Tensor:
    """Forward hook of a Transformer Engine module that adds the adapters' output to the module's output."""
    projected, gemm_input = output if isinstance(output, tuple) else (output, inputs[0])
    return module.adapters(gemm_input, projected)


class FusedAdapters(nn.Module):
    """Adapters of a fused module: one for each of `parts`, Hugging Face weights that are rows of the fused weight."""

    def __init__(self, parts: Iterable[Part], options: LoraConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.parts = {part.hf_name.split(".")[-2]: part for part in parts}
        self.scaling, self.dropout, rank = options.scaling, options.lora_dropout, options.lora_rank
        for name, part in self.parts.items():
            out_features, in_features = part.shape
            self.lora_A[name] = nn.Parameter(torch.empty(rank, in_features, dtype=dtype, device=device))
            self.lora_B[name] = nn.Parameter(torch.empty(out_features, rank, dtype=dtype, device=device))

    @property
    def gemm_weights(self) -> list[Tensor]:
        return list(self.parameters())

    def forward(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Add the adapters' output for `inputs` [..., in] to `output` [..., out] in place, and return `output`."""
        dtype = output.dtype
        stacked = torch.cat([a.to(dtype) for a in self.lora_A.values()])
        low = F.linear(F.dropout(inputs.to(dtype), self.dropout, self.training), stacked) * self.scaling
        columns = [(part.start, part.stop) for part in self.parts.values()]
        return _AddLowRank.apply(output, low, columns, *(b.to(dtype) for b in self.lora_B.values()))


class _AddLowRank(torch.autograd.Function):
    """Add low_i @ b_i.T to output[..., start_i:stop_i] for each adapter i, with b_i [stop_i - start_i, rank]. `low`
    consists of all low_i [..., rank] side by side. Adding in place is safe, since TE does not save the output.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, low: Tensor, columns: list[tuple[int, int]], *bs: Tensor) -> Tensor:
        ctx.columns = columns
        ctx.save_for_backward(low, *bs)
        result = output.detach()
        rows, low = result.view(-1, result.shape[-1]), low.reshape(-1, low.shape[-1])
        for (start, stop), part, b in zip(columns, low.split(bs[0].shape[1], dim=1), bs, strict=True):
            rows[:, start:stop].addmm_(part, b.t())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        low, *bs = ctx.saved_tensors
        rows, flat_low = gradient.reshape(-1, gradient.shape[-1]), low.reshape(-1, low.shape[-1])
        grad_low, grad_bs, rank = torch.empty_like(flat_low), [], bs[0].shape[1]
        parts = zip(ctx.columns, flat_low.split(rank, dim=1), grad_low.split(rank, dim=1), bs, strict=True)
        with torch.autocast(gradient.device.type, enabled=False):
            for (start, stop), part, grad_part, b in parts:
                grad_part.copy_(rows[:, start:stop] @ b)
                grad_bs.append(rows[:, start:stop].t() @ part)
        return gradient, grad_low.view_as(low), None, *grad_bs


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Return the adapters in `model` by the names of their Hugging Face layers, in the order of the modules."""
    adapters: dict[str, Adapter] = {}
    layer: Any
    for name, layer in model.named_modules():
        if isinstance(layer, FusedAdapters):
            for end, part in layer.parts.items():
                adapter = Adapter(layer.lora_A[end], layer.lora_B[end], layer.scaling, part.hf_name)
                adapters[part.hf_name.removesuffix(".weight")] = adapter
        elif isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
            a, b = (matrices["default"].weight for matrices in (layer.lora_A, layer.lora_B))
            is_parameter = hasattr(layer, "parameter_name")
            weight = f"{name.replace('.base_layer', '')}.{layer.parameter_name if is_parameter else 'weight'}"
            delta = functools.partial(layer.get_delta_weight, "default") if is_parameter else None
            adapters[name] = Adapter(a, b, layer.scaling["default"], weight, delta)
    return adapters


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the matrices A and B of all adapters in `model`, by their names in PEFT's format."""
    return {
        f"base_model.model.{name}.lora_{letter}.weight": matrix
        for name, adapter in adapters_of(model).items()
        for letter, matrix in zip("AB", adapter[:2], strict=True)
    }


@torch.no_grad()
def initialize_adapters_(model: PreTrainedModel, seed: int) -> None:
    """Initialise the adapters (or this rank's shards): A uniform in +-1/sqrt(in), and B zero."""
    for name, adapter in adapters_of(model).items():
        bound = 1 / math.sqrt(adapter.a.shape[1])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full = torch.empty(adapter.a.shape).uniform_(-bound, bound, generator=generator)
        shard = local_shard(adapter.a)
        shard.data.copy_(full[shard.start : shard.start + len(shard.data)])
        local_shard(adapter.b).data.zero_()


def load_adapters_(model: PreTrainedModel, folder: str) -> None:
    """Fill the adapters (or shards) from the PEFT adapter in `folder`, or raise `UserError` if both differ."""
    from peft import PeftConfig, load_peft_weights

    free = {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "base_model_name_or_path"}
    free |= {"inference_mode", "task_type", "auto_mapping", "peft_version"}  # other settings must be PEFT's defaults
    with reading("--model_name", folder, "the adapter", "Merge it and train the result (scripts/merge_adapter.py)."):
        settings, plain = (vars(each) for each in (PeftConfig.from_pretrained(folder), peft_config(LoraConfig(1), ())))
        if others := sorted(name for name in plain.keys() - free if settings.get(name) != plain[name]):
            raise ValueError(f"{listed(others)} in adapter_config.json")
        stored, targets = load_peft_weights(folder, "cpu"), adapter_tensors(model)
        shapes, expected = ({(name, *each[name].shape) for name in each} for each in (stored, targets))
        if misfits := [name for name, *_ in sorted(shapes ^ expected)]:
            raise ValueError(f"adapter and model do not both have {listed(misfits)} in one shape")
        for name, matrix in targets.items():
            local_shard(matrix).fill(te_llama.stacked((name, tuple(matrix.shape)))[0], stored[name])


def with_adapter(weight: Tensor, adapter: Adapter, full_tensor: Callable[[Tensor], Tensor]) -> Tensor:
    """Return W + scaling * B A in fp32 [out, in]. `full_tensor` unshards a parameter and may be a collective."""
    if adapter.delta is not None:
        return weight.float() + adapter.delta().float()
    a, b = (full_tensor(matrix).to(weight.device, torch.float32) for matrix in (adapter.a, adapter.b))
    return torch.addmm(weight.float(), b, a, alpha=adapter.scaling)
