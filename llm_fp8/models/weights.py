"""The safetensors files of a model: found, read, and copied tensor by tensor into (sharded) parameters.

FSDP shards a parameter along dim 0: of R rows over n ranks each holds ceil(R / n), the last ranks fewer or none. A
rank's shard of a checkpoint is a range of rows of some tensors, and loading is slicing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from llm_fp8.models.source import ModelSource, reading_model, stored_fp8, text_config
from llm_fp8.optim.adamw_master import remainder_of, split_master
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.torch_internals import local_of
from te_llama import Part, UnsupportedArchitecture

RELOAD = "Fetch or export the model again."
_TIED = ("lm_head.weight", "embed_tokens.weight")


def checkpoint_of(source: ModelSource, hf_config: PretrainedConfig) -> StoredCheckpoint | None:
    """The weights of `source`, downloaded where needed; None where they are drawn. As in transformers,
    model.safetensors is taken before an index. Raises `UserError` for files that cannot be read.
    """
    if source.is_random:
        return None
    with reading_model("weights as safetensors", source.name):
        try:
            files = [cached_file(source.location, SAFE_WEIGHTS_NAME)]
        except OSError:  # there is none of this name
            index = cached_file(source.location, SAFE_WEIGHTS_INDEX_NAME)
            files, _ = get_checkpoint_shard_files(source.location, index)
    return StoredCheckpoint([Path(str(file)) for file in files], hf_config)


def untie(hf_config: PretrainedConfig, checkpoint: StoredCheckpoint | None) -> list[str]:
    """Change a config that ties the lm_head to the embedding, where both are stored and differ, as transformers 5 does.
    Returns the line that says so.
    """
    ties = [part for part in (hf_config, text_config(hf_config)) if getattr(part, "tie_word_embeddings", False)]
    if not ties or checkpoint is None:
        return []
    head, embedding = (next((name for name in checkpoint.stored if name.endswith(end)), None) for end in _TIED)
    if head is None or embedding is None or torch.equal(checkpoint.read(head), checkpoint.read(embedding)):
        return []
    for part in ties:
        part.tie_word_embeddings = False
    return [f"WARNING: config.json ties {head} to {embedding}, but both are stored and differ: they are not tied"]


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


def finite(tensors: Iterable[tuple[str, Tensor]], where: str) -> Iterator[tuple[str, Tensor]]:
    """`tensors` by name; `UserError`, which begins with `where`, at one that holds NaN or infinity."""
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            raise UserError(f"{where}: {name} holds NaN or infinity, and the model is of no use; give another.")
        yield name, tensor


class StoredTensor(NamedTuple):
    """A tensor's entry in the header of a safetensors file; `dtype` is "F32", "BF16", "F8_E4M3", ..."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class StoredCheckpoint:
    """The safetensors `files` of a model; fp8 tensors are read as fp32."""

    def __init__(self, files: list[Path], hf_config: PretrainedConfig) -> None:
        self.files, self.fp8 = files, stored_fp8(hf_config)
        self.stored: dict[str, StoredTensor] = {}
        self._scales: dict[str, Tensor] = {}  # weight -> its scale, which another file may hold
        for path in files:
            with open_weights(path) as tensors:
                for name in tensors.keys():
                    if self.fp8 is not None and self.fp8.is_surplus(name):
                        # A copy, which keeps no file mapped.
                        self._scales[name.removesuffix(self.fp8.suffix)] = tensors.get_tensor(name).clone()
                        continue
                    header = tensors.get_slice(name)
                    self.stored[name] = StoredTensor(path, header.get_dtype(), tuple(header.get_shape()))

    def read(self, name: str, device: torch.device | str = "cpu") -> Any:
        """Tensor `name`, whole."""
        with open_weights(self.stored[name].path, device) as tensors:
            rows = self.rows(name, tensors, device)
            return rows[:] if self.stored[name].shape else rows[...]  # a scalar has no rows

    def copy_into(self, tensors: Mapping[str, Tensor], targets: Mapping[str, tuple[str, Part]]) -> None:
        """Copy what belongs to `tensors` (this rank's shards, by name) into place; for `targets` see `Model`."""
        wanted = {name for name, (owner, _) in targets.items() if owner in tensors}
        place = next(iter(tensors.values())).device
        for path in dict.fromkeys(self.stored[name].path for name in targets if name in wanted):
            with open_weights(path, place) as in_file:
                for name in filter(wanted.__contains__, in_file.offset_keys()):
                    owner, part = targets[name]
                    local_shard(tensors[owner]).fill(part, self.rows(name, in_file, place))

    def on_meta(self, name: str) -> Tensor:
        """Describe what `read` returns, without memory."""
        _, dtype, shape = self.stored[name]
        read_as = torch.float32 if dtype.startswith("F8") else str_to_torch_dtype[dtype]
        return torch.empty(shape, dtype=read_as, device="meta")

    def rows(self, name: str, tensors: Any, device: torch.device | str) -> Any:
        """Tensor `name` of the opened file `tensors`, of which `[a:b]` reads rows a to b of dim 0."""
        rows, (_, dtype, shape) = tensors.get_slice(name), self.stored[name]
        if not dtype.startswith("F8"):
            return rows
        if self.fp8 is None or name not in self._scales or dtype != "F8_E4M3" or len(shape) != 2:
            raise ValueError(f"'{name}' is {dtype} {list(shape)}, for which config.json gives no scales")
        from llm_fp8.models.fp8_checkpoint import DequantisedRows

        return DequantisedRows(rows, self.fp8, self._scales[name].to(device))


@dataclass(frozen=True)
class LocalShard:
    """A shard along dim 0: `data` [n, ...] holds rows `start` to `start + n` of a parameter; n may be 0."""

    data: Tensor
    start: int
    remainder: Tensor | None = None  # of bf16 `data`: the lower bits of its fp32 values, where they are kept

    def fill(self, part: Part, rows: Any) -> None:
        """Copy what this rank has of a Hugging Face tensor into place, cast to the parameter's dtype; `rows[a:b]` gives
        its rows a to b of dim 0.
        """
        first, last = max(part.start, self.start), min(part.stop, self.start + len(self.data))
        if first >= last:
            return
        wanted = slice(first - part.start, last - part.start) if part.by_rows else slice(None)
        values = rows[wanted] if part.shape else torch.atleast_1d(rows[...])
        if self.data.is_floating_point() and not values.is_floating_point():
            raise UnsupportedArchitecture(f"'{part.hf_name}' holds {values.dtype} in the checkpoint, not floats")
        overlap = slice(first - self.start, last - self.start)
        if self.data.dtype == torch.bfloat16 and values.dtype in (torch.float32, torch.float16):
            values, remainder = split_master(values.to(self.data.device, torch.float32))
            if self.remainder is not None:
                part.view(self.remainder[overlap]).copy_(remainder)
        part.view(self.data[overlap]).copy_(values)


def local_shard(tensor: Tensor) -> LocalShard:
    """This rank's rows of `tensor` (shared memory): all of a plain tensor, the shard of a DTensor sharded on dim 0. A
    0-d tensor is one row.
    """
    remainder, start = remainder_of(tensor), 0
    if not isinstance(tensor, DTensor):
        return LocalShard(torch.atleast_1d(tensor.detach()), start, remainder)
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            rows_per_rank = -(-tensor.shape[0] // tensor.device_mesh.size(dim))
            start = min(tensor.device_mesh.get_local_rank(dim) * rows_per_rank, tensor.shape[0])
    return LocalShard(local_of(tensor).detach(), start, None if remainder is None else local_of(remainder))


@contextlib.contextmanager
def open_weights(path: Path, device: torch.device | str = "cpu") -> Iterator[Any]:
    """A safetensors file whose tensors are read to `device`; what fails in the block becomes a `UserError`."""
    with reading("--model_name", path, "the weights", RELOAD), safe_open(path, "pt", device=str(device)) as tensors:
        yield tensors
