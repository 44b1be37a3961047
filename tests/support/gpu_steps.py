"""Build a small random model on a GPU in a chosen precision, and run forward and backward passes of it."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

import te_llama
from llm_fp8.config.options import LoraConfig, PrecisionConfig
from llm_fp8.config.recipes import row_of
from llm_fp8.models.build import fill_weights
from llm_fp8.models.lora import adapters_of, add_adapters, initialize_adapters_, needs_unfused_mlp
from llm_fp8.models.model import Model, decoder_layers
from llm_fp8.observability.kernel_trace import kernel_times, record_kernels
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import gemms_per_weight, measure_coverage
from llm_fp8.step.loss_model import TrainingModel
from tests.support.batches import S, packed_batch
from tests.support.families import family_config
from tests.support.small import length_config, precision_on

SCENARIOS = ["default", "current", "block", "backward"]

BF16 = PrecisionConfig(mixed_precision="bf16")
NO_LORA = LoraConfig()


def fp8(**options) -> PrecisionConfig:
    return PrecisionConfig(mixed_precision="fp8", **options)


def build(
    options: PrecisionConfig, device, use_te: bool = True, family: str = "llama3_rope_gqa", lora: LoraConfig = NO_LORA
):
    """Return a small random `TrainingModel`, its `Precision` and its fp8 coverage. `lora` may add adapters."""
    plan = precision_on(options, device)
    precision = Precision(plan, options, device, torch.bfloat16)
    config = family_config(family)
    if use_te:
        model = te_llama.build_te_model(config, torch.bfloat16, device, unfused_mlp=needs_unfused_mlp(lora))
        fill_weights(Model(model), device)
    else:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if lora.lora_rank:
        add_random_adapters_(model, lora, torch.bfloat16)
    reasons = precision.attach(model, decoder_layers(model), converts=not use_te)
    gemms = gemms_per_weight(Model(model))
    in_fp8 = row_of(plan.effective_scenario).gemms_in_fp8
    coverage = measure_coverage(model, precision.fp8_modules, plan.compute_name, reasons, gemms, in_fp8)
    return TrainingModel(model, length_config(S), torch.bfloat16), precision, coverage


def add_random_adapters_(model, lora: LoraConfig, dtype: torch.dtype) -> None:
    """Freeze `model` and add adapters with random A and B. Hugging Face's and the TE decoder get the same values."""
    add_adapters(Model(model), lora, dtype)
    initialize_adapters_(model, 0)
    with torch.no_grad():
        for number, (_, adapter) in enumerate(sorted(adapters_of(model).items())):
            adapter.b.copy_(0.02 * torch.randn(adapter.b.shape, generator=torch.Generator().manual_seed(number)))


def step(model, precision, batch, num_micro_batches: int = 1) -> torch.Tensor:
    """Run forward and backward passes on the same batch `num_micro_batches` times. Return the loss of the last pass."""
    for number in range(num_micro_batches):
        with precision.context(first_microbatch=number == 0 if num_micro_batches > 1 else None):
            loss = model(batch)[0] / batch.num_supervised_tokens
        loss.backward()
    return loss.detach()


MICRO_BATCHES = 2


def third_step_kernels(model, precision, device):
    batch = packed_batch(device)
    for _ in range(2):
        step(model, precision, batch, MICRO_BATCHES)
    with record_kernels() as recorded:
        step(model, precision, batch, MICRO_BATCHES)
    return kernel_times(recorded)
