"""Check if a run can continue from a checkpoint, and compute its number of steps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_fp8.config.options import RESUME, SETTINGS, Config, names_in
from llm_fp8.data.prepare import PreparedData
from llm_fp8.models.build import is_multimodal
from llm_fp8.models.source import text_config, weights_digest
from llm_fp8.settle.plan import RunPlan
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json

LATEST = "latest"  # value of --resume_from for the checkpoint that was saved last
ARCHITECTURE_KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "sliding_window",
    "tie_word_embeddings", "layer_types", "no_rope_layers", "query_pre_attn_scalar", "residual_multiplier",
    "embedding_multiplier", "attention_multiplier", "logits_scaling",
)  # fmt: skip
"""Entries of a model's config that must be equal in a checkpoint and in the run that continues it."""


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint without its tensors."""

    folder: Path
    meta: dict[str, Any]  # contents of meta.json

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return int(self.meta["step"])


def run_fingerprint(plan: RunPlan) -> dict[str, Any]:
    """Return the values that must be equal in a checkpoint and in the run that continues it."""
    config, lora, precision, stored = plan.config, plan.config.lora, plan.precision, plan.stored
    decoder = text_config(plan.hf_config)
    entries = decoder.to_dict()  # since attributes that differ between layers raise an error
    shared = {
        **{key: entries.get(decoder.attribute_map.get(key, key)) for key in ARCHITECTURE_KEYS},
        "layout": "te" if config.model.use_te else "hf",
        "optimizer": plan.optimizer_kind,
        "saved by": plan.strategy.saved_by,
        "precision": precision.name if precision.effective == "fp8" else precision.effective,
        "max_seq_length": config.data.max_seq_length,
        "packing": config.packing,
    }
    if rank := lora.lora_rank:
        shared["lora"] = [rank, lora.scaling, lora.lora_dropout, *sorted(lora.targets)]
    if rank or is_multimodal(plan.hf_config):  # a frozen model or tower is not in the checkpoint
        shared["weights of --model_name"] = weights_digest(stored.files) if stored else f"seed {config.optim.seed}"
    return shared


def run_options(config: Config, data: PreparedData, num_steps: int) -> dict[str, Any]:
    """Return total_steps, global_batch_size and all options except those of reports and saves, for a checkpoint."""
    options = {name: value for name, value in config.options.items() if name in RESUME or name not in vars(config.run)}
    return options | {"total_steps": num_steps, "global_batch_size": data.train.global_batch_size}


def total_steps(config: Config, data: PreparedData, resumed: SavedRun | None) -> int:
    """Return the number of optimizer steps of the whole run, including those before a resume."""
    if config.optim.max_steps is not None:
        return config.optim.max_steps
    step, loader = (0, None) if resumed is None else (resumed.step, resumed.meta["loader"])
    return step + data.train.steps_left(config.optim.num_epochs, loader)


def check_compatible(saved_run: SavedRun, fingerprint: Mapping[str, Any]) -> None:
    """Raise `UserError` if the checkpoint's fingerprint differs from `fingerprint`, that of the run to start now."""
    saved = saved_run.meta["fingerprint"]
    current = json.loads(json.dumps(fingerprint))  # converts tuples to lists, as in the file
    if names := [name for name in {**saved, **current} if saved.get(name) != current.get(name)]:
        differences = "; ".join(f"{name} was {saved.get(name)!r} and is {current.get(name)!r}" for name in names)
        raise UserError(f"--resume_from {saved_run.folder} does not belong to this run: {differences}.")


def changed_options(config: Config, saved_run: SavedRun, options: Mapping[str, Any]) -> list[str]:
    """Describe each entry of `options` (see `run_options`) that differs from the checkpoint's, with both values.

    Raise `UserError` if a setting in `SETTINGS` differs, and neither it nor its option is in --allow_changed.
    """
    allowed = [SETTINGS.get(name, name) for name in names_in(config.run.allow_changed)]
    saved = saved_run.meta["options"]
    names = [name for name, value in options.items() if name in saved and saved[name] != value]
    changed = {name: f"{name} {saved[name]} -> {options[name]}" for name in names}
    if refused := [name for name in dict.fromkeys(SETTINGS.values()) if name in changed and name not in allowed]:
        deciding = ([option for option in changed if SETTINGS.get(option) == name] or [name] for name in refused)
        problem = f"was trained with other options ({', '.join(changed[name] for name in refused)})"
        advice = f"add --allow_changed {','.join(itertools.chain(*deciding))}"
        raise UserError(f"--resume_from {saved_run.folder} {problem}; {advice}.")
    return list(changed.values())


def refuse_finished(
    config: Config, folder: Path | None, resume_from: str | None, resumed: SavedRun, num_steps: int
) -> None:
    """Raise `UserError` if no steps are left, or if --resume_from latest would repeat steps of a finished run."""
    step, patience = resumed.step, config.run.early_stopping_patience
    path = None if folder is None else folder / "summary.json"
    summary = read_json(path) if path is not None and path.exists() else {}
    finished_step = -1 if {"stopped_by", "failed"} & summary.keys() else summary.get("steps", -1)
    has_stopped = finished_step >= 0 and 0 < patience <= resumed.meta["evaluations"]["num_without_improvement"]
    if step < finished_step and resume_from == LATEST:
        problem = f"the run is finished after step {finished_step}, and its last checkpoint is of step {step}"
        advice = f"to train from there again and replace final/, give --resume_from {resumed.folder}"
        raise UserError(f"--resume_from latest: {problem}; {advice}.")
    is_exported = not config.run.export or path is None or (path.parent / "final").exists()
    if has_stopped or step > num_steps or (step == num_steps <= finished_step and is_exported):
        option = "num_epochs" if config.optim.max_steps is None else "max_steps"
        limit = "early_stopping_patience" if has_stopped else f"{option} and add --allow_changed {option}"
        progress = f"{step} of {num_steps} steps are done and the run is finished"
        raise UserError(f"--resume_from {resumed.folder}: {progress}; raise --{limit}.")
