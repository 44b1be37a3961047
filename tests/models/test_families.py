"""Every family that people bring: plain transformers' losses, an export and an adapter that it reads."""

from __future__ import annotations

import pytest

from tests.support.hub_families import FAMILIES, examine, table

IN_BRIEF = ("Llama 3", "Gemma 4", "Qwen3.5-MoE", "Mistral 3", "Nemotron-H", "Apertus")
"""One of each kind; all others are slow."""


@pytest.mark.parametrize(
    "name", [name if name in IN_BRIEF else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_trains_as_in_plain_transformers(tmp_path, name):
    row = examine(name, tmp_path)
    assert name in table([row])
