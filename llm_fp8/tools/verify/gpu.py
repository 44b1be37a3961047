"""Checks of the GPUs: torch can use them, and their GEMMs reach the recorded rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llm_fp8.tools.verify.result import Result, Setup

if TYPE_CHECKING:
    import torch

GEMM_SIZE = 8192
NUM_GEMMS = 100
KNOWN_TFLOPS = {
    "NVIDIA H100 80GB HBM3": {"bf16": 680.1, "fp8": 1281.5},
    "NVIDIA H200": {"bf16": 687.3, "fp8": 1309.8},
}
"""Name of a GPU -> the recorded result of `measure_tflops`; other GPUs are not judged."""
LEAST_SHARE = 0.85


def check_gpu(setup: Setup) -> Result:
    """Skip a machine without a GPU; fail if torch cannot use a GPU of the driver."""
    import torch

    from llm_fp8.observability.provenance import output_of

    listed = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    gpus = (listed or "").splitlines()
    cuda = torch.version.cuda
    result = Result(facts={"driver_gpus": gpus, "torch": torch.__version__, "torch_cuda": cuda})
    if setup.num_gpus:
        name = torch.cuda.get_device_name(0)
        driver = "".join(gpus[:1]).rpartition(", ")[2]
        cudnn = torch.backends.cudnn.version()
        result.summary = f"{setup.num_gpus} x {name}, driver {driver}, CUDA {cuda}, cuDNN {cudnn}"
    elif not gpus:
        result.summary = "no NVIDIA GPU: nvidia-smi lists none, torch finds none"
        result.skipped = True
    elif "CUDA_VISIBLE_DEVICES" in setup.environ:
        visible = setup.environ["CUDA_VISIBLE_DEVICES"]
        result.fail(f"torch finds no GPU: CUDA_VISIBLE_DEVICES is '{visible}'", "unset CUDA_VISIBLE_DEVICES")
    else:
        fix = "nvidia-smi   # 'CUDA Version' is the newest for this driver; install a newer one, or a torch for it"
        result.fail(f"torch {torch.__version__} (CUDA {cuda}) cannot use the driver's {gpus[0]}", fix)
    return result


def measure_tflops(device: torch.device) -> dict[str, float]:
    """TFLOP/s of cubic GEMMs of `GEMM_SIZE` in bf16 and, where the GPU has it, fp8 (e4m3, one scale per tensor, bf16
    result). The data are random normal, since zeros draw less power and clocks would stay higher than in training.
    """
    import torch
    from torch.nn.functional import ScalingType, scaled_mm
    from torch.utils.benchmark import Timer

    from llm_fp8.precision.plan import MIN_FP8_CAPABILITY

    def tflops(launch: Callable[[], object]) -> float:
        timer = Timer("launch()", globals={"launch": launch})  # which synchronises
        timer.timeit(NUM_GEMMS)  # clocks settle
        return 2 * GEMM_SIZE**3 / timer.timeit(NUM_GEMMS).mean / 1e12

    with torch.cuda.device(device):
        left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
        result = torch.empty_like(left)
        found = {"bf16": tflops(lambda: torch.mm(left, right, out=result))}
        if torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY:
            left8 = left.to(torch.float8_e4m3fn)
            scaling = torch.ones((), device=device), ScalingType.TensorWise
            right8 = right.t().contiguous().to(torch.float8_e4m3fn).t()  # column-major, as the kernel takes it
            found["fp8"] = tflops(lambda: scaled_mm(left8, right8, *scaling, *scaling, use_fast_accum=True))
    return found


def judge_tflops(measured: dict[str, float], gpu_name: str) -> Result:
    """Warn of a rate below `LEAST_SHARE` of the recorded one."""
    known = KNOWN_TFLOPS.get(gpu_name, measured)
    share = min(value / known[name] for name, value in measured.items())
    result = Result(", ".join(f"{name} {value:,.0f} TFLOP/s" for name, value in measured.items()))
    result.facts = {"measured": measured, "known": KNOWN_TFLOPS.get(gpu_name)}
    if share < LEAST_SHARE:
        fix = "nvidia-smi; nvidia-smi -q -d PERFORMANCE,POWER,CLOCK   # while the GPU is busy"
        result.warn(f"{share:.0%} of the rate of an {gpu_name}: its clocks are lowered, or others use it", fix)
    return result


def check_rates(setup: Setup) -> Result:
    import torch

    device = torch.device("cuda", 0)
    return judge_tflops(measure_tflops(device), torch.cuda.get_device_name(device))
