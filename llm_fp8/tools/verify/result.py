"""The input of every check (`Setup`) and its answer (`Result`)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from llm_fp8.tools.verify.processes import Started

Status = Literal["failed", "warning", "skipped", "info", "passed"]
"""skipped: could not be checked here. info: nothing right or wrong about it."""
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Result:
    """One answer. Raises ValueError for a failure without a fix."""

    status: Status
    summary: str
    """One sentence."""
    details: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    """Commands for a shell in the repository."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The evidence, as plain JSON values."""

    def __post_init__(self) -> None:
        if self.status == "failed" and not self.fixes:
            raise ValueError(f"a failed check must say what fixes it: {self.summary}")


class Problems:
    """Collects failures and warnings while evidence is judged, and makes the `Result` of them."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.warnings: list[str] = []
        self._fixes: list[str] = []

    def fail(self, sentence: str, *fixes: str) -> None:
        self.failures.append(sentence)
        self._fixes += fixes

    def warn(self, sentence: str, *fixes: str) -> None:
        self.warnings.append(sentence)
        self._fixes += fixes

    def result(self, success: str, details: Iterable[str] = (), facts: Mapping[str, Any] | None = None) -> Result:
        """The summary is the first problem, or `success` without problems; all else becomes details."""
        status: Status = "failed" if self.failures else "warning" if self.warnings else "passed"
        summary, *others = [*self.failures, *self.warnings, *([success] if success else [])] or [""]
        return Result(status, summary, (*others, *details), tuple(dict.fromkeys(self._fixes)), dict(facts or {}))


def first_line(error: BaseException) -> str:
    """Of an exception's message, for a summary."""
    return (str(error).strip().splitlines() or [""])[0]


@dataclass
class Setup:
    """The user's shape, the environment at the start, and what several checks share."""

    model_name: str
    max_seq_length: int
    batch_size: int
    packing: bool
    output_dir: Path
    engines: tuple[str, ...]
    environ: dict[str, str]
    """As it was before the script set or removed any variable."""
    scratch: Path
    """An empty folder for files of the checks."""
    config_files: tuple[Path, ...] = ()
    """Files of DeepSpeed or `accelerate launch` that the user means to train with."""
    processes: dict[str, Started] = field(default_factory=dict)
    """The processes that checks wait for; those that take longest start before the first check. All end with the
    script.
    """

    @functools.cached_property
    def num_gpus(self) -> int:
        """GPUs that torch can use; 0 where torch does not load, which the check `imports` reports."""
        try:
            import torch
        except (ImportError, OSError):
            return 0
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @functools.cached_property
    def device(self) -> Any:
        """The first GPU, or the CPU."""
        import torch

        return torch.device("cuda", 0) if self.num_gpus else torch.device("cpu")


def model_config(model_name: str) -> PretrainedConfig:
    """The Hugging Face config of a hub id, folder or bundled architecture, which needs no hub. Raises `UserError`."""
    from llm_fp8.config.options import ModelConfig
    from llm_fp8.models.source import load_config, resolve_source

    options = ModelConfig(model_name=model_name, random_init=True)
    return load_config(options, resolve_source(options))
