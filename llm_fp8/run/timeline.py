"""The training loop: between the steps of a `Stepper` it reports, checks kernels, evaluates, saves and stops.

Losses and norms stay on the device until a log, save or evaluation is due. Then one that is not finite ends the run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from llm_fp8.data.collate import Batch
from llm_fp8.data.loader import TrainLoader
from llm_fp8.distributed.process_group import gathered, largest
from llm_fp8.models.build import decoder_size
from llm_fp8.observability.kernel_trace import StepProfile, profiled
from llm_fp8.observability.metrics import PhaseClock, StepTokens, device_peak_tflops, memory_metrics, speed_metrics
from llm_fp8.observability.reporter import RunReporter
from llm_fp8.run.train_state import EvalHistory, RunState
from llm_fp8.step.evaluation import evaluate_loss
from llm_fp8.step.stepper import Stepper, StepResult
from llm_fp8.utils.errors import FailedCheck, UserError, listed
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.te_internals import attention_backend

if TYPE_CHECKING:
    from llm_fp8.observability.nvml import EnergyMeter
    from llm_fp8.precision.certificate import Certificate

STEPS_BEFORE_PROFILE = 4  # steps of a process before the recorded one, which compile and allocate
STEPS_PER_CLOCK = 10  # steps after which the time since the last checkpoint is looked at
SAVE_AFTER_S = 1800.0  # seconds after the last checkpoint at which the next one is due


@dataclass
class RunResults:
    """Results that a run collects for its records and its caller."""

    clock: PhaseClock = field(default_factory=PhaseClock)  # started with the script
    started_s: float = field(default_factory=time.time)
    attention_backend: str | None = None  # chosen by Transformer Engine in the first step
    recorded: StepProfile | None = None
    certificate: Certificate | None = None
    summary: dict[str, Any] = field(default_factory=dict)  # content of summary.json, after it is written
    last_loss: float | None = None  # loss of the last reported step, on every rank


@dataclass
class Timeline:
    """Training loop of a run that has already taken `step` steps and seen `tokens_seen` tokens."""

    stepper: Stepper
    loader: TrainLoader
    reporter: RunReporter
    total_steps: int
    state: RunState
    results: RunResults
    history: EvalHistory
    step: int = 0
    tokens_seen: int = 0

    def __post_init__(self) -> None:
        self.setup, self.precision = self.state.setup, self.stepper.precision
        plan = self.setup.plan
        self.accelerator = plan.accelerator
        self.energy: EnergyMeter | None = None  # None without a GPU
        if plan.device.type == "cuda":
            from llm_fp8.observability.nvml import EnergyMeter

            self.energy = EnergyMeter(self.accelerator)
        self.profile_step = self._next_profile_step()
        self._saved_s = time.monotonic()
        self.unsaved: UserError | None = None
        self._profile_figures: dict[int, dict[str, float]] = {}  # by step
        self._size = decoder_size(plan.hf_config, self.setup.num_adapter_parameters)
        self._peak = device_peak_tflops(plan.device)
        self._pending: list[tuple[int, float, StepResult]] = []  # step, epoch, and results still on the device

    def _next_profile_step(self) -> int:
        """Return the number of the step whose kernels will be recorded, or 0 for none."""
        return min(self.step + STEPS_BEFORE_PROFILE + 1, self.total_steps) if self.setup.plan.certifies else 0

    def train(self, stop_requested: Callable[[], bool]) -> None:
        """Take steps up to `total_steps`, early stopping or `stop_requested()`. A requested stop always saves."""
        if self.is_complete:
            return  # the run was resumed after the last step, to evaluate and export
        config = self.setup.plan.config
        options, eval_every = config.run, 0 if self.state.data.eval is None else config.run.eval_every
        if self._due(eval_every) and 0 < self.step != self.history.last_step:  # the run was stopped before it
            if self.evaluate(stop_requested) or stop_requested():
                self.save()
            if self.history.stops_early or stop_requested():
                return
        self.stepper.model.train()
        first = self.step + 1
        stamp = self.restart_clocks()
        for batches in self.loader:
            records = self.step + 1 == self.profile_step
            if graphs := self.stepper.micro_batch_graphs:
                graphs.may_capture = not records  # a capture would disturb the recording
            with profiled() if records else contextlib.nullcontext() as profile:
                stamp = self.take_step(batches, stamp)
            if self.step == first:
                self.stepper.drop_graphs_if_memory_is_short()
                self._note_attention()
            if profile is not None:
                stamp = self._after_profiled_step(profile, num_micro_batches=len(batches))
            if self._due(config.parallel.empty_cache_freq) and self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
            stopping = stop_requested()
            done = stopping or self.step >= self.total_steps
            logs, evaluates = self._due(options.log_every), self._due(eval_every) and not done
            saves = stopping or self._due(options.save_every or 0)
            saves = saves or (not done and (logs or self._due(STEPS_PER_CLOCK)) and self._checkpoint_due())
            if logs or evaluates or saves or done:
                self.read_pending()
            if logs and self.stepper.may_take_graphs and self.results.recorded and self.step > self.profile_step:
                self._take_graphs_if_idle(self.results.recorded, len(batches))
                stamp = self.restart_clocks()
            if evaluates:
                saves = self.evaluate(stop_requested) or saves
                stopping = stop_requested()  # which ends an evaluation
                saves, done = saves or stopping, stopping or self.history.stops_early
            if saves or (done and (options.save_every or self._checkpoint_due())):
                self.save()
            if done:
                if graphs := self.stepper.micro_batch_graphs:
                    graphs.make_room()  # for the export
                return
            if evaluates or saves:
                stamp = self.restart_clocks()  # the next step's time must not include these

    @property
    def is_complete(self) -> bool:
        return self.step >= self.total_steps or self.history.stops_early

    def take_step(self, batches: list[Batch], start: Any) -> Any:
        """Run the next step, which begins at the time stamp `start`. Return the time stamp of its end."""
        result = self.stepper.take_step(batches, start)
        self.step += 1
        self._pending.append((self.step, self.loader.epoch, result))
        return result.end

    def restart_clocks(self) -> Any:
        """Restart the measurement of step time and energy. Return the new time stamp."""
        if self.energy:
            self.energy.restart(self.step)
        return self.stepper.clock.stamp()

    def _due(self, every: int | Literal["epoch"]) -> bool:
        return self.loader.epoch.is_integer() if every == "epoch" else every > 0 and self.step % every == 0

    def read_pending(self) -> None:
        """Copy the results of all steps since the last call from the device. Check and report them."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        device, coefficients = self.accelerator.device, self.setup.training_model.coefficients
        # fp64 represents counts exactly. The host waits for the GPU only here.
        on_device = [value.to(device, torch.float64) for *_, result in pending for value in result.values.values()]
        rows = torch.stack(on_device).view(len(pending), -1).tolist()
        read = [dict(zip(result.values, row, strict=True)) for (*_, result), row in zip(pending, rows, strict=True)]
        memory = memory_metrics(device)
        if memory and self.accelerator.num_processes > 1:
            memory["peak_memory_gib_max_rank"] = max(gathered(memory["peak_memory_gib"]))
        num_tokens = {step: int(values["num_tokens"]) for (step, *_), values in zip(pending, read, strict=True)}
        energy = self.energy.read(num_tokens) if self.energy else {}
        num_processes, fp8 = self.accelerator.num_processes, self.precision.plan.has_fp8_peak
        for (step, epoch, result), values in zip(pending, read, strict=True):
            self._require_finite(step, result, values["loss"], values["grad_norm"])
            self.results.last_loss = values["loss"]
            tokens = StepTokens(*(int(values.pop(name)) for name in StepTokens._fields))
            values |= {name: values[name] / factor for name, factor in coefficients.items()}
            seconds = self.stepper.clock.seconds(result.start, result.end)
            self.tokens_seen += tokens.num_real_tokens
            self.results.clock.seconds.setdefault("first_step", seconds)
            record = {
                "step": step,
                "epoch": epoch,
                "tokens_seen": self.tokens_seen,
                **values,
                "learning_rate": result.learning_rate,
                **speed_metrics(tokens, seconds, self._size, num_processes, self._peak, fp8),
                **memory,
                **energy,
                **self._profile_figures.pop(step, {}),
                "fp8_linear_flop_share": self.setup.coverage.fp8_linear_flop_share,
            }
            self.reporter.step(record)  # also before a later non-finite loss, to show its cause

    def _after_profiled_step(self, profile: StepProfile, num_micro_batches: int) -> Any:
        """Report the recorded step and check its kernels. Return a time stamp of the end of this work."""
        self._profile_figures[self.step] = profile.figures()
        self.restart_clocks()
        self.read_pending()  # the check of the kernels may end the run
        self._certify(profile, num_micro_batches)
        self.results.recorded = profile
        self._take_graphs_if_idle(profile, num_micro_batches)
        return self.restart_clocks()

    def _take_graphs_if_idle(self, profile: StepProfile, num_micro_batches: int) -> None:
        """Make the stepper replay steps as graphs if this shortens them. Print the stepper's decision. Collective."""
        if self.step == self.total_steps or not self.stepper.may_take_graphs:
            return
        # Only two steps are measured before the recorded one, so a small idle time is checked again after more steps.
        asks_again, steps = self.step == self.profile_step, self.reporter.steps_of_process()
        self.setup.plan.say(self.stepper.take_graphs_if_idle(profile, steps, num_micro_batches, self.step, asks_again))
        if self.stepper.micro_batch_graphs:
            self.profile_step = self._next_profile_step()

    def _note_attention(self) -> None:
        """Print and record the attention back end that Transformer Engine chose in the first step."""
        if not self.setup.plan.config.model.use_te:
            return
        backend = self.results.attention_backend = attention_backend()
        self.reporter.print(f"attention: {backend}{' (WARNING: slow)' if backend == 'unfused' else ''}")

    def _certify(self, profile: StepProfile, num_micro_batches: int) -> None:
        """Check that the recorded step ran the expected kernels and write the result to the certificate's file. Raise
        `FailedCheck` on all ranks if the kernels of any rank differ.
        """
        from llm_fp8.precision.certificate import ExpectedKernels, certify, worst

        setup, plan = self.setup, self.setup.plan
        rank_certificate = certify(
            ExpectedKernels.of_model(self.precision, setup.coverage, setup.recomputed),
            profile.kernels,
            self.precision.module_state(),
            num_micro_batches=num_micro_batches,
            attention=self.results.attention_backend or setup.attention,
            rank=self.accelerator.process_index,
        )
        certificate, path = worst(gathered(rank_certificate)), self.state.folder / "certificate.json"
        if self.accelerator.is_main_process:
            write_json_atomic(path, certificate.to_dict())
            self.reporter.track({"certificate": certificate.to_dict()})
        if certificate.verdict == "failed":
            sentence = certificate.failure(path)
            self.reporter.finish({"failed": sentence, "certificate": certificate.to_dict(), **plan.parallel_record})
            self.accelerator.wait_for_everyone()  # the launcher kills all ranks when one exits
            raise FailedCheck(sentence)
        if certificate.verdict == "undetermined":
            self.reporter.print(f"WARNING: this run could not be certified: {'; '.join(certificate.reasons)}")
        self.results.certificate = certificate

    def evaluate(self, stop_requested: Callable[[], bool] = lambda: False) -> bool:
        """Evaluate and report the loss, unless `stop_requested()`. Return True if --keep_best keeps this step."""
        if self.state.data.eval is None:
            return False
        if graphs := self.stepper.micro_batch_graphs:
            graphs.make_room()
        data = itertools.takewhile(lambda _: not stop_requested(), self.state.data.eval)
        figures = evaluate_loss(self.accelerator, self.stepper.model, self.precision, data)
        if stop_requested():
            return False  # after a resume, the evaluation is repeated
        self.reporter.evaluation({"step": self.step, **figures})
        self.history.add(self.step, gathered(figures["eval_loss"])[0])  # the loss of the main rank
        return self.history.kept_step == self.step

    def save(self) -> None:
        with self.saving():
            folder = self.state.save(self.step, self.stepper.optimizer, self.history, self.tokens_seen)
            self._saved_s = time.monotonic()
            self.reporter.print(f"{'saving' if self.setup.plan.config.parallel.async_save else 'saved'} {folder}")

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Keep the error of a block that writes the last checkpoint in `unsaved` if an export follows it."""
        try:
            yield
        except UserError as error:
            if not self.is_complete or not self.setup.plan.config.run.export:
                raise
            self.unsaved = error

    def _checkpoint_due(self) -> bool:
        """Return True if the last save is `SAVE_AFTER_S` old, or if a run with checkpoints is complete. Collective."""
        if self.setup.plan.config.run.save_every == 0:
            return False
        is_old = time.monotonic() - self._saved_s >= SAVE_AFTER_S
        is_due = is_old or (self.is_complete and any(self.state.checkpoints.paths()))
        return bool(largest(self.accelerator.is_main_process and is_due))

    def _require_finite(self, step: int, result: StepResult, loss: float, grad_norm: float) -> None:
        # Overflows are expected with fp16 loss scaling: the scaler skips such a step and reduces the scale.
        if math.isfinite(loss) and (math.isfinite(grad_norm) or self.accelerator.scaler is not None):
            return
        # Every rank gets here, since loss and norm are reduced over all ranks.
        ranks = gathered((self.accelerator.process_index, math.isfinite(result.rank_loss.item()), result.row_ids))
        suspects = [rank for rank in ranks if not rank[1]] or ranks
        rows = [f"{', '.join(map(str, row_ids[:16]))} (rank {rank})" for rank, _, row_ids in suspects]
        raise UserError(
            f"step {step}: the loss is {loss} and the gradient norm {grad_norm}; dataset rows: {listed(rows)}. "
            "Lower --learning_rate, or in fp8 keep outer layers in bf16 (--fp8_bf16_modules layers.-2:). In the "
            "first step, look for NaN in the weights."
        )
