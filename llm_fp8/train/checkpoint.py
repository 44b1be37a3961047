"""Checkpoints that are complete or absent, whatever kills the process that writes them.

    output_dir/checkpoints/
      latest                     text: the name of the newest checkpoint's folder
      step-00000120/             named after the completed optimizer steps
        __0_0.distcp ...         tensors, in torch.distributed.checkpoint's (DCP's) format: one file per rank
        .metadata                DCP's index, a pickle: load only checkpoints that you trust
        meta.json                what is not a tensor: step, fingerprint, position in the data, the caller's entries
        manifest.json            every other file with its size (and SHA-256 if small); each tensor with shape and dtype

A save writes to `.tmp-step-00000120`, syncs it, renames it (POSIX rename is atomic), points `latest` to it and deletes
the oldest checkpoints beyond the limit. Loading compares the files with the manifest all the same, once per resume: a
copied checkpoint may be truncated.

Each rank writes its own shards, and another number of ranks can read them: saving and loading are collective, with the
same names on every rank. DCP's writer runs with one thread: with several it loses the exceptions of all but the first.
Background saves don't use `dcp.async_save`: its future covers the writing alone, and the manifest, the rename and the
pruning must follow after all ranks have written; and Python waits at its end for the thread of its executor, which
would keep a rank that has failed alive while the others wait for it in a collective.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from llm_fp8.utils.errors import UserError, existing_part, listed, reading, reason_not_written
from llm_fp8.utils.json_files import read_json, read_text
from llm_fp8.utils.torch_internals import sharded_like

if TYPE_CHECKING:
    from llm_fp8.distributed.strategy import DistributedStrategy

logger = logging.getLogger(__name__)

LATEST = "latest"
"""Value of --resume_from for the newest checkpoint of the run, and name of the file that points to it."""

RNG_PREFIX = "rng/"

STRATEGY_STATE = "engine"
"""Folder in a checkpoint for what DeepSpeed's engine saves itself."""

_META, _MANIFEST = "meta.json", "manifest.json"
_STEP_PREFIX, _TEMPORARY_PREFIX, _REPLACED_PREFIX = "step-", ".tmp-", ".replaced-"
_CHECKSUM_LIMIT_BYTES = 2**20
_FREE_SPACE_MARGIN_BYTES = 2**20

# torch warns at each save and load of a single process that it takes it for one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its files were compared with its manifest."""

    folder: Path
    tensors: dict[str, dict[str, Any]]
    """Name -> shape and dtype."""
    meta: dict[str, Any]
    saved_unix_s: float

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """The checkpoint in `folder`; `UserError` naming the first file that differs from its manifest."""
        if not (folder / _MANIFEST).is_file():
            raise UserError(f"--resume_from {folder} is not a complete checkpoint: it has no {_MANIFEST}.")
        with reading("--resume_from", str(folder), "the checkpoint", "Resume from another one."):
            manifest = read_json(folder / _MANIFEST)
            for name, expected in manifest["files"].items():
                if _describe_file(folder / name) != expected:
                    raise UserError(f"--resume_from {folder} is damaged: {name} has changed; resume from another one.")
            return cls(folder, manifest["tensors"], read_json(folder / _META), manifest["saved_unix_s"])

    @property
    def step(self) -> int:
        """The optimizer steps that were completed."""
        return int(self.meta["step"])

    def load(self, tensors: Mapping[str, Tensor], left_out: str | None = None) -> None:
        """Read the tensors of these names in place and bit for bit; collective.

        All that were saved must be asked for, but the random states of other ranks and devices, and names that begin
        with `left_out`. Raises `UserError`, before anything changes, where names, shapes or dtypes differ.
        """
        optional = (RNG_PREFIX, left_out) if left_out else (RNG_PREFIX,)
        saved = {name: f"{entry['dtype']} {entry['shape']}" for name, entry in self.tensors.items()}
        wanted = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()}
        problems = [
            f"{name} is {saved.get(name, 'absent')} in the checkpoint and {wanted.get(name, 'absent')} in this run"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name) and not (name not in wanted and name.startswith(optional))
        ]
        if problems:
            raise UserError(f"--resume_from {self.folder} holds other tensors than this run: {listed(problems)}.")
        dcp.load(_detached(tensors), storage_reader=dcp.FileSystemReader(self.folder))


class CheckpointManager:
    """Writes, finds and prunes the checkpoints of the run in `output_dir`, of which `limit` are kept.

    `is_main`: this rank renames and deletes. One run at a time may write to a folder; any number may read.
    """

    def __init__(self, output_dir: str | os.PathLike[str], limit: int, *, is_main: bool = True) -> None:
        self.folder = Path(output_dir) / "checkpoints"
        self.limit = limit
        self.is_main = is_main
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
        in_background: bool = False,
    ) -> Path:
        """Write a checkpoint after `step` and return its folder; collective. One of the same step is replaced.

        Args:
            tensors: name -> tensor of any dtype and device; DTensors are saved shard by shard.
            meta: the main process's entries for `meta.json`.
            strategy: one that saves state itself (`save_state`), to a folder of its own in the checkpoint.
            best_step: the step whose checkpoint is not deleted, whatever the limit.
            in_background: return once the tensors are copied to the host; what the thread that writes the copies raises
                is raised by the next `save` or `finish`.

        Raises `UserError` where the disk has no room; earlier checkpoints stay, nothing incomplete does.
        """
        self.finish()
        if not in_background:
            self._save(step, tensors, meta, None, strategy, best_step)
            return self.of_step(step)
        if self._background_group is None and dist.is_initialized():
            self._background_group = dist.new_group(backend="gloo")  # the thread's collectives must not meet training's
        copies = {name: _host_copy(tensor) for name, tensor in tensors.items()}
        meta = json.loads(json.dumps(meta))  # a copy too
        self._background = _Background(
            lambda: self._save(step, copies, meta, self._background_group, strategy, best_step)
        )
        return self.of_step(step)

    def of_step(self, step: int) -> Path:
        """The folder of this step's checkpoint, whether it exists or not."""
        return self.folder / f"{_STEP_PREFIX}{step:08d}"

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
        strategy: DistributedStrategy | None,
        best_step: int | None,
    ) -> None:
        final, needed_bytes = self.of_step(step), bytes_needed(tensors, strategy)
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
            _write_synced(temporary / _META, json.dumps({**meta, "step": step}, indent=1) + "\n")
            _write_synced(temporary / _MANIFEST, json.dumps(_build_manifest(temporary, metadata), indent=1) + "\n")
            _sync_folder(temporary)
            self._publish(temporary, final)
            self._prune(final, None if best_step is None else self.of_step(best_step))

        try:
            self._on_main(prepare, final, group)
            writer = dcp.FileSystemWriter(temporary, thread_count=1, sync_files=True)
            metadata = dcp.save(_detached(tensors), storage_writer=writer, process_group=group)
            if strategy is not None:
                strategy.save_state(temporary / STRATEGY_STATE)
            self._on_main(complete, final, group)
        except BaseException as error:
            explained = self._explained(error, final, needed_bytes)  # the disk as it is
            self.clean_up()
            if explained is error:
                raise
            raise explained from error

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
        for cause in _causes(error):
            if isinstance(cause, KeyboardInterrupt):
                return cause
            if isinstance(cause, OSError) and (reason := reason_not_written(cause)):
                return UserError(
                    f"The checkpoint {final} needs {needed_bytes / 2**30:.2g} GiB and could not be written: {reason}, "
                    "or choose another --output_dir. Checkpoints saved before are intact."
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
        others = [found.folder for found in self.newest_first() if found.folder != newest]
        for path in others[self.limit - 1 :]:
            if path == best:
                continue
            # Renamed first, so that a kill in the middle leaves no half checkpoint under a checkpoint's name.
            doomed = self.folder / f"{_TEMPORARY_PREFIX}deleting-{path.name}"
            path.rename(doomed)
            shutil.rmtree(doomed)

    def newest_first(self) -> list[Checkpoint]:
        """Complete checkpoints by the time of their save: a resumed run may have gone back by some steps."""
        found = []
        for pattern in (f"{_STEP_PREFIX}*", f"{_REPLACED_PREFIX}{_STEP_PREFIX}*"):
            for path in self.folder.glob(pattern):
                try:
                    found.append(Checkpoint.open(path))
                except UserError as error:  # neither loaded nor counted nor deleted
                    logger.info("a checkpoint is passed over and left: %s", error)
        return sorted(found, key=lambda checkpoint: checkpoint.saved_unix_s, reverse=True)

    def find(self, resume_from: str) -> Checkpoint:
        """The complete checkpoint that `--resume_from` means: a folder, or 'latest', the one that the `latest` file
        names or, where that is unreadable or damaged, the newest complete one. `UserError` where there is none.
        """
        if resume_from != LATEST:
            return Checkpoint.open(Path(resume_from))
        try:
            return Checkpoint.open(self.folder / read_text(self.folder / LATEST).strip())
        except UserError as error:
            candidates = self.newest_first()
            if not candidates:
                raise UserError(f"--resume_from latest: no complete checkpoint under {self.folder}.") from error
            logger.warning("--resume_from latest: falling back to %s, because %s", candidates[0].folder, error)
            return candidates[0]


def bytes_needed(tensors: Mapping[str, Tensor], strategy: DistributedStrategy | None) -> int:
    """Room on the disk for a checkpoint of `tensors` and what `strategy` saves itself, all ranks together."""
    own_bytes = 0 if strategy is None else strategy.state_bytes()
    return sum(tensor.nbytes for tensor in tensors.values()) + own_bytes + _FREE_SPACE_MARGIN_BYTES


def has_checkpoint(output_dir: str | os.PathLike[str]) -> bool:
    """Whether a run left a complete checkpoint in its folder."""
    return bool(CheckpointManager(output_dir, limit=1).newest_first())


class _Background:
    """A function that runs in a thread of its own; what it raises is raised by `wait`."""

    def __init__(self, work: Callable[[], object]) -> None:
        # Each thread begins at GPU 0, where the writer's synchronisation would make a context.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._failure: BaseException | None = None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                work()
            except BaseException as error:  # raised again by `wait`
                self._failure = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

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
    tensors = {
        name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype)}
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    files = {path.relative_to(folder).as_posix(): _describe_file(path) for path in paths}
    return {"saved_unix_s": time.time(), "files": files, "tensors": tensors}


def _describe_file(path: Path) -> dict[str, Any]:
    """Size, and SHA-256 if small: hashing 100 GB of tensors would take longer than writing them."""
    size = path.stat().st_size
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if size <= _CHECKSUM_LIMIT_BYTES else None
    return {"bytes": size, "sha256": digest}


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, the errors of single ranks inside it, and what they were raised from."""
    yield error
    nested = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    for inner in [*nested, error.__cause__, error.__context__]:
        if inner is not None:
            yield from _causes(inner)


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
