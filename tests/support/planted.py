"""NaN and infinities planted while a run trains: on one rank, in one micro-batch or one fp8 scale, at one step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llm_fp8.run.timeline import Timeline
from tests.support.processes import exit_code, start_ranks

STEP, RANK, MICRO_BATCH = 3, 1, 2
VALUES = (torch.nan, torch.inf)
SCALES = ("scaling_fwd", "scaling_bwd")


@contextlib.contextmanager
def _planted(loop: Timeline, place: str, value: float) -> Iterator[None]:
    """For one step: `value` in an entry of the embeddings of a micro-batch, of their gradient, or of an fp8 scale."""
    if place in SCALES:
        scales = [tensor for name, tensor in loop.precision.state_tensors().items() if name.endswith(f"{place}.scale")]
        scales[0].data[0] = value  # of the input, or of the gradient of the output
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


def plant(place: str, value: float) -> None:
    """Make this process, if it is `RANK`, plant `value` at `STEP` of the run that it will train."""
    take_step = Timeline.take_step

    def take_and_plant(loop: Timeline, batches: list[Any], start: Any) -> Any:
        if loop.step + 1 != STEP or loop.accelerator.process_index != RANK:
            return take_step(loop, batches, start)
        print(f"rank {RANK} planted {value} at rows {[row for batch in batches for row in batch.row_ids]}", flush=True)
        with _planted(loop, place, value):
            return take_step(loop, batches, start)

    Timeline.take_step = take_and_plant  # type: ignore[method-assign]


def check_that_the_run_stops(folder: Path, place: str, value: float, *options: str) -> None:
    """Two ranks end with code 2 and a sentence that names the step and the rows; nothing of the step is saved."""
    log = folder.with_name(f"{folder.name}.log")
    training = [*options, "--max_steps=8", "--save_every=2", "--log_every=4", f"--output_dir={folder}"]
    cut = ["--batch_size=2", f"--gradient_accumulation_steps={MICRO_BATCH}", "--no_merge_micro_batches"]
    ranks = start_ranks(2, log, *training, *cut, first=functools.partial(plant, place, value))
    codes = [exit_code(rank, 120) for rank in ranks]
    said = log.read_text()
    assert codes == [2, 2], said
    (sentence,) = {line for line in said.splitlines() if line.startswith("error: ")}
    rows = said.partition("at rows [")[2].partition("]")[0]
    assert f"step {STEP}: the loss is " in sentence and f"{rows} (rank {RANK})" in sentence, said
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000002"]
    assert not (folder / "final").exists()
