"""Checkpoints that are complete or absent, whatever kills the process that writes them.

    output_dir/checkpoints/
      latest                     text: the name of the newest checkpoint's folder
      step-00000120/             named after the completed optimizer steps
        __0_0.distcp ...         tensors, in torch.distributed.checkpoint's (DCP's) format: one file per rank
        .metadata                DCP's index, a pickle: load only checkpoints that you trust
        meta.json                what is not a tensor: step, fingerprint, position in the data, the caller's entries
        manifest.json            every other file with its size (and SHA-256 if small); each tensor with shape and dtype

A save writes to `.tmp-step-00000120`, syncs it, renames it (POSIX rename is atomic), points `latest` to it and deletes
the oldest checkpoints beyond the limit. Loading checks the manifest all the same: a copied checkpoint may be truncated.

Each rank writes its own shards, and another number of ranks can read them: saving and loading are collective, with the
same names on every rank. DCP's writer runs with one thread: with several it loses the exceptions of all but the first.
Background saves don't use `dcp.async_save`: its future covers the writing alone, and the manifest, the rename and the
pruning must follow after all ranks have written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import shutil
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from llm_fp8.utils.errors import UserError, existing_part, listed, reason_not_written
from llm_fp8.utils.json_files import read_json, read_text, require_entries
from llm_fp8.utils.torch_internals import sharded_like

if TYPE_CHECKING:
    from llm_fp8.distributed.strategy import DistributedStrategy

logger = logging.getLogger(__name__)

LATEST = "latest"
"""Value of --resume_from for the newest checkpoint of the run, and name of the file that points to it."""

FORMAT_VERSION = 1
RNG_PREFIX = "rng/"

STRATEGY_STATE = "engine"
"""Folder in a checkpoint for what DeepSpeed's engine saves itself."""

_META, _MANIFEST = "meta.json", "manifest.json"
_STEP_PREFIX, _TEMPORARY_PREFIX, _REPLACED_PREFIX = "step-", ".tmp-", ".replaced-"
_MANIFEST_ENTRIES: dict[str, Any] = {
    "format": int,
    "saved_unix_s": float,
    **dict.fromkeys(("files", "files.*", "tensors", "tensors.*"), dict),
    "tensors.*.shape": list,
    "tensors.*.dtype": str,
}
_CHECKSUM_LIMIT_BYTES = 2**20
_FREE_SPACE_MARGIN_BYTES = 2**20
_DIFFERENCES_SHOWN = 3

# torch warns at each save and load of a single process that it takes it for one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointManager:
    """Writes, finds and prunes the checkpoints of one run.

    Args:
        output_dir: folder of the run; checkpoints go to its subfolder `checkpoints`.
        limit: checkpoints kept, at least 1.
        is_main: whether this rank is the one that renames and deletes.

    One run at a time may write to an `output_dir`; any number may read.
    """

    def __init__(self, output_dir: str | os.PathLike[str], limit: int, *, is_main: bool = True) -> None:
        self.folder = Path(output_dir) / "checkpoints"
        self.limit = limit
        self.is_main = is_main
        self._damaged: set[Path] = set()
        """Those that a warning has named."""
        self._background: _Background | None = None
        self._background_group: Any = None

    def clean_up(self) -> None:
        """Remove what a killed save or deletion left behind, and undo an interrupted replacement."""
        if not self.is_main or not self.folder.is_dir():
            return
        for replaced in self.folder.glob(f"{_REPLACED_PREFIX}*"):
            original = self.folder / replaced.name.removeprefix(_REPLACED_PREFIX)
            if original.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(original)
        for temporary in self.folder.glob(f"{_TEMPORARY_PREFIX}*"):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        strategy: DistributedStrategy | None = None,
        best_step: int | None = None,
    ) -> Path:
        """Write a checkpoint and return its folder; collective. A checkpoint of the same step is replaced.

        Args:
            step: completed optimizer steps.
            tensors: name -> tensor of any dtype and device; DTensors are saved shard by shard.
            meta: the main process's entries for `meta.json`.
            strategy: one that saves state itself (`save_state`), to a folder of its own in the checkpoint.
            best_step: the step whose checkpoint is not deleted, whatever the limit.

        Raises `UserError` where the disk has no room; earlier checkpoints stay, nothing incomplete does.
        """
        self.finish()
        return self._save(step, tensors, meta, group=None, strategy=strategy, best_step=best_step)

    def save_in_background(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], best_step: int | None = None
    ) -> Path:
        """As `save`, but return once the tensors are copied to the host; a thread writes the copies.

        Waits for an earlier save first. Write errors are raised by the next `save_in_background` or `finish`.
        """
        self.finish()
        if self._background_group is None and dist.is_initialized():
            self._background_group = dist.new_group(backend="gloo")  # the thread's collectives must not meet training's
        copies = {name: _host_copy(tensor) for name, tensor in tensors.items()}
        meta = json.loads(json.dumps(meta))  # a copy too
        self._background = _Background(
            lambda: self._save(step, copies, meta, self._background_group, best_step=best_step)
        )
        return self.of_step(step)

    def of_step(self, step: int) -> Path:
        """The folder of this step's checkpoint, whether it exists or not."""
        return self.folder / f"{_STEP_PREFIX}{step:08d}"

    def holds(self, step: int) -> bool:
        """Whether there is a complete checkpoint of this step."""
        return self.of_step(step) in self._newest_first()

    def finish(self) -> None:
        """Wait for a save in the background, which is collective; raises what it raised."""
        background, self._background = self._background, None
        if background is not None:
            background.wait()

    def has_room(self, needed_bytes: int) -> bool:
        """Whether the disk has room for so many bytes."""
        return shutil.disk_usage(existing_part(self.folder)).free >= needed_bytes

    def _save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        group: Any,
        strategy: DistributedStrategy | None = None,
        best_step: int | None = None,
    ) -> Path:
        final = self.of_step(step)
        best = None if best_step is None else self.of_step(best_step)
        needed_bytes = bytes_needed(tensors, strategy)
        try:
            self._write(final, needed_bytes, tensors, {**meta, "step": step}, group, strategy, best)
        except BaseException as error:
            explained = self._explained(error, final, needed_bytes)  # the disk as it is
            if self.is_main:
                self.clean_up()
            if explained is error:
                raise
            raise explained from error
        return final

    def _write(
        self,
        final: Path,
        needed_bytes: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        group: Any,
        strategy: DistributedStrategy | None,
        best: Path | None,
    ) -> None:
        temporary = self.folder / f"{_TEMPORARY_PREFIX}{final.name}"

        def prepare() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clean_up()
            if not self.has_room(needed_bytes):
                raise OSError(errno.ENOSPC, "less free space than the checkpoint needs")
            temporary.mkdir()
            if strategy is not None:
                (temporary / STRATEGY_STATE).mkdir()

        def complete() -> None:
            _write_synced(temporary / _META, json.dumps(meta, indent=1) + "\n")
            manifest = _build_manifest(temporary, metadata)
            _write_synced(temporary / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
            _sync_folder(temporary)
            self._publish(temporary, final)
            self._prune(final, best)

        self._on_main(prepare, final, group)
        writer = dcp.FileSystemWriter(temporary, thread_count=1, sync_files=True)
        metadata = dcp.save(_detached(tensors), storage_writer=writer, process_group=group)
        if strategy is not None:
            strategy.save_state(temporary / STRATEGY_STATE)
        self._on_main(complete, final, group)

    def _on_main(self, work: Callable[[], None], final: Path, group: Any) -> None:
        """Let the main process do `work` while the others wait; its failure is raised on all ranks."""
        failure: BaseException | None = None
        if self.is_main:
            try:
                work()
            except BaseException as error:  # raised below, once the others know
                failure = error
        failed = torch.tensor([failure is not None], dtype=torch.int32)
        if dist.is_initialized():
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if failure is not None:
            raise failure
        if failed.item():
            raise UserError(f"The checkpoint {final} could not be written: see the main process's message.")

    def _explained(self, error: BaseException, final: Path, needed_bytes: int) -> BaseException:
        """The error to raise for a failed save: a `UserError` for a full disk, Ctrl-C as itself, else `error`."""
        causes = list(_causes(error))
        interrupt = next((cause for cause in causes if isinstance(cause, KeyboardInterrupt)), None)
        if interrupt is not None:
            return interrupt
        for cause in causes:
            if isinstance(cause, OSError) and (reason := reason_not_written(cause, self.folder)):
                return UserError(
                    f"The checkpoint {final} needs {_readable(needed_bytes)} and could not be written: {reason}, or "
                    "choose another --output_dir. Checkpoints saved before are intact."
                )
        return error

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give a complete checkpoint its name and let `latest` point to it."""
        replaced = self.folder / f"{_REPLACED_PREFIX}{final.name}"
        if final.exists():
            final.rename(replaced)  # a folder cannot be renamed onto another; `clean_up` undoes this after a kill
        temporary.rename(final)
        _sync_folder(self.folder)
        pointer = self.folder / f"{_TEMPORARY_PREFIX}{LATEST}"
        _write_synced(pointer, final.name + "\n")
        pointer.replace(self.folder / LATEST)
        _sync_folder(self.folder)
        if replaced.exists():
            shutil.rmtree(replaced)

    def _prune(self, newest: Path, best: Path | None) -> None:
        """Delete the oldest complete checkpoints beyond the limit, but never these two."""
        others = [path for path in self._newest_first() if path != newest]
        for path in others[self.limit - 1 :]:
            if path == best:
                continue
            # Renamed first, so that a kill in the middle leaves no half checkpoint under a checkpoint's name.
            doomed = self.folder / f"{_TEMPORARY_PREFIX}deleting-{path.name}"
            path.rename(doomed)
            shutil.rmtree(doomed)

    def _newest_first(self) -> list[Path]:
        """Complete checkpoints by the time of their save. Not by step: an output_dir may hold an earlier run's."""
        found = []
        for pattern in (f"{_STEP_PREFIX}*", f"{_REPLACED_PREFIX}{_STEP_PREFIX}*"):
            for path in self.folder.glob(pattern):
                try:
                    found.append((_verify(path)["saved_unix_s"], path.name, path))
                except UserError as error:  # neither loaded nor counted nor deleted
                    if path not in self._damaged:
                        logger.warning("a checkpoint is passed over and left: %s", error)
                    self._damaged.add(path)
        return [path for _, _, path in sorted(found, reverse=True)]

    def find(self, resume_from: str) -> Path:
        """The complete checkpoint that `--resume_from` means; `UserError` where there is none.

        'latest' is the one that the `latest` file names or, where that is unreadable or damaged, the newest complete
        one, with a warning. Anything else is a checkpoint's folder.
        """
        if resume_from != LATEST:
            _verify(Path(resume_from))
            return Path(resume_from)
        try:
            name = read_text(self.folder / LATEST).strip()
            if not name.startswith(_STEP_PREFIX) or "/" in name:
                raise UserError(f"{self.folder / LATEST} does not name a checkpoint.")
            _verify(self.folder / name)
            return self.folder / name
        except UserError as error:
            candidates = self._newest_first()
            if not candidates:
                raise UserError(
                    f"--resume_from latest: there is no complete checkpoint under {self.folder}."
                ) from error
            logger.warning("--resume_from latest: falling back to %s, because %s", candidates[0], error)
            return candidates[0]


def load_checkpoint(folder: Path, tensors: Mapping[str, Tensor], optional_prefix: str | None = None) -> dict[str, Any]:
    """Read the checkpoint in `folder` into the given tensors, in place and bit for bit; collective.

    Args:
        tensors: exactly the saved names, with the saved shapes and dtypes. Random states (names under `RNG_PREFIX`) of
            other ranks and devices may be left out.
        optional_prefix: tensors with such names are read where both sides have them alike, else left as they are.

    Returns the contents of meta.json. Raises `UserError`, before anything changes, where a file is missing or
    truncated, or names, shapes or dtypes differ.
    """
    saved = _verify(folder)["tensors"]
    if optional_prefix is not None:
        unlike = {
            name
            for name in saved.keys() | tensors.keys()
            if name.startswith(optional_prefix)
            and (name not in saved or name not in tensors or _shown(saved[name]) != _shown(tensors[name]))
        }
        saved = {name: described for name, described in saved.items() if name not in unlike}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in unlike}
    _require_same_tensors(folder, saved, tensors)
    dcp.load(_detached(tensors), storage_reader=dcp.FileSystemReader(folder))
    return read_json(folder / _META)


def bytes_needed(tensors: Mapping[str, Tensor], strategy: DistributedStrategy | None) -> int:
    """Room on the disk for a checkpoint of `tensors` and what `strategy` saves itself, all ranks together."""
    own_bytes = 0 if strategy is None else strategy.state_bytes()
    return sum(tensor.nbytes for tensor in tensors.values()) + own_bytes + _FREE_SPACE_MARGIN_BYTES


def has_checkpoint(output_dir: str | os.PathLike[str]) -> bool:
    """Whether a run left a complete checkpoint in its folder."""
    return bool(CheckpointManager(output_dir, limit=1)._newest_first())


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a complete checkpoint; `UserError` where it is not one."""
    _verify(folder)
    return read_json(folder / _META)


def saved_names(folder: Path) -> list[str]:
    """The names of the tensors in a complete checkpoint; `UserError` where it is not one."""
    return list(_verify(folder)["tensors"])


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise `UserError` naming every entry in which a checkpoint's fingerprint differs from the resuming run's."""
    current = json.loads(json.dumps(current))  # tuples become lists, as they did in the file
    keys = {**saved, **current}
    was, now = ({key: repr(side[key]) if key in side else "absent" for key in keys} for side in (saved, current))
    different = [
        f"{key} was {was[key]} and is {now[key]}"
        for key in keys
        if (key in saved, saved.get(key)) != (key in current, current.get(key))
    ]
    if different:
        raise UserError(f"--resume_from: the checkpoint does not belong to this run: {'; '.join(different)}.")


class _Background:
    """A function that runs in a thread of its own; what it raises is raised by `wait`.

    Not `concurrent.futures`: Python waits at its end for an executor's thread, which would keep a rank that has failed
    alive while the others wait for it in a collective.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        # Each thread begins at GPU 0, where the writer's synchronisation would make a context.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._work()
        except BaseException as error:  # raised again by `wait`
            self._failure = error

    def wait(self) -> None:
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def _host_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU, sharded as `tensor` is."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True)
    return sharded_like(tensor.to_local().to("cpu", copy=True), tensor)


def _detached(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _build_manifest(folder: Path, metadata: Metadata) -> dict[str, Any]:
    written = {entry.relative_path for entry in (metadata.storage_data or {}).values()}
    if missing := sorted(name for name in written if not (folder / name).is_file()):
        raise UserError(
            f"The checkpoint in {folder} lacks {listed(missing)}, which another process wrote: --output_dir must be "
            "one folder for all hosts, on a file system that they share and at the same path."
        )
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): _describe_file(path) for path in paths}
    tensors = {
        name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype)}
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return {"format": FORMAT_VERSION, "saved_unix_s": time.time(), "files": files, "tensors": tensors}


def _describe_file(path: Path) -> dict[str, Any]:
    """Size, and SHA-256 if small: hashing 100 GB of tensors would take longer than writing them."""
    size = path.stat().st_size
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if size <= _CHECKSUM_LIMIT_BYTES else None
    return {"bytes": size, "sha256": digest}


def _verify(folder: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint; `UserError` naming the first file that differs from it."""
    if not folder.is_dir():
        raise UserError(f"--resume_from {folder}: no such folder.")
    if not (folder / _MANIFEST).is_file():
        raise UserError(f"--resume_from {folder} is not a complete checkpoint: it has no {_MANIFEST}.")
    manifest = read_json(folder / _MANIFEST)
    if manifest.get("format") != FORMAT_VERSION:
        raise UserError(
            f"--resume_from {folder}: format {manifest.get('format')} is not {FORMAT_VERSION}, the one known here."
        )
    require_entries(str(folder / _MANIFEST), manifest, _MANIFEST_ENTRIES)
    for name, want in manifest["files"].items():
        try:
            have = _describe_file(folder / name) if (folder / name).is_file() else None
        except OSError as error:
            raise UserError(f"--resume_from {folder}: {name} cannot be read ({error.strerror}).") from error
        if have != want:
            problem = "has been changed"
            if have is None:
                problem = "is missing"
            elif have["bytes"] != want.get("bytes"):
                problem = f"has {have['bytes']} bytes instead of {want.get('bytes')}"
            raise UserError(f"--resume_from {folder} is damaged: {name} {problem}; resume from another checkpoint.")
    return manifest


def _require_same_tensors(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    missing = [name for name in saved if name not in wanted and not name.startswith(RNG_PREFIX)]
    problems = [f"{name} is not in the checkpoint" for name in wanted if name not in saved]
    problems += [f"{name} is in the checkpoint only" for name in missing]
    for name in wanted.keys() & saved.keys():
        have, want = _shown(saved[name]), _shown(wanted[name])
        if have != want:
            problems.append(f"{name} is {have} in the checkpoint and {want} in this run")
    if problems:
        more = f"; and {len(problems) - _DIFFERENCES_SHOWN} more" if len(problems) > _DIFFERENCES_SHOWN else ""
        raise UserError(
            f"--resume_from {folder} holds other tensors than this run: "
            f"{'; '.join(sorted(problems)[:_DIFFERENCES_SHOWN])}{more}."
        )


def _shown(tensor: Tensor | Mapping[str, Any]) -> str:
    """Dtype and shape of a tensor, or of one that a manifest describes."""
    if isinstance(tensor, Tensor):
        return f"{tensor.dtype} {list(tensor.shape)}"
    return f"{tensor['dtype']} {tensor['shape']}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, the errors of single ranks inside it, and what they were raised from."""
    yield error
    nested = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    for inner in [*nested, error.__cause__, error.__context__]:
        if inner is not None:
            yield from _causes(inner)


def _readable(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Sync the folder's entries (names); syncing a file covers its contents only."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rng_state(rank: int) -> dict[str, Tensor]:
    """The states of the random generators that training draws from: Python's, numpy's, torch's CPU and current GPU's.

    Integer tensors of fixed shape on the CPU, loaded in place like any other. Names carry the rank: each has its own.
    """
    prefix = f"{RNG_PREFIX}rank-{rank}/"
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    numpy_gauss = numpy_state["gauss"] if numpy_state["has_gauss"] else None
    position, key = numpy_state["state"]["pos"], numpy_state["state"]["key"].tolist()
    states = {
        f"{prefix}python": torch.tensor([version, *_optional_float_bits(gauss), *internal]),
        f"{prefix}numpy": torch.tensor([position, *_optional_float_bits(numpy_gauss), *key]),
        f"{prefix}torch_cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states[f"{prefix}torch_cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng_state(states: Mapping[str, Tensor], rank: int) -> None:
    """Put every random generator into the state that `rng_state` gave."""
    prefix = f"{RNG_PREFIX}rank-{rank}/"
    version, has_gauss, gauss_bits, *internal = states[f"{prefix}python"].tolist()
    random.setstate((version, tuple(internal), _bits_float(gauss_bits) if has_gauss else None))
    position, has_gauss, gauss_bits, *key = states[f"{prefix}numpy"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": _bits_float(gauss_bits),
        }
    )
    torch.set_rng_state(states[f"{prefix}torch_cpu"])
    if torch.cuda.is_available() and f"{prefix}torch_cuda" in states:
        torch.cuda.set_rng_state(states[f"{prefix}torch_cuda"])


def _optional_float_bits(value: float | None) -> tuple[int, int]:
    """(1, the value's 64 bits as an integer), or (0, 0) for None."""
    return (0, 0) if value is None else (1, struct.unpack("<q", struct.pack("<d", value))[0])


def _bits_float(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
