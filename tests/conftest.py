"""Settings for every test: each process has one thread (or LLM_FP8_TEST_THREADS), does not access the hub and caches
datasets in a temporary folder. Tests that need a GPU are skipped on a machine without one.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

# Set before torch, datasets or transformers are imported, because they read these variables once.
_THREADS = os.environ.get("LLM_FP8_TEST_THREADS", "1")  # no test's result may depend on it
_CACHE = tempfile.TemporaryDirectory(prefix="llm-fp8-tests-")
os.environ.update(
    OMP_NUM_THREADS=_THREADS,
    MKL_NUM_THREADS=_THREADS,
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_DATASETS_CACHE=str(Path(_CACHE.name) / "datasets"),
    WANDB_SILENT="true",
    # Read once by cuBLAS. Without it, Transformer Engine multiplies fp32 in TF32, whose rounding errors are larger.
    NVIDIA_TF32_OVERRIDE="0",
)
# If PyTorch is limited to an older instruction set, oneDNN needs the same limit, or PyTorch's bf16 attention fails.
_ISA = {"default": "SSE41", "avx2": "AVX2"}.get(os.environ.get("ATEN_CPU_CAPABILITY", ""))
if _ISA:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _ISA)
# Variables that a launcher left in the environment would change the configuration under test.
for _name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WANDB_MODE"))]:
    del os.environ[_name]


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(_CACHE.cleanup)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by a shell for background processes
        signal.signal(signal.SIGINT, signal.default_int_handler)  # inherited by processes that tests start
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # xdist's controller, which runs no tests, needs no torch
    gc.disable()  # until the imports are done
    from tests.support import fixtures

    config.pluginmanager.register(fixtures)
    torch = fixtures.torch
    torch.set_num_threads(int(_THREADS))
    if _ISA:  # PyTorch would ask the real processor whether oneDNN multiplies fp8
        torch.backends.mkldnn.set_flags(_enabled=False)
