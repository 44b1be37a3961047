"""--cuda_graphs without a GPU, with a stand-in for Transformer Engine and emulated graphs.

An emulated graph calls its Python function again, and checks that gradients are in the tensors in which they were at
the capture. Tests on a GPU are in test_micro_batch_graphs_gpu.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from accelerate import Accelerator
from torch.nn import Parameter

import te_llama
from llm_fp8.config.options import ParallelConfig, PrecisionConfig
from llm_fp8.data.collate import Batch, Layout
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.build import fill_weights
from llm_fp8.models.model import Model, decoder_layers
from llm_fp8.models.parity import relative_difference
from llm_fp8.precision.context import Precision
from llm_fp8.step import micro_batch_graphs
from llm_fp8.step.loss_model import TrainingModel
from llm_fp8.step.micro_batch_graphs import MicroBatchGraphs, bucket_of
from llm_fp8.step.stepper import Stepper
from llm_fp8.step.wgrad_fusion import FusedWgradAccumulation
from tests.support.batches import random_rows
from tests.support.reference import NUM_STEPS, compare_with_reference
from tests.support.small import (
    assert_same_bits,
    final_weights,
    length_config,
    precision_on,
    reset_accelerator,
    steps,
    tiny_config,
    train,
)
from tests.support.stand_in_te import install_stand_in


def packed_documents(num_documents: int, num_rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    """Return a batch of `num_documents` random documents that fill `num_rows` rows of `length` tokens. All tokens are
    supervised, and token ids are below `vocabulary`.
    """
    draw, lengths = random.Random(seed), []
    for row in range(num_rows):
        count = num_documents // num_rows + (row < num_documents % num_rows)
        bounds = [0, *sorted(draw.sample(range(1, length), count - 1)), length]
        lengths.append([stop - start for start, stop in itertools.pairwise(bounds)])
    batch = Layout(num_rows, length, pad_token_id=0, packed=True)(random_rows(lengths, vocabulary, seed))
    assert batch.cu_seqlens is not None and len(batch.cu_seqlens) - 1 == num_documents
    return batch


class EmulatedGraph:
    """Emulates a CUDA graph: each call runs `work` with the gradient tensors that `parameters` had at the capture."""

    def __init__(self, work: Callable[[], None], parameters: Sequence[Parameter]) -> None:
        self._work, self._parameters = work, parameters
        self._gradients = [parameter.grad for parameter in parameters]
        self.num_replays = 0

    def __call__(self) -> None:
        self.num_replays += 1
        previous = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._work()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            assert parameter.grad is gradient, "a CUDA graph would write to the old gradient"
        for parameter, gradient in zip(self._parameters, previous, strict=True):
            parameter.grad = gradient


class EmulatedCapture:
    """Replacement for `Capture` that only appends an `EmulatedGraph` to `graphs`. It does not run the function."""

    def __init__(self, parameters: Sequence[Parameter] = ()) -> None:
        self._parameters = parameters
        self.graphs: list[EmulatedGraph] = []
        self.dropped_at: list[int] = []  # number of graphs captured before each drop of all graphs

    def __call__(self, work: Callable[[], None]) -> EmulatedGraph:
        self.graphs.append(EmulatedGraph(work, self._parameters))
        return self.graphs[-1]

    def begin_anew(self) -> None:
        self.dropped_at.append(len(self.graphs))


def emulate_graphs(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedCapture]:
    """Make runs with --cuda_graphs work without a GPU. Return a list to which each run adds its `EmulatedCapture`."""
    captures: list[EmulatedCapture] = []

    def graphs(run, parameters, overwritten, capture, after, collective):
        captures.append(EmulatedCapture(parameters))
        return MicroBatchGraphs(run, parameters, overwritten, captures[-1], after, collective)

    monkeypatch.setattr("llm_fp8.step.micro_batch_graphs.Capture", EmulatedCapture)
    monkeypatch.setattr("llm_fp8.step.micro_batch_graphs.memory_beside_graphs", lambda: (0.0, False))
    monkeypatch.setattr("llm_fp8.step.micro_batch_graphs.MicroBatchGraphs", graphs)
    return captures


ROWS, LENGTH = 2, 64


@pytest.fixture
def stand_in(monkeypatch):
    install_stand_in(monkeypatch)


def batch(num_documents, seed=0):
    """Return a batch of `num_documents` documents that fill `ROWS` rows of `LENGTH` tokens."""
    return packed_documents(num_documents, ROWS, LENGTH, 1024, seed)


def test_bucket_is_the_smallest_that_fits_the_documents():
    lengths = {count: bucket_of(dataclasses.replace(batch(2), cu_seqlens=torch.zeros(count + 1))) for count in
               (1, 32, 33, 64, 65, 512, 513, 2048, 2049)}  # fmt: skip
    assert lengths == {1: 32, 32: 32, 33: 64, 64: 64, 65: 128, 512: 512, 513: 1024, 2048: 2048, 2049: None}


class RecordedMicroBatches:
    """Runs `MicroBatchGraphs` on a function, `run`, that computes no loss but records its arguments in `calls`."""

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.calls = []
        self.capture = EmulatedCapture([self.weight])
        self.num_after = 0
        self.graphs = MicroBatchGraphs(self.run, [self.weight], [], self.capture, self.after, collective=False)

    def run(self, inputs, num_supervised, first, last):
        self.calls.append((inputs, first, inputs.cu_seqlens.tolist(), inputs.input_ids.clone(), int(num_supervised)))
        return inputs.input_ids.sum().float()

    def after(self):
        self.num_after += 1

    def compute(self, inputs, first, num_supervised=1):
        return float(self.graphs(inputs, torch.tensor(num_supervised), first, last=True))

    @property
    def replays(self):
        return [graph.num_replays for graph in self.capture.graphs]


def test_each_kind_of_micro_batch_runs_eagerly_once_and_then_as_graph(monkeypatch):
    monkeypatch.setattr(micro_batch_graphs, "BUCKETS", (4, 8))
    recorded, few, many = RecordedMicroBatches(), batch(3), batch(6)
    for inputs, first, replays in (
        (few, True, []), (few, False, []), (few, False, [1]), (few, True, [1, 1]), (many, True, [1, 1]),
        (few, False, [2, 1]), (many, False, [2, 1]), (many, True, [2, 1, 1]), (many, False, [2, 1, 1, 1]),
        (few, True, [2, 2, 1, 1]), (batch(9), True, [2, 2, 1, 1]), (batch(9), True, [2, 2, 1, 1]),
    ):  # fmt: skip
        recorded.compute(inputs, first)
        assert recorded.replays == replays
        assert recorded.calls[-1][1] == first
    assert len(recorded.calls) == recorded.num_after == 12, "a capture must not run the function"


def test_eager_passes_drop_graphs_if_memory_is_short(monkeypatch):
    """Evaluations, and batches with too many documents for a graph, are eager. All graphs are dropped before them."""
    monkeypatch.setattr(micro_batch_graphs, "BUCKETS", (4, 8))
    recorded, few, many = RecordedMicroBatches(), batch(3), batch(6)
    recorded.graphs.drops_before_eager = True
    for inputs, replays, drops in (
        (few, [], []), (few, [1], []), (few, [2], []), (many, [2], [1]), (many, [2, 1], [1]), (few, [2, 1, 1], [1]),
        (batch(9), [2, 1, 1], [1, 3]), (batch(9), [2, 1, 1], [1, 3]), (few, [2, 1, 1, 1], [1, 3]),
    ):  # fmt: skip
        recorded.compute(inputs, first=True)
        assert (recorded.replays, recorded.capture.dropped_at) == (replays, drops)
    recorded.graphs.make_room()
    recorded.graphs.make_room()
    assert recorded.capture.dropped_at == [1, 3, 4]


def test_graph_input_is_the_batch_padded_with_empty_documents(monkeypatch):
    monkeypatch.setattr(micro_batch_graphs, "BUCKETS", (8,))
    recorded = RecordedMicroBatches()
    batches = [batch(count, seed) for seed, count in enumerate((3, 7, 2, 8))]
    addresses = set()
    for number, original in enumerate(batches):
        loss = recorded.compute(original, first=True, num_supervised=number + 5)
        inputs, _, bounds, ids, num_supervised = recorded.calls[-1]
        expected = original.cu_seqlens.tolist()
        assert bounds == expected + [ROWS * LENGTH] * (9 - len(expected)) and num_supervised == number + 5
        assert torch.equal(ids, original.input_ids) and loss == float(original.input_ids.sum())
        assert inputs.max_seqlen == LENGTH and inputs.cu_seqlens.dtype == torch.int32
        assert inputs.input_ids is not original.input_ids
        addresses.add((inputs.input_ids.data_ptr(), inputs.labels.data_ptr(), inputs.cu_seqlens.data_ptr()))
    assert len(addresses) == 1 and recorded.replays == [3]


class Training:
    """Trains a tiny decoder of stand-ins for TE modules with `Stepper.micro_batch`. `changes` are for its config."""

    def __init__(self, with_graphs: bool, **changes):
        reset_accelerator()
        model = te_llama.build_te_model(tiny_config(**changes), torch.bfloat16, "cpu")
        fill_weights(Model(model))
        device, options = torch.device("cpu"), PrecisionConfig(mixed_precision="bf16")
        self.precision = Precision(precision_on(options, device), options, device, torch.bfloat16)
        self.precision.attach(model, decoder_layers(model))
        self.strategy = DistributedStrategy("single", Accelerator(cpu=True), ParallelConfig(), plain=True)
        self.training_model = training_model = TrainingModel(model, length_config(LENGTH), torch.bfloat16).train()
        self.names, self.parameters = zip(*training_model.named_parameters(), strict=True)
        optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        self.strategy.shard(training_model, decoder_layers(model))
        self.model, self.optimizer = self.strategy.prepare(training_model, optimizer)
        self.wgrad_accumulation = FusedWgradAccumulation(self.model, self.strategy)
        self.run = functools.partial(Stepper.micro_batch, self)
        self.capture = EmulatedCapture(self.parameters)
        self.graphs = None
        if with_graphs:
            overwritten = self.wgrad_accumulation.weights()
            self.graphs = MicroBatchGraphs(self.run, self.parameters, overwritten, self.capture, lambda: None, False)

    def step(self, batches):
        """Take a step on a list of micro-batches. Return the losses, the gradients and the weights after the step."""
        num_supervised = torch.tensor(sum(each.num_supervised_tokens for each in batches))
        losses = []
        for number, inputs in enumerate(batches):
            first = number == 0
            if self.graphs is not None:
                losses.append(float(self.graphs(inputs, num_supervised, first, last=True)))
            else:
                losses.append(float(self.run(inputs, num_supervised, first if len(batches) > 1 else None)))
        gradients = [parameter.grad.clone() for parameter in self.parameters]
        self.strategy.step(self.optimizer, self.parameters, 1.0)
        assert all(parameter.grad is None for parameter in self.parameters)
        return losses, gradients, [parameter.detach().clone() for parameter in self.parameters]


STEPS = [(3, 6, 3), (2, 9, 3), (9, 3, 6), (3,), (6, 3, 4, 9), (6,), (9,), (3, 3, 3)]
"""Number of documents in each micro-batch of each step. Buckets are 4 and 8, so that 9 documents always run eagerly.
Every other kind runs eagerly once and then as a graph.
"""


def take_steps(training):
    return [
        training.step([batch(count, seed=100 * number + place) for place, count in enumerate(counts)])
        for number, counts in enumerate(STEPS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}], ids=str)
def test_mixed_graph_and_eager_micro_batches_equal_eager_training(monkeypatch, stand_in, changes):
    monkeypatch.setattr(micro_batch_graphs, "BUCKETS", (4, 8))
    graphs, eager, plain = Training(True, **changes), Training(True, **changes), Training(False, **changes)
    eager.graphs.may_capture = False
    results, expected, without_graphs = take_steps(graphs), take_steps(eager), take_steps(plain)
    assert [graph.num_replays > 0 for graph in graphs.capture.graphs] == [True] * 4 and not eager.capture.graphs
    for (losses, gradients, weights), (their_losses, theirs, their_weights) in zip(results, expected, strict=True):
        assert losses == their_losses
        assert all(map(torch.equal, gradients, theirs)) and all(map(torch.equal, weights, their_weights))
    # Only the first steps: the stand-in's GEMMs round differently from autograd's, so that weights diverge.
    for (losses, gradients, _), (their_losses, theirs, _) in zip(results[:2], without_graphs[:2], strict=True):
        assert losses == pytest.approx(their_losses, rel=1e-3)
        for name, ours, other in zip(graphs.names, gradients, theirs, strict=True):
            assert relative_difference(ours, other) < 0.03, name


# --- Runs -------------------------------------------------------------------------------------------------------------

GRAPHS = ("--use_te", "--cuda_graphs")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["8x1", "2x4"])
def test_run_with_graphs_equals_reference(tmp_path, tiny_model, sixteen_rows, monkeypatch, stand_in, sizes):
    captures = emulate_graphs(monkeypatch)
    batch_size, accumulation = sizes.split("x")
    sizes = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}"]
    compare_with_reference(tmp_path, tiny_model, sixteen_rows, False, *GRAPHS, *sizes)
    [capture] = captures
    assert sum(graph.num_replays for graph in capture.graphs) >= NUM_STEPS - 1


@pytest.mark.slow
def test_resumed_run_with_graphs_takes_the_same_steps(tmp_path, tiny_model, rows, monkeypatch, stand_in):
    captures = emulate_graphs(monkeypatch)

    def run(folder, *more):
        train(
            f"--model_name={tiny_model}", f"--dataset_name={rows}", "--validation_fraction=0.2", *GRAPHS,
            "--max_seq_length=256", "--learning_rate=1e-3", "--lr_scheduler=constant", "--num_warmup_steps=0",
            "--batch_size=2", "--gradient_accumulation_steps=3", "--eval_every=1", "--save_every=2", "--log_every=1",
            f"--output_dir={folder}", *more,
        )  # fmt: skip

    uninterrupted, parts = tmp_path / "uninterrupted", tmp_path / "parts"
    run(uninterrupted, "--max_steps=4")
    run(parts, "--max_steps=2")
    run(parts, "--max_steps=4", "--allow_changed=total_steps", "--resume_from=latest")
    assert all(capture.graphs for capture in captures) and len(captures) == 3
    assert [step["grad_norm"] for step in steps(parts)] == [step["grad_norm"] for step in steps(uninterrupted)]
    assert_same_bits(final_weights(uninterrupted), final_weights(parts))
