"""Weights into the model of a run, and the parity check.

Frozen weights that are held in fp8 take memory in bf16 a decoder layer at a time. Each layer is filled, cast and freed
before the next is filled, so a model is loaded wherever its fp8 weights fit. The parity check needs room for copies of
a layer in fp32: it goes through the files before that, and keeps nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from llm_fp8.data.collate import Batch
from llm_fp8.models.fill import fill_weights, filled_layers
from llm_fp8.models.model import Model
from llm_fp8.models.parity import check_parity
from llm_fp8.observability.metrics import GIB
from llm_fp8.precision.context import Precision
from llm_fp8.run.plan import RunPlan
from llm_fp8.step.loss_model import TrainingModel
from llm_fp8.utils.torch_internals import free_memory_


def load_weights(
    plan: RunPlan,
    model: Model,
    training_model: TrainingModel,
    precision: Precision,
    first_batch: Batch | None,
    holds_in_fp8: bool,
) -> None:
    """Fill `model` where it is not yet, and with `first_batch` check its TE decoder and its stored weights against
    Hugging Face's. With `holds_in_fp8` the modules in fp8 have no memory before, and fp8 weights afterwards.
    `training_model` is the model with the loss. Collective.
    """
    where = plan.device, plan.config.optim.seed
    shards_parameters = plan.strategy.shards_parameters
    full_layers: Iterable[nn.Module] = model.layers
    if holds_in_fp8:
        full_layers = _freed_again(filled_layers(model, model.layers, *where), precision)
        if not shards_parameters:
            model.module.tie_weights()  # undone by moving
    elif shards_parameters:
        fill_weights(model, *where, plan.keeps_lower_bits)
    if first_batch is not None:
        context = plan.strategy.context_group
        comparison = check_parity(
            model.module,
            full_layers,
            (first_batch if context is None else context.on_its_own(first_batch)).to(plan.device),
            plan.config.data.max_seq_length // (1 if context is None else context.size),
            dtype=plan.precision.compute_dtype if shards_parameters else plan.weight_dtype,
            full_tensor=plan.strategy.full_tensor,
            stored=model,
        )
        plan.say(comparison)
    if not holds_in_fp8:
        return
    dropped = 0
    for layer in filled_layers(model, model.layers, *where):
        if shards_parameters:
            from llm_fp8.distributed.fp8_params import keep_weights_in_fp8

            keep_weights_in_fp8(layer, precision)
        else:
            from llm_fp8.precision.frozen import hold_in_fp8

            dropped += hold_in_fp8(layer, precision)
    if shards_parameters:
        plan.say("frozen weights are sharded and gathered in fp8 only")
        return
    plan.say(f"frozen weights are held in fp8 only: {dropped / GIB:.1f} GiB of bf16 ones were cast as they were read")
    # DDP would send them to the other ranks, as torch sees them: in bf16.
    frozen = [name for name, parameter in training_model.named_parameters() if not parameter.requires_grad]
    training_model._ddp_params_and_buffers_to_ignore = frozen  # type: ignore[assignment]


def _freed_again(layers: Iterable[nn.Module], precision: Precision) -> Iterator[nn.Module]:
    """Each of `layers`, of whose modules in fp8 the memory is freed when the next is asked for."""
    for layer in layers:
        yield layer
        for module in precision.fp8_modules.intersection(layer.modules()):
            for parameter in module.parameters(recurse=False):
                free_memory_(parameter)
