"""`llm-fp8 diagnose` and scripts/diagnose_fp8.py: the command line and the tables."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS
from collections.abc import Mapping
from typing import Any

from llm_fp8.tools.script import CUDA_DEFAULTS

os.environ.update({**CUDA_DEFAULTS, **os.environ})  # before torch is imported

from llm_fp8.config.parser import parse_launch
from llm_fp8.tools.script import EXIT_FAILED_CHECK, EXIT_NO_GPU, writable
from llm_fp8.utils.errors import OneSentenceParser
from llm_fp8.utils.json_files import write_json_atomic


def main() -> int:
    """Diagnose the run, print and write the findings, and return the exit code."""
    parser = OneSentenceParser(add_help=False, allow_abbrev=False, usage=SUPPRESS)
    group = parser.add_argument_group("options of the diagnosis")
    group.add_argument("--json", type=writable, metavar="FILE", help="write the findings to this JSON file")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--trace", type=writable, metavar="FILE", help="trace of the step, for https://ui.perfetto.dev")
    either.add_argument("--quality", action="store_true", help="measure fp8's quality cost by kind of module instead")
    options, rest = parser.parse_known_args(sys.argv[1:])
    if {"-h", "--help", "--help_all", "--help-all"} & set(rest):
        print(parser.format_help())
    config = parse_launch(rest, os.environ, description="Show a step's precision, time and memory.")
    import torch  # imported here, so that --help and wrong options do not wait for it

    from llm_fp8.observability.provenance import collect_provenance
    from llm_fp8.tools.diagnose.measure import describe_quality, diagnose, measure_quality

    code = 0
    if options.quality:
        findings = measure_quality(config)
        print(describe_quality(findings))
    elif torch.cuda.is_available():
        findings = diagnose(config, options.trace)
        render(findings)
        code = EXIT_FAILED_CHECK if findings["problems"] else 0
    else:
        print("Measuring a step needs an NVIDIA GPU; --quality works without one for recipes that a CPU emulates.")
        return EXIT_NO_GPU
    if options.json is not None:
        origin = {"config": config.to_dict(), "provenance": collect_provenance(sys.argv)}
        write_json_atomic(options.json, {"exit_code": code, **findings, **origin})
    return code


ADVICE = dict.fromkeys(("norm", "activation", "rope", "copy", "elementwise"), "--use_te fuses most of these") | {
    "gpu_idle": "larger micro-batches (--batch_size, --max_seq_length); runs with --use_te and packing use CUDA graphs",
    "cast": "more tokens per step (--gradient_accumulation_steps, --batch_size): weights are cast once per step",
    "optimizer": "more tokens per step (--gradient_accumulation_steps, --batch_size)",
}
"""Kernel class -> advice that lowers its time."""
MIN_SHARE_FOR_ADVICE = 0.05  # a kernel class with a smaller share of the step gets no advice


def render(findings: Mapping[str, Any]) -> None:
    """Print the findings. Problems come last, where the reader looks first."""
    certificate, step = findings["certificate"], findings["step"]
    print(f"\nattention: {findings['attention']}; kernels: {certificate['verdict']}", *certificate["reasons"], sep="; ")
    step_s = step["step_time_s"]
    speed = f"{step['tokens_per_s']:,.0f} tokens/s, {step['model_tflops']:.0f} TFLOP/s"
    print(f"\none step: {step_s * 1e3:.1f} ms, {speed}")
    for name, kernels in findings["classes"].items():
        advice = ADVICE.get(name, "") if kernels["time_s"] >= MIN_SHARE_FOR_ADVICE * step_s else ""
        print(_line(name, kernels, step_s), advice)
        for dtype, gemms in findings["gemms"].items() if name == "gemm" else ():
            print(_line(f"  {dtype} operands", gemms, step_s))
    print("\nmemory at the peak of a step, GiB")
    for kind, gib in findings["memory_gib"].items():
        print(f"  {kind.replace('_', ' '):20}{gib:8.2f}")
    for problem in findings["problems"]:
        print(f"PROBLEM: {problem}")


def _line(name: str, kernels: Mapping[str, Any], step_s: float) -> str:
    time_s = kernels["time_s"]
    return f"  {name.replace('_', ' '):20}{kernels['count']:>8}{time_s * 1e3:>10.1f} ms{time_s / step_s:>8.1%} "
