"""Configs of well-known models, one JSON file each, with which --random_init and scripts/memory.py need no hub."""

from pathlib import Path

ARCHITECTURES = Path(__file__).parent


def bundled_architectures() -> list[str]:
    """Model names (the last component of the hub id) whose config is bundled."""
    return sorted(path.stem for path in ARCHITECTURES.glob("*.json"))


def bundled_config(name: str) -> Path | None:
    """The file with the config of the model of this hub id; None where it is not bundled."""
    # The 8B model has had both names on the hub; a model tuned to instructions has the architecture of its base.
    path = ARCHITECTURES / f"{name.rpartition('/')[2].replace('Meta-Llama', 'Llama').removesuffix('-Instruct')}.json"
    return path if path.is_file() else None
