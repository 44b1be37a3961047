"""The held-out share: cut by problem, never by row.

OpenMathInstruct-2 answers each problem many times over, so a random cut of rows would put a problem into training and into
evaluation at once. Here a problem's normalised text is hashed to 64 bits, and the hash alone decides: it does not depend on
the order of the rows, the seed, or which other rows there are, and a stream can apply it to one row at a time.
"""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np
import numpy.typing as npt


def normalise_problem(text: str) -> str:
    """The text without differences of case, of white space and of Unicode compatibility forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def problem_key(text: str) -> int:
    """64-bit hash of a problem as a signed integer, which an Arrow int64 column holds."""
    digest = hashlib.blake2b(normalise_problem(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _bound(fraction: float) -> int:
    """The keys below this are the held-out `fraction` (at least 0, below 1) of all keys."""
    return int(fraction * 2**64) - 2**63


def is_held_out(key: int, fraction: float) -> bool:
    """Whether the problem with this key belongs to the held-out `fraction` of all problems."""
    return key < _bound(fraction)


def held_out_mask(keys: npt.NDArray[np.int64], fraction: float) -> npt.NDArray[np.bool_]:
    """For each row's problem key, whether the row is held out.

    A dataset too small for the share to hold a problem gives up the one with the smallest key, as long as another is left.
    """
    if fraction == 0 or len(keys) == 0:
        return np.zeros(len(keys), dtype=bool)
    mask = keys < np.int64(_bound(fraction))
    if not mask.any() and keys.min() != keys.max():
        mask = keys == keys.min()
    return mask
