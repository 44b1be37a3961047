"""Models and single-GPU trainings that the tests on several GPUs share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llm_fp8.utils.json_files import write_json_atomic
from tests.support.families import write_family
from tests.support.multi_gpu_training import train


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Write a Llama model with untied embeddings and a Qwen3 model with tied ones. Return the folders by family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: write_family(folder / family, family) for family in ("llama3_rope_gqa", "qwen3_qk_norm_head_dim")}


@pytest.fixture(scope="session")
def single_gpu(tmp_path_factory) -> Callable[..., list[dict[str, float]]]:
    """Return a function that takes a model and options, trains on one GPU, and returns the records of the steps.
    Workers of pytest-xdist share the results, so that each training runs only once.
    """
    # pytest-xdist's workers have the parent folder in common.
    shared = (
        tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else tmp_path_factory.getbasetemp()
    )

    def steps(model: Path, *options: str) -> list[dict[str, float]]:
        name = hashlib.sha256(repr((model.name, options)).encode()).hexdigest()[:16]
        result = shared / f"one-gpu-{name}.json"
        with open(f"{result}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                records = train(1, shared / f"one-gpu-{name}", model, *options)[0]
                write_json_atomic(result, records)
        return json.loads(result.read_text())

    return steps
