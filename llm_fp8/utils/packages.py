"""Versions of installed packages, and where this repository lies."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class OptionalPackage:
    """A package that is in no file of requirements and works in one version only."""

    name: str
    version: str
    install: str
    """The command."""


FLASH_ATTENTION_4 = OptionalPackage(
    "flash-attn-4",
    "4.0.0b11",  # whose gradients were compared: others have other kernels
    "pip install 'flash-attn-4[cu13]==4.0.0b11' nvidia-cutlass-dsl==4.4.2 quack-kernels==0.4.1",
)
"""For --attn_implementation flash_attention_4 (`llm_fp8.kernels.flash_attention`); the command is for CUDA 13."""


def package_version(name: str) -> str | None:
    """Version of an installed distribution, None where it is not installed; imports nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
