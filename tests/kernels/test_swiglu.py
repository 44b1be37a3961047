"""The entry in Transformer Engine's table of activations; its kernel is tested on a GPU."""

from __future__ import annotations

import pytest
from torch import nn

from llm_fp8.kernels.swiglu import NAME, fuse_swiglu_backward
from tests.support.stand_in_te import activations, dswiglu, install_stand_in, swiglu


@pytest.fixture
def table(monkeypatch):
    """Transformer Engine's module that holds the table, for this test."""
    install_stand_in(monkeypatch)
    from transformer_engine.pytorch.module import layernorm_mlp

    return layernorm_mlp


def mlp() -> nn.Module:
    module = nn.Module()
    module.activation = "swiglu"
    return module


def test_the_name_is_added_and_the_others_stay(table):
    first, second = mlp(), mlp()
    fuse_swiglu_backward(first)
    with_ours = table._get_act_func_supported_list
    fuse_swiglu_backward(second)
    assert table._get_act_func_supported_list is with_ours
    assert first.activation == second.activation == NAME
    for recipe in (None, object()):
        entries = dict(with_ours(recipe))
        forward, backward, cast = entries.pop(NAME)
        assert (forward, backward) == (swiglu, dswiglu)
        assert (cast is None) == (recipe is None)
        assert entries == activations(recipe)
