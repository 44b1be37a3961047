"""A function on several gloo ranks, each a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.processes import DEADLINE_S

_CONTEXT = multiprocessing.get_context("forkserver")


def _rank_main(rank: int, num_ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    result: Any
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
        )
        result = function(rank, *args)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        result = traceback.format_exc()
        torch.save(result, f"{folder}/{rank}.failed")
        raise
    torch.save(result, f"{folder}/{rank}.result")


def on_ranks(num_ranks: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(rank, *args)` returns in so many processes of one group."""
    folder.mkdir()
    processes = [
        _CONTEXT.Process(target=_rank_main, args=(rank, num_ranks, str(folder), function, args), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    failures = [torch.load(path, weights_only=False) for path in sorted(folder.glob("*.failed"))]
    assert not failures, failures[0]
    assert not hung, f"{len(hung)} processes did not end"
    return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(num_ranks)]
