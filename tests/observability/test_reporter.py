"""The reporter. The tests read the reported numbers back from every file and tracker."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
from pathlib import Path
from unittest import mock

import pytest
import yaml
from accelerate import Accelerator
from accelerate.tracking import WandBTracker

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.observability import trackers
from llm_fp8.observability.metrics import throughput_summary
from llm_fp8.observability.reporter import ProgressDisplay, RunReporter, truncate_metrics
from llm_fp8.observability.trackers import LABELS, require_trackers, require_wandb_login
from llm_fp8.utils.errors import UserError
from tests.support.made_up_runs import PROVENANCE, precision_of
from tests.support.small import records, reset_accelerator
from tests.support.wandb_file import only_wandb_run, wandb_runs

RUN_SECTIONS = {
    "precision": precision_of("mxfp8", effective="delayed"),
    "effective": {"sharding_mode": "fsdp_full", "num_processes": 4, "tokens_per_step": 4096},
    "model": {"location": "here", "num_parameters": 1234},
    "data": {"num_rows": 10},
}

TOTAL_STEPS = 40


def step_record(step: int) -> dict[str, float]:
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


def make_config(folder: Path, *arguments: str) -> Config:
    return parse_config(["--output_dir", str(folder), *arguments])


def make_reporter(config: Config, resume_step: int = 0) -> RunReporter:
    is_main, folder = Accelerator(cpu=True).is_main_process, Path(config.run.output_dir)
    reporter = RunReporter(is_main, config, folder, TOTAL_STEPS, resume_step, resume_step >= TOTAL_STEPS)
    reporter.start_trackers({"config": config.to_dict(), **RUN_SECTIONS, "provenance": PROVENANCE})
    return reporter


def report_steps(reporter: RunReporter, steps: list[dict[str, float]]) -> None:
    for record in steps:
        reporter.step(record)


def evaluation_record(step: int) -> dict[str, float]:
    return {"step": step, "eval_loss": 2.0, "eval_perplexity": math.exp(2.0)}


def test_metrics_and_summary_have_every_reported_number(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run")
    with make_reporter(config) as reporter:
        report_steps(reporter, [step_record(1), step_record(2)])
        reporter.evaluation(evaluation_record(2))
        # Each line is on disk at once, so a killed run loses none.
        assert records(tmp_path / "run") == [step_record(1), step_record(2), evaluation_record(2)]
        reporter.step(step_record(3))
        returned = reporter.finish({"stopped": "end of data"})
    assert records(tmp_path / "run") == [step_record(1), step_record(2), evaluation_record(2), step_record(3)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == returned
    assert (summary["steps"], summary["total_steps"], summary["stopped"]) == (3, TOTAL_STEPS, "end of data")
    assert summary["last_step"] == step_record(3) and summary["last_evaluation"] == evaluation_record(2)


@pytest.mark.parametrize(
    ("step", "kept"), [(0, []), (10, ["certificate"]), (TOTAL_STEPS, ["certificate", "exact_match"])]
)
def test_results_of_an_earlier_model_are_removed(tmp_path: Path, step: int, kept: list[str]) -> None:
    for name in ("summary", "certificate", "exact_match"):
        (tmp_path / f"{name}.json").write_text("{}")
    make_reporter(make_config(tmp_path), resume_step=step)
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == kept


def test_run_outlives_its_metrics_file_but_not_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reporter = make_reporter(make_config(folder))
    (folder / "run.json").write_text("{}")
    for step in (1, 2, 3):
        if step == 2:
            (folder / "metrics.jsonl").unlink()
        reporter.step(step_record(step))
    assert [record["step"] for record in records(folder)] == [3]
    folder.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="--output_dir"):
        reporter.step(step_record(4))


def test_resumed_run_drops_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with make_reporter(config) as reporter:
        report_steps(reporter, [step_record(1), step_record(2)])
        reporter.evaluation(evaluation_record(2))
        reporter.step(step_record(3))
        reporter.finish({})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    reset_accelerator()
    with make_reporter(config, resume_step=2) as reporter:
        assert records(tmp_path) == [step_record(1), step_record(2), evaluation_record(2)]
        assert not (tmp_path / "summary.json").exists(), "with it, a run killed now would look finished"
        reporter.step(step_record(3) | {"loss": 9.0})
    assert records(tmp_path) == [step_record(1), step_record(2), evaluation_record(2), step_record(3) | {"loss": 9.0}]


def test_summary_uses_only_the_steps_since_the_resume(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with make_reporter(config) as reporter:
        report_steps(reporter, [step_record(step) | {"energy_j": 1.0} for step in range(1, 5)])
    reset_accelerator()
    steps = [step_record(step) | {"energy_j": float(step)} for step in range(3, 9)]
    with make_reporter(config, resume_step=2) as reporter:
        report_steps(reporter, steps[:3])
        reporter.evaluation(evaluation_record(5))
        report_steps(reporter, steps[3:])
        summary = reporter.finish({})
    assert summary["throughput"] == throughput_summary(steps) and summary["throughput"]["num_steps_left_out"] == 3
    assert summary["energy_j"] == 8.0 and summary["last_step"] == steps[-1]


def test_invalid_metrics_file_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(UserError, match="metrics.jsonl"):
        truncate_metrics(path, 1)
    assert path.read_text() == '{"step": 1}\nnot json\n{"step": 2}\n'


@pytest.mark.slow
def test_offline_wandb_run_has_the_same_numbers_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "first"
    config = make_config(
        folder, "--use_wandb", "--wandb_project", "project", "--wandb_run_name", "a name", "--learning_rate", "3e-4"
    )
    with make_reporter(config) as reporter:
        # Enough steps for more than one block of 32 KiB, because the file splits records between blocks.
        steps = [step_record(step) for step in range(1, TOTAL_STEPS + 1)]
        report_steps(reporter, steps[:20])
        report_steps(reporter, steps[20:])
        reporter.evaluation(evaluation_record(TOTAL_STEPS))
        reporter.finish({"stopped_by": None, "certificate": {"verdict": "fp8", "gemms": {"fp8": 7}}})
    # W&B's own process writes the file. Wait until it ends.
    wandb.teardown()
    stored = only_wandb_run(folder)

    numbers = [{key: value for key, value in record.items() if not key.startswith("_")} for record in stored.history]
    assert numbers == records(folder)

    assert (stored.project, stored.name, stored.group, stored.job_type) == ("project", "a name", "", "train")
    options = json.loads(json.dumps(config.to_dict()))
    assert {section: stored.config[section] for section in options} == options
    assert stored.config["effective"] == {
        **RUN_SECTIONS["effective"],
        **{key: RUN_SECTIONS[key] for key in ("precision", "model", "data")},
    }
    assert stored.config["provenance"] == PROVENANCE
    assert {key: stored.config[key] for key in LABELS} == {
        "precision_name": "fp8 delayed",
        "precision_requested": "fp8 mxfp8",
        "model_short_name": "embedded",
        "sharding_mode": "fsdp_full",
        "gpu_name": "NVIDIA H200",
        "num_processes": 4,
        "optimizer_name": "adamw_master",
        "num_parameters": 1234,
        "tokens_per_step": 4096,
        "git_commit": "0" * 40,
        "torch_version": "2.11.0",
        "transformer_engine_version": "2.20.2",
    }
    assert stored.axes == {"step": "", "tokens_seen": "", "*": "step"}
    summary = json.loads((folder / "summary.json").read_text())
    throughput = {key: stored.summary[key] for key in summary["throughput"]}
    assert throughput == summary["throughput"] and throughput["median_tokens_per_s"] > 1000
    assert stored.summary["certificate/verdict"] == "fp8" and stored.summary["certificate/gemms/fp8"] == 7
    assert stored.summary["loss"] == stored.history[-2]["loss"] and "stopped_by" not in stored.summary
    assert stored.exit_code == 0


@pytest.mark.slow
def test_resumed_run_continues_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    config = make_config(tmp_path, "--use_wandb")
    for first, last in ((1, 8), (5, 6), (5, 10)):  # killed after step 8, and again after it repeated steps 5 and 6
        reset_accelerator()
        with contextlib.suppress(KeyboardInterrupt), make_reporter(config, first - 1) as reporter:
            report_steps(reporter, [step_record(step) for step in range(first, last + 1)])
            reporter.evaluation(evaluation_record(last))
            if last < 10:
                raise KeyboardInterrupt
            reporter.finish({})
        wandb.teardown()
    runs = wandb_runs(tmp_path)
    assert len({run.id for run in runs}) == 1 and len(runs) == 3
    rows = [row for run in runs for row in run.history]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 11)), "each step once"
    assert [row["step"] for row in rows if "eval_loss" in row] == [8, 10]


def test_failure_of_wandb_does_not_end_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Logging to wandb, and writing wandb's log file, fail as on a full disk. Neither may print a traceback."""
    import wandb

    def full(*_: object, **__: object) -> None:
        logging.getLogger("full").info("words")
        raise OSError(errno.ENOSPC, "No space left on device")

    handler = logging.FileHandler("/dev/full")
    logging.getLogger("full").addHandler(handler)
    logging.getLogger("full").setLevel("INFO")
    started = mock.patch.object(wandb, "init", lambda **_: mock.MagicMock(id="abc", log=full))
    with started, mock.patch.object(WandBTracker, "store_init_configuration"):
        reporter = make_reporter(make_config(tmp_path, "--use_wandb"))
    with reporter:
        report_steps(reporter, [step_record(1), step_record(2)])
        assert reporter.finish({})["steps"] == 2
    handler.stream = None
    printed = capfd.readouterr()
    assert printed.out.count("wandb") == 1 and "Logging error" not in printed.err and len(records(tmp_path)) == 2


@pytest.mark.slow
def test_wandb_login_is_checked_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(UserError, match="--use_wandb.*wandb login"):
        require_wandb_login("--use_wandb")
    for name, value in (("WANDB_API_KEY", "short"), ("WANDB_MODE", "foo")):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="--use_wandb"):
            patch.setenv(name, value)
            require_wandb_login("--use_wandb")
    for name, value in (("WANDB_API_KEY", "0" * 40), ("WANDB_MODE", "offline")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            require_wandb_login("--use_wandb")


def test_tensorboard_has_options_logged_steps_and_evaluations_in_one_run(tmp_path: Path) -> None:
    """The run is killed after step 6 and resumed. TensorBoard's own reader then reads both parts."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config(tmp_path, "--report_to", "tensorboard,none", "--log_every", "2")
    for first, last in ((1, 6), (5, 9)):
        reset_accelerator()
        with contextlib.suppress(KeyboardInterrupt), make_reporter(config, first - 1) as reporter:
            report_steps(reporter, [step_record(step) for step in range(first, last + 1)])
            if last == 6:
                raise KeyboardInterrupt
            reporter.evaluation(evaluation_record(last))
            reporter.finish({})
    folder = tmp_path / "tensorboard" / "llm-fp8"
    events = reader.EventAccumulator(str(folder)).Reload()
    curves = {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}
    assert curves["loss"] == [(step, pytest.approx(3.0 / step)) for step in (2, 4, 6, 8)], "each step once"
    assert curves["eval_loss"] == [(9, 2.0)] and "step" not in curves
    options = yaml.safe_load(next(folder.glob("*/hparams.yml")).read_text())
    assert options["run.log_every"] == 2 and options["precision_name"] == "fp8 delayed"


def test_unknown_or_missing_tracker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--report_to: 'tensorbord' is not among .*tensorboard"):
        require_trackers(("tensorbord",))
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    with pytest.raises(UserError, match="--report_to: mlflow .* pip install mlflow"):
        require_trackers(("mlflow",))


def test_log_file_has_a_plain_line_every_log_every_steps(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(total_steps=25, log_every=10)
    for step in range(1, 26):
        display.step(step_record(step))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  loss")[0] for line in lines] == [f"step {step:2}/25" for step in (1, 10, 20, 25)]
    assert "left" not in lines[0] and lines[1].endswith("0:00:04 left")


def test_medians_ignore_the_first_steps() -> None:
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
