"""The runs of a comparison: their command lines, their order, and where each stands when the command is given again.

A run is a process of `train_fp8.py`, or of torchrun with `train_multi_gpu.py`; it writes to OUTPUT/runs/VARIANT-seedN
and logs to OUTPUT/logs/VARIANT-seedN.log. The variants take turns within each seed, so that a machine that slows down
slows all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llm_fp8.config.options import AUTO_BATCH_SIZE
from llm_fp8.config.parser import parse_config
from llm_fp8.tools.compare.report import Failure
from llm_fp8.tools.compare.run_record import why_unfinished
from llm_fp8.tools.compare.variants import VARIANT_FIELDS, require_takers, variant_words
from llm_fp8.train.checkpoint import has_checkpoint
from llm_fp8.train.graceful_stop import GracefulStop
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY
from llm_fp8.utils.subprocesses import torchrun

_SET_HERE = (*VARIANT_FIELDS, "seed", "output_dir", "resume_from", "wandb_run_name")


@dataclass(frozen=True)
class PlannedRun:
    variant: str
    seed: int
    words: tuple[str, ...]
    """Options of the training script, without the output folder."""

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def label(self) -> str:
        """As in the report (`differences.label`)."""
        return f"{self.variant} seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, in the order in which they start."""

    runs: tuple[PlannedRun, ...]
    folder: Path
    num_gpus: int
    """GPUs of each run (processes on a machine without any)."""
    shared: list[str]
    """The words of the options that all runs share."""

    def run_folder(self, run: PlannedRun) -> Path:
        return self.folder / "runs" / run.name

    def log(self, run: PlannedRun) -> Path:
        return self.folder / "logs" / f"{run.name}.log"


Slot = tuple[str, ...]
"""The GPU numbers that one run gets at a time; empty on a machine without GPUs."""


def train_words(train: str) -> list[str]:
    """--train as words. Raises `UserError` where a quote in it is left open."""
    try:
        words = shlex.split(train)
    except ValueError as error:
        raise UserError(f"--train: {error}; quote the options as a shell would need them.") from error
    # The parser takes --batch-size too.
    return [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in words]


def default_folder(train: str, num_gpus: int) -> Path:
    """The folder of a comparison without --output: the same for the same options, so that repeating continues it."""
    return Path("runs") / f"compare-{hashlib.sha256(f'{train_words(train)} {num_gpus}'.encode()).hexdigest()[:10]}"


def plan_runs(train: str, variants: Sequence[str], seeds: Sequence[int], num_gpus: int, folder: Path) -> Plan:
    """The runs, seed by seed. Raises `UserError` for options that no variant can run with or that are set here."""
    words, prog = train_words(train), "train_multi_gpu.py" if num_gpus > 1 else "train_fp8.py"
    given = {match[1] for word in words if (match := re.match(r"--(\w+)", word))}
    if taken := [name for name in _SET_HERE if name in given]:
        raise UserError(
            f"--train: --{taken[0]} is set by the comparison itself (--arms, --seeds, --output); leave it out."
        )
    require_takers(list(variants), words)
    runs = []
    for seed in seeds:
        for variant in variants:
            own = [*variant_words(variant, words), "--seed", str(seed)]
            try:
                config = parse_config(own, prog=prog, parallel=num_gpus > 1)
            except UserError as error:
                raise UserError(f"--train: {error}") from error
            if config.data.batch_size == AUTO_BATCH_SIZE:
                raise UserError(
                    "--train: --batch_size auto would give each precision batches of its own; give a number."
                )
            if config.run.dry_run:
                raise UserError("--train: --dry_run trains nothing that could be compared; leave it out.")
            if config.parallel.fp8_params:
                raise UserError(
                    "--train: --fp8_params changes what is stored and not only what is computed in, and bf16 has no "
                    "such option; leave it out."
                )
            if config.run.use_wandb:
                own += ["--wandb_run_name", f"{variant}-seed{seed}"]
            runs.append(PlannedRun(variant, seed, tuple(own)))
    return Plan(tuple(runs), folder, num_gpus, words)


def claim_folder(plan: Plan) -> None:
    """Make the folder of `plan`. Raises `UserError` where it holds another comparison."""
    path = plan.folder / "plan.json"
    shared = {"train": plan.shared, "num_gpus": plan.num_gpus}
    if path.is_file():
        held = read_json(path, {"train": list, "num_gpus": int})
        if differing := [f"--{name}" for name in shared if held[name] != shared[name]]:
            raise UserError(
                f"--output {plan.folder} holds a comparison with another {' and '.join(differing)} ({path} has it); "
                "choose another folder, or repeat that."
            )
        return
    if plan.folder.exists() and (not plan.folder.is_dir() or any(plan.folder.iterdir())):
        raise UserError(f"--output {plan.folder} exists and holds no comparison; choose another folder.")
    write_json_atomic(path, shared)


def is_done(plan: Plan, run: PlannedRun) -> bool:
    """Whether `run` has finished; summary.json is the last thing that a run writes."""
    summary = plan.run_folder(run) / "summary.json"
    return summary.is_file() and why_unfinished(read_json(summary)) is None


def command_line(plan: Plan, run: PlannedRun) -> list[str]:
    """The command of `run`. One that was interrupted continues from its last checkpoint."""
    folder = plan.run_folder(run)
    options = [*run.words, "--output_dir", str(folder)]
    if has_checkpoint(folder):
        options += ["--resume_from", "latest"]
    if plan.num_gpus == 1:
        return [sys.executable, str(REPOSITORY / "train_fp8.py"), *options]
    return torchrun(plan.num_gpus, str(REPOSITORY / "train_multi_gpu.py"), *options)


def set_aside(folder: Path) -> None:
    """Rename the folder of a run that was interrupted before its first checkpoint; the run starts again."""
    if folder.exists() and not has_checkpoint(folder):
        folder.rename(folder.with_name(f"{folder.name}.unfinished-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"))


def make_slots(gpus: Sequence[str], num_gpus: int, parallel: int, share: bool) -> list[Slot]:
    """`parallel` slots of `num_gpus` each; `share` lets them overlap. Raises `UserError` where GPUs are too few."""
    if not gpus:
        if parallel > 1 and not share:
            raise UserError(
                f"--parallel {parallel}: this machine has no GPU, so the runs would share its CPU and their speed "
                "would mean nothing; add --share_gpus to do it and have the speed flagged."
            )
        return [()] * parallel
    if num_gpus > len(gpus):
        raise UserError(f"--num_gpus {num_gpus}: there are {len(gpus)} GPUs to use ({', '.join(gpus)}).")
    groups = [tuple(gpus[start : start + num_gpus]) for start in range(0, len(gpus) - num_gpus + 1, num_gpus)]
    if parallel > len(groups) and not share:
        raise UserError(
            f"--parallel {parallel} runs of {num_gpus} GPUs need {parallel * num_gpus}, and there are {len(gpus)}; "
            "lower it, or add --share_gpus to time runs on one GPU together and have their speed flagged."
        )
    return [groups[number % len(groups)] for number in range(parallel)]


@dataclass(frozen=True)
class _Active:
    run: PlannedRun
    slot: Slot
    process: subprocess.Popen[bytes]
    started: float
    log_start: int
    """Byte of its log at which this attempt begins, after earlier ones."""


@contextmanager
def only_launcher(folder: Path) -> Iterator[int]:
    """Lock `folder`; the runs inherit the file descriptor, so that one that outlives this process keeps the lock.
    Raises `UserError` where another comparison, or a run that it left behind, holds it.
    """
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--output {folder}: another comparison, or a run of one, is at work in it; wait for it or end it "
                f"('fuser {lock.name}' names it)."
            ) from None
        yield lock.fileno()


def launch(
    plan: Plan, slots: Sequence[Slot], say: Callable[[str], None]
) -> tuple[list[Failure], list[tuple[str, str]]]:
    """Run what has not finished yet, one run per slot at a time; a run that fails does not stop the others. Returns the
    failures and the labels of each pair of runs that shared hardware.

    On SIGINT, SIGTERM and SIGHUP the runs save and stop, then `Interrupted` is raised; a second SIGINT kills them.
    """
    with only_launcher(plan.folder) as lock, GracefulStop() as stop:
        hangup = signal.getsignal(signal.SIGHUP)
        if hangup == signal.SIG_DFL:  # nohup ignores it
            signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
        try:
            return _launch(plan, slots, say, stop, lock)
        finally:
            signal.signal(signal.SIGHUP, hangup)


class Interrupted(Exception):
    """The signal of this name stopped the launcher and all its runs."""


def _launch(
    plan: Plan, slots: Sequence[Slot], say: Callable[[str], None], stop: GracefulStop, lock: int
) -> tuple[list[Failure], list[tuple[str, str]]]:
    waiting = []
    for run in plan.runs:
        if is_done(plan, run):
            say(f"{run.name}: finished earlier, taken as it is ({plan.run_folder(run)})")
        else:
            waiting.append(run)
    overlaps_file = plan.folder / "overlaps.json"  # of earlier calls too, whose runs are taken as they are
    known = read_json(overlaps_file)["pairs"] if overlaps_file.is_file() else []
    overlaps: set[tuple[str, str]] = {(first, second) for first, second in known}
    failures: list[Failure] = []
    free = list(slots)
    active: list[_Active] = []
    try:
        while (waiting or active) and not stop.requested:
            while waiting and free:
                run = waiting.pop(0)
                if not has_checkpoint(plan.run_folder(run)):  # it starts again, so earlier overlaps don't count
                    overlaps = {pair for pair in overlaps if run.label not in pair}
                begun = _start(plan, run, free.pop(0), say, lock)
                # Without GPUs all runs share the CPU.
                beside = [it.run for it in active if not begun.slot or set(begun.slot) & set(it.slot)]
                overlaps |= {(min(run.label, other.label), max(run.label, other.label)) for other in beside}
                active.append(begun)
                write_json_atomic(overlaps_file, {"pairs": sorted(overlaps)})
            time.sleep(0.1)
            for done in [entry for entry in active if entry.process.poll() is not None]:
                active.remove(done)
                free.append(done.slot)
                failures += _outcome(plan, done, say)
        for entry in active:
            entry.process.send_signal(signal.SIGTERM)
        for entry in active:
            entry.process.wait()
    finally:
        for entry in active:
            if entry.process.poll() is None:
                os.killpg(entry.process.pid, signal.SIGKILL)
                entry.process.wait()
    if stop.requested:
        raise Interrupted(stop.requested)
    return failures, sorted(overlaps)


def _start(plan: Plan, run: PlannedRun, slot: Slot, say: Callable[[str], None], lock: int) -> _Active:
    folder, log = plan.run_folder(run), plan.log(run)
    set_aside(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"WANDB_RUN_GROUP": plan.folder.resolve().name, **os.environ}
    if slot:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot)
    command = command_line(plan, run)
    where = f" on GPU {','.join(slot)}" if slot else ""
    say(f"{run.name}: started{where}, log in {log}")
    with open(log, "ab") as file:
        log_start = file.tell()
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        # In a session of its own the run gets each signal once, from `_launch`.
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            pass_fds=(lock,),
        )
    return _Active(run, slot, process, time.monotonic(), log_start)


def _outcome(plan: Plan, done: _Active, say: Callable[[str], None]) -> list[Failure]:
    took = time.monotonic() - done.started
    if done.process.returncode == 0 and is_done(plan, done.run):
        say(f"{done.run.name}: done in {took:.0f} s")
        return []
    log = plan.log(done.run)
    reason = failure_reason(log.read_bytes()[done.log_start :].decode(errors="replace"), done.process.returncode)
    say(f"{done.run.name}: FAILED after {took:.0f} s: {reason} ({log})")
    return [Failure(done.run.variant, done.run.seed, reason, str(log))]


_TELLS_WHY = re.compile(r"\berror\b|\b\w+(Error|Exception|Interrupt)\b", re.IGNORECASE)
_TORCHRUN_FOOTER = re.compile(r"ChildFailedError|elastic/errors|error_file|Root Cause|^[=-]+$|^traceback +:")
"""torchrun's last lines, which say that a worker failed and not why."""


def failure_reason(log: str, exit_code: int) -> str:
    """Why a run failed: exit code or signal, and the last line of its log that tells of an error, else the last."""
    lines = [line.strip() for line in log.splitlines()]
    said = [line for line in lines if line and not line.startswith("$ ") and not _TORCHRUN_FOOTER.search(line)]
    last = ([line for line in said if _TELLS_WHY.search(line)] or said or ["it printed nothing"])[-1]
    ended = f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal.Signals(-exit_code).name}"
    return f"{ended}: {last[:300]}"
