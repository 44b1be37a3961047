"""Exceptions that end a script with one sentence instead of a traceback, and a context manager that raises them."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn


class UserError(Exception):
    """A mistake in options or files. The message is one sentence: flag or file, problem, advice. The exit code is 2."""


class FailedCheck(Exception):
    """A check that failed although the options are correct. Scripts print the message and exit with code 1."""


@contextlib.contextmanager
def reading(flag: str, name: object, content: str = "it", advice: str = "") -> Iterator[None]:
    """Convert an error of a library or file system in the block to a `UserError`: "{flag} {name}: cannot read {content}
    (error). {advice}". Do not convert `UserError`, `FailedCheck`, or an error which says that memory or disk is full.
    """
    try:
        yield
    except BaseException as error:  # a Rust panic in tokenizers is not an `Exception`
        kind, cause = type(error).__name__, error.__cause__ or error.__context__
        if isinstance(cause, KeyboardInterrupt):  # `datasets` hides it while waiting for workers
            raise cause from None
        is_full = isinstance(error, OSError) and error.errno in FULL_DISK
        raises = isinstance(error, (UserError, FailedCheck)) or is_out_of_memory(error) or is_full or lost_worker(error)
        if raises or not (isinstance(error, Exception) or kind == "PanicException"):
            raise
        text = " ".join(str(error).split())[:300] or kind
        if re.search("no space left|not enough disk space|quota exceeded", text, re.IGNORECASE):  # in other classes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise UserError(f"{flag} {name}: cannot read {content} ({kind}: {text}). {advice}".rstrip()) from error


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_HOST_MEMORY = "(can't|cannot|unable to) allocate(?! memory in static TLS)"
_NO_MEMORY = f"out ?of ?memory|_STATUS_ALLOC_FAILED|resource allocation failed|calling `cublasCreate|{NO_HOST_MEMORY}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` means that GPU or host memory is full. Its type and text depend on the library."""
    matches = re.search(_NO_MEMORY, f"{type(error).__name__}: {error}", re.IGNORECASE) is not None
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and matches)


def lost_worker(error: BaseException) -> str | None:
    """Return a message for the user if `error` means that a worker process of `datasets` was killed, else None."""
    is_lost = "abruptly died" in str(error) or type(error).__module__ == "multiprocess.context"
    killed = "a process that reads or tokenises the data was killed, as Linux does when memory runs out"
    return f"{killed}: free memory, or use fewer processes (taskset -c 0-3 python ...)" if is_lost else None


def nearest_existing(path: Path) -> Path:
    """Return `path` or its nearest parent that exists. A broken link counts as existing."""
    return next(part for part in (path, *path.absolute().parents) if os.path.lexists(part))


def unwritable_reason(error: OSError) -> str | None:
    """Return the system's message if `error` means that a file cannot be written (full disk, permission), else None."""
    # A writable file may be denied too, for example a program that is not executable.
    is_writable = isinstance(error.filename, (str, Path)) and os.access(error.filename, os.W_OK)
    denied = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG) and not is_writable
    return os.strerror(error.errno or 0) if error.errno in FULL_DISK or denied else None


def listed(names: Iterable[str]) -> str:
    """Return text that lists the first four of `names` and gives the number of the others."""
    all_names = list(names)
    return ", ".join(all_names[:4]) + (f" and {len(all_names) - 4} more" if len(all_names) > 4 else "")


def did_you_mean(name: str, choices: Iterable[object]) -> str:
    """Return ' (did you mean X?)' if one or two of `choices` start with `name`, or else for the most similar one."""
    by_text = {str(choice).lower(): choice for choice in choices}
    starts = [text for text in by_text if text.startswith(name.lower())]
    best = difflib.get_close_matches(name.lower(), starts or by_text, n=1, cutoff=0.0 if 0 < len(starts) < 3 else 0.7)
    return f" (did you mean {by_text[best[0]]}?)" if best else ""


_BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}


def number(number_type: type, **bounds: float) -> Callable[[str], Any]:
    """Return a function that parses a number within `bounds`, for example at_least=1. Integers must be below 2^31."""

    def read(word: str) -> Any:
        value = int(float(word)) if number_type is int and float(word).is_integer() else number_type(word)
        for bound, limit in ({"below": 2**31} | bounds if number_type is int else bounds).items():
            if not (math.isfinite(value) and _BOUNDS[bound](value, limit)):
                raise argparse.ArgumentTypeError(f"must be {bound.replace('_', ' ')} {limit}, not {word}")
        return value

    read.__name__ = number_type.__name__  # for argparse's message
    return read


positive = number(int, at_least=1)


class OneSentenceParser(argparse.ArgumentParser):
    """A command-line parser that raises a one-sentence `UserError` for a mistake, instead of printing all options."""

    full_help = "--help"
    origin = ""  # prefix of errors about arguments that are not from the command line

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The shell does not expand `~` after `=`, so a folder named `~` would be created.
        self.register("type", Path, lambda word: Path(os.path.expanduser(word)))

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` with argparse's `message`. For an unknown option or choice, suggest a similar one."""
        if message.startswith("unrecognized arguments: "):
            words = dict.fromkeys(word.partition("=")[0] for word in message.split() if re.match("--?[a-z]", word))
            if len(words) > 2:  # those of another program, for example; in a file they have no hyphens
                names = {word: word.lstrip("-") if self.origin else word for word in words}
                lines = (f"  {name}: {self.hint(word) or 'not known'}" for word, name in names.items())
                raise UserError("\n".join((f"{self.origin}these options are unknown:", *lines)))
            message += "".join(f" ({word}: {hint})" for word in words if (hint := self.hint(word)))
        elif choice := re.match(r"argument (\S+?)[:/].*invalid choice: '(.*?)'", message):
            actions = [action for action in self._actions if choice[1] in (*action.option_strings, action.metavar)]
            message += "".join(did_you_mean(choice[2], action.choices or ()) for action in actions)
        message = re.sub(r"invalid (\w+_\w+) value:", lambda m: f"must be a {m[1].replace('_', ' ')}, not", message)
        raise UserError(f"{self.origin}{message}; '{self.prog} {self.full_help}' lists the options.")

    def hint(self, option: str) -> str:
        """Return advice about an unknown `option`, such as 'did you mean X?', or ''."""
        return did_you_mean(option, self._option_string_actions).strip(" ()")
