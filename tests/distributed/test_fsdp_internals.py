"""The memory of FSDP2's exchange, with stand-ins for CUDA's streams: on whose stream it is asked for, and what a torch
without the class does.

That an exchange lets go of sums is in test_sharded_wgrad.py, with the real FSDP2.
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, _fully_shard

from llm_fp8.distributed import fsdp
from llm_fp8.distributed.fsdp_internals import MemorySavingReduceScatter

BACKWARD, EXCHANGE = "stream of the backward pass", "stream of the exchange"


class Streams:
    """CUDA's current stream, which `use` changes while a block lasts; `allocated` and `recorded` are the streams of
    memory.
    """

    def __init__(self) -> None:
        self.current, self.allocated, self.recorded = BACKWARD, [], []

    @contextlib.contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch):
    found, empty = Streams(), torch.empty

    def allocate(*size, **options):
        found.allocated.append(found.current)
        return empty(*size, **options)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.current)
    monkeypatch.setattr(torch.cuda, "stream", found.use)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: found.recorded.append(stream))
    return found


@pytest.mark.parametrize(("asking", "recorded"), [(BACKWARD, []), (EXCHANGE, [EXCHANGE])])
def test_memory_is_the_backward_passes_and_kept_while_the_exchange_uses_it(asking, recorded, streams):
    exchange = MemorySavingReduceScatter([], BACKWARD)
    with streams.use(asking):
        found = exchange.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
        assert streams.current == asking
    assert found.shape == (6,) and found.dtype == torch.float32
    assert streams.allocated == [BACKWARD] and streams.recorded == recorded


def test_without_a_stream_memory_is_where_fsdp2_has_it(streams):
    with streams.use(EXCHANGE):
        MemorySavingReduceScatter([], None).allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
    assert streams.allocated == [EXCHANGE] and streams.recorded == []


class Unit(FSDPModule, nn.Module):
    """A unit that notes the exchange it is given."""

    def __new__(cls) -> Unit:
        return nn.Module.__new__(cls)

    exchange = None

    def _get_fsdp_state(self) -> None:
        """Nothing is split."""

    def set_custom_reduce_scatter(self, comm) -> None:
        self.exchange = comm


@pytest.mark.parametrize(("one_pool", "allocated"), [(True, BACKWARD), (False, EXCHANGE)])
def test_every_unit_has_an_exchange(one_pool, allocated, streams):
    units = [Unit(), Unit()]
    fsdp._use_memory_saving_reduce_scatter(nn.Sequential(*units, nn.Linear(1, 1)), one_pool, say=True)
    assert all(isinstance(unit.exchange, MemorySavingReduceScatter) for unit in units)
    streams.allocated.clear()
    with streams.use(EXCHANGE):
        for unit in units:
            unit.exchange.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
    assert streams.allocated == [allocated] * 2


@pytest.mark.parametrize("say", [True, False])
def test_a_torch_without_the_class_keeps_its_own_exchange_and_one_rank_says_so(say, monkeypatch, caplog):
    monkeypatch.delattr(_fully_shard._fsdp_collectives, "DefaultReduceScatter")
    monkeypatch.delitem(sys.modules, MemorySavingReduceScatter.__module__)
    unit = Unit()
    fsdp._use_memory_saving_reduce_scatter(unit, True, say)
    assert unit.exchange is None
    assert [torch.__version__ in line and "DefaultReduceScatter" in line for line in caplog.messages] == [True] * say
