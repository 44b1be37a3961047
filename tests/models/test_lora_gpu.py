"""LoRA on a GPU: kernels of frozen weights, cached fp8 casts, and adapters that PEFT loads into the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llm_fp8.config.options import LoraConfig, OptimConfig
from llm_fp8.models.lora import adapters_of, needs_unfused_mlp
from llm_fp8.models.model import decoder_layers
from llm_fp8.models.parity import relative_difference
from llm_fp8.optim.optimizers import OPTIMIZERS
from llm_fp8.precision.certificate import Certificate, ExpectedKernels, certify
from llm_fp8.precision.coverage import linear_weights
from llm_fp8.precision.frozen import hold_in_fp8
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from tests.support import gpu_steps
from tests.support.batches import packed_batch
from tests.support.families import te_model, write_family
from tests.support.gpu_steps import BF16, MICRO_BATCHES, add_random_adapters_, fp8, step, third_step_kernels
from tests.support.gpu_training import certificate_of, losses, metric_values, train, training_options

pytestmark = pytest.mark.gpu

ALL, ATTENTION, LAST = "all-linear", "q_proj,v_proj", "down_proj"


def build(options, device, use_te: bool, targets: str, keep_casts: bool = True):
    """Return a model with adapters on `targets`, its `Precision` and its fp8 coverage. If `keep_casts`, frozen weights
    are cast to fp8 once and not in every step.
    """
    lora = LoraConfig(lora_rank=8, lora_targets=targets)
    model, precision, coverage = gpu_steps.build(options, device, use_te, lora=lora)
    if keep_casts:
        precision.keep_casts_of_frozen_weights()
    return model, precision, coverage


def certificate_of_step(model, precision, expected: ExpectedKernels, device) -> Certificate:
    """Record the kernels of the third step and return the result of comparing them with `expected`."""
    return certify(
        expected,
        third_step_kernels(model, precision, device),
        precision.module_state(),
        num_micro_batches=MICRO_BATCHES,
    )


@pytest.mark.parametrize("recomputed", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("targets", [ALL, ATTENTION, LAST])
@pytest.mark.parametrize("use_te", [True, False], ids=["te", "swap"])
@pytest.mark.parametrize("scenario", ["delayed", "current", "block", "backward", None])
def test_step_runs_the_kernels_that_the_certificate_expects(
    scenario, use_te, targets, recomputed, device, record_property
):
    options = BF16 if scenario is None else fp8(fp8_scenario=scenario)
    model, precision, coverage = build(options, device, use_te, targets)
    layers = decoder_layers(model.model)
    uses_te = use_te or scenario is not None
    recomputation = enable_gradient_checkpointing(layers, 1, uses_te=uses_te) if recomputed else ()
    model.train()
    expected = ExpectedKernels.of_model(precision, coverage, recomputation)
    certificate = certificate_of_step(model, precision, expected, device)
    record_property("certificate", certificate.to_dict())
    assert certificate.verdict == "certified", certificate.reasons
    if scenario is None:
        assert certificate.num_fp8_gemm_kernels == 0
    else:
        surplus = certificate.num_fp8_gemm_kernels - MICRO_BATCHES * expected.num_fp8_gemms
        # The expected number omits dgrad in the first layer, and a GEMM with block scaling may use several kernels.
        assert 0 <= surplus <= MICRO_BATCHES * 7 or (scenario == "block" and surplus > 0)
        assert (0.3 if scenario == "backward" else 0.7) < coverage.fp8_linear_flop_share < 1
    assert all((p.grad is not None) == ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("scenario", ["delayed", "current", "block", "backward"])
@pytest.mark.parametrize("use_te", [True, False], ids=["te", "swap"])
def test_cached_casts_give_the_same_losses(scenario, use_te, device):
    """Losses are bitwise equal with and without cached casts, even if an evaluation comes between two steps."""
    batch, runs = packed_batch(device), []
    for keep in (True, False):
        model, precision, _ = build(fp8(fp8_scenario=scenario), device, use_te, ALL, keep_casts=keep)
        optimizer = OPTIMIZERS["adamw_master"].build(model.named_parameters(), OptimConfig(learning_rate=1e-2), False)
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        run_losses = []
        for number in range(6):
            run_losses.append(step(model, precision, batch).item())
            if number == 3:
                with torch.no_grad(), precision.preserving_state(), precision.context(first_microbatch=None):
                    model(batch)
        runs.append(run_losses)
        optimizer.step()
        assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
        assert step(model, precision, batch).item() != run_losses[-1]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("targets", [ALL, ATTENTION, "k_proj,o_proj"])
@pytest.mark.parametrize("family", ["llama3_rope_gqa", "qwen2_qkv_bias_tied", "qwen3_qk_norm_head_dim", "llama_biases"])
def test_te_decoder_matches_peft(family, targets, tmp_path, device):
    """Compare the logits, and the gradients of A and B of every adapter, in fp32."""
    hf = AutoModelForCausalLM.from_pretrained(write_family(tmp_path, family, torch.float32)).to(device)
    lora = LoraConfig(lora_rank=8, lora_targets=targets)
    te = te_model(tmp_path, device=device, unfused_mlp=needs_unfused_mlp(lora)).module
    ids = torch.randint(3, 1024, (2, 32), generator=torch.Generator().manual_seed(0)).to(device)
    outputs = []
    for model in (hf, te):
        add_random_adapters_(model, lora, torch.float32)
        outputs.append(model.train()(input_ids=ids, labels=ids))
        outputs[-1].loss.backward()
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=1e-4)
    expected, adapters = adapters_of(hf), adapters_of(te)
    assert expected.keys() == adapters.keys()
    for name in expected:
        assert relative_difference(adapters[name].a.grad, expected[name].a.grad) < 1e-4, name
        assert relative_difference(adapters[name].b.grad, expected[name].b.grad) < 1e-4, name


@pytest.mark.parametrize(
    "more", [["--use_te"], ["--use_te", "--gradient_checkpointing", "--lora_targets=q_proj,v_proj"], ["--packing"]]
)
@pytest.mark.parametrize(
    "precision",
    [
        ["--mixed_precision=bf16"],
        *(["--mixed_precision=fp8", f"--fp8_scenario={name}"] for name in ("delayed", "current", "backward")),
    ],
)
def test_exported_adapter_loads_into_the_plain_model(precision, more, model_folder, tmp_path, device, record_property):
    import peft  # imported late: it imports Transformer Engine, for which some tests choose a cuDNN first

    options = training_options(model_folder, tmp_path / "run", *precision, *more, "--lora_rank=8", "--lora_dropout=0.1")
    options.remove("--use_te")  # `more` adds it if the case uses it
    process = train(*options, "--max_steps=30", "--save_every=15", "--eval_every=15")
    assert process.returncode == 0, process.stdout + process.stderr
    certificate = certificate_of(tmp_path / "run")
    record_property("certificate", certificate)
    assert certificate["verdict"] == "certified"
    step_losses = losses(tmp_path / "run")
    assert step_losses[-1] < step_losses[0]
    final = tmp_path / "run" / "final"
    assert all(tensor.isfinite().all() for tensor in load_file(final / "adapter_model.safetensors").values())
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).to(device)
    ids = torch.randint(3, 1024, (2, 32), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        before = base(input_ids=ids).logits.float()
        after = peft.PeftModel.from_pretrained(base, final).eval()(input_ids=ids).logits.float()
    assert (after - before).abs().max() > 1e-2
    checkpoints = sum(path.stat().st_size for path in (tmp_path / "run" / "checkpoints" / "step-00000030").rglob("*"))
    model_bytes = sum(path.stat().st_size for path in Path(model_folder).glob("*.safetensors"))
    assert checkpoints < model_bytes


@pytest.mark.parametrize("scenario", ["delayed", "current", "block"])
def test_weights_stored_in_fp8_equal_casts_of_bf16_weights(scenario, device):
    cast, precision_of_cast, _ = build(fp8(fp8_scenario=scenario), device, True, ALL)
    for _ in range(2):  # after the first pass delayed scaling knows each weight's amax
        step(cast, precision_of_cast, packed_batch(device))
    model, precision, _ = build(fp8(fp8_scenario=scenario), device, True, ALL, keep_casts=False)
    dropped = hold_in_fp8(model, precision)
    modules = {name: module for name, module in cast.named_modules() if module in precision_of_cast.fp8_modules}
    assert dropped == sum(2 * weight.numel() for module in modules.values() for weight in linear_weights(module)) > 0
    for name, module in modules.items():
        casts, weights = list(module._fp8_workspaces.values()), linear_weights(model.get_submodule(name))
        assert len(casts) == len(weights)
        for ours, theirs in zip(weights, casts, strict=True):
            assert torch.equal(ours.dequantize(), theirs.dequantize()), name
    step(model, precision, packed_batch(device))
    if scenario != "block":  # its transposed copy needs other scales
        weights = [weight for module in precision.fp8_modules for weight in linear_weights(module)]
        assert all(weight._transpose is None for weight in weights)


@pytest.mark.parametrize("scenario", ["delayed", "current", "block"])
def test_frozen_weights_in_fp8_only_give_the_same_losses_in_less_memory(scenario, model_folder, tmp_path):
    environment, metrics = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, {}
    options = ["--mixed_precision=fp8", f"--fp8_scenario={scenario}", "--lora_rank=8", "--max_steps=6", "--random_init"]
    for name, more in (("fp8_only", ["--no_export"]), ("fp8_and_bf16", [])):  # the export of random weights needs bf16
        folder = tmp_path / name
        process = train(
            *training_options(model_folder, folder, *options, *more), "--eval_every=3", environment=environment
        )
        assert process.returncode == 0, process.stderr
        assert ("held in fp8 only" in process.stdout) == (name == "fp8_only")
        metrics[name] = (
            losses(folder) + metric_values(folder, "eval_loss"),
            metric_values(folder, "peak_memory_gib")[-1],
        )
    # With delayed scaling, the first passes cast bf16 weights with a scale of 1, which affects later activation scales.
    tolerance = 0.01 if scenario == "delayed" else 0.0
    assert metrics["fp8_only"][0] == pytest.approx(metrics["fp8_and_bf16"][0], rel=tolerance, abs=0)
    assert metrics["fp8_only"][1] < metrics["fp8_and_bf16"][1]
