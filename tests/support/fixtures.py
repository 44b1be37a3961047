"""Models, rows and folders that tests share, and what happens before the first test and before each."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.families import write_family
from tests.support.processes import fork_server
from tests.support.reference import NUM_ROWS
from tests.support.small import forget_accelerator, write_model, write_rows


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine has no GPUs for."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {num_gpus}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """All is imported: what is there stays out of the garbage collector's sight."""
    gc.freeze()
    gc.enable()
    if any(item.get_closest_marker("slow") for item in session.items):
        fork_server()


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
def gemma_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Gemma 3 with weights, a layer of either type."""
    entries = dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=24, sliding_window_pattern=2)
    rope = dict(rope_type="linear", factor=4.0)
    folder = tmp_path_factory.mktemp("models") / "gemma3"
    return write_model(folder, model_type="gemma3_text", tie_word_embeddings=True, rope_scaling=rope, **entries)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama with weights and the embedded tokenizer, whose sizes fp8 takes."""
    return write_family(tmp_path_factory.mktemp("models") / "llama3", "llama3_rope_gqa")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture
def call_main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Call the main function of a program's module with these words."""

    def call(program: ModuleType, *words: object) -> int:
        monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, words)])
        return program.main()

    return call


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount command")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
