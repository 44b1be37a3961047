"""Files of an export other than weights: config, generation settings, and files of tokenizer and processors.

They are copies of the source's files, with updates of entries that training may change: dtype, EOS, chat template, and
whether lm_head is tied. Keys of transformers 4 are added to those of transformers 5, since transformers 4 and the
converters of vLLM and llama.cpp ignore the new keys (RoPE then has base 10,000) or fail (checked with 5.23 and 4.57).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import shutil
from collections.abc import Iterator
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
_WITH_TWO_ROPES = ("gemma3", "olmo3")  # have two RoPE tables in transformers 4; later families do not use its keys


@dataclass(frozen=True)
class Origin:
    """Location of a model's source (`ModelSource.location`; "" if unknown), and EOS ids that end training documents."""

    location: str
    eos_ids: tuple[int, ...] = ()


NO_SOURCE = Origin("")


@functools.cache
def source_folder(location: str) -> Path:
    """Return the folder of a model's files. For a hub id, first download those files that an export copies."""
    if Path(location).exists():
        return Path(location) if Path(location).is_dir() else Path(location).parent
    with reading_model("files beside the weights", location):
        wanted = [CONFIG_NAME, GENERATION_CONFIG_NAME, *_OF_TOKENIZER]
        try:
            return Path(snapshot_download(location, allow_patterns=wanted))
        except LocalEntryNotFoundError:  # offline; the cache may have only the files that transformers loaded
            return Path(hf_hub_download(location, CONFIG_NAME)).parent


def save_side_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None,
    origin: Origin = NO_SOURCE,
) -> None:
    """Write all files of an export except weights and model card. An adapter (`dtype` is None) gets no config.json."""
    _save_tokenizer(tokenizer, folder, has_config=dtype is not None)
    _copy(origin.location, (GENERATION_CONFIG_NAME, *([] if dtype is None else [CONFIG_NAME])), folder)
    if dtype is not None:
        if not (folder / CONFIG_NAME).is_file():
            model.config.save_pretrained(folder)
        with edited_json(folder / CONFIG_NAME) as config:
            _describe(model, dtype, config)
    if model.can_generate() and not (folder / GENERATION_CONFIG_NAME).is_file():
        model.generation_config.save_pretrained(folder)
    if origin.eos_ids:
        _put_eos_first(tokenizer, folder, origin.eos_ids)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, has_config: bool) -> None:
    """Write tokenizer files that transformers 4 can load. `has_config` is True if `folder` gets a config.json."""
    tokenizer.save_pretrained(folder)
    _copy(tokenizer.name_or_path, _OF_TOKENIZER, folder)
    if tokenizer.chat_template != tokenizer.init_kwargs.get("chat_template"):  # --chat_template
        (folder / "chat_template.json").unlink(missing_ok=True)  # processors would use this old file
    with edited_json(folder / TOKENIZER_CONFIG) as settings:
        settings.pop("auto_map", None)
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        if (template := folder / CHAT_TEMPLATE_FILE).is_file() and not (folder / CHAT_TEMPLATE_DIR).is_dir():
            settings["chat_template"] = template.read_text(encoding="utf-8")
        if not has_config and getattr(tokenizer, "is_fast", False):  # a model's tokenizer class could change rules
            tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_FILE))
            settings["model_input_names"] = tokenizer.model_input_names
            settings["padding_side"], settings["tokenizer_class"] = tokenizer.padding_side, "PreTrainedTokenizerFast"


def _copy(location: str, patterns: tuple[str, ...], folder: Path) -> None:
    """Copy the files that match `patterns` from a model's `location` to `folder`, or nothing if `location` is ""."""
    paths = {path for pattern in patterns if location for path in source_folder(location).glob(pattern)}
    for path in filter(Path.is_file, paths):
        shutil.copyfile(path, folder / path.name)


def _describe(model: PreTrainedModel, dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Correct the entries of `config`, the source's config.json, that describe weights. Add keys of transformers 4."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    facts: dict[str, Any] = dict.fromkeys(("dtype", "torch_dtype"), str(dtype).removeprefix("torch."))
    facts["tie_word_embeddings"] = getattr(head, "weight", None) is embedding.weight
    if config.get("model_type") == model.config.model_type:  # otherwise `model` is only the text part
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # `fully_shard` adds the prefix
    config.setdefault("torch_dtype", None)
    if not facts["tie_word_embeddings"]:  # the default of some families is True
        config.setdefault("tie_word_embeddings", False)
    add_older_keys(config)
    for part in _parts(config):
        part.pop("quantization_config", None)  # the weights were dequantised
        part.pop("auto_map", None)  # the source's Python code was not run and is not copied
        part.update({key: value for key, value in facts.items() if key in part})


def _put_eos_first(tokenizer: PreTrainedTokenizerBase, folder: Path, eos_ids: tuple[int, ...]) -> None:
    """Put `eos_ids` first in the lists of EOS ids in config.json and generation_config.json. Unless the chat template
    uses the tokenizer's EOS, make the first of `eos_ids` the tokenizer's EOS, which vLLM and llama.cpp read.
    """
    for name in (GENERATION_CONFIG_NAME, CONFIG_NAME):
        with edited_json(folder / name) as entries:
            for part in _parts(entries):
                old = part.get("eos_token_id")
                before = old if isinstance(old, list) else [old]
                if before[: len(eos_ids)] != [*eos_ids] and (part is entries or old is not None):
                    tokens = [token for token in (*eos_ids, *before, tokenizer.eos_token_id) if token is not None]
                    ids = list(dict.fromkeys(tokens))
                    part["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    if eos_ids[0] != tokenizer.eos_token_id and "eos_token" not in str(tokenizer.chat_template):
        for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
            with edited_json(folder / name) as entries:
                entries["eos_token"] = tokenizer.convert_ids_to_tokens(eos_ids[0])


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a config and, if it has one, its text config."""
    return [config, *([text] if isinstance(text := config.get("text_config"), dict) else [])]


def add_older_keys(config: dict[str, Any]) -> None:
    """Add the entries of transformers 4 to `config`, the content of a config.json of transformers 5."""
    for part in _parts(config):
        renamed = {"dtype": "torch_dtype", "num_local_experts": "num_experts"}
        part.update({old: part[new] for new, old in renamed.items() if new in part})
        rope = part.get("rope_parameters") or {}
        has_types = any(isinstance(value, dict) for value in rope.values())  # there is a table per type of layer
        if not rope or (has_types and not str(part.get("model_type")).startswith(_WITH_TWO_ROPES)):
            continue
        scaling = dict(rope["full_attention"] if has_types else rope)
        part.update({key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in scaling})
        if has_types:
            part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        if "longrope" in scaling.values() and str(part.get("model_type")).startswith("phi3"):  # which allows no others
            scaling = {"type": "longrope", **{key: scaling[key] for key in ("short_factor", "long_factor")}}
        part["rope_scaling"] = scaling if scaling.keys() - {"rope_type"} else None  # gpt-oss assumes YaRN if missing


@contextlib.contextmanager
def edited_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a JSON file's object for editing, and write it if it changed. A missing file is not created."""
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    entries = copy.deepcopy(before)
    yield entries
    if path.is_file() and entries != before:
        path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
