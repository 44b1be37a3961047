"""Variants of the benchmarks by the names that they have in recorded files, older ones among them."""

from __future__ import annotations

import dataclasses

from llm_fp8.tools.bench.variants import Variant, parse_variant

OLD_NAMES = {"hf_ddp_bf16": "ddp:hf_bf16", "hf_fsdp2_bf16": "fsdp_full:hf_bf16"}
"""Names in older results files -> names."""
REMOVED_OPTIONS = {"flash3": "flash4"}
"""flash-attn 3's attention, which is gone, -> the one that is within 1% of its step."""


def recorded_variant(name: str) -> Variant:
    """The variant of a name in a recorded file, under that name; removed options stand for what replaced them."""
    words = OLD_NAMES.get(name, name).split(":")
    return dataclasses.replace(parse_variant(":".join(REMOVED_OPTIONS.get(word, word) for word in words)), name=name)
