"""Frozen weights in fp8 without transposes, of a stand-in for Transformer Engine's module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from llm_fp8.precision.frozen import keep_no_transposes


class Weight:
    """Stands for Float8Tensor, whose transpose is used as it is once it exists."""

    def __init__(self):
        self.data, self.transpose, self.usages, self._quantizer = torch.randn(4, 4), None, {}, self

    def set_usage(self, **usages):
        self.usages = usages

    def update_usage(self, columnwise_usage):
        self.transpose = (self.data.t() if self.transpose is None else self.transpose) if columnwise_usage else None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.weight = weight
        return inputs @ weight.data.t()

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.update_usage(columnwise_usage=True)
        return gradient @ ctx.weight.transpose.t(), None


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight()
        self.weight.update_usage(columnwise_usage=True)
        keep_no_transposes(self, ["weight"])

    def forward(self, inputs):
        assert self.weight.transpose is None
        outputs = Product.apply(inputs, self.weight)
        outputs.detach().add_(1.0)  # as adapters do
        return outputs


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_transposes_exist_during_dgrad_alone(reentrant):
    first, second = Module(), Module()
    layer = nn.Sequential(first, nn.ReLU(), second)
    assert first.weight.usages == {"rowwise": True, "columnwise": False} and first.weight.transpose is None
    inputs = torch.randn(2, 4, requires_grad=True)
    seen = []
    middle = layer[1].register_full_backward_hook(lambda *_: seen.append(second.weight.transpose))
    for _ in range(2):
        outputs = layer(inputs) if reentrant is None else checkpoint(layer, inputs, use_reentrant=reentrant)
        outputs.sum().backward()
        assert first.weight.transpose is None and second.weight.transpose is None
    middle.remove()
    assert seen == [None, None], "dropped as soon as its dgrad is done"


def test_what_a_failed_pass_left_is_not_used():
    module, inputs = Module(), torch.randn(2, 4, requires_grad=True)
    module.weight.transpose = torch.full((4, 4), torch.nan)  # as memory of a capture that failed
    module(inputs).sum().backward()
    assert inputs.grad.isfinite().all() and module.weight.transpose is None


def test_no_hook_stays_where_no_dgrad_comes():
    module, inputs = Module(), torch.randn(2, 4)
    module(inputs)
    assert not inputs._backward_hooks
