"""The diagnosis of a step: a real model's training steps, with stand-ins for what only a GPU has."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_fp8.config.parser import parse_config
from llm_fp8.observability import kernel_trace
from llm_fp8.observability.metrics import GIB
from llm_fp8.tools.diagnose import cli, step
from llm_fp8.utils.errors import UserError
from tests.support.recorded_kernels import recorded
from tests.support.small import forget_accelerator

GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_TNT"
ATTENTION = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"
NUM_STEPS = step.NUM_WARMUP_STEPS + step.NUM_TIMED_STEPS + 2  # the memory, the kernels


@pytest.fixture
def diagnosed(tiny_model, rows, monkeypatch):
    """Diagnose the tiny model with these options, on a CPU that counts memory as a GPU would."""

    def run(*options: str, trace: Path | None = None) -> dict[str, Any]:
        forget_accelerator()
        taken = recorded((GEMM, 0, 600), (ATTENTION, 600, 800), ("_update_kernel", 900, 1000))
        taken.export_chrome_trace = lambda path: Path(path).write_text("{}")
        counts = iter(range(GIB, 2 * GIB, 2**20))
        monkeypatch.setattr(kernel_trace, "record_kernels", lambda: contextlib.nullcontext(taken))
        monkeypatch.setattr(step, "held_gib", lambda tensors: len([t for t in tensors if t is not None]) / 1024)
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: next(counts))
        for name in ("max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: 3 * GIB)
        words = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=256", "--batch_size=2"]
        return step.diagnose(parse_config([*words, *options]), trace)

    return run


def test_a_bf16_run(diagnosed, tmp_path, capsys):
    found = diagnosed("--mixed_precision=bf16", "--gradient_accumulation_steps=2", trace=tmp_path / "trace.json")
    assert (tmp_path / "trace.json").exists()
    assert found["problems"] == [], found["certificate"]
    assert found["attention"] == "sdpa (cuDNN)"
    assert found["coverage"]["fp8_linear_flop_share"] == 0
    assert found["gemms"] == {"bf16": {"count": 1, "time_s": pytest.approx(6e-4)}}
    assert list(found["classes"]) == ["gemm", "attention", "optimizer", "gpu_idle"]
    assert found["classes"]["gpu_idle"]["time_s"] == pytest.approx(found["step"]["step_time_s"] - 9e-4)
    memory = found["memory_gib"]
    parts = [gib for kind, gib in memory.items() if kind not in ("peak", "reserved")]
    assert sum(parts) == pytest.approx(memory["peak"]) == 3
    assert memory["activations"] > 0 and memory["gradients"] > 0, "the second micro-batch's pass has gradients already"
    json.dumps(found)
    capsys.readouterr()
    cli.render(found)
    printed = capsys.readouterr().out
    assert "certified" in printed and "--batch_size" in printed and "activations" in printed


def test_fp8_kernels_in_a_bf16_run_are_a_problem(diagnosed, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GEMM", "nvjet_qqtst_128x128_64x6_2x1_v_bz_TNN")
    found = diagnosed("--mixed_precision=bf16")
    assert found["certificate"]["verdict"] == "failed" and found["problems"] == found["certificate"]["reasons"]


def made_up(**changes: Any) -> dict[str, Any]:
    found = {
        "precision": {"effective": "fp8", "fallback_reason": None, "requested_scenario": "block"},
        "certificate": {"verdict": "certified", "reasons": []},
        "coverage": {"skipped": {"lm_head": "1 bf16 (lm_head)"}},
        "attention": "fused (cuDNN)",
    }
    return found | changes


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attention": "unfused"}, "NVTE_FUSED_ATTN"),
        ({"certificate": {"verdict": "failed", "reasons": ["no fp8 GEMM ran"]}}, "no fp8 GEMM ran"),
        ({"precision": {**made_up()["precision"], "fallback_reason": "Hopper alone"}}, "--fp8_scenario block"),
        ({"coverage": {"skipped": {"up": "1 bf16 (size 33 x 32 is not a multiple of 16)"}}}, "size 33"),
    ],
)
def test_problems(changes, word):
    (problem,) = step.problems(made_up(**changes))
    assert word in problem
    assert step.problems(made_up()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_exits_3(tiny_model, call_main):
    assert call_main(cli, f"--model_name={tiny_model}", "--mixed_precision=bf16") == 3


def test_a_trace_needs_a_step(call_main, tmp_path):
    with pytest.raises(UserError, match="--trace"):
        call_main(cli, "--quality", f"--trace={tmp_path / 'trace.json'}")
