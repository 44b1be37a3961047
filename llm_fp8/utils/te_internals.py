"""Import of Transformer Engine, and its private names (read in 2.20), which no other file uses.

name                                                   test that notices a change
module._is_fsdp2                                       tests/step/test_wgrad_fusion_gpu.py
layernorm_mlp._get_act_func_supported_list             tests/kernels/test_swiglu_gpu.py
dot_product_attention._attention_backends              tests/tools/verify
FP8GlobalStateManager.reduce_and_update_fp8_tensors    tests/step/test_micro_batch_graphs_gpu.py
module._fp8_workspaces                                 tests/run/test_train_gpu.py
weight._quantizer                                      tests/models/test_lora_gpu.py
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from llm_fp8.utils.packages import TRANSFORMER_ENGINE


def require_te(why: str) -> Any:
    """Import and return `transformer_engine.pytorch`; raise a `UserError` that starts with `why` if that fails."""
    prefer_torchs_cudnn()
    return TRANSFORMER_ENGINE.require(why)


def prefer_torchs_cudnn() -> None:
    """Make Transformer Engine, if not yet imported, load torch's cuDNN and not an older one of the system: with two
    versions it silently uses unfused attention (2.7 times slower on an H200). A CUDNN_HOME or CUDNN_PATH that is set
    stays. Load all of cuDNN's libraries, since the first would look for the others in the system's folders.
    """
    if "transformer_engine" in sys.modules or os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH"):
        return
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    if spec is not None and spec.submodule_search_locations:
        folder = next(iter(spec.submodule_search_locations))
        os.environ["CUDNN_HOME"] = folder
        os.environ.pop("CUDNN_PATH", None)
        for library in sorted(Path(folder, "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def keep_weight_casts(modules: Iterable[Any], keep: bool) -> None:
    """Make modules keep fp8 casts of weights for later passes, or cast in every pass, as if FSDP2 sharded them."""
    for module in modules:
        if hasattr(type(module), "is_fsdp2"):
            module._is_fsdp2 = not keep  # modules look for FSDP2 only once


def forget_weight_casts(modules: Iterable[Any]) -> None:
    """Free the fp8 casts of weights that modules keep."""
    for module in modules:
        module._fp8_workspaces.clear()


def add_activation(name: str, backward_and_cast: Callable[..., Any]) -> None:
    """Add an activation `name` to LayerNormMLP: "swiglu" with a backward pass that also casts to fp8."""
    from transformer_engine.pytorch.module import layernorm_mlp

    # table(recipe) is a dict: name -> (forward, backward, backward with bias gradient and cast, or None).
    table = layernorm_mlp._get_act_func_supported_list
    if name in table(None):
        return

    def with_activation(recipe: Any = None) -> dict[str, tuple[Any, ...]]:
        functions = table(recipe)
        forward, backward, _ = functions["swiglu"]
        return {**functions, name: (forward, backward, None if recipe is None else backward_and_cast)}

    layernorm_mlp._get_act_func_supported_list = with_activation


@contextlib.contextmanager
def put_off_scale_updates() -> Iterator[None]:
    """Make passes in the block record their amax without updating delayed scaling's scales; see `update_scales`."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    nothing = staticmethod(lambda forward=True: None)
    with patch.object(FP8GlobalStateManager, "reduce_and_update_fp8_tensors", nothing):
        yield


def update_scales() -> None:
    """Take the maximum of each amax over the ranks; update scales and histories of forward and backward passes."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for forward in (True, False):
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=forward)


def attention_backend() -> str | None:
    """Return Transformer Engine's last choice of attention kernels; None before its first call."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    names = {"fused": "fused (cuDNN)", "flash": "flash-attn", "unfused": "unfused"}
    return next((name for kind, name in names.items() if _attention_backends[f"use_{kind}_attention"]), None)


def make_rowwise_only(weight: Any) -> None:
    """Stop later casts of an fp8 weight from making a transpose."""
    weight._quantizer.set_usage(rowwise=True, columnwise=False)
