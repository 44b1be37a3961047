"""The check for regressions: speed ratios of new measurements are compared with recorded ratios."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.check_regression import RECORDED, RESULTS, compare, read
from llm_fp8.utils.errors import UserError

WORKLOAD = {"model": "Llama-3.1-8B", "batch_size": 8, "seq_length": 1024, "micro_batches": 8}


def row(variant: str, tokens_per_s: float | None, spread: float = 0.0, **more) -> dict:
    """Return a benchmark result of `variant` with the median speed `tokens_per_s`, and p10 and p90 that differ from the
    median by the fraction `spread`. If `tokens_per_s` is None, the run failed. `more` adds or replaces fields.
    """
    baseline = "hf_bf16" if variant.endswith("hf_bf16") else None
    measured = {**WORKLOAD, "variant": variant, "baseline": baseline, "num_gpus": 1, **more}
    if tokens_per_s is None:
        return {**measured, "failed": "out of memory"}
    ends = {"": 1.0, "_p10": 1 - spread, "_p90": 1 + spread}
    return {**measured, **{f"tokens_per_s{end}": tokens_per_s * factor for end, factor in ends.items()}}


def write(path: Path, *rows: dict, gpu: str = "NVIDIA H200", time_utc: str = "2026-01-01T00:00:00+00:00") -> Path:
    path.write_text(json.dumps({"provenance": {"gpus": [{"name": gpu}], "time_utc": time_utc}, "rows": list(rows)}))
    return path


def check(tmp_path, new: list[dict], recorded: list[dict], minimum: float = 0.02):
    files = read(write(tmp_path / "new.json", *new)), [read(write(tmp_path / "old.json", *recorded))]
    return compare(*files, "hf_bf16", minimum)


@pytest.mark.parametrize(
    ("ratio", "spreads", "is_regression"),
    [
        (1.80, (0.0, 0.0), False),
        (1.77, (0.0, 0.0), False),  # 1.7% less, and 2% is allowed
        (1.76, (0.0, 0.0), True),  # 2.2% less
        (1.70, (0.03, 0.03), False),  # 5.6% less, and 2% + sqrt(4 * 3% ** 2) is allowed
        (1.64, (0.03, 0.03), True),  # 8.9% less
        (1.70, (0.05, 0.0), False),  # the spread of one of the two runs is enough
        (1.70, (0.0, 0.05), False),
        (3.00, (0.0, 0.0), False),
    ],
)
def test_ratio_may_fall_by_the_spreads_and_the_minimum(tmp_path, ratio, spreads, is_regression):
    """The recorded ratio to the speed of hf_bf16 is 1.8. It may fall by 2% plus the root of the sum of squared spreads.
    That hf_bf16 itself became twice as fast does not count.
    """
    new = [row("delayed", 20_000 * ratio, spreads[0]), row("hf_bf16", 20_000, spreads[0])]
    recorded = [row("delayed", 18_000, spreads[1]), row("hf_bf16", 10_000, spreads[1])]
    comparison = check(tmp_path, new, recorded)
    assert comparison.num_compared == 1 and len(comparison.regressions) == is_regression


def test_new_failure_is_a_regression_and_a_recorded_failure_is_not(tmp_path):
    recorded = [row("delayed", 18_000), row("block", None), row("current", 17_000), row("hf_bf16", 10_000)]
    new = [row("delayed", None), row("block", 15_000), row("current", 17_000), row("hf_bf16", 10_000)]
    comparison = check(tmp_path, new, recorded)
    (regression,) = comparison.regressions
    assert "delayed failed" in regression and comparison.num_compared == 2


def test_file_without_a_comparable_ratio_is_refused(tmp_path):
    ours, reference = row("delayed", 18_000), row("hf_bf16", 10_000)
    for new in ([ours], [ours, row("hf_bf16", None)], [{**ours, "model": "Qwen2.5-14B"}, reference], [reference]):
        with pytest.raises(UserError, match="no ratio that is recorded"):
            check(tmp_path, new, [ours, reference])
    with pytest.raises(UserError, match="results"):
        read(write(tmp_path / "other.json", {"name": "x"}))


def test_baseline_on_several_gpus_has_the_same_kind_of_sharding(tmp_path):
    new = [row("fsdp_grad:delayed", 60_000, num_gpus=4), row("ddp:bf16", 44_000, num_gpus=4)]
    new += [row("fsdp_full:hf_bf16", 40_000, num_gpus=4), row("ddp:hf_bf16", 22_000, num_gpus=4)]
    comparison = check(tmp_path, new, new)
    assert comparison.num_compared == 2 and comparison.regressions == []
    assert any("fsdp_grad:delayed: 1.500 times fsdp_full:hf_bf16" in note for note in comparison.notes)
    assert any("ddp:bf16: 2.000 times ddp:hf_bf16" in note for note in comparison.notes)


def test_recorded_files_have_no_regression():
    files = [read(path) for pattern in RECORDED for path in sorted(RESULTS.glob(pattern))]
    assert len(files) >= 6 and {file.gpu for file in files} == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    h200 = next(file for file in files if file.path.name == "speed_table_h200.json")
    assert compare(h200, files, "hf_bf16", 0.02).regressions == []
