"""How long the parts of a run's start take: `phases_s` in summary.json. Training scripts import this module first."""

from __future__ import annotations

import time

IMPORTED_S = time.perf_counter()


class PhaseClock:
    """Seconds of wall time by phase; the first begins at `begun_s` (time.perf_counter), or now."""

    def __init__(self, begun_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._reached_s = time.perf_counter() if begun_s is None else begun_s

    def end(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.seconds[phase] = now_s - self._reached_s
        self._reached_s = now_s
