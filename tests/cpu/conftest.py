"""What several files of CPU tests train on, and watch."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer
from xdist.scheduler import LoadScopeScheduling

from llm_fp8.models.source import EMBEDDED_MODEL
from llm_fp8.tools.bench import waiting
from tests.reference import NUM_ROWS
from tests.small import tiny_config, write_model, write_rows
from tests.warm_python import warm_python_in

ONE_WORKER = ("test_deepspeed.py", "test_trainer_callback.py")
"""Files whose tests look at what processes left that are started once: each goes to one of pytest-xdist's workers."""


class _Scheduling(LoadScopeScheduling):
    """Hands out one test at a time, and the files of `ONE_WORKER` whole. (xdist_group marks do nothing under pytest
    9.2 with xdist 3.8.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file.endswith(ONE_WORKER) else nodeid


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """How tests are spread where `-n` alone is given."""
    return _Scheduling(config, log) if config.getvalue("dist") == "load" else None


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
    """A jsonl file of the problems that `tests.reference` trains on."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", NUM_ROWS)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with weights, whose output head is its embedding."""
    return write_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_architecture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model of one layer, whose sizes are multiples of 16, with its tokenizer and without
    weights.
    """
    folder = tmp_path_factory.mktemp("architecture") / "tiny"
    tiny_config(hidden_size=64, intermediate_size=96, num_hidden_layers=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What to start a script with as with `sys.executable`, but for its imports, which are done
    (tests/warm_python.py).
    """
    with warm_python_in(tmp_path_factory.mktemp("warm")) as program:
        yield program


@pytest.fixture
def started_processes(monkeypatch) -> list[subprocess.Popen]:
    """The processes that measurements are started in, in order, as they come."""
    started: list[subprocess.Popen] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen:
        started.append(start_process(*arguments, **options))
        return started[-1]

    start_process = subprocess.Popen
    monkeypatch.setattr(waiting.subprocess, "Popen", start)
    return started
