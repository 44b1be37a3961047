"""The plan of a run before its model is built: decisions, source of the weights, and the accelerator and strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from llm_fp8.config.options import Config
from llm_fp8.distributed.build import build_strategy
from llm_fp8.distributed.process_group import device_of_process, gathered
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models import source as sources
from llm_fp8.optim.optimizers import OPTIMIZERS
from llm_fp8.precision.context import with_recipe
from llm_fp8.precision.te import prepare_te_decoder
from llm_fp8.settle.machine import detect_machine
from llm_fp8.settle.probe import probe
from llm_fp8.settle.settle import Settled, settle
from llm_fp8.step.loss_model import PackedForm
from llm_fp8.utils.output import say as print_line
from llm_fp8.utils.ranks import LaunchRanks


@dataclass(frozen=True, kw_only=True)
class RunPlan(Settled):
    """A settled run, and the objects that are needed to build its model."""

    source: sources.ModelSource
    accelerator: Accelerator
    strategy: DistributedStrategy
    export_dtype: torch.dtype  # dtype of the stored weights, or `parameter_dtype` if there are none
    stored: sources.StoredCheckpoint | None  # weights to load, or None for random weights
    packed_form: PackedForm | None  # for transformers' decoder; None for TE's decoder or without packing

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def stores_lower_bits(self) -> bool:
        """True if bf16 rounds the stored weights: they are fp32, fp16, or fp8 numbers times scales."""
        stored_in_fp8 = self.stored is not None and self.stored.fp8 is not None
        return stored_in_fp8 or self.export_dtype in (torch.float32, torch.float16)

    @property
    def draws_lower_bits(self) -> bool:
        """True if the lower bits of master weights are drawn at random (see `llm_fp8.optim.adamw_master`)."""
        return self.precision.compute_name == "bf16" and not self.stores_lower_bits

    @property
    def rounds_weights(self) -> bool:
        """True if loading rounds the stored weights to bf16."""
        return self.weight_dtype == torch.bfloat16 and self.stores_lower_bits

    @property
    def keeps_lower_bits(self) -> bool:
        """True if the optimizer stores, as remainders, the lower bits that the weights lose when they are rounded."""
        optimizer = OPTIMIZERS[self.optimizer_kind]
        return self.rounds_weights and optimizer.keeps_lower_bits and not self.config.trains_adapters

    @property
    def parallel_record(self) -> dict[str, Any]:
        return {"sharding_mode": self.strategy.mode, "num_processes": self.accelerator.num_processes}

    def say(self, text: str | None) -> None:
        """Print `text`, unless it is None or empty, on the main process."""
        if text and self.accelerator.is_main_process:
            print_line(text)


def probe_hf_layers(settled: Settled, device: torch.device) -> PackedForm | None:
    """Return the result of `probe` for transformers' decoder layers, or None if all layers are Transformer Engine's."""
    sizes = settled.size.sizes
    if settled.config.model.use_te and (sizes is None or None not in sizes.layers):
        return None
    return probe(settled.config, settled.hf_config, device, settled.precision.compute_dtype)


def plan_run(config: Config, ranks: LaunchRanks, resumed: Mapping[str, Any] | None = None) -> RunPlan:
    """Settle the run for this machine (see `settle`) and build the objects that its model needs. Raise `UserError` if
    the run is not possible with this machine, its packages or its memory. All ranks must call this function.
    """
    device = device_of_process()
    source = sources.resolve_source(config.model)
    hf_config = sources.load_config(source)
    machine = detect_machine(config, ranks)
    settled, notes = settle(config, hf_config, machine, resumed), list[str]()
    if config.model.use_te and (sizes := settled.size.sizes) and sizes.delta_net:
        from llm_fp8.mixers.delta_net import describe_kernels, problem_of_kernels

        problems = gathered(problem_of_kernels(sizes.delta_net, device, settled.precision.compute_dtype))
        notes.append(describe_kernels(problem := next(filter(None, problems), None)))
        machine = dataclasses.replace(machine, lacks_delta_kernels=problem is not None)
        settled = settle(config, hf_config, machine, resumed)  # again, since torch code needs more memory
    precision = with_recipe(settled.precision, settled.config.precision, device)
    if ranks.rank == 0 and config.run.trackers:  # only this process uses trackers
        from llm_fp8.observability.trackers import require_trackers

        require_trackers(config.run.trackers)
    if config.model.use_te:
        prepare_te_decoder(sources.text_config(hf_config).hidden_size, device)
    packed_form = probe_hf_layers(settled, device)
    stored = sources.checkpoint_of(source, hf_config)  # after all checks, since it may download files
    hf_config, warning = sources.untied(hf_config, stored)
    if warning is not None:
        settled = settle(config, hf_config, machine, resumed)  # again, since lm_head has parameters of its own
        notes.append(warning)
    strategy = build_strategy(settled.mode, settled.config, ranks, precision)
    return RunPlan(
        **vars(settled) | {"precision": precision, "notes": (*settled.notes, *notes)},
        source=source,
        accelerator=strategy.accelerator,
        strategy=strategy,
        export_dtype=sources.stored_dtype(hf_config, stored, settled.parameter_dtype),  # before the model changes it
        stored=stored,
        packed_form=packed_form,
    )
