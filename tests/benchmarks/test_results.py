"""Every recorded result has the shape that its readers count on and says where it comes from; documents that quote a
file quote what it holds.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recorded_variants import recorded_variant
from benchmarks.speed_table_rows import gemm_floor_s
from benchmarks.trainers_certificate import VARIANTS
from llm_fp8.tools.bench.variants import BASELINES
from llm_fp8.tools.gemm_rates import known_rates
from tests.support.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]
FROM_CPU = ("faults", "data_pipeline", "memory_over_steps_cpu", "first_updates", "fp8_head_rounding", "fp8_head_scales")


@functools.cache
def load(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return record


def files(pattern: str) -> pytest.MarkDecorator:
    """One test for each of these files."""
    return pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob(pattern)))


def computes_in_fp8(row: dict[str, Any]) -> bool:
    return recorded_variant(row["arm"]).computes_in_fp8


# --- origin ---


@files("*.json")
def test_origin(name):
    record = load(name)
    if "script" in record:
        assert record["script"] and record["machine"]
        return
    origin = record["provenance"]
    if name.startswith("comparison_"):
        origin = origin["of_first_run"]
    assert len(origin["git"]["commit"]) == 40
    if name.startswith(FROM_CPU):
        return
    assert origin["gpus"] and all(gpu["name"] and gpu["memory_gib"] > 0 for gpu in origin["gpus"])
    assert all(origin["packages"][package] for package in ("torch", "transformer-engine", "accelerate", "transformers"))
    assert origin["driver"] and origin["cuda"] and origin["command"] and origin["time_utc"]


# --- documents ---


def leaves(value: Any) -> Iterator[float]:
    """The finite numbers of a record."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    elif isinstance(value, int | float) and math.isfinite(value):
        yield value


@functools.cache
def figures_of(name: str) -> set[str]:
    """The numbers of a file as a document writes them from a thousand on: as they are, seconds as milliseconds, and of
    rows speeds per GPU, tokens of a step and its milliseconds.
    """
    numbers = set(leaves(load(name)))
    numbers |= {1e3 * number for number in numbers}
    for row in load(name).get("rows", []):
        if "tokens_per_s" in row:
            numbers.add(row["tokens_per_s"] / row.get("num_gpus", 1))
        if "micro_batches" in row:
            num_tokens = row["batch_size"] * row["seq_length"] * row["micro_batches"]
            numbers |= {num_tokens, 1e3 * num_tokens / row.get("tokens_per_s", 1.0)}
    return {f"{number:,.0f}" for number in numbers}


def test_tables_hold_the_figures_of_the_files_that_they_name():
    """Every figure of a thousand and more in a table stands in one of the files that its line names; in results.md,
    where it names none, in one that the paragraph above the table names.
    """
    checked = 0
    for document in DOCUMENTS:
        blocks = ["", *document.read_text().split("\n\n")]
        for above, block in itertools.pairwise(blocks):
            if not block.startswith("|"):
                continue
            for line in block.splitlines():
                named = re.findall(r"`(\w+\.json)`", line)
                if not named and document.name == "results.md":
                    named = re.findall(r"`(\w+\.json)`", above)
                known = set().union(*(figures_of(name) for name in named if (RESULTS / name).exists()))
                figures = re.findall(r"\b\d{1,3}(?:,\d{3})+\b", line)
                assert not known or set(figures) <= known, f"{document.name}: {line}"
                checked += len(figures) if known else 0
    assert checked >= 100


@files("*.json")
def test_a_document_names_the_file(name):
    """A result that no document and no program speaks of is of no use."""
    readers = [*DOCUMENTS, *ROOT.glob("benchmarks/*.py"), *ROOT.glob("llm_fp8/**/*.py")]
    assert any(name.removesuffix(".json") in path.read_text() for path in readers)


# --- GPU tests ---


def properties_of(test: str) -> dict[str, dict]:
    """Id in brackets (empty for none) -> the recorded properties of a GPU test."""
    name = re.compile(rf"[^:]*::{test}(?:\[(.*)\])?")
    tests = load("gpu_tests.json")["tests"]
    return {match[1] or "": test["properties"] for key, test in tests.items() if (match := name.fullmatch(key))}


def test_gpu_tests_ran_and_passed():
    record = load("gpu_tests.json")
    for name, test in record["tests"].items():
        assert len(test["commit"]) == 40
        assert test["outcome"] == "passed" or "two GPUs each need four" in test["reason"], name
    assert record["counts"] == Counter(test["outcome"] for test in record["tests"].values())
    assert record["counts"]["passed"] >= 180
    assert max(len(run["provenance"]["gpus"]) for run in (record, *record["earlier_runs"])) >= 2


def test_parity_of_every_family_was_recorded():
    rows = properties_of("test_loss_logits_and_every_gradient")
    cases = itertools.product(FAMILIES, ("torch.float32", "torch.bfloat16"), ("packed", "padded"))
    assert set(rows) == {"-".join(case) for case in cases}


def test_every_scenario_was_certified():
    certified = properties_of("test_every_scenario_is_certified")
    recipes = ("default", "current", "block", "None")
    forms = ("kept", "recomputed", "every-second-recomputed")
    assert set(certified) == {"-".join(case) for case in itertools.product(recipes, ("te", "swap"), forms)}
    certified |= properties_of("test_every_recipe_is_certified")  # torchao's
    assert all(found["certificate"]["verdict"] == "certified" for found in certified.values())


# --- speed ---


@files("throughput_*.json")
def test_throughput_rows(name):
    rows = load(name)["rows"]
    ours = "delayed:swap" if "_torchao" in name else "bf16"
    assert {"hf_bf16", ours} <= {row["arm"] for row in rows}, "a baseline and ours, in one run"
    for row in rows:
        if row.get("out_of_memory") or "failed" in row:  # the former until rows gave their reason
            continue
        assert row["tokens_per_s_slowest"] <= row["tokens_per_s"] <= row["tokens_per_s_fastest"]
        assert row["peak_memory_gib"] > 0 and row["model_tflops"] > 0
        assert all(("fp8" in measured["gemm_kernels"]) == computes_in_fp8(row) for measured in row["rounds"])


@pytest.mark.parametrize("size", ["1b", "3b", "8b"])
def test_every_baseline_was_measured_beside_our_recipes(size):
    record = load(f"throughput_{size}.json")
    assert [row["arm"] for row in record["rows"]] == [*BASELINES, "bf16", "delayed", "current", "block"]
    (claim,) = record["claims"]
    assert claim["arms"] == ["accelerate_te", "te_autocast"] and claim["first_loss_difference"] == 0


@files("speed_table*.json")
def test_speed_table_rows(name):
    record = load(name)
    keys = [(row["row"], row["arm"]) for row in record["rows"]]
    assert len(set(keys)) == len(keys) and record["runs"][-1] == record["provenance"]
    for row in record["rows"]:
        if "failed" in row:
            continue
        assert row["tokens_per_s_per_gpu"] * row["num_gpus"] == pytest.approx(row["tokens_per_s"])
        floor_s = row["step"]["gemm_floor_s"]  # None where the rates of that GPU were recorded later
        assert row["peak_memory_gib"] > 0 and (floor_s is None or 0 < floor_s < row["step"]["step_s"])
        for measured in row["rounds"]:
            assert measured["run"] < len(record["runs"])
            assert ("fp8" in measured["gemm_kernels"]) == computes_in_fp8(row)
    for found in record["comparisons"]:
        for variant, of_variant in found["ours"].items():
            if "fp8_params" not in variant:  # whose weights are in fp8 before they could be drawn as the others are
                assert all(abs(apart) < 0.01 for apart in of_variant["first_loss_differences"].values())


def test_a_head_in_fp8_lowers_the_least_time_of_the_gemms():
    """`gemm_floor_s` reads the recorded key of the head's GEMMs."""
    known = known_rates("NVIDIA H200")
    assert known is not None
    rates = known.ceilings
    bounds = {
        row["arm"]: gemm_floor_s(row["rounds"][0], row["batch_size"] * row["seq_length"] * row["micro_batches"], rates)
        for row in load("levers_8b_softmax_fused.json")["rows"]
    }
    assert bounds["delayed:fp8head_all"] < 0.98 * bounds["delayed"]


@files("multi_gpu_throughput_*.json")
def test_multi_gpu_throughput_rows(name):
    record = load(name)
    if record["measuring"] is not None:  # cut off in a variant that its readers then don't find among the rows
        assert record["measuring"]["arm"] not in {row["arm"] for row in record["rows"]}
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
        assert 0 <= row["exposed_communication_share"] <= row["communication_share"] < 1
        assert ("fp8" in row["gemm_kernels"]) == computes_in_fp8(row)


@files("lora_study_*.json")
def test_lora_study(name):
    record = load(name)
    for row in record["rows"]:
        assert all(("fp8" in measured["gemm_kernels"]) == computes_in_fp8(row) for measured in row["rounds"])
    variants = {row["arm"] for row in record["rows"]}
    for row in record["speed_ups"]:
        speeds, adapters = row["tokens_per_s"], "" if row["adapters"] == "full" else f":{row['adapters']}"
        assert {f"bf16{adapters}", f"{row['recipe']}{adapters}"} <= variants
        assert row["speed_up"] == pytest.approx(speeds[row["recipe"]] / speeds["bf16"])


@files("trainers_certificate*.json")
def test_certificates_of_other_trainers(name):
    record = load(name)
    known = {variant.name: variant for variant in VARIANTS}
    for entry in record["entries"]:
        assert entry["how"] == known[entry["name"]].how and record["versions"][entry["package"]]
        certificate = entry["certificate"]
        assert certificate is not None or entry["error"]
        # A failed certificate ends the run; any other lets it train to its end.
        if certificate is not None and entry["exit_code"] == 0:
            assert certificate["verdict"] != "failed" and len(entry["losses"]) == record["steps"]
        if certificate is not None and certificate["verdict"] == "certified":
            assert (certificate["num_fp8_gemm_kernels"] > 0) == (entry["asked"] == "fp8")


@files("hf_trainer_*.json")
def test_trainer(name):
    rows = {row["arm"]: row for row in load(name)["rows"]}
    assert set(rows) == {"trainer_bf16", "trainer_fp8", "train_fp8"}
    for variant, row in rows.items():
        assert row["tokens_per_s"] > 0 and row["peak_memory_gib"] > 0
        for taken in row["rounds"]:
            assert taken["certificate"]["verdict"] == "certified"
            assert taken["certificate"]["precision"].startswith("bf16" if variant == "trainer_bf16" else "fp8")


@files("environment_variables*.json")
def test_environment_variables(name):
    rows = {row["setting"]: row for row in load(name)["rows"]}
    assert "none" in rows and len(rows) >= 2
    assert all(row["tokens_per_s"] > 0 for row in rows.values() if "failed" not in row)


def test_precision_md_quotes_what_scales_of_the_head_cost():
    record = load("fp8_head_scales.json")
    text = " ".join((ROOT / "docs" / "precision.md").read_text().split())
    costs = {}
    for scales, added in record["loss"]["added"].items():
        assert added["low"] < added["value"] < added["high"] and len(added["by_shift"]) == 8
        assert added["value"] == pytest.approx(sum(added["by_shift"]) / 8)
        costs[scales] = f"{added['value']:.3f}"
    assert f"{costs['tensor']} nats scaled per tensor, {costs['row']} per row, {costs['block']} per block" in text
    ways = record["gradients"]["ways"]
    assert all(
        way[side]["error"] > ways["bf16"][side]["error"] for way in ways.values() for side in way if way != ways["bf16"]
    )


# --- loss curves and comparisons ---


@pytest.mark.parametrize("name", ["gsm8k_curves.json", "multi_gpu_curves.json"])
def test_curves(name):
    record = load(name)
    assert set(record["comparison"]["arms"]) <= {run["arm"] for run in record["runs"]}
    for run in record["runs"]:
        assert (run["fp8_linear_flop_share"] > 0.9) == (run["arm"].rpartition(":")[2] != "bf16")
        steps = [step for step, _, _ in run["evaluations"]]
        assert steps == sorted(set(steps)) and len(steps) >= 10


def test_curves_of_every_recipe_lie_in_the_spread_of_bf16s_seeds():
    variants = load("gsm8k_curves.json")["comparison"]["arms"]
    assert set(variants) == {"bf16", "delayed", "current", "block", "delayed_fp8head", "delayed_fp8head_all"}
    assert len(variants["bf16"]["losses"]) >= 3 and all(
        of_variant["inside_bf16_spread"] for of_variant in variants.values()
    )


@files("comparison_*.json")
def test_comparison(name):
    record = load(name)
    variants = {variant["arm"]: variant for variant in record["arms"]}
    assert {"bf16", "delayed"} <= set(variants) and not record["failures"]
    assert all(variant["certificate"]["state"] == "certified" for variant in variants.values())
    if "_pair" in name:
        assert 1 < variants["delayed"]["speedup"]["low"] < variants["delayed"]["speedup"]["high"]
        return
    assert set(variants) == {"bf16", "delayed", "current", "block"} and all(
        len(variant["seeds"]) >= 3 for variant in variants.values()
    )
    assert all(flag["effect"] == "note" for flag in record["differences"]), "the runs differ in nothing but the arm"


# --- other programs ---


@files("multi_gpu_check_*.json")
def test_multi_gpu_checks_hold(name):
    assert load(name)["all_hold"] and len(load(name)["checks"]) >= 8


@files("startup_*.json")
def test_startup(name):
    record = load(name)
    assert record["weights_gib"] > 1 and record["num_gpus"] == len(record["provenance"]["gpus"])
    for start in record["starts"]:
        assert 0 < start["first_step_s"] < start["whole_run_s"] and start["summary"]["steps"] == 2


@files("memory_over_steps_*.json")
def test_memory_over_steps(name):
    record = load(name)
    steps = [sample["step"] for sample in record["samples"]]
    assert steps[-1] == record["steps"] >= 2000 and steps == sorted(set(steps)) and len(steps) >= 100
    for figure, found in record["growth"].items():
        # Host memory of a process with hundreds of threads moves by what their allocators keep: a few jumps of a MiB
        # or two.
        limit = 0 if figure.startswith("gpu_") else 0.002 * found["first"]
        growth = abs(found["growth_per_1000_steps"])
        if figure == "step_time_s":
            limit = 0.005 * found["first"]  # of a small model, whose steps the host's other work moves by a tenth
            growth = found["growth_per_1000_steps"]  # steps get shorter when such work ends
        assert growth <= limit, "docs/monitoring.md says that it does not grow"


@files("data_pipeline*.json")
def test_data_pipeline(name):
    record = load(name)
    for made in record["preparation"]:
        assert made["num_rows"] == record["num_rows"] >= made["num_rows_used"] > 0
        assert made["cached_tokenise_s"] < made["tokenise_s"] and made["tokenise_cpu_s"] > 0
    for loaders in itertools.chain.from_iterable(row["loaders"] for row in record["layouts"]):
        rates = [rank["tokens_per_s"] for rank in loaders["ranks"]]
        assert len(rates) == loaders["num_ranks"] and loaders["tokens_per_s"] == pytest.approx(sum(rates))


@files("verify_*.json")
def test_verify(name):
    record = load(name)
    checks = {check["name"]: check["status"] for check in record["checks"]}
    assert record["exit_code"] == 0 and set(checks.values()) <= {"passed", "warning", "info", "skipped"}
    assert set(record["not_checked"]) == {name for name, status in checks.items() if status == "skipped"}


@files("diagnose_*.json")
def test_diagnose(name):
    record = load(name)
    assert record["exit_code"] == 0 and not record["problems"] and record["attention"] == "fused (cuDNN)"
    assert (record["census"]["fp8_linear_flop_share"] > 0.5) == (record["precision"]["effective"] == "fp8")
    kinds = record["memory"]["kinds_gib"]
    assert sum(kinds.values()) == pytest.approx(record["memory"]["peak_gib"], rel=0.01)
