"""train_multi_gpu.py under torchrun and accelerate launch, on the CPU.

Ranks are forked from torchrun's agent, except in one test, because a new process takes five seconds to start.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.documented_commands import COMMANDS, cpu_options, write_dataset
from tests.support.faults import kill_rank_and_restart
from tests.support.launches import ROOT, SCRIPT, ForkedTorchrun, launcher_environment
from tests.support.processes import free_port, wait_until_processes_end
from tests.support.small import run_json, steps

pytestmark = pytest.mark.slow


def test_documented_command_runs(tmp_path, tiny_model, monkeypatch):
    """Local folders replace hub ids in the command, and precision and sequence length are changed to suit a CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = cpu_options(COMMANDS["two_gpus"], tiny_model, write_dataset(tmp_path / "dataset", 64))
    more = ["--max_steps=3", "--eval_batches=1", "--log_every=1", "--use_wandb"]
    with ForkedTorchrun(tmp_path / "log", *options, *more) as run:
        assert run.end() == {}, run.printed()
    (folder,) = (tmp_path / "runs").iterdir()  # the two processes agree on the name
    assert [step["step"] for step in steps(folder)] == [1, 2, 3]
    assert run.printed().count("step 1/3") == 1 and "sharding: fsdp_full" in run.printed()
    assert run_json(folder)["effective"]["global_batch_size"] == 8
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    assert (folder / "final" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--sharding_mode=fsdp_ful", "--sharding_mode: invalid choice: 'fsdp_ful'"),
        ("--dataset_name=/no/such", "--dataset_name /no/such: no such file or folder"),
    ],
)
def test_wrong_option_is_reported_once(tmp_path, option, message):
    """Every rank notices the invalid choice, but only one rank notices the missing dataset."""
    with ForkedTorchrun(tmp_path / "log", option, f"--output_dir={tmp_path / 'run'}") as run:
        assert 2 in run.end().values()
    (line,) = [line for line in run.printed().splitlines() if line.startswith("error: ")]
    assert message in line


def test_ranks_of_killed_accelerate_launch_save_and_end(tmp_path, tiny_model, rows):
    folder, file = tmp_path / "run", ROOT / "configs" / "accelerate_bf16_fsdp.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", f"--config_file={file}"]
    options = ["--model_name", tiny_model, "--dataset_name", rows, "--max_seq_length=256", "--max_steps=100000"]
    mark = {"LLM_FP8_TEST_LAUNCH": str(tmp_path)}
    with subprocess.Popen(
        [*launcher, f"--main_process_port={free_port()}", SCRIPT, *options, "--log_every=1", f"--output_dir={folder}"],
        cwd=tmp_path,
        env=launcher_environment(**mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 120
        while not ((folder / "metrics.jsonl").is_file() and steps(folder)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        process.kill()
    wait_until_processes_end(*next(iter(mark.items())))
    assert any(folder.glob("checkpoints/step-*")), "the ranks save as after SIGTERM"
    recorded = run_json(folder)
    assert recorded["effective"]["sharding_mode"] == "fsdp_full" and recorded["precision"]["effective"] == "bf16"


def test_run_resumes_after_torchrun_restarts_its_ranks(tmp_path, tiny_model, rows, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--model_name", tiny_model, "--dataset_name", rows, "--sharding_mode=ddp", "--max_seq_length=128")
    options += ("--batch_size=2", "--validation_fraction=0")
    kill_rank_and_restart(ForkedTorchrun, tmp_path, *options)
