"""The exceptions that a script ends on with a sentence instead of a traceback, and the exit codes they come to."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable
from typing import NoReturn

from llm_fp8.utils.ranks import first_to_say

EXIT_FAILED_CHECK = 1
EXIT_USER_ERROR = 2
EXIT_NO_GPU = 3
"""Of the scripts that check a GPU, where there is none: they did what they could."""
EXIT_INTERRUPTED = 130
"""What a shell reports for a program that SIGINT ended."""
STDERR_DESCRIPTOR = 2
"""Of the process. `sys.stderr` may be an object without a descriptor, which a crash cannot write to."""


class UserError(Exception):
    """A mistake in what the user asked for or supplied.

    The message is one sentence (two at most) that names the flag or the file, says what is wrong and what to do.
    Scripts print it without a traceback and exit with code 2.
    """


class FailedCheck(Exception):
    """The program found that what it does is not what it was asked to do, which is nobody's mistake in the options.

    The message says in a sentence or two what was expected, what was seen and what to look at. Scripts print it without
    a traceback and exit with code 1.
    """


class OneSentenceParser(argparse.ArgumentParser):
    """A parser of command lines that ends a mistake in them with one sentence and code 2, without the list of all
    options.
    """

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, once for all processes of a launch, and exit."""
        text = f"error: {message}; '{self.prog} --help' lists the options.\n"
        self.exit(EXIT_USER_ERROR, text if first_to_say(text) else None)


def run_script(main: Callable[[], int]) -> None:
    """Run `main` and exit with its code, with one sentence and code 2 on a `UserError` or 1 on a `FailedCheck`, or with
    130 on Ctrl-C.

    Of the processes of one launch that make the same mistake, one says it. A crash inside a native library ends the
    process by its signal, as it would anyway, but first prints where Python was.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(file=STDERR_DESCRIPTOR)
    try:
        code = main()
    except (UserError, FailedCheck) as error:
        if first_to_say(str(error)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILED_CHECK
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)
