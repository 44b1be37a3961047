"""Which attention Transformer Engine takes at the user's shape, and why not another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from llm_fp8.tools.verify.processes import Ended, Probe
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup

TIMEOUT_S = 180.0
PROBE = ("-m", "llm_fp8.tools.verify.attention_probe")
FAST = ("fused (cuDNN)", "flash-attn")

_DEBUG_LINE = re.compile(r"^\[(?:DEBUG|WARNING)\s*\| DotProductAttention\s*\]: (?P<message>.*)$", re.MULTILINE)
_DISABLING = re.compile(
    r"Disabling (?P<kind>FusedAttention|UnfusedDotProductAttention|FlashAttention(?: \d)?|all backends)\b\s*"
)
_FLASH = "FlashAttention"
_NO_FLASH = re.compile(rf"Available backends = \{{{_FLASH}=False\b")
_FLASH_VERSION = re.compile(r"'flash_attn(?:_\d)?_version': '(?P<version>[^']*)'")
_SELECTED = re.compile(r"Selected backend = (?P<name>[^.(\n]+?)(?: \((?P<detail>[^)]*)\))?\.")


@dataclass(frozen=True)
class DebugReport:
    """What Transformer Engine said of its choice."""

    selected: str | None
    """Its last choice, with version or sub-backend; None where it said nothing."""
    reasons: dict[str, list[str]]
    """Kind of attention -> why it was ruled out."""


def parse_debug(text: str) -> DebugReport:
    """Read the lines that NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 adds to a process's output.

    They give no reason where flash-attn is not installed, only that there is no version of it.
    """
    selected, reasons = None, dict[str, list[str]]()
    for line in _DEBUG_LINE.finditer(text):
        message = line["message"]
        if chosen := _SELECTED.search(message):
            selected = f"{chosen['name']} {chosen['detail'] or ''}".strip()
        elif ruled_out := _DISABLING.match(message):
            reason = message[ruled_out.end() :].rstrip(". ")
            known = reasons.setdefault(ruled_out["kind"], [])
            if reason not in known:
                known.append(reason)
    versions = {found["version"] for found in _FLASH_VERSION.finditer(text)}
    if (
        versions == {"not installed"}
        and _NO_FLASH.search(text)
        and not any(kind.startswith(_FLASH) for kind in reasons)
    ):
        reasons[_FLASH] = ["not installed"]
    return DebugReport(selected, reasons)


def start(setup: Setup) -> Probe:
    """`llm_fp8.tools.verify.attention_probe` for the user's shape."""
    words = (setup.model_name, str(setup.batch_size), str(setup.max_seq_length), setup.row_form)
    return Probe("attention", setup.scratch, PROBE, words, NVTE_DEBUG="1", NVTE_DEBUG_LEVEL="2")


def judge(ended: Ended, seen: dict[str, Any] | None, shape: str) -> Result:
    """A fast kind must have run."""
    problems, report = Problems(), parse_debug(ended.output)
    reasons = [f"{kind}: {reason}" for kind, given in report.reasons.items() for reason in given]
    facts = {"seen": seen, "selected": report.selected, "reasons": report.reasons, "shape": shape, **ended.facts}
    if seen is None or ended.code != 0:
        problems.fail(
            f"no attention ran ({shape}): {ended.why()}", "python scripts/verify_fp8.py --only attention --verbose"
        )
        return problems.result("", ended.evidence, facts)
    backend = seen["backend"]
    if backend not in FAST:
        forbidden = [reason for reason in reasons if "NVTE_" in reason]
        mends = (
            ["unset NVTE_FUSED_ATTN NVTE_FLASH_ATTN"]
            if forbidden
            else ["python scripts/verify_fp8.py --only cudnn --verbose"]
        )
        if not forbidden:
            mends.append("MAX_JOBS=4 python -m pip install --no-build-isolation flash-attn==2.8.3.post2")
        problems.fail(f"attention is {backend or 'unknown'}, several times slower than cuDNN's ({shape})", *mends)
    others = "; ".join(f"not {kind}: {given[0]}" for kind, given in report.reasons.items())
    summary = f"{backend} for {shape}{f' ({others})' if others else ''}"
    return problems.result("" if problems.failures else summary, reasons, facts)


def check(setup: Setup) -> Result:
    """Wait for the probe that was started before the first check."""
    ended, seen = setup.probes["attention"].wait(TIMEOUT_S)
    shape = f"{setup.batch_size} {setup.row_form} rows of {setup.max_seq_length} tokens, {setup.model_name}"
    return judge(ended, seen, shape)
