"""The container's files, as far as they can be checked without building it: what they name exists, and what stays as
the image has it.
"""

from __future__ import annotations

import fnmatch
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
    """The Dockerfile's instructions with what stands behind them, comments left out and continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


def all_of(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def copied() -> dict[str, str]:
    """Source in the repository -> where it goes, relative to the working directory."""
    found = {}
    for rest in all_of("COPY"):
        *sources, destination = rest.split()
        found |= {source: destination for source in sources}
    return found


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path`, relative to the repository, from the build; the last line that matches
    decides.
    """
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        parts = Path(path).parts
        prefixes = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        if any(
            fnmatch.fnmatchcase(p, pattern) or fnmatch.fnmatchcase(f"/{p}", pattern.replace("**/", "*/"))
            for p in prefixes
        ):
            ignored = not line.startswith("!")
    return ignored


def test_the_base_is_pinned():
    (base,) = all_of("FROM")
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", base)


def test_it_runs_as_somebody_else_than_root():
    user = all_of("USER")[-1]
    assert user == "${USER_ID}:${GROUP_ID}"
    defaults = dict(rest.split("=", 1) for rest in all_of("ARG"))
    assert all(int(defaults[name]) > 0 for name in ("USER_ID", "GROUP_ID"))
    order = [word for word, _ in instructions()]
    assert order.index("USER") > max(number for number, word in enumerate(order) if word in ("RUN", "COPY"))


def test_everything_that_is_copied_is_there_and_goes_to_its_own_place():
    assert copied()
    for source, destination in copied().items():
        assert (ROOT / source).exists() and not is_ignored(source), source
        place = (
            f"{destination}{Path(source).name}"
            if destination.endswith("/") and not source.endswith("/")
            else destination
        )
        assert place.removeprefix("./") == source, "the repository's layout is kept"


def test_what_the_benchmarks_start_is_there():
    started = {
        name
        for path in (ROOT / "benchmarks").glob("*.py")
        for name in re.findall(r"\"(\w+/\w+\.py|\w+\.py)\"", path.read_text())
    }
    assert "examples/hf_trainer_fp8.py" in started
    assert not [name for name in started if name not in copied() and f"{name.partition('/')[0]}/" not in copied()]


def test_nothing_else_reaches_the_build():
    assert all(
        map(
            is_ignored,
            (
                ".git",
                ".venv",
                "runs",
                "checkpoints",
                "tests",
                "docs",
                "wandb",
                "llm_fp8/__pycache__",
                "scripts/__pycache__",
            ),
        )
    )
    assert not any(
        map(
            is_ignored,
            ("llm_fp8/tools/verify/runs.py", "benchmarks/results/speed_table_h200.json", "configs/ds_z1.json"),
        )
    )
    assert is_ignored("benchmarks/plots/speed_8b.png")


def test_what_runs_by_default_was_copied():
    command = yaml.safe_load(all_of("CMD")[0])
    assert command == ["python", "scripts/verify_fp8.py"] and (ROOT / command[1]).is_file()
    assert "scripts/" in copied() and not all_of("ENTRYPOINT"), "NVIDIA's stays"


@pytest.mark.slow
def test_what_the_first_installation_needs_stands_before_it(tmp_path):
    """Its script imports modules of this project, and must find them with nothing but the files that were copied by
    then.
    """
    order = instructions()
    (installs,) = [
        number
        for number, (word, rest) in enumerate(order)
        if word == "RUN" and "container_requirements.py write" in rest
    ]
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
    run = order[installs][1]
    written, installed, checked = run.split(" && ")
    assert written.split()[-1] == checked.split()[-1] == "/opt/llm-fp8"
    words = shlex.split(installed)
    assert words[0] == "PIP_CONSTRAINT=" and words[words.index("--constraint") + 1] == "/opt/llm-fp8/constraints.txt"
    environment = dict(word.split("=", 1) for rest in all_of("ENV") for word in shlex.split(rest))
    assert environment["PIP_CONSTRAINT"] == "/opt/llm-fp8/constraints.txt"


def test_compose():
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    (service,) = content["services"].values()
    assert service["ipc"] == "host" and service["ulimits"] == {"memlock": -1, "stack": 67108864}
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    mounts = dict(volume.split(":") for volume in service["volumes"])
    assert {source for source in mounts if not source.startswith(".")} == set(content["volumes"])
    environment = dict(word.split("=", 1) for rest in all_of("ENV") for word in shlex.split(rest))
    made = next(rest for rest in all_of("RUN") if "install --directory" in rest)
    assert environment["HF_HOME"] in mounts.values() and all(f" {folder} " in f"{made} " for folder in mounts.values())
    arguments = {rest.partition("=")[0] for rest in all_of("ARG")}
    assert set(service["build"]["args"]) <= arguments and (ROOT / service["build"]["context"] / "Dockerfile").is_file()


# ---- what pip leaves alone ----

IMAGE = {
    "torch": "2.13.0a0+9186a08b2c.nv26.07",
    "numpy": "2.1.0",
    "transformer-engine": "2.16.0+1a2b3c",
}


def test_the_images_own_packages_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(container_requirements, "installed", lambda names: dict(IMAGE))
    assert container_requirements.main(["write", str(tmp_path)]) == 0
    assert (tmp_path / "constraints.txt").read_text().splitlines() == [
        "numpy==2.1.0",
        "torch==2.13.0a0+9186a08b2c.nv26.07",
        "transformer-engine==2.16.0+1a2b3c",
    ]
    left = versions.pins_of((tmp_path / "requirements.txt").read_text(), "requirements.txt")
    assert {pin.name for pin in left} == {pin.name for pin in versions.read_pins()} - set(IMAGE)
    assert all("==" in str(pin.requirement.specifier) for pin in left)
    assert container_requirements.main(["check", str(tmp_path)]) == 0
    monkeypatch.setattr(container_requirements, "installed", lambda names: {**IMAGE, "torch": "2.13.0"})
    assert container_requirements.main(["check", str(tmp_path)]) == 1
    assert "torch==2.13.0a0+9186a08b2c.nv26.07 became 2.13.0" in capsys.readouterr().err


def test_an_image_without_torch_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(container_requirements, "installed", lambda names: {"numpy": IMAGE["numpy"]})
    assert container_requirements.main(["write", str(tmp_path / "out")]) == 2
    assert (
        "the image has no torch and no transformer-engine" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )
    assert container_requirements.main(["check", str(tmp_path / "out")]) == 2
