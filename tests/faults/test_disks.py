"""A short campaign of full disks; `python -m tests.faults.disks` runs a long one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.faults.disks import campaign

pytestmark = pytest.mark.slow


def test_runs_on_full_disks_end_in_a_sentence_and_go_on(tmp_path):
    (tmp_path / "probe").mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "probe")], capture_output=True).returncode
    ):
        pytest.skip("mounting a file system is not permitted here")
    subprocess.run(["umount", str(tmp_path / "probe")], check=True)
    found = campaign(seed=1, count=3, scratch=tmp_path)
    assert found["unexplained"] == [] and found["different"] == []
    assert found["exit_codes"]["2"] >= 1
