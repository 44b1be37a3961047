"""The held-out share, cut by problem, never by row; and held-out problems as text, for exact match.

OpenMathInstruct-2 answers each problem many times, so a random cut of rows would put a problem into training and into
evaluation. Here a 64-bit hash of the problem's normalised text alone decides: independent of the order of the rows, the
seed and the other rows, and applicable to a stream row by row.

Problems for exact match are those of the smallest hashes: the first N are among the first N + 1, and a problem with
many answers is asked once.
"""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from llm_fp8.data.prompt import COLUMNS
from llm_fp8.utils.errors import UserError


def normalise_problem(text: str) -> str:
    """The text without differences of case, white space and Unicode compatibility forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def problem_key(text: str) -> int:
    """64-bit hash of a problem as a signed integer (Arrow int64)."""
    digest = hashlib.blake2b(normalise_problem(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _bound(fraction: float) -> int:
    """The keys below this are the held-out `fraction` (0 <= fraction < 1) of all keys."""
    return int(fraction * 2**64) - 2**63


def is_held_out(key: int, fraction: float) -> bool:
    return key < _bound(fraction)


def held_out_mask(keys: npt.NDArray[np.int64], fraction: float) -> npt.NDArray[np.bool_]:
    """For each row's problem key, whether the row is held out.

    Where the share would hold no problem, the one with the smallest key is taken, as long as another is left.
    """
    if fraction == 0 or len(keys) == 0:
        return np.zeros(len(keys), dtype=bool)
    mask = keys < np.int64(_bound(fraction))
    if not mask.any() and keys.min() != keys.max():
        mask = keys == keys.min()
    return mask


# --- problems --------------------------------------------------------------------------------------------
# The held-out problems as text, for the model to answer: question and expected answer.
#
# Chosen by the hash of the problem (split.py), smallest first: a sample that depends neither on the order of the rows
# nor on the seed, and in which the first N problems are among the first N + 1. A problem that is there many times, as
# in OpenMathInstruct-2, is asked once.

ANSWER_COLUMN = "expected_answer"


@dataclass(frozen=True)
class Problem:
    """One held-out problem; `row_id` is the index of its first row in the split that it comes from."""

    row_id: int
    problem: str
    expected_answer: str


def check_answer_column(columns: list[str]) -> None:
    """Raise `UserError` unless a dataset with these columns has problems with expected answers."""
    needed = (*COLUMNS["problem_solution"], ANSWER_COLUMN)
    missing = [column for column in needed if column not in columns]
    if missing:
        raise UserError(
            f"--dataset_name: exact match (--eval_exact_match) needs the columns {', '.join(needed)}, and the dataset "
            f"lacks {', '.join(missing)} (it has: {', '.join(columns)}); add what is missing, or do without exact "
            "match."
        )


def choose_problems(
    dataset: Dataset, rows: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], wanted: int
) -> list[Problem]:
    """At most `wanted` distinct problems with an expected answer among `rows` of `dataset`, whose keys are `keys`
    (both int64 [n]).
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
