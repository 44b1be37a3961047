"""What trackers get to tell runs apart (flat values of run.json, some as tags), and whether W&B can be used here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.packages import package_version

WANDB_TAG_LENGTH = 64
"""Characters that W&B allows in a tag."""

LABELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "precision_name": lambda run: _in_words(run["precision"], "effective"),
    "precision_requested": lambda run: _in_words(run["precision"], "requested"),
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
"""Every label, and what it is in a run.json. A key keeps its meaning for good."""


def run_labels(record: dict[str, Any]) -> dict[str, Any]:
    """The `LABELS` of a run, from its run.json."""
    return {name: label(record) for name, label in LABELS.items()}


def _in_words(precision: dict[str, Any], which: str) -> str:
    """'bf16', 'fp8 delayed', ..."""
    scenario = f" {precision[f'{which}_scenario']}" if precision[which] == "fp8" else ""
    return f"{precision[which]}{scenario}"


def run_tags(labels: dict[str, Any]) -> list[str]:
    """The tags of a run, each once and within W&B's length: precision, model, mode, GPU, then those of WANDB_TAGS."""
    names = ("precision_name", "model_short_name", "sharding_mode", "gpu_name")
    own = [str(labels[name])[:WANDB_TAG_LENGTH] for name in names]
    further = [tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(",") if tag.strip()]
    return list(dict.fromkeys([*own, *further]))


def flattened(tree: dict[str, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested dict, each with the keys that lead to it joined."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def wandb_login_state(asker: str) -> Literal["online", "offline", "logged_out"]:
    """How a W&B run of this process would go, without the network; offline (or disabled) by WANDB_MODE.

    Raises `UserError`, which names the flag or script `asker`, where W&B is not installed or refuses a variable of the
    environment or its stored login. W&B itself tries the key when it is used.
    """
    # By metadata: a folder wandb in the working directory would import as an empty package.
    if package_version("wandb") is None:
        raise UserError(
            f"{asker} needs the wandb package, which is not installed: run 'pip install wandb', or leave {asker} out."
        )
    import wandb

    with reading(asker, "and the WANDB_ variables", "the W&B login", "Run 'wandb login --relogin'."):
        # Silent: to greet a login by name W&B asks the server, and hangs without a network. The run sets up its own.
        settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
        try:
            if settings.mode in ("offline", "dryrun", "disabled"):
                return "offline"
            return "online" if wandb.login(prompt=False, verify=False) else "logged_out"
        finally:
            wandb.teardown()
