"""What every variant trains on: full sequences of random tokens, or real documents, and the same random weights.

Real documents come in the dataset's order, by the model's tokenizer (a bundled architecture has the embedded one).
Every token but a document's first is predicted, the prompt too, by ours, which packs them, and by the baselines, which
pad them, so that losses are means over the same tokens. As many are taken as fit the rows of a step when packed. The
padded step has one document to a row and fewer rows in its last micro-batch, so that no row is empty.

Each Hugging Face tensor is drawn in bf16 from a seed made of its name: variants start from equal models whatever their
modules are called and however they are sharded, and their first losses show whether they compute the same thing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import te_llama
from llm_fp8.config.options import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from llm_fp8.data.collate import Batch, PackedCollate, PaddedCollate, count_tokens
from llm_fp8.data.load import load_split, open_source
from llm_fp8.data.pack import pack
from llm_fp8.data.prepare import pad_token_id
from llm_fp8.data.rows import detect_columns
from llm_fp8.data.tokenise import Document, TokeniseOptions, tokenise_rows
from llm_fp8.models.architectures import bundled_architectures
from llm_fp8.models.lora_names import is_adapter, name_without_adapter
from llm_fp8.models.source import ModelSource, load_config, load_tokenizer, require_positions, resolve_source
from llm_fp8.models.weight_shards import local_shard, te_filler
from llm_fp8.observability.metrics import StepTokens
from llm_fp8.tools.bench.worker import split_names
from llm_fp8.utils.errors import UserError

ROWS_AT_A_TIME = 256
"""Rows of the dataset that are tokenised at a time."""
_NAME = re.compile(r"(.+):([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:@(.+))?")


OPTIMISATION = OptimConfig(learning_rate=1e-5, lr_scheduler="constant", num_warmup_steps=0)
"""The same of every variant from the first step on, so that losses can be compared."""


@dataclass(frozen=True)
class Workload:
    """The steps of one process, or under context parallelism those of one group of processes."""

    model: str
    """A bundled architecture, or a folder with a config.json."""
    batch_size: int
    seq_length: int
    micro_batches: int
    num_steps: int
    """Steps per round, the left-out ones included."""
    text: str | None = field(default=None, kw_only=True)
    """A dataset as --dataset_name takes it: real documents, packed by ours, padded to `seq_length` by a baseline, which
    takes as many micro-batches as they need.
    """

    @classmethod
    def parse(cls, text: str, num_steps: int, flag: str = "--workloads") -> Workload:
        """Of 'MODEL:ROWSxLENGTHxMICRO_BATCHES[@DATASET]'; `UserError`, which names `flag`, where that is unknown."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise UserError(
                f"{flag} {text}: write MODEL:ROWSxLENGTHxMICRO_BATCHES, for example Llama-3.1-8B:8x1024x4 for 4 "
                "micro-batches of 8 rows of 1024 tokens, and @FILE.jsonl behind it for real documents."
            )
        model, batch_size, seq_length, micro_batches, dataset = match.groups()
        work = cls(model, int(batch_size), int(seq_length), int(micro_batches), num_steps, text=dataset)
        if not work.source.is_local and not work.source.location.endswith(".json"):
            raise UserError(
                f"{flag} {text}: {model} is unknown; give a folder with a config.json, or one of "
                f"{', '.join(bundled_architectures())}."
            )
        require_positions(work.hf_config(), work.seq_length, model, f"{flag} {text}: a row of")
        if dataset is not None:
            try:
                open_source(dataset).training_split(None)  # its rows are not read yet
            except UserError as error:
                raise UserError(f"{flag} {text}: {error}") from error
        return work

    @property
    def name(self) -> str:
        shape = f"{self.model}:{self.batch_size}x{self.seq_length}x{self.micro_batches}"
        return shape if self.text is None else f"{shape}@{self.text}"

    def to_dict(self) -> dict[str, Any]:
        """For a results file; without `text` on random tokens."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "text" or value is not None}

    @property
    def tokens_per_step(self) -> int:
        """Positions of one optimizer step of ours."""
        return self.batch_size * self.seq_length * self.micro_batches

    def step_tokens(self, padded: bool = False) -> StepTokens:
        """The tokens of one optimizer step; `padded`: of a baseline, which pads real documents."""
        if self.text is not None:
            return count_tokens(self.padded_documents() if padded else self.packed_documents())
        total = self.tokens_per_step
        return StepTokens(total, total, total - self.batch_size * self.micro_batches, total * self.seq_length)

    @property
    def model_options(self) -> ModelConfig:
        return ModelConfig(model_name=self.model, random_init=True)

    @functools.cached_property
    def source(self) -> ModelSource:
        return resolve_source(self.model_options)

    def hf_config(self) -> PretrainedConfig:
        """The model's config, read anew: building a model changes it."""
        return load_config(self.model_options, self.source)

    def config(self, options: Config) -> Config:
        """`options` of ours for a run on this workload, which writes nothing."""
        return dataclasses.replace(
            options,
            model=dataclasses.replace(options.model, model_name=self.model, random_init=True),
            data=DataConfig(max_seq_length=self.seq_length, batch_size=self.batch_size, packing=True),
            optim=dataclasses.replace(
                OPTIMISATION,
                optimizer=options.optim.optimizer,
                offload_optimizer=options.optim.offload_optimizer,
                gradient_accumulation_steps=self.micro_batches,
                max_steps=self.num_steps,
            ),
            run=RunConfig(output_dir=os.devnull),
        )

    def batches(self, vocab_size: int, reader: int = 0) -> list[Batch]:
        """The micro-batches of a step, packed, different for each `reader` (a process with data of its own)."""
        if self.text is not None:
            return self.packed_documents()
        first = reader * self.micro_batches
        return [random_batch(self, vocab_size, first + number) for number in range(self.micro_batches)]

    def text_facts(self, padded: bool = False) -> dict[str, Any]:
        """Entries of a row on real documents; `speed` reads `step_tokens`."""
        if self.text is None:
            return {}
        return {"documents": self.document_facts(), "step_tokens": dataclasses.asdict(self.step_tokens(padded))}

    def hf_inputs(self, vocab_size: int, reader: int = 0) -> list[dict[str, Tensor]]:
        """The step as transformers' model takes it, by micro-batch: input_ids and unshifted labels int64 [B, S], for
        real documents attention_mask bool [B, S]."""
        if self.text is None:
            rows = (batch.input_ids.view(self.batch_size, -1) for batch in self.batches(vocab_size, reader))
            return [{"input_ids": ids, "labels": ids} for ids in rows]
        found = []
        for batch in self.padded_documents():
            assert batch.attention_mask is not None
            labels = batch.labels.roll(1, dims=1)  # a row's last label is IGNORE_INDEX: nothing is lost
            found.append({"input_ids": batch.input_ids, "labels": labels, "attention_mask": batch.attention_mask})
        return found

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.model_options, self.source)[0]

    @functools.cached_property
    def documents(self) -> list[Document]:
        """In order, as many as the step's rows hold. Raises `UserError` where the dataset has too few."""
        length, num_rows = self.seq_length, self.batch_size * self.micro_batches
        found = self._read(num_rows * length)
        lengths = [len(document.input_ids) for document in found]
        if sum(lengths) <= num_rows * length:
            raise UserError(
                f"{self.text} holds {sum(lengths)} tokens in {len(found)} documents of at most {length}, and a "
                f"step of {num_rows} rows of {length} takes more; give a longer text or fewer rows."
            )
        taken = len(found) - 1
        while len(pack(lengths[:taken], length)) > num_rows:
            taken -= 1
        return found[:taken]

    def _read(self, num_tokens: int) -> list[Document]:
        """The first documents of the dataset, with more than `num_tokens` tokens in all if it has so many."""
        source = open_source(self.text or "")
        dataset = load_split(source, source.training_split(None))
        options = TokeniseOptions(detect_columns(dataset.column_names), self.seq_length, train_on_prompt=True)
        found: list[Document] = []
        total = 0
        for first in range(0, len(dataset), ROWS_AT_A_TIME):
            rows = list(dataset.select(range(first, min(first + ROWS_AT_A_TIME, len(dataset)))))
            columns = tokenise_rows(rows, range(first, first + len(rows)), self._tokenizer, options)
            for document in map(Document.of, columns["input_ids"], columns["supervised"], columns["row_id"]):
                if not len(document.input_ids):
                    continue  # empty, or longer than a row
                found.append(document)
                total += len(document.input_ids)
                if total > num_tokens:
                    return found
        return found

    def packed_documents(self) -> list[Batch]:
        """The step's micro-batches, documents behind each other."""
        plan = pack([len(document.input_ids) for document in self.documents], self.seq_length)
        rows = [[self.documents[index] for index in plan[row]] for row in range(len(plan))]
        collate = PackedCollate(self.batch_size, self.seq_length, pad_token_id(self._tokenizer))
        starts = range(0, self.batch_size * self.micro_batches, self.batch_size)
        return [collate(rows[start : start + self.batch_size]) for start in starts]

    def padded_documents(self) -> list[Batch]:
        """The same documents, one to a row of `seq_length` tokens."""
        rows, size = [[document] for document in self.documents], self.batch_size
        micro_batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        length, pad = self.seq_length, pad_token_id(self._tokenizer)
        return [PaddedCollate(len(taken), length, pad, pad_to_full=True)(taken) for taken in micro_batches]

    def document_facts(self) -> dict[str, Any]:
        """Size of the documents; sha256 of their tokens tells whether two variants trained on the same."""
        tokens = b"".join(document.input_ids.tobytes() for document in self.documents)
        num_tokens = sum(len(document.input_ids) for document in self.documents)
        return {
            "num_documents": len(self.documents),
            "num_tokens": num_tokens,
            "mean_length": num_tokens / len(self.documents),
            "sha256": hashlib.sha256(tokens).hexdigest(),
        }


def parse_workloads(text: str, num_steps: int) -> list[Workload]:
    """Of a comma-separated list; raises `UserError` for one that is unknown or there twice."""
    return [Workload.parse(name, num_steps) for name in split_names(text, "--workloads")]


def random_batch(work: Workload, vocab_size: int, seed: int) -> Batch:
    """One packed micro-batch of full rows, every token but each row's first predicted."""
    shape = work.batch_size, work.seq_length
    ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed)).numpy()
    rows = [[Document(row, np.ones(len(row), dtype=bool), number)] for number, row in enumerate(ids)]
    return PackedCollate(*shape, pad_token_id=0)(rows)


def in_rows(batch: Batch, num_rows: int, num_real: int) -> Batch:
    """A packed batch of full rows as [num_rows, S], of each row the first `num_real` positions real."""
    tensors = {name: getattr(batch, name).view(num_rows, -1) for name in ("input_ids", "labels", "position_ids")}
    mask = torch.arange(tensors["input_ids"].shape[1]).expand(num_rows, -1) < num_real
    return dataclasses.replace(batch, **tensors, attention_mask=mask, cu_seqlens=None)


@dataclass
class FixedLoader:
    """The same micro-batches at every step."""

    batches: list[Batch]
    epoch: float = 0.0

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            yield self.batches


@dataclass
class Recorder:
    """Time (seconds) and loss (nats per token) of each step; takes the place of a run's reporter."""

    step_times_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def steps(self, records: list[dict[str, Any]]) -> None:
        self.step_times_s += [record["step_time_s"] for record in records]
        self.losses += [record["loss"] for record in records]


def draw_weights_(model: PreTrainedModel, device: torch.device, *, is_te: bool) -> None:
    """Fill `model`, or this process's shard of it, in place: a Hugging Face model, or one of `te_llama` (`is_te`).

    Adapters keep their values. `te_llama.random_` draws unsharded tensors on `device`, one in memory at a time.
    """
    std = getattr(model.config, "initializer_range", 0.02)
    if not is_te:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_adapter(name):
                    continue
                block = local_shard(parameter)
                whole = _drawn(name_without_adapter(name), parameter.shape, std, device)
                block.data.copy_(whole[block.start : block.start + len(block.data)])
        return
    spec = te_llama.spec_of(model)
    blocks = {name: local_shard(parameter) for name, parameter in te_llama.te_parameters(model).items()}
    filler = te_filler(spec, blocks)
    for parts in te_llama.parameter_map(spec).values():
        for part in parts:
            filler.fill(part.hf_name, _drawn(part.hf_name, part.shape, std, device))
    filler.finish()


def _drawn(hf_name: str, shape: Sequence[int], std: float, device: torch.device) -> Tensor:
    whole = torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)
    te_llama.random_(whole, hf_name, std, torch.Generator(device=device).manual_seed(zlib.crc32(hf_name.encode())))
    return whole
