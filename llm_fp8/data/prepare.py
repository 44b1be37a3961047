"""From a configuration and a tokenizer to the loaders of a run: `prepare_data`.

load (load.py) -> documents, cached (prompt.py, tokenise.py) -> held-out share (split.py) -> sequences (pack.py)
-> global batches, micro-batches (sequences.py, loader.py, collate.py)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from llm_fp8.config.options import Config
from llm_fp8.data.collate import Batch, Collate, PackedCollate, PaddedCollate, document_multiple
from llm_fp8.data.load import (
    DatasetSource,
    SourceSplit,
    find_splits,
    iterate,
    load_split,
    no_row,
    open_split_stream,
    unreadable,
)
from llm_fp8.data.loader import EvalLoader, Share, TrainLoader
from llm_fp8.data.mix import MixedRow, interleave_streams, iterate_mixed, shares_of, take_shares
from llm_fp8.data.pack import PackingPlan, pack
from llm_fp8.data.prompt import ANSWER_COLUMN, COLUMNS, ColumnForm, describe_prompt_form, detect_columns
from llm_fp8.data.sequences import MapSequences, Reader, StreamedRows, StreamSequences, sequence_readers
from llm_fp8.data.split import (
    DEFAULT_FRACTION,
    Problem,
    check_answer_column,
    choose_problems,
    held_out_mask,
    is_held_out,
)
from llm_fp8.data.tokenise import (
    FEATURES,
    FIGURES,
    NOTHING_TO_LEARN,
    DataReport,
    Document,
    Figures,
    TokeniseOptions,
    arrow_table,
    cache_key,
    content_key,
    document_key,
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
    of_a_stream: bool = False,
) -> PreparedData:
    """Load, tokenise, split and plan the data of a run. `UserError` on a dataset that cannot be found, read or used.

    `rank` and `world_size` count context groups (--context_parallel_size), whose ranks get the same sequences;
    `split_batch` takes a rank's slice of a batch. Within `main_process_first` (such as
    `accelerator.local_main_process_first`) the other processes wait for the main one and find its result in the cache.
    `of_a_stream`: hold out what a run with --streaming held out, from data that is prepared.
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
        train, evaluation = find_splits(config.data)
        shares = shares_of(config.data.weights, train)
        job = _Job(config, tokenizer, collate, Share(rank, world_size), train, evaluation, shares, of_a_stream)
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
    train: list[SourceSplit]
    evaluation: list[SourceSplit]
    """What to evaluate on; empty where a share of the training problems is held out."""
    shares: list[float] | None
    """Of the datasets in what is trained on; None where each is taken whole."""
    of_a_stream: bool = False

    @property
    def streamed_fraction(self) -> float:
        """The share of the problems that is held out of a stream."""
        fraction = self.config.data.validation_fraction
        return 0.0 if self.evaluation else DEFAULT_FRACTION if fraction is None else fraction

    @property
    def split(self) -> str:
        """For the user: what is trained on."""
        return _describe(self.train, self.config.data.dataset_name)

    @property
    def validation(self) -> str:
        """For the user: what is evaluated on."""
        return _describe(self.evaluation, self.config.data.dataset_name)

    @property
    def document_multiple(self) -> int:
        return document_multiple(self.config.parallel.context_parallel_size)

    def options(self, source: DatasetSource, columns: Sequence[str]) -> TokeniseOptions:
        data = self.config.data
        mapped = [name for name in data.column_names if name in columns]  # one of several datasets may lack some
        form = detect_columns(columns, mapped, f"{source.flag} {source.name}")
        return TokeniseOptions(form, data.max_seq_length, data.overlong, data.train_on_prompt)

    def check_mapping(self, columns: Sequence[Sequence[str]]) -> None:
        """Raise `UserError` where --columns names what no dataset has; `columns` are theirs, under our names."""
        for ours, theirs in self.config.data.column_names.items():
            if not any(ours in names for names in columns):
                raise UserError(
                    f"--columns {ours}={theirs}: none of the datasets of --dataset_name has a column '{theirs}'; "
                    "correct the name, or drop it."
                )

    def plan(self, lengths: IndexArray, chosen: IndexArray) -> PackingPlan:
        """The sequences of the `chosen` documents; `lengths` are those of all, in tokens."""
        if not self.config.packing:
            return PackingPlan(chosen, np.arange(len(chosen) + 1))
        packed = pack(lengths[chosen], self.config.data.max_seq_length, self.document_multiple)
        return PackingPlan(chosen[packed.samples], packed.offsets)

    def nothing_to_train_on(self, why: str) -> UserError:
        name = self.config.data.dataset_name
        return UserError(f"--dataset_name {name}: no row of {self.split} can be trained on: {why}.")

    def nothing_to_evaluate_on(self, num_rows: int | str, why: str) -> UserError:
        name = self.config.data.eval_dataset_name
        asked = f"--validation_split_name {self.evaluation[0][1]}" if name is None else f"--eval_dataset_name {name}"
        return UserError(f"{asked}: none of its {num_rows} rows can be evaluated on: {why}.")

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
        eval_data: str,
        report: DataReport,
        example: Document,
        forms: Sequence[ColumnForm],
        eval_from: str,
        problems: Sequence[Problem] = (),
        taken: Sequence[str] = (),
    ) -> PreparedData:
        data, kind = self.config.data, "packed" if self.config.packing else "padded"
        description = (
            f"data: {data.dataset_name}, {self.split}, evaluated on {eval_from}, {kind} sequences of "
            f"{data.max_seq_length} tokens\n"
            f"  prompt form: {'; '.join(dict.fromkeys(describe_prompt_form(form, self.tokenizer) for form in forms))}"
        )
        if len(self.train) > 1:
            notes = taken or [f"{share:.2%} of the rows" for share in self.shares or ()]
            for (source, split), note in zip(self.train, notes, strict=True):
                description += f"\n  {source.name}, split {split}: {note}"
        num_micro_batches = self.config.optim.gradient_accumulation_steps
        train_loader = TrainLoader(train, self.collate, data.batch_size, num_micro_batches, self.share)
        eval_loader = None
        if evaluation:
            limit = self.config.run.eval_batches
            eval_loader = EvalLoader(evaluation, self.collate, data.batch_size, self.share, limit, eval_data)
        sample = mark_supervised(example, self.tokenizer)
        return PreparedData(train_loader, eval_loader, report, description, sample, tuple(problems))


def _describe(parts: Sequence[SourceSplit], dataset_name: str) -> str:
    """The splits, with their dataset's name where that is not all of --dataset_name."""
    return " + ".join(f"split {split}" + (f" of {s.name}" if s.name != dataset_name else "") for s, split in parts)


def _prepare_map(job: _Job) -> PreparedData:
    data = job.config.data
    datasets = [load_split(source, split) for source, split in job.train]
    if data.num_of_samples is not None:
        datasets = [dataset.select(range(min(data.num_of_samples, len(dataset)))) for dataset in datasets]
    whole = datasets
    if job.shares is not None:
        datasets = take_shares(datasets, job.shares)
    eval_datasets = [load_split(source, split) for source, split in job.evaluation] or datasets
    job.check_mapping([each.column_names for each in datasets])
    num_problems = 0  # nothing asks for problems any more
    if num_problems:
        if len(eval_datasets) > 1:
            raise UserError(
                f"--eval_exact_match {num_problems} looks problems up in one dataset, and evaluation is on "
                f"{len(eval_datasets)}; name one with --eval_dataset_name."
            )
        check_answer_column(eval_datasets[0].column_names)
    rows, figures = _tokenise(job, job.train, datasets)
    used, held_out = figures["length"] > 0, np.zeros(len(rows), dtype=bool)
    report = DataReport(max_seq_length=data.max_seq_length)
    if not job.evaluation:
        keys = figures["problem_key"][used]
        if job.of_a_stream:
            held_out[used] = is_held_out(keys, job.streamed_fraction)
        else:
            held_out[used] = held_out_mask(keys, data.validation_fraction)
        eval_set, eval_rows, eval_figures = np.flatnonzero(held_out), rows, figures
        eval_from = f"{len(eval_set) / used.sum():.2%} of it" if len(eval_set) else "nothing"
    else:
        eval_rows, eval_figures = _tokenise(job, job.evaluation, eval_datasets)
        eval_used = eval_figures["length"] > 0
        seen = eval_used & np.isin(eval_figures["problem_key"], figures["problem_key"][used])
        eval_set, eval_from = np.flatnonzero(eval_used & ~seen), job.validation
        report.num_eval_rows_seen_in_training = int(seen.sum())
        if len(eval_set) == 0:
            why = f"{seen.sum()} hold a problem that {job.split} trains on, the others are empty or too long"
            raise job.nothing_to_evaluate_on(len(eval_rows), why)
    report.count(figures, held_out)
    report.num_eval_rows = len(eval_set)
    train_set = np.flatnonzero(used & ~held_out)
    if len(train_set) == 0:
        raise job.nothing_to_train_on(
            report.summary() + (f"; empty rows have {NOTHING_TO_LEARN}" if report.num_empty else "")
        )
    problems: list[Problem] = []
    if num_problems and len(eval_set):
        problems = choose_problems(eval_datasets[0], eval_set, eval_figures["problem_key"][eval_set], num_problems)
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
    forms = [job.options(part[0], each.column_names).form for part, each in zip(job.train, datasets, strict=True)]
    (example,) = read(train_set[:1].tolist())
    taken = [f"{len(part)} of {len(all_of_it)} rows" for part, all_of_it in zip(datasets, whole, strict=True)]
    eval_data = content_key(eval_figures["document_key"][eval_set])
    return job.finish(sequences, eval_readers, eval_data, report, example, forms, eval_from, problems, taken)


@contextmanager
def _naming(source: DatasetSource) -> Iterator[None]:
    """An error about a row says which dataset's it is: `llm_fp8.data.prompt` does not know."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--dataset_name:", f"{source.flag} {source.name}:", 1)) from error


def _tokenise(job: _Job, parts: Sequence[SourceSplit], datasets: Sequence[Dataset]) -> tuple[Dataset, Figures]:
    """The tokenised rows of `datasets`, one after the other, and the columns of them that are counted."""
    data, tokenised = job.config.data, []
    for part, dataset in zip(parts, datasets, strict=True):
        options = job.options(part[0], dataset.column_names)
        try:
            with _naming(part[0]):
                rows = tokenise(dataset, job.tokenizer, options, None, data.preprocessing_workers)
        except UnicodeDecodeError as error:  # Arrow takes any bytes for a string; they are decoded only here
            raise unreadable([part], error) from error
        tokenised.append(rows)
    rows = concatenate_datasets(tokenised) if len(tokenised) > 1 else tokenised[0]
    table = arrow_table(rows)
    return rows, {name: table.column(name).to_numpy().astype(np.int64) for name in FIGURES}


def _prepare_stream(job: _Job) -> PreparedData:
    data, shares, seed = job.config.data, job.shares, job.config.optim.seed
    if len(job.train) > 1 and shares is None:
        raise UserError(
            f"--streaming reads the datasets of --dataset_name {data.dataset_name} side by side and needs to know how "
            "much of each; add --dataset_weights."
        )

    def open_part(source: DatasetSource, split: str) -> IterableDataset:
        opened = open_split_stream(source, split)
        return opened if data.num_of_samples is None else opened.take(data.num_of_samples)

    def open_stream() -> IterableDataset:
        streams = [open_part(*part) for part in job.train]
        return interleave_streams(job.train, streams, shares, seed) if shares is not None else streams[0]

    def read(stream: IterableDataset) -> Iterator[MixedRow]:
        return iterate_mixed(job.train, stream) if shares is not None else _numbered(0, iterate(*job.train[0], stream))

    columns = list(map(_stream_columns, job.train))
    job.check_mapping(columns)
    options = [job.options(part[0], names) for part, names in zip(job.train, columns, strict=True)]
    fraction = job.streamed_fraction
    sources = [source for source, _ in job.train]
    make = partial(_tokenise_streamed, tokenizer=job.tokenizer, sources=sources, options=options, fraction=fraction)

    held_out: list[Document] = []
    example = None
    for streamed in _scan(read(open_stream()), make):
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
    if job.evaluation:
        make_eval = partial(
            make,
            sources=[source for source, _ in job.evaluation],
            options=[job.options(part[0], _stream_columns(part)) for part in job.evaluation],
        )
        held_out = []
        for number, part in enumerate(job.evaluation):
            rows = _numbered(number, iterate(*part, open_split_stream(*part)))
            firsts = islice(rows, STREAMED_EVAL_SCAN_ROWS // len(job.evaluation))
            used = (document for chunk in _scan(firsts, make_eval) for document in chunk.train)
            held_out += islice(used, STREAMED_EVAL_ROWS // len(job.evaluation))
        if not held_out:
            raise job.nothing_to_evaluate_on(f"first {STREAMED_EVAL_SCAN_ROWS}", "all are empty or too long")
        eval_from = f"the first {len(held_out)} rows of {job.validation}"

    report = DataReport(max_seq_length=data.max_seq_length, num_eval_rows=len(held_out))
    keys = [cache_key("", job.tokenizer, each) for each in options]
    mix = [
        [source.config for source, _ in job.train],
        data.columns,
        shares,
        *keys[1:],
        *(split for _, split in job.train[1:]),
    ]
    identity = job.identify(
        data.dataset_name,
        job.train[0][1],
        data.num_of_samples,
        keys[0],
        fraction,
        *(mix if any(part is not None for part in mix) else []),
    )
    sequences = StreamSequences(
        open_stream,
        read,
        make,
        data.max_seq_length if job.config.packing else None,
        seed,
        identity,
        report,
        job.document_multiple,
    )
    lengths = np.array([len(document.input_ids) for document in held_out], dtype=np.int64)
    eval_plan = job.plan(lengths, np.arange(len(held_out)))
    eval_readers = sequence_readers(eval_plan, lambda indices: [held_out[i] for i in indices])
    eval_keys = [document_key(each.input_ids.tolist(), each.supervised.tolist()) for each in held_out]
    eval_data = content_key(np.array(eval_keys, dtype=np.int64))
    forms = [each.form for each in options]
    return job.finish(sequences, eval_readers, eval_data, report, example, forms, eval_from)


def _stream_columns(part: SourceSplit) -> list[str]:
    """Column names of a stream: those of its first row; `UserError` where it has none."""
    first = next(iterate(*part, open_split_stream(*part)), None)
    if first is None:
        raise no_row(*part)
    return list(first)


def _numbered(number: int, rows: Iterator[dict[str, Any]]) -> Iterator[MixedRow]:
    return ((number, row) for row in rows)


def _tokenise_streamed(
    rows: Sequence[MixedRow],
    row_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[DatasetSource],
    options: Sequence[TokeniseOptions],
    fraction: float,
) -> StreamedRows:
    """What becomes of `rows` of a stream: the same as in a dataset that is not streamed. `sources` and `options` by
    dataset.
    """
    columns: dict[str, list[Any]] = {name: [None] * len(rows) for name in FEATURES}
    for number, (source, of_part) in enumerate(zip(sources, options, strict=True)):
        places = [place for place, (part, _) in enumerate(rows) if part == number]
        needed = COLUMNS[of_part.form]  # of CSV files each has its own header, which a stream does not compare
        if lacking := {name for i in places for name in needed if name not in rows[i][1]}:
            raise UserError(
                f"{source.flag} {source.name}: rows behind the first have no column '{min(lacking)}'; give all files "
                "the same columns."
            )
        with _naming(source):
            made = tokenise_rows([rows[i][1] for i in places], [row_ids[i] for i in places], tokenizer, of_part)
        for name, values in made.items():
            for place, value in zip(places, values, strict=True):
                columns[name][place] = value
    figures = {name: np.array(columns[name], dtype=np.int64) for name in FIGURES}
    documents = list(map(Document.of, columns["input_ids"], columns["supervised"], row_ids))
    used, held_out = figures["length"] > 0, is_held_out(figures["problem_key"], fraction)
    train, evaluation = ([documents[i] for i in np.flatnonzero(used & mask)] for mask in (~held_out, held_out))
    return StreamedRows(train, evaluation, figures, held_out)


def _scan(
    rows: Iterator[MixedRow], make: Callable[[Sequence[MixedRow], Sequence[int]], StreamedRows]
) -> Iterator[StreamedRows]:
    """Tokenised rows, chunk by chunk from the beginning of a stream."""
    for first in range(0, STREAMED_EVAL_SCAN_ROWS, STREAMED_EVAL_ROWS):
        chunk = list(islice(rows, STREAMED_EVAL_ROWS))
        if not chunk:
            return
        yield make(chunk, range(first, first + len(chunk)))
