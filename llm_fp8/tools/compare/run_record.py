"""The variants by name, and one finished run of one as plain values, from its output folder or W&B's server."""

from __future__ import annotations

import argparse
import dataclasses
import math
from ast import literal_eval
from pathlib import Path
from typing import Any

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import DEFAULTS, RECIPES
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import read_json, read_metrics, with_floats

REFERENCE = "bf16"
"""The baseline that the others are compared with."""

VARIANT_FIELDS = ("mixed_precision", "fp8_backend", "fp8_scenario")
"""The options that make a variant."""
_RECIPE_OPTIONS = frozenset(option for recipe in RECIPES.values() for option in recipe.options)


def variants() -> dict[str, tuple[str, ...]]:
    """Name of each variant -> its options. 'fp8' is another name of 'delayed'; 'no' is fp32."""
    words = ("--mixed_precision", "fp8", "--fp8_backend")
    recipes = {name: (*words, recipe.backend, "--fp8_scenario", name) for name, recipe in RECIPES.items()}
    plain = {name: ("--mixed_precision", name) for name in (REFERENCE, "no")}
    return {**plain, "fp8": recipes[DEFAULTS["te"]], **recipes}


def parse_variants(text: str) -> list[str]:
    """The variants of a comma-separated list, the reference first. Raises `UserError` for an unknown or doubled one."""
    names = [DEFAULTS["te"] if name == "fp8" else name for name in map(str.strip, text.split(","))]
    if len(set(names) & variants().keys()) < len(names):
        raise UserError(f"--variants {text}: name each once, of {', '.join(variants())} ('fp8' is '{DEFAULTS['te']}').")
    return sorted(names, key=lambda name: name != REFERENCE)


def variant_words(variant: str, words: list[str]) -> list[str]:
    """The options `words` of a training command for `variant`: with its precision, without the fp8 options that it does
    not take.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in dataclasses.fields(PrecisionConfig):
        if option.name not in VARIANT_FIELDS:
            parser.add_argument(f"--{option.name}", nargs="?", const=True, default=argparse.SUPPRESS)
    given, kept = parser.parse_known_args(words)
    for name, value in vars(given).items():
        if variant in RECIPES and (name not in _RECIPE_OPTIONS or name in RECIPES[variant].options):
            kept += [f"--{name}"] if value is True else [f"--{name}", value]
    return [*kept, *variants()[variant]]


def describe_variant(variant: str) -> str:
    """A variant's name in a sentence: 'bf16', 'fp8 delayed', 'fp32'."""
    return f"fp8 {variant}" if variant in RECIPES else {"no": "fp32"}.get(variant, variant)


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One finished run: sections of its run.json, its metrics.jsonl by kind, its summary.json."""

    source: str
    """Folder or W&B path."""
    config: dict[str, dict[str, Any]]
    precision: dict[str, Any]
    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    summary: dict[str, Any]
    """summary.json with the entries of its `throughput` beside the others, as on W&B."""
    certificate: dict[str, Any] | None
    effective: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    provenance: dict[str, Any]
    answers: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Problem -> whether the exported model answered it right (`llm-fp8 evaluate`)."""

    @property
    def variant(self) -> str:
        """What was asked for."""
        asked, scenario = self.precision["requested"], self.precision.get("requested_scenario")
        if asked == "fp8" and scenario in (None, "default"):
            scenario = self.precision["effective_scenario"] if self.precision.get("backend") == "torchao" else None
        return str((scenario or DEFAULTS["te"]) if asked == "fp8" else asked)

    @property
    def effective_name(self) -> str:
        """What ran, as 'bf16' or 'fp8 delayed'."""
        ran = self.precision["effective"]
        return describe_variant(str(self.precision["effective_scenario"] if ran == "fp8" else ran))

    @property
    def seed(self) -> int:
        return int(self.config["optim"]["seed"])

    @property
    def label(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def final_eval_loss(self) -> float | None:
        """Eval loss after the last step; None without an evaluation there."""
        last = self.steps[-1]["step"]
        return next((entry["eval_loss"] for entry in self.evaluations[::-1] if entry["step"] == last), None)

    def seconds_to(self, eval_loss: float | None) -> float | None:
        """Seconds of training until an evaluation found this loss or a lower one; None where none did."""
        target = -math.inf if eval_loss is None else eval_loss
        reached = next((entry["step"] for entry in self.evaluations if entry["eval_loss"] <= target), None)
        return reached and sum(step["step_time_s"] for step in self.steps if step["step"] <= reached)

    @property
    def peak_memory_gib(self) -> float | None:
        """The most memory that tensors held on any GPU; None on a CPU."""
        keys = ("peak_memory_gib", "peak_memory_gib_max_rank")
        return max((step[key] for step in self.steps for key in keys if key in step), default=None)


def why_unfinished(summary: dict[str, Any]) -> str | None:
    """Why a run with this summary.json did not finish; None where it did."""
    if "stopped_by" in summary:
        return f"it was stopped by {summary['stopped_by']} after step {summary.get('steps')}"
    return f"it failed: {summary['failed']}" if "failed" in summary else None


def _record(source: str, run: dict[str, Any], metrics: list[dict[str, Any]], summary: dict[str, Any]) -> RunRecord:
    """A run from what run.json, metrics.jsonl and summary.json hold. Raises an error for one that did not finish."""
    if reason := why_unfinished(summary):
        raise UserError(f"{source}: the run did not finish, {reason}; finish it with --resume_from latest.")
    metrics = [with_floats(entry) for entry in metrics]
    record = RunRecord(
        source=source,
        config=run["config"],
        precision=run["precision"],
        model={key: run["model"][key] for key in ("location", "num_parameters")},
        steps=[entry for entry in metrics if "loss" in entry],
        evaluations=[entry for entry in metrics if "eval_loss" in entry],
        summary={**summary, **summary.get("throughput", {})},
        certificate=summary.get("certificate"),
        **{name: run[name] for name in ("effective", "data", "provenance")},
    )
    if not record.steps:
        raise UserError(f"{source} holds no optimizer step.")
    return record


def read_run_folder(folder: Path, flag: str = "--runs") -> RunRecord:
    """A finished run's record. Raises `UserError` where `folder` holds none, or one that did not finish."""
    with reading(flag, folder, "a finished run there", "Give the --output_dir of a finished run."):
        run, summary = read_json(folder / "run.json"), read_json(folder / "summary.json")
        record = _record(str(folder), run, read_metrics(folder / "metrics.jsonl"), summary)
        if (evaluated := folder / "exact_match.json").is_file():
            answers = read_json(evaluated)["answers"]
            record.answers.update({f"{one['row_id']}: {one['problem']}": one["correct"] for one in answers})
        return record


def read_wandb(path: str, api: Any = None) -> RunRecord:
    """The record of a finished run on W&B's server, named ENTITY/PROJECT/RUNID. `api`: a `wandb.Api`, by default one
    with this machine's login. Raises `UserError` where there is none.
    """
    import wandb

    advice = "Give ENTITY/PROJECT/RUNID, and run 'wandb login'; runs on this machine are read with --runs FOLDER."
    with reading("--wandb", path, "the run", advice):
        run = (api or wandb.Api()).run(path)
        if run.state != "finished":
            raise UserError(f"--wandb {path}: the W&B run is {run.state}; give a run that finished.")
        config, summary = dict(run.config), dict(run.summary)
        metrics: dict[int, dict[str, Any]] = {}
        for row in run.scan_history():  # an evaluation may have a row of its own
            metrics.setdefault(row["step"], {}).update({k: v for k, v in row.items() if v is not None})
        effective = dict(config["effective"])
        stored = {name: effective.pop(name) for name in ("precision", "model", "data")}
        options = {name: config[name] for name in ("model", "precision", "data", "optim", "run", "lora", "parallel")}
        stored |= {"config": options, "effective": effective, "provenance": config["provenance"]}
        if verdict := summary.get("certificate/verdict"):
            summary["certificate"] = {"verdict": verdict, "reasons": literal_eval(summary["certificate/reasons"])}
        return _record(path, stored, [metrics[step] for step in sorted(metrics)], summary)
