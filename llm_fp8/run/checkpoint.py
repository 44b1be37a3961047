"""Write and read checkpoints. A checkpoint is complete or absent, even if the process that writes it is killed.

    output_dir/checkpoints/step-00000120/     contains the number of completed optimizer steps
        __0_0.distcp ...         tensors in the format of torch.distributed.checkpoint (DCP), one file per rank
        .metadata                DCP's index, a pickle: load only checkpoints that you trust
        meta.json                values other than tensors: step, fingerprint, position in the data, ...
        manifest.json            format, number of the save, every other file with its size (and SHA-256 if small)

A save writes to `.tmp-step-00000120`, syncs it, renames it (POSIX rename is atomic) and deletes the oldest checkpoints
beyond --save_total_limit. Loading compares the files with the manifest, since a copied checkpoint may be truncated.

Each rank writes its own shards, and any number of ranks can read them. Saving and loading are collective, and all ranks
pass the same tensor names. DCP's writer uses one thread, since with several it reports only errors of the first. Saves
in the background do not use `dcp.async_save`: its future covers only the writing, and its thread survives a failure.
"""

from __future__ import annotations

import copy
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from llm_fp8.distributed.process_group import decided_by_main
from llm_fp8.settle.resume import LATEST, SavedRun
from llm_fp8.utils.errors import UserError, listed, nearest_existing, reading, unwritable_reason
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.torch_internals import local_of, sharded_like

logger = logging.getLogger(__name__)

STRATEGY_STATE = "engine"  # folder in a checkpoint for the files of a strategy that `saves_itself`
FORMAT = 2  # incremented when the content of a checkpoint changes, so that other versions do not load it
_META, _MANIFEST = "meta.json", "manifest.json"
_STEP_FOLDERS = f"step-{'[0-9]' * 8}"  # pattern; folders that a user has renamed or copied do not match
_TEMPORARY_PREFIX = ".tmp-"
_REPLACED_PREFIX = f"{_TEMPORARY_PREFIX}replaced-"
_CHECKSUM_LIMIT_BYTES = 2**20

# torch warns in each save and load that it assumes a single process, even if there is only one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Checkpoint(SavedRun):
    """A complete checkpoint, whose files match its manifest."""

    save_number: int  # order of saves, as clocks of hosts differ and a resumed run may start from an earlier step

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Return the checkpoint in `folder`. Raise `UserError` if a file differs from the manifest."""
        contents = f"the files of a checkpoint and their {_MANIFEST}"
        with reading("--resume_from", folder, contents, f"Give another folder step-..., or {LATEST}."):
            manifest = json.loads((folder / _MANIFEST).read_bytes())
            if (written := manifest.get("format", 1)) != FORMAT:
                problem = f"has format {written}, and this version reads format {FORMAT}"
                raise UserError(f"--resume_from {folder} {problem}; resume with the version that wrote it.")
            for name, expected in manifest["files"].items():
                if _describe_file(folder / name) != expected:
                    raise ValueError(f"{name} has changed")
            return cls(folder, read_json(folder / _META), manifest["save_number"])

    @cached_property
    def kinds(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Name of each saved tensor -> its dtype and shape."""
        entries = dcp.FileSystemReader(self.folder).read_metadata().state_dict_metadata.items()
        tensors = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        return {name: (entry.properties.dtype, entry.size) for name, entry in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load saved values into `tensors`. Raise `UserError` if a name, dtype or shape is not as saved. Collective."""
        wanted = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        if names := [name for name, kind in wanted.items() if self.kinds.get(name) != kind]:
            problem = f"lacks this run's {listed(names)}, or has another dtype or shape"
            raise UserError(f"--resume_from {self.folder} {problem}.")
        advice = "Move it away to continue from an earlier checkpoint."
        with reading("--resume_from", self.folder, "its tensors", advice):
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(self.folder))


class CheckpointManager:
    """Saves and loads the checkpoints in `output_dir`, and keeps at most `limit`. Only the main rank deletes files."""

    def __init__(self, output_dir: Path, limit: int, is_main: bool = True, strategy: Any = None) -> None:
        """Pass a `strategy` only if it saves weights and optimizer state itself."""
        self.folder, self.limit = output_dir / "checkpoints", limit
        self.is_main, self.strategy = is_main, strategy
        self._background: Future[None] | None = None
        self._group: Any = None  # process group for saves, created for the first background save

    def clean_up(self) -> None:
        """Delete files of interrupted saves and deletions. Undo an interrupted replacement of a checkpoint."""
        if self.is_main:
            for replaced in self.folder.glob(f"{_REPLACED_PREFIX}*"):
                if not (final := self.folder / replaced.name.removeprefix(_REPLACED_PREFIX)).exists():
                    replaced.rename(final)
            for temporary in self.folder.glob(f"{_TEMPORARY_PREFIX}*"):
                shutil.rmtree(temporary)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        best_step: int | None = None,
        in_background: bool = False,
    ) -> Path:
        """Write a checkpoint after `step` and return its folder. Replace any checkpoint of the same step. If there is
        too little disk space, raise `UserError` and leave earlier checkpoints unchanged. Collective.

        Args:
            tensors: name -> tensor of any dtype and device. DTensors are saved shard by shard.
            meta: entries for `meta.json`. Only those of the main process are written.
            best_step: step whose checkpoint is not deleted, even if there are more than `limit`.
            in_background: return once the tensors are copied to the host. The next `save` or `finish` raises errors.
        """
        self.finish()
        if in_background:
            if self._group is None and dist.is_initialized():
                # The thread's collectives use a separate group, so that they do not interfere with training.
                self._group = dist.new_group(backend="gloo")
            copies = {name: _host_copy(tensor) for name, tensor in tensors.items()}
            save = functools.partial(self._save, step, copies, copy.deepcopy(meta), best_step)
            self._background = _in_background(save)
        else:
            self._save(step, tensors, meta, best_step)
        return self.of_step(step)

    def of_step(self, step: int) -> Path:
        """Return the path of the folder for a checkpoint of `step`, whether or not it exists."""
        return self.folder / f"step-{step:08d}"

    def finish(self) -> None:
        """Wait for the background save, if any, and raise its exception. Collective."""
        background, self._background = self._background, None
        if background is not None:
            background.result()

    def _save(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], best_step: int | None) -> None:
        final, strategy = self.of_step(step), self.strategy
        needed_bytes = sum(tensor.nbytes for tensor in tensors.values()) + (strategy.state_bytes() if strategy else 0)
        temporary = self.folder / f"{_TEMPORARY_PREFIX}{final.name}"

        def prepare() -> None:
            self.clean_up()
            if shutil.disk_usage(nearest_existing(self.folder)).free < needed_bytes:
                raise OSError(errno.ENOSPC, "less free space than the checkpoint needs")
            (temporary / STRATEGY_STATE if strategy is not None else temporary).mkdir(parents=True)

        def complete() -> None:
            earlier = self.newest_first()
            number = 1 + max((checkpoint.save_number for checkpoint in earlier), default=0)
            write_json_atomic(temporary / _META, {**meta, "step": step})
            manifest = {"format": FORMAT, "save_number": number, "files": _describe_files(temporary)}
            write_json_atomic(temporary / _MANIFEST, manifest)
            _sync_folder(temporary)
            if final.exists():  # `rename` cannot replace a folder; after a kill, `clean_up` undoes this rename
                final.rename(self.folder / f"{_REPLACED_PREFIX}{final.name}")
            temporary.rename(final)
            _sync_folder(self.folder)
            self.clean_up()
            best = None if best_step is None else self.of_step(best_step)
            others = [checkpoint.folder for checkpoint in earlier if checkpoint.folder not in (final, best)]
            for path in others[self.limit - 1 :]:  # beyond the limit
                shutil.rmtree(path.rename(self.folder / f"{_TEMPORARY_PREFIX}deleting-{path.name}"))

        try:
            decided_by_main(prepare, self._group)
            writer = _Writer(temporary, thread_count=1, sync_files=True)
            dcp.save(dict(tensors), storage_writer=writer, process_group=self._group)
            if strategy is not None:
                strategy.save_state(temporary / STRATEGY_STATE)
            decided_by_main(complete, self._group)
        except BaseException as error:
            cause = _cause_of(error)
            reason = unwritable_reason(cause) if isinstance(cause, OSError) else None
            self.clean_up()
            if reason is not None:
                raise UserError(f"{final} ({needed_bytes / 2**30:.2g} GiB) was not written: {reason}.") from error
            raise cause from (None if cause is error else error)

    def paths(self) -> list[Path]:
        """Return the folders of all checkpoints, complete or not, sorted by step."""
        return sorted(self.folder.glob(_STEP_FOLDERS))

    def newest_first(self) -> list[Checkpoint]:
        """Return the complete checkpoints, starting with the last saved."""
        complete = []
        for path in self.paths():
            try:
                complete.append(Checkpoint.open(path))
            except UserError as error:  # damaged checkpoints are neither loaded nor counted nor deleted
                logger.warning("skipping a checkpoint: %s", error)
        return sorted(complete, key=lambda checkpoint: checkpoint.save_number, reverse=True)

    def make_newest(self, checkpoint: Checkpoint) -> None:
        """Make 'latest' find `checkpoint`, if it is in this folder: those saved after it are no longer the run's."""
        earlier, folder = self.newest_first(), checkpoint.folder
        if any(later.folder.samefile(folder) for later in earlier[1:]) and os.access(folder, os.W_OK):
            manifest = {**read_json(folder / _MANIFEST), "save_number": earlier[0].save_number + 1}
            write_json_atomic(folder / _MANIFEST, manifest)

    def find(self, resume_from: str | None) -> Checkpoint | None:
        """Return the checkpoint in the folder `resume_from` or, for 'latest', the last complete one. Return None if
        `resume_from` is None or there is none for 'latest'. Raise `UserError` if it or every one is damaged.
        """
        if resume_from not in (None, LATEST):
            if ((run := Path(resume_from)) / self.folder.name).is_dir():
                raise UserError(f"--resume_from {run}: a run; use --output_dir {run} --resume_from {LATEST}.")
            return Checkpoint.open(run)
        if resume_from is None or not (paths := self.paths()):
            return None
        if len(paths) > 1 and (complete := self.newest_first()):
            return complete[0]
        return Checkpoint.open(paths[-1])  # raises if it is damaged


class _Writer(dcp.FileSystemWriter):
    """Raises the cause of an error, since DCP sends errors between ranks as pickles, which lack their context."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _cause_of(error) from error


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a daemon thread, which does not keep a failed process alive. The future raises errors of `work`."""
    done: Future[None] = Future()
    # The current device of a new thread is GPU 0, and the writer's synchronisation would create a context there.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            work()
            done.set_result(None)
        except BaseException as error:  # raised by `result`
            done.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return done


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` on the CPU, with the same sharding."""
    copied = local_of(tensor.detach()).to("cpu", copy=True)
    return sharded_like(copied, tensor) if isinstance(tensor, DTensor) else copied


def _describe_files(folder: Path) -> dict[str, Any]:
    """Return the size and checksum of each checkpoint file. Raise `UserError` if files of other hosts are missing."""
    # Read the names from DCP's index, since the return value of torch 2.11's `dcp.save` does not contain them.
    written = {entry.relative_path for entry in dcp.FileSystemReader(folder).read_metadata().storage_data.values()}
    if missing := sorted(name for name in written if not (folder / name).is_file()):
        raise UserError(f"--output_dir must be a shared folder: {listed(missing)} of other hosts are missing.")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _describe_file(path) for path in paths}


def _describe_file(path: Path) -> dict[str, Any]:
    """Return the size and, for small files, the SHA-256. Hashing 100 GB of tensors takes longer than writing them."""
    size = path.stat().st_size
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if size <= _CHECKSUM_LIMIT_BYTES else None
    return {"bytes": size, "sha256": digest}


def _cause_of(error: BaseException) -> BaseException:
    """Return the OSError or KeyboardInterrupt that caused an `error` of DCP, or `error` itself if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (OSError, KeyboardInterrupt)):
        failures = cause.failures if isinstance(cause, CheckpointException) else {}
        cause = next((failure for failure, _ in failures.values()), cause.__cause__ or cause.__context__)
    return error if cause is None else cause


def _sync_folder(folder: Path) -> None:
    """Make the names of a folder's files durable. Syncing only the files could lose their names in a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
