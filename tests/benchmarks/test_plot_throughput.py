"""The plot of throughput files: every recorded file can be drawn, and what was not measured is named."""

from __future__ import annotations

import json

import pytest
from matplotlib.colors import to_rgb

from benchmarks.colours import colours_of, trained_in
from benchmarks.plot_throughput import draw, group_of, read_rows, reason_not_measured, tokens_per_s
from llm_fp8.tools.bench.variants import BASELINES, precisions
from tests.support.scripts_as_main import ROOT, run_as_main

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.slow
def test_files_of_both_benchmarks_in_one_plot(tmp_path):
    rows = read_rows([RESULTS / "throughput_8b.json", RESULTS / "multi_gpu_throughput_ddp_x4.json"])
    assert any(reason_not_measured(row) == "out of memory" for row in rows)
    draw(rows, tmp_path / "folder" / "plot.png")
    assert (tmp_path / "folder" / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*throughput_*.json")), ids=lambda path: path.stem)
def test_every_recorded_row_is_understood(path):
    for row in read_rows([path]):
        assert row["model"] in group_of(row)
        if reason_not_measured(row) is None:
            middle, start, end = tokens_per_s(row)
            assert 0 < start <= middle <= end


def test_an_arms_colour_is_what_it_trains_in():
    (one, variant, several, bf16) = colours_of(["delayed", "delayed:fp8head_all", "fsdp_full:delayed:sync", "bf16"])
    assert (
        one == pytest.approx(to_rgb("#d1495b"))
        and sum(one) < sum(variant) < sum(several)
        and bf16 == pytest.approx(to_rgb("#444444"))
    )
    assert colours_of(["hf_ddp_bf16"]) == colours_of(["fsdp_full:hf_bf16"]), (
        "an old name, and the same baseline spread in another way"
    )
    names = [*precisions("te"), *precisions("torchao"), *BASELINES]
    assert len({trained_in(name) for name in names}) == len(names)


def test_spread_and_reasons():
    row = {"tokens_per_s": 400.0, "tokens_per_s_slowest": 100.0, "tokens_per_s_fastest": 500.0, "num_gpus": 4}
    assert tokens_per_s(row) == (100.0, 25.0, 125.0)
    assert tokens_per_s({**row, "tokens_per_s_p10": 380.0, "tokens_per_s_p90": 420.0}) == (100.0, 95.0, 105.0)
    assert reason_not_measured({"failed": "out of memory"}) == "out of memory"
    assert reason_not_measured({"failed": "--arms torchao_rowwise needs torchao, ..."}) == "failed"


def test_mistakes_are_one_sentence(tmp_path):
    (tmp_path / "empty.json").write_text(json.dumps({"rows": []}))
    for arguments, sentence in (
        ((RESULTS / "gpu_tests.json", "--output", tmp_path / "a.png"), "is no results file of a throughput benchmark"),
        ((tmp_path / "empty.json", "--output", tmp_path / "a.png"), "holds no rows"),
        ((tmp_path / "none.json", "--output", tmp_path / "a.pdf"), "ends in .png"),
    ):
        done = run_as_main("benchmarks/plot_throughput.py", *arguments)
        assert done.returncode == 2 and sentence in done.stderr
