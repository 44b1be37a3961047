"""Kills and signals at random moments of random runs on the CPU, each run resumed until it ends.

    python -m tests.faults.kills --seed 0 --count 300 [--scenarios "best kept,mixed"] --output kills.json

A run counts as `different` where its metrics (but for the clock), its final weights, what it says of its end and its
best step, or a checkpoint that it kept are not, bit for bit, those of the uninterrupted run, and as `torn` where a
start after a kill ended with another code than 0, 130, 143 or the kill's.
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

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.compare.run_record import why_unfinished
from llm_fp8.train.checkpoint import LATEST
from llm_fp8.utils.json_files import write_json_atomic, write_jsonl_atomic
from tests.support.processes import exit_code, start_training, wait_until
from tests.support.small import records, summary_json, write_model, write_rows

SCENARIOS: dict[str, list[str]] = {
    "padded": [],
    "packed": ["--packing", "--max_seq_length=256", "--batch_size=4"],
    "accumulated": ["--batch_size=4", "--gradient_accumulation_steps=2"],
    "bf16": ["--mixed_precision=bf16"],
    "lora": ["--lora_rank=4", "--lora_dropout=0.1"],
    "streamed": ["--streaming", "--eval_every=0", "--validation_fraction=0"],
    "8-bit moments": ["--optimizer=adamw_8bit", "--mixed_precision=bf16"],
    "best kept": [  # the loss falls and rises: of the evaluations the second is the best
        "--keep_best", "--eval_every=3", "--save_total_limit=1", "--learning_rate=1", "--lr_scheduler=constant",
    ],
    "stopped early": [
        "--early_stopping_patience=2", "--eval_every=1", "--keep_best",
        "--save_every=0", "--learning_rate=1e-3",
    ],
    "saved by the clock": ["--save_every=0", "--save_minutes=0.0001", "--log_every=1"],
    "mixed": ["--dataset_name={rows},{chats}", "--dataset_weights=0.7,0.3", "--eval_dataset_name={others}"],
    "mixed and streamed": [
        "--dataset_name={rows},{chats}", "--dataset_weights=0.7,0.3", "--eval_dataset_name={others}", "--streaming",
        "--packing", "--max_seq_length=256", "--batch_size=4",
    ],
}  # fmt: skip
"""What stands here comes last on the command line, and so counts."""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
CLEAN = {signal.SIGKILL: {-9}, signal.SIGTERM: {143, -15}, signal.SIGINT: {130}}
"""Exit codes of a start that the signal ended; 0 where it came too late."""
ENDS_WITHIN_S = 300.0
"""A start, on a machine that has other work too."""
KEPT_IN_SUMMARY = ("steps", "best", "exported_step", "stopped_early")
"""Entries of summary.json that must not depend on kills."""


def outcome(folder: Path, names: Sequence[str] = ()) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What must not depend on kills: metrics (these, or all but the clock's), and the bytes of the exported weights."""
    of_clock = ("time_s", "per_s", "per_s_per_gpu", "tflops")
    kept = [
        {key: record[key] for key in record if (key in names if names else not key.endswith(of_clock))}
        for record in records(folder)
    ]
    weights = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("final/*.safetensors")}
    return kept, weights


Kept = tuple[dict[str, Any], dict[str, str]]


def kept(folder: Path) -> Kept:
    """Of a finished run: what it says of its end and its best step, and a hash of each checkpoint's tensors."""
    summary = {key: value for key, value in summary_json(folder).items() if key in KEPT_IN_SUMMARY}
    if "best" in summary:
        summary["best"] = {**summary["best"], "checkpoint": Path(summary["best"]["checkpoint"]).name}
    hashes = {}
    for path in sorted((folder / "checkpoints").glob("step-*")):
        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(path, file.name)
            tensors = torch.load(file.name)
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
        hashes[path.name] = digest.hexdigest()
    return summary, hashes


def kept_differently(
    found: tuple[dict[str, Any], dict[str, str]], expected: tuple[dict[str, Any], dict[str, str]]
) -> Any:
    """What differs of two runs' `kept`, checkpoints of steps that both have compared; None where nothing does. A signal
    saves a checkpoint of its own, which may take the place of an older one; the best and the last step's must be there.
    """
    if found[0] != expected[0]:
        return {"summary": [found[0], expected[0]]}
    needed = {expected[0]["best"]["checkpoint"]} if "best" in expected[0] else set()
    needed |= {name for name in expected[1] if name == f"step-{expected[0]['steps']:08d}"}
    both = found[1].keys() & expected[1].keys()
    different = sorted((needed - both) | {name for name in both if found[1][name] != expected[1][name]})
    return {"checkpoints": different} if different else None


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
        self.scratch, self.log, self.begun = scratch, scratch / "log", scratch / "begun"
        self._model, self._rows = write_model(scratch / "model"), write_rows(scratch / "rows.jsonl", 64)
        chats = (
            {"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": str(i)}]}
            for i in range(40)
        )
        write_jsonl_atomic(scratch / "chats.jsonl", chats)
        write_rows(scratch / "others.jsonl", 80)
        self._undisturbed: dict[str, tuple[Any, Any, float]] = {}

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
        files = {name: self.scratch / f"{name}.jsonl" for name in ("rows", "chats", "others")}
        own = [option.format(**files) for option in SCENARIOS[scenario]]
        words = [*shared, *often, *own, f"--output_dir={folder}", *resume]
        self.begun.unlink(missing_ok=True)
        process = start_training(self.log, *words, first=self.begun.touch)
        wait_until(self.begun.exists, process, deadline_s=ENDS_WITHIN_S)
        return process

    def undisturbed(self, scenario: str) -> tuple[Any, Any, float]:
        """`outcome`, `kept` and seconds of the scenario."""
        if scenario not in self._undisturbed:
            whole, began = self.scratch / f"whole-{scenario}", time.monotonic()
            if (code := exit_code(self.start(scenario, whole), ENDS_WITHIN_S)) != 0:
                raise RuntimeError(f"{scenario} ends with {code}: {self.log.read_text()[-3000:]}")
            duration_s = time.monotonic() - began
            self._undisturbed[scenario] = outcome(whole), kept(whole), duration_s
        return self._undisturbed[scenario]


def campaign(seed: int, count: int, scratch: Path, scenarios: Sequence[str] = tuple(SCENARIOS)) -> dict[str, Any]:
    """Send `count` signals to running trainings; returns what was sent, where it came, and what it broke."""
    moments, runs = random.Random(seed), SmallRuns(scratch)
    sent, codes, different, torn = Counter[str](), Counter[str](), [], []
    num_runs = num_during_saves = 0
    while sum(sent.values()) < count:
        scenario = moments.choice(scenarios)
        expected, expected_kept, duration_s = runs.undisturbed(scenario)
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
            code = exit_code(process, ENDS_WITHIN_S)
            codes[str(code)] += 1
            ends.append([number.name if number else None, code])
            if code == 0:
                break
            if number is None or code not in CLEAN[number]:
                torn.append({"scenario": scenario, "code": code, "said": runs.log.read_text()[-2000:]})
                break
            if (folder / "summary.json").exists() and why_unfinished(summary_json(folder)) is None:
                code = 0  # the signal came when the run had finished, and before its process had ended
                break
        difference = None
        if code == 0:
            difference = first_difference(outcome(folder), expected) or kept_differently(kept(folder), expected_kept)
        if difference:
            different.append({"scenario": scenario, "run": num_runs, "ends": ends, "difference": difference})
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "seed": seed,
        "scenarios": list(scenarios),
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
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="names, separated by commas (default: all)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = campaign(options.seed, options.count, Path(scratch), options.scenarios.split(","))
    print(json.dumps(found, indent=1))
    if options.output:
        write_json_atomic(options.output, {"provenance": collect_provenance(sys.argv), **found})


if __name__ == "__main__":
    main()
