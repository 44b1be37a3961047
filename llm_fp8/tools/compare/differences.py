"""In what runs differ besides their variant, field by field, and what each difference confounds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llm_fp8.observability.tracker_labels import flattened
from llm_fp8.tools.compare.run_record import RunRecord
from llm_fp8.tools.compare.variants import REFERENCE, VARIANT_FIELDS

Effect = Literal["all", "quality", "speed", "note"]
"""What a difference confounds: everything, losses and answers, speed with memory and energy, or nothing by itself."""

FIRST_LOSS_TOLERANCE = 0.05
"""Relative difference of the first step's loss, on the same weights and sequences, that rounding does not explain."""

NOT_RECORDED = "not recorded"

_SECTIONS = ("effective", "data", "model", "provenance")
"""Sections of a record that its source may lack."""

_IGNORED = {
    *(f"config.run.{name}" for name in ("output_dir", "wandb_run_name", "wandb_project")),
    *(f"config.run.{name}" for name in ("use_wandb", "resume_from")),
    "config.optim.seed",
}
_EFFECTS: tuple[tuple[str, Effect], ...] = (
    # The first prefix that fits decides.
    ("config.data.preprocessing_workers", "note"),
    ("config.model.gradient_checkpointing", "speed"),
    ("config.model.cuda_graphs", "speed"),
    ("config.parallel.fp8_params", "all"),
    ("config.parallel", "speed"),
    ("config.run.eval_batches", "quality"),
    ("config.run.eval_max_new_tokens", "quality"),
    ("config.run", "note"),
    ("config", "all"),
    ("effective.sharding_mode", "speed"),
    ("effective.num_processes", "speed"),
    ("effective", "all"),
    ("evaluation", "quality"),
    ("provenance.packages.wandb", "note"),
    ("provenance.packages", "all"),
    ("provenance.git.commit", "all"),
    ("provenance.git.dirty", "note"),
    ("provenance.environment.CUDA_VISIBLE_DEVICES", "note"),
    ("provenance", "speed"),
    ("", "all"),
)


@dataclass(frozen=True)
class Difference:
    """One field in which runs differ, or a note about runs."""

    field: str
    effect: Effect
    values: dict[str, list[str]]
    """Value, as text -> the runs that have it ('delayed seed 1')."""
    arms: list[str]
    """Variants whose comparison with the reference it concerns; named as in comparison.json."""


def label(run: RunRecord) -> str:
    return f"{run.variant} seed {run.seed}"


def _effect(field: str) -> Effect:
    return next(effect for prefix, effect in _EFFECTS if field.startswith(prefix))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _facts(run: RunRecord) -> dict[str, Any]:
    """What should be the same in all runs."""
    last_evaluation = run.evaluations[-1] if run.evaluations else {}
    of_one_run = ("time_utc", "command", "gpu_uuids")
    recorded = {
        "config": {name: section for name, section in run.config.items() if name != "precision"},
        "effective": run.effective,
        "data": run.data,
        "model": run.model,
        "provenance": {name: value for name, value in run.provenance.items() if name not in of_one_run},
    }
    return {
        **dict(flattened(recorded)),
        "optimizer": run.precision.get("optimizer", NOT_RECORDED),
        "parameter_dtype": run.precision.get("parameter_dtype", NOT_RECORDED),
        "num_steps": len(run.steps),
        "last_step": run.steps[-1]["step"],
        "evaluation.num_supervised_tokens": last_evaluation.get("eval_num_supervised_tokens", NOT_RECORDED),
    }


def find_differences(runs: Sequence[RunRecord], known_overlaps: Sequence[tuple[str, str]] = ()) -> list[Difference]:
    """All differences among `runs`, the most severe first. `known_overlaps`: labels of runs that ran at the same time
    on the same hardware.
    """
    found = [
        *_field_differences(runs),
        *_precision_differences(runs),
        *_per_seed_differences(runs),
        *_resume_differences(runs),
        *_remarks(runs),
    ]
    if known_overlaps:
        variants = sorted({name.split(" ")[0] for pair in known_overlaps for name in pair})
        if REFERENCE in variants:  # the baseline of every variant
            variants = sorted({run.variant for run in runs})
        together = {f"{first} with {second}": [first, second] for first, second in known_overlaps}
        found.append(Difference("hardware shared while running", "speed", together, variants))
    order = ("all", "quality", "speed", "note")
    return sorted(found, key=lambda difference: (order.index(difference.effect), difference.field))


def _field_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    facts = [(run, _facts(run)) for run in runs]
    not_shared = [name for name in _SECTIONS if not all(getattr(run, name) for run in runs)]
    found = []
    for field in sorted({name for _, entries in facts for name in entries} - _IGNORED):
        if field.split(".")[0] not in not_shared:  # else _remarks says it once for the whole section
            found += _difference(field, [(run, entries.get(field)) for run, entries in facts])
    return found


def _difference(field: str, values: list[tuple[RunRecord, Any]], effect: Effect | None = None) -> list[Difference]:
    """The difference of one field, none where all runs agree."""
    by_value: dict[str, list[RunRecord]] = defaultdict(list)
    for run, value in values:
        by_value[_text(value)].append(run)
    if len(by_value) < 2:
        return []
    of_reference = {text for text, holders in by_value.items() if any(run.variant == REFERENCE for run in holders)}
    # Where the baseline's own runs differ, the difference concerns all variants.
    apart = by_value if len(of_reference) > 1 else by_value.keys() - of_reference
    variants = sorted({run.variant for text in apart for run in by_value[text]})
    labels = {text: [label(run) for run in holders] for text, holders in by_value.items()}
    return [Difference(field, effect or _effect(field), labels, variants)]


def _precision_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """Within a variant every run must ask for, and get, the same precision."""
    found = []
    for variant in sorted({run.variant for run in runs}):
        own = [run for run in runs if run.variant == variant]
        options = [(run, run.config.get("precision", {})) for run in own]
        for field in sorted({name for _, given in options for name in given} - set(VARIANT_FIELDS)):
            found += _difference(f"config.precision.{field}", [(run, given.get(field)) for run, given in options])
        found += _difference("effective precision", [(run, run.effective_name) for run in own], "all")
    return found


def _per_seed_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """Same seed means same sequences, order and initial weights: compares tokens seen per step and the first loss."""
    found = []
    for seed in sorted({run.seed for run in runs}):
        own = [run for run in runs if run.seed == seed]
        reference = next((run for run in own if run.variant == REFERENCE), own[0])
        for run in own:
            if run is reference:
                continue
            pairs = enumerate(zip(reference.token_trace, run.token_trace, strict=False), start=1)
            number = next((number for number, (tokens, own_tokens) in pairs if tokens != own_tokens), None)
            if number is not None:
                traces = [(other, int(other.token_trace[number - 1])) for other in (reference, run)]
                found += _difference(f"tokens seen with seed {seed} after step {number}", traces, "all")
            first, own_first = reference.steps[0], run.steps[0]
            if first["step"] == own_first["step"] and not math.isclose(
                first["loss"], own_first["loss"], rel_tol=FIRST_LOSS_TOLERANCE
            ):
                values = {f"{first['loss']:.4f}": [label(reference)], f"{own_first['loss']:.4f}": [label(run)]}
                found.append(Difference(f"loss of the first step with seed {seed}", "quality", values, [run.variant]))
    return found


def _resume_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """What changed in a run when it was resumed, such as the driver."""
    found = []
    for run in runs:
        concerned = sorted({other.variant for other in runs}) if run.variant == REFERENCE else [run.variant]
        first = _facts(run)
        for resume in run.resumes:
            sections = {name: resume[name] for name in ("config", "effective", "provenance") if name in resume}
            later = _facts(dataclasses.replace(run, **sections))
            for field in sorted((first.keys() | later.keys()) - _IGNORED):
                if first.get(field) != later.get(field):
                    words = {_text(first.get(field)): [label(run)], _text(later.get(field)): [f"{label(run)}, resumed"]}
                    found.append(Difference(f"{field} when resumed", _effect(field), words, concerned))
    return found


def _remarks(runs: Sequence[RunRecord]) -> list[Difference]:
    found = []
    for section in _SECTIONS:
        if without := [label(run) for run in runs if not getattr(run, section)]:
            field = f"{section}: not kept by the source, so not compared"
            found.append(Difference(field, "note", {NOT_RECORDED: without}, []))
    if resumed := [label(run) for run in runs if run.resumes]:
        found.append(Difference("resumed during the run", "note", {"yes": resumed}, []))
    if dirty := [label(run) for run in runs if (run.provenance.get("git") or {}).get("dirty")]:
        found.append(Difference("code had uncommitted changes", "note", {"yes": dirty}, []))
    return found


def concerning(differences: Sequence[Difference], variant: str, *effects: Effect) -> list[Difference]:
    """Those with one of `effects` that concern `variant` or its baseline."""
    return [d for d in differences if d.effect in effects and variant in d.arms]
