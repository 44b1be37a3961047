"""The constants of the prediction: what an H200 reached inside training, each with the records that it was fitted to.

They are rates *in training*, which are not the ceilings of llm_fp8/ceilings.py: clocks follow the power that the whole step draws. For another
GPU every rate is scaled by the ratio of the two GPUs' measured ceilings.

Where no other record is named, a constant comes from the rows 1b, 8b and 8b_s8192 of benchmarks/results/speed_table_h200.json, whose recorded steps
have the time of each class of kernels (llm_fp8/kernels.py): the FLOPs or bytes that step_time.py counts for a class, over its time, the mean of the rows, rounded.
The table's other rows of one GPU were left out: 3b, text_1b, and 14b but for its optimizer.

To be fitted anew when the table's rows on several GPUs are complete, for they are from row 8b_x4 alone (8B, fsdp_full and fsdp_grad, `delayed`, four GPUs of one
host, three steps): `exchange_tb_s`, `WAIT_SHARE` and `fsdp_tb_s`. `MEASURED_GPUS`, and the notes of prediction.py, follow from which rows there are.
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

DIAGONAL_TOKENS = 970
"""Causal attention over documents of l tokens takes the time of l + this: the tiles on the diagonal are computed whole, and some of its kernels
pass over the tokens once, whatever l is. From the class `attention` of row 8b against row 8b_s8192: 992, 975 and 938 by arm, cuDNN's."""

FLASH4_SPEED_UP = 1.14
"""Of flash-attn 4 over cuDNN's attention, time of the class: 1.16 (1b), 1.11 (8b), 1.16 (8b_s8192), with `:flash4` against without."""

GAP_S = 0.027
"""Seconds of a step in which no kernel of it runs: the step less the sum of the classes, 18 to 32 ms and much the same for four and eight micro-batches; 37 and 49 ms
in row 14b with its sixteen. It is the host's, and is not scaled for another GPU."""

WAIT_SHARE = 0.02
"""Of a step on several GPUs without its exchange: the slowest GPU's is that much longer than that of the mean one, which the rates are of, and the others wait for
it. Row 8b_x4, fsdp_grad: `work_s_by_rank` says 1.9%. Under fsdp_full, whose GPUs wait for each other in every layer, the record cannot tell."""

MEASURED_TOKENS = (4096, 16384)
"""Fewest and most tokens of a micro-batch in the records."""

FITS_RESERVE_GIB = 2.0
"""Beyond the peak of the tensors: CUDA's context and the allocator's gaps. The fullest recorded run (speed_table_h200.json, 8b, delayed:fp8head_all)
peaked at 137.5 of 139.8 GiB."""

FSDP_RESERVED_SHARE = 1.15
"""What the allocator reserves over the peak of the tensors under FSDP, whose buffers live on several streams: up to 1.17 in
multi_gpu_throughput_8b_s1024_x2.json, 1.11 to 1.12 in row 8b_x4. Where that is beyond the GPU's memory, blocks are freed and allocated anew and steps are slower: the two
fsdp_grad rows of that file."""

MODES = ("single", "ddp", "fsdp_grad", "fsdp_full")
"""One GPU and the sharding modes, with recorded runs that the constants were fitted to."""

MEASURED_GPUS = (4,)
"""GPUs of one host in the records of today's code."""
MAX_GPUS = 8
"""Of one host; several hosts exchange over a network that no record has."""

GPU_MEMORY_GIB = {CALIBRATED_GPU: 139.8}
"""By GPU name, as the provenance of the records has it."""


@dataclass(frozen=True)
class Rates:
    """What the parts of a step reach. TFLOP/s: 10**12 per second; TB/s: 10**12 bytes per second, read plus written."""

    bf16_gemm_tflops: float = 715.0
    """Of bf16 runs."""
    bf16_head_tflops: float = 750.0
    """Of the bf16 output head in an fp8 run, which leaves more of the power to it."""
    fp8_gemm_tflops: dict[str, float] = field(default_factory=lambda: {"delayed": 1340.0, "current": 1340.0, "block": 1110.0})
    """By recipe, forward and both backward GEMMs together, and the products of an fp8 head. `current` runs the kernels of `delayed`; `block` from
    throughput_1b.json and throughput_8b_b6.json."""
    attention_tflops: dict[int, float] = field(default_factory=lambda: {64: 320.0, 128: 393.0})
    """By head size, cuDNN's, model FLOPs (llm_fp8/metrics.py) with `DIAGONAL_TOKENS`."""
    pass_tb_s: float = 3.65
    """Norms, SwiGLU, RoPE, residuals, copies around attention."""
    general_norm_tb_s: float = 1.36
    """Transformer Engine's RMSNorm of widths that it has no tuned kernel for, where cuDNN's is not taken (llm_fp8/norm_backend.py): the class
    `norm` of levers_3b_norms_te.json."""
    swiglu_cast_tb_s: float = 2.9
    """SwiGLU that writes fp8, forward and backward (llm_fp8/swiglu_kernel.py), of `delayed`."""
    loss_tb_s: float = 2.75
    """Cross entropy."""
    cast_tb_s: dict[str, float] = field(default_factory=lambda: {"delayed": 3.63, "current": 3.67, "block": 2.33})
    """Casts, transposes and maxima of activations and gradients, by recipe. `current` from levers_8b_first_scales.json, `block` from
    throughput_1b.json and throughput_3b.json, whose casts are today's."""
    weight_tb_s: float = 3.83
    """Optimizer, gradient norm and accumulation, weight casts."""
    eight_bit_tb_s: float = 2.03
    """adamw_8bit and the gradient norm before it (llm_fp8/eight_bit_adamw_kernel.py): the class `optimizer` of row 14b."""
    fsdp_tb_s: float = 2.3
    """FSDP2's own copies, casts and sums. Sums of bf16 gradients in fp32: the class `elementwise` of levers_8b_x4_sums_apart.json less that of
    speed_table_h200.json, 8b, beyond its own sums, 2.29 and 2.32. Copies out of gathered buffers: how the class `copy` grows with the gathers from
    fsdp_grad to fsdp_full, 2.34; and what all rows have of it beside gathers, 47 ms, is the casts to fp32 and the layout for the reduction, 2.4. The
    exchange runs beside them and takes a share of the memory's bandwidth."""
    exchange_tb_s: float = 1.4
    """Bytes of the whole tensors that are gathered and reduced, over the time that they lengthen a step by: the wire is hidden behind the
    computation, what is left is what shares the GPU with it, GEMMs and casts above all. From what the steps of row 8b_x4 and of
    levers_8b_x4_sums_apart.json take beyond every other part, `WAIT_SHARE` among them; for the latter with FSDP's sums and gathers as they were then,
    10 bytes for every parameter and further micro-batch and a gather of `fsdp_grad` in each. Least squares say 1.46 for the five and 1.29 for today's three;
    with 1.4 the five steps come out 1.4% too short to 1.1% too long."""

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
            general_norm_tb_s=self.general_norm_tb_s * copy,
            swiglu_cast_tb_s=self.swiglu_cast_tb_s * copy,
            loss_tb_s=self.loss_tb_s * copy,
            cast_tb_s={name: rate * copy for name, rate in self.cast_tb_s.items()},
            weight_tb_s=self.weight_tb_s * copy,
            fsdp_tb_s=self.fsdp_tb_s * copy,
            eight_bit_tb_s=self.eight_bit_tb_s * copy,
        )
