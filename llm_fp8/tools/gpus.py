"""GPUs by name, to settle and estimate runs for a GPU that this machine lacks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llm_fp8.utils.errors import UserError, did_you_mean
from llm_fp8.utils.ranks import LaunchRanks

if TYPE_CHECKING:
    from llm_fp8.settle.machine import Machine

MEMORY_GIB: dict[tuple[int, int], dict[str, float]] = {
    (8, 0): {"A100": 79.1},
    (8, 9): {
        "L4": 22.0, "L20": 44.4, "L40": 44.4, "L40S": 44.4, "RTX 6000 Ada": 47.4, "RTX 5000 Ada": 31.3,
        "RTX 4500 Ada": 23.5, "RTX 4000 Ada": 19.5, "RTX 2000 Ada": 15.5, "RTX 4090": 23.5, "RTX 4080": 15.6,
        "RTX 4080 Super": 15.6, "RTX 4070 Ti Super": 15.6, "RTX 4070 Ti": 11.6, "RTX 4070 Super": 11.6,
        "RTX 4070": 11.6, "RTX 4060 Ti": 15.5, "RTX 4060": 7.6,
    },
    (9, 0): {
        "H100": 79.2, "H100 NVL": 93.0, "H200": 139.8, "H200 NVL": 139.8, "H20": 95.0, "H800": 79.2, "GH200": 94.5,
    },
    (10, 0): {"B200": 178.3, "GB200": 184.3},
    (10, 3): {"B300": 267.6, "GB300": 276.5},
    (12, 0): {
        "RTX PRO 6000": 94.9, "RTX PRO 5000": 47.2, "RTX PRO 4500": 31.3, "RTX PRO 4000": 23.4, "RTX PRO 2000": 15.4,
        "RTX 5090": 31.3, "RTX 5080": 15.4, "RTX 5070 Ti": 15.4, "RTX 5070": 11.5, "RTX 5060 Ti": 15.4,
        "RTX 5060": 7.5, "RTX 5050": 7.5,
    },
    (12, 1): {"GB10": 119.6},
}  # fmt: skip
"""Compute capability (https://developer.nvidia.com/cuda-gpus) -> GPU -> memory in GiB of its largest common size, as
torch's `total_memory`: measured on H100 and H200, otherwise the lowest in users' public out-of-memory messages. Without
such a message (RTX 2000 to 5000 Ada, PRO 2000 to 5000, 4070, 5070, smaller ones) NVIDIA's size less 2 to 6%, as it is
for GPUs of this size and generation. A card with ECC off has up to 3 GiB more.
"""

NAMES = [name for names in MEMORY_GIB.values() for name in names]
_OTHER_WORDS = (  # of names in `torch.cuda.get_device_name`. The size in GH200's name is that of the host's memory.
    r"nvidia|geforce|rtx|tesla|pcie|hbm\de?|sxm\d?( ac)?|blackwell|generation|(server|(max-q )?workstation) edition"
    r"|(?<=gh200)[- ](120|480)gb|(?<=\w)[-_ ]+"
)


def named_machine(gpu: str, ranks: LaunchRanks) -> Machine:
    """Return a machine with the GPU `gpu` for each rank. `gpu` is a name, a name with a size, or a size in GiB."""
    from llm_fp8.settle.machine import assumed_machine

    known = {
        re.sub(_OTHER_WORDS, "", name.lower()): (gib, capability)
        for capability, names in MEMORY_GIB.items()
        for name, gib in names.items()
    }
    plain, size = re.sub(_OTHER_WORDS, "", gpu.lower()), r"([1-9]\d{0,2}(?:\.\d+)?)"
    if gib := re.fullmatch(rf"{size} ?(?:gi?b)?", gpu.lower()):
        return assumed_machine(ranks, f"a GPU of {gib[1]} GiB", float(gib[1]))
    match = re.fullmatch(rf"({'|'.join(known)})(?:{size}gi?b)?", plain)
    if match is None:
        advice = f"give the GPU's memory in GiB, as 80, or a known name: {', '.join(NAMES)}"
        raise UserError(f"--gpu {gpu}: {advice}{did_you_mean(gpu, NAMES)}.")
    name, stated_gib = match.groups()
    known_gib, capability = known[name]
    is_known = stated_gib is None or abs(float(stated_gib) - known_gib) < 4
    return assumed_machine(ranks, gpu, known_gib if is_known else float(stated_gib), capability)
