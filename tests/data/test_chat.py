"""Conversations to tokens and mask: what the goldens of real templates do not reach."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llm_fp8.config.options import COLUMN_NAMES
from llm_fp8.config.parser import parse_config
from llm_fp8.data.chat import PROMPT_FORM, Encoded, encode_batch
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.prepare import prepare_data
from llm_fp8.data.rows import COLUMNS, OPTIONAL_COLUMNS, conversation_of, detect_columns
from llm_fp8.utils.errors import UserError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}",
)
PROBLEM = {"problem": " What is 7 * 8? ", "generated_solution": "7 * 8 = 56\nThe answer is \\boxed{56}.\n"}
QUESTION = {"role": "user", "content": "2 + 2?"}
CHAT = {"messages": [QUESTION, {"role": "assistant", "content": "4"}]}


def _tokenizer(template: str | None = None, eos: str = "<|im_end|>") -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


def _encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, train_on_prompt: bool = False) -> Encoded:
    form = detect_columns(row)
    encoded = encode_batch([conversation_of(row, form)], form, tokenizer, train_on_prompt)[0]
    assert len(encoded.input_ids) == len(encoded.supervised)
    assert encoded.input_ids[-1] == tokenizer.eos_token_id and encoded.supervised[-1]
    assert tokenizer.bos_token_id not in encoded.input_ids[1:]
    return encoded


def _supervised(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The decoded supervised stretches."""
    runs = groupby(zip(*_encode(row, tokenizer), strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([token for token, _ in run])) for supervised, run in runs if supervised]


def test_columns() -> None:
    def form_of(columns: str, mapped: Sequence[str] = ()) -> str:
        return detect_columns(dict.fromkeys(columns.split()), mapped)

    assert form_of("generated_solution problem text") == "problem_solution"
    assert form_of("instruction input output text") == "alpaca"
    assert form_of("messages text", ["text"]) == "text", "what --columns names comes first"
    with pytest.raises(UserError, match=r"columns .*answer.*understood are: problem \+ .* --columns problem=question"):
        form_of("input answer text", ["input"])
    assert {name for each in (*COLUMNS.values(), *OPTIONAL_COLUMNS.values()) for name in each} == set(COLUMN_NAMES)


def test_the_problem_of_a_row() -> None:
    def problem_of(row: dict[str, Any], form: Any) -> str:
        return conversation_of(row, form).problem()

    system, first = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hi"}
    assert problem_of({"messages": [system, *CHAT["messages"]]}, "messages") == "Be brief.\n2 + 2?"
    assert problem_of({"messages": [first, *CHAT["messages"]]}, "messages") == "2 + 2?"
    assert problem_of({"messages": [system, first]}, "messages") == "Be brief.\nHi"
    assert problem_of({"prompt": "p", "completion": "c"}, "prompt_completion") == "p"
    assert problem_of({"text": None}, "text") == ""
    assert problem_of({"instruction": "Add.\n", "input": "2 and 3", "output": "5"}, "alpaca") == "Add.\n\n2 and 3"
    shared = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    assert problem_of({"conversations": shared}, "sharegpt") == "2 + 2?"


@pytest.mark.parametrize("body", [CHATML, MARKED], ids=["spans", "marked"])
def test_tokens_do_not_depend_on_the_day(body: str) -> None:
    tokenizer = _tokenizer("Today: {{ strftime_now('%d %B %Y') }}\n" + body)
    assert str(tokenizer.decode(_encode(CHAT, tokenizer).input_ids)).startswith("Today: 01 January 2026\n")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[7].content.parts }}", "{% for %}", "{{ x.__mro__ }}"])
@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"], ids=["spans", "marked"])
def test_a_template_that_fails_is_the_users_error(template: str, marks: str) -> None:
    with pytest.raises(UserError, match="--model_name .*chat template"):
        _encode(CHAT, _tokenizer(template + marks))


def test_the_reasoning_of_a_first_turn_is_supervised() -> None:
    first = {"role": "assistant", "content": "<think>hm</think>hello"}
    row = {"messages": [first, QUESTION, {"role": "assistant", "content": "4"}]}
    assert _supervised(row, _tokenizer(CHATML))[0].startswith("<think>hm</think>hello")


def test_bos_and_eos_are_not_doubled() -> None:
    tokenizer = _tokenizer()
    for text in ("1 + 1 = 2", "<|bos|>1 + 1 = 2<|eos|>", "1 + 1 = 2<|eos|><|eos|>\n"):
        assert tokenizer.decode(_encode({"text": text}, tokenizer).input_ids) == "<|bos|>1 + 1 = 2<|eos|>"
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # adds nothing, as Qwen's
    assert tokenizer.bos_token_id not in _encode(PROBLEM, tokenizer).input_ids
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        encode_batch([], "problem_solution", tokenizer)


BPE, METASPACE, NFC = (models.BPE, trainers.BpeTrainer), pre_tokenizers.Metaspace, normalizers.NFC()
MARKS: dict[str, tuple[Any, ...]] = {
    "prepended": (*BPE, normalizers.Prepend("▁"), METASPACE("▁", "never"), decoders.Metaspace()),
    "first": (*BPE, NFC, METASPACE("▁", "first"), decoders.Metaspace()),
    "always": (*BPE, NFC, METASPACE("▁", "always"), decoders.Metaspace()),
    "space": (*BPE, NFC, pre_tokenizers.ByteLevel(), decoders.ByteLevel()),
    "##": (models.WordPiece, trainers.WordPieceTrainer, NFC, METASPACE("▁", "never"), decoders.WordPiece()),
}
"""What a tokenizer does to the beginning of a text, as Llama 2's, Mistral's and others do, or inside a word."""


@pytest.mark.parametrize("mark", MARKS)
def test_a_part_of_a_text_has_no_mark_of_its_own(mark: str, tmp_path: Path) -> None:
    model, trainer, normalizer, pieces, decoder = MARKS[mark]
    backend = Tokenizer(model(unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pieces, decoder
    how = trainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([PROMPT_FORM, *PROBLEM.values()] * 5, how)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    whole = tokenizer("Problem:\nWhat is 7 * 8?\n\nSolution:\n7 * 8 = 56\nThe answer is \\boxed{56}.")["input_ids"]
    assert _encode(PROBLEM, tokenizer).input_ids == [*whole, tokenizer.eos_token_id]
    assert all(_encode(PROBLEM, tokenizer, train_on_prompt=True).supervised)
    ids, supervised = _encode({"prompt": "The ans", "completion": "wer is 56"}, tokenizer)
    prompt = tokenizer("The ans")["input_ids"]
    assert ids[: supervised.index(True)] == prompt
    assert str(tokenizer.decode(ids[:-1])).replace("▁", " ").split() == ["The", "answer", "is", "56"]
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "The answer", "completion": " is"}\n{"prompt": "The ans", "completion": "wer is 56"}\n')
    options = ["--dataset_name", str(file), "--validation_fraction", "0", "--max_seq_length", "16"]
    told = prepare_data(parse_config(options), tokenizer).description
    assert re.search(">>> +is", told.replace("▁", " ")), "the sample has the space that is trained"
