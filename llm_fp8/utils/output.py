"""Print lines to standard output, above progress bars. The output may be closed while the process runs."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator

from llm_fp8.utils.errors import FULL_DISK

on_closed_pipe: Callable[[], object] | None = None
"""Callback for the case that the reader of the output ends, so that a run can save. If None, failed prints raise."""


@contextlib.contextmanager
def surviving_closed_output() -> Iterator[None]:
    """If printing in the block fails because the terminal is gone, ignore the error and send later output to /dev/null.
    If the module's `on_closed_pipe` is set, also survive a full disk and a closed pipe, and call it for the latter.
    """
    try:
        yield
    except OSError as error:
        lost_pipe, is_full = error.errno == errno.EPIPE, error.errno in FULL_DISK
        if error.errno != errno.EIO and (on_closed_pipe is None or not (lost_pipe or is_full)):
            if lost_pipe:
                time.sleep(0.5)  # the Ctrl-C that ended the reader may arrive here too
            raise
        lost = [1, 2] if is_full else closed_outputs()
        discard_output(lost)
        if lost == [1]:
            os.dup2(2, 1)  # after `| tee` has ended, stderr shows that the run was saved, and how to continue
        if lost_pipe and on_closed_pipe is not None:
            on_closed_pipe()


def closed_outputs() -> list[int]:
    """Return which of the descriptors 1 (stdout) and 2 (stderr) have lost their terminal or reader."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return [descriptor for descriptor, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]


def discard_output(descriptors: Iterable[int]) -> None:
    """Redirect `descriptors` to /dev/null, so that a later flush cannot fail. Skip open terminals."""
    with open(os.devnull, "w") as nowhere:
        for descriptor in descriptors:
            if not os.isatty(descriptor):
                os.dup2(nowhere.fileno(), descriptor)


@surviving_closed_output()
def say(text: str) -> None:
    from tqdm import tqdm  # not imported above, since missing packages are reported only after this module is loaded

    with tqdm.external_write_mode():
        print(f"{text}\n", end="", flush=True)  # in one write, which no message of a signal handler divides
