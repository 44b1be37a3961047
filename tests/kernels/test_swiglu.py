"""The entry of our SwiGLU in Transformer Engine's table of activations. test_swiglu_gpu.py tests the kernel."""

from __future__ import annotations

import pytest
from torch import nn

from llm_fp8.kernels.swiglu import NAME, fuse_swiglu_backward
from tests.support.stand_in_te import activations, dswiglu, install_stand_in, swiglu


@pytest.fixture
def table(monkeypatch):
    """Install the stand-in for Transformer Engine and return the module in which TE keeps its table of activations."""
    install_stand_in(monkeypatch)
    from transformer_engine.pytorch.module import layernorm_mlp

    return layernorm_mlp


def mlp() -> nn.Module:
    module = nn.Module()
    module.activation = "swiglu"
    return module


def test_entry_is_added_once_and_the_other_entries_are_unchanged(table):
    first, second = mlp(), mlp()
    fuse_swiglu_backward(first)
    extended_table = table._get_act_func_supported_list
    fuse_swiglu_backward(second)
    assert table._get_act_func_supported_list is extended_table
    assert first.activation == second.activation == NAME
    for recipe in (None, object()):
        entries = dict(extended_table(recipe))
        forward, backward, cast = entries.pop(NAME)
        assert (forward, backward) == (swiglu, dswiglu)
        assert (cast is None) == (recipe is None)
        assert entries == activations(recipe)
