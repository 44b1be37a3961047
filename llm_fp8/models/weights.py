"""Stored weights into a model: the files of a checkpoint, copied tensor by tensor into (sharded) parameters."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from llm_fp8.config.options import ModelConfig
from llm_fp8.models.fp8_checkpoint import StoredTensor
from llm_fp8.models.source import ModelSource, fp8_format_of, reading_model, text_config
from llm_fp8.models.weight_shards import (
    WeightFiller,
    hf_filler,
    local_shard,
    stored_parts,
    te_filler,
)
from llm_fp8.optim.adamw_master import give_remainder_
from llm_fp8.utils.errors import UserError, listed, reading
from llm_fp8.utils.json_files import read_json

_FETCH = "Fetch or export the model again."
_TIED = ("lm_head.weight", "embed_tokens.weight")
_QUANTISED = ("I8", "U8", "I16", "I32", "F4")


def weight_files(options: ModelConfig, source: ModelSource) -> list[Path]:
    """Local paths of the model's safetensors files, downloaded from the hub where needed. As in transformers,
    model.safetensors is taken before an index.
    """

    def fetch(file_name: str) -> Path:
        if source.is_local:
            return Path(source.location) / file_name
        with contextlib.suppress(EntryNotFoundError):  # where the hub cannot be asked too
            return Path(hf_hub_download(source.location, file_name))
        return Path(os.devnull) / file_name  # which is nowhere, and not in the current folder

    with reading_model("safetensors", options.model_name):
        files = [fetch(SAFE_WEIGHTS_NAME)]
        if not files[0].is_file() and (index := fetch(SAFE_WEIGHTS_INDEX_NAME)).is_file():
            files = [fetch(name) for name in sorted(set(read_json(index)["weight_map"].values()))]
    if missing := [path.name for path in files if not path.is_file()] or ([] if files else ["any of an empty index"]):
        words = f"there is no {listed(missing)}; weights must be safetensors, or random ones (--random_init)"
        raise UserError(f"--model_name {options.model_name}: {words}.")
    return files


def check_stored(options: ModelConfig, source: ModelSource, hf_config: PretrainedConfig) -> list[str]:
    """Raise `UserError` for stored weights that `StoredCheckpoint` cannot read. Where a config ties the lm_head to the
    embedding, and both are stored and differ, the config is changed not to, as transformers 5 does; returns the line
    that says so.
    """
    checkpoint = StoredCheckpoint(weight_files(options, source), hf_config)
    ties = [part for part in (hf_config, text_config(hf_config)) if getattr(part, "tie_word_embeddings", False)]
    found = [next((name for name in checkpoint.stored if name.endswith(end)), "") for end in _TIED]
    if not ties or not all(found):
        return []
    head, embedding = (checkpoint.read(name, torch.device("cpu")) for name in found)
    if torch.equal(head, embedding):
        return []
    for part in ties:
        part.tie_word_embeddings = False
    return [f"WARNING: config.json ties {found[0]} to {found[1]}, but both are stored and differ: they are not tied"]


def weights_digest(files: Sequence[Path]) -> str:
    """Tells weights apart by each file's size, its first MiB and its last: hexadecimal, 16 digits."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(size.to_bytes(8, "big") + file.read(2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def fill_te_model(model: PreTrainedModel, files: list[Path]) -> None:
    """Copy the weights of `files` into a TE model (this rank's shards of it). Raises `UserError` as `_fill`."""
    import te_llama

    blocks = {name: local_shard(parameter) for name, parameter in model.named_parameters()}
    _fill(model, te_filler(te_llama.spec_of(model), blocks), StoredCheckpoint(files, model.config))


def _fill(model: PreTrainedModel, filler: WeightFiller, checkpoint: StoredCheckpoint) -> None:
    """Pass every tensor of the checkpoint to `filler`; `UserError` names file and tensor that do not fit."""
    device = next(model.parameters()).device
    for path in checkpoint.files:
        with open_weights(path, device) as tensors:
            for name in tensors.offset_keys():
                if checkpoint.fp8 is None or not checkpoint.fp8.is_surplus(name):
                    filler.fill_rows(name, checkpoint.stored[name].shape, checkpoint.rows(name, tensors, device))
    with reading("--model_name", checkpoint.files[0].parent, "the weights", _FETCH):
        filler.finish()


class StoredCheckpoint:
    """The safetensors `files` of a model; fp8 tensors are read as fp32. Raises `UserError` for tensors in integers, and
    as `scales_of`.
    """

    def __init__(self, files: list[Path], hf_config: PretrainedConfig) -> None:
        self.files, self.fp8 = files, fp8_format_of(hf_config)
        self.stored: dict[str, StoredTensor] = {}
        for path in files:
            with open_weights(path, torch.device("cpu")) as tensors:
                for name in tensors.keys():
                    header = tensors.get_slice(name)
                    self.stored[name] = StoredTensor(path, header.get_dtype(), tuple(header.get_shape()))
        for name, (path, dtype, shape) in self.stored.items():
            if dtype in _QUANTISED and len(shape) in (2, 3):
                kind = f"'{name}' is {dtype} {list(shape)}"
                raise UserError(f"{path}: {kind}, quantised in a way that is not known here; give unquantised weights.")
        self._scales: dict[str, str] = {}
        if self.fp8 is not None or any(entry.dtype.startswith("F8") for entry in self.stored.values()):
            from llm_fp8.models.fp8_checkpoint import scales_of

            self._scales = scales_of(self.fp8, self.stored)

    def read(self, name: str, device: torch.device) -> Any:
        """Tensor `name`, whole."""
        with open_weights(self.stored[name].path, device) as tensors:
            rows = self.rows(name, tensors, device)
            return rows[:] if self.stored[name].shape else rows[...]  # a scalar has no rows

    def rows(self, name: str, tensors: Any, device: torch.device) -> Any:
        """Tensor `name` of the opened file `tensors`, of which `[a:b]` reads rows a to b of dim 0."""
        rows = tensors.get_slice(name)
        if self.fp8 is None or name not in self._scales:
            return rows
        from llm_fp8.models.fp8_checkpoint import DequantisedRows

        return DequantisedRows(rows, self.fp8, lambda: self._scale(self._scales[name], device))

    def _scale(self, name: str, device: torch.device) -> torch.Tensor:
        with open_weights(self.stored[name].path, device) as tensors:
            return tensors.get_tensor(name)


@contextlib.contextmanager
def open_weights(path: Path, device: torch.device) -> Iterator[Any]:
    """A safetensors file whose tensors are read to `device`; what fails in the block becomes a `UserError`."""
    with reading("--model_name", path, "the weights", _FETCH), safe_open(path, "pt", device=str(device)) as tensors:
        yield tensors


def load_weights(model: PreTrainedModel, options: ModelConfig, source: ModelSource, keep_lower_bits: bool) -> None:
    """Fill a model from the files of `source`, as `build.fill_weights`."""
    files = weight_files(options, source)
    if keep_lower_bits:
        for parameter in model.parameters():
            if parameter.dtype == torch.bfloat16:
                give_remainder_(parameter)
    if options.use_te:
        fill_te_model(model, files)
        return
    parts = stored_parts(model)
    if parts is None:
        what = "its files hold tensors that are computed from the model's"
        raise UserError(f"--model_name {options.model_name}: {what}; it needs --sharding_mode ddp.")
    checkpoint = StoredCheckpoint(files, model.config)
    _fill(model, hf_filler(model, parts, checkpoint.stored), checkpoint)
