"""From a configuration and a tokenizer to the loaders of a run: `prepare_data`.

load (load.py) -> documents, cached (prompt.py, tokenise.py) -> held-out share (split.py) -> sequences (pack.py)
-> global batches, micro-batches (sequences.py, loader.py, collate.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from llm_fp8.config.options import Config
from llm_fp8.data.collate import Batch, Collate, PackedCollate, PaddedCollate, document_multiple
from llm_fp8.data.load import DatasetSource, iterate, load_split, open_source, open_split_stream, unreadable
from llm_fp8.data.loader import EvalLoader, Share, TrainLoader
from llm_fp8.data.pack import PackingPlan, pack
from llm_fp8.data.prompt import ColumnForm, describe_prompt_form, detect_columns
from llm_fp8.data.sequences import MapSequences, Reader, StreamedRows, StreamSequences, sequence_readers
from llm_fp8.data.split import (
    ANSWER_COLUMN,
    DEFAULT_FRACTION,
    Problem,
    check_answer_column,
    choose_problems,
    held_out_mask,
    is_held_out,
)
from llm_fp8.data.tokenise import (
    FIGURES,
    DataReport,
    Document,
    Figures,
    TokeniseOptions,
    arrow_table,
    cache_key,
    content_key,
    document_reader,
    tokenise,
    tokenise_rows,
)
from llm_fp8.utils.errors import UserError

IndexArray = npt.NDArray[np.int64]

STREAMED_EVAL_ROWS = 512
"""Rows held out of a stream: the first that the held-out rule takes, or the first of the validation split."""
STREAMED_EVAL_SCAN_ROWS = 200_000
"""Most rows of a stream that are searched for them."""


@dataclass(frozen=True)
class PreparedData:
    """The loaders of a run and a description of its data."""

    train: TrainLoader
    eval: EvalLoader | None
    """None where no row is held out."""
    report: DataReport
    description: str
    sample: str
    problems: tuple[Problem, ...] = ()
    """Held-out problems to generate answers for (--eval_exact_match)."""

    def describe(self) -> str:
        """Lines to print: origin, counts, prompt form and one sample, its supervised part between >>> and <<<."""
        lines, report = [self.description], self.report
        if report.num_rows_read:  # a stream has not been read yet
            lines.append(f"  {report.summary()}")
            if (warning := report.warning()) is not None:
                lines.append(f"  {warning}")
        if report.padding_efficiency is not None:
            lines.append(
                f"  {report.num_tokens} tokens, {report.num_supervised_tokens} of them supervised, in "
                f"{report.num_rows_of_batches} sequences of {report.max_seq_length}: "
                f"{report.padding_efficiency:.1%} filled"
            )
        lines.append(f"  evaluation: {report.num_eval_rows} rows")
        if report.num_eval_rows_seen_in_training:
            lines[-1] += f" ({report.num_eval_rows_seen_in_training} left out because their problem is trained on)"
        if self.problems:
            lines.append(f"  exact match: {len(self.problems)} of its problems are answered")
        sample = "\n".join("    " + line for line in self.sample.splitlines())
        return "\n".join([*lines, "  a sample, >>>supervised<<<:", sample])


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of unused positions: PAD, else EOS. Padding is never recognised by it."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token_id for token_id in candidates if isinstance(token_id, int)), 0)


def prepare_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
    main_process_first: Callable[[], AbstractContextManager[Any]] = nullcontext,
    split_batch: Callable[[Batch], Batch] | None = None,
) -> PreparedData:
    """Load, tokenise, split and plan the data of a run. `UserError` on a dataset that cannot be found, read or used.

    `rank` and `world_size` count context groups (--context_parallel_size), whose ranks get the same sequences;
    `split_batch` takes a rank's slice of a batch. Within `main_process_first` (such as
    `accelerator.local_main_process_first`) the other processes wait for the main one and find its result in the cache.
    """
    kind = PackedCollate if config.packing else PaddedCollate
    context_size = config.parallel.context_parallel_size
    whole = kind(config.data.batch_size, config.data.max_seq_length, pad_token_id(tokenizer), context_size=context_size)

    def collate(sequences: Sequence[Sequence[Document]]) -> Batch:
        batch = whole(sequences)
        if split_batch is not None:
            batch = split_batch(batch)
        return batch.pin_memory() if pin_memory else batch

    with main_process_first():
        source = open_source(config.data.dataset_name, config.data.column_names)
        split = source.training_split(config.data.split_name)
        validation = source.validation_split(config.data.validation_split_name, split)
        job = _Job(config, tokenizer, collate, Share(rank, world_size), source, split, validation)
        return _prepare_stream(job) if config.data.streaming else _prepare_map(job)


def mark_supervised(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    """The decoded document with each supervised span between >>> and <<<."""
    bounds = [0, *(np.flatnonzero(np.diff(document.supervised.astype(np.int8))) + 1).tolist(), len(document.input_ids)]
    text = ""
    for start, end in zip(bounds, bounds[1:], strict=False):
        piece = str(tokenizer.decode(document.input_ids[start:end].tolist()))
        text += f">>>{piece}<<<" if document.supervised[start] else piece
    return text


@dataclass(frozen=True)
class _Job:
    config: Config
    tokenizer: PreTrainedTokenizerBase
    collate: Collate
    share: Share
    source: DatasetSource
    split: str
    validation: str | None
    """The split to evaluate on; None where a share of the training problems is held out."""

    @property
    def document_multiple(self) -> int:
        return document_multiple(self.config.parallel.context_parallel_size)

    def options(self, columns: Sequence[str]) -> TokeniseOptions:
        data = self.config.data
        form = detect_columns(columns, data.column_names)
        return TokeniseOptions(form, data.max_seq_length, data.overlong, data.train_on_prompt)

    def plan(self, lengths: IndexArray, chosen: IndexArray) -> PackingPlan:
        """The sequences of the `chosen` documents; `lengths` are those of all, in tokens."""
        if not self.config.packing:
            return PackingPlan(chosen, np.arange(len(chosen) + 1))
        packed = pack(lengths[chosen], self.config.data.max_seq_length, self.document_multiple)
        return PackingPlan(chosen[packed.samples], packed.offsets)

    def nothing_to_train_on(self, why: str) -> UserError:
        name = self.config.data.dataset_name
        return UserError(f"--dataset_name {name}: no row of split {self.split} can be trained on: {why}.")

    def identify(self, *parts: Any) -> str:
        """Hash of what decides which sequences there are and in which order they come."""
        content = [*parts, self.config.packing, self.config.optim.seed]
        if self.config.parallel.context_parallel_size > 1:
            content.append(self.document_multiple)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def finish(
        self,
        train: MapSequences | StreamSequences,
        evaluation: Sequence[Reader],
        report: DataReport,
        example: Document,
        form: ColumnForm,
        eval_from: str,
        problems: Sequence[Problem] = (),
    ) -> PreparedData:
        data, kind = self.config.data, "packed" if self.config.packing else "padded"
        description = (
            f"data: {data.dataset_name}, split {self.split}, evaluated on {eval_from}, {kind} sequences of "
            f"{data.max_seq_length} tokens\n"
            f"  prompt form: {describe_prompt_form(form, self.tokenizer)}"
        )
        num_micro_batches = self.config.optim.gradient_accumulation_steps
        train_loader = TrainLoader(train, self.collate, data.batch_size, num_micro_batches, self.share)
        eval_loader = None
        if evaluation:
            limit = self.config.run.eval_batches
            eval_loader = EvalLoader(evaluation, self.collate, data.batch_size, self.share, limit)
        sample = mark_supervised(example, self.tokenizer)
        return PreparedData(train_loader, eval_loader, report, description, sample, tuple(problems))


def _prepare_map(job: _Job) -> PreparedData:
    data = job.config.data
    dataset = load_split(job.source, job.split)
    if data.num_of_samples is not None:
        dataset = dataset.select(range(min(data.num_of_samples, len(dataset))))
    eval_source = dataset if job.validation is None else load_split(job.source, job.validation)
    num_problems = job.config.run.eval_exact_match
    if num_problems:
        check_answer_column(eval_source.column_names)
    rows, figures = _tokenise(job, job.split, dataset)
    used, held_out = figures["length"] > 0, np.zeros(len(rows), dtype=bool)
    report = DataReport(max_seq_length=data.max_seq_length)
    if job.validation is None:
        held_out[used] = held_out_mask(figures["problem_key"][used], data.validation_fraction)
        eval_set, eval_rows, eval_figures = np.flatnonzero(held_out), rows, figures
        eval_from = f"{len(eval_set) / used.sum():.2%} of it" if len(eval_set) else "nothing"
    else:
        eval_rows, eval_figures = _tokenise(job, job.validation, eval_source)
        eval_used = eval_figures["length"] > 0
        seen = eval_used & np.isin(eval_figures["problem_key"], figures["problem_key"][used])
        eval_set, eval_from = np.flatnonzero(eval_used & ~seen), f"split {job.validation}"
        report.num_eval_rows_seen_in_training = int(seen.sum())
        if len(eval_set) == 0:
            raise UserError(
                f"--validation_split_name {job.validation}: none of its {len(eval_source)} rows can be evaluated on: "
                f"{seen.sum()} hold a problem that split {job.split} trains on, the others are empty or too long."
            )
    report.count(figures, held_out)
    report.num_eval_rows = len(eval_set)
    train_set = np.flatnonzero(used & ~held_out)
    if len(train_set) == 0:
        raise job.nothing_to_train_on(report.summary())
    problems: list[Problem] = []
    if num_problems and len(eval_set):
        problems = choose_problems(eval_source, eval_set, eval_figures["problem_key"][eval_set], num_problems)
        if not problems:
            raise UserError(
                f"--eval_exact_match {num_problems}: none of the {len(eval_set)} held-out rows has an {ANSWER_COLUMN}; "
                "fill the column, or drop it."
            )
    read, plan = document_reader(rows), job.plan(figures["length"], train_set)
    report.num_rows_of_batches = len(plan)
    identity = job.identify(content_key(figures["document_key"][train_set]))
    sequences = MapSequences(plan, read, job.config.optim.seed, identity)
    eval_readers = sequence_readers(job.plan(eval_figures["length"], eval_set), document_reader(eval_rows))
    form, (example,) = job.options(dataset.column_names).form, read(train_set[:1].tolist())
    return job.finish(sequences, eval_readers, report, example, form, eval_from, problems)


def _tokenise(job: _Job, split: str, dataset: Dataset) -> tuple[Dataset, Figures]:
    """The tokenised rows of `dataset`, and the columns of them that are counted."""
    data, options = job.config.data, job.options(dataset.column_names)
    try:
        rows = tokenise(dataset, job.tokenizer, options, data.data_cache_dir, data.preprocessing_workers)
    except UnicodeDecodeError as error:  # Arrow takes any bytes for a string; they are decoded only here
        raise unreadable(job.source, split, error) from error
    table = arrow_table(rows)
    return rows, {name: table.column(name).to_numpy().astype(np.int64) for name in FIGURES}


def _prepare_stream(job: _Job) -> PreparedData:
    data, validation = job.config.data, job.validation

    def open_stream() -> IterableDataset:
        opened = open_split_stream(job.source, job.split)
        return opened if data.num_of_samples is None else opened.take(data.num_of_samples)

    stream = open_stream()
    options = job.options(_stream_columns(job, job.split, stream))
    share = DEFAULT_FRACTION if data.validation_fraction is None else data.validation_fraction
    fraction = share if validation is None else 0.0
    make = partial(_tokenise_streamed, tokenizer=job.tokenizer, options=options, fraction=fraction)

    held_out: list[Document] = []
    example = None
    for streamed in _scan(iterate(job.source, job.split, stream), make):
        held_out += streamed.held_out
        example = example or next(iter(streamed.train), None)
        if example and (fraction == 0.0 or len(held_out) >= STREAMED_EVAL_ROWS):
            break
    if example is None:
        raise job.nothing_to_train_on(
            f"all that were read are empty, longer than {data.max_seq_length} tokens or held out"
        )
    held_out = held_out[:STREAMED_EVAL_ROWS]
    eval_from = f"the first {len(held_out)} rows of {fraction:.2%} of its problems" if held_out else "nothing"
    if validation is not None:
        other = open_split_stream(job.source, validation)
        make_eval = partial(make, options=job.options(_stream_columns(job, validation, other)))
        scanned = _scan(iterate(job.source, validation, other), make_eval)
        held_out = list(islice((document for each in scanned for document in each.train), STREAMED_EVAL_ROWS))
        eval_from = f"the first {len(held_out)} rows of split {validation}"

    report = DataReport(max_seq_length=data.max_seq_length, num_eval_rows=len(held_out))
    identity = job.identify(
        data.dataset_name, job.split, data.num_of_samples, cache_key("", job.tokenizer, options), fraction
    )
    sequences = StreamSequences(
        open_stream,
        partial(iterate, job.source, job.split),
        make,
        data.max_seq_length if job.config.packing else None,
        job.config.optim.seed,
        identity,
        report,
        job.document_multiple,
    )
    lengths = np.array([len(document.input_ids) for document in held_out], dtype=np.int64)
    eval_plan = job.plan(lengths, np.arange(len(held_out)))
    eval_readers = sequence_readers(eval_plan, lambda indices: [held_out[i] for i in indices])
    return job.finish(sequences, eval_readers, report, example, options.form, eval_from)


def _stream_columns(job: _Job, split: str, stream: IterableDataset) -> list[str]:
    """Column names of a stream, where unknown those of its first row."""
    return list(next(iterate(job.source, split, stream), {}))


def _tokenise_streamed(
    rows: Sequence[dict[str, Any]],
    row_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    options: TokeniseOptions,
    fraction: float,
) -> StreamedRows:
    """What becomes of `rows` of a stream: the same as in a dataset that is not streamed."""
    columns = tokenise_rows(rows, row_ids, tokenizer, options)
    figures = {name: np.array(columns[name], dtype=np.int64) for name in FIGURES}
    documents = list(map(Document.of, columns["input_ids"], columns["supervised"], row_ids))
    used, held_out = figures["length"] > 0, is_held_out(figures["problem_key"], fraction)
    train, evaluation = ([documents[i] for i in np.flatnonzero(used & mask)] for mask in (~held_out, held_out))
    return StreamedRows(train, evaluation, figures, held_out)


def _scan(
    rows: Iterator[dict[str, Any]], make: Callable[[Sequence[dict[str, Any]], Sequence[int]], StreamedRows]
) -> Iterator[StreamedRows]:
    """Tokenised rows, chunk by chunk from the beginning of a stream."""
    for first in range(0, STREAMED_EVAL_SCAN_ROWS, STREAMED_EVAL_ROWS):
        chunk = list(islice(rows, STREAMED_EVAL_ROWS))
        if not chunk:
            return
        yield make(chunk, range(first, first + len(chunk)))
