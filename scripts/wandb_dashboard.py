#!/usr/bin/env python
"""Lays out the comparison of training runs in W&B: throughput, loss, evaluation, memory, utilisation, energy,
communication, certificate.

    python scripts/wandb_dashboard.py --entity my-team --project llm-fp8 --group llama32-1b
        makes the view, or updates the one of that name, and prints its address
    python scripts/wandb_dashboard.py --dry_run
        prints the layout, contacts nobody
    python scripts/wandb_dashboard.py --offline runs
        what offline runs hold, and how to send them

It is a saved view of the project's workspace, named by --name, of all training runs or of one W&B group (--group).
Called again, it updates the panels of that view in place, adds those that are missing, and leaves what else is in it as
it is. The layout is llm_fp8/tools/wandb_dashboard.py, the keys are explained in docs/monitoring.md. With --offline
the output folders are read on this machine: it lists the runs that W&B has not got yet, says which of the dashboard's
figures they lack, and prints the commands that send them.

The project's tests build the view with W&B's own client and check what is sent to a stand-in of the server on this
machine, not on wandb.ai.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from llm_fp8.config.options import RunConfig
from llm_fp8.observability.reporter import tracked_summary
from llm_fp8.observability.tracker_labels import run_labels, wandb_login_state
from llm_fp8.tools.wandb_dashboard import (
    SECTIONS,
    Bars,
    Curve,
    build_workspace,
    find_workspace,
    missing_keys,
    update_workspace,
)
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, read_metrics
from llm_fp8.utils.packages import package_version

SCRIPT = "scripts/wandb_dashboard.py"
SERVER_TIMEOUT_S = 30


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(prog=SCRIPT, description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--entity", help="W&B user or team that owns the project (default: your own)")
    parser.add_argument(
        "--project", help=f"W&B project (default: {RunConfig.wandb_project}; with --offline the one of each run)"
    )
    parser.add_argument("--group", help="show the runs of this W&B group only (default: all training runs)")
    parser.add_argument(
        "--name", default="fp8 comparison", help="name of the view; one that exists is updated (default: %(default)s)"
    )
    parser.add_argument("--dry_run", action="store_true", help="build the view, print its panels and contact nobody")
    parser.add_argument(
        "--offline", metavar="FOLDER", help="list the offline runs of an output folder, or of a folder of them"
    )
    options = parser.parse_args(argv)
    for name in ("entity", "project", "group", "name", "offline"):
        if getattr(options, name) == "":
            raise UserError(f"--{name} is empty; give a value or leave it out.")
    if options.dry_run and options.offline:
        raise UserError("--dry_run has no effect with --offline, which contacts nobody anyway; drop one.")
    if options.project is None and not options.offline:
        options.project = RunConfig.wandb_project
    return options


def print_layout() -> None:
    """Every panel with its figures."""
    for section in SECTIONS:
        print(section.title)
        for panel in section.panels:
            kind = f"lines by {panel.by}" if isinstance(panel, Curve) else "table"
            if isinstance(panel, Bars):
                kind = f"a bar per {panel.per or 'run'}"
            print(f"  {panel.title}: {', '.join(panel.keys) or 'all that differs'}, {kind}")


@dataclass(frozen=True)
class OfflineRun:
    """A run that W&B has not got yet: its W&B folders, and its figures from run.json, metrics.jsonl, summary.json."""

    wandb_folders: tuple[Path, ...]
    """One for each start of a training that was resumed, in their order."""
    name: str
    group: str
    project: str
    labels: dict[str, Any]
    history_keys: list[str]
    figures: dict[str, Any]
    """As W&B's summary: the last value of each metric, then the entries of summary.json."""
    ended: str


def offline_runs(folder: Path) -> tuple[list[OfflineRun], list[str]]:
    """The offline W&B runs of the output folder `folder` or of those below it, and why others cannot be read.

    Raises `UserError` where `folder` is missing or holds none.
    """
    if not folder.is_dir():
        raise UserError(f"--offline {folder} is not a folder; give an output folder, or one that holds several.")
    # 'offline-run-*' are those that W&B has not got yet; 'run-*' were sent while they ran.
    found = sorted(path for path in folder.rglob("wandb/offline-run-*") if path.is_dir())
    if not found:
        raise UserError(
            f"--offline {folder} holds no offline W&B run; such a run is made with --use_wandb and WANDB_MODE=offline "
            "in the environment."
        )
    starts: dict[tuple[Path, str], list[Path]] = {}
    for path in found:  # by output folder and run
        starts.setdefault((path.parent, _run_id(path)), []).append(path)
    runs, unreadable = [], []
    for wandb_folders in starts.values():
        try:
            runs.append(read_offline_run(*wandb_folders))
        except UserError as error:
            unreadable.append(str(error))
    return runs, unreadable


_OPTIONS = {
    "config.run": dict,
    **{f"config.run.wandb_{name}": str | None for name in ("run_name", "group", "project")},
}


def _run_id(wandb_folder: Path) -> str:
    return wandb_folder.name.split("-", 3)[-1]


def read_offline_run(*wandb_folders: Path) -> OfflineRun:
    """The run of OUTPUT_DIR/wandb/offline-run-TIME-ID, of one ID. Raises `UserError` where its output folder cannot be
    read.
    """
    output = wandb_folders[0].parent.parent
    record, history = read_json(output / "run.json", _OPTIONS), read_metrics(output / "metrics.jsonl")
    summary = read_json(output / "summary.json") if (output / "summary.json").is_file() else None
    try:
        options, labels = record["config"]["run"], run_labels(record)
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{output / 'run.json'} lacks what runs have ({error}); was it written by this project?"
        ) from None
    return OfflineRun(
        wandb_folders,
        name=options.get("wandb_run_name") or _run_id(wandb_folders[0]),
        group=os.environ.get("WANDB_RUN_GROUP") or output.resolve().name,
        project=options.get("wandb_project") or RunConfig.wandb_project,
        labels=labels,
        history_keys=sorted({key for entry in history for key in entry}),
        figures={
            **{key: value for entry in history for key, value in entry.items()},
            **tracked_summary(summary or {}),
        },
        ended=ending(summary),
    )


def ending(summary: dict[str, Any] | None) -> str:
    """How a run with this summary.json ended."""
    if summary is None:
        return "no (killed or still running)"
    if summary.get("stopped_by"):
        return f"stopped by {summary['stopped_by']}"
    return f"failed: {summary['failed']}" if summary.get("failed") else "yes"


def sync_command(run: OfflineRun, entity: str | None, project: str | None) -> str:
    """The command that sends an offline run to W&B; the run's own project is taken unless another is asked for."""
    words = ["wandb", "sync"]
    if entity:
        words += ["--entity", entity]
    if project not in (None, run.project):
        words += ["--project", str(project)]
    return shlex.join([*words, *map(str, run.wandb_folders)])


def show_offline(options: argparse.Namespace) -> int:
    """List offline runs, what of the dashboard they lack, and the commands that send them."""
    found, unreadable = offline_runs(Path(options.offline))
    runs = [run for run in found if options.group in (None, run.group)]
    if not found:
        raise UserError(unreadable[0])
    if not runs:
        raise UserError(f"--group {options.group}: no offline run under {options.offline} is in this group.")
    table = Table("run", "group", "precision", "model", "steps", "median tokens/s", "ended")
    for run in runs:
        tokens_per_s = run.figures.get("median_tokens_per_s")
        table.add_row(
            run.name,
            run.group,
            run.labels["precision_name"],
            run.labels["model_short_name"],
            str(run.figures.get("step", 0)),
            "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}",
            run.ended,
        )
    console = Console()
    console.print(table)
    for run in runs:
        missing = missing_keys(run.labels, run.history_keys, list(run.figures))
        lacks = (
            f"lacks {', '.join(missing)}; panels of these stay empty for it"
            if missing
            else "holds everything that the dashboard draws"
        )
        console.print(f"{run.name}: {lacks}.", markup=False, highlight=False, soft_wrap=True)
    for sentence in unreadable:
        console.print(f"WARNING: {sentence}", markup=False, highlight=False, soft_wrap=True)
    print("\nSend them to W&B, then lay out the dashboard:")
    for run in runs:
        print(f"  {sync_command(run, options.entity, options.project)}")
    for project in dict.fromkeys(options.project or run.project for run in runs):
        words = ["python", SCRIPT, "--project", project, "--name", options.name]
        for name in ("entity", "group"):
            if getattr(options, name):
                words += [f"--{name}", getattr(options, name)]
        print(f"  {shlex.join(words)}")
    return 0


@contextlib.contextmanager
def explained_server_errors(place: str) -> Iterator[None]:
    """Turn what W&B's client raises about the server into one sentence."""
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    try:
        yield
    except (wandb.errors.Error, WandbApiFailedError) as error:
        # The client raises AuthenticationError for a server that it cannot reach, too; only the answer's status tells.
        answer = next(
            (e.response for e in (error, error.__cause__) if isinstance(e, WandbApiFailedError) and e.response), None
        )
        status = answer.http_status if answer is not None else None
        if status in (401, 403):
            raise UserError(
                f"W&B did not accept this machine's login ({_line(error)}); run 'wandb login --relogin'."
            ) from error
        if status is None:
            raise UserError(
                f"W&B's server was not reached ({_line(error)}); check the network and WANDB_BASE_URL, or give "
                "--offline FOLDER."
            ) from error
        raise UserError(
            f"W&B did not do what was asked for {place} ({_line(error)}); check --entity and --project, and that your "
            "login may write there."
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def lay_out(options: argparse.Namespace) -> int:
    """Make the view in W&B and print its address."""
    state = wandb_login_state(SCRIPT)
    if state == "offline":
        raise UserError(
            f"{SCRIPT}: WANDB_MODE keeps W&B offline, and the dashboard is made on its server; unset WANDB_MODE, or "
            "give --offline FOLDER."
        )
    if state == "logged_out":
        raise UserError(
            f"{SCRIPT}: there is no W&B login on this machine; run 'wandb login', or look at --dry_run and --offline "
            "FOLDER."
        )
    import wandb

    with explained_server_errors(f"project {options.project}"):
        api = wandb.Api(timeout=SERVER_TIMEOUT_S)
        entity = options.entity or api.default_entity
        if not entity:
            raise UserError(f"{SCRIPT}: your W&B login has no default entity; name the user or team with --entity.")
        place = f"{entity}/{options.project}"
        filters = {"jobType": "train", **({"group": options.group} if options.group else {})}
        try:
            num_runs = len(api.runs(place, filters=filters, per_page=1))
        except ValueError as error:  # what the client raises for a project that is missing or not to be seen
            raise UserError(
                f"--project {place}: W&B shows no such project to your login; check --entity and --project."
            ) from error
        if num_runs == 0:
            of_group = f" in the group {options.group}" if options.group else ""
            raise UserError(
                f"--project {place}: there is no training run{of_group} to compare; train with --use_wandb first."
            )
        wanted = build_workspace(entity, options.project, options.group, options.name)
        workspace = find_workspace(api, entity, options.project, options.name)
        if workspace is None:
            workspace = wanted
        else:
            update_workspace(workspace, wanted)
        workspace.save()
    print(f"{num_runs} runs compared in {workspace.url}")
    return 0


def main() -> int:
    """Do what the command line says."""
    options = parse(sys.argv[1:])
    if options.offline:
        return show_offline(options)
    if package_version("wandb-workspaces") is None:
        raise UserError(
            f"{SCRIPT} needs the wandb-workspaces package, which is not installed: run 'pip install -r "
            "requirements.txt'."
        )
    if not options.dry_run:
        return lay_out(options)
    workspace = build_workspace(options.entity or "ENTITY", options.project, options.group, options.name)
    print_layout()
    print(
        f"{len(workspace.sections)} sections, {sum(len(section.panels) for section in workspace.sections)} panels; "
        "nothing was sent."
    )
    return 0


if __name__ == "__main__":
    run_script(main)
