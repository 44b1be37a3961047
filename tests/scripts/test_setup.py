"""Shell scripts parse. Requirements are pinned, cover every import, and are installed only once."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(ROOT.glob("scripts/*.sh"))
REQUIREMENTS = ["requirements.txt", "requirements-gpu.txt", "requirements-deepspeed.txt", "requirements-dev.txt"]
PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9_.-]+)(==[\w.]+|>=[\w.]+,<=[\w.]+)(; python_version (<|>=) \"3\.\d+\")?  # \S.*$"
)


def run_bash(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run bash code that can call the functions of scripts/_setup.sh, without a terminal and without input."""
    code, variables = f"source scripts/_setup.sh; {code}", {**os.environ, "CI": "true", **environment}
    options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(["bash", "-c", code], env=variables, **options)


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_is_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.name.startswith("_") or os.access(script, os.X_OK)


def test_requirements_are_pinned_with_a_reason_and_cover_every_import() -> None:
    required = set()
    for file in REQUIREMENTS:
        for line in (ROOT / file).read_text().splitlines():
            match = PIN.match(line)
            assert match or not line or line.startswith("#"), f"{file}: '{line}' is not 'name==version  # reason'"
            required |= {match["name"].lower().replace("_", "-")} if match else set()
    imported = set()
    for file in [*ROOT.glob("*.py"), *(p for d in ("llm_fp8", "scripts", "tests") for p in (ROOT / d).rglob("*.py"))]:
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    ours = {"llm_fp8", "tests", "scripts", "benchmarks", "examples"}
    ours |= {path.stem for path in [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")]}
    # Optional packages, or installed by torch, datasets or wandb. Our plugin is imported by axolotl itself.
    optional = {"fla", "flash-attn", "liger-kernel", "triton", "pandas", "fsspec", "protobuf", "axolotl"}
    known = metadata.packages_distributions()
    names = {known.get(name, [name])[0].lower().replace("_", "-") for name in imported - sys.stdlib_module_names - ours}
    assert names - required - optional == set()


def test_unusable_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = run_bash("make_venv", PYTHON="/no/such/python", VENV_DIR=str(tmp_path / "venv"))
    assert done.returncode == 2 and done.stderr.startswith("error: PYTHON=/no/such/python is not")
    write_program(tmp_path / "bin" / "python", "exit 1")
    done = run_bash("make_venv", VENV_DIR=str(tmp_path))
    assert done.returncode == 2 and "delete it and run this again" in done.stderr


def test_command_that_quickstart_prints_last_works_when_copied(tmp_path: Path) -> None:
    """The clone's path has a space. The environment's Python is replaced by a program that does nothing."""
    clone = tmp_path / "my clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    for file in REQUIREMENTS:
        shutil.copy(ROOT / file, clone)
    python = write_program(clone / ".venv" / "bin" / "python", "")
    (python.parent / "activate").write_text("pwd\n")
    environment = {name: value for name, value in os.environ.items() if name != "VENV_DIR"}
    command = ["bash", str(clone / "scripts" / "quickstart.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (command,) = (line for line in done.stdout.splitlines() if line.startswith("   cd "))
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout == f"{clone}\n"


def test_help_of_quickstart_explains_it_and_installs_nothing(tmp_path: Path) -> None:
    done = run_bash("scripts/quickstart.sh --help", VENV_DIR=str(tmp_path / "venv"))
    assert done.returncode == 0 and "runs/quickstart" in done.stdout and not any(tmp_path.iterdir())


def test_requirements_are_installed_again_after_a_change_or_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# nothing yet\n")
    write_program(tmp_path / "venv" / "bin" / "python", f'[ "$1" = -c ] || ! grep no-such {file}')
    setup = f"make_venv; install_requirements {file} 'a test'"
    environment = {"VENV_DIR": str(tmp_path / "venv")}
    first = run_bash(setup, **environment)
    assert first.returncode == 0 and "installing" in first.stdout, first.stderr
    second = run_bash(setup, **environment)
    assert (second.returncode, second.stdout) == (0, "")
    file.write_text("./no-such-folder-here\n")
    for _ in range(2):
        done = run_bash(setup, **environment)
        assert done.returncode == 2 and f"error: pip could not install {file}" in done.stderr


@pytest.mark.parametrize(
    ("capabilities", "expected"), [("9.0", True), ("8.9", True), ("7.5\\n12.0", True), ("8.6", False), ("[N/A]", False)]
)
def test_fp8_gpus_are_recognised_by_compute_capability(capabilities: str, expected: bool, tmp_path: Path) -> None:
    """A stand-in for nvidia-smi reports `capabilities`."""
    write_program(tmp_path / "nvidia-smi", f"printf '{capabilities}\\n'")
    done = run_bash("has_fp8_gpu && echo yes || echo no", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout.strip() == ("yes" if expected else "no")


@pytest.mark.parametrize(
    ("capability", "options", "has_gpu_environment", "expected"),
    [
        (None, "", False, "CPU"),
        ("8.0", "", False, "requirements-gpu.txt"),
        ("9.0", "", False, "requirements-gpu.txt and Transformer Engine"),
        (None, "--gpu", False, "requirements-gpu.txt and Transformer Engine"),
        (None, "", True, "requirements-gpu.txt and Transformer Engine"),
    ],
)
def test_gpu_environments_get_gpu_requirements(capability, options, has_gpu_environment, expected, tmp_path) -> None:
    """An existing environment for GPUs keeps its requirements on a machine without a GPU."""
    answer = "exit 9" if capability is None else f'[ "$1" = -L ] && echo "GPU 0: made up" || echo {capability}'
    write_program(tmp_path / "nvidia-smi", answer)
    if has_gpu_environment:
        (tmp_path / "installed-requirements-gpu.txt").touch()
    stand_ins = (
        "make_venv() { :; }; install_requirements() { printf %s ${3:-CPU}; }; "
        "install_gpu_requirements() { printf ' and Transformer Engine'; }; "
    )
    environment = {"VENV_DIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert run_bash(f"{stand_ins} setup_environment {options}", **environment).stdout == expected
