"""What a run finds out while it runs, and the verdict on the kernels of its recorded step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import gather_object

from llm_fp8.observability.reporter import RunReporter
from llm_fp8.observability.step_profile import StepProfile
from llm_fp8.precision.certificate import Certificate, attention_library, certify, worst
from llm_fp8.train.setup import RunPlan, TrainingSetup
from llm_fp8.utils.errors import FailedCheck
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.phases import PhaseClock


@dataclass
class RunResults:
    """What a run finds out while it runs; everything else about it is frozen."""

    clock: PhaseClock = field(default_factory=PhaseClock)
    idle_fp8_keys: list[str] = field(default_factory=list)
    """What the launcher's fp8_config asked for and nothing here acts on, in sentences."""
    started_s: float = field(default_factory=time.time)
    attention_backend: str | None = None
    """Transformer Engine's choice; known after the first step."""
    measured_tokens_per_s: dict[str, float] | None = None
    """What --mixed_precision auto measured, by precision."""
    recorded: StepProfile | None = None
    certificate: Certificate | None = None


def parallel_record(plan: RunPlan) -> dict[str, Any]:
    """The effective sharding mode and number of processes."""
    return {"sharding_mode": plan.strategy.mode, "num_processes": plan.accelerator.num_processes}


def certify_step(setup: TrainingSetup, results: RunResults, reporter: RunReporter, num_micro_batches: int) -> None:
    """Judge the kernels of the recorded step, of `num_micro_batches` per rank, and write certificate.json; raises
    `FailedCheck` on every rank where any rank's step failed.
    """
    plan, profile = setup.plan, results.recorded
    assert profile is not None
    attention = results.attention_backend or setup.attention
    own = certify(
        setup.expected,
        profile.kernels,
        setup.precision.module_state(),
        num_micro_batches=num_micro_batches,
        recipe_inside_modules=setup.precision.recipe_inside_modules,
        attention=f"sdpa ({attention_library(profile.kernels)})" if attention == "sdpa" else attention,
        rank=plan.accelerator.process_index,
    )
    certificate = results.certificate = worst(gather_object([own]))
    path = plan.folder / "certificate.json"
    if plan.accelerator.is_main_process:
        write_json_atomic(path, certificate.to_dict())
        reporter.track({"certificate": certificate.to_dict()})
    if certificate.verdict == "failed":
        sentence = certificate.failure(path)
        reporter.finish({"failed": sentence, "certificate": certificate.to_dict(), **parallel_record(plan)})
        plan.accelerator.wait_for_everyone()  # The launcher ends the others as soon as one is gone.
        raise FailedCheck(sentence)
    if certificate.verdict == "undetermined":
        reporter.print(f"WARNING: this run could not be certified: {'; '.join(certificate.reasons)}. See {path}.")
