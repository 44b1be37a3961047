"""One measurement in a process of its own, so that nothing of an arm outlives it: compiled code, Transformer Engine's globals, memory.

    answer = measure_in_process("Llama-3.2-1B:8x1024x4", "delayed", num_steps=8, warmup=3, timeout_s=300)

An answer is what `llm_fp8.throughput.measure.measure` returns, with its `header` and "failed": None; where it was not measured, "failed" is the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fp8.provenance import REPOSITORY
from llm_fp8.throughput.results import ENDED_IN_SILENCE


def measure_in_process(
    workload: str, arm: str, num_steps: int, warmup: int, timeout_s: float, variables: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """Measure `arm` on `workload` (both by name) and return the answer; raises nothing for what goes wrong over there.

    `variables`: of the process's environment, in place of this one's; None takes one out.
    """
    # What a launcher left for Accelerate would change the rivals: ACCELERATE_FP8_BACKEND alone converts a bf16 model.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    for name, value in (variables or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # for every arm, as in the training scripts
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        command = [sys.executable, "-m", __spec__.name, workload, arm, str(num_steps), str(warmup), str(path)]
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {timeout_s:g} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
                process.wait()
        if not path.exists():
            return {"failed": f"{ENDED_IN_SILENCE} (exit code {process.returncode})"}
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer


def _main(workload: str, arm_name: str, num_steps: str, warmup: str, answer_path: str) -> None:
    import torch

    from llm_fp8.errors import UserError
    from llm_fp8.json_files import write_json_atomic
    from llm_fp8.process_group import own_device
    from llm_fp8.quiet import quiet_libraries
    from llm_fp8.throughput.arms import parse_arm
    from llm_fp8.throughput.measure import describe_failure, header, measure
    from llm_fp8.throughput.workload import Workload

    quiet_libraries()
    work, device = Workload.parse(workload, int(num_steps)), own_device()
    origin = header([], device)  # before anything can go wrong on the GPU
    found: dict[str, Any] = {}
    try:
        found = measure(work, parse_arm(arm_name), int(warmup), device)
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
    _main(*sys.argv[1:])
