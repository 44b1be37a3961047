"""flash-attn 4 gives the attention and the gradients of an fp32 reference, alone and inside the TE decoder."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import te_llama
from llm_fp8.config.validation import FLASH_ATTENTION_HEAD_DIMS
from llm_fp8.kernels.flash_attention import flash_attention
from llm_fp8.models.parity import check_parity, relative_difference
from llm_fp8.observability.kernel_trace import gemm_kernels, kernel_times, record_kernels, time_by_class
from llm_fp8.utils.packages import FLASH_ATTENTION_4, package_version
from tests.support.batches import S, packed_batch
from tests.support.families import family_config

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = {"short": (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 200, 1), "long": (1500, 3, 545), "one": (1024,)}
FAMILIES = ["llama3_rope_gqa", "mistral_window", "qwen3_qk_norm_head_dim", "llama_yarn"]
ROUNDING = 4e-3
"""Relative error that bf16 operands and results leave; cuDNN's is up to 3.4e-3. A wrong gradient is off by as much
as itself.
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        package_version(FLASH_ATTENTION_4.name) != FLASH_ATTENTION_4.version,
        reason=f"needs {FLASH_ATTENTION_4.name} {FLASH_ATTENTION_4.version}",
    ),
]


def reference(q, k, v, bounds, scale, window):
    """In fp32, document by document."""
    outputs = []
    for start, stop in itertools.pairwise(bounds):
        distance = torch.arange(stop - start, device=q.device)[:, None] - torch.arange(stop - start, device=q.device)
        seen = (distance >= 0) & (distance < (window or stop))
        heads = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        outputs.append(
            F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(outputs)


def results(function, tensors, gradient):
    """Output and the three gradients."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    output = function(*leaves)
    output.backward(gradient.to(output.dtype))
    return dict(zip(("output", "q", "k", "v"), (output.detach(), *(x.grad for x in leaves)), strict=True))


@pytest.mark.parametrize("head_dim", FLASH_ATTENTION_HEAD_DIMS)
@pytest.mark.parametrize("heads", [(32, 8), (24, 8), (28, 4), (40, 8), (8, 8)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 100], ids=["all", "window"])
def test_output_and_gradients(head_dim, heads, lengths, window, device, record_property):
    torch.manual_seed(0)
    bounds = [0, *itertools.accumulate(LENGTHS[lengths])]
    tensors = [
        torch.randn(bounds[-1], number, head_dim, device=device, dtype=torch.bfloat16)
        for number in (heads[0], heads[1], heads[1])
    ]
    gradient = torch.randn(bounds[-1], heads[0], head_dim, device=device, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    scale, longest = 0.7 * head_dim**-0.5, max(LENGTHS[lengths])  # a scale as YaRN's factor makes it
    found = results(lambda q, k, v: flash_attention(q, k, v, cu_seqlens, longest, scale, window), tensors, gradient)
    exact = results(
        lambda q, k, v: reference(q, k, v, bounds, scale, window), [x.float() for x in tensors], gradient.float()
    )
    errors = {name: relative_difference(found[name], exact[name]) for name in exact}
    record_property("errors", errors)
    assert max(errors.values()) < ROUNDING, errors


def decoder(family, device):
    """A small TE decoder with random weights."""
    model = te_llama.build_te_model(family_config(family), torch.bfloat16, device, flash_attention_4=True)
    te_llama.initialize_weights_(model, torch.Generator(device=device).manual_seed(0))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_hugging_faces(family, device, record_property):
    found = check_parity(decoder(family, device), packed_batch(device), S, torch.bfloat16)
    record_property("report", found)
    assert "of 3 layers differ in fp32 by at most" in found


def test_a_run_says_so_and_is_certified(tmp_path, record_property):
    """One command says which attention it had; the kernels of its recorded step are those that it names."""
    done = subprocess.run(
        [
            sys.executable,
            "train_fp8.py",
            "--model_name",
            "Llama-57M",
            "--random_init",
            "--use_te",
            "--mixed_precision",
            "fp8",
            "--attn_implementation",
            "flash_attention_4",
            "--max_seq_length",
            "256",
            "--batch_size",
            "4",
            "--max_steps",
            "6",
            "--no_export",
            "--gradient_accumulation_steps",
            "2",
            "--output_dir",
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    name = "flash-attn 4"
    assert f"attention: {name}" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    record_property("certificate", summary["certificate"])
    assert summary["attention_backend"] == summary["certificate"]["attention"] == name
    assert summary["certificate"]["verdict"] == "certified"


def test_its_kernels_are_known_as_attention_and_as_no_gemm(device, record_property):
    model, batch = decoder("llama3_rope_gqa", device), packed_batch(device)

    def attend() -> None:
        model(
            input_ids=batch.input_ids, cu_seq_lens_q=batch.cu_seqlens, max_length_q=batch.max_seqlen,
            attention_mask=torch.empty(0, 0, 0, 0, device=device), labels=batch.input_ids
        ).loss.backward()  # fmt: skip

    attend()
    with record_kernels() as recorded:
        attend()
    times = kernel_times(recorded)
    names = time_by_class(times)["attention"].names
    record_property("kernels", list(names))
    for part in ("flash_fwd", "flash_bwd_sm90", "flash_bwd_preprocess", "flash_bwd_postprocess"):
        assert any(part in name for name in names), part
    assert not any("flash" in name for group in gemm_kernels(times).values() for name in group.names)
    assert "unknown" not in gemm_kernels(times)
