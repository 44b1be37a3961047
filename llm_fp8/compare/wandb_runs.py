"""A run's record from W&B: from the file that an offline run keeps on disk, or from the server through wandb's public API.

Both hold the configuration, what it came to, the provenance and the history. The answers to the held-out problems stay in the run's folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llm_fp8.compare.run_record import RunRecord, require_sections, split_records, why_unfinished
from llm_fp8.errors import UserError
from llm_fp8.wandb_files import read_wandb_file

_FLAG = "--wandb"
_SERVER_PATH = re.compile(r"[^/\s]+/[^/\s]+/[^/\s]+")
_RUN_ID = re.compile(r"[\w-]+")
_KEPT_IN = ("wandb", "runs/*/wandb", "runs/*/runs/*/wandb")
"""Where W&B keeps runs on this machine, below the working directory: its own default, and the output folders of runs and comparisons."""
_OPTION_SECTIONS = ("model", "precision", "data", "optim", "run", "lora", "parallel")


def read_wandb(text: str, api: Any = None) -> RunRecord:
    """The record of a finished run: `text` is a folder with a .wandb file where there is one of that name, else ENTITY/PROJECT/RUNID, or RUNID alone.

    The last is of a run that W&B kept on this machine, in one of the folders `_KEPT_IN`. `api` is a `wandb.Api`; by default a new one, with the login
    of this machine. Raises `UserError` where there is no such run.
    """
    folder = Path(text)
    if not folder.exists():
        if _SERVER_PATH.fullmatch(text):
            return _read_server_run(text, api)
        if _RUN_ID.fullmatch(text):
            folder = _folder_of(text)
    if not folder.is_dir():
        raise UserError(f"{_FLAG} {text}: no such folder; give a wandb/offline-run-* folder, ENTITY/PROJECT/RUNID, or RUNID.")
    files = sorted(folder.glob("*.wandb"))
    if len(files) != 1:
        raise UserError(
            f"{_FLAG} {text}: it must hold one .wandb file, as a wandb/offline-run-* folder does, and holds {len(files)}; for a run's output "
            "folder use --runs."
        )
    run = read_wandb_file(files[0])
    if run.exit_code != 0:
        how = "is still running or was killed" if run.exit_code is None else f"ended with exit code {run.exit_code}"
        raise UserError(f"{_FLAG} {text}: the run {how}; give a run that finished.")
    return _record(text, run.config, run.history, run.logged_summary)


def _folder_of(run_id: str) -> Path:
    """The folder in which W&B keeps the run of this id on this machine."""
    # W&B names them offline-run-TIME-ID, or run-TIME-ID if it sent the run.
    found = sorted({folder for kept_in in _KEPT_IN for folder in Path().glob(f"{kept_in}/*run-*-{run_id}") if folder.is_dir()})
    if len(found) != 1:
        told = (
            f"several W&B runs of that id are here ({', '.join(map(str, found))})" if found else "no W&B run of that id is here"
        )
        raise UserError(
            f"{_FLAG} {run_id}: {told}, in {', '.join(_KEPT_IN)}; give its wandb/offline-run-* folder, or ENTITY/PROJECT/RUNID."
        )
    return found[0]


def _read_server_run(path: str, api: Any) -> RunRecord:
    import wandb

    try:
        run = (api or wandb.Api()).run(path)
        state, config, summary, history = run.state, dict(run.config), dict(run.summary), list(run.scan_history())
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise UserError(f"{_FLAG} {path}: W&B did not give the run ({error}); check the path and 'wandb login'.") from error
    if state != "finished":
        raise UserError(f"{_FLAG} {path}: the W&B run is {state}; give a run that finished.")
    return _record(path, config, history, summary)


def _record(source: str, config: dict[str, Any], history: list[dict[str, Any]], summary: dict[str, Any]) -> RunRecord:
    if reason := why_unfinished(summary):  # W&B calls a run finished that a signal stopped
        raise UserError(f"{_FLAG} {source}: {reason}")
    effective = dict(config.get("effective") or {})
    precision = effective.pop("precision", None)
    require_sections(f"{_FLAG} {source}: its configuration", config, precision)
    steps, evaluations = split_records(_merged_by_step(history))
    if not steps:
        raise UserError(f"{_FLAG} {source}: its history holds no optimizer step.")
    model, data = effective.pop("model", {}), effective.pop("data", {})
    return RunRecord(
        source=source,
        config={name: config[name] for name in _OPTION_SECTIONS if name in config},
        precision=precision,
        steps=steps,
        evaluations=evaluations,
        effective=effective,
        data=data,
        model={key: model[key] for key in ("location", "num_parameters") if key in model},
        provenance=config.get("provenance", {}),
        summary=summary,
        certificate=certificate_from_flat(summary),
    )


def certificate_from_flat(summary: dict[str, Any]) -> dict[str, Any] | None:
    """The certificate in a W&B summary, whose nested entries stand under keys as 'certificate/verdict'; None without one."""
    found = {key.removeprefix("certificate/"): value for key, value in summary.items() if key.startswith("certificate/")}
    if isinstance(found.get("reasons"), str):  # a list becomes its text on the way to W&B
        found["reasons"] = [] if found["reasons"] == "[]" else [found["reasons"]]
    return found or None


def _merged_by_step(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """History rows with those of one step joined: an evaluation may stand in the row of its step or in one of its own."""
    by_step: dict[Any, dict[str, Any]] = {}
    for row in history:
        if row.get("step") is not None:
            present = {key: value for key, value in row.items() if value is not None and not key.startswith("_")}
            by_step.setdefault(row["step"], {}).update(present)
    return [by_step[step] for step in sorted(by_step)]
