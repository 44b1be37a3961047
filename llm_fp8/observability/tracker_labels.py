"""What W&B gets to tell runs apart (flat values of run.json), and whether it can be used here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llm_fp8.utils.errors import UserError, reading

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
"""Every label, and what it is in a run.json."""
TAGS = ("precision_name", "model_short_name", "sharding_mode", "gpu_name")
"""Those that are tags too."""


def run_labels(record: dict[str, Any]) -> dict[str, Any]:
    """The `LABELS` of a run, from its run.json."""
    return {name: label(record) for name, label in LABELS.items()}


def _in_words(precision: dict[str, Any], which: str) -> str:
    """'bf16', 'fp8 delayed', ..."""
    scenario = f" {precision[f'{which}_scenario']}" if precision[which] == "fp8" else ""
    return f"{precision[which]}{scenario}"


def flattened(tree: dict[str, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested dict, each with the keys that lead to it joined."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def require_wandb_login(asker: str) -> None:
    """Raise `UserError`, beginning with the flag or script `asker`, where W&B cannot be used. It is asked without the
    network: W&B itself tries the key when it is used.
    """
    with reading(asker, "and the WANDB_ variables", "the W&B login", "Run 'wandb login --relogin'."):
        import wandb

        # Silent: to greet a login by name W&B asks the server, and hangs without a network. The run sets up its own.
        settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
        try:
            if settings.mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False, verify=False):
                return
        finally:
            wandb.teardown()
    raise UserError(f"{asker}: there is no W&B login here; run 'wandb login', or set WANDB_MODE=offline.")
