"""The constants of the prediction: what an H200 reached inside training, each with the records that it was fitted to.

They are rates *in training*, not the measured peak rates of llm_fp8/tools/gemm_rates.py: clocks follow the power that
the whole step draws. For another GPU every rate is scaled by ratios of the two GPUs' measured peak rates
(`Rates.scaled`).

Where no other record is named, a constant comes from the rows 1b, 8b and 8b_s8192 of
benchmarks/results/speed_table_h200.json, arms bf16 and delayed with and without :fp8head_all, :flash3 (since removed)
and :flash4, first rounds: the FLOPs or bytes that step_time.py counts for a class of kernels
(llm_fp8/observability/kernel_trace.py), over its recorded time, the mean of the rows, rounded. Held out of one GPU:
variants current and block of these, 3b, text_1b, 1b_128k, 8b_128k, and 14b but for its optimizer.

On several GPUs `communication_tb_s` and `WAIT_SPREAD` come from row 8b_x4 (8B, four GPUs of one host, seven variants of
fsdp_full and fsdp_grad), `fsdp_tb_s` from it and what is named there. Held out: two GPUs, documents of 8,192 tokens,
other models, ddp. `MEASURED_GPUS` and the notes of prediction.py follow from which rows there are.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_fp8.tools.gemm_rates import MeasuredRates

CALIBRATED_GPU = "NVIDIA H200"
CHECKED_GPUS = (CALIBRATED_GPU, "NVIDIA H100 80GB HBM3")
"""Runs on these are held against their predictions (docs/results.md)."""

SMALL_GEMM_TOKENS = 256
"""A GEMM over t tokens runs at t / (t + this) of its full rate: from throughput_8b.json (8,192 tokens) and
throughput_8b_b6.json (6,144), which give 381 in fp8 and 148 in bf16."""

DIAGONAL_TOKENS = 970
"""Causal attention over documents of l tokens takes the time of l + this: tiles on the diagonal are computed in full,
and some kernels pass over the tokens once. Row 8b against 8b_s8192: 992, 975 and 938 by arm, cuDNN's."""

ATTENTION_TILE = 128
"""Tokens that attention computes together: a document that fills no whole number of tiles ends half-way through one, on
average. The tile of the Hopper kernels of cuDNN and flash-attn; without it attention over GSM8K's documents of 281
tokens (large_steps_text_*.json) took 21 to 30% longer than predicted, and with it 0 to 8%."""

FLASH_ATTENTION_4_SPEED_UP = 1.14
"""Of flash-attn 4 over cuDNN's attention: 1.16, 1.11 and 1.16 for 1b, 8b and 8b_s8192."""

STEP_GAP_S = 0.0095
LAYER_GAP_S = 0.0001
"""Seconds without a kernel: of a step, and of a decoder layer in a micro-batch. The step less the sum of the classes is
16 ms in row 1b, of 64 such layers, and 36 and 35 ms in 8b and 8b_s8192, of 256. Held out: 19 ms in 3b (112), 56 in
8b_128k (512), 80 in 14b (768), 102 in 8b_256k (1,024). They are the host's, and are not scaled for another GPU."""

GRAPH_GAP_S = 0.0001
"""Seconds per fp8 decoder layer and micro-batch in a CUDA graph: casts, amax and scale updates have more kernels than
their bytes explain. levers_small_steps_h100.json and levers_small_steps_57m_h100.json lack 92 (3B), 119 (1B) and 127
microseconds."""

WAIT_SPREAD = 0.021
"""Standard deviation of the time that GPUs of one kind take for the same step, over that time. Rates are of the mean
GPU, and the others wait for the slowest (`idle_share` in step_time.py). From `work_s_by_rank` of row 8b_x4, three arms
of fsdp_grad: the slowest of four is 1.9% to 2.4% over the mean. Under fsdp_full, whose GPUs wait in every layer, the
record cannot tell."""

MEASURED_TOKENS = (4096, 65536)
"""Fewest and most tokens of a micro-batch in the records that predictions are compared with
(benchmarks/prediction_records.py)."""

FITS_RESERVE_GIB = 2.0
"""Beyond the peak of the tensors, and what FSDP's stream of gathers holds beside it: CUDA's context and the allocator's
gaps. The fullest recorded run (speed_table_h200.json, 8b, delayed:fp8head_all) peaked at 137.5 of 139.8 GiB."""

MODES = ("single", "ddp", "fsdp_grad", "fsdp_full")
"""One GPU and the sharding modes, with recorded runs that the constants were fitted to."""

HOST_S_PER_LAYER = {
    **dict.fromkeys(("single", "ddp"), (0.0049, 0.0084)),
    **dict.fromkeys(("fsdp_grad", "fsdp_full"), (0.0114, 0.0127)),
}
"""Seconds of the host for a decoder layer of a micro-batch in fp8, forward and backward, on the slowest recorded
machines: with activations kept, and recomputed. From levers_3b_recompute_*.json and documented_3b_x2.json, where GPUs
were busy for less than a fifth of a step, and `fsdp_full:delayed` of multi_gpu_throughput_8b_engines_x2.json; `ddp` is
taken to be like one GPU, `fsdp_grad` like `fsdp_full`. The fastest recorded machine took 0.0088 under fsdp_full with
recomputation (levers_3b_x2_recompute_*.json)."""

FAST_HOST = 0.69
"""Seconds of the fastest recorded host over those of the slowest: 0.0088 over 0.0127 as above, for every mode."""

MEASURED_GPUS = {"ddp": (2,), "fsdp_grad": (2, 4), "fsdp_full": (2, 4)}
"""By mode: GPUs of one host in the records of today's code, but for steps that are not scored."""
MAX_GPUS = 8
"""Of one host; several hosts communicate over a network that no record has."""


@dataclass(frozen=True)
class Rates:
    """What the parts of a step reach. TFLOP/s: 10**12 per second; TB/s: 10**12 bytes per second, read plus written."""

    bf16_gemm_tflops: float = 715.0
    """Of bf16 runs."""
    bf16_head_tflops: float = 750.0
    """Of the bf16 lm_head in an fp8 run, which leaves more of the power to it."""
    fp8_gemm_tflops: dict[str, float] = field(
        default_factory=lambda: {"delayed": 1340.0, "current": 1340.0, "block": 1110.0}
    )
    """By recipe, all three GEMMs, and those of an fp8 lm_head. `current` runs the kernels of `delayed`; `block` from
    throughput_1b.json and throughput_8b_b6.json, whose GEMMs are today's."""
    attention_tflops: dict[int, float] = field(default_factory=lambda: {64: 320.0, 128: 393.0})
    """By head size, cuDNN's, model FLOPs (llm_fp8/observability/metrics.py) with `DIAGONAL_TOKENS`."""
    pass_tb_s: float = 3.65
    """Norms, SwiGLU, RoPE, residuals, copies around attention."""
    general_norm_tb_s: float = 1.36
    """Transformer Engine's RMSNorm of widths that it has no tuned kernel for, where cuDNN's is not taken
    (llm_fp8/models/build.py): the class `norm` of levers_3b_norms_te.json."""
    swiglu_cast_tb_s: float = 2.9
    """SwiGLU that writes fp8, forward and backward (llm_fp8/kernels/fp8_gradients_triton.py), of `delayed`."""
    loss_tb_s: float = 2.75
    """Cross entropy."""
    cast_tb_s: dict[str, float] = field(default_factory=lambda: {"delayed": 3.63, "current": 3.67, "block": 2.33})
    """Casts, transposes and amax of activations and gradients, by recipe. `current` from levers_8b_first_scales.json,
    `block` from throughput_1b.json and throughput_3b.json, whose casts are today's."""
    weight_tb_s: float = 3.83
    """Optimizer, gradient norm and accumulation, weight casts."""
    eight_bit_tb_s: float = 2.03
    """adamw_8bit and the gradient norm before it (llm_fp8/optim/adamw_triton.py): `optimizer` of row 14b."""
    host_tb_s: float = 0.047
    """To pinned host memory and, at the same time, from it: an H100's (gpu_tests.json, test_offload_gpu.py). It is the
    host's, and is not scaled."""
    fsdp_tb_s: float = 2.3
    """FSDP2's own copies, casts and sums; communication beside them takes a share of the bandwidth. Sums of bf16
    gradients in fp32: `elementwise` of levers_8b_x4_sums_apart.json less that of speed_table_h200.json, 8b, beyond its
    own sums, 2.29 and 2.32. Copies out of gathered buffers: the growth of `copy` from fsdp_grad to fsdp_full, 2.34.
    Casts to fp32 and the layout for the reduction: the rest of `copy` in all rows, 47 ms, 2.4."""
    communication_tb_s: float = 1.1
    """Unsharded bytes that are gathered and reduced, over the time that they lengthen a step by: the wire is hidden
    behind the computation, which shares the GPU with communication. Least squares of what the seven steps of row 8b_x4
    take beyond every other part, relative to the step; errors are then -1.0% to 1.8%. That a GPU receives (N - 1) / N
    of the bytes, and copies 10 / N bytes of every gathered bf16 weight, nearly cancel from two GPUs to four; counting
    both brought the held-out rows no nearer."""

    def attention_rate(self, head_dim: int) -> float:
        """TFLOP/s of the measured head size that is nearest."""
        return self.attention_tflops[min(self.attention_tflops, key=lambda size: abs(size - head_dim))]

    def scaled(self, here: MeasuredRates, calibrated: MeasuredRates) -> Rates:
        """The rates of a GPU with the measured rates `here`, these being those of one with `calibrated`; without block
        scaling, whose kernels differ by generation.
        """
        bf16 = here.bf16_gemm_tflops / calibrated.bf16_gemm_tflops
        copy = here.copy_tb_s / calibrated.copy_tb_s
        fp8 = 0.0
        if here.fp8_gemm_tflops is not None and calibrated.fp8_gemm_tflops is not None:
            fp8 = here.fp8_gemm_tflops / calibrated.fp8_gemm_tflops

        def by_arithmetic(rate: float) -> float:
            """Of a kernel that is slower than a pass because it computes: bandwidth limits it at a pass's rate only."""
            return min(rate * max(bf16, copy), max(rate, self.pass_tb_s) * copy)

        bandwidths = {f"{name}_tb_s": getattr(self, f"{name}_tb_s") * copy for name in ("pass", "weight", "fsdp")}
        computing = ("general_norm", "swiglu_cast", "loss", "eight_bit")
        bandwidths |= {f"{name}_tb_s": by_arithmetic(getattr(self, f"{name}_tb_s")) for name in computing}
        return dataclasses.replace(
            self,
            bf16_gemm_tflops=self.bf16_gemm_tflops * bf16,
            bf16_head_tflops=self.bf16_head_tflops * bf16,
            fp8_gemm_tflops={
                name: rate * fp8 for name, rate in self.fp8_gemm_tflops.items() if fp8 and name != "block"
            },
            attention_tflops={size: rate * bf16 for size, rate in self.attention_tflops.items()},
            cast_tb_s={name: by_arithmetic(rate) for name, rate in self.cast_tb_s.items()},
            **bandwidths,
        )
