"""The pictures of the speed table: what they are drawn from, and that each is drawn where there is something for it."""

from __future__ import annotations

import json

import pytest

from benchmarks import plot_throughput
from benchmarks.plot_speed_table import GAP, draw_kernels, draw_scaling, scaling_lines, step_parts
from benchmarks.speed_table import describe
from benchmarks.speed_table_rows import read_table
from tests.support.scripts_as_main import run_as_main
from tests.support.speed_tables import ROW, made_up, write_table

STEP_S = {"delayed": 0.5, "current": 0.55, "hf_bf16": 1.0, "accelerate_te": 0.8}


@pytest.fixture
def rows(tmp_path):
    """One GPU, two and four, each a little slower."""
    modes = {"ours": ["fsdp_full:delayed", "fsdp_grad:delayed"], "rivals": ["fsdp_full:hf_bf16"]}
    several = [{**ROW, **modes, "name": f"x{number}", "num_gpus": number} for number in (2, 4)]
    found = []
    for row in read_table(write_table(tmp_path, ROW, *several), 3):
        for variant in row.variants:
            answer = {**made_up(STEP_S[variant.name.rpartition(":")[2]] * (1 + 0.05 * row.num_gpus)), "run": 0}
            answer.pop("header")
            found.append(describe(row, variant, [answer], "NVIDIA H200"))
    return found


def test_a_step_is_its_kernels_and_the_gaps(rows):
    parts = step_parts(rows[0])
    assert list(parts) == ["gemm", "attention", GAP] and sum(parts.values()) == pytest.approx(525)
    assert list(step_parts(rows[-1])) == ["gemm", "attention"], (
        "on several GPUs kernels overlap, so gaps are not told from sums"
    )


def test_lines_go_from_one_gpu_to_many(rows):
    (lines,) = scaling_lines(rows).values()
    assert set(lines) == {"fsdp_full:delayed", "fsdp_grad:delayed", "fsdp_full:hf_bf16"}
    speeds = [pytest.approx(65_536 / (0.5 * (1 + 0.05 * number))) for number in (1, 2, 4)]
    assert lines["fsdp_full:delayed"] == list(zip((1, 2, 4), speeds, strict=True))
    assert scaling_lines(rows[:4]) == {}


def test_all_is_drawn(rows, tmp_path):
    path = tmp_path / "r.json"
    failed = {
        **{
            name: rows[0][name]
            for name in ("row", "side", "workload", "model", "batch_size", "seq_length", "micro_batches")
        }
    }
    path.write_text(json.dumps({"rows": [*rows, {**failed, "arm": "block", "failed": "out of memory", "num_gpus": 1}]}))
    done = run_as_main("benchmarks/plot_speed_table.py", path, "--output", tmp_path / "plots" / "t.png")
    assert done.returncode == 0, done.stderr
    assert {drawn.name for drawn in (tmp_path / "plots").iterdir()} == {"t.png", "t_kernels.png", "t_scaling.png"}
    assert all(drawn.read_bytes().startswith(b"\x89PNG") for drawn in (tmp_path / "plots").iterdir())


def test_nothing_is_drawn_of_nothing(rows, tmp_path):
    bare = [{name: value for name, value in row.items() if name != "step"} for row in rows[:2]]
    assert not draw_kernels(bare, tmp_path / "a.png") and not draw_scaling(bare, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_targets_and_real_tokens(rows, tmp_path, monkeypatch):
    """The dashed line stands at the target, and bars of real documents are of real tokens."""
    lines = []
    monkeypatch.setattr("matplotlib.axes.Axes.axhline", lambda axis, height, **kinds: lines.append(height))
    plot_throughput.draw(rows[:4], tmp_path / "a.png")
    assert lines == [100_000]
    ends = ("", "_p10", "_p90")
    text = {**rows[0], "text": "embedded", **{f"real_tokens_per_s{end}": 90_000.0 for end in ends}}
    assert plot_throughput.tokens_per_s(text) == (
        90_000,
        90_000,
        90_000,
    ) and "real documents" in plot_throughput.group_of(text)


def test_mistakes_are_one_sentence(tmp_path):
    for output, sentence in ((tmp_path / "a.pdf", "ends in .png"), (tmp_path / "a.png", "is no results file")):
        done = run_as_main("benchmarks/plot_speed_table.py", tmp_path / "none.json", "--output", output)
        assert done.returncode == 2 and sentence in done.stderr
