"""Tests of the wheel's contents, metadata and command. The wheel is built once, without a network."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from llm_fp8 import __version__
from llm_fp8.__main__ import PROGRAMS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = {"": "requirements.txt", "gpu": "requirements-gpu.txt", "deepspeed": "requirements-deepspeed.txt"}
BUILT_FROM = ("llm_fp8", "configs", "te_llama.py", "train_fp8.py", "train_multi_gpu.py", "pyproject.toml", "README.md",
              "LICENSE", *REQUIREMENTS.values())  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Build the wheel from a copy of the repository, because setuptools leaves a build folder beside the sources."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    process = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (path,) = folder.glob("*.whl")
    assert path.name == f"llm_fp8-{__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"llm_fp8-{__version__}.dist-info/{name}").decode()


def test_wheel_contains_all_package_files_and_no_scripts(wheel):
    package = (path for path in (ROOT / "llm_fp8").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    configs = (f"llm_fp8/config/shipped/configs/{path.name}" for path in (ROOT / "configs").iterdir())
    expected = {str(path.relative_to(ROOT)) for path in package} | set(configs)
    expected |= {"te_llama.py", "train_fp8.py", "train_multi_gpu.py"}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    assert "llm_fp8/models/architectures/Llama-3.2-1B.json" in expected
    shipped = wheel.read("llm_fp8/config/shipped/requirements.txt")
    assert shipped == (ROOT / "requirements.txt").read_bytes()
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")


def test_dependencies_and_extras_match_requirements_files(wheel):
    lines = metadata(wheel, "METADATA").splitlines()
    listed = [Requirement(line.removeprefix("Requires-Dist: ")) for line in lines if line.startswith("Requires-Dist: ")]
    for extra, file in REQUIREMENTS.items():
        text = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
        expected = {(each.name, str(each.specifier)) for each in map(Requirement, filter(None, text))}
        of_extra = [each for each in listed if (f'extra == "{extra}"' if extra else "extra") in str(each.marker or "")]
        chosen = of_extra if extra else [each for each in listed if each not in of_extra]
        assert {(each.name, str(each.specifier)) for each in chosen} == expected


def test_wheel_installs_command_with_callable_programs(wheel):
    entry_points = configparser.ConfigParser()
    entry_points.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(entry_points["console_scripts"]) == {"llm-fp8": "llm_fp8.__main__:main"}
    assert set(PROGRAMS) == {"train", "verify", "memory", "compare", "diagnose", "certify", "evaluate", "export-fp8"}
    for module, _ in PROGRAMS.values():
        assert f"{module.replace('.', '/')}.py" in wheel.namelist()
        assert callable(import_module(module).main)


@pytest.mark.parametrize("arguments, code, message", [
    (["--help"], 0, "whether a model fits"),
    (["--version"], 0, f"llm-fp8 {__version__}\n"),
    ([], 2, "error: the following arguments are required: COMMAND"),
    (["trian"], 2, "error: argument COMMAND: invalid choice: 'trian'"),
    (["memory", "--batch_size=x"], 2, "'llm-fp8 memory --help_all' lists the options."),
    (["verify", "--batch_size=0"], 2, "error: argument --batch_size: must be at least 1"),
    (["train", "--batch_size=0"], 2, "batch_size: must be at least 1"),
])  # fmt: skip
def test_command_passes_arguments_to_program(arguments, code, message, monkeypatch, capsys):
    from llm_fp8.__main__ import main

    monkeypatch.setattr(sys, "argv", ["llm-fp8", *arguments])
    with pytest.raises(SystemExit) as system_exit:
        main()
    printed = capsys.readouterr()
    assert system_exit.value.code == code and message in printed.out + printed.err
