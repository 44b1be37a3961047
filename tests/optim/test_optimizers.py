"""Parameter groups, learning-rate schedules, clipping, and optimizer state as named tensors."""

import math
from typing import get_args

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import get_scheduler

from llm_fp8.config.options import OptimConfig, OptimizerKind, Scheduler
from llm_fp8.optim.adamw import EightBitAdamW, MasterAdamW
from llm_fp8.optim.optimizers import (
    OPTIMIZERS,
    build_scheduler,
    clip_and_step,
    effective_warmup_steps,
    initialize_state,
    optimizer_tensors,
    parameter_groups,
    set_completed_steps,
)


class TinyModel(torch.nn.Module):
    """An embedding tied to the output, a projection with bias, a norm and a frozen matrix."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(16, 8)
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.RMSNorm(8)
        self.frozen = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.frozen(self.norm(self.linear(self.embedding(tokens)))))


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 16, (4, 8), generator=generator)
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def named(model):
    return list(model.named_parameters(remove_duplicate=False))


def test_groups_contain_each_trainable_parameter_once():
    model = TinyModel()
    matrices, others = parameter_groups(named(model), weight_decay=0.1)
    assert matrices["weight_decay"] == 0.1
    assert [id(p) for p in matrices["params"]] == [id(model.embedding.weight), id(model.linear.weight)]
    assert others["weight_decay"] == 0.0
    assert [id(p) for p in others["params"]] == [id(model.linear.bias), id(model.norm.weight)]


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
def test_bytes_per_parameter_match_allocated_bytes(kind):
    parameter = torch.nn.Parameter(torch.zeros(256, 256, dtype=OPTIMIZERS[kind].parameter_dtype))
    optimizer = OPTIMIZERS[kind].build([("weight", parameter)], OptimConfig(), False)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = [parameter, parameter.grad, *optimizer.state[parameter].values()]
    allocated = sum(tensor.nbytes for tensor in tensors) / parameter.numel()
    assert allocated == pytest.approx(OPTIMIZERS[kind].total_bytes, abs=0.01)


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
def test_options_reach_the_optimizer(kind):
    config = OptimConfig(learning_rate=3e-4, weight_decay=0.2, adam_beta2=0.9, seed=7)
    optimizer = OPTIMIZERS[kind].build(named(TinyModel().to(OPTIMIZERS[kind].parameter_dtype)), config, False)
    classes = {"adamw_fp32": torch.optim.AdamW, "adamw_master": MasterAdamW, "adamw_8bit": EightBitAdamW}
    assert type(optimizer) is classes[kind]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.9, 0.9), 1e-8)
    assert kind != "adamw_fp32" or all(group["fused"] for group in optimizer.param_groups)
    assert kind != "adamw_8bit" or optimizer.seed == 7


@pytest.mark.parametrize(
    ("requested", "total", "expected"),
    [(100, 10_000, 100), (100, 500, 50), (100, 9, 0), (0, 500, 0), (0.03, 110, 4), (0.5, 8, 4)],
)
def test_warmup_is_at_most_a_tenth_of_the_steps_or_the_requested_share(requested, total, expected):
    assert effective_warmup_steps(requested, total) == expected


SCHEDULES = dict.fromkeys(get_args(Scheduler)) | {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5, "num_cycles": 1},
    "warmup_stable_decay": {"num_decay_steps": 10, "decay_type": "1-sqrt"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_warms_up_continues_as_transformers_and_resumes_anywhere(name):
    config = OptimConfig(2, None, 2e-4, num_warmup_steps=100, lr_scheduler=name, lr_scheduler_kwargs=SCHEDULES[name])

    def learning_rates(scheduler_of, completed=0):
        optimizer = OPTIMIZERS["adamw_fp32"].build(named(TinyModel()), config, False)
        scheduler, rates = scheduler_of(optimizer), []
        for _ in range(completed, 50):
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        return rates

    theirs = learning_rates(lambda optimizer: get_scheduler(name, optimizer, 5, 50, SCHEDULES[name]))
    ours = learning_rates(lambda optimizer: build_scheduler(optimizer, config, 50))
    assert ours[:5] == [pytest.approx([2e-4 * step / 5] * 2) for step in range(1, 6)] and ours[5:] == [
        pytest.approx(rates, rel=1e-15) for rates in theirs[5:]
    ]
    for done in (1, 3, 30):
        assert learning_rates(lambda optimizer, k=done: build_scheduler(optimizer, config, 50, k), done) == ours[done:]


def make_model_and_optimizer(config=None, seed=0, kind="adamw_fp32"):
    model = TinyModel(seed).to(OPTIMIZERS[kind].parameter_dtype)
    return model, OPTIMIZERS[kind].build(named(model), config or OptimConfig(learning_rate=1e-2), False)


STATE = {
    "adamw_fp32": ["step", "exp_avg", "exp_avg_sq"],
    "adamw_master": ["exp_avg", "exp_avg_sq", "remainder"],
    "adamw_8bit": ["exp_avg", "exp_avg_sq"],  # small tensors are not encoded; test_adamw_8bit.py has larger ones
}


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATE)
@pytest.mark.parametrize("wrapped", [False, True])
def test_initialize_state_does_not_change_training(wrapped, kind, accelerator):
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1)
    model, optimizer = make_model_and_optimizer(config, kind=kind)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    before = {name: parameter.detach().clone() for name, parameter in named(model)}
    initialize_state(accelerator.prepare_optimizer(optimizer) if wrapped else optimizer)
    assert all(torch.equal(parameter, before[name]) for name, parameter in named(model))
    tensors = optimizer_tensors(optimizer, named(model))
    assert len(tensors) == 4 * len(STATE[kind]) and not any(tensor.any() for tensor in tensors.values())
    assert bool((model.linear.weight.grad == 1).all()) and model.norm.weight.grad is None
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    optimizer.zero_grad()

    other, other_optimizer = make_model_and_optimizer(config, kind=kind)
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def restore_state(optimizer, named_parameters, stopped, stopped_parameters):
    """Copy weights and optimizer state from a stopped training to a new one. `stopped` is the optimizer of
    `stopped_parameters`, and `optimizer` is the optimizer of `named_parameters`. Both are lists of (name, parameter).
    """
    saved = optimizer_tensors(stopped, stopped_parameters)
    weights = dict(stopped_parameters)
    with torch.no_grad():
        for name, parameter in named_parameters:
            parameter.copy_(weights[name])
    initialize_state(optimizer)
    targets = optimizer_tensors(optimizer, named_parameters)
    assert targets.keys() == saved.keys()
    with torch.no_grad():
        for name, target in targets.items():
            assert target.dtype == saved[name].dtype
            target.copy_(saved[name])
    set_completed_steps(optimizer, stopped.param_groups[0].get("step", 0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATE)
def test_training_from_restored_state_continues_bit_for_bit(kind):
    whole, whole_optimizer = make_model_and_optimizer(kind=kind)
    train(whole, whole_optimizer, 5)
    train(whole, whole_optimizer, 5, seed=2)

    first, first_optimizer = make_model_and_optimizer(kind=kind)
    train(first, first_optimizer, 5)
    second, second_optimizer = make_model_and_optimizer(seed=9, kind=kind)
    restore_state(second_optimizer, named(second), first_optimizer, named(first))
    train(second, second_optimizer, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    state = optimizer_tensors(second_optimizer, named(second))
    for name, tensor in optimizer_tensors(whole_optimizer, named(whole)).items():
        assert torch.equal(state[name], tensor), name


def train_with_scaled_gradients(kind, max_norm, steps):
    """Train, scaling gradients to a global norm of at most `max_norm`. Return the model and norms before scaling."""
    model, optimizer = make_model_and_optimizer(kind=kind)
    norms = []
    for step in range(steps):
        set_gradients(model, step)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients)))
        for gradient in gradients:
            gradient *= torch.tensor(min(1.0, max_norm / norms[-1]) if max_norm else 1.0)
        optimizer.step()
    return model, norms


def set_gradients(model, step, scale=1.0):
    """Set random gradients whose global norm is 0.5 * 2**step * scale, up to rounding."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(parameter.shape, generator=generator) for parameter in trained]
    norm = math.sqrt(sum(float(each.square().sum()) for each in drawn))
    for parameter, each in zip(trained, drawn, strict=True):
        parameter.grad = (each * (0.5 * 2**step / norm)).to(parameter.dtype) * scale


@pytest.mark.parametrize("max_norm", [0.0, 0.7])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", STATE)
def test_clip_and_step_equals_scaling_the_gradients(kind, wrapped, max_norm, accelerator):
    expected, norms_before = train_with_scaled_gradients(kind, max_norm, 4)
    model, optimizer = make_model_and_optimizer(kind=kind)
    optimizer = accelerator.prepare_optimizer(optimizer) if wrapped else optimizer
    for step, norm_before in enumerate(norms_before):
        set_gradients(model, step)
        norm = clip_and_step(optimizer, list(model.parameters()), max_norm)
        assert norm.dtype == torch.float32 and float(norm) == pytest.approx(norm_before, rel=1e-5)
    # Scaled bf16 gradients are rounded once more. A bf16 weight may then differ by one unit in the last place.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if kind == "adamw_fp32" else {"rtol": 2**-7, "atol": 1e-4}
    for ours, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), reference.detach(), **tolerance)


def test_clip_and_step_under_fp16s_gradient_scaler(accelerator):
    """Norm and clipping refer to gradients without the scaler's factor. A step with an overflow is skipped."""
    expected, norms_before = train_with_scaled_gradients("adamw_fp32", 0.7, 3)
    model, plain = make_model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(plain, scaler=scaler)
    scaler.scale(torch.ones(()))  # creates the scale
    for step, norm_before in enumerate(norms_before):
        set_gradients(model, step, scale=1024.0)
        scaler.unscale_(plain)
        assert float(clip_and_step(optimizer, list(model.parameters()), 0.7)) == pytest.approx(norm_before, rel=1e-5)
    for ours, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), reference.detach())

    before = [parameter.detach().clone() for parameter in model.parameters()]
    set_gradients(model, 0)
    model.norm.weight.grad[0] = torch.inf
    scaler.unscale_(plain)
    assert math.isinf(clip_and_step(optimizer, list(model.parameters()), 0.7))
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
