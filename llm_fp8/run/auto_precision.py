"""Choose between bf16 and fp8 for --mixed_precision auto: measure micro-batches of the first data in both precisions.

Afterwards the measured model is deleted, and the random states and the position in the data are restored. Therefore
losses are equal to those of a run that was started with the chosen precision. For bf16, the same TE decoder runs
without Transformer Engine's autocast. Transformers' layers are built for each precision, since they are compiled in
bf16 only. The time does not include DDP's reductions. If the GPU idles and the run may replay CUDA graphs, only the
time of the kernels counts.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Mapping

import torch

from llm_fp8.config.options import Config
from llm_fp8.data.collate import Batch
from llm_fp8.data.prepare import PreparedData
from llm_fp8.distributed.process_group import gathered
from llm_fp8.observability.kernel_trace import profiled
from llm_fp8.precision.context import with_recipe
from llm_fp8.precision.te import forget_delayed_scales
from llm_fp8.run.setup import TrainingSetup, build_setup
from llm_fp8.run.train_state import restore_rng_state, rng_state
from llm_fp8.settle.plan import RunPlan
from llm_fp8.settle.settle import settle
from llm_fp8.step.micro_batch_graphs import WORTH_GRAPHS
from llm_fp8.step.stepper import StepClock

NUM_MEASURED = 2  # micro-batches of each precision, after one that is not measured


def choose_precision(requested: Config, plan: RunPlan, data: PreparedData) -> tuple[RunPlan, dict[str, float]]:
    """Measure bf16 and fp8, and choose the precision that was faster on rank 0. Return `plan` with the decisions that
    follow from `requested` and this precision, and a dict: precision -> tokens/s on rank 0. Collective.
    """
    plans = {name: _settled_for(name, requested, plan) for name in ("fp8", "bf16")}
    tokens_per_s = gathered(measure_precisions(plans, data))[0]
    fastest = max(tokens_per_s, key=tokens_per_s.__getitem__)
    figures = ", ".join(f"{name} {figure:,.0f} tokens/s" for name, figure in tokens_per_s.items())
    plan.say(f"auto: {figures}: {fastest}")
    return plans[fastest], tokens_per_s


def _settled_for(precision_name: str, requested: Config, plan: RunPlan) -> RunPlan:
    settled = settle(requested, plan.hf_config, plan.machine, None, precision_name, plan.size.num_parameters)
    precision = with_recipe(settled.precision, settled.config.precision, plan.device)
    return dataclasses.replace(plan, **vars(settled) | {"precision": precision, "notes": plan.notes})


def measure_precisions(plans: Mapping[str, RunPlan], data: PreparedData) -> dict[str, float]:
    """Measure forward and backward passes of the run in each precision of `plans`, bf16 and fp8. Return precision ->
    tokens/s of this process. A TE decoder is built only once, for both. Collective.
    """
    plan = plans["fp8"]
    random_states = rng_state(plan.accelerator.process_index)
    batches, tokens_per_s = data.train.first_step(), dict[str, float]()
    for names in [("fp8", "bf16")] if plan.config.model.use_te else [("fp8",), ("bf16",)]:
        setup = build_setup(dataclasses.replace(plans[names[0]], say=lambda text: None), in_bf16=True)
        tokens_per_s |= {name: _tokens_per_s(setup, batches, name) for name in names}
        del setup
        forget_delayed_scales()
        torch.compiler.reset()  # else compiled layers would hold the model, and count as compiled before
        gc.collect()
        torch.cuda.empty_cache()
    restore_rng_state(random_states)
    return tokens_per_s


def _tokens_per_s(setup: TrainingSetup, batches: list[Batch], name: str) -> float:
    precision, backend = setup.precision, setup.precision.backend
    model, device = setup.training_model, setup.plan.device
    clock, num_tokens = StepClock(device), 0

    def run(batch: Batch) -> None:
        with precision.context(first_microbatch=None):
            on_device = batch.to(device)
            loss, aux = model(on_device) if name == "fp8" else backend.call_in_bf16(model, model, on_device)
        sum(aux.values(), start=loss).backward()
        model.zero_grad(set_to_none=True)

    model.train()
    batch_cycle = itertools.cycle(batches)
    run(next(batch_cycle))
    start = clock.stamp()
    for batch in itertools.islice(batch_cycle, NUM_MEASURED):
        run(batch)
        num_tokens += batch.num_tokens
    end = clock.stamp()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = clock.seconds(start, end)
    if setup.plan.graphs is not False and not (setup.plan.strategy.shards_parameters and len(batches) > 1):
        with profiled() as profile:
            run(next(batch_cycle))
        work_s = NUM_MEASURED * profile.work_s
        if work_s < (1 - WORTH_GRAPHS) * seconds:  # steps will run as graphs, which need little of the host's time
            seconds = work_s
    return num_tokens / seconds
