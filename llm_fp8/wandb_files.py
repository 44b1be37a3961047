"""Reads the file of a W&B run (`run-ID.wandb`) without W&B's server.

The file is a LevelDB log (LevelDB's doc/log_format.md): a 7-byte header of W&B's own, then blocks of 32 KiB with pieces of records, each
piece with its checksum (4 bytes: the CRC-32 of zlib over kind and data, where LevelDB has another), length (2 bytes) and kind (1 byte: 1 whole,
2 first, 3 middle, 4 last). The records are W&B's protobuf messages. wandb's Python part has no reader for it any more, only its compiled part.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_fp8.errors import UserError

_BLOCK = 2**15
_HEADER = b":W&B"


@dataclass
class WandbRun:
    """What a W&B run's file holds."""

    file: Path
    run_id: str = ""
    project: str = ""
    entity: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    """One entry per W&B step, with the keys that were logged and W&B's own, which begin with an underscore."""
    logged_summary: dict[str, Any] = field(default_factory=dict)
    """What the run put into its summary itself; W&B adds the last value of each key of the history."""
    axes: dict[str, str] = field(default_factory=dict)
    """Metric, or pattern of metrics, and the one that it is drawn by ('' for a metric that is declared as an axis)."""
    exit_code: int | None = None
    """None for a run that is still going or was killed."""

    @property
    def summary(self) -> dict[str, Any]:
        """What W&B shows as the run's summary: the last value of each key, then what the run put there."""
        last = {key: value for entry in self.history for key, value in entry.items() if not key.startswith("_")}
        return {**last, **self.logged_summary}


def _records(file: Path, data: bytes) -> Iterator[bytes]:
    """The records of a file, in order; a last one that was never finished is left out. `UserError` for a damaged one."""
    position, pieces = 7, b""
    while position + 7 <= len(data):
        if _BLOCK - position % _BLOCK < 7:  # a header does not fit any more: the rest of the block is filled up
            position += _BLOCK - position % _BLOCK
            continue
        checksum, length, kind = struct.unpack("<IHB", data[position : position + 7])
        end = position + 7 + length
        if kind == 0 or end > len(data):
            return
        if zlib.crc32(data[position + 6 : end]) != checksum:
            raise UserError(
                f"{file} is damaged at byte {position}; W&B may still send what comes before: 'wandb sync {file.parent}'."
            )
        pieces += data[position + 7 : end]
        position = end
        if kind in (1, 4):
            yield pieces
            pieces = b""


def read_wandb_file(file: Path) -> WandbRun:
    """Read a run's file, also one of a run that was killed. Raises `UserError` for a file that is damaged or something else."""
    from wandb.proto import wandb_internal_pb2

    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    if not data:
        raise UserError(f"{file} is empty: its run was killed before W&B wrote anything.")
    if data[:4] != _HEADER:
        raise UserError(f"{file} is not the file of a W&B run; give the folder that holds the run's .wandb file.")
    run = WandbRun(file)
    messages: Any = wandb_internal_pb2  # its stub does not say what the generated module holds
    for record in _records(file, data):
        _take(run, messages.Record.FromString(record))
    return run


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _take(run: WandbRun, message: Any) -> None:
    """Add one of W&B's messages to `run`."""
    kind = message.WhichOneof("record_type")
    if kind == "run":
        stored = message.run
        run.run_id, run.project, run.entity = stored.run_id, stored.project, stored.entity
        run.name, run.group, run.job_type = stored.display_name, stored.run_group, stored.job_type
        run.tags = tuple(stored.tags)
    if kind in ("run", "config"):
        updates = (message.run.config if kind == "run" else message.config).update
        run.config.update({_key(item): json.loads(item.value_json) for item in updates})
    elif kind == "history":
        run.history.append({_key(item): json.loads(item.value_json) for item in message.history.item})
    elif kind == "summary":
        run.logged_summary.update({_key(item): json.loads(item.value_json) for item in message.summary.update})
    elif kind == "metric":
        run.axes[message.metric.name or message.metric.glob_name] = message.metric.step_metric
    elif kind == "exit":
        run.exit_code = message.exit.exit_code


def offline_runs(folder: Path) -> tuple[list[WandbRun], list[str]]:
    """The W&B runs of which `folder` or a folder below it holds the file, in order of their files' paths, and why others cannot be read.

    Raises `UserError` where the folder is missing or holds none.
    """
    if not folder.is_dir():
        raise UserError(f"--offline {folder} is not a folder; give an output folder, or one that holds several.")
    # 'offline-run-*' are those that W&B has not got yet; 'run-*' were sent while they ran.
    files = sorted(folder.rglob("offline-run-*/run-*.wandb"))
    if not files:
        raise UserError(
            f"--offline {folder} holds no offline W&B run; such a run is made with --use_wandb and WANDB_MODE=offline in the environment."
        )
    runs, unreadable = [], []
    for file in files:
        try:
            runs.append(read_wandb_file(file))
        except UserError as error:
            unreadable.append(str(error))
    return runs, unreadable
