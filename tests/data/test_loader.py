"""The loaders: global batches and their split by rank and micro-batch, order, resuming, and the loading thread."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from llm_fp8.data.collate import Batch, Layout, PackingPlan, pack
from llm_fp8.data.loader import DataRank, EvalLoader, Sequences, TrainLoader, epochs
from llm_fp8.data.tokenise import Document
from tests.support.batches import assert_same_steps, next_steps

NUM_DOCUMENTS = 45
LENGTHS = np.random.default_rng(3).integers(2, 33, size=NUM_DOCUMENTS)
ONE_PER_SEQUENCE = PackingPlan(np.arange(NUM_DOCUMENTS), np.arange(NUM_DOCUMENTS + 1))


def _read(indices: Any) -> list[Document]:
    return [Document(np.arange(LENGTHS[i]) + i, np.arange(LENGTHS[i]) > 0, int(i)) for i in indices]


def _sequences(packed: bool = False) -> Sequences:
    plan = pack(LENGTHS, 32) if packed else ONE_PER_SEQUENCE
    return Sequences(0, f"packed {packed}", partial(epochs, plan, _read), len(plan))


def _loader(
    batch_size: int = 2, accumulate: int = 2, rank: int = 0, world_size: int = 1, packed: bool = False
) -> TrainLoader:
    return TrainLoader(_sequences(packed), Layout(batch_size, 32, 0, packed), accumulate, DataRank(rank, world_size))


def _ids(steps: list[list[Batch]]) -> list[list[tuple[int, ...]]]:
    return [[batch.row_ids for batch in step] for step in steps]


@pytest.mark.parametrize("packed", [False, True])
def test_epoch_has_every_sequence_once(packed: bool) -> None:
    loader = _loader(batch_size=3, accumulate=2, packed=packed)
    first, second = _ids(next_steps(loader)), _ids(next_steps(loader))
    assert loader.epoch == 2.0 and first != second
    for steps in (first, second):
        assert sorted(row for step in steps for ids in step for row in ids) == list(range(NUM_DOCUMENTS))


@pytest.mark.parametrize("packed", [False, True])
def test_global_batch_does_not_depend_on_ranks_and_micro_batches(packed: bool) -> None:
    # Every split has 8 rows a step. 45 rows leave 5 for the last step of an epoch.
    splits = [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 2, 4), (2, 1, 4), (1, 1, 8)]
    by_split = []
    for batch_size, accumulate, world_size in splits:
        ranks = [_loader(batch_size, accumulate, rank, world_size, packed) for rank in range(world_size)]
        assert ranks[0].steps_per_epoch == -(-_sequences(packed).num_sequences // 8)
        steps = list(zip(*(_ids(next_steps(loader, 9)) for loader in ranks), strict=True))
        for step in steps:
            assert len({len(micro_batches) for micro_batches in step}) == 1, "every rank has as many micro-batches"
            assert len(step[0]) <= accumulate
        by_split.append([sorted(row for rank_ids in step for ids in rank_ids for row in ids) for step in steps])
    assert all(batches == by_split[0] for batches in by_split)


def test_ranks_without_sequences_get_empty_micro_batches() -> None:
    rows = list(range(5))
    shares = [DataRank(rank, 4).micro_batches(rows, 2) for rank in range(4)]
    assert shares == [[[0, 1]], [[2, 3]], [[4]], [[]]]
    last = [next_steps(_loader(1, 1, rank, 8), 6)[-1] for rank in range(8)]
    assert [step[0].num_supervised_tokens > 0 for step in last] == [True] * 5 + [False] * 3
    assert all(len(step) == 1 for step in last)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("done", [0, 1, 4, 5, 6, 11, 12, 13])
def test_resumed_loader_continues_with_the_same_steps(packed: bool, done: int) -> None:
    whole = next_steps(_loader(packed=packed, batch_size=4), 20)
    first = _loader(packed=packed, batch_size=4)
    next_steps(first, done)
    state = json.loads(json.dumps(first.state_dict()))
    second = _loader(packed=packed, batch_size=4)
    second.load_state_dict(state)
    assert second.epoch == first.epoch
    assert_same_steps(next_steps(second, 20 - done), whole[done:])


def test_state_does_not_count_batches_that_the_thread_loaded_ahead() -> None:
    loader = _loader()
    iterator = iter(loader)
    states = []
    for _ in range(4):
        next(iterator)
        time.sleep(0.05)  # lets the thread load ahead as far as it is allowed to
        states.append(loader.state_dict()["rows"]["next_row"])
    assert states == [4, 8, 12, 16]
    # A new iterator of the same loader continues at the same step.
    iterator.close()  # type: ignore[attr-defined]
    assert _ids(next_steps(loader, 2)) == _ids(next_steps(_loader(), 6)[4:])


def test_resuming_may_change_ranks_and_micro_batches() -> None:
    whole = _ids(next_steps(_loader(batch_size=2, accumulate=4), 8))
    first = _loader(batch_size=2, accumulate=4)
    next_steps(first, 3)
    ranks = [_loader(batch_size=2, accumulate=2, rank=rank, world_size=2) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(first.state_dict())
    parts = [_ids(next_steps(loader, 2)) for loader in ranks]
    assert [[*parts[0][i], *parts[1][i]] for i in range(2)] == [[*step[0::2], *step[1::2]] for step in whole[3:5]]


def _eval(rank: int = 0, world_size: int = 1, batch_size: int = 4, max_batches: int | None = None) -> EvalLoader:
    limit = None if max_batches is None else max_batches * batch_size
    readers = [partial(_read, [document]) for document in range(NUM_DOCUMENTS)]
    return EvalLoader(readers, "", Layout(batch_size, 32, 0, packed=False), DataRank(rank, world_size), limit)


@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
@pytest.mark.parametrize("max_batches", [None, 3])
def test_evaluation_has_the_same_sequences_for_every_world_size(world_size: int, max_batches: int | None) -> None:
    loaders = [_eval(rank, world_size, max_batches=max_batches) for rank in range(world_size)]
    batches = [list(loader) for loader in loaders]
    assert len({len(part) for part in batches}) == 1
    rows = sorted(row for part in batches for batch in part for row in batch.row_ids)
    assert rows == list(range(NUM_DOCUMENTS if max_batches is None else 12))


def test_error_in_the_loading_thread_reaches_the_training_loop() -> None:
    loader = TrainLoader(_sequences(), Layout(2, 8, 0, packed=False), 1, DataRank())  # documents are longer than 8
    with pytest.raises(ValueError, match="shape"):
        for _ in loader:
            pass
