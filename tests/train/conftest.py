"""What tests of whole runs share: a run's options, the signal that stops it, and a small disk."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.stopping import stopping


@pytest.fixture(scope="session")
def small_run(tiny_model: str, rows: str) -> list[str]:
    """The 49 rows that are trained on give seven steps to an epoch."""
    return [
        f"--model_name={tiny_model}",
        f"--dataset_name={rows}",
        "--max_seq_length=128",
        "--batch_size=8",
        "--learning_rate=1e-2",
    ]


@pytest.fixture
def stop_after() -> Iterator[Callable[..., None]]:
    """A function: at the end of that step the process sends itself the signal, as a scheduler would."""
    with stopping() as stops:
        yield lambda step, number=signal.SIGTERM: stops.update({step: number})


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
