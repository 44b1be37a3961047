"""Metrics and their formulas. docs/monitoring.md lists all keys of metrics.jsonl, with units.

**Floating-point operations (FLOPs).** A multiply-add counts as two. A weight matrix of `n` entries costs `2 n` per
token in each of fprop, dgrad and wgrad. In causal attention the query at position `t` of its document reads `t` keys.
A document of `l` tokens has `l**2 / 2` such pairs. Each pair costs a dot product of width `h` for the scores and one
for the values, and twice as much in the backward pass. Each layer thus costs `6 h l**2`, and one step costs

    6 P num_tokens  +  6 L h sum(l**2 over documents)

`P` is the number of linear weights that process a token, with the lm_head. Of routed weights, only those that the
router selects count. Embedding look-up, norms, softmax and RoPE are left out, as usual. `L` is the number of layers
with attention, and `h` is `num_attention_heads * head_dim`. An unpacked sequence of `S` positions is one document,
which gives the familiar `num_tokens * (6 P + 6 L S h)`. These are *model* FLOPs as in PaLM (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B), but with only the causal half of attention. Padding is counted, recomputation is not.
With adapters, the linear weights are frozen and need no wgrad. They cost `4 n`, and the adapters' weights `6 n`.

**Utilisation** (MFU) is model FLOP/s over the GPU's dense peak. An fp8 step mixes fp8 and bf16 GEMMs, so its MFU is
reported against both peaks. A GPU that is not in the table has no MFU.
"""

from __future__ import annotations

import re
import statistics
import time
from typing import NamedTuple

import torch

GIB = 2**30
RESERVE_GIB = 2.0  # part of GPU memory for CUDA's context and the allocator's gaps


class PhaseClock:
    """Wall times of a run's phases in s. The first phase begins at `start_s` (from `time.perf_counter`) or now."""

    def __init__(self, start_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._reached_s = time.perf_counter() if start_s is None else start_s

    def end(self, phase: str) -> None:
        now_s = time.perf_counter()
        self.seconds[phase] = now_s - self._reached_s
        self._reached_s = now_s


class DecoderSize(NamedTuple):
    """The sizes of a model that determine FLOPs. `llm_fp8.models.build.decoder_size` reads them from its config."""

    num_linear_parameters: int  # per token: with lm_head, without embedding or unselected routed weights
    num_layers: int  # layers with attention
    attention_width: int  # num_attention_heads * head_dim
    num_adapter_parameters: int = 0  # if there are any, all linear weights are frozen


class StepTokens(NamedTuple):
    """Token counts of one optimizer step, summed over its micro-batches and all GPUs."""

    num_tokens: int  # all positions, padding included
    num_real_tokens: int
    num_supervised_tokens: int
    sum_squared_lengths: int  # over documents; `num_tokens * S` for unpacked sequences of S positions


def step_flops(size: DecoderSize, tokens: StepTokens) -> float:
    """Compute the model FLOPs of one optimizer step on all GPUs (see the formula in the module's docstring)."""
    per_linear_parameter = 4.0 if size.num_adapter_parameters else 6.0
    linear = per_linear_parameter * size.num_linear_parameters + 6.0 * size.num_adapter_parameters
    attention = 6.0 * size.num_layers * size.attention_width * tokens.sum_squared_lengths
    return linear * tokens.num_tokens + attention


class PeakTflops(NamedTuple):
    """Dense tensor-core peaks of one GPU in TFLOP/s (10**12 per second)."""

    bf16: float
    fp8: float | None  # None if the GPU has no fp8 tensor cores


# A key matches all of `torch.cuda.get_device_name`, since laptop, MIG and cut-down parts have other peaks. Values are
# from NVIDIA's data sheets (half of figures with sparsity) unless a comment names another source.
_PEAKS: dict[str, PeakTflops] = {
    # SXM; H100 Architecture white paper, dense.
    r"NVIDIA H100 80GB HBM3|NVIDIA H200|NVIDIA GH200 (480GB|144G HBM3e)": PeakTflops(989.4, 1978.9),
    r"NVIDIA H100 PCIe": PeakTflops(756.0, 1513.0),
    r"NVIDIA H[12]00 NVL": PeakTflops(835.5, 1670.5),
    r"NVIDIA H20": PeakTflops(148.0, 296.0),  # published by system vendors, dense
    r"NVIDIA B200|NVIDIA B300 SXM6 AC": PeakTflops(2250.0, 4500.0),  # HGX B200 and HGX B300, one GPU
    r"NVIDIA GB[23]00": PeakTflops(2500.0, 5000.0),  # GB200 NVL72 and GB300 NVL72, one GPU
    r"NVIDIA A100-SXM4-(40|80)GB|NVIDIA A100-PCIE-40GB|NVIDIA A100 80GB PCIe": PeakTflops(312.0, None),  # dense
    r"NVIDIA L40S": PeakTflops(362.05, 733.0),  # dense
    r"NVIDIA L40": PeakTflops(181.05, 362.0),  # dense
    r"NVIDIA L4": PeakTflops(121.0, 242.5),
    r"NVIDIA RTX 6000 Ada Generation": PeakTflops(364.25, 728.5),
    # Ada and RTX Blackwell Architecture white papers, dense with fp32 accumulation.
    r"NVIDIA GeForce RTX 4090": PeakTflops(165.2, 330.3),
    r"NVIDIA GeForce RTX 5090": PeakTflops(209.5, 419.0),
}


def peak_tflops(gpu_name: str) -> PeakTflops | None:
    return next((peak for pattern, peak in _PEAKS.items() if re.fullmatch(pattern, gpu_name)), None)


def device_peak_tflops(device: torch.device) -> PeakTflops | None:
    """Return the peaks of `device`, or None for a CPU or a GPU that is not in the table `_PEAKS`."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


RECORDED_STEP = "num_gemm_kernels"  # a key that only the recorded step has


def speed_metrics(
    tokens: StepTokens, step_time_s: float, size: DecoderSize, num_gpus: int, peak: PeakTflops | None, fp8: bool
) -> dict[str, float]:
    """Return one step's throughput metrics, named as in metrics.jsonl. If `fp8`, add the MFU against the fp8 peak."""
    tflops = step_flops(size, tokens) / step_time_s / num_gpus / 1e12
    figures = {
        "step_time_s": step_time_s,
        "tokens_per_s": tokens.num_tokens / step_time_s,
        "tokens_per_s_per_gpu": tokens.num_tokens / step_time_s / num_gpus,
        "real_tokens_per_s": tokens.num_real_tokens / step_time_s,
        "supervised_tokens_per_s": tokens.num_supervised_tokens / step_time_s,
        "packing_efficiency": tokens.num_real_tokens / tokens.num_tokens,
        "model_tflops": tflops,
    }
    if peak is not None:
        figures["mfu_bf16_peak"] = tflops / peak.bf16
        if fp8 and peak.fp8 is not None:
            figures["mfu_fp8_peak"] = tflops / peak.fp8
    return figures


WARMUP_STEPS = 10  # first steps of a process that medians skip, but at most half of its steps

MEDIANS = (
    *("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "real_tokens_per_s", "supervised_tokens_per_s"),
    *("packing_efficiency", "model_tflops", "mfu_bf16_peak", "mfu_fp8_peak"),
    *("energy_j_per_million_tokens", "gpu_power_w"),
)
"""Keys whose median over the measured steps is `median_<key>` in summary.json and on W&B."""


def throughput_summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return `num_steps_measured`, `num_steps_left_out`, and `median_<key>` for each of `MEDIANS`. `steps` are the
    records of one process in order. The first steps and the step whose kernels were recorded are left out.
    """
    measured = [record for record in steps[min(WARMUP_STEPS, len(steps) // 2) :] if RECORDED_STEP not in record]
    summary: dict[str, float] = {"num_steps_measured": len(measured), "num_steps_left_out": len(steps) - len(measured)}
    for key in MEDIANS:
        if values := [record[key] for record in measured if key in record]:
            summary[f"median_{key}"] = statistics.median(values)
    return summary


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return this process's peak memory on `device`, named as in metrics.jsonl. For a CPU the result is empty."""
    if device.type != "cuda":
        return {}
    return {
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "peak_reserved_memory_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "num_alloc_retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


def describe_full_gpu(steps: list[dict[str, float]]) -> str | None:
    """Return a warning if, in the second half of `steps`, a full GPU made PyTorch free its cache. Else return None."""
    later = [step["num_alloc_retries"] for step in steps[len(steps) // 2 :] if "num_alloc_retries" in step]
    if not later or later[-1] == later[0]:
        return None
    count = f"{later[-1] - later[0]:.0f} times in {len(later)} steps"
    return f"WARNING: the GPU was full {count}, and PyTorch stalled to free its cache: lower --batch_size or shard more"
