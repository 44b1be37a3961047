"""What goes to the console: a run's own lines, tables, and as few of other libraries' words as possible."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator

_hung_up = False


@contextlib.contextmanager
def outliving_the_terminal(hung_up: bool = False) -> Iterator[None]:
    """Print inside: where the terminal is gone, or after SIGHUP (`hung_up`) the reader of a pipe (`| tee`), what is
    printed from now on goes to /dev/null.
    """
    global _hung_up
    _hung_up = _hung_up or hung_up
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE and not _hung_up:
            time.sleep(0.5)  # the SIGHUP that ended the reader may be on its way
        if error.errno != errno.EIO and not (_hung_up and error.errno == errno.EPIPE):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(nowhere, descriptor)


@outliving_the_terminal()
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
