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

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.tools.compare.report import Failure
from llm_fp8.tools.compare.run_record import why_unfinished
from llm_fp8.tools.compare.variants import VARIANT_FIELDS, variant_words
from llm_fp8.train.checkpoint import has_checkpoint
from llm_fp8.train.graceful_stop import GracefulStop
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY
from llm_fp8.utils.subprocesses import torchrun

PLAN_FILE = "plan.json"
_SET_HERE = (*VARIANT_FIELDS, "seed", "output_dir", "resume_from", "wandb_group", "wandb_run_name")
_POLL_S = 0.1


@dataclass(frozen=True)
class PlannedRun:
    """One run that the comparison needs."""

    variant: str
    seed: int
    words: tuple[str, ...]
    """Options of the training script, without the output folder."""

    @property
    def name(self) -> str:
        """Of its folder and log."""
        return f"{self.variant}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, in the order in which they start."""

    runs: tuple[PlannedRun, ...]
    folder: Path
    num_gpus: int
    """GPUs of each run (processes on a machine without any)."""
    train: str
    """The options that all runs share, as they were given."""

    def run_folder(self, run: PlannedRun) -> Path:
        """The output folder of `run`."""
        return self.folder / "runs" / run.name

    def log(self, run: PlannedRun) -> Path:
        """Where its output goes."""
        return self.folder / "logs" / f"{run.name}.log"


@dataclass(frozen=True)
class Slot:
    """What a run gets to itself, or shares: GPU numbers, empty on a machine without GPUs."""

    gpus: tuple[str, ...]


def train_words(train: str) -> list[str]:
    """The words of the options in quotes. Raises `UserError` where a quote in them is left open."""
    try:
        return shlex.split(train)
    except ValueError as error:
        raise UserError(f"--train: {error}; quote the options as a shell would need them.") from error


def default_folder(train: str, num_gpus: int) -> Path:
    """The folder of a comparison without --output: the same for the same options, so that repeating continues it."""
    return Path("runs") / f"compare-{hashlib.sha256(f'{train_words(train)} {num_gpus}'.encode()).hexdigest()[:10]}"


def plan_runs(train: str, variants: Sequence[str], seeds: Sequence[int], num_gpus: int, folder: Path) -> Plan:
    """The runs, seed by seed. Raises `UserError` for options that no variant can run with or that are set here."""
    words = train_words(train)
    given = {match[1] for word in words if (match := re.match(r"--(\w+)", word))}
    if taken := [name for name in _SET_HERE if name in given]:
        raise UserError(
            f"--train: --{taken[0]} is set by the comparison itself (--arms, --seeds, --output); leave it out."
        )
    runs = []
    for seed in seeds:
        for variant in variants:
            own = [*variant_words(variant, words), "--seed", str(seed)]
            config = _checked(own, num_gpus)
            if config.parallel.fp8_params:
                raise UserError(
                    "--train: --fp8_params changes what is stored and not only what is computed in, and bf16 has no "
                    "such option; leave it out."
                )
            if "wandb" in config.trackers:
                own += ["--wandb_group", folder.resolve().name, "--wandb_run_name", f"{variant}-seed{seed}"]
            runs.append(PlannedRun(variant, seed, tuple(own)))
    return Plan(tuple(runs), folder, num_gpus, train)


def _checked(words: list[str], num_gpus: int) -> Config:
    """The options parsed as the training script would; argparse exits with code 2 for an unknown one."""
    script = "train_multi_gpu.py" if num_gpus > 1 else "train_fp8.py"
    try:
        return parse_config(words, prog=script, parallel=num_gpus > 1)
    except UserError as error:
        raise UserError(f"--train: {error}") from error


def claim_folder(plan: Plan) -> None:
    """Make the folder of `plan`. Raises `UserError` where it holds another comparison."""
    path = plan.folder / PLAN_FILE
    shared = {"train": train_words(plan.train), "num_gpus": plan.num_gpus}
    if path.is_file():
        if read_json(path) != shared:
            raise UserError(
                f"--output {plan.folder} holds a comparison with other --train options ({path} has them); choose "
                "another folder, or repeat those."
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
    """Rename what an interrupted run left without a checkpoint: the run begins anew, and nothing is deleted."""
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
        return [Slot(())] * parallel
    if num_gpus > len(gpus):
        raise UserError(f"--num_gpus {num_gpus}: there are {len(gpus)} GPUs to use ({', '.join(gpus)}).")
    groups = [Slot(tuple(gpus[start : start + num_gpus])) for start in range(0, len(gpus) - num_gpus + 1, num_gpus)]
    if parallel > len(groups) and not share:
        raise UserError(
            f"--parallel {parallel} runs of {num_gpus} GPUs need {parallel * num_gpus}, and there are {len(gpus)}; "
            "lower it, or add --share_gpus to time runs on one GPU together and have their speed flagged."
        )
    return [groups[number % len(groups)] for number in range(parallel)]


@dataclass
class _Active:
    run: PlannedRun
    slot: Slot
    process: subprocess.Popen[bytes]
    started: float
    log_start: int
    """Where in its log this attempt begins: earlier ones stand before it."""


@dataclass(frozen=True)
class LaunchResult:
    """What came of launching: failures, and the pairs of runs that shared hardware while both ran."""

    failures: list[Failure]
    overlaps: list[tuple[str, str]]


@contextmanager
def only_launcher(folder: Path) -> Iterator[int]:
    """Hold `folder` for this process; the value is to be passed on to the runs, so that one that outlives it holds the
    folder too.

    Raises `UserError` where another comparison, or a run that one left behind, is at work in it.
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


def launch(plan: Plan, slots: Sequence[Slot], say: Callable[[str], None]) -> LaunchResult:
    """Run what has not finished yet, at most one run to a slot at a time; a run that fails does not stop the others.

    SIGINT, SIGTERM and SIGHUP are passed on: the runs save and stop, then `Interrupted` is raised. A second SIGINT
    kills them.
    """
    with only_launcher(plan.folder) as lock, GracefulStop() as stop:
        hangup = signal.getsignal(signal.SIGHUP)
        if hangup == signal.SIG_DFL:  # not under nohup
            signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
        try:
            return _launch(plan, slots, say, stop, lock)
        finally:
            signal.signal(signal.SIGHUP, hangup)


class Interrupted(Exception):
    """The launcher was told to stop, by the signal of this name, and no run is left behind."""


def _launch(
    plan: Plan, slots: Sequence[Slot], say: Callable[[str], None], stop: GracefulStop, lock: int
) -> LaunchResult:
    waiting = []
    for run in plan.runs:
        if is_done(plan, run):
            say(f"{run.name}: finished earlier, taken as it is ({plan.run_folder(run)})")
        else:
            waiting.append(run)
    overlaps = _read_overlaps(plan)
    failures: list[Failure] = []
    free = list(slots)
    active: list[_Active] = []
    try:
        while (waiting or active) and not stop.requested:
            while waiting and free:
                run = waiting.pop(0)
                if not has_checkpoint(plan.run_folder(run)):  # it begins anew, and what it shared before is gone
                    overlaps = {pair for pair in overlaps if _label(run) not in pair}
                begun = _start(plan, run, free.pop(0), say, lock)
                overlaps |= {_pair(begun.run, other.run) for other in active if _share(begun.slot, other.slot)}
                active.append(begun)
                write_json_atomic(plan.folder / "overlaps.json", {"pairs": sorted(overlaps)})
            time.sleep(_POLL_S)
            for done in [entry for entry in active if entry.process.poll() is not None]:
                active.remove(done)
                free.append(done.slot)
                failure = _outcome(plan, done, say)
                if failure is not None:
                    failures.append(failure)
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
    return LaunchResult(failures, sorted(overlaps))


def _start(plan: Plan, run: PlannedRun, slot: Slot, say: Callable[[str], None], lock: int) -> _Active:
    folder, log = plan.run_folder(run), plan.log(run)
    set_aside(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else dict(os.environ)
    command = command_line(plan, run)
    where = f" on GPU {','.join(slot.gpus)}" if slot.gpus else ""
    say(f"{run.name}: started{where}, log in {log}")
    with open(log, "ab") as file:
        log_start = file.tell()
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        # In a session of its own it gets signals from here alone, and each only once.
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


def _outcome(plan: Plan, done: _Active, say: Callable[[str], None]) -> Failure | None:
    took = time.monotonic() - done.started
    if done.process.returncode == 0 and is_done(plan, done.run):
        say(f"{done.run.name}: done in {took:.0f} s")
        return None
    log = plan.log(done.run)
    reason = failure_reason(log.read_bytes()[done.log_start :].decode(errors="replace"), done.process.returncode)
    say(f"{done.run.name}: FAILED after {took:.0f} s: {reason} ({log})")
    return Failure(done.run.variant, done.run.seed, reason, str(log))


_TELLS_WHY = re.compile(r"\berror\b|\b\w+(Error|Exception|Interrupt)\b", re.IGNORECASE)
_LAUNCHERS_WORDS = re.compile(r"ChildFailedError|elastic/errors|error_file|Root Cause|^[=-]+$|^traceback +:")
"""Of torchrun's last lines, which say that a worker failed and not why."""


def failure_reason(log: str, exit_code: int) -> str:
    """Why a run failed: exit code or signal, and the last line of its log that tells of an error, else the last."""
    lines = [line.strip() for line in log.splitlines()]
    said = [line for line in lines if line and not line.startswith("$ ") and not _LAUNCHERS_WORDS.search(line)]
    last = ([line for line in said if _TELLS_WHY.search(line)] or said or ["it printed nothing"])[-1]
    ended = f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal.Signals(-exit_code).name}"
    return f"{ended}: {last[:300]}"


def _share(first: Slot, second: Slot) -> bool:
    """Whether two slots have hardware in common; without GPUs all have the CPU."""
    return not first.gpus or not second.gpus or bool(set(first.gpus) & set(second.gpus))


def _label(run: PlannedRun) -> str:
    return f"{run.variant} seed {run.seed}"


def _pair(first: PlannedRun, second: PlannedRun) -> tuple[str, str]:
    names = sorted(map(_label, (first, second)))
    return names[0], names[1]


def _read_overlaps(plan: Plan) -> set[tuple[str, str]]:
    """Overlaps of earlier calls, whose runs are taken as they are."""
    path = plan.folder / "overlaps.json"
    return {(pair[0], pair[1]) for pair in read_json(path)["pairs"]} if path.is_file() else set()
