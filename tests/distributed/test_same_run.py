"""Processes of one launch write into one folder. gloo on the CPU."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tests.support.processes import exit_code, start_ranks
from tests.support.small import short_run

pytestmark = pytest.mark.slow


def work_elsewhere(folder: Path) -> None:
    """Work in a folder of this rank alone, as a host does whose disk is not shared."""
    rank_folder = folder / os.environ["RANK"]
    rank_folder.mkdir(exist_ok=True)
    os.chdir(rank_folder)


def test_a_checkpoint_that_a_host_wrote_elsewhere_is_no_checkpoint(tmp_path, tiny_model, rows):
    log = tmp_path / "log"
    more = ["--batch_size=2", "--max_steps=2", "--save_every=2", "--sharding_mode=fsdp_full", "--no_export"]
    options = short_run(tiny_model, rows, Path("run"), *more)
    ranks = start_ranks(2, log, *options, first=functools.partial(work_elsewhere, tmp_path))
    assert [exit_code(rank) for rank in ranks] == [2, 2], log.read_text()
    assert "--output_dir must be a shared folder" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not list(tmp_path.glob("0/run/checkpoints/step-*"))
