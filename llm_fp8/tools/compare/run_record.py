"""One finished training run as plain values, read from its output folder or from W&B's server."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from llm_fp8.observability.metrics import RECORDED_STEP
from llm_fp8.observability.step_stats import measured_steps
from llm_fp8.precision.plan import precision_name
from llm_fp8.tools.compare.variants import requested_variant
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json, read_jsonl, read_metrics, require_entries, with_floats

_RUN = ("config.optim.seed", "config.data.max_seq_length", "precision.requested", "precision.effective")
"""What the configuration of a run of this project has."""


@dataclass(frozen=True)
class RunRecord:
    """One finished run. Sections that its source does not keep are empty."""

    source: str
    """Folder or W&B path, for messages and provenance."""
    config: dict[str, dict[str, Any]]
    """Sections of options, as in run.json."""
    precision: dict[str, Any]
    """Precision asked for and in effect, as in run.json."""
    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    effective: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, bool] = field(default_factory=dict)
    """Problem -> whether the run's last evaluation answered it right."""
    certificate: dict[str, Any] | None = None
    resumes: list[dict[str, Any]] = field(default_factory=list)
    """run.json's entry of each further process: `resumed_after_step` and the sections that may differ."""

    @property
    def variant(self) -> str:
        return requested_variant(self.precision)

    @property
    def effective_name(self) -> str:
        """What ran, as 'bf16' or 'fp8 delayed'."""
        return precision_name(self.precision["effective"], self.precision.get("effective_scenario"))

    @property
    def seed(self) -> int:
        return int(self.config["optim"]["seed"])

    @cached_property
    def _processes(self) -> list[list[dict[str, float]]]:
        """The steps of each process: a resumed run compiles and warms up again."""
        starts = sorted({-1, *(resume["resumed_after_step"] for resume in self.resumes)})
        parts = [
            [step for step in self.steps if after < step["step"] <= end]
            for after, end in zip(starts, [*starts[1:], math.inf], strict=True)
        ]
        return [part for part in parts if part]

    @cached_property
    def measured_steps(self) -> list[dict[str, float]]:
        """The steps that speed is measured on, of each process (`step_stats.measured_steps`)."""
        return [step for part in self._processes for step in measured_steps(part)]

    @property
    def step_rates(self) -> list[float]:
        """tokens/s of each measured step (all positions, all GPUs)."""
        return [step["tokens_per_s"] for step in self.measured_steps if "tokens_per_s" in step]

    @cached_property
    def wall_times_s(self) -> list[float]:
        """Seconds of training until the end of each step, without evaluations, checkpoints and start-up. A process's
        first step, which compiles, and the profiled step count as the median of the measured steps.
        """
        typical = [step["step_time_s"] for step in self.measured_steps or self.steps if "step_time_s" in step]
        median = statistics.median(typical) if typical else math.nan
        first = {part[0]["step"] for part in self._processes}
        times = [
            median if step["step"] in first or RECORDED_STEP in step else step.get("step_time_s", math.nan)
            for step in self.steps
        ]
        return list(itertools.accumulate(times))

    @property
    def final_eval_loss(self) -> float | None:
        """Eval loss after the last step; None without an evaluation there."""
        last = self.steps[-1]["step"] if self.steps else None
        found = [record["eval_loss"] for record in self.evaluations if record["step"] == last]
        return found[-1] if found else None

    @property
    def exact_match(self) -> float | None:
        """Share of the held-out problems that the last evaluation answered right; None where it was not asked."""
        if self.answers:
            return sum(self.answers.values()) / len(self.answers)
        return self.evaluations[-1].get("eval_exact_match") if self.evaluations else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Peak memory of tensors on any GPU; None on a CPU. An evaluation of exact match holds a copy of the model,
        which stays in the peak: only the steps up to the first one count.
        """
        asked = self.config.get("run", {}).get("eval_exact_match")
        copies = asked or any("eval_exact_match" in evaluation for evaluation in self.evaluations)
        last = min((evaluation["step"] for evaluation in self.evaluations if copies), default=math.inf)
        keys = ("peak_memory_gib", "peak_memory_gib_max_rank")
        values = [step[key] for step in self.steps if step["step"] <= last for key in keys if key in step]
        return max(values, default=None)

    @property
    def token_trace(self) -> list[float]:
        """Tokens seen after each step, empty where one lacks it: runs that read the same sequences in the same order
        have the same trace.
        """
        trace = [step["tokens_seen"] for step in self.steps if "tokens_seen" in step]
        return trace if len(trace) == len(self.steps) else []


def split_records(records: list[dict[str, Any]]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Records of metrics.jsonl or of a W&B history -> those of optimizer steps, those of evaluations, each in order.
    W&B merges an evaluation into the record of its step; the keys separate them.
    """
    steps, evaluations = [], []
    for record in records:
        entries = with_floats(record).items()  # "NaN" and "Infinity" become floats again
        plain = {k: v for k, v in entries if isinstance(v, (int, float)) and not isinstance(v, bool)}
        if "step" not in plain:
            continue
        evaluation = {key: value for key, value in plain.items() if key.startswith("eval_")}
        step = {key: value for key, value in plain.items() if not key.startswith("eval_")}
        if "loss" in step:
            steps.append(step)
        if "eval_loss" in evaluation:
            evaluations.append({"step": plain["step"], **evaluation})
    return steps, evaluations


def why_unfinished(summary: dict[str, Any]) -> str | None:
    """Why a run with this summary.json did not finish, as a sentence; None where it did."""
    if "stopped_by" in summary:
        return (
            f"the run was stopped by {summary['stopped_by']} after step {summary.get('steps')}; finish it with "
            "--resume_from latest."
        )
    if "failed" in summary:
        return f"the run failed after step {summary.get('steps')}: {summary['failed']}"
    return None


def _record(
    where: str, source: str, run: dict[str, Any], records: list[dict[str, Any]], summary: dict[str, Any], **more: Any
) -> RunRecord:
    """The record of a run from what run.json, metrics.jsonl and summary.json hold. Raises `UserError`, beginning with
    `where`, unless they are of a finished run of this project.
    """
    if reason := why_unfinished(summary):  # W&B calls a run finished that a signal stopped
        raise UserError(f"{where}: {reason}")
    require_entries(f"{where}: its configuration", run, _RUN)
    steps, evaluations = split_records(records)
    if not steps:
        raise UserError(f"{where} holds no optimizer step (metrics.jsonl).")
    model = run.get("model") or {}
    return RunRecord(
        source=source,
        config=run["config"],
        precision=run["precision"],
        steps=steps,
        evaluations=evaluations,
        effective=run.get("effective") or {},
        data=run.get("data") or {},
        model={key: model[key] for key in ("location", "num_parameters") if key in model},
        provenance=run.get("provenance") or {},
        **more,
    )


def read_run_folder(folder: Path, flag: str = "--runs") -> RunRecord:
    """A finished run's record. Raises `UserError` where `folder` holds none, or one that did not finish."""
    where = f"{flag} {folder}"
    if not folder.is_dir():
        raise UserError(f"{where}: no such folder; give the --output_dir of a finished run.")
    for name in ("run.json", "metrics.jsonl", "summary.json"):
        if not (folder / name).is_file():
            hint = "the run did not finish" if name == "summary.json" else "it is not a run's --output_dir"
            raise UserError(f"{where}: there is no {name} in it, so {hint}; give the folder of a finished run.")
    run, summary = read_json(folder / "run.json", _RUN), read_json(folder / "summary.json")
    certificate = folder / "certificate.json"
    record = _record(
        where,
        str(folder),
        run,
        read_metrics(folder / "metrics.jsonl"),
        summary,
        answers=_last_answers(folder / "eval_answers"),
        certificate=read_json(certificate) if certificate.is_file() else summary.get("certificate"),
        resumes=run.get("resumes") or [],
    )
    last = record.steps[-1]["step"]
    if last != summary.get("steps"):
        raise UserError(
            f"{where}: metrics.jsonl ends at step {last:.0f} and summary.json at step {summary.get('steps')}, so they "
            "are not of one finished run; train it anew."
        )
    return record


def _last_answers(folder: Path) -> dict[str, bool]:
    """Problem -> right or wrong, of the last evaluation in `folder`; empty without one."""
    files = [path for path in folder.glob("step-*.jsonl") if re.fullmatch(r"step-\d+\.jsonl", path.name)]
    last = max(files, key=lambda path: int(path.stem.removeprefix("step-")), default=None)
    answers = read_jsonl(last) if last else []
    for number, answer in enumerate(answers, start=1):
        require_entries(f"{last}: line {number}", answer, ("row_id", "problem", "correct"))
    return {f"{answer['row_id']}: {answer['problem']}": bool(answer["correct"]) for answer in answers}


def read_wandb(path: str, api: Any = None) -> RunRecord:
    """The record of a finished run on W&B's server, named ENTITY/PROJECT/RUNID, without answers: they stay in the run's
    folder. `api`: a `wandb.Api`, by default one with this machine's login. Raises `UserError` where there is none.
    """
    where = f"--wandb {path}"
    if not re.fullmatch(r"[^/\s]+/[^/\s]+/[^/\s]+", path) or Path(path).exists():
        raise UserError(
            f"{where} is not ENTITY/PROJECT/RUNID; a run on this machine, an offline one too, is read from its "
            "--output_dir with --runs."
        )
    import wandb

    try:
        run = (api or wandb.Api()).run(path)
        state, config, summary, history = run.state, dict(run.config), dict(run.summary), list(run.scan_history())
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise UserError(f"{where}: W&B did not give the run ({error}); check the path and 'wandb login'.") from error
    if state != "finished":
        raise UserError(f"{where}: the W&B run is {state}; give a run that finished.")
    effective = dict(config.get("effective") or {})
    stored = {section: effective.pop(section, {}) for section in ("precision", "model", "data")}
    sections = ("model", "precision", "data", "optim", "run", "lora", "parallel")
    stored["config"] = {name: config[name] for name in sections if name in config}
    stored |= {"effective": effective, "provenance": config.get("provenance", {})}
    return _record(where, path, stored, _merged_by_step(history), summary, certificate=certificate_from_flat(summary))


def certificate_from_flat(summary: dict[str, Any]) -> dict[str, Any] | None:
    """The certificate in a W&B summary, from its keys 'certificate/...'; None without one."""
    found = {
        key.removeprefix("certificate/"): value for key, value in summary.items() if key.startswith("certificate/")
    }
    if isinstance(found.get("reasons"), str):  # a list becomes its text on the way to W&B
        found["reasons"] = [] if found["reasons"] == "[]" else [found["reasons"]]
    return found or None


def _merged_by_step(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """History records joined by step: an evaluation may have one of its own."""
    by_step: dict[Any, dict[str, Any]] = {}
    for row in history:
        if row.get("step") is not None:
            present = {key: value for key, value in row.items() if value is not None and not key.startswith("_")}
            by_step.setdefault(row["step"], {}).update(present)
    return [by_step[step] for step in sorted(by_step)]
