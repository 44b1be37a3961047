"""LoRA on a GPU: the kernels of frozen weights, casts that are made once, and adapters that PEFT loads into the
plain model.
"""

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
from llm_fp8.optim.optimizers import build_optimizer
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
    """Call `gpu_steps.build` with adapters."""
    lora = LoraConfig(lora_rank=8, lora_targets=targets)
    model, precision, coverage = gpu_steps.build(options, device, use_te, lora=lora)
    if keep_casts:
        precision.keep_casts_of_frozen_weights()
    return model, precision, coverage


def certificate_of_step(model, precision, expected: ExpectedKernels, device) -> Certificate:
    """The certificate of a recorded step, whose kernels are held against `expected`."""
    return certify(
        expected,
        third_step_kernels(model, precision, device),
        precision.module_state(),
        num_micro_batches=MICRO_BATCHES,
    )


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("targets", [ALL, ATTENTION, LAST])
@pytest.mark.parametrize("use_te", [True, False], ids=["te", "swap"])
@pytest.mark.parametrize("scenario", ["delayed", "current", "block", None])
def test_the_kernels_are_those_that_the_certificate_expects(
    scenario, use_te, targets, recomputed, device, record_property
):
    options = BF16 if scenario is None else fp8(fp8_scenario=scenario)
    model, precision, coverage = build(options, device, use_te, targets)
    layers = decoder_layers(model.model)
    again = enable_gradient_checkpointing(layers, 1, uses_te=use_te or scenario is not None) if recomputed else ()
    model.train()
    expected = ExpectedKernels.of_model(precision, coverage, again)
    certificate = certificate_of_step(model, precision, expected, device)
    record_property("certificate", certificate.to_dict())
    assert certificate.verdict == "certified", certificate.reasons
    if scenario is None:
        assert certificate.num_fp8_gemm_kernels == 0
    else:
        surplus = certificate.num_fp8_gemm_kernels - MICRO_BATCHES * expected.num_fp8_gemms
        # The first layer counts as if it needed no dgrad, and a GEMM of block scaling may take several kernels.
        assert 0 <= surplus <= MICRO_BATCHES * 7 or (scenario == "block" and surplus > 0)
        assert 0.7 < coverage.fp8_linear_flop_share < 1
    assert all((p.grad is not None) == ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("scenario", ["delayed", "current", "block"])
@pytest.mark.parametrize("use_te", [True, False], ids=["te", "swap"])
def test_casts_made_once_are_those_made_each_time(scenario, use_te, device):
    """The losses of training passes with an evaluation between: bit for bit. An optimizer step then moves the
    adapters alone.
    """
    batch, runs = packed_batch(device), []
    for keep in (True, False):
        model, precision, _ = build(fp8(fp8_scenario=scenario), device, use_te, ALL, keep_casts=keep)
        optimizer = build_optimizer(OptimConfig(learning_rate=1e-2), "adamw_master", model.named_parameters())
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        of_run = []
        for number in range(6):
            of_run.append(step(model, precision, batch).item())
            if number == 3:
                with torch.no_grad(), precision.preserving_state(), precision.context(first_microbatch=None):
                    model(batch)
        runs.append(of_run)
        optimizer.step()
        assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
        assert step(model, precision, batch).item() != of_run[-1]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("targets", [ALL, ATTENTION, "k_proj,o_proj"])
@pytest.mark.parametrize("family", ["llama3_rope_gqa", "qwen2_qkv_bias_tied", "qwen3_qk_norm_head_dim", "llama_biases"])
def test_the_te_decoder_computes_what_peft_does(family, targets, tmp_path, device):
    """Logits and the gradients of every A and B in fp32."""
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
    [["--mixed_precision=bf16"], ["--mixed_precision=fp8"], ["--mixed_precision=fp8", "--fp8_scenario=current"]],
)
def test_a_run_exports_an_adapter_of_the_plain_model(precision, more, model_folder, tmp_path, device, record_property):
    import peft  # not above: it imports Transformer Engine, before the tests that choose a cuDNN for it

    options = training_options(model_folder, tmp_path / "run", *precision, *more, "--lora_rank=8", "--lora_dropout=0.1")
    options.remove("--use_te")  # which `more` gives where it is wanted
    done = train(*options, "--max_steps=30", "--save_every=15", "--eval_every=15")
    assert done.returncode == 0, done.stdout + done.stderr
    certificate = certificate_of(tmp_path / "run")
    record_property("certificate", certificate)
    assert certificate["verdict"] == "certified"
    of_steps = losses(tmp_path / "run")
    assert of_steps[-1] < of_steps[0]
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
def test_weights_held_in_fp8_are_the_casts_of_bf16_ones(scenario, device):
    cast, precision_of_cast, _ = build(fp8(fp8_scenario=scenario), device, True, ALL)
    for _ in range(2):  # after the first pass delayed scaling knows each weight's amax
        step(cast, precision_of_cast, packed_batch(device))
    model, precision, _ = build(fp8(fp8_scenario=scenario), device, True, ALL, keep_casts=False)
    dropped = hold_in_fp8(model, precision)
    modules = {name: module for name, module in cast.named_modules() if module in precision_of_cast.fp8_modules}
    assert dropped == sum(2 * weight.numel() for module in modules.values() for weight in linear_weights(module)) > 0
    for name, module in modules.items():
        casts, held = list(module._fp8_workspaces.values()), linear_weights(model.get_submodule(name))
        assert len(casts) == len(held)
        for ours, theirs in zip(held, casts, strict=True):
            assert torch.equal(ours.dequantize(), theirs.dequantize()), name
    step(model, precision, packed_batch(device))
    if scenario != "block":  # whose second layout has scales of its own
        weights = [weight for module in precision.fp8_modules for weight in linear_weights(module)]
        assert all(weight._transpose is None for weight in weights)


@pytest.mark.parametrize("scenario", ["delayed", "current", "block"])
def test_a_frozen_model_in_fp8_alone_takes_the_same_steps_in_less_memory(scenario, model_folder, tmp_path):
    environment, figures_of = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, {}
    options = ["--mixed_precision=fp8", f"--fp8_scenario={scenario}", "--lora_rank=8", "--max_steps=6"]
    for name, more in (("held", []), ("beside", ["--fp8_until=0.999"])):  # whose rounding leaves no step in bf16
        folder = tmp_path / name
        done = train(
            *training_options(model_folder, folder, *options, *more), "--eval_every=3", environment=environment
        )
        assert done.returncode == 0, done.stderr
        assert ("held in fp8 only" in done.stdout) == (name == "held")
        figures_of[name] = (
            losses(folder) + metric_values(folder, "eval_loss"),
            metric_values(folder, "peak_memory_gib")[-1],
        )
    # Delayed scaling's first passes cast bf16 weights with a scale of 1, and remember what activations these gave.
    tolerance = 0.01 if scenario == "delayed" else 0.0
    assert figures_of["held"][0] == pytest.approx(figures_of["beside"][0], rel=tolerance, abs=0)
    assert figures_of["held"][1] < figures_of["beside"][1]
