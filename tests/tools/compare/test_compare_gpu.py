"""The comparison with real fp8 variants: certificates, memory, fallback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "compare_performance.py"
TRAIN = "--use_te --max_steps 40 --eval_every 20 --batch_size 8 --max_seq_length 256 --num_of_samples 1000 --no_export"


def compared(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--train", TRAIN, "--output", "out", "--seeds", "1", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    comparison = json.loads((folder / "out" / "comparison.json").read_text())
    assert all(variant["certificate"]["state"] == "certified" for variant in comparison["variants"])
    assert comparison["differences"] == []
    return comparison


def test_variants_on_one_gpu(tmp_path):
    comparison = compared(tmp_path, "--variants", "bf16,fp8,current,mxfp8")
    variants = {variant["variant"]: variant for variant in comparison["variants"]}
    assert variants["bf16"]["effective"] == ["bf16"] and variants["delayed"]["effective"] == ["fp8 delayed"]
    assert all(own["peak_memory_gib"] > 0 and own["tokens_per_s"]["value"] > 0 for own in variants.values())
    for variant in ("delayed", "current"):
        # A model this small gains nothing from fp8; what counts is that a judgement was made from measured figures.
        assert comparison["verdicts"][variant]["conclusion"] in ("slower", "not faster", "too few seeds")
        assert abs(variants[variant]["loss_gap"]["value"]) < 0.3
    if torch.cuda.get_device_capability()[0] != 10:
        assert variants["mxfp8"]["effective"] == ["fp8 delayed"]
        assert comparison["verdicts"]["mxfp8"]["conclusion"] == "fell back"


@pytest.mark.multi_gpu
def test_variants_of_two_gpus_each(tmp_path):
    comparison = compared(tmp_path, "--variants", "bf16,fp8", "--num_gpus", "2")
    assert comparison["provenance"]["gpus"][1]
