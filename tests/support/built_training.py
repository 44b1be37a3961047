"""A run's parts, built by the run's own code in this process, and its loop over batches that a test gives."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

from llm_fp8.config.options import Config
from llm_fp8.data.collate import Batch
from llm_fp8.optim.schedule import build_scheduler
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.scale_warmup import prepare_with_scales, supervised_tokens_per_process, warm_up_delayed_scales
from llm_fp8.train.setup import build_setup, plan_run, silent
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.batches import packed_documents


class BuiltTraining:
    """The training of `config`, at every step on `batches`, which a test may replace; `losses` are those so far."""

    def __init__(self, config: Config) -> None:
        ranks = LaunchRanks.from_environment(os.environ)
        plan = plan_run(config, ranks, say=silent)
        setup = build_setup(plan)
        self.accelerator, self.model = plan.accelerator, setup.model
        training_model, strategy = setup.training_model, plan.strategy
        optimizer: Any = strategy.build_optimizer(config.optim, plan.optimizer_kind, training_model.named_parameters())
        rows, length = config.data.batch_size, config.data.max_seq_length
        seeds = range(config.optim.gradient_accumulation_steps)
        self.batches: list[Batch] = [
            packed_documents(rows, rows, length, plan.hf_config.vocab_size, 100 * ranks.rank + seed).to(plan.device)
            for seed in seeds
        ]
        num_supervised = supervised_tokens_per_process(self.accelerator, self.batches)
        prepared, optimizer = prepare_with_scales(
            strategy,
            training_model,
            optimizer,
            lambda: warm_up_delayed_scales(training_model, setup.precision, self.batches[0], num_supervised),
        )
        self.losses: list[float] = []
        loader: Any = self
        reporter: Any = self
        self.loop = TrainingLoop(
            setup=setup,
            model=prepared,
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, config.optim, total_steps=10_000),
            loader=loader,
            reporter=reporter,
            total_steps=0,
        )

    epoch = 0.0

    def __iter__(self) -> Iterator[list[Batch]]:
        """As a loader."""
        while True:
            yield self.batches

    def steps(self, records: list[dict[str, Any]]) -> None:
        """As a reporter."""
        self.losses += [record["loss"] for record in records]

    def take(self, num_steps: int) -> None:
        self.model.train()
        stamp = self.loop.restart_clocks()
        for batches in itertools.islice(self, num_steps):
            stamp = self.loop.take_step(batches, stamp)
        self.loop.read_pending()
