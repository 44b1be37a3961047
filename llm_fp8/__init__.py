"""Fine-tuning of Llama, Qwen and Mistral models in FP8, MXFP8 and BF16: what both training scripts share."""

from __future__ import annotations

import logging

__version__ = "0.1.0"


def _quiet_import_of_torchao() -> None:
    """Drop what importing torchao says of kernels that nothing here uses; transformers imports it wherever it is
    installed.
    """
    said = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass"}
    for logger, start in said.items():
        logging.getLogger(logger).addFilter(lambda record, start=start: not str(record.msg).startswith(start))  # type: ignore[misc]


_quiet_import_of_torchao()
