"""scripts/verify_fp8.py: the status of each check from made-up measurements, and the program without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_fp8.config.options import ModelConfig
from llm_fp8.models.source import load_config, load_tokenizer, resolve_source
from llm_fp8.tools.programs import Outcome
from llm_fp8.tools.verify import checks, cli, runs
from llm_fp8.tools.verify.checks import Result, Setup, judge_variables
from llm_fp8.tools.verify.cli import CHECKS, Check, main, run_check
from llm_fp8.tools.verify.runs import Run
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import REPOSITORY
from tests.support.processes import run_program

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@pytest.fixture
def setup(tmp_path) -> Setup:
    return Setup("Qwen/Qwen3-8B", 1024, 8, {}, scratch=tmp_path)


PINS = checks.pins_of(
    "torch>=2.11.0,<=2.13.0  # why\n--extra-index-url x\nnumpy==2.4.6\nold==1 ; python_version < '3'\nwandb==0.31.0\n"
    "transformer-engine==2.20.2"
)
INSTALLED = {"torch": "2.13.0+cu130", "numpy": "2.4.6", "transformer-engine": "2.20.2", "wandb": "0.31.0"}


@pytest.mark.parametrize(
    ("changes", "errors", "status", "fix"),
    [
        ({}, {}, "passed", None),
        ({"torch": None}, {}, "failed", "'torch<=2.13.0,>=2.11.0'"),
        ({"torch": "2.14.0"}, {}, "warning", "'torch<=2.13.0,>=2.11.0'"),
        ({"transformer-engine": None}, {}, "failed", "--no-build-isolation 'transformer-engine==2.20.2'"),
        ({"wandb": None}, {}, "passed", None),
        ({"numpy": "2.0.0"}, {}, "warning", "'numpy==2.4.6'"),
        ({}, {"torch": "OSError: no"}, "failed", "uninstall -y torch"),
        ({}, {"flash-attn": "ImportError: no"}, "warning", "uninstall -y flash-attn"),
    ],
)
def test_package_versions_are_judged_by_the_pins(changes, errors, status, fix):
    installed = {name: version for name, version in (INSTALLED | changes).items() if version is not None}
    result = checks.judge_packages(PINS, installed, errors)
    assert result.status == status
    assert fix is None or fix in result.fixes[0]


def test_pins_for_gpus_are_the_versions_of_the_recorded_gpu_tests():
    recorded = json.loads((REPOSITORY / "benchmarks/results/gpu_tests.json").read_text())["provenance"]["packages"]
    for_gpus, for_cpus = ({pin.name: pin.specifier for pin in checks.read_pins(gpu)} for gpu in (True, False))
    recorded_pins = {name: f"=={version}" for name, version in recorded.items() if version is not None}
    assert {name: str(for_gpus[name]) for name in recorded_pins} == recorded_pins
    assert not for_cpus.keys() & {checks.TE, "torchao"}
    for name, specifier in for_cpus.items():
        (pinned,) = for_gpus[name]
        assert pinned.operator == "==" and specifier.contains(pinned.version), name


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"NVTE_FP8_ALLREDUCE": "1"}, [("NVTE_FP8_ALLREDUCE", "no effect")]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, [("CUDA_DEVICE_MAX_CONNECTIONS", "slower")]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_LAUNCH_BLOCKING": "0"}, []),
        ({"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"}, [("NVTE_FLASH_ATTN", "slower")]),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, [("ACCELERATE_MIXED_PRECISION", "slower")]),
        ({"ACCELERATE_USE_CPU": "true"}, [("ACCELERATE_USE_CPU", "harmful")]),
        ({"ACCELERATE_CPU_AFFINITY": "1", "NCCL_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "8"}, []),
        (
            {"GPU_NUM": "8", "NCCL_P2P_DISABLE": "1", "WORLD_SIZE": "2"},
            [("WORLD_SIZE", "harmful"), ("GPU_NUM", "no effect"), ("NCCL_P2P_DISABLE", "slower")],
        ),
    ],
)
def test_environment_variables_are_judged_by_their_effect(environ, expected):
    assert [(rule.name, rule.level) for rule in judge_variables(environ)] == expected


@without_gpu
@pytest.mark.parametrize(
    ("listed", "environ", "status"),
    [
        (None, {}, "skipped"),
        ("NVIDIA H100, 580.1", {}, "failed"),
        ("NVIDIA H100, 580.1", {"CUDA_VISIBLE_DEVICES": ""}, "failed"),
    ],
)
def test_gpu_that_torch_cannot_use_fails_the_check(listed, environ, status, setup, monkeypatch):
    monkeypatch.setattr("llm_fp8.observability.provenance.output_of", lambda *command: listed)
    setup.environ = environ
    result = checks.check_gpu(setup)
    assert result.status == status
    assert not environ or result.fixes == ["unset CUDA_VISIBLE_DEVICES"]


def test_low_fp8_rate_is_a_warning():
    assert checks.judge_tflops({"bf16": 650.0, "fp8": 1250.0}, "NVIDIA H200").status == "passed"
    assert checks.judge_tflops({"bf16": 650.0, "fp8": 900.0}, "NVIDIA H200").status == "warning"
    assert checks.judge_tflops({"bf16": 10.0}, "NVIDIA T4").status == "passed"


CERTIFIED = {"verdict": "certified", "reasons": [], "num_fp8_gemm_kernels": 24, "num_gemm_kernels": 30}
FALLING_LOSSES = [7.0, 6.5, 6.1]


def made_up_run(losses: list[float] | None = None, code: int = 0, **summary: Any) -> Run:
    contents = {"certificate": CERTIFIED, "attention_backend": "fused (cuDNN)", "sharding_mode": "single"} | summary
    outcome = Outcome(code, "error: --fp8_backend torchao needs torchao; run: pip install torchao", 9.0)
    return Run("delayed", ["python", "train_fp8.py"], outcome, contents, FALLING_LOSSES if losses is None else losses)


@pytest.mark.parametrize(
    ("run", "status", "phrase"),
    [
        (made_up_run(), "passed", ""),
        (made_up_run(code=1), "failed", "exit code 1"),
        (made_up_run(losses=[7.0, float("nan"), 6.0]), "failed", "does not fall"),
        (made_up_run(losses=[7.0, 6.5, 7.0]), "failed", "does not fall"),
        (made_up_run(losses=[7.0, 6.5, 6.3]), "failed", "from bf16's"),
        (made_up_run(attention_backend="unfused"), "failed", "unfused"),
        (made_up_run(certificate=CERTIFIED | {"verdict": "failed", "reasons": ["bf16 ran"]}), "failed", "bf16 ran"),
        (made_up_run(certificate=CERTIFIED | {"verdict": "undetermined", "reasons": ["?"]}), "warning", "?"),
        (made_up_run(certificate=None, attention_backend=None), "passed", ""),
    ],
)
def test_run_is_judged_by_exit_code_losses_and_certificate(run, status, phrase):
    result = Result()
    runs.judge(result, run, made_up_run())
    assert result.status == status
    assert phrase in "".join([*result.failures, *result.warnings])


def test_missing_torchao_is_a_warning(setup, monkeypatch):
    monkeypatch.setattr(runs, "train", lambda setup, name, *options: made_up_run(code=0 if name == "bf16" else 2))
    result = runs.check_torchao_steps(setup)
    assert result.status == "warning" and "pip install torchao" in result.warnings[0]


@pytest.mark.parametrize(
    ("packages", "phrase"),
    [({"torchao", "transformer_engine"}, "optimizer then lacks"), ({"transformer_engine"}, "Engine's"), ({}, "error")],
)
def test_accelerate_takes_the_first_fp8_package(packages, phrase, setup, monkeypatch):
    for name in ("torchao", "transformer_engine"):
        monkeypatch.setattr(f"accelerate.utils.is_{name}_available", lambda name=name: name in packages)
    assert phrase in checks.check_other_trainers(setup).summary


def test_cut_model_has_fewer_layers_and_the_same_sizes(setup):
    options = ModelConfig(model_name=str(runs.cut_model(setup)), random_init=True)
    source = resolve_source(options)
    config: Any = load_config(source)
    assert (config.num_hidden_layers, config.hidden_size, config.model_type) == (runs.NUM_LAYERS, 4096, "qwen3")
    assert config.vocab_size == len(load_tokenizer(options, source)[0])


@pytest.mark.slow
@without_gpu
def test_run_of_the_steps_check_passes_on_the_cpu(setup, monkeypatch):
    monkeypatch.setattr(runs, "run_program", run_program)
    run = runs.train(setup, "bf16", "--mixed_precision", "bf16", "--max_steps", "2")
    result = Result()
    runs.judge(result, run)
    assert result.status == "passed", (result.failures, run.outcome.output)
    assert len(run.losses) == 2


def test_check_that_needs_more_gpus_is_skipped_and_a_crash_is_a_failure(setup):
    def crash(_: Setup) -> Result:
        raise RuntimeError("CUDA error: an illegal memory access")

    setup.num_gpus = 1  # type: ignore[misc]
    passing = Check("passing", lambda _: Result("fine"), needs_gpus=1)
    checks = (passing, passing._replace(needs_gpus=2), Check("crash", crash))
    results = [run_check(check, setup) for check in checks]
    assert [result.status for result in results] == ["passed", "skipped", "failed"]
    assert "illegal memory access" in results[2].failures[0] and results[2].fixes


def run_main(monkeypatch, tmp_path: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run verify with `options`. Return the exit code, and the checks in the JSON report by name."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    code = main([*options, "--json", str(tmp_path / "verify.json")])
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report["exit_code"] == code
    return code, {check["name"]: check for check in report["checks"]}


@without_gpu
def test_verify_without_a_gpu_skips_gpu_checks_and_exits_with_code_3(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NVTE_FP8_ALLREDUCE", "1")
    monkeypatch.setattr("llm_fp8.tools.verify.runs.train", lambda *_: made_up_run())
    code, checks = run_main(monkeypatch, tmp_path)
    assert code == 3 and list(checks) == [check.name for check in CHECKS]
    skipped = {name for name, check in checks.items() if check["status"] == "skipped"}
    assert skipped == {"gpu", "rates", "several_gpus", "deepspeed", "other_trainers"}
    assert checks["variables"]["fixes"] == ["unset NVTE_FP8_ALLREDUCE"]
    assert "unset NVTE_FP8_ALLREDUCE" in capsys.readouterr().out


@without_gpu
def test_failed_check_gives_exit_code_1(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, checks = run_main(monkeypatch, tmp_path, "--only", "variables")
    assert code == 1 and checks["variables"]["status"] == "failed"
    assert "WORLD_SIZE" not in os.environ, "variables left by a launcher must not reach the runs"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (["--only", "kernel"], "--only"),
        (["--output", "/proc/verify/x.json"], "--output"),
        (["--model_name", "./no-such-folder", "--only", "variables"], "--model_name"),
    ],
)
def test_invalid_option_value_is_refused_by_its_flag(options, flag, monkeypatch):
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    with pytest.raises(UserError, match=flag):
        main(options)
