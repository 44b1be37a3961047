"""A whole run, from configuration to exported model: builds the parts, resumes, trains, evaluates, exports, sums up."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import te_llama
from llm_fp8.certificate import Certificate, Promise, attention_library, certify, worst
from llm_fp8.checkpoint import CheckpointManager
from llm_fp8.config import Config, check_config
from llm_fp8.data import PreparedData, prepare_data
from llm_fp8.data.collate import Batch
from llm_fp8.data.loader import TrainLoader
from llm_fp8.errors import FailedCheck, UserError
from llm_fp8.evaluate import evaluate_loss
from llm_fp8.exact_match import ExactMatchEvaluation, encode_problems
from llm_fp8.export import export_hf
from llm_fp8.failures import explained_failures
from llm_fp8.generation import check_positions
from llm_fp8.json_files import write_json_atomic
from llm_fp8.launch_env import apply_launch_settings
from llm_fp8.loop import LoopOptions, Trainer
from llm_fp8.memory import MemoryUse, out_of_memory_advice
from llm_fp8.metrics import GIB, DecoderSize, device_peak_tflops
from llm_fp8.models import (
    ModelSource,
    build_model,
    build_structure,
    check_model,
    count_parameters,
    decoder_layers,
    fill_sharded,
    load_config,
    load_tokenizer,
    require_te_decoder,
    resolve_source,
    stored_dtype,
)
from llm_fp8.optim import build_scheduler, effective_warmup_steps
from llm_fp8.output_folder import check_free_space, is_finished, with_output_dir
from llm_fp8.parallel.build import build_accelerator, build_engine
from llm_fp8.parallel.choice import check_mode, choose_mode
from llm_fp8.parallel.context import ContextGroup, check_context_parallel
from llm_fp8.parallel.fsdp import FsdpEngine
from llm_fp8.parallel.profile import StepProfile
from llm_fp8.parity import check_parity
from llm_fp8.precision import Precision, PrecisionPlan, resolve_precision
from llm_fp8.predict.prediction import describe_comparison
from llm_fp8.predict.run_outcome import run_prediction
from llm_fp8.process_group import end_process_group, own_device, start_process_group
from llm_fp8.provenance import collect_provenance, run_record
from llm_fp8.ranks import LaunchRanks
from llm_fp8.recompute import enable_gradient_checkpointing
from llm_fp8.report import RunReporter, check_trackers
from llm_fp8.run_state import RunState, find_checkpoint, run_fingerprint
from llm_fp8.signals import GracefulStop
from llm_fp8.swap import Census, swap_linears, take_census
from llm_fp8.training_model import TrainingModel

STEPS_BEFORE_PROFILE = 4
"""Steps of a process before the one whose kernels are recorded."""


def run_training(config: Config) -> int:
    """Train as `config` says; returns the exit code: 0, or the one that stands for the signal that stopped the run."""
    started = time.time()
    quiet_libraries()
    ranks = LaunchRanks.from_environment(os.environ)
    config = apply_launch_settings(config, os.environ)
    check_config(config)
    check_trackers(config)
    config = with_output_dir(config, ranks)
    start_process_group(ranks)
    device = own_device()
    if config.model.use_te:
        require_te_decoder(device)
    plan = resolve_precision(config.precision, device)
    accelerator = build_accelerator(config, ranks, plan)
    run = Run(config, accelerator, ranks, plan)
    with explained_failures(run.folder, run.out_of_memory_advice):
        code = run.execute(started)
    del run
    end_process_group(accelerator)
    return code


def quiet_libraries() -> None:
    """Leave the console to the run's own lines; on a terminal, bars of downloads and of tokenising stay."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def certifies(wanted: bool | None, device: torch.device) -> bool:
    """Whether a run records a step and judges it; `wanted` is --certify."""
    if wanted and device.type != "cuda":
        raise UserError("--certify records the kernels of an NVIDIA GPU and this run has none; drop it.")
    return device.type == "cuda" if wanted is None else wanted


def first_batch(loader: TrainLoader) -> Batch:
    """The first micro-batch that `loader` will give, which it will give again."""
    position = loader.state_dict()
    batches = next(iter(loader))
    loader.load_state_dict(position)
    return batches[0]


class Run:
    """The parts of one run and what is done with them, in order."""

    def __init__(self, config: Config, accelerator: Accelerator, ranks: LaunchRanks, plan: PrecisionPlan) -> None:
        self.config = config
        self.accelerator = accelerator
        self.ranks = ranks
        self.device = accelerator.device
        self.folder = Path(config.run.output_dir or "")
        self.checkpoints = CheckpointManager(self.folder, config.run.save_total_limit, is_main=accelerator.is_main_process)
        self.plan = plan
        self._check_token_multiple()
        self.certifies = certifies(config.run.certify, accelerator.device)
        self.attention_backend: str | None = None
        self.recorded: StepProfile | None = None
        self.certificate: Certificate | None = None
        self.resident_gib = 0.0

    def say(self, text: str) -> None:
        """Print on the main process."""
        if self.accelerator.is_main_process:
            print(text, flush=True)

    def _check_token_multiple(self) -> None:
        multiple = self.plan.token_multiple
        data = self.config.data
        tokens = data.batch_size * data.max_seq_length
        if tokens % multiple:
            raise UserError(
                f"--fp8_scenario {self.plan.effective_scenario} needs a multiple of {multiple} tokens in a micro-batch, and --batch_size {data.batch_size} times "
                f"--max_seq_length {data.max_seq_length} is {tokens}; choose a --max_seq_length that is a multiple of {multiple}."
            )

    def _choose_engine(self) -> None:
        """--sharding_mode and --optimizer for this run."""
        config, plan = self.config, self.plan
        choice = choose_mode(config, self.ranks, functools.partial(count_parameters, self.hf_config), self._gpu_memory_gib())
        check_mode(config, choice.mode, self.ranks, plan.compute_name)
        self.engine = build_engine(choice.mode, config, self.accelerator, self.ranks, plan.compute_dtype)
        self.optimizer_kind = self.engine.resolve_optimizer(config.optim.optimizer, plan.compute_dtype)
        self.parameter_dtype = self.engine.parameter_dtype(self.optimizer_kind, plan.compute_dtype)
        if self.ranks.world_size > 1:
            self.say(f"sharding: {choice.mode}{f', because {choice.reason}' if choice.reason else ''}")

    def _gpu_memory_gib(self) -> float | None:
        """Memory of the smallest GPU of the run; None on CPUs. Collective."""
        if self.device.type != "cuda":
            return None
        total = torch.tensor([torch.cuda.get_device_properties(self.device).total_memory / GIB], device=self.device)
        return float(self.accelerator.gather(total).min())

    # --- building -----------------------------------------------------------------------------------------------------

    def execute(self, started: float) -> int:
        """Everything, in order; returns the exit code."""
        config, accelerator = self.config, self.accelerator
        set_seed(config.optim.seed)
        source = resolve_source(config.model)
        hf_config = self.hf_config = load_config(config.model, source)
        self._choose_engine()
        self._describe_precision()
        tokenizer, note = load_tokenizer(config.model, source)
        if note:
            self.say(note)
        check_model(config, hf_config, tokenizer)
        context_size = config.parallel.context_parallel_size
        self.context = ContextGroup.of_rank(context_size, accelerator.process_index)
        if context_size > 1:
            windows = te_llama.decoder_spec(hf_config).windows
            check_context_parallel(config, windows, self.plan.compute_name, self.plan.token_multiple)
        self.fingerprint = run_fingerprint(config, self.plan, self.engine, self.optimizer_kind, hf_config)
        resume_path = find_checkpoint(self.checkpoints, config.run.resume_from, self.fingerprint)
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
        export_dtype = stored_dtype(hf_config, default=self.parameter_dtype)  # building the model changes the entry
        model, training_model, loaded, census = self._build_model(source, hf_config)
        self._parity_gate(model, data, loaded and resume_path is None)
        self.context = self.context.connected(self.device.type)
        self.context.attach(decoder_layers(model))
        if config.run.export and accelerator.is_main_process:
            check_free_space(self.folder, model, export_dtype)
        trainer = self._build_trainer(model, training_model, data, census, resume_path, hf_config)
        exact_match = self._exact_match(model, tokenizer, data, export_dtype, trainer)
        # From here on there is something to save: before, a signal ends the process at once.
        with GracefulStop() as stop, trainer.reporter:
            self._record_run(source, model, data, census, trainer)
            self.say(f"training {trainer.options.total_steps} steps on {self._device_name()}, results in {self.folder}")
            hooks = RunHooks(self, trainer, data, exact_match)
            if self.device.type == "cuda":
                self.resident_gib = torch.cuda.memory_allocated(self.device) / GIB
            try:
                trainer.train(hooks, stop.agreed)
            finally:
                self.state.finish_save()
            if trainer.step < trainer.options.total_steps:
                trainer.reporter.finish({"stopped_by": stop.requested, "checkpoint": str(trainer.last_checkpoint)})
                self.say(f"stopped by {stop.requested}; continue with --resume_from latest --output_dir {self.folder}")
                return stop.exit_code
            trainer.require_finite_weights()
            hooks.evaluate(trainer.step)
            exported = self._export(model, tokenizer, source, trainer, export_dtype) if config.run.export else None
            summary = trainer.reporter.finish(self._summary(census, trainer, exported, started))
            self._closing_words(summary, exported)
        return 0

    def _describe_precision(self) -> None:
        plan = self.plan
        if plan.fallback_reason:
            self.say(
                f"WARNING: --fp8_scenario {plan.requested_scenario} FELL BACK to {plan.effective_scenario}: {plan.fallback_reason}"
            )
        self.say(
            f"precision: {plan.name} (asked for: {plan.requested}{f' {plan.requested_scenario}' if plan.requested_scenario else ''})"
        )
        self.say(f"optimizer: {self.optimizer_kind}, parameters in {str(self.parameter_dtype).removeprefix('torch.')}")

    def _build_model(
        self, source: ModelSource, hf_config: PretrainedConfig
    ) -> tuple[PreTrainedModel, TrainingModel, bool, Census]:
        """The model, what the loop calls, whether weights were loaded, and the census; the precision seam is attached to it."""
        options, engine, seed = self.config.model, self.engine, self.config.optim.seed
        shared: dict[str, Any] = {
            "parameter_dtype": self.parameter_dtype,
            "compute_dtype": self.plan.compute_dtype,
            "device": self.device,
        }
        loaded = False
        if engine.shards_parameters:
            model = build_structure(options, source, hf_config, **shared)
        else:
            model, loaded = build_model(options, source, hf_config, seed=seed, **shared)
        reasons: dict[str, str] = {}
        if self.plan.recipe is not None and not options.use_te:
            reasons = swap_linears(model)
        self.attention_implementation: str = "te" if options.use_te else model.config._attn_implementation
        layers = decoder_layers(model)
        # FSDP hands modules their parameters in the compute dtype.
        module_dtype = self.plan.compute_dtype if engine.shards_parameters else self.parameter_dtype
        self.precision = Precision(self.plan, self.config.precision, self.device, module_dtype)
        self.precision.attach(model, layers)
        census = take_census(model, self.precision.fp8_modules, self.plan.compute_name, reasons)
        self.say(census.describe())
        recomputed: Sequence[nn.Module] = ()
        if options.gradient_checkpointing:
            uses_te = options.use_te or self.plan.recipe is not None
            recomputed = enable_gradient_checkpointing(
                layers, options.gradient_checkpointing_every, uses_te, reentrant=uses_te and engine.reentrant_te_checkpoints
            )
        self.promise = Promise.of_model(self.precision, census, recomputed)
        training_model = TrainingModel(model, self.config.data.max_seq_length, self.plan.compute_dtype)
        if self.config.parallel.fp8_params:
            assert isinstance(engine, FsdpEngine)  # check_mode saw to it
            engine.keep_in_fp8(self.precision)
        engine.shard(training_model, layers)
        if engine.shards_parameters:
            loaded = fill_sharded(model, options, source, self.device, seed)
        return model, training_model, loaded, census

    def _build_trainer(
        self,
        model: PreTrainedModel,
        training_model: TrainingModel,
        data: PreparedData,
        census: Census,
        resume_path: Path | None,
        hf_config: PretrainedConfig,
    ) -> Trainer:
        config, accelerator = self.config, self.accelerator
        optimizer = self.engine.build_optimizer(config.optim, self.optimizer_kind, training_model.named_parameters())
        self.num_parameters = sum(parameter.numel() for parameter in training_model.parameters())
        prepared, optimizer = self.engine.prepare(training_model, optimizer)
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
                    f"--resume_from {resume_path}: it has {step} steps behind it, and the run that was asked for has {total_steps}; raise "
                    "--max_steps or --num_epochs to train on."
                )
        trainer = Trainer(
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
            size=DecoderSize.from_config(hf_config),
            peak=device_peak_tflops(self.device),
            fp8_linear_flop_share=census.fp8_linear_flop_share,
            step=step,
            tokens_seen=tokens_seen,
            last_checkpoint=resume_path,
        )
        return trainer

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
                    f"--{name} {value} has no effect, because no row is held out to evaluate on; raise --validation_fraction or drop it."
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

    # --- gates, records, words ------------------------------------------------------------------------------------------

    def _parity_gate(self, model: PreTrainedModel, data: PreparedData, default: bool) -> None:
        wanted = self.config.model.parity_check
        if wanted and not self.config.model.use_te:
            raise UserError("--parity_check compares the TE decoder with Hugging Face's and needs --use_te.")
        if not self.config.model.use_te or not (default if wanted is None else wanted):
            return
        batch = self.context.on_its_own(first_batch(data.train))
        report = check_parity(
            model,
            batch.to(self.device),
            self.config.data.max_seq_length // self.context.size,
            dtype=self.plan.compute_dtype if self.engine.shards_parameters else self.parameter_dtype,
            full_tensor=self.engine.full_tensor,
        )
        self.say(report.describe())

    def judge_recorded_step(self, profile: StepProfile, num_micro_batches: int, reporter: RunReporter) -> None:
        """Judge the recorded step and keep the verdict; `FailedCheck` on every rank where any rank's step is not what was asked for."""
        attention = self.attention_backend or self.attention_implementation
        own = certify(
            self.promise,
            profile.kernels,
            self.precision.te_state(),
            num_micro_batches=num_micro_batches,
            recipe_inside_modules=self.precision.seen_inside,
            attention=f"sdpa ({attention_library(profile.kernels)})" if attention == "sdpa" else attention,
        )
        certificate = self.certificate = worst(gather_object([own]))
        path = self.folder / "certificate.json"
        if self.accelerator.is_main_process:
            write_json_atomic(path, certificate.to_dict())
        if certificate.verdict == "failed":
            sentence = certificate.failure(path)
            reporter.finish({"failed": sentence, "certificate": certificate.to_dict(), **self._parallel_record()})
            self.accelerator.wait_for_everyone()  # The launcher ends the others as soon as one is gone.
            raise FailedCheck(sentence)
        if certificate.verdict == "undetermined":
            reporter.print(f"WARNING: this run could not be certified: {'; '.join(certificate.reasons)}. See {path}.")

    def _parallel_record(self) -> dict[str, Any]:
        """How the run is spread over processes, as it came out."""
        return {"sharding_mode": self.engine.mode, "num_processes": self.accelerator.num_processes}

    def _precision_record(self, census: Census) -> dict[str, Any]:
        return {
            **self.plan.to_dict(),
            "census": census.to_dict(),
            "optimizer": self.optimizer_kind,
            "parameter_dtype": str(self.parameter_dtype),
        }

    def _effective_settings(self, data: PreparedData, trainer: Trainer) -> dict[str, Any]:
        """What the options that were left to the program came to; precision and optimizer have a section of their own."""
        return {
            "packing": self.config.packing,
            "attn_implementation": self.attention_implementation,
            **self._parallel_record(),
            "global_batch_size": data.train.global_batch_size,
            "tokens_per_step": data.train.global_batch_size * self.config.data.max_seq_length,
            "num_warmup_steps": effective_warmup_steps(self.config.optim.num_warmup_steps, trainer.options.total_steps),
            "total_steps": trainer.options.total_steps,
        }

    def _record_run(
        self, source: ModelSource, model: PreTrainedModel, data: PreparedData, census: Census, trainer: Trainer
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
            model={"location": source.location, "num_parameters": self.num_parameters, "config": model.config.to_dict()},
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
        export_hf(
            model,
            tokenizer,
            folder,
            dtype=dtype,
            card=card,
            full_tensor=self.engine.full_tensor,
            is_main=self.accelerator.is_main_process,
        )
        return folder

    def _summary(self, census: Census, trainer: Trainer, exported: Path | None, started: float) -> dict[str, Any]:
        return {
            "precision": self._precision_record(census),
            "recipe_inside_modules": self.precision.seen_inside,
            "attention_backend": self.attention_backend,
            **self._parallel_record(),
            "recorded_step": None if self.recorded is None else self.recorded.to_dict(),
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
            "tokens_seen": trainer.tokens_seen,
            "exported": None if exported is None else str(exported),
            "prediction": self._prediction(),
            "wall_time_s": time.time() - started,
        }

    def _prediction(self) -> dict[str, Any] | None:
        """Step time and memory as predicted for this run and as they came out; None where nothing predicts it."""
        if not self.accelerator.is_main_process or self.device.type != "cuda":
            return None
        return run_prediction(
            self.config,
            self.hf_config,
            self.plan.effective_scenario or self.plan.effective,
            self.optimizer_kind,
            self.engine.mode,
            self.accelerator.num_processes,
            torch.cuda.get_device_name(self.device),
            self.folder / "metrics.jsonl",
        )

    def _closing_words(self, summary: dict[str, Any], exported: Path | None) -> None:
        self.say(f"done: {summary['steps']} steps in {summary['wall_time_s']:.0f} s, precision {self.plan.name}")
        if summary["prediction"] is not None:
            self.say(describe_comparison(summary["prediction"]))
        if self.certificate is not None:
            self.say(self.certificate.describe())
        elif self.certifies:
            self.say("certificate: none, because this process trained no step that could be recorded")
        self.say(f"  figures of every step   {self.folder / 'metrics.jsonl'}")
        self.say(f"  configuration, versions {self.folder / 'run.json'}")
        self.say(f"  summary                 {self.folder / 'summary.json'}")
        if exported is not None:
            self.say(f"  Hugging Face checkpoint {exported}")

    def out_of_memory_advice(self) -> str:
        """What to say when the GPU's memory was not enough."""
        num_parameters = count_parameters(self.hf_config)
        use = MemoryUse(
            total_gib=torch.cuda.get_device_properties(self.device).total_memory / GIB,
            peak_gib=torch.cuda.max_memory_allocated(self.device) / GIB,
            resident_gib=self.resident_gib,
        )
        return out_of_memory_advice(
            self.config, self.optimizer_kind, num_parameters, use, self.engine.mode, self.accelerator.num_processes
        )


@dataclasses.dataclass(frozen=True)
class RunHooks:
    """What the loop asks for between steps."""

    run: Run
    trainer: Trainer
    data: PreparedData
    exact_match: ExactMatchEvaluation | None

    def after_first_step(self) -> None:
        """Say which attention kernels run, and warn of the slow ones."""
        if not self.run.config.model.use_te:
            return
        backend = self.run.attention_backend = te_llama.attention_backend()
        if backend == "unfused":
            self.trainer.reporter.print(
                "WARNING: attention runs UNFUSED, several times slower: Transformer Engine found neither a usable cuDNN nor flash-attn for this "
                "model's shapes and dtype. NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 in the environment prints why."
            )
        else:
            self.trainer.reporter.print(f"attention: {backend}")

    def after_profiled_step(self, profile: StepProfile, num_micro_batches: int) -> None:
        """Say and keep what the recorded step showed, and judge it."""
        self.run.recorded = profile
        self.trainer.reporter.print(profile.describe())
        self.run.judge_recorded_step(profile, num_micro_batches, self.trainer.reporter)

    def evaluate(self, step: int) -> None:
        """Held-out loss and, where asked for, exact match, reported."""
        if self.data.eval is None:
            return
        trainer = self.trainer
        figures = evaluate_loss(trainer.accelerator, trainer.model, trainer.precision, self.data.eval)
        if self.exact_match is not None:
            figures |= self.exact_match.evaluate(step)
        trainer.reporter.evaluation({"step": step, **figures})

    def save(self, step: int) -> Path:
        """A checkpoint."""
        path = self.run.state.save(self.trainer)
        self.trainer.reporter.print(f"saving {path} in the background" if self.run.state.background else f"saved {path}")
        return path
