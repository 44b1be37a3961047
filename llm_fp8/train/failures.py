"""Failures of the machine (GPU memory, disk, a lost process) as one sentence with a remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from llm_fp8.distributed.process_group import is_loss_of_a_peer
from llm_fp8.observability.metrics import GIB
from llm_fp8.utils.errors import UserError, reason_not_written


@contextlib.contextmanager
def explained_failures(folder: Path) -> Iterator[None]:
    """Turn running out of GPU memory or disk, or losing another process, into a `UserError`; `folder` is the run's."""
    go_on = f"Continue with --resume_from latest --output_dir {folder}."
    try:
        yield
    except torch.OutOfMemoryError as error:
        used = f" ({torch.cuda.max_memory_allocated() / GIB:.1f} GiB at the peak)" if torch.cuda.is_available() else ""
        advice = "lower --batch_size, or add --gradient_checkpointing; 'llm-fp8 memory' says what fits"
        raise UserError(f"the GPU is out of memory{used}: {advice}.") from error
    except OSError as error:  # of libraries that write to their caches it names no file
        written = Path(error.filename) if isinstance(error.filename, str) else folder
        if reason := reason_not_written(error):
            raise UserError(f"{written} (--output_dir, HF_HOME or TMPDIR): {reason}. {go_on}") from error
        raise
    except RuntimeError as error:
        if not is_loss_of_a_peer(error):
            raise
        words = str(error).splitlines()[0][:200]
        raise UserError(f"another process of this run is gone, see what it said: {words}. {go_on}") from error
