"""Certify the training program of somebody else: run its command up to an early optimizer step, and judge that step.

    llm-fp8 certify --precision fp8 -- accelerate launch their_script.py ...

Each Python process of the command imports certify_hook/sitecustomize.py, which has `after_step` called after every step
of a torch optimizer. The process ends after the recorded step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

from torch import nn, optim

from llm_fp8.config.recipes import recipe_names
from llm_fp8.observability.kernel_trace import record_kernels
from llm_fp8.tools import hf_trainer_callback as trainer
from llm_fp8.tools.script import EXIT_FAILED_CHECK, writable
from llm_fp8.utils.errors import FailedCheck, OneSentenceParser, UserError, number
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

_OPTIONS = "LLM_FP8_CERTIFY"  # environment variable: precision, recipe, step and file
_recording: dict[str, Any] = {"num_steps": 0}


def after_step(optimizer: optim.Optimizer, *_: object) -> None:
    """Record the optimizer step whose number is asked for, write the certificate, and end the process."""
    precision, recipe, step, path = os.environ[_OPTIONS].split(",", 3)
    if _recording.setdefault("optimizer", optimizer) is not optimizer:  # one of several optimizers marks the steps
        return
    _recording["num_steps"] += 1
    if _recording["num_steps"] == int(step) - 1:
        if not trainer.can_record():
            print("error: certify records the kernels of an NVIDIA GPU, and there is none here.", file=sys.stderr)
            os._exit(3)
        _recording["model"] = model = model_of(optimizer)
        _recording["forwards"] = []
        model.register_forward_pre_hook(lambda *_: _recording["forwards"].append(1) if model.training else None)
        _recording["stack"] = stack = contextlib.ExitStack()
        _recording["profile"] = stack.enter_context(record_kernels())
    elif _recording["num_steps"] == int(step):
        _recording["stack"].close()
        judged = (_recording["profile"], _recording["model"], optimizer, precision, os.environ)
        certificate = trainer.judge(*judged, max(1, len(_recording["forwards"])), recipe or None)
        if os.environ.get("RANK", "0") == "0":
            write_json_atomic(Path(path), certificate.to_dict())
            print(certificate.describe(), *certificate.reasons, sep="\n  ", flush=True)
        os._exit(EXIT_FAILED_CHECK if certificate.verdict == "failed" else 0)  # nothing of the program may catch it


def model_of(optimizer: optim.Optimizer) -> nn.Module:
    """Return the smallest module that has all parameters of `optimizer`. Raise `UserError` if none has."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = [each for each in gc.get_objects() if isinstance(each, nn.Module)]
    holders = [each for each in modules if parameters <= {id(parameter) for parameter in each.parameters()}]
    if not holders:
        raise UserError("certify: no module holds all parameters of the optimizer, so its GEMMs cannot be counted.")
    return min(holders, key=lambda module: sum(1 for _ in module.modules()))


def main() -> int:
    parser = OneSentenceParser(prog="llm-fp8 certify", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--precision", required=True, choices=get_args(trainer.RequestedPrecision))
    parser.add_argument("--recipe", default="", choices=recipe_names(), help="fp8 recipe (default: delayed scaling)")
    parser.add_argument("--step", type=number(int, at_least=2), default=5, help="step to record (default 5)")
    parser.add_argument("--output", type=writable, default=Path("certificate.json"), help="file of the certificate")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that trains")
    options = parser.parse_args()
    command = options.command[options.command[:1] == ["--"] :]
    if not command:
        raise UserError("certify needs a command, such as '-- python train.py'.")
    path = options.output.absolute()
    path.unlink(missing_ok=True)
    folders = (Path(__file__).with_name("certify_hook"), REPOSITORY, os.environ.get("PYTHONPATH", ""))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, folders)))}
    environ[_OPTIONS] = f"{options.precision},{options.recipe},{options.step},{path}"
    try:
        code = subprocess.run(command, env=environ).returncode
    except OSError as error:
        raise UserError(f"certify: {command[0]} cannot be started: {error.strerror}.") from error
    if not path.exists():
        raise FailedCheck(f"certify: the command ended (exit code {code}) before optimizer step {options.step}.")
    print(f"written to {path}")
    return EXIT_FAILED_CHECK if read_json(path)["verdict"] == "failed" else 0
