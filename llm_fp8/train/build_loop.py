"""The loop of a run: new, or as its checkpoint left it; and the best step's weights at its end."""

from __future__ import annotations

from llm_fp8.distributed.process_group import largest
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.reporter import RunReporter
from llm_fp8.optim.schedule import build_scheduler
from llm_fp8.optim.state import bytes_on_host
from llm_fp8.train.checkpoint import Checkpoint, CheckpointManager
from llm_fp8.train.evaluation import EvalHistory
from llm_fp8.train.loop import RunResults, TrainingLoop
from llm_fp8.train.scale_warmup import prepare_with_scales, warm_up_scales
from llm_fp8.train.train_state import RunState, has_the_scales


def build_loop(state: RunState, resumed: Checkpoint | None, results: RunResults) -> TrainingLoop:
    """Optimizer, first fp8 scales, schedule and loop, restored where the run is resumed."""
    setup, data, plan = state.setup, state.data, state.setup.plan
    config, strategy = plan.config, plan.strategy
    optimizer = strategy.build_optimizer(config.optim, plan.optimizer_kind, setup.training_model.named_parameters())
    if on_host := bytes_on_host(optimizer):
        plan.say(f"optimizer state: {on_host / GIB:.1f} GiB in host memory (--offload_optimizer)")
    finds_scales = resumed is None or not has_the_scales(resumed, state.options)
    model, optimizer = prepare_with_scales(
        strategy,
        setup.training_model,
        optimizer,
        lambda: warm_up_scales(setup, data.train) if finds_scales else None,
    )
    num_steps, step, saved = state.options["total_steps"], 0, dict[str, object]()
    eval_data = None if data.eval is None else data.eval.data
    history = EvalHistory(config.run.keep_best, config.run.early_stopping_patience, eval_data)
    if resumed is not None:
        state.restore(resumed, optimizer)
        step, saved = resumed.step, {name: resumed.meta[name] for name in ("tokens_seen", "evaluation_due")}
        plan.say(f"resumed from {resumed.folder} after step {step}")
        _restore_history(history, resumed, state)
    evaluates_again = step >= num_steps or history.stops_early or bool(saved.get("evaluation_due"))
    return TrainingLoop(
        setup=setup,
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config.optim, num_steps, step),
        loader=data.train,
        reporter=RunReporter(plan.accelerator, config, num_steps, step, evaluates_again=evaluates_again),
        total_steps=num_steps,
        eval_loader=data.eval,
        state=state,
        results=results,
        history=history,
        step=step,
        last_checkpoint=None if resumed is None else resumed.folder,
        **saved,  # type: ignore[arg-type]
    )


def _restore_history(history: EvalHistory, resumed: Checkpoint, state: RunState) -> None:
    """Go on from the evaluations before the checkpoint; say where they cannot count. Collective."""
    checkpoints, say = state.checkpoints, state.setup.plan.say
    if not history.load_state_dict(resumed.meta["evaluations"]):
        if history.keeps_best or history.patience:
            say(
                "evaluation is on other data than before this checkpoint: for --keep_best and "
                "--early_stopping_patience only the evaluations to come count"
            )
    elif history.best_step is not None and not _is_held(checkpoints, history.best_step):
        say(
            f"--keep_best: the best step so far, {history.best_step}, has no checkpoint in {checkpoints.folder}; the "
            "best is looked for among the evaluations to come"
        )
        history.forget_best()


def _is_held(checkpoints: CheckpointManager, step: int) -> bool:
    """Whether every rank sees a complete checkpoint of `step`. Collective."""
    folders = [checkpoint.folder for checkpoint in checkpoints.newest_first()]
    return not largest(checkpoints.of_step(step) not in folders)


def restore_best(loop: TrainingLoop) -> tuple[int, int]:
    """Put the best step's weights into the model where --keep_best kept them; the step and the tokens seen of what the
    model holds then.
    """
    best, state = loop.history.best_step, loop.state
    if best is None or best == loop.step or state is None:
        return loop.step, loop.tokens_seen
    folder = state.checkpoints.of_step(best)
    if not _is_held(state.checkpoints, best):
        loop.setup.plan.say(
            f"WARNING: {folder}, the checkpoint with the lowest eval loss, is gone or damaged: final/ will hold the "
            f"weights of the last step, {loop.step}"
        )
        return loop.step, loop.tokens_seen
    checkpoint = Checkpoint.open(folder)
    state.restore(checkpoint, loop.optimizer)
    return checkpoint.step, checkpoint.meta["tokens_seen"]
