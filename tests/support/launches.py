"""One run of several processes, as torchrun starts it or forked by the test: who they are, what they print, how they
end.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import CONTEXT, DEADLINE_S, begin, exit_code, free_port, start_ranks, train_as_a_rank

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "train_multi_gpu.py")
_FAILURE = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+)")
"""What torchrun's report says of a process."""


def torchrun(*options: str) -> list[str]:
    """The launcher for two processes, with a port of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    return [*command, *options]


def environment(**more: str) -> dict[str, str]:
    """This process's, for a launcher that is started in any folder."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more}


class Launch:
    """What tests of faults ask of a run that was started. Used as a context: at its end nothing of the run is left."""

    def __init__(self, log: Path) -> None:
        self._log, self._before = log, len(log.read_text()) if log.exists() else 0

    def __enter__(self):
        return self

    def printed(self) -> str:
        """All that was printed until now, in any order."""
        return self._log.read_text()[self._before :]


class Torchrun(Launch):
    """train_multi_gpu.py with these options in two processes under torchrun; what they print is appended to `log`.

    Args:
        launcher: options of torchrun.
        cwd: where it is started.
        more: environment variables.
    """

    def __init__(
        self, log: Path, *options: object, launcher: tuple[str, ...] = (), cwd: Path = ROOT, **more: str
    ) -> None:
        super().__init__(log)
        command = [*torchrun(*launcher), SCRIPT, *map(str, options)]
        with open(log, "a") as file:
            self._process = subprocess.Popen(
                command, cwd=cwd, env=environment(**more), stdout=file, stderr=subprocess.STDOUT
            )

    def __exit__(self, *error: object) -> None:
        if self.is_alive():
            self._process.terminate()  # torchrun ends its processes, by force after 30 s
            self._process.wait(DEADLINE_S)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def pid_of(self, rank: int) -> int:
        """The process of a rank, of the latest start."""
        children = psutil.Process(self._process.pid).children()
        (child,) = [child for child in children if child.environ().get("RANK") == str(rank)]
        return child.pid

    def end(self, deadline_s: float = DEADLINE_S) -> dict[int, int | None]:
        """Wait for the end; rank -> exit code (negative for a signal) of those that torchrun says have failed, which
        leaves out those that it ended itself.
        """
        code = self._process.wait(deadline_s)
        return _failed_ranks(self.printed(), code)


def _failed_ranks(printed: str, code: int | None) -> dict[int, int | None]:
    failed: dict[int, int | None] = {int(rank): int(number) for rank, number in _FAILURE.findall(printed)}
    assert code == (1 if failed else 0), printed[-6000:]
    return failed


def _agent(words: list[str], options: list[str], log: str, inherited: dict[str, str]) -> None:
    """torchrun's agent with ranks that are forked from it, which saves their imports."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    begin(log, inherited)
    config, _, _ = config_from_args(parse_args([*words, SCRIPT]))
    config.start_method = "fork"
    elastic_launch(config, train_as_a_rank)(options)


def complete(runs: dict[Path, list[str]], deadline_s: float, **more: str) -> None:
    """Train with these options into these folders under torchrun, all at once; each run must end well."""
    with contextlib.ExitStack() as stack:
        launches = []
        for folder, options in runs.items():
            log, cache = folder.with_name(f"{folder.name}.log"), {"HF_DATASETS_CACHE": f"{folder}-cache"}
            launches.append(stack.enter_context(Torchrun(log, *options, f"--output_dir={folder}", **cache, **more)))
        for launch in launches:
            assert launch.end(deadline_s) == {}, launch.printed()[-6000:]


class ForkedTorchrun(Launch):
    """train_multi_gpu.py under torchrun's own agent with two forked ranks, for a machine without a GPU."""

    def __init__(self, log: Path, *options: object, launcher: tuple[str, ...] = ()) -> None:
        super().__init__(log)
        log.touch()
        words = ["--nproc_per_node=2", f"--master_port={free_port()}", *launcher]
        args = (words, list(map(str, options)), str(log), dict(os.environ))
        self._agent: Any = CONTEXT.Process(target=_agent, args=args)
        self._agent.start()

    def __exit__(self, *error: object) -> None:
        self._agent.terminate()

    def is_alive(self) -> bool:
        return self._agent.is_alive()

    def pid_of(self, rank: int) -> int:
        """The process of a rank, of the latest start."""
        children = sorted(psutil.Process(self._agent.pid).children(), key=psutil.Process.create_time)
        return children[rank - 2].pid

    def end(self, deadline_s: float = DEADLINE_S) -> dict[int, int | None]:
        """Wait for the end; rank -> exit code of those that torchrun says have failed."""
        code = exit_code(self._agent, deadline_s)
        return _failed_ranks(self.printed(), code)


class Forked(Launch):
    """The same work in so many processes without a launcher, quick to start on a machine without a GPU."""

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
        """Wait for the end; rank -> exit code of those that failed; None is a process that goes on."""
        codes = {number: exit_code(rank, deadline_s) for number, rank in enumerate(self._ranks)}
        return {number: code for number, code in codes.items() if code != 0}
