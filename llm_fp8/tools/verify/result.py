"""A check (`Check`), its input (`Setup`) and its result (`Result`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass
class Result:
    """The result of one check; `fail` and `warn` add findings."""

    summary: str = ""
    details: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # the evidence, as plain JSON values
    skipped: bool = False
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    fixes: list[str] = field(default_factory=list)  # commands for a shell in the repository
    name: str = ""
    wall_s: float = 0.0

    def fail(self, sentence: str, fix: str) -> None:
        self.failures.append(sentence)
        self.fixes.append(fix)

    def warn(self, sentence: str, fix: str) -> None:
        self.warnings.append(sentence)
        self.fixes.append(fix)

    @property
    def status(self) -> str:
        ok = "skipped" if self.skipped else "passed"
        return "failed" if self.failures else "warning" if self.warnings else ok


@dataclass
class Setup:
    """The input of all checks: the user's shape and the environment at the start."""

    model_name: str
    max_seq_length: int
    batch_size: int
    environ: dict[str, str]  # the environment before the program removed any variable
    scratch: Path  # an empty folder for files of the checks

    @functools.cached_property
    def num_gpus(self) -> int:
        """The number of GPUs that torch can use; 0 if torch does not load, which `check_packages` reports."""
        try:
            import torch
        except (ImportError, OSError):
            return 0
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Check(NamedTuple):
    """A row of the table of checks; --quick runs it if `quick`."""

    name: str
    function: Callable[[Setup], Result]
    needs_gpus: int = 0
    quick: bool = True
