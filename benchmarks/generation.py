#!/usr/bin/env python
"""Time of greedy answers: `generate_greedy` beside transformers' `generate`, 64 and as many as fit at a time.

    python benchmarks/generation.py --model FOLDER --data gsm8k_train.jsonl --output benchmarks/results/generation.json

All ways get the same prompts and run up to --max_new_tokens or the last EOS. bf16 rounds differently in different
kernels, so the texts agree in part (`num_same_texts`); tests show in fp32 that they are the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from llm_fp8.train.generate import default_batch_size, generate_greedy, generation_dtype  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: E402

from llm_fp8.data.prepare import pad_token_id  # noqa: E402
from llm_fp8.data.prompt import encode_prompt  # noqa: E402
from llm_fp8.observability.metrics import GIB  # noqa: E402
from llm_fp8.observability.provenance import collect_provenance  # noqa: E402
from llm_fp8.utils.errors import OneSentenceParser, run_script  # noqa: E402
from llm_fp8.utils.json_files import read_jsonl, require_writable, write_json_atomic  # noqa: E402


def transformers_texts(
    model: Any, tokenizer: Any, prompts: list[list[int]], max_new_tokens: int, batch_size: int
) -> list[str]:
    """As a user of transformers would: prompts sorted by length, padded on the left, a dynamic cache."""
    options = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad_token_id(tokenizer),
    )
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    texts = [""] * len(prompts)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        batch = tokenizer.pad({"input_ids": [prompts[i] for i in chosen]}, padding_side="left", return_tensors="pt")
        output = model.generate(**batch.to(model.device), generation_config=options)
        new_ids = output[:, batch["input_ids"].shape[1] :]
        for index, text in zip(chosen, tokenizer.batch_decode(new_ids, skip_special_tokens=True), strict=True):
            texts[index] = text
    return texts


def main() -> int:
    """Time every way once, behind a short run of each."""
    parser = OneSentenceParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--data", type=Path, required=True, help="JSONL file with problem")
    parser.add_argument("--num_problems", type=int, default=400)
    parser.add_argument("--max_new_tokens", type=int, default=512)
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    require_writable("--output", settings.output)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=generation_dtype(device)).to(device).eval()
    prompts = [encode_prompt(row["problem"], tokenizer) for row in read_jsonl(settings.data)[: settings.num_problems]]
    num = settings.max_new_tokens
    largest = min(len(prompts), default_batch_size(model.config, max(map(len, prompts)) + num))
    ways: dict[tuple[str, int], Callable[[list[list[int]], int], list[str]]] = {}
    for size in (largest, 64):
        ways["generate_greedy", size] = lambda p, n, size=size: generate_greedy(model, tokenizer, p, n, size)
        ways["transformers", size] = lambda p, n, size=size: transformers_texts(model, tokenizer, p, n, size)
    results, reference = [], None
    record: dict[str, Any] = {"provenance": collect_provenance(sys.argv), "num_problems": len(prompts)}
    record |= {"max_new_tokens": num, "longest_prompt": max(map(len, prompts)), "results": results}
    for (name, size), answer in ways.items():
        answer(prompts[:8], 8)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        texts = answer(prompts, num)
        entry = {"way": name, "batch_size": size, "time_s": time.perf_counter() - began}
        if device.type == "cuda":
            entry["peak_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
        reference = reference or texts
        entry["num_same_texts"] = sum(map(str.__eq__, texts, reference))
        print(entry, flush=True)
        results.append(entry)
        write_json_atomic(settings.output, record)
    return 0


if __name__ == "__main__":
    run_script(main)
