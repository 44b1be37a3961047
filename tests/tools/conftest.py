"""Tools called as a user calls them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest


@pytest.fixture
def call_main(monkeypatch):
    """Call the main function of a tool with these words."""

    def call(tool: ModuleType, *words: object) -> int:
        monkeypatch.setattr(sys, "argv", [tool.__name__, *map(str, words)])
        return tool.main()

    return call
