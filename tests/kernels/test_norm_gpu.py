"""The norm kernels of Transformer Engine and of cuDNN are correct, and run for the widths for which they are chosen.

Transformer Engine reads once per process which norm kernels to use. Therefore this module is also a program that
measures some widths (`python -m tests.kernels.test_norm_gpu WIDTH ...`) and prints a line of JSON for each width and
number of tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.kernel_trace import kernel_class, kernel_times, record_kernels
from llm_fp8.precision.te import HOPPER, TUNED_WIDTHS, choose_norm_backend

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
OTHER_WIDTHS = (1536, 2560, 3072, 3584, 5120, 6144)
"""Widths of Qwen and Llama models."""
BOUNDS = {False: 0.005, True: 0.09}
"""Allowed relative difference from fp32 without and with fp8. One element of an E5M2 gradient may be off by 1/8."""


NUM_TOKENS = (16, 4096)
EPSILON = 1e-5


def reference(layer: nn.Module, inputs: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the fp32 output of norm and linear layer, and the gradients of the inputs and of the norm's gain."""
    weight, scale = (value.detach().float().requires_grad_() for value in (layer.weight, layer.layer_norm_weight))
    exact = inputs.detach().float().requires_grad_()
    output = nn.functional.linear(nn.functional.rms_norm(exact, (inputs.shape[-1],), scale, EPSILON), weight)
    output.backward(gradient.float())
    return [output, exact.grad, scale.grad]


def measure(width: int, num_tokens: int, fp8: bool) -> dict[str, object]:
    """Run four steps of a norm with a linear layer, for `num_tokens` tokens of `width` numbers. By the fourth step,
    delayed scaling has scales. Return differences of the fourth step from fp32, and the names of its norm kernels.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(width)
    layer = te.LayerNormLinear(
        width, 128, eps=EPSILON, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16
    )
    nn.init.uniform_(layer.layer_norm_weight, 0.5, 1.5)
    inputs = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    gradient = torch.randn(num_tokens, 128, device="cuda", dtype=torch.bfloat16)

    def train_step() -> Tensor:
        layer.zero_grad()
        inputs.grad = None
        with te.autocast(enabled=fp8, recipe=DelayedScaling()):
            output = layer(inputs)
        output.backward(gradient)
        return output

    for _ in range(3):
        train_step()
    with record_kernels() as recorded:
        output = train_step()
    results = [output, inputs.grad, layer.layer_norm_weight.grad]
    differences = [relative_difference(*pair) for pair in zip(results, reference(layer, inputs, gradient), strict=True)]
    names = sorted(name for name in kernel_times(recorded) if kernel_class(name) == "norm")
    return {"width": width, "num_tokens": num_tokens, "fp8": fp8, "differences": differences, "kernels": names}


@pytest.mark.parametrize("kind", ["tuned", "others"])
def test_norms_match_fp32_and_use_the_chosen_kernels(kind, record_property):
    widths = TUNED_WIDTHS if kind == "tuned" else OTHER_WIDTHS
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_norm_gpu", *map(str, widths)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    entries = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    assert {entry["width"] for entry in entries} == set(widths)
    record_property(
        "worst",
        {str(fp8): max(max(entry["differences"]) for entry in entries if entry["fp8"] == fp8) for fp8 in BOUNDS},
    )
    uses_cudnn = kind == "others" and torch.cuda.get_device_capability()[0] == HOPPER
    for entry in entries:
        assert max(entry["differences"]) < BOUNDS[entry["fp8"]], entry
        names = entry["kernels"]
        for direction in ("fwd", "bwd"):
            is_te = any("rmsnorm" in name and direction in name for name in names)
            assert is_te == (not uses_cudnn), entry


if __name__ == "__main__":
    widths = [int(word) for word in sys.argv[1:]]
    choose_norm_backend(widths[0], torch.cuda.get_device_capability()[0], os.environ)
    for width in widths:
        for num_tokens in NUM_TOKENS:
            for fp8 in (False, True):
                print(json.dumps(measure(width, num_tokens, fp8)), flush=True)
