"""Shell scripts and requirements: that they parse, are pinned, cover what is imported, and do nothing twice."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*REPOSITORY.glob("scripts/*.sh"), REPOSITORY / ".ci" / "run"])
REQUIREMENTS = ["requirements.txt", "requirements-gpu.txt", "requirements-deepspeed.txt", "requirements-dev.txt"]
PIN = re.compile(r"^(?P<name>[A-Za-z0-9_.-]+)(\[\w+\])?==[\w.]+(; python_version (<|>=) \"3\.\d+\")?  # \S.*$")


def pinned(file: str) -> list[str]:
    """Names in a requirements file, normalised; one under two markers comes twice."""
    lines = [line for line in (REPOSITORY / file).read_text().splitlines() if line and not line.startswith("#")]
    return [match["name"].lower().replace("_", "-") for line in lines if (match := PIN.match(line))]


def imported(files: list[Path]) -> set[str]:
    """Top-level names of the packages that `files` import anywhere, those of the standard library and of the project
    left out.
    """
    names: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    own = {path.stem for path in [*REPOSITORY.glob("*.py"), *REPOSITORY.glob("scripts/*.py")]} | {
        "llm_fp8",
        "tests",
        "scripts",
        "benchmarks",
        "examples",
    }
    return names - set(sys.stdlib_module_names) - own


_distributions = functools.cache(metadata.packages_distributions)


def distribution(package: str) -> str:
    """The normalised name under which an importable package is installed."""
    known = _distributions().get(package, [package])
    return known[0].lower().replace("_", "-")


def run_bash(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run bash code with the setup functions loaded, without a terminal and without input."""
    return subprocess.run(
        ["bash", "-c", f"source scripts/_setup.sh; {code}"],
        cwd=REPOSITORY,
        env={**os.environ, "CI": "true", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_parses_and_can_be_run(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if not script.name.startswith("_"):
        assert script.read_text().startswith("#!/usr/bin/env bash\n")
        assert os.access(script, os.X_OK), f"{script} is not executable"


@pytest.mark.parametrize("file", REQUIREMENTS)
def test_every_requirement_is_pinned_and_says_why(file: str) -> None:
    lines = [line for line in (REPOSITORY / file).read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert PIN.match(line), f"{file}: '{line}' is not 'name==version  # reason'"


def test_a_version_that_stands_in_two_places_is_the_same() -> None:
    """DeepSpeed for its users and for tests; Transformer Engine's build tools in the script that installs them and
    where it is explained.
    """
    pins = [re.findall(r"^deepspeed==\S+", (REPOSITORY / file).read_text(), re.MULTILINE) for file in REQUIREMENTS[-2:]]
    assert pins[0] == pins[1] and len(pins[0]) == 1
    script = (REPOSITORY / "scripts" / "_setup.sh").read_text()
    tools = re.search(r"te_build_tools=\((.*?)\)", script)
    assert tools and f"pip install {tools[1]}\n" in (REPOSITORY / "requirements-gpu.txt").read_text()
    (setuptools,) = re.findall(r"^setuptools==\S+", (REPOSITORY / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert setuptools in tools[1].split()


@pytest.mark.slow
def test_the_packages_that_the_product_imports_are_required() -> None:
    files = [*REPOSITORY.glob("*.py"), *REPOSITORY.glob("llm_fp8/**/*.py")]
    product = ("requirements.txt", "requirements-gpu.txt", "requirements-deepspeed.txt")
    required = {name for file in product for name in pinned(file)}
    # Looked for, and done without; triton comes with torch's CUDA builds, and axolotl loads its plugin itself.
    optional = {"flash-attn", "triton", "axolotl"}
    if "transformer-engine" in required:
        required.add("transformer-engine-torch")  # its bindings
    missing = {distribution(name) for name in imported(files)} - required - optional
    assert not missing


@pytest.mark.slow
def test_the_packages_that_scripts_and_tests_import_are_required() -> None:
    files = [
        path for pattern in ("scripts/*.py", "examples/*.py", "tests/**/*.py") for path in REPOSITORY.glob(pattern)
    ]
    required = {name for file in REQUIREMENTS for name in pinned(file)}
    # Peers that the benchmarks measure where they are installed; protobuf comes with wandb, to read its files.
    optional = {"flash-attn", "liger-kernel", "protobuf"}
    missing = {distribution(name) for name in imported(files)} - required - optional
    assert not missing


def test_an_images_constraints_do_not_reach_the_environment() -> None:
    """They hold pip to a torch that the environment does not see, against the pins; NVIDIA's images set such a file."""
    assert run_bash('printf "%s" "${PIP_CONSTRAINT-unset}"', PIP_CONSTRAINT="/etc/pip/constraint.txt").stdout == "unset"


@pytest.mark.parametrize("command", ["false", "/no/such/python"])
def test_a_python_that_will_not_do_is_refused_in_one_sentence(command: str, tmp_path: Path) -> None:
    done = run_bash("make_venv", PYTHON=command, VENV_DIR=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert done.stderr == f"error: PYTHON={command} is not a CPython 3.10 to 3.13; set PYTHON to one.\n"
    assert not (tmp_path / "venv").exists()


def test_a_broken_environment_is_refused_in_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "bin" / "python"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    done = run_bash("make_venv", VENV_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "delete it and run this again" in done.stderr


def test_the_command_that_quickstart_ends_with_can_be_copied(tmp_path: Path) -> None:
    """Also where the clone's path has spaces. An interpreter that does nothing takes the place of the environment's."""
    clone = tmp_path / "my clone"
    shutil.copytree(REPOSITORY / "scripts", clone / "scripts")
    for file in REQUIREMENTS:
        shutil.copy(REPOSITORY / file, clone)
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    (python.parent / "activate").write_text("pwd\n")
    environment = {name: value for name, value in os.environ.items() if name != "VENV_DIR"}
    done = subprocess.run(
        ["bash", str(clone / "scripts" / "quickstart.sh")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (command,) = (line for line in done.stdout.splitlines() if line.startswith("   cd "))
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout == f"{clone}\n"


def test_requirements_are_installed_once_until_they_change(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# nothing yet\n")
    setup = f"make_venv; install_requirements {file} 'a test'"
    environment = {"PYTHON": sys.executable, "VENV_DIR": str(tmp_path / "venv")}
    first = run_bash(setup, **environment)
    assert first.returncode == 0, first.stderr
    assert "making" in first.stdout and "installing" in first.stdout
    again = run_bash(setup, **environment)
    assert (again.returncode, again.stdout) == (0, "")
    file.write_text("# changed\n")
    changed = run_bash(setup, **environment)
    assert "installing" in changed.stdout and "making" not in changed.stdout


def test_an_installation_that_fails_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("./no-such-folder-here\n")
    setup = f"make_venv; install_requirements {file} 'a test'"
    environment = {"PYTHON": sys.executable, "VENV_DIR": str(tmp_path / "venv")}
    for _ in range(2):
        done = run_bash(setup, **environment)
        assert done.returncode == 2
        assert f"error: pip could not install {file}" in done.stderr


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [("9.0", True), ("8.9", True), ("7.5\\n12.0", True), ("8.6", False), ("[N/A]", False), ("", False)],
)
def test_fp8_gpus_are_told_by_compute_capability(capabilities: str, expected: bool, tmp_path: Path) -> None:
    """The driver's query tool is replaced by one that answers for other GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{capabilities}\\n'\n")
    tool.chmod(0o755)
    done = run_bash("has_fp8_gpu && echo yes || echo no", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout.strip() == ("yes" if expected else "no")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "The detected CUDA version (12.4) mismatches the version that was used to compile\nPyTorch (13.0)",
            "the CUDA toolkit is 12.4 and torch needs 13.0; run: AGAIN && CUDA_HOME=/usr/local/cuda-13.0 bash\n",
        ),
        (
            "g++: fatal error: Killed signal terminated program cc1plus",
            "one file at a time: AGAIN && MAX_JOBS=1 bash\n",
        ),
        (
            "nvcc: No such file or directory",
            "there is no nvcc, the compiler of the CUDA toolkit; install the toolkit of CUDA 13.0 (with NVIDIA's apt "
            "repository: sudo apt-get install cuda-toolkit-13-0), then: AGAIN && bash\n",
        ),
    ],
)
def test_usual_failures_of_the_long_compilation_come_with_the_command_that_mends_them(log, expected, tmp_path):
    (tmp_path / "log").write_text(log)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho 13.0\n")  # torch's CUDA version
    python.chmod(0o755)
    code = f"has_nvcc() {{ false; }}; explain_te_failure {tmp_path / 'log'}"
    again = f"rm {tmp_path}/installed-requirements-gpu.txt"
    assert run_bash(code, VENV_DIR=str(tmp_path)).stdout.endswith(expected.replace("AGAIN", again))


def test_a_long_command_keeps_its_exit_code_and_its_words(tmp_path):
    code = (
        f"sleep() {{ command sleep 0.05; }}; with_heartbeat {tmp_path / 'log'} bash -c 'sleep 0.2; echo said; exit 3'"
    )
    done = run_bash(f"{code} || echo code $?")
    assert "still at it after 1 min" in done.stdout and done.stdout.endswith("said\ncode 3\n")
    assert (tmp_path / "log").read_text() == "said\n"


@pytest.mark.parametrize(
    ("cached", "expected"), [("x.whl", "from the wheel that pip built before"), ("", "ten minutes")]
)
def test_transformer_engine_says_first_how_long_it_takes(cached, expected, tmp_path):
    """With pip replaced by a program that fails."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\ncase \"$*\" in *cache*) echo '{cached}';; *install*) echo Killed; exit 1;; esac\n")
    python.chmod(0o755)
    code = "has_fp8_gpu() { true; }; te_build_tools=(); pip_install() { [[ $# == 0 ]] || { echo Killed; return 1; }; }"
    done = run_bash(f"{code}; install_gpu_requirements", VENV_DIR=str(tmp_path))
    assert done.returncode == 0 and expected in done.stdout, done.stderr
    assert "&& MAX_JOBS=1 bash\n" in done.stderr and (tmp_path / "installed-requirements-gpu.txt").exists()
