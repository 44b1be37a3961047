"""A training that is sent a signal after one of its steps."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from unittest import mock

from llm_fp8.train.loop import TrainingLoop


@contextlib.contextmanager
def stopping() -> Iterator[dict[int, signal.Signals]]:
    """In the block, the process sends itself the signals of the dict that it gives, each at the end of its step."""
    stops: dict[int, signal.Signals] = {}
    take_step = TrainingLoop.take_step

    def with_signal(self, batches, start):
        end = take_step(self, batches, start)
        if self.step in stops:
            os.kill(os.getpid(), stops.pop(self.step))
        return end

    with mock.patch.object(TrainingLoop, "take_step", with_signal):
        yield stops
