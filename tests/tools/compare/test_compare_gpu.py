"""The comparison with real fp8 variants: certificates, memory, fallback, and GPUs of their own for runs at the same
time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_fp8.tools.compare.cli import usable_gpus

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "compare_performance.py"
TRAIN = "--use_te --max_steps 40 --eval_every 20 --batch_size 8 --max_seq_length 256 --num_of_samples 1000 --no_export"


def compared(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """comparison.json and what the script said."""
    command = [sys.executable, str(SCRIPT), "--train", TRAIN, "--output", "out", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (
        done.stdout + done.stderr + "".join(log.read_text()[-2000:] for log in folder.glob("out/logs/*"))
    )
    assert (folder / "out" / "comparison.html").stat().st_size > 20_000
    return json.loads((folder / "out" / "comparison.json").read_text()), done.stdout


def by_variant(comparison: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {variant["arm"]: variant for variant in comparison["arms"]}


def test_arms_on_one_gpu(tmp_path):
    comparison, said = compared(tmp_path, "--arms", "bf16,fp8,current,mxfp8", "--seeds", "1")
    variants = by_variant(comparison)
    assert variants["bf16"]["effective"] == ["bf16"] and variants["delayed"]["effective"] == ["fp8 delayed"]
    for variant in variants.values():
        assert variant["certificate"]["state"] == "certified", variant["certificate"]
        assert variant["peak_memory_gib"] > 0 and variant["tokens_per_s"]["value"] > 0
    assert [d for d in comparison["differences"] if d["effect"] != "note"] == [], (
        "the variants differ in precision alone"
    )
    for variant in ("delayed", "current"):
        # A model this small gains nothing from fp8; what counts is that a judgement was made from measured figures.
        assert comparison["verdicts"][variant]["conclusion"] in ("slower", "not faster", "too few seeds")
        assert abs(variants[variant]["loss_gap"]["mean"]) < 0.3
    if torch.cuda.get_device_capability()[0] != 10:
        assert (
            variants["mxfp8"]["effective"] == ["fp8 delayed"]
            and comparison["verdicts"]["mxfp8"]["conclusion"] == "fell back"
        )


def test_runs_that_share_a_gpu_are_flagged(tmp_path):
    comparison, _ = compared(
        tmp_path,
        "--arms",
        "bf16,fp8",
        "--seeds",
        "1",
        "--gpus",
        usable_gpus(None)[0],
        "--parallel",
        "2",
        "--share_gpus",
    )
    assert any(d["field"] == "hardware shared while running" for d in comparison["differences"])
    assert comparison["verdicts"]["delayed"]["conclusion"] == "speed unknown"


@pytest.mark.multi_gpu
def test_runs_at_a_time_on_gpus_of_their_own(tmp_path):
    comparison, said = compared(tmp_path, "--arms", "bf16,fp8", "--seeds", "1", "--parallel", "2")
    first, second = usable_gpus(None)[:2]
    assert f"bf16-seed1: started on GPU {first}" in said and f"delayed-seed1: started on GPU {second}" in said
    assert [d["field"] for d in comparison["differences"] if d["effect"] != "note"] == []


@pytest.mark.multi_gpu
def test_arms_of_two_gpus_each(tmp_path):
    comparison, _ = compared(tmp_path, "--arms", "bf16,fp8", "--seeds", "1", "--num_gpus", "2")
    variants = by_variant(comparison)
    assert comparison["provenance"]["of_first_run"]["gpus"][1]
    assert all(variant["certificate"]["state"] == "certified" for variant in variants.values())
    assert [d["field"] for d in comparison["differences"] if d["effect"] != "note"] == []
