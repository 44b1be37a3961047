"""From a model's name to a module on the device: config, tokenizer, weights in, weights out.

A name is 'embedded', a local folder laid out as the hub lays it out, or a hub id. With --random_init a hub id whose
architecture is bundled (`llm_fp8/architectures`) needs no hub. Two builds:

- Hugging Face's own model, through `from_pretrained`, whose missing and unexpected tensors are errors here;
- the same model with TE decoder layers (te_llama.py), filled from the safetensors files tensor by tensor.

A model whose parameters are to be split over ranks is built in two steps: `build_structure` makes either of them without memory for its
parameters, and when they are split `fill_sharded` reads into each rank its rows of them.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import te_llama
from llm_fp8.architectures import bundled_config
from llm_fp8.config import EMBEDDED, Config, ModelConfig
from llm_fp8.errors import UserError
from llm_fp8.flash_attention import check_flash_attention, keep_from_transformer_engine, require_flash_attention
from llm_fp8.hf_limits import what_changes_logits, what_mixes_documents
from llm_fp8.metrics import DecoderSize
from llm_fp8.norm_backend import choose_norm_backend
from llm_fp8.precision import require_te
from llm_fp8.provenance import package_version
from llm_fp8.shards import HfFiller, initialize_rows_, row_block, stored_names

PACKAGE = Path(__file__).parent
EMBEDDED_MODEL = PACKAGE / "embedded" / "model"
WEIGHTS_INDEX = "model.safetensors.index.json"
"""The file that lists the shards of a model of more than one file."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files come from: `location` is a local folder or a hub id."""

    name: str
    location: str
    architecture_only: bool
    """Only a config is at hand: weights are random and the tokenizer is the embedded one unless the hub gives its own."""

    @property
    def is_local(self) -> bool:
        """Whether `location` is a folder on this machine."""
        return Path(self.location).is_dir()


def is_adapter_folder(folder: str | Path) -> bool:
    """Whether `folder` holds a PEFT adapter and no model."""
    return (Path(folder) / "adapter_config.json").is_file() and not (Path(folder) / "config.json").is_file()


def resolve_source(options: ModelConfig) -> ModelSource:
    """Find out what --model_name names. Raises `UserError` for a path that does not exist."""
    name = options.model_name
    if name == EMBEDDED:
        return ModelSource(name, str(EMBEDDED_MODEL), architecture_only=True)
    if is_adapter_folder(name):
        raise UserError(
            f"--model_name {name} holds a PEFT adapter and no model; give its base model, or a whole model made by scripts/merge_adapter.py."
        )
    if Path(name).is_dir():
        return ModelSource(name, name, architecture_only=not any(Path(name).glob("*.safetensors*")) and options.random_init)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"--model_name {name}: no such folder.")
    bundled = bundled_config(name)
    if options.random_init and bundled is not None:
        return ModelSource(name, str(bundled), architecture_only=True)
    return ModelSource(name, name, architecture_only=False)


@contextlib.contextmanager
def _named_errors(what: str, name: str) -> Iterator[None]:
    """Turn what transformers and the hub raise on a bad name or file into a `UserError`."""
    try:
        yield
    except (OSError, ValueError, KeyError, HfHubHTTPError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--model_name {name}: cannot load the {what} ({first_line}). Give a local folder with config.json, tokenizer and safetensors, "
            "or a hub id that this machine can reach (for a gated model, log in with 'hf auth login')."
        ) from error


def load_config(options: ModelConfig, source: ModelSource) -> PretrainedConfig:
    """The model's Hugging Face config."""
    with _named_errors("config", options.model_name):
        return AutoConfig.from_pretrained(source.location, cache_dir=options.weights_cache_dir)


def stored_dtype(hf_config: PretrainedConfig, default: torch.dtype) -> torch.dtype:
    """The dtype in which the model's files hold its weights, as its config says; `default` where it does not say."""
    return hf_config.dtype if isinstance(hf_config.dtype, torch.dtype) else default


def load_tokenizer(options: ModelConfig, source: ModelSource) -> tuple[PreTrainedTokenizerBase, str | None]:
    """The model's tokenizer and, where it is not the model's own, a sentence that says so."""
    if source.architecture_only and source.location.endswith(".json"):
        note = (
            f"--random_init {source.name}: random weights have no use for the model's own tokenizer, so the embedded one is used."
        )
        return AutoTokenizer.from_pretrained(EMBEDDED_MODEL), note
    with _named_errors("tokenizer", options.model_name):
        return AutoTokenizer.from_pretrained(source.location, cache_dir=options.weights_cache_dir), None


def check_model(config: Config, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` where the model, the tokenizer and the options cannot go together."""
    name = config.model.model_name
    quantised = getattr(hf_config, "quantization_config", None)
    if quantised is not None and config.precision.mixed_precision == "fp8":
        raise UserError(
            f"--mixed_precision fp8 cannot go with a quantised model, and --model_name {name} is one ({_quantisation_method(quantised)} in the "
            "quantization_config of its config.json): fp8 casts weights that are bf16 or fp32; give the unquantised model."
        )
    if quantised is not None:
        raise UserError(
            f"--model_name {name} holds quantised weights (quantization_config in its config.json), which can be neither fine-tuned in full nor "
            "cast to fp8; give the unquantised model."
        )
    if changed := what_changes_logits(hf_config):
        raise UserError(
            f"--model_name {name} changes what its output head computes ({changed} in its config.json), which the loss here does not do, so another "
            "model would be trained; choose a model without it, like the Llama and Qwen families."
        )
    if config.packing and not config.model.use_te and (mixing := what_mixes_documents(hf_config)):
        raise UserError(
            f"--packing cannot go with --model_name {name}: transformers' model of type '{mixing}' does not keep the documents of a packed row "
            "apart; drop --packing."
        )
    limit = getattr(hf_config, "max_position_embeddings", None)
    if limit is not None and config.data.max_seq_length > limit:
        raise UserError(
            f"--max_seq_length {config.data.max_seq_length} is more than the {limit} positions of {name} (max_position_embeddings); lower it."
        )
    if len(tokenizer) > hf_config.vocab_size:
        raise UserError(
            f"--model_name {name}: the tokenizer has {len(tokenizer)} tokens and the model's embedding only {hf_config.vocab_size} rows; "
            "give the tokenizer that belongs to the model."
        )
    if config.model.use_te:
        try:
            spec = te_llama.decoder_spec(hf_config)
        except te_llama.UnsupportedArchitecture as error:
            raise UserError(
                f"--use_te cannot build {name}: {error}. Drop --use_te to train it with its linear layers swapped."
            ) from error
        flash = config.model.flash_attention
        if flash is not None:
            check_flash_attention(flash, spec.head_dim, spec.attention_dropout)


def _quantisation_method(quantization_config: Any) -> str:
    """bitsandbytes, gptq, awq, fp8, ...: the entry quant_method."""
    entries = quantization_config if isinstance(quantization_config, dict) else vars(quantization_config)
    method = entries.get("quant_method", "a method without a name")
    return str(getattr(method, "value", method))


# --- Weights in ----------------------------------------------------------------------------------------------------------


def weight_files(options: ModelConfig, source: ModelSource) -> list[Path]:
    """Local paths of the model's safetensors files, fetched from the hub where need be."""

    def fetch(file_name: str) -> Path | None:
        if source.is_local:
            path = Path(source.location) / file_name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(source.location, file_name, cache_dir=options.weights_cache_dir))
        except LocalEntryNotFoundError:  # not in the cache, and the hub cannot be asked
            if file_name == WEIGHTS_INDEX:
                return None  # a cached model of one file has none
            raise
        except EntryNotFoundError:
            return None

    with _named_errors("weights", options.model_name):
        index = fetch(WEIGHTS_INDEX)
        if index is not None:
            shards = _shard_names(index)
            files = [(shard, fetch(shard)) for shard in shards]
        else:
            files = [("model.safetensors", fetch("model.safetensors"))]
    for file_name, path in files:
        if path is None:
            raise UserError(
                f"--model_name {options.model_name}: there is no {file_name}. Weights must be safetensors (save_pretrained writes them); "
                "--random_init trains from random ones."
            )
    return [path for _, path in files if path is not None]


def _shard_names(index: Path) -> list[str]:
    """The file names in a model.safetensors.index.json."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError) as error:
        raise UserError(f"{index} is not the index of a sharded model ({error}); fetch it again.") from error


def fill_te_model(model: PreTrainedModel, files: list[Path]) -> None:
    """Copy the weights of `files` into a TE model, one tensor in memory at a time; of a split model, this rank's rows.

    Raises `UserError` that names file and tensor.
    """
    blocks = {name: row_block(parameter) for name, parameter in te_llama.te_parameters(model).items()}
    _fill(te_llama.WeightFiller(te_llama.spec_of(model), blocks), files, next(model.parameters()).device)


def _fill(filler: te_llama.PartFiller, files: list[Path], device: torch.device) -> None:
    """Hand every tensor of `files` to `filler`, in the order in which they are stored; what it takes is read to `device`."""
    for path in files:
        try:
            with _open_weights(path, device) as tensors:
                for name in tensors.offset_keys():
                    rows = tensors.get_slice(name)
                    filler.fill_rows(name, tuple(rows.get_shape()), rows)
        except te_llama.UnsupportedArchitecture as error:
            raise UserError(f"{path}: {error}.") from error
    try:
        filler.finish()
    except te_llama.UnsupportedArchitecture as error:
        raise UserError(f"{files[0].parent}: {error}.") from error


@contextlib.contextmanager
def _open_weights(path: Path, device: torch.device) -> Iterator[Any]:
    """A safetensors file whose tensors are read to `device`; raises `UserError` where it is not whole."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or corrupt ({error}); fetch it again.") from error


def fill_sharded(model: PreTrainedModel, options: ModelConfig, source: ModelSource, device: torch.device, seed: int) -> bool:
    """Give a model of `build_structure` its weights, after its parameters were split over ranks and given memory.

    From files each rank reads its rows and no others. Random weights are those of `te_llama.initialize_weights_`, drawn on `device`
    from `seed`, and do not depend on the number of ranks. Returns whether the weights were loaded (else: random).
    Raises `UserError` that names file and tensor where the files do not fit the model.
    """
    if has_random_weights(options, source):
        initialize_rows_(model, torch.Generator(device=device).manual_seed(seed))
        return False
    files = weight_files(options, source)
    if options.use_te:
        fill_te_model(model, files)
        return True
    names = stored_names(model)
    if names is None:
        raise UserError(
            f"--model_name {options.model_name}: its files hold tensors in another layout than its modules (a mixture of experts does), which "
            "cannot be read in parts; use --sharding_mode ddp or a deepspeed mode."
        )
    checkpoint_names: list[str] = []
    for path in files:
        with _open_weights(path, torch.device("cpu")) as tensors:
            checkpoint_names += tensors.keys()
    _fill(HfFiller(model, names, checkpoint_names), files, next(model.parameters()).device)
    return True


def choose_attention(requested: str, hf_config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """The attention implementation of the Hugging Face path.

    `auto` takes the fastest that the architecture has. Raises `UserError` where another was asked for that it lacks, or that is not installed.
    """
    installed = package_version("flash-attn") is not None  # flash-attn 4 has a folder flash_attn too
    if requested == "flash_attention_2" and not installed:
        raise UserError(
            "--attn_implementation flash_attention_2 needs flash-attn, which is not installed; run: pip install --no-build-isolation flash-attn"
        )
    if requested != "auto":
        if not _has_attention(hf_config, requested):
            raise UserError(
                f"--attn_implementation {requested}: transformers has none for models of type '{hf_config.model_type}'; leave it at auto, or give "
                "--attn_implementation eager."
            )
        return requested
    if installed and device.type == "cuda" and dtype != torch.float32 and _has_attention(hf_config, "flash_attention_2"):
        return "flash_attention_2"
    return "sdpa" if _has_attention(hf_config, "sdpa") else "eager"


def _has_attention(hf_config: PretrainedConfig, implementation: str) -> bool:
    """Whether transformers has this attention for the architecture; True where it knows no causal language model of it, and says so itself."""
    flag = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}.get(implementation)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    return flag is None or model_class is None or bool(getattr(model_class, flag))


def require_te_decoder(device: torch.device, options: ModelConfig) -> None:
    """Raise `UserError` where --use_te, or the attention that was asked for with it, cannot work."""
    if device.type != "cuda":
        raise UserError("--use_te needs an NVIDIA GPU, and none is found; --use_te=false trains on the CPU.")
    require_te("--use_te")
    flash = options.flash_attention
    if flash is not None:
        require_flash_attention(flash, torch.cuda.get_device_capability(device))


def _build_te_decoder(
    options: ModelConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    with_memory: bool,
    split_mlp: bool,
) -> PreTrainedModel:
    """`te_llama.build_te_model` on `device`, with or without memory for parameters, attention that is known to be right and the faster norms.

    Raises `UserError` where --use_te cannot work.
    """
    require_te_decoder(device, options)
    keep_from_transformer_engine(te_llama.decoder_spec(hf_config).head_dim)
    if device.type == "cuda":
        choose_norm_backend(hf_config.hidden_size, torch.cuda.get_device_capability(device)[0], os.environ)
    return te_llama.build_te_model(
        hf_config,
        dtype,
        device if with_memory else "meta",
        table_device=device,
        split_mlp=split_mlp,
        flash_attention=options.flash_attention,
    )


def has_random_weights(options: ModelConfig, source: ModelSource) -> bool:
    """Whether the model starts from random weights."""
    return options.random_init or source.architecture_only


def build_model(
    options: ModelConfig,
    source: ModelSource,
    hf_config: PretrainedConfig,
    *,
    parameter_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    seed: int,
    split_mlp: bool = False,
) -> tuple[PreTrainedModel, bool]:
    """The model on `device` with parameters of `parameter_dtype`, and whether its weights were loaded (else: random).

    `split_mlp` is for the TE decoder: see `te_llama.DecoderSpec`.
    """
    random_weights = has_random_weights(options, source)
    generator = torch.Generator(device=device).manual_seed(seed)
    if options.use_te:
        model = _build_te_decoder(options, hf_config, parameter_dtype, device, with_memory=True, split_mlp=split_mlp)
        if random_weights:
            te_llama.initialize_weights_(model, generator)
        else:
            fill_te_model(model, weight_files(options, source))
        return model, not random_weights
    attention = choose_attention(options.attn_implementation, hf_config, device, compute_dtype)
    if random_weights:
        with torch.device(device):
            model = _model_from_config(hf_config, dtype=parameter_dtype, attn_implementation=attention)
        initialize_rows_(model, generator)  # not Hugging Face's own, which could not be drawn in parts
        return model, False
    return _load_hf_model(options, source, attention, parameter_dtype, device), True


def build_structure(
    options: ModelConfig,
    source: ModelSource,
    hf_config: PretrainedConfig,
    *,
    parameter_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    split_mlp: bool = False,
) -> PreTrainedModel:
    """The model of `build_model` with parameters of `parameter_dtype` that have no memory (device "meta"); buffers are on `device`, with values.

    Fill it with `fill_sharded`.
    """
    if options.use_te:
        return _build_te_decoder(options, hf_config, parameter_dtype, device, with_memory=False, split_mlp=split_mlp)
    attention = choose_attention(options.attn_implementation, hf_config, device, compute_dtype)
    with init_empty_weights(include_buffers=False), torch.device(device):
        model = _model_from_config(hf_config, dtype=parameter_dtype, attn_implementation=attention)
    model.tie_weights()  # which taking their memory away undid
    if not has_random_weights(options, source):
        with contextlib.suppress(OSError):  # a model need not have the file
            model.generation_config = GenerationConfig.from_pretrained(source.location, cache_dir=options.weights_cache_dir)
    return model


def _model_from_config(hf_config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(hf_config, **options)
    except ValueError as error:
        raise UserError(
            f"--model_name: a model of type '{hf_config.model_type}' cannot be built as a causal language model "
            f"({str(error).splitlines()[0]}); give one that can."
        ) from error


def count_parameters(hf_config: PretrainedConfig) -> int:
    """Number of elements of a model's parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in _model_without_memory(hf_config).parameters())


def _model_without_memory(hf_config: PretrainedConfig) -> PreTrainedModel:
    """The architecture alone."""
    with torch.device("meta"):
        return _model_from_config(copy.deepcopy(hf_config))  # which building would change


def _load_hf_model(
    options: ModelConfig, source: ModelSource, attention: str, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    weight_files(options, source)  # A clear sentence for what is missing, before transformers' own.
    with _named_errors("weights", options.model_name):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.location,
                dtype=dtype,
                attn_implementation=attention,
                cache_dir=options.weights_cache_dir,
                device_map={"": device},
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported in `info`, and refused below
            )
        except SafetensorError as error:
            raise UserError(
                f"{_corrupt_file(weight_files(options, source))} is truncated or corrupt ({error}); fetch it again."
            ) from error
    model, info = loaded
    wrong = {
        kind: names for kind, names in info.items() if names and kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if wrong:
        kind, found = next(iter(wrong.items()))
        names = [f"{n[0]} {tuple(n[1])} instead of {tuple(n[2])}" if isinstance(n, tuple) else str(n) for n in found]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise UserError(
            f"--model_name {options.model_name}: its safetensors do not fit its config.json: {kind.replace('_keys', '')} tensors "
            f"{', '.join(sorted(names)[:4])}{more}; fetch the model again."
        )
    return model


def _corrupt_file(files: list[Path]) -> Path:
    """The first of `files` that cannot be opened; the last one where all can."""
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            return path
    return files[-1]


# --- Properties ------------------------------------------------------------------------------------------------------------


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers in order; raises `UserError` for an architecture without a single list of them."""
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        layers = getattr(model.base_model, "h", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(f"{type(model).__name__} has no list of decoder layers that these scripts know.")
    return layers


def decoder_size(hf_config: PretrainedConfig, num_adapter_parameters: int = 0) -> DecoderSize:
    """The dimensions of a decoder of any architecture: of those that te_llama.py builds read off the config, of others counted in the model.

    Experts of which a router chooses some are not counted.
    """
    if hf_config.model_type in te_llama.SUPPORTED_MODEL_TYPES:
        return DecoderSize.from_config(hf_config, num_adapter_parameters)
    model = _model_without_memory(hf_config)
    matrices = [
        weight.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        and isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and weight.dim() == 2
    ]
    text_config = hf_config.get_text_config(decoder=True)
    num_heads = text_config.num_attention_heads
    return DecoderSize(
        num_linear_parameters=sum(matrices),
        num_layers=len(decoder_layers(model)),
        attention_width=num_heads * (getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads),
        num_adapter_parameters=num_adapter_parameters,
    )
