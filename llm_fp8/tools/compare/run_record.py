"""Define the variants' names and options. Read the record of a finished run from its folder or W&B's server."""

from __future__ import annotations

import argparse
import dataclasses
import math
from ast import literal_eval
from pathlib import Path
from statistics import fmean
from typing import Any

from llm_fp8.config.options import SECTIONS, PrecisionConfig
from llm_fp8.config.recipes import DEFAULT, DEFAULTS, RECIPE_OPTIONS, RECIPES, precision_name, recipe_for
from llm_fp8.tools.programs import recipe_argv
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import read_json, read_jsonl, with_floats

REFERENCE = "bf16"  # the baseline of all other variants
VARIANT_FIELDS = ("mixed_precision", "fp8_backend", "fp8_scenario")  # the options that define a variant


def variants() -> dict[str, tuple[str, ...]]:
    """Return a dict from the name of each variant to its options. 'fp8' means the default recipe, and 'no' is fp32."""
    plain = {name: ("--mixed_precision", name) for name in (REFERENCE, "no")}
    return {**plain, "fp8": recipe_argv(DEFAULTS["te"]), **{name: recipe_argv(name) for name in RECIPES}}


def parse_variants(text: str) -> list[str]:
    """Parse comma-separated variants and move the reference to the front. Raise `UserError` for a bad list."""
    names = [DEFAULTS["te"] if name == "fp8" else name for name in map(str.strip, text.split(","))]
    if len(set(names) & variants().keys()) < len(names):
        choices = ", ".join(variants())
        raise UserError(f"--variants {text}: name each once, from {choices} ('fp8' is '{DEFAULTS['te']}').")
    return sorted(names, key=lambda name: name != REFERENCE)


def variant_argv(variant: str, argv: list[str]) -> list[str]:
    """Return `argv` without the fp8 options that `variant` rejects, followed by the options that define `variant`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in dataclasses.fields(PrecisionConfig):
        if option.name not in VARIANT_FIELDS:
            parser.add_argument(f"--{option.name}", nargs="?", const=True, default=argparse.SUPPRESS)
    fp8_options, others = parser.parse_known_args(argv)
    for name, value in vars(fp8_options).items():
        if variant in RECIPES and (name not in RECIPE_OPTIONS or name in RECIPES[variant].options):
            others += [f"--{name}"] if value is True else [f"--{name}", value]
    return [*others, *variants()[variant]]


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The record of a finished run: run.json, metrics.jsonl and summary.json."""

    source: str  # folder or W&B path
    stored: dict[str, Any]  # run.json
    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    summary: dict[str, Any]  # summary.json; the entries of its `throughput` are at the top level, as on W&B
    answers: tuple[tuple[str, bool], ...] = ()  # problems, and True if the exported model solved it (`evaluate`)

    @property
    def precision(self) -> dict[str, Any]:
        """The precision section of run.json: the requested precision and the precision that ran."""
        return self.stored["precision"]

    @property
    def variant(self) -> str:
        """The requested variant, even if the run fell back to another precision."""
        requested = str(self.precision["requested"])
        if requested != "fp8":
            return requested
        return recipe_for(self.precision.get("requested_scenario") or DEFAULT, self.precision.get("backend") or "te")

    @property
    def effective_name(self) -> str:
        """The precision that ran, for example 'bf16', 'fp8 delayed' or 'fp8 rowwise, EMULATED'."""
        name = precision_name(self.precision["effective"], self.precision.get("effective_scenario"))
        return f"{name}, EMULATED" if self.precision.get("emulated") else name

    @property
    def seed(self) -> int:
        return int(self.stored["config"]["optim"]["seed"])

    @property
    def label(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def tokens_per_s(self) -> float | None:
        return self.summary.get("median_tokens_per_s")  # over steps

    @property
    def problems(self) -> list[str]:
        return [problem for problem, _ in self.answers]

    @property
    def exact_match_percent(self) -> float | None:
        return 100 * fmean(is_right for _, is_right in self.answers) if self.answers else None

    @property
    def final_eval_loss(self) -> float | None:
        """The eval loss after the last step. None if that step was not evaluated."""
        last = self.steps[-1]["step"]
        return next((entry["eval_loss"] for entry in self.evaluations[::-1] if entry["step"] == last), None)

    def seconds_to(self, eval_loss: float | None) -> float | None:
        """Return the training time in s until an evaluation first reached `eval_loss`. None if none reached it."""
        target = -math.inf if eval_loss is None else eval_loss
        reached = next((entry["step"] for entry in self.evaluations if entry["eval_loss"] <= target), None)
        if reached is None:
            return None
        return sum(step["step_time_s"] for step in self.steps if step["step"] <= reached)

    @property
    def peak_memory_gib(self) -> float | None:
        """The largest peak of tensor memory on any GPU, in GiB. None on a CPU."""
        keys = ("peak_memory_gib", "peak_memory_gib_max_rank")
        return max((step[key] for step in self.steps for key in keys if key in step), default=None)


def why_unfinished(summary: dict[str, Any]) -> str | None:
    """Return why a run did not finish, or None if it did. `summary` is the content of the run's summary.json."""
    if "stopped_by" in summary:
        return f"it was stopped by {summary['stopped_by']} after step {summary.get('steps')}"
    return f"it failed: {summary['failed']}" if "failed" in summary else None


def last_start(run: dict[str, Any]) -> dict[str, Any]:
    """Return run.json's content `run` with the sections of the last resume, which may have changed options."""
    return {**run, **[run, *run.get("resumes", ())][-1]}


def _record(
    source: str, run: dict[str, Any], metrics: list[dict[str, Any]], summary: dict[str, Any], *answers: tuple[str, bool]
) -> RunRecord:
    """Build a `RunRecord`; `run` is run.json's content. Raise `UserError` if the run did not finish or has no step."""
    if reason := why_unfinished(summary):
        raise UserError(f"{source}: the run did not finish, {reason}; finish it with --resume_from latest.")
    steps, evaluations = ([each for each in metrics if kind in each] for kind in ("loss", "eval_loss"))
    if not steps:
        raise UserError(f"{source} holds no optimizer step.")
    last = last_start(run)
    stored = {name: last[name] for name in ("config", "precision", "effective", "data", "provenance")}
    stored["model"] = {name: run["model"][name] for name in ("location", "num_parameters")}
    return RunRecord(source, stored, steps, evaluations, {**summary, **summary.get("throughput", {})}, answers)


def read_run_folder(folder: Path, flag: str = "--runs") -> RunRecord:
    """Read the record of the finished run in `folder`. Raise a `UserError` about the option `flag` if there is none."""
    with reading(flag, folder, "a finished run there", "Give the --output_dir of a finished run."):
        run = read_json(folder / "run.json", flag)
        summary = read_json(folder / "summary.json", flag)
        answers = folder / "exact_match.json"
        solved = read_json(answers)["answers"] if answers.is_file() else []
        verdicts = [(answer["problem"], answer["correct"]) for answer in solved]
        return _record(str(folder), run, read_jsonl(folder / "metrics.jsonl"), summary, *verdicts)


def read_wandb(path: str, api: Any = None) -> RunRecord:
    """Read a finished run from W&B's server, or raise `UserError`. `path` is ENTITY/PROJECT/RUNID."""
    import wandb

    advice = "Give ENTITY/PROJECT/RUNID, and run 'wandb login'; for runs on this machine use --runs FOLDER."
    with reading("--wandb", path, "the run", advice):
        run = (api or wandb.Api()).run(path)
        if run.state != "finished":
            raise UserError(f"--wandb {path}: the W&B run is {run.state}; give a run that finished.")
        metrics = [{key: value for key, value in row.items() if value is not None} for row in run.scan_history()]
        config, effective = dict(run.config), dict(run.config["effective"])
        stored = {name: effective.pop(name) for name in ("precision", "model", "data")}
        options = {name: config[name] for name in SECTIONS}
        stored |= {"config": options, "effective": effective, "provenance": config["provenance"]}
        summary: dict[str, Any] = {}
        for name, value in dict(run.summary).items():
            part, is_nested, key = name.partition("/")  # `send_summary` joins nested names by a slash
            value = literal_eval(value) if key == "reasons" else value
            summary |= {part: summary.get(part, {}) | {key: value}} if is_nested else {name: value}
        return _record(path, stored, with_floats(metrics), summary)
