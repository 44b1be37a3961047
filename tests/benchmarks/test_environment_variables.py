"""The bench of environment variables: settings take turns, none has another's variables, and each is held against
none at all.
"""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

from benchmarks import environment_variables as bench
from llm_fp8.observability.provenance import recorded_command
from llm_fp8.tools.bench.variants import parse_variant
from llm_fp8.tools.bench.worker import measure_apart
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.tools.verify.environment_rules import RULES
from llm_fp8.utils.errors import UserError
from tests.support.documented_variables import documented_variables

WORK = Workload.parse("Llama-3.2-1B:8x1024x4", 5)
STEP_S = {"CUDA_LAUNCH_BLOCKING": 2.0, "NVTE_FP8_ALLREDUCE": 1.0}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A run of the bench with a measurement that is slower under one of the variables; the calls, the rows and the
    file.
    """
    calls = []

    def measure(workload, variant, num_gpus, num_steps, warmup, timeout_s, variables):
        calls.append(dict(variables))
        active = [name for name, value in variables.items() if value is not None]
        if "NVTE_FUSED_ATTN" in active:
            return {"failed": "RuntimeError: no attention"}
        seconds = max([1.0, *(STEP_S[name] for name in active)])
        header = {"provenance": {"command": [], "environment": {name: "1" for name in active}}, "peaks": None}
        return {
            "failed": None,
            "header": header,
            "step_times_s": [seconds * factor for factor in (1.0, 1.01, 1.02)],
            "losses": [12.0, 11.0],
            "peak_memory_gib": 30.0,
            "wall_time_s": 9.0,
            "gemm_kernels": {},
        }

    monkeypatch.setattr(bench, "measure_apart", measure)
    settings = ["NVTE_FP8_ALLREDUCE=1", "CUDA_LAUNCH_BLOCKING=1", "NVTE_FUSED_ATTN=0"]
    path = tmp_path / "folder" / "r.json"
    rows = bench.measure_all(WORK, parse_variant("delayed"), settings, 2, 2, 100, path)
    return calls, {row["setting"]: row for row in rows}, json.loads(path.read_text())


def test_settings_take_turns_and_have_no_variable_of_another(measured):
    calls, rows, _ = measured
    assert list(rows) == ["none", "NVTE_FP8_ALLREDUCE=1", "CUDA_LAUNCH_BLOCKING=1", "NVTE_FUSED_ATTN=0"]
    active = [[name for name, value in call.items() if value is not None] for call in calls]
    assert active == [[], ["NVTE_FP8_ALLREDUCE"], ["CUDA_LAUNCH_BLOCKING"], ["NVTE_FUSED_ATTN"]] * 2
    names = {"CUDA_LAUNCH_BLOCKING", "NVTE_FP8_ALLREDUCE", "NVTE_FUSED_ATTN"}
    assert all(call.keys() == names for call in calls), "those of the shell are taken out"


def test_each_is_held_against_none(measured):
    _, rows, record = measured
    nothing, slow, failed = (
        rows[name] for name in ("NVTE_FP8_ALLREDUCE=1", "CUDA_LAUNCH_BLOCKING=1", "NVTE_FUSED_ATTN=0")
    )
    assert nothing["speed_ratio"] == pytest.approx(1) and nothing["speeds_overlap"] and nothing["memory_ratio"] == 1
    assert (
        slow["speed_ratio"] == pytest.approx(0.5) and not slow["speeds_overlap"] and slow["first_loss_difference"] == 0
    )
    assert [found["level"] for found in slow["judged"]] == ["harmful"] and slow["variables"] == {
        "CUDA_LAUNCH_BLOCKING": "1"
    }
    assert (
        failed["failed"] == "RuntimeError: no attention"
        and "speed_ratio" not in failed
        and "speed_ratio" not in rows["none"]
    )
    assert len(slow["rounds"]) == 2
    assert record["rows"] == list(rows.values()) and record["provenance"]["environment"] == {}, (
        "the origin is that of none"
    )
    assert record["provenance"]["command"] == recorded_command(sys.argv)
    lines = [bench.line_of(row) for row in rows.values()]
    assert (
        "x 0.500, beyond the spread" in lines[2]
        and "x 1.000, within the spread" in lines[1]
        and "no effect: does nothing here" in lines[1]
    )
    assert "not measured: RuntimeError" in lines[3]


def test_the_settings_of_the_guides_are_documented():
    for settings in (bench.SETTINGS, bench.SETTINGS_OF_COMMUNICATION):
        names = {name for setting in settings for name in bench.variables_of(setting)}
        assert names <= {re.sub("SOMETHING$", "", name) for name in documented_variables()} and len(settings) == len(
            set(settings)
        )
    assert all(bench.judged(setting) for setting in bench.SETTINGS_OF_COMMUNICATION)
    names = {name for setting in bench.SETTINGS for name in bench.variables_of(setting)}
    judged = {name for name in names if any(rule.speaks_of(name) for rule in RULES)}
    assert judged == names - {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--settings", "NVTE_FUSED_ATTN"], "write NAME=VALUE"),
        (["--settings", "A=1 A=2"], "each name once"),
        (["--settings", " "], "an empty one"),
        (["--settings", "A=1", "A=1"], "twice"),
        (["--warmup", "10"], "must leave some of the 10 --steps"),
        (["--rounds", "0"], "--rounds 0 measures nothing"),
        (["--num_gpus", "0"], "--num_gpus 0 measures nothing"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        bench.parse([f"--output={tmp_path / 'r.json'}", *options])


def test_several_gpus_have_settings_and_an_arm_of_their_own(tmp_path, monkeypatch):
    one, two = (bench.parse([f"--output={tmp_path / 'r.json'}", f"--num_gpus={number}"]) for number in (1, 2))
    assert (one.arm, two.arm) == ("delayed", "fsdp_full:delayed")
    assert (one.settings, two.settings) == (list(bench.SETTINGS), list(bench.SETTINGS_OF_COMMUNICATION))
    for options, words in (
        (["--arm=fsdp_full:delayed"], "--arm fsdp_full:delayed is spread over several GPUs; say over how many"),
        (["--num_gpus=2", "--arm=delayed"], "say how it is spread over the GPUs"),
        (["--num_gpus=3"], "--num_gpus 3 are more than the 2 that are found"),
    ):
        monkeypatch.setattr("sys.argv", ["environment_variables.py", f"--output={tmp_path / 'r.json'}", *options])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(UserError, match=words):
            bench.main()


@pytest.mark.slow
def test_a_launch_has_the_variables_of_its_setting(tmp_path, warm_python, tiny_architecture, monkeypatch):
    """Through torchrun and gloo; what the shell has of another setting is taken out, what belongs to none stays."""
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    found = []

    def measure(*arguments, **options):
        answer = measure_apart(*arguments, **options)
        found.append(answer["header"]["provenance"]["environment"])
        return answer

    monkeypatch.setattr(bench, "measure_apart", measure)
    work, variant = Workload.parse(f"{tiny_architecture}:2x32x2", 3), parse_variant("fsdp_full:bf16:swap")
    settings, path = ["NCCL_P2P_DISABLE=0 TORCH_DISTRIBUTED_DEBUG=DETAIL"], tmp_path / "r.json"
    none, set_ = bench.measure_all(work, variant, settings, 1, 1, 120.0, path, 2)
    names = ("NCCL_P2P_DISABLE", "TORCH_DISTRIBUTED_DEBUG", "NCCL_NVLS_ENABLE")
    assert [[environment.get(name) for name in names] for environment in found] == [
        [None, None, "0"],
        ["0", "DETAIL", "0"],
    ]
    for row in (none, set_):
        assert (
            row["num_gpus"] == 2
            and len(row["rounds"]) == 1
            and len(row["rounds"][0]["median_step_time_s_by_rank"]) == 2
        )
        assert row["tokens_per_s"] == pytest.approx(row["rounds"][0]["tokens_per_s"]), "of both processes"
    assert set_["speed_ratio"] > 0 and set_["first_loss_difference"] == pytest.approx(0, abs=1e-6)
    assert [row["setting"] for row in json.loads(path.read_text())["rows"]] == ["none", *settings]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_gpu_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["environment_variables.py", f"--output={tmp_path / 'r.json'}"])
    with pytest.raises(UserError, match="none is found|needs an NVIDIA GPU"):
        bench.main()
