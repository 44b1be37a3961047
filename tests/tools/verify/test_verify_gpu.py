"""scripts/verify_fp8.py on a GPU, as a user runs it: a correct machine passes, and wrong settings fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_fp8.observability.metrics import peak_tflops
from llm_fp8.tools.verify.checks import measure_tflops

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]


def verify(path: Path, *options: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Run verify_fp8.py with a JSON report at `path`. Return exit code, reported checks by name, and printed output."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")} | environ
    command = [sys.executable, "scripts/verify_fp8.py", "--json", str(path), *options]
    process = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=580)
    output = process.stdout + process.stderr
    assert path.exists(), output
    report = json.loads(path.read_text())
    assert report["exit_code"] == process.returncode, output
    return process.returncode, {check["name"]: check for check in report["checks"]}, output


@pytest.mark.whole_machine
def test_every_gpu_check_passes(tmp_path):
    """The check of installed packages may fail, because the machine may lack a package that the test does not need."""
    _, checks, output = verify(tmp_path / "verify.json")
    for name in ("gpu", "steps", "torchao_steps"):
        assert checks[name]["status"] == "passed", (name, checks[name]["failures"], output)
    assert checks["rates"]["status"] in ("passed", "warning") and checks["rates"]["facts"]["measured"]["fp8"] > 0
    runs = checks["steps"]["facts"]
    assert list(runs)[:3] == ["bf16", "delayed", "current"]
    for name, run in runs.items():
        certificate = run["summary"]["certificate"]
        assert certificate["verdict"] == "certified" and (certificate["num_fp8_gemm_kernels"] > 0) == (name != "bf16")
        assert run["summary"]["attention_backend"] == "fused (cuDNN)"
    assert list(checks["torchao_steps"]["facts"]) == ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
    expected = "skipped" if torch.cuda.device_count() == 1 else "passed"
    assert checks["several_gpus"]["status"] == expected, output
    assert checks["deepspeed"]["status"] in ("passed", "skipped"), output


def test_steps_pass_with_the_users_model_and_batch(tmp_path):
    shape = ["--model_name", "Qwen/Qwen3-8B", "--max_seq_length", "2048", "--batch_size", "2"]
    code, checks, output = verify(tmp_path / "verify.json", "--only", "steps", *shape)
    assert code == 0 and "fused (cuDNN)" in checks["steps"]["summary"], output


def test_variables_left_by_a_launcher_fail_a_check_but_do_not_reach_the_runs(tmp_path):
    launcher_variables = {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}
    code, checks, output = verify(tmp_path / "verify.json", "--only", "variables,steps", **launcher_variables)
    assert code == 1 and checks["variables"]["status"] == "failed" and checks["steps"]["status"] == "passed", output


@pytest.mark.exclusive
def test_measured_tflops_are_below_the_peak_and_higher_in_fp8(device):
    measured, peak = measure_tflops(device), peak_tflops(torch.cuda.get_device_name(device))
    assert measured["fp8"] > 1.3 * measured["bf16"]
    if peak is not None and peak.fp8 is not None:
        assert 0.3 * peak.bf16 < measured["bf16"] < peak.bf16
        assert 0.3 * peak.fp8 < measured["fp8"] < peak.fp8
