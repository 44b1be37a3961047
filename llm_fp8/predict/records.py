"""The recorded benchmarks beside their predictions."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_fp8.architectures import bundled_architectures
from llm_fp8.ceilings import RESULTS
from llm_fp8.config import ModelConfig
from llm_fp8.models import load_config, resolve_source
from llm_fp8.predict.calibration import CALIBRATED_GPU, MODES
from llm_fp8.predict.prediction import Prediction, known_gpu, predict
from llm_fp8.predict.scenario import RECIPES, ModelSize, Scenario, default_optimizer


@dataclass(frozen=True)
class Recorded:
    """One row of a results file, predicted."""

    file: str
    arm: str
    row: dict[str, Any]
    prediction: Prediction

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
    return bool(row.get("out_of_memory")) or str(row.get("failed", "")).startswith("out of memory")


@functools.cache
def bundled_size(model: str) -> ModelSize:
    """The sizes of a bundled architecture."""
    options = ModelConfig(model_name=model, random_init=True)
    return ModelSize.from_config(load_config(options, resolve_source(options)))


def scenario_of(row: dict[str, Any]) -> Scenario | None:
    """What a row of scripts/benchmark.py or scripts/benchmark_multi_gpu.py trained; None where nothing predicts it.

    None are other people's set-ups, DeepSpeed, context parallelism, --fp8_params, the swapped Hugging Face decoder, models that are not bundled.
    """
    words = row["arm"].split(":")
    mode, recipe, *options = ["single", *words] if words[0] in RECIPES else [*words, ""]
    options = [option for option in options if option]
    if mode not in MODES or recipe not in RECIPES or not {"sync", "recompute"} >= set(options):
        return None
    if row["model"] not in bundled_architectures():
        return None
    model = bundled_size(row["model"])
    return Scenario(
        model=model,
        recipe=recipe,
        micro_batch_tokens=row["batch_size"] * row["seq_length"],
        micro_batches=row["micro_batches"],
        mean_length=row["seq_length"],
        optimizer=default_optimizer(mode),
        mode=mode,
        num_gpus=row.get("num_gpus", 1),
        sync_every_micro_batch="sync" in options,
        recomputed_layers=model.spec.num_layers if "recompute" in options else 0,
    )


@functools.cache
def recorded_rows(folder: Path = RESULTS) -> tuple[Recorded, ...]:
    """Every predictable row on the calibrated GPU that was measured or ran out of memory.

    Rows on random tokens alone: a row that says `text` or `dataset` was padded or packed from real lengths.
    """
    gpu, found = known_gpu(CALIBRATED_GPU), []
    assert gpu is not None
    for path in sorted([*folder.glob("throughput_*.json"), *folder.glob("multi_gpu_throughput_*.json")]):
        record = json.loads(path.read_text())
        if record["provenance"]["gpus"][0]["name"] != CALIBRATED_GPU:
            continue
        for row in record["rows"]:
            measured = "tokens_per_s" in row and "peak_memory_gib" in row
            if not (measured or _ran_out(row)) or {"text", "dataset"} & set(row):
                continue
            if scenario := scenario_of(row):
                found.append(Recorded(path.name, row["arm"], row, predict(scenario, gpu)))
    return tuple(found)
