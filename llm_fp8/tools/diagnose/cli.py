"""What one training step computes in which precision, where its time and memory go, and which option would help.

`llm-fp8 diagnose` and scripts/diagnose_fp8.py.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import SUPPRESS
from pathlib import Path

from llm_fp8.utils.cuda_environment import CUDA_DEFAULTS

os.environ.update({**CUDA_DEFAULTS, **os.environ})  # before torch is imported

from llm_fp8.config.accelerate_env import launch_ranks
from llm_fp8.config.parser import parse_launch
from llm_fp8.config.validation import refuse_auto
from llm_fp8.utils.errors import OneSentenceParser, UserError
from llm_fp8.utils.json_files import require_writable, write_json_atomic


def own_parser() -> OneSentenceParser:
    """The options that train_fp8.py has not."""
    parser = OneSentenceParser(add_help=False, allow_abbrev=False, usage=SUPPRESS)
    group = parser.add_argument_group("options of the diagnosis")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the findings to this JSON file")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="keep the recorded step as a Chrome trace (open it in https://ui.perfetto.dev)",
    )
    group.add_argument(
        "--quality",
        action="store_true",
        help="measure instead, on the run's weights and text, what fp8 costs in the forward pass, by kind of module",
    )
    return parser


def main() -> int:
    """Diagnose, print, write; returns the exit code."""
    parser = own_parser()
    own, rest = parser.parse_known_args(sys.argv[1:])
    if {"-h", "--help", "--help-all"} & set(rest):
        print(parser.format_help())
    num_processes = launch_ranks(os.environ).world_size
    if num_processes > 1:
        raise UserError(
            f"diagnose_fp8.py looks at one process and the launcher started {num_processes}; start it with python, on "
            "one GPU (train_multi_gpu.py records communication in its own summary)."
        )
    config, _ = parse_launch(rest, os.environ, description=(__doc__ or "").split("\n\n")[0])
    refuse_auto(config)
    for flag, path in (("--json", own.json), ("--trace", own.trace)):
        if path is not None:
            require_writable(flag, path)
    if own.json is not None and own.trace is not None and own.json.resolve() == own.trace.resolve():
        raise UserError(f"--json and --trace both name {own.json}; give each a file of its own.")

    if own.quality:
        if own.trace is not None:
            raise UserError("--trace records a step, and --quality takes none; drop one of them.")
        from llm_fp8.tools.diagnose.quality import measure_quality

        quality = measure_quality(config)
        print(quality.describe())
        if own.json is not None:
            write_json_atomic(own.json, dataclasses.asdict(quality))
            print(f"findings in {own.json}")
        return 0

    from rich.console import Console  # after the parser: --help and mistakes answer without loading the rest

    from llm_fp8.tools.diagnose.render import render
    from llm_fp8.tools.diagnose.session import diagnose

    found = diagnose(config, own.trace)
    # A pipe or a log file has no width to fit into; tables that are folded to 80 columns could not be read there.
    render(found, Console(width=None if sys.stdout.isatty() else 180))
    if own.json is not None:
        write_json_atomic(own.json, found)
        print(f"findings in {own.json}")
    if own.trace is not None:
        recorded = found["time"] is not None
        print(f"trace in {own.trace}" if recorded else f"no trace in {own.trace}: without a GPU no step is recorded")
    exit_code: int = found["exit_code"]
    return exit_code
