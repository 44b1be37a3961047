"""Memory of the host that this process can still have."""

from __future__ import annotations

from pathlib import Path

import psutil

_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of control groups, version 2 and 1: controller -> folder, and files of the limit and of the use; the entry of
memory.stat that counts cached files, which give way.
"""


def free_host_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """What the host has available, or less where a control group (of a container, of a batch job) allows less.

    `groups` and `own`: where the kernel shows the control groups, and those of this process.
    """
    free: int = psutil.virtual_memory().available
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in _FILES:
                folder, *files = _FILES[controller]
                root = groups / folder
                group = root / path.lstrip("/")
                # In a container its own group may be the root that it sees, whatever its path says.
                for level in (group, *group.parents):
                    if level.is_relative_to(root) and (level / files[0]).is_file():
                        free = min(free, _free_in(level, *files))
    return free


def _free_in(group: Path, limit: str, use: str, cached: str) -> int:
    allowed = (group / limit).read_text().strip()
    if allowed == "max":
        return psutil.virtual_memory().total
    entries = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    return int(allowed) - int((group / use).read_text()) + int(entries[cached])
