"""What a run of several processes must leave behind when one of them is signalled or killed, on the CPU and on GPUs
alike.

The `options` are those of a run that saves checkpoints under `folder`; each function says which ones it adds.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_fp8.run.checkpoint import CheckpointManager
from llm_fp8.utils.errors import EXIT_USER_ERROR
from tests.support.processes import wait_until
from tests.support.small import run_json, steps

START_S = 120.0
"""Until a run has taken its first steps."""
ENDLESS = "--max_steps=100000"


def kill_one_rank_in_a_save(start: Callable[..., Any], folder: Path, within_s: float) -> dict[int, int | None]:
    """SIGKILL to rank 1 while a checkpoint is being written ends all in time; the checkpoints of before are whole and
    the run goes on.

    Ranks that end by themselves say why; torchrun may end them before they can. Returns the exit codes.
    """
    checkpoints = folder / "checkpoints"
    with start(ENDLESS, "--save_every=1") as launch:
        assert wait_until(lambda: len(list(checkpoints.glob("step-*"))) > 1, launch, 0.001, START_S), launch.printed()
        victim = launch.pid_of(1)
        assert wait_until(lambda: any(checkpoints.glob(".tmp-step-*")), launch)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        codes = launch.end(within_s)
    assert codes[1] == -signal.SIGKILL and time.monotonic() - killed < within_s, launch.printed()
    said = launch.printed()
    assert "another process of this run is gone" in said or codes.get(0) != EXIT_USER_ERROR, said
    manager = CheckpointManager(folder, limit=3)
    left = sorted(checkpoints.glob("step-*"))
    assert left and all(manager.find(str(path)).folder == path for path in left)
    last = int(left[-1].name.removeprefix("step-"))
    with start(f"--max_steps={last + 2}", "--allow_changed=total_steps", "--resume_from=latest") as launch:
        assert launch.end(START_S) == {}, launch.printed()
    assert f"resumed from {left[-1]} after step {last}" in launch.printed()
    assert [step["step"] for step in steps(folder)] == list(range(1, last + 3))
    assert not any(checkpoints.glob(".tmp-*"))
    return codes


def kill_one_rank_and_restart(start: Callable[..., Any], folder: Path, *options: str) -> None:
    """Rank 1 is killed after the first checkpoint; torchrun, started in `folder`, starts all anew and they resume by
    themselves, in the folder that they had.
    """
    training = ["--max_steps=60", "--save_every=20", "--log_every=1", "--no_export"]
    with start(folder / "log", *options, *training, launcher=("--max_restarts=1",)) as launch:
        saved = wait_until(lambda: any(folder.glob("runs/*/checkpoints/step-*")), launch, 0.01, START_S)
        assert saved, launch.printed()
        os.kill(launch.pid_of(1), signal.SIGKILL)
        assert launch.end(START_S) == {}, launch.printed()
    (run,) = (folder / "runs").iterdir()
    assert [step["step"] for step in steps(run)] == list(range(1, 61))
    told = re.search(r"resumed from .* after step (\d+)", launch.printed())
    assert told is not None and int(told[1]) >= 20
    assert [resume["resumed_after_step"] for resume in run_json(run)["resumes"]] == [int(told[1])]
