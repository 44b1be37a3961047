"""Load and check config, tokenizer and safetensors of a model, given a hub id, a folder or "embedded"."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import huggingface_hub as hub
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

import te_llama
from llm_fp8.config.options import EMBEDDED, Config, ModelConfig
from llm_fp8.config.parser import is_adapter_folder
from llm_fp8.data.embedded import MODEL_DIR as EMBEDDED_MODEL
from llm_fp8.models import BUNDLED
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import read_json

if TYPE_CHECKING:
    from llm_fp8.models.fp8_checkpoint import Fp8Format

RELOAD = "Download or export the model again."
_HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight")
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")


@dataclass(frozen=True)
class ModelSource:
    """Location of a model's config, tokenizer and weights."""

    name: str  # --model_name
    location: str  # a local folder, a hub id, or the path of a bundled config
    is_random: bool  # if True, the weights are random and not loaded
    adapter: str | None = None  # folder of the PEFT adapter of this model, from which the training starts


def resolve_source(options: ModelConfig) -> ModelSource:
    """Return the source for --model_name, or that of the base model of an adapter. Raise `UserError` without either."""
    name = options.model_name
    if name == EMBEDDED:
        return ModelSource(name, str(EMBEDDED_MODEL), is_random=True)
    if is_adapter_folder(name):
        if options.random_init:
            raise UserError(f"--random_init: {name} holds an adapter of a trained model; drop one of them.")
        with reading("--model_name", name, "the base model's name in adapter_config.json"):
            base = read_json(Path(name) / "adapter_config.json")["base_model_name_or_path"]
        if Path(base).is_absolute() and not Path(base).is_dir():
            raise UserError(f"--model_name {name}: an adapter of {base}, and there is no such folder.")
        return replace(resolve_source(ModelConfig(model_name=base)), adapter=name)
    if not Path(name).is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UserError(f"--model_name {name}: no such folder; a hub id is OWNER/NAME.")
        if options.random_init and (bundled := bundled_name(name)):
            return ModelSource(name, str(BUNDLED[bundled]), is_random=True)
    return ModelSource(name, name, options.random_init)


def bundled_name(name: str) -> str | None:
    """Return the key in `BUNDLED` for a name or hub id (ignoring case), or None if the model is not bundled."""
    # The hub has used both prefixes for the 8B model. An instruct model has the architecture of its base model.
    plain = name.rpartition("/")[2].lower().replace("meta-llama", "llama").removesuffix("-instruct")
    plain = plain.removesuffix("-it").removesuffix("-pt")  # Gemma's
    return next((bundled for bundled in BUNDLED if bundled.lower() == plain), None)


def reading_model(part: str, name: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which an error while reading `part` of the model `name` becomes a `UserError`."""
    advice = "Give a model's folder (for a run: its final/) or a reachable hub id (if it is gated: 'hf auth login')."
    return reading("--model_name", name, f"the {part}", advice)


def load_config(source: ModelSource) -> PretrainedConfig:
    """Load the model's config. Raise `UserError` if it cannot be read or has an unsupported quantisation."""
    name, location = source.name, source.location
    with reading_model("model's config.json", name):
        if not (Path(location).exists() or isinstance(hub.try_to_load_from_cache(location, CONFIG_NAME), str)):
            # Without a network, `from_pretrained` retries for half a minute. What the hub refuses, it explains.
            advice = f"No such folder is here. Without a network --random_init knows {', '.join(BUNDLED)}."
            with reading("--model_name", name, CONFIG_NAME, advice), contextlib.suppress(hub.errors.HfHubHTTPError):
                hub.get_hf_file_metadata(hub.hf_hub_url(location, CONFIG_NAME), timeout=5)
        hf_config = AutoConfig.from_pretrained(location, trust_remote_code=False)
        text_config(hf_config)
    stored_fp8(hf_config)
    return hf_config


def stored_fp8(hf_config: PretrainedConfig) -> Fp8Format | None:
    """Return the stored weights' fp8 format, or None if unquantised. Raise `UserError` for another quantisation."""
    if getattr(hf_config, "quantization_config", None) is None:
        return None
    from llm_fp8.models.fp8_checkpoint import fp8_format

    return fp8_format(hf_config)


def text_config(hf_config: PretrainedConfig) -> Any:
    """Return the part of a config that describes the language model. For a text model it is the whole config."""
    return hf_config.get_text_config(decoder=True)


def stored_dtype(hf_config: PretrainedConfig, checkpoint: StoredCheckpoint | None, default: torch.dtype) -> torch.dtype:
    """Return the dtype of most stored numbers. If there are none or these are fp8, that in the config, or `default`."""
    numbers = Counter[torch.dtype]()
    for tensor in map(checkpoint.on_meta, checkpoint.stored) if checkpoint and checkpoint.fp8 is None else ():
        numbers[tensor.dtype] += tensor.numel() * tensor.is_floating_point()
    stated = (*(dtype for dtype, _ in numbers.most_common(1)), hf_config.dtype, text_config(hf_config).dtype)
    return next((dtype for dtype in stated if isinstance(dtype, torch.dtype)), default)


def load_tokenizer(options: ModelConfig, source: ModelSource) -> tuple[PreTrainedTokenizerBase, str | None]:
    """Load the tokenizer with --chat_template. For a bundled config, load the embedded tokenizer and return a note."""
    note, location = None, source.location
    if source.is_random and source.location.endswith(".json"):
        note = f"--random_init {source.name}: using the embedded tokenizer, which is fine for random weights."
        location = str(EMBEDDED_MODEL)
    if source.adapter and (Path(source.adapter) / "tokenizer_config.json").is_file():
        location = source.adapter
    with reading_model("tokenizer of tokenizer.json and tokenizer_config.json", options.model_name):
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    if (template := options.chat_template) is not None:
        if "{" not in template:  # a template always has a brace, so this is a path
            with reading("--chat_template", template, "the file", "Give a file, or the template itself."):
                template = Path(template).expanduser().read_text(encoding="utf-8")
        tokenizer.chat_template = template
    return tokenizer, note


def check_model(config: Config, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` if model, tokenizer and options are incompatible."""
    flag = f"--model_name {config.model.model_name}"
    decoder = text_config(hf_config)
    require_positions(hf_config, config.data.max_seq_length, config.model.model_name, "--max_seq_length")
    if len(tokenizer) > decoder.vocab_size:
        sizes = f"{len(tokenizer)} tokens, but the model's embedding only {decoder.vocab_size} rows"
        raise UserError(f"{flag}: the tokenizer has {sizes}; give the tokenizer that belongs to the model.")
    if config.model.use_te:
        advice = "Drop --use_te to train Hugging Face's decoder with its linear layers swapped."
        with reading("--use_te with", flag, "its architecture into the TE decoder", advice):
            te_llama.layer_specs(hf_config, num_tokens=config.data.max_seq_length)


def require_positions(hf_config: PretrainedConfig, num_tokens: int, name: str, flag: str) -> None:
    """Raise `UserError` about the option `flag` if the model `name` has fewer than `num_tokens` positions."""
    limit = te_llama.num_positions(text_config(hf_config))
    if limit is not None and num_tokens > limit:
        raise UserError(f"{flag} {num_tokens} is more than the {limit} positions of {name}; lower it.")


def checkpoint_of(source: ModelSource, hf_config: PretrainedConfig) -> StoredCheckpoint | None:
    """Return the weights of `source`, downloaded if necessary, or None if they are random. As in transformers,
    model.safetensors has priority over an index. Raise `UserError` if the files cannot be read.
    """
    if source.is_random:
        return None
    with reading_model("weights as safetensors", source.name):
        try:
            files = [cached_file(source.location, SAFE_WEIGHTS_NAME)]
        except OSError:  # there is no single file
            index = cached_file(source.location, SAFE_WEIGHTS_INDEX_NAME)
            files, _ = get_checkpoint_shard_files(source.location, index)
    return StoredCheckpoint([Path(str(file)) for file in files], hf_config)


def untied(hf_config: PretrainedConfig, checkpoint: StoredCheckpoint | None) -> tuple[PretrainedConfig, str | None]:
    """Return the config and None. If the stored lm_head and embedding differ: an untied copy of it, and a warning."""
    copied = copy.deepcopy(hf_config)
    ties = [part for part in (copied, text_config(copied)) if getattr(part, "tie_word_embeddings", False)]
    if not ties or checkpoint is None:
        return hf_config, None
    head = next((name for name in checkpoint.stored if name.endswith(_HEADS)), None)
    embedding = next((name for name in checkpoint.stored if name.endswith(_EMBEDDINGS)), None)
    if head is None or embedding is None or torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
        return hf_config, None
    for part in ties:
        part.tie_word_embeddings = False
    return copied, f"WARNING: config.json ties {head} to {embedding}, but both are stored and differ; they stay untied"


def finite(tensors: Iterable[tuple[str, Tensor]], where: str) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors` unchanged. At a tensor with NaN or infinity, raise a `UserError` that begins with `where`."""
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {name} holds NaN or infinity, so the model is unusable; give another.")
        yield name, tensor


class StoredTensor(NamedTuple):
    """Entry of a tensor in the header of a safetensors file. `dtype` is "F32", "BF16", "F8_E4M3", ..."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class StoredCheckpoint:
    """Weights in a model's safetensors `files`. fp8 tensors are read as fp32."""

    def __init__(self, files: list[Path], hf_config: PretrainedConfig) -> None:
        self.files, self.fp8 = files, stored_fp8(hf_config)
        suffix = "" if self.fp8 is None else self.fp8.suffix
        self.stored: dict[str, StoredTensor] = {}
        self._scales: dict[str, Tensor] = {}  # weight -> its scale, possibly from another file
        for path in files:
            with open_weights(path) as tensors:
                for name in tensors.keys():
                    if self.fp8 is not None and name.endswith((f".weight{suffix}", ".input_scale")):
                        # Cloned, so that the file does not stay mapped.
                        self._scales[name.removesuffix(suffix)] = tensors.get_tensor(name).clone()
                        continue
                    header = tensors.get_slice(name)
                    self.stored[name] = StoredTensor(path, header.get_dtype(), tuple(header.get_shape()))

    def read(self, name: str, device: torch.device | str = "cpu") -> Any:
        """Read the whole tensor `name`."""
        with open_weights(self.stored[name].path, device) as tensors:
            rows = self.rows(name, tensors, device)
            return rows[:] if self.stored[name].shape else rows[...]  # a scalar has no rows

    def on_meta(self, name: str) -> Tensor:
        """Return a tensor on "meta" with the shape and dtype that `read` returns."""
        _, dtype, shape = self.stored[name]
        read_as = torch.float32 if dtype.startswith("F8") else str_to_torch_dtype[dtype]
        return torch.empty(shape, dtype=read_as, device="meta")

    def rows(self, name: str, tensors: Any, device: torch.device | str) -> Any:
        """Return tensor `name` of the open file `tensors` as an object whose `[a:b]` reads rows a to b."""
        rows, (_, dtype, shape) = tensors.get_slice(name), self.stored[name]
        if not dtype.startswith("F8"):
            return rows
        if self.fp8 is None or name not in self._scales or dtype != "F8_E4M3" or len(shape) != 2:
            raise ValueError(f"'{name}' is {dtype} {list(shape)}, and config.json describes no scales for it")
        from llm_fp8.models.fp8_checkpoint import DequantisedRows

        return DequantisedRows(rows, self.fp8, self._scales[name].to(device))


@contextlib.contextmanager
def open_weights(path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    """Open a safetensors file to read tensors to `device`. Errors in the block are converted to `UserError`."""
    with reading("--model_name", path, "the weights", RELOAD), safe_open(path, "pt", device=str(device)) as tensors:
        yield tensors


def weights_digest(files: Sequence[Path]) -> str:
    """Return one 16-digit hex digest of the headers of safetensors `files` and the first 4 KiB of each tensor."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(header := file.read(int.from_bytes(file.read(8), "little")))
            offsets = [tensor.get("data_offsets", [0])[0] for tensor in json.loads(header).values()]
            for start in [file.tell() + offset for offset in offsets]:
                file.seek(start)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]
