"""Mixtures of experts: experts are recognised by shape, and FLOPs count only the experts that compute a token."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from llm_fp8.config.options import LoraConfig, PrecisionConfig
from llm_fp8.data.collate import Layout
from llm_fp8.models.build import decoder_size, model_on_meta
from llm_fp8.models.experts import compute_experts, expert_weights, routed_modules
from llm_fp8.models.export import export_adapter, hf_tensors
from llm_fp8.models.lora import adapters_of, add_adapters, initialize_adapters_
from llm_fp8.models.model import Model, decoder_layers
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import measure_coverage
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.step.loss_model import ROUTER_LOSS, TrainingModel
from llm_fp8.utils.hf_internals import runs_grouped_gemms
from tests.support.batches import random_rows
from tests.support.families import MOE_FAMILIES
from tests.support.hub_families import hub_config
from tests.support.small import CARD, length_config, records, steps, train, write_model

QWEN3_30B = dict(vocab_size=151936, num_hidden_layers=48, num_key_value_heads=4, num_experts=128, hidden_size=2048)
QWEN3_30B |= dict(num_attention_heads=32, head_dim=128, moe_intermediate_size=768, num_experts_per_tok=8)
GPT_OSS_20B = dict(num_hidden_layers=24, num_local_experts=32)
TINY = dict(vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=4)
TINY |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("kind", "sizes", "share"),
    [("qwen3_moe", QWEN3_30B, 0.299), ("gpt_oss", GPT_OSS_20B, 0.177), ("mixtral", {}, 0.105)],
)
def test_fp8_share_of_linear_flops_counts_active_experts(kind, sizes, share):
    config = AutoConfig.for_model(kind, **sizes)
    model = model_on_meta(config).module
    linears = [module for module in model.modules() if type(module) is nn.Linear and module is not model.lm_head]
    coverage = measure_coverage(model, linears, "bf16", {})
    assert coverage.fp8_linear_flop_share == pytest.approx(share, abs=5e-4)
    (experts,) = (reason for name, reason in coverage.skipped.items() if name.endswith(".experts"))
    assert f"{config.num_experts_per_tok} of" in experts and "bf16" in experts
    routers = sum(module.weight.numel() for module in model.modules() if type(module).__name__.endswith("Router"))
    assert decoder_size(config).num_linear_parameters == coverage.linear_flops_per_token / 6 + routers


def test_dense_layers_and_shared_experts_are_counted_in_full():
    config = AutoConfig.for_model(
        "deepseek_v3", **TINY, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1,
        topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
    )  # fmt: skip
    model, size = model_on_meta(config).module, decoder_size(config)
    linears = sum(module.weight.numel() for module in model.modules() if type(module) is nn.Linear)
    experts = 3 * 3 * 24 * 32 * 2  # layers x matrices x elements x experts per token
    assert size.num_linear_parameters == linears + experts + 3 * 8 * 32
    assert (size.num_layers, size.attention_width) == (4, 4 * (16 + 12) // 2)


def test_hybrid_model_counts_attention_layers_only():
    layer_types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = AutoConfig.for_model("qwen3_next", **TINY, layer_types=layer_types, num_experts=4, num_experts_per_tok=2)
    assert decoder_size(config).num_layers == 1


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 32, 16))


class Block(nn.Module):
    """A layer whose router is an nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.config = AutoConfig.for_model("qwen3_moe", num_experts_per_tok=2)
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = Experts()
        self.shared_expert = nn.Linear(16, 4, bias=False)
        self.conv = nn.Conv1d(16, 16, 4)


def test_linear_router_is_not_an_fp8_layer():
    block = Block()
    routed = routed_modules(block)
    assert {module: each.share for module, each in routed.items()} == {block.gate: 1.0, block.experts: 0.5}
    assert measure_coverage(block, [], "bf16", {}).linear_flops_per_token == 6 * (2 * 64 + 2 * 512)
    assert routed_modules(nn.Linear(4, 4)) == {} and torch.is_tensor(block.conv.weight)


@pytest.mark.parametrize(("kind", "names"), [("qwen3_moe", "num_experts"), ("gpt_oss", "num_local_experts")])
def test_experts_with_fp32_weights_compute_in_bf16_and_get_fp32_gradients(kind, names, monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **{names: 4}, num_experts_per_tok=2))
    experts = next(module for module in model.modules() if expert_weights(module))
    weights = [nn.init.normal_(weight, std=0.1) for weight in expert_weights(experts)]
    hidden, scores = torch.randn(24, 32), torch.rand(24, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(24)])
    exact = torch.autograd.grad(experts(hidden, chosen, scores).square().sum(), weights)

    gemm_dtypes, grouped_mm = [], torch.nn.functional.grouped_mm

    def recording_grouped_mm(a, b, **more):
        gemm_dtypes.append((a.dtype, b.dtype))
        return grouped_mm(a, b, **more)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", recording_grouped_mm)
    plan = PrecisionPlan(requested="bf16", effective="bf16")
    precision = Precision(plan, PrecisionConfig(mixed_precision="bf16"), torch.device("cpu"), torch.float32)
    precision.attach(model, decoder_layers(model))
    with precision.context(first_microbatch=None):
        loss = experts(hidden, chosen, scores).float().square().sum()
    assert gemm_dtypes == [(torch.bfloat16, torch.bfloat16)] * 2
    for gradient, expected in zip(torch.autograd.grad(loss, weights), exact, strict=True):
        assert gradient.dtype == torch.float32 and (gradient - expected).norm() < 0.02 * expected.norm()
    assert all(before is after for before, after in zip(weights, expert_weights(experts), strict=True))


@pytest.mark.parametrize("family", ["Qwen3-MoE", "OLMoE", "Mixtral", "DeepSeek-V3"])
def test_experts_have_output_and_gradients_of_transformers(family):
    model = AutoModelForCausalLM.from_config(hub_config(family), dtype=torch.float32)
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    assert runs_grouped_gemms(experts)
    hidden_size, num_experts = model.config.hidden_size, experts.num_experts
    torch.manual_seed(0)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    hidden = torch.randn(37, hidden_size, requires_grad=True)
    probabilities = torch.randn(37, num_experts - 1).softmax(-1)  # the last expert has no token
    weights, index = probabilities.topk(2)
    inputs = [weights.detach().requires_grad_(), hidden, *experts.parameters()]

    def results() -> list[torch.Tensor]:
        output = experts(hidden, index, inputs[0])
        return [output, *torch.autograd.grad((output * torch.arange(hidden_size)).sum(), inputs)]

    expected = results()
    compute_experts(model, None)
    assert "forward" in vars(experts)
    for ours, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_experts_with_biases_keep_the_forward_of_transformers():
    model = AutoModelForCausalLM.from_config(hub_config("gpt-oss"), dtype=torch.float32)
    compute_experts(model, None)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("recompute", "packed"), [(False, True), (True, False)])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_auxiliary_loss_and_gradient_equal_the_mean_over_single_documents(kind, recompute, packed):
    torch.manual_seed(0)
    experts = {"mixtral": "num_local_experts"}.get(kind, "num_experts")
    entries = {experts: 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **entries, pad_token_id=0)).train()
    rows = random_rows([[12]] * 3, 96, seed=0)
    batch = Layout(4, 16, 0, packed)(rows)
    plain = [model(input_ids=ids, labels=ids) for ids in torch.tensor([[row[0].input_ids.tolist()] for row in rows])]
    loss, aux_loss = (torch.stack([output[name] for output in plain]).mean() for name in ("loss", "aux_loss"))
    expected = torch.autograd.grad(loss, list(model.parameters()))

    if recompute:
        enable_gradient_checkpointing(decoder_layers(model), 1, uses_te=False)
    training_model = TrainingModel(model, length_config(16), torch.float32).train()
    num = batch.num_supervised_tokens
    loss_sum, aux = training_model(batch)
    assert training_model.coefficients == {ROUTER_LOSS: 0.1}
    assert (aux[ROUTER_LOSS] / 0.1 / num).item() == pytest.approx(aux_loss.item(), abs=1e-6)
    assert ((loss_sum + aux[ROUTER_LOSS]) / num).item() == pytest.approx(loss.item(), abs=1e-5)
    gradients = torch.autograd.grad((loss_sum + aux[ROUTER_LOSS]) / num, list(model.parameters()))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert training_model.eval()(batch)[1] == {}


def test_router_coefficient_without_output_router_logits_is_reported_and_has_no_effect():
    model = model_on_meta(AutoConfig.for_model("mixtral", **TINY, router_aux_loss_coef=0.02)).module
    training_model = TrainingModel(model, length_config(16), torch.float32)
    assert training_model.router_loss is None and "router_aux_loss_coef 0.02" in str(training_model.router_note)
    for kind, sizes in (("glm4_moe", dict(n_routed_experts=8)), ("doge", dict(is_moe=True, num_experts=16))):
        model = model_on_meta(AutoConfig.for_model(kind, **TINY, **sizes, output_router_logits=True)).module
        assert "WARNING" in str(TrainingModel(model, length_config(16), torch.float32).router_note)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        *((kind, "all-linear") for kind in ("qwen3_moe", "deepseek_v3", "glm4_moe", "nemotron_h", "phimoe")),
        ("gpt_oss", "all-linear"),
        ("deepseek_v3", "o_proj,gate_proj"),
        ("qwen3_moe", "q_proj,experts"),
        ("gpt_oss", "all-linear,experts"),
    ],
)
def test_adapters_load_in_peft_and_merge(tmp_path, kind, targets):
    source = write_model(tmp_path / "source", **MOE_FAMILIES[kind])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    options, generator = LoraConfig(lora_rank=2, lora_targets=targets), torch.Generator().manual_seed(0)
    note = add_adapters(Model(model), options, torch.float32)
    assert ("experts" in note) == ("experts" not in targets)
    initialize_adapters_(model, seed=0)
    adapters = adapters_of(model)
    for adapter in adapters.values():
        adapter.b.data.normal_(std=0.1, generator=generator)
    assert any(".experts" in name for name in adapters) == ("experts" in targets)
    assert any("shared_expert" in name for name in adapters) == (kind in ("deepseek_v3", "glm4_moe", "nemotron_h"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    export_adapter(Model(model), tokenizer, tmp_path / "final", options=options, base_model=source, card=CARD)
    merged = dict(hf_tensors(Model(model), torch.float32))

    ids = torch.arange(3, 43)[None]
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected, without_adapters = model.eval()(ids).logits, plain.eval()(ids).logits
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "final").eval()
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-5)
        assert (expected - without_adapters).abs().max() > 1e-3
        merged_by_peft = loaded.merge_and_unload()
        torch.testing.assert_close(merged_by_peft(ids).logits, expected, rtol=0, atol=1e-4)
        save_file(merged, f"{source}/model.safetensors", metadata={"format": "pt"})
        ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        torch.testing.assert_close(ours.eval()(ids).logits, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_run_logs_auxiliary_loss_and_cross_entropy(tmp_path, rows):
    """The logged loss excludes the auxiliary loss: in step 1 it is the same with and without the auxiliary loss."""
    runs = []
    for name, entries in (("with", {"output_router_logits": True, "router_aux_loss_coef": 1.0}), ("without", {})):
        source = write_model(tmp_path / name, **MOE_FAMILIES["olmoe"], **entries)
        folder = tmp_path / f"run-{name}"
        options = [f"--model_name={source}", f"--dataset_name={rows}", "--max_seq_length=256", "--batch_size=2"]
        train(*options, "--max_steps=2", "--learning_rate=1e-2", "--eval_batches=1", f"--output_dir={folder}")
        runs.append(steps(folder))
        assert "router_aux_loss" not in records(folder)[-1]  # the evaluation
    first, second = ([step.get("router_aux_loss") for step in run] for run in runs)
    assert all(1.5 < value < 3 for value in first) and second == [None, None]  # 2 experts per token, balanced: 2
    assert runs[0][0]["loss"] == runs[1][0]["loss"] and runs[0][1]["loss"] != runs[1][1]["loss"]
