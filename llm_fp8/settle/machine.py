"""Describe the machine for which a run is settled: this one (`detect_machine`) or another (`assumed_machine`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
import torch

from llm_fp8.config.options import Config
from llm_fp8.config.recipes import RECIPES, recipe_names
from llm_fp8.distributed.process_group import device_of_process, gathered
from llm_fp8.observability.metrics import GIB
from llm_fp8.precision.plan import MIN_FP8_CAPABILITY, choose_backend
from llm_fp8.step.compiled import missing_for_compiler
from llm_fp8.utils.packages import package_version
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.te_internals import require_te


@dataclass(frozen=True)
class Machine:
    """GPUs, host and ranks of a launch. If `gpu` is None, everything runs on the CPU."""

    ranks: LaunchRanks = LaunchRanks()
    gpu: str | None = None  # name of the GPU
    gpu_gib: float | None = None  # memory of the smallest GPU, according to torch
    capability: tuple[int, int] = (0, 0)  # compute capability of the GPU
    lacking: Mapping[str, str] = field(default_factory=dict)  # unavailable recipe of Transformer Engine -> reason
    host_free_gib: float | None = None  # free memory of the host; None if unknown
    is_assumed: bool = False
    no_compiler: str | None = "there is no GPU"  # why layers cannot be compiled for the GPU
    no_torchao: str | None = "there is no GPU"  # why torchao is not installed, or not faster than Transformer Engine
    lacks_delta_kernels: bool = False  # True if the model needs kernels for gated delta nets and none work

    @property
    def has_fp8(self) -> bool:
        return self.capability >= MIN_FP8_CAPABILITY


def detect_machine(config: Config, ranks: LaunchRanks, asks_te: bool = True) -> Machine:
    """Return the machine of this launch. If the run may use fp8, Transformer Engine determines the available recipes.
    Otherwise, or if `asks_te` is False, the compute capability does. All ranks must call this function.
    """
    host_free_gib = psutil.virtual_memory().available / GIB
    if not torch.cuda.is_available():
        return Machine(ranks, host_free_gib=host_free_gib)
    device = device_of_process()
    capability = torch.cuda.get_device_capability(device)
    lacking = lacking_by_capability(capability)
    no_compiler = missing_for_compiler()
    no_torchao = no_compiler or (None if package_version("torchao") else "torchao is not installed")
    wants_te = config.precision.mixed_precision == "fp8" and choose_backend(config, no_torchao)[0] == "te"
    if asks_te and wants_te and capability >= MIN_FP8_CAPABILITY:
        te = require_te(f"--mixed_precision {config.precision.mixed_precision}")
        answers = {name: getattr(te, RECIPES[name].availability)(return_reason=True) for name in recipe_names("te")}
        lacking = {name: reason for name, (is_available, reason) in answers.items() if not is_available}
    gpu = torch.cuda.get_device_name(device), min(gathered(torch.cuda.get_device_properties(device).total_memory / GIB))
    return Machine(ranks, *gpu, capability, lacking, host_free_gib, False, no_compiler, no_torchao)


def assumed_machine(
    ranks: LaunchRanks, gpu: str = "H100 80 GB", gib: float = 79.2, capability: tuple[int, int] = (9, 0)
) -> Machine:
    """Return a machine with the GPU `gpu`, which has `gib` GiB of memory, for a dry run or an estimate."""
    return Machine(ranks, gpu, gib, capability, lacking_by_capability(capability), None, True, None, None)


def lacking_by_capability(capability: tuple[int, int]) -> dict[str, str]:
    """Return recipe -> reason for each recipe of Transformer Engine that a GPU of this compute capability lacks."""
    rows = [(name, RECIPES[name].capability, RECIPES[name].capability_below) for name in recipe_names("te")]
    return {n: f"it needs compute capability {a}.{b}." for n, (a, b), end in rows if not (a, b) <= capability < end}
