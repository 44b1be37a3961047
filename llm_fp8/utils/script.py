"""How a script starts (before the import of torch: variables that CUDA's libraries read once, imports without garbage
collection, a clock of its phases) and ends: with an exit code, and one sentence where an error explains itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import re
import sys
import time
from collections.abc import Callable, Iterator

from llm_fp8.utils import errors
from llm_fp8.utils.console import closed_outputs, discard_output, open_missing_output
from llm_fp8.utils.ranks import first_to_end

IMPORTED_S = time.perf_counter()

CUDA_DEFAULTS = {
    # Growing segments leave less unusable memory between blocks of many sizes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Transformer Engine multiplies fp32 matrices in TF32 otherwise: fp32 would not be fp32.
    "NVIDIA_TF32_OVERRIDE": "0",
}

EXIT_INTERRUPTED = 130
EXIT_OUTPUT_CLOSED = 141
"""Exit codes that a shell reports for a program ended by SIGINT or SIGPIPE."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import in the block without garbage collections, and exclude the imported objects from later ones: 5 s instead of
    7 for torch and transformers.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class PhaseClock:
    """Seconds of wall time by phase (`phases_s` in summary.json); the first begins at `begun_s` (time.perf_counter)."""

    def __init__(self, begun_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._reached_s = time.perf_counter() if begun_s is None else begun_s

    def end(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.seconds[phase] = now_s - self._reached_s
        self._reached_s = now_s


def _in_one_sentence(error: Exception) -> str | None:
    """Return the sentence for an error that ends a script; None for one that only its traceback explains."""
    if isinstance(error, (errors.UserError, errors.FailedCheck)):
        return str(error)
    words = " ".join(str(error).split())[:100]
    if errors.is_out_of_memory(error):
        torch, where, peak = sys.modules.get("torch"), "this host", ""
        if torch is not None and torch.cuda.is_initialized() and not re.search(errors.NO_HOST_MEMORY, words, re.I):
            where, peak = "the GPU", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at the peak; "
        advice = "lower --batch_size, or add --gradient_checkpointing; 'llm-fp8 memory' says what fits"
        return f"{where} is out of memory ({peak}{words}): {advice}."
    if isinstance(error, ImportError) and not str(error.name).startswith(("llm_fp8", "te_llama", "train_")):
        fix = "take that of .venv (scripts/quickstart.sh makes it), or run: pip install -r requirements.txt"
        return f"the Python {sys.executable} lacks what this program needs ({words}); {fix}"
    if (
        isinstance(error, OSError)
        and (error.filename or error.errno in errors.FULL_DISK)
        and (reason := errors.reason_not_written(error))
    ):
        return f"{error.filename or 'a cache (HF_HOME or TMPDIR)'}: {reason}."
    return errors.lost_worker(error)


def run_script(main: Callable[[], int]) -> None:
    """Run `main` and exit with its code. If `_in_one_sentence` explains an error, one process of the launch prints the
    sentence, and the code is 2, or 1 for a `FailedCheck`. The code is 130 on Ctrl-C, 141 on a closed pipe (`| head`).
    `main` imports what it needs, so that a missing package is such an error.
    """
    open_missing_output()
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # `sys.stderr` may have no descriptor
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters that the console's encoding lacks
    code, last_words = 0, ""
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code, last_words = EXIT_INTERRUPTED, "interrupted"
    except Exception as error:
        sentence = _in_one_sentence(error)
        if isinstance(error, BrokenPipeError) and closed_outputs():
            code = code or EXIT_OUTPUT_CLOSED
        elif sentence is None:
            raise
        else:
            code = errors.EXIT_FAILED_CHECK if isinstance(error, errors.FailedCheck) else errors.EXIT_USER_ERROR
            last_words = f"error: {sentence}" if first_to_end() else ""
    if last_words:
        with contextlib.suppress(OSError):  # nobody may read them
            print(last_words, file=sys.stderr, flush=True)
    discard_output(closed_outputs())
    sys.exit(code)
