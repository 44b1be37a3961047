"""Stop a run by a signal without losing work.

In the context `GracefulStop`, the first SIGTERM (Slurm, Kubernetes, torchrun), SIGHUP (a closed ssh) or SIGINT (Ctrl-C)
only sets a flag. The run then finishes its step, saves and returns `exit_code`, even if its output is closed. If only
the output is closed (`| head`), the run stops in the same way. A second Ctrl-C raises KeyboardInterrupt at once. If
there are several ranks, only some may get the signal. Then call `agreed` instead of reading `requested`.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from llm_fp8.distributed.process_group import largest
from llm_fp8.utils import output

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_REASONS = (None, *(number.name for number in (signal.SIGPIPE, *SIGNALS)))  # if ranks differ, the last one is used


class GracefulStop:
    """Context manager that catches `SIGNALS` in the main thread and stores the first one's name in `requested`."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self.what_follows = "finishing this step, then saving and stopping"
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """The shell's exit code for the signal (SIGTERM: 143, SIGINT: 130, SIGHUP: 129), or 0 without a signal."""
        return 0 if self.requested is None else 128 + signal.Signals[self.requested].value

    def agreed(self) -> bool:
        """Return True, and set `requested` on all ranks, if any rank got a signal. All ranks must call this method."""
        reason = _REASONS[largest(_REASONS.index(self.requested))]
        self.requested = self.requested or reason
        return reason is not None

    def __enter__(self) -> GracefulStop:
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._previous[number] = signal.signal(number, self._handle)
        output.on_closed_pipe = self._lose_reader
        return self

    def __exit__(self, *_: object) -> None:
        output.on_closed_pipe = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _lose_reader(self) -> None:
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # with nohup, the run continues
            self.requested = self.requested or signal.SIGPIPE.name

    def _handle(self, number: int, _: object) -> None:
        name = signal.Signals(number).name
        if self.requested not in (None, signal.SIGPIPE.name):  # the output may be closed before the signal arrives
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = name
        hint = " Press Ctrl-C again to stop at once." if number == signal.SIGINT else ""
        # Not `print`, which the handler may have interrupted: buffered streams are not reentrant.
        with output.surviving_closed_output():
            os.write(2, f"{name} received: {self.what_follows}.{hint}\n".encode())
