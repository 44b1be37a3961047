"""Numbers handed to the reporter, read back from every place they should have reached, with each tracker's own reader."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from rich.console import Console

from llm_fp8.config import Config, parse_config
from llm_fp8.errors import UserError
from llm_fp8.progress import ProgressDisplay, format_step
from llm_fp8.provenance import REPOSITORY
from llm_fp8.report import RunReporter, accelerator_tracking, check_trackers, throughput_summary, truncate_metrics

RUN_INFO = {"precision": {"requested": "fp8", "effective": {"recipe": None, "compute": "bf16"}}}
TOTAL_STEPS = 40


def a_step(step: int) -> dict[str, float]:
    return {
        "step": step,
        "loss": 3.0 / step,
        "grad_norm": 1.5,
        "learning_rate": 1e-3 * step,
        "step_time_s": 0.25,
        "tokens_per_s": 1000.0 + step,
        "model_tflops": 0.5,
        "tokens_seen": 256 * step,
    }


def an_evaluation(step: int) -> dict[str, float]:
    return {"step": step, "eval_loss": 2.0, "eval_perplexity": math.exp(2.0)}


@pytest.fixture(autouse=True)
def fresh_accelerate_state() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def a_config(folder: Path, *arguments: str) -> Config:
    return parse_config(["--output_dir", str(folder), *arguments])


def a_reporter(config: Config, resume_step: int = 0) -> RunReporter:
    accelerator = Accelerator(cpu=True, **accelerator_tracking(config))
    return RunReporter(accelerator, config, RUN_INFO, TOTAL_STEPS, resume_step)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_wandb(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Configuration, history and exit record of an offline W&B run.

    The file is a LevelDB log (a 7-byte header of W&B's own, then blocks of 32 KiB with records of checksum, length, kind, data),
    whose records are W&B's protobuf messages; wandb itself reads it in its compiled part only.
    """
    from wandb.proto import wandb_internal_pb2

    data, position, block = file.read_bytes(), 7, 2**15
    assert data[:4] == b":W&B"
    messages, pieces = [], b""
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            messages.append(wandb_internal_pb2.Record.FromString(pieces))
            pieces = b""

    def key_of(item: Any) -> str:
        return item.key or ".".join(item.nested_key)

    config: dict[str, Any] = {}
    history = []
    last = None
    for message in messages:
        kind = message.WhichOneof("record_type")
        if kind in ("run", "config"):
            updates = (message.run.config if kind == "run" else message.config).update
            config.update({key_of(item): json.loads(item.value_json) for item in updates})
        elif kind == "history":
            history.append({key_of(item): json.loads(item.value_json) for item in message.history.item})
        elif kind == "exit":
            last = message.exit
    return config, history, last


def test_metrics_and_summary_hold_what_was_reported(tmp_path: Path) -> None:
    config = a_config(tmp_path / "run")
    with a_reporter(config) as reporter:
        reporter.steps([a_step(1), a_step(2)])
        reporter.evaluation(an_evaluation(2))
        # A line is on disk as soon as it is reported: a run that is killed loses nothing.
        assert read_lines(tmp_path / "run") == [a_step(1), a_step(2), an_evaluation(2)]
        reporter.steps([a_step(3)])
        returned = reporter.finish({"stopped": "end of data"})
    assert read_lines(tmp_path / "run") == [a_step(1), a_step(2), an_evaluation(2), a_step(3)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == returned
    assert (summary["steps"], summary["total_steps"], summary["stopped"]) == (3, TOTAL_STEPS, "end of data")
    assert summary["last_step"] == a_step(3) and summary["last_evaluation"] == an_evaluation(2)


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    with a_reporter(config) as reporter:
        reporter.steps([a_step(1), a_step(2)])
        reporter.evaluation(an_evaluation(2))
        reporter.steps([a_step(3)])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    AcceleratorState._reset_state(reset_partial_state=True)
    with a_reporter(config, resume_step=2) as reporter:
        assert read_lines(tmp_path) == [a_step(1), a_step(2), an_evaluation(2)]
        reporter.steps([a_step(3) | {"loss": 9.0}])
    assert read_lines(tmp_path) == [a_step(1), a_step(2), an_evaluation(2), a_step(3) | {"loss": 9.0}]


def test_a_fresh_run_begins_metrics_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 99}\n')
    with a_reporter(a_config(tmp_path)) as reporter:
        reporter.steps([a_step(1)])
    assert read_lines(tmp_path) == [a_step(1)]


def test_a_metrics_file_that_is_something_else_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a metrics record"):
        truncate_metrics(path, 1)
    assert path.read_text() == '{"step": 1}\nnot json\n{"step": 2}\n'


def test_the_reporter_refuses_what_would_mislead(tmp_path: Path) -> None:
    with a_reporter(a_config(tmp_path)) as reporter:
        with pytest.raises(ValueError, match="not a declared metric"):
            reporter.steps([{"step": 1, "lost": 1.0}])
        reporter.steps([a_step(2)])
        with pytest.raises(ValueError, match="after step 2"):
            reporter.steps([a_step(2)])
        with pytest.raises(ValueError, match="evaluation of step 1"):
            reporter.evaluation(an_evaluation(1))
        import torch

        with pytest.raises(TypeError, match="plain number"):
            reporter.steps([{"step": 3, "loss": torch.tensor(1.0)}])  # type: ignore[dict-item]


def test_wandb_offline_holds_the_same_numbers_and_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "first"
    config = a_config(
        folder, "--use_wandb", "--wandb_project", "project", "--wandb_run_name", "a name", "--learning_rate", "3e-4"
    )
    check_trackers(config)
    with a_reporter(config) as reporter:
        # Enough steps for the file to run over a block of 32 KiB, where records are split.
        steps = [a_step(step) for step in range(1, TOTAL_STEPS + 1)]
        reporter.steps(steps[:20])
        reporter.steps(steps[20:])
        reporter.evaluation(an_evaluation(TOTAL_STEPS))
        reporter.finish({})
    wandb.teardown()  # W&B's service writes the file behind our back; a process that ends waits for it, and so does this.
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    stored, history, last = read_wandb(file)

    by_step: dict[int, dict[str, Any]] = {}
    for record in read_lines(folder):
        by_step.setdefault(record["step"], {}).update(record)
    numbers = [{key: value for key, value in record.items() if not key.startswith("_")} for record in history]
    assert numbers == list(by_step.values())
    assert [record["_step"] for record in history] == list(by_step)

    expected = json.loads(json.dumps({**config.to_dict(), **RUN_INFO}))
    assert {key: stored[key] for key in expected} == expected
    assert stored["optim"]["learning_rate"] == 3e-4
    assert last.exit_code == 0


def without_wandb_variables() -> dict[str, str]:
    """The environment for a process with a W&B of its own: W&B tells child processes to share their parent's service."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "NETRC"))}


def test_a_run_that_fails_is_marked_as_failed_on_wandb(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from llm_fp8.errors import UserError, run_script
from tests.cpu.test_report import a_config, a_reporter, a_step

def main():
    with a_reporter(a_config(Path({str(tmp_path)!r}), "--use_wandb")) as reporter:
        reporter.steps([a_step(1)])
        raise UserError("the loss is not finite.")

run_script(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=without_wandb_variables() | {"WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2 and "error: the loss is not finite." in done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    _, history, last = read_wandb(file)
    assert [record["step"] for record in history] == [1]
    assert last.exit_code != 0


def test_tensorboard_holds_the_same_numbers_also_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = a_config(tmp_path, "--report_to", "tensorboard")
    check_trackers(config)
    with a_reporter(config) as reporter:
        reporter.steps([a_step(1), a_step(2), a_step(3)])
    AcceleratorState._reset_state(reset_partial_state=True)
    with a_reporter(config, resume_step=2) as reporter:
        reporter.steps([a_step(3) | {"loss": 9.0}, a_step(4)])
        reporter.evaluation(an_evaluation(4))

    (folder,) = {file.parent for file in tmp_path.glob("tensorboard/*/events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    written = read_lines(tmp_path)
    for key in {key for record in written for key in record}:
        expected = {record["step"]: record[key] for record in written if key in record}
        found = {event.step: event.value for event in events.Scalars(key)}
        assert found == pytest.approx(expected, rel=1e-6), key
    assert {event.value for event in events.Scalars("loss") if event.step == 3} == {9.0}
    hparams = [file.read_text() for file in tmp_path.glob("tensorboard/**/hparams.yml")]
    assert len(hparams) == 2 and all("optim.learning_rate: 0.001" in text for text in hparams)
    assert "precision.effective.compute: bf16" in hparams[0]


def check_in_a_bare_home(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `check_trackers` in a process of its own, as a user without any W&B login."""
    code = (
        "import sys; from llm_fp8.config import parse_config; from llm_fp8.errors import run_script; "
        "from llm_fp8.report import check_trackers; "
        "run_script(lambda: check_trackers(parse_config(sys.argv[1:])) or 0)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=home,
        env={**without_wandb_variables(), "HOME": str(home), "PYTHONPATH": str(REPOSITORY), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,  # a key and no network must not hang
    )


def test_wandb_without_a_login_is_one_sentence_with_the_commands(tmp_path: Path) -> None:
    done = check_in_a_bare_home(tmp_path, "--use_wandb")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "--use_wandb" in line and "'wandb login'" in line and "WANDB_MODE=offline" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("environment", [{"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "0" * 40}], ids=["offline", "key"])
def test_wandb_that_can_work_passes(tmp_path: Path, environment: dict[str, str]) -> None:
    done = check_in_a_bare_home(tmp_path, "--use_wandb", **environment)
    assert done.returncode == 0, done.stderr


def test_only_the_first_process_is_asked_for_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("llm_fp8.report._check_wandb", lambda flag: pytest.fail("looked for a login"))
    check_trackers(a_config(tmp_path, "--use_wandb"))


def test_trackers_that_nobody_asked_for_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_fp8.report.package_version", lambda name: pytest.fail(f"looked for {name}"))
    check_trackers(a_config(tmp_path))


def test_a_wandb_key_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    done = check_in_a_bare_home(tmp_path, "--report_to", "all", WANDB_API_KEY="short")
    assert done.returncode == 2
    assert "--report_to all: the stored W&B login is not usable" in done.stderr


def test_wandb_that_is_not_installed_is_named_even_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """A folder `wandb`, as W&B leaves it, imports as an empty package; an interpreter without site-packages has no other."""
    (tmp_path / "wandb").mkdir()
    code = (
        "import sys, importlib.metadata as m; from llm_fp8 import report; from llm_fp8.errors import run_script; "
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; "
        "run_script(lambda: report._check_wandb('--use_wandb') or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "'pip install wandb'" in done.stderr


def test_medians_leave_the_first_steps_out() -> None:
    slow_start = [{"step": n, "step_time_s": 5.0, "tokens_per_s": 10.0} for n in range(1, 11)]
    steady = [{"step": 10 + n, "step_time_s": 0.1 * n, "tokens_per_s": 100.0 * n} for n in range(1, 16)]
    summary = throughput_summary(slow_start + steady)
    assert summary == pytest.approx(
        {"num_steps_measured": 15, "num_steps_left_out": 10, "median_step_time_s": 0.8, "median_tokens_per_s": 800.0}
    )
    short = throughput_summary(steady[:4])
    assert (short["num_steps_measured"], short["num_steps_left_out"]) == (2, 2)
    assert short["median_tokens_per_s"] == pytest.approx(350.0)
    assert throughput_summary([]) == {"num_steps_measured": 0, "num_steps_left_out": 0}


def test_a_pipe_gets_a_plain_line_every_log_every_steps() -> None:
    out = io.StringIO()
    display = ProgressDisplay(total_steps=25, log_every=10, console=Console(file=out, force_terminal=False, width=40))
    for step in range(1, 26):
        display.step(a_step(step))
    display.print("[not markup] " + "x" * 100)
    display.close()
    lines = out.getvalue().splitlines()
    assert [line.partition("  loss")[0] for line in lines[:-1]] == ["step  1/25", "step 10/25", "step 20/25", "step 25/25"]
    assert lines[1] == format_step(a_step(10), 25, 15 * 0.25)
    assert lines[-1] == "[not markup] " + "x" * 100
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_bar_and_lines_above_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    display = ProgressDisplay(total_steps=25, first_step=10, log_every=10, console=console)
    display.step(a_step(11))
    display.print("a line")
    display.close()
    display.close()
    assert "step 11/25  loss 0.2727" in out.getvalue()
    assert "a line" in out.getvalue()


def test_a_narrow_terminal_keeps_the_bar_and_all_figures() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    display = ProgressDisplay(total_steps=25, log_every=10, console=console)
    display.step({**a_step(12), "peak_memory_gib": 41.2})
    display.close()
    assert "\u2501" * 7 in out.getvalue()
    assert "GiB" in out.getvalue() and "left" in out.getvalue()


def test_the_line_of_a_step_leaves_out_what_is_not_there() -> None:
    full = {"step": 7, "loss": 1.23456, "grad_norm": 0.5, "learning_rate": 1e-5, "tokens_per_s": 18912.3, "model_tflops": 867.4}
    text = "step   7/100  loss 1.2346  grad norm 0.5  lr 1.00e-05  18,912 tokens/s  867 TFLOP/s  41.2 GiB  1:02:03 left"
    assert format_step(full | {"peak_memory_gib": 41.23}, 100, 3723.2) == text
    assert format_step({"step": 7, "loss": 1.0}, 100, None) == "step   7/100  loss 1.0000"
