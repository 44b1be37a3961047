"""What the plots share: a colour for what a variant trains in, the message as title, labels at the ends of lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.colors import to_rgb

from benchmarks.recorded_variants import OLD_NAMES
from llm_fp8.config.recipes import recipe_names

PRECISION_COLOURS = {"bf16": "#444444", "delayed": "#d1495b", "current": "#00798c", "block": "#edae49"}
"""Of our precisions with Transformer Engine."""
NEXT_COLOURS = ("#66a182", "#2e4057", "#8d96a3")
"""Of recipes that no plot has had so far."""
_OTHERS = [name for name in recipe_names("te") if name not in PRECISION_COLOURS]
_COLOURS = (
    PRECISION_COLOURS
    | dict(zip(_OTHERS, NEXT_COLOURS, strict=False))
    | {
        "tensorwise": "#b8a1d9",
        "rowwise": "#9a7fc7",
        "rowwise_with_gw_hp": "#7d5fb3",
        "hf_bf16": "#b0b7c3",
        "hf_bf16_compiled": "#8a93a3",
        "accelerate_te": "#8fb8de",
        "te_autocast": "#5f93c4",
        "torchao_tensorwise": "#9ccfa0",
        "torchao_rowwise": "#6fae75",
    }
)
_PALER = 0.17
"""Share of white by which each further variant of a colour is paler than the one before it."""


def trained_in(variant: str) -> str:
    """The precision of a variant of ours, or the baseline, without how it is spread and its options; raises
    StopIteration for what is no variant.
    """
    return next(word for word in OLD_NAMES.get(variant, variant).split(":") if word in _COLOURS)


def colours_of(variants: list[str]) -> list[tuple[float, float, float]]:
    """Of variants that stand side by side: those of one precision or baseline in one colour, each paler than the one
    before it.
    """
    seen: list[str] = []
    found = []
    for variant in variants:
        name = trained_in(variant)
        white = min(0.7, _PALER * seen.count(name))
        red, green, blue = (white + (1 - white) * part for part in to_rgb(_COLOURS[name]))
        found.append((red, green, blue))
        seen.append(name)
    return found


def write_message(figure: Any, message: str, what: str) -> None:
    """What the plot shows as its title; at its foot, what was measured."""
    figure.suptitle(message, x=0.01, ha="left", fontsize=12, weight="bold")
    figure.supxlabel(what, x=0.01, ha="left", fontsize=9, color="#555555")


def label_ends(axis: Any, x: float, ends: dict[str, tuple[float, Any]], gap: float) -> None:
    """Labels to the right of the lines that end at `x`.

    Args:
        ends: label -> height of the line's end, colour.
        gap: least distance of two labels, in the units of the axis.
    """
    height = float("-inf")
    for label, (end, colour) in sorted(ends.items(), key=lambda item: item[1][0]):
        height = max(end, height + gap)
        axis.annotate(
            label, (x, height), (6, 0), textcoords="offset points", va="center", color=colour, fontsize=10,
            annotation_clip=False,
        )  # fmt: skip


def save(figure: Any, path: Path) -> None:
    """Write a PNG of twice the size that it is read at, on white, which reads on a light page and on a dark one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, facecolor="white")
