"""The folder of a run: its default name, the checks before a run, and whether it holds a finished run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from pathlib import Path

from llm_fp8.config.options import Config
from llm_fp8.observability.metrics import GIB
from llm_fp8.train.checkpoint import LATEST, has_checkpoint
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks, agree_on


def with_output_dir(config: Config, ranks: LaunchRanks) -> Config:
    """`config` with an output folder, the same on every rank; `UserError` where it cannot be written or holds another
    run. Processes restarted by the launcher continue from the newest checkpoint.
    """
    if config.run.output_dir is None:
        model = re.sub(r"[^A-Za-z0-9.]+", "-", config.model.model_name).strip("-")
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{config.precision.mixed_precision or 'auto'}"
        config = _with_run(config, output_dir=agree_on("output_dir", str(Path("runs") / name)))
    folder = Path(str(config.run.output_dir))
    existing = existing_part(folder)
    if not existing.is_dir():
        raise UserError(f"--output_dir {folder}: {existing} is a file; give a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output_dir {folder}: {existing} is not writable for this user; choose another folder.")
    if ranks.restart_count > 0:
        return _with_run(config, resume_from=LATEST if has_checkpoint(folder) else config.run.resume_from)
    resume_from = config.run.resume_from
    continues_it = resume_from == LATEST or (
        resume_from is not None and folder.resolve() in Path(resume_from).resolve().parents
    )
    if (folder / "run.json").exists() and not continues_it:
        raise UserError(
            f"--output_dir {folder} holds another run; choose another folder, remove this one, or continue it with "
            "--resume_from latest."
        )
    return config


def _with_run(config: Config, **changes: str | None) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))  # type: ignore[arg-type]


def existing_part(folder: Path) -> Path:
    """`folder`, or the first folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise `UserError` now where the export, hours later, would not fit on `folder`'s disk."""
    needed_gib = needed_bytes / GIB
    free_gib = shutil.disk_usage(existing_part(folder)).free / GIB
    if free_gib < needed_gib:
        raise UserError(
            f"--output_dir {folder}: the trained model will take {needed_gib:.3g} GiB and its disk has {free_gib:.3g} "
            "GiB free; make room, choose another folder or use --no_export."
        )


def is_finished(folder: Path, step: int) -> bool:
    """Whether the run in `folder` completed evaluation and export after `step`, not only its steps."""
    path = folder / "summary.json"
    if not path.exists():
        return False
    summary = json.loads(path.read_text())
    return summary["steps"] == step and not {"stopped_by", "failed"} & summary.keys()
