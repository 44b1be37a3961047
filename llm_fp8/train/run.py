"""A whole run, in order: plan, data, model, checks, loop, evaluation, export, records.

From `main` to the backward pass: `run_training` -> `TrainingLoop.train` -> `TrainingLoop.take_step` ->
`DistributedStrategy.backward`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import set_seed
from transformers import PreTrainedTokenizerBase

from llm_fp8.config.options import Config
from llm_fp8.data import PreparedData, prepare_data
from llm_fp8.data.collate import Batch
from llm_fp8.data.loader import TrainLoader
from llm_fp8.distributed.context_parallel import ContextGroup
from llm_fp8.distributed.process_group import end_process_group, largest, start_process_group
from llm_fp8.models.build import decoder_layers, decoder_size
from llm_fp8.models.export import check_export
from llm_fp8.models.lora import num_adapter_parameters
from llm_fp8.models.parity import check_parity
from llm_fp8.models.source import check_model, load_tokenizer
from llm_fp8.models.weights import weight_files
from llm_fp8.observability.metrics import GIB, device_peak_tflops
from llm_fp8.observability.reporter import RunReporter
from llm_fp8.optim.schedule import build_scheduler
from llm_fp8.optim.state import bytes_on_host
from llm_fp8.train.callbacks import RunCallbacks, SaveTimer
from llm_fp8.train.checkpoint import CheckpointManager
from llm_fp8.train.eval_history import EvalHistory
from llm_fp8.train.failures import explained_failures
from llm_fp8.train.graceful_stop import GracefulStop
from llm_fp8.train.loop import LoopOptions, TrainingLoop
from llm_fp8.train.run_dir import as_one_run, check_free_space, is_finished, refuse_finished, run_lock, with_output_dir
from llm_fp8.train.run_record import (
    Progress,
    RunResults,
    closing_words,
    describe_dry_run,
    export_final,
    exported_bytes,
    exports_adapter,
    memory_advice,
    record_run,
    summary_of,
)
from llm_fp8.train.scale_warmup import (
    PASSES,
    prepare_with_scales,
    supervised_tokens_per_process,
    warm_up_delayed_scales,
)
from llm_fp8.train.setup import RunPlan, TrainingSetup, announce, build_setup, plan_run
from llm_fp8.train.train_state import (
    RunState,
    changed_options,
    find_checkpoint,
    other_scale_options,
    run_fingerprint,
    run_options,
    total_steps,
)
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.phases import PhaseClock
from llm_fp8.utils.ranks import LaunchRanks

STEPS_BEFORE_PROFILE = 4
"""Steps of a process before the one whose kernels are recorded."""


def run_training(
    config: Config,
    idle_fp8_keys: Sequence[str] = (),
    clock: PhaseClock | None = None,
) -> int:
    """Train, and return the exit code: 0, or that of the signal that stopped the run.

    Args:
        config: passed `check_options`.
        idle_fp8_keys: sentences on what the launcher's fp8_config asked for and nothing here acts on.
        clock: started when the script began: its first phase is the imports.
    """
    results = RunResults(clock or PhaseClock(), list(idle_fp8_keys))
    phase_ends = results.clock.end
    phase_ends("imports")
    quiet_libraries()
    ranks = LaunchRanks.from_environment(os.environ)
    if ranks.rank == 0:
        for sentence in idle_fp8_keys:
            print(f"WARNING: {sentence}", flush=True)
    asked, config = config, with_output_dir(config, ranks)
    start_process_group(ranks)
    config = as_one_run(asked, config)
    plan = plan_run(config, ranks)
    config = plan.config
    phase_ends("devices")
    caches = [Path(datasets.config.HF_DATASETS_CACHE)]
    with explained_failures(plan.folder, functools.partial(memory_advice, plan, results), caches), ExitStack() as held:
        set_seed(config.optim.seed)
        announce(plan)
        tokenizer = _checked_tokenizer(plan)
        context = ContextGroup.of_rank(config.parallel.context_parallel_size, plan.accelerator.process_index)
        checkpoints = CheckpointManager(
            plan.folder, config.run.save_total_limit, is_main=plan.accelerator.is_main_process
        )
        fingerprint = run_fingerprint(config, plan.precision, plan.strategy, plan.optimizer_kind, plan.hf_config)
        resume_path = find_checkpoint(checkpoints, config.run.resume_from, fingerprint)
        phase_ends("config_and_tokenizer")
        data = _prepare_data(plan, tokenizer, context)
        num_steps = total_steps(config, data, resume_path)
        options = run_options(config, data, num_steps)
        if resume_path and (changed := changed_options(resume_path, options, config.allowed_changes)):
            plan.say(f"resuming with other options: {', '.join(changed)}")
        refuse_finished(config, num_steps)
        if config.run.dry_run:
            plan.say(describe_dry_run(data, num_steps))
            end_process_group(plan.accelerator)
            return 0
        phase_ends("data")
        setup = build_setup(plan)
        phase_ends("weights")
        _check_parity(setup, data, context, resumed=resume_path is not None)
        phase_ends("parity")
        context.connected(plan.device.type).attach(decoder_layers(setup.model))
        _check_export(setup, tokenizer)
        held.enter_context(run_lock(config, ranks))  # nothing is written before
        state = RunState(setup, data, checkpoints, fingerprint, options)
        loop = build_loop(state, resume_path)
        plan.accelerator.wait_for_everyone()  # with loading: the checkpoint may be one that gets its name back
        checkpoints.clean_up()
        phase_ends("optimizer")
        # From here on there is something to save: before, a signal ends the process at once.
        with GracefulStop() as stop, loop.reporter as reporter:
            record_run(setup, data, loop, results)
            plan.say(f"training {loop.options.total_steps} steps on {_device_name(plan)}, results in {plan.folder}")
            callbacks = RunCallbacks(setup, state, loop, results, SaveTimer(config.run.save_minutes))
            if plan.device.type == "cuda":
                results.resident_gib = torch.cuda.memory_allocated(plan.device) / GIB
            phase_ends("records")
            try:
                loop.train(callbacks, stop.agreed)
            finally:
                checkpoints.finish()
            if not loop.is_complete:
                stopped = {"stopped_by": stop.requested, "checkpoint": str(loop.last_checkpoint)}
                figures = summary_of(setup, loop, results, None)
                reporter.finish({**figures, **_best_record(state, loop), **stopped})
                plan.say(f"stopped by {stop.requested}; continue with --resume_from latest --output_dir {plan.folder}")
                exit_code = stop.exit_code
            else:
                stop.what_follows = "all steps are done; finishing export and evaluation"
                loop.require_finite_weights()
                exported, holds = None, Progress(loop.step, loop.tokens_seen)
                if config.run.export and not loop.history.keeps_best:
                    # Before the last evaluation, which may take long, be killed or run out of memory.
                    exported = export_final(setup, tokenizer, holds, results.certificate)
                if loop.evaluated_step != loop.step and loop.evaluate(callbacks):
                    loop.save(callbacks)
                    checkpoints.finish()
                best = _best_record(state, loop)
                if config.run.export and exported is None:
                    holds = _restore_best(state, loop)
                    exported = export_final(setup, tokenizer, holds, results.certificate)
                if exported is not None:
                    best["exported_step"] = holds.step
                why = {"stopped_early": loop.history.describe_stop()} if loop.stopped_early else {}
                summary = reporter.finish({**summary_of(setup, loop, results, exported), **best, **why})
                closing_words(setup, results, summary, exported)
                exit_code = 0
    accelerator = plan.accelerator
    del plan, setup, data, loop, state, callbacks, results, phase_ends  # before the group that they use
    end_process_group(accelerator)
    return exit_code


def first_step(loader: TrainLoader) -> list[Batch]:
    """The micro-batches of the first step that `loader` will give, which it will give again."""
    position = loader.state_dict()
    batches = next(iter(loader))
    loader.load_state_dict(position)
    return batches


def build_loop(state: RunState, resume_path: Path | None) -> TrainingLoop:
    """Optimizer, first fp8 scales, schedule and loop, restored where the run is resumed."""
    setup, data = state.setup, state.data
    plan, training_model = setup.plan, setup.training_model
    config, accelerator, strategy = plan.config, plan.accelerator, plan.strategy
    optimizer = strategy.build_optimizer(config.optim, plan.optimizer_kind, training_model.named_parameters())
    if on_host := bytes_on_host(optimizer):
        plan.say(f"optimizer state: {on_host / GIB:.1f} GiB in host memory (--offload_optimizer)")
    begins = resume_path is None or other_scale_options(resume_path, state.options)
    prepared, optimizer = prepare_with_scales(
        strategy, training_model, optimizer, lambda: _warm_up_scales(setup, data) if begins else None
    )
    num_steps = state.options["total_steps"]
    done: dict[str, Any] = {"step": 0} if resume_path is None else state.restore(resume_path, optimizer)
    history = _restored_history(state, done.pop("evaluations", None))
    step = done["step"]
    if resume_path is not None:
        plan.say(f"resumed from {resume_path} after step {step}")
        if step > num_steps or (step == num_steps and is_finished(plan.folder, step)):
            raise UserError(
                f"--resume_from {resume_path}: it has {step} steps behind it, and the run that was asked for has "
                f"{num_steps}; to train on, raise --max_steps or --num_epochs and add --allow_changed total_steps."
            )
        if history.stops_early and is_finished(plan.folder, step):
            raise UserError(
                f"--resume_from {resume_path}: that run stopped early and is finished: {history.describe_stop()}; to "
                "train on, raise --early_stopping_patience or drop it."
            )
    return TrainingLoop(
        accelerator=accelerator,
        strategy=strategy,
        model=prepared,
        precision=setup.precision,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config.optim, num_steps, step),
        loader=data.train,
        reporter=RunReporter(
            accelerator,
            config,
            num_steps,
            step,
            evaluates_again=step >= num_steps or history.stops_early or done.get("evaluation_due", False),
        ),
        options=LoopOptions(
            total_steps=num_steps,
            max_grad_norm=config.optim.max_grad_norm,
            log_every=config.run.log_every,
            eval_every=config.run.eval_every if data.eval is not None else 0,
            save_every=config.run.save_every,
            empty_cache_every=config.parallel.empty_cache_freq,
            # Soon, but behind the first steps, which compile and allocate.
            profile_step=min(step + STEPS_BEFORE_PROFILE + 1, num_steps) if plan.certifies else 0,
            cuda_graphs=config.model.cuda_graphs,
        ),
        size=decoder_size(plan.hf_config, num_adapter_parameters(setup.model)),
        peak=device_peak_tflops(plan.device),
        fp8_linear_flop_share=setup.coverage.fp8_linear_flop_share,
        history=history,
        last_checkpoint=resume_path,
        **done,
    )


def _restored_history(state: RunState, saved: dict[str, Any] | None) -> EvalHistory:
    """What the evaluations before the checkpoint came to, of which a new run and earlier versions have nothing."""
    plan, checkpoints, held_out = state.setup.plan, state.checkpoints, state.data.eval
    history = EvalHistory.of_run(plan.config.run, None if held_out is None else held_out.data)
    if saved is not None and not history.load_state_dict(saved) and (history.keeps_best or history.patience):
        plan.say(
            "evaluation is on other data than before this checkpoint: for --keep_best and --early_stopping_patience "
            "only the evaluations to come count"
        )
    if not history.keeps_best:
        history.forget_best()
    elif history.best_step is not None and not _is_held(checkpoints, history.best_step):
        plan.say(
            f"--keep_best: the best step so far, {history.best_step}, has no checkpoint in {checkpoints.folder}; the "
            "best is looked for among the evaluations to come"
        )
        history.forget_best()
    return history


def _is_held(checkpoints: CheckpointManager, step: int) -> bool:
    """Whether every rank sees a complete checkpoint of `step`. Collective."""
    return not largest(not checkpoints.holds(step))


def _restore_best(state: RunState, loop: TrainingLoop) -> Progress:
    """Put the best step's weights into the model where --keep_best kept them; returns what the model holds then."""
    best = loop.history.best_step
    last = Progress(loop.step, loop.tokens_seen)
    if best is None or best == loop.step:
        return last
    if not _is_held(state.checkpoints, best):
        state.setup.plan.say(
            f"WARNING: {state.checkpoints.of_step(best)}, the checkpoint with the lowest eval loss, is gone or "
            f"damaged: final/ will hold the weights of the last step, {loop.step}"
        )
        return last
    done = state.restore(state.checkpoints.of_step(best), loop.optimizer)
    return Progress(done["step"], done["tokens_seen"])


def _best_record(state: RunState, loop: TrainingLoop) -> dict[str, Any]:
    """The entry `best` of summary.json, where --keep_best found a best step."""
    history = loop.history
    if history.best_step is None:
        return {}
    checkpoint = str(state.checkpoints.of_step(history.best_step))
    return {"best": {"step": history.best_step, "eval_loss": history.best_loss, "checkpoint": checkpoint}}


def _checked_tokenizer(plan: RunPlan) -> PreTrainedTokenizerBase:
    tokenizer, note = load_tokenizer(plan.config.model, plan.source)
    if note:
        plan.say(note)
    check_model(plan.config, plan.hf_config, tokenizer)
    return tokenizer


def _prepare_data(plan: RunPlan, tokenizer: PreTrainedTokenizerBase, context: ContextGroup) -> PreparedData:
    """The run's data; ranks of a context group share their sequences."""
    config, accelerator = plan.config, plan.accelerator
    data = prepare_data(
        config,
        tokenizer,
        rank=accelerator.process_index // context.size,
        world_size=accelerator.num_processes // context.size,
        pin_memory=plan.device.type == "cuda",
        main_process_first=accelerator.local_main_process_first,
        split_batch=context.split if context.size > 1 else None,
    )
    plan.say(data.describe())
    for name in ("eval_every", "eval_batches"):
        value = getattr(config.run, name)
        if data.eval is None and value:
            raise UserError(
                f"--{name} {value} has no effect, because no row is held out to evaluate on; raise "
                "--validation_fraction or drop it."
            )
    return data


def _check_parity(setup: TrainingSetup, data: PreparedData, context: ContextGroup, resumed: bool) -> None:
    """Compare the TE decoder with Hugging Face's on the first batch, unless weights are random or a checkpoint's."""
    plan = setup.plan
    options = plan.config.model
    if not options.use_te or not setup.weights_loaded or resumed:
        return
    batch = context.on_its_own(first_step(data.train)[0])
    found = check_parity(
        setup.model,
        batch.to(plan.device),
        plan.config.data.max_seq_length // context.size,
        dtype=plan.precision.compute_dtype if plan.strategy.shards_parameters else plan.weight_dtype,
        full_tensor=plan.strategy.full_tensor,
        files=weight_files(options, plan.source),
    )
    plan.say(found)


def _check_export(setup: TrainingSetup, tokenizer: PreTrainedTokenizerBase) -> None:
    """Say what final/ will hold where that is not obvious; refuse what could not be written, for the disk has no room
    or transformers would not save it.
    """
    plan = setup.plan
    options = plan.config.lora
    if plan.config.run.export and options.lora_rank and not setup.weights_loaded:
        plan.say("final/ will hold the merged model: the frozen weights are random and are kept nowhere else")
    if plan.config.run.export and plan.accelerator.is_main_process:
        check_free_space(plan.folder, exported_bytes(setup))
        if not exports_adapter(setup):
            check_export(setup.model, tokenizer, plan.export_dtype, plan.config.model.model_name)
    if setup.num_trainable_parameters < setup.num_parameters:
        share = setup.num_trainable_parameters / setup.num_parameters
        plan.say(f"trainable parameters: {setup.num_trainable_parameters:,} of {setup.num_parameters:,} ({share:.2%})")


def _warm_up_scales(setup: TrainingSetup, data: PreparedData) -> None:
    """First scales of delayed scaling; those that a checkpoint has come after them."""
    if not setup.precision.scales_lag:
        return
    plan, batches = setup.plan, first_step(data.train)
    num_supervised = supervised_tokens_per_process(plan.accelerator, batches)
    warm_up_delayed_scales(setup.training_model, setup.precision, batches[0].to(plan.device), num_supervised)
    plan.say(
        f"delayed scaling: first scales from {PASSES} passes over the first micro-batch, whose gradients are dropped"
    )


def _device_name(plan: RunPlan) -> str:
    name = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "the CPU"
    num_processes = plan.accelerator.num_processes
    return name if num_processes == 1 else f"{num_processes} x {name}"
