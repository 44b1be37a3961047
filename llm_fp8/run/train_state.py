"""Save and restore the state of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_fp8.config.options import RESUME
from llm_fp8.data.prepare import PreparedData
from llm_fp8.distributed.process_group import largest
from llm_fp8.run.checkpoint import STRATEGY_STATE, Checkpoint, CheckpointManager
from llm_fp8.run.setup import TrainingSetup

SCALES = "fp8."  # prefix of the names of delayed scaling's tensors
EVALUATIONS = ("last_step", "best_step", "best_loss", "num_without_improvement", "data")  # fields in a checkpoint


@dataclass
class EvalHistory:
    """The results of a run's evaluations. They are equal on all ranks and stored in checkpoints."""

    keeps_best: bool = False
    patience: int = 0  # number of evaluations without improvement that ends the run, or 0 for no limit
    data: str | None = None  # hash of the eval data, since losses on other data are not comparable
    last_step: int | None = None  # step of the last evaluation
    best_step: int | None = None  # step of the lowest eval loss, the first one if several are equal
    best_loss: float = math.inf
    num_without_improvement: int = 0  # number of evaluations since `best_step`

    @property
    def kept_step(self) -> int | None:
        """The step whose checkpoint must not be deleted (--keep_best), or None."""
        return self.best_step if self.keeps_best else None

    @property
    def stops_early(self) -> bool:
        return 0 < self.patience <= self.num_without_improvement

    def add(self, step: int, eval_loss: float) -> None:
        """Add the eval loss after `step`. A NaN or infinite loss is no improvement."""
        self.last_step = step
        if eval_loss < self.best_loss:
            self.best_step, self.best_loss, self.num_without_improvement = step, eval_loss, 0
        else:
            self.num_without_improvement += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in EVALUATIONS}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore the history from a checkpoint's `state`. If the eval data changed, do nothing and return False."""
        if state["data"] != self.data:
            return False
        vars(self).update(state)
        return True


@dataclass(frozen=True)
class RunState:
    """Saves and restores a run: weights, optimizer, scales, random states and position in the data."""

    setup: TrainingSetup
    data: PreparedData
    folder: Path
    checkpoints: CheckpointManager
    fingerprint: dict[str, Any]
    options: dict[str, Any]  # from `run_options`

    def tensors(self, optimizer: Any) -> dict[str, Tensor]:
        """Return name -> tensor of weights, optimizer state and scales. The tensors are not copied."""
        scales = {f"{SCALES}{name}": tensor for name, tensor in self.setup.precision.state_tensors().items()}
        return self.setup.plan.strategy.state(self.setup.model.module, optimizer) | scales

    def has_the_scales(self, checkpoint: Checkpoint) -> bool:
        """Return True if the run and the checkpoint agree in the options on which scales and amax histories depend."""
        saved = checkpoint.meta["options"]
        return all(saved.get(name) == self.options.get(name) for name, kind in RESUME.items() if kind == "scales")

    def save(self, step: int, optimizer: Any, history: EvalHistory, tokens_seen: int) -> Path:
        """Write a checkpoint after `step` (with --async_save in the background). Return its folder."""
        plan = self.setup.plan
        scaler = plan.accelerator.scaler
        meta = {
            "tokens_seen": tokens_seen,
            "evaluations": history.state_dict(),
            "fingerprint": self.fingerprint,
            "options": self.options,
            "loader": self.data.train.state_dict(),
            "fp16_scaler": None if scaler is None else scaler.state_dict(),
        }
        tensors = self.tensors(optimizer) | rng_state(plan.accelerator.process_index)
        return self.checkpoints.save(step, tensors, meta, history.kept_step, plan.config.parallel.async_save)

    def restore(self, checkpoint: Checkpoint, optimizer: Any) -> None:
        """Restore the run from `checkpoint`, in place, except for the history of evaluations. Collective."""
        plan, meta = self.setup.plan, checkpoint.meta
        # The random states of ranks that are not in the checkpoint are not changed.
        current_rng = rng_state(plan.accelerator.process_index)
        rng = {name: tensor for name, tensor in current_rng.items() if name in checkpoint.kinds}
        plan.strategy.load_state(checkpoint.folder / STRATEGY_STATE, optimizer)
        tensors = self.tensors(optimizer) | rng
        if not self.has_the_scales(checkpoint):
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(SCALES)}
        checkpoint.load(tensors)
        plan.strategy.after_load(self.setup.model.module, optimizer, checkpoint.step)
        self.data.train.load_state_dict(meta["loader"])
        if plan.accelerator.scaler is not None and meta["fp16_scaler"]:
            plan.accelerator.scaler.load_state_dict(meta["fp16_scaler"])
        restore_rng_state(rng)

    def restore_history(self, history: EvalHistory, checkpoint: Checkpoint) -> None:
        """Restore `history` from the checkpoint. If earlier results no longer count, print why. Collective."""
        say = self.setup.plan.say
        if not history.load_state_dict(checkpoint.meta["evaluations"]) and (history.keeps_best or history.patience):
            say("the eval data changed since this checkpoint: only later evaluations count")
        if history.kept_step is not None and self.complete_checkpoint(history.kept_step) is None:
            say(f"--keep_best: the checkpoint of step {history.kept_step} is gone: only later steps count")
            history.best_step, history.best_loss = None, math.inf

    def complete_checkpoint(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of `step` if it is complete on every rank, else None. Collective."""
        folder = self.checkpoints.of_step(step)
        checkpoint = next((saved for saved in self.checkpoints.newest_first() if saved.folder == folder), None)
        return None if largest(checkpoint is None) else checkpoint


def rng_state(rank: int) -> dict[str, Tensor]:
    """Return the states of torch's random generators on the CPU and the current GPU. Their names contain `rank`."""
    states = {f"rng/rank-{rank}/torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng/rank-{rank}/torch_cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng_state(states: Mapping[str, Tensor]) -> None:
    """Restore the states of the random generators from the result of `rng_state`."""
    for name, state in states.items():
        (torch if name.endswith("torch_cpu") else torch.cuda).set_rng_state(state)
