"""A row of a dataset becomes a conversation: the one place where columns and entries of a message are read.

Forms of rows by their columns, the first that fits:

    problem + generated_solution    a question and a worked answer (nvidia/OpenMathInstruct-2)
    messages                        a conversation: a list of {role, content}; every assistant turn is learnt, its calls
                                    of the tools in the column `tools` too, but none whose `weight` is 0
    conversations                   the same as ShareGPT writes it: a list of {from, value}
    instruction + output            Alpaca; a column `input` follows the instruction after a blank line
    prompt + completion             concatenated as they stand: no template, no prompt form
    text                            all of it learnt
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from llm_fp8.utils.errors import UserError, reading

ColumnForm = Literal["problem_solution", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]

COLUMNS: dict[ColumnForm, tuple[str, ...]] = {
    "problem_solution": ("problem", "generated_solution"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
OPTIONAL_COLUMNS: dict[ColumnForm, tuple[str, ...]]
OPTIONAL_COLUMNS = {"messages": ("tools",), "sharegpt": ("tools",), "alpaca": ("input",)}
CONVERSATIONS: tuple[ColumnForm, ...] = ("messages", "sharegpt")
AS_THEY_STAND: tuple[ColumnForm, ...] = ("prompt_completion", "text")
"""Forms that no template touches."""

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""ShareGPT's `from` -> `role`."""
SHAREGPT_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}


class Conversation(NamedTuple):
    """Messages, and the tools that they may call."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    def until(self, turn: int) -> Conversation:
        """The messages before this one."""
        return Conversation(self.messages[:turn], self.tools)

    def learnt_turns(self) -> list[int]:
        """The numbers of the messages that are learnt."""
        return [number for number, message in enumerate(self.messages) if _is_learnt(message)]


def detect_columns(
    columns: Sequence[str], mapped: Collection[str] = (), of: str = "--dataset_name: the dataset"
) -> ColumnForm:
    """The first form of these columns that uses all that --columns names (`mapped`); `UserError` for none."""
    for form, needed in COLUMNS.items():
        if set(needed) <= set(columns) and set(mapped) <= {*needed, *OPTIONAL_COLUMNS.get(form, ())}:
            return form
    understood = "; ".join(" + ".join(needed) for needed in COLUMNS.values())
    raise UserError(f"{of} has the columns {', '.join(columns)}; understood are: {understood}. Use --columns.")


def conversation_of(row: Mapping[str, Any], form: ColumnForm) -> Conversation:
    """The row's messages up to the last learnt turn, of a form that a template may touch."""
    if form not in CONVERSATIONS:
        problem = problem_of(row, form).strip()
        solution = text_of(row, COLUMNS[form][-1]).strip()
        turns = [{"role": "user", "content": problem}, {"role": "assistant", "content": solution}]
        return Conversation(turns if problem and solution else [])
    messages = _messages_of(row, form)
    while messages and not _is_learnt(messages[-1]):
        messages.pop()
    return Conversation(messages, _tools_of(row))


def problem_of(row: Mapping[str, Any], form: ColumnForm) -> str:
    """The text by which two rows are the same problem: the question, whatever the answer and the system prompt."""
    if form == "alpaca":
        parts = [text_of(row, "instruction"), text_of(row, "input") if "input" in row else ""]
        return "\n\n".join(part.strip() for part in parts if part.strip())
    if form not in CONVERSATIONS:
        return text_of(row, COLUMNS[form][0])
    messages = _messages_of(row, form)
    first = takewhile(lambda message: message["role"] != "assistant", messages)
    question = [message for message in first if message["role"] not in ("system", "developer")]
    # A conversation that the assistant begins is known by all of it.
    return "\n".join(message["content"] for message in question or messages)


def text_of(row: Mapping[str, Any], column: str) -> str:
    """The text of a column: nothing for null, and a number as Python writes it."""
    value = row[column]
    if not isinstance(value, (str, int, float, type(None))):
        raise UserError(f"--dataset_name: the column '{column}' must hold text, and a row has {shown(value)}.")
    return "" if value is None else str(value)


def shown(value: Any) -> str:
    """The beginning of a value, for an error message."""
    return textwrap.shorten(repr(value), 80, placeholder="...")


def _messages_of(row: Mapping[str, Any], form: ColumnForm) -> list[dict[str, Any]]:
    """The row's messages, each with `role` and `content`, both text; a tool call needs no content."""
    column = COLUMNS[form][0]
    messages = []
    for message in row[column] or []:
        turn = {"content": "", **_without_none(message)} if isinstance(message, Mapping) else {}
        if form == "sharegpt" and "from" in turn:
            turn = {"role": SHAREGPT_ROLES.get(turn["from"]), "content": turn.get("value", "")}
        whole = isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        if not whole or turn.get("weight", 1) not in (0, 1):
            raise UserError(
                f"--dataset_name: '{column}' must list messages with 'role' and 'content' (or 'from' and 'value') "
                f"of text, and 'weight' 0, 1 or none; a row has {shown(message)}."
            )
        messages.append(turn)
    return messages


def _is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether a message is an assistant's, says something and is not excluded."""
    says_something = message["content"].strip() or message.get("tool_calls")
    return bool(message["role"] == "assistant" and message.get("weight", 1) and says_something)


def _tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The column `tools`: a list of JSON schemas, or its JSON text."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        with reading("--dataset_name", shown(tools), "a row's 'tools'", "Give a list, or the JSON text of one."):
            tools = json.loads(tools)
    return _without_none(tools) or None


def _without_none(value: Any) -> Any:
    """Without the fields that Arrow fills with None, where rows differ."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
