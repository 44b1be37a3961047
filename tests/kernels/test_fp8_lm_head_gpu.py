"""--fp8_lm_head on a real GPU: the kernels that run, their numbers, and what is kept in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_llama
from benchmarks.fp8_head_rounding import excess_slope
from llm_fp8.kernels import fp8_lm_head as fp8_head
from llm_fp8.kernels import softmax
from llm_fp8.kernels.cross_entropy import linear_cross_entropy_sum
from llm_fp8.kernels.fp8_lm_head import E4M3, E5M2, EmulatedOperand
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.kernel_trace import gemm_kernels, kernel_times, record_kernels
from llm_fp8.precision.certificate import ExpectedKernels, certify
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import measure_coverage
from llm_fp8.precision.plan import resolve_precision
from tests.support.batches import S, packed_batch
from tests.support.families import family_config
from tests.support.fp8_head_reference import (
    GRADIENT_ERROR,
    MODES,
    NUM_PRODUCTS,
    SOFTMAX_GRADIENT_KERNEL,
    exact,
    head_of,
    run,
)
from tests.support.gpu_steps import fp8, step

pytestmark = pytest.mark.gpu

TOKENS, VOCABULARY, WIDTH = 1024, 32_000, 512
CHUNKS = (384, None)


@pytest.fixture(autouse=True)
def needs_transformer_engine():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    pytest.importorskip("transformer_engine.pytorch")


def inputs(tokens: int = TOKENS):
    """Hidden states, weight, and labels drawn from the logits' softmax, some of them left out."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator, device="cuda") * 4 / WIDTH**0.5).bfloat16()
    probabilities = torch.softmax((hidden @ weight.t()).float(), dim=-1)
    labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    labels[: tokens // 10] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("tokens", [TOKENS, 1000, 37])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_near_those_of_fp32(mode, chunk_tokens, tokens, record_property):
    values = inputs(tokens)
    plain = run(*values, chunk_tokens=chunk_tokens)[0]
    loss, *got = run(*values, head_of(values[1], mode), chunk_tokens=chunk_tokens)
    want_loss, *want = exact(*values, torch.float32)
    assert torch.equal(loss, plain) if mode == "gradients" else abs(loss / want_loss - 1) < 0.03
    for name, a, b in zip(("hidden", "weight"), got, want, strict=True):
        assert a.shape == b.shape and a.dtype == torch.bfloat16
        error, slope = relative_difference(a, b.double()), excess_slope(a, b.double())
        record_property(name, {"error": error, "slope_minus_1": slope})
        # Rounded logits give another softmax, with an error of its own.
        assert 0.01 < error < (GRADIENT_ERROR if mode == "gradients" else GRADIENT_ERROR + 0.2), name
        assert abs(slope) < 0.05, name


@pytest.mark.parametrize("fp8_format", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(64, 48), (1024, 4096), (16, 4080)])
def test_casts_are_those_of_the_emulation(fp8_format, shape):
    generator = torch.Generator("cuda").manual_seed(1)
    values = (torch.randn(*shape, generator=generator, device="cuda") * 3e-4).bfloat16()
    for largest in (None, values.abs().amax().float()):
        cast = fp8_head.cast_to_fp8(values, fp8_format, amax=largest)
        emulated = fp8_head.emulated_cast(values, fp8_format, largest).dequantized(torch.float32)
        torch.testing.assert_close(cast.dequantize(dtype=torch.float32), emulated, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_gemms_are_those_of_the_emulation(layout):
    """With operands that keep one layout alone, as the backward pass has them."""
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = {"TN": ((96, 64), (32, 64)), "NN": ((64, 96), (32, 64)), "NT": ((64, 96), (64, 32))}[layout]
    a, b = (torch.randn(*shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    usages = {
        "TN": ((True, False), (True, False)),
        "NN": ((False, True), (True, False)),
        "NT": ((False, True), (False, True)),
    }[layout]
    formats = (E4M3, E4M3 if layout == "TN" else E5M2)
    cast, emulated = [], []
    for value, (rowwise, columnwise), kind in zip((a, b), usages, formats, strict=True):
        cast.append(fp8_head.cast_to_fp8(value, kind, rowwise=rowwise, columnwise=columnwise))
        emulated.append(fp8_head.emulated_cast(value, kind))
    got = fp8_head.multiply(*cast, layout, torch.bfloat16)
    want = fp8_head.multiply(*emulated, layout, torch.float32)
    assert relative_difference(got, want.double()) < 5e-3, "bf16 rounds by up to 2**-9, fast accumulation a little more"


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("mode", [None, *MODES])
def test_the_kernels_of_a_pass(mode, chunk_tokens, record_property):
    values = inputs()
    head = None if mode is None else head_of(values[1], mode)
    run(*values, head, chunk_tokens=chunk_tokens)
    with record_kernels() as recorded:
        run(*values, head, chunk_tokens=chunk_tokens)
    gemms = gemm_kernels(kernel_times(recorded))
    kinds = {kind: found.count for kind, found in gemms.items()}
    record_property("gemm_kernels", {kind: list(found.names) for kind, found in gemms.items()})
    num_chunks = 1 if chunk_tokens is None else -(-TOKENS // chunk_tokens)
    in_fp8 = NUM_PRODUCTS.get(mode, 0)
    assert "unknown" not in kinds
    assert kinds.get("fp8", 0) == num_chunks * in_fp8
    assert kinds.get("bf16", 0) >= num_chunks * (3 - in_fp8) and (in_fp8 < 3 or "bf16" not in kinds)


def gradient_operands(tokens: int) -> tuple[Any, EmulatedOperand]:
    """The gradient with respect to logits as the GEMMs take it, and emulated."""
    hidden, weight, labels = (value.detach() for value in inputs(tokens))
    logits = hidden @ weight.t()
    statistics = softmax.losses(logits, labels)[1]
    grad_output = torch.tensor(1 / tokens, device="cuda")
    operand = fp8_head.gradient_in_one_kernel(logits, statistics, labels, grad_output)
    softmax.torch_to_gradient_(logits, statistics, labels, grad_output)
    padded = F.pad(logits, (0, 0, 0, -tokens % 16))
    return operand, fp8_head.emulated_cast(padded, E5M2, grad_output)


@pytest.mark.parametrize("tokens", [TOKENS, 1000, 37])
def test_the_gradient_of_the_logits_is_that_of_the_emulation_in_both_layouts(tokens):
    operand, emulated = gradient_operands(tokens)
    rowwise, want = operand.dequantize(dtype=torch.float32), emulated.dequantized(torch.float32)
    assert rowwise.shape == want.shape
    # The emulation rounds to bf16 first: where that decides, the two are neighbours.
    apart = (rowwise - want).abs()
    assert bool((apart <= 0.25 * torch.maximum(rowwise.abs(), want.abs()) + 2.0**-16 * emulated.scale_inverse).all())
    assert (apart > 1e-6 * want.abs()).float().mean().item() < 0.02
    fp8_head.keep_columnwise_alone(operand)
    assert torch.equal(operand.dequantize(dtype=torch.float32), rowwise)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("mode", MODES)
def test_one_kernel_in_place_of_two_steps_runs_less_and_errs_no_more(mode, chunk_tokens, monkeypatch, record_property):
    values = inputs(1000)
    want = exact(*values, torch.float32)[1:]

    def pass_of() -> tuple[dict[str, int], list[float]]:
        found = run(*values, head_of(values[1], mode), chunk_tokens=chunk_tokens)[1:]
        errors = [relative_difference(a, b.double()) for a, b in zip(found, want, strict=True)]
        with record_kernels() as recorded:
            run(*values, head_of(values[1], mode), chunk_tokens=chunk_tokens)
        return {name: count for name, (count, _) in kernel_times(recorded).items()}, errors

    kernels, errors = pass_of()
    monkeypatch.setattr(fp8_head, "gradient_in_one_kernel", fp8_head.gradient_in_two_steps)
    kernels_before, errors_before = pass_of()
    record_property("errors", {"one_kernel": errors, "two_steps": errors_before})
    num_chunks = 1 if chunk_tokens is None else -(-1000 // chunk_tokens)
    assert kernels.get(SOFTMAX_GRADIENT_KERNEL) == num_chunks and SOFTMAX_GRADIENT_KERNEL not in kernels_before
    backward = "cross_entropy_backward_kernel"
    assert backward not in kernels and kernels_before.get(backward) == num_chunks
    assert sum(kernels.values()) < sum(kernels_before.values())
    assert all(error <= 1.05 * before for error, before in zip(errors, errors_before, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward_pass_is_an_error(mode):
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy_sum(hidden, weight, labels, fp8_head=head_of(weight, mode))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_has_the_exact_loss_and_no_fp8(mode):
    hidden, weight, labels = inputs()
    with torch.no_grad():
        plain = linear_cross_entropy_sum(hidden, weight, labels)
        with record_kernels() as recorded:
            assert torch.equal(linear_cross_entropy_sum(hidden, weight, labels, fp8_head=head_of(weight, mode)), plain)
    assert "fp8" not in gemm_kernels(kernel_times(recorded))


@pytest.mark.parametrize(("mode", "bytes_per_weight"), [("gradients", 1), ("all", 2)])
def test_bytes_that_are_kept_between_micro_batches(mode, bytes_per_weight):
    values = inputs()
    run(*values, head_of(values[1], mode))  # workspaces and compiled kernels
    head = head_of(values[1], mode)
    values[0].grad = values[1].grad = None
    before = torch.cuda.memory_allocated()
    head.is_first_microbatch = True
    run(*values, head)
    values[0].grad = values[1].grad = None
    kept = torch.cuda.memory_allocated() - before
    assert abs(kept - bytes_per_weight * values[1].numel()) < 2**20
    head.is_first_microbatch = None
    run(*values, head)
    values[0].grad = values[1].grad = None
    assert abs(torch.cuda.memory_allocated() - before) < 2**20


@pytest.mark.parametrize("tokens", [8 * TOKENS, 8 * TOKENS - 5])
@pytest.mark.parametrize("mode", MODES)
def test_the_peak_is_as_without_it_or_that_of_logits_beside_their_gradient(mode, tokens, record_property):
    """With more than 2 h tokens, as here, it is the latter: 3 bytes per logit, with any number of tokens. The cast
    weight comes on top.
    """

    def peak_bytes(head) -> int:
        values[0].grad = values[1].grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(*values, head)
        return torch.cuda.max_memory_allocated() - before

    values = inputs(tokens)  # logits of 0.5 GiB, a weight of 31 MiB
    for head in (None, head_of(values[1], mode)):
        run(*values, head)  # workspaces and compiled kernels
    weight_and_hidden = 2 * values[1].numel() + 4 * values[0].numel()
    plain, peak = peak_bytes(None), peak_bytes(head_of(values[1], mode))
    record_property("peak_bytes", {"bf16": plain, mode: peak})
    assert peak <= max(plain, 3.05 * 8 * TOKENS * VOCABULARY) + weight_and_hidden + 2**20


@pytest.mark.parametrize("scenario", ["default", "current"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_a_model_is_certified_with_its_head(mode, scenario, device):
    options = fp8(fp8_scenario=scenario, fp8_lm_head=mode)
    plan = resolve_precision(options, device)
    model = te_llama.build_te_model(family_config("llama3_rope_gqa"), torch.bfloat16, device)
    te_llama.initialize_weights_(model, torch.Generator(device=device).manual_seed(0))
    precision = Precision(plan, options, device, torch.bfloat16)
    precision.attach(model, decoder_layers(model))
    in_head = precision.lm_head_gemms({})
    census = measure_coverage(model, precision.fp8_modules, plan.compute_name, {}, lm_head_gemms=in_head)
    assert list(in_head.values()) == [NUM_PRODUCTS[mode]]
    assert (census.fp8_linear_flop_share == 1) == (mode == "all")
    training_model = TrainingModel(model, S, torch.bfloat16, precision.fp8_head).train()
    batch = packed_batch(device)
    for _ in range(2):
        step(training_model, precision, batch, num_micro_batches=2)
    with record_kernels() as recorded:
        step(training_model, precision, batch, num_micro_batches=2)
    certificate = certify(
        ExpectedKernels.of_model(precision, census),
        kernel_times(recorded),
        precision.module_state(),
        num_micro_batches=2,
        recipe_inside_modules=precision.recipe_inside_modules,
        attention=te_llama.attention_backend(),
    )
    assert certificate.verdict == "certified", certificate.reasons
    assert certificate.num_fp8_gemm_kernels == certificate.num_expected_fp8_gemm_kernels
