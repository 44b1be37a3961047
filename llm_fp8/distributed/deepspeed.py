"""DeepSpeed's ZeRO stages, through Accelerate: what is sharded over ranks, and how the loop's arithmetic is kept.

    deepspeed_1    fp32 master weights and moments are sharded; weights and gradients are not
    deepspeed_2    gradients too
    deepspeed_3    weights too; each is gathered when its module runs, forward and backward

A run in bf16 or fp8 hands bf16 parameters to DeepSpeed, which keeps fp32 master weights of this rank's shard and steps
torch's AdamW on them; the run's schedule acts on this AdamW, which `prepare` returns. DeepSpeed divides gradients by
the number of ranks, which is undone here. Stage 1 reduces gradients in the last micro-batch of a step, stages 2 and 3
in each.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from llm_fp8.config.options import OptimConfig, ParallelConfig
from llm_fp8.distributed.deepspeed_config import file_of, load_deepspeed, zero_stage
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.optim.optimizers import OptimizerKind, adamw_arguments, parameter_groups
from llm_fp8.utils.errors import UserError, reading

if TYPE_CHECKING:
    import deepspeed

_TAG = "."
"""DeepSpeed writes to folder/tag: into the folder itself."""


class _Plugin(DeepSpeedPlugin):
    """Accelerate's, without announcing itself to transformers, which would shard parameters while models are built."""

    def set_deepspeed_weakref(self) -> None:
        pass


def accelerator_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """What `Accelerator` is given, beside mixed_precision, to train with DeepSpeed under these `settings`."""
    load_deepspeed()
    # Accelerate would read these two from the environment.
    plugin = _Plugin(hf_ds_config=settings, zero3_init_flag=False, enable_msamp=False)
    # With cpu=True Accelerate would leave DeepSpeed out; without a backend and GPUs it would see one process.
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    return {"cpu": False, "deepspeed_plugin": plugin, "kwargs_handlers": [InitProcessGroupKwargs(backend=backend)]}


class DeepSpeedStrategy(DistributedStrategy):
    """The deepspeed modes. Weights are loaded before `prepare`, unsharded on each rank. Under deepspeed_3 parameters
    are empty outside their module's forward and backward pass.
    """

    saves_itself = True

    def __init__(self, mode: str, accelerator: Accelerator, options: ParallelConfig) -> None:
        super().__init__(mode, accelerator, options)
        self.stage = zero_stage(mode)
        # A gathered weight is freed after use, and its cast with it.
        self.caches_weight_casts = self.stage < 3
        # Stage 3 gathers weights before a module's backward pass by hooks. Transformer Engine saves the weights
        # themselves, so the recomputation needs such hooks too: the reentrant kind has them.
        self.reentrant_te_checkpoints = self.stage == 3
        self.settings: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
        self._zero: deepspeed.DeepSpeedEngine  # from `prepare` on

    def resolve_optimizer(self, requested: str, compute_dtype: torch.dtype) -> OptimizerKind:
        return "adamw_fp32"  # on fp32 master weights that DeepSpeed keeps

    def parameter_dtype(self, kind: OptimizerKind, compute_dtype: torch.dtype) -> torch.dtype:
        return compute_dtype

    def build_optimizer(
        self, config: OptimConfig, kind: OptimizerKind, named_parameters: Iterable[tuple[str, Parameter]]
    ) -> Optimizer:
        """torch's AdamW, in whose groups DeepSpeed replaces the parameters by master weights."""
        return AdamW(parameter_groups(named_parameters, config.weight_decay), fused=True, **adamw_arguments(config))

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        """DeepSpeed's engine to call, and the optimizer inside it, for the schedule; `model` has its weights."""
        assert isinstance(model, TrainingModel)
        # Accelerate warns where its own number of micro-batches, which nothing here reads, is another than DeepSpeed's.
        self.accelerator.gradient_accumulation_steps = self.settings["gradient_accumulation_steps"]
        with reading("--deepspeed_config", file_of(self.options.deepspeed_config, self.mode), "it into DeepSpeed"):
            self._zero, _ = self.accelerator.prepare(model, optimizer)
        if self.stage == 3:  # the loss reads this weight without calling its module
            from deepspeed.runtime.zero import register_external_parameter

            register_external_parameter(model, model.model.get_output_embeddings().weight)
        return self._zero, self._zero.basic_optimizer

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, last: bool) -> Iterator[None]:
        self._zero.set_gradient_accumulation_boundary(is_boundary=last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._zero.backward(loss * self.accelerator.num_processes, scale_wrt_gas=False)

    def step(self, optimizer: Any, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """The norm is infinite where a gradient was not finite; the step may then have been skipped."""
        assert max_norm == self.settings["gradient_clipping"], "DeepSpeed clips to the norm that its settings name"
        self._zero.step()
        return torch.as_tensor(self._zero.get_global_grad_norm(), dtype=torch.float32, device=self.accelerator.device)

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """The master weight where the parameter is trained."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        master = safe_get_full_fp32_param(parameter)
        if master is not None:
            return master.detach()
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            return parameter.detach().clone()

    def local_tensor(self, parameter: Tensor) -> Tensor:
        """This rank's shard of a parameter under deepspeed_3, 1-D and possibly empty; all of it otherwise."""
        if not hasattr(parameter, "ds_tensor"):
            return parameter.detach()
        partitioned: Any = parameter
        shard: Tensor = partitioned.ds_tensor.detach()
        # The last shards are padded, contents undefined.
        return shard[: max(0, partitioned.ds_numel - self.accelerator.process_index * shard.numel())]

    def state_files(self) -> list[str]:
        """The names of the files that `save_state` writes on all ranks."""
        prefix = "bf16_" if self.settings["bf16"]["enabled"] else ""
        ranks = range(self.accelerator.num_processes)
        weights = ["mp_rank_00_model_states.pt"]
        if self.stage == 3:
            weights = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in ranks]
        return weights + [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks]

    def state_bytes(self) -> int:
        """The size of master weights, moments and weights, about."""
        weights = list(self._zero.module.parameters())
        return sum(getattr(weight, "ds_numel", weight.numel()) * (12 + weight.element_size()) for weight in weights)

    def save_state(self, folder: Path) -> None:
        """Write weights, master weights and optimizer state as `state_files`, synced to disk; collective."""
        self._zero.save_checkpoint(str(folder), tag=_TAG, save_latest=False)
        self.accelerator.wait_for_everyone()
        for path in folder.glob("*_states.pt"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if self.accelerator.is_main_process:
            for name in ("zero_to_fp32.py", "zero_to_torch.py"):  # DeepSpeed's; they need a file not written here
                (folder / name).unlink()
        self.accelerator.wait_for_everyone()

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, bit for bit; collective. Learning rate, weight decay and clipping stay this
        run's. `UserError` where the number of ranks, the stage or the precision differs.
        """
        found = {path.name for path in folder.glob("*_states.pt")}
        if found != set(self.state_files()):
            num_ranks = sum(name.endswith("optim_states.pt") for name in found)
            raise UserError(
                f"--resume_from: {folder} was saved by {num_ranks} processes, or under another mode or precision than "
                f"--sharding_mode {self.mode} on {self.accelerator.num_processes}, which DeepSpeed cannot resume; use "
                "what it was saved with, or an fsdp mode, which resumes with any number of processes."
            )
        optimizer = self._zero.basic_optimizer
        options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        path, _ = self._zero.load_checkpoint(
            str(folder), tag=_TAG, load_lr_scheduler_states=False, custom_load_fn=_load_module_state
        )
        assert path is not None, f"DeepSpeed found nothing in {folder}"
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)
        self._zero.optimizer.clip_grad = self.settings["gradient_clipping"]


def _load_module_state(src: dict[str, Tensor], dst: nn.Module) -> None:
    """Load weights and buffers by name, without Transformer Engine's extra state: scales are restored elsewhere."""
    kept = {name: value for name, value in src.items() if not name.endswith("_extra_state")}
    loaded = dst.load_state_dict(kept, strict=False)
    missing = [name for name in loaded.missing_keys if not name.endswith("_extra_state")]
    assert not missing and not loaded.unexpected_keys, (missing, loaded.unexpected_keys)
