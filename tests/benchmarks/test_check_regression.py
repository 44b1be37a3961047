"""The guard against regressions: ratios within a file are held against recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.check_regression import RECORDED, RESULTS, compare, ratio_in, read, spread_of
from llm_fp8.utils.errors import UserError

WORKLOAD = {"model": "Llama-3.1-8B", "batch_size": 8, "seq_length": 1024, "micro_batches": 8}


def row(variant: str, tokens_per_s: float | None, spread: float = 0.0, **more) -> dict:
    """A variant's row, with `spread` to both sides of the median; None: it failed."""
    baseline = "hf_bf16" if variant.endswith("hf_bf16") else None
    measured = {**WORKLOAD, "variant": variant, "baseline": baseline, "num_gpus": 1, **more}
    if tokens_per_s is None:
        return {**measured, "failed": "out of memory"}
    ends = {"": 1.0, "_p10": 1 - spread, "_p90": 1 + spread}
    return {**measured, **{f"tokens_per_s{end}": tokens_per_s * factor for end, factor in ends.items()}}


def write(path: Path, *rows: dict, gpu: str = "NVIDIA H200", time_utc: str = "2026-01-01T00:00:00+00:00") -> Path:
    path.write_text(json.dumps({"provenance": {"gpus": [{"name": gpu}], "time_utc": time_utc}, "rows": list(rows)}))
    return path


def held(tmp_path, new: list[dict], recorded: list[dict], minimum: float = 0.02):
    files = read(write(tmp_path / "new.json", *new)), [read(write(tmp_path / "old.json", *recorded))]
    return compare(*files, "hf_bf16", minimum)


@pytest.mark.parametrize(
    ("now", "spreads", "is_regression"),
    [
        (1.80, (0.0, 0.0), False),
        (1.77, (0.0, 0.0), False),  # 1.7% less, of 2%
        (1.76, (0.0, 0.0), True),  # 2.2% less
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
    comparison = held(tmp_path, new, recorded)
    assert comparison.num_compared == 1 and len(comparison.regressions) == is_regression


def test_what_fails_now_is_a_regression_and_what_failed_before_is_not(tmp_path):
    recorded = [row("delayed", 18_000), row("block", None), row("current", 17_000), row("hf_bf16", 10_000)]
    new = [row("delayed", None), row("block", 15_000), row("current", 17_000), row("hf_bf16", 10_000)]
    comparison = held(tmp_path, new, recorded)
    (regression,) = comparison.regressions
    assert "delayed failed" in regression and comparison.num_compared == 2


def test_a_file_with_nothing_to_compare_is_refused(tmp_path):
    ours, reference = row("delayed", 18_000), row("hf_bf16", 10_000)
    for new in ([ours], [ours, row("hf_bf16", None)], [{**ours, "model": "Qwen2.5-14B"}, reference], [reference]):
        with pytest.raises(UserError, match="no ratio that is recorded"):
            held(tmp_path, new, [ours, reference])
    with pytest.raises(UserError, match="results"):
        read(write(tmp_path / "other.json", {"name": "x"}))


def test_a_ratio_within_a_large_spread_is_not_compared(tmp_path):
    """A quarter of the speed is gone, which such steps cannot show; half of it they can."""
    recorded = [row("delayed", 18_000), row("hf_bf16", 10_000)]
    with pytest.raises(UserError, match="spread is too large"):
        held(tmp_path, [row("delayed", 13_500, spread=0.3), row("hf_bf16", 10_000)], recorded)
    assert len(held(tmp_path, [row("delayed", 9_000, spread=0.3), row("hf_bf16", 10_000)], recorded).regressions) == 1
    comparison = held(tmp_path, [row("delayed", 13_500, spread=0.05), row("hf_bf16", 10_000)], recorded, minimum=0.3)
    assert comparison.num_compared == 1 and comparison.regressions == [], "--minimum does not count as spread"


def test_on_several_gpus_the_baseline_is_spread_alike(tmp_path):
    new = [row("fsdp_grad:delayed", 60_000, num_gpus=4), row("ddp:bf16", 44_000, num_gpus=4)]
    new += [row("fsdp_full:hf_bf16", 40_000, num_gpus=4), row("ddp:hf_bf16", 22_000, num_gpus=4)]
    comparison = held(tmp_path, new, new)
    assert comparison.num_compared == 2 and comparison.regressions == []
    assert any("fsdp_grad:delayed: 1.500 times fsdp_full:hf_bf16" in note for note in comparison.notes)
    assert any("ddp:bf16: 2.000 times ddp:hf_bf16" in note for note in comparison.notes)


def test_the_newest_record_of_the_same_gpu_counts(tmp_path):
    new = read(write(tmp_path / "new.json", row("delayed", 15_000), row("hf_bf16", 10_000)))
    old = [
        read(write(tmp_path / f"{name}.json", row("delayed", ours), row("hf_bf16", 10_000), gpu=gpu, time_utc=time))
        for name, ours, gpu, time in (
            ("older", 20_000, "NVIDIA H200", "2026-01-01"),
            ("newer", 15_000, "NVIDIA H200", "2026-01-02"),
            ("other", 30_000, "NVIDIA H100", "2026-01-03"),
        )
    ]
    assert compare(new, old, "hf_bf16", 0.02).regressions == []
    assert len(compare(new, old[:1], "hf_bf16", 0.02).regressions) == 1


def test_real_documents_count_real_tokens(tmp_path):
    both = {"dataset": "rows.jsonl", "real_tokens_per_s": 9_000, "real_tokens_per_s_p10": 8_900}
    padded = row("hf_bf16", 10_000, **{**both, "real_tokens_per_s": 3_000}, real_tokens_per_s_p90=3_100)
    measured = read(write(tmp_path / "x.json", row("delayed", 1.0, **both, real_tokens_per_s_p90=9_900), padded))
    (workload,) = measured.workloads
    assert ratio_in(measured, workload, "delayed", "hf_bf16").value == pytest.approx(3)
    assert spread_of(measured.workloads[workload]["delayed"]) == pytest.approx(0.1)


def test_the_recorded_files_are_read():
    files = [read(path) for pattern in RECORDED for path in sorted(RESULTS.glob(pattern))]
    assert len(files) >= 6 and {file.gpu for file in files} == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    h200 = next(file for file in files if file.path.name == "speed_table_h200.json")
    assert compare(h200, files, "hf_bf16", 0.02).regressions == []
