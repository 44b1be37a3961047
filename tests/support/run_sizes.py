"""Builds `RunSize` objects, which describe a run to the memory estimate, for tests."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from llm_fp8.config.options import Config, ModelConfig
from llm_fp8.models.build import count_parameters
from llm_fp8.models.memory import MemoryEstimate, RunSize
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import REPOSITORY

SPEEDS = REPOSITORY / "benchmarks" / "results" / "families_4b.json"


@functools.cache
def hf_config(model: str):
    measured = (row["config"] for row in read_json(SPEEDS)["rows"] if row["model"] == model)
    if config := next(measured, None):
        return AutoConfig.for_model(**config)
    return load_config(resolve_source(ModelConfig(model_name=model, random_init=True)))


def run_size(row: dict[str, Any], model_config: PretrainedConfig) -> RunSize:
    """Return the `RunSize` of a run. `row` maps options to values and may also contain fields of `RunSize`."""
    config = Config().with_options(**{"use_te": True, "mixed_precision": "fp8", **row})
    launch = {"recipe": "delayed", "mode": "single", "num_gpus": 1, "lacks_delta_kernels": False}
    launch |= {name: row[name] for name in launch if name in row}
    return RunSize(config, model_config, **launch, num_parameters=count_parameters(model_config))


def estimated(model: str = "Llama-3.1-8B", **row: Any) -> MemoryEstimate:
    row = {"batch_size": 8, "gradient_accumulation_steps": 4, **row}
    return run_size(row, hf_config(model)).estimate()
