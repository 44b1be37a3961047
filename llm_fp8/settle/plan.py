"""A run before its model exists: its decisions (`llm_fp8.settle`), the source of its weights, and the library objects
that everything else is built with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from llm_fp8.config.options import Config
from llm_fp8.distributed.build import build_strategy
from llm_fp8.distributed.process_group import device_of_process
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models import source as sources
from llm_fp8.optim.optimizers import OPTIMIZERS
from llm_fp8.precision.context import with_recipe
from llm_fp8.precision.te import prepare_te_decoder
from llm_fp8.settle.machine import look
from llm_fp8.settle.probe import probe
from llm_fp8.settle.settle import Settled, settle
from llm_fp8.step.loss_model import PackedForm
from llm_fp8.utils.output import say as print_line
from llm_fp8.utils.ranks import LaunchRanks
from te_llama import keeps_hf_layers


@dataclass(frozen=True, kw_only=True)
class RunPlan(Settled):
    """A settled run with the objects that exist before the model."""

    source: sources.ModelSource
    accelerator: Accelerator
    strategy: DistributedStrategy
    export_dtype: torch.dtype  # dtype of the stored weights, else `parameter_dtype`
    stored: sources.StoredCheckpoint | None  # the weights to load; None if weights are drawn
    packed_form: PackedForm | None  # for transformers' decoder; None for TE's decoder or without packing
    say: Callable[[str | None], None]  # prints a line on the main process; None prints nothing

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def stores_lower_bits(self) -> bool:
        """True if the weights to start from have bits that bf16 lacks."""
        stored_in_fp8 = self.stored is not None and self.stored.fp8 is not None
        return stored_in_fp8 or self.export_dtype in (torch.float32, torch.float16)

    @property
    def draws_lower_bits(self) -> bool:
        """True if master weights get random lower bits; the model computes with the upper half."""
        return self.precision.compute_name == "bf16" and not self.stores_lower_bits

    @property
    def rounds_weights(self) -> bool:
        """True if stored weights have bits that the model's bf16 weights lack."""
        return self.weight_dtype == torch.bfloat16 and self.stores_lower_bits

    @property
    def keeps_lower_bits(self) -> bool:
        """True if the bits that bf16 lacks go into the optimizer's remainders."""
        optimizer = OPTIMIZERS[self.optimizer_kind]
        return self.rounds_weights and optimizer.keeps_lower_bits and not self.config.trains_adapters

    @property
    def parallel_record(self) -> dict[str, Any]:
        return {"sharding_mode": self.strategy.mode, "num_processes": self.accelerator.num_processes}


def plan_run(config: Config, ranks: LaunchRanks, resumed: Mapping[str, Any] | None = None) -> RunPlan:
    """Settle the run on this machine (see `settle`) and build everything that precedes its model. Raise `UserError` if
    the machine, its packages or its memory do not allow the run. Collective.
    """
    device = device_of_process()
    source = sources.resolve_source(config.model)
    hf_config = sources.load_config(source)
    machine = look(config.precision, ranks)
    settled = settle(config, hf_config, machine, resumed)
    precision = with_recipe(settled.precision, settled.config.precision, device)
    if ranks.rank == 0 and config.run.trackers:  # only this process uses trackers
        from llm_fp8.observability.trackers import require_trackers

        require_trackers(config.run.trackers)
    packed_form = None
    if config.model.use_te:
        prepare_te_decoder(sources.text_config(hf_config).hidden_size, device)
    if not config.model.use_te or (settled.size.sizes is not None and keeps_hf_layers(hf_config)):
        packed_form = probe(settled.config, hf_config, device, precision.compute_dtype)
    stored = sources.checkpoint_of(source, hf_config)  # after whatever refuses a run, since it may download
    if untied := sources.untie(hf_config, stored):
        settled = settle(config, hf_config, machine, resumed)  # the head's parameters count too
    strategy = build_strategy(settled.mode, settled.config, ranks, precision)
    values = vars(settled) | {"precision": precision, "notes": (*settled.notes, *untied)}

    def say(text: str | None) -> None:
        if text and strategy.accelerator.is_main_process:
            print_line(text)

    return RunPlan(
        **values,
        source=source,
        accelerator=strategy.accelerator,
        strategy=strategy,
        export_dtype=sources.stored_dtype(hf_config, settled.parameter_dtype),  # building the model changes the entry
        stored=stored,
        packed_form=packed_form,
        say=say,
    )
