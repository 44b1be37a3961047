"""A short campaign of kills; `python -m tests.faults.kills` runs a long one."""

from __future__ import annotations

import pytest

from tests.faults.kills import campaign

pytestmark = pytest.mark.slow


def test_killed_runs_are_the_runs_that_were_not(tmp_path):
    found = campaign(seed=1, count=4, scratch=tmp_path)
    assert sum(found["sent"].values()) >= 4
    assert found["different"] == [] and found["torn"] == []
