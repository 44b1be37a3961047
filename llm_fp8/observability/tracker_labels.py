"""What tells runs apart when they are compared: a few flat values taken from a run's record (run.json).

Trackers get them as top-level configuration, where tables and charts can filter and group by them; some are tags too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from llm_fp8.config.options import WANDB_TAG_LENGTH
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import package_version

LABELS: dict[str, str] = {
    "precision_name": "Precision in effect: 'bf16', 'fp8 delayed', ...",
    "precision_requested": "Precision asked for: 'bf16', 'fp8 default', ...",
    "model_short_name": "Last part of --model_name.",
    "sharding_mode": "Sharding mode in effect; 'single' for one process.",
    "gpu_name": "Name of the first GPU; 'CPU' without one.",
    "num_processes": "Training processes: one per GPU.",
    "optimizer_name": "Optimizer in effect.",
    "num_parameters": "Parameters of the model.",
    "tokens_per_step": "Positions of an optimizer step, padding included, on all GPUs.",
    "git_commit": "Commit of this project; None without git.",
    "torch_version": "Version of PyTorch.",
    "transformer_engine_version": "Version of Transformer Engine; None where it is not installed.",
}
"""Every label and its meaning. A key keeps its meaning for good."""

TAG_LABELS = ("precision_name", "model_short_name", "sharding_mode", "gpu_name")
"""The labels that are tags too."""


def run_labels(record: dict[str, Any]) -> dict[str, Any]:
    """The `LABELS` of a run, from the record that its run.json is made of."""
    precision, effective, provenance = record["precision"], record["effective"], record["provenance"]
    gpus, git = provenance["gpus"], provenance["git"]
    return {
        "precision_name": _in_words(precision["effective"], precision["effective_scenario"]),
        "precision_requested": _in_words(precision["requested"], precision["requested_scenario"]),
        "model_short_name": Path(record["config"]["model"]["model_name"]).name,
        "sharding_mode": effective["sharding_mode"],
        "gpu_name": gpus[0]["name"] if gpus else "CPU",
        "num_processes": effective["num_processes"],
        "optimizer_name": precision["optimizer"],
        "num_parameters": record["model"]["num_parameters"],
        "tokens_per_step": effective["tokens_per_step"],
        "git_commit": git["commit"] if git else None,
        "torch_version": provenance["packages"]["torch"],
        "transformer_engine_version": provenance["packages"]["transformer-engine"],
    }


def _in_words(precision: str, scenario: str | None) -> str:
    return f"{precision} {scenario}" if precision == "fp8" else precision


def run_tags(labels: dict[str, Any], further: list[str]) -> list[str]:
    """The tags of a run, each once, none longer than W&B allows: the labels that are tags, then `further`."""
    own = [str(labels[name])[:WANDB_TAG_LENGTH] for name in TAG_LABELS]
    return list(dict.fromkeys([*own, *further]))


# --- wandb_login -----------------------------------------------------------------------------------------
# Whether W&B can be used on this machine, found out without asking anybody and without the network.


def wandb_login_state(asker: str) -> Literal["online", "offline", "logged_out"]:
    """How a W&B run or request of this process would go: with a login, offline (or disabled) by WANDB_MODE, or not at
    all.

    Raises `UserError` where W&B is not installed or its stored login cannot be one; `asker` is the flag or script that
    needs W&B. The key itself is tried by W&B, when it is used.
    """
    # By metadata, not by import: a folder named wandb in the working directory would import as an empty package.
    if package_version("wandb") is None:
        raise UserError(
            f"{asker} needs the wandb package, which is not installed: run 'pip install wandb', or leave {asker} out."
        )
    import wandb

    # Silent, because a login that is greeted by name asks the server for it, and hangs where there is no network; the
    # run's own start speaks again, in a set-up of its own.
    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    try:
        if settings.mode in ("offline", "dryrun", "disabled"):
            return "offline"
        return "online" if wandb.login(prompt=False, verify=False) else "logged_out"
    except wandb.errors.AuthenticationError as error:
        raise UserError(
            f"{asker}: the stored W&B login is not usable ({error}); run 'wandb login --relogin'."
        ) from error
    finally:
        wandb.teardown()
