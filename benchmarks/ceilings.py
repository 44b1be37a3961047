#!/usr/bin/env python
"""Record what this GPU multiplies and copies, for llm_fp8/tools/gemm_rates.py's table of known GPUs.

    python benchmarks/ceilings.py --rounds 3 --output llm_fp8/tools/gpu_rates/nvidia_h200.json

Each figure is the median over the rounds, which are kept beside it. Nothing else may use the GPU meanwhile.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.gemm_rates import MeasuredRates, measure_rates
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import require_writable, write_json_atomic


def median_of(rounds: list[MeasuredRates]) -> MeasuredRates:
    """Figure by figure; all rounds are of one GPU, so a figure is absent in all or in none."""
    columns = {field.name: [getattr(one, field.name) for one in rounds] for field in dataclasses.fields(MeasuredRates)}
    return MeasuredRates(
        **{name: None if values[0] is None else statistics.median(values) for name, values in columns.items()}
    )


def main() -> int:
    """Measure, print, write."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (default %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="JSON file in llm_fp8/tools/gpu_rates, which prediction and verify read",
    )
    options = parser.parse_args()
    if options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: give 1 or more.")
    require_writable("--output", options.output)
    if not torch.cuda.is_available():
        raise UserError("this measures an NVIDIA GPU, and none is found.")
    device = torch.device("cuda", torch.cuda.current_device())
    rounds = [measure_rates(device) for _ in range(options.rounds)]
    ceilings = median_of(rounds)
    for name, value in dataclasses.asdict(ceilings).items():
        print(f"{name:24} {'-' if value is None else f'{value:,.2f}'}")
    record = {
        "gpu": torch.cuda.get_device_name(device),
        "ceilings": dataclasses.asdict(ceilings),
        "rounds": [dataclasses.asdict(one) for one in rounds],
        "provenance": collect_provenance(sys.argv),
    }
    write_json_atomic(options.output, record)
    return 0


if __name__ == "__main__":
    run_script(main)
