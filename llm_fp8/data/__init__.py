"""Text to batches; `prepare_data` is the entry (prepare.py lists the steps). Labels in a `Batch` are shifted."""

from __future__ import annotations

from llm_fp8.data.collate import IGNORED, Batch
from llm_fp8.data.loader import EvalLoader, TrainLoader
from llm_fp8.data.prepare import PreparedData, prepare_data
from llm_fp8.data.prompt import PROMPT_FORM, encode_prompt, format_prompt
from llm_fp8.data.report import DataReport

__all__ = [
    "IGNORED",
    "PROMPT_FORM",
    "Batch",
    "DataReport",
    "EvalLoader",
    "PreparedData",
    "TrainLoader",
    "encode_prompt",
    "format_prompt",
    "prepare_data",
]
