"""Exceptions that end a script with a sentence instead of a traceback, and the conversion of bad input to one."""

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

EXIT_FAILED_CHECK, EXIT_USER_ERROR, EXIT_NO_GPU = 1, 2, 3


class UserError(Exception):
    """A mistake in options or files: a sentence with the flag or file, what is wrong and what to do; exit code 2."""


class FailedCheck(Exception):
    """A check of the program failed though the options are right: a sentence that scripts print; exit code 1."""


@contextlib.contextmanager
def reading(flag: str, name: object, what: str = "it", advice: str = "") -> Iterator[None]:
    """Turn an error of a library or the file system in the block into a `UserError`, "{flag} {name}: cannot read {what}
    (its words). {advice}". A `UserError`, exhausted memory, a full disk, a killed worker and signals pass unchanged.
    """
    try:
        yield
    except BaseException as error:  # tokenizers panics in Rust with an exception that is no `Exception`
        kind, cause = type(error).__name__, error.__cause__ or error.__context__
        if isinstance(cause, KeyboardInterrupt):  # as `datasets` hides it while it waits for its workers
            raise cause from None
        is_full = isinstance(error, OSError) and error.errno in FULL_DISK
        passes = isinstance(error, (UserError, FailedCheck)) or is_out_of_memory(error) or is_full or lost_worker(error)
        if passes or not (isinstance(error, Exception) or kind == "PanicException"):
            raise
        words = " ".join(str(error).split())[:300] or kind
        raise UserError(f"{flag} {name}: cannot read {what} ({kind}: {words}). {advice}".rstrip()) from error


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_HOST_MEMORY = "(can't|cannot|unable to) allocate(?! memory in static TLS)"
_NO_MEMORY = f"out ?of ?memory|_STATUS_ALLOC_FAILED|resource allocation failed|calling `cublasCreate|{NO_HOST_MEMORY}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if type or text show that memory of a GPU or the host is exhausted; CUDA's libraries differ."""
    matches = re.search(_NO_MEMORY, f"{type(error).__name__}: {error}", re.IGNORECASE) is not None
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and matches)


def lost_worker(error: BaseException) -> str | None:
    """Return a sentence if the error says that a worker process of `datasets` is gone; None for another error."""
    is_lost = "abruptly died" in str(error) or type(error).__module__ == "multiprocess.context"
    advice = "free memory, or start fewer of them (taskset -c 0-3 python ...)"
    killed = "a process that reads or tokenises the data was killed, as Linux does when memory runs out"
    return f"{killed}: {advice}" if is_lost else None


def existing_part(path: Path) -> Path:
    """Return `path` or its nearest parent that exists; a broken link counts as existing."""
    return next(part for part in (path, *path.absolute().parents) if os.path.lexists(part))


def reason_not_written(error: OSError) -> str | None:
    """Return the system's words for a file that cannot be written (full disk, permission); None for another error."""
    refusals = (*FULL_DISK, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
    return os.strerror(error.errno) if error.errno in refusals else None


def listed(names: Iterable[str]) -> str:
    """List the first few of `names`, for a message."""
    every = list(names)
    return ", ".join(every[:4]) + (f" and {len(every) - 4} more" if len(every) > 4 else "")


def did_you_mean(wrong: str, known: Iterable[object]) -> str:
    """Return ' (did you mean X?)' for a name in `known` that begins with or resembles `wrong`; '' for none or many."""
    wrong, names = wrong.lower(), {str(name).lower(): name for name in known}
    near = [name for name in names if name.startswith(wrong)] or [name for name in names if _resembles(wrong, name)]
    best = difflib.get_close_matches(wrong, near, n=1, cutoff=0) if len(near) < 3 else []
    return f" (did you mean {names[best[0]]}?)" if best else ""


def _resembles(wrong: str, name: str) -> bool:
    """Return True if `name` has each word of `wrong`, perhaps longer, and at most two more, or is spelt much alike."""
    words, parts = (re.findall(r"[a-z]+|\d+", each) for each in (wrong, name))
    has_words = all(any(part.startswith(word) for part in parts) for word in words)
    alike = difflib.SequenceMatcher(None, wrong, name).ratio() > 0.85
    return alike or (has_words and len(parts) <= len(words) + 2)


_BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}


def number(kind: type, **bounds: float) -> Callable[[str], Any]:
    """Return an option's type: a number within `bounds`, as at_least=1; an integer always has an upper bound."""

    def read(word: str) -> Any:
        value = kind(word)
        for bound, limit in ({"below": 2**31} | bounds if kind is int else bounds).items():
            if not (math.isfinite(value) and _BOUNDS[bound](value, limit)):
                raise argparse.ArgumentTypeError(f"must be {bound.replace('_', ' ')} {limit}, not {word}")
        return value

    read.__name__ = kind.__name__  # for argparse's message
    return read


positive = number(int, at_least=1)


class OneSentenceParser(argparse.ArgumentParser):
    """A command line parser that reports a mistake in one sentence, a `UserError`, without listing all options."""

    full_help = "--help"
    origin = ""  # prefix of an error about words that are not from the command line

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The shell replaces no `~` after `=`, and a folder of that name would be made.
        self.register("type", Path, lambda word: Path(os.path.expanduser(word)))

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` with `message` and the name that was probably meant."""
        if message.startswith("unrecognized arguments: "):
            words = [word.partition("=")[0] for word in message.split() if re.match("--?[a-z]", word)]
            message += "".join(dict.fromkeys(map(self.hint, words)))
        elif choice := re.match(r"argument (\S+?)[:/].*invalid choice: '(.*?)'", message):
            of = [action for action in self._actions if choice[1] in (*action.option_strings, action.metavar)]
            message += "".join(did_you_mean(choice[2], action.choices or ()) for action in of)
        message = re.sub(r"invalid (\w+_\w+) value:", lambda kind: f"must be {kind[1].replace('_', ' ')}, not", message)
        raise UserError(f"{self.origin}{message}; '{self.prog} {self.full_help}' lists the options.")

    def hint(self, option: str) -> str:
        """Return a hint ' (...)' for the error about an unknown `option`, or ''."""
        return did_you_mean(option, self._option_string_actions)
