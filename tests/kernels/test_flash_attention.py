"""flash-attn 4 in the TE decoder: what is refused, and what it is called with. On a CPU with stand-ins for both
packages.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import te_llama
from llm_fp8.config.options import ModelConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.kernels import flash_attention
from llm_fp8.kernels.flash_attention import (
    keep_from_transformer_engine,
)
from llm_fp8.models import build as models
from llm_fp8.tools.bench.variants import parse_variant
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import FLASH_ATTENTION_4
from tests.support.small import tiny_config
from tests.support.stand_in_te import install_stand_in

DOCUMENTS = (0, 7, 8, 40)
NO_MASK = torch.empty(0, 0, 0, 0)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size
):
    """As flash-attn 4 computes it; returns the output and what it keeps for itself."""
    assert causal and cu_seqlens_k is cu_seqlens_q and cu_seqlens_q.dtype == torch.int32
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max_seqlen_k == max(stop - start for start, stop in itertools.pairwise(bounds))
    outputs = []
    for start, stop in itertools.pairwise(bounds):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        left, right = window_size
        seen = (distance >= 0) & (distance <= (stop - start if left is None else left))
        assert right in (None, 0)
        heads = [x[start:stop].transpose(0, 1) for x in (q, k, v)]
        outputs.append(
            F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(outputs), None


@pytest.fixture
def windows(monkeypatch):
    """Stand-ins of Transformer Engine and flash-attn 4; the windows of its calls."""
    install_stand_in(monkeypatch)
    windows = []

    def counted(*tensors, **options):
        windows.append(options["window_size"])
        return flash_attn_varlen_func(*tensors, **options)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = counted
    return windows


def outcome(flash: bool, bounds=DOCUMENTS, checkpointing=False, **changes):
    """Logits and gradients of a packed row."""
    model = te_llama.build_te_model(tiny_config(**changes), torch.bfloat16, "cpu", flash_attention_4=flash)
    te_llama.initialize_weights_(model, torch.Generator().manual_seed(0))
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    ids = torch.randint(3, 1024, (1, bounds[-1]), generator=torch.Generator().manual_seed(1))
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    logits = model(
        input_ids=ids,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=longest,
        attention_mask=NO_MASK,
    ).logits
    logits.float().logsumexp(-1).sum().backward()
    return model, logits, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [DOCUMENTS, (0, 40)], ids=["documents", "one_document"])
def test_packed_rows_are_what_transformer_engine_makes_of_them(bounds, windows):
    model, logits, gradients = outcome(True, bounds)
    assert windows == [(None, None)] * 2
    assert te_llama.attention_backend(model) == "flash-attn 4"
    other, expected, expected_gradients = outcome(False, bounds)
    assert len(windows) == 2 and te_llama.attention_backend(other) == "fused (cuDNN)"
    torch.testing.assert_close(logits, expected, atol=0.02, rtol=0.02)
    for name, gradient in gradients.items():
        difference = (gradient.float() - expected_gradients[name].float()).norm() / expected_gradients[
            name
        ].float().norm()
        assert difference < 0.02, name


@pytest.mark.slow
def test_recomputed_layers_have_the_same_gradients(windows):
    _model, logits, gradients = outcome(True)
    _model, recomputed, recomputed_gradients = outcome(True, checkpointing=True)
    assert len(windows) == 2 + 4
    assert torch.equal(recomputed, logits)
    assert all(torch.equal(recomputed_gradients[name], gradient) for name, gradient in gradients.items())


def attend(model) -> None:
    """A packed row through `model`, whose weights are drawn first."""
    te_llama.initialize_weights_(model, torch.Generator().manual_seed(0))
    model(
        input_ids=torch.arange(3, 43)[None],
        cu_seq_lens_q=torch.tensor(DOCUMENTS, dtype=torch.int32),
        max_length_q=32,
        attention_mask=NO_MASK,
    )


def test_a_sliding_window_counts_the_token_itself(windows, monkeypatch):
    config = tiny_config()
    monkeypatch.setattr(te_llama, "_window", lambda config, layer: 5 if layer else None)
    model = te_llama.build_te_model(config, torch.bfloat16, "cpu", flash_attention_4=True)
    attend(model)
    assert windows == [(None, None), (4, 0)]


def test_the_gradients_of_a_window_are_those_of_torchs_attention(windows):
    """In fp32, which only the stand-ins compute in: windows, groups of queries and a scale of its own."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(40, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    above = torch.randn(40, 4, 16, generator=generator)
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=torch.int32)
    found = flash_attention.flash_attention(*leaves, cu_seqlens, 32, 0.3, 5)
    expected, _rest = flash_attn_varlen_func(*leaves, cu_seqlens, cu_seqlens, 32, 32, 0.3, True, (4, 0))
    torch.testing.assert_close(found, expected)
    # A gradient that is not contiguous, as a transposed reader leaves it.
    turned = above.transpose(1, 2).contiguous().transpose(1, 2)
    for of_found, of_expected in zip(
        torch.autograd.grad(found, leaves, turned), torch.autograd.grad(expected, leaves, above), strict=True
    ):
        torch.testing.assert_close(of_found, of_expected)


def test_fp32_layers_take_transformer_engines(windows):
    """The check against Hugging Face computes in fp32 too, which flash-attn cannot."""
    model = te_llama.build_te_model(tiny_config(), torch.float32, "cpu", flash_attention_4=True)
    attend(model)
    assert windows == []


@pytest.mark.parametrize(
    ("head_dim", "version", "value"),
    [(80, FLASH_ATTENTION_4.version, "0"), (128, FLASH_ATTENTION_4.version, None), (80, None, None)],
)
def test_transformer_engine_does_not_come_to_it_by_itself_where_it_was_not_compared(
    head_dim, version, value, monkeypatch
):
    monkeypatch.setenv("NVTE_FLASH_ATTN_V4", "unset after this test")
    monkeypatch.delenv("NVTE_FLASH_ATTN_V4")
    monkeypatch.setattr(flash_attention, "package_version", lambda name: version if name == "flash-attn-4" else "1.0")
    keep_from_transformer_engine(head_dim)
    assert os.environ.get("NVTE_FLASH_ATTN_V4") == value


def test_flash_attn_4_is_not_taken_for_flash_attn_2(monkeypatch):
    """Both are folders `flash_attn`; the Hugging Face path calls the functions of version 2."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    assert models.choose_attention("auto", tiny_config(), torch.device("cuda"), torch.bfloat16) == "sdpa"


def test_a_variant_of_the_benchmarks():
    arm = parse_variant("delayed:flash4:fp8head_all")
    work = Workload("Llama-3.2-1B", 2, 64, 1, 1)
    assert arm.config(work).model == ModelConfig(
        model_name="Llama-3.2-1B", random_init=True, use_te=True, attn_implementation="flash_attention_4"
    )
    assert parse_variant("delayed").config(work).model.attn_implementation == "auto"


def test_a_sequence_that_gpus_share_is_refused():
    options = ["--use_te", "--attn_implementation", "flash_attention_4", "--context_parallel_size", "2"]
    with pytest.raises(
        UserError, match="flash_attention_4 cannot share a sequence between GPUs; drop it, or --context_parallel_size 2"
    ):
        parse_config(options, parallel=True)
