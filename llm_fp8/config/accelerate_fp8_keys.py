"""The keys of `fp8_config` in a configuration of `accelerate launch`, and which of them have no effect in our scripts.

The launcher exports every key, even an unknown one, as `ACCELERATE_FP8_<KEY>`, and its own defaults for those that the
file leaves out. Read in Accelerate 1.15 and Transformer Engine 2.20, and held against Accelerate's code by
`tests/config/test_accelerate_fp8_keys.py`. docs/accelerate.md says what each key does, in Accelerate's own path too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "ACCELERATE_FP8_"


@dataclass(frozen=True)
class Fp8Key:
    name: str
    default: str | None
    """What the launcher exports where the file does not name the key; None: nothing."""
    idle_with_te: str | None = None
    """Why the scripts do nothing with it under backend TE; None where they act on it or refuse it."""
    idle_with_torchao: str | None = None
    """The same under backend AO."""
    parts: tuple[str, ...] = ()
    """What its variables are called behind the prefix, where it becomes several."""
    recipe_attribute: str | None = None
    """Where a recipe of Transformer Engine holds it."""
    te_only: bool = False
    """With backend AO an error unless it has the launcher's default; a switch without a default must be off."""

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(PREFIX + part for part in self.parts or (self.name.removeprefix("fp8_").upper(),))


_OF_TE, _OF_AO, _OF_MSAMP = ("it belongs to backend " + name for name in ("TE", "AO", "MSAMP"))
_EVALUATION = "evaluation runs in the precision of training in any case"
_PADDING = "layers whose sizes would need padding stay in bf16 in any case"

KEYS = (
    Fp8Key("backend", None),
    Fp8Key("fp8_format", "HYBRID", recipe_attribute="fp8_format", te_only=True),
    Fp8Key("amax_history_len", "1024", recipe_attribute="amax_history_len", te_only=True),
    Fp8Key("amax_compute_algo", "most_recent", recipe_attribute="amax_compute_algo", te_only=True),
    Fp8Key("margin", "0", recipe_attribute="margin", te_only=True),
    Fp8Key("interval", "1", "Transformer Engine no longer has it", _OF_TE),
    Fp8Key(
        "override_linear_precision", "False", parts=("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD"), te_only=True
    ),
    Fp8Key("use_autocast_during_eval", "False", _EVALUATION, _EVALUATION),
    Fp8Key("use_mxfp8_block_scaling", None, te_only=True),
    Fp8Key("opt_level", "O2", _OF_MSAMP, _OF_MSAMP),
    Fp8Key("pad_inner_dim", "1", _OF_AO, _PADDING),
    Fp8Key("enable_fsdp_float8_all_gather", "1", _OF_AO),
)
"""Those that Accelerate's launcher or recipes know."""

_BY_VARIABLE = {variable: key for key in KEYS for variable in key.variables}


def launcher_default(variable: str) -> str:
    """What the launcher exports as `variable`, one that it always exports, where the file does not name its key."""
    default = _BY_VARIABLE[variable].default
    assert default is not None, variable
    return default


def te_only_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Key -> value of those that backend AO cannot honour, because they belong to backend TE alone
    (`Fp8Key.te_only`).
    """
    return {
        key.name: environ[variable]
        for variable, key in _BY_VARIABLE.items()
        if key.te_only and variable in environ and _plain(environ[variable]) != _plain(key.default or "False")
    }


def chosen_values(environ: Mapping[str, str]) -> dict[str, str]:
    """`ACCELERATE_FP8_*` -> value of those that are not the launcher's own defaults, which it exports where nobody
    asked for anything.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and not _is_default(_BY_VARIABLE.get(name), value)
    }


def _is_default(key: Fp8Key | None, value: str) -> bool:
    return key is not None and key.default is not None and _plain(value) == _plain(key.default)


def _plain(value: str) -> str:
    """The launcher writes its own true as 1 and the file's as True."""
    return {"true": "1"}.get(value.lower(), value.lower())


def idle_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Key of fp8_config -> why these scripts do nothing with it, for those that the launcher's file sets to other
    values than its defaults.

    To be called before `apply_launch_settings` removes the variables. Empty without fp8, and for a backend that is
    refused.
    """
    backend = environ.get(f"{PREFIX}BACKEND", "TE").upper()
    if environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() != "fp8" or backend not in ("TE", "AO"):
        return {}
    idle = {}
    for name in chosen_values(environ):
        key = _BY_VARIABLE.get(name)
        if key is None:
            idle[name.removeprefix(PREFIX).lower()] = "neither accelerate nor these scripts know it"
            continue
        why = key.idle_with_te if backend == "TE" else key.idle_with_torchao
        if why is not None:
            idle[key.name] = why
    return idle


def idle_sentences(environ: Mapping[str, str]) -> list[str]:
    return [f"fp8_config.{name} does nothing here: {why}." for name, why in idle_keys(environ).items()]


def backend_elsewhere(environ: Mapping[str, str]) -> str | None:
    """What Accelerate's own path does with the file's backend where these scripts take it for another, with what to
    write; None where they agree.
    """
    backend = environ.get(f"{PREFIX}BACKEND")
    if environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() != "fp8":
        return None
    if backend is None:
        return (
            "fp8_config.backend is left out: these scripts then take TE, and Accelerate's own path (a Trainer) "
            "torchao first, where it is installed; write backend: TE"
        )
    if backend != backend.upper() and backend.upper() in ("TE", "AO"):
        return (
            f"fp8_config.backend {backend} is in small letters: these scripts take it, and Accelerate's own path (a "
            f"Trainer) ends in a ValueError; write backend: {backend.upper()}"
        )
    return None
