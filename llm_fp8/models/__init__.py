"""Load a model with weights from a name or a folder, and export it to a folder."""

from pathlib import Path

BUNDLED = {path.stem: path for path in sorted(Path(__file__).with_name("architectures").glob("*.json"))}
"""Last part of a hub id -> config of a well-known model, for --random_init and scripts/memory.py without a network."""
