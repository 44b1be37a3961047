"""--mixed_precision auto: two micro-batches of the run's first data in bf16 and in fp8, and the faster one is taken.

The model of the measurement is dropped, and random states and the position in the data are put back: the run's losses
are those of a run that asks for the precision. Bf16 is measured on the same model with Transformer Engine's autocast
closed. DDP's reductions and CUDA graphs are left out.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools

import torch

from llm_fp8.data import PreparedData
from llm_fp8.data.collate import Batch
from llm_fp8.distributed.process_group import gathered
from llm_fp8.precision.plan import resolve_precision
from llm_fp8.train.loop import StepClock
from llm_fp8.train.plan import RunPlan, silent
from llm_fp8.train.scale_warmup import first_step
from llm_fp8.train.setup import TrainingSetup, build_setup
from llm_fp8.train.train_state import restore_rng_state, rng_state
from llm_fp8.utils.te_internals import forget_delayed_scales

NUM_MEASURED = 2  # micro-batches of each precision, after one that is not timed


def replanned(plan: RunPlan, name: str) -> RunPlan:
    """The plan of the same run in bf16 or fp8, which compute in the same dtype, with nothing left to measure."""
    config = plan.config.with_options(mixed_precision=name)
    precision = dataclasses.replace(resolve_precision(config.precision, plan.device), requested="auto")
    return dataclasses.replace(plan, config=config, precision=precision, measures_precision=False)


def choose_precision(plan: RunPlan, data: PreparedData) -> tuple[RunPlan, dict[str, float]]:
    """The plan with the faster precision, and the tokens per second of each; rank 0's figures decide. Collective."""
    tokens_per_s = gathered(measure_precisions(plan, data))[0]
    fastest = max(tokens_per_s, key=tokens_per_s.__getitem__)
    told = ", ".join(f"{name} {figure:,.0f} tokens/s" for name, figure in tokens_per_s.items())
    plan.say(f"auto: {told}: {fastest}")
    return replanned(plan, fastest), tokens_per_s


def measure_precisions(plan: RunPlan, data: PreparedData) -> dict[str, float]:
    """Tokens per second of this process in fp8 and in bf16, in forward and backward of a micro-batch. Collective."""
    random_states = rng_state(plan.accelerator.process_index)
    setup, batches = build_setup(dataclasses.replace(plan, say=silent)), first_step(data.train)
    found = {name: _tokens_per_s(setup, batches, name) for name in ("fp8", "bf16")}
    del setup
    forget_delayed_scales()
    gc.collect()
    torch.cuda.empty_cache()
    restore_rng_state(random_states)
    return found


def _tokens_per_s(setup: TrainingSetup, batches: list[Batch], name: str) -> float:
    precision, model, device = setup.precision, setup.training_model, setup.plan.device
    clock, stamps, num_tokens = StepClock(device), [], 0
    model.train()
    for number, batch in enumerate(itertools.islice(itertools.cycle(batches), 1 + NUM_MEASURED)):
        if number == 1:
            stamps.append(clock.stamp())
        with precision.context(first_microbatch=None):
            on_device = batch.to(device)
            loss, _ = model(on_device) if name == "fp8" else precision.without_fp8(model, on_device)
        loss.backward()
        model.zero_grad(set_to_none=True)
        num_tokens += batch.num_tokens if number else 0
    stamps.append(clock.stamp())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return num_tokens / clock.seconds(*stamps)
