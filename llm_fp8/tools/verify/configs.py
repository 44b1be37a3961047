"""Files that configure DeepSpeed or Accelerate: which of their entries a run would refuse, and which have no effect.

Checked are the files that --config_file names, and those in configs/, by the run's own rules: for a DeepSpeed file
llm_fp8/distributed/deepspeed_config.py, for a file of `accelerate launch` the variables that the launcher makes of it,
read by llm_fp8/config/accelerate_env.py. "No effect" is meant of this project's scripts; "elsewhere" marks an entry
that these scripts take and transformers' Trainer takes for something else. What a DeepSpeed file says of batch sizes,
accumulation and clipping depends on a run's options, and is checked when it starts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from llm_fp8.tools.verify.result import Problems, Result, Setup
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import YAML_ERRORS, require_entries
from llm_fp8.utils.packages import SHIPPED

FOLDER = (SHIPPED / "configs").resolve()

Kind = Literal["DeepSpeed", "Accelerate"]
_ACCELERATE_KEYS = set(
    "compute_environment distributed_type fp8_config fsdp_config deepspeed_config machine_rank".split()
)
"""Any of these makes a YAML file one of `accelerate launch`."""
_VARIABLE_OF_SECTION = {"fsdp_config": "", "deepspeed_config": "ACCELERATE_DEEPSPEED_", "parallelism_config": ""}
"""Section -> prefix of the variables that the launcher makes of its entries."""


class Finding(NamedTuple):
    """An entry to report."""

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
    except YAML_ERRORS as error:
        raise UserError(f"--config_file {path} is neither JSON nor YAML: {' '.join(str(error).split())}.") from error
    if path.suffix == ".json":
        return "DeepSpeed"
    if not isinstance(content, dict) or not _ACCELERATE_KEYS & content.keys():
        return None
    require_entries(f"--config_file {path}", content, dict.fromkeys(_VARIABLE_OF_SECTION, dict | None))
    return "Accelerate"


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
    if isinstance(stage, bool) or stage not in (AUTO, 1, 2, 3):
        says = f'"zero_optimization.stage": {json.dumps(stage)}: the deepspeed modes are stages 1, 2 and 3'
        yield Finding(path, "refused", says)
        return
    problems = list(file_problems(settings, {}, f"deepspeed_{1 if stage == AUTO else stage}", "bf16"))
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
    # Other checks ask whether fp8 can run here; without a GPU library the launcher would refuse fp8.
    is_fp8, arguments.mixed_precision = arguments.mixed_precision == "fp8", arguments.mixed_precision or "no"
    if is_fp8:
        arguments.mixed_precision = "no"
    made = prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    if is_fp8:
        made = {**setup_fp8_env(arguments, made), "ACCELERATE_MIXED_PRECISION": "fp8"}
    ours = {name: value for name, value in made.items() if os.environ.get(name) != value}
    return {**ours, "WORLD_SIZE": str(arguments.num_processes)}


def accelerate_findings(path: Path) -> Iterator[Finding]:
    """The first entry that a run started with this file would refuse, the entries without effect, and a backend that a
    Trainer takes for another.
    """
    from llm_fp8.config.accelerate_env import DROPPED, apply_launch_settings, backend_elsewhere, idle_keys
    from llm_fp8.config.options import Config

    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    precision = content.get("mixed_precision", "no")
    if content.get("fp8_config") and str(precision).lower() != "fp8":
        yield Finding(path, "no effect", f"fp8_config: mixed_precision is {precision}, so no fp8 runs")
    for section, prefix in _VARIABLE_OF_SECTION.items():
        for key in content.get(section) or {}:
            # Some entries have a longer name than their variable: zero3_init_flag, ACCELERATE_DEEPSPEED_ZERO3_INIT.
            if why := next((why for name, why in DROPPED.items() if f"{prefix}{key}".upper().startswith(name)), None):
                yield Finding(path, "no effect", f"{section}.{key}: {why}")
    printed = io.StringIO()  # the launcher prints its defaults
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            environ = launch_environment(path)
    except (ValueError, TypeError, LookupError, AttributeError, OSError, SystemExit) as error:
        words = " ".join((str(error) or printed.getvalue()).split())
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
    return list(deepspeed_findings(path) if kind == "DeepSpeed" else accelerate_findings(path))


def judge(named: dict[Path, list[Finding]], in_folder: dict[Path, list[Finding]]) -> Result:
    """A file that --config_file names must not be refused. One in configs/ may never be used: what a run would refuse
    is a warning, and all else a detail.
    """
    problems, details = Problems(), []
    for path, found in (named | in_folder).items():
        details.append(f"{path}: {f'{len(found)} to fix' if found else 'nothing to fix'}")
        for finding in found:
            sentence = f"{finding.path}: {finding.says} ({finding.level})"
            fix = f"${{EDITOR:-vi}} {shlex.quote(str(finding.path))}   # {finding.says}"
            if path in named and finding.level == "refused":
                problems.fail(sentence, fix)
            elif path in named or finding.level == "refused":
                problems.warn(sentence, fix)
            else:
                details.append(f"  {sentence}")
    facts = {
        str(path): [{"level": finding.level, "says": finding.says} for finding in found]
        for path, found in (named | in_folder).items()
    }
    success = "" if problems.failures or problems.warnings else f"{len(facts)} files, none of which a run would refuse"
    return problems.result(success, details, facts)


def check_configs(setup: Setup) -> Result:
    named = {path: findings(path, required_kind(path)) for path in setup.config_files}
    return judge(named, findings_in(FOLDER, named))


def findings_in(folder: Path, but: Iterable[Path]) -> dict[Path, list[Finding]]:
    """Those of a folder's files, without `but` and without YAML files of another kind."""
    found, taken = {}, {path.resolve() for path in but}
    for path in sorted(folder.glob("*")):
        if path.suffix not in (".json", ".yaml", ".yml") or path.resolve() in taken:
            continue
        try:
            kind = kind_of(path)
        except UserError as error:
            says = str(error).removeprefix(f"--config_file {path} ").rstrip(".")
            found[path] = [Finding(path, "refused", says)]
            continue
        if kind is not None:
            found[path] = findings(path, kind)
    return found
