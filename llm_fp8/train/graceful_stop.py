"""Stopping a run from outside without losing work.

Inside `GracefulStop` the first SIGTERM (Slurm, Kubernetes, torchrun) or SIGINT (Ctrl-C) only sets a flag, and the run
saves after its step and returns `exit_code`. A later Ctrl-C raises KeyboardInterrupt at once. The signal may reach one
rank only, so with several ranks use `agreed` in place of `requested`.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from llm_fp8.distributed.process_group import largest

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GracefulStop:
    """Turns the first SIGTERM or SIGINT into `requested`, its name; in the main thread only."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.what_follows = "finishing this step, then saving and stopping"
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """0, or as a shell says it of the signal: 143 for SIGTERM, 130 for SIGINT."""
        return 0 if self.requested is None else 128 + signal.Signals[self.requested].value

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; if so, sets `requested` on all of them. Collective."""
        number = largest(0 if self.requested is None else signal.Signals[self.requested].value)
        if number and self.requested is None:
            self.requested = signal.Signals(number).name
        return number != 0

    def __enter__(self) -> GracefulStop:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        name = signal.Signals(number).name
        if self.requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = name
        hint = " Press Ctrl-C again to stop at once." if number == signal.SIGINT else ""
        # os.write and not print: the handler may have interrupted a print, and buffered streams cannot be re-entered.
        os.write(2, f"{name} received: {self.what_follows}.{hint}\n".encode())
