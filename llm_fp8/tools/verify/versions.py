"""Installed versions and where they lie, against the pins of the requirements files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup
from llm_fp8.utils.packages import FLASH_ATTENTION_4, REPOSITORY

REQUIREMENTS = ("requirements.txt", "requirements-gpu.txt", "requirements-deepspeed.txt")
OPTIONAL = {
    "flash-attn": "attention of the Hugging Face path",
    FLASH_ATTENTION_4.name: "--attn_implementation flash_attention_4",
    "torchao": "--fp8_backend torchao",
    "peft": "--lora_rank",
    "deepspeed": "--sharding_mode deepspeed_1 to 3",
    "wandb": "--use_wandb",
    "wandb-workspaces": "scripts/wandb_dashboard.py",
    "tensorboard": "--report_to tensorboard",
    "nvidia-ml-py": "energy figures",
}
"""What runs without; package -> what needs it."""
FLASH_ATTENTIONS = ("flash-attn", FLASH_ATTENTION_4.name)
"""In no file of requirements."""
TE = "transformer-engine"
TE_PARTS = (TE, f"{TE}-torch", f"{TE}-cu12", f"{TE}-cu13")
_BUILD = re.compile(r"\+.*")


@dataclass(frozen=True)
class Pin:
    """One line of a requirements file that holds for this Python."""

    requirement: Requirement
    file: str

    @property
    def name(self) -> str:
        """The package, in normal form."""
        return self.requirement.name.lower().replace("_", "-")


@dataclass(frozen=True)
class Installed:
    """A package as it is installed."""

    version: str
    location: str


def pins_of(text: str, file: str) -> list[Pin]:
    """The requirements of a file's text whose markers hold here."""
    found = []
    for line in text.splitlines():
        words = line.partition("#")[0].strip()
        if not words or words.startswith("-"):
            continue
        requirement = Requirement(words)
        if requirement.marker is None or requirement.marker.evaluate():
            found.append(Pin(requirement, file))
    return found


def read_pins() -> list[Pin]:
    """Those of all `REQUIREMENTS`."""
    return [pin for file in REQUIREMENTS for pin in pins_of((REPOSITORY / file).read_text(), file)]


def installed(names: Iterable[str]) -> dict[str, Installed]:
    """Those of the packages that are installed; imports none of them."""
    found = {}
    for name in names:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = Installed(distribution.version, str(distribution.locate_file("")))
    return found


def read_constraints(environ: Mapping[str, str]) -> list[Pin]:
    """Those of the file in PIP_CONSTRAINT, with which an image keeps its own torch; none where there is none or a
    line is not understood.
    """
    path = environ.get("PIP_CONSTRAINT", "")
    try:
        return pins_of(Path(path).read_text(), path) if path else []
    except (OSError, InvalidRequirement, UnicodeDecodeError):  # pip's to say
        return []


def judge(pins: list[Pin], found: dict[str, Installed], has_gpu: bool, constraints: Iterable[Pin] = ()) -> Result:
    """Missing packages fail, drift is a warning, what is optional is said. `constraints`: what pip would refuse to
    change, and why it is as it is.
    """
    problems, details = Problems(), []
    kept_by = {pin.name: pin for pin in constraints}
    for pin in pins:
        name, there = pin.name, found.get(pin.name)
        needed = name not in OPTIONAL and (has_gpu or name != TE)
        flags = "--no-build-isolation " if pin.file == "requirements-gpu.txt" else ""
        mend = (
            f"{sys.executable} -m pip install "
            f"{flags}'{pin.requirement.name}{_extras(pin.requirement)}{pin.requirement.specifier}'"
        )
        if there is None:
            if needed:
                problems.fail(f"{name} is not installed", mend)
            else:
                use = OPTIONAL.get(name, "fp8 on a GPU")
                details.append(f"{name} is not installed ({use})")
            continue
        details.append(f"{name} {there.version} in {there.location}")
        if not pin.requirement.specifier.contains(there.version, prereleases=True):
            sentence, kept = (
                f"{name} is {there.version}, {pin.file} pins {pin.requirement.specifier}",
                kept_by.get(name),
            )
            if kept is not None and kept.requirement.specifier.contains(there.version, prereleases=True):
                problems.warn(f"{sentence}; {kept.file} keeps it so")
            else:
                problems.warn(sentence, mend)
    te_parts = {name: there.version for name, there in found.items() if name.startswith(TE)}
    versions = {_BUILD.sub("", version) for version in te_parts.values()}
    if len(versions) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in te_parts.items())
        problems.fail(
            f"parts of Transformer Engine differ in version: {listed}",
            f"{sys.executable} -m pip uninstall -y {' '.join(te_parts)}",
            f"{sys.executable} -m pip install --no-build-isolation -r requirements-gpu.txt",
        )
    for name in FLASH_ATTENTIONS:
        if name in found:
            details.append(f"{name} {found[name].version} in {found[name].location}")
        else:
            details.append(f"{name} is not installed ({OPTIONAL[name]})")
    facts = {name: {"version": there.version, "location": there.location} for name, there in found.items()}
    drifted = len(problems.warnings)
    all_right = "as pinned" if not drifted and not problems.failures else ""
    return problems.result(all_right, details, facts)


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def check(setup: Setup) -> Result:
    """Versions of everything that is pinned, and of all parts of Transformer Engine."""
    pins = read_pins()
    found = installed([*(pin.name for pin in pins), *TE_PARTS, *FLASH_ATTENTIONS])
    return judge(pins, found, setup.num_gpus > 0, read_constraints(setup.environ))
