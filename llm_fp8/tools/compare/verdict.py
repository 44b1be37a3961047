"""Derive a verdict in words from the figures of a variant. All functions are pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llm_fp8.tools.compare.figures import MIN_SEEDS, Difference, Gap, VariantFigures, concerning
from llm_fp8.utils.errors import listed

QUALITY_MARGIN = 0.005
"""Nats of eval loss by which a variant may be worse and still count as good. This is 0.25% of a loss of 2. The fp8
training of DeepSeek-V3 (arXiv 2412.19437) stayed within this relative difference of bf16."""

WITHIN = "within the seeds' spread"

_ADVICE = {
    "not certified": "do not trust these figures before the run is certified",
    "worse": "do not use it as it is",
    "not faster": "it gains no speed here",
    "speed unknown": "its gain in speed is not known",
    "too few seeds": f"too few seeds to tell: run at least {MIN_SEEDS}",
    "not shown": "it is not shown to learn as well, within {margin:g} nats/token: run more seeds",
    "slightly worse": "it is worse in every seed, but by less than {margin:g} nats/token: weigh this against the speed",
    "quality unknown": "it gains speed, but its quality could not be compared",
    "use it": "use it: it learns as well, within {margin:g} nats/token",
}


@dataclass(frozen=True)
class Verdict:
    conclusion: str  # a key of `_ADVICE`, or "reference", "failed", "no reference", "fell back" or "not comparable"
    sentences: list[str]  # the result, the exact match and advice; a single one if nothing can be compared
    quality: str = "not shown"
    """Quality regardless of speed: "baseline", "as good", "slightly worse", "worse" or "not shown"."""


def judge(
    figures: VariantFigures, reference: VariantFigures | None, differences: Sequence[Difference], margin: float
) -> Verdict:
    """Judge a variant against bf16. `reference` is None if no bf16 run finished. `margin` is --quality_margin."""
    name, state, reasons = figures.name, figures.certificate.state, "; ".join(figures.certificate.reasons)
    if not figures.seeds:
        return Verdict("failed", [f"{name}: no run finished, so there is nothing to compare."])
    if figures.num_failed:
        name += f" ({figures.num_failed} of {figures.num_failed + len(figures.seeds)} runs failed)"
    if reference is not None and figures.variant == reference.variant:
        failed = [f"{name} is the baseline, and its certificate failed ({reasons})."] if state == "failed" else []
        return Verdict("reference", failed, "baseline")
    if reference is None or not reference.seeds:
        return Verdict("no reference", [f"{name} has no finished bf16 run to compare with: train bf16, same seeds."])
    if figures.fallback_reasons:
        reasons, effective = "; ".join(figures.fallback_reasons), " and ".join(figures.effective)
        return Verdict("fell back", [f"{name} did not run ({reasons}): its figures are those of {effective}."])
    if reference.certificate.state == "failed":
        return Verdict("not comparable", [f"{name} is not comparable: {reference.name} failed its certificate."])
    if confounded := concerning(differences, figures.variant, "both"):
        return Verdict("not comparable", [f"{name} is not comparable: the runs differ in {listed(confounded)}."])
    is_fp8 = any(name.startswith("fp8") for name in figures.effective)
    speed_confounded = concerning(differences, figures.variant, "speed")
    quality_confounded = concerning(differences, figures.variant, "quality")
    quality = _quality(figures, bool(quality_confounded), margin)
    conclusion = _conclude(figures, quality, bool(speed_confounded), bool(quality_confounded))
    if conclusion in ("slightly worse", "use it") and is_fp8 and state != "certified":
        conclusion = "not certified"
    speed, loss = _describe_speed(figures, reference, speed_confounded), _describe_loss(figures, quality_confounded)
    sentences = [f"{name} {speed} and {loss}."]
    if (match := figures.exact_match_gap) and not quality_confounded:
        sentences.append(f"Exact match differs by {match.value:+.1f} points, {_scatter(match)}.")
    advice = _ADVICE[conclusion].format(margin=margin)
    if state == "failed" or (state != "certified" and is_fp8):
        advice = f"its certificate is {state}{reasons and f' ({reasons})'}: {advice}"
    return Verdict(conclusion, [*sentences, f"{advice[0].upper()}{advice[1:]}."], quality)


def _quality(figures: VariantFigures, confounded: bool, margin: float) -> str:
    gap, match = figures.loss_gap, figures.exact_match_gap
    if confounded:
        return "not shown"
    if (match and match.high is not None and match.high < 0) or (gap and not math.isfinite(gap.value)):
        return "worse"
    if gap is None or gap.low is None or gap.high is None:
        return "not shown"
    if gap.low > margin:
        return "worse"
    # If runs failed, the others are a biased sample: a run may have failed because its loss diverged.
    never_matches = match is not None and max(match.by_seed.values()) < 0
    if figures.num_failed or gap.high > margin or len(gap.by_seed) < MIN_SEEDS or never_matches:
        return "not shown"
    return "slightly worse" if min(gap.by_seed.values()) > 0 else "as good"


def _conclude(figures: VariantFigures, quality: str, speed_confounded: bool, quality_confounded: bool) -> str:
    """Return the most severe conclusion that applies, a key of `_ADVICE`. `quality` is a result of `_quality`."""
    gap, speedup = figures.loss_gap, figures.speedup
    if figures.certificate.state == "failed":
        return "not certified"
    if quality == "worse":
        return "worse"
    if speed_confounded or speedup is None:
        return "speed unknown"
    if speedup.low is None or speedup.high is None:
        return "too few seeds"
    if speedup.low <= 1:
        return "not faster"
    if quality_confounded or gap is None:
        return "quality unknown"
    if gap.high is None or len(gap.by_seed) < MIN_SEEDS:
        return "too few seeds"
    return "use it" if quality == "as good" else quality


def _describe_speed(figures: VariantFigures, reference: VariantFigures, confounded: Sequence[str]) -> str:
    if figures.emulated:
        return "was EMULATED in higher precision, so its speed has no meaning,"
    if confounded:
        return f"cannot be compared in speed (the runs differ in {listed(confounded)})"
    if figures.speedup is None:
        return "has no measured speed"
    low, high = figures.speedup.low, figures.speedup.high
    unsure = low is not None and high is not None and low <= 1 <= high
    return f"trained {figures.speedup.value:.2f} times as fast as {reference.name}{f' ({WITHIN})' if unsure else ''}"


def _describe_loss(figures: VariantFigures, confounded: Sequence[str]) -> str:
    if confounded:
        return f"cannot be compared in quality (the runs differ in {listed(confounded)})"
    gap = figures.loss_gap
    if gap is None:
        return "has no eval loss to compare with bf16's of the same seed"
    if not math.isfinite(gap.value):
        return "diverged"
    direction = "higher" if gap.value > 0 else "lower"
    return f"ended {abs(gap.value):.4f} nats/token {direction} in eval loss, {_scatter(gap)}"


def _scatter(gap: Gap) -> str:
    if gap.low is None or gap.high is None:
        return "in one seed" if len(gap.by_seed) == 1 else f"in {len(gap.by_seed)} seeds, too few for an interval"
    return WITHIN if gap.low <= 0 <= gap.high else "more than the seeds' spread"
