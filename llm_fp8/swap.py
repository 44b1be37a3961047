"""fp8 for Hugging Face architectures: `nn.Linear` swapped for TE's or torchao's, and the census of what computes in what.

Without --use_te the decoder stays Hugging Face's and only its linear layers change. The parameters are kept as they are (the same
objects), so tied weights stay tied, checkpoints keep their names and whoever holds the parameters holds the right ones. Left
alone: the output head and embeddings, whose rounding would go straight into the loss, and layers whose sizes are not multiples of 16,
which fp8 GEMMs cannot take. The census lists both, with reasons: an fp8 run that converted little should be seen at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn

from llm_fp8 import torchao_fp8
from llm_fp8.adapter_names import is_adapter
from llm_fp8.fp8_head import SIZE_MULTIPLE
from llm_fp8.precision import PRODUCTS_OF_TRAINED, linear_weights, require_te

HEAD_NAMES = ("lm_head", "embed_out", "output_layer", "score", "classifier")
"""Last name components of modules that produce logits; what `output_head` finds is one under any name."""


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that transformers calls the model's output embeddings; None where `model` has none or is not transformers'."""
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def swap_linears(model: nn.Module) -> dict[str, str]:
    """Replace the `nn.Linear` modules of `model` by TE's in place; returns name -> reason for each one left alone."""
    te = require_te("--mixed_precision fp8")

    class SwappedLinear(te.Linear):  # type: ignore[name-defined]
        """te.Linear that is called like nn.Linear; `is_first_microbatch` is an attribute, as in te_llama.TEDecoderLayer."""

        is_first_microbatch: bool | None = None

        def forward(self, inputs: Any) -> Any:
            return super().forward(inputs, is_first_microbatch=self.is_first_microbatch)

    left: dict[str, str] = {}
    head = output_head(model)
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, linear in linears:
        reason = reason_to_leave(name, linear, head)
        if reason:
            left[name] = reason
            continue
        swapped = SwappedLinear(
            linear.in_features, linear.out_features, bias=linear.bias is not None, params_dtype=linear.weight.dtype, device="meta"
        )
        swapped.weight = linear.weight
        if linear.bias is not None:
            swapped.bias = linear.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped)
    return left


def convert_with_torchao(model: nn.Module, config: Any, kept_layers: Iterable[nn.Module] = ()) -> dict[str, str]:
    """Replace the `nn.Linear` modules of `model` by torchao's in place, but for those in `kept_layers`; name -> reason for each one left alone.

    `config` is a `Float8LinearConfig`.
    """
    kept = {module for layer in kept_layers for module in layer.modules()}
    head = output_head(model)

    def reason(name: str, linear: nn.Linear) -> str | None:
        return reason_to_leave(name, linear, head) or ("first or last decoder layers" if linear in kept else None)

    return torchao_fp8.convert_linears(model, config, reason)


def reason_to_leave(name: str, linear: nn.Linear, head: nn.Module | None) -> str | None:
    """Why an fp8 run leaves this layer as it is; None where it is swapped. `head` is the model's output head."""
    if is_adapter(name):
        return "adapter"
    if linear is head or name.rpartition(".")[2] in HEAD_NAMES:
        return "output head"
    if linear.in_features % SIZE_MULTIPLE or linear.out_features % SIZE_MULTIPLE:
        return f"size {linear.in_features} x {linear.out_features} is not a multiple of {SIZE_MULTIPLE}"
    return None


@dataclass(frozen=True)
class Census:
    """Which linear weights compute in fp8. FLOPs per token are 2 per weight and product, so where all are trained, shares of weights are shares of FLOPs."""

    num_fp8_weights: int
    """Elements of the weights of modules in fp8; the output head is none of them, though some of its products may run in fp8."""
    num_linear_weights: int
    """Elements of all linear weights, the output head included (also where it is the tied embedding)."""
    converted: dict[str, int] = field(default_factory=dict)
    """Name pattern (layer numbers as *) -> number of modules in fp8."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name pattern -> number of modules and the reason why they are not in fp8."""
    fp8_flops_per_token: float = 0.0
    """2 times the elements of a weight times its products in fp8 in a micro-batch (3, or fewer where it is frozen), summed over weights."""
    linear_flops_per_token: float = 0.0
    """The same of all linear weights."""
    num_head_weights: int = 0
    """Elements of the output head's weight."""
    num_fp8_head_products: int = 0
    """Of the head's products in a micro-batch (3, or 2 where it is frozen) those that --fp8_lm_head puts into fp8."""

    @property
    def fp8_linear_flop_share(self) -> float:
        """Share of the linear layers' FLOPs that run in fp8, 0 to 1."""
        if not self.linear_flops_per_token:
            return self.num_fp8_weights / self.num_linear_weights
        return self.fp8_flops_per_token / self.linear_flops_per_token

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return {
            "fp8_linear_flop_share": self.fp8_linear_flop_share,
            "num_fp8_weights": self.num_fp8_weights,
            "num_linear_weights": self.num_linear_weights,
            "num_head_weights": self.num_head_weights,
            "num_fp8_head_products": self.num_fp8_head_products,
            "converted": self.converted,
            "skipped": self.skipped,
        }

    def describe(self) -> str:
        """A few lines for the terminal; one where nothing is in fp8."""
        if not self.num_fp8_weights:
            return "linear layers in fp8: none"
        lines = [f"linear layers in fp8: {self.fp8_linear_flop_share:.1%} of linear FLOPs"]
        lines += [f"  fp8   {pattern} x {count}" for pattern, count in self.converted.items()]
        lines += [f"  other {pattern} x {reason}" for pattern, reason in self.skipped.items()]
        return "\n".join(lines)


def take_census(
    model: nn.Module,
    fp8_modules: Iterable[nn.Module],
    compute: str,
    reasons: dict[str, str],
    products: Mapping[nn.Module, int] = MappingProxyType({}),
    most_in_fp8: int = PRODUCTS_OF_TRAINED,
    products_of_head: Mapping[nn.Module, int] = MappingProxyType({}),
) -> Census:
    """Count the linear weights of `model`; `compute` names the precision of what is not in fp8, `reasons` says why for some names.

    `products`: `llm_fp8.lora.products_per_weight`. `most_in_fp8`: products of a weight that the recipe computes in fp8. `products_of_head`:
    `llm_fp8.precision.Precision.products_of_head`.
    """
    in_fp8, head = set(fp8_modules), output_head(model)
    converted: Counter[str] = Counter()
    skipped: Counter[tuple[str, str]] = Counter()
    num_fp8 = num_all = num_head = fp8_products = all_products = 0
    for name, module in model.named_modules():
        weights = linear_weights(module)
        if not weights:
            continue
        size = sum(weight.numel() for weight in weights)
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        num_all += size
        is_head = module is head or module in products_of_head or name.rpartition(".")[2] in HEAD_NAMES
        num_head += size * is_head
        num_products = products.get(module, PRODUCTS_OF_TRAINED)
        all_products += size * num_products
        if module in in_fp8:
            num_fp8 += size
            fp8_products += size * min(num_products, most_in_fp8)
            converted[pattern] += 1
        else:
            known = "adapter" if is_adapter(name) else "output head" if is_head else ""
            why = reasons.get(name) or known
            if module in products_of_head:
                in_part = products_of_head[module]
                fp8_products += size * in_part
                why = f"output head, {in_part} of {num_products} products in fp8"
            skipped[pattern, f"{compute}{f' ({why})' if why else ''}"] += 1
    return Census(
        num_fp8_weights=num_fp8,
        num_linear_weights=num_all,
        num_head_weights=num_head,
        num_fp8_head_products=sum(products_of_head.values()),
        fp8_flops_per_token=2.0 * fp8_products,
        linear_flops_per_token=2.0 * all_products,
        converted=dict(converted),
        skipped={pattern: f"{count} {reason}" for (pattern, reason), count in skipped.items()},
    )
