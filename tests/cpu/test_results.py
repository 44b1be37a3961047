"""Every recorded result has the shape that its readers count on, and says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.families import FAMILIES

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FROM_GPU = ("gpu_tests", "gpu_parity", "throughput_", "gsm8k_curves", "multi_gpu_")


def load(pattern: str) -> list[tuple[str, dict]]:
    return [(path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob(pattern))]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_origin(path):
    record = json.loads(path.read_text())
    if not path.stem.startswith(FROM_GPU):
        assert record["script"] and record["machine"]
        return
    origin = record["provenance"]
    assert len(origin["git"]["commit"]) == 40
    assert all(gpu["name"] and gpu["memory_gib"] > 0 for gpu in origin["gpus"]) and origin["gpus"]
    assert all(origin["packages"][name] for name in ("torch", "transformer-engine", "accelerate", "transformers"))
    assert origin["driver"] and origin["cuda"] and origin["command"] and origin["time_utc"]


@pytest.mark.parametrize("name", [name for name, _ in load("gpu_tests*.json")])
def test_gpu_tests_ran_and_passed(name):
    record = json.loads((RESULTS / name).read_text())
    assert record["exit_code"] == 0
    assert record["counts"].get("failed", 0) == 0 and record["counts"]["passed"] >= 90


def test_parity_by_family():
    ((_, record),) = load("gpu_parity.json")
    assert len(record["parity"]) == len(FAMILIES) * 2 * 2
    for row in record["parity"]:
        assert row["family"] in FAMILIES and row["layout"] in ("packed", "padded")
        if row["dtype"] == "float32":
            assert row["logits_difference"] <= 2e-5 and row["worst_difference"] <= 2e-5
        else:
            assert row["logits_difference"] <= 2 * row["hf_logits_difference"] + 1e-3
    for row in record["kernels"]:
        assert ("fp8" in row["gemm_kernels"]) == (row["scenario"] != "bf16")


@pytest.mark.parametrize("name", [name for name, _ in load("throughput_*.json")])
def test_throughput_rows(name):
    rows = json.loads((RESULTS / name).read_text())["rows"]
    arms = {row["arm"] for row in rows}
    assert "hf_bf16" in arms and {"bf16", "delayed"} <= arms, "a rival and ours, in one run"
    for row in rows:
        if row.get("out_of_memory"):
            continue
        assert row["tokens_per_s_slowest"] <= row["tokens_per_s"] <= row["tokens_per_s_fastest"]
        assert row["peak_memory_gib"] > 0 and row["model_tflops"] > 0
        for measured in row["rounds"]:
            kernels = measured["gemm_kernels"]
            assert ("fp8" in kernels) == (row["arm"] not in ("hf_bf16", "bf16")), "fp8 kernels in fp8 arms, and only there"


def test_curves():
    ((_, record),) = load("gsm8k_curves.json")
    arms = record["comparison"]["arms"]
    assert set(arms) == {"bf16", "delayed", "current", "block"}
    assert len(arms["bf16"]["losses"]) >= 3
    for run in record["runs"]:
        assert 50e6 <= run["num_parameters"] <= 100e6
        assert (run["fp8_linear_flop_share"] > 0.9) == (run["arm"] != "bf16")
        steps = [step for step, _, _ in run["evaluations"]]
        assert steps == sorted(set(steps)) and len(steps) >= 10


@pytest.mark.parametrize("name", [name for name, _ in load("multi_gpu_throughput_*.json")])
def test_multi_gpu_throughput_rows(name):
    record = json.loads((RESULTS / name).read_text())
    assert record["measuring"] is None, "measured to the end"
    assert len({(row["workload"], row["arm"]) for row in record["rows"]}) == len(record["rows"])
    for row in record["rows"]:
        assert row["num_gpus"] == len(record["provenance"]["gpus"]) > 1
        if "failed" in row:
            assert row["failed"] and "tokens_per_s" not in row
            continue
        assert row["tokens_per_s_slowest"] <= row["tokens_per_s"] <= row["tokens_per_s_fastest"]
        assert row["tokens_per_s_per_gpu"] * row["num_gpus"] == pytest.approx(row["tokens_per_s"])
        assert len(row["median_step_time_s_by_rank"]) == len(row["recorded_step"]["work_s_by_rank"]) == row["num_gpus"]
        assert 0 < row["peak_memory_gib"] <= row["peak_reserved_memory_gib"] and row["model_tflops"] > 0
        assert 0 <= row["exposed_communication_share"] <= row["communication_share"] < 1 and row["communication_share"] > 0
        in_fp8 = not row["arm"].startswith("hf_") and ":bf16" not in row["arm"]
        assert ("fp8" in row["gemm_kernels"]) == in_fp8, "fp8 kernels in fp8 arms, and only there"


@pytest.mark.parametrize("name", [name for name, _ in load("multi_gpu_curves*.json")])
def test_multi_gpu_curves(name):
    record = json.loads((RESULTS / name).read_text())
    arms = record["comparison"]["arms"]
    assert set(arms) == {f"{mode}:{precision}" for mode in ("fsdp_full", "ddp") for precision in ("bf16", "delayed")}
    assert len({run["global_batch_size"] for run in record["runs"]}) == 1
    for run in record["runs"]:
        assert (run["num_gpus"] > 1) == (run["arm"] in arms) and run["sharding_mode"] == (
            run["arm"].rpartition(":")[0] or "single"
        )
        assert (run["fp8_linear_flop_share"] > 0.9) == run["arm"].endswith("delayed")
        assert len(run["evaluations"]) >= 10
    for name, seeds in arms.items():
        for seed in seeds:
            # Other orders of summation let the curves of one seed drift apart, by less than another seed does.
            assert abs(seed["final_difference"]) < 0.02, name


@pytest.mark.parametrize("name", [name for name, _ in load("multi_gpu_check_*.json")])
def test_multi_gpu_checks_hold(name):
    record = json.loads((RESULTS / name).read_text())
    assert record["all_hold"] and len(record["checks"]) >= 8
