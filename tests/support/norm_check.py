"""Norms of a process in which `choose_norm_backend` has chosen, against fp32: a line of JSON for each width and number
of tokens.

    python -m tests.support.norm_check 3072 4096

A process of its own, because Transformer Engine asks once in one.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import DelayedScaling

from llm_fp8.models.build import choose_norm_backend
from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.kernel_trace import kernel_class, kernel_times, record_kernels

NUM_TOKENS = (16, 4096)
EPSILON = 1e-5


def reference(layer: te.LayerNormLinear, inputs: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients of inputs and norm weight, from fp32 throughout."""
    weight, scale = (value.detach().float().requires_grad_() for value in (layer.weight, layer.layer_norm_weight))
    exact = inputs.detach().float().requires_grad_()
    output = nn.functional.linear(nn.functional.rms_norm(exact, (inputs.shape[-1],), scale, EPSILON), weight)
    output.backward(gradient.float())
    return [output, exact.grad, scale.grad]


def check(width: int, num_tokens: int, fp8: bool) -> dict[str, object]:
    """What the fourth pass computes, in which delayed scaling has its scales, and by which norm kernels."""
    torch.manual_seed(width)
    layer = te.LayerNormLinear(
        width, 128, eps=EPSILON, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16
    )
    nn.init.uniform_(layer.layer_norm_weight, 0.5, 1.5)
    inputs = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(num_tokens, 128, device="cuda", dtype=torch.bfloat16)

    def one() -> Tensor:
        layer.zero_grad()
        inputs.grad = None
        with te.autocast(enabled=fp8, recipe=DelayedScaling()):
            output = layer(inputs)
        output.backward(gradient)
        return output

    for _ in range(3):
        one()
    with record_kernels() as recorded:
        output = one()
    results = [output, inputs.grad, layer.layer_norm_weight.grad]
    differences = [relative_difference(*pair) for pair in zip(results, reference(layer, inputs, gradient), strict=True)]
    names = sorted(name for name in kernel_times(recorded) if kernel_class(name) == "norm")
    return {"width": width, "num_tokens": num_tokens, "fp8": fp8, "differences": differences, "kernels": names}


if __name__ == "__main__":
    widths = [int(word) for word in sys.argv[1:]]
    choose_norm_backend(widths[0], torch.cuda.get_device_capability()[0], os.environ)
    for width in widths:
        for num_tokens in NUM_TOKENS:
            for fp8 in (False, True):
                print(json.dumps(check(width, num_tokens, fp8)), flush=True)
