"""Export the final weights as an ordinary Hugging Face checkpoint.

An export is written to a temporary folder, which is then renamed, so `final/` is complete or absent. A TE model is
written in Hugging Face's layout (`te_llama.parameter_map`). Adapters are merged into the weights; `export_adapter`
writes only the adapters. side_files.py writes the files other than weights and model card.

Names and shapes determine which file a tensor is in. Parameters are gathered one by one, and a file is written once it
is complete. So host memory needs room for about one file (`MAX_FILE_SIZE`), and the GPU for one unsharded parameter.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from llm_fp8.config.options import EMBEDDED, LoraConfig
from llm_fp8.models.build import auto_class
from llm_fp8.models.model import Model, is_adapter, saved_tensors
from llm_fp8.models.side_files import NO_SOURCE, Origin, save_side_files
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.hf_internals import ignored_on_save

MAX_FILE_SIZE = "5GB"  # of a safetensors file, unless a single tensor is larger
_ADVICE = "Free disk space. If a checkpoint was saved, --resume_from latest then exports the model."


def export_hf(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype,
    card: dict[str, Any],
    is_main: bool = True,
    advice: str = _ADVICE,
    origin: Origin = NO_SOURCE,
) -> None:
    """Write `model`, in the dtypes of `hf_tensors`, and `tokenizer` to `folder`, which is replaced if it exists.
    `card` is the table in README.md. All ranks must call this function; only the rank with `is_main` writes. If writing
    fails, leave an existing folder unchanged and raise `UserError`, which ends with `advice`.
    """
    gathered = hf_tensors(model, dtype if is_main else None)
    if not is_main:
        deque(gathered, maxlen=0)
        return
    try:
        with replaced_folder(folder, advice=advice) as temporary:
            trained = ((model.file_name(name), tensor) for name, tensor in gathered)
            copied = ((name, model.stored.read(name)) for name in model.left_out_tensors if model.stored)
            write_weights(planned_tensors(model, dtype), itertools.chain(trained, copied), temporary)
            save_side_files(model.module, tokenizer, temporary, dtype, origin)
            (temporary / "README.md").write_text(model_card(card, auto_class(model.module.config).__name__))
    finally:
        deque(gathered, maxlen=0)  # after an error too, other ranks wait in the remaining collectives


def export_adapter(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    options: LoraConfig,
    base_model: str,
    card: dict[str, Any],
    is_main: bool = True,
    origin: Origin = NO_SOURCE,
) -> None:
    """Write only the adapters, in PEFT's format; `base_model` is a folder or hub id. Otherwise like `export_hf`."""
    from llm_fp8.models.lora import adapter_tensors, config_for_loading

    matrices = adapter_tensors(model.module).items()
    tensors = {name: model.full_tensor(matrix).to("cpu", copy=True).contiguous() for name, matrix in matrices}
    if not is_main:
        return
    with replaced_folder(folder) as temporary:
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        config_for_loading(model, options, base_model).save_pretrained(temporary)
        save_side_files(model.module, tokenizer, temporary, None, origin)
        reader = f"peft.PeftModel.from_pretrained({auto_class(model.module.config).__name__} of the base model, folder)"
        (temporary / "README.md").write_text(model_card(card, reader, "peft"))


def export_size_bytes(model: Model, dtype: torch.dtype, *, adapters_only: bool) -> int:
    """Return the size of an export in bytes: of all tensors, or only of the adapters."""
    if adapters_only:
        return sum(parameter.nbytes for name, parameter in model.module.named_parameters() if is_adapter(name))
    return sum(tensor.nbytes for tensor in planned_tensors(model, dtype).values())


@contextlib.contextmanager
def replaced_folder(folder: Path, contents: str = "The trained model", advice: str = _ADVICE) -> Iterator[Path]:
    """Yield a temporary folder, which replaces `folder` after the block. Errors name `contents` and give `advice`."""
    folder = folder.resolve()  # a folder cannot replace a link, so replace the link's target
    temporary, replaced = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in temporary.glob("*.safetensors"):  # safetensors makes its files readable only by their owner
            path.chmod(temporary.stat().st_mode & 0o666)
        if folder.exists():
            folder.rename(replaced)
        os.replace(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{contents} could not be written to {folder} ({error}). {advice}") from error
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        for path in (temporary, replaced):
            shutil.rmtree(path, ignore_errors=True)


def hf_tensors(model: Model, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield name and CPU copy of each unsharded Hugging Face tensor, one parameter at a time, with adapters merged in
    fp32, in the dtype of the source's files, or in `dtype`. If `dtype` is None, only run collectives.
    """
    tensors, adapters = saved_tensors(model.module), dict[str, Any]()
    if any(is_adapter(name) for name, _ in model.module.named_parameters()):
        from llm_fp8.models.lora import adapters_of, with_adapter

        adapters = {adapter.weight: adapter for adapter in adapters_of(model.module).values()}
    for name, parts in model.layout.items():
        saved = tensors[name]
        full = (model.full_tensor(saved) if isinstance(saved, nn.Parameter) else saved).detach()
        if adapter := adapters.pop(name, None):
            full = with_adapter(full, adapter, model.full_tensor)
        for part in parts:
            tensor = part.view(full if part.shape == full.shape else full[part.start : part.stop])
            if adapter := adapters.pop(part.hf_name, None):  # one of several adapters of a fused weight
                tensor = with_adapter(tensor, adapter, model.full_tensor)
            if dtype is not None:
                exported = model.export_dtype(part.hf_name, saved, dtype)
                yield part.hf_name, tensor.to("cpu", exported, copy=True).contiguous()
            del tensor
        del full


def planned_tensors(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that an export contains, on "meta", in the order and the dtypes of `hf_tensors`."""
    tensors, ignored = saved_tensors(model.module), ignored_on_save(model.module)
    planned: dict[str, Tensor] = {}
    for name, part in ((name, part) for name, parts in model.layout.items() for part in parts):
        if part.hf_name not in ignored:
            exported = model.export_dtype(part.hf_name, tensors[name], dtype)
            planned[model.file_name(part.hf_name)] = torch.empty(part.shape, dtype=exported, device="meta")
    return planned | model.left_out_tensors


def write_weights(planned: dict[str, Tensor], tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write `tensors` to model.safetensors, or to several files with an index, as `save_pretrained` does. Skip tensors
    that `planned` (on "meta") does not name. If both have the same order, only one file at a time is kept in memory.
    """
    split = split_torch_state_dict_into_shards(planned, max_shard_size=MAX_FILE_SIZE)
    pending: dict[str, dict[str, Tensor]] = {name: {} for name in split.filename_to_tensors}
    for name, tensor in tensors:
        if name not in planned:
            continue
        file_name = split.tensor_to_filename[name]
        contents = pending[file_name]
        contents[name] = tensor
        if len(contents) == len(split.filename_to_tensors[file_name]):
            save_file(contents, folder / file_name, metadata={"format": "pt"})
            del pending[file_name], contents
    if split.is_sharded:
        metadata = {"total_parameters": sum(tensor.numel() for tensor in planned.values()), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def model_card(card: dict[str, Any], reader: str, library: str = "transformers") -> str:
    """Return README.md for an export: a table of `card`, and `reader`, the Python call that loads the model."""
    base, bar = card["base model"], "\\|"
    rows = "\n".join(f"| {key} | {str(value).replace('|', bar)} |" for key, value in card.items())
    # The hub rejects a base_model that is not on the hub.
    base_entry = "" if base == EMBEDDED or Path(base).is_dir() else f"base_model: {base}\n"
    text = f"Trained with the llm-fp8 scripts. Load it with `{reader}`.\n\n| | |\n|---|---|\n{rows}\n"
    return f"---\nlibrary_name: {library}\n{base_entry}---\n\n# {base}, fine-tuned\n\n{text}"
