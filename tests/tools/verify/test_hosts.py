"""`llm-fp8 verify` under a launcher: two processes act as two hosts."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import pytest
import torch

from tests.support.processes import exit_code, start_ranks


def verify_on_host(options: list[str], change: str, folder: Path) -> int:
    """Run `llm-fp8 verify` on a host called host-RANK. Return the exit code. `change` names a defect, e.g. "crash"."""
    from llm_fp8.observability import provenance
    from llm_fp8.tools.verify import cli, hosts

    host = f"host-{os.environ['RANK']}"
    platform.node = lambda: host
    hosts.LIMIT_S = 3.0 if change == "absent" else hosts.LIMIT_S
    if host == "host-1" and change == "absent":
        return 0
    if host == "host-1" and change == "version":
        installed = provenance.package_version
        provenance.package_version = lambda name: "0.1" if name == "peft" else installed(name)
    if host == "host-1" and change == "crash":
        hosts.device_of_process = lambda: torch.device("meta")
    working_folder = folder / (host if change == "folder" else "shared")
    working_folder.mkdir(exist_ok=True)
    os.chdir(working_folder)
    return cli.main(options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "codes", "sentences"),
    [
        ("", [0, 0], ["passed network", "passed step"]),
        ("version", [1, 1], ["failed versions peft: ", "0.1 on host-1"]),
        ("folder", [1, 1], ["failed step", "--output_dir runs/x on host-1"]),
        ("crash", [1, 1], ["error: host-1: network: "]),
        ("absent", [1, 0], ["error: host-0: versions: ", "NCCL_SOCKET_IFNAME", "firewall"]),
    ],
)
def test_verify_names_the_host_that_differs(change, codes, sentences, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log = tmp_path / "log"
    program = functools.partial(verify_on_host, change=change, folder=tmp_path)
    ranks = start_ranks(2, log, "--output_dir=runs/x", "--use_te", hosts=2, program=program)
    assert [exit_code(process) for process in ranks] == codes, log.read_text()
    printed = " ".join(log.read_text().split())
    assert all(sentence in printed for sentence in sentences), printed
    assert not list(tmp_path.glob("*/runs/x/*")), "the check removes the files that it wrote"
