"""The documents mention only files, headings and options that exist, and commands that parse."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

from llm_fp8.__main__ import PROGRAMS
from llm_fp8.config.parser import OptionsParser, parse_config
from tests.support.documented_commands import README, config_of, training_commands

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
TRAINING = ("train_fp8", "train_multi_gpu")
ACCEPT_TRAINING_OPTIONS = ("llm_fp8.tools.diagnose.cli", "scripts.diagnose_fp8")
PROGRAM = re.compile(
    rf"((?:scripts|benchmarks|examples)/\w+|{'|'.join(TRAINING)})\.py|llm-fp8 ({'|'.join(PROGRAMS)})\b"
)
FOREIGN = {"--nproc_per_node", "--max_restarts", "--config_file", "--mixed_precision", "--no-build-isolation", "--gpus"}
"""Options of torchrun, accelerate, pip and docker that occur in documents."""


def without_code(text: str) -> str:
    """Return the text without its fenced code blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Return GitHub's anchors of a file's headings: lower case, without punctuation, and with hyphens for blanks."""
    headings = re.findall(r"^#{1,6} (.+)$", without_code(path.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_link_has_a_target(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not re.match(r"[a-z]+:", link):
            assert target.exists() and (not anchor or anchor in anchors(target)), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_named_file_exists(document):
    words = {word for code in re.findall(r"`([^`\n]+)`", document.read_text()) for word in code.split()}
    files = r"(scripts|benchmarks|examples|tests|llm_fp8|configs)/[\w/.-]+\.\w+"
    assert [word for word in sorted(words) if re.fullmatch(files, word) and not (ROOT / word).is_file()] == []


class _ParserCalled(BaseException):
    """An error that replaces parsing. The attribute `args` has the parser and the command line."""


def parser_of(program: str, argv: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser that the main function of a program uses, and the command line that the parser gets."""
    if program in TRAINING:
        return OptionsParser(parallel=program == "train_multi_gpu"), argv

    def raise_call(parser, args=None, namespace=None):
        raise _ParserCalled(parser, list(sys.argv[1:] if args is None else args))

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", raise_call),
        mock.patch.object(sys, "argv", [program, *argv]),
        pytest.raises(_ParserCalled) as call,
    ):
        importlib.import_module(program).main()
    return call.value.args


def module_of(program: re.Match[str]) -> str:
    """Return the module that runs a program. `program` is the match of a program's name in a documented command."""
    return PROGRAMS[program[2]][0] if program[2] else program[1].replace("/", ".")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_parses(document):
    for command in training_commands(document):
        config_of(command)
    for block in re.findall(r"^ *```bash$(.*?)^ *```$", document.read_text().replace("\\\n", " "), re.M | re.S):
        for line in block.splitlines():
            command = shlex.join(shlex.split(line, comments=True))
            program = PROGRAM.search(command)
            if program is None or module_of(program) in TRAINING or "..." in command:
                continue
            parser, argv = parser_of(module_of(program), shlex.split(command[program.end() :]))
            _, rest = parser.parse_known_args(argv)
            assert not rest or module_of(program) in ACCEPT_TRAINING_OPTIONS, command
            parse_config(rest)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_option_exists(document):
    text = document.read_text()
    programs = {*TRAINING, *map(module_of, PROGRAM.finditer(text)), *(module for module, _ in PROGRAMS.values())}
    programs.discard("train")
    known = set(FOREIGN)
    for program in programs:
        known |= {name for action in parser_of(program, [])[0]._actions for name in action.option_strings}
    scripts = "".join(path.read_text() for path in (ROOT / "scripts").glob("*.s*"))
    named = re.findall(r"(?<![\w-])--[a-z]\w+(?![\w*-])", text)
    assert [name for name in named if name not in known and name not in scripts] == []


def test_every_training_option_is_mentioned():
    text = "".join(document.read_text() for document in DOCUMENTS)
    names = {name for action in OptionsParser(parallel=True)._actions for name in action.option_strings[:1]}
    positive = {name.replace("--no_", "--") for name in names}
    assert sorted(name for name in positive if name not in text and name.replace("--", "--no_") not in text) == []
