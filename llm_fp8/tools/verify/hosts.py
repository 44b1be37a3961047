"""Check that the hosts of a launch can train together, with the options of the planned run.

Every check is collective and has the same result on every rank. An error on a single rank, or a check that takes longer
than `LIMIT_S`, ends the launch with a message that names the host.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import platform
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch
import torch.distributed as dist

from llm_fp8.config.parser import parse_config, parse_launch
from llm_fp8.distributed.process_group import decided_by_main, device_of_process, gathered, start_process_group
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.run.run import run_training
from llm_fp8.run.timeline import RunResults
from llm_fp8.tools.script import EXIT_FAILED_CHECK, first_to_end
from llm_fp8.tools.verify.checks import VERIFY, Result
from llm_fp8.utils.errors import listed, reading
from llm_fp8.utils.ranks import LaunchRanks

LIMIT_S = 120.0  # for one check
STEP = shlex.split(
    "--model_name embedded --max_seq_length 256 --batch_size 1 --max_steps 1 --mixed_precision bf16 "
    "--sharding_mode fsdp_full --validation_fraction 0 --save_every 1 --no_export --no_certify"
)
NETWORK = (
    "export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0   # the hosts' network, by its name in 'ip address'; "
    "and let the firewall open all ports between them"
)


def check_hosts(argv: Sequence[str], ranks: LaunchRanks) -> list[Result]:
    """Run the checks until one fails, and return the results. `argv` has the options of the planned run. Collective."""
    folder = Path(parse_launch(list(argv), os.environ, parallel=True).run.output_dir or "runs")
    checks = {"versions": lambda: check_versions(ranks), "network": check_network, "step": lambda: check_step(folder)}
    results: list[Result] = []
    for name, check in checks.items():
        if ranks.rank == 0:
            print(f"{name} ...", file=sys.stderr, flush=True)
        results.append(_within_limit(name, check))
        if results[-1].failures:
            break
    dist.destroy_process_group()
    return results


def _within_limit(name: str, check: Callable[[], Result]) -> Result:
    message = f"not done after {LIMIT_S:.0f} s: the hosts wait for each other. This may help: {NETWORK}"
    timer = threading.Timer(LIMIT_S, _end, (name, message))
    timer.daemon = True
    timer.start()
    began = time.perf_counter()
    try:
        result = check()
    except Exception as error:
        _end(name, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    timer.cancel()
    result.name, result.wall_s = name, time.perf_counter() - began
    return result


def _end(name: str, reason: str) -> NoReturn:
    """End this process at once, since its collectives may hang. The first rank to end prints `name` and `reason`."""
    try:
        if first_to_end():
            print(f"error: {platform.node()}: {name}: {reason}", file=sys.stderr, flush=True)
    finally:
        os._exit(EXIT_FAILED_CHECK)


def check_versions(ranks: LaunchRanks) -> Result:
    """Start the process group, and compare packages, code, GPUs and drivers between the hosts."""
    start_process_group(ranks)
    provenance = collect_provenance(sys.argv)
    gpus = Counter(gpu["name"] for gpu in provenance["gpus"])
    versions = provenance["packages"] | {name: provenance[name] for name in ("python", "cuda", "cudnn", "driver")}
    versions["commit"] = (provenance["git"] or {}).get("commit")
    versions["GPUs"] = ", ".join(f"{number} x {name}" for name, number in gpus.items()) or "none"
    result = Result(f"torch {versions['torch']}, GPUs {versions['GPUs']}, driver {versions['driver']}")
    by_rank = gathered((platform.node(), versions))
    for name in versions:
        hosts_of: dict[str | None, dict[str, None]] = {}
        for host, host_versions in by_rank:
            hosts_of.setdefault(host_versions.get(name), {})[host] = None
        if len(hosts_of) > 1:
            report = result.warn if name == "driver" else result.fail
            difference = "; ".join(f"{version} on {listed(hosts)}" for version, hosts in hosts_of.items())
            report(f"{name}: {difference}", "share one clone, with its .venv, between the hosts")
    if not gpus:
        result.warn("torch finds no GPU", f"{VERIFY}   # on a host, without a launcher")
    return result


def check_network() -> Result:
    """Sum a tensor over all ranks, with NCCL on GPUs or gloo on CPUs. Measure NCCL's bandwidth."""
    device, size = device_of_process(), dist.get_world_size()
    tensor = torch.full((2**26 if device.type == "cuda" else 2**16,), float(dist.get_rank()), device=device)
    dist.all_reduce(tensor)
    if (tensor != size * (size - 1) / 2).any():
        raise ArithmeticError("an all-reduce gave a wrong sum")
    if device.type != "cuda":
        return Result(f"gloo sums over {size} processes on CPUs")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    # nccl-tests' bus bandwidth: the rate of the slowest link, which does not depend on the number of GPUs.
    gb_per_s = 5 * tensor.nbytes * 2 * (size - 1) / size / (time.perf_counter() - began) / 1e9
    return Result(f"NCCL sums 256 MiB over {size} GPUs at {gb_per_s:.1f} GB/s (bus bandwidth)")


def check_step(output_dir: Path) -> Result:
    """Train the tiny bundled model for one step and save it below `output_dir`, which all ranks must share."""
    with contextlib.ExitStack() as stack:
        with reading("--output_dir", output_dir, "the folder"):
            output_dir.mkdir(parents=True, exist_ok=True)

        temporary = functools.partial(TemporaryDirectory, prefix="verify-", dir=output_dir, ignore_cleanup_errors=True)
        name = decided_by_main(lambda: os.path.basename(stack.enter_context(temporary())))
        folder = output_dir / name  # the path may differ between ranks
        with contextlib.suppress(OSError):
            Path(folder, str(dist.get_rank())).touch()
        hosts = gathered(platform.node())
        sees = gathered([os.path.exists(f"{folder}/{rank}") for rank in range(len(hosts))])
        result = Result()
        # Hosts of ranks whose file the main rank does not see, or that do not see the main rank's file.
        apart = dict.fromkeys(host for rank, host in enumerate(hosts) if not (sees[0][rank] and sees[rank][0]))
        if apart:
            sentence = f"--output_dir {output_dir} on {listed(apart)} is not the folder that {hosts[0]} writes to"
            result.fail(sentence, "give an --output_dir on a file system that all hosts share and may write to")
            return result
        results = RunResults()
        with contextlib.redirect_stdout(io.StringIO()):
            run_training(parse_config([*STEP, f"--output_dir={folder}/run"], parallel=True), results)
        losses = gathered(results.last_loss)
        if len(set(losses)) > 1:
            result.fail(f"the loss of a step differs between ranks: {losses}", NETWORK)
        result.summary = f"fsdp_full over {len(hosts)} ranks: loss {losses[0]:.3f}, saved in {output_dir}"
    return result
