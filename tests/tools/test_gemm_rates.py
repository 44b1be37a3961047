"""What a GPU is held against: formulas, operands, and the table read from recorded results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llm_fp8.tools import gemm_rates
from llm_fp8.tools.gemm_rates import (
    GPUS,
    MeasuredRates,
    copy_tb_s,
    fp8_gemm,
    fp8_operands,
    gemm_tflops,
    known_gpu_names,
    known_rates,
    measure_rates,
    shares,
)
from llm_fp8.utils.packages import REPOSITORY

FIGURES = MeasuredRates(bf16_gemm_tflops=700.0, fp8_gemm_tflops=1400.0, fp8_split_gemm_tflops=None, copy_tb_s=4.0)


def test_formulas():
    assert gemm_tflops(8192, 2 * 8192**3 / 1e15) == pytest.approx(1000.0)
    assert copy_tb_s(2**40, 1.0) == pytest.approx(2 * 2**40 / 1e12), "a copied byte is read and written"


def test_the_fp8_product_is_the_product():
    """On the CPU too: operands, layout and scale are as torch wants them."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 64, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    left8, right8, scale = fp8_operands(left, right)
    assert right8.stride() == (1, 64)
    expected = left8.float() @ right8.float()
    assert torch.allclose(fp8_gemm(left8, right8, scale, fast=False).float(), expected, rtol=1e-2, atol=1e-2)


def test_a_cpu_has_no_ceilings():
    with pytest.raises(ValueError, match="CUDA GPU"):
        measure_rates(torch.device("cpu"))


def test_the_table_is_what_was_recorded(tmp_path: Path, monkeypatch):
    provenance = {"gpus": [{"memory_gib": 79.0}]}
    record = {"gpu": "NVIDIA Test", "ceilings": vars(FIGURES), "rounds": [], "provenance": provenance}
    (tmp_path / "test.json").write_text(json.dumps(record))
    monkeypatch.setattr(gemm_rates, "GPUS", tmp_path)
    known = known_rates("NVIDIA Test")
    assert (
        known is not None
        and known.ceilings == FIGURES
        and known.source.endswith("test.json")
        and known.memory_gib == 79.0
    )
    assert known_rates("NVIDIA Test NVL") is None, "another GPU's figures are no guess at this one's"


def test_recorded_files_name_each_gpu_once_and_say_where_they_come_from():
    records = [json.loads(path.read_text()) for path in GPUS.glob("*.json")]
    assert records and sorted(record["gpu"] for record in records) == known_gpu_names()
    for record in records:
        known = known_rates(record["gpu"])
        assert known is not None and (REPOSITORY / known.source).is_file()
        assert all(value is None or value > 0 for value in vars(known.ceilings).values())
        origin = record["provenance"]
        assert len(origin["git"]["commit"]) == 40 and origin["packages"]["torch"] and origin["driver"]
        assert record["gpu"] in {gpu["name"] for gpu in origin["gpus"]} and len(record["rounds"]) >= 3
        for figure, value in record["ceilings"].items():
            of_rounds = [of_round[figure] for of_round in record["rounds"]]
            assert min(of_rounds) <= value <= max(of_rounds)


def test_shares_and_medians_leave_out_what_is_absent():
    slower = MeasuredRates(bf16_gemm_tflops=350.0, fp8_gemm_tflops=None, fp8_split_gemm_tflops=900.0, copy_tb_s=4.0)
    assert shares(slower, FIGURES) == {"bf16_gemm_tflops": 0.5, "copy_tb_s": 1.0}
