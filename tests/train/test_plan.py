"""What options cannot go with a TE decoder."""

from __future__ import annotations

import dataclasses

import pytest
from transformers import LlamaConfig

from llm_fp8.config.parser import parse_config
from llm_fp8.train.plan import check_te_decoder
from llm_fp8.utils.errors import UserError
from te_llama import decoder_sizes

FP8_PARAMS = "--mixed_precision=fp8 --use_te --fp8_params"


@pytest.mark.parametrize(
    ("words", "decoder", "num_shards", "named"),
    [
        ("--use_te --context_parallel_size 2", {"windows": (None, 64)}, 4, "--context_parallel_size"),
        ("--use_te --cuda_graphs", {"attention_dropout": 0.1}, 4, "--cuda_graphs"),
        (FP8_PARAMS, {}, 7, "--fp8_params"),
    ],
)
def test_what_a_decoder_cannot_do(words, decoder, num_shards, named):
    config = parse_config(words.split(), parallel=True)
    spec = decoder_sizes(LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4))
    check_te_decoder(config, spec, num_shards=4)
    with pytest.raises(UserError, match=named):
        check_te_decoder(config, dataclasses.replace(spec, **decoder), num_shards)
