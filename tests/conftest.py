"""What every test runs under: one thread per process, no hub, caches of its own, and GPU tests only where there is a
GPU.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

# Before torch, datasets or transformers are imported: they read these once.
_CACHE = tempfile.TemporaryDirectory(prefix="llm-fp8-tests-")
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_DATASETS_CACHE=str(Path(_CACHE.name) / "datasets"),
    WANDB_SILENT="true",
)
# What a launcher left in the environment would change the configuration under test.
for _name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WANDB_MODE"))]:
    del os.environ[_name]

import torch  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the processes of tests inherit it


def pytest_unconfigure(config: pytest.Config) -> None:
    _CACHE.cleanup()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine has no GPUs for."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {num_gpus}"))
