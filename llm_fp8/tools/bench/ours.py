"""This project's training of a workload: the parts of a run, built by the run's own code, and its loop."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from llm_fp8.config.options import Config
from llm_fp8.config.validation import check_machine
from llm_fp8.distributed.build import build_accelerator
from llm_fp8.distributed.context_parallel import ContextGroup
from llm_fp8.distributed.process_group import own_device, smallest_gpu_gib
from llm_fp8.distributed.sharding_mode import choose_mode
from llm_fp8.models.build import count_parameters, decoder_layers
from llm_fp8.models.lora import num_adapter_parameters
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.observability.metrics import DecoderSize
from llm_fp8.observability.step_profile import StepProfile
from llm_fp8.optim.schedule import build_scheduler
from llm_fp8.precision.coverage import Fp8Coverage
from llm_fp8.precision.plan import resolve_precision
from llm_fp8.tools.bench.variants import OurVariant
from llm_fp8.tools.bench.workload import FixedLoader, Recorder, Workload, draw_weights_
from llm_fp8.train.loop import LoopOptions, Trainer
from llm_fp8.train.machine import gather_facts
from llm_fp8.train.scale_warmup import prepare_with_scales, supervised_tokens_per_process, warm_up_delayed_scales
from llm_fp8.train.setup import RunParts
from llm_fp8.utils.ranks import LaunchRanks


class _NoHooks:
    """Between the steps of a benchmark nothing happens."""

    def after_first_step(self) -> None:
        """Nothing."""

    def after_profiled_step(self, profile: StepProfile, num_micro_batches: int) -> None:
        """Never due."""

    def after_report(self, step: int) -> None:
        """Nothing."""

    def evaluate(self, step: int) -> None:
        """Never due."""

    def save(self, step: int) -> Path:
        """Never due."""
        raise NotImplementedError


class _QuietParts(RunParts):
    """A run whose parts are built one by one, and which says nothing."""

    def say(self, text: str) -> None:
        """Nothing: the benchmark prints its own lines."""

    def parts(self, work: Workload) -> tuple[PretrainedConfig, PreTrainedModel, TrainingModel, Fp8Coverage]:
        """Config, model, what the loop calls, and the census."""
        self.choose_strategy()
        model, training_model, loaded, census = self.build_model(work.source, self.hf_config)
        if (
            not loaded and not self.config.parallel.fp8_params
        ):  # which have given their fp32 values away when they are built
            draw_weights_(model, self.device, is_te=self.config.model.use_te)
        return self.hf_config, model, training_model, census


class OurTraining:
    """A variant of this project, built.

    Attributes:
        accelerator, recorder, facts: as in `llm_fp8.tools.bench.baselines.HfTraining`; a loss is that of all processes.
        model: the decoder with its head.
        precision: the seam, attached to `model`.
        census: which linear layers of `model` compute in what.
        trainer: the loop; its `model` is what it calls.
    """

    def __init__(self, work: Workload, variant: OurVariant | Config) -> None:
        config = variant if isinstance(variant, Config) else variant.config(work)
        ranks = LaunchRanks.from_environment(os.environ)
        hf_config, device = work.hf_config(), own_device()
        plan = resolve_precision(config.precision, device)
        mode = choose_mode(config, ranks, lambda: count_parameters(hf_config), smallest_gpu_gib(device))
        check_machine(config, gather_facts(config, hf_config, device, ranks, plan, mode.mode))
        self.accelerator = build_accelerator(config, ranks, plan)
        run = _QuietParts(config, hf_config, self.accelerator, ranks, plan, mode)
        hf_config, model, training_model, census = run.parts(work)
        self.model, self.precision, self.census = model, run.precision, census
        optimizer: Any = run.engine.build_optimizer(config.optim, run.optimizer_kind, training_model.named_parameters())
        context_size = config.parallel.context_parallel_size
        context = ContextGroup.of_rank(context_size, ranks.rank).connected(self.accelerator.device.type)
        context.attach(decoder_layers(model))
        split = [context.split(batch) for batch in work.batches(hf_config.vocab_size, ranks.rank // context_size)]
        batches = [batch.to(self.accelerator.device) for batch in split]
        num_supervised = supervised_tokens_per_process(self.accelerator, batches)
        prepared, optimizer = prepare_with_scales(
            run.engine,
            training_model,
            optimizer,
            lambda: warm_up_delayed_scales(training_model, run.precision, batches[0], num_supervised),
        )
        self.recorder = Recorder()
        loader: Any = FixedLoader(batches)
        reporter: Any = self.recorder
        self.facts = {
            "precision": plan.to_dict(),
            "census": census.to_dict(),
            "optimizer": run.optimizer_kind,
            "num_adapter_parameters": num_adapter_parameters(model),
            **work.text_facts(),
        }
        self.trainer = Trainer(
            accelerator=self.accelerator,
            engine=run.engine,
            model=prepared,
            precision=run.precision,
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, config.optim, total_steps=10_000),
            loader=loader,
            reporter=reporter,
            options=LoopOptions(
                total_steps=0, max_grad_norm=config.optim.max_grad_norm, log_every=1000, eval_every=0, save_every=0
            ),
            size=DecoderSize.from_config(hf_config, num_adapter_parameters(model)),
            peak=None,
            fp8_linear_flop_share=census.fp8_linear_flop_share,
        )

    def take(self, num_steps: int) -> None:
        """Take so many optimizer steps."""
        trainer = self.trainer
        trainer.options = dataclasses.replace(trainer.options, total_steps=trainer.step + num_steps)
        trainer.train(hooks=_NoHooks(), stop_requested=lambda: False)
