"""--push_to_hub: the login and the repository before the run, the upload of final/ after it."""

from __future__ import annotations

import shlex
from pathlib import Path

from huggingface_hub import auth_check, constants, create_repo, is_offline_mode, repo_info, upload_folder, whoami
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from llm_fp8.config.options import RunConfig
from llm_fp8.distributed.process_group import decided_by_main
from llm_fp8.utils.errors import FailedCheck, UserError

REPLACED = ("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "adapter_config.json")
"""Files of an earlier upload. Those that the new one does not overwrite are deleted: loaders would take them first."""


def prepare_hub_repo(run: RunConfig) -> str | None:
    """The repository of --push_to_hub, created where it was missing; None without the option. Collective.

    Raises `UserError` on every rank where the main rank cannot write to it.
    """
    return decided_by_main(lambda: _writable_repo(run)) if run.push_to_hub else None


def _writable_repo(run: RunConfig) -> str:
    """OWNER/NAME of the repository. That it exists does not say that this login may write to it."""
    if is_offline_mode():
        raise UserError(
            "--push_to_hub needs the Hugging Face hub, and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set in the "
            "environment; unset it, or drop --push_to_hub and upload final/ later with 'hf upload'."
        )
    name = run.hub_model_id or Path(str(run.output_dir)).resolve().name
    asked = f"--hub_model_id {name}" if run.hub_model_id else f"--push_to_hub to {name}, the output folder's name"
    try:
        whoami()
        repo = create_repo(name, private=run.hub_private, exist_ok=True).repo_id
        auth_check(repo, write=True)
        is_public = run.hub_private and not repo_info(repo).private
    except LocalTokenNotFoundError as error:
        raise UserError(
            "--push_to_hub: there is no Hugging Face login on this machine; run 'hf auth login', or set HF_TOKEN in "
            "the environment."
        ) from error
    except Exception as error:  # of the HTTP library too, which has no base class of its own here
        raise UserError(f"{asked}: {_refusal(error)}.") from error
    if is_public:
        raise UserError(
            f"--hub_private: {repo} exists and is public; make it private in its settings, or choose another "
            "--hub_model_id."
        )
    return repo


def _refusal(error: Exception) -> str:
    """Why the hub did not take the repository, and what to do."""
    said = _first_line(error)
    if isinstance(error, ValueError) and not isinstance(error, HfHubHTTPError):
        return f"this is no name of a repository ({said}); give --hub_model_id OWNER/NAME"
    if not isinstance(error, HfHubHTTPError):
        return f"the hub at {constants.ENDPOINT} was not reached ({said}); check the network, or drop --push_to_hub"
    if error.response.status_code == 401:
        return f"the hub does not accept this machine's token ({said}); run 'hf auth login', or set another HF_TOKEN"
    return (
        f"this login cannot write there ({said}); use a token that may write and a repository of its owner, or another "
        "--hub_model_id"
    )


def upload_final(final: Path, repo: str) -> None:
    """Upload the folder `final`; `FailedCheck` where that fails, since whoever asked for the upload relies on it."""
    print(f"uploading {final} to {constants.ENDPOINT}/{repo}", flush=True)
    try:
        done = upload_folder(
            repo_id=repo,
            folder_path=final,
            commit_message="Trained with the llm-fp8 scripts",
            delete_patterns=list(REPLACED),
        )
    except Exception as error:  # of HTTP, the disk, the storage's client: nothing of the run may be lost by any
        command = shlex.join(["hf", "upload", repo, str(final), "."])
        raise FailedCheck(
            f"the run is finished and {final} is complete, but the upload to {repo} failed ({_first_line(error)}). "
            f"Upload it with: {command}"
        ) from error
    print(f"uploaded: {done.commit_url}", flush=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
