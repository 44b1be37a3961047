"""Rows to tokens and supervised mask, with real tokenizers and the templates of the model families."""

from __future__ import annotations

import copy
import json
import resource
import signal
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llm_fp8.config.options import COLUMN_NAMES
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.data.prompt import (
    ANSWER_COLUMN,
    COLUMNS,
    OPTIONAL_COLUMNS,
    PROMPT_FORM,
    Encoded,
    describe_prompt_form,
    detect_columns,
    encode_batch,
    encode_prompt,
    problem_of,
)
from llm_fp8.utils.errors import UserError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 3: writes BOS itself, ends turns with a token that is the tokenizer's EOS.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | "
    "trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% "
    "endif %}"
)
# Mistral: no generation prompt, EOS after the answer, a space before it; refuses two user turns in a row.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}[INST] {{ m['content'] "
    "}}[/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Qwen 3: only the last assistant turn shows (empty) reasoning, so the beginning of a conversation changes as it goes
# on.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen 3.5: its prompt begins the reasoning.
QWEN35 = QWEN3.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
# Phi-3: one EOS, behind the whole conversation.
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ "
    "m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A system message of the template's own where the conversation has none.
SYSTEM_FIRST = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
)
TOOLS = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}call{{ c.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURN_TOKENS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
]

PROBLEM = {"problem": " What is 7 * 8? ", "generated_solution": "7 * 8 = 56\nThe answer is \\boxed{56}.\n"}
CHAT = {
    "messages": [
        {"role": "user", "content": "What is 2 + 2?", "name": None},
        {"role": "assistant", "content": "4", "name": None},
        {"role": "user", "content": "And 4 + 4?", "name": None},
        {"role": "assistant", "content": "It is 8.", "name": None},
    ]
}


def _tokenizer(template: str | None = None, eos: str | None = None) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    if template is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": TURN_TOKENS})
        tokenizer.chat_template = template
        if eos is not None:
            tokenizer.eos_token = eos
    return tokenizer


def _sentencepiece_like() -> PreTrainedTokenizerFast:
    """Metaspace puts a space before every text, as Llama 2 and Mistral do: pieces alone tokenise unlike the whole."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([PROMPT_FORM, PROBLEM["problem"], PROBLEM["generated_solution"]] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, train_on_prompt: bool = False) -> Encoded:
    encoded = encode_batch([row], detect_columns(list(row)), tokenizer, train_on_prompt)[0]
    assert encoded is not None
    _check(encoded, tokenizer)
    return encoded


def _check(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> None:
    """What holds for every document: EOS last, supervised; at most one BOS, at the front."""
    assert len(encoded.input_ids) == len(encoded.supervised)
    assert encoded.input_ids[-1] == tokenizer.eos_token_id and encoded.supervised[-1]
    assert tokenizer.bos_token_id not in encoded.input_ids[1:]


def _supervised(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The decoded supervised stretches."""
    stretches: list[list[int]] = []
    before = False
    for token, supervised in zip(encoded.input_ids, encoded.supervised, strict=True):
        if supervised and not before:
            stretches.append([])
        if supervised:
            stretches[-1].append(token)
        before = supervised
    return [str(tokenizer.decode(stretch)) for stretch in stretches]


def test_columns() -> None:
    assert detect_columns(["generated_solution", "problem", "text"]) == "problem_solution"
    assert detect_columns(["messages", "id"]) == "messages"
    assert detect_columns(["prompt", "completion"]) == "prompt_completion"
    assert detect_columns(["text"]) == "text"
    assert detect_columns(["id", "conversations"]) == "sharegpt"
    assert detect_columns(["instruction", "input", "output", "text"]) == "alpaca"
    assert detect_columns(["messages", "text"], mapped=["text"]) == "text", "what --columns names comes first"
    assert (
        detect_columns(["problem", "generated_solution", "expected_answer"], ["expected_answer"]) == "problem_solution"
    )
    both = ["problem", "generated_solution", "instruction", "output", "input"]
    assert detect_columns(both, mapped=["input"]) == "alpaca"
    with pytest.raises(
        UserError, match=r"columns question, answer; understood are: problem \+ generated_solution; messages;"
    ):
        detect_columns(["question", "answer"])


@pytest.mark.parametrize("mapped", [["problem"], ["input"], ["text", "tools"], ["text", "expected_answer"]])
def test_a_mapped_column_that_nothing_would_use_is_refused(mapped: list[str]) -> None:
    with pytest.raises(
        UserError, match=f"--columns gives {', '.join(mapped)}, and no form .* columns are then .*answer"
    ):
        detect_columns([*mapped, "answer", "text"], mapped)


def test_every_column_can_be_given_another_name() -> None:
    forms = {*(name for each in (*COLUMNS.values(), *OPTIONAL_COLUMNS.values()) for name in each), ANSWER_COLUMN}
    assert set(COLUMN_NAMES) == forms


def test_alpaca_is_a_problem_and_its_solution() -> None:
    for given, problem in (("2 and 3", "Add.\n\n2 and 3"), ("", "Add."), (None, "Add.")):
        row = {"instruction": "Add.\n", "input": given, "output": "5"}
        same = {"problem": problem, "generated_solution": "5"}
        for template in (None, CHATML):
            tokenizer = _tokenizer(template)
            assert encode_batch([row], "alpaca", tokenizer) == encode_batch([same], "problem_solution", tokenizer)
        assert problem_of(row, "alpaca") == problem
    assert problem_of({"instruction": "Add.", "output": "5"}, "alpaca") == "Add."
    assert not encode_batch([{"instruction": "Add.", "input": "", "output": " "}], "alpaca", _tokenizer())[0].input_ids


def test_sharegpt_is_a_conversation() -> None:
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    shared = [{"from": role, "value": f"from {role}"} for role in roles] + [{"from": "human", "value": "and?"}]
    messages = [{"role": role, "content": f"from {name}"} for name, role in roles.items()]
    for template in (None, CHATML):
        tokenizer = _tokenizer(template)
        wanted = encode_batch([{"messages": messages}], "messages", tokenizer)
        for row in ({"conversations": shared}, {"conversations": messages}):
            assert encode_batch([row], "sharegpt", tokenizer) == wanted
    assert problem_of({"conversations": shared}, "sharegpt") == "from human"
    with pytest.raises(UserError, match=r"a message in 'conversations' is from 'bing'; understood are human, gpt,"):
        encode_batch([{"conversations": [{"from": "bing", "value": "x"}]}], "sharegpt", _tokenizer())
    with pytest.raises(UserError, match=r"'conversations' must be a list of messages"):
        encode_batch([{"conversations": [{"from": "gpt", "value": 3}]}], "sharegpt", _tokenizer())


def test_the_problem_of_a_row() -> None:
    assert problem_of({"problem": "p", "generated_solution": "s"}, "problem_solution") == "p"
    assert problem_of(CHAT, "messages") == "What is 2 + 2?"
    brief, first = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hi"}
    assert problem_of({"messages": [brief, *CHAT["messages"]]}, "messages") == "What is 2 + 2?"
    assert problem_of({"messages": [first, *CHAT["messages"]]}, "messages").startswith("Hi\nWhat is 2 + 2?")
    assert problem_of({"prompt": "p", "completion": "c"}, "prompt_completion") == "p"
    assert problem_of({"text": None}, "text") == ""


def test_prompt_form_without_a_template() -> None:
    tokenizer = _tokenizer()
    encoded = _encode(PROBLEM, tokenizer)
    text = "<|bos|>Problem:\nWhat is 7 * 8?\n\nSolution:\n7 * 8 = 56\nThe answer is \\boxed{56}.<|eos|>"
    assert tokenizer.decode(encoded.input_ids) == text
    assert _supervised(encoded, tokenizer) == ["7 * 8 = 56\nThe answer is \\boxed{56}.<|eos|>"]
    assert encoded.input_ids.count(tokenizer.eos_token_id) == 1


def test_train_on_prompt_supervises_everything() -> None:
    tokenizer = _tokenizer()
    alone, everything = _encode(PROBLEM, tokenizer), _encode(PROBLEM, tokenizer, train_on_prompt=True)
    assert everything.input_ids == alone.input_ids
    assert all(everything.supervised)


@pytest.mark.parametrize(
    ("template", "eos", "answer"),
    [
        (CHATML, "<|im_end|>", "7 * 8 = 56\nThe answer is \\boxed{56}.<|im_end|>"),
        # A base model whose template ends turns with another token than EOS: both are learnt.
        (CHATML, "<|eos|>", "7 * 8 = 56\nThe answer is \\boxed{56}.<|im_end|>\n<|eos|>"),
        (LLAMA3, "<|eot_id|>", "7 * 8 = 56\nThe answer is \\boxed{56}.<|eot_id|>"),
        (MISTRAL, "<|eos|>", " 7 * 8 = 56\nThe answer is \\boxed{56}.<|eos|>"),
        (QWEN3, "<|im_end|>", "<think>\n\n</think>\n\n7 * 8 = 56\nThe answer is \\boxed{56}.<|im_end|>"),
        (MARKED, "<|im_end|>", "7 * 8 = 56\nThe answer is \\boxed{56}.<|im_end|>"),
        (MARKED, "<|eos|>", "7 * 8 = 56\nThe answer is \\boxed{56}.<|im_end|><|eos|>"),
    ],
)
def test_chat_templates(template: str, eos: str, answer: str) -> None:
    tokenizer = _tokenizer(template, eos)
    encoded = _encode(PROBLEM, tokenizer)
    assert _supervised(encoded, tokenizer) == [answer]
    learnt = [token for token, supervised in zip(encoded.input_ids, encoded.supervised, strict=True) if supervised]
    assert learnt.count(tokenizer.eos_token_id) == 1
    # The template's own rendering, and nothing else, stands before the answer.
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 7 * 8?"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert encoded.input_ids[: len(prompt)] == prompt
    assert encoded.supervised.index(True) == len(prompt)
    bos = [tokenizer.bos_token_id] if template in (LLAMA3, MISTRAL) else []
    assert [i for i in encoded.input_ids if i == tokenizer.bos_token_id] == bos


@pytest.mark.parametrize("template", [None, CHATML, LLAMA3, MISTRAL, QWEN3, MARKED])
def test_generation_starts_where_training_started(template: str | None) -> None:
    tokenizer = _tokenizer(template)
    encoded = _encode(PROBLEM, tokenizer)
    prompt = encode_prompt(PROBLEM["problem"], tokenizer)
    assert encoded.input_ids[: len(prompt)] == prompt
    assert not any(encoded.supervised[: len(prompt)]) and encoded.supervised[len(prompt)]
    assert str(tokenizer.decode(prompt)).count("What is 7 * 8?") == 1


@pytest.mark.parametrize(
    ("template", "eos", "answers"),
    [
        (CHATML, "<|im_end|>", ["4<|im_end|>", "It is 8.<|im_end|>"]),
        (LLAMA3, "<|eot_id|>", ["4<|eot_id|>", "It is 8.<|eot_id|>"]),
        (MISTRAL, "<|eos|>", [" 4<|eos|>", " It is 8.<|eos|>"]),
        (QWEN3, "<|im_end|>", ["4<|im_end|>", "<think>\n\n</think>\n\nIt is 8.<|im_end|>"]),
        # The first turn's reasoning is asked for and no longer shown; the second's begins in the prompt.
        (QWEN35, "<|im_end|>", ["4<|im_end|>", "\n</think>\n\nIt is 8.<|im_end|>"]),
        (PHI3, "<|eos|>", ["4<|end|>\n", "It is 8.<|end|>\n<|eos|>"]),
        (MARKED, "<|im_end|>", ["4<|im_end|>", "It is 8.<|im_end|>"]),
        (None, "<|eos|>", ["4<|eos|>", "It is 8.<|eos|>"]),
    ],
)
def test_every_assistant_turn_is_supervised(template: str | None, eos: str, answers: list[str]) -> None:
    tokenizer = _tokenizer(template, eos)
    assert _supervised(_encode(CHAT, tokenizer), tokenizer) == answers


def test_what_follows_the_last_answer_is_cut_off() -> None:
    tokenizer = _tokenizer(CHATML, "<|im_end|>")
    longer = {"messages": [*CHAT["messages"], {"role": "user", "content": "Thanks"}]}
    assert _encode(longer, tokenizer) == _encode(CHAT, tokenizer)


def test_a_system_message_belongs_to_the_prompt() -> None:
    tokenizer = _tokenizer(LLAMA3, "<|eot_id|>")
    row = {"messages": [{"role": "system", "content": "Be brief."}, *CHAT["messages"]]}
    assert _supervised(_encode(row, tokenizer), tokenizer) == ["4<|eot_id|>", "It is 8.<|eot_id|>"]


def test_a_conversation_that_the_assistant_begins() -> None:
    """What the template writes before its first words is not learnt: BOS, a system message of its own, the role."""
    begins = {"messages": [{"role": "assistant", "content": " Hello! "}, *CHAT["messages"]]}
    for template, eos in ((LLAMA3, "<|eot_id|>"), (CHATML, "<|im_end|>"), (SYSTEM_FIRST, "<|im_end|>")):
        tokenizer = _tokenizer(template, eos)
        first = _supervised(_encode(begins, tokenizer), tokenizer)[0]
        assert first.strip() == f"Hello!{' ' if template != LLAMA3 else ''}{eos}"


def test_first_words_that_the_template_has_too() -> None:
    for content, template, eos in (("assistant", LLAMA3, "<|eot_id|>"), ("You", SYSTEM_FIRST, "<|im_end|>")):
        tokenizer = _tokenizer(template, eos)
        begins = {"messages": [{"role": "assistant", "content": content}, *CHAT["messages"]]}
        assert _supervised(_encode(begins, tokenizer), tokenizer)[0].strip() == f"{content}{eos}"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "description": None}}
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": 2, "c": None}}}
TOOL_CHAT = {
    "messages": [
        {"role": "user", "content": "1 + 2?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_calls": None},
        {"role": "assistant", "content": "3.", "tool_calls": None},
        {"role": "user", "content": "Once more", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ],
    "tools": [TOOL],
}


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_reach_the_template_and_calls_are_learnt(as_text: bool) -> None:
    tokenizer = _tokenizer(TOOLS, "<|im_end|>")
    row = {**TOOL_CHAT, "tools": json.dumps([TOOL])} if as_text else TOOL_CHAT
    encoded = _encode(row, tokenizer)
    call = 'call{"name": "add", "arguments": {"a": 1, "b": 2}}<|im_end|>'
    assert _supervised(encoded, tokenizer) == [call, "3.<|im_end|>", call]
    shown = {key: value for key, value in TOOL["function"].items() if value is not None}
    assert tokenizer.decode(encoded.input_ids).startswith(f"tools: {json.dumps([{**TOOL, 'function': shown}])}\n")


def test_reasoning_that_later_turns_hide_is_not_learnt() -> None:
    """As Qwen3's template has it: of a turn before the last question the answer is shown, or the calls."""
    hidden = "{% set said = m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip() %}"
    think = (
        "{% if loop.last and '</think>' not in said and m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    )
    template = TOOLS.replace("{{ m['content'] }}", f"{hidden}{think}{{{{ said }}}}")
    tokenizer = _tokenizer(template, "<|im_end|>")
    call = 'call{"name": "add", "arguments": {"a": 1, "b": 2}}<|im_end|>'
    *first, last = _supervised(_encode(TOOL_CHAT, tokenizer), tokenizer)
    assert first == [call, "3.<|im_end|>"] and last == "<think>\n\n</think>\n\n" + call
    turns = [("1 + 2?", "<think>\nhm\n</think>\n\n3."), ("Once more", "<think>\nyes\n</think>\n\n3 again.")]
    messages = [{"role": r, "content": c} for q, a in turns for r, c in (("user", q), ("assistant", a))]
    learnt = _supervised(_encode({"messages": messages}, tokenizer), tokenizer)
    assert learnt == ["3.<|im_end|>", f"{turns[1][1]}<|im_end|>"]


def test_reasoning_before_calls_is_hidden_in_what_stands_before_later_turns() -> None:
    """As in Qwen3.5's template, whose prompt begins the reasoning: `<t` begins both what it hides and the calls."""
    since = (
        "{% set ns = namespace(i=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.i = loop.index0 %}"
    )
    said = (
        "{% if m['role'] == 'assistant' and loop.index0 > ns.i %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ m['content'] }}"
    )
    template = since + "{% endif %}{% endfor %}" + TOOLS.replace("{{ m['content'] }}", said)
    template = template.replace("call{{", "<tool_call>{{").replace(
        "assistant\n{% endif", "assistant\n<think>\n{% endif"
    )
    first, last = (
        [
            {"role": "user", "content": f"1 + 2{end}"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "a tool"},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "3.", "reasoning_content": "it is there"},
        ]
        for end in ("?", ", again?")
    )
    row = {"messages": [*first, *last], "tools": [TOOL]}
    tokenizer = _tokenizer(template, "<|im_end|>")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}<|im_end|>'
    shown = [f"a tool\n</think>\n\n{call}", "it is there\n</think>\n\n3.<|im_end|>"]
    assert _supervised(_encode(row, tokenizer), tokenizer) == [call, "3.<|im_end|>", *shown]


# As Llama 3.1 to 3.3 have it: a message with calls shows the call alone.
LLAMA3_CALLS = LLAMA3.replace(
    "{{ m['content'] | trim }}",
    "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m['content'] | trim }}{% endif %}",
)
# As DeepSeek-R1-Distill has it: reasoning is cut off every answer, and the prompt for one begins with it.
R1_CUTS = "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
R1_DISTILL = (
    "{{ bos_token }}{% for m in messages %}{% set content = m['content'] %}{% if m['role'] == 'user' %}[INST]"
    "{{ content }}{% else %}" + R1_CUTS + "[/INST]{{ content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[/INST]<think>\n{% endif %}"
)


def _answered(**answer: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "8 + 8?"}, {"role": "assistant", **answer}]}


@pytest.mark.parametrize(
    ("template", "answer", "lost"),
    [
        (
            LLAMA3_CALLS,
            {"content": "Let me see.", "tool_calls": [CALL]},
            "'Let me see.' in 'content' beside 'tool_calls'",
        ),
        (LLAMA3, {"content": "16", "reasoning_content": "Hm, 8."}, "'Hm, 8.' in 'reasoning_content'"),
        (MARKED, {"content": "16", "reasoning_content": "Hm, 8."}, "'Hm, 8.' in 'reasoning_content'"),
        (None, {"content": "16", "thinking": "Hm, 8."}, "'Hm, 8.' in 'thinking'"),
        (R1_DISTILL, {"content": "<think>\nHm, 8.\n</think>\n\n16"}, "'Hm, 8.' in 'content'"),
    ],
    ids=["calls", "reasoning", "marked", "no template", "R1"],
)
def test_an_answer_of_which_the_template_shows_a_part_is_refused(
    template: str | None, answer: dict[str, Any], lost: str
) -> None:
    with pytest.raises(UserError, match=f"has {lost}, and the tokenizer has no chat template that shows it"):
        _encode(_answered(**answer), _tokenizer(template))
    # What is not learnt may be left out.
    learnt = _encode(
        {"messages": [*_answered(**answer, weight=0)["messages"], *CHAT["messages"]]}, _tokenizer(LLAMA3_CALLS)
    )
    assert sum(learnt.supervised)


def test_reasoning_that_the_template_shows_is_learnt() -> None:
    """Under any of its names, and within the content whatever white space the template writes there."""
    said = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m['content'] }}"
    reasoned = _tokenizer(CHATML.replace("{{ m['content'] }}", said), "<|im_end|>")
    learnt = _supervised(_encode(_answered(content="16", reasoning_content="Hm, 8."), reasoned), reasoned)
    assert learnt[-1] == "<think>\nHm, 8.\n</think>\n\n16<|im_end|>"
    spaced = _tokenizer(
        CHATML.replace("m['content']", "m['content'].replace('</think>', '\n</think>\n')"), "<|im_end|>"
    )
    learnt = _supervised(_encode(_answered(content="<think>Hm, 8.</think>16"), spaced), spaced)
    assert learnt[-1] == "<think>Hm, 8.\n</think>\n16<|im_end|>"


def test_a_prompt_that_begins_with_reasoning_is_named_and_the_advice_works() -> None:
    with pytest.raises(
        UserError, match=r"first '<think>\\n', later '4.*\{% generation %\} blocks, or give the data as"
    ):
        _encode(CHAT, _tokenizer(R1_DISTILL))
    shown = "{{ content + eos_token }}"
    marked = _tokenizer(R1_DISTILL.replace(shown, "{% generation %}" + shown + "{% endgeneration %}"))
    assert _supervised(_encode(CHAT, marked), marked) == ["4<|eos|>", "It is 8.<|eos|>"]
    plain = _tokenizer(R1_DISTILL.replace("[/INST]<think>\n", "[/INST]"))
    assert _supervised(_encode(CHAT, plain), plain) == ["4<|eos|>", "It is 8.<|eos|>"]
    reasoned = _tokenizer(R1_DISTILL.replace(R1_CUTS, ""))
    row = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n4"}]}
    assert _supervised(_encode(row, reasoned), reasoned) == ["Hm.\n</think>\n\n4<|eos|>"]


TEXT_ARGUMENTS = TOOLS.replace("c.function | tojson", "c.function.name + '|' + c.function.arguments")


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": null}', "a = 1", "[1, 2]"])
def test_arguments_of_calls_may_be_json_text(arguments: str) -> None:
    """As OpenAI's API has them: an object for a template that writes the JSON, text for one that joins it."""
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    row = {"messages": [{"role": "user", "content": "1 + 2?"}, turn], "tools": [TOOL]}
    bare = {"messages": [row["messages"][0], {**turn, "tool_calls": [{"name": "add", "arguments": arguments}]}]}
    tokenizer, joined = _tokenizer(TOOLS, "<|im_end|>"), _tokenizer(TEXT_ARGUMENTS, "<|im_end|>")
    shown = arguments if arguments.startswith("{") else json.dumps(arguments)
    assert _supervised(_encode(row, tokenizer), tokenizer) == [f'call{{"name": "add", "arguments": {shown}}}<|im_end|>']
    assert _supervised(_encode(row, joined), joined) == [f"calladd|{arguments}<|im_end|>"]
    without_function = _tokenizer(TOOLS.replace("c.function", "c"), "<|im_end|>")
    assert _supervised(_encode(bare, without_function), without_function) == [
        f'call{{"name": "add", "arguments": {shown}}}<|im_end|>'
    ]


def test_tools_that_no_template_shows_are_refused() -> None:
    without = {**TOOL_CHAT, "tools": None}
    for template in (None, CHATML):
        with pytest.raises(UserError, match="a conversation has 'tools', and the tokenizer has no chat template that"):
            _encode(TOOL_CHAT, _tokenizer(template))
        with pytest.raises(UserError, match="a conversation has 'tool_calls', and"):
            _encode(without, _tokenizer(template))
    with pytest.raises(UserError, match="'tools' is neither a list nor the JSON text of one"):
        _encode({**TOOL_CHAT, "tools": "add, subtract"}, _tokenizer(TOOLS))
    with pytest.raises(UserError, match="'tools' is a dict; it must be a list"):
        _encode({**TOOL_CHAT, "tools": TOOL}, _tokenizer(TOOLS))


@pytest.mark.parametrize("unlearnt", [{"content": ""}, {"content": None}, {"content": "Hello?", "weight": 0}])
@pytest.mark.parametrize(("template", "eos"), [(None, "<|eos|>"), (LLAMA3, "<|eot_id|>"), (CHATML, "<|im_end|>")])
def test_an_answer_that_is_empty_or_has_no_weight_is_not_learnt(
    template: str | None, eos: str, unlearnt: dict[str, Any]
) -> None:
    tokenizer = _tokenizer(template, None if template is None else eos)
    turn = {"role": "assistant", **unlearnt}
    row = {"messages": [{"role": "user", "content": "Hm"}, turn, *CHAT["messages"], turn]}
    assert _supervised(_encode(row, tokenizer), tokenizer) == [f"4{eos}", f"It is 8.{eos}"]


def test_weights_that_are_no_exclusion_or_cannot_be_kept_are_refused() -> None:
    def row(weight: float) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "4", "weight": weight}
        return {"messages": [{"role": "user", "content": "2 + 2?"}, answer, *CHAT["messages"]]}

    with pytest.raises(UserError, match="a message has the weight 0.5; give 0 or 1"):
        _encode(row(0.5), _tokenizer(CHATML, "<|im_end|>"))
    with pytest.raises(UserError, match="weight 0, and the tokenizer's chat template itself marks"):
        _encode(row(0), _tokenizer(MARKED, "<|im_end|>"))


@pytest.mark.parametrize("body", [CHATML, MARKED], ids=["spans", "marked"])
def test_tokens_do_not_depend_on_the_day(body: str) -> None:
    tokenizer = _tokenizer("Today: {{ strftime_now('%d %B %Y') }}\n" + body, "<|im_end|>")
    assert str(tokenizer.decode(_encode(CHAT, tokenizer).input_ids)).startswith("Today: 01 January 2026\n")
    assert str(tokenizer.decode(encode_prompt("1 + 1?", tokenizer))).startswith("Today: 01 January 2026\n")
    assert "2026-01-01" in describe_prompt_form("messages", tokenizer)
    with pytest.raises(UserError, match="asks for the date with a format that is no literal"):
        encode_prompt("1 + 1?", _tokenizer("{% set f = '%Y' %}{{ strftime_now(f) }}" + body))


def test_a_template_that_refuses_is_the_users_error() -> None:
    tokenizer = _tokenizer(MISTRAL)
    row = {"messages": [{"role": "user", "content": "a"}, *CHAT["messages"]]}
    with pytest.raises(UserError, match="fails on a conversation of the roles user, user.*roles must alternate"):
        _encode(row, tokenizer)


@pytest.mark.parametrize(
    ("template", "reason"),
    {
        "{{ 1 / 0 }}": "ZeroDivisionError",
        "{{ messages[7].content.parts }}": "no element 7",
        "{% for %}": "Expected an expression",
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}": "RecursionError",
        "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}": "it takes more than 2 s",
        "{{ 'a' * 10**11 }}": "MemoryError",
        "{{ ''.__class__.__mro__ }}": "unsafe",
    }.items(),
)
@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"], ids=["spans", "marked"])
def test_a_template_that_fails_is_the_users_error(
    monkeypatch: pytest.MonkeyPatch, template: str, reason: str, marks: str
) -> None:
    monkeypatch.setattr("llm_fp8.data.prompt.TEMPLATE_TIME_S", 2)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError, match=f"chat template fails on a conversation of .*{reason}"):
        _encode(CHAT, _tokenizer(template + marks))
    assert resource.getrlimit(resource.RLIMIT_AS) == limits and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_template_that_rewrites_the_beginning_is_refused() -> None:
    # The system message moves to the last user turn, as in early Mistral templates.
    template = "{% for m in messages %}{% if loop.last %}!{% endif %}[INST]{{ m['content'] }}[/INST]{% endfor %}"
    with pytest.raises(UserError, match="assistant turns cannot be told apart"):
        _encode(CHAT, _tokenizer(template))


def test_prompt_and_completion_stand_as_they_are() -> None:
    for template in (None, CHATML):
        tokenizer = _tokenizer(template)
        encoded = _encode({"prompt": "Q: 1 + 1? A:", "completion": " 2"}, tokenizer)
        assert tokenizer.decode(encoded.input_ids) == "<|bos|>Q: 1 + 1? A: 2<|eos|>"
        assert _supervised(encoded, tokenizer) == [" 2<|eos|>"]


def test_text_is_all_supervised_and_bos_and_eos_are_not_doubled() -> None:
    tokenizer = _tokenizer()
    for text in ("1 + 1 = 2", "<|bos|>1 + 1 = 2<|eos|>", "1 + 1 = 2<|eos|><|eos|>\n"):
        encoded = _encode({"text": text}, tokenizer)
        assert tokenizer.decode(encoded.input_ids) == "<|bos|>1 + 1 = 2<|eos|>"
        assert _supervised(encoded, tokenizer)[0].endswith("1 + 1 = 2<|eos|>")


def test_a_token_across_the_boundary_is_cut() -> None:
    tokenizer = _tokenizer()
    # " answer" is one token of the whole text; generation would start from the tokens of "The".
    encoded = _encode({"prompt": "The ans", "completion": "wer is 5"}, tokenizer)
    prompt = tokenizer("The ans")["input_ids"]
    assert encoded.input_ids[: len(prompt)] == prompt
    assert _supervised(encoded, tokenizer) == ["wer is 5<|eos|>"]
    assert len(tokenizer("The answer")["input_ids"]) < len(tokenizer("The ans")["input_ids"]) + 1


def test_a_tokenizer_that_puts_a_space_before_every_text() -> None:
    tokenizer = _sentencepiece_like()
    encoded = _encode(PROBLEM, tokenizer)
    whole = tokenizer("Problem:\nWhat is 7 * 8?\n\nSolution:\n7 * 8 = 56\nThe answer is \\boxed{56}.")["input_ids"]
    assert encoded.input_ids == [*whole, tokenizer.eos_token_id]
    assert _supervised(encoded, tokenizer) == ["7 * 8 = 56\nThe answer is \\boxed{56}.</s>"]


def test_a_tokenizer_without_bos() -> None:
    tokenizer = _tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # adds nothing, as Qwen's
    encoded = _encode(PROBLEM, tokenizer)
    assert tokenizer.bos_token_id not in encoded.input_ids


def test_pad_may_be_eos() -> None:
    tokenizer = _tokenizer()
    same = copy.deepcopy(tokenizer)
    same.pad_token = same.eos_token
    assert _encode(PROBLEM, same) == _encode(PROBLEM, tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "p", "generated_solution": None},
        {"problem": "p", "generated_solution": "  \n"},
        {"problem": "", "generated_solution": "s"},
        {"messages": []},
        {"messages": None},
        {"messages": [{"role": "user", "content": "q"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]},
        {"prompt": "p", "completion": None},
        {"text": " "},
        {"text": None},
    ],
)
@pytest.mark.parametrize("template", [None, CHATML, MARKED])
def test_rows_with_nothing_to_learn(row: dict[str, Any], template: str | None) -> None:
    tokenizer = _tokenizer(template)
    other = {key: PROBLEM.get(key, CHAT.get(key, "x")) for key in row}
    documents = encode_batch([row, other, row], detect_columns(list(row)), tokenizer)
    assert documents[0] == documents[2] == Encoded([], []) and documents[1] == _encode(other, tokenizer)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": [{"type": "image"}]}],
        [{"role": "assistant", "content": {"text": "x"}}],
        [{"from": "human", "value": "x"}],
        [{"role": 1, "content": "x"}],
        [1, 2],
        [["user", "x"]],
        [None],
        "hello",
        {"user": "x"},
    ],
    ids=repr,
)
def test_messages_are_lists_of_texts(messages: Any) -> None:
    with pytest.raises(UserError, match="'messages' must be a list of messages with 'role' and 'content', both text"):
        _encode({"messages": messages}, _tokenizer())


@pytest.mark.parametrize("value", [["x"], {"a": 1}, True], ids=repr)
def test_text_columns_hold_text(value: Any) -> None:
    for row in (PROBLEM, {"prompt": "a", "completion": "b"}, {"text": "a"}):
        for column in set(row) & {"problem", "generated_solution", "prompt", "completion", "text"}:
            with pytest.raises(UserError, match=f"the column '{column}' must hold text, and a row has"):
                _encode({**row, column: value}, _tokenizer())


@pytest.mark.parametrize("template", [None, CHATML, MARKED])
def test_what_is_far_too_long_is_cut_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    monkeypatch.setattr("llm_fp8.data.prompt.MAX_CHARACTERS", 50)
    tokenizer, long, cut = _tokenizer(template), "1 + 2 " * 1000, ("1 + 2 " * 1000)[:50]
    for row, shorter in (
        ({**PROBLEM, "generated_solution": long}, {**PROBLEM, "generated_solution": cut}),
        ({"messages": [{"role": "assistant", "content": long}]}, {"messages": [{"role": "assistant", "content": cut}]}),
        ({"text": long}, {"text": cut}),
    ):
        assert _encode(row, tokenizer) == _encode(shorter, tokenizer)


def test_numbers_of_a_csv_file_are_text() -> None:
    row = {"problem": "6 * 7", "generated_solution": 42}
    assert _encode(row, _tokenizer()) == _encode({**row, "generated_solution": "42"}, _tokenizer())


def test_no_eos_token() -> None:
    tokenizer = _tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        encode_batch([PROBLEM], "problem_solution", tokenizer)
