"""What `accelerate launch` asked for, read once from its environment variables and merged with our own flags.

`accelerate launch --config_file x.yaml train_fp8.py` turns the file's `mixed_precision` and `fp8_config` into variables. They
become the same settings as our flags here, and are then removed: with `ACCELERATE_FP8_BACKEND` left in place, Accelerate
itself would convert the model, in a bf16 run too. What train_fp8.py does not do (torch.compile,
several processes, FSDP, DeepSpeed) is refused. A flag that contradicts the file is an error, with one exception: the launcher sets
`ACCELERATE_MIXED_PRECISION=no` also when nobody asked for a precision, so `no` counts as nothing said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from llm_fp8.config import PrecisionConfig
from llm_fp8.errors import UserError

_PRECISION = "ACCELERATE_MIXED_PRECISION"
_FP8 = "ACCELERATE_FP8_"
_TRUE = ("1", "true", "yes", "on")


def require_single_process(environ: Mapping[str, str]) -> None:
    """Raise `UserError` where the launcher asks for more than the one process and device of train_fp8.py."""
    num_processes = int(environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        raise UserError(
            f"train_fp8.py trains in one process, and the launcher started {num_processes}; start it with python, or with --num_processes 1."
        )
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{name}", "false").lower() in _TRUE:
            raise UserError(
                f"accelerate's launch configuration asks for {name}, and train_fp8.py trains on one device; take it out of the configuration."
            )


def take_launch_settings(environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Remove Accelerate's precision variables from `environ` and return them as fields of `PrecisionConfig`.

    Empty where nothing was asked for. Raises `UserError` on a backend or value that cannot be honoured.
    """
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise UserError(
            f"accelerate's launch configuration asks for torch.compile (dynamo backend {environ['ACCELERATE_DYNAMO_BACKEND']}), which these "
            "scripts do not use; remove dynamo_config."
        )
    precision = environ.pop(_PRECISION, "no").lower()
    fp8 = {key.removeprefix(_FP8): environ.pop(key) for key in sorted(environ) if key.startswith(_FP8)}
    if precision == "no":
        return {}
    if precision != "fp8":
        return {"mixed_precision": precision}
    backend = fp8.get("BACKEND", "TE").upper()
    if backend != "TE":
        raise UserError(
            f"accelerate's fp8_config asks for backend {backend}, and these scripts train fp8 with backend TE; set 'backend: TE'."
        )
    if any(fp8.get(f"OVERRIDE_{gemm}", "false").lower() in _TRUE for gemm in ("FPROP", "DGRAD", "WGRAD")):
        raise UserError(
            "accelerate's fp8_config sets override_linear_precision, which Transformer Engine no longer has; set it to "
            "[false, false, false], or keep layers in bf16 with --fp8_first_bf16_layers and --fp8_last_bf16_layers."
        )
    settings: dict[str, Any] = {"mixed_precision": "fp8"}
    if fp8.get("USE_MXFP8_BLOCK_SCALING", "false").lower() in _TRUE:
        settings["fp8_scenario"] = "mxfp8"
    readers: dict[str, tuple[str, Callable[[str], Any]]] = {
        "FORMAT": ("fp8_format", str.upper),
        "AMAX_HISTORY_LEN": ("amax_history_len", int),
        "AMAX_COMPUTE_ALGO": ("amax_compute_algo", str.lower),
        "MARGIN": ("fp8_margin", int),
    }
    for key, (name, read) in readers.items():
        # With MXFP8 the launcher still exports its defaults for delayed scaling, which mean nothing there.
        if key in fp8 and not (settings.get("fp8_scenario") == "mxfp8" and name != "fp8_format"):
            settings[name] = read(fp8[key])
    return settings


def merge_launch_settings(flags: PrecisionConfig, launch: dict[str, Any]) -> PrecisionConfig:
    """`flags` completed by what the launcher asked for; raises `UserError` where the two differ."""
    unset = PrecisionConfig()
    for name, asked in launch.items():
        flag = getattr(flags, name)
        if flag != getattr(unset, name) and flag != asked:
            raise UserError(
                f"--{name} {flag} contradicts accelerate's launch configuration, which asks for {asked}; drop the flag or change the file."
            )
    return dataclasses.replace(flags, **launch)
