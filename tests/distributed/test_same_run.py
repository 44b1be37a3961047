"""All processes of a launch must see the same output folder. The ranks use gloo on the CPU."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tests.support.processes import exit_code, start_ranks
from tests.support.small import short_run

pytestmark = pytest.mark.slow


def change_to_folder_of_rank(folder: Path) -> None:
    """Change to a subfolder of `folder` that no other rank uses, as on hosts without a shared disk."""
    rank_folder = folder / os.environ["RANK"]
    rank_folder.mkdir(exist_ok=True)
    os.chdir(rank_folder)


def test_output_folder_that_hosts_do_not_share_stops_the_run_without_a_checkpoint(tmp_path, tiny_model, rows):
    log = tmp_path / "log"
    more = ["--batch_size=2", "--max_steps=2", "--save_every=2", "--sharding_mode=fsdp_full", "--no_export"]
    options = short_run(tiny_model, rows, Path("run"), *more)
    ranks = start_ranks(2, log, *options, first=functools.partial(change_to_folder_of_rank, tmp_path))
    assert [exit_code(rank) for rank in ranks] == [2, 2], log.read_text()
    assert "--output_dir must be a shared folder" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not list(tmp_path.glob("0/run/checkpoints/step-*"))
