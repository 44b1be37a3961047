"""Batches are copied to the GPU without synchronisation, and are equal there."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from transformers import AutoTokenizer

from llm_fp8.config.parser import parse_config
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.prepare import prepare_data

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_synchronisation():
    """Within the block, make every operation that waits for the GPU raise an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packing", ["--packing", "--no_packing"])
def test_pinned_batch_is_copied_without_synchronisation(packing, no_synchronisation):
    options = ["--dataset_name=embedded", "--max_seq_length=512", "--batch_size=4", packing]
    data = prepare_data(parse_config(options), AutoTokenizer.from_pretrained(MODEL_DIR), pin_memory=True)
    steps = iter(data.train)
    pairs = []
    for batch in (batch for step in islice(steps, 3) for batch in step):
        assert batch.input_ids.is_pinned() and batch.labels.is_pinned() and batch.position_ids.is_pinned()
        pairs.append((batch, batch.to("cuda", non_blocking=True)))
    steps.close()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for batch, copied in pairs:
        for name in ("input_ids", "labels", "position_ids", "attention_mask", "cu_seqlens"):
            on_host, on_device = getattr(batch, name), getattr(copied, name)
            assert (on_host is None) == (on_device is None)
            assert on_host is None or torch.equal(on_host, on_device.cpu()), name
