#!/usr/bin/env python
"""A job of benchmarks/rivals.py for Unsloth, which is to be imported before transformers and TRL.

python benchmarks/rival_unsloth.py JOB.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import unsloth  # isort: skip # noqa: F401

from benchmarks.rival_trainings import run_job
from llm_fp8.utils.errors import run_script


def main() -> int:
    """Train by the job's file."""
    run_job(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    run_script(main)
