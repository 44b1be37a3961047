"""Whether processes of tests are forked from one that has its imports, or started anew.

Forking saves each of them its imports, several seconds of a core. A process can use a GPU only if the one that it was forked from never did, and
importing may be use enough: some packages ask the driver what GPU there is. So on a machine with a GPU processes are started anew, unless it was tried:

    python -m tests.forking        exit code 0 where a process that was forked behind the imports could use the GPU

`benchmarks/gpu_tests.py` tries once, for all the processes that it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TRIED = "LLM_FP8_TESTS_FORK"
"""Environment variable: 1 where it was tried and works."""


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def can_fork() -> bool:
    """Whether forked processes can do all that tests ask of them."""
    return not _has_gpu() or os.environ.get(_TRIED) == "1"


def try_to_fork() -> str | None:
    """Try it, and let `can_fork` answer so here and in the processes that are started from now on; returns what stands in the way."""
    if not _has_gpu():
        return None
    # torch then asks NVML and not the driver how many GPUs there are.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    words = [sys.executable, "-m", "tests.forking"]
    tried = subprocess.run(words, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    os.environ[_TRIED] = str(int(tried.returncode == 0))
    return None if tried.returncode == 0 else (tried.stderr.splitlines() or [f"exit code {tried.returncode}"])[-1]


def _use_the_gpu() -> int:
    """In a process forked behind the imports: compute something on the GPU."""
    import torch

    import tests.preloaded  # noqa: F401

    process = os.fork()
    if process == 0:
        try:
            os._exit(0 if float(torch.ones(4, device="cuda").sum()) == 4.0 else 1)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


if __name__ == "__main__":
    sys.exit(_use_the_gpu())
