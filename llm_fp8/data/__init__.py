"""Text to batches; `prepare_data` is the entry (prepare.py lists the steps). Labels in a `Batch` are shifted."""

from __future__ import annotations

from llm_fp8.data.collate import Batch
from llm_fp8.data.prepare import PreparedData, prepare_data

__all__ = ["Batch", "PreparedData", "prepare_data"]
