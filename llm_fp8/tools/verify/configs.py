"""Files that tell DeepSpeed or Accelerate how to train: which of their entries a run would refuse, and which do nothing
here.

Looked at are the files that --config_file names, and those that lie in configs/. The rules are the run's own: those of
llm_fp8/distributed/deepspeed_config.py, and for a file of `accelerate launch` the variables that the launcher makes of
it, read by llm_fp8/config/accelerate_env.py. "No effect" is said of this project's scripts: other programs may act on
such an entry. "Elsewhere" is said of one that these scripts take, and Accelerate's own path, transformers' Trainer
included, for something else. What a DeepSpeed file says of batch sizes, accumulation and clipping can be held against a
run's options alone, when it starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import REPOSITORY

FOLDER = REPOSITORY / "configs"

Kind = Literal["DeepSpeed", "Accelerate"]
_ACCELERATE_KEYS = {
    "compute_environment",
    "distributed_type",
    "fp8_config",
    "fsdp_config",
    "deepspeed_config",
    "machine_rank",
}
"""Any of which makes a YAML file one of `accelerate launch`."""
_VARIABLE_OF_SECTION = {"fsdp_config": "", "deepspeed_config": "ACCELERATE_DEEPSPEED_", "parallelism_config": ""}
"""Section -> what stands before its entries' names where the launcher makes variables of them."""


@dataclass(frozen=True)
class Finding:
    """An entry worth a word."""

    path: Path
    level: Literal["refused", "no effect", "elsewhere"]
    says: str
    """A sentence without its full stop, which names the entry."""


def kind_of(path: Path) -> Kind | None:
    """Whose file it is, by its ending and keys; None where it is neither's. Raises `UserError` where it cannot be
    read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config_file {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"--config_file {path} is neither JSON nor YAML: {' '.join(str(error).split())}.") from error
    if path.suffix == ".json":
        return "DeepSpeed"
    return "Accelerate" if isinstance(content, dict) and _ACCELERATE_KEYS & content.keys() else None


def required_kind(path: Path) -> Kind:
    """As `kind_of` for a file that --config_file names; `UserError` where it is neither's."""
    kind = kind_of(path)
    if kind is None:
        raise UserError(
            f"--config_file {path}: neither a DeepSpeed file (JSON) nor one of accelerate launch (YAML with "
            "distributed_type or the like)."
        )
    return kind


def deepspeed_findings(path: Path) -> Iterator[Finding]:
    """What a run in bf16 or fp8, of the stage that the file names, would refuse."""
    from llm_fp8.distributed.deepspeed_config import AUTO, file_problems, read_file, zero_section_problems

    try:
        settings = read_file(path)
    except UserError as error:
        yield Finding(path, "refused", str(error).rstrip("."))
        return
    section = settings["zero_optimization"]
    stage = section.get("stage", AUTO)
    if stage not in (AUTO, 1, 2, 3):
        yield Finding(
            path,
            "refused",
            f'"zero_optimization.stage": {json.dumps(stage)}: the deepspeed modes are stages 1, 2 and 3',
        )
        return
    mode = "deepspeed_1" if stage == AUTO else f"deepspeed_{stage}"
    problems = list(file_problems(settings, {}, mode, "bf16"))
    if importlib.util.find_spec("deepspeed") is not None:
        problems += zero_section_problems({key: value for key, value in section.items() if value != AUTO})
    for key, why in problems:
        yield Finding(path, "refused", f"{key}: {why}")


def launch_environment(path: Path) -> dict[str, str]:
    """The variables that `accelerate launch --config_file` sets for a script, made by its own code. Raises what that
    raises.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, setup_fp8_env

    arguments = launch_command_parser().parse_args(["--config_file", str(path), "train_multi_gpu.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    arguments.main_process_port = 0  # any free one: nothing is started
    arguments.deepspeed_fields_from_accelerate_config = ""  # for Accelerate's own checks
    # Whether fp8 could run here is asked by other checks; the launcher would refuse to answer without a GPU library.
    is_fp8, arguments.mixed_precision = arguments.mixed_precision == "fp8", arguments.mixed_precision or "no"
    if is_fp8:
        arguments.mixed_precision = "no"
    made = prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    if is_fp8:
        made = {**setup_fp8_env(arguments, made), "ACCELERATE_MIXED_PRECISION": "fp8"}
    ours = {name: value for name, value in made.items() if os.environ.get(name) != value}
    return {**ours, "WORLD_SIZE": str(arguments.num_processes)}


def accelerate_findings(path: Path) -> Iterator[Finding]:
    """What a run started with this file would refuse (the first entry), the entries that change nothing, and a
    backend that a Trainer takes for another.
    """
    from llm_fp8.config.accelerate_env import DROPPED, apply_launch_settings, backend_elsewhere, idle_keys
    from llm_fp8.config.options import Config

    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if content.get("fp8_config") and str(content.get("mixed_precision", "no")).lower() != "fp8":
        yield Finding(
            path, "no effect", f"fp8_config: mixed_precision is {content.get('mixed_precision', 'no')}, so no fp8 runs"
        )
    for section, prefix in _VARIABLE_OF_SECTION.items():
        for key in content.get(section) or {}:
            # Some entries have a longer name than their variable: zero3_init_flag, ACCELERATE_DEEPSPEED_ZERO3_INIT.
            if why := next((why for name, why in DROPPED.items() if f"{prefix}{key}".upper().startswith(name)), None):
                yield Finding(path, "no effect", f"{section}.{key}: {why}")
    said = io.StringIO()  # the launcher tells of defaults
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            environ = launch_environment(path)
    except (ValueError, TypeError, KeyError, OSError, SystemExit) as error:
        words = " ".join((str(error) or said.getvalue()).split())
        yield Finding(path, "refused", f"accelerate launch refuses it ({words})")
        return
    for key, why in idle_keys(environ).items():
        yield Finding(path, "no effect", f"fp8_config.{key}: {why}")
    if elsewhere := backend_elsewhere(environ):
        yield Finding(path, "elsewhere", elsewhere)
    try:
        config = apply_launch_settings(Config(), environ)
    except UserError as error:
        yield Finding(path, "refused", str(error).rstrip("."))
        return
    if config.parallel.deepspeed_config is not None:
        yield from deepspeed_findings(Path(config.parallel.deepspeed_config))


def findings(path: Path, kind: Kind) -> list[Finding]:
    """Those of a file of this kind."""
    return list(deepspeed_findings(path) if kind == "DeepSpeed" else accelerate_findings(path))


def judge(named: dict[Path, list[Finding]], lying_there: dict[Path, list[Finding]]) -> Result:
    """A file that was named must not be refused. One that only lies in configs/ may never be used: a warning, and
    for what does nothing or acts elsewhere a detail.
    """
    problems, details = Problems(), []
    for path, found in (named | lying_there).items():
        details.append(f"{path}: {'nothing to mend' if not found else f'{len(found)} to mend'}")
        for finding in found:
            sentence = f"{finding.path}: {finding.says} ({finding.level})"
            mend = f"${{EDITOR:-vi}} {shlex.quote(str(finding.path))}   # {finding.says}"
            if path in named and finding.level == "refused":
                problems.fail(sentence, mend)
            elif path in named or finding.level == "refused":
                problems.warn(sentence, mend)
            else:
                details.append(f"  {sentence}")
    facts = {
        str(path): [{"level": finding.level, "says": finding.says} for finding in found]
        for path, found in (named | lying_there).items()
    }
    all_right = (
        "" if problems.failures or problems.warnings else f"{len(facts)} files, none of which a run would refuse"
    )
    return problems.result(all_right, details, facts)


def check(setup: Setup) -> Result:
    """--config_file and configs/."""
    named = {path: findings(path, required_kind(path)) for path in setup.config_files}
    return judge(named, dict(_lying_in(FOLDER, named)))


def _lying_in(folder: Path, but: dict[Path, Any]) -> Iterator[tuple[Path, list[Finding]]]:
    taken = {path.resolve() for path in but}
    for path in sorted(folder.glob("*")):
        if path.suffix not in (".json", ".yaml", ".yml") or path.resolve() in taken:
            continue
        try:
            kind = kind_of(path)
        except UserError as error:
            yield path, [Finding(path, "refused", str(error).removeprefix(f"--config_file {path} ").rstrip("."))]
            continue
        if kind is not None:
            yield path, findings(path, kind)
