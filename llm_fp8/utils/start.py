"""Preparations before the import of torch: variables that CUDA's libraries read once, imports without garbage
collection, and a clock of the phases of a run's start (`phases_s` in summary.json).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

IMPORTED_S = time.perf_counter()

CUDA_DEFAULTS = {
    # Growing segments leave less unusable memory between blocks of many sizes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Transformer Engine multiplies fp32 matrices in TF32 otherwise: fp32 would not be fp32.
    "NVIDIA_TF32_OVERRIDE": "0",
}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import in the block without garbage collections, and exclude the imported objects from later ones: 5 s instead of
    7 for torch and transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class PhaseClock:
    """Seconds of wall time by phase; the first begins at `begun_s` (time.perf_counter), or now."""

    def __init__(self, begun_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._reached_s = time.perf_counter() if begun_s is None else begun_s

    def end(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.seconds[phase] = now_s - self._reached_s
        self._reached_s = now_s
