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
from llm_fp8.tools.compare.statistics import (
    Interval,
    PairedAnswers,
    first_at_or_below,
    pair_answers,
    ratio_interval,
    t_interval,
    trailing_mean,
)
from llm_fp8.tools.compare.variants import REFERENCE, VARIANT_FIELDS, describe_variant

SMOOTHING_SHARE = 0.05
"""Share of a run's steps that the trailing mean of the training loss covers."""


@dataclass(frozen=True)
class LossGap:
    """Eval loss of a variant against the reference variant, in nats per token, over the seeds that both have."""

    mean: float
    low: float | None
    """Ends of the 95% interval over seeds; None with one seed."""
    high: float | None
    by_seed: dict[int, float]
    """Seed -> loss of the variant minus loss of the reference."""


@dataclass(frozen=True)
class EqualLossTime:
    """Seconds of training until a run first has the loss that the reference run of its seed ends with."""

    loss: str
    """Which loss: 'held-out', or 'training' (trailing mean) where there is no evaluation during training."""
    by_seed_s: dict[int, float | None]
    """Seed -> seconds; None where the run never gets there."""


@dataclass(frozen=True)
class VariantFigures:
    """Everything that the report says of one variant; None where it was not measured."""

    arm: str
    """The variant; named as in comparison.json."""
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
    equal_loss_time: EqualLossTime | None
    exact_match: dict[int, float]
    """Seed -> share of problems answered right."""
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
    common = [seed for seed in own if seed in base]
    is_reference = variant == REFERENCE
    rates, base_rates = (
        {seed: plain.median(run.step_rates) for seed, run in of.items() if run.step_rates} for of in (own, base)
    )
    speedup = None
    if rates and base_rates and not is_reference:
        paired = list(rates) == list(base_rates)
        speedup = ratio_interval(list(rates.values()), list(base_rates.values()), paired)
    unset = dataclasses.asdict(PrecisionConfig())
    given = runs[0].config.get("precision", {}) if runs else {}
    options = {name: value for name, value in given.items() if name not in VARIANT_FIELDS and value != unset.get(name)}
    answers = (
        None if is_reference else pair_answers([base[s].answers for s in common], [own[s].answers for s in common])
    )
    return VariantFigures(
        arm=variant,
        name=describe_variant(variant),
        effective=sorted({run.effective_name for run in runs}),
        fallback_reasons=sorted(
            {run.precision["fallback_reason"] for run in runs if run.precision.get("fallback_reason")}
        ),
        options=options,
        seeds=list(own),
        tokens_per_s=t_interval(list(rates.values())) if rates else None,
        speedup=speedup,
        peak_memory_gib=max((run.peak_memory_gib for run in runs if run.peak_memory_gib is not None), default=None),
        energy_j_per_million_tokens=_energy(runs),
        eval_loss={seed: run.final_eval_loss for seed, run in own.items() if run.final_eval_loss is not None},
        loss_gap=None if is_reference else _loss_gap(own, base),
        equal_loss_time=_equal_loss_time(own, base, common),
        exact_match={seed: run.exact_match for seed, run in own.items() if run.exact_match is not None},
        answers=answers,
        certificate=certificate_state([run.certificate for run in runs]),
        num_failed=num_failed,
    )


def _energy(runs: Sequence[RunRecord]) -> float | None:
    """Mean over runs of the median over steps, J per million positions; None unless every run has it."""
    key = "energy_j_per_million_tokens"
    values = [[step[key] for step in run.measured_steps if key in step] for run in runs]
    return plain.mean(plain.median(run) for run in values) if values and all(values) else None


def _loss_gap(own: dict[int, RunRecord], base: dict[int, RunRecord]) -> LossGap | None:
    # A bf16 run that diverged says nothing about the variant.
    reference = {
        seed: loss for seed, run in base.items() if (loss := run.final_eval_loss) is not None and math.isfinite(loss)
    }
    gaps = {
        seed: run.final_eval_loss - reference[seed]
        for seed, run in own.items()
        if run.final_eval_loss is not None and seed in reference
    }
    if not gaps:
        return None
    found = t_interval(list(gaps.values()))
    return LossGap(found.value, found.low, found.high, gaps)


def _equal_loss_time(own: dict[int, RunRecord], base: dict[int, RunRecord], common: list[int]) -> EqualLossTime | None:
    if not common or any(math.isnan(run.wall_times_s[-1]) for seed in common for run in (own[seed], base[seed])):
        return None
    # A single evaluation, at the end, has no curve; then the training loss, on the same sequences, takes its place.
    from_evals = all(len(loss_by_time(run, True)[0]) > 1 for seed in common for run in (own[seed], base[seed]))
    targets = {seed: loss_by_time(base[seed], from_evals)[0][-1] for seed in common}
    times = {
        seed: first_at_or_below(*loss_by_time(own[seed], from_evals), target)
        for seed, target in targets.items()
        if math.isfinite(target)  # a bf16 run that diverged sets no loss to reach
    }
    return EqualLossTime("held-out" if from_evals else "training", times) if times else None


def loss_by_time(run: RunRecord, from_evals: bool) -> tuple[list[float], list[float]]:
    """Losses and the seconds of training behind each: of the evaluations, or of the steps' trailing mean, from the
    first that is a mean of a whole window.
    """
    if from_evals:
        at_step = dict(zip((step["step"] for step in run.steps), run.wall_times_s, strict=True))
        known = [record for record in run.evaluations if record["step"] in at_step]
        return [record["eval_loss"] for record in known], [at_step[record["step"]] for record in known]
    window = smoothing_window(len(run.steps))
    return trailing_mean([step["loss"] for step in run.steps], window)[window - 1 :], run.wall_times_s[window - 1 :]


def smoothing_window(num_steps: int) -> int:
    return max(1, round(num_steps * SMOOTHING_SHARE))


State = Literal["certified", "missing", "undetermined", "failed"]
_SEVERITY: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class CertificateState:
    """The worst verdict among a variant's runs, in the order of `_SEVERITY`."""

    state: State
    reasons: list[str]
    """Why it is not 'certified', of the runs that have this state."""


def certificate_state(certificates: Sequence[dict[str, Any] | None]) -> CertificateState:
    """The state from the certificates of a variant's runs (`llm_fp8.precision.certificate`), None for a run without."""
    states: list[tuple[State, list[Any]]] = []
    for certificate in certificates:
        given = certificate or {}
        state = given.get("verdict") or "missing"
        # An unknown verdict proves nothing.
        states.append((state if state in _SEVERITY else "undetermined", given.get("reasons") or []))
    worst: State = max((state for state, _ in states), key=_SEVERITY.index, default="missing")
    reasons = {str(reason): None for state, given in states if state == worst for reason in given}
    return CertificateState(worst, list(reasons))
