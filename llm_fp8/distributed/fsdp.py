"""FSDP2: every decoder layer is a unit whose parameters are sharded over ranks along their first dimension.

    between steps    each rank stores its shard of every parameter, in the dtype of --optimizer, and its optimizer state
    forward          a layer's shards are gathered in the compute dtype (bf16) before the layer and freed after it
    backward         shards are gathered again; gradients are reduce-scattered in fp32 and cast to the shards' dtype
    accumulation     each rank stores unsharded fp32 gradients until the last micro-batch (see `wgrad_fusion`)
    fsdp_grad        gathers once a step, and stores unsharded weights and their fp8 casts between micro-batches

Embedding, final norm and lm_head form the outermost unit, since a tied matrix must not be in two units. torch's
`fully_shard` is called directly, since `Accelerator.prepare` identifies parameters by address, and on "meta" all have
the same address. Inputs of a unit are not cast (`cast_forward_inputs`), since the rotary table must stay fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from llm_fp8.config.options import ParallelConfig
from llm_fp8.distributed.strategy import DistributedStrategy, FindMainGrad
from llm_fp8.optim.adamw_master import join_master, remainder_of
from llm_fp8.utils.te_internals import keep_weight_casts
from llm_fp8.utils.torch_internals import fsdp_entries, gathered_parameter, local_of, materialize_, sharded_like


class FsdpStrategy(DistributedStrategy):
    """Strategy of the fsdp modes. fsdp_hybrid shards over `ranks_per_host` ranks; each host has a copy of the model."""

    shards_parameters = True

    def __init__(
        self, mode: str, accelerator: Accelerator, options: ParallelConfig, dtype: torch.dtype, ranks_per_host: int
    ) -> None:
        super().__init__(mode, accelerator, options)
        self.compute_dtype = dtype
        # Casts can be reused if weights are not freed after a micro-batch; fp8 parameters need no cast.
        self.caches_weight_casts = mode == "fsdp_grad" and not options.fp8_params
        self._stream: torch.cuda.Stream | None = None  # of the backward pass, see `MemorySavingReduceScatter`
        num_ranks = accelerator.num_processes
        shape = (num_ranks // ranks_per_host, ranks_per_host) if mode == "fsdp_hybrid" else (num_ranks,)
        names = ("replicate", "shard")[-len(shape) :]
        self.mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)

    def shard(self, model: nn.Module, layers: nn.ModuleList, later: Collection[nn.Module] = ()) -> None:
        """Shard every layer, then the other parameters. Meta tensors get memory, except those of modules in `later`."""
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
            keep_weight_casts(model.modules(), keep=True)
        model.register_forward_hook(_reshard_without_backward)
        device = self.accelerator.device
        materialize_(model, torch.device("cpu") if offloads else device, device, later)

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        return model, optimizer

    def main_grads(self, model: nn.Module) -> FindMainGrad:
        """Return a function that maps a sharded weight to a pair: the gathered weight, which forward passes use, and
        the gradient (or None) that FSDP2 accumulates on this rank, unsharded and in fp32.
        """
        entries = {id(weight): entry for unit in units_of(model) for weight, entry in fsdp_entries(unit)}

        def find(weight: Tensor) -> tuple[Tensor, Tensor | None]:
            gathered, accumulated = gathered_parameter(entries.get(id(weight)))
            if gathered is None:
                return weight, None
            # If the compute dtype is fp32 too, FSDP2 accumulates in `.grad`.
            return gathered, gathered.grad if accumulated is None else accumulated

        return find

    def reduces_by_hooks(self, last: bool) -> bool:
        return False

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(model, FSDPModule)
        if self._stream is not None:  # the capture of a graph uses another stream
            self._stream = torch.cuda.current_stream()
        model.set_requires_gradient_sync(last or self.options.sync_every_micro_batch)
        # Weights change only between steps, so all micro-batches can use the gathered weights.
        model.set_reshard_after_backward(last or self.mode != "fsdp_grad")
        return nullcontext()

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """Return the unsharded parameter on the accelerator's device, even if shards are on the host. Collective."""
        sharded: Any = self.master_of(parameter)[1]
        if (remainder := remainder_of(parameter)) is not None:
            sharded = sharded_like(join_master(local_of(sharded), local_of(remainder)), sharded)
        return sharded.to(self.accelerator.device).full_tensor()


def units_of(model: nn.Module) -> Iterator[FSDPModule]:
    """Return FSDP's units: the outermost unit and the decoder layers."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _reshard_without_backward(model: nn.Module, *_: Any) -> None:
    """Free unsharded parameters after a forward pass without gradients. Otherwise checkpoints would contain them."""
    if not torch.is_grad_enabled():
        for unit in units_of(model):
            unit.reshard()


class MemorySavingReduceScatter:
    """FSDP2's reduce-scatter of a unit's gradients, with buffers from the memory that the backward pass uses.

    PyTorch's allocator has separate memory for each CUDA stream. FSDP2 allocates a rank's gradient shards (4 / N bytes
    per parameter on N ranks) on the reduce-scatter's stream. Here they are allocated on `stream()`, the stream of the
    backward pass, to reuse the memory of activations and unsharded gradients. FSDP2 calls `allocate` twice: first for
    the input, when main gradients are freed too, then for the output, after unsharded gradients are freed. On CPUs, and
    in fsdp_hybrid, where a third stream reads the shards, `stream()` is None and allocation is as in FSDP2. For bf16
    parameters (`adamw_master`, `adamw_8bit`), the sum is cast here, into memory of `stream()`, and not by FSDP2.
    """

    def __init__(self, unit: FSDPModule, stream: Callable[[], torch.cuda.Stream | None]) -> None:
        self._entries = [entry for _, entry in fsdp_entries(unit)]
        self._stream = stream

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        for entry in self._entries:
            if (gathered := gathered_parameter(entry)[0]) is not None:
                vars(gathered).pop("main_grad", None)
        if (stream := self._stream()) is None:
            return torch.empty(*size, dtype=dtype, device=device)
        current = torch.cuda.current_stream(device)
        is_output = current != stream
        if is_output:
            dtype = next(entry.orig_dtype for entry in self._entries if entry.sharded_param.requires_grad)
        with torch.cuda.stream(stream):
            buffer = torch.empty(*size, dtype=dtype, device=device)
        if is_output:
            buffer.record_stream(current)  # shards may be freed while this stream still uses them
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        casts = output_tensor.dtype != input_tensor.dtype
        # FSDP2's default collective; torch 2.13 renamed reduce_scatter_tensor.
        reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        output = torch.empty_like(output_tensor, dtype=input_tensor.dtype) if casts else output_tensor
        work = reduce_scatter(output=output, input=input_tensor, group=group, op=op, async_op=async_op)
        if casts:
            output_tensor.copy_(output)
        return work
