"""Limits on foreign code that runs in this process, such as a chat template.

Both hold in the main thread alone, where signals arrive; in another thread a block runs without them.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise `TimeoutError` in a block that takes longer. A timer that was running goes on afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: int | FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {limit_s:g} s")

    handler = signal.signal(signal.SIGALRM, stop)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[None]:
    """Let allocations fail (`MemoryError`) beyond `limit_bytes` of address space more than the block found."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(wanted, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
