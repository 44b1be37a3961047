"""The TE decoder with stand-in modules: its parameter map, and its results compared with Hugging Face's."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import te_llama
from llm_fp8.models import BUNDLED
from llm_fp8.models.build import LocalShard, fill_weights
from llm_fp8.models.model import Model
from llm_fp8.models.parity import check_parity
from llm_fp8.step.loss_model import TrainingModel
from te_llama import (
    UnsupportedArchitecture,
    build_te_model,
    decoder_sizes,
    in_hf_layout,
    layer_specs,
    linear_rows,
    parameter_map,
)
from tests.support.batches import S, packed_batch, padded_batch
from tests.support.families import FAMILIES, family_config, te_model
from tests.support.small import LONGROPE, length_config
from tests.support.stand_in_te import install_stand_in

NO_MASK = torch.empty(0, 0, 0, 0)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    install_stand_in(monkeypatch)


def te_parameter_map(config):
    return parameter_map(build_te_model(config, torch.float32, "meta", table_device="cpu"))


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_filled_shards_equal_slices_of_stacked_tensors(num_blocks):
    """A shard of the fused q, k and v weight may span several of the three, lie inside one of them, or be empty."""
    entries = te_parameter_map(family_config("qwen2_qkv_bias_tied"))
    tensors = {part.hf_name: torch.randn(part.shape) for parts in entries.values() for part in parts}
    for parts in entries.values():
        expected = torch.cat([tensors[part.hf_name] for part in parts])
        filled, rows = torch.full_like(expected, float("nan")), len(expected)
        for number in range(num_blocks):
            start, stop = (min(-(-rows // num_blocks) * border, rows) for border in (number, number + 1))
            for part in reversed(parts):  # the order does not matter
                LocalShard(filled[start:stop], start).fill(part, tensors[part.hf_name])
        assert torch.equal(filled, expected)


PUBLISHED_COUNTS = {
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-70B": 70_553_706_496,
}


@pytest.mark.parametrize("name", BUNDLED)
def test_map_covers_bundled_architectures(name):
    config = AutoConfig.from_pretrained(BUNDLED[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {key: tuple(p.shape) for key, p in model.named_parameters()}
    mapped = {part.hf_name: part.shape for parts in te_parameter_map(config).values() for part in parts}
    assert mapped == expected
    count = sum(torch.Size(shape).numel() for shape in mapped.values())
    assert count == PUBLISHED_COUNTS.get(name, count)


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("llama2", dict(hidden_act="gelu"), "hidden_act"),
        ("llama2", dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_type 'dynamic'"),
        ("gemma3_text", dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_type 'dynamic'"),
        ("gemma3_text", dict(hidden_activation="gelu"), "hidden_act"),
        ("gemma3_text", dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        ("gemma3_text", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        ("llama2", dict(rope_parameters=dict(LONGROPE, partial_rotary_factor=0.5)), "partial_rotary_factor"),
        ("ministral3_scores", dict(rope_parameters=LONGROPE), "above 64"),
        ("ministral3_scores", dict(rope_parameters=dict(LONGROPE, rope_type="yarn", llama_4_scaling_beta=0.1)), "64"),
    ],
)
def test_unsupported_config_entry_is_refused_by_name(family, entries, message):
    config = family_config(family)
    config = type(config)(**{**config.to_dict(), "rope_parameters": None, **entries})
    with pytest.raises(UnsupportedArchitecture, match=message):
        layer_specs(config, num_tokens=65)


def test_families_whose_attention_has_no_windows_ignore_the_entry():
    sizes = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)
    sizes |= dict(use_sliding_window=True)
    windows = {
        name: [spec.window for spec in layer_specs(AutoConfig.for_model(name, **sizes))]
        for name in ("llama", "ministral3", "qwen3")
    }
    assert windows == {"llama": [None, None], "ministral3": [8, 8], "qwen3": [8, None]}


def test_unsupported_model_type_is_refused_by_name():
    with pytest.raises(UnsupportedArchitecture, match="gpt2"):
        layer_specs(AutoConfig.for_model("gpt2"))


def te_and_hf(folder, family, **layers):
    """Return the TE decoder, Hugging Face's decoder with the same random weights, and the `Model` of the TE decoder."""
    config = family_config(family, hidden_size=64, intermediate_size=96, num_hidden_layers=4)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2 if parameter.ndim == 1 else 0.1)
            if name.endswith("A_log"):  # long memory, since gradients of fast decays are mostly rounding errors
                parameter.sub_(4)
    hf.save_pretrained(folder)
    model = te_model(folder, **layers)
    return model.module, hf, model


def logits_and_gradients(model, ids, bounds, **arguments):
    """Return the logits and the gradients of the summed log probability of all next tokens. Consecutive `bounds` are
    the start and the end of a document in `ids`; `arguments` describe the documents to the model.
    """
    model.zero_grad()
    logits = model(input_ids=ids, **arguments).logits[0]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        logits[start : stop - 1].log_softmax(-1).gather(1, ids[0, start + 1 : stop, None]).sum().backward(
            retain_graph=True
        )
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("unfused_mlp", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_match_hugging_face_and_saved_model_loads_there(tmp_path, family, unfused_mlp):
    """Some documents are shorter than the attention window, others are longer. The test also generates tokens."""
    te, hf, stored = te_and_hf(tmp_path / "source", family, unfused_mlp=unfused_mlp)
    ids = torch.randint(3, 1024, (1, 90), generator=torch.Generator().manual_seed(1))
    bounds = [0, 17, 30, 90]
    documents = dict(cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32), max_length_q=60, attention_mask=NO_MASK)
    logits, gradients = logits_and_gradients(te, ids, bounds, **documents)
    alone = [logits_and_gradients(hf, ids[:, a:b], [0, b - a]) for a, b in zip(bounds, bounds[1:], strict=False)]
    torch.testing.assert_close(logits, torch.cat([each for each, _ in alone]), rtol=1e-5, atol=1e-5)
    for name, gradient in in_hf_layout(parameter_map(te), gradients).items():
        expected = sum(each[name] for _, each in alone)
        assert (gradient - expected).norm() <= 2e-5 * expected.norm(), name

    check_parity(stored, te.model.layers, packed_batch("cpu"), S, torch.float32)
    te_loss, hf_loss = (TrainingModel(model, length_config(S), torch.float32, "rows") for model in (te, hf))
    losses = [te_loss(batch)[0] for batch in (packed_batch("cpu"), padded_batch("cpu"))]
    torch.testing.assert_close(losses, [hf_loss(padded_batch("cpu"))[0]] * 2, rtol=1e-5, atol=0)
    mask = torch.ones(1, 40, dtype=torch.long)
    prompt = dict(input_ids=ids[:, 30:70], attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(te.generate(**prompt), hf.generate(**prompt))
    te.save_pretrained(tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(back) is type(hf)
    assert all(torch.equal(p, dict(hf.named_parameters())[name]) for name, p in back.named_parameters())


@pytest.mark.parametrize("family", ["llama2", "gemma3_text"])
def test_layer_without_spec_remains_hugging_faces(tmp_path, family, monkeypatch):
    family_specs = te_llama.FAMILIES[family_config(family).model_type]

    def every_second_spec(config):
        return tuple(spec if layer % 2 else None for layer, spec in enumerate(family_specs(config)))

    monkeypatch.setitem(te_llama.FAMILIES, family_config(family).model_type, every_second_spec)
    te, hf, stored = te_and_hf(tmp_path, family)
    kinds = [isinstance(layer, te_llama.TEDecoderLayer) for layer in te.model.layers]
    assert kinds == [False, True, False, True]
    ids = torch.randint(3, 1024, (2, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(te(ids).logits, hf(ids).logits, rtol=1e-5, atol=1e-5)
    mixed_model, hf_model = (TrainingModel(model, length_config(S), torch.float32, "rows") for model in (te, hf))
    for batch in (packed_batch("cpu"), padded_batch("cpu")):
        torch.testing.assert_close(mixed_model(batch)[0], hf_model(batch)[0], rtol=1e-5, atol=0)
    weights = in_hf_layout(parameter_map(te), dict(te.named_parameters()))
    assert weights.keys() == dict(hf.named_parameters()).keys()
    report = check_parity(stored, te.model.layers, packed_batch("cpu"), S, torch.float32)
    assert f"{len(weights)} stored tensors" in report and "of 2 layers" in report


DROPOUTS = [("seed_oss", "residual_dropout"), ("phi3_partial_rope", "resid_pdrop")]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("family", "entry"), DROPOUTS)
def test_residual_dropout_equals_hugging_faces(tmp_path, family, entry, trains, monkeypatch):
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family] | {entry: 0.3})
    logits = []
    for model in te_and_hf(tmp_path, family)[:2]:
        torch.manual_seed(0)
        logits.append(model.train(trains)(torch.arange(3, 43)[None]).logits)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_linear_rows_are_those_of_the_linear_weights():
    """A weight of several parts has the rows of all of them."""
    config = family_config("llama3_rope_gqa")
    weights = [
        p for name, p in build_te_model(config, torch.float32, "meta").model.layers.named_parameters() if p.ndim > 1
    ]
    assert linear_rows(decoder_sizes(config)) == {len(weight) for weight in weights}


def test_initial_norms_and_biases_equal_hugging_faces():
    for family in FAMILIES:
        config = family_config(family, hidden_size=64, intermediate_size=96)
        hf, te = AutoModelForCausalLM.from_config(config), build_te_model(config, torch.float32, "cpu")
        fill_weights(Model(te))
        weights = in_hf_layout(parameter_map(te), dict(te.named_parameters()))
        for name, parameter in hf.named_parameters():
            is_drawn = parameter.ndim > 1 or name.endswith("A_log")
            assert is_drawn or torch.equal(weights[name], parameter), f"{family} {name}"
