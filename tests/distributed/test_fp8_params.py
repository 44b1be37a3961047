"""fp8 parameters under FSDP2: master weights, gradients, scales and all-gathers on several processes.

Transformer Engine needs a GPU, so a stand-in replaces TE's `Float8Tensor`. The stand-in has the same hooks for FSDP2,
shares its scale with its views as TE's tensor does, and casts with torch. FSDP2, DTensor, the optimizer and the
collectives are real. test_command_line_multi_gpu.py tests fp8 parameters with TE itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from llm_fp8.config.options import OptimConfig, ParallelConfig
from llm_fp8.distributed.fp8_params import Fp8ParamsStrategy, keep_weights_in_fp8
from llm_fp8.distributed.fsdp import FsdpStrategy
from llm_fp8.models.build import local_shard
from llm_fp8.optim.optimizers import OPTIMIZERS
from llm_fp8.precision.te import TEBackend
from tests.support.ranks import CountedAllGather, run_on_ranks

LARGEST = 448.0
NUM_LAYERS, WIDTH, ROWS = 3, 16, 4
STEPS, MICRO_BATCHES = 3, 2
MAX_NORM = 0.05
OPTIM = OptimConfig(learning_rate=1e-3, weight_decay=0.1)


# --- Stand-ins for Transformer Engine ---------------------------------------------------------------------------------


class StandInFloat8(torch.Tensor):
    """Stand in for TE's `Float8Tensor`, with fp8 values as bytes, the reciprocal of their scale, and FSDP2's hooks.
    `dtype` is the nominal dtype that autograd sees.
    """

    @staticmethod
    def __new__(cls, data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> StandInFloat8:
        layout = {"strides": data.stride(), "dtype": dtype, "device": data.device}
        tensor = torch.Tensor._make_wrapper_subclass(cls, data.shape, **layout)
        tensor.bytes, tensor.scale_inv = data, scale_inv
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)  # as in TE; FSDP2 compares the addresses of storages

    def dequantize(self) -> Tensor:
        return (self.bytes.view(torch.float8_e4m3fn).float() * self.scale_inv).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.as_strided.default):
            data = func(args[0].bytes, *args[1:], **(kwargs or {}))
            return StandInFloat8(data, args[0].scale_inv, args[0].dtype)
        return func(*(arg.dequantize() if isinstance(arg, StandInFloat8) else arg for arg in args), **(kwargs or {}))

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[Any, Any]:
        return (self.bytes,), (self.scale_inv, False, True, "e4m3")

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        scale_inv, rowwise, columnwise, _ = metadata
        assert (rowwise, columnwise) == (True, False)
        if out is not None:
            out.bytes = outputs[0]
            return None
        return StandInFloat8(outputs[0], scale_inv, dtype), outputs


class StandInQuantizer:
    """Stand in for the quantizer that a TE module has under a recipe without delayed scaling."""

    dtype, internal = "e4m3", True

    def set_usage(self, rowwise: bool, columnwise: bool) -> None:
        assert rowwise and not columnwise

    def __call__(self, rows: Tensor) -> StandInFloat8:
        return StandInFloat8(torch.zeros(rows.shape, dtype=torch.uint8), torch.zeros(1), rows.dtype)


class GivenScaleQuantizer:
    """Stand in for TE's `Float8Quantizer`, which casts with the scale that the caller passes."""

    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: str, *, rowwise: bool, columnwise: bool) -> None:
        self.scale = scale

    def update_quantized(self, rows: Tensor, out: StandInFloat8) -> None:
        out.bytes.copy_((rows * self.scale).to(torch.float8_e4m3fn).view(torch.uint8))
        out.scale_inv.copy_(1 / self.scale)


class StandInLinear(nn.Linear):
    """Stand in for te.Linear with the attributes that fp8_params.py reads."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, device="meta")
        indices = {"weight": 1, "bias": None}
        self.param_init_meta = {name: SimpleNamespace(fp8_meta_index=index) for name, index in indices.items()}
        self.primary_weights_in_fp8 = False

    def init_fp8_metadata(self, num_gemms: int) -> None:
        assert num_gemms == 1
        self.quantizers = {"scaling_fwd": [None, StandInQuantizer()]}


@contextlib.contextmanager
def quantized_model_init(enabled: bool, recipe: Any) -> Iterator[None]:
    yield


def install_stand_in() -> None:
    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.tensor"]
    for name in [*names, f"{names[-1]}.float8_tensor"]:
        sys.modules[name] = ModuleType(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    sys.modules["transformer_engine.pytorch"].quantized_model_init = quantized_model_init
    sys.modules[f"{names[-1]}.float8_tensor"].Float8Quantizer = GivenScaleQuantizer


class SmallModel(nn.Module):
    """A stack of linear layers and a final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StandInLinear() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(WIDTH, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (self.norm(x) - 1).square().mean()


def precision_of(modules: Any) -> Any:
    recipe = SimpleNamespace(fp8_format=SimpleNamespace(value=SimpleNamespace(max_fwd=LARGEST)))
    plan = SimpleNamespace(recipe=recipe)
    return SimpleNamespace(plan=plan, fp8_modules=frozenset(modules), backend=TEBackend())


def initial_value(name: str, shape: torch.Size) -> Tensor:
    """Return the initial value of the parameter `name`. The last row of a matrix, which is on the last rank, has the
    largest magnitude. To compute one scale for the matrix, the ranks must therefore exchange their largest magnitudes.
    """
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    value = torch.randn(shape, generator=generator) * 0.1
    if value.ndim == 2:
        value[-1] *= 10
    return value


def batch(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn((ROWS, WIDTH), generator=generator)


def cast_to_fp8(master: Tensor) -> Tensor:
    """Cast an fp32 weight to fp8 with a single scale, and back to fp32."""
    scale = LARGEST / master.abs().max()
    return (master * scale).to(torch.float8_e4m3fn).float() * (1 / scale)


# --- On several processes ---------------------------------------------------------------------------------------------


def shard(strategy: FsdpStrategy, model: SmallModel) -> None:
    """Shard `model` and set its weights to their initial values."""
    strategy.shard(model, model.layers)
    for name, parameter in model.named_parameters():
        block = local_shard(parameter)
        block.data.copy_(initial_value(name, parameter.shape)[block.start : block.start + len(block.data)])


def train_in_fp8(rank: int, mode: str, dtype: torch.dtype, sync_every_micro_batch: bool = False) -> dict[str, Any]:
    """Train with fp8 parameters under the sharding `mode`, and with the last layer and the norm in `dtype`. Return the
    results that the test checks, by name. Ranks 2 and 3 get the data of ranks 0 and 1, so that gradients averaged over
    four ranks equal those averaged over two.
    """
    install_stand_in()
    options = ParallelConfig(fp8_params=True, sync_every_micro_batch=sync_every_micro_batch)
    strategy = Fp8ParamsStrategy(mode, Accelerator(cpu=True), options, dtype, 2)
    model = SmallModel()
    precision = precision_of(list(model.layers)[:-1])
    shard(strategy, model)
    optimizer = OPTIMIZERS["adamw_fp32"].build(model.named_parameters(), OPTIM, False)
    model, optimizer = strategy.prepare(model, optimizer, precision)
    parameters = list(model.parameters())
    gathers = CountedAllGather(model)
    norms = []
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            with strategy.micro_batch(model, last=micro_batch == MICRO_BATCHES - 1):
                loss = model(batch(step, micro_batch, rank % 2).to(dtype)).float() / MICRO_BATCHES
                strategy.backward(loss / dist.get_world_size())
        norms.append(float(strategy.step(optimizer, parameters, MAX_NORM)))
    gathered = list(gathers.sent_bytes)
    with torch.no_grad():
        model(batch(0, 0, 0).to(dtype))
    named = dict(model.named_parameters())
    fp8 = {name: parameter for name, parameter in named.items() if isinstance(parameter._local_tensor, StandInFloat8)}
    result = {
        "norms": norms,
        "gathered": gathered,
        "master_weights": {name: strategy.full_tensor(parameter).clone() for name, parameter in named.items()},
        "rows": {name: (local_shard(p).start, p._local_tensor.dequantize().clone()) for name, p in fp8.items()},
        "scale_inv": {name: float(parameter._local_tensor.scale_inv) for name, parameter in fp8.items()},
        "state": [name for name in strategy.state(model, optimizer) if name.startswith("optimizer.")],
        "left_gradients": sum(p.grad is not None or strategy.master_of(p)[0].grad is not None for p in parameters),
        "is_optimized": all(
            any(strategy.master_of(p)[0] is q for g in optimizer.param_groups for q in g["params"]) for p in parameters
        ),
    }
    # Double the master weights, as if a checkpoint had been loaded into them.
    with torch.no_grad():
        for parameter in fp8.values():
            strategy.master_of(parameter)[0]._local_tensor.mul_(2)
    strategy.after_load(model, optimizer, STEPS)
    result["scale_inv_of_doubled"] = {name: float(parameter._local_tensor.scale_inv) for name, parameter in fp8.items()}
    return result


def train_on_one_process() -> tuple[list[float], dict[str, Tensor]]:
    """Train fp32 weights, with losses and gradients computed from fp8 copies. Return gradient norms and weights."""
    master_weights = {name: nn.Parameter(initial_value(name, p.shape)) for name, p in SmallModel().named_parameters()}
    optimizer = OPTIMIZERS["adamw_fp32"].build(master_weights.items(), OPTIM, False)
    norms = []
    for step in range(STEPS):
        weights = {name: p.detach().clone() for name, p in master_weights.items()}
        weights |= {name: cast_to_fp8(value) for name, value in weights.items() if is_fp8(name)}
        weights = {name: value.requires_grad_() for name, value in weights.items()}
        for micro_batch in range(MICRO_BATCHES):
            for rank in range(2):
                x = batch(step, micro_batch, rank)
                for layer in range(NUM_LAYERS):
                    x = x + torch.tanh(F.linear(x, weights[f"layers.{layer}.weight"], weights[f"layers.{layer}.bias"]))
                normed = F.rms_norm(x, (WIDTH,), weights["norm.weight"])
                ((normed - 1).square().mean() / MICRO_BATCHES / 2).backward()
        for name, parameter in master_weights.items():
            parameter.grad = weights[name].grad
        norm = nn.utils.clip_grad_norm_(master_weights.values(), MAX_NORM)
        norms.append(float(norm))
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in master_weights.items()}


def is_fp8(name: str) -> bool:
    return name.endswith("weight") and name.startswith("layers.") and not name.startswith(f"layers.{NUM_LAYERS - 1}.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "mode", "sync_every_micro_batch"),
    [(2, "fsdp_full", False), (2, "fsdp_grad", False), (2, "fsdp_grad", True), (4, "fsdp_hybrid", False)],
)
def test_master_weights_equal_those_of_one_process(tmp_path, num_ranks, mode, sync_every_micro_batch):
    norms, master_weights = train_on_one_process()
    assert max(norms) > 2 * MAX_NORM, "some step must be clipped, to test clipping"
    for result in run_on_ranks(
        num_ranks, tmp_path / "ranks", train_in_fp8, mode, torch.float32, sync_every_micro_batch
    ):
        assert result["norms"] == pytest.approx(norms, rel=1e-5)
        assert result["is_optimized"] and result["left_gradients"] == 0
        assert len(result["state"]) == 3 * len(master_weights)
        for name, master in master_weights.items():
            torch.testing.assert_close(result["master_weights"][name], master, rtol=1e-5, atol=1e-7)
            change = (master - initial_value(name, master.shape)).abs().max()
            assert 1e-4 < change < 1e-2
        assert result["rows"].keys() == {name for name in master_weights if is_fp8(name)}
        for name, (start, rows) in result["rows"].items():
            master = result["master_weights"][name]
            torch.testing.assert_close(rows, cast_to_fp8(master)[start : start + len(rows)], rtol=1e-6, atol=0)
            assert result["scale_inv"][name] == pytest.approx(float(master.abs().max()) / LARGEST)
            assert result["scale_inv_of_doubled"][name] == pytest.approx(2 * result["scale_inv"][name])


def train_beside_frozen_weights(rank: int) -> dict[str, Any]:
    """Train only the biases and the norm; matrices are frozen, as under LoRA. Return what the test checks, by name."""
    install_stand_in()
    strategy = Fp8ParamsStrategy("fsdp_full", Accelerator(cpu=True), ParallelConfig(fp8_params=True), torch.float32, 2)
    model = SmallModel()
    for layer in model.layers:
        layer.weight = nn.Parameter(layer.weight.to(torch.bfloat16), requires_grad=False)
    shard(strategy, model)
    precision, loaded = precision_of(model.layers), [layer.weight for layer in model.layers]
    for layer in model.layers:
        keep_weights_in_fp8(layer, precision)
    optimizer = OPTIMIZERS["adamw_fp32"].build(model.named_parameters(), OPTIM, False)
    model, optimizer = strategy.prepare(model, optimizer, precision)
    num_loaded_bytes = [parameter._local_tensor.untyped_storage().nbytes() for parameter in loaded]
    losses, gathers = [], CountedAllGather(model)
    for _ in range(STEPS):
        with strategy.micro_batch(model, last=True):
            losses.append(model(batch(0, 0, 0)))
            strategy.backward(losses[-1] / 2)
        strategy.step(optimizer, list(model.parameters()), MAX_NORM)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {
        "losses": [float(loss) for loss in losses],
        "rows": {name: (local_shard(p).start, p._local_tensor.dequantize().clone()) for name, p in frozen.items()},
        "has_master_weights": any(strategy.master_of(p)[0] is not p for p in frozen.values()),
        "num_loaded_bytes": num_loaded_bytes,
        "gathered": list(gathers.sent_bytes),
    }


@pytest.mark.slow
def test_frozen_weights_are_cast_once_and_have_no_master_weights(tmp_path):
    for result in run_on_ranks(2, tmp_path / "ranks", train_beside_frozen_weights):
        assert result["losses"][-1] < result["losses"][0] and not result["has_master_weights"]
        # The loaded weights must be freed before the first forward pass, in which FSDP2 would drop them.
        assert result["num_loaded_bytes"] == [0] * NUM_LAYERS
        assert result["gathered"].count(WIDTH * WIDTH // 2 + 4 * WIDTH // 2) == STEPS * 2 * NUM_LAYERS
        assert len(result["rows"]) == NUM_LAYERS
        for name, (start, rows) in result["rows"].items():
            expected = cast_to_fp8(initial_value(name, torch.Size((WIDTH, WIDTH))).bfloat16().float())[
                start : start + len(rows)
            ]
            torch.testing.assert_close(rows.float(), expected, rtol=4e-3, atol=0)


@pytest.mark.slow
def test_fp8_weights_are_gathered_as_one_byte_per_element(tmp_path):
    results = run_on_ranks(2, tmp_path / "ranks", train_in_fp8, "fsdp_full", torch.bfloat16)
    elements, bias, gathers = WIDTH * WIDTH // 2, WIDTH // 2, STEPS * MICRO_BATCHES * 2
    for result in results:
        assert result["gathered"].count(elements + 2 * bias) == gathers * (NUM_LAYERS - 1)
        assert result["gathered"].count(2 * elements + 2 * bias) == gathers
    assert results[0]["norms"] == results[1]["norms"] == pytest.approx(train_on_one_process()[0], rel=5e-2)
