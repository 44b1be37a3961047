"""Fixtures and pytest hooks that all tests share."""

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
from tests.support.small import reset_accelerator, write_model, write_rows


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than this machine has."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {num_gpus}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage from now on, but only among later objects. Start the fork server if slow tests will run."""
    gc.freeze()
    gc.enable()
    if any(item.get_closest_marker("slow") for item in session.items):
        fork_server()


@pytest.fixture(autouse=True)
def fresh_process_state() -> None:
    """Reset Accelerate, so that each test may choose other settings, and exclude existing objects from `gc.collect()`.
    A training ends with that call, which would take longer than the training if it visited all objects.
    """
    reset_accelerator()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny Llama with weights and tokenizer."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a jsonl file with 64 short rows, each with a math problem and its solution."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 64)


@pytest.fixture(scope="session")
def sixteen_rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a jsonl file with the sixteen rows that `tests.support.reference` trains on."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", NUM_ROWS)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny Llama whose lm_head is tied to the embedding."""
    return write_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def gemma_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny Gemma 3. One of its two layers attends within a sliding window."""
    entries = dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=24, sliding_window_pattern=2)
    rope = dict(rope_type="linear", factor=4.0)
    folder = tmp_path_factory.mktemp("models") / "gemma3"
    return write_model(folder, model_type="gemma3_text", tie_word_embeddings=True, rope_scaling=rope, **entries)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Llama with weights and tokenizer. The model's dimensions suit fp8 GEMMs."""
    return write_family(tmp_path_factory.mktemp("models") / "llama3", "llama3_rope_gqa")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture
def call_main(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that takes a module and command-line arguments, calls main() and returns the exit code."""

    def call(program: ModuleType, *arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", [program.__name__, *map(str, arguments)])
        return program.main()

    return call


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MB for one test, and return the mount point."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount command")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
