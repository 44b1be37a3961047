"""FusedAdam with 16-bit remainders against fp32 AdamW, and its state saved and restored bit for bit."""

import json

import pytest
import torch

from llm_fp8 import optim
from llm_fp8.config import OptimConfig
from llm_fp8.optim import (
    build_optimizer,
    build_scheduler,
    bytes_per_parameter,
    initialize_state,
    load_optimizer_scalars,
    load_optimizer_tensors,
    optimizer_scalars,
    optimizer_tensors,
)

pytestmark = pytest.mark.gpu

CONFIG = OptimConfig(learning_rate=1e-5, weight_decay=0.1, adam_beta2=0.95)
SHAPES = {"embedding": (1000, 64), "linear": (128, 257), "bias": (257,), "norm": (64,)}


@pytest.fixture(autouse=True)
def needs_gpu_and_transformer_engine():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    pytest.importorskip("transformer_engine")


def make_parameters(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    return {
        name: torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator, device="cuda")).bfloat16().to(dtype))
        for name, shape in SHAPES.items()
    }


def set_gradients(parameters, step):
    generator = torch.Generator("cuda").manual_seed(100 + step)
    for parameter in parameters.values():
        gradient = 1e-3 * (torch.randn(parameter.shape, generator=generator, device="cuda") + 0.3)
        parameter.grad = gradient.bfloat16().to(parameter.dtype)


def reconstruct_master(parameter, remainder):
    """The fp32 master: bf16 rounds to nearest, so a set top bit of the remainder means that the bf16 value was rounded up."""
    upper = parameter.detach().view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((upper << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def test_remainders_follow_fp32_adamw():
    steps = 50
    low, full = make_parameters(torch.bfloat16), make_parameters(torch.float32)
    fused = build_optimizer(CONFIG, "adamw_master", low.items())
    reference = build_optimizer(CONFIG, "adamw_fp32", full.items())
    start = {name: parameter.detach().clone() for name, parameter in full.items()}
    for step in range(steps):
        set_gradients(low, step)
        set_gradients(full, step)
        fused.step()
        reference.step()
    state = optimizer_tensors(fused, low.items())
    for name, parameter in low.items():
        remainder = state[f"{name}.master_param"]
        assert remainder.dtype == torch.int16
        assert state[f"{name}.exp_avg"].dtype == optim.FIRST_MOMENT_DTYPE
        assert state[f"{name}.exp_avg_sq"].dtype == optim.SECOND_MOMENT_DTYPE
        master = reconstruct_master(parameter, remainder)
        moved, wanted = master - start[name], full[name].detach() - start[name]
        # m in bf16 errs by 2^-9 a step, and these errors average out over steps.
        assert ((moved - wanted).norm() / wanted.norm()).item() < 5e-3, name
        # The bf16 parameter is its master, rounded to nearest: within half a spacing.
        assert ((parameter.float() - master).abs() <= master.abs() * 2**-8).all(), name
    # What the same run loses without remainders is of another order: the updates themselves.
    naive = make_parameters(torch.bfloat16)
    plain = torch.optim.AdamW(naive.values(), lr=1e-5, weight_decay=0.0)
    for step in range(steps):
        set_gradients(naive, step)
        plain.step()
    moved, wanted = naive["linear"].float() - start["linear"], full["linear"].detach() - start["linear"]
    assert ((moved - wanted).norm() / wanted.norm()).item() > 0.3


def test_splitting_into_groups_changes_nothing(monkeypatch):
    results = []
    for max_elements in (2**28, 1000):
        monkeypatch.setattr(optim, "MAX_GROUP_ELEMENTS", max_elements)
        parameters = make_parameters(torch.bfloat16)
        optimizer = build_optimizer(CONFIG, "adamw_master", parameters.items())
        results.append((len(optimizer.param_groups), parameters, optimizer))
        for step in range(5):
            set_gradients(parameters, step)
            optimizer.step()
    assert results[0][0] == 2 and results[1][0] == 3
    for name in SHAPES:
        assert torch.equal(results[0][1][name], results[1][1][name])


@pytest.mark.parametrize("kind", ["adamw_master", "adamw_8bit"])
def test_save_and_restore_is_exact(kind):
    if kind == "adamw_8bit":
        pytest.importorskip("torchao")
    parameters = make_parameters(torch.bfloat16)
    optimizer = build_optimizer(CONFIG, kind, parameters.items())
    scheduler = build_scheduler(optimizer, CONFIG, total_steps=40)

    def train(its_parameters, its_optimizer, its_scheduler, steps):
        torch.manual_seed(steps.start)  # stochastic rounding
        for step in steps:
            set_gradients(its_parameters, step)
            its_optimizer.step()
            its_scheduler.step()

    train(parameters, optimizer, scheduler, range(10))
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, parameters.items()).items()}
    scalars = json.loads(json.dumps(optimizer_scalars(optimizer)))

    resumed = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    other = build_optimizer(CONFIG, kind, resumed.items())
    load_optimizer_tensors(other, resumed.items(), saved)
    load_optimizer_scalars(other, scalars)
    other_scheduler = build_scheduler(other, CONFIG, total_steps=40, completed_steps=10)
    train(parameters, optimizer, scheduler, range(10, 20))
    train(resumed, other, other_scheduler, range(10, 20))
    for name in SHAPES:
        assert torch.equal(parameters[name], resumed[name]), name
    final, resumed_final = optimizer_tensors(optimizer, parameters.items()), optimizer_tensors(other, resumed.items())
    assert final.keys() == resumed_final.keys()
    assert all(torch.equal(final[name], resumed_final[name]) for name in final)


def test_initialize_state_is_the_state_before_the_first_step():
    early, late = make_parameters(torch.bfloat16), make_parameters(torch.bfloat16)
    early_optimizer = build_optimizer(CONFIG, "adamw_master", early.items())
    late_optimizer = build_optimizer(CONFIG, "adamw_master", late.items())
    initialize_state(early_optimizer)
    assert len(optimizer_tensors(early_optimizer, early.items())) == 3 * len(SHAPES)
    for step in range(3):
        set_gradients(early, step)
        set_gradients(late, step)
        early_optimizer.step()
        late_optimizer.step()
    assert all(torch.equal(early[name], late[name]) for name in SHAPES)


def test_memory_is_what_the_table_says():
    """12 bytes per parameter at rest; the step's copies of m are bounded by the group, not by the model."""
    matrices = {f"layer_{i}": torch.nn.Parameter(torch.zeros(2**13, 2**12, device="cuda").bfloat16()) for i in range(16)}
    count = sum(parameter.numel() for parameter in matrices.values())
    before = torch.cuda.memory_allocated() - 2 * count
    optimizer = build_optimizer(OptimConfig(), "adamw_master", matrices.items())
    for parameter in matrices.values():
        parameter.grad = torch.zeros_like(parameter)
    initialize_state(optimizer)
    at_rest = torch.cuda.memory_allocated() - before
    assert at_rest / count == pytest.approx(bytes_per_parameter("adamw_master").total, rel=0.01)
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    extra = torch.cuda.max_memory_allocated() - before - at_rest
    # fp32 copies of two groups' m (FusedAdam holds the last one's until the next are made) and one tensor's bf16 rounding.
    assert extra < 2.5 * 4 * optim.MAX_GROUP_ELEMENTS
