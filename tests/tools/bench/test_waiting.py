"""Programs that have their imports when a measurement begins: who gets them, and that none outlives the one they
wait for. Tiny models on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llm_fp8.tools.bench.waiting import dismiss_prepared, take_program
from llm_fp8.tools.bench.worker import measure_apart
from tests.support.processes import processes_with, wait_for_the_end_of_processes_with

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def nothing_left():
    """None of a test's programs waits during the next one."""
    yield
    dismiss_prepared()


@pytest.fixture
def mark(tmp_path) -> dict[str, str]:
    """A variable of the environment that tells a test's own processes."""
    return {"WHOSE": str(tmp_path)}


def ranks_of_launch(mark: dict[str, str], number: int) -> set[int]:
    """Its processes, once so many are there; what tells them from torchrun's own is a variable that it sets."""
    deadline = time.monotonic() + 60
    while (
        len(ranks := set(processes_with("WHOSE", mark["WHOSE"])) & set(processes_with("WORLD_SIZE", str(number))))
        < number
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return ranks


def test_the_next_measurement_finds_a_process_that_has_its_imports(tiny_architecture, started_processes):
    """In the same environment; one in another has a process of its own."""
    workload = f"{tiny_architecture}:2x32x2"
    first = measure_apart(workload, "bf16", 1, 2, 1, timeout_s=100, next_variables={})
    _, prepared = started_processes
    other = measure_apart(workload, "bf16", 1, 2, 1, timeout_s=0.01, variables={"NVTE_FLASH_ATTN": "0"})
    assert other["failed"] == "took longer than 0.01 s" and prepared.poll() is None and len(started_processes) == 3
    second = measure_apart(workload, "bf16", 1, 2, 1, timeout_s=100)
    assert prepared.returncode == 0 and len(started_processes) == 3
    assert first["failed"] == second["failed"] and "--use_te needs an NVIDIA GPU" in first["failed"]


def test_the_next_launch_has_its_processes_and_their_imports(tiny_architecture, started_processes, mark):
    """On as many GPUs in the same environment; others have launches of their own."""
    asked = (f"{tiny_architecture}:2x32x2", "ddp:bf16:swap", 2, 3, 1)
    first = measure_apart(*asked, timeout_s=100, variables=mark, next_variables=mark)
    launch, prepared = started_processes
    assert launch.returncode == 0 and prepared.poll() is None
    ranks = ranks_of_launch(mark, 2)
    environment = dict(os.environ)
    for other in (take_program(environment, 3), take_program(environment, 2), take_program({**environment, **mark})):
        other.dismiss()
        assert other.process is not prepared
    assert len(started_processes) == 5 and prepared.poll() is None and ranks_of_launch(mark, 2) == ranks
    second = measure_apart(*asked, timeout_s=100, variables=mark)
    assert len(started_processes) == 5 and prepared.returncode == 0
    assert (
        first["failed"] is None
        and second["losses"] == pytest.approx(first["losses"])
        and len(second["step_times_s"]) == 2
    )
    assert second.keys() == first.keys() and second["header"].keys() == first["header"].keys()


def test_the_next_program_can_be_of_another_environment(started_processes, mark):
    """As of settings that take turns: each is prepared during the one before it, and none twice."""
    here, there = dict(os.environ), {**os.environ, **mark}
    first, second, third = (
        take_program(here, None, there),
        take_program(there, None, here),
        take_program(here, None, here),
    )
    assert [program.process for program in (first, second, third)] == started_processes[:3] and len(
        started_processes
    ) == 4
    take_program(there, None, here).dismiss()
    assert len(started_processes) == 5, "what is asked for next waits already"
    for program in (first, second, third):
        program.dismiss()


@pytest.mark.parametrize("num_processes", [None, 2])
def test_in_place_of_a_prepared_program_that_died_there_is_a_new_one(num_processes, started_processes, mark):
    """Nor does what a dead launcher has left wait on."""
    environment = {**os.environ, **mark}
    take_program(environment, num_processes, environment).dismiss()
    _, prepared = started_processes
    if num_processes is not None:
        ranks_of_launch(mark, num_processes)
    prepared.kill()
    prepared.wait()
    taken = take_program(environment, num_processes)
    assert taken.process is started_processes[2] and taken.process.poll() is None
    taken.dismiss()
    wait_for_the_end_of_processes_with("WHOSE", mark["WHOSE"])


ASKS = """
import os, sys
from llm_fp8.throughput.waiting import take_program
take_program(os.environ, int(sys.argv[1]) or None, os.environ).dismiss()
from llm_fp8.throughput import waiting
(program,) = waiting._prepared.values()
print(program.process.pid, program.folder.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("num_processes", [0, 2])
@pytest.mark.parametrize("end", ["killed", "ends"])
def test_a_prepared_program_ends_with_the_one_that_it_waits_for(end, num_processes, mark, warm_python):
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKS, str(num_processes)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **mark, "PYTHON_EXEC": warm_python},
    )  # fmt: skip
    pid, folder = asking.stdout.readline().split()
    if num_processes:
        ranks_of_launch(mark, num_processes)
    assert Path(folder).is_dir() and Path(f"/proc/{pid}").exists()
    if end == "ends":
        asking.stdin.close()
        assert asking.wait(30) == 0 and not Path(f"/proc/{pid}").exists()
    else:
        asking.kill()
        asking.wait()
    wait_for_the_end_of_processes_with("WHOSE", mark["WHOSE"])
    assert not Path(folder).exists()
