"""The usual set-ups, measured beside ours: transformers' model and Accelerate, written as their documentation does.

What each name stands for is said in scripts/benchmark.py. All have torch's fused AdamW at our learning rate, betas and
weight decay, the loss as transformers computes it, and gradients accumulated by `accelerator.accumulate`. Spread over
GPUs:

    one process, DDP   bf16 weights without master weights: lighter than ours
    FSDP2              Accelerate's plugin, wrapped per decoder layer: fp32 weights and moments; communication in bf16
    DeepSpeed          Accelerate's plugin: bf16 weights, fp32 master weights and moments, sharded by ZeRO's stage; its
                       file as it is, also with entries that our own runs refuse
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import FP8_SIZE_MULTIPLE
from llm_fp8.distributed.deepspeed_config import zero_stage
from llm_fp8.distributed.process_group import own_device
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.layer_forward import wrap_forward
from llm_fp8.optim.optimizers import adamw_arguments, not_optimised
from llm_fp8.precision.convert import convert_with_torchao
from llm_fp8.precision.coverage import Fp8Coverage, measure_coverage
from llm_fp8.precision.modules import size_misfit, te_linears
from llm_fp8.precision.plan import resolve_precision
from llm_fp8.precision.torchao import build_config, compile_layers, converted_modules
from llm_fp8.tools.bench.variants import Baseline
from llm_fp8.tools.bench.workload import OPTIMISATION, Recorder, Workload, draw_weights_
from llm_fp8.train.loop import StepClock
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import TORCHAO
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.te_import import require_te


class HfTraining:
    """A baseline, built; in several processes under DDP, FSDP2 or DeepSpeed. `UserError` where a package is missing.

    `model` is transformers' model, as Accelerate prepared it, without the wrapper of DDP. `recorder` holds times and
    losses of the steps so far; a loss is the mean over the step's labels on this process. (Gradients are those of the
    mean over micro-batches, as Accelerate accumulates them.) `facts` are entries of its row.
    """

    def __init__(
        self, work: Workload, baseline: Baseline, mode: str | None = None, deepspeed_file: Path | None = None
    ) -> None:
        if baseline.accelerate_te or baseline.te_autocast:
            require_te(f"--arms {baseline.name}")
        if baseline.torchao_recipe is not None:
            TORCHAO.require(f"--arms {baseline.name}")
        fsdp2 = mode == "fsdp_full"
        config = work.hf_config()
        inputs = work.hf_inputs(config.vocab_size, LaunchRanks.from_environment(os.environ).rank)
        if mode is not None and deepspeed_file is not None:
            self.accelerator = accelerator = _accelerator_with_deepspeed(work, deepspeed_file, zero_stage(mode))
        else:
            self.accelerator = accelerator = _accelerator(len(inputs), baseline, fsdp2)
        name, weights = ("fp32", torch.float32) if fsdp2 else ("bf16", torch.bfloat16)
        with accelerator.device:
            model: Any = AutoModelForCausalLM.from_config(config, dtype=weights, attn_implementation="sdpa")
        draw_weights_(model, accelerator.device, is_te=False)
        if baseline.torchao_recipe is not None:
            convert_with_torchao(model, build_config(baseline.torchao_recipe, emulate=not torch.cuda.is_available()))
        if baseline.te_autocast:
            _wrap_in_te(model, f"--arms {baseline.name}")
        optimizer: Any = torch.optim.AdamW(
            model.parameters(), weight_decay=OPTIMISATION.weight_decay, fused=True, **adamw_arguments(OPTIMISATION)
        )
        coverage = _coverage(model)
        self._model, self._optimizer = accelerator.prepare(model, optimizer)
        self.model = accelerator.unwrap_model(self._model)
        if baseline.accelerate_te:
            coverage = _coverage(self.model)  # after Accelerate's conversion; before, for ZeRO 3 leaves no weights
        layers = decoder_layers(self.model)
        if fsdp2 and not isinstance(layers[0], FSDPModule):
            raise RuntimeError("Accelerate did not wrap the decoder layers")
        if baseline.compiled:
            compile_layers(layers)
        self._model.train()
        self._inputs = [{name: tensor.to(accelerator.device) for name, tensor in of_one.items()} for of_one in inputs]
        num_labels = torch.stack([(of_one["labels"][:, 1:] != IGNORE_INDEX).sum() for of_one in inputs]).float()
        self._shares = (num_labels / num_labels.sum()).to(accelerator.device)
        self._clock = StepClock(accelerator.device)
        self.recorder = Recorder()
        weights_of = "DeepSpeed's fp32 masters" if deepspeed_file else f"{name} weights"
        self.facts: dict[str, Any] = {
            "attention": "sdpa",
            "optimizer": f"torch fused AdamW on {weights_of}",
            "compiled": baseline.compiled,
            "census": coverage.to_dict(),
            # DeepSpeed's optimizer holds one long tensor of its own for each group.
            "parameters_not_in_the_optimizer": None if deepspeed_file else not_optimised(self.model, self._optimizer),
            **work.text_facts(padded=True),
        }

    def take(self, num_steps: int) -> None:
        accelerator, model, optimizer = self.accelerator, self._model, self._optimizer
        stamps, losses = [self._clock.stamp()], []
        for _ in range(num_steps):
            of_step = []
            for inputs in self._inputs:
                with accelerator.accumulate(model):
                    loss = model(**inputs, use_cache=False).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), OPTIMISATION.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                of_step.append(loss.detach())
            stamps.append(self._clock.stamp())
            losses.append((torch.stack(of_step) * self._shares).sum())
        self.recorder.losses += torch.stack(losses).tolist()  # waits for the last step
        self.recorder.step_times_s += [
            self._clock.seconds(start, end) for start, end in zip(stamps[:-1], stamps[1:], strict=True)
        ]


def _accelerator(num_micro_batches: int, baseline: Baseline, fsdp2: bool) -> Accelerator:
    plugin = None
    if fsdp2:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",  # transformers names its decoder layer
            cpu_ram_efficient_loading=False,  # nothing is loaded
        )
    handlers: list[Any] = []
    if baseline.accelerate_te:
        from accelerate.utils import TERecipeKwargs

        # The default but for the amax: the maximum of the history, as in our recipe, for rows that can be compared.
        handlers = [TERecipeKwargs(fp8_format="HYBRID", amax_history_len=1024, amax_compute_algo="max")]
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="fp8" if baseline.accelerate_te else "bf16",
        gradient_accumulation_steps=num_micro_batches,
        fsdp_plugin=plugin,
        kwargs_handlers=handlers,
    )


def _accelerator_with_deepspeed(work: Workload, path: Path, stage: int) -> Accelerator:
    """Accelerate with its DeepSpeed plugin. Of the file it fills in what its own documentation writes as "auto"."""
    from llm_fp8.distributed.deepspeed import accelerator_arguments

    file = read_json(path)
    settings = {
        **file,
        "zero_optimization": {**file["zero_optimization"], "stage": stage},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": OPTIMISATION.max_grad_norm,
        "zero_allow_untested_optimizer": True,  # torch's, as in the other variants
    }
    return Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=work.micro_batches, **accelerator_arguments(settings)
    )


def _wrap_in_te(model: PreTrainedModel, why: str) -> None:
    """te.Linear in place of every nn.Linear, lm_head included, and the forward pass in te.autocast, delayed scaling."""
    te = require_te(why)
    options = PrecisionConfig(mixed_precision="fp8", fp8_scenario="delayed", fp8_strict=True)
    plan = resolve_precision(options, own_device())
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, linear in linears:
        if size_misfit(linear, FP8_SIZE_MULTIPLE):
            continue
        weight, bias = linear.weight, linear.bias
        of = {"params_dtype": weight.dtype, "device": weight.device}
        replaced = te.Linear(linear.in_features, linear.out_features, bias=bias is not None, **of)
        with torch.no_grad():
            replaced.weight.copy_(weight)
            if bias is not None:
                replaced.bias.copy_(bias)
        model.set_submodule(name, replaced)

    def in_fp8(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with te.autocast(enabled=True, recipe=plan.recipe):
            return forward(*args, **kwargs)

    wrap_forward(model, in_fp8)


def _coverage(model: PreTrainedModel) -> Fp8Coverage:
    """Which linear layers were converted."""
    return measure_coverage(model, [*te_linears(model), *converted_modules(model).values()], "bf16", {})
