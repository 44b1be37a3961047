"""The time of a step added up from kernel events, and the rules from time to advice."""

from __future__ import annotations

import dataclasses

import pytest

from llm_fp8.observability.kernel_trace import KernelTime
from llm_fp8.observability.metrics import PeakTflops, peak_tflops
from llm_fp8.tools.diagnose.bottlenecks import Bottleneck, StepMeasurements, ranked_bottlenecks, step_time
from llm_fp8.tools.gemm_rates import MeasuredRates
from tests.support.diagnosed import AMAX, ATTENTION, BF16_GEMM, CAST, FP8_GEMM, facts
from tests.support.recorded_kernels import recorded


def test_a_step_is_classes_and_gaps():
    step = step_time(
        recorded(
            (FP8_GEMM, 100, 400),
            (BF16_GEMM, 400, 500),
            (ATTENTION, 600, 700),
            ("_update_kernel", 650, 900),
            (AMAX, 950, 1000),
        ),
        step_s=800e-6,
    )
    assert step.recorded_span_s == pytest.approx(900e-6)
    assert step.gap_s == pytest.approx(50e-6), "of the step that was not recorded: 750 of its 800 us are kernels"
    assert dataclasses.replace(step, step_s=740e-6).gap_s == 0
    assert step.overlap_s == pytest.approx(50e-6)
    assert step.class_s("gemm") == pytest.approx(400e-6) and step.class_s("attention", "optimizer") == pytest.approx(
        350e-6
    )
    assert step.gemms["fp8"].time_s == pytest.approx(300e-6) and step.gemms["bf16"].count == 1
    assert step.names("cast") == pytest.approx({AMAX: 50e-6}) and step.names("rope") == {}
    assert step.has_fused_attention
    assert sum(c.time_s for c in step.classes.values()) + step.gap_s - step.overlap_s == pytest.approx(step.step_s)


def test_softmax_is_no_fused_attention():
    softmax = (
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false, "
        "false>(c10::BFloat16*, int)"
    )
    step = step_time(recorded((softmax, 0, 1), (BF16_GEMM, 1, 2)), 1.0)
    assert "attention" in step.classes and not step.has_fused_attention


def test_a_step_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no GPU kernel"):
        step_time(recorded(), 1.0)


def with_classes(given: StepMeasurements, **classes) -> StepMeasurements:
    times = {**given.time.classes, **{name: KernelTime(1, s, {name: s}) for name, s in classes.items()}}
    return dataclasses.replace(given, time=dataclasses.replace(given.time, classes=times))


def found(given: StepMeasurements, name: str) -> Bottleneck | None:
    return next((one for one in ranked_bottlenecks(given) if one.name == name), None)


def lost_s(given: StepMeasurements, name: str) -> float:
    one = found(given, name)
    assert one is not None, name
    return one.lost_s


GEMMS, OUTSIDE, CASTS = "GEMMs below the measured rate", "linear layers outside fp8", "casts of the weights"
AMAXES, POINTWISE, SUMS = "amax of current scaling", "unfused pointwise kernels", "main-gradient accumulation"


def test_floors():
    # fp8: 6 * 0.9e9 * 1e4 = 5.4e13 FLOPs at 2,000 TFLOP/s are 27 ms; head: 6e12 at 1,000 are 6 ms.
    assert facts().gemms_at_measured_rates_s == pytest.approx(33e-3)
    assert facts().gemm_bounds_s == pytest.approx({"fp8": 13.5e-3, "bf16": 3e-3})
    assert facts().bounds_s["gemm"] == pytest.approx(16.5e-3) and facts().bounds_s["attention"] == pytest.approx(1e-3)
    assert facts().bounds_s["optimizer"] == pytest.approx((2 * 10e9 + 2e9) / 4e12)
    # A third of the FLOPs at the fast rate, two at the split one.
    split = facts(rates=MeasuredRates(1000.0, 2000.0, 1000.0, 4.0))
    assert split.fp8_gemm_s(6e15) == pytest.approx(2e15 / 2e15 + 4e15 / 1e15)
    assert facts(rates=MeasuredRates(1000.0, None, None, 4.0)).fp8_gemm_s(1.0) is None
    # No floor without the vendor's peak, nor from the fp8 one for fp4, which is twice as fast.
    for unknown in (facts(peak=None), facts(peak=PeakTflops(2000.0, None)), facts(scenario="nvfp4")):
        assert unknown.gemm_bounds_s == {} and "gemm" not in unknown.bounds_s and "optimizer" in unknown.bounds_s
    assert found(facts(scenario="nvfp4"), GEMMS) is None
    # A head in fp8: two thirds of its 6 ms at twice the rate, or all; fast accumulation is for the logits.
    gradients, whole = facts(num_fp8_lm_head_gemms=2), facts(num_fp8_lm_head_gemms=3)
    assert gradients.head_gemm_s == pytest.approx(4e-3) and whole.head_gemm_s == pytest.approx(3e-3)
    assert gradients.gemms_at_measured_rates_s == pytest.approx(
        31e-3
    ) and whole.gemms_at_measured_rates_s == pytest.approx(30e-3)
    assert gradients.gemm_bounds_s == pytest.approx({"fp8": 14.5e-3, "bf16": 1e-3})
    assert whole.gemm_bounds_s == pytest.approx({"fp8": 15e-3, "bf16": 0.0})
    assert facts(
        num_fp8_lm_head_gemms=3, rates=MeasuredRates(1000.0, 2000.0, 1000.0, 4.0)
    ).head_gemm_s == pytest.approx(5e-3)
    # A card that multiplies faster than its data sheet says.
    low = facts(peak=PeakTflops(900.0, 1800.0))
    assert low.bounds_s["gemm"] == pytest.approx(33e-3) and low.bounds_s["attention"] == pytest.approx(2e-3)


def test_no_floor_lies_above_what_an_h200_took():
    """Llama-3.2-1B in delayed scaling on one H200, 2 micro-batches of 4 x 1,024: the GEMMs took 51.3 ms, faster than
    the rates of a GPU that multiplies without a pause, which gave 56.7."""
    step = facts(
        rates=MeasuredRates(680.1, 1307.5, 1250.6, 4.27),
        peak=peak_tflops("NVIDIA H200"),
        num_fp8_weights=973_078_528,
        num_head_weights=262_668_288,
        num_tokens=8192,
    )
    step = with_classes(step, gemm=51.3e-3)
    assert step.gemms_at_measured_rates_s == pytest.approx(56.7e-3, rel=1e-3)
    assert step.gemm_bounds_s["fp8"] < 35.1e-3 and step.gemm_bounds_s["bf16"] < 16.2e-3
    assert found(step, GEMMS) is None


def test_gemms_below_the_ceiling():
    assert lost_s(facts(), GEMMS) == pytest.approx(27e-3)
    assert found(facts(attention="unfused"), GEMMS) is None


def test_recomputation_is_taken_out_of_the_gemms():
    assert found(facts(), "recomputation") is None
    half = facts(recomputed_share=0.5)
    # At the rates: 27 ms of fp8 layers, half of them a third longer, and 6 ms of head.
    assert lost_s(half, "recomputation") == pytest.approx(60e-3 * 4.5 / 37.5)
    assert lost_s(half, GEMMS) == pytest.approx(27e-3 - 60e-3 * 4.5 / 37.5)


def test_layers_outside_fp8_name_the_option_that_fits():
    assert found(facts(), OUTSIDE) is None
    kept = facts(num_fp8_weights=600_000_000, num_bf16_weights=300_000_000)
    loss = found(kept, OUTSIDE)
    assert (
        loss.lost_s == pytest.approx(18e-3 - 9e-3) and "33%" in loss.cause and "--fp8_first_bf16_layers" in loss.advice
    )
    bf16 = facts(num_fp8_weights=0, num_bf16_weights=900_000_000, scenario=None)
    assert found(bf16, OUTSIDE).advice.startswith("--mixed_precision fp8")
    assert found(dataclasses.replace(kept, use_te=False), OUTSIDE).advice.startswith("--use_te")
    assert found(dataclasses.replace(bf16, rates=MeasuredRates(300.0, None, None, 1.5)), OUTSIDE) is None


def test_work_of_known_bytes():
    assert lost_s(facts(), CASTS) == pytest.approx(4 * 0.9e9 / 4e12)
    assert lost_s(with_classes(facts(), cast=1e-4), CASTS) == pytest.approx(1e-4)  # never more than was seen
    assert found(facts(num_fp8_weights=0), CASTS) is None
    assert lost_s(facts(), SUMS) == pytest.approx(3 * 0.4e9 / 4e12)
    assert found(facts(num_micro_batches=1), SUMS) is None


def test_scaling_and_pointwise():
    assert found(facts(), AMAXES) is None
    current = with_classes(facts(scenario="current"), cast=5e-3)
    current.time.classes["cast"].names.update({AMAX: 3e-3, CAST: 2e-3})
    assert lost_s(current, AMAXES) == pytest.approx(3e-3)
    assert found(facts(), POINTWISE) is None
    assert lost_s(facts(use_te=False), POINTWISE) == pytest.approx(7e-3)


def test_the_largest_come_first():
    ranked = ranked_bottlenecks(facts())
    assert [loss.name for loss in ranked[:3]] == ["GEMMs below the measured rate", "optimizer", "gaps between kernels"]
    assert ranked[2].lost_s == pytest.approx(9e-3) and "--batch_size" in ranked[2].advice
    assert len(ranked) == 5  # the rules that lose nothing are left out
    assert all(loss.lost_s > 0 for loss in ranked_bottlenecks(facts(num_micro_batches=1)))


def test_unfused_attention_comes_first_whatever_its_size():
    first = ranked_bottlenecks(with_classes(facts(attention="unfused"), attention=1e-6))[0]
    assert first.name == "unfused attention" and first.lost_s == 0 and "CUDNN_HOME" in first.advice
    assert "--attn_implementation" in ranked_bottlenecks(facts(attention="unfused", use_te=False))[0].advice


def test_every_advice_names_options_that_exist():
    import re

    from llm_fp8.config.parser import build_parser

    known = set(build_parser()._option_string_actions)
    variants = [
        facts(use_te=use_te, attention=attention, scenario=scenario, recomputed_share=0.5, num_bf16_weights=1_000_000)
        for use_te in (True, False)
        for attention in ("unfused", "fused (cuDNN)")
        for scenario in (None, "current")
    ]
    advice = {loss.advice for variant in variants for loss in ranked_bottlenecks(variant)}
    assert len(advice) >= 10
    for sentence in advice:
        assert set(re.findall(r"--\w+", sentence)) <= known, sentence
