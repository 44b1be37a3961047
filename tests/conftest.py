"""What every test runs under: one thread per process (or LLM_FP8_TEST_THREADS), no hub, caches of its own, and GPU
tests only where there is a GPU.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

# Before torch, datasets or transformers are imported: they read these once.
_THREADS = os.environ.get("LLM_FP8_TEST_THREADS", "1")  # no test may depend on it
_CACHE = tempfile.TemporaryDirectory(prefix="llm-fp8-tests-")
os.environ.update(
    OMP_NUM_THREADS=_THREADS,
    MKL_NUM_THREADS=_THREADS,
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_DATASETS_CACHE=str(Path(_CACHE.name) / "datasets"),
    WANDB_SILENT="true",
    # cuBLAS reads it once; Transformer Engine multiplies fp32 in TF32 otherwise, far from fp32 rounding.
    NVIDIA_TF32_OVERRIDE="0",
)
# An older processor is asked for: oneDNN has to take it for one too, or bf16 attention fails in PyTorch's own packing.
_ISA = {"default": "SSE41", "avx2": "AVX2"}.get(os.environ.get("ATEN_CPU_CAPABILITY", ""))
if _ISA:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _ISA)
# What a launcher left in the environment would change the configuration under test.
for _name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WANDB_MODE"))]:
    del os.environ[_name]


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(_CACHE.cleanup)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the processes of tests inherit it
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the process that hands tests to xdist's workers needs no torch
    gc.disable()  # until all is imported
    from tests.support import fixtures

    config.pluginmanager.register(fixtures)
    torch = fixtures.torch
    torch.set_num_threads(int(_THREADS))
    if _ISA:  # PyTorch asks the real processor whether oneDNN multiplies fp8
        torch.backends.mkldnn.set_flags(_enabled=False)
