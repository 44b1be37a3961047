"""flash-attn 3 gives the attention and the gradients of an fp32 reference, alone and inside the TE decoder."""

from __future__ import annotations

import pytest

from llm_fp8.config.attention_packages import FLASH_ATTENTION_3
from tests.support import flash_attention_checks as checks

pytestmark = checks.marks_of(FLASH_ATTENTION_3)


@checks.every_shape
def test_output_and_gradients(head_dim, heads, lengths, window, device, record_property):
    checks.check_output_and_gradients(FLASH_ATTENTION_3, head_dim, heads, lengths, window, device, record_property)


@pytest.mark.parametrize("family", checks.FAMILIES)
def test_layers_are_hugging_faces(family, device, record_property):
    checks.check_layers(FLASH_ATTENTION_3, family, device, record_property)


def test_a_run_says_so_and_is_certified(tmp_path, record_property):
    checks.check_run(FLASH_ATTENTION_3, tmp_path, record_property)


def test_its_kernels_are_known_as_attention_and_as_no_gemm(device, record_property):
    parts = ("FlashAttnFwdSm90", "FlashAttnBwdSm90", "FlashAttnBwdPreprocess", "FlashAttnBwdPostprocess")
    checks.check_kernels(FLASH_ATTENTION_3, parts, device, record_property)
