"""The bench of the data pipeline: its rows, its figures on a few hundred of them, and its mistakes in one sentence."""

from __future__ import annotations

import hashlib
import json
import sys

import datasets
import pytest
from datasets import Dataset

from benchmarks import data_pipeline as bench
from benchmarks.made_up_math import ANSWERS_PER_PROBLEM, SPLIT, write_split
from llm_fp8.data.load import load_split, open_source
from llm_fp8.data.split import problem_key
from llm_fp8.utils.errors import UserError
from tests.support.processes import CONTEXT


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """The bench sets this for its process; a test puts it back. Ranks start from a server that has imported
    everything.
    """
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "converted")
    monkeypatch.setattr(bench, "PROCESSES", CONTEXT)


def rows_of(folder) -> Dataset:
    return load_split(open_source(str(folder)), SPLIT)


@pytest.mark.slow
def test_the_rows_are_the_same_every_time_and_differ_from_one_another(own_cache, tmp_path):
    for name in ("one", "two"):
        write_split(tmp_path / name, 300)
    write_split(tmp_path / "other", 300, seed=1)
    first, second, other = (rows_of(tmp_path / name) for name in ("one", "two", "other"))
    assert first.column_names == ["problem", "generated_solution", "expected_answer", "problem_source"]
    assert first[:] == second[:] and first["problem"][:] != other["problem"][:]
    assert len(set(first["generated_solution"])) == 300
    num_problems = len({problem_key(problem) for problem in first["problem"]})
    assert num_problems == 300 // ANSWERS_PER_PROBLEM
    lengths = [len(solution) for solution in first["generated_solution"]]
    assert max(lengths) > 2 * sorted(lengths)[150], "a few are much longer than most"


@pytest.mark.slow
def test_a_split_of_several_files_keeps_its_rows(own_cache, tmp_path, monkeypatch):
    write_split(tmp_path / "one", 100)
    monkeypatch.setattr("benchmarks.made_up_math.ROWS_PER_FILE", 30)
    write_split(tmp_path / "many", 100)
    assert len(list((tmp_path / "many" / "data").iterdir())) == 4
    assert rows_of(tmp_path / "one")[:] == rows_of(tmp_path / "many")[:]


@pytest.mark.slow
def test_a_run_on_a_few_rows(own_cache, tmp_path, monkeypatch):
    layouts = ["packed:4x512x2", "padded:2x4096x1"]
    path = tmp_path / "r.json"
    words = ["--num_rows=300", "--num_proc=2", "--ranks=2", "--seconds=0.2", f"--output={path}", "--layouts", *layouts]
    monkeypatch.setattr(sys, "argv", ["data_pipeline.py", *words])
    assert bench.main() == 0
    record = json.loads(path.read_text())
    assert record["num_rows"] == 300 and record["provenance"]["cpu"]["num_cores"]
    short, long = record["preparation"]
    assert (short["max_seq_length"], long["max_seq_length"]) == (512, 4096)
    assert short["num_rows_used"] < long["num_rows_used"] == 300, (
        "some rows are too long for 512 tokens, none for 4,096"
    )
    assert short["length_percentiles"]["99"] <= 512
    assert short["rows_per_s"] == pytest.approx(300 / short["tokenise_s"])
    assert short["tokenise_cpu_s"] > 0
    assert short["tokens_per_s"] == pytest.approx(short["num_tokens"] / short["tokenise_s"])
    packed, padded = record["layouts"]
    assert [row["layout"] for row in record["layouts"]] == layouts
    assert (
        padded["pack_s"] is None
        and packed["pack_s"] > 0
        and padded["padding_efficiency"] < packed["padding_efficiency"]
    )
    assert len({row["batches_sha256"] for row in record["layouts"]}) == 2
    for row in (packed, padded):
        for loaders in row["loaders"]:
            assert [one["rank"] for one in loaders["ranks"]] == [0, 1]
            assert loaders["tokens_per_s"] == pytest.approx(sum(one["tokens_per_s"] for one in loaders["ranks"]))
            assert loaders["tokens_per_s_slowest_rank"] == min(one["tokens_per_s"] for one in loaders["ranks"])
            assert 0 < loaders["tokens_per_s"] <= loaders["positions_per_s"]
            for one in loaders["ranks"]:
                assert one["num_steps"] > 0 and one["wall_s"] >= 0.2


@pytest.mark.slow
def test_the_hash_is_of_all_that_batches_hold(own_cache, tmp_path):
    place = bench.Place(tmp_path, "embedded", 1)
    write_split(place.rows, 60)
    tokenizer = place.settle()
    layout = bench.Layout.parse("packed:2x1024x1")
    (step,) = bench.take(bench.prepare_data(place.config(layout), tokenizer), 1)
    (again,) = bench.take(bench.prepare_data(place.config(layout), tokenizer), 1)
    found = bench.hash_of(step)
    assert bench.hash_of(again) == found != hashlib.sha256().hexdigest()
    again[0].labels[0, 7] = 5 if again[0].labels[0, 7] != 5 else 6
    assert bench.hash_of(again) != found


@pytest.mark.slow
def test_a_rank_that_fails_is_named(own_cache, tmp_path):
    """Its process finds no rows; the others are not waited for."""
    place = bench.Place(tmp_path / "nothing", "embedded", 1)
    with pytest.raises(RuntimeError, match=r"rank 0: UserError: --dataset_name .*nothing/rows: no such file or folder"):
        bench.measure_loaders(place, bench.Layout.parse("packed:2x1024x1"), 2, False, 0.1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--layouts", "packed:16x1024"], "--layouts packed:16x1024: write packed:ROWSxLENGTHxMICRO_BATCHES"),
        (["--layouts", "folded:1x2x3"], "--layouts folded:1x2x3: write"),
        (["--layouts", "packed:0x1024x1"], "--layouts packed:0x1024x1: write"),
        (["--num_rows", "0"], "--num_rows 0 measures nothing"),
        (["--seconds", "0"], "--seconds 0.0 measures nothing"),
        (["--ranks", "-1"], "--ranks -1 measures nothing"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, words, sentence):
    with pytest.raises(UserError, match=sentence):
        bench.parse([f"--output={tmp_path / 'r.json'}", *words])


def test_a_scratch_folder_must_be_empty(tmp_path):
    (tmp_path / "left").write_text("over")
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="give an empty folder that exists"):
            bench.parse([f"--output={tmp_path / 'r.json'}", f"--scratch={folder}"])
