"""How fast a GPU really multiplies and copies: what a step can be held against, beside the vendor's peaks
(llm_fp8/observability/metrics.py).

    measured = measure_rates(device)              # about two seconds on one GPU
    known = known_rates("NVIDIA H200")            # recorded of such a GPU; None without a record

GEMMs are 8192 x 8192 x 8192 on random normal data: zeros draw less power, so clocks stay higher than training sees. fp8
is e4m3 times e4m3 with one scale per tensor and a bf16 result, through torch._scaled_mm: once with fast accumulation,
as Transformer Engine's forward pass multiplies on Hopper, once with split accumulation, as its backward pass does.
FLOPs of a GEMM: 2 m n k. Each figure is the median over single launches timed with CUDA events.

Known figures are those of the files in `llm_fp8/tools/gpu_rates`; a GPU without one has none.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llm_fp8.precision.plan import MIN_FP8_CAPABILITY
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import REPOSITORY
from llm_fp8.utils.torch_internals import fp8_gemm

GEMM_SIZE = 8192
COPY_BYTES = 2**31
"""Far beyond the caches of any GPU (an H200's L2 has 50 MB)."""

WARMUP_S = 0.2
NUM_REPEATS = 40

GPUS = Path(__file__).parent / "gpu_rates"
"""What was recorded of GPUs, a file each."""


@dataclass(frozen=True)
class MeasuredRates:
    """What one GPU reached. TFLOP/s: 10**12 per second; TB/s: 10**12 bytes per second."""

    bf16_gemm_tflops: float
    fp8_gemm_tflops: float | None
    """Fast accumulation; None on a GPU without fp8 tensor cores."""
    fp8_split_gemm_tflops: float | None
    """Split accumulation: partial sums are promoted to fp32 on the way."""
    copy_tb_s: float
    """Bytes read plus bytes written over time, copying inside the GPU's memory."""

    def bf16_gemm_s(self, flops: float) -> float:
        return flops / self.bf16_gemm_tflops / 1e12

    def fp8_gemm_s(self, flops: float) -> float | None:
        """Seconds of these model FLOPs of fp8 layers, a third with fast accumulation (fprop) and the rest with split;
        None without fp8.
        """
        fast, split = self.fp8_gemm_tflops, self.fp8_split_gemm_tflops
        if fast is None or split is None:
            return None
        return flops * (1 / fast + 2 / split) / 3 / 1e12


@dataclass(frozen=True)
class KnownRates:
    """What was measured on a GPU of this name, and where that is recorded."""

    ceilings: MeasuredRates
    source: str
    """The file, relative to the repository."""
    memory_gib: float
    """Of the GPU."""


def gemm_tflops(size: int, seconds: float) -> float:
    """TFLOP/s of a GEMM of three equal sizes: 2 size**3 / seconds / 10**12."""
    return 2 * size**3 / seconds / 1e12


def copy_tb_s(num_bytes: int, seconds: float) -> float:
    """TB/s of a copy, each byte of which is read and written."""
    return 2 * num_bytes / seconds / 1e12


def fp8_operands(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two matrices cast to e4m3 as `fp8_gemm` takes them (`right` column-major), and the scale of 1 for both."""
    fp8 = torch.float8_e4m3fn
    return left.to(fp8), right.t().contiguous().to(fp8).t(), torch.ones((), device=left.device)


def _median_s(launch: Callable[[], object], device: torch.device) -> float:
    """Median time of one launch in seconds, after a warm-up that lets the clocks settle."""
    until = time.perf_counter() + WARMUP_S
    while time.perf_counter() < until:
        launch()
        torch.cuda.synchronize(device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(NUM_REPEATS)]
    for start, end in events:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def measure_rates(device: torch.device) -> MeasuredRates:
    """Measure this GPU, which nothing else should use meanwhile. Takes about 4 GiB of its memory for two seconds.

    Raises ValueError for a device that is no CUDA GPU, torch.OutOfMemoryError where the memory is taken.
    """
    if device.type != "cuda":
        raise ValueError(f"rates are measured on a CUDA GPU, not on {device}")
    with torch.cuda.device(device):
        generator = torch.Generator(device).manual_seed(0)
        left, right = (
            torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator, device=device, dtype=torch.bfloat16)
            for _ in range(2)
        )
        result = torch.empty_like(left)
        bf16 = gemm_tflops(GEMM_SIZE, _median_s(lambda: torch.mm(left, right, out=result), device))
        fast = split = None
        if torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY:
            left8, right8, scale = fp8_operands(left, right)
            fast = gemm_tflops(GEMM_SIZE, _median_s(lambda: fp8_gemm(left8, right8, scale, fast=True), device))
            split = gemm_tflops(GEMM_SIZE, _median_s(lambda: fp8_gemm(left8, right8, scale, fast=False), device))
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = copy_tb_s(COPY_BYTES, _median_s(lambda: target.copy_(source), device))
    return MeasuredRates(bf16, fast, split, copied)


_ENTRIES = ("gpu", "ceilings", "provenance.gpus")


@functools.cache
def _recorded(folder: Path) -> dict[str, KnownRates]:
    """GPU name -> what the files of `folder` say of it."""
    known = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path, _ENTRIES)
        source = str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)
        memory_gib = record["provenance"]["gpus"][0]["memory_gib"]
        known[record["gpu"]] = KnownRates(MeasuredRates(**record["ceilings"]), source, memory_gib)
    return known


def known_gpu_names() -> list[str]:
    return sorted(_recorded(GPUS))


def known_rates(gpu_name: str) -> KnownRates | None:
    """What was recorded of GPUs that `torch.cuda.get_device_name` calls so; None where nothing was."""
    return _recorded(GPUS).get(gpu_name)


def shares(measured: MeasuredRates, known: MeasuredRates) -> dict[str, float]:
    """Measured over known by the names of `MeasuredRates`, for the figures that both have."""
    ours, theirs = dataclasses.asdict(measured), dataclasses.asdict(known)
    return {name: ours[name] / theirs[name] for name in ours if ours[name] is not None and theirs[name] is not None}
