"""Which fp8 recipes this GPU has, in Transformer Engine's own words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_fp8.config import TORCHAO_SCENARIOS
from llm_fp8.verify.result import Result
from llm_fp8.verify.setup import Setup

if TYPE_CHECKING:
    import torch


def judge(available: dict[str, str | None], device: str, torchao: str | None = None) -> Result:
    """`available`: recipe of Transformer Engine -> why it cannot run here, None where it can. `torchao`: the same of all of torchao's."""
    facts = {"recipes": dict(available), "device": device, "torchao": torchao}
    usable = [name for name, reason in available.items() if reason is None]
    details = tuple(f"{name}: {reason}" for name, reason in available.items() if reason is not None)
    if not usable:
        mends = (
            "python -m pip install --no-build-isolation -r requirements-gpu.txt",
            "python train_fp8.py --mixed_precision bf16 ...   # where the GPU is older than Ada",
        )
        return Result("failed", f"{device} runs no fp8 recipe", details, mends, facts)
    missing = f"; not {', '.join(name for name in available if name not in usable)}" if details else ""
    said = f"--fp8_backend torchao: {', '.join(TORCHAO_SCENARIOS)}" if torchao is None else torchao
    return Result("passed", f"{', '.join(usable)}{missing}", (*details, said), facts=facts)


def availability(device: torch.device) -> dict[str, str | None]:
    """Recipe -> why it cannot run on this GPU, None where it can; asked as a run asks."""
    from llm_fp8.config import PrecisionConfig
    from llm_fp8.errors import UserError
    from llm_fp8.precision import TOKEN_MULTIPLE, resolve_precision

    found: dict[str, str | None] = {}
    for name in TOKEN_MULTIPLE:
        options = PrecisionConfig(mixed_precision="fp8", fp8_scenario=name)  # type: ignore[arg-type]
        try:
            found[name] = resolve_precision(options, device).fallback_reason
        except UserError as error:
            found[name] = str(error)
    return found


def torchao_unavailable(device: torch.device) -> str | None:
    """Why torchao's recipes cannot run on this GPU, None where they can."""
    from llm_fp8.config import PrecisionConfig
    from llm_fp8.errors import UserError
    from llm_fp8.precision import resolve_precision

    try:
        resolve_precision(PrecisionConfig(mixed_precision="fp8", fp8_backend="torchao"), device)
    except UserError as error:
        return str(error)
    return None


def check(setup: Setup) -> Result:
    """Ask for each."""
    from llm_fp8.precision import describe_device

    return judge(availability(setup.device), describe_device(setup.device), torchao_unavailable(setup.device))
