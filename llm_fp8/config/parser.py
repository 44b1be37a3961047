"""The command line and the `--config` file: from words to a `Config`."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import MutableMapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml

from llm_fp8.config.accelerate_env import apply_launch_settings, require_launched, require_single_process
from llm_fp8.config.options import (
    AUTO_BATCH_SIZE,
    EMBEDDED,
    LORA_LEARNING_RATE,
    MOST_USED,
    OTHER_MEANING,
    SCRATCH_LEARNING_RATE,
    SECTIONS,
    Config,
    ParallelConfig,
)
from llm_fp8.config.recipes import DEFAULT, describe_recipes, recipe_names
from llm_fp8.config.validation import check_options
from llm_fp8.utils.errors import OneSentenceParser, UserError, reading

PLACES = ("model_name", "output_dir", "resume_from", "deepspeed_config")
"""Options that can be a path, in which `~` is the home folder also where no shell replaced it."""
EXPLAINED = (*MOST_USED, "help", "help_all", "config")
"""What --help explains; --help-all explains all."""


class _FullHelp(argparse.HelpFormatter):
    """Help that ends with the default, unless the text itself says it, as it must where the default is None."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, argparse.SUPPRESS) or "(default:" in text:
            return text
        return f"{text} (default: {action.default})"


class _ShortHelp(_FullHelp):
    """Help of the most used options alone."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest in EXPLAINED:
            super().add_argument(action)


class _HelpAll(argparse.Action):
    """Print the help of every option and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *words: object) -> NoReturn:
        parser.formatter_class, parser.epilog = _FullHelp, None
        parser.print_help()
        parser.exit()


def number_or_auto(word: str) -> int:
    """The type of --batch_size: a number of at least 1, or 'auto'."""
    if word != "auto" and int(word) < 1:
        raise UserError(f"--batch_size must be at least 1, or auto, not {word}.")
    return AUTO_BATCH_SIZE if word == "auto" else int(word)


def _truth(word: str) -> bool:
    """The boolean that a word stands for."""
    if word.lower() not in ("yes", "true", "1", "no", "false", "0"):
        raise argparse.ArgumentTypeError(f"'{word}' is neither true nor false")
    return word.lower() in ("yes", "true", "1")


def _number_or_truth(word: str, on: int) -> int:
    """The number that a word stands for: itself, `on` for true, or 0 for false."""
    return int(word) if word.isdecimal() else on * _truth(word)


def _with_underscores(word: str) -> str:
    """The word with underscores in an option's name."""
    name, sign, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{sign}{value}" if name.startswith("--") else word


def _add_option(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any) -> None:
    """`--name value` and its alias. A boolean can be a bare flag, and has `--no_name` unless it is off anyway."""
    name = field.name
    kind = next(each for each in get_args(hint) if each is not NoneType) if NoneType in get_args(hint) else hint
    names = (f"--{name}", *field.metadata["aliases"])
    given: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
    if get_origin(kind) is Literal:
        group.add_argument(*names, **given, choices=get_args(kind))
    elif (bare := field.metadata["bare"]) is not None:
        group.add_argument(*names, **given, type=lambda word: _number_or_truth(word, bare), nargs="?", const=bare)
    elif kind is not bool:
        group.add_argument(*names, **given, type=kind)
    else:
        group.add_argument(*names, **given, type=_truth, nargs="?", const=True)
        if field.default is not False:
            given = {"default": argparse.SUPPRESS, "help": f"Turn --{name} off."}
            group.add_argument(f"--no_{name}", dest=name, action="store_false", **given)


class _Parser(OneSentenceParser):
    """Takes an option for each field of the sections; those of `ParallelConfig` for several GPUs alone."""

    full_help = "--help-all"

    def __init__(self, parallel: bool, **kwargs: Any) -> None:
        usage = "%(prog)s [--option value ...]"
        super().__init__(usage=usage, formatter_class=_ShortHelp, allow_abbrev=False, **kwargs)
        self.sections = {name: each for name, each in SECTIONS.items() if parallel or each is not ParallelConfig}
        self.fields = [each for section in self.sections.values() for each in dataclasses.fields(section)]
        for section in self.sections.values():
            group = self.add_argument_group(str(section.__doc__).rstrip("."))
            hints = get_type_hints(section)
            for each in dataclasses.fields(section):
                _add_option(group, each, hints[each.name])
        self.add_argument("--help_all", nargs=0, action=_HelpAll, help="Explain every option and exit.")
        self.add_argument("--config", help="YAML file of 'option: value' lines; the command line wins (default: none).")
        for action in self._actions:
            if action.dest == "mixed_precision":
                action.type = lambda word: {"fp32": "no", "False": "no"}.get(word, word)  # YAML reads no as False
            if action.dest == "batch_size":
                action.type = number_or_auto
            if action.dest == "fp8_scenario":
                action.choices = (DEFAULT, *recipe_names())
                action.help = f"{describe_recipes()} {action.help}"
        others = ", ".join(f"--{each.name}" for each in self.fields if each.name not in EXPLAINED)
        self.epilog = f"Further options, which --help-all explains: {others}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, with hyphens in the names of options too."""
        return super().parse_known_args([_with_underscores(word) for word in args], namespace)

    def hint(self, option: str) -> str:
        name = option[2:].replace("-", "_")
        if name in OTHER_MEANING:
            return f" ({option}: {OTHER_MEANING[name]})"
        if name in {each.name for each in dataclasses.fields(ParallelConfig)}:
            return " (options of sharding belong to train_multi_gpu.py)"
        return super().hint(option)


def _yaml_arguments(path: str) -> list[str]:
    """The entries of a YAML file as command-line words, so that they are parsed and checked like typed ones."""
    with reading("--config", path, "YAML", "Give a file of 'option: value' lines."):
        entries = yaml.safe_load(Path(path).expanduser().read_bytes()) or {}
        pairs = [(str(key).replace("-", "_"), value) for key, value in entries.items()]
    for name, value in pairs:
        if isinstance(value, (list, dict)):
            raise UserError(f"--config {path}: '{name}' must have one value, not a {type(value).__name__}.")
    return [f"--{name}={value}" for name, value in pairs if value is not None]


def build_parser(prog: str | None = None, description: str | None = None, parallel: bool = False) -> _Parser:
    """The command-line parser of train_fp8.py, or with `parallel` that of train_multi_gpu.py."""
    return _Parser(parallel, prog=prog, description=description)


def parse_config(argv: list[str], prog: str | None = None, parallel: bool = False) -> Config:
    """Parse a command line (without the program's name) into a `Config`; `parallel` adds the options of
    `ParallelConfig`. `UserError` as `check_options`; argparse exits with code 2 on unknown options and choices.
    """
    config, _ = _read(argv, build_parser(prog, parallel=parallel))
    check_options(config)
    return config


def parse_launch(
    argv: list[str], environ: MutableMapping[str, str], description: str | None = None, parallel: bool = False
) -> tuple[Config, list[str]]:
    """As `parse_config`, with what the launcher asked for, whose variables are removed from `environ`; and a sentence
    for each entry of the launcher's file that has no effect here.
    """
    config, given = _read(argv, build_parser(description=description, parallel=parallel))
    (require_launched if parallel else require_single_process)(environ)
    config, idle = apply_launch_settings(config, environ, given)
    check_options(config)
    return config, idle


def _read(argv: list[str], parser: _Parser) -> tuple[Config, frozenset[str]]:
    """The options, unchecked, and the names of those that were given."""
    path = parser.parse_known_args(argv)[0].config
    words = _yaml_arguments(path) if path else []
    parser.origin = f"--config {path}: "
    parser.parse_args(words)  # alone, so that an error names the file
    parser.origin = ""
    names = [each.name for each in parser.fields]
    parser.set_defaults(**dict.fromkeys(names))  # to tell "not given" from the defaults
    values = vars(parser.parse_args([*words, *argv]))
    given = {name: values[name] for name in names if values[name] is not None}
    given |= {name: os.path.expanduser(given[name]) for name in PLACES if name in given}
    named = frozenset(given)
    if "learning_rate" not in named:
        if given.get("random_init") or given.get("model_name", EMBEDDED) == EMBEDDED:
            given["learning_rate"] = SCRATCH_LEARNING_RATE
        elif given.get("lora_rank"):
            given["learning_rate"] = LORA_LEARNING_RATE
    sections = {
        name: section(**{f.name: given[f.name] for f in dataclasses.fields(section) if f.name in given})
        for name, section in parser.sections.items()
    }
    return Config(**sections), named
