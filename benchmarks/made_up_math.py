"""A split with OpenMathInstruct-2's columns and any number of rows, made of the embedded problems: text to measure
with, not to train on.

A problem here is several embedded ones asked in a row, and its solution answers them in turn. How many is drawn from a
log-normal distribution, so that most rows are short and a few are very long. Every problem is answered several times.
The digits of each row are exchanged by a rule of its own, which makes texts differ and leaves their lengths alone; the
arithmetic is wrong then.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.utils.json_files import read_jsonl

SPLIT = "train_1M"
ANSWERS_PER_PROBLEM = 4
PARTS_MEDIAN, PARTS_SIGMA, MAX_PARTS = 4.0, 0.6, 100
ROWS_PER_FILE = 100_000
_DIGITS = "0123456789"
_ROTATIONS = [str.maketrans(_DIGITS, _DIGITS[by:] + _DIGITS[:by]) for by in range(10)]


def embedded_rows() -> list[dict[str, str]]:
    """The training rows of the embedded dataset, in order."""
    files = sorted((DATASET_DIR / "data").glob("train-*.jsonl"))
    return [row for file in files for row in read_jsonl(file)]


def write_split(folder: Path, num_rows: int, seed: int = 0) -> None:
    """Write `num_rows` rows as parquet files, laid out as on the hub. The same arguments give the same rows."""
    pieces = embedded_rows()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    num_files = -(-num_rows // ROWS_PER_FILE)
    for number in range(num_files):
        rows = range(number * ROWS_PER_FILE, min((number + 1) * ROWS_PER_FILE, num_rows))
        path = folder / "data" / f"{SPLIT}-{number:05d}-of-{num_files:05d}.parquet"
        pq.write_table(pa.Table.from_pylist([_row(index, pieces, seed) for index in rows]), path)


def _row(index: int, pieces: list[dict[str, str]], seed: int) -> dict[str, str]:
    number, answer = divmod(index, ANSWERS_PER_PROBLEM)
    draw = np.random.Generator(np.random.PCG64([seed, number]))
    num_parts = int(np.clip(np.rint(PARTS_MEDIAN * np.exp(PARTS_SIGMA * draw.standard_normal())), 1, MAX_PARTS))
    parts = [pieces[i] for i in draw.integers(len(pieces), size=num_parts)]
    asked, answered = _ROTATIONS[int(draw.integers(10))], _ROTATIONS[answer]
    return {
        "problem": "\n".join(part["problem"] for part in parts).translate(asked),
        "generated_solution": "\n\n".join(part["generated_solution"] for part in parts)
        .translate(asked)
        .translate(answered),
        "expected_answer": parts[-1]["expected_answer"],
        "problem_source": "made_up",
    }
