"""A whole run, from configuration to exported model: builds the parts, resumes, trains, evaluates, exports, sums up."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llm_fp8.config.options import Config
from llm_fp8.config.validation import check_machine
from llm_fp8.data import PreparedData, prepare_data
from llm_fp8.data.collate import Batch
from llm_fp8.data.loader import TrainLoader
from llm_fp8.distributed.build import build_accelerator
from llm_fp8.distributed.context_parallel import ContextGroup
from llm_fp8.distributed.process_group import end_process_group, own_device, smallest_gpu_gib, start_process_group
from llm_fp8.distributed.sharding_mode import choose_mode
from llm_fp8.models.build import count_parameters, decoder_layers, decoder_size
from llm_fp8.models.export import export_adapter, export_hf, export_size_bytes
from llm_fp8.models.lora import num_adapter_parameters, scaling_of
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.models.parity import check_parity
from llm_fp8.models.source import ModelSource, check_model, load_config, load_tokenizer, resolve_source, stored_dtype
from llm_fp8.observability.gpu_idle import describe_gpu_idle, gpu_idle
from llm_fp8.observability.metrics import GIB, device_peak_tflops
from llm_fp8.observability.provenance import collect_provenance, run_record
from llm_fp8.observability.reporter import RunReporter
from llm_fp8.observability.step_stats import own_steps
from llm_fp8.optim.schedule import build_scheduler, effective_warmup_steps
from llm_fp8.precision.coverage import Fp8Coverage
from llm_fp8.precision.plan import resolve_precision
from llm_fp8.tools.predict.after_run import describe_comparison, run_prediction
from llm_fp8.train.callbacks import RunHooks
from llm_fp8.train.exact_match import ExactMatchEvaluation, encode_problems
from llm_fp8.train.failures import MemoryUse, explained_failures, out_of_memory_advice
from llm_fp8.train.generate import check_positions
from llm_fp8.train.graceful_stop import GracefulStop
from llm_fp8.train.loop import LoopOptions, Trainer
from llm_fp8.train.machine import gather_facts
from llm_fp8.train.run_dir import check_free_space, is_finished, with_output_dir
from llm_fp8.train.scale_warmup import (
    PASSES,
    prepare_with_scales,
    supervised_tokens_per_process,
    warm_up_delayed_scales,
)
from llm_fp8.train.setup import RunParts
from llm_fp8.train.train_state import RunState, find_checkpoint, run_fingerprint
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.phases import PhaseClock
from llm_fp8.utils.ranks import LaunchRanks

STEPS_BEFORE_PROFILE = 4
"""Steps of a process before the one whose kernels are recorded."""


def run_training(config: Config, idle_fp8_keys: Sequence[str] = (), clock: PhaseClock | None = None) -> int:
    """Train as `config`, which was checked, says; returns the exit code: 0, or the one that stands for the signal that
    stopped the run.

    `idle_fp8_keys` are sentences on what the launcher's fp8_config asked for and nothing here acts on. `clock` runs
    since the script began, so that its first phase is what was imported.
    """
    started = time.time()
    clock = clock or PhaseClock()
    clock.end("imports")
    quiet_libraries()
    ranks = LaunchRanks.from_environment(os.environ)
    if ranks.rank == 0:
        for sentence in idle_fp8_keys:
            print(f"WARNING: {sentence}", flush=True)
    config = with_output_dir(config, ranks)
    start_process_group(ranks)
    device = own_device()
    source = resolve_source(config.model)
    hf_config = load_config(config.model, source)
    plan = resolve_precision(config.precision, device)
    mode = choose_mode(config, ranks, lambda: count_parameters(hf_config), smallest_gpu_gib(device))
    check_machine(config, gather_facts(config, hf_config, device, ranks, plan, mode.mode))
    accelerator = build_accelerator(config, ranks, plan)
    run = Run(config, hf_config, accelerator, ranks, plan, mode)
    run.idle_fp8_keys = list(idle_fp8_keys)
    clock.end("devices")
    with explained_failures(run.folder, run.out_of_memory_advice):
        code = run.execute(source, started, clock)
    del run
    end_process_group(accelerator)
    return code


def first_step(loader: TrainLoader) -> list[Batch]:
    """The micro-batches of the first step that `loader` will give, which it will give again."""
    position = loader.state_dict()
    batches = next(iter(loader))
    loader.load_state_dict(position)
    return batches


class Run(RunParts):
    """A run: its parts, and what is done with them, in order."""

    def execute(self, source: ModelSource, started: float, clock: PhaseClock) -> int:
        """Everything, in order; returns the exit code."""
        config, hf_config, accelerator, self.clock = self.config, self.hf_config, self.accelerator, clock
        set_seed(config.optim.seed)
        self.choose_strategy()
        self.describe_precision()
        tokenizer, note = load_tokenizer(config.model, source)
        if note:
            self.say(note)
        check_model(config, hf_config, tokenizer)
        context_size = config.parallel.context_parallel_size
        self.context = ContextGroup.of_rank(context_size, accelerator.process_index)
        self.fingerprint = run_fingerprint(config, self.plan, self.engine, self.optimizer_kind, hf_config)
        resume_path = find_checkpoint(self.checkpoints, config.run.resume_from, self.fingerprint)
        clock.end("config_and_tokenizer")
        data = prepare_data(
            config,
            tokenizer,
            rank=accelerator.process_index // context_size,
            world_size=accelerator.num_processes // context_size,
            pin_memory=self.device.type == "cuda",
            main_process_first=accelerator.local_main_process_first,
            split_batch=self.context.split if context_size > 1 else None,
        )
        self.say(data.describe())
        self._check_evaluation(data)
        if data.problems:
            prompts = encode_problems(data.problems, tokenizer)
            check_positions(prompts, hf_config, config.run.eval_max_new_tokens, "--eval_max_new_tokens")
        clock.end("data")
        export_dtype = stored_dtype(hf_config, default=self.parameter_dtype)  # building the model changes the entry
        model, training_model, loaded, census = self.build_model(source, hf_config)
        self._choose_export(loaded)
        clock.end("weights")
        self._parity_check(model, data, loaded and resume_path is None)
        clock.end("parity")
        self.context = self.context.connected(self.device.type)
        self.context.attach(decoder_layers(model))
        if config.run.export and accelerator.is_main_process:
            check_free_space(self.folder, export_size_bytes(model, export_dtype, adapters_only=self.exports_adapter))
        trainer = self._build_trainer(model, training_model, data, census, resume_path, hf_config)
        exact_match = self._exact_match(model, tokenizer, data, export_dtype, trainer)
        clock.end("optimizer")
        # From here on there is something to save: before, a signal ends the process at once.
        with GracefulStop() as stop, trainer.reporter:
            self._record_run(source, model, data, census, trainer)
            self.say(f"training {trainer.options.total_steps} steps on {self._device_name()}, results in {self.folder}")
            hooks = RunHooks(self, self.state, trainer, data, exact_match)
            if self.device.type == "cuda":
                self.resident_gib = torch.cuda.memory_allocated(self.device) / GIB
            clock.end("records")
            try:
                trainer.train(hooks, stop.agreed)
            finally:
                self.state.finish_save()
            if trainer.step < trainer.options.total_steps:
                stopped = {"stopped_by": stop.requested, "checkpoint": str(trainer.last_checkpoint)}
                trainer.reporter.finish({**self._summary(census, trainer, None, started), **stopped})
                self.say(f"stopped by {stop.requested}; continue with --resume_from latest --output_dir {self.folder}")
                return stop.exit_code
            trainer.require_finite_weights()
            hooks.evaluate(trainer.step)
            exported = self._export(model, tokenizer, source, trainer, export_dtype) if config.run.export else None
            summary = trainer.reporter.finish(self._summary(census, trainer, exported, started))
            self._closing_words(summary, exported)
        return 0

    def _build_trainer(
        self,
        model: PreTrainedModel,
        training_model: TrainingModel,
        data: PreparedData,
        census: Fp8Coverage,
        resume_path: Path | None,
        hf_config: PretrainedConfig,
    ) -> Trainer:
        config, accelerator = self.config, self.accelerator
        optimizer = self.engine.build_optimizer(config.optim, self.optimizer_kind, training_model.named_parameters())
        self.num_parameters = sum(parameter.numel() for parameter in training_model.parameters())
        self.num_trainable_parameters = sum(p.numel() for p in training_model.parameters() if p.requires_grad)
        if self.num_trainable_parameters < self.num_parameters:
            share = self.num_trainable_parameters / self.num_parameters
            self.say(
                f"trainable parameters: {self.num_trainable_parameters:,} of {self.num_parameters:,} ({share:.2%})"
            )
        num_adapters = num_adapter_parameters(model)
        prepared, optimizer = prepare_with_scales(
            self.engine,
            training_model,
            optimizer,
            lambda: self._warm_up_delayed_scales(training_model, data, resumed=resume_path is not None),
        )
        self.state = RunState(
            accelerator,
            self.checkpoints,
            self.precision,
            self.fingerprint,
            model,
            data,
            self.engine,
            background=config.parallel.async_save,
        )
        total_steps = self._total_steps(data)
        step = tokens_seen = 0
        if resume_path is not None:
            step, tokens_seen = self.state.restore(resume_path, optimizer)
            self.say(f"resumed from {resume_path} after step {step}")
            if step > total_steps or (step == total_steps and is_finished(self.folder, step)):
                raise UserError(
                    f"--resume_from {resume_path}: it has {step} steps behind it, and the run that was asked for has "
                    f"{total_steps}; raise --max_steps or --num_epochs to train on."
                )
        return Trainer(
            accelerator=accelerator,
            engine=self.engine,
            model=prepared,
            precision=self.precision,
            optimizer=optimizer,
            scheduler=build_scheduler(optimizer, config.optim, total_steps, step),
            loader=data.train,
            reporter=RunReporter(accelerator, config, total_steps, step),
            options=LoopOptions(
                total_steps=total_steps,
                max_grad_norm=config.optim.max_grad_norm,
                log_every=config.run.log_every,
                eval_every=config.run.eval_every if data.eval is not None else 0,
                save_every=config.run.save_every,
                empty_cache_every=config.parallel.empty_cache_freq,
                profile_step=self._profile_step(step, total_steps),
            ),
            size=decoder_size(hf_config, num_adapters),
            peak=device_peak_tflops(self.device),
            fp8_linear_flop_share=census.fp8_linear_flop_share,
            step=step,
            tokens_seen=tokens_seen,
            last_checkpoint=resume_path,
        )

    def _warm_up_delayed_scales(self, training_model: TrainingModel, data: PreparedData, resumed: bool) -> None:
        if resumed or not self.precision.scales_lag:
            return
        batches = first_step(data.train)
        num_supervised = supervised_tokens_per_process(self.accelerator, batches)
        warm_up_delayed_scales(training_model, self.precision, batches[0].to(self.device), num_supervised)
        self.say(
            f"delayed scaling: first scales from {PASSES} passes over the first micro-batch, whose gradients are "
            "dropped"
        )

    def _profile_step(self, completed: int, total_steps: int) -> int:
        """The step to record: soon, but where there are enough behind the first ones, which compile and allocate."""
        if not self.certifies:
            return 0
        return min(completed + STEPS_BEFORE_PROFILE + 1, total_steps)

    def _check_evaluation(self, data: PreparedData) -> None:
        options = self.config.run
        for name in ("eval_every", "eval_batches", "eval_exact_match"):
            value = getattr(options, name)
            if data.eval is None and value:
                raise UserError(
                    f"--{name} {value} has no effect, because no row is held out to evaluate on; raise "
                    "--validation_fraction or drop it."
                )

    def _exact_match(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        data: PreparedData,
        export_dtype: torch.dtype,
        trainer: Trainer,
    ) -> ExactMatchEvaluation | None:
        """What --eval_exact_match asks for; None without it."""
        if not data.problems:
            return None
        return ExactMatchEvaluation(
            self.accelerator,
            model,
            tokenizer,
            data.problems,
            self.engine.full_tensor,
            export_dtype,
            self.config.run.eval_max_new_tokens,
            self.folder,
            warn=trainer.reporter.print,
        )

    def _total_steps(self, data: PreparedData) -> int:
        """Optimizer steps of the whole run."""
        options = self.config.optim
        if options.max_steps is not None:
            return options.max_steps
        assert data.train.steps_per_epoch is not None  # checked with the options: streaming needs --max_steps
        return data.train.steps_per_epoch * options.num_epochs

    def _choose_export(self, loaded: bool) -> None:
        """Whether final/ will hold an adapter; one to random weights would be of use to nobody."""
        options = self.config.lora
        self.exports_adapter = options.lora_rank > 0 and loaded and not options.lora_merge
        if self.config.run.export and options.lora_rank and not loaded and not options.lora_merge:
            self.say(
                "final/ will hold the merged model, as with --lora_merge: the frozen weights are random and are kept "
                "nowhere else"
            )

    # --- gates, records, words
    # ------------------------------------------------------------------------------------------

    def _parity_check(self, model: PreTrainedModel, data: PreparedData, default: bool) -> None:
        wanted = self.config.model.parity_check
        if not self.config.model.use_te or not (default if wanted is None else wanted):
            return
        batch = self.context.on_its_own(first_step(data.train)[0])
        report = check_parity(
            model,
            batch.to(self.device),
            self.config.data.max_seq_length // self.context.size,
            dtype=self.plan.compute_dtype if self.engine.shards_parameters else self.weight_dtype,
            full_tensor=self.engine.full_tensor,
        )
        self.say(report.describe())

    def _precision_record(self, census: Fp8Coverage) -> dict[str, Any]:
        return {
            **self.plan.to_dict(),
            "census": census.to_dict(),
            "optimizer": self.optimizer_kind,
            "parameter_dtype": str(self.parameter_dtype),
            **({"idle_fp8_config_keys": self.idle_fp8_keys} if self.idle_fp8_keys else {}),
        }

    def _effective_settings(self, data: PreparedData, trainer: Trainer) -> dict[str, Any]:
        """What the options that were left to the program came to; precision and optimizer have a section of their
        own.
        """
        return {
            "packing": self.config.packing,
            "attn_implementation": self.attention_implementation,
            **self.parallel_record(),
            "global_batch_size": data.train.global_batch_size,
            "tokens_per_step": data.train.global_batch_size * self.config.data.max_seq_length,
            "num_warmup_steps": effective_warmup_steps(self.config.optim.num_warmup_steps, trainer.options.total_steps),
            "total_steps": trainer.options.total_steps,
        }

    def _record_run(
        self, source: ModelSource, model: PreTrainedModel, data: PreparedData, census: Fp8Coverage, trainer: Trainer
    ) -> None:
        """Write run.json and start the trackers with it.

        A run that is resumed in its folder keeps what its beginning wrote and adds an entry to `resumes`.
        """
        if not self.accelerator.is_main_process:
            return
        record = run_record(
            self.config,
            collect_provenance(sys.argv),
            self._precision_record(census),
            effective=self._effective_settings(data, trainer),
            resumed_after_step=trainer.step,
            model={
                "location": source.location,
                "num_parameters": self.num_parameters,
                "num_trainable_parameters": self.num_trainable_parameters,
                "config": model.config.to_dict(),
            },
            data=data.report.to_dict(),
        )
        path = self.folder / "run.json"
        if trainer.step > 0 and path.exists():
            first = json.loads(path.read_text())
            resume = {section: value for section, value in record.items() if section not in ("model", "data")}
            write_json_atomic(path, {**first, "resumes": [*first.get("resumes", []), resume]})
        else:
            write_json_atomic(path, record)
        trainer.reporter.start_trackers(record)

    def _device_name(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "the CPU"
        return name if self.accelerator.num_processes == 1 else f"{self.accelerator.num_processes} x {name}"

    def _export(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        source: ModelSource,
        trainer: Trainer,
        dtype: torch.dtype,
    ) -> Path:
        folder = self.folder / "final"
        card = {
            "base model": source.name,
            "dataset": self.config.data.dataset_name,
            "precision": self.plan.name,
            "optimizer steps": trainer.step,
            "tokens": trainer.tokens_seen,
            "learning rate": self.config.optim.learning_rate,
            "row length": self.config.data.max_seq_length,
        }
        if self.config.lora.lora_rank:
            card["LoRA"] = (
                f"rank {self.config.lora.lora_rank}, scaling {scaling_of(self.config.lora):g}, "
                f"{self.config.lora.lora_targets}"
            )
        shared: dict[str, Any] = {
            "card": card,
            "full_tensor": self.engine.full_tensor,
            "is_main": self.accelerator.is_main_process,
        }
        if self.exports_adapter:
            export_adapter(model, tokenizer, folder, options=self.config.lora, base_model=source.location, **shared)
        else:
            export_hf(model, tokenizer, folder, dtype=dtype, **shared)
        return folder

    def _summary(self, census: Fp8Coverage, trainer: Trainer, exported: Path | None, started: float) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda" or self.recorded is not None
        steps = own_steps(self.folder / "metrics.jsonl") if on_gpu and self.accelerator.is_main_process else []
        return {
            "precision": self._precision_record(census),
            "recipe_inside_modules": self.precision.seen_inside,
            "attention_backend": self.attention_backend,
            **self.parallel_record(),
            "recorded_step": None if self.recorded is None else self.recorded.to_dict(),
            "gpu_waiting": None if self.recorded is None else gpu_idle(self.recorded, steps),
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
            "tokens_seen": trainer.tokens_seen,
            "num_parameters": self.num_parameters,
            "num_trainable_parameters": self.num_trainable_parameters,
            "no_energy_because": trainer.energy.no_counter,
            "exported": None if exported is None else str(exported),
            "prediction": self._prediction(steps),
            "phases_s": {**self.clock.seconds, "first_step": trainer.first_step_s},
            "wall_time_s": time.time() - started,
        }

    def _prediction(self, steps: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Step time and memory as predicted for this run and as they came out; None where nothing predicts it."""
        if not self.accelerator.is_main_process or self.device.type != "cuda" or self.config.lora.lora_rank:
            return None
        return run_prediction(
            self.config,
            self.hf_config,
            self.plan.effective_scenario or self.plan.effective,
            self.optimizer_kind,
            self.engine.mode,
            self.accelerator.num_processes,
            torch.cuda.get_device_name(self.device),
            steps,
        )

    def _closing_words(self, summary: dict[str, Any], exported: Path | None) -> None:
        self.say(f"done: {summary['steps']} steps in {summary['wall_time_s']:.0f} s, precision {self.plan.name}")
        if summary["prediction"] is not None:
            self.say(describe_comparison(summary["prediction"]))
        if waits := describe_gpu_idle(summary["gpu_waiting"], self.accelerator.num_processes):
            self.say(waits)
        if self.certificate is not None:
            self.say(self.certificate.describe())
        elif self.certifies:
            self.say("certificate: none, because this process trained no step that could be recorded")
        self.say(f"  figures of every step   {self.folder / 'metrics.jsonl'}")
        self.say(f"  configuration, versions {self.folder / 'run.json'}")
        self.say(f"  summary                 {self.folder / 'summary.json'}")
        if exported is not None:
            self.say(f"  {'PEFT adapter           ' if self.exports_adapter else 'Hugging Face checkpoint'} {exported}")

    def out_of_memory_advice(self) -> str:
        """What to say when the GPU's memory was not enough."""
        num_parameters = count_parameters(self.hf_config)
        use = MemoryUse(
            total_gib=torch.cuda.get_device_properties(self.device).total_memory / GIB,
            peak_gib=torch.cuda.max_memory_allocated(self.device) / GIB,
            resident_gib=self.resident_gib,
        )
        return out_of_memory_advice(
            self.config, self.optimizer_kind, num_parameters, use, self.engine.mode, self.engine.num_shards
        )
