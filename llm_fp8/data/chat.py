"""A conversation becomes token ids and a mask of those that are to be predicted.

Conversations, problems and Alpaca rows go through the tokenizer's chat template, else through `PROMPT_FORM` or
`PLAIN_TURN`. Supervised are the solution, the completion or each learnt turn (with `train_on_prompt` every token), and
its end (`trained_eos`), once, as the last token of every document; what a template puts after it is cut off. BOS stands
at the front once.

Where a template marks the assistant's text itself ({% generation %}), its marks are the mask. Elsewhere a turn is what
the template adds to the conversation before it: it begins where the generation prompt ends.

A document is tokenised as one text, so that the prompt's tokens are those that generation starts from. Where a token
would straddle the beginning of a supervised range, both sides are tokenised separately.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from llm_fp8.data.rows import AS_THEY_STAND, COLUMNS, CONVERSATIONS, ColumnForm, Conversation, conversation_of, text_of
from llm_fp8.data.rows import shown as repr_of
from llm_fp8.utils.errors import UserError, reading

PROMPT_FORM = "Problem:\n{problem}\n\nSolution:\n"
"""The prompt of a problem without a chat template; the solution follows at once."""
PLAIN_TURN = "{role}:\n"
"""Before each turn of a conversation without a chat template; a blank line follows a turn, EOS an assistant's."""
TEMPLATE_DATE = date(2026, 1, 1)
"""Today, for chat templates that show the date (`strftime_now`): tokens must not depend on the day of a run."""
FORMAT_VERSION = 7
"""Raised whenever a row is tokenised differently, or others are refused, so that caches are made anew."""

_NOW = re.compile(r"""strftime_now\(\s*(['"])(?P<format>.*?)\1\s*\)""")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPEN_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")  # some generation prompts end so (Qwen3.5's)
_THINK_TAGS = re.compile("</?think>")


class Rendered(NamedTuple):
    """The text of a row and the character ranges to supervise; empty for a row with nothing to learn."""

    text: str = ""
    spans: Sequence[tuple[int, int]] = ()
    from_template: bool = False

    def cuts(self) -> list[int]:
        """Where inside the text a supervised span begins or ends, in order."""
        return sorted({position for span in self.spans for position in span if 0 < position < len(self.text)})


class Encoded(NamedTuple):
    """Token ids of a document and, for each, whether it is to be predicted; empty where there is nothing to learn."""

    input_ids: list[int]
    supervised: list[bool]


def encode_batch(
    rows: Sequence[Mapping[str, Any]],
    form: ColumnForm,
    tokenizer: PreTrainedTokenizerBase,
    train_on_prompt: bool = False,
) -> list[Encoded]:
    """The documents of `rows`; one tokenizer call, which runs in parallel."""
    eos = trained_eos(tokenizer, form)
    if form not in AS_THEY_STAND and _GENERATION_BLOCK.search(str(tokenizer.chat_template or "")):
        encoded = [_encode_marked(_conversation(row, form, tokenizer), tokenizer) for row in rows]
    else:
        encoded = _encode_spans([render(row, form, tokenizer) for row in rows], tokenizer)
    documents = [_end_turns(each, tokenizer, form, eos) for each in encoded]
    return [Encoded(ids, [True] * len(ids)) for ids, _ in documents] if train_on_prompt else documents


def trained_eos(tokenizer: PreTrainedTokenizerBase, form: ColumnForm) -> int:
    """The id that documents of this form teach as the end: the token by which the chat template ends an assistant's
    turn, such as Llama 3's <|eot_id|>, else the tokenizer's EOS. `UserError` where there is neither.
    """
    ending, answer = [], "pineapple"
    if form not in AS_THEY_STAND and tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        with suppress(UserError):  # a template that refuses this may take others
            after = _apply_template(tokenizer, Conversation(turns)).rpartition(answer)[2].lstrip()
            ending = [i for i in _tokenise([after], tokenizer)[0][:1] if i in tokenizer.added_tokens_decoder]
    eos = (*ending, tokenizer.eos_token_id)[0]
    if not isinstance(eos, int):
        raise UserError("--model_name: the tokenizer has no EOS token, so the model could not learn to stop.")
    return eos


def render(row: Mapping[str, Any], form: ColumnForm, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """The text of a row and what to supervise in it."""
    if form in AS_THEY_STAND:
        prompt = "" if form == "text" else text_of(row, "prompt")
        answer = text_of(row, COLUMNS[form][-1])
    else:
        conversation = _conversation(row, form, tokenizer)
        if not conversation.messages:
            return Rendered()
        if tokenizer.chat_template is not None:
            text = _apply_template(tokenizer, conversation)
            return Rendered(text, list(_turn_spans(text, conversation, tokenizer)), from_template=True)
        if form in CONVERSATIONS:
            return _render_plain(conversation, str(tokenizer.eos_token))
        problem, answer = (message["content"] for message in conversation.messages)
        prompt = PROMPT_FORM.format(problem=problem)
    return Rendered(prompt + answer, [(len(prompt), len(prompt) + len(answer))]) if answer.strip() else Rendered()


def _render_plain(conversation: Conversation, eos: str) -> Rendered:
    text, spans, learnt = "", [], conversation.learnt_turns()
    for turn, message in enumerate(conversation.messages):
        content = message["content"].strip()
        text += PLAIN_TURN.format(role=message["role"].capitalize())
        content += eos if message["role"] == "assistant" and content else ""
        if turn in learnt:
            _check_shown(message, content)
            spans.append((len(text), len(text) + len(content)))
        text += content + "\n\n"
    return Rendered(text, spans)


def _conversation(row: Mapping[str, Any], form: ColumnForm, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    """The row's conversation as the template takes it; `UserError` where that would leave out tools or calls.

    Arguments of calls are objects where they are JSON text, as OpenAI's API has them: most templates write the JSON
    themselves, and text would come out quoted. A template that fails on objects gets the text.
    """
    conversation = conversation_of(row, form)
    calls = any(message.get("tool_calls") for message in conversation.messages)
    for name, there in (("tools", conversation.messages and conversation.tools), ("tool_calls", calls)):
        if there and name not in str(tokenizer.chat_template or ""):
            raise UserError(f"--dataset_name: a conversation has '{name}', and the chat template never shows that.")
    messages = [dict(message) for message in conversation.messages]
    for message in messages:
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
    parsed = Conversation(messages, conversation.tools)
    if parsed != conversation:
        try:
            _apply_template(tokenizer, parsed)
        except UserError:
            return conversation
    return parsed


def _check_shown(message: Mapping[str, Any], shown: str) -> None:
    """Raise `UserError` where a template does not show all of an assistant's message at the end of a conversation:
    Llama 3's leaves out the content beside calls, DeepSeek-R1's what stands before </think>, many all reasoning.
    """
    for name in ("content", "reasoning_content", "reasoning", "thinking"):
        # Some templates write white space of their own around the tags.
        for part in _THINK_TAGS.split(str(message.get(name, ""))):
            if part.strip() not in shown:
                text = repr_of(part.strip())
                raise UserError(f"--dataset_name: the chat template does not show an assistant's '{name}' {text}.")


def _parsed_call(call: Any) -> Any:
    """A call, or what stands under its `function`, with its arguments as an object where their text is that of one."""
    if isinstance(call, Mapping) and "function" in call:
        return {**call, "function": _parsed_call(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (TypeError, KeyError, ValueError):
        return call  # an object, or any other text, which the template shows as it is
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, tokenize: bool = False, **options: Any
) -> Any:
    """`apply_chat_template`; a template is a program of the model's, and may raise anything."""
    roles = ", ".join(message["role"] for message in conversation.messages)
    what = f"a conversation of the roles {roles} with the tokenizer's chat template"
    with reading("--model_name", tokenizer.name_or_path, what, "Correct it, or leave such conversations out."):
        template = tokenizer.get_chat_template(tools=conversation.tools)
        # transformers 5 passes no function of ours to a template.
        template = _NOW.sub(lambda call: repr(TEMPLATE_DATE.strftime(call["format"])), template)
        if "strftime_now(" in template:
            raise ValueError("it asks for the date in a format that is no literal, and tokens would depend on the day")
        options |= {"tools": conversation.tools, "chat_template": template, "tokenize": tokenize}
        return tokenizer.apply_chat_template(conversation.messages, **options)


def _turn_spans(text: str, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, int]]:
    """Where in `text` each learnt turn stands: from the end of its generation prompt to the end of the turn.

    The conversation is rendered up to each turn, and that has to stand in `text`, from the beginning or from the end of
    the turn before. Only reasoning may be missing there: some templates (Qwen3's) show it until the next question.
    """
    seen, end = "", 0  # the conversation up to the last turn, and where that ends in `text`
    for turn in conversation.learnt_turns():
        message = conversation.messages[turn]
        # Phi-3's template has an EOS after the last turn.
        until = _apply_template(tokenizer, conversation.until(turn + 1)).removesuffix(str(tokenizer.eos_token))
        if turn:
            before = _apply_template(tokenizer, conversation.until(turn), add_generation_prompt=True)
        else:  # templates have no prompt for a first turn: it begins with its content
            before = until[: until.rfind(message["content"].strip() or until)]
        shown = until.removeprefix(before)
        _check_shown(message, shown if turn else until)
        begins = [
            at + len(prompt) - len(same)
            for prompt in (before, _OPEN_THINKING.sub("", before))
            for same, at in (("", 0), (seen, end))
            if prompt.startswith(same) and text.startswith(prompt[len(same) :], at)
        ]
        answer = message["content"].rpartition("</think>")[2].strip()
        calls = [call.get("function", call).get("name") for call in message.get("tool_calls", ())]
        essence = answer or str(calls[0] if calls else "")
        starts = range(1 + max(0, shown.rfind(essence))) if essence else range(1)
        spans = ((at, at + len(shown) - cut) for at in begins for cut in starts if text.startswith(shown[cut:], at))
        span = next(spans, None)
        if span is None or not until.startswith(before):
            raise UserError(
                "--dataset_name: the chat template changes the beginning of a conversation as it goes on, and later "
                f"has no turn {repr_of(shown)}; mark turns with {{% generation %}} in it, or give single questions."
            )
        yield span
        seen, end = until, span[1]


def _tokenise(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text with nothing added; transformers 5.23 fails where there is none."""
    return list(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []


def _encode_marked(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """A conversation through a chat template that marks the assistant's text with `{% generation %}`."""
    if not conversation.messages:
        return Encoded([], [])
    if any(message.get("weight") == 0 for message in conversation.messages):
        raise UserError("--dataset_name: a message has weight 0, and the chat template itself marks what is learnt.")
    for turn in conversation.learnt_turns():
        _check_shown(conversation.messages[turn], _apply_template(tokenizer, conversation.until(turn + 1)))
    output = _apply_template(tokenizer, conversation, True, return_dict=True, return_assistant_tokens_mask=True)
    return Encoded(list(output["input_ids"]), [bool(mark) for mark in output["assistant_masks"]])


def _encode_spans(rendered: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    texts = [text for item in rendered for text in (item.text, *(item.text[:cut] for cut in item.cuts()))]
    tokens, bos = iter(_tokenise(texts, tokenizer)), tokenizer.bos_token_id
    added_bos = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
    encoded: list[Encoded] = []
    for item in rendered:
        cuts, ids = item.cuts(), next(tokens)
        prefixes = [next(tokens) for _ in cuts]
        if all(ids[: len(prefix)] == prefix for prefix in prefixes):
            ends = [*map(len, prefixes), len(ids)]
        else:
            bounds = [0, *cuts, len(item.text)]
            pieces = _tokenise([item.text[a:b] for a, b in pairwise(bounds)], tokenizer)
            ids = [token for piece in pieces for token in piece]
            ends = list(accumulate(map(len, pieces)))
        supervised: list[bool] = []
        for cut, end in zip([0, *cuts], ends, strict=True):
            inside = any(start <= cut < stop for start, stop in item.spans)
            supervised += [inside] * (end - len(supervised))
        if not item.from_template and ids[:1] != added_bos:
            ids, supervised = added_bos + ids, [False] * len(added_bos) + supervised
        encoded.append(Encoded(ids, supervised))
    return encoded


def _end_turns(encoded: Encoded, tokenizer: PreTrainedTokenizerBase, form: ColumnForm, eos: int) -> Encoded:
    """Close every supervised run at its end, EOS or what else the template writes, which may stand inside the run
    ("answer<EOS>\n") or just after it, and the document at the last one; `eos` is added where there is none.
    """
    ids, supervised = list(encoded.input_ids), bytearray(encoded.supervised)
    after = {eos, tokenizer.eos_token_id}
    ends = after if form in AS_THEY_STAND else after | special_ids(tokenizer)
    end = 0
    while (start := supervised.find(1, end)) >= 0:  # bytes are searched without a step of Python per token
        end = supervised.find(0, start) if 0 in supervised[start:] else len(ids)
        if end < len(ids) and ids[end] in after:
            supervised[end] = 1
            end += 1
        last = next((at for at in reversed(range(start, end)) if ids[at] in ends), end)
        if last < end and not str(tokenizer.decode(ids[last + 1 : end])).strip():
            while last > start and ids[last - 1] == ids[last]:
                last -= 1
            supervised[last + 1 : end] = bytes(end - last - 1)
            end = last + 1
    ids, flags = ids[:end], list(map(bool, supervised[:end]))
    return Encoded(ids, flags) if not ids or ids[-1] in ends else Encoded([*ids, eos], [*flags, True])


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokenizer's special tokens, named ones such as EOS and others such as <|eot_id|>."""
    return {*tokenizer.all_special_ids} | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
