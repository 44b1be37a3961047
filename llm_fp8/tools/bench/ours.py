"""This project's training of a workload: the parts of a run, built by the run's own code, and its loop."""

from __future__ import annotations

import itertools
import os
from typing import Any

from llm_fp8.config.options import Config
from llm_fp8.distributed.context_parallel import ContextGroup
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.lora import num_adapter_parameters
from llm_fp8.optim.schedule import build_scheduler
from llm_fp8.tools.bench.workload import FixedLoader, Recorder, Workload, draw_weights_
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.scale_warmup import prepare_with_scales, supervised_tokens_per_process, warm_up_delayed_scales
from llm_fp8.train.setup import build_setup, plan_run, silent
from llm_fp8.utils.ranks import LaunchRanks


class OurTraining:
    """A run of `config` on `work`, built. `recorder` and `facts` as in `HfTraining`, with losses of all processes."""

    def __init__(self, work: Workload, config: Config) -> None:
        ranks = LaunchRanks.from_environment(os.environ)
        plan = plan_run(config, ranks, say=silent)
        setup = build_setup(plan)
        # The weights of --fp8_params gave their fp32 values away when they were built.
        if not setup.weights_loaded and not config.parallel.fp8_params:
            draw_weights_(setup.model, plan.device, is_te=config.model.use_te)
        self.accelerator, self.model = plan.accelerator, setup.model
        self.precision, self.coverage = setup.precision, setup.coverage
        training_model, strategy = setup.training_model, plan.strategy
        optimizer: Any = strategy.build_optimizer(config.optim, plan.optimizer_kind, training_model.named_parameters())
        context_size = config.parallel.context_parallel_size
        context = ContextGroup.of_rank(context_size, ranks.rank).connected(plan.device.type)
        context.attach(decoder_layers(setup.model))
        split = [context.split(batch) for batch in work.batches(plan.hf_config.vocab_size, ranks.rank // context_size)]
        batches = [batch.to(plan.device) for batch in split]
        num_supervised = supervised_tokens_per_process(self.accelerator, batches)
        prepared, optimizer = prepare_with_scales(
            strategy,
            training_model,
            optimizer,
            lambda: warm_up_delayed_scales(training_model, setup.precision, batches[0], num_supervised),
        )
        self.recorder = Recorder()
        loader: Any = FixedLoader(batches)
        reporter: Any = self.recorder
        num_adapters = num_adapter_parameters(setup.model)
        self.facts = {
            "precision": plan.precision.to_dict(),
            "census": setup.coverage.to_dict(),
            "optimizer": plan.optimizer_kind,
            "num_adapter_parameters": num_adapters,
            **work.text_facts(),
        }
        self.loop = TrainingLoop(
            setup=setup,
            model=prepared,
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, config.optim, total_steps=10_000),
            loader=loader,
            reporter=reporter,
            total_steps=0,
        )

    def take(self, num_steps: int) -> None:
        self.model.train()
        stamp = self.loop.restart_clocks()
        for batches in itertools.islice(self.loop.loader, num_steps):
            stamp = self.loop.take_step(batches, stamp)
        self.loop.read_pending()
