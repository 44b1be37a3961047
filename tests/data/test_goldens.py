"""Token ids and masks of real chat templates and of every form of rows are those that were recorded.

`goldens.json` has, for each template and row, the supervised texts and a hash of ids and mask, or "refused". It is
written anew by `python -m tests.data.test_goldens`; look at what changes. The templates are those that the models'
publishers ship, without what these rows do not reach.
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

from llm_fp8.data.chat import encode_batch
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.rows import detect_columns
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

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def _call(**arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}


def _turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "add"}
ASK_AND_CALL = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [_call(a=1, b=2)]},
    RESULT,
]


def _with_call(function: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"id": "call00001", "type": "function", "function": function}
    return [ASK_AND_CALL[0], {**ASK_AND_CALL[1], "tool_calls": [call]}, RESULT]


ROWS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": _turns("What is 2 + 2?", "It is 4.")},
    "system": {"messages": [SYSTEM, *_turns("What is 2 + 2?", "4")]},
    "several turns": {"messages": _turns("2 + 2?", "4", "And 4 + 4?", "It is 8.", "8 + 8?", " It is 16.\n", "Thanks")},
    "the same words": {"messages": _turns("assistant", "user", "user", "assistant", "user", "user")},
    "the assistant begins": {"messages": [{"role": "assistant", "content": "Hello!"}, *_turns("2 + 2?", "4")]},
    "an empty answer": {"messages": _turns("2 + 2?", "", "Again: 2 + 2?", "4", "And?", "")},
    "tools": {"messages": [*ASK_AND_CALL, {"role": "assistant", "content": "It is 3."}], "tools": [TOOL]},
    "a call at the end": {"messages": [SYSTEM, *ASK_AND_CALL[:2]], "tools": [TOOL]},
    "calls in two rounds": {
        "messages": [
            *ASK_AND_CALL,
            *_turns("It is 3.", "Again?")[::-1][1:],
            *ASK_AND_CALL,
            *_turns("", "3 again.")[1:],
        ],
        "tools": [TOOL],
    },
    "text beside a call": {
        "messages": [
            ASK_AND_CALL[0],
            {**ASK_AND_CALL[1], "content": "Let me add."},
            RESULT,
            *_turns("", "It is 3.")[1:],
        ],
        "tools": [TOOL],
    },
    "tools and arguments as text": {
        "messages": [*_with_call({"name": "add", "arguments": '{"a": 1, "b": 2}'}), *_turns("", "It is 3.")[1:]],
        "tools": json.dumps([TOOL]),
    },
    "arguments that are words": {
        "messages": [*_with_call({"name": "add", "arguments": "1 and 2"}), *_turns("", "It is 3.")[1:]],
        "tools": [TOOL],
    },
    "nulls that Arrow fills in": {
        "messages": [{**message, "name": None, "tool_calls": None} for message in _turns("What is 2 + 2?", "It is 4.")],
        "tools": None,
    },
    "reasoning": {"messages": [*_turns("2 + 2?"), {"role": "assistant", "content": "4", "reasoning_content": "Easy."}]},
    "thinking in tags": {"messages": _turns("2 + 2?", "<think>\nEasy.\n</think>\n\n4")},
    "thinking twice": {
        "messages": _turns("2 + 2?", "<think>\nA.\n</think>\n\n4", "3 + 3?", "<think>\nB.\n</think>\n\n6")
    },
    "an excluded turn": {
        "messages": [*_turns("2 + 2?"), {"role": "assistant", "content": "5", "weight": 0}, *_turns("Sure?", "No: 4.")]
    },
    "problem": {"problem": " What is 7 * 8? ", "generated_solution": "7 * 8 = 56\nThe answer is \\boxed{56}.\n"},
    "alpaca": {"instruction": "Add.\n", "input": "2 and 3", "output": "5"},
    "alpaca without input": {"instruction": "Say 5.", "input": "", "output": "5"},
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "2 + 2?"},
            {"from": "gpt", "value": "4"},
            {"from": "human", "value": "and?"},
        ]
    },
    "prompt and completion": {"prompt": "The ans", "completion": "wer is 5"},
    "text": {"text": "<|bos|>1 + 1 = 2<|eos|>\n"},
    "numbers": {"problem": 67, "generated_solution": 42},
    "half a weight": {"messages": [*_turns("2 + 2?"), {"role": "assistant", "content": "5", "weight": 0.5}]},
    "content in parts": {"messages": [*_turns("2 + 2?"), {"role": "assistant", "content": [{"type": "text"}]}]},
    "no list": {"messages": "hello"},
    "an unknown speaker": {"conversations": [{"from": "bing", "value": "x"}]},
    "no text": {"text": ["x"]},
    "no turn": {"messages": None},
    "nothing": {"problem": "p", "generated_solution": " "},
}


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
        ids, mask = encode_batch([row], detect_columns(list(row)), tokenizer)[0]
    except UserError:
        return "refused"
    stretches = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    texts = [str(tokenizer.decode([i for i, _ in pairs])) for learnt, pairs in stretches if learnt]
    return {"sha": hashlib.sha256(json.dumps([ids, list(map(int, mask))]).encode()).hexdigest()[:12], "learnt": texts}


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
    ids, mask = encode_batch([row], "messages", tokenizer)[0]
    dated = "strftime_now" in str(tokenizer.chat_template)
    assert mask.index(True) == len(prompt) and (dated or ids[: len(prompt)] == prompt)


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
