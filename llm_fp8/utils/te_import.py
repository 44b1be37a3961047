"""Import of Transformer Engine, and what must be settled before it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from llm_fp8.utils.packages import TRANSFORMER_ENGINE


def require_te(why: str) -> Any:
    """Import and return `transformer_engine.pytorch`; a `UserError` that starts with `why` where that fails."""
    prefer_torchs_cudnn()
    return TRANSFORMER_ENGINE.require(why)


def forget_delayed_scales() -> None:
    """Reset Transformer Engine's global state between models, whose amax it would go on reducing."""
    if "transformer_engine" in sys.modules:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


def prefer_torchs_cudnn() -> None:
    """Let Transformer Engine load torch's cuDNN, not an older one of the system; call it before whatever imports it.

    With two versions it silently takes the unfused attention (2.7 times slower on an H200). A CUDNN_HOME or CUDNN_PATH
    that is set stays. All libraries are loaded, since the first would look for the others in the system's folders.
    """
    if "transformer_engine" in sys.modules or os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH"):
        return
    found = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    if found is not None and found.submodule_search_locations:
        folder = next(iter(found.submodule_search_locations))
        os.environ["CUDNN_HOME"] = folder
        os.environ.pop("CUDNN_PATH", None)
        for library in sorted(Path(folder, "lib").glob("libcudnn*.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
