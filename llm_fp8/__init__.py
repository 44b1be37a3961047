"""Fine-tuning of Llama, Qwen, Gemma and Mistral models in FP8, MXFP8 and BF16; the names for other programs."""

from __future__ import annotations

import importlib
import logging
from typing import Any

__version__ = "0.1.0"
_PLACES = {
    "CertificateCallback": "llm_fp8.tools.hf_trainer_callback",
    "UserError": "llm_fp8.utils.errors",
    "certify_step": "llm_fp8.tools.hf_trainer_callback",
    "fine_tune": "llm_fp8.tools.fine_tune",
}

# Hide torchao's import warnings, about kernels unused here; transformers imports torchao if it is installed.
for _logger, _start in {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass"}.items():
    logging.getLogger(_logger).addFilter(lambda record, start=_start: not str(record.msg).startswith(start))  # type: ignore[misc]


def __getattr__(name: str) -> Any:
    """Import a name in `_PLACES` when it is used, so that `import llm_fp8` does not load torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
