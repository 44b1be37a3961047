"""The options of each variant, ours and the baselines. Imports nothing heavy: ours.py and baselines.py train them."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Literal

from llm_fp8.config.options import (
    SHARDING_MODES,
    Config,
    DataConfig,
    LoraConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)

if TYPE_CHECKING:
    from llm_fp8.optim.optimizers import OptimizerKind
    from llm_fp8.tools.bench.workload import Workload

OPTIMISATION = OptimConfig(learning_rate=1e-5, lr_scheduler="constant", num_warmup_steps=0)
"""The same of every variant from the first step on, so that losses can be compared."""


@dataclasses.dataclass(frozen=True)
class OurVariant:
    """How this project trains a workload."""

    precision: PrecisionConfig
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    use_te: bool = True
    flash_attention_4: bool = False
    gradient_checkpointing: bool = False
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    optimizer: OptimizerKind | Literal["auto"] = "auto"

    @property
    def computes_in_fp8(self) -> bool:
        return self.precision.mixed_precision == "fp8"

    def config(self, work: Workload) -> Config:
        model = dataclasses.replace(
            work.model_options,
            use_te=self.use_te,
            gradient_checkpointing=self.gradient_checkpointing,
            attn_implementation="flash_attention_4" if self.flash_attention_4 else "auto",
        )
        return Config(
            model=model,
            precision=self.precision,
            data=DataConfig(max_seq_length=work.seq_length, batch_size=work.batch_size, packing=True),
            optim=dataclasses.replace(
                OPTIMISATION,
                gradient_accumulation_steps=work.micro_batches,
                max_steps=work.num_steps,
                optimizer=self.optimizer,
            ),
            run=RunConfig(output_dir=os.devnull),  # nothing is written
            lora=self.lora,
            parallel=self.parallel,
        )


@dataclasses.dataclass(frozen=True)
class Baseline:
    name: str
    compiled: bool = False
    """Per decoder layer."""
    torchao_recipe: str | None = None
    accelerate_te: bool = False
    te_autocast: bool = False
    deepspeed_config: str = ""
    """DeepSpeed's file under a deepspeed mode; empty: ours."""

    @property
    def computes_in_fp8(self) -> bool:
        return self.accelerate_te or self.te_autocast or self.torchao_recipe is not None


DEEPSPEED_MODES = tuple(mode for mode in SHARDING_MODES if mode.startswith("deepspeed_"))
BASELINE_MODES = ("ddp", "fsdp_full", *DEEPSPEED_MODES)
"""How a baseline is spread over several GPUs; under DeepSpeed in bf16 alone."""
REFERENCE = "hf_bf16"
"""The baseline that others are compared with, where it is measured."""
BASELINES = {
    baseline.name: baseline
    for baseline in (
        Baseline("hf_bf16"),
        Baseline("hf_bf16_compiled", compiled=True),
        Baseline("accelerate_te", accelerate_te=True),
        Baseline("te_autocast", te_autocast=True),
        Baseline("torchao_tensorwise", compiled=True, torchao_recipe="tensorwise"),
        Baseline("torchao_rowwise", compiled=True, torchao_recipe="rowwise"),
    )
}
