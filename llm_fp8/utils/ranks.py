"""Read the rank of this process. Share values between ranks through torchrun's store, without a process group."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from llm_fp8.utils.errors import UserError


@dataclass(frozen=True)
class LaunchRanks:
    """The rank of this process, and the number of processes that the launcher started."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart_count: int = 0  # number of restarts by torchrun (--max-restarts)
    launched: bool = False  # True if a launcher started this process, even as the only one

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LaunchRanks:
        """Read the variables that torchrun sets. Raise `UserError` for bad numbers, since ranks would wait forever."""

        def read(name: str, default: int, most: int = 2**31, least: int = 0) -> int:
            text = environ.get(name, str(default))
            if not (text.isdecimal() and least <= int(text) <= most):
                advice = "start the program with torchrun, or unset it if an earlier launch left it"
                raise UserError(f"{name} '{text}' must be a whole number from {least} to {most}; {advice}.")
            return int(text)

        if "WORLD_SIZE" not in environ:
            return cls()
        world_size = read("WORLD_SIZE", 1, least=1)
        local_world_size = read("LOCAL_WORLD_SIZE", world_size, world_size, least=1)
        read("LOCAL_RANK", 0, world_size - 1)
        restart_count = read("TORCHELASTIC_RESTART_COUNT", 0)
        return cls(read("RANK", 0, world_size - 1), world_size, local_world_size, restart_count, launched=True)


def launcher_store():  # type: ignore[no-untyped-def]
    """Connect to the launcher's TCPStore. Return None in a single process, or if the launcher has no store."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(*address, is_master=False, timeout=timedelta(seconds=20))


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends, so that no rank continues alone."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
