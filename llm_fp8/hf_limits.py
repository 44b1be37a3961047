"""What transformers' models do that the training here does not, read off their configs: such a model would be trained as another one."""

from __future__ import annotations

from transformers import PretrainedConfig

_LOGIT_CHANGES = ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Entries of configs of transformers 5.23 by which logits, or what the output head is given, are multiplied or capped."""

_MIX_DOCUMENTS = frozenset(
    "afmoe bailing_hybrid biogpt bloom falcon falcon_h1 falcon_mamba gpt_oss inkling2_text inkling_text jamba kimi_linear lfm3 mamba minimax nemotron_h olmo_hybrid "
    "openai-gpt qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma xglm zaya".split()
)
"""Of the types of transformers 5.23 with a list of decoder layers and a plain output head, those whose small models (eager attention) gave a
document other hidden states behind another one in its row than alone. Types of which no small model was made are not in it."""


def what_changes_logits(hf_config: PretrainedConfig) -> str | None:
    """The entry by which the model's logits are more than its output head times the last hidden states; None where there is none."""
    text_config = hf_config.get_text_config(decoder=True)
    for name in _LOGIT_CHANGES:
        value = getattr(text_config, name, None)
        if value is not None and value != 1:
            return f"{name} {value}"
    return None


def what_mixes_documents(hf_config: PretrainedConfig) -> str | None:
    """The type of the model's decoder where the documents of a packed row are known to reach each other in it; None elsewhere."""
    decoder_type: str = hf_config.get_text_config(decoder=True).model_type
    return decoder_type if decoder_type in _MIX_DOCUMENTS else None
