"""Versions of installed packages, and where this repository lies."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def package_version(name: str) -> str | None:
    """Version of an installed distribution, None where it is not installed; imports nothing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
