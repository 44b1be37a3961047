"""Start, output and end of a script: variables that CUDA's libraries read once, to be set before torch is imported;
imports without garbage collection; a clock of phases; printing; exit codes, and one sentence for an expected error.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import io
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from llm_fp8.utils import errors
from llm_fp8.utils.ranks import first_to_end

IMPORTED_S = time.perf_counter()

CUDA_DEFAULTS = {
    # Expandable segments leave less unusable memory between blocks of different sizes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Otherwise Transformer Engine multiplies fp32 matrices in TF32.
    "NVIDIA_TF32_OVERRIDE": "0",
}

EXIT_INTERRUPTED, EXIT_OUTPUT_CLOSED = 130, 141
"""Exit codes that a shell reports for a program ended by SIGINT or SIGPIPE."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import in the block without garbage collections (5 s instead of 7), and exempt new objects from later ones."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class PhaseClock:
    """Wall time of phases in seconds (`phases_s` in summary.json); the first begins at `start_s` (perf_counter)."""

    def __init__(self, start_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._reached_s = time.perf_counter() if start_s is None else start_s

    def end(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.seconds[phase] = now_s - self._reached_s
        self._reached_s = now_s


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
        lost_pipe, is_full = error.errno == errno.EPIPE, error.errno in errors.FULL_DISK
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


def open_missing_output() -> None:
    """Open /dev/null for standard streams closed at the start (`>&-`): else a file opened later gets their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))


@surviving_closed_output()
def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def quiet_libraries() -> None:
    """Silence the libraries on the console; on a terminal, bars of downloads and tokenisation stay."""
    import datasets
    import huggingface_hub
    import transformers

    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it also prints errors that it raises
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def _in_one_sentence(error: Exception) -> str | None:
    """Return the sentence for an error that ends a script; None if only the traceback explains the error."""
    if isinstance(error, (errors.UserError, errors.FailedCheck)):
        return str(error)
    text = " ".join(str(error).split())[:100]
    if errors.is_out_of_memory(error):
        torch, where, peak = sys.modules.get("torch"), "this host", ""
        if torch is not None and torch.cuda.is_initialized() and not re.search(errors.NO_HOST_MEMORY, text, re.I):
            where, peak = "the GPU", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak; "
        advice = "lower --batch_size, or add --gradient_checkpointing; 'llm-fp8 memory' shows what fits"
        return f"{where} is out of memory ({peak}{text}): {advice}."
    if isinstance(error, ImportError) and not str(error.name).startswith(("llm_fp8", "te_llama", "train_")):
        fix = "use that of .venv (scripts/quickstart.sh creates it), or run: pip install -r requirements.txt"
        return f"the Python {sys.executable} lacks what this program needs ({text}); {fix}"
    if isinstance(error, OSError) and (error.filename or error.errno in errors.FULL_DISK):
        if reason := errors.reason_not_written(error):
            return f"{error.filename or 'a cache (HF_HOME or TMPDIR)'}: {reason}."
    return errors.lost_worker(error)


def run_script(main: Callable[[], int]) -> None:
    """Run `main`, which imports what it needs, and exit with its code. If `_in_one_sentence` explains an error, one
    process of the launch prints the sentence, and the code is 2 (1 for a `FailedCheck`). The code is 130 after Ctrl-C
    and 141 after a closed pipe.
    """
    open_missing_output()
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # `sys.stderr` may have no descriptor
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the console's encoding lacks
    code, closing_line = 0, ""
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code, closing_line = EXIT_INTERRUPTED, "interrupted"
    except Exception as error:
        sentence = _in_one_sentence(error)
        if isinstance(error, BrokenPipeError) and closed_outputs():
            code = code or EXIT_OUTPUT_CLOSED
        elif sentence is None:
            raise
        else:
            code = errors.EXIT_FAILED_CHECK if isinstance(error, errors.FailedCheck) else errors.EXIT_USER_ERROR
            closing_line = f"error: {sentence}" if first_to_end() else ""
    if closing_line:
        with contextlib.suppress(OSError):  # the reader may be gone
            print(closing_line, file=sys.stderr, flush=True)
    discard_output(closed_outputs())
    sys.exit(code)
