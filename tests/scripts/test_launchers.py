"""The scripts that start trainings: bf16/fp8 pairs, configurations of accelerate, several hosts, and Slurm."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate.utils.launch
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from llm_fp8.config.accelerate_env import apply_launch_settings
from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.tools.compare import cli
from tests.support.made_up_runs import made_up_run, write_run_folder
from tests.support.processes import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
MULTI_NODE = SCRIPTS / "launch_multi_node.sh"
MULTI_GPU = ("train_bf16_multi_gpu", "train_fp8_multi_gpu")
PAIRS = [("train_bf16", "train_fp8"), MULTI_GPU, ("llama_8b_full_finetune_bf16", "llama_8b_full_finetune_fp8")]


@pytest.fixture
def stand_in(tmp_path) -> str:
    """Write a program that replaces Python and prints its arguments, one per line. Return the path of the program."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    return str(program)


def argv_of(script: str, python: str, *options: str) -> list[str]:
    """Return the arguments that `script` passes to the program `python`. CDPATH is set, which misleads a plain `cd`."""
    variables = {**os.environ, "PYTHON": python, "NPROC_PER_NODE": "2", "CDPATH": ".:/"}
    command = [f"scripts/{script}.sh", *options]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


def config_of(script: str, python: str, *options: str) -> Config:
    """Return the configuration of the training run that a script starts."""
    argv = argv_of(script, python, *options)
    index = argv.index(str(ROOT / ("train_multi_gpu.py" if script in MULTI_GPU else "train_fp8.py")))
    if script in MULTI_GPU:
        assert argv[:2] == ["-m", "torch.distributed.run"] and "--nproc_per_node=2" in argv[:index]
    return parse_config(argv[index + 1 :], parallel=script in MULTI_GPU)


@pytest.mark.parametrize(("bf16", "fp8"), PAIRS, ids=lambda name: name)
def test_pair_differs_only_in_precision_and_accepts_options(bf16, fp8, stand_in):
    baseline, other = config_of(bf16, stand_in), config_of(fp8, stand_in)
    assert (baseline.precision.mixed_precision, other.precision.mixed_precision) == ("bf16", "fp8")
    assert baseline.run.output_dir != other.run.output_dir
    run = dataclasses.replace(other.run, output_dir=baseline.run.output_dir)
    assert dataclasses.replace(other, precision=baseline.precision, run=run) == baseline
    config = config_of(fp8, stand_in, "--model_name", "a folder/model", "--max_steps=7", "--use_te", "false")
    assert (config.model.model_name, config.optim.max_steps, config.model.use_te) == ("a folder/model", 7, False)


def test_multi_gpu_scripts_train_the_single_gpu_configuration(stand_in):
    single, several = config_of("train_fp8", stand_in), config_of("train_fp8_multi_gpu", stand_in)
    assert several.parallel.sharding_mode == "ddp"
    run = dataclasses.replace(several.run, output_dir=single.run.output_dir)
    assert dataclasses.replace(several, parallel=single.parallel, run=run) == single


def test_compare_llama_8b_compares_the_8b_pair(stand_in, tmp_path):
    argv = argv_of("compare_llama_8b", stand_in, "--seeds", "3", "--", "--optimizer", "adamw_8bit")
    assert argv[0] == str(SCRIPTS / "compare_performance.py")
    parsed = cli.parse(argv[1:])
    assert (parsed.variants, parsed.output) == ("bf16,fp8", ROOT / "runs" / "compare_llama_8b")
    runs = cli.plan_runs(parsed.train, ["bf16", "delayed"], parsed.seeds, 1, tmp_path)
    assert len(runs) == 6
    for run in runs:
        config = parse_config(list(run.argv))
        script = config_of(f"llama_8b_full_finetune_{config.precision.mixed_precision}", stand_in)
        optim = dataclasses.replace(script.optim, seed=run.seed, optimizer="adamw_8bit")
        assert (config.model, config.data, config.optim) == (script.model, script.data, optim)


def test_compare_performance_without_options_compares_the_runs_of_the_pair(tmp_path, monkeypatch):
    assert [folder.relative_to(ROOT).as_posix() for folder in cli.PAIR] == ["runs/train_bf16", "runs/train_fp8"]
    monkeypatch.setattr(cli, "PAIR", (tmp_path / "train_bf16", tmp_path / "train_fp8"))
    monkeypatch.setattr(sys, "argv", ["compare_performance.py", "--output", str(tmp_path)])
    write_run_folder(cli.PAIR[0], made_up_run("bf16"))
    write_run_folder(cli.PAIR[1], made_up_run("delayed", rate=130_000.0))
    assert cli.main() == 0
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert [figures["variant"] for figures in comparison["variants"]] == ["bf16", "delayed"]


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_accelerate_configuration_has_the_precision_and_mode_of_its_name(monkeypatch, precision, mode):
    """The test uses the environment variables that `accelerate launch` sets for the configuration file."""
    # Whether this machine's libraries support fp8 must not matter here.
    monkeypatch.setattr(accelerate.utils.launch, "is_fp8_available", lambda: True)
    file = str(ROOT / "configs" / f"accelerate_{precision}_{mode}.yaml")
    argv = ["--config_file", file, "--main_process_port", str(free_port()), "train_multi_gpu.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(argv))
    launch_environ = accelerate.utils.launch.prepare_multi_gpu_env(arguments)
    environ = {name: value for name, value in launch_environ.items() if os.environ.get(name) != value}
    config = apply_launch_settings(parse_config([], parallel=True), {**environ, "WORLD_SIZE": "8"}, ())
    options = [f"--mixed_precision={precision}", f"--sharding_mode={'ddp' if mode == 'ddp' else 'fsdp_full'}"]
    if precision == "fp8":
        options += ["--fp8_format=HYBRID", "--amax_history_len=1024", "--amax_compute_algo=max"]
    assert config == parse_config(options, parallel=True) and arguments.num_processes == 8


@pytest.fixture
def environment(stand_in):
    """Return this process's environment without a launcher's variables, and with PYTHON set to the stand-in."""
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "WORLD_SIZE", "RANK", "GPU_NUM")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return inherited | {"PYTHON": stand_in, "NPROC_PER_NODE": "1"}


def launch(command, environment, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **options)


def test_dry_run_prints_the_command(environment):
    hosts = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "10.0.0.1", "NPROC_PER_NODE": "8", "MAX_RESTARTS": "2"}
    done = launch([MULTI_NODE, "--dry_run", "--model_name", "a b"], environment | hosts)
    expected = f"{environment['PYTHON']} -m torch.distributed.run --nnodes=4 --nproc_per_node=8 --max_restarts=2"
    expected += " --node_rank=3 --master_addr=10.0.0.1 --master_port=29500"
    expected += f" {ROOT / 'train_multi_gpu.py'} --model_name a\\ b"
    assert done.returncode == 0 and done.stdout.strip() == expected, done.stderr
    assert shlex.split(done.stdout)[-1] == "a b"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "MASTER_ADDR": "h", "NODE_RANK": "2"}, "NODE_RANK is 2"),
        ({"GPU_NUM": "8"}, "set NPROC_PER_NODE"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "set NNODES"),
        ({"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python"),
    ],
)
def test_missing_or_invalid_variable_is_refused_in_one_sentence(environment, variables, sentence):
    done = launch([MULTI_NODE, "--dry_run"], environment | variables)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and sentence in done.stderr and done.stderr.count("\n") == 1


def test_slurm_script_starts_one_launcher_per_host(environment, tmp_path):
    """Stand-ins for `scontrol` and `srun` make this machine act as two hosts."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text('#!/bin/sh\n[ "$3" = "node[1-2]" ] && printf "10.0.0.1\\nother\\n"\n')
    (programs / "srun").write_text(
        "#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\n"
        'for node in 0 1; do SLURM_NODEID=$node "$@" || exit 1; done\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    copy = shutil.copy(SCRIPTS / "slurm_multi_node.sbatch", tmp_path / "slurm_script")  # as sbatch does
    environment |= {"PATH": f"{programs}:{environment['PATH']}", "SLURM_JOB_ID": "31234"}
    environment |= {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(ROOT)}
    done = launch(["bash", copy, "--resume_from", "latest"], environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank, arguments in enumerate(done.stdout.strip().removeprefix("-m\n").split("\n-m\n")):
        launcher, script, options = arguments.partition(f"{ROOT / 'train_multi_gpu.py'}\n")
        assert launcher.split() == [
            *("torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--max_restarts=0"),
            *(f"--node_rank={rank}", "--master_addr=10.0.0.1", "--master_port=21234"),
        ]
        assert script and options.split()[-2:] == ["--resume_from", "latest"]
        parse_config(options.split()[:-2], parallel=True)  # the options in the Slurm script must parse
    assert rank == 1
