"""Runs, failures and remarks of a comparison put together as one value, which JSON can hold and every output is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from llm_fp8.compare.arms import REFERENCE, describe_arm
from llm_fp8.compare.differences import Difference, find_differences, label
from llm_fp8.compare.figures import ArmFigures, arm_figures, smoothing_window
from llm_fp8.compare.run_record import RunRecord
from llm_fp8.compare.statistics import trailing_mean
from llm_fp8.compare.verdict import Verdict, judge
from llm_fp8.errors import UserError

MAX_CURVE_POINTS = 600
"""Points of a curve that the report keeps; of longer runs each point is the mean of as many steps as it takes."""


@dataclass(frozen=True)
class Failure:
    """A run that did not finish."""

    arm: str
    seed: int
    reason: str
    log: str


@dataclass(frozen=True)
class Comparison:
    """The whole comparison. `arms` in the order of the report, the reference first; `verdicts` with the reference last."""

    arms: list[ArmFigures]
    verdicts: dict[str, Verdict]
    differences: list[Difference]
    failures: list[Failure]
    curves: list[dict[str, Any]]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def compare(
    runs: Sequence[RunRecord],
    failures: Sequence[Failure] = (),
    overlaps: Sequence[tuple[str, str]] = (),
    arm_order: Sequence[str] = (),
) -> Comparison:
    """Compare finished runs. Raises `UserError` where two runs are of the same arm and seed, or there is no run at all."""
    if not runs:
        raise UserError("no run finished, so there is nothing to compare.")
    seen: dict[str, str] = {}
    for run in runs:
        if label(run) in seen:
            raise UserError(
                f"{seen[label(run)]} and {run.source} are both {label(run)}; give one of them, or runs with different --seed."
            )
        seen[label(run)] = run.source
    present = {run.arm for run in runs} | {failure.arm for failure in failures}
    ordered = [arm for arm in arm_order if arm in present] + sorted(present - set(arm_order))
    ordered.sort(key=lambda arm: arm != REFERENCE)
    by_arm = {arm: sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed) for arm in ordered}
    reference = by_arm.get(REFERENCE, [])
    differences = find_differences(runs, overlaps)
    figures = [
        arm_figures(arm, own, reference, num_failed=sum(failure.arm == arm for failure in failures))
        for arm, own in by_arm.items()
    ]
    held_against = next((arm for arm in figures if arm.arm == REFERENCE), None)
    return Comparison(
        arms=figures,
        verdicts={
            arm.arm: judge(arm, held_against, differences) for arm in sorted(figures, key=lambda arm: arm.arm == REFERENCE)
        },
        differences=differences,
        failures=list(failures),
        curves=[_curves(run) for own in by_arm.values() for run in own],
        provenance=_provenance(runs),
    )


def _provenance(runs: Sequence[RunRecord]) -> dict[str, Any]:
    first = next((run for run in runs if run.provenance), None)
    return {
        "made_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "runs": {label(run): run.source for run in runs},
        "of_first_run": {} if first is None else first.provenance,
        "model": next((run.config["model"].get("model_name") for run in runs if "model" in run.config), None),
        "dataset": next((run.config["data"].get("dataset_name") for run in runs if "data" in run.config), None),
        "num_steps": max(len(run.steps) for run in runs),
        "tokens_seen": max((run.token_trace[-1] for run in runs if run.token_trace), default=None),
    }


def _curves(run: RunRecord) -> dict[str, Any]:
    """One run's curves, thinned to at most `MAX_CURVE_POINTS`: means of groups of consecutive steps, at the group's last step."""
    window = smoothing_window(len(run.steps))
    group = -(-len(run.steps) // MAX_CURVE_POINTS)
    last = [min(start + group, len(run.steps)) - 1 for start in range(0, len(run.steps), group)]
    smooth = trailing_mean([step["loss"] for step in run.steps], window)
    rates = trailing_mean([step.get("tokens_per_s", float("nan")) for step in run.steps], group)
    times, tokens = run.wall_times_s, run.token_trace
    position = {step["step"]: index for index, step in enumerate(run.steps)}
    evaluated = [record for record in run.evaluations if record["step"] in position]
    at = [position[record["step"]] for record in evaluated]
    return {
        "arm": run.arm,
        "name": describe_arm(run.arm),
        "seed": run.seed,
        "smoothed_over_steps": window,
        "grouped_steps": group,
        "step": [run.steps[i]["step"] for i in last],
        "tokens": [tokens[i] for i in last] if tokens else [],
        "wall_time_s": [times[i] for i in last],
        "loss": [smooth[i] for i in last],
        "tokens_per_s": [rates[i] for i in last],
        "evaluation": {
            "step": [record["step"] for record in evaluated],
            "tokens": [tokens[i] for i in at] if tokens else [],
            "wall_time_s": [times[i] for i in at],
            "loss": [record["eval_loss"] for record in evaluated],
        },
    }
