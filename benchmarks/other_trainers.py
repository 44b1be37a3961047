"""What the benchmarks of other trainers share: a variant, where its packages lie, and how its process is started."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_fp8.utils.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Variant:
    """One training and how its precision is asked for."""

    name: str
    package: str
    """Name of the distribution whose training this is."""
    how: str
    """The settings that make it, in the trainer's own words."""
    asked: str
    """What the user believes to run: fp8 or bf16."""
    launch: tuple[str, ...] | None = None
    """Options of `accelerate launch`; None: started with python."""
    options: dict[str, Any] = field(default_factory=dict)
    """For the training of its package."""


def add_packages_option(parser: argparse.ArgumentParser) -> None:
    """Add --packages, which `sites_of` reads."""
    parser.add_argument("--packages", action="append", default=[], metavar="NAME=FOLDER", help="see above")


def sites_of(packages: Iterable[str]) -> dict[str, str]:
    """Package -> the folder that holds it and what it needs. Raises `UserError` where one is not of that form."""
    if unnamed := [given for given in packages if "=" not in given]:
        raise UserError(f"--packages {unnamed[0]} is not of the form NAME=FOLDER; write trl=/tmp/site/trl.")
    return dict(given.split("=", 1) for given in packages)


def versions_of(package: str, site: str | None) -> dict[str, str]:
    """Name -> version of what lies in the package's own folder."""
    if site is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return {package: importlib.metadata.version(package)}
        return {}
    found = importlib.metadata.distributions(path=[site])
    return {distribution.metadata["Name"]: distribution.version for distribution in found}


def drop_launcher_variables() -> None:
    """Remove what `accelerate launch` left in the environment: it would change the variants."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def started_by(launch: tuple[str, ...] | None, program: list[str]) -> list[str]:
    """The command of a program with its options, by `Variant.launch`."""
    launcher = [] if launch is None else ["-m", "accelerate.commands.launch", *launch]
    return [sys.executable, *launcher, *program]


def variables_of(site: str | None, num_gpus: int = 1) -> dict[str, str]:
    """Environment variables of a variant's processes: its package and this project on the path, no hub, so many
    GPUs.
    """
    paths = [*([site] if site else []), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # With more GPUs to see a Trainer would take nn.DataParallel.
        "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:num_gpus]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
