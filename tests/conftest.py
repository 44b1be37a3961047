"""What every test runs under: one thread per process, no hub, caches of its own, and GPU tests only where there is a
GPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    # cuBLAS reads it once; Transformer Engine multiplies fp32 in TF32 otherwise, and fp32 parity would not be near fp32
    # rounding.
    NVIDIA_TF32_OVERRIDE="0",
)
# What a launcher left in the environment would change the configuration under test.
for _name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "WANDB_MODE"))]:
    del os.environ[_name]

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402
from xdist.workermanage import WorkerController  # noqa: E402

from llm_fp8.models.source import EMBEDDED_MODEL  # noqa: E402
from llm_fp8.tools.bench import worker  # noqa: E402
from tests.support.families import write_family  # noqa: E402
from tests.support.reference import NUM_ROWS  # noqa: E402
from tests.support.slow import is_slow  # noqa: E402
from tests.support.small import forget_accelerator, tiny_config, write_model, write_rows  # noqa: E402
from tests.support.warm_python import warm_python_in  # noqa: E402

ONE_WORKER = ("test_deepspeed.py", "test_hf_trainer_callback.py")
"""Files whose tests look at what processes left that are started once: each goes to one of pytest-xdist's workers."""

LAST = tuple(f"tests/{room}/" for room in ("config", "kernels", "optim", "precision", "utils"))
"""Folders of short tests. pytest-xdist gives a worker a few tests in advance: were they long, the other workers would
wait for them at the end."""


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the processes of tests inherit it


def pytest_unconfigure(config: pytest.Config) -> None:
    _CACHE.cleanup()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes or trains as slow, and skip what this machine has no GPUs for."""
    num_gpus = torch.cuda.device_count()
    for item in items:
        if is_slow(item):
            item.add_marker(pytest.mark.slow)
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {num_gpus}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave modules and tests out of the garbage collector's sight: every run of a test ends with `gc.collect()`, which
    took half of its time.
    """
    gc.collect()
    gc.freeze()


class _Scheduling(LoadScopeScheduling):
    """Hands out one test at a time, and the files of `ONE_WORKER` whole. (xdist_group marks do nothing under pytest
    9.2 with xdist 3.8.)

    Each worker goes through a part of the suite; one that is through takes over half of what another one has left. In
    the same file, all would set its fixtures up, and wait or need the cores at the same time.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._parts: dict[WorkerController, list[str]] = {}
        """Worker -> scopes that it has before it."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Called for the next scope of a worker."""
        if not any(self._parts.values()):
            scopes = [scope for scope in self.workqueue if not scope.startswith(LAST)] or list(self.workqueue)
            nodes = self.nodes
            cuts = [len(scopes) * number // len(nodes) for number in range(len(nodes) + 1)]
            self._parts = {node: scopes[cuts[number] : cuts[number + 1]] for number, node in enumerate(nodes)}
        if not self._parts.get(node):
            longest = max(self._parts.values(), key=len)
            middle = len(longest) // 2
            self._parts[node], longest[middle:] = longest[middle:], []
        self.workqueue.move_to_end(self._parts[node].pop(0), last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Called for a worker that ended: what it has done is not handed out again, which nobody would report."""
        scopes = self.assigned_work[node]
        self.assigned_work[node] = {scope: tests for scope, tests in scopes.items() if not all(tests.values())}
        return super().remove_node(node)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file.endswith(ONE_WORKER) else nodeid


@pytest.hookimpl(optionalhook=True)  # without xdist there is no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """How tests are spread where `-n` alone is given."""
    return _Scheduling(config, log) if config.getvalue("dist") == "load" else None


_WARM_PYTHON = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Called before a worker starts: all have one warm Python, whose imports take 6 s of a core when it is used."""
    config = node.config
    if _WARM_PYTHON not in config.stash:
        server = contextlib.ExitStack()
        config.add_cleanup(server.close)
        # Not in _CACHE: benchmarks/gpu_tests.py calls pytest again in the process whose first call has removed it.
        folder = server.enter_context(tempfile.TemporaryDirectory(prefix="llm-fp8-warm-"))
        config.stash[_WARM_PYTHON] = server.enter_context(warm_python_in(Path(folder)))
    node.workerinput["warm_python"] = config.stash[_WARM_PYTHON]


@pytest.fixture(autouse=True)
def own_accelerator() -> None:
    """A test is a program of its own to Accelerate."""
    forget_accelerator()


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
    """The folder of a tiny model of one layer, whose sizes are multiples of 16, with its tokenizer and without
    weights.
    """
    folder = tmp_path_factory.mktemp("architecture") / "tiny"
    tiny_config(hidden_size=64, intermediate_size=96, num_hidden_layers=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def warm_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What to start a script with as with `sys.executable`, but for its imports, which are done
    (tests/support/warm_python.py).
    """
    if shared := getattr(request.config, "workerinput", {}).get("warm_python"):
        yield shared
        return
    with warm_python_in(tmp_path_factory.mktemp("warm")) as program:
        yield program


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama with weights and the embedded tokenizer, whose sizes fp8 takes."""
    return write_family(tmp_path_factory.mktemp("models") / "llama3", "llama3_rope_gqa")


@pytest.fixture
def started_processes(monkeypatch) -> list[subprocess.Popen]:
    """The processes that measurements are started in, in order, as they come."""
    started: list[subprocess.Popen] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen:
        started.append(start_process(*arguments, **options))
        return started[-1]

    start_process = subprocess.Popen
    monkeypatch.setattr(worker.subprocess, "Popen", start)
    return started


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
