"""Frozen fp8 weights without stored transposes. A stand-in replaces Transformer Engine's module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from llm_fp8.precision.frozen import keep_no_transposes


class Weight:
    """Stand in for Float8Tensor, which uses an existing transpose even if the weight has changed since."""

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
        outputs.detach().add_(1.0)  # adapters add to the output in this way
        return outputs


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_transposes_exist_only_during_dgrad(reentrant):
    first, second = Module(), Module()
    layer = nn.Sequential(first, nn.ReLU(), second)
    assert first.weight.usages == {"rowwise": True, "columnwise": False} and first.weight.transpose is None
    inputs = torch.randn(2, 4, requires_grad=True)
    transposes = []
    hook = layer[1].register_full_backward_hook(lambda *_: transposes.append(second.weight.transpose))
    for _ in range(2):
        outputs = layer(inputs) if reentrant is None else checkpoint(layer, inputs, use_reentrant=reentrant)
        outputs.sum().backward()
        assert first.weight.transpose is None and second.weight.transpose is None
    hook.remove()
    assert transposes == [None, None], "the transpose is dropped right after the dgrad of its module"


def test_transpose_left_by_a_failed_pass_is_not_used():
    module, inputs = Module(), torch.randn(2, 4, requires_grad=True)
    module.weight.transpose = torch.full((4, 4), torch.nan)  # as if a graph capture had failed
    module(inputs).sum().backward()
    assert inputs.grad.isfinite().all() and module.weight.transpose is None


def test_no_hook_is_registered_if_inputs_need_no_gradient():
    module, inputs = Module(), torch.randn(2, 4)
    module(inputs)
    assert not inputs._backward_hooks
