"""Speeds, peak TFLOP/s of GPUs, and the metrics of docs/monitoring.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llm_fp8.observability.metrics import DecoderSize, StepTokens, describe_full_gpu, peak_tflops, speed_metrics
from tests.support.documented_metrics import DOCUMENTED

PACKAGE = Path(__file__).resolve().parents[2] / "llm_fp8"


def test_speed_is_per_second_and_per_gpu() -> None:
    size = DecoderSize(num_linear_parameters=10**9, num_layers=0, attention_width=0)
    tokens = StepTokens(num_tokens=4000, num_real_tokens=3000, num_supervised_tokens=1000, sum_squared_lengths=4000)
    h200 = peak_tflops("NVIDIA H200")
    figures = speed_metrics(tokens, step_time_s=0.5, size=size, num_gpus=2, peak=h200, fp8=True)
    assert figures == pytest.approx(
        {
            "step_time_s": 0.5,
            "tokens_per_s": 8000,
            "tokens_per_s_per_gpu": 4000,
            "real_tokens_per_s": 6000,
            "supervised_tokens_per_s": 2000,
            "packing_efficiency": 0.75,
            "model_tflops": 24.0,
            "mfu_bf16_peak": 24.0 / 989.4,
            "mfu_fp8_peak": 24.0 / 1978.9,
        }
    )
    assert figures.keys() <= DOCUMENTED


def test_mfu_needs_a_known_peak_and_fp8_mfu_an_fp8_run() -> None:
    size = DecoderSize(10**6, 1, 8)
    tokens = StepTokens(16, 16, 16, 256)

    def keys(gpu_name: str, fp8: bool) -> set[str]:
        return {key for key in speed_metrics(tokens, 1.0, size, 1, peak_tflops(gpu_name), fp8) if key.startswith("mfu")}

    assert keys("NVIDIA H200", fp8=True) == {"mfu_bf16_peak", "mfu_fp8_peak"}
    assert keys("NVIDIA H200", fp8=False) == {"mfu_bf16_peak"}
    assert keys("NVIDIA A100-SXM4-80GB", fp8=True) == {"mfu_bf16_peak"}
    assert keys("NVIDIA Future GPU", fp8=True) == set()


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 1978.9),
        ("NVIDIA H20", 148.0, 296.0),
        ("NVIDIA GH200 480GB", 989.4, 1978.9),
        ("NVIDIA A100 80GB PCIe", 312.0, None),
    ],
)
def test_peaks_are_those_without_sparsity(name: str, bf16: float, fp8: float | None) -> None:
    peak = peak_tflops(name)
    assert peak is not None and (peak.bf16, peak.fp8) == (bf16, fp8)


@pytest.mark.parametrize("key", sorted(DOCUMENTED))
def test_every_documented_metric_is_in_the_code(key: str) -> None:
    assert any(re.search(rf"\b{key}\b", path.read_text()) for path in PACKAGE.rglob("*.py"))


def test_full_gpu_is_described_if_it_happens_after_the_first_steps():
    steps = [{"num_alloc_retries": count} for count in (0, 2, 2, 3, 5, 5)]
    assert "the GPU was full 2 times in 3 steps" in describe_full_gpu(steps)
    assert describe_full_gpu(steps[:3]) is None is describe_full_gpu([{"loss": 1.0}])
