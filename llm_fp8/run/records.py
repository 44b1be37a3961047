"""Write the outputs of a run: run.json, summary.json, final/ and the first and last lines on the terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from llm_fp8.config.recipes import precision_name
from llm_fp8.data.prepare import PreparedData
from llm_fp8.models.export import export_adapter, export_hf, export_size_bytes
from llm_fp8.models.side_files import Origin, save_side_files
from llm_fp8.observability.kernel_trace import describe_gpu_idle
from llm_fp8.observability.metrics import GIB, describe_full_gpu
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.optim.optimizers import bytes_on_host, effective_warmup_steps
from llm_fp8.run.setup import TrainingSetup
from llm_fp8.run.timeline import Timeline
from llm_fp8.settle.plan import RunPlan
from llm_fp8.utils.errors import UserError, nearest_existing, reading
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.torch_internals import recompilation_reasons

MOST_RECOMPILATIONS = 12  # more are reported; evaluation, or batches of another size, cost one for each kind of layer


def announce(plan: RunPlan) -> None:
    """Print the decisions for the run: the notes of `plan`, the precision and the optimizer."""
    precision, say = plan.precision, plan.say
    say("\n".join(plan.notes))
    say(f"precision: {precision.name} (requested: {precision_name(precision.requested, precision.requested_scenario)})")
    if precision.backend is not None and not plan.config.model.use_te:
        library = "torchao" if precision.backend == "torchao" else "Transformer Engine's modules"
        reason = f", since {precision.backend_reason}" if precision.backend_reason else ""
        say(f"fp8 by {library}{', EMULATED on the CPU in higher precision' if precision.emulated else reason}")
    if plan.machine.gpu is not None and not plan.config.model.use_te:
        eager = plan.eager_reason and (plan.machine.no_compiler or plan.eager_reason)
        warning = "WARNING: " if eager and eager == plan.machine.no_compiler else ""
        say(f"{warning}decoder layers: {f'eager, since {eager}' if eager else 'compiled'}")
    trained, frozen = (str(dtype).removeprefix("torch.") for dtype in (plan.parameter_dtype, plan.weight_dtype))
    rank = plan.config.lora.lora_rank
    adapters = f"adapters of rank {rank} in {trained}, frozen model in {frozen}"
    say(f"optimizer: {plan.optimizer_kind}, {adapters if rank else f'parameters in {trained}'}")


def _precision_record(setup: TrainingSetup) -> dict[str, Any]:
    plan = setup.plan
    return {
        **plan.precision.to_dict(),
        "coverage": setup.coverage.to_dict(),
        "optimizer": plan.optimizer_kind,
        "parameter_dtype": str(plan.parameter_dtype),
    }


def record_run(timeline: Timeline) -> None:
    """Write run.json, or append to its `resumes` if the run is resumed. Start the trackers with the file's content."""
    setup, plan, config = timeline.setup, timeline.setup.plan, timeline.setup.plan.config
    if not plan.accelerator.is_main_process:
        return
    on_host = bytes_on_host(timeline.stepper.optimizer)
    record: dict[str, Any] = {
        "config": config.to_dict(),
        "precision": _precision_record(setup),
        "effective": {
            "packing": config.packing,
            "attn_implementation": setup.attention,
            **plan.parallel_record,
            "eager_reason": plan.eager_reason,
            **({"optimizer_gib_on_host": on_host / GIB} if on_host else {}),
            "global_batch_size": timeline.loader.global_batch_size,
            "num_requested_micro_batches": plan.num_requested_micro_batches,
            "tokens_per_step": timeline.loader.global_batch_size * config.data.max_seq_length,
            "num_warmup_steps": effective_warmup_steps(config.optim.num_warmup_steps, timeline.total_steps),
            "total_steps": timeline.total_steps,
        },
        "resumed_after_step": timeline.step,
        "model": {
            "location": plan.source.location,
            "dequantised_from": fp8.describe() if plan.stored and (fp8 := plan.stored.fp8) else None,
            "num_parameters": setup.num_parameters,
            "num_trainable_parameters": setup.num_trainable_parameters,
            "config": setup.model.module.config.to_dict(),
        },
        "data": dict(vars(timeline.state.data.report)),
        "provenance": collect_provenance(sys.argv),
    }
    path, written = timeline.state.folder / "run.json", record
    if timeline.step > 0 and path.exists():
        written = read_json(path)
        resume = {section: value for section, value in record.items() if section not in ("model", "data")}
        written["resumes"] = [*written.get("resumes", []), resume]
    write_json_atomic(path, written)
    timeline.reporter.start_trackers(record)


def record_stream(timeline: Timeline) -> None:
    """If the run reads a stream, print the counts of its rows and add them to this process's entry in run.json."""
    report, plan = timeline.state.data.report, timeline.setup.plan
    if timeline.loader.steps_per_epoch is None and plan.accelerator.is_main_process:
        plan.say("\n".join(["data read from the stream:", *report.describe()]))
        record = read_json(path := timeline.state.folder / "run.json")
        [record, *record.get("resumes", ())][-1]["data"] = dict(vars(report))
        write_json_atomic(path, record)


def check_export(setup: TrainingSetup, folder: Path, data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` if final/ will not fit on the disk, or if its config or tokenizer files cannot be written."""
    plan = setup.plan
    if not (plan.config.run.export and plan.accelerator.is_main_process):
        return
    needed_bytes = export_size_bytes(setup.model, plan.export_dtype, adapters_only=setup.exports_adapter)
    free_bytes = shutil.disk_usage(nearest_existing(folder)).free
    if free_bytes < needed_bytes:
        problem = f"final/ needs {needed_bytes / GIB:.3g} GiB, and {free_bytes / GIB:.3g} GiB are free"
        raise UserError(f"--output_dir {folder}: {problem}; choose another folder or add --no_export.")
    advice = "Correct its files, or train with --no_export."
    with reading("--model_name", plan.source.name, "what an export writes", advice), TemporaryDirectory() as trial:
        origin = Origin(plan.source.location, data.eos_ids)
        save_side_files(setup.model.module, tokenizer, Path(trial), plan.export_dtype, origin)


def export_final(timeline: Timeline, tokenizer: PreTrainedTokenizerBase, step: int, tokens_seen: int) -> Path:
    """Write the folder final/ with a Hugging Face checkpoint or PEFT adapter of `step`, and return it. Collective."""
    setup, certificate = timeline.setup, timeline.results.certificate
    plan, config, folder = setup.plan, setup.plan.config, timeline.state.folder / "final"
    card = {
        "base model": plan.source.name,
        "dataset": config.data.dataset_name,
        "precision": plan.precision.name,
        "optimizer steps": step,
        "tokens": tokens_seen,
        "learning rate": config.optim.learning_rate,
        "row length": config.data.max_seq_length,
        "certificate": "none" if certificate is None else certificate.describe().removeprefix("certificate: "),
        "command": f"`{shlex.join(sys.argv)}`",
    }
    if rank := config.lora.lora_rank:
        card["LoRA"] = f"rank {rank}, scaling {config.lora.scaling:g}, {config.lora.lora_targets}"
    origin = Origin(plan.source.location, timeline.state.data.eos_ids)
    shared: dict[str, Any] = {"card": card, "is_main": plan.accelerator.is_main_process, "origin": origin}
    if setup.exports_adapter:
        # PEFT would resolve a relative path in the current folder of the process that loads the adapter.
        location = plan.source.location
        base_model = os.path.abspath(location) if os.path.isdir(location) else location
        export_adapter(setup.model, tokenizer, folder, options=config.lora, base_model=base_model, **shared)
    else:
        export_hf(setup.model, tokenizer, folder, dtype=plan.export_dtype, **shared)
    return folder


def summary_of(timeline: Timeline, exported: Path | None) -> dict[str, Any]:
    """Return the entries of summary.json that the reporter does not add. `exported` is the folder of the export."""
    setup, results, history = timeline.setup, timeline.results, timeline.history
    recorded, certificate = results.recorded, results.certificate
    summary = {
        "precision": _precision_record(setup),
        "attention_backend": results.attention_backend,
        **setup.plan.parallel_record,
        "recorded_step": None if recorded is None else recorded.to_dict(),
        "compile": _compile_record(setup.plan),
        "gpu_idle": None if recorded is None else recorded.gpu_idle(timeline.reporter.steps_of_process()),
        **timeline.stepper.summary(),
        "certificate": None if certificate is None else certificate.to_dict(),
        "tokens_seen": timeline.tokens_seen,
        "num_parameters": setup.num_parameters,
        "num_trainable_parameters": setup.num_trainable_parameters,
        "exported": None if exported is None else str(exported),
        "phases_s": results.clock.seconds,
        "wall_time_s": time.time() - results.started_s,
    }
    if history.kept_step is not None:
        checkpoint = str(timeline.state.checkpoints.of_step(history.kept_step))
        summary["best"] = {"step": history.kept_step, "eval_loss": history.best_loss, "checkpoint": checkpoint}
    if timeline.step < timeline.total_steps and history.stops_early:
        evaluations = f"{history.num_without_improvement} evaluations in a row"
        summary["stopped_early"] = f"{evaluations} did not improve on {history.best_loss:.4f}"
    return summary


def _compile_record(plan: RunPlan) -> dict[str, Any]:
    reasons = list[str]()
    with contextlib.suppress(AttributeError):  # another torch may rename what counts recompilations
        reasons = recompilation_reasons() if plan.eager_reason is None else []
    last_reason = reasons[-1] if reasons else None
    return {"eager_reason": plan.eager_reason, "num_recompilations": len(reasons), "last_reason": last_reason}


def closing_words(timeline: Timeline, exported: Path | None) -> None:
    """Print the results and the paths of the files."""
    plan, summary, folder = timeline.setup.plan, timeline.results.summary, timeline.state.folder
    say = plan.say
    num_steps, steps = summary["steps"], timeline.reporter.steps_of_process()
    count = f"{len(steps)} steps" if len(steps) == num_steps else f"{len(steps)} steps ({num_steps} with earlier ones)"
    say(f"done: {count} in {summary['wall_time_s']:.0f} s, precision {plan.precision.name}")
    if "stopped_early" in summary:
        say(f"stopped early: {summary['stopped_early']}")
    if certificate := timeline.results.certificate:
        say(describe_gpu_idle(summary["gpu_idle"], plan.strategy.mode))
        say(certificate.describe())
    elif plan.certifies:
        say("certificate: none, because this process trained no step that could be recorded")
    if (count := summary["compile"]["num_recompilations"]) > MOST_RECOMPILATIONS:
        reason = summary["compile"]["last_reason"]
        say(f"decoder layers were compiled again {count} times, which takes time (the last time: {reason})")
    say(describe_full_gpu(steps))
    say(f"  {folder}: metrics.jsonl (figures of every step), run.json (configuration, versions), summary.json")
    if best := summary.get("best"):
        say(f"  best checkpoint {best['checkpoint']} (eval loss {best['eval_loss']:.4g})")
    if exported is not None:
        kind = "PEFT adapter" if timeline.setup.exports_adapter else "Hugging Face checkpoint"
        say(f"  {kind} {exported} (weights of step {summary['exported_step']})")
