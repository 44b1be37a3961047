"""The GPUs that torch can use, and if none, why."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from llm_fp8.observability.provenance import gpu_names
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup
from llm_fp8.utils.subprocesses import output_of


@dataclass(frozen=True)
class GpuFacts:
    """What torch and the driver say."""

    driver_gpus: tuple[str, ...] | None
    """Names that nvidia-smi lists; None where it is missing or fails."""
    driver: str | None
    torch: str
    torch_cuda: str | None
    """CUDA version that torch was built for; None for a build for CPUs."""
    names: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]
    memory_gib: tuple[float, ...]
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES."""
    has_device_file: bool
    """Whether /dev/nvidia0 is there."""
    error: str | None
    """What CUDA said when torch started it."""


def gather(setup: Setup) -> GpuFacts:
    """Ask both."""
    import torch

    listed = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", timeout_s=60)
    lines = [line.rpartition(", ") for line in listed.splitlines() if ", " in line] if listed else []
    count, error = setup.num_gpus, None
    if not count and torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except Exception as raised:
            error = str(raised).splitlines()[0]
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
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


def _of_the_commonest_kind(facts: GpuFacts) -> list[str]:
    """The GPUs of the name that most have, as CUDA_VISIBLE_DEVICES takes them."""
    kind = max(facts.names, key=facts.names.count)
    known = gpu_names(len(facts.names), facts.visible_devices)
    return [number for number, name in zip(known, facts.names, strict=True) if name == kind]


def judge(facts: GpuFacts) -> Result:
    """No GPU at all is nothing wrong; one that torch cannot use is."""
    problems = Problems()
    record = asdict(facts)
    if facts.names:
        if len(set(facts.names)) > 1:
            problems.warn(
                f"the GPUs differ ({', '.join(sorted(set(facts.names)))}), and a run on all goes at the slowest one's "
                "pace",
                f"export CUDA_VISIBLE_DEVICES={','.join(_of_the_commonest_kind(facts))}",
            )
        major, minor = facts.capabilities[0]
        summary = (
            f"{len(facts.names)} x {facts.names[0]}, compute capability {major}.{minor}, {facts.memory_gib[0]:g} GiB, "
            f"driver {facts.driver or 'unknown'}, CUDA {facts.torch_cuda}"
        )
        return problems.result(summary, facts=record)
    if facts.driver_gpus is None and facts.has_device_file:
        problems.fail(
            "/dev/nvidia0 is there and nvidia-smi fails, so the driver does not answer (often after its update, until "
            "the next start)",
            "sudo dmesg | grep -i nvrm | tail   # what the driver says; then: sudo reboot",
        )
        return problems.result("", facts=record)
    if not facts.driver_gpus:
        return Result("skipped", "no NVIDIA GPU: nvidia-smi lists none, torch finds none", facts=record)
    lists = f"the driver lists {len(facts.driver_gpus)} x {facts.driver_gpus[0]}, but torch can use none"
    if facts.visible_devices is not None:
        problems.fail(f"{lists}: CUDA_VISIBLE_DEVICES is '{facts.visible_devices}'", "unset CUDA_VISIBLE_DEVICES")
    elif facts.torch_cuda is None:
        version = facts.torch.partition("+")[0]
        problems.fail(
            f"{lists}: torch {facts.torch} is a build for CPUs",
            f"{sys.executable} -m pip install --force-reinstall torch=={version}",
        )
    else:
        problems.fail(
            f"{lists}: {facts.error or 'CUDA does not start'} (driver {facts.driver}, torch built for CUDA "
            f"{facts.torch_cuda})",
            "nvidia-smi   # 'CUDA Version' is the newest that this driver knows; install a newer driver, or a torch "
            "for that one:",
            f"{sys.executable} -m pip install --force-reinstall torch --index-url "
            "https://download.pytorch.org/whl/cu126",
        )
    return problems.result("", facts=record)


def check(setup: Setup) -> Result:
    """GPUs, driver, CUDA."""
    return judge(gather(setup))
