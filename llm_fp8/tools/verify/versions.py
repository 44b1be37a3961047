"""The check of packages: versions are compared with the pins of the requirements files, and packages are imported."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llm_fp8.tools.verify.result import Result, Setup
from llm_fp8.utils.packages import SHIPPED, package_version

REQUIREMENTS = ("requirements.txt", "requirements-deepspeed.txt")
GPU_REQUIREMENTS = "requirements-gpu.txt"
"""The versions of all GPU tests."""
OPTIONAL = ("flash-attn", "torchao", "peft", "deepspeed", "wandb", "wandb-workspaces", "nvidia-ml-py")
"""Packages that only an option, the dashboard or the energy figures need."""
TE = "transformer-engine"
TE_PARTS = (TE, f"{TE}-torch", f"{TE}-cu12", f"{TE}-cu13")
IMPORTED = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", TE, *OPTIONAL[:5])
"""Packages that are imported if installed; Transformer Engine only on a machine with a GPU."""
_PIP = f"{sys.executable} -m pip"


def pins_of(text: str) -> list[Requirement]:
    """The requirements in a file's text whose markers hold here, with normalised names."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pins = [Requirement(line) for line in lines if line and not line.startswith("-")]
    for pin in pins:
        pin.name = canonicalize_name(pin.name)
    return [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]


def read_pins(has_gpu: bool) -> list[Requirement]:
    """The pins for this machine; those for GPUs take the place of others."""
    files = (*REQUIREMENTS, GPU_REQUIREMENTS) if has_gpu else REQUIREMENTS
    return list({pin.name: pin for file in files for pin in pins_of((SHIPPED / file).read_text())}.values())


def judge(pins: list[Requirement], found: dict[str, str], errors: dict[str, str]) -> Result:
    """Fail for a missing or broken package that every run needs. Warn of another version, and of a broken package that
    only an option needs. `found`: package -> installed version. `errors`: package -> why it does not load.
    """
    result = Result()
    for pin in pins:
        version = found.get(pin.name)
        # Transformer Engine must build against the installed torch; other packages accept the flag.
        fix = f"{_PIP} install --no-build-isolation '{str(pin).partition(';')[0]}'"
        if version is None and pin.name not in OPTIONAL:
            result.fail(f"{pin.name} is not installed", fix)
        elif version is None:
            result.details.append(f"{pin.name} is not installed")
        elif not pin.specifier.contains(version, prereleases=True):
            result.warn(f"{pin.name} is {version}, and tests ran with {pin.specifier}", fix)
    for name, error in errors.items():
        report = result.warn if name in OPTIONAL else result.fail
        report(f"{name} does not load: {error}", f"{_PIP} uninstall -y {name}   # and install it again for this torch")
    return result


def check_packages(setup: Setup) -> Result:
    """Compare installed versions with the pins and import the packages."""
    from llm_fp8.utils.te_internals import require_te

    pins = read_pins(setup.num_gpus > 0)
    errors = {}
    names = (*(pin.name for pin in pins), *TE_PARTS, *IMPORTED)
    found = {name: version for name in names if (version := package_version(name)) is not None}
    to_import = [name for name in IMPORTED if name in found and (name != TE or setup.num_gpus)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name in to_import:
            try:
                # A run loads Transformer Engine with torch's cuDNN.
                require_te("fp8") if name == TE else importlib.import_module(name.replace("-", "_"))
            except Exception as error:  # a broken package may raise anything
                errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    result = judge(pins, found, errors)
    result.summary = ", ".join(f"{name} {found[name]}" for name in to_import if name not in errors)
    result.facts = found
    return result
