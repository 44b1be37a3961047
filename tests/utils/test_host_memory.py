"""Free memory of the host, as the kernel's files of control groups limit it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from llm_fp8.utils.host_memory import free_host_bytes

MIB = 2**20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def write_group(folder: Path, names: tuple[str, str, str], limit: object, used_mib: int, cached_mib: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached_mib * MIB}\nfile_dirty 3\n")


@pytest.mark.parametrize(
    ("own", "folder", "names"),
    [
        ("0::/job/step\n", "job/step", V2),
        ("0::/job/step\n", "job", V2),  # a limit of the group around it
        ("0::/docker/abc\n", "", V2),  # inside the container its own group is the root
        ("9:name=systemd:/\n4:cpuset,memory:/job\n0::/\n", "memory/job", V1),
        ("4:memory:/docker/abc\n0::/\n", "memory", V1),
    ],
)
def test_a_control_group_allows_less(tmp_path, own, folder, names):
    (tmp_path / "own").write_text(own)
    write_group(tmp_path / "groups" / folder, names, 100 * MIB, used_mib=70, cached_mib=20)
    assert free_host_bytes(tmp_path / "groups", tmp_path / "own") == 50 * MIB
    # A limit elsewhere is not ours.
    write_group(tmp_path / "groups" / folder, names, "max" if names == V2 else 2**63 - 4096, 70, 20)
    write_group(tmp_path / "groups" / folder / "another", names, MIB, 0, 0)
    assert free_host_bytes(tmp_path / "groups", tmp_path / "own") > 100 * MIB


def test_without_control_groups_it_is_what_the_host_has(tmp_path):
    available = psutil.virtual_memory().available
    assert free_host_bytes(tmp_path, tmp_path / "none") == pytest.approx(available, rel=0.2)


def test_on_this_machine():
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total
