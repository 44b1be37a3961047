"""Every recorded result has the shape that its readers count on, and says where it comes from."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.prediction_records import bundled_size
from benchmarks.speed_table_rows import gemm_floor_s
from llm_fp8.tools.bench.variant_names import OLD_NAMES, PRECISIONS, parse_variant
from llm_fp8.tools.bench.variants import RIVALS
from llm_fp8.tools.gemm_rates import MeasuredRates
from scripts.lora_study import ADAPTERS, FULL, WORKLOADS, variants_of
from tests.support.documented_commands import readme_commands
from tests.support.families import FAMILIES

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FROM_GPU = (
    "gpu_tests",
    "throughput_",
    "speed_table",
    "gsm8k_curves",
    "multi_gpu_",
    "startup_",
    "ceilings_",
    "verify_",
    "diagnose_",
    "documented_",
    "comparison_",
    "hf_trainer_",
    "lora_study_",
    "levers_",
    "environment_variables",
)


def load(pattern: str) -> list[tuple[str, dict]]:
    return [(path.name, json.loads(path.read_text())) for path in sorted(RESULTS.glob(pattern))]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_origin(path):
    record = json.loads(path.read_text())
    if "script" in record:
        assert record["script"] and record["machine"]
        return
    origin = record["provenance"]
    if path.stem.startswith("comparison_"):
        origin = origin["of_first_run"]
    assert len(origin["git"]["commit"]) == 40
    if not path.stem.startswith(FROM_GPU):
        return
    assert all(gpu["name"] and gpu["memory_gib"] > 0 for gpu in origin["gpus"]) and origin["gpus"]
    assert all(origin["packages"][name] for name in ("torch", "transformer-engine", "accelerate", "transformers"))
    assert origin["driver"] and origin["cuda"] and origin["command"] and origin["time_utc"]


def test_gpu_tests_ran_and_passed():
    ((_, record),) = load("gpu_tests.json")
    for name, test in record["tests"].items():
        assert len(test["commit"]) == 40
        assert test["outcome"] == "passed" or "two GPUs each need four" in test["reason"], name
    folders = [name.split("/")[1] for name in record["tests"]]
    assert folders.count("gpu") >= 130 and folders.count("multi_gpu") >= 50
    assert max(len(run["provenance"]["gpus"]) for run in (record, *record["earlier_runs"])) >= 2


def test_parity_by_family():
    ((_, record),) = load("gpu_tests.json")
    name = re.compile(r".*test_loss_logits_and_every_gradient\[(\w+)-torch\.(\w+)-(packed|padded)\]")
    rows = {
        match.groups(): test["properties"]
        for test_id, test in record["tests"].items()
        if (match := name.fullmatch(test_id))
    }
    assert set(rows) == set(itertools.product(FAMILIES, ("float32", "bfloat16"), ("packed", "padded")))
    for (_, dtype, _), row in rows.items():
        if dtype == "float32":
            assert row["logits_difference"] <= 2e-5 and row["worst_difference"] <= 2e-5
        else:
            assert row["logits_difference"] <= 2 * row["hf_logits_difference"] + 1e-3


def test_kernels_by_recipe():
    ((_, record),) = load("gpu_tests.json")
    found = {
        name: test["properties"]["gemm_kernels"]
        for name, test in record["tests"].items()
        if "test_kernels_are_what" in name
    }
    assert len(found) >= 8
    for name, kernels in found.items():
        assert ("fp8" in kernels) == ("[None" not in name and "bf16" not in name)
    by_mode = {
        name: test["properties"]["gemm_kernels"]
        for name, test in record["tests"].items()
        if "test_modes.py::test_two_gpus_take_the_steps_of_one" in name and "_torchao_" not in name
    }
    assert len(by_mode) >= 40
    for name, kernels in by_mode.items():
        assert ("fp8" in kernels) == ("-bf16" not in name)


def properties_of(test: str) -> dict[str, dict]:
    """Id in brackets (empty for none) -> the recorded properties of a GPU test."""
    ((_, record),) = load("gpu_tests.json")
    name = re.compile(rf"[^:]*::{test}(?:\[(.*)\])?")
    return {
        match[1] or "": entry["properties"]
        for test_id, entry in record["tests"].items()
        if (match := name.fullmatch(test_id))
    }


def test_every_scenario_was_certified():
    certified = properties_of("test_every_scenario_is_certified")
    recipes = ("default", "current", "block", "None")
    forms = ("kept", "recomputed", "every-second-recomputed")
    assert set(certified) == {"-".join(case) for case in itertools.product(recipes, ("te", "swap"), forms)}
    for name, found in certified.items():
        assert found["certificate"]["verdict"] == "certified"
        assert (found["certificate"]["num_fp8_gemm_kernels"] > 0) == (not name.startswith("None"))
    torchao = properties_of("test_every_recipe_is_certified")
    assert {name.partition("-")[0] for name in torchao} == {"tensorwise", "rowwise", "rowwise_with_gw_hp"}
    assert all(found["certificate"]["verdict"] == "certified" for found in torchao.values())


def test_every_broken_set_up_was_caught():
    broken = properties_of("test_a_broken_run_ends_with_code_1") | properties_of(
        "test_autocast_around_plain_linear_layers_is_caught"
    )
    assert len(broken) == 4
    for found in broken.values():
        assert found["certificate"]["verdict"] == "failed" and found["certificate"]["reasons"]
    unfused = properties_of("test_unfused_attention_shows_in_the_certificate")[""]["certificate"]
    assert unfused["attention"] == "unfused" and unfused["remarks"]
    lost = properties_of("test_a_trainer_that_lost_fp8_ends_with_code_1")
    assert len(lost) == 2 and all(len(found["error"]) == 1 for found in lost.values())
    for name in ("unfused_attention", "harmful_variables", "two_cudnns", "absent_fp8_kernels"):
        findings = properties_of(f"test_{name}_(?:is|are)_caught")[""]["findings"]
        assert any(found["status"] == "failed" and found["mends"] for found in findings.values()), name


@pytest.mark.parametrize("name", [name for name, _ in load("throughput_*.json")])
def test_throughput_rows(name):
    rows = json.loads((RESULTS / name).read_text())["rows"]
    arms = {row["arm"] for row in rows}
    ours = "delayed:swap" if "_torchao" in name else "bf16"
    assert {"hf_bf16", ours} <= arms, "a rival and ours, in one run"
    for row in rows:
        if row.get("out_of_memory") or "failed" in row:  # the former until rows gave their reason
            continue
        assert row["tokens_per_s_slowest"] <= row["tokens_per_s"] <= row["tokens_per_s_fastest"]
        assert row["peak_memory_gib"] > 0 and row["model_tflops"] > 0
        for measured in row["rounds"]:
            kernels = measured["gemm_kernels"]
            assert ("fp8" in kernels) == parse_variant(row["arm"]).computes_in_fp8, (
                "fp8 kernels in fp8 arms, and only there"
            )


@pytest.mark.parametrize("name", [name for name, _ in load("speed_table*.json")])
def test_speed_table_rows(name):
    record = json.loads((RESULTS / name).read_text())
    keys = [(row["row"], row["arm"]) for row in record["rows"]]
    assert len(set(keys)) == len(keys) and record["runs"][-1] == record["provenance"]
    for row in record["rows"]:
        if "failed" in row:
            continue
        assert (
            row["tokens_per_s_per_gpu"] * row["num_gpus"] == pytest.approx(row["tokens_per_s"])
            and row["peak_memory_gib"] > 0
        )
        assert 0 < row["step"]["gemm_floor_s"] < row["step"]["step_s"]
        for measured in row["rounds"]:
            assert measured["run"] < len(record["runs"])
            assert ("fp8" in measured["gemm_kernels"]) == parse_variant(row["arm"]).computes_in_fp8
    for found in record["comparisons"]:
        kind = "real_tokens_per_s" if "@" in found["workload"] else "tokens_per_s"
        rows = {row["arm"]: row for row in record["rows"] if row["row"] == found["row"]}
        for arm, of_arm in found["ours"].items():
            for rival, times in of_arm["times"].items():
                assert times == pytest.approx(rows[arm][kind] / rows[rival][kind])
            if "fp8_params" in arm:
                continue  # whose weights are in fp8 before they could be drawn as the others are
            assert all(abs(apart) < 0.01 for apart in of_arm["first_loss_differences"].values()), (
                "the same weights and tokens"
            )


def test_curves():
    ((_, record),) = load("gsm8k_curves.json")
    arms = record["comparison"]["arms"]
    assert set(arms) == {"bf16", "delayed", "current", "block", "delayed_fp8head", "delayed_fp8head_all"}
    assert len(arms["bf16"]["losses"]) >= 3 and all(of_arm["inside_bf16_spread"] for of_arm in arms.values())
    gaps = {arm: f"{of_arm['mean_gap_to_bf16']:+.3f}" for arm, of_arm in arms.items()}
    all_ways = zip(arms["delayed_fp8head_all"]["losses"], arms["bf16"]["losses"], strict=True)
    text = " ".join((RESULTS.parents[1] / "docs" / "evidence.md").read_text().split())
    for told in (
        "by {delayed} (`delayed`), {current} (`current`) and {block} (`block`)".format(**gaps),
        f"bf16's seeds are {record['comparison']['bf16_spread']:.3f} apart",
        "it is {delayed_fp8head} (`--fp8_lm_head gradients`) and {delayed_fp8head_all} (`all`)".format(**gaps),
        "(by {:.3f}, {:.3f} and {:.3f})".format(*(ours - bf16 for ours, bf16 in all_ways)),
    ):
        assert told in text
    heads = ("bf16", "delayed", "delayed_fp8head", "delayed_fp8head_all")
    *seeds, mean = documented_table("docs/numerics.md", "| seed | bf16 | `none` |")
    losses = zip(*(arms[arm]["losses"] for arm in heads), strict=True)
    assert seeds == [[str(seed), *(f"{loss:.3f}" for loss in of_seed)] for seed, of_seed in enumerate(losses, start=1)]
    assert mean[2:] == [gaps[arm] for arm in heads[1:]]
    for run in record["runs"]:
        assert 50e6 <= run["num_parameters"] <= 100e6
        assert (run["fp8_linear_flop_share"] > 0.9) == (run["arm"] != "bf16")
        steps = [step for step, _, _ in run["evaluations"]]
        assert steps == sorted(set(steps)) and len(steps) >= 10


@pytest.mark.parametrize("name", [name for name, _ in load("multi_gpu_throughput_*.json")])
def test_multi_gpu_throughput_rows(name):
    record = json.loads((RESULTS / name).read_text())
    if record["measuring"] is not None:  # cut off in an arm that its readers then don't find among the rows
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
        assert (
            0 <= row["exposed_communication_share"] <= row["communication_share"] < 1 and row["communication_share"] > 0
        )
        in_fp8 = parse_variant(OLD_NAMES.get(row["arm"], row["arm"])).computes_in_fp8
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
    ((_, of_seeds),) = load("gsm8k_curves.json")
    for name, seeds in arms.items():
        for seed in seeds:
            # Other orders of summation let the curves of one seed drift apart, by less than another seed does: that is
            # all the bound says.
            assert abs(seed["final_difference"]) < of_seeds["comparison"]["bf16_spread"], name


def test_the_curves_on_two_gpus_are_what_the_document_says():
    ((_, record),) = load("multi_gpu_curves.json")
    runs = {run["arm"]: run for run in record["runs"]}
    for line, precision in zip(
        documented_table("docs/evidence.md", "| | one GPU | 2 GPUs"), ("bf16", "delayed"), strict=True
    ):
        one, *cells = line[1:]
        assert one == f"{runs[precision]['final_eval_loss']:.3f}"
        for cell, mode in zip(cells, ("ddp", "fsdp_full"), strict=True):
            run, (found,) = runs[f"{mode}:{precision}"], record["comparison"]["arms"][f"{mode}:{precision}"]
            assert run["num_gpus"] == 2
            assert cell == f"{run['final_eval_loss']:.3f}, {found['final_difference']:+.3f}"
    text = (RESULTS.parents[1] / "docs" / "evidence.md").read_text()
    first, one_gpus = (f"{dict(runs[arm]['train_loss'])[1]:.4f}" for arm in ("fsdp_full:delayed", "delayed"))
    assert f"is {first} under `fsdp_full` with `delayed`, and {one_gpus} on one GPU" in text
    for precision, told in (
        ("delayed", "the `delayed` ones are {:.3f} apart, at step 19 {:.3f}"),
        ("bf16", "bf16's are {:.3f} and {:.3f}"),
    ):
        losses = [dict(run["train_loss"]) for arm, run in runs.items() if arm.rpartition(":")[2] == precision]
        apart = [max(of_run[step] for of_run in losses) - min(of_run[step] for of_run in losses) for step in (18, 19)]
        assert told.format(*apart) in text


@pytest.mark.parametrize("name", [name for name, _ in load("multi_gpu_check_*.json")])
def test_multi_gpu_checks_hold(name):
    record = json.loads((RESULTS / name).read_text())
    assert record["all_hold"] and len(record["checks"]) >= 8


@pytest.mark.parametrize("name", [name for name, _ in load("startup_*.json")])
def test_startup(name):
    record = json.loads((RESULTS / name).read_text())
    assert record["weights_gib"] > 1 and record["num_gpus"] == len(record["provenance"]["gpus"])
    for start in record["starts"]:
        assert 0 < start["first_step_s"] < start["whole_run_s"] and start["summary"]["steps"] == 2
        if name == "startup_8b_x4.json":  # recorded before a run measured its phases
            continue
        assert list(start["phases_s"]) == ["launch", *start["summary"]["phases_s"]]
        assert sum(start["phases_s"].values()) == pytest.approx(start["first_step_s"])
        assert min(start["phases_s"].values()) >= 0


@pytest.mark.parametrize("name", [name for name, _ in load("memory_over_steps_*.json")])
def test_memory_over_steps(name):
    record = json.loads((RESULTS / name).read_text())
    steps = [sample["step"] for sample in record["samples"]]
    assert record["steps"] == steps[-1] == 2000 and steps == sorted(set(steps)) and len(steps) >= 100
    figures = {"rss_mib", "num_open_files", "num_threads"}
    if not name.endswith("_cpu.json"):
        figures |= {"gpu_allocated_mib", "gpu_reserved_mib"}
        assert record["provenance"]["gpus"]
    assert set(record["growth"]) == figures
    for figure in figures:
        values = [sample[figure] for sample in record["samples"] if sample["step"] > 200]
        found = record["growth"][figure]
        assert (found["first"], found["last"], found["most"]) == (values[0], values[-1], max(values))
        # Host memory of a process with hundreds of threads moves by what their allocators keep: a few jumps of a MiB or
        # two.
        limit = 0 if figure.startswith("gpu_") else 0.002 * found["first"]
        assert abs(found["growth_per_1000_steps"]) <= limit, "docs/metrics.md says that it does not grow"


@pytest.mark.parametrize("name", [name for name, _ in load("data_pipeline*.json")])
def test_data_pipeline(name):
    record = json.loads((RESULTS / name).read_text())
    assert record["provenance"]["cpu"]["model"] and record["target_tokens_per_s_per_rank"] == 150_000
    for made in record["preparation"]:
        assert made["num_rows"] == record["num_rows"] >= made["num_rows_used"] > 0
        assert made["rows_per_s"] * made["tokenise_s"] == pytest.approx(made["num_rows"])
        assert made["cached_tokenise_s"] < made["tokenise_s"] and made["tokenise_cpu_s"] > 0
    for row in record["layouts"]:
        for loaders in row["loaders"]:
            rates = [rank["tokens_per_s"] for rank in loaders["ranks"]]
            assert len(rates) == loaders["num_ranks"] == 8
            assert loaders["tokens_per_s"] == pytest.approx(sum(rates)) and loaders["tokens_per_s_slowest_rank"] == min(
                rates
            )
            assert loaders["meets_target"] == (min(rates) >= 150_000)


def test_the_million_rows_take_what_the_document_says():
    record = json.loads((RESULTS / "data_pipeline_1m.json").read_text())
    (made,), (row,) = record["preparation"], record["layouts"]
    assert made["num_rows"] == 1_000_000 and record["num_proc"] == 2 and record["load_average"] < 1
    text = " ".join((RESULTS.parents[1] / "docs" / "data.md").read_text().split())
    assert f"{made['num_tokens'] / made['num_rows_used']:.0f} tokens on average" in text
    assert (
        f"{made['tokenise_s']:.1f} s on two cores" in text and f"{made['tokenise_cpu_s']:.0f} s of their time" in text
    )
    assert f"({made['num_rows'] / made['tokenise_cpu_s']:,.0f} rows per second of a core)" in text
    assert f"the {made['cache_gib']:.1f} GiB of tokens in {made['cached_tokenise_s']:.2f} s" in text
    assert f"after {row['start_s']:.2f} s" in text


def test_first_updates_lag_only_from_rounded_weights():
    lag = json.loads((RESULTS / "first_updates.json").read_text())["bf16_over_fp32_minus_1"]
    assert max(map(abs, lag["fp32"])) < 2e-4 < 5e-3 < lag["bf16"][1] == max(lag["bf16"])


def test_every_rival_was_measured_beside_our_recipes():
    """In the files of one H200 with rows of 1,024 tokens: all arms, and the claim that Accelerate's own fp8 is
    Transformer Engine's.
    """
    for size in ("1b", "3b", "8b"):
        record = json.loads((RESULTS / f"throughput_{size}.json").read_text())
        assert [row["arm"] for row in record["rows"]] == [*RIVALS, *PRECISIONS]
        (claim,) = record["claims"]
        assert claim["arms"] == ["accelerate_te", "te_autocast"] and claim["first_loss_difference"] == 0
        assert claim["speed_ratio"] == pytest.approx(1, abs=0.1)


def test_accelerates_fp8_is_transformer_engines_in_short_steps_too():
    ((_, record),) = load("accelerate_claim_57m.json")
    (claim,) = record["claims"]
    assert claim["first_loss_difference"] == 0 and claim["speeds_overlap"]
    step_s = {row["batch_size"] * row["seq_length"] / row["tokens_per_s"] for row in record["rows"]}
    (rounded,) = {f"{value:.3f}" for value in step_s}
    told = f"in steps of {rounded} s, with 57M parameters, the ratio is {claim['speed_ratio']:.3f}"
    assert told in (RESULTS.parents[1] / "docs" / "accelerate.md").read_text()


def test_the_table_of_torchaos_recipes_is_that_of_the_file():
    arms = ("hf_bf16", "delayed:swap", "tensorwise:swap", "rowwise:swap", "rowwise_with_gw_hp:swap")
    guides, text = ((RESULTS.parents[1] / "docs" / name).read_text() for name in ("guides.md", "torchao.md"))
    for size, head in (("1b", "| without `--use_te` | tokens/s |"), ("8b", "| without `--use_te`, 8B | tokens/s |")):
        rows = {row["arm"]: row for row in load(f"throughput_{size}_torchao.json")[0][1]["rows"]}
        of_baseline = {arm: f"{rows[arm]['tokens_per_s'] / rows['hf_bf16']['tokens_per_s']:.2f}" for arm in arms}
        for (_label, *cells), arm in zip(documented_table("docs/torchao.md", head), arms, strict=True):
            memory = f"{rows[arm]['peak_memory_gib']:.1f} GiB"
            assert cells == [f"{rows[arm]['tokens_per_s']:,.0f}", of_baseline[arm], memory]
        assert all(
            ratio in guides.partition("torchao as the default backend")[2].splitlines()[0]
            for ratio in list(of_baseline.values())[2:]
        )
    quick = {row["arm"]: row["tokens_per_s"] for row in load("throughput_1b_quick.json")[0][1]["rows"]}
    assert f"takes 1B to {quick['delayed']:,.0f} in `delayed`" in text
    assert f"{quick['delayed'] / quick['hf_bf16']:.2f} times its `hf_bf16`" in text


@pytest.mark.parametrize("name", [name for name, _ in load("ceilings_*.json")])
def test_ceilings(name):
    record = json.loads((RESULTS / name).read_text())
    assert record["gpu"] in {gpu["name"] for gpu in record["provenance"]["gpus"]} and len(record["rounds"]) >= 3
    for figure, value in record["ceilings"].items():
        assert (
            min(of_round[figure] for of_round in record["rounds"])
            <= value
            <= max(of_round[figure] for of_round in record["rounds"])
        )


@pytest.mark.parametrize("name", [name for name, _ in load("verify_*.json")])
def test_verify(name):
    record = json.loads((RESULTS / name).read_text())
    checks = {check["name"]: check for check in record["checks"]}
    assert record["exit_code"] == 0
    assert set(record["not_checked"]) == {name for name, check in checks.items() if check["status"] == "skipped"}
    assert {check["status"] for check in checks.values()} <= {"passed", "warning", "info", "skipped"}
    for check in ("gpu", "recipes", "steps", "attention", "cudnn", "engines", "rates"):
        assert checks[check]["status"] == "passed"


@pytest.mark.parametrize("name", [name for name, _ in load("diagnose_*.json")])
def test_diagnose(name):
    record = json.loads((RESULTS / name).read_text())
    assert record["exit_code"] == 0 and not record["problems"] and record["attention"] == "fused (cuDNN)"
    in_fp8 = record["precision"]["effective"] == "fp8"
    assert (record["census"]["fp8_linear_flop_share"] > 0.5) == in_fp8
    kinds = record["memory"]["kinds_gib"]
    assert sum(kinds.values()) == pytest.approx(record["memory"]["peak_gib"], rel=0.01)


def test_the_first_losses_of_delayed_scaling_are_what_the_document_says():
    rows = {row["arm"]: row for row in json.loads((RESULTS / "throughput_8b.json").read_text())["rows"]}
    lines = documented_table("docs/numerics.md", "| | step 1 |")
    for line, arm in zip(lines, ("bf16", "current", "delayed", "accelerate_te"), strict=True):
        losses = rows[arm]["rounds"][0]["losses"]
        assert line[1:] == [f"{losses[step - 1]:.3f}" for step in (1, 2, 3, 7)], arm


def test_comparison():
    ((_, record),) = load("comparison_57m.json")
    arms = {arm["arm"]: arm for arm in record["arms"]}
    assert set(arms) == {"bf16", "delayed", "current", "block"} and not record["failures"]
    for arm in arms.values():
        assert len(arm["seeds"]) >= 3 and arm["certificate"]["state"] == "certified"
        assert all(0.05 < share < 0.95 for share in arm["exact_match"].values()), "neither none nor all of the problems"
    assert all(flag["effect"] == "note" for flag in record["differences"]), "the runs differ in nothing but the arm"


def pair(name: str, num_steps: int) -> tuple[dict, dict, str]:
    """A recorded pair, certified and of so many steps: fp8, bf16, and the document of the pairs."""
    ((_, record),) = load(name)
    arms = {arm["arm"]: arm for arm in record["arms"]}
    assert set(arms) == {"bf16", "delayed"} and not record["failures"]
    assert all(arm["certificate"]["state"] == "certified" for arm in arms.values())
    assert 1 < arms["delayed"]["speedup"]["low"] < arms["delayed"]["speedup"]["high"]
    assert record["provenance"]["num_steps"] == num_steps
    return arms["delayed"], arms["bf16"], (RESULTS.parents[1] / "docs" / "containers.md").read_text()


def test_the_pair_of_1b():
    fp8, bf16, containers = pair("comparison_1b_pair.json", 200)
    more, less = (fp8[key] / bf16[key] - 1 for key in ("peak_memory_gib", "energy_j_per_million_tokens"))
    faster, low, high = (fp8["speedup"][key] for key in ("value", "low", "high"))
    said = (
        f"{faster:.2f} times as fast in fp8 ({low:.2f} to {high:.2f}), {more:.0%} more memory, {-less:.0%} less "
        "energy, both certified"
    )
    assert f"{said}, held-out loss {fp8['eval_loss']['42'] - bf16['eval_loss']['42']:.4f} higher" in containers


def test_the_documented_command_of_two_gpus():
    """With one row of 512 tokens fp8 is slower, and every document that speaks of it says so."""
    ratios, busy = [], []
    spec = bundled_size("Llama-3.2-3B").spec
    sums_gib = 4 * spec.num_layers * spec.hidden_size * (spec.q_size + 2 * spec.kv_size) / 2**30
    for name in ("documented_3b_x2.json", "documented_3b_x2_again.json", "levers_3b_x2_sums_let_go.json"):
        ((_, record),) = load(name)
        rows = {row["arm"]: row for row in record["rows"]}
        fp8, bf16 = (rows[f"fsdp_full:{recipe}:recompute"] for recipe in ("delayed", "bf16"))
        ratios.append(fp8["tokens_per_s"] / bf16["tokens_per_s"])
        # What is behind docs/performance_log.md's entry on whole sums: those of q, k and v were FSDP2's own in fp8, and
        # all are now.
        kept_gib = sums_gib if name.startswith("documented") else 0.0
        assert bf16["peak_memory_gib"] - fp8["peak_memory_gib"] == pytest.approx(
            kept_gib, abs=0.01 if kept_gib else 0.1
        )
        for row in (fp8, bf16):
            classes = row["recorded_step"]["time_s_by_class"]
            busy.append((sum(classes.values()) - classes["communication"]) / statistics.median(row["step_times_s"]))
    said = "{:.2f}, {:.2f} and {:.2f} ".format(*ratios)
    for name in ("README.md", "docs/when_fp8_pays.md", "docs/guides.md"):
        text = (RESULTS.parents[1] / name).read_text()
        assert text.count(said) == text.count("`documented_3b_x2_again.json`") > 0, name
    shares = f"run in {100 * min(busy):.0f} to {max(busy):.0%} of a step"
    assert shares in (RESULTS.parents[1] / "docs" / "when_fp8_pays.md").read_text()


def test_the_pair_of_8b():
    fp8, bf16, containers = pair("comparison_8b_pair.json", 100)
    guides, pays = ((RESULTS.parents[1] / "docs" / name).read_text() for name in ("guides.md", "when_fp8_pays.md"))
    more, less = (fp8[key] / bf16[key] - 1 for key in ("peak_memory_gib", "energy_j_per_million_tokens"))
    faster, low, high = (fp8["speedup"][key] for key in ("value", "low", "high"))
    assert (
        f"{faster:.2f} times as fast with 2 rows a micro-batch, {more:.0%} more memory, {-less:.0%} less energy"
        in guides
    )
    assert f"at {faster:.2f} times the speed ({low:.2f} to {high:.2f}) and {-less:.0%} less energy" in containers
    peaks = "{:.1f} GiB in bf16 and {:.1f} GiB in fp8".format(*(arm["peak_memory_gib"] for arm in (bf16, fp8)))
    assert f"{peaks} ({more:+.0%})" in containers and f"ran at {faster:.2f} times bf16's speed" in pays
    assert f"{bf16['eval_loss']['1'] - fp8['eval_loss']['1']:.4f} lower" in containers


@pytest.mark.parametrize("name", [name for name, _ in load("environment_variables*.json")])
def test_environment_variables(name):
    ((_, record),) = load(name)
    rows = {row["setting"]: row for row in record["rows"]}
    assert "none" in rows and len(rows) >= (2 if "affinity" in name else 5)
    assert all(row["tokens_per_s"] > 0 for row in rows.values() if "failed" not in row)


HEAD = "delayed:fp8head_all"
LORA_STUDIES = {
    "delayed": {"Llama-3.2-1B": "lora_study_1b.json", "Llama-3.1-8B": "lora_study_8b.json"},
    HEAD: {"Llama-3.2-1B": "lora_study_1b_fp8head.json", "Llama-3.1-8B": "lora_study_8b.json"},
}
"""Recipe, and model of a workload of the study -> the record whose figures the document gives in that recipe's
table.
"""
TABLE_OF = {
    "delayed": "| model, adapters | bf16, tokens/s | `delayed`, tokens/s | speed-up (range) |",
    HEAD: "| model, adapters | bf16, tokens/s | `delayed`, tokens/s | head in fp8, tokens/s |",
}
LORA_TEXT = " ".join((RESULTS.parents[1] / "docs" / "lora.md").read_text().split())


def documented_study(recipe: str) -> dict[tuple[str, str], list[str]]:
    """Model and kind of adapters, as scripts/lora_study.py calls them -> the cells behind them in a recipe's table."""
    cells_of = {}
    models = {name.rpartition("-")[2]: name for name in LORA_STUDIES[recipe]}
    for label, *cells in documented_table("docs/lora.md", TABLE_OF[recipe]):
        size, kind, *layers = label.split(", ")
        on = {"all linear layers": "", "all": "", "q and v": "qv"}
        name = FULL if kind.startswith("none") else kind.replace("rank ", "lora") + on[layers[0]]
        assert cells_of.setdefault((models[size], name), cells) is cells, label
    return cells_of


def measured_pairs(name: str, recipe: str) -> dict[str, dict]:
    """Kind of adapters -> what a record of the study says of a recipe over bf16."""
    return {row["adapters"]: row for row in load(name)[0][1]["speed_ups"] if row["recipe"] == recipe}


def measured_study(recipe: str, *, of_table: str) -> list[dict[str, dict]]:
    """Of 1B and of 8B: kind of adapters -> what the record behind the table of `of_table` says of `recipe` over
    bf16.
    """
    return [measured_pairs(name, recipe) for name in LORA_STUDIES[of_table].values()]


def steps_ms(name: str) -> dict[str, float]:
    """Variant -> milliseconds of the median step in a record of one workload."""
    return {
        row["arm"]: 1e3 * row["batch_size"] * row["seq_length"] * row["micro_batches"] / row["tokens_per_s"]
        for row in load(name)[0][1]["rows"]
    }


def bf16_gemms_ms(name: str) -> dict[str, float]:
    """Variant -> milliseconds of matrix products in bf16 in its last recorded step."""
    last = {row["arm"]: row["rounds"][-1] for row in load(name)[0][1]["rows"]}
    return {arm: 1e3 * answer["recorded_step"]["gemm_time_s"].get("bf16", 0.0) for arm, answer in last.items()}


def with_range(row: dict) -> str:
    return "{speed_up:.2f} ({speed_up_low:.2f} to {speed_up_high:.2f})".format(**row)


def test_the_time_of_adapters_in_the_document():
    """bf16 products of an fp8 step are the output head's, two of three where it is frozen, and the adapters'; with
    the head in fp8 theirs alone.
    """
    time_ms = bf16_gemms_ms("lora_study_8b.json")
    arms = [f"delayed:lora{rank}" for rank in (8, 16, 32)]
    head_ms = time_ms["delayed"] * 2 / 3
    on_all = [time_ms[arm] - head_ms for arm in arms]
    of_step = [steps_ms("lora_study_8b.json")[arm] for arm in arms]
    told = (
        f"take {min(on_all):.0f} to {max(on_all):.0f} ms of {min(of_step):,.0f} to {max(of_step):,.0f}, those of "
        "q and v"
    )
    assert f"{told} {time_ms['delayed:lora16qv'] - head_ms:.0f} ms" in LORA_TEXT
    assert time_ms[HEAD] == 0
    alone = (time_ms[f"{HEAD}:lora16"], time_ms[f"{HEAD}:lora16qv"])
    assert (
        "With the head in fp8, where no other product is in bf16, they take {:.0f} and {:.0f} ms (rank 16)".format(
            *alone
        )
        in LORA_TEXT
    )


def test_the_speed_ups_with_adapters_in_the_document():
    """Every pair that the study is of has its row there: with the record's figures, or with words that say that it
    is not measured.
    """
    told = documented_study("delayed")
    kinds = (FULL, *ADAPTERS.split(","))
    models = [work.partition(":")[0] for work in WORKLOADS.split(",")]
    found = dict(zip(LORA_STUDIES["delayed"], measured_study("delayed", of_table="delayed"), strict=True))
    assert told.keys() == {(model, kind) for model in models for kind in (*kinds, *found[model])}
    for model, measured in found.items():
        for kind in {*kinds, *measured}:
            expected = ["not measured", "not measured", "-"]
            if row := measured.get(kind):
                expected = [
                    *(f"{row['tokens_per_s'][precision]:,.0f}" for precision in ("bf16", "delayed")),
                    with_range(row),
                ]
                assert told[model, kind][3].partition(",")[0] == (row["guides"] or "-")
            assert told[model, kind][:3] == expected, (model, kind)


def test_the_speed_ups_below_a_head_in_fp8_in_the_document():
    """Every pair with the head in fp8 has its row, beside the same without it from the same file."""
    expected = {}
    pairs = (measured_study(recipe, of_table=HEAD) for recipe in ("delayed", HEAD))
    for model, without, with_head in zip(LORA_STUDIES[HEAD], *pairs, strict=True):
        assert {FULL, "lora16", "lora16qv"} == set(with_head)
        for kind, row in with_head.items():
            speeds = without[kind]["tokens_per_s"] | row["tokens_per_s"]
            told = [f"{speeds[precision]:,.0f}" for precision in ("bf16", "delayed", HEAD)]
            expected[model, kind] = [*told, with_range(without[kind]), with_range(row)]
    assert documented_study(HEAD) == expected


def test_one_step_of_bf16_was_slow_where_the_document_says_so():
    """Of 8B, in each arm with adapters on all linear layers and in no other."""
    for row in load("lora_study_8b.json")[0][1]["rows"]:
        (answer,) = row["rounds"]
        middle = statistics.median(answer["step_times_s"])
        slow = sum(time_s > 1.05 * middle for time_s in answer["step_times_s"])
        assert slow == (re.fullmatch(r"bf16:lora\d+", row["arm"]) is not None), row["arm"]


def test_what_follows_from_the_speed_ups_with_adapters():
    """The figures of the conclusions below the tables."""
    small, large = measured_study("delayed", of_table="delayed")
    lows = [min(row["speed_up_low"] for row in rows.values()) for rows in (small, large)]
    assert "low end of the range by {:.2f} and more for 1B and {:.2f} for 8B".format(*lows) in LORA_TEXT
    full, all_layers, q_and_v = (
        [rows[kind]["speed_up"] for rows in (small, large)] for kind in (FULL, "lora16", "lora16qv")
    )
    of_full = f"({q_and_v[0]:.2f} of {full[0]:.2f} for 1B, {q_and_v[1]:.2f} of {full[1]:.2f} for 8B)"
    assert f"nearly what it gives full fine-tuning {of_full}" in LORA_TEXT
    kept = [(pair - 1) / (whole - 1) for pair, whole in zip(all_layers, full, strict=True)]
    assert "of rank 16 on all layers {:.0%} (1B) and {:.0%} (8B) of the gain".format(*kept) in LORA_TEXT
    chosen = [
        rows["lora16qv"]["tokens_per_s"]["delayed"] / rows["lora16"]["tokens_per_s"]["delayed"]
        for rows in (small, large)
    ]
    assert "q and v cost least: {:.2f} (1B) and {:.2f} (8B) times".format(*chosen) in LORA_TEXT
    peaks = [
        large[kind]["peak_memory_gib"][precision] for kind in (FULL, "lora16") for precision in ("bf16", "delayed")
    ]
    told = (
        "of the {:.0f} GiB (bf16) and {:.0f} GiB (`delayed`) of full fine-tuning 8B, rank 16 leaves {:.0f} and "
        "{:.0f} GiB"
    )
    assert told.format(*peaks) in LORA_TEXT
    over_full = [large["lora16"]["over_full"][precision] for precision in ("bf16", "delayed")]
    told = "LoRA itself is {:.2f} times as fast as full fine-tuning in bf16 (8B, rank 16, all) and {:.2f} in fp8"
    assert told.format(*over_full) in LORA_TEXT
    pays = " ".join((RESULTS.parents[1] / "docs" / "when_fp8_pays.md").read_text().split())
    for kinds, told in (
        (r"lora\d+qv", "{} for 1B (`lora_study_1b.json`) and {} for 8B (`lora_study_8b.json`)"),
        (r"lora\d+", "on all linear layers {} and {}."),
    ):
        spans = []
        for rows in (small, large):
            gains = sorted(f"{row['speed_up']:.2f}" for kind, row in rows.items() if re.fullmatch(kinds, kind))
            spans.append(" to ".join(dict.fromkeys((gains[0], gains[-1]))))
        assert told.format(*spans) in pays


def test_what_follows_from_the_head_in_fp8_below_adapters():
    without, with_head = (measured_study(recipe, of_table=HEAD) for recipe in ("delayed", HEAD))
    kinds = ("lora16", "lora16qv")
    gains = [rows[size][kind]["speed_up"] for size in (0, 1) for kind in kinds for rows in (without, with_head)]
    told = (
        "{:.2f} -> {:.2f} on all linear layers and {:.2f} -> {:.2f} on q and v for 1B, {:.2f} -> {:.2f} and "
        "{:.2f} -> {:.2f} for 8B"
    )
    assert told.format(*gains) in LORA_TEXT
    steps = [
        rows[kind]["tokens_per_s"][HEAD] / before[kind]["tokens_per_s"]["delayed"]
        for before, rows in zip(without, with_head, strict=True)
        for kind in kinds
    ]
    assert "as steps {:.2f}, {:.2f}, {:.2f} and {:.2f} times as fast".format(*steps) in LORA_TEXT
    against = [
        rows[size][kind]["speed_up"] for size in (0, 1) for rows, kind in ((with_head, "lora16qv"), (without, FULL))
    ]
    assert all(ours > full for ours, full in (against[:2], against[2:]))
    assert "({:.2f} against {:.2f} for 1B, {:.2f} against {:.2f} for 8B)".format(*against) in LORA_TEXT
    assert (
        "gains by itself with it, {:.2f} and {:.2f}".format(*(rows[FULL]["speed_up"] for rows in with_head))
        in LORA_TEXT
    )
    for kind in kinds:
        more = [
            rows[kind]["peak_memory_gib"][HEAD] - before[kind]["peak_memory_gib"]["delayed"]
            for before, rows in zip(without, with_head, strict=True)
        ]
        assert "{:.1f} GiB for 1B and {:.1f} for 8B".format(*more) in LORA_TEXT
    tests = load("gpu_tests.json")[0][1]["tests"]
    differences = [
        test["properties"]["largest_difference"]
        for name, test in tests.items()
        if "test_a_frozen_output_head_in_fp8" in name
    ]
    assert f"up to {max(differences):.0%} from those below a bf16 head" in LORA_TEXT


def test_how_near_the_two_runs_of_1b_with_adapters_come():
    again, study = (measured_study("delayed", of_table=table)[0] for table in (HEAD, "delayed"))
    slower = [
        1 - row["tokens_per_s"][key] / study[kind]["tokens_per_s"][key]
        for kind, row in again.items()
        for key in ("bf16", "delayed")
    ]
    assert f"gave {100 * min(slower):.0f} to {100 * max(slower):.0f}% less tokens/s" in LORA_TEXT
    assert max(abs(row["speed_up"] - study[kind]["speed_up"]) for kind, row in again.items()) < 0.01


def test_the_memory_by_kind_in_the_document():
    kinds = [json.loads((RESULTS / f"diagnose_8b_{name}.json").read_text())["memory"] for name in ("bf16", "fp8")]
    cells = {line[0]: line[1:3] for line in documented_table("docs/containers.md", "| kind | bf16 | fp8 |")}
    for names in (
        ("weights", "gradients", "optimizer_state"),
        ("fp8_weights",),
        ("activations",),
        ("loss",),
        ("other",),
    ):
        expected = [", ".join(f"{memory['kinds_gib'][name]:.1f}" for name in names) for memory in kinds]
        assert cells[", ".join(f"`{name}`" for name in names)] == expected
    assert cells["all"] == [f"{memory['peak_gib']:.1f}" for memory in kinds]


def test_what_the_guides_claim_of_speed_is_answered_from_the_files():
    text = (RESULTS.parents[1] / "docs" / "guides.md").read_text()

    def speeds(name: str, key: str = "arm") -> dict[str, float]:
        return {row[key]: row["tokens_per_s"] for row in load(name)[0][1]["rows"] if "failed" not in row}

    connections = []
    for name, setting in (("", "NVTE_FUSED_ATTN=0"), ("debug_", "CUDA_LAUNCH_BLOCKING=1")):
        taken = speeds(f"environment_variables_{name}h200.json", "setting")
        assert f"{taken[setting] / taken['none']:.2f} with `{setting}`" in text
        connections.append(taken["CUDA_DEVICE_MAX_CONNECTIONS=1"] / taken["none"])
        assert max(taken.values()) / taken["none"] < 1.035, "1.03 is the most"
    on_two = {row["setting"]: row for row in load("environment_variables_x2_h200.json")[0][1]["rows"]}
    for setting in ("CUDA_DEVICE_MAX_CONNECTIONS=1", "NVTE_FP8_ALLREDUCE=1"):
        assert on_two[setting]["speeds_overlap"] and f"{on_two[setting]['speed_ratio']:.2f}, within the spread" in text
    assert "{:.2f} beside busy GPUs, {:.2f} in a run of its own".format(*connections) in text
    multi_gpu = (RESULTS.parents[1] / "docs" / "multi_gpu.md").read_text()
    assert "On one GPU {:.2f} and {:.2f} times the speed".format(*connections) in multi_gpu
    told = {
        "CUDA_DEVICE_MAX_CONNECTIONS=1": "{:.2f} on two GPUs",
        "NCCL_P2P_DISABLE=1": "{:.2f} times the speed of 1B",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL": "{:.2f} times the speed (same file)",
        "ACCELERATE_DEBUG_MODE=true": "{:.2f} times the speed, within the spread",
    }
    for setting, sentence in told.items():
        (line,) = (
            line for line in multi_gpu.splitlines() if line.startswith("|") and f"`{setting.partition('=')[0]}" in line
        )
        assert sentence.format(on_two[setting]["speed_ratio"]) in line

    arms = speeds("throughput_8b.json")
    tensorwise, rowwise, compiled = (
        arms[name] for name in ("torchao_tensorwise", "torchao_rowwise", "hf_bf16_compiled")
    )
    assert (
        f"{tensorwise / arms['hf_bf16']:.2f} (`torchao_tensorwise`) and {rowwise / arms['hf_bf16']:.2f} times" in text
    )
    assert f"{tensorwise / compiled:.2f} and {rowwise / compiled:.2f} times as fast as the same compiled" in text

    told = (
        "within the Trainer {:.2f} for 8B (`hf_trainer_8b.json`), {:.2f} for 3B (`hf_trainer_3b.json`) and {:.2f} for "
        "the guide's Qwen2.5-7B (`hf_trainer_7b.json`), with {:.0f}, {:.0f} and {:.0f}% more memory"
    )
    pairs = []
    for size in ("8b", "3b", "7b"):
        rows = {row["arm"]: row for row in load(f"hf_trainer_{size}.json")[0][1]["rows"]}
        pairs.append(
            [rows["trainer_fp8"][key] / rows["trainer_bf16"][key] for key in ("tokens_per_s", "peak_memory_gib")]
        )
    (speeds_of, memory_of) = zip(*pairs, strict=True)
    assert told.format(*speeds_of, *(100 * (ratio - 1) for ratio in memory_of)) in text

    peaks = load("environment_variables_h200.json")[0][1]["peaks"]
    products = load("ceilings_h200.json")[0][1]["ceilings"]
    assert f"is {peaks['fp8'] / peaks['bf16']:.1f} times that of bf16" in text
    assert f"reach {products['fp8_gemm_tflops'] / products['bf16_gemm_tflops']:.2f} times" in text

    small, large = measured_study("delayed", of_table="delayed")
    guides = [small["lora16"], large["lora32"], large["lora8"], small["lora16qv"], large["lora16qv"]]
    head = [rows["lora16qv"] for rows in measured_study(HEAD, of_table=HEAD)]
    told = (
        "{:.2f}, {:.2f} and {:.2f}; adapters on q and v alone, rank 16, {:.2f} (1B) and {:.2f} (8B), with "
        "`--fp8_lm_head all` {:.2f} and {:.2f}"
    )
    assert told.format(*(row["speed_up"] for row in guides + head)) in text

    in_bf16 = bf16_gemms_ms("lora_study_8b.json")
    adapters_ms = in_bf16["delayed:lora32"] - in_bf16["delayed"] * 2 / 3
    step_ms = steps_ms("lora_study_8b.json")["delayed:lora32"]
    assert f"take {adapters_ms / step_ms:.0%} of" in text and f"{adapters_ms:.0f} of {step_ms:,.0f} ms" in text
    assert f"that step is {large['lora32']['speed_up']:.2f} times as fast as bf16's" in text

    rows = {row["arm"]: row for row in load("multi_gpu_throughput_14b_x4.json")[0][1]["rows"]}
    of_deepspeed, of_fsdp = (
        (f"{row['tokens_per_s_per_gpu']:,.0f}", f"{row['peak_memory_gib']:.0f}")
        for row in (rows["deepspeed_3:delayed"], rows["fsdp_full:delayed:sync"])
    )
    assert (
        "{} tokens/s per GPU and {} GiB".format(*of_deepspeed) in text and "takes {} and {}:".format(*of_fsdp) in text
    )
    arms = speeds("multi_gpu_throughput_8b_engines_x2.json")
    ours, bf16, theirs = (arms[f"deepspeed_1:{name}"] for name in ("delayed", "bf16", "hf_bf16"))
    assert (
        f"{ours / bf16:.2f} times as fast as the same modules in bf16 and {ours / theirs:.2f} times as Hugging Face"
        in text
    )


def test_what_entries_of_deepspeeds_file_cost_in_the_guides():
    text = (RESULTS.parents[1] / "docs" / "guides.md").read_text()
    name = "multi_gpu_throughput_1b_deepspeed{}_x2.json"
    (without, sums, traffic) = (
        {row["arm"]: row for row in load(name.format(kind))[0][1]["rows"]}
        for kind in ("", "_fp32_sums", "_fp32_traffic")
    )
    rival, ours = "deepspeed_1:hf_bf16", "deepspeed_2:delayed"
    assert traffic[rival]["deepspeed_config"] == without[rival]["deepspeed_config"] | {
        "communication_data_type": "fp32"
    }
    assert sums[ours]["deepspeed_config"] == without[ours]["deepspeed_config"] | {
        "data_types": {"grad_accum_dtype": "fp32"}
    }
    longer = without[rival]["tokens_per_s"] / traffic[rival]["tokens_per_s"] - 1
    assert f'as "2x", {longer:.1%} of a step' in text
    more = sums[ours]["peak_memory_gib"] - without[ours]["peak_memory_gib"]
    pair = "{:,.0f} against {:,.0f} tokens/s per GPU".format(
        *(rows[ours]["tokens_per_s_per_gpu"] for rows in (sums, without))
    )
    assert f"took {more:.1f} GiB more and was no slower, {pair}" in text


def test_the_engines_beside_each_other_in_the_documents():
    rows = {row["arm"]: row for row in load("multi_gpu_throughput_8b_engines_x2.json")[0][1]["rows"]}
    table = documented_table("docs/multi_gpu.md", "| | bf16 | `delayed` | torchao's `tensorwise`, without `--use_te` |")
    arms = [
        ["fsdp_full:hf_bf16", "", ""],
        ["deepspeed_1:hf_bf16", "", ""],
        ["fsdp_full:bf16", "fsdp_full:delayed", "fsdp_full:tensorwise:swap"],
        ["", "", "fsdp_full:tensorwise:swap:fp8_all_gather"],
        ["deepspeed_1:bf16", "deepspeed_1:delayed", ""],
        ["", "deepspeed_3:delayed", ""],
    ]
    assert [cells for _label, *cells in table] == [[speed_and_memory(rows.get(arm)) for arm in line] for line in arms]
    assert {arm for line in arms for arm in line if arm} == set(rows)
    speeds = documented_table("docs/deepspeed.md", "| | bf16 | `delayed` |")
    assert [cells for _label, *cells in speeds] == [table[number][1:3] for number in (1, 4, 5, 2)]
    step = rows["fsdp_full:delayed"]["recorded_step"]
    alone = f"{step['exposed_communication_s'] / step['span_s']:.0%}"
    power = f"{rows['fsdp_full:delayed']['gpu_state']['power_w']:.0f} W"
    text, pays, torchao = (
        (RESULTS.parents[1] / "docs" / name).read_text() for name in ("multi_gpu.md", "when_fp8_pays.md", "torchao.md")
    )
    assert (
        f"communication alone took {alone}, and the GPU drew {power}" in text
        and f"communication alone took {alone}" in pays
    )
    faster = {
        row["arm"]: row["tokens_per_s_per_gpu"] for row in load("multi_gpu_throughput_8b_b4_x2.json")[0][1]["rows"]
    }
    fp8, bf16 = faster["fsdp_full:delayed"], faster["fsdp_full:bf16"]
    assert f"`fsdp_full` took {fp8:,.0f} in `delayed` and {bf16:,.0f} in bf16" in text
    slower = rows["fsdp_full:delayed"]["tokens_per_s"] / rows["fsdp_full:bf16"]["tokens_per_s"]
    assert f"was {fp8 / bf16:.2f} times as fast as bf16 (" in pays and f"on another {slower:.2f}, where" in pays
    pair = [rows[f"fsdp_full:tensorwise:swap{option}"] for option in ("", ":fp8_all_gather")]
    assert (
        "{:,.0f} tokens/s per GPU without it and {:,.0f} with it".format(*(row["tokens_per_s_per_gpu"] for row in pair))
        in torchao
    )
    fell = (row["recorded_step"]["communication_s"] for row in pair)
    assert "Communication fell from {:.2f} to {:.2f} s".format(*fell) in torchao


def test_the_trainers_table_is_that_of_the_files():
    lines = {
        line[0]: line[1:] for line in documented_table("docs/accelerate.md", "| tokens/s, peak GiB | Trainer, bf16 |")
    }
    for label, size in (("Llama-3.1-8B, 4 rows", "8b"), ("Qwen2.5-7B, 4 rows", "7b"), ("Llama-3.2-3B, 8 rows", "3b")):
        rows = {row["arm"]: row for row in load(f"hf_trainer_{size}.json")[0][1]["rows"]}
        cells = [
            f"{rows[arm]['tokens_per_s']:,.0f}, {rows[arm]['peak_memory_gib']:.1f}"
            for arm in ("trainer_bf16", "trainer_fp8", "train_fp8")
        ]
        assert lines[f"{label} of 1,024"] == cells


@pytest.mark.parametrize("name", [name for name, _ in load("lora_study_*.json")])
def test_lora_study(name):
    ((_, record),) = load(name)
    arms = {row["arm"]: row for row in record["rows"]}
    (model,) = {row["model"] for row in record["rows"]}
    recipes = {row["recipe"]: measured_pairs(name, row["recipe"]) for row in record["speed_ups"]}
    assert sum(map(len, recipes.values())) == len(record["speed_ups"])
    expected = set()
    for recipe, pairs in recipes.items():
        assert {FULL, "lora16", "lora16qv"} <= set(pairs)
        if name == LORA_STUDIES[recipe][model]:
            told = documented_study(recipe)
            assert set(pairs) == {kind for of, kind in told if of == model and told[of, kind][0] != "not measured"}
        expected |= {arm.name for arm in variants_of(",".join(kind for kind in pairs if kind != FULL), recipe)}
    assert set(arms) == expected
    for arm, row in arms.items():
        (recorded, *_) = row["rounds"]
        assert ("fp8" in recorded["gemm_kernels"]) == arm.startswith("delayed")
    for row in record["speed_ups"]:
        speeds = row["tokens_per_s"]
        assert row["speed_up"] == pytest.approx(speeds[row["recipe"]] / speeds["bf16"]) and row["speed_up"] > 1


@pytest.mark.parametrize("name", [name for name, _ in load("hf_trainer_*.json")])
def test_trainer(name):
    ((_, record),) = load(name)
    rows = {row["arm"]: row for row in record["rows"]}
    assert set(rows) == {"trainer_bf16", "trainer_fp8", "train_fp8"}
    for arm, row in rows.items():
        assert row["tokens_per_s"] > 0 and row["peak_memory_gib"] > 0
        for taken in row["rounds"]:
            assert taken["certificate"]["verdict"] == "certified"
            assert taken["certificate"]["precision"].startswith("bf16" if arm == "trainer_bf16" else "fp8")


def documented_table(document: str, first_line: str) -> list[list[str]]:
    """Cells of the lines below the head of the table in a document that begins with `first_line`."""
    _, found, rest = (RESULTS.parents[1] / document).read_text().partition(first_line)
    assert found, first_line
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def speed_and_memory(row: dict | None) -> str:
    """A cell of a document's table of speeds; empty for a row that is not there."""
    if row is None:
        return ""
    return (
        row["failed"] if "failed" in row else (f"{row['tokens_per_s_per_gpu']:,.0f}, {row['peak_memory_gib']:.0f} GiB")
    )


@pytest.mark.parametrize(
    ("first_line", "columns", "arms"),
    [
        (
            "| | 2 GPUs, 8 rows of 1,024 |",
            ("8b_x2", "8b_x4", "8b_s8192_x2", "8b_s8192_x4"),
            (
                "fsdp_full:hf_bf16",
                "fsdp_full:bf16",
                "fsdp_full:current",
                "fsdp_full:delayed",
                "fsdp_full:delayed:fp8_params",
                "fsdp_grad:bf16",
                "fsdp_grad:current",
                "fsdp_grad:delayed",
                "fsdp_grad:delayed:fp8_params",
                "fsdp_grad:delayed:fp8_params:fp8head_all:flash3",
                "fsdp_grad:delayed:fp8_params:fp8head_all:flash4",
            ),
        ),
        (
            "| | 3B, 2 GPUs |",
            ("3b_x2", "1b_x2", "Llama-3.2-3B", "Llama-3.2-1B"),
            ("ddp:hf_bf16", "ddp:bf16", "ddp:current", "ddp:delayed"),
        ),
    ],
)
def test_the_tables_of_several_gpus_are_those_of_the_files(first_line, columns, arms):
    """A column is a row of the speed table, or a model of the file from before."""
    rows = json.loads((RESULTS / "speed_table_h200.json").read_text())["rows"]
    found = {(row["row"], row["arm"]): row for row in rows}
    before = json.loads((RESULTS / "multi_gpu_throughput_ddp_x4.json").read_text())["rows"]
    found |= {(row["model"], OLD_NAMES.get(row["arm"], row["arm"])): row for row in before}
    for arm, line in zip(arms, documented_table("docs/multi_gpu.md", first_line), strict=True):
        assert line[1:] == [speed_and_memory(found.get((column, arm))) for column in columns], arm


def test_what_is_said_of_several_gpus_is_that_of_the_files():
    text = " ".join((RESULTS.parents[1] / "docs" / "multi_gpu.md").read_text().split())
    record = json.loads((RESULTS / "speed_table_h200.json").read_text())
    scaling = {(of["row"], arm): share for of in record["comparisons"] for arm, share in of.get("scaling", {}).items()}
    best = "fsdp_grad:delayed:fp8_params:fp8head_all:flash4"
    kept = (
        ("8b_x4", "fsdp_full:delayed"),
        ("8b_x4", "fsdp_grad:delayed"),
        ("8b_s8192_x4", "fsdp_full:delayed"),
        ("8b_s8192_x4", best),
    )
    percent = [f"{100 * scaling[which]:.0f}" for which in kept]
    assert (
        "keeps {}% with `fsdp_full` in `delayed` and {}% with `fsdp_grad`, of rows of 8,192 tokens {} and {}%".format(
            *percent
        )
        in text
    )
    ddp = [f"{scaling[size, 'ddp:delayed']:.0%}" for size in ("3b_x2", "1b_x2")]
    assert "On two GPUs each keeps {} (3B) and {} (1B)".format(*ddp) in text
    rows = {(row["row"], row["arm"]): row for row in record["rows"]}
    (crowded,) = rows["8b_x2", best]["rounds"]
    times = crowded["step_times_s"]
    assert f"anything from {min(times):.2f} to {max(times):.2f} s" in text
    assert f"{crowded['peak_reserved_memory_gib']:.0f} GiB were reserved" in text
    now = best.replace("flash4", "flash3")
    told = "keeps {:.0%} of one GPU's speed, {:.0%} with rows of 8,192"
    assert told.format(*(scaling[name, now] for name in ("8b_x2", "8b_s8192_x2"))) in text
    (roomy,) = rows["8b_x2", now]["rounds"]
    assert f"{roomy['peak_memory_gib']:.0f} GiB in tensors and {roomy['peak_reserved_memory_gib']:.0f} reserved" in text
    before = json.loads((RESULTS / "multi_gpu_throughput_8b_s8192_x4.json").read_text())["rows"]
    speeds = {row["arm"]: f"{row['tokens_per_s_per_gpu']:,.0f}" for row in before}
    told = (
        "{hf_fsdp2_bf16}, `fsdp_full` {fsdp_full:bf16} in bf16, {fsdp_full:current} in `current` and "
        "{fsdp_full:delayed} in `delayed`, `fsdp_grad` in `delayed` {fsdp_grad:delayed}"
    )
    for name, speed in speeds.items():
        told = told.replace(f"{{{name}}}", speed)
    assert told in text


def test_the_readmes_speeds_are_those_of_the_table():
    text = " ".join((RESULTS.parents[1] / "README.md").read_text().split())
    table = {
        (row["row"], row["arm"]): row for row in json.loads((RESULTS / "speed_table_h200.json").read_text())["rows"]
    }
    sizes = ("1b", "3b", "8b", "8b_s8192")
    ours = ("bf16", "block", "current", "delayed", "delayed:fp8head_all")
    ours += ("delayed:fp8head_all:flash3", "delayed:fp8head_all:flash4")
    arms = ("hf_bf16", "hf_bf16_compiled", "accelerate_te", "torchao_tensorwise", "torchao_rowwise", *ours)

    lines = documented_table("README.md", "| | 1B, 16 rows |")
    for line, arm in zip(lines, arms, strict=True):
        assert line[1:] == [speed_and_memory(table.get((size, arm))) for size in sizes], arm

    for arm, beside, told in (
        ("delayed", "bf16", "{} times as fast as the same modules in bf16"),
        ("delayed", "hf_bf16", "{} times as fast as Hugging Face in bf16"),
        ("delayed", "torchao_tensorwise", "{} times as fast as the fastest rival"),
        ("delayed:fp8head_all:flash4", "hf_bf16", "make it {} times Hugging Face in bf16"),
    ):
        speeds = [[table[size, name]["tokens_per_s"] for name in (arm, beside)] for size in ("1b", "3b", "8b")]
        assert told.format("{:.2f}, {:.2f} and {:.2f}".format(*(fast / slow for fast, slow in speeds))) in text
    for size in ("1b", "3b", "8b"):
        assert (
            max(RIVALS, key=lambda name: table[size, name]["tokens_per_s"] if (size, name) in table else 0)
            == "torchao_tensorwise"
        )
    large = [table[f"{size}_128k", "delayed:fp8head_all:flash3"]["tokens_per_s"] for size in ("1b", "8b")]
    assert "Steps of 128k tokens take 1B to {:,.0f} and 8B to {:,.0f} tokens/s".format(*large) in text
    assert f"steps of 256k tokens 8B to {table['8b_256k', 'delayed:fp8head_all:flash3']['tokens_per_s']:,.0f}" in text
    of_14b = [table["14b", f"delayed:adamw_8bit:fp8head_all{more}"] for more in ("", ":flash4")]
    told = "{:,.0f} with `--fp8_lm_head all`, {:,.0f} with flash-attn 4 besides, {:.0f} GiB"
    assert told.format(*(row["tokens_per_s"] for row in of_14b), of_14b[0]["peak_memory_gib"]) in text
    real = {arm: table["text_1b", arm]["real_tokens_per_s"] for arm in ("delayed", "bf16", "hf_bf16")}
    assert f"packed rows take {real['delayed'] / real['hf_bf16']:.2f} times as many real tokens" in text
    assert f"{real['bf16'] / real['hf_bf16']:.2f} times in bf16" in text

    spread = (
        "fsdp_full:delayed",
        "fsdp_grad:delayed",
        "fsdp_grad:delayed:fp8_params:fp8head_all:flash4",
        "fsdp_full:bf16",
        "fsdp_full:hf_bf16",
    )
    told = (
        "{:,.0f} tokens/s with `fsdp_full` in `delayed`, {:,.0f} with `fsdp_grad`, and {:,.0f} with `fsdp_grad "
        "--fp8_params`, the head in fp8 and flash-attn 4 besides; {:,.0f} with `fsdp_full` in bf16, and {:,.0f} with"
    )
    assert told.format(*(table["8b_x4", arm]["tokens_per_s_per_gpu"] for arm in spread)) in text


def test_the_start_of_8b_takes_what_the_document_says():
    ((_, record),) = load("startup_8b.json")
    (start,) = record["starts"]
    phases = start["phases_s"]
    told = (
        "ends {:.0f} s after the command: {:.0f} s of imports, {:.0f} of the comparison with Hugging Face's "
        "decoder, {:.0f} for {:.0f} GiB"
    ).format(start["first_step_s"], phases["imports"], phases["parity"], phases["weights"], record["weights_gib"])
    assert told in (RESULTS.parents[1] / "docs" / "metrics.md").read_text()


def test_the_losses_with_first_scales_are_those_of_the_file():
    rows = {row["arm"]: row["rounds"][0]["losses"] for row in load("levers_8b_first_scales.json")[0][1]["rows"]}
    told = (f"{rows[arm][step - 1]:.3f}" for arm in ("delayed", "current") for step in (1, 2, 3, 7))
    text = " ".join((RESULTS.parents[1] / "docs" / "numerics.md").read_text().split())
    assert (
        "With the passes `delayed` has {}, {}, {} and {}, beside {}, {}, {} and {} of `current`".format(*told) in text
    )


def test_the_losses_on_real_documents_are_what_the_document_says():
    rows = {
        row["arm"]: row
        for row in json.loads((RESULTS / "speed_table_h200.json").read_text())["rows"]
        if row["row"] == "text_1b"
    }
    rival, ours = rows.pop("hf_bf16"), rows.values()
    first = max(abs(row["first_loss"] / rival["first_loss"] - 1) for row in ours)
    last = [1 - row["last_loss"] / rival["last_loss"] for row in ours]
    assert all(len(answer["losses"]) == 6 for row in ours for answer in row["rounds"])
    told = (
        f"first losses are at most {first:.2%} apart and sixth ones {100 * min(last):.0f} to {max(last):.0%}, "
        "ours lower"
    )
    assert told in " ".join((RESULTS.parents[1] / "docs" / "benchmark.md").read_text().split())


def test_the_versions_of_the_gpu_runs_are_what_the_document_says():
    versions: dict[str, set[str]] = {"torch": set(), "transformers": set(), "transformer-engine": set()}
    names = set()
    for file, record in load("*.json"):
        if not file.startswith(FROM_GPU):
            continue
        origin = record["provenance"].get("of_first_run", record["provenance"])
        names |= {gpu["name"] for gpu in origin["gpus"]}
        for package, found in versions.items():
            found.add(origin["packages"][package])
    assert names == {"NVIDIA H200"}
    listed = [f"{package} {', '.join(sorted(found))}" for package, found in versions.items()]
    assert (
        "all are of H200s with {}, {} and {} (".format(*listed)
        in (RESULTS.parents[1] / "docs" / "evidence.md").read_text()
    )


def test_how_near_two_gpus_come_to_one_is_what_the_document_says():
    def worst(test: str, group: Callable[[str], str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, kept in properties_of(test).items():
            apart = max(
                abs(several / one - 1) for several, one in zip(kept["loss"], kept["loss_on_one_gpu"], strict=True)
            )
            found[group(name)] = max(found.get(group(name), 0.0), apart)
        return found

    def kind(name: str) -> str:
        return next((part for part in ("wise", "-bf16", "fp8_params") if part in name), "fp8")

    def width(name: str) -> str:
        return "bf16" if "bf16" in name else "fp8"

    text = (RESULTS.parents[1] / "docs" / "evidence.md").read_text()
    two = worst("test_two_gpus_take_the_steps_of_one", kind)
    assert (
        f"at most {two['-bf16']:.3%} apart in bf16, {two['fp8']:.2%} in Transformer Engine's fp8, "
        f"{two['fp8_params']:.2%} with" in text
    )
    assert f"`--fp8_params` and {two['wise']:.2%} in torchao's" in text
    adapters = worst("test_adapters_take_the_steps_of_one_gpu", width)
    assert f"{adapters['bf16']:.2%} in bf16 and {adapters['fp8']:.2%} in fp8" in text
    copies = worst("test_copies_over_several_gpus_take_the_steps_of_one", width)
    assert f"{copies['bf16']:.3%} in bf16, {copies['fp8']:.2%} in `delayed` and `current`" in text


def test_how_the_gpu_tests_ended_is_what_the_documents_say():
    ((_, record),) = load("gpu_tests.json")
    counts = Counter(test["outcome"] for test in record["tests"].values())
    assert counts == record["counts"]
    said = f"f {len(record['tests'])} tests {counts['passed']} passed"
    evidence, readme = ((RESULTS.parents[1] / name).read_text() for name in ("docs/evidence.md", "README.md"))
    assert said in evidence and said in readme
    commits = Counter(test["commit"][:7] for test in record["tests"].values())
    assert re.findall(r"(\d+) at ([0-9a-f]{7})\b", evidence) == [
        (str(count), commit) for commit, count in commits.most_common()
    ]
    fewest = commits.most_common()[-1][0]
    told = {
        name.partition("::")[2].partition("[")[0]
        for name, test in record["tests"].items()
        if test["commit"][:7] == fewest
    }
    assert told and all(f"`{name}`" in evidence for name in told)


LOG = RESULTS.parents[1] / "docs" / "performance_log.md"


def test_the_logs_speeds_are_those_of_the_files():
    """Every figure of a thousand and more in a line of its tables that names files is the speed of a row of one of
    them.
    """
    checked = 0
    for line in LOG.read_text().splitlines():
        names = re.findall(r"`((?:(?:multi_gpu_)?throughput|levers|lora_study|speed_table)_\w+\.json)`", line)
        if not line.startswith("|") or not names:
            continue
        rows = [
            row for name in names for row in json.loads((RESULTS / name).read_text())["rows"] if "tokens_per_s" in row
        ]
        known = {f"{row['tokens_per_s'] / row.get('num_gpus', 1):,.0f}" for row in rows}
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        figures = cells[3:4] if cells[0].startswith("`") and len(cells) == 6 else cells[1:3]
        for figure in re.findall(r"\d{1,3}(?:,\d{3})+", " ".join(figures)):
            assert figure in known, line
            checked += 1
        if len(cells) == 6 and cells[4]:
            target = float(cells[2].replace(",", ""))
            assert cells[4] == f"{float(cells[3].replace(',', '')) / target:.1%}", line
    assert checked >= 30


def times_and_shares(columns: list[tuple[dict[str, float], float]]) -> list[list[str]]:
    """The lines of a table of parts of a step: the part, and for each column, (seconds by part, seconds of the
    step), its ms and its share.
    """
    lines: dict[str, list[str]] = {}
    for parts, step_s in columns:
        for name, time_s in parts.items():
            lines.setdefault(name, [name]).extend([f"{time_s * 1e3:,.1f}", f"{time_s / step_s:.0%}"])
    return list(lines.values())


def test_the_logs_time_of_8b_is_that_of_the_file():
    text = LOG.read_text()
    rows = {row["arm"]: row for row in json.loads((RESULTS / "levers_8b_softmax_fused.json").read_text())["rows"]}
    assert set(rows) == {"delayed", "delayed:fp8head_all"}
    ceilings = MeasuredRates(**json.loads((RESULTS / "ceilings_h200.json").read_text())["ceilings"])
    columns, floors = [], []
    for arm, row in rows.items():
        answers = row["rounds"]
        step_s = statistics.median(time_s for answer in answers for time_s in answer["step_times_s"])
        assert f"of `{arm}` is {step_s * 1e3:,.1f} ms" in text
        by_class = [answer["recorded_step"]["time_s_by_class"] for answer in answers]
        parts = {f"`{name}`": statistics.mean(of_round[name] for of_round in by_class) for name in by_class[0]}
        columns.append((parts | {"no kernel": step_s - sum(parts.values())}, step_s))
        (floor_s,) = {
            gemm_floor_s(answer, row["batch_size"] * row["seq_length"] * row["micro_batches"], ceilings)
            for answer in answers
        }
        assert floor_s is not None
        floors.append(f"{floor_s * 1e3:,.1f}")
    assert documented_table("docs/performance_log.md", "| kernels | `delayed`, ms |") == times_and_shares(columns)
    assert "take {} ms at the ceilings of `ceilings_h200.json`, and {} ms with the head in fp8".format(*floors) in text


def test_the_logs_time_of_1b_and_3b_is_that_of_the_table():
    rows = json.loads((RESULTS / "speed_table_h200.json").read_text())["rows"]
    steps = {row["row"]: row["step"] for row in rows if row["arm"] == "delayed:fp8head_all:flash4"}
    columns = []
    for size in ("1b", "3b"):
        step = steps[size]
        parts = {f"`{name}`": step["time_s_by_class"][name] for name in steps["3b"]["time_s_by_class"]}
        columns.append((parts | {"no kernel": step["gap_s"]}, step["step_s"]))
    assert documented_table("docs/performance_log.md", "| kernels | 1B, ms |") == times_and_shares(columns)
    figures = [f"{steps[size][key] * 1e3:,.1f}" for key in ("step_s", "gemm_floor_s") for size in ("1b", "3b")]
    text = LOG.read_text()
    assert "the median step is {} ms for 1B and {} ms for 3B".format(*figures[:2]) in text
    assert "FLOPs take {} and {} ms at the ceilings".format(*figures[2:]) in text


def test_the_logs_time_of_adapters_is_that_of_the_file():
    rows = {row["arm"]: row for row in load("lora_study_1b.json")[0][1]["rows"]}
    text, steps, columns = LOG.read_text(), [], []
    for arm in ("delayed", "delayed:lora16", "delayed:lora16qv"):
        rounds = rows[arm]["rounds"]
        steps.append(statistics.median(time_s for answer in rounds for time_s in answer["step_times_s"]))
        recorded = rounds[-1]["recorded_step"]
        others = {f"`{name}`": time_s for name, time_s in recorded["time_s_by_class"].items() if name != "gemm"}
        gap_s = steps[-1] - sum(recorded["time_s_by_class"].values())
        gemms = {f"GEMMs in {kind}": time_s for kind, time_s in recorded["gemm_time_s"].items()}
        columns.append((gemms | others | {"no kernel": gap_s}, steps[-1]))
    times = [[name, *cells[::2]] for name, *cells in times_and_shares(columns)]
    assert sorted(documented_table("docs/performance_log.md", "| kernels | none, ms |")) == sorted(times)
    assert "the median steps are {:,.1f}, {:,.1f} and {:,.1f} ms".format(*(step_s * 1e3 for step_s in steps)) in text


def test_what_the_log_says_of_adapters_below_a_head_in_fp8_is_that_of_the_files():
    (item,) = re.findall(r"^- `--fp8_lm_head all`, .*?(?=\n- )", LOG.read_text(), re.M | re.S)
    item = " ".join(item.split())
    without, with_head = (measured_study(recipe, of_table=HEAD) for recipe in ("delayed", HEAD))
    for size, name in enumerate(LORA_STUDIES[HEAD].values()):
        taken = steps_ms(name)
        won = [taken[f"delayed:{kind}"] - taken[f"{HEAD}:{kind}"] for kind in ("lora16", "lora16qv")]
        gains = [rows[size][kind]["speed_up"] for kind in ("lora16", "lora16qv") for rows in (without, with_head)]
        told = "{:.0f} and {:.0f} ms, {:.2f} -> {:.2f} and {:.2f} -> {:.2f}".format(*won, *gains)
        assert f"(`{name}`) {told}" in item
    name = LORA_STUDIES[HEAD]["Llama-3.2-1B"]
    in_bf16 = bf16_gemms_ms(name)
    left = [in_bf16[f"{HEAD}:{kind}"] for kind in ("lora16", "lora16qv")]
    assert "left in bf16 are the adapters', {:.0f} and {:.0f} ms".format(*left) in item
    (row,) = (row for row in load(name)[0][1]["rows"] if row["arm"] == f"{HEAD}:lora16")
    times = [1e3 * time_s for time_s in row["rounds"][0]["step_times_s"]]
    assert f"its five steps took {min(times):.0f} to {max(times):.0f} ms" in item


def test_what_the_certificate_says_of_recording_8b_is_that_of_the_file():
    answers = [answer for row in load("lora_study_8b.json")[0][1]["rows"] for answer in row["rounds"]]
    taken = [answer["recorded_step"]["recording_time_s"] for answer in answers]
    steps = [statistics.median(answer["step_times_s"]) for answer in answers]
    assert all(time_s < step_s for time_s, step_s in zip(taken, steps, strict=True))
    text = " ".join((RESULTS.parents[1] / "docs" / "certificate.md").read_text().split())
    ends = [min(taken), max(taken), min(steps), max(steps)]
    assert "{:.2f} to {:.2f} s beside {:.1f} to {:.1f} s for 8B with four (`lora_study_8b.json`)".format(*ends) in text


def test_the_readmes_commands_have_the_outcomes_that_the_guides_page_says():
    tests = load("gpu_tests.json")[0][1]["tests"]
    text = (RESULTS.parents[1] / "docs" / "guides.md").read_text()
    for name in readme_commands():
        test = f"test_a_documented_command_trains_in_what_it_asks_for[{name}]"
        assert tests[f"tests/scripts/test_documented_commands_gpu.py::{test}"]["outcome"] == "passed"
        assert f"`{name}`" in text


def test_the_gpu_is_at_its_limit_of_power_where_the_log_says_so():
    (paragraph,) = re.findall(r"^The GPU is at its limit of power\..*?\n\n", LOG.read_text(), re.M | re.S)
    states: dict[str, list[dict]] = {"1b": [], "8b": []}
    for name in re.findall(r"`(levers_\w+\.json)`", paragraph):
        record = json.loads((RESULTS / name).read_text())
        states[name.split("_")[1]] += [answer["gpu_state"] for row in record["rows"] for answer in row["rounds"]]
    for size, told in (
        ("8b", "{} to {} W at a median clock of {} to {} MHz for 8B"),
        ("1b", "{} to {} W at {} to {} MHz for 1B"),
    ):
        assert all(state["power_capped_share"] == 1 for state in states[size])
        ends = [
            f"{end(state[figure] for state in states[size]):,.0f}"
            for figure in ("power_w", "sm_clock_mhz")
            for end in (min, max)
        ]
        assert told.format(*ends) in paragraph
