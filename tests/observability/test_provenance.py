"""The record of code and machine in run.json."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llm_fp8.observability.provenance import collect_provenance, git_state, relevant_environment
from llm_fp8.utils.packages import REPOSITORY


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_command_is_relative_to_the_repository(monkeypatch, tmp_path) -> None:
    argv = [str(REPOSITORY / "scripts" / "x.py"), "--json", "/tmp/y"]
    assert collect_provenance(argv)["command"] == ["scripts/x.py", "--json", "/tmp/y"]
    monkeypatch.chdir(REPOSITORY / "scripts")
    assert collect_provenance(["x.py"])["command"] == ["scripts/x.py"]
    monkeypatch.chdir(tmp_path)
    assert collect_provenance(["x.py"])["command"] == ["x.py"]


@pytest.mark.slow
def test_git_state_has_the_commit_and_whether_files_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "file.txt").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "file.txt").write_text("two")
    assert git_state(tmp_path) == {"commit": commit, "dirty": True}


def test_environment_has_gpu_variables_and_no_secrets() -> None:
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
