"""A run's outputs: run.json, summary.json, final/ and the closing lines on the terminal."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from llm_fp8.data import PreparedData
from llm_fp8.models.build import count_parameters
from llm_fp8.models.export import export_adapter, export_hf, export_size_bytes
from llm_fp8.models.lora import scaling_of
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.observability.step_profile import StepProfile, describe_gpu_idle, gpu_idle
from llm_fp8.observability.step_stats import RESUMES
from llm_fp8.optim.schedule import effective_warmup_steps
from llm_fp8.optim.state import bytes_on_host
from llm_fp8.precision.certificate import Certificate
from llm_fp8.train.failures import MemoryUse, out_of_memory_advice
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.setup import RunPlan, TrainingSetup
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.phases import PhaseClock


@dataclass
class RunResults:
    """What a run finds out while it runs; everything else about it is frozen."""

    clock: PhaseClock
    idle_fp8_keys: list[str]
    """What the launcher's fp8_config asked for and nothing here acts on, in sentences."""
    started_s: float = field(default_factory=time.time)
    resident_gib: float = 0.0
    """GPU memory in use before the first step."""
    attention_backend: str | None = None
    """Of Transformer Engine; known after the first step."""
    recorded: StepProfile | None = None
    certificate: Certificate | None = None
    has_looked_for_gpu_idle: bool = False


@dataclass(frozen=True)
class Progress:
    """How far weights were trained."""

    step: int
    tokens_seen: int


def describe_dry_run(data: PreparedData, num_steps: int) -> str:
    """What --dry_run prints after the data's counts."""
    steps = f"{num_steps:,} steps of {data.train.global_batch_size:,} sequences"
    said = f"dry run: {steps}; no weight was loaded and no run written"
    return (
        said
        if data.train.steps_per_epoch is not None
        else f"the beginning of the stream: {data.report.summary()}\n{said}"
    )


def parallel_record(plan: RunPlan) -> dict[str, Any]:
    """The effective sharding mode and number of processes."""
    return {"sharding_mode": plan.strategy.mode, "num_processes": plan.accelerator.num_processes}


def _precision_record(setup: TrainingSetup, results: RunResults) -> dict[str, Any]:
    plan = setup.plan
    return {
        **plan.precision.to_dict(),
        "coverage": setup.coverage.to_dict(),
        "optimizer": plan.optimizer_kind,
        "parameter_dtype": str(plan.parameter_dtype),
        **({"idle_fp8_config_keys": results.idle_fp8_keys} if results.idle_fp8_keys else {}),
    }


def record_run(setup: TrainingSetup, data: PreparedData, loop: TrainingLoop, results: RunResults) -> None:
    """Write run.json and start the trackers with it.

    A run that is resumed in its folder keeps what its beginning wrote and adds an entry to `resumes`.
    """
    plan = setup.plan
    config, total_steps, on_host = plan.config, loop.options.total_steps, bytes_on_host(loop.optimizer)
    if not plan.accelerator.is_main_process:
        return
    record = {
        "config": config.to_dict(),
        "precision": _precision_record(setup, results),
        # Effective values of options with defaults; precision and optimizer have a section of their own.
        "effective": {
            "packing": config.packing,
            "attn_implementation": setup.attention,
            **parallel_record(plan),
            **({"optimizer_gib_on_host": on_host / GIB} if on_host else {}),
            "global_batch_size": data.train.global_batch_size,
            "tokens_per_step": data.train.global_batch_size * config.data.max_seq_length,
            "num_warmup_steps": effective_warmup_steps(config.optim.num_warmup_steps, total_steps),
            "total_steps": total_steps,
        },
        "resumed_after_step": loop.step,
        "model": {
            "location": plan.source.location,
            "dequantised_from": None if plan.stored_fp8 is None else plan.stored_fp8.describe(),
            "num_parameters": setup.num_parameters,
            "num_trainable_parameters": setup.num_trainable_parameters,
            "config": setup.model.config.to_dict(),
        },
        "data": data.report.to_dict(),
        "provenance": collect_provenance(sys.argv),
    }
    path = plan.folder / "run.json"
    if loop.step > 0 and path.exists():
        first = read_json(path, RESUMES)
        resume = {section: value for section, value in record.items() if section not in ("model", "data")}
        write_json_atomic(path, {**first, "resumes": [*first.get("resumes", []), resume]})
    else:
        write_json_atomic(path, record)
    loop.reporter.start_trackers(record)


def exports_adapter(setup: TrainingSetup) -> bool:
    """Whether final/ will hold an adapter; one for random weights would be useless."""
    options = setup.plan.config.lora
    return options.lora_rank > 0 and setup.weights_loaded


def exported_bytes(setup: TrainingSetup) -> int:
    """Size of final/; 0 where there will be none."""
    if not setup.plan.config.run.export:
        return 0
    return export_size_bytes(setup.model, setup.plan.export_dtype, adapters_only=exports_adapter(setup))


def export_final(
    setup: TrainingSetup, tokenizer: PreTrainedTokenizerBase, holds: Progress, certificate: Certificate | None
) -> Path:
    """Write final/: a Hugging Face checkpoint or a PEFT adapter, with tokenizer and model card, which says how far the
    weights that the model `holds` were trained. Collective.
    """
    plan = setup.plan
    config, folder = plan.config, plan.folder / "final"
    card = {
        "base model": plan.source.name,
        "dataset": config.data.dataset_name,
        "precision": plan.precision.name,
        "optimizer steps": holds.step,
        "tokens": holds.tokens_seen,
        "learning rate": config.optim.learning_rate,
        "row length": config.data.max_seq_length,
        "certificate": "none" if certificate is None else certificate.describe().removeprefix("certificate: "),
        "command": f"`{shlex.join(sys.argv)}`",
    }
    if rank := config.lora.lora_rank:
        card["LoRA"] = f"rank {rank}, scaling {scaling_of(config.lora):g}, {config.lora.lora_targets}"
    shared: dict[str, Any] = {
        "card": card,
        "full_tensor": plan.strategy.full_tensor,
        "is_main": plan.accelerator.is_main_process,
    }
    if exports_adapter(setup):
        # PEFT would look for a relative path from wherever it is started, and then for a hub id of that name.
        base_model = os.path.abspath(plan.source.location) if plan.source.is_local else plan.source.location
        export_adapter(setup.model, tokenizer, folder, options=config.lora, base_model=base_model, **shared)
    else:
        export_hf(setup.model, tokenizer, folder, dtype=plan.export_dtype, **shared)
    return folder


def summary_of(setup: TrainingSetup, loop: TrainingLoop, results: RunResults, exported: Path | None) -> dict[str, Any]:
    """The entries of summary.json that the reporter does not have."""
    plan, steps = setup.plan, loop.reporter.own_steps()
    return {
        "precision": _precision_record(setup, results),
        "recipe_inside_modules": setup.precision.recipe_inside_modules,
        "attention_backend": results.attention_backend,
        **parallel_record(plan),
        "recorded_step": None if results.recorded is None else results.recorded.to_dict(),
        "gpu_idle": None if results.recorded is None else gpu_idle(results.recorded, steps),
        "certificate": None if results.certificate is None else results.certificate.to_dict(),
        "tokens_seen": loop.tokens_seen,
        "num_parameters": setup.num_parameters,
        "num_trainable_parameters": setup.num_trainable_parameters,
        "no_energy_because": loop.energy.no_counter,
        "exported": None if exported is None else str(exported),
        "phases_s": {**results.clock.seconds, "first_step": loop.first_step_s},
        "wall_time_s": time.time() - results.started_s,
    }


def closing_words(setup: TrainingSetup, results: RunResults, summary: dict[str, Any], exported: Path | None) -> None:
    """Print the outcome and where the files are."""
    plan = setup.plan
    say, folder = plan.say, plan.folder
    say(f"done: {summary['steps']} steps in {summary['wall_time_s']:.0f} s, precision {plan.precision.name}")
    if "stopped_early" in summary:
        say(f"stopped early: {summary['stopped_early']}")
    if idle := describe_gpu_idle(summary["gpu_idle"], plan.accelerator.num_processes):
        say(idle)
    if results.certificate is not None:
        say(results.certificate.describe())
    elif plan.certifies:
        say("certificate: none, because this process trained no step that could be recorded")
    say(f"  figures of every step   {folder / 'metrics.jsonl'}")
    say(f"  configuration, versions {folder / 'run.json'}")
    say(f"  summary                 {folder / 'summary.json'}")
    if best := summary.get("best"):
        say(f"  best checkpoint         {best['checkpoint']} (eval loss {best['eval_loss']:.4g})")
    if exported is not None:
        say(f"  {'PEFT adapter           ' if exports_adapter(setup) else 'Hugging Face checkpoint'} {exported}")
        if best:
            say(f"  weights in final/       of step {summary['exported_step']}")
    elif (folder / "final").exists():
        say(f"  {folder / 'final'} is of an earlier end of this run: --no_export left it as it was")


def memory_advice(plan: RunPlan, results: RunResults) -> str:
    """The message for a GPU out of memory."""
    use = MemoryUse(
        total_gib=torch.cuda.get_device_properties(plan.device).total_memory / GIB,
        peak_gib=torch.cuda.max_memory_allocated(plan.device) / GIB,
        resident_gib=results.resident_gib,
    )
    num_parameters, strategy = count_parameters(plan.hf_config), plan.strategy
    return out_of_memory_advice(
        plan.config, plan.optimizer_kind, num_parameters, use, strategy.mode, strategy.num_shards
    )
