"""Whether processes of tests are forked from one that has its imports, or started anew.

Forking saves each of them its imports, several seconds of a core.
"""

from __future__ import annotations

from pathlib import Path


def can_fork() -> bool:
    """Whether forked processes can do all that tests ask of them: not on a machine with a GPU, which some of them use.

    There importing the packages initialises CUDA, and a process that is forked after that cannot use the GPU: torch
    raises "Cannot re-initialize CUDA in forked subprocess".
    """
    return not Path("/dev/nvidia0").exists()
