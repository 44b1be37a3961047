"""The throughput benchmark: its variants, its random data, the rows that it writes, and the speed tables."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import replace
from functools import partial

import pytest
from transformers import AutoConfig

import te_llama
from benchmarks import bench, speed_table, trainers
from benchmarks.bench import Plan, Variant, Workload, measure_all, parse_variants, summarise, write_random_rows
from llm_fp8.__main__ import PROGRAMS
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.models import BUNDLED
from llm_fp8.models.build import model_on_meta
from llm_fp8.utils.errors import OneSentenceParser, UserError
from llm_fp8.utils.packages import REPOSITORY
from tests.support.hub_families import documented_rows
from tests.support.processes import run_program

WORK = Workload("embedded", 2, 64, 2)


def test_variants_are_parsed_and_become_commands():
    ours, baseline = parse_variants("fp8: --use_te --mixed_precision fp8; hf: baseline hf_bf16 --seed 3")
    assert ours == Variant("fp8", ("--use_te", "--mixed_precision", "fp8"))
    assert baseline == Variant("hf", ("--seed", "3"), "hf_bf16")
    (sharded,) = parse_variants("a: --sharding_mode fsdp_full", num_gpus=2)
    assert sharded.command(2, ["--x"])[-3:] == ["--x", "--sharding_mode", "fsdp_full"]
    assert "--nproc_per_node=2" in sharded.command(2, [])


@pytest.mark.parametrize(
    "text",
    [
        *("", " ; ", "no colon", ": --use_te", "a: ; a: --use_te", "a: baseline", "a: baseline fast"),
        "a: --use_te --attn_implementation eager",
        "a: --no_such_option 3",
    ],
)
def test_invalid_variants_are_refused(text):
    with pytest.raises(UserError):
        parse_variants(text)


@pytest.mark.parametrize("argv", [["--warmup", "5"], ["--steps", "6"], ["--variants", "x"]])
def test_options_without_a_measured_step_are_refused(argv, call_main):
    with pytest.raises(UserError, match=argv[0]):
        call_main(bench, *argv)


@pytest.mark.parametrize("module", [module for module, _ in PROGRAMS.values()][1:] + [bench.__name__])  # not training
def test_every_tool_refuses_invalid_numbers_and_outputs(module, tmp_path, monkeypatch, call_main):
    """A patch makes main() fail when it calls its parser, with that parser in the error. The test then gives the parser
    invalid values of every option that is a number or an output path.
    """
    with monkeypatch.context() as patch, pytest.raises(KeyError) as error:
        patch.setattr(OneSentenceParser, "parse_known_args", lambda parser, *_: {}[parser])
        call_main(importlib.import_module(module))
    (parser,) = error.value.args
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    invalid = {"int": ["-1", "0", "nan", "x", "", 10**30], "float": ["-1", "nan", "inf", "x", ""]}
    invalid["writable"] = invalid["<lambda>"] = [tmp_path / "file" / "x", tmp_path / "fifo", "/proc/x"]
    for action in parser._actions:
        for value in invalid.get(getattr(action.type, "__name__", ""), []):
            with pytest.raises(UserError, match=action.option_strings[0]):
                parser.parse_known_args([f"{action.option_strings[0]}={value}"])


def test_rows_of_random_text_have_at_least_the_requested_tokens(tmp_path):
    from transformers import AutoTokenizer

    write_random_rows(tmp_path / "rows.jsonl", 20, 64)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    tokens = AutoTokenizer.from_pretrained(MODEL_DIR)([row["text"] for row in rows])["input_ids"]
    assert len(tokens) == 20 and all(len(ids) >= 64 for ids in tokens)


def result_of_run(*speeds: float, failed: str | None = None, **more) -> dict:
    steps = [{"tokens_per_s": speed, "real_tokens_per_s": speed / 2, "model_tflops": 1.0, **more} for speed in speeds]
    return {"failed": failed, "steps": steps, "losses": [2.0, 1.0]}


def test_row_summarises_the_steps_of_all_rounds():
    rounds = [result_of_run(1, 2, 3, peak_memory_gib=4.0), result_of_run(4, 5, peak_memory_gib=5.0)]
    row = summarise(WORK, Variant("a", ("--x",)), rounds)
    assert (row["tokens_per_s"], row["real_tokens_per_s"], row["num_timed_steps"]) == (3, 1.5, 5)
    assert row["tokens_per_s_p10"] == pytest.approx(1.4) and row["tokens_per_s_p90"] == pytest.approx(4.6)
    assert (row["peak_memory_gib"], row["num_rounds"], row["options"]) == (5.0, 2, "--x")
    assert summarise(WORK, Variant("a", ()), [result_of_run(failed="out of memory")])["failed"] == "out of memory"
    assert summarise(WORK, Variant("a", ()), [result_of_run(1), result_of_run(failed="x")])["num_rounds"] == 1


def test_variants_alternate_and_a_failed_one_is_not_run_again(monkeypatch, tmp_path, capsys):
    measured_variants = []

    def measure(work, variant, *_):
        measured_variants.append(variant.name)
        return result_of_run(failed="out of memory") if variant.name == "b" else result_of_run(10.0)

    monkeypatch.setattr(bench, "measure", measure)
    variants, output = parse_variants("a: ; b: ; c: "), tmp_path / "out.json"
    rows = measure_all(WORK, variants, Plan(8, 6, num_rounds=2, timeout_s=9), partial(bench.write_rows, output))
    assert measured_variants == ["a", "b", "c", "a", "c"]
    assert [row.get("failed") for row in rows] == [None, "out of memory", None]
    assert json.loads(output.read_text())["rows"] == rows
    bench.print_table(rows)
    assert "out of memory" in capsys.readouterr().out


@pytest.mark.slow
def test_variants_and_baselines_train_on_the_same_full_rows(monkeypatch):
    monkeypatch.setattr(bench, "run_program", run_program)
    variants = parse_variants("ours: --mixed_precision no; hf: baseline hf_bf16")
    work = replace(WORK, model="a name", config=json.loads((MODEL_DIR / "config.json").read_text()))
    rows = measure_all(work, variants, Plan(8, 6, num_rounds=1, timeout_s=300))
    for row in rows:
        assert "failed" not in row and row["num_timed_steps"] == 2 and len(row["losses"]) == 8
        assert row["real_tokens_per_s"] == row["tokens_per_s"] > 0, "no position is padding"
    assert rows[0]["losses"][0] == pytest.approx(rows[1]["losses"][0], rel=0.05), "both start from random weights"
    assert rows[0]["losses"][-1] < rows[0]["losses"][0]


@pytest.mark.parametrize("table", ["speed_table.json", "speed_table_h100.json"])
def test_rows_of_the_speed_tables_are_valid_trainings(table):
    rows = speed_table.read_table(speed_table.TABLE.with_name(table))
    assert len({row["row"] for row in rows}) == len(rows) > 5
    for row in rows:
        assert speed_table.workload_of(row).num_gpus == row.get("num_gpus", 1)
        assert {variant.baseline for variant in speed_table.variants_of(row)} >= {None, "hf_bf16"}


def test_rows_of_the_families_table_have_the_size_and_the_decoder_of_their_family(tmp_path):
    documented = documented_rows()
    for row in speed_table.read_table(speed_table.TABLE.with_name("families_4b.json")):
        work, folder = speed_table.workload_of(row), tmp_path / row["model"]
        if work.config is not None:
            bench.write_config(folder, work.config)
        config = AutoConfig.from_pretrained(BUNDLED.get(work.model, folder))
        size_b = sum(parameter.numel() for parameter in model_on_meta(config).module.parameters()) / 1e9
        assert size_b == pytest.approx(float(work.model.rpartition("-")[2].removesuffix("B")), abs=0.6)
        in_te = config.model_type in te_llama.FAMILIES
        assert documented[row["row"]]["TE"] == ("yes" if in_te else "no")
        in_hf = {variant.name: "--use_te" not in variant.argv for variant in speed_table.variants_of(row)}
        assert in_hf == {name: name.startswith("hf_") for name in in_hf}
        ours = ["bf16", "fp8", "backward"][: 3 if row["row"] in ("Qwen3.5", "Gemma 3") else 2]
        assert [name for name, is_hf in in_hf.items() if not is_hf] == (ours if in_te else [])
        assert in_te or {"hf_compiled", "hf_torchao"} <= in_hf.keys()


def test_documented_table_of_trainers_is_the_printed_one():
    assert trainers.table() in (REPOSITORY / "docs" / "tools.md").read_text()


def test_speed_table_writes_each_variant_and_measures_the_missing_ones(monkeypatch, tmp_path):
    measured_variants, output = [], tmp_path / "out.json"

    def measure(work, variant, *_):
        assert variant.name != "fp8" or "b" in measured_variants, "killed"
        measured_variants.append(variant.name)
        return result_of_run(10.0)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(speed_table, "visible_gpus", lambda: ["0"])
    (tmp_path / "t.json").write_text(
        json.dumps({"rows": [{"row": "r", **vars(WORK), "variants": {"a": "", "fp8": ""}}]})
    )
    monkeypatch.setattr("sys.argv", ["x", "--table", str(tmp_path / "t.json"), "--output", str(output)])
    with pytest.raises(AssertionError, match="killed"):
        speed_table.main()
    measured_variants.append("b")
    assert speed_table.main() == 0
    assert measured_variants == ["a", "b", *["fp8"] * 3]
    assert [entry["variant"] for entry in json.loads(output.read_text())["rows"]] == ["a", "fp8"]


def test_targets_are_missed_or_reached():
    row = {"row": "1b", "target_tokens_per_s_per_gpu": 100, "num_gpus": 2, "target_times_padded": 3}
    ours = {"baseline": None, "tokens_per_s": 190.0, "real_tokens_per_s": 90.0}
    reference = {"baseline": "hf_bf16", "tokens_per_s": 500.0, "real_tokens_per_s": 30.0}
    missed, reached = speed_table.judge(row, [ours, reference])
    assert missed.endswith("MISSED") and reached.endswith("reached")
    assert speed_table.judge(row, [reference]) == []
