"""A run's state in a checkpoint: weights, optimizer, fp8 scales, random states, position in the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_fp8.config.options import EVALUATION_OPTIONS, SCALE_OPTIONS, Config
from llm_fp8.data import PreparedData
from llm_fp8.distributed.fp8_params import master_of
from llm_fp8.models.source import has_random_weights, text_config
from llm_fp8.optim.optimizers import optimizer_scalars, optimizer_tensors
from llm_fp8.precision.torchao import unwrapped_shard
from llm_fp8.train.checkpoint import RNG_PREFIX, Checkpoint, CheckpointManager
from llm_fp8.train.evaluation import EvalHistory
from llm_fp8.train.plan import RunPlan
from llm_fp8.train.setup import TrainingSetup

ARCHITECTURE_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "sliding_window",
    "tie_word_embeddings",
)  # fmt: skip
"""Entries of a model's config that a checkpoint and the run that continues it must share."""

SCALES = "fp8."  # begins the names of delayed scaling's tensors


def run_fingerprint(plan: RunPlan) -> dict[str, Any]:
    """What a checkpoint must share with the run that continues it."""
    config, precision, strategy = plan.config, plan.precision, plan.strategy
    decoder = text_config(plan.hf_config)
    entries = decoder.to_dict()  # an attribute that differs between layers cannot be read
    return {
        **{key: entries.get(decoder.attribute_map.get(key, key)) for key in ARCHITECTURE_KEYS},
        "layout": "te" if config.model.use_te else "hf",
        "optimizer": plan.optimizer_kind,
        # Every mode but DeepSpeed's saves tensors by their names, which all others can read.
        "saved by": f"--sharding_mode {strategy.mode}" if strategy.saves_itself else "any mode but DeepSpeed's",
        "precision": precision.name if precision.effective == "fp8" else precision.effective,
        "max_seq_length": config.data.max_seq_length,
        "packing": config.packing,
        **(_lora_fingerprint(plan) if config.lora.lora_rank else {}),
    }


def _lora_fingerprint(plan: RunPlan) -> dict[str, Any]:
    """The adapters, and the frozen model that a checkpoint does not hold."""
    from llm_fp8.models.lora import scaling_of
    from llm_fp8.models.weights import weight_files, weights_digest

    config, options = plan.config, plan.config.lora
    is_random, seed = has_random_weights(config.model, plan.source), config.optim.seed
    return {
        "lora": [options.lora_rank, scaling_of(options), options.lora_dropout, *sorted(options.targets)],
        "frozen_model": f"seed {seed}" if is_random else weights_digest(weight_files(config.model, plan.source)),
    }


def run_options(config: Config, data: PreparedData, num_steps: int) -> dict[str, Any]:
    """What a checkpoint records: the options but those of reports and saves, the whole run's steps, a step's rows."""
    sections = config.to_dict()
    sections["run"] = {name: sections["run"][name] for name in EVALUATION_OPTIONS}
    options = {name: value for section in sections.values() for name, value in section.items()}
    return options | {"total_steps": num_steps, "global_batch_size": data.train.global_batch_size}


def total_steps(config: Config, data: PreparedData, resumed: Checkpoint | None) -> int:
    """Optimizer steps of the whole run; --num_epochs counts from the rows that earlier steps took."""
    if config.optim.max_steps is not None:
        return config.optim.max_steps
    if resumed is None:
        return data.train.steps_left(config.optim.num_epochs)
    return resumed.step + data.train.steps_left(config.optim.num_epochs, resumed.meta["loader"])


@dataclass(frozen=True)
class RunState:
    """Saves and restores a run."""

    setup: TrainingSetup
    data: PreparedData
    checkpoints: CheckpointManager
    fingerprint: dict[str, Any]
    options: dict[str, Any]  # from `run_options`

    def tensors(self, optimizer: Any) -> dict[str, Tensor]:
        """Name -> live tensor, without the random states."""
        setup, tensors = self.setup, dict[str, Tensor]()
        if not setup.plan.strategy.saves_itself:
            trained = [(name, p) for name, p in setup.model.named_parameters() if p.requires_grad]
            if setup.plan.config.parallel.fp8_params:
                trained = [(name, master_of(parameter)) for name, parameter in trained]
            values = dict[str, Tensor](trained)
            if setup.plan.precision.backend == "torchao":
                values = {name: unwrapped_shard(parameter) for name, parameter in trained}
            tensors |= {f"model.{name}": value.detach() for name, value in values.items()}
            tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(optimizer, trained).items()}
        tensors |= {f"{SCALES}{name}": tensor for name, tensor in setup.precision.state_tensors().items()}
        return tensors

    def has_the_scales(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint's scales and amax histories are those that a run with these options keeps."""
        saved = checkpoint.meta["options"]
        return all(saved.get(name) == self.options.get(name) for name in SCALE_OPTIONS)

    def save(self, step: int, optimizer: Any, history: EvalHistory, *, tokens_seen: int, evaluation_due: bool) -> Path:
        """Write a checkpoint after `step`, with --async_save while training goes on; returns its folder."""
        plan = self.setup.plan
        scaler, saves_itself = plan.accelerator.scaler, plan.strategy.saves_itself
        meta = {
            "tokens_seen": tokens_seen,
            "evaluation_due": evaluation_due,
            "evaluations": history.state_dict(),
            "fingerprint": self.fingerprint,
            "options": self.options,
            "loader": self.data.train.state_dict(),
            "optimizer": None if saves_itself else optimizer_scalars(optimizer),
            "fp16_scaler": None if scaler is None else scaler.state_dict(),
        }
        return self.checkpoints.save(
            step,
            self.tensors(optimizer) | rng_state(plan.accelerator.process_index),
            meta,
            plan.strategy if saves_itself else None,
            history.best_step,
            in_background=plan.config.parallel.async_save,
        )


def rng_state(rank: int) -> dict[str, Tensor]:
    """The states of torch's random generators of the CPU and of the current GPU; names carry the rank."""
    states = {f"{RNG_PREFIX}rank-{rank}/torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RNG_PREFIX}rank-{rank}/torch_cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng_state(states: Mapping[str, Tensor]) -> None:
    """Put the random generators into the states that `rng_state` gave."""
    for name, state in states.items():
        if name.endswith("torch_cpu"):
            torch.set_rng_state(state)
        elif torch.cuda.is_available():
            torch.cuda.set_rng_state(state)
