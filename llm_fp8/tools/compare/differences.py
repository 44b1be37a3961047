"""In what runs differ besides their variant, field by field, and what each difference confounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_fp8.observability.tracker_labels import flattened
from llm_fp8.tools.compare.run_record import RunRecord
from llm_fp8.tools.compare.variants import REFERENCE

_FIELDS = {
    "both": "config effective data model steps tokens_seen precision.effective precision.optimizer"
    " precision.parameter_dtype config.parallel.fp8_params provenance.packages provenance.git.commit",
    "quality": "config.run.eval_batches first_loss evaluated_tokens",
    "speed": "config.model.gradient_checkpointing config.model.cuda_graphs config.parallel effective.sharding_mode"
    " effective.num_processes provenance.gpus provenance.driver provenance.cuda provenance.cudnn provenance.cpu"
    " provenance.environment",
    "": "config.optim.seed config.run config.data.preprocessing_workers provenance.packages.wandb"
    " provenance.environment.CUDA_VISIBLE_DEVICES",
}
"""What a difference confounds ("": nothing) -> beginnings of fields that must agree; the longest that fits decides."""


@dataclass(frozen=True)
class Difference:
    """One field in which runs differ."""

    field: str
    effect: str
    """A key of `_FIELDS`."""
    values: dict[str, list[str]]
    """Value, as text -> the runs that have it ('delayed seed 1')."""
    variants: list[str]
    """Variants whose comparison with the reference it concerns."""


def _facts(run: RunRecord) -> dict[str, Any]:
    """What should be the same in all runs; the options of precision are the variant's."""
    last = run.evaluations[-1] if run.evaluations else {}
    sections = {name: getattr(run, name) for name in ("effective", "data", "model", "provenance")}
    sections |= {"config": {name: section for name, section in run.config.items() if name != "precision"}}
    sections |= {"precision": {name: run.precision.get(name) for name in ("optimizer", "parameter_dtype")}}
    counts = {"steps": len(run.steps), "evaluated_tokens": float(last.get("eval_num_supervised_tokens", 0))}
    return {**dict(flattened(sections)), **counts}


def find_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """All differences among `runs`, the most severe first."""
    found = _differing([(run, _facts(run)) for run in runs])
    for variant in sorted({run.variant for run in runs}):  # every run of a variant computes in one precision
        own = [run for run in runs if run.variant == variant]
        options = [dict(flattened({"config": {"precision": run.config["precision"]}})) for run in own]
        facts = [{"precision.effective": run.effective_name} for run in own]
        found += _differing([(run, a | b) for run, a, b in zip(own, options, facts, strict=True)])
    for seed in sorted({run.seed for run in runs}):  # it means the same sequences in the same order, the same weights
        own = [run for run in runs if run.seed == seed]
        found += _differing([(run, {"tokens_seen": sum(step["tokens_seen"] for step in run.steps)}) for run in own])
        losses = [run.steps[0]["loss"] for run in own]
        if not math.isclose(min(losses), max(losses), rel_tol=0.05):  # rounding explains no more
            found += _differing([(run, {"first_loss": run.steps[0]["loss"]}) for run in own])
    return sorted(found, key=lambda difference: (difference.effect, difference.field))


def _differing(facts: Sequence[tuple[RunRecord, dict[str, Any]]]) -> list[Difference]:
    """The fields in which the runs do not agree."""
    found = []
    for name in sorted({name for _, entries in facts for name in entries}):
        fits = [(len(p), effect) for effect, text in _FIELDS.items() for p in text.split() if name.startswith(p)]
        effect = max(fits, default=(0, ""))[1]
        holders: dict[str, list[RunRecord]] = {}
        for run, entries in facts:
            holders.setdefault(str(entries.get(name)), []).append(run)
        if not effect or len(holders) < 2:
            continue
        of_reference = {text for text, own in holders.items() if any(run.variant == REFERENCE for run in own)}
        # Where the baseline's own runs differ, the difference concerns all variants.
        apart = holders if len(of_reference) > 1 else holders.keys() - of_reference
        variants = sorted({run.variant for text in apart for run in holders[text]})
        values = {text: [run.label for run in own] for text, own in holders.items()}
        found.append(Difference(name, effect, values, variants))
    return found


def concerning(differences: Sequence[Difference], variant: str, effect: str) -> list[str]:
    """Fields with this effect that concern `variant` or its baseline."""
    return list(dict.fromkeys(d.field for d in differences if d.effect == effect and variant in d.variants))
