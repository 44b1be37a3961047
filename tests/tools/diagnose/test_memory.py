"""Memory by kind: bytes of made-up tensors, the peak divided among made-up marks, and the probe on a real training
step.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from llm_fp8.config.options import Config, DataConfig, ModelConfig, OptimConfig, PrecisionConfig
from llm_fp8.models.build import decoder_layers
from llm_fp8.tools.diagnose.gemm_operands import GemmRecorder
from llm_fp8.tools.diagnose.memory import HOW_FOUND, Mark, divide_peak, held_bytes, known_bytes, memory_marks
from llm_fp8.tools.diagnose.session import build_training

CPU = torch.device("cpu")


class Float8TensorStorage:
    def __init__(self, rows: int) -> None:
        self._data = torch.zeros(rows, 16, dtype=torch.uint8)
        self._transpose = torch.zeros(16, rows, dtype=torch.uint8)
        self._scale_inv = torch.ones(1)
        self._quantizer = None
        self._transpose_invalid = False


class Float8BlockwiseQTensor(torch.Tensor):
    """A wrapper subclass: its own memory is nothing, its parts are attributes."""

    @staticmethod
    def __new__(cls, rows: int):
        return torch.Tensor._make_wrapper_subclass(cls, (rows, 16), dtype=torch.bfloat16)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)

    def __init__(self, rows: int) -> None:
        self._rowwise_data = torch.zeros(rows, 16, dtype=torch.uint8)
        self._columnwise_data = None
        self._rowwise_scale_inv = torch.ones(rows)


class HybridStorage:
    def __init__(self) -> None:
        self._rowwise_storage, self._columnwise_storage, self._quantizer = (
            Float8TensorStorage(2),
            Float8TensorStorage(4),
            None,
        )


def test_bytes_of_quantised_tensors_are_those_of_their_parts():
    assert held_bytes([Float8TensorStorage(8)], CPU, {0}) == 2 * 8 * 16 + 4
    assert held_bytes([Float8BlockwiseQTensor(8)], CPU, {0}) == 8 * 16 + 8 * 4
    assert held_bytes([HybridStorage()], CPU, {0}) == 2 * (2 + 4) * 16 + 8
    assert held_bytes([None, 3, "text"], CPU, {0}) == 0


def test_shared_memory_counts_once_and_views_by_what_they_hold():
    tensor, seen = torch.zeros(100), {0}
    assert held_bytes([tensor, tensor.view(10, 10), nn.Parameter(tensor)], CPU, seen) == 400
    assert held_bytes([tensor], CPU, seen) == 0
    assert held_bytes([torch.zeros(100)[:1]], CPU, {0}) == 400
    assert held_bytes([torch.zeros(4, device="meta")], CPU, {0}) == 0


def test_known_bytes_of_a_model():
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data.view(16, 8))  # tied
    optimizer = torch.optim.Adam([model[0].weight])
    model[0](torch.randn(2, 16)).sum().backward()
    optimizer.step()
    model[0]._fp8_workspaces = {"weight": Float8TensorStorage(8)}
    known = known_bytes(model, optimizer, CPU)
    assert known == {"weights": 512, "fp8_weights": 260, "gradients": 512, "optimizer_state": 2 * 512 + 4}


def mark(stage, allocated, peak_before=0, weights=100, fp8=0, gradients=0, state=50):
    return Mark(
        stage,
        allocated,
        peak_before,
        {"weights": weights, "fp8_weights": fp8, "gradients": gradients, "optimizer_state": state},
    )


def divided(marks):
    """The peak in bytes, its stage, and its kinds."""
    stage, kinds = divide_peak(marks)
    peak = sum(kinds.values())
    assert peak == max(mark.peak_before for mark in marks) and tuple(kinds) == tuple(HOW_FOUND)
    return peak, stage, kinds


def test_peak_in_the_loss():
    """Standing 10; activations 40; logits 30 and a workspace of 25 beside them."""
    marks = [
        mark("forward", 160),
        mark("loss", 200, 205),
        mark("loss_backward", 230, 255),
        mark("backward", 200, 240),
        mark("end", 160, 220),
    ]
    peak, stage, kinds = divided(marks)
    assert (peak, stage) == (255, "loss")
    assert kinds["activations"] == 40 and kinds["loss"] == 55 and kinds["other"] == 10


def test_peak_in_the_losss_backward_pass():
    """Logits of 30 are still held, and the head's gradient of 20 is formed there beside 15 of workspace."""
    marks = [
        mark("forward", 160),
        mark("loss", 200, 205),
        mark("loss_backward", 230, 232),
        mark("backward", 220, 265, gradients=20),
        mark("end", 180, 225, gradients=20),
    ]
    peak, stage, kinds = divided(marks)
    assert (peak, stage) == (265, "loss_backward")
    assert kinds["gradients"] == 20 and kinds["loss"] == 45 and kinds["activations"] == 40


def test_peak_in_a_forward_pass_counts_what_is_kept():
    """A layer keeps 25 and its casts take 30; 5 more lived for a moment."""
    peak, stage, kinds = divided(
        [mark("forward", 160), mark("forward", 170, 170), mark("loss", 225, 230, fp8=30), mark("end", 160, 180)]
    )
    assert (peak, stage) == (230, "forward")
    assert kinds["activations"] == 10 + 25 and kinds["fp8_weights"] == 30 and kinds["other"] == 10 + 5


def test_peak_in_the_optimizers_step():
    """First step: the state of 80 comes into being there."""
    marks = [
        mark("forward", 110, state=0),
        mark("step", 210, 200, gradients=100, state=0),
        mark("end", 290, 295, gradients=100, state=80),
    ]
    peak, stage, kinds = divided(marks)
    assert (peak, stage) == (295, "step")
    assert kinds["gradients"] == 100 and kinds["optimizer_state"] == 80
    assert kinds["activations"] == 0 and kinds["other"] == 15


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_probe_and_recorder_on_a_real_step(tiny_model, packing, checkpointing):
    """A real run's parts on the CPU; the allocator's count is a stand-in, the stages and bytes are real."""
    config = Config(
        model=ModelConfig(model_name=tiny_model, gradient_checkpointing=checkpointing),
        precision=PrecisionConfig(mixed_precision="bf16"),
        data=DataConfig(max_seq_length=64, batch_size=2, packing=packing),
        optim=OptimConfig(gradient_accumulation_steps=2),
    )
    training = build_training(config)
    shape = training.loop.loader.batches[0].input_ids.shape
    assert shape == ((1, 128) if packing else (2, 64)) and len(training.loop.loader.batches) == 2
    weights = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    stored = load_file(f"{tiny_model}/model.safetensors")
    assert torch.equal(weights["lm_head.weight"], stored["lm_head.weight"])  # the folder's own weights, not drawn ones
    trainer, count = training.loop, iter(range(1, 10_000))

    def meter() -> tuple[int, int]:
        number = next(count)
        return number, number

    layers = decoder_layers(training.model)
    with memory_marks(trainer.model, training.model.base_model, layers, trainer.optimizer, CPU, meter) as marks:
        training.take(1)
    stages = [mark.stage for mark in marks]
    micro_batch = ["forward"] * 3 + ["loss", "loss_backward"] + ["backward"] * 2
    assert stages == [*micro_batch, *micro_batch, "step", "end"]
    total = sum(p.numel() * 4 for p in training.model.parameters())
    first, before_step, last = marks[0].known, marks[-2].known, marks[-1].known
    assert first["weights"] == total and first["gradients"] == 0 and first["optimizer_state"] == 0
    assert before_step["gradients"] == total and last["optimizer_state"] >= 2 * total
    recorder = GemmRecorder(training.model)
    with recorder.recording([]):
        training.take(1)
    assert len(recorder.modules()) == 2 * 7 and recorder.modules()[0].operands("fprop") == ("bf16 x bf16",)
    training.take(1)
    assert len(marks) == len(stages)  # nothing stays behind
