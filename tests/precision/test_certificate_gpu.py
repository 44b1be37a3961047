"""The certificate on a GPU: every precision is certified, and deliberately broken set-ups fail."""

from __future__ import annotations

import pytest
import torch

from llm_fp8.models.model import decoder_layers
from llm_fp8.observability.kernel_trace import gemm_kernels
from llm_fp8.precision.certificate import Certificate, ExpectedKernels, certify
from llm_fp8.precision.coverage import ModuleState
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.utils.te_internals import attention_backend
from tests.support.gpu_steps import BF16, MICRO_BATCHES, SCENARIOS, build, fp8, third_step_kernels
from tests.support.gpu_training import certificate_of, train, train_patched, training_options
from tests.support.small import steps, summary_json

pytestmark = pytest.mark.gpu


def certify_third_step(model, precision, coverage, device, recomputed=()) -> Certificate:
    kernels = third_step_kernels(model, precision, device)
    return certify(
        ExpectedKernels.of_model(precision, coverage, recomputed),
        kernels,
        precision.module_state(),
        num_micro_batches=MICRO_BATCHES,
        attention=attention_backend(),
    )


@pytest.mark.parametrize("every", [0, 1, 2], ids=["kept", "recomputed", "every-second-recomputed"])
@pytest.mark.parametrize("te_family", ["llama3_rope_gqa", "olmo2", "phi3_partial_rope", None])
@pytest.mark.parametrize("scenario", [*SCENARIOS, None])
def test_every_scenario_is_certified(scenario, te_family, every, device, record_property):
    options = BF16 if scenario is None else fp8(fp8_scenario=scenario)
    model, precision, coverage = build(options, device, te_family is not None, te_family or "llama3_rope_gqa")
    recomputed = ()
    if every:
        recomputed = enable_gradient_checkpointing(decoder_layers(model.model), every, bool(te_family or scenario))
    model.train()
    certificate = certify_third_step(model, precision, coverage, device, recomputed)
    record_property("certificate", certificate.to_dict())
    assert certificate.verdict == "certified", certificate.reasons
    assert certificate.num_unknown_gemm_kernels == 0, certificate.unknown_gemm_names
    if scenario is None:
        assert certificate.num_fp8_gemm_kernels == 0
    else:
        # Every expected GEMM is one kernel, so a missing one would fail the check. No other GEMM runs in fp8.
        assert certificate.num_fp8_gemm_kernels == certificate.num_expected_fp8_gemm_kernels > 0
        assert certificate.modules.num_in_fp8 == certificate.modules.num_modules > 0 and not certificate.remarks


@pytest.mark.parametrize(("patterns", "num_weights"), [("layers.0,layers.-1", 4), ("qkv,0.mlp", 3 * 4 - 3 - 2)])
def test_modules_kept_in_bf16_are_not_expected_in_fp8(patterns, num_weights, device):
    model, precision, coverage = build(fp8(fp8_bf16_modules=patterns), device)
    certificate = certify_third_step(model, precision, coverage, device)
    assert certificate.verdict == "certified", certificate.reasons
    expected = MICRO_BATCHES * 3 * num_weights
    assert certificate.num_fp8_gemm_kernels == certificate.num_expected_fp8_gemm_kernels == expected


def test_autocast_around_plain_linear_layers_fails(device, record_property):
    """A common mistake is an fp8 autocast around layers that ignore it. The certificate must report that mistake."""
    import transformer_engine.pytorch as te

    plan = build(fp8(), device, use_te=False)[1].plan
    model, precision, coverage = build(BF16, device, use_te=False)
    with te.autocast(enabled=True, recipe=plan.recipe):
        kernels = third_step_kernels(model, precision, device)
    num_linears = sum(isinstance(m, torch.nn.Linear) for m in decoder_layers(model.model).modules())
    expected = ExpectedKernels(plan.name, plan.compute_name, plan.effective_scenario, 3 * num_linears)
    certificate = certify(expected, kernels, ModuleState(), num_micro_batches=MICRO_BATCHES)
    record_property("certificate", certificate.to_dict())
    assert certificate.verdict == "failed"
    assert f"expected at least {num_linears * 3 * MICRO_BATCHES} fp8 GEMM kernels" in certificate.reasons[0]
    assert "fp8" not in gemm_kernels(kernels) and gemm_kernels(kernels)["bf16"].count > 0


LOST_AUTOCAST = """
import contextlib
from llm_fp8.precision.te import TEBackend
TEBackend.autocast = lambda *_, **__: contextlib.nullcontext()
"""
ONE_LAYER_IN_BF16 = """
import functools
from llm_fp8.precision.context import Precision as P
original = P.attach
def attach(self, model, layers, *more):
    reasons = original(self, model, layers, *more)
    layers[1].forward = functools.partial(self.backend.call_in_bf16, layers[1], layers[1].forward)
    return reasons
P.attach = attach
"""
AUTOCAST_IN_BF16_RUN = """
import contextlib
from llm_fp8.precision.context import Precision as P
from llm_fp8.utils.te_internals import require_te
original = P.context
@contextlib.contextmanager
def context(self, first_microbatch):
    with original(self, first_microbatch), require_te("the test").autocast(enabled=True):
        yield
P.context = context
"""
BROKEN_RUNS = {
    "autocast not entered": (LOST_AUTOCAST, ["--mixed_precision=fp8", "--fp8_scenario=current"], "but 0 ran"),
    "one layer of three not in fp8": (ONE_LAYER_IN_BF16, ["--mixed_precision=fp8"], "at least 72 fp8 GEMM kernels"),
    "fp8 left on in a bf16 run": (AUTOCAST_IN_BF16_RUN, ["--mixed_precision=bf16"], "expected no fp8 GEMM kernel"),
}


@pytest.mark.parametrize("case", BROKEN_RUNS)
def test_broken_run_ends_with_code_1(case, model_folder, tmp_path, record_property):
    patch, options, message = BROKEN_RUNS[case]
    run = train_patched(patch, *training_options(model_folder, tmp_path / "run", *options, "--max_steps", "50"))
    assert run.returncode == 1, run.stdout + run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the certificate failed") and message in last
    stored = certificate_of(tmp_path / "run")
    record_property("certificate", stored)
    assert stored["verdict"] == "failed"
    assert summary_json(tmp_path / "run")["certificate"] == stored
    recorded = [step["step"] for step in steps(tmp_path / "run")]
    assert recorded == [1, 2, 3, 4, 5], "the run ends right after the step that was recorded"


def test_run_prints_its_certificate(model_folder, tmp_path, record_property):
    run = train(*training_options(model_folder, tmp_path / "run", "--mixed_precision", "fp8", "--max_steps", "12"))
    assert run.returncode == 0, run.stderr
    stored = certificate_of(tmp_path / "run")
    # Three GEMMs for each of four weights in three layers, in two micro-batches.
    assert stored["num_fp8_gemm_kernels"] == 72 and list(stored["modules"]["recipes"]) == ["DelayedScaling"]
    assert (stored["verdict"], stored["precision"]) == ("certified", "fp8 delayed")
    assert stored["attention"] == "fused (cuDNN)" and "certificate: fp8 delayed" in run.stdout
    assert summary_json(tmp_path / "run")["recorded_step"]["time_s_by_class"]["gemm"] > 0


def test_unfused_attention_is_a_remark_of_the_certificate(model_folder, tmp_path, record_property):
    environment = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}
    run = train(
        *training_options(
            model_folder, tmp_path / "run", "--mixed_precision", "fp8", "--no_packing", "--max_steps", "2"
        ),
        environment=environment,
    )
    assert run.returncode == 0, run.stderr
    stored = certificate_of(tmp_path / "run")
    record_property("certificate", stored)
    assert (stored["verdict"], stored["attention"]) == ("certified", "unfused")
    assert any("unfused" in remark for remark in stored["remarks"])
