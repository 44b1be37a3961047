"""Memory of the host that this process can still have."""

from __future__ import annotations

from pathlib import Path

import psutil


def free_host_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """What the host has available, or less where a control group (version 2, below `root`; this process's are listed in
    `own`) of a container or a batch job allows less.
    """
    free: int = psutil.virtual_memory().available
    lines = own.read_text().splitlines() if own.is_file() else []
    group = root / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    # In a container its own group may be the root that it sees, whatever its path says.
    for level in (group, *group.parents):
        limit = level / "memory.max"
        if level.is_relative_to(root) and limit.is_file() and (allowed := limit.read_text().strip()) != "max":
            entries = dict(line.split(maxsplit=1) for line in (level / "memory.stat").read_text().splitlines())
            used = int((level / "memory.current").read_text()) - int(entries["inactive_file"])  # caches give way
            free = min(free, int(allowed) - used)
    return free
