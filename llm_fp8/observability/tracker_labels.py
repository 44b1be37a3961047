"""What trackers get to tell runs apart (flat values of run.json, some as tags), and whether W&B can be used here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import package_version

WANDB_TAG_LENGTH = 64
"""Characters that W&B allows in a tag."""

LABELS: dict[str, str] = {
    "precision_name": "Precision in effect: 'bf16', 'fp8 delayed', ...",
    "precision_requested": "Precision asked for: 'bf16', 'fp8 default', ...",
    "model_short_name": "Last part of --model_name.",
    "sharding_mode": "Sharding mode in effect; 'single' for one process.",
    "gpu_name": "Name of the first GPU; 'CPU' without one.",
    "num_processes": "Training processes: one per GPU.",
    "optimizer_name": "Optimizer in effect.",
    "num_parameters": "Parameters of the model.",
    "tokens_per_step": "Sequences of a step times --max_seq_length, on all GPUs.",
    "git_commit": "Commit of this project; None without git.",
    "torch_version": "Version of PyTorch.",
    "transformer_engine_version": "Version of Transformer Engine; None where it is not installed.",
}
"""Every label and its meaning. A key keeps its meaning for good."""


def run_labels(record: dict[str, Any]) -> dict[str, Any]:
    """The `LABELS` of a run, from its run.json."""
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


def run_tags(labels: dict[str, Any]) -> list[str]:
    """The tags of a run, each once and within W&B's length: some labels, then those of WANDB_TAGS."""
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


def require_run_id(where: str, run_id: str | None) -> None:
    """Raise `UserError`, beginning with `where`, for what W&B does not take as the id of a run."""
    if run_id is None or (re.fullmatch(r"[^:;,#?/'\\\x00-\x1f]{1,64}", run_id) and run_id == run_id.strip()):
        return
    raise UserError(
        f"{where} '{run_id:.60}' is no id of a W&B run, which has 1 to 64 characters, none of them in :;,#?/'\\, and "
        "no space at an end."
    )


def wandb_login_state(asker: str) -> Literal["online", "offline", "logged_out"]:
    """How a W&B run of this process would go, without the network; offline (or disabled) by WANDB_MODE.

    Raises `UserError`, which names the flag or script `asker`, where W&B is not installed, a WANDB_ variable holds what
    W&B does not know, or its stored login is malformed. W&B itself tries the key when it is used.
    """
    # By metadata: a folder wandb in the working directory would import as an empty package.
    if package_version("wandb") is None:
        raise UserError(
            f"{asker} needs the wandb package, which is not installed: run 'pip install wandb', or leave {asker} out."
        )
    require_run_id(f"{asker}: WANDB_RUN_ID", os.environ.get("WANDB_RUN_ID"))
    import wandb

    # Silent: to greet a login by name W&B asks the server, and hangs without a network. The run sets up its own.
    try:
        settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    except ValueError as error:  # pydantic's, of a variable that W&B reads
        raise UserError(
            f"{asker}: W&B refuses a setting, see the WANDB_ variables of the environment: {error}"
        ) from error
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
