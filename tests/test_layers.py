"""What the layout holds beyond the import contracts of pyproject.toml, which `scripts/test.sh` checks with
import-linter: the rules of te_llama.py, who imports Transformer Engine, and that tests share through tests/support.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llm_fp8"

BELOW_TE_LLAMA = {"kernels", "config", "utils"}
ABOVE_TE_LLAMA = {"tools", "run", "settle", "step", "distributed", "precision", "models"}
IMPORT_TRANSFORMER_ENGINE = {"te_llama.py", "precision", "step", "distributed", "kernels", "tools"}
IMPORT_TRANSFORMER_ENGINE_IN_UTILS = {"te_internals.py"}


def imported_modules(source: str) -> Iterator[str]:
    """Every module that the code imports, at the top or inside of a function; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            parts = name.values if isinstance(name, ast.JoinedStr) else [name]
            if isinstance(parts[0], ast.Constant):
                yield str(parts[0].value)


@functools.cache
def modules_of(file: Path) -> list[str]:
    """`imported_modules` of a file."""
    return list(imported_modules(file.read_text()))


def room(file: Path) -> str:
    """The room of the package that a file lies in, or the file's own name outside of it."""
    return file.relative_to(PACKAGE).parts[0] if file.is_relative_to(PACKAGE) else file.name


def rooms_that_import(package: str) -> dict[str, set[str]]:
    """Room -> names of its files that import the package."""
    found: dict[str, set[str]] = {}
    for file in [*PACKAGE.rglob("*.py"), ROOT / "te_llama.py"]:
        if any(module.split(".")[0] == package for module in modules_of(file)):
            found.setdefault(room(file), set()).add(file.name)
    return found


def test_te_llama_imports_from_rooms_below_it_alone():
    modules = modules_of(ROOT / "te_llama.py")
    ours = {module.split(".")[1] for module in modules if module.startswith("llm_fp8.")}
    assert ours and ours <= BELOW_TE_LLAMA


@pytest.mark.slow
def test_rooms_above_te_llama_alone_import_it():
    assert set(rooms_that_import("te_llama")) - {"te_llama.py"} <= ABOVE_TE_LLAMA


@pytest.mark.parametrize("package", ["transformer_engine", "transformer_engine_torch"])
def test_transformer_engine_is_imported_in_few_rooms(package):
    rooms = rooms_that_import(package)
    assert rooms.pop("utils", set()) <= IMPORT_TRANSFORMER_ENGINE_IN_UTILS
    assert rooms and set(rooms) <= IMPORT_TRANSFORMER_ENGINE


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
    found = {file.name: names for file in files if (names := private_names(file.read_text()))}
    assert set(found) == {"hf_internals.py", "te_internals.py", "torch_internals.py"}, found


def test_imports_inside_of_functions_are_seen():
    source = 'def f():\n    from a.b import c\n    import d.e\n    importlib.import_module(f"g.h.{name}")\n'
    assert list(imported_modules(source)) == ["a.b", "a.b.c", "d.e", "g.h."]


def test_the_package_imports_neither_scripts_nor_tests():
    for package in ("scripts", "benchmarks", "tests", "examples"):
        assert rooms_that_import(package) == {}


@pytest.mark.slow
def test_no_test_imports_a_test():
    for file in (ROOT / "tests").rglob("*.py"):
        modules = [module for module in modules_of(file) if module.split(".")[0] == "tests"]
        assert [module for module in modules if re.search(r"\.(test_|conftest)", module)] == [], file


def test_the_package_reads_and_starts_nothing_of_benchmarks_and_scripts():
    """A path is put together from its parts, so a part would stand alone in a string. A benchmark starts baselines."""
    for file in set(PACKAGE.rglob("*.py")) - {PACKAGE / "tools" / "bench.py"}:
        constants = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        assert not {"scripts", "benchmarks", "results"} & {value for value in constants if isinstance(value, str)}, file
