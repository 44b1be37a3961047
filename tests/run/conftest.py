"""What tests of whole runs share: a run's options and the signal that stops it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from llm_fp8.run.timeline import Timeline


@pytest.fixture(scope="session")
def small_run(tiny_model: str, rows: str) -> list[str]:
    """The 49 rows that are trained on give seven steps to an epoch."""
    options = f"--model_name={tiny_model} --dataset_name={rows} --max_seq_length=128 --batch_size=8"
    return [*options.split(), "--learning_rate=1e-2"]


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function: at the end of that step the process sends itself the signal, as a scheduler would."""
    stops: dict[int, signal.Signals] = {}
    take_step = Timeline.take_step

    def with_signal(self, batches, start):
        end = take_step(self, batches, start)
        if self.step in stops:
            os.kill(os.getpid(), stops.pop(self.step))
        return end

    monkeypatch.setattr(Timeline, "take_step", with_signal)
    return lambda step, number=signal.SIGTERM: stops.update({step: number})
