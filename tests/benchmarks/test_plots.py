"""The plot of the W&B view is drawn from the layout that the view itself uses."""

from __future__ import annotations

import pytest

from llm_fp8.utils.packages import REPOSITORY

pytest.importorskip("matplotlib")


def test_the_recorded_plot_of_the_wandb_view_is_current():
    from benchmarks.plots import dashboard

    recorded = REPOSITORY / "benchmarks" / "plots" / "wandb_dashboard.svg"
    assert dashboard() == recorded.read_text(encoding="utf-8")
