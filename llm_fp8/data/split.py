"""The held-out share, by problem and never by row: OpenMathInstruct-2 answers each problem many times.

A 64-bit hash of the problem's normalised text decides, whatever the order of the rows and the seed, also in a stream.
"""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt

DEFAULT_FRACTION, DEFAULT_ROWS = 0.01, 100
"""Defaults of the held-out share, and of its fewest rows: the eval loss of fewer says little."""


def problem_key(text: str) -> int:
    """Hash a problem to a signed 64-bit integer (Arrow int64), whatever its case, white space and Unicode forms."""
    normalised = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    digest = hashlib.blake2b(normalised.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def is_held_out(key: int | npt.NDArray[np.int64], fraction: float) -> Any:
    """Return True, for each key, if its problem is held out: the smallest `fraction` (in [0, 1)) of all keys are."""
    return key < np.int64(int(fraction * 2**64) - 2**63)


def held_out_mask(keys: npt.NDArray[np.int64], fraction: float | None) -> npt.NDArray[np.bool_]:
    """Return True for each row that is held out, by its problem's key. If the share holds no problem, hold out the one
    with the smallest key, unless it is the only one.

    If `fraction` is None, hold out the problems of smallest keys that make up `DEFAULT_FRACTION` of the rows, but at
    least `DEFAULT_ROWS` rows, or a tenth of them if that is less. A problem with more rows than that is skipped.
    """
    if fraction == 0 or len(keys) == 0:
        return np.zeros(len(keys), dtype=bool)
    if fraction is None:
        wanted = max(DEFAULT_FRACTION * len(keys), min(DEFAULT_ROWS, len(keys) / 10))
        problems, counts = np.unique(keys, return_counts=True)
        few = counts <= max(counts.min(), wanted)
        enough = int(np.searchsorted(np.cumsum(counts[few]), wanted)) + 1
        return np.isin(keys, problems[few][: min(enough, len(problems) - 1)])
    mask: npt.NDArray[np.bool_] = is_held_out(keys, fraction)
    return mask if mask.any() or keys.min() == keys.max() else keys == keys.min()
