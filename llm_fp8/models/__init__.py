"""Load a model with weights from a name or a folder, and export it to a folder."""

from pathlib import Path

BUNDLED = {path.stem: path for path in sorted(Path(__file__).with_name("architectures").glob("*.json"))}
"""Configs of well-known models by the end of their hub id; --random_init and scripts/memory.py use them offline."""
