"""Start and end a program: environment variables, imports, exit codes, and one-sentence error messages."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from llm_fp8.utils import errors
from llm_fp8.utils.output import closed_outputs, discard_output
from llm_fp8.utils.ranks import launcher_store

IMPORTED_S = time.perf_counter()

CUDA_DEFAULTS = {  # CUDA's libraries read these once, so they are set before torch is imported
    # Expandable segments reduce memory fragmentation.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Otherwise Transformer Engine multiplies fp32 matrices in TF32.
    "NVIDIA_TF32_OVERRIDE": "0",
}

EXIT_FAILED_CHECK, EXIT_USER_ERROR, EXIT_NO_GPU = 1, 2, 3
EXIT_INTERRUPTED, EXIT_OUTPUT_CLOSED = 130, 141
"""The exit codes that a shell reports for a program that SIGINT or SIGPIPE ended."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while the block imports modules (5 s, not 7). Later collections skip these modules."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def open_missing_output() -> None:
    """Open /dev/null for closed standard streams (`>&-`). Otherwise a file opened later would receive their output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))


def writable(text: str) -> Path:
    """Return an output file's path and create its folder. Raise `ArgumentTypeError` if the file is not writable."""
    path = Path(text).expanduser()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or (path.is_file() and os.access(path, os.W_OK)):  # not a folder, device or pipe
            with tempfile.TemporaryFile(dir=path.parent):  # for root, `os.access` is True even in /proc
                return path
    raise argparse.ArgumentTypeError(f"{path} cannot be written; give a file in a folder that can")


def _explanation(error: Exception) -> str | None:
    """Return one sentence that explains `error`, or None if only the traceback explains it."""
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
        if reason := errors.unwritable_reason(error):
            return f"{error.filename or 'a cache (HF_HOME, HF_DATASETS_CACHE or TMPDIR)'}: {reason}."
    return errors.lost_worker(error)


def first_to_end() -> bool:
    """Return True if no other process of the launch is known to have ended. The first process to end prints why."""
    with contextlib.suppress(RuntimeError, ValueError):  # the launcher is gone (DistError), or its port is not a number
        if (store := launcher_store()) is not None:
            return store.add(f"llm_fp8/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    return True


def run_script(main: Callable[[], int]) -> None:
    """Run `main` and exit with the code that it returns. If it raises an error for which `_explanation` has a sentence,
    one process of the launch prints it, with exit code 2 (`FailedCheck`: 1; Ctrl-C: 130; a closed pipe: 141).
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
        sentence = _explanation(error)
        if isinstance(error, BrokenPipeError) and closed_outputs():
            code = code or EXIT_OUTPUT_CLOSED
        elif sentence is None:
            raise
        else:
            code = EXIT_FAILED_CHECK if isinstance(error, errors.FailedCheck) else EXIT_USER_ERROR
            closing_line = f"error: {sentence}" if first_to_end() else ""
    if closing_line:
        with contextlib.suppress(OSError):  # the reader may be gone
            print(closing_line, file=sys.stderr, flush=True)
    discard_output(closed_outputs())
    sys.exit(code)
