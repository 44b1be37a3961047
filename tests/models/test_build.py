"""Tests of loading models from folders in the layouts that the hub has, of exports, and of checks before a run."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import te_llama
from llm_fp8.config.options import ModelConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.data.collate import Batch
from llm_fp8.models import BUNDLED
from llm_fp8.models.build import allocate_and_fill, build_structure, decoder_size, model_from_config
from llm_fp8.models.export import export_hf
from llm_fp8.models.model import decoder_layers
from llm_fp8.models.source import load_config, load_tokenizer, require_positions, resolve_source, stored_dtype
from llm_fp8.settle.plan import plan_run
from llm_fp8.settle.probe import probe
from llm_fp8.step.loss_model import TrainingModel
from llm_fp8.utils import hf_internals, te_internals, torch_internals
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.hf_internals import chosen_attention
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.families import MOE_FAMILIES
from tests.support.small import (
    CARD,
    assert_same_bits,
    built_model,
    length_config,
    stored_weights,
    tiny_config,
    train,
    write_model,
)

CPU = torch.device("cpu")


def export(name: str, folder: Path) -> None:
    """Load the model from the folder `name` and export it unchanged to `folder`."""
    config = ModelConfig(model_name=name)
    source = resolve_source(config)
    tokenizer, _ = load_tokenizer(config, source)
    dtype = stored_dtype(load_config(source), None, default=torch.float32)
    export_hf(built_model(name), tokenizer, folder, dtype=dtype, card=CARD)


@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_export_without_training_is_bitwise_equal_to_source(tmp_path, dtype, tied, max_shard_size):
    source = write_model(tmp_path / "source", dtype, max_shard_size, tie_word_embeddings=tied)
    assert (Path(source) / "model.safetensors.index.json").exists() == (max_shard_size != "1GB")
    export(source, tmp_path / "final")
    assert_same_bits(stored_weights(source), stored_weights(tmp_path / "final"))
    assert ("lm_head.weight" in stored_weights(tmp_path / "final")) != tied
    assert json.loads((tmp_path / "final" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_export_keeps_the_dtype_of_each_stored_tensor_and_those_that_transformers_ignores(tmp_path):
    shape = dict(hidden_size=32, num_hidden_layers=2, head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8)
    shape |= dict(linear_num_key_heads=2, linear_num_value_heads=4, layer_types=["linear_attention", "full_attention"])
    source = write_model(tmp_path / "source", torch.bfloat16, model_type="qwen3_5_text", **shape)
    weights = stored_weights(source) | {"mtp.fc.weight": torch.randn(4, 8).bfloat16()}
    weights = {name: tensor.float() + 1e-4 if "A_log" in name else tensor for name, tensor in weights.items()}
    save_file(weights, Path(source) / "model.safetensors", metadata={"format": "pt"})
    export(source, tmp_path / "final")
    assert weights["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert_same_bits(stored_weights(tmp_path / "final"), weights)
    assert "mtp.fc.weight (1 tensors" in built_model(source).describe_left_out()


@pytest.mark.parametrize("stated", [None, "bfloat16"])
def test_stored_weights_decide_about_the_dtype(tmp_path, stated):
    source = write_model(tmp_path / "source", torch.float32)
    path = Path(source) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": stated, "torch_dtype": stated}))
    plan = plan_run(parse_config([f"--model_name={source}", "--mixed_precision=bf16"]), LaunchRanks())
    assert plan.export_dtype == torch.float32 and plan.stores_lower_bits


def test_model_safetensors_has_precedence_over_index_as_in_transformers(tmp_path):
    folder = write_model(tmp_path, max_shard_size="40KB")
    other = {name: tensor + 1 for name, tensor in stored_weights(folder).items()}
    save_file(other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same_bits(built_model(folder).module.state_dict(), theirs.state_dict())
    assert_same_bits(theirs.state_dict(), other)


def test_export_replaces_folder_and_writes_all_files(tmp_path, tiny_model):
    export(tiny_model, tmp_path / "final")
    (tmp_path / "final" / "from an earlier run").touch()
    export(tiny_model, tmp_path / "final")
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert "from an earlier run" not in names
    assert [path.name for path in tmp_path.iterdir()] == ["final"], "no temporary folder remains"
    assert "| optimizer steps | 0 |" in (tmp_path / "final" / "README.md").read_text()
    original, exported = AutoTokenizer.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tmp_path / "final")
    text = "Compute 2730 + 8130 - 5227."
    assert original(text).input_ids == exported(text).input_ids


def test_export_that_cannot_replace_a_folder_keeps_it(tmp_path, tiny_model, monkeypatch):
    export(tiny_model, tmp_path / "final")
    before = stored_weights(tmp_path / "final")
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=OSError("held open")))
    with pytest.raises(UserError, match="final.*held open"):
        export(tiny_model, tmp_path / "final")
    assert_same_bits(stored_weights(tmp_path / "final"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_5_moe_text", "nemotron_h"])
def test_random_weights_have_the_distribution_of_transformers(kind):
    torch.manual_seed(0)
    entries = MOE_FAMILIES.get(kind, {"model_type": kind}) | {
        "vocab_size": 2**14,
        "tie_word_embeddings": kind == "llama",
    }
    config, generator = tiny_config(**entries), torch.Generator().manual_seed(5)
    theirs = dict(AutoModelForCausalLM.from_config(copy.deepcopy(config)).named_parameters())
    model = build_structure(ModelConfig(), config, None, parameter_dtype=torch.float32, device=CPU)
    allocate_and_fill(model, CPU, seed=5)
    for name, ours in model.module.named_parameters():
        expected, actual = (torch.stack(torch.std_mean(values, correction=0)) for values in (theirs[name], ours))
        if expected[0] == 0:
            assert torch.equal(ours, theirs[name]), name
        elif ours.numel() > 200:
            torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.2 * float(expected[0]))
        assert (actual[0] > 0) == (expected[0] > 0), name
        if kind == "llama" and ours.ndim > 1:
            assert torch.equal(ours, torch.empty(ours.shape).normal_(0.0, 0.02, generator=generator)), name


def test_plain_run_survives_renamed_private_names(tmp_path, tiny_model, rows, monkeypatch):
    """The run must succeed although each function that uses private names raises or finds no such attribute."""

    def renamed(*_: object, **__: object) -> None:
        raise AttributeError("the private name was renamed")

    internals = {
        hf_internals: "grouped_linear gated renaming_on_load fresh_accelerate",
        te_internals: "keep_weight_casts add_activation defer_scale_updates update_scales attention_backend "
        " make_rowwise_only",
        torch_internals: "compile_all_kinds recompilation_reasons ignore_in_ddp unwrapped_by_torchao fsdp_entries "
        "gathered_parameter",
    }
    for names, module in ((names.split(), module) for module, names in internals.items()):
        for function in (getattr(module, name) for name in names):
            for user in [user for name, user in sys.modules.items() if name.startswith(("llm_fp8", "te_llama"))]:
                for name in [name for name, value in vars(user).items() if value is function]:
                    monkeypatch.setattr(user, name, renamed)
    monkeypatch.setattr(hf_internals, "getattr", lambda owner, name, *default: default[0], raising=False)
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", f"--output_dir={tmp_path}", "--max_steps=1"]
    train(*options, "--max_seq_length=256", "--batch_size=1", "--learning_rate=0", "--mixed_precision=no")
    assert_same_bits(stored_weights(tmp_path / "final"), stored_weights(tiny_model))


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_architecture_needs_no_hub(name):
    options = ModelConfig(model_name=f"somebody/{name}", random_init=True)
    source = resolve_source(options)
    config = load_config(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert source.is_random and len(decoder_layers(model)) == config.num_hidden_layers
    tokenizer, note = load_tokenizer(options, source)
    assert len(tokenizer) <= config.vocab_size and "--random_init" in str(note)


def test_attention_implementation_follows_option_and_model(tiny_model):
    assert built_model(tiny_model, attn_implementation="eager").module.config._attn_implementation == "eager"
    assert built_model(tiny_model).module.config._attn_implementation == "sdpa"
    bloom = model_from_config(tiny_config("bloom")).module
    assert chosen_attention(bloom.config) == "eager", "bloom has no other implementation"


@pytest.mark.parametrize(
    "model_type",
    ["llama", "gpt2", "gpt_neox", "phi3", "olmo2", "gemma2", "biogpt", "bloom", "falcon", "xglm", "openai-gpt"],
)
def test_packing_is_refused_for_models_that_mix_documents(model_type):
    hf_config = tiny_config(model_type)
    torch.manual_seed(0)
    decoder = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval().base_model
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        ids, positions = torch.randint(3, 1024, (1, 12)), torch.cat([torch.arange(5), torch.arange(7)])[None]
        packed = decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[:, 5:]
        alone = decoder(input_ids=ids[:, 5:], position_ids=positions[:, 5:], use_cache=False).last_hidden_state
    separates_documents = torch.allclose(packed, alone, atol=1e-4)
    if separates_documents:
        assert probe(parse_config(["--packing"]), hf_config, CPU, torch.float32) == "rows"
    else:
        with pytest.raises(UserError, match="drop --packing"):
            probe(parse_config(["--packing"]), hf_config, CPU, torch.float32)
        assert probe(parse_config([]), hf_config, CPU, torch.float32) is None


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("roberta", {"is_decoder": True, "intermediate_size": 64}), ("phi", {"intermediate_size": 64})],
    ids=["no list of layers", "lm_head with a bias"],
)
def test_untrainable_model_is_refused(kind, sizes):
    sizes |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with pytest.raises(UserError, match="--model_name"):
        TrainingModel(model, length_config(16), torch.float32)


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "biogpt", "phi3", "olmo2", "qwen3"])
def test_logits_and_size_of_other_architectures(model_type):
    wide_heads = {"head_dim": 24, "num_key_value_heads": 1} if model_type == "qwen3" else {}
    config = tiny_config(model_type, **wide_heads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(1, 96, (2, 16))
    with torch.no_grad():
        training_model = TrainingModel(model, length_config(16), torch.float32)
        hidden = training_model.decode(ids, position_ids=torch.arange(16).expand(2, -1))
        assert torch.allclose(hidden @ model.get_output_embeddings().weight.T, model(input_ids=ids).logits, atol=1e-5)
    size = decoder_size(config)
    embeddings = {id(module) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [
        module.weight for module in model.modules() if hasattr(module, "weight") and id(module) not in embeddings
    ]
    assert size.num_linear_parameters == sum(weight.numel() for weight in matrices if weight.dim() == 2)
    assert (size.num_layers, size.attention_width) == (2, 48 if wide_heads else 32)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.0625}),
        ("gemma2", {"final_logit_softcapping": 3.0, "tie_word_embeddings": True}),
        ("falcon_h1", {"lm_head_multiplier": 0.5, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}),
    ],
)
def test_loss_includes_scaling_and_softcapping_of_logits(model_type, changes):
    hf_config = tiny_config(model_type, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config)
    model.get_output_embeddings().weight.data.mul_(10)
    ids, labels = torch.randint(3, 1024, (2, 24)), torch.randint(3, 1024, (2, 24))
    logits = model(input_ids=ids).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected_gradient = torch.autograd.grad(expected, model.get_input_embeddings().weight)[0]
    batch = Batch(ids, labels, torch.arange(24).expand(2, -1), torch.ones_like(ids), None, 24, 48, 48, 48, 1152, (0, 1))
    loss, _ = TrainingModel(model, length_config(24), torch.float32)(batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, model.get_input_embeddings().weight)[0], expected_gradient)
    assert probe(parse_config([]), hf_config, CPU, torch.float32) is None


def test_unsupported_softcapping_of_logits_is_refused(monkeypatch):
    monkeypatch.setattr("llm_fp8.step.loss_model._SOFTCAPS", ())
    with pytest.raises(UserError, match="--model_name"):
        probe(parse_config([]), tiny_config("gemma2", final_logit_softcapping=3.0), CPU, torch.float32)


@pytest.mark.parametrize(
    ("scaling", "allowed"),
    [
        ({}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}, 384),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_maximum_sequence_length_follows_rope_scaling(scaling, allowed):
    hf_config = tiny_config("llama", rope_scaling=scaling or None, max_position_embeddings=128)
    require_positions(hf_config, allowed, "a model", "--max_seq_length")
    with pytest.raises(UserError, match=f"--max_seq_length {allowed + 1}"):
        require_positions(hf_config, allowed + 1, "a model", "--max_seq_length")
    angles = te_llama.RotaryTable(hf_config, LlamaRotaryEmbedding, CPU).angles[None]
    assert len(angles) == allowed, "the TE decoder has a row per position"
    linear = {"rope_type": "linear", "factor": 8.0}
    gemma = tiny_config("gemma3_text", rope_scaling=linear, max_position_embeddings=128)
    assert te_llama.num_positions(gemma) == 128, "Gemma's max_position_embeddings include the scaling"
