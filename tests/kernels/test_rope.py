"""The kernel that splits the fused projection and applies RoPE, without a GPU: the reference with which GPU tests
compare the kernel, the decoder layers that use the kernel, and the arguments that the layers pass.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import te_llama
from llm_fp8.models.build import fill_weights
from llm_fp8.models.model import Model
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.step.loss_model import TrainingModel
from tests.support.batches import BATCHES, S
from tests.support.families import family_config
from tests.support.rope_reference import CASES, assert_same_split, positions_of, split_rope_reference
from tests.support.small import length_config
from tests.support.stand_in_te import install_stand_in

REPOSITORY = Path(__file__).parents[2]


def hf_split_rope(fused, angles, num_heads, num_kv_heads, cu_seqlens=None):
    """Split the projection `fused` into q, k and v, and rotate q and k with Hugging Face's function. `angles` may cover
    only a part of each head. Positions count from 0 in each document that `cu_seqlens` delimits.
    """
    rotary_dim = angles.shape[-1]
    positions = (
        torch.arange(fused.shape[-2]).expand(fused.shape[:-1]) if cu_seqlens is None else positions_of(cu_seqlens)
    )
    table = angles[positions, 0, 0].to(fused.dtype)
    heads = fused.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    rotated = apply_rotary_pos_emb(q[..., :rotary_dim], k[..., :rotary_dim], table.cos(), table.sin(), unsqueeze_dim=-2)
    q, k = (torch.cat((head, x[..., rotary_dim:]), dim=-1) for head, x in zip(rotated, (q, k), strict=True))
    return q.contiguous(), k.contiguous(), v.contiguous()


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_hugging_faces_rotation(name):
    assert_same_split(split_rope_reference, hf_split_rope, CASES[name], torch.float32, "contiguous", "cpu")


@pytest.fixture
def stand_in_kernel(monkeypatch):
    """Install stand-ins for Transformer Engine and the kernel. Return a list that records the kernel's calls: the shape
    of the projection and the document bounds.
    """
    install_stand_in(monkeypatch)
    calls = []

    def split_rope(fused, angles, num_heads, num_kv_heads, cu_seqlens=None):
        calls.append((tuple(fused.shape), None if cu_seqlens is None else cu_seqlens.tolist()))
        return split_rope_reference(fused, angles, num_heads, num_kv_heads, cu_seqlens)

    module = ModuleType("llm_fp8.kernels.rope_triton")
    module.split_rope = split_rope
    monkeypatch.setitem(sys.modules, "llm_fp8.kernels.rope_triton", module)
    return calls


def train(family, layout, recompute):
    """Return, by name, loss and gradients of an fp32 model of `family` with stand-ins for TE's modules."""
    model = te_llama.build_te_model(family_config(family), torch.float32, "cpu")
    fill_weights(Model(model))
    if recompute:
        enable_gradient_checkpointing(model.model.layers, 1, uses_te=False)
    batch = BATCHES[layout]("cpu")
    loss = TrainingModel(model, length_config(S), torch.float32).train()(batch)[0] / batch.num_supervised_tokens
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", BATCHES)
def test_layers_call_the_kernel_with_projection_and_document_bounds(layout, recompute, stand_in_kernel, monkeypatch):
    family = "llama3_rope_gqa"
    expected = train(family, layout, recompute)
    assert not stand_in_kernel, "on a CPU the layers use Transformer Engine's path"
    monkeypatch.setattr(te_llama.TEDecoderLayer, "_one_kernel_rotates", lambda self, fused: True)
    results = train(family, layout, recompute)
    batch, config = BATCHES[layout]("cpu"), family_config(family)
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    shape = batch.input_ids.shape if layout == "padded" else (batch.input_ids.numel(),)
    bounds = None if layout == "padded" else batch.cu_seqlens.tolist()
    assert stand_in_kernel == [((*shape, width), bounds)] * config.num_hidden_layers * (2 if recompute else 1)
    assert results.keys() == expected.keys()
    for name, value in results.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("family", "context_size", "on_gpu", "dtype", "uses_kernel"),
    [
        ("llama2", 1, True, torch.bfloat16, True),
        ("llama2", 1, True, torch.float16, True),
        ("llama2", 1, True, torch.float32, True),
        ("llama2", 1, True, torch.float64, False),
        ("llama2", 1, False, torch.bfloat16, False),
        ("llama2", 2, True, torch.bfloat16, False),
        ("qwen3_qk_norm_head_dim", 1, True, torch.bfloat16, False),
    ],
)
def test_kernel_is_used_only_on_gpus_without_qk_norm(family, context_size, on_gpu, dtype, uses_kernel, monkeypatch):
    install_stand_in(monkeypatch)
    layer = te_llama.build_te_model(family_config(family), torch.float32, "cpu").model.layers[0]
    layer.context_size = context_size
    assert layer._one_kernel_rotates(SimpleNamespace(is_cuda=on_gpu, dtype=dtype)) is uses_kernel


INTERPRETED_PROGRAM = """
import torch
from llm_fp8.kernels.rope_triton import split_rope
from tests.support.rope_reference import CASES, assert_same_split, split_rope_reference
for name in ("head_dim 80", "little of a head", "documents of one token", "empty documents", "padded"):
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_split(split_rope, split_rope_reference, CASES[name], dtype, "columns before heads", "cpu")
empty = split_rope(torch.empty(0, 8 * 64), CASES["padded"].angles("cpu"), 4, 2, torch.tensor([0], dtype=torch.int32))
print([tuple(part.shape) for part in empty])
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton comes with torch's CUDA builds")
def test_kernel_in_tritons_interpreter_equals_the_reference():
    """Triton's interpreter runs the kernel with numpy on the CPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", INTERPRETED_PROGRAM], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "[(0, 4, 64), (0, 2, 64), (0, 2, 64)]\n"
