"""FSDP2: every decoder layer is a unit whose parameters are sharded over ranks along their first dimension.

    between steps    each rank keeps its shard of every parameter, in the dtype that --optimizer has, and its state
    forward          a layer's shards are gathered in the compute dtype (bf16) just before it runs and freed after it
    backward         gathered again; gradients are reduce-scattered in fp32, then cast to the shards' dtype
    accumulation     each rank keeps unsharded fp32 gradients until the last micro-batch (see `wgrad_fusion`)
    fsdp_grad        gathers once a step, and keeps unsharded weights and their fp8 casts between micro-batches

The embedding, the final norm and the lm_head form the outermost unit: a tied matrix must not be in two. torch's
`fully_shard` is called directly: `Accelerator.prepare` maps the optimizer's parameters by address, and those on the
meta device share one. Inputs of a unit are not cast (`cast_forward_inputs`): the rotary table has to stay fp32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from llm_fp8.config.options import ParallelConfig
from llm_fp8.distributed.fsdp_internals import MemorySavingReduceScatter, units_of, unsharded_gradients
from llm_fp8.distributed.strategy import DistributedStrategy, FindMainGrad
from llm_fp8.optim.adamw_master import join_master, remainder_of
from llm_fp8.utils.te_internals import keep_weight_casts
from llm_fp8.utils.torch_internals import local_of, materialize_, sharded_like


class FsdpStrategy(DistributedStrategy):
    """The fsdp modes; fsdp_hybrid shards inside a host, over `ranks_per_host` ranks, and copies between hosts."""

    shards_parameters = True

    def __init__(
        self, mode: str, accelerator: Accelerator, options: ParallelConfig, dtype: torch.dtype, ranks_per_host: int
    ) -> None:
        super().__init__(mode, accelerator, options)
        self.compute_dtype = dtype
        # Casts outlive a micro-batch where the weights do; fp8 parameters are cast already.
        self.caches_weight_casts = mode == "fsdp_grad" and not options.fp8_params
        self._stream: torch.cuda.Stream | None = None
        """The backward pass's, in whose memory gradients are reduced; None where they cannot be."""
        num_ranks = accelerator.num_processes
        shape = (num_ranks // ranks_per_host, ranks_per_host) if mode == "fsdp_hybrid" else (num_ranks,)
        names = ("replicate", "shard")[-len(shape) :]
        self.mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)

    def shard(self, model: nn.Module, layers: nn.ModuleList, later: Collection[nn.Module] = ()) -> None:
        """Shard every layer, then the other parameters."""
        on_gpu, offloads = self.accelerator.device.type == "cuda", self.mode == "fsdp_offload"
        shard = functools.partial(
            fully_shard,
            mesh=self.mesh,
            mp_policy=MixedPrecisionPolicy(self.compute_dtype, torch.float32, cast_forward_inputs=False),
            offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if offloads else OffloadPolicy(),
        )
        for layer in layers:
            shard(layer, reshard_after_forward=self.mode != "fsdp_grad")
        shard(model, reshard_after_forward=False)
        if on_gpu and not offloads and self.mesh.ndim == 1:
            self._stream = torch.cuda.current_stream()
        for unit in units_of(model):
            unit.set_custom_reduce_scatter(MemorySavingReduceScatter(unit, lambda: self._stream))  # type: ignore[arg-type]
        if self.caches_weight_casts:
            keep_weight_casts(model, keep=True)
        model.register_forward_hook(_reshard_without_backward)
        device = self.accelerator.device
        materialize_(model, torch.device("cpu") if offloads else device, device, later)

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        return model, optimizer

    def main_grads(self, model: nn.Module) -> FindMainGrad:
        return unsharded_gradients(model)

    def reduces_by_hooks(self, last: bool) -> bool:
        return False

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, last: bool) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        if self._stream is not None:  # a capture runs on another stream
            self._stream = torch.cuda.current_stream()
        model.set_requires_gradient_sync(last or self.options.sync_every_micro_batch)
        # Weights change between steps alone, so gathered ones serve all micro-batches.
        model.set_reshard_after_backward(last or self.mode != "fsdp_grad")
        yield

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """On the accelerator's device, which the collective needs."""
        sharded: Any = self.master_of(parameter)[1]
        if (remainder := remainder_of(parameter)) is not None:
            sharded = sharded_like(join_master(local_of(sharded), local_of(remainder)), sharded)
        return sharded.to(self.accelerator.device).full_tensor()


def _reshard_without_backward(model: nn.Module, *_: Any) -> None:
    """After a forward pass without gradients, free the unsharded parameters, which checkpoints would hold otherwise."""
    if not torch.is_grad_enabled():
        for unit in units_of(model):
            unit.reshard()
