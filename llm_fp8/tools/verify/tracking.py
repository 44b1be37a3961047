"""Whether --use_wandb would work: asked of what a run asks before it starts."""

from __future__ import annotations

from importlib import metadata

from llm_fp8.tools.verify.result import Result
from llm_fp8.tools.verify.setup import Setup


def judge(version: str | None, mode: str | None, error: str | None) -> Result:
    """`version` of wandb, `mode` of WANDB_MODE, and what the run's own check said. Runs do without W&B, so nothing
    fails here.
    """
    facts = {"version": version, "mode": mode, "error": error}
    if version is None:
        return Result("info", "wandb is not installed; runs do without it", facts=facts)
    if error is not None:
        return Result("warning", error, mends=("wandb login", "export WANDB_MODE=offline"), facts=facts)
    return Result(
        "passed", f"wandb {version}: {mode if mode not in (None, '', 'online') else 'logged in'}", facts=facts
    )


def check(setup: Setup) -> Result:
    """Login or offline mode. Talks to no server."""
    try:
        version: str | None = metadata.version("wandb")
    except metadata.PackageNotFoundError:
        version = None
    error = None
    if version is not None:
        from llm_fp8.observability.reporter import require_wandb_login
        from llm_fp8.utils.errors import UserError

        try:
            require_wandb_login("--use_wandb")
        except UserError as refused:
            error = str(refused)
    return judge(version, setup.environ.get("WANDB_MODE"), error)
