"""Private names of transformers: which exist, and that a plain model needs none of those that may be renamed."""

from __future__ import annotations

import importlib

from transformers import PreTrainedModel
from transformers.integrations import moe

from llm_fp8.models import model
from llm_fp8.utils import hf_internals
from tests.support.small import assert_same_bits, final_weights, stored_weights, train


def test_names_that_are_looked_up_exist():
    assert {"_keys_to_ignore_on_save", "_keys_to_ignore_on_load_unexpected"} <= set(dir(PreTrainedModel))


def test_a_renamed_function_does_not_stop_a_plain_model(tmp_path, tiny_model, rows, monkeypatch):
    monkeypatch.delattr(moe, "_grouped_linear")
    importlib.reload(hf_internals)
    monkeypatch.delattr(model, "renaming_on_load")  # transformers' own export imports what it calls
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", f"--output_dir={tmp_path}", "--max_steps=1"]
    train(*options, "--max_seq_length=256", "--batch_size=1", "--learning_rate=0", "--mixed_precision=no")
    assert_same_bits(final_weights(tmp_path), stored_weights(tiny_model))
