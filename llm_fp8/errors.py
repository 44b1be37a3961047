"""The one exception that stands for a user's mistake, and how a script ends on it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from llm_fp8.ranks import first_to_say

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
"""What a shell reports for a program that SIGINT ended."""


class UserError(Exception):
    """A mistake in what the user asked for or supplied.

    The message is one sentence (two at most) that names the flag or the file, says what is wrong and what to do.
    Scripts print it without a traceback and exit with code 2.
    """


def run_script(main: Callable[[], int]) -> None:
    """Run `main` and exit with its code, with code 2 and one sentence on a `UserError`, or with 130 on Ctrl-C.

    Of the processes of one launch that make the same mistake, one says it.
    """
    try:
        code = main()
    except UserError as error:
        if first_to_say(str(error)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    sys.exit(code)
