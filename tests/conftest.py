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

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from llm_fp8.models.source import EMBEDDED_MODEL  # noqa: E402
from tests.support.families import write_family  # noqa: E402
from tests.support.reference import NUM_ROWS  # noqa: E402
from tests.support.small import forget_accelerator, tiny_config, write_model, write_rows  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(_THREADS))
    if _ISA:  # PyTorch asks the real processor whether oneDNN multiplies fp8
        torch.backends.mkldnn.set_flags(_enabled=False)
    config.add_cleanup(_CACHE.cleanup)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the processes of tests inherit it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine has no GPUs for."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {num_gpus}"))


@pytest.fixture(autouse=True)
def own_accelerator() -> None:
    """A test is a program of its own to Accelerate, and leaves what is there out of the garbage collector's sight:
    every training ends with `gc.collect()`, which would take longer than the training.
    """
    forget_accelerator()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with weights."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A jsonl file of 64 short problems."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 64)


@pytest.fixture(scope="session")
def sixteen_rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A jsonl file of the problems that `tests.support.reference` trains on."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", NUM_ROWS)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with weights, whose output head is its embedding."""
    return write_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_architecture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model of one layer without weights, whose sizes are multiples of 16."""
    folder = tmp_path_factory.mktemp("architecture") / "tiny"
    tiny_config(hidden_size=64, intermediate_size=96, num_hidden_layers=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama with weights and the embedded tokenizer, whose sizes fp8 takes."""
    return write_family(tmp_path_factory.mktemp("models") / "llama3", "llama3_rope_gqa")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
