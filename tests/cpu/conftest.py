"""What several files of CPU tests train on."""

from __future__ import annotations

import pytest

from tests.small import write_model, write_rows


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with weights."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A jsonl file of 64 short problems."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 64)
