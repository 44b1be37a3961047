"""The parameter map and its use, without Transformer Engine: pure tensor code."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llm_fp8.models import ARCHITECTURES, bundled_architectures
from llm_fp8.models.weights import LocalShard
from te_llama import UnsupportedArchitecture, decoder_spec, in_hf_layout, parameter_map
from tests.support.families import FAMILIES, family_config


def hf_tensors(config):
    """A real Hugging Face model's tensors, every one random."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return {name: p.detach() for name, p in model.named_parameters()}


def empty_te_parameters(spec):
    return {
        name: torch.full((parts[-1].stop, *parts[0].shape[1:]), float("nan"))
        for name, parts in parameter_map(spec).items()
    }


def fill(spec, tensors, shards):
    for name, parts in parameter_map(spec).items():
        for part in reversed(parts):  # any order
            shards[name].fill(part, tensors[part.hf_name])


def in_one_shard(te_parameters):
    return {name: LocalShard(parameter, 0) for name, parameter in te_parameters.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_hf_tensor_is_used_once_and_every_te_parameter_is_filled(family):
    config = family_config(family)
    spec, tensors = decoder_spec(config), hf_tensors(config)
    te_parameters = empty_te_parameters(spec)
    fill(spec, tensors, in_one_shard(te_parameters))
    assert not any(parameter.isnan().any() for parameter in te_parameters.values())
    back = in_hf_layout(parameter_map(spec), te_parameters)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    num_used = [part.hf_name for parts in parameter_map(spec).values() for part in parts]
    assert len(num_used) == len(set(num_used))


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_shards_add_up_to_the_unsharded_parameters(num_blocks):
    """Blocks that cross the borders of q, k and v, that lie inside one of them, and that are empty."""
    config = family_config("qwen2_qkv_bias_tied")
    spec, tensors = decoder_spec(config), hf_tensors(config)
    whole, in_blocks = empty_te_parameters(spec), empty_te_parameters(spec)
    fill(spec, tensors, in_one_shard(whole))
    for number in range(num_blocks):
        blocks = {}
        for name, parameter in in_blocks.items():
            rows = parameter.shape[0]
            start, stop = (min(-(-rows // num_blocks) * border, rows) for border in (number, number + 1))
            blocks[name] = LocalShard(parameter[start:stop], start)
        fill(spec, tensors, blocks)
    assert all(torch.equal(in_blocks[name], parameter) for name, parameter in whole.items())


@pytest.mark.parametrize("name", bundled_architectures())
def test_map_covers_the_bundled_architectures(name):
    config = AutoConfig.from_pretrained(ARCHITECTURES / f"{name}.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {key: tuple(p.shape) for key, p in model.named_parameters()}
    mapped = {part.hf_name: part.shape for parts in parameter_map(decoder_spec(config)).values() for part in parts}
    assert mapped == expected


def test_published_parameter_counts():
    """The sizes their publishers state, which a wrong width or a forgotten bias would change."""
    counts = {
        "Llama-3.2-1B": 1_235_814_400,
        "Llama-3.2-3B": 3_212_749_824,
        "Llama-3.1-8B": 8_030_261_248,
        "Qwen2.5-1.5B": 1_543_714_304,
        "Qwen2.5-7B": 7_615_616_512,
        "Qwen2.5-14B": 14_770_033_664,
        "Qwen3-8B": 8_190_735_360,
        "Qwen3-32B": 32_762_123_264,
        "Llama-3.1-70B": 70_553_706_496,
    }
    for name, count in counts.items():
        spec = decoder_spec(AutoConfig.from_pretrained(ARCHITECTURES / f"{name}.json"))
        shapes = [part.shape for parts in parameter_map(spec).values() for part in parts]
        assert sum(torch.Size(shape).numel() for shape in shapes) == count, name


def test_windows_are_read_per_layer():
    assert decoder_spec(family_config("mistral_window")).windows == (24, 24, 24)
    assert decoder_spec(family_config("qwen2_window")).windows == (None, 24, 24)
    assert decoder_spec(family_config("qwen2_qkv_bias_tied")).windows == (None, None, None)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_type 'dynamic'"),
    ],
)
def test_what_te_cannot_express_is_named(entries, named):
    config = family_config("llama2")
    config = type(config)(**{**config.to_dict(), "rope_parameters": None, **entries})
    with pytest.raises(UnsupportedArchitecture, match=named):
        decoder_spec(config)


def test_other_model_types_are_named():
    with pytest.raises(UnsupportedArchitecture, match="gpt2"):
        decoder_spec(AutoConfig.for_model("gpt2"))
