"""Token ids and masks of real chat templates and of every form of rows are those that were recorded.

`goldens.json` has, for each template and row of `rows.json`, the supervised texts, a hash of ids and mask and what of
the row is not used, or "refused". It is written anew by `python -m tests.data.test_goldens`; look at what changes. The
templates are those that the models' publishers ship, without what these rows do not reach.
"""

from __future__ import annotations

import hashlib
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llm_fp8.data.chat import encode_batch, trained_eos
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.rows import AS_THEY_STAND, conversation_of, detect_columns
from llm_fp8.utils.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
GOLDENS = Path(__file__).parent / "goldens.json"
EOS = {
    "llama31": "<|eot_id|>",
    "llama32": "<|eot_id|>",
    "mistral": "</s>",
    "mistral_small3": "</s>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|endoftext|>",
    "olmo2": "<|endoftext|>",
    "granite3": "<|end_of_text|>",
    "deepseek_v3": "<|end▁of▁sentence|>",
    "deepseek_r1": "<|end▁of▁sentence|>",
    "glm4": "<|user|>",
    "chatglm4": "<|endoftext|>",
    "gpt_oss": "<|return|>",
    "qwen25 base": "<|endoftext|>",
}
"""EOS of each template's tokenizer; "<|im_end|>" of those that are not here."""

ROWS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "rows.json").read_text())
"""Rows of every form, and some that are refused."""


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """The embedded tokenizer with a template, and the template's special tokens as single tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    if name == "base":
        return tokenizer
    template = (TEMPLATES / f"{name.split()[0]}.jinja").read_text()
    eos = EOS.get(name, "<|im_end|>")
    marks = {*re.findall(r"<\|[^|<>\s]+\|>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_turn>", template), eos}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


def encoded_as(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | str:
    """What is recorded of a row."""
    try:
        form = detect_columns(row)
        conversation = conversation_of(row, form)
        ids, mask = encode_batch([conversation], form, tokenizer)[0]
    except UserError:
        return "refused"
    stretches = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    texts = [str(tokenizer.decode([i for i, _ in pairs])) for supervised, pairs in stretches if supervised]
    sha = hashlib.sha256(json.dumps([ids, list(map(int, mask))]).encode()).hexdigest()[:12]
    unused = {"unused": dict(sorted((+conversation.unused).items()))} if +conversation.unused else {}
    return {"sha": sha, "supervised": texts, **unused}


NAMES = ["base", "qwen25 base", *sorted(path.stem for path in TEMPLATES.glob("*.jinja"))]


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_are_those_recorded(name: str) -> None:
    tokenizer, goldens = tokenizer_of(name), json.loads(GOLDENS.read_text())[name]
    assert {title: encoded_as(row, tokenizer) for title, row in ROWS.items()} == goldens


@pytest.mark.parametrize("name", sorted({*NAMES} - {"base", "deepseek_r1", "smollm3"}))
def test_training_begins_where_generation_does(name: str) -> None:
    """But for templates that are refused, or whose own marks begin with the role."""
    tokenizer, row = tokenizer_of(name), ROWS["one turn"]
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)["input_ids"]
    ids, mask = encode_batch([conversation_of(row, "messages")], "messages", tokenizer)[0]
    dated = "strftime_now" in str(tokenizer.chat_template)
    assert mask.index(True) == len(prompt) and (dated or ids[: len(prompt)] == prompt)


NONE_SUCH = "template arguments that are none"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [None, MARKED], ids=["smollm3", "chatml"])
def test_masks_are_those_of_transformers_where_a_template_marks(template: str | None) -> None:
    tokenizer, compared = tokenizer_of("smollm3"), 0
    tokenizer.chat_template = template or re.sub(r"strftime_now\([^)]*\)", "'today'", str(tokenizer.chat_template))
    for title, row in ROWS.items():
        form = detect_columns(row)
        try:
            conversation = conversation_of(row, form)
            (document,) = encode_batch([conversation], form, tokenizer)
        except UserError:
            continue
        # Of these the template is given something else, or two marked parts touch.
        ours = ("a developer", "tools and arguments as text", "functions of 2023", "two answers in a row", NONE_SUCH)
        if title not in ours and form not in AS_THEY_STAND and document.input_ids and not conversation.excluded:
            options: dict[str, Any] = {"tools": conversation.tools, **conversation.template_kwargs}
            whole = tokenizer.apply_chat_template(
                conversation.messages, return_dict=True, return_assistant_tokens_mask=True, **options
            )
            ids, marks, compared = whole["input_ids"], whole["assistant_masks"], compared + 1
            # SmolLM3's marks have the line break after <|im_end|> too, which nothing generates.
            marks = [
                bool(mark) and before != tokenizer.eos_token_id
                for mark, before in zip(marks, [0, *ids[:-1]], strict=True)
            ]
            length = len(document.input_ids)
            assert document.input_ids == ids[:length] and document.supervised == marks[:length], title
            assert not any(marks[length:])
    assert compared > 10


def test_the_end_that_is_taught() -> None:
    """As the template ends an assistant's turn; rows that no template touches end with the tokenizer's EOS."""
    ends = {"qwen25 base": "<|im_end|>", "phi3": "<|end|>", "base": "<|eos|>"}
    for name in NAMES:
        tokenizer = tokenizer_of(name)
        for form, wanted in (("messages", ends.get(name, EOS.get(name, "<|im_end|>"))), ("text", tokenizer.eos_token)):
            assert tokenizer.decode(trained_eos(tokenizer, form)) == wanted, (name, form)


def _write() -> None:
    goldens = {}
    for name in NAMES:
        tokenizer = tokenizer_of(name)
        goldens[name] = {title: encoded_as(row, tokenizer) for title, row in ROWS.items()}
    lines = (
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(t)}: {json.dumps(v, ensure_ascii=False)}" for t, v in entries.items())
        + "\n }"
        for name, entries in goldens.items()
    )
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _write()
