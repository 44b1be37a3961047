"""Send a run's options and numbers to the trackers of --report_to, such as W&B, with Accelerate's tracker classes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from llm_fp8.config.options import RunConfig
from llm_fp8.config.recipes import precision_name
from llm_fp8.utils.errors import UserError, reading

LABELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "precision_name": lambda run: _precision_name(run["precision"], "effective"),
    "precision_requested": lambda run: _precision_name(run["precision"], "requested"),
    "model_short_name": lambda run: Path(run["config"]["model"]["model_name"]).name,
    "sharding_mode": lambda run: run["effective"]["sharding_mode"],
    "gpu_name": lambda run: next((gpu["name"] for gpu in run["provenance"]["gpus"]), "CPU"),
    "num_processes": lambda run: run["effective"]["num_processes"],
    "optimizer_name": lambda run: run["precision"]["optimizer"],
    "num_parameters": lambda run: run["model"]["num_parameters"],
    "tokens_per_step": lambda run: run["effective"]["tokens_per_step"],
    "git_commit": lambda run: (run["provenance"]["git"] or {}).get("commit"),
    "torch_version": lambda run: run["provenance"]["packages"]["torch"],
    "transformer_engine_version": lambda run: run["provenance"]["packages"]["transformer-engine"],
}
"""Label -> function that reads its value from a run.json."""
TAGS = ("precision_name", "model_short_name", "sharding_mode", "gpu_name")
"""Labels that are tags on W&B, too."""


def _precision_name(precision: dict[str, Any], which: str) -> str:
    return precision_name(precision[which], precision[f"{which}_scenario"])


def flattened(tree: dict[str, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each leaf of a nested dict. The keys on the path to it are joined by `separator`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def start_tracker(
    name: str, options: RunConfig, folder: Path, record: dict[str, Any], run_id: str | None
) -> tuple[GeneralTracker, str | None]:
    """Start the tracker `name` and give it the options and labels in `record`, the content of run.json. On W&B,
    continue the run `run_id` if it is set. Return the tracker and the id of the run on W&B (None for other trackers).
    """
    labels = {label: read(record) for label, read in LABELS.items()}
    config = dict(flattened(record["config"])) | labels
    arguments: dict[str, Any] = {}
    if name == "wandb":
        arguments = {"id": run_id, "resume": "allow" if run_id else None, "name": options.wandb_run_name or None}
        effective = record["effective"] | {section: record[section] for section in ("precision", "model", "data")}
        config = {**record["config"], **labels, "effective": effective, "provenance": record["provenance"]}
        tags = [*filter(None, os.environ.get("WANDB_TAGS", "").split(",")), *(str(labels[tag])[:64] for tag in TAGS)]
        arguments |= {"dir": str(folder), "job_type": "train", "tags": tags}
    logging.raiseExceptions = False  # else a full disk prints a traceback for each line of a tracker's log
    advice = "WANDB_MODE=offline needs no network." if name == "wandb" else ""
    flag = "--use_wandb" if name == "wandb" else f"--report_to {name}"
    project = project_name(options)
    with reading(flag, project, f"a run of {name}", advice):
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        logging_dir = [folder / name] if tracker_class.requires_logging_directory else []
        tracker: GeneralTracker = tracker_class(project, *logging_dir, **arguments)
        tracker.start()
        tracker.store_init_configuration(config)
        if name == "wandb":
            for metric, axis in (("step", None), ("tokens_seen", None), ("*", "step")):
                tracker.tracker.define_metric(metric, step_metric=axis)
        return tracker, tracker.tracker.id if name == "wandb" else None


def project_name(options: RunConfig) -> str:
    """Return the name of the project to which a run with `options` belongs in its trackers."""
    return options.wandb_project or os.environ.get("WANDB_PROJECT", "llm-fp8")


def send_record(name: str, tracker: GeneralTracker, record: dict[str, float], is_logged: bool) -> None:
    """Send a record to W&B. Send it to other trackers only if `is_logged`, since the run waits until they store it."""
    if name == "wandb":  # W&B numbers the records itself, and `start_tracker` defined its axes
        tracker.log(record)
    elif is_logged:
        tracker.log({key: value for key, value in record.items() if key != "step"}, step=int(record["step"]))


def send_summary(name: str, tracker: GeneralTracker, summary: dict[str, Any]) -> None:
    """Add the scalars of summary.json to W&B's summary. A nested key becomes `part/key`. Other trackers get nothing."""
    if name != "wandb":
        return
    skipped = ("last_step", "last_evaluation", "recorded_step", "precision", "throughput")
    entries = {key: value for key, value in summary.items() if key not in skipped} | summary.get("throughput", {})
    flat = {key: value for key, value in flattened(entries, "/") if value is not None}
    plain = {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in flat.items()}
    tracker.tracker.summary.update(plain)


def require_trackers(names: tuple[str, ...]) -> None:
    """Raise `UserError` if a tracker does not exist or is not installed, or if there is no login for W&B."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(f"--report_to: '{name}' is not among {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}.")
        if name not in map(str, get_available_trackers()):
            flag = "--use_wandb or --report_to wandb" if name == "wandb" else "--report_to"
            raise UserError(f"{flag}: {name} is not installed; run: pip install {name}")
        if name == "wandb":
            require_wandb_login("--use_wandb or --report_to wandb")


def require_wandb_login(source: str) -> None:
    """Raise a `UserError` that names `source` (flag or script) if there is no W&B login. The network is not used."""
    with reading(source, "and the WANDB_ variables", "the W&B login", "Run 'wandb login --relogin'."):
        import wandb

        # If not silent, W&B reads the user's name from its server, and hangs offline. The run calls setup again.
        settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
        try:
            if settings.mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False, verify=False):
                return
        finally:
            wandb.teardown()
    raise UserError(f"{source}: there is no W&B login here; run 'wandb login', or set WANDB_MODE=offline.")
