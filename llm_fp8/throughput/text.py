"""Real documents for a step of a benchmark: the same ones for an arm that packs them and for one that pads them.

Documents come in the dataset's order, by the tokenizer of the model (a bundled architecture has the embedded one), prompt included among what is
learnt: every token of a document but its first is predicted, in both arms, so that losses are means over the same tokens. As many are taken as
fit the rows of a step when packed. The padded arm gets one document to a row, padded to the length of a row, and fewer rows in its last
micro-batch, so that it computes no row for nothing.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from llm_fp8.data.collate import Batch, PackedCollate, PaddedCollate, count_tokens
from llm_fp8.data.load import DatasetSource, load_split, open_source
from llm_fp8.data.pack import RowPlan, pack
from llm_fp8.data.prepare import pad_token_id
from llm_fp8.data.prompt import detect_columns
from llm_fp8.data.tokenise import Document, TokeniseOptions, tokenise_rows
from llm_fp8.errors import UserError
from llm_fp8.metrics import StepTokens

ROWS_AT_A_TIME = 256
"""Of the dataset that are tokenised before it is known whether more are needed."""


@dataclass(frozen=True)
class TextStep:
    """The documents of one optimizer step, packed into `micro_batches` of `batch_size` rows of `seq_length` tokens."""

    dataset: str
    """As --dataset_name takes it; its default split is read."""
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    seq_length: int
    micro_batches: int

    def check(self) -> None:
        """Raise `UserError` where there is no such dataset; its rows are not read yet."""
        self._source.training_split(None)

    @functools.cached_property
    def _source(self) -> DatasetSource:
        return open_source(self.dataset)

    @functools.cached_property
    def documents(self) -> list[Document]:
        """In order, as many as the step's rows hold. Raises `UserError` where the dataset has too few."""
        num_rows = self.batch_size * self.micro_batches
        found = self._read(num_rows * self.seq_length)
        lengths = [len(document.input_ids) for document in found]
        if sum(lengths) <= num_rows * self.seq_length:
            raise UserError(
                f"{self.dataset} holds {sum(lengths)} tokens in {len(found)} documents of at most {self.seq_length}, and a step of {num_rows} rows "
                f"of {self.seq_length} takes more; give a longer text or fewer rows."
            )
        taken = len(found) - 1
        while len(pack(lengths[:taken], self.seq_length)) > num_rows:
            taken -= 1
        return found[:taken]

    def _read(self, num_tokens: int) -> list[Document]:
        """Documents from the first on, until they have more than `num_tokens` tokens or there are no more."""
        dataset = load_split(self._source, self._source.training_split(None))
        options = TokeniseOptions(detect_columns(dataset.column_names), self.seq_length, train_on_prompt=True)
        found: list[Document] = []
        total = 0
        for first in range(0, len(dataset), ROWS_AT_A_TIME):
            rows = list(dataset.select(range(first, min(first + ROWS_AT_A_TIME, len(dataset)))))
            columns = tokenise_rows(rows, range(first, first + len(rows)), self.tokenizer, options)
            for ids, supervised, row_id in zip(columns["input_ids"], columns["supervised"], columns["row_id"], strict=True):
                if not ids:
                    continue  # empty, or longer than a row
                found.append(Document(np.array(ids, dtype=np.int64), np.array(supervised, dtype=bool), row_id))
                total += len(ids)
                if total > num_tokens:
                    return found
        return found

    @functools.cached_property
    def _plan(self) -> RowPlan:
        return pack([len(document.input_ids) for document in self.documents], self.seq_length)

    def packed(self) -> list[Batch]:
        """The step's micro-batches, documents behind each other."""
        rows = [[self.documents[index] for index in self._plan[row]] for row in range(len(self._plan))]
        collate = PackedCollate(self.batch_size, self.seq_length, pad_token_id(self.tokenizer))
        starts = range(0, self.batch_size * self.micro_batches, self.batch_size)
        return [collate(rows[start : start + self.batch_size]) for start in starts]

    def padded(self) -> list[Batch]:
        """The same documents, one to a row of `seq_length` tokens."""
        rows = [[document] for document in self.documents]
        micro_batches = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        pad = pad_token_id(self.tokenizer)
        return [PaddedCollate(len(taken), self.seq_length, pad, pad_to_full=True)(taken) for taken in micro_batches]

    def tokens(self, padded: bool) -> StepTokens:
        """What the step counts."""
        return count_tokens(self.padded() if padded else self.packed())

    def facts(self) -> dict[str, Any]:
        """What a reader should know of the documents; sha256 is of their tokens, and tells whether two arms trained on the same."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(document.input_ids.tobytes())
        num_tokens = sum(len(document.input_ids) for document in self.documents)
        return {
            "num_documents": len(self.documents),
            "num_tokens": num_tokens,
            "mean_length": num_tokens / len(self.documents),
            "sha256": digest.hexdigest(),
        }
