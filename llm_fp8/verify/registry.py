"""The checks, in the order in which they run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from llm_fp8.verify.result import Result
from llm_fp8.verify.setup import Setup


@dataclass(frozen=True)
class Check:
    """One check: the function `check` of the module of its name."""

    name: str
    title: str
    """What it looks at, for the table."""
    needs_gpus: int = 0
    quick: bool = True
    """Whether --quick runs it too."""
    only_without_gpu: bool = False
    limit_s: float | None = 120.0
    """After which it is given up; None where it waits for processes that have limits of their own."""

    def load(self) -> Callable[[Setup], Result]:
        """Its function; raises what importing it raises."""
        function: Callable[[Setup], Result] = importlib.import_module(f"llm_fp8.verify.{self.name}").check
        return function


CHECKS: tuple[Check, ...] = (
    Check("versions", "Versions against the pins"),
    Check("imports", "Packages load"),
    Check("gpu", "GPU and driver"),
    Check("variables", "Environment variables"),
    Check("configs", "DeepSpeed and Accelerate files"),
    Check("output_folder", "Output folder"),
    Check("tracking", "Weights & Biases"),
    Check("data", "Tokenizer and dataset"),
    Check("recipes", "fp8 recipes of this GPU", needs_gpus=1),
    Check("steps", "A training step per recipe", needs_gpus=1, limit_s=None),
    Check("attention", "Attention at your shape", needs_gpus=1, limit_s=None),
    Check("cudnn", "One cuDNN in a process", needs_gpus=1, limit_s=None),
    Check("cpu_steps", "Training steps on the CPU", only_without_gpu=True),
    Check("engines", "Training runs under torchrun", needs_gpus=1, quick=False, limit_s=None),
    Check("torchao_steps", "A torchao training step per recipe", quick=False, limit_s=360.0),
    Check("rates", "GEMM and copy rates", needs_gpus=1, quick=False),
    Check("nccl", "Exchanges between the GPUs", needs_gpus=2, quick=False, limit_s=None),
)
"""What is timed stands last, when every other process has ended: those of both kinds of steps, attention and engines run beside all before."""
