"""From a name or a folder to a model with weights, and back to a folder."""

from pathlib import Path

BUNDLED = {path.stem: path for path in sorted(Path(__file__).with_name("architectures").glob("*.json"))}
"""Configs of well-known models, by the end of the hub id: --random_init and scripts/memory.py need no hub for them."""
