"""Console output: a run's own lines, and as few of other libraries' as possible."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from llm_fp8.utils.errors import FULL_DISK

on_closed_pipe: Callable[[], object] | None = None
"""Callback of a run with work to save, for the end of the output's reader. While it is None, failed prints raise."""


@contextlib.contextmanager
def surviving_closed_output() -> Iterator[None]:
    """Print in the block. Send this and all later output to /dev/null once the terminal is gone or, if `on_closed_pipe`
    is set, once the reader of a pipe (`| tee`) is gone or a log's disk is full.
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
    """List the descriptors, of 1 and 2, whose terminal or reader is gone."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return [descriptor for descriptor, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]


def discard_output(descriptors: Iterable[int]) -> None:
    """Point these descriptors to /dev/null, so that a later flush cannot fail; terminals that live stay."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        if not os.isatty(descriptor):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def open_missing_output() -> None:
    """Open /dev/null for descriptors that are closed at the start (`>&-`): an opened file would get their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout, sys.stderr = (each or open(os.devnull, "w") for each in (sys.stdout, sys.stderr))


@surviving_closed_output()
def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def quiet_libraries() -> None:
    """Leave the console to the run's own lines; on a terminal, bars of downloads and of tokenising stay."""
    import datasets
    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it prints errors that it raises, too
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
