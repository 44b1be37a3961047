"""Several datasets as one: --dataset_name a,b, with --dataset_weights 0.7,0.3 or each of them whole.

Every dataset is tokenised by its own columns, so that conversations and problems can be mixed. No row comes twice in an
epoch: it ends with the dataset that is used up first. Prepared datasets give the first rows that make up their shares
exactly, for `MapSequences` puts all sequences in an order of its own. Of streams the dataset of each row is drawn by
weight (`datasets.interleave_datasets`).
"""

from __future__ import annotations

from collections.abc import Sequence

from datasets import Dataset

from llm_fp8.utils.errors import UserError


def shares_of(weights: Sequence[float] | None, num_datasets: int) -> list[float] | None:
    """The weights as shares of 1; `UserError` where their number is not that of the datasets."""
    if weights is None:
        return None
    if len(weights) != num_datasets or num_datasets == 1:
        raise UserError(
            f"--dataset_weights has {len(weights)} numbers for the {num_datasets} datasets of --dataset_name; give "
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
