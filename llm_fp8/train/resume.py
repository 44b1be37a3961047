"""A run that continues from a checkpoint: what the two must share, and the state that is put back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_fp8.config.options import DECIDES, TRAINING_OPTIONS, Config
from llm_fp8.distributed.process_group import largest
from llm_fp8.optim.optimizers import initialize_state, load_optimizer_scalars
from llm_fp8.train.checkpoint import LATEST, STRATEGY_STATE, Checkpoint, CheckpointManager
from llm_fp8.train.evaluation import EvalHistory
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.setup import TrainingSetup
from llm_fp8.train.train_state import SCALES, RunState, restore_rng_state, rng_state
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json


def check_compatible(checkpoint: Checkpoint, fingerprint: Mapping[str, Any]) -> None:
    """Raise `UserError` naming every entry in which a checkpoint's fingerprint differs from the resuming run's."""
    saved = checkpoint.meta["fingerprint"]
    current = json.loads(json.dumps(fingerprint))  # tuples become lists, as they did in the file
    if names := [name for name in {**saved, **current} if saved.get(name) != current.get(name)]:
        raise UserError(
            f"--resume_from {checkpoint.folder} does not belong to this run: "
            f"{'; '.join(f'{name} was {saved.get(name)!r} and is {current.get(name)!r}' for name in names)}."
        )


def changed_options(checkpoint: Checkpoint, options: Mapping[str, Any], allowed: Sequence[str]) -> list[str]:
    """The options in which a run differs from that of the checkpoint it resumes from, each with both values.

    Raises `UserError` where one of `TRAINING_OPTIONS` differs and is not in `allowed`.
    """
    allowed = [DECIDES.get(name, name) for name in allowed]
    saved = checkpoint.meta["options"]
    names = [name for name, value in options.items() if name in saved and saved[name] != value]
    changed = {name: f"{name} {saved[name]} -> {options[name]}" for name in names}
    if refused := [name for name in TRAINING_OPTIONS if name in changed and name not in allowed]:
        raise UserError(
            f"--resume_from {checkpoint.folder} was trained with other options ("
            f"{', '.join(changed[name] for name in refused)}); add --allow_changed {','.join(refused)}."
        )
    return list(changed.values())


def refuse_finished(config: Config, resumed: Checkpoint, num_steps: int) -> None:
    """Raise `UserError` where the checkpoint's run came to its end, which may be later than the checkpoint, and
    `num_steps` add nothing to it.
    """
    path, step, patience = Path(str(config.run.output_dir)), resumed.step, config.run.early_stopping_patience
    summary = read_json(path / "summary.json") if (path / "summary.json").exists() else {}
    finished_step = -1 if {"stopped_by", "failed"} & summary.keys() else summary.get("steps", -1)
    has_stopped = finished_step >= 0 and 0 < patience <= resumed.meta["evaluations"]["num_without_improvement"]
    adds_steps = finished_step < num_steps or (config.run.resume_from != LATEST and step < num_steps)
    if has_stopped or not adds_steps or step > num_steps:
        more = "raise --max_steps or --num_epochs and add --allow_changed total_steps"
        raise UserError(
            f"--resume_from {resumed.folder}: {step} of {num_steps} steps are done and the run is finished; "
            f"{'raise --early_stopping_patience' if has_stopped else more}."
        )


def restore(state: RunState, checkpoint: Checkpoint, optimizer: Any) -> None:
    """Restore everything in place that is not the loop's own."""
    accelerator, strategy = state.setup.plan.accelerator, state.setup.plan.strategy
    if strategy.saves_itself:
        strategy.load_state(checkpoint.folder / STRATEGY_STATE)
    else:
        initialize_state(optimizer)
    rank, meta = accelerator.process_index, checkpoint.meta
    # Ranks that the checkpoint doesn't know keep their initial seeds.
    rng = {name: tensor for name, tensor in rng_state(rank).items() if name in checkpoint.tensors}
    tensors = state.tensors(optimizer) | rng
    if state.has_the_scales(checkpoint):
        checkpoint.load(tensors)
    else:
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(SCALES)}
        checkpoint.load(kept, left_out=SCALES)
    if not strategy.saves_itself:
        load_optimizer_scalars(optimizer, meta["optimizer"])
        _after_loading(state.setup)
    state.data.train.load_state_dict(meta["loader"])
    if accelerator.scaler is not None and meta["fp16_scaler"]:
        accelerator.scaler.load_state_dict(meta["fp16_scaler"])
    restore_rng_state(rng)


def _after_loading(setup: TrainingSetup) -> None:
    """Cast anew what is derived from the weights that were loaded."""
    if setup.plan.config.parallel.fp8_params:
        from llm_fp8.distributed.fp8_params import requantise_

        requantise_(setup.model)
    if setup.plan.precision.backend == "torchao":
        from llm_fp8.precision.torchao import refresh_scales_

        refresh_scales_(setup.model)


def restore_history(history: EvalHistory, state: RunState, resumed: Checkpoint) -> None:
    """Go on from the evaluations before the checkpoint; say where they cannot count. Collective."""
    say = state.setup.plan.say
    if not history.load_state_dict(resumed.meta["evaluations"]) and (history.keeps_best or history.patience):
        say("evaluation is on other data than before this checkpoint: only the evaluations to come count")
    if history.best_step is not None and not _is_held(state.checkpoints, history.best_step):
        say(f"--keep_best: the checkpoint of step {history.best_step} is gone: only steps to come count")
        history.forget_best()


def _is_held(checkpoints: CheckpointManager, step: int) -> bool:
    """Whether every rank sees a complete checkpoint of `step`. Collective."""
    return not largest(checkpoints.of_step(step) not in [found.folder for found in checkpoints.newest_first()])


def restore_best(loop: TrainingLoop) -> tuple[int, int]:
    """Load the best step's weights (--keep_best), if any; the step and tokens seen of what the model holds then."""
    best, state = loop.history.best_step, loop.state
    if best is not None and best != loop.step:
        if _is_held(state.checkpoints, best):
            checkpoint = Checkpoint.open(state.checkpoints.of_step(best))
            restore(state, checkpoint, loop.optimizer)
            return checkpoint.step, checkpoint.meta["tokens_seen"]
        loop.setup.plan.say(f"WARNING: the checkpoint of the best step, {best}, is gone; final/ holds the last one")
    return loop.step, loop.tokens_seen
