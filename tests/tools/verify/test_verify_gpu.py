"""scripts/verify_fp8.py on a GPU, as a user runs it: a sound machine passes, and set-ups broken on purpose are each
caught.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_fp8.config.recipes import recipe_names
from llm_fp8.observability.metrics import peak_tflops
from llm_fp8.tools.gemm_rates import measure_rates
from llm_fp8.tools.verify import steps

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = [sys.executable, "scripts/verify_fp8.py"]
ATTENTION_VARIABLES = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_DEBUG", "NVTE_DEBUG_LEVEL")


def verify(
    path: Path, *options: str, program: list[str] = SCRIPT, **environ: str
) -> tuple[int, dict[str, dict[str, Any]], float, str]:
    """Run it; exit code, checks by name, seconds, output."""
    left_out = ("NVIDIA_TF32_OVERRIDE", *ATTENTION_VARIABLES)
    variables = {name: value for name, value in os.environ.items() if name not in left_out} | environ
    began = time.perf_counter()
    command = [*program, "--json", str(path), "--output_dir", str(path.parent), *options]
    try:
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=400)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}\n{error.stderr}\n{path.read_text() if path.exists() else 'no file was written'}")
    wall_s = time.perf_counter() - began
    output = done.stdout + done.stderr
    assert path.exists(), output
    found = json.loads(path.read_text())
    assert found["exit_code"] == done.returncode, output
    return done.returncode, {check["name"]: check for check in found["checks"]}, wall_s, output


def findings(checks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the record keeps of checks that a broken set-up should fail."""
    return {name: {key: check[key] for key in ("status", "summary", "mends")} for name, check in checks.items()}


@pytest.fixture(scope="module")
def start_s() -> float:
    """What one start of a run's Python takes on this machine, the second time: files are cached by then."""
    program = (
        "import torch, transformers, accelerate, datasets; from llm_fp8.utils.te_import import require_te; "
        "require_te('')"
    )
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=200)
    return time.perf_counter() - began


@pytest.mark.whole_machine
def test_a_sound_machine(tmp_path, record_property, start_s):
    """Every check that is about the GPU passes. The versions are the machine's business: it may lack a pin that
    nothing here needs.
    """
    _, checks, wall_s, output = verify(tmp_path / "verify.json")
    record_property("wall_s", wall_s)
    record_property("start_s", start_s)
    record_property("wall_s_by_check", {name: check["wall_s"] for name, check in checks.items()})
    record_property("summaries", {name: check["summary"] for name, check in checks.items()})
    for name in (
        "imports",
        "gpu",
        "output_folder",
        "data",
        "recipes",
        "steps",
        "attention",
        "cudnn",
        "engines",
        "torchao_steps",
    ):
        assert checks[name]["status"] in ("passed", "warning"), (name, checks[name], output)
    assert (
        checks["rates"]["status"] in ("passed", "warning", "info")
        and checks["rates"]["facts"]["measured"]["fp8_gemm_tflops"] > 0
    )
    assert checks["recipes"]["facts"]["recipes"]["delayed"] is None
    found = checks["steps"]["facts"]["precisions"]
    usable = [name for name, reason in checks["recipes"]["facts"]["recipes"].items() if reason is None]
    assert list(found) == ["bf16", *usable]
    assert "fp8" not in found["bf16"]["gemm_kernels"] and all(
        found[name]["cosine"] > steps.MIN_COSINE for name in usable
    )
    found = checks["torchao_steps"]["facts"]["precisions"]
    record_property("torchao_steps", found)
    assert list(found) == ["bf16", *recipe_names("torchao")], checks[
        "torchao_steps"
    ]  # a machine that lacks torchao is none that these tests call sound
    assert "fp8" not in found["bf16"]["gemm_kernels"]
    for name, num_gemms in steps.fp8_gemms("torchao").items():
        assert found[name]["gemm_kernels"]["fp8"] == num_gemms and found[name]["recipe_inside"] == name, found[name]
        assert found[name]["cosine"] > steps.MIN_COSINE
    assert checks["attention"]["facts"]["seen"]["backend"] == "fused (cuDNN)"
    assert checks["attention"]["facts"]["selected"].startswith("FusedAttention")
    assert len(checks["cudnn"]["facts"]["folders"]) == 1
    assert all(run["exit_code"] == 0 for run in checks["engines"]["facts"].values()) and checks["engines"]["facts"]
    if torch.cuda.device_count() == 1:
        assert checks["nccl"]["status"] == "skipped"
        waited_s = wall_s - checks["torchao_steps"]["wall_s"]  # for what torch.compile takes longer than all the others
        assert waited_s < 4 * start_s + 30, (
            "the verifier, torchrun and its worker start one after another, and nothing else does"
        )
    else:
        assert checks["nccl"]["status"] in ("passed", "warning"), checks["nccl"]


@pytest.mark.whole_machine
def test_quick(tmp_path, record_property, start_s):
    _, checks, wall_s, output = verify(tmp_path / "verify.json", "--quick")
    record_property("wall_s", wall_s)
    assert not {"rates", "nccl", "engines", "torchao_steps"} & set(checks)
    assert checks["steps"]["status"] == "passed", output
    assert wall_s < 3 * start_s + 15, "the verifier and the steps' process start one after another"


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (["--model_name", "Qwen/Qwen3-8B", "--max_seq_length", "2048", "--batch_size", "2"], "packed"),
        (["--model_name", "meta-llama/Meta-Llama-3.1-8B", "--no_packing"], "padded"),
    ],
)
def test_attention_at_the_users_shape(options, form, tmp_path):
    code, checks, _, output = verify(tmp_path / "verify.json", "--only", "attention", *options)
    assert code == 0 and checks["attention"]["facts"]["seen"]["backend"] == "fused (cuDNN)", output
    assert form in checks["attention"]["summary"]


def test_unfused_attention_is_caught(tmp_path, record_property):
    code, checks, _, output = verify(
        tmp_path / "verify.json", "--only", "variables,attention", NVTE_FUSED_ATTN="0", NVTE_FLASH_ATTN="0"
    )
    record_property("findings", findings(checks))
    assert code == 1, output
    assert checks["attention"]["status"] == "failed" and checks["attention"]["facts"]["seen"]["backend"] == "unfused"
    assert any("NVTE_FUSED_ATTN=0" in reason for reason in checks["attention"]["facts"]["reasons"]["FusedAttention"])
    assert checks["attention"]["mends"] == ["unset NVTE_FUSED_ATTN NVTE_FLASH_ATTN"]
    assert checks["variables"]["status"] == "failed" and "unset NVTE_FUSED_ATTN" in checks["variables"]["mends"]


def test_harmful_variables_are_caught(tmp_path, record_property):
    code, checks, _, output = verify(
        tmp_path / "verify.json",
        "--only",
        "variables,steps",
        CUDA_LAUNCH_BLOCKING="1",
        WORLD_SIZE="2",
        ACCELERATE_USE_FSDP="true",
    )
    record_property("findings", findings(checks))
    assert code == 1, output
    assert checks["variables"]["mends"][:2] == ["unset CUDA_LAUNCH_BLOCKING", "unset WORLD_SIZE"]
    assert checks["steps"]["status"] == "passed", "what a launcher left in the shell must not reach the other checks"


def test_two_cudnns_are_caught(tmp_path, record_property):
    """Transformer Engine is pointed at a copy of torch's cuDNN: another file, so another library in the same
    process.
    """
    nvidia = pytest.importorskip("nvidia.cudnn", reason="cuDNN is not torch's package here")
    copied = tmp_path / "cudnn"
    shutil.copytree(Path(next(iter(nvidia.__path__)), "lib"), copied / "lib")
    code, checks, _, output = verify(tmp_path / "verify.json", "--only", "attention,cudnn", CUDNN_HOME=str(copied))
    record_property("findings", findings(checks))
    if checks["attention"]["status"] == "passed" or checks["attention"]["facts"]["seen"] is not None:
        assert checks["cudnn"]["status"] == "failed" and len(checks["cudnn"]["facts"]["folders"]) == 2, output
        assert str(copied / "lib") in checks["cudnn"]["facts"]["folders"]
        assert checks["cudnn"]["mends"][0].startswith("unset CUDNN_HOME")
    else:  # two in one process may also end it
        assert checks["attention"]["status"] == "failed", output
    assert code == 1


def test_absent_fp8_kernels_are_caught(tmp_path, record_property):
    """A recipe that says fp8 and runs bf16, as a lost autocast would."""
    patched = (
        "import sys; from pathlib import Path; from llm_fp8.config.options import PrecisionConfig; from "
        "llm_fp8.tools.verify import steps; precision_of = steps.precision_of; steps.precision_of = lambda name: "
        "PrecisionConfig(mixed_precision='bf16') if name == 'delayed' else precision_of(name); "
        "steps.run_all(*map(Path, sys.argv[1:3]), sys.argv[3])"
    )
    program = (
        "import sys; from llm_fp8.tools.verify import steps; from llm_fp8.tools.verify.cli import main; "
        f"steps.PROBE = ('-c', {patched!r}); sys.exit(main(sys.argv[1:]))"
    )
    code, checks, _, output = verify(
        tmp_path / "verify.json", "--only", "steps", program=[sys.executable, "-c", program]
    )
    record_property("findings", findings(checks))
    assert code == 1, output
    assert checks["steps"]["status"] == "failed" and checks["steps"]["summary"].startswith(
        "delayed: 0 fp8 GEMM kernels ran, and 24"
    )
    assert checks["steps"]["mends"]


@pytest.mark.exclusive
def test_ceilings(device, record_property):
    measured = measure_rates(device)
    record_property("ceilings", vars(measured))
    peak = peak_tflops(torch.cuda.get_device_name(device))
    assert measured.fp8_gemm_tflops is not None and measured.fp8_split_gemm_tflops is not None
    assert measured.fp8_gemm_tflops > 1.3 * measured.bf16_gemm_tflops and measured.copy_tb_s > 0.1
    if peak is not None and peak.fp8 is not None:
        assert 0.3 * peak.bf16 < measured.bf16_gemm_tflops < peak.bf16
        assert 0.3 * peak.fp8 < measured.fp8_split_gemm_tflops < peak.fp8
    again = measure_rates(device)
    assert again.bf16_gemm_tflops == pytest.approx(measured.bf16_gemm_tflops, rel=0.1)
