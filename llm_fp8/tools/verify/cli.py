"""`llm-fp8 verify` and scripts/verify_fp8.py: the table of checks, the command line, the output and the exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from llm_fp8.tools.programs import wide_console
from llm_fp8.tools.script import CUDA_DEFAULTS, EXIT_FAILED_CHECK, EXIT_NO_GPU, writable
from llm_fp8.tools.verify import checks, runs
from llm_fp8.tools.verify.checks import Result, Setup
from llm_fp8.utils.errors import OneSentenceParser, UserError, positive
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.ranks import LaunchRanks

_STYLES = {"failed": "bold red", "warning": "yellow", "skipped": "dim", "passed": "green"}


class Check(NamedTuple):
    """A check, which is skipped on fewer than `needs_gpus` GPUs. --quick runs only checks whose `quick` is True."""

    name: str
    function: Callable[[Setup], Result]
    needs_gpus: int = 0
    quick: bool = True


CHECKS = (  # in the order of execution
    Check("packages", checks.check_packages),
    Check("gpu", checks.check_gpu),
    Check("variables", checks.check_variables),
    Check("rates", checks.check_rates, needs_gpus=1, quick=False),
    Check("steps", runs.check_steps),
    Check("torchao_steps", runs.check_torchao_steps, quick=False),
    Check("several_gpus", partial(runs.check_mode, mode="fsdp_full"), needs_gpus=2, quick=False),
    Check("deepspeed", partial(runs.check_mode, mode="deepspeed_2"), needs_gpus=1, quick=False),
    Check("other_trainers", checks.check_other_trainers, needs_gpus=1),
)


def run_check(check: Check, setup: Setup) -> Result:
    """Run a check. If it raises an exception, the check fails."""
    print(f"{check.name} ...", file=sys.stderr, flush=True)
    began = time.perf_counter()
    try:
        if setup.num_gpus < check.needs_gpus:
            result = Result(f"needs {check.needs_gpus} or more GPUs", skipped=True)
        else:
            result = check.function(setup)
    except Exception as error:
        result = Result(details=traceback.format_exc().splitlines()[-12:])
        result.fail(f"the check ended with {type(error).__name__}: {error}", f"{checks.VERIFY} --only {check.name}")
    result.name, result.wall_s = check.name, time.perf_counter() - began
    return result


def main(argv: Sequence[str] | None = None, description: str = "Is this machine fit to train in fp8?") -> int:
    # Without torchrun's own variable, WORLD_SIZE is left over from an earlier launch.
    ranks = LaunchRanks.from_environment(os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {})
    if ranks.world_size > 1:
        from llm_fp8.tools.verify.hosts import check_hosts

        results = check_hosts(sys.argv[1:] if argv is None else argv, ranks)
        if ranks.rank == 0:
            print_table(results, wide_console())
        return EXIT_FAILED_CHECK if any(result.failures for result in results) else 0
    parser = OneSentenceParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, names = parser.add_argument, [check.name for check in CHECKS]
    add("--model_name", default="meta-llama/Llama-3.2-1B", help="two layers of this model train (default %(default)s)")
    add("--max_seq_length", type=positive, default=1024, help="tokens of a sequence (default %(default)s)")
    add("--batch_size", type=positive, default=8, help="sequences of a micro-batch (default %(default)s)")
    slow = ", ".join(check.name for check in CHECKS if not check.quick)
    add("--quick", action="store_true", help=f"leave out {slow}")
    add("--only", help=f"comma-separated checks to run, of {', '.join(names)}")
    add("--output", "--json", type=writable, metavar="FILE", help="write all findings to this JSON file")
    options = parser.parse_args(argv)
    if options.only is not None and (unknown := set(options.only.split(",")).difference(names)):
        raise UserError(f"--only {options.only}: {', '.join(unknown)} is unknown; choose from {', '.join(names)}.")
    environ = dict(os.environ)
    for name in filter(checks.LAUNCHED.fullmatch, environ):
        del os.environ[name]  # otherwise the runs would behave as processes of a launch
    os.environ.update({**CUDA_DEFAULTS, **os.environ})  # torch is not loaded yet
    selected = options.only.split(",") if options.only else [c.name for c in CHECKS if c.quick or not options.quick]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # stops the current run too
    with tempfile.TemporaryDirectory(prefix="verify-fp8-") as scratch:
        setup = Setup(options.model_name, options.max_seq_length, options.batch_size, environ, Path(scratch))
        with contextlib.suppress(ImportError, OSError):  # `check_packages` reports these errors
            runs.cut_model(setup)
        results = [run_check(check, setup) for check in CHECKS if check.name in selected]
    code = 0 if setup.num_gpus else EXIT_NO_GPU
    code = EXIT_FAILED_CHECK if any(result.failures for result in results) else code
    if options.output is not None:
        from llm_fp8.observability.provenance import collect_provenance

        rows = [{"status": result.status, **asdict(result)} for result in results]
        report = {"exit_code": code, "options": vars(options), "checks": rows}
        write_json_atomic(options.output, report | {"provenance": collect_provenance(sys.argv)})
    print_table(results, wide_console())
    return code


def print_table(results: list[Result], console: Console) -> None:
    """Print the results, with details of failures and warnings, then what to do next: fix these, or train."""
    table = Table(Column(no_wrap=True), Column(no_wrap=True), "", "", box=None, pad_edge=False, show_header=False)
    for result in results:
        problems = [*result.failures, *result.warnings]
        text = "\n".join([*problems, *filter(None, [result.summary]), *(result.details if problems else ())])
        status = f"[{_STYLES[result.status]}]{result.status}[/]"
        table.add_row(status, result.name, escape(text), f"{result.wall_s:.1f} s")
    console.print(table)
    counts = Counter(result.status for result in results)
    console.print("\n" + ", ".join(f"{number} {status}" for status, number in counts.items()))
    if fixes := dict.fromkeys(fix for result in results for fix in result.fixes):
        console.print("\n[bold]How to fix it[/]", *(escape(fix) for fix in fixes), sep="\n    ", soft_wrap=True)
    elif any(result.name == "gpu" and result.status == "skipped" for result in results):
        console.print("fp8 needs an NVIDIA GPU of compute capability 8.9 or later. On a CPU train_fp8.py runs in fp32.")
    else:
        console.print("Next: python train_fp8.py --use_te --mixed_precision fp8 --model_name ... --dataset_name ...")
