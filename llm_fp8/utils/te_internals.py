"""Import Transformer Engine, and use its private names (checked in 2.20). Other files do not use them,
except a subclass of HybridQuantizedTensorStorage in llm_fp8/kernels/fp8_columns.py.

name                                                   test that notices a change
module._is_fsdp2                                       tests/step/test_wgrad_fusion_gpu.py
layernorm_mlp._get_act_func_supported_list             tests/kernels/test_swiglu_gpu.py
dot_product_attention._attention_backends              tests/tools/verify
FP8GlobalStateManager.reduce_and_update_fp8_tensors    tests/step/test_micro_batch_graphs_gpu.py
weight._quantizer                                      tests/models/test_lora_gpu.py
HybridQuantizedTensorStorage's attributes              tests/precision/test_precision_gpu.py
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


def require_te(feature: str) -> Any:
    """Import and return `transformer_engine.pytorch`. Raise a `UserError` that starts with `feature` if this fails."""
    prefer_torchs_cudnn()
    return TRANSFORMER_ENGINE.require(feature)


def prefer_torchs_cudnn() -> None:
    """If Transformer Engine is not imported yet, make it load torch's cuDNN instead of the system's. If both are
    loaded, Transformer Engine silently uses unfused attention (2.7 times slower on an H200). CUDNN_HOME and CUDNN_PATH
    take precedence. All of cuDNN's libraries are loaded here, since cuDNN itself would search the system's folders.
    """
    if "transformer_engine" in sys.modules or os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH"):
        return
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    if spec is not None and spec.submodule_search_locations:
        folder = next(iter(spec.submodule_search_locations))
        os.environ["CUDNN_HOME"] = folder
        for library in sorted(Path(folder, "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def keep_weight_casts(modules: Iterable[Any], keep: bool) -> None:
    """If `keep`, make `modules` keep the fp8 casts of their weights for later passes. If not, they cast every time."""
    for module in modules:
        if hasattr(type(module), "is_fsdp2"):
            module._is_fsdp2 = not keep  # modules detect FSDP2 only once


def add_activation(name: str, backward_and_cast: Callable[..., Any]) -> None:
    """Add to LayerNormMLP an activation `name`: "swiglu", but `backward_and_cast` is its backward pass in fp8."""
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
def defer_scale_updates() -> Iterator[None]:
    """In the block, make passes record their amax, but leave delayed scaling's scales to `update_scales`."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    no_update = staticmethod(lambda forward=True: None)
    with patch.object(FP8GlobalStateManager, "reduce_and_update_fp8_tensors", no_update):
        yield


def update_scales() -> None:
    """Reduce each amax to its maximum over the ranks. Then update all scales and amax histories of delayed scaling."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for forward in (True, False):
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=forward)


def attention_backend() -> str | None:
    """Return the name of the attention kernels that Transformer Engine chose last, or None if it has chosen none."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    names = {"fused": "fused (cuDNN)", "flash": "flash-attn", "unfused": "unfused"}
    return next((name for kind, name in names.items() if _attention_backends[f"use_{kind}_attention"]), None)


def make_rowwise_only(weight: Any) -> None:
    """Make later casts to the fp8 tensor `weight` leave out its transposed copy."""
    weight._quantizer.set_usage(rowwise=True, columnwise=False)
