"""Certify the training program of somebody else: run it up to an early optimizer step, judge that step, and end it.

python -m llm_fp8 certify --precision fp8 -- their_script.py --their_option
torchrun --nproc_per_node=2 -m llm_fp8 certify --precision bf16 -- -m their.module
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import runpy
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import get_args

from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from llm_fp8.config.recipes import RequestedPrecision, recipe_names
from llm_fp8.observability.kernel_trace import record_kernels
from llm_fp8.tools.script import EXIT_FAILED_CHECK, writable
from llm_fp8.utils.errors import FailedCheck, OneSentenceParser, UserError, number
from llm_fp8.utils.json_files import write_json_atomic


class StepRecorder:
    """Counts the steps of a process's first optimizer. Records and judges step `options.step`, and ends the process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._recording = options, contextlib.ExitStack()
        self._optimizer: optim.Optimizer | None = None
        self._num_steps, self._passes = 0, Counter[str]()

    def __call__(self, optimizer: optim.Optimizer, *_: object) -> None:
        """Call this after each optimizer step."""
        self._optimizer = self._optimizer or optimizer
        self._num_steps += optimizer is self._optimizer
        if optimizer is not self._optimizer or self._num_steps < self._options.step - 1:
            return
        # Only now: the program may set CUDA_VISIBLE_DEVICES, and some packages must be imported before transformers.
        from llm_fp8.tools import hf_trainer_callback as trainer

        if not trainer.can_record():
            raise UserError("certify records the kernels of an NVIDIA GPU, and there is none here.")
        if self._num_steps < self._options.step:
            self._model = model_of(optimizer)
            # A compiled model ignores later hooks of modules, FSDP those of parameters.
            self._model.register_forward_pre_hook(lambda model, _: self._passes.update(forward=int(model.training)))
            trained = (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)
            next(trained).register_post_accumulate_grad_hook(lambda _: self._passes.update(backward=1))
            self._profile = self._recording.enter_context(record_kernels())
            return
        self._recording.close()
        num_micro_batches = max((1, *self._passes.values()))
        asked = self._options.precision, os.environ, num_micro_batches, self._options.recipe
        certificate = trainer.judge(self._profile, self._model, optimizer, *asked)
        if os.environ.get("RANK", "0") == "0":
            write_json_atomic(self._options.output, certificate.to_dict())
            print(certificate.describe(), *certificate.reasons, f"written to {self._options.output}", sep="\n  ")
        sys.stdout.flush()
        os._exit(EXIT_FAILED_CHECK if certificate.verdict == "failed" else 0)  # nothing in the program may catch it


def model_of(optimizer: optim.Optimizer) -> nn.Module:
    """Return the largest module that has all parameters of `optimizer`, unwrapped. Raise `UserError` if none has."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]  # `isinstance` asks dead proxies
    holders = [each for each in modules if parameters <= {id(parameter) for parameter in each.parameters()}]
    if not holders:
        raise UserError("certify: no module has all parameters of the optimizer, so its GEMMs cannot be counted.")
    return max(holders, key=lambda each: (sum(1 for _ in each.parameters()), -sum(1 for _ in each.modules())))


def main() -> int:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--precision", required=True, choices=get_args(RequestedPrecision))
    parser.add_argument("--recipe", choices=recipe_names(), help="fp8 recipe (default: delayed scaling)")
    parser.add_argument("--step", type=number(int, at_least=2), default=5, help="step to record (default 5)")
    parser.add_argument("--output", type=writable, default=Path("certificate.json"), help="file of the certificate")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- SCRIPT or -- -m MODULE, and its options")
    options = parser.parse_args()
    if not (program := options.program[options.program[:1] == ["--"] :]):
        raise UserError("certify needs a program, such as '-- train.py --lr 1e-5' or '-- -m their.module'.")
    options.output = options.output.absolute()
    register_optimizer_step_post_hook(StepRecorder(options))
    is_module = program[0] == "-m"
    sys.argv = program[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(program[0]))
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    except UserError:
        raise
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED_CHECK
    raise FailedCheck(f"certify: {sys.argv[0]} ended before optimizer step {options.step}.")
