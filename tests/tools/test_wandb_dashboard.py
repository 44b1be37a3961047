"""The W&B dashboard: its keys against the project's, the view against W&B's own client, and runs that train_fp8.py
made offline.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import wandb

from benchmarks import plot_wandb_dashboard
from llm_fp8.observability.metrics import METRICS
from llm_fp8.observability.step_stats import INTERVAL_MEDIANS, MEDIANS
from llm_fp8.observability.tracker_labels import LABELS
from llm_fp8.precision.certificate import Certificate
from llm_fp8.tools.wandb_dashboard import (
    CERTIFICATE,
    COLUMNS,
    SECTIONS,
    build_workspace,
    labels_used,
    missing_keys,
    panel_keys,
)
from llm_fp8.utils.errors import UserError
from scripts import wandb_dashboard
from tests.support.small import train
from tests.support.wandb_file import the_wandb_run
from tests.support.wandb_server import VIEWER, StandIn, served

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


def the_spec(group: str | None = None) -> dict[str, Any]:
    """What would be sent to the server for the view."""
    view = build_workspace("team", "llm-fp8", group, "a view")._to_model()
    return json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True))["section"]


# ---- the layout and the view ----


def test_every_figure_of_the_layout_is_one_that_runs_have() -> None:
    in_summary = {
        *METRICS,  # the last of each
        *(f"median_{key}" for key in (*MEDIANS, *INTERVAL_MEDIANS)),
        *(f"{CERTIFICATE}{field.name}" for field in dataclasses.fields(Certificate)),
    }
    for key, place in panel_keys().items():
        assert key in (METRICS if place == "history" else in_summary), key
    assert labels_used() <= set(LABELS)
    titles = [panel.title for section in SECTIONS for panel in section.panels]
    assert len(set(titles)) == len(titles)


@pytest.mark.slow
def test_the_view_that_is_sent_draws_the_layout() -> None:
    sections = the_spec()["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.title for section in SECTIONS]
    assert [len(section["panels"]) for section in sections] == [len(section.panels) for section in SECTIONS]
    panels = {panel["config"].get("chartTitle"): panel for section in sections for panel in section["panels"]}
    drawn = {key for panel in panels.values() for key in panel["config"].get("metrics", [])}
    assert drawn == {key for section in SECTIONS for panel in section.panels for key in panel.keys} and len(drawn) > 20

    by_token, by_step = panels["Loss by token"], panels["Loss by step"]
    assert by_token["viewType"] == "Run History Line Plot"
    assert (by_token["config"]["xAxis"], by_step["config"]["xAxis"]) == ("tokens_seen", "_step")
    assert by_token["config"]["metrics"] == by_step["config"]["metrics"] == ["loss"]
    by_precision = panels["Median tokens per second, by precision"]
    assert by_precision["viewType"] == "Bar Chart"
    assert by_precision["config"]["groupBy"] == "precision_name.value" and by_precision["config"]["groupAgg"] == "mean"
    assert "groupBy" not in panels["Median tokens per second, by run"]["config"]


@pytest.mark.slow
def test_the_view_shows_training_runs_of_the_group_and_what_tells_them_apart() -> None:
    def wanted(runs: dict[str, Any]) -> dict[str, str]:
        return {item["key"]["name"]: item["value"] for item in runs["filters"]["filters"]}

    (all_runs,), (of_group,) = the_spec()["runSets"], the_spec("llama")["runSets"]
    assert wanted(all_runs) == {"jobType": "train"}
    assert wanted(of_group) == {"jobType": "train", "group": "llama"}
    assert of_group["runFeed"]["columnOrder"][1] == "config:precision_name"
    assert len(of_group["runFeed"]["columnOrder"]) == 1 + len(COLUMNS)


def test_the_picture_in_the_document_shows_every_section_and_panel() -> None:
    assert plot_wandb_dashboard.PICTURE.read_text() == plot_wandb_dashboard.draw(), (
        "run python benchmarks/plot_wandb_dashboard.py"
    )
    texts = [element.text for element in ElementTree.parse(plot_wandb_dashboard.PICTURE).iter() if element.text]
    words = " ".join(texts)
    assert all(title in words for section in SECTIONS for title in [section.title, *(p.title for p in section.panels)])


def test_every_label_is_in_the_document() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert {key: meaning for key, meaning in rows if key in LABELS} == LABELS


# ---- runs on this machine ----


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Call the script's main with these words."""

    def main(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["wandb_dashboard.py", *map(str, words)])
        return wandb_dashboard.main()

    return main


@pytest.fixture(scope="module")
def offline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder that train_fp8.py's work left with W&B offline."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_RUN_GROUP", "pairs")
        patch.setenv("WANDB_TAGS", "nightly,h200")
        assert 0 == train(
            "--use_wandb",
            "--wandb_project=a-project",
            "--wandb_run_name=a-run",
            "--output_dir",
            folder,
            "--max_steps=4",
            "--eval_every=2",
            "--max_seq_length=128",
            "--batch_size=4",
            "--gradient_accumulation_steps=2",
            "--num_of_samples=80",
            "--eval_batches=2",
            "--no_export",
            "--mixed_precision=bf16",
        )
        wandb.teardown()  # waits for W&B's own process, which writes the file
    return folder


@pytest.mark.slow
def test_a_run_of_train_fp8_arrives_with_group_tags_labels_and_every_key(offline_folder: Path) -> None:
    run = the_wandb_run(offline_folder)
    assert (run.project, run.name, run.group, run.job_type) == ("a-project", "a-run", "pairs", "train")
    assert run.tags == ("bf16", "embedded", "single", "CPU", "nightly", "h200")
    recorded = json.loads((offline_folder / "run.json").read_text())
    assert run.config["precision_name"] == "bf16" and run.config["tokens_per_step"] == 2 * 4 * 128
    assert run.config["num_parameters"] == recorded["model"]["num_parameters"] > 0
    assert (
        run.config["effective"]["precision"] == recorded["precision"]
        and run.config["provenance"] == recorded["provenance"]
    )
    assert {section: run.config[section] for section in recorded["config"]} == recorded["config"]
    assert set(LABELS) <= set(run.config)

    assert [entry["step"] for entry in run.history] == [1, 2, 3, 4]
    assert all({"loss", "tokens_seen", "tokens_per_s"} <= set(entry) for entry in run.history)
    assert not any("energy" in key or "power" in key for entry in run.history for key in entry), "a CPU has no counter"
    assert ["eval_loss" in entry for entry in run.history] == [False, True, False, True]
    assert {key for entry in run.history for key in entry if not key.startswith("_")} <= set(METRICS)
    summary = json.loads((offline_folder / "summary.json").read_text())
    assert run.summary["median_tokens_per_s"] == summary["throughput"]["median_tokens_per_s"] > 0
    assert run.summary["wall_time_s"] == summary["wall_time_s"] and run.exit_code == 0
    on_one_cpu = re.compile(
        r"memory|mfu_|energy|gpu_power|communication|slowest_rank|certificate/"
    )  # what such a machine cannot measure
    missing = [
        key for key in missing_keys(run.config, list(run.history[-1]), list(run.summary)) if not on_one_cpu.search(key)
    ]
    assert missing == ["eval_exact_match"]  # it was not asked for

    # The output folder tells the same as the file for W&B.
    (listed,), _ = wandb_dashboard.offline_runs(offline_folder)
    assert (listed.project, listed.name, listed.group, listed.ended) == (run.project, run.name, run.group, "yes")
    assert listed.labels == {key: run.config[key] for key in LABELS}
    assert set(listed.history_keys) == {key for entry in run.history for key in entry if not key.startswith("_")}
    assert listed.figures == {key: value for key, value in run.summary.items() if not key.startswith("_")}


@pytest.mark.slow
def test_offline_runs_are_listed_with_what_they_lack_and_how_to_send_them(
    offline_folder: Path, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--offline", offline_folder.parent, "--entity", "team", "--project", "shared") == 0
    shown = capsys.readouterr().out
    assert "a-run" in shown and "bf16" in shown
    assert re.search(r"a-run: lacks .*peak_memory_gib.*gpu_power_w", shown)
    (kept,) = offline_folder.glob("wandb/offline-run-*")
    assert f"  wandb sync --entity team --project shared {kept}\n" in shown
    assert "  python scripts/wandb_dashboard.py --project shared --name 'fp8 comparison' --entity team\n" in shown
    assert call("--offline", offline_folder, "--project", "a-project") == 0
    assert f"  wandb sync {kept}\n" in capsys.readouterr().out, "the run knows its project"


@pytest.mark.slow
def test_an_offline_run_is_sent_to_its_own_project_unless_another_is_given(
    offline_folder: Path, tmp_path: Path, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(offline_folder, tmp_path / "one")
    shutil.copytree(offline_folder, tmp_path / "two")
    (kept,) = (tmp_path / "two").glob("wandb/offline-run-*")
    kept.rename(kept.with_name(f"{kept.name}2"))
    record = (tmp_path / "two" / "run.json").read_text()
    (tmp_path / "two" / "run.json").write_text(record.replace('"a-project"', '"b-project"'))
    assert call("--offline", tmp_path) == 0
    shown = capsys.readouterr().out
    assert shown.count("  wandb sync ") == 2 and "sync --project" not in shown
    for project in ("a-project", "b-project"):
        assert f"  python scripts/wandb_dashboard.py --project {project} --name 'fp8 comparison'\n" in shown


@pytest.mark.slow
def test_a_resumed_offline_run_is_listed_once_and_sent_with_all_its_parts(
    tmp_path: Path, call: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ("--use_wandb", "--wandb_project=a-project", "--output_dir", tmp_path / "run", "--max_seq_length=128")
    words += ("--batch_size=4", "--num_of_samples=80", "--no_export", "--mixed_precision=bf16", "--eval_batches=1")
    assert train(*words, "--max_steps=2", "--save_every=2") == 0
    wandb.teardown()
    time.sleep(1.1)  # W&B names a part by the second
    assert train(*words, "--max_steps=4", "--resume_from=latest", "--allow_changed=total_steps") == 0
    wandb.teardown()
    first, second = sorted((tmp_path / "run").glob("wandb/offline-run-*"))
    capsys.readouterr()
    assert call("--offline", tmp_path, "--project", "a-project") == 0
    shown = capsys.readouterr().out
    assert shown.count(": lacks") == 1 and f"  wandb sync {first} {second}\n" in shown
    (listed,), _ = wandb_dashboard.offline_runs(tmp_path)
    assert listed.figures["step"] == 4 and first.name.endswith(listed.name)


@pytest.mark.slow
def test_how_an_offline_run_ended_is_told(offline_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(offline_folder, tmp_path / "run")
    summary = tmp_path / "run" / "summary.json"
    for changed, ended in (({"stopped_by": "SIGINT"}, "stopped by SIGINT"), ({"failed": "no"}, "failed: no")):
        summary.write_text(json.dumps(json.loads((offline_folder / "summary.json").read_text()) | changed))
        assert [run.ended for run in wandb_dashboard.offline_runs(tmp_path)[0]] == [ended]
    summary.unlink()
    (killed,), _ = wandb_dashboard.offline_runs(tmp_path)
    assert killed.ended == "no (killed or still running)" and killed.figures["step"] == 4


@pytest.mark.slow
def test_mistakes_of_offline_use_are_one_sentence(
    offline_folder: Path, tmp_path: Path, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="--offline .*nowhere is not a folder"):
        call("--offline", tmp_path / "nowhere")
    with pytest.raises(UserError, match="--offline .* holds no offline W&B run"):
        call("--offline", tmp_path)
    with pytest.raises(UserError, match="--group other: no offline run"):
        call("--offline", offline_folder, "--group", "other")
    with pytest.raises(UserError, match="--dry_run has no effect with --offline"):
        call("--offline", offline_folder, "--dry_run")
    with pytest.raises(UserError, match="--offline is empty"):
        call("--offline", "")
    (tmp_path / "bad" / "wandb" / "offline-run-x-y").mkdir(parents=True)
    with pytest.raises(UserError, match="bad/run.json cannot be read"):
        call("--offline", tmp_path)
    # A folder that cannot be read does not hide the others.
    shutil.copytree(offline_folder, tmp_path / "good")
    assert call("--offline", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "a-run: lacks" in shown and "WARNING:" in shown and "bad/run.json cannot be read" in shown
    (tmp_path / "bad" / "run.json").write_text("{}")
    (tmp_path / "bad" / "metrics.jsonl").write_text("")
    assert call("--offline", tmp_path) == 0
    assert "bad/run.json lacks config.run" in capsys.readouterr().out


def test_a_dry_run_prints_every_panel(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--dry_run") == 0
    shown = capsys.readouterr().out
    assert all(panel.title in shown for section in SECTIONS for panel in section.panels)
    assert "  Loss by token: loss, lines by tokens_seen\n" in shown and "nothing was sent" in shown


# ---- a stand-in of W&B's server, which W&B's own client talks to ----


def runs(count: int) -> tuple[int, dict[str, Any]]:
    page = {"edges": [], "pageInfo": {"endCursor": None, "hasNextPage": False}}
    return 200, {"data": {"project": {"internalId": "1", "runCount": count, "readOnly": False, "runs": page}}}


NO_PROJECT = (200, {"data": {"project": None}})
SAVED = (200, {"data": {"upsertView": {"view": {"id": "abc", "name": "nw-abcdefghijk-v"}, "inserted": True}}})
REFUSED = (200, {"data": None, "errors": [{"message": "permission denied"}]})


class Views:
    """The saved views of a project, as W&B keeps them: by internal name, in the order in which they were saved."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}

    def save(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        sent = request["variables"]
        # An id stands for a view that exists, and only that is overwritten.
        name = next((name for name, view in self.kept.items() if view["id"] == sent.get("id")), sent["name"])
        view = {"id": f"id of {name}", "name": name, "displayName": sent["displayName"], "spec": sent["spec"]}
        self.kept[name] = {**view, "updatedAt": f"2026-01-01T00:00:{len(self.kept):02}Z"}
        return 200, {"data": {"upsertView": {"view": {"id": view["id"], "name": name}, "inserted": True}}}

    def find(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """One view a page, or the one of a name."""
        wanted = request["variables"]
        nodes = [view for name, view in self.kept.items() if wanted.get("viewName") in (None, name)]
        at = int(wanted.get("after") or 0)
        page = {"endCursor": str(at + 1), "hasNextPage": at + 1 < len(nodes)}
        return 200, {
            "data": {"project": {"allViews": {"edges": [{"node": n} for n in nodes[at:][:1]], "pageInfo": page}}}
        }

    def section(self, name: str) -> dict[str, Any]:
        return json.loads(self.kept[name]["spec"])["section"]


NO_VIEWS = Views().find({"variables": {}})


def end_wandb() -> None:
    """Forget the settings of W&B's client, WANDB_MODE among them, and end its service. A request that was given up can
    cut the client from its service, which then ends by itself after ten minutes.
    """
    ending = threading.Thread(target=wandb.teardown, daemon=True)
    ending.start()
    ending.join(10)
    for child in psutil.Process().children():
        if ending.is_alive() and child.name().startswith("wandb-core"):
            child.kill()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:
    """The stand-in, with W&B's client pointed at it."""
    end_wandb()  # of an earlier test's run, which may have been offline
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(wandb, "run", None)  # what a run that died in this process leaves, and login then does nothing
    answers = {"upsertView": SAVED, "allViews": NO_VIEWS, "Runs(": runs(3), "viewer": VIEWER}
    with served(answers) as (address, handler):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield handler
        end_wandb()


@pytest.mark.slow
def test_the_view_is_sent_and_its_address_printed(
    server: type[StandIn], call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--project", "llm-fp8", "--group", "llama") == 0
    assert re.search(
        r"^3 runs compared in \S+/team/llm-fp8\?nw=abcdefghijk$", capsys.readouterr().out, flags=re.MULTILINE
    )
    listing = next(request for request in server.requests if "Runs(" in request["query"])
    assert json.loads(listing["variables"]["filters"]) == {"jobType": "train", "group": "llama"}
    sent = next(request for request in server.requests if "upsertView" in request["query"])["variables"]
    assert (sent["entityName"], sent["projectName"], sent["displayName"]) == ("team", "llm-fp8", "fp8 comparison")
    sections = json.loads(sent["spec"])["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.title for section in SECTIONS]


def panels_of(section: dict[str, Any]) -> list[tuple[str, list[str | None]]]:
    """Sections, each with the titles of its panels."""
    sections = section["panelBankConfig"]["sections"]
    return [(own["name"], [panel["config"].get("chartTitle") for panel in own["panels"]]) for own in sections]


@pytest.mark.slow
def test_a_second_call_updates_the_view(
    server: type[StandIn], call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """In place, with W&B's own client in between, and what was changed in the browser meanwhile stays."""
    views = Views()
    server.answers |= {"upsertView": views.save, "allViews": views.find}
    assert call("--name", "another view") == call() == 0
    assert [view["displayName"] for view in views.kept.values()] == ["another view", "fp8 comparison"]
    other, ours = views.kept
    first, address = views.section(ours), capsys.readouterr().out.splitlines()[-1]
    assert call() == 0
    assert list(views.kept) == [other, ours] and capsys.readouterr().out.splitlines()[-1] == address
    assert panels_of(views.section(ours)) == panels_of(first)
    assert views.section(ours)["panelBankConfig"] == first["panelBankConfig"], "nothing to change"

    # Somebody moves a panel, makes it larger and draws something else in it, deletes one, adds one and a section,
    # renames a section, closes one, and colours a run.
    spec = json.loads(views.kept[ours]["spec"])
    sections = spec["section"]["panelBankConfig"]["sections"]
    by_name = {section["name"]: section for section in sections}
    moved = by_name["Loss"]["panels"].pop(0)
    moved["layout"] |= {"w": 24, "h": 12}
    moved["config"]["metrics"] = ["grad_norm"]
    deleted = by_name["Loss"]["panels"].pop()
    own = json.loads(json.dumps(moved))
    own["__id__"], own["config"]["chartTitle"] = "own", "My loss"
    by_name["Throughput"]["panels"] += [moved, own]
    by_name["Energy"] |= {"name": "Watts and joules"}
    by_name["Memory"] |= {"isOpen": False}
    sections.insert(0, {**json.loads(json.dumps(by_name["Memory"])), "name": "Mine", "panels": []})
    spec["section"]["customRunColors"] = {"run1": "#ff0000"}
    views.kept[ours]["spec"] = json.dumps(spec)
    changed = panels_of(spec["section"])

    assert call("--group", "llama") == 0
    now = views.section(ours)
    expected = [(name, [*titles, *(["Gradient norm"] if name == "Loss" else [])]) for name, titles in changed]
    assert panels_of(now) == expected and deleted["config"]["chartTitle"] == "Gradient norm"
    assert ("Mine", []) in expected and "Watts and joules" in dict(expected) and "Energy" not in dict(expected)
    sections = {section["name"]: section for section in now["panelBankConfig"]["sections"]}
    assert sections["Memory"]["isOpen"] is False and now["customRunColors"]["run1"] == "#ff0000"
    panels = {panel["config"].get("chartTitle"): panel for panel in sections["Throughput"]["panels"]}
    loss, mine = panels["Loss by step"], panels["My loss"]
    assert loss["config"]["metrics"] == ["loss"] and mine["config"]["metrics"] == ["grad_norm"]
    assert loss["__id__"] == moved["__id__"] and (loss["layout"]["w"], loss["layout"]["h"]) == (24, 12)
    filters = json.dumps(now["runSets"][0]["filters"])
    assert '"llama"' in filters and '"llama"' not in json.dumps(first["runSets"][0]["filters"])
    assert views.kept[other]["displayName"] == "another view" and len(views.kept) == 2


@pytest.mark.slow
def test_of_views_of_one_name_the_last_saved_is_updated_and_one_that_cannot_be_read_is_named(
    server: type[StandIn], call: Callable[..., int]
) -> None:
    views = Views()
    server.answers |= {"upsertView": views.save}  # no view is found, so each call makes one
    assert call() == call() == 0 and len(views.kept) == 2
    server.answers |= {"allViews": views.find}
    older, last = views.kept
    views.kept[older]["spec"] = "{}"
    assert call() == 0 and len(views.kept) == 2 and views.kept[older]["spec"] == "{}"
    views.kept[last]["spec"] = json.dumps(json.loads(views.kept[last]["spec"]) | {"version": 99})
    with pytest.raises(UserError, match="--name 'fp8 comparison': W&B's view of this name cannot be read"):
        call()
    views.kept[last]["spec"] = '{"section": 1}'
    with pytest.raises(UserError, match="--name 'fp8 comparison': W&B's view of this name cannot be read"):
        call()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"Runs(": NO_PROJECT}, "--project team/llm-fp8: W&B shows no such project"),
        ({"Runs(": runs(0)}, "--project team/llm-fp8: there is no training run in the group llama"),
        ({"upsertView": REFUSED}, r"did not do what was asked for project llm-fp8 \(.*permission denied.*\)"),
        (
            {"viewer": (401, {"errors": [{"message": "user is not logged in"}]})},
            "W&B did not accept this machine's login",
        ),
    ],
    ids=["no-project", "no-runs", "may-not-write", "bad-key"],
)
def test_what_the_server_refuses_is_one_sentence(
    server: type[StandIn], call: Callable[..., int], changed: dict[str, Any], sentence: str
) -> None:
    server.answers |= changed
    with pytest.raises(UserError, match=sentence):
        call("--group", "llama")


def test_a_server_that_is_not_reached_is_not_taken_for_a_refused_login(
    server: type[StandIn], call: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(wandb_dashboard, "SERVER_TIMEOUT_S", 1)
    with pytest.raises(UserError, match="W&B's server was not reached .*WANDB_BASE_URL"):
        call()


def test_without_a_login_or_offline_it_says_what_to_do(
    call: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="unset WANDB_MODE"):
        call()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match="there is no W&B login on this machine; run 'wandb login'"):
        call()
