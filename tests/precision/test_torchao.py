"""--fp8_backend torchao, emulated on the CPU: operands are rounded to fp8 and multiplied in high precision."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import row_of
from llm_fp8.models.model import decoder_layers
from llm_fp8.precision.certificate import ExpectedKernels, certify
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import bf16_modules, measure_coverage
from llm_fp8.precision.torchao import TorchaoBackend, build_config
from llm_fp8.utils.errors import UserError
from tests.support.processes import run_ranks
from tests.support.small import assert_same_continuation, precision_on, run_json, short_run, steps, tiny_config, train

CPU = torch.device("cpu")
FP8 = ["--mixed_precision=fp8", "--fp8_backend=torchao"]


def options(model: object, rows: str, folder: Path, *more: object) -> list[str]:
    return short_run(model, rows, folder, "--learning_rate=1e-3", "--max_steps=4", *more)


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps(folder)]


def convert_model(scenario: str, **changes: object) -> tuple[nn.Module, Precision]:
    """Build a small model whose config has `changes`, and convert the linear layers to torchao's recipe `scenario`."""
    options = PrecisionConfig(mixed_precision="fp8", fp8_backend="torchao", fp8_scenario=scenario)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(**changes), dtype=torch.bfloat16)
    precision = Precision(precision_on(options, CPU), options, CPU, torch.bfloat16)
    precision.attach(model, decoder_layers(model), converts=True)
    return model, precision


# --- Training ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_recipe_trains_close_to_bf16(tiny_model, rows, tmp_path):
    by_recipe = {}
    for scenario in ("bf16", "default", "rowwise", "rowwise_with_gw_hp"):
        precision = ["--mixed_precision=bf16"] if scenario == "bf16" else [*FP8, f"--fp8_scenario={scenario}"]
        train(*options(tiny_model, rows, tmp_path / scenario, "--batch_size=4", *precision, "--no_export"))
        by_recipe[scenario] = losses(tmp_path / scenario)
        if scenario == "bf16":
            continue
        fp8, bf16 = by_recipe[scenario], by_recipe["bf16"]
        assert fp8 == pytest.approx(bf16, rel=5e-3) and fp8 != bf16
        record = run_json(tmp_path / scenario)["precision"]
        assert (record["effective"], record["backend"], record["emulated"]) == ("fp8", "torchao", True)
        assert record["effective_scenario"] == ("tensorwise" if scenario == "default" else scenario)
        assert set(record["coverage"]["converted"].values()) == {2}
        assert record["coverage"]["skipped"] == {"lm_head": "1 bf16 (lm_head)"}
    assert by_recipe["bf16"][-1] < by_recipe["bf16"][0] - 0.02, "training must change the loss"


@pytest.mark.slow
def test_training_resumes_and_recomputes_bit_for_bit(tiny_model, rows, tmp_path):
    """The run has packed rows, fp32 master weights split into bf16 parameters and remainders, and a layer in bf16."""
    shared = ["--batch_size=2", *FP8, "--packing", "--optimizer=adamw_master", "--fp8_bf16_modules=layers.-1"]
    whole, recomputed, resumed = tmp_path / "whole", tmp_path / "recomputed", tmp_path / "resumed"
    train(*options(tiny_model, rows, whole, *shared, "--save_every=2"))
    train(*options(tiny_model, rows, recomputed, *shared, "--gradient_checkpointing", "--no_export"))
    checkpoint = whole / "checkpoints" / "step-00000002"
    train(*options(tiny_model, rows, resumed, *shared, f"--resume_from={checkpoint}"))
    assert losses(recomputed) == losses(whole)
    assert_same_continuation(whole, resumed, completed=2)
    coverage = run_json(whole)["precision"]["coverage"]
    assert set(coverage["converted"].values()) == {1}
    assert coverage["skipped"]["model.layers.*.mlp.down_proj"] == "1 bf16 (kept in bf16)"


# --- Several processes ------------------------------------------------------------------------------------------------


def print_gathered_dtypes() -> None:
    """Make this process print the dtypes of the weights that torchao gives to FSDP2's all-gather."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Weight

    gather = Weight.fsdp_pre_all_gather

    def printing(self, mesh):
        tensors, more = gather(self, mesh)
        sys.stdout.write("".join(f"gathers {tensor.dtype}\n" for tensor in tensors))
        return tensors, more

    Weight.fsdp_pre_all_gather = printing


@pytest.fixture(scope="module")
def losses_of_one_process(tiny_model, rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train(*options(tiny_model, rows, folder, "--batch_size=4", "--gradient_accumulation_steps=2", *FP8, "--no_export"))
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp_full"])
def test_two_processes_have_the_losses_of_one(mode, tiny_model, rows, losses_of_one_process, tmp_path):
    cut = ["--batch_size=2", "--gradient_accumulation_steps=2", f"--sharding_mode={mode}", "--no_export"]
    run_ranks(2, tmp_path / "two", *options(tiny_model, rows, tmp_path / "two", *cut, *FP8))
    # The micro-batches differ, and so do their scales. FSDP also passes the weights to torchao in bf16.
    assert losses(tmp_path / "two") == pytest.approx(losses_of_one_process, rel=3e-3)


@pytest.mark.slow
def test_fp8_params_gathers_fp8_weights_and_resumes_exactly(tiny_model, rows, losses_of_one_process, tmp_path):
    cut = ["--batch_size=4", "--sharding_mode=fsdp_full", "--fp8_params", *FP8]
    two, resumed = tmp_path / "two", tmp_path / "resumed"
    log = run_ranks(2, two, *options(tiny_model, rows, two, *cut, "--save_every=2"), first=print_gathered_dtypes)
    assert losses(two) == pytest.approx(losses_of_one_process, rel=3e-3)
    assert set(re.findall("gathers (.*)", log)) == {"torch.float8_e4m3fn"}
    checkpoint = two / "checkpoints" / "step-00000002"
    run_ranks(2, resumed, *options(tiny_model, rows, resumed, *cut, f"--resume_from={checkpoint}"))
    assert_same_continuation(two, resumed, completed=2)
    # The checkpoint has unquantised weights, so one process without the option can resume from it.
    single = options(tiny_model, rows, tmp_path / "single", "--batch_size=4", "--gradient_accumulation_steps=2", *FP8)
    train(*single, f"--resume_from={checkpoint}", "--no_export")
    assert losses(tmp_path / "single") == pytest.approx(losses(two)[2:], rel=3e-3)


# --- The converted layers ---------------------------------------------------------------------------------------------


class MixedLayers(nn.Module):
    """A model with one layer that the conversion replaces, and three that the conversion skips."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.odd = nn.Linear(32, 48), nn.Linear(24, 32)
        self.lm_head, self.score = nn.Linear(32, 64), nn.Linear(32, 16)


def test_conversion_skips_unsupported_sizes_and_heads():
    model, backend = MixedLayers(), TorchaoBackend(build_config("rowwise", emulate=True))
    skipped = backend.convert(model)
    assert skipped == {"odd": "size 24 x 32 is not a multiple of 16", "lm_head": "lm_head", "score": "lm_head"}
    coverage = measure_coverage(model, backend.linears_of(model).values(), "bf16", skipped)
    assert coverage.converted == {"q_proj": 1} and len(coverage.skipped) == 3
    assert coverage.skipped["odd"] == "1 bf16 (size 24 x 32 is not a multiple of 16)"


PATTERNS = {
    "layers.-1": {"model.layers.1"},
    "layers.0": {"model.layers.0"},
    "layers.:2": {"model.layers.0", "model.layers.1"},
    "0.mlp": {"model.layers.0.mlp"},
    "v_proj, layers.1:": {"model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj", "model.layers.1"},
    "layers.?.*.up_proj": {"model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"},
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_fp8_bf16_modules_selects_layers_and_modules(pattern):
    model = AutoModelForCausalLM.from_config(tiny_config())
    names = {module: name for name, module in model.named_modules()}
    modules = bf16_modules(PrecisionConfig(fp8_bf16_modules=pattern), model, decoder_layers(model))
    assert {names[module] for module in modules} == PATTERNS[pattern]


@pytest.mark.parametrize("pattern", ["qkv", "layers.7", "layers.5:"])
def test_pattern_without_a_match_is_refused(pattern):
    model = AutoModelForCausalLM.from_config(tiny_config())
    with pytest.raises(UserError, match=f"--fp8_bf16_modules {pattern}: "):
        bf16_modules(PrecisionConfig(fp8_bf16_modules=pattern), model, decoder_layers(model))


# --- The certificate --------------------------------------------------------------------------------------------------

FP8_KERNEL = "nvjet_sm90_qqtst_128x256_128x6_2x1_v_bz_coopA_TNT"
BF16_KERNEL = "nvjet_sm90_ttt_128x256_64x4_2x1_v_bz_coopA_TNT"


def pretend_hardware(model: nn.Module, scenario: str) -> None:
    """Configure torchao's modules for the recipe `scenario` as on a GPU, without the emulation for CPUs."""
    for module in TorchaoBackend().linears_of(model).values():
        module.config = build_config(scenario, emulate=False)


@pytest.mark.parametrize(("scenario", "num_gemms"), [("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2)])
def test_certificate_expects_the_gemms_of_the_recipe(scenario, num_gemms):
    model, precision = convert_model(scenario)
    all_in_fp8 = measure_coverage(model, precision.fp8_modules, "bf16", {}).fp8_linear_flop_share
    coverage = measure_coverage(model, precision.fp8_modules, "bf16", {}, gemms_in_fp8=row_of(scenario).gemms_in_fp8)
    assert coverage.fp8_linear_flop_share == pytest.approx(all_in_fp8 * num_gemms / 3)
    expected = ExpectedKernels.of_model(precision, coverage, recomputed=decoder_layers(model))
    assert expected.num_fp8_gemms == num_gemms * 14, "GEMMs that torch.compile recomputes are not expected"
    num_expected = 2 * expected.num_fp8_gemms

    def verdict(num_fp8: int, name: str = FP8_KERNEL):
        kernels = {name: (num_fp8, 0.1), BF16_KERNEL: (2 * 3 * 14 - num_fp8 + 6, 0.1)}
        return certify(expected, kernels, precision.module_state(), num_micro_batches=2)

    assert verdict(0).verdict == "failed" and precision.module_state().num_in_fp8 == 0, "emulated GEMMs are not fp8"
    pretend_hardware(model, scenario)
    state = precision.module_state()
    assert (state.library, state.num_modules, state.num_in_fp8, state.recipes) == ("torchao", 14, 14, {scenario: 14})
    assert verdict(num_expected).verdict == "certified" and not verdict(num_expected).remarks
    assert json.loads(json.dumps(verdict(num_expected).to_dict()))["modules"]["library"] == "torchao"
    assert verdict(num_expected - 1).verdict == "failed"
    assert verdict(num_expected, "some_new_gemm").verdict == "undetermined"
    # One module whose forward function was replaced does not count as fp8.
    model.model.layers[0].mlp.up_proj.forward = lambda x: x
    assert verdict(num_expected).verdict == "undetermined"
    assert verdict(num_expected, "some_new_gemm").verdict == "failed"


def test_torchao_in_a_bf16_run_fails():
    model, _ = convert_model("rowwise")
    pretend_hardware(model, "rowwise")
    options = PrecisionConfig(mixed_precision="bf16")
    bf16 = Precision(precision_on(options, CPU), options, CPU, torch.bfloat16)
    bf16.attach(model, decoder_layers(model))
    expected, kernels = ExpectedKernels("bf16", "bf16"), {BF16_KERNEL: (45, 0.1)}
    certificate = certify(expected, kernels, bf16.module_state(), num_micro_batches=1)
    assert certificate.verdict == "failed" and len(certificate.reasons) == 1
