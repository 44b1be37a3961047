"""Other processes: what a program prints, torchrun's command, and who ends with whom. Imports nothing that may fail to
load.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator


def output_of(*command: str, timeout_s: float = 30) -> str | None:
    """What a program prints to stdout; None where it does not exist, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()


def torchrun(num_processes: int, *words: str) -> list[str]:
    """The command that starts `num_processes` on this host."""
    # --standalone binds a free port, so that launches side by side do not collide.
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", *words]


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when the one that started it is gone, however that ended: the ranks
    of a killed launcher must not train on.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


_forked_ones_end_with_us = False


@contextlib.contextmanager
def forked_processes_end_with_this_one() -> Iterator[None]:
    """Processes that a library forks in the block end when this one is gone, however it ended, and leave Ctrl-C to it:
    a terminal sends that to all of them, and each would print a traceback.
    """
    global _forked_ones_end_with_us
    _forked_ones_end_with_us = True
    try:
        yield
    finally:
        _forked_ones_end_with_us = False


def _after_fork() -> None:
    if _forked_ones_end_with_us:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent()


os.register_at_fork(after_in_child=_after_fork)
