"""Which tests `scripts/test.sh --quick` leaves out without a mark of their own: those that start processes or train."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FunctionType
from typing import Any

import pytest

SLOW_PARTS = {
    *("subprocess", "multiprocessing", "Popen", "CONTEXT", "start_training", "start_ranks"),
    *("start_process", "on_ranks"),
    *("Forked", "Torchrun", "train", "run_training", "run_as_main", "warm_python", "browser"),
}
"""Modules, functions and fixtures: a test that names one, itself or in what it calls under tests/, is slow."""


def _names(code: CodeType) -> set[str]:
    """Every name in a function and in those that are defined inside of it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


@functools.cache
def _is_slow(function: FunctionType) -> bool:
    """Whether a slow part is reached from the function through functions and classes of the tests."""
    waiting, seen = [function], {function}
    while waiting:
        current = inspect.unwrap(waiting.pop())
        names = _names(current.__code__) | set(inspect.signature(current).parameters)
        if names & SLOW_PARTS:
            return True
        for value in (current.__globals__.get(name) for name in names):
            for called in vars(value).values() if isinstance(value, type) else [value]:
                if isinstance(called, FunctionType) and called.__module__.startswith("tests.") and called not in seen:
                    seen.add(called)
                    waiting.append(called)
    return False


def is_slow(item: Any) -> bool:
    """Whether the test, or a fixture that it takes, reaches a slow part."""
    if not isinstance(item, pytest.Function):
        return False
    fixtures = [given.func for defs in item._fixtureinfo.name2fixturedefs.values() for given in defs]
    functions = [item.function, *(func for func in fixtures if getattr(func, "__module__", "").startswith("tests."))]
    return bool(SLOW_PARTS & set(item.fixturenames)) or any(
        _is_slow(inspect.unwrap(function)) for function in functions if isinstance(function, FunctionType)
    )
