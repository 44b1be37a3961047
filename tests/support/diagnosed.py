"""What a diagnosis is made of, without a GPU: names of kernels, the measurements of a step, a module's GEMMs."""

from __future__ import annotations

from llm_fp8.observability.kernel_trace import KernelTime
from llm_fp8.observability.metrics import PeakTflops
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.tools.diagnose.bottlenecks import StepMeasurements, StepTime
from llm_fp8.tools.diagnose.gemm_operands import ModuleGemms
from llm_fp8.tools.gemm_rates import MeasuredRates

FP8 = PrecisionPlan(requested="fp8", effective="fp8", requested_scenario="default", effective_scenario="delayed")

FP8_GEMM = "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT"
BF16_GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
ATTENTION = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
AMAX = (
    "void transformer_engine::(anonymous namespace)::amax_kernel<16, true, __nv_bfloat16>(__nv_bfloat16 const*, "
    "float*, unsigned long)"
)
CAST = (
    "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e5m2*, __nv_fp8_e5m2*, float "
    "const*, float*, float*)"
)


def facts(**changes) -> StepMeasurements:
    """A step of 100 ms; rates are round: 1,000 bf16 and 2,000 fp8 TFLOP/s, 4 TB/s, and peaks of twice the FLOP/s."""
    classes = {
        "gemm": 60e-3,
        "attention": 8e-3,
        "cast": 6e-3,
        "optimizer": 10e-3,
        "elementwise": 4e-3,
        "copy": 1e-3,
        "norm": 2e-3,
    }
    times = {name: KernelTime(1, seconds, {name: seconds}) for name, seconds in classes.items()}
    step = StepTime(
        step_s=100e-3, recorded_span_s=150e-3, busy_s=91e-3, classes=times, gemms={"fp8": KernelTime(9, 40e-3)}
    )
    values = dict(
        time=step,
        rates=MeasuredRates(1000.0, 2000.0, 2000.0, 4.0),
        peak=PeakTflops(2000.0, 4000.0),
        num_fp8_weights=900_000_000,
        num_bf16_weights=0,
        num_head_weights=100_000_000,
        num_tokens=10_000,
        num_micro_batches=2,
        attention_flops=2e12,
        recomputed_share=0.0,
        weight_bytes=2_000_000_000,
        gradient_bytes=2_000_000_000,
        added_gradient_bytes=400_000_000,
        optimizer_bytes=8_000_000_000,
        scenario="delayed",
        use_te=True,
        attention="fused (cuDNN)",
    )
    return StepMeasurements(**{**values, **changes})


def module(name, fprop="e4m3 x e4m3", dgrad="e4m3 x e5m2", wgrad="e4m3 x e5m2", kind="Linear"):
    found = ModuleGemms(name, kind)
    for gemm_pass, pairs in (("fprop", fprop), ("dgrad", dgrad), ("wgrad", wgrad)):
        found.passes[gemm_pass].update(filter(None, pairs.split("; ")))
    return found
