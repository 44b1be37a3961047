"""--empty_cache_freq: after which steps cached GPU memory is given back."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llm_fp8.train.eval_history import EvalHistory

from llm_fp8.train.loop import LoopOptions, TrainingLoop

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("device", "every", "emptied_after"),
    [("cuda", 3, [3, 6]), ("cuda", 1, [1, 2, 3, 4, 5, 6, 7]), ("cuda", 0, []), ("cpu", 3, [])],
)
def test_the_cache_is_emptied_every_so_many_steps(
    monkeypatch: pytest.MonkeyPatch, device: str, every: int, emptied_after: list[int]
) -> None:
    """The loop itself, around steps that do nothing: no GPU is needed to see when it asks for that."""
    options = LoopOptions(
        total_steps=7, max_grad_norm=1.0, log_every=0, eval_every=0, save_every=0, empty_cache_every=every
    )
    nothing = lambda *_: None  # noqa: E731
    loop: Any = SimpleNamespace(
        options=options,
        step=0,
        model=SimpleNamespace(train=nothing),
        evaluation_due=False,
        history=EvalHistory(),
        loader=[[]] * 10,
        accelerator=SimpleNamespace(device=torch.device(device)),
        _graphs=None,
        _restart_clocks=nothing,
        _read_pending=nothing,
    )
    loop._due = functools.partial(TrainingLoop._due, loop)
    loop.take_step = lambda *_: setattr(loop, "step", loop.step + 1)
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(loop.step))
    TrainingLoop.train(loop, SimpleNamespace(after_first_step=nothing, after_report=nothing), lambda: False)
    assert loop.step == 7 and emptied == emptied_after
