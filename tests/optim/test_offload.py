"""State in host memory: the bits of the same optimizer without it, checkpoints in both directions, and the order of
copies and updates, for which streams that do everything as late as they may stand in for CUDA's.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim import offload
from llm_fp8.optim.adamw_master import MasterAdamW, give_remainder_, join_master, remainder_of
from llm_fp8.optim.offload import OffloadedMasterAdamW, largest_first
from llm_fp8.optim.optimizers import build_optimizer, clip_and_step
from llm_fp8.optim.state import bytes_on_host, optimizer_scalars, optimizer_tensors
from llm_fp8.utils.errors import UserError
from tests.support.optimizer_state import take_over

pytestmark = pytest.mark.slow

SHAPES = {"embedding": (64, 16), "head": (64, 16), "up": (48, 16), "down": (16, 47), "norm": (16,), "idle": (30, 16)}
"""Pieces of 100 elements leave a rest in every matrix; `idle` never has a gradient, `head` is the embedding."""
NUM_ELEMENTS = 64 * 16 + 48 * 16 + 16 * 47 + 16 + 30 * 16


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 100)


def make_parameters(dtype=torch.bfloat16, remainders=False):
    generator = torch.Generator().manual_seed(0)
    made = {
        name: Parameter((0.02 * torch.randn(shape, generator=generator)).to(dtype)) for name, shape in SHAPES.items()
    }
    made["head"] = made["embedding"]
    for name in ("embedding", "norm") if remainders else ():
        give_remainder_(made[name])
        remainder_of(made[name]).copy_(torch.randint(-(2**15), 2**15, SHAPES[name], generator=generator))
    return made


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in parameters.items():
        if name != "idle":
            gradient = (1e-3 * (torch.randn(SHAPES[name], generator=generator) + 0.3)).to(parameter.dtype)
            # One with other strides, and one that a step goes without.
            parameter.grad = gradient.t().contiguous().t() if name == "up" else gradient
    if step == 2:
        parameters["down"].grad = None


def build(parameters, share):
    config = OptimConfig(learning_rate=1e-3, weight_decay=0.1, offload_optimizer=share)
    return build_optimizer(config, "adamw_master", parameters.items())


def train(parameters, optimizer, steps):
    for step in steps:
        set_gradients(parameters, step)
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        clip_and_step(optimizer, list(parameters.values()), max_norm=0.01)


def assert_same_bits(parameters, optimizer, others, other_optimizer):
    """Weights, and the state of every parameter that had a gradient."""
    assert all(torch.equal(parameter, others[name]) for name, parameter in parameters.items())
    state, other = (optimizer_tensors(o, p.items()) for o, p in ((optimizer, parameters), (other_optimizer, others)))
    assert {name for name in state.keys() ^ other.keys() if not name.startswith("idle.")} == set()
    for name in state.keys() & other.keys():
        assert state[name].dtype == other[name].dtype and torch.equal(state[name], other[name]), name
    assert optimizer_scalars(optimizer) == optimizer_scalars(other_optimizer)


@pytest.mark.parametrize(
    ("dtype", "remainders"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
    ids=["bf16", "remainders", "fp32"],
)
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_the_bits_are_those_without_it(share, remainders, dtype):
    plain, offloaded = make_parameters(dtype, remainders), make_parameters(dtype, remainders)
    optimizers = build(plain, 0.0), build(offloaded, share)
    assert [type(optimizer) for optimizer in optimizers] == [MasterAdamW, OffloadedMasterAdamW]
    assert all(buffer["exp_avg"].shape == (100,) for buffer in optimizers[1].pipeline._buffers)
    for steps in ((0,), (1, 2, 3), (4, 5)):
        train(plain, optimizers[0], steps)
        train(offloaded, optimizers[1], steps)
        assert_same_bits(plain, optimizers[0], offloaded, optimizers[1])
    assert not torch.equal(plain["up"], make_parameters(dtype)["up"]), "they have moved"
    assert all(buffer["exp_avg_sq"].any() for buffer in optimizers[1].pipeline._buffers), "through every buffer"


def test_the_largest_are_offloaded_whole():
    parameters = make_parameters()
    in_order = list(dict.fromkeys(parameters.values()))
    by_size = [parameters[name] for name in ("embedding", "up", "down", "idle", "norm")]
    for share, count in ((1e-9, 1), (1024 / NUM_ELEMENTS, 1), (0.34, 2), (0.99, 4), (1.0, 5)):
        assert [id(p) for p in largest_first(in_order, share)] == [id(p) for p in by_size[:count]], share
        optimizer = build(parameters, share)
        held = sum(parameter.numel() for parameter in by_size[:count])
        assert optimizer.host_bytes == bytes_on_host(optimizer) == 8 * held >= 8 * share * NUM_ELEMENTS
        arenas = {name: arena.untyped_storage().data_ptr() for name, arena in optimizer._host.items()}
        for number, parameter in enumerate(by_size):
            places = {name: tensor.untyped_storage().data_ptr() for name, tensor in optimizer.state[parameter].items()}
            assert (places == arenas) == (number < count)
    assert bytes_on_host(build(parameters, 0.0)) == 0


def test_what_is_known_of_a_remainder_is_what_is_trained():
    parameters = make_parameters(remainders=True)
    start = join_master(parameters["embedding"].detach(), remainder_of(parameters["embedding"]))
    optimizer = build(parameters, 1.0)
    for name in ("embedding", "norm"):
        assert remainder_of(parameters[name]) is optimizer.state[parameters[name]]["remainder"]
    assert remainder_of(parameters["up"]) is None
    now = join_master(parameters["embedding"].detach(), remainder_of(parameters["embedding"]))
    assert torch.equal(now, start), "moving it changes nothing"
    train(parameters, optimizer, range(2))
    trained = join_master(parameters["embedding"].detach(), remainder_of(parameters["embedding"]))
    assert not torch.equal(trained, start)
    assert torch.equal(
        trained, join_master(parameters["embedding"], optimizer.state[parameters["embedding"]]["remainder"])
    )


@pytest.mark.parametrize(("before", "after"), [(0.0, 1.0), (1.0, 0.0), (0.4, 0.9)])
def test_a_checkpoint_goes_on_with_any_share(before, after):
    whole, first, second = (make_parameters(remainders=True) for _ in range(3))
    never_stopped, stopped, resumed = build(whole, 0.0), build(first, before), build(second, after)
    never_stopped.initialize_state(), stopped.initialize_state()
    train(whole, never_stopped, range(6))
    train(first, stopped, range(3))
    take_over(resumed, second.items(), stopped, first.items())
    train(second, resumed, range(3, 6))
    assert_same_bits(whole, never_stopped, second, resumed)


def test_host_memory_is_pinned_as_long_as_it_lives_or_refused(monkeypatch):
    """With a driver that only writes down what it is asked."""
    asked: list[tuple[Any, ...]] = []
    answers = [0, 2]
    driver = SimpleNamespace(
        cudaHostRegister=lambda *what: asked.append(("pin", *what)) or answers.pop(0),
        cudaHostUnregister=lambda *what: asked.append(("let go", *what)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append(("wait",)))
    zeros = offload.pinned_zeros(2**20 + 1, torch.int16, torch.device("cuda"))
    address, part = zeros.data_ptr(), zeros[5:]
    assert asked == [("pin", address, 2 * (2**20 + 1), 0)] and not zeros.any()
    del zeros
    gc.collect()
    assert len(asked) == 1 and not part.any(), "a part of it is still in use"
    del part
    gc.collect()
    assert asked[1:] == [("wait",), ("let go", address)]
    with pytest.raises(
        UserError, match=r"--offload_optimizer: the driver does not pin 1\.0 GiB of host memory .*error 2"
    ):
        offload.pinned_zeros(2**28, torch.float32, torch.device("cuda"))


class Adversary:
    """Streams that hold their work back. `settle` lets one of them get done, by random steps that its events allow."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._queues: list[deque[tuple[str, Any]]] = []
        self._happened: set[int] = set()
        self._num_events = 0
        self.current = self.new()

    def new(self) -> LateStream:
        self._queues.append(deque())
        return LateStream(self, self._queues[-1])

    def next_event(self) -> int:
        self._num_events += 1
        return self._num_events

    def settle(self, queue: deque[tuple[str, Any]]) -> None:
        while queue:
            able = [q for q in self._queues if q and (q[0][0] != "wait" or q[0][1] in self._happened)]
            kind, what = self._chance.choice(able).popleft()
            if kind == "work":
                what()
            elif kind == "event":
                self._happened.add(what)


class LateStream(offload.AtOnce):
    """One of an `Adversary`."""

    def __init__(self, adversary: Adversary, queue: deque[tuple[str, Any]]) -> None:
        self._adversary, self.queue = adversary, queue

    def record_event(self) -> int:
        event = self._adversary.next_event()
        self.queue.append(("event", event))
        return event

    def wait_event(self, event: int) -> None:
        self.queue.append(("wait", event))

    def synchronize(self) -> None:
        self._adversary.settle(self.queue)


@pytest.fixture
def late_streams(monkeypatch) -> Callable[[int], Adversary]:
    """A function: optimizers built from now on have the streams of an adversary of this seed."""

    def hold_back(stream: LateStream, work: Callable[[], object]) -> None:
        stream.queue.append(("work", work))

    def begin(seed: int) -> Adversary:
        adversary = Adversary(seed)
        monkeypatch.setattr(
            offload, "stream_of", lambda _, current=False: adversary.current if current else adversary.new()
        )
        monkeypatch.setattr(offload, "run_on", hold_back)
        return adversary

    return begin


@torch.no_grad()
def bits_after(steps_between_looks: tuple[int, ...], share: float, adversary: Adversary | None) -> list[Any]:
    """The weights, and the state as a reader finds it who waits for the step's stream alone, at each look."""
    parameters = make_parameters()
    optimizer = build(parameters, share)
    seen, step = [], 0
    for count in steps_between_looks:
        train(parameters, optimizer, range(step, step + count))
        step += count
        if adversary is not None:
            adversary.current.synchronize()
        tensors = [*parameters.values(), *(t for p in parameters.values() for t in optimizer.state[p].values())]
        seen.append([tensor.detach().clone() for tensor in tensors])
    return seen


def same(seen: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a, b) for ours, theirs in zip(seen, other, strict=True) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("piece", [100, 600, 2000])
def test_no_order_that_the_events_allow_gives_other_bits(share, piece, late_streams, monkeypatch):
    """Pieces of 2,000 elements are fewer than buffers: the next step then begins with the other buffers."""
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", piece)
    want = bits_after((1, 3, 2), share, None)
    for seed in range(12):
        assert same(want, bits_after((1, 3, 2), share, late_streams(seed)))


@pytest.mark.parametrize(
    ("method", "waiting"),
    [
        ("update_", "_copies_in"),  # for an emptied buffer
        ("update_", "current"),  # for a filled one
        ("update_", "copies_out"),  # for the update
        ("finish_step", "current"),  # for the copies out, as does
        ("finish_step", "_copies_in"),
    ],
)
def test_without_any_of_the_waits_some_order_gives_other_bits(method, waiting, late_streams, monkeypatch):
    def wait_event(stream: LateStream, event: int) -> None:
        caller = sys._getframe(1)
        pipeline = caller.f_locals["self"]
        its_own = stream._adversary.current if waiting == "current" else getattr(pipeline, waiting)
        if (caller.f_code.co_name, stream) != (method, its_own):
            stream.queue.append(("wait", event))

    monkeypatch.setattr(LateStream, "wait_event", wait_event)
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 2000)
    # One piece in a step, and more than there are buffers.
    wanted = {share: bits_after((1, 3, 2), share, None) for share in (0.2, 1.0)}
    assert not all(
        same(want, bits_after((1, 3, 2), share, late_streams(seed)))
        for share, want in wanted.items()
        for seed in range(12)
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_waits_for_the_copies_out(seed, late_streams):
    plain, offloaded = make_parameters(), make_parameters()
    optimizer = build(plain, 0.0)
    optimizer.initialize_state()
    train(plain, optimizer, range(3))
    late_streams(seed)
    late = build(offloaded, 1.0)
    train(offloaded, late, range(3))
    with torch.no_grad():
        saved = optimizer_tensors(late, offloaded.items())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in optimizer_tensors(optimizer, plain.items()).items())
