"""What the layout holds beyond the import contracts of pyproject.toml, which `scripts/test.sh` checks with
import-linter: what te_llama.py imports, and that tests share through tests/support.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llm_fp8"


def imported_modules(file: Path) -> Iterator[str]:
    """Every module that a file imports, at the top or inside of a function; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_te_llama_imports_from_rooms_below_it_alone():
    modules = imported_modules(ROOT / "te_llama.py")
    ours = {module.split(".")[1] for module in modules if module.startswith("llm_fp8.")}
    assert ours and ours <= {"kernels", "config", "utils"}


PUBLIC_BUT_UNDERSCORED = {"_replace", "_fields", "_exit", "_actions", "_option_string_actions", "_ArgumentGroup"}
"""Of named tuples, os and argparse."""


def private_names(source: str) -> set[str]:
    """Private names that the code reads from something else than `self` or a class of its own, or imports."""
    names, defined = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            is_own |= isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
            (defined if is_own else names).add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            defined.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("llm_fp8"):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            names |= {str(part.value) for part in node.args[1:2] if isinstance(part, ast.Constant)}
    private = {name for name in names - defined if re.match("_[^_]", name) and not name.startswith("_foreach_")}
    return private - PUBLIC_BUT_UNDERSCORED


@pytest.mark.slow
def test_private_names_of_libraries_stand_in_the_internals_alone():
    files = [*PACKAGE.rglob("*.py"), ROOT / "te_llama.py"]
    names_of = {file.name: names for file in files if (names := private_names(file.read_text()))}
    assert set(names_of) == {"hf_internals.py", "te_internals.py", "torch_internals.py"}, names_of


@pytest.mark.slow
def test_no_test_imports_a_test():
    for file in (ROOT / "tests").rglob("*.py"):
        modules = [module for module in imported_modules(file) if module.split(".")[0] == "tests"]
        assert [module for module in modules if re.search(r"\.(test_|conftest)", module)] == [], file


def test_the_package_reads_and_starts_nothing_of_benchmarks_and_scripts():
    """A path is put together from its parts, so a part would stand alone in a string."""
    for file in PACKAGE.rglob("*.py"):
        constants = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        assert not {"scripts", "benchmarks", "results"} & {value for value in constants if isinstance(value, str)}, file
