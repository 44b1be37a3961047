"""The GPUs: whether torch can use them, and the rates of their GEMMs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING

from llm_fp8.tools.verify.result import Result, Setup
from llm_fp8.utils.subprocesses import output_of

if TYPE_CHECKING:
    import torch


def check_gpu(setup: Setup) -> Result:
    """A machine without a GPU is skipped; a GPU that torch cannot use fails."""
    import torch

    listed = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", timeout_s=60)
    gpus = (listed or "").splitlines()
    driver, cuda = gpus[0].rpartition(", ")[2] if gpus else "unknown", torch.version.cuda
    result = Result(facts={"driver_gpus": gpus, "torch": torch.__version__, "torch_cuda": cuda})
    if setup.num_gpus:
        found = [torch.cuda.get_device_properties(index) for index in range(setup.num_gpus)]
        names, first = [each.name for each in found], found[0]
        capability, memory_gib = f"{first.major}.{first.minor}", first.total_memory / 2**30
        cudnn, nccl = torch.backends.cudnn.version(), ".".join(map(str, torch.cuda.nccl.version()))
        result.facts |= {"names": names, "capability": capability, "memory_gib": memory_gib, "cudnn": cudnn}
        result.summary = (
            f"{len(names)} x {first.name}, compute capability {capability}, {memory_gib:.1f} GiB, driver {driver}, "
            f"CUDA {cuda}, cuDNN {cudnn}, NCCL {nccl}"
        )
        if len(set(names)) > 1:
            result.warn(f"the GPUs differ ({', '.join(names)}): a run on all is as fast as the slowest", "nvidia-smi")
    elif not gpus:
        result.summary, result.skipped = "no NVIDIA GPU: nvidia-smi lists none, torch finds none", True
    else:
        visible = setup.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            why, fix = f"CUDA_VISIBLE_DEVICES is '{visible}'", "unset CUDA_VISIBLE_DEVICES"
        elif cuda is None:
            why = f"torch {torch.__version__} is a CPU build"
            fix = f"pip install --force-reinstall torch=={torch.__version__.partition('+')[0]}"
        else:
            why = f"CUDA cannot be initialised (driver {driver}, torch built for CUDA {cuda})"
            fix = "nvidia-smi   # 'CUDA Version' is the newest for this driver; install a newer one, or a torch for it"
        result.fail(f"the driver lists {gpus[0]}, but torch cannot use it: {why}", fix)
    return result


GEMM_SIZE = 8192
WARMUP_S = 0.2
NUM_REPEATS = 40
LEAST_SHARE = 0.85


@dataclass(frozen=True)
class Rates:
    """TFLOP/s (10**12 per second) of GEMMs of three sizes of `GEMM_SIZE`, on random normal data: zeros draw less power,
    so clocks stay higher than training sees.
    """

    bf16: float
    fp8: float | None
    """e4m3 times e4m3, one scale per tensor, fast accumulation, bf16 result; None on a GPU without fp8."""


KNOWN = {"NVIDIA H100 80GB HBM3": Rates(680.1, 1281.5), "NVIDIA H200": Rates(687.3, 1309.8)}
"""What `measure_rates` gave on a GPU of this name; a GPU that is not here is not judged."""


def measure_rates(device: torch.device) -> Rates:
    """Measure a GPU that nothing else uses, in about a second."""
    import torch

    from llm_fp8.precision.plan import MIN_FP8_CAPABILITY
    from llm_fp8.utils.torch_internals import fp8_gemm

    def tflops(launch: Callable[[], object]) -> float:
        until = time.perf_counter() + WARMUP_S
        while time.perf_counter() < until:  # the clocks settle
            launch()
            torch.cuda.synchronize(device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(NUM_REPEATS)]
        for start, end in events:
            start.record()
            launch()
            end.record()
        torch.cuda.synchronize(device)
        times_ms = [start.elapsed_time(end) for start, end in events]
        return 2 * GEMM_SIZE**3 / statistics.median(times_ms) / 1e9

    with torch.cuda.device(device):
        left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
        result = torch.empty_like(left)
        bf16, fp8 = tflops(lambda: torch.mm(left, right, out=result)), None
        if torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY:
            left8, scale = left.to(torch.float8_e4m3fn), torch.ones((), device=device)
            right8 = right.t().contiguous().to(torch.float8_e4m3fn).t()  # column-major, as the kernel takes it
            fp8 = tflops(lambda: fp8_gemm(left8, right8, scale))
    return Rates(bf16, fp8)


def judge_rates(measured: Rates, known: Rates | None, gpu_name: str) -> Result:
    """A rate below 85% of the recorded one is a warning; without a record nothing is judged."""
    figures = ", ".join(f"{name} {value:,.0f} TFLOP/s" for name, value in asdict(measured).items() if value is not None)
    result = Result(figures, facts={"measured": asdict(measured), "known": known and asdict(known)})
    if known is None:
        result.summary += f" (nothing is recorded of another {gpu_name} to compare with)"
        return result
    share = min(
        ours / theirs for ours, theirs in zip(astuple(measured), astuple(known), strict=True) if ours and theirs
    )
    result.summary += f", {share:.0%} or more of what is recorded of an {gpu_name}"
    if share < LEAST_SHARE:
        fix = "nvidia-smi; nvidia-smi -q -d PERFORMANCE,POWER,CLOCK   # while the GPU is busy"
        result.warn("this GPU is slow: its clocks are lowered, or another process uses it", fix)
    return result


def check_rates(setup: Setup) -> Result:
    import torch

    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    return judge_rates(measure_rates(device), KNOWN.get(name), name)
