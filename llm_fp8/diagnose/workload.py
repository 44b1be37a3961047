"""What a diagnosed step trains on: full rows of random tokens, laid out as the configuration's data would be."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch

from llm_fp8.config import Config, ModelConfig, RunConfig
from llm_fp8.data.collate import Batch
from llm_fp8.throughput.workload import Workload


@dataclass(frozen=True)
class ConfiguredWorkload(Workload):
    """The steps of a configuration; the model is that of its options, with its weights where it has any."""

    options: ModelConfig
    packing: bool

    @classmethod
    def of(cls, config: Config) -> ConfiguredWorkload:
        """The workload of `config`."""
        return cls(
            model=config.model.model_name,
            batch_size=config.data.batch_size,
            seq_length=config.data.max_seq_length,
            micro_batches=config.optim.gradient_accumulation_steps,
            num_steps=0,
            options=config.model,
            packing=config.packing,
        )

    @property
    def model_options(self) -> ModelConfig:
        """Those of the configuration."""
        return self.options

    def batches(self, vocab_size: int, reader: int = 0) -> list[Batch]:
        """As in `Workload`; without packing, rows side by side of which nothing is padding."""
        batches = super().batches(vocab_size, reader)
        return batches if self.packing else [_side_by_side(batch, self.batch_size) for batch in batches]


def without_output(config: Config) -> Config:
    """`config` of a run that writes nothing and sends nothing to a tracker."""
    return dataclasses.replace(config, run=RunConfig(output_dir=os.devnull))


def _side_by_side(batch: Batch, num_rows: int) -> Batch:
    """A packed batch of full rows [1, T] as a padded one [B, S] without padding."""
    rows = batch.input_ids.view(num_rows, -1)
    return dataclasses.replace(
        batch,
        input_ids=rows,
        labels=batch.labels.view_as(rows),
        position_ids=batch.position_ids.view_as(rows),
        attention_mask=torch.ones_like(rows, dtype=torch.bool),
        cu_seqlens=None,
    )
