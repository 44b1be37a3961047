"""Start a run of several processes by torchrun or by forking, and read its output, process ids and exit codes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import (
    CONTEXT,
    DEADLINE_S,
    begin_process,
    exit_code,
    free_port,
    start_ranks,
    train_as_a_rank,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "train_multi_gpu.py")
_FAILURE = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")
"""Rank and exit code in torchrun's report of a failed process."""


def torchrun_command(*options: str) -> list[str]:
    """Return the torchrun command for two processes on a free port, followed by further options of torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    return [*command, *options]


def launcher_environment(**more: str) -> dict[str, str]:
    """Return this process's environment and `more`. PYTHONPATH lets a launcher import the code from any folder."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more}


class Launch:
    """A run in several processes, which append their output to `log`. As a context manager, it ends them on exit."""

    def __init__(self, log: Path) -> None:
        self._log, self._start = log, len(log.read_text()) if log.exists() else 0

    def __enter__(self):
        return self

    def printed(self) -> str:
        """Return the text that the processes have printed so far. Lines of different processes may be interleaved."""
        return self._log.read_text()[self._start :]


class Torchrun(Launch):
    """A run of train_multi_gpu.py in two processes under torchrun. The output is appended to `log`. `options` are
    options of train_multi_gpu.py, `launcher` are options of torchrun, and `more` are environment variables. torchrun
    starts in the folder `cwd`.
    """

    def __init__(
        self, log: Path, *options: object, launcher: tuple[str, ...] = (), cwd: Path = ROOT, **more: str
    ) -> None:
        super().__init__(log)
        command = [*torchrun_command(*launcher), SCRIPT, *map(str, options)]
        with open(log, "a") as file:
            self._process = subprocess.Popen(
                command, cwd=cwd, env=launcher_environment(**more), stdout=file, stderr=subprocess.STDOUT
            )

    def __exit__(self, *error: object) -> None:
        if self.is_alive():
            self._process.terminate()  # torchrun ends its processes, by force after 30 s
            self._process.wait(DEADLINE_S)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def pid_of(self, rank: int) -> int:
        """Return the process id of a rank. After a restart, return the id of the new process."""
        children = psutil.Process(self._process.pid).children()
        (child,) = [child for child in children if child.environ().get("RANK") == str(rank)]
        return child.pid

    def end(self, deadline_s: float = DEADLINE_S) -> dict[int, int | None]:
        """Wait until torchrun ends. Return {rank: exit code} of the ranks that failed, without those that torchrun then
        stopped. The code of a rank that a signal killed is minus the signal's number.
        """
        code = self._process.wait(deadline_s)
        return _failed_ranks(self.printed(), code)


def _failed_ranks(printed: str, code: int | None) -> dict[int, int | None]:
    failed: dict[int, int | None] = {int(rank): int(number) for rank, number in _FAILURE.findall(printed)}
    assert code == (1 if failed else 0), printed[-6000:]
    return failed


def _agent(launcher: list[str], options: list[str], log: str, inherited: dict[str, str]) -> None:
    """Run torchrun's agent, the process that starts the ranks. It forks them, so that they import no package again."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    begin_process(log, inherited)
    config, _, _ = config_from_args(parse_args([*launcher, SCRIPT]))
    config.start_method = "fork"
    elastic_launch(config, train_as_a_rank)(options)


def train_under_torchrun(runs: dict[Path, list[str]], deadline_s: float, **more: str) -> None:
    """Start several runs under torchrun at once and check that each succeeds. `runs` maps a run folder to options, and
    `more` are environment variables.
    """
    with contextlib.ExitStack() as stack:
        launches = []
        for folder, options in runs.items():
            log, cache = folder.with_name(f"{folder.name}.log"), {"HF_DATASETS_CACHE": f"{folder}-cache"}
            launches.append(stack.enter_context(Torchrun(log, *options, f"--output_dir={folder}", **cache, **more)))
        for launch in launches:
            assert launch.end(deadline_s) == {}, launch.printed()[-6000:]


class ForkedTorchrun(Launch):
    """A run of train_multi_gpu.py in two processes that torchrun's agent forks, for a machine without a GPU."""

    def __init__(self, log: Path, *options: object, launcher: tuple[str, ...] = ()) -> None:
        super().__init__(log)
        log.touch()
        agent_options = ["--nproc_per_node=2", f"--master_port={free_port()}", *launcher]
        args = (agent_options, list(map(str, options)), str(log), dict(os.environ))
        self._agent: Any = CONTEXT.Process(target=_agent, args=args)
        self._agent.start()

    def __exit__(self, *error: object) -> None:
        self._agent.terminate()

    def is_alive(self) -> bool:
        return self._agent.is_alive()

    def pid_of(self, rank: int) -> int:
        children = sorted(psutil.Process(self._agent.pid).children(), key=psutil.Process.create_time)
        return children[rank - 2].pid

    def end(self, deadline_s: float = DEADLINE_S) -> dict[int, int | None]:
        """Wait until the agent ends. Return {rank: exit code} of the ranks that torchrun reports as failed."""
        code = exit_code(self._agent, deadline_s)
        return _failed_ranks(self.printed(), code)


class ForkedRanks(Launch):
    """A run of train_multi_gpu.py in forked processes without torchrun, for a machine without a GPU."""

    def __init__(self, num_ranks: int, log: Path, *options: object) -> None:
        super().__init__(log)
        self._ranks = start_ranks(num_ranks, log, *options)

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.kill()

    def is_alive(self) -> bool:
        return self._ranks[0].is_alive()

    def pid_of(self, rank: int) -> int | None:
        return self._ranks[rank].pid

    def end(self, deadline_s: float = DEADLINE_S) -> dict[int, int | None]:
        """Wait for the ranks. Return {rank: exit code} of failed ranks. The code is None if the deadline passed."""
        codes = {number: exit_code(rank, deadline_s) for number, rank in enumerate(self._ranks)}
        return {number: code for number, code in codes.items() if code != 0}
