"""Turn a conversation into token ids and a mask that is True for tokens on which the loss is computed (supervised).

Conversations, problems and Alpaca rows are rendered with the tokenizer's chat template. A tokenizer without a template
uses `PROMPT_FORM` or `PLAIN_TURN`. The loss is computed on the solution, the completion or each turn of the assistant,
and on the end token (`trained_eos`); with `train_on_prompt`, it is computed on every token. Every document ends with
the end token: text that a template adds after it is removed. A document has one BOS token, at its start.

If a template marks the assistant's text ({% generation %}), the marked text is supervised. Otherwise the supervised
text of a turn is the text that the template adds after the generation prompt. Text that the template omits cannot be
supervised and is counted as unused. A row is an error if the template omits an answer or a tool call.

A document is tokenised as one text, so that its prompt has the same tokens as in generation. If a token would straddle
a boundary of a supervised range, the text after the boundary is tokenised as a continuation, i.e. without the word mark
or space that Llama 2's and Mistral's tokenizers put before every text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from itertools import pairwise
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from llm_fp8.data.rows import REASONING, UNTEMPLATED, Conversation, RowForm, Unused, called, read_row, repr_of
from llm_fp8.utils.errors import UserError, reading

PROMPT_FORM = "Problem:\n{problem}\n\nSolution:\n"  # prompt for a problem if there is no chat template
PLAIN_TURN = "{role}:\n"  # header of a turn if there is no chat template; EOS ends an assistant's turn
TEMPLATE_DATE = date(2026, 1, 1)  # result of `strftime_now` in chat templates: tokens must not depend on the day
FORMAT_VERSION = 15  # version of cached documents: increase it if rows are tokenised or rejected differently

_NOW = re.compile(r"""strftime_now\(\s*(['"])(?P<format>.*?)\1\s*\)""")
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPEN_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")  # some generation prompts end with it (Qwen3.5's)
_THINK_TAGS = re.compile("</?think>")
_THOUGHT = re.compile(r"(<think>\s*).*?(\s*</think>)", re.DOTALL)

Span = tuple[int, int]  # a range of characters
Spans = dict[int, Span]  # number of a turn -> range of its supervised text


class Rendered(NamedTuple):
    """Text of a row and the character ranges to supervise. Both are empty if the row has nothing to train on."""

    text: str = ""
    spans: Sequence[Span] = ()
    from_template: bool = False

    def cuts(self) -> list[int]:
        """Return the positions inside the text at which a supervised range begins or ends, in order."""
        return sorted({position for span in self.spans for position in span if 0 < position < len(self.text)})


class Encoded(NamedTuple):
    """Token ids of a document, and for each id True if it is supervised. Empty if there is nothing to train on."""

    input_ids: list[int]
    supervised: list[bool]


def encode_batch(
    conversations: Sequence[Conversation], form: RowForm, tokenizer: PreTrainedTokenizerBase, train_on_prompt: bool
) -> list[Encoded]:
    """Tokenise conversations in one tokenizer call. In `Conversation.unused`, count fields that the template omits."""
    eos = trained_eos(tokenizer, form)
    ends = {eos, tokenizer.eos_token_id}
    if form not in UNTEMPLATED:
        ends |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    if form == "token_ids":
        documents = [Encoded(list(each.tokens[0]), list(each.tokens[1])) for each in conversations]
        if unknown := [i for ids, _ in documents for i in ids if not 0 <= i < len(tokenizer)]:
            raise UserError(f"--dataset_name: 'input_ids' has {unknown[0]}, and the tokenizer {len(tokenizer)} tokens.")
    else:
        encoded = _encode_spans([render(conversation, form, tokenizer) for conversation in conversations], tokenizer)
        documents = [_end_turns(document, tokenizer, eos, ends) for document in encoded]
    return [Encoded(ids, [True] * len(ids)) for ids, _ in documents] if train_on_prompt else documents


def trained_eos(tokenizer: PreTrainedTokenizerBase, form: RowForm) -> int:
    """Return the id of the token that ends documents of this form. It is the token with which the chat template ends
    an assistant's turn (Llama 3: <|eot_id|>), or else the tokenizer's EOS. Raise `UserError` if neither exists.
    """
    ending, answer = [], "pineapple"
    if form not in UNTEMPLATED and tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        with suppress(UserError):  # a template that rejects this conversation may accept others
            after = _render(tokenizer, Conversation(turns, Unused()))[0].rpartition(answer)[2].lstrip()
            ending = [i for i in _continue(answer, after, tokenizer)[:1] if i in tokenizer.added_tokens_decoder]
    eos = (*ending, tokenizer.eos_token_id)[0]
    if not isinstance(eos, int):
        raise UserError("--model_name: the tokenizer has no EOS token, so the model could not learn to stop.")
    return eos


def render(conversation: Conversation, form: RowForm, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Render a conversation to text and find the character ranges to supervise."""
    if not (messages := conversation.messages):
        return Rendered()
    if form not in UNTEMPLATED and tokenizer.chat_template is not None:
        return _render_template(conversation, tokenizer)
    conversation.unused.update(f"entry '{name}'" for name in (*conversation.entries(), *conversation.arguments()))
    if form in ("messages", "sharegpt", "prompt_messages") or len(messages) > 2:
        return _render_plain(conversation, str(tokenizer.eos_token))
    prompt, answer = (messages[0]["content"] if len(messages) == 2 else ""), messages[-1]["content"]
    prompt = prompt if form in UNTEMPLATED else PROMPT_FORM.format(problem=prompt)
    return Rendered(prompt + answer, [(len(prompt), len(prompt) + len(answer))])


def _render_plain(conversation: Conversation, eos: str) -> Rendered:
    text, spans, supervised = "", [], conversation.supervised_turns()
    for turn, message in enumerate(conversation.messages):
        content = message["content"].strip()
        text += PLAIN_TURN.format(role=message["role"].capitalize())
        content += eos if message["role"] == "assistant" and content else ""
        if turn in supervised:
            _check_shown(message, content, "", Unused())
            spans.append((len(text), len(text) + len(content)))
        text += content + "\n\n"
    return Rendered(text, spans)


def _render_template(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    unused, template = conversation.unused, str(tokenizer.chat_template)
    conversation, text = _convert_for_template(conversation, tokenizer)
    messages, supervised = conversation.messages, conversation.supervised_turns()
    locate = _marked_spans if _GENERATION_BLOCK.search(template) else _turn_spans
    spans = locate(text, conversation, tokenizer)

    def renders_same(changed: list[dict[str, Any]]) -> bool:
        with suppress(UserError):  # if rendering fails, the template reads the removed part
            return _render(tokenizer, conversation._replace(messages=changed))[0] == text
        return False

    unused["assistant's turn that the template does not mark"] += max(0, len(supervised) - len(spans))
    for turn, message in enumerate(messages):
        (start, end), content = spans.get(turn, (0, len(text))), message["content"].strip()
        # Search the reasoning without its tags, since some templates write white space around the tags.
        *thoughts, answer = _THINK_TAGS.split(message["content"]) if message["role"] == "assistant" else [""]
        thoughts.extend({str(message[name]) for name in REASONING if name in message})
        around = "".join(text[start:end].rpartition(answer.strip() or "\0")[::2])  # the answer may repeat a thought
        unused["reasoning that the chat template does not show"] += sum(each.strip() not in around for each in thoughts)
        if turn in supervised:
            _check_shown(message, text[start:end], template, unused)
        elif text.count(content) < sum(other["content"].count(content) for other in messages):
            is_unused = renders_same([*messages[:turn], {**message, "content": ""}, *messages[turn + 1 :]])
            unused[f"content of a turn of the role '{message['role']}'"] += is_unused
    for name, number in Counter(conversation.entries()).items():
        if name not in REASONING:
            without = [{key: value for key, value in message.items() if key != name} for message in messages]
            unused[f"entry '{name}'"] += number * renders_same(without)
    for name in conversation.arguments():
        unused[f"entry '{name}'"] += not re.search(rf"(?<![\w.'\"]){re.escape(name)}\b", template)
    return Rendered(text, list(spans.values()), from_template=True)


def _convert_for_template(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[Conversation, str]:
    """Convert a conversation to the names and types that the template reads. Return the result and its rendered text.

    Reasoning is stored under each name that templates read (transformers 5.23 does this itself, 5.17 does not). The
    arguments of a tool call become an object, since most templates write JSON themselves. If the template fails on
    objects, as DeepSeek-V3's does, the arguments become JSON text.
    """
    renamed = {} if "developer" in str(tokenizer.chat_template) else {"developer": "system"}

    def with_arguments(as_text: bool) -> Conversation:
        messages = []
        for original in conversation.messages:
            message = {**original, "role": renamed.get(original["role"], original["role"])}
            if (thought := next((original[name] for name in REASONING if name in original), None)) is not None:
                message = {"thinking": thought, **message, "reasoning_content": thought}
            if "tool_calls" in message:
                message["tool_calls"] = [_with_arguments(call, as_text) for call in message["tool_calls"]]
            messages.append(message)
        return conversation._replace(messages=messages)

    try:
        return (converted := with_arguments(as_text=False)), _render(tokenizer, converted)[0]
    except UserError:
        return (converted := with_arguments(as_text=True)), _render(tokenizer, converted)[0]


def _check_shown(message: Mapping[str, Any], shown: str, template: str, unused: Unused) -> None:
    """Raise `UserError` if `shown` lacks a call or the answer. Beside calls, a missing answer is only counted."""
    if (calls := called(message)) and ("tool_calls" not in template or any(call not in shown for call in calls)):
        raise UserError(f"--dataset_name: the chat template does not show an assistant's 'tool_calls' {calls}.")
    answer = _THINK_TAGS.split(message["content"])[-1].strip()
    if answer not in shown:
        if not calls:
            raise UserError(f"--dataset_name: the chat template does not show an assistant's turn {repr_of(answer)}.")
        unused["text beside a call that the chat template does not show"] += 1


def _with_arguments(call: Mapping[str, Any], as_text: bool) -> Mapping[str, Any]:
    """Convert a tool call's arguments (they may be in its `function`) to JSON text if `as_text`, else to an object."""
    if "function" in call:
        return {**call, "function": _with_arguments(call["function"], as_text)}
    arguments: Any = call.get("arguments")
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text:
        with suppress(TypeError, ValueError):  # text that is not JSON stays unchanged
            arguments = parsed if isinstance(parsed := read_row(arguments), dict) else arguments
    return {**call, "arguments": arguments} if "arguments" in call else call


def _render(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, **options: bool) -> tuple[str, list[Span]]:
    """Render a conversation to text. Also return the spans that the template marks, or [] without a mask option."""
    roles = ", ".join(message["role"] for message in conversation.messages)
    task = f"a conversation of the roles {roles} with the tokenizer's chat template"
    with reading("--model_name", tokenizer.name_or_path, task, "Give another --chat_template, or drop such rows."):
        template = tokenizer.get_chat_template(tools=conversation.tools)
        # transformers 5 cannot pass our own function to a template.
        template = _NOW.sub(lambda call: repr(TEMPLATE_DATE.strftime(call["format"])), template)
        variables = {**tokenizer.special_tokens_map, **conversation.template_kwargs}
        variables |= {"add_generation_prompt": False, "continue_final_message": False, **options}
        texts, marked = cast(Any, render_jinja_template)(
            [conversation.messages], tools=conversation.tools, chat_template=template, **variables
        )
        return texts[0], marked[0] if marked else []


def _marked_spans(text: str, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Spans:
    """Return the character ranges of `text` that the template marks, except for turns excluded from the loss."""
    _, marked = _render(tokenizer, conversation, return_assistant_tokens_mask=True)
    turns = [turn for turn, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if len(turns) == len(marked):
        return {turn: marked[turns.index(turn)] for turn in conversation.supervised_turns()}
    if conversation.excluded.intersection(turns):
        parts = f"{len(marked)} parts in {len(turns)} assistant's turns, some of them excluded from the loss"
        raise UserError(f"--dataset_name: the chat template marks {parts}; leave such conversations out.")
    return {-1 - part: span for part, span in enumerate(marked)}


def _turn_spans(text: str, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Spans:
    """Locate each supervised turn in `text`, from the end of its generation prompt to the end of the turn.

    For each turn, the conversation is rendered up to that turn. `text` must begin with this rendering, or continue like
    it after the previous supervised turn. It may lack only reasoning, which Qwen3's template drops from earlier turns.
    """
    spans: Spans = {}
    seen, end = "", 0  # the rendered conversation up to the previous supervised turn, and its end in `text`
    for turn in conversation.supervised_turns():
        message = conversation.messages[turn]
        essence = message["content"].rpartition("</think>")[2].strip() or "".join(called(message)[:1])
        # Phi-3's template writes an EOS after the last turn only.
        until = _render(tokenizer, conversation.until(turn + 1))[0].removesuffix(str(tokenizer.eos_token))
        if turn:
            full_prompt = _render(tokenizer, conversation.until(turn), add_generation_prompt=True)[0]
        else:  # a first turn has no generation prompt: it begins with its content
            content = message["content"].strip()  # includes its reasoning, if the template renders it
            full_prompt = until[: until.rfind(content if content and content in until else essence)]
        prompts = [full_prompt, _OPEN_THINKING.sub("", full_prompt)]
        before = next(filter(until.startswith, prompts), None)
        if before is None and turn and conversation.messages[turn - 1]["role"] == "assistant":
            # Qwen3's and OLMo 2's templates render the previous answer differently if a turn follows it.
            opening = full_prompt[len(_render(tokenizer, conversation.until(turn))[0]) :]
            at = until.rfind(opening, 0, until.rfind(essence)) if opening else -1
            before = until[: at + len(opening)] if at >= 0 else None
            prompts.append(before or full_prompt)
        shown = until[len(before or "") :]
        begins = [
            at + len(prompt) - len(known)
            for prompt in prompts
            for known, at in (("", 0), (seen, end))
            if prompt.startswith(known) and text.startswith(prompt[len(known) :], at)
        ]
        variants = {shown: None, _THOUGHT.sub(r"\1\2", shown): None}  # GLM's template removes text between the tags
        candidates = (
            (at, at + len(variant) - cut)
            for variant in variants
            for at in begins
            for cut in range(1 + max(0, variant.rfind(essence)))
            if at >= end and text.startswith(variant[cut:], at)
        )
        span = next(candidates, None)
        if span is None or before is None:
            raise UserError(
                "--dataset_name: the chat template changes earlier turns when later turns follow, so that the turn "
                f"{repr_of(shown)} is missing; mark turns with {{% generation %}} in it, or give single questions."
            )
        spans[turn] = span
        seen, end = until, span[1]
    return spans


def _tokenise(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenise texts without special tokens around them. Return [] for no texts, on which transformers 5.23 fails."""
    return list(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]) if texts else []


def _continue(before: str, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenise `text` as the continuation of `before`: tokenise it after a single character, then remove the tokens of
    this character. The character is the last one of `before` or, if that shares a token with `text`, another one.
    """
    for anchor in (before[-1], *"0a\n."):
        alone, both = _tokenise([anchor, anchor + text], tokenizer)
        if alone and both[: len(alone)] == alone:
            return both[len(alone) :]
    return _tokenise([text], tokenizer)[0]


def _encode_spans(rendered: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> list[Encoded]:
    texts = [item.text[:end] for item in rendered for end in (*item.cuts(), len(item.text))]
    tokens, full, [bare] = iter(_tokenise(texts, tokenizer)), tokenizer("a")["input_ids"], _tokenise(["a"], tokenizer)
    prefix = full[: next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)]  # as a BOS
    encoded: list[Encoded] = []
    for item in rendered:
        text, ids, supervised = item.text, list[int](), list[bool]()
        begin, head = 0, ids  # start of the text that is tokenised in one piece, and the tokens before it
        for start, end in pairwise((0, *item.cuts(), len(text))):
            whole = next(tokens)
            whole = whole if begin == 0 else head + _continue(text[:begin], text[begin:end], tokenizer)
            if whole[: len(ids)] != ids:
                begin, head = start, ids
                whole = ids + _continue(text[:start], text[start:end], tokenizer)
            ids = whole
            inside = any(first <= start < stop for first, stop in item.spans)
            supervised += [inside] * (len(ids) - len(supervised))
        if not item.from_template and ids[: len(prefix)] != prefix:
            ids, supervised = prefix + ids, [False] * len(prefix) + supervised
        encoded.append(Encoded(ids, supervised))
    return encoded


def _end_turns(encoded: Encoded, tokenizer: PreTrainedTokenizerBase, eos: int, ends: set[Any]) -> Encoded:
    """Extend each supervised range by an EOS that follows it. Shorten it by white space that follows one of the tokens
    `ends`. Cut the document off after the last range, and add `eos` if it does not end with one of `ends`.
    """
    ids, supervised = list(encoded.input_ids), bytearray(encoded.supervised)
    end = 0
    while (start := supervised.find(1, end)) >= 0:  # searching bytes needs no Python step per token
        end = supervised.find(0, start) if 0 in supervised[start:] else len(ids)
        if end < len(ids) and ids[end] in (eos, tokenizer.eos_token_id):
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
