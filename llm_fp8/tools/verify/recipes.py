"""Which fp8 recipes this GPU has, in Transformer Engine's own words."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_fp8.config.recipes import recipe_names
from llm_fp8.tools.verify.imports import reinstall
from llm_fp8.tools.verify.result import Result
from llm_fp8.tools.verify.setup import Setup

if TYPE_CHECKING:
    import torch


TRAIN_IN_BF16 = "python train_fp8.py --mixed_precision bf16 ...   # where the GPU is older than Ada"


def judge(available: dict[str, str | None], device: str, torchao: str | None = None) -> Result:
    """`available`: recipe of Transformer Engine -> why it cannot run here, None where it can. `torchao`: the same of
    all of torchao's.
    """
    facts = {"recipes": dict(available), "device": device, "torchao": torchao}
    names = usable(available)
    details = tuple(f"{name}: {reason}" for name, reason in available.items() if reason is not None)
    if not names:
        mends = ("python -m pip install --no-build-isolation -r requirements-gpu.txt", TRAIN_IN_BF16)
        return Result("failed", f"{device} runs no fp8 recipe", details, mends, facts)
    missing = f"; not {', '.join(name for name in available if name not in names)}" if details else ""
    said = f"--fp8_backend torchao: {', '.join(recipe_names('torchao'))}" if torchao is None else torchao
    return Result("passed", f"{', '.join(names)}{missing}", (*details, said), facts=facts)


def usable(available: dict[str, str | None]) -> list[str]:
    """The recipes that nothing keeps from running."""
    return [name for name, reason in available.items() if reason is None]


def availability(device: torch.device) -> dict[str, str | None]:
    """Recipe -> why it cannot run on this GPU, None where it can; asked as a run asks."""
    from llm_fp8.config.options import PrecisionConfig
    from llm_fp8.precision.plan import resolve_precision
    from llm_fp8.utils.errors import UserError

    found: dict[str, str | None] = {}
    for name in recipe_names("te"):
        options = PrecisionConfig(mixed_precision="fp8", fp8_scenario=name)
        try:
            found[name] = resolve_precision(options, device).fallback_reason
        except UserError as error:
            found[name] = str(error)
    return found


@dataclass(frozen=True)
class Lack:
    """What keeps a library's recipes from running, in a sentence, and the command that mends it."""

    reason: str
    mend: str


def torchao_lack(device: torch.device) -> Lack | None:
    """What torchao's recipes lack here, None where they can run: on a GPU by their kernels, on a CPU emulated. Asked
    as a run asks.
    """
    from llm_fp8.precision.plan import torchao_needs
    from llm_fp8.utils.errors import UserError

    for name, require in torchao_needs(device).items():
        try:
            require()
        except UserError as error:
            return Lack(str(error), torchao_fix(name))
    return None


def torchao_fix(need: str) -> str:
    """The command for one of `torchao_needs`."""
    return {
        "torchao": reinstall("torchao"),
        "fp8 GPU": TRAIN_IN_BF16,
        "Triton": f"{sys.executable} -m pip install triton",
        "C compiler": "apt-get install -y gcc",
    }[need]


def check(setup: Setup) -> Result:
    """Ask for each."""
    from llm_fp8.precision.plan import describe_device

    lack = torchao_lack(setup.device)
    return judge(availability(setup.device), describe_device(setup.device), lack.reason if lack else None)
