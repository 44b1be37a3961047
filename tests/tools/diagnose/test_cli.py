"""scripts/diagnose_fp8.py as a process on a machine without a GPU, and the findings as tables and JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from unittest import mock

import pytest
import torch
from rich.console import Console

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.optimizers import bytes_per_parameter
from llm_fp8.precision.coverage import Fp8Coverage
from llm_fp8.tools.diagnose.memory import HOW_FOUND
from llm_fp8.tools.diagnose.render import render
from llm_fp8.tools.diagnose.result import findings, memory_findings, time_findings
from llm_fp8.tools.diagnose.session import diagnose
from llm_fp8.tools.diagnose.static_report import diagnose_without_gpu, planned_memory, planned_optimizer
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import write_json_atomic
from tests.support.diagnosed import FP8, facts, module
from tests.support.scripts_as_main import run_as_main
from tests.support.small import write_model

SCRIPT = "scripts/diagnose_fp8.py"


def run(*options, **environ):
    """The script on a machine without a GPU."""
    with mock.patch.dict(os.environ, environ):
        return run_as_main(SCRIPT, *options)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_gpu_it_says_what_it_can_and_exits_3(tmp_path, tiny_model):
    path = tmp_path / "new" / "findings.json"
    done = run(
        "--model_name",
        tiny_model,
        "--max_seq_length",
        128,
        "--mixed_precision",
        "fp8",
        "--fp8_last_bf16_layers",
        1,
        "--json",
        path,
        "--trace",
        path.with_name("trace.json"),
    )
    assert done.returncode == 3, done.stderr
    assert "without a GPU no step is recorded" in done.stdout and not path.with_name("trace.json").exists()
    assert (
        "none is found" in done.stdout
        and "(lm_head)" in done.stdout
        and "kept by --fp8_last_bf16_layers 1" in done.stdout
    )
    found = json.loads(path.read_text())
    assert found["exit_code"] == 3 and found["time"] is None and found["memory"] is None and found["layers"] == []
    layer = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48
    assert (
        found["census"]["num_fp8_weights"] == layer and found["census"]["num_linear_weights"] == 2 * layer + 1024 * 32
    )
    assert sum(found["planned_memory_gib"].values()) * GIB > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        (["--batch_size", "auto"], {}, "--batch_size auto is settled by a training script on a GPU; give a value."),
        (["--json"], {}, "error: argument --json: expected one argument; 'diagnose_fp8.py --help'"),
        (["--json", "one.json", "--trace", "./one.json"], {}, "--json and --trace both name one.json"),
        ([], {"WORLD_SIZE": "2"}, "the launcher started 2"),
        (["--json", "/"], {}, "--json /"),
        (["--trace", "/proc/none/trace.json"], {}, "--trace /proc/none/trace.json"),
        (["--sharding_mode", "ddp"], {}, "train_multi_gpu.py"),
    ],
)
def test_mistakes_are_one_sentence(options, environ, said):
    done = run(*options, **environ)
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr


def test_sizes_that_fp8_cannot_take_are_named(tmp_path):
    model = write_model(tmp_path / "odd", intermediate_size=40)
    found = diagnose_without_gpu(
        parse_config(["--model_name", model, "--max_seq_length", "128", "--mixed_precision", "fp8"])
    )
    census = found["census"]
    assert census["outside_fp8"]["model.layers.*.mlp.up_proj"] == "2 bf16 (size 32 x 40 is not a multiple of 16)"
    assert census["converted"] == {f"model.layers.*.self_attn.{part}_proj": 2 for part in "qkvo"}


def test_an_output_head_in_fp8_is_planned(tmp_path):
    words = ["--model_name", write_model(tmp_path / "whole"), "--max_seq_length", "128", "--mixed_precision", "fp8"]
    shares = {}
    for value, in_fp8 in (("none", 0), ("gradients", 2), ("all", 3)):
        census = diagnose_without_gpu(parse_config([*words, f"--fp8_lm_head={value}"]))["census"]
        shares[value] = census["fp8_linear_flop_share"]
        assert census["skipped"]["lm_head"] == (f"1 bf16 (lm_head{f', {in_fp8} of 3 GEMMs in fp8' if in_fp8 else ''})")
    assert shares["none"] < shares["gradients"] < shares["all"] == 1
    odd = [*words, "--fp8_lm_head=all"]
    odd[1] = write_model(tmp_path / "odd", vocab_size=1030)
    with pytest.raises(UserError, match="--fp8_lm_head all: the lm_head has 1030 x 32 weights"):
        diagnose(parse_config(odd))


def test_planned_memory():
    config = parse_config(["--mixed_precision", "fp8"])
    found = diagnose_without_gpu(config)
    assert planned_optimizer(config, FP8) == "adamw_master"
    assert planned_optimizer(parse_config(["--optimizer", "adamw_8bit"]), FP8) == "adamw_8bit"
    planned = planned_memory(10_000, "adamw_master")
    assert sum(planned.values()) == 10_000 * bytes_per_parameter("adamw_master").total
    assert found["planned_memory_gib"]["weights"] == found["planned_memory_gib"]["gradients"]
    assert found["exit_code"] == 3 and "checked" in found["precision"]
    assert diagnose_without_gpu(parse_config(["--use_te", "--mixed_precision", "fp8"]))["census"] is None


def made_up(**changes) -> dict:
    kinds = {kind: number * GIB for number, kind in enumerate(HOW_FOUND, start=1)}
    values = dict(
        config=Config(),
        device="NVIDIA H200 (compute capability 9.0)",
        plan=FP8,
        coverage=Fp8Coverage(900, 1000, {"model.layers.*.qkv": 32}, {"lm_head": "1 bf16 (lm_head)"}, 5400.0, 6000.0),
        notes=[],
        modules=[module(f"model.layers.{n}.qkv", kind="LayerNormLinear") for n in range(32)],
        attention="fused (cuDNN)",
        time=time_findings(facts()),
        memory=memory_findings("loss", kinds, 27 * GIB, 30 * GIB),
    )
    return findings(**{**values, **changes})


def printed(found: dict) -> str:
    console = Console(file=io.StringIO(), width=180)
    render(found, console)
    return console.file.getvalue()


def test_tables():
    text = printed(made_up())
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert "e4m3 x e5m2" in lines["0-31"] and "LayerNormLinear" in lines["0-31"]
    assert "60.0" in lines["gemm"] and "60.0%" in lines["gemm"] and "16.5" in lines["gemm"]
    assert "40.0" in lines["fp8 operands"] and "13.5" in lines["fp8 operands"]
    assert "9.0%" in lines["gaps"] and "--batch_size" in lines["gaps between kernels"]
    assert "7.00" in lines["other"] and "25.0%" in lines["other"] and "3.00" in lines["allocator slack"]
    assert (
        "90.0% of linear FLOPs in fp8" in text
        and "one step: 100.0 ms (150.0 ms while its kernels were recorded)" in text
    )
    assert "main-gradient accumulation" not in text  # not among the largest three
    assert "memory at the peak, in the loss: 28.00 GiB" in text and "no problem" in text


def test_problems_are_printed_and_decide_the_exit_code():
    assert made_up()["exit_code"] == 0
    faulty = made_up(problems=["attention runs unfused"], notes=["[not] markup"])
    text = printed(faulty)
    assert faulty["exit_code"] == 1 and "PROBLEM: attention runs unfused" in text and "note: [not] markup" in text
    assert "no problem" not in text


def test_json(tmp_path):
    write_json_atomic(tmp_path / "found.json", made_up())
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["schema_version"] == 2 and found["exit_code"] == 0
    assert found["layers"] == [
        {
            "module": "qkv",
            "layers": "0-31",
            "kind": "LayerNormLinear",
            "told_by": "general_gemm",
            "fprop": ["e4m3 x e4m3"],
            "dgrad": ["e4m3 x e5m2"],
            "wgrad": ["e4m3 x e5m2"],
        }
    ]
    assert found["modules"]["model.layers.31.qkv"]["wgrad"] == ["e4m3 x e5m2"] and len(found["modules"]) == 32
    time = found["time"]
    classes = sum(taken["time_s"] for taken in time["classes"].values())
    assert classes + time["gap_s"] - time["overlap_s"] == pytest.approx(time["step_time_s"])
    assert time["classes"]["gemm"]["floor_s"] == pytest.approx(16.5e-3) and time["gemms"]["fp8"][
        "floor_s"
    ] == pytest.approx(13.5e-3)
    assert time["ceilings"]["copy_tb_s"] == 4.0
    assert [loss["share"] for loss in time["losses"]][:3] == pytest.approx([0.27, 0.10, 0.09])
    memory = found["memory"]
    assert sum(memory["kinds_gib"].values()) == pytest.approx(memory["watched_peak_gib"])
    assert set(memory["how_found"]) == set(HOW_FOUND) == set(memory["kinds_gib"])
    assert dataclasses.asdict(facts().rates) == time["ceilings"]


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--model_name", "./missing"], "no such folder"), (["--max_seq_length", "2048"], "max_position_embeddings")],
)
def test_what_the_run_refuses_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        diagnose(parse_config(options))
