"""What every arm of a benchmark trains on: full rows of random tokens, one document each, or real documents (llm_fp8/throughput/text.py)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llm_fp8.architectures import bundled_architectures
from llm_fp8.config import ModelConfig
from llm_fp8.data.collate import IGNORED, Batch
from llm_fp8.errors import UserError
from llm_fp8.metrics import StepTokens
from llm_fp8.models import ModelSource, load_config, load_tokenizer, resolve_source
from llm_fp8.throughput.text import TextStep

_NAME = re.compile(r"(.+):([1-9]\d*)x([1-9]\d*)x([1-9]\d*)(?:@(.+))?")


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
    """Real documents instead of random tokens: a dataset as --dataset_name takes it. Ours packs them into `micro_batches` of `batch_size` rows, a
    rival pads the same documents, one to a row of `seq_length` tokens, and takes as many micro-batches as they need."""

    @classmethod
    def parse(cls, text: str, num_steps: int, flag: str = "--workloads") -> Workload:
        """'MODEL:ROWSxLENGTHxMICRO_BATCHES[@DATASET]' as a workload. Raises `UserError`, which names `flag`, where it is none, or the model or
        dataset is unknown."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise UserError(
                f"{flag} {text}: write MODEL:ROWSxLENGTHxMICRO_BATCHES, for example Llama-3.1-8B:8x1024x4 for 4 micro-batches of 8 rows of "
                "1024 tokens, and @FILE.jsonl behind it for real documents."
            )
        model, dataset = match[1], match[5]
        batch_size, seq_length, micro_batches = (int(match[number]) for number in (2, 3, 4))
        work = cls(model, batch_size, seq_length, micro_batches, num_steps, text=dataset)
        if not work.source.is_local and not work.source.location.endswith(".json"):
            raise UserError(
                f"{flag} {text}: {model} is unknown; give a folder with a config.json, or one of {', '.join(bundled_architectures())}."
            )
        if dataset is not None:
            try:
                work.text_step.check()
            except UserError as error:
                raise UserError(f"{flag} {text}: {error}") from error
        return work

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        shape = f"{self.model}:{self.batch_size}x{self.seq_length}x{self.micro_batches}"
        return shape if self.text is None else f"{shape}@{self.text}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a results file; without `text` on random tokens."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "text" or value is not None}

    @property
    def tokens_per_step(self) -> int:
        """Positions of one optimizer step of ours."""
        return self.batch_size * self.seq_length * self.micro_batches

    def step_tokens(self, padded: bool = False) -> StepTokens:
        """The tokens of one optimizer step; `padded`: of a rival, which pads real documents."""
        if self.text is not None:
            return self.text_step.tokens(padded)
        total = self.tokens_per_step
        return StepTokens(total, total, total - self.batch_size * self.micro_batches, total * self.seq_length)

    @functools.cached_property
    def text_step(self) -> TextStep:
        """The documents of a step with `text`."""
        assert self.text is not None
        return TextStep(
            self.text, load_tokenizer(self.model_options, self.source)[0], self.batch_size, self.seq_length, self.micro_batches
        )

    @property
    def model_options(self) -> ModelConfig:
        """The model with random weights."""
        return ModelConfig(model_name=self.model, random_init=True)

    @functools.cached_property
    def source(self) -> ModelSource:
        """Where the model's config lies."""
        return resolve_source(self.model_options)

    def hf_config(self) -> PretrainedConfig:
        """The model's config, read anew: building a model changes it."""
        return load_config(self.model_options, self.source)

    def batches(self, vocab_size: int, reader: int = 0) -> list[Batch]:
        """The micro-batches of a step, packed; each `reader`, a process with data of its own, has others. Real documents have one reader."""
        if self.text is not None:
            return self.text_step.packed()
        return [random_batch(self, vocab_size, reader * self.micro_batches + number) for number in range(self.micro_batches)]

    def text_facts(self, padded: bool = False) -> dict[str, Any]:
        """What a row of real documents says of them: `documents` and `step_tokens`, which `speed` reads; nothing for random tokens."""
        if self.text is None:
            return {}
        return {"documents": self.text_step.facts(), "step_tokens": dataclasses.asdict(self.step_tokens(padded))}

    def hf_inputs(self, vocab_size: int, reader: int = 0) -> list[dict[str, Tensor]]:
        """The same step as transformers' model takes it, by micro-batch: input_ids and labels int64 [B, S], not shifted, and for real documents
        attention_mask bool [B, S]."""
        if self.text is not None:
            return [_hf_rows(batch) for batch in self.text_step.padded()]
        rows = (batch.input_ids.view(self.batch_size, -1) for batch in self.batches(vocab_size, reader))
        return [{"input_ids": ids, "labels": ids} for ids in rows]


def _hf_rows(batch: Batch) -> dict[str, Tensor]:
    """A padded batch with labels that the model shifts itself: the last label of a row is none, so that rolling it to the front loses nothing."""
    assert batch.attention_mask is not None
    return {"input_ids": batch.input_ids, "labels": batch.labels.roll(1, dims=1), "attention_mask": batch.attention_mask}


def parse_workloads(text: str, num_steps: int) -> list[Workload]:
    """The workloads of a comma-separated list; raises `UserError` for one that is unknown or there twice."""
    names = text.split(",")
    if doubled := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UserError(f"--workloads names {doubled[0]} twice.")
    return [Workload.parse(name, num_steps) for name in names]


def random_batch(work: Workload, vocab_size: int, seed: int) -> Batch:
    """One packed micro-batch of full rows, every token but each row's last supervised."""
    total = work.batch_size * work.seq_length
    ids = torch.randint(vocab_size, (1, total), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, dims=1)
    labels[0, work.seq_length - 1 :: work.seq_length] = IGNORED
    return Batch(
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(work.seq_length).repeat(work.batch_size)[None],
        attention_mask=None,
        cu_seqlens=torch.arange(0, total + 1, work.seq_length, dtype=torch.int32),
        max_seqlen=work.seq_length,
        num_tokens=total,
        num_real_tokens=total,
        num_supervised_tokens=total - work.batch_size,
        sum_squared_lengths=work.batch_size * work.seq_length**2,
        row_ids=(),
    )


@dataclass
class FixedLoader:
    """Gives the same micro-batches at every step."""

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
        """Keep what the loop reports."""
        self.step_times_s += [record["step_time_s"] for record in records]
        self.losses += [record["loss"] for record in records]
