"""--cuda_graphs under fsdp_full and fsdp_grad without a GPU: Transformer Engine is stood in for, and a graph repeats
Python's work. Two ranks have other numbers of documents, so that they must agree on the graph.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from llm_fp8.distributed import micro_batch_graphs
from llm_fp8.train import loop
from tests.support.processes import run_ranks
from tests.support.small import assert_same_bits, final_weights, steps
from tests.support.stand_in_te import install_stand_in

pytestmark = pytest.mark.slow


class Repeated:
    """In place of a CUDA graph; says its replays."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        print("replayed a graph", flush=True)
        self._work()


def fail_in_the_backward_pass(work: Callable[[], None]) -> None:
    """In place of a capture; gathered weights and half of the gradients are left behind."""

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("not permitted while capturing")

    def watch(module: nn.Module, inputs: object, output: object) -> None:
        if type(module).__name__.endswith("DecoderLayer") and isinstance(output, Tensor):
            output.register_hook(fail)

    hook = register_module_forward_hook(watch)
    try:
        work()
    finally:
        hook.remove()


def without_a_gpu(capture: object = Repeated) -> None:
    patch = pytest.MonkeyPatch()
    install_stand_in(patch)
    patch.setattr(loop, "Capture", lambda: capture)
    patch.setattr(micro_batch_graphs, "BUCKETS", (4, 8, 16))


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(step["loss"], step["grad_norm"]) for step in steps(folder) if "loss" in step]


@pytest.fixture(scope="module")
def unequal_rows(tmp_path_factory) -> str:
    draw, path = random.Random(0), tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = ["word " * draw.choice((5, 20, 100)) for _ in range(200)]
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return str(path)


@pytest.mark.parametrize("mode", ["fsdp_full", "fsdp_grad"])
def test_a_run_with_graphs_is_the_run_without_and_that_whose_captures_fail(mode, tmp_path, tiny_model, unequal_rows):
    options = [f"--model_name={tiny_model}", f"--dataset_name={unequal_rows}", "--validation_fraction=0", "--use_te"]
    options += ["--packing", "--max_seq_length=128", "--batch_size=2", "--max_steps=10", "--learning_rate=1e-3"]
    options += ["--mixed_precision=bf16", f"--sharding_mode={mode}", "--log_every=1"]
    found: dict[str, Path] = {}
    failing = functools.partial(without_a_gpu, fail_in_the_backward_pass)
    for name, more, first in (
        ("eager", "--no_cuda_graphs", without_a_gpu),
        ("graphs", "--cuda_graphs", without_a_gpu),
        ("failed", "--cuda_graphs", failing),
    ):
        found[name] = tmp_path / name
        said = run_ranks(2, found[name], *options, more, f"--output_dir={found[name]}", first=first)
        assert ("replayed a graph" in said) == (name == "graphs")
        assert ("not permitted while capturing" in said) == (name == "failed")
    eager = losses(found["eager"])
    assert losses(found["graphs"]) == losses(found["failed"]) == eager and eager[-1] < eager[0]
    assert_same_bits(final_weights(found["graphs"]), final_weights(found["eager"]))
    assert_same_bits(final_weights(found["failed"]), final_weights(found["eager"]))


def begin_after_the_first_step() -> None:
    """As where the GPU is found idle."""
    without_a_gpu()
    pytest.MonkeyPatch().setattr(loop.TrainingLoop, "_note_attention", loop.TrainingLoop._begin_graphs)


@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_graphs_that_begin_within_a_run_leave_it_as_it_is(mode, tmp_path, tiny_model, unequal_rows):
    options = [f"--model_name={tiny_model}", f"--dataset_name={unequal_rows}", "--validation_fraction=0.2", "--use_te"]
    options += ["--packing", "--max_seq_length=128", "--batch_size=2", "--max_steps=8", "--learning_rate=1e-3"]
    options += [
        "--mixed_precision=bf16",
        f"--sharding_mode={mode}",
        "--log_every=1",
        "--eval_every=3",
        "--save_every=4",
    ]
    found = {}
    for name, first in (("eager", without_a_gpu), ("graphs", begin_after_the_first_step)):
        found[name] = tmp_path / name
        said = run_ranks(2, found[name], *options, f"--output_dir={found[name]}", first=first)
        assert ("replayed a graph" in said) == (name == "graphs")
    assert len(losses(found["eager"])) == 8
    for eager, graphs in zip(losses(found["eager"]), losses(found["graphs"]), strict=True):
        # The stand-in's GEMMs round otherwise than autograd, which DDP needs.
        assert graphs == (pytest.approx(eager, rel=2e-3) if mode == "ddp" else eager)
