"""The plots of throughput files: what is drawn of a row, what the titles say, and that every recorded file is read."""

from __future__ import annotations

import json

import pytest
from matplotlib.colors import to_rgb

from benchmarks.colours import colours_of, trained_in
from benchmarks.plot_speed import gains, label, main, read_rows, speed, step_parts, what_was_trained, workload_of
from benchmarks.speed_table import describe
from benchmarks.speed_table_rows import read_table
from llm_fp8.tools.bench.variants import BASELINES, precisions
from llm_fp8.utils.errors import UserError
from tests.support.scripts_as_main import ROOT
from tests.support.speed_tables import ROW, made_up, write_table

RESULTS = ROOT / "benchmarks" / "results"
STEP_S = {"delayed": 0.5, "current": 0.55, "hf_bf16": 1.0, "accelerate_te": 0.8}


@pytest.fixture
def rows(tmp_path):
    found = []
    for row in read_table(write_table(tmp_path, ROW), 3):
        for variant in row.variants:
            answer = {**made_up(STEP_S[variant.name]), "run": 0}
            answer.pop("header")
            found.append(describe(row, variant, [answer], "NVIDIA H200"))
    return found


@pytest.fixture
def results(rows, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"rows": [*rows, {**rows[0], "arm": "delayed:flash4"}, {**rows[0], "row": "3b"}]}))
    return path


def test_ours_stand_behind_the_baselines_without_further_options(results):
    assert [row["arm"] for row in read_rows(results, "1b", None)] == ["hf_bf16", "accelerate_te", "current", "delayed"]
    chosen = read_rows(results, "1b", ["delayed:flash4", "hf_bf16"])
    assert [row["arm"] for row in chosen] == ["delayed:flash4", "hf_bf16"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*throughput_*.json")), ids=lambda path: path.stem)
def test_every_recorded_row_is_understood(path):
    for workload in {workload_of(row) for row in json.loads(path.read_text())["rows"]}:
        for row in read_rows(path, workload, None):
            assert label(row) and (speed(row) > 0 or row.get("out_of_memory") or row["failed"])


def test_the_title_says_what_ours_gain(rows):
    bf16 = {**rows[0], "arm": "bf16", "tokens_per_s": rows[0]["tokens_per_s"] / 1.25}
    assert gains([*rows, bf16]) == "delayed: 1.25 times our bf16, 1.60 times Accelerate's fp8"
    assert gains(rows[:1]) == "delayed: 131,072 tokens/s"


def test_the_line_below_says_what_ran_on_what(results):
    assert what_was_trained(read_rows(results, "1b", None)).endswith("tokens, one GPU")
    recorded = what_was_trained(read_rows(RESULTS / "speed_table_h200.json", "8b_x2", None))
    assert recorded == "Llama-3.1-8B, micro-batches of 8 x 1,024 tokens, 2 H200s"


def test_speed_is_per_gpu_and_of_real_tokens():
    assert speed({"tokens_per_s": 400.0, "num_gpus": 4}) == 100
    assert speed({"tokens_per_s": 400.0, "real_tokens_per_s": 300.0}) == 300 and speed({"failed": "x"}) == 0


def test_the_parts_of_a_step_make_up_its_time(rows):
    assert step_parts(rows[0]) == pytest.approx({"GEMMs": 300, "attention": 150, "casts": 0, "all else": 50})


@pytest.mark.parametrize("arguments", [[], ["--parts", "--arms=current,delayed"]], ids=["speed", "parts"])
def test_both_plots_are_drawn(results, tmp_path, arguments):
    output = tmp_path / "plots" / "t.png"
    assert main([str(results), "--row=1b", *arguments, "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG") and output.stat().st_size > 10_000


def test_a_colour_is_what_a_variant_trains_in():
    (one, variant, several, bf16) = colours_of(["delayed", "delayed:fp8head_all", "fsdp_full:delayed:sync", "bf16"])
    assert one == pytest.approx(to_rgb("#d1495b")) and bf16 == pytest.approx(to_rgb("#444444"))
    assert sum(one) < sum(variant) < sum(several), "each further one is paler"
    assert colours_of(["hf_ddp_bf16"]) == colours_of(["fsdp_full:hf_bf16"]), (
        "an old name, and the same baseline spread in another way"
    )
    names = [*precisions("te"), *precisions("torchao"), *BASELINES]
    assert len({trained_in(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{file}", "--output=a.pdf"], "ends in .png"),
        (["{file}", "--row=8b", "--output=a.png"], "--row 8b: .* has 1b, 3b; name one"),
        (["{file}", "--output=a.png"], "--row None: .* has 1b, 3b; name one"),
        (["{file}", "--row=1b", "--arms=block", "--output=a.png"], "--arms block: row 1b of .* has delayed, current"),
        ([str(RESULTS / "gpu_tests.json"), "--output=a.png"], "not a file of a throughput benchmark"),
    ],
)
def test_mistakes_are_one_sentence(results, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        main([argument.format(file=results) for argument in arguments])


def test_parts_need_a_recorded_step(rows, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"rows": [{key: value for key, value in rows[0].items() if key != "step"}]}))
    with pytest.raises(UserError, match="--parts: it needs"):
        main([str(path), "--parts", "--output", str(tmp_path / "a.png")])
