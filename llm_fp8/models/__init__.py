"""From a name or a folder to a model with weights, and back to a folder."""

from pathlib import Path

ARCHITECTURES = Path(__file__).parent / "architectures"
"""Configs of well-known models, one JSON file each, with which --random_init and scripts/memory.py need no hub."""


def bundled_architectures() -> list[str]:
    """Model names (the last component of the hub id) whose config is bundled."""
    return sorted(path.stem for path in ARCHITECTURES.glob("*.json"))
