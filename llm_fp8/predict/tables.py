"""The tables of docs/when_fp8_pays.md, so that the document cannot drift from the prediction.

    python -m llm_fp8.predict.tables docs/when_fp8_pays.md     # writes them anew between their marks

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from llm_fp8.predict.calibration import CALIBRATED_GPU
from llm_fp8.predict.prediction import Gpu, Prediction, known_gpu, predict
from llm_fp8.predict.records import Recorded, bundled_size, recorded_rows, rows_for_memory_alone
from llm_fp8.predict.scenario import RECIPES, Scenario
from llm_fp8.predict.step_time import StepTime

_MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-14B")
_ROW_LENGTHS = (1024, 2048, 4096, 8192, 16384)
_MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _gpu() -> Gpu:
    gpu = known_gpu(CALIBRATED_GPU)
    assert gpu is not None
    return gpu


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _scenario(model: str, tokens: int, micro_batches: int, length: int) -> Scenario:
    return Scenario(bundled_size(model), "bf16", tokens, micro_batches, length)


def _by_recipe(scenario: Scenario) -> dict[str, Prediction]:
    return {recipe: predict(scenario.with_recipe(recipe), _gpu()) for recipe in RECIPES}


def accuracy() -> str:
    """The rows of today's code with their predictions."""
    return _accuracy([record for record in recorded_rows() if record.todays])


def older() -> str:
    """The rows of the decoder before, on one GPU."""
    return _accuracy([record for record in recorded_rows() if not record.todays])


def memory_before() -> str:
    """The rows of several GPUs whose time is not today's, but whose memory is."""
    rows = []
    for record in rows_for_memory_alone():
        row = record.row
        shape = f"{row['batch_size']} x {row['seq_length']:,} x {row['micro_batches']}"
        figures = [f"{row['peak_memory_gib']:.1f}", f"{record.prediction.peak_memory_gib:.1f}", f"{record.memory_error:+.1%}"]
        rows.append([f"`{record.file}`", row["model"], shape, str(record.num_gpus), record.arm, *figures])
    return _table(["file", "model", "rows x length x micro-batches", "GPUs", "arm", "GiB", "predicted", "error"], rows)


def _accuracy(records: list[Recorded]) -> str:
    rows = []
    for record in records:
        row, found = record.row, record.prediction
        shape = f"{row['batch_size']} x {row['seq_length']:,} x {row['micro_batches']}"
        gpus = str(row.get("num_gpus", 1))
        name = (
            f"`{record.file}`"
            + (f", {row['row']}" if "row" in row else "")
            + ("" if record.held_out or not record.todays else " (fitted)")
        )
        expected = f"{found.peak_memory_gib:.1f}"
        if record.out_of_memory:
            measured = ["out of memory", f"{found.step_time_s:.3f}", "", "", expected, ""]
            rows.append([name, row["model"], shape, gpus, record.arm, *measured])
            continue
        error = f"{record.time_error:+.1%}" + (f" ({record.not_scored})" if record.not_scored else "")
        measured = [f"{record.step_time_s:.3f}", f"{found.step_time_s:.3f}", error, f"{row['peak_memory_gib']:.1f}", expected]
        rows.append([name, row["model"], shape, gpus, record.arm, *measured, f"{record.memory_error:+.1%}"])
    columns = ("step s", "predicted", "error", "GiB", "predicted", "error")
    header = ["file", "model", "rows x length x micro-batches", "GPUs", "arm", *columns]
    return _table(header, rows)


def bounds() -> str:
    """The errors of the recorded rows by kind, the times of those that are not scored left out."""
    measured = [record for record in recorded_rows() if not record.out_of_memory]
    groups: dict[str, list[Recorded]] = {
        f"{'held out' if held_out else 'fitted'}, {'several GPUs' if several else 'one GPU'}": [
            r for r in measured if r.todays and r.held_out == held_out and (r.num_gpus > 1) == several
        ]
        for several in (False, True)
        for held_out in (True, False)
    }
    groups["decoder before, one GPU"] = [r for r in measured if not r.todays]
    rows = []
    for name, records in groups.items():
        if not records:
            continue
        times = [record.time_error for record in records if not record.not_scored]
        memory = [abs(record.memory_error) for record in records]
        errors = [
            f"{statistics.median(times):+.1%}",
            f"{min(times):+.1%} to {max(times):+.1%}",
            f"{statistics.median(memory):.1%}",
            f"{max(memory):.1%}",
        ]
        rows.append([name, str(len(times)), *errors])
    return _table(["", "rows", "step time, median error", "from, to", "memory, median error", "worst"], rows)


def _gain(own: float, bf16: float) -> str:
    return f"{bf16 / own:.2f}"


def models() -> str:
    """Speed-up over bf16 by model and tokens of a micro-batch, four micro-batches a step."""
    rows = []
    for model in _MODELS:
        for tokens in (4096, 8192, 16384):
            found = _by_recipe(_scenario(model, tokens, 4, 1024))
            gains = [_gain(found[recipe].step_time_s, found["bf16"].step_time_s) for recipe in RECIPES[1:]]
            rows.append([model, f"{tokens:,}", f"{found['bf16'].tokens_per_s:,.0f}", *gains])
    return _table(["model", "tokens per micro-batch", "bf16 tokens/s", *RECIPES[1:]], rows)


def lengths() -> str:
    """Speed-up over bf16 by document length at 16,384 tokens in a micro-batch, Llama-3.1-8B."""
    rows = []
    for length in _ROW_LENGTHS:
        found = _by_recipe(_scenario("Llama-3.1-8B", 16384, 4, length))
        gains = [_gain(found[recipe].step_time_s, found["bf16"].step_time_s) for recipe in RECIPES[1:]]
        bf16 = found["bf16"].time
        rows.append([f"{length:,}", f"{bf16.attention_s / bf16.total_s:.0%}", *gains])
    return _table(["document length", "attention's share of bf16", *RECIPES[1:]], rows)


def micro_batches() -> str:
    """Speed-up over bf16 by micro-batches of a step, Llama-3.1-8B with 4,096 tokens each."""
    rows = []
    for number in (1, 2, 4, 8, 32):
        found = _by_recipe(_scenario("Llama-3.1-8B", 4096, number, 1024))
        gains = [_gain(found[recipe].step_time_s, found["bf16"].step_time_s) for recipe in RECIPES[1:]]
        bf16 = found["bf16"].time
        rows.append([str(number), f"{bf16.weights_s / bf16.total_s:.0%}", *gains])
    return _table(["micro-batches", "weights' share of bf16", *RECIPES[1:]], rows)


def parts() -> str:
    """Milliseconds of the parts of a step, 1B and 8B, 8,192 tokens in each of four micro-batches."""
    names = [field.name for field in dataclasses.fields(StepTime) if field.name != "exchange_s"]
    rows = []
    for model in ("Llama-3.2-1B", "Llama-3.1-8B"):
        for recipe, found in _by_recipe(_scenario(model, 8192, 4, 1024)).items():
            rows.append(
                [model, recipe, *(f"{1e3 * getattr(found.time, name):.0f}" for name in names), f"{1e3 * found.step_time_s:.0f}"]
            )
    return _table(["model", "recipe", *(name.removesuffix("_s") for name in names), "step"], rows)


def adapters() -> str:
    """Arithmetic for LoRA: a frozen base has no weight gradients, optimizer or repeated weight casts."""
    rows = []
    for model in _MODELS:
        found = _by_recipe(_scenario(model, 8192, 4, 1024))
        times = {recipe: adapter_time_s(prediction) for recipe, prediction in found.items()}
        full = [_gain(found[recipe].step_time_s, found["bf16"].step_time_s) for recipe in RECIPES[1:]]
        rows.append([model, *full, *(_gain(times[recipe], times["bf16"]) for recipe in RECIPES[1:])])
    return _table(["model", *(f"full, {r}" for r in RECIPES[1:]), *(f"LoRA, {r}" for r in RECIPES[1:])], rows)


def adapter_time_s(found: Prediction) -> float:
    """Seconds of a step that trains adapters of no size: two of three GEMMs, no work on weights; what adapters take comes on top."""
    time = found.time
    return 2 / 3 * time.gemm_s + time.attention_s + time.passes_s + time.casts_s + time.gap_s


TABLES: dict[str, Callable[[], str]] = {
    "bounds": bounds,
    "accuracy": accuracy,
    "older": older,
    "memory_before": memory_before,
    "models": models,
    "lengths": lengths,
    "micro_batches": micro_batches,
    "parts": parts,
    "adapters": adapters,
}


def with_tables(text: str) -> str:
    """`text` with every table between marks made anew. Raises KeyError for a name that is none of `TABLES`."""
    return _MARK.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
