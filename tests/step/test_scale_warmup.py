"""Delayed scaling has scales before the first step, and finding them leaves no trace."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llm_fp8.precision.context import Precision
from llm_fp8.step import scale_warmup
from llm_fp8.step.scale_warmup import PASSES, warm_up_delayed_scales
from tests.support.small import steps, train

WIDTH, NUM_TOKENS = 32, 64
E5M2_MAX = torch.finfo(torch.float8_e5m2).max
TINY = 1e-7
"""The size of a gradient that reaches the last layer: a mean over many tokens. E5M2's smallest number is 1.5e-5."""


class _CastGradient(torch.autograd.Function):
    """The identity, whose gradient is rounded to E5M2 with the scale that earlier passes left."""

    @staticmethod
    def forward(ctx, output, module):
        ctx.module = module
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        module = ctx.module
        scaled = (gradient * module.scale).clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2).float() / module.scale
        amax = gradient.abs().max()
        module.next_scale = E5M2_MAX / amax if amax > 0 else module.scale
        return scaled, None


class DelayedLinear(nn.Linear):
    """Both GEMMs of its backward pass take the gradient in E5M2, as Transformer Engine's do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scale = self.next_scale = torch.tensor(1.0)

    def forward(self, inputs):
        return _CastGradient.apply(super().forward(inputs), self)


class Blocks(nn.Module):
    """Residual blocks of a norm and two GEMMs; takes a `Batch`'s stand-in and returns a summed loss.

    With a gain of 1 a block adds about as much to the residual stream as there is.
    """

    def __init__(self, num_layers: int = 3, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(DelayedLinear(WIDTH, 2 * WIDTH) for _ in range(num_layers))
        self.second = nn.ModuleList(DelayedLinear(2 * WIDTH, WIDTH) for _ in range(num_layers))
        for linear in (*self.first, *self.second):
            nn.init.normal_(linear.weight, std=gain / linear.in_features**0.5)
        self.dropout = nn.Dropout(0.1)
        self.num_passes = 0

    def forward(self, batch):
        self.num_passes += 1
        hidden = batch.input_ids
        for first, second in zip(self.first, self.second, strict=True):
            normed = nn.functional.rms_norm(self.dropout(hidden), (WIDTH,))
            hidden = hidden + second(nn.functional.silu(first(normed)))
        return (nn.functional.rms_norm(hidden, (WIDTH,)) * batch.labels).sum(), {}


class Seam:
    """As `Precision`, around `Blocks`: scales are renewed after each pass."""

    def __init__(self, model: nn.Module) -> None:
        self._linears = [module for module in model.modules() if isinstance(module, DelayedLinear)]

    @contextlib.contextmanager
    def context(self, first_microbatch):
        assert first_microbatch is None, "no cast is kept"
        for module in self._linears:
            module.scale = module.next_scale
        yield


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    input_ids, labels = torch.randn(2, NUM_TOKENS, WIDTH, generator=generator)
    return SimpleNamespace(input_ids=input_ids, labels=labels)


def errors(num_passes: int, batch, monkeypatch, **size) -> dict[str, float]:
    """The worst relative errors of the first step's gradients after so many passes, of the first and of the second
    GEMMs.
    """
    monkeypatch.setattr("llm_fp8.step.scale_warmup.PASSES", num_passes)
    model = Blocks(**size)
    seam = Seam(model)
    warm_up_delayed_scales(model, seam, batch, round(1 / TINY))
    model.dropout.p = 0.0
    with seam.context(None):
        (model(batch)[0] * TINY).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for module in seam._linears:  # large gradients are exact enough with a scale of 1
        module.scale = torch.tensor(1.0)
    model(batch)[0].backward()
    worst = {"first": 0.0, "second": 0.0}
    for name, parameter in model.named_parameters():
        exact = parameter.grad * TINY
        kind = name.partition(".")[0]
        worst[kind] = max(worst[kind], float((found[name] - exact).norm() / exact.norm()))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("gain", [1.0, 2.5])
def test_as_many_passes_as_deep_models_need(gain, batch, monkeypatch):
    enough = errors(PASSES, batch, monkeypatch, num_layers=32, gain=gain)
    assert max(enough.values()) < 0.3, enough
    if gain > 1:  # the gradient has grown most, and was cut off
        two = errors(2, batch, monkeypatch, num_layers=32, gain=gain)
        assert two["first"] > enough["first"] and two["second"] > enough["second"]


def test_nothing_is_left_but_scales(batch):
    model = Blocks()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    together = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: together.append(sum(parameter.grad is not None for parameter in model.parameters()))
        )
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    warm_up_delayed_scales(model, Seam(model), batch, 10)
    assert torch.equal(torch.rand(4), expected), "dropout drew random numbers of its own"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and model.num_passes == PASSES
    assert set(together) == {1}, "no two gradients are there at a time"
    model(batch)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "afterwards they stay"


@pytest.fixture
def lagging(monkeypatch):
    """A run on the CPU takes itself for one with delayed scaling; gives the calls of `warm_up_delayed_scales`."""
    calls = []

    def find(*arguments):
        calls.append(arguments)
        warm_up_delayed_scales(*arguments)

    monkeypatch.setattr(Precision, "scales_lag", property(lambda self: True))
    monkeypatch.setattr(Precision, "state_tensors", lambda self: {})
    monkeypatch.setattr(scale_warmup, "warm_up_delayed_scales", find)
    return calls


@pytest.mark.slow
def test_a_run_is_bit_for_bit_what_it_is_without_them(tmp_path, tiny_model, sixteen_rows, lagging, monkeypatch, capsys):
    options = f"--model_name={tiny_model} --dataset_name={sixteen_rows} --max_seq_length=256 --batch_size=2".split()
    options += "--gradient_accumulation_steps=2 --lora_rank=4 --lora_dropout=0.5 --lr_scheduler=constant".split()
    options.append("--no_export")
    train(*options, "--max_steps=4", "--save_every=2", f"--output_dir={tmp_path / 'with'}")
    assert len(lagging) == 1 and f"first scales from {PASSES} passes" in capsys.readouterr().out
    longer = ["--max_steps=6", "--allow_changed=total_steps", "--resume_from=latest"]
    train(*options, *longer, f"--output_dir={tmp_path / 'with'}")
    assert len(lagging) == 1, "a resumed run has its scales"
    monkeypatch.setattr(Precision, "scales_lag", property(lambda self: False))
    train(*options, "--max_steps=6", f"--output_dir={tmp_path / 'without'}")
    assert len(lagging) == 1, "recipes without scales of the past take no passes"
    found, expected = (
        [(record["loss"], record["grad_norm"]) for record in steps(tmp_path / name)] for name in ("with", "without")
    )
    assert len(found) == 6 and found == expected


@pytest.mark.slow
def test_other_scale_options_find_their_scales_anew(tmp_path, tiny_model, sixteen_rows, lagging, monkeypatch):
    kept: list[dict[str, torch.Tensor]] = []

    def state_tensors(self):
        if not hasattr(self, "kept"):
            self.kept = {f"{name}.scale": torch.zeros(3) for name in self._fp8_modules}
            kept.append(self.kept)
        return self.kept

    def find(*arguments):
        lagging.append(arguments)
        for scale in state_tensors(arguments[1]).values():
            scale.fill_(float(len(lagging)))

    monkeypatch.setattr(Precision, "state_tensors", state_tensors)
    monkeypatch.setattr(scale_warmup, "warm_up_delayed_scales", find)
    options = f"--model_name={tiny_model} --dataset_name={sixteen_rows} --max_seq_length=256 --batch_size=2".split()
    options += "--mixed_precision=fp8 --fp8_backend=torchao --no_export --attn_implementation=eager".split()
    options.append(f"--output_dir={tmp_path}")
    train(*options, "--max_steps=2", "--save_every=2")
    more = ["--max_steps=3", "--save_every=3", "--resume_from=latest"]
    train(*options, *more, "--allow_changed=total_steps")
    change = ["--fp8_bf16_modules=layers.-1", "--max_steps=4", "--resume_from=latest"]
    assert train(*options, *change, "--allow_changed=total_steps,fp8_bf16_modules") == 0
    _, same, other = kept
    assert len(lagging) == 2 and other.keys() < same.keys()
    assert {scale for tensor in same.values() for scale in tensor.tolist()} == {1.0}, "those of the checkpoint"
    assert {scale for tensor in other.values() for scale in tensor.tolist()} == {2.0}
