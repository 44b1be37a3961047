"""flash-attn 4 in the TE decoder: what is refused, and what it is called with. On a CPU with stand-ins for both packages."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import te_llama
from llm_fp8 import flash_attention, models
from llm_fp8.config import ModelConfig, parse_config
from llm_fp8.errors import UserError
from llm_fp8.flash_attention import HOPPER, check_flash_attention, keep_from_transformer_engine, require_flash_attention
from llm_fp8.flash_attention_package import VERSION
from llm_fp8.throughput.arms import parse_arm
from llm_fp8.throughput.workload import Workload
from tests.small import tiny_config
from tests.stand_in_te import install_stand_in

DOCUMENTS = (0, 7, 8, 40)
NO_MASK = torch.empty(0, 0, 0, 0)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size):
    """As flash-attn 4 computes it; returns the output and what it keeps for itself."""
    assert causal and cu_seqlens_k is cu_seqlens_q and cu_seqlens_q.dtype == torch.int32
    bounds = cu_seqlens_q.tolist()
    assert max_seqlen_q == max_seqlen_k == max(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
    outputs = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
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
def packages(monkeypatch):
    """Both packages; gives the calls of flash-attn's function."""
    install_stand_in(monkeypatch)
    calls = []

    def counted(*tensors, **options):
        calls.append(options)
        return flash_attn_varlen_func(*tensors, **options)

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute.interface"].flash_attn_varlen_func = counted
    return calls


def outcome(flash: bool, bounds=DOCUMENTS, **changes):
    """Logits and gradients of a packed row."""
    model = te_llama.build_te_model(tiny_config(**changes), torch.bfloat16, "cpu", flash_attention=flash)
    te_llama.initialize_weights_(model, torch.Generator().manual_seed(0))
    ids = torch.randint(3, 1024, (1, bounds[-1]), generator=torch.Generator().manual_seed(1))
    longest = max(stop - start for start, stop in zip(bounds, bounds[1:], strict=False))
    logits = model(
        input_ids=ids,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=longest,
        attention_mask=NO_MASK,
    ).logits
    logits.float().logsumexp(-1).sum().backward()
    return model, logits, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("bounds", [DOCUMENTS, (0, 40)], ids=["documents", "one_document"])
def test_packed_rows_are_what_transformer_engine_makes_of_them(bounds, packages):
    model, logits, gradients = outcome(True, bounds)
    assert len(packages) == 2 and {call["window_size"] for call in packages} == {(None, None)}
    assert te_llama.attention_backend(model) == "flash-attn 4"
    other, expected, expected_gradients = outcome(False, bounds)
    assert len(packages) == 2 and te_llama.attention_backend(other) == "fused (cuDNN)"
    torch.testing.assert_close(logits, expected, atol=0.02, rtol=0.02)
    for name, gradient in gradients.items():
        difference = (gradient.float() - expected_gradients[name].float()).norm() / expected_gradients[name].float().norm()
        assert difference < 0.02, name


def attend(model) -> None:
    """A packed row through `model`, whose weights are drawn first."""
    te_llama.initialize_weights_(model, torch.Generator().manual_seed(0))
    model(
        input_ids=torch.arange(3, 43)[None],
        cu_seq_lens_q=torch.tensor(DOCUMENTS, dtype=torch.int32),
        max_length_q=32,
        attention_mask=NO_MASK,
    )


def test_a_sliding_window_counts_the_token_itself(packages, monkeypatch):
    config = tiny_config()
    monkeypatch.setattr(te_llama, "_window", lambda config, layer: 5 if layer else None)
    model = te_llama.build_te_model(config, torch.bfloat16, "cpu", flash_attention=True)
    attend(model)
    assert [call["window_size"] for call in packages] == [(None, None), (4, 0)]


def test_fp32_layers_take_transformer_engines(packages):
    """The check against Hugging Face computes in fp32 too, which flash-attn cannot."""
    model = te_llama.build_te_model(tiny_config(), torch.float32, "cpu", flash_attention=True)
    attend(model)
    assert packages == []


def test_what_was_not_compared_is_refused(monkeypatch):
    check_flash_attention(64, 0.0)
    with pytest.raises(UserError, match="heads have 80 elements, and its gradients were compared for 64 and 128"):
        check_flash_attention(80, 0.0)
    with pytest.raises(UserError, match=r"attention_dropout 0\.1"):
        check_flash_attention(128, 0.1)
    with pytest.raises(UserError, match=r"this GPU has 10\.0"):
        require_flash_attention((10, 0))
    monkeypatch.setattr(flash_attention, "package_version", lambda name: None)
    with pytest.raises(UserError, match=rf"needs flash-attn-4 {VERSION}, which is not installed; run: pip install"):
        require_flash_attention(HOPPER)
    monkeypatch.setattr(flash_attention, "package_version", lambda name: "4.0.0")
    with pytest.raises(UserError, match=r"and 4\.0\.0 is installed; run: pip install"):
        require_flash_attention(HOPPER)
    monkeypatch.setattr(flash_attention, "package_version", lambda name: VERSION)
    require_flash_attention(HOPPER)


@pytest.mark.parametrize(("head_dim", "version", "value"), [(80, VERSION, "0"), (128, VERSION, None), (80, None, None)])
def test_transformer_engine_does_not_come_to_it_by_itself_where_it_was_not_compared(head_dim, version, value, monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN_V4", "unset after this test")
    monkeypatch.delenv("NVTE_FLASH_ATTN_V4")
    monkeypatch.setattr(flash_attention, "package_version", lambda name: version)
    keep_from_transformer_engine(head_dim)
    assert os.environ.get("NVTE_FLASH_ATTN_V4") == value


def test_a_model_whose_heads_were_not_compared_is_refused_before_any_weight(packages):
    config = parse_config(["--use_te", "--attn_implementation", "flash_attention_4", "--max_seq_length", "64"])
    with pytest.raises(UserError, match="heads have 16 elements"):
        models.check_model(config, tiny_config(), ["token"])


def test_flash_attn_4_is_not_taken_for_flash_attn_2(monkeypatch):
    """Both are folders `flash_attn`; the Hugging Face path calls the functions of version 2."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    assert models.choose_attention("auto", tiny_config(), torch.device("cuda"), torch.bfloat16) == "sdpa"


def test_an_arm_of_the_benchmarks():
    arm = parse_arm("delayed:flash4:fp8head_all").what
    work = Workload("Llama-3.2-1B", 2, 64, 1, 1)
    assert arm.config(work).model == ModelConfig(
        model_name="Llama-3.2-1B", random_init=True, use_te=True, attn_implementation="flash_attention_4"
    )
    assert parse_arm("delayed").what.config(work).model.attn_implementation == "auto"


def test_a_row_that_gpus_share_is_refused():
    options = ["--use_te", "--attn_implementation", "flash_attention_4", "--context_parallel_size", "2"]
    with pytest.raises(
        UserError, match="flash_attention_4 cannot share a row between GPUs; drop it, or --context_parallel_size 2"
    ):
        parse_config(options, parallel=True)
