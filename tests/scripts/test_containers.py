"""The Dockerfile and docker-compose.yml, as far as they can be checked without building the image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments, without comments and with continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined if line.strip())]


def arguments_of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_base_image_is_pinned_and_the_user_is_not_root():
    (base,) = arguments_of("FROM")
    assert re.fullmatch(r"nvidia/cuda:[\d.]+-devel-ubuntu[\d.]+", base)
    assert arguments_of("USER")[-1] == "${USER_ID}:${GROUP_ID}"
    order = [word for word, _ in instructions()]
    assert order.index("USER") > max(number for number, word in enumerate(order) if word in ("RUN", "COPY"))


def test_copied_files_and_the_default_command_exist():
    sources = [source for rest in arguments_of("COPY") for source in rest.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    command = yaml.safe_load(arguments_of("CMD")[0])
    assert command == ["python", "scripts/verify_fp8.py"] and "scripts/" in sources
    assert not arguments_of("ENTRYPOINT"), "the entry point of NVIDIA's image must remain"


@pytest.mark.slow
def test_files_for_the_installation_are_copied_before_it(tmp_path):
    """In the test, quickstart.sh has only the files that are copied before it, and a Python that does nothing."""
    order = instructions()
    installs = next(number for number, (_, rest) in enumerate(order) if "quickstart.sh --gpu" in rest)
    for word, rest in order[:installs]:
        if word == "COPY":
            *sources, target = rest.split()
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            for source in sources:
                shutil.copy(ROOT / source, tmp_path / target)
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "VENV_DIR": str(tmp_path / "environment")}
    command = ["bash", "scripts/quickstart.sh", "--gpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "environment" / "installed-requirements-gpu.txt").is_file()
    required = re.search(r"--requirement (\S+)", order[installs][1])
    assert required and (tmp_path / required[1]).is_file()
