"""One measurement in this process: the script that `llm_fp8.tools.bench.worker.measure_apart` has run.

python llm_fp8/tools/bench/alone.py WORKLOAD ARM NUM_STEPS WARMUP ANSWER.json
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from llm_fp8.distributed.process_group import own_device
from llm_fp8.tools.bench.measure import describe_failure, header, measure
from llm_fp8.tools.bench.variant_names import parse_variant
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import write_json_atomic


def main() -> None:
    workload, variant_name, num_steps, warmup, answer_path = sys.argv[1:]
    quiet_libraries()
    work, device = Workload.parse(workload, int(num_steps)), own_device()
    origin = header([], device)  # before anything can go wrong on the GPU
    found: dict[str, Any] = {}
    try:
        found = measure(work, parse_variant(variant_name), int(warmup), device)
        failed = None
    except UserError as error:
        failed = str(error)
    except torch.OutOfMemoryError as error:
        failed = describe_failure(error)
    except Exception as error:
        traceback.print_exc()
        failed = describe_failure(error)
    write_json_atomic(Path(answer_path), {"failed": failed, "header": origin, **found})


if __name__ == "__main__":
    main()
