"""Figures of a variant -> a judgement in words. A pure function: no file, no clock, no randomness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from llm_fp8.tools.compare.differences import Difference, concerning
from llm_fp8.tools.compare.figures import VariantFigures
from llm_fp8.tools.compare.statistics import CONFIDENCE

MIN_SEEDS = 3
"""Seeds of both variants below which the spread of the reference says too little to judge a loss by."""
SIGNIFICANCE = 1 - CONFIDENCE

Conclusion = Literal[
    "reference",
    "failed",
    "no reference",
    "fell back",
    "not comparable",
    "not certified",
    "worse",
    "slower",
    "not faster",
    "speed unknown",
    "too few seeds",
    "quality unknown",
    "use it",
]

_ADVICE: dict[Conclusion, str] = {
    "not certified": "do not trust these figures before the run is certified",
    "worse": "do not use it as it is",
    "slower": "it gains no speed here",
    "not faster": "it gains no speed here",
    "speed unknown": "whether it pays was not measured",
    "too few seeds": f"too few seeds to tell, run at least {MIN_SEEDS}",
    "quality unknown": "it gains speed, and what it learned could not be compared",
    "use it": "use it",
}


@dataclass(frozen=True)
class Verdict:
    """A conclusion and the sentence that says it with its figures."""

    conclusion: Conclusion
    sentence: str


def judge(own: VariantFigures, reference: VariantFigures | None, differences: Sequence[Difference]) -> Verdict:
    """The verdict on a variant against the reference variant (None where it has no finished run)."""
    failed = (
        f" ({own.num_failed} of {own.num_failed + own.num_seeds} runs failed)"
        if own.num_failed and own.num_seeds
        else ""
    )
    name = f"{own.name}{failed}"
    if own.num_seeds == 0:
        return Verdict("failed", f"{own.name}: no run finished, so there is nothing to compare.")
    if reference is not None and own.arm == reference.arm:
        return Verdict("reference", f"{name} is what the others are held against{_certified_reference(own)}.")
    if reference is None or reference.num_seeds == 0:
        return Verdict("no reference", f"{name} has no finished bf16 run to be held against.")
    if own.fallback_reasons:
        return Verdict(
            "fell back",
            f"{name} did not run: {' and '.join(own.effective)} ran in its place ({'; '.join(own.fallback_reasons)}), "
            "and its figures are of that.",
        )
    if reference.certificate.state == "failed":
        reasons = "; ".join(reference.certificate.reasons)
        return Verdict(
            "not comparable",
            f"{name} is not comparable: the {reference.name} runs failed their certificate ({reasons}).",
        )
    if confounded := concerning(differences, own.arm, "all"):
        return Verdict(
            "not comparable",
            f"{name} is not comparable with {reference.name}: the runs differ in {_fields(confounded)}.",
        )
    speed_confounded = concerning(differences, own.arm, "speed")
    quality_confounded = concerning(differences, own.arm, "quality")
    clauses = [
        _speed_words(own, speed_confounded),
        _loss_words(own, reference, quality_confounded),
        _answer_words(own, quality_confounded),
        _certificate_words(own),
    ]
    conclusion = _conclude(own, bool(speed_confounded), bool(quality_confounded))
    return Verdict(conclusion, f"{name} {', '.join(clause for clause in clauses if clause)}: {_ADVICE[conclusion]}.")


def _conclude(own: VariantFigures, speed_confounded: bool, quality_confounded: bool) -> Conclusion:
    """The gravest thing that holds."""
    if own.certificate.state == "failed":
        return "not certified"
    gap = own.loss_gap
    # Seeds of the gap, not runs: those of a variant whose seed bf16 lacks have nothing to be held against.
    enough = gap is not None and min(len(gap.by_seed), gap.num_reference_seeds) >= MIN_SEEDS
    has_diverged = gap is not None and not math.isfinite(gap.mean)
    if not quality_confounded and (
        has_diverged or _answers_are_worse(own) or (enough and _loss_is_outside(own) and _gap(own) > 0)
    ):
        return "worse"
    if speed_confounded or own.speedup is None:
        return "speed unknown"
    if own.speedup.high < 1:
        return "slower"
    if own.speedup.low <= 1:
        return "not faster"
    if quality_confounded or gap is None:
        return "quality unknown"
    if not enough:
        return "too few seeds"
    if _is_fp8(own) and own.certificate.state != "certified":
        return "not certified"
    return "use it"


def _is_fp8(own: VariantFigures) -> bool:
    return any(name.startswith("fp8") for name in own.effective)


def _gap(own: VariantFigures) -> float:
    return own.loss_gap.mean if own.loss_gap else 0.0


def _loss_is_outside(own: VariantFigures) -> bool:
    gap = own.loss_gap
    return gap is not None and gap.reference_spread is not None and abs(gap.mean) > gap.reference_spread


def _answers_are_worse(own: VariantFigures) -> bool:
    return own.answers is not None and own.answers.difference < 0 and own.answers.p_value < SIGNIFICANCE


def _fields(differences: Sequence[Difference], limit: int = 4) -> str:
    names = list(dict.fromkeys(difference.field for difference in differences))
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _speed_words(own: VariantFigures, confounded: Sequence[Difference]) -> str:
    if confounded:
        return f"cannot be compared in speed (the runs differ in {_fields(confounded)})"
    speedup = own.speedup
    if speedup is None:
        return "has no measured speed"
    interval = f"({speedup.low:.2f} to {speedup.high:.2f})"
    if speedup.low > 1:
        return f"is faster, at {speedup.value:.2f}x the speed {interval}"
    if speedup.high < 1:
        return f"is slower, at {speedup.value:.2f}x the speed {interval}"
    return f"is not measurably faster, at {speedup.value:.2f}x the speed {interval}"


def _loss_words(own: VariantFigures, reference: VariantFigures, confounded: Sequence[Difference]) -> str:
    if confounded:
        return f"its quality cannot be compared (the runs differ in {_fields(confounded)})"
    gap = own.loss_gap
    if gap is None:
        unpaired = own.eval_loss and reference.eval_loss
        return (
            f"its eval loss has no {reference.name} run of the same seed beside it"
            if unpaired
            else "its eval loss was not measured"
        )
    if not math.isfinite(gap.mean):
        return "its eval loss is not finite in every seed"
    signed = f"its eval loss differs by {gap.mean:+.4f} nats/token"
    if gap.reference_spread is None:
        return f"{signed} in one seed of {reference.name}, whose spread is unknown"
    seeds = f"{gap.reference_spread:.4f} over {gap.num_reference_seeds} {reference.name} seeds"
    where = "outside" if _loss_is_outside(own) else "inside"
    every = ""
    # A gap of the same sign in each seed is a lean of the variant, even where it is smaller than what the seed does.
    if len(gap.by_seed) >= MIN_SEEDS and where == "inside" and all(value > 0 for value in gap.by_seed.values()):
        every = ", though higher in every seed"
    return f"{signed}, {where} the spread of {seeds}{every}"


def _answer_words(own: VariantFigures, confounded: Sequence[Difference]) -> str:
    if confounded or own.answers is None:
        return ""
    answers = own.answers
    return f"exact match differs by {100 * answers.difference:+.1f} points ({_p(answers.p_value)})"


def _p(value: float) -> str:
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def _certificate_words(own: VariantFigures) -> str:
    if own.certificate.state == "failed":
        return f"and its certificate failed ({'; '.join(own.certificate.reasons)})"
    if own.certificate.state == "undetermined" and _is_fp8(own):
        return f"and its certificate is undetermined ({'; '.join(own.certificate.reasons)})"
    if own.certificate.state == "missing" and _is_fp8(own):
        return "and no certificate shows that it computed in fp8"
    return ""


def _certified_reference(own: VariantFigures) -> str:
    if own.certificate.state == "failed":
        return f", and its certificate failed ({'; '.join(own.certificate.reasons)})"
    return ""
