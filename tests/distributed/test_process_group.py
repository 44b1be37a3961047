"""How the processes of a run meet, each in a process of its own."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.launches import environment
from tests.support.processes import free_port

pytestmark = pytest.mark.slow

RANK = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
from llm_fp8.distributed import process_group
from llm_fp8.utils.errors import run_script
from llm_fp8.utils.ranks import LaunchRanks

process_group.START_TIMEOUT = datetime.timedelta(seconds=4)
ranks = LaunchRanks.from_environment(os.environ)

def main():
    if sys.argv[1] == "dies while they meet" and ranks.rank == 1:
        dist.init_process_group = lambda *arguments, **options: os._exit(9)
    process_group.start_process_group(ranks)
    if sys.argv[1] == "is late for a collective" and ranks.rank == 1:
        time.sleep(8)
    number = torch.ones(1)
    dist.all_reduce(number)
    print(f"sum {number.item():.0f}", flush=True)
    return 0

run_script(main)
"""


@pytest.mark.parametrize("second", ["is not there", "dies while they meet", "is late for a collective"])
def test_what_the_second_process_does(second, warm_python):
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [warm_python, "-c", RANK, second],
            env=environment(**launch, RANK=rank, LOCAL_RANK=rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")[: 1 if second == "is not there" else 2]
    ]
    out, error = ranks[0].communicate(timeout=45)
    if len(ranks) == 2:
        ranks[1].communicate(timeout=45)
    if second == "is late for a collective":
        assert (out, [rank.returncode for rank in ranks]) == ("sum 2\n", [0, 0]), error
    else:
        assert ranks[0].returncode == 2, error
        assert error.splitlines()[-1].startswith("error: rank 0 did not meet all other processes of this run in 4 s")


NO_GPU_FOR_ALL = """
import os
import torch
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.utils.errors import run_script
from llm_fp8.utils.ranks import LaunchRanks

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
run_script(lambda: start_process_group(LaunchRanks.from_environment(os.environ)))
"""


def test_more_processes_than_gpus(warm_python):
    """One line, before the others are waited for."""
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4", "RANK": "2"}
    ended = subprocess.run(
        [warm_python, "-c", NO_GPU_FOR_ALL],
        env=environment(**launch, LOCAL_RANK="2"),
        capture_output=True,
        text=True,
        timeout=45,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: there is no GPU for LOCAL_RANK 2: this process sees 2")
    assert "Traceback" not in ended.stderr
