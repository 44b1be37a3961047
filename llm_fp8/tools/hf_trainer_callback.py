"""The certificate for a run of transformers' `Trainer`: add one callback, change nothing else.

    trainer = Trainer(model=..., args=..., train_dataset=..., callbacks=[CertificateCallback()])

It records the kernels of one optimizer step, counts the linear layers that Accelerate replaced by Transformer Engine's
or torchao's, and compares both with what was asked for. The verdict is printed, and kept in certificate.json in the
output folder, with the energy of the training. A failed certificate ends the run with exit code 1. The evidence and its
limits: docs/monitoring.md; TRL, LLaMA-Factory, axolotl: docs/tools.md. A loop without a Trainer calls the same methods.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

import torch
from accelerate import PartialState
from accelerate.utils import extract_model_from_parallel, gather_object
from torch import nn
from tqdm import tqdm
from transformers import PretrainedConfig, TrainerCallback, TrainerState, TrainingArguments

from llm_fp8.config.accelerate_env import PREFIX, RECIPE_ENTRIES, is_default, te_recipe
from llm_fp8.config.recipes import DEFAULTS
from llm_fp8.observability.kernel_trace import kernel_times, record_kernels
from llm_fp8.observability.nvml import energy_counter
from llm_fp8.optim.optimizers import not_optimised
from llm_fp8.precision.certificate import Certificate, ExpectedKernels, attention_library, certify, worst
from llm_fp8.precision.convert import reason_to_leave
from llm_fp8.precision.coverage import measure_coverage
from llm_fp8.precision.module_state import ModuleState, note_recipe_inside, read_te_state
from llm_fp8.precision.modules import GEMMS_PER_WEIGHT, linear_weights, lm_head_of, te_linears
from llm_fp8.precision.torchao import converted_modules, num_fp8_gemms_of, read_state
from llm_fp8.utils.errors import EXIT_FAILED_CHECK
from llm_fp8.utils.hf_internals import chosen_attention
from llm_fp8.utils.json_files import write_json_atomic

AskedPrecision = Literal["fp8", "bf16", "fp16", "no"]
_COMPUTE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def can_record() -> bool:
    return torch.cuda.is_available()


def open_counter() -> Callable[[], float] | None:
    """A function that reads the energy counter of this process's GPU in J; None without a GPU or its counter."""
    return energy_counter(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


class CertificateCallback(TrainerCallback):
    """Records one optimizer step of a Trainer and judges it; without an NVIDIA GPU it says that it cannot.

    Args:
        precision: what the run was asked to compute in. None: what `accelerate launch` asked for when this object was
            made, else the `bf16` and `fp16` of the TrainingArguments. With fp8 the scenario is MXFP8 where the launcher
            asked for it, else delayed scaling; with torchao's layers any recipe of torchao's that they all have.
        step: the optimizer step of this process that is recorded; the last one where there are fewer.
    """

    def __init__(self, precision: AskedPrecision | None = None, step: int = 5) -> None:
        if precision not in (None, *get_args(AskedPrecision)):
            raise ValueError(f"precision {precision!r}: give {', '.join(get_args(AskedPrecision))}, or None")
        if step < 1:
            raise ValueError(f"step {step}: the first optimizer step is 1")
        self._launch = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
        self._precision, self._step = precision, step
        self._recorded_step = self._num_micro_batches = 0
        self._recording: contextlib.ExitStack | None = None
        self._profile: Any = None
        self._recipe_inside: str | None = None
        self._read_j: Callable[[], float] | None = None
        self._begin_j, self._begin_step = math.nan, 0
        self.certificate: Certificate | None = None
        """The verdict, once the step was recorded; the worst of all processes'."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        """Warn of nn.DataParallel in fp8: the error that Accelerate raises next does not name it."""
        if args.n_gpu > 1 and asked_precision(self._precision, self._launch, args) == "fp8":
            what = "nn.DataParallel has no fp8; set CUDA_VISIBLE_DEVICES to one GPU, or start a process for each"
            print(f"WARNING: one process sees {args.n_gpu} GPUs, and {what}.", flush=True)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        self._recorded_step = min(state.global_step + self._step, state.max_steps)
        if not can_record() and state.is_world_process_zero:
            print("certificate: none, there is no NVIDIA GPU whose kernels could be recorded", flush=True)
        self._read_j, self._begin_step = open_counter(), state.global_step
        self._begin_j = self._read_j() if self._read_j is not None else math.nan

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        if state.global_step + 1 != self._recorded_step or self.certificate is not None or not can_record():
            return
        self._num_micro_batches = 1
        if layers := te_linears(kwargs["model"]):
            note_recipe_inside(layers[0], functools.partial(setattr, self, "_recipe_inside"))
        self._recording = contextlib.ExitStack()
        self._profile = self._recording.enter_context(record_kernels())

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        self._num_micro_batches += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        """Judge the recorded step; `SystemExit` with code 1 on every process where any process failed."""
        if self._recording is None:
            return
        self._recording.close()
        self._recording = None
        own = self._judge(kwargs["model"], kwargs["optimizer"], args)
        self._profile = None
        certificate = self.certificate = worst(gather_object([own]))
        path = Path(args.output_dir or ".") / "certificate.json"
        if state.is_world_process_zero:
            write_json_atomic(path, certificate.to_dict())
            _say(certificate.describe(), sys.stdout)
        if certificate.verdict == "failed":
            if state.is_world_process_zero:
                sentence = certificate.failure(path, "without CertificateCallback it trains all the same")
                _say(f"error: {sentence}", sys.stderr)
            PartialState().wait_for_everyone()  # The launcher ends the others as soon as one is gone.
            raise SystemExit(EXIT_FAILED_CHECK)
        if certificate.verdict == "undetermined" and state.is_world_process_zero:
            _say(f"WARNING: this run could not be certified: {'; '.join(certificate.reasons)}.", sys.stdout)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        """Energy of all GPUs since the training began, evaluations included; nothing where one has no counter."""
        if self.certificate is None:
            return
        own_j = self._read_j() - self._begin_j if self._read_j is not None else math.nan
        all_j: list[float] = gather_object([own_j])
        num_steps, energy_j = state.global_step - self._begin_step, sum(all_j)
        if state.is_world_process_zero and num_steps > 0 and math.isfinite(energy_j):
            path = Path(args.output_dir or ".") / "certificate.json"
            figures = {"energy_j": energy_j, "num_steps": num_steps, "num_gpus": len(all_j)}
            write_json_atomic(path, {**self.certificate.to_dict(), "energy": figures})
            _say(f"energy: {energy_j:,.0f} J in {num_steps} steps, {energy_j / num_steps:,.1f} J a step", sys.stdout)

    def _judge(self, model: nn.Module, optimizer: torch.optim.Optimizer, args: TrainingArguments) -> Certificate:
        """The certificate of the recorded step, right after it; `model` as Accelerate converted it, without DDP.

        Expected of an fp8 run: three GEMMs in a micro-batch for each trained weight that Transformer Engine holds, and
        one more where its layer is recomputed; for one that torchao holds, those that its recipe computes in fp8. Where
        neither holds any, those of every linear layer whose sizes fp8 can take. A value of fp8_config that the recipe
        in force does not have is a failure too.
        """
        asked, launch = asked_precision(self._precision, self._launch, args), self._launch
        kernels = kernel_times(self._profile)
        layers, by_torchao = te_linears(model), list(converted_modules(model).values())
        state = read_te_state(layers) if layers or not by_torchao else read_state(by_torchao)
        config = getattr(extract_model_from_parallel(model), "config", None)
        attention = chosen_attention(config) if isinstance(config, PretrainedConfig) else None
        in_fp8, compute = asked == "fp8", _COMPUTE[next(model.parameters()).dtype] if asked == "no" else asked
        expected = ExpectedKernels(compute, compute)
        if in_fp8:
            expected = _expected_in_fp8(model, layers or by_torchao, launch, state)
        certificate = certify(
            expected,
            kernels,
            state,
            num_micro_batches=self._num_micro_batches,
            recipe_inside_modules=self._recipe_inside,
            attention=f"sdpa ({attention_library(kernels)})" if attention == "sdpa" else attention,
            rank=args.process_index,
        )
        failures, remarks = _compare_recipe(layers, launch) if in_fp8 else ([], [])
        failures += _not_trained(model, optimizer)
        if in_fp8 and (layers or by_torchao) and (left := _convertible(model)):
            remarks.append(f"{len(left)} linear layers that fp8 could compute were not converted, such as {left[0]}")
        return dataclasses.replace(
            certificate,
            verdict="failed" if failures else certificate.verdict,
            reasons=[*certificate.reasons, *failures],
            remarks=[*certificate.remarks, *remarks],
        )


def _say(line: str, stream: TextIO) -> None:
    """Print `line` above the Trainer's progress bar."""
    tqdm.write(line, file=stream)
    stream.flush()


def asked_precision(given: AskedPrecision | None, launch: Mapping[str, str], args: TrainingArguments) -> str:
    """fp8, bf16, fp16 or no: what was given, else what the launcher asked for, else the TrainingArguments."""
    if given is not None:
        return given
    # Only an fp8 launch exports the variables of fp8_config, so they show one whose other variable was lost.
    lost = "fp8" if any(name.startswith(PREFIX) for name in launch) else "no"
    launched = launch.get("ACCELERATE_MIXED_PRECISION", lost).lower()
    if launched != "no":
        return launched
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"


def _convertible(model: nn.Module) -> list[str]:
    """Names of the linear layers of torch that fp8 could compute, without lm_head."""
    head = lm_head_of(model)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    return [name for name, module in linears.items() if reason_to_leave(name, module, head) is None]


def _expected_in_fp8(
    model: nn.Module, layers: list[nn.Module], launch: Mapping[str, str], state: ModuleState
) -> ExpectedKernels:
    scenario, num_gemms = te_recipe(launch), GEMMS_PER_WEIGHT
    if by_torchao := state.library == "torchao":
        # Whether a layer of torchao's that is recomputed computes fprop again is up to torch.compile.
        scenario = next(iter(state.recipes), DEFAULTS["torchao"])
        num_gemms = min(num_fp8_gemms_of(layer.config) for layer in layers)
    recomputed = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False) is True]
    again = {module for layer in recomputed for module in layer.modules()}
    trained = {layer: sum(weight.requires_grad for weight in linear_weights(layer)) for layer in layers}
    return ExpectedKernels(
        precision=f"fp8 {scenario}",
        compute="bf16",  # Accelerate's autocast around what is not in fp8
        scenario=scenario,
        num_fp8_weights=sum(trained.values()) if layers else len(_convertible(model)),
        num_recomputed_fp8_weights=0 if by_torchao else sum(trained[layer] for layer in layers if layer in again),
        num_fp8_gemms_per_weight=num_gemms,
        fp8_linear_flop_share=measure_coverage(model, layers, "bf16", {}, most_in_fp8=num_gemms).fp8_linear_flop_share,
    )


def _compare_recipe(layers: list[nn.Module], launch: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Values of fp8_config that differ from the recipe in force: (those of the file, the launcher's defaults)."""
    recipe = next((meta["recipe"] for layer in layers if "recipe" in (meta := getattr(layer, "fp8_meta", {}))), None)
    failures, remarks = list[str](), list[str]()
    for name in (*RECIPE_ENTRIES, "margin"):
        variable = PREFIX + name.removeprefix("fp8_").upper()
        value = getattr(recipe, name, launch.get(variable, ""))
        value = str(getattr(value, "name", value))
        if variable in launch and value.lower() != launch[variable].lower():
            told = remarks if is_default(variable, launch[variable]) else failures
            told.append(f"fp8_config has {name} {launch[variable]}, and the recipe in force has {value}")
    return failures, remarks


def _not_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    lost = not_optimised(model, optimizer)
    # An optimizer that holds none of them holds shards or copies, as under DeepSpeed.
    if not lost or len(lost) == sum(parameter.requires_grad for parameter in model.parameters()):
        return []
    return [f"the optimizer does not hold {len(lost)} of the parameters that require a gradient, such as {lost[0]}"]
