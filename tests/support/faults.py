"""Cause a fault in a run of several processes and check its exit codes, files and resumption, on CPUs and GPUs.

A fault is a signal to one process, or NaN or infinity in one micro-batch or one fp8 scale. The arguments `options` must
configure a run that saves checkpoints in `folder`. Each function adds further options.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llm_fp8.run.checkpoint import CheckpointManager
from llm_fp8.run.timeline import Timeline
from llm_fp8.tools.script import EXIT_USER_ERROR
from tests.support.processes import exit_code, start_ranks, wait_until
from tests.support.small import run_json, steps

START_S = 120.0
"""Seconds within which a run has to take its first steps."""
ENDLESS = "--max_steps=100000"


def kill_rank_during_save(start: Callable[..., Any], folder: Path, within_s: float) -> dict[int, int | None]:
    """Kill rank 1 while it writes a checkpoint, and return the exit codes of the failed ranks.

    `start` takes options and starts a run that saves in `folder`. Every rank must end within `within_s` seconds, the
    earlier checkpoints must be complete, and the run must resume. A rank that ends by itself must print the reason.
    """
    checkpoints = folder / "checkpoints"
    with start(ENDLESS, "--save_every=1") as launch:
        assert wait_until(lambda: len(list(checkpoints.glob("step-*"))) > 1, launch, 0.001, START_S), launch.printed()
        victim = launch.pid_of(1)
        assert wait_until(lambda: any(checkpoints.glob(".tmp-step-*")), launch)
        os.kill(victim, signal.SIGKILL)
        kill_time_s = time.monotonic()
        codes = launch.end(within_s)
    assert codes[1] == -signal.SIGKILL and time.monotonic() - kill_time_s < within_s, launch.printed()
    output = launch.printed()
    assert "another process of this run is gone" in output or codes.get(0) != EXIT_USER_ERROR, output
    manager = CheckpointManager(folder, limit=3)
    saved = sorted(checkpoints.glob("step-*"))
    assert saved and all(manager.find(str(path)).folder == path for path in saved)
    last = int(saved[-1].name.removeprefix("step-"))
    with start(f"--max_steps={last + 2}", "--allow_changed=total_steps", "--resume_from=latest") as launch:
        assert launch.end(START_S) == {}, launch.printed()
    assert f"resumed from {saved[-1]} after step {last}" in launch.printed()
    assert [step["step"] for step in steps(folder)] == list(range(1, last + 3))
    assert not any(checkpoints.glob(".tmp-*"))
    return codes


def kill_rank_and_restart(start: Callable[..., Any], folder: Path, *options: str) -> None:
    """Kill rank 1 after the first checkpoint. torchrun must restart all ranks, and they must resume the run.

    `start` takes the path of a log, and options, and starts torchrun in `folder`. The ranks must continue in the same
    run folder.
    """
    training = ["--max_steps=60", "--save_every=20", "--log_every=1", "--no_export"]
    with start(folder / "log", *options, *training, launcher=("--max_restarts=1",)) as launch:
        saved = wait_until(lambda: any(folder.glob("runs/*/checkpoints/step-*")), launch, 0.01, START_S)
        assert saved, launch.printed()
        os.kill(launch.pid_of(1), signal.SIGKILL)
        assert launch.end(START_S) == {}, launch.printed()
    (run,) = (folder / "runs").iterdir()
    assert [step["step"] for step in steps(run)] == list(range(1, 61))
    resumed = re.search(r"resumed from .* after step (\d+)", launch.printed())
    assert resumed is not None and int(resumed[1]) >= 20
    assert [resume["resumed_after_step"] for resume in run_json(run)["resumes"]] == [int(resumed[1])]


STEP, RANK, MICRO_BATCH = 3, 1, 2
VALUES = (torch.nan, torch.inf)
SCALES = ("scaling_fwd", "scaling_bwd")


@contextlib.contextmanager
def _planted(loop: Timeline, place: str, value: float) -> Iterator[None]:
    """Set one number to `value` within the block, which must take one step. The number is an fp8 scale if `place` is in
    `SCALES`. For "activation" it is an entry of a micro-batch's embeddings, for "gradient" an entry of the gradient.
    """
    if place in SCALES:
        scales = [tensor for name, tensor in loop.precision.state_tensors().items() if name.endswith(f"{place}.scale")]
        scales[0].data[0] = value  # the scale of a layer's input, or of the gradient of its output
        yield
        return
    outputs: list[Tensor] = []

    def spoil(tensor: Tensor) -> Tensor:
        spoiled = tensor.clone()
        spoiled.view(-1)[5] = value
        return spoiled

    def after_forward(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        outputs.append(output)
        if len(outputs) == MICRO_BATCH and place == "activation":
            return spoil(output)
        if len(outputs) == MICRO_BATCH:
            output.register_hook(spoil)
        return output

    embedding = next(module for module in loop.stepper.model.modules() if isinstance(module, nn.Embedding))
    handle = embedding.register_forward_hook(after_forward)
    try:
        yield
    finally:
        handle.remove()


def plant_nonfinite_value(place: str, value: float) -> None:
    """Patch this process so that step `STEP` sets a number at `place` to `value` on rank `RANK` (see `_planted`)."""
    take_step = Timeline.take_step

    def take_step_with_value(loop: Timeline, batches: list[Any], start: Any) -> Any:
        if loop.step + 1 != STEP or loop.accelerator.process_index != RANK:
            return take_step(loop, batches, start)
        print(f"rank {RANK} planted {value} at rows {[row for batch in batches for row in batch.row_ids]}", flush=True)
        with _planted(loop, place, value):
            return take_step(loop, batches, start)

    Timeline.take_step = take_step_with_value  # type: ignore[method-assign]


def check_run_stops_on_nonfinite_value(folder: Path, place: str, value: float, *options: str) -> None:
    """Train on two ranks with `plant_nonfinite_value`. Both must exit with code 2, and the error must name the step and
    the rows. No checkpoint of that step or of a later step may exist.
    """
    log = folder.with_name(f"{folder.name}.log")
    training = [*options, "--max_steps=8", "--save_every=2", "--log_every=4", f"--output_dir={folder}"]
    sizes = ["--batch_size=2", f"--gradient_accumulation_steps={MICRO_BATCH}", "--no_merge_micro_batches"]
    ranks = start_ranks(2, log, *training, *sizes, first=functools.partial(plant_nonfinite_value, place, value))
    codes = [exit_code(rank, 120) for rank in ranks]
    output = log.read_text()
    assert codes == [2, 2], output
    (error,) = {line for line in output.splitlines() if line.startswith("error: ")}
    rows = output.partition("at rows [")[2].partition("]")[0]
    assert f"step {STEP}: the loss is " in error and f"{rows} (rank {RANK})" in error, output
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000002"]
    assert not (folder / "final").exists()
