"""Time and memory of a step on a GPU by name.

The constants come from one GPU (`calibration.CALIBRATED_GPU`). Another GPU whose rates are recorded
(llm_fp8/tools/gemm_rates.py), or measured now, gets them scaled by the ratio of the rates. A GPU with neither has no
prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_fp8.config.validation import fp8_params_recipes
from llm_fp8.observability.metrics import GIB
from llm_fp8.tools.gemm_rates import MeasuredRates, known_gpu_names, known_rates, measure_rates
from llm_fp8.tools.predict.calibration import (
    CALIBRATED_GPU,
    CHECKED_GPUS,
    FITS_RESERVE_GIB,
    MEASURED_GPUS,
    MEASURED_TOKENS,
    Rates,
)
from llm_fp8.tools.predict.memory import Memory, peak_memory
from llm_fp8.tools.predict.step_time import StepTime, host_seconds, step_time
from llm_fp8.tools.predict.workload import StepWorkload
from llm_fp8.utils.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """A GPU that steps can be predicted for."""

    name: str
    rates: Rates
    memory_gib: float

    @property
    def calibrated(self) -> bool:
        """Whether the constants were fitted to runs on this GPU, not scaled to it."""
        return self.name == CALIBRATED_GPU

    @property
    def checked(self) -> bool:
        """Whether recorded runs on one and on several of these were held against their predictions. They have the
        calibrated GPU's NVLink, and so its constants of communication.
        """
        return self.name in CHECKED_GPUS


def known_gpu(name: str) -> Gpu | None:
    """The GPU that `torch.cuda.get_device_name` calls so; None for one without records."""
    here = known_rates(name)
    if here is None or name == CALIBRATED_GPU:
        return None if here is None else Gpu(name, Rates(), here.memory_gib)
    return _scaled(name, here.ceilings, here.memory_gib)


def _scaled(name: str, here: MeasuredRates, memory_gib: float) -> Gpu:
    """A GPU by its measured rates, scaled from the calibrated one, whose rates are package data."""
    calibrated = known_rates(CALIBRATED_GPU)
    assert calibrated is not None
    return Gpu(name, Rates().scaled(here, calibrated.ceilings), memory_gib)


def gpu_by_name(name: str | None) -> Gpu:
    """The GPU called `name`; None: this machine's, or without one the calibrated GPU. An unknown GPU of this machine is
    measured, which takes two seconds. Raises `UserError` for one that is neither.
    """
    own = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    name = name or own or CALIBRATED_GPU
    gpu = known_gpu(name)
    if gpu is None and name == own:
        device = torch.device("cuda", torch.cuda.current_device())
        memory_gib = torch.cuda.get_device_properties(device).total_memory / GIB
        gpu = _scaled(name, measure_rates(device), memory_gib)
    if gpu is None:
        raise UserError(
            f"--gpu {name}: nothing was measured on such a GPU and it is not this machine's, so there is no "
            f"prediction; known are {', '.join(known_gpu_names())}."
        )
    return gpu


@dataclass(frozen=True)
class Prediction:
    scenario: StepWorkload
    gpu: Gpu
    time: StepTime
    memory: Memory

    @property
    def step_time_s(self) -> float:
        return self.time.total_s

    @property
    def tokens_per_s(self) -> float:
        return self.scenario.tokens_per_step / self.time.total_s

    @property
    def peak_memory_gib(self) -> float:
        """Of the tensors on the GPU that needs most."""
        return self.memory.total_gib

    @property
    def fits(self) -> bool:
        """Whether the GPU has that memory."""
        return self.memory.total_gib + FITS_RESERVE_GIB <= self.gpu.memory_gib

    @property
    def tight(self) -> bool:
        """Whether under FSDP the allocator reserves all memory: steps get longer than predicted, or memory runs out."""
        return self.scenario.sharded and self.memory.reserved_gib + FITS_RESERVE_GIB > self.gpu.memory_gib

    @property
    def host_s(self) -> float | None:
        """`host_seconds`; None for bf16, whose launches were not measured apart."""
        return None if self.scenario.recipe == "bf16" else host_seconds(self.scenario)

    @property
    def notes(self) -> list[str]:
        """Sentences on what the figures leave out."""
        work, several = self.scenario, self.scenario.num_gpus > 1
        fewest, most = MEASURED_TOKENS
        counts = MEASURED_GPUS.get(work.mode, ())
        less = "--sharding_mode fsdp_full" if work.mode == "fsdp_grad" else "more GPUs"
        can_be_fp8 = work.mode == "fsdp_grad" and work.recipe in fp8_params_recipes() and not work.fp8_params
        in_fp8 = ", --fp8_params" if can_be_fp8 else ""
        head_dim, head_sizes = work.model.spec.head_dim, Rates().attention_tflops
        windows = [window for window in work.model.spec.windows if window is not None]
        slow_host = self.host_s is not None and self.host_s > self.step_time_s
        sentences = (
            (
                not self.gpu.calibrated,
                f"the constants are those of {CALIBRATED_GPU}, scaled by measured rates"
                + ("" if self.gpu.checked else f"; no run on {self.gpu.name} checked them"),
            ),
            (
                not fewest <= work.micro_batch_tokens <= most,
                f"the rows that show how good this is have {fewest:,} to {most:,} tokens in a micro-batch, and this "
                f"one has {work.micro_batch_tokens:,}",
            ),
            (
                slow_host,
                f"the host's time to launch kernels is not in it, and can be longer: in fp8 {self.host_s or 0:.3g} s "
                "for these layers and micro-batches on the slowest recorded machine, however short the kernels are, "
                "so fp8 gains less or nothing; larger micro-batches, and fewer, help",
            ),
            (
                several and work.num_gpus not in counts,
                f"recorded runs of today's code under {work.mode} have {' and '.join(map(str, counts))} GPUs of one "
                "host",
            ),
            (
                work.recomputed_layers and (work.recipe, work.mode) != ("bf16", "fsdp_full"),
                "gradient checkpointing is worked out; recorded runs with more than 512 tokens in a micro-batch have "
                "it in bf16 under fsdp_full alone",
            ),
            (
                head_dim not in head_sizes,
                f"attention was measured with heads of {' and '.join(map(str, head_sizes))} elements, and this model's "
                f"{head_dim} are taken to be as fast as the nearest",
            ),
            (
                windows and min(windows) < work.mean_length,
                f"attention is predicted over whole documents; {len(windows)} of {work.model.spec.num_layers} layers "
                f"have a sliding window of {min(windows, default=0):,} tokens, so their attention takes less",
            ),
            (
                work.model.spec.qk_norm,
                "norms of queries and keys (Qwen3) are worked out, no recorded run has them",
            ),
            (
                several,
                "several GPUs: the constants of communication come from one row of Llama-3.1-8B on four H200s under "
                "fsdp modes; rows of ddp, of two GPUs and of longer documents check them",
            ),
            (
                several and work.micro_batches == 1,
                "several GPUs and one micro-batch: recorded steps of 8B and 14B were 3 to 6% shorter than predicted",
            ),
            *(
                (several and unrecorded, f"{what} on several GPUs is worked out, no recorded run has it")
                for what, unrecorded in (
                    ("block", work.recipe == "block"),
                    (f"{work.recipe} under fsdp_grad", work.recipe == "current" and work.mode == "fsdp_grad"),
                    ("current with --fp8_params", work.recipe == "current" and work.fp8_weights > 0),
                    (f"--fp8_lm_head all under {work.mode}", work.fp8_lm_head_gemms == 3 and work.mode != "fsdp_grad"),
                    ("--sync_every_micro_batch", work.sync_every_micro_batch),
                )
            ),
            (work.fp8_lm_head_gemms == 2, "--fp8_lm_head gradients is worked out, no recorded run has it"),
            (
                self.tight and self.fits,
                f"{work.recipe}: FSDP's streams cannot use each other's free memory and ask for about "
                f"{self.memory.reserved_gib:.0f} of {self.gpu.memory_gib:.1f} GiB, CUDA's own beside them, so the "
                "allocator will free and map memory within steps, which get longer than this, or memory runs out: "
                f"take a smaller --batch_size{in_fp8} or {less}",
            ),
        )
        return [sentence for applies, sentence in sentences if applies]


def can_predict(gpu: Gpu, recipe: str) -> bool:
    """Whether there are constants for a recipe on a GPU."""
    return recipe == "bf16" or recipe in gpu.rates.fp8_gemm_tflops


def predict(scenario: StepWorkload, gpu: Gpu) -> Prediction:
    """Time and memory of a step. Raises `UserError` where communication or the recipe was not measured on this GPU."""
    if scenario.num_gpus > 1 and not gpu.checked:
        raise UserError(
            f"--num_gpus {scenario.num_gpus}: communication was measured on {' and '.join(CHECKED_GPUS)} only; leave "
            f"it out for {gpu.name}."
        )
    if not can_predict(gpu, scenario.recipe):
        raise UserError(f"recipe {scenario.recipe} was never measured on {gpu.name}, so there is no prediction for it.")
    return Prediction(scenario, gpu, step_time(scenario, gpu.rates), peak_memory(scenario))
