"""Compile the decoder layers of transformers' models by torch.compile, in place and one by one.

Layers of one kind share their compiled code. On an H200, compiled layers of Gemma 3 4B were 1.43 times as fast as eager
ones in bf16 and, with torchao's modules in fp8, 1.58 times as fast as eager ones with Transformer Engine's. te.Linear
(2.20) breaks the graph of a layer if it keeps casts or delays scales; else its operators are launched too slowly.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterable

from torch import nn

from llm_fp8.config.options import Config, PrecisionConfig
from llm_fp8.config.validation import refusal
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.utils.torch_internals import compile_all_kinds, recompilation_reasons


def missing_for_compiler() -> str | None:
    """Return what torch.compile lacks to compile for this machine's GPU, or None if nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang", "cc"))):
        return "Triton finds no C compiler (install gcc, or set CC to one)"
    return None


def why_eager(config: Config, mode: str, precision: PrecisionPlan, no_compiler: str | None) -> str | None:
    """Return why decoder layers are not compiled in the sharding `mode` and in `precision`, or None if they are.
    `no_compiler` is the reason why torch.compile does not work here, which --compile ignores.
    """
    if config.model.compile is False:
        return "--no_compile"
    in_effect = {"mixed_precision": precision.effective, "fp8_backend": precision.backend or "auto"}
    if refused := refusal(config.with_options(**vars(PrecisionConfig()) | in_effect, compile=True), mode):
        return refused.rpartition(": ")[2]
    return None if config.model.compile else no_compiler


def compile_layers(layers: Iterable[nn.Module], recomputed: bool) -> None:
    """Compile each layer at its first call. `recomputed` says that layers recompute activations."""
    with contextlib.suppress(AttributeError):  # layers compile even if another torch renames what these use
        compile_all_kinds(without_ddp_cuts=recomputed)
        recompilation_reasons()  # forget those of an earlier run in this process
    for layer in layers:
        layer.compile()
