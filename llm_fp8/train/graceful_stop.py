"""Stopping a run from outside without losing work.

Inside of `GracefulStop` the first SIGTERM (Slurm, Kubernetes, torchrun), SIGHUP (a closed ssh) or SIGINT (Ctrl-C) only
sets a flag, and the run saves after its step and returns `exit_code`. A later Ctrl-C raises KeyboardInterrupt at once.
The signal may reach one rank only, so with several ranks use `agreed` in place of `requested`. A run whose folder was
moved or deleted stops in the same way.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from llm_fp8.distributed.process_group import largest
from llm_fp8.utils.console import outliving_the_terminal

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
LOST = "the loss of its folder"
_REASONS = (None, LOST, *(number.name for number in SIGNALS))  # the later one counts where ranks have several


class GracefulStop:
    """Turns the first of `SIGNALS` into `requested`, its name (or `LOST`); in the main thread only."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.what_follows = "finishing this step, then saving and stopping"
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """0, or as a shell says it of the signal: 143 for SIGTERM, 130 for SIGINT, 129 for SIGHUP."""
        return 0 if self.requested is None else 128 + signal.Signals[self.requested].value

    def agreed(self, is_lost: bool = False) -> bool:
        """Whether any rank was asked to stop or has lost its folder; if so, sets `requested` on all. Collective."""
        reason = _REASONS[largest(_REASONS.index(self.requested or (LOST if is_lost else None)))]
        self.requested = self.requested or reason
        return reason is not None

    def __enter__(self) -> GracefulStop:
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it ignored
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
        with outliving_the_terminal(hung_up=number == signal.SIGHUP):
            os.write(2, f"{name} received: {self.what_follows}.{hint}\n".encode())
