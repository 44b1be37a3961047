"""The GPUs: whether torch can use them, which fp8 recipes they run, and the rates of their GEMMs and copies."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm_fp8.config.recipes import recipe_names
from llm_fp8.tools.verify.result import Problems, Result, Setup, first_line
from llm_fp8.tools.verify.versions import reinstall
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import GPU_REQUIREMENTS
from llm_fp8.utils.subprocesses import output_of

if TYPE_CHECKING:
    import torch

    from llm_fp8.tools.gemm_rates import KnownRates, MeasuredRates

TRAIN_IN_BF16 = "python train_fp8.py --mixed_precision bf16 ...   # where the GPU is older than Ada"


@dataclass(frozen=True)
class GpuFacts:
    """What torch and the driver report. Its fields are keys of the JSON file."""

    driver_gpus: tuple[str, ...] | None
    """Names that nvidia-smi lists; None where it is missing or fails."""
    driver: str | None
    torch: str
    torch_cuda: str | None
    """CUDA version that torch was built for; None for a CPU build."""
    names: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]
    memory_gib: tuple[float, ...]
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES."""
    has_device_file: bool
    """Whether /dev/nvidia0 exists."""
    error: str | None
    """CUDA's error when torch initialised it."""


def gather(setup: Setup) -> GpuFacts:
    import torch

    listed = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", timeout_s=60)
    lines = [line.rpartition(", ") for line in listed.splitlines() if ", " in line] if listed else []
    error = None
    if not setup.num_gpus and torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except Exception as raised:
            error = first_line(raised)
    properties = [torch.cuda.get_device_properties(index) for index in range(setup.num_gpus)]
    return GpuFacts(
        driver_gpus=None if listed is None else tuple(name for name, _, _ in lines),
        driver=lines[0][2] if lines else None,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        names=tuple(each.name for each in properties),
        capabilities=tuple((each.major, each.minor) for each in properties),
        memory_gib=tuple(round(each.total_memory / 2**30, 1) for each in properties),
        visible_devices=setup.environ.get("CUDA_VISIBLE_DEVICES"),
        has_device_file=Path("/dev/nvidia0").exists(),
        error=error,
    )


def judge_gpu(facts: GpuFacts) -> Result:
    """A machine without a GPU is skipped; a GPU that torch cannot use fails."""
    if not facts.names:
        return _judge_unusable(facts)
    problems, names = Problems(), facts.names
    if len(set(names)) > 1:
        from llm_fp8.observability.provenance import gpu_names

        commonest = max(names, key=names.count)
        numbers = gpu_names(len(names), facts.visible_devices)
        problems.warn(
            f"the GPUs differ ({', '.join(sorted(set(names)))}), and a run on all is as fast as the slowest",
            "export CUDA_VISIBLE_DEVICES="
            + ",".join(number for number, name in zip(numbers, names, strict=True) if name == commonest),
        )
    major, minor = facts.capabilities[0]
    summary = (
        f"{len(names)} x {names[0]}, compute capability {major}.{minor}, {facts.memory_gib[0]:g} GiB, "
        f"driver {facts.driver or 'unknown'}, CUDA {facts.torch_cuda}"
    )
    return problems.result(summary, facts=asdict(facts))


def _judge_unusable(facts: GpuFacts) -> Result:
    install_torch = f"{sys.executable} -m pip install --force-reinstall torch"
    fixes: tuple[str, ...]
    if facts.driver_gpus is None and facts.has_device_file:
        why = "/dev/nvidia0 exists, but the driver does not answer nvidia-smi (often after its update, until a reboot)"
        fixes = ("sudo dmesg | grep -i nvrm | tail   # the driver's messages; then: sudo reboot",)
        return Result("failed", why, fixes=fixes, facts=asdict(facts))
    if not facts.driver_gpus:
        return Result("skipped", "no NVIDIA GPU: nvidia-smi lists none, torch finds none", facts=asdict(facts))
    if facts.visible_devices is not None:
        why, fixes = f"CUDA_VISIBLE_DEVICES is '{facts.visible_devices}'", ("unset CUDA_VISIBLE_DEVICES",)
    elif facts.torch_cuda is None:
        why, fixes = f"torch {facts.torch} is a CPU build", (f"{install_torch}=={facts.torch.partition('+')[0]}",)
    else:
        error = facts.error or "CUDA cannot be initialised"
        why = f"{error} (driver {facts.driver}, torch built for CUDA {facts.torch_cuda})"
        fixes = (
            "nvidia-smi   # 'CUDA Version' is the newest for this driver; install a newer driver, or a torch for it:",
            f"{install_torch} --index-url https://download.pytorch.org/whl/cu126",
        )
    summary = f"the driver lists {len(facts.driver_gpus)} x {facts.driver_gpus[0]}, but torch can use none: {why}"
    return Result("failed", summary, fixes=fixes, facts=asdict(facts))


def check_gpu(setup: Setup) -> Result:
    return judge_gpu(gather(setup))


# --- recipes -------------------------------------------------------------------------------------------------


def judge_recipes(available: Mapping[str, str | None], device: str, torchao: str | None = None) -> Result:
    """`available`: Transformer Engine's recipe -> why it cannot run here, None where it can. `torchao`: the same for
    all of torchao's.
    """
    facts = {"recipes": dict(available), "device": device, "torchao": torchao}
    missing = {name: reason for name, reason in available.items() if reason is not None}
    details = tuple(f"{name}: {reason}" for name, reason in missing.items())
    if len(missing) == len(available):
        fixes = (f"python -m pip install --no-build-isolation -r {GPU_REQUIREMENTS}", TRAIN_IN_BF16)
        return Result("failed", f"{device} runs no fp8 recipe", details, fixes, facts)
    summary = ", ".join(name for name in available if name not in missing)
    if missing:
        summary += f"; not {', '.join(missing)}"
    of_torchao = torchao or f"--fp8_backend torchao: {', '.join(recipe_names('torchao'))}"
    return Result("passed", summary, (*details, of_torchao), facts=facts)


def availability(device: torch.device) -> dict[str, str | None]:
    """Recipe -> why it cannot run on this GPU, None where it can; determined as in a run."""
    from llm_fp8.config.options import PrecisionConfig
    from llm_fp8.precision.plan import resolve_precision

    found: dict[str, str | None] = {}
    for name in recipe_names("te"):
        options = PrecisionConfig(mixed_precision="fp8", fp8_scenario=name)
        try:
            found[name] = resolve_precision(options, device).fallback_reason
        except UserError as error:
            found[name] = str(error)
    return found


def torchao_problem(device: torch.device) -> tuple[str, str] | None:
    """Why torchao's recipes cannot run here (on a CPU: emulated), as a run says it, and the command that fixes it;
    None where they can.
    """
    from llm_fp8.precision.plan import torchao_needs

    for name, require in torchao_needs(device).items():
        try:
            require()
        except UserError as error:
            return str(error), torchao_fix(name)
    return None


def torchao_fix(need: str) -> str:
    return {
        "torchao": reinstall("torchao"),
        "fp8 GPU": TRAIN_IN_BF16,
        "Triton": f"{sys.executable} -m pip install triton",
        "C compiler": "apt-get install -y gcc",
    }[need]


def check_recipes(setup: Setup) -> Result:
    from llm_fp8.precision.plan import describe_device

    reason, _ = torchao_problem(setup.device) or (None, None)
    return judge_recipes(availability(setup.device), describe_device(setup.device), reason)


# --- rates ---------------------------------------------------------------------------------------------------

LEAST_SHARE = 0.85

_LABELS = {
    "bf16_gemm_tflops": "bf16",
    "fp8_gemm_tflops": "fp8 fast",
    "fp8_split_gemm_tflops": "fp8 split",
    "copy_tb_s": "copy",
}

_APPLICATION_CLOCKS = "application clocks are set below the maximum"
THROTTLE_REASONS = {
    0x2: _APPLICATION_CLOCKS,
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
    return [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]


def judge_rates(
    measured: MeasuredRates, known: KnownRates | None, gpu_name: str, throttling: list[str], others: list[str]
) -> Result:
    """A rate below 85% of the recorded one is a warning. Without a record nothing is judged.

    `throttling`, `others`: of `state_under_load`, which is asked for slow GPUs alone.
    """
    from llm_fp8.tools.gemm_rates import shares

    figures = ", ".join(
        f"{_LABELS[name]} {value:,.{0 if value >= 100 else 2}f} {'TB/s' if name == 'copy_tb_s' else 'TFLOP/s'}"
        for name, value in asdict(measured).items()
        if value is not None
    )
    found = {} if known is None else shares(measured, known.ceilings)
    facts = {"measured": asdict(measured), "shares": found, "throttling": throttling, "other_processes": others}
    if known is None:
        summary = f"{figures}; no rates of another {gpu_name} are recorded for comparison"
        return Result("info", summary, facts=facts)
    facts["known"] = {**asdict(known.ceilings), "source": known.source}
    listed = ", ".join(f"{_LABELS[name]} {share:.0%}" for name, share in found.items())
    if min(found.values(), default=1.0) >= LEAST_SHARE:
        return Result("passed", f"{figures}: {listed} of the recorded rates ({known.source})", facts=facts)
    fixes = ["nvidia-smi -q -d PERFORMANCE,POWER,CLOCK   # run it while the GPU is busy"]
    if others:
        query = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
        fixes.insert(0, f"{query}   # end what should not be there")
    if _APPLICATION_CLOCKS in throttling:
        fixes.insert(0, "sudo nvidia-smi --reset-applications-clocks")
    summary = f"this GPU reaches {listed} of the rates recorded of an {gpu_name} ({known.source})"
    return Result("warning", summary, (figures, *throttling, *others), tuple(fixes), facts)


def state_under_load(device: torch.device) -> tuple[list[str], list[str]]:
    """Why the GPU runs below its clocks during GEMMs, and which other processes use it; ([], [error]) without NVML."""
    import torch

    from llm_fp8.observability.nvml import NoNvml, open_nvml

    try:
        pynvml, handle = open_nvml(device)
    except NoNvml as error:
        return [], [f"why is not known: {error}"]
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    result = torch.empty_like(left)
    try:
        for _ in range(400):  # queued: half a second of work or more, so that 0.2 s later the GPU is busy
            torch.mm(left, left, out=result)
        time.sleep(0.2)
        reasons = throttle_reasons(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        return [], [f"why is not known: NVML: {error}"]
    finally:
        torch.cuda.synchronize(device)
    return reasons, [described(each.pid, each.usedGpuMemory) for each in processes if each.pid != os.getpid()]


def described(pid: int, num_bytes: int | None) -> str:
    """A process on the GPU. Inside some containers NVML does not know its memory, nor /proc its name."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        name = "name unknown"
    return f"process {pid} ({name}) holds {'memory' if num_bytes is None else f'{num_bytes / 2**20:,.0f} MiB'}"


def check_rates(setup: Setup) -> Result:
    import torch

    from llm_fp8.tools.gemm_rates import known_rates, measure_rates, shares

    name = torch.cuda.get_device_name(setup.device)
    known = known_rates(name)
    measured = measure_rates(setup.device)
    torch.cuda.empty_cache()
    slow = known is not None and min(shares(measured, known.ceilings).values(), default=1.0) < LEAST_SHARE
    return judge_rates(measured, known, name, *(state_under_load(setup.device) if slow else ([], [])))
