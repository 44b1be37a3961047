"""In what runs differ besides their variant, field by field, and what each difference confounds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llm_fp8.observability.tracker_labels import flattened
from llm_fp8.tools.compare.run_record import RunRecord
from llm_fp8.tools.compare.variants import REFERENCE

Effect = Literal["all", "quality", "speed", "note"]
"""What a difference confounds: everything, losses and answers, speed with memory and energy, or nothing by itself."""

FIRST_LOSS_TOLERANCE = 0.05
"""Relative difference of the first step's loss, on the same weights and sequences, that rounding does not explain."""

_OWN: tuple[str, ...] = ("config.run.output_dir", "config.run.wandb_", "config.run.use_wandb", "config.run.resume_from")
_OWN += ("config.optim.seed", "provenance.time_utc", "provenance.command")
_SECTIONS = ("effective", "data", "model", "provenance")
"""Sections that the source of a record may lack; then they are not compared."""
_EFFECTS: tuple[tuple[str, Effect], ...] = (
    # The first prefix that fits decides.
    ("config.data.preprocessing_workers", "note"),
    ("config.model.gradient_checkpointing", "speed"),
    ("config.model.cuda_graphs", "speed"),
    ("config.parallel.fp8_params", "all"),
    ("config.parallel", "speed"),
    ("config.run.eval_batches", "quality"),
    ("config.run", "note"),
    ("effective.sharding_mode", "speed"),
    ("effective.num_processes", "speed"),
    ("evaluation", "quality"),
    ("first loss", "quality"),
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
    """One field in which runs differ."""

    field: str
    effect: Effect
    values: dict[str, list[str]]
    """Value, as text -> the runs that have it ('delayed seed 1')."""
    variants: list[str]
    """Variants whose comparison with the reference it concerns."""


def _facts(run: RunRecord) -> dict[str, Any]:
    """What should be the same in all runs."""
    last = run.evaluations[-1] if run.evaluations else {}
    config = {name: section for name, section in run.config.items() if name != "precision"}
    facts = dict(flattened({"config": config, **{name: getattr(run, name) for name in _SECTIONS}}))
    return {name: value for name, value in facts.items() if not name.startswith(_OWN)} | {
        "optimizer": run.precision.get("optimizer"),
        "parameter_dtype": run.precision.get("parameter_dtype"),
        "num_steps": len(run.steps),
        "evaluation.num_supervised_tokens": float(last.get("eval_num_supervised_tokens", 0)),
    }


def find_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """All differences among `runs`, the most severe first."""
    facts = [(run, _facts(run)) for run in runs]
    not_kept = tuple(f"{name}." for name in _SECTIONS if not all(getattr(run, name) for run in runs))
    found = []
    for name in sorted({name for _, entries in facts for name in entries}):
        if not name.startswith(not_kept):
            found += _difference(name, [(run, entries.get(name)) for run, entries in facts])
    for variant in sorted({run.variant for run in runs}):  # every run of a variant computes in one precision
        own = [run for run in runs if run.variant == variant]
        found += _difference("precision in effect", [(run, run.effective_name) for run in own])
        found += _difference("config.precision", [(run, run.config.get("precision")) for run in own])
    for seed in sorted({run.seed for run in runs}):  # it means the same sequences in the same order, the same weights
        own = [run for run in runs if run.seed == seed]
        tokens = [(run, sum(step.get("tokens_seen", 0) for step in run.steps)) for run in own]
        found += _difference(f"tokens seen with seed {seed}, summed over steps", tokens)
        first_losses = [run.steps[0]["loss"] for run in own]
        if not math.isclose(min(first_losses), max(first_losses), rel_tol=FIRST_LOSS_TOLERANCE):
            found += _difference(f"first loss with seed {seed}", list(zip(own, first_losses, strict=True)))
    order = ("all", "quality", "speed", "note")
    return sorted(found, key=lambda difference: (order.index(difference.effect), difference.field))


def _difference(field: str, values: Sequence[tuple[RunRecord, Any]]) -> list[Difference]:
    """The difference of one field, none where all runs agree."""
    by_value: dict[str, list[RunRecord]] = {}
    for run, value in values:
        by_value.setdefault(value if isinstance(value, str) else json.dumps(value, sort_keys=True), []).append(run)
    if len(by_value) < 2:
        return []
    of_reference = {text for text, holders in by_value.items() if any(run.variant == REFERENCE for run in holders)}
    # Where the baseline's own runs differ, the difference concerns all variants.
    apart = by_value if len(of_reference) > 1 else by_value.keys() - of_reference
    variants = sorted({run.variant for text in apart for run in by_value[text]})
    effect = next(effect for prefix, effect in _EFFECTS if field.startswith(prefix))
    return [Difference(field, effect, {text: [run.label for run in by_value[text]] for text in by_value}, variants)]


def concerning(differences: Sequence[Difference], variant: str, *effects: Effect) -> list[Difference]:
    """Those with one of `effects` that concern `variant` or its baseline."""
    return [d for d in differences if d.effect in effects and variant in d.variants]
