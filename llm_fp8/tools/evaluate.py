"""Measure an exported model's eval loss and share of right answers, on the rows that its run held out.

`prepare_data` holds out the same rows as in the run, since it gets the options in the run's run.json. The eval loss
covers all of these rows. A prompt is a row up to its last supervised part, and the model answers greedily until an EOS
token. math-verify compares the final answer with the row's; for example, `0.5` equals `\\frac12`. If it finds no
answer, equal texts count as right. Rows without a final answer do not count for the share. If no row has one, as in
most chats, a few generated samples are shown and written instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from llm_fp8.config.options import Config, DataConfig
from llm_fp8.config.parser import add_option
from llm_fp8.tools.compare.run_record import last_start
from llm_fp8.tools.script import writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, positive, reading
from llm_fp8.utils.json_files import read_json, write_json_atomic

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llm_fp8.data.collate import Batch

_DATASETS = ("dataset_name", "eval_dataset_name", "split_name", "validation_split_name")
DATA_OPTIONS = (*_DATASETS, "columns", "validation_fraction", "max_seq_length")
"""Options of the training scripts that decide which rows are held out."""
MOST_WORDS = 5  # of a marked answer; longer ones, as "the answer is that ...", cannot be compared
_MARK = re.compile(r"####(?=[^\n]*$)|\banswer(?: is\b:?|:)", re.IGNORECASE)
_PLAIN = re.compile(r"[\s*\"(]*(.*?)[\s*\").,:;]*", re.DOTALL)  # an answer without the punctuation around it
AMOUNTS = ("num_rows_read", "num_tokens")  # figures of run.json that are others if the data changed
NUM_SAMPLES = 5  # rows to answer if no row has a final answer


def parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add, model_help = parser.add_argument, "exported folder, other Hugging Face folder, or hub id"
    add("--model_name", "--model", type=os.path.expanduser, required=True, help=model_help)
    group, types = parser.add_argument_group("options that replace the run's"), get_type_hints(DataConfig)
    for field in dataclasses.fields(DataConfig):
        if field.name in DATA_OPTIONS:
            add_option(group, field, types[field.name])
    add("--num_problems", type=positive, default=500, help="maximum number of rows to answer (default %(default)s)")
    add("--max_new_tokens", type=positive, default=512, help="longest answer, in tokens (default %(default)s)")
    add("--batch_size", type=positive, default=64, help="rows answered at a time (default %(default)s)")
    add("--output", type=writable, help="JSON file (default: exact_match.json in the folder of the run)")
    return parser.parse_args(argv)


def data_options(options: argparse.Namespace) -> tuple[DataConfig, list[int] | None]:
    """Return data options from the command line, else from the run.json beside the model, and `AMOUNTS` of the data of
    this run. If the command line names a dataset, only options that suit any dataset come from run.json.
    """
    typed, amounts = {name: value for name, value in vars(options).items() if name in DATA_OPTIONS}, None
    record, recorded = Path(options.model_name).absolute().parent / "run.json", {}
    if record.is_file() and Path(options.model_name).is_dir():
        shared = {field.name for field in dataclasses.fields(DataConfig)}
        shared = {"max_seq_length", "overlong", "chat_template_kwargs"} if "dataset_name" in typed else shared
        with reading("--model_name", options.model_name, f"{record}"):
            run = read_json(record)
            recorded = {name: value for name, value in last_start(run)["config"]["data"].items() if name in shared}
        if not typed and not recorded.get("streaming"):
            amounts = [run["data"][name] for name in AMOUNTS]
    return DataConfig(**{**recorded, **typed, "packing": False, "batch_size": 1}), amounts


def prompt_and_solution(input_ids: list[int], labels: list[int]) -> tuple[list[int], list[int]]:
    """Split a row before its last span of supervised tokens. Return the token ids before the span and those in it.
    `labels[t]` is the token id at t + 1 if that token is supervised, else -100.
    """
    last = max(t for t, label in enumerate(labels) if label >= 0)
    first = next((t + 1 for t in range(last, -1, -1) if labels[t] < 0), 0)
    return input_ids[: first + 1], labels[first : last + 1]


def final_answer(text: str) -> tuple[str, bool]:
    """Return `text` from its last \\boxed on, after its last other mark of an answer, or all of it; True if marked."""
    text = text.strip()
    marks = [text.rfind("\\boxed")] if "\\boxed" in text else [mark.end() for mark in _MARK.finditer(text)]
    return text[marks[-1] if marks else 0 :].strip(), bool(marks)


def has_answer(expected: str, marked: bool = False) -> bool:
    """Return True if `expected` ends in a short marked answer or, unless `marked`, is one word or a formula."""
    answer, is_marked = final_answer(expected)
    if is_marked:
        return "\\boxed" in answer or (re.search(r"\w", answer) is not None and len(answer.split()) <= MOST_WORDS)
    is_answer = re.fullmatch(r"\S{1,20}", answer) or not re.search(r"(?<!\\)[^\W\d_]{2,}", answer)
    return bool(answer and is_answer and not marked)


def is_right(expected: str, answer: str) -> bool:
    """Return True if the final answers differ at most in case and punctuation, or are equal for math-verify."""
    from math_verify import parse, verify

    gold, reply = (final_answer(text)[0] for text in (expected, answer))
    plain, same = (_PLAIN.fullmatch(text)[1].casefold() for text in (gold, reply))  # type: ignore[index]
    return plain == same != "" or bool(verify(parse(gold), parse(reply)))


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], max_new_tokens: int
) -> list[str]:
    """Generate greedily from `prompts` (token ids) up to an EOS token. Return the texts without special tokens."""
    from te_llama import rope_tables

    tables = rope_tables(model.config.get_text_config(decoder=True))
    tables = [table for table in tables if table.get("rope_type") in ("longrope", "dynamic")]
    limit = min((table.get("original_max_position_embeddings", 0) for table in tables), default=math.inf)
    if len(prompts) > 1 and max(map(len, prompts)) + max_new_tokens > limit:  # one RoPE scaling per batch
        return [generate(model, tokenizer, [prompt], max_new_tokens)[0] for prompt in prompts]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(model.device)
    model_ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(model_ends if isinstance(model_ends, list) else [model_ends])} - {None}
    token_ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": list(ends)}
    sequences = cast(Any, model).generate(**padded, **token_ids, do_sample=False, max_new_tokens=max_new_tokens)
    answers = sequences[:, padded["input_ids"].shape[1] :].tolist()
    answer_ids = [list(itertools.takewhile(lambda token: token not in ends, answer)) for answer in answers]
    return tokenizer.batch_decode(answer_ids, skip_special_tokens=True)


def eval_loss(model: PreTrainedModel, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return the mean cross entropy per supervised token and the number of such tokens. A batch holds one document."""
    import torch

    from llm_fp8.models.source import require_positions

    loss_sum, num_tokens = 0.0, 0
    for batch in batches:
        length, device = batch.num_real_tokens, model.device
        [ids], [labels] = batch.input_ids[:, :length].to(device), batch.labels[:, :length].to(device)
        require_positions(model.config, length, f"{model.name_or_path}", "--max_seq_length")
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].float()
        loss_sum += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        num_tokens += batch.num_supervised_tokens
    return loss_sum / num_tokens, num_tokens


def main() -> int:
    """Evaluate the model, then print and write the figures."""
    options = parse(sys.argv[1:])
    import torch  # imported here, so that --help and wrong options do not wait for it
    from scipy.stats import binomtest

    from llm_fp8.data.prepare import prepare_data
    from llm_fp8.observability.reporter import quiet_libraries
    from llm_fp8.tools.exported import adapter_base, load_exported, tokenizer_of

    quiet_libraries()
    base = adapter_base(options.model_name)
    tokenizer, (data_config, amounts) = tokenizer_of(options.model_name, base), data_options(options)
    data = prepare_data(config := Config(data=data_config), tokenizer)
    if amounts not in (None, now := [vars(data.report)[name] for name in AMOUNTS]):
        then, today = (f"{rows} rows, {tokens} tokens to train on" for rows, tokens in (amounts, now))
        change = f"--dataset_name {config.data.dataset_name} had {then} when the run read it and has {today}"
        raise UserError(f"{change}, so other rows are held out; name held-out data (--eval_dataset_name).")
    print(data.description, flush=True)
    if data.eval is None:
        raise UserError("--validation_fraction: no row is held out, so there is nothing to evaluate on; raise it.")
    # Prompts must be unsupervised, even if the run trained on them, so that `prompt_and_solution` can split rows.
    held_out: Any = prepare_data(config.with_options(train_on_prompt=False), tokenizer).eval
    rows = (row for batch in held_out for row in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True))
    parts = (prompt_and_solution(*row) for row in rows if row[1][0] < 0 <= max(row[1]))  # plain text has no prompt
    texts: Any = [(prompt, tokenizer.decode(solution, skip_special_tokens=True)) for prompt, solution in parts]
    problems = [text for text in texts if has_answer(text[1])]
    if 2 * len(problems) < len(texts):  # a chat may have a few replies of one word
        problems = [text for text in texts if has_answer(text[1], marked=True)]
    samples_only = not problems
    problems = problems[: options.num_problems] or texts[: min(NUM_SAMPLES, options.num_problems)]
    problems.sort(key=lambda problem: len(problem[0]))  # so that batches have little padding
    on_gpu = torch.cuda.is_available()
    model = load_exported(options.model_name, base, torch.bfloat16 if on_gpu else torch.float32)
    torch.nn.Module.to(model, "cuda" if on_gpu else "cpu").eval()
    loss, num_tokens = eval_loss(model, data.eval)
    records: list[dict[str, Any]] = []
    for start in range(0, len(problems), options.batch_size):
        batch = problems[start : start + options.batch_size]
        answers = generate(model, tokenizer, [prompt for prompt, _ in batch], options.max_new_tokens)
        for (prompt, expected), answer in zip(batch, answers, strict=True):
            records.append({"problem": tokenizer.decode(prompt), "expected": expected, "answer": answer})
    figures: dict[str, Any] = {"eval_loss": loss}
    if samples_only:
        print("exact match: not measured, because no held-out row has a final answer that can be checked")
        for record in records:
            print(f"\nprompt: {record['problem']}\nanswer: {record['answer']}")
    else:
        for record in records:
            record["correct"] = is_right(record["expected"], record["answer"])
        num_right, number = sum(record["correct"] for record in records), len(records)
        interval = binomtest(num_right, number).proportion_ci(method="wilson")
        share, within = num_right / number, f"95% interval {interval.low:.1%} to {interval.high:.1%}"
        figures |= {"exact_match": share, "wilson_95": [interval.low, interval.high]}
        print(f"exact match: {share:.1%} ({num_right} of {number}; {within})")
    print(f"eval loss: {loss:.4f} nats/token over {num_tokens} supervised tokens")
    folder = Path(options.model_name).absolute()
    is_of_run = folder.name == "final" and (folder.parent / "run.json").is_file()
    path: Path | None = options.output or (folder.parent / "exact_match.json" if is_of_run else None)
    if path is not None:
        figures["answers"] = [] if samples_only else records
        if samples_only and records:
            figures["samples"] = records
        write_json_atomic(path, {"model": options.model_name, **figures})
        print(f"answers: {path}")
    return 0
