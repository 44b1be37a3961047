"""The buffers of FSDP2's reduce-scatter, with stand-ins for CUDA's streams: on whose stream they are allocated.

That it releases main gradients is in test_wgrad_fusion_sharded.py, with the real FSDP2.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llm_fp8.distributed.fsdp_internals import MemorySavingReduceScatter, use_memory_saving_reduce_scatter

BACKWARD, REDUCE_SCATTER = "stream of the backward pass", "stream of the reduce-scatter"


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


@pytest.mark.parametrize(("current", "recorded"), [(BACKWARD, []), (REDUCE_SCATTER, [REDUCE_SCATTER])])
def test_buffers_are_the_backward_passes_and_kept_while_the_reduce_scatter_uses_them(current, recorded, streams):
    reduce_scatter = MemorySavingReduceScatter(Unit(), BACKWARD)
    with streams.use(current):
        found = reduce_scatter.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
        assert streams.current == current
    assert found.shape == (6,) and found.dtype == torch.float32
    assert streams.allocated == [BACKWARD] and streams.recorded == recorded


def test_without_a_stream_buffers_are_where_fsdp2_has_them(streams):
    with streams.use(REDUCE_SCATTER):
        MemorySavingReduceScatter(Unit(), None).allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
    assert streams.allocated == [REDUCE_SCATTER] and streams.recorded == []


class Unit(FSDPModule, nn.Module):
    """A unit that notes the reduce-scatter that it is given."""

    def __new__(cls) -> Unit:
        return nn.Module.__new__(cls)

    reduce_scatter = None

    def _get_fsdp_state(self) -> None:
        """Nothing is sharded."""

    def set_custom_reduce_scatter(self, comm) -> None:
        self.reduce_scatter = comm


@pytest.mark.parametrize(("stream", "allocated"), [(BACKWARD, BACKWARD), (None, REDUCE_SCATTER)])
def test_every_unit_has_a_reduce_scatter(stream, allocated, streams):
    units = [Unit(), Unit()]
    use_memory_saving_reduce_scatter(nn.Sequential(*units, nn.Linear(1, 1)), stream)
    assert all(isinstance(unit.reduce_scatter, MemorySavingReduceScatter) for unit in units)
    streams.allocated.clear()
    with streams.use(REDUCE_SCATTER):
        for unit in units:
            unit.reduce_scatter.allocate((6,), dtype=torch.float32, device=torch.device("cpu"))
    assert streams.allocated == [allocated] * 2
