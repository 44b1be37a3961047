"""Certify the kernels that transformers' `Trainer` executes. A loop without a Trainer calls `certify_step`.

    trainer = Trainer(model=..., args=..., train_dataset=..., callbacks=[CertificateCallback()])

The callback records the kernels of one optimizer step, counts the linear layers that Accelerate replaced by Transformer
Engine's or torchao's, and compares both with the requested precision. It prints the verdict, and writes it to
certificate.json in the output folder. A failed certificate ends the run with exit code 1. See docs/tools.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from accelerate import PartialState
from accelerate.utils import extract_model_from_parallel
from torch import distributed, nn, optim
from tqdm import tqdm
from transformers import PretrainedConfig, TrainerCallback, TrainerState, TrainingArguments

from llm_fp8.config.accelerate_env import PREFIX, RECIPE_ENTRIES, is_default, te_recipe
from llm_fp8.config.recipes import DEFAULTS, RequestedPrecision, recipe_names, row_of
from llm_fp8.distributed.process_group import gathered
from llm_fp8.observability.kernel_trace import kernel_times, record_kernels
from llm_fp8.precision.certificate import Certificate, ExpectedKernels, Verdict, certify, worst
from llm_fp8.precision.context import backend_in
from llm_fp8.precision.coverage import ModuleState, linear_weights, linears_left, measure_coverage, plain_linears
from llm_fp8.tools.script import EXIT_FAILED_CHECK
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.hf_internals import chosen_attention
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.output import say

_COMPUTE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def can_record() -> bool:
    return torch.cuda.is_available()


def certify_step(
    step: Callable[[], object],
    model: nn.Module,
    precision: RequestedPrecision,
    recipe: str | None = None,
    optimizer: optim.Optimizer | None = None,
    num_micro_batches: int = 1,
) -> Certificate:
    """Call `step`, which takes one optimizer step (any but the first), and check that its kernels have `precision`.
    Return the result, the worst certificate of all processes. Collective. Raise `UserError` if there is no NVIDIA GPU.

    `recipe` is the expected fp8 recipe, a value of --fp8_scenario. It defaults to that of `CertificateCallback`. The
    check fails if `optimizer` lacks a trained parameter. `num_micro_batches` is that of the step's forward passes.
    """
    _check("precision", precision, get_args(RequestedPrecision))
    _check("recipe", recipe, recipe_names())
    if not can_record():
        raise UserError("certify_step records the kernels of an NVIDIA GPU, and there is none here.")
    with record_kernels() as profile:
        step()
    return judge(profile, model, optimizer, precision, os.environ, num_micro_batches, recipe)


class CertificateCallback(TrainerCallback):
    """Record and judge one optimizer step of a Trainer. Without an NVIDIA GPU, print that this is not possible.

    Args:
        precision: the requested precision. None means the precision that `accelerate launch` has set when this object
            is created, else `bf16` or `fp16` of the TrainingArguments. The expected fp8 recipe is MXFP8 if the launcher
            requested it, else delayed scaling. torchao's layers may have any recipe, but all must have the same one.
        step: the optimizer step to record, counted from the start of training. A shorter run records its last step.
    """

    def __init__(self, precision: RequestedPrecision | None = None, step: int = 5) -> None:
        _check("precision", precision, get_args(RequestedPrecision))
        if step < 1:
            raise ValueError(f"step {step}: the first optimizer step is 1")
        self._launch = dict(os.environ)  # copied, since a program may remove the variables of `accelerate launch`
        self._precision = precision
        self._step = step
        self._recorded_step = 0
        self._num_micro_batches = 0
        self._recording: tuple[contextlib.ExitStack, Any] | None = None
        self.certificate: Certificate | None = None
        """The worst certificate of all processes. None until the step is recorded."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        """Warn about nn.DataParallel in fp8, since the error that Accelerate raises next does not mention it."""
        if args.n_gpu > 1 and requested_precision(self._precision, self._launch, args) == "fp8":
            advice = "nn.DataParallel has no fp8; set CUDA_VISIBLE_DEVICES to one GPU, or start a process for each"
            say(f"WARNING: one process sees {args.n_gpu} GPUs, and {advice}.")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        self._recorded_step = min(state.global_step + self._step, state.max_steps)
        if not can_record() and state.is_world_process_zero:
            say("certificate: none, because there is no NVIDIA GPU to record")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        if state.global_step + 1 != self._recorded_step or self.certificate is not None or not can_record():
            return
        self._num_micro_batches = 1
        recording = contextlib.ExitStack()
        self._recording = recording, recording.enter_context(record_kernels())

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        self._num_micro_batches += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: object, **kwargs: Any) -> None:
        """Judge the kernels of a recorded step. A failed certificate raises `SystemExit`, code 1, on every process."""
        if self._recording is None:
            return
        (recording, profile), self._recording = self._recording, None
        recording.close()
        requested = requested_precision(self._precision, self._launch, args)
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        certificate = judge(profile, model, optimizer, requested, self._launch, self._num_micro_batches)
        self.certificate = certificate
        if state.is_world_process_zero:
            path = Path(args.output_dir or ".", "certificate.json")
            write_json_atomic(path, certificate.to_dict())
            say(certificate.describe())
            if certificate.verdict == "failed":
                sentence = certificate.failure(path, "without CertificateCallback it trains all the same")
                tqdm.write(f"error: {sentence}", file=sys.stderr)
            elif certificate.verdict == "undetermined":
                say(f"WARNING: this run could not be certified: {'; '.join(certificate.reasons)}.")
        if certificate.verdict == "failed":
            PartialState().wait_for_everyone()  # the launcher kills the others as soon as one process ends
            raise SystemExit(EXIT_FAILED_CHECK)


def judge(
    profile: Any,
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    requested: str,
    launch: Mapping[str, str],
    num_micro_batches: int,
    recipe: str | None = None,
) -> Certificate:
    """Judge the kernels in `profile`, and return the worst certificate of all ranks. `model` is not wrapped in DDP.
    `launch` has the environment variables of `accelerate launch`. Collective.
    """
    backend = backend_in(model)
    layers = list(backend.linears_of(model).values())
    state = backend.state(layers)
    config = getattr(extract_model_from_parallel(model), "config", None)
    failures, remarks = list[str](), list[str]()
    if requested == "fp8":
        expected = _expected_in_fp8(model, layers, launch, state, recipe)
        failures, remarks = _compare_recipe(layers, launch)
        if layers and (unconverted := _convertible(model)):
            number, example = len(unconverted), unconverted[0]
            remarks.append(f"{number} linear layers that fp8 could compute were not converted, such as {example}")
    else:
        compute = _COMPUTE[next(model.parameters()).dtype] if requested == "no" else requested
        expected = ExpectedKernels(compute, compute)
    if optimizer is not None:
        known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        missing = [name for name, weight in model.named_parameters() if weight.requires_grad and weight not in known]
        # An optimizer without any of the parameters holds shards or copies of them, as ZeRO's does.
        if 0 < len(missing) < sum(parameter.requires_grad for parameter in model.parameters()):
            parameters = f"{len(missing)} of the parameters that require a gradient"
            failures.append(f"the optimizer does not hold {parameters}, such as {missing[0]}")
    certificate = certify(
        expected,
        kernel_times(profile),
        state,
        num_micro_batches=num_micro_batches,
        attention=chosen_attention(config) if isinstance(config, PretrainedConfig) else None,
        rank=distributed.get_rank() if distributed.is_initialized() else 0,
    )
    verdict: Verdict = "failed" if failures else certificate.verdict
    reasons, remarks = [*certificate.reasons, *failures], [*certificate.remarks, *remarks]
    return worst(gathered(dataclasses.replace(certificate, verdict=verdict, reasons=reasons, remarks=remarks)))


def _check(name: str, value: str | None, known: Sequence[str]) -> None:
    if value not in (None, *known):
        raise ValueError(f"{name} {value!r}: give {', '.join(known)}, or None")


def requested_precision(chosen: RequestedPrecision | None, launch: Mapping[str, str], args: TrainingArguments) -> str:
    """Return 'fp8', 'bf16', 'fp16' or 'no': `chosen` if set, else the launcher's precision, else that of `args`."""
    if chosen is not None:
        return chosen
    if (launched := launch.get("ACCELERATE_MIXED_PRECISION", "no").lower()) != "no":
        return launched
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"


def _convertible(model: nn.Module) -> list[str]:
    """List the names of the linear layers, except the lm_head, that could be in fp8 but were not converted."""
    not_convertible = linears_left(model)
    return [name for name in plain_linears(model) if name not in not_convertible]


def _expected_in_fp8(
    model: nn.Module, layers: list[nn.Module], launch: Mapping[str, str], state: ModuleState, scenario: str | None
) -> ExpectedKernels:
    """Return the kernels that one micro-batch must run. A trained weight needs two or three fp8 GEMMs, depending on the
    recipe `scenario`. It needs one fewer if no earlier layer is trained, and one more if a Transformer Engine layer is
    recomputed. `layers` are the converted layers. If there are none, all layers that could be converted count.
    """
    is_torchao = state.library == "torchao"
    scenario = scenario or (next(iter(state.recipes), DEFAULTS["torchao"]) if is_torchao else te_recipe(launch))
    num_trained = {layer: sum(weight.requires_grad for weight in linear_weights(layer)) for layer in layers}
    num_weights = sum(num_trained.values()) if layers else len(_convertible(model))
    num_spared = sum(num_trained.get(module, 0) for module in _trained_first(model))
    num_recomputed = 0
    if not is_torchao:  # with torchao, torch.compile decides whether a recomputed layer runs fprop again
        roots = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
        recomputed = {module for root in roots for module in root.modules()}
        num_recomputed = sum(num_trained[layer] for layer in layers if layer in recomputed)
    coverage = measure_coverage(model, layers, "bf16", {}, gemms_in_fp8=row_of(scenario).gemms_in_fp8)
    return ExpectedKernels(
        precision=f"fp8 {scenario}",
        compute="bf16",  # Accelerate's autocast computes everything that is not in fp8 in bf16
        scenario=scenario,
        num_fp8_gemms=len(row_of(scenario).gemms_in_fp8) * num_weights + num_recomputed - num_spared,
        fp8_linear_flop_share=coverage.fp8_linear_flop_share,
    )


def _trained_first(model: nn.Module) -> list[nn.Module]:
    """List the modules of the layer with the first trained parameter. Some need no dgrad GEMM; it is unknown which."""
    first = next((name for name, parameter in model.named_parameters() if parameter.requires_grad), "")
    layer = re.match(r"(.+?\.)?\d+(?=\.)", first)
    return list(model.get_submodule(layer[0]).modules()) if layer else [model.get_submodule(first.rpartition(".")[0])]


def _compare_recipe(layers: list[nn.Module], launch: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Compare the launcher's fp8_config with the recipe in use. Return two lists of sentences: differences in entries
    that were set, which are failures, and differences in entries with default values.
    """
    states = [getattr(layer, "fp8_meta", {}) for layer in layers]
    recipe = next((state["recipe"] for state in states if "recipe" in state), None)
    failures, remarks = list[str](), list[str]()
    for name in (*RECIPE_ENTRIES, "margin"):
        variable = PREFIX + name.removeprefix("fp8_").upper()
        value = getattr(recipe, name, launch.get(variable, ""))
        value = str(getattr(value, "name", value))
        if variable in launch and value.lower() != launch[variable].lower():
            findings = remarks if is_default(variable, launch[variable]) else failures
            findings.append(f"fp8_config has {name} {launch[variable]}, and the recipe in force has {value}")
    return failures, remarks
