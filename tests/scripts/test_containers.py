"""The container's files, as far as they can be checked without building it: what they name exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with what follows them, comments left out and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined if line.strip())]


def all_of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def test_the_base_is_pinned_and_it_runs_as_somebody_else_than_root():
    (base,) = all_of("FROM")
    assert re.fullmatch(r"nvidia/cuda:[\d.]+-devel-ubuntu[\d.]+", base)
    assert all_of("USER")[-1] == "${USER_ID}:${GROUP_ID}"
    order = [word for word, _ in instructions()]
    assert order.index("USER") > max(number for number, word in enumerate(order) if word in ("RUN", "COPY"))


def test_everything_that_is_copied_is_there_and_what_runs_by_default_is_among_it():
    sources = [source for rest in all_of("COPY") for source in rest.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    command = yaml.safe_load(all_of("CMD")[0])
    assert command == ["python", "scripts/verify_fp8.py"] and "scripts/" in sources
    assert not all_of("ENTRYPOINT"), "NVIDIA's stays"


@pytest.mark.slow
def test_what_the_installation_needs_stands_before_it(tmp_path):
    """An interpreter that does nothing takes the place of the environment's."""
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


def test_compose():
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    (service,) = content["services"].values()
    assert service["ipc"] == "host" and service["ulimits"] == {"memlock": -1, "stack": 67108864}
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    environment = dict(word.split("=", 1) for rest in all_of("ENV") for word in shlex.split(rest))
    assert environment["HF_HOME"] in dict(volume.split(":") for volume in service["volumes"]).values()
    assert set(service["build"]["args"]) <= {rest.partition("=")[0] for rest in all_of("ARG")}
