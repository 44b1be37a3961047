"""SwiGLU's backward kernel with fp8 output, compared with fp64 and with Transformer Engine's two separate kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_llama
from llm_fp8.kernels.swiglu import NAME
from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.kernel_trace import kernel_times, record_kernels
from tests.support.batches import packed_batch
from tests.support.families import family_config
from tests.support.gpu_steps import BF16, SCENARIOS, build, fp8, step

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = {torch.float8_e5m2: 2, torch.float8_e4m3fn: 3}
"""The number of mantissa bits of each fp8 dtype."""
SHAPES = {"whole blocks": (256, 512), "one block": (16, 16), "parts of blocks": (1040, 336), "8B's width": (144, 14336)}
KERNEL = "_dswiglu_cast_kernel"
SCALE = 512.0


@pytest.fixture
def dswiglu_cast():
    from llm_fp8.kernels.swiglu_triton import dswiglu_cast

    return dswiglu_cast


def inputs(shape: tuple[int, int], dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    """For `shape` [T, f], return a gradient with rows of very different magnitudes, and gate and up values [T, 2 f]."""
    tokens, width = shape
    generator = torch.Generator(device=device).manual_seed(0)
    gradient = torch.randn(tokens, width, generator=generator, device=device) * 0.01
    gradient *= torch.rand(tokens, 1, generator=generator, device=device) ** 4
    return gradient.to(dtype), 2 * torch.randn(tokens, 2 * width, generator=generator, device=device).to(dtype)


def exact(gradient: Tensor, gate_and_up: Tensor) -> Tensor:
    """Backpropagate the output's `gradient` by autograd in fp64. Return the gradient with respect to `gate_and_up`."""
    wide = gate_and_up.double().requires_grad_()
    gate, up = wide.chunk(2, dim=1)
    return torch.autograd.grad(torch.nn.functional.silu(gate) * up, wide, gradient.double())[0]


def scalars(device: Any, amax: float = 0.0) -> tuple[Tensor, Tensor]:
    return torch.tensor([SCALE], device=device), torch.tensor([amax], device=device)


@pytest.mark.parametrize("fp8_dtype", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_are_rounded_once_from_the_exact_ones(shape, dtype, fp8_dtype, dswiglu_cast, device):
    gradient, gate_and_up = inputs(shape, dtype, device)
    scale, amax = scalars(device)
    rowwise, transposed, scale_inverse = dswiglu_cast(gradient, gate_and_up, scale, amax, fp8_dtype)
    truth = exact(gradient, gate_and_up)
    scaled, values = truth * SCALE, rowwise.double()
    info = torch.finfo(fp8_dtype)
    # Half a unit in the last place (for subnormal numbers, half their spacing), plus rounding in fp32.
    unit_roundoff = 2.0 ** -(FORMATS[fp8_dtype] + 1)
    allowed = (scaled.abs() * (1 + 1e-3) + info.smallest_normal) * unit_roundoff
    assert bool(((values - scaled.clamp(info.min, info.max)).abs() <= allowed).all())
    assert torch.equal(rowwise.view(torch.uint8).t(), transposed.view(torch.uint8))
    assert amax.item() == pytest.approx(truth.abs().max().item(), rel=1e-5)
    assert scale_inverse.item() == 1 / SCALE


def test_amax_keeps_a_larger_value(dswiglu_cast, device):
    gradient, gate_and_up = inputs((64, 64), torch.bfloat16, device)
    scale, amax = scalars(device, amax=1e6)
    dswiglu_cast(gradient, gate_and_up, scale, amax, torch.float8_e5m2)
    assert amax.item() == 1e6


@pytest.mark.parametrize("fp8_dtype", FORMATS, ids=str)
def test_out_of_range_values_saturate_and_nan_is_preserved(fp8_dtype, dswiglu_cast, device):
    gradient, gate_and_up = torch.ones(16, 16, device=device), torch.ones(16, 32, device=device)
    gradient[0, 0], gradient[1, 1], gradient[2, 2] = 1e9, -1e9, float("nan")
    rowwise, _, _ = dswiglu_cast(gradient, gate_and_up, *scalars(device), fp8_dtype)
    values = rowwise.float()
    largest = torch.finfo(fp8_dtype).max
    assert values[0, 0] == values[0, 16] == largest
    assert values[1, 1] == values[1, 17] == -largest
    assert values.isnan().nonzero().tolist() == [[2, 2], [2, 18]]


def unfuse(model: torch.nn.Module) -> None:
    """Restore Transformer Engine's own activation in all MLPs of `model`."""
    mlps = [module for module in model.modules() if getattr(module, "activation", None) == NAME]
    assert mlps
    for mlp in mlps:
        mlp.activation = "swiglu"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_with_the_fused_kernel_are_as_close_to_bf16_as_without(scenario, device, record_property):
    batch = packed_batch(device)
    gradients = {}
    in_fp8 = fp8(fp8_scenario=scenario)
    for name, options in {"bf16": BF16, "fused": in_fp8, "separate": in_fp8}.items():
        model, precision, _ = build(options, device)
        if name == "separate":
            unfuse(model)
        for _ in range(2):  # the first pass gives delayed scaling its scales
            model.zero_grad()
            step(model, precision, batch)
        gradients[name] = {weight: parameter.grad.float() for weight, parameter in model.named_parameters()}
    errors = {
        name: [relative_difference(gradients[name][weight], value) for weight, value in gradients["bf16"].items()]
        for name in ("fused", "separate")
    }
    means = {name: sum(values) / len(values) for name, values in errors.items()}
    record_property("mean_difference_from_bf16", means)
    assert means["fused"] <= 1.01 * means["separate"]


def kernels_of_a_step(options: Any, device: Any, fused: bool) -> dict[str, int]:
    model, precision, _ = build(options, device)
    if not fused:
        unfuse(model)
    batch = packed_batch(device)
    step(model, precision, batch)
    with record_kernels() as recorded:
        step(model, precision, batch)
    return {name: count for name, (count, _) in kernel_times(recorded).items()}


@pytest.mark.parametrize("scenario", [*SCENARIOS, None])
def test_step_with_the_fused_kernel_runs_fewer_kernels(scenario, device):
    options = BF16 if scenario is None else fp8(fp8_scenario=scenario)
    fused, separate = (kernels_of_a_step(options, device, fused) for fused in (True, False))
    layers = family_config("llama3_rope_gqa").num_hidden_layers
    delayed = scenario == "default"
    assert fused.get(KERNEL, 0) == (layers if delayed else 0)
    assert KERNEL not in separate
    if scenario is None:
        assert sum(fused.values()) == sum(separate.values())
    else:
        assert sum(fused.values()) <= sum(separate.values()) - layers


def test_other_activations_and_mlps_with_biases_use_transformer_engines_kernels(device):
    import transformer_engine.pytorch as te

    model = te_llama.build_te_model(family_config("llama_biases"), torch.bfloat16, device)
    assert {module.activation for module in model.modules() if isinstance(module, te.LayerNormMLP)} == {"swiglu"}
    mlp = te.LayerNormMLP(64, 128, activation="geglu", params_dtype=torch.bfloat16, device=device)
    assert mlp(torch.ones(16, 64, dtype=torch.bfloat16, device=device)).shape == (16, 64)
