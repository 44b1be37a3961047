"""The guard against regressions: ratios within a file are held against recorded ones, and what cannot be compared is
named.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import check_regression
from benchmarks.check_regression import compare, ratio_in, read, spread_of, workload_of
from llm_fp8.utils.errors import UserError
from tests.support.scripts_as_main import ROOT, run_as_main

RESULTS = ROOT / "benchmarks" / "results"
WORKLOAD = "Llama-3.1-8B:8x1024x8"


def row(variant: str, tokens_per_s: float | None, spread: float = 0.0, num_gpus: int = 1, **more) -> dict:
    """A variant's row, with `spread` to both sides of the median; None: it failed."""
    model, shape = WORKLOAD.split(":")
    found = {
        "model": model,
        **dict(zip(("batch_size", "seq_length", "micro_batches"), map(int, shape.split("x")), strict=True)),
    }
    found.update({"workload": WORKLOAD, "arm": variant, "num_gpus": num_gpus, **more})
    if tokens_per_s is None:
        return {**found, "failed": "out of memory"}
    ends = {"": 1.0, "_p10": 1 - spread, "_p90": 1 + spread, "_slowest": 0.5, "_fastest": 2.0}
    return {**found, **{f"tokens_per_s{end}": tokens_per_s * factor for end, factor in ends.items()}}


def write(path: Path, *rows: dict, gpu: str = "NVIDIA H200", time_utc: str = "2026-01-01T00:00:00+00:00") -> Path:
    origin = {"gpus": [{"name": gpu}] if gpu else [], "time_utc": time_utc}
    path.write_text(json.dumps({"provenance": origin, "rows": list(rows)}))
    return path


def held(tmp_path, new: list[dict], recorded: list[dict], baseline: str = "hf_bf16", minimum: float = 0.02):
    files = read(write(tmp_path / "new.json", *new)), [read(write(tmp_path / "old.json", *recorded))]
    return compare(*files, baseline, minimum)


@pytest.mark.parametrize(
    ("now", "spreads", "is_regression"),
    [
        (1.80, (0.0, 0.0), False),
        (1.77, (0.0, 0.0), False),  # 1.7% less, of 2%
        (1.76, (0.0, 0.0), True),  # 2.2% less
        (1.70, (0.0, 0.0), True),
        (1.70, (0.03, 0.03), False),  # 5.6% less, of 2% + sqrt(4 * 3% ** 2)
        (1.64, (0.03, 0.03), True),  # 8.9% less
        (1.70, (0.05, 0.0), False),  # the new run's spread counts alone as well
        (1.70, (0.0, 0.05), False),
        (3.00, (0.0, 0.0), False),
    ],
)
def test_a_ratio_may_fall_by_the_spreads_and_the_minimum(tmp_path, now, spreads, is_regression):
    """On a GPU twice as fast, which changes no ratio."""
    new = [row("delayed", 20_000 * now, spreads[0]), row("hf_bf16", 20_000, spreads[0])]
    recorded = [row("delayed", 18_000, spreads[1]), row("hf_bf16", 10_000, spreads[1])]
    found = held(tmp_path, new, recorded)
    assert found.num_compared == 1 and len(found.regressions) == is_regression
    (said,) = found.regressions or found.notes
    assert said.startswith(f"{WORKLOAD} delayed: {now:.3f} times hf_bf16, recorded 1.800 (old.json)")


def test_a_slower_rival_does_not_hide_a_slower_arm(tmp_path):
    """Absolute speeds are 30% up, and ours has lost to the baseline all the same."""
    found = held(
        tmp_path, [row("delayed", 23_400), row("hf_bf16", 14_000)], [row("delayed", 18_000), row("hf_bf16", 10_000)]
    )
    assert len(found.regressions) == 1 and "-7.1%" in found.regressions[0]


def test_an_arm_that_fails_now_is_a_regression_and_one_that_failed_before_is_not(tmp_path):
    recorded = [row("delayed", 18_000), row("block", None), row("current", 17_000), row("hf_bf16", 10_000)]
    new = [row("delayed", None), row("block", 15_000), row("current", 17_000), row("hf_bf16", 10_000)]
    found = held(tmp_path, new, recorded)
    assert found.regressions == [f"{WORKLOAD} delayed failed (out of memory), and was 1.800 times hf_bf16 (old.json)."]
    assert (
        any(note.startswith(f"{WORKLOAD} block: no recorded file has it") for note in found.notes)
        and found.num_compared == 2
    )


def test_missing_baselines_variants_and_workloads_are_named(tmp_path):
    ours = [row("delayed", 18_000), row("current", 17_000)]
    other = {**row("delayed", 9_000), "model": "Qwen2.5-14B"}
    with_baseline = [*ours, row("hf_bf16", 10_000), other, {**row("hf_bf16", 5_000), "model": "Qwen2.5-14B"}]
    with pytest.raises(UserError, match=f"{WORKLOAD} delayed: hf_bf16 was not measured beside it"):
        held(tmp_path, ours, with_baseline)
    with pytest.raises(UserError, match="hf_bf16 failed \\(out of memory\\), so it is not compared"):
        held(tmp_path, [*ours, row("hf_bf16", None)], with_baseline)
    with pytest.raises(UserError, match="Qwen2.5-14B:8x1024x8 is not recorded"):
        held(tmp_path, [other], with_baseline[:3])
    found = held(tmp_path, [ours[0], with_baseline[2]], with_baseline)
    assert f"{WORKLOAD}: recorded and not measured now: current." in found.notes
    assert "recorded and not measured now: Qwen2.5-14B:8x1024x8." in found.notes
    calls = [row("delayed", 18_000, rounds=[{"run": 0}]), row("hf_bf16", 10_000, rounds=[{"run": 1}])]
    notes = held(tmp_path, calls, calls).notes
    for name in ("old", "new"):
        assert f"{WORKLOAD} delayed and hf_bf16 come from more than one call in {name}.json." in notes


def test_steps_that_scatter_too_much_do_not_pass_for_a_comparison(tmp_path):
    """A quarter of the speed is gone, which such steps cannot show; half of it they can."""
    recorded = [row("delayed", 18_000), row("hf_bf16", 10_000)]
    for now in (13_500, 18_000):
        with pytest.raises(UserError, match="Steps scatter too much to tell, so it is not compared"):
            held(tmp_path, [row("delayed", now, spread=0.3), row("hf_bf16", 10_000)], recorded)
    assert len(held(tmp_path, [row("delayed", 9_000, spread=0.3), row("hf_bf16", 10_000)], recorded).regressions) == 1
    found = held(tmp_path, [row("delayed", 13_500, spread=0.05), row("hf_bf16", 10_000)], recorded, minimum=0.3)
    assert found.num_compared == 1 and found.regressions == [], "what --minimum allows is no scatter"


def test_on_several_gpus_the_rival_is_spread_alike(tmp_path):
    new = [row("fsdp_grad:delayed", 60_000, num_gpus=4), row("ddp:bf16", 44_000, num_gpus=4)]
    new += [row("fsdp_full:hf_bf16", 40_000, num_gpus=4), row("ddp:hf_bf16", 22_000, num_gpus=4)]
    old = [*new[:2], {**new[2], "arm": "hf_fsdp2_bf16"}, {**new[3], "arm": "hf_ddp_bf16"}]
    found = held(tmp_path, new, old)
    assert found.num_compared == 2 and found.regressions == []
    assert any("fsdp_grad:delayed: 1.500 times fsdp_full:hf_bf16" in note for note in found.notes)
    assert any("ddp:bf16: 2.000 times ddp:hf_bf16" in note for note in found.notes)
    one = [{**entry, "num_gpus": 2} for entry in new]
    with pytest.raises(UserError, match="8x1024x8 on 2 GPUs is not recorded"):
        held(tmp_path, one, old)


def test_the_newest_record_of_the_same_gpu_counts(tmp_path):
    new = read(write(tmp_path / "new.json", row("delayed", 15_000), row("hf_bf16", 10_000)))
    old = [
        read(
            write(
                tmp_path / f"{name}.json",
                row("delayed", ours),
                row("hf_bf16", 10_000),
                gpu=gpu,
                time_utc=f"2026-0{month}-01",
            )
        )
        for name, ours, gpu, month in (
            ("a", 15_000, "NVIDIA H200", 1),
            ("b", 18_000, "NVIDIA H200", 3),
            ("c", 15_000, "NVIDIA H200", 2),
        )
    ]
    elsewhere = read(
        write(
            tmp_path / "d.json", row("delayed", 15_000), row("hf_bf16", 10_000), gpu="NVIDIA L4", time_utc="2026-09-01"
        )
    )
    found = compare(new, [*old, elsewhere], "hf_bf16", 0.02)
    assert len(found.regressions) == 1 and "(b.json)" in found.regressions[0]
    assert "d.json was measured on NVIDIA L4, not on NVIDIA H200, and is left out." in found.notes


def test_real_documents_are_compared_by_real_tokens_and_by_what_they_are(tmp_path):
    documents = {"num_documents": 300, "sha256": "0123456789"}

    def of_text(variant: str, real: float | None, digest: str = "0123456789") -> dict:
        found = {**row(variant, None if real is None else 50_000), "text": "a.jsonl", "workload": f"{WORKLOAD}@a.jsonl"}
        if real is None:
            return found
        ends = ("", "_p10", "_p90", "_slowest", "_fastest")
        return {
            **found,
            "rounds": [{"documents": {**documents, "sha256": digest}}],
            **{f"real_tokens_per_s{end}": real for end in ends},
        }

    recorded = [of_text("delayed", 80_000), of_text("hf_bf16", 10_000)]
    assert held(tmp_path, recorded, recorded).num_compared == 1
    found = held(tmp_path, [of_text("delayed", 60_000), recorded[1]], recorded)
    assert "6.000 times hf_bf16, recorded 8.000" in found.regressions[0]
    assert len(held(tmp_path, [of_text("delayed", None), recorded[1]], recorded).regressions) == 1, (
        "told by the baseline's documents"
    )
    others = [of_text("delayed", 80_000, "fedcba9876"), of_text("hf_bf16", 10_000, "fedcba9876")]
    with pytest.raises(UserError, match="@300 documents fedcba98 is not recorded"):
        held(tmp_path, others, recorded)


def test_spreads_of_older_files():
    old = {"tokens_per_s": 100.0, "tokens_per_s_slowest": 90.0, "tokens_per_s_fastest": 105.0}
    assert spread_of(old) == pytest.approx(0.1) and spread_of(row("delayed", 100.0, 0.03)) == pytest.approx(0.03)


@pytest.mark.parametrize(
    "path",
    [path for pattern in check_regression.RECORDED for path in sorted(RESULTS.glob(pattern))],
    ids=lambda p: p.stem,
)
def test_every_recorded_file_is_understood_and_no_regression_against_itself(path):
    measured = read(path)
    ratios = [
        (variant, ratio_in(measured, workload, variant, baseline))
        for workload, rows in measured.workloads.items()
        for variant in rows
        if check_regression.is_ours(variant) and (baseline := check_regression.baseline_of(variant, "hf_bf16", rows))
    ]
    for variant, ratio in ratios:  # DeepSpeed's third stage has no baseline under it, and loses to FSDP2 in bf16
        assert ratio is None or (0.7 if variant.startswith("deepspeed_3:") else 0.9) < ratio.value < 12
    if any(ratio for _, ratio in ratios):
        found = compare(measured, [measured], "hf_bf16", 0.0)
        # Steps scatter too much of three variants on H200s whose memory was full; on H100s of three, one of which had
        # full memory, with four steps measured.
        scattered = sum("scatter too much to tell" in note for note in found.notes)
        assert found.regressions == [] and found.num_compared + scattered == sum(
            ratio is not None for _, ratio in ratios
        )
        known = {"speed_table_h200": 2, "multi_gpu_throughput_14b_x2": 1, "speed_table_h100": 3}
        assert scattered == known.get(path.stem, 0)
    for entry in json.loads(path.read_text())["rows"]:
        assert entry["model"] in workload_of(entry, [])


@pytest.mark.slow
def test_the_command(tmp_path):
    new = write(tmp_path / "new.json", row("delayed", 15_000), row("hf_bf16", 10_000))
    old = write(tmp_path / "old.json", row("delayed", 18_000), row("hf_bf16", 10_000))

    worse = run_as_main("benchmarks/check_regression.py", new, "--recorded", old)
    assert (
        worse.returncode == 1
        and worse.stdout.count("regression: ") == 1
        and "ratios compared: 1, regressions: 1\n" in worse.stdout
    )
    better = run_as_main("benchmarks/check_regression.py", old, "--recorded", new)
    assert better.returncode == 0 and "regressions: 0\n" in better.stdout and "+20.0%" in better.stdout
    mistake = run_as_main("benchmarks/check_regression.py", tmp_path / "none.json")
    assert mistake.returncode == 2 and "none.json is no results file" in mistake.stderr
    with pytest.raises(UserError, match="is no results file"):
        read(RESULTS / "gpu_tests.json")
