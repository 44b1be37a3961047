#!/usr/bin/env python
"""Do a run's memory and step time stay where they are? Trains through train_fp8.py and samples what its process holds
as steps go by.

    python benchmarks/memory_over_steps.py --output benchmarks/results/memory_over_steps_h200.json
    python benchmarks/memory_over_steps.py --steps 500 --output memory.json -- --model_name Llama-3.2-1B \\
        --random_init --use_te

Without options behind `--` it trains Llama-57M in fp8 on a GPU, the embedded model on the CPU. Evaluations, checkpoints
that replace one another and, on a GPU, the certificate are part of the run. A sample is taken whenever the run has read
its numbers (--log_every), which is the same point of a step each time: host memory (RSS), tensors and reserved memory
of the GPU, open files and sockets, threads, and the median step time since the last one. Growth is the slope of a
least-squares line through the samples after the first tenth of the steps, per 1,000 steps; it is there once the run has
ended, the samples as they are taken.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_fp8
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import require_writable, write_json_atomic

SAMPLES = 200
LEFT_OUT_SHARE = 0.1
"""Of the steps, at the beginning: libraries are still being loaded and allocators still take memory."""

MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """What the process holds after a step. MiB: 2**20 bytes."""

    step: int
    rss_mib: float
    num_open_files: int
    num_threads: int
    step_time_s: float
    """Median of the steps since the sample before."""
    gpu_allocated_mib: float | None = None
    """Of tensors; None without a GPU, like the next."""
    gpu_reserved_mib: float | None = None


def take_sample(records: Sequence[dict[str, float]]) -> Sample:
    """What this process holds now, behind these steps."""
    import psutil
    import torch

    process = psutil.Process()
    sample = Sample(
        step=int(records[-1]["step"]),
        rss_mib=process.memory_info().rss / MIB,
        num_open_files=process.num_fds(),
        num_threads=process.num_threads(),
        step_time_s=statistics.median(record["step_time_s"] for record in records),
    )
    if not torch.cuda.is_available():
        return sample
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return dataclasses.replace(sample, gpu_allocated_mib=allocated / MIB, gpu_reserved_mib=reserved / MIB)


def growth(samples: Sequence[Sample], num_steps: int) -> dict[str, dict[str, float]]:
    """By figure of `Sample`, over the samples after the first tenth of `num_steps`: first, last, most, and
    growth_per_1000_steps.
    """
    kept = [sample for sample in samples if sample.step > LEFT_OUT_SHARE * num_steps]
    steps = [sample.step for sample in kept]
    found = {}
    for name in [field.name for field in dataclasses.fields(Sample) if field.name != "step"]:
        values = [getattr(sample, name) for sample in kept]
        if values[0] is None:
            continue
        slope = statistics.linear_regression(steps, values).slope
        found[name] = {
            "first": values[0],
            "last": values[-1],
            "most": max(values),
            "growth_per_1000_steps": 1000 * slope,
        }
    return found


def training_options(given: Sequence[str], num_steps: int, folder: Path) -> list[str]:
    """The words behind train_fp8.py: `given`, or the default model for this machine, after those that make the run what
    is measured here.

    Raises `UserError` where `given` has an option by which the samples are taken.
    """
    import torch

    for word in given:
        name = word.partition("=")[0]
        if name.replace("-", "_") in ("__max_steps", "__log_every", "__output_dir"):  # written with either
            raise UserError(f"{name} behind -- is this program's to choose; give --steps before it, or nothing.")
    often = max(1, num_steps // 10)
    run = [
        f"--max_steps={num_steps}",
        f"--log_every={max(1, num_steps // SAMPLES)}",
        f"--eval_every={often}",
        "--eval_batches=4",
        f"--save_every={often}",
        "--save_total_limit=2",
        f"--output_dir={folder}",
    ]
    on_gpu = ["--model_name=Llama-57M", "--random_init", "--use_te", "--mixed_precision=fp8", "--batch_size=8"]
    on_cpu = ["--max_seq_length=128", "--batch_size=4"]
    return [*run, *(given or (on_gpu if torch.cuda.is_available() else on_cpu))]


def train_and_sample(words: Sequence[str], keep: Callable[[list[Sample]], None]) -> list[Sample]:
    """Run train_fp8.py with these options in this process; what it held whenever it had read its numbers, given to
    `keep` each time.
    """
    from llm_fp8.observability.reporter import RunReporter

    samples: list[Sample] = []
    report = RunReporter.steps

    def report_and_sample(reporter: RunReporter, records: list[dict[str, float]]) -> None:
        report(reporter, records)
        samples.append(take_sample(records))
        keep(samples)

    RunReporter.steps = report_and_sample  # type: ignore[method-assign]
    sys.argv = ["train_fp8.py", *words]
    code = train_fp8.main()
    if code != 0:
        raise RuntimeError(f"the training ended with code {code}")
    return samples


def main() -> int:
    """Train, print, write."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("training", nargs="*", help="options of train_fp8.py, behind --")
    options = parser.parse_args()
    if options.steps < 20:
        raise UserError(f"--steps must be at least 20, not {options.steps}: growth is a line through the samples.")
    require_writable("--output", options.output)
    from llm_fp8.observability.provenance import (
        collect_provenance,  # after the parser: --help and mistakes answer without loading torch
    )

    record: dict[str, Any] = {"provenance": collect_provenance(sys.argv), "steps": options.steps}

    def keep(samples: list[Sample]) -> None:
        known = [dataclasses.asdict(sample).items() for sample in samples]
        record["samples"] = [{name: value for name, value in sample if value is not None} for sample in known]
        write_json_atomic(options.output, record)

    with tempfile.TemporaryDirectory() as scratch:
        words = training_options(options.training, options.steps, Path(scratch) / "run")
        record["training"] = [word for word in words if not word.startswith("--output_dir")]
        samples = train_and_sample(words, keep)
    record["growth"] = growth(samples, options.steps)
    write_json_atomic(options.output, record)
    for name, figures in record["growth"].items():
        print(f"{name:18} " + "  ".join(f"{figure} {value:,.3f}" for figure, value in figures.items()))
    return 0


if __name__ == "__main__":
    run_script(main)
