"""The constants of the prediction: what an H200 reached inside training, each with the records that it was fitted to.

They are rates *in training*, which are not the ceilings of llm_fp8/ceilings.py: clocks follow the power that the whole step draws. For another
GPU every rate is scaled by the ratio of the two GPUs' measured ceilings.

The records are benchmarks/results/throughput_{1b,3b,8b,8b_b6}.json (one GPU) and multi_gpu_throughput_*.json. The GEMM rates are the FLOPs of
a row over the time of its `gemm_kernels`; bandwidths and attention rates are a least-squares fit of what is left of each step, rounded by hand. No record was held out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_fp8.ceilings import Ceilings

CALIBRATED_GPU = "NVIDIA H200"

SMALL_GEMM_TOKENS = 256
"""A GEMM over t tokens runs at t / (t + this) of its full rate: from fp8 and bf16 GEMM times of throughput_8b.json (8,192 tokens) and
throughput_8b_b6.json (6,144), which give 381 in fp8 and 148 in bf16."""

DIAGONAL_TOKENS = 225
"""Causal attention over documents of l tokens takes the time of l + this: the tiles on the diagonal are computed whole. From
multi_gpu_throughput_8b_s1024_x4.json against multi_gpu_throughput_8b_s8192_x4.json."""

MEASURED_TOKENS = (4096, 16384)
"""Fewest and most tokens of a micro-batch in the records."""

FITS_RESERVE_GIB = 2.0
"""Beyond the peak of the tensors: CUDA's context and the allocator's gaps. The fullest recorded run (throughput_8b.json, delayed) peaked at 136.6
of 139.8 GiB."""

FSDP_RESERVED_SHARE = 1.15
"""What the allocator reserves over the peak of the tensors under FSDP, whose buffers live on several streams: up to 1.17 in
multi_gpu_throughput_8b_s1024_x2.json. Where that is beyond the GPU's memory, blocks are freed and allocated anew and steps are slower: the two
fsdp_grad rows of that file."""

MODES = ("single", "ddp", "fsdp_grad", "fsdp_full")
"""One GPU and the sharding modes, with recorded runs that the constants were fitted to."""

MEASURED_GPUS = (2, 4)
"""GPUs of one host in the records."""
MAX_GPUS = 8
"""Of one host; several hosts exchange over a network that no record has."""

GPU_MEMORY_GIB = {CALIBRATED_GPU: 139.8}
"""By GPU name, as the provenance of the records has it."""


@dataclass(frozen=True)
class Rates:
    """What the parts of a step reach. TFLOP/s: 10**12 per second; TB/s: 10**12 bytes per second, read plus written."""

    bf16_gemm_tflops: float = 705.0
    """Of bf16 runs."""
    bf16_head_tflops: float = 740.0
    """Of the bf16 output head in an fp8 run, which leaves more of the power to it."""
    fp8_gemm_tflops: dict[str, float] = field(default_factory=lambda: {"delayed": 1340.0, "current": 1340.0, "block": 1085.0})
    """By recipe, forward and both backward GEMMs together."""
    attention_tflops: dict[int, float] = field(default_factory=lambda: {64: 244.0, 128: 380.0})
    """By head size, cuDNN's kernels alone, model FLOPs (llm_fp8/metrics.py): 64 from a profile of Llama-3.2-1B, with which throughput_1b.json
    agrees, 128 from the fit."""
    pass_tb_s: float = 2.45
    """Norms, SwiGLU, RoPE, residuals, cross entropy."""
    cast_tb_s: dict[str, float] = field(default_factory=lambda: {"delayed": 2.55, "current": 3.14, "block": 2.55})
    """Casts, transposes and maxima of activations and gradients, by recipe."""
    weight_tb_s: float = 3.9
    """Optimizer, gradient norm and accumulation, weight casts."""
    exchange_tb_s: float = 0.8
    """Bytes of the whole tensors that are gathered and reduced, over the time that they lengthen a step by: the wire is hidden behind the
    computation, what is left are copies, and kernels that share the GPU. The same for 2 and 4 GPUs of one host (NVLink) in
    multi_gpu_throughput_8b_s1024_x2.json and multi_gpu_throughput_8b_s1024_x4.json."""

    def attention_rate(self, head_dim: int) -> float:
        """TFLOP/s of the measured head size that is nearest."""
        return self.attention_tflops[min(self.attention_tflops, key=lambda size: abs(size - head_dim))]

    def scaled(self, here: Ceilings, calibrated: Ceilings) -> Rates:
        """The rates of a GPU with the ceilings `here`, these being those of one with `calibrated`.

        Block scaling is left out: its kernels are others on every generation.
        """
        bf16 = here.bf16_gemm_tflops / calibrated.bf16_gemm_tflops
        copy = here.copy_tb_s / calibrated.copy_tb_s
        fp8 = {}
        if here.fp8_gemm_tflops is not None and calibrated.fp8_gemm_tflops is not None:
            ratio = here.fp8_gemm_tflops / calibrated.fp8_gemm_tflops
            fp8 = {name: rate * ratio for name, rate in self.fp8_gemm_tflops.items() if name != "block"}
        return dataclasses.replace(
            self,
            bf16_gemm_tflops=self.bf16_gemm_tflops * bf16,
            bf16_head_tflops=self.bf16_head_tflops * bf16,
            fp8_gemm_tflops=fp8,
            attention_tflops={size: rate * bf16 for size, rate in self.attention_tflops.items()},
            pass_tb_s=self.pass_tb_s * copy,
            cast_tb_s={name: rate * copy for name, rate in self.cast_tb_s.items()},
            weight_tb_s=self.weight_tb_s * copy,
        )
