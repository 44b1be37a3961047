"""The layout of the W&B dashboard that compares runs: which figure is drawn where, and what a run must hold for it.

The layout is data (`SECTIONS`), in the project's own keys; `build_workspace` turns it into the objects of
wandb-workspaces, which sends it to W&B. A view that exists is updated: `update_workspace` matches panels by kind and
title and sections by name, and leaves everything else in it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llm_fp8.observability.metrics import METRICS
from llm_fp8.observability.tracker_labels import LABELS
from llm_fp8.utils.errors import UserError

Axis = Literal["step", "tokens_seen"]
PRECISION = "precision_name"
CERTIFICATE = "certificate/"
MAX_RUNS = 50
"""Runs that a panel shows; W&B's own default is 10."""


@dataclass(frozen=True)
class Curve:
    """A line per run: figures of the history by steps or by tokens."""

    title: str
    keys: tuple[str, ...]
    by: Axis = "step"


@dataclass(frozen=True)
class Bars:
    """A bar per run, or per value of a label: figures of the summary."""

    title: str
    keys: tuple[str, ...]
    per: str | None = None
    """The label of `LABELS` whose runs share a bar (their mean); None for a bar per run."""


@dataclass(frozen=True)
class Comparer:
    """W&B's table of what differs between runs: configuration and summary."""

    title: str = "What differs between the runs"

    @property
    def keys(self) -> tuple[str, ...]:
        return ()


Panel = Curve | Bars | Comparer


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]
    is_open: bool = True


SECTIONS: tuple[Section, ...] = (
    Section(
        "Throughput",
        (
            Curve("Tokens per second", ("tokens_per_s",)),
            Bars("Median tokens per second, by run", ("median_tokens_per_s",)),
            Bars("Median tokens per second, by precision", ("median_tokens_per_s",), per=PRECISION),
            Curve("Seconds per step", ("step_time_s",)),
            Bars("Median tokens per second and GPU, by run", ("median_tokens_per_s_per_gpu",)),
            Bars("Median tokens that are not padding per second, by run", ("median_real_tokens_per_s",)),
        ),
    ),
    Section(
        "Loss",
        (
            Curve("Loss by step", ("loss",)),
            Curve("Loss by token", ("loss",), by="tokens_seen"),
            Curve("Gradient norm", ("grad_norm",)),
        ),
    ),
    Section(
        "Evaluation",
        (
            Curve("Eval loss by step", ("eval_loss",)),
            Curve("Eval loss by token", ("eval_loss",), by="tokens_seen"),
            Bars("Eval loss at the end, by precision", ("eval_loss",), per=PRECISION),
            Curve("Exact match by step", ("eval_exact_match",)),
            Bars("Exact match at the end, by run", ("eval_exact_match",)),
            Bars("Exact match at the end, by precision", ("eval_exact_match",), per=PRECISION),
        ),
    ),
    Section(
        "Memory",
        (
            Bars("Peak memory of the first GPU, GiB", ("peak_memory_gib",)),
            Bars("Peak memory taken by the allocator, GiB", ("peak_reserved_memory_gib",)),
            Bars("Peak memory of the rank that needs most, GiB", ("peak_memory_gib_max_rank",)),
        ),
    ),
    Section(
        "Utilisation",
        (
            Bars("Median model TFLOP/s per GPU", ("median_model_tflops",)),
            Bars("Median share of the bf16 peak", ("median_mfu_bf16_peak",)),
            Bars("Median share of the fp8 peak", ("median_mfu_fp8_peak",)),
            Curve("Model TFLOP/s per GPU", ("model_tflops",)),
            Bars("Share of the linear layers' FLOPs in fp8", ("fp8_linear_flop_share",)),
            Bars("Median share of positions that are not padding", ("median_packing_efficiency",)),
        ),
    ),
    Section(
        "Energy",
        (
            Curve("Joules per million tokens", ("energy_j_per_million_tokens",)),
            Bars("Median joules per million tokens, by run", ("median_energy_j_per_million_tokens",)),
            Bars(
                "Median joules per million tokens, by precision", ("median_energy_j_per_million_tokens",), per=PRECISION
            ),
            Curve("Watts per GPU", ("gpu_power_w",)),
            Bars("Median watts per GPU, by run", ("median_gpu_power_w",)),
            Bars("Joules of the run, all GPUs", ("energy_j",)),
        ),
    ),
    Section(
        "Communication",
        (
            Bars("Share of a step in which the first GPU communicates", ("communication_share",)),
            Bars("Share of a step in which it does nothing else", ("exposed_communication_share",)),
            Bars("How much longer the slowest rank works than the mean", ("slowest_rank_lag",)),
        ),
        is_open=False,
    ),
    Section(
        "Certificate",
        (
            Bars(
                "GEMM kernels in fp8, and how many were expected",
                (f"{CERTIFICATE}num_fp8_gemm_kernels", f"{CERTIFICATE}num_expected_fp8_gemm_kernels"),
            ),
            Bars("GEMM kernels of unknown type", (f"{CERTIFICATE}num_unknown_gemm_kernels",)),
            Bars("Share of GEMM time in fp8 kernels", (f"{CERTIFICATE}fp8_gemm_time_share",)),
            Comparer(),
        ),
    ),
)

COLUMNS: tuple[str, ...] = (
    PRECISION,
    f"{CERTIFICATE}verdict",
    "model_short_name",
    "gpu_name",
    "sharding_mode",
    "median_tokens_per_s",
    "loss",
    "eval_loss",
)
"""Labels and summary figures beside each run's name in the list of runs."""


def panel_keys() -> dict[str, str]:
    """Every figure that the dashboard draws -> where a run holds it: 'history' or 'summary'."""
    wanted: dict[str, str] = {}
    for section in SECTIONS:
        for panel in section.panels:
            wanted.update(dict.fromkeys(panel.keys, "history" if isinstance(panel, Curve) else "summary"))
            if isinstance(panel, Curve):
                wanted[panel.by] = "history"
    wanted.update({key: "summary" for key in COLUMNS if key not in LABELS and key not in wanted})
    return wanted


def labels_used() -> frozenset[str]:
    groups = [panel.per for section in SECTIONS for panel in section.panels if isinstance(panel, Bars) and panel.per]
    return frozenset([*groups, *(key for key in COLUMNS if key in LABELS)])


def missing_keys(config: dict[str, Any], history_keys: Sequence[str], summary_keys: Sequence[str]) -> list[str]:
    """What of the dashboard's figures and labels a run lacks, in the layout's order; such panels stay empty for it."""
    held = {"history": set(history_keys), "summary": set(summary_keys)}
    figures = [key for key, place in panel_keys().items() if key not in held[place]]
    return figures + [label for label in sorted(labels_used()) if label not in config]


def build_workspace(entity: str, project: str, group: str | None, name: str) -> Any:
    """The dashboard as a `wandb_workspaces.workspaces.Workspace`, not sent.

    `group` shows the runs of that W&B group only. Raises ValueError (pydantic's) for a name that W&B refuses.
    """
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    wanted = [expr.Metric("JobType") == "train"]
    if group is not None:
        wanted.append(expr.Metric("Group") == group)
    columns = [f"config:{key}" if key in LABELS else f"summary:{key}" for key in COLUMNS]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            ws.Section(name=section.title, panels=[_panel(panel) for panel in section.panels], is_open=section.is_open)
            for section in SECTIONS
        ],
        settings=ws.WorkspaceSettings(max_runs=MAX_RUNS),
        runset_settings=ws.RunsetSettings(filters=expr.And(*wanted), pinned_columns=columns),
    )


VIEWS = """query Views($entity: String, $project: String, $after: String) {
  project(name: $project, entityName: $entity) { allViews(viewType: "project-view", first: 100, after: $after) {
    edges { node { name displayName updatedAt } } pageInfo { endCursor hasNextPage } } } }"""


def find_workspace(api: Any, entity: str, project: str, name: str) -> Any | None:
    """The project's saved view of this name as a `Workspace`, the one saved last if there are several; None without
    one. `api`: a `wandb.Api`. Raises `UserError` for a view that wandb-workspaces cannot read.
    """
    import wandb_workspaces.workspaces as ws

    # Private; read in wandb-workspaces 0.4.13. test_a_second_call_updates_the_view asks a server with it.
    from wandb_workspaces._graphql import execute_graphql
    from wandb_workspaces.workspaces.errors import SpecVersionError, UnsupportedViewError

    found: list[dict[str, str]] = []
    page = {"endCursor": None, "hasNextPage": True}
    while page["hasNextPage"]:
        asked = {"entity": entity, "project": project, "after": page["endCursor"]}
        views = execute_graphql(api, VIEWS, asked)["project"]["allViews"]
        found += [edge["node"] for edge in views["edges"] if edge["node"]["displayName"] == name]
        page = views["pageInfo"]
    if not found:
        return None
    last = max(found, key=lambda view: view["updatedAt"])["name"]  # such as nw-abcdefghijk-v
    address = f"https://wandb.ai/{entity}/{project}?nw={last.removeprefix('nw-').removesuffix('-v')}"
    try:
        return ws.Workspace.from_url(address)  # whatever host it names, the server of this machine's login is asked
    except (ValueError, SpecVersionError, UnsupportedViewError) as error:
        raise UserError(
            f"--name {name!r}: W&B's view of this name cannot be read ({' '.join(str(error).split())}); give another."
        ) from error


def update_workspace(existing: Any, wanted: Any) -> None:
    """Put the panels and the filter of the view `wanted` into the view `existing`: in place of its panels of the same
    kind and title, wherever they stand, else at the end of the section of that name, else in a new section. Further
    panels, sections, their order and sizes, columns and settings stay.
    """
    places = {
        (type(panel), getattr(panel, "title", None)): (section, at)
        for section in reversed(existing.sections)
        for at, panel in reversed(list(enumerate(section.panels)))
    }  # the first of several
    by_name = {section.name: section for section in reversed(existing.sections)}
    for section in wanted.sections:
        added = []
        for panel in section.panels:
            if place := places.get((type(panel), getattr(panel, "title", None))):
                held, at = place
                old = held.panels[at]
                panel.layout, panel._id, panel._is_auto = old.layout, old._id, old._is_auto
                held.panels[at] = panel
            else:
                added.append(panel)
        if section.name in by_name:
            by_name[section.name].panels += added
        elif added:
            section.panels = added
            existing.sections.append(section)
    existing.runset_settings.filters = wanted.runset_settings.filters


def _panel(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    if isinstance(panel, Curve):
        return wr.LinePlot(
            title=panel.title,
            x="Step" if panel.by == "step" else panel.by,
            y=list(panel.keys),
            title_x=METRICS[panel.by].unit,
            title_y=METRICS[panel.keys[0]].unit,
            legend_template=f"${{run:displayName}} (${{config:{PRECISION}}})",
        )
    if isinstance(panel, Bars):
        return wr.BarPlot(
            title=panel.title,
            metrics=list(panel.keys),
            groupby=None if panel.per is None else wr.Config(panel.per),
            groupby_aggfunc=None if panel.per is None else "mean",
            groupby_rangefunc=None if panel.per is None else "minmax",
            max_runs_to_show=MAX_RUNS,
            max_bars_to_show=MAX_RUNS,
        )
    return wr.RunComparer(diff_only="split")
