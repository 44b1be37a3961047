"""The benchmark of transformers' Trainer: that its variants train on the same tokens, and what it makes of their
records.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

from benchmarks.hf_trainer import (
    OUR_VARIANTS,
    TRAINER_VARIANTS,
    command_of,
    compare,
    main,
    measure,
    parse,
    read_ours,
    read_trainer,
    summarise,
    write_full_rows,
    write_model_structure,
)
from llm_fp8.config.parser import parse_config
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.utils.errors import UserError
from tests.support.small import tiny_config, train


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Workload:
    """Two micro-batches of two rows of a tiny model."""
    folder = tmp_path_factory.mktemp("config")
    tiny_config().save_pretrained(folder)
    return Workload.parse(f"{folder}:2x64x2", 3)


@pytest.fixture(scope="module")
def model_and_rows(work, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_model_structure(work, folder / "model")
    write_full_rows(folder / "rows.jsonl", 12, work.seq_length)
    return folder / "model", folder / "rows.jsonl"


@pytest.mark.slow
def test_our_arm_fills_every_row(work, model_and_rows, tmp_path):
    """Its own command, without what needs a GPU."""
    command = command_of("train_fp8", work, *model_and_rows, tmp_path, "bfloat16")
    assert parse_config(command[2:]).precision.mixed_precision == "fp8"
    options = [word for word in command[2:] if word != "--use_te"]
    options[options.index("fp8")] = "no"
    assert train(*options) == 0
    found = read_ours(tmp_path, work, warmup=1)
    assert len(found["losses"]) == 3 and len(found["step_times_s"]) == 2 and found["peak_memory_gib"] is None
    with pytest.raises(ValueError, match="computed \\[256\\] real tokens and not 512"):
        read_ours(tmp_path, Workload.parse(work.name.replace("2x64x2", "4x64x2"), 3), warmup=1)


def test_the_trainers_arms_are_the_example_under_the_two_files(work, model_and_rows, tmp_path):
    for variant, precision in TRAINER_VARIANTS.items():
        command = command_of(variant, work, *model_and_rows, tmp_path, "float32")
        assert command[4] == f"configs/accelerate_{precision}.yaml" and command[5] == "examples/hf_trainer_fp8.py"
        arguments, rest = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            command[6:], return_remaining_strings=True
        )
        assert arguments.per_device_train_batch_size == 2 and arguments.gradient_accumulation_steps == 2
        assert not arguments.bf16 and rest[rest.index("--max_seq_length") + 1] == "64"
    assert (
        "--mixed_precision" in command_of("train_bf16", work, *model_and_rows, tmp_path, "float32")
        and "train_bf16" in OUR_VARIANTS
    )


def write_state(folder, tokens_per_step: int) -> None:
    runtimes = [1.0, 1.5, 1.75, 2.0]
    history: list[dict] = [
        {
            "loss": 3.0 - step,
            "step": step + 1,
            "train_runtime": runtime,
            "num_input_tokens_seen": tokens_per_step * (step + 1),
        }
        for step, runtime in enumerate(runtimes)
    ]
    history.append({"peak_memory_gib": 12.5, "step": 4})
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def test_a_trainers_steps_are_what_lies_between_its_logs(work, tmp_path):
    write_state(tmp_path, 256)
    found = read_trainer(tmp_path, work, warmup=2)
    assert found == {"step_times_s": [0.25, 0.25], "losses": [3.0, 2.0, 1.0, 0.0], "peak_memory_gib": 12.5}
    write_state(tmp_path, 240)
    with pytest.raises(ValueError, match="computed \\[240\\] tokens and not 256"):
        read_trainer(tmp_path, work, warmup=2)


def test_rows_and_ratios(work):
    def found(*times: float, peak: float) -> dict:
        return {
            "failed": None,
            "step_times_s": list(times),
            "losses": [1.0],
            "peak_memory_gib": peak,
            "certificate": None,
        }

    rows = [
        summarise("trainer_bf16", work, [found(1.0, 1.0, peak=10.0), found(1.0, peak=12.0)]),
        summarise("trainer_fp8", work, [found(0.5, peak=15.0)]),
        summarise("train_fp8", work, [{"failed": "exit code 1: error: out of memory", "certificate": None}]),
    ]
    assert [row.get("tokens_per_s") for row in rows] == [256.0, 512.0, None] and rows[0]["peak_memory_gib"] == 12.0
    assert rows[2]["failed"].startswith("exit code 1")
    assert compare(rows) == [{"arms": ["trainer_fp8", "trainer_bf16"], "speed_ratio": 2.0, "peak_memory_ratio": 1.25}]


def test_a_training_that_fails_says_why(work, model_and_rows, tmp_path):
    script = "import subprocess, sys; print('error: the reason', file=sys.stderr); "
    launcher = "raise subprocess.CalledProcessError(2, 'train_fp8.py')"
    python = command_of("train_fp8", work, *model_and_rows, tmp_path, "float32")[0]
    found = measure("train_fp8", [python, "-c", script + launcher], work, tmp_path / "run", 1, 60)
    assert found == {"certificate": None, "failed": "error: the reason"}
    found = measure("train_fp8", [python, "-c", "import time; time.sleep(60)"], work, tmp_path / "run", 1, 0.5)
    assert found["failed"].startswith("did not end within")
    (tmp_path / "run").mkdir()
    write_state(tmp_path / "run", 240)
    found = measure("trainer_bf16", [python, "-c", ""], work, tmp_path / "run", 1, 60)
    assert found["failed"] == "the steps computed [240] tokens and not 256"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--arms", "trainer_fp16"], "trainer_fp16"),
        (["--warmup", "5"], "--warmup 5"),
        (["--rounds", "0"], "--rounds 0"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(options, named, tmp_path):
    with pytest.raises(UserError, match=named):
        parse([*options, "--output", str(tmp_path / "out.json")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("workload", "says"), [("Foo:1x2x3", "--workload Foo:1x2x3: Foo is unknown"), ("Llama-57M:1x64x1", "none is found")]
)
def test_nothing_is_started_without_a_gpu_or_a_known_model(workload, says, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["hf_trainer.py", "--workload", workload, "--output", str(tmp_path / "out.json")])
    with pytest.raises(UserError, match=says):
        main()
