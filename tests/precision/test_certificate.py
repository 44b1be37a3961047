"""The certificate, which judges by the kernels of a step whether a run has the requested precision. Tests of verdicts
on made-up steps with real kernel names, and of the consequences of a verdict in a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.observability.kernel_trace import StepProfile
from llm_fp8.precision.certificate import ExpectedKernels, certify, worst
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import ModuleState
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.precision.te import TEBackend
from llm_fp8.run.run import run_training
from llm_fp8.settle.plan import RunPlan
from llm_fp8.tools.script import run_script
from tests.support.processes import ROOT, exit_code, start_ranks
from tests.support.small import short_run, steps, summary_json

FP8_GEMMS = {
    "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT": (160, 0.010229),
    "nvjet_sm90_qqtst_320x128_128x3_1x2_h_bz_coopB_TNT": (32, 0.006559),
    "nvjet_sm90_qrtst_144x128_128x6_1x2_h_bz_coopA_algo2_TNN": (64, 0.006494),
    "nvjet_sm90_qrtst_128x160_128x5_1x2_h_bz_coopA_algo2_TNT": (32, 0.006287),
    "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT": (96, 0.004978),
}
HEAD_GEMMS = {
    "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT": (2, 0.005362),
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN": (2, 0.005295),
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": (2, 0.005049),
}
OTHERS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1": (32, 0.005353),
    "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*)": (64, 0.0022),
    "_update_kernel": (98, 0.006691),
}
FP8_STEP = FP8_GEMMS | HEAD_GEMMS | OTHERS
"""Two micro-batches of Llama-3.2-1B with delayed scaling on an H200: a dict from kernel name to (count, seconds)."""
BF16_STEP = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": (130, 0.025873),
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN": (98, 0.023798),
    "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT": (34, 0.017286),
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": (128, 0.011476),
    "_update_kernel": (98, 0.006691),
}
RENAMED = {f"some_new_gemm_{number}": times for number, times in enumerate(FP8_GEMMS.values())} | HEAD_GEMMS | OTHERS
"""The fp8 step as if a later cuBLAS gave its GEMM kernels other names."""
OPAQUE = {f"device_kernel_{number}": times for number, times in enumerate(FP8_GEMMS.values())} | HEAD_GEMMS | OTHERS
"""The fp8 step with kernel names that do not even show that the kernels are GEMMs."""

DELAYED = ExpectedKernels("fp8 delayed", "bf16", "delayed", num_fp8_gemms=192, fp8_linear_flop_share=0.787)
NVFP4 = dataclasses.replace(DELAYED, precision="fp8 nvfp4", scenario="nvfp4")
BF16 = ExpectedKernels("bf16", "bf16")
IN_FP8 = ModuleState(48, 48, recipes={"DelayedScaling": 48})
NOT_IN_FP8 = ModuleState(num_modules=48)
IN_NVFP4 = ModuleState(48, 48, recipes={"NVFP4BlockScaling": 48})
FP4_STEP = {"nvjet_sm100_ootst_128x128_256x7_4x1_2cta_v_bx_Avec16UE4M3_Bvec16UE4M3_TNT": (384, 0.02)} | HEAD_GEMMS
"""A step in NVFP4, with the names that cuBLAS's GEMM kernels have on a B200."""


def judge(expected=DELAYED, kernels=FP8_STEP, state=IN_FP8, num_micro_batches=2, **more):
    return certify(expected, kernels, state, num_micro_batches=num_micro_batches, **more)


def test_fp8_step_is_certified():
    certificate = judge(attention="fused (cuDNN)")
    assert certificate.verdict == "certified" and not certificate.reasons and not certificate.remarks
    assert (certificate.num_fp8_gemm_kernels, certificate.num_expected_fp8_gemm_kernels) == (384, 384)
    assert certificate.fp8_gemm_time_share == pytest.approx(34.547 / 50.253, rel=1e-3)
    assert "384 of 390" in certificate.describe()
    assert list(certificate.time_s_by_class) == ["gemm", "optimizer", "attention", "cast"]
    stored = json.loads(json.dumps(certificate.to_dict()))
    assert stored["verdict"] == "certified" and stored["modules"]["num_in_fp8"] == 48
    schema = json.loads((ROOT / "docs" / "certificate.schema.json").read_text())["properties"]
    assert schema.keys() == stored.keys() and schema["modules"]["properties"].keys() == stored["modules"].keys()


def test_bf16_step_is_certified():
    certificate = judge(BF16, BF16_STEP, NOT_IN_FP8, attention="fused (cuDNN)")
    assert certificate.verdict == "certified"
    assert "none of 390" in certificate.describe()
    plain = judge(BF16, BF16_STEP, ModuleState(), attention="sdpa (cuDNN)")
    assert plain.verdict == "certified", "a model without Transformer Engine has no module states"


ONE_FP8_KERNEL = {"nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_TNT": (1, 1e-5)}
FAILURES = {
    "fp8 requested, nothing converted": dict(kernels=BF16_STEP, state=ModuleState()),
    "fp8 requested, autocast lost": dict(kernels=BF16_STEP, state=NOT_IN_FP8),
    "a layer outside fp8": dict(kernels=FP8_STEP | {"nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT": (72, 0.004)}),
    "recomputed outside fp8": dict(expected=dataclasses.replace(DELAYED, num_fp8_gemms=256)),
    "one micro-batch outside fp8": dict(num_micro_batches=4),
    "fp4 requested, and fp8 ran": dict(expected=NVFP4, state=IN_NVFP4),
    "fp8 requested, and fp4 ran": dict(kernels=FP4_STEP),
    "too few unknown GEMMs to be the missing ones": dict(kernels=BF16_STEP | {"a_gemm": (40, 0.001)}),
    "unknown GEMMs, modules not in fp8": dict(kernels=RENAMED, state=NOT_IN_FP8),
    "unknown kernels, modules not in fp8": dict(kernels=OPAQUE, state=NOT_IN_FP8),
    "unknown kernels, no modules": dict(kernels=OPAQUE, state=ModuleState()),
    "unknown kernels, too short to be the missing ones": dict(kernels=BF16_STEP | {"a_tiny_kernel": (900, 0.0005)}),
    "another recipe": dict(state=dataclasses.replace(IN_FP8, recipes={"Float8CurrentScaling": 48})),
    "fprop in fp8 although the recipe has it in bf16": dict(
        expected=dataclasses.replace(DELAYED, scenario="backward", num_fp8_gemms=128, most_fp8_gemms=128),
        state=dataclasses.replace(IN_FP8, recipes={"BackwardRecipe": 48}),
    ),
    "another format": dict(
        expected=dataclasses.replace(DELAYED, fp8_format="E4M3"),
        state=dataclasses.replace(IN_FP8, formats={"HYBRID": 48}),
    ),
    "an empty amax history": dict(state=dataclasses.replace(IN_FP8, num_without_amax=3)),
    "fp8 left on in a bf16 run": dict(expected=BF16, kernels=FP8_STEP, state=IN_FP8),
    "one fp8 kernel in a bf16 run": dict(expected=BF16, kernels=BF16_STEP | ONE_FP8_KERNEL, state=NOT_IN_FP8),
    "one fp8 and unknown ones in bf16": dict(expected=BF16, kernels=OPAQUE | ONE_FP8_KERNEL, state=ModuleState()),
    "a module in fp8 in a bf16 run": dict(
        expected=BF16, kernels=BF16_STEP, state=dataclasses.replace(NOT_IN_FP8, num_in_fp8=1)
    ),
    "a bf16 run that computes in fp32": dict(
        expected=BF16, kernels={"ampere_sgemm_128x64_tn": (390, 0.3)}, state=ModuleState()
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_step_fails(case):
    certificate = judge(**FAILURES[case])
    assert certificate.verdict == "failed" and certificate.reasons and "FAILED" in certificate.describe()


def test_failure_names_expected_and_actual_numbers():
    reason = judge(**FAILURES["recomputed outside fp8"]).reasons[0]
    assert "at least 512 fp8 GEMM kernels, but 384 ran (all GEMM kernels: 6 bf16, 384 fp8)" in reason


def test_renamed_gemm_kernels_are_undetermined():
    certificate = judge(kernels=RENAMED)
    assert certificate.verdict == "undetermined"
    assert certificate.gemm_kernels_by_type == {"unknown": 384, "bf16": 6} and len(certificate.unknown_gemm_names) == 5
    assert "384 GEMM kernels of unknown type" in certificate.reasons[0]
    # In a bf16 run, short unknown GEMMs are only a remark. Longer ones could be a layer in fp8, and if all GEMMs are
    # unknown, nothing shows that the run is in bf16.
    short = judge(BF16, BF16_STEP | {"a_gemm": (3, 0.0005)}, NOT_IN_FP8)
    assert short.verdict == "certified" and short.remarks == ["3 GEMM kernels of unknown type"]
    assert judge(BF16, BF16_STEP | {"a_gemm": (3, 0.001)}, NOT_IN_FP8).verdict == "undetermined"
    assert judge(BF16, {"a_gemm": (390, 0.1)}, NOT_IN_FP8).verdict == "undetermined"


def test_long_unrecognised_kernels_are_undetermined():
    certificate = judge(kernels=OPAQUE)
    assert certificate.verdict == "undetermined" and certificate.gemm_kernels_by_type == {"bf16": 6}
    assert certificate.unrecognised_time_share == pytest.approx(34.547 / 50.253, rel=1e-3)
    half = {f"some_gemm{name}" if number % 2 else name: times for number, (name, times) in enumerate(OPAQUE.items())}
    assert judge(kernels=half).verdict == "undetermined", "unknown GEMMs and unrecognised kernels count together"
    without_gemms = judge(kernels={"a_kernel<" + 200 * "x": (390, 0.1)})
    assert without_gemms.verdict == "undetermined" and len(without_gemms.reasons[0]) < 400
    # In a bf16 run casts to fp8 fail, and otherwise nothing would show that kernels are fp8 GEMMs.
    assert judge(BF16, OPAQUE, ModuleState()).verdict == judge(BF16, OPAQUE, NOT_IN_FP8).verdict == "failed"
    assert judge(BF16, BF16_STEP | {"a_long_kernel": (9, 0.05)}, ModuleState()).verdict == "undetermined"
    assert judge(BF16, BF16_STEP | {"a_short_kernel": (900, 0.0005)}, ModuleState()).verdict == "certified"
    # A step with all expected fp8 kernels is certified, whatever else runs in it.
    with_all = judge(kernels=FP8_STEP | {"a_kernel": (10, 0.01)})
    assert with_all.verdict == "certified" and with_all.remarks[0].startswith("10 kernels that match no rule (16.6% of")


@pytest.mark.parametrize(
    "name",
    "double_buffered_fp8_gemm_kernel gemm_kernel<uint8_t,__nv_fp8_e4m3> chunk_scaled_fp8_gemm_kernel _fp8_mm "
    "_scaled_grouped_mm_kernel_bf16_out fused_linear<unsigned-char,__nv_bfloat16> parallel_fp8_linear_kernel "
    "cutlass_89_tensorop_bf16_s16832gemm_e4m3_128x64 flash_fwd<cutlass::float_e4m3_t> cast<__nv_fp8_e4m3>".split(),
)
def test_kernel_that_may_be_fp8_does_not_run_in_a_certified_bf16_step(name):
    assert judge(BF16, BF16_STEP | {name.replace("-", " "): (9, 0.05)}, ModuleState()).verdict != "certified"


def test_missing_kernels_or_contradicting_modules_are_undetermined():
    empty = judge(kernels={})
    assert empty.verdict == "undetermined" and "CUPTI" in empty.reasons[0] and empty.fp8_gemm_time_share is None
    assert "none of 0" not in empty.describe() and "0 of 0 GEMM kernels" in empty.describe()
    contradiction = judge(state=dataclasses.replace(IN_FP8, num_in_fp8=47))
    assert contradiction.verdict == "undetermined" and "47 of 48 modules" in contradiction.reasons[0]
    # Without kernels, the states of the modules can fail a step but not certify it.
    assert judge(kernels={}, state=NOT_IN_FP8).verdict == judge(BF16, {}, IN_FP8).verdict == "failed"
    assert judge(BF16, {}, NOT_IN_FP8).verdict == "undetermined"
    without_recipe = ModuleState(num_modules=48, num_in_fp8=24, num_recipe_unreadable=24)
    assert judge(state=without_recipe).verdict == "undetermined", "24 modules are not in fp8"


def test_nvfp4_step_is_certified():
    assert judge(NVFP4, FP4_STEP, IN_NVFP4).verdict == "certified"


def test_worst_certificate_of_all_ranks_counts():
    good, open_, bad = judge(), judge(kernels=RENAMED), judge(kernels=BF16_STEP, state=NOT_IN_FP8)
    assert worst([good, good]) is good and worst([good, open_]) is open_ and worst([open_, bad, good]) is bad


# --- The states of Transformer Engine's modules -----------------------------------------------------------------------


class DelayedScaling:
    """Stand in for Transformer Engine's `DelayedScaling`."""


def te_linear(in_fp8: bool, largest: float = 2.0) -> nn.Linear:
    """Imitate a TE layer after a step, which ran in fp8 if `in_fp8`. `largest` is the amax of the layer's inputs."""
    module = nn.Linear(4, 4)
    module.fp8, module.fp8_meta = in_fp8, {}
    if in_fp8:
        history = torch.zeros(16, 3)
        history[-1, 0] = largest
        module.fp8_meta = {"recipe": DelayedScaling(), "scaling_fwd": SimpleNamespace(amax_history=history)}
    return module


def test_module_state_counts_modules_in_fp8_and_without_amax():
    state = TEBackend().state([te_linear(True), te_linear(True, largest=0.0), te_linear(False)])
    assert state == ModuleState(3, 2, 0, {"DelayedScaling": 2}, num_without_amax=1)


def test_bf16_run_reads_the_state_of_all_te_linear_modules():
    model = nn.Sequential(te_linear(True), nn.Linear(4, 4), te_linear(False))
    precision = Precision(PrecisionPlan("bf16", "bf16"), PrecisionConfig(), torch.device("cpu"), torch.bfloat16)
    precision.attach(model, nn.ModuleList())
    state = precision.module_state()
    assert (state.num_modules, state.num_in_fp8, precision.fp8_modules) == (2, 1, frozenset())


# --- In a run ---------------------------------------------------------------------------------------------------------


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, kernels: dict[str, tuple[int, float]]) -> None:
    """Make a run on the CPU record `kernels`, a dict from kernel name to (count, seconds), as if it used a GPU."""
    profile = StepProfile(span_s=0.1, work_s=0.1, kernels=kernels)

    @contextlib.contextmanager
    def profiled():
        yield profile

    monkeypatch.setattr("llm_fp8.run.timeline.profiled", profiled)
    monkeypatch.setattr(RunPlan, "certifies", property(lambda plan: plan.config.run.certify is not False))


def options(model: str, rows: str, folder, *more: str) -> list[str]:
    common = "--max_seq_length=192 --batch_size=4 --mixed_precision=bf16 --log_every=100 --no_export"
    return short_run(model, rows, folder, *common.split(), *more)


@pytest.mark.slow
def test_certified_run_prints_and_stores_its_certificate(tiny_model, rows, tmp_path, monkeypatch, capsys):
    pretend_gpu(monkeypatch, BF16_STEP)
    assert run_training(parse_config(options(tiny_model, rows, tmp_path / "run", "--max_steps=7"))) == 0
    assert "certificate: bf16" in capsys.readouterr().out
    stored = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert stored == summary_json(tmp_path / "run")["certificate"]
    assert stored["verdict"] == "certified" and stored["num_micro_batches"] == 1
    assert [number for number, step in enumerate(steps(tmp_path / "run"), 1) if "num_gemm_kernels" in step] == [5]


@pytest.mark.slow
def test_failed_certificate_ends_the_run_with_code_1(tiny_model, rows, tmp_path, monkeypatch, capsys):
    pretend_gpu(monkeypatch, FP8_STEP)
    config = parse_config(options(tiny_model, rows, tmp_path / "run", "--max_steps=9"))
    with pytest.raises(SystemExit) as stopped:
        run_script(lambda: run_training(config))
    assert stopped.value.code == 1
    printed = capsys.readouterr()
    assert str(tmp_path / "run" / "certificate.json") in printed.err and "Traceback" not in printed.err
    summary = summary_json(tmp_path / "run")
    assert summary["certificate"]["verdict"] == "failed" and summary["failed"] in printed.err
    assert len(steps(tmp_path / "run")) == 5, "the steps before the failure are recorded"


def _report_fp8_on_rank_1() -> None:
    """Make the bf16 run of this process record fp8 kernels on rank 1, and bf16 kernels on other ranks."""
    import os

    pretend_gpu(pytest.MonkeyPatch(), FP8_STEP if os.environ["RANK"] == "1" else BF16_STEP)


@pytest.mark.slow
def test_failed_certificate_of_one_rank_ends_all_ranks(tiny_model, rows, tmp_path):
    log = tmp_path / "log"
    processes = start_ranks(
        2, log, *options(tiny_model, rows, tmp_path / "run", "--max_steps=6"), first=_report_fp8_on_rank_1
    )
    assert [exit_code(process) for process in processes] == [1, 1], log.read_text()
    assert "the certificate failed" in log.read_text()
    stored = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert stored["gemm_kernels_by_type"] == {"fp8": 384, "bf16": 6}
    assert stored["rank"] == 1 and "(on rank 1)" in log.read_text()
