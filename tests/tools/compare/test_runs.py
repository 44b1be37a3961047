"""The comparison of runs that were really trained: the embedded model in bf16 and fp32, two seeds each, through the
script.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_fp8.tools.compare import cli
from llm_fp8.tools.compare.launch import claim_folder, plan_runs
from llm_fp8.tools.compare.report import compare
from llm_fp8.tools.compare.run_record import RunRecord, read_run_folder, read_wandb
from llm_fp8.utils.errors import UserError
from tests.support import small
from tests.support.made_up_runs import made_up_run
from tests.support.wandb_file import the_wandb_run

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "compare_performance.py"
TRAIN = (
    "--max_steps 8 --eval_every 4 --eval_batches 2 --batch_size 4 --max_seq_length 128 --num_of_samples 200 "
    "--no_export --use_wandb --eval_exact_match 4 --eval_max_new_tokens 4"
)
NAMES = ["bf16-seed1", "no-seed1", "bf16-seed2", "no-seed2"]


def script_says(python: str, *options: str, cwd: Path) -> tuple[int, str]:
    """Exit code and words of the script, called in this process; the runs that it starts with `python` are processes
    of their own.
    """
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.chdir(cwd)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        for name in [name for name in os.environ if "WANDB" in name and "SERVICE" in name]:
            patch.delenv(name)  # W&B in this process, which a run would otherwise join
        patch.setattr(cli, "usable_gpus", lambda given: [])
        patch.setattr(sys, "argv", [str(SCRIPT), *options])
        patch.setattr(sys, "executable", python)
        return cli.main(), said.getvalue()


def train_here(folder: Path, name: str) -> None:
    """One of the comparison's runs, by its own options but in this process, which saves most of its time."""
    plan = plan_runs(TRAIN, ["bf16", "no"], [1, 2], 1, folder)
    (run,) = [run for run in plan.runs if run.name == name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as train_fp8.py does, and as is compared
        assert small.train(*run.words, "--output_dir", plan.run_folder(run)) == 0


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """The output folder of a comparison, trained once for all worker processes of the test run; the script itself
    starts the last run.
    """
    own = tmp_path_factory.getbasetemp()
    base = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    with open(base / "trained.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not (base / "comparison" / "said.txt").exists():
            folder = base / "comparison"
            claim_folder(plan_runs(TRAIN, ["bf16"], [1], 1, folder))
            for name in NAMES[:-1]:
                train_here(folder, name)
            words = ["--train", TRAIN, "--arms", "bf16,no", "--seeds", "2", "--output", "comparison"]
            code, said = script_says(warm_python, *words, cwd=base)
            assert code == 0, said
            (folder / "said.txt").write_text(said)
    return base / "comparison"


def test_the_figures_are_those_of_the_runs_own_files(trained):
    said = (trained / "said.txt").read_text()
    assert said.count("finished earlier") == 3 and f"{NAMES[-1]}: started" in said
    comparison = json.loads((trained / "comparison.json").read_text())
    bf16, fp32 = comparison["arms"]
    assert (bf16["arm"], bf16["effective"], fp32["arm"], fp32["effective"]) == ("bf16", ["bf16"], "no", ["fp32"])
    assert bf16["seeds"] == fp32["seeds"] == [1, 2] and comparison["failures"] == []
    medians, finals = {}, {}
    for name in NAMES:
        lines = small.records(trained / "runs" / name)
        steps = [line for line in lines if "loss" in line]
        assert len(steps) == 8
        medians[name] = statistics.median(step["tokens_per_s"] for step in steps[4:])
        finals[name] = [line["eval_loss"] for line in lines if line["step"] == 8 and "eval_loss" in line][-1]
    assert bf16["tokens_per_s"]["value"] == pytest.approx((medians["bf16-seed1"] + medians["bf16-seed2"]) / 2)
    gaps = {str(seed): finals[f"no-seed{seed}"] - finals[f"bf16-seed{seed}"] for seed in (1, 2)}
    assert fp32["loss_gap"]["by_seed"] == pytest.approx(gaps)
    assert fp32["equal_loss_time"]["loss"] == "held-out" and fp32["peak_memory_gib"] is None
    assert fp32["answers"]["num_problems"] == 8, "four problems, two seeds"
    assert all(line in said for line in (*comparison["verdicts"]["no"]["sentences"], "comparison.html", "not measured"))


def test_the_same_seed_is_the_same_training_in_every_variant(trained):
    """Same rows, same first weights: the flags would say otherwise."""
    comparison = json.loads((trained / "comparison.json").read_text())
    assert [d for d in comparison["differences"] if d["effect"] != "note"] == []
    first = {name: small.records(trained / "runs" / name)[0] for name in NAMES}
    assert first["bf16-seed1"]["loss"] == pytest.approx(first["no-seed1"]["loss"], rel=0.01)
    assert first["bf16-seed1"]["tokens_seen"] == first["no-seed1"]["tokens_seen"] != first["no-seed2"]["tokens_seen"]


def test_given_again_finished_runs_stay_and_a_variant_that_cannot_run_is_reported(trained, tmp_path, warm_python):
    """In a copy, because it adds a variant."""
    copy = tmp_path / "comparison"
    subprocess.run(["cp", "-a", str(trained), str(copy)], check=True)
    before = {name: (copy / "runs" / name / "summary.json").stat().st_mtime_ns for name in NAMES}
    words = ["--train", TRAIN, "--arms", "bf16,no,current", "--seeds", "1", "--output", "comparison"]
    code, said = script_says(warm_python, *words, cwd=tmp_path)
    assert code == 1, said
    assert said.count("finished earlier") == 2 and said.count(": started") == 1
    assert before == {name: (copy / "runs" / name / "summary.json").stat().st_mtime_ns for name in NAMES}
    comparison = json.loads((copy / "comparison.json").read_text())
    (failure,) = comparison["failures"]
    assert failure["arm"] == "current" and "error: --mixed_precision fp8 needs an NVIDIA GPU" in failure["reason"]
    assert comparison["verdicts"]["current"]["conclusion"] == "failed" and comparison["arms"][0]["seeds"] == [1]
    page = (copy / "comparison.html").read_text()
    assert "needs an NVIDIA GPU" in page


class StandInRun:
    """What wandb.Api gives for a run, filled from what an offline run would send; stands in for the server alone."""

    def __init__(self, config: dict[str, Any], history: list[dict[str, Any]], state: str = "finished") -> None:
        self.config, self.state, self._history = config, state, history
        self.summary: dict[str, Any] = {}

    def scan_history(self) -> list[dict[str, Any]]:
        # The server gives rows with None for what a row lacks.
        keys = {key for row in self._history for key in row}
        return [{key: row.get(key) for key in keys} for row in self._history]


class StandInApi:
    """wandb.Api with one run."""

    def __init__(self, run: StandInRun) -> None:
        self._run = run

    def run(self, path: str) -> StandInRun:
        if path != "team/llm-fp8/abc":
            raise ValueError(f"Could not find run {path}")
        return self._run


def from_server(folder: Path) -> RunRecord:
    """What the server would tell of the run in this output folder."""
    stored = the_wandb_run(folder)
    return read_wandb("team/llm-fp8/abc", StandInApi(StandInRun(stored.config, stored.history)))


def test_a_run_of_the_server_tells_what_its_folder_tells(trained):
    for name in ("bf16-seed1", "no-seed2"):
        folder, online = read_run_folder(trained / "runs" / name), from_server(trained / "runs" / name)
        assert online.steps == folder.steps and online.evaluations == folder.evaluations
        assert (online.variant, online.seed, online.effective_name) == (
            folder.variant,
            folder.seed,
            folder.effective_name,
        )
        assert online.config == folder.config and online.data == folder.data and online.model == folder.model
        assert online.exact_match == folder.exact_match and not online.answers, "the answers stay in the folder"
    online = compare([from_server(trained / "runs" / name) for name in NAMES])
    folders = compare([read_run_folder(trained / "runs" / name) for name in NAMES])
    assert online.arms[1].speedup == folders.arms[1].speedup and online.arms[1].loss_gap == folders.arms[1].loss_gap
    assert [d for d in online.differences if d.effect != "note"] == []


def test_what_the_server_lacks_is_one_sentence(trained):
    stored = the_wandb_run(trained / "runs" / "bf16-seed1")
    run = StandInRun(stored.config, stored.history)
    run.summary = {"certificate/verdict": "undetermined", "certificate/reasons": "['no kernel']", "wall_time_s": 1.0}
    online = read_wandb("team/llm-fp8/abc", StandInApi(run))
    assert online.certificate == {"verdict": "undetermined", "reasons": ["['no kernel']"]}
    for path in (str(trained / "runs" / "bf16-seed1"), "abc"):
        with pytest.raises(UserError, match="is not ENTITY/PROJECT/RUNID; .* with --runs"):
            read_wandb(path)
    with pytest.raises(UserError, match="Could not find run"):
        read_wandb("team/llm-fp8/xyz", StandInApi(StandInRun(stored.config, stored.history)))
    with pytest.raises(UserError, match="is running; give a run that finished"):
        read_wandb("team/llm-fp8/abc", StandInApi(StandInRun(stored.config, stored.history, "running")))
    run.summary = {"stopped_by": "SIGINT", "steps": 3}
    with pytest.raises(UserError, match="was stopped by SIGINT after step 3"):
        read_wandb("team/llm-fp8/abc", StandInApi(run))
    with pytest.raises(UserError, match="its configuration lacks config.optim.seed"):
        read_wandb("team/llm-fp8/abc", StandInApi(StandInRun({}, stored.history)))
    with pytest.raises(UserError, match="no optimizer step"):
        read_wandb("team/llm-fp8/abc", StandInApi(StandInRun(stored.config, [])))


def test_runs_of_other_software_are_not_compared(trained):
    """Real runs beside one that claims another GPU, model and commit."""
    real = [read_run_folder(trained / "runs" / name) for name in NAMES if name.startswith("bf16")]
    comparison = compare([*real, made_up_run("delayed", 1)])
    verdict = comparison.verdicts["delayed"]
    assert verdict.conclusion == "not comparable" and "and" in verdict.sentences[0]
    flagged = {difference.field for difference in comparison.differences}
    assert {"provenance.gpus", "model.num_parameters", "provenance.git.commit", "optimizer", "num_steps"} <= flagged
