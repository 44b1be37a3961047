"""Tests of how the parity check judges invented errors, and of the check on a TE decoder of stand-in modules.

The tests in test_parity_gpu.py run the check on Transformer Engine's modules.
"""

from __future__ import annotations

import math

import pytest
import torch

from llm_fp8.models.model import Model
from llm_fp8.models.parity import FP32_LIMIT, LAYER_LIMIT, MEAN_LIMIT, Comparison, check_parity, judge
from llm_fp8.utils.errors import UserError
from tests.support.batches import S, packed_batch
from tests.support.families import te_model, write_family
from tests.support.stand_in_te import install_stand_in

NUM_LAYERS, NUM_TENSORS = 30, 11
HF_ERROR = 0.01


def verdict(**changed):
    """Return the report of the parity check on invented errors of a TE decoder, or raise `UserError` as the check does.

    Errors are small except those in two dicts. `ratios` maps a layer or (layer, tensor) to the error of the TE decoder
    in bf16 divided by that of Hugging Face's. `fp32` maps (layer, tensor) to the error of the TE decoder in fp32.
    """
    ratios = changed.get("ratios", {})
    fp32 = changed.get("fp32", {})
    comparisons = [
        Comparison(
            layer=layer,
            tensor=f"tensor {tensor}",
            fp32=fp32.get((layer, tensor), 1e-6),
            te=HF_ERROR * ratios.get((layer, tensor), ratios.get(layer, 0.9)),
            hf=HF_ERROR,
        )
        for layer in range(NUM_LAYERS)
        for tensor in range(NUM_TENSORS)
    ]
    return judge(comparisons, torch.bfloat16)


@pytest.mark.parametrize(
    "ratios",
    {
        "everywhere": dict.fromkeys(range(NUM_LAYERS), 1.05 * MEAN_LIMIT),
        "one layer": {4: 1.05 * LAYER_LIMIT},
        "NaN": {(4, 1): math.nan},
    }.values(),
)
def test_excessive_rounding_error_is_refused(ratios):
    assert "330 tensors of 30 layers" in verdict()
    assert verdict(ratios={(7, 0): 4.5, (12, 3): 8.0, (12, 4): 6.0}), "large errors of single tensors occur by chance"
    with pytest.raises(UserError, match="in the training dtype"):
        verdict(ratios=ratios)


@pytest.mark.parametrize("difference", [2 * FP32_LIMIT, math.nan, math.inf])
def test_tensor_that_differs_in_fp32_is_refused(difference):
    with pytest.raises(UserError, match="tensor 2 of layer 3 differs in fp32"):
        verdict(fp32={(3, 2): difference})


@pytest.fixture(params=["llama3_rope_gqa", "gemma3_text", "qwen3_5_text"])
def correct_model(request, tmp_path, monkeypatch):
    """Write a small model to a folder and load it as a TE decoder. Stand-ins replace TE's modules."""
    install_stand_in(monkeypatch)
    return te_model(write_family(tmp_path, request.param, torch.float32))


def check(model: Model) -> str:
    return check_parity(model, model.layers, packed_batch("cpu"), S, torch.float32)


def test_check_accepts_correct_model_and_leaves_it_unchanged(correct_model):
    module = correct_model.module
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    correct_model.layers[1].requires_grad_(False)  # frozen weights are compared too
    report = check(correct_model)
    numbers = {"gemma3_text": (41, 45), "qwen3_5_text": (42, 41)}
    num_stored, num_compared = numbers.get(module.config.model_type, (30, 33))
    assert f"with Hugging Face: {num_stored} stored tensors loaded bit for bit; {num_compared} tensors" in report
    after = dict(module.named_parameters())
    assert all(torch.equal(value, after[name]) and after[name].grad is None for name, value in before.items())
    assert {name for name, p in after.items() if not p.requires_grad} == {n for n in before if ".layers.1." in n}


def test_check_refuses_changed_rope(correct_model):
    for angles in correct_model.module.model.rotary_emb.angles.values():
        angles *= 1.01
    with pytest.raises(UserError, match="--use_te .* in fp32 by"):
        check(correct_model)


def test_check_refuses_weights_that_differ_from_the_file(correct_model):
    with torch.no_grad():
        correct_model.layers[1].mlp.fc2_weight[3, 5] += 0.01
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is not the tensor in"):
        check(correct_model)
