"""The held-out problems as text, for the model to answer: question and expected answer.

Chosen by the hash of the problem (split.py), smallest first: a sample that depends neither on the order of the rows nor on the seed, and in
which the first N problems are among the first N + 1. A problem that is there many times, as in OpenMathInstruct-2, is asked once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from llm_fp8.data.prompt import COLUMNS
from llm_fp8.errors import UserError

ANSWER_COLUMN = "expected_answer"


@dataclass(frozen=True)
class Problem:
    """One held-out problem; `row_id` is the index of its first row in the split that it comes from."""

    row_id: int
    problem: str
    expected_answer: str


def check_answer_column(columns: list[str]) -> None:
    """Raise `UserError` unless a dataset with these columns asks questions and says what the answers are."""
    needed = (*COLUMNS["problem_solution"], ANSWER_COLUMN)
    missing = [column for column in needed if column not in columns]
    if missing:
        raise UserError(
            f"--dataset_name: exact match (--eval_exact_match) needs the columns {', '.join(needed)}, and the dataset lacks {', '.join(missing)} "
            f"(it has: {', '.join(columns)}); add what is missing, or do without exact match."
        )


def choose_problems(dataset: Dataset, rows: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], wanted: int) -> list[Problem]:
    """At most `wanted` different problems among `rows` of `dataset`, `keys` being the problem keys of these rows (both int64 [n]).

    Problems without an expected answer are passed over.
    """
    order = np.lexsort((rows, keys))
    _, first = np.unique(keys[order], return_index=True)
    texts = dataset.select_columns(["problem", ANSWER_COLUMN])
    chosen: list[Problem] = []
    for row_id in rows[order[first]].tolist():
        if len(chosen) == wanted:
            break
        row = texts[row_id]
        answer = "" if row[ANSWER_COLUMN] is None else str(row[ANSWER_COLUMN]).strip()
        if answer:
            chosen.append(Problem(row_id, str(row["problem"]), answer))
    return chosen
