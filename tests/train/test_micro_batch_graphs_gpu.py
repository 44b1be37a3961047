"""--cuda_graphs on a GPU: the training of eager micro-batches, bit for bit where attention is deterministic."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

from llm_fp8.config.parser import parse_config
from llm_fp8.utils.te_import import forget_delayed_scales
from tests.support.batches import packed_documents
from tests.support.built_training import BuiltTraining
from tests.support.gpu_training import certificate_of, common, figures, losses, train
from tests.support.small import forget_accelerator

pytestmark = pytest.mark.gpu

DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
PRECISIONS = {
    "bf16": ["--mixed_precision", "bf16"],
    "delayed": ["--mixed_precision", "fp8"],
    "current": ["--mixed_precision", "fp8", "--fp8_scenario", "current"],
    "block": ["--mixed_precision", "fp8", "--fp8_scenario", "block"],
    "8 bit": ["--mixed_precision", "fp8", "--optimizer", "adamw_8bit"],
}
NO_WARMUP = ("--lr_scheduler", "constant", "--num_warmup_steps", "0")


def run(model_folder, folder, *options, environment=DETERMINISTIC):
    done = train(*common(model_folder, folder, *options, *NO_WARMUP), environment=environment)
    assert done.returncode == 0, done.stderr
    return folder


def assert_equal_runs(one, other):
    assert losses(one) == losses(other) and len(losses(one)) > 0
    for name in ("grad_norm", "eval_loss"):
        assert figures(one, name) == figures(other, name), name
    ours, theirs = (load_file(side / "final" / "model.safetensors") for side in (one, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("micro_batches", ["1", "3"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_is_the_eager_one_bit_for_bit_and_certified(precision, micro_batches, model_folder, tmp_path):
    """With evaluations between the steps; 11 rows of 256 tokens hold sometimes more than 32 documents."""
    options = [*PRECISIONS[precision], "--max_steps", "10", "--eval_every", "4", "--batch_size", "11"]
    options += ["--gradient_accumulation_steps", micro_batches, "--certify"]
    eager = run(model_folder, tmp_path / "eager", *options)
    graphs = run(model_folder, tmp_path / "graphs", *options, "--cuda_graphs")
    assert_equal_runs(eager, graphs)
    ours, theirs = certificate_of(graphs), certificate_of(eager)
    assert ours["verdict"] == theirs["verdict"] == "certified", (ours["reasons"], theirs["reasons"])
    assert ours["gemm_kernels_by_type"] == theirs["gemm_kernels_by_type"]


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_a_stopped_run_goes_on_bit_for_bit(precision, model_folder, tmp_path):
    options = [*PRECISIONS[precision], "--eval_every", "3", "--cuda_graphs"]
    whole = run(model_folder, tmp_path / "whole", *options, "--max_steps", "8")
    parts = tmp_path / "parts"
    run(model_folder, parts, *options, "--max_steps", "4", "--save_every", "4")
    run(
        model_folder, parts, *options, "--max_steps", "8", "--allow_changed", "total_steps", "--resume_from", "latest"
    )  # fmt: skip
    assert losses(parts) == losses(whole)
    ours, theirs = (load_file(side / "final" / "model.safetensors") for side in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- in this process: which micro-batches were replayed ---------------------------------------------------------------

ROWS, LENGTH = 16, 64  # of many short documents: deterministic attention's memory grows with their number and LENGTH
STEPS = [(20, 40), (40, 20), (20, 600), (600, 40), (20, 20), (40, 40), (100, 20), (20, 100), (100, 100), (40, 600)]
"""Documents of the micro-batches of each step: three buckets, and more than there is a graph for."""


def taken(model_folder, precision, *options):
    """The trained loop, its losses, and copies of its weights and of the scales of delayed scaling."""
    forget_accelerator()
    forget_delayed_scales()
    shape = ["--batch_size", str(ROWS), "--max_seq_length", str(LENGTH), "--gradient_accumulation_steps", "2"]
    words = ["--model_name", str(model_folder), "--random_init", "--use_te", "--output_dir", os.devnull, *NO_WARMUP]
    training = BuiltTraining(parse_config([*words, *shape, *PRECISIONS[precision], *options]))
    loop, vocabulary = training.loop, training.model.config.vocab_size
    loop.scheduler.base_lrs = [1e-3] * len(loop.scheduler.base_lrs)  # so that a stale cast of a weight would show
    for number, counts in enumerate(STEPS):
        training.batches = [
            packed_documents(count, ROWS, LENGTH, vocabulary, seed=10 * number + place).pin_memory()
            for place, count in enumerate(counts)
        ]
        training.take(1)
    weights = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in loop.precision.state_tensors().items()}
    return loop, training.losses, weights, state


@pytest.mark.parametrize("precision", ["bf16", "delayed", "current", "block"])
def test_graphs_of_several_buckets_and_eager_micro_batches_in_any_order(precision, model_folder, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    _, losses, weights, state = taken(model_folder, precision)
    loop, *found = taken(model_folder, precision, "--cuda_graphs")
    kinds = {(bucket, first) for bucket in (32, 64, 128) for first in (True, False)}
    assert set(loop._graphs._graphs) == kinds
    assert found[0] == losses and losses[-1] != losses[0]
    for ours, theirs in ((found[1], weights), (found[2], state)):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert bool(state) == (precision == "delayed")
