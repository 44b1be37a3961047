"""Free memory of the host, as the kernel's files of control groups limit it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from llm_fp8.utils.host_memory import free_host_bytes

MIB = 2**20


def write_group(folder: Path, limit: object, used_mib: int, cached_mib: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached_mib * MIB}\nfile_dirty 3\n")


@pytest.mark.parametrize("folder", ["job/step", "job", ""])  # its own, the group around it, the root of a container
def test_a_control_group_allows_less(tmp_path, folder):
    (tmp_path / "own").write_text("0::/job/step\n")
    write_group(tmp_path / "groups" / folder, 100 * MIB, used_mib=70, cached_mib=20)
    assert free_host_bytes(tmp_path / "groups", tmp_path / "own") == 50 * MIB
    write_group(tmp_path / "groups" / folder, "max", 70, 20)
    assert free_host_bytes(tmp_path / "groups", tmp_path / "own") > 100 * MIB


def test_on_this_machine(tmp_path):
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total
    assert free_host_bytes(tmp_path, tmp_path / "none") > 0
