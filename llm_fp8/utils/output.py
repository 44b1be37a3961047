"""Output of a process, which may be closed while the process runs."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator

from llm_fp8.utils.errors import FULL_DISK

on_closed_pipe: Callable[[], object] | None = None
"""Callback of a run that has to save work when the reader of its output ends. If it is None, failed prints raise."""


@contextlib.contextmanager
def surviving_closed_output() -> Iterator[None]:
    """Survive failed prints in the block: send all later output to /dev/null if the terminal is gone and, with
    `on_closed_pipe` set, also if the reader of a pipe (`| tee`) is gone or a log's disk is full.
    """
    try:
        yield
    except OSError as error:
        lost_pipe, is_full = error.errno == errno.EPIPE, error.errno in FULL_DISK
        if error.errno != errno.EIO and (on_closed_pipe is None or not (lost_pipe or is_full)):
            if lost_pipe:
                time.sleep(0.5)  # the Ctrl-C that ended the reader may be on its way to this process
            raise
        discard_output([1, 2] if is_full else closed_outputs())
        if lost_pipe and on_closed_pipe is not None:
            on_closed_pipe()


def closed_outputs() -> list[int]:
    """Return those of the descriptors 1 and 2 whose terminal or reader is gone."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return [descriptor for descriptor, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]


def discard_output(descriptors: Iterable[int]) -> None:
    """Point these descriptors to /dev/null, so that a later flush cannot fail; leave live terminals alone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        if not os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


@surviving_closed_output()
def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)
