"""Small models of each family with the features that are easy to get wrong, such as RoPE scaling and windows."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import te_llama
from llm_fp8.models.build import fill_weights
from llm_fp8.models.model import Model
from llm_fp8.models.source import EMBEDDED_MODEL, StoredCheckpoint
from tests.support.small import LONGROPE, tiny_config

HAS_VARLEN = "enable_gqa" in signature(varlen_attn).parameters  # torch's kernels for heads that share keys and values
_LONGROPE = LONGROPE | dict(short_factor=[1.5] * 32, long_factor=[4.0] * 32, original_max_position_embeddings=128)
_YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=128)
_YARN |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
_SHORT_YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
_LLAMA3 = dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=64)
_LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
_MULTIPLIERS = dict(residual_multiplier=0.6, embedding_multiplier=2.0)
_GEMMA3 = dict(sliding_window=24, sliding_window_pattern=3, tie_word_embeddings=True)
_GEMMA3 |= dict(rope_scaling=dict(rope_type="linear", factor=4.0))
_DELTA_NET = dict(full_attention_interval=2, linear_num_key_heads=4, linear_num_value_heads=8)
_DELTA_NET |= dict(linear_key_head_dim=64, linear_value_head_dim=64)
FAMILIES = {
    "llama2": dict(model_type="llama", num_key_value_heads=8, rope_theta=10000.0),
    "llama3_rope_gqa": dict(model_type="llama", rope_theta=500000.0, rope_scaling=_LLAMA3),
    "llama_tied": dict(model_type="llama", tie_word_embeddings=True),
    "llama_biases": dict(model_type="llama", attention_bias=True, mlp_bias=True),
    "llama_linear_rope": dict(model_type="llama", rope_scaling=dict(rope_type="linear", factor=4.0)),
    "llama_yarn": dict(model_type="llama", rope_scaling=_SHORT_YARN | dict(beta_fast=32.0, beta_slow=1.0)),
    "mistral_window": dict(model_type="mistral", sliding_window=24),
    "qwen2_qkv_bias_tied": dict(model_type="qwen2", tie_word_embeddings=True, rope_theta=1000000.0),
    "qwen2_window": dict(model_type="qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen3_qk_norm_head_dim": dict(model_type="qwen3", head_dim=128, rope_theta=1000000.0),
    "gemma3_text": dict(model_type="gemma3_text", head_dim=128, query_pre_attn_scalar=96, **_GEMMA3),
    "smollm3_no_rope": dict(model_type="smollm3", no_rope_layers=[1, 0, 1, 0]),
    "seed_oss": dict(model_type="seed_oss", attention_dropout=0.0, residual_dropout=0.0, attention_out_bias=True),
    "granite_multipliers": dict(model_type="granite", attention_multiplier=0.2, logits_scaling=0.5, **_MULTIPLIERS),
    "llama_longrope": dict(model_type="llama", head_dim=64, rope_scaling=_LONGROPE),
    "ministral3_scores": dict(model_type="ministral3", head_dim=64, rope_parameters=_YARN),
    "phi3_partial_rope": dict(model_type="phi3", partial_rotary_factor=0.75, sliding_window=24),
    "glm4_pairs": dict(model_type="glm4", head_dim=64, attention_bias=True),
    "olmo2": dict(model_type="olmo2"),
    "olmo3_windows": dict(model_type="olmo3", sliding_window=24, rope_scaling=_SHORT_YARN),
    "exaone4_windows": dict(model_type="exaone4", sliding_window=24, sliding_window_pattern=2),
    "qwen3_5_text": dict(model_type="qwen3_5_text", head_dim=64, **_DELTA_NET),
}
"""Name -> changes to the config of `family_config`, which has 3 layers and, by default, head_dim 64."""

_LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12)
_SHARED = dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
_MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24)
_HYBRID = dict(layer_types=["linear_attention", "full_attention"], linear_num_value_heads=2, linear_num_key_heads=2)
MOE_FAMILIES = {
    "qwen3_moe": dict(num_experts=4, **_MOE),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "deepseek_v3": dict(**_SHARED, **_MOE, **_LATENT, num_key_value_heads=2),
    "glm4_moe": dict(**_SHARED, **_MOE),
    "qwen3_5_moe_text": dict(
        num_experts=4, shared_expert_intermediate_size=24, **_MOE, **_HYBRID, linear_key_head_dim=8,
        linear_value_head_dim=8, head_dim=16,
    ),
    "nemotron_h": dict(
        n_routed_experts=4, moe_shared_expert_intermediate_size=24, **_MOE, num_hidden_layers=3,
        layers_block_type=["mamba", "attention", "moe"],
        n_group=1, topk_group=1, head_dim=16, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1,
    ),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "phimoe": dict(num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
MOE_FAMILIES = {kind: dict(model_type=kind, **changes) for kind, changes in MOE_FAMILIES.items()}
"""Model type of a mixture of experts -> changes to `tiny_config`."""


def family_config(name: str, **sizes: int):
    """Return the transformers config of the family `name` in `FAMILIES`. `sizes` override entries of the config."""
    shape = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, rms_norm_eps=1e-5)
    heads = dict(num_attention_heads=8, num_key_value_heads=2)
    return tiny_config(**{**shape, **heads, **FAMILIES[name], **sizes})


def write_family(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a small random model of `family` and a tokenizer to `folder`. The model's dimensions suit fp8 GEMMs."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(family_config(family), dtype=dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return folder


def te_model(folder: Path, dtype: torch.dtype = torch.float32, device="cpu", **layers: bool) -> Model:
    """Return a TE decoder with the weights of the model in `folder`. `layers` are arguments of `build_te_model`."""
    config = AutoConfig.from_pretrained(folder)
    stored = StoredCheckpoint([Path(folder) / "model.safetensors"], config)
    model = Model(te_llama.build_te_model(config, dtype, device, **layers), stored)
    fill_weights(model, device)
    return model
