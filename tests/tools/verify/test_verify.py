"""scripts/verify_fp8.py: every verdict from made-up evidence, and the script as a user runs it without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.precision.plan import resolve_precision, torchao_needs
from llm_fp8.tools.gemm_rates import KnownRates, MeasuredRates
from llm_fp8.tools.verify import attention, distributed, environment_rules, gpu, inputs, steps, versions
from llm_fp8.tools.verify.cli import SHOWN_DETAILS, Record, exit_code, main, parse, print_rows
from llm_fp8.tools.verify.processes import Ended, Started, shown
from llm_fp8.tools.verify.result import Problems, Result, Setup
from llm_fp8.tools.verify.runner import CHECKS, Check, Row, is_hanging, run_check
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.subprocesses import torchrun

ROOT = Path(__file__).resolve().parents[3]
TORCHAO = PrecisionConfig(mixed_precision="fp8", fp8_backend="torchao")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@pytest.fixture
def setup(tmp_path) -> Setup:
    return Setup("meta-llama/Llama-3.2-1B", 1024, 8, True, tmp_path / "runs", ("ddp",), {}, scratch=tmp_path)


# --- results and the runner -------------------------------------------------------------------------------------------


def test_a_failure_must_say_what_fixes_it():
    with pytest.raises(ValueError, match="what fixes it"):
        Result("failed", "broken")


def test_problems_become_one_result():
    problems = Problems()
    problems.warn("slow", "b")
    problems.fail("broken", "a", "b")
    result = problems.result("fine", ["detail"])
    assert (result.status, result.summary, result.details, result.fixes) == (
        "failed",
        "broken",
        ("slow", "fine", "detail"),
        ("b", "a"),
    )
    assert Problems().result("fine").status == "passed"


def module_check(monkeypatch, name: str, function) -> Check:
    """A check whose module is made up."""
    module = type(sys)(f"llm_fp8.tools.verify.{name}")
    setattr(module, f"check_{name}", function)
    monkeypatch.setitem(sys.modules, f"llm_fp8.tools.verify.{name}", module)
    return Check(name, name, name)


def test_a_crash_is_a_failed_check_and_the_others_go_on(monkeypatch, setup):
    def crash(_):
        raise RuntimeError("CUDA error: an illegal memory access\nsecond line")

    def mistake(_):
        raise UserError("Transformer Engine does not load.")

    def memory(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    functions = {"crash": crash, "mistake": mistake, "memory": memory, "fine": lambda _: Result("passed", "fine")}
    checks = [module_check(monkeypatch, name, function) for name, function in functions.items()]
    checks.append(Check("is_not_there", "no module of this name", "is_not_there"))
    results = {check.name: run_check(check, setup).result for check in checks}
    assert [result.status for result in results.values()] == ["failed", "failed", "failed", "passed", "failed"]
    assert "illegal memory access" in results["crash"].summary and any(
        "RuntimeError" in line for line in results["crash"].details
    )
    assert results["mistake"].summary == "Transformer Engine does not load."
    assert "nvidia-smi" in results["memory"].fixes[0]
    assert all("--only" in result.fixes[-1] for result in results.values() if result.status == "failed")


def test_a_check_that_hangs_is_given_up_and_says_where(monkeypatch, setup):
    let_go = threading.Event()

    def asks_a_driver_that_does_not_answer(_):
        let_go.wait(30)
        return Result("passed", "too late")

    hanging = dataclasses.replace(module_check(monkeypatch, "hangs", asks_a_driver_that_does_not_answer), limit_s=0.3)
    fine = module_check(monkeypatch, "fine", lambda _: Result("passed", "fine"))
    first, second = (run_check(check, setup) for check in (hanging, fine))
    assert is_hanging()
    let_go.set()
    assert first.result.status == "failed" and "did not end within" in first.result.summary and 0.3 <= first.wall_s < 10
    assert any("asks_a_driver_that_does_not_answer" in line for line in first.result.details)
    assert second.result.status == "passed"


def test_checks_run_where_they_can(monkeypatch, setup):
    checks = [
        dataclasses.replace(module_check(monkeypatch, name, lambda _: Result("passed", "fine")), **options)
        for name, options in {
            "any": {},
            "one": {"needs_gpus": 1},
            "two": {"needs_gpus": 2},
            "none": {"only_without_gpu": True},
        }.items()
    ]

    def statuses(num_gpus: int) -> dict[str, str]:
        vars(setup).update(num_gpus=num_gpus)
        return {check.name: run_check(check, setup).result.status for check in checks}

    assert statuses(0) == {"any": "passed", "one": "skipped", "two": "skipped", "none": "passed"}
    assert statuses(1) == {"any": "passed", "one": "passed", "two": "skipped", "none": "skipped"}
    assert statuses(2) == {"any": "passed", "one": "passed", "two": "passed", "none": "skipped"}


def test_every_registered_check_has_its_function():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        module = importlib.import_module(f"llm_fp8.tools.verify.{check.module}")
        assert callable(getattr(module, f"check_{check.name}"))


def rows_of(*statuses: str) -> list[Row]:
    return [
        Row(Check("c", "C", "c"), Result(status, "s", fixes=("fix it",) if status == "failed" else ()), 1.0)
        for status in statuses
    ]


def test_the_documentation_has_every_check():
    section = (ROOT / "docs" / "tools.md").read_text().partition("## Verify\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(f"`{check.name}`" for check in CHECKS)


def test_exit_codes():
    assert exit_code(rows_of("passed", "warning", "info", "skipped"), has_gpu=True) == 0
    assert exit_code(rows_of("passed", "failed"), has_gpu=True) == 1
    assert exit_code(rows_of("passed", "skipped"), has_gpu=False) == 3
    assert exit_code(rows_of("failed", "skipped"), has_gpu=False) == 1


def test_the_table_shows_what_fixes_a_failure(capsys):
    details = tuple(f"line {number}" for number in range(SHOWN_DETAILS + 5))
    failed = Row(Check("c", "Kernels", "c"), Result("failed", "broken [red]", details, ("python fix.py",)), 1.0)
    print_rows([failed, *rows_of("passed")], Console(width=120), verbose=False)
    printed = capsys.readouterr().out
    assert "broken [red]" in printed and "To fix" in printed and "python fix.py" in printed
    assert "line 16" in printed and "line 0" not in printed, "the last lines of an error name it"


def test_the_file_is_written_as_far_as_it_got(tmp_path):
    """What is there when the script is killed: the checks that ended, which one was under way, which were not
    reached.
    """
    done, under_way, later = (Check(name, name, name) for name in ("done", "under_way", "later"))
    record = Record(tmp_path / "verify.json", {}, (done, under_way, later))
    record.rows.append(Row(done, Result("passed", "fine", facts={"shape": (1, 2)}), 1.5))
    record.under_way = under_way
    record.write(None)
    found = json.loads((tmp_path / "verify.json").read_text())
    assert (found["exit_code"], found["under_way"], found["not_checked"]) == (None, "under_way", ["under_way", "later"])
    assert [(check["name"], check["wall_s"]) for check in found["checks"]] == [("done", 1.5)]


# --- versions, imports, GPU -------------------------------------------------------------------------------------------

PINS = versions.pins_of(
    "torch==2.13.0  # tensors\nnumpy==2.4.6; python_version >= '3.10'\nnumpy==1.0; python_version < '3.0'\n# a "
    "comment\n\ntransformer-engine[pytorch]==2.20.2\nwandb==0.31.0\n",
    "requirements.txt",
)
FOUND = {
    "torch": versions.Installed("2.13.0+cu130", "/site"),
    "numpy": versions.Installed("2.4.6", "/site"),
    "transformer-engine": versions.Installed("2.20.2", "/site"),
    "transformer-engine-torch": versions.Installed("2.20.2+c0ffee", "/site"),
    "wandb": versions.Installed("0.31.0", "/site"),
}


def test_pins_that_hold_here():
    assert [(pin.name, str(pin.requirement.specifier)) for pin in PINS] == [
        ("torch", "==2.13.0"), ("numpy", "==2.4.6"), ("transformer-engine", "==2.20.2"), ("wandb", "==0.31.0")
    ]  # fmt: skip
    real = {pin.name for pin in versions.read_pins()}
    assert {
        "torch",
        "accelerate",
        "transformers",
        "datasets",
        "deepspeed",
        "torchao",
        "transformer-engine",
        "wandb",
    } <= real


def without(name: str) -> dict:
    return {other: there for other, there in FOUND.items() if other != name}


def test_versions():
    assert versions.judge_versions(PINS, FOUND, has_gpu=True).status == "passed"
    missing = versions.judge_versions(PINS, without("torch"), has_gpu=True)
    assert missing.status == "failed" and missing.fixes[0].endswith("-m pip install 'torch==2.13.0'")
    assert versions.judge_versions(PINS, without("transformer-engine"), has_gpu=False).status == "passed"
    assert versions.judge_versions(PINS, without("transformer-engine"), has_gpu=True).status == "failed"
    optional = versions.judge_versions(PINS, without("wandb"), has_gpu=True)
    assert optional.status == "passed" and any("wandb is not installed" in line for line in optional.details)
    drift = versions.judge_versions(PINS, {**FOUND, "numpy": versions.Installed("2.0.0", "/site")}, has_gpu=True)
    assert drift.status == "warning" and "numpy is 2.0.0" in drift.summary and "numpy==2.4.6" in drift.fixes[0]
    parts = versions.judge_versions(
        PINS, {**FOUND, "transformer-engine-torch": versions.Installed("2.19.0", "/site")}, has_gpu=True
    )
    assert parts.status == "failed" and "uninstall" in parts.fixes[0]


def test_imports():
    assert versions.try_import("json") is None
    assert versions.try_import("no_such_package").startswith("ModuleNotFoundError")
    assert versions.judge_imports({"torch": None}).status == "passed"
    broken = versions.judge_imports({"torch": None, "transformer_engine.pytorch": "fp8 needs Transformer Engine, ..."})
    assert broken.status == "failed" and "requirements-gpu.txt" in broken.fixes[0]
    optional = versions.judge_imports(
        {"torch": None, "deepspeed": "ImportError: no", "flash_attn": "ImportError: undefined symbol"}
    )
    assert optional.status == "warning" and "--sharding_mode deepspeed_1 to 3" in optional.summary
    assert "'deepspeed==" in optional.fixes[0] and "uninstall -y flash-attn" in optional.fixes[1]


@pytest.mark.parametrize(
    ("packages", "modules"),
    [
        ((), set()),
        (("flash_attn",), {"flash_attn"}),
    ],
)
def test_each_flash_attn_is_imported_where_its_own_package_is(packages, modules, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for package in packages:
        (tmp_path / f"{package}-1.0.dist-info").mkdir()
        (tmp_path / f"{package}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
    tried = []
    monkeypatch.setattr(versions, "try_import", tried.append)
    versions.check_imports(SimpleNamespace(num_gpus=0))
    assert {name for name in tried if name.startswith("flash_attn")} == modules


H200 = gpu.GpuFacts(
    driver_gpus=("NVIDIA H200",),
    driver="580.1",
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    names=("NVIDIA H200",),
    capabilities=((9, 0),),
    memory_gib=(139.8,),
    visible_devices=None,
    has_device_file=True,
    error=None,
)
UNUSABLE = dataclasses.replace(H200, names=(), capabilities=(), memory_gib=())


@pytest.mark.parametrize(
    ("facts", "status", "word"),
    [
        (H200, "passed", "compute capability 9.0"),
        (
            dataclasses.replace(H200, names=("NVIDIA H200", "NVIDIA L4"), capabilities=((9, 0), (8, 9))),
            "warning",
            "slowest",
        ),
        (
            dataclasses.replace(UNUSABLE, driver_gpus=None, driver=None, has_device_file=False),
            "skipped",
            "no NVIDIA GPU",
        ),
        (dataclasses.replace(UNUSABLE, driver_gpus=None, driver=None), "failed", "driver does not answer"),
        (dataclasses.replace(UNUSABLE, visible_devices=""), "failed", "CUDA_VISIBLE_DEVICES"),
        (dataclasses.replace(UNUSABLE, torch="2.13.0+cpu", torch_cuda=None), "failed", "CPU build"),
        (dataclasses.replace(UNUSABLE, error="The NVIDIA driver on your system is too old"), "failed", "too old"),
    ],
)
def test_gpu(facts, status, word):
    result = gpu.judge_gpu(facts)
    assert (result.status, word in result.summary) == (status, True), result


@pytest.mark.parametrize(("visible", "given"), [(None, "0,2"), ("3,5, 7", "3,7")])
def test_gpus_that_differ_are_left_out_by_number(visible, given):
    facts = dataclasses.replace(
        H200,
        names=("NVIDIA H200", "NVIDIA A100", "NVIDIA H200"),
        capabilities=((9, 0), (8, 0), (9, 0)),
        memory_gib=(139.8, 79.3, 139.8),
        visible_devices=visible,
    )
    result = gpu.judge_gpu(facts)
    assert result.status == "warning" and result.fixes == (f"export CUDA_VISIBLE_DEVICES={given}",)


# --- environment, folder, tracking, data ------------------------------------------------------------------------------


def test_variables(setup):
    def variables(environ: dict[str, str]) -> Result:
        return environment_rules.check_variables(dataclasses.replace(setup, environ=environ))

    assert variables({"PATH": "/bin"}).status == "passed"
    harmless = variables({"NVTE_FP8_ALLREDUCE": "1"})
    assert harmless.status == "warning" and harmless.fixes == ("unset NVTE_FP8_ALLREDUCE",)
    harmful = variables({"CUDA_LAUNCH_BLOCKING": "1", "NVTE_FP8_ALLREDUCE": "1"})
    assert harmful.status == "failed" and harmful.fixes == ("unset CUDA_LAUNCH_BLOCKING", "unset NVTE_FP8_ALLREDUCE")


def test_output_folder(tmp_path):
    assert inputs.try_to_write(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "is a file" in inputs.try_to_write(tmp_path / "file")
    assert inputs.judge_output_folder(Path("runs"), None, 500.0).status == "passed"
    assert inputs.judge_output_folder(Path("runs"), None, 3.0).status == "warning"
    refused = inputs.judge_output_folder(Path("my runs"), "Permission denied", 500.0)
    assert refused.status == "failed" and "mkdir -p 'my runs'" in refused.fixes[0]


def test_tracking():
    assert inputs.judge_tracking(None, None, None).status == "info"
    assert inputs.judge_tracking("0.31.0", "offline", None).summary.endswith("offline")
    assert "logged in" in inputs.judge_tracking("0.31.0", None, None).summary
    refused = inputs.judge_tracking("0.31.0", None, "--use_wandb: there is no W&B login")
    assert refused.status == "warning" and refused.fixes[0] == "wandb login"


def test_data():
    assert inputs.judge_data(inputs.TEXT, 0.9, 0.5).status == "passed"
    assert inputs.judge_data("If 3 apples", 0.9, 0.5).status == "failed"
    assert inputs.judge_data(inputs.TEXT, 0.9, 0.0).status == "failed"


# --- recipes and steps ------------------------------------------------------------------------------------------------


def test_recipes():
    some = gpu.judge_recipes({"delayed": None, "mxfp8": "needs compute capability 10.0"}, "NVIDIA H200")
    assert some.status == "passed" and some.details == (
        "mxfp8: needs compute capability 10.0",
        "--fp8_backend torchao: tensorwise, rowwise, rowwise_with_gw_hp",
    )
    without = gpu.judge_recipes(
        {"delayed": None}, "NVIDIA H200", "--fp8_backend torchao needs torchao, which is not installed"
    )
    assert without.status == "passed" and without.details == (
        "--fp8_backend torchao needs torchao, which is not installed",
    )
    assert gpu.judge_recipes({"delayed": "needs 8.9"}, "NVIDIA A100").status == "failed"


BF16 = steps.Evidence([6.93, 6.92, 6.91], {"bf16": 27}, "none")
FP8 = steps.Evidence([6.94, 6.92, 6.91], {"fp8": 24, "bf16": 3}, "DelayedScaling", 0.99)


@pytest.mark.parametrize(
    ("name", "changes", "status", "word"),
    [
        ("delayed", {}, "passed", "losses agree"),
        ("delayed", {"gemm_kernels": {"bf16": 27}}, "failed", "0 fp8 GEMM kernels ran, and 24"),
        ("delayed", {"gemm_kernels": {"fp8": 23, "bf16": 3}}, "failed", "23 fp8"),
        ("delayed", {"gemm_kernels": {"unknown": 24, "bf16": 3}}, "warning", "do not tell"),
        ("delayed", {"gemm_kernels": {"fp4": 24, "bf16": 3}}, "passed", ""),
        ("delayed", {"recipe_inside": "none"}, "failed", "no recipe"),
        ("delayed", {"losses": [6.94, math.nan, 6.91]}, "failed", "not finite"),
        ("delayed", {"losses": [6.94, 7.5, 6.91]}, "failed", "from bf16's"),
        ("delayed", {"cosine": 0.4}, "failed", "cosine"),
        ("delayed", {"cosine": math.nan}, "failed", "cosine"),
        ("bf16", {"gemm_kernels": {"bf16": 3, "fp8": 24}}, "failed", "a bf16 step ran 24 fp8"),
        ("bf16", {"gemm_kernels": {"unknown": 27}}, "warning", "known as bf16"),
    ],
)
def test_steps(name, changes, status, word):
    found = {"bf16": BF16, "delayed": FP8}
    found[name] = dataclasses.replace(found[name], **changes)
    result = steps.judge(found, process={})
    assert (result.status, word in result.summary) == (status, True), result


def test_a_probe_that_ends_early_says_in_which_precision():
    plain = {name: dict(vars(evidence)) for name, evidence in {"bf16": BF16, "delayed": FP8}.items()}
    assert steps.judge_probe(Ended(0, "", 1.0), {"under_way": None, "found": plain}).status == "passed"
    plain["delayed"]["losses"] = [6.9, math.nan, 6.9]
    assert "not finite" in steps.judge_probe(Ended(0, "", 1.0), {"under_way": None, "found": plain}).summary
    fault = steps.judge_probe(Ended(-11, "loading\n", 1.0), {"under_way": "block", "found": {"bf16": plain["bf16"]}})
    assert fault.status == "failed" and fault.summary.startswith("block:") and "-11" in fault.summary
    assert (
        fault.facts["precisions"]["bf16"]["losses"] == BF16.losses and fault.facts["process"]["output"] == "loading\n"
    )
    assert steps.judge_probe(Ended(1, "ImportError: libcudnn.so.9\n", 1.0), None).summary.endswith(
        "ImportError: libcudnn.so.9"
    )


TORCHAO_BF16 = steps.Evidence([6.93, 6.92, 6.91], {"bf16": 45})
TORCHAO_FP8 = steps.Evidence([6.94, 6.92, 6.91], {"fp8": 42, "bf16": 3}, "rowwise", 0.99)


@pytest.mark.parametrize(
    ("name", "changes", "status", "word"),
    [
        ("rowwise", {}, "passed", "losses agree, fp8 kernels in fp8"),
        ("rowwise", {"gemm_kernels": {"fp8": 28, "bf16": 17}}, "failed", "28 fp8 GEMM kernels ran, and 42"),
        ("rowwise", {"gemm_kernels": {"unknown": 42, "bf16": 3}}, "warning", "do not tell"),
        ("rowwise", {"recipe_inside": None}, "failed", "no recipe"),
        ("rowwise", {"recipe_inside": "tensorwise"}, "failed", "the modules' recipe is tensorwise"),
        ("rowwise", {"losses": [6.94, 7.5, 6.91]}, "failed", "from bf16's"),
        ("rowwise", {"cosine": 0.4}, "failed", "cosine"),
        ("bf16", {"gemm_kernels": {"bf16": 44, "fp8": 1}}, "failed", "a bf16 step ran 1 fp8"),
    ],
)
def test_torchao_steps(name, changes, status, word):
    found = {"bf16": TORCHAO_BF16, "rowwise": TORCHAO_FP8}
    found[name] = dataclasses.replace(found[name], **changes)
    result = steps.judge(found, "torchao", {})
    assert (result.status, word in result.summary) == (status, True), result
    if "28 fp8" in word:
        assert result.fixes[0].endswith("--only torchao_steps --verbose") and "'torchao==" in result.fixes[1]


def test_torchaos_third_recipe_leaves_a_product_in_bf16():
    found = {
        "bf16": TORCHAO_BF16,
        "rowwise_with_gw_hp": steps.Evidence(
            TORCHAO_FP8.losses, {"fp8": 28, "bf16": 17}, recipe_inside="rowwise_with_gw_hp", cosine=0.99
        ),
    }
    assert steps.judge(found, "torchao", {}).status == "passed"
    ended = Ended(1, "error: no GPU\n", 1.0)
    assert "--only imports,torchao_steps" in steps.judge_probe(ended, None, "torchao").fixes[0]


@pytest.mark.slow
@without_gpu
def test_torchaos_steps_are_emulated_on_the_cpu(setup):
    result = steps.check_torchao_steps(setup)
    assert result.status == "passed" and "emulated on the CPU, so nothing is said of fp8 kernels" in result.summary
    found = result.facts["precisions"]
    assert list(found) == ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
    assert all(
        found[name]["losses"] != found["bf16"]["losses"] and 0.9 < found[name]["cosine"] < 0.9999
        for name in list(found)[1:]
    )
    wrong = {name: steps.Evidence(**evidence) for name, evidence in found.items()}
    wrong["rowwise"].cosine = 0.5
    failed = steps.judge(wrong, "torchao")
    assert failed.status == "failed" and failed.summary.startswith("rowwise: the gradient's cosine")


class FakeProbe:
    killed = False

    def kill(self):
        self.killed = True


def of_capability(*capability):
    return lambda device: capability


@pytest.mark.parametrize(
    ("missing", "capability", "reason", "fix"),
    [
        (
            "torchao",
            (9, 0),
            "needs torchao, which is not installed",
            "-m pip install --force-reinstall --no-deps 'torchao==",
        ),
        (None, (8, 0), "needs an NVIDIA GPU of compute capability 8.9", "python train_fp8.py --mixed_precision bf16 "),
        ("triton", (9, 0), "needs Triton, which is not installed", "-m pip install triton"),
        ("gcc", (9, 0), "Triton needs a C compiler", "apt-get install -y gcc"),
    ],
)
def test_what_torchao_lacks_is_a_warning_with_its_fix(missing, capability, reason, fix, setup, monkeypatch):
    """On a GPU, which is made up; the probe that was started for nothing is ended."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find_spec(name) or name)
    monkeypatch.setattr("shutil.which", lambda name: None if missing == "gcc" else name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", of_capability(*capability))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    vars(setup).update(num_gpus=1, device=torch.device("cuda", 0))
    probe = setup.processes["torchao_steps"] = FakeProbe()
    result = steps.check_torchao_steps(setup)
    assert result.status == "warning" and reason in result.summary and len(result.fixes) == 1 and fix in result.fixes[0]
    assert probe.killed
    with pytest.raises(UserError) as refused:
        resolve_precision(TORCHAO, setup.device)
    assert str(refused.value) == result.summary, "as a run says it"


def test_where_torchao_lacks_nothing_a_run_on_a_gpu_is_not_emulated(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find_spec(name) or name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", of_capability(8, 9))
    device = torch.device("cuda", 0)
    assert gpu.torchao_problem(device) is None and not resolve_precision(TORCHAO, device).emulated
    assert set(torchao_needs(torch.device("cpu"))) == {"torchao"} and all(map(gpu.torchao_fix, torchao_needs(device)))


@pytest.mark.slow
@without_gpu
def test_the_steps_probe_is_a_process_whose_error_is_the_answer(setup):
    """Without a GPU it gets as far as the decoder of Transformer Engine modules, in bf16."""
    steps.start(setup, ["steps"])
    result = steps.check_steps(setup)
    assert result.status == "failed" and result.summary.startswith("bf16: the steps did not end:")
    assert "needs an NVIDIA GPU" in result.summary and result.fixes


@pytest.mark.slow
def test_steps_of_a_real_model_on_the_cpu(tmp_path):
    """The architecture that the GPU check trains, without Transformer Engine: losses of random weights, one gradient
    for every parameter.
    """
    steps.write_architecture(tmp_path / "model")
    evidence, gradient = steps.take_steps(tmp_path / "model", steps.precision_of("bf16"), batch_size=1)
    assert evidence.losses == pytest.approx([math.log(1024)] * 3, rel=0.05) and evidence.gemm_kernels == {}
    weights = 2 * (512 * (512 + 2 * 128 + 512) + 3 * 512 * 1024 + 2 * 512) + 512 + 2 * 1024 * 512
    assert gradient.shape == (weights,) and float(gradient.norm()) > 0


def test_cpu_steps():
    assert steps.judge_cpu_steps([6.9, 6.95], 1.0, 1024).status == "passed"
    assert steps.judge_cpu_steps([6.9, math.nan], 1.0, 1024).status == "failed"
    assert steps.judge_cpu_steps([2.0, 2.0], 1.0, 1024).status == "failed"
    assert steps.judge_cpu_steps([6.9], 0.0, 1024).status == "failed"


# --- attention and cuDNN ----------------------------------------------------------------------------------------------

DEBUG = """\
[DEBUG    | DotProductAttention]: Running with config={'compute_capability': 'sm90', 'cudnn_version': '9.15.1'}
[DEBUG    | DotProductAttention]: Disabling FlashAttention 2 due to NVTE_FLASH_ATTN=0 or NVTE_FLASH_ATTN_V2=0
[DEBUG    | DotProductAttention]: Disabling FusedAttention due to NVTE_FUSED_ATTN=0
[DEBUG    | DotProductAttention]: Disabling FusedAttention due to NVTE_FUSED_ATTN=0
[DEBUG    | DotProductAttention]: Available backends = {FlashAttention=False, FusedAttention=False, \
UnfusedDotProductAttention=True}
[DEBUG    | DotProductAttention]: Selected backend = UnfusedDotProductAttention.
"""
FUSED = "[DEBUG    | DotProductAttention]: Selected backend = FusedAttention (sub-backend 1).\n"


def test_transformer_engines_words():
    selected, reasons = attention.parse_debug(DEBUG)
    assert selected == "UnfusedDotProductAttention"
    assert reasons == {
        "FlashAttention 2": ["due to NVTE_FLASH_ATTN=0 or NVTE_FLASH_ATTN_V2=0"],
        "FusedAttention": ["due to NVTE_FUSED_ATTN=0"],
    }
    assert attention.parse_debug(FUSED) == ("FusedAttention sub-backend 1", {})
    assert attention.parse_debug("nothing") == (None, {})


def test_a_flash_attention_that_is_not_installed_is_a_reason():
    """As the recorded check of an H200 has it: Transformer Engine rules out nothing there, and names no flash-attn."""
    (recorded,) = (
        check
        for check in json.loads((ROOT / "benchmarks" / "results" / "verify_h200.json").read_text())["checks"]
        if check["name"] == "attention"
    )
    expected = recorded["facts"]["selected"], {"FlashAttention": ["not installed"]}
    assert attention.parse_debug(recorded["facts"]["output"]) == expected
    found = attention.judge_attention(
        Ended(0, recorded["facts"]["output"], 1.0), {"backend": "fused (cuDNN)"}, "8 rows"
    )
    assert found.summary == "fused (cuDNN) for 8 rows (not FlashAttention: not installed)"
    installed = recorded["facts"]["output"].replace(
        "'flash_attn_version': 'not installed'", "'flash_attn_version': '2.8.3'"
    )
    assert not attention.parse_debug(installed)[1]


def test_attention():
    fused = attention.judge_attention(Ended(0, FUSED, 1.0), {"backend": "fused (cuDNN)"}, "8 rows")
    assert fused.status == "passed" and "8 rows" in fused.summary
    forbidden = attention.judge_attention(Ended(0, DEBUG, 1.0), {"backend": "unfused"}, "8 rows")
    assert forbidden.status == "failed" and forbidden.fixes == ("unset NVTE_FUSED_ATTN NVTE_FLASH_ATTN",)
    assert any("NVTE_FUSED_ATTN=0" in line for line in forbidden.details)
    why = attention.judge_attention(Ended(0, DEBUG, 1.0), {"backend": "flash-attn"}, "8 rows")
    assert why.status == "passed" and "not FusedAttention: due to NVTE_FUSED_ATTN=0" in why.summary
    other = attention.judge_attention(Ended(0, "", 1.0), {"backend": "unfused"}, "8 rows")
    assert any("cudnn" in fix for fix in other.fixes) and any("flash-attn==" in fix for fix in other.fixes)
    crashed = attention.judge_attention(
        Ended(1, "Traceback\nte_llama.UnsupportedArchitecture: no such RoPE\n", 1.0), None, "8 rows"
    )
    assert crashed.status == "failed" and "no such RoPE" in crashed.summary
    assert "did not end within" in attention.judge_attention(Ended(None, "", 180.0), None, "8 rows").summary


def test_the_pinned_flash_attention_is_that_of_the_requirements():
    fixes = attention.judge_attention(Ended(0, "", 1.0), {"backend": "unfused"}, "8 rows").fixes
    assert fixes[-1].removeprefix("MAX_JOBS=4 python -m ") in (ROOT / "requirements-gpu.txt").read_text()


def test_what_the_probe_reads_and_runs():
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 123    /site/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f02-7f03 r--p 00000000 08:01 123    /site/nvidia/cudnn/lib/libcudnn.so.9\n"
        "7f04-7f05 r--p 00000000 08:01 124    /usr/lib/x86_64-linux-gnu/libcudnn_ops.so.9.8.0\n"
        "7f06-7f07 rw-p 00000000 00:00 0 \n7f08-7f09 r--p 00000000 08:01 125    /site/cudnn/readme\n"
    )
    libraries = attention.mapped_libraries(maps, "libcudnn")
    assert libraries == ["/site/nvidia/cudnn/lib/libcudnn.so.9", "/usr/lib/x86_64-linux-gnu/libcudnn_ops.so.9.8.0"]
    assert attention.judge_cudnn(libraries, {}, "9.15.1").status == "failed"
    assert attention.mapped_libraries(Path("/proc/self/maps").read_text(), "libc.") or sys.platform != "linux"
    assert attention.layers_with_every_window((None, None)) == 1
    assert attention.layers_with_every_window((None, None, 24, 24)) == 3


def test_cudnn(tmp_path):
    torchs, systems = "/site/nvidia/cudnn/lib", "/usr/lib"
    one = attention.judge_cudnn([f"{torchs}/libcudnn.so.9", f"{torchs}/libcudnn_ops.so.9"], {torchs: None}, "9.15.1")
    assert one.status == "passed" and one.facts["folders"] == {torchs: ["libcudnn.so.9", "libcudnn_ops.so.9"]}
    two = attention.judge_cudnn(
        [f"{torchs}/libcudnn.so.9", f"{systems}/libcudnn_ops.so.9"], {systems: "9.8.0"}, "9.15.1"
    )
    assert "fused attention may be lost or wrong" in two.summary
    assert two.status == "failed" and "CUDNN_HOME" in two.fixes[0] and any("9.8.0" in line for line in two.details)
    assert attention.judge_cudnn([], {}, None).status == "info"
    (tmp_path / "libcudnn.so.9.8.0").touch()
    (tmp_path / "libcudnn.so.9").symlink_to("libcudnn.so.9.8.0")
    assert attention.cudnn_version(str(tmp_path)) == "9.8.0"


# --- rates, exchanges, engines ----------------------------------------------------------------------------------------

KNOWN = KnownRates(MeasuredRates(800.0, 1400.0, 1300.0, 4.0), "test.json", 79.0)


def test_rates():
    good = gpu.judge_rates(MeasuredRates(760.0, 1390.0, 1290.0, 4.1), KNOWN, "NVIDIA Test", [], [])
    assert good.status == "passed" and "bf16 95%" in good.summary and KNOWN.source in good.summary
    slow = gpu.judge_rates(
        MeasuredRates(400.0, 1390.0, 1290.0, 4.0),
        KNOWN,
        "NVIDIA Test",
        ["application clocks are set below the maximum"],
        ["process 7 (x) holds 1 MiB"],
    )
    assert slow.status == "warning" and "bf16 50%" in slow.summary
    assert (
        "application clocks are set below the maximum" in slow.details and "process 7 (x) holds 1 MiB" in slow.details
    )
    assert slow.fixes[0] == "sudo nvidia-smi --reset-applications-clocks"
    unknown = gpu.judge_rates(MeasuredRates(400.0, None, None, 2.0), None, "NVIDIA Other", [], [])
    assert unknown.status == "info" and "fp8" not in unknown.summary


def test_the_drivers_words():
    assert gpu.throttle_reasons(0x24) == ["the power cap is reached", "it is too hot (software limit)"]
    assert gpu.throttle_reasons(0x1) == []
    own = gpu.described(os.getpid(), 2**30)
    assert own.startswith(f"process {os.getpid()} (") and "name unknown" not in own and own.endswith("holds 1,024 MiB")
    assert gpu.described(2**22 + 1, None) == f"process {2**22 + 1} (name unknown) holds memory"


@pytest.mark.slow
def test_exchanges_between_real_processes(setup):
    """Two processes of torchrun, gloo on the CPU; on GPUs the same program takes NCCL."""
    result = distributed.check_nccl(setup, num_processes=2, mebibytes=1)
    assert result.status == "passed", result
    seen = result.facts["seen"]
    assert (
        seen["world_size"] == 2
        and seen["all_reduce_right"]
        and seen["all_gather_right"]
        and seen["all_gather_gb_s"] > 0
    )


def test_exchanges():
    seen = {
        "world_size": 2,
        "backend": "nccl",
        "all_reduce_right": True,
        "all_gather_right": True,
        "all_reduce_gb_s": 300.0,
        "all_gather_gb_s": 280.0,
        "buffer_mib": 256,
        "without_peer_access": [],
    }
    command = torchrun(2, "-m", "llm_fp8.tools.verify.distributed", "nccl.json")
    assert distributed.judge_nccl(Ended(0, "", 1.0), seen, command).status == "passed"
    wrong = distributed.judge_nccl(Ended(0, "", 1.0), {**seen, "all_gather_right": False}, command)
    assert (
        wrong.status == "failed"
        and "all-gather" in wrong.summary
        and wrong.fixes[0].startswith("NCCL_DEBUG=WARN torchrun")
    )
    assert distributed.judge_nccl(Ended(0, "", 1.0), {**seen, "without_peer_access": [1]}, command).status == "warning"
    failed = distributed.judge_nccl(
        Ended(1, "[rank1]: torch.distributed.DistBackendError: NCCL error\n", 1.0), None, command
    )
    assert failed.status == "failed" and "NCCL error" in failed.summary


COMMAND = torchrun(1, "train_multi_gpu.py", "--sharding_mode", "ddp", "--output_dir", "runs/verify-ddp")
SUMMARY = {
    "sharding_mode": "ddp",
    "recipe_inside_modules": "DelayedScaling",
    "attention_backend": "fused (cuDNN)",
    "recorded_step": None,
    "certificate": {"verdict": "certified", "reasons": []},
}
RUN = distributed.ShardedRun("ddp", COMMAND, Ended(0, "", 9.0), SUMMARY, [6.9, 5.2])


@pytest.mark.parametrize(
    ("changes", "summary", "status", "word"),
    [
        ({}, {}, "passed", "train in fp8"),
        ({"losses": [6.9, math.inf]}, {}, "failed", "losses"),
        ({"losses": [5.2, 6.9]}, {}, "failed", "does not fall"),
        ({}, {"sharding_mode": "single"}, "failed", "the run was single"),
        ({}, {"recipe_inside_modules": "none"}, "failed", "inside the modules"),
        ({}, {"recorded_step": {"gemm_kernels": {"bf16": 100}}}, "failed", "no fp8 GEMM"),
        ({}, {"certificate": {"verdict": "failed", "reasons": ["0 fp8 kernels"]}}, "failed", "0 fp8 kernels"),
        ({}, {"certificate": {"verdict": "undetermined", "reasons": ["names"]}}, "warning", "could not be certified"),
        ({}, {"certificate": None}, "passed", ""),
        ({"ended": Ended(-9, "", 3.0)}, {}, "failed", "exit code -9"),
        ({}, {"attention_backend": "unfused"}, "warning", "unfused"),
        (
            {
                "summary": None,
                "ended": Ended(2, "error: --fp8_scenario is not available.\nx.ChildFailedError: y\n", 3.0),
            },
            {},
            "failed",
            "not available",
        ),
    ],
)
def test_engines(changes, summary, status, word):
    run = dataclasses.replace(RUN, **{"summary": {**SUMMARY, **summary}, **changes})
    result = distributed.judge_engines([run], {}, 1)
    assert (result.status, word in result.summary) == (status, True), result
    if status == "failed":
        assert result.fixes == (shown(COMMAND),)
    assert shown(COMMAND).startswith("torchrun --standalone --nproc_per_node=1 train_multi_gpu.py")


def test_a_mode_that_could_not_be_tried_is_said():
    result = distributed.judge_engines([RUN], {"deepspeed_3": "deepspeed is not installed"}, 1)
    assert result.status == "passed" and "deepspeed_3 not tried: deepspeed is not installed" in result.details


def test_the_engines_options_are_those_of_the_script():
    from llm_fp8.config.parser import parse_config

    config = parse_config([*distributed.OPTIONS, "--sharding_mode", "ddp", "--output_dir", "x"], parallel=True)
    assert config.precision.mixed_precision == "fp8" and config.optim.max_steps == distributed.NUM_STEPS


RUN_PROGRAM = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
(folder / "metrics.jsonl").write_text('{"loss": 6.9}\\n{"eval_loss": 6.0}\\n{"loss": 5.2}\\n{"lo')
if "hangs" in folder.name:
    time.sleep(60)
(folder / "summary.json").write_text(json.dumps({"sharding_mode": folder.name.removeprefix("run-")}))
"""


@pytest.fixture
def made_up_runs(monkeypatch, setup):
    """A function: the `Setup` of these modes and so many GPUs, whose runs are programs that write a run's records."""
    monkeypatch.setattr(distributed, "torchrun", lambda num, *words: [sys.executable, "-c", RUN_PROGRAM, words[-1]])

    def make(modes: tuple[str, ...], num_gpus: int) -> Setup:
        vars(setup).update(engines=modes, num_gpus=num_gpus)
        distributed.start(setup, ["engines"])
        return setup

    yield make
    for process in setup.processes.values():
        process.kill()


@pytest.mark.slow
def test_runs_side_by_side(monkeypatch, made_up_runs):
    """On one GPU all start at once; one of them does not end."""
    monkeypatch.setattr(distributed, "RUN_TIMEOUT_S", 2.0)
    setup = made_up_runs(("ddp", "hangs"), num_gpus=1)
    assert list(setup.processes) == ["run-ddp", "run-hangs"]
    ddp, hangs = (distributed.finish_run(setup, mode) for mode in setup.engines)
    assert (ddp.mode, ddp.ended.code, ddp.losses, ddp.summary) == ("ddp", 0, [6.9, 5.2], {"sharding_mode": "ddp"})
    assert hangs.ended.code is None and hangs.losses == [6.9, 5.2], "what was recorded before the limit is evidence"
    result = distributed.judge_engines([ddp, hangs], {}, 1)
    assert result.facts["hangs"]["losses"] == [6.9, 5.2] and "most recent call first" in result.facts["hangs"]["output"]


def test_on_several_gpus_runs_follow_one_another(made_up_runs):
    setup = made_up_runs(("ddp", "fsdp_full"), num_gpus=2)
    assert list(setup.processes) == ["run-ddp"]
    result = distributed.check_engines(setup)
    assert list(result.facts) == list(setup.engines) and all(run["exit_code"] == 0 for run in result.facts.values())
    assert list(setup.processes) == ["run-ddp", "run-fsdp_full"]


def test_processes_end_with_their_output(tmp_path):
    failed = Started([sys.executable, "-c", "print('first'); raise ValueError('wrong')"], tmp_path / "a.log").wait(30)
    assert failed.code == 1 and failed.why() == "ValueError: wrong" and "first" in failed.output
    torchruns = (
        "E1121 15:16:40.1 7 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 2) "
        "local_rank: 0\nFailures:\n"
    )
    assert Ended(1, f"error: --x is wrong.\n{torchruns}", 1.0).evidence == ("error: --x is wrong.",)


FAMILY = """
import subprocess, sys, time
code = "def exchange(): time.sleep(60)\\nimport time; exchange()"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def assert_ends(pid: int) -> None:
    """A process that is a zombie at most, soon."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        until = time.monotonic() + 10
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, process
            time.sleep(0.05)


def test_a_time_limit_ends_the_whole_family_and_says_where_each_was(tmp_path):
    """As torchrun does, the process gives its child a session of its own, so the process group does not hold it."""
    hung = Started([sys.executable, "-c", FAMILY], tmp_path / "a.log").wait(1.0)
    assert hung.code is None and hung.why() == hung.how() and "did not end within 1 s" in hung.how()
    assert any(line.endswith("in exchange") for line in hung.stacks), hung.output
    assert hung.output.split()[0] in hung.evidence[0]
    assert_ends(int(hung.output.split()[0]))


@pytest.mark.slow
def test_no_process_outlives_a_verifier_that_is_killed(tmp_path):
    log = tmp_path / "a.log"
    program = f"""
import sys, time
from pathlib import Path
from llm_fp8.tools.verify.processes import Started
code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
started = Started([sys.executable, "-c", code], Path({str(log)!r}))
time.sleep(60)
"""
    verifier = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    until = time.monotonic() + 30
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < until
        time.sleep(0.05)
    verifier.kill()
    verifier.wait()
    assert_ends(int(log.read_text()))


# --- the script -------------------------------------------------------------------------------------------------------


def verify(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")} | environ
    command = [sys.executable, "scripts/verify_fp8.py", *options]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
@without_gpu
def test_without_a_gpu_it_does_what_it_can(tmp_path):
    path = tmp_path / "verify.json"
    done = verify("--json", str(path), "--output_dir", str(tmp_path), NVTE_FP8_ALLREDUCE="1", WANDB_MODE="offline")
    assert done.returncode == 3, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert (
        set(found) == {"exit_code", "under_way", "wall_s", "options", "checks", "not_checked", "provenance"}
        and found["exit_code"] == 3
    )
    by_name = {check["name"]: check for check in found["checks"]}
    assert set(by_name) == {check.name for check in CHECKS}
    assert all(
        set(check) == {"name", "title", "status", "summary", "details", "mends", "facts", "wall_s"}
        for check in by_name.values()
    )
    assert {name for name, check in by_name.items() if check["status"] == "skipped"} == set(found["not_checked"])
    assert set(found["not_checked"]) == {"gpu", "recipes", "steps", "attention", "cudnn", "rates", "nccl", "engines"}
    assert all(
        by_name[name]["status"] == "passed" for name in ("imports", "data", "cpu_steps", "torchao_steps", "tracking")
    )
    assert by_name["variables"]["status"] == "warning" and by_name["variables"]["mends"] == ["unset NVTE_FP8_ALLREDUCE"]
    assert "unset NVTE_FP8_ALLREDUCE" in done.stdout and "without a GPU nothing is said of fp8" in done.stdout
    assert found["provenance"]["packages"]["torch"] and "Traceback" not in done.stderr


@pytest.mark.slow
@without_gpu
def test_a_package_that_does_not_load_is_one_failed_check(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('built for another Python')\n")
    path = tmp_path / "verify.json"
    done = verify(
        "--json", str(path), "--only", "versions,imports,variables,output_folder,data", PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(path.read_text())
    by_name = {check["name"]: check for check in found["checks"]}
    assert "transformers does not load: ImportError: built for another Python" in by_name["imports"]["summary"]
    assert by_name["imports"]["mends"][0].endswith("-m pip install --force-reinstall -r requirements.txt")
    assert by_name["output_folder"]["status"] == "passed" and by_name["data"]["status"] == "failed"
    assert found["provenance"]["packages"]["torch"], "provenance needs no transformers"
    assert "Traceback" not in done.stderr


@without_gpu
def test_a_failed_check_is_exit_code_1(monkeypatch, tmp_path, capsys):
    for name in ("CUDA_LAUNCH_BLOCKING", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert main(["--only", "variables,output_folder", "--output_dir", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "To fix" in printed and "unset CUDA_LAUNCH_BLOCKING" in printed and "unset WORLD_SIZE" in printed
    assert "WORLD_SIZE" not in os.environ, "what a launcher left must not reach the other checks"


@without_gpu
def test_a_signal_keeps_what_was_found(monkeypatch, tmp_path, capsys):
    def stopped(_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    checks = [
        module_check(monkeypatch, "fine", lambda _: Result("passed", "fine")),
        module_check(monkeypatch, "slow", stopped),
        Check("later", "L", "later"),
    ]
    monkeypatch.setattr(
        "llm_fp8.tools.verify.cli.CHECKS", tuple(dataclasses.replace(check, limit_s=None) for check in checks)
    )
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--json", str(tmp_path / "verify.json"), "--output_dir", str(tmp_path)]) == 143
    found = json.loads((tmp_path / "verify.json").read_text())
    assert (found["exit_code"], found["under_way"], found["not_checked"]) == (143, "slow", ["slow", "later"])
    assert [check["name"] for check in found["checks"]] == ["fine"]
    assert "stopped in 'slow'" in capsys.readouterr().out and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--only", "kernel"], "--only"),
        (["--max_seq_length", "0"], "--max_seq_length"),
        (["--json", "/proc/verify/x.json"], "--json"),
        (["--engines", "fsdp"], "--engines"),
        (["--model_name", "./no-such-folder"], "--model_name"),
    ],
)
def test_mistakes_name_the_flag(options, word):
    with pytest.raises(UserError, match=word):
        main([*options, *([] if "--only" in options else ["--only", "output_folder"])])


def test_an_unknown_option_is_one_sentence():
    with pytest.raises(SystemExit) as stopped:
        parse(["--modle", "x"], "")
    assert stopped.value.code == 2


def test_it_starts_its_processes_itself(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UserError, match="without torchrun"):
        main(["--only", "output_folder"])
