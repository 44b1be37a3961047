"""What the documents point at is there: files, headings, results whose figures they give, and the options that they
name, in commands and in prose.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documented_commands import (
    ON_ONE_GPU,
    ON_TWO_GPUS,
    README,
    RUN,
    config_of,
    script_of,
    training_commands,
)
from tests.support.documented_options import command_lines, parse_command, without_code, wrong_options

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "LOG.md"]
SUFFIXES = {".py", ".sh", ".yaml", ".sbatch"}
"""Of what names documents, beside the files at the top."""
WRITTEN_BY_RUNS = {
    "adapter_config.json",
    "certificate.json",
    "comparison.json",
    "config.json",
    "exact_match.json",
    "run.json",
    "summary.json",
}
"""Files of a run's output, which no folder of the repository holds."""


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives the headings of a document: lower case, punctuation dropped, blanks as hyphens."""
    headings = re.findall(r"^#{1,6} (.+)$", without_code(path.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_link_leads_somewhere(document):
    assert broken_links(document) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    document = tmp_path / "a.md"
    document.write_text(
        "# A heading: one\n[here](#a-heading-one) [b](b.md) [c](#two) [web](https://x.org/b.md)\n```\n# two\n```\n"
    )
    assert broken_links(document) == ["b.md", "#two"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_result_and_program_that_is_named_is_there(document):
    words = {word for code in re.findall(r"`([^`\n]+)`", document.read_text()) for word in code.split()}
    programs = {
        word
        for word in words
        if re.fullmatch(r"(scripts|benchmarks|examples|tests|llm_fp8|configs)/[\w/.-]+\.\w+", word)
    }
    results = {word for word in words if re.fullmatch(r"\w+\.json", word)} - WRITTEN_BY_RUNS
    folders = ("benchmarks/results", "configs")
    assert [name for name in sorted(programs) if not (ROOT / name).is_file()] == []
    assert [name for name in sorted(results) if not any((ROOT / folder / name).is_file() for folder in folders)] == []


def test_every_document_that_the_code_names_is_there():
    folders = ("llm_fp8", "scripts", "benchmarks", "configs", "examples", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    files += [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    named = {(name, path) for path in files for name in re.findall(r"\bdocs/\w+\.md\b", path.read_text())}
    assert len(named) > 10
    assert [f"{path.relative_to(ROOT)}: {name}" for name, path in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_training_command_parses(document):
    for command in training_commands(document):
        config_of(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_option_is_one_of_the_program_it_is_said_of(document):
    assert wrong_options(document.read_text()) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Give `--use_tea`, `--use_te` or `--adam_*`.", ["--use_tea"]),
        ("Give `--adma_*`.", ["--adma_*"]),
        ("`--rounds 3`", ["--rounds"]),
        ("`scripts/benchmark.py` takes `--rounds 3`.\n\n## Next\n\n`--rounds`", ["--rounds"]),
        ("`scripts/benchmark.py --rounds 3 --use_te`", ["--use_te"]),
        ("```bash\npython scripts/memory.py --gpus 2 \\\n  --num_gpus 2  # --any\n```", ["--gpus"]),
        ("`llm-fp8 diagnose --use_te --quality --rounds 3`", ["--rounds"]),
        ("`torchrun --nproc_per_nodes=2 train_multi_gpu.py --fp8_params`", ["--nproc_per_nodes"]),
        ("`torchrun --max_restart=3`, `torchrun --max_restarts=3`", ["--max_restart"]),
        ("`scripts/launch_multi_node.sh --dry_run --use_tea`", ["--use_tea"]),
    ],
)
def test_a_wrong_option_is_found(text, wrong):
    assert wrong_options(text) == wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_parses(document):
    for command in command_lines(document.read_text()):
        parse_command(command)


@pytest.mark.parametrize(
    "command",
    [
        "python scripts/evaluate.py --models runs/x",
        "python scripts/evaluate.py --num_problems 5",
        "llm-fp8 memory --num_gpus two",
        "llm-fp8 diagnose --quality --use_tea",
    ],
)
def test_a_command_that_does_not_parse_is_found(command):
    assert command_lines(f"```bash\n{command}\n```\n") == [command]
    with pytest.raises(SystemExit, match="2"):
        parse_command(command)


def test_the_readmes_commands_are_found():
    assert [script_of(command) for command in training_commands(README)] == ["train_fp8.py"] * 5 + [
        "train_multi_gpu.py"
    ]


def test_the_gpu_test_runs_every_training_command_of_the_readme():
    meant = [config_of(RUN[name]) for name in (*ON_ONE_GPU, ON_TWO_GPUS)]
    assert [command for command in training_commands(README) if config_of(command) not in meant] == []


def too_wide(document: Path) -> list[str]:
    """Lines of prose above 100 columns: neither of code, of a table, nor one that cannot be broken."""
    lines = without_code(document.read_text()).splitlines()
    return [line for line in lines if len(line) > 100 and not line.startswith("|") and len(line.split()) > 1]


def test_the_documents_stay_short_and_narrow():
    words = {path: len(path.read_text().split()) for path in [README, *(ROOT / "docs").glob("*.md")]}
    assert words.pop(README) <= 1_100
    assert sum(words.values()) <= 16_000, {path.name: number for path, number in words.items()}
    found = {path.name: lines for path in [README, *words] if (lines := too_wide(path))}
    assert found == {}
