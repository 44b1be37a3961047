"""GPUs by name, to settle and estimate runs for a GPU that this machine lacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from llm_fp8.utils.errors import UserError, did_you_mean
from llm_fp8.utils.ranks import LaunchRanks

if TYPE_CHECKING:
    from llm_fp8.settle.machine import Machine

GPUS: dict[str, tuple[float, tuple[int, int]]] = {
    name: (gib, (int(capability.split(".")[0]), int(capability.split(".")[1])))
    for capability, names in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
    for name, gib in names.items()
}
"""Name -> memory in GiB and compute capability."""

_OTHER_WORDS = (  # of names in `torch.cuda.get_device_name`. The size in GH200's name is that of the host's memory.
    r"nvidia|geforce|rtx|tesla|pcie|hbm\de?|sxm\d?( ac)?|blackwell|generation|(server|(max-q )?workstation) edition"
    r"|(?<=gh200)[- ](120|480)gb|(?<=\w)[-_ ]+"
)


def named_machine(gpu: str, ranks: LaunchRanks) -> Machine:
    """Return a machine with the GPU `gpu` for each rank. `gpu` is a name, a name with a size, or a size in GiB."""
    from llm_fp8.settle.machine import assumed_machine

    known = {re.sub(_OTHER_WORDS, "", name.lower()): properties for name, properties in GPUS.items()}
    plain, size = re.sub(_OTHER_WORDS, "", gpu.lower()), r"([1-9]\d{0,2}(?:\.\d+)?)"
    if gib := re.fullmatch(rf"{size} ?(?:gi?b)?", gpu.lower()):
        return assumed_machine(ranks, f"a GPU of {gib[1]} GiB", float(gib[1]))
    match = re.fullmatch(rf"({'|'.join(known)})(?:{size}gi?b)?", plain)
    if match is None:
        advice = f"give the GPU's memory in GiB, as 80, or a known name: {', '.join(GPUS)}"
        raise UserError(f"--gpu {gpu}: {advice}{did_you_mean(gpu, GPUS)}.")
    name, stated_gib = match.groups()
    known_gib, capability = known[name]
    is_known = stated_gib is None or abs(float(stated_gib) - known_gib) < 4
    return assumed_machine(ranks, gpu, known_gib if is_known else float(stated_gib), capability)
