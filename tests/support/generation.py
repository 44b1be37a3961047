"""Greedy generation of random models, by transformers and by the project."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llm_fp8.models.source import EMBEDDED_MODEL
from llm_fp8.train.generate import generate_greedy
from tests.support.families import family_config

NEW_TOKENS = 40


def texts_of_family(family: str, device: str | torch.device) -> tuple[list[str], list[str]]:
    """Texts that a random fp32 model continues 7 prompts of different lengths with: by `generate_greedy` in two
    batches, and by transformers' `generate`, prompt by prompt. Windows are shorter than the prompts.
    """
    torch.manual_seed(0)
    config = family_config(family)
    config.initializer_range = 0.1  # wide enough that the most likely token changes from step to step
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.pad_token = tokenizer.eos_token  # as in many checkpoints; padding must not count as an end
    prompts = [torch.randint(3, len(tokenizer), (length,)).tolist() for length in (60, 7, 33, 18, 41, 3, 29)]
    options = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=tokenizer.eos_token_id, pad_token_id=2
    )
    alone = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt], device=device), generation_config=options)
        alone.append(tokenizer.decode(output[0, len(prompt) :].tolist(), skip_special_tokens=True))
    return generate_greedy(model, tokenizer, prompts, NEW_TOKENS, batch_size=4), alone
