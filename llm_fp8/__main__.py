"""The command `llm-fp8`, which runs the other programs. A launcher starts it as `torchrun -m llm_fp8 train ...`."""

from __future__ import annotations

import importlib
import os
import sys

from llm_fp8 import __version__
from llm_fp8.tools.script import importing, run_script
from llm_fp8.utils.errors import OneSentenceParser

PROGRAMS = {
    "train": ("train_fp8", "fine-tune; started by torchrun or accelerate launch, on several GPUs"),
    "verify": ("llm_fp8.tools.verify.cli", "check whether this machine, or each host of a launch, is fit to train"),
    "memory": ("llm_fp8.tools.memory", "estimate whether a model fits a GPU, and with which options; needs no GPU"),
    "compare": ("llm_fp8.tools.compare.cli", "compare bf16 and fp8 runs that differ in nothing else"),
    "diagnose": ("llm_fp8.tools.diagnose.cli", "show where a step's precision, time and memory go"),
    "certify": ("llm_fp8.tools.certify", "check in which precision the training program of somebody else computes"),
    "evaluate": ("llm_fp8.tools.evaluate", "measure the share of held-out problems that a model answers right"),
    "export-fp8": ("llm_fp8.tools.export_fp8", "write an exported model in fp8, as vLLM loads it"),
}
"""Command -> module whose `main()` reads `sys.argv` and returns the exit code, and help text."""


def main() -> None:
    """Run one of `PROGRAMS` and exit with its code."""
    run_script(_run)


def _run() -> int:
    parser = OneSentenceParser(
        prog="llm-fp8",
        usage="llm-fp8 COMMAND [OPTIONS]",
        epilog="'llm-fp8 COMMAND --help' lists the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"llm-fp8 {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (_, summary) in PROGRAMS.items():
        commands.add_parser(name, help=summary, add_help=False)
    command = parser.parse_args(sys.argv[1:2]).command
    module = PROGRAMS[command][0]
    if command == "train" and "RANK" in os.environ:
        module = "train_multi_gpu"
    sys.argv[:2] = [f"llm-fp8 {command}"]
    with importing():
        program = importlib.import_module(module)
    return program.main()


if __name__ == "__main__":
    main()
