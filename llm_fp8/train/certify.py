"""The verdict on the kernels of a run's recorded step."""

from __future__ import annotations

from accelerate.utils import gather_object

from llm_fp8.observability.reporter import RunReporter
from llm_fp8.observability.step_profile import StepProfile
from llm_fp8.precision.certificate import Certificate, attention_library, certify, worst
from llm_fp8.train.setup import TrainingSetup
from llm_fp8.utils.errors import FailedCheck
from llm_fp8.utils.json_files import write_json_atomic


def certify_step(
    setup: TrainingSetup, profile: StepProfile, attention: str, reporter: RunReporter, num_micro_batches: int
) -> Certificate:
    """Judge the kernels of the recorded step, of `num_micro_batches` per rank, and write certificate.json; raises
    `FailedCheck` on every rank where any rank's step failed.
    """
    plan, precision = setup.plan, setup.precision
    own = certify(
        setup.expected,
        profile.kernels,
        precision.module_state(),
        num_micro_batches=num_micro_batches,
        recipe_inside_modules=precision.recipe_inside_modules,
        attention=f"sdpa ({attention_library(profile.kernels)})" if attention == "sdpa" else attention,
        rank=plan.accelerator.process_index,
    )
    certificate = worst(gather_object([own]))
    path = plan.folder / "certificate.json"
    if plan.accelerator.is_main_process:
        write_json_atomic(path, certificate.to_dict())
        reporter.track({"certificate": certificate.to_dict()})
    if certificate.verdict == "failed":
        sentence = certificate.failure(path)
        reporter.finish({"failed": sentence, "certificate": certificate.to_dict(), **plan.parallel_record})
        plan.accelerator.wait_for_everyone()  # The launcher ends the others as soon as one is gone.
        raise FailedCheck(sentence)
    if certificate.verdict == "undetermined":
        reporter.print(f"WARNING: this run could not be certified: {'; '.join(certificate.reasons)}")
    return certificate
