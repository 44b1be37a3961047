"""DeepSpeed's ZeRO stages, through Accelerate, with the same loss and gradients as in other sharding modes.

    deepspeed_1    fp32 master weights and moments are sharded; weights and gradients are not
    deepspeed_2    gradients are sharded too
    deepspeed_3    weights are sharded too; each one is gathered when its module runs forward or backward

In bf16 and fp8 runs, the parameters are bf16. DeepSpeed stores fp32 master weights of this rank's shard and updates
them with torch's AdamW. `prepare` returns this optimizer, so that the schedule can change its learning rate. Stage 1
reduces gradients in the last micro-batch of a step, and stages 2 and 3 in each micro-batch.

The file of --deepspeed_config determines ZeRO's communication and memory. The scripts' options determine batch,
precision, optimizer, schedule and clipping. The file may repeat their values or contain "auto"; others are errors.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.config.options import Config, ParallelConfig
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.optim.adamw_master import draw_lower_bits_
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import FOLDER, SHIPPED, OptionalPackage

DEEPSPEED = OptionalPackage("DeepSpeed", "deepspeed", f"pip install -r {FOLDER}requirements-deepspeed.txt")
_TAG = "."  # DeepSpeed writes to folder/tag, i.e. to the folder itself
_SET_ELSEWHERE = {
    "fp8": "--mixed_precision and --fp8_scenario",
    "communication_data_type": "--mixed_precision",
    "optimizer": "--learning_rate and --weight_decay",
    "scheduler": "--lr_scheduler and --num_warmup_steps",
}
"""Entry of the file that would have no effect, or a harmful effect -> options to use instead."""


class _Plugin(DeepSpeedPlugin):
    """Accelerate's plugin, hidden from transformers, which would otherwise shard parameters when it builds a model."""

    def set_deepspeed_weakref(self) -> None:
        pass


def accelerator_arguments(config: Config, mode: str, compute_name: str, num_processes: int) -> dict[str, Any]:
    """Import DeepSpeed for GPUs or, without one, for the CPU. Return the arguments of an `Accelerator` that uses it."""
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    DEEPSPEED.require(f"--sharding_mode {mode}")
    import deepspeed.ops

    # Otherwise DeepSpeed would compile this operator for faster collectives on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed uses names of collectives that torch 2.13 deprecated, so torch would warn for every parameter.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    settings = deepspeed_settings(config, mode, compute_name, num_processes)
    # Otherwise Accelerate would read the last two from the environment.
    plugin = _Plugin(hf_ds_config=settings, zero3_init_flag=False, enable_msamp=False)
    # With cpu=True, Accelerate ignores DeepSpeed. Without GPUs and a backend, it assumes one process.
    group = InitProcessGroupKwargs(backend="nccl" if on_gpu else "gloo")
    return {"cpu": False, "deepspeed_plugin": plugin, "kwargs_handlers": [group]}


def settings_file(options: ParallelConfig, mode: str) -> Path:
    """Return the file that --deepspeed_config names, or else the default file of the sharding mode `mode`."""
    return Path(options.deepspeed_config or (SHIPPED / "configs").resolve() / f"ds_z{mode[-1]}.json")


def deepspeed_settings(config: Config, mode: str, compute_name: str, num_processes: int) -> dict[str, Any]:
    """Return DeepSpeed's settings: the content of `settings_file`, completed by the run's values. Raise `UserError` if
    the two contradict each other. `compute_name` is the compute dtype outside fp8, "fp32" or "bf16".
    """
    path, stage = settings_file(config.parallel, mode), int(mode[-1])
    rows, steps = config.data.batch_size, config.optim.gradient_accumulation_steps
    run_settings = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": steps,
        "train_batch_size": rows * steps * num_processes,
        "gradient_clipping": config.optim.max_grad_norm,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": compute_name == "bf16"},
        "fp16": {"enabled": False},
    }
    defaults: dict[str, Any] = {
        # The overflow check needs a synchronisation and a reduction per step, and the loop checks the loss anyway.
        "bf16": {"check_grad_overflow": False},
        # Below stage 3, weights become views of one tensor. Kernels need them aligned to load 16 bytes at a time.
        "zero_optimization": {"parameter_alignment": True} if stage < 3 else {},
        # DeepSpeed's timer synchronises the GPU in every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    with reading("--deepspeed_config", path):
        settings = _completed(defaults, read_json(path, "--deepspeed_config"))
        for key in settings.keys() & _SET_ELSEWHERE:
            raise UserError(f'--deepspeed_config {path}, "{key}": use {_SET_ELSEWHERE[key]}; remove the entry.')
        return _completed(settings, run_settings, f"--deepspeed_config {path}")


def _completed(settings: dict[str, Any], others: dict[str, Any], origin: str = "") -> dict[str, Any]:
    """Return `settings`, updated recursively with the entries of `others` that are not "auto". If `origin` is not
    empty, raise `UserError` for an entry with two different values. The message begins with `origin`.
    """
    merged = dict(settings)
    for key, value in others.items():
        if isinstance(value, dict):
            merged[key] = _completed(settings.get(key, {}), value, origin and f'{origin}, "{key}"')
        elif origin and settings.get(key, value) != value:
            entry, needed = json.dumps(settings[key]), json.dumps(value)
            raise UserError(f'{origin}, "{key}": {entry}: this run has {needed}; remove the entry or make it "auto".')
        elif value != "auto":
            merged[key] = value
    return merged


_MASTER_WEIGHTS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""ZeRO's attributes with this rank's flat fp32 weights: in stages 1 and 2, stage 3, and stage 1 with fp32 gradients."""


class DeepSpeedStrategy(DistributedStrategy):
    """Strategy of the modes deepspeed_1 to deepspeed_3. Each rank loads all weights, unsharded, before `prepare`."""

    saves_itself = True

    def __init__(self, mode: str, accelerator: Accelerator, options: ParallelConfig) -> None:
        super().__init__(mode, accelerator, options)
        self.saved_by = f"--sharding_mode {mode} on {accelerator.num_processes} processes"
        self.stage = int(mode[-1])
        self.caches_weight_casts = self.stage < 3  # stage 3 frees gathered weights, and thus their casts, after use
        # In stage 3, hooks gather weights before a module's backward pass. Transformer Engine saves the weights for the
        # backward pass, so the recomputation must run such hooks too. Only reentrant checkpoints run them.
        self.reentrant_te_checkpoints = self.stage == 3
        self.settings: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
        self._zero: Any  # DeepSpeed's engine, set by `prepare`

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        """Return DeepSpeed's engine, to be called instead of `model`, and the AdamW that updates its master weights."""
        causal_lm: Any = model.model  # `model` is the `TrainingModel`
        self.accelerator.gradient_accumulation_steps = self.settings["gradient_accumulation_steps"]  # avoids a warning
        with reading("--deepspeed_config", settings_file(self.options, self.mode), "it into DeepSpeed"):
            self._zero, _ = self.accelerator.prepare(model, optimizer)
        if self.stage == 3:  # the loss uses this weight without calling its module
            from deepspeed.runtime.zero import register_external_parameter

            register_external_parameter(model, causal_lm.get_output_embeddings().weight)
        if self.settings["bf16"]["enabled"]:
            zero = self._zero.optimizer
            masters = next(getattr(zero, name) for name in _MASTER_WEIGHTS if hasattr(zero, name))
            draw_lower_bits_(masters, torch.initial_seed())
        return self._zero, self._zero.basic_optimizer

    def main_grads(self, model: nn.Module) -> None:
        """Return None, since no wgrad GEMM may add to gradients that ZeRO manages."""

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        self._zero.set_gradient_accumulation_boundary(is_boundary=last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._zero.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def step(self, optimizer: Any, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """Clip, update the weights and return the unclipped norm. If the norm is inf, there may have been no update."""
        assert max_norm == self.settings["gradient_clipping"], "DeepSpeed clips to the norm in its settings"
        self._zero.step()
        return torch.as_tensor(self._zero.get_global_grad_norm(), dtype=torch.float32, device=self.accelerator.device)

    def full_tensor(self, parameter: Tensor) -> Tensor:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            return master.detach()
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            return parameter.detach().clone()

    def state(self, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        return {}

    def state_bytes(self) -> int:
        """Return the number of bytes that `save_state` writes, summed over ranks."""
        weights = list(self._zero.module.parameters())
        return sum(getattr(weight, "ds_numel", weight.numel()) * (12 + weight.element_size()) for weight in weights)

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer state to `folder` and sync the files to disk. Collective."""
        self._zero.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
        self.accelerator.wait_for_everyone()
        for path in folder.glob("*_states.pt"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        self.accelerator.wait_for_everyone()

    def load_state(self, folder: Path, optimizer: Any) -> None:
        """Restore bit for bit the state that `save_state` wrote with the same number of ranks. The optimizer keeps its
        current learning rate, weight decay and clipping. Collective.
        """
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        load_arguments = {"tag": _TAG, "load_lr_scheduler_states": False, "custom_load_fn": _load_module_state}
        loaded = self._zero.load_checkpoint(str(folder), **load_arguments)[0]
        assert loaded is not None, f"DeepSpeed found nothing in {folder}"
        for group, group_options in zip(optimizer.param_groups, options, strict=True):
            group.update(group_options)
        self._zero.optimizer.clip_grad = self.settings["gradient_clipping"]


def _load_module_state(src: dict[str, Tensor], dst: nn.Module) -> None:
    """Load weights and buffers from `src` into `dst`, except TE's extra state, which `RunState` restores."""
    weights = {name: value for name, value in src.items() if not name.endswith("_extra_state")}
    loaded = dst.load_state_dict(weights, strict=False)
    assert all(name.endswith("_extra_state") for name in [*loaded.missing_keys, *loaded.unexpected_keys]), loaded
