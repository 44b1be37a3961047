"""What ends a run without being anybody's mistake in the options: said in a sentence with what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from llm_fp8.errors import UserError
from llm_fp8.process_group import is_loss_of_a_peer

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


@contextlib.contextmanager
def explained_failures(folder: Path, out_of_memory_advice: Callable[[], str]) -> Iterator[None]:
    """Turn running out of GPU memory or of disk, or losing another process, into a `UserError`.

    Args:
        folder: of the run.
        out_of_memory_advice: called when the GPU's memory was not enough.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(out_of_memory_advice()) from error
    except OSError as error:
        if error.errno not in _WRITE_ERRORS:
            raise
        raise UserError(
            f"{error.filename or folder}: {error.strerror}. Checkpoints saved before are intact; make room or choose another --output_dir, then "
            "continue with --resume_from."
        ) from error
    except RuntimeError as error:
        if not is_loss_of_a_peer(error):
            raise
        raise UserError(
            f"another process of this run is gone (killed, out of memory, or ended by an error of its own, said above), so it cannot go on: "
            f"{str(error).splitlines()[0][:200]}. Complete checkpoints under {folder / 'checkpoints'} are intact; continue with "
            "--resume_from latest."
        ) from error
