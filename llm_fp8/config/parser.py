"""Parse the command line and the `--config` file into a `Config`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from llm_fp8.config.options import AUTO_BATCH_SIZE, EMBEDDED, MOST_USED, SECTIONS, Config, ParallelConfig, names_in
from llm_fp8.config.recipes import DEFAULT, DEFAULTS, RECIPES, recipe_names
from llm_fp8.config.validation import check_options
from llm_fp8.utils.errors import OneSentenceParser, UserError, number, positive, reading
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.ranks import LaunchRanks

OTHER_NAMES = Path(__file__).with_name("other_names.yaml")  # other trainers' options: advice -> names
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
UNIONS = (UnionType, Union)  # origins of `int | None` and of `Literal["a"] | None`


class _ShortHelp(argparse.HelpFormatter):
    """Format the help of the most used options only."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest in (*MOST_USED, "help", "help_all", "config"):
            super().add_argument(action)


class _HelpAll(argparse.Action):
    """Print the help of every option and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.formatter_class, parser.epilog = argparse.HelpFormatter, None
        parser.print_help()
        parser.exit()


def number_or_auto(word: str) -> int:
    """Parse the value of --batch_size: an integer of at least 1, or 'auto'."""
    return AUTO_BATCH_SIZE if word == "auto" else positive(word)


def whole_number_or_epoch(word: str) -> int | str:
    """Parse the value of --save_every or --eval_every: a number of steps, or 'epoch'."""
    return word if word == "epoch" else number(int, at_least=0)(word)


def number_or_share_or_auto(word: str) -> float | str:
    """Parse the value of --gradient_checkpointing: n (every n-th layer), a fraction of layers, a boolean or 'auto'."""
    with contextlib.suppress(ValueError):
        return int(true_or_false(word))
    return word if word == "auto" else int(word) if word.isdecimal() else number(float, at_least=0, at_most=1)(word)


def true_or_false(word: str) -> bool:
    """Parse a boolean: 1, 0, or one of YAML's spellings, for example yes or off."""
    return ("no", "off", "false", "0", "yes", "on", "true", "1").index(word.lower()) > 3


def true_or_false_or_auto(word: str) -> bool | None:
    """Parse a boolean or 'auto'. For 'auto' return None, which lets the run decide."""
    return None if word == "auto" else true_or_false(word)


def json_object(word: str) -> dict[str, Any]:
    """Parse a JSON object, as in '{"num_cycles": 2}'."""
    return {} | json.loads(word)


def with_underscores(word: str) -> str:
    """Replace the hyphens in the name of a command-line option by underscores, but not those in its value."""
    name, sign, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{sign}{value}" if name.startswith("--") else word


def add_option(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any) -> None:
    """Add the option of a `field` of type `hint` to the parser's `group`. A boolean also gets --name and --no_name."""
    kind = next(each for each in get_args(hint) if each is not NoneType) if get_origin(hint) in UNIONS else hint
    text, bounds = field.metadata["help"], field.metadata["bounds"]
    if field.default is not None and "(default:" not in text:
        text += f" (default: {field.default})"
    value: dict[str, Any] = {"type": number(kind, **bounds) if bounds else kind}
    if get_origin(kind) is Literal:
        value = {"choices": get_args(kind)}
    elif get_origin(kind) is dict:
        value = {"type": json_object}
    elif kind is bool:
        value = {"type": true_or_false_or_auto if NoneType in get_args(hint) else true_or_false}
        value |= {"nargs": "?", "const": True}
    elif kind is str:
        value = {"type": os.path.expanduser}  # the shell does not expand `~` in a YAML file or after `=`
    # Without defaults, the parsed options are exactly those that were typed.
    place: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
    group.add_argument(f"--{field.name}", *field.metadata["aliases"], help=text, **value, **place)
    if kind is bool and field.default is not False:
        group.add_argument(f"--no_{field.name}", action="store_false", help=f"Turn --{field.name} off.", **place)


class OptionsParser(OneSentenceParser):
    """Parser of the options of train_fp8.py or, if `parallel`, of train_multi_gpu.py, which adds `ParallelConfig`."""

    full_help = "--help_all"

    def __init__(self, parallel: bool = False, **kwargs: Any) -> None:
        usage = "%(prog)s [--option value ...]"
        super().__init__(usage=usage, formatter_class=_ShortHelp, allow_abbrev=False, **kwargs)
        for section in (each for each in SECTIONS.values() if parallel or each is not ParallelConfig):
            group = self.add_argument_group(str(section.__doc__).rstrip("."))
            hints = get_type_hints(section)
            for each in dataclasses.fields(section):
                add_option(group, each, hints[each.name])
        others = (f"--{action.dest}" for action in self._actions if action.dest not in (*MOST_USED, "help"))
        self.epilog = f"Further options, which --help_all explains: {', '.join(dict.fromkeys(others))}"
        self.add_argument("--help_all", nargs=0, action=_HelpAll, help="Explain every option and exit.")
        self.add_argument("--config", help="YAML file of 'option: value' lines; the command line wins (default: none).")
        actions = {action.dest: action for action in reversed(self._actions)}
        actions["mixed_precision"].type = lambda word: "no" if word.lower() in ("fp32", "no", "off", "false") else word
        actions["batch_size"].type = number_or_auto
        actions["save_every"].type = actions["eval_every"].type = whole_number_or_epoch
        actions["gradient_checkpointing"].type = number_or_share_or_auto
        actions["gradient_checkpointing"].nargs, actions["gradient_checkpointing"].const = "?", 1  # the flag alone
        actions["fp8_scenario"].choices = (DEFAULT, *recipe_names())
        rows = "; ".join(f"{name} ({recipe.backend}): {recipe.summary}" for name, recipe in RECIPES.items())
        default = " or ".join(f"{recipe} ({backend})" for backend, recipe in DEFAULTS.items())
        actions["fp8_scenario"].help = f"FP8 recipe; 'default' is {default}. {rows}. {actions['fp8_scenario'].help}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but also accept hyphens in the names of options."""
        return super().parse_known_args([with_underscores(word) for word in args], namespace)

    def hint(self, option: str) -> str:
        name = option.lstrip("-").replace("-", "_")
        for advice, names in yaml.safe_load(OTHER_NAMES.read_text()).items():
            if name in names.split():
                return str(advice)
        if name in {each.name for each in dataclasses.fields(ParallelConfig)}:
            return "train_multi_gpu.py has the sharding options"
        return super().hint(f"--{name}")


def to_argv(options: Mapping[str, Any]) -> list[str]:
    """Convert options to command-line arguments, to parse and check them like typed ones. Omit those that are None."""
    return [f"--{name}={_word(value)}" for name, value in options.items() if value is not None]


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_word, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _loader(*kinds: str) -> type[yaml.SafeLoader]:
    """Return a YAML loader that converts values of these `kinds`, for example bool, and reads all others as text."""
    rows = yaml.SafeLoader.yaml_implicit_resolvers.items()
    resolvers = {first: [(tag, form) for tag, form in row if tag.split(":")[-1] in kinds] for first, row in rows}
    return type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})


_TEXTS, _JSON = _loader("null", "merge"), _loader("null", "merge", "bool")
for _kind, _digits in {"int": r"-?(0|[1-9]\d*)$", "float": r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?$"}.items():
    _JSON.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_digits), list("-0123456789"))


def parse_config(argv: list[str], prog: str = "train_fp8.py", parallel: bool = False) -> Config:
    """Parse and check `argv`; `parallel` is as in `OptionsParser`. Raise `UserError` if an option is invalid."""
    config, _ = _read(argv, OptionsParser(parallel, prog=prog))
    check_options(config)
    return config


def parse_launch(
    argv: list[str], environ: MutableMapping[str, str], description: str | None = None, parallel: bool = False
) -> Config:
    """Parse `argv` like `parse_config` and apply `accelerate launch`'s settings. Remove from `environ` what it and an
    earlier torchrun set. Raise `UserError` if train_fp8.py has several ranks or train_multi_gpu.py has no launcher.
    """
    parser = OptionsParser(parallel, description=description)
    typed, names = _read(argv, parser)
    is_launched, ranks = environ.keys() >= {*TORCHRUN_VARIABLES}, LaunchRanks.from_environment(environ)
    if parallel and not is_launched:
        raise UserError("train_multi_gpu.py needs a launcher: torchrun --nproc_per_node=GPUS train_multi_gpu.py ...")
    for name in () if is_launched else TORCHRUN_VARIABLES:
        environ.pop(name, None)
    config = typed
    if any(name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) for name in environ):
        from llm_fp8.config.accelerate_env import LAUNCH_FILE, apply_launch_settings

        config = apply_launch_settings(typed, environ, names)
        parser.origin = f"{LAUNCH_FILE}: "
        changed = {name: value for name, value in config.options.items() if value != typed.options[name]}
        parser.parse_args(to_argv(changed))
    if not parallel and (ranks.world_size > 1 or config.parallel.sharding_mode != "auto"):
        raise UserError("train_fp8.py runs one process; use train_multi_gpu.py, or unset WORLD_SIZE, ACCELERATE_USE_*.")
    check_options(config)
    return config


def is_adapter_folder(folder: str | Path) -> bool:
    """Return True if `folder` contains a PEFT adapter and no model."""
    return os.path.isfile(f"{folder}/adapter_config.json") and not os.path.isfile(f"{folder}/config.json")


def adapter_argv(folder: str) -> list[str]:
    """Return the arguments that the PEFT adapter in `folder` determines, or [] without an adapter."""
    if not is_adapter_folder(folder):
        return []
    names = {"r": "lora_rank", "target_modules": "lora_targets"}
    with reading("--model_name", folder, "adapter_config.json", "Give an adapter of LoRA."):
        entries = read_json(Path(folder) / "adapter_config.json")
        return to_argv({names.get(key, key): entries[key] for key in (*names, "lora_alpha", "lora_dropout")})


def _read(argv: list[str], parser: OptionsParser) -> tuple[Config, frozenset[str]]:
    """Parse `argv` and --config's file, but check no combinations. Return also the names of the options in them."""
    path = parser.parse_known_args(argv)[0].config
    file_argv, names = list[str](), list[str]()
    if path:
        with reading("--config", path, "YAML", "Give a file of 'option: value' lines."):
            content = Path(path).expanduser().read_bytes()
            # Options are read as text, for argparse to convert. Values inside an object get JSON's types.
            texts, typed = (yaml.load(content, loader) or {} for loader in (_TEXTS, _JSON))
            file_argv = to_argv(texts | {name: each for name, each in typed.items() if isinstance(each, dict)})
            names = [name.value for name, _ in getattr(yaml.compose(content), "value", [])]
    parser.origin = f"--config {path}: "
    flags = parser._option_string_actions
    if unknown := [f"--{name}" for name in names if with_underscores(f"--{name}") not in flags]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # before their values are read
    names = [getattr(flags.get(with_underscores(f"--{name}")), "dest", name) for name in names]
    if twice := [name for name in names if names.count(name) > 1]:
        parser.error(f"it sets '{twice[0]}' twice; remove one")
    if parser.parse_args(file_argv).config is not None:  # parsed alone, so that an error names the file
        parser.error("it names another --config, which is not read; remove it")
    parser.origin = ""
    options = vars(parser.parse_args([*file_argv, *argv]))
    adapter = vars(parser.parse_args(adapter_argv(options.get("model_name", EMBEDDED))))
    for name in options.keys() & adapter.keys() - {"config", "lora_dropout"}:
        if {*names_in(str(options[name]))} != {*names_in(str(adapter[name]))}:
            raise UserError(f"--{name} {options[name]}: the adapter in --model_name has {adapter[name]}; drop it.")
    options = {**adapter, **options}
    config = Config().with_options(**options)
    if "learning_rate" not in options:
        config = config.with_options(learning_rate=config.default_learning_rate)
    return config, frozenset(options)
