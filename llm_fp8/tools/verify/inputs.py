"""What a run reads and writes: the output folder, the W&B login, the embedded tokenizer and dataset."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from llm_fp8.tools.verify.result import Problems, Result, Setup
from llm_fp8.utils.errors import existing_part
from llm_fp8.utils.packages import package_version

LITTLE_GIB = 50.0
"""One checkpoint of an 8B model with its optimizer state is larger."""
TEXT = "If 3 apples cost 6 dollars, what do 7 cost? 7 * (6 / 3) = 14"
NUM_SEQUENCES = 64


def judge_output_folder(folder: Path, error: str | None, free_gib: float) -> Result:
    """Not writable fails; little free space is a warning."""
    facts = {"folder": str(folder), "error": error, "free_gib": free_gib}
    elsewhere = "python train_fp8.py --output_dir /path/with/room ..."
    if error is not None:
        quoted = shlex.quote(str(folder))
        fixes = (f"mkdir -p {quoted} && chmod u+rwx {quoted}", elsewhere)
        return Result("failed", f"{folder} cannot be written: {error}", fixes=fixes, facts=facts)
    summary = f"{folder} can be written, {free_gib:,.0f} GiB free"
    if free_gib < LITTLE_GIB:
        summary += ", less than one checkpoint of an 8B model"
        return Result("warning", summary, fixes=(elsewhere,), facts=facts)
    return Result("passed", summary, facts=facts)


def try_to_write(folder: Path) -> str | None:
    """Write, read back and remove a file in `folder`, which exists; the error, None where all went well."""
    if not folder.is_dir():
        return f"{folder} is a file"
    probe = folder / f".verify-fp8-{os.getpid()}"
    try:
        probe.write_bytes(b"fp8")
        content = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        return f"{error.strerror} ({folder})"
    return None if content == b"fp8" else f"{folder} gives back other bytes than were written"


def check_output_folder(setup: Setup) -> Result:
    """--output_dir, or the first folder above it that exists."""
    existing = existing_part(setup.output_dir.absolute())
    return judge_output_folder(setup.output_dir, try_to_write(existing), shutil.disk_usage(existing).free / 2**30)


def judge_tracking(version: str | None, mode: str | None, error: str | None) -> Result:
    """`version` of wandb, WANDB_MODE, and what the run's own check said. Runs do without W&B, so nothing fails here."""
    facts = {"version": version, "mode": mode, "error": error}
    if version is None:
        return Result("info", "wandb is not installed; runs do without it", facts=facts)
    if error is not None:
        return Result("warning", error, fixes=("wandb login", "export WANDB_MODE=offline"), facts=facts)
    state = "logged in" if mode in (None, "", "online") else mode
    return Result("passed", f"wandb {version}: {state}", facts=facts)


def check_tracking(setup: Setup) -> Result:
    """Login or offline mode. Talks to no server."""
    version, error = package_version("wandb"), None
    if version is not None:
        from llm_fp8.observability.reporter import require_wandb_login
        from llm_fp8.utils.errors import UserError

        try:
            require_wandb_login("--use_wandb")
        except UserError as refused:
            error = str(refused)
    return judge_tracking(version, setup.environ.get("WANDB_MODE"), error)


def judge_data(round_trip: str, real: float, supervised: float) -> Result:
    """`round_trip`: `TEXT` encoded and decoded. `real`, `supervised`: shares of the first batch's positions that are
    not padding and that carry loss.
    """
    problems = Problems()
    fix = "git checkout -- llm_fp8/data/embedded && rm -rf ~/.cache/huggingface/datasets/json"
    if round_trip != TEXT:
        problems.fail(f"the tokenizer gives back '{round_trip}' for '{TEXT}'", fix)
    if not 0 < supervised < real <= 1:
        problems.fail(
            f"the first batch is wrong: {real:.0%} of its positions are real, {supervised:.0%} supervised", fix
        )
    summary = f"{NUM_SEQUENCES} sequences tokenised and packed, {supervised:.0%} of the first batch carries loss"
    return problems.result(summary, facts={"round_trip": round_trip, "real": real, "supervised": supervised})


def check_data(setup: Setup) -> Result:
    """Tokenise and pack a few sequences with the run's own code; look at the first batch."""
    from llm_fp8.config.options import Config, DataConfig
    from llm_fp8.data import prepare_data
    from llm_fp8.models.source import load_tokenizer, resolve_source

    options = DataConfig(num_of_samples=NUM_SEQUENCES, max_seq_length=512, batch_size=2, packing=True)
    config = Config(data=options)
    tokenizer, _ = load_tokenizer(config.model, resolve_source(config.model))
    round_trip = tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False))
    data: Any = prepare_data(config, tokenizer)
    batch = next(iter(data.train))[0]
    return judge_data(
        str(round_trip), batch.num_real_tokens / batch.num_tokens, batch.num_supervised_tokens / batch.num_tokens
    )
