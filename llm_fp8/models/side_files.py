"""The files beside the weights of an export: config, generation settings, files of tokenizer and processors.

They are the source's own, changed only where training changed something: dtype, EOS, chat template, whether the lm_head
is tied. Older keys are written beside those of transformers 5, which transformers 4 and the converters of vLLM and
llama.cpp pass over (then RoPE has base 10,000) or fail on. Read in transformers 5.23 and 4.57.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE, CONFIG_NAME, GENERATION_CONFIG_NAME

from llm_fp8.models.source import reading_model

TOKENIZER_CONFIG, TOKENIZER_FILE = "tokenizer_config.json", "tokenizer.json"
_OF_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken"),
    *("tekken.json", "*processor_config.json", "chat_template.json"),
)
_WITH_TWO_ROPES = ("gemma3", "olmo3")  # of transformers 4; later families would misread its entries


@dataclass(frozen=True)
class Origin:
    """A model's source, `location` as of `ModelSource`, and the ids that documents trained on end with."""

    location: str
    eos_ids: tuple[int, ...] = ()


@functools.cache
def source_folder(location: str) -> Path:
    """The folder with a model's files; for a hub id that of the cache, with those that an export takes over."""
    if Path(location).exists():
        return Path(location) if Path(location).is_dir() else Path(location).parent
    with reading_model("files beside the weights", location):
        wanted = [CONFIG_NAME, GENERATION_CONFIG_NAME, *_OF_TOKENIZER]
        try:
            return Path(snapshot_download(location, allow_patterns=wanted))
        except LocalEntryNotFoundError:  # without a network the cache may hold only what transformers asked for
            return Path(hf_hub_download(location, CONFIG_NAME)).parent


def save_side_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None,
    origin: Origin | None,
) -> None:
    """Write all but weights to `folder`; no config.json without their `dtype`, as beside an adapter. What the source
    does not have, or all without an `origin`, is what transformers writes.
    """
    tokenizer.save_pretrained(folder)
    if tokenizer.name_or_path:
        _copy(tokenizer.name_or_path, _OF_TOKENIZER, folder)
        if tokenizer.chat_template != tokenizer.init_kwargs.get("chat_template"):  # --chat_template
            (folder / "chat_template.json").unlink(missing_ok=True)  # processors would prefer it
    if origin is not None:
        _copy(origin.location, (GENERATION_CONFIG_NAME, *([] if dtype is None else [CONFIG_NAME])), folder)
    if dtype is not None and not (folder / CONFIG_NAME).is_file():
        model.config.save_pretrained(folder)
    if model.can_generate() and not (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config.save_pretrained(folder)
    edit_json(folder / TOKENIZER_CONFIG, functools.partial(_older_tokenizer, folder))
    if dtype is None and getattr(tokenizer, "is_fast", False):  # without config.json a class may put its own rules
        tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_FILE))
        settings = {"model_input_names": tokenizer.model_input_names, "padding_side": tokenizer.padding_side}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        edit_json(folder / TOKENIZER_CONFIG, lambda entries: entries.update(settings))
    if dtype is not None:
        edit_json(folder / CONFIG_NAME, functools.partial(_describe, model, dtype))
    if origin is not None and origin.eos_ids:
        _put_eos_first(tokenizer, folder, origin.eos_ids)


def _copy(location: str, patterns: tuple[str, ...], folder: Path) -> None:
    """Copy the files of these patterns from where a model comes from to `folder`."""
    for path in {path for pattern in patterns for path in source_folder(location).glob(pattern) if path.is_file()}:
        shutil.copyfile(path, folder / path.name)


def _describe(model: PreTrainedModel, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Change what a source's config.json says of its weights, and write older keys beside newer ones."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    found: dict[str, Any] = dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
    found["tie_word_embeddings"] = getattr(head, "weight", None) is embedding.weight
    if config.get("model_type") == model.config.model_type:  # else the model is the text part of that of the config
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # fully_shard's prefix
    config.setdefault("torch_dtype", None)
    if not found["tie_word_embeddings"]:  # some families tie by default
        config.setdefault("tie_word_embeddings", False)
    add_older_keys(config)
    for part in _parts(config):
        part.pop("quantization_config", None)  # the weights were dequantised
        part.pop("auto_map", None)  # no code was run that a source brings along, and none is copied
        part.update({key: value for key, value in found.items() if key in part})


def _put_eos_first(tokenizer: PreTrainedTokenizerBase, folder: Path, eos_ids: tuple[int, ...]) -> None:
    """Let all files name `eos_ids`, then the old ones. The tokenizer's own EOS, which vLLM and llama.cpp ask for,
    becomes the trained one, unless the chat template writes EOS itself.
    """

    def change(entries: dict[str, Any]) -> None:
        for part in _parts(entries):
            old = part.get("eos_token_id")
            before = old if isinstance(old, list) else [old]
            ids = [token for token in dict.fromkeys((*eos_ids, *before, tokenizer.eos_token_id)) if token is not None]
            if before[: len(eos_ids)] != [*eos_ids] and (part is entries or old is not None):
                part["eos_token_id"] = ids if len(ids) > 1 else ids[0]

    edit_json(folder / GENERATION_CONFIG_NAME, change)
    edit_json(folder / CONFIG_NAME, change)
    if eos_ids[0] != tokenizer.eos_token_id and "eos_token" not in str(tokenizer.chat_template):
        named = {"eos_token": tokenizer.convert_ids_to_tokens(eos_ids[0])}
        edit_json(folder / TOKENIZER_CONFIG, lambda entries: entries.update(named))
        edit_json(folder / "special_tokens_map.json", lambda entries: entries.update(named))


def add_older_keys(config: dict[str, Any]) -> None:
    """Write transformers 4's entries beside those of transformers 5 in what a config.json holds."""
    for part in _parts(config):
        part.update(_older_entries(part))


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A config, and that of its text where it has one."""
    return [config, *([text] if isinstance(text := config.get("text_config"), dict) else [])]


def _older_entries(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 4's entries for those of transformers 5 in a config.json."""
    renamed = {"dtype": "torch_dtype", "num_local_experts": "num_experts"}
    older = {old: config[new] for new, old in renamed.items() if new in config}
    given = config.get("rope_parameters") or {}
    of_each_type = any(isinstance(value, dict) for value in given.values())
    if not given or (of_each_type and not str(config.get("model_type")).startswith(_WITH_TWO_ROPES)):
        return older
    scaling = dict(given["full_attention"] if of_each_type else given)
    older |= {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in scaling}
    if of_each_type:
        older["rope_local_base_freq"] = given["sliding_attention"]["rope_theta"]
    older["rope_scaling"] = scaling if scaling.keys() - {"rope_type"} else None  # else gpt-oss assumes YaRN
    return older


def _older_tokenizer(folder: Path, entries: dict[str, Any]) -> None:
    entries.pop("auto_map", None)
    if entries.get("tokenizer_class") == "TokenizersBackend":
        entries["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(entries.get("extra_special_tokens"), list):
        entries["additional_special_tokens"] = entries.pop("extra_special_tokens")
    if (template := folder / CHAT_TEMPLATE_FILE).is_file() and not (folder / CHAT_TEMPLATE_DIR).is_dir():
        entries["chat_template"] = template.read_text(encoding="utf-8")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the object of a JSON file, if there is one; the file keeps its bytes where nothing changes."""
    if path.is_file():
        entries = json.loads(before := path.read_text(encoding="utf-8"))
        change(entries)
        if entries != json.loads(before):
            path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
