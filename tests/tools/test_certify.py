"""`llm-fp8 certify`: the program of somebody else runs in a process of its own. Only the kernels are made up."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.processes import ROOT, run_program

THEIRS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
"""
CERTIFY = """
import contextlib, sys
sys.path.insert(0, "ROOT")
from llm_fp8.tools import certify, hf_trainer_callback, script
certify.record_kernels, hf_trainer_callback.can_record = contextlib.nullcontext, lambda: True
hf_trainer_callback.kernel_times = lambda _: {"KERNEL": (1, 1e-5)}
script.run_script(certify.main)
"""


@pytest.mark.parametrize(("kernel", "verdict"), [("gemm_bf16_nn", "certified"), ("gemm_e4m3_tn", "failed")])
def test_endless_program_is_judged_at_its_third_step(kernel, verdict, tmp_path):
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "certify.py").write_text(CERTIFY.replace("KERNEL", kernel).replace("ROOT", str(ROOT)))
    options = ["--precision=bf16", "--step=3", f"--output={tmp_path / 'certificate.json'}", "--"]
    command = [sys.executable, str(tmp_path / "certify.py"), *options, str(tmp_path / "theirs.py")]
    assert run_program(command, log=tmp_path / "log").exit_code == (verdict == "failed")
    assert json.loads((tmp_path / "certificate.json").read_text())["verdict"] == verdict
