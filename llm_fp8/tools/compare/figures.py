"""Run records -> the figures of each variant: speed, memory, energy, quality against the reference of the same seeds,
and what the certificates of its runs say.
"""

from __future__ import annotations

import dataclasses
import math
import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.tools.compare.run_record import RunRecord
from llm_fp8.tools.compare.statistics import Interval, PairedAnswers, pair_answers, ratio_interval, t_interval
from llm_fp8.tools.compare.variants import REFERENCE, VARIANT_FIELDS, describe_variant


@dataclass(frozen=True)
class LossGap:
    """Eval loss of a variant against the reference variant, in nats per token, over the seeds that both have."""

    mean: float
    low: float | None
    """Ends of the 95% interval over seeds; None with one seed."""
    high: float | None
    by_seed: dict[int, float]
    """Seed -> loss of the variant minus loss of the reference."""

    @property
    def interval(self) -> Interval:
        return Interval(self.mean, self.low, self.high)


State = Literal["certified", "missing", "undetermined", "failed"]
_SEVERITY: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class CertificateState:
    """The worst verdict among a variant's runs, in the order of `_SEVERITY`."""

    state: State
    reasons: list[str]
    """Why it is not 'certified', of the runs that have this state."""


@dataclass(frozen=True)
class VariantFigures:
    """Everything that the report says of one variant; None where it was not measured."""

    variant: str
    name: str
    effective: list[str]
    """What ran, each kind once: one entry in an honest comparison."""
    fallback_reasons: list[str]
    options: dict[str, Any]
    """fp8 options that are not at their default."""
    seeds: list[int]
    tokens_per_s: Interval | None
    speedup: Interval | None
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

    @property
    def num_seeds(self) -> int:
        return len(self.seeds)


def variant_figures(
    variant: str, runs: Sequence[RunRecord], reference: Sequence[RunRecord], num_failed: int = 0
) -> VariantFigures:
    """The figures of `runs`, all of one variant, against those of the reference; both in order of seed."""
    own, base = ({run.seed: run for run in of} for of in (runs, reference))
    rates, base_rates = (
        {seed: rate for seed, run in of.items() if (rate := run.summary.get("median_tokens_per_s"))}
        for of in (own, base)
    )
    is_reference = variant == REFERENCE
    speedup = answers = None
    if rates and base_rates and not is_reference:
        paired = list(rates) == list(base_rates)
        speedup = ratio_interval(list(rates.values()), list(base_rates.values()), paired)
    if not is_reference:
        common = [seed for seed in own if seed in base]
        answers = pair_answers([base[seed].answers for seed in common], [own[seed].answers for seed in common])
    unset = dataclasses.asdict(PrecisionConfig())
    given = runs[0].config.get("precision", {}) if runs else {}
    answered = [right for run in runs for right in run.answers.values()]
    return VariantFigures(
        variant=variant,
        name=describe_variant(variant),
        effective=sorted({run.effective_name for run in runs}),
        fallback_reasons=sorted({reason for run in runs if (reason := run.precision.get("fallback_reason"))}),
        options={k: v for k, v in given.items() if k not in VARIANT_FIELDS and v != unset.get(k)},
        seeds=list(own),
        tokens_per_s=t_interval(list(rates.values())) if rates else None,
        speedup=speedup,
        peak_memory_gib=max((run.peak_memory_gib for run in runs if run.peak_memory_gib is not None), default=None),
        energy_j_per_million_tokens=_energy(runs),
        eval_loss={seed: loss for seed, run in own.items() if (loss := run.final_eval_loss) is not None},
        loss_gap=None if is_reference else _loss_gap(own, base),
        exact_match=sum(answered) / len(answered) if answered else None,
        answers=answers,
        certificate=certificate_state([run.certificate for run in runs]),
        num_failed=num_failed,
    )


def _energy(runs: Sequence[RunRecord]) -> float | None:
    """The mean over runs; None unless every run has it."""
    known = [run.summary.get("median_energy_j_per_million_tokens", math.nan) for run in runs]
    return plain.mean(known) if known and all(map(math.isfinite, known)) else None


def _loss_gap(own: dict[int, RunRecord], base: dict[int, RunRecord]) -> LossGap | None:
    gaps = {}
    for seed, run in own.items():
        loss, reference = run.final_eval_loss, base[seed].final_eval_loss if seed in base else None
        # A bf16 run that diverged says nothing about the variant.
        if loss is not None and reference is not None and math.isfinite(reference):
            gaps[seed] = loss - reference
    if not gaps:
        return None
    found = t_interval(list(gaps.values()))
    return LossGap(found.value, found.low, found.high, gaps)


def certificate_state(certificates: Sequence[dict[str, Any] | None]) -> CertificateState:
    """The state from the certificates of a variant's runs (`llm_fp8.precision.certificate`), None for a run without."""
    states: list[tuple[State, Any]] = []
    for certificate in certificates:
        given = certificate or {}
        state = given.get("verdict") or "missing"
        # An unknown verdict proves nothing.
        states.append((state if state in _SEVERITY else "undetermined", given.get("reasons") or []))
    worst: State = max((state for state, _ in states), key=_SEVERITY.index, default="missing")
    reasons: dict[str, None] = {}
    for state, told in states:
        if state == worst:
            reasons |= dict.fromkeys([told] if isinstance(told, str) else map(str, told))  # W&B keeps a list as text
    return CertificateState(worst, [reason for reason in reasons if reason != "[]"])
