"""flash-attn 2 in Hugging Face's decoder and in Transformer Engine's attention, compared with sdpa and cuDNN. Torch's
flash attention for packed documents in Hugging Face's decoder.

Gradients are compared for padded and packed batches, and losses for whole runs in bf16, in fp8 and with LoRA.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm_fp8.models.parity import relative_difference
from llm_fp8.step.loss_model import TrainingModel
from llm_fp8.utils.packages import package_version
from tests.support import gpu_training
from tests.support.batches import BATCHES, S
from tests.support.families import HAS_VARLEN, family_config
from tests.support.small import length_config

FAMILIES = ("llama3_rope_gqa", "mistral_window", "qwen2_qkv_bias_tied", "qwen3_qk_norm_head_dim")
BF16_ERRORS = 1.5
"""Largest allowed ratio of a gradient's error to that of sdpa in bf16; a wrong mask gives about 50 times as much."""
PACKING = {"packed": "--packing", "padded": "--no_packing"}
RUNS = {
    "hf_bf16": ["--mixed_precision", "bf16"],
    "hf_fp8": ["--mixed_precision", "fp8"],
    "hf_fp8_lora": ["--mixed_precision", "fp8", "--lora_rank", "8"],
    "te_bf16": ["--use_te", "--mixed_precision", "bf16"],
    "te_fp8": ["--use_te", "--mixed_precision", "fp8"],
    "te_fp8_lora": ["--use_te", "--mixed_precision", "fp8", "--lora_rank", "8"],
}
PREFER_FLASH_ATTENTION = {"NVTE_FUSED_ATTN": "0"}
"""Environment that disables cuDNN's attention, which Transformer Engine prefers on Hopper."""
SAME_LOSS = 0.02
"""Allowed relative difference by rounding; a wrong mask changes the loss of the first step by more."""

pytestmark = pytest.mark.gpu
needs_flash_attn = pytest.mark.skipif(package_version("flash-attn") is None, reason="needs flash-attn")
needs_varlen = pytest.mark.skipif(not HAS_VARLEN, reason="needs a newer torch")
FORMS = {"sdpa": "rows", "flash_attention_2": "line", "varlen": "varlen"}


def gradients(family: str, attention: str, dtype: torch.dtype, layout: str, device) -> dict[str, torch.Tensor]:
    """Return a small model's summed loss as "loss", and the gradients of the loss by parameter name."""
    torch.manual_seed(0)
    built_with = "sdpa" if attention == "varlen" else attention
    with device:
        model = AutoModelForCausalLM.from_config(
            family_config(family), dtype=torch.float32, attn_implementation=built_with
        )
    for parameter in model.parameters():  # the same bf16 values in both dtypes; the rotary frequencies stay fp32
        parameter.data = parameter.data.bfloat16().to(dtype)
    training = TrainingModel(model, length_config(S), dtype, FORMS[attention])
    loss, _ = training(BATCHES[layout](device))
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize(
    ("attention", "layout"),
    [
        pytest.param("flash_attention_2", "packed", marks=needs_flash_attn),
        pytest.param("flash_attention_2", "padded", marks=needs_flash_attn),
        pytest.param("varlen", "packed", marks=needs_varlen),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_errors_are_at_most_those_of_sdpa(family, attention, layout, device, record_property):
    exact = gradients(family, "sdpa", torch.float32, layout, device)
    errors = {
        kind: {
            name: relative_difference(gradient.float(), exact[name])
            for name, gradient in gradients(family, kind, torch.bfloat16, layout, device).items()
        }
        for kind in ("sdpa", attention)
    }
    medians = {name: float(torch.tensor(list(values.values())).median()) for name, values in errors.items()}
    record_property("median_errors", medians)
    for name, error in errors[attention].items():
        assert error <= BF16_ERRORS * errors["sdpa"][name] + 2e-3, (name, error, errors["sdpa"][name])


@needs_flash_attn
@pytest.mark.parametrize("layout", PACKING)
@pytest.mark.parametrize("run", RUNS)
def test_run_certifies_flash_attention_with_equal_losses(run, layout, model_folder, tmp_path, record_property):
    use_te = run.startswith("te_")
    losses = {}
    for name, options, environment in (
        ("other", [] if use_te else ["--attn_implementation", "sdpa"], {}),
        ("flash", [] if use_te else ["--attn_implementation", "flash_attention_2"], PREFER_FLASH_ATTENTION),
    ):
        folder = tmp_path / name
        shared = gpu_training.training_options(model_folder, folder, PACKING[layout], "--max_steps", "6", "--no_export")
        shared.remove("--use_te")
        process = gpu_training.train(*shared, *RUNS[run], *options, environment=environment)
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
        losses[name] = gpu_training.losses(folder)
    certificate = gpu_training.certificate_of(folder)
    record_property("losses", losses)
    record_property("attention", certificate["attention"])
    assert certificate["verdict"] == "certified", certificate["reasons"]
    assert certificate["attention"] == ("flash-attn" if use_te else "flash_attention_2")
    assert losses["flash"] == pytest.approx(losses["other"], rel=SAME_LOSS)
    assert losses["flash"] != losses["other"]
