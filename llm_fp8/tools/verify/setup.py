"""What every check is told."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from llm_fp8.tools.verify.processes import Probe


class Background(Protocol):
    """Runs under way while the first checks run."""

    def wait(self) -> list[Any]:
        """Wait for their ends."""

    def kill(self) -> None:
        """End them at once."""


@dataclass
class Setup:
    """The user's shape, the environment as it was before the scripts set anything, and what several checks share."""

    model_name: str
    max_seq_length: int
    batch_size: int
    packing: bool
    output_dir: Path
    engines: tuple[str, ...]
    environ: dict[str, str]
    """The variables before any was set or removed."""
    config_files: tuple[Path, ...] = ()
    """Files of DeepSpeed or `accelerate launch` that the user means to train with."""
    scratch: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="verify-fp8-")))
    """For files of the checks; whoever made this object removes it."""
    probes: dict[str, Probe] = field(default_factory=dict)
    """Name of a check -> its process, started before the first check, because each takes as long as several."""
    engine_runs: Background | None = None
    """Started before the first check, too."""

    @property
    def row_form(self) -> str:
        """In a word."""
        return "packed" if self.packing else "padded"

    @functools.cached_property
    def num_gpus(self) -> int:
        """GPUs that torch can use."""
        try:
            import torch
        except (ImportError, OSError):  # for the check of the imports to say
            return 0
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @functools.cached_property
    def device(self) -> Any:
        """The GPU that the checks of one GPU use, or the CPU."""
        import torch

        return torch.device("cuda", 0) if self.num_gpus else torch.device("cpu")


def model_config(model_name: str) -> PretrainedConfig:
    """The Hugging Face config of a hub id, folder or bundled architecture, which needs no hub. Raises `UserError`."""
    from llm_fp8.config.options import ModelConfig
    from llm_fp8.models.source import load_config, resolve_source

    options = ModelConfig(model_name=model_name, random_init=True)
    return load_config(options, resolve_source(options))
