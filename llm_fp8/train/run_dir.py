"""The folder of a run: its default name, the checks before a run, its lock, failures."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from llm_fp8.config.options import Config
from llm_fp8.distributed.process_group import decided_by_main, is_loss_of_a_peer
from llm_fp8.observability.metrics import GIB
from llm_fp8.train.checkpoint import LATEST, has_checkpoint
from llm_fp8.utils.errors import UserError, existing_part, reason_not_written
from llm_fp8.utils.ranks import LaunchRanks, agree_on

LOCK = ".lock"  # held by the main process for as long as it trains; the file stays
WRITTEN = ("run.json", "metrics.jsonl", "summary.json", "certificate.json", "checkpoints", "final")
"""What a run writes, or clears away, and so may not find of somebody else's."""
_UNFINISHED = ".*.[0-9]*.tmp"
"""What a killed process leaves of a file or export that it was writing (`write_text_atomic`, `export_hf`)."""


def with_output_dir(config: Config, ranks: LaunchRanks) -> Config:
    """`config` with an output folder; `UserError` where it cannot be written or holds another run. Processes restarted
    by the launcher continue from the newest checkpoint.
    """
    if config.run.output_dir is None:
        model = re.sub(r"[^A-Za-z0-9.]+", "-", config.model.model_name).strip("-")
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{config.precision.mixed_precision or 'auto'}"
        config = _with_run(config, output_dir=agree_on("output_dir", str(Path("runs") / name)))
    folder = Path(str(config.run.output_dir))
    existing = existing_part(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output_dir {folder}: {existing} is not a folder that can be written.")
    if ranks.restart_count > 0:
        return _with_run(config, resume_from=LATEST if has_checkpoint(folder) else config.run.resume_from)
    _refuse_other_run(config)
    return config


def as_one_run(config: Config) -> Config:
    """`config` with the main process's output folder. Collective."""
    return _with_run(config, output_dir=decided_by_main(lambda: config.run.output_dir))


def _with_run(config: Config, **changes: str | None) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))  # type: ignore[arg-type]


def _refuse_other_run(config: Config) -> None:
    """Raise `UserError` where the output folder holds a run that this one does not continue, or parts of anything."""
    folder, resume_from = Path(str(config.run.output_dir)), config.run.resume_from
    if resume_from == LATEST or (resume_from and folder.resolve() in Path(resume_from).resolve().parents):
        return
    found = next((name for name in WRITTEN if (folder / name).exists()), None)
    if found is not None:
        raise UserError(
            f"--output_dir {folder} holds another run ({found}); choose another or add --resume_from latest."
        )


@contextlib.contextmanager
def run_lock(config: Config, ranks: LaunchRanks) -> Iterator[None]:
    """Hold the output folder on the main rank; `UserError` where another process does or has begun a run there."""
    if ranks.rank:
        yield
        return
    folder = Path(str(config.run.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+") as lock:
        lock.seek(0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output_dir {folder} is in use by {lock.read()}; choose another folder.") from None
        except OSError as error:  # a disk without locks
            print(f"WARNING: --output_dir {folder} cannot be locked ({error.strerror}).", flush=True)
        if ranks.restart_count == 0:
            _refuse_other_run(config)
        for path in folder.glob(_UNFINISHED):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise `UserError` now where the export, hours later, would not fit on `folder`'s disk."""
    free_bytes = shutil.disk_usage(existing_part(folder)).free
    if free_bytes < needed_bytes:
        needed, free = f"{needed_bytes / GIB:.3g} GiB", f"{free_bytes / GIB:.3g} GiB"
        raise UserError(f"--output_dir {folder}: final/ takes {needed} of {free} free; choose another or --no_export.")


@contextlib.contextmanager
def explained_failures(folder: Path) -> Iterator[None]:
    """Turn running out of GPU memory or disk, or losing another process, into a `UserError`; `folder` is the run's."""
    go_on = f"Continue with --resume_from latest --output_dir {folder}."
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = f" ({torch.cuda.max_memory_allocated() / GIB:.1f} GiB at the peak)" if torch.cuda.is_available() else ""
        advice = "lower --batch_size, or add --gradient_checkpointing; 'llm-fp8 memory' says what fits"
        raise UserError(f"the GPU is out of memory{used}: {advice}.") from error
    except OSError as error:  # of libraries that write to their caches it names no file
        written = Path(error.filename) if isinstance(error.filename, str) else folder
        if reason := reason_not_written(error):
            raise UserError(f"{written} (--output_dir, HF_HOME or TMPDIR): {reason}. {go_on}") from error
        raise
    except RuntimeError as error:
        if not is_loss_of_a_peer(error):
            raise
        words = str(error).splitlines()[0][:200]
        raise UserError(f"another process of this run is gone, see what it said: {words}. {go_on}") from error
