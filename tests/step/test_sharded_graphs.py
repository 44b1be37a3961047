"""--cuda_graphs on two ranks without a GPU, with a stand-in for Transformer Engine and emulated graphs.

The ranks have different numbers of documents, so that they must agree on the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from llm_fp8.observability.kernel_trace import StepProfile
from llm_fp8.run.timeline import Timeline
from llm_fp8.step import micro_batch_graphs, stepper
from tests.support.processes import run_ranks
from tests.support.small import assert_same_bits, final_weights, steps, summary_json
from tests.support.stand_in_te import install_stand_in

pytestmark = pytest.mark.slow


class EmulatedGraph:
    """Replaces a CUDA graph, and prints a line at each replay."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __call__(self) -> None:
        print("replayed a graph", flush=True)
        self._work()

    @staticmethod
    def begin_anew() -> None:
        print("dropped all graphs", flush=True)


def emulate_graphs(capture: object = EmulatedGraph, lacks_memory: bool = False) -> None:
    patch = pytest.MonkeyPatch()
    install_stand_in(patch)
    patch.setattr(micro_batch_graphs, "Capture", lambda: capture)
    patch.setattr(micro_batch_graphs, "memory_beside_graphs", lambda: (0.0, lacks_memory))
    patch.setattr(micro_batch_graphs, "BUCKETS", (4, 8, 16))


@pytest.fixture(scope="module")
def unequal_rows(tmp_path_factory) -> str:
    draw, path = random.Random(0), tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = ["word " * draw.choice((5, 20, 100)) for _ in range(200)]
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return str(path)


def begin_graphs_after_first_step() -> None:
    """Make runs in this process begin CUDA graphs after the first step, as if that step had left the GPU idle."""
    emulate_graphs()
    pytest.MonkeyPatch().setattr(Timeline, "_note_attention", lambda run: run.stepper.begin_graphs())


def begin_and_drop_graphs() -> None:
    """Make runs begin CUDA graphs after the first step, and drop them before eager passes as if memory were short."""
    emulate_graphs()
    pytest.MonkeyPatch().setattr(Timeline, "_note_attention", lambda run: run.stepper.begin_graphs(True))


def fail_on_one_rank(work: Callable[[], None]) -> EmulatedGraph:
    if dist.get_rank() == 1:
        raise RuntimeError("not permitted while capturing")
    return EmulatedGraph(work)


WITH_GRAPHS: dict[str, tuple[str, Callable[[], None]]] = {
    "from the start, dropped": ("--cuda_graphs", functools.partial(emulate_graphs, lacks_memory=True)),
    "after a step": ("--seed=42", begin_graphs_after_first_step),
    "after a step, dropped": ("--seed=42", begin_and_drop_graphs),
}


OPTIONS = [
    "--validation_fraction=0.2",
    "--use_te",
    "--packing",
    "--max_seq_length=128",
    "--batch_size=2",
    "--max_steps=5",
]
OPTIONS += ["--learning_rate=1e-3", "--mixed_precision=bf16", "--log_every=1", "--eval_every=3"]


@pytest.mark.parametrize(
    ("mode", "variants"),
    [("fsdp_full", ["after a step, dropped"]), ("fsdp_grad", ["from the start, dropped"]), ("ddp", ["after a step"])],
)
def test_run_with_graphs_equals_run_without(mode, variants, tmp_path, tiny_model, unequal_rows):
    options = [*OPTIONS, f"--model_name={tiny_model}", f"--dataset_name={unequal_rows}", f"--sharding_mode={mode}"]
    # DDP needs autograd's gradients, and the stand-in's GEMMs round differently.
    rounding = 2e-3 if mode == "ddp" else 0
    results: dict[str, list[tuple[float, float]]] = {}
    for name, (more, first) in {"eager": ("--no_cuda_graphs", emulate_graphs), **WITH_GRAPHS}.items():
        if name not in ("eager", *variants):
            continue
        folder = tmp_path / name
        output = run_ranks(2, folder, *options, more, f"--output_dir={folder}", first=first)
        results[name] = [(step["loss"], step["grad_norm"]) for step in steps(folder) if "loss" in step]
        assert len(results[name]) == 5
        assert results[name] == [pytest.approx(each, rel=rounding) for each in results["eager"]]
        if mode != "ddp":
            assert_same_bits(final_weights(folder), final_weights(tmp_path / "eager"))
        graphs = summary_json(folder)["cuda_graphs"]
        assert graphs["used"] == (name != "eager")
        assert ("dropped all graphs" in output) == name.endswith("dropped")
        assert ("replayed a graph" in output) == graphs["used"]


@pytest.mark.parametrize("mode", ["fsdp_full", "ddp"])
def test_failed_capture_on_one_rank_ends_all_ranks_with_an_error(mode, tmp_path, tiny_model, unequal_rows):
    options = [*OPTIONS, f"--model_name={tiny_model}", f"--dataset_name={unequal_rows}", f"--sharding_mode={mode}"]
    failing = functools.partial(emulate_graphs, fail_on_one_rank)
    with pytest.raises(AssertionError, match="error: no CUDA graph .*while capturing.*--no_cuda_graphs"):
        run_ranks(2, tmp_path / "run", *options, "--cuda_graphs", f"--output_dir={tmp_path / 'run'}", first=failing)


@pytest.mark.parametrize(
    ("work_s", "peak_gib", "micro_batches", "begins"),
    [(0.5, 30.0, 4, True), (0.8, 30.0, 4, False), (0.5, 50.0, 4, True), (0.5, 79.0, 4, False), (0.5, 50.0, 1, False)],
)
def test_graphs_begin_if_the_gpu_is_idle_and_are_dropped_if_memory_is_short(
    work_s, peak_gib, micro_batches, begins, monkeypatch
):
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 10 * 2**30)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: peak_gib * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: SimpleNamespace(total_memory=80 * 2**30))
    steps, begun = [{"step_time_s": 1.0}] * 4, []
    run = SimpleNamespace(strategy=SimpleNamespace(shards_parameters=False), begin_graphs=begun.append)
    run.parameters = [SimpleNamespace(nbytes=29 * 2**30)]
    profile = StepProfile(span_s=1.0, work_s=work_s, exposed_communication_s=0.45)
    gemms = {"nvjet_sm90_qqtst_128x160": (8, 0.2), "nvjet_sm90_tst_256x128": (4, 0.1), "ln_fwd_kernel": (3, 0.1)}
    idle = dataclasses.replace(profile, kernels=gemms).gpu_idle(steps)
    assert idle["gemm_share"] == pytest.approx(0.3) and idle["share"] == pytest.approx(1 - work_s)
    # The main rank waits less in collectives, and its measurement decides for all ranks.
    monkeypatch.setattr(stepper, "gathered", lambda values: [(values[0], 0.1), values])
    note = stepper.Stepper.take_graphs_if_idle(run, profile, steps, micro_batches, 5, asks_again=True)
    assert begun == [peak_gib == 50.0] * begins and (note is not None) == (work_s == 0.5)
    assert run.may_take_graphs == (work_s == 0.8)  # a small idle share is checked once more
    if note:
        assert "computes nothing during 40% of a step" in note and ("step 6" in note) == begins
        assert begins or "1.0 GiB more" in note
    else:
        steps = [{"step_time_s": 1.6}] * 9
        note = stepper.Stepper.take_graphs_if_idle(run, profile, steps, micro_batches, 10, asks_again=False)
        assert begun == [False] and not run.may_take_graphs and "during 44% of a step" in note
