"""The options that the documents name, against the parsers of the programs that they are said of; no program runs."""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from llm_fp8.__main__ import PROGRAMS
from llm_fp8.config.parser import build_parser, parse_config

ROOT = Path(__file__).resolve().parents[2]
HANDS_ON = ("llm_fp8.tools.diagnose.cli", "llm_fp8.tools.compare.cli", "scripts.diagnose_fp8")
"""Programs that take options of the training scripts too; `scripts.compare_performance` has them in one word."""
_PROGRAM = re.compile(
    r"(?:\./)?(?P<path>(?:(?:scripts|benchmarks|examples)/\w+|train_fp8|train_multi_gpu)\.(?:py|sh|sbatch))\b"
    rf"|(?:llm-fp8|-m llm_fp8) (?P<command>{'|'.join(PROGRAMS)})\b|-m (?P<module>(?:tests|benchmarks)\.[\w.]+)"
)
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*\*?")
_LAUNCHERS = {"torchrun": get_args_parser, "accelerate launch": launch_command_parser}


class _Called(BaseException):
    """A parser was called; its `args` are the parser and the words."""


def _dotted(program: re.Match[str]) -> str:
    """What to import of a program; of a shell script its path."""
    if program["command"]:
        return PROGRAMS[program["command"]][0]
    path = program["path"] or program["module"]
    return path.removesuffix(".py").replace("/", ".") if path.endswith(".py") else path


def _own_parser(program: str, words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser that the main function of a program calls, and what it hands to it."""
    if program in ("train_fp8", "train_multi_gpu"):
        return build_parser(parallel=program == "train_multi_gpu"), words

    def called(parser, args=None, namespace=None):
        raise _Called(parser, list(sys.argv[1:] if args is None else args))

    module = importlib.import_module(program)
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", called),
        mock.patch.object(sys, "argv", [program, *words]),
    ):
        try:
            module.main()
        except _Called as found:
            return found.args
    raise AssertionError(f"{program} calls no parser")


def _names(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(name for action in parser._actions for name in action.option_strings)


@functools.cache
def training_options() -> frozenset[str]:
    return _names(build_parser(parallel=True))


@functools.cache
def options_of_program(program: str) -> frozenset[str]:
    """Those that it takes, `--help` included."""
    if program.endswith((".sh", ".sbatch")):
        return frozenset(_OPTION.findall((ROOT / program).read_text())) | training_options()
    if program in ("train_fp8", "train_multi_gpu"):
        return training_options()
    own = _names(_own_parser(program, [])[0])
    return own | training_options() if program in (*HANDS_ON, "scripts.compare_performance") else own


def _launcher_options(text: str) -> frozenset[str]:
    return frozenset().union(*(_names(parser()) for name, parser in _LAUNCHERS.items() if name in text))


def _unknown(text: str, known: frozenset[str]) -> list[str]:
    """The options in `text` that are not known; one that ends in `*` stands for all that begin so."""
    return [
        name
        for name in _OPTION.findall(text)
        if not (name in known or name[-1] == "*" and any(other.startswith(name[:-1]) for other in known))
    ]


def without_code(text: str) -> str:
    """Without the blocks between fences."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def _lines_and_spans(section: str) -> list[str]:
    """The lines of its code blocks, without comments, and what stands between backticks in its prose."""
    blocks = re.findall(r"^ *```.*?^ *```$|^    [^\n]+$", section, re.M | re.S)
    lines = [re.sub(r"(^| )# .*", "", line) for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", without_code(section))


def wrong_options(text: str) -> list[str]:
    """The options in a document that the program of their command line does not have or, in prose, neither the
    training scripts nor a program or launcher that the section names.
    """
    wrong = []
    for section in re.split(r"^(?=## )", text.replace("\\\n", " "), flags=re.M):
        programs = {_dotted(found) for found in _PROGRAM.finditer(section)}
        known = training_options().union(_launcher_options(section), *map(options_of_program, programs))
        for words in _lines_and_spans(section):
            if program := _PROGRAM.search(words):
                wrong += _unknown(words[: program.start()], _launcher_options(words))
                wrong += _unknown(words[program.end() :], options_of_program(_dotted(program)))
            elif words.startswith(("--", *_LAUNCHERS)):
                wrong += _unknown(words, known)
    return wrong


def command_lines(text: str) -> list[str]:
    """Each whole line of the code blocks that starts a Python program other than the training scripts."""
    found = []
    for block in re.findall(r"^ *```bash$(.*?)^ *```$", text.replace("\\\n", " "), re.M | re.S):
        for line in block.splitlines():
            words = shlex.join(shlex.split(line, comments=True))
            program = _PROGRAM.search(words)
            if program and _dotted(program) not in ("train_fp8", "train_multi_gpu") and "..." not in words:
                found += [] if _dotted(program).endswith((".sh", ".sbatch")) else [words]
    return found


def parse_command(command: str) -> None:
    """Parse its words as the program would; a mistake ends in `SystemExit`."""
    program = _PROGRAM.search(command)
    assert program is not None, command
    parser, words = _own_parser(_dotted(program), shlex.split(command[program.end() :]))
    _, rest = parser.parse_known_args(words)
    if rest and _dotted(program) in HANDS_ON:
        parse_config(rest)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
