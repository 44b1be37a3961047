"""What a run does between steps: report, certify, evaluate, save."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from accelerate.utils import broadcast_object_list, gather_object

import te_llama
from llm_fp8.distributed.process_group import largest
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.step_profile import StepProfile, describe_gpu_idle, gpu_idle
from llm_fp8.observability.step_stats import WARMUP_STEPS
from llm_fp8.precision.certificate import attention_library, certify, worst
from llm_fp8.train.evaluate import evaluate_loss
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.run_record import RunResults, exported_bytes, parallel_record
from llm_fp8.train.setup import TrainingSetup
from llm_fp8.train.train_state import RunState
from llm_fp8.utils.errors import FailedCheck
from llm_fp8.utils.json_files import write_json_atomic


@dataclasses.dataclass
class SaveTimer:
    """The time since the last checkpoint, or since training began in this process."""

    minutes: float
    """After which the next checkpoint is due; 0: never."""
    _since_s: float = dataclasses.field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        """Whether a checkpoint is due."""
        return self.minutes > 0 and time.monotonic() - self._since_s >= 60 * self.minutes

    def restart(self) -> None:
        """Measure from now on."""
        self._since_s = time.monotonic()


@dataclasses.dataclass(frozen=True)
class RunCallbacks:
    """`llm_fp8.train.loop.Callbacks` of a run."""

    setup: TrainingSetup
    state: RunState
    loop: TrainingLoop
    results: RunResults
    timer: SaveTimer

    def after_first_step(self) -> None:
        """Print the attention backend, and warn of the slow one."""
        if not self.setup.plan.config.model.use_te:
            return
        backend = self.results.attention_backend = te_llama.attention_backend()
        if backend == "unfused":
            self.loop.reporter.print(
                "WARNING: attention runs UNFUSED, several times slower: Transformer Engine found neither a usable "
                "cuDNN nor flash-attn for this model's shapes and dtype. NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 in the "
                "environment prints why."
            )
        else:
            self.loop.reporter.print(f"attention: {backend}")

    def after_profiled_step(self, profile: StepProfile, num_micro_batches: int) -> None:
        """Print and keep the profile, and judge it."""
        self.results.recorded = profile
        self.loop.reporter.print(profile.describe())
        self._judge(profile, num_micro_batches)

    def after_report(self, step: int) -> None:
        """Once, after enough steps: say if the GPU is idle. The end of the run says so too, but may be hours away."""
        results, options, reporter = self.results, self.loop.options, self.loop.reporter
        enough = options.profile_step + WARMUP_STEPS <= step < options.total_steps
        if results.recorded is None or results.has_looked_for_gpu_idle or not enough:
            return
        results.has_looked_for_gpu_idle = True
        idle = gpu_idle(results.recorded, reporter.own_steps())
        if sentence := describe_gpu_idle(idle, self.loop.accelerator.num_processes):
            reporter.print(f"so far {sentence}")

    def evaluate(self, step: int) -> float | None:
        """Eval loss, reported; returns the main rank's eval loss."""
        if self.state.data.eval is None:
            return None
        loop = self.loop
        figures = evaluate_loss(loop.accelerator, loop.model, loop.precision, self.state.data.eval)
        loop.reporter.evaluation({"step": step, **figures})
        eval_loss: list[float] = broadcast_object_list([figures["eval_loss"]])  # what follows must be so on all ranks
        return eval_loss[0]

    def checkpoint_due(self) -> bool:
        """Whether --save_minutes are over on the main rank. A disk with too little room for a checkpoint beside the
        export costs the checkpoint, with a warning, and not the run, which need not have asked for one. Collective.
        """
        is_main, checkpoints = self.setup.plan.accelerator.is_main_process, self.state.checkpoints
        if not largest(is_main and self.timer.is_over()):
            return False
        needed_bytes = self.state.checkpoint_bytes(self.loop)
        if not largest(is_main and not checkpoints.has_room(needed_bytes + exported_bytes(self.setup))):
            return True
        self.loop.reporter.print(
            f"WARNING: --save_minutes {self.timer.minutes:g}: no checkpoint is written, because the disk of "
            f"{checkpoints.folder} has no room for one ({needed_bytes / GIB:.3g} GiB) beside final/; make room, or "
            "turn this off by --save_minutes 0."
        )
        self.timer.restart()
        return False

    def save(self, step: int) -> Path:
        """Write a checkpoint."""
        path = self.state.save(self.loop)
        self.timer.restart()
        in_background = self.setup.plan.config.parallel.async_save
        self.loop.reporter.print(f"saving {path} in the background" if in_background else f"saved {path}")
        return path

    def _judge(self, profile: StepProfile, num_micro_batches: int) -> None:
        """Certify the profiled step; `FailedCheck` on every rank where any rank's step failed."""
        setup, plan, reporter = self.setup, self.setup.plan, self.loop.reporter
        attention = self.results.attention_backend or setup.attention
        own = certify(
            setup.expected,
            profile.kernels,
            setup.precision.module_state(),
            num_micro_batches=num_micro_batches,
            recipe_inside_modules=setup.precision.recipe_inside_modules,
            attention=f"sdpa ({attention_library(profile.kernels)})" if attention == "sdpa" else attention,
            rank=plan.accelerator.process_index,
        )
        certificate = self.results.certificate = worst(gather_object([own]))
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
