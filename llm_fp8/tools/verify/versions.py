"""The packages: installed versions against the pins of the requirements files, and whether each can be imported.

At import it needs packaging and the standard library only: scripts/container_requirements.py reads the pins with it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement

from llm_fp8.tools.verify.result import Problems, Result, Setup, first_line
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import BASE_REQUIREMENTS, GPU_REQUIREMENTS, SHIPPED

REQUIREMENTS = ("requirements.txt", "requirements-gpu.txt", "requirements-deepspeed.txt")
OPTIONAL = {
    "flash-attn": "--attn_implementation flash_attention_2",
    "torchao": "--fp8_backend torchao",
    "peft": "--lora_rank",
    "deepspeed": "--sharding_mode deepspeed_1 to 3",
    "wandb": "--use_wandb",
    "wandb-workspaces": "scripts/wandb_dashboard.py",
    "nvidia-ml-py": "energy figures",
}
"""Package that a run can do without -> what needs it."""
UNPINNED = ("flash-attn",)
"""In no requirements file."""
TE = "transformer-engine"
TE_PARTS = (TE, f"{TE}-torch", f"{TE}-cu12", f"{TE}-cu13")
_TE_MODULE = "transformer_engine.pytorch"
_REQUIRED_MODULES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
_OPTIONAL_MODULES = {
    "deepspeed": "deepspeed",
    "torchao": "torchao",
    "wandb": "wandb",
    "flash_attn": "flash-attn",
}
"""Module -> its package."""
_PIP = f"{sys.executable} -m pip"


@dataclass(frozen=True)
class Pin:
    """One line of a requirements file that holds for this Python."""

    requirement: Requirement
    file: str

    @property
    def name(self) -> str:
        """The package, in normal form."""
        return self.requirement.name.lower().replace("_", "-")

    def allows(self, version: str) -> bool:
        return self.requirement.specifier.contains(version, prereleases=True)


class Installed(NamedTuple):
    version: str
    location: str


def pins_of(text: str, file: str) -> list[Pin]:
    """The requirements of a file's text whose markers hold here."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return [Pin(each, file) for each in found if each.marker is None or each.marker.evaluate()]


def read_pins() -> list[Pin]:
    """Those of all `REQUIREMENTS`."""
    return [pin for file in REQUIREMENTS for pin in pins_of((SHIPPED / file).read_text(), file)]


def installed(names: Iterable[str]) -> dict[str, Installed]:
    """Those of the packages that are installed; imports none of them."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            found[name] = Installed(distribution.version, str(distribution.locate_file("")))
    return found


def read_constraints(environ: Mapping[str, str]) -> list[Pin]:
    """Those of the file in PIP_CONSTRAINT, with which a container image keeps its own torch; none where the file is
    missing or invalid, which pip reports.
    """
    path = environ.get("PIP_CONSTRAINT", "")
    try:
        return pins_of(Path(path).read_text(), path) if path else []
    except (OSError, InvalidRequirement, UnicodeDecodeError):
        return []


def judge_versions(
    pins: list[Pin], found: dict[str, Installed], has_gpu: bool, constraints: Iterable[Pin] = ()
) -> Result:
    """Missing packages fail, other versions are a warning. `constraints`: versions that pip would refuse to change."""
    problems, details = Problems(), []
    kept_by = {pin.name: pin for pin in constraints}
    for pin in pins:
        name, there = pin.name, found.get(pin.name)
        flags = "--no-build-isolation " if pin.file == "requirements-gpu.txt" else ""
        fix = f"{_PIP} install {flags}'{str(pin.requirement).partition(';')[0]}'"
        if there is None:
            if name in OPTIONAL or (name == TE and not has_gpu):
                details.append(f"{name} is not installed ({OPTIONAL.get(name, 'fp8 on a GPU')})")
            else:
                problems.fail(f"{name} is not installed", fix)
            continue
        details.append(f"{name} {there.version} in {there.location}")
        if not pin.allows(there.version):
            sentence = f"{name} is {there.version}, {pin.file} pins {pin.requirement.specifier}"
            kept = kept_by.get(name)
            if kept is not None and kept.allows(there.version):
                problems.warn(f"{sentence}; {kept.file} keeps it so")
            else:
                problems.warn(sentence, fix)
    te_parts = {name: there.version for name, there in found.items() if name.startswith(TE)}
    if len({version.partition("+")[0] for version in te_parts.values()}) > 1:
        problems.fail(
            "parts of Transformer Engine differ in version: "
            + ", ".join(f"{name} {version}" for name, version in te_parts.items()),
            f"{_PIP} uninstall -y {' '.join(te_parts)}",
            f"{_PIP} install --no-build-isolation -r {GPU_REQUIREMENTS}",
        )
    facts = {name: there._asdict() for name, there in found.items()}
    return problems.result("" if problems.failures or problems.warnings else "as pinned", details, facts)


def check_versions(setup: Setup) -> Result:
    pins = [*read_pins(), *(Pin(Requirement(name), "") for name in UNPINNED)]
    found = installed([*(pin.name for pin in pins), *TE_PARTS])
    return judge_versions(pins, found, setup.num_gpus > 0, read_constraints(setup.environ))


# --- imports -------------------------------------------------------------------------------------------------


def try_import(name: str) -> str | None:
    """The first line of the error of importing a module, None where it loads."""
    from llm_fp8.utils.te_import import require_te

    try:
        if name == _TE_MODULE:
            require_te("fp8")  # as a run loads it, with torch's cuDNN
        else:
            importlib.import_module(name)
    except UserError as error:
        return str(error)
    except Exception as error:  # a broken package may raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def reinstall(name: str) -> str:
    """The command that installs a package as it is pinned, missing or broken, without its dependencies."""
    pinned = [f"{pin.requirement.name}{pin.requirement.specifier}" for pin in read_pins() if pin.name == name]
    return f"{_PIP} install --force-reinstall --no-deps '{(pinned or [name])[0]}'"


def judge_imports(outcomes: dict[str, str | None], printed: str = "") -> Result:
    """A package that every run needs and that does not load fails; one that only an option needs is a warning.

    `printed`: what the packages printed meanwhile.
    """
    problems = Problems()
    fixes = {
        _TE_MODULE: f"{_PIP} install --no-build-isolation --force-reinstall --no-deps -r {GPU_REQUIREMENTS}",
        "flash_attn": f"{_PIP} uninstall -y flash-attn   # or install it again for this torch",
    }
    for name, error in outcomes.items():
        sentence = f"{name} does not load: {error}"
        if error is not None and name in _OPTIONAL_MODULES:
            problems.warn(f"{sentence} ({OPTIONAL[_OPTIONAL_MODULES[name]]})", fixes.get(name) or reinstall(name))
        elif error is not None:
            problems.fail(sentence, fixes.get(name, f"{_PIP} install --force-reinstall -r {BASE_REQUIREMENTS}"))
    loaded = [name for name, error in outcomes.items() if error is None]
    facts = {"outcomes": outcomes, "said": printed}
    return problems.result(f"loaded: {', '.join(loaded)}" if loaded else "", facts=facts)


def check_imports(setup: Setup) -> Result:
    """Import what a run needs, what options need where it is installed, and Transformer Engine where there is a GPU."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        there = installed(_OPTIONAL_MODULES.values())
        optional = [name for name, package in _OPTIONAL_MODULES.items() if package in there]
        te = [_TE_MODULE] if setup.num_gpus else []
        outcomes = {name: try_import(name) for name in (*_REQUIRED_MODULES, *te, *optional)}
    return judge_imports(outcomes, printed.getvalue())
