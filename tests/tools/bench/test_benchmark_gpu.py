"""Each variant of the benchmark of one GPU runs the kernels that its name speaks of, and all train the same thing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llm_fp8.config.options import Config
from llm_fp8.tools.bench.measure import measure
from llm_fp8.tools.bench.variants import parse_variant
from llm_fp8.tools.bench.workload import Workload
from scripts.benchmark import CLAIM
from tests.support.small import tiny_config

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]
NUM_LAYERS, MICRO_BATCHES = 2, 2
NUM_GEMMS = 3 * MICRO_BATCHES
"""Of one weight in a step: forward, data gradient and weight gradient."""
WEIGHTS_OF_LAYER = {"te": 4, "hf": 7}
MODULES_OF_LAYER = {"te": 3, "hf": 7}
"""Transformer Engine's MLP is one module with two weights."""

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def write_architecture(folder: Path, **changes) -> str:
    """A workload of a tiny model whose sizes every recipe can take."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_config(**{**sizes, "num_hidden_layers": NUM_LAYERS, **changes}).save_pretrained(folder)
    return f"{folder}:2x128x{MICRO_BATCHES}"


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    return write_architecture(tmp_path_factory.mktemp("architecture") / "untied")


@pytest.fixture(scope="module")
def first_loss(workload):
    """Of the plainest variant."""
    return measure(Workload.parse(workload, 2), parse_variant("hf_bf16"), 1, torch.device("cuda"))["losses"][0]


@pytest.mark.parametrize(
    "name",
    [
        "hf_bf16",
        "bf16",
        "bf16:swap",
        "bf16:recompute",
        "delayed",
        "current",
        "block",
        "delayed:swap",
        "current:swap",
        "delayed:recompute",
    ]
    + ["hf_bf16_compiled", "accelerate_te", "te_autocast"]
    + [pytest.param(name, marks=needs_torchao) for name in ("torchao_tensorwise", "torchao_rowwise")],
)
def test_kernels_of_an_arm(name, workload, first_loss, device, record_property):
    variant = parse_variant(name)
    found = measure(Workload.parse(workload, 2), variant, 1, device)
    gemms = found["gemm_kernels"]
    record_property("gemm_kernels", gemms)
    record_property("losses", found["losses"])
    assert ("fp8" in gemms) == variant.computes_in_fp8
    assert sum(kernels["share"] for kernels in gemms.values()) == pytest.approx(1)
    ours_in_te = isinstance(variant.what, Config) and variant.what.model.use_te
    decoder = "te" if ours_in_te else "hf"
    num_weights = NUM_LAYERS * WEIGHTS_OF_LAYER[decoder]
    if variant.computes_in_fp8:
        assert gemms["fp8"]["count"] >= NUM_GEMMS * num_weights
        assert sum(found["census"]["converted"].values()) == NUM_LAYERS * MODULES_OF_LAYER[decoder] + (name in CLAIM)
    if name not in CLAIM:  # which have the output head in fp8 as well
        assert gemms["bf16"]["count"] >= NUM_GEMMS * (1 if variant.computes_in_fp8 else num_weights + 1)
    assert found["losses"][0] == pytest.approx(first_loss, rel=5e-3 if variant.computes_in_fp8 else 5e-4), (
        "the same weights and tokens"
    )
    assert 0 < found["peak_memory_gib"] <= found["peak_reserved_memory_gib"]
    assert len(found["step_times_s_by_rank"]) == 1 and len(found["step_times_s_by_rank"][0]) == 1
    assert found.get("parameters_not_in_the_optimizer", []) == []


def test_accelerates_own_fp8_unties_and_freezes_a_tied_output_head(tmp_path, device):
    """What Accelerate 1.15 does, and what the row then says. Should it stop doing so, this fails and
    docs/tools.md has to change.
    """
    tied = write_architecture(tmp_path / "tied", tie_word_embeddings=True)
    found = measure(Workload.parse(tied, 2), parse_variant("accelerate_te"), 1, device)
    assert found["parameters_not_in_the_optimizer"] == ["lm_head.weight"]


def test_accelerates_own_fp8_trains_what_bare_transformer_engine_trains(workload, device):
    """The same kernels in the same number; losses differ by the order of sums in the attention's and the norm's
    gradients alone.
    """
    own, bare = (measure(Workload.parse(workload, 4), parse_variant(name), 1, device) for name in CLAIM)
    assert own["losses"][0] == pytest.approx(bare["losses"][0], rel=1e-6)
    assert own["losses"] == pytest.approx(bare["losses"], rel=1e-3)
    counts = [{kind: gemms["count"] for kind, gemms in found["gemm_kernels"].items()} for found in (own, bare)]
    assert counts[0] == counts[1]


def test_the_script_writes_rows_with_their_spread(workload, tmp_path):
    output = tmp_path / "r.json"
    variants = "hf_bf16,bf16,delayed,accelerate_te"
    options = [
        f"--workloads={workload}",
        f"--arms={variants}",
        "--rounds=2",
        "--steps=3",
        "--warmup=1",
        f"--output={output}",
    ]
    done = subprocess.run(
        [sys.executable, "scripts/benchmark.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    assert [row["arm"] for row in record["rows"]] == variants.split(",")
    assert record["provenance"]["gpus"] and record["provenance"]["command"][0] == "scripts/benchmark.py"
    for row in record["rows"]:
        assert len(row["rounds"]) == 2, row
        speeds = [row[f"tokens_per_s{end}"] for end in ("_slowest", "_p10", "", "_p90", "_fastest")]
        assert speeds == sorted(speeds)
        for measured in row["rounds"]:
            assert ("fp8" in measured["gemm_kernels"]) == parse_variant(row["arm"]).computes_in_fp8
            assert measured["memory_before_gib"] == 0, "nothing of another variant is left"
    assert "first loss: hf_bf16" in done.stdout and "their first losses are at most" in done.stdout


def test_packed_documents_have_the_loss_of_padded_ones(device, record_property):
    """In Transformer Engine's decoder, whose attention must not cross documents, beside transformers' own with its
    padding mask.
    """
    work = Workload.parse("Llama-57M:4x1024x2@embedded", 4)
    theirs = measure(work, parse_variant("hf_bf16"), 1, device)
    for name, tolerance in (("bf16", 5e-4), ("delayed", 5e-3), ("current", 5e-3)):
        ours = measure(work, parse_variant(name), 1, device)
        record_property(name, {"losses": ours["losses"], "hf_bf16": theirs["losses"]})
        assert ours["documents"] == theirs["documents"]
        assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=tolerance)
        assert ours["losses"][-1] < ours["losses"][0]
    assert theirs["step_tokens"]["num_tokens"] > 4 * theirs["step_tokens"]["num_real_tokens"]


def test_the_speed_table_of_one_small_row(workload, tmp_path):
    """The whole command, in two calls; the guard finds nothing when the file is held against itself."""
    row = {
        "name": "small",
        "workload": workload,
        "ours": ["delayed"],
        "rivals": ["hf_bf16"],
        "target_tokens_per_s_per_gpu": 1,
    }
    table, output = tmp_path / "table.json", tmp_path / "r.json"
    table.write_text(json.dumps({"rows": [row]}))
    command = [
        sys.executable,
        "benchmarks/speed_table.py",
        f"--table={table}",
        f"--output={output}",
        "--steps=3",
        "--warmup=1",
    ]
    for variants in ("delayed", "delayed,hf_bf16"):
        done = subprocess.run([*command, f"--arms={variants}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    assert [found["arm"] for found in record["rows"]] == ["delayed", "hf_bf16"] and len(record["runs"]) == 2
    assert (
        "fp8" in record["rows"][0]["rounds"][0]["gemm_kernels"]
        and record["rows"][0]["step"]["time_s_by_class"]["gemm"] > 0
    )
    (comparison,) = record["comparisons"]
    assert comparison["share_of_target"] > 1 and comparison["same_run"] is False
    for found in record["rows"]:  # two steps of a small model can scatter too much to be compared
        found["tokens_per_s_p10"] = found["tokens_per_s_p90"] = found["tokens_per_s"]
    copied = tmp_path / "copy.json"
    for path in (output, copied):
        path.write_text(json.dumps(record))
    guard = [sys.executable, "benchmarks/check_regression.py", str(output), "--recorded", str(copied)]
    held = subprocess.run(guard, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert held.returncode == 0 and "ratios compared: 1, regressions: 0" in held.stdout, held.stderr
