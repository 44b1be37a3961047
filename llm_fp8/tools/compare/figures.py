"""Run records -> the figures of each variant: speed, memory, energy, quality against the reference of the same seeds,
what the certificates of its runs say; and in what the runs differ besides their variant.
"""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_fp8.observability.tracker_labels import flattened
from llm_fp8.tools.compare.run_record import REFERENCE, RunRecord, describe_variant
from llm_fp8.tools.compare.statistics import Interval, PairedAnswers, pair_answers, ratio_interval, t_interval

_SEVERITY = ("certified", "missing", "undetermined", "failed")


@dataclass(frozen=True)
class LossGap(Interval):
    """Eval loss of a variant minus that of the reference, in nats per token, over the seeds that both have."""

    by_seed: dict[int, float]


@dataclass(frozen=True)
class CertificateState:
    """The worst verdict among a variant's runs, in the order of `_SEVERITY`, and the reasons of those that have it."""

    state: str
    reasons: list[str]


@dataclass(frozen=True)
class VariantFigures:
    """Everything that the report says of one variant; None where it was not measured."""

    variant: str
    name: str
    effective: list[str]
    """What ran, each kind once: one entry in an honest comparison."""
    fallback_reasons: list[str]
    seeds: list[int]
    tokens_per_s: Interval | None
    speedup: Interval | None
    time_to_reference_loss_s: float | None
    """Mean over the seeds that both have; None where one did not get there."""
    peak_memory_gib: float | None
    energy_j_per_million_tokens: float | None
    eval_loss: dict[int, float]
    """Seed -> final eval loss."""
    loss_gap: LossGap | None
    exact_match: float | None
    """Share of problems answered right."""
    answers: PairedAnswers | None
    certificate: CertificateState
    num_failed: int = 0


def variant_figures(
    variant: str, runs: Sequence[RunRecord], reference: Sequence[RunRecord], num_failed: int = 0
) -> VariantFigures:
    """The figures of `runs`, all of one variant, against those of the reference; both in order of seed."""
    base = {run.seed: run for run in reference}
    pairs = [(run, base[run.seed]) for run in runs if run.seed in base]
    rates, base_rates = _rates(runs), _rates(reference)
    speedup = loss_gap = answers = None
    if variant != REFERENCE:
        loss_gap = _loss_gap(pairs)
        answers = pair_answers([theirs.answers for _, theirs in pairs], [own.answers for own, _ in pairs])
        if rates and base_rates:
            paired = list(rates) == list(base_rates)
            speedup = ratio_interval(list(rates.values()), list(base_rates.values()), paired)
    answered = [right for run in runs for right in run.answers.values()]
    return VariantFigures(
        variant=variant,
        name=describe_variant(variant),
        effective=sorted({run.effective_name for run in runs}),
        fallback_reasons=sorted({reason for run in runs if (reason := run.precision.get("fallback_reason"))}),
        seeds=[run.seed for run in runs],
        tokens_per_s=t_interval(list(rates.values())) if rates else None,
        speedup=speedup,
        time_to_reference_loss_s=_mean([own.seconds_to(theirs.final_eval_loss) for own, theirs in pairs]),
        peak_memory_gib=max((run.peak_memory_gib for run in runs if run.peak_memory_gib is not None), default=None),
        energy_j_per_million_tokens=_mean([run.summary.get("median_energy_j_per_million_tokens") for run in runs]),
        eval_loss={run.seed: loss for run in runs if (loss := run.final_eval_loss) is not None},
        loss_gap=loss_gap,
        exact_match=plain.fmean(answered) if answered else None,
        answers=answers,
        certificate=certificate_state([run.certificate for run in runs]),
        num_failed=num_failed,
    )


def _rates(runs: Sequence[RunRecord]) -> dict[int, float]:
    return {run.seed: rate for run in runs if (rate := run.summary.get("median_tokens_per_s"))}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean over runs; None unless every run has a number."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return plain.mean(known) if known and len(known) == len(values) else None


def _loss_gap(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> LossGap | None:
    gaps = {}
    for own, base in pairs:
        loss, reference = own.final_eval_loss, base.final_eval_loss
        # A bf16 run that diverged says nothing about the variant.
        if loss is not None and reference is not None and math.isfinite(reference):
            gaps[own.seed] = loss - reference
    if not gaps:
        return None
    found = t_interval(list(gaps.values()))
    return LossGap(found.value, found.low, found.high, gaps)


def certificate_state(certificates: Sequence[dict[str, Any] | None]) -> CertificateState:
    """The state from the certificates of a variant's runs (`llm_fp8.precision.certificate`), None for a run without."""
    given = [certificate or {"verdict": "missing"} for certificate in certificates]
    worst = max((certificate["verdict"] for certificate in given), key=_SEVERITY.index, default="missing")
    reasons = [r for certificate in given if certificate["verdict"] == worst for r in certificate.get("reasons") or []]
    return CertificateState(worst, list(dict.fromkeys(reasons)))


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
    return {**sections, **counts}


def find_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """All differences among `runs`, the most severe first."""
    found = _differing([(run, _facts(run)) for run in runs])
    for variant in sorted({run.variant for run in runs}):  # every run of a variant computes in one precision
        own = [run for run in runs if run.variant == variant]
        found += _differing([(run, {"config": {"precision": run.config["precision"]}}) for run in own])
        found += _differing([(run, {"precision": {"effective": run.effective_name}}) for run in own])
    for seed in sorted({run.seed for run in runs}):  # it means the same sequences in the same order, the same weights
        own = [run for run in runs if run.seed == seed]
        found += _differing(
            [(run, {"tokens_seen": sum(step.get("tokens_seen", 0) for step in run.steps)}) for run in own]
        )
        losses = [run.steps[0]["loss"] for run in own]
        if not math.isclose(min(losses), max(losses), rel_tol=0.05):  # rounding explains no more
            found += _differing([(run, {"first_loss": run.steps[0]["loss"]}) for run in own])
    return sorted(found, key=lambda difference: (difference.effect, difference.field))


def _differing(trees: Sequence[tuple[RunRecord, dict[str, Any]]]) -> list[Difference]:
    """The fields in which the runs do not agree."""
    facts, found = [(run, dict(flattened(tree))) for run, tree in trees], []
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
