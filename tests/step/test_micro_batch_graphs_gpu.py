"""--cuda_graphs on a GPU equals training with eager micro-batches, bitwise if attention is deterministic."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.support import gpu_training
from tests.support.families import write_family
from tests.support.gpu_training import DETERMINISTIC, certificate_of, losses, metric_values, train, training_options
from tests.support.small import summary_json

pytestmark = pytest.mark.gpu

PRECISIONS = gpu_training.PRECISIONS | {
    "LoRA": ["--mixed_precision", "fp8", "--lora_rank", "8"],
    "backward LoRA": ["--mixed_precision", "fp8", "--fp8_scenario", "backward", "--lora_rank", "8"],
}
NO_WARMUP = ("--lr_scheduler", "constant", "--num_warmup_steps", "0")


def run(model_folder, folder, *options, environment=DETERMINISTIC):
    process = train(*training_options(model_folder, folder, *options, *NO_WARMUP), environment=environment)
    assert process.returncode == 0, process.stderr
    return folder


def assert_equal_runs(left, right):
    assert losses(left) == losses(right) and len(losses(left)) > 0
    for name in ("grad_norm", "eval_loss"):
        assert metric_values(left, name) == metric_values(right, name), name
    ours, theirs = (load_file(next((side / "final").glob("*model.safetensors"))) for side in (left, right))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("micro_batches", ["1", "3"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_run_with_graphs_is_certified_and_equals_eager_run(precision, micro_batches, model_folder, tmp_path):
    """The runs also evaluate. The smallest graph takes 32 documents. Some batches have more and need a larger one."""
    options = [*PRECISIONS[precision], "--max_steps", "10", "--eval_every", "4", "--batch_size", "11"]
    options += ["--gradient_accumulation_steps", micro_batches, "--certify"]
    eager = run(model_folder, tmp_path / "eager", *options, "--no_cuda_graphs")
    graphs = run(model_folder, tmp_path / "graphs", *options, "--cuda_graphs")
    assert_equal_runs(eager, graphs)
    ours, theirs = certificate_of(graphs), certificate_of(eager)
    assert ours["verdict"] == theirs["verdict"] == "certified", (ours["reasons"], theirs["reasons"])
    assert ours["gemm_kernels_by_type"] == theirs["gemm_kernels_by_type"]


@pytest.mark.parametrize("more", [(), ("--gradient_checkpointing",)])
@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_graphs_with_gated_delta_nets_equal_eager_steps(precision, more, tmp_path):
    pytest.importorskip("fla")
    model = write_family(tmp_path / "model", "qwen3_5_text")
    options = [*PRECISIONS[precision], *more, "--max_steps", "8", "--eval_every", "4", "--batch_size", "11"]
    options += ["--gradient_accumulation_steps", "3", "--certify"]
    eager = run(model, tmp_path / "eager", *options, "--no_cuda_graphs")
    graphs = run(model, tmp_path / "graphs", *options, "--cuda_graphs")
    assert_equal_runs(eager, graphs)
    assert certificate_of(graphs)["verdict"] == "certified", certificate_of(graphs)["reasons"]


@pytest.mark.parametrize("more", [(), ("--gradient_checkpointing",)])
def test_graphs_start_automatically_if_the_gpu_is_idle(more, model_folder, tmp_path):
    options = [*PRECISIONS["delayed"], *more, "--max_steps", "16", "--batch_size", "2"]
    eager = run(model_folder, tmp_path / "eager", *options, "--no_cuda_graphs")
    graphs = run(model_folder, tmp_path / "auto", *options)
    assert_equal_runs(eager, graphs)
    [note] = summary_json(graphs)["cuda_graphs"]["notes"]
    assert "run as CUDA graphs from step 6 on" in note
    assert metric_values(graphs, "num_gemm_kernels")[0] == metric_values(graphs, "num_gemm_kernels")[1] > 0, (
        "steps 5 and 10"
    )


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_resumed_run_with_graphs_is_bitwise_equal(precision, model_folder, tmp_path):
    options = [*PRECISIONS[precision], "--eval_every", "3", "--cuda_graphs"]
    uninterrupted = run(model_folder, tmp_path / "uninterrupted", *options, "--max_steps", "8")
    parts = tmp_path / "parts"
    run(model_folder, parts, *options, "--max_steps", "4", "--save_every", "4")
    run(
        model_folder, parts, *options, "--max_steps", "8", "--allow_changed", "total_steps", "--resume_from", "latest"
    )  # fmt: skip
    assert losses(parts) == losses(uninterrupted)
    ours, theirs = (load_file(side / "final" / "model.safetensors") for side in (parts, uninterrupted))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
