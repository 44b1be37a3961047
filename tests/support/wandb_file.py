"""Reads the file of an offline W&B run, for which W&B's Python package has no public reader.

`run-ID.wandb` is a LevelDB log (LevelDB's doc/log_format.md): a 7-byte header, then blocks of 32 KiB with pieces of
records. A piece has a checksum (4 bytes), a length (2), a kind (1) and data. The kind says whether the piece is a whole
record (1) or its first (2), a middle (3) or its last piece (4). A record is a protobuf message of W&B.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 2**15


@dataclass
class WandbRun:
    id: str = ""
    project: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    logged_summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    """Metric or pattern of metrics -> the metric on its x axis ('' if it is itself an axis)."""
    exit_code: int | None = None
    """None if the run was killed."""

    @property
    def summary(self) -> dict[str, Any]:
        """Return the summary that W&B shows: the last logged value of each key, unless the run set another value."""
        last = {key: value for entry in self.history for key, value in entry.items() if not key.startswith("_")}
        return {**last, **self.logged_summary}


def _records(data: bytes) -> Iterator[bytes]:
    position, pieces = 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # the rest of the block is padding
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        end = position + 7 + length
        if kind == 0 or end > len(data):  # incomplete, because the run was killed
            return
        pieces += data[position + 7 : end]
        position = end
        if kind in (1, 4):
            yield pieces
            pieces = b""


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def only_wandb_run(folder: Path) -> WandbRun:
    """Return the offline W&B run in a run folder, which must contain exactly one."""
    (run,) = wandb_runs(folder)
    return run


def wandb_runs(folder: Path) -> list[WandbRun]:
    """Return the offline W&B runs in a run folder, in order of time. Each start of the training writes one."""
    return [_run_in(file) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _run_in(file: Path) -> WandbRun:
    run = WandbRun()
    for record in _records(file.read_bytes()):
        message = wandb_internal_pb2.Record.FromString(record)
        kind = message.WhichOneof("record_type")
        content = getattr(message, kind)
        if kind == "run":
            run.id, run.project, run.name = content.run_id, content.project, content.display_name
            run.group, run.job_type, run.tags = content.run_group, content.job_type, tuple(content.tags)
            run.config.update(_values(content.config.update))
        elif kind == "config":
            run.config.update(_values(content.update))
        elif kind == "history":
            run.history.append(_values(content.item))
        elif kind == "summary":
            run.logged_summary.update(_values(content.update))
        elif kind == "metric":
            run.axes[content.name or content.glob_name] = content.step_metric
        elif kind == "exit":
            run.exit_code = content.exit_code
    return run
