"""The recorded benchmarks beside their predictions."""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recorded_variants import REMOVED_OPTIONS
from llm_fp8.config.options import ModelConfig
from llm_fp8.distributed.sharding_mode import default_optimizer
from llm_fp8.models.architectures import bundled_architectures
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.tools.bench.variants import OFFLOAD
from llm_fp8.tools.predict.calibration import CALIBRATED_GPU, CHECKED_GPUS, MODES
from llm_fp8.tools.predict.prediction import Prediction, known_gpu, predict
from llm_fp8.tools.predict.workload import PREDICTED, ModelSize, StepWorkload

RESULTS = Path(__file__).resolve().parent / "results"

FILES = (
    "speed_table_h200.json",
    "speed_table_h100.json",
    "speed_table_h100_offload.json",
    "large_steps_*.json",
    "levers_*_softmax_fused.json",
    "levers_*_first_scales.json",
    "levers_8b_x2_sums_let_go.json",
    "levers_8b_x2_recompute.json",
    "throughput_*.json",
    "multi_gpu_throughput_*.json",
)
"""Under benchmarks/results. Other levers_*.json were recorded with a part of today's kernels, with variables that
their variants do not name, or with so few tokens that the step is launch-bound.
"""

TODAYS_SINCE = "2026-11-22"
"""Of a row's `time_utc`. Those before it were recorded with the decoder as it was before its fused kernels
(benchmarks/LOG.md), and those on several GPUs also before GEMMs added up their gradients and `fsdp_grad` kept
weights for a step."""

FULL_SHARE = 0.98
"""Of a GPU's memory: where the allocator reserved as much, recorded FSDP steps freed blocks of other streams and mapped
them anew, which takes longer (in rows 8b_x2 and 8b_s8192_x2 with `flash4` in some steps). No sum of kernels can say by
how much, and such steps are neither fitted nor scored."""

WAITED_SHARE = 0.15
"""Of a recorded step on several GPUs: where communication ran alone for as long, GPUs waited for hosts that launched
kernels too slowly, which differs from machine to machine. These steps are neither fitted nor scored."""

_FITTED_RECIPES: dict[tuple[str, str | None], tuple[str, ...]] = {
    **{("speed_table_h200.json", name): ("bf16", "delayed") for name in ("1b", "8b", "8b_s8192")},
    ("speed_table_h200.json", "8b_x4"): PREDICTED,
    ("levers_8b_first_scales.json", None): ("current",),
}
"""By file and name: the recipes of today's rows that constants come from; 14b gave adamw_8bit's alone
(calibration.py).
"""


@dataclass(frozen=True)
class Recorded:
    """One row of a results file, predicted."""

    file: str
    variant: str
    row: dict[str, Any]
    prediction: Prediction
    measured_utc: str
    """When its first round was measured."""

    @property
    def todays(self) -> bool:
        """Whether it was recorded with the code that is predicted, not its slower predecessor."""
        return self.measured_utc >= TODAYS_SINCE

    @property
    def num_gpus(self) -> int:
        """GPUs that it ran on."""
        return self.prediction.scenario.num_gpus

    @property
    def same_memory(self) -> bool:
        """Whether it was recorded with the memory of today's code: all rows but those in which `fsdp_grad` did not
        keep its casts yet.
        """
        scenario = self.prediction.scenario
        return self.todays or not (scenario.sharded and scenario.keeps_casts and scenario.fp8_layers)

    @property
    def held_out(self) -> bool:
        """Whether the time of this row as a whole was left out of the fit."""
        return self.prediction.scenario.recipe not in _FITTED_RECIPES.get((self.file, self.row.get("row")), ())

    @property
    def reserved_gib(self) -> float | None:
        """What the allocator of the GPU that needs most took from it; None in records that do not say."""
        return max(
            (one["peak_reserved_memory_gib"] for one in self._rounds if "peak_reserved_memory_gib" in one), default=None
        )

    @property
    def memory_was_full(self) -> bool:
        """Whether FSDP's allocator had nothing left to reserve, so that its work is in the steps' times: see
        `FULL_SHARE`.
        """
        memory, reserved = self.prediction.gpu.memory_gib, self.reserved_gib
        if not self.prediction.scenario.sharded or reserved is None:
            return False
        return reserved >= FULL_SHARE * memory

    @property
    def measured(self) -> dict[str, Any]:
        """What was measured, of several rounds the first; empty where memory ran out."""
        return {} if self.out_of_memory else self._rounds[0]

    @property
    def _rounds(self) -> list[dict[str, Any]]:
        """A launch on several GPUs that is measured once has its figures in the row itself."""
        rounds: list[dict[str, Any]] = self.row.get("rounds") or [self.row]
        return rounds

    @property
    def waited(self) -> bool:
        """Whether GPUs waited for each other for a large part of the recorded step: see `WAITED_SHARE`."""
        step = self.measured.get("recorded_step", {})
        if self.num_gpus == 1 or "exposed_communication_s" not in step:
            return False
        return bool(step["exposed_communication_s"] >= WAITED_SHARE * step["span_s"])

    @property
    def not_scored(self) -> str | None:
        """Why its time says nothing of the constants; None where it does."""
        return "memory full" if self.memory_was_full else "waited" if self.waited else None

    @property
    def out_of_memory(self) -> bool:
        """Whether the GPU's memory was not enough."""
        return _ran_out(self.row)

    @property
    def step_time_s(self) -> float:
        """The median step, in seconds."""
        return self.prediction.scenario.tokens_per_step / self.row["tokens_per_s"]

    @property
    def time_error(self) -> float:
        """Predicted step time over the measured one, less one."""
        return self.prediction.step_time_s / self.step_time_s - 1

    @property
    def memory_error(self) -> float:
        """Predicted peak memory over the measured one, less one."""
        return self.prediction.peak_memory_gib / self.row["peak_memory_gib"] - 1


def _ran_out(row: dict[str, Any]) -> bool:
    return str(row.get("failed", "")).startswith("out of memory")


@functools.cache
def bundled_size(model: str) -> ModelSize:
    """The sizes of a bundled architecture."""
    options = ModelConfig(model_name=model, random_init=True)
    return ModelSize.from_config(load_config(options, resolve_source(options)))


def workload_of(row: dict[str, Any]) -> StepWorkload | None:
    """What a row of scripts/benchmark.py or scripts/benchmark_multi_gpu.py trained; None where nothing predicts it.

    None are other people's set-ups, DeepSpeed, context parallelism, the swapped Hugging Face decoder, models that are
    not bundled, rows padded or packed from real lengths that the row does not give.
    """
    words = row["arm"].split(":")
    mode, recipe, *options = ["single", *words] if words[0] in PREDICTED else [*words, ""]
    options = [REMOVED_OPTIONS.get(option, option) for option in options if option]
    on_host = [share for share in map(OFFLOAD.fullmatch, options) if share]
    known = {"sync", "fp8_params", "recompute", "adamw_8bit", "recast"}
    unknown = set(options) - known - {share[0] for share in on_host}
    if mode not in MODES or recipe not in PREDICTED or unknown:
        return None
    mean_length = row["seq_length"]
    if "text" in row:
        step = row["rounds"][0].get("step_tokens")
        if step is None or step["num_tokens"] != row["batch_size"] * row["seq_length"] * row["micro_batches"]:
            return None
        mean_length = step["sum_squared_lengths"] / step["num_tokens"]
    if row["model"] not in bundled_architectures():
        return None
    model = bundled_size(row["model"])
    return StepWorkload(
        model=model,
        recipe=recipe,
        micro_batch_tokens=row["batch_size"] * row["seq_length"],
        micro_batches=row["micro_batches"],
        mean_length=mean_length,
        optimizer="adamw_8bit" if "adamw_8bit" in options else default_optimizer(mode),
        mode=mode,
        num_gpus=row.get("num_gpus", 1),
        sync_every_micro_batch="sync" in options,
        recomputed_layers=model.spec.num_layers if "recompute" in options else 0,
        fp8_params="fp8_params" in options,
        fp8_recast_weights="recast" in options,
        offload_optimizer=int(on_host[0][1]) / 100 if on_host else 0.0,
    )


def recorded_rows(gpu: str = CALIBRATED_GPU) -> tuple[Recorded, ...]:
    """Every row of `FILES` that a time is predicted for, on GPUs of that name, that was measured or ran out of memory.

    Those on several GPUs that are not today's are left out: they did other work, not the same in more time.
    """
    return tuple(record for record in _all_rows(gpu) if record.todays or record.num_gpus == 1)


def rows_for_memory_alone() -> tuple[Recorded, ...]:
    """The rows that `recorded_rows` leaves out although their memory is that of today's code."""
    rows = _all_rows(CALIBRATED_GPU)
    return tuple(r for r in rows if not r.todays and r.num_gpus > 1 and r.same_memory and not r.out_of_memory)


@functools.cache
def _all_rows(name: str) -> tuple[Recorded, ...]:
    gpu, found = known_gpu(name), []
    assert gpu is not None
    for path in sorted(path for pattern in FILES for path in RESULTS.glob(pattern)):
        record = json.loads(path.read_text())
        if record["provenance"]["gpus"][0]["name"] != name:
            continue
        for row in record["rows"]:
            measured = "tokens_per_s" in row and "peak_memory_gib" in row
            if (measured or _ran_out(row)) and (scenario := workload_of(row)):
                runs = record.get("runs", [record["provenance"]])
                first = (row.get("rounds") or [{}])[0].get("run", 0)
                found.append(Recorded(path.name, row["arm"], row, predict(scenario, gpu), runs[first]["time_utc"]))
    return tuple(found)


# --- the table of docs/results.md ---
#
#     python -m benchmarks.prediction_records docs/results.md     # writes it anew between its marks

_MARKED = re.compile(r"(<!-- errors of the prediction -->\n).*?(<!-- end -->)", re.DOTALL)


def errors() -> str:
    """A table of the held-out rows on one GPU and on several, the times of those that are not scored left out."""
    rows = []
    for gpu, several in itertools.product(CHECKED_GPUS, (False, True)):
        short = gpu.split()[1]
        measured = [record for record in recorded_rows(gpu=gpu) if not record.out_of_memory]
        records = [r for r in measured if r.todays and r.held_out and (r.num_gpus > 1) == several]
        times = [record.time_error for record in records if not record.not_scored]
        memory = [abs(record.memory_error) for record in records]
        figures = [
            f"{statistics.median(times):+.1%}",
            f"{min(times):+.1%} to {max(times):+.1%}",
            f"{statistics.median(memory):.1%}",
            f"{max(memory):.1%}",
        ]
        rows.append([f"several {short}s" if several else f"one {short}", str(len(times)), *figures])
    header = ["", "rows", "time: median error", "from, to", "memory: median error", "worst"]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *rows))


def with_errors(text: str) -> str:
    """`text` with the table of errors between its marks made anew."""
    return _MARKED.sub(lambda match: match[1] + errors() + match[2], text)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_errors(document.read_text(encoding="utf-8")), encoding="utf-8")
