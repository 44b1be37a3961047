"""A row becomes token ids and a mask of the supervised ones.

Columns, the first that fit:

    problem + generated_solution    a question and a worked answer (nvidia/OpenMathInstruct-2)
    messages                        a conversation: a list of {role, content}; every assistant turn is supervised,
                                    its calls of the tools in the column `tools` too, but none whose `weight` is 0
    conversations                   the same as ShareGPT writes it: a list of {from, value}
    instruction + output            Alpaca; a column `input` follows the instruction after a blank line
    prompt + completion             concatenated as they stand: no template, no prompt form
    text                            all of it supervised

All but the last two go through the tokenizer's chat template, else through `PROMPT_FORM` or `PLAIN_TURN`. Supervised
are the solution, the completion or each assistant turn (with `train_on_prompt` every token), and EOS, once, as the last
token of every document, so that the model learns to stop; what a template puts after it is cut off. BOS stands at the
front once: chat templates write it, elsewhere it is added if the tokenizer would.

A document is tokenised as one text, and a supervised range of characters begins where the tokens of the text before it
end, so that the prompt's tokens are those that generation starts from. Where a token would straddle the boundary, both
sides are tokenised separately.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from itertools import accumulate, pairwise, takewhile
from typing import Any, Literal, NamedTuple, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from llm_fp8.utils.errors import UserError
from llm_fp8.utils.limits import memory_limit, time_limit

PROMPT_FORM = "Problem:\n{problem}\n\nSolution:\n"
"""The prompt of a problem without a chat template; the solution follows at once."""

PLAIN_TURN = "{role}:\n"
"""Before each turn of a conversation without a chat template; a blank line follows a turn, EOS an assistant's."""

TEMPLATE_DATE = date(2026, 1, 1)
"""Today, for chat templates that show the date (`strftime_now`): tokens must not depend on the day of a run."""

TEMPLATE_TIME_S = 10.0
"""What a chat template may take for one conversation."""
TEMPLATE_MEMORY = 8 * 2**30
"""Bytes that it may take for a batch of them."""

MAX_CHARACTERS = 4_000_000
"""Of one text; the rest is cut off before tokenising, which takes hundreds of bytes per character. Such a document is
overlong all the same: no token of a common tokenizer has more than 128 characters.
"""

FORMAT_VERSION = 5
"""Raised whenever this module tokenises a row differently, or refuses others, so that caches are made anew."""

ColumnForm = Literal["problem_solution", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]

COLUMNS: dict[ColumnForm, tuple[str, ...]] = {
    "problem_solution": ("problem", "generated_solution"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}

CONVERSATIONS: tuple[ColumnForm, ...] = ("messages", "sharegpt")
AS_THEY_STAND: tuple[ColumnForm, ...] = ("prompt_completion", "text")
"""Forms that no template touches."""

TOOLS = "tools"
"""Optional column of conversations: the tools that the template shows, a list of JSON schemas or its JSON text."""
ANSWER_COLUMN = "expected_answer"
"""Optional column of problems: what exact match compares an answer with; no part of the text."""
OPTIONAL_COLUMNS: dict[ColumnForm, tuple[str, ...]] = {"messages": (TOOLS,), "sharegpt": (TOOLS,), "alpaca": ("input",)}

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}
"""ShareGPT's `from` -> `role`."""

_NOW = re.compile(r"""strftime_now\(\s*(['"])(?P<format>.*?)\1\s*\)""")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """The text of a row and the character ranges to supervise; empty for a row with nothing to learn."""

    text: str = ""
    spans: Sequence[tuple[int, int]] = ()
    from_template: bool = False

    def cuts(self) -> list[int]:
        """Positions inside the text at which a supervised span begins or ends, in order."""
        return sorted({position for span in self.spans for position in span if 0 < position < len(self.text)})


class Encoded(NamedTuple):
    """Token ids of a document (EOS last) and, for each, whether it is to be predicted; empty where there is nothing."""

    input_ids: list[int]
    supervised: list[bool]


def detect_columns(
    columns: Sequence[str], mapped: Collection[str] = (), of: str = "--dataset_name: the dataset"
) -> ColumnForm:
    """Which of the understood forms these columns are, the first that uses all columns that --columns names (`mapped`);
    `UserError`, saying whose columns they are, for none.
    """
    for form, needed in COLUMNS.items():
        answer = (ANSWER_COLUMN,) if form == "problem_solution" else ()
        if set(needed) <= set(columns) and set(mapped) <= {*needed, *OPTIONAL_COLUMNS.get(form, ()), *answer}:
            return form
    understood = "; ".join(" + ".join(needed) for needed in COLUMNS.values())
    if mapped:
        raise UserError(
            f"--columns gives {', '.join(mapped)}, and no form of data that uses all of that fits {of}, whose columns "
            f"are then {', '.join(columns)}; understood are: {understood}. Name what is missing, or drop what is not "
            "used."
        )
    raise UserError(
        f"{of} has the columns {', '.join(columns)}; understood are: {understood}. --columns "
        "says which column stands for which, as in problem=question,generated_solution=answer."
    )


def names_a_form(columns: Collection[str]) -> bool:
    """Whether `detect_columns` understands these."""
    return any(all(column in columns for column in needed) for needed in COLUMNS.values())


def problem_of(row: Mapping[str, Any], form: ColumnForm) -> str:
    """The text by which two rows are the same problem: the question, whatever the answer and the system prompt."""
    if form in CONVERSATIONS:
        messages = _messages_of(row, form)
        first = takewhile(lambda message: message["role"] != "assistant", messages)
        question = [m for m in first if m["role"] not in ("system", "developer")]
        # A conversation that the assistant begins is known by all of it.
        return "\n".join(str(message.get("content") or "") for message in question or messages)
    return _problem_text(row) if form == "alpaca" else str(row[COLUMNS[form][0]] or "")


def encode_prompt(problem: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids to generate from: those that a training document of the same problem begins with."""
    text, bos = PROMPT_FORM.format(problem=problem.strip()), _added_bos(tokenizer)
    if tokenizer.chat_template is not None:
        turn = {"role": "user", "content": problem.strip()}
        text, bos = _apply_template(tokenizer, Conversation([turn]), add_generation_prompt=True), []
    ids = _tokenise([text], tokenizer)[0]
    return ids if ids[:1] == bos else bos + ids


def describe_prompt_form(form: ColumnForm, tokenizer: PreTrainedTokenizerBase) -> str:
    """For the log."""
    if form in AS_THEY_STAND:
        return "text as it stands" if form == "text" else "prompt and completion as they stand"
    if tokenizer.chat_template is not None:
        dated = f", for which it is {TEMPLATE_DATE}" if "strftime_now" in str(tokenizer.chat_template) else ""
        return f"the tokenizer's chat template{dated}"
    return repr(PLAIN_TURN if form in CONVERSATIONS else PROMPT_FORM) + " (the tokenizer has no chat template)"


def render(row: Mapping[str, Any], form: ColumnForm, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """The text of a row and what to supervise in it."""
    if form not in AS_THEY_STAND:
        conversation = _conversation(row, form)
        if not conversation.messages:
            return Rendered()
        if form in CONVERSATIONS or tokenizer.chat_template is not None:
            return _render_conversation(conversation, tokenizer)
        problem, solution = (message["content"] for message in conversation.messages)
        prompt, answer = PROMPT_FORM.format(problem=problem), solution
    else:
        prompt = "" if form == "text" else _text(row, "prompt")
        answer = _text(row, COLUMNS[form][-1])
        if not answer.strip():
            return Rendered()
    return Rendered(prompt + answer, [(len(prompt), len(prompt) + len(answer))])


class Conversation(NamedTuple):
    """Messages, and the tools that they may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    def until(self, turn: int) -> Conversation:
        """The messages before this one."""
        return Conversation(self.messages[:turn], self.tools)


def _conversation(row: Mapping[str, Any], form: ColumnForm) -> Conversation:
    """The row's messages up to the last assistant turn, without Arrow's None fields; none with nothing to learn."""
    if form not in CONVERSATIONS:
        problem = (_problem_text(row) if form == "alpaca" else _text(row, COLUMNS[form][0])).strip()
        solution = _text(row, COLUMNS[form][-1]).strip()
        if not problem or not solution:
            return Conversation([])
        return Conversation([{"role": "user", "content": problem}, {"role": "assistant", "content": solution}])
    turns: list[dict[str, Any]] = []
    for message in _messages_of(row, form):
        turn = _without_none(message)
        if not isinstance(turn, dict) or not all(isinstance(turn.setdefault(k, d), str) for k, d in _TURN.items()):
            raise _no_messages(form, message)
        turns.append({**turn, "content": turn["content"][:MAX_CHARACTERS]})
    while turns and not _is_learnt(turns[-1]):
        turns.pop()
    return Conversation(turns, _tools_of(row))


def _is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether a message is an assistant's, says something, and is not excluded as OpenAI's format has it."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise UserError(f"--dataset_name: a message has the weight {_shown(weight)}; give 0 or 1, or leave it out.")
    return bool(message["role"] == "assistant" and weight and (message["content"].strip() or _calls(message)))


_TURN = {"role": None, "content": ""}
"""Entries of a message, and what one without them has: a tool call needs no content."""


def _problem_text(row: Mapping[str, Any]) -> str:
    """Alpaca's instruction, and the input that it is about."""
    given = (_text(row, "instruction"), _text(row, "input") if "input" in row else "")
    return "\n\n".join(text.strip() for text in given if text.strip())


def _messages_of(row: Mapping[str, Any], form: ColumnForm) -> Sequence[Any]:
    """The row's conversation as it stands, or ShareGPT's with the names of `messages`."""
    messages = row[COLUMNS[form][0]] or []
    if not isinstance(messages, list):
        raise _no_messages(form, messages)
    return [_from_sharegpt(message) for message in messages] if form == "sharegpt" else messages


def _no_messages(form: ColumnForm, found: Any) -> UserError:
    return UserError(
        f"--dataset_name: '{COLUMNS[form][0]}' must be a list of messages with 'role' and 'content', both text; a row "
        f"has {_shown(found)}."
    )


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, Mapping) or "from" not in message:
        return message  # some have role and content in a column of this name
    role = SHAREGPT_ROLES.get(str(message["from"]))
    if role is None:
        raise UserError(
            f"--dataset_name: a message in 'conversations' is from {_shown(message['from'])}; understood are "
            f"{', '.join(SHAREGPT_ROLES)}."
        )
    return {"role": role, "content": message.get("value")}


def _text(row: Mapping[str, Any], column: str) -> str:
    """The text of a column: nothing for null, and a number as Python writes it."""
    value = row[column]
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)[:MAX_CHARACTERS]
    if value is not None:
        raise UserError(
            f"--dataset_name: the column '{column}' must hold text, and a row has {_shown(value)}; conversations "
            "belong in 'messages'."
        )
    return ""


def _shown(value: Any) -> str:
    """For an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _calls(message: Mapping[str, Any]) -> Any:
    return message.get("tool_calls")


def _names_of_calls(message: Mapping[str, Any]) -> list[str]:
    calls = [call.get("function", call) for call in _calls(message) if isinstance(call, Mapping)]
    return [str(call["name"]) for call in calls if isinstance(call, Mapping) and "name" in call]


def _without_none(value: Any) -> Any:
    """Without the fields that Arrow fills with None, where rows have different ones."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    tools = row.get(TOOLS)
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UserError(
                f"--dataset_name: a row's '{TOOLS}' is neither a list nor the JSON text of one ({error})."
            ) from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UserError(f"--dataset_name: a row's '{TOOLS}' is a {type(tools).__name__}; it must be a list.")
    return cast("list[Any]", _without_none(tools))


def _render_conversation(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    _check_tools(conversation, tokenizer)
    if tokenizer.chat_template is not None:
        conversation = _with_arguments(conversation, tokenizer)
        text = _apply_template(tokenizer, conversation)
        return Rendered(text, list(_template_spans(text, conversation, tokenizer)), from_template=True)

    text, spans = "", []
    for message in conversation.messages:
        content = message["content"].strip()
        text += PLAIN_TURN.format(role=message["role"].capitalize())
        if message["role"] == "assistant" and content:
            content += str(tokenizer.eos_token)
            if _is_learnt(message):
                _check_shown(message, content)
                spans.append((len(text), len(text) + len(content)))
        text += content + "\n\n"
    return Rendered(text, spans)


def _check_tools(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `UserError` where the template would leave out tools or calls, and another text would be learnt."""
    template = str(tokenizer.chat_template or "")
    used = {TOOLS: conversation.tools, "tool_calls": any(map(_calls, conversation.messages))}
    for name, there in used.items():
        if there and name not in template:
            raise UserError(
                f"--dataset_name: a conversation has '{name}', and the tokenizer has no chat template that shows them; "
                "give a model with one that does, or leave such conversations out."
            )


_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Entries of a message in which data sets keep what its answer was thought out with."""
_THINK_TAGS = re.compile("</?think>")


def _check_shown(message: Mapping[str, Any], shown: str) -> None:
    """Raise `UserError` where text of an assistant's message is not in its turn as the template shows it at the end of
    a conversation. Llama 3's leaves out the content beside calls, DeepSeek-R1's what stands before </think>, and many
    all reasoning.
    """
    for name in ("content", *_REASONING):
        text = message.get(name)
        # Some templates write white space of their own around the tags.
        for part in _THINK_TAGS.split(text) if isinstance(text, str) else ():
            if part.strip() not in shown:
                beside = " beside 'tool_calls'" if _calls(message) else ""
                raise UserError(
                    f"--dataset_name: an assistant's message has {_shown(part.strip())} in '{name}'{beside}, and the "
                    "tokenizer has no chat template that shows it, so it would not be learnt; correct "
                    "chat_template.jinja, give a model that has one, or take such text out of the messages."
                )


def _with_arguments(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """Arguments of tool calls as objects where they are JSON text, as OpenAI's API has them: most templates write the
    JSON themselves, and text would come out quoted. A template that fails on objects gets the text.
    """
    messages = [_with_object_arguments(message) for message in conversation.messages]
    if messages == conversation.messages:
        return conversation
    parsed = Conversation(messages, conversation.tools)
    try:
        _apply_template(tokenizer, parsed)
    except UserError:
        return conversation
    return parsed


def _with_object_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = _calls(message)
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]} if isinstance(calls, list) else message


def _parsed_call(call: Any) -> Any:
    """A call, or what stands under its `function`, with its arguments as an object where their text is that of one."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _parsed_call(call["function"])}
    try:
        arguments = json.loads(call["arguments"]) if isinstance(call.get("arguments"), str) else None
    except json.JSONDecodeError:
        return call  # any other text, which the template shows as it is
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _template_arguments(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    tools = conversation.tools
    template = _NOW.sub(
        lambda call: repr(TEMPLATE_DATE.strftime(call["format"])), tokenizer.get_chat_template(tools=tools)
    )
    if "strftime_now(" in template:
        raise UserError(
            "--model_name: the tokenizer's chat template asks for the date with a format that is no literal, so tokens "
            "would depend on the day; write the format into the call of strftime_now."
        )
    return {"tools": tools, "chat_template": template}


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, add_generation_prompt: bool = False
) -> str:
    return cast(
        str,
        _run_template(tokenizer, conversation, tokenize=False, add_generation_prompt=add_generation_prompt),
    )


def _run_template(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, **options: Any) -> Any:
    """`apply_chat_template`; a template is a program of the model's, so whatever it raises is a `UserError`."""
    arguments = _template_arguments(conversation, tokenizer)
    try:
        with time_limit(TEMPLATE_TIME_S):
            return tokenizer.apply_chat_template(conversation.messages, **options, **arguments)
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in conversation.messages)
        reason = str(error) if isinstance(error, (TemplateError, TimeoutError)) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"--model_name: the tokenizer's chat template fails on a conversation of the roles {roles} ({reason}); "
            "correct chat_template.jinja, or leave such conversations out."
        ) from error


def _template_spans(
    text: str, conversation: Conversation, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, int]]:
    """Where in `text` each learnt turn stands: from the end of its generation prompt to the end of the turn.

    Some templates (Qwen3's, which shows the reasoning since the last question only) render a turn differently once
    another question follows. What stands before a turn is then compared from the end of the turn before it; its own end
    is found by its content and by what the template closes it with.
    """
    seen, eos = ("", 0), str(tokenizer.eos_token)  # the conversation up to the last turn, and where that ends in `text`
    for turn, message in enumerate(conversation.messages):
        if not _is_learnt(message):
            continue
        content = message["content"].strip()
        until = _apply_template(tokenizer, conversation.until(turn + 1))
        if not text.startswith(until):
            until = until.removesuffix(eos)  # Phi-3's has one, behind the last turn
        before = _prompt_of(until, conversation, turn, content, tokenizer)
        # What stands before a first turn's content may be its reasoning.
        _check_shown(message, until.removeprefix(before or "") if turn else until)
        begin, shown = _begin(text, before, until, conversation.until(turn), seen, tokenizer)
        end = _end(text, begin, until, shown, message)
        yield begin, end
        seen = until, end


def _begin(
    text: str,
    before: str | None,
    until: str,
    history: Conversation,
    seen: tuple[str, int],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[int, int]:
    """Where in `text` a turn begins, and how much of `before`, what stands before it while it is the last, is shown."""
    if before is None:
        raise _changed(text, 0, until)
    if not until.startswith(before):
        raise _changed(until, 0, before)
    if text.startswith(before):
        return len(before), len(before)
    told = _apply_template(tokenizer, history).removesuffix(str(tokenizer.eos_token)) if history.messages else before
    for same, at in (("", 0), seen):
        shown = len(same) + len(os.path.commonprefix([before[len(same) :], text[at:]]))
        if shown < len(before):
            # Qwen3.5's prompt ends with a line "<think>", which it shows in the last turns only.
            shown = before.rfind("\n", 0, shown) + 1
        if before.startswith(same) and shown >= len(told):
            return at + shown - len(same), shown
    raise _changed(text, 0, before)


def _end(text: str, begin: int, until: str, shown: int, message: Mapping[str, Any]) -> int:
    """Where in `text` the turn ends that begins at `begin`, and behind `shown` characters of `until`, which ends with
    it.
    """
    # The answer or the calls alone, before which the reasoning is shown no more.
    content = message["content"].strip()
    answer = content.rpartition("</think>")[2].strip()
    last = min(map(until.rfind, [answer] if answer else _names_of_calls(message)), default=-1)
    for start in range(shown, 1 + max(shown, last)):
        if text.startswith(until[start:], begin):
            return begin + len(until) - start
    at, closing = text.find(content, begin), until[until.rfind(content) + len(content) :]
    if content and at >= 0 and content in until and text.startswith(closing, at + len(content)):
        return at + len(content) + len(closing)
    raise _changed(text, begin, until[shown:])


def _changed(text: str, begin: int, first: str) -> UserError:
    """The error where `text` shows what it first showed as `first`, from `begin` on, in another way."""
    shared = len(os.path.commonprefix([first, text[begin:]]))
    at = begin + shared
    return UserError(
        "--dataset_name: the tokenizer's chat template changes the beginning of a conversation as it goes on (after "
        f"{text[max(0, at - 30) : at]!r} first {_shown(first[shared:])}, later {_shown(text[at:])}), so its assistant "
        "turns cannot be told apart; correct chat_template.jinja, mark the turns there with {% generation %} blocks, "
        "or give the data as prompt and completion, which no template touches."
    )


def _prompt_of(
    until: str, conversation: Conversation, turn: int, content: str, tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """What stands before the assistant's `turn`, with which `until` ends; of a first turn, for which templates have no
    prompt, what stands before its content; None where that has none.
    """
    if turn:
        return _apply_template(tokenizer, conversation.until(turn), add_generation_prompt=True)
    at = until.rfind(content) if content else -1  # the template's own text before it may hold the same words
    return until[:at] if at >= 0 else None


def _tokenise(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text with nothing added."""
    if not texts:  # transformers 5.23 fails: of a mix of streams a chunk may have no row of one dataset
        return []
    output = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    return cast("list[list[int]]", output["input_ids"])


def _added_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """BOS, if the tokenizer puts one before every text."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def encode_batch(
    rows: Sequence[Mapping[str, Any]],
    form: ColumnForm,
    tokenizer: PreTrainedTokenizerBase,
    train_on_prompt: bool = False,
) -> list[Encoded]:
    """The documents of `rows`; one tokenizer call, which runs in parallel."""
    if tokenizer.eos_token_id is None:
        raise UserError("--model_name: the tokenizer has no EOS token, so the model could not learn to stop.")
    if form not in AS_THEY_STAND and _GENERATION_BLOCK.search(str(tokenizer.chat_template or "")):
        with memory_limit(TEMPLATE_MEMORY):
            encoded = [_encode_marked(row, form, tokenizer) for row in rows]
    else:
        with memory_limit(TEMPLATE_MEMORY):
            rendered = [render(row, form, tokenizer) for row in rows]
        encoded = _encode_spans(rendered, tokenizer)
    documents = [_end_with_eos(each, tokenizer) for each in encoded]
    return [Encoded(ids, [True] * len(ids)) for ids, _ in documents] if train_on_prompt else documents


def _encode_marked(row: Mapping[str, Any], form: ColumnForm, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """A row through a chat template that marks the assistant's text with `{% generation %}`."""
    conversation = _conversation(row, form)
    if not conversation.messages:
        return Encoded([], [])
    _check_tools(conversation, tokenizer)
    if any(message.get("weight") == 0 for message in conversation.messages):
        raise UserError(
            "--dataset_name: a message has the weight 0, and the tokenizer's chat template itself marks what is "
            "supervised ({% generation %}); take these blocks out of the template, or leave such conversations out."
        )
    conversation = _with_arguments(conversation, tokenizer)
    for turn, message in enumerate(conversation.messages):
        if _is_learnt(message):
            _check_shown(message, _apply_template(tokenizer, conversation.until(turn + 1)))
    output = cast(
        "dict[str, list[int]]",
        _run_template(tokenizer, conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True),
    )
    return Encoded(list(output["input_ids"]), [bool(m) for m in output["assistant_masks"]])


def _encode_spans(rendered: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    texts = [text for item in rendered for text in (item.text, *(item.text[:cut] for cut in item.cuts()))]
    tokens, added_bos = iter(_tokenise(texts, tokenizer)), _added_bos(tokenizer)
    encoded: list[Encoded] = []
    for item in rendered:
        cuts, ids = item.cuts(), next(tokens)
        prefixes = [next(tokens) for _ in cuts]
        if all(ids[: len(prefix)] == prefix for prefix in prefixes):
            ends = [*(len(prefix) for prefix in prefixes), len(ids)]
        else:
            bounds = [0, *cuts, len(item.text)]
            pieces = _tokenise([item.text[a:b] for a, b in pairwise(bounds)], tokenizer)
            ids = [token for piece in pieces for token in piece]
            ends = list(accumulate(len(piece) for piece in pieces))
        supervised: list[bool] = []
        for cut, end in zip([0, *cuts], ends, strict=True):
            inside = any(start <= cut < stop for start, stop in item.spans)
            supervised += [inside] * (end - len(supervised))
        if not item.from_template and ids[:1] != added_bos:
            ids, supervised = added_bos + ids, [False] * len(added_bos) + supervised
        encoded.append(Encoded(ids, supervised))
    return encoded


def _end_with_eos(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Close every supervised run at its EOS, and the document at the last one, adding it if it is missing.

    A template may close a turn inside the span ("answer<EOS>\\n"), just behind it, or without EOS at all (base models
    whose template ends turns with another token).
    """
    eos = tokenizer.eos_token_id
    # Bytes are searched without a step of Python per token.
    ids, supervised = list(encoded.input_ids), bytearray(encoded.supervised)
    end = 0  # of the last supervised run
    while (start := supervised.find(1, end)) >= 0:
        end = supervised.find(0, start)
        if end < 0:
            end = len(ids)
        elif ids[end] == eos:
            supervised[end] = 1
            end += 1
        run = ids[start:end]
        if eos in run:
            last = end - 1 - run[::-1].index(eos)
            if not str(tokenizer.decode(ids[last + 1 : end])).strip():
                while last > start and ids[last - 1] == eos:
                    last -= 1
                supervised[last + 1 : end] = bytes(end - last - 1)
                end = last + 1
    ids, flags = ids[:end], list(map(bool, supervised[:end]))
    if ids and ids[-1] != eos:
        ids.append(eos)
        flags.append(True)
    return Encoded(ids, flags)
