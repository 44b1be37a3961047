"""Fine-tuning from a notebook or another program: a run in a process that goes on, and may run again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import Any
from unittest.mock import patch

from llm_fp8.config.parser import parse_launch, words_of
from llm_fp8.utils.script import CUDA_DEFAULTS


def fine_tune(**options: Any) -> dict[str, Any]:
    """Fine-tune with the options of train_fp8.py, by the same names, in this process, and return what summary.json
    holds. Mistakes are raised as `UserError`, a failed certificate as `FailedCheck`. A signal that stops the run acts
    once a checkpoint is saved: SIGINT raises KeyboardInterrupt.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {**CUDA_DEFAULTS, **os.environ}))
        # As run.json and the model card record it.
        stack.enter_context(patch.object(sys, "argv", ["train_fp8.py", *words_of(options)]))
        config = parse_launch(sys.argv[1:], os.environ)

        import torch  # here, so that mistakes do not wait for it

        from llm_fp8.run.run import run_training
        from llm_fp8.run.timeline import RunResults
        from llm_fp8.utils.hf_internals import fresh_accelerate

        stack.enter_context(fresh_accelerate())
        torch.compiler.reset()  # code of earlier models counts towards the limit of recompilations
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        results = RunResults()
        try:
            exit_code = run_training(config, results)
        except BaseException as error:
            for failure in filter(None, (error, error.__cause__)):  # a notebook keeps them, and so would keep the model
                traceback.clear_frames(failure.__traceback__)
            raise
    if exit_code:
        signal.raise_signal(exit_code - 128)
    return results.summary
