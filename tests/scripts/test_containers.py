"""The container's files, as far as they can be checked without building it: what they name exists, and what stays as
the image has it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llm_fp8.tools.verify import versions
from scripts import container_requirements

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
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)
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
def test_what_the_first_installation_needs_stands_before_it(tmp_path):
    """Its script imports modules of this project, and must find them with nothing but the files that were copied by
    then.
    """
    order = instructions()
    installs = next(number for number, (_, rest) in enumerate(order) if "container_requirements.py write" in rest)
    for word, rest in order[:installs]:
        if word == "COPY":
            *sources, target = rest.split()
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            for source in sources:
                shutil.copy(ROOT / source, tmp_path / target)
    assert all((tmp_path / file).is_file() for file in versions.REQUIREMENTS)
    command = [sys.executable, "scripts/container_requirements.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = dict(word.split("=", 1) for rest in all_of("ENV") for word in shlex.split(rest))
    assert environment["PIP_CONSTRAINT"] == "/opt/llm-fp8/constraints.txt"


def test_compose():
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    (service,) = content["services"].values()
    assert service["ipc"] == "host" and service["ulimits"] == {"memlock": -1, "stack": 67108864}
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    environment = dict(word.split("=", 1) for rest in all_of("ENV") for word in shlex.split(rest))
    assert environment["HF_HOME"] in dict(volume.split(":") for volume in service["volumes"]).values()
    assert set(service["build"]["args"]) <= {rest.partition("=")[0] for rest in all_of("ARG")}


IMAGE = {"torch": "2.13.0a0+9186a08b2c.nv26.07", "numpy": "2.1.0", "transformer-engine": "2.16.0+1a2b3c"}


def test_the_images_own_packages_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(container_requirements, "installed", lambda names: dict(IMAGE))
    assert container_requirements.main(["write", str(tmp_path)]) == 0
    kept = (tmp_path / "constraints.txt").read_text().splitlines()
    assert kept == [f"{name}=={IMAGE[name]}" for name in sorted(IMAGE)]
    left = versions.pins_of((tmp_path / "requirements.txt").read_text())
    assert {pin.name for pin in left} == {pin.name for pin in versions.read_pins()} - set(IMAGE)
    assert container_requirements.main(["check", str(tmp_path)]) == 0
    monkeypatch.setattr(container_requirements, "installed", lambda names: {**IMAGE, "torch": "2.13.0"})
    assert container_requirements.main(["check", str(tmp_path)]) == 1
    assert "torch==2.13.0a0+9186a08b2c.nv26.07 became 2.13.0" in capsys.readouterr().err
    monkeypatch.setattr(container_requirements, "installed", lambda names: {"numpy": IMAGE["numpy"]})
    assert container_requirements.main(["write", str(tmp_path / "out")]) == 2
