"""What every arm of a benchmark trains on: full rows of random tokens, one document each."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig

from llm_fp8.architectures import bundled_architectures
from llm_fp8.config import ModelConfig, OptimConfig
from llm_fp8.data.collate import IGNORED, Batch
from llm_fp8.errors import UserError
from llm_fp8.models import ModelSource, load_config, resolve_source

OPTIMISATION = OptimConfig(learning_rate=1e-5, lr_scheduler="constant", num_warmup_steps=0)
"""How every arm moves its weights: the same from the first step on, so that their losses can be compared."""

_SHAPE = re.compile(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)")


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

    @classmethod
    def parse(cls, text: str, num_steps: int, flag: str = "--workloads") -> Workload:
        """'MODEL:ROWSxLENGTHxMICRO_BATCHES' as a workload. Raises `UserError`, which names `flag`, where it is none or the model is unknown."""
        model, _, shape = text.rpartition(":")
        match = _SHAPE.fullmatch(shape)
        if not model or match is None:
            raise UserError(
                f"{flag} {text}: write MODEL:ROWSxLENGTHxMICRO_BATCHES, for example Llama-3.1-8B:8x1024x4 for 4 micro-batches of 8 rows of "
                "1024 tokens."
            )
        batch_size, seq_length, micro_batches = map(int, match.groups())
        work = cls(model, batch_size, seq_length, micro_batches, num_steps)
        if not work.source.is_local and not work.source.location.endswith(".json"):
            raise UserError(
                f"{flag} {text}: {model} is unknown; give a folder with a config.json, or one of {', '.join(bundled_architectures())}."
            )
        return work

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"{self.model}:{self.batch_size}x{self.seq_length}x{self.micro_batches}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.seq_length * self.micro_batches

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
        """The micro-batches of a step; each `reader`, a process with data of its own, has others."""
        return [random_batch(self, vocab_size, reader * self.micro_batches + number) for number in range(self.micro_batches)]


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
