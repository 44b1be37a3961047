"""Collect the provenance of a run for run.json: versions, hardware, code and command.

Environment variables are recorded if their prefix is a GPU library's or launcher's and their name suggests no secret.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from llm_fp8.observability.metrics import GIB
from llm_fp8.utils.packages import REPOSITORY, USED, package_version

ENVIRONMENT_PREFIXES = ("NVTE_", "NCCL_", "CUDA_", "CUDNN_", "ACCELERATE_", "TORCH_", "PYTORCH_")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def output_of(*command: str) -> str | None:
    """Run a program and return its stdout, or None if it does not exist, fails, or takes longer than 60 s."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `commit` and `dirty` (True if files differ from the commit) of the git repository at `folder`, or None if
    there is no repository. In a container without git, LLM_FP8_COMMIT is the commit, and `dirty` is None.
    """
    if commit := os.environ.get("LLM_FP8_COMMIT"):
        return {"commit": commit, "dirty": None}
    if not (folder / ".git").exists():
        return None
    commit = output_of("git", "-C", str(folder), "rev-parse", "--verify", "HEAD")
    changes = output_of("git", "-C", str(folder), "status", "--porcelain")
    return None if commit is None or changes is None else {"commit": commit, "dirty": changes != ""}


def _gpu(index: int) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(index)
    capability = f"{gpu.major}.{gpu.minor}"
    return {"name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 1), "compute_capability": capability}


def _cpu_model() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text() if cpuinfo.is_file() else "", re.MULTILINE)
    return match[1] if match else platform.processor() or None


def relevant_environment(environment: dict[str, str]) -> dict[str, str]:
    relevant = {name: value for name, value in sorted(environment.items()) if name.startswith(ENVIRONMENT_PREFIXES)}
    return {name: value for name, value in relevant.items() if not any(word in name.upper() for word in _SECRET_WORDS)}


def collect_provenance(argv: list[str]) -> dict[str, Any]:
    """Return the provenance of this process as JSON values. Values that this machine does not have are None."""
    drivers = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    script = Path(argv[0]).resolve()
    # The path of a script in the repository is recorded relative to its root.
    program = script.relative_to(REPOSITORY).as_posix() if script.is_relative_to(REPOSITORY) else argv[0]
    return {
        "time_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [program, *argv[1:]],
        "git": git_state(REPOSITORY),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in USED},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": drivers.splitlines()[0] if drivers else None,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "cpu": {"model": _cpu_model(), "num_cores": os.cpu_count()},
        "os": platform.platform(),
        "environment": relevant_environment(dict(os.environ)),
    }
