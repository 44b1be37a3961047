"""The diagnosis of a training step on the CPU: the steps are real, the kernel times and GPU memory are made up. The
measurement of fp8's effect on quality uses torchao's emulated fp8.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm_fp8.config.parser import parse_config
from llm_fp8.observability import kernel_trace
from llm_fp8.observability.metrics import GIB
from llm_fp8.tools.diagnose import cli, measure
from llm_fp8.tools.diagnose.measure import describe_quality, measure_quality
from llm_fp8.utils.errors import UserError
from tests.support.recorded_kernels import finished_profile
from tests.support.small import reset_accelerator, write_model

FP8 = ["--mixed_precision=fp8", "--fp8_backend=torchao", "--max_seq_length=256", "--batch_size=2"]
LINEARS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
OUTLIER_MODULE = "model.layers.1.mlp.down_proj"
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_TNT"
ATTENTION = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"


@pytest.fixture
def diagnose(tiny_model, rows, monkeypatch):
    """Return a function that takes options and diagnoses the tiny model, with made-up kernel times and GPU memory."""

    def run(*options: str, trace: Path | None = None) -> dict[str, Any]:
        reset_accelerator()
        recording = finished_profile((GEMM, 0, 600), (ATTENTION, 600, 800), ("_update_kernel", 900, 1000))
        recording.export_chrome_trace = lambda path: Path(path).write_text("{}")
        counts = iter(range(GIB, 2 * GIB, 2**20))
        monkeypatch.setattr(kernel_trace, "record_kernels", lambda: contextlib.nullcontext(recording))
        monkeypatch.setattr(measure, "gpu_gib", lambda tensors: len([t for t in tensors if t is not None]) / 1024)
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: next(counts))
        for name in ("max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: 3 * GIB)
        data = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=256", "--batch_size=2"]
        return measure.diagnose(parse_config([*data, *options]), trace)

    return run


def test_diagnosis_of_a_bf16_run_sorts_kernel_times_and_memory(diagnose, tmp_path, capsys):
    report = diagnose("--mixed_precision=bf16", "--gradient_accumulation_steps=2", trace=tmp_path / "trace.json")
    assert (tmp_path / "trace.json").exists()
    assert report["problems"] == [], report["certificate"]
    assert report["attention"] == "sdpa (cuDNN)"
    assert report["coverage"]["fp8_linear_flop_share"] == 0
    assert report["gemms"] == {"bf16": {"count": 1, "time_s": pytest.approx(6e-4)}}
    assert list(report["classes"]) == ["gemm", "attention", "optimizer", "gpu_idle"]
    assert report["classes"]["gpu_idle"]["time_s"] == pytest.approx(report["step"]["step_time_s"] - 9e-4)
    memory = report["memory_gib"]
    parts = [gib for kind, gib in memory.items() if kind not in ("peak", "reserved")]
    assert sum(parts) == pytest.approx(memory["peak"]) == 3
    assert memory["activations"] > 0 and memory["gradients"] > 0, "gradients exist during the second micro-batch"
    json.dumps(report)
    capsys.readouterr()
    cli.render(report)
    printed = capsys.readouterr().out
    assert "certified" in printed and "--batch_size" in printed and "activations" in printed


def test_fp8_kernels_in_a_bf16_run_are_a_problem(diagnose, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GEMM", "nvjet_qqtst_128x128_64x6_2x1_v_bz_TNN")
    report = diagnose("--mixed_precision=bf16")
    assert report["certificate"]["verdict"] == "failed" and report["problems"] == report["certificate"]["reasons"]


def made_up_report(**changes: Any) -> dict[str, Any]:
    report = {
        "precision": {"effective": "fp8", "fallback_reason": None, "requested_scenario": "block"},
        "certificate": {"verdict": "certified", "reasons": []},
        "coverage": {"skipped": {"lm_head": "1 bf16 (lm_head)"}},
        "attention": "fused (cuDNN)",
    }
    return report | changes


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"attention": "unfused"}, "NVTE_FUSED_ATTN"),
        ({"certificate": {"verdict": "failed", "reasons": ["no fp8 GEMM ran"]}}, "no fp8 GEMM ran"),
        ({"precision": {**made_up_report()["precision"], "fallback_reason": "Hopper alone"}}, "--fp8_scenario block"),
        ({"coverage": {"skipped": {"up": "1 bf16 (size 33 x 32 is not a multiple of 16)"}}}, "size 33"),
    ],
)
def test_problems_name_the_cause_or_the_remedy(changes, phrase):
    (problem,) = measure.problems(made_up_report(**changes))
    assert phrase in problem
    assert measure.problems(made_up_report()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_diagnosis_without_a_gpu_exits_with_code_3(tiny_model, call_main):
    assert call_main(cli, f"--model_name={tiny_model}", "--mixed_precision=bf16") == 3


def test_quality_measurement_refuses_trace(call_main, tmp_path):
    with pytest.raises(UserError, match="--trace"):
        call_main(cli, "--quality", f"--trace={tmp_path / 'trace.json'}")


def quality_of(model: str, rows: str, *more: str) -> dict[str, Any]:
    reset_accelerator()
    return measure_quality(parse_config([f"--model_name={model}", f"--dataset_name={rows}", *FP8, *more]))


@pytest.fixture
def outlier_model(tmp_path):
    """Write a model with an outlier: one channel between up_proj and down_proj of the second layer is a million times
    as large as the others. fp8 with one scale per tensor rounds nearly all others to 0.
    """
    folder = write_model(tmp_path / "outlier")
    path = tmp_path / "outlier" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{OUTLIER_MODULE}.weight"] *= 300  # because a random MLP adds little to the residual stream
    for name in ("gate", "up"):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"][3] *= 1e3
    tensors[f"{OUTLIER_MODULE}.weight"][:, 3] /= 1e6
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_quality_finds_the_module_with_the_largest_fp8_error(outlier_model, tiny_model, rows):
    quality, plain = quality_of(outlier_model, rows), quality_of(tiny_model, rows)
    assert quality["kinds"].keys() == LINEARS and len(quality["modules"]) == 14
    worst, error = next(iter(quality["modules"].items()))
    assert worst == OUTLIER_MODULE
    assert error["relative_error"] > 10 * next(iter(plain["modules"].values()))["relative_error"]
    total, without = quality["all_in_fp8"]["divergence"], quality["kinds"]["mlp.down_proj"]["without"]["divergence"]
    assert total > 2 * without
    # Every divergence is measured against the same bf16 pass, and the shares refer to all linear weights.
    assert all(0 < kind["alone"]["divergence"] < total * 1.5 for kind in quality["kinds"].values())
    assert 0.1 < sum(kind["linear_flop_share"] for kind in quality["kinds"].values()) < 1
    assert "--fp8_bf16_modules mlp.down_proj would lower" in describe_quality(quality)
    excluded = quality_of(outlier_model, rows, "--fp8_bf16_modules=mlp.down_proj")
    assert excluded["kinds"].keys() == LINEARS - {"mlp.down_proj"}
    assert excluded["all_in_fp8"]["divergence"] == pytest.approx(without, rel=1e-4)


def test_quality_needs_fp8(tiny_model, rows):
    reset_accelerator()
    with pytest.raises(UserError, match="--mixed_precision fp8"):
        measure_quality(parse_config([f"--model_name={tiny_model}", f"--dataset_name={rows}"]))
