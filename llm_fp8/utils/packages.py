"""Find installed packages, import optional ones, and name the folders of this repository."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from llm_fp8.utils.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]  # the folder of llm_fp8/, te_llama.py and the training scripts
SHIPPED = REPOSITORY / "llm_fp8" / "config" / "shipped"  # configs/ and requirements: links here, but files in a wheel
FOLDER = "" if (REPOSITORY / "requirements.txt").is_file() else f"{SHIPPED}/"  # of requirements files, in commands
BASE_REQUIREMENTS, GPU_REQUIREMENTS = f"{FOLDER}requirements.txt", f"{FOLDER}requirements-gpu.txt"
USED = (  # packages whose versions are recorded if they are installed
    "torch transformer-engine transformer-engine-torch accelerate deepspeed transformers datasets tokenizers "
    "huggingface-hub safetensors flash-attn peft torchao wandb"
).split()


def package_version(name: str) -> str | None:
    """Return the version of the distribution `name`, without importing it, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class OptionalPackage(NamedTuple):
    """A package that only some options need, and the command that installs it."""

    name: str
    module: str
    install: str

    def require(self, feature: str) -> ModuleType:
        """Import and return the module. If that fails, raise a `UserError` saying that `feature` (a flag) needs it."""
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(f"{feature} needs {self.name} ({error}); run: {self.install}") from error


TRANSFORMER_ENGINE = OptionalPackage(
    "Transformer Engine",
    "transformer_engine.pytorch",
    f"pip install -r {BASE_REQUIREMENTS} -c {GPU_REQUIREMENTS} && "
    f"pip install --no-build-isolation -r {GPU_REQUIREMENTS}",
)
