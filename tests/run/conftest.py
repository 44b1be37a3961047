"""Fixtures for tests of whole runs: options of a small run, and a signal that stops it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from llm_fp8.run.timeline import Timeline


@pytest.fixture(scope="session")
def small_run(tiny_model: str, rows: str) -> list[str]:
    """Return the options of a run with 49 training rows, thus seven steps of up to 8 rows per epoch."""
    options = f"--model_name={tiny_model} --dataset_name={rows} --max_seq_length=128 --batch_size=8"
    return [*options.split(), "--learning_rate=1e-2"]


@pytest.fixture
def signal_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that takes a step and a signal (default SIGTERM). The run gets the signal after that step."""
    stops: dict[int, signal.Signals] = {}
    take_step = Timeline.take_step

    def with_signal(self, batches, start):
        end = take_step(self, batches, start)
        if self.step in stops:
            os.kill(os.getpid(), stops.pop(self.step))
        return end

    monkeypatch.setattr(Timeline, "take_step", with_signal)
    return lambda step, number=signal.SIGTERM: stops.update({step: number})
