"""The held-out rule and the packing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from llm_fp8.data.collate import pack
from llm_fp8.data.prepare import held_out_mask, is_held_out
from llm_fp8.data.tokenise import problem_key


def test_spelling_does_not_make_another_problem() -> None:
    assert problem_key("What is  2 + 2?\n") == problem_key("what is 2 + 2?")
    assert problem_key("x² = 4") == problem_key("X2 = 4")
    assert problem_key("What is 2 + 2?") != problem_key("What is 2 + 3?")
    assert problem_key(" A\tb ") == problem_key("a b")


def test_keys_are_fixed_for_good() -> None:
    # A checkpoint's held-out problems must stay held out in the next version.
    assert problem_key("What is 2 + 2?") == 7901968567399691251


def test_the_share_is_about_the_fraction_and_grows_with_it() -> None:
    keys = np.array([problem_key(f"problem {i}") for i in range(20_000)])
    small, large = held_out_mask(keys, 0.01), held_out_mask(keys, 0.1)
    assert 0.008 < small.mean() < 0.012 and 0.09 < large.mean() < 0.11
    assert not (small & ~large).any()
    assert small.tolist() == [is_held_out(key, 0.01) for key in keys.tolist()]
    assert not held_out_mask(keys, 0.0).any()


def test_the_default_share_is_enough_to_evaluate_on() -> None:
    def held_out(num_problems: int, each: int = 1) -> npt.NDArray[np.bool_]:
        keys = np.array([problem_key(f"problem {i}") for i in range(num_problems)] * each)
        mask = held_out_mask(keys, None)
        assert not set(keys[mask]) & set(keys[~mask])
        assert mask.sum() == 0 or keys[mask].max() < keys[~mask].min()
        return mask

    assert held_out(1000).sum() == 100 and held_out(250).sum() == 25 and held_out(5).sum() == 1
    assert held_out(50_000).sum() == 500
    assert 100 <= held_out(700, each=3).sum() < 103
    assert held_out(1).sum() == 0 and held_out(2).sum() == 1


@pytest.mark.parametrize("seed", range(5))
def test_every_document_is_packed_once_and_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(50, 200))
    lengths = rng.integers(1, capacity // 3, size=400)
    plan = pack(lengths, capacity)
    np.testing.assert_array_equal(np.sort(plan.samples), np.arange(len(lengths)))
    sums = np.add.reduceat(lengths[plan.samples], plan.offsets[:-1])
    assert sums.max() <= capacity and (np.diff(plan.offsets) > 0).all()
    assert len(plan) == -(-lengths.sum() // capacity), "best fit fills every sequence but the last"


def test_packing_is_deterministic_and_knows_edge_cases() -> None:
    lengths = np.random.default_rng(1).integers(1, 64, size=5000)
    first, second = pack(lengths, 64), pack(list(lengths), 64)
    np.testing.assert_array_equal(first.samples, second.samples)
    np.testing.assert_array_equal(first.offsets, second.offsets)
    assert len(pack([], 8)) == 0
    assert [pack([8, 8], 8)[i].tolist() for i in range(2)] == [[0], [1]]
