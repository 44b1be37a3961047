"""Measure the steps of a run for `llm-fp8 diagnose`. The run is built in the same way as for training.

**A step** is described by its fp8 coverage, its certificate, the time of each class of kernels, and its memory by kind.
Recording slows the host but not the kernels, so the GPU's idle time is the time of an unrecorded step minus the time of
the kernels. The peak memory is split at the last forward pass of the step. The memory allocated before this pass is
that of weights, optimizer state, gradients and "kept_casts", the fp8 casts of weights that micro-batches reuse.
"activations" is what this pass allocates. "backward_pass" is the rest of the peak, with one micro-batch gradients too.

**Quality** (--quality) is the cost of fp8's forward pass before any training, by kind of module. The model predicts the
same text in bf16, in fp8, with only one kind of module in fp8, and with all other kinds in fp8. The measure is the
Kullback-Leibler divergence from bf16's next-token distributions, in nats per supervised token. Rounding to bf16 alone
causes a divergence of about 0.001. The loss is no measure, since a disturbance may also lower the loss on new text.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import Tensor, nn

from llm_fp8.config.options import Config, RunConfig
from llm_fp8.data.collate import Batch, count_tokens
from llm_fp8.data.loader import TrainLoader
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX
from llm_fp8.models.build import decoder_size
from llm_fp8.models.source import check_model, load_tokenizer
from llm_fp8.observability.kernel_trace import KernelTime, gemm_kernels, profiled, time_by_class
from llm_fp8.observability.metrics import GIB, device_peak_tflops, speed_metrics
from llm_fp8.observability.reporter import quiet_libraries
from llm_fp8.optim.optimizers import unwrap
from llm_fp8.precision.certificate import ExpectedKernels, certify
from llm_fp8.precision.coverage import linear_weights
from llm_fp8.run.records import announce
from llm_fp8.run.run import load_data
from llm_fp8.run.setup import TrainingSetup, build_setup, build_stepper, warm_up_scales
from llm_fp8.settle.plan import RunPlan, plan_run
from llm_fp8.step.stepper import Stepper
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.te_internals import attention_backend
from llm_fp8.utils.torch_internals import wrap_forward

NUM_WARMUP_STEPS = 4
NUM_TIMED_STEPS = 7
NUM_BATCHES = 4  # number of micro-batches that measure the quality
NUM_LISTED = 10  # number of modules that the terminal shows; the JSON file has all
_CHUNK = 512  # number of tokens whose logits are in memory at a time


def plan_without_output(config: Config) -> RunPlan:
    """Plan a run without output folder or trackers. `config` must already be validated."""
    ranks = LaunchRanks.from_environment(os.environ)
    start_process_group(ranks)
    quiet_libraries()
    plan = plan_run(dataclasses.replace(config, run=RunConfig(output_dir=os.devnull)), ranks)
    announce(plan)
    return plan


def diagnose(config: Config, trace: Path | None = None) -> dict[str, Any]:
    """Build the run of `config`, measure its steps and return the findings. Write one step's trace to `trace`."""
    plan = plan_without_output(config)
    set_seed(plan.config.optim.seed)
    tokenizer, _ = load_tokenizer(plan.config.model, plan.source)
    check_model(plan.config, plan.hf_config, tokenizer)
    data = load_data(plan, tokenizer)
    plan.say(data.description)
    setup = build_setup(plan)
    num_steps = NUM_WARMUP_STEPS + NUM_TIMED_STEPS + 2  # two more: for the memory and for the kernels
    findings = measure(setup, build_stepper(setup, data.train, num_steps), data.train, trace)
    return findings | {"problems": problems(findings)}


def measure(setup: TrainingSetup, stepper: Stepper, loader: TrainLoader, trace: Path | None) -> dict[str, Any]:
    """Measure time, memory and kernels of steps after a warm-up. Return findings. Write one step's trace to `trace`."""
    plan, steps = setup.plan, iter(loader)
    stepper.model.train()

    def take_steps(num_steps: int = 1) -> tuple[float, list[Batch]]:
        """Take steps. Return the mean time of a step in s, and the micro-batches of the last step."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_steps):
            batches = next(steps)
            stepper.take_step(batches)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / num_steps, batches

    take_steps(NUM_WARMUP_STEPS)
    step_s, batches = take_steps(NUM_TIMED_STEPS)
    memory = memory_by_kind(stepper, take_steps)
    with profiled(trace) as profile:
        take_steps()
    kernels = profile.kernels
    certificate = certify(
        ExpectedKernels.of_model(setup.precision, setup.coverage, setup.recomputed),
        kernels,
        setup.precision.module_state(),
        num_micro_batches=len(batches),
        attention=attention_backend() if plan.config.model.use_te else setup.attention,
    )
    size = decoder_size(plan.hf_config, setup.num_adapter_parameters)
    peak = device_peak_tflops(plan.device)
    classes = _figures(time_by_class(kernels))
    classes["gpu_idle"] = {"count": 0, "time_s": max(0.0, step_s - (profile.work_s + profile.exposed_communication_s))}
    return {
        "precision": plan.precision.to_dict(),
        "coverage": setup.coverage.to_dict(),
        "certificate": certificate.to_dict(),
        "attention": certificate.attention,
        "step": speed_metrics(count_tokens(batches), step_s, size, 1, peak, plan.precision.has_fp8_peak),
        "classes": classes,
        "gemms": _figures(gemm_kernels(kernels)),
        "memory_gib": memory,
    }


def _figures(by_name: Mapping[Any, KernelTime]) -> dict[str, dict[str, float]]:
    return {name: {"count": kernels.count, "time_s": kernels.time_s} for name, kernels in by_name.items()}


def gpu_gib(tensors: Iterable[Any]) -> float:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda) / GIB


def memory_by_kind(stepper: Stepper, take_step: Callable[[], object]) -> dict[str, float]:
    """Call `take_step` once. Return its peak memory in GiB, by kind (see the module's docstring)."""
    parameters = list(stepper.model.parameters())
    marks: list[tuple[float, float]] = []

    def mark(*_: object) -> None:
        marks.append((torch.cuda.memory_allocated() / GIB, gpu_gib(parameter.grad for parameter in parameters)))

    model = stepper.training_model
    torch.cuda.reset_peak_memory_stats()
    with model.register_forward_pre_hook(mark), model.register_forward_hook(mark):
        take_step()
    peak = torch.cuda.max_memory_allocated() / GIB
    weights = gpu_gib(parameters)
    (before, gradients), (after, _) = marks[-2:]  # before and after the last forward pass
    state = gpu_gib(value for entry in unwrap(stepper.optimizer).state.values() for value in entry.values())
    return {
        "weights": weights,
        "optimizer_state": state,
        "gradients": gradients,
        "kept_casts": before - weights - state - gradients,
        "activations": after - before,
        "backward_pass": peak - after,
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
    }


def problems(findings: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each way in which the run was not as requested, and for unfused attention."""
    precision, certificate = findings["precision"], findings["certificate"]
    sentences = list(certificate["reasons"]) if certificate["verdict"] == "failed" else []
    if precision["fallback_reason"]:
        sentences.append(f"--fp8_scenario {precision['requested_scenario']} fell back: {precision['fallback_reason']}")
    if "unfused" in str(findings["attention"]):
        sentences.append("attention runs unfused: unset NVTE_FUSED_ATTN and NVTE_FLASH_ATTN, CUDNN_HOME and CUDNN_PATH")
    skipped = findings["coverage"]["skipped"].items() if precision["effective"] == "fp8" else ()
    return sentences + [f"{name}: {reason}" for name, reason in skipped if "not a multiple of" in reason]


def measure_quality(config: Config) -> dict[str, Any]:
    """Measure how far fp8 changes the model's predictions on eval data or, if there is none, training data."""
    plan = plan_without_output(config)
    if not plan.precision.in_fp8:
        raise UserError("--quality compares fp8 with bf16; add --mixed_precision fp8.")
    data = load_data(plan, load_tokenizer(plan.config.model, plan.source)[0])
    text: Iterable[Batch] = itertools.chain.from_iterable(data.train) if data.eval is None else data.eval
    batches = [batch.to(plan.device) for batch in itertools.islice(text, NUM_BATCHES)]
    setup = build_setup(plan, in_bf16=True)
    warm_up_scales(setup, data.train)
    setup.training_model.eval()
    # Compiled code would bypass the forward functions that `_Comparison` installs.
    with torch.no_grad(), setup.precision.preserving_state(), torch.compiler.set_stance("force_eager"):
        return _Comparison(setup, batches).findings()


class _Comparison:
    """Comparison of a model's predictions in bf16 and in fp8. In an fp8 pass, chosen modules may stay in bf16."""

    def __init__(self, setup: TrainingSetup, batches: list[Batch]) -> None:
        self.setup, self.batches = setup, batches
        in_fp8 = setup.precision.fp8_modules
        self.names = {module: name for name, module in setup.model.module.named_modules() if module in in_fp8}
        self._in_bf16: Collection[nn.Module] = self.names
        self._errors: dict[str, dict[str, float]] = {}
        for module in self.names:
            wrap_forward(module, functools.partial(self._forward, module))
        self.reference = [self._hidden(batch) for batch in batches]
        self.num_tokens = sum(map(len, self.reference))

    def findings(self) -> dict[str, Any]:
        """Return the cost of fp8 (see `cost`) by kind of module and in total, and the error of each module's output."""

        def num_weights(modules: Iterable[nn.Module]) -> int:
            return sum(weight.numel() for module in modules for weight in linear_weights(module))

        kinds: dict[str, list[nn.Module]] = {}
        for module, name in self.names.items():
            kinds.setdefault(re.split(r"\.\d+\.", name)[-1], []).append(module)
        return {
            "scenario": self.setup.plan.precision.effective_scenario,
            "num_tokens": self.num_tokens,
            "kinds": {
                kind: {
                    "linear_flop_share": num_weights(modules) / num_weights(self.setup.model.module.modules()),
                    "alone": self.cost(in_bf16=self.names.keys() - set(modules)),
                    "without": self.cost(in_bf16=set(modules)),
                }
                for kind, modules in kinds.items()
            },
            "all_in_fp8": self.cost(in_bf16=()),
            "modules": dict(sorted(self._errors.items(), key=lambda item: -item[1]["relative_error"])),
        }

    def cost(self, in_bf16: Collection[nn.Module]) -> dict[str, float]:
        """Return KL divergence and loss increase over bf16, in nats a token, of fp8 with modules `in_bf16` in bf16."""
        self._in_bf16 = in_bf16
        sums = torch.zeros(2, dtype=torch.float64, device=self.setup.plan.device)
        for batch, reference in zip(self.batches, self.reference, strict=True):
            labels = batch.labels[batch.labels != IGNORE_INDEX]
            parts = [tensor.split(_CHUNK) for tensor in (reference, self._hidden(batch), labels)]
            for exact, rounded, label in zip(*parts, strict=True):
                log_p = F.log_softmax(self.setup.training_model.logits(exact).float(), -1)
                log_q = F.log_softmax(self.setup.training_model.logits(rounded).float(), -1)
                sums[0] += F.kl_div(log_q, log_p, reduction="sum", log_target=True)
                sums[1] += F.nll_loss(log_q, label, reduction="sum") - F.nll_loss(log_p, label, reduction="sum")
        divergence, loss_difference = (sums / self.num_tokens).tolist()
        return {"divergence": divergence, "loss_difference": loss_difference}

    def _hidden(self, batch: Batch) -> Tensor:
        """Return the last layer's hidden states [tokens, h] for the supervised tokens of `batch`."""
        with self.setup.precision.context(first_microbatch=None):
            return self.setup.training_model.hidden(batch)[batch.labels != IGNORE_INDEX]

    def _forward(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if module not in self._in_bf16:
            return forward(*args, **kwargs)
        output = self.setup.precision.backend.call_in_bf16(module, forward, *args, **kwargs)
        if self.names[module] not in self._errors:
            error = (forward(*args, **kwargs) - output).float().norm() / output.float().norm()
            inputs = args[0].float()
            peak = inputs.abs().amax() / inputs.square().mean().sqrt()  # outliers leave few fp8 codes to other values
            self._errors[self.names[module]] = {"relative_error": float(error), "input_peak": float(peak)}
        return output


def describe_quality(findings: dict[str, Any]) -> str:
    """Format the findings as text. Name the kind of module for which bf16 would lower the divergence most per FLOP."""
    total, kinds = findings["all_in_fp8"]["divergence"], findings["kinds"]
    saved = {kind: total - cost["without"]["divergence"] for kind, cost in kinds.items()}
    shares = {kind: cost["linear_flop_share"] for kind, cost in kinds.items()}
    order = sorted(saved, key=lambda kind: -saved[kind] / shares[kind])
    lines = [
        f"fp8 {findings['scenario']}, {findings['num_tokens']} supervised tokens: KL divergence from bf16 {total:.4f} "
        f"nats per token, loss {findings['all_in_fp8']['loss_difference']:+.4f}",
        f"{'modules':24}{'linear FLOPs':>14}{'KL alone':>12}{'KL without':>12}",
    ]
    for kind in order:
        alone, without = (kinds[kind][name]["divergence"] for name in ("alone", "without"))
        lines.append(f"{kind:24}{shares[kind]:>14.1%}{alone:>12.4f}{without:>12.4f}")
    lines.append("largest errors of single modules (relative error of the output; largest input over its rms):")
    for name, error in itertools.islice(findings["modules"].items(), NUM_LISTED):
        lines.append(f"  {name:38}{error['relative_error']:8.4f}{error['input_peak']:10.0f}")
    best = order[0]
    if saved[best] > 0:
        cost = f"{shares[best]:.1%} of the linear FLOPs in bf16"
        lines.append(f"--fp8_bf16_modules {best} would lower the divergence by {saved[best] / total:.0%}, with {cost}")
    return "\n".join(lines)
