"""Context parallelism on GPUs gives the loss and every gradient of the same model without it.

    torchrun --nproc_per_node=2 tests/support/context_parallel_check.py [--output FILE]        (or 4)

All processes form one context group. For each case three models with the same weights train on the same batch:

    exact    fp32, the whole batch on every GPU
    plain    in the case's precision, the whole batch on every GPU
    split    in the case's precision, a slice of the batch on each GPU, loss and gradients summed over them

Neither of the last two is the truth, so no fixed tolerance would do. Plain's distance from exact is what the precision
costs; split may be `EXCESS` times as far from exact, plus `FLOOR`. It rounds a little more: attention's output once per
step of the ring instead of once, and a weight's gradient once per GPU instead of once. A wrong chunk, position or
document is off by tenths: the cases named "control" give a rank the rotary angles of another and must fail.

Where the embedding is not tied, PAD's row of it must have a gradient of exactly zero: PAD occurs in padding only.

Rank 0 prints a JSON line per case. The exit code is 1 if any case does not come out as it should.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # cuBLAS reads it once; the exact model's fp32 would be TF32 otherwise
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

import te_llama
from llm_fp8.config.options import PrecisionConfig
from llm_fp8.data.collate import Batch, PackedCollate, PaddedCollate, document_multiple
from llm_fp8.data.pack import pack
from llm_fp8.data.tokenise import Document
from llm_fp8.distributed.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.distributed.context_parallel import ContextGroup
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.models.parity import relative_difference
from llm_fp8.precision.context import Precision
from llm_fp8.precision.plan import resolve_precision
from llm_fp8.utils.te_import import require_te
from tests.support.check_records import report, write_records
from tests.support.families import family_config

EXCESS = 2.0
FLOOR = 2e-3
EVAL_TOLERANCE = {"bf16": 1e-3, "delayed": 1e-2, "current": 1e-2}
"""Relative difference between the loss in training and in evaluation mode: the same kernels, but in fp8 with newer
scales.
"""
STEPS = {"delayed": 3}
"""Passes before the one that is compared: delayed scaling needs them to find its scales."""

MAX_SEQ_LENGTH = 1024
PAD = 2
LENGTHS = [700, 1, 33, 258, 511, 130, 317, 64, 5, 1000]

OPTIONS = {
    "fp32": PrecisionConfig(mixed_precision="no"),
    "bf16": PrecisionConfig(mixed_precision="bf16"),
    "delayed": PrecisionConfig(mixed_precision="fp8", fp8_scenario="delayed"),
    "current": PrecisionConfig(mixed_precision="fp8", fp8_scenario="current"),
}


@dataclass(frozen=True)
class Case:
    """One comparison."""

    family: str
    layout: str
    precision: str
    recompute: bool = False
    control: bool = False
    """Whether it is made wrong on purpose."""


CASES = [
    *(
        Case("llama3_rope_gqa", layout, precision)
        for layout in ("packed", "padded")
        for precision in ("bf16", "delayed", "current")
    ),
    *(Case("qwen3_qk_norm_head_dim", layout, "bf16") for layout in ("packed", "padded")),
    Case("qwen3_qk_norm_head_dim", "packed", "delayed"),
    Case("qwen2_qkv_bias_tied", "packed", "bf16"),
    Case("qwen2_qkv_bias_tied", "padded", "current"),
    Case("llama3_rope_gqa", "packed", "bf16", recompute=True),
    Case("llama3_rope_gqa", "packed", "delayed", recompute=True),
    Case("llama3_rope_gqa", "packed", "bf16", control=True),
]


@dataclass
class Result:
    """Of one pass: losses are means over supervised tokens, gradients fp32 by parameter name."""

    loss: float
    eval_loss: float
    gradients: dict[str, Tensor]


def documents() -> list[Document]:
    """Random tokens that are never PAD; the first third of each document is prompt."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 1024, size=length) for length in LENGTHS]
    return [Document(tokens, np.arange(len(tokens)) >= len(tokens) // 3, row) for row, tokens in enumerate(ids)]


def whole_batch(layout: str, context_size: int) -> Batch:
    """The documents in rows of MAX_SEQ_LENGTH tokens, and a row without any."""
    found = documents()
    if layout == "padded":
        collate = PaddedCollate(len(found) + 2, MAX_SEQ_LENGTH, PAD, context_size=context_size)
        return collate([[document] for document in found])
    plan = pack(LENGTHS, MAX_SEQ_LENGTH, document_multiple(context_size))
    rows = [[found[i] for i in plan[row]] for row in range(len(plan))]
    return PackedCollate(len(rows) + 1, MAX_SEQ_LENGTH, PAD, context_size)(rows)


def build(family: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model with the weights that every model of this family has, which bf16 can hold."""
    config = family_config(family)
    config.max_position_embeddings = 2 * MAX_SEQ_LENGTH  # more than are used
    model = te_llama.build_te_model(config, torch.bfloat16, device)
    generator = torch.Generator(device=device).manual_seed(0)
    te_llama.initialize_weights_(model, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases that are not one and zero
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, device=device))
    if dtype == torch.bfloat16:
        return model
    same = te_llama.build_te_model(config, dtype, device)
    weights = te_llama.te_parameters(model)
    with torch.no_grad():
        for name, parameter in te_llama.te_parameters(same).items():
            parameter.copy_(weights[name])
    return same


def run(case: Case, precision_name: str, batch: Batch, group: ContextGroup, device: torch.device) -> Result:
    """Loss and gradients of `batch`, whole or a slice, summed over the ranks of `group`."""
    options = OPTIONS[precision_name]
    dtype = torch.float32 if precision_name == "fp32" else torch.bfloat16
    model = build(case.family, dtype, device)
    layers = decoder_layers(model)
    precision = Precision(resolve_precision(options, device), options, device, dtype)
    precision.attach(model, layers)
    if case.recompute:
        enable_gradient_checkpointing(layers, 1, uses_te=True)
    group.attach(layers)
    if case.control and group.size > 1:
        for layer in layers:
            layer.context_rank = (layer.context_rank + 1) % group.size
    training_model = TrainingModel(model, MAX_SEQ_LENGTH, dtype).train()
    num_supervised = summed(torch.tensor(batch.num_supervised_tokens, device=device), group)
    batch = batch.to(device)
    for _ in range(STEPS.get(precision_name, 0) + 1):
        training_model.zero_grad(set_to_none=True)
        with precision.context(first_microbatch=None):
            loss = training_model(batch)[0] / num_supervised
        loss.backward()
    whole_gradients = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    gradients = {
        name: summed(gradient.float(), group) for name, gradient in by_hf_matrix(model, whole_gradients).items()
    }
    training_model.eval()
    with torch.no_grad(), precision.preserving_state(), precision.context(first_microbatch=None):
        eval_loss = training_model(batch)[0] / num_supervised
    return Result(float(summed(loss.detach(), group)), float(summed(eval_loss, group)), gradients)


def by_hf_matrix(model: PreTrainedModel, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients with fused matrices taken apart, so that a large part does not hide a small one; vectors stay
    whole.

    (The gradient of k's bias alone would be nothing but rounding, because softmax does not see a shift of all keys.)
    """
    found = {}
    for te_name, parts in te_llama.parameter_map(te_llama.decoder_spec(model.config)).items():
        gradient = gradients[te_name]
        if gradient.ndim == 1:
            found[te_name] = gradient
        else:
            found |= {part.hf_name: gradient[part.start : part.stop] for part in parts}
    return found


def summed(tensor: Tensor, group: ContextGroup) -> Tensor:
    """The sum over the ranks of the group; what one rank has where it holds the whole batch."""
    if group.size > 1:
        dist.all_reduce(tensor, group=group.process_group)
    return tensor


def differences(result: Result, exact: Result) -> dict[str, float]:
    """Relative difference of the loss and each gradient."""
    found = {name: relative_difference(gradient, exact.gradients[name]) for name, gradient in result.gradients.items()}
    return {"loss": abs(result.loss - exact.loss) / abs(exact.loss), **found}


def compare(case: Case, group: ContextGroup, device: torch.device) -> dict[str, object]:
    """The record of a case; `as_expected` says whether it came out as it should."""
    alone = whole_batch(case.layout, 1)  # without the padding that splitting needs
    exact = run(case, "fp32", alone, ContextGroup(), device)
    plain = differences(run(case, case.precision, alone, ContextGroup(), device), exact)
    whole = whole_batch(case.layout, group.size)
    result = run(case, case.precision, group.split(whole), group, device)
    split = differences(result, exact)
    limits = {name: EXCESS * plain[name] + FLOOR for name in plain}

    def excess(name: str) -> float:
        ratio = split[name] / limits[name]
        return math.inf if math.isnan(ratio) else ratio

    worst = max(split, key=excess)
    eval_difference = abs(result.eval_loss - result.loss) / result.loss
    embedding = result.gradients["model.embed_tokens.weight"]
    tied = "lm_head.weight" not in exact.gradients
    padding_gradient = None if tied else float(embedding[PAD].abs().max())
    within = (
        split.keys() == exact.gradients.keys() | {"loss"}
        and split[worst] <= limits[worst]
        and eval_difference <= EVAL_TOLERANCE[case.precision]
        and padding_gradient in (None, 0.0)
    )
    return {
        **vars(case),
        "context_size": group.size,
        "attention": te_llama.attention_backend(),
        "num_tokens": whole.num_tokens,
        "loss": result.loss,
        "exact_loss": exact.loss,
        "loss_difference": split["loss"],
        "loss_difference_plain": plain["loss"],
        "eval_difference": eval_difference,
        "worst": worst,
        "difference": split[worst],
        "difference_plain": plain[worst],
        "limit": limits[worst],
        "padding_gradient": padding_gradient,
        "within_limits": within,
        "as_expected": within != case.control,
    }


def check(cases: Sequence[Case], device: torch.device) -> bool:
    """Run the cases and print their records; true where all came out as they should, on every rank."""
    group = ContextGroup.of_rank(dist.get_world_size(), dist.get_rank()).connected("cuda")
    all_good = True
    for case in cases:
        record = compare(case, group, device)
        good = torch.tensor(int(bool(record["as_expected"])), device=device)
        dist.all_reduce(good, dist.ReduceOp.MIN)
        all_good &= bool(good)
        if dist.get_rank() == 0:
            report(record)
    return all_good


def main() -> int:
    """Join the launch, check, and say so by the exit code."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    require_te("context parallelism")
    dist.init_process_group("nccl", device_id=device)
    try:
        if dist.get_world_size() < 2:
            print("start it with torchrun --nproc_per_node=2 or more", file=sys.stderr)
            return 2
        all_hold = check(CASES, device)
        if dist.get_rank() == 0:
            write_records(all_hold)
        return 0 if all_hold else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
