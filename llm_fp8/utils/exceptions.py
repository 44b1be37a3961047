"""The exceptions that a script ends on with a sentence instead of a traceback."""


class UserError(Exception):
    """A mistake in what the user asked for or supplied: one sentence that names the flag or the file, says what is
    wrong and what to do. Scripts print it without a traceback and exit with code 2.
    """


class FailedCheck(Exception):
    """The program does not do what it was asked to do, and the options are not at fault: a sentence that says what was
    expected and what was seen. Scripts print it without a traceback and exit with code 1.
    """
