"""The speed table: its rows and targets, measurements that go on where a call ended, rows spread over GPUs, and what
is compared.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from benchmarks import speed_table
from benchmarks.speed_table import TABLE, Limit, Record, Turns, compare, measure_table, measurer
from benchmarks.speed_table_rows import gemm_floor_s, read_table
from llm_fp8.observability.provenance import recorded_command
from llm_fp8.tools.bench.measure import header, measure
from llm_fp8.tools.bench.worker import STOPPED, measure_apart
from llm_fp8.tools.gemm_rates import MeasuredRates
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.processes import wait_for_the_end_of_processes_with
from tests.support.scripts_as_main import run_as_main
from tests.support.speed_tables import ROW, made_up, write_table

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SETTINGS = {"steps": 3, "warmup": 1}


STEP_S = {"delayed": 0.5, "current": 0.55, "hf_bf16": 1.0, "accelerate_te": 0.8}


class Fake:
    """Measures by table; notes what it was asked for."""

    def __init__(self, **failing: str) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.failing = failing

    def __call__(self, row, variant, gpu):
        self.asked.append((row.name, variant.name, gpu))
        if variant.name in self.failing:
            return {"failed": self.failing[variant.name]}
        return made_up(STEP_S[variant.name.rpartition(":")[2]], 12.0 if variant.name == "hf_bf16" else 12.012)


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_projects_table(tmp_path):
    """Every variant fits its workload, every step has 64k tokens, and each row has the usual set-up beside it."""
    rows = {row.name: row for row in read_table(TABLE, 6)}
    for row in rows.values():
        assert row.work.step_tokens().num_tokens * row.num_gpus >= 65_536 and row.reference is not None
        launch = LaunchRanks(world_size=row.num_gpus, local_world_size=row.num_gpus, launched=row.num_gpus > 1)
        for variant in row.ours:
            variant.check(row.work, launch)
        assert all(
            variant.mode in ((None,) if row.num_gpus == 1 else ("ddp", "fsdp_full")) for variant in row.baselines
        )
    assert rows["text_1b"].work.text == "embedded" and rows["text_1b"].work.seq_length == 1024
    (tmp_path / "mine.jsonl").write_text('{"text": "a document"}\n')
    replaced = {row.name: row.work.name for row in read_table(TABLE, 6, text=f"{tmp_path}/mine.jsonl")}
    assert replaced.pop("text_1b") == f"Llama-3.2-1B:16x1024x4@{tmp_path}/mine.jsonl"
    assert all(rows[name].work.name == workload for name, workload in replaced.items())


def test_the_targets_of_the_log_are_those_of_the_table():
    text = (ROOT / "benchmarks" / "LOG.md").read_text()
    targets = {row.name: row.targets for row in read_table(TABLE, 6) if row.targets}
    table = text.partition("## Targets")[2].partition("\n## ")[0]
    lines = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \|[^|]*\| ([^|]*?) \|", table, re.M)}
    assert lines.keys() == targets.keys()
    for name, of_row in targets.items():
        (value,) = of_row.values()
        assert lines[name].split()[0] == f"{value:,g}", name


def test_a_row_for_each_number_of_gpus(tmp_path):
    targets = {"target_tokens_per_s_per_gpu": {"4": 90_000}}
    several = {**ROW, **targets, "num_gpus": [2, 4], "ours": ["ddp:delayed"], "rivals": ["ddp:hf_bf16"]}
    rows = read_table(write_table(tmp_path, ROW, several), 3)
    assert [(row.name, row.num_gpus, row.targets) for row in rows[1:]] == [
        ("1b_x2", 2, {}),
        ("1b_x4", 4, {"target_tokens_per_s_per_gpu": 90_000}),
    ]
    with pytest.raises(UserError, match="row 1b has a target for 4 GPUs, which are none of its num_gpus"):
        read_table(write_table(tmp_path, {**several, "num_gpus": [2, 8]}), 3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_gpu": 2}, "row 1b has 'num_gpu', which is none of "),
        ({"workload": "Llama-3.2-1B:16x1024"}, "row 1b: workload Llama-3.2-1B:16x1024: write MODEL:ROWSx"),
        ({"ours": ["delayed", "hf_bf16"]}, "row 1b: hf_bf16 is a baseline; move it"),
        ({"rivals": ["bf16"]}, "row 1b: bf16 is ours; move it"),
        ({"ours": ["fast"]}, "row 1b: --arms fast is unknown"),
        ({"target_times_padded": 4}, "row 1b: target_times_padded belongs to real documents"),
        ({"num_gpus": 0}, "row 1b: num_gpus and targets are more than 0"),
        ({"workload": None}, "is no table of workloads"),
    ],
)
def test_mistakes_in_a_table_name_the_row(tmp_path, change, sentence):
    with pytest.raises(UserError, match=f"--table {tmp_path}/table.json.*{re.escape(sentence)}"):
        read_table(write_table(tmp_path, {**ROW, **change}), 3)


def test_a_table_without_sense(tmp_path):
    with pytest.raises(UserError, match="has two rows 1b"):
        read_table(write_table(tmp_path, ROW, ROW), 3)
    with pytest.raises(UserError, match="has no rows"):
        read_table(write_table(tmp_path), 3)
    with pytest.raises(UserError, match="none.json is no table"):
        read_table(tmp_path / "none.json", 3)


def test_the_floor_of_the_gemms():
    """6 FLOPs per weight and token: wide ones at the bf16 ceiling, fp8 ones a third fast and two thirds split."""
    ceilings = MeasuredRates(bf16_gemm_tflops=100.0, fp8_gemm_tflops=300.0, fp8_split_gemm_tflops=200.0, copy_tb_s=4.0)
    answer = {"census": {"num_fp8_weights": 10**9, "num_linear_weights": 3 * 10**9}}
    tflop = 6 * 1000 / 1e3  # of 10**9 weights and 1000 tokens
    assert gemm_floor_s(answer, 1000, ceilings) == pytest.approx(
        2 * tflop / 100 + tflop / 3 / 300 + 2 * tflop / 3 / 200
    )
    assert gemm_floor_s({**answer, "num_adapter_parameters": 5}, 1000, ceilings) is None
    assert gemm_floor_s(answer, 1000, MeasuredRates(100.0, None, None, 4.0)) is None


# --- going on ---------------------------------------------------------------------------------------------------------


def run(
    path: Path | None, rows, fake, num_rounds=1, limit_s=0.0, gpus=("0",), gpus_parallel=1, only=(), **record_options
) -> tuple[Record, Limit]:
    record = Record(path, rows, SETTINGS, **record_options)
    limit = Limit(limit_s)
    measure_table(rows, record, Turns(num_rounds, only), fake, limit, gpus, gpus_parallel)
    return record, limit


def test_a_second_call_measures_what_the_first_left(tmp_path, capsys):
    """Cut off by its time after two measurements; what failed is not tried again, unless it is asked for."""
    path, rows = tmp_path / "folder" / "r.json", read_table(write_table(tmp_path, ROW), 3)
    first = Fake(current="out of memory")

    def until_two(row, variant, gpu):
        answer = first(row, variant, gpu)
        if len(first.asked) == 2:
            limit.seconds = 1e-9  # over
        return answer

    record, limit = Record(path, rows, SETTINGS), Limit(0.0)
    measure_table(rows, record, Turns(1), until_two, limit, ["0"])
    assert [variant for _, variant, _ in first.asked] == ["delayed", "current"] and limit.left == [
        "1b hf_bf16",
        "1b accelerate_te",
    ]
    kept = json.loads(path.read_text())
    assert [row["arm"] for row in kept["rows"]] == ["delayed", "current"] and kept["rows"][1][
        "failed"
    ] == "out of memory"
    assert kept["comparisons"][0]["ours"]["delayed"]["times"] == {}

    second = Fake()
    _, limit = run(path, rows, second)
    assert [variant for _, variant, _ in second.asked] == ["hf_bf16", "accelerate_te"] and limit.left == []
    done = json.loads(path.read_text())
    assert len(done["runs"]) == 2 and done["rows"][0] == kept["rows"][0]
    assert [row["rounds"][0]["run"] for row in done["rows"] if "rounds" in row] == [0, 1, 1]
    assert done["comparisons"][0]["same_run"] is False
    speed_table.print_table(rows, Record(path, rows, SETTINGS))
    assert "measured by more than one call" in capsys.readouterr().out

    third = Fake()
    run(path, rows, third, num_rounds=2, retry_failed=True)
    asked = [variant for _, variant, _ in third.asked]
    assert asked == ["current", "delayed", "current", "hf_bf16", "accelerate_te"]
    rows_now = json.loads(path.read_text())["rows"]
    assert [len(row["rounds"]) for row in rows_now] == [2, 2, 2, 2] and all("failed" not in row for row in rows_now)


def test_a_call_of_which_nothing_was_measured_is_gone_on_with(tmp_path):
    """Every process hung before it had said on which GPU."""
    path, rows = tmp_path / "r.json", read_table(write_table(tmp_path, ROW), 3)
    run(path, rows, Fake(**dict.fromkeys(STEP_S, "took longer than 1 s")))
    assert [row["failed"] for row in json.loads(path.read_text())["rows"]] == ["took longer than 1 s"] * 4
    second = Fake()
    run(path, rows, second, retry_failed=True)
    record = json.loads(path.read_text())
    assert len(second.asked) == 4 == len(record["rows"]) and len(record["runs"]) == 1 and "provenance" in record


def test_figures_targets_and_where_the_time_went(tmp_path, capsys):
    path, rows = tmp_path / "r.json", read_table(write_table(tmp_path, ROW), 3)
    kept, _ = run(path, rows, Fake())
    record = json.loads(path.read_text())
    delayed, _, hf, _ = record["rows"]
    assert delayed["tokens_per_s_per_gpu"] == delayed["tokens_per_s"] == 131_072 and delayed["side"] == "ours"
    assert hf["side"] == "rival" and hf["target_tokens_per_s_per_gpu"] == 100_000 and hf["num_gpus"] == 1
    step = delayed["step"]
    assert step["step_s"] == 0.5 and step["gap_s"] == pytest.approx(0.05)
    ceilings = MeasuredRates(
        **json.loads((ROOT / "llm_fp8/tools/predict/gpus/nvidia_h200.json").read_text())["ceilings"]
    )
    assert step["gemm_floor_s"] == pytest.approx(gemm_floor_s(made_up(1.0), 65_536, ceilings))
    (comparison,) = record["comparisons"]
    assert (
        comparison["best"] == "delayed"
        and comparison["share_of_target"] == pytest.approx(1.31072)
        and comparison["same_run"]
    )
    assert comparison["ours"]["delayed"]["times"] == {
        "hf_bf16": pytest.approx(2.0),
        "accelerate_te": pytest.approx(1.6),
    }
    assert comparison["ours"]["current"]["first_loss_differences"]["hf_bf16"] == pytest.approx(0.001)
    for entry in kept.rows_of(rows[0]):
        entry["rounds"][0]["gpu_state"] = {"power_w": 512.0}
    speed_table.print_table(rows, kept)
    printed = capsys.readouterr().out
    assert "256.0 tokens/J" in printed
    assert "delayed reaches 131% of the target (100,000 tokens/s per GPU)" in printed
    assert "delayed over hf_bf16: 2.00 times, first loss +0.1000%" in printed and "more than one call" not in printed
    floor_ms = gemm_floor_s(made_up(1.0), 65_536, ceilings) * 1e3
    assert (
        f"ms of a step of 500: gemm 300 (at the measured rates {floor_ms:.0f}), attention 150, no kernel 50" in printed
    )


def test_rows_that_are_not_measured_this_time_stay(tmp_path):
    other = {**ROW, "name": "other", "workload": "Llama-3.2-1B:8x1024x8"}
    path, (one, two) = tmp_path / "r.json", read_table(write_table(tmp_path, ROW, other), 3)
    run(path, [one], Fake())
    before = json.loads(path.read_text())
    record = Record(path, [two], SETTINGS)
    record.left_out = [{"row": "1b", "reason": "measured elsewhere"}, {"row": "8b_x8", "reason": "it needs 8 GPUs"}]
    fake = Fake()
    measure_table([two], record, Turns(1, ("delayed", "hf_bf16")), fake, Limit(0.0), ["0"])
    assert [variant for _, variant, _ in fake.asked] == ["delayed", "hf_bf16"]
    after = json.loads(path.read_text())
    assert after["rows"][:4] == before["rows"] and after["comparisons"][0] == before["comparisons"][0]
    assert [row["row"] for row in after["rows"][4:]] == ["other", "other"] and len(after["comparisons"]) == 2
    assert after["left_out"] == [{"row": "8b_x8", "reason": "it needs 8 GPUs"}]
    measure_table([one], Record(path, [one], SETTINGS), Turns(2, ("delayed",)), fake, Limit(0.0), ["0"])
    again = json.loads(path.read_text())
    assert [(row["row"], row["arm"]) for row in again["rows"]] == [(row["row"], row["arm"]) for row in after["rows"]]
    assert [entry["row"] for entry in again["comparisons"]] == ["1b", "other"] and again["rows"][4:] == after["rows"][
        4:
    ]


def test_a_file_that_was_made_otherwise_is_refused(tmp_path):
    path, rows = tmp_path / "r.json", read_table(write_table(tmp_path, ROW), 3)
    run(path, rows, Fake())
    with pytest.raises(UserError, match="was measured with --steps 3"):
        Record(path, rows, {"steps": 8, "warmup": 1})
    changed = read_table(write_table(tmp_path, {**ROW, "workload": "Llama-3.2-1B:8x1024x8"}), 3)
    with pytest.raises(UserError, match="row 1b was measured on Llama-3.2-1B:16x1024x4, not Llama-3.2-1B:8x1024x8"):
        Record(path, changed, SETTINGS)
    fewer = read_table(write_table(tmp_path, {**ROW, "rivals": ["hf_bf16"]}), 3)
    with pytest.raises(UserError, match="has accelerate_te, which the table lacks"):
        Record(path, fewer, SETTINGS)
    before = path.read_bytes()
    with pytest.raises(UserError, match="was measured on NVIDIA H200, and this is NVIDIA L4"):
        run(path, rows, lambda row, variant, gpu: made_up(1.0, gpu="NVIDIA L4"), num_rounds=2)
    assert path.read_bytes() == before
    with pytest.raises(UserError, match="is no file of this program"):
        Record(ROOT / "benchmarks/results/throughput_1b.json", rows, SETTINGS)


# --- several GPUs -----------------------------------------------------------------------------------------------------


class Slow(Fake):
    """Takes a while; notes which measurements overlap, and refuses two on a GPU."""

    def __init__(self, seconds: float = 0.02) -> None:
        super().__init__()
        self.seconds = seconds
        self.lock = threading.Lock()
        self.running: dict[str, set[str]] = {}
        self.together: set[frozenset[str]] = set()
        """Names of rows that were measured at the same time."""

    def __call__(self, row, variant, gpus):
        with self.lock:
            own = set(gpus.split(","))
            assert not own & set().union(*self.running.values()), "one measurement at a time on a GPU"
            assert len(own) == row.num_gpus
            self.running[row.name] = own
            self.together.add(frozenset(self.running))
        time.sleep(self.seconds)
        with self.lock:
            del self.running[row.name]
            return super().__call__(row, variant, gpus)

    def gpus(self, name: str) -> set[str]:
        """Those on which a row was measured."""
        return {gpus for row, _, gpus in self.asked if row == name}


def of_gpus(num_gpus: int, name: str, micro_batches: int = 4) -> dict:
    """A row of so many GPUs; how long it is thought to take grows with its micro-batches."""
    mode = "" if num_gpus == 1 else "ddp:"
    variants = {"ours": [f"{mode}delayed"], "rivals": [f"{mode}hf_bf16"]}
    return {"name": name, "workload": f"Llama-3.2-1B:16x1024x{micro_batches}", "num_gpus": num_gpus, **variants}


def test_rows_are_spread_and_the_arms_of_a_row_share_a_gpu(tmp_path):
    """Two rows at a time on the two GPUs there are."""
    rows, fake = read_table(write_table(tmp_path, *({**ROW, "name": f"r{number}"} for number in range(4))), 3), Slow()
    run(tmp_path / "r.json", rows, fake, gpus=("4", "7"), gpus_parallel=8)
    used = [fake.gpus(row.name) for row in rows]
    assert all(len(gpus) == 1 for gpus in used) and set().union(*used) == {"4", "7"}
    assert max(map(len, fake.together)) == 2 and len(fake.asked) == 16


def test_rows_of_several_gpus_follow_alone_and_are_compared_with_one(tmp_path):
    rows = read_table(write_table(tmp_path, of_gpus(2, "x2"), ROW), 3)
    fake = Slow()
    run(tmp_path / "r.json", rows, fake, gpus=("3", "5", "6"))
    assert [(row, gpus) for row, _, gpus in fake.asked] == [("1b", "3")] * 4 + [("x2", "3,5")] * 2
    record = json.loads((tmp_path / "r.json").read_text())
    of_two = [row for row in record["rows"] if row["row"] == "x2"]
    assert (
        all(row["tokens_per_s"] == 2 * row["tokens_per_s_per_gpu"] for row in of_two)
        and "gap_s" not in of_two[0]["step"]
    )
    (scaling,) = (found["scaling"] for found in record["comparisons"] if "scaling" in found)
    (alone,) = (row for row in record["rows"] if (row["row"], row["arm"]) == ("1b", "delayed"))
    assert scaling == {"ddp:delayed": pytest.approx(of_two[0]["tokens_per_s_per_gpu"] / alone["tokens_per_s"])}


def test_rows_of_several_gpus_side_by_side(tmp_path):
    """On four of eight GPUs: two rows of two, then one of four, then on all eight what needs them; nothing shares a
    GPU.
    """
    table = write_table(tmp_path, of_gpus(8, "x8", 32), of_gpus(4, "x4", 4), of_gpus(2, "a", 8), of_gpus(2, "b", 8))
    fake = Slow(0.1)
    run(None, read_table(table, 3), fake, gpus=tuple("01234567"), gpus_parallel=4)
    assert frozenset({"a", "b"}) in fake.together and fake.gpus("a") | fake.gpus("b") == {"0,1", "2,3"}
    assert [(row, gpus) for row, _, gpus in fake.asked[4:]] == [("x4", "0,1,2,3")] * 2 + [("x8", "0,1,2,3,4,5,6,7")] * 2
    assert all(len(names) == 1 for names in fake.together if names & {"x4", "x8"})


def test_a_row_that_fits_does_not_wait_for_one_that_does_not(tmp_path):
    """One of three GPUs and one of two on four: those of one GPU run beside both, whatever comes first in the table."""
    table = write_table(
        tmp_path,
        of_gpus(1, "r0", 2),
        of_gpus(1, "r1", 2),
        of_gpus(2, "x2", 8),
        of_gpus(3, "x3", 16),
        of_gpus(1, "r2", 2),
    )
    fake = Slow(0.1)
    run(None, read_table(table, 3), fake, gpus=tuple("0123"), gpus_parallel=4)
    assert {frozenset({"x3", "r0"})} <= fake.together and len({row for row, _, _ in fake.asked}) == 5
    assert fake.gpus("x3") == {"0,1,2"} and fake.gpus("r0") == {"3"}
    assert not any({"x2", "x3"} <= names for names in fake.together)


def test_the_longest_row_begins_first_where_several_are_measured(tmp_path):
    longer = {**ROW, "name": "longer", "workload": "Llama-3.2-1B:16x1024x8"}
    rows, record = read_table(write_table(tmp_path, ROW, longer), 3), Record(None, [], SETTINGS)

    def order(gpus_parallel: int) -> list[str]:
        (shift,) = speed_table.plan_shifts(rows, record, Turns(1), ["0", "1"], gpus_parallel)
        return [row.name for row in shift.rows]

    assert order(1) == ["1b", "longer"] and order(2) == ["longer", "1b"]


def test_the_estimate_follows_the_schedule(tmp_path):
    """Two rows of two GPUs beside each other, one of four behind the longer of them, and one of eight behind all."""
    table = write_table(tmp_path, of_gpus(8, "x8"), of_gpus(4, "x4", 1), of_gpus(2, "a", 8), of_gpus(2, "b", 4))
    rows, record = read_table(table, 3), Record(None, [], SETTINGS)

    def estimates(gpus_parallel: int) -> list[float]:
        shifts = speed_table.plan_shifts(rows, record, Turns(1), list("01234567"), gpus_parallel)
        return [speed_table.estimate_shift_s(shift, record, Turns(1)) for shift in shifts]

    x8_s, x4_s, a_s, b_s = (speed_table.left_s(row, record, Turns(1)) for row in rows)
    assert a_s > b_s > x4_s > 0
    assert estimates(4) == pytest.approx([a_s + x4_s, x8_s])
    assert estimates(2) == pytest.approx([a_s + b_s, x8_s, x4_s])
    assert estimates(1) == pytest.approx([0.0, x8_s, x4_s, a_s, b_s])


def test_rows_without_enough_gpus_are_left_out(tmp_path):
    several = {**ROW, "name": "x4", "num_gpus": 4, "ours": ["ddp:delayed"], "rivals": ["ddp:hf_bf16"]}
    rows = read_table(write_table(tmp_path, ROW, several), 3)
    kept, left_out = speed_table.leave_out(rows, 1)
    assert [row.name for row in kept] == ["1b"] and left_out == [
        {"row": "x4", "reason": "it needs 4 GPUs, and 1 is there"}
    ]
    assert speed_table.leave_out(rows, 4)[1] == []


def test_a_mistake_in_one_row_ends_the_others(tmp_path):
    rows = read_table(write_table(tmp_path, ROW, {**ROW, "name": "other"}), 3)

    def measure_badly(row, variant, gpu):
        if row.name == "other":
            raise UserError("no such thing")
        time.sleep(0.05)
        return made_up(1.0)

    record, limit = Record(None, rows, SETTINGS), Limit(0.0)
    with pytest.raises(UserError, match="no such thing"):
        measure_table(rows, record, Turns(9), measure_badly, limit, ["0", "1"], 2)
    assert limit.stopped.is_set() and len(record.answers(rows[0], rows[0].ours[0])) < 9


def test_a_mistake_in_a_launch_ends_what_runs_and_what_waits(tmp_path):
    """One of two launches side by side fails: the other is stopped, and the row of four that waits for both is not
    begun.
    """
    table = write_table(tmp_path, of_gpus(2, "a", 8), of_gpus(2, "bad", 8), of_gpus(4, "x4"), of_gpus(8, "x8"))
    limit, asked, both = Limit(0.0), [], threading.Barrier(2, timeout=30)

    def measure_badly(row, variant, gpus):
        asked.append(row.name)
        both.wait()
        if row.name == "bad":
            raise UserError("no such thing")
        return {"failed": STOPPED if limit.stopped.wait(30) else "was not stopped"}

    record = Record(None, read_table(table, 3), SETTINGS)
    with pytest.raises(UserError, match="no such thing"):
        measure_table(read_table(table, 3), record, Turns(9), measure_badly, limit, list("01234567"), 4)
    assert sorted(asked) == ["a", "bad"] and set(limit.left) == {"a ddp:delayed", "a ddp:hf_bf16"}


def test_the_time_limit_holds_for_rows_that_waited(tmp_path):
    table = write_table(tmp_path, of_gpus(2, "a", 8), of_gpus(2, "b", 8), of_gpus(4, "x4"), of_gpus(8, "x8"))
    fake, rows, limit = Slow(), read_table(table, 3), Limit(0.0)

    def until_two(row, variant, gpus):
        answer = fake(row, variant, gpus)
        if len(fake.asked) == 4:
            limit.seconds = 1e-9  # over
        return answer

    measure_table(rows, Record(None, rows, SETTINGS), Turns(1), until_two, limit, list("01234567"), 4)
    assert {row for row, _, _ in fake.asked} == {"a", "b"}
    assert limit.left == ["x4 ddp:delayed", "x4 ddp:hf_bf16", "x8 ddp:delayed", "x8 ddp:hf_bf16"]


# --- real measurements on the CPU -------------------------------------------------------------------------------------


def on_the_cpu(row, variant, gpu):
    """As the program measures, in this process."""
    found = measure(row.work, variant, 1, CPU)
    (times,) = found.pop("step_times_s_by_rank")
    return {"failed": None, "header": header([], CPU), **found, "step_times_s": times, "taken_s": 1.0}


@pytest.mark.slow
def test_packed_text_beside_padded(tmp_path, tiny_architecture, capsys):
    entry = {
        "name": "text",
        "workload": f"{tiny_architecture}:2x256x2@embedded",
        "ours": ["bf16:swap"],
        "rivals": ["hf_bf16"],
        "target_times_padded": 0.001,
    }
    rows = read_table(write_table(tmp_path, entry), 3)
    record, _ = run(tmp_path / "r.json", rows, on_the_cpu)
    kept = json.loads((tmp_path / "r.json").read_text())
    ours, theirs = kept["rows"]
    assert ours["rounds"][0]["documents"] == theirs["rounds"][0]["documents"] and ours["text"] == "embedded"
    (comparison,) = kept["comparisons"]
    times = comparison["ours"]["bf16:swap"]["times"]["hf_bf16"]
    assert times == pytest.approx(ours["real_tokens_per_s"] / theirs["real_tokens_per_s"])
    assert comparison["share_of_target"] == pytest.approx(times / 0.001)
    assert abs(comparison["ours"]["bf16:swap"]["first_loss_differences"]["hf_bf16"]) < 1e-4
    speed_table.print_table(rows, record)
    printed = capsys.readouterr().out
    facts = ours["rounds"][0]["documents"]
    assert f"{facts['num_documents']} documents of {facts['mean_length']:.0f} tokens on average" in printed
    assert "real tokens/s per GPU" in printed and re.search(
        r"bf16:swap over hf_bf16: \S+ times, first loss [+-]0\.00\d\d%, last", printed
    )


@pytest.mark.slow
def test_other_documents_of_the_same_name_are_not_gone_on_with(tmp_path, tiny_architecture):
    """The file of the text has changed between two calls."""
    text = tmp_path / "some.jsonl"
    lines = [json.dumps({"text": f"document {number}: " + "one two three " * 4}) for number in range(200)]
    text.write_text("\n".join(lines))
    entry = {
        "name": "text",
        "workload": f"{tiny_architecture}:1x64x1@{text}",
        "ours": ["bf16:swap"],
        "rivals": ["hf_bf16"],
    }
    table, path = write_table(tmp_path, entry), tmp_path / "r.json"
    run(path, read_table(table, 3), on_the_cpu, only=("hf_bf16",))
    (row,) = read_table(table, 3)
    assert len(Record(path, [row], SETTINGS).answers(row, row.baselines[0])) == 1
    text.write_text("\n".join(lines[1:]))
    with pytest.raises(UserError, match="row text was measured on other documents of that name"):
        Record(path, read_table(table, 3), SETTINGS)


@pytest.mark.slow
def test_two_launches_of_two_processes_at_a_time(tmp_path, warm_python, tiny_architecture, monkeypatch):
    """Through torchrun and scripts/benchmark_multi_gpu.py, one variant that trains beside one that cannot."""
    monkeypatch.setattr(sys, "executable", warm_python)
    entry = {"workload": f"{tiny_architecture}:2x32x2", "num_gpus": 2, "rivals": ["ddp:hf_bf16"]}
    trains, cannot = {**entry, "name": "a", "ours": ["ddp:bf16:swap"]}, {**entry, "name": "b", "ours": ["ddp:bf16"]}
    rows = read_table(write_table(tmp_path, trains, cannot), 3)
    hidden = ("-1", "-2", "-3", "-4")  # names of no GPU, so that there is none
    ours, measure = ("ddp:bf16:swap", "ddp:bf16"), measurer(1, 120.0, threading.Event())
    run(tmp_path / "r.json", rows, measure, only=ours, gpus=hidden, gpus_parallel=4)
    record = json.loads((tmp_path / "r.json").read_text())
    swapped, fused = record["rows"]
    (answer,) = swapped["rounds"]
    assert swapped["num_gpus"] == 2 and swapped["tokens_per_s_per_gpu"] * 2 == swapped["tokens_per_s"] > 0
    assert swapped["tokens_per_s"] == pytest.approx(answer["tokens_per_s"]) and len(answer["step_times_s"]) == 2
    assert answer["gpu"] in ("-1,-2", "-3,-4")
    assert "--use_te needs an NVIDIA GPU" in fused["failed"] and record["provenance"]["command"] == recorded_command(
        sys.argv
    )


@pytest.mark.slow
def test_a_measurement_is_ended_from_outside(tiny_architecture, started_processes):
    """In one process and in a launch, with all that they have started."""
    stopped, mark = threading.Event(), {"WHOSE": tiny_architecture}
    threading.Timer(1.0, stopped.set).start()
    started = time.monotonic()
    ended = measure_apart(f"{tiny_architecture}:1x16x1000000", "hf_bf16", 1, 2, 1, 300, mark, stopped)
    assert ended == {"failed": STOPPED} and len(started_processes) == 1
    stopped.clear()
    threading.Timer(8.0, stopped.set).start()  # when its two processes are there
    work = f"{tiny_architecture}:1x17x1000000"
    assert measure_apart(work, "ddp:hf_bf16", 2, 2, 1, 300, mark, stopped) == {"failed": STOPPED}
    assert time.monotonic() - started < 60
    assert len(started_processes) == 2 and all(process.returncode is not None for process in started_processes)
    wait_for_the_end_of_processes_with("WHOSE", tiny_architecture)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_the_plan_says_what_is_left_to_measure(tmp_path):
    path, table = tmp_path / "r.json", write_table(tmp_path, ROW)
    run(path, read_table(table, 3), Fake(), only=("hf_bf16", "current"))
    options = ["--dry_run", "--table", table, "--output", path, "--steps=3", "--warmup=1", "--rounds=2"]
    done = run_as_main("benchmarks/speed_table.py", *options)
    assert done.returncode == 0, done.stderr
    assert "1b: Llama-3.2-1B:16x1024x4, 1 GPU, 65,536 tokens a step, target: 100,000 tokens/s per GPU" in done.stdout
    left = re.findall(r"(\d) x (\S+) +about", done.stdout)
    assert left == [("2", "delayed"), ("2", "accelerate_te"), ("1", "current"), ("1", "hf_bf16")]
    assert re.search(r"1 x hf_bf16 +about   20 s", done.stdout), "as long as it took"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_the_plan_tells_rows_side_by_side_from_those_that_follow(tmp_path, monkeypatch, capsys):
    table = write_table(tmp_path, of_gpus(8, "x8", 40), of_gpus(2, "a", 40), of_gpus(2, "b", 40))
    monkeypatch.setattr(
        sys, "argv", ["speed_table.py", "--dry_run", "--steps=99", f"--table={table}", "--gpus_parallel=4"]
    )
    assert speed_table.main() == 0
    printed = capsys.readouterr().out
    (of_a_row,) = set(re.findall(r"^    about (\d+) minutes", printed, re.M))
    assert int(of_a_row) > 1
    assert printed.splitlines()[-1] == (
        f"rows of up to 4 GPUs, spread over 4: about {of_a_row} minutes; rows of more GPUs, one by one: about "
        f"{of_a_row} minutes"
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "--gpus_parallel=1"])
    assert speed_table.main() == 0
    assert "rows of one GPU, spread over 1: about 0 minutes; rows of more GPUs, one by one: " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_mistakes_are_one_sentence(tmp_path, monkeypatch):
    for options, sentence in (
        (("--output", tmp_path / "r.json"), "needs an NVIDIA GPU, and none is found; --dry_run says"),
        (("--dry_run", "--rows", "70b"), "--rows 70b is none of 1b, 3b, 8b"),
        (("--dry_run", "--rows", "1b", "--arms", "mxfp8"), "--arms mxfp8 is in none of the rows 1b."),
        (("--dry_run", "--rows", "text_1b", "--text", "none.jsonl"), "none.jsonl: no such file"),
        ((), "--output is missing"),
        (("--dry_run", "--gpus_parallel", 0), "--gpus_parallel 0 measures nothing"),
        (("--dry_run", "--time_limit_s", -1), "--time_limit_s -1: give seconds"),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmarks/speed_table.py", *map(str, options)])
        with pytest.raises(UserError, match=re.escape(sentence)):
            speed_table.main()
    assert not (tmp_path / "r.json").exists()


@pytest.mark.slow
def test_the_whole_command(tmp_path, tiny_architecture, monkeypatch, capsys):
    """As on a GPU, which is only said to be there: measured, cut by the time limit, and gone on with."""
    entry = {"name": "tiny", "workload": f"{tiny_architecture}:2x32x2", "ours": ["bf16:swap"], "rivals": ["hf_bf16"]}
    several = {**ROW, "name": "x2", "num_gpus": 2, "ours": ["ddp:delayed"], "rivals": ["ddp:hf_bf16"]}
    table, path = write_table(tmp_path, entry, several), tmp_path / "r.json"
    monkeypatch.setattr(speed_table, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(speed_table, "measurer", lambda warmup, timeout_s, stopped: on_the_cpu)
    kept = signal.getsignal(signal.SIGTERM)

    def main(*options: str) -> int:
        words = [
            "benchmarks/speed_table.py",
            f"--table={table}",
            f"--output={path}",
            "--steps=3",
            "--warmup=1",
            *options,
        ]
        monkeypatch.setattr(sys, "argv", words)
        return speed_table.main()

    try:
        assert main("--time_limit_s=0.001") == 1 and not path.exists()
        assert (
            "2 measurements are left, the next of them tiny bf16:swap: run the same command again"
            in capsys.readouterr().out
        )
        assert main() == 0
    finally:
        signal.signal(signal.SIGTERM, kept)
    printed = capsys.readouterr().out
    assert "left out: x2: it needs 2 GPUs, and 1 is there" in printed and printed.count("tokens/s per GPU") == 2
    record = json.loads(path.read_text())
    assert [row["arm"] for row in record["rows"]] == ["bf16:swap", "hf_bf16"] and record["left_out"][0]["row"] == "x2"
    assert record["provenance"]["command"] == recorded_command(sys.argv) and record["settings"] == {
        "steps": 3,
        "warmup": 1,
    }
    assert abs(record["comparisons"][0]["ours"]["bf16:swap"]["first_loss_differences"]["hf_bf16"]) < 1e-4


@pytest.mark.slow
def test_a_call_that_is_terminated_leaves_no_process_and_is_gone_on_with(tmp_path, warm_python, tiny_architecture):
    """Two rows side by side, in processes of their own: what was measured stays, and what ran is measured by the
    next call.
    """
    quick = {"name": "quick", "workload": f"{tiny_architecture}:2x32x2", "ours": ["bf16:swap"], "rivals": ["hf_bf16"]}
    endless = {**quick, "name": "endless", "workload": f"{tiny_architecture}:3x16x1000000"}
    table, path = write_table(tmp_path, quick, endless), tmp_path / "r.json"
    lines = [
        "from benchmarks import speed_table",
        "speed_table.visible_gpus = lambda: ['0', '1']",
        "speed_table.run_script(speed_table.main)",
    ]
    options = [f"--table={table}", f"--output={path}", "--steps=3", "--warmup=1", "--gpus_parallel=2"]
    process = subprocess.Popen(
        [warm_python, "-c", "; ".join(lines), *options], cwd=ROOT, env={**os.environ, "WHOSE": str(tmp_path)}
    )
    deadline = time.monotonic() + 300
    while not (path.exists() and len(json.loads(path.read_text())["rows"]) == 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == speed_table.EXIT_TERMINATED
    wait_for_the_end_of_processes_with("WHOSE", str(tmp_path))
    record = json.loads(path.read_text())
    assert [row["row"] for row in record["rows"]] == ["quick", "quick"] and all(
        "failed" not in row for row in record["rows"]
    )
    assert [row["rounds"][0]["gpu"] for row in record["rows"]] == ["1", "1"], "the longer row took the first"
    first, second = (Record(path, [row], SETTINGS) for row in read_table(table, 3))
    assert list(Turns(1).due(read_table(table, 3)[0], first)) == []
    assert len(list(Turns(1).due(read_table(table, 3)[1], second))) == 2


def test_nothing_is_compared_where_ours_failed(tmp_path):
    (row,) = read_table(write_table(tmp_path, ROW), 3)
    record, _ = run(None, [row], Fake(delayed="out of memory", current="out of memory"))
    assert compare(row, record.rows_of(row)) is None
    assert [entry["arm"] for entry in record.rows_of(row) if "failed" not in entry] == ["hf_bf16", "accelerate_te"]
