"""Builds a run by the run's own code on full sequences of random tokens and measures its steps, each in one way:

warm-up steps      nothing is measured: kernels compile, scales and the allocator settle
unwatched steps    their time
unwatched steps    their peak of memory, from an allocator that caches nothing from before
one step           the operands of every GEMM
one step           the memory at marks through the step
one step           its kernels
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import te_llama
from llm_fp8.config.options import Config, ModelConfig, RunConfig
from llm_fp8.config.validation import check_machine
from llm_fp8.data.collate import Batch
from llm_fp8.distributed.process_group import own_device
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.source import check_model, load_config, load_tokenizer, resolve_source
from llm_fp8.observability.kernel_trace import record_kernels
from llm_fp8.observability.metrics import GIB, StepTokens, device_peak_tflops, step_flops
from llm_fp8.precision.plan import describe_device
from llm_fp8.tools.bench.ours import OurTraining
from llm_fp8.tools.bench.workload import Workload, in_rows
from llm_fp8.tools.diagnose.bottlenecks import StepMeasurements, StepTime, step_time
from llm_fp8.tools.diagnose.gemm_operands import GemmRecorder, ModuleGemms, te_gemm_owners
from llm_fp8.tools.diagnose.memory import cuda_meter, divide_peak, known_bytes, memory_marks
from llm_fp8.tools.diagnose.result import (
    findings,
    left_out_problems,
    memory_findings,
    precision_problems,
    time_findings,
)
from llm_fp8.tools.diagnose.static_report import diagnose_without_gpu
from llm_fp8.tools.gemm_rates import MeasuredRates, measure_rates
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.hf_internals import chosen_attention
from llm_fp8.utils.torch_internals import uncompiled

NUM_WARMUP_STEPS = 4
NUM_TIMED_STEPS = 7
"""The median: the first step starts with an empty queue of launches."""
NUM_MEMORY_STEPS = 2


def diagnose(config: Config, trace: Path | None = None) -> dict[str, Any]:
    """Diagnose the run that `config`, which was checked, describes; without a GPU what can be said there. `trace`: file
    for the recorded step in Chrome's trace format. Raises `UserError` as the run itself would.
    """
    quiet_libraries()
    if config.lora.lora_rank:
        raise UserError(
            f"--lora_rank {config.lora.lora_rank} is unknown to the diagnosis, whose estimates are those of full "
            "fine-tuning; drop it, or see scripts/lora_study.py."
        )
    source = resolve_source(config.model)
    hf_config = load_config(config.model, source)
    check_model(config, hf_config, load_tokenizer(config.model, source)[0])
    device = own_device()
    if device.type != "cuda":
        check_machine(config, on_gpu=True, mode="single")
        return diagnose_without_gpu(config)
    rates = measure_rates(device)
    gc.collect()
    torch.cuda.empty_cache()
    try:
        return _Session(config, device).diagnose(rates, trace)
    except torch.OutOfMemoryError as error:
        total_gib = torch.cuda.get_device_properties(device).total_memory / GIB
        raise UserError(
            f"the GPU is out of memory: --batch_size {config.data.batch_size} sequences of --max_seq_length "
            f"{config.data.max_seq_length} do not fit, {torch.cuda.max_memory_allocated(device) / GIB:.1f} of "
            f"{total_gib:.1f} GiB were in use. Diagnose with a smaller --batch_size, or with --gradient_checkpointing "
            "or --optimizer adamw_8bit."
        ) from error


class _Session:
    """A built run and what is measured on it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.training = build_training(config)
        self.plan = self.training.precision.plan

    def diagnose(self, rates: MeasuredRates, trace: Path | None) -> dict[str, Any]:
        training, loop, device = self.training, self.training.loop, self.device
        model, precision = training.model, training.precision
        training.take(NUM_WARMUP_STEPS)
        training.take(NUM_TIMED_STEPS)
        step_s = statistics.median(training.recorder.step_times_s[-NUM_TIMED_STEPS:])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        training.take(NUM_MEMORY_STEPS)
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        modules = self._gemms()
        layers, meter = decoder_layers(model), cuda_meter(device)
        with memory_marks(loop.model, model.base_model, layers, loop.optimizer, device, meter) as marks:
            training.take(1)
        with record_kernels() as recorded:
            training.take(1)
        step = step_time(recorded, step_s)
        if trace is not None:
            recorded.export_chrome_trace(str(trace))
        attention = self._attention(step)
        names = [name for name, module in model.named_modules() if module in precision.fp8_modules]
        return findings(
            self.config,
            describe_device(device),
            self.plan,
            training.coverage,
            notes=self._notes(),
            problems=[
                *precision_problems(self.plan, modules, names, precision.recipe_inside_modules),
                *(left_out_problems(training.coverage) if self.plan.effective == "fp8" else []),
                *(["attention runs unfused"] if attention == "unfused" else []),
            ],
            attention=attention,
            modules=modules,
            time=time_findings(self._facts(step, rates, attention)),
            memory=memory_findings(*divide_peak(marks), peak, reserved),
        )

    def _gemms(self) -> list[ModuleGemms]:
        model = self.training.model
        recorder = GemmRecorder(model)
        with recorder.recording(te_gemm_owners()), uncompiled(decoder_layers(model)):
            self.training.take(1)
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is head)
        recorder.note_lm_head(name, self.plan.compute_dtype)
        return recorder.modules()

    def _attention(self, step: StepTime) -> str | None:
        """What attention runs on; 'unfused' for several kernels."""
        if self.config.model.use_te:
            return te_llama.attention_backend()
        return chosen_attention(self.training.model.config) if step.has_fused_attention else "unfused"

    def _facts(self, step: StepTime, rates: MeasuredRates, attention: str | None) -> StepMeasurements:
        training, config = self.training, self.config
        trainer, coverage = training.loop, training.coverage
        num_micro_batches = config.optim.gradient_accumulation_steps
        num_tokens = num_micro_batches * config.data.batch_size * config.data.max_seq_length
        tokens = StepTokens(num_tokens, num_tokens, num_tokens, num_tokens * config.data.max_seq_length)
        linear_flops = 6.0 * trainer.size.num_linear_parameters * num_tokens
        layers = decoder_layers(training.model)
        options = config.model
        recomputed = layers[:: options.gradient_checkpointing] if options.gradient_checkpointing else ()
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        accumulation = trainer.strategy.wgrad_accumulation
        added_by_gemms = set() if accumulation is None else {id(weight) for weight in accumulation.weights()}
        known = known_bytes(trainer.model, trainer.optimizer, self.device)
        return StepMeasurements(
            time=step,
            rates=rates,
            peak=device_peak_tflops(self.device),
            num_fp8_weights=coverage.num_fp8_weights,
            num_bf16_weights=coverage.num_linear_weights - coverage.num_fp8_weights - coverage.num_head_weights,
            num_head_weights=coverage.num_head_weights,
            num_tokens=num_tokens,
            num_micro_batches=num_micro_batches,
            attention_flops=step_flops(trainer.size, tokens) - linear_flops,
            recomputed_share=len(recomputed) / len(layers),
            weight_bytes=known["weights"],
            gradient_bytes=sum(p.nbytes for p in trained),
            added_gradient_bytes=sum(p.nbytes for p in trained if id(p) not in added_by_gemms),
            optimizer_bytes=known["optimizer_state"],
            scenario=self.plan.effective_scenario,
            use_te=config.model.use_te,
            attention=attention,
            compiled=self.plan.backend == "torchao",
        )

    def _notes(self) -> list[str]:
        notes = ["sequences are full of random tokens, one document each"]
        if not self.config.packing:
            notes.append(
                "without --packing sequences of real data are padded, which costs time that this does not show: see "
                "packing_efficiency in metrics.jsonl"
            )
        if self.plan.backend == "torchao":
            notes.append("operands are of a step without torch.compile, whose time and memory are in no other figure")
        if self.config.optim.gradient_accumulation_steps == 1 and self.plan.effective == "fp8":
            notes.append(
                "a step of one micro-batch keeps no casts of weights; those that wait for the backward pass count as "
                "activations"
            )
        return notes


@dataclass(frozen=True)
class ConfiguredWorkload(Workload):
    """The steps of a configuration, with its model."""

    options: Config

    @property
    def model_options(self) -> ModelConfig:
        return self.options.model

    def batches(self, vocab_size: int, reader: int = 0) -> list[Batch]:
        """As in `Workload`; without packing as [B, S], where nothing is padding."""
        batches = super().batches(vocab_size, reader)
        if self.options.packing:
            return batches
        return [in_rows(batch, self.batch_size, num_real=self.seq_length) for batch in batches]


def build_training(config: Config) -> OurTraining:
    """The run of `config`, built; it trains on random tokens, writes nothing and sends nothing to a tracker."""
    work = ConfiguredWorkload(
        model=config.model.model_name,
        batch_size=config.data.batch_size,
        seq_length=config.data.max_seq_length,
        micro_batches=config.optim.gradient_accumulation_steps,
        num_steps=0,
        options=config,
    )
    return OurTraining(work, dataclasses.replace(config, run=RunConfig(output_dir=os.devnull)))
