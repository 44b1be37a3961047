"""Kills and signals at random moments of random runs on the CPU, each run resumed until it ends.

    python -m tests.faults.kills --seed 0 --count 300 --output kills.json

A run counts as `different` where its metrics (but for the clock) or final weights are not, bit for bit, those of the
uninterrupted run, and as `torn` where a start after a kill ended with another code than 0, 130, 143 or the kill's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.train.checkpoint import LATEST
from llm_fp8.utils.json_files import write_json_atomic
from tests.support.processes import exit_code, start_training
from tests.support.small import records, write_model, write_rows

SCENARIOS: dict[str, list[str]] = {
    "padded": [],
    "packed": ["--packing", "--max_seq_length=256", "--batch_size=4"],
    "accumulated": ["--batch_size=4", "--gradient_accumulation_steps=2"],
    "bf16": ["--mixed_precision=bf16"],
    "lora": ["--lora_rank=4", "--lora_dropout=0.1"],
    "streamed": ["--streaming", "--eval_every=0", "--validation_fraction=0"],
    "8-bit moments": ["--optimizer=adamw_8bit", "--mixed_precision=bf16"],
}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CLEAN = {signal.SIGKILL: {-9}, signal.SIGTERM: {143, -15}, signal.SIGINT: {130}}
"""Exit codes of a start that the signal ended; 0 where it came too late."""


def outcome(folder: Path, names: Sequence[str] = ()) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What must not depend on kills: metrics (these, or all but the clock's), and the bytes of the exported weights."""
    of_clock = ("time_s", "per_s", "per_s_per_gpu", "tflops")
    kept = [
        {key: record[key] for key in record if (key in names if names else not key.endswith(of_clock))}
        for record in records(folder)
    ]
    weights = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("final/*.safetensors")}
    return kept, weights


def first_difference(found: Any, expected: Any) -> Any:
    """Of two outcomes: the first two records that differ, or what else does; None where they are the same."""
    records = next(([one, two] for one, two in zip(found[0], expected[0], strict=False) if one != two), None)
    counts = [len(found[0]), len(expected[0])]
    if records or counts[0] != counts[1]:
        return {"records": records, "num_records": counts}
    return "final weights" if found[1] != expected[1] else None


class SmallRuns:
    """Starts runs of twelve steps that save and evaluate, and knows what each scenario comes to undisturbed."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.log = scratch, scratch / "log"
        self._model, self._rows = write_model(scratch / "model"), write_rows(scratch / "rows.jsonl", 64)
        self._undisturbed: dict[str, tuple[Any, float]] = {}

    def start(self, scenario: str, folder: Path) -> Any:
        """A process that trains in `folder`: resumed where there is a checkpoint, else anew, as a user would."""
        resume = [f"--resume_from={LATEST}"] if (folder / "checkpoints" / LATEST).exists() else []
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        shared = [
            f"--model_name={self._model}",
            f"--dataset_name={self._rows}",
            "--max_seq_length=128",
            "--batch_size=8",
        ]
        often = ["--batch_size=8", "--max_steps=12", "--save_every=2", "--eval_every=5", "--learning_rate=1e-2"]
        return start_training(self.log, *shared, *often, *SCENARIOS[scenario], f"--output_dir={folder}", *resume)

    def undisturbed(self, scenario: str) -> tuple[Any, float]:
        """`outcome` and seconds of the scenario."""
        if scenario not in self._undisturbed:
            whole, began = self.scratch / f"whole-{scenario}", time.monotonic()
            if code := exit_code(self.start(scenario, whole)):
                raise RuntimeError(f"{scenario} ends with {code}: {self.log.read_text()[-3000:]}")
            self._undisturbed[scenario] = outcome(whole), time.monotonic() - began
        return self._undisturbed[scenario]


def campaign(seed: int, count: int, scratch: Path) -> dict[str, Any]:
    """Send `count` signals to running trainings; returns what was sent, where it came, and what it broke."""
    moments, runs = random.Random(seed), SmallRuns(scratch)
    sent, codes, different, torn = Counter[str](), Counter[str](), [], []
    num_runs = num_during_saves = 0
    while sum(sent.values()) < count:
        scenario = moments.choice(list(SCENARIOS))
        expected, duration_s = runs.undisturbed(scenario)
        folder = scratch / f"run-{num_runs}"
        num_runs += 1
        ends: list[Any] = []
        for attempt in range(50):
            process = runs.start(scenario, folder)
            number = None
            if attempt < 3:
                time.sleep(moments.uniform(0, duration_s))
                if process.is_alive():
                    number = moments.choice(SIGNALS)
                    num_during_saves += any(folder.glob("checkpoints/.tmp-*"))
                    os.kill(process.pid, number)
                    sent[number.name] += 1
            code = exit_code(process)
            codes[str(code)] += 1
            ends.append([number.name if number else None, code])
            if code == 0:
                break
            if number is None or code not in CLEAN[number]:
                torn.append({"scenario": scenario, "code": code, "said": runs.log.read_text()[-2000:]})
                break
        if code == 0 and (difference := first_difference(outcome(folder), expected)):
            different.append({"scenario": scenario, "run": num_runs, "ends": ends, "difference": difference})
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "seed": seed,
        "num_runs": num_runs,
        "sent": dict(sent),
        "during_saves": num_during_saves,
        "exit_codes": dict(codes),
        "different": different,
        "torn": torn,
    }


def main() -> None:
    """Run a campaign and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300, help="signals")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = campaign(options.seed, options.count, Path(scratch))
    print(json.dumps(found, indent=1))
    if options.output:
        write_json_atomic(options.output, {"provenance": collect_provenance(sys.argv), **found})


if __name__ == "__main__":
    main()
