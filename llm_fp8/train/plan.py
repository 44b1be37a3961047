"""What is settled before a model exists: device, precision, sharding, optimizer, and that the machine can do it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from transformers import PretrainedConfig

import te_llama
from llm_fp8.config.options import AUTO_BATCH_SIZE, Config
from llm_fp8.config.recipes import precision_name
from llm_fp8.config.validation import check_declared, check_machine
from llm_fp8.distributed.build import build_accelerator, build_strategy
from llm_fp8.distributed.context_parallel import ContextGroup
from llm_fp8.distributed.memory import RunSize, settle_memory
from llm_fp8.distributed.process_group import decided_by_main, own_device, smallest_gpu_gib
from llm_fp8.distributed.sharding_mode import choose_mode, holds_frozen_in_fp8, num_shards, resolve_optimizer
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.build import count_parameters
from llm_fp8.models.fp8_checkpoint import Fp8Format
from llm_fp8.models.loss_model import PackedForm
from llm_fp8.models.probe import probe
from llm_fp8.models.source import ModelSource, load_config, resolve_source, stored_dtype
from llm_fp8.models.weights import StoredCheckpoint, checkpoint_of, untie
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.trackers import require_trackers
from llm_fp8.optim.optimizers import BYTES_PER_PARAMETER, OptimizerKind
from llm_fp8.optim.optimizers import parameter_dtype as trained_dtype
from llm_fp8.precision.plan import MIN_FP8_CAPABILITY, PrecisionPlan, resolve_precision
from llm_fp8.train.checkpoint import Checkpoint
from llm_fp8.utils.console import say as print_line
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.te_internals import require_te


@dataclass(frozen=True)
class RunPlan:
    """What is settled before the model exists."""

    config: Config
    source: ModelSource
    hf_config: PretrainedConfig
    precision: PrecisionPlan
    accelerator: Accelerator
    strategy: DistributedStrategy
    optimizer_kind: OptimizerKind
    parameter_dtype: torch.dtype  # that of trained parameters
    export_dtype: torch.dtype  # that of the stored weights, else `parameter_dtype`
    stored: StoredCheckpoint | None  # the weights that are loaded; None where they are drawn
    packed_form: PackedForm | None
    """How packed documents are given to transformers' decoder; None where it is TE's, or nothing is packed."""
    say: Callable[[str], None]  # prints a line on the main process
    measures_precision: bool = False
    """Whether --mixed_precision auto is to measure fp8, which `precision` is until then, against bf16."""
    num_asked_micro_batches: int = 1
    """Micro-batches of a step as the options have them; `config` has what they were merged to."""
    notes: tuple[str, ...] = ()  # what --batch_size auto and merged micro-batches came to, memory, sharding

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def folder(self) -> Path:
        return Path(self.config.run.output_dir or "runs")  # it is named when the precision is known

    @property
    def context_group(self) -> ContextGroup | None:
        """The ranks that share this one's sequences (--context_parallel_size), if there are any."""
        size = self.config.parallel.context_parallel_size
        return None if size == 1 else ContextGroup(size, self.accelerator.process_index % size)

    @property
    def stored_fp8(self) -> Fp8Format | None:
        """How the stored weights are scaled; None where they are not fp8, or none are loaded."""
        return None if self.stored is None else self.stored.fp8

    @property
    def weight_dtype(self) -> torch.dtype:
        """That of the model's weights: `parameter_dtype`, or under LoRA the compute dtype, since a frozen model needs
        no master weights; fp32 where that is fp16, whose range is small.
        """
        if self.config.lora.lora_rank == 0:
            return self.parameter_dtype
        return torch.bfloat16 if self.precision.compute_dtype == torch.bfloat16 else torch.float32

    @property
    def stores_lower_bits(self) -> bool:
        """Whether weights begin with bits that bf16 has not."""
        return self.export_dtype in (torch.float32, torch.float16) or self.stored_fp8 is not None

    @property
    def draws_lower_bits(self) -> bool:
        """Whether master weights get random ones, of which the model computes with the upper half."""
        return self.precision.compute_name == "bf16" and not self.stores_lower_bits

    @property
    def rounds_weights(self) -> bool:
        """Whether stored weights have bits that the model's bf16 ones have not."""
        return self.weight_dtype == torch.bfloat16 and self.stores_lower_bits

    @property
    def keeps_lower_bits(self) -> bool:
        """Whether those bits go into the remainders of the optimizer."""
        return self.rounds_weights and self.optimizer_kind == "adamw_master" and self.config.lora.lora_rank == 0

    @property
    def asked_batch_size(self) -> int:
        """Rows of a micro-batch before they were merged."""
        in_step = self.config.data.batch_size * self.config.optim.gradient_accumulation_steps
        return in_step // self.num_asked_micro_batches

    @property
    def takes_graphs(self) -> bool:
        """Whether micro-batches run as CUDA graphs, or may where the GPU is found idle (--cuda_graphs)."""
        # What of fp8's options is idle in a bf16 run of --mixed_precision auto is no matter.
        config, mode = self.config.with_options(cuda_graphs=True, mixed_precision="auto"), self.strategy.mode
        if self.config.model.cuda_graphs is not None:
            return self.config.model.cuda_graphs
        if not self.certifies or self.precision.compute_dtype != torch.bfloat16:
            return False  # nothing shows whether the GPU is idle
        if not self.strategy.shards_parameters and self.parameter_dtype != torch.bfloat16:
            return False
        with contextlib.suppress(UserError):
            check_declared(config, mode)
            return te_llama.decoder_sizes(self.hf_config).attention_dropout == 0
        return False

    @property
    def holds_frozen_in_fp8(self) -> bool:
        """Whether the frozen weights of an fp8 run with adapters exist in fp8 only."""
        possible = self.config.parallel.fp8_params or not self.strategy.shards_parameters
        in_fp8 = self.precision.te_recipe is not None
        return possible and in_fp8 and holds_frozen_in_fp8(self.config, self.strategy.mode)

    @property
    def certifies(self) -> bool:
        """Whether the run records a step and judges its kernels (--certify)."""
        wanted = self.config.run.certify
        return self.device.type == "cuda" if wanted is None else wanted

    @property
    def parallel_record(self) -> dict[str, Any]:
        return {"sharding_mode": self.strategy.mode, "num_processes": self.accelerator.num_processes}


def plan_run(config: Config, ranks: LaunchRanks, resumed: Checkpoint | None = None) -> RunPlan:
    """Resolve the options on this machine; `UserError` for what it cannot do, or its memory cannot hold. Collective.

    `config` passed `check_options`, and the process group exists. A run that continues `resumed` has its micro-batches
    where it can, and what --mixed_precision auto chose then.
    """
    device, num_asked_micro_batches = own_device(), config.optim.gradient_accumulation_steps
    source = resolve_source(config.model)
    hf_config = load_config(source)
    gpu_gib = smallest_gpu_gib(device)
    num_parameters = count_parameters(hf_config)
    mode, reason = choose_mode(config, ranks, num_parameters, gpu_gib)
    check_declared(config, mode)  # before 'auto' is bf16 on a machine without fp8, which options for fp8 allow
    is_auto, may_be_either = config.precision.mixed_precision == "auto", False
    if is_auto:
        may_be_either = device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY
        config = config.with_options(mixed_precision="fp8" if may_be_either else "bf16")
    precision = resolve_precision(config.precision, device)
    optimizer_kind = resolve_optimizer(config, mode, precision.compute_name, device.type)
    shards = num_shards(mode, ranks)
    notes: list[str] = []
    recipe = precision.effective_scenario or precision.effective
    # Of a resumed run too: --batch_size auto comes to the same rows again.
    may_be_bf16 = may_be_either or config.precision.fp8_until < 1
    run = RunSize(config, hf_config, recipe, mode, shards, num_parameters, may_be_bf16)
    if run.shards_in_fp8:
        run = run.changed(fp8_params=True)
        config = run.config
    if gpu_gib is not None or config.data.batch_size == AUTO_BATCH_SIZE:
        if gpu_gib is None:
            raise UserError("--batch_size auto counts a GPU's memory, and there is none here; give a number.")
        rows = None if resumed is None else resumed.micro_batch_rows
        config, notes = decided_by_main(functools.partial(settle_memory, run, gpu_gib, rows))
    elif config.model.gradient_checkpointing == "auto":
        config = config.with_options(gradient_checkpointing=0)
        notes.append("--gradient_checkpointing auto: without a GPU no layer is recomputed")
    if may_be_either and resumed is not None and not resumed.meta["fingerprint"]["precision"].startswith("fp8"):
        config = config.with_options(mixed_precision="bf16")
        precision = resolve_precision(config.precision, device)
    if is_auto:
        precision = dataclasses.replace(precision, requested="auto")
    _check_run(config, num_parameters, mode, precision, ranks, on_gpu=device.type == "cuda")
    packed_form = None
    if config.model.use_te:
        require_te("--use_te")
        with contextlib.suppress(te_llama.UnsupportedArchitecture):  # said when the model is looked at
            check_te_decoder(config, te_llama.decoder_sizes(hf_config), shards)
    else:
        packed_form = probe(config, hf_config, device, precision.compute_dtype)
    stored = checkpoint_of(source, hf_config)
    notes += untie(hf_config, stored)
    if ranks.world_size > 1:
        notes.append(f"sharding: {mode}{f', because {reason}' if reason else ''}")
    accelerator = build_accelerator(config, ranks, precision)
    strategy = build_strategy(mode, config, accelerator, ranks, precision.compute_dtype)
    parameter_dtype = trained_dtype(optimizer_kind)
    if mode.startswith("deepspeed"):  # which keeps fp32 master weights itself
        parameter_dtype = precision.compute_dtype
    return RunPlan(
        config=config,
        source=source,
        hf_config=hf_config,
        precision=precision,
        accelerator=accelerator,
        strategy=strategy,
        optimizer_kind=optimizer_kind,
        parameter_dtype=parameter_dtype,
        export_dtype=stored_dtype(hf_config, default=parameter_dtype),  # building the model changes the entry
        stored=stored,
        packed_form=packed_form,
        say=print_line if accelerator.is_main_process else lambda text: None,
        measures_precision=may_be_either and resumed is None,
        num_asked_micro_batches=num_asked_micro_batches,
        notes=tuple(notes),
    )


def _check_run(
    config: Config, num_parameters: int, mode: str, precision: PrecisionPlan, ranks: LaunchRanks, on_gpu: bool
) -> None:
    """Raise `UserError` for what this machine, its packages or the host's memory do not allow."""
    scenario = precision.effective_scenario
    check_machine(config, on_gpu=on_gpu, mode=mode, compute=precision.compute_name, scenario=scenario, ranks=ranks)
    if ranks.rank == 0:  # the only process that talks to trackers
        require_trackers(config.run.trackers)
    if share := config.optim.offload_optimizer:
        state_bytes = share * num_parameters * BYTES_PER_PARAMETER["adamw_master"].state
        needed_gib, free_gib = ranks.local_world_size * state_bytes / GIB, psutil.virtual_memory().available / GIB
        if needed_gib > free_gib:
            raise UserError(
                f"--offload_optimizer {share:g} takes {needed_gib:.1f} GiB of {free_gib:.1f} free on this host."
            )


def check_te_decoder(config: Config, spec: te_llama.DecoderSizes, num_shards: int) -> None:
    """Raise `UserError` where options cannot take effect with this decoder, split over `num_shards` GPUs."""
    if config.parallel.context_parallel_size > 1 and any(window is not None for window in spec.windows):
        raise UserError("--context_parallel_size cannot go with sliding-window attention (config.json); drop it.")
    if config.model.cuda_graphs and spec.attention_dropout > 0:
        raise UserError("--cuda_graphs would repeat the random numbers of attention_dropout (config.json); drop it.")
    if config.parallel.fp8_params:
        if rows := [rows for rows, _ in te_llama.layer_weight_shapes(spec) if rows % num_shards != 0]:
            raise UserError(f"--fp8_params cannot split {rows[0]} rows of a weight over {num_shards} GPUs; drop it.")


def announce(plan: RunPlan) -> None:
    """Print sharding, precision and optimizer, with a warning where fp8 fell back."""
    precision, say = plan.precision, plan.say
    for note in plan.notes:
        say(note)
    if precision.fallback_reason:
        asked, taken = precision.requested_scenario, precision.effective_scenario
        say(f"WARNING: --fp8_scenario {asked} FELL BACK to {taken}: {precision.fallback_reason}")
    say(f"precision: {precision.name} (asked for: {precision_name(precision.requested, precision.requested_scenario)})")
    if precision.backend == "torchao":
        say(f"fp8 by torchao{', EMULATED on the CPU in higher precision' if precision.emulated else ''}")
    trained, frozen = (str(each).removeprefix("torch.") for each in (plan.parameter_dtype, plan.weight_dtype))
    rank = plan.config.lora.lora_rank
    adapters = f"adapters of rank {rank} in {trained}, frozen model in {frozen}"
    say(f"optimizer: {plan.optimizer_kind}, {adapters if rank else f'parameters in {trained}'}")
