"""The packages: installed versions against the pins of the requirements files, and whether each can be imported.

Importing it needs packaging alone, for scripts/container_requirements.py.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llm_fp8.tools.verify.result import Result, Setup
from llm_fp8.utils.packages import SHIPPED, package_version

REQUIREMENTS = ("requirements.txt", "requirements-gpu.txt", "requirements-deepspeed.txt")
OPTIONAL = ("flash-attn", "torchao", "peft", "deepspeed", "wandb", "wandb-workspaces", "nvidia-ml-py")
"""Packages that only an option, the dashboard or energy figures need."""
TE = "transformer-engine"
TE_PARTS = (TE, f"{TE}-torch", f"{TE}-cu12", f"{TE}-cu13")
IMPORTED = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", TE, *OPTIONAL[:5])
"""Packages that are imported where they are installed; Transformer Engine only where there is a GPU."""
_PIP = f"{sys.executable} -m pip"


def pins_of(text: str) -> list[Requirement]:
    """The requirements of a file's text whose markers hold here, with names in normal form."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pins = [Requirement(line) for line in lines if line and not line.startswith("-")]
    for pin in pins:
        pin.name = canonicalize_name(pin.name)
    return [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]


def read_pins() -> list[Requirement]:
    """The pins of all `REQUIREMENTS`."""
    return [pin for file in REQUIREMENTS for pin in pins_of((SHIPPED / file).read_text())]


def installed(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of the packages that are installed; imports none of them."""
    return {name: version for name in names if (version := package_version(name)) is not None}


def judge(pins: list[Requirement], found: dict[str, str], errors: dict[str, str], has_gpu: bool) -> Result:
    """A missing or broken package that every run needs fails; another version, or a broken package that only an option
    needs, is a warning. `found`: what is installed. `errors`: package -> why it does not load.
    """
    result = Result()
    for pin in pins:
        there = found.get(pin.name)
        # Transformer Engine builds against the torch that is installed; other packages do not mind.
        fix = f"{_PIP} install --no-build-isolation '{str(pin).partition(';')[0]}'"
        if there is None and pin.name not in OPTIONAL and (has_gpu or pin.name != TE):
            result.fail(f"{pin.name} is not installed", fix)
        elif there is None:
            result.details.append(f"{pin.name} is not installed")
        elif not pin.specifier.contains(there, prereleases=True):
            result.warn(f"{pin.name} is {there}, and not {pin.specifier}", fix)
    for name, error in errors.items():
        report = result.warn if name in OPTIONAL else result.fail
        report(f"{name} does not load: {error}", f"{_PIP} uninstall -y {name}   # and install it again for this torch")
    return result


def check_packages(setup: Setup) -> Result:
    """Compare versions with the pins; import what a run needs and what is installed of the rest."""
    from llm_fp8.utils.te_import import require_te

    pins, errors = read_pins(), {}
    found = installed([*(pin.name for pin in pins), *TE_PARTS, *IMPORTED])
    to_import = [name for name in IMPORTED if name in found and (name != TE or setup.num_gpus)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name in to_import:
            try:
                # Transformer Engine as a run loads it, with torch's cuDNN.
                require_te("fp8") if name == TE else importlib.import_module(name.replace("-", "_"))
            except Exception as error:  # a broken package may raise anything
                errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    is_container = bool(setup.environ.get("PIP_CONSTRAINT"))  # which keeps the versions that it has
    pinned = [pin for pin in pins if not (is_container and pin.name in found)]
    result = judge(pinned, found, errors, setup.num_gpus > 0)
    result.summary = ", ".join(f"{name} {found[name]}" for name in to_import if name not in errors)
    result.facts = dict(found)
    return result
