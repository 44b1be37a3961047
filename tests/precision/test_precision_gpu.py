"""Precision on a GPU: recipes and their options, evaluation, recomputation, and the state of the scales."""

from __future__ import annotations

import pytest
import torch

from llm_fp8.models.model import decoder_layers
from llm_fp8.models.parity import relative_difference
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.te_internals import attention_backend
from tests.support.batches import packed_batch, padded_batch
from tests.support.gpu_steps import BF16, SCENARIOS, build, fp8, step
from tests.support.small import precision_on

pytestmark = pytest.mark.gpu


def test_unsupported_recipe_falls_back_or_is_refused(device):
    if torch.cuda.get_device_capability(device) >= (10, 0):
        pytest.skip("this GPU has MXFP8")
    plan = precision_on(fp8(fp8_scenario="mxfp8"), device)
    assert (plan.requested_scenario, plan.effective_scenario) == ("mxfp8", "delayed")
    assert "10.0" in plan.fallback_reason and "current" in plan.fallback_reason
    with pytest.raises(UserError, match="--fp8_strict"):
        precision_on(fp8(fp8_scenario="mxfp8", fp8_strict=True), device)


def test_options_reach_the_recipe(device):
    plan = precision_on(fp8(amax_history_len=16, amax_compute_algo="most_recent", fp8_format="E4M3"), device)
    recipe = plan.recipe
    assert (recipe.amax_history_len, recipe.amax_compute_algo, recipe.margin) == (16, "most_recent", 0)
    assert recipe.fp8_format.name == "E4M3"


def test_block_scales_are_fp32_numbers_on_hopper(device):
    """The scales must not be restricted to powers of two, because that would lose precision."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("only Hopper's GEMMs support fp32 block scales")
    model, precision, _ = build(fp8(fp8_scenario="block"), device)
    step(model, precision, packed_batch(device))
    quantizers = [q for module in precision.fp8_modules for q in module.quantizers["scaling_fwd"] if q is not None]
    assert quantizers and not any(quantizer.force_pow_2_scales for quantizer in quantizers)


@pytest.mark.parametrize("scenario", ["current", "block", "backward"])
def test_cached_weight_casts_give_the_same_loss(scenario, device):
    """Micro-batches that reuse the fp8 weights of the first micro-batch have the same loss as with new casts."""
    model, precision, _ = build(fp8(fp8_scenario=scenario), device)
    batch = packed_batch(device)
    losses = []
    for first in (True, False, None):
        with precision.context(first_microbatch=first):
            losses.append(model(batch)[0].item())
    assert losses[0] == losses[1] == losses[2]


def test_backward_has_the_forward_pass_of_bf16_and_gradients_closer_to_bf16_than_current(device, record_property):
    batch, losses, gradients = packed_batch(device), {}, {}
    for name in (None, "backward", "current"):
        model, precision, _ = build(BF16 if name is None else fp8(fp8_scenario=name), device)
        losses[name] = step(model, precision, batch).item()
        gradients[name] = {weight: parameter.grad.float() for weight, parameter in model.named_parameters()}
    assert losses["backward"] == losses[None] != losses["current"]
    differences = {
        name: [relative_difference(gradients[name][weight], value) for weight, value in gradients[None].items()]
        for name in ("backward", "current")
    }
    means = {name: sum(values) / len(values) for name, values in differences.items()}
    record_property("mean_difference_from_bf16", means)
    assert 0 < means["backward"] < 0.7 * means["current"]


@pytest.mark.parametrize("scenario", [*SCENARIOS, None])
def test_evaluation_of_packed_and_padded_batches_does_not_change_the_scales(scenario, device):
    model, precision, _ = build(BF16 if scenario is None else fp8(fp8_scenario=scenario), device)
    packed, padded = packed_batch(device), padded_batch(device)
    step(model, precision, packed)
    assert attention_backend() == "fused (cuDNN)"
    state = {name: tensor.clone() for name, tensor in precision.state_tensors().items()}
    losses = []
    with torch.no_grad(), precision.preserving_state():
        for batch in (packed, padded):
            with precision.context(first_microbatch=None):
                losses.append(float(model(batch)[0]) / batch.num_supervised_tokens)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    after = precision.state_tensors()
    assert all(torch.equal(after[name], state[name]) for name in state), "evaluation must not change the scales"


@pytest.mark.parametrize("use_te", [True, False], ids=["te", "swap"])
@pytest.mark.parametrize("scenario", [*SCENARIOS, None])
def test_gradient_checkpointing_gives_the_same_gradients(scenario, use_te, device):
    gradients = []
    for every in (0, 1, 2):
        model, precision, _ = build(BF16 if scenario is None else fp8(fp8_scenario=scenario), device, use_te)
        if every:
            enable_gradient_checkpointing(decoder_layers(model.model), every, uses_te=use_te or scenario is not None)
        model.train()
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            loss = step(model, precision, packed_batch(device))
        gradients.append({"loss": loss, **{name: p.grad for name, p in model.named_parameters()}})
    for name, gradient in gradients[0].items():
        for recomputed in gradients[1:]:
            assert torch.allclose(gradient, recomputed[name], rtol=2e-2, atol=1e-5), name


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("use_te", [True, False], ids=["te", "swap"])
def test_recomputation_does_not_change_the_scales(use_te, every, reentrant, device, monkeypatch):
    """Recomputation adds no entries to amax histories and, unless it is reentrant, no reductions of the amax."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    reductions: list[bool] = []
    reduce_amax = FP8GlobalStateManager.reduce_and_update_fp8_tensors
    monkeypatch.setattr(
        FP8GlobalStateManager,
        "reduce_and_update_fp8_tensors",
        lambda forward=True: (reductions.append(forward), reduce_amax(forward=forward)),
    )
    states = []
    for interval in (0, every):
        model, precision, _ = build(fp8(amax_history_len=8), device, use_te)
        if interval:
            enable_gradient_checkpointing(decoder_layers(model.model), interval, uses_te=True, reentrant=reentrant)
        model.train()
        reductions.clear()
        for _ in range(3):
            step(model, precision, packed_batch(device), num_micro_batches=2)
        states.append({name: tensor.clone() for name, tensor in precision.state_tensors().items()})
        assert reentrant or reductions == [True, False] * 6
    without, recomputed = states
    assert without.keys() == recomputed.keys() and without
    for name, tensor in without.items():
        if "scaling_fwd" in name:
            assert torch.equal(recomputed[name], tensor), name
        else:  # attention's backward pass sums in a varying order
            assert torch.allclose(recomputed[name], tensor, rtol=2e-2), name
        if name.endswith("amax_history"):
            assert ((recomputed[name] > 0).sum(dim=0) == (tensor > 0).sum(dim=0)).all(), name


def test_restored_scales_give_the_same_losses(device):
    """Delayed scaling continues from saved scales and amax histories. Without the saved state the losses differ."""
    batch = packed_batch(device)
    model, precision, _ = build(fp8(), device)
    for _ in range(3):
        step(model, precision, batch)
    saved = {name: tensor.clone() for name, tensor in precision.state_tensors().items()}
    assert saved and any(float(tensor.max()) > 0 for name, tensor in saved.items() if name.endswith("amax_history"))
    expected = [step(model, precision, batch).item() for _ in range(3)]
    other, other_precision, _ = build(fp8(), device)
    for name, tensor in other_precision.state_tensors().items():
        tensor.copy_(saved[name])
    assert [step(other, other_precision, batch).item() for _ in range(3)] == expected
    cold, cold_precision, _ = build(fp8(), device)
    assert [step(cold, cold_precision, batch).item() for _ in range(3)] != expected
