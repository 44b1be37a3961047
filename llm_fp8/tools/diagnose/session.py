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
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

import te_llama
from llm_fp8.config.options import Config, ModelConfig, RunConfig
from llm_fp8.config.validation import MachineFacts, check_machine
from llm_fp8.data.collate import Batch
from llm_fp8.distributed.process_group import own_device
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.source import check_model, load_config, load_tokenizer, resolve_source
from llm_fp8.observability.kernel_trace import record_kernels
from llm_fp8.observability.metrics import GIB, StepTokens, device_peak_tflops, step_flops
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.precision.plan import describe_device
from llm_fp8.tools.bench.ours import OurTraining
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.tools.diagnose.bottlenecks import StepMeasurements
from llm_fp8.tools.diagnose.gemm_operands import GemmRecorder, ModuleGemms, group_layers, te_gemm_owners
from llm_fp8.tools.diagnose.memory import MemoryProbe, cuda_meter, divide_peak, known_bytes
from llm_fp8.tools.diagnose.result import (
    Diagnosis,
    MemoryFindings,
    TimeFindings,
    attention_problems,
    left_out_problems,
    precision_problems,
    reasons_outside_fp8,
)
from llm_fp8.tools.diagnose.static_report import diagnose_without_gpu
from llm_fp8.tools.diagnose.step_time import StepTime, step_time
from llm_fp8.tools.gemm_rates import MeasuredRates, measure_rates
from llm_fp8.train.machine import model_facts
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.hf_internals import chosen_attention
from llm_fp8.utils.torch_internals import uncompiled

NUM_TIMED_STEPS = 7
"""The median: the first step starts with an empty queue of launches."""
NUM_MEMORY_STEPS = 2


def diagnose(config: Config, num_warmup_steps: int, trace: Path | None = None) -> Diagnosis:
    """Diagnose the run that `config`, which was checked, describes; without a GPU what can be said there.

    `trace` is where the recorded step is kept in Chrome's trace format. Raises `UserError` as the run itself would.
    """
    quiet_libraries()
    if config.lora.lora_rank:
        raise UserError(
            f"--lora_rank {config.lora.lora_rank} is unknown to the diagnosis, whose estimates are those of full "
            "fine-tuning; drop it, or see scripts/lora_study.py."
        )
    hf_config = _checked_model(config)
    device = own_device()
    if device.type != "cuda":
        check_machine(config, MachineFacts(model=model_facts(config, hf_config)))
        return diagnose_without_gpu(config)
    rates = measure_rates(device)
    gc.collect()
    torch.cuda.empty_cache()
    try:
        return _Session(config, device).diagnose(rates, num_warmup_steps, trace)
    except torch.OutOfMemoryError as error:
        raise UserError(_too_little_memory(config, device)) from error


def _checked_model(config: Config) -> PretrainedConfig:
    """The model's config. Raises `UserError` where the run would refuse it."""
    source = resolve_source(config.model)
    hf_config = load_config(config.model, source)
    check_model(config, hf_config, load_tokenizer(config.model, source)[0])
    return hf_config


def _too_little_memory(config: Config, device: torch.device) -> str:
    total, peak = (
        torch.cuda.get_device_properties(device).total_memory / GIB,
        torch.cuda.max_memory_allocated(device) / GIB,
    )
    return (
        f"the GPU is out of memory: --batch_size {config.data.batch_size} rows of --max_seq_length "
        f"{config.data.max_seq_length} do not fit, {peak:.1f} of {total:.1f} GiB were in use. Diagnose with a smaller "
        "--batch_size, or with --gradient_checkpointing or --optimizer adamw_8bit."
    )


class _Session:
    """A built run and what is measured on it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.training = OurTraining(ConfiguredWorkload.of(config), without_output(config))
        self.plan = self.training.precision.plan

    def diagnose(self, rates: MeasuredRates, num_warmup_steps: int, trace: Path | None) -> Diagnosis:
        training, config = self.training, self.config
        training.take(num_warmup_steps)
        step_s = self._timed()
        unwatched_peak, reserved = self._unwatched_memory()
        modules = self._gemms()
        at_peak = divide_peak(self._watched_memory().marks)
        with record_kernels() as recorded:
            training.take(1)
        step = step_time(recorded, step_s)
        if trace is not None:
            recorded.export_chrome_trace(str(trace))
        attention = self._attention(step)
        facts = self._facts(step, rates, attention)
        names = [name for name, module in training.model.named_modules() if module in training.precision.fp8_modules]
        return Diagnosis(
            config=config.to_dict(),
            provenance=collect_provenance(sys.argv),
            device=describe_device(self.device),
            precision=self.plan.to_dict(),
            coverage=training.coverage,
            outside_fp8=reasons_outside_fp8(training.coverage, config.precision, self.plan),
            groups=group_layers(modules),
            modules=modules,
            attention=attention,
            time=TimeFindings.of(facts),
            memory=MemoryFindings(at_peak, unwatched_peak, reserved),
            problems=[
                *precision_problems(self.plan, modules, names, training.precision.recipe_inside_modules),
                *(left_out_problems(training.coverage) if self.plan.effective == "fp8" else []),
                *attention_problems(attention),
            ],
            notes=self._notes(),
        )

    def _timed(self) -> float:
        self.training.take(NUM_TIMED_STEPS)
        return statistics.median(self.training.recorder.step_times_s[-NUM_TIMED_STEPS:])

    def _unwatched_memory(self) -> tuple[int, int]:
        """The peaks of allocated and reserved memory in bytes."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.training.take(NUM_MEMORY_STEPS)
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def _gemms(self) -> list[ModuleGemms]:
        recorder = GemmRecorder(self.training.model)
        with recorder.recording(te_gemm_owners()), uncompiled(decoder_layers(self.training.model)):
            self.training.take(1)
        head = self.training.model.get_output_embeddings()
        name = next(name for name, module in self.training.model.named_modules() if module is head)
        recorder.note_lm_head(name, self.plan.compute_dtype, num_fp8_gemms=self._num_fp8_lm_head_gemms())
        return recorder.modules()

    def _watched_memory(self) -> MemoryProbe:
        trainer, model = self.training.loop, self.training.model
        probe = MemoryProbe(
            trainer.model,
            model.base_model,
            decoder_layers(model),
            trainer.optimizer,
            self.device,
            cuda_meter(self.device),
        )
        with probe.watching():
            self.training.take(1)
        return probe

    def _attention(self, step: StepTime) -> str | None:
        """What attention runs on; 'unfused' for several kernels."""
        if self.config.model.use_te:
            return te_llama.attention_backend(self.training.model)
        return chosen_attention(self.training.model.config) if step.has_fused_attention else "unfused"

    def _facts(self, step: StepTime, rates: MeasuredRates, attention: str | None) -> StepMeasurements:
        training, config = self.training, self.config
        trainer, coverage = training.loop, training.coverage
        head = training.model.get_output_embeddings().weight.numel()
        num_micro_batches = config.optim.gradient_accumulation_steps
        num_tokens = num_micro_batches * config.data.batch_size * config.data.max_seq_length
        tokens = StepTokens(num_tokens, num_tokens, num_tokens, num_tokens * config.data.max_seq_length)
        linear_flops = 6.0 * trainer.size.num_linear_parameters * num_tokens
        layers = decoder_layers(training.model)
        recomputed = (
            len(layers[:: config.model.gradient_checkpointing_every]) if config.model.gradient_checkpointing else 0
        )
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        accumulation = trainer.strategy.wgrad_accumulation
        added_by_gemms = set() if accumulation is None else {id(weight) for weight in accumulation.weights()}
        known = known_bytes(trainer.model, trainer.optimizer, self.device)
        return StepMeasurements(
            time=step,
            rates=rates,
            peak=device_peak_tflops(self.device),
            num_fp8_weights=coverage.num_fp8_weights,
            num_bf16_weights=coverage.num_linear_weights - coverage.num_fp8_weights - head,
            num_head_weights=head,
            num_tokens=num_tokens,
            num_micro_batches=num_micro_batches,
            attention_flops=step_flops(trainer.size, tokens) - linear_flops,
            recomputed_share=recomputed / len(layers),
            weight_bytes=known["weights"],
            gradient_bytes=sum(p.nbytes for p in trained),
            added_gradient_bytes=sum(p.nbytes for p in trained if id(p) not in added_by_gemms),
            optimizer_bytes=known["optimizer_state"],
            scenario=self.plan.effective_scenario,
            use_te=config.model.use_te,
            attention=attention,
            num_fp8_lm_head_gemms=self._num_fp8_lm_head_gemms(),
            compiled=self.plan.backend == "torchao",
        )

    def _num_fp8_lm_head_gemms(self) -> int:
        return sum(self.training.precision.lm_head_gemms({}).values())

    def _notes(self) -> list[str]:
        notes = ["rows are full of random tokens, one document each"]
        if not self.config.packing:
            notes.append(
                "without --packing rows of real data are padded, which costs time that this does not show: see "
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

    options: ModelConfig
    packing: bool

    @classmethod
    def of(cls, config: Config) -> ConfiguredWorkload:
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
        return self.options

    def batches(self, vocab_size: int, reader: int = 0) -> list[Batch]:
        """As in `Workload`; without packing as [B, S], where nothing is padding."""
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
