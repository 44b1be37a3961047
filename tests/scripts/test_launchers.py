"""The launchers and their files: accelerate's configurations, the multi-node script and the Slurm script, run with
real processes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import accelerate.utils.launch
import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from llm_fp8.config.accelerate_env import apply_launch_settings
from llm_fp8.config.parser import parse_config, parse_launch
from tests.support.processes import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
MULTI_NODE = REPOSITORY / "scripts" / "launch_multi_node.sh"
SLURM = REPOSITORY / "scripts" / "slurm_multi_node.sbatch"
CONFIGS = {f"{precision}_{mode}": (precision, mode) for precision in ("bf16", "fp8") for mode in ("ddp", "fsdp")}
MODES = {"ddp": "ddp", "fsdp": "fsdp_full"}
DEADLINE_S = 120

# Says who it is, forms a process group of CPUs with the others and says what they add up to.
RANKS_SCRIPT = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
ranks = torch.tensor([dist.get_rank()])
dist.all_reduce(ranks)
told = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "sum": ranks.item(), "arguments": sys.argv[1:],
        "local_world_size": os.environ["LOCAL_WORLD_SIZE"], "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
open(f"{os.environ['FOLDER']}/rank{dist.get_rank()}.json", "w").write(json.dumps(told))
dist.destroy_process_group()
"""

# What the options and the environment come to, and what Accelerate then makes of the environment.
SETTINGS_SCRIPT = """
import json, os, sys
from llm_fp8.config.parser import parse_launch
from llm_fp8.utils.errors import run_script

def main():
    config, _ = parse_launch(sys.argv[1:], os.environ, parallel=True)
    from accelerate import Accelerator
    accelerator = Accelerator(mixed_precision="no", cpu=True)
    left = [n for n in os.environ if n.startswith(("FSDP_", "ACCELERATE_"))]
    told = {"mode": config.parallel.sharding_mode, "precision": config.precision.mixed_precision,
            "processes": accelerator.num_processes, "type": accelerator.distributed_type.value, "left": left}
    open(f"{os.environ['FOLDER']}/rank{accelerator.process_index}.json", "w").write(json.dumps(told))
    accelerator.end_training()
    return 0

run_script(main)
"""

# Waits for a signal and, like a run that saves, ends in its own time.
WAITING_SCRIPT = """
import os, signal, sys, time
file = f"{os.environ['FOLDER']}/rank{os.environ['RANK']}"
def save(*_):
    open(file + ".saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(file + ".ready", "w").close()
time.sleep(100)
"""


@pytest.fixture
def environment(tmp_path, warm_python):
    """The environment of a launcher: this one, free of what a launcher reads; what it starts has its imports."""
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "MAX_RESTARTS", "TRAIN_SCRIPT")
    names += ("WORLD_SIZE", "RANK", "GPU_NUM", "GLOO_SOCKET_IFNAME")
    cleaned = {name: value for name, value in os.environ.items() if name not in names}
    return {
        **cleaned,
        "PYTHON": sys.executable,
        "PYTHON_EXEC": warm_python,
        "PYTHONPATH": str(REPOSITORY),
        "FOLDER": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture
def script(tmp_path):
    """A function: write a training script, return its path."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def run(command, environment, **options):
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, **options)


def told_by_ranks(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


# ---- accelerate launch ----


def launch_environment(monkeypatch, config_file: Path, *options: str) -> dict[str, str]:
    """The variables that `accelerate launch` sets for this file, made by its own code."""
    # Whether fp8 could run is a question to the machine's libraries, and not what these tests are about.
    monkeypatch.setattr(accelerate.utils.launch, "is_fp8_available", lambda: True)
    port = ["--main_process_port", str(free_port())]
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(config_file), *port, *options, "train_multi_gpu.py"]
    )
    arguments, _, _ = _validate_launch_command(arguments)
    made = accelerate.utils.launch.prepare_multi_gpu_env(arguments)
    ours = {name: value for name, value in made.items() if os.environ.get(name) != value}
    return {**ours, "WORLD_SIZE": str(arguments.num_processes)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_file_asks_for_what_its_name_says(monkeypatch, name):
    environ = launch_environment(monkeypatch, REPOSITORY / "configs" / f"accelerate_{name}.yaml")
    assert environ["WORLD_SIZE"] == "8"
    config, _ = apply_launch_settings(parse_config([], parallel=True), environ)
    precision, mode = CONFIGS[name]
    assert (config.precision.mixed_precision, config.parallel.sharding_mode) == (precision, MODES[mode])
    assert not [name for name in environ if name.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("fp8")])
def test_the_fp8_files_hold_the_defaults_of_delayed_scaling(monkeypatch, name):
    """So that torchrun with the same flags gives the same run; those of the launcher differ."""
    content = yaml.safe_load((REPOSITORY / "configs" / f"accelerate_{name}.yaml").read_text())
    assert content["fp8_config"] == {
        "backend": "TE",
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
    }
    environ = launch_environment(monkeypatch, REPOSITORY / "configs" / f"accelerate_{name}.yaml")
    first = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    config, _ = parse_launch(["--fp8_scenario=current"], {**first, **environ}, parallel=True)
    assert config.precision == parse_config(["--mixed_precision=fp8", "--fp8_scenario=current"]).precision


def test_the_commented_entries_of_the_fsdp_files_are_understood(monkeypatch, tmp_path):
    lines = (REPOSITORY / "configs" / "accelerate_bf16_fsdp.yaml").read_text().splitlines()
    start = lines.index("# parallelism_config:")
    lines[start:] = [line.removeprefix("# ") for line in lines[start:]]
    content = yaml.safe_load("\n".join(lines))
    assert content["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    content["fsdp_config"]["fsdp_activation_checkpointing"] = True
    file = tmp_path / "hybrid.yaml"
    file.write_text(yaml.safe_dump(content))
    environ = launch_environment(monkeypatch, file, "--num_processes", "16")
    config, _ = apply_launch_settings(parse_config([], parallel=True), {**environ, "LOCAL_WORLD_SIZE": "8"})
    assert config.parallel.sharding_mode == "fsdp_hybrid"
    assert config.model.gradient_checkpointing


def accelerate_launch(python: str, name: str, *options: str) -> list[str]:
    command = [
        python,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(REPOSITORY / "configs" / f"accelerate_{name}.yaml"),
    ]
    return [*command, "--num_processes", "2", "--main_process_port", str(free_port()), *options]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_accelerate_launch_with_two_processes(environment, script, tmp_path, warm_python, mode):
    result = run(
        [*accelerate_launch(warm_python, f"bf16_{mode}"), script(SETTINGS_SCRIPT), "--batch_size=2"], environment
    )
    assert result.returncode == 0, result.stderr
    expected = {"mode": MODES[mode], "precision": "bf16", "processes": 2, "type": "MULTI_CPU", "left": []}
    assert told_by_ranks(tmp_path) == [expected, expected]


@pytest.mark.slow
def test_accelerate_launch_with_a_flag_that_contradicts_the_file(environment, script, tmp_path, warm_python):
    result = run(
        [*accelerate_launch(warm_python, "bf16_fsdp"), script(SETTINGS_SCRIPT), "--sharding_mode=ddp"], environment
    )
    assert result.returncode != 0
    sentence = "error: --sharding_mode ddp contradicts accelerate's launch configuration, which asks for fsdp_full"
    assert result.stderr.count(sentence) == 1  # of two processes
    assert told_by_ranks(tmp_path) == []


# ---- several hosts ----


@pytest.mark.slow
def test_two_nodes_on_this_host_form_one_group(environment, script, tmp_path):
    environment |= {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC_PER_NODE": "1"}
    environment |= {"TRAIN_SCRIPT": script(RANKS_SCRIPT), "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [MULTI_NODE, "--some_option", "a b"], env={**environment, "NODE_RANK": rank}, stderr=subprocess.PIPE
        )
        for rank in ("0", "1")
    ]
    for node in nodes:
        _, said = node.communicate(timeout=DEADLINE_S)
        assert node.returncode == 0, said
    shared = {
        "world_size": 2,
        "sum": 1,
        "arguments": ["--some_option", "a b"],
        "local_world_size": "1",
        "interface": "lo",
    }
    assert told_by_ranks(tmp_path) == [{"rank": rank, **shared} for rank in (0, 1)]


@pytest.mark.slow
def test_one_host_needs_nothing_set(environment, script, tmp_path):
    result = run([MULTI_NODE], {**environment, "TRAIN_SCRIPT": script(RANKS_SCRIPT)})
    assert result.returncode == 0, result.stderr
    assert [told["world_size"] for told in told_by_ranks(tmp_path)] == [1]


@pytest.mark.slow
def test_sigterm_lets_every_process_end_in_its_own_time(environment, script, tmp_path):
    environment |= {"TRAIN_SCRIPT": script(WAITING_SCRIPT), "NPROC_PER_NODE": "2"}
    launcher = subprocess.Popen([MULTI_NODE], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while len(list(tmp_path.glob("*.ready"))) < 2:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(DEADLINE_S)
    assert len(list(tmp_path.glob("*.saved"))) == 2


@pytest.mark.slow
def test_a_dry_run_prints_the_command(environment, script):
    environment |= {
        "NNODES": "4",
        "NODE_RANK": "3",
        "MASTER_ADDR": "10.0.0.1",
        "NPROC_PER_NODE": "8",
        "MAX_RESTARTS": "2",
    }
    path = script("")
    result = run([MULTI_NODE, "--dry_run", "--model_name", "a b"], {**environment, "TRAIN_SCRIPT": path})
    assert result.returncode == 0, result.stderr
    expected = f"{sys.executable} -m torch.distributed.run --nnodes=4 --nproc_per_node=8 --max_restarts=2 --node_rank=3"
    assert result.stdout.strip() == f"{expected} --master_addr=10.0.0.1 --master_port=29500 {path} --model_name a\\ b"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "MASTER_ADDR": "h"}, "NODE_RANK is not set"),
        (
            {"NNODES": "2", "MASTER_ADDR": "h", "NODE_RANK": "2"},
            "NODE_RANK must be a whole number from 0 to 1, and is '2'",
        ),
        ({"NNODES": "2", "MASTER_ADDR": "h", "NODE_RANK": "-1"}, "NODE_RANK must be"),
        ({"NNODES": "two"}, "NNODES must be a whole number"),
        ({"NNODES": "08"}, "NNODES must be a whole number"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE must be"),
        ({"MAX_RESTARTS": "x"}, "MAX_RESTARTS must be"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be"),
        ({"GPU_NUM": "8"}, "set NPROC_PER_NODE"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "set NNODES"),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "GLOO_SOCKET_IFNAME names nosuch0"),
        ({"TRAIN_SCRIPT": "/nowhere/train.py"}, "/nowhere/train.py: no such file"),
        ({"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python"),
    ],
)
def test_what_is_missing_is_one_sentence(environment, script, variables, sentence):
    result = run(
        [MULTI_NODE, "--dry_run"], {**environment, "TRAIN_SCRIPT": script(""), "NPROC_PER_NODE": "1", **variables}
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and sentence in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""


# ---- Slurm ----


@pytest.mark.slow
def test_the_slurm_script_starts_one_launcher_per_host(environment, script, tmp_path):
    """With an `scontrol` and an `srun` that take two hosts to be this one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text('#!/bin/sh\n[ "$3" = "node[1-2]" ] && printf "127.0.0.1\\nother\\n"\n')
    (programs / "srun").write_text(
        "#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\n"
        'for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done\nfor task in "${tasks[@]}"; do wait "$task" '
        "|| exit 1; done\n"
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    copy = shutil.copy(SLURM, tmp_path / "slurm_script")  # as sbatch does
    environment |= {
        "PATH": f"{programs}:{environment['PATH']}",
        "TRAIN_SCRIPT": script(RANKS_SCRIPT),
        "NPROC_PER_NODE": "1",
    }
    environment |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(free_port())}
    environment |= {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_CPUS_PER_TASK": "1"}
    result = run(["bash", copy, "--resume_from", "latest"], environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    told = told_by_ranks(tmp_path)
    assert [(one["rank"], one["world_size"], one["sum"]) for one in told] == [(0, 2, 1), (1, 2, 1)]
    for one in told:
        assert one["arguments"][-2:] == ["--resume_from", "latest"]
        parse_config(one["arguments"][:-2], parallel=True)  # the options that the file holds are ours


def test_slurm_announces_the_end_to_the_tasks():
    directives = [
        line.removeprefix("#SBATCH ") for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH ")
    ]
    assert "--ntasks-per-node=1" in directives
    notice = next(line for line in directives if line.startswith("--signal="))
    assert notice.startswith("--signal=TERM@")  # without the B: that would leave it to the batch shell
    assert int(notice.rpartition("@")[2]) >= 300


@pytest.mark.slow
@pytest.mark.parametrize("path", [MULTI_NODE, SLURM])
def test_shell_syntax(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
