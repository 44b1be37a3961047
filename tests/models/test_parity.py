"""What the parity check makes of its figures. The figures themselves need a GPU: test_parity_gpu.py."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from llm_fp8.models.parity import FP32_LIMIT, LAYER_LIMIT, MEAN_LIMIT, Comparison, ParityReport
from llm_fp8.models.weights import stored_tensor
from llm_fp8.utils.errors import UserError

NUM_LAYERS, NUM_TENSORS = 30, 11
HF_ERROR = 0.01


def report(**changed):
    """A right model's report; `changed`: (layer, tensor) or layer -> ratio of TE's error to Hugging Face's."""
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
    return ParityReport(tuple(comparisons), torch.bfloat16)


def test_a_right_model_passes_and_is_described():
    found = report()
    assert found.fault() is None
    assert found.describe() == (
        "330 tensors of 30 layers differ in fp32 by at most 1e-06; in bfloat16 their distance from fp32 is 0.90 times "
        "Hugging Face's (0.90 in the worst layer)"
    )


def test_single_tensors_that_round_badly_are_chance():
    """In a trained model the norm's gradient of one layer was 4.5 times as far off as Hugging Face's."""
    found = report(ratios={(7, 0): 4.5, (12, 3): 8.0, (12, 4): 6.0})
    assert found.fault() is None and found.mean_ratio < 0.95


@pytest.mark.parametrize("difference", [2 * FP32_LIMIT, math.nan, math.inf])
def test_one_tensor_that_differs_in_fp32_is_a_fault(difference):
    fault = report(fp32={(3, 2): difference}).fault()
    assert fault is not None and "in fp32" in fault and "tensor 2 of layer 3" in fault


def test_rounding_too_much_everywhere_is_a_fault():
    ratios = dict.fromkeys(range(NUM_LAYERS), 1.05 * MEAN_LIMIT)
    assert "times as far from fp32 as Hugging Face's (1.25" in report(ratios=ratios).fault()


def test_rounding_too_much_in_one_layer_is_a_fault():
    assert "in layer 4" in report(ratios={4: 1.05 * LAYER_LIMIT}).fault()


def test_an_error_in_the_training_dtype_that_is_no_number_is_a_fault():
    assert report(ratios={(4, 1): math.nan}).fault() is not None


def test_a_stored_tensor_is_found_in_whichever_file_holds_it(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for number, path in enumerate(files):
        save_file({f"weight.{number}": torch.full((2, 3), float(number))}, path)
    cpu = torch.device("cpu")
    assert torch.equal(stored_tensor(files, "weight.1", cpu), torch.ones(2, 3))
    with pytest.raises(UserError, match="holds no tensor weight.2"):
        stored_tensor(files, "weight.2", cpu)
