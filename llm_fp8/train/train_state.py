"""A run's state in a checkpoint: weights, optimizer, fp8 scales, random states, position in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from llm_fp8.config.options import EVALUATION_OPTIONS, SCALE_OPTIONS, TRAINING_OPTIONS, Config
from llm_fp8.data import PreparedData
from llm_fp8.distributed.fp8_params import master_of, requantise_
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.lora import scaling_of
from llm_fp8.models.source import has_random_weights, resolve_source
from llm_fp8.models.weights import weight_files, weights_digest
from llm_fp8.optim.state import initialize_state, load_optimizer_scalars, optimizer_scalars, optimizer_tensors
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.precision.torchao import refresh_scales_, unwrapped_shard
from llm_fp8.train.checkpoint import (
    STRATEGY_STATE,
    CheckpointManager,
    bytes_needed,
    check_compatible,
    load_checkpoint,
    read_meta,
    restore_rng_state,
    rng_state,
    saved_names,
)
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.setup import TrainingSetup
from llm_fp8.utils.errors import UserError

ARCHITECTURE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
)
"""Entries of a model's config that a checkpoint and the run that continues it must share."""

_BY_NAME = "parameter name"
"""In a fingerprint: tensors are saved by name, so that every mode but DeepSpeed's can read them."""


def run_fingerprint(
    config: Config, plan: PrecisionPlan, strategy: DistributedStrategy, optimizer_kind: str, hf_config: PretrainedConfig
) -> dict[str, Any]:
    """What a checkpoint must share with the run that continues it."""
    return {
        **{key: getattr(hf_config, key, None) for key in ARCHITECTURE_KEYS},
        "layout": "te" if config.model.use_te else "hf",
        "optimizer": optimizer_kind,
        "saved_by": strategy.mode if strategy.saves_itself else _BY_NAME,
        "precision": plan.name if plan.effective == "fp8" else plan.effective,
        "max_seq_length": config.data.max_seq_length,
        "packing": config.packing,
        **(_lora_fingerprint(config) if config.lora.lora_rank else {}),
    }


def _lora_fingerprint(config: Config) -> dict[str, Any]:
    """The adapters, and the frozen model that a checkpoint does not hold."""
    options = config.lora
    base, weights = Path(config.model.model_name).name, {}
    source = resolve_source(config.model)
    if has_random_weights(config.model, source):
        base += f" with random weights of seed {config.optim.seed}"
    elif source.is_local:
        weights["frozen_weights"] = weights_digest(weight_files(config.model, source))
    return weights | {
        "lora": {
            "rank": options.lora_rank,
            "scaling": scaling_of(options),
            "dropout": options.lora_dropout,
            "targets": sorted(options.targets),
        },
        "frozen_model": base,
    }


def find_checkpoint(
    checkpoints: CheckpointManager, resume_from: str | None, fingerprint: dict[str, Any]
) -> Path | None:
    """The checkpoint to resume from, None for a new run; `UserError` where it is another run's."""
    if resume_from is None:
        return None
    path = checkpoints.find(resume_from)
    saved = read_meta(path)["fingerprint"]
    _require_readable(path, saved, fingerprint)
    if "frozen_weights" not in saved.keys() & fingerprint.keys():  # of a hub id, or of an earlier version
        saved, fingerprint = ({k: v for k, v in one.items() if k != "frozen_weights"} for one in (saved, fingerprint))
    check_compatible(saved, fingerprint)
    return path


def run_options(config: Config, data: PreparedData, num_steps: int) -> dict[str, Any]:
    """What a checkpoint records of the run: the options (but not those of reports and saves), the `num_steps` of the
    whole run, and the rows of a step on all GPUs.
    """
    sections = config.to_dict()
    sections["run"] = {name: sections["run"][name] for name in EVALUATION_OPTIONS}
    options = {name: value for section in sections.values() for name, value in section.items()}
    return options | {
        "total_steps": num_steps,
        "global_batch_size": data.train.global_batch_size,
    }


def total_steps(config: Config, data: PreparedData, resume_path: Path | None) -> int:
    """Optimizer steps of the whole run. Steps behind a checkpoint may have had another global batch: --num_epochs
    counts from the rows that they took.
    """
    if config.optim.max_steps is not None:
        return config.optim.max_steps
    if resume_path is None:
        return data.train.steps_left(config.optim.num_epochs)
    meta = read_meta(resume_path)
    return int(meta["step"]) + data.train.steps_left(config.optim.num_epochs, meta["loader"])


def changed_options(path: Path, options: dict[str, Any], allowed: Sequence[str]) -> list[str]:
    """The options in which a run differs from that of the checkpoint it resumes from, each with both values.

    Raises `UserError` where one of `TRAINING_OPTIONS` differs and is not in `allowed`.
    """
    saved = read_meta(path).get("options", {})  # absent in checkpoints of earlier versions
    changed = {
        name: f"{name} {saved[name]} -> {value}"
        for name, value in options.items()
        if name in saved and saved[name] != value
    }
    if refused := [name for name in TRAINING_OPTIONS if name in changed and name not in allowed]:
        raise UserError(
            f"--resume_from: {path} was trained with other options: {', '.join(changed[name] for name in refused)}. "
            f"Resume with the former ones, or add --allow_changed {','.join(refused)}."
        )
    return list(changed.values())


def _require_readable(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise `UserError` between a DeepSpeed mode's checkpoint and any other mode, another DeepSpeed stage included."""
    was, now = saved.get("saved_by"), current["saved_by"]
    if was == now or was is None:
        return
    remedy = f"--sharding_mode {was}" if was != _BY_NAME else "--sharding_mode ddp or an fsdp mode"
    raise UserError(
        f"--resume_from: {path} was saved under {remedy}, and what a deepspeed mode saves no other mode can read, nor "
        f"the other way round; resume with {remedy}."
    )


_SCALES = "fp8."
"""Begins the names of delayed scaling's tensors."""


def other_scale_options(path: Path, options: Mapping[str, Any]) -> set[str]:
    """The options by which a run keeps scales or amax histories that the checkpoint lacks, or has others of."""
    saved = read_meta(path).get("options", {})  # absent in checkpoints of earlier versions
    return {name for name in SCALE_OPTIONS if name in saved and saved[name] != options[name]}


_LOOP_STATE = ("step", "tokens_seen", "evaluation_due", "evaluations")


@dataclass(frozen=True)
class RunState:
    """Saves and restores a run. `fingerprint` and `options`: of `run_fingerprint` and `run_options`."""

    setup: TrainingSetup
    data: PreparedData
    checkpoints: CheckpointManager
    fingerprint: dict[str, Any]
    options: dict[str, Any]

    def _tensors(self, optimizer: Any) -> dict[str, Tensor]:
        """Name -> live tensor, without the random states."""
        setup, tensors = self.setup, dict[str, Tensor]()
        if not setup.plan.strategy.saves_itself:
            trained = [
                (name, parameter) for name, parameter in setup.model.named_parameters() if parameter.requires_grad
            ]
            named = [(name, master_of(parameter)) for name, parameter in trained]
            tensors |= {f"model.{name}": unwrapped_shard(parameter).detach() for name, parameter in named}
            tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(optimizer, named).items()}
        tensors |= {f"{_SCALES}{name}": tensor for name, tensor in setup.precision.state_tensors().items()}
        return tensors

    def checkpoint_bytes(self, loop: TrainingLoop) -> int:
        """Room that a checkpoint needs on its disk, all ranks together."""
        return bytes_needed(self._tensors(loop.optimizer), self.setup.plan.strategy)

    def save(self, loop: TrainingLoop) -> Path:
        """Write a checkpoint after `loop.step`, with --async_save while training goes on; returns its folder."""
        plan = self.setup.plan
        scaler, saves_itself = plan.accelerator.scaler, plan.strategy.saves_itself
        meta = {
            "step": loop.step,
            "tokens_seen": loop.tokens_seen,
            "evaluation_due": loop.evaluation_due,
            "evaluations": loop.history.state_dict(),
            "fingerprint": self.fingerprint,
            "options": self.options,
            "loader": self.data.train.state_dict(),
            "optimizer": None if saves_itself else optimizer_scalars(loop.optimizer),
            "fp16_scaler": None if scaler is None else scaler.state_dict(),
        }
        tensors = self._tensors(loop.optimizer) | rng_state(plan.accelerator.process_index)
        best_step = loop.history.best_step
        if plan.config.parallel.async_save:
            return self.checkpoints.save_in_background(loop.step, tensors, meta, best_step)
        return self.checkpoints.save(loop.step, tensors, meta, plan.strategy if saves_itself else None, best_step)

    def restore(self, path: Path, optimizer: Any) -> dict[str, Any]:
        """Restore everything in place; returns the checkpoint's `step`, `tokens_seen`, `evaluation_due` and, for
        `EvalHistory`, `evaluations`, which checkpoints of earlier versions lack.
        """
        accelerator, strategy = self.setup.plan.accelerator, self.setup.plan.strategy
        if strategy.saves_itself:
            strategy.load_state(path / STRATEGY_STATE)
        else:
            initialize_state(optimizer)
        rank = accelerator.process_index
        rng = rng_state(rank)
        # Ranks that the checkpoint doesn't know keep their initial seeds.
        known = set(saved_names(path))
        rng = {name: tensor for name, tensor in rng.items() if name in known}
        tensors, other = self._tensors(optimizer) | rng, other_scale_options(path, self.options)
        if "fp8_format" in other:  # a scale holds the largest number of its format
            tensors = {n: t for n, t in tensors.items() if not (n.startswith(_SCALES) and n.endswith(".scale"))}
        meta = load_checkpoint(path, tensors, _SCALES if other else None)
        if not strategy.saves_itself:
            load_optimizer_scalars(optimizer, meta["optimizer"])
            requantise_(self.setup.model)
            refresh_scales_(self.setup.model)
        self.data.train.load_state_dict(meta["loader"])
        if accelerator.scaler is not None and meta["fp16_scaler"]:
            accelerator.scaler.load_state_dict(meta["fp16_scaler"])
        if rng:
            restore_rng_state(rng, rank)
        return {"evaluation_due": False} | {name: meta[name] for name in meta if name in _LOOP_STATE}
