"""What the certificates of an arm's runs say, in one word. A certificate is the proof from recorded kernels that a run computed as asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["certified", "undetermined", "failed", "missing"]


@dataclass(frozen=True)
class CertificateState:
    """Of all runs of an arm: the worst verdict among them; 'missing' is worse than 'certified' and better than the others."""

    state: State
    reasons: list[str]
    """Why it is not 'certified', of the runs that have this state."""


_SEVERITY: tuple[State, ...] = ("certified", "missing", "undetermined", "failed")


def certificate_state(certificates: Sequence[dict[str, Any] | None]) -> CertificateState:
    """The state of an arm from the certificates of its runs (`llm_fp8.certificate`), None for a run that has none."""
    states: list[tuple[State, list[Any]]] = [
        (_state(certificate), (certificate or {}).get("reasons") or []) for certificate in certificates
    ]
    worst: State = max((state for state, _ in states), key=_SEVERITY.index, default="missing")
    reasons = {str(reason): None for state, given in states if state == worst for reason in given}
    return CertificateState(worst, list(reasons))


def _state(certificate: dict[str, Any] | None) -> State:
    verdict = certificate.get("verdict") if certificate else None
    # A verdict of a word that is not known here proves nothing.
    return "missing" if verdict is None else verdict if verdict in _SEVERITY else "undetermined"
