"""What the GPU multiplies and copies, against what is recorded of GPUs of its name."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path

from llm_fp8.observability.nvml import NoNvml, open_nvml
from llm_fp8.tools.gemm_rates import KnownRates, MeasuredRates, shares
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup

LEAST_SHARE = 0.85

_LABELS = {
    "bf16_gemm_tflops": ("bf16", "TFLOP/s"),
    "fp8_gemm_tflops": ("fp8 fast", "TFLOP/s"),
    "fp8_split_gemm_tflops": ("fp8 split", "TFLOP/s"),
    "copy_tb_s": ("copy", "TB/s"),
}

THROTTLE_REASONS = {
    0x2: "application clocks are set below the maximum",
    0x4: "the power cap is reached",
    0x8: "the hardware slows it down (heat, power brake)",
    0x10: "it waits for the clocks of its sync group",
    0x20: "it is too hot (software limit)",
    0x40: "it is too hot (hardware limit)",
    0x80: "the power brake is on",
    0x100: "clocks are held for a display",
}
"""Bits of NVML's clocks event reasons; 0x1 is idling."""


def throttle_reasons(bits: int) -> list[str]:
    """The reasons in NVML's bit mask."""
    return [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]


def judge(
    measured: MeasuredRates, known: KnownRates | None, gpu_name: str, throttling: list[str], others: list[str]
) -> Result:
    """Below 85% of what is recorded is a warning. Without a record the figures are said, and nothing is judged."""
    problems = Problems()
    figures = ", ".join(
        f"{_LABELS[name][0]} {value:,.{0 if value >= 100 else 2}f} {_LABELS[name][1]}"
        for name, value in asdict(measured).items()
        if value is not None
    )
    found = {} if known is None else shares(measured, known.ceilings)
    facts = {"measured": asdict(measured), "shares": found, "throttling": throttling, "other_processes": others}
    if known is None:
        return Result(
            "info",
            f"{figures}; no figures of other {gpu_name} are recorded to hold them against",
            tuple(others),
            facts=facts,
        )
    facts["known"] = {**asdict(known.ceilings), "source": known.source}
    slow = {name: share for name, share in found.items() if share < LEAST_SHARE}
    listed = ", ".join(f"{_LABELS[name][0]} {share:.0%}" for name, share in found.items())
    if slow:
        mends = ["nvidia-smi -q -d PERFORMANCE,POWER,CLOCK   # run it while the GPU is busy"]
        if others:
            mends.insert(
                0,
                "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv   # end what should not be "
                "there",
            )
        if any("application clocks" in reason for reason in throttling):
            mends.insert(0, "sudo nvidia-smi --reset-applications-clocks")
        problems.warn(f"this GPU gives {listed} of what an {gpu_name} gave ({known.source})", *mends)
    summary = figures if slow else f"{figures}: {listed} of what is recorded ({known.source})"
    return problems.result(summary, [*throttling, *others], facts)


def state_under_load(setup: Setup) -> tuple[list[str], list[str]]:
    """Why the GPU runs below its clocks while it multiplies, and who else uses it; where NVML does not say, that."""
    import torch

    try:
        pynvml, handle = open_nvml(setup.device)
    except NoNvml as error:
        return [], [f"why is not known: {error}"]
    left = torch.randn(8192, 8192, device=setup.device, dtype=torch.bfloat16)
    result = torch.empty_like(left)
    try:
        for _ in range(400):  # queued without waiting: half a second's work or more, of which the middle is looked at
            torch.mm(left, left, out=result)
        time.sleep(0.2)
        reasons = throttle_reasons(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        return [], [f"why is not known: NVML: {error}"]
    finally:
        torch.cuda.synchronize(setup.device)
    return reasons, [
        described(process.pid, process.usedGpuMemory) for process in processes if process.pid != os.getpid()
    ]


def described(pid: int, num_bytes: int | None) -> str:
    """A process on the GPU; NVML does not know its memory inside some containers, and its name is another user's
    secret on some machines.
    """
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        name = "name unknown"
    return f"process {pid} ({name}) holds {'memory' if num_bytes is None else f'{num_bytes / 2**20:,.0f} MiB'}"


def check(setup: Setup) -> Result:
    """Measure; where it is slow, ask why."""
    import torch

    from llm_fp8.tools.gemm_rates import known_rates, measure_rates

    name = torch.cuda.get_device_name(setup.device)
    known = known_rates(name)
    measured = measure_rates(setup.device)
    torch.cuda.empty_cache()
    slow = known is not None and min(shares(measured, known.ceilings).values(), default=1.0) < LEAST_SHARE
    throttling, others = state_under_load(setup) if slow else ([], [])
    return judge(measured, known, name, throttling, others)
