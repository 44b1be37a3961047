"""What goes to the console: a run's own lines, tables, and as few of other libraries' words as possible."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

on_closed_pipe: Callable[[], object] | None = None
"""Called once nobody reads the output; while it is None, the print that notices raises BrokenPipeError."""


@contextlib.contextmanager
def surviving_closed_output() -> Iterator[None]:
    """Print in the block. Once the terminal is gone, or the reader of a pipe (`| tee`) where `on_closed_pipe` is set,
    this and all later output goes to /dev/null.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise
        if error.errno == errno.EPIPE and on_closed_pipe is None:
            time.sleep(0.5)  # the Ctrl-C that ended the reader may be on its way to this process
            raise
        discard_closed_output()
        if error.errno == errno.EPIPE and on_closed_pipe is not None:
            on_closed_pipe()


def closed_outputs() -> list[int]:
    """Return those of the descriptors 1 and 2 whose terminal or reader is gone."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return [descriptor for descriptor, events in poll.poll(0) if events & (select.POLLERR | select.POLLHUP)]


def discard_closed_output() -> None:
    """Point the `closed_outputs` to /dev/null, so that a later flush cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in closed_outputs():
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


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
