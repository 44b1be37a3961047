"""Several datasets as one: --dataset_name a,b, with --dataset_weights 0.7,0.3 or each of them whole.

Every dataset is tokenised by its own columns, so that conversations and problems can be mixed. No row comes twice in an
epoch: it ends with the dataset that is used up first, as `datasets.interleave_datasets` has it by default. Prepared
datasets give the first rows that make up their shares exactly, for `MapSequences` puts all sequences in an order of its
own. Of streams the dataset of each row is drawn by weight.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset, IterableDataset, interleave_datasets

from llm_fp8.data.load import READ_ERRORS, SourceSplit, unreadable
from llm_fp8.utils.errors import UserError

MixedRow = tuple[int, dict[str, Any]]
"""The number of a dataset in the mix, and one of its rows."""


def shares_of(weights: Sequence[float] | None, parts: Sequence[SourceSplit]) -> list[float] | None:
    """The weights as shares of 1; `UserError` where their number is not that of the datasets."""
    if weights is None:
        return None
    if len(weights) != len(parts) or len(parts) == 1:
        raise UserError(
            f"--dataset_weights has {len(weights)} numbers for the {len(parts)} datasets of --dataset_name; give "
            "several datasets, separated by commas, and a weight for each."
        )
    return [weight / sum(weights) for weight in weights]


def take_shares(datasets: Sequence[Dataset], shares: Sequence[float]) -> list[Dataset]:
    """The first rows of each, as many as its share of the largest mix without a row twice, but at least one."""
    total = min(len(dataset) / share for dataset, share in zip(datasets, shares, strict=True))
    return [
        dataset.select(range(min(len(dataset), max(1, round(total * share)))))
        for dataset, share in zip(datasets, shares, strict=True)
    ]


def interleave_streams(
    parts: Sequence[SourceSplit], streams: Sequence[IterableDataset], shares: Sequence[float], seed: int
) -> IterableDataset:
    """One stream that draws by `shares`; `iterate_mixed` reads it. Rows travel as bytes, for datasets differ in columns
    and their types.
    """
    packed = [
        stream.map(_pack, fn_kwargs={"source": source, "part": number}).select_columns(["part", "row"])
        for number, ((source, _), stream) in enumerate(zip(parts, streams, strict=True))
    ]
    try:  # it reads the first rows
        return interleave_datasets(packed, probabilities=list(shares), seed=seed)
    except READ_ERRORS as error:
        raise unreadable(parts, error) from error


def _pack(row: dict[str, Any], source: Any, part: int) -> dict[str, Any]:
    return {"part": part, "row": pickle.dumps(source.renamed(row))}


def iterate_mixed(parts: Sequence[SourceSplit], stream: IterableDataset) -> Iterator[MixedRow]:
    """The rows of `interleave_streams`, with unreadable ones turned into a `UserError`."""
    try:
        for packed in stream:
            yield packed["part"], pickle.loads(packed["row"])
    except READ_ERRORS as error:
        raise unreadable(parts, error) from error
