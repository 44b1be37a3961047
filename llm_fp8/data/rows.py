"""Convert a row of a dataset to a conversation. No other module reads columns of rows or entries of messages.

The form of a row is the first in `COLUMNS` whose columns the row has; docs/data_and_checkpoints.md explains them.
Alpaca's `input` follows the instruction after a blank line. Two texts, `prompt` and `completion`, are concatenated.
A turn is excluded from the loss if its `weight` is 0, its `train`, `training` or `loss` is false, or its `masked` is
true. Forms that use a chat template may also have the columns in `CONTEXT`. Unused parts of a row are counted.
"""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from llm_fp8.utils.errors import UserError

RowForm = str  # a name in `COLUMNS`

COLUMNS: dict[RowForm, tuple[str, ...]] = {
    "problem_solution": ("problem", "generated_solution"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_messages": ("prompt", "completion"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "token_ids": ("input_ids", "labels"),
}
CONTEXT = ("system", "system_prompt", "history", "tools", "functions", "chat_template_kwargs")
"""Columns for the system prompt, earlier turns, JSON schemas of tools, and variables of the chat template."""
UNTEMPLATED: tuple[RowForm, ...] = ("prompt_completion", "text", "token_ids")  # forms that use no chat template
OPTIONAL_COLUMNS: dict[RowForm, tuple[str, ...]] = dict.fromkeys(COLUMNS, CONTEXT) | dict.fromkeys(UNTEMPLATED, ())
OPTIONAL_COLUMNS |= {"alpaca": ("input", *CONTEXT), "token_ids": ("attention_mask",)}
QUESTIONS = "problem question query instruction prompt input user human".split()  # for suggestions, best first
ANSWERS = "chosen answer response output assistant completion solution target gpt conversation dialogue chat".split()

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool", "function_call": "assistant"}
"""ShareGPT's `from` -> `role`. The content of "function_call" is the JSON text of one call or of a list of calls."""
ROLES |= {role: role for role in ("system", "developer", "user", "assistant", "tool")}
FLAGS = {"weight": True, "train": True, "training": True, "loss": True, "masked": False}  # values for a supervised turn
SYSTEM = ("system", "developer")
REASONING = ("reasoning_content", "thinking", "reasoning")
Unused = Counter[str]  # description of an unused part of rows -> number of times
Turn = tuple[dict[str, Any], bool]  # a message with text in `role` and `content`; True if it may be supervised


class Conversation(NamedTuple):
    """A row's messages, further arguments for the chat template, and counts of the row's unused parts."""

    messages: list[dict[str, Any]]
    unused: Unused
    excluded: frozenset[int] = frozenset()  # indices of the messages that are excluded from the loss
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    tokens: tuple[Sequence[int], Sequence[bool]] = ((), ())  # ids, and True if supervised, of a tokenised row

    def until(self, turn: int) -> Conversation:
        """Return the conversation up to, but not including, the message at index `turn`."""
        return self._replace(messages=self.messages[:turn])

    def supervised_turns(self) -> list[int]:
        """Return the indices of the supervised messages: the assistant's with text or calls beside reasoning."""
        return [
            turn
            for turn, message in enumerate(self.messages)
            if message["role"] == "assistant" and turn not in self.excluded
            if message["content"].rpartition("</think>")[2].strip() or message.get("tool_calls")
        ]

    def entries(self) -> list[str]:
        """Return the keys of all messages except role and content. A key occurs once for each message that has it."""
        return [name for message in self.messages for name in message if name not in ("role", "content")]

    def arguments(self) -> list[str]:
        """Return the names of the arguments that the chat template gets in addition to the messages."""
        return [*(["tools"] if self.tools else []), *self.template_kwargs]

    def problem(self) -> str:
        """Return the text that rows of the same problem have in common: all messages except the assistant's."""
        questions = [message for message in self.messages if message["role"] != "assistant"]
        # Many rows share a system prompt, so it does not identify a problem without a question.
        has_question = any(message["role"] not in SYSTEM and message["content"].strip() for message in questions)
        return "\n".join(message["content"] for message in (questions if has_question else self.messages))


def detect_columns(row: Mapping[str, Any], mapped: Collection[str] = (), dataset: str = "--dataset_name") -> RowForm:
    """Return the first form that fits `row` and uses all names in `mapped`, set by --columns, or raise `UserError`."""
    for form, needed in COLUMNS.items():
        if form == "prompt_messages" and not any(isinstance(row.get(name), list) for name in needed):
            continue
        if row.keys() >= {*needed} and {*mapped} <= {*needed, *OPTIONAL_COLUMNS[form]}:
            return form
    supported = "; ".join(dict.fromkeys(" + ".join(needed) for needed in COLUMNS.values()))
    preferences = "This trains on answers, TRL's DPOTrainer on preferences; to train on the chosen answers alone, use"
    advice = f"{preferences if 'rejected' in row else 'Use'} --columns {'' if mapped else _mapping(row)}".rstrip()
    raise UserError(f"{dataset} has the columns {', '.join(row)}; supported are: {supported}. {advice}.")


def _mapping(row: Mapping[str, Any]) -> str:
    """Return a value for --columns if `row` has a column named in `QUESTIONS` and one in `ANSWERS`, else ''."""
    names = {name.lower(): name for name in row}
    question, answer = (next((names[name] for name in each if name in names), "") for each in (QUESTIONS, ANSWERS))
    turn = row[answer][0] if isinstance(row.get(answer), list) and row[answer] else None
    ours = {"problem": question, "generated_solution": answer}
    if isinstance(turn, Mapping) and not (question and turn.get("role", turn.get("from")) in ("assistant", "gpt")):
        ours = {"conversations" if "from" in turn else "messages": answer}
    elif turn is not None or isinstance(row.get(question), list):
        ours = {"prompt": question, "completion": answer}
    elif question.lower() == "instruction":
        ours = {"instruction": question, "output": answer}
    elif answer == "chosen" and not question:
        ours = {"text": answer}
    return ",".join(f"{name}={theirs}" for name, theirs in ours.items() if name != theirs) if all(ours.values()) else ""


def conversation_of(row: Mapping[str, Any], form: RowForm) -> Conversation:
    """Convert a row to a conversation that ends with the last supervised turn, or to an empty one if there is none."""
    if form == "token_ids":
        return _of_tokens(row)
    unused = Unused()
    history = [_message(turn, unused) for entry in _structured(row, "history") for turn in _history_messages(entry)]
    turns = _turns(row, form, unused)
    start = int(bool(turns) and turns[0][0]["role"] in SYSTEM)
    turns[start:start] = history if turns else []
    for column in ("system", "system_prompt"):
        if (system := text_of(row, column)).strip() and turns:
            if turns[0][0]["role"] in SYSTEM:
                unused[f"text of '{column}' beside another system prompt"] += 1
            else:
                turns.insert(0, ({"role": "system", "content": system}, True))
    tools = [_json(tool, "a tool") if isinstance(tool, str) else tool for tool in _structured(row, "tools")]
    functions = [{"type": "function", "function": function} for function in _structured(row, "functions")]
    unused["'functions' beside 'tools'"] += bool(tools and functions)
    excluded = frozenset(turn for turn, (_, may_be_supervised) in enumerate(turns) if not may_be_supervised)
    kwargs = _structured(row, "chat_template_kwargs", dict)
    whole = Conversation([message for message, _ in turns], unused, excluded, tools or functions or None, kwargs)
    supervised = whole.supervised_turns()
    end = supervised[-1] + 1 if supervised else 0
    if supervised:
        unused["turn after the last that is supervised"] += len(turns) - end
        empty = set(range(end)) - set(supervised) - excluded
        unused["assistant's turn that says nothing"] += sum(turns[i][0]["role"] == "assistant" for i in empty)
    return whole.until(end)


def _of_tokens(row: Mapping[str, Any]) -> Conversation:
    """Convert a tokenised row, without its padding (`attention_mask` 0). Labels of -100 are not supervised."""
    ids, labels, mask = (_structured(row, name) for name in ("input_ids", "labels", "attention_mask"))
    mask = mask or [1] * len(ids)
    fits = all(map(lambda i, label: isinstance(i, int) and label in (-100, i), ids, labels))
    if not fits or not len(ids) == len(labels) == len(mask):
        raise UserError(f"--dataset_name: 'labels' must be ids or -100, not {repr_of(labels)} for {repr_of(ids)}.")
    ids, labels = (list(itertools.compress(column, mask)) for column in (ids, labels))
    prompt = [i for i, label in zip(ids, labels, strict=True) if label == -100]  # a BOS alone is no problem
    tokens = ids, [label != -100 for label in labels]
    return Conversation([{"role": "user", "content": f"{prompt if len(prompt) > 2 else ids}"}], Unused(), tokens=tokens)


def _turns(row: Mapping[str, Any], form: RowForm, unused: Unused) -> list[Turn]:
    """Read the turns from the columns that `COLUMNS` lists for `form`. If question or answer is missing, return []."""
    if form in ("messages", "sharegpt"):
        return [_message(turn, unused) for turn in _structured(row, COLUMNS[form][0])]
    if form == "prompt_messages":
        prompt = [(_message(turn, unused)[0], False) for turn in _messages_of(row, "prompt", "user")]
        return prompt + [_message(turn, unused) for turn in _messages_of(row, "completion", "assistant")]
    *questions, answer = (text_of(row, column) for column in COLUMNS[form])
    if form not in UNTEMPLATED:
        questions += [text_of(row, "input")] if form == "alpaca" else []
        questions, answer = ["\n\n".join(filter(None, map(str.strip, questions)))], answer.strip()
    if not answer.strip() or (form not in UNTEMPLATED and not questions[0]):
        return []
    turns = [*({"role": "user", "content": text} for text in questions), {"role": "assistant", "content": answer}]
    return [(turn, True) for turn in turns]


def read_row(text: str) -> Any:
    """Parse the JSON text of a row. Its floats, converted to text, are spelt as in the file."""
    return json.loads(text, parse_float=_Number)


class _Number(float):
    """A float whose `str` is its spelling in the file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Return the value in a column as text. Null and NaN become ''. Numbers and dates are spelt as in the file."""
    return _text(row.get(column), f"the column '{column}' must hold text, but a row has")


def called(message: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that a message calls."""
    return [str(call.get("function", call).get("name")) for call in message.get("tool_calls", ())]


def repr_of(value: Any) -> str:
    """Return the `repr` of a value, shortened for an error message."""
    return textwrap.shorten(repr(value), 80, placeholder="...")


def _text(value: Any, complaint: str) -> str:
    if isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, (str, int, float, decimal.Decimal, datetime.date, datetime.time, type(None))):
        raise UserError(f"--dataset_name: {complaint} {repr_of(value)}.")
    return "" if value is None or value != value else str(value)  # pandas reads an empty cell as NaN


def _structured(row: Mapping[str, Any], column: str, kind: type = list) -> Any:
    """Read a list, or an object if `kind` is dict, from a column or from the JSON text in it. Null is read as empty."""
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        value = _json(value, f"'{column}'")
    if value and not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise UserError(f"--dataset_name: '{column}' must be {wanted}, but a row has {repr_of(value)}.")
    return value or kind()


def _messages_of(row: Mapping[str, Any], column: str, role: str) -> list[Any]:
    """Read a list of messages from a column. Text is converted to one message of this `role`."""
    text = row.get(column)
    return [{"role": role, "content": text}] if isinstance(text, str) else _structured(row, column)


def _json(text: Any, name: str) -> Any:
    try:
        return read_row(text)
    except (TypeError, ValueError) as error:
        raise UserError(f"--dataset_name: {name} must be JSON, but a row has {repr_of(text)}.") from error


def _history_messages(entry: Any) -> Sequence[Any]:
    """Return the messages of `entry`, an item in the column `history`: a list [question, answer] or one message."""
    if isinstance(entry, list) and len(entry) == 2:
        return [{"role": "user", "content": entry[0]}, {"role": "assistant", "content": entry[1]}]
    return [entry]


def _message(message: Any, unused: Unused) -> Turn:
    """Convert a message in transformers', ShareGPT's or OpenAI's old format to a `Turn`. Count its unused parts."""
    if not isinstance(message, Mapping):
        raise _malformed(message)
    turn = {name: value for name, value in message.items() if value is not None}
    role = turn.pop("role" if "role" in turn else "from", None)
    content = turn.pop("content" if "content" in turn else "value", "")
    if not isinstance(role, str) or ("from" in message and role not in ROLES):
        raise _malformed(message)
    if role == "function_call":
        parsed = _json(content, "a function's call")
        calls, content = parsed if isinstance(parsed, list) else [parsed], ""
        turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if "function_call" in turn and not turn.get("tool_calls"):  # OpenAI's API of 2023
        turn["tool_calls"] = [{"type": "function", "function": turn.pop("function_call")}]
    calls = _structured(turn, "tool_calls")
    if not calls:
        turn.pop("tool_calls", None)
    elif not all(isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping) for call in calls):
        raise _malformed(message)
    else:
        turn["tool_calls"] = calls
    if role not in ROLES:
        unused[f"turn of the role '{role}' for learning"] += 1
    flags = {name: turn.pop(name) for name in FLAGS if name in turn}
    if any(value not in (0, 1) for value in flags.values()):
        raise _malformed(message)
    role = ROLES.get(role, role)
    supervising = [name for name, value in flags.items() if bool(value) == FLAGS[name]]
    if role != "assistant":
        unused.update(f"'{name}' on a turn that is not the assistant's" for name in supervising)
    return {"role": role, "content": _content(content, unused), **turn}, len(supervising) == len(flags)


def _content(content: Any, unused: Unused) -> str:
    """Return a message's `content` as text. If it is a list of parts, join their texts and count the rest as unused."""
    if not isinstance(content, list):
        return _text(content, "the content of a message must be text, but one has")
    texts = []
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise UserError(f"--dataset_name: only text can be trained on, but a message has the part {repr_of(part)}.")
        entries = (name for name, value in part.items() if name not in ("type", "text") and value is not None)
        unused.update(f"entry '{name}' of a part" for name in entries)
        texts.append(text)
    return "".join(texts)


def _malformed(message: Any) -> UserError:
    flags = ", ".join(f"'{name}'" for name in FLAGS)
    return UserError(
        "--dataset_name: a message needs text in 'role' and 'content' (or in 'from' and 'value'), a function in each "
        f"call, and 0, 1 or null in {flags}; a row has {repr_of(message)}."
    )
