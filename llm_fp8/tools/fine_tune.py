"""Fine-tune from a notebook or another program. The process continues after the run and may start another run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import Any
from unittest.mock import patch

from llm_fp8.config.parser import parse_launch, to_argv
from llm_fp8.tools.script import CUDA_DEFAULTS


def fine_tune(**options: Any) -> dict[str, Any]:
    """Fine-tune in this process and return the contents of summary.json. `options` are named as in train_fp8.py. Raise
    `UserError` for bad options, and `FailedCheck` if the kernels that ran do not have the requested precision. If a
    signal stops the run, raise the signal again after saving a checkpoint; SIGINT raises KeyboardInterrupt.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {**CUDA_DEFAULTS, **os.environ}))
        # run.json and the model card record sys.argv.
        stack.enter_context(patch.object(sys, "argv", ["train_fp8.py", *to_argv(options)]))
        config = parse_launch(sys.argv[1:], os.environ)

        import torch  # imported here, so that bad options are reported first

        from llm_fp8.run.run import run_training
        from llm_fp8.run.timeline import RunResults
        from llm_fp8.tools.dry_run import dry_run
        from llm_fp8.utils.hf_internals import fresh_accelerate

        stack.enter_context(fresh_accelerate())
        torch.compiler.reset()  # code of earlier models counts towards the limit of recompilations
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        results = RunResults()
        try:
            exit_code = dry_run(config) if config.run.dry_run else run_training(config, results)
        except BaseException as error:
            for failure in filter(None, (error, error.__cause__)):  # otherwise a notebook keeps the model alive
                traceback.clear_frames(failure.__traceback__)
            raise
    if exit_code:
        signal.raise_signal(exit_code - 128)
    return results.summary
