"""`llm-fp8 certify`: the program of somebody else runs in a process of its own. Only the kernels are made up."""

from __future__ import annotations

import json
import sys

import pytest

from llm_fp8.tools.programs import Outcome
from tests.support.processes import ROOT, run_program

THEIRS = """
import torch
model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).bfloat16()
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compute = torch.compile(model, backend="eager") if COMPILES else model
while True:
    for _ in range(2):
        compute(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
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


def certified(tmp_path, theirs: str, kernel: str, *program: str) -> Outcome:
    """Certify the program `theirs` at its third step, as if it had run `kernel` alone."""
    (tmp_path / "theirs.py").write_text(theirs)
    (tmp_path / "certify.py").write_text(CERTIFY.replace("KERNEL", kernel).replace("ROOT", str(ROOT)))
    options = ["--precision=bf16", "--step=3", f"--output={tmp_path / 'certificate.json'}", "--"]
    command = [sys.executable, str(tmp_path / "certify.py"), *options, *(program or [str(tmp_path / "theirs.py")])]
    return run_program(command, log=tmp_path / "log")


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(("kernel", "verdict"), [("gemm_bf16_nn", "certified"), ("gemm_e4m3_tn", "failed")])
def test_endless_program_is_judged_at_its_third_step(kernel, verdict, compiles, tmp_path):
    outcome = certified(tmp_path, THEIRS.replace("COMPILES", str(compiles)), kernel)
    assert outcome.exit_code == (verdict == "failed"), outcome.output
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert (certificate["verdict"], certificate["num_micro_batches"]) == (verdict, 2)


def test_optimizer_without_a_layer_of_the_model_fails(tmp_path):
    theirs = THEIRS.replace("COMPILES", "False").replace("(model.parameters()", "(model[1].parameters()")
    assert "does not hold 2" in certified(tmp_path, theirs, "gemm_bf16_nn").output


@pytest.mark.parametrize(
    ("theirs", "code", "phrase"),
    [
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("raise SystemExit(3)", 3, ""),
        ("import no_such_package", 1, "Traceback"),
        ("import sys; assert sys.modules['__main__'].__file__.endswith('theirs.py')", 1, "before optimizer step 3"),
    ],
)
def test_program_ends_as_it_does_by_itself(theirs, code, phrase, tmp_path):
    outcome = certified(tmp_path, theirs, "gemm_bf16_nn")
    assert outcome.exit_code == code and phrase in outcome.output, outcome.output
