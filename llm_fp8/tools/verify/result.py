"""What a check answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Status = Literal["failed", "warning", "skipped", "info", "passed"]
"""skipped: could not be looked at here. info: nothing right or wrong about it."""
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Result:
    """One answer. Raises ValueError for a failure that does not say what mends it."""

    status: Status
    summary: str
    """One sentence."""
    details: tuple[str, ...] = ()
    mends: tuple[str, ...] = ()
    """Commands that mend it, for a shell in the repository."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The evidence, as plain JSON values."""

    def __post_init__(self) -> None:
        if self.status == "failed" and not self.mends:
            raise ValueError(f"a failed check must say what mends it: {self.summary}")


@dataclass
class Problems:
    """Collects what is wrong while evidence is judged, and makes the `Result` of it."""

    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    mends: list[str] = field(default_factory=list)

    def fail(self, sentence: str, *mends: str) -> None:
        """Something that must be mended, and how."""
        self.failures.append(sentence)
        self._mend(mends)

    def warn(self, sentence: str, *mends: str) -> None:
        """Something the user should know."""
        self.warnings.append(sentence)
        self._mend(mends)

    def _mend(self, mends: Iterable[str]) -> None:
        self.mends += [mend for mend in mends if mend not in self.mends]

    def result(self, all_right: str, details: Iterable[str] = (), facts: Mapping[str, Any] | None = None) -> Result:
        """`all_right` is the summary where nothing was wrong; otherwise that is the first problem."""
        found = [*self.failures, *self.warnings]
        status: Status = "failed" if self.failures else "warning" if self.warnings else "passed"
        return Result(
            status,
            found[0] if found else all_right,
            (*found[1:], *([all_right] if found and all_right else []), *details),
            tuple(self.mends),
            dict(facts or {}),
        )
