"""The GPUs of this host exchange tensors: sums and parts must be right; the bandwidth is said."""

from __future__ import annotations

import json
from typing import Any

from llm_fp8.tools.verify.processes import Ended, Started, shown
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup
from llm_fp8.utils.subprocesses import torchrun

TIMEOUT_S = 120.0


def judge(ended: Ended, seen: dict[str, Any] | None, command: list[str]) -> Result:
    """Wrong or failed fails; GPUs that cannot reach each other directly are a warning. No bandwidth is judged: links
    differ.
    """
    problems = Problems()
    facts = {"seen": seen, **ended.facts}
    debug = f"NCCL_DEBUG=WARN {shown(command)}"
    if seen is None:
        problems.fail(
            f"the exchange failed: {ended.why()}",
            debug,
            f"NCCL_NVLS_ENABLE=0 {shown(command)}   # without NVLink multicast",
        )
        return problems.result("", ended.evidence, facts)
    for name, call in (("all_reduce", "all-reduce"), ("all_gather", "all-gather")):
        if not seen[f"{name}_right"]:
            problems.fail(
                f"{call} over {seen['world_size']} GPUs gives a wrong result",
                debug,
                f"NCCL_P2P_DISABLE=1 {shown(command)}",
            )
    if seen.get("without_peer_access"):
        blocked = ", ".join(map(str, seen["without_peer_access"]))
        problems.warn(
            f"GPU 0 cannot access the memory of GPU {blocked} directly, so exchanges go through the host",
            "nvidia-smi topo -m",
        )
    summary = (
        f"{seen['world_size']} processes, {seen['backend']}: all-reduce {seen['all_reduce_gb_s']:,.0f} GB/s, "
        f"all-gather {seen['all_gather_gb_s']:,.0f} GB/s (bus bandwidth, {seen['buffer_mib']} MiB)"
    )
    return problems.result(summary, facts=facts)


def exchange(setup: Setup, num_processes: int, mebibytes: int = 256) -> Result:
    """Start the processes and judge what they saw."""
    result = setup.scratch / "nccl.json"
    command = torchrun(num_processes, "-m", "llm_fp8.tools.verify.nccl_probe", str(result), str(mebibytes))
    ended = Started(command, setup.scratch / "nccl.log").wait(TIMEOUT_S)
    seen = json.loads(result.read_text()) if ended.code == 0 else None
    return judge(ended, seen, [*command[:-2], "nccl.json"])


def check(setup: Setup) -> Result:
    """All GPUs of the machine."""
    return exchange(setup, setup.num_gpus)
