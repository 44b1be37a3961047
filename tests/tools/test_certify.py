"""`llm-fp8 certify`: the program of somebody else runs in processes of its own. Only the kernels are made up."""

from __future__ import annotations

import json
import sys

import pytest

from llm_fp8.tools import certify

THEIRS = """
import contextlib, torch
from llm_fp8.tools import certify, hf_trainer_callback
certify.record_kernels, hf_trainer_callback.can_record = contextlib.nullcontext, lambda: True
hf_trainer_callback.kernel_times = lambda _: {"KERNEL": (1, 1e-5)}
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("kernel", "verdict"), [("gemm_bf16_nn", "certified"), ("gemm_e4m3_tn", "failed")])
def test_endless_program_is_judged_at_its_third_step(kernel, verdict, tmp_path, call_main):
    (tmp_path / "theirs.py").write_text(THEIRS.replace("KERNEL", kernel))
    path = tmp_path / "certificate.json"
    program = ("--", sys.executable, tmp_path / "theirs.py")
    assert call_main(certify, "--precision=bf16", "--step=3", f"--output={path}", *program) == (verdict == "failed")
    assert json.loads(path.read_text())["verdict"] == verdict
