"""From a configuration and a tokenizer to the loaders of a run: `prepare_data`.

load (load.py) -> documents, cached (rows.py, chat.py, tokenise.py) -> held-out share (split.py)
-> sequences (pack.py) -> global batches, micro-batches (sequences.py, loader.py, collate.py)

Several datasets (--dataset_name a,b) are each tokenised by their own columns and mixed: whole, or with
--dataset_weights in shares, of which prepared data gives the first rows and a stream draws.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from transformers import PreTrainedTokenizerBase

from llm_fp8.config.options import Config
from llm_fp8.data.chat import trained_eos
from llm_fp8.data.collate import Batch, Collate, Layout, document_multiple
from llm_fp8.data.load import SourceSplit, beginning_of, find_splits, load_split, reading_of
from llm_fp8.data.loader import EvalLoader, Share, TrainLoader
from llm_fp8.data.pack import PackingPlan, pack
from llm_fp8.data.rows import detect_columns
from llm_fp8.data.sequences import MapSequences, Sequences, StreamSequences, sequence_readers
from llm_fp8.data.split import DEFAULT_FRACTION, held_out_mask, is_held_out
from llm_fp8.data.tokenise import (
    DataReport,
    Document,
    TokeniseOptions,
    cache_key,
    content_key,
    document_reader,
    figures_of,
    next_rows,
    tokenise,
)
from llm_fp8.utils.errors import UserError

STREAMED_EVAL_ROWS, STREAMED_EVAL_SCAN_ROWS, STREAMED_SCAN_ROWS = 512, 200_000, 1000
"""Rows to evaluate on from a stream: the first of the validation split, or the first that are held out of so many at
most, which are read so many at a time, as `datasets` tokenises them.
"""
SEEN, UNUSABLE = "their problem is trained on", "they are empty or too long"


@dataclass(frozen=True)
class PreparedData:
    """The loaders of a run and a description of its data."""

    train: TrainLoader
    eval: EvalLoader | None
    """None where no row is held out."""
    report: DataReport
    description: str
    """Lines to print: origin, counts and one sample, its supervised part between >>> and <<<."""
    eos_ids: tuple[int, ...]
    """The ids with which the documents trained on end, those of `trained_eos` first."""


def prepare_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
    main_process_first: Callable[[], AbstractContextManager[Any]] = nullcontext,
    split_batch: Callable[[Batch], Batch] | None = None,
    asked_batch_size: int | None = None,
) -> PreparedData:
    """Load, tokenise, split and plan the data of a run. `UserError` on a dataset that cannot be found, read or used.

    `rank` and `world_size` count context groups (--context_parallel_size), whose ranks get the same sequences;
    `split_batch` takes a rank's slice of a batch. `asked_batch_size`, by default that of `config`, is what
    --eval_batches counts, so that merged micro-batches change nothing in it. Within `main_process_first` (such as
    `accelerator.local_main_process_first`) the other processes wait for the main one and find its result in the cache.
    """
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(i, int)), 0)
    context_size = config.parallel.context_parallel_size
    layout = Layout(config.data.batch_size, config.data.max_seq_length, pad, config.packing, context_size)

    def collate(sequences: Sequence[Sequence[Document]]) -> Batch:
        batch = layout(sequences)
        if split_batch is not None:
            batch = split_batch(batch)
        return batch.pin_memory() if pin_memory else batch

    with main_process_first():
        eval_batch_size = asked_batch_size or config.data.batch_size
        job = _Job(config, tokenizer, layout, collate, Share(rank, world_size), eval_batch_size)
        return _prepare_stream(job) if config.data.streaming else _prepare_map(job)


@dataclass
class _Job:
    """What is asked for: the datasets' splits, their shares in what is trained on, and how batches are made."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    collate: Collate
    share: Share
    eval_batch_size: int
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        config = self.config
        self.multiple = document_multiple(config.parallel.context_parallel_size)
        self.train, self.evaluation = find_splits(config.data)
        weights, number = config.data.weights, len(self.train)
        if weights is not None and (len(weights) != number or number == 1):
            given = f"{len(weights)} numbers for the {number} datasets"
            raise UserError(f"--dataset_weights has {given} of --dataset_name; give several, and a weight for each.")
        self.shares = None if weights is None else [weight / sum(weights) for weight in weights]

    def options(self, parts: Sequence[SourceSplit], datasets: Sequence[Any]) -> list[tuple[list[str], TokeniseOptions]]:
        """The columns of each dataset and how its rows are tokenised; --columns may be meant for one of them."""
        data, kwargs, options = self.config.data, self.config.data.template_kwargs, []
        begun = [beginning_of(*part, dataset) for part, dataset in zip(parts, datasets, strict=True)]
        there = [name for names, _ in begun for name in names]
        for ours, theirs in data.column_names.items():
            if parts == self.train and theirs not in there:
                raise UserError(f"--columns {ours}={theirs}: there is no such column among {', '.join(there)}.")
        for (source, _), (names, row) in zip(parts, begun, strict=True):
            renames = {ours: theirs for ours, theirs in data.column_names.items() if theirs in names}
            ours_of = {theirs: ours for ours, theirs in renames.items()}
            first = {ours_of.get(name, name): row.get(name) for name in names if name not in {*renames} - {*ours_of}}
            form = detect_columns(list(first), list(renames), f"{source.flag} {source.name}", first)
            how = TokeniseOptions(form, data.max_seq_length, data.overlong, data.train_on_prompt, renames, kwargs)
            options.append((names, how))
        if parts == self.train:
            self.eos_ids = tuple(dict.fromkeys(trained_eos(self.tokenizer, each.form) for _, each in options))
        return options

    def plan(self, lengths: Any, chosen: Any) -> PackingPlan:
        """The sequences of the documents of the `chosen` numbers; `lengths` are those of all, in tokens."""
        if not self.config.packing:
            return PackingPlan(chosen, np.arange(len(chosen) + 1))
        packed = pack(lengths[chosen], self.config.data.max_seq_length, self.multiple)
        return PackingPlan(chosen[packed.samples], packed.offsets)

    def nothing_held_out(self, report: DataReport, why: str) -> None:
        """Say why there is nothing to evaluate on: `UserError` where a share was asked for."""
        report.nothing_held_out = f"{why}; give --eval_dataset_name or --validation_fraction 0"
        if self.config.data.validation_fraction is not None:
            raise UserError(f"--validation_fraction: no row can be held out: {report.nothing_held_out}.")

    def num_positions(self, lengths: Any, order: Any) -> int:
        """Positions, padding included, of the batches of an epoch; `lengths` are those of its documents, in tokens."""
        begins = np.arange(0, len(order), self.layout.batch_size)
        return int(self.layout.width(np.maximum.reduceat(lengths[order], begins)).sum()) * self.layout.batch_size

    def identify(self, *parts: Any) -> str:
        """Hash of what decides which sequences there are and in which order they come."""
        content = [*parts, self.config.packing, self.config.optim.seed, self.multiple]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def prepared(
        self,
        train: Sequences,
        evaluation: Dataset,
        report: DataReport,
        example: Document,
        taken: Sequence[str],
    ) -> PreparedData:
        """The loaders of sequences to train on and of tokenised rows to evaluate on; `taken` says how much of each
        dataset is trained on.
        """
        config, size = self.config, self.config.data.batch_size
        report.num_eval_rows = len(evaluation)
        if not len(evaluation) and (config.run.eval_every or config.run.eval_batches):
            why = report.nothing_held_out or "raise --validation_fraction"
            raise UserError(f"--eval_every and --eval_batches need rows that are held out: {why}.")
        sources = (source for source, _ in (*self.train, *self.evaluation))
        report.unused |= {f"file '{name}'": 1 for source in sources for name in source.left_out}
        sample, pairs = "", zip(example.input_ids, example.supervised, strict=True)
        for supervised, run in groupby(pairs, key=itemgetter(1)):
            piece = str(self.tokenizer.decode([int(token) for token, _ in run]))
            sample += f">>>{piece}<<<" if supervised else piece
        kind = "packed" if config.packing else "padded"
        evaluated = ", ".join(f"split {split} of {source.name}" for source, split in self.evaluation)
        lines = [
            f"data: {config.data.dataset_name}, {kind} sequences of {config.data.max_seq_length} tokens",
            *(f"  {source.name}, split {split}: {n}" for (source, split), n in zip(self.train, taken, strict=True)),
            f"  evaluated on {evaluated or 'rows held out'}",
            *report.describe(),
            "  a sample, >>>supervised<<<:",
            textwrap.indent(sample, "    "),
        ]
        loader = TrainLoader(train, self.collate, size, config.optim.gradient_accumulation_steps, self.share)
        evals = None
        if len(evaluation):
            figures = figures_of(evaluation)
            plan = self.plan(figures["length"], np.arange(len(evaluation)))
            sequences, key = sequence_readers(plan, document_reader(evaluation)), content_key(figures["document_key"])
            limit = None if config.run.eval_batches is None else config.run.eval_batches * self.eval_batch_size
            evals = EvalLoader(sequences, key, self.collate, size, self.share, limit)
        # A template may refuse what `trained_eos` asks it, and a call may end in another way than an answer.
        taught = [end for end in self.eos_ids if end in report.ends or end != self.tokenizer.eos_token_id]
        ends = tuple(dict.fromkeys([*taught, *(end for end, _ in report.ends.most_common())]))
        return PreparedData(loader, evals, report, "\n".join(lines), ends or self.eos_ids)


def _nothing(parts: Sequence[SourceSplit], what: str, why: str) -> UserError:
    names = ", ".join(source.name for source, _ in parts)
    splits = ", ".join(dict.fromkeys(split for _, split in parts))
    return UserError(f"{parts[0][0].flag} {names}: no row of split {splits} can be {what}: {why}.")


def _prepare_map(job: _Job) -> PreparedData:
    data = job.config.data
    datasets = whole = [load_split(*part, num_rows=data.num_of_samples) for part in job.train]
    if job.shares is not None:
        # No row comes twice in an epoch: it ends with the dataset that is used up first, as that of a stream does.
        total = min(len(dataset) / share for dataset, share in zip(whole, job.shares, strict=True))
        numbers = [max(1, round(total * share)) for share in job.shares]
        datasets = [part.take(number) for part, number in zip(whole, numbers, strict=True)]
    rows = _tokenise(job, job.train, datasets)
    figures = figures_of(rows)
    report, used = DataReport(data.max_seq_length), figures["length"] > 0
    held_out = np.zeros_like(used)
    if job.evaluation:
        eval_rows = _tokenise(job, job.evaluation, [load_split(*part) for part in job.evaluation])
        eval_figures = figures_of(eval_rows)
        eval_used = eval_figures["length"] > 0
        report.count_unused(eval_rows)
        seen = eval_used & np.isin(eval_figures["problem_key"], figures["problem_key"][used])
        evaluation = eval_rows.select(np.flatnonzero(eval_used & ~seen))
        report.eval_rows_left_out = {SEEN: int(seen.sum()), UNUSABLE: int((~eval_used).sum())}
        if len(evaluation) == 0:
            why = f"{seen.sum()} of {len(seen)} hold a problem that is trained on, others are empty or too long"
            raise _nothing(job.evaluation, "evaluated on", why)
    else:
        keys = figures["problem_key"][used]
        held_out[used] = held_out_mask(keys, data.validation_fraction)
        evaluation = rows.select(np.flatnonzero(held_out))
        if len(keys) and not len(evaluation) and data.validation_fraction != 0:
            job.nothing_held_out(report, f"all {len(keys)} usable rows ask the same")
    report.count(rows, figures, held_out)
    train_set = np.flatnonzero(used & ~held_out)
    if len(train_set) == 0:
        raise _nothing(job.train, "trained on", f"{report.summary()}; {report.told_unused()}")
    read, plan = document_reader(rows), job.plan(figures["length"], train_set)
    report.num_rows_of_batches = len(plan)
    identity = job.identify(content_key(figures["document_key"][train_set]))
    sequences = MapSequences(plan, read, job.config.optim.seed, identity)
    report.num_positions = job.num_positions(figures["length"][plan.samples], sequences.order(0))
    return job.prepared(
        train=sequences,
        evaluation=evaluation,
        report=report,
        example=read(train_set[:1].tolist())[0],
        taken=[f"{len(part)} of {len(every)} rows" for part, every in zip(datasets, whole, strict=True)],
    )


def _tokenise(job: _Job, parts: Sequence[SourceSplit], datasets: Sequence[Dataset]) -> Dataset:
    """The tokenised rows of `datasets`, one after the other."""
    tokenised = []
    for (source, _), dataset, (names, how) in zip(parts, datasets, job.options(parts, datasets), strict=True):
        with reading_of(source):
            tokenised.append(tokenise(dataset, names, job.tokenizer, how))
    return concatenate_datasets(tokenised)


def _prepare_stream(job: _Job) -> PreparedData:
    data, seed = job.config.data, job.config.optim.seed
    if len(job.train) > 1 and job.shares is None:
        raise UserError("--streaming reads the datasets of --dataset_name side by side: add --dataset_weights.")
    sources = [source for source, _ in job.train]
    open_stream, options = _tokenised_stream(job, job.train, job.shares, data.num_of_samples)
    given = 0.0 if job.evaluation else data.validation_fraction
    fraction = DEFAULT_FRACTION if given is None else given
    examples, evaluation, report = list[Document](), list[Dataset](), DataReport(data.max_seq_length)
    with reading_of(*sources):
        stream = iter(open_stream())
        while report.num_rows_read < STREAMED_EVAL_SCAN_ROWS and len(rows := next_rows(stream, STREAMED_SCAN_ROWS)):
            figures = figures_of(rows)
            used, held_out = figures["length"] > 0, is_held_out(figures["problem_key"], fraction)
            report.count(rows, figures, held_out)
            examples += document_reader(rows)(np.flatnonzero(used & ~held_out)[:1].tolist())
            evaluation.append(rows.select(np.flatnonzero(used & held_out)))
            if examples and (fraction == 0 or report.num_rows_held_out >= STREAMED_EVAL_ROWS):
                break
    if not examples:
        raise _nothing(job.train, "trained on", f"{report.summary()}; {report.told_unused()}")
    if fraction and not report.num_rows_held_out:
        job.nothing_held_out(report, f"none of the first {report.num_rows_read} rows falls into the share")
    number = len(job.evaluation)  # each gives its part
    for part in job.evaluation:
        open_evaluation, _ = _tokenised_stream(job, [part], None, STREAMED_EVAL_ROWS // number)
        with reading_of(part[0]):
            rows = next_rows(iter(open_evaluation()), STREAMED_EVAL_ROWS // number)
        report.count_unused(rows)
        usable = np.flatnonzero(figures_of(rows)["length"])
        report.eval_rows_left_out[UNUSABLE] = report.eval_rows_left_out.get(UNUSABLE, 0) + len(rows) - len(usable)
        evaluation.append(rows.select(usable))
    if job.evaluation and not any(map(len, evaluation)):
        raise _nothing(job.evaluation, "evaluated on", "the first are all empty or too long")
    keys = [cache_key("", job.tokenizer, each) for each in options]
    splits = [[source.path, source.config, split] for source, split in job.train]
    identity = job.identify(splits, job.shares, keys, data.num_of_samples, fraction)
    return job.prepared(
        train=StreamSequences(sources, open_stream, fraction, job.plan, seed, identity, report),
        evaluation=concatenate_datasets(evaluation).take(STREAMED_EVAL_ROWS),
        report=report,
        example=examples[0],
        taken=[f"{share:.2%} of the rows" for share in job.shares or [1.0]],
    )


def _tokenised_stream(
    job: _Job, parts: Sequence[SourceSplit], shares: list[float] | None, num_rows: int | None
) -> tuple[Callable[[], IterableDataset], list[TokeniseOptions]]:
    """Opens the tokenised first `num_rows` of each split, drawn by `shares`; and how each split is tokenised."""
    options = job.options(parts, [load_split(*part, streaming=True) for part in parts])

    def open_stream() -> IterableDataset:
        streams = []
        for part, (names, how) in zip(parts, options, strict=True):
            stream = load_split(*part, streaming=True, num_rows=num_rows)
            streams.append(tokenise(stream, names, job.tokenizer, how))
        return interleave_datasets(streams, shares, job.config.optim.seed) if shares else streams[0]

    return open_stream, [how for _, how in options]
