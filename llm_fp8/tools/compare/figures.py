"""Compute each variant's figures from run records: speed, memory, energy, certificates, and quality relative to the
reference runs of the same seeds. List differences between the runs that could also explain a difference in the figures.

Each run is one observation. The steps of a run share a machine and weights, and all runs answer the same problems, so
that counting steps or answers as independent trials would reject a true null hypothesis far too often. Intervals are
Student's t intervals. The sample of a figure is one value per run, and that of a comparison is one difference from the
reference per seed. Rates and their ratios are averaged as logarithms. Fewer than `MIN_SEEDS` values have no interval:
an interval from two is 13 times as wide as their difference.
`tests/tools/compare/test_statistics.py` simulates how often an interval covers the true value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from llm_fp8.config.recipes import RECIPES, precision_name
from llm_fp8.observability.trackers import flattened
from llm_fp8.tools.compare.run_record import REFERENCE, RunRecord

MIN_SEEDS = 3  # common seeds that an interval and a recommendation need: two may be close by chance
_SEVERITY = ("certified", "missing", "undetermined", "failed")


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% confidence interval. `low` and `high` are None below `MIN_SEEDS` values."""

    value: float
    low: float | None
    high: float | None

    def __format__(self, spec: str) -> str:
        """Format the estimate and, if known, the ends, each with the number format `spec`."""
        return format(self.value, spec) + ("" if self.low is None else f" ({self.low:{spec}} to {self.high:{spec}})")


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean of one or more independent `values` and its 95% interval by Student's t distribution."""
    mean = float(np.mean(values))
    if len(values) < MIN_SEEDS:
        return Interval(mean, None, None)
    quantile = special.stdtrit(len(values) - 1, 0.975)  # two-sided 95%
    half = float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def rate_interval(rates: Sequence[float]) -> Interval:
    """Return the geometric mean of `rates`. Its interval is computed on logarithms, so both ends are positive."""
    logs = t_interval(np.log(rates).tolist())
    return Interval(*(None if end is None else math.exp(end) for end in (logs.value, logs.low, logs.high)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Gap(Interval):
    """A variant's figure minus the reference's figure with the same seed, averaged over the seeds that both have."""

    by_seed: dict[int, float]


@dataclass(frozen=True)
class CertificateState:
    state: str  # the worst verdict among a variant's runs (see `_SEVERITY`)
    reasons: list[str]  # from the runs with this verdict


@dataclass(frozen=True)
class VariantFigures:
    """The figures of one variant in the report. A figure that was not measured is None."""

    variant: str
    name: str
    effective: list[str]  # the distinct precisions that ran (more than one is suspect)
    emulated: bool  # True if operands were rounded to fp8 and multiplied in higher precision
    fallback_reasons: list[str]
    seeds: list[int]
    tokens_per_s: Interval | None
    speedup: Interval | None
    time_to_reference_loss_s: float | None  # the mean over the common seeds; None if a run did not reach that loss
    peak_memory_gib: float | None
    energy_j_per_million_tokens: float | None
    eval_loss: dict[int, float]  # seed -> final eval loss
    loss_gap: Gap | None  # in nats per token
    exact_match_percent: float | None  # percentage of problems with a right answer
    exact_match_gap: Gap | None  # in percentage points
    certificate: CertificateState
    num_failed: int = 0


def variant_figures(
    variant: str, runs: Sequence[RunRecord], reference: Sequence[RunRecord], num_failed: int = 0
) -> VariantFigures:
    """Compute a variant's figures from its finished `runs` and the finished `reference` runs, both sorted by seed."""
    by_seed = {run.seed: run for run in reference}
    pairs = [(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]
    compared = pairs if variant != REFERENCE else []
    same_problems = [(run, base) for run, base in compared if run.problems == base.problems]
    emulated = any(run.precision.get("emulated") for run in runs)
    rates = [run.tokens_per_s for run in runs if run.tokens_per_s]
    ratios = [run.tokens_per_s / base.tokens_per_s for run, base in compared if run.tokens_per_s and base.tokens_per_s]
    return VariantFigures(
        variant=variant,
        name=precision_name("fp8", variant) if variant in RECIPES else precision_name(variant, None),
        effective=sorted({run.effective_name for run in runs}),
        emulated=emulated,
        fallback_reasons=sorted(map(str, {run.precision.get("fallback_reason") for run in runs} - {None})),
        seeds=[run.seed for run in runs],
        tokens_per_s=rate_interval(rates) if rates else None,
        speedup=rate_interval(ratios) if ratios and not emulated else None,
        time_to_reference_loss_s=_mean([run.seconds_to(base.final_eval_loss) for run, base in pairs]),
        peak_memory_gib=max((run.peak_memory_gib for run in runs if run.peak_memory_gib is not None), default=None),
        energy_j_per_million_tokens=_mean([run.summary.get("median_energy_j_per_million_tokens") for run in runs]),
        eval_loss={run.seed: run.final_eval_loss for run in runs if run.final_eval_loss is not None},
        loss_gap=_gap(compared, lambda run: run.final_eval_loss),
        exact_match_percent=_mean([run.exact_match_percent for run in runs]),
        exact_match_gap=_gap(same_problems, lambda run: run.exact_match_percent),
        certificate=certificate_state([run.summary for run in runs]),
        num_failed=num_failed,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of `values`, one per run. Return None if any is unknown or not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _gap(pairs: Sequence[tuple[RunRecord, RunRecord]], figure: Callable[[RunRecord], float | None]) -> Gap | None:
    """Average `figure(run) - figure(reference)` over pairs (run, reference). Return None if no pair has both values."""
    by_seed = {}
    for run, base in pairs:
        value, reference = figure(run), figure(base)
        # A diverged bf16 run is no evidence about the variant.
        if value is not None and reference is not None and math.isfinite(reference):
            by_seed[run.seed] = value - reference
    return Gap(**vars(t_interval(list(by_seed.values()))), by_seed=by_seed) if by_seed else None


def certificate_state(summaries: Sequence[dict[str, Any]]) -> CertificateState:
    """Return the worst certificate in `summaries` of runs."""
    certificates = [summary.get("certificate") or {"verdict": "missing"} for summary in summaries]
    worst = max((each["verdict"] for each in certificates), key=_SEVERITY.index, default="missing")
    reasons = [each.get("reasons") or () for each in certificates if each["verdict"] == worst]
    return CertificateState(worst, list(dict.fromkeys(itertools.chain(*reasons))))


_FIELDS = {
    "both": "config effective data model steps tokens_seen precision.effective precision.optimizer"
    " precision.parameter_dtype provenance.packages provenance.git.commit",
    "quality": "config.run.eval_batches first_loss evaluated_tokens",
    "speed": "config.model.gradient_checkpointing config.model.cuda_graphs config.parallel effective.sharding_mode"
    " effective.num_processes provenance.gpus provenance.driver provenance.cuda provenance.cudnn provenance.cpu"
    " provenance.environment",
    "": "config.optim.seed config.run config.parallel.fp8_params provenance.packages.wandb"
    " config.data.batch_size config.optim.gradient_accumulation_steps effective.num_requested_micro_batches"
    " provenance.environment.CUDA_VISIBLE_DEVICES",
}
"""Kind of figures ("": none) that a difference confounds -> prefixes of the fields. The longest match decides."""
_EFFECTS = {prefix: effect for effect, text in _FIELDS.items() for prefix in text.split()}


@dataclass(frozen=True)
class Difference:
    """A field of the run records that does not have the same value in all compared runs."""

    field: str
    effect: str  # a key of `_FIELDS`
    values: dict[str, list[str]]  # value, as text -> labels of the runs with this value ('delayed seed 1')
    variants: list[str]  # the variants whose comparison with the reference is affected


def _facts(run: RunRecord) -> dict[str, Any]:
    """Return the entries of a run's record that should be equal in all compared runs, whatever their variants."""
    return {
        **{name: run.stored[name] for name in ("effective", "data", "model", "provenance")},
        "config": {name: section for name, section in run.stored["config"].items() if name != "precision"},
        "precision": {name: run.precision.get(name) for name in ("optimizer", "parameter_dtype")},
        "steps": len(run.steps),
        "evaluated_tokens": float((run.evaluations or [{}])[-1].get("eval_num_supervised_tokens", 0)),
    }


def _precision_facts(run: RunRecord) -> dict[str, Any]:
    """Return the entries of a run's record that should be equal in all runs of the same variant."""
    config = run.stored["config"]
    options = {**config["precision"], "fp8_params": config["parallel"]["fp8_params"]}
    return {"config.precision": options, "precision.effective": run.effective_name}


def find_differences(runs: Sequence[RunRecord]) -> list[Difference]:
    """List differences of `runs`, besides the variant, that could explain their figures. Sort by kind of figure."""
    differences = _differing(runs, _facts)
    for variant in sorted({run.variant for run in runs}):  # all runs of a variant should compute in one precision
        differences += _differing([run for run in runs if run.variant == variant], _precision_facts)
    for seed in sorted({run.seed for run in runs}):  # a seed should give the same sequences, order and weights
        group = [run for run in runs if run.seed == seed]
        differences += _differing(
            group, lambda run: {"tokens_seen, summed": sum(step.get("tokens_seen", 0) for step in run.steps)}
        )
        losses = [run.steps[0]["loss"] for run in group]
        if not math.isclose(min(losses), max(losses), rel_tol=0.05):  # rounding explains at most 5%
            differences += _differing(group, lambda run: {"first_loss": run.steps[0]["loss"]})
    return sorted(differences, key=lambda difference: (difference.effect, difference.field))


def _differing(runs: Sequence[RunRecord], facts_of: Callable[[RunRecord], dict[str, Any]]) -> list[Difference]:
    facts = [(run, dict(flattened(facts_of(run)))) for run in runs]
    differences = []
    for field in sorted({field for _, entries in facts for field in entries}):
        effect = _EFFECTS.get(max(filter(field.startswith, _EFFECTS), key=len, default=""), "")
        values = [(run, str(entries.get(field))) for run, entries in facts]
        labels: dict[str, list[str]] = {}
        for run, value in values:
            labels.setdefault(value, []).append(run.label)
        if not effect or len(labels) < 2:
            continue
        of_reference = {value for run, value in values if run.variant == REFERENCE}
        # If the baseline's own runs differ, the difference concerns all variants.
        concerned = {run.variant for run, value in values if len(of_reference) > 1 or value not in of_reference}
        differences.append(Difference(field, effect, labels, sorted(concerned)))
    return differences


def concerning(differences: Sequence[Difference], variant: str, effect: str) -> list[str]:
    """List the fields in `differences` that confound `variant`'s figures of the kind `effect` (a key of `_FIELDS`)."""
    return list(dict.fromkeys(each.field for each in differences if each.effect == effect and variant in each.variants))
