"""The W&B dashboard: the keys exist among the metrics and in an offline run, and W&B's client accepts the view."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from unittest import mock

import pytest
import wandb
import wandb_workspaces.workspaces as ws

from llm_fp8.observability.metrics import MEDIANS
from llm_fp8.observability.trackers import LABELS
from llm_fp8.precision.certificate import Certificate
from llm_fp8.utils.errors import UserError
from scripts import wandb_dashboard
from scripts.wandb_dashboard import COLUMNS, PRECISION, SECTIONS, TIME, build_workspace
from tests.support.documented_metrics import DOCUMENTED
from tests.support.small import train
from tests.support.wandb_file import only_wandb_run


def view_spec(group: str | None = None) -> dict[str, Any]:
    """Return the JSON that W&B's client would send to save the dashboard of all runs, or of those in `group`."""
    view = build_workspace("team", "llm-fp8", group, "a view")._to_model()
    return json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))["section"]


def test_every_panel_shows_a_key_that_runs_write():
    in_summary = {*DOCUMENTED, *(f"median_{key}" for key in MEDIANS)}  # the summary has the last value of a metric
    in_summary |= {f"certificate/{field.name}" for field in dataclasses.fields(Certificate)}
    panels = [panel for section in SECTIONS.values() for panel in section]
    for panel in panels:
        if panel.by in ("run", "precision"):
            assert panel.key in in_summary
        else:
            assert {panel.key, panel.by} <= {*DOCUMENTED, TIME}
    assert set(COLUMNS) <= {*LABELS, *in_summary} and PRECISION in LABELS
    assert len({panel.title for panel in panels}) == len(panels)


@pytest.mark.slow
def test_sent_view_has_the_sections_and_panels_of_the_layout():
    sections = view_spec()["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(SECTIONS)
    assert [len(section["panels"]) for section in sections] == [len(panels) for panels in SECTIONS.values()]
    panels = {panel["config"]["chartTitle"]: panel for section in sections for panel in section["panels"]}
    assert all(section["isOpen"] for section in sections)
    axes = {
        "Loss by step, nats": "step",
        "Eval loss by tokens, nats": "tokens_seen",
        "Loss by seconds, nats": "_runtime",
    }
    assert {title: panels[title]["config"]["xAxis"] for title in axes} == axes, "W&B's own _step counts evaluations too"
    by_step, by_time = panels["Loss by step, nats"], panels["Loss by seconds, nats"]
    assert by_step["viewType"] == "Run History Line Plot"
    assert by_step["config"]["metrics"] == by_time["config"]["metrics"] == ["loss"]
    by_precision = panels["Median tokens per second, by precision"]
    assert by_precision["viewType"] == "Bar Chart" and by_precision["config"]["groupAgg"] == "mean"
    assert by_precision["config"]["groupBy"] == "precision_name.value"
    by_run = panels["Median model TFLOP/s per GPU"]["config"]
    assert "groupBy" not in by_run and "${config:precision_name}" in by_run["legendTemplate"]


@pytest.mark.slow
def test_sent_view_filters_by_group_and_shows_the_precision_column():
    (all_runs,), (one_group,) = view_spec()["runSets"], view_spec("llama")["runSets"]
    for runs, filters in ((all_runs, {"jobType": "train"}), (one_group, {"jobType": "train", "group": "llama"})):
        assert {item["key"]["name"]: item["value"] for item in runs["filters"]["filters"]} == filters
    assert one_group["runFeed"]["columnOrder"][1] == "config:precision_name"


@pytest.mark.slow
def test_offline_run_contains_every_label_and_only_known_metrics(tmp_path, monkeypatch):
    variables = {"MODE": "offline", "RUN_GROUP": "pairs", "TAGS": "nightly,h200", "PROJECT": "a-project"}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    options = ("--use_wandb", "--wandb_run_name=a-run", "--output_dir", tmp_path / "first")
    options += ("--max_steps=4", "--eval_every=2", "--max_seq_length=128", "--batch_size=4", "--num_of_samples=80")
    assert train(*options, "--eval_batches=2", "--no_export", "--mixed_precision=bf16") == 0
    wandb.teardown()  # waits for W&B's own process, which writes the file
    run = only_wandb_run(tmp_path / "first")
    assert (run.project, run.name, run.group, run.job_type) == ("a-project", "a-run", "pairs", "train")
    assert {"nightly", "h200", "bf16", "CPU"} <= set(run.tags)
    assert set(LABELS) <= set(run.config) and run.config[PRECISION] == "bf16"
    assert [entry["step"] for entry in run.history if "loss" in entry] == [1, 2, 3, 4]
    assert {key for entry in run.history for key in entry if not key.startswith("_")} <= DOCUMENTED


@pytest.fixture
def views(monkeypatch) -> dict[str, ws.Workspace]:
    """Replace W&B's server by a dict {address: view}, and return the dict. Every view is saved at the same address."""
    address = "https://wandb.ai/team/llm-fp8?nw=abc"
    views: dict[str, ws.Workspace] = {}
    monkeypatch.setattr("llm_fp8.observability.trackers.require_wandb_login", lambda program: None)
    monkeypatch.setattr(ws.Workspace, "save", lambda view: views.update({address: view}))
    monkeypatch.setattr(ws.Workspace, "from_url", classmethod(lambda cls, url: views[url]))
    monkeypatch.setattr(ws.Workspace, "url", property(lambda view: address))
    return views


def test_view_update_keeps_sections_that_users_added(views, call_main, capsys):
    assert call_main(wandb_dashboard, "--entity", "team", "--project", "llm-fp8", "--group", "llama") == 0
    address = capsys.readouterr().out.split()[-1]
    view = views[address]
    assert (view.entity, view.project, view.name) == ("team", "llm-fp8", "fp8 comparison")
    assert [section.name for section in view.sections] == list(SECTIONS)
    view.sections = [ws.Section(name="Mine"), *view.sections[1:]]
    assert call_main(wandb_dashboard, "--entity", "team", "--view", address) == 0
    assert [section.name for section in views[address].sections] == ["Mine", *SECTIONS]


def test_refusal_by_the_server_is_a_user_error(views, call_main, monkeypatch):
    monkeypatch.setattr(ws.Workspace, "save", mock.Mock(side_effect=ValueError("permission denied")))
    with pytest.raises(UserError, match="--project llm-fp8: .*permission denied"):
        call_main(wandb_dashboard, "--entity", "team")
