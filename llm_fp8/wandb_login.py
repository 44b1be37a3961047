"""Whether W&B can be used on this machine, found out without asking anybody and without the network."""

from __future__ import annotations

from typing import Literal

from llm_fp8.errors import UserError
from llm_fp8.provenance import package_version


def wandb_login_state(asker: str) -> Literal["online", "offline", "logged_out"]:
    """How a W&B run or request of this process would go: with a login, offline (or disabled) by WANDB_MODE, or not at all.

    Raises `UserError` where W&B is not installed or its stored login cannot be one; `asker` is the flag or script that needs W&B. The
    key itself is tried by W&B, when it is used.
    """
    # By metadata, not by import: a folder named wandb in the working directory would import as an empty package.
    if package_version("wandb") is None:
        raise UserError(
            f"{asker} needs the wandb package, which is not installed: run 'pip install wandb', or leave {asker} out."
        )
    import wandb

    # Silent, because a login that is greeted by name asks the server for it, and hangs where there is no network; the run's own start
    # speaks again, in a set-up of its own.
    settings = wandb.setup(settings=wandb.Settings(silent=True)).settings
    try:
        if settings.mode in ("offline", "dryrun", "disabled"):
            return "offline"
        return "online" if wandb.login(prompt=False, verify=False) else "logged_out"
    except wandb.errors.AuthenticationError as error:
        raise UserError(f"{asker}: the stored W&B login is not usable ({error}); run 'wandb login --relogin'.") from error
    finally:
        wandb.teardown()
