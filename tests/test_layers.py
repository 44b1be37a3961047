"""Checks which modules te_llama.py imports, where private names of libraries occur, and that tests share code through
tests/support only. `scripts/test.sh` checks the order of imports in the package.
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
    """Yield every module that a file imports, also inside functions. For `from a import b`, yield a and a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_te_llama_imports_only_rooms_below_it():
    modules = imported_modules(ROOT / "te_llama.py")
    rooms = {module.split(".")[1] for module in modules if module.startswith("llm_fp8.")}
    assert rooms and rooms <= {"kernels", "mixers", "config", "utils"}


PUBLIC_BUT_UNDERSCORED = {"_replace", "_fields", "_exit", "_actions", "_option_string_actions", "_ArgumentGroup"}
"""Underscored names of the public interfaces of named tuples, os and argparse."""


def private_names(source: str) -> set[str]:
    """Return the private names that the Python code `source` imports, or reads from objects of other modules."""
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
def test_private_names_of_libraries_occur_only_in_internals_modules():
    files = [*PACKAGE.rglob("*.py"), ROOT / "te_llama.py"]
    names_of = {file.name: names for file in files if (names := private_names(file.read_text()))}
    assert set(names_of) == {"hf_internals.py", "te_internals.py", "torch_internals.py"}, names_of


@pytest.mark.slow
def test_no_test_imports_a_test():
    for file in (ROOT / "tests").rglob("*.py"):
        modules = [module for module in imported_modules(file) if module.split(".")[0] == "tests"]
        assert [module for module in modules if re.search(r"\.(test_|conftest)", module)] == [], file


def test_package_does_not_refer_to_scripts_benchmarks_or_results():
    """The test looks for the folders' names as string literals, since code joins paths from parts: ROOT / "scripts"."""
    for file in PACKAGE.rglob("*.py"):
        constants = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        assert not {"scripts", "benchmarks", "results"} & {value for value in constants if isinstance(value, str)}, file
