"""Token ids and loss masks of conversations, for real chat templates and every row format, compared with goldens.

`goldens.json` has an entry for each template and each row of `rows.json`: the supervised texts, a hash of ids and mask,
and the parts of the row that are not used. The entry is "refused" if the row raises an error. `python -m
tests.data.test_chat` rewrites the file; review its diff. The templates are those of the models' publishers, without the
branches that these rows do not reach.
"""

from __future__ import annotations

import hashlib
import json
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
from llm_fp8.data.chat import PROMPT_FORM, Encoded, encode_batch, trained_eos
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.prepare import prepare_data
from llm_fp8.data.rows import COLUMNS, OPTIONAL_COLUMNS, UNTEMPLATED, conversation_of, detect_columns
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
"""EOS of each template's tokenizer. The other templates have "<|im_end|>"."""

ROWS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "rows.json").read_text())
"""Rows of every format by title. Some of them are refused."""


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """Return the tiny bundled model's tokenizer with the chat template `name` and the template's special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    if name == "base":
        return tokenizer
    template = (TEMPLATES / f"{name.split()[0]}.jinja").read_text()
    eos = EOS.get(name, "<|im_end|>")
    marks = {*re.findall(r"<\|[^|<>\s]+\|>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_turn>", template), eos}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return tokenizer


def supervised_texts(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each contiguous span of supervised tokens in `encoded`, which has token ids and loss mask."""
    spans = groupby(zip(*encoded, strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([token for token, _ in span])) for supervised, span in spans if supervised]


def golden_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | str:
    """Return the entry of `goldens.json` for `row`, as the package's code computes it."""
    try:
        form = detect_columns(row)
        conversation = conversation_of(row, form)
        ids, mask = encode_batch([conversation], form, tokenizer, False)[0]
    except UserError:
        return "refused"
    texts = supervised_texts(Encoded(ids, mask), tokenizer)
    sha = hashlib.sha256(json.dumps([ids, list(map(int, mask))]).encode()).hexdigest()[:12]
    unused = {"unused": dict(sorted((+conversation.unused).items()))} if +conversation.unused else {}
    return {"sha": sha, "supervised": texts, **unused}


NAMES = ["base", "qwen25 base", *sorted(path.stem for path in TEMPLATES.glob("*.jinja"))]


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_equal_the_goldens(name: str) -> None:
    tokenizer, goldens = tokenizer_of(name), json.loads(GOLDENS.read_text())[name]
    assert {title: golden_of(row, tokenizer) for title, row in ROWS.items()} == goldens


@pytest.mark.parametrize("name", sorted({*NAMES} - {"base", "deepseek_r1", "smollm3"}))
def test_supervision_begins_right_after_the_generation_prompt(name: str) -> None:
    """The test omits two templates: DeepSeek-R1's prompt opens a thought, and SmolLM3 supervises the turn's header."""
    tokenizer, row = tokenizer_of(name), ROWS["one turn"]
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)["input_ids"]
    ids, mask = encode_batch([conversation_of(row, "messages")], "messages", tokenizer, False)[0]
    dated = "strftime_now" in str(tokenizer.chat_template)
    assert mask.index(True) == len(prompt) and (dated or ids[: len(prompt)] == prompt)


BAD_KWARGS = "template arguments that are none"
MARKED_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
    "<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [None, MARKED_CALLS], ids=["smollm3", "chatml"])
def test_masks_equal_those_of_transformers_if_a_template_has_generation_marks(template: str | None) -> None:
    tokenizer, num_compared = tokenizer_of("smollm3"), 0
    tokenizer.chat_template = template or re.sub(r"strftime_now\([^)]*\)", "'today'", str(tokenizer.chat_template))
    for title, row in ROWS.items():
        form = detect_columns(row)
        try:
            conversation = conversation_of(row, form)
            (document,) = encode_batch([conversation], form, tokenizer, False)
        except UserError:
            continue
        # In the following rows our code changes the template's input, two spans touch, or a turn says nothing.
        rows = ("an empty answer", "a turn of reasoning alone", "a developer", "tools and arguments as text")
        rows += ("functions of 2023", "two answers in a row", BAD_KWARGS)
        if title not in rows and form not in UNTEMPLATED and document.input_ids and not conversation.excluded:
            options: dict[str, Any] = {"tools": conversation.tools, **conversation.template_kwargs}
            whole = tokenizer.apply_chat_template(
                conversation.messages, return_dict=True, return_assistant_tokens_mask=True, **options
            )
            ids, marks, num_compared = whole["input_ids"], whole["assistant_masks"], num_compared + 1
            # SmolLM3 marks also the line break after <|im_end|>, which a model never generates.
            after_eos = [False, *(token == tokenizer.eos_token_id for token in ids[:-1])]
            marks = [bool(mark) and not after for mark, after in zip(marks, after_eos, strict=True)]
            length = len(document.input_ids)
            assert document.input_ids == ids[:length] and document.supervised == marks[:length], title
            assert not any(marks[length:])
    assert num_compared > 10


def test_trained_eos_is_the_templates_end_of_an_assistant_turn() -> None:
    """Rows of plain text use no template, and end with the tokenizer's EOS."""
    ends = {"qwen25 base": "<|im_end|>", "phi3": "<|end|>", "base": "<|eos|>"}
    for name in NAMES:
        tokenizer = tokenizer_of(name)
        expected = {"messages": ends.get(name, EOS.get(name, "<|im_end|>")), "text": tokenizer.eos_token}
        assert {form: tokenizer.decode(trained_eos(tokenizer, form)) for form in expected} == expected, name


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_WITH_MARKS = CHATML.replace(
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


def test_form_follows_from_the_columns() -> None:
    def form_of(columns: str, mapped: Sequence[str] = ()) -> str:
        return detect_columns(dict.fromkeys(columns.split()), mapped)

    assert form_of("generated_solution problem text") == "problem_solution"
    assert form_of("instruction input output text") == "alpaca"
    assert form_of("messages text", ["text"]) == "text", "columns that --columns names take precedence"
    with pytest.raises(UserError, match=r"columns .*answer.*supported are: problem \+ .* Use --columns\.$"):
        form_of("input answer text", ["input"])
    assert {name for each in (*COLUMNS.values(), *OPTIONAL_COLUMNS.values()) for name in each} == set(COLUMN_NAMES)


def test_problem_of_a_row_is_its_text_before_the_first_answer() -> None:
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


@pytest.mark.parametrize("body", [CHATML, CHATML_WITH_MARKS], ids=["spans", "marked"])
def test_tokens_do_not_depend_on_the_day(body: str) -> None:
    tokenizer = _tokenizer("Today: {{ strftime_now('%d %B %Y') }}\n" + body)
    assert str(tokenizer.decode(_encode(CHAT, tokenizer).input_ids)).startswith("Today: 01 January 2026\n")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[7].content.parts }}", "{% for %}", "{{ x.__mro__ }}"])
@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"], ids=["spans", "marked"])
def test_failing_template_is_a_user_error(template: str, marks: str) -> None:
    with pytest.raises(UserError, match="--model_name .*chat template"):
        _encode(CHAT, _tokenizer(template + marks))


def test_reasoning_of_a_first_turn_is_supervised() -> None:
    first = {"role": "assistant", "content": "<think>hm</think>hello"}
    row = {"messages": [first, QUESTION, {"role": "assistant", "content": "4"}]}
    tokenizer = _tokenizer(CHATML)
    assert supervised_texts(_encode(row, tokenizer), tokenizer)[0].startswith("<think>hm</think>hello")


def test_bos_and_eos_are_not_doubled() -> None:
    tokenizer = _tokenizer()
    for text in ("1 + 1 = 2", "<|bos|>1 + 1 = 2<|eos|>", "1 + 1 = 2<|eos|><|eos|>\n"):
        assert tokenizer.decode(_encode({"text": text}, tokenizer).input_ids) == "<|bos|>1 + 1 = 2<|eos|>"
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # adds no BOS, like Qwen's
    assert tokenizer.bos_token_id not in _encode(PROBLEM, tokenizer).input_ids
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|bos|>", "<|pad|>")]
    prefix = processors.TemplateProcessing(single="<|bos|> <|pad|> $A", pair="$A $B", special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = prefix  # like GLM's [gMASK]<sop>
    assert tokenizer.decode(_encode({"text": "1"}, tokenizer).input_ids) == "<|bos|><|pad|>1<|eos|>"
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        encode_batch([], "problem_solution", tokenizer, False)


BPE, METASPACE, NFC = (models.BPE, trainers.BpeTrainer), pre_tokenizers.Metaspace, normalizers.NFC()
MARKS: dict[str, tuple[Any, ...]] = {
    "prepended": (*BPE, normalizers.Prepend("▁"), METASPACE("▁", "never"), decoders.Metaspace()),
    "first": (*BPE, NFC, METASPACE("▁", "first"), decoders.Metaspace()),
    "always": (*BPE, NFC, METASPACE("▁", "always"), decoders.Metaspace()),
    "space": (*BPE, NFC, pre_tokenizers.ByteLevel(), decoders.ByteLevel()),
    "##": (models.WordPiece, trainers.WordPieceTrainer, NFC, METASPACE("▁", "never"), decoders.WordPiece()),
}
"""Tokenizers that mark the beginning of a text (as Llama 2's and Mistral's do), or pieces inside a word."""


@pytest.mark.parametrize("mark", MARKS)
def test_text_in_parts_has_the_tokens_of_the_whole_text(mark: str, tmp_path: Path) -> None:
    model, trainer, normalizer, pieces, decoder = MARKS[mark]
    backend = Tokenizer(model(unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pieces, decoder
    bpe_or_wordpiece = trainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([PROMPT_FORM, *PROBLEM.values()] * 5, bpe_or_wordpiece)
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
    description = prepare_data(parse_config(options), tokenizer).description
    assert re.search(">>> +is", description.replace("▁", " ")), "the printed sample includes the supervised space"


def _write_goldens() -> None:
    goldens = {}
    for name in NAMES:
        tokenizer = tokenizer_of(name)
        goldens[name] = {title: golden_of(row, tokenizer) for title, row in ROWS.items()}
    lines = (
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(t)}: {json.dumps(v, ensure_ascii=False)}" for t, v in entries.items())
        + "\n }"
        for name, entries in goldens.items()
    )
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    _write_goldens()
