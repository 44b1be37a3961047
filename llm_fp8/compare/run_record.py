"""One finished training run as plain values, and how it is read from its folder."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from llm_fp8.answers import ANSWERS_FOLDER
from llm_fp8.compare.arms import effective_precision, requested_arm
from llm_fp8.errors import UserError
from llm_fp8.json_files import read_json, read_jsonl, with_floats
from llm_fp8.medians import measured_steps
from llm_fp8.metrics import RECORDED_STEP

CERTIFICATE_FILE = "certificate.json"


@dataclass(frozen=True)
class RunRecord:
    """What a run left behind. Sections that its source does not keep are empty."""

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
    summary: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, bool] = field(default_factory=dict)
    """Problem -> whether the run's last evaluation answered it right."""
    certificate: dict[str, Any] | None = None
    resumes: list[dict[str, Any]] = field(default_factory=list)
    """What run.json holds of each further process of the run: `resumed_after_step`, and the sections in which it may differ."""

    @property
    def arm(self) -> str:
        """The arm that was asked for."""
        return requested_arm(self.precision)

    @property
    def effective_name(self) -> str:
        """What ran, as 'bf16' or 'fp8 delayed'."""
        return effective_precision(self.precision)

    @property
    def seed(self) -> int:
        """--seed."""
        return int(self.config["optim"]["seed"])

    @cached_property
    def _processes(self) -> list[list[dict[str, float]]]:
        """The steps, process by process: a run that was resumed compiles and warms up anew."""
        starts = sorted({-1, *(resume["resumed_after_step"] for resume in self.resumes)})
        parts = [
            [step for step in self.steps if after < step["step"] <= end]
            for after, end in zip(starts, [*starts[1:], math.inf], strict=True)
        ]
        return [part for part in parts if part]

    @cached_property
    def measured_steps(self) -> list[dict[str, float]]:
        """The steps that speed is measured on: those of `llm_fp8.medians.measured_steps`, of each process."""
        return [step for part in self._processes for step in measured_steps(part)]

    @property
    def step_rates(self) -> list[float]:
        """tokens/s of each measured step (all positions, all GPUs)."""
        return [step["tokens_per_s"] for step in self.measured_steps if "tokens_per_s" in step]

    @cached_property
    def wall_times_s(self) -> list[float]:
        """Seconds of training until the end of each step: sums of `step_time_s`, evaluations, checkpoints and start-up left out.

        A process's first step, which holds compilation, and the step whose kernels were recorded count as the median of the measured steps:
        a run of useful length does not notice them.
        """
        typical = [step["step_time_s"] for step in self.measured_steps or self.steps if "step_time_s" in step]
        median = statistics.median(typical) if typical else math.nan
        first = {part[0]["step"] for part in self._processes}
        own = [step["step"] not in first and RECORDED_STEP not in step for step in self.steps]
        times = [step.get("step_time_s", math.nan) if counts else median for step, counts in zip(self.steps, own, strict=True)]
        return list(itertools.accumulate(times))

    @property
    def final_eval_loss(self) -> float | None:
        """Held-out loss after the last step; None without an evaluation there."""
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
        """Most memory that tensors held on any GPU of the run; None on a CPU.

        An evaluation of exact match puts a copy of the model beside the training and the peak keeps it from then on, so that only the steps
        up to the first such evaluation count.
        """
        copies = bool(self.config.get("run", {}).get("eval_exact_match")) or any(
            "eval_exact_match" in e for e in self.evaluations
        )
        last = min((evaluation["step"] for evaluation in self.evaluations), default=math.inf) if copies else math.inf
        counted = [step for step in self.steps if step["step"] <= last]
        values = [step[key] for step in counted for key in ("peak_memory_gib", "peak_memory_gib_max_rank") if key in step]
        return max(values) if values else None

    @property
    def token_trace(self) -> list[float]:
        """Tokens seen after each step: runs that read the same rows in the same order have the same trace."""
        return [step["tokens_seen"] for step in self.steps if "tokens_seen" in step]


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The numeric entries of a metrics record; "NaN" and "Infinity" become floats again."""
    entries = with_floats(record).items()
    return {key: value for key, value in entries if isinstance(value, (int, float)) and not isinstance(value, bool)}


def split_records(records: list[dict[str, Any]]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Records of metrics.jsonl or of a W&B history -> those of optimizer steps, those of evaluations; each in order.

    W&B merges an evaluation into the row of its step; it is taken apart again.
    """
    steps, evaluations = [], []
    for record in records:
        plain = numbers(record)
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
        return f"the run was stopped by {summary['stopped_by']} after step {summary.get('steps')}; finish it with --resume_from latest."
    if "failed" in summary:
        return f"the run failed after step {summary.get('steps')}: {summary['failed']}"
    return None


def require_sections(where: str, config: Any, precision: Any) -> None:
    """Raise `UserError`, beginning with `where`, unless these are the options and the precision of a run of this project's training scripts."""
    needed = {
        "config.optim.seed": lambda: config["optim"]["seed"],
        "precision.requested": lambda: precision["requested"],
        "precision.effective": lambda: precision["effective"],
    }
    for name, look_up in needed.items():
        try:
            look_up()
        except (KeyError, TypeError):
            raise UserError(f"{where} lacks {name}, which this project's training scripts store; give a run of theirs.") from None


def read_run_folder(folder: Path, flag: str = "--runs") -> RunRecord:
    """A finished run's record. Raises `UserError` where `folder` holds none, or one that did not finish."""
    if not folder.is_dir():
        raise UserError(f"{flag} {folder}: no such folder; give the --output_dir of a finished run.")
    for name in ("run.json", "metrics.jsonl", "summary.json"):
        if not (folder / name).is_file():
            hint = "the run did not finish" if name == "summary.json" else "it is not a run's --output_dir"
            raise UserError(f"{flag} {folder}: there is no {name} in it, so {hint}; give the folder of a finished run.")
    run, summary = read_json(folder / "run.json"), read_json(folder / "summary.json")
    if reason := why_unfinished(summary):
        raise UserError(f"{flag} {folder}: {reason}")
    require_sections(f"{flag} {folder}: run.json", run.get("config"), run.get("precision"))
    steps, evaluations = split_records(read_jsonl(folder / "metrics.jsonl"))
    if not steps:
        raise UserError(f"{flag} {folder}: metrics.jsonl holds no optimizer step.")
    if steps[-1]["step"] != summary.get("steps"):
        raise UserError(
            f"{flag} {folder}: metrics.jsonl ends at step {steps[-1]['step']:.0f} and summary.json at step {summary.get('steps')}, so they are not "
            "of one finished run; train it anew."
        )
    certificate = folder / CERTIFICATE_FILE
    return RunRecord(
        source=str(folder),
        config=run["config"],
        precision=run["precision"],
        steps=steps,
        evaluations=evaluations,
        effective=run.get("effective", {}),
        data=run.get("data", {}),
        model={key: run["model"][key] for key in ("location", "num_parameters") if key in run.get("model", {})},
        provenance=run.get("provenance", {}),
        summary=summary,
        answers=_last_answers(folder / ANSWERS_FOLDER),
        certificate=read_json(certificate) if certificate.is_file() else summary.get("certificate"),
        resumes=run.get("resumes", []),
    )


def _last_answers(folder: Path) -> dict[str, bool]:
    """Problem -> right or wrong, of the last evaluation in `folder`; empty without one."""
    files = {
        int(match[1]): path for path in folder.glob("step-*.jsonl") if (match := re.fullmatch(r"step-(\d+)\.jsonl", path.name))
    }
    if not files:
        return {}
    return {f"{answer['row_id']}: {answer['problem']}": bool(answer["correct"]) for answer in read_jsonl(files[max(files)])}
