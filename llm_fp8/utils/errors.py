"""How a mistake becomes a sentence instead of a traceback, and the exit codes of scripts."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import faulthandler
import io
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from llm_fp8.utils.exceptions import FailedCheck as FailedCheck
from llm_fp8.utils.exceptions import UserError as UserError
from llm_fp8.utils.ranks import first_to_say

EXIT_FAILED_CHECK = 1
EXIT_USER_ERROR = 2
EXIT_NO_GPU = 3
EXIT_INTERRUPTED = 130
EXIT_OUTPUT_CLOSED = 141
"""The last two are what a shell reports for a program that SIGINT or SIGPIPE ended."""


@contextlib.contextmanager
def reading(flag: str, name: object, what: str = "it", advice: str = "") -> Iterator[None]:
    """Turn whatever a library or the file system raises in the block into a `UserError` of one line, with its words:
    "{flag} {name}: cannot read {what} (...). {advice}". It stands around each place where a file, a folder or a library
    is asked. A `UserError`, exhausted memory and signals pass unchanged.
    """
    try:
        yield
    except BaseException as error:  # tokenizers panics in Rust with an exception that is no `Exception`
        kind = type(error).__name__
        passes = isinstance(error, (UserError, FailedCheck)) or is_out_of_memory(error)
        if passes or not (isinstance(error, Exception) or kind == "PanicException"):
            raise
        words = " ".join(str(error).split())[:300] or kind
        raise UserError(f"{flag} {name}: cannot read {what} ({kind}: {words}). {advice}".rstrip()) from error


_NO_HOST_MEMORY = "(can't|cannot|unable to) allocate(?! memory in static TLS)"
_NO_MEMORY = f"out ?of ?memory|_STATUS_ALLOC_FAILED|resource allocation failed|calling `cublasCreate|{_NO_HOST_MEMORY}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a GPU or of the host is exhausted, as far as type and text tell; CUDA's libraries differ."""
    told = re.search(_NO_MEMORY, f"{type(error).__name__}: {error}", re.IGNORECASE) is not None
    return isinstance(error, MemoryError) or (isinstance(error, Exception) and told)


def existing_part(path: Path) -> Path:
    """`path`, or the first part above it that exists; a link that leads nowhere does."""
    return next(part for part in (path, *path.absolute().parents) if os.path.lexists(part))


def reason_not_written(error: OSError) -> str | None:
    """The system's word for a file that could not be written (a full disk, no permission); None for another error."""
    not_written = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
    return os.strerror(error.errno) if error.errno in not_written else None


def listed(names: Iterable[str]) -> str:
    """The first few of `names`, for a message."""
    found = list(names)
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def did_you_mean(wrong: str, known: Iterable[object]) -> str:
    """' (did you mean X?)' with the name in `known` that begins so or `wrong` is a slip for; empty for none or many."""
    wrong, names = wrong.lower(), {str(name).lower(): name for name in known}
    near = [name for name in names if name.startswith(wrong)] or [name for name in names if _is_slip(wrong, name)]
    best = difflib.get_close_matches(wrong, near, n=1, cutoff=0) if len(near) < 3 else []
    return f" (did you mean {names[best[0]]}?)" if best else ""


def _is_slip(wrong: str, name: str) -> bool:
    """Whether `wrong` may stand for `name`: same numbers, and words misspelt, joined, or shortened and left out."""
    words, parts = (re.findall(r"[a-z]+|\d+", each) for each in (wrong, name))
    ratio_of_joined, ratio, most = (0.85, 1, len(words) + 2) if len(words) < len(parts) else (1, 0.74, len(words))

    def is_near(word: str, part: str, ratio: float) -> bool:
        return word == part or (word.isalpha() and difflib.SequenceMatcher(None, word, part).ratio() > ratio)

    begins = all(any(part.startswith(word) or is_near(word, part, ratio) for part in parts) for word in words)
    return (begins and len(parts) <= most) or is_near("".join(words), "".join(parts), ratio_of_joined)


_BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}


def number(kind: type, **bounds: float) -> Callable[[str], Any]:
    """The type of an option that is a number within `bounds`, as at_least=1; an integer always has an upper one."""

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
    origin = ""
    """Begins an error about words that are not from the command line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The shell replaces no `~` after `=`, and a folder of that name would be made.
        self.register("type", Path, lambda word: Path(os.path.expanduser(word)))

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` of what is wrong, with what was probably meant."""
        if message.startswith("unrecognized arguments: "):
            words = [word.partition("=")[0] for word in message.split() if re.match("--?[a-z]", word)]
            message += "".join(dict.fromkeys(map(self.hint, words)))
        elif choice := re.match(r"argument (\S+?)[:/].*invalid choice: '(.*?)'", message):
            of = [action for action in self._actions if choice[1] in (*action.option_strings, action.metavar)]
            message += "".join(did_you_mean(choice[2], action.choices or ()) for action in of)
        message = re.sub(r"invalid (\w+_\w+) value:", lambda kind: f"must be {kind[1].replace('_', ' ')}, not", message)
        raise UserError(f"{self.origin}{message}; '{self.prog} {self.full_help}' lists the options.")

    def hint(self, option: str) -> str:
        """What to add to an error about an unknown `option`, ' (...)' or nothing."""
        return did_you_mean(option, self._option_string_actions)


def _in_one_sentence(error: Exception) -> str | None:
    """What a script says of an error that ends it; None for one that only its traceback explains."""
    if isinstance(error, (UserError, FailedCheck)):
        return str(error)
    words = " ".join(str(error).split())[:100]
    if is_out_of_memory(error):
        torch, where, peak = sys.modules.get("torch"), "this host", ""
        if torch is not None and torch.cuda.is_initialized() and not re.search(_NO_HOST_MEMORY, words, re.IGNORECASE):
            where, peak = "the GPU", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak; "
        advice = "lower --batch_size, or add --gradient_checkpointing; 'llm-fp8 memory' says what fits"
        return f"{where} is out of memory ({peak}{words}): {advice}."
    if isinstance(error, ImportError) and not str(error.name).startswith(("llm_fp8", "te_llama", "train_")):
        fix = "take that of .venv (scripts/quickstart.sh makes it), or run: pip install -r requirements.txt"
        return f"the Python {sys.executable} lacks what this program needs ({words}); {fix}"
    if isinstance(error, OSError) and error.filename is not None and (reason := reason_not_written(error)):
        return f"{error.filename}: {reason}."
    return None


def run_script(main: Callable[[], int]) -> None:
    """Run `main` and exit with its code; on an error that `_in_one_sentence` explains with that sentence, printed by
    one process of the launch, and code 2, or 1 for a `FailedCheck`; on Ctrl-C with 130; on a closed pipe (`| head`)
    with 141. `main` imports what it needs, so that a missing package is such an error.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # `sys.stderr` may have no descriptor
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the console's encoding lacks
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(EXIT_OUTPUT_CLOSED)  # what is still to be flushed cannot be
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except Exception as error:
        if (sentence := _in_one_sentence(error)) is None:
            raise
        if first_to_say():
            print(f"error: {sentence}", file=sys.stderr, flush=True)
        code = EXIT_FAILED_CHECK if isinstance(error, FailedCheck) else EXIT_USER_ERROR
    sys.exit(code)
