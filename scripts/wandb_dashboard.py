#!/usr/bin/env python
"""Create a view in W&B that compares training runs: throughput, loss, memory, energy, certificate and more.

    --entity my-team --project llm-fp8    saves a view of the project's workspace and prints its address
    --view 'https://wandb.ai/...?nw=abc'  updates this program's sections in that view; other sections stay

`SECTIONS` is the layout, with the keys of docs/monitoring.md. The package wandb-workspaces sends it to W&B.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.config.options import RunConfig
from llm_fp8.observability.trackers import project_name
from llm_fp8.tools.script import run_script
from llm_fp8.utils.errors import OneSentenceParser, reading

PRECISION = "precision_name"
TIME = "_runtime"  # W&B's seconds since the run began
MAX_RUNS = 50  # number of runs that a panel shows (W&B's default is 10)


class Panel(NamedTuple):
    title: str
    key: str
    by: str = "step"
    """The x-axis of a line per run ("step", "tokens_seen" or `TIME`), or "run" for a bar per run from its summary, or
    "precision" for a bar per precision with the mean over its runs."""


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Throughput": (
        Panel("Tokens per second", "tokens_per_s"),
        Panel("Median tokens per second, by precision", "median_tokens_per_s", "precision"),
    ),
    "Loss": (
        Panel("Loss by step, nats", "loss"),
        Panel("Loss by seconds, nats", "loss", by=TIME),
        Panel("Gradient norm", "grad_norm"),
    ),
    "Evaluation": (
        Panel("Eval loss by tokens, nats", "eval_loss", by="tokens_seen"),
        Panel("Eval loss by seconds, nats", "eval_loss", by=TIME),
        Panel("Eval loss at the end, by precision, nats", "eval_loss", "precision"),
    ),
    "Memory": (
        Panel("Peak memory of the first GPU, GiB", "peak_memory_gib", "run"),
        Panel("Peak memory of the rank that needs most, GiB", "peak_memory_gib_max_rank", "run"),
    ),
    "Utilisation": (
        Panel("Median model TFLOP/s per GPU", "median_model_tflops", "run"),
        Panel("Median share of the bf16 peak", "median_mfu_bf16_peak", "run"),
        Panel("Median share of the fp8 peak", "median_mfu_fp8_peak", "run"),
        Panel("Share of the linear layers' FLOPs in fp8", "fp8_linear_flop_share", "run"),
        Panel("Median share of positions that are not padding", "median_packing_efficiency", "run"),
    ),
    "Energy": (
        Panel("Joules per million tokens", "energy_j_per_million_tokens"),
        Panel("Median joules per million tokens, by precision", "median_energy_j_per_million_tokens", "precision"),
        Panel("Watts per GPU", "gpu_power_w"),
        Panel("Joules of the run, all GPUs", "energy_j", "run"),
    ),
    "Communication": (
        Panel("Share of a step in which the first GPU communicates", "communication_share", "run"),
        Panel("Share of a step in which it does nothing else", "exposed_communication_share", "run"),
    ),
    "Certificate": (
        Panel("GEMM kernels in fp8", "certificate/num_fp8_gemm_kernels", "run"),
        Panel("GEMM kernels expected in fp8", "certificate/num_expected_fp8_gemm_kernels", "run"),
        Panel("Share of GEMM time in fp8 kernels", "certificate/fp8_gemm_time_share", "run"),
    ),
}
COLUMNS = (PRECISION, "certificate/verdict", "model_short_name", "gpu_name", "sharding_mode", "median_tokens_per_s")
"""Columns of the list of runs: labels and figures of the summary."""


def build_workspace(entity: str, project: str, group: str | None, name: str) -> Any:
    """Build a `wandb_workspaces.workspaces.Workspace` without sending it. `group` selects runs; None means all."""
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    from llm_fp8.observability.trackers import LABELS

    filters = [expr.Metric("JobType") == "train", *([expr.Metric("Group") == group] if group else ())]
    columns = [f"config:{key}" if key in LABELS else f"summary:{key}" for key in COLUMNS]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[ws.Section(title, list(map(_panel, panels)), is_open=True) for title, panels in SECTIONS.items()],
        settings=ws.WorkspaceSettings(max_runs=MAX_RUNS),
        runset_settings=ws.RunsetSettings(filters=expr.And(*filters), pinned_columns=columns),
    )


def _panel(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    title, key, by = panel
    legend = f"${{run:displayName}} (${{config:{PRECISION}}})"
    if by not in ("run", "precision"):
        return wr.LinePlot(title=title, x=by, y=[key], legend_template=legend)
    bars: Any = {"legend_template": legend}
    if by == "precision":
        bars = {"groupby": wr.Config(PRECISION), "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
    return wr.BarPlot(title=title, metrics=[key], max_runs_to_show=MAX_RUNS, max_bars_to_show=MAX_RUNS, **bars)


def main() -> int:
    """Create or update the view in W&B, and print its address."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--entity", help="W&B user or team that owns the project (default: your own)")
    add("--project", default=project_name(RunConfig()), help="W&B project (default: %(default)s)")
    add("--group", help="show the runs of this W&B group only (default: all training runs)")
    add("--name", default="fp8 comparison", help="name of the view (default: %(default)s)")
    add("--view", metavar="URL", help="address of a saved view to update instead of creating one")
    options = parser.parse_args()
    import wandb  # imported here, so that --help and wrong options do not wait for it
    import wandb_workspaces.workspaces as ws

    from llm_fp8.observability.trackers import require_wandb_login

    require_wandb_login("scripts/wandb_dashboard.py")
    advice = "Check --entity and --project, 'wandb login', the network and WANDB_BASE_URL."
    with reading("--view" if options.view else "--project", options.view or options.project, "W&B's answer", advice):
        entity = str(options.entity or wandb.Api().default_entity)
        project = options.project
        if options.view:
            _, entity, project = urlparse(options.view).path.split("/")
        view = build_workspace(entity, project, options.group, options.name)
        if options.view:
            sections, view = view.sections, ws.Workspace.from_url(options.view)
            view.sections = [*(section for section in view.sections if section.name not in SECTIONS), *sections]
        view.save()
    print(f"the runs of {entity}/{project} are compared in {view.url}")
    return 0


if __name__ == "__main__":
    run_script(main)
