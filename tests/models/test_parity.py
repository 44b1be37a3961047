"""What the parity check makes of its figures, and the check itself on a decoder of stand-in modules.

Transformer Engine's own modules need a GPU: test_parity_gpu.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import te_llama
from llm_fp8.models.fill import fill_weights
from llm_fp8.models.model import Model
from llm_fp8.models.parity import (
    FP32_LIMIT,
    LAYER_LIMIT,
    MEAN_LIMIT,
    Comparison,
    check_parity,
    judge,
)
from llm_fp8.models.weights import StoredCheckpoint
from llm_fp8.utils.errors import UserError
from tests.support.batches import S, packed_batch
from tests.support.families import family_config
from tests.support.stand_in_te import install_stand_in

NUM_LAYERS, NUM_TENSORS = 30, 11
HF_ERROR = 0.01


def judged(**changed):
    """A right model, judged; `changed`: (layer, tensor) or layer -> ratio of TE's error to Hugging Face's."""
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
        "no number": {(4, 1): math.nan},
    }.values(),
)
def test_rounding_too_much_is_a_fault(ratios):
    assert "330 tensors of 30 layers" in judged()
    assert judged(ratios={(7, 0): 4.5, (12, 3): 8.0, (12, 4): 6.0}), "single tensors are chance"
    with pytest.raises(UserError, match="in the training dtype"):
        judged(ratios=ratios)


@pytest.mark.parametrize("difference", [2 * FP32_LIMIT, math.nan, math.inf])
def test_one_tensor_that_differs_in_fp32_is_a_fault(difference):
    with pytest.raises(UserError, match="tensor 2 of layer 3 differs in fp32"):
        judged(fp32={(3, 2): difference})


@pytest.fixture(params=["llama3_rope_gqa", "gemma3_text"])
def right_model(request, tmp_path, monkeypatch):
    """A TE decoder, and the checkpoint that its weights are of."""
    install_stand_in(monkeypatch)
    config = family_config(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model = te_llama.build_te_model(config, torch.float32, "cpu")
    stored = Model(model, StoredCheckpoint([tmp_path / "model.safetensors"], config))
    fill_weights(stored)
    return model, stored


def test_the_check_passes_a_right_model_and_leaves_it_as_it_was(right_model):
    model, stored = right_model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.model.layers[1].requires_grad_(False)  # frozen weights are compared too
    found = check_parity(stored, model.model.layers, packed_batch("cpu"), S, torch.float32)
    num_stored, num_compared = (41, 45) if model.config.model_type == "gemma3_text" else (30, 33)
    assert found.startswith(f"parity with Hugging Face: {num_stored} stored tensors loaded bit for bit; {num_compared}")
    after = dict(model.named_parameters())
    assert all(torch.equal(value, after[name]) and after[name].grad is None for name, value in before.items())
    assert {name for name, p in after.items() if not p.requires_grad} == {n for n in before if ".layers.1." in n}


def test_the_check_refuses_another_rope(right_model):
    model, stored = right_model
    for angles in model.model.rotary_emb.angles.values():
        angles *= 1.01
    with pytest.raises(UserError, match="--use_te .* in fp32 by"):
        check_parity(stored, model.model.layers, packed_batch("cpu"), S, torch.float32)


def test_the_check_refuses_weights_that_are_not_the_files(right_model):
    model, stored = right_model
    with torch.no_grad():
        model.model.layers[1].mlp.fc2_weight[3, 5] += 0.01
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is not the tensor in"):
        check_parity(stored, model.model.layers, packed_batch("cpu"), S, torch.float32)
