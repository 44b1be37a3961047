"""torchao's fp8 and compiled layers on a GPU, run as a user runs them: real fp8 kernels, and certificates."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from llm_fp8.config.recipes import RECIPES, recipe_names
from llm_fp8.run.records import MOST_RECOMPILATIONS
from tests.support.gpu_training import certificate_of, losses, train, train_patched, training_options
from tests.support.small import run_json, summary_json

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
]

MICRO_BATCHES = 2
NUM_WEIGHTS = 3 * 7
"""The model has three layers of seven weights."""
FP8 = ["--mixed_precision", "fp8"]  # --fp8_backend auto


def hf_options(model: Path, folder: Path, *more: str) -> list[str]:
    """Return the options of a run with the Hugging Face decoder and packed rows."""
    options = [option for option in training_options(model, folder, *more) if option != "--use_te"]
    return [*options, "--packing", "--attn_implementation", "sdpa"]


@pytest.fixture(scope="module")
def bf16_losses(model_folder, tmp_path_factory) -> list[float]:
    by_flag = {}
    for flag in ("--no_compile", "--compile"):
        folder = tmp_path_factory.mktemp("bf16") / "run"
        run = train(*hf_options(model_folder, folder, "--mixed_precision", "bf16", "--max_steps", "12", flag))
        assert run.returncode == 0, run.stderr
        certificate, by_flag[flag] = certificate_of(folder), losses(folder)
        assert (certificate["verdict"], certificate["num_fp8_gemm_kernels"]) == ("certified", 0), certificate
    assert by_flag["--compile"] == pytest.approx(by_flag["--no_compile"], rel=1e-2)
    return by_flag["--compile"]


@pytest.mark.parametrize(
    "more", [[], ["--gradient_checkpointing"], ["--optimizer", "adamw_fp32"]], ids=["plain", "recomputed", "fp32"]
)
@pytest.mark.parametrize("scenario", recipe_names("torchao"))
def test_every_recipe_is_certified(scenario, more, model_folder, bf16_losses, tmp_path, record_property):
    folder = tmp_path / "run"
    run = train(*hf_options(model_folder, folder, *FP8, "--fp8_scenario", scenario, "--max_steps", "12", *more))
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    certificate = certificate_of(folder)
    record_property("certificate", certificate)
    assert certificate["verdict"] == "certified" and not certificate["remarks"], certificate["reasons"]
    assert certificate["num_unknown_gemm_kernels"] == 0, certificate["unknown_gemm_names"]
    expected = len(RECIPES[scenario].gemms_in_fp8) * NUM_WEIGHTS * MICRO_BATCHES
    assert certificate["num_expected_fp8_gemm_kernels"] == expected <= certificate["num_fp8_gemm_kernels"]
    if not more:
        assert certificate["num_fp8_gemm_kernels"] == expected, "each GEMM is one kernel, and no other runs in fp8"
    modules = certificate["modules"]
    assert modules["library"] == "torchao" and modules["recipes"] == {scenario: NUM_WEIGHTS}
    assert f"certificate: fp8 {scenario}" in run.stdout and "recompile_limit" not in run.stdout + run.stderr
    assert "decoder layers: compiled" in run.stdout
    assert summary_json(folder)["compile"]["num_recompilations"] <= MOST_RECOMPILATIONS
    precision = run_json(folder)["precision"]
    assert (precision["backend"], precision["emulated"]) == ("torchao", False)
    assert precision["effective_scenario"] == scenario
    assert precision["optimizer"] == ("adamw_fp32" if "adamw_fp32" in more else "adamw_master")
    fp8_losses = losses(folder)
    record_property("losses", fp8_losses)
    record_property("bf16_losses", bf16_losses)
    assert fp8_losses == pytest.approx(bf16_losses, rel=1e-2) and fp8_losses[-1] < fp8_losses[0] - 0.05


def test_torchao_layers_that_compute_in_bf16_fail(model_folder, tmp_path):
    """A patch makes torchao's modules multiply in bf16. The recorded kernels show that, and the certificate fails."""
    patch = """
import torch
from torchao.float8.float8_linear import Float8Linear
Float8Linear.forward = lambda self, x: torch.nn.functional.linear(x, self.weight, self.bias)
"""
    run = train_patched(patch, *hf_options(model_folder, tmp_path / "run", *FP8, "--max_steps", "12"))
    assert run.returncode == 1 and "the certificate failed" in run.stderr, run.stderr[-3000:]
    assert certificate_of(tmp_path / "run")["verdict"] == "failed"
