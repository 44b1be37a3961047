"""Manage the output folder of a run: its default name, checks before the run, its lock, and messages for failures."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from llm_fp8.config.options import Config, RunConfig
from llm_fp8.distributed.process_group import decided_by_main, gathered
from llm_fp8.run.checkpoint import Checkpoint, CheckpointManager
from llm_fp8.settle.plan import RunPlan
from llm_fp8.settle.resume import LATEST
from llm_fp8.utils import errors
from llm_fp8.utils.errors import UserError, listed, nearest_existing, reading
from llm_fp8.utils.output import say
from llm_fp8.utils.ranks import LaunchRanks, launcher_store

LOCK = ".lock"  # locked by a run's main process; empty until the run begins to write, and never deleted after that
_SAVED = ("summary.json", "final", "checkpoints/step-*")  # a folder with none of these can be used by another run
_WRITTEN = ("run.json", "metrics.jsonl", "certificate.json", "checkpoints")
"""Other files that a run writes or deletes. They are an error in a folder that was not used by a run."""
_LOST_PEER = (
    "connection (closed|reset) by peer|connection refused|broken pipe|socket closed|remote process exited|timed out "
    "waiting|watchdog caught collective|nccl communicator was aborted"
)
_UNFINISHED = ".*.[0-9]*.tmp"  # unfinished files of a killed process (`write_text_atomic`, `export_hf`)


def claim_folder(config: Config, ranks: LaunchRanks, stack: contextlib.ExitStack) -> tuple[Path | None, str | None]:
    """Lock the output folder until `stack` closes. Return the folder (None without --output_dir) and the value of
    --resume_from, or 'latest' if the launcher restarted a run that has checkpoints. Raise `UserError` if the folder
    cannot be written, is in use or contains another run, or if the options differ between processes. Collective.
    """
    first, *others = gathered(config.options)
    if differing := [f"--{name}" for name in first if any(other[name] != first[name] for other in others)]:
        raise UserError(f"the processes were started with different {listed(differing)}; give all the same options.")
    return decided_by_main(lambda: _claimed(config.run, ranks, stack))


def _claimed(run: RunConfig, ranks: LaunchRanks, stack: contextlib.ExitStack) -> tuple[Path | None, str | None]:
    output_dir, resume_from, restarted = run.output_dir, run.resume_from, ranks.restart_count > 0
    if output_dir is None and restarted:
        output_dir = agree_on("output_dir", "") or None
    folder = Path(output_dir or "runs")
    with reading("--output_dir", folder, "the folder"):
        existing = nearest_existing(folder)
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"--output_dir {folder}: {existing} is not a folder that can be written.")
        if output_dir is not None:
            stack.enter_context(run_lock(folder))  # now no other run changes the folder
            if not restarted:
                _refuse_other_run(folder, resume_from)
            checkpoints = CheckpointManager(folder, limit=1)
            checkpoints.clean_up()
            if restarted and checkpoints.newest_first():
                resume_from = LATEST
    return None if output_dir is None else folder, resume_from


def default_folder(plan: RunPlan, stack: contextlib.ExitStack) -> Path:
    """Create and return a folder named after time, model and precision, locked until `stack` closes. Collective."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{plan.config.model.model_name} {plan.precision.name}").strip("-")
    now = f"{time.strftime('%Y%m%d-%H%M%S')}.{time.time_ns() // 10**6 % 1000:03}"  # runs may start in the same second
    return decided_by_main(lambda: stack.enter_context(run_lock(Path(agree_on("output_dir", f"runs/{now}-{slug}")))))


def find_checkpoint(folder: Path, resume_from: str | None, ranks: LaunchRanks) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None. Raise `UserError` if hosts find different ones. Collective."""
    resumed = CheckpointManager(folder, limit=1).find(resume_from)
    if len(set(gathered(None if resumed is None else resumed.step))) > 1:
        raise UserError(f"--output_dir {folder}: hosts find different checkpoints there; share the folder.")
    if resumed is None and ranks.rank == 0 and (resume_from is not None or _was_begun(folder)):
        say(f"{folder} has no checkpoint: the run starts from the beginning")
    return resumed


def _was_begun(folder: Path) -> bool:
    """Return True if a run has written to this folder."""
    return (folder / LOCK).is_file() and (folder / LOCK).stat().st_size > 0


def _refuse_other_run(folder: Path, resume_from: str | None) -> None:
    """Raise `UserError` if the folder has a run that this run does not continue, or files that it would overwrite."""
    has_checkpoints = bool(CheckpointManager(folder, limit=1).paths())
    if resume_from == LATEST and has_checkpoints:
        return
    if resume_from not in (None, LATEST) and folder.resolve() in Path(str(resume_from)).resolve().parents:
        return
    names = _SAVED if _was_begun(folder) else (*_SAVED, *_WRITTEN)
    if result := next((path.name for name in names for path in folder.glob(name)), None):
        alternative = " or add --resume_from latest" if has_checkpoints else ""
        if (folder / "final").is_dir():
            alternative += f"; --model_name {folder / 'final'} trains its result on"
        owner = "a run without a checkpoint (--save_every)" if resume_from == LATEST else "another run"
        raise UserError(f"--output_dir {folder} holds {owner}: {result}; choose another{alternative}.")


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[Path]:
    """Create and lock `folder`; raise `UserError` if it is in use. On exit, delete created folders if no run began."""
    existing, path = nearest_existing(folder), folder / LOCK
    folder.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as lock:
        lock.seek(0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read() or "a run that is about to begin"
            raise UserError(f"--output_dir {folder} is in use by {holder}; choose another folder.") from None
        except OSError as error:  # a file system without locks
            say(f"WARNING: --output_dir {folder} cannot be locked ({error.strerror}).")
        if not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
            raise UserError(f"--output_dir {folder} was released by another run just now; start again.")
        if _was_begun(folder):
            _sign(folder)
        try:
            yield folder
        finally:
            if not _was_begun(folder):
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # stop at the first folder that is not empty
                    for created in (folder.absolute(), *folder.absolute().parents):
                        if created == existing.absolute():
                            break
                        created.rmdir()


def _sign(folder: Path) -> None:
    """Write process id and host to the lock file, which also marks the folder as a run's."""
    (folder / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}")


def agree_on(name: str, value: str) -> str:
    """Return the `value` that the first caller passed for `name`. All ranks get the same, even after a restart."""
    store = launcher_store()
    return value if store is None else store.compare_set(f"llm_fp8/agreed/{name}", "", value).decode()


def begin_in(folder: Path) -> None:
    """Delete unfinished files of a killed run and mark `folder` as this run's. Call it before writing to `folder`."""
    for path in folder.glob(_UNFINISHED):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _sign(folder)


@contextlib.contextmanager
def explained_failures(folder_of_run: Callable[[], Path], in_compiled_step: Callable[[], bool]) -> Iterator[None]:
    """Convert errors that the block raises about unwritable files, lost processes or compiled layers to a `UserError`
    with advice. In the first step of compiled layers, when `in_compiled_step()` is True, any error may be about them.
    """
    try:
        yield
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        has_memory = not errors.is_out_of_memory(error)
        by_torch = dist.is_initialized() and isinstance(error, RuntimeError)
        by_compiler = any(each.__module__.startswith("torch._dynamo") for each in type(error).__mro__)
        if isinstance(error, OSError) and (reason := errors.unwritable_reason(error)):
            place = error.filename if isinstance(error.filename, str) else folder_of_run()  # caches name no file
            problem = f"{place} (--output_dir, HF_HOME, HF_DATASETS_CACHE or TMPDIR): {reason}"
        elif has_memory and by_torch and re.search(_LOST_PEER, str(error), re.IGNORECASE):
            problem = f"another process of this run is gone (see its output): {str(error).splitlines()[0][:200]}"
        elif has_memory and (by_compiler or in_compiled_step()):
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"compiled decoder layers failed; train with --no_compile ({text}).") from error
        elif reason := errors.lost_worker(error):
            raise UserError(f"{reason}.") from error
        else:
            raise
        advice = f"Continue with --resume_from latest --output_dir {folder_of_run()}"
        advice = advice if CheckpointManager(folder_of_run(), limit=1).paths() else "Nothing was saved"
        raise UserError(f"{problem}. {advice}.") from error
