"""Build a run's data loaders from its configuration and tokenizer (`prepare_data`).

load (load.py) -> documents, cached (rows.py, chat.py, tokenise.py) -> held-out rows (here)
-> sequences (collate.py) -> global batches, micro-batches (loader.py) -> tensors (collate.py)

Rows with the same problem are held out together, as OpenMathInstruct-2 has many answers to a problem. The selection
uses only a 64-bit hash of the problem's normalised text, not the order of the rows, the seed or streaming.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from transformers import PreTrainedTokenizerBase

from llm_fp8.config.options import Config
from llm_fp8.data.chat import trained_eos
from llm_fp8.data.collate import Batch, Layout
from llm_fp8.data.load import DatasetSource, find_splits, first_row, load_split, reading_of
from llm_fp8.data.loader import DataRank, EvalLoader, Sequences, TrainLoader, epochs, stream_buffers
from llm_fp8.data.rows import COLUMNS, OPTIONAL_COLUMNS, UNTEMPLATED, detect_columns
from llm_fp8.data.tokenise import DataReport, RowOptions, content_key, document_reader, figures_of, next_rows, tokenise
from llm_fp8.utils.errors import UserError

DEFAULT_FRACTION, DEFAULT_ROWS = 0.01, 100  # fraction of rows to hold out, and minimum number of them
STREAMED_EVAL_ROWS = 512  # maximum number of evaluation rows when streaming, from a validation split or held out
STREAMED_EVAL_SCAN_ROWS = 200_000  # maximum number of rows that are read to find rows to hold out
STREAMED_SCAN_ROWS = 1000  # rows that are read at a time: the batch size of `datasets` for tokenisation


def is_held_out(key: int | npt.NDArray[np.int64], fraction: float) -> Any:
    """Return True for each `key` (a `problem_key`) that is in the lowest `fraction` (below 1) of 64-bit integers."""
    return key < np.int64(int(fraction * 2**64) - 2**63)


def held_out_mask(keys: npt.NDArray[np.int64], fraction: float | None) -> npt.NDArray[np.bool_]:
    """Return the mask of the rows to hold out, bool [rows]. `keys`, int64 [rows], has each row's `problem_key`.

    A `fraction` above 0 holds out the rows that `is_held_out` selects or, if there are none, the problem with the
    smallest key, unless it is the only one. None holds out the problems with the smallest keys, until they have
    `DEFAULT_FRACTION` of the rows, but at least `DEFAULT_ROWS` or a tenth. Problems with more rows are skipped.
    """
    if fraction == 0 or len(keys) == 0:
        return np.zeros(len(keys), dtype=bool)
    if fraction is None:
        wanted = max(DEFAULT_FRACTION * len(keys), min(DEFAULT_ROWS, len(keys) / 10))
        problems, counts = np.unique(keys, return_counts=True)
        few = counts <= max(counts.min(), wanted)
        enough = int(np.searchsorted(np.cumsum(counts[few]), wanted)) + 1
        return np.isin(keys, problems[few][: min(enough, len(problems) - 1)])
    mask: npt.NDArray[np.bool_] = is_held_out(keys, fraction)
    return mask if mask.any() or keys.min() == keys.max() else keys == keys.min()


@dataclass(frozen=True)
class PreparedData:
    """Data loaders of a run and a description of its data."""

    train: TrainLoader
    eval: EvalLoader | None  # None if no row is held out
    report: DataReport
    description: str  # text to print: origin, counts and one sample with its supervised part between >>> and <<<
    eos_ids: tuple[int, ...]  # distinct ids of the training documents' last tokens, `trained_eos` first


def prepare_data(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
    main_process_first: Callable[[], AbstractContextManager[Any]] = nullcontext,
    split_batch: Callable[[Batch], Batch] | None = None,
    eval_batch_size: int | None = None,
) -> PreparedData:
    """Load, tokenise, split and pack a run's data. Raise `UserError` if a dataset cannot be found, read or used.

    With --context_parallel_size n, n ranks in a row get the same sequences, and `split_batch` returns a rank's slice of
    a batch. --eval_batches counts batches of `eval_batch_size` (default: --batch_size), so that merging micro-batches
    does not change the evaluated rows. `main_process_first()` makes other processes wait until the cache is filled.
    """
    data, num_slices = config.data, config.parallel.context_parallel_size
    data_rank = DataRank(rank // num_slices, world_size // num_slices)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(i, int)), 0)
    layout = (data.batch_size, data.max_seq_length, pad, config.packing, num_slices, split_batch, pin_memory)
    with main_process_first():
        return _Job(config, tokenizer, Layout(*layout), data_rank).prepare(eval_batch_size or data.batch_size)


class _Part(NamedTuple):
    """A dataset's split, its rows and the options to tokenise them."""

    source: DatasetSource
    rows: Any
    options: RowOptions


class _Job:
    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, layout: Layout, data_rank: DataRank) -> None:
        self.config, self.data, self.tokenizer = config, config.data, tokenizer
        self.layout, self.data_rank = layout, data_rank
        self.train, self.evaluation = find_splits(config.data)
        weights, number = config.data.weights, len(self.train)
        if weights is not None and (len(weights) != number or number == 1):
            counts = f"{len(weights)} numbers for the {number} datasets"
            raise UserError(f"--dataset_weights has {counts} of --dataset_name; give several, each with a weight.")
        if weights is None and number > 1 and config.data.streaming:
            raise UserError("--streaming reads the datasets of --dataset_name interleaved: add --dataset_weights.")
        self.shares = None if weights is None else [weight / sum(weights) for weight in weights]

    def prepare(self, eval_batch_size: int) -> PreparedData:
        data, report = self.data, DataReport()
        fraction = 0.0 if self.evaluation else data.validation_fraction
        share = DEFAULT_FRACTION if fraction is None else fraction  # only for streams, whose size is unknown
        parts = self.open(self.train, data.num_of_samples)
        has_template = self.config.model.chat_template or data.chat_template_kwargs
        if has_template and all(part.options.form in UNTEMPLATED for part in parts):
            raise UserError("--chat_template, --chat_template_kwargs: no row uses a template; drop the option.")
        if data.streaming:
            rows = self.first_rows(parts, share)
            amounts = [f"{part:.2%} of the rows" for part in self.shares or [1.0]]
        else:
            mixed = self.mixed(parts)
            rows = concatenate_datasets(self.tokenise(mixed))
            amounts = [f"{len(part.rows)} of {len(whole.rows)} rows" for part, whole in zip(mixed, parts, strict=True)]
        figures = figures_of(rows)
        used = figures["length"] > 0
        held_out, keys = np.zeros_like(used), figures["problem_key"][used]
        held_out[used] = is_held_out(keys, share) if data.streaming else held_out_mask(keys, fraction)
        report.count(rows, figures, held_out)
        chosen = np.flatnonzero(used & ~held_out)
        if len(chosen) == 0:
            raise _no_usable_row(self.train, "trained on", f"{report.summary()}; {report.describe_unused()}")
        if self.evaluation:
            evaluation = self.evaluation_rows(keys, report)
        else:
            evaluation = rows.select(np.flatnonzero(held_out)[: STREAMED_EVAL_ROWS if data.streaming else None])
            if fraction != 0 and not len(evaluation):
                reason = f"none of the first {len(rows)} rows falls into the share"
                reason = reason if data.streaming else f"all {len(keys)} usable rows have the same problem"
                report.nothing_held_out = f"{reason}; give --eval_dataset_name or --validation_fraction 0"
        report.num_eval_rows = len(evaluation)
        require = ("validation_fraction", "eval_every", "eval_batches")  # options that require evaluation rows
        if not len(evaluation) and (flags := [f"--{name}" for name in require if self.config.options[name]]):
            reason = report.nothing_held_out or "--validation_fraction is 0"
            raise UserError(f"{', '.join(flags)}: no row can be held out: {reason}.")
        report.unused |= {f"file '{name}'": 1 for source in self.train + self.evaluation for name in source.left_out}
        seed, documents = self.config.optim.seed, content_key(figures["document_key"][chosen])
        stream = [self.shares, data.num_of_samples, share] if data.streaming else []
        content = json.dumps([documents, *stream, self.config.packing, seed, self.layout.multiple])
        identity = hashlib.sha256(content.encode()).hexdigest()[:16]
        if data.streaming:
            inputs = (partial(self.open_stream, parts), partial(is_held_out, fraction=share), self.layout.plan, report)
            sequences = Sequences(seed, identity, partial(stream_buffers, self.train, *inputs))
        else:
            plan = self.layout.plan(figures["length"], chosen)
            sequences = Sequences(seed, identity, partial(epochs, plan, document_reader(rows)), len(plan))
            report.num_rows_of_batches = len(plan)
            num_positions = self.layout.num_positions(figures["length"][plan.samples][sequences.order(0, len(plan))])
            report.padding_efficiency = report.num_tokens / num_positions
        (example,) = document_reader(rows)(chosen[:1].tolist())
        description = self.describe(report, example.marked_text(self.tokenizer), amounts)
        # `trained_eos` may be wrong: a template may reject its test conversation, or end a call unlike an answer.
        expected = list(dict.fromkeys(trained_eos(self.tokenizer, part.options.form) for part in parts))
        taught = [end for end in expected if end in report.ends or end != self.tokenizer.eos_token_id]
        ends = dict.fromkeys([*taught, *(end for end, _ in report.ends.most_common())])
        train = TrainLoader(sequences, self.layout, self.config.optim.gradient_accumulation_steps, self.data_rank)
        evals = self.eval_loader(evaluation, eval_batch_size) if len(evaluation) else None
        return PreparedData(train, evals, report, description, tuple(ends) or tuple(expected))

    def open(self, sources: Sequence[DatasetSource], num_rows: int | None) -> list[_Part]:
        """Open up to `num_rows` rows (None: all) of each split and choose options to tokenise them. Check --columns."""
        loaded = [load_split(source, self.data.streaming, num_rows) for source in sources]
        examples = list(map(first_row, sources, loaded))
        names = [name for row in examples for name in row]
        for ours, theirs in self.data.column_names.items():
            if sources == self.train and theirs not in names:
                raise UserError(f"--columns {ours}={theirs}: there is no column {theirs} among {', '.join(names)}.")
        return list(map(_Part, sources, loaded, map(self.options, sources, examples)))

    def options(self, source: DatasetSource, row: Mapping[str, Any]) -> RowOptions:
        """Return the options for tokenising a dataset whose first row is `row`."""
        data = self.data
        renames = {ours: theirs for ours, theirs in data.column_names.items() if theirs in row}
        columns = {name: name for name in row if name not in renames.values()} | renames
        first = {ours: row[theirs] for ours, theirs in columns.items()}
        form = detect_columns(first, renames, f"{source.flag} {source.name}")
        wanted = (*COLUMNS[form], *OPTIONAL_COLUMNS[form])
        if source.is_json:  # later rows may have other columns
            columns = {name: name for name in wanted if name not in renames.values()} | columns
        used = {ours: theirs for ours, theirs in columns.items() if ours in wanted}
        others = [] if source.is_json else [name for name in row if name not in used.values()]
        limits = (data.max_seq_length, data.overlong, data.train_on_prompt)
        return RowOptions(form, used, others, *limits, data.chat_template_kwargs or {})

    def mixed(self, parts: list[_Part]) -> list[_Part]:
        """Take the datasets' rows in the ratio of --dataset_weights. At least one dataset is used completely."""
        if self.shares is None:
            return parts
        total = min(len(part.rows) / share for part, share in zip(parts, self.shares, strict=True))
        amounts = [max(1, round(total * share)) for share in self.shares]
        return [part._replace(rows=part.rows.take(n)) for part, n in zip(parts, amounts, strict=True)]

    def tokenise(self, parts: Sequence[_Part]) -> list[Any]:
        tokenised = []
        for source, rows, options in parts:
            with reading_of(source):
                tokenised.append(tokenise(rows, self.tokenizer, options))
        return tokenised

    def open_stream(self, parts: Sequence[_Part]) -> IterableDataset:
        """Open a new stream of the tokenised training rows of `parts`, starting at the first row."""
        reopened = [part._replace(rows=load_split(part.source, True, self.data.num_of_samples)) for part in parts]
        streams = self.tokenise(reopened)
        return interleave_datasets(streams, self.shares, self.config.optim.seed) if self.shares else streams[0]

    def first_rows(self, parts: Sequence[_Part], fraction: float) -> Dataset:
        """Read rows from the start of the stream, about `STREAMED_EVAL_ROWS` / `fraction`, but no more than
        `STREAMED_EVAL_SCAN_ROWS`. The share `fraction` of them is to be held out. If it is 0, read a few rows.
        """
        wanted = min(STREAMED_EVAL_SCAN_ROWS, int(STREAMED_EVAL_ROWS / fraction)) if fraction else 1
        with reading_of(*self.train):
            stream = iter(self.open_stream(parts))
            pieces = [next_rows(stream, STREAMED_SCAN_ROWS) for _ in range(0, wanted, STREAMED_SCAN_ROWS)]
        return concatenate_datasets(pieces)

    def evaluation_rows(self, trained_keys: Any, report: DataReport) -> Dataset:
        """Read the evaluation rows. Unless streaming, leave out rows with a `problem_key` that is in `trained_keys`."""
        sources, streaming = self.evaluation, self.data.streaming
        limit = STREAMED_EVAL_ROWS // len(sources) if streaming else None  # equally many rows of each dataset
        tokenised = self.tokenise(self.open(sources, limit))
        if limit is not None:
            with reading_of(*sources):
                tokenised = [next_rows(iter(stream), limit) for stream in tokenised]
        rows = concatenate_datasets(tokenised)
        report.count_unused(rows)
        figures = figures_of(rows)
        used = figures["length"] > 0
        seen = used & np.isin(figures["problem_key"], [] if streaming else trained_keys)
        left_out = {"their problem is trained on": seen, "they are empty or too long": ~used}
        report.eval_rows_left_out = {reason: int(mask.sum()) for reason, mask in left_out.items()}
        if not (used & ~seen).any():
            reason = f"{seen.sum()} of {len(seen)} hold a problem that is trained on, the others are empty or too long"
            raise _no_usable_row(sources, "evaluated on", reason)
        return rows.select(np.flatnonzero(used & ~seen))

    def eval_loader(self, rows: Dataset, batch_size: int) -> EvalLoader:
        figures, read, batches = figures_of(rows), document_reader(rows), self.config.run.eval_batches
        plan = self.layout.plan(figures["length"], np.arange(len(rows)))
        readers = [partial(read, plan[number].tolist()) for number in range(len(plan))]
        limit = None if batches is None else batches * batch_size
        return EvalLoader(readers, content_key(figures["document_key"]), self.layout, self.data_rank, limit)

    def describe(self, report: DataReport, sample: str, amounts: Sequence[str]) -> str:
        """Return text to print: origin, counts and `sample`. `amounts` says how much of each dataset is trained on."""
        form = "packed" if self.config.packing else "padded (--packing fills them)"
        evaluated = ", ".join(f"split {source.split} of {source.name}" for source in self.evaluation)
        lines = [
            f"data: {self.data.dataset_name}, sequences of {self.data.max_seq_length} tokens, {form}",
            *(f"  {each.name}, split {each.split}: {n}" for each, n in zip(self.train, amounts, strict=True)),
            f"  evaluated on {evaluated or ('nothing' if self.data.validation_fraction == 0 else 'rows held out')}",
            *report.describe(),
            "  a sample, >>>supervised<<<:",
            textwrap.indent(sample, "    "),
        ]
        return "\n".join(lines)


def _no_usable_row(sources: Sequence[DatasetSource], use: str, reason: str) -> UserError:
    names = ", ".join(source.name for source in sources)
    splits = ", ".join(dict.fromkeys(source.split for source in sources))
    return UserError(f"{sources[0].flag} {names}: no row of split {splits} can be {use}: {reason}.")
