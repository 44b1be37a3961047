"""What is predicted: a model with the TE decoder, a recipe, the tokens of a step, and how it is sharded."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from transformers import PretrainedConfig

from llm_fp8.config.options import Config, OptimConfig, ParallelConfig
from llm_fp8.config.validation import fp8_params_recipes
from llm_fp8.optim.optimizers import OptimizerKind
from llm_fp8.tools.predict.calibration import MODES
from te_llama import DecoderSpec, decoder_spec, parameter_map

PREDICTED = ("bf16", "delayed", "current", "block")


@dataclass(frozen=True)
class ModelSize:
    """A decoder's sizes, in elements."""

    spec: DecoderSpec
    num_parameters: int
    """Tied ones once."""

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ModelSize:
        """Of a Hugging Face config. Raises `UnsupportedArchitecture` where there is no TE decoder for it."""
        spec = decoder_spec(config)
        shapes = (part.shape for parts in parameter_map(spec).values() for part in parts)
        return cls(spec, sum(math.prod(shape) for shape in shapes))

    @property
    def layer_linear(self) -> int:
        """Entries of the weight matrices of one decoder layer."""
        spec = self.spec
        return spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)

    @property
    def layer_weights(self) -> int:
        """`layer_linear` of all decoder layers."""
        return self.spec.num_layers * self.layer_linear

    @property
    def head(self) -> int:
        """Entries of the output projection, tied or not."""
        return self.spec.hidden_size * self.spec.vocab_size


@dataclass(frozen=True)
class StepWorkload:
    """One way to train a model."""

    model: ModelSize
    recipe: str
    """One of `PREDICTED`."""
    micro_batch_tokens: int
    """Positions of a micro-batch on one GPU, padding included."""
    micro_batches: int
    """Per optimizer step."""
    mean_length: float
    """Document length averaged over tokens, sum(l**2) / sum(l): the row length for rows of one document."""
    optimizer: OptimizerKind = "adamw_master"
    mode: str = "single"
    """One of `MODES`."""
    num_gpus: int = 1
    sync_every_micro_batch: bool = False
    recomputed_layers: int = 0
    """Decoder layers under gradient checkpointing."""
    bf16_layers: int = 0
    """Decoder layers kept in bf16 in an fp8 recipe."""
    fp8_lm_head: Literal["none", "gradients", "all"] = "none"
    """As the option; without effect in bf16."""
    flash_attention_4: bool = False
    """flash-attn 4 in place of cuDNN's attention."""
    fp8_params: bool = False
    """As the option; without effect in recipes that have no such weights (bf16, block)."""
    fp8_recast_weights: bool = False
    """As the option: what fsdp_full does, without it."""
    cuda_graphs: bool = False
    """As the option."""
    offload_optimizer: float = 0.0
    """As the option: the share of adamw_master's state that is in host memory."""

    def __post_init__(self) -> None:
        smallest = min(self.micro_batch_tokens, self.micro_batches, self.num_gpus, self.mean_length)
        for wrong, why in (
            (self.recipe not in PREDICTED, f"recipe '{self.recipe}' is none of {', '.join(PREDICTED)}"),
            (self.mode not in MODES, f"mode '{self.mode}' is none of {', '.join(MODES)}"),
            (smallest < 1, "tokens, micro-batches, GPUs and lengths are at least 1"),
            (
                (self.mode == "single") != (self.num_gpus == 1),
                f"mode '{self.mode}' does not go with {self.num_gpus} GPUs",
            ),
            (self.fp8_params and not self.sharded, f"mode '{self.mode}' has no weights that are gathered in fp8"),
        ):
            if wrong:
                raise ValueError(why)

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded over GPUs."""
        return self.mode.startswith("fsdp")

    @property
    def has_ddp(self) -> bool:
        """Whether DDP reduces gradients: into buckets of its own, and without the GEMMs' sums in that micro-batch."""
        return self.mode == "ddp" and not self.cuda_graphs

    @property
    def fp8_layers(self) -> int:
        """Decoder layers whose linear layers run in fp8."""
        return 0 if self.recipe == "bf16" else max(0, self.model.spec.num_layers - self.bf16_layers)

    @property
    def fp8_lm_head_gemms(self) -> int:
        """Of lm_head's three GEMMs those in fp8."""
        return 0 if self.recipe == "bf16" else {"none": 0, "gradients": 2, "all": 3}[self.fp8_lm_head]

    @property
    def fp8_weights(self) -> int:
        """Entries of the weights that are kept, and gathered, in fp8."""
        in_fp8 = self.fp8_params and self.recipe in fp8_params_recipes()
        return self.fp8_layers * self.model.layer_linear if in_fp8 else 0

    @property
    def keeps_casts(self) -> bool:
        """Whether fp8 casts of weights are kept until the step ends, as unsharded weights that are not fp8 are."""
        if self.sharded:
            return self.mode == "fsdp_grad" and not self.fp8_params
        return not self.fp8_recast_weights

    @property
    def accumulates(self) -> bool:
        """Whether gradients of micro-batches are accumulated before they are reduced."""
        return self.micro_batches > 1 and not self.sync_every_micro_batch

    @property
    def reductions(self) -> int:
        """How often a step reduces gradients over the GPUs."""
        return self.micro_batches if self.sync_every_micro_batch else 1

    @property
    def gathers(self) -> tuple[int, int]:
        """All-gathers in a step of a decoder layer's weights, and of the embedding's and head's."""
        if not self.sharded:
            return 0, 0
        return (1, 1) if self.mode == "fsdp_grad" else (2 * self.micro_batches, self.micro_batches)

    @property
    def tokens_per_step(self) -> int:
        """Positions of an optimizer step on all GPUs."""
        return self.micro_batch_tokens * self.micro_batches * self.num_gpus

    def with_recipe(self, recipe: str) -> StepWorkload:
        return dataclasses.replace(self, recipe=recipe)

    def config(self) -> Config:
        """The options that `llm_fp8.distributed.sharding_mode` reads."""
        return Config(
            optim=OptimConfig(gradient_accumulation_steps=self.micro_batches, offload_optimizer=self.offload_optimizer),
            parallel=ParallelConfig(sync_every_micro_batch=self.sync_every_micro_batch),
        )
