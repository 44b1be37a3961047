"""The keys of `fp8_config` in a file of `accelerate launch`: what each becomes, who takes it from there, and which do
nothing.

The launcher turns every key, also one that it does not know, into `ACCELERATE_FP8_<KEY>`, and exports its own defaults
for those that the file leaves out. Who reads the variable is another matter. Read in Accelerate 1.15 and Transformer
Engine 2.20, its own path for backend TE and these scripts' for TE and AO, and held against Accelerate's own code by
`tests/config/test_accelerate_fp8_keys.py`. `python -m llm_fp8.config.accelerate_fp8_keys docs/accelerate.md` writes the table
there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PREFIX = "ACCELERATE_FP8_"
TABLE_START, TABLE_END = "<!-- fp8_config keys -->\n", "<!-- end of fp8_config keys -->"


@dataclass(frozen=True)
class Fp8Key:
    """A key of `fp8_config`."""

    name: str
    default: str | None
    """What the launcher exports where the file does not name the key; None: nothing."""
    acts_in_accelerate: bool
    """Whether a value other than the default changes what Accelerate's own path computes with backend TE."""
    in_accelerate: str
    """What it does there."""
    acts_in_scripts: bool
    """Whether it changes what train_fp8.py and train_multi_gpu.py do with backend TE; refusing it is doing
    something.
    """
    in_scripts: str
    """What it does there."""
    acts_with_torchao: bool
    """Whether it changes what they do with backend AO."""
    with_torchao: str
    """What it does there."""
    parts: tuple[str, ...] = ()
    """Where one key becomes several variables: what they are called behind `ACCELERATE_FP8_`."""
    recipe_attribute: str | None = None
    """Where a recipe of Transformer Engine holds it."""
    te_only: bool = False
    """With backend AO an error unless it has the launcher's default; a switch that the launcher does not export must
    be off.
    """

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that it becomes."""
        return tuple(PREFIX + part for part in self.parts or (self.name.removeprefix("fp8_").upper(),))


_REFUSED = "an error unless it has the launcher's default"

KEYS = (
    Fp8Key(
        "backend",
        None,
        True,
        "`TE`, `AO` or `MSAMP`, in capitals: `te` is a ValueError, also from `--fp8_backend te`. Without it torchao "
        "comes first where it is installed",
        True,
        "in any case of letters; without it TE",
        True,
        "`--fp8_backend torchao`",
    ),
    Fp8Key(
        "fp8_format",
        "HYBRID",
        True,
        "the recipe's format; Transformer Engine refuses `E5M2`",
        True,
        "`--fp8_format`",
        True,
        _REFUSED,
        recipe_attribute="fp8_format",
        te_only=True,
    ),
    Fp8Key(
        "amax_history_len",
        "1024",
        True,
        "the recipe's history; an error with MXFP8 unless it is 1024",
        True,
        "`--amax_history_len`",
        True,
        _REFUSED,
        recipe_attribute="amax_history_len",
        te_only=True,
    ),
    Fp8Key(
        "amax_compute_algo",
        "most_recent",
        False,
        "always `max`: Accelerate passes on only what differs from its own default, `most_recent`, and Transformer "
        "Engine's default is `max`; `max` with MXFP8 is an error",
        True,
        "`--amax_compute_algo`, `most_recent` too",
        True,
        _REFUSED,
        recipe_attribute="amax_compute_algo",
        te_only=True,
    ),
    Fp8Key(
        "margin",
        "0",
        True,
        "the recipe's margin",
        True,
        "`--fp8_margin`",
        True,
        _REFUSED,
        recipe_attribute="margin",
        te_only=True,
    ),
    Fp8Key(
        "interval",
        "1",
        False,
        "handed to Transformer Engine, which no longer has it and ignores it",
        False,
        "Transformer Engine no longer has it",
        False,
        "it belongs to backend TE",
    ),
    Fp8Key(
        "override_linear_precision",
        "False",
        False,
        "handed to Transformer Engine, which no longer has it and ignores it",
        True,
        "an error unless all three are false",
        True,
        "an error unless all three are false",
        parts=("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD"),
        te_only=True,
    ),
    Fp8Key(
        "use_autocast_during_eval",
        "False",
        True,
        "whether evaluation runs in fp8",
        False,
        "evaluation runs in the precision of training in any case",
        False,
        "evaluation runs in the precision of training in any case",
    ),
    Fp8Key(
        "use_mxfp8_block_scaling",
        None,
        True,
        "MXFP8 instead of delayed scaling; the file only, the launcher has no such option",
        True,
        "`--fp8_scenario mxfp8`",
        True,
        "an error unless it is false",
        te_only=True,
    ),
    Fp8Key(
        "opt_level",
        "O2",
        False,
        "read by backend MSAMP alone",
        False,
        "it belongs to backend MSAMP",
        False,
        "it belongs to backend MSAMP",
    ),
    Fp8Key(
        "pad_inner_dim",
        "1",
        False,
        "read by backend AO alone",
        False,
        "it belongs to backend AO",
        False,
        "layers whose sizes would need padding stay in bf16 in any case",
    ),
    Fp8Key(
        "enable_fsdp_float8_all_gather",
        "1",
        False,
        "read by backend AO alone",
        False,
        "it belongs to backend AO",
        True,
        "`--fp8_all_gather`, where the sharding mode and the recipe can have it",
    ),
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

    Reads the variables of `accelerate launch`, so it comes before `launch_env` takes them out. Empty without fp8, and
    for a backend that is refused.
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
        acts, why = (
            (key.acts_in_scripts, key.in_scripts) if backend == "TE" else (key.acts_with_torchao, key.with_torchao)
        )
        if not acts:
            idle[key.name] = why
    return idle


def idle_sentences(environ: Mapping[str, str]) -> list[str]:
    """`idle_keys` as sentences."""
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


def table() -> str:
    """The keys as a Markdown table."""
    rows = [
        "| key | becomes | launcher's default | TE: acts in Accelerate's own path | TE: acts in our scripts | AO: "
        "acts in our scripts |",
        "|---|---|---|---|---|---|",
    ]
    for key in KEYS:
        variables = ", ".join(f"`{variable}`" for variable in key.variables)
        default = f"`{key.default}`" if key.default is not None else "not set"
        outcomes = (
            (key.acts_in_accelerate, key.in_accelerate),
            (key.acts_in_scripts, key.in_scripts),
            (key.acts_with_torchao, key.with_torchao),
        )
        cells = " | ".join(f"{'yes' if acts else 'no'}: {words}" for acts, words in outcomes)
        rows.append(f"| `{key.name}` | {variables} | {default} | {cells} |")
    rows.append(
        "| any other | `ACCELERATE_FP8_<KEY>` | not set | no: nobody reads it | no: a warning names it | no: a "
        "warning names it |"
    )
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """`text` with the table between its two marks."""
    before, _, rest = text.partition(TABLE_START)
    _, mark, after = rest.partition(TABLE_END)
    if not mark:
        raise ValueError(f"the text lacks {TABLE_START!r} and {TABLE_END!r}")
    return before + TABLE_START + table() + TABLE_END + after


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_table(document.read_text()))
