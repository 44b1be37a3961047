"""What run.json says about code and machine, and that a file is replaced whole or not at all."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llm_fp8.observability.provenance import collect_provenance, git_state, relevant_environment
from llm_fp8.utils.json_files import json_line, read_json, read_jsonl, read_metrics, with_floats, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY, package_version


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_provenance_names_versions_hardware_and_command() -> None:
    found = collect_provenance(["train_fp8.py", "--learning_rate", "3e-3"])
    assert json.loads(json.dumps(found)) == found
    assert found["command"] == ["train_fp8.py", "--learning_rate", "3e-3"]
    assert found["packages"]["torch"] == package_version("torch")
    assert str(found["packages"]["torch"]).split("+")[0] == torch.__version__.split("+")[0]
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["time_utc"].endswith("+00:00")
    assert len(found["gpus"]) == len(set(found["gpu_uuids"])) == torch.cuda.device_count()
    assert (found["cuda"] is None) == (torch.version.cuda is None)


def test_each_board_is_named_as_nvidia_smi_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 1 << 37, 9, 0

        def __init__(self, index: int) -> None:
            self.uuid = f"00000000-0000-0000-0000-00000000000{index}"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    found = collect_provenance(["x"])
    assert found["gpu_uuids"] == [
        "GPU-00000000-0000-0000-0000-000000000000",
        "GPU-00000000-0000-0000-0000-000000000001",
    ]
    assert found["gpus"][0] == found["gpus"][1], "runs on two boards of one kind differ in nothing here"


def test_the_command_is_that_of_the_repository_s_root(monkeypatch, tmp_path) -> None:
    assert collect_provenance([str(REPOSITORY / "scripts" / "x.py"), "--json", "/tmp/y"])["command"] == [
        "scripts/x.py",
        "--json",
        "/tmp/y",
    ]
    monkeypatch.chdir(REPOSITORY / "scripts")
    assert collect_provenance(["x.py"])["command"] == ["scripts/x.py"]
    monkeypatch.chdir(tmp_path)
    assert collect_provenance(["x.py"])["command"] == ["x.py"]


@pytest.mark.slow
def test_provenance_imports_nothing_heavy() -> None:
    code = (
        "import sys; from llm_fp8.observability.provenance import collect_provenance; collect_provenance(['x']); "
        "print([name for name in ('transformer_engine', 'wandb', 'flash_attn', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert package_version("no-such-package-here") is None


@pytest.mark.slow
def test_git_state_tells_a_clean_commit_from_a_changed_one(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None  # nothing committed
    (tmp_path / "file.txt").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "file.txt").write_text("two")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}


@pytest.mark.slow
def test_a_copy_inside_another_repository_has_no_git_state(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file.txt").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    inner = tmp_path / "unpacked"
    inner.mkdir()
    assert git_state(inner) is None


def test_of_the_environment_only_what_steers_the_gpu_is_kept_and_no_secret() -> None:
    environment = {
        "NVTE_DEBUG": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "WANDB_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "ACCELERATE_SECRET_TOKEN": "secret",
        "HOME": "/home/someone",
    }
    assert relevant_environment(environment) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "NVTE_DEBUG": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"loss": 1.0})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"loss": torch.tensor(1.0)})
    assert json.loads(path.read_text()) == {"loss": 1.0}
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_json_has_no_bare_nan() -> None:
    line = json_line({"a": math.nan, "b": [math.inf, -math.inf], "c": Path("x") / "y", "d": (1, 2)})
    read = json.loads(line, parse_constant=lambda word: pytest.fail(f"bare {word} in JSON"))
    assert read == {"a": "NaN", "b": ["Infinity", "-Infinity"], "c": "x/y", "d": [1, 2]}
    again = with_floats(read)
    assert math.isnan(again["a"]) and again["b"] == [math.inf, -math.inf] and again["c"] == "x/y"


def test_what_is_not_finite_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json_atomic(path, {"rows": [{"losses": [7.0, math.nan], "last_loss": math.inf}], "name": "NaN or not"})
    read = read_json(path)
    (row,) = read["rows"]
    assert (
        row["losses"][0] == 7.0
        and math.isnan(row["losses"][1])
        and row["last_loss"] == math.inf
        and read["name"] == "NaN or not"
    )
    path.write_text(json_line({"expected_answer": "Infinity"}))
    assert read_jsonl(path) == [{"expected_answer": "Infinity"}], "rows of data are text"
    path.write_text(json_line({"step": 1, "loss": math.inf}))
    assert read_metrics(path) == [{"step": 1, "loss": math.inf}]
