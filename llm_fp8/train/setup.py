"""The parts of a run that its options alone decide: engine, optimizer, precision and model, built in the order in
which they need each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from llm_fp8.config.options import Config
from llm_fp8.distributed.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.distributed.build import build_strategy
from llm_fp8.distributed.fsdp import FsdpStrategy
from llm_fp8.distributed.sharding_mode import ModeChoice
from llm_fp8.models.build import build_model, build_structure, decoder_layers
from llm_fp8.models.lora import add_adapters, gemms_per_weight, initialize_adapters_, needs_unfused_mlp
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.models.source import ModelSource
from llm_fp8.models.weights import fill_sharded
from llm_fp8.observability.step_profile import StepProfile
from llm_fp8.precision.certificate import Certificate, ExpectedKernels
from llm_fp8.precision.context import Precision, bf16_layers
from llm_fp8.precision.convert import convert_with_torchao, swap_linears
from llm_fp8.precision.coverage import Fp8Coverage, measure_coverage
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.precision.torchao import compile_layers
from llm_fp8.train.checkpoint import CheckpointManager
from llm_fp8.utils.ranks import LaunchRanks


def certifies(wanted: bool | None, device: torch.device) -> bool:
    """Whether a run records a step and judges it; `wanted` is --certify."""
    return device.type == "cuda" if wanted is None else wanted


class RunParts:
    """What a run is made of. `choose_strategy` comes before `build_model`."""

    def __init__(
        self,
        config: Config,
        hf_config: PretrainedConfig,
        accelerator: Accelerator,
        ranks: LaunchRanks,
        plan: PrecisionPlan,
        mode: ModeChoice,
    ) -> None:
        self.hf_config = hf_config
        self.mode = mode
        self.config = config
        self.accelerator = accelerator
        self.ranks = ranks
        self.device = accelerator.device
        self.folder = Path(config.run.output_dir or "")
        self.checkpoints = CheckpointManager(
            self.folder, config.run.save_total_limit, is_main=accelerator.is_main_process
        )
        self.plan = plan
        self.certifies = certifies(config.run.certify, accelerator.device)
        self.attention_backend: str | None = None
        self.recorded: StepProfile | None = None
        self.certificate: Certificate | None = None
        self.has_looked_for_waiting = False
        self.resident_gib = 0.0
        self.idle_fp8_keys: list[str] = []
        """What the launcher's fp8_config asked for and nothing here acts on, in sentences."""

    def say(self, text: str) -> None:
        """Print on the main process."""
        if self.accelerator.is_main_process:
            print(text, flush=True)

    def choose_strategy(self) -> None:
        """The strategy of the run's sharding mode, and --optimizer in it."""
        config, plan, choice = self.config, self.plan, self.mode
        self.engine = build_strategy(choice.mode, config, self.accelerator, self.ranks, plan.compute_dtype)
        self.optimizer_kind = self.engine.resolve_optimizer(config.optim.optimizer, plan.compute_dtype)
        self.parameter_dtype = self.engine.parameter_dtype(self.optimizer_kind, plan.compute_dtype)
        if self.ranks.world_size > 1:
            self.say(f"sharding: {choice.mode}{f', because {choice.reason}' if choice.reason else ''}")

    def describe_precision(self) -> None:
        """Say what runs, and loudly where it is not what was asked for."""
        plan = self.plan
        if plan.fallback_reason:
            self.say(
                f"WARNING: --fp8_scenario {plan.requested_scenario} FELL BACK to {plan.effective_scenario}: "
                f"{plan.fallback_reason}"
            )
        self.say(
            f"precision: {plan.name} (asked for: "
            f"{plan.requested}{f' {plan.requested_scenario}' if plan.requested_scenario else ''})"
        )
        if plan.backend == "torchao":
            self.say(
                "fp8 by torchao, EMULATED on the CPU: operands are rounded to fp8 and multiplied in a wider type, so "
                "this shows losses and no speed"
                if plan.emulated
                else "fp8 by torchao, with torch.compile for each decoder layer: first steps take longer, because "
                "they compile"
            )
        trained = str(self.parameter_dtype).removeprefix("torch.")
        if self.config.lora.lora_rank:
            frozen = str(self.weight_dtype).removeprefix("torch.")
            self.say(
                f"optimizer: {self.optimizer_kind}, adapters of rank {self.config.lora.lora_rank} in {trained}, "
                f"frozen model in {frozen}"
            )
        else:
            self.say(f"optimizer: {self.optimizer_kind}, parameters in {trained}")

    def build_model(
        self, source: ModelSource, hf_config: PretrainedConfig
    ) -> tuple[PreTrainedModel, TrainingModel, bool, Fp8Coverage]:
        """The model, what the loop calls, whether weights were loaded, and the census; the precision seam is
        attached to it.
        """
        model, loaded = self._decoder_with_adapters(source, hf_config)
        layers = decoder_layers(model)
        reasons = self._convert_linears(model, layers)
        self.attention_implementation: str = "te" if self.config.model.use_te else model.config._attn_implementation
        if self.attention_implementation == "eager" and self.config.model.attn_implementation == "auto":
            self.say(
                f"attention: eager, which is slow: transformers has no sdpa for models of type '{hf_config.model_type}'"
            )
        self.precision = self._attach_precision(model, layers)
        products = gemms_per_weight(model)
        census = measure_coverage(
            model,
            self.precision.fp8_modules,
            self.plan.compute_name,
            reasons,
            products,
            self.precision.num_fp8_gemms_per_weight,
            self.precision.lm_head_gemms(products),
        )
        self.say(census.describe())
        recomputed = self._checkpoint_layers(layers)
        self.promise = ExpectedKernels.of_model(self.precision, census, recomputed, products)
        training_model = TrainingModel(
            model, self.config.data.max_seq_length, self.plan.compute_dtype, self.precision.fp8_head
        )
        self._shard(training_model, layers)
        if self.engine.shards_parameters:
            loaded = fill_sharded(model, self.config.model, source, self.device, self.config.optim.seed)
            initialize_adapters_(model, self.config.optim.seed)
        if self.plan.backend == "torchao" and not self.plan.emulated:
            compile_layers(layers, recomputed=bool(recomputed))
        return model, training_model, loaded, census

    def _decoder_with_adapters(self, source: ModelSource, hf_config: PretrainedConfig) -> tuple[PreTrainedModel, bool]:
        """The model, and whether weights were loaded into it; one whose parameters the engine shards has no values
        yet.
        """
        options, lora, seed = self.config.model, self.config.lora, self.config.optim.seed
        shared: dict[str, Any] = {
            "parameter_dtype": self.weight_dtype,
            "compute_dtype": self.plan.compute_dtype,
            "device": self.device,
            "unfused_mlp": needs_unfused_mlp(lora),
        }
        loaded = False
        if self.engine.shards_parameters:
            model = build_structure(options, source, hf_config, **shared)
        else:
            model, loaded = build_model(options, source, hf_config, seed=seed, **shared)
        if lora.lora_rank:
            add_adapters(model, lora, self.parameter_dtype)
            if not self.engine.shards_parameters:
                initialize_adapters_(model, seed)
        return model, loaded

    def _convert_linears(self, model: PreTrainedModel, layers: nn.ModuleList) -> dict[str, str]:
        """Put the backend's linear layers into a Hugging Face decoder, for fp8; name -> reason for each one left
        alone.
        """
        if self.plan.backend == "torchao":
            recipe = dataclasses.replace(
                self.plan.recipe, enable_fsdp_float8_all_gather=self.config.parallel.fp8_all_gather
            )
            return convert_with_torchao(model, recipe, bf16_layers(self.config.precision, layers))
        if self.plan.recipe is not None and not self.config.model.use_te:
            return swap_linears(model)
        return {}

    def _attach_precision(self, model: PreTrainedModel, layers: nn.ModuleList) -> Precision:
        """The precision seam, attached to the model."""
        # FSDP hands modules their parameters in the compute dtype.
        module_dtype = self.plan.compute_dtype if self.engine.shards_parameters else self.parameter_dtype
        precision = Precision(self.plan, self.config.precision, self.device, module_dtype)
        precision.attach(model, layers)
        if self.config.lora.lora_rank and self.engine.caches_weight_casts:
            precision.keep_casts_of_frozen_weights()
        return precision

    def _checkpoint_layers(self, layers: nn.ModuleList) -> Sequence[nn.Module]:
        """The decoder layers that compute their forward pass again, as --gradient_checkpointing asks for."""
        options = self.config.model
        if not options.gradient_checkpointing:
            return ()
        uses_te = options.use_te or self.plan.te_recipe is not None
        return enable_gradient_checkpointing(
            layers,
            options.gradient_checkpointing_every,
            uses_te,
            reentrant=uses_te and self.engine.reentrant_te_checkpoints,
        )

    def _shard(self, training_model: TrainingModel, layers: nn.ModuleList) -> None:
        """Spread the parameters over the processes, with --fp8_params in fp8."""
        if self.config.parallel.fp8_params:
            assert isinstance(self.engine, FsdpStrategy)  # check_options saw to it
            self.engine.keep_in_fp8(self.precision)
        self.engine.shard(training_model, layers)

    @property
    def weight_dtype(self) -> torch.dtype:
        """In which the model itself is kept: `parameter_dtype`, or under LoRA the compute dtype, since a frozen model
        needs no master.

        fp32 where the latter is fp16, whose range is small.
        """
        if self.config.lora.lora_rank == 0:
            return self.parameter_dtype
        return torch.bfloat16 if self.plan.compute_dtype == torch.bfloat16 else torch.float32

    def parallel_record(self) -> dict[str, Any]:
        """How the run is spread over processes, as it came out."""
        return {"sharding_mode": self.engine.mode, "num_processes": self.accelerator.num_processes}
