"""What a run asks of the prediction (`llm_fp8.tools.predict`), which it does not import: a script hands it over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from llm_fp8.config.options import Config
from llm_fp8.optim.optimizers import OptimizerKind


@dataclass(frozen=True)
class RunDescription:
    """A run on GPUs, as predictions need it."""

    config: Config
    hf_config: PretrainedConfig
    recipe: str
    """The fp8 recipe, or bf16, fp16, no."""
    optimizer: OptimizerKind
    mode: str
    """The effective sharding mode."""
    num_gpus: int
    gpu_name: str


@dataclass(frozen=True)
class Machine:
    """What the values of `auto` depend on."""

    memory_gib: float
    """Of the smallest GPU."""
    has_fp8: bool


Settle = Callable[[RunDescription, Machine], tuple[Config, list[str]]]
"""Before anything is built: the options with a value for each `auto`, and sentences to print. Raises `UserError` for a
run that the memory of these GPUs cannot hold."""


@dataclass(frozen=True)
class Predictor:
    """The questions, each a function of `llm_fp8.tools.predict`."""

    settle: Settle
    describe_steps: Callable[[RunDescription, int, float, int], str | None]
    """What is predicted by the positions of a run's micro-batches, its token-averaged document length and its number of
    steps; None where nothing predicts it."""
    compare: Callable[[RunDescription, list[dict[str, Any]]], tuple[dict[str, Any], str] | None]
    """From a run and its steps, as in metrics.jsonl, to the entry `prediction` of its summary and a line for the
    terminal; None where nothing predicts it."""
