"""Other programs: what one prints, and the command that starts processes of a launch. Imports nothing that may fail
to load.
"""

from __future__ import annotations

import subprocess
import sys


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
    """The command that starts so many processes on this host, on a port of their own: launches side by side do not
    collide.
    """
    # --standalone has the launcher bind port 0 and keep what the system gives it; its processes meet there and look for
    # no other port.
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", *words]
