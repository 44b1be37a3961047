"""SIGKILL to one of two ranks of fp8 trainings on GPUs, each resumed until it ends; and starts of sharded runs.

    python -m tests.faults.kills_two_gpus --seed 0 --count 21 --starts 60 --parallel 6 --output kills.json

Moments take turns: `collective` (the victim is stopped first, so that the other rank waits for it inside one), `save`
(while a checkpoint is being written) and `recorded step` (while the certificate's step is traced). A run is `different`
where its losses, norms or final weights are not, bit for bit, those of the uninterrupted run, and `late` where what was
left did not end within a minute. Attention is deterministic here; by default its gradients differ in the last bits.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.train.checkpoint import LATEST
from llm_fp8.train.run import STEPS_BEFORE_PROFILE
from llm_fp8.utils.json_files import write_json_atomic
from tests.faults.kills import first_difference, outcome
from tests.support.faults import START_S
from tests.support.launches import Torchrun
from tests.support.processes import wait_until
from tests.support.small import steps, write_model, write_rows

MODES: dict[str, list[str]] = {
    "fsdp_full": ["--sharding_mode=fsdp_full"],
    "fsdp_grad, saved beside training": ["--sharding_mode=fsdp_grad", "--async_save"],
    "ddp, accumulated": ["--sharding_mode=ddp", "--gradient_accumulation_steps=2"],
    "fsdp_full, block, recomputed": ["--sharding_mode=fsdp_full", "--fp8_scenario=block", "--gradient_checkpointing"],
}
MOMENTS = ("collective", "save", "recorded step")
SAME = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen", "epoch", "eval_loss")
"""Keys of metrics.jsonl that must not depend on kills; the others are of the clock and the machine."""
ENDS_WITHIN_S = 60
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


class TwoGpuRuns:
    """Starts runs of 16 steps that save and evaluate, and knows what each mode comes to undisturbed."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = write_model(scratch / "model", **shape)
        rows = write_rows(scratch / "rows.jsonl", 256)
        self._shared = [
            f"--model_name={model}", f"--dataset_name={rows}", "--use_te", "--mixed_precision=fp8", "--packing",
            "--max_seq_length=256", "--batch_size=8", "--learning_rate=1e-3", "--log_every=1", "--save_every=3",
            "--eval_every=5",
        ]  # fmt: skip
        self.codes = Counter[str]()

    def start(self, mode: str, folder: Path, num_steps: int = 16) -> Torchrun:
        """torchrun that trains in `folder`: resumed where there is a checkpoint, else anew, as a user would."""
        resume = [f"--resume_from={LATEST}"] if (folder / "checkpoints" / LATEST).exists() else []
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_name(f"{folder.name}.log")
        words = [*self._shared, *MODES[mode], f"--max_steps={num_steps}", f"--output_dir={folder}", *resume]
        return Torchrun(log, *words, **DETERMINISTIC)

    def finish(self, launch: Torchrun) -> dict[int, int | None]:
        """Wait for its end and count it; codes of the ranks that failed."""
        failed = launch.end(START_S)
        self.codes[str(sorted(failed.values(), key=str)) if failed else "0"] += 1
        return failed

    def whole(self, mode: str) -> Any:
        """The outcome of the mode undisturbed."""
        folder = self.scratch / f"whole-{list(MODES).index(mode)}"
        with self.start(mode, folder) as launch:
            if failed := self.finish(launch):
                raise RuntimeError(f"{mode} ends with {failed}: {launch.printed()[-3000:]}")
        return outcome(folder, SAME)

    def starts_well(self, number: int) -> str | None:
        """One step of a sharded run; what it printed where it did not end well."""
        with self.start("fsdp_full", self.scratch / f"start-{number}", num_steps=1) as launch:
            return launch.printed()[-2000:] if self.finish(launch) else None

    def kill(self, launch: Torchrun, folder: Path, moment: str, chance: random.Random) -> bool:
        """Kill rank 0 or 1 at `moment`; whether it came in time."""
        checkpoints = folder / "checkpoints"
        step = STEPS_BEFORE_PROFILE if moment == "recorded step" else chance.randint(1, 10)
        delay_s = chance.uniform(0, 0.5)

        def there() -> bool:
            if moment == "save":
                return len(list(checkpoints.glob("step-*"))) >= step // 5 and any(checkpoints.glob(".tmp-step-*"))
            return (folder / "metrics.jsonl").exists() and len(steps(folder)) >= step

        if not wait_until(there, launch, 0.001, START_S):
            return False
        try:
            victim = psutil.Process(launch.pid_of(chance.randint(0, 1)))
            if moment == "collective":
                victim.suspend()
                time.sleep(0.5)
            elif moment == "recorded step":
                time.sleep(delay_s)
            victim.send_signal(signal.SIGKILL)
        except (psutil.NoSuchProcess, ValueError):
            return False
        return True


def kill_and_resume(runs: TwoGpuRuns, number: int, seed: int, wholes: dict[str, Any]) -> dict[str, Any]:
    """One run that is killed once and resumed; what became of it."""
    chance = random.Random(f"{seed}-{number}")
    mode, moment = list(MODES)[number % len(MODES)], MOMENTS[number % len(MOMENTS)]
    folder = runs.scratch / f"run-{number}"
    found: dict[str, Any] = {"mode": mode, "moment": moment}
    with runs.start(mode, folder) as launch:
        found["killed"] = runs.kill(launch, folder, moment, chance)
        killed = time.monotonic()
        found["codes"] = list(runs.finish(launch).values())
        found["ended_after_s"] = round(time.monotonic() - killed, 1)
    with runs.start(mode, folder) as launch:
        if failed := runs.finish(launch):
            return {**found, "resume_failed": failed, "said": launch.printed()[-3000:]}
        resumed = re.search(r"resumed from .* after step (\d+)", launch.printed())
        found["resumed_after_step"] = int(resumed[1]) if resumed else None
    return {**found, "difference": first_difference(outcome(folder, SAME), wholes[mode])}


def summary(seed: int, runs: TwoGpuRuns, kills: list[dict[str, Any]], bad_starts: list[str]) -> dict[str, Any]:
    """What was tried so far, and what it broke."""
    sent = [kill for kill in kills if kill["killed"]]
    return {
        "seed": seed,
        "kills": dict(Counter(kill["moment"] for kill in sent)),
        "num_starts": sum(runs.codes.values()),
        "exit_codes": dict(runs.codes),
        "longest_end_s": max((kill["ended_after_s"] for kill in sent), default=None),
        "late": [kill for kill in sent if kill["ended_after_s"] > ENDS_WITHIN_S],
        "not_resumed": [kill for kill in kills if "resume_failed" in kill],
        "different": [kill for kill in kills if kill.get("difference")],
        "bad_starts": bad_starts,
        "runs": kills,
    }


def campaign(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All kills and further starts, so many at a time, until the deadline; --output is written after each."""
    began, runs, lock = time.monotonic(), TwoGpuRuns(scratch), threading.Lock()
    kills: list[dict[str, Any]] = []
    bad_starts: list[str] = []
    provenance = collect_provenance(sys.argv)

    def keep() -> None:
        if options.output:
            found = summary(options.seed, runs, kills, bad_starts)
            write_json_atomic(options.output, {"provenance": provenance, **found})

    def kill(number: int) -> None:
        if time.monotonic() - began < options.deadline_s:
            found = kill_and_resume(runs, number, options.seed, wholes)
            with lock:
                kills.append(found)
                keep()

    def start(number: int) -> None:
        if time.monotonic() - began < options.deadline_s:
            said = runs.starts_well(number)
            with lock:
                bad_starts.extend([said] if said else [])
                keep()

    with ThreadPoolExecutor(options.parallel) as pool:
        wholes = dict(zip(MODES, pool.map(runs.whole, MODES), strict=True))
        for _ in pool.map(kill, range(options.count)):
            pass
        for _ in pool.map(start, range(options.starts)):
            pass
    return summary(options.seed, runs, kills, bad_starts)


def main() -> None:
    """Run a campaign and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=21, help="kills")
    parser.add_argument("--starts", type=int, default=60, help="further starts")
    parser.add_argument("--parallel", type=int, default=4, help="runs at a time on the same two GPUs")
    parser.add_argument("--deadline_s", type=float, default=math.inf, help="begin no run after so many seconds")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(campaign(options, Path(scratch)), indent=1))


if __name__ == "__main__":
    main()
