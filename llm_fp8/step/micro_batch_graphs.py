"""CUDA graphs of whole micro-batches (--cuda_graphs): capture the TE decoder's forward and backward pass once and
replay it. This saves time if micro-batches are so small that the GPU waits for the host to launch kernels.

A graph repeats its kernels at the same addresses, so the tensors of a micro-batch have fixed addresses:

    tokens, labels, documents   are copied to fixed tensors. The number of documents is fixed too: empty documents are
                                appended to `cu_seqlens` up to one of `BUCKETS`. Each bucket has its own graphs.
    gradients                   are allocated once and assigned to `.grad` in each step, since the step sets `.grad` to
                                None. The first micro-batch of a step sets them to zero or overwrites them.
    weights in fp8              belong to Transformer Engine. The first eager micro-batch allocates them, and the first
                                micro-batch of each later step casts in place.
    scales, amax histories      are updated in place after each micro-batch, outside the graph, since the update reduces
                                amax over GPUs, of which some may replay a graph and others run eagerly.

Therefore the first micro-batch of a step and later ones have different graphs. On several GPUs the last one has another
graph, which also reduces gradients. Eager micro-batches use the same addresses, so a step may have both, with the same
bits. If graphs include communication, either all ranks replay the graph of their largest bucket, or none replays one.

Graphs reserve the memory of a micro-batch's activations. If an eager micro-batch or an evaluation does not fit in the
remaining memory, all graphs are deleted first. Deleted graphs are captured again when needed.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from llm_fp8.config.options import Config
from llm_fp8.data.collate import Batch
from llm_fp8.distributed.process_group import gathered, largest
from llm_fp8.models.memory import MODES
from llm_fp8.observability.metrics import GIB, RESERVE_GIB
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.torch_internals import local_of

BUCKETS = (32, 64, 128, 256, 512, 1024, 1536, 2048)
"""Numbers of documents for which there are graphs: those for which Transformer Engine plans cuDNN's attention."""

WORTH_GRAPHS = 0.10  # fraction of a step's time in which the GPU is idle, from which graphs are used

RunMicroBatch: TypeAlias = Callable[[Batch, Tensor, bool, bool], Tensor]
"""Function that runs forward and backward of a micro-batch. Arguments: batch, the step's number of supervised tokens
(0-dim, on the device), True if it is the step's first, True if it is the last. It returns the detached losses.
"""
Graph: TypeAlias = Callable[[], None]  # replays the kernels
Key: TypeAlias = tuple[int, bool, bool]  # bucket, True if the micro-batch is its step's first, True if its last


def check_graphs(config: Config, mode: str, compute: str, dropout: float) -> None:
    """Raise `UserError` if --cuda_graphs cannot capture the run's micro-batches. `compute` is fp32, bf16 or fp16."""
    if compute != "bf16":
        raise UserError("--cuda_graphs needs a run that computes in bf16; use --mixed_precision bf16 or fp8.")
    if MODES[mode].engine == "fsdp" and config.optim.gradient_accumulation_steps > 1:
        raise UserError(f"--cuda_graphs under --sharding_mode {mode} needs steps of one micro-batch; drop it.")
    if dropout > 0:
        raise UserError("--cuda_graphs would repeat the random numbers of dropout (config.json); drop it.")


class Capture:
    """Captures graphs in one memory pool, which they can share because they never run concurrently."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Graph:
        """Capture the kernels that `work` launches, without running them."""
        gc.collect()  # autograd nodes of an eager pass would add the stream of that pass to the capture
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that reads NVML, may call CUDA during the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def begin_anew(self) -> None:
        """Free the memory pool and use a new one for later graphs. Before this call, delete all graphs in the pool."""
        torch.cuda.synchronize()  # expandable segments do not wait for the stream of a replay that still runs
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()


class MicroBatchGraphs:
    """Runs this rank's micro-batches. The first micro-batch with each `Key` (bucket, place in the step) runs eagerly,
    which compiles kernels and makes Transformer Engine allocate its buffers. Later ones replay a graph.
    """

    makes_gradients = False  # True if eager passes allocate gradients, so that none is assigned before

    def __init__(
        self,
        run: RunMicroBatch,
        parameters: Sequence[Parameter],
        overwritten: Iterable[Tensor],
        capture: Capture,
        after_each: Callable[[], None],
        collective: bool,
    ) -> None:
        """Allocate gradients for the trained `parameters`. GEMMs of a step's first micro-batch overwrite the gradients
        of the weights in `overwritten` (`FusedWgradAccumulation.weights`). `after_each` is called after every
        micro-batch and is not captured. `collective` is True if graphs include communication.
        """
        self._run, self._capture, self._after_each = run, capture, after_each
        self._collective, self._parameters = collective, parameters
        self._gradients: list[Tensor] = []
        if not self.makes_gradients:
            self._gradients = [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in parameters]
        by_gemms = {id(weight) for weight in overwritten}
        self._summed = [g for p, g in zip(parameters, self._gradients, strict=False) if id(p) not in by_gemms]
        device = parameters[0].device
        self._num_supervised = torch.ones((), dtype=torch.int64, device=device)
        self._losses: Tensor | None = None  # allocated in the first micro-batch, which is eager
        self._inputs: dict[int, Batch] = {}
        self._seen: set[Key] = set()
        self._graphs: dict[Key, Graph] = {}
        self.drops_before_eager = False  # True if graphs must be deleted before an eager pass, to free memory
        self.may_capture = True  # if False, micro-batches without a graph run eagerly

    def __call__(self, batch: Batch, num_supervised: Tensor, first: bool, last: bool) -> Tensor:
        """Run a packed `batch` in host or GPU memory as `RunMicroBatch` does. The next call overwrites the result."""
        if first and not self.makes_gradients:
            self._lend_gradients()
        self._num_supervised.copy_(num_supervised)
        self._run_or_replay(batch, first, last)
        self._after_each()
        assert self._losses is not None
        return self._losses

    def make_room(self) -> None:
        """Delete the graphs if memory is too short for them and the eager pass that follows."""
        if self._graphs and self.drops_before_eager:
            self._graphs.clear()
            self._capture.begin_anew()

    def _lend_gradients(self) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _run_or_replay(self, batch: Batch, first: bool, last: bool) -> None:
        bucket = bucket_of(batch)
        if self._collective:
            largest_bucket = largest(BUCKETS[-1] + 1 if bucket is None else bucket)
            bucket = largest_bucket if largest_bucket in BUCKETS else None
        if bucket is None:
            self.make_room()
            return self._eager(batch, first, last)
        inputs, key = self._load(batch, bucket), (bucket, first, last)
        if key not in self._graphs and key in self._seen and self.may_capture:
            self._graphs[key] = self._capture_or_explain(lambda: self._captured(inputs, first, last))
        if key in self._graphs:
            self._graphs[key]()
            if self.makes_gradients:
                self._lend_gradients()
        else:
            self.make_room()
            self._eager(inputs, first, last)
            self._seen.add(key)

    def _capture_or_explain(self, work: Callable[[], None]) -> Graph:
        """Capture `work`. If that fails, raise `UserError` on every rank, since libraries remain in capture mode."""
        graph, failure = None, None
        try:
            graph = self._capture(work)
        except RuntimeError as error:  # a CUDA error, or out of memory
            failure = str(error.__context__ or error).partition("\n")[0]  # the first error, not that of `capture_end`
        failures = gathered(failure) if self._collective else [failure]
        if (failure := next(filter(None, failures), None)) is not None or graph is None:
            problem = f"no CUDA graph of a micro-batch could be captured ({failure})"
            raise UserError(f"{problem}; add --no_cuda_graphs, and continue with --resume_from latest.")
        return graph

    def _captured(self, inputs: Batch, first: bool, last: bool) -> None:
        self._eager(inputs, first, last)

    def _eager(self, batch: Batch, first: bool, last: bool) -> None:
        if first and self._summed:
            torch._foreach_zero_(self._summed)
        losses = self._run(batch, self._num_supervised, first, last)
        if self._losses is None:
            self._losses = torch.empty_like(losses)
        self._losses.copy_(losses)

    def _load(self, batch: Batch, bucket: int) -> Batch:
        """Copy a batch to the fixed tensors of its bucket. Return the batch of these tensors."""
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
        documents = tensors.pop("cu_seqlens")
        if bucket not in self._inputs:
            device = self._num_supervised.device
            fixed = {name: torch.empty_like(value, device=device) for name, value in tensors.items()}
            fixed["cu_seqlens"] = documents.new_empty(bucket + 1, device=device)
            self._inputs[bucket] = dataclasses.replace(batch, **fixed)  # type: ignore[arg-type]
        inputs = self._inputs[bucket]
        for name, value in tensors.items():
            getattr(inputs, name).copy_(value, non_blocking=True)
        assert inputs.cu_seqlens is not None
        inputs.cu_seqlens.fill_(batch.num_tokens)  # empty documents begin and end at the end of the last document
        inputs.cu_seqlens[: len(documents)].copy_(documents, non_blocking=True)
        return inputs


class ShardedMicroBatchGraphs(MicroBatchGraphs):
    """Graphs for fsdp_grad and fsdp_full, if a step has one micro-batch. They include FSDP2's collectives. Each graph
    has gradients of its own, which FSDP2 allocates. All graphs but the first copy theirs to those of the first.
    """

    makes_gradients = True

    def make_room(self) -> None:
        super().make_room()
        if not self._graphs:
            self._gradients = []  # they were those of the first graph

    def _captured(self, inputs: Batch, first: bool, last: bool) -> None:
        self._eager(inputs, first, last)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not self._gradients:
            self._gradients = gradients
        else:
            torch._foreach_copy_([local_of(old) for old in self._gradients], [local_of(new) for new in gradients])
        for parameter in self._parameters:
            parameter.grad = None


def bucket_of(batch: Batch) -> int | None:
    """Return the smallest of `BUCKETS` with room for the documents of a packed batch, or None if there is none."""
    assert batch.cu_seqlens is not None
    return next((bucket for bucket in BUCKETS if len(batch.cu_seqlens) - 1 <= bucket), None)


def memory_beside_graphs(extra_bytes: int = 0) -> tuple[float, bool]:
    """Return the GiB that the fullest GPU lacks for graphs if they need `extra_bytes` more than the steps so far. The
    second is True if an eager pass does not fit beside the graphs, which reserve a pass's activations. Collective.
    """
    in_use, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated() + extra_bytes + RESERVE_GIB * GIB
    total = torch.cuda.get_device_properties().total_memory
    by_rank = gathered((max(0.0, peak - total) / GIB, 2 * peak - in_use > total))
    return max(lacking for lacking, _ in by_rank), any(lacks for _, lacks in by_rank)
