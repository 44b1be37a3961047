"""A whole run in its order: plan, data, model, checks, loop, evaluation, export, records.

The backward pass is reached by these calls: `run_training`, `Timeline.train`, `Timeline.take_step`, `Stepper.take_step`
and `Stepper.micro_batch`, which calls the model and `DistributedStrategy.backward`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import PreTrainedTokenizerBase

from llm_fp8.config.options import Config
from llm_fp8.data.prepare import PreparedData, prepare_data
from llm_fp8.distributed.process_group import gathered, start_process_group
from llm_fp8.models.source import check_model, load_tokenizer
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.reporter import RunReporter, quiet_libraries
from llm_fp8.optim.optimizers import bytes_on_host, effective_warmup_steps
from llm_fp8.run import records, run_dir
from llm_fp8.run.checkpoint import Checkpoint, CheckpointManager
from llm_fp8.run.graceful_stop import GracefulStop
from llm_fp8.run.setup import build_setup, build_stepper
from llm_fp8.run.timeline import RunResults, Timeline
from llm_fp8.run.train_state import EvalHistory, RunState
from llm_fp8.settle import resume
from llm_fp8.settle.plan import plan_run
from llm_fp8.settle.settle import Settled
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks


def run_training(config: Config, results: RunResults | None = None) -> int:
    """Run a whole training, and fill `results`. Return the exit code: 0, or that of the signal that stopped the run."""
    results = results or RunResults()
    phase_ends = results.clock.end
    phase_ends("imports")
    quiet_libraries()
    ranks = LaunchRanks.from_environment(os.environ)
    is_own_group = not torch.distributed.is_initialized()
    start_process_group(ranks)
    with contextlib.ExitStack() as stack:
        claimed, resume_from = run_dir.claim_folder(config, ranks, stack)
        folder = claimed or Path("runs")
        resumed = run_dir.find_checkpoint(folder, resume_from, ranks)
        plan = plan_run(config, ranks, None if resumed is None else resumed.meta)
        phase_ends("devices")

        is_compiled, timed = plan.eager_reason is None, results.clock.seconds

        def in_compiled_step() -> bool:
            return is_compiled and "records" in timed and "first_step" not in timed

        stack.enter_context(run_dir.explained_failures(lambda: folder, in_compiled_step))
        set_seed(config.optim.seed)
        tokenizer, note = load_tokenizer(config.model, plan.source)
        plan.say(note)
        check_model(config, plan.hf_config, tokenizer)
        if resumed is not None:
            resume.check_compatible(resumed, resume.run_fingerprint(plan))
        phase_ends("config_and_tokenizer")

        data = load_data(plan, tokenizer, plan.strategy.context_group)
        plan.say(data.description)
        num_steps = resume.total_steps(plan.config, data, resumed)
        if resumed is not None:
            resume.refuse_finished(plan.config, claimed, resume_from, resumed, num_steps)
        phase_ends("data")

        folder = claimed or run_dir.default_folder(plan, stack)
        records.announce(plan)
        options = resume.run_options(plan.config, data, num_steps)
        if resumed is not None and (changed := resume.changed_options(plan.config, resumed, options)):
            plan.say(f"resuming with other options: {', '.join(changed)}")
        checks_parity = config.model.use_te and plan.stored is not None and resumed is None
        setup = build_setup(plan, data.train.first_step()[0] if checks_parity else None)
        if setup.num_trainable_parameters < setup.num_parameters:
            plan.say(f"trainable parameters: {setup.num_trainable_parameters:,} of {setup.num_parameters:,}")
        phase_ends("weights")

        records.check_export(setup, folder, data, tokenizer)
        phase_ends("checks")

        engine = plan.strategy if plan.strategy.saves_itself else None
        checkpoints = CheckpointManager(folder, plan.config.run.save_total_limit, ranks.rank == 0, engine)
        if ranks.rank == 0:
            run_dir.begin_in(folder)  # before this, nothing is written to the folder
        state = RunState(setup, data, folder, checkpoints, resume.run_fingerprint(plan), options)
        timeline = build_timeline(state, resumed, results)
        if resumed is not None and ranks.rank == 0:
            checkpoints.make_newest(resumed)  # after loading, which may fail
        phase_ends("optimizer")

        # Before this point there is nothing to save, so a signal ends the process at once.
        with GracefulStop() as stop, timeline.reporter:
            records.record_run(timeline)
            devices = plan.machine.gpu or "the CPU"
            if ranks.world_size > 1:
                devices = f"{ranks.world_size} {'x' if plan.machine.gpu else 'processes on'} {devices}"
            warmup = f"warm-up: {effective_warmup_steps(config.optim.num_warmup_steps, num_steps)}"
            plan.say(f"training {num_steps - timeline.step} steps ({warmup}) on {devices}, results in {folder}")
            phase_ends("records")
            try:
                timeline.train(stop.agreed)
            finally:
                with timeline.saving():
                    checkpoints.finish()
            finish(timeline, stop, tokenizer)
            if timeline.unsaved is not None:
                raise UserError(gathered(str(timeline.unsaved))[0])  # after the main rank's export
    exit_code, accelerator = 0 if timeline.is_complete else stop.exit_code, plan.accelerator
    del plan, setup, state, timeline  # free the model before the process group is destroyed
    # Free DDP first: if it is the last owner of the group, it holds the GIL while it waits for gloo's threads.
    accelerator.free_memory()
    if is_own_group and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return exit_code


def load_data(settled: Settled, tokenizer: PreTrainedTokenizerBase, context: Any = None) -> PreparedData:
    """Prepare the run's data. If `context` is a `ContextGroup`, all ranks of the group get the same sequences."""
    config, ranks, on_gpu = settled.config, settled.machine.ranks, torch.cuda.is_available()
    rows_in_step = config.data.batch_size * config.optim.gradient_accumulation_steps
    return prepare_data(
        config,
        tokenizer,
        rank=ranks.rank,
        world_size=ranks.world_size,
        pin_memory=on_gpu,
        main_process_first=PartialState(cpu=not on_gpu).local_main_process_first,
        split_batch=None if context is None else context.split,
        eval_batch_size=rows_in_step // settled.num_requested_micro_batches,  # before micro-batches were merged
    )


def build_timeline(state: RunState, resumed: Checkpoint | None, results: RunResults) -> Timeline:
    """Build optimizer, fp8 scales, schedule and training loop; restore their state if `resumed` is set. Collective."""
    setup, data, plan = state.setup, state.data, state.setup.plan
    config = plan.config
    num_steps = state.options["total_steps"]
    step, tokens = (0, 0) if resumed is None else (resumed.step, resumed.meta["tokens_seen"])
    has_scales = resumed is not None and state.has_the_scales(resumed)
    stepper = build_stepper(setup, None if has_scales else data.train, num_steps, step)
    if on_host := bytes_on_host(stepper.optimizer):
        plan.say(f"optimizer state: {on_host / GIB:.1f} GiB in host memory (--offload_optimizer)")
    eval_data = None if data.eval is None else data.eval.data
    history = EvalHistory(config.run.keep_best, config.run.early_stopping_patience, eval_data)
    if resumed is not None:
        state.restore(resumed, stepper.optimizer)
        plan.say(f"resumed from {resumed.folder} after step {step}")
        state.restore_history(history, resumed)
    evaluates_again = history.last_step != step
    reporter = RunReporter(plan.accelerator.is_main_process, config, state.folder, num_steps, step, evaluates_again)
    return Timeline(stepper, data.train, reporter, num_steps, state, results, history, step, tokens)


def finish(timeline: Timeline, stop: GracefulStop, tokenizer: PreTrainedTokenizerBase) -> None:
    """Evaluate, export and write the summary after the last step. If a signal ended the run, only write the summary."""
    plan, config, state = timeline.setup.plan, timeline.setup.plan.config, timeline.state
    records.record_stream(timeline)
    if not timeline.is_complete:
        stopped = {"stopped_by": stop.requested, "checkpoint": str(state.checkpoints.of_step(timeline.step))}
        timeline.results.summary = timeline.reporter.finish(records.summary_of(timeline, None) | stopped)
        plan.say(f"stopped by {stop.requested}; continue with --resume_from latest --output_dir {state.folder}")
        return
    stop.what_follows = "all steps are done; finishing export and evaluation"
    exported, step, tokens_seen = None, timeline.step, timeline.tokens_seen
    if config.run.export and not timeline.history.keeps_best:
        # Export before the last evaluation, which may be killed or run out of memory.
        exported = records.export_final(timeline, tokenizer, step, tokens_seen)
    if timeline.history.last_step != timeline.step and timeline.evaluate():
        timeline.save()
        with timeline.saving():
            state.checkpoints.finish()
    if config.run.export and exported is None:
        best_step = timeline.history.kept_step
        if best_step is not None and best_step != timeline.step:
            if best := state.complete_checkpoint(best_step):
                state.restore(best, timeline.stepper.optimizer)
                step, tokens_seen = best.step, best.meta["tokens_seen"]
            else:
                plan.say(f"WARNING: the checkpoint of the best step, {best_step}, is gone; final/ holds the last one")
        exported = records.export_final(timeline, tokenizer, step, tokens_seen)
    summary = records.summary_of(timeline, exported) | ({"exported_step": step} if exported else {})
    timeline.results.summary = timeline.reporter.finish(summary)
    records.closing_words(timeline, exported)
