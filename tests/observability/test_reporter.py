"""Numbers handed to the reporter, read back from every place they should have reached, with each tracker's own
reader.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llm_fp8.observability.progress import ProgressDisplay, format_evaluation, format_step
from llm_fp8.observability.reporter import truncate_metrics
from llm_fp8.observability.step_stats import throughput_summary
from llm_fp8.observability.tracker_labels import LABELS, run_tags
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import REPOSITORY
from tests.support.reports import PROVENANCE, RUN_SECTIONS, TOTAL_STEPS, a_config, a_reporter, a_step
from tests.support.small import forget_accelerator, records
from tests.support.wandb_file import the_wandb_run, wandb_runs
from tests.support.wandb_server import TAKES_RUNS, served


def an_evaluation(step: int) -> dict[str, float]:
    return {"step": step, "eval_loss": 2.0, "eval_perplexity": math.exp(2.0)}


def test_metrics_and_summary_hold_what_was_reported(tmp_path: Path) -> None:
    config = a_config(tmp_path / "run")
    with a_reporter(config) as reporter:
        reporter.steps([a_step(1), a_step(2)])
        reporter.evaluation(an_evaluation(2))
        # A line is on disk as soon as it is reported: a run that is killed loses nothing.
        assert records(tmp_path / "run") == [a_step(1), a_step(2), an_evaluation(2)]
        reporter.steps([a_step(3)])
        returned = reporter.finish({"stopped": "end of data"})
    assert records(tmp_path / "run") == [a_step(1), a_step(2), an_evaluation(2), a_step(3)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == returned
    assert (summary["steps"], summary["total_steps"], summary["stopped"]) == (3, TOTAL_STEPS, "end of data")
    assert summary["last_step"] == a_step(3) and summary["last_evaluation"] == an_evaluation(2)


def test_the_summary_does_not_need_the_name_of_the_metrics(tmp_path: Path) -> None:
    """Somebody tidies up while the run trains: it ends as ever, and what it reports behind the summary is kept too."""
    with a_reporter(a_config(tmp_path)) as reporter:
        reporter.steps([a_step(step) for step in range(1, 31)])
        (tmp_path / "metrics.jsonl").rename(tmp_path / "moved.jsonl")
        throughput = reporter.finish({})["throughput"]
        reporter.steps([a_step(31)])
    assert throughput == throughput_summary([a_step(step) for step in range(1, 31)])
    assert [json.loads(line)["step"] for line in (tmp_path / "moved.jsonl").read_text().splitlines()] == list(
        range(1, 32)
    )


def test_a_resumed_run_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    with a_reporter(config) as reporter:
        reporter.steps([a_step(1), a_step(2)])
        reporter.evaluation(an_evaluation(2))
        reporter.steps([a_step(3)])
        reporter.finish({})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    forget_accelerator()
    with a_reporter(config, resume_step=2) as reporter:
        assert records(tmp_path) == [a_step(1), a_step(2), an_evaluation(2)]
        assert not (tmp_path / "summary.json").exists(), "killed now, the run would pass for a finished one"
        reporter.steps([a_step(3) | {"loss": 9.0}])
    assert records(tmp_path) == [a_step(1), a_step(2), an_evaluation(2), a_step(3) | {"loss": 9.0}]


def test_the_summary_is_made_from_the_steps_of_its_own_process(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    with a_reporter(config) as reporter:
        reporter.steps([a_step(step) | {"energy_j": 1.0} for step in range(1, 5)])
    forget_accelerator()
    own = [a_step(step) | {"energy_j": float(step)} for step in range(3, 9)]
    with a_reporter(config, resume_step=2) as reporter:
        reporter.steps(own[:3])
        reporter.evaluation(an_evaluation(5))
        reporter.steps(own[3:])
        summary = reporter.finish({})
    assert summary["throughput"] == throughput_summary(own) and summary["throughput"]["num_steps_left_out"] == 3
    assert summary["energy_j"] == 8.0 and summary["last_step"] == own[-1]


def test_the_last_values_may_be_of_an_earlier_process(tmp_path: Path) -> None:
    """A run that was killed in its export has no step left, one that is stopped again perhaps no evaluation."""
    config = a_config(tmp_path)
    with a_reporter(config) as reporter:
        reporter.steps([a_step(1), a_step(2)])
        reporter.evaluation(an_evaluation(2))
        reporter.steps([a_step(3), a_step(4)])
    forget_accelerator()
    with a_reporter(config, resume_step=3) as reporter:
        summary = reporter.finish({})
    assert (summary["steps"], summary["last_step"], summary["last_evaluation"]) == (3, a_step(3), an_evaluation(2))
    assert summary["throughput"] == {"num_steps_measured": 0, "num_steps_left_out": 0}


def test_a_fresh_run_begins_metrics_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 99}\n')
    with a_reporter(a_config(tmp_path)) as reporter:
        reporter.steps([a_step(1)])
    assert records(tmp_path) == [a_step(1)]


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


@pytest.mark.slow
def test_wandb_offline_holds_the_same_numbers_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "first"
    config = a_config(
        folder, "--use_wandb", "--wandb_project", "project", "--wandb_run_name", "a name", "--learning_rate", "3e-4"
    )
    with a_reporter(config) as reporter:
        # Enough steps for the file to run over a block of 32 KiB, where records are split.
        steps = [a_step(step) for step in range(1, TOTAL_STEPS + 1)]
        reporter.steps(steps[:20])
        reporter.steps(steps[20:])
        reporter.evaluation(an_evaluation(TOTAL_STEPS))
        reporter.finish({"stopped_by": None, "certificate": {"verdict": "fp8", "gemms": {"fp8": 7}}})
    # W&B's service writes the file behind our back; a process that ends waits for it, and so does this.
    wandb.teardown()
    stored = the_wandb_run(folder)

    by_step: dict[int, dict[str, Any]] = {}
    for record in records(folder):
        by_step.setdefault(record["step"], {}).update(record)
    numbers = [{key: value for key, value in record.items() if not key.startswith("_")} for record in stored.history]
    assert numbers == list(by_step.values())
    assert [record["_step"] for record in stored.history] == list(by_step)

    assert (stored.project, stored.name, stored.group, stored.job_type) == ("project", "a name", "first", "train")
    assert stored.tags == ("fp8 delayed", "embedded", "fsdp_full", "NVIDIA H200")
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
        "git_commit": "abc",
        "torch_version": "2.11.0",
        "transformer_engine_version": "2.20.2",
    }
    assert stored.axes == {"step": "", "tokens_seen": "", "*": "step"}
    summary = json.loads((folder / "summary.json").read_text())
    throughput = {key: stored.summary[key] for key in summary["throughput"]}
    assert throughput == summary["throughput"] and throughput["median_tokens_per_s"] > 1000
    assert stored.summary["certificate/verdict"] == "fp8" and stored.summary["certificate/gemms/fp8"] == 7
    assert stored.summary["loss"] == stored.history[-1]["loss"] and "stopped_by" not in stored.summary
    assert stored.exit_code == 0


def without_wandb_variables() -> dict[str, str]:
    """The environment for a process with a W&B of its own: W&B tells child processes to share their parent's
    service.
    """
    return {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "NETRC"))}


RESUMES = """
import sys
from pathlib import Path
from tests.support.reports import a_config, a_reporter, a_step

an_evaluation = lambda step: {"step": step, "eval_loss": 2.0}
config = a_config(Path(sys.argv[1]), "--use_wandb")
steps, resume_step = range(int(sys.argv[2]), int(sys.argv[3]) + 1), int(sys.argv[2]) - 1
with a_reporter(config, resume_step) as reporter:
    if "evaluates first" in sys.argv:
        reporter.evaluation(an_evaluation(resume_step))
    reporter.steps([a_step(step) for step in steps])
    reporter.evaluation(an_evaluation(steps[-1]))
    if "killed" in sys.argv:
        raise SystemExit("killed")
    reporter.finish({})
"""
"""One start of a training: the folder, its first and last step."""


def start_again(python: str, folder: Path, *words: object, **environment: str) -> None:
    done = subprocess.run(
        [python, "-c", RESUMES, str(folder), *map(str, words)],
        cwd=REPOSITORY,
        env=without_wandb_variables() | {"WANDB_SILENT": "true"} | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == ("killed" in words), done.stderr


@pytest.mark.slow
def test_a_resumed_training_continues_its_wandb_run_offline(tmp_path: Path, warm_python: str) -> None:
    start_again(warm_python, tmp_path, 1, 8, "killed", WANDB_MODE="offline")
    start_again(warm_python, tmp_path, 5, 6, "killed", WANDB_MODE="offline")  # it takes steps again, and no others
    start_again(warm_python, tmp_path, 5, 10, WANDB_MODE="offline")
    start_again(warm_python, tmp_path, 11, 12, "evaluates first", WANDB_MODE="offline")
    runs = wandb_runs(tmp_path)
    assert len({run.id for run in runs}) == 1 and len(runs) == 4
    rows = [row for run in runs for row in run.history]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13)), "each step once"
    assert [row["step"] for row in rows if "eval_loss" in row] == [8, 10, 10, 12]
    own_steps = [row["_step"] for row in rows]
    assert own_steps == sorted(set(own_steps)), "W&B takes no row of an earlier step"
    assert all(row["step"] == 10 for row in rows if "eval_loss" in row and "loss" not in row)

    start_again(warm_python, tmp_path / "other", 1, 2, WANDB_MODE="offline", WANDB_RUN_ID="mine")
    (other,) = wandb_runs(tmp_path / "other")
    assert other.id == "mine"


@pytest.mark.parametrize("run_id", ["", "a/b", " a", "a\x00b", "x" * 65])
def test_a_damaged_id_of_the_wandb_run_is_named(tmp_path: Path, run_id: str) -> None:
    (tmp_path / "wandb_run.json").write_text(json.dumps({"id": run_id, "last_step": 4}))
    with pytest.raises(UserError, match=f"{tmp_path}/wandb_run.json: id '.*' is no id of a W&B run"):
        a_reporter(a_config(tmp_path, "--use_wandb"), resume_step=4)


@pytest.mark.slow
def test_a_resumed_training_continues_where_the_rows_on_wandb_s_server_end(tmp_path: Path, warm_python: str) -> None:
    """The killed process had taken 8 steps and sent 7 of them."""
    tail = {"historyLineCount": 7, "historyTail": json.dumps([json.dumps({"_step": 7, "step": 7})])}
    known = {"name": "run", "displayName": "run", "summaryMetrics": "{}", "config": "{}", "tags": [], "notes": ""}
    counts = {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": json.dumps({"t": 1})}
    model = {"name": "llm-fp8", "entity": {"name": "team"}, "bucket": {**known, **counts, **tail}}
    with served({"RunResumeStatus": (200, {"data": {"model": model}}), **TAKES_RUNS}) as (url, server):
        online = {"WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40}
        start_again(warm_python, tmp_path, 1, 8, "killed", **online)
        start_again(warm_python, tmp_path, 5, 10, **online)
    asked = [request["variables"]["name"] for request in server.requests if "RunResumeStatus" in request["query"]]
    assert asked[-1] == json.loads((tmp_path / "wandb_run.json").read_text())["id"]
    rows = wandb_runs(tmp_path, online=True)[1].history
    assert [row["step"] for row in rows] == [row["_step"] for row in rows] == [8, 9, 10]


@pytest.mark.slow
def test_a_run_that_fails_is_marked_as_failed_on_wandb(tmp_path: Path, warm_python: str) -> None:
    code = f"""
from pathlib import Path
from llm_fp8.utils.errors import UserError, run_script
from tests.support.reports import a_config, a_reporter, a_step

def main():
    with a_reporter(a_config(Path({str(tmp_path)!r}), "--use_wandb")) as reporter:
        reporter.steps([a_step(1)])
        raise UserError("the loss is not finite.")

run_script(main)
"""
    done = subprocess.run(
        [warm_python, "-c", code],
        cwd=REPOSITORY,
        env=without_wandb_variables() | {"WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2 and "error: the loss is not finite." in done.stderr
    stored = the_wandb_run(tmp_path)
    assert [record["step"] for record in stored.history] == [1]
    assert stored.exit_code


@pytest.mark.slow
@pytest.mark.parametrize("answers_at_start", [False, True], ids=["never there", "gone during the run"])
def test_a_run_does_not_depend_on_wandb_s_server(tmp_path: Path, warm_python: str, answers_at_start: bool) -> None:
    code = f"""
import os
from pathlib import Path
from llm_fp8.observability import reporter as module
from tests.support.reports import a_config, a_reporter, a_step
from tests.support.wandb_server import TAKES_RUNS, served

module.WANDB_START_S, module.WANDB_END_S = 1.0, 3.0
config = a_config(Path({str(tmp_path)!r}), "--use_wandb")
if {answers_at_start}:
    with served(TAKES_RUNS) as (os.environ["WANDB_BASE_URL"], _):
        reporter = a_reporter(config)
else:
    reporter = a_reporter(config)
with reporter:
    reporter.steps([a_step(1), a_step(2)])
    reporter.finish({{}})
"""
    done = subprocess.run(
        [warm_python, "-c", code],
        cwd=REPOSITORY,
        env=without_wandb_variables() | {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in records(tmp_path)] == [1, 2] and (tmp_path / "summary.json").exists()
    assert ("goes on offline: send it later by 'wandb sync" in done.stderr) == (not answers_at_start)
    assert the_wandb_run(tmp_path, online=answers_at_start).history[-1]["step"] == 2


LOGINS: dict[str, tuple[str, dict[str, str], str]] = {
    "logged out": (
        "--use_wandb",
        {},
        "--use_wandb: there is no W&B login on this machine; run 'wandb login', or set WANDB_MODE=offline",
    ),
    "offline": ("--use_wandb", {"WANDB_MODE": "offline"}, ""),
    "key": ("--use_wandb", {"WANDB_API_KEY": "0" * 40}, ""),
    "no id": ("--use_wandb", {"WANDB_MODE": "offline", "WANDB_RUN_ID": ""}, "--use_wandb: WANDB_RUN_ID '' is no id"),
    "no mode": ("--use_wandb", {"WANDB_MODE": "foo"}, "--use_wandb: W&B refuses a setting, see the WANDB_ variables"),
    "no key": ("--use_wandb", {"WANDB_API_KEY": "short"}, "--use_wandb: the stored W&B login is not usable"),
}
"""Option and environment of a user without any stored login -> how the sentence begins that `require_wandb_login`
ends on, empty for none.
"""


@pytest.mark.slow
def test_whether_wandb_can_work_is_known_before_anything_is_trained(tmp_path: Path) -> None:
    """In a process with a home and a W&B of its own, one after the other."""
    code = """
import json, os, sys
from llm_fp8.config.parser import parse_config
from llm_fp8.config.validation import packages_needed
from llm_fp8.observability.reporter import require_wandb_login
from llm_fp8.utils.errors import UserError

said = {}
for name, (option, environment, _) in json.loads(sys.argv[1]).items():
    os.environ.update(environment)
    try:
        require_wandb_login(packages_needed(parse_config([option]), "cpu")["wandb"])
        said[name] = ""
    except UserError as error:
        said[name] = str(error)
    for variable in environment:
        del os.environ[variable]
print(json.dumps(said))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(LOGINS)],
        cwd=tmp_path,
        env={**without_wandb_variables(), "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,  # a key and no network must not hang
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.keys() == LOGINS.keys()
    for name, (_, _, sentence) in LOGINS.items():
        assert said[name].startswith(sentence) and bool(said[name]) == bool(sentence), (name, said[name])


@pytest.mark.slow
def test_wandb_that_is_not_installed_is_named_even_beside_a_folder_of_its_name(tmp_path: Path) -> None:
    """A folder `wandb`, as W&B leaves it, imports as an empty package; an interpreter without site-packages has no
    other.
    """
    (tmp_path / "wandb").mkdir()
    code = (
        "import sys; from llm_fp8.observability.tracker_labels import wandb_login_state; from llm_fp8.utils.errors "
        "import run_script; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; "
        "run_script(lambda: int(bool(wandb_login_state('--use_wandb'))))"
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
    assert [line.partition("  loss")[0] for line in lines[:-1]] == [
        "step  1/25",
        "step 10/25",
        "step 20/25",
        "step 25/25",
    ]
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


LONG_STEP = {
    "step": 100_000,
    "loss": 10.1234,
    "grad_norm": 0.0123,
    "learning_rate": 1e-5,
    "tokens_per_s": 1_117_704.0,
    "model_tflops": 1234.0,
    "peak_memory_gib": 128.1,
    "step_time_s": 0.4,
}


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_narrow_terminal_keeps_the_bar_and_the_line_of_a_step_in_one_line(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    display = ProgressDisplay(total_steps=100_000, log_every=10, console=console)
    display.step(LONG_STEP)
    display.close()
    (shown,) = {line.rstrip() for line in out.getvalue().splitlines() if "loss 10.1234" in line}
    assert "\u2501" * (width // 10) in shown and shown.endswith("0:00:00 left")
    assert len(shown.removeprefix("\x1b[2K")) <= width
    assert ("tokens/s" in shown) == (width >= 80) and ("GiB" in shown) == (width >= 100)


def test_the_line_of_a_step_fits_100_columns() -> None:
    text = format_step(LONG_STEP, 100_000, 36_000.0)
    assert len(text) <= 100
    assert text == "step 100000/100000  loss 10.1234  grad norm 0.0123  1,117,704 tokens/s  128.1 GiB  10:00:00 left"


def test_the_line_of_an_evaluation_fits_100_columns() -> None:
    plain = {"step": 100_000, "eval_loss": 10.12345, "eval_perplexity": 24_915.6, "eval_num_supervised_tokens": 9e6}
    assert format_evaluation(plain | {"eval_time_s": 1234.56}) == (
        "evaluation at step 100000: loss 10.1235  perplexity 2.492e+04  1,234.6 s"
    )
    answers = {"eval_exact_match": 0.1234, "eval_num_problems": 1000, "eval_generation_time_s": 1000.0}
    text = format_evaluation(plain | {"eval_time_s": 234.5} | answers)
    assert len(text) <= 100
    assert text.endswith("perplexity 2.492e+04  exact match 12.3% of 1,000  1,234.5 s")


def test_the_line_of_a_step_leaves_out_what_is_not_there() -> None:
    full = {
        "step": 7,
        "loss": 1.23456,
        "grad_norm": 0.5,
        "learning_rate": 1e-5,
        "tokens_per_s": 18912.3,
        "model_tflops": 867.4,
    }
    text = "step   7/100  loss 1.2346  grad norm 0.5  lr 1.00e-05  18,912 tokens/s  867 TFLOP/s  41.2 GiB  1:02:03 left"
    assert format_step(full | {"peak_memory_gib": 41.23}, 100, 3723.2, columns=160) == text
    assert format_step({"step": 7, "loss": 1.0}, 100, None) == "step   7/100  loss 1.0000"


def test_medians_of_energy_are_over_the_steps_that_have_it() -> None:
    steps: list[dict[str, float]] = [{"step": n, "step_time_s": 0.5} for n in range(1, 31)]
    for step, watts in ((15, 500.0), (25, 700.0), (30, 600.0)):
        steps[step - 1] |= {"gpu_power_w": watts, "energy_j_per_million_tokens": 2 * watts}
    summary = throughput_summary(steps)
    assert (summary["median_gpu_power_w"], summary["median_energy_j_per_million_tokens"]) == (600.0, 1200.0)
    assert "median_gpu_power_w" not in throughput_summary(steps[:14])


def test_the_summary_has_the_last_total_of_the_energy(tmp_path: Path) -> None:
    with a_reporter(a_config(tmp_path)) as reporter:
        reporter.steps([a_step(1) | {"energy_j": 10.0}, a_step(2) | {"energy_j": 30.0}, a_step(3)])
        assert reporter.finish({})["energy_j"] == 30.0


def test_tags_are_unique_short_and_end_with_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_TAGS", "paper,ddp")
    labels = {"precision_name": "bf16", "model_short_name": "m" * 80, "sharding_mode": "ddp", "gpu_name": "CPU"}
    assert run_tags(labels) == ["bf16", "m" * 64, "ddp", "CPU", "paper"]
