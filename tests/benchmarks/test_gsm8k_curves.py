"""The trainings whose loss curves are compared: their commands, that a step is the same on one GPU and on several,
and the comparison.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import plot_curves
from benchmarks.gsm8k_curves import (
    VARIANTS,
    check,
    compare_to_one_gpu,
    finished_runs,
    make_parser,
    parse_seeds,
    parse_variants,
    plan,
)
from benchmarks.plot_curves import draw
from llm_fp8.config.parser import parse_config
from llm_fp8.utils.errors import FailedCheck, UserError

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def settings(num_gpus: int) -> argparse.Namespace:
    return argparse.Namespace(
        data="rows.jsonl", seeds="1,2", epochs=4, eval_every=25, num_gpus=num_gpus, arms=",".join(VARIANTS)
    )


def test_on_one_gpu_every_precision_with_every_seed():
    jobs = plan(settings(1))
    assert [(job.variant, job.seed) for job in jobs] == [(variant, seed) for seed in (1, 2) for variant in VARIANTS]
    for job in jobs:
        config = parse_config(job.options(Path("out"), settings(1)))
        assert (
            config.data.batch_size == 8 and config.optim.optimizer == "auto" and job.launch(1)[1:] == ["train_fp8.py"]
        )


@pytest.mark.parametrize("variants", ["bf16,fp16", "delayed", "bf16,delayed,delayed"])
def test_arms_that_cannot_be_compared(variants):
    with pytest.raises(UserError, match="--arms"):
        parse_variants(variants)
    assert parse_variants("delayed_fp8head, bf16") == ["delayed_fp8head", "bf16"]


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_on_several_gpus_a_step_is_that_of_one(num_gpus):
    chosen = settings(num_gpus)
    jobs = plan(chosen)
    variants = ["bf16", "delayed", "fsdp_full:bf16", "fsdp_full:delayed", "ddp:bf16", "ddp:delayed"]
    assert [job.variant for job in jobs] == variants * 2
    for job in jobs:
        config = parse_config(job.options(Path("out"), chosen), parallel=job.mode is not None)
        gpus = num_gpus if job.mode else 1
        assert config.data.batch_size * config.optim.gradient_accumulation_steps * gpus == 16
        assert config.optim.optimizer == "adamw_fp32" and config.optim.seed == job.seed
        assert config.precision.mixed_precision == ("bf16" if job.precision == "bf16" else "fp8")
        if job.mode:
            assert config.parallel.sharding_mode == job.mode and job.launch(num_gpus)[-1] == "train_multi_gpu.py"
            assert f"--nproc_per_node={num_gpus}" in job.launch(num_gpus)


def run(variant: str, num_gpus: int, *losses: float, rows: int = 16) -> dict:
    return {
        "arm": variant,
        "seed": 1,
        "num_gpus": num_gpus,
        "global_batch_size": rows,
        "num_parameters": 57_000_000,
        "final_eval_loss": losses[-1],
        "evaluations": [[25 * n, 1000 * n, loss] for n, loss in enumerate(losses, start=1)],
    }


def test_the_same_command_goes_on_from_what_it_kept(tmp_path):
    output = tmp_path / "curves.json"
    command = ["gsm8k_curves.py", "--data", "rows.jsonl", "--output", str(output), "--num_gpus", "4", "--epochs", "2"]
    parser = make_parser()
    assert finished_runs(parser.parse_args(command[1:]), parser) == ([], [])
    runs = [run("bf16", 1, 3.0, 2.0)]
    output.write_text(
        json.dumps({"provenance": {"command": command}, "earlier_provenance": [], "comparison": None, "runs": runs})
    )
    assert finished_runs(parser.parse_args([*command[1:], "--parallel", "3"]), parser) == (runs, [{"command": command}])
    for name, value, held in (("epochs", "3", "2"), ("data", "others.jsonl", "rows.jsonl")):
        with pytest.raises(UserError, match=f"holds runs with --{name} {held}"):
            finished_runs(parser.parse_args([*command[1:], f"--{name}", value]), parser)


def test_the_recorded_file_can_be_gone_on_from():
    path = RESULTS / "gsm8k_curves.json"
    parser = make_parser()
    words = ["--data", "gsm8k_train.jsonl", "--output", str(path), "--epochs", "3"]
    runs, provenance = finished_runs(parser.parse_args(words), parser)
    assert len(runs) == 18 and len(provenance[-1]["git"]["commit"]) == 40


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data", "none.jsonl"], "--data none.jsonl: no such file"),
        (["--num_gpus", "3"], "--num_gpus 3 does not divide"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--parallel", "0"], "--parallel must be at least 1"),
    ],
)
def test_mistakes_are_found_before_the_first_training(tmp_path, words, says):
    arguments = ["--data", __file__, "--output", str(tmp_path / "curves.json"), *words]
    with pytest.raises(UserError, match=says):
        check(make_parser().parse_args(arguments))


@pytest.mark.parametrize("seeds", ["1,b", "", "1,1", "-1"])
def test_seeds_that_are_none(seeds):
    with pytest.raises(UserError, match="--seeds"):
        parse_seeds(seeds)


@pytest.mark.parametrize(
    "content", ["{", "[]", (RESULTS / "throughput_1b.json").read_text()], ids=["broken", "list", "another"]
)
def test_an_output_of_another_kind_is_not_gone_on_from(tmp_path, content):
    output = tmp_path / "some.json"
    output.write_text(content)
    parser = make_parser()
    with pytest.raises(UserError, match=str(output)):
        finished_runs(parser.parse_args(["--data", "rows.jsonl", "--output", str(output)]), parser)


def test_the_comparison_with_one_gpu_and_its_plot(tmp_path):
    runs = [
        run("bf16", 1, 3.0, 2.0),
        run("delayed", 1, 3.0, 2.5),
        run("ddp:bf16", 4, 3.5, 2.25),
        run("fsdp_full:delayed", 4, 3.0, 2.0),
    ]
    comparison = compare_to_one_gpu(runs)
    assert comparison["arms"]["ddp:bf16"] == [
        {
            "seed": 1,
            "final_eval_loss": 2.25,
            "final_eval_loss_one_gpu": 2.0,
            "final_difference": 0.25,
            "largest_difference": 0.5,
        }
    ]
    assert comparison["arms"]["fsdp_full:delayed"][0]["final_difference"] == -0.5
    draw({"runs": runs}, tmp_path / "plots" / "curves.png")
    assert (tmp_path / "plots" / "curves.png").stat().st_size > 10_000
    with pytest.raises(FailedCheck, match="took 8 rows a step and one GPU 16"):
        compare_to_one_gpu([runs[0], run("ddp:bf16", 4, 3.5, 2.25, rows=8)])


@pytest.mark.parametrize("content", ["{", "{}", '{"runs": []}', '{"runs": [{}]}'])
def test_a_file_without_curves_is_not_drawn(tmp_path, content):
    file = tmp_path / "curves.json"
    file.write_text(content)
    with pytest.raises(UserError, match=f"results {file}"):
        plot_curves.main([str(file), str(tmp_path / "curves.png")])
