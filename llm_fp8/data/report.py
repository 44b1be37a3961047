"""What became of the rows of a dataset: nothing is left out uncounted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llm_fp8.data.tokenise import Outcome


@dataclass
class DataReport:
    """Counts over the training split; with streaming over what this process has read so far, pass after pass.

    rows read = used + held out + overlong dropped + empty. Truncated rows are among the used or the held out ones.
    """

    num_rows_read: int = 0
    num_rows_used: int = 0
    """Rows trained on."""
    num_rows_held_out: int = 0
    """Rows of the training split kept for evaluation."""
    num_overlong_dropped: int = 0
    num_overlong_truncated: int = 0
    num_empty: int = 0
    """Rows without a solution, or without a supervised token."""
    num_tokens: int = 0
    """Tokens of the rows trained on."""
    num_supervised_tokens: int = 0
    """Those of them that are predicted."""
    num_rows_of_batches: int = 0
    """Sequences of max_seq_length tokens into which they were packed, or padded."""
    max_seq_length: int = 0
    num_eval_rows: int = 0
    """Rows evaluated on, whichever split they came from."""
    num_eval_rows_seen_in_training: int = 0
    """Rows left out of a validation split because their problem is trained on."""

    @property
    def padding_efficiency(self) -> float | None:
        """Tokens / (num_rows_of_batches * max_seq_length): the filled share of the positions."""
        positions = self.num_rows_of_batches * self.max_seq_length
        return self.num_tokens / positions if positions else None

    def count_unused(self, outcomes: Sequence[int] | npt.NDArray[np.int64]) -> None:
        counts = np.bincount(np.asarray(outcomes, dtype=np.int64), minlength=len(Outcome)).tolist()
        self.num_rows_read += len(outcomes)
        self.num_overlong_truncated += counts[Outcome.TRUNCATED]
        self.num_overlong_dropped += counts[Outcome.OVERLONG]
        self.num_empty += counts[Outcome.EMPTY]

    def summary(self) -> str:
        return (
            f"{self.num_rows_read} rows read, {self.num_rows_used} used, {self.num_rows_held_out} held out, "
            f"{self.num_overlong_dropped} dropped as longer than {self.max_seq_length} tokens, "
            f"{self.num_overlong_truncated} truncated to that, {self.num_empty} empty"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "padding_efficiency": self.padding_efficiency}
