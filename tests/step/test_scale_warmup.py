"""The warm-up of delayed scaling sets the scales before the first step and changes nothing else."""

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
"""Size of the gradient at the last layer, for a mean over many tokens. The smallest number of E5M2 is 1.5e-5."""


class _CastGradient(torch.autograd.Function):
    """Return a copy of the input. The backward pass rounds the gradient to E5M2 with a scale from an earlier pass."""

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
    """A linear layer with delayed scaling: its output gradient is rounded to E5M2 with a scale from an earlier pass."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scale = self.next_scale = torch.tensor(1.0)

    def forward(self, inputs):
        return _CastGradient.apply(super().forward(inputs), self)


class Blocks(nn.Module):
    """Residual blocks, each with a norm and two linear layers. The forward pass returns a summed loss. `gain` scales
    the initial weights. With 1, activations are about as large after a linear layer as before it.
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


class PrecisionStandIn:
    """Replacement for `Precision` that updates the scales of `Blocks` before each pass."""

    def __init__(self, model: nn.Module) -> None:
        self._linears = [module for module in model.modules() if isinstance(module, DelayedLinear)]

    @contextlib.contextmanager
    def context(self, first_microbatch):
        assert first_microbatch is None, "weight casts must not be cached"
        for module in self._linears:
            module.scale = module.next_scale
        yield


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    input_ids, labels = torch.randn(2, NUM_TOKENS, WIDTH, generator=generator)
    return SimpleNamespace(input_ids=input_ids, labels=labels)


def errors(num_passes: int, batch, monkeypatch, **size) -> dict[str, float]:
    """Warm up the scales in `num_passes` passes and compute gradients. Return the largest relative error of a weight's
    gradient in the "first" and in the "second" linear layers of the blocks. `size` are arguments of `Blocks`.
    """
    monkeypatch.setattr("llm_fp8.step.scale_warmup.PASSES", num_passes)
    model = Blocks(**size)
    precision = PrecisionStandIn(model)
    warm_up_delayed_scales(model, precision, batch, round(1 / TINY))
    model.dropout.p = 0.0
    with precision.context(None):
        (model(batch)[0] * TINY).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for module in precision._linears:  # the gradients are now large, and a scale of 1 is exact enough
        module.scale = torch.tensor(1.0)
    model(batch)[0].backward()
    worst = {"first": 0.0, "second": 0.0}
    for name, parameter in model.named_parameters():
        exact = parameter.grad * TINY
        kind = name.partition(".")[0]
        worst[kind] = max(worst[kind], float((gradients[name] - exact).norm() / exact.norm()))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("gain", [1.0, 2.5])
def test_number_of_passes_is_sufficient_for_deep_models(gain, batch, monkeypatch):
    final_errors = errors(PASSES, batch, monkeypatch, num_layers=32, gain=gain)
    assert max(final_errors.values()) < 0.3, final_errors
    if gain > 1:  # the gradient grows most, so that the first scales saturate it
        early_errors = errors(2, batch, monkeypatch, num_layers=32, gain=gain)
        assert all(early_errors[gemm] > final_errors[gemm] for gemm in ("first", "second"))


def test_warm_up_changes_scales_only(batch):
    model = Blocks()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    num_gradients = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: num_gradients.append(sum(parameter.grad is not None for parameter in model.parameters()))
        )
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    warm_up_delayed_scales(model, PrecisionStandIn(model), batch, 10)
    assert torch.equal(torch.rand(4), expected), "the random state is restored"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and model.num_passes == PASSES
    assert set(num_gradients) == {1}, "each gradient is freed before the next one is computed"
    model(batch)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters()), "later gradients are kept"


@pytest.fixture
def warm_up_calls(monkeypatch):
    """Make runs on the CPU warm up scales as with delayed scaling. Return a list of the arguments of each warm-up."""
    calls = []

    def recorded_warm_up(*arguments):
        calls.append(arguments)
        warm_up_delayed_scales(*arguments)

    monkeypatch.setattr(Precision, "scales_lag", property(lambda self: True))
    monkeypatch.setattr(Precision, "state_tensors", lambda self: {})
    monkeypatch.setattr(scale_warmup, "warm_up_delayed_scales", recorded_warm_up)
    return calls


@pytest.mark.slow
def test_run_with_warm_up_equals_run_without(tmp_path, tiny_model, sixteen_rows, warm_up_calls, monkeypatch, capsys):
    options = f"--model_name={tiny_model} --dataset_name={sixteen_rows} --max_seq_length=256 --batch_size=2".split()
    options += "--gradient_accumulation_steps=2 --lora_rank=4 --lora_dropout=0.5 --lr_scheduler=constant".split()
    options.append("--no_export")
    train(*options, "--max_steps=4", "--save_every=2", f"--output_dir={tmp_path / 'with'}")
    assert len(warm_up_calls) == 1 and f"first scales from {PASSES} passes" in capsys.readouterr().out
    longer = ["--max_steps=6", "--allow_changed=total_steps", "--resume_from=latest"]
    train(*options, *longer, f"--output_dir={tmp_path / 'with'}")
    assert len(warm_up_calls) == 1, "a resumed run already has scales"
    monkeypatch.setattr(Precision, "scales_lag", property(lambda self: False))
    train(*options, "--max_steps=6", f"--output_dir={tmp_path / 'without'}")
    assert len(warm_up_calls) == 1, "recipes without delayed scaling need no warm-up"
    with_warm_up, expected = (
        [(record["loss"], record["grad_norm"]) for record in steps(tmp_path / name)] for name in ("with", "without")
    )
    assert len(with_warm_up) == 6 and with_warm_up == expected


@pytest.mark.slow
def test_resume_with_changed_scales_warms_up_again(tmp_path, tiny_model, sixteen_rows, warm_up_calls, monkeypatch):
    scales_by_run: list[dict[str, torch.Tensor]] = []

    def state_tensors(self):
        if not hasattr(self, "scales"):
            self.scales = {f"{name}.scale": torch.zeros(3) for name in self._fp8_modules}
            scales_by_run.append(self.scales)
        return self.scales

    def recorded_warm_up(*arguments):
        warm_up_calls.append(arguments)
        for scale in state_tensors(arguments[1]).values():
            scale.fill_(float(len(warm_up_calls)))

    monkeypatch.setattr(Precision, "state_tensors", state_tensors)
    monkeypatch.setattr(scale_warmup, "warm_up_delayed_scales", recorded_warm_up)
    options = f"--model_name={tiny_model} --dataset_name={sixteen_rows} --max_seq_length=256 --batch_size=2".split()
    options += "--mixed_precision=fp8 --fp8_backend=torchao --no_export --attn_implementation=eager".split()
    options.append(f"--output_dir={tmp_path}")
    train(*options, "--max_steps=2", "--save_every=2")
    more = ["--max_steps=3", "--save_every=3", "--resume_from=latest"]
    train(*options, *more, "--allow_changed=total_steps")
    change = ["--fp8_bf16_modules=layers.-1", "--max_steps=4", "--resume_from=latest"]
    assert train(*options, *change, "--allow_changed=total_steps,fp8_bf16_modules") == 0
    _, unchanged, changed = scales_by_run
    assert len(warm_up_calls) == 2 and changed.keys() < unchanged.keys()
    assert {scale for tensor in unchanged.values() for scale in tensor.tolist()} == {1.0}, "from the checkpoint"
    assert {scale for tensor in changed.values() for scale in tensor.tolist()} == {2.0}
