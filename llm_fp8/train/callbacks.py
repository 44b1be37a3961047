"""What a run does between its steps, when the loop calls: says, judges, evaluates, saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from accelerate.utils import gather_object

import te_llama
from llm_fp8.data import PreparedData
from llm_fp8.observability.gpu_idle import describe_gpu_idle, gpu_idle
from llm_fp8.observability.step_profile import StepProfile
from llm_fp8.observability.step_stats import WARMUP_STEPS
from llm_fp8.precision.certificate import attention_library, certify, worst
from llm_fp8.train.evaluate import evaluate_loss
from llm_fp8.train.exact_match import ExactMatchEvaluation
from llm_fp8.train.loop import Trainer
from llm_fp8.train.setup import RunParts
from llm_fp8.train.train_state import RunState
from llm_fp8.utils.errors import FailedCheck
from llm_fp8.utils.json_files import write_json_atomic


@dataclasses.dataclass(frozen=True)
class RunHooks:
    """What the loop asks for between steps."""

    run: RunParts
    state: RunState
    trainer: Trainer
    data: PreparedData
    exact_match: ExactMatchEvaluation | None

    def after_first_step(self) -> None:
        """Say which attention kernels run, and warn of the slow ones."""
        if not self.run.config.model.use_te:
            return
        backend = self.run.attention_backend = te_llama.attention_backend(self.state.model)
        if backend == "unfused":
            self.trainer.reporter.print(
                "WARNING: attention runs UNFUSED, several times slower: Transformer Engine found neither a usable "
                "cuDNN nor flash-attn for this model's shapes and dtype. NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 in the "
                "environment prints why."
            )
        else:
            self.trainer.reporter.print(f"attention: {backend}")

    def after_profiled_step(self, profile: StepProfile, num_micro_batches: int) -> None:
        """Say and keep what the recorded step showed, and judge it."""
        self.run.recorded = profile
        self.trainer.reporter.print(profile.describe())
        self._judge(profile, num_micro_batches)

    def after_report(self, step: int) -> None:
        """Once, when there are steps to tell it by: say if the GPU waits. The run says so at its end too, which may
        be hours away.
        """
        run, options = self.run, self.trainer.options
        enough = options.profile_step + WARMUP_STEPS <= step < options.total_steps
        if run.recorded is None or run.has_looked_for_waiting or not enough:
            return
        run.has_looked_for_waiting = True
        waiting = gpu_idle(run.recorded, self.trainer.reporter.own_steps())
        if waits := describe_gpu_idle(waiting, run.accelerator.num_processes):
            self.trainer.reporter.print(f"so far {waits}")

    def evaluate(self, step: int) -> None:
        """Held-out loss and, where asked for, exact match, reported."""
        if self.data.eval is None:
            return
        trainer = self.trainer
        figures = evaluate_loss(trainer.accelerator, trainer.model, trainer.precision, self.data.eval)
        if self.exact_match is not None:
            figures |= self.exact_match.evaluate(step)
        trainer.reporter.evaluation({"step": step, **figures})

    def save(self, step: int) -> Path:
        """A checkpoint."""
        path = self.state.save(self.trainer)
        self.trainer.reporter.print(f"saving {path} in the background" if self.state.background else f"saved {path}")
        return path

    def _judge(self, profile: StepProfile, num_micro_batches: int) -> None:
        """Judge the recorded step and keep the verdict; `FailedCheck` on every rank where any rank's step is not
        what was asked for.
        """
        run = self.run
        attention = run.attention_backend or run.attention_implementation
        own = certify(
            run.promise,
            profile.kernels,
            run.precision.module_state(),
            num_micro_batches=num_micro_batches,
            recipe_inside_modules=run.precision.seen_inside,
            attention=f"sdpa ({attention_library(profile.kernels)})" if attention == "sdpa" else attention,
            rank=run.accelerator.process_index,
        )
        certificate = run.certificate = worst(gather_object([own]))
        path = run.folder / "certificate.json"
        if run.accelerator.is_main_process:
            write_json_atomic(path, certificate.to_dict())
            self.trainer.reporter.track({"certificate": certificate.to_dict()})
        if certificate.verdict == "failed":
            sentence = certificate.failure(path)
            self.trainer.reporter.finish(
                {"failed": sentence, "certificate": certificate.to_dict(), **run.parallel_record()}
            )
            run.accelerator.wait_for_everyone()  # The launcher ends the others as soon as one is gone.
            raise FailedCheck(sentence)
        if certificate.verdict == "undetermined":
            self.trainer.reporter.print(
                f"WARNING: this run could not be certified: {'; '.join(certificate.reasons)}. See {path}."
            )
